"""ReLUs whose derivative reads their result.

The derivative of `max(x, 0)` asks whether `x > 0`, and the next product reads `max(x, 0)`. Both follow from x, so a
stash that has to serve both holds x, and a backward computes the result again before the product reads it. But `x > 0`
where `max(x, 0) > 0`, also of NaN. So the result serves both, and the product reads it from the stash as it is.
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
        if eqn.primitive.name in ("max", "gt") and [isinstance(v, jex.Literal) for v in eqn.invars] == [False, True]:
            variable, number = eqn.invars[0], float(eqn.invars[1].val)
            if eqn.primitive.name == "max":
                maxima.setdefault((variable, number), eqn.outvars[0])
            elif (variable, number) in maxima:
                eqn = eqn.replace(invars=[maxima[variable, number], eqn.invars[1]])
        equations.append(eqn)
    return dataclasses.replace(program, equations=tuple(equations))
