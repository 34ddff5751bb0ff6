"""The devices that a plan runs on."""

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Machine:
    """Equal servers of equal devices.

    Attributes:
      num_devices: of all servers, counted from the first server on.
      memory_limit: bytes of one device.
      bandwidth: bytes a second between two devices, in one server and in two.
      latency: seconds of a message of no size.
      devices_per_server: how many share the fast links; None: all.
      tick: seconds of a tick beside its operations and the bytes of its messages.
      jitter: the part by which a tick takes longer in which several devices compute; see `jpipe.simulate.Costs`.
      step: seconds of a step beside its ticks.
      num_cores: that all devices share, as devices faked on CPU do; None: each is its own.
      cores_per_device: how many of them one device can use at once.

    Raises:
      ValueError: if a number is not above 0, or a time is below it.
    """

    num_devices: int
    memory_limit: float = math.inf
    bandwidth: tuple[float, float] = (math.inf, math.inf)
    latency: float = 0.0
    devices_per_server: int | None = None
    tick: float = 0.0
    jitter: float = 0.0
    step: float = 0.0
    num_cores: float | None = None
    cores_per_device: float = 1.0

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
                    f"`{name}` must be above 0, got {getattr(self, name)}: nothing would run."
                )
        for name in ("latency", "tick", "jitter", "step"):
            if not 0 <= getattr(self, name) < math.inf:
                what = "part of a tick" if name == "jitter" else "number of seconds"
                raise ValueError(
                    f"`{name}` must be a {what}, at least 0, got {getattr(self, name)}."
                )

    @property
    def server_size(self) -> int:
        """How many devices share fast links."""
        if self.devices_per_server is None:
            return self.num_devices
        return self.devices_per_server

    def message_seconds(self, num_bytes: float, devices: Sequence[int]) -> float:
        """What a message takes between two devices; or a ring of several, for one of its turns.

        Args:
          num_bytes: that each sends.
          devices: their numbers; the slowest link between neighbours counts.
        """
        servers = {d // self.server_size for d in devices}
        return self.latency + num_bytes / self.bandwidth[len(servers) > 1]

    def reduce_seconds(self, num_bytes: float, devices: Sequence[int]) -> float:
        """What it takes to add up `num_bytes` over devices, in a ring: 2 (n - 1) turns of 1 / n of the bytes."""
        n = len(devices)
        if n == 1:
            return 0.0
        return 2 * (n - 1) * self.message_seconds(num_bytes / n, devices)
