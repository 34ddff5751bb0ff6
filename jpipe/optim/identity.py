"""Tells optimizers apart whose states have the same names and shapes.

Adam, NAdam, RAdam, Yogi and AdaBelief all keep "count", "mu" and "nu". What these numbers mean follows from the
transforms that keep them, and from switches of these transforms such as `nesterov`. Learning rates, decays and other
numbers may change in the middle of a training, and so may transforms that keep nothing.

Optax makes a transform by a function, here `scale_by_adam`, whose inner functions see its arguments:

    def scale_by_adam(b1, b2, ..., nesterov):
        def init_fn(params): ...
        def update_fn(updates, state, params): ...
        return GradientTransformation(init_fn, update_fn)

So the transforms are the makers of the functions that `init` and `update` can reach. A transform that hides them is not
seen.
"""

import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import optax


def identity(optimizer: optax.GradientTransformation, params: Any) -> dict[str, Any]:
    """Names the transforms of an optimizer that keep a state, and their switches.

    Args:
      optimizer: the optimizer.
      params: the argument of its `init`, abstract or not.

    Returns:
      Values that JSON has: "transforms", the names of the makers, in order; "switches", for each of these names and an
      argument its values that are True or False, in order.

    Example:
      >>> values = identity(optax.adamw(1e-3, nesterov=True), {"w": jax.numpy.ones(2)})
      >>> values["transforms"], values["switches"]["scale_by_adam.nesterov"]
      (['scale_by_adam'], [True])
    """
    transforms = [
        _maker(function)
        for function in _reachable(optimizer.init)
        if _makes_state(function, params) or _makes_transform(function)
    ]
    switches: dict[str, list[bool]] = {}
    for function in _reachable(optimizer.update):
        if _maker(function) not in transforms:
            continue
        for name, value in _seen_by(function).items():
            for key, flag in _flags(name, value):
                switches.setdefault(f"{_maker(function)}.{key}", []).append(flag)
    return {"transforms": transforms, "switches": switches}


def difference(mine: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The difference of two optimizers in words; None if they are equal.

    A switch that only one of them has does not count: versions of Optax add and remove them.

    Args:
      mine: the identity of the optimizer of "this pipeline".
      other: the identity of the optimizer of "the state".

    Example:
      >>> params = {"w": jax.numpy.ones(2)}
      >>> adam, yogi, nadam = (identity(o(1e-3), params) for o in (optax.adam, optax.yogi, optax.nadam))
      >>> difference(yogi, adam)
      'this pipeline has scale_by_yogi, and the state is of scale_by_adam'
      >>> difference(nadam, adam)
      'this pipeline has scale_by_adam.nesterov=True, and the state is of scale_by_adam.nesterov=False'
    """
    words = "this pipeline has {}, and the state is of {}"
    here, there = mine["transforms"], other["transforms"]
    if here != there:
        return words.format(*(", ".join(names) or "none" for names in (here, there)))
    for name in mine["switches"].keys() & other["switches"].keys():
        here, there = mine["switches"][name], other["switches"][name]
        if here != there:
            return words.format(f"{name}={_listed(here)}", f"{name}={_listed(there)}")
    return None


def _listed(flags: Sequence[bool]) -> str:
    return ", ".join(map(str, flags))


def _maker(function: Any) -> str:
    """The function, or the class, that a function is made in."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", "").partition(".")[0]


def _makes_state(function: Any, params: Any) -> bool:
    """Returns whether a function of the parameters returns the state of a transform, and there is something in it.

    `optax.chain` returns a plain tuple of the states of others. A mask returns a tree like the parameters.
    """
    try:
        state = jax.eval_shape(function, params)
    except Exception:  # it is another kind of function
        return False
    is_state = isinstance(state, tuple) and hasattr(state, "_fields")
    return is_state and bool(jax.tree.leaves(state))


def _makes_transform(function: Any) -> bool:
    """Returns whether a function is annotated to return a transform, as `optax.inject_hyperparams` wants."""
    kind = getattr(function, "__annotations__", {}).get("return")
    return isinstance(kind, type) and issubclass(kind, optax.GradientTransformation)


def _seen_by(function: Any) -> dict[str, Any]:
    """The values in a function's closure, fields and arguments, by name."""
    if isinstance(function, functools.partial):
        return {"func": function.func, "args": function.args, **function.keywords}
    if isinstance(function, types.MethodType):
        return dict(getattr(function.__self__, "__dict__", {}))
    inner = getattr(function, "__wrapped__", None)
    values = {} if inner is None else {"wrapped": inner}
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or ()):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # not set yet
            continue
    return values


def _reachable(root: Any) -> Iterator[Any]:
    """The functions that a function can reach through its closure and fields, each once, in order."""
    seen: set[int] = set()

    def walk(value: Any) -> Iterator[Any]:
        if id(value) in seen:
            return
        if isinstance(value, Mapping):
            inner = list(value.values())
        elif isinstance(value, tuple | list):
            inner = list(value)
        elif callable(value) and not isinstance(value, type):
            inner = list(_seen_by(value).values())
            seen.add(id(value))
            yield value
        else:
            return
        for part in inner:
            yield from walk(part)

    return walk(root)


def _flags(name: str, value: Any) -> Iterator[tuple[str, bool]]:
    """The values that are True or False, by name, also in a dict of arguments."""
    if isinstance(value, bool):
        yield name, value
    elif isinstance(value, Mapping):
        yield from ((n, v) for n, v in value.items() if isinstance(v, bool) and type(n) is str)
