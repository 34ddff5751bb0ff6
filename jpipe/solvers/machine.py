"""The devices that a plan runs on."""

import dataclasses
import math
from collections.abc import Sequence

from jpipe._util.foreign import shown


@dataclasses.dataclass(frozen=True)
class Machine:
    """Equal servers of equal devices.

    Attributes:
      num_devices: number of devices on all servers. Numbers begin on the first server.
      memory_limit: bytes per device.
      bandwidth: bytes per second between two devices, in one server and on two servers.
      latency: seconds of an empty message; or two numbers, in one server and on two servers.
      devices_per_server: number of devices that share the fast links; None: all devices.
      tick: seconds of a tick without its operations and the bytes of its messages.
      jitter: the fraction by which a tick takes longer if several devices compute in it; see
        `jpipe.simulate.Costs`.
      step: seconds of a step without its ticks.
      num_cores: number of cores that all devices share, as CPU devices do; None: devices do not
        share.
      cores_per_device: number of cores that one device can use at once.
      overlaps: whether collectives inside of layers pass while the device computes for another microbatch of the same
        tick. If not, it waits for all of them.
      hides_sums: whether sums are among these collectives. If not, a device waits for each.

    Raises:
      ValueError: if a count, size or bandwidth is not above 0, or a time is negative or not finite.
    """

    num_devices: int
    memory_limit: float = math.inf
    bandwidth: tuple[float, float] = (math.inf, math.inf)
    latency: float | tuple[float, float] = 0.0
    devices_per_server: int | None = None
    tick: float = 0.0
    jitter: float = 0.0
    step: float = 0.0
    num_cores: float | None = None
    cores_per_device: float = 1.0
    overlaps: bool = False
    hides_sums: bool = True

    def __post_init__(self):
        positive = {
            "num_devices": self.num_devices,
            "memory_limit": self.memory_limit,
            "bandwidth": min(self.bandwidth),
            "devices_per_server": self.server_size,
            "num_cores": self.num_cores or 1.0,
            "cores_per_device": self.cores_per_device,
        }
        for name, value in positive.items():
            if not value > 0:
                raise ValueError(
                    f"`{name}` must be above 0, got {shown(getattr(self, name))}: with it nothing could run."
                )
        times = {name: (getattr(self, name),) for name in ("tick", "jitter", "step")} | {"latency": self.latencies}
        for name, values in times.items():
            if not all(0 <= value < math.inf for value in values):
                what = "fraction of a tick" if name == "jitter" else "number of seconds"
                raise ValueError(f"`{name}` must be a {what}, at least 0, got {shown(getattr(self, name))}.")

    @property
    def server_size(self) -> int:
        """Number of devices that share the fast links."""
        if self.devices_per_server is None:
            return self.num_devices
        return self.devices_per_server

    @property
    def latencies(self) -> tuple[float, float]:
        """Seconds of an empty message in one server, and on two servers."""
        return self.latency if isinstance(self.latency, tuple) else (self.latency, self.latency)

    def message_seconds(self, num_bytes: float, devices: Sequence[int]) -> float:
        """Seconds of a message between two devices, or of one turn of a ring of devices.

        Args:
          num_bytes: bytes that each device sends.
          devices: the numbers of the devices. The slowest link between neighbours counts.
        """
        servers = {d // self.server_size for d in devices}
        far = len(servers) > 1
        return self.latencies[far] + num_bytes / self.bandwidth[far]

    def reduce_seconds(self, num_bytes: float, devices: Sequence[int]) -> float:
        """Seconds to add up `num_bytes` over n devices in a ring.

        The ring makes 2 (n - 1) turns, each with 1 / n of the bytes.
        """
        n = len(devices)
        if n == 1:
            return 0.0
        return 2 * (n - 1) * self.message_seconds(num_bytes / n, devices)

    def exchange_seconds(
        self, num_bytes: float, num_messages: int, devices: Sequence[int], *, to_all: bool = False
    ) -> float:
        """Seconds of a collective, whose messages follow each other.

        Args:
          num_bytes: bytes that each device sends to others.
          num_messages: the messages of a device.
          devices: the numbers of the devices.
          to_all: whether a device sends each of the others an equal part, over the link between the two. If not,
            devices send to a neighbour, and the slowest link between neighbours counts.
        """
        if not to_all:
            return num_messages * self.message_seconds(num_bytes / max(num_messages, 1), devices)
        servers = [d // self.server_size for d in devices]
        far = len(devices) - min(map(servers.count, servers))
        others = max(len(devices) - 1, 1)
        per_byte = ((others - far) / self.bandwidth[0] + far / self.bandwidth[-1]) / others
        return num_messages * self.latencies[far > 0] + num_bytes * per_byte
