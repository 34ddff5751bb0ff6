"""The best strategy of all, by a search of the whole space that leaves out what cannot be better.

Operators are decided in the order of the graph. For decided operators the bound knows shards, transfers and sums; the others are
as fast as their best configuration alone. It takes no waiting for devices into account but the sum of each one's work.
"""

import dataclasses
import math
from collections.abc import Sequence

from jpipe.soap.costs import Analytic, Costs
from jpipe.soap.delta import Simulator
from jpipe.soap.graph import OperatorGraph
from jpipe.soap.machine import Machine
from jpipe.soap.space import Space
from jpipe.soap.strategy import Config, Strategy, data_parallel

_ROUNDING = 1e-9
"""Bounds are sums in another order than the simulation's, so they may be off by this fraction."""


@dataclasses.dataclass
class Optimum:
    """The result of an exhaustive search.

    Attributes:
      strategy: the fastest strategy of the space that fits into the memory.
      seconds: simulated.
      simulations: number of complete strategies that were simulated.
      left_out: number of branches that a bound cut off.
    """

    strategy: Strategy
    seconds: float
    simulations: int
    left_out: int


def exhaustive(
    graph: OperatorGraph,
    machine: Machine,
    *,
    costs: Costs | None = None,
    space: Space | None = None,
    start: Sequence[Config] | None = None,
    memory_limit: float | None = None,
    max_simulations: int = 10_000_000,
    sync: str = "ring",
    optimizer_arrays: int = 2,
) -> Optimum:
    """Finds the fastest strategy of a space.

    Args:
      graph, machine, costs, space, memory_limit, sync, optimizer_arrays: see `jpipe.soap.search.search`.
      start: a good strategy, such as one that `search` found. The better it is, the more is left out.
      max_simulations: after so many simulations the search gives up.

    Raises:
      ValueError: if no strategy fits into the memory.
      RuntimeError: if the search gives up.
    """
    costs = Analytic(machine) if costs is None else costs
    space = Space(graph, machine.num_devices) if space is None else space
    limit = machine.memory_bytes if memory_limit is None else memory_limit
    start = data_parallel(graph, machine.num_devices) if start is None else start
    simulator = Simulator(
        graph, machine, costs, start, sync=sync, optimizer_arrays=optimizer_arrays
    )
    branch = _Branch(simulator, space, limit, max_simulations)
    branch.descend(0)
    if branch.best is None:
        raise ValueError(
            f"no strategy of the space fits into {limit:.4g} bytes per device. Use more devices, a smaller batch or more memory."
        )
    return Optimum(branch.best, branch.seconds, branch.simulations, branch.left_out)


class _Branch:
    """The strategies that begin with the configurations decided so far.

    Of each decided operator two lists are kept, with a number per shard: `heads`, when its forward can have ended at the earliest, and
    `ways`, seconds from the start of its backward to the end of the last backward that needs it.
    """

    def __init__(
        self, simulator: Simulator, space: Space, limit: float, max_simulations: int
    ):
        self._simulator, self._space, self._limit = simulator, space, limit
        self._max_simulations = max_simulations
        tasks = self._tasks = simulator.tasks
        graph = self._graph = tasks.graph
        self.best: Strategy | None = None
        self.seconds = math.inf
        if max(simulator.memory_bytes) <= limit:
            self.best, self.seconds = simulator.strategy, simulator.seconds
        self.simulations = self.left_out = 0
        num = len(graph.operators)
        self._choices = [self._sorted(i) for i in range(num)]
        times = [
            [(*tasks.shards.seconds(i, c.degrees), len(c.devices)) for c in choices]
            for i, choices in enumerate(self._choices)
        ]
        self._least = [
            (min(f for f, _, _ in each), min(b for _, b, _ in each)) for each in times
        ]
        work = [min((f + b) * n for f, b, n in each) for each in times]
        self._work_after = [sum(work[i:]) for i in range(num + 1)]
        self._edges: list[list[int]] = [[] for _ in range(num)]
        for number, (_, target, _) in enumerate(graph.edges):
            self._edges[target].append(number)
        self._beyond = self._turns()
        self._chosen: list[Config] = []
        self._heads: list[list[float]] = []
        self._ways: list[list[float]] = []
        self._load = [0.0] * tasks.num_resources

    def _sorted(self, operator: int) -> list[Config]:
        seconds = self._tasks.shards.seconds
        configs = self._space.configs(operator)
        return sorted(configs, key=lambda c: sum(seconds(operator, c.degrees)))

    def _turns(self) -> list[float]:
        """Of each operator, seconds that pass at least between its forward and its backward, or after it without a backward."""
        graph = self._graph
        beyond = [0.0] * len(graph.operators)
        for source, target, position in reversed(graph.edges):
            forward, backward = self._least[target]
            value = graph.tensors[graph.operators[target].inputs[position].tensor]
            path = forward + beyond[target]
            if graph.operators[source].has_backward:
                returns = value.has_gradient and graph.operators[target].has_backward
                path = path + backward if returns else 0.0
            beyond[source] = max(beyond[source], path)
        return beyond

    def descend(self, operator: int) -> None:
        """Decides `operator` and all after it."""
        if operator == len(self._graph.operators):
            self._simulate()
            return
        for config in self._choices[operator]:
            self._chosen.append(config)
            loads = self._decide(operator, config)
            if self._bound(operator) * (1 - _ROUNDING) >= self.seconds:
                self.left_out += 1
            else:
                self.descend(operator + 1)
            for resource, seconds in loads:
                self._load[resource] -= seconds
            self._heads.pop()
            self._ways.pop()
            self._chosen.pop()

    def _bound(self, operator: int) -> float:
        """Every strategy that begins so takes at least so many seconds."""
        heads, ways = self._heads[operator], self._ways[operator]
        num_devices = self._tasks.machine.num_devices
        work = sum(self._load[:num_devices]) + self._work_after[operator + 1]
        return max(
            max(self._load),
            work / num_devices,
            max(map(sum, zip(heads, ways))),
            min(heads) + self._beyond[operator] + min(ways),
        )

    def _decide(self, operator: int, config: Config) -> list[tuple[int, float]]:
        """Extends heads and ways by one operator. Returns what it adds to the load of devices and links."""
        graph, tasks = self._graph, self._tasks
        forward, backward = tasks.shards.seconds(operator, config.degrees)
        heads, ways = [0.0] * len(config.devices), [0.0] * len(config.devices)
        loads = [(device, forward + backward) for device in config.devices]
        for number in self._edges[operator]:
            source, _, _ = graph.edges[number]
            above = self._chosen[source]
            returns = tasks.shards.gradient_returns(number)
            for a, b, num_bytes in tasks.shards.edge_pairs(
                number, above.degrees, config.degrees
            ):
                there = back = 0.0
                from_device, to_device = above.devices[a], config.devices[b]
                if from_device != to_device:
                    link, there = tasks.message(from_device, to_device, num_bytes)
                    loads.append((link, there))
                    if returns:
                        link, back = tasks.message(to_device, from_device, num_bytes)
                        loads.append((link, back))
                heads[b] = max(heads[b], self._heads[source][a] + there)
                if returns:
                    ways[b] = max(ways[b], self._ways[source][a] + back)
        self._heads.append([head + forward for head in heads])
        self._ways.append([way + backward for way in ways])
        for resource, seconds in loads:
            self._load[resource] += seconds
        return loads

    def _simulate(self) -> None:
        self.simulations += 1
        if self.simulations > self._max_simulations:
            raise RuntimeError(
                f"the exhaustive search gave up after {self._max_simulations} simulations: the space has {self._space.size:.3g} "
                "strategies. Use `search`, a smaller space, or a better `start`."
            )
        simulator = self._simulator
        present = simulator.strategy
        changed = [i for i, c in enumerate(self._chosen) if c != present[i]]
        for i in changed[:-1]:
            simulator.try_change(i, self._chosen[i])
            simulator.keep()
        if not changed:
            return
        last = changed[-1]
        seconds = simulator.try_change(
            last, self._chosen[last], self.seconds, self._limit
        )
        if seconds < self.seconds:
            simulator.keep()
            self.best, self.seconds = simulator.strategy, seconds
        else:
            simulator.undo()
