"""What a `jax.shard_map` in a layer hands its backward, so that the choice of the stash can look into it.

JAX makes each value that a backward reads a result of the map: seven of the hidden units of an expert, because the
derivative of GELU has as many. All follow from one by elementwise operations, which `jpipe.layers.residuals` computes
again where it sees them. So such a result becomes a map of its own, of what the elementwise operations read:

    mapped(inputs) -> results, residuals      becomes     mapped(inputs) -> results, values
                                                          mapped(inputs, values) -> residual, for each residual
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import PartitionSpec

from jpipe.layers.equations import Equations, variables
from jpipe.layers.mapped import equation, mapped_p


def with_own_maps(program: Equations, residuals: Sequence, is_free: Callable[[Any], bool]) -> Equations:
    """A program in which residuals of maps are maps of their own.

    Args:
      program: the forward of a layer.
      residuals: those of its outputs that only the backward reads.
      is_free: whether an equation takes no time if it runs again.
    """
    results = program.outputs[: len(program.outputs) - len(residuals)]
    read = {v for eqn in program.equations for v in variables(eqn.invars)} | {*variables(results)}
    only_residuals = {*variables(residuals)} - read
    equations: list[Any] = []
    for eqn in program.equations:
        numbers = [i for i, v in enumerate(eqn.outvars) if v in only_residuals]
        equations += _Split(eqn, is_free).equations(numbers) if eqn.primitive is mapped_p and numbers else [eqn]
    return dataclasses.replace(program, equations=tuple(equations))


class _Split:
    """A `mapped`, some results of which become maps of their own.

    A value inside of the map is handed on as `[devices, ...]`, the values of all devices.
    """

    def __init__(self, eqn: Any, is_free: Callable[[Any], bool]):
        self._eqn, self._is_free = eqn, is_free
        self._body = Equations.held(eqn.params["jaxpr"])
        self._maker = {v: inner for inner in self._body.equations for v in inner.outvars}
        self._sizes = dict(eqn.params["sizes"])
        operands = zip(eqn.invars, eqn.params["in_specs"], strict=True)
        self._given = dict(zip(self._body.inputs, operands, strict=True))

    def equations(self, numbers: Sequence[int]) -> list:
        """The equations in the place of the `mapped`.

        Args:
          numbers: of the results that may be apart.
        """
        outputs, eqn = self._body.outputs, self._eqn
        sources = {i: self._sources(outputs[i]) for i in numbers}
        # A result that no free equation computes stays, unless other results need it too.
        made = {i: needed for i, needed in sources.items() if outputs[i] in self._given or outputs[i] not in needed}
        if not made:
            return [eqn]
        values = list(dict.fromkeys(v for needed in made.values() for v in needed if v not in self._given))
        sources = {i: needed for i, needed in sources.items() if i in made or outputs[i] in values}
        handed_on = {
            v: (
                jex.Var(jax.core.ShapedArray((math.prod(self._sizes.values()), *v.aval.shape), v.aval.dtype)),
                self._all,
            )
            for v in values
        }
        kept = [i for i in range(len(outputs)) if i not in sources]
        results = [(eqn.outvars[i], eqn.params["out_specs"][i]) for i in kept]
        first = self._map(self._body.inputs, {}, [outputs[i] for i in kept], results, handed_on)
        apart = [
            self._map(needed, handed_on, [outputs[i]], [(eqn.outvars[i], eqn.params["out_specs"][i])], {})
            for i, needed in sources.items()
        ]
        return [first, *apart]

    @property
    def _all(self) -> PartitionSpec:
        return PartitionSpec(tuple(self._sizes))

    def _sources(self, result: Any) -> list:
        """What free equations need to compute a result; the result itself, if another one computes it."""
        needed: dict[Any, None] = {}
        waiting = variables([result])
        seen = set(waiting)
        while waiting:
            v = waiting.pop()
            if v in self._body.constants:
                continue
            if v not in self._maker or not self._is_free(self._maker[v]):
                needed[v] = None
                continue
            new = [u for u in variables(self._maker[v].invars) if u not in seen]
            seen.update(new)
            waiting += new
        return list(needed)

    def _map(
        self,
        inputs: Sequence,
        handed_on: Mapping[Any, tuple],
        outputs: Sequence,
        results: Sequence[tuple],
        to_hand_on: Mapping[Any, tuple],
    ) -> Any:
        """A `mapped` of a part of the body.

        Args:
          inputs: variables of the body.
          handed_on: those of them that come from another map -> the variable there, and its spec.
          outputs: variables of the body, or literals.
          results: for each the variable of the result, and its spec.
          to_hand_on: variables of the body that other maps read -> their variables there, and their specs.
        """
        part = self._body.slice(inputs, [*outputs, *to_hand_on], effects=inputs is self._body.inputs)

        def run(*values: jax.Array) -> list:
            values = tuple(a[0] if v in handed_on else a for v, a in zip(inputs, values, strict=True))
            found = part(*values)
            return [*found[: len(outputs)], *(a[None] for a in found[len(outputs) :])]

        operands = [handed_on[v] if v in handed_on else self._given[v] for v in inputs]
        return equation(self._eqn, run, operands, [*results, *to_hand_on.values()], [*self._sizes.items()])
