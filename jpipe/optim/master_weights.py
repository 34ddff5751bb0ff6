"""Weights of low precision, with a copy in float32 that is updated."""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from jpipe._util.suggest import suggests


class MasterWeightsState(NamedTuple):
    """The copy of the weights in float32, and the state of the optimizer that updates it."""

    weights: optax.Params
    inner: optax.OptState


@suggests
def master_weights(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Updates a copy of the weights in float32; the weights are the copy, rounded to their own dtype.

    Updates that are smaller than the rounding of a weight in bfloat16 or float16 are so not lost. With Adam the state
    takes 12 bytes for each weight (the copy and two moments) and a weight in bfloat16 takes 2, the 14 bytes of
    PatrickStar; `jpipe.Offload` keeps the 12 in host memory. The transform is the whole optimizer: nothing follows
    it in a chain, as it returns what brings the weights to the rounded copy.

    Args:
      optimizer: sees weights and gradients in float32.

    Returns:
      A transformation with a `MasterWeightsState`.

    Raises:
      ValueError: at the update: if there are no weights.

    Example:
      >>> optimizer = master_weights(optax.sgd(1.0))
      >>> weights = jnp.array([1.0], jnp.bfloat16)
      >>> state = optimizer.init(weights)
      >>> for _ in range(4):  # 1 / 512 is below the rounding of bfloat16 at 1
      ...     updates, state = optimizer.update(jnp.full(1, -1 / 512, jnp.bfloat16), state, weights)
      ...     weights = optax.apply_updates(weights, updates)
      >>> weights, state.weights
      (Array([1.00781], dtype=bfloat16), Array([1.0078125], dtype=float32))

    References:
      Micikevicius et al., Mixed precision training, ICLR 2018, section 3.1. Fang et al., PatrickStar, 2021,
      arXiv:2108.05818.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def as_float32(tree: chex.ArrayTree) -> chex.ArrayTree:
        return jax.tree.map(lambda a: a.astype(jnp.float32), tree)

    def init(params: optax.Params) -> MasterWeightsState:
        weights = as_float32(params)
        return MasterWeightsState(weights, optimizer.init(weights))

    def update(
        updates: optax.Updates,
        state: MasterWeightsState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, MasterWeightsState]:
        if params is None:
            raise ValueError("`master_weights` needs the weights: call `update(gradients, state, params)`.")
        steps, inner = optimizer.update(as_float32(updates), state.inner, state.weights, **extra)
        weights = optax.apply_updates(state.weights, steps)

        def change(weight: jax.Array, param: jax.Array) -> jax.Array:
            rounded = weight.astype(param.dtype)
            return rounded.astype(jnp.float32) - param.astype(jnp.float32)

        changes = jax.tree.map(change, weights, params)
        return changes, MasterWeightsState(weights, inner)

    return optax.GradientTransformationExtraArgs(init, update)
