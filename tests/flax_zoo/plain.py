"""Plain training with Flax and Optax: a loop over microbatches that keeps every version of the weights of every stage.

Nothing here imports jpipe. `train` leaves what gradient accumulation in plain JAX leaves: the gradients of a minibatch
are averaged over its microbatches, and mutable state goes from each microbatch to the next. The statistics of a batch
norm move once for each minibatch, as if the layer had seen all its rows at once.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx


@dataclasses.dataclass(frozen=True)
class PlainLayer:
    """A layer of Flax as functions.

    Attributes:
      init: `(key, inputs) -> (params, state)`, nested dicts.
      call: `(params, state, inputs, train) -> (outputs, state)`.
      is_batch_norm: whether its state is statistics of rows.
    """

    init: Callable[..., Any]
    call: Callable[..., Any]
    is_batch_norm: bool = False


def from_nnx(factory: Callable[..., nnx.Module], **options: Any) -> PlainLayer:
    """The layer that `factory(rngs=...)` makes."""

    def split(key):
        module = factory(rngs=nnx.Rngs(key))
        return nnx.split(module, nnx.Param, nnx.RngState, ...)

    def init(key, inputs):
        _, params, _, state = split(key)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(state)

    def call(params, state, inputs, train):
        graph, *empty = split(0)
        for variables, values in zip((empty[0], empty[2]), (params, state)):
            nnx.replace_by_pure_dict(variables, values)
        module = nnx.merge(graph, *empty)
        module.train() if train else module.eval()
        outputs = module(inputs)
        return outputs, nnx.to_pure_dict(nnx.split(module, nnx.Param, nnx.RngState, ...)[3])

    return PlainLayer(init, call, **options)


def from_linen(
    module: linen.Module,
    training: dict[str, Any],
    evaluation: dict[str, Any],
    **options: Any,
) -> PlainLayer:
    """A Linen module, called with these further arguments."""

    def init(key, inputs):
        variables = dict(module.init({"params": key, "dropout": key}, inputs, **training))
        return variables.pop("params", {}), variables

    def call(params, state, inputs, train):
        variables = {"params": params, **state}
        if not train:
            return module.apply(variables, inputs, **evaluation), state
        rngs = {"dropout": jax.random.key(0)}
        outputs, after = module.apply(variables, inputs, rngs=rngs, mutable=list(state), **training)
        return outputs, {**state, **after}

    return PlainLayer(init, call, **options)


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a training leaves.

    Attributes:
      losses: of every microbatch.
      params: after every update, one tree a layer; the first are those from the start.
      norms: of the gradient of every minibatch.
      state: one tree a layer, after the last microbatch.
    """

    losses: Sequence[float]
    params: Sequence[Sequence[Any]]
    norms: Sequence[float]
    state: Sequence[Any]


def evaluate(layers: Sequence[PlainLayer], params, state, inputs):
    """The outputs of the model in evaluation."""
    for layer, p, s in zip(layers, params, state, strict=True):
        inputs, _ = layer.call(p, s, inputs, False)
    return inputs


@functools.cache
def _programs(layers: tuple[PlainLayer, ...], loss: Callable[[Any, Any], jax.Array]):
    """What a minibatch computes, compiled."""

    @jax.jit
    def gradient(params, state, batch):
        def of(params):
            x, seen, after = batch["inputs"], [], []
            for layer, p, s in zip(layers, params, state, strict=True):
                seen.append(x)
                x, moved = layer.call(p, s, x, True)
                after.append(s if layer.is_batch_norm else moved)
            return loss(x, batch), (seen, after)

        return jax.value_and_grad(of, has_aux=True)(params)

    @jax.jit
    def with_statistics(params, state, seen):
        """The state after the minibatch, of which the microbatches have seen these inputs."""
        after = []
        for i, (layer, p, s) in enumerate(zip(layers, params, state, strict=True)):
            if layer.is_batch_norm:
                whole = jax.tree.map(lambda *a: jnp.concatenate(a), *[xs[i] for xs in seen])
                _, s = layer.call(p, s, whole, True)
            after.append(s)
        return after

    return gradient, with_statistics


def train(
    layers: Sequence[PlainLayer],
    stage_of_layer: Sequence[int],
    params: Sequence[Any],
    state: Sequence[Any],
    loss: Callable[[Any, Any], jax.Array],
    optimizer: optax.GradientTransformation,
    microbatches: Sequence[Any],
    N: int,
    delay: Callable[[int, int], int],
) -> Trained:
    """Trains on microbatches, N to an update.

    Microbatch k, counted from 0, runs forward and backward on stage s with the weights after `max(k // N - delay(s, k %
    N), 0)` updates. Every stage has an optimizer of its own, which sees None for the layers of other stages.
    """
    stages = sorted(set(stage_of_layer))

    def of_stage(s, trees):
        return [t if stage_of_layer[i] == s else None for i, t in enumerate(trees)]

    gradient, with_statistics = _programs(tuple(layers), loss)
    update = jax.jit(optimizer.update)
    versions = {s: [of_stage(s, params)] for s in stages}
    inner = {s: optimizer.init(of_stage(s, params)) for s in stages}
    losses, norms, history, sums, seen = [], [], [list(params)], None, []
    for k, batch in enumerate(microbatches):
        number, j = divmod(k, N)
        read = [versions[s][max(number - delay(s, j), 0)][i] for i, s in enumerate(stage_of_layer)]
        (value, (inputs, state)), grads = gradient(read, state, batch)
        losses.append(float(value))
        seen.append(inputs)
        sums = grads if sums is None else jax.tree.map(lambda a, b: a + b, sums, grads)
        if j < N - 1:
            continue
        mean = jax.tree.map(lambda g: g / np.asarray(N, g.dtype), sums)
        norms.append(float(optax.tree.norm(mean)))
        state = with_statistics(read, state, seen)
        for s in stages:
            newest = versions[s][-1]
            updates, inner[s] = update(of_stage(s, mean), inner[s], newest)
            versions[s].append(optax.apply_updates(newest, updates))
        history.append([versions[s][-1][i] for i, s in enumerate(stage_of_layer)])
        sums, seen = None, []
    return Trained(losses, history, norms, state)
