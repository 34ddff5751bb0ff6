"""Which messages each device receives, where a device leaves out those of others.

All devices run one program, so it holds every message of every stage. A message that is not for a device goes to a slot
that nobody reads. With skips between many pairs of stages most messages of a tick are such.

Letters: T ticks, D devices.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jpipe.lowering.channels import Channel

RECEIVED_BEFORE = ("forward", "backward")
"""The two places of a tick where messages are received."""


class Arrivals(NamedTuple):
    """The messages that are received at one place of a tick.

    Attributes:
      messages: for each branch the messages that it receives, `(number of the channel, inbox)`.
      devices: for each branch the devices that take it.
      branch: int32 `[T, D]`, the branch of a device in a tick; -1: nothing arrives.
    """

    messages: tuple[frozenset[tuple[int, str]], ...]
    devices: tuple[frozenset[int], ...]
    branch: np.ndarray


def arrivals(channels: Sequence[Channel], before: str) -> Arrivals | None:
    """The messages that devices receive before an operation; None if most of them are for most devices.

    A device receives in a branch if without branches it would write one message or more for nobody, on average over the
    devices.

    Args:
      channels: all channels.
      before: the operation, of `RECEIVED_BEFORE`.
    """
    arrives = {
        (number, inbox): cells[..., 0] >= 0
        for number, channel in enumerate(channels)
        if channel.received_before == before
        for inbox, cells in channel.arrives.items()
    }
    if not arrives:
        return None
    T, D = next(iter(arrives.values())).shape
    of_device = [frozenset(message for message, here in arrives.items() if here[:, d].any()) for d in range(D)]
    if sum(len(arrives) - len(messages) for messages in of_device) < D:
        return None
    branches = sorted(set(of_device) - {frozenset()}, key=of_device.index)
    branch = np.full((T, D), -1, np.int32)
    for d, message in itertools.product(range(D), arrives):
        if arrives[message][:, d].any():
            branch[arrives[message][:, d], d] = branches.index(of_device[d])
    devices = (frozenset(d for d in range(D) if of_device[d] == messages) for messages in branches)
    return Arrivals(tuple(branches), tuple(devices), branch)
