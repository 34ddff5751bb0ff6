"""The ticks of all asynchronous schedules: they differ only in weight versions."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jpipe._table.cells import IDLE
from jpipe._table.messages import MessageTicks
from jpipe.schedules.copies import has_copies, unit_ticks, with_copies
from jpipe.schedules.message_ticks import with_message_ticks


def steady_ticks(
    num_stages: int,
    num_microbatches: int,
    ticks: str,
    replicas: Sequence[int] | None = None,
    message_ticks: MessageTicks = 1,
    update_every: Sequence[int] | None = None,
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
      message_ticks: see `jpipe.Schedule`.
      update_every: the microbatches of an update of each stage; None: N. The builders check all six.

    Returns:
      The fields `forward`, `backward`, in unit ticks `weight_grad`, and `num_ticks`; with
      copies also `stage` and `device`, and `message_ticks` above 1.

    Example:
      >>> arguments = steady_ticks(2, 1, "unit")
      >>> {name: np.ravel(value).tolist() for name, value in arguments.items()}
      {'forward': [0, 2], 'backward': [4, 3], 'weight_grad': [5, 4], 'num_ticks': [3]}
    """
    if ticks == "unit" and replicas is not None and has_copies(replicas):
        shortest = math.lcm(*update_every) if update_every else num_microbatches
        copied = unit_ticks(shortest, replicas, synchronous=False, update_every=update_every)
        return with_message_ticks(_repeated(copied, num_microbatches // shortest), message_ticks)

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


def _repeated(steady: dict[str, Any], times: int) -> dict[str, Any]:
    """A round that runs as many minibatches, one after the other."""
    T = steady["num_ticks"]

    def later(ticks: np.ndarray) -> np.ndarray:
        return np.concatenate([np.where(ticks == IDLE, IDLE, ticks + T * i) for i in range(times)])

    return {
        name: value if name in ("stage", "device") else T * times if name == "num_ticks" else later(value)
        for name, value in steady.items()
    }


def last_gradients(steady: dict[str, Any], update_every: Sequence[int] | None = None) -> np.ndarray:
    """`[U, C]`: the tick at which each column's stage has the gradients of each of its updates in a round.

    Args:
      steady: see `steady_ticks`.
      update_every: the microbatches of an update of each stage; None: all, so that U is 1. Where a stage updates less
        often than another, the last rows are `IDLE`.
    """
    gradient = np.asarray(steady.get("weight_grad", steady["backward"]))
    N, C = gradient.shape
    stage = np.asarray(steady.get("stage", np.arange(C)))
    period = np.full(C, N) if update_every is None else np.asarray(update_every)[stage]
    last = np.full((N // period.min(), C), IDLE, np.int64)
    for c, s in enumerate(stage):
        of_stage = gradient[:, stage == s].max(axis=1)
        parts = of_stage.reshape(-1, period[c])
        last[: len(parts), c] = parts.max(axis=1)
    return last
