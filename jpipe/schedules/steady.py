"""The ticks of all asynchronous schedules: they differ only in weight versions."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jpipe._table.messages import MessageTicks
from jpipe.schedules.copies import has_copies, unit_ticks, with_copies
from jpipe.schedules.message_ticks import with_message_ticks


def steady_ticks(
    num_stages: int,
    num_microbatches: int,
    ticks: str,
    replicas: Sequence[int] | None = None,
    message_ticks: MessageTicks = 1,
) -> dict[str, Any]:
    """Arguments of `Schedule.from_ticks` for a pipeline that is always full.

    *Paired*: a forward and a whole backward per tick. Microbatch m runs forward on stage s
    at tick m + s and backward 2 (S - 1 - s) + 1 ticks later. *Unit*: one of forward, input
    gradient and weight gradient per tick, so a stage takes three ticks per microbatch. For
    stages with copies see `jpipe.schedules.copies`.

    Args:
      num_stages: S, at least 1.
      num_microbatches: N, at least 1.
      ticks: "unit" or "paired".
      replicas: the number of copies of each stage, or None.
      message_ticks: see `jpipe.Schedule`. The builders check all five.

    Returns:
      The fields `forward`, `backward`, in unit ticks `weight_grad`, and `num_ticks`; with
      copies also `stage` and `device`, and `message_ticks` above 1.

    Example:
      >>> arguments = steady_ticks(2, 1, "unit")
      >>> {name: np.ravel(value).tolist() for name, value in arguments.items()}
      {'forward': [0, 2], 'backward': [4, 3], 'weight_grad': [5, 4], 'num_ticks': [3]}
    """
    if ticks == "unit" and replicas is not None and has_copies(replicas):
        copied = unit_ticks(num_microbatches, replicas, synchronous=False)
        return with_message_ticks(copied, message_ticks)

    def round_of(N: int) -> dict[str, Any]:
        s, m = np.arange(num_stages), np.arange(N)[:, None]
        if ticks == "paired":
            backward = m + 2 * num_stages - 1 - s
            return dict(forward=m + s, backward=backward, num_ticks=N)
        backward = 3 * m + 3 * num_stages - 2 - s
        return dict(
            forward=3 * m + 2 * s,
            backward=backward,
            weight_grad=backward + 1,
            num_ticks=3 * N,
        )

    return with_message_ticks(with_copies(round_of, num_microbatches, replicas), message_ticks)


def last_gradients(steady: dict[str, Any]) -> np.ndarray:
    """`[C]`: the tick at which each column's stage has the gradients of a minibatch."""
    last = np.max(steady.get("weight_grad", steady["backward"]), axis=0)
    stage = steady.get("stage", np.arange(len(last)))
    return np.array([last[stage == s].max() for s in stage])
