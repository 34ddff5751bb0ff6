"""Loops over stacked weights, such as `nn.scan` over blocks, turn by turn."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jpipe.layers.equations import loop_counts, variables


def is_stacked_loop(eqn: Any, operands: Sequence, weights: set) -> bool:
    """Whether an equation is a loop whose turns read their own rows of what follows from weights alone."""
    if eqn.primitive.name != "scan":
        return False
    first = sum(loop_counts(eqn.params))
    return not weights.isdisjoint(variables(operands[first:])) and not weights.issuperset(variables(operands))


def unrolled(eqn: Any, operands: Sequence, inline: Callable[[Any, Sequence], list]) -> list:
    """The results of a loop, turn by turn.

    Args:
      eqn: a scan.
      operands: its variables and literals.
      inline: `(closed jaxpr, operands) -> results`.
    """
    num_consts, num_carry = loop_counts(eqn.params)
    length, body = eqn.params["length"], eqn.params["jaxpr"]
    consts, carry = operands[:num_consts], list(operands[num_consts : num_consts + num_carry])
    stacks = operands[num_consts + num_carry :]

    def emit(function: Callable, *atoms: Any) -> Any:
        (result,) = inline(jax.make_jaxpr(function)(*(a.aval for a in atoms)), atoms)
        return result

    turns = range(length)
    collected: list[list] = [[None] * length for _ in body.jaxpr.outvars[num_carry:]]
    for turn in reversed(turns) if eqn.params["reverse"] else turns:
        rows = [emit(lambda a, i=turn: lax.index_in_dim(a, i, keepdims=False), a) for a in stacks]
        results = inline(body, [*consts, *carry, *rows])
        carry = results[:num_carry]
        for parts, value in zip(collected, results[num_carry:]):
            # Beside what computed it, so that a segment has all of it.
            parts[turn] = emit(lambda a: lax.expand_dims(a, (0,)), value)
    return [*carry, *(emit(lambda *rows: lax.concatenate(rows, 0), *parts) for parts in collected)]
