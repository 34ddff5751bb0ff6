"""Reads the layers that a user gives: one `Layer` per layer, after checks.

Flax NNX modules and their factories, Flax Linen modules, `(init, apply)` pairs and plain functions
all become a `Layer`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax import linen, nnx

from jpipe.layers.factories import (
    factory_problem,
    function_problem,
    is_factory,
    not_callable_problem,
)
from jpipe.layers.flax_linen import from_linen
from jpipe.layers.flax_nnx import NotAModuleError, abstract_parts, from_nnx
from jpipe.layers.functions import from_function, from_pair
from jpipe.layers.layer import NNX, Function, InitApply, Layer, Linen, Skip, passing_on
from jpipe.layers.report import ReportWeights, with_reported_weights


def as_layers(layers: Sequence) -> list[Layer]:
    """Checks the layers and reads the shapes of their parameters; makes no weights.

    Args:
      layers: the layers, in order, each in one of the forms that `Pipeline` takes.

    Returns:
      One `Layer` per layer.

    Raises:
      ValueError: if `layers` is no sequence, a layer has none of the forms, or the names of skip
        connections do not pair up.
    """
    if callable(layers) or not hasattr(layers, "__len__") or isinstance(layers, Mapping | str | set):
        raise ValueError(
            f"`layers` must be a sequence of layers, got {_whole_model(layers)}: a pipeline cuts a "
            f"model between layers. {_advice(layers)}"
        )
    if not len(layers):
        raise ValueError("`layers` must hold at least one layer, got none.")
    read = [as_layer(layer, i) for i, layer in enumerate(layers)]
    _check_skips(read)
    return _with_readers_in_line(read)


def _whole_model(layers: Any) -> str:
    name = type(layers).__name__
    return f"a whole model ({name})" if isinstance(layers, nnx.Module | linen.Module) else name


def _advice(layers: Any) -> str:
    if isinstance(layers, nnx.Sequential | linen.Sequential):
        return "Give `layers=list(model.layers)`."
    return "Give its layers as a list, in order."


def shared_weights(layers: Sequence) -> list[list[tuple[int, str]]]:
    """Ties between NNX modules that hold the same variable.

    Layers may share random streams, such as those of one `nnx.Rngs`: every layer draws from keys of its own.

    Args:
      layers: the layers as the user gave them.

    Returns:
      One list per shared variable, of `(layer, "dotted.path")`.

    Raises:
      ValueError: if layers share a variable that is not a parameter.
    """
    places_of: dict[int, list[tuple[int, str]]] = {}
    variable_of: dict[int, nnx.Variable] = {}
    for i, layer in enumerate(layers):
        while isinstance(layer, Skip | ReportWeights | NNX):
            layer = layer.layer
        parts = nnx.iter_graph(layer) if isinstance(layer, nnx.Module) else ()
        for path, part in parts:
            if isinstance(part, nnx.Variable) and not isinstance(part, nnx.RngState):
                variable_of[id(part)] = part
                place = (i, ".".join(map(str, path)))
                places_of.setdefault(id(part), []).append(place)
    ties = {key: places for key, places in places_of.items() if len(places) > 1}
    for key, places in ties.items():
        if not isinstance(variable_of[key], nnx.Param):
            (first, shared), (second, _) = places[:2]
            raise ValueError(
                f"layers {first} and {second} share {shared!r}, a {type(variable_of[key]).__name__}: "
                "only parameters can be shared between layers. Give each layer its own."
            )
    return list(ties.values())


def _check_skips(layers: Sequence[Layer]) -> None:
    """Checks that every name is stashed once, and popped by later layers, by each of them once."""
    stashed: dict[str, int] = {}
    popped: set[str] = set()
    for i, layer in enumerate(layers):
        for j, name in enumerate(layer.pop):
            if name in layer.pop[:j]:
                raise ValueError(
                    f"layer {i} ({layer.name}) pops {name!r} twice. Pop it once: the layer may read it as often as "
                    "it needs."
                )
            if name not in stashed:
                later = [k for k, other in enumerate(layers) if name in other.stash]
                when = f"only layer {later[0]} does" if later else "no layer does"
                known = ", ".join(map(repr, stashed))
                raise ValueError(
                    f"layer {i} ({layer.name}) pops {name!r}, which no layer before it stashes: "
                    f"{when}. Stashed before it: {known or 'nothing'}."
                )
            popped.add(name)
        for name in layer.stash:
            if name in stashed:
                raise ValueError(
                    f"layer {i} ({layer.name}) stashes {name!r}, which layer {stashed[name]} "
                    "stashed already. Give each skip a name of its own."
                )
            stashed[name] = i
    for name in stashed:
        if name not in popped:
            raise ValueError(
                f"layer {stashed[name]} ({layers[stashed[name]].name}) stashes {name!r}, which no "
                'layer pops. Pop it with `jpipe.skip(layer, pop="...")`, or leave it out.'
            )


def _with_readers_in_line(layers: Sequence[Layer]) -> list[Layer]:
    """The layers, such that every name is popped once: each reader of a tensor stashes it again for the next one.

    So the tensor goes from reader to reader. No stage that does not read it receives it, and its gradients are summed
    on the way back.
    """
    last_reader = {name: i for i, layer in enumerate(layers) for name in layer.pop}
    names = {name for layer in layers for name in layer.stash}
    current: dict[str, str] = {}  # name that the user gave -> name under which the tensor is stashed last
    result = []
    for i, layer in enumerate(layers):
        pop = tuple(current.get(name, name) for name in layer.pop)
        passed = {j: name for j, name in enumerate(layer.pop) if last_reader[name] > i}
        for name in passed.values():
            current[name] = f"{name} (from layer {i})"
            while current[name] in names:
                current[name] += "'"
        options = dataclasses.replace(
            layer.options, stash=(*layer.stash, *(current[name] for name in passed.values())), pop=pop
        )
        result.append(dataclasses.replace(passing_on(layer, tuple(passed)), options=options))
    return result


def as_layer(layer: Any, index: int, num_inputs: int = 1) -> Layer:
    """Reads one layer, called with `num_inputs` arguments."""
    if isinstance(layer, Skip):
        inner = as_layer(layer.layer, index, 1 + len(layer.pop))
        options = dataclasses.replace(inner.options, stash=layer.stash, pop=layer.pop)
        return dataclasses.replace(inner, options=options)
    if isinstance(layer, ReportWeights):
        return with_reported_weights(as_layer(layer.layer, index), layer)
    if isinstance(layer, Function):
        return from_function(layer)
    if isinstance(layer, InitApply):
        return from_pair(layer, index)
    if isinstance(layer, linen.Module):
        layer = Linen(layer)
    if isinstance(layer, Linen):
        return from_linen(layer, index)
    if not isinstance(layer, NNX):
        if not isinstance(layer, nnx.Module) and not (callable(layer) and is_factory(layer)):
            return _from_callable(layer, index, num_inputs)
        layer = NNX(layer)
    keywords = layer.train, layer.evaluate
    if isinstance(layer.layer, nnx.Module):
        return from_nnx(nnx.split(layer.layer), None, index, *keywords)
    return _from_factory(layer.layer, index, *keywords)


def _from_callable(layer: Any, index: int, num_inputs: int) -> Layer:
    if not callable(layer):
        raise ValueError(f"layer {index} {not_callable_problem(layer)}")
    problem = function_problem(layer, num_inputs)
    if problem is not None:
        raise ValueError(f"layer {index}: {problem}")
    return dataclasses.replace(
        from_function(Function(layer)),
        note="It has no parameter named `rngs`, so it is a function of the activation, not a factory.",
    )


def _from_factory(make: Callable[..., Any], index: int, *keywords: Mapping[str, Any]) -> Layer:
    problem = factory_problem(make)
    if problem is not None:
        raise ValueError(f"layer {index}: {problem}")
    try:
        parts, leaves = abstract_parts(make)
    except NotAModuleError as error:
        raise ValueError(f"layer {index}: {error}") from None
    except Exception as error:
        raise ValueError(f"layer {index} could not be built by `factory(rngs=...)`: {error}") from error
    return from_nnx(parts, leaves, index, *keywords)
