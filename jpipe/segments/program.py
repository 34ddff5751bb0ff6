"""A traced model as a list of equations of which any range can run by itself.

Unlike `jpipe.layers.equations`, which holds programs that are differentiated already, it keeps what says how to
differentiate: functions with derivatives of their own, and checkpoints. Only plain calls give way to what they call,
and loops over stacked weights to their turns.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.extend.core as jex

from jpipe.layers.constraint import constrain, constrain_p
from jpipe.layers.equations import Equations, value_of, variables
from jpipe.segments.loops import is_stacked_loop, unrolled

_PLAIN_CALLS = ("jit", "pjit", "closed_call")
_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")


@dataclasses.dataclass(frozen=True)
class ModelProgram(Equations):
    """A program without plain calls."""

    @classmethod
    def of(cls, closed: jex.ClosedJaxpr, num_weights: int = 0) -> "ModelProgram":
        """The program of a jaxpr, without equations whose results nobody needs; its first inputs are weights."""
        constants: dict[Any, Any] = {}
        equations: list = []
        # What follows from weights alone.
        weights = set(closed.jaxpr.invars[:num_weights])

        def inline(closed: Any, operands: Sequence) -> list:
            jaxpr = closed.jaxpr
            env = dict(zip(jaxpr.invars, operands, strict=True))
            for v, value in zip(jaxpr.constvars, closed.consts, strict=True):
                constants[v] = value
                env[v] = v

            def atom(a: Any) -> Any:
                return a if isinstance(a, jex.Literal) else env[a]

            for eqn in jaxpr.eqns:
                operands = [atom(a) for a in eqn.invars]
                if eqn.primitive.name in _PLAIN_CALLS:
                    results = inline(eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"], operands)
                elif is_stacked_loop(eqn, operands, weights):
                    results = unrolled(eqn, operands, inline)
                else:
                    # A jaxpr that is called twice has the same variables both times.
                    results = [jex.Var(v.aval) for v in eqn.outvars]
                    equations.append(eqn.replace(invars=operands, outvars=results))
                    if weights.issuperset(variables(operands)):
                        weights.update(results)
                env.update(zip(eqn.outvars, results))
            return [atom(a) for a in jaxpr.outvars]

        outputs = inline(closed, closed.jaxpr.invars)
        program = cls(constants, tuple(closed.jaxpr.invars), tuple(equations), tuple(outputs))
        return program.part(program.inputs, outputs, [eqn for eqn in equations if eqn.effects])

    def __call__(self, *args: Any) -> list:
        """Evaluates the equations; also under a JAX transformation."""
        env = {**self.constants, **dict(zip(self.inputs, args, strict=True))}
        for eqn in self.equations:
            values = [value_of(env, v) for v in eqn.invars]
            if eqn.primitive is constrain_p:  # on the mesh that the segment is traced for
                results = [constrain(*values, **eqn.params)]
            else:
                with eqn.ctx.manager:
                    results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
                results = results if eqn.primitive.multiple_results else [results]
            env.update(zip(eqn.outvars, results))
        return [value_of(env, v) for v in self.outputs]

    def part(self, inputs: Sequence, outputs: Sequence, effects: Sequence = ()) -> "ModelProgram":
        """As `slice`, in time that grows with the part and not with the program.

        Args:
          inputs: variables.
          outputs: variables or literals.
          effects: equations with side effects that it runs too.
        """
        given = set(inputs)
        chosen = {self._index[id(eqn)] for eqn in effects}
        needed = list(variables(outputs)) + [v for i in chosen for v in variables(self.equations[i].invars)]
        constants = {}
        # Only what is needed is visited: a model has as many segments as blocks.
        while needed:
            v = needed.pop()
            if v in given or v in constants:
                continue
            if v in self.constants:
                constants[v] = self.constants[v]
                continue
            i = self._producer[v]
            if i not in chosen:
                chosen.add(i)
                needed += variables(self.equations[i].invars)
        equations = tuple(self.equations[i] for i in sorted(chosen))
        return ModelProgram(constants, tuple(inputs), equations, tuple(outputs))

    @functools.cached_property
    def _producer(self) -> dict[Any, int]:
        """Variable -> position of the equation that computes it."""
        return {v: i for i, eqn in enumerate(self.equations) for v in eqn.outvars}

    @functools.cached_property
    def _index(self) -> dict[int, int]:
        return {id(eqn): i for i, eqn in enumerate(self.equations)}

    def computed_from(self, inputs: Iterable, allowed: Callable[[Any], bool]) -> set:
        """The variables that follow from `inputs` and constants alone, by equations that are `allowed`."""
        known = {*inputs, *self.constants}
        for eqn in self.equations:
            if allowed(eqn) and known.issuperset(variables(eqn.invars)):
                known.update(eqn.outvars)
        return known


def has_product(eqn: Any) -> bool:
    """Whether an equation computes matrix products or convolutions, in a loop, a branch or a call too."""
    if eqn.primitive.name in _PRODUCTS:
        return True
    return any(has_product(inner) for jaxpr in _inner(eqn) for inner in jaxpr.eqns)


def num_operations(eqn: Any) -> float:
    """An estimate of the operations of an equation: those of products, else one for each number that it computes."""
    sizes = [math.prod(v.aval.shape) for v in eqn.outvars]
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2.0 * sizes[0] * math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        return 2.0 * sizes[0] * math.prod(kernel) / kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    inner = sum(num_operations(e) for jaxpr in _inner(eqn) for e in jaxpr.eqns)
    return float(eqn.params.get("length", 1)) * inner if inner else float(sum(sizes))


def _inner(eqn: Any) -> list:
    """The jaxprs of an equation: of a loop, a branch or a call."""
    params = (p for value in eqn.params.values() for p in (value if isinstance(value, tuple) else (value,)))
    jaxprs = (getattr(p, "jaxpr", p) for p in params)
    return [jaxpr for jaxpr in jaxprs if hasattr(jaxpr, "eqns")]


def is_loop(eqn: Any) -> bool:
    """Whether an equation is a loop or a branch."""
    return eqn.primitive.name in ("scan", "while", "cond")
