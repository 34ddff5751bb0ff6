"""Stages that are no pieces of a trace: its equations in another order.

    steps ──a group for each──> equations sorted by group ──> a place at the end of each group

A group is a stage, or a part that is measured. An equation that is no step goes where the fewest bytes cross: a minimum
cut at the end of each group. Sorting keeps the order of equations in a group, and an equation is in no earlier group
than what it reads, so the program computes what it computed.
"""

import bisect
import dataclasses
import difflib
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jpipe.layers.avals import num_bytes
from jpipe.layers.cut import SINK, SOURCE, Network
from jpipe.layers.equations import variables
from jpipe.layers.layer import Layer
from jpipe.segments.places import CutError, CutPlace, DataFlow
from jpipe.segments.trace import Trace

_NAME = "placement"


class Placement(NamedTuple):
    """The group of each step of a model; it stands in the place of `ForcedPlaces`.

    Attributes:
      groups: for each step of the model in training its group; no step is in an earlier group than one that it needs.
      held: for each parameter, and then for each leaf of the state, the only group that reads or writes it; -1 if there
        is none. In evaluation and for batches of other shapes, where other bytes cross, it stays there. `()`: it is
        where the trace in training has it.
      seconds: for each group the seconds of a forward and a backward of one microbatch; `()` if they are not known.
      is_all: whether the model is cut at the ends of groups alone, and not also at narrow places inside of them.
    """

    groups: tuple[int, ...]
    held: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    is_all: bool = False

    @classmethod
    def of(cls, values: Sequence) -> "Placement":
        """The placement of its fields, which JSON may have held."""
        groups, held, seconds, is_all = values
        return cls(tuple(groups), tuple(held), tuple(seconds), is_all)

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return 1 + max(self.groups)

    def arranged(self, trained: Trace, evaluated: Trace) -> tuple[Trace, Trace]:
        """The model in training and in evaluation, its equations in the order of the groups.

        Raises:
          CutError: if it has other steps than those that the groups are of.
        """
        graph, graph_there = StepGraph(trained.flow), StepGraph(evaluated.flow)
        if len(trained.flow.steps) != len(self.groups):
            raise CutError(
                f"the stages were placed for a model of {len(self.groups)} products, and it has "
                f"{len(trained.flow.steps)} for these inputs. Make a pipeline for them."
            )
        groups = graph.groups(dict(enumerate(self.groups)), self.num_groups, self.held)
        there = {n: self.groups[m] for n, m in _same_steps(trained.flow, evaluated.flow).items()}
        groups_there = graph_there.groups(there, self.num_groups, self.held or graph.groups_of_held(groups))
        first, second = (
            dataclasses.replace(trace, flow=g.in_order(by_item, self.num_groups))
            for trace, g, by_item in ((trained, graph, groups), (evaluated, graph_there, groups_there))
        )
        return first, second

    def places(self, flow: DataFlow, paths: Sequence[str], state_paths: Sequence[str] = ()) -> list[CutPlace]:
        """The ends of the groups in a trace of `arranged`."""
        return [flow.place_at(position, (_NAME, k)) for k, position in enumerate(flow.ends)]

    def are_all(self, places: Sequence[CutPlace], num_stages: int) -> bool:
        """Whether the model is cut at these places alone."""
        return self.is_all

    def boundaries(self, boundaries: Any, layers: Sequence[Layer], num_stages: int) -> list[int]:
        """The segments with which the groups after the first begin."""
        return [k + 1 for k, layer in enumerate(layers) if (layer.options.segment or ("",))[0] == _NAME]


class Crossing(NamedTuple):
    """A value that is computed in one group and read in others.

    Attributes:
      group: where it is computed; None: it is an input of the model.
      readers: the other groups that read it; the number of groups for what the model returns.
      aval: its shape and dtype.
    """

    group: int | None
    readers: frozenset[int]
    aval: Any


class StepGraph:
    """The equations of a traced model that a group has to run: those on data. Others run wherever they are read.

    Attributes:
      items: the positions of these equations, in order. The equations between two that touch one leaf of the state that
        data moves are one item, as one segment must have them.
      before: for each item those that it reads, or whose side effects come before its own.
    """

    def __init__(self, flow: DataFlow):
        self.flow = flow
        equations = flow.program.equations
        kept = [i for i, eqn in enumerate(equations) if eqn.effects or any(v in flow.passed for v in eqn.outvars)]
        self.items = list(_joined(kept, self._state_positions.values()))
        self._item_of = {i: n for n, item in enumerate(self.items) for i in item}
        self._results = {*variables(flow.roles.results)} & flow.passed
        self._producer = {v: n for n, item in enumerate(self.items) for i in item for v in equations[i].outvars}
        self._readers: dict[Any, set[int]] = {}
        self.before: list[set[int]] = []
        last_effect: set[int] = set()
        for n, item in enumerate(self.items):
            for i in item:
                for v in variables(equations[i].invars):
                    self._readers.setdefault(v, set()).add(n)
            read = {self._producer[v] for i in item for v in variables(equations[i].invars) if v in self._producer}
            if any(equations[i].effects for i in item):
                read, last_effect = read | last_effect, {n}
            self.before.append(read - {n})

    @functools.cached_property
    def _state_positions(self) -> dict[int, list[int]]:
        """Number of a leaf of the state that data moves -> the equations on data that read or compute it."""
        roles, equations = self.flow.roles, self.flow.program.equations
        moved = {i: {*variables([new])} & self.flow.varying for i, new in enumerate(roles.new_state)}
        written = {i: roles.new_state[i] for i, by_data in moved.items() if by_data}
        computed_at = {v: i for i, eqn in enumerate(equations) for v in eqn.outvars if v in self.flow.passed}
        positions = {}
        for i, new in written.items():
            computed = [computed_at[v] for v in variables([new]) if v in computed_at]
            positions[i] = sorted({*self.flow.reads.get(roles.state[i], ()), *computed})
        return positions

    @functools.cached_property
    def steps(self) -> dict[int, list[int]]:
        """Item with steps -> their numbers."""
        steps: dict[int, list[int]] = {}
        for number, position in enumerate(self.flow.steps):
            steps.setdefault(self._item_of[position], []).append(number)
        return steps

    @functools.cached_property
    def needs(self) -> dict[int, set[int]]:
        """Item with steps -> the nearest such items that it needs."""
        nearest: list[set[int]] = []
        for before in self.before:
            nearest.append(set().union(*({m} if m in self.steps else nearest[m] for m in before)))
        return {n: nearest[n] for n in self.steps}

    def groups(self, of_step: Mapping[int, int], num_groups: int, of_held: Sequence[int] = ()) -> list[int]:
        """The group of each item: that of its steps, or one between them at whose ends the fewest bytes cross.

        Args:
          of_step: number of a step -> its group.
          num_groups: the number of groups.
          of_held: see `Placement.held`.

        Raises:
          CutError: if a step would be in an earlier group than what it needs.
        """
        fixed: dict[int, int] = {}
        for n, numbers in self.steps.items():
            wanted = {of_step[number] for number in numbers if number in of_step}
            if wanted:
                fixed[n] = max(wanted)
        most = self._at_most(fixed, num_groups)
        wished: dict[int, int] = {}
        for v, group in zip(self._held, of_held):
            if group >= 0:
                wished |= {self._item_of[position]: group for position in self.flow.reads.get(v, ())}
        least: list[int] = []
        for n, before in enumerate(self.before):
            lowest = max((least[m] for m in before), default=0)
            if n not in fixed and n in wished:
                fixed[n] = min(max(wished[n], lowest), most[n])
            if fixed.get(n, lowest) < lowest:
                raise CutError(
                    "the model computes its products in another order in evaluation than in training, so that no "
                    'stages have both. Give `boundaries`, or balance by "time" or "flops".'
                )
            least.append(fixed.get(n, lowest))
        most = self._at_most(fixed, num_groups)
        needed = self._needed
        free = [n for n in needed if least[n] < most[n]]
        groups = list(least)
        for border in range(num_groups - 1):
            here = {n for n in free if least[n] <= border < most[n]}
            for n in self._after_border(here, border, least, needed):
                groups[n] += 1
        for n, before in enumerate(self.before):
            if n not in needed and n not in fixed:
                groups[n] = max((groups[m] for m in before), default=0)
        return groups

    def _at_most(self, fixed: Mapping[int, int], num_groups: int) -> list[int]:
        """The last group that each item can be in."""
        most = [num_groups - 1] * len(self.items)
        for n in reversed(range(len(self.items))):
            most[n] = fixed.get(n, most[n])
            for m in self.before[n]:
                most[m] = min(most[m], most[n])
        return most

    @functools.cached_property
    def _needed(self) -> set[int]:
        """The items that lead to a step or to what the model returns."""
        needed: set[int] = {self._producer[v] for v in self._results} | set(self.steps)
        for n in reversed(range(len(self.items))):
            if n in needed:
                needed |= self.before[n]
        return needed

    def _after_border(self, free: set[int], border: int, least: Sequence[int], needed: set[int]) -> list[int]:
        """Those of the free items that come after the end of a group, if the fewest bytes cross there."""
        if not free:
            return []
        network = Network()
        equations = self.flow.program.equations
        for n in free.union(*(self.before[m] for m in free)):
            start = ("item", n) if n in free else SOURCE
            for v in (v for i in self.items[n] for v in equations[i].outvars if v in self.flow.passed):
                readers = self._readers.get(v, set()) & needed - {n}
                ends = [("item", m) if m in free else SINK for m in readers if m in free or least[m] > border]
                ends += [SINK] * (v in self._results)
                if ends:
                    network.connect(start, v, 1 + num_bytes([v.aval]))
                for end in ends:
                    network.connect(v, end)
            if n in free:  # what comes before the border reads nothing from after it
                for m in self.before[n] & free:
                    network.connect(("item", n), ("item", m))
        after = network.sink_side()
        return [n for n in free if ("item", n) in after]

    @property
    def _held(self) -> tuple:
        return (*self.flow.roles.parameters, *self.flow.roles.state)

    def groups_of_held(self, groups: Sequence[int]) -> tuple[int, ...]:
        """See `Placement.held`."""
        number = len(self.flow.roles.parameters)
        positions = [self.flow.reads.get(v, ()) for v in self.flow.roles.parameters]
        positions += [self._state_positions.get(i, ()) for i in range(len(self._held) - number)]
        touching = [{groups[self._item_of[position]] for position in at} for at in positions]
        return tuple(next(iter(found)) if len(found) == 1 else -1 for found in touching)

    def in_order(self, groups: Sequence[int], num_groups: int) -> DataFlow:
        """The equations sorted by group."""
        program = self.flow.program
        # What does not depend on data runs wherever it is read.
        group_of = [groups[self._item_of[i]] if i in self._item_of else 0 for i in range(len(program.equations))]
        order = sorted(range(len(program.equations)), key=group_of.__getitem__)
        starts = sorted(group_of)
        ends = tuple(bisect.bisect_left(starts, k) for k in range(1, num_groups))
        equations = tuple(program.equations[i] for i in order)
        return DataFlow(dataclasses.replace(program, equations=equations), self.flow.roles, ends)

    def crossing(self, groups: Sequence[int], num_groups: int) -> list[Crossing]:
        """The values that cross from group to group, with the inputs of the model."""
        crossing = []
        for v, readers in self._readers.items():
            group = groups[self._producer[v]] if v in self._producer else None
            if v not in self.flow.passed and v not in self.flow.roles.data:
                continue
            reading = {groups[n] for n in readers} - {group}
            reading |= {num_groups} if v in self._results else set()
            if reading:
                crossing.append(Crossing(group, frozenset(reading), v.aval))
        unread = [v for v in self._results if v not in self._readers]
        return crossing + [Crossing(groups[self._producer[v]], frozenset({num_groups}), v.aval) for v in unread]


def _joined(positions: Sequence[int], together: Iterable[Sequence[int]]) -> Iterable[tuple[int, ...]]:
    """The positions in order, those between the first and the last of each of some lists as one."""
    # Position -> the last one that must be with it.
    last: dict[int, int] = {}
    for at in together:
        if at:
            last[at[0]] = max(at[-1], last.get(at[0], 0))
    item: list[int] = []
    stop = -1
    for i in positions:
        if item and i > stop:
            yield tuple(item)
            item = []
        item.append(i)
        stop = max(stop, last.get(i, i))
    if item:
        yield tuple(item)


def _same_steps(here: DataFlow, there: DataFlow) -> dict[int, int]:
    """Number of a step in `there` -> the same step in `here`, which may have others beside."""
    first, second = _weights_of_steps(here), _weights_of_steps(there)
    blocks = difflib.SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks()
    return {block.b + k: block.a + k for block in blocks for k in range(block.size)}


def _weights_of_steps(flow: DataFlow) -> list[tuple[str, tuple[int, ...]]]:
    """The primitive of each step, and the numbers of the parameters that it reads."""
    read: dict[int, list[int]] = {}
    for number, v in enumerate(flow.roles.parameters):
        for position in flow.reads.get(v, ()):
            read.setdefault(position, []).append(number)
    equations = flow.program.equations
    return [(equations[i].primitive.name, tuple(read.get(i, ()))) for i in flow.steps]
