"""What placing a graph on devices and hosts costs, made small; shared by the throughput solvers.

G: number of groups. k, l: number of devices and of hosts. N: number of closed sets.

The steady state of a pipeline is as slow as its slowest stage. A stage on a device takes the time of its
nodes and that of moving, once each, the outputs that cross its border either way; a stage on a host takes
the time of its nodes and pays for no transfer, since the data are in its memory.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from jpipe.solvers._scipy import import_scipy
from jpipe.solvers.graph import Graph, Solution, Stage

# Sums that differ by rounding alone are the same.
ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True)
class Problem:
    """A graph to be placed, in groups of nodes that share a stage.

    An output that crosses the border of a stage does so wherever it leads, so of an output only the set of
    groups that make or read it matters: a net. A stage pays for the nets that are partly in it.

    Attributes:
      graph: whose nodes are placed.
      num_devices: k.
      num_hosts: l; each is a processor of its own.
      memory_limit: bytes of a device.
      transfers: of each node, the time that its output takes to cross a border.
      groups: positions of nodes; each node in one.
      device: [G] time on a device; infinite where a device can't run it.
      host: [G] time on a host; infinite where a host can't.
      memory: [G] bytes on a device.
      order: (a, b): no stage with b may come before one with a. Without cycles.
      nets: what crossing costs, by the groups that share an output, at least two.
    """

    graph: Graph
    num_devices: int
    num_hosts: int
    memory_limit: float
    transfers: tuple[float, ...]
    groups: tuple[tuple[int, ...], ...]
    device: np.ndarray
    host: np.ndarray
    memory: np.ndarray
    order: tuple[tuple[int, int], ...]
    nets: dict[frozenset[int], float]

    @functools.cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """Of each group, those with an edge to it in `order`."""
        return _adjacent(len(self.groups), ((b, a) for a, b in self.order))

    @functools.cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """Of each group, those it has an edge to in `order`."""
        return _adjacent(len(self.groups), self.order)

    @property
    def memory_is_enough(self) -> bool:
        """Whether one device holds all that devices can run."""
        return self.memory[np.isfinite(self.device)].sum() <= self.most_memory

    @property
    def most_memory(self) -> float:
        """The limit, and what rounding may add to a sum of sizes."""
        return self.memory_limit * (1 + ROUNDING)

    def stage_memory(self, groups: Iterable[int]) -> float:
        """Bytes that a stage takes of a device."""
        return sum(
            self.graph.nodes[v].device_bytes for g in groups for v in self.groups[g]
        )

    def stage_load(self, groups: Iterable[int], on_host: bool) -> float:
        """Time that a stage takes, from the graph itself."""
        inside = {v for g in groups for v in self.groups[g]}
        nodes = self.graph.nodes
        if on_host:
            return math.fsum(nodes[v].host for v in inside)
        crossing = {u for u, v in self.graph.edges if (u in inside) != (v in inside)}
        return math.fsum(
            [nodes[v].seconds for v in inside] + [self.transfers[u] for u in crossing]
        )

    def solution(
        self,
        solver: str,
        stages: Sequence[tuple[Sequence[int], bool]],
        bound: float,
        gap: float = 1e-9,
    ) -> Solution:
        """The record of a split.

        Args:
          solver: its name.
          stages: groups and whether a host runs them, first to last.
          bound: no split has less.
          gap: the part of the objective by which it may exceed the bound of the best; as rounding may make it.
        """
        place = {v: p for p, v in enumerate(self.graph.topological_order)}
        loads, records = [], []
        for groups, on_host in stages:
            nodes = sorted((v for g in groups for v in self.groups[g]), key=place.get)
            if nodes:
                ids = tuple(self.graph.nodes[v].id for v in nodes)
                records.append(Stage(ids, on_host=bool(on_host)))
                loads.append(self.stage_load(groups, on_host))
        objective = max(loads, default=0.0)
        if objective <= bound * (1 + 1e-9):
            bound = objective
        optimal = objective - bound <= gap * objective
        return Solution(solver, objective, tuple(records), bound, optimal)


class TooLarge(ValueError):
    """There is more to look through than was allowed."""


def _adjacent(num_groups: int, edges: Iterable) -> tuple[tuple[int, ...], ...]:
    of: list[list[int]] = [[] for _ in range(num_groups)]
    for a, b in edges:
        of[a].append(b)
    return tuple(map(tuple, of))


def placement(
    graph: Graph,
    num_devices: int | None = None,
    num_hosts: int | None = None,
    memory_limit: float | None = None,
    bandwidth: float | None = None,
    *,
    contiguous: bool = True,
) -> Problem:
    """Groups what must share a stage, and prices it.

    Nodes of one colocation share a stage. Only the forward pass is ordered, the backward pass follows it the
    other way round; of a colocation without a forward node, the edges of the backward pass are turned round
    instead. Groups on a cycle of that order share a stage too: no order of stages keeps them apart.

    Of a graph whose nodes have both passes in them, an output that crosses a border comes back as a gradient
    of its size, so it's paid for twice.

    Args:
      graph: the graph.
      num_devices: k; None: the graph's.
      num_hosts: l; None: the graph's.
      memory_limit: bytes of a device; None: the graph's, or no limit.
      bandwidth: bytes a unit of time, for nodes without a `transfer`.
      contiguous: whether stages must be in order; if not, there is no order to keep.

    Raises:
      ValueError: if something is missing or can't be, an edge leads from the backward to the forward pass,
        or a group has nowhere to go.
    """
    sparse, csgraph = import_scipy("sparse"), import_scipy("sparse.csgraph")
    num_devices = graph.num_devices if num_devices is None else num_devices
    num_hosts = graph.num_hosts if num_hosts is None else num_hosts
    limit = graph.memory_limit if memory_limit is None else memory_limit
    limit = math.inf if limit is None else limit
    if num_devices is None:
        raise ValueError(
            "`num_devices` must be given, got None: the graph doesn't name it either."
        )
    for name, value in (("num_devices", num_devices), ("num_hosts", num_hosts)):
        if value < 0:
            raise ValueError(f"`{name}` must be at least 0, got {value}.")
    if num_devices + num_hosts < 1:
        raise ValueError(
            "`num_devices` and `num_hosts` must not both be 0: nothing could run. Add a device."
        )
    if not limit >= 0:
        raise ValueError(f"`memory_limit` must be at least 0, got {limit}.")

    transfers = _transfers(graph, bandwidth)
    key_of: dict[tuple, int] = {}
    group_of = np.array(
        [
            key_of.setdefault(
                ("alone", v) if node.colocation is None else ("with", node.colocation),
                len(key_of),
            )
            for v, node in enumerate(graph.nodes)
        ],
        np.intp,
    )
    order = _order(graph, group_of, len(key_of)) if contiguous else set()
    ends = np.array(sorted(order), np.intp).reshape(-1, 2)
    links = sparse.coo_array(
        (np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(len(key_of),) * 2
    )
    num_groups, component = csgraph.connected_components(links, connection="strong")
    _, first, component = np.unique(component, return_index=True, return_inverse=True)
    component = np.argsort(np.argsort(first))[component]  # in the nodes' order
    group_of = component[group_of]
    order = {(int(component[a]), int(component[b])) for a, b in order}

    groups: list[list[int]] = [[] for _ in range(num_groups)]
    for v in graph.topological_order:
        groups[group_of[v]].append(v)
    device, host, memory = np.zeros((3, num_groups))
    for v, node in enumerate(graph.nodes):
        device[group_of[v]] += node.seconds if node.on_device else math.inf
        host[group_of[v]] += math.inf if node.host is None else node.host
        memory[group_of[v]] += node.device_bytes
    nets: dict[frozenset[int], float] = {}
    for u, after in enumerate(graph.successors):
        net = frozenset(int(group_of[v]) for v in (u, *after))
        if len(net) > 1 and transfers[u]:
            nets[net] = nets.get(net, 0.0) + transfers[u]
    problem = Problem(
        graph=graph,
        num_devices=num_devices,
        num_hosts=num_hosts,
        memory_limit=limit,
        transfers=transfers,
        groups=tuple(map(tuple, groups)),
        # What no device can hold, none can run.
        device=np.where(memory <= limit * (1 + ROUNDING), device, math.inf)
        if num_devices
        else np.full(num_groups, math.inf),
        host=host if num_hosts else np.full(num_groups, math.inf),
        memory=memory,
        order=tuple(sorted((a, b) for a, b in order if a != b)),
        nets=nets,
    )
    for g, nodes in enumerate(problem.groups):
        if math.isinf(problem.device[g]) and math.isinf(problem.host[g]):
            first, more = graph.nodes[nodes[0]].id, len(nodes) - 1
            raise ValueError(
                f"node {first!r}{f' and {more} that must be with it' if more else ''} can be placed nowhere: "
                f"{memory[g]:g} bytes, {num_devices} devices of {limit:g} bytes, {num_hosts} hosts. Raise "
                "`memory_limit` or `num_hosts`, measure `host`, or split the node."
            )
    return problem


def _transfers(graph: Graph, bandwidth: float | None) -> tuple[float, ...]:
    """Of each node, the time its output takes to cross a border, there and, where gradients go with it, back."""
    if bandwidth is not None and not bandwidth > 0:
        raise ValueError(f"`bandwidth` must be above 0, got {bandwidth}.")
    both_passes = any(node.backward and not node.is_backward for node in graph.nodes)
    with_gradient = both_passes and not any(node.is_backward for node in graph.nodes)
    transfers = []
    for node, after in zip(graph.nodes, graph.successors):
        transfer = node.transfer
        if transfer is None:
            if bandwidth is None and after and node.output_bytes:
                raise ValueError(
                    f"`bandwidth` must be given, got None: node {node.id!r} has {node.output_bytes:g} bytes of output "
                    "and no `transfer`. Pass bytes a unit of time, or math.inf for transfers that take none."
                )
            transfer = node.output_bytes / bandwidth if bandwidth is not None else 0.0
        transfers.append(transfer * (2 if with_gradient else 1) if after else 0.0)
    return tuple(transfers)


def _order(graph: Graph, group_of: np.ndarray, num_groups: int) -> set[tuple[int, int]]:
    """Which group comes before which."""
    has_forward = np.zeros(num_groups, bool)
    is_backward = [node.is_backward for node in graph.nodes]
    has_forward[group_of[[v for v, b in enumerate(is_backward) if not b]]] = True
    order = set()
    for u, v in graph.edges:
        a, b = int(group_of[u]), int(group_of[v])
        if is_backward[u] and not is_backward[v]:
            raise ValueError(
                f"the edge {graph.nodes[u].id} -- {graph.nodes[v].id} leads from the backward to the forward pass: "
                "the stages' order is that of the forward pass alone. Remove it."
            )
        if not is_backward[v]:
            order.add((a, b))
        elif is_backward[u] and not (has_forward[a] and has_forward[b]):
            order.add((b, a))
    return order


def work_on_hosts(problem: Problem, seconds: float) -> float:
    """The most work, in devices' time, that hosts take off devices in so much time, were groups divisible."""
    both = np.isfinite(problem.device) & np.isfinite(problem.host)
    device, host = problem.device[both], problem.host[both]
    ratio = np.divide(device, host, out=np.full(len(host), math.inf), where=host > 0)
    rank = np.argsort(-ratio, kind="stable")
    device, host = device[rank], host[rank]
    left = seconds - (np.cumsum(host) - host)
    part = np.divide(left, host, out=np.ones(len(host)), where=host > 0)
    return float(device @ np.clip(part, 0.0, 1.0))


def lower_bound(problem: Problem) -> float:
    """No split of these groups has a slowest stage below this, contiguous or not.

    A stage with a group takes its time; and k devices and l hosts must take all groups between them, of which
    hosts are given the fractions that they take the most work off devices with.
    """
    on_device = np.isfinite(problem.device)
    only_host = float(problem.host[~on_device].sum())
    work = float(problem.device[on_device].sum())

    def is_possible(bound):
        left = problem.num_hosts * bound - only_host
        if left < 0:
            return False
        on_hosts = work_on_hosts(problem, left)
        return work - on_hosts <= problem.num_devices * bound * (1 + ROUNDING)

    low = float(np.minimum(problem.device, problem.host).max(initial=0.0))
    high = low + only_host
    while not is_possible(high):
        high = 2 * high + work
    if is_possible(low):
        return low
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if is_possible(middle) else (middle, high)
    return low


def topological(problem: Problem) -> list[int]:
    """Groups in a depth-first topological order: what has just become free comes next."""
    waits = [len(before) for before in problem.predecessors]
    free = [g for g in reversed(range(len(waits))) if not waits[g]]
    order = []
    while free:
        a = free.pop()
        order.append(a)
        for b in reversed(problem.successors[a]):
            waits[b] -= 1
            if not waits[b]:
                free.append(b)
    assert len(order) == len(waits), "the order of groups has a cycle"
    return order


def reach(problem: Problem) -> tuple[list[int], list[int]]:
    """Of each group, all that must be before it and all that must be after, as bits."""
    before, after = [0] * len(problem.groups), [0] * len(problem.groups)
    order = topological(problem)
    for b in order:
        for a in problem.predecessors[b]:
            before[b] |= before[a] | 1 << a
    for a in reversed(order):
        for b in problem.successors[a]:
            after[a] |= after[b] | 1 << b
    return before, after


Split = list[tuple[list[int], bool]]


def regroup(
    problem: Problem, merged: Problem, found: tuple[float, Split]
) -> tuple[float, Split]:
    """What was found for the merged groups, in the problem's."""
    group_of = {v: g for g, nodes in enumerate(problem.groups) for v in nodes}
    stages = [
        (sorted({group_of[v] for g in groups for v in merged.groups[g]}), on_host)
        for groups, on_host in found[1]
    ]
    return found[0], stages
