"""Checks that a model computes the same whenever it is called.

A model is traced a few times: in training, in evaluation, for another shape. If it reads something that is neither an
argument nor one of its variables, such as a counter in a module of Python or NumPy's random numbers, each trace holds
the value of its moment, and training and evaluation go on with it.
"""

import bisect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from jpipe.layers.equations import held_jaxprs
from jpipe.layers.expressions import content
from jpipe.segments.places import CutError
from jpipe.segments.trace import Trace


def check_repeated(trace: Trace, again: Callable[[], Trace], name: str, paths: Sequence[str]) -> None:
    """Raises a `CutError` if a model does not compute the same when it is called again.

    Args:
      trace: of the model.
      again: makes the trace once more.
      name: of the model.
      paths: of its parameters.
    """
    advice = (
        "A model may read its arguments, its own variables and constants. Make the value an argument, an entry of the "
        "batch, or an `nnx.Variable` of the model; draw random numbers from its `nnx.Rngs` or from `make_rng`."
    )
    try:
        other = again()
        for constant in other.flow.program.constants.values():
            content(constant)  # that of a trace that has ended has none
    except Exception as error:
        raise CutError(
            f"the model ({name}) can be called once, and fails when it is called again: {str(error).rstrip('.')}. It "
            f"keeps a value of one call for the next one, outside of its variables. {advice}"
        ) from error
    equations, others = trace.flow.program.equations, other.flow.program.equations
    different = [i for i, pair in enumerate(zip(equations, others)) if not _equal(*pair, trace, other)]
    if different or len(equations) != len(others):
        position = different[0] if different else min(len(equations), len(others))
        eqn = (equations if position < len(equations) else others)[position]
        values = " and ".join(sorted({*_literals(equations, position), *_literals(others, position)}))
        where = f"{_where(trace, position, paths)}it has another `{eqn.primitive.name}`"
        raise CutError(
            f"the model ({name}) computes otherwise each time that it is called: {where}"
            f"{f', with {values}' if values else ''}. It reads something that is neither "
            f"an argument nor one of its variables, such as a global value or NumPy's random numbers. {advice}"
        )


def _where(trace: Trace, position: int, paths: Sequence[str]) -> str:
    """The module whose weights are the last to be read before a position."""
    reads = sorted((i, paths[trace.flow.roles.parameters.index(v)]) for v, i in trace.flow.first_reads.items())
    before = bisect.bisect_right(reads, position, key=lambda read: read[0])
    return f"after {reads[before - 1][1].rpartition('.')[0]} " if before else "before its first weights "


def _literals(equations: Sequence, position: int) -> list[str]:
    """The numbers in an equation."""
    if position >= len(equations):
        return []
    return [f"{v.val:.6g}" for v in equations[position].invars if isinstance(v, jex.Literal)]


def _equal(eqn: Any, other: Any, trace: Trace, again: Trace) -> bool:
    """Whether two equations are the same, apart from functions in their parameters, which have no text of their own."""
    if eqn.primitive is not other.primitive or len(eqn.invars) != len(other.invars):
        return False
    if [str(v.aval) for v in eqn.outvars] != [str(v.aval) for v in other.outvars]:
        return False
    constants, others = trace.flow.program.constants, again.flow.program.constants
    pairs = [(_value(v, constants), _value(w, others)) for v, w in zip(eqn.invars, other.invars)]
    if any(_text(v) != _text(w) for v, w in pairs if v is not w):
        return False
    inner = list(zip(held_jaxprs(eqn), held_jaxprs(other)))
    return all(_equal_jaxprs(*pair, trace, again) for pair in inner)


def _equal_jaxprs(jaxpr: Any, other: Any, trace: Trace, again: Trace) -> bool:
    constants = zip(getattr(jaxpr, "consts", ()), getattr(other, "consts", ()))
    if any(v is not w and content(v) != content(w) for v, w in constants):
        return False
    equations, others = (getattr(j, "jaxpr", j).eqns for j in (jaxpr, other))
    return len(equations) == len(others) and all(_equal(*pair, trace, again) for pair in zip(equations, others))


def _value(atom: Any, constants: dict) -> Any:
    """What is known of an operand: a number, a constant, or the text of its type."""
    if isinstance(atom, jex.Literal):
        return atom.val
    return constants.get(atom, str(atom.aval))


def _text(value: Any) -> Any:
    if isinstance(value, str):
        return value
    return content(value) if isinstance(value, jax.Array) or hasattr(value, "shape") else repr(value)
