"""PipeDream's planner: stages, and how many devices for each, by dynamic programming."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import numpy as np

from jpipe.plan.graph import Graph, Solution, Stage
from jpipe.plan.states import States, states

# Letters: i, k, j of S states, each with the nodes of those before it and more; a stage has
# the nodes between two. m of the M components of a level, `used` of them up to a stage's end.

_MAX_STEPS = 5e10  # comparisons; minutes
_MAX_BYTES = 2**31
_COARSE = 128  # states of the search that gives the first bound
_ROWS = 16  # so many fit the processor's cache


def pipedream(
    graph: Graph,
    num_devices: int | Sequence[int],
    bandwidth: float | Sequence[float],
    *,
    memory_limit: float | None = None,
    cost_model: Literal["pipedream-repo", "sosp19"] = "pipedream-repo",
    straight: bool = False,
    transfers: bool = True,
    all_states: bool = False,
    max_states: int | None = None,
) -> Solution:
    """Divides a graph into stages, each on as many devices as make the slowest fastest.

    A stage may have several replicas, which take the minibatches in turn and reduce their
    gradients. With t the time of a stage's nodes, w their parameters, a the bytes cut before
    it and a' behind it, m replicas and bandwidth B, the time a stage takes for a minibatch is

        sosp19          max(t, 2 (m - 1) w / B) / m,            and not below 2 a / B
        pipedream-repo  (t + 4 (m - 1) w / (B m)) / m,          and not below 2 max(a, a') / (B m)

    by the paper, and by its program. The first stage is charged no transfer; by the program,
    a' is 0 behind the last node, and the first stage has its second term divided by the
    number of components of the level below.

    `num_devices` (4, 8) and `bandwidth` (1e10, 1e9) are 8 servers of 4 devices, which have
    10 GB/s in a server and 1 GB/s between them: servers are given to stages as devices are,
    and t is what the best division of such a stage among a server's devices takes; it has a
    first stage of its own. All devices are used.

    Nodes can be cut in two wherever no edge goes back. Left out of the costs, as in the
    program, are sources whose description begins with "Input", which go to the stage that
    first reads them, and sinks that begin with "__getitem__", which go to the last they read.

    With a memory limit, a stage with r replicas and R devices in later stages must fit
    1 + ceil(R / r) times the `device_bytes` of its nodes, left out ones too: so many
    minibatches are in flight, each with activations and a version of the weights. (The
    program counts one fewer, so its last stage is free, and looks at one level.)

    Args:
      graph: layers with both passes in each node.
      num_devices: of the machine; or of each level, innermost first.
      bandwidth: of a link in bytes a second, or a unit of the graph's time; one a level.
      memory_limit: bytes of a device; None: the graph's, or no limit; math.inf: none.
      cost_model: above.
      straight: one device a stage.
      transfers: False leaves out what moving activations costs, as the program does when its
        option `--activation_compression_ratio` is not given. Gradients are still reduced.
      all_states: with several sources, the program lets the nodes that hang on the second or
        a later one come with the first node that needs them. True lets them come at any time:
        never slower plans, with many more states.
      max_states: gives up beyond so many ways to cut the graph; None: as many as take
        some minutes and 2 GiB. Time grows with their cube, of one level with their square.

    Returns:
      The plan; `replicas` counts devices over all levels, and stages of one server follow each
      other. It's `optimal` among all that the recurrence ranges over: every chain of states,
      every number of devices for each of its stages, at every level, in this cost model.
      `data_parallel` is one stage on all devices, whether or not it fits their memory.

    Raises:
      ValueError: if an argument is wrong; the graph has something that the model hasn't:
        nodes of the backward pass alone, colocation, nodes for the host, or a `transfer` but
        no bytes; it has too many states, or fewer nodes than a straight pipeline needs
        devices; or no plan fits the memory: says how much would do.

    Example: few parameters first, many last
      >>> from jpipe.plan.graph import Node
      >>> layers = [("conv", 0.9, 1e6), ("conv2", 0.9, 1e6), ("dense", 0.2, 1e9)]
      >>> nodes = tuple(Node(n, forward=s, activation_bytes=(1e8,), parameter_bytes=w) for n, s, w in layers)
      >>> solution = pipedream(Graph(nodes, ((0, 1), (1, 2))), 4, 1e9)
      >>> [(stage.nodes, stage.replicas) for stage in solution.stages]
      [(('conv', 'conv2'), 3), (('dense',), 1)]
      >>> round(solution.objective, 3), round(solution.data_parallel, 3)
      (0.602, 1.252)

    References:
      Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP
      2019, section 3.1; https://github.com/msr-fiddle/pipedream, commit 7db6a1c3,
      optimizer/optimizer_graph_hierarchical.py.
    """
    levels = _levels(num_devices, bandwidth)
    if cost_model not in _COSTS:
        raise ValueError(
            f"`cost_model` must be one of {', '.join(_COSTS)}, got {cost_model!r}."
        )
    limit = graph.memory_limit if memory_limit is None else memory_limit
    limit = math.inf if limit is None else limit
    if not limit > 0:
        raise ValueError(f"`memory_limit` must be above 0 bytes, got {limit!r}.")
    _check_nodes(graph, transfers)

    kept = _kept(graph)
    if not kept:
        raise ValueError(
            f"`graph` must have a node to plan, got {len(graph.nodes)} inputs and unread outputs."
        )
    total = math.prod(level.size for level in levels)
    if total * sum(node.device_bytes for node in graph.nodes) <= limit:
        limit = math.inf  # which is faster
    found = _states(graph, kept, levels, limit, all_states, max_states)
    if straight and total > found.longest_chain:
        raise ValueError(
            f"`straight` puts one stage on each of {total} devices, and the graph can be cut into "
            f"{found.longest_chain} at most. Use fewer devices, or replicas."
        )
    placed = _placed(graph, kept, found)
    costs = _COSTS[cost_model](graph, kept, found, placed, limit, transfers)
    search = _Search(costs, levels, straight)
    if search.best == math.inf:
        raise ValueError(_does_not_fit(graph, costs, levels, straight))
    cuts = search.stages()
    assert sum(replicas for *_, replicas in cuts) == total
    return Solution(
        solver="pipedream",
        objective=search.best,
        stages=tuple(
            Stage(_nodes(graph, placed[:, j] & ~placed[:, i]), replicas)
            for i, j, replicas in cuts
        ),
        bound=search.best,
        optimal=True,
        data_parallel=_data_parallel(costs, levels),
    )


def _nodes(graph: Graph, chosen: np.ndarray) -> tuple:
    return tuple(graph.nodes[v].id for v in graph.topological_order if chosen[v])


@dataclasses.dataclass(frozen=True)
class _Level:
    """Components joined by links of one speed.

    Attributes:
      size: M, how many.
      bandwidth: of each.
      below: M of the level below; 1 where components are devices.
      devices: in each.
    """

    size: int
    bandwidth: float
    below: int
    devices: int

    def behind(self, behind: int, used: int, m: int) -> int:
        """Devices in later stages for each copy of a component that m of this level have.

        Args:
          behind: for each copy of all of this level.
          used: components up to the end of the m.
        """
        return -(-(behind + (self.size - used) * self.devices) // m)


def _levels(
    num_devices: int | Sequence[int], bandwidth: float | Sequence[float]
) -> list[_Level]:
    several = isinstance(num_devices, Sequence)
    sizes = list(num_devices) if several else [num_devices]
    speeds = list(bandwidth) if isinstance(bandwidth, Sequence) else [bandwidth]
    if not sizes or len(sizes) != len(speeds):
        raise ValueError(
            "`num_devices` and `bandwidth` must have one number for each level, innermost first, got "
            f"{num_devices!r} and {bandwidth!r}."
        )
    levels: list[_Level] = []
    below, devices = 1, 1
    for size, speed in zip(sizes, speeds, strict=True):
        try:
            size = operator.index(size)
        except TypeError:
            size = 0
        if size < 1:
            raise ValueError(
                f"`num_devices` must be whole numbers, at least 1, got {num_devices!r}."
            )
        if not isinstance(speed, (int, float, np.number)) or not 0 < speed < math.inf:
            raise ValueError(
                f"`bandwidth` must be finite and above 0, got {bandwidth!r}: without it transfers would cost "
                "nothing. To leave those of activations out, say transfers=False."
            )
        levels.append(_Level(size, float(speed), below, devices))
        below, devices = size, devices * size
    return levels


def _check_nodes(graph: Graph, transfers: bool) -> None:
    """Refuses what the model would leave out."""
    colocated: dict = {}
    for node in graph.nodes:
        other = colocated.setdefault(node.colocation, node.id)
        if node.is_backward:
            wrong = "belongs to the backward pass alone. Add its time to the `backward` of its layer"
        elif not node.on_device:
            wrong = "can't run on a device, and all of PipeDream's stages do"
        elif node.colocation is not None and other != node.id:
            wrong = f"must be where {other!r} is. Make them one node"
        elif transfers and node.transfer and not node.output_bytes:
            wrong = (
                "has a time to move its output and no bytes, which PipeDream divides by a bandwidth. Set "
                "`activation_bytes`, or say transfers=False"
            )
        else:
            continue
        raise ValueError(
            f"PipeDream's model can't have the node {node.id!r}: it {wrong}."
        )


def _kept(graph: Graph) -> list[int]:
    """The nodes that the model sees, in topological order."""
    kept = {
        v
        for v, node in enumerate(graph.nodes)
        if graph.predecessors[v] or not node.description.startswith("Input")
    }
    # At once: a sink that becomes one when another is left out stays.
    unread = {v for v in kept if kept.isdisjoint(graph.successors[v])}
    kept -= {v for v in unread if graph.nodes[v].description.startswith("__getitem__")}
    return [v for v in graph.topological_order if v in kept]


def _within(
    neighbours: Sequence[Sequence[int]], kept: Sequence[int]
) -> list[list[int]]:
    """Neighbours by positions in `kept`."""
    row = {v: n for n, v in enumerate(kept)}
    return [[row[u] for u in neighbours[v] if u in row] for v in kept]


def _states(
    graph: Graph,
    kept: list[int],
    levels: list[_Level],
    limit: float,
    all_states: bool,
    max_states: int | None,
) -> States:
    most = _most_states(levels, limit) if max_states is None else max_states
    try:
        return states(
            _within(graph.predecessors, kept),
            _within(graph.successors, kept),
            most,
            from_first_source=not all_states,
        )
    except ValueError as error:
        raise ValueError(
            f"{error} Make each branch one node"
            f"{', leave out `all_states`' if all_states else ''}{', plan one level' if len(levels) > 1 else ''}, or "
            f"raise `max_states`, above {most:,} with more memory and time."
        ) from None


def _most_states(levels: list[_Level], limit: float) -> int:
    """How many states take neither minutes nor too much memory."""
    limited = limit < math.inf
    by_square = by_cube = 0.0
    num_bytes = 1.0
    tables = {0}  # one for each number of devices behind
    for level in reversed(levels):
        pairs = level.size * (level.size - 1) / 2
        each = pairs if limited else level.size - 1
        if level is levels[-1]:
            # A stage's time takes about ten operations where comparing takes one.
            by_square = (pairs + 10 * each) / 2
        else:
            by_cube += len(tables) * pairs / 6
            num_bytes += 8 * (each + len(tables))
        if limited:
            tables = {
                level.behind(behind, used, m)
                for behind in tables
                for used in range(1, level.size + 1)
                for m in range(1, used + 1)
            }
    return int(
        min(
            (_MAX_STEPS / by_cube) ** (1 / 3) if by_cube else math.inf,
            math.sqrt(_MAX_STEPS / by_square) if by_square else math.inf,
            math.sqrt(_MAX_BYTES / num_bytes),
        )
    )


def _placed(graph: Graph, kept: list[int], found: States) -> np.ndarray:
    """[nodes of the graph, S] bool: whether a node is in the state; of those left out, too."""
    placed = np.zeros((len(graph.nodes), found.num_states), bool)
    placed[kept] = found.members
    row = {v: n for n, v in enumerate(kept)}
    for v in set(range(len(graph.nodes))).difference(kept):
        readers = [row[w] for w in graph.successors[v] if w in row]
        read = [row[u] for u in graph.predecessors[v] if u in row]
        if readers:
            placed[v] = found.members[readers].any(axis=0)
        else:
            placed[v] = found.members[read].all(axis=0)
    placed[:, 0] = False  # a node with no neighbours goes to the first stage
    return placed


class _Costs:
    """What a stage takes, by the states that it lies between.

    Attributes:
      contains: [S, S] bool at [i, j], whether state j has all of state i and more.
      seconds: [S], of all nodes in a state.
      parameters: [S] bytes.
      memory: [S] bytes.
      cut: [S] bytes that a state hands on to the rest.
      limit: bytes of a device.
      transfers: whether activations take time to move.
    """

    _sums: ClassVar = ("seconds", "parameters", "memory", "cut")

    def __init__(self, graph, kept, found, placed, limit, transfers):
        nodes = [graph.nodes[v] for v in kept]
        self.contains = found.contains
        self.seconds = found.total([node.seconds for node in nodes])
        self.parameters = found.total([node.parameter_bytes for node in nodes])
        self.memory = np.array([node.device_bytes for node in graph.nodes]) @ placed
        sizes = np.array([node.output_bytes for node in nodes])
        self.cut = sizes @ self._handed_on(
            found,
            _within(graph.predecessors, kept),
            _within(graph.successors, kept),
        )
        self.limit = limit
        self.transfers = transfers

    def at(self, chosen: np.ndarray) -> "_Costs":
        """Of some of the states only."""
        part = object.__new__(type(self))
        part.__dict__.update(self.__dict__)
        part.contains = self.contains[np.ix_(chosen, chosen)]
        for name in self._sums:
            setattr(part, name, getattr(self, name)[chosen])
        return part

    def between(self, sums: np.ndarray, i, j) -> np.ndarray:
        """Of the stage from i to j; rounding must not make it negative."""
        return np.maximum(sums[j] - sums[i], 0.0)

    def device(self, i, j, behind: int) -> np.ndarray:
        """Seconds of a device, for which `behind` others wait; infinite where it can't be."""
        seconds = np.where(
            self.contains[i, j], self.between(self.seconds, i, j), np.inf
        )
        if self.limit < math.inf:
            needed = (1 + behind) * self.between(self.memory, i, j)
            seconds = np.where(needed <= self.limit, seconds, np.inf)
        return seconds

    def replicated(
        self, seconds: np.ndarray, i, j, level: _Level, m: int, first: bool
    ) -> np.ndarray:
        """Of m replicas of a component that takes `seconds`; `first`: none is before them."""
        raise NotImplementedError

    def moving(self, i, j, level: _Level, m: int) -> np.ndarray:
        """Of activations in and out of m replicas."""
        raise NotImplementedError

    def _handed_on(self, found: States, predecessors, successors) -> np.ndarray:
        """[n, S] bool: whether a node's output is handed on from a state."""
        raise NotImplementedError


class _Sosp19(_Costs):
    def replicated(self, seconds, i, j, level, m, first):
        reduced = 2 * (m - 1) * self.between(self.parameters, i, j) / level.bandwidth
        return np.maximum(seconds, reduced) / m

    def moving(self, i, j, level, m):
        return 2 * self.cut[i] / level.bandwidth

    def _handed_on(self, found, predecessors, successors):
        """Those that a node outside reads."""
        inside = found.members
        return np.array(
            [
                inside[v] & ~inside[after].all(axis=0)
                for v, after in enumerate(successors)
            ]
        )


class _Repo(_Costs):
    def replicated(self, seconds, i, j, level, m, first):
        parameters = self.between(self.parameters, i, j)
        reduced = 4 * (m - 1) * parameters / (level.bandwidth * m)
        return (seconds + (reduced / level.below if first else reduced)) / m

    def moving(self, i, j, level, m):
        out = np.where(j == len(self.cut) - 1, 0.0, self.cut[j])
        return 2 * np.maximum(self.cut[i], out) / (level.bandwidth * m)

    def _handed_on(self, found, predecessors, successors):
        """The antichain, and what stands before one of its nodes and is read beside it.

        That is more than what nodes outside read: two nodes of the antichain that read the
        same count it too.
        """
        num_nodes = len(predecessors)
        before = np.eye(num_nodes, dtype=bool)  # [v, u]: u is v or stands before it
        for v, nodes in enumerate(predecessors):
            for u in nodes:
                before[v] |= before[u]
        handed_on = found.antichain.copy()
        beside = np.zeros_like(before)
        for u, after in enumerate(successors):
            beside[:, u] = before[:, u] & ~before[:, after].all(axis=1)
        for v in range(num_nodes):
            handed_on[beside[v]] |= found.antichain[v]
        return handed_on


class _Bytes(_Costs):
    """The bytes that a device needs, in place of seconds."""

    def device(self, i, j, behind):
        needed = (1 + behind) * self.between(self.memory, i, j)
        return np.where(self.contains[i, j], needed, np.inf)

    def replicated(self, seconds, i, j, level, m, first):
        return seconds

    def moving(self, i, j, level, m):
        return 0.0 * self.cut[i]


_COSTS: dict[str, type[_Costs]] = {"pipedream-repo": _Repo, "sosp19": _Sosp19}


def _data_parallel(costs: _Costs, levels: list[_Level]) -> float:
    seconds = costs.seconds[-1]
    for level in levels:
        seconds = costs.replicated(seconds, 0, -1, level, level.size, True)
    return float(seconds)


class _Search:
    """The least time of every stage, by a table for each level.

    Depth d is a component of d levels, 0 a device. `behind` is how many devices stand in
    later stages for each copy of a component; it's 0 throughout where memory has no limit.
    It can be rounded up at each level: ceil((ceil(x) + n) / r) is ceil((x + n) / r).
    """

    def __init__(
        self,
        costs: _Costs,
        levels: list[_Level],
        straight: bool,
        bound: float | None = None,
    ):
        self._costs, self._levels, self._straight = costs, levels, straight
        self._num_states = len(costs.seconds)
        self._tables: dict[tuple[int, int], np.ndarray] = {}
        if bound is None:
            bound = self._coarse()
        # By depth. A component replicated m times takes at least its own time over m; what
        # takes longer than the bound is in no best plan.
        self._most = [bound]
        for level in reversed(levels):
            self._most.insert(0, self._most[0] * level.size * (1 + 1e-12))

    @functools.cached_property
    def best(self) -> float:
        """Of the whole graph; infinite if nothing fits."""
        return float(self._rows(len(self._levels), 0, 0, 1)[-1, 0, -1])

    def stages(self) -> list[tuple[int, int, int]]:
        """(from state, to state, replicas), first to last."""
        return self._trace(len(self._levels), 0, self._num_states - 1, 0, 1)

    def _coarse(self) -> float:
        """The best plan with a part of the states: a bound that some plan reaches."""
        chain = [0]
        while chain[-1] < self._num_states - 1:
            chain.append(int(self._costs.contains[chain[-1]].argmax()))
        most = max(_COARSE, 2 * math.prod(level.size for level in self._levels))
        if self._num_states <= 2 * most:
            return math.inf
        # Where little is handed on, from each stretch of the chain.
        stretches = np.array_split(chain[1:-1], most)
        cheapest = [s[self._costs.cut[s].argmin()] for s in stretches if len(s)]
        chosen = np.array([0, *cheapest, chain[-1]])
        coarse = self._costs.at(chosen)
        return _Search(coarse, self._levels, self._straight, math.inf).best

    def _behind(self, level: _Level, behind: int, used: int, m: int) -> int:
        return level.behind(behind, used, m) if self._costs.limit < math.inf else 0

    def _part(self, depth: int, i, j, behind: int) -> np.ndarray:
        """A component of `depth` levels alone."""
        if depth == 0:
            return self._costs.device(i, j, behind)
        if (depth, behind) not in self._tables:
            self._tables[depth, behind] = self._table(depth, behind)
        return self._tables[depth, behind][i, j]

    def _first(self, depth: int, i, j, behind: int, m: int) -> np.ndarray:
        """m components of a level as the first stage, or the only one."""
        level = self._levels[depth - 1]
        behind = self._behind(level, behind, m, m)
        seconds = self._part(depth - 1, i, j, behind)
        if self._straight and m > 1:
            return np.full_like(seconds, np.inf)
        return self._costs.replicated(seconds, i, j, level, m, True)

    def _later(self, depth: int, i, j, behind: int, used: int, m: int) -> np.ndarray:
        """m components of a level as a later stage, `used` up to its end."""
        level = self._levels[depth - 1]
        behind = self._behind(level, behind, used, m)
        seconds = self._part(depth - 1, i, j, behind)
        seconds = self._costs.replicated(seconds, i, j, level, m, False)
        if self._costs.transfers:
            seconds = np.maximum(seconds, self._costs.moving(i, j, level, m))
        return seconds

    def _options(self, depth: int) -> range:
        """Of m, for a later stage."""
        return range(
            1, min(2 if self._straight else math.inf, self._levels[depth - 1].size)
        )

    def _later_stages(self, depth: int, behind: int, start: int, stop: int):
        """Those that begin at the states from start to stop.

        Returns: [used or 1, stop - start, S] for each m; and [stop - start], where their
          ends must stop for the bound.
        """
        size = self._levels[depth - 1].size
        i, j = np.arange(start, stop)[:, None], np.arange(self._num_states)
        stages = []
        ends = np.zeros(stop - start, int)
        for m in self._options(depth):
            # Where memory has no limit, how many come after makes no difference.
            uses = range(m + 1, size + 1) if self._costs.limit < math.inf else [size]
            later = np.stack([self._later(depth, i, j, behind, u, m) for u in uses])
            later[later > self._most[depth]] = np.inf
            last = later.shape[-1] - np.isfinite(later[..., ::-1]).argmax(-1)
            last[~np.isfinite(later).any(-1)] = 0
            ends = np.maximum(ends, last.max(0))
            stages.append(later)
        return stages, ends

    def _table(self, depth: int, behind: int) -> np.ndarray:
        """[S, S]: a component of `depth` levels, from any state to any."""
        later = functools.cache(functools.partial(self._later_stages, depth, behind))
        table = np.empty((self._num_states, self._num_states))
        for start in range(0, self._num_states, _ROWS):
            stop = min(start + _ROWS, self._num_states)
            table[start:stop] = self._rows(depth, behind, start, stop, later)[-1]
        return table

    def _rows(
        self,
        depth: int,
        behind: int,
        start: int,
        stop: int,
        later: Callable | None = None,
    ) -> np.ndarray:
        """[M, stop - start, S]: the least time with m components from states to all others."""
        size, num_states = self._levels[depth - 1].size, self._num_states
        later = later or functools.partial(self._later_stages, depth, behind)
        i, j = np.arange(start, stop)[:, None], np.arange(num_states)
        least = np.stack(
            [self._first(depth, i, j, behind, m) for m in range(1, size + 1)]
        )
        least[least > self._most[depth]] = np.inf
        spare = np.empty_like(least)
        for k in range(start + 1, num_states - 1):
            block = k - k % _ROWS
            if k == start + 1 or k == block:
                stages, ends = later(block, min(block + _ROWS, num_states))
            rows, columns = (
                slice(0, min(k, stop) - start),
                slice(k + 1, ends[k - block]),
            )
            before = least[:, rows, k]
            if columns.start >= columns.stop or not (before < np.inf).any():
                continue
            for m, stage in zip(self._options(depth), stages, strict=True):
                slower = spare[m:, rows, columns]
                np.maximum(
                    before[: size - m, :, None],
                    stage[:, None, k - block, columns],
                    out=slower,
                )
                best = least[m:, rows, columns]
                np.minimum(best, slower, out=best)
        return least

    def _trace(
        self, depth: int, i: int, j: int, behind: int, copies: int
    ) -> list[tuple[int, int, int]]:
        """The stages of the best plan, last to first: each end is the one the table took."""
        if depth == 0:
            return [(i, j, copies)]
        level = self._levels[depth - 1]
        least = self._rows(depth, behind, i, i + 1)[:, 0]
        found: list[tuple[int, int, int]] = []
        used = level.size
        while least[used - 1, j] != self._first(depth, i, j, behind, used):
            k, m = self._split(depth, i, j, behind, used, least)
            after = self._behind(level, behind, used, m)
            found = self._trace(depth - 1, k, j, after, copies * m) + found
            used, j = used - m, k
        after = self._behind(level, behind, used, used)
        return self._trace(depth - 1, i, j, after, copies * used) + found

    def _split(
        self, depth: int, i: int, j: int, behind: int, used: int, least: np.ndarray
    ) -> tuple[int, int]:
        """Where the last stage begins and how many components it has."""
        k = np.arange(i + 1, j)
        for m in self._options(depth):
            if m < used:
                last = self._later(depth, k, j, behind, used, m)
                same = np.maximum(least[used - m - 1, k], last) == least[used - 1, j]
                if same.any():
                    return int(k[same.argmax()]), m
        raise AssertionError("the tables and the costs differ")


def _does_not_fit(
    graph: Graph, costs: _Costs, levels: list[_Level], straight: bool
) -> str:
    needed = object.__new__(_Bytes)
    needed.__dict__.update(costs.__dict__)
    least = math.ceil(_Search(needed, levels, straight).best)
    largest = max(graph.nodes, key=lambda node: node.device_bytes)
    message = f"no plan fits `memory_limit` ({costs.limit:,.0f} bytes): the least that would do is {least:,}"
    if largest.device_bytes > costs.limit:
        message += f", and the node {largest.id!r} alone takes {math.ceil(largest.device_bytes):,}"
    return message + ". Use more devices, smaller minibatches, or recompute."


__all__ = ["pipedream"]
