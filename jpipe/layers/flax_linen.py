"""Layers given as Flax Linen modules."""

import dataclasses
import functools
from typing import Any

import jax
from flax.core import meta
from flax.core.spmd import from_sharding_rules
from flax.errors import ModifyScopeVariableError
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax.sharding import PartitionSpec

from jpipe.layers.avals import abstract, zeros
from jpipe.layers.batch_norm import recording
from jpipe.layers.call_arguments import call_with
from jpipe.layers.layer import Layer, Linen, check_leaves
from jpipe.layers.mesh_free import on_same_mesh


def from_linen(layer: Linen, index: int) -> Layer:
    """The `Layer` of a Linen module; its parameters are known after `bind`."""
    module, name = layer.module, type(layer.module).__name__

    def train(parameters: Any, state: Any, key: jax.Array, args: tuple) -> tuple[Any, Any]:
        outputs, after = call_with(
            functools.partial(module.apply, {"params": parameters, **state}),
            args,
            rngs=_streams(layer, key),
            mutable=list(state),
            **layer.train,
        )
        return outputs, {**state, **after}

    def evaluate(parameters: Any, state: Any, args: tuple) -> Any:
        rngs = _streams(layer, jax.random.key(0))
        variables = {"params": parameters, **state}
        try:
            return call_with(functools.partial(module.apply, variables), args, rngs=rngs, **layer.evaluate)
        except ModifyScopeVariableError as error:
            raise ValueError(
                f"it writes to its state in evaluation, where state does not move: {error} Let it write only if "
                "`self.is_mutable_collection(...)` of the collection, or give its call an argument that says so: "
                '`jpipe.Linen(module, train={"train": True}, evaluate={"train": False})`.'
            ) from error

    unbound = Layer(name, None, {}, train, evaluate, call=functools.partial(module.__call__, **layer.train))
    return dataclasses.replace(unbound, bind=lambda args: _bind(layer, unbound, args, index))


def _bind(layer: Linen, unbound: Layer, args: tuple, index: int) -> Layer:
    """The layer with its parameters and its state."""
    split: dict = {}

    def init(key: jax.Array) -> tuple[Any, Any]:
        first, second = jax.random.split(key)
        rngs = {"params": first, **_streams(layer, second)}
        boxed = dict(call_with(functools.partial(layer.module.init, rngs), zeros(args), **layer.train))
        split.update(jax.tree.map(_names, boxed.get("params", {}), is_leaf=_is_box))
        variables = meta.unbox(boxed)
        parameters = variables.pop("params", {})
        variables.pop("intermediates", None)
        return parameters, variables

    key, init = jax.eval_shape(jax.random.key, 0), on_same_mesh(init)
    try:
        parameters, state = abstract(jax.eval_shape(init, key))
        with recording() as calls:
            jax.eval_shape(unbound.train, parameters, state, key, args)
    except Exception as error:
        raise ValueError(
            f"layer {index} ({unbound.name}) cannot be initialised: {error}\nA module whose call takes more than the "
            "activation is given as `jpipe.Linen(module, train=..., evaluate=...)`, and one that draws from other "
            f"random streams than {', '.join(layer.rngs) or 'none'} as `jpipe.Linen(module, rngs=(...))`."
        ) from error
    if OVERWRITE_WITH_GRADIENT in state:
        raise ValueError(
            f"layer {index} ({unbound.name}) has a collection {OVERWRITE_WITH_GRADIENT!r}, whose new value is a "
            "gradient (scales of float8). A pipeline passes gradients to the optimizer alone. Use layers without "
            "float8 operations."
        )
    check_leaves(parameters, state, unbound.name, index)
    return dataclasses.replace(
        unbound,
        parameters=parameters,
        state=state,
        init=init,
        bind=None,
        specs=split,
        has_batch_norm=bool(calls),
    )


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, meta.AxisMetadata)


def _names(leaf: Any) -> PartitionSpec:
    """The names of the dims of a parameter; its own rules come before those of the pipeline."""
    if not isinstance(leaf, meta.Partitioned):
        return PartitionSpec()
    rules = getattr(leaf, "rules", None) or ()
    return PartitionSpec(*from_sharding_rules(leaf.names, rules))


def _streams(layer: Linen, key: jax.Array) -> dict[str, jax.Array]:
    return {name: jax.random.fold_in(key, i) for i, name in enumerate(layer.rngs)}
