"""Solvers that treat a graph as a chain: its nodes in topological order."""

import itertools
from collections.abc import Callable
from typing import Literal

from jpipe.solvers.block import block_partition
from jpipe.solvers.graph import Graph, Solution, Stage
from jpipe.stages.min_max import min_max

_CUTS: dict[str, Callable] = {"min-max": min_max, "block": block_partition}


def split_chain(graph: Graph, num_stages: int, solver: Literal["min-max", "block"] = "min-max") -> Solution:
    """Cuts the topological order of a graph into stages of consecutive nodes, one device each.

    Args:
      graph: the graph. Only compute counts; moving activations is free here.
      num_stages: at most the number of nodes.
      solver: "min-max", the best cut, or "block", torchgpipe's.

    Returns:
      The stages, with the objective of `min_max` as the bound.

    Raises:
      ValueError: if there are fewer nodes than stages.

    Example:
      >>> from jpipe.solvers import Node
      >>> layers = tuple(Node(id, forward=t) for id, t in zip("abcdef", range(1, 7)))
      >>> chain = Graph(layers, tuple((i, i + 1) for i in range(5)))
      >>> [stage.nodes for stage in split_chain(chain, 2).stages]
      [('a', 'b', 'c', 'd'), ('e', 'f')]
    """
    nodes = [graph.nodes[v] for v in graph.topological_order]
    costs = [node.seconds for node in nodes]

    def cut(name: str) -> tuple[list[int], float]:
        starts = [0, *_CUTS[name](costs, num_stages), len(nodes)]
        return starts, max(sum(costs[i:j]) for i, j in itertools.pairwise(starts))

    starts, objective = cut(solver)
    _, bound = (starts, objective) if solver == "min-max" else cut("min-max")
    return Solution(
        solver=solver,
        objective=objective,
        stages=tuple(Stage(tuple(node.id for node in nodes[i:j])) for i, j in itertools.pairwise(starts)),
        bound=bound,
        optimal=objective <= bound,
    )
