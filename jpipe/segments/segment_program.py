"""The equations of a segment, and what enters and leaves it."""

import bisect
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jpipe.layers.avals import cast, is_real
from jpipe.layers.equations import variables
from jpipe.segments.passages import passages
from jpipe.segments.places import CutPlace, DataFlow, Roles
from jpipe.segments.trace import Trace


class Ports(NamedTuple):
    """The variables that enter and leave a segment in one trace.

    Attributes:
      data: the activation that it gets, or the inputs of the model.
      passed_on: the activation that it passes on, or what the model returns and reports.
      pop: name of a skip connection -> the variable that it gets by it.
      stash: name of a skip connection -> the variable that it sends by it.
    """

    data: tuple
    passed_on: tuple
    pop: Mapping[str, Any]
    stash: Mapping[str, Any]

    @classmethod
    def between(cls, roles: Roles, places: Sequence[CutPlace], k: int) -> "Ports":
        """The ports of segment number `k` if all that crosses its places is its activation."""
        data = places[k - 1].crossing if k else roles.data
        return cls(data, places[k].crossing if k < len(places) else roles.results, {}, {})


def ports_past_others(
    traces: tuple[Trace, Trace],
    places: tuple[Sequence[CutPlace], Sequence[CutPlace]],
    parts: Sequence[tuple["SegmentProgram", "SegmentProgram"]],
) -> list[list[Ports]] | None:
    """For training and for evaluation the ports of each segment, where values go past segments that do not read them.

    Returns:
      None if there are no such values, or others cross in evaluation than in training.
    """
    known = [list(dict.fromkeys(v for place in here for v in place.crossing)) for here in places]
    numbers = [{v: n for n, v in enumerate(variables_here)} for variables_here in known]
    crossing, crossing_there = (
        [[number[v] for v in place.crossing] for place in here] for here, number in zip(places, numbers, strict=True)
    )
    if crossing != crossing_there:
        return None
    reads = [
        {number[v] for part, number in zip(pair, numbers, strict=True) for v in part.read_values if v in number}
        for pair in parts
    ]
    ways = passages(crossing, reads)
    if not any(way.stash for way in ways):
        return None

    def ports(trace: Trace, variables_here: Sequence, k: int) -> Ports:
        roles, way = trace.flow.roles, ways[k]
        return Ports(
            tuple(variables_here[n] for n in ways[k - 1].activation) if k else roles.data,
            tuple(variables_here[n] for n in way.activation) if k + 1 < len(ways) else roles.results,
            {name: variables_here[n] for name, n in way.pop.items()},
            {name: variables_here[n] for name, n in way.stash.items()},
        )

    return [
        [ports(trace, variables_here, k) for k in range(len(ways))]
        for trace, variables_here in zip(traces, known, strict=True)
    ]


class SegmentProgram:
    """A segment in one trace of the model.

    Attributes:
      trace: of the model.
      program: of the segment, from all parameters, all of the state, keys, and what crosses the place before it.
      parameters, state: numbers of those that it reads.
      ports: what enters and leaves it.
      written: number of a leaf of the state that it moves -> its new value.
    """

    def __init__(
        self,
        trace: Trace,
        places: Sequence[CutPlace],
        k: int,
        owners: Sequence[frozenset[int]],
        ports: Ports | None = None,
    ):
        roles, equations = trace.flow.roles, trace.flow.program.equations
        self.trace, self._is_first, self.is_last = trace, k == 0, k == len(places)
        self.ports = ports or Ports.between(roles, places, k)
        positions = [0, *(place.position for place in places), len(equations)]
        effects = [eqn for eqn in equations[positions[k] : positions[k + 1]] if eqn.effects]
        self.written = {i: new for i, (new, owner) in enumerate(zip(roles.new_state, owners)) if k in owner}
        given = (*roles.held, *self.ports.data, *self.ports.pop.values())
        outputs = [*self.ports.passed_on, *self.ports.stash.values(), *self.written.values()]
        self.program = trace.flow.program.part(given, outputs, effects)
        read = self.program.read()
        self.parameters = [i for i, v in enumerate(roles.parameters) if v in read]
        self.state = [i for i, v in enumerate(roles.state) if v in read]

    @property
    def read_values(self) -> set:
        """The variables that its equations read, and that the last segment returns."""
        read = {v for eqn in self.program.equations for v in variables(eqn.invars)}
        return read | set(variables(self.program.outputs)) if self.is_last else read

    @functools.cached_property
    def text(self) -> str:
        """Segments with equal texts compute the same."""
        read = self.program.read()
        inputs = [v for v in self.program.inputs if v in read]
        return self.program.part(inputs, self.program.outputs).text()

    @property
    def form(self) -> tuple[int, ...]:
        """The numbers of values that it gets and passes on, in each way."""
        data, passed_on, pop, stash = map(len, self.ports)
        return data, passed_on, pop, stash

    def values(self, parameters: Sequence, state: Sequence, keys: Sequence, args: tuple) -> tuple:
        """Runs the segment: `(outputs, *stashed)`, what the model reports, and the new state by number.

        Args:
          parameters: of the whole model, None where the segment reads nothing.
          state: the same of the state.
          keys: random keys.
          args: the activation, and the values of skip connections.
        """
        activation, *popped = args
        data = jax.tree.leaves(activation) if self._is_first or len(self.ports.data) != 1 else [activation]
        # Between layers activations have the compute dtype. A model may widen them, as a quotient by a number in
        # float32 does, and the equations after it take no other dtype.
        ports = (*self.ports.data, *self.ports.pop.values())
        entering = [
            cast(a, v.aval.dtype) if is_real(v.aval) else a for v, a in zip(ports, (*data, *popped), strict=True)
        ]
        results = iter(self.program(*parameters, *state, *keys, *entering))
        passed_on = list(itertools.islice(results, len(self.ports.passed_on)))
        stashed = list(itertools.islice(results, len(self.ports.stash)))
        written = dict(zip(self.written, results, strict=True))
        reported: dict = {}
        if self.is_last:
            outputs, reported = self.trace.results.unflatten(passed_on)
        else:
            outputs = passed_on[0] if len(passed_on) == 1 else tuple(passed_on)
        return (outputs, *stashed) if stashed else outputs, reported, written


def owners_of_state(flow: DataFlow, places: Sequence[CutPlace]) -> list[frozenset[int]]:
    """The segments that write each leaf of the state.

    One segment has a leaf that data moves: that which computes its new value. A count, or what else no data enters, is
    written by each segment that reads it, for what it passes on or for what it writes: all of them have equal copies. A
    leaf that no call writes, or nothing reads, is left to the first.
    """
    roles = flow.roles
    if not roles.state:
        return []
    stops = [place.position for place in places]
    moved = {n: frozenset([bisect.bisect_right(stops, position)]) for n, position in flow.writes.items()}
    ports = [Ports.between(roles, places, k) for k in range(len(places) + 1)]
    others = {n: old for n, old in enumerate(roles.state) if n not in moved}
    readers: dict[int, frozenset[int]] = dict.fromkeys(others, frozenset())
    # A leaf may be read for the new value of a leaf that is read itself, such as a count for a rate.
    while True:
        written = [[roles.new_state[n] for n, ks in (moved | readers).items() if k in ks] for k in range(len(ports))]
        read = [
            flow.program.part((*roles.held, *port.data), [*port.passed_on, *values]).read()
            for port, values in zip(ports, written)
        ]
        before, readers = readers, {n: frozenset(k for k, r in enumerate(read) if v in r) for n, v in others.items()}
        if readers == before:
            break
    owners = moved | {n: ks or frozenset([0]) for n, ks in readers.items()}
    return [
        owners[n] if new is not old else frozenset([min(owners[n])])
        for n, (old, new) in enumerate(zip(roles.state, roles.new_state))
    ]


def inside_of_writes(
    roles: Roles,
    parts: Sequence[tuple["SegmentProgram", "SegmentProgram"]],
    owners: Sequence[frozenset[int]],
) -> set[int]:
    """The numbers of places that separate a segment that writes a leaf of the state from one that only reads it."""
    inside: set[int] = set()
    for i, (old, new) in enumerate(zip(roles.state, roles.new_state)):
        touching = {k for k, segment in enumerate(parts) if any(i in part.state for part in segment)}
        if new is not old and not touching <= owners[i]:
            inside.update(range(min(touching | owners[i]), max(touching | owners[i])))
    return inside
