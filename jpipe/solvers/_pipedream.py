"""PipeDream's planner: stages and the number of devices of each, by dynamic programming."""

import math
import operator
import sys
from collections.abc import Sequence
from typing import Literal

import numpy as np

from jpipe._util.foreign import shown
from jpipe.solvers._states import States, states
from jpipe.solvers.graph import Graph, Solution, Stage
from jpipe.solvers.pipedream_costs import (
    COST_MODELS,
    LinkLevel,
    StageBytes,
    StageCosts,
    data_parallel_seconds,
    neighbours_within,
)
from jpipe.solvers.pipedream_search import LevelSearch

# Letters: i, k, j of S states, each with the nodes of those before it and more; a stage has
# the nodes between two. m of the M components of a level, `used` of them up to a stage's end.

_MAX_STEPS = 5e10  # comparisons; minutes
_MAX_BYTES = 2**31


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
    """Divides a graph into stages and gives each as many devices as make the slowest stage fastest.

    A stage may have several replicas. They take the minibatches in turn and reduce their
    gradients. Let t be the time of a stage's nodes, w their parameters, a the bytes cut before it,
    a' the bytes cut behind it, m its replicas and B the bandwidth. A stage's time per minibatch is

        sosp19          max(t, 2 (m - 1) w / B) / m,            and at least 2 a / B
        pipedream-repo  (t + 4 (m - 1) w / (B m)) / m,          and at least 2 max(a, a') / (B m)

    by the paper and by its program. The first stage pays for no transfer. By the program, a' is 0
    behind the last node, and the second term of the first stage is divided by the number of
    components of the level below.

    `num_devices` (4, 8) and `bandwidth` (1e10, 1e9) mean 8 servers of 4 devices, with 10 GB/s in a
    server and 1 GB/s between servers. Stages then get servers as they get devices, and t is the
    time of the best division of a stage among a server's devices, which has a first stage of its
    own. All devices are used.

    Nodes can be cut in two wherever no edge goes back. As in the program, two kinds of nodes are
    left out of the costs: sources whose description begins with "Input", which go to the stage
    that first reads them, and sinks that begin with "__getitem__", which go to the last node that
    they read.

    With a memory limit, a stage with r replicas and R devices in later stages must fit
    1 + ceil(R / r) times the `device_bytes` of its nodes, those left out included: that many
    minibatches are in flight, each with activations and a version of the weights. (The program
    counts one fewer, so its last stage is free, and it looks at one level.)

    Args:
      graph: layers whose nodes contain both passes.
      num_devices: devices of the machine, or numbers per level, innermost first.
      bandwidth: bytes per second of a link, or per unit of the graph's time; one per level.
      memory_limit: bytes per device; None: the graph's limit, or none; math.inf: no limit.
      cost_model: one of the two above.
      straight: whether every stage has one device.
      transfers: False leaves out the cost of moving activations, as the program does without its
        option `--activation_compression_ratio`. Gradients are still reduced.
      all_states: for graphs with several sources. The program lets the nodes that depend on the
        second or a later source come with the first node that needs them. True lets them come at
        any time: plans are never slower, and there are many more states.
      max_states: gives up if the graph has more states (ways to cut it in two); None: as many as
        take some minutes and 2 GiB. The run time grows with their cube, on one level with their
        square.

    Returns:
      The plan. `replicas` counts devices over all levels, and stages of one server follow each
      other. The plan is `optimal` in this cost model among every chain of states and every number
      of devices per stage at every level. `data_parallel` is one stage on all devices, whether or
      not it fits their memory.

    Raises:
      ValueError: if an argument is wrong; the graph contains something outside the model (nodes of
        the backward pass alone, colocation, nodes for the host, or a `transfer` without bytes); it
        has too many states, or fewer nodes than a straight pipeline needs devices; or no plan fits
        the memory. The last message says how much memory suffices.

    Example:
      The first layers have few parameters, the last one many.

      >>> from jpipe.solvers import Node
      >>> layers = [("conv", 0.9, 1e6), ("conv2", 0.9, 1e6), ("dense", 0.2, 1e9)]
      >>> nodes = tuple(
      ...     Node(n, forward=s, activation_bytes=(1e8,), parameter_bytes=w) for n, s, w in layers
      ... )
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
    if cost_model not in COST_MODELS:
        raise ValueError(f"`cost_model` must be one of {', '.join(COST_MODELS)}, got {shown(cost_model)}.")
    limit = graph.memory_limit if memory_limit is None else memory_limit
    limit = math.inf if limit is None else limit
    if not limit > 0:
        raise ValueError(f"`memory_limit` must be above 0 bytes, got {shown(limit)}.")
    _check_nodes(graph, transfers)

    kept = _kept(graph)
    if not kept:
        raise ValueError(f"`graph` must have a node to plan, got {len(graph.nodes)} inputs and unread outputs.")
    total = math.prod(level.size for level in levels)
    if total * sum(node.device_bytes for node in graph.nodes) <= limit:
        limit = math.inf  # a search without a limit is faster
    state_set = _states(graph, kept, levels, limit, all_states=all_states, max_states=max_states)
    if straight and total > state_set.longest_chain:
        raise ValueError(
            f"`straight` puts one stage on each of {total} devices, and the graph can be cut into at most "
            f"{state_set.longest_chain}. Use fewer devices, or replicas."
        )
    placed = _placed(graph, kept, state_set)
    costs = COST_MODELS[cost_model](graph, kept, state_set, placed, limit=limit, transfers=transfers)
    search = LevelSearch(costs, levels, straight)
    if search.best == math.inf:
        raise ValueError(_does_not_fit(graph, costs, levels, straight))
    cuts = search.stages()
    assert sum(replicas for *_, replicas in cuts) == total
    return Solution(
        solver="pipedream",
        objective=search.best,
        stages=tuple(Stage(_nodes(graph, placed[:, j] & ~placed[:, i]), replicas) for i, j, replicas in cuts),
        bound=search.best,
        optimal=True,
        data_parallel=data_parallel_seconds(costs, levels),
    )


def _nodes(graph: Graph, chosen: np.ndarray) -> tuple:
    return tuple(graph.nodes[v].id for v in graph.topological_order if chosen[v])


def _levels(num_devices: int | Sequence[int], bandwidth: float | Sequence[float]) -> list[LinkLevel]:
    sizes: list = list(num_devices) if isinstance(num_devices, Sequence) else [num_devices]
    speeds = list(bandwidth) if isinstance(bandwidth, Sequence) else [bandwidth]
    if not sizes or len(sizes) != len(speeds):
        raise ValueError(
            "`num_devices` and `bandwidth` must have one number for each level, innermost first, got "
            f"{shown(num_devices)} and {shown(bandwidth)}."
        )
    levels: list[LinkLevel] = []
    below, devices = 1, 1
    for size, speed in zip(sizes, speeds, strict=True):
        try:
            size = operator.index(size)
        except TypeError:
            size = 0
        if size < 1:
            raise ValueError(f"`num_devices` must be whole numbers, at least 1, got {shown(num_devices)}.")
        if not isinstance(speed, (int, float, np.number)) or not 0 < speed <= sys.float_info.max:
            raise ValueError(
                f"`bandwidth` must be finite and above 0, got {shown(bandwidth)}: without it transfers would be "
                "free. To leave out the transfers of activations, pass transfers=False."
            )
        levels.append(LinkLevel(size, float(speed), below, devices))
        below, devices = size, devices * size
    return levels


def _check_nodes(graph: Graph, transfers: bool) -> None:
    """Refuses nodes with properties outside the cost model."""
    colocated: dict = {}
    for node in graph.nodes:
        other = colocated.setdefault(node.colocation, node.id)
        if node.is_backward:
            wrong = "belongs to the backward pass alone. Add its time to the `backward` of its layer"
        elif not node.on_device:
            wrong = "cannot run on a device, and all stages of PipeDream do"
        elif node.colocation is not None and other != node.id:
            wrong = f"must be where {other!r} is. Make them one node"
        elif transfers and node.transfer and not node.output_bytes:
            wrong = (
                "has a time to move its output but no bytes, which PipeDream divides by a bandwidth. Set "
                "`activation_bytes`, or pass transfers=False"
            )
        else:
            continue
        raise ValueError(f"PipeDream's model does not cover the node {shown(node.id)}: it {wrong}.")


def _kept(graph: Graph) -> list[int]:
    """The nodes whose costs count, in topological order."""
    kept = {
        v for v, node in enumerate(graph.nodes) if graph.predecessors[v] or not node.description.startswith("Input")
    }
    # All at once: a node that becomes a sink when another sink is left out stays.
    unread = {v for v in kept if kept.isdisjoint(graph.successors[v])}
    kept -= {v for v in unread if graph.nodes[v].description.startswith("__getitem__")}
    return [v for v in graph.topological_order if v in kept]


def _states(
    graph: Graph,
    kept: list[int],
    levels: list[LinkLevel],
    limit: float,
    all_states: bool,
    max_states: int | None,
) -> States:
    most = _most_states(levels, limit) if max_states is None else max_states
    try:
        return states(
            neighbours_within(graph.predecessors, kept),
            neighbours_within(graph.successors, kept),
            most,
            from_first_source=not all_states,
        )
    except ValueError as error:
        raise ValueError(
            f"{error} Make each branch one node"
            f"{', leave out `all_states`' if all_states else ''}{', plan one level' if len(levels) > 1 else ''}, or "
            f"raise `max_states`, above {most:,} with more memory and time."
        ) from None


def _most_states(levels: list[LinkLevel], limit: float) -> int:
    """The largest number of states that takes neither too much time nor too much memory."""
    limited = limit < math.inf
    by_square = by_cube = 0.0
    num_bytes = 1.0
    tables = {0}  # one table per number of devices behind
    for level in reversed(levels):
        pairs = level.size * (level.size - 1) / 2
        choices = pairs if limited else level.size - 1
        if level is levels[-1]:
            # The time of a stage takes about ten operations, a comparison one.
            by_square = (pairs + 10 * choices) / 2
        else:
            by_cube += len(tables) * pairs / 6
            num_bytes += 8 * (choices + len(tables))
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


def _placed(graph: Graph, kept: list[int], state_set: States) -> np.ndarray:
    """[nodes of the graph, S] bool: whether a node is in the state, for left out nodes too."""
    placed = np.zeros((len(graph.nodes), state_set.num_states), bool)
    placed[kept] = state_set.members
    row = {v: n for n, v in enumerate(kept)}
    for v in set(range(len(graph.nodes))).difference(kept):
        readers = [row[w] for w in graph.successors[v] if w in row]
        read = [row[u] for u in graph.predecessors[v] if u in row]
        if readers:
            placed[v] = state_set.members[readers].any(axis=0)
        else:
            placed[v] = state_set.members[read].all(axis=0)
    placed[:, 0] = False  # a node without neighbours goes to the first stage
    return placed


def _does_not_fit(graph: Graph, costs: StageCosts, levels: list[LinkLevel], straight: bool) -> str:
    needed = object.__new__(StageBytes)
    needed.__dict__.update(costs.__dict__)
    least = math.ceil(LevelSearch(needed, levels, straight).best)
    largest = max(graph.nodes, key=lambda node: node.device_bytes)
    message = f"no plan fits `memory_limit` ({costs.limit:,.0f} bytes): the least that suffices is {least:,}"
    if largest.device_bytes > costs.limit:
        message += f", and the node {shown(largest.id)} alone takes {math.ceil(largest.device_bytes):,}"
    return message + ". Use more devices, smaller minibatches, or recompute."
