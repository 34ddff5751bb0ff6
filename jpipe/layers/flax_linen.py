"""Layers given as Flax Linen modules."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from flax import linen
from flax.core import meta
from flax.core.spmd import from_sharding_rules
from jax.sharding import PartitionSpec

from jpipe.layers.avals import abstract, zeros
from jpipe.layers.batch_norm import Momenta, commit, to_statistics
from jpipe.layers.layer import Layer, Linen, check_leaves


def from_linen(layer: Linen, index: int) -> Layer:
    """The `Layer` of a Linen module; its parameters are known after `bind`."""
    module, name = layer.module, type(layer.module).__name__

    def train(
        parameters: Any, state: Any, key: jax.Array, args: tuple
    ) -> tuple[Any, Any]:
        outputs, statistics, _ = _train(layer, parameters, state, key, args)
        return outputs, statistics

    def evaluate(parameters: Any, state: Any, args: tuple) -> Any:
        rngs = _streams(layer, jax.random.key(0))
        variables = {"params": parameters, **state}
        return module.apply(variables, *args, rngs=rngs, **layer.evaluate)

    unbound = Layer(name, None, {}, train, evaluate)
    return dataclasses.replace(
        unbound, bind=lambda args: _bind(layer, unbound, args, index)
    )


def _bind(layer: Linen, unbound: Layer, args: tuple, index: int) -> Layer:
    """The layer with its parameters, its state and the momenta of its batch norms."""
    split: dict = {}
    momenta: dict = {}

    def init(key: jax.Array) -> tuple[Any, Any]:
        first, second = jax.random.split(key)
        rngs = {"params": first, **_streams(layer, second)}
        boxed = dict(layer.module.init(rngs, *zeros(args), **layer.train))
        split.update(jax.tree.map(_names, boxed.get("params", {}), is_leaf=_is_box))
        variables = meta.unbox(boxed)
        parameters = variables.pop("params", {})
        variables.pop("intermediates", None)
        return parameters, variables

    def find_momenta(parameters: Any, state: Any, key: jax.Array, args: tuple) -> Any:
        outputs, _, at_path = _train(layer, parameters, state, key, args)
        momenta.update(at_path)
        return outputs

    key = jax.random.key(0)
    try:
        parameters, state = abstract(jax.eval_shape(init, key))
        jax.eval_shape(find_momenta, parameters, state, key, args)
    except Exception as error:
        raise ValueError(
            f"layer {index} ({unbound.name}) cannot be initialised: {error}\nA module whose call takes "
            "more than the activation is given as `jpipe.Linen(module, train=..., evaluate=...)`, and one that draws from "
            f"other random streams than {', '.join(layer.rngs) or 'none'} as `jpipe.Linen(module, rngs=(...))`."
        ) from error
    check_leaves(parameters, state, unbound.name, index)
    return dataclasses.replace(
        unbound,
        parameters=parameters,
        state=state,
        commit=lambda state, statistics: commit(state, statistics, momenta),
        init=init,
        bind=None,
        specs=split,
        has_batch_norm=bool(momenta),
    )


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, meta.AxisMetadata)


def _names(leaf: Any) -> PartitionSpec:
    """The names of the dims of a parameter; its own rules come before those of the pipeline."""
    if not isinstance(leaf, meta.Partitioned):
        return PartitionSpec()
    rules = getattr(leaf, "rules", None) or ()
    return PartitionSpec(*from_sharding_rules(leaf.names, rules))


def _train(
    layer: Linen, parameters: Any, state: Any, key: jax.Array, args: tuple
) -> tuple[Any, Any, Momenta]:
    """Outputs, statistics, and the momenta of the batch norms that were called."""
    with _own_statistics() as momenta:
        outputs, after = layer.module.apply(
            {"params": parameters, **state},
            *args,
            rngs=_streams(layer, key),
            mutable=list(state),
            **layer.train,
        )
    statistics = {}
    if state:
        known = momenta if "batch_stats" in after else {}
        statistics = to_statistics({**state, **after}, known)
    return outputs, statistics, momenta


def _streams(layer: Linen, key: jax.Array) -> dict[str, jax.Array]:
    return {name: jax.random.fold_in(key, i) for i, name in enumerate(layer.rngs)}


@contextmanager
def _own_statistics() -> Iterator[dict[tuple, float]]:
    """Runs every batch norm with momentum 0; yields a dict that collects their momenta by path."""
    momenta: dict[tuple, float] = {}

    def without_momentum(
        call: Callable[..., Any], args: Any, kwargs: Any, context: Any
    ) -> Any:
        part = context.module
        if not isinstance(part, linen.BatchNorm):
            return call(*args, **kwargs)
        momenta["batch_stats", *part.path] = momentum = part.momentum
        object.__setattr__(part, "momentum", 0.0)
        try:
            return call(*args, **kwargs)
        finally:
            object.__setattr__(part, "momentum", momentum)

    with linen.intercept_methods(without_momentum):
        yield momenta
