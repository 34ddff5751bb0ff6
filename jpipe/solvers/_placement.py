"""The problem of placing a graph on devices and hosts, which the throughput solvers share.

G: number of groups of nodes. k, l: number of devices and of hosts. N: number of closed sets.

The steady state of a pipeline is as slow as its slowest stage. A stage on a device takes the time
of its nodes, and the time to move every output that crosses its border, once and in either
direction. A stage on a host takes the time of its nodes alone, because its data are in the host's
memory.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jpipe._util.foreign import shown
from jpipe.solvers._scipy import import_scipy
from jpipe.solvers.graph import Graph, Solution, Stage, neighbours

# The relative difference below which two sums count as equal.
ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True)
class Problem:
    """A graph to be placed, in groups of nodes that share a stage.

    A net is the set of groups that make or read one output. An output crosses the border of a stage
    if its net is partly in the stage, and only then the stage pays for it.

    Attributes:
      graph: the graph whose nodes are placed.
      num_devices: k.
      num_hosts: l; each host is one processor.
      memory_limit: bytes per device.
      transfers: time for the output of each node to cross a border.
      groups: positions of the nodes in each group; every node is in one group.
      device: [G] time on a device; infinite if a device cannot run the group.
      host: [G] time on a host; infinite if a host cannot run the group.
      memory: [G] bytes on a device.
      order: pairs (a, b): no stage with b may come before a stage with a. No cycles.
      nets: cost of crossing a border, by the groups (at least two) that share an output.
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
        """For each group, the groups with an edge to it in `order`."""
        return neighbours(len(self.groups), ((b, a) for a, b in self.order))

    @functools.cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For each group, the groups that its edges in `order` lead to."""
        return neighbours(len(self.groups), self.order)

    @property
    def memory_is_enough(self) -> bool:
        """True if one device holds all groups that devices can run."""
        return self.memory[np.isfinite(self.device)].sum() <= self.most_memory

    @property
    def most_memory(self) -> float:
        """The limit, with a tolerance for rounding in sums of sizes."""
        return self.memory_limit * (1 + ROUNDING)

    def stage_memory(self, groups: Iterable[int]) -> float:
        """Bytes of a stage on its device."""
        return sum(self.graph.nodes[v].device_bytes for g in groups for v in self.groups[g])

    def fits(self, split: "Split") -> bool:
        """Returns whether every device holds its stage."""
        return all(on_host or self.stage_memory(groups) <= self.most_memory for groups, on_host in split)

    def stage_load(self, groups: Iterable[int], on_host: bool) -> float:
        """Time of a stage, computed from the graph."""
        inside = {v for g in groups for v in self.groups[g]}
        nodes: Sequence[Any] = self.graph.nodes
        if on_host:
            return math.fsum(nodes[v].host for v in inside)
        crossing = {u for u, v in self.graph.edges if (u in inside) != (v in inside)}
        return math.fsum([nodes[v].seconds for v in inside] + [self.transfers[u] for u in crossing])

    def solution(
        self,
        solver: str,
        stages: Sequence[tuple[Sequence[int], bool]],
        bound: float,
        gap: float = 1e-9,
    ) -> Solution:
        """Makes the `Solution` of a split.

        Args:
          solver: the solver's name.
          stages: the groups of each stage and whether a host runs it, first to last.
          bound: a lower bound of all splits.
          gap: the fraction of the objective by which an optimal split may exceed the bound.
        """
        place = {v: p for p, v in enumerate(self.graph.topological_order)}
        loads, records = [], []
        for groups, on_host in stages:
            nodes = sorted((v for g in groups for v in self.groups[g]), key=place.__getitem__)
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
    """The search space is larger than allowed."""


def placement(
    graph: Graph,
    num_devices: int | None = None,
    num_hosts: int | None = None,
    memory_limit: float | None = None,
    bandwidth: float | None = None,
    *,
    contiguous: bool = True,
) -> Problem:
    """Puts nodes that must share a stage into groups, and computes the costs of the groups.

    Nodes of one colocation share a stage. Only the forward pass is ordered; the backward pass runs
    through the stages in the opposite order. For a colocation without a forward node, the reversed
    edges of the backward pass give the order. Groups on a cycle of that order share a stage too,
    because no order of stages separates them.

    If the nodes of a graph contain both passes, an output that crosses a border comes back as a
    gradient of its size, so it is paid for twice.

    Args:
      graph, num_devices, num_hosts, memory_limit, bandwidth: see `ideals`.
      contiguous: whether stages must be in order. If not, `Problem.order` is empty.

    Raises:
      ValueError: if an argument is missing or wrong, an edge leads from the backward to the forward
        pass, or no processor can take a group.
      ImportError: if SciPy is not installed.
    """
    import_scipy("sparse")  # says first what is not installed
    num_devices = graph.num_devices if num_devices is None else num_devices
    num_hosts = graph.num_hosts if num_hosts is None else num_hosts
    limit = graph.memory_limit if memory_limit is None else memory_limit
    limit = math.inf if limit is None else limit
    if num_devices is None:
        raise ValueError("`num_devices` must be given, got None: the graph does not say it either.")
    for name, value in (("num_devices", num_devices), ("num_hosts", num_hosts)):
        if value < 0:
            raise ValueError(f"`{name}` must be at least 0, got {shown(value)}.")
    if num_devices + num_hosts < 1:
        raise ValueError("`num_devices` and `num_hosts` must not both be 0: nothing could run. Add a device.")
    if not limit >= 0:
        raise ValueError(f"`memory_limit` must be at least 0, got {shown(limit)}.")

    transfers = _transfers(graph, bandwidth)
    group_of, order = _groups(graph, contiguous)
    num_groups = 1 + group_of.max(initial=-1)
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
        # A device can run only what it can hold.
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
            first_id, more = graph.nodes[nodes[0]].id, len(nodes) - 1
            raise ValueError(
                f"node {shown(first_id)}{f' with {more} nodes that must be beside it' if more else ''} can be placed "
                f"nowhere: {memory[g]:g} bytes, {num_devices} devices of {limit:g} bytes, {num_hosts} hosts. Raise "
                "`memory_limit` or `num_hosts`, measure `host`, or split the node."
            )
    return problem


def _groups(graph: Graph, contiguous: bool) -> tuple[np.ndarray, set[tuple[int, int]]]:
    """The group of each node, and the pairs of groups that must be in order."""
    sparse, csgraph = import_scipy("sparse"), import_scipy("sparse.csgraph")
    number: dict[tuple, int] = {}
    keys = [
        ("alone", v) if node.colocation is None else ("with", node.colocation) for v, node in enumerate(graph.nodes)
    ]
    group_of = np.array([number.setdefault(k, len(number)) for k in keys], np.intp)
    order = _order(graph, group_of, len(number)) if contiguous else set()
    # Groups on a cycle are a strongly connected component.
    ends = np.array(sorted(order), np.intp).reshape(-1, 2)
    links = sparse.coo_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(len(number),) * 2)
    _, component = csgraph.connected_components(links, connection="strong")
    _, first, component = np.unique(component, return_index=True, return_inverse=True)
    component = np.argsort(np.argsort(first))[component]  # in the nodes' order
    return component[group_of], {(int(component[a]), int(component[b])) for a, b in order}


def _transfers(graph: Graph, bandwidth: float | None) -> tuple[float, ...]:
    """For each node, the time of its output to cross a border, and of its gradient to come back if there is one."""
    if bandwidth is not None and not bandwidth > 0:
        raise ValueError(f"`bandwidth` must be above 0, got {shown(bandwidth)}.")
    both_passes = any(node.backward and not node.is_backward for node in graph.nodes)
    with_gradient = both_passes and not any(node.is_backward for node in graph.nodes)
    transfers = []
    for node, after in zip(graph.nodes, graph.successors):
        transfer = node.transfer
        if transfer is None:
            if bandwidth is None and after and node.output_bytes:
                raise ValueError(
                    f"`bandwidth` must be given, got None: node {shown(node.id)} has {node.output_bytes:g} bytes of "
                    "output and no `transfer`. Pass bytes per unit of time, or math.inf for transfers that take no "
                    "time."
                )
            transfer = node.output_bytes / bandwidth if bandwidth is not None else 0.0
        transfers.append(transfer * (2 if with_gradient else 1) if after else 0.0)
    return tuple(transfers)


def _order(graph: Graph, group_of: np.ndarray, num_groups: int) -> set[tuple[int, int]]:
    """Pairs of groups; the first must not come after the second."""
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
    """An upper bound of the work, in time on devices, that hosts can do in `seconds`.

    Groups are taken as divisible.
    """
    both = np.isfinite(problem.device) & np.isfinite(problem.host)
    device, host = problem.device[both], problem.host[both]
    ratio = np.divide(device, host, out=np.full(len(host), math.inf), where=host > 0)
    rank = np.argsort(-ratio, kind="stable")
    device, host = device[rank], host[rank]
    left = seconds - (np.cumsum(host) - host)
    part = np.divide(left, host, out=np.ones(len(host)), where=host > 0)
    return float(device @ np.clip(part, 0.0, 1.0))


def lower_bound(problem: Problem) -> float:
    """A lower bound of the slowest stage of every split, contiguous or not.

    A stage takes at least the time of each of its groups. And k devices and l hosts share all
    groups, of which the hosts get the fractions that save the devices the most work.
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
    """The groups in a depth-first topological order.

    A group that has just become free comes next.
    """
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
    """For each group, the sets of groups that must be before it and after it, as bits."""
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


def regroup(problem: Problem, merged: Problem, split: tuple[float, Split]) -> tuple[float, Split]:
    """A split of merged groups as a split of the problem's groups."""
    group_of = {v: g for g, nodes in enumerate(problem.groups) for v in nodes}
    stages = [
        (sorted({group_of[v] for g in groups for v in merged.groups[g]}), on_host) for groups, on_host in split[1]
    ]
    return split[0], stages
