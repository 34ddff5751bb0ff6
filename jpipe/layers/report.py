"""Values that layers report to the loss: penalties, load balancing.

`report` adds a number to a named sum. The sums travel with the activations from stage to stage, so the loss sees them
on the last stage, and their gradients travel back like any other.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.layers.layer import Layer

_COLLECTED: contextvars.ContextVar[dict[str, jax.Array] | None] = contextvars.ContextVar("jpipe_reported", default=None)


@suggests
def report(name: str, value: Any) -> None:
    """Reports a number from inside a layer to the loss of the pipeline.

    The loss gets the sum over all layers as `reported[name]`, if it has an argument `reported`:
    `loss(outputs, batch, *, reported)`. Numbers of one microbatch are added; every microbatch has sums of its own.
    Outside of a pipeline's training, `report` does nothing, so that a layer also runs by itself. `Pipeline.evaluate`
    and `Pipeline.predict` report nothing; `evaluate` calls the loss with 0 for every name.

    Call it in the layer's own code, not inside a function that `jax.jit`, `jax.checkpoint`, `jax.lax.scan` or
    `jax.vmap`
    transforms there: return the value from that function first.

    Args:
      name: the name of the sum.
      value: a floating-point scalar.

    Raises:
      ValueError: if the name is not a string or the value not a floating-point scalar.

    Example:
      >>> import jax.numpy as jnp
      >>> def layer(x):
      ...     report("activity", jnp.mean(x**2))
      ...     return jnp.tanh(x)
    """
    if not isinstance(name, str):
        raise ValueError(f"`name` of `jpipe.report` must be a string, got {shown(name)}.")
    array = jnp.asarray(value)
    if array.shape != () or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            f"`jpipe.report({shown(name)}, value)` takes a floating-point scalar, got "
            f"{array.dtype}{list(array.shape)}. Take "
            "the mean or the sum."
        )
    collected = _COLLECTED.get()
    if collected is not None:
        array = array.astype(np.float32) if array.dtype.itemsize < 4 else array
        collected[name] = collected[name] + array if name in collected else array


@contextlib.contextmanager
def collect() -> Iterator[dict[str, jax.Array]]:
    """Collects the values that layers report inside the context: name -> sum."""
    collected: dict[str, jax.Array] = {}
    token = _COLLECTED.set(collected)
    try:
        yield collected
    finally:
        _COLLECTED.reset(token)


class ReportWeights:
    """The result of `report_weights`: a layer, and functions of its weights to report."""

    def __init__(self, layer: Any, name: str, function: Callable[[Any], Any]):
        self.layer, self.name, self.function = layer, name, function


@suggests
def report_weights(layer: Any, name: str, function: Callable[[Any], Any]) -> ReportWeights:
    """A layer that also reports a number computed from its weights, such as a penalty.

    No device of a pipeline holds the weights of all layers, so a loss cannot take them as an argument. Each layer
    computes its part where its weights lie, and the loss sees the sum: `reported[name]`.

    Args:
      layer: a layer of any kind that `Pipeline` takes.
      name: the name of the sum.
      function: `parameters -> scalar`, of the nested dict that `Pipeline.get_params` returns for the layer. A tied
        weight is in the dict of every layer that shares it.

    Raises:
      ValueError: if the name is not a string or `function` not callable.

    Example:
      >>> import functools, jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> def squares(parameters):
      ...     return sum(jnp.sum(a**2) for a in jax.tree.leaves(parameters))
      >>> layer = report_weights(functools.partial(nnx.Linear, 4, 4), "squares", squares)
      >>> def loss(outputs, batch, *, reported):
      ...     return jnp.mean((outputs - batch["targets"]) ** 2) + 1e-4 * reported["squares"]
    """
    if not isinstance(name, str):
        raise ValueError(f"`name` of `jpipe.report_weights` must be a string, got {shown(name)}.")
    if not callable(function):
        raise ValueError(
            "`function` of `jpipe.report_weights` must be a function of the layer's parameters, got "
            f"{type(function).__name__}."
        )
    return ReportWeights(layer, name, function)


def with_reported_weights(layer: Layer, reports: ReportWeights) -> Layer:
    """Returns `layer`, which in training also reports the values of `reports`."""

    def train(parameters: Any, state: Any, key: jax.Array, args: tuple) -> tuple:
        report(reports.name, reports.function(parameters))
        return layer.train(parameters, state, key, args)

    def bind(args: tuple) -> Layer:
        assert layer.bind is not None
        return with_reported_weights(layer.bind(args), reports)

    alike = None if layer.alike is None else (layer.alike, reports.name, id(reports.function))
    return dataclasses.replace(
        layer,
        train=train,
        bind=None if layer.bind is None else bind,
        alike=alike,
    )
