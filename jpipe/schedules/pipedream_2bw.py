"""PipeDream-2BW: no flush, two weight versions."""

import itertools
from collections.abc import Sequence

from jpipe._table.messages import MessageTicks, wrong_message_ticks
from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.schedule import IDLE, Schedule, newest_version
from jpipe.schedules.arguments import raise_refusal, wrong_counts_or_ticks
from jpipe.schedules.copies import has_copies, warm_up
from jpipe.schedules.steady import last_gradients, steady_ticks


def refusal(
    num_stages: int,
    num_microbatches: int,
    ticks: str,
    replicas: Sequence[int] | None,
    message_ticks: MessageTicks = 1,
) -> str | None:
    """The reason why `pipedream_2bw` refuses these arguments; None if it accepts them."""
    if wrong := wrong_counts_or_ticks(num_stages, num_microbatches, ticks, replicas):
        return wrong
    counts, copies = [1] * num_stages, ""
    if replicas is not None and has_copies(replicas):
        counts, copies = list(replicas), f" with {tuple(replicas)} copies"
    if ticks == "paired":
        # 2 S - 1 groups, of which the last may have one microbatch.
        least = (2 * num_stages - 2) * max(counts) + 1
    else:
        # A copy has as many microbatches of a minibatch as it runs forward to warm up.
        least = max(r * w for r, w in zip(counts, warm_up(counts), strict=True))
        least = max(least, *counts)
    if wrong := wrong_message_ticks(message_ticks, sum(counts)):
        return wrong
    if message_ticks != 1:
        enough = (
            n for n in itertools.count(least) if _reads_two_versions(num_stages, n, ticks, replicas, message_ticks)
        )
        least = next(enough)
        copies += f" and `message_ticks` of {shown(message_ticks)}"
    if num_microbatches >= least:
        return None
    return (
        f"`num_microbatches` of PipeDream-2BW must be at least {least} for {num_stages} "
        f"stages{copies} in {ticks} ticks, got {shown(num_microbatches)}: a third weight version would be "
        f"needed. Use {least} or more."
    )


def _reads_two_versions(
    num_stages: int, num_microbatches: int, ticks: str, replicas: Sequence[int] | None, message_ticks: MessageTicks
) -> bool:
    """Whether every forward can read the version before that of its minibatch."""
    steady = steady_ticks(num_stages, num_microbatches, ticks, replicas, message_ticks)
    newest = newest_version(steady["forward"], last_gradients(steady), steady["num_ticks"])
    return bool((newest[steady["forward"] != IDLE] >= -1).all())


@suggests
def pipedream_2bw(
    num_stages: int,
    num_microbatches: int,
    ticks: str = "unit",
    replicas: Sequence[int] | None = None,
    *,
    message_ticks: MessageTicks = 1,
) -> Schedule:
    """PipeDream-2BW: every forward and backward reads the version before the newest.

    W(t + 1) = W(t) - nu grad f(W(t - 1)): a delay of one update on all stages, and two
    weight versions. Every stage must have written a version before the first microbatch
    reads it, so a minibatch needs enough microbatches: N at least S - 1 in unit ticks,
    2 S - 1 in paired ticks. With copies, see `pipemare`, that is r_s w_s for every stage, or
    L (2 S - 2) + 1.

    Args:
      num_stages: S, at least 1.
      num_microbatches: N, microbatches per update.
      ticks: "unit" or "paired", as for `pipemare`.
      replicas: the number of copies of each stage, or None, as for `pipemare`.
      message_ticks: the ticks that messages take, see `jpipe.Schedule`: a number, or one for each boundary.

    Returns:
      A `Schedule` of one round. Without copies it has T = 3 N unit or N paired ticks, and no
      bubble.

    Raises:
      ValueError: if N is too small, `ticks` is neither of the two, or `replicas` or
        `message_ticks` do not fit.

    Example:
      >>> facts = pipedream_2bw(4, 8).facts()
      >>> facts.forward_delay.tolist(), facts.weight_versions.tolist()
      ([1, 1, 1, 1], [2, 2, 2, 2])

    References:
      Narayanan et al., ICML 2021, arXiv:2006.09503, section 3.1.
    """
    raise_refusal(refusal(num_stages, num_microbatches, ticks, replicas, message_ticks))
    steady = steady_ticks(num_stages, num_microbatches, ticks, replicas, message_ticks)
    return Schedule.from_ticks("pipedream_2bw", **steady, forward_version=-1, backward_version=-1)
