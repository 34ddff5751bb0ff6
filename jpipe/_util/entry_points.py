"""Functions of packages that stand above `Pipeline`, by name.

`jpipe.plan` imports `jpipe.pipeline`, so the pipeline cannot import the planner. It offers two of its
functions all the same: `Pipeline.profile`, and `boundaries="time"` or `"memory"`. They are named here as
text, as a package names its entry points, and loaded when they are called.
"""

import importlib
from collections.abc import Callable

ENTRY_POINTS = {
    "profile": "jpipe.plan.pipelines:profile_pipeline",
    "boundaries by flops": "jpipe.costs:boundaries_by_flops",
    "boundaries by time": "jpipe.plan.pipelines:boundaries_by_time",
    "boundaries by memory": "jpipe.plan.pipelines:boundaries_by_memory",
}


def load(name: str) -> Callable:
    """The function that `ENTRY_POINTS` names."""
    module, _, function = ENTRY_POINTS[name].partition(":")
    return getattr(importlib.import_module(module), function)
