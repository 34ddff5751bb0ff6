"""Clipping by the norm of the whole model's gradient."""

import jax
import jax.numpy as jnp
import optax


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Scales all gradients down so that their norm over all stages is at most `max_norm`.

    `optax.clip_by_global_norm` takes the norm of the gradients it sees, which on a
    stage of a pipeline are that stage's alone. This one takes the norm that the engine
    hands to every stage, `global_norm`; outside a pipeline, where nobody hands it one,
    it computes the same as Optax's.

    Args:
      max_norm: the largest norm allowed, above 0.

    Returns:
      A stateless transformation. It must come first in the chain: `global_norm` is the
      norm of the gradient itself.

    Raises:
      ValueError: if `max_norm` is not above 0.

    Example:
      >>> optimizer = optax.chain(clip_by_global_norm(1.0), optax.adamw(3e-4))

    References:
      Pascanu et al., ICML 2013, arXiv:1211.5063, algorithm 1.
    """
    if not max_norm > 0:
        raise ValueError(f"`max_norm` must be above 0, got {max_norm}.")

    def update(updates, state, params=None, *, global_norm=None, **extra_args):
        del params, extra_args
        norm = optax.tree.norm(updates) if global_norm is None else global_norm
        scale = max_norm / jnp.maximum(norm, max_norm)
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), updates), state

    return optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), update
    )
