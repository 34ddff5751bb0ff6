"""The best split along one topological order."""

from jpipe.plan.graph import Graph, Solution
from jpipe.plan.placement import (
    Problem,
    Split,
    lower_bound,
    merge,
    placement,
    prefixes,
    regroup,
    topological,
)


def linearised(
    graph: Graph,
    num_devices: int | None = None,
    *,
    num_hosts: int | None = None,
    memory_limit: float | None = None,
    bandwidth: float | None = None,
) -> Solution:
    """Splits a graph for throughput as if it were a chain: its nodes in a depth-first topological order.

    Time is quadratic in the number of nodes. Transfers are those of the graph, not of the chain. For the model
    of cost and what contiguous means, see `ideals`, which finds the best of all contiguous splits.

    Args:
      graph: what to split.
      num_devices: k, at most so many stages on devices; None: the graph's.
      num_hosts: at most so many stages on the host's processors, one each; None: the graph's.
      memory_limit: bytes of a device; None: the graph's, or no limit; math.inf: none.
      bandwidth: bytes a unit of time, for nodes without a `transfer`.

    Returns: The split. Its `bound` is from all work divided among devices and hosts, and from the largest
      node; it's `optimal` only where it meets that.

    Raises:
      ValueError: if something is missing or can't be, or no split along the order fits the memory.

    Example:
      >>> from jpipe.plan.graph import Node
      >>> chain = Graph(tuple(Node(v, forward=1.0) for v in "abcd"), ((0, 1), (1, 2), (2, 3)))
      >>> solution = linearised(chain, 2)
      >>> solution.objective, [stage.nodes for stage in solution.stages], solution.optimal
      (2.0, [('a', 'b'), ('c', 'd')], True)

    References:
      Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020,
      arXiv:2006.16423 (DPL).
    """
    problem = placement(graph, num_devices, num_hosts, memory_limit, bandwidth)
    found = best_along_order(problem)
    if found is None:
        raise ValueError(
            f"no split along the topological order fits {problem.num_devices} devices of "
            f"{problem.memory_limit:g} bytes and {problem.num_hosts} hosts. Try `ideals`, which looks through all "
            "orders, or raise `memory_limit` or `num_devices`."
        )
    return problem.solution("linearised", found[1], lower_bound(problem))


def best_along_order(problem: Problem) -> tuple[float, Split] | None:
    """The slowest stage and the stages, in the problem's groups; None if nothing fits."""
    # A merged group lies in one piece, and where it's best, in the order too.
    small = merge(problem)
    found = prefixes(small, topological(small)).best_split()
    if found is None and len(small.groups) < len(problem.groups):
        small = problem
        found = prefixes(small, topological(small)).best_split()
    return found and regroup(problem, small, found)
