"""GPipe."""

import numpy as np

from jpipe.schedule import Schedule, check_counts


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """GPipe: all forwards, then all backwards, then one update.

        s0 F0 F1 F2 .  .  B0 B1 B2          S=2, N=3; time runs right
        s1 .  F0 F1 F2 B0 B1 B2 .

    Every stage keeps N activations in flight. The bubble is (S - 1) / (N + S - 1).

    The paper runs backwards in the reverse order of forwards. This table runs them in the
    order of forwards, at the same cost and memory, so that every buffer is a ring.

    Args:
      num_stages: S, at least 1.
      num_microbatches: N, at least 1. Fewer than S is allowed and mostly bubble.

    Returns:
      A `Schedule` of T = 2 (N + S - 1) ticks. Every operation reads weight version 0, and
      every stage updates in the last tick.

    Raises:
      ValueError: if either count is below 1.

    Example:
      >>> gpipe(4, 8).num_ticks
      22

    References:
      Huang et al., NeurIPS 2019, arXiv:1811.06965, section 2.3.
    """
    check_counts(num_stages=num_stages, num_microbatches=num_microbatches)
    s, m = np.arange(num_stages), np.arange(num_microbatches)[:, None]
    first_backward = num_stages + num_microbatches - 1
    return Schedule.from_ticks(
        "gpipe",
        forward=m + s,
        backward=first_backward + m + (num_stages - 1 - s),
    )
