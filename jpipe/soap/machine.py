"""The devices and links that a strategy is simulated on."""

import dataclasses
import math
import os
import pathlib
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from jpipe._util.foreign import parse, read_json, read_text, shown
from jpipe._util.suggest import did_you_mean

_GB = 1e9


@dataclasses.dataclass(frozen=True)
class Level:
    """A level of the hierarchy: groups of equal size, one inside of the other.

    Attributes:
      size: the number of groups of the level below (devices, at the lowest) in one group.
      bandwidth: bytes per second of a link between two of them, in one direction.
      latency: seconds of an empty message.
      shared: whether all messages that leave a group of the level below queue for one link, such as the network card of
        a server. Otherwise every pair has its own link in each direction.
    """

    size: int
    bandwidth: float
    latency: float = 0.0
    shared: bool = False


@dataclasses.dataclass(frozen=True)
class Link:
    """A link of its own between two devices, in both directions, in place of the one of the hierarchy."""

    first: int
    second: int
    bandwidth: float
    latency: float = 0.0


@dataclasses.dataclass(frozen=True)
class Machine:
    """Equal devices, and links between them.

    Attributes:
      name: the name of the machine; costs that are measured are kept under `device_kind`.
      levels: the hierarchy, from the inside. The product of the sizes is the number of devices.
      flops: FLOPs per second that a device reaches in matrix products.
      memory_bandwidth: bytes per second that a device reads and writes.
      overhead: seconds of starting an operator.
      memory_bytes: memory of a device.
      links: links between two devices that differ from those of the hierarchy.
      device_kind: name of the device.
      product_item_bytes: bytes per element to which products round their operands, as TPUs do with float32 (2, unless a
        precision is asked for); None: they do not. It changes the memory, not the bytes that are sent.
      on_chip_bytes: bytes of another memory, in which the compiler leaves arrays that are used up at once; see
        `jpipe.soap.lifetimes`. 0 where hardware alone manages it, as the caches of GPUs.
      overlap: whether a device computes while it receives. If not, as in XLA's programs for CPUs, a message takes its
        seconds from the device that receives it.

    Raises:
      ValueError: if a size, rate or time cannot be, or a link is dead.

    Example:
      >>> machine = Machine("two", (Level(2, 1e10, latency=1e-6),), flops=1e12, memory_bandwidth=1e11)
      >>> machine.num_devices, machine.message_seconds(0, 1, 1e7)
      (2, 0.001001)
    """

    name: str
    levels: tuple[Level, ...]
    flops: float
    memory_bandwidth: float
    overhead: float = 5e-6
    memory_bytes: float = math.inf
    links: tuple[Link, ...] = ()
    device_kind: str = "device"
    product_item_bytes: int | None = None
    on_chip_bytes: int = 0
    overlap: bool = True

    def __post_init__(self) -> None:
        if not self.levels:
            raise ValueError("`levels` must have at least one level, got none.")
        for i, level in enumerate(self.levels):
            if not (isinstance(level.size, int) and level.size >= 1):
                raise ValueError(f"`size` of level {i} must be a whole number of at least 1, got {shown(level.size)}.")
            _check_link(f"level {i}", level.bandwidth, level.latency)
        for name in ("flops", "memory_bandwidth", "memory_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` must be above 0, got {getattr(self, name)}: with it nothing could run.")
        item_bytes = self.product_item_bytes
        if item_bytes is not None and not (isinstance(item_bytes, int) and item_bytes >= 1):
            raise ValueError(
                f"`product_item_bytes` must be a whole number of at least 1, or None, got {shown(item_bytes)}."
            )
        if not (isinstance(self.on_chip_bytes, int) and self.on_chip_bytes >= 0):
            raise ValueError(f"`on_chip_bytes` must be a whole number of at least 0, got {shown(self.on_chip_bytes)}.")
        if not isinstance(self.overlap, bool):
            raise ValueError(f"`overlap` must be true or false, got {shown(self.overlap)}.")
        if not 0 <= self.overhead < math.inf:
            raise ValueError(f"`overhead` must be seconds, at least 0, got {shown(self.overhead)}.")
        for link in self.links:
            name = f"the link between devices {link.first} and {link.second}"
            for device in (link.first, link.second):
                if not 0 <= device < self.num_devices:
                    raise ValueError(f"{name}: there is no device {device}; the devices are 0..{self.num_devices - 1}.")
            if link.first == link.second:
                raise ValueError(f"{name} begins and ends at one device. Remove it.")
            _check_link(name, link.bandwidth, link.latency)

    @property
    def num_devices(self) -> int:
        return math.prod(level.size for level in self.levels)

    def link(self, source: int, target: int) -> tuple[Any, float, float]:
        """The link that a message takes.

        Returns:
          The link's name, which is the same for messages that queue for one link, its bandwidth in bytes per second and
          its latency in seconds.
        """
        for link in self.links:
            if {source, target} == {link.first, link.second}:
                return (source, target), link.bandwidth, link.latency
        below = 1
        for i, level in enumerate(self.levels):
            group = below * level.size
            if source // group == target // group:
                name = (i, source // below) if level.shared else (source, target)
                return name, level.bandwidth, level.latency
            below = group
        raise ValueError(f"devices must be 0..{self.num_devices - 1}, got {shown(source)} and {target}.")

    def message_seconds(self, source: int, target: int, num_bytes: float) -> float:
        """Seconds of a message that does not wait for others."""
        _, bandwidth, latency = self.link(source, target)
        return latency + num_bytes / bandwidth

    def routes(self) -> list[list[tuple[int, float, float]]]:
        """For each pair of devices: the number of the resource that a message occupies, bandwidth, latency.

        The resource is a link, numbered behind the devices; without `overlap` it is the device that receives.
        """
        numbers: dict = {}
        routes = []
        for a in range(self.num_devices):
            row = []
            for b in range(self.num_devices):
                if a == b:
                    row.append((a, math.inf, 0.0))
                    continue
                name, bandwidth, latency = self.link(a, b)
                number = b
                if self.overlap:
                    number = numbers.setdefault(name, self.num_devices + len(numbers))
                row.append((number, bandwidth, latency))
            routes.append(row)
        return routes

    def with_devices(self, num_devices: int) -> "Machine":
        """The machine with fewer or more devices: whole inner groups, or a part of one.

        Raises:
          ValueError: if the devices do not fill equal groups.
        """
        levels, rest = [], num_devices
        for level in self.levels[:-1]:
            size = min(level.size, rest)
            if rest % size:
                raise ValueError(
                    f"{num_devices} devices do not fill groups of {level.size} of the machine {self.name!r}. Choose a "
                    "multiple."
                )
            levels.append(dataclasses.replace(level, size=size))
            rest //= size
        levels.append(dataclasses.replace(self.levels[-1], size=rest))
        kept = tuple(link for link in self.links if max(link.first, link.second) < num_devices)
        return dataclasses.replace(self, levels=tuple(levels), links=kept)


def _check_link(name: str, bandwidth: float, latency: float) -> None:
    if not bandwidth > 0:
        raise ValueError(
            f"{name} is dead: its bandwidth must be bytes per second above 0, got {shown(bandwidth)}. Repair the "
            "value, or leave the link out."
        )
    if not 0 <= latency < math.inf:
        raise ValueError(f"{name}: the latency must be seconds, at least 0, got {shown(latency)}.")


def p100_cluster() -> Machine:
    """4 servers of 4 P100 GPUs: NVLink inside, 100 Gb/s InfiniBand between (FlexFlow, section 8.1).

    Rates are those of the data sheets: 10.6 TFLOPS in float32 and 732 GB/s per GPU, and 20 GB/s of NVLink per pair of
    GPUs in each direction.
    """
    inside = Level(4, 20 * _GB, 5e-6)
    between = Level(4, 12.5 * _GB, 1e-5, shared=True)
    return Machine(
        "p100",
        (inside, between),
        flops=10.6e12,
        memory_bandwidth=732 * _GB,
        memory_bytes=16 * 2**30,
        device_kind="P100",
    )


def k80_cluster() -> Machine:
    """16 servers of 4 K80 GPUs: PCIe inside, 56 Gb/s InfiniBand between (FlexFlow, section 8.1).

    Rates are those of the data sheets, for one of the two chips of a board: 4.4 TFLOPS in float32 and 240 GB/s. PCIe
    gives about 12 GB/s; the GPUs of a server share it, so a pair is given 6.
    """
    inside = Level(4, 6 * _GB, 1e-5)
    between = Level(16, 7 * _GB, 1e-5, shared=True)
    return Machine(
        "k80",
        (inside, between),
        flops=4.4e12,
        memory_bandwidth=240 * _GB,
        memory_bytes=12 * 2**30,
        device_kind="K80",
    )


PRESETS = {"k80": k80_cluster, "p100": p100_cluster}
"""Machines by name."""


def measured(machine: Any, *, flops: float, memory_bandwidth: float, device_kind: str = "device") -> Machine:
    """Makes a machine of the measurements of `jpipe.plan.measure_machine`.

    Args:
      machine: a `jpipe.solvers.Machine`.
      flops: FLOPs per second of a device.
      memory_bandwidth: bytes per second that a device reads and writes.
      device_kind: name of the device, such as `jax.devices()[0].device_kind`.
    """
    inner, outer = machine.bandwidth
    size = machine.server_size
    finite = 1e15  # a link that is too fast to measure
    levels = [Level(size, min(inner, finite), machine.latencies[0])]
    if machine.num_devices > size:
        if machine.num_devices % size:
            raise ValueError(f"{machine.num_devices} devices do not fill servers of {size}. Choose a multiple.")
        servers = machine.num_devices // size
        levels.append(Level(servers, min(outer, finite), machine.latencies[1], True))
    return Machine(
        "measured",
        tuple(levels),
        flops,
        memory_bandwidth,
        memory_bytes=machine.memory_limit,
        device_kind=device_kind,
    )


def read_machine(path: str | os.PathLike[str]) -> Machine:
    """Reads a machine from a TOML or JSON file, or takes a preset by its name.

    The file has the attributes of `Machine`, as in

        name = "workstations"
        flops = 1e13
        memory_bandwidth = 7e11
        memory_bytes = 1.6e10
        levels = [
          {size = 4, bandwidth = 2e10, latency = 5e-6},
          {size = 2, bandwidth = 1e9, latency = 1e-5, shared = true},
        ]
        links = [{first = 0, second = 1, bandwidth = 4e10}]

    Args:
      path: the file, or one of "k80" and "p100".

    Raises:
      ValueError: if the file is not a machine. The message names the field.
      OSError: if the file cannot be read.
    """
    if str(path) in PRESETS:
        return PRESETS[str(path)]()
    file = pathlib.Path(path)
    if not file.exists():
        raise ValueError(
            f"there is no machine {shown(str(path))}: give a TOML or JSON file, or one of {', '.join(PRESETS)}."
            + did_you_mean(str(path), PRESETS)
        )
    if file.suffix == ".json":
        fields = read_json(file)
    else:
        fields = parse(read_text(file), path, tomllib.loads, "TOML")
    if not isinstance(fields, Mapping):
        raise ValueError(f"`{path}` must hold the fields of a machine, got a list.")
    try:
        fields = {"name": file.stem, **fields}
        fields["levels"] = _records(Level, fields.get("levels", []), "levels")
        fields["links"] = _records(Link, fields.get("links", []), "links")
        return _record(Machine, fields, "the machine")
    except ValueError as error:
        raise ValueError(f"`{path}`: {error}") from None


def _records(kind: type, values: Any, name: str) -> tuple:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ValueError(f"`{name}` must be a list, got {shown(values)}.")
    return tuple(_record(kind, v, f"`{name}[{i}]`") for i, v in enumerate(values))


def _record(kind: type, values: Any, name: str) -> Any:
    if not isinstance(values, Mapping):
        raise ValueError(f"{name} must have named fields, got {shown(values)}.")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key, value in values.items():
        if key not in fields:
            raise ValueError(f"{name} has no field {shown(key)}." + did_you_mean(key, fields))
        if fields[key].type is float and not isinstance(value, int | float):
            raise ValueError(f"`{key}` of {name} must be a number, got {shown(value)}.")
    missing = [key for key, field in fields.items() if field.default is dataclasses.MISSING and key not in values]
    if missing:
        raise ValueError(f"{name} lacks {', '.join(f'`{key}`' for key in missing)}.")
    return kind(**values)
