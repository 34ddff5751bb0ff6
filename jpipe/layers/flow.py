"""Finds the arguments from which results of a function are computed, loops and calls included."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.interpreters import partial_eval

from jpipe.layers.equations import Equations, loop_counts, variables


@dataclasses.dataclass(frozen=True)
class Flow:
    """A traced function whose results are looked at one by one.

    Attributes:
      closed: the function, from and to flat lists.
      avals: abstract arguments.
    """

    closed: jex.ClosedJaxpr
    avals: Sequence

    @classmethod
    def of(cls, function: Callable[..., Sequence], *avals: Any) -> "Flow":
        """Traces a function from and to flat lists."""
        return cls(jax.make_jaxpr(function)(*avals), avals)

    def read(self, *results: int) -> set[int]:
        """The arguments that results depend on."""
        _, is_used = self._pruned(results)
        return {i for i, used in enumerate(is_used) if used}

    def source(self, result: int) -> int | None:
        """The argument that a result is; None if it is computed."""
        jaxpr = self.closed.jaxpr
        return _source(jaxpr, jaxpr.outvars[result])

    def slice(self, arguments: Sequence[int], results: Sequence[int]) -> Equations:
        """The equations from some of the arguments to some of the results."""
        pruned, is_used = self._pruned(results)
        run = jex.jaxpr_as_fun(jex.ClosedJaxpr(pruned, self.closed.consts))

        def function(*values: jax.Array) -> Sequence:
            value_of = dict(zip(arguments, values, strict=True))
            return run(*(value_of[i] for i, used in enumerate(is_used) if used))

        return Equations.trace(function, *(self.avals[i] for i in arguments))

    def _pruned(self, results: Sequence[int]) -> tuple[Any, Sequence[bool]]:
        jaxpr = self.closed.jaxpr
        wanted = [i in results for i, _ in enumerate(jaxpr.outvars)]
        return partial_eval.dce_jaxpr(jaxpr, wanted)


def inputs_read(equations: Equations, outputs: Sequence) -> set:
    """The input variables that outputs of equations depend on.

    `Equations.slice` keeps or drops a loop as a whole. Here each result of a loop counts by itself.
    """
    sliced = equations.slice(equations.inputs, outputs)
    empty = jax.make_jaxpr(lambda: ())().jaxpr
    needed = set(variables(sliced.outputs))
    for eqn in reversed(sliced.equations):
        used = [v in needed for v in eqn.outvars]
        if not any(used):
            continue
        operands = list(dict.fromkeys(variables(eqn.invars)))
        if eqn.effects:
            needed.update(operands)
            continue
        alone = empty.replace(invars=operands, outvars=eqn.outvars, eqns=[eqn])
        _, reads = partial_eval.dce_jaxpr(alone, used)
        needed.update(v for v, read in zip(operands, reads, strict=True) if read)
    return needed.intersection(sliced.inputs)


def _source(jaxpr: Any, v: Any) -> int | None:
    """The input of a jaxpr that a variable is, also if calls and loops hand it on; None if it is computed."""
    if isinstance(v, jex.Literal):
        return None
    if v in jaxpr.invars:
        return jaxpr.invars.index(v)
    for eqn in jaxpr.eqns:
        if v in eqn.outvars:
            inner = _source_in(eqn, eqn.outvars.index(v))
            return None if inner is None else _source(jaxpr, eqn.invars[inner])
    return None


def _source_in(eqn: Any, result: int) -> int | None:
    """The operand of an equation that a result is; None if it is computed."""
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if inner is None:
        return None
    inner = getattr(inner, "jaxpr", inner)
    operand = _source(inner, inner.outvars[result])
    if eqn.primitive.name == "scan" and operand is not None:
        # A loop hands on what it carries at one place, and each turn its own slice.
        first, carried = loop_counts(eqn.params)
        is_carried = result < carried and operand == first + result
        is_slice = result >= carried and operand >= first + carried
        return operand if is_carried or is_slice else None
    if eqn.primitive.name == "while":
        return None
    return operand


def casts_of(equations: Equations, inputs: Sequence) -> list:
    """For each input the dtype that every equation which reads it casts it to; None: something reads it as it is."""
    dtypes: dict[Any, set] = {v: set() for v in inputs}
    for eqn in equations.equations:
        for v in dict.fromkeys(variables(eqn.invars)):
            if v in dtypes:
                dtypes[v].add(eqn.params["new_dtype"] if eqn.primitive.name == "convert_element_type" else None)
    for v in variables(equations.outputs):
        if v in dtypes:
            dtypes[v].add(None)
    return [next(iter(read)) if len(read) == 1 else None for read in dtypes.values()]
