"""Compares programs: by their text, and by numbers of the expressions that they compute."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

CHECKPOINT = "remat2"


# Primitives that call a jaxpr -> the parameter that holds this jaxpr. Calls are inlined because
# nothing is differentiated after tracing: custom derivative rules and checkpoints are used up, and
# custom rules name Python functions by their address, which would make equal programs look unequal.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    CHECKPOINT: "jaxpr",
}


def number(numbers: dict, *expression: Any) -> int:
    return numbers.setdefault(expression, len(numbers))


def content(constant: Any) -> tuple:
    """Equal for equal constants only."""
    if jnp.issubdtype(jnp.result_type(constant), jax.dtypes.extended):  # a random key
        constant = jax.random.key_data(constant)
    array = np.asarray(constant)
    return str(array.dtype), array.shape, array.tobytes()


def param_text(value: Any) -> str:
    """Equal for equal parameters of equations only.

    The text of a jaxpr leaves out what its constants hold, and NumPy leaves out most of a large array.
    """
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}{[param_text(v) for v in value]}"
    if isinstance(value, (np.ndarray, jax.Array)):
        return str(content(value))
    return str([repr(value), *map(content, _constants_inside(value))])


def _constants_inside(value: Any) -> Iterable:
    """The constants of a jaxpr, and of the jaxprs in its equations."""
    yield from getattr(value, "consts", ())
    for eqn in getattr(getattr(value, "jaxpr", value), "eqns", ()):
        for param in eqn.params.values():
            for inner in param if isinstance(param, tuple) else (param,):
                yield from _constants_inside(inner)


def number_constants(constvars: Iterable, values: Iterable, numbers: dict) -> dict:
    return {v: number(numbers, "constant", *content(value)) for v, value in zip(constvars, values)}


def numbered(equations: Sequence, outputs: Sequence, known: dict, numbers: dict) -> list[int]:
    known = dict(known)

    def of(atom: Any) -> int:
        if isinstance(atom, jex.Literal):
            return number(numbers, "literal", repr(atom.val), str(atom.aval))
        return known[atom]

    for eqn in equations:
        name, operands = eqn.primitive.name, [of(v) for v in eqn.invars]
        if name in CALLS:
            results = _numbered_call(eqn.params[CALLS[name]], operands, numbers)
        elif name == "cond":  # one expression per result
            branches = [_numbered_call(branch, operands[1:], numbers) for branch in eqn.params["branches"]]
            results = [number(numbers, "cond", operands[0], *choice) for choice in zip(*branches, strict=True)]
        else:
            params = [(k, _content_of_param(v, numbers)) for k, v in eqn.params.items()]
            results = [number(numbers, name, *sorted(params), *operands, i) for i, _ in enumerate(eqn.outvars)]
        known.update(zip(eqn.outvars, results))
    return [of(v) for v in outputs]


def _numbered_call(called: Any, operands: Sequence[int], numbers: dict) -> list[int]:
    """The numbers of the results of a jaxpr, open or closed."""
    jaxpr = getattr(called, "jaxpr", called)
    known = number_constants(jaxpr.constvars, getattr(called, "consts", ()), numbers)
    known |= dict(zip(jaxpr.invars, operands, strict=True))
    return numbered(jaxpr.eqns, jaxpr.outvars, known, numbers)


def _content_of_param(value: Any, numbers: dict) -> str:
    """Equal for equal parameters of equations; a jaxpr, such as a loop's body, counts by its results."""
    if isinstance(value, (tuple, list)):
        return str([_content_of_param(v, numbers) for v in value])
    jaxpr = getattr(value, "jaxpr", value)
    if not hasattr(jaxpr, "eqns"):
        return str(value)
    inputs = [number(numbers, "argument", i, str(v.aval)) for i, v in enumerate(jaxpr.invars)]
    return str(_numbered_call(value, inputs, numbers))
