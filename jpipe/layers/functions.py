"""Layers given as plain functions: `Function` and `InitApply`."""

import dataclasses
import functools
from typing import Any

import jax

from jpipe.layers.avals import abstract, zeros
from jpipe.layers.call_arguments import call_with
from jpipe.layers.layer import Function, InitApply, Layer, check_leaves
from jpipe.layers.mesh_free import on_same_mesh


def from_function(layer: Function) -> Layer:
    """The `Layer` of a function without parameters."""
    function = layer.function
    while isinstance(function, functools.partial):
        function = function.func
    return Layer(
        getattr(function, "__name__", type(function).__name__),
        {},
        {},
        train=lambda parameters, state, key, args: (call_with(layer.function, args), {}),
        evaluate=lambda parameters, state, args: call_with(layer.function, args),
        init=lambda key: ({}, {}),
    )


def from_pair(layer: InitApply, index: int) -> Layer:
    """The `Layer` of an `(init, apply)` pair; its parameters are known after `bind`."""
    unbound = Layer(
        layer.name,
        None,
        {},
        train=lambda parameters, state, key, args: (call_with(functools.partial(layer.apply, parameters), args), {}),
        evaluate=lambda parameters, state, args: call_with(functools.partial(layer.apply, parameters), args),
        call=functools.partial(layer.apply, None),
    )

    def bind(args: tuple) -> Layer:
        def init(key: jax.Array) -> Any:
            return call_with(functools.partial(layer.init, key), zeros(args))

        init = on_same_mesh(init)
        try:
            parameters = abstract(jax.eval_shape(init, jax.eval_shape(jax.random.key, 0)))
        except Exception as error:
            raise ValueError(f"layer {index} ({layer.name}): `init(key, inputs)` failed: {error}") from error
        check_leaves(parameters, {}, layer.name, index)
        return dataclasses.replace(unbound, parameters=parameters, init=lambda key: (init(key), {}), bind=None)

    return dataclasses.replace(unbound, bind=bind)
