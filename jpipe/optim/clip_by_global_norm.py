"""Clipping by the norm of the whole model's gradient."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.optim.declarations import Declaration


class ClipByGlobalNormState(NamedTuple):
    """No numbers: the type says that the transform asks for `global_norm`."""

    declaration = Declaration("clip_by_global_norm", ("global_norm",))


@suggests
def clip_by_global_norm(
    max_norm: chex.Numeric,
) -> optax.GradientTransformationExtraArgs:
    """Scales all gradients down so that their norm over all stages is at most `max_norm`.

    `optax.clip_by_global_norm` takes the norm of the gradients that it sees. On a stage of
    a pipeline these are the gradients of that stage alone. This transform takes the norm
    over all stages, which a pipeline passes as the extra argument `global_norm`. Without
    that argument it computes the same as Optax's.

    Args:
      max_norm: the largest norm allowed, above 0.

    Returns:
      A transformation without numbers in its state. It must come first in the chain,
      because `global_norm` is the norm of the gradient itself.

    Raises:
      ValueError: if `max_norm` is not above 0.

    Example:
      >>> optimizer = optax.chain(clip_by_global_norm(1.0), optax.adamw(3e-4))

    References:
      Pascanu et al., ICML 2013, arXiv:1211.5063, algorithm 1.
    """
    if not max_norm > 0:
        raise ValueError(f"`max_norm` must be above 0, got {shown(max_norm)}: it is the largest norm allowed.")

    def update(updates, state, params=None, *, global_norm=None, **extra_args):
        del params, extra_args
        norm = optax.tree.norm(updates) if global_norm is None else global_norm
        scale = max_norm / jnp.maximum(norm, max_norm)
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: ClipByGlobalNormState(), update)
