"""Stages that are groups of devices, and what these send to each other inside of layers."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jpipe.plan._profile import Profile
from jpipe.schedule import Schedule
from jpipe.solvers import Machine


class Traffic(NamedTuple):
    """What a device sends along an axis of the mesh in a step.

    Attributes:
      axes: such as `("expert",)`; several if they exchange together.
      num_bytes: bytes that it sends to others of its group.
      seconds: seconds in which they travel, hidden or not.
    """

    axes: tuple[str, ...]
    num_bytes: int
    seconds: float


def groups(machine: Machine, num_devices: int) -> Machine:
    """The machine whose devices are groups of neighbours.

    Every device of a group sends its messages over its own link. A core of the result is `num_devices` cores, because
    that is what a group needs to compute.

    Args:
      machine: the machine.
      num_devices: T, devices per group.

    Raises:
      ValueError: if the groups do not use all devices.
    """
    if machine.num_devices % num_devices:
        raise ValueError(f"{machine.num_devices} devices do not fill groups of {num_devices}. Choose a divisor.")
    whole_groups = machine.server_size % num_devices == 0
    cores = machine.num_cores
    return dataclasses.replace(
        machine,
        num_devices=machine.num_devices // num_devices,
        devices_per_server=machine.server_size // num_devices if whole_groups else 1,
        num_cores=None if cores is None else cores / num_devices,
    )


def exchange_costs(
    schedule: Schedule, profile: Profile, starts: Sequence[int], machine: Machine
) -> dict[str, np.ndarray]:
    """The costs of `jpipe.simulate` for what layers exchange, `[S]` seconds each.

    Args:
      schedule: the table, for split backwards.
      profile: the costs of the layers.
      starts: the first layer of each stage, then the number of layers.
      machine: all devices.
    """
    exchanges, sums = ("exchange", "gradient_exchange", "weight_exchange"), ("sums", "gradient_sums", "weight_sums")
    seconds = {name: np.zeros(len(starts) - 1) for name in (*exchanges, *sums)}
    if profile.group_size > 1:
        for *names, operation in zip(exchanges, sums, _operations(schedule)):
            for s, (start, stop) in enumerate(itertools.pairwise(starts)):
                for exchange in itertools.chain(*profile.exchanges(operation)[start:stop]):
                    waits = exchange.kind == "sum" and not machine.hides_sums
                    seconds[names[waits]][s] += exchange.seconds(machine, profile.axes)
    return seconds


def traffic_of(schedule: Schedule, profile: Profile, starts: Sequence[int], machine: Machine) -> tuple[Traffic, ...]:
    """What the device that sends most along each axis sends in a step; see `exchange_costs`."""
    if profile.group_size == 1:
        return ()
    runs = np.bincount(schedule.stage, (schedule.forward_ticks() != -1).sum(axis=0))
    totals: dict[tuple[str, ...], np.ndarray] = {}  # axes -> [D, 2], bytes and seconds
    for operation in _operations(schedule):
        sends = profile.exchanges(operation)
        for s, (start, stop) in enumerate(itertools.pairwise(starts)):
            for exchange in itertools.chain(*sends[start:stop]):
                total = totals.setdefault(exchange.axes, np.zeros((schedule.num_devices, 2)))
                once = exchange.num_bytes, exchange.seconds(machine, profile.axes)
                for d in schedule.copies[s]:
                    total[d] += np.multiply(once, runs[s] / len(schedule.copies[s]))
    busiest = ((axes, *total[total[:, 0].argmax()].tolist()) for axes, total in totals.items())
    return tuple(Traffic(axes, round(num_bytes), seconds) for axes, num_bytes, seconds in busiest)


def _operations(schedule: Schedule) -> tuple[str, ...]:
    return ("forward", "input_grad", "weight_grad") if schedule.splits_backward else ("forward", "backward")
