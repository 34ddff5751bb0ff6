"""The ticks of all asynchronous schedules: they differ only in weight versions."""

from typing import Any

import numpy as np


def steady_ticks(num_stages: int, num_microbatches: int, ticks: str) -> dict[str, Any]:
    """Arguments of `Schedule.from_ticks` for a pipeline that is always full.

    *Paired*: a forward and a whole backward per tick. Microbatch m runs forward on stage s
    at tick m + s and backward 2 (S - 1 - s) + 1 ticks later. *Unit*: one of forward, input
    gradient and weight gradient per tick, so a stage takes three ticks per microbatch.

    Args:
      num_stages: S, at least 1.
      num_microbatches: N, at least 1.
      ticks: "unit" or "paired". The builders check all three.

    Returns:
      The fields `forward`, `backward`, in unit ticks `weight_grad`, and `num_ticks`.

    Example:
      >>> arguments = steady_ticks(2, 1, "unit")
      >>> {name: np.ravel(value).tolist() for name, value in arguments.items()}
      {'forward': [0, 2], 'backward': [4, 3], 'weight_grad': [5, 4], 'num_ticks': [3]}
    """
    s, m = np.arange(num_stages), np.arange(num_microbatches)[:, None]
    if ticks == "paired":
        return dict(
            forward=m + s,
            backward=m + 2 * num_stages - 1 - s,
            num_ticks=num_microbatches,
        )
    backward = 3 * m + 3 * num_stages - 2 - s
    return dict(
        forward=3 * m + 2 * s,
        backward=backward,
        weight_grad=backward + 1,
        num_ticks=3 * num_microbatches,
    )
