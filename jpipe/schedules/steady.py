"""Where every asynchronous schedule puts its operations: they differ in weight versions alone."""

from typing import Any

import numpy as np

from jpipe.schedule import check_counts


def steady_ticks(num_stages: int, num_microbatches: int, ticks: str) -> dict[str, Any]:
    """Arguments of `Schedule.from_ticks` for a pipe that is always full.

    *Paired*: a forward and a whole backward a tick; microbatch m runs forward on stage s
    at tick m + s and backward 2 (S - 1 - s) + 1 ticks later. *Unit*: one of forward, input
    gradient and weight gradient a tick, each stage three ticks a microbatch.

    Example:
      >>> {name: np.ravel(at).tolist() for name, at in steady_ticks(2, 1, "unit").items()}
      {'forward': [0, 2], 'backward': [4, 3], 'weight_grad': [5, 4], 'num_ticks': [3]}
    """
    check_counts(num_stages=num_stages, num_microbatches=num_microbatches)
    s, m = np.arange(num_stages), np.arange(num_microbatches)[:, None]
    if ticks == "paired":
        return dict(
            forward=m + s,
            backward=m + 2 * num_stages - 1 - s,
            num_ticks=num_microbatches,
        )
    if ticks == "unit":
        backward = 3 * m + 3 * num_stages - 2 - s
        return dict(
            forward=3 * m + 2 * s,
            backward=backward,
            weight_grad=backward + 1,
            num_ticks=3 * num_microbatches,
        )
    raise ValueError(f'`ticks` must be "paired" or "unit", got {ticks!r}.')
