"""Loops over stacked weights, such as `nn.scan` over blocks, as their turns.

    scan over w [L, ...]  ──unrolled──>  turn 0 reads w[0:1], turn 1 reads w[1:2], ...  ──>  parameters w#0, w#1, ...

A leaf that is read turn by turn alone is cut into a parameter for each turn, so that a segment has the weights of its
own turns and not all of them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from jpipe.layers.elementwise import ELEMENTWISE
from jpipe.layers.equations import variables
from jpipe.layers.model_tree import Turn
from jpipe.segments.places import DataFlow
from jpipe.segments.program import ModelProgram
from jpipe.segments.trace import Trace

_ROW_BY_ROW = frozenset(ELEMENTWISE) - {"constrain"}

Rows = tuple[int, list[Any]]
"""An axis, and a variable for each row along it."""


def stacked(trace: Trace) -> tuple[dict[int, int], dict[int, int]]:
    """The parameters, and the leaves of the state, that are read and written turn by turn: number -> axis of turns."""
    roles, program = trace.flow.roles, trace.flow.program
    readers: dict[Any, list] = {}
    for eqn in program.equations:
        for v in variables(eqn.invars):
            readers.setdefault(v, []).append(eqn)
    producer = {v: eqn for eqn in program.equations for v in eqn.outvars}
    held = {*variables(program.outputs)}

    def by_turns(v: Any, axis: int, is_kept: bool = False) -> bool:
        """Whether all equations that read a variable read one row along an axis."""
        if v in held and not is_kept:
            return False
        return all(
            _row(eqn, axis) is not None or (_is_row_by_row(eqn) and by_turns(eqn.outvars[0], _axis_after(eqn, axis)))
            for eqn in readers.get(v, ())
        )

    def axis_of(v: Any, new: Any = None) -> int | None:
        sizes = v.aval.shape
        if not readers.get(v):
            return None
        axes = (axis for axis, size in enumerate(sizes) if size > 1)
        return next(
            (
                axis
                for axis in axes
                if by_turns(v, axis, new is v) and (new in (None, v) or _pieces(producer.get(new), axis, sizes[axis]))
            ),
            None,
        )

    parameters = {i: axis_of(v) for i, v in enumerate(roles.parameters)}
    after = roles.new_state or (None,) * len(roles.state)
    state = {i: axis_of(old, new) for i, (old, new) in enumerate(zip(roles.state, after))}
    first, second = ({i: axis for i, axis in d.items() if axis is not None} for d in (parameters, state))
    return first, second


def in_turns(trace: Trace, parameters: Mapping[int, int], state: Mapping[int, int]) -> Trace:
    """The trace with an input for each turn of some parameters, and leaves of the state, of `stacked`."""
    roles, program = trace.flow.roles, trace.flow.program
    rows: dict[Any, Rows] = {}

    def expanded(leaves: Sequence, axes: Mapping[int, int]) -> tuple:
        inputs: list = []
        for i, v in enumerate(leaves):
            if i in axes:
                shape = list(v.aval.shape)
                number, shape[axes[i]] = shape[axes[i]], 1
                rows[v] = axes[i], [jex.Var(v.aval.update(shape=tuple(shape))) for _ in range(number)]
                inputs += rows[v][1]
            else:
                inputs.append(v)
        return tuple(inputs)

    inputs = expanded(roles.parameters, parameters), expanded(roles.state, state)
    env: dict[Any, Any] = {}
    equations: list = []

    def atom(a: Any) -> Any:
        return a if isinstance(a, jex.Literal) else env.get(a, a)

    for eqn in program.equations:
        source = next((v for v in variables(eqn.invars) if v in rows), None)
        if source is None:
            equations.append(eqn.replace(invars=[atom(a) for a in eqn.invars]))
            continue
        axis, turns = rows[source]
        turn = _row(eqn, axis)
        if turn is not None:
            env[eqn.outvars[0]] = turns[turn]
        else:
            made = [_on_row(eqn, turn) for turn in turns]
            equations += made
            rows[eqn.outvars[0]] = _axis_after(eqn, axis), [new.outvars[0] for new in made]
    producer = {v: eqn for eqn in equations for v in eqn.outvars}
    new_state: list = []
    for i, (old, new) in enumerate(zip(roles.state, roles.new_state)):
        if i not in state:
            new_state.append(atom(new))
        else:
            new_state += rows[old][1] if new is old else _pieces(producer[new], *_along(old, state[i])) or ()
    results = tuple(map(atom, roles.results))
    data = (*inputs[0], *inputs[1], *roles.keys, *roles.data)
    whole = ModelProgram(program.constants, data, tuple(equations), (*results, *new_state))
    effects = [eqn for eqn in equations if eqn.effects]
    roles = dataclasses.replace(
        roles, parameters=inputs[0], state=inputs[1], results=results, new_state=tuple(new_state)
    )
    return Trace(DataFlow(whole.part(data, whole.outputs, effects), roles), trace.results)


def _along(v: Any, axis: int) -> tuple[int, int]:
    return axis, v.aval.shape[axis]


def turns_of(leaf: Any, axis: int) -> list[Turn]:
    """The turns of a leaf that is cut along an axis."""
    number = leaf.shape[axis]
    return [Turn(i, number, axis) for i in range(number)]


def _row(eqn: Any, axis: int) -> int | None:
    """The row that an equation takes out of its operand along an axis; None if it does something else."""
    if eqn.primitive.name != "slice":
        return None
    starts, limits, strides = (eqn.params[name] for name in ("start_indices", "limit_indices", "strides"))
    shape = eqn.invars[0].aval.shape
    whole = all(
        (start, limit) == (0, size) for i, (start, limit, size) in enumerate(zip(starts, limits, shape)) if i != axis
    )
    is_row = whole and limits[axis] - starts[axis] == 1 and set(strides or (1,)) == {1}
    return starts[axis] if is_row else None


def _is_row_by_row(eqn: Any) -> bool:
    """Whether an equation has one operand, beside numbers, and works on each row of it by itself."""
    if len(variables(eqn.invars)) != 1 or len(eqn.outvars) != 1 or eqn.effects:
        return False
    if eqn.primitive.name == "transpose":
        return True
    operand = next(a for a in eqn.invars if not isinstance(a, jex.Literal))
    return eqn.primitive.name in _ROW_BY_ROW and eqn.outvars[0].aval.shape == operand.aval.shape


def _axis_after(eqn: Any, axis: int) -> int:
    """The axis of the result along which the rows lie."""
    return eqn.params["permutation"].index(axis) if eqn.primitive.name == "transpose" else axis


def _on_row(eqn: Any, row: Any) -> Any:
    """An equation of `_is_row_by_row` for one row."""
    literals = [a.val if isinstance(a, jex.Literal) else None for a in eqn.invars]
    position = next(i for i, a in enumerate(eqn.invars) if not isinstance(a, jex.Literal))

    def run(a: jax.Array) -> Any:
        operands = [*literals[:position], a, *literals[position + 1 :]]
        return eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))

    (made,) = jax.make_jaxpr(run)(row.aval).jaxpr.eqns
    operands = [row if i == position else a for i, a in enumerate(made.invars)]
    return made.replace(invars=operands, outvars=[jex.Var(v.aval) for v in made.outvars])


def _pieces(eqn: Any, axis: int, number: int) -> list | None:
    """The operands of a concatenation of rows along an axis; None if an equation is something else."""
    if eqn is None or eqn.primitive.name != "concatenate" or eqn.params["dimension"] != axis:
        return None
    return list(eqn.invars) if len(eqn.invars) == number else None
