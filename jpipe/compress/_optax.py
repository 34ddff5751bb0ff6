"""Compression of formed gradients, as an Optax transform."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.compress._compressor import Compressor


class CompressionState(NamedTuple):
    """The state of `compress_gradients`.

    Attributes:
      error: the part of the gradients so far that was not sent, like the weights; None without error feedback.
      states: the compressor's states, one for each weight.
    """

    error: Any
    states: tuple


@suggests
def compress_gradients(compressor: Compressor, error_feedback: bool = True) -> optax.GradientTransformation:
    """Replaces each gradient by the array that its compressed form decodes to.

    It shows what a compressor costs in quality, on one device. It sends nothing. To send less, give the compressor
    to `Pipeline(compress_gradients=...)`.

    Args:
      compressor: the compressor; it compresses every gradient by itself.
      error_feedback: whether the lost part is added to the next gradient (Seide et al., 2014;
        Karimireddy et al., arXiv:1901.09847, Algorithm 1).

    Raises:
      ValueError: if `compressor` is none; from `init`, if a gradient cannot be compressed.
    """
    if not isinstance(compressor, Compressor):
        raise ValueError(
            f"`compressor` must be a compressor of `jpipe.compress`, got {shown(compressor)}. For example "
            "`jpipe.compress.PowerSGD(rank=4)`."
        )

    def init(params: Any) -> CompressionState:
        leaves = jax.tree.leaves_with_path(params)
        for path, leaf in leaves:
            compressor.check(leaf, f"the gradient of {jax.tree_util.keystr(path)}")
        error = jax.tree.map(jnp.zeros_like, params) if error_feedback else None
        return CompressionState(error, tuple(compressor.init(a) for _, a in leaves))

    def update(updates: Any, state: CompressionState, params: Any = None) -> tuple:
        del params
        if error_feedback:
            updates = jax.tree.map(jnp.add, updates, state.error)
        leaves, tree = jax.tree.flatten(updates)
        sent, states = [], []
        for x, leaf_state in zip(leaves, state.states, strict=True):
            its = compressor.for_gradient(x)
            wire, leaf_state = its.encode(x, leaf_state)
            sent.append(its.decode(wire, x))
            states.append(leaf_state)
        result = tree.unflatten(sent)
        error = None
        if error_feedback:
            error = jax.tree.map(jnp.subtract, updates, result)
        return result, CompressionState(error, tuple(states))

    return optax.GradientTransformation(init, update)
