"""The best contiguous split of a graph, by a dynamic program over its ideals."""

import math

import numpy as np

from jpipe.solvers._linearised import best_along_order
from jpipe.solvers._merge import merge
from jpipe.solvers._placement import (
    Problem,
    Split,
    TooLarge,
    placement,
    regroup,
    topological,
)
from jpipe.solvers.closed_sets import ClosedSets
from jpipe.solvers.graph import Graph, Solution

_MAX_BYTES = 2**31
_MAX_PAIRS = 1e10  # takes some minutes


def ideals(
    graph: Graph,
    num_devices: int | None = None,
    *,
    num_hosts: int | None = None,
    memory_limit: float | None = None,
    bandwidth: float | None = None,
    max_ideals: int = 200_000,
) -> Solution:
    """Finds the contiguous split of a graph whose slowest stage takes the least time.

    In the steady state of a pipeline every stage works on a minibatch of its own, so the slowest
    stage sets the pace. A stage on a device takes

        sum of `seconds` of its nodes + sum of transfers of the outputs that cross its border

    in either direction. An output is transferred once, however many nodes read it. A stage on a
    host takes the `host` times of its nodes and pays for no transfer. A transfer is the node's
    `transfer`, or `output_bytes` / `bandwidth`.

    Gradients cross the border too. If the nodes of a graph contain both passes, as those of
    PipeDream's profiler do, gradients have the sizes of the outputs, and each transfer counts
    twice. If backward nodes stand alone, they have transfers of their own.

    A split is contiguous if its stages have an order that no edge of the forward pass goes
    against. Nodes of the backward pass follow their colocation. Backward nodes that share none
    with a forward node keep the opposite order.

    An ideal of the graph is a set of nodes that contains all predecessors of its nodes. A
    contiguous stage is the difference of two ideals. Their number can be exponential, so nodes
    that some best split has together are merged first (few nodes are left if transfers are
    expensive), and ideals are discarded by bounds. The upper bound is the split of `linearised`.

    Args:
      graph: the graph to split.
      num_devices: k, the most stages on devices; None: the graph's number.
      num_hosts: the most stages on processors of the host, one each; None: the graph's number.
      memory_limit: bytes per device; None: the graph's limit, or none; math.inf: no limit.
      bandwidth: bytes per unit of time, for nodes without a `transfer`.
      max_ideals: the search stops with an error if there are more ideals.

    Returns:
      The split. It is `optimal`, with one exception: if memory binds, and there are too many
      ideals when only nodes without memory are merged. Then `bound` is the best split of a problem
      with less memory.

    Raises:
      ValueError: if an argument is missing or wrong, no contiguous split fits the memory, there
        are more ideals than `max_ideals` or than fit 2 GiB, or more than 1e10 pairs of them.
      ImportError: if SciPy is not installed.

    Example:
      >>> from jpipe.solvers import Node
      >>> nodes = tuple(Node(v, forward=2.0, transfer=0.5) for v in "abcd")
      >>> fork = Graph(nodes, ((0, 1), (0, 2), (1, 3), (2, 3)))
      >>> solution = ideals(fork, 2)
      >>> solution.objective, [stage.nodes for stage in solution.stages], solution.optimal
      (5.0, [('a', 'b'), ('c', 'd')], True)

    References:
      Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS
      2020, arXiv:2006.16423, section 5.1.1. Its program treats all hosts as one, and merges only
      nodes that take no time and have one neighbour, without regard to memory.
    """
    problem = placement(graph, num_devices, num_hosts, memory_limit, bandwidth)
    best = best_along_order(problem)

    def improve(small: Problem) -> tuple[float, Split] | None:
        """The best split of merged groups, or the known one if it is as good."""
        below = best[0] * (1 - 1e-12) if best else math.inf
        split = _ideals(small, max_ideals).best_split(below, _MAX_PAIRS)
        return regroup(problem, small, split) if split else best

    def solution(split: tuple[float, Split] | None, bound: float | None = None):
        if split is None:
            raise ValueError(
                f"no contiguous split fits {problem.num_devices} devices of {problem.memory_limit:g} bytes and "
                f"{problem.num_hosts} hosts. Raise `memory_limit` or `num_devices`."
            )
        value, stages = split
        return problem.solution("ideals", stages, value if bound is None else bound)

    split = improve(merge(problem, memory="ignored"))
    if split is None or problem.fits(split[1]):
        return solution(split)
    bound = split[0]
    try:
        return solution(improve(merge(problem)))
    except TooLarge:
        split = improve(merge(problem, memory="kept"))
        if split is None:  # a split that separates merged groups may fit
            raise
        return solution(split, bound)


def _ideals(problem: Problem, max_ideals: int) -> ClosedSets:
    """All closed sets.

    Groups are added in topological order: every set so far that contains the predecessors of a
    group makes one more set, with the group.
    """
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
                f"`max_ideals` is {max_ideals}, and 2 GiB hold {_MAX_BYTES // bytes_each}. Use `linearised`, or "
                "put nodes together by `colocation`."
            )
        if end > member.shape[1]:
            more = min(max(end, 2 * member.shape[1]), limit) - member.shape[1]
            member = np.pad(member, ((0, 0), (0, more)))
        member[:n, count:end] = member[:n, inner]
        member[n, count:end] = True
        count = end
    return ClosedSets(problem, member[[row[g] for g in range(len(order))], :count])
