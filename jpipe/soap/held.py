"""Counts the bytes that each device holds at a time, for the blocks of a task graph; `jpipe.soap.lifetimes` has the
times.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jpipe.soap.graph import PRODUCTS, OperatorGraph
from jpipe.soap.lifetimes import Lifetimes
from jpipe.soap.machine import Machine
from jpipe.soap.shards import Shards
from jpipe.soap.strategy import Config


class HeldSpan(NamedTuple):
    """Bytes that a device holds for a part of the step.

    Attributes:
      device: the device.
      first, last: positions in the order of the step: see `Lifetimes`.
      num_bytes: the bytes; below 0 for bytes that are no longer held while others take their place.
      copied_until: the last position at which the first reader of an input of the function needs it; else None.
      is_exchanged: whether devices send parts of it, which they do from the main memory.
    """

    device: int
    first: int
    last: int
    num_bytes: int
    copied_until: int | None = None
    is_exchanged: bool = False


class HeldBytes:
    """The bytes that each device holds at each position of the step.

    Args:
      machine: the devices.
      num_positions: positions in the order of the step.
    """

    def __init__(self, machine: Machine, num_positions: int):
        self._on_chip_bytes = machine.on_chip_bytes
        # Changes of the bytes held for long, of those held briefly, and of inputs that are copied to on-chip memory.
        shape = 3, machine.num_devices, num_positions + 1
        self._changes = np.zeros(shape, np.int64)
        self._most: list[int] | None = None

    def add(self, held: Iterable[HeldSpan], sign: int) -> None:
        """Adds the spans of a block, or takes them away if `sign` is -1."""
        on_chip = self._on_chip_bytes
        for device, first, last, num_bytes, copied_until, is_exchanged in held:
            is_brief = last - first <= 1 and 0 < num_bytes <= on_chip
            is_brief &= not is_exchanged
            changes = self._changes[int(is_brief), device]
            changes[first] += sign * num_bytes
            changes[last + 1] -= sign * num_bytes
            if copied_until is not None and num_bytes <= on_chip:
                copied = self._changes[2, device]
                copied[first] += sign * num_bytes
                copied[copied_until + 1] -= sign * num_bytes
        self._most = None

    @property
    def most(self) -> list[int]:
        """The most bytes that each device holds at a time."""
        if self._most is None:
            long, brief, copied = self._changes.cumsum(axis=2)
            room = np.maximum(self._on_chip_bytes - copied, 0)
            self._most = (long + np.maximum(brief - room, 0)).max(axis=1).tolist()
        return self._most


class Holdings:
    """Lists the arrays that devices hold for operators, edges and weights.

    Args:
      graph: the operators.
      machine: the devices.
      shards: facts about the shards of the operators.
      optimizer_arrays: arrays of the size of the weights that the optimizer keeps.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        machine: Machine,
        shards: Shards,
        optimizer_arrays: int,
    ):
        self._graph, self._machine, self._shards = graph, machine, shards
        self._weight_arrays = 1 + optimizer_arrays  # for the whole step
        self._lifetimes = Lifetimes(graph)

    @property
    def num_positions(self) -> int:
        """Positions in the order of the step."""
        return self._lifetimes.end + 1

    def operator(self, number: int, config: Config) -> list[HeldSpan]:
        """The results of an operator, the arrays kept for its own backward, and the inputs that it reads first."""
        graph, lifetimes = self._graph, self._lifetimes
        operator, regions = graph.operators[number], self._shards.regions
        held: list[HeldSpan] = []
        for tensor in operator.outputs:
            held += self._result(number, tensor, config)
        for tensor in operator.residuals:
            item_bytes = graph.tensors[tensor].item_bytes * operator.repeats
            computed = regions.results(number, tensor, config.degrees)
            times = lifetimes.value(number, tensor)
            held += _parts(config, computed, item_bytes, times)
        for position, operand in enumerate(operator.inputs):
            value = graph.tensors[operand.tensor]
            is_input = value.producer is None and value.weight is None
            if is_input and lifetimes.first_reader(operand.tensor) == number:
                held += self._input(number, position, config)
        return held

    def _result(self, number: int, tensor: int, config: Config) -> list[HeldSpan]:
        value, lifetimes = self._graph.tensors[tensor], self._lifetimes
        regions = self._shards.regions
        owned = regions.writes(number, tensor, config.degrees)
        item_bytes = value.item_bytes * self._graph.operators[number].repeats
        written = self._written_bytes(tensor, item_bytes)
        held = _parts(config, owned, written, lifetimes.value(number, tensor))
        gradient = lifetimes.gradient(number, tensor) if value.has_gradient else None
        if gradient is not None:
            held += _parts(config, owned, item_bytes, gradient)
        if self._shards.sums(number, tensor, config.degrees):
            # A shard's term of a sum is there until it is sent; the gradient by it, as soon as it has come.
            computed = regions.results(number, tensor, config.degrees)
            held += _parts(config, computed, item_bytes, (number, number))
            if gradient is not None:
                moment = lifetimes.backward(number)
                read = self._read_bytes(number, tensor, item_bytes)
                held += _parts(config, computed, read, (moment, moment))
        return held

    def _input(self, number: int, position: int, config: Config) -> list[HeldSpan]:
        """The parts of an input of the function are held for the whole step.

        Where shards read parts of each other's, every device has all that is read, and a shard takes its part out of
        it.
        """
        tensor = self._graph.operators[number].inputs[position].tensor
        item_bytes = self._graph.tensors[tensor].item_bytes
        read = self._shards.regions.reads(number, position, config.degrees)
        parts = np.unique(read, axis=0)
        every = np.stack([parts[:, :, 0].min(0), parts[:, :, 1].max(0)], -1)
        size = np.prod(every[:, 1] - every[:, 0])
        end, copied_until = self._lifetimes.input(number)
        held: list[HeldSpan] = []
        if np.prod(parts[:, :, 1] - parts[:, :, 0], axis=1).sum() > size:
            read_bytes = self._read_bytes(number, tensor, item_bytes)
            held = _parts(config, read, read_bytes, (number, copied_until))
            read, copied_until = np.broadcast_to(every, read.shape), number
        return held + _parts(config, read, item_bytes, (0, end), copied_until)

    def edge(
        self,
        number: int,
        above: Config,
        below: Config,
        pairs: Sequence[tuple[int, int, int]],
        has_gradient: bool,
    ) -> list[HeldSpan]:
        """The arrays of devices that read parts of other devices.

        Such a device has an array of all that it reads, its own part included, in place of the part that it wrote. Its
        backward computes the gradient by this array before parts of it go back and are added up. A message that is a
        part of what its sender has is copied out of it, and so held by both ends beside the arrays; one at a time.

        Args:
          number: the number of the edge.
          above, below: the splits of the writer and of the reader.
          pairs: the result of `Shards.edge_pairs`.
          has_gradient: whether a gradient goes back.
        """
        source, target, position = self._graph.edges[number]
        tensor = self._graph.operators[target].inputs[position].tensor
        read: dict[int, int] = {}
        sent = []  # by a shard to a device
        for a, b, num_bytes in pairs:
            device = below.devices[b]
            read[device] = read.get(device, 0) + num_bytes
            if above.devices[a] != device:
                sent.append((a, device, num_bytes))
        if not sent:
            return []
        receivers = {device for _, device, _ in sent}
        item_bytes = self._graph.tensors[tensor].item_bytes
        item_bytes *= self._graph.operators[source].repeats
        owned = self._shards.regions.writes(source, tensor, above.degrees)
        written = [part.num_bytes for part in _parts(above, owned, item_bytes, (0, 0))]
        messages: dict[int, int] = {}
        for a, device, num_bytes in sent:
            if num_bytes < written[a]:
                for end in (above.devices[a], device):
                    messages[end] = max(messages.get(end, 0), num_bytes)
        times = self._lifetimes.received(target, position)
        moment = self._lifetimes.backward(target)
        held = []
        for device in sorted(receivers):
            num_bytes = self._read_bytes(target, tensor, read[device])
            held.append(HeldSpan(device, *times, num_bytes))
            if has_gradient:
                gradient = HeldSpan(device, moment, moment, read[device])
                held.append(gradient._replace(is_exchanged=bool(messages)))
        for device, num_bytes in messages.items():
            for time in (target, moment)[: 1 + has_gradient]:
                held.append(HeldSpan(device, time, time, 2 * num_bytes, is_exchanged=True))
        replaced = self._lifetimes.replaced(target, position)
        if replaced is not None:
            held += (
                HeldSpan(device, *replaced, -self._written_bytes(tensor, size))
                for device, size in zip(above.devices, written)
                if device in receivers
            )
        return held

    def weight(self, weight: int, num_bytes: int, devices: Iterable[int]) -> Iterable[HeldSpan]:
        """A part of a weight with its optimizer state, and its gradient, on the devices that read it."""
        times = self._lifetimes.weight_gradient(weight)
        for device in devices:
            kept = num_bytes * self._weight_arrays
            yield HeldSpan(device, 0, self._lifetimes.end, kept)
            yield HeldSpan(device, *times, num_bytes)

    def _read_bytes(self, operator: int, tensor: int, num_bytes: int) -> int:
        """Bytes of a part of a tensor in the form in which an operator gets it."""
        is_rounded = self._graph.operators[operator].kind in PRODUCTS
        return self._rounded_bytes(tensor, num_bytes) if is_rounded else num_bytes

    def _written_bytes(self, tensor: int, num_bytes: int) -> int:
        """Bytes of a part of a tensor in the form in which its writer keeps it."""
        is_rounded = tensor in self._lifetimes.read_by_products
        return self._rounded_bytes(tensor, num_bytes) if is_rounded else num_bytes

    def _rounded_bytes(self, tensor: int, num_bytes: int) -> int:
        """Bytes of a part of a tensor in the form in which products read it."""
        whole = self._graph.tensors[tensor].item_bytes
        item_bytes = self._machine.product_item_bytes or whole
        return num_bytes * min(item_bytes, whole) // whole


def _parts(
    config: Config,
    regions: np.ndarray,
    item_bytes: int,
    times: tuple[int, int],
    copied_until: int | None = None,
) -> list[HeldSpan]:
    """The region of an array that each shard of an operator holds, from the first to the last of two times."""
    sizes = np.prod(regions[:, :, 1] - regions[:, :, 0], axis=1) * item_bytes
    return [
        HeldSpan(device, *times, num_bytes, copied_until)
        for device, num_bytes in zip(config.devices, sizes.tolist(), strict=True)
    ]
