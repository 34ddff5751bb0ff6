"""The best contiguous split of a graph: a dynamic program over its ideals."""

import math

import numpy as np

from jpipe.plan.graph import Graph, Solution
from jpipe.plan.linearised import best_along_order
from jpipe.plan.placement import (
    ClosedSets,
    Problem,
    Split,
    TooLarge,
    merge,
    placement,
    regroup,
    topological,
)

_MAX_BYTES = 2**31
_MAX_PAIRS = 1e10  # some minutes


def ideals(
    graph: Graph,
    num_devices: int | None = None,
    *,
    num_hosts: int | None = None,
    memory_limit: float | None = None,
    bandwidth: float | None = None,
    max_ideals: int = 200_000,
) -> Solution:
    """Finds the contiguous split of a graph whose slowest stage is fastest.

    In the steady state of a pipeline each stage works on a minibatch of its own, so the slowest stage sets the
    pace. A stage on a device takes

        sum of `seconds` of its nodes + sum of transfers of the outputs that cross its border, in or out

    an output once, however many nodes read it; one on a host takes the `host` times of its nodes and pays for
    no transfer. A transfer is the node's `transfer`, or `output_bytes` / `bandwidth`. Where the nodes of a graph
    have both passes in them, as those of PipeDream's profiler, gradients go back over the border, of the size of
    the outputs, so transfers count twice; where backward nodes stand alone, they have transfers of their own.

    Contiguous means that stages can be put in an order that no edge of the forward pass goes against. Nodes of
    the backward pass go where their colocation does; those that share none with a forward node keep the
    opposite order among themselves and with the others.

    The sets of nodes that hold all predecessors of theirs are the graph's ideals; a contiguous stage is what
    one ideal has beyond another. There can be exponentially many. Nodes that some best split has together are
    therefore merged first, of which few are left where transfers are dear; and sets are left out by bounds,
    the upper one from `linearised`.

    Args:
      graph: what to split.
      num_devices: k, at most so many stages on devices; None: the graph's.
      num_hosts: at most so many stages on the host's processors, one each; None: the graph's.
      memory_limit: bytes of a device; None: the graph's, or no limit; math.inf: none.
      bandwidth: bytes a unit of time, for nodes without a `transfer`.
      max_ideals: gives up beyond so many.

    Returns: The split. It's `optimal`, unless memory binds and there are too many ideals when only those nodes
      are merged that take none; then `bound` is the best split's that needs less memory.

    Raises:
      ValueError: if something is missing or can't be, no contiguous split fits the memory, or there are more
        ideals than `max_ideals` or than fit 2 GiB, or more than 1e10 pairs of them to compare.

    Example:
      >>> from jpipe.plan.graph import Node
      >>> fork = Graph(
      ...     tuple(Node(v, forward=2.0, transfer=0.5) for v in "abcd"), ((0, 1), (0, 2), (1, 3), (2, 3))
      ... )
      >>> solution = ideals(fork, 2)
      >>> solution.objective, [stage.nodes for stage in solution.stages], solution.optimal
      (5.0, [('a', 'b'), ('c', 'd')], True)

    References:
      Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020,
      arXiv:2006.16423, section 5.1.1. Its program puts all hosts into one, and merges only nodes that take no
      time and have one neighbour, without regard to memory.
    """
    problem = placement(graph, num_devices, num_hosts, memory_limit, bandwidth)
    best = best_along_order(problem)

    def improve(small: Problem) -> tuple[float, Split] | None:
        """The best split of merged groups, or the one that we have."""
        below = best[0] * (1 - 1e-12) if best else math.inf
        found = _ideals(small, max_ideals).best_split(below, _MAX_PAIRS)
        return regroup(problem, small, found) if found else best

    def solution(found: tuple[float, Split] | None, bound: float | None = None):
        if found is None:
            raise ValueError(
                f"no contiguous split fits {problem.num_devices} devices of {problem.memory_limit:g} bytes and "
                f"{problem.num_hosts} hosts. Raise `memory_limit` or `num_devices`."
            )
        value, stages = found
        return problem.solution("ideals", stages, value if bound is None else bound)

    found = improve(merge(problem, memory="ignored"))
    if found is None or _fits(problem, found[1]):
        return solution(found)
    bound = found[0]
    try:
        return solution(improve(merge(problem)))
    except TooLarge:
        found = improve(merge(problem, memory="kept"))
        if found is None:  # others may fit
            raise
        return solution(found, bound)


def _fits(problem: Problem, stages: Split) -> bool:
    return all(
        on_host or problem.stage_memory(groups) <= problem.most_memory
        for groups, on_host in stages
    )


def _ideals(problem: Problem, max_ideals: int) -> ClosedSets:
    """All closed sets: with each group, those before it that hold its predecessors, and it."""
    order = topological(problem)
    row = {g: n for n, g in enumerate(order)}
    features = sum(len(net) if len(net) > 2 else 1 for net in problem.nets)
    states = (problem.num_devices + 1) * (problem.num_hosts + 1)
    bytes_each = 2 * len(order) + 2 * features + 8 * states + 100
    limit = min(max_ideals, _MAX_BYTES // bytes_each)
    member = np.zeros((len(order), min(limit, 1024) + 1), bool)
    count = 1
    for n, g in enumerate(order):
        before = member[[row[p] for p in problem.predecessors[g]], :count]
        inner = np.flatnonzero(before.all(axis=0))
        end = count + len(inner)
        if end > limit:
            raise TooLarge(
                f"the graph has more than {limit} ideals: {end} with {n + 1} of its {len(order)} groups of nodes. "
                f"`max_ideals` is {max_ideals}, memory is for {_MAX_BYTES // bytes_each}. Use `linearised`, or put "
                "nodes together by `colocation`."
            )
        if end > member.shape[1]:
            more = min(max(end, 2 * member.shape[1]), limit) - member.shape[1]
            member = np.pad(member, ((0, 0), (0, more)))
        member[:n, count:end] = member[:n, inner]
        member[n, count:end] = True
        count = end
    return ClosedSets(problem, member[[row[g] for g in range(len(order))], :count])
