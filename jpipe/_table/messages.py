"""The ticks that messages between devices take.

A *boundary* lies between the devices d and d + 1, so D devices have D - 1 boundaries. A message crosses every boundary
between its two devices, and takes as many ticks as the slowest of them. A message that stays on its device takes one.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jpipe._table.counts import wrong_counts
from jpipe._util.foreign import shown

MessageTicks = int | Sequence[int]
"""The ticks of all boundaries, or of each."""

MOST_TICKS = 1000
"""The most ticks of a message. A table has rows for all of them."""


def takes_one_tick(message_ticks: Any) -> bool:
    """True for the number 1, whatever the devices."""
    return isinstance(message_ticks, int) and not isinstance(message_ticks, bool) and message_ticks == 1


def wrong_message_ticks(message_ticks: Any, num_devices: int) -> str | None:
    """The refusal of `message_ticks`; None if they fit D devices.

    Example:
      >>> wrong_message_ticks([1, 2], 3) is None
      True
      >>> print(wrong_message_ticks([1, 2], 2)[:57])
      `message_ticks` must have one number for each boundary of
    """
    several = isinstance(message_ticks, Sequence | np.ndarray) and not isinstance(message_ticks, str | bytes)
    counts = list(message_ticks) if several else [message_ticks]
    for count in counts:
        if wrong_counts(message_ticks=count) or count > MOST_TICKS:
            return (
                f"`message_ticks` must be whole numbers of ticks from 1 to {MOST_TICKS}, got {shown(message_ticks)}: a "
                "message that is sent in tick t is read in tick t + 1 at the earliest. Pass 1, or 2 where messages "
                "cross a slow network."
            )
    if several and len(counts) != num_devices - 1:
        return (
            f"`message_ticks` must have one number for each boundary of neighbouring devices, {num_devices - 1} for "
            f"{num_devices} devices, got {shown(message_ticks)}, which has {len(counts)}. Pass as many, or one number "
            "for all boundaries."
        )
    return None


def as_message_ticks(message_ticks: MessageTicks, num_devices: int) -> int | tuple[int, ...]:
    """The one form of equal message ticks: a number if all boundaries are alike, else a tuple.

    Raises:
      ValueError: if they do not fit.
    """
    if reason := wrong_message_ticks(message_ticks, num_devices):
        raise ValueError(reason)
    if num_devices == 1:
        return 1
    if isinstance(message_ticks, Sequence | np.ndarray):
        ticks = tuple(map(int, message_ticks))
        return ticks if len(set(ticks)) > 1 else ticks[0]
    return int(message_ticks)


def ticks_between(message_ticks: int | tuple[int, ...], source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The ticks of messages from devices to devices, elementwise.

    Example:
      >>> ticks_between((1, 2, 1), np.array([0, 0, 2, 3, 1]), np.array([1, 2, 3, 0, 1])).tolist()
      [1, 2, 1, 2, 1]
    """
    if isinstance(message_ticks, int):
        return np.where(np.equal(source, target), 1, message_ticks)
    first, last = np.minimum(source, target), np.maximum(source, target)
    boundaries, ticks = np.array(message_ticks), np.ones(np.shape(first), int)
    for number in sorted(set(message_ticks)):
        before = np.concatenate([[0], np.cumsum(boundaries == number)])
        ticks = np.where(before[last] > before[first], number, ticks)
    return ticks
