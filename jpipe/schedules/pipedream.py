"""PipeDream: no flush, stashed weights."""

import numpy as np

from jpipe.schedule import Schedule, newest_version
from jpipe.schedules.arguments import raise_refusal, wrong_counts_or_ticks
from jpipe.schedules.steady import steady_ticks


def refusal(
    num_stages: int, num_microbatches: int, ticks: str, vertical_sync: bool
) -> str | None:
    """Why `pipedream` refuses these arguments; None if it accepts them."""
    del vertical_sync
    return wrong_counts_or_ticks(num_stages, num_microbatches, ticks)


def pipedream(
    num_stages: int,
    num_microbatches: int,
    ticks: str = "unit",
    vertical_sync: bool = False,
) -> Schedule:
    """PipeDream: a backward reads the weights that its forward read.

    Operations run at the same ticks as in `pipemare`. A stage keeps the weight versions
    that microbatches in flight have read, so forward and backward of a microbatch use the
    same weights of a stage. With vertical sync every stage reads the version that the
    microbatch read on stage 0, so the whole gradient belongs to one version of the model.

    Args:
      num_stages: S, at least 1.
      num_microbatches: N, microbatches per update, at least 1. The paper has 1.
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
    raise_refusal(refusal(num_stages, num_microbatches, ticks, vertical_sync))
    steady = steady_ticks(num_stages, num_microbatches, ticks)
    update = steady.get("weight_grad", steady["backward"])[-1]
    version = newest_version(steady["forward"], update, steady["num_ticks"])
    if vertical_sync:
        version = np.broadcast_to(version[:, :1], version.shape)
    return Schedule.from_ticks(
        "pipedream", **steady, forward_version=version, backward_version=version
    )
