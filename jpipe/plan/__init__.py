"""How to cut a model into stages: pure functions from costs to boundaries."""

from jpipe.plan.min_max import min_max

__all__ = ["min_max"]
