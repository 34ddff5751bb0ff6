"""The split whose slowest stage takes the least time, by an integer program; contiguous or not."""

import itertools
import math

import numpy as np

from jpipe._util.foreign import shown
from jpipe.solvers._linearised import best_along_order
from jpipe.solvers._merge import merge
from jpipe.solvers._placement import (
    Problem,
    Split,
    lower_bound,
    placement,
    reach,
    regroup,
    work_on_hosts,
)
from jpipe.solvers._scipy import import_scipy
from jpipe.solvers.graph import Graph, Solution

_TOLERANCE = 1e-6


def throughput_ip(
    graph: Graph,
    num_devices: int | None = None,
    *,
    num_hosts: int | None = None,
    memory_limit: float | None = None,
    bandwidth: float | None = None,
    contiguous: bool = True,
    time_limit: float = 60.0,
    gap: float = 1e-4,
) -> Solution:
    """Splits a graph for throughput by integer programming (HiGHS).

    The cost model is that of `ideals`. The run time does not depend on the number of ideals, and
    stages need not be contiguous: one device may work on a minibatch several times, with other
    devices in between, which can be a few percent faster.

    Args:
      graph, num_devices, num_hosts, memory_limit, bandwidth: see `ideals`.
      contiguous: whether the stages must have an order that no edge of the forward pass goes
        against.
      time_limit: seconds, after which the best split known is returned.
      gap: stops when `objective` exceeds `bound` by at most this fraction. A value below 1e-6,
        the tolerance of HiGHS, counts as 1e-6.

    Returns:
      The split, or the split of `linearised` if none better was found. `bound` is proved, and
      `optimal` says whether the objective is within `gap` of it. Stages that are not contiguous
      are in the order of their first nodes.

    Raises:
      ValueError: if an argument is missing or wrong, no split fits the memory, or none was found
        in time.
      ImportError: if SciPy is not installed.

    Example:
      >>> from jpipe.solvers import Node
      >>> times = {"a": 2.0, "b": 4.0, "c": 2.0}
      >>> chain = Graph(tuple(Node(v, forward=t) for v, t in times.items()), ((0, 1), (1, 2)))
      >>> throughput_ip(chain, 2).objective
      6.0
      >>> solution = throughput_ip(chain, 2, contiguous=False)
      >>> solution.objective, [stage.nodes for stage in solution.stages]
      (4.0, [('a', 'c'), ('b',)])

    References:
      Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators",
      NeurIPS 2020, arXiv:2006.16423, section 5.1.2. There each contiguous stage is constrained by
      itself, and two stages can still wait for each other. Here the stages are numbered in order,
      which also leaves fewer equal solutions.
    """
    if not time_limit > 0:
        raise ValueError(f"`time_limit` must be above 0 seconds, got {shown(time_limit)}.")
    if not gap >= 0:
        raise ValueError(f"`gap` must be at least 0, got {shown(gap)}.")
    gap = max(gap, _TOLERANCE)
    limits = (num_devices, num_hosts, memory_limit, bandwidth)
    problem = placement(graph, *limits, contiguous=contiguous)
    best = _linearised(graph, limits, problem)
    small = merge(problem, ordered=contiguous)
    bound = lower_bound(small)
    program = (_Ordered if contiguous else _Unordered)(small, bound, best[0] if best else math.inf)
    split, proved, is_infeasible = program.solve(time_limit, gap)
    bound = max(bound, proved)
    if split is not None:
        slowest = max(small.stage_load(*stage) for stage in split)
        if best is None or slowest < best[0]:
            best = regroup(problem, small, (slowest, split))
    if best is None:
        sizes = f"{problem.num_devices} devices of {problem.memory_limit:g} bytes and {problem.num_hosts} hosts"
        if is_infeasible:
            raise ValueError(f"no split fits {sizes}. Raise `memory_limit` or `num_devices`.")
        raise ValueError(f"no split that fits {sizes} was found in {time_limit:g} seconds. Raise `time_limit`.")
    return problem.solution("throughput_ip", best[1], min(bound, best[0]), gap)


def _linearised(graph, limits, problem: Problem) -> tuple[float, Split] | None:
    """The split of `linearised`, in the problem's groups, to start from."""
    try:
        in_order = placement(graph, *limits)
    except ValueError:  # a cycle of groups fits stages in any order, but not in order
        return None
    split = best_along_order(in_order)
    return split and regroup(problem, in_order, split)


class _IntegerProgram:
    """Rows and columns of an integer program. Subclasses define the stage of a group.

    Times are divided by `unit`, because the tolerances of HiGHS are absolute: they must be small in
    any unit of time.
    """

    def __init__(self, problem: Problem, bound: float, upper: float):
        self.problem = problem
        self.unit = (upper if math.isfinite(upper) else bound) / 100 or 1.0
        self.lows: list[float] = []
        self.highs: list[float] = []
        self.is_whole: list[bool] = []
        self.row_of: list[int] = []
        self.column_of: list[int] = []
        self.values: list[float] = []
        self.row_lows: list[float] = []
        self.row_highs: list[float] = []
        self.slowest = self.column(high=math.inf)

    def column(self, low: float = 0.0, high: float = 1.0, is_whole=False) -> int:
        """Adds a variable and returns its number."""
        self.lows.append(low)
        self.highs.append(high)
        self.is_whole.append(is_whole)
        return len(self.lows) - 1

    def row(self, terms, low: float = -math.inf, high: float = math.inf) -> None:
        """Adds a constraint: low <= sum of value x column <= high."""
        for column, value in terms:
            self.row_of.append(len(self.row_lows))
            self.column_of.append(column)
            self.values.append(value)
        self.row_lows.append(low)
        self.row_highs.append(high)

    def is_in(self, group: int, stage: int) -> list[tuple[int, float]]:
        """Terms whose sum is 1 if the group is in the stage, and 0 if not."""
        raise NotImplementedError

    def load(self, stage: int, on_host: bool) -> None:
        """Constrains a stage: its time to the slowest stage's, its memory to the limit."""
        problem = self.problem
        times = problem.host if on_host else problem.device
        load = [(self.slowest, -1.0)]
        memory = []
        for g, time in enumerate(times):
            if math.isinf(time):
                self.row(self.is_in(g, stage), high=0.0)
                continue
            inside = self.is_in(g, stage)
            load += [(column, sign * time / self.unit) for column, sign in inside]
            part = problem.memory[g] / max(problem.most_memory, 1e-300)
            memory += [(column, sign * part) for column, sign in inside]
        if not on_host:
            for net, cost in problem.nets.items():
                load += [(y, cost / self.unit) for y in self.crossing(net, stage)]
            if not problem.memory_is_enough:
                self.row([(column, 1e3 * part) for column, part in memory], high=1e3)
        self.row(load, high=0.0)

    def crossing(self, net: frozenset[int], stage: int) -> list[int]:
        """Variables whose sum is 1 if the net is partly in the stage, and 0 if not."""
        first, *others = sorted(net)
        at_first = self.is_in(first, stage)
        ways = [self.column() for _ in range(min(2, len(others)))]
        for other in others:
            at_other = self.is_in(other, stage)
            for way, sign in ((ways[0], 1.0), (ways[-1], -1.0)):
                apart = [(x, sign * value) for x, value in at_other]
                apart += [(x, -sign * value) for x, value in at_first]
                self.row([*apart, (way, -1.0)], high=0.0)
        return ways

    def split(self, values: np.ndarray) -> Split:
        """The stages, in order."""
        raise NotImplementedError

    def solve(self, time_limit: float, gap: float) -> tuple[Split | None, float, bool]:
        """The stages or None, a lower bound, and whether the program is infeasible."""
        optimize, sparse = import_scipy("optimize"), import_scipy("sparse")
        cost = np.zeros(len(self.lows))
        cost[self.slowest] = 1.0
        rows = sparse.csr_array(
            (self.values, (self.row_of, self.column_of)),
            shape=(len(self.row_lows), len(self.lows)),
        )
        result = optimize.milp(
            cost,
            integrality=np.array(self.is_whole, int),
            bounds=optimize.Bounds(self.lows, self.highs),
            constraints=optimize.LinearConstraint(rows, self.row_lows, self.row_highs),
            options={"time_limit": time_limit, "mip_rel_gap": gap},
        )
        proved = result.mip_dual_bound
        proved = 0.0 if proved is None or not math.isfinite(proved) else proved
        if result.x is None:
            return None, proved * self.unit, result.status == 2
        split = self.split(result.x)
        # Within the tolerances of HiGHS, a stage can exceed the memory.
        fits = self.problem.fits(split)
        return split if fits else None, proved * self.unit, False


class _Ordered(_IntegerProgram):
    """Stages numbered in order: `is_by[g, p]` is 1 if group g is in stage p or an earlier stage.

    A host can stand anywhere among the devices, so there are slots for hosts before, between and
    behind the devices. At most `num_hosts` of them are used.
    """

    def __init__(self, problem: Problem, bound: float, upper: float):
        super().__init__(problem, bound, upper)
        # With a tolerance, because rounding must not exclude a split at the bounds.
        self.lows[self.slowest] = bound / self.unit * (1 - 1e-9)
        self.highs[self.slowest] = upper / self.unit * (1 + _TOLERANCE)
        hosts = problem.num_hosts if np.isfinite(problem.host).any() else 0
        hosts = min(hosts, len(problem.groups))
        devices = min(problem.num_devices, len(problem.groups))
        self.on_host = [True] * hosts + ([False] + [True] * hosts) * devices
        self.is_by = self._is_by(upper)
        for a, b in problem.order:
            for p in range(len(self.on_host) - 1):
                self.row([(self.is_by[b][p], 1.0), (self.is_by[a][p], -1.0)], high=0.0)
        used = {p: self.column(is_whole=True) for p, h in enumerate(self.on_host) if h}
        if used:
            self.row([(column, 1.0) for column in used.values()], high=hosts)
            times = np.where(np.isfinite(problem.host), problem.host, 0.0) / self.unit
            self.row(
                [(self.slowest, -float(hosts))]
                + [
                    (column, sign * time)
                    for p in used
                    for g, time in enumerate(times)
                    for column, sign in self.is_in(g, p)
                ],
                high=0.0,
            )
        for p, on_host in enumerate(self.on_host):
            self.load(p, on_host)
            if on_host:
                for g in range(len(problem.groups)):
                    self.row([*self.is_in(g, p), (used[p], -1.0)], high=0.0)
                if p + 1 in used:  # of two adjacent slots, the first is used first
                    self.row([(used[p + 1], 1.0), (used[p], -1.0)], high=0.0)

    def _is_by(self, upper: float) -> list[list[int]]:
        """The columns `is_by`.

        Some are fixed, because the groups before and after a group need devices within `upper`.
        """
        problem = self.problem
        work = np.where(np.isfinite(problem.device), problem.device, 0.0)
        on_hosts = work_on_hosts(problem, upper * problem.num_hosts)
        slack = _TOLERANCE * work.sum()
        columns = []
        num_devices = self.on_host.count(False)
        for g, (before, after) in enumerate(zip(*reach(problem))):
            by_it, from_it = (
                work[g] + sum(work[i] for i in range(len(work)) if bits >> i & 1) for bits in (before, after)
            )
            row = []
            for p in range(len(self.on_host)):
                devices = self.on_host[: p + 1].count(False)
                most = on_hosts + slack
                can = by_it <= most + (devices * upper if devices else 0.0)
                left = num_devices - devices
                must = from_it > most + (left * upper if left else 0.0)
                last = p == len(self.on_host) - 1
                row.append(self.column(float(must or last), float(can or last), is_whole=True))
            columns.append(row)
            for p, q in itertools.pairwise(row):
                self.row([(p, 1.0), (q, -1.0)], high=0.0)
        return columns

    def is_in(self, group, stage):
        by = self.is_by[group]
        if not stage:
            return [(by[0], 1.0)]
        return [(by[stage], 1.0), (by[stage - 1], -1.0)]

    def split(self, values):
        by = values[np.array(self.is_by)].round()
        stage = (by == 0).sum(axis=1)
        split = [(np.flatnonzero(stage == p).tolist(), on_host) for p, on_host in enumerate(self.on_host)]
        return [(groups, on_host) for groups, on_host in split if groups]


class _Unordered(_IntegerProgram):
    """Stages in any order: `at[g, p]` is 1 if group g is in stage p.

    The time of the slowest stage has no bounds here. With the known bounds, HiGHS took from 0.75 to
    20 times as long on real graphs: if the relaxation is at its bound everywhere, it does not show
    where to branch.
    """

    def __init__(self, problem: Problem, bound: float, upper: float):
        super().__init__(problem, bound, upper)
        count = len(problem.groups)
        hosts = problem.num_hosts if np.isfinite(problem.host).any() else 0
        hosts, devices = min(hosts, count), min(problem.num_devices, count)
        self.on_host = [False] * devices + [True] * hosts
        # Devices are equal: they are numbered by their most expensive groups.
        work = np.where(np.isfinite(problem.device), problem.device, -1.0)
        rank = np.argsort(np.argsort(-work, kind="stable"))
        self.at = [
            [self.column(high=float(on_host or p <= rank[g]), is_whole=True) for p, on_host in enumerate(self.on_host)]
            for g in range(count)
        ]
        for g in range(count):
            self.row([(column, 1.0) for column in self.at[g]], 1.0, 1.0)
        for p, on_host in enumerate(self.on_host):
            self.load(p, on_host)

    def is_in(self, group, stage):
        return [(self.at[group][stage], 1.0)]

    def split(self, values):
        stage = values[np.array(self.at)].argmax(axis=1)
        place = {v: p for p, v in enumerate(self.problem.graph.topological_order)}
        split = [(np.flatnonzero(stage == p).tolist(), on_host) for p, on_host in enumerate(self.on_host)]

        def first(stage):
            return min(place[v] for g in stage[0] for v in self.problem.groups[g])

        return sorted((stage for stage in split if stage[0]), key=first)
