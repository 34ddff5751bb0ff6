"""GPipe."""

from collections.abc import Sequence

import numpy as np

from jpipe._table.messages import MessageTicks
from jpipe._util.suggest import suggests
from jpipe.schedule import Schedule
from jpipe.schedules.arguments import raise_refusal, wrong_counts_or_replicas
from jpipe.schedules.copies import with_copies
from jpipe.schedules.message_ticks import with_message_ticks


@suggests
def gpipe(
    num_stages: int,
    num_microbatches: int,
    replicas: Sequence[int] | None = None,
    *,
    message_ticks: MessageTicks = 1,
) -> Schedule:
    """GPipe: all forwards, then all backwards, then one update.

        s0 F0 F1 F2 .  .  B0 B1 B2          S=2, N=3; time runs right
        s1 .  F0 F1 F2 B0 B1 B2 .

    Every stage keeps N activations in flight. The bubble is (S - 1) / (N + S - 1).

    The paper runs backwards in the reverse order of forwards. This table runs them in the
    order of forwards, at the same cost and memory, so that every buffer is a ring.

    Args:
      num_stages: S, at least 1.
      num_microbatches: N, at least 1. Fewer than S is allowed and mostly bubble.
      replicas: the number of copies of each stage, such as (3, 1). A tick then moves as many
        microbatches as the largest number L, so N / L, rounded up, stands for N above. None:
        one each.
      message_ticks: the ticks that messages take, see `jpipe.Schedule`: a number, or one for each boundary.

    Returns:
      A `Schedule` of T = 2 (N + S - 1) ticks; if messages take k ticks, 2 (N + k (S - 1)). Every operation
      reads weight version 0, and every stage updates in the last tick.

    Raises:
      ValueError: if either count is below 1, or `replicas` or `message_ticks` do not fit.

    Example:
      >>> gpipe(4, 8).num_ticks
      22

    References:
      Huang et al., NeurIPS 2019, arXiv:1811.06965, section 2.3.
    """
    raise_refusal(wrong_counts_or_replicas(num_stages, num_microbatches, replicas))

    def ticks(N: int) -> dict:
        s, m = np.arange(num_stages), np.arange(N)[:, None]
        first_backward = num_stages + N - 1
        return dict(forward=m + s, backward=first_backward + m + (num_stages - 1 - s))

    arguments = with_copies(ticks, num_microbatches, replicas)
    return Schedule.from_ticks("gpipe", **with_message_ticks(arguments, message_ticks))
