"""The task graph of a strategy (FlexFlow, section 5.1), which can be changed operator by operator.

Tasks lie in blocks: one per operator, per edge between operators, and per weight. To change an operator's configuration is to
replace its block and those of the edges and weights at it. A block is always built in the same order, so a task has the same
key however the graph came about.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from jpipe._util.foreign import shown
from jpipe.soap.costs import Costs
from jpipe.soap.graph import PRODUCTS, OperatorGraph
from jpipe.soap.lifetimes import Held, Lifetimes
from jpipe.soap.machine import Machine
from jpipe.soap.shards import Shards
from jpipe.soap.strategy import Config, check_config

LEAST_SECONDS = 1e-9
"""Every task takes at least this long. So what follows a task is ready later than the task, which makes the order of the tasks
on a device a function of ready times and keys."""

NOWHERE = -1
"""The device of tasks that wait for others and use nothing. Something always follows them."""

EXTREMA = frozenset({"reduce_max", "reduce_min"})
"""Their gradient is shared by all elements that are the extremum. So each shard gets the extremum, and the elements of all shards are counted."""

_KEY_BITS = 32


@dataclasses.dataclass
class Block:
    """Tasks and dependencies that are replaced together.

    Attributes:
      tasks: its tasks.
      messages: those of its tasks that carry bytes from device to device.
      links: dependencies `(before, after)`. Those of edges and weights lead to tasks of other blocks too.
      held: what devices hold for it.
      sent_bytes: bytes of its messages.
      load: seconds of its tasks on each device and link.
      forward, backward: of an operator: the task of each shard. `backward` is empty if there is none.
      results, result_gradients: of an operator: per tensor, the task that has each shard's part of it and the one that has its
        gradient.
    """

    tasks: list[int] = dataclasses.field(default_factory=list)
    messages: list[int] = dataclasses.field(default_factory=list)
    links: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    held: list[Held] = dataclasses.field(default_factory=list)
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
      sync: how gradients of weights are added up: "ring", an all-reduce in a ring (2 (n - 1) / n of the bytes over every link of
        the ring), or "server", the first replica collects them and sends the weights back (FlexFlow).
      optimizer_arrays: arrays of the size of the weights that the optimizer keeps, for the memory.
      shards: facts about the shards of `graph` with `costs` that are known already.

    Attributes:
      seconds, device, key: of each task; the devices of transfers are the links, numbered behind the devices.
      before, after: dependencies of each task.
      load: seconds of all tasks of each device and link, up to rounding; the first number is of `NOWHERE`.
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
        self._sync = sync
        self._copies = 1 + optimizer_arrays  # of weights, for the whole step
        self._lifetimes = Lifetimes(graph)
        self.seconds: list[float] = []
        self.device: list[int] = []
        self.key: list[int] = []
        self.before: list[list[int]] = []
        self.after: list[list[int]] = []
        self.unused: list[int] = []
        self.shards = Shards(graph, costs) if shards is None else shards
        self._routes = machine.routes()
        self._links, bandwidths, self._latencies = (
            np.array([[each[k] for each in row] for row in self._routes])
            for k in range(3)
        )
        self._seconds_per_byte = 1 / bandwidths
        self.num_resources = (
            1 + max(max(each[0] for each in row) for row in self._routes)
            if machine.num_devices > 1
            else machine.num_devices
        )
        self._next_key = 0
        num = len(graph.operators)
        self._edges_of: list[list[int]] = [[] for _ in range(num)]
        for number, (source, target, _) in enumerate(graph.edges):
            self._edges_of[source].append(number)
            if target != source:
                self._edges_of[target].append(number)
        self._weights = [w for w in graph.weights if graph.tensors[w].has_gradient]
        self._weights_of: list[list[int]] = [[] for _ in range(num)]
        for number, weight in enumerate(self._weights):
            for operator in sorted({i for i, _ in graph.readers_of_weight[weight]}):
                self._weights_of[operator].append(number)
        self.blocks: list[Block] = []
        self.rebuild()

    def rebuild(self) -> None:
        """Builds all blocks anew."""
        for each in (self.seconds, self.device, self.key, self.before, self.after):
            each.clear()
        self.unused = []
        # Of what is held for long, of what is held briefly, and of inputs that are copied to on-chip memory.
        shape = 3, self.machine.num_devices, self._lifetimes.end + 2
        self._changes = np.zeros(shape, np.int64)
        self._memory: list[int] | None = None
        self.load = np.zeros(self.num_resources + 1)
        num_blocks = self._first_weight + len(self._weights)
        self.blocks = [Block() for _ in range(num_blocks)]
        for number in range(num_blocks):
            self._build(number)

    @property
    def _first_edge(self) -> int:
        return len(self.graph.operators)

    @property
    def _first_weight(self) -> int:
        return self._first_edge + len(self.graph.edges)

    def blocks_of(self, operator: int) -> list[int]:
        """Blocks that depend on an operator's configuration, in the order in which they are built."""
        return [
            operator,
            *(self._first_edge + e for e in self._edges_of[operator]),
            *(self._first_weight + w for w in self._weights_of[operator]),
        ]

    def all_tasks(self) -> Iterator[int]:
        for block in self.blocks:
            yield from block.tasks

    def build(self, number: int) -> Block:
        """Builds a block for the present strategy in the place of its old one, whose tasks must be unlinked."""
        self._build(number)
        return self.blocks[number]

    @property
    def sent_bytes(self) -> int:
        """Bytes that all messages carry."""
        return sum(block.sent_bytes for block in self.blocks)

    def count(self, block: Block, sign: int) -> None:
        """Adds the memory and the load of a block, or takes them away."""
        self.load += sign * block.load
        on_chip = self.machine.on_chip_bytes
        for device, first, last, num_bytes, copied_until, is_exchanged in block.held:
            is_brief = last - first <= 1 and 0 < num_bytes <= on_chip
            is_brief &= not is_exchanged
            changes = self._changes[int(is_brief), device]
            changes[first] += sign * num_bytes
            changes[last + 1] -= sign * num_bytes
            if copied_until is not None and num_bytes <= on_chip:
                copied = self._changes[2, device]
                copied[first] += sign * num_bytes
                copied[copied_until + 1] -= sign * num_bytes
        self._memory = None

    @property
    def memory(self) -> list[int]:
        """The most bytes that each device holds at a time."""
        if self._memory is None:
            long, brief, copied = self._changes.cumsum(axis=2)
            room = np.maximum(self.machine.on_chip_bytes - copied, 0)
            self._memory = (long + np.maximum(brief - room, 0)).max(axis=1).tolist()
        return self._memory

    def isolated_loads(self, operator: int, config: Config) -> list[dict[int, float]]:
        """Of one operator, and of each of its weights: device or link -> seconds. The graph stays as it is."""
        strategy, present = self.strategy[operator], self.blocks[operator]
        self.strategy[operator] = config
        blocks = [Block()]
        self._build_operator(blocks[0], operator)
        self.blocks[operator] = blocks[0]
        for number in self._weights_of[operator]:
            blocks.append(Block())
            self._build_weight(blocks[-1], self._weights[number])
        self.strategy[operator], self.blocks[operator] = strategy, present
        loads = []
        for block in blocks:
            load: dict[int, float] = {}
            for task in block.tasks:
                device = self.device[task]
                load[device] = load.get(device, 0.0) + self.seconds[task]
            loads.append(load)
            self.unused += block.tasks
        return loads

    def _build(self, number: int) -> None:
        self._next_key = number << _KEY_BITS
        block = Block()
        if number < self._first_edge:
            self._build_operator(block, number)
        elif number < self._first_weight:
            self._build_edge(block, number - self._first_edge)
        else:
            self._build_weight(block, self._weights[number - self._first_weight])
        block.load = np.bincount(
            [self.device[task] + 1 for task in block.tasks],
            [self.seconds[task] for task in block.tasks],
            self.num_resources + 1,
        )
        before, after = self.before, self.after
        for a, b in block.links:
            after[a].append(b)
            before[b].append(a)
        self.count(block, 1)
        self.blocks[number] = block

    def _new(self, block: Block, seconds: float, device: int) -> int:
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
        block: Block,
        a: int,
        b: int | None,
        source: int,
        target: int,
        num_bytes: int,
    ) -> None:
        """Task `b` (None: nothing) on device `target` needs `num_bytes` of task `a` on `source`."""
        if source == target:
            assert b is not None
            block.links.append((a, b))
            return
        block.sent_bytes += num_bytes
        link, seconds = self.message(source, target, num_bytes)
        task = self._new(block, seconds, link)
        block.messages.append(task)
        block.links.append((a, task))
        if b is not None:
            block.links.append((task, b))

    def message(self, source: int, target: int, num_bytes: int) -> tuple[int, float]:
        """What a message between two devices occupies (`Machine.routes`), and its seconds."""
        link, bandwidth, latency = self._routes[source][target]
        return link, latency + num_bytes / bandwidth

    def _build_operator(self, block: Block, number: int) -> None:
        operator, config = self.graph.operators[number], self.strategy[number]
        check_config(operator, config, self.machine.num_devices)
        forward, backward = self.shards.seconds(number, config.degrees)
        block.forward = [self._new(block, forward, d) for d in config.devices]
        if operator.has_backward:
            block.backward = [self._new(block, backward, d) for d in config.devices]
            block.links += zip(block.forward, block.backward)
        for tensor in operator.outputs:
            self._build_result(block, number, tensor)
        self._hold_residuals(block, number)
        self._hold_inputs(block, number)

    def _hold_residuals(self, block: Block, number: int) -> None:
        """What the operator computes for its own backward."""
        operator, config = self.graph.operators[number], self.strategy[number]
        for tensor in operator.residuals:
            item_bytes = self.graph.tensors[tensor].item_bytes * operator.repeats
            computed = self.shards.regions.results(number, tensor, config.degrees)
            kept = [self._lifetimes.value(number, tensor)]
            self._hold(block, number, item_bytes, computed, kept)

    def _hold_inputs(self, block: Block, number: int) -> None:
        """The parts of the function's inputs that the operator reads first are held for the whole step.

        Where shards read parts of each other's, every device has all that is read, and a shard takes its part out of it.
        """
        operator, config = self.graph.operators[number], self.strategy[number]
        for position, each in enumerate(operator.inputs):
            value = self.graph.tensors[each.tensor]
            is_input = value.producer is None and value.weight is None
            if not is_input or self._lifetimes.first_reader(each.tensor) != number:
                continue
            read = self.shards.regions.reads(number, position, config.degrees)
            parts = np.unique(read, axis=0)
            every = np.stack([parts[:, :, 0].min(0), parts[:, :, 1].max(0)], -1)
            size = np.prod(every[:, 1] - every[:, 0])
            end, copied_until = self._lifetimes.input(number)
            if np.prod(parts[:, :, 1] - parts[:, :, 0], axis=1).sum() > size:
                item_bytes = self._read_bytes(number, each.tensor, value.item_bytes)
                times = [(number, copied_until)]
                self._hold(block, number, item_bytes, read, times)
                read, copied_until = np.broadcast_to(every, read.shape), number
            self._hold(block, number, value.item_bytes, read, [(0, end)], copied_until)

    def _build_result(self, block: Block, number: int, tensor: int) -> None:
        """The tasks that have the parts of a result: the shards, or sums of what they computed."""
        config, value = self.strategy[number], self.graph.tensors[tensor]
        regions = self.shards.regions
        owned = regions.writes(number, tensor, config.degrees)
        item_bytes = value.item_bytes * self.graph.operators[number].repeats
        written = self._written_bytes(tensor, item_bytes)
        times = [self._lifetimes.value(number, tensor)]
        self._hold(block, number, written, owned, times)
        of_gradient = self._lifetimes.gradient(number, tensor)
        if not value.has_gradient:
            of_gradient = None
        if of_gradient is not None:
            self._hold(block, number, item_bytes, owned, [of_gradient])
        if self.shards.sums(number, tensor, config.degrees):
            # A shard's term of a sum is there until it is sent; the gradient by it, as soon as it has come.
            computed = regions.results(number, tensor, config.degrees)
            self._hold(block, number, item_bytes, computed, [(number, number)])
            if of_gradient is not None:
                moment = self._lifetimes.backward(number)
                read = self._read_bytes(number, tensor, item_bytes)
                self._hold(block, number, read, computed, [(moment, moment)])
        block.results[tensor] = list(block.forward)
        has_gradient = bool(block.backward) and value.has_gradient
        block.result_gradients[tensor] = list(block.backward) if has_gradient else []
        for owner, shards, num_bytes in self.shards.sums(
            number, tensor, config.degrees
        ):
            self._build_sum(block, tensor, shards, owner, num_bytes, has_gradient)

    def _hold(
        self,
        block: Block,
        number: int,
        item_bytes: int,
        regions: np.ndarray,
        times: Sequence[tuple[int, int]],
        copied_until: int | None = None,
    ) -> None:
        """Holds the region of an array that each shard of an operator has."""
        sizes = np.prod(regions[:, :, 1] - regions[:, :, 0], axis=1) * item_bytes
        for device, num_bytes in zip(
            self.strategy[number].devices, sizes.tolist(), strict=True
        ):
            block.held += [
                Held(device, *each, num_bytes, copied_until) for each in times
            ]

    def _build_sum(
        self,
        block: Block,
        tensor: int,
        shards: list[int],
        owner: int,
        num_bytes: int,
        has_gradient: bool,
    ) -> None:
        """Shard `owner` adds up its part of what `shards` computed, and hands its gradient back to them."""
        devices = [self.device[task] for task in block.forward]
        seconds = self.costs.add_seconds(num_bytes, len(shards))
        total = self._new(block, seconds, devices[owner])
        block.results[tensor][owner] = total
        for shard in shards:
            args = devices[shard], devices[owner], num_bytes
            self._message(block, block.forward[shard], total, *args)
        if not has_gradient:
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
                found = self._new(block, 0.0, devices[shard])
                args = devices[owner], devices[shard], num_bytes
                self._message(block, total, found, *args)
                args = devices[shard], devices[owner], num_bytes
                self._message(block, found, gradient, *args)
        for shard in shards:
            args = devices[owner], devices[shard], returned
            self._message(block, gradient, block.backward[shard], *args)

    def update_loads(
        self, operator: int, config: Config
    ) -> tuple[list[tuple[int, float]], list[float]]:
        """What follows the backward of an operator for the weights that no other operator reads.

        Returns:
          `(device or link, seconds)` of updates and messages; and per shard, seconds from the end of its backward to that of the
          last update that needs it, at least.
        """
        loads: list[tuple[int, float]] = []
        after = [0.0] * len(config.devices)
        if not self.graph.operators[operator].has_backward:
            return loads, after
        for number in self._weights_of[operator]:
            weight = self._weights[number]
            readers = self.graph.readers_of_weight[weight]
            if any(reader != operator for reader, _ in readers):
                continue
            degrees = [config.degrees] * len(readers)
            for num_bytes, holders in self.shards.weight_parts(weight, degrees):
                shards = dict.fromkeys(shard for _, shard in holders)
                devices = list(dict.fromkeys(config.devices[k] for k in shards))
                update = self.costs.update_seconds(num_bytes)
                last = 0.0
                if self._sync == "ring":
                    devices.sort()
                    loads += [(device, update) for device in devices]
                    if len(devices) > 1:
                        sent = math.ceil(
                            2 * (len(devices) - 1) * num_bytes / len(devices)
                        )
                        ring = zip(devices, [*devices[1:], devices[0]])
                        messages = [self.message(a, b, sent) for a, b in ring]
                        loads += messages
                        last = max(seconds for _, seconds in messages)
                else:
                    loads.append((devices[0], update))
                for shard in shards:
                    after[shard] = max(after[shard], last + update)
        return loads, after

    def least_load(self, operator: int, config: Config) -> np.ndarray:
        """At most the load that a configuration of one operator would give: without sums and without weights.

        Returns:
          Seconds per device and link, as `load`.
        """
        load = self.load.copy()
        for number in self.blocks_of(operator):
            load -= self.blocks[number].load
        seconds = sum(self.shards.seconds(operator, config.degrees))
        np.add.at(load, np.array(config.devices) + 1, seconds)
        for number in self._edges_of[operator]:
            source, target, _ = self.graph.edges[number]
            above = config if source == operator else self.strategy[source]
            below = config if target == operator else self.strategy[target]
            a, b, num_bytes = self.shards.edge_arrays(
                number, above.degrees, below.degrees
            )
            start, end = np.array(above.devices)[a], np.array(below.devices)[b]
            returns = self.shards.gradient_returns(number)
            for x, y in ((start, end), (end, start))[: 1 + returns]:
                times = self._latencies[x, y] + num_bytes * self._seconds_per_byte[x, y]
                times = np.where(x == y, 0.0, times)
                load += np.bincount(self._links[x, y] + 1, times, len(load))
        return load

    def _build_edge(self, block: Block, number: int) -> None:
        source, target, position = self.graph.edges[number]
        tensor = self.graph.operators[target].inputs[position].tensor
        above, below = self.strategy[source], self.strategy[target]
        writer, reader = self.blocks[source], self.blocks[target]
        results, gradients = writer.results[tensor], writer.result_gradients[tensor]
        backward = reader.backward if gradients else []
        pairs = self.shards.edge_pairs(number, above.degrees, below.degrees)
        for a, b, num_bytes in pairs:
            from_device, to_device = above.devices[a], below.devices[b]
            args = from_device, to_device, num_bytes
            self._message(block, results[a], reader.forward[b], *args)
            if backward:
                args = to_device, from_device, num_bytes
                self._message(block, backward[b], gradients[a], *args)
        self._hold_received(block, number, pairs, bool(backward))

    def _hold_received(
        self,
        block: Block,
        number: int,
        pairs: Sequence[tuple[int, int, int]],
        has_gradient: bool,
    ) -> None:
        """What a device holds that reads parts of other devices.

        It has an array of all that it reads, its own part included, in place of the part that it wrote. Its backward computes the
        gradient by this array before parts of it go back and are added up. A message that is a part of what its sender has is copied
        out of it, and so held by both ends beside the arrays; one at a time.
        """
        source, target, position = self.graph.edges[number]
        tensor = self.graph.operators[target].inputs[position].tensor
        above, below = self.strategy[source], self.strategy[target]
        read: dict[int, int] = {}
        sent = []  # by a shard to a device
        for a, b, num_bytes in pairs:
            device = below.devices[b]
            read[device] = read.get(device, 0) + num_bytes
            if above.devices[a] != device:
                sent.append((a, device, num_bytes))
        if not sent:
            return
        receivers = {device for _, device, _ in sent}
        item_bytes = self.graph.tensors[tensor].item_bytes
        item_bytes *= self.graph.operators[source].repeats
        owned = self.shards.regions.writes(source, tensor, above.degrees)
        sizes = (np.prod(owned[:, :, 1] - owned[:, :, 0], axis=1) * item_bytes).tolist()
        messages: dict[int, int] = {}
        for a, device, num_bytes in sent:
            if num_bytes < sizes[a]:
                for end in (above.devices[a], device):
                    messages[end] = max(messages.get(end, 0), num_bytes)
        times = self._lifetimes.received(target, position)
        moment = self._lifetimes.backward(target)
        for device in sorted(receivers):
            held = self._read_bytes(target, tensor, read[device])
            block.held.append(Held(device, *times, held))
            if has_gradient:
                held = read[device]
                block.held.append(
                    Held(device, moment, moment, held, is_exchanged=bool(messages))
                )
        for device, num_bytes in messages.items():
            for each in (target, moment)[: 1 + has_gradient]:
                block.held.append(
                    Held(device, each, each, 2 * num_bytes, is_exchanged=True)
                )
        replaced = self._lifetimes.replaced(target, position)
        if replaced is None:
            return
        for device, size in zip(above.devices, sizes):
            if device in receivers:
                written = self._written_bytes(tensor, size)
                block.held.append(Held(device, *replaced, -written))

    def _read_bytes(self, operator: int, tensor: int, num_bytes: int) -> int:
        """Bytes of a part of a tensor in the form in which an operator gets it."""
        if self.graph.operators[operator].kind not in PRODUCTS:
            return num_bytes
        return self._rounded_bytes(tensor, num_bytes)

    def _written_bytes(self, tensor: int, num_bytes: int) -> int:
        """Bytes of a part of a tensor in the form in which its writer keeps it."""
        if tensor not in self._lifetimes.read_by_products:
            return num_bytes
        return self._rounded_bytes(tensor, num_bytes)

    def _rounded_bytes(self, tensor: int, num_bytes: int) -> int:
        """Bytes of a part of a tensor in the form in which products read it."""
        whole = self.graph.tensors[tensor].item_bytes
        item_bytes = self.machine.product_item_bytes or whole
        return num_bytes * min(item_bytes, whole) // whole

    def _build_weight(self, block: Block, weight: int) -> None:
        readers = self.graph.readers_of_weight[weight]
        degrees = [self.strategy[i].degrees for i, _ in readers]
        for num_bytes, holders in self.shards.weight_parts(weight, degrees):
            gradients: dict[int, list[int]] = {}
            for operator, shard in holders:
                device = self.strategy[operator].devices[shard]
                backward = self.blocks[operator].backward
                tasks = gradients.setdefault(device, [])
                tasks += backward[shard : shard + 1]
            for device in gradients:
                held = num_bytes * self._copies
                block.held.append(Held(device, 0, self._lifetimes.end, held))
                times = self._lifetimes.weight_gradient(weight)
                block.held.append(Held(device, *times, num_bytes))
            if not any(gradients.values()):
                continue
            if self._sync == "ring":
                self._build_ring(block, gradients, num_bytes)
            else:
                self._build_server(block, gradients, num_bytes)

    def _build_ring(
        self, block: Block, gradients: dict[int, list[int]], num_bytes: int
    ) -> None:
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
        sent = math.ceil(2 * (count - 1) * num_bytes / count)
        for k, device in enumerate(devices):
            following = (k + 1) % count
            args = device, devices[following], sent
            self._message(block, ready, updates[following], *args)

    def _build_server(
        self, block: Block, gradients: dict[int, list[int]], num_bytes: int
    ) -> None:
        first, *others = gradients
        update = self._new(block, self.costs.update_seconds(num_bytes), first)
        block.links += [(task, update) for task in gradients[first]]
        for device in others:
            local = self._new(block, 0.0, NOWHERE)
            block.links += [(task, local) for task in gradients[device]]
            self._message(block, local, update, device, first, num_bytes)
            self._message(block, update, None, first, device, num_bytes)
