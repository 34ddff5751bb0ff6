"""Seconds of messages between devices, and the resources that messages occupy."""

import numpy as np

from jpipe.soap.machine import Machine


class Routes:
    """The routes of a machine.

    Attributes:
      num_resources: number of devices and links. Links are numbered behind the devices.
    """

    def __init__(self, machine: Machine):
        self._routes = machine.routes()
        self._links, bandwidths, self._latencies = (
            np.array([[route[k] for route in row] for row in self._routes]) for k in range(3)
        )
        self._seconds_per_byte = 1 / bandwidths
        self.num_resources = machine.num_devices
        if machine.num_devices > 1:
            self.num_resources = int(self._links.max()) + 1

    def message(self, source: int, target: int, num_bytes: int) -> tuple[int, float]:
        """The resource that a message between two devices occupies (`Machine.routes`), and its seconds."""
        link, bandwidth, latency = self._routes[source][target]
        return link, latency + num_bytes / bandwidth

    def messages(
        self, sources: np.ndarray, targets: np.ndarray, num_bytes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Computes `message` of many at once, up to rounding; bytes that stay on a device take no time."""
        ends = sources, targets
        seconds = self._latencies[ends] + num_bytes * self._seconds_per_byte[ends]
        return self._links[ends], np.where(sources == targets, 0.0, seconds)
