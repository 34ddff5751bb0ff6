"""Places the steps of a whole model on stages by the solvers of device placement.

    steps ──merged──> nodes ──measured──> graph ──solved──> a stage for each step

A step is a product or a lookup in a table. `jpipe._util.entry_points` names `placement_of` and
`boundaries_by_placement`; `Pipeline` calls them.
"""

import bisect
import math
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jpipe._util.warn import warn
from jpipe.costs import inner_layers
from jpipe.layers.avals import is_inexact, num_bytes
from jpipe.layers.trace import TrainingTrace
from jpipe.options.settings import Settings
from jpipe.plan._profile import LayerProfile, operations_of, programs_of
from jpipe.plan.pipelines import measured_for_table
from jpipe.segments.placement import Crossing, Placement, StepGraph
from jpipe.segments.places import CutError
from jpipe.segments.program import num_operations
from jpipe.solvers import Graph, Node, Solution, TooLarge, ideals, linearised

MOST_IDEALS = 4096
"""Nodes are merged until the graph has at most so many ideals, for which the solver takes seconds."""
MOST_NODES = 64
"""Nodes are merged until there are at most so many, because each kind of them is compiled and measured."""
LEAST_GAIN = 0.05
"""The share of seconds by which a placement must be faster than the best chain; two measurements differ by less."""
MIN_SECONDS = 0.2
"""Seconds for which each program of a node is measured, at least."""
NETWORK = 12.5e9
"""Bytes per second between devices where they cannot be measured: a network of 100 Gbit/s."""


class Costs(NamedTuple):
    """What the nodes of a model take.

    Attributes:
      forward, backward: for each node, and last for the loss, seconds for one microbatch.
      memory: for each node bytes of weights, gradients, optimizer and stashes.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    memory: tuple[float, ...]

    @property
    def seconds(self) -> list[float]:
        """Forward and backward together."""
        return [f + b for f, b in zip(self.forward, self.backward, strict=True)]


def placement_of(settings: Settings, microbatch: Any, key_impl: Any, memory_limit: float | None) -> Placement:
    """The stage of each step of a whole model, so that the slowest stage takes the least time.

    Args:
      settings: the settings of a pipeline.
      microbatch: an abstract microbatch.
      key_impl: implementation of the random keys.
      memory_limit: bytes of a device, where the stages can fit them; None: no limit.

    Raises:
      CutError: if the model has fewer parts for stages than the schedule has stages.

    References:
      Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020,
      arXiv:2006.16423, section 5.1.1.
    """
    model = _Model(settings, microbatch, key_impl, settings.steps(microbatch, key_impl), bandwidth_of(settings))
    cuts = [model.placed(memory_limit), *model.chain()]
    # Nodes are measured alone, and XLA makes other programs of stages. So the stages of both cuts are measured too.
    problems = {groups: model.measured(groups) for groups in cuts}
    limit = math.inf if memory_limit is None else memory_limit

    def rank(groups: tuple[int, ...]) -> tuple[bool, float]:
        problem = problems[groups]
        gain = LEAST_GAIN if groups == cuts[0] else 0
        return max(problem.costs.memory) > limit, max(problem.stage_loads) * (1 + gain)

    groups = min(problems, key=rank)
    *seconds, of_loss = problems[groups].costs.seconds
    seconds[-1] += of_loss
    num_stages = settings.schedule.num_stages
    held = model.graph.groups_of_held(model.graph.groups(dict(enumerate(groups)), num_stages))
    return Placement(groups, held, tuple(seconds))


class _Model(NamedTuple):
    """A whole model, whose steps are in groups: nodes, or stages."""

    settings: Settings
    microbatch: Any
    key_impl: Any
    graph: StepGraph
    bandwidth: float

    def measured(self, groups: tuple[int, ...]) -> "Problem":
        """The groups as the nodes of a problem, each measured as one program."""
        graph, number = self.graph, 1 + max(groups)
        settings = self.settings.placed(Placement(groups, is_all=True))
        costs = costs_of(settings, settings.trace(self.microbatch, self.key_impl), self.microbatch)
        group_of = {item: groups[numbers[0]] for item, numbers in graph.steps.items()}
        order = {(group_of[before], group_of[item]) for item, needs in graph.needs.items() for before in needs}
        crossing = graph.crossing(graph.groups(dict(enumerate(groups)), number), number)
        return Problem(costs, crossing, order, self.bandwidth)

    def placed(self, memory_limit: float | None) -> tuple[int, ...]:
        """The stage of each step, as the solver of device placement chooses it."""
        num_stages, steps = self.settings.schedule.num_stages, self.graph.steps
        nodes = merged_steps(self.graph, num_stages)
        if len(nodes) < num_stages:
            raise CutError(
                f"{self.settings.model} can be placed on at most {len(nodes)} stages, and the schedule "
                f"has {num_stages}: every stage needs a product, or a lookup in a table. Use fewer stages, or give the "
                "model as a list of layers."
            )
        node_of = {number: k for k, items in enumerate(nodes) for item in items for number in steps[item]}
        in_nodes = tuple(node_of[number] for number in range(len(node_of)))
        stages = solved(self.measured(in_nodes), num_stages, memory_limit)
        stage_of = {k: stage for stage, members in enumerate(stages) for k in members}
        return tuple(stage_of[k] for k in in_nodes)

    def chain(self) -> list[tuple[int, ...]]:
        """The stage of each step in the best cut between neighbours of the trace; none if there are too few places."""
        num_steps = len(self.graph.flow.steps)
        # The order of the trace, without marks of the user.
        settings = self.settings.placed(Placement((0,) * num_steps))
        try:
            traced = settings.trace(self.microbatch, self.key_impl)
        except CutError:
            return []
        starts = _boundaries(settings, traced, self.microbatch, self.bandwidth)
        marks = [traced.layers[start - 1].options.segment or () for start in starts]
        last_steps = [number for number, *_ in marks]
        return [tuple(bisect.bisect_left(last_steps, number) for number in range(num_steps))]


def boundaries_by_placement(settings: Settings, traced: TrainingTrace, microbatch: Any) -> list[int]:
    """The boundaries of a list of layers, so that the slowest stage with its transfers takes the least time.

    The layers stay in their order.
    """
    return _boundaries(settings, traced, microbatch, bandwidth_of(settings))


def _boundaries(settings: Settings, traced: TrainingTrace, microbatch: Any, bandwidth: float) -> list[int]:
    """See `boundaries_by_placement`."""
    inner, num_stages = inner_layers(settings, traced, microbatch), settings.schedule.num_stages
    number = len(inner)
    costs = costs_of(settings, traced, microbatch)
    kept = slice(inner.start, inner.stop)
    costs = Costs(
        (*costs.forward[kept], costs.forward[-1]), (*costs.backward[kept], costs.backward[-1]), costs.memory[kept]
    )
    crossing = [
        Crossing(first - inner.start, frozenset({last - inner.start}), aval)
        for first, last, avals in (
            *((i, i + 1, traced.outputs[i]) for i in inner[:-1]),
            *(skip for skip in traced.skips.values() if {*skip[:2]} <= {*inner}),
        )
        for aval in avals
    ]
    order = {(i, i + 1) for i in range(number - 1)}
    stages = solved(Problem(costs, crossing, order, bandwidth), num_stages, None)
    return [inner.start + min(members) for members in stages[1:]]


def costs_of(settings: Settings, traced: TrainingTrace, microbatch: Any) -> Costs:
    """Measures the layers of a traced model on one device, and counts their bytes."""
    measured = measured_for_table(settings, traced, microbatch, MIN_SECONDS).in_table(settings.schedule)
    in_flight = int(settings.schedule.facts().in_flight.max())

    def seconds(layer: LayerProfile, operation: str) -> float:
        programs = programs_of(operation, measured.recompute)
        return sum(getattr(layer, program).median for program in programs)

    forward, *backward = operations_of(settings.schedule.splits_backward)
    layers = [*measured.layers, measured.loss]
    return Costs(
        tuple(seconds(layer, forward) for layer in layers),
        tuple(sum(seconds(layer, operation) for operation in backward) for layer in layers),
        tuple(map(float, measured.layer_bytes(in_flight))),
    )


def bandwidth_of(settings: Settings) -> float:
    """Bytes per second from a device to another one: measured, if this process has two of the mesh."""
    local = [d for d in settings.mesh.devices.flat if d.process_index == jax.process_index()]
    if len(local) < 2:
        return NETWORK
    size = 2**24
    a = jax.device_put(np.zeros(size // 4, np.float32), local[0]).block_until_ready()
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        jax.device_put(a, local[1]).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return size / statistics.median(seconds)


# -- Nodes


def merged_steps(graph: StepGraph, num_stages: int) -> list[list[int]]:
    """The items of a model that have steps, in nodes and in an order that the nodes can run in.

    An item joins the only one that needs it, or the only one that it needs, first those of the fewest operations. So no
    order of nodes is lost but for the cuts inside of them. It goes on until the nodes have few ideals, and none that is
    not needed for that has fewer operations than a 64th of a stage.
    """
    equations = graph.flow.program.equations
    work = {
        item: math.fsum(num_operations(equations[graph.flow.steps[number]]) for number in numbers)
        for item, numbers in graph.steps.items()
    }
    merged = _Merged(graph.needs, work)
    total, least = math.fsum(work.values()), min(len(work), 4 * num_stages)
    for share in (64, 32, 16, 8, 4, 2, 1):
        merged.join_below(total / (share * num_stages), least)
        if len(merged.members) <= MOST_NODES and num_ideals(merged.needs, MOST_IDEALS) is not None:
            break
    return merged.in_order()


class _Merged:
    """Nodes that join.

    Attributes:
      members: node -> its items. A node has the name of one of them.
      needs: node -> those that it needs.
    """

    def __init__(self, needs: Mapping[int, set[int]], work: Mapping[int, float]):
        self.members = {n: [n] for n in needs}
        self.needs = {n: set(before) for n, before in needs.items()}
        self._needed_by: dict[int, set[int]] = {n: set() for n in needs}
        for n, before in needs.items():
            for m in before:
                self._needed_by[m].add(n)
        self._work = dict(work)

    def join_below(self, work: float, least: int) -> None:
        """Joins nodes with less work than `work`, while there are more than `least`."""
        waiting = sorted(self.members, key=lambda n: (self._work[n], n), reverse=True)
        while waiting and len(self.members) > least:
            n = waiting.pop()
            if n not in self.members or self._work[n] >= work:
                continue
            only = next((side for side in (self._needed_by[n], self.needs[n]) if len(side) == 1), None)
            if only is not None:
                (other,) = only
                self._join(n, other)
                waiting.append(other)

    def _join(self, n: int, other: int) -> None:
        self.members[other] += self.members.pop(n)
        self._work[other] += self._work.pop(n)
        for here, there in ((self.needs, self._needed_by), (self._needed_by, self.needs)):
            for m in here.pop(n) - {other}:
                there[m].discard(n)
                there[m].add(other)
                here[other].add(m)
            here[other].discard(n)

    def in_order(self) -> list[list[int]]:
        """The items of each node, those of the first equation first where the order is free."""
        waits = {n: len(before) for n, before in self.needs.items()}
        nodes = []
        while waits:
            n = min((n for n, count in waits.items() if not count), key=lambda n: min(self.members[n]))
            del waits[n]
            nodes.append(sorted(self.members[n]))
            for m in self._needed_by[n]:
                waits[m] -= 1
        return nodes


def num_ideals(needs: Mapping[int, set[int]], limit: int) -> int | None:
    """The number of sets of nodes that have all that their nodes need; None if it is above `limit`."""
    bit = {n: 1 << k for k, n in enumerate(needs)}
    mask = {n: sum(bit[m] for m in before) for n, before in needs.items()}
    known, new = {0}, [0]
    while new:
        larger = {s | bit[n] for s in new for n in needs if not s & bit[n] and mask[n] & s == mask[n]} - known
        known |= larger
        if len(known) > limit:
            return None
        new = list(larger)
    return len(known)


# -- The problem and its solution


class Problem(NamedTuple):
    """The nodes of a model, to be placed.

    Attributes:
      costs: of the nodes.
      crossing: the values that cross from node to node.
      order: pairs of nodes, the first of which the second needs.
      bandwidth: bytes per second between devices.
    """

    costs: Costs
    crossing: Sequence[Crossing]
    order: Collection[tuple[int, int]]
    bandwidth: float

    @property
    def number(self) -> int:
        """The number of nodes."""
        return len(self.costs.memory)

    def transfer(self, value: Crossing) -> float:
        """Seconds in which a value crosses, and its gradient comes back."""
        times = 2 if is_inexact(value.aval) and value.group is not None else 1
        return times * num_bytes([value.aval]) / self.bandwidth

    def load(self, members: Collection[int]) -> float:
        """Seconds of a stage, with those of what it gets and sends."""
        inside = {*members}
        crossing = [v for v in self.crossing if len({k in inside for k in (v.group, *v.readers)}) == 2]
        seconds = self.costs.seconds
        return math.fsum([*(seconds[k] for k in members), *map(self.transfer, crossing)])

    @property
    def stage_loads(self) -> list[float]:
        """Seconds of each node, as a stage of its own; the last one has the loss too."""
        last = self.number - 1
        return [self.load([k, self.number] if k == last else [k]) for k in range(self.number)]

    @property
    def graph(self) -> Graph:
        """The nodes as a graph for the solvers.

        The first node "inputs" has the inputs of the model, the last one "outputs" the loss. Each value that crosses is
        a node beside the one that computes it, because values of one node may be read in different places.
        """
        names: list = [*range(self.number), "outputs"]
        nodes = [
            Node(name, forward=f, backward=b, memory_bytes=m, transfer=0.0, colocation=name)
            for name, f, b, m in zip(
                names, self.costs.forward, self.costs.backward, (*self.costs.memory, 0.0), strict=True
            )
        ]
        inputs = len(nodes)
        nodes.append(Node("inputs", memory_bytes=0.0, transfer=0.0, colocation="inputs"))
        order = {(a, b) for a, b in self.order if a != b}
        firsts = {*range(self.number)} - {after for _, after in order}
        lasts = {*range(self.number)} - {before for before, _ in order}
        edges = order | {(inputs, k) for k in firsts} | {(k, self.number) for k in lasts}
        # The solvers count every transfer twice if nodes have a backward.
        times = 2 if any(self.costs.backward) else 1
        for value in self.crossing:
            source = inputs if value.group is None else value.group
            edges |= {(len(nodes), reader) for reader in value.readers}
            nodes.append(
                Node(
                    f"value {len(nodes)}",
                    memory_bytes=0.0,
                    transfer=self.transfer(value) / times,
                    colocation=nodes[source].colocation,
                )
            )
        return Graph(tuple(nodes), tuple(sorted(edges)))


def solved(problem: Problem, num_stages: int, memory_limit: float | None) -> list[list[int]]:
    """The nodes of each stage.

    Args:
      problem: the nodes.
      num_stages: S, at most the number of nodes.
      memory_limit: bytes of a stage, which counts if nodes can be placed so that none needs more; None: no limit.
    """
    graph = problem.graph
    try:
        found = _solution(graph, num_stages, math.inf if memory_limit is None else memory_limit)
    except ValueError:
        if memory_limit is None:
            raise
        found = _solution(graph, num_stages, math.inf)
    place = {v: n for n, v in enumerate(graph.topological_order)}
    stages = [sorted((k for k in s.nodes if isinstance(k, int)), key=place.__getitem__) for s in found.stages]
    return _exactly(num_stages, [members for members in stages if members], problem)


def _solution(graph: Graph, num_stages: int, memory_limit: float) -> Solution:
    try:
        return ideals(graph, num_stages, memory_limit=memory_limit, max_ideals=2 * MOST_IDEALS)
    except TooLarge:
        found = linearised(graph, num_stages, memory_limit=memory_limit)
        warn(
            "the products of the model can be ordered in too many ways to try all, so that the stages are the best "
            f"along one order: the slowest takes {found.objective:.3g} s, and no placement takes less than "
            f"{found.bound:.3g} s."
        )
        return found


def _exactly(num_stages: int, stages: list[list[int]], problem: Problem) -> list[list[int]]:
    """As many stages as the schedule has: where fewer are faster, stages are cut one by one where it costs least."""
    while len(stages) < num_stages:
        cuts = [
            [*stages[:s], members[:i], members[i:], *stages[s + 1 :]]
            for s, members in enumerate(stages)
            for i in range(1, len(members))
        ]
        stages = min(cuts, key=lambda cut: sorted(map(problem.load, cut), reverse=True))
    return stages
