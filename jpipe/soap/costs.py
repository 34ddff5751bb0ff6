"""Seconds of an operator's shard: computed, measured or given."""

import json
import math
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jpipe._util.foreign import read_json, shown
from jpipe.soap.graph import Operator, OperatorGraph
from jpipe.soap.machine import Machine
from jpipe.soap.regions import read, volume

Shape = tuple[int, ...]
"""Turns of each loop of a shard."""


class Costs(Protocol):
    """Seconds of the work of a device, as the simulator reads them."""

    def seconds(self, graph: OperatorGraph, operator: int, shape: Shape) -> tuple[float, float]:
        """Seconds of the forward and of the backward of a shard."""
        ...

    def update_seconds(self, num_bytes: float) -> float:
        """Seconds to change `num_bytes` of weights by their gradients."""
        ...

    def add_seconds(self, num_bytes: float, count: int) -> float:
        """Seconds to add up `count` arrays of `num_bytes`."""
        ...


class Analytic:
    """Costs from FLOPs and bytes: the slower of computing and of reading and writing memory, plus the start.

    Args:
      machine: the machine whose devices compute.
      optimizer_arrays: arrays of the size of the weights that an update reads and writes beside the weights and the
        gradients.
    """

    def __init__(self, machine: Machine, *, optimizer_arrays: int = 2):
        self._machine = machine
        self._optimizer_arrays = optimizer_arrays

    def seconds(self, graph: OperatorGraph, operator: int, shape: Shape) -> tuple[float, float]:
        timed = graph.operators[operator]
        flops = timed.flops_per_point * math.prod(shape)
        read_bytes, written = shard_bytes(graph, timed, shape)
        forward = self._roofline(flops, read_bytes + written)
        backward = 0.0
        if timed.has_backward:
            # It reads the inputs and the gradient of the output, and writes gradients of the inputs.
            factor = timed.backward_factor
            backward = self._roofline(flops * factor, 2 * read_bytes + written)
        return forward * timed.repeats, backward * timed.repeats

    def update_seconds(self, num_bytes: float) -> float:
        return self._roofline(0.0, num_bytes * (3 + 2 * self._optimizer_arrays))

    def add_seconds(self, num_bytes: float, count: int) -> float:
        return self._roofline(0.0, num_bytes * (count + 1))

    def _roofline(self, flops: float, num_bytes: float) -> float:
        machine = self._machine
        time = max(flops / machine.flops, num_bytes / machine.memory_bandwidth)
        return machine.overhead + time


def shard_bytes(graph: OperatorGraph, operator: Operator, shape: Shape) -> tuple[int, int]:
    """Bytes that the first shard of `shape` reads and writes in one turn."""
    box = tuple((0, n) for n in shape)
    num_read = 0
    for operand in operator.inputs:
        tensor = graph.tensors[operand.tensor]
        num_read += volume(read(operand.access, box)) * tensor.item_bytes
    written = 0
    for number in operator.outputs:
        tensor = graph.tensors[number]
        part = [n if loop is None else shape[loop] for n, loop in zip(tensor.shape, tensor.writes)]
        written += math.prod(part) * tensor.item_bytes
    return num_read, written


class Profile:
    """Costs that are kept in a file, once per operator, shape of the shard and kind of device.

    What the file lacks is measured, or computed where nothing measures.

    Args:
      machine: the machine whose devices run the operators.
      path: a JSON file; None keeps nothing. It need not exist.
      measure: `(graph, operator, shape) -> (forward seconds, backward seconds)`, such as
        `jpipe.soap.measure.measure`; None computes what the file lacks.
      optimizer_arrays: see `Analytic`, which prices updates and sums.

    Raises:
      ValueError: if the file is no profile.
    """

    def __init__(
        self,
        machine: Machine,
        path: str | os.PathLike[str] | None = None,
        measure: Callable[[OperatorGraph, int, Shape], tuple[float, float]] | None = None,
        *,
        optimizer_arrays: int = 2,
    ):
        self._analytic = Analytic(machine, optimizer_arrays=optimizer_arrays)
        self._device = machine.device_kind
        self._path = None if path is None else pathlib.Path(path)
        self._measure = measure
        self._seconds: dict[str, tuple[float, float]] = {}
        if self._path is not None and self._path.exists():
            self._seconds = _read(self._path)

    def seconds(self, graph: OperatorGraph, operator: int, shape: Shape) -> tuple[float, float]:
        key = f"{self._device}: {signature(graph, graph.operators[operator])}: {'x'.join(map(str, shape))}"
        if key not in self._seconds:
            if self._measure is None:
                return self._analytic.seconds(graph, operator, shape)
            forward, backward = self._measure(graph, operator, shape)
            self._seconds[key] = forward, backward
            self.save()
        return self._seconds[key]

    def update_seconds(self, num_bytes: float) -> float:
        return self._analytic.update_seconds(num_bytes)

    def add_seconds(self, num_bytes: float, count: int) -> float:
        return self._analytic.add_seconds(num_bytes, count)

    def save(self) -> None:
        """Writes the file, all of it or nothing."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        entries = {
            key: {"forward_seconds": forward, "backward_seconds": backward}
            for key, (forward, backward) in sorted(self._seconds.items())
        }
        part.write_text(json.dumps(entries, indent=1) + "\n")
        part.replace(self._path)


def signature(graph: OperatorGraph, operator: Operator) -> str:
    """A text without the operator's name: equal texts cost the same for equal shards."""
    kinds = "".join(loop.kind for loop in operator.loops)
    reads = " ".join(
        f"{graph.tensors[operand.tensor].item_bytes}:{list(graph.tensors[operand.tensor].shape)}"
        for operand in operator.inputs
    )
    sizes = "x".join(str(loop.size) for loop in operator.loops)
    names = operator.kind
    if operator.equations is not None:
        names = "+".join(equation.primitive for equation in operator.equations)
    return f"{names}({reads}) {kinds} {sizes} x{operator.repeats}"


def _read(path: pathlib.Path) -> dict[str, tuple[float, float]]:
    try:
        entries: Mapping = read_json(path)
        return {
            str(key): (_seconds(e["forward_seconds"]), _seconds(e["backward_seconds"])) for key, e in entries.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"`{path}` is no profile of operators ({type(error).__name__}: {error}). Remove it, and it is made anew."
        ) from None


def _seconds(value: Any) -> float:
    """A time of a file. Python's JSON has NaN and infinity too."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"seconds must be a number of at least 0, got {shown(value)}")
    return float(value)
