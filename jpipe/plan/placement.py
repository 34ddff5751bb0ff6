"""What placing a graph on devices and hosts costs, made small; shared by the throughput solvers.

G: number of groups. k, l: number of devices and of hosts. N: number of closed sets.

The steady state of a pipeline is as slow as its slowest stage. A stage on a device takes the time of its
nodes and that of moving, once each, the outputs that cross its border either way; a stage on a host takes
the time of its nodes and pays for no transfer, since the data are in its memory.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from jpipe.plan.graph import Graph, Solution, Stage

# Sums that differ by rounding alone are the same.
_ROUNDING = 1e-12


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
        return self.memory_limit * (1 + _ROUNDING)

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
    from scipy import sparse  # half a second and 40 MB, which training need not pay
    from scipy.sparse.csgraph import connected_components

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
    num_groups, component = connected_components(links, connection="strong")
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
        device=np.where(memory <= limit * (1 + _ROUNDING), device, math.inf)
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
        return work - on_hosts <= problem.num_devices * bound * (1 + _ROUNDING)

    low = float(np.minimum(problem.device, problem.host).max(initial=0.0))
    high = low + only_host
    while not is_possible(high):
        high = 2 * high + work
    if is_possible(low):
        return low
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if is_possible(middle) else (middle, high)
    return low


def merge(problem: Problem, *, ordered: bool = True, memory: str = "exact") -> Problem:
    """Puts groups together that some best split has together.

    Take a split with C and D apart, and move C to D's stage. D's stage gains C's time and the nets with C
    but not D, at most; C's stage gains those nets too, at most; both lose the nets of C and D alone; and no
    other stage gains anything, as a net with both was partly in D's stage already. So where C's time and the
    former nets cost no more than the latter, and C takes a host no time, the split is no worse. Order is kept
    if what must be before C must be before D, and so for after. The case that C takes no time and has no
    neighbour but D is the published one.

    Memory is the one thing that can run out.

    Args:
      problem: the groups.
      ordered: whether stages must be in order; if not, more can be merged.
      memory: "exact": only groups without memory are merged where memory could run out; "ignored": their
        memory isn't counted, so the best of the result is a lower bound; "kept": it's counted, so every
        split of the result is one of the problem, but none of its best may be.
    """
    count = len(problem.groups)
    device, host = problem.device.copy(), problem.host.copy()
    sizes = problem.memory.copy()
    all_fits = problem.memory_is_enough
    preds = [set(of) for of in problem.predecessors]
    succs = [set(of) for of in problem.successors]
    nets_of: list[dict[frozenset[int], float]] = [{} for _ in range(count)]
    for net, cost in problem.nets.items():
        for g in net:
            nets_of[g][net] = cost
    before, after = reach(problem)
    members = [list(nodes) for nodes in problem.groups]
    alive = np.ones(count, bool)

    def is_free(c, d):
        if problem.num_hosts and math.isfinite(host[d]) and host[c]:
            return False
        if math.isfinite(device[d]):
            if sizes[c] and not all_fits and memory == "exact":
                return False
            apart = sum(cost for net, cost in nets_of[c].items() if d not in net)
            if device[c] + apart > nets_of[c].get(frozenset((c, d)), 0.0):
                return False
        return not ordered or (
            all(p == d or before[d] >> p & 1 for p in preds[c])
            and all(s == d or after[d] >> s & 1 for s in succs[c])
        )

    queue = list(range(count))
    waiting = set(queue)
    while queue:
        c = queue.pop()
        waiting.discard(c)
        if not alive[c]:
            continue
        near = (preds[c] | succs[c] if ordered else set()).union(*nets_of[c]) - {c}
        candidates = sorted(near) if near else np.flatnonzero(alive).tolist()
        d = next((d for d in candidates if d != c and is_free(c, d)), None)
        if d is None:
            continue
        alive[c] = False
        members[d] += members[c]
        device[d] += device[c]
        host[d] += host[c]
        if memory != "ignored" or math.isinf(device[d]):
            sizes[d] += sizes[c]
        for x in preds[c]:
            succs[x].discard(c)
            if x != d:
                succs[x].add(d)
                preds[d].add(x)
        for x in succs[c]:
            preds[x].discard(c)
            if x != d:
                preds[x].add(d)
                succs[d].add(x)
        for net, cost in list(nets_of[c].items()):
            for g in net:
                del nets_of[g][net]
            moved = net - {c} | {d}
            if len(moved) > 1:
                cost += nets_of[d].get(moved, 0.0)
                for g in moved:
                    nets_of[g][moved] = cost
        for g in near | {d}:
            if alive[g] and g not in waiting:
                waiting.add(g)
                queue.append(g)

    new = np.cumsum(alive) - 1
    kept = np.flatnonzero(alive)
    place = {v: p for p, v in enumerate(problem.graph.topological_order)}
    return dataclasses.replace(
        problem,
        groups=tuple(tuple(sorted(members[g], key=place.get)) for g in kept),
        device=device[kept],
        host=host[kept],
        memory=sizes[kept],
        order=tuple(sorted((int(new[a]), int(new[b])) for a in kept for b in succs[a])),
        nets={
            frozenset(int(new[x]) for x in net): cost
            for g in kept
            for net, cost in nets_of[g].items()
        },
    )


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


class ClosedSets:
    """Sets of groups that hold all that must be before their groups, and the stages between them.

    A stage is what a set has beyond one inside it. Of a net, count how many of its groups a set has: as the
    inner set is in the outer, a stage has a part of the net if the counts differ, and all of it if the one
    is 0 and the other full. So with `partial` the nets that a set has partly, a stage from I to J pays

        sum of partial(I) + sum of partial(J)
          - sum over nets partial in both of its cost, twice if the counts are equal

    and the last sum is a product of two matrices of zeros and ones.

    Args:
      problem: the groups.
      member: [G, N] whether a group is in a set; the empty and the full one are among them.
    """

    def __init__(self, problem: Problem, member: np.ndarray):
        self.problem = problem
        num_sets = member.shape[1]
        # Sums in one order keep a set's sum at least that of a set inside it in spite of rounding.
        device, host, memory, size = np.zeros((4, num_sets))
        not_device, not_host = np.zeros((2, num_sets), np.int32)
        for g in range(len(member)):
            has = member[g]
            size += has
            memory += has * problem.memory[g]
            if math.isinf(problem.device[g]):
                not_device += has
            else:
                device += has * problem.device[g]
            if math.isinf(problem.host[g]):
                not_host += has
            else:
                host += has * problem.host[g]
        rank = np.lexsort((size, device))
        self.member = np.ascontiguousarray(member[:, rank].T)
        self.device, self.host, self.memory = device[rank], host[rank], memory[rank]
        self.not_device, self.not_host = not_device[rank], not_host[rank]

        partial_cost = np.zeros(num_sets)
        features, weights = [], []
        for net, cost in problem.nets.items():
            count = member[sorted(net)].sum(axis=0, dtype=np.int32)[rank]
            partial = (count > 0) & (count < len(net))
            partial_cost += cost * partial
            features.append(partial)
            weights.append(cost if len(net) > 2 else 2 * cost)
            if len(net) > 2:
                for n in np.unique(count[partial]):
                    features.append(count == n)
                    weights.append(cost)
        self.partial_cost = partial_cost
        self.features = (
            np.stack(features, axis=1) if features else np.zeros((num_sets, 0), bool)
        )
        self.weights = np.array(weights)

    def __len__(self) -> int:
        return len(self.member)

    def best_split(
        self, below: float = math.inf, max_pairs: float = math.inf
    ) -> tuple[float, Split] | None:
        """The split along these sets whose slowest stage is fastest.

        Args:
          below: only splits with less are of interest.
          max_pairs: of sets to be compared, at most.

        Returns: Its slowest stage and its stages; None if there is none below `below`.

        Raises:
          TooLarge: if there are more pairs.
        """
        return _Search(self, below).run(max_pairs)


_ENDS, _STARTS = 128, 2048  # of a block, whose matrices are to stay in the cache


class _Search:
    """The dynamic program over pairs of closed sets, all the inner ones of a block of outer ones at once.

    best[j, h, I] is the slowest stage of the best split of I on exactly j devices and h hosts.
    """

    def __init__(self, sets: ClosedSets, below: float):
        self.sets, self.below = sets, below
        k, h = sets.problem.num_devices, sets.problem.num_hosts
        # More stages than groups can't be.
        self.k, self.h = (min(n, len(sets.problem.groups)) for n in (k, h))
        self.best = np.full((self.k + 1, self.h + 1, len(sets)), math.inf)
        self.best[0, 0, 0] = 0.0
        self.total = sets.device[-1]
        slack = 1e-9 * self.total  # for rounding
        on_hosts = [
            work_on_hosts(sets.problem, below * n) for n in range(1, self.h + 1)
        ]
        # The work that so many devices and hosts can do at most, each within `below`.
        on_devices = below * np.arange(1, self.k + 1)
        self.capacity = slack + np.add.outer([0.0, *on_devices], [0.0, *on_hosts])
        self.left = self.capacity[::-1, ::-1]
        self.widest = slack + max([*on_devices[:1], *on_hosts[:1]])

    def run(self, max_pairs: float) -> tuple[float, Split] | None:
        sets, last = self.sets, len(self.sets) - 1
        firsts = np.searchsorted(sets.device, sets.device - self.widest)
        num_pairs = int((np.arange(len(sets)) - firsts).sum())
        if num_pairs > max_pairs:
            raise TooLarge(
                f"{len(sets)} closed sets have {num_pairs:.3g} pairs that could be a stage, more than "
                f"{max_pairs:.3g}. Use `linearised`."
            )
        # From here on a set is of use only to outer ones with at least this work.
        useful_from = np.zeros(len(sets))
        for begin in range(1, last + 1, _ENDS):
            ends = np.arange(begin, min(begin + _ENDS, last + 1))
            work = sets.device[ends]
            states = [
                (j, h)
                for j, h in itertools.product(range(self.k + 1), range(self.h + 1))
                if j + h
                and self.total - work[-1] <= self.left[j, h]
                and work[0] <= self.capacity[j, h]
            ]
            if not states:
                useful_from[ends] = math.inf
                continue
            earlier = np.arange(firsts[begin], begin)
            earlier = earlier[useful_from[earlier] <= work[-1]]
            starts = np.concatenate([earlier, ends])
            pairs = [
                self._stages(starts[i : i + _STARTS], ends)
                for i in range(0, len(starts), _STARTS)
            ]
            self._extend(sorted(states, key=sum), ends, pairs)
            useful_from[ends] = self._useful_from(ends)
        whole = self.best[:, :, last]
        j, h = np.unravel_index(np.argmin(whole), whole.shape)
        if not whole[j, h] < self.below:
            return None
        return float(whole[j, h]), self._trace(int(j), int(h))

    def _stages(self, starts: np.ndarray, ends: np.ndarray):
        """(ends, starts, loads) of the stages below `below`, on a device and on a host."""
        sets, problem = self.sets, self.sets.problem
        inside = sets.member[starts]
        has = sets.member[ends]
        # Where a start could have what an end lacks.
        columns = np.flatnonzero(inside.any(axis=0) & ~has.all(axis=0))
        is_stage = starts[None, :] != ends[:, None]
        if len(columns):
            for i in range(0, len(columns), 64):
                some = columns[i : i + 64]
                lacks = _words(~has[:, some])
                is_stage &= (lacks[:, None] & _words(inside[:, some])[None, :]) == 0
        found = []
        for on_host in range(2):
            if not (self.h if on_host else self.k):
                found.append(None)
                continue
            if on_host:
                load = sets.host[ends][:, None] - sets.host[starts][None, :]
                unable = sets.not_host
            else:
                load = (sets.device + sets.partial_cost)[ends][:, None] + (
                    sets.partial_cost - sets.device
                )[starts][None, :]
                features = np.flatnonzero(
                    sets.features[starts].any(axis=0) & sets.features[ends].any(axis=0)
                )
                if len(features):
                    left = sets.features[np.ix_(ends, features)]
                    right = sets.features[np.ix_(starts, features)]
                    load -= (left * sets.weights[features]) @ right.T.astype(float)
                unable = sets.not_device
            fits = is_stage & (load < self.below)
            if unable[-1]:
                fits &= unable[ends][:, None] == unable[starts][None, :]
            if not on_host and not problem.memory_is_enough:
                taken = sets.memory[ends][:, None] - sets.memory[starts][None, :]
                fits &= taken <= problem.most_memory
            e, s = np.nonzero(fits)
            found.append((e, starts[s], load[e, s]))
        return found

    def _extend(self, states, ends: np.ndarray, pairs) -> None:
        """Finds `best` of a block; a state has one stage more than those it comes from, so pairs may be in any order."""
        groups = [
            [None if p is None or not len(p[0]) else _runs(p) for p in found]
            for found in pairs
        ]
        for j, h in states:
            values = np.full(len(ends), math.inf)
            for found in groups:
                for on_host, of in enumerate(found):
                    if of is None or not (h if on_host else j):
                        continue
                    heads, which, starts, load = of
                    before = self.best[j - 1 + on_host, h - on_host]
                    slowest = np.maximum(before[starts], load)
                    np.minimum.at(values, which, np.minimum.reduceat(slowest, heads))
            values[self.total - self.sets.device[ends] > self.left[j, h]] = math.inf
            # What fewer devices or hosts do as well is never needed.
            if j:
                values[self.best[:j, : h + 1, ends].min(axis=(0, 1)) <= values] = (
                    math.inf
                )
            if h:
                values[self.best[j, :h, ends].min(axis=1) <= values] = math.inf
            values[~(values < self.below)] = math.inf
            self.best[j, h, ends] = values

    def _useful_from(self, ends: np.ndarray) -> np.ndarray:
        """The least work that an outer set must have for these to lead anywhere."""
        least = np.full(len(ends), math.inf)
        for j, h in itertools.product(range(self.k + 1), range(self.h + 1)):
            reached = self.best[j, h, ends] < math.inf
            for dj, dh in ((1, 0), (0, 1)):
                if j + dj <= self.k and h + dh <= self.h:
                    need = self.total - self.left[j + dj, h + dh]
                    least[reached] = np.minimum(least[reached], need)
        return least

    def _trace(self, j: int, h: int) -> Split:
        """The stages of the best split of everything."""
        sets, end = self.sets, len(self.sets) - 1
        stages: Split = []
        while end:
            found = self._stages(np.arange(end), np.array([end]))
            options = []
            for on_host, of in enumerate(found):
                if of is not None and (h if on_host else j):
                    _, starts, load = of
                    before = self.best[j - 1 + on_host, h - on_host, starts]
                    slowest = np.maximum(before, load)
                    if len(slowest):
                        n = int(np.argmin(slowest))
                        options.append((slowest[n], on_host, int(starts[n])))
            _, on_host, start = min(options)
            groups = np.flatnonzero(sets.member[end] & ~sets.member[start])
            stages.append((groups.tolist(), bool(on_host)))
            j, h, end = j - 1 + on_host, h - on_host, start
        return stages[::-1]


def _words(bits: np.ndarray) -> np.ndarray:
    """Rows of at most 64 bits as one number each."""
    packed = np.packbits(bits, axis=1)
    width = next(n for n in (1, 2, 4, 8) if n >= packed.shape[1])
    padded = np.zeros((len(bits), width), np.uint8)
    padded[:, : packed.shape[1]] = packed
    return padded.view(f"u{width}")[:, 0]


def _runs(pairs):
    """Pairs, which are sorted by end, with the first of each end."""
    ends, starts, load = pairs
    heads = np.flatnonzero(np.diff(ends, prepend=-1))
    return heads, ends[heads], starts, load


def prefixes(problem: Problem, order: Sequence[int]) -> ClosedSets:
    """The closed sets along one order of the groups."""
    member = np.zeros((len(order), len(order) + 1), bool)
    for n, g in enumerate(order):
        member[g, n + 1 :] = True
    return ClosedSets(problem, member)


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
