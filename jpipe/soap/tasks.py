"""The task graph of a strategy (FlexFlow, section 5.1), which can be changed operator by operator.

Tasks lie in blocks: one per operator, per edge between operators, and per weight. To change an operator's configuration
is to replace its block and those of the edges and weights at it. A block is always built in the same order, so a task
has the same key however the graph came about.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from jpipe._util.foreign import shown
from jpipe.soap.costs import Costs
from jpipe.soap.graph import OperatorGraph
from jpipe.soap.held import HeldBytes, HeldSpan, Holdings
from jpipe.soap.machine import Machine
from jpipe.soap.routes import Routes
from jpipe.soap.shards import Shards
from jpipe.soap.strategy import Config, check_config

LEAST_SECONDS = 1e-9
"""Every task takes at least this long. So what follows a task is ready later than the task, which makes the order of
the tasks on a device a function of ready times and keys."""

NOWHERE = -1
"""The device of tasks that wait for others and use nothing. Something always follows them."""

EXTREMA = frozenset({"reduce_max", "reduce_min"})
"""Their gradient is shared by all elements that are the extremum. So each shard gets the extremum, and the elements of
all shards are counted.
"""

_KEY_BITS = 32


@dataclasses.dataclass
class TaskBlock:
    """Tasks and dependencies that are replaced together.

    Attributes:
      tasks: its tasks.
      messages: its tasks that carry bytes from device to device.
      links: dependencies `(before, after)`. Those of edges and weights lead to tasks of other blocks too.
      held: the spans of bytes that devices hold for it.
      sent_bytes: bytes of its messages.
      load: seconds of its tasks on each device and link.
      forward, backward: the task of each shard of an operator. `backward` is empty if there is none.
      results, result_gradients: per tensor of an operator, the task that has each shard's part of it and the one that
        has its gradient.
    """

    tasks: list[int] = dataclasses.field(default_factory=list)
    messages: list[int] = dataclasses.field(default_factory=list)
    links: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    held: list[HeldSpan] = dataclasses.field(default_factory=list)
    sent_bytes: int = 0
    load: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    forward: list[int] = dataclasses.field(default_factory=list)
    backward: list[int] = dataclasses.field(default_factory=list)
    results: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    result_gradients: dict[int, list[int]] = dataclasses.field(default_factory=dict)


class Tasks:
    """The task graph of one strategy.

    Args:
      graph: the operators.
      machine: the devices and links.
      costs: seconds of operators.
      strategy: one configuration per operator.
      sync: the sum of gradients of weights: "ring", an all-reduce in a ring (2 (n - 1) / n of the bytes over
        every link of the ring), or "server", the first replica collects them and sends the weights back (FlexFlow).
      optimizer_arrays: arrays of the size of the weights that the optimizer keeps, for the memory.
      shards: facts about the shards of `graph` with `costs` that are known already.

    Attributes:
      seconds, device, key: the facts of each task; the devices of transfers are the links, numbered behind the devices.
      before, after: dependencies of each task.
      load: seconds of all tasks of each device and link, up to rounding; the first number is of `NOWHERE`.
      sent_bytes: bytes that all messages carry.
      weights: the tensors that are weights with gradients.
      edges_of, weights_of: the numbers of the edges of each operator, and of the `weights` that it reads.
      routes: the resources and the seconds of messages.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        machine: Machine,
        costs: Costs,
        strategy: Sequence[Config],
        *,
        sync: str = "ring",
        optimizer_arrays: int = 2,
        shards: Shards | None = None,
    ):
        if sync not in ("ring", "server"):
            raise ValueError(f'`sync` must be "ring" or "server", got {shown(sync)}.')
        self.graph = graph
        self.machine = machine
        self.costs = costs
        self.strategy = list(strategy)
        self.sync = sync
        self.seconds: list[float] = []
        self.device: list[int] = []
        self.key: list[int] = []
        self.before: list[list[int]] = []
        self.after: list[list[int]] = []
        self.unused: list[int] = []
        self.shards = Shards(graph, costs) if shards is None else shards
        self._holdings = Holdings(graph, machine, self.shards, optimizer_arrays)
        self.routes = Routes(machine)
        self._next_key = 0
        num = len(graph.operators)
        self.edges_of: list[list[int]] = [[] for _ in range(num)]
        for number, (source, target, _) in enumerate(graph.edges):
            self.edges_of[source].append(number)
            if target != source:
                self.edges_of[target].append(number)
        self.weights = [w for w in graph.weights if graph.tensors[w].has_gradient]
        self.weights_of: list[list[int]] = [[] for _ in range(num)]
        for number, weight in enumerate(self.weights):
            for operator in sorted({i for i, _ in graph.readers_of_weight[weight]}):
                self.weights_of[operator].append(number)
        self._memory = HeldBytes(machine, self._holdings.num_positions)
        self.load = np.zeros(self.routes.num_resources + 1)
        self.sent_bytes = 0
        num_blocks = self._first_weight + len(self.weights)
        self.blocks = [TaskBlock() for _ in range(num_blocks)]
        for number in range(num_blocks):
            self.build(number)

    @property
    def _first_edge(self) -> int:
        return len(self.graph.operators)

    @property
    def _first_weight(self) -> int:
        return self._first_edge + len(self.graph.edges)

    def blocks_of(self, operator: int) -> list[int]:
        """Blocks that depend on an operator's configuration, in the order of their construction."""
        return [
            operator,
            *(self._first_edge + e for e in self.edges_of[operator]),
            *(self._first_weight + w for w in self.weights_of[operator]),
        ]

    def all_tasks(self) -> Iterator[int]:
        for block in self.blocks:
            yield from block.tasks

    def count(self, block: TaskBlock, sign: int) -> None:
        """Adds the memory, the load and the bytes of a block, or takes them away."""
        self.load += sign * block.load
        self.sent_bytes += sign * block.sent_bytes
        self._memory.add(block.held, sign)

    @property
    def memory(self) -> list[int]:
        """The most bytes that each device holds at a time."""
        return self._memory.most

    def isolated_loads(self, operator: int, config: Config) -> list[np.ndarray]:
        """The seconds per device and link, as `load`, of one operator, and of each of its weights. The graph stays as
        it is.
        """
        strategy, present = self.strategy[operator], self.blocks[operator]
        self.strategy[operator] = config
        blocks = [TaskBlock()]
        self._build_operator(blocks[0], operator)
        self.blocks[operator] = blocks[0]
        for number in self.weights_of[operator]:
            blocks.append(TaskBlock())
            self._build_weight(blocks[-1], self.weights[number])
        self.strategy[operator], self.blocks[operator] = strategy, present
        self.unused += itertools.chain(*(block.tasks for block in blocks))
        return [self._load(block) for block in blocks]

    def build(self, number: int) -> TaskBlock:
        """Builds a block for the present strategy in the place of its old one, whose tasks must be unlinked."""
        self._next_key = number << _KEY_BITS
        block = TaskBlock()
        if number < self._first_edge:
            self._build_operator(block, number)
        elif number < self._first_weight:
            self._build_edge(block, number - self._first_edge)
        else:
            self._build_weight(block, self.weights[number - self._first_weight])
        block.load = self._load(block)
        for a, b in block.links:
            self.after[a].append(b)
            self.before[b].append(a)
        self.count(block, 1)
        self.blocks[number] = block
        return block

    def _load(self, block: TaskBlock) -> np.ndarray:
        resources = [self.device[task] + 1 for task in block.tasks]
        seconds = [self.seconds[task] for task in block.tasks]
        return np.bincount(resources, seconds, self.routes.num_resources + 1)

    def _new(self, block: TaskBlock, seconds: float, device: int) -> int:
        seconds = seconds if seconds > LEAST_SECONDS else LEAST_SECONDS
        if self.unused:
            task = self.unused.pop()
            self.seconds[task] = seconds
            self.device[task] = device
            self.key[task] = self._next_key
            self.before[task] = []
            self.after[task] = []
        else:
            task = len(self.seconds)
            self.seconds.append(seconds)
            self.device.append(device)
            self.key.append(self._next_key)
            self.before.append([])
            self.after.append([])
        self._next_key += 1
        block.tasks.append(task)
        return task

    def _message(
        self,
        block: TaskBlock,
        a: int,
        b: int | None,
        num_bytes: int,
        ends: tuple[int, int] | None = None,
    ) -> None:
        """Task `b` (None: nothing) needs `num_bytes` of task `a`; `ends` are their devices, if the tasks do not say
        them.
        """
        if ends is None:
            assert b is not None
            ends = self.device[a], self.device[b]
        source, target = ends
        if source == target:
            assert b is not None
            block.links.append((a, b))
            return
        block.sent_bytes += num_bytes
        link, seconds = self.routes.message(source, target, num_bytes)
        task = self._new(block, seconds, link)
        block.messages.append(task)
        block.links.append((a, task))
        if b is not None:
            block.links.append((task, b))

    def _build_operator(self, block: TaskBlock, number: int) -> None:
        operator, config = self.graph.operators[number], self.strategy[number]
        check_config(operator, config, self.machine.num_devices)
        forward, backward = self.shards.seconds(number, config.degrees)
        block.forward = [self._new(block, forward, d) for d in config.devices]
        if operator.has_backward:
            block.backward = [self._new(block, backward, d) for d in config.devices]
            block.links += zip(block.forward, block.backward)
        for tensor in operator.outputs:
            self._build_result(block, number, tensor)
        block.held += self._holdings.operator(number, config)

    def _build_result(self, block: TaskBlock, number: int, tensor: int) -> None:
        """The tasks that have the parts of a result: the shards, or sums of their parts."""
        block.results[tensor] = list(block.forward)
        has_gradient = bool(block.backward) and self.graph.tensors[tensor].has_gradient
        block.result_gradients[tensor] = list(block.backward) if has_gradient else []
        degrees = self.strategy[number].degrees
        for part in self.shards.sums(number, tensor, degrees):
            self._build_sum(block, tensor, *part)

    def _build_sum(
        self,
        block: TaskBlock,
        tensor: int,
        owner: int,
        shards: list[int],
        num_bytes: int,
    ) -> None:
        """Shard `owner` adds up its part of the terms of `shards`, and hands its gradient back to them."""
        devices = [self.device[task] for task in block.forward]
        seconds = self.costs.add_seconds(num_bytes, len(shards))
        total = self._new(block, seconds, devices[owner])
        block.results[tensor][owner] = total
        for shard in shards:
            self._message(block, block.forward[shard], total, num_bytes)
        if not block.result_gradients[tensor]:
            return
        gradient = self._new(block, 0.0, devices[owner])
        block.links.append((total, gradient))
        block.result_gradients[tensor][owner] = gradient
        producer = self.graph.tensors[tensor].producer
        assert producer is not None
        returned = num_bytes
        if self.graph.operators[producer].kind in EXTREMA:
            returned *= 2  # with the count
            for shard in shards:
                counted = self._new(block, 0.0, devices[shard])
                self._message(block, total, counted, num_bytes)
                self._message(block, counted, gradient, num_bytes)
        for shard in shards:
            self._message(block, gradient, block.backward[shard], returned)

    def _build_edge(self, block: TaskBlock, number: int) -> None:
        source, target, position = self.graph.edges[number]
        tensor = self.graph.operators[target].inputs[position].tensor
        above, below = self.strategy[source], self.strategy[target]
        writer, reader = self.blocks[source], self.blocks[target]
        results, gradients = writer.results[tensor], writer.result_gradients[tensor]
        backward = reader.backward if gradients else []
        pairs = self.shards.edge_pairs(number, above.degrees, below.degrees)
        for a, b, num_bytes in pairs:
            self._message(block, results[a], reader.forward[b], num_bytes)
            if backward:
                self._message(block, backward[b], gradients[a], num_bytes)
        block.held += self._holdings.edge(number, above, below, pairs, bool(backward))

    def _build_weight(self, block: TaskBlock, weight: int) -> None:
        readers = self.graph.readers_of_weight[weight]
        degrees = [self.strategy[i].degrees for i, _ in readers]
        for num_bytes, holders in self.shards.weight_parts(weight, degrees):
            gradients: dict[int, list[int]] = {}
            for operator, shard in holders:
                device = self.strategy[operator].devices[shard]
                backward = self.blocks[operator].backward
                tasks = gradients.setdefault(device, [])
                tasks += backward[shard : shard + 1]
            block.held += self._holdings.weight(weight, num_bytes, gradients)
            if not any(gradients.values()):
                continue
            if self.sync == "ring":
                self._build_ring(block, gradients, num_bytes)
            else:
                self._build_server(block, gradients, num_bytes)

    def _build_ring(self, block: TaskBlock, gradients: dict[int, list[int]], num_bytes: int) -> None:
        devices = sorted(gradients)
        count = len(devices)
        seconds = self.costs.update_seconds(num_bytes)
        updates = [self._new(block, seconds, device) for device in devices]
        if count == 1:
            block.links += [(task, updates[0]) for task in gradients[devices[0]]]
            return
        ready = self._new(block, 0.0, NOWHERE)
        for device in devices:
            block.links += [(task, ready) for task in gradients[device]]
        sent = ring_bytes(num_bytes, count)
        for k, device in enumerate(devices):
            following = (k + 1) % count
            ends = device, devices[following]
            self._message(block, ready, updates[following], sent, ends)

    def _build_server(self, block: TaskBlock, gradients: dict[int, list[int]], num_bytes: int) -> None:
        first, *others = gradients
        update = self._new(block, self.costs.update_seconds(num_bytes), first)
        block.links += [(task, update) for task in gradients[first]]
        for device in others:
            local = self._new(block, 0.0, NOWHERE)
            block.links += [(task, local) for task in gradients[device]]
            self._message(block, local, update, num_bytes, (device, first))
            self._message(block, update, None, num_bytes, (first, device))


def ring_bytes(num_bytes: int, count: int) -> int:
    """Bytes that an all-reduce of `num_bytes` in a ring of `count` devices sends over each link."""
    return math.ceil(2 * (count - 1) * num_bytes / count)
