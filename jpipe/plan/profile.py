"""What layers cost: seconds and bytes, measured or counted one kind of layer at a time."""

import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jpipe.backward import LayerProgram, is_inexact
from jpipe.stages import Traced, forward_and_backward


def layer_seconds(traced: Traced, min_seconds: float = 0.1) -> list[float]:
    """Seconds of each layer's forward and backward of one microbatch, on the default device.

    Equal layers are measured once: compiled, run once to warm up, then repeated; the median counts. A layer is
    measured by itself, as torchgpipe's `balance_by_time` does it.

    Args:
      traced: the layers.
      min_seconds: how long a kind is repeated for, at the least; never fewer than 5 times.

    References:
      Kim et al., "torchgpipe", arXiv:2004.09910, section 2.2; `torchgpipe.balance`.
    """
    of_kind = [_seconds(kind, min_seconds) for kind in traced.kinds]
    return [of_kind[k] for k in traced.kind_of_layer]


def _seconds(kind: LayerProgram, min_seconds: float) -> float:
    rng = np.random.default_rng(0)

    def made(a):
        if is_inexact(a):
            return jnp.asarray(rng.normal(size=a.shape), a.dtype)
        return jnp.zeros(a.shape, a.dtype)

    function, avals = forward_and_backward(kind)
    arguments = jax.tree.map(made, avals)
    run = jax.jit(function)
    jax.block_until_ready(run(*arguments))
    seconds: list[float] = []
    while len(seconds) < 5 or sum(seconds) < min_seconds:
        start = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def layer_bytes(
    traced: Traced, optimizer: optax.GradientTransformation, in_flight: int
) -> list[int]:
    """Bytes that each layer keeps on its device: weights, gradients, optimizer state, and stashed activations.

    Args:
      traced: the layers.
      optimizer: the Optax chain.
      in_flight: microbatches whose activations are kept at once.
    """

    def size(tree) -> int:
        return sum(
            int(np.prod(a.shape)) * np.dtype(a.dtype).itemsize
            for a in jax.tree.leaves(tree)
        )

    costs = []
    for layer, k in zip(traced.layers, traced.kind_of_layer):
        inner = jax.eval_shape(optimizer.init, layer.parameters)
        stash = in_flight * size(traced.kinds[k].stash)
        costs.append(2 * size(layer.parameters) + size(inner) + stash)
    return costs


def balance_costs(
    by: str,
    traced: Traced,
    optimizer: optax.GradientTransformation,
    in_flight: int,
) -> Sequence[float]:
    """What each layer costs, counted `by` "flops", "time" or "memory"."""
    if by == "time":
        return layer_seconds(traced)
    if by == "memory":
        return layer_bytes(traced, optimizer, in_flight)
    return traced.flops
