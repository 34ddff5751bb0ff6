"""A traced function as one flat list of equations: calls inlined, loops unrolled."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jpipe.layers.equations import loop_counts
from jpipe.soap.regions import Access, DimMap, identity

CALLS = {
    "checkpoint",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "jit",
    "pjit",
    "remat2",
}


@dataclasses.dataclass(eq=False)
class Value:
    """An array.

    Attributes:
      shape, dtype: the shape and dtype of the array.
      constant: whether it depends on no argument of the function.
      literal: its value, if it is a scalar that is written in the program.
      argument: its number among the arguments of the function; None if it is none.
    """

    shape: tuple[int, ...]
    dtype: Any
    constant: bool = False
    literal: Any = None
    argument: int | None = None


@dataclasses.dataclass(eq=False)
class FlatEquation:
    """One primitive of the program.

    Attributes:
      primitive: its name; "view" and "stack_turns" (the stack of the results of a loop's turns) are ours.
      inputs, outputs: the values that it reads and writes.
      params: the parameters of the primitive.
      repeats: the number of times that it runs.
      bind: the JAX primitive, for measuring.
      place: its place in the jaxpr, see `Place`.
      in_custom_jvp: whether it is in a function with a derivative rule of its own.
    """

    primitive: str
    inputs: list[Value]
    outputs: list[Value]
    params: dict[str, Any]
    repeats: int = 1
    bind: Any = None
    place: "Place" = ()
    in_custom_jvp: bool = False


Place = tuple[Any, ...]
"""The position of an equation: its number, below the number of the call that it is in.

In the body of a loop `(turn, number of turns)` stands between both. The stack of result `i` of a loop is `("stack", i)`
below the loop.
"""


@dataclasses.dataclass
class FlatProgram:
    """A flat program.

    Attributes:
      arguments: the arguments of the function.
      equations: the equations in the order of the program.
      results: the values that it returns.
    """

    arguments: list[Value]
    equations: list[FlatEquation]
    results: list[Value]


def flatten(closed: Any, max_equations: int) -> FlatProgram:
    """Inlines calls and unrolls `scan`.

    A loop that would give more than `max_equations` equations is unrolled into fewer turns, of which each stands for
    several.

    Args:
      closed: a `ClosedJaxpr`.
      max_equations: about how many equations a loop may become.
    """
    arguments = [_value(v.aval, argument=i) for i, v in enumerate(closed.jaxpr.invars)]
    equations: list[FlatEquation] = []
    walk = _Walk(equations, max_equations)
    results = walk.inline(closed.jaxpr, closed.consts, arguments, 1, ())
    return FlatProgram(arguments, _live(equations, results), results)


def called(eqn: Any) -> tuple[Any, Sequence]:
    """The jaxpr that an equation calls, and its constants."""
    inner = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params)
    return (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, [])


def _value(aval: Any, **options: Any) -> Value:
    return Value(tuple(map(int, aval.shape)), aval.dtype, **options)


def _live(equations: list[FlatEquation], results: list[Value]) -> list[FlatEquation]:
    """The equations that the results need."""
    needed, kept = set(results), []
    for equation in reversed(equations):
        if needed.intersection(equation.outputs):
            needed.update(equation.inputs)
            kept.append(equation)
    return kept[::-1]


class _Walk:
    def __init__(self, equations: list[FlatEquation], max_equations: int):
        self.equations = equations
        self.max_equations = max_equations

    def inline(
        self,
        jaxpr: Any,
        constants: Sequence,
        arguments: Sequence[Value],
        repeats: int,
        above: Place,
    ) -> list[Value]:
        env: dict[Any, Value] = dict(zip(jaxpr.invars, arguments))
        for variable, constant in zip(jaxpr.constvars, constants):
            is_value = isinstance(constant, Value)
            env[variable] = constant if is_value else _value(variable.aval, constant=True)

        def value(atom: Any) -> Value:
            if isinstance(atom, core.Literal):
                scalar = atom.val if np.ndim(atom.val) == 0 else None
                return _value(atom.aval, constant=True, literal=scalar)
            return env[atom]

        for number, eqn in enumerate(jaxpr.eqns):
            inputs = [value(atom) for atom in eqn.invars]
            results = self._equation(eqn, inputs, repeats, (*above, number))
            env.update(zip(eqn.outvars, results))
        return [value(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: Any, inputs: list[Value], repeats: int, place: Place) -> list[Value]:
        name = eqn.primitive.name
        if name in CALLS:
            first = len(self.equations)
            results = self.inline(*called(eqn), inputs, repeats, place)
            if name == "custom_jvp_call":
                for equation in self.equations[first:]:
                    equation.in_custom_jvp = True
            return results
        if name == "scan":
            return self._scan(eqn, inputs, repeats, place)
        constant = all(value.constant for value in inputs)
        outputs = [_value(v.aval, constant=constant) for v in eqn.outvars]
        self.equations.append(
            FlatEquation(
                name,
                inputs,
                outputs,
                dict(eqn.params),
                repeats,
                bind=eqn.primitive,
                place=place,
            )
        )
        return outputs

    def _scan(self, eqn: Any, inputs: list[Value], repeats: int, place: Place) -> list[Value]:
        body, length = eqn.params["jaxpr"], int(eqn.params["length"])
        num_consts, num_carry = loop_counts(eqn.params)
        consts, carry = inputs[:num_consts], inputs[num_consts:][:num_carry]
        xs = inputs[num_consts + num_carry :]
        most = max(self.max_equations // max(_count(body.jaxpr), 1), 1)
        turns = max((d for d in range(1, min(most, length) + 1) if length % d == 0), default=0)
        turn_length = length // turns if turns else 0
        stacked: list[list[Value]] = [[] for _ in eqn.outvars[num_carry:]]
        order = range(turns)[::-1] if eqn.params["reverse"] else range(turns)
        for turn in order:
            slices = [self._slice(x, turn * turn_length, turn_length, repeats) for x in xs]
            results = self.inline(
                body.jaxpr,
                body.consts,
                [*consts, *carry, *slices],
                repeats * turn_length,
                (*place, (turn, turns)),
            )
            carry = results[:num_carry]
            for stack, y in zip(stacked, results[num_carry:]):
                stack.append(y)
        ys = [
            self._stack(
                stack[:: -1 if eqn.params["reverse"] else 1],
                turn_length,
                v.aval,
                repeats,
                (*place, ("stack", i)),
            )
            for i, (stack, v) in enumerate(zip(stacked, eqn.outvars[num_carry:]))
        ]
        return [*carry, *ys]

    def _slice(self, x: Value, start: int, length: int, repeats: int) -> Value:
        """The rows `start` to `start + length` of `x`; a turn reads one of them."""
        rest = tuple(DimMap(n, i) for i, n in enumerate(x.shape[1:]))
        shifted = tuple(DimMap(n, i + 1) for i, n in enumerate(x.shape[1:]))
        rows = DimMap(x.shape[0], 0, offset=start, width=length)
        access = ((DimMap(1, None), *rest), (rows, *shifted))
        output = Value(x.shape[1:], x.dtype, x.constant)
        params = {"access": access}
        self.equations.append(FlatEquation("view", [x], [output], params, repeats))
        return output

    def _stack(self, values: list[Value], turn_length: int, aval: Any, repeats: int, place: Place) -> Value:
        constant = all(value.constant for value in values)
        output = _value(aval, constant=constant)
        params = {"turn_length": turn_length}
        self.equations.append(FlatEquation("stack_turns", values, [output], params, repeats, place=place))
        return output


def _count(jaxpr: Any) -> int:
    """Number of equations with those of calls and loops."""
    total = 0
    for eqn in jaxpr.eqns:
        inner = [
            getattr(inner_jaxpr, "jaxpr", inner_jaxpr)
            for key in ("jaxpr", "call_jaxpr", "fun_jaxpr")
            if (inner_jaxpr := eqn.params.get(key)) is not None
        ]
        times = int(eqn.params["length"]) if eqn.primitive.name == "scan" else 1
        total += times * sum(map(_count, inner)) if inner else 1
    return total


def stack_access(shape: tuple[int, ...], start: int, length: int) -> Access:
    """The access of a stack to the value of one turn, which becomes its rows `start` to `start + length`."""
    rest = tuple(DimMap(n, i + 1) for i, n in enumerate(shape))
    turn = DimMap(1, 0, offset=-start, divisor=max(length, 1))
    return ((turn, *rest), identity((1, *shape))[1:])


def item_bytes(dtype: Any) -> int:
    """Bytes of an element; a random key counts as 8."""
    return 8 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else dtype.itemsize
