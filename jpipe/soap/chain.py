"""The best strategy of a chain of operators under an additive cost, by dynamic programming.

The cost is additive as that of OptCNN (Jia et al. 2018, arXiv:1802.04924, equation 1): nothing overlaps. It is the sum
over the operators of the seconds of a shard, of adding up partial results and of synchronising weights, and over the
edges of the seconds of the busiest link.
"""

import operator
from collections.abc import Sequence

from jpipe.soap.costs import Analytic, Costs
from jpipe.soap.graph import OperatorGraph
from jpipe.soap.machine import Machine
from jpipe.soap.space import Space
from jpipe.soap.strategy import Config, Strategy, data_parallel
from jpipe.soap.tasks import Tasks


class AdditiveCosts:
    """The additive cost of strategies.

    Args:
      graph, machine, costs, sync: see `jpipe.soap.tasks.Tasks`.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        machine: Machine,
        costs: Costs | None = None,
        *,
        sync: str = "ring",
    ):
        costs = Analytic(machine) if costs is None else costs
        start = data_parallel(graph, machine.num_devices)
        self._tasks = Tasks(graph, machine, costs, start, sync=sync)
        self._graph = graph

    def operator(self, number: int, config: Config) -> float:
        """Seconds of an operator and of synchronising each of its weights: those of the busiest device or link."""
        loads = self._tasks.isolated_loads(number, config)
        return sum(float(load.max()) for load in loads)

    def edge(self, number: int, above: Config, below: Config) -> float:
        """Seconds of the busiest link between two operators."""
        tasks = self._tasks
        load: dict[int, float] = {}
        both = tasks.shards.gradient_returns(number)
        pairs = tasks.shards.edge_pairs(number, above.degrees, below.degrees)
        for a, b, num_bytes in pairs:
            ends = above.devices[a], below.devices[b]
            for start, end in (ends, ends[::-1])[: 1 + both]:
                if start != end:
                    link, seconds = tasks.routes.message(start, end, num_bytes)
                    load[link] = load.get(link, 0.0) + seconds
        return max(load.values(), default=0.0)

    def total(self, strategy: Sequence[Config]) -> float:
        """Seconds of a strategy."""
        operators = sum(self.operator(i, c) for i, c in enumerate(strategy))
        edges = (
            self.edge(number, strategy[source], strategy[target])
            for number, (source, target, _) in enumerate(self._graph.edges)
        )
        return operators + sum(edges)


def chain_optimum(
    graph: OperatorGraph,
    machine: Machine,
    *,
    costs: Costs | None = None,
    space: Space | None = None,
    sync: str = "ring",
) -> tuple[Strategy, float]:
    """The strategy of least additive cost of a chain.

    Args:
      graph: a chain: every operator reads the result of the one before it, and weights that no other operator reads.
      machine, costs, space, sync: see `jpipe.soap.search.search`.

    Returns:
      The strategy and its additive cost in seconds.

    Raises:
      ValueError: if the graph is no chain.
    """
    shared = [w for w, readers in graph.readers_of_weight.items() if len({i for i, _ in readers}) > 1]
    if not graph.is_chain or shared:
        others = (target for source, target, _ in graph.edges if source != target - 1)
        name = next((graph.operators[i].name for i in others), "an operator")
        raise ValueError(
            f"the graph is no chain: {name!r} reads more than the operator before it, or a weight is read twice. Use "
            "`search`."
        )
    space = Space(graph, machine.num_devices) if space is None else space
    price = AdditiveCosts(graph, machine, costs, sync=sync)
    edges: dict[int, list[int]] = {}
    for number, (_, target, _) in enumerate(graph.edges):
        edges.setdefault(target, []).append(number)
    best: dict[Config, tuple[float, Strategy]] = {}
    for i in range(len(graph.operators)):
        following: dict[Config, tuple[float, Strategy]] = {}
        for config in space.configs(i):
            seconds, strategy = min(
                (
                    (
                        before + sum(price.edge(e, above, config) for e in edges[i]),
                        path,
                    )
                    for above, (before, path) in best.items()
                ),
                key=operator.itemgetter(0),
                default=(0.0, ()),  # before the first operator
            )
            seconds += price.operator(i, config)
            following[config] = seconds, (*strategy, config)
        best = following
    seconds, strategy = min(best.values(), key=operator.itemgetter(0))
    return strategy, seconds
