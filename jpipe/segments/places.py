"""Places at which a traced model can be cut.

    inputs ──equations──│──equations──│──equations── outputs
                      place         place

What crosses a place is all that later equations need of earlier ones, apart from what each segment computes again:
values that do not depend on the data (of weights and constants), and *cheap* values, functions of the model's inputs
alone without products, such as masks and positions. Of these the inputs themselves cross.
"""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax.extend.core as jex

from jpipe.layers.avals import is_key, num_bytes
from jpipe.layers.equations import variables
from jpipe.segments.program import ModelProgram, has_product, is_loop


class CutError(ValueError):
    """A model cannot be cut as it should be."""


@dataclasses.dataclass(frozen=True, eq=False)
class Roles:
    """The inputs of a traced model by their meaning; variables.

    Attributes:
      parameters: weights.
      state: mutable state.
      keys: random keys.
      data: the model's inputs.
      results: what the model returns and reports.
      new_state: the state after the call, in the order of `state`; `()` in evaluation.
    """

    parameters: tuple[Any, ...]
    state: tuple[Any, ...]
    keys: tuple[Any, ...]
    data: tuple[Any, ...]
    results: tuple[Any, ...]
    new_state: tuple[Any, ...]

    @property
    def held(self) -> tuple[Any, ...]:
        """The inputs that any segment may read: parameters, state and keys."""
        return (*self.parameters, *self.state, *self.keys)


_SMALL = 16
"""A value that is so many times smaller than another does not count beside it: a statistic of each row, say, that all
blocks add to."""


@dataclasses.dataclass(frozen=True)
class CutPlace:
    """A place between two equations.

    Attributes:
      position: the number of equations before it.
      values: variables that cross, computed before it.
      inputs: inputs of the model that cross.
      mark: the number of the step before it, of the equal place after this step, of parameters that are read before
        it, and, if there are any, of leaves of the state in `DataFlow.read_and_written` that are read before it; or the
        name of a forced place. Traces of one model in training and in evaluation have equal marks at equal places.
    """

    position: int
    values: tuple[Any, ...]
    inputs: tuple[Any, ...]
    mark: tuple

    @property
    def crossing(self) -> tuple[Any, ...]:
        """All variables that cross."""
        return (*self.values, *self.inputs)

    @property
    def num_large(self) -> int:
        """The number of computed values that cross, without those that are much smaller than the largest."""
        sizes = [num_bytes([v.aval]) for v in self.values]
        return sum(_SMALL * size >= max(sizes) for size in sizes)


class DataFlow:
    """What of a traced model depends on what.

    Attributes:
      program: of the model.
      roles: of its inputs.
      varying: the variables that differ from microbatch to microbatch, and must be passed on.
      cheap: the variables that follow from the model's inputs alone, without products or loops.
      passed: the variables that are passed on where they cross a place.
      ends: the positions at which the equations were put in order to be cut, see `Placement`.
    """

    def __init__(self, program: ModelProgram, roles: Roles, ends: tuple[int, ...] = ()):
        self.program, self.roles, self.ends = program, roles, ends
        effects = [v for eqn in program.equations if eqn.effects for v in eqn.outvars]
        self.varying = program.depending_on([*roles.data, *self._draws(), *effects])
        self.cheap = program.computed_from(roles.data, lambda e: not (has_product(e) or is_loop(e) or e.effects))
        self.cheap &= self.varying
        self.passed = self.varying - self.cheap

    def _draws(self) -> list:
        """Random numbers, and keys that several equations draw from: they are the same wherever they are read."""
        drawn: dict[Any, int] = {}
        numbers = []
        keys = self.program.depending_on(self.roles.keys)
        for eqn in self.program.equations:
            used = {v for v in variables(eqn.invars) if v in keys and is_key(v.aval)}
            if used and not all(is_key(v.aval) for v in eqn.outvars):
                numbers += eqn.outvars
                drawn |= {v: drawn.get(v, 0) + 1 for v in used}
        return numbers + [v for v, number in drawn.items() if number > 1]

    @functools.cached_property
    def steps(self) -> list[int]:
        """Positions of products and lookups in tables; without any, of all equations that apply weights to data."""
        weight_values = self.program.depending_on(self.roles.parameters) - self.varying
        applied, products = [], []
        for i, eqn in enumerate(self.program.equations):
            if not any(v in self.varying and v not in self.cheap for v in eqn.outvars):
                continue
            reads_weights = any(v in weight_values for v in variables(eqn.invars))
            if has_product(eqn) or (reads_weights and eqn.primitive.name == "gather"):
                products.append(i)
            if reads_weights:
                applied.append(i)
        return products or applied

    # -- Places

    def places(self, moving: frozenset[int] = frozenset()) -> list[tuple[CutPlace, ...]]:
        """After each step but the last the narrowest place, in order; where several are equal, the last and the first.

        What follows a product element by element is computed beside it at the last, and beside the next product at the
        first. Between two reads of state that moves, each stretch has its own last and first, and no place is inside of
        a write if another is as narrow.

        Args:
          moving: `read_and_written` of the trace in training.
        """
        crossing = self._crossing
        reads_of_state = sorted(self.reads_for_results[i][0] for i in moving if i in self.reads_for_results)
        inside = self._inside_of_writes
        places = []
        for number, (first, stop) in enumerate(itertools.pairwise(self.steps)):
            candidates = range(first + 1, stop + 1)
            width = min(_width(crossing[i]) for i in candidates)
            narrowest = [i for i in candidates if _width(crossing[i]) == width]
            narrowest = [i for i in narrowest if i not in inside] or narrowest
            stretches: dict[int, list[int]] = {}
            for i in narrowest:
                stretches.setdefault(bisect.bisect_left(reads_of_state, i), []).append(i)
            equal = []
            for num_read, stretch in stretches.items():
                of_state = (num_read,) if moving else ()
                ends = dict.fromkeys((stretch[-1], stretch[0]))
                equal += [self._place(i, (number, n), of_state) for n, i in enumerate(ends)]
            places.append(tuple(equal))
        return places

    def narrowest_before(self, position: int) -> int:
        """The last of the positions between a step and a position after it at which the least crosses."""
        number = bisect.bisect_left(self.steps, position)
        if number == 0:
            return position
        return min(reversed(range(self.steps[number - 1] + 1, position + 1)), key=lambda i: _width(self._crossing[i]))

    def place_at(self, position: int, mark: tuple) -> CutPlace:
        """The place after some equations."""
        return CutPlace(position, *self._crossing[position], mark)

    def _place(self, position: int, number: tuple, of_state: tuple) -> CutPlace:
        return self.place_at(position, (*number, bisect.bisect_left(self._sorted_reads, position), *of_state))

    @property
    def read_and_written(self) -> frozenset[int]:
        """The numbers of the leaves of the state that a call writes, and that what it returns follows from."""
        return frozenset(self.reads_for_results.keys() & self.writes.keys())

    @functools.cached_property
    def writes(self) -> dict[int, int]:
        """Number of a leaf of the state that data moves -> the equation that computes its new value."""
        computed_at = {v: i for i, eqn in enumerate(self.program.equations) for v in eqn.outvars if v in self.varying}
        new_values = ((n, v) for n, v in enumerate(self.roles.new_state) if not isinstance(v, jex.Literal))
        return {n: computed_at[v] for n, v in new_values if v in computed_at}

    @functools.cached_property
    def reads_for_results(self) -> dict[int, list[int]]:
        """Number of a leaf of the state -> the equations that read it, of those that the results follow from."""
        if not self.roles.state:
            return {}
        effects = [eqn for eqn in self.program.equations if eqn.effects]
        needed = self.program.part(self.program.inputs, self.roles.results, effects).equations
        ids = set(map(id, needed))
        reads: dict[int, list[int]] = {}
        for n, v in enumerate(self.roles.state):
            equations = [i for i in self.reads.get(v, ()) if id(self.program.equations[i]) in ids]
            reads |= {n: equations} if equations else {}
        return reads

    @functools.cached_property
    def _inside_of_writes(self) -> set[int]:
        """Positions between what reads a leaf of the state for the results and what writes it."""
        inside: set[int] = set()
        for n in self.read_and_written:
            touching = [*self.reads_for_results[n], self.writes[n]]
            inside.update(range(min(touching) + 1, max(touching) + 1))
        return inside

    @functools.cached_property
    def _sorted_reads(self) -> list[int]:
        return sorted(self.first_reads.values())

    @functools.cached_property
    def first_reads(self) -> dict[Any, int]:
        """Parameter that is read -> the first equation on data that reads it, or what follows from it."""
        return {v: self.reads[v][0] for v in self.roles.parameters if v in self.reads}

    @functools.cached_property
    def reads(self) -> dict[Any, list[int]]:
        """Parameter or leaf of the state -> the equations on data that read it, or what follows from it."""
        sources: dict[Any, set] = {v: {v} for v in (*self.roles.parameters, *self.roles.state)}
        reads: dict[Any, list[int]] = {}
        for i, eqn in enumerate(self.program.equations):
            read = set().union(*(sources.get(v, ()) for v in variables(eqn.invars)))
            if any(v in self.varying for v in eqn.outvars):
                for v in read:
                    reads.setdefault(v, []).append(i)
            else:
                sources |= {v: read for v in eqn.outvars}
        return reads

    @functools.cached_property
    def _crossing(self) -> list[tuple[tuple, tuple]]:
        """For each position the values and the inputs that cross there."""
        equations, end = self.program.equations, len(self.program.equations)
        born = {v: i for i, eqn in enumerate(equations) for v in eqn.outvars if v in self.passed}
        last: dict[Any, int] = {}
        inputs_last: dict[Any, int] = {}
        origins = {v: {v} for v in self.roles.data}

        def read(v: Any, i: int) -> None:
            if v in born:
                last[v] = i
            for x in origins.get(v, ()):
                inputs_last[x] = i

        for i, eqn in enumerate(equations):
            needs_data = any(v in self.passed for v in eqn.outvars) or eqn.effects
            for v in variables(eqn.invars):
                if needs_data:
                    read(v, i)
            if any(v in self.cheap for v in eqn.outvars):
                sources = set().union(*(origins.get(v, ()) for v in variables(eqn.invars)))
                origins |= {v: sources for v in eqn.outvars}
        for v in variables(self.roles.results):
            read(v, end)
        alive: dict[Any, None] = {}
        ends: dict[int, list] = {}
        for v, i in last.items():
            ends.setdefault(i, []).append(v)
        result = []
        for i in range(end + 1):
            if i > 0:
                alive |= dict.fromkeys(v for v in equations[i - 1].outvars if last.get(v, -1) >= i)
                for v in ends.get(i - 1, ()):
                    alive.pop(v, None)
            result.append((tuple(alive), tuple(x for x in self.roles.data if inputs_last.get(x, -1) >= i)))
        return result


def _width(crossing: tuple[tuple, tuple]) -> tuple[int, int]:
    """The number of values that cross, and bytes."""
    values, inputs = crossing
    return len(values), num_bytes([v.aval for v in (*values, *inputs)])


def narrow(places: Sequence[tuple[CutPlace, ...]], at_least: int = 0) -> list[tuple[CutPlace, ...]]:
    """The places that are outside of blocks.

    Inside of a residual block more values cross than before and after it. So do they between the ends of a skip
    connection, but there the number rises and falls several times, once for each block, or it stays over half of the
    model.

    Args:
      places: all places, in order.
      at_least: the number of places that are needed. If fewer are outside of blocks, those where fewer values cross
        than on one side are taken too, and then all.
    """
    if not places:
        return []
    counts = [place.num_large for place, *_ in places]
    kept: set[int] = set()
    for count in set(counts):
        for run in _runs(range(len(counts)), [c >= count for c in counts]):
            rises = len(_runs(run, [c > count for c in counts]))
            equal = [i for i in run if counts[i] == count]
            is_level = 2 * len(equal) > len(run) and 2 * len(run) > len(counts)
            if rises > 1 or is_level or len(run) == len(counts):
                kept.update(equal)
    if len(kept) < at_least:
        around = [counts[0], *counts, counts[-1]]
        kept.update(i for i, count in enumerate(counts) if count <= min(around[i], around[i + 2]))
    if len(kept) < at_least:
        kept.update(range(len(counts)))
    return [places[i] for i in sorted(kept)]


def _runs(indices: Iterable[int], chosen: Sequence[bool]) -> list[list[int]]:
    """The longest runs of consecutive indices that are chosen."""
    return [list(run) for is_chosen, run in itertools.groupby(indices, chosen.__getitem__) if is_chosen]
