"""PipeDream: no flush, weights stashed."""

import numpy as np

from jpipe.schedule import Schedule, newest_version
from jpipe.schedules.steady import steady_ticks


def pipedream(
    num_stages: int,
    num_microbatches: int,
    ticks: str = "unit",
    vertical_sync: bool = False,
) -> Schedule:
    """PipeDream: a backward reads the weights that its forward read.

    The placement is `pipemare`'s; a stage keeps the versions that microbatches in flight
    have read, so a gradient belongs to one setting of the stage's weights. With vertical
    sync every stage reads the version that the microbatch met on stage 0, so it belongs
    to one setting of the whole model's.

    Args:
      num_stages: S, at least 1.
      num_microbatches: N, microbatches to an update, at least 1. PipeDream has 1.
      ticks: "unit" or "paired", as for `pipemare`.
      vertical_sync: whether all stages read the version of stage 0.

    Returns:
      A `Schedule` of one round of T = 3 N unit or N paired ticks, without a bubble.

    Raises:
      ValueError: if either count is below 1, or `ticks` is neither of the two.

    Example:
      >>> pipedream(4, 1).facts().weight_versions.tolist()
      [4, 3, 2, 1]
      >>> pipedream(4, 1, vertical_sync=True).facts().forward_delay.tolist()
      [3, 3, 3, 3]

    References:
      Narayanan et al., SOSP 2019, arXiv:1806.03377, sections 3.2 and 3.3.
    """
    at = steady_ticks(num_stages, num_microbatches, ticks)
    updated = at.get("weight_grad", at["backward"])[-1]
    version = newest_version(at["forward"], updated, at["num_ticks"])
    if vertical_sync:
        version = np.broadcast_to(version[:, :1], version.shape)
    return Schedule.from_ticks(
        "pipedream", **at, forward_version=version, backward_version=version
    )
