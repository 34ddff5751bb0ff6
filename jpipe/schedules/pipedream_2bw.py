"""PipeDream-2BW: no flush, two weight versions."""

from jpipe.schedule import Schedule
from jpipe.schedules.steady import steady_ticks


def pipedream_2bw(
    num_stages: int, num_microbatches: int, ticks: str = "unit"
) -> Schedule:
    """PipeDream-2BW: every stage reads the version before the newest, both ways.

    W(t + 1) = W(t) - nu grad f(W(t - 1)): a delay of one update on all stages, and two
    versions. It needs minibatches long enough that a version is complete on every stage
    before the first microbatch reads it: N at least S - 1 in unit ticks, 2 S - 1 in paired
    ticks.

    Args:
      num_stages: S, at least 1.
      num_microbatches: N, microbatches to an update.
      ticks: "unit" or "paired", as for `pipemare`.

    Returns:
      A `Schedule` of one round of T = 3 N unit or N paired ticks, without a bubble.

    Raises:
      ValueError: if N is too small, or `ticks` is neither of the two.

    Example:
      >>> facts = pipedream_2bw(4, 8).facts()
      >>> facts.forward_delay.tolist(), facts.weight_versions.tolist()
      ([1, 1, 1, 1], [2, 2, 2, 2])

    References:
      Narayanan et al., ICML 2021, arXiv:2006.09503, section 3.1.
    """
    at = steady_ticks(num_stages, num_microbatches, ticks)
    least = 2 * num_stages - 1 if ticks == "paired" else max(num_stages - 1, 1)
    if num_microbatches < least:
        raise ValueError(
            f"`num_microbatches` of PipeDream-2BW must be at least {least} for {num_stages} "
            f"stages in {ticks} ticks, got {num_microbatches}: a third weight version would "
            f"be needed. Use {least} or more."
        )
    return Schedule.from_ticks(
        "pipedream_2bw", **at, forward_version=-1, backward_version=-1
    )
