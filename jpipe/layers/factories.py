"""Tells factories of NNX modules from functions of the activation, by their signatures.

A callable with a parameter named `rngs` is a factory, as is a class of NNX modules. Every other
callable is a function of the activation.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen, nnx

# What to write for a layer with weights that Flax did not make.
_PAIR = (
    "Give its functions as `jpipe.InitApply(init, apply)`, with `init(key, inputs) -> parameters` "
    "and `apply(parameters, inputs) -> outputs`"
)


def is_factory(layer: Callable[..., Any]) -> bool:
    """Returns whether a callable takes `rngs`, and so makes an NNX module.

    Example:
      >>> is_factory(lambda rngs: nnx.Linear(2, 2, rngs=rngs)), is_factory(lambda x: 2 * x)
      (True, False)
    """
    return _is_module_class(layer) or "rngs" in _takes(layer)


def factory_problem(layer: Callable[..., Any]) -> str | None:
    """The reason why `layer(rngs=...)` cannot be called, and a remedy; None if it can be called."""
    parameters = _parameters(layer)
    if parameters is None:
        return None
    missing = [
        p.name
        for p in parameters.values()
        if p.default is p.empty and p.name != "rngs" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if not missing:
        return None
    name, values = _name(layer), []
    if isinstance(layer, functools.partial):
        values = [repr(a) for a in layer.args]
        values += [f"{key}={value!r}" for key, value in layer.keywords.items()]
    # Without an argument yet, sizes in their order read best: functools.partial(nnx.Linear, 64, 64).
    sizes = all(p.endswith("features") for p in missing)
    values += ["64" if sizes else f"{p}=..." for p in missing]
    if sizes and any("=" in value for value in values):
        values[-len(missing) :] = [f"{p}=64" for p in missing]
    return (
        f"`{name}` needs {', '.join(f'`{p}`' for p in missing)}, and the pipeline calls it with `rngs` "
        f"alone. Give all other arguments, for example "
        f"`functools.partial({', '.join([name, *values])})`."
    )


def function_problem(layer: Callable[..., Any], num_inputs: int) -> str | None:
    """The reason why a callable is no function of the activation, and a remedy; None if it is one.

    Args:
      layer: a callable that is no factory.
      num_inputs: the number of its arguments: the activation and the popped skips.
    """
    inner = _unwrapped(layer)
    if isinstance(inner, type) and issubclass(inner, linen.Module):
        return f"it is the Linen class `{inner.__name__}`. Give a module, such as `{inner.__name__}(...)`."
    if isinstance(layer, type):
        return (
            f"it is the class `{layer.__name__}`, not a layer. Give an instance if the instance is a "
            f"function of the activation. For a layer with weights: {_PAIR[0].lower()}{_PAIR[1:]}."
        )
    leaves = [] if isinstance(layer, functools.partial) else jax.tree.leaves(layer)
    if any(hasattr(leaf, "shape") for leaf in leaves):
        return (
            f"`{_name(layer)}` is a callable pytree that holds arrays, such as an Equinox module, and "
            f"its arrays would be constants that are not trained. {_PAIR}."
        )
    module = _module_behind(layer)
    if module is not None:
        return (
            f"`{_name(layer)}` uses the NNX module `{type(module).__name__}`, whose weights would be "
            "constants that are not trained. Give the module itself, or a module whose `__call__` does "
            "the same. `jpipe.Function(f)` keeps the weights as constants."
        )
    signature = _signature(layer)
    if signature is None:
        return None
    try:
        signature.bind(*[None] * num_inputs)
    except TypeError as error:
        called = "the activation alone" if num_inputs == 1 else f"{num_inputs} arguments"
        return (
            f"`{_name(layer)}` has no parameter named `rngs`, so it is a function of the activation, but "
            f"it cannot be called with {called}: {error}. A factory of a module takes `rngs`. Give other "
            "arguments by `functools.partial`."
        )
    return None


def not_callable_problem(layer: Any) -> str:
    """The reason why a value is no layer, and a remedy."""
    forms = (
        "a Flax module, a factory called as `factory(rngs=...)`, a `jpipe.InitApply`, or a function of the activation"
    )
    hint = ""
    if hasattr(layer, "init") and hasattr(layer, "apply"):
        hint = (
            f" It has `init` and `apply`, as a Haiku transform has. {_PAIR}; an `apply` that takes a "
            "key needs a function around it that leaves the key out."
        )
    elif isinstance(layer, (tuple, list)) and layer and all(map(callable, layer)):
        hint = (
            " Give a pair of functions `(init, apply)` as `jpipe.InitApply(init, apply)`, and a list of "
            "layers as layers of their own."
        )
    return f"must be {forms}, got {type(layer).__name__}.{hint}"


def _is_module_class(layer: Any) -> bool:
    inner = _unwrapped(layer)
    return isinstance(inner, type) and issubclass(inner, nnx.Module)


def _unwrapped(layer: Any) -> Any:
    """The callable inside of `functools.partial`."""
    while isinstance(layer, functools.partial):
        layer = layer.func
    return layer


def _signature(layer: Callable[..., Any]) -> inspect.Signature | None:
    if _is_module_class(layer):  # its metaclass hides the arguments of `__init__`
        args: tuple = ()
        keywords: dict[str, Any] = {}
        while isinstance(layer, functools.partial):
            args, keywords = layer.args + args, {**layer.keywords, **keywords}
            layer = layer.func
        init: Callable[..., Any] = layer.__init__
        layer = functools.partial(init, None, *args, **keywords)
    try:
        return inspect.signature(layer)
    except (TypeError, ValueError):  # built-in functions have none
        return None


def _parameters(layer: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    signature = _signature(layer)
    return None if signature is None else signature.parameters


def _takes(layer: Callable[..., Any]) -> set[str]:
    """Names of the arguments; `**kwargs` without a positional argument can take `rngs`."""
    parameters = _parameters(layer) or {}
    names = set(parameters)
    kinds = {p.kind for p in parameters.values()}
    positional = {
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    }
    if inspect.Parameter.VAR_KEYWORD in kinds and not kinds & positional:
        names.add("rngs")
    return names


def _module_behind(layer: Any) -> nnx.Module | None:
    """An NNX module with parameters that a method or a closure uses."""
    inner = _unwrapped(layer)
    used = [getattr(inner, "__self__", None)]
    if inspect.isfunction(inner):
        closure = inspect.getclosurevars(inner)
        used += [*closure.nonlocals.values(), *closure.globals.values()]
    for value in used:
        if isinstance(value, nnx.Module) and nnx.state(value, nnx.Param):
            return value
    return None


def _name(layer: Any) -> str:
    if isinstance(layer, functools.partial):
        return _name(layer.func)
    name = getattr(layer, "__name__", type(layer).__name__)
    module = getattr(layer, "__module__", "") or ""
    is_flax = isinstance(layer, type) and module.startswith("flax.nnx")
    return f"nnx.{name}" if is_flax else name
