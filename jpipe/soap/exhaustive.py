"""The best strategy of all, by a search of the whole space that leaves out strategies that cannot be better.

Operators are decided in the order of the graph. For decided operators the bound knows shards, transfers, sums and the
updates of weights. For the others it knows, from each configuration of a decided operator, the shortest way through
later operators to the end of the forward and back, over all of their configurations and with the transfers between
them. It takes no waiting for devices into account but the sum of each one's work.

On a machine whose devices are all alike, one of the strategies that differ only in the names of devices is looked at.
(Rings of at least three devices go in the order of the names, so another one may be faster by what waits for one of
their links.)
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from jpipe.soap.costs import Analytic, Costs
from jpipe.soap.delta import Simulator
from jpipe.soap.graph import OperatorGraph
from jpipe.soap.machine import Machine
from jpipe.soap.space import Space
from jpipe.soap.strategy import Config, Strategy, data_parallel
from jpipe.soap.tasks import Tasks, ring_bytes

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
      max_simulations: the number of simulations after which the search gives up.

    Raises:
      ValueError: if no strategy fits into the memory.
      RuntimeError: if the search gives up.
    """
    costs = Analytic(machine) if costs is None else costs
    space = Space(graph, machine.num_devices) if space is None else space
    limit = machine.memory_bytes if memory_limit is None else memory_limit
    start = data_parallel(graph, machine.num_devices) if start is None else start
    simulator = Simulator(graph, machine, costs, start, sync=sync, optimizer_arrays=optimizer_arrays)
    branch = _PartialStrategy(simulator, space, limit, max_simulations)
    branch.descend(0)
    if branch.best is None:
        raise ValueError(
            f"no strategy of the space fits into {limit:.4g} bytes per device. Use more devices, a smaller batch or "
            "more memory."
        )
    return Optimum(branch.best, branch.seconds, branch.simulations, branch.left_out)


class _PartialStrategy:
    """The strategies that begin with the configurations decided so far.

    Of each decided operator two lists are kept, with a number per shard: `heads`, when its result can be there at the
    earliest, and `ways`, seconds from when the gradient of its result is there to the end of the last task that needs
    it.
    """

    def __init__(self, simulator: Simulator, space: Space, limit: float, max_simulations: int):
        self._simulator, self._space, self._limit = simulator, space, limit
        self._max_simulations = max_simulations
        tasks = self._tasks = simulator.tasks
        graph = self._graph = tasks.graph
        self.best: Strategy | None = None
        self.seconds = math.inf
        if max(simulator.memory_bytes) <= limit:
            self.best, self.seconds = simulator.strategy, simulator.seconds
        self.simulations = self.left_out = 0
        num, num_devices = len(graph.operators), tasks.machine.num_devices
        self._choices = [space.configs(i) for i in range(num)]
        self._updates = [{c: _update_loads(tasks, i, c) for c in choices} for i, choices in enumerate(self._choices)]
        work = [
            min(
                sum(tasks.shards.seconds(i, c.degrees)) * len(c.devices)
                + sum(s for k, s in self._updates[i][c][0] if k < num_devices)
                for c in choices
            )
            for i, choices in enumerate(self._choices)
        ]
        self._work_after = [sum(work[i:]) for i in range(num + 1)]
        self._edges: list[list[int]] = [[] for _ in range(num)]
        for number, (_, target, _) in enumerate(graph.edges):
            self._edges[target].append(number)
        machine = tasks.machine
        levels = [level for level in machine.levels if level.size > 1]
        self._equal_devices = len(levels) <= 1 and not machine.links and not any(level.shared for level in levels)
        self._known_sums: dict[tuple[int, Config], tuple[list[float], list[float]]] = {}
        self._tails = self._shortest_tails()
        self._chosen: list[Config] = []
        self._heads: list[list[float]] = []
        self._ways: list[list[float]] = []
        self._shard_seconds: list[float] = []  # of the forward and the backward of one shard
        self._load = [0.0] * tasks.routes.num_resources

    def _shortest_tails(self) -> list[dict[Config, float]]:
        """The fewest seconds, for each operator and configuration, from the end of any shard's forward to the
        start of some shard's backward, or to the end of the step if the operator has no backward.
        """
        graph, tasks = self._graph, self._tasks
        tails = [dict.fromkeys(choices, 0.0) for choices in self._choices]
        for number in reversed(range(len(graph.edges))):
            source, target, _ = graph.edges[number]
            returns = tasks.shards.gradient_returns(number)
            if graph.operators[source].has_backward and not returns:
                continue  # the backward of the source does not wait for this reader
            below = []
            for config in self._choices[target]:
                forward, backward = tasks.shards.seconds(target, config.degrees)
                there, back = self._sums(target, config)
                seconds = forward + min(there) + tails[target][config]
                if returns:
                    seconds += backward + min(back)
                below.append((seconds, config))
            below.sort(key=lambda pair: pair[0])
            for above in self._choices[source]:
                least = math.inf
                for seconds, config in below:
                    if seconds >= least:
                        break
                    seconds += self._least_transfers(number, above, config, returns)
                    least = min(least, seconds)
                tails[source][above] = max(tails[source][above], least)
        return tails

    def _least_transfers(self, number: int, above: Config, below: Config, returns: bool) -> float:
        """Lower bound on the seconds of the transfers along an edge, there and back: those of the fastest shard."""
        if above.devices == below.devices and above.degrees == below.degrees:
            return 0.0
        tasks = self._tasks
        last = [0.0] * len(above.devices)
        back = [0.0] * len(below.devices)
        pairs = tasks.shards.edge_pairs(number, above.degrees, below.degrees)
        for a, b, num_bytes in pairs:
            start, end = above.devices[a], below.devices[b]
            if start != end:
                last[a] = max(last[a], tasks.routes.message(start, end, num_bytes)[1])
                if returns:
                    back[b] = max(back[b], tasks.routes.message(end, start, num_bytes)[1])
        return min(last) + min(back)

    def _sums(self, operator: int, config: Config) -> tuple[list[float], list[float]]:
        """Two times per shard: from the end of its forward to the end of the last sum that needs it, and from the
        gradient of the sum that it owns to the last shard that has it. In seconds; zero where an output is no sum.
        """
        key = operator, config
        if key not in self._known_sums:
            count, tasks = len(config.devices), self._tasks
            per_output = []
            for tensor in self._graph.operators[operator].outputs:
                there, back = [0.0] * count, [0.0] * count
                for owner, shards, num_bytes in tasks.shards.sums(operator, tensor, config.degrees):
                    add = tasks.costs.add_seconds(num_bytes, len(shards))
                    for shard in shards:
                        ends = config.devices[shard], config.devices[owner]
                        send = receive = 0.0
                        if ends[0] != ends[1]:
                            send = tasks.routes.message(*ends, num_bytes)[1]
                            receive = tasks.routes.message(*ends[::-1], num_bytes)[1]
                        there[shard] = max(there[shard], send + add)
                        back[owner] = max(back[owner], receive)
                per_output.append((there, back))
            self._known_sums[key] = (
                [min(times) for times in zip(*(there for there, _ in per_output))],
                [min(times) for times in zip(*(back for _, back in per_output))],
            )
        return self._known_sums[key]

    def descend(self, operator: int) -> None:
        """Decides `operator` and all after it, the most promising configuration first."""
        if operator == len(self._graph.operators):
            self._simulate()
            return
        bounds = []
        for config in self._different(operator):
            loads = self._decide(operator, config)
            bounds.append((self._bound(operator), config))
            self._take_back(loads)
        bounds.sort(key=lambda pair: pair[0])
        for k, (bound, config) in enumerate(bounds):
            if bound * (1 - _ROUNDING) >= self.seconds:
                self.left_out += len(bounds) - k
                break
            loads = self._decide(operator, config)
            self.descend(operator + 1)
            self._take_back(loads)

    def _different(self, operator: int) -> Iterator[Config]:
        """The configurations of an operator. Of those that differ only in the names of equal devices that are not yet
        used, the first.
        """
        used = {device for config in self._chosen for device in config.devices}
        seen = set()
        for config in self._choices[operator]:
            if self._equal_devices:
                names: dict[int, int] = {}
                key = (
                    config.degrees,
                    tuple(d if d in used else -1 - names.setdefault(d, len(names)) for d in config.devices),
                )
                if key in seen:
                    continue
                seen.add(key)
            yield config

    def _bound(self, operator: int) -> float:
        """Returns a lower bound on the seconds of every strategy that begins so."""
        heads, ways = self._heads[operator], self._ways[operator]
        num_devices = self._tasks.machine.num_devices
        work = sum(self._load[:num_devices]) + self._work_after[operator + 1]
        tail = self._tails[operator][self._chosen[operator]]
        return max(
            max(self._load),
            work / num_devices,
            self._shard_seconds[operator],
            max(heads) + tail + min(ways),
        )

    def _decide(self, operator: int, config: Config) -> list[tuple[int, float]]:
        """Extends heads and ways by one operator. Returns the seconds that it adds to the load of devices and links."""
        graph, tasks = self._graph, self._tasks
        forward, backward = tasks.shards.seconds(operator, config.degrees)
        heads = [0.0] * len(config.devices)
        updates, after = self._updates[operator][config]
        loads = [(device, forward + backward) for device in config.devices] + updates
        ways = list(after)
        for number in self._edges[operator]:
            source, _, _ = graph.edges[number]
            above = self._chosen[source]
            returns = tasks.shards.gradient_returns(number)
            for a, b, num_bytes in tasks.shards.edge_pairs(number, above.degrees, config.degrees):
                there = back = 0.0
                from_device, to_device = above.devices[a], config.devices[b]
                if from_device != to_device:
                    link, there = tasks.routes.message(from_device, to_device, num_bytes)
                    loads.append((link, there))
                    if returns:
                        link, back = tasks.routes.message(to_device, from_device, num_bytes)
                        loads.append((link, back))
                heads[b] = max(heads[b], self._heads[source][a] + there)
                if returns:
                    ways[b] = max(ways[b], self._ways[source][a] + back)
        heads = [head + forward for head in heads]
        ways = [way + backward for way in ways]
        self._chosen.append(config)
        self._shard_seconds.append(max(map(sum, zip(heads, ways))))
        self._heads.append(self._after_sums(operator, config, heads, False))
        self._ways.append(self._after_sums(operator, config, ways, True))
        for resource, seconds in loads:
            self._load[resource] += seconds
        return loads

    def _after_sums(self, operator: int, config: Config, times: list[float], backward: bool) -> list[float]:
        """Returns the times of the results, given the ends of the shards' forwards; for gradients in reverse."""
        tasks, per_output = self._tasks, []
        for tensor in self._graph.operators[operator].outputs:
            result = list(times)
            for owner, shards, num_bytes in tasks.shards.sums(operator, tensor, config.degrees):
                result[owner] = 0.0
                for shard in shards:
                    ends = config.devices[shard], config.devices[owner]
                    if backward:
                        ends = ends[::-1]
                    send = 0.0
                    if ends[0] != ends[1]:
                        send = tasks.routes.message(*ends, num_bytes)[1]
                    result[owner] = max(result[owner], times[shard] + send)
                if not backward:
                    result[owner] += tasks.costs.add_seconds(num_bytes, len(shards))
            per_output.append(result)
        return [min(times) for times in zip(*per_output)]

    def _take_back(self, loads: list[tuple[int, float]]) -> None:
        """Undoes `_decide`, whose result is given."""
        for resource, seconds in loads:
            self._load[resource] -= seconds
        self._shard_seconds.pop()
        self._heads.pop()
        self._ways.pop()
        self._chosen.pop()

    def _simulate(self) -> None:
        self.simulations += 1
        if self.simulations > self._max_simulations:
            raise RuntimeError(
                f"the exhaustive search gave up after {self._max_simulations} simulations: the space has "
                f"{self._space.size:.3g} "
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
        seconds = simulator.try_change(last, self._chosen[last], self.seconds, self._limit)
        if seconds < self.seconds:
            simulator.keep()
            self.best, self.seconds = simulator.strategy, seconds
        else:
            simulator.undo()


def _update_loads(tasks: Tasks, operator: int, config: Config) -> tuple[list[tuple[int, float]], list[float]]:
    """Loads and delays after the backward of an operator, for the weights that no other operator reads.

    Returns:
      `(device or link, seconds)` of updates and messages; and per shard, seconds from the end of its backward to that
      of the last update that needs it, at least.
    """
    graph = tasks.graph
    loads: list[tuple[int, float]] = []
    after = [0.0] * len(config.devices)
    if not graph.operators[operator].has_backward:
        return loads, after
    for weight in (tasks.weights[number] for number in tasks.weights_of[operator]):
        readers = graph.readers_of_weight[weight]
        if any(reader != operator for reader, _ in readers):
            continue
        degrees = [config.degrees] * len(readers)
        for num_bytes, holders in tasks.shards.weight_parts(weight, degrees):
            shards = dict.fromkeys(shard for _, shard in holders)
            devices = list(dict.fromkeys(config.devices[k] for k in shards))
            update, last = tasks.costs.update_seconds(num_bytes), 0.0
            if tasks.sync == "ring":
                devices.sort()
                loads += [(device, update) for device in devices]
                if len(devices) > 1:
                    sent = ring_bytes(num_bytes, len(devices))
                    ring = zip(devices, [*devices[1:], devices[0]])
                    messages = [tasks.routes.message(a, b, sent) for a, b in ring]
                    loads += messages
                    last = max(seconds for _, seconds in messages)
            else:
                loads.append((devices[0], update))
            for shard in shards:
                after[shard] = max(after[shard], last + update)
    return loads, after
