"""Optax transforms for pipelines. Each works in any Optax chain, with or without the engine."""

from jpipe.optim.clip_by_global_norm import clip_by_global_norm

__all__ = ["clip_by_global_norm"]
