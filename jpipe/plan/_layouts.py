"""The devices of stages and replicas, on a machine whose servers are linked by a slower network.

Letters: D devices of a pipeline, R replicas.
"""

import math
from collections.abc import Mapping

import numpy as np

from jpipe.mesh import DATA, STAGE
from jpipe.solvers import Machine


def layouts(machine: Machine, num_devices: int, num_replicas: int) -> list[dict[str, int]]:
    """The ways in which servers can cut stages and replicas, as the argument `dcn` of `make_mesh`.

    An empty one leaves devices in order, replica by replica: on one server, and where servers cut nothing into equal
    parts.

    Args:
      machine: the machine; with stages that are groups of devices, that of the groups.
      num_devices: D.
      num_replicas: R.

    Example:
      >>> layouts(Machine(8, devices_per_server=4), 4, 2)
      [{'data': 2}, {'stage': 2}]
    """
    number = math.ceil(num_devices * num_replicas / machine.server_size)
    cuts = [(parts, number // parts) for parts in range(1, number + 1) if number % parts == 0]
    fitting = [(a, b) for a, b in cuts if num_devices % a == 0 and num_replicas % b == 0]
    named = [{name: n for name, n in ((STAGE, a), (DATA, b)) if n > 1} for a, b in fitting]
    return named or [{}]


def device_numbers(machine: Machine, dcn: Mapping[str, int], num_devices: int, num_replicas: int) -> np.ndarray:
    """`[D, R]`, the number of each device of a pipeline in each replica: see `layouts`.

    Example:
      >>> device_numbers(Machine(8, devices_per_server=4), {"stage": 2}, 4, 2).T.tolist()
      [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    d, r = np.arange(num_devices)[:, None], np.arange(num_replicas)
    if not dcn:
        return d + num_devices * r
    stages, replicas = num_devices // dcn.get(STAGE, 1), num_replicas // dcn.get(DATA, 1)
    server = r // replicas * dcn.get(STAGE, 1) + d // stages
    return server * machine.server_size + r % replicas * stages + d % stages


def ticks_across(machine: Machine, dcn: Mapping[str, int], num_devices: int, num_replicas: int) -> tuple[int, ...]:
    """The `message_ticks` of a table whose messages between servers have a tick to travel.

    Example:
      >>> ticks_across(Machine(8, devices_per_server=4), {"stage": 2}, 4, 2)
      (1, 2, 1)
    """
    server = device_numbers(machine, dcn, num_devices, num_replicas) // machine.server_size
    return tuple(np.where((server[1:] != server[:-1]).any(axis=1), 2, 1).tolist())
