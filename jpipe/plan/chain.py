"""Solvers that take a graph for a chain: its nodes in topological order."""

import itertools
from collections.abc import Callable
from typing import Literal

from jpipe.plan.block import block_partition
from jpipe.plan.graph import Graph, Solution, Stage
from jpipe.solvers.min_max import min_max

_SOLVERS: dict[str, Callable] = {"min-max": min_max, "block": block_partition}


def split_chain(
    graph: Graph, num_stages: int, solver: Literal["min-max", "block"] = "min-max"
) -> Solution:
    """Cuts the topological order of a graph into stages of consecutive nodes, one device each, by compute alone.

    Args:
      graph: the graph; moving activations costs nothing here.
      num_stages: at most the number of nodes.
      solver: "min-max", the best split there is, or "block", torchgpipe's.

    Raises:
      ValueError: if there are fewer nodes than stages.

    Example:
      >>> from jpipe.plan.graph import Node
      >>> layers = tuple(Node(id, forward=t) for id, t in zip("abcdef", range(1, 7)))
      >>> chain = Graph(layers, tuple((i, i + 1) for i in range(5)))
      >>> [stage.nodes for stage in split_chain(chain, 2).stages]
      [('a', 'b', 'c', 'd'), ('e', 'f')]
    """
    nodes = [graph.nodes[v] for v in graph.topological_order]
    costs = [node.seconds for node in nodes]

    def cut(find: Callable) -> tuple[list[int], float]:
        starts = [0, *find(costs, num_stages), len(nodes)]
        return starts, max(sum(costs[i:j]) for i, j in itertools.pairwise(starts))

    find = _SOLVERS[solver]
    found = {one: cut(one) for one in {find, min_max}}
    (starts, objective), (_, bound) = found[find], found[min_max]
    return Solution(
        solver=solver,
        objective=objective,
        stages=tuple(
            Stage(tuple(node.id for node in nodes[i:j]))
            for i, j in itertools.pairwise(starts)
        ),
        bound=bound,
        optimal=objective <= bound,
    )
