"""The best split along one topological order."""

from jpipe.solvers._merge import merge
from jpipe.solvers._placement import (
    Problem,
    Split,
    lower_bound,
    placement,
    regroup,
    topological,
)
from jpipe.solvers.closed_sets import prefixes
from jpipe.solvers.graph import Graph, Solution


def linearised(
    graph: Graph,
    num_devices: int | None = None,
    *,
    num_hosts: int | None = None,
    memory_limit: float | None = None,
    bandwidth: float | None = None,
) -> Solution:
    """Splits a graph for throughput along one topological order, as if it were a chain.

    The order is depth-first. The run time is quadratic in the number of nodes. Transfers are those
    of the graph, not those of the chain. `ideals` describes the cost model and finds the best of
    all contiguous splits.

    Args:
      graph, num_devices, num_hosts, memory_limit, bandwidth: see `ideals`.

    Returns:
      The split. Its `bound` follows from the total work divided among devices and hosts, and from
      the largest node. It is `optimal` only if it meets the bound.

    Raises:
      ValueError: if an argument is missing or wrong, or no split along the order fits the memory.
      ImportError: if SciPy is not installed.

    Example:
      >>> from jpipe.solvers import Node
      >>> chain = Graph(tuple(Node(v, forward=1.0) for v in "abcd"), ((0, 1), (1, 2), (2, 3)))
      >>> solution = linearised(chain, 2)
      >>> solution.objective, [stage.nodes for stage in solution.stages], solution.optimal
      (2.0, [('a', 'b'), ('c', 'd')], True)

    References:
      Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS
      2020, arXiv:2006.16423 (DPL).
    """
    problem = placement(graph, num_devices, num_hosts, memory_limit, bandwidth)
    split = best_along_order(problem)
    if split is None:
        raise ValueError(
            f"no split along the topological order fits {problem.num_devices} devices of "
            f"{problem.memory_limit:g} bytes and {problem.num_hosts} hosts. Try `ideals`, which searches all "
            "orders, or raise `memory_limit` or `num_devices`."
        )
    return problem.solution("linearised", split[1], lower_bound(problem))


def best_along_order(problem: Problem) -> tuple[float, Split] | None:
    """The best split along one order: its slowest stage, and its stages in the problem's groups.

    None if no split fits.
    """
    # Merging can only help: a merged group is contiguous in the order of the merged groups.
    small = merge(problem)
    split = prefixes(small, topological(small)).best_split()
    if split is None and len(small.groups) < len(problem.groups):
        small = problem
        split = prefixes(small, topological(small)).best_split()
    return split and regroup(problem, small, split)
