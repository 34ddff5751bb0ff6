"""PipeDream-2BW: no flush, two weight versions."""

from jpipe.schedule import Schedule
from jpipe.schedules.arguments import raise_refusal, wrong_counts_or_ticks
from jpipe.schedules.steady import steady_ticks


def refusal(num_stages: int, num_microbatches: int, ticks: str) -> str | None:
    """Why `pipedream_2bw` refuses these arguments; None if it accepts them."""
    if wrong := wrong_counts_or_ticks(num_stages, num_microbatches, ticks):
        return wrong
    least = 2 * num_stages - 1 if ticks == "paired" else max(num_stages - 1, 1)
    if num_microbatches >= least:
        return None
    return (
        f"`num_microbatches` of PipeDream-2BW must be at least {least} for {num_stages} "
        f"stages in {ticks} ticks, got {num_microbatches}: a third weight version would be "
        f"needed. Use {least} or more."
    )


def pipedream_2bw(
    num_stages: int, num_microbatches: int, ticks: str = "unit"
) -> Schedule:
    """PipeDream-2BW: every forward and backward reads the version before the newest.

    W(t + 1) = W(t) - nu grad f(W(t - 1)): a delay of one update on all stages, and two
    weight versions. Every stage must have written a version before the first microbatch
    reads it, so a minibatch needs enough microbatches: N at least S - 1 in unit ticks,
    2 S - 1 in paired ticks.

    Args:
      num_stages: S, at least 1.
      num_microbatches: N, microbatches per update.
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
    raise_refusal(refusal(num_stages, num_microbatches, ticks))
    steady = steady_ticks(num_stages, num_microbatches, ticks)
    return Schedule.from_ticks(
        "pipedream_2bw", **steady, forward_version=-1, backward_version=-1
    )
