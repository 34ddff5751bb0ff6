"""ReLUs whose backward reads their result.

The derivative of `max(x, 0)` asks whether `x > 0`. JAX hands this on from the forward as an array of its own, beside
the result, which the next layer's weight gradient reads anyway. But `x > 0` where `max(x, 0) > 0`, also of NaN. Of the
result, a backward computes it again, and the stash holds no mask.
"""

import dataclasses
from typing import Any

import jax.extend.core as jex

from jpipe.layers.equations import Equations


def with_compared_results(program: Equations) -> Equations:
    """A program in which comparisons of an operand of `max` are comparisons of its result, where both are the same."""
    # (variable, number) -> the greater of both.
    maxima: dict[Any, Any] = {}
    equations = []
    for eqn in program.equations:
        operands = _variable_and_number(eqn)
        if operands is not None and eqn.primitive.name == "max":
            maxima.setdefault(operands, eqn.outvars[0])
        elif operands in maxima and eqn.primitive.name == "gt":
            eqn = eqn.replace(invars=[maxima[operands], eqn.invars[1]])
        equations.append(eqn)
    return dataclasses.replace(program, equations=tuple(equations))


def _variable_and_number(eqn: Any) -> tuple[Any, Any] | None:
    """The operands of an equation of a variable and a number."""
    if len(eqn.invars) != 2 or isinstance(eqn.invars[0], jex.Literal) or not isinstance(eqn.invars[1], jex.Literal):
        return None
    return eqn.invars[0], float(eqn.invars[1].val)
