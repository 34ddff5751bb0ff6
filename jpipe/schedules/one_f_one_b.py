"""1F1B with a flush (PipeDream-Flush)."""

import numpy as np

from jpipe.schedule import Schedule, check_counts


def one_f_one_b(
    num_stages: int, num_microbatches: int, ticks: str = "paired"
) -> Schedule:
    """1F1B: a backward as soon as it can run, in turn with forwards; then one update.

        s0 F0 F1 F2 F3 .  .  .           S=2, N=4, paired; time runs right
           .  .  .  B0 B1 B2 B3
        s1 .  F0 F1 F2 F3 .  .
           .  .  B0 B1 B2 B3 .

        s0 F0 .  F1 B0 W0 F2 B1 W1 F3 B2 W2 .  B3 W3           S=2, N=4, unit
        s1 .  F0 B0 W0 F1 B1 W1 F2 B2 W2 F3 B3 W3 .

    *Paired* ticks hold a forward and a whole backward, of different microbatches: few,
    large ticks. The bubble is (S - 1) / (N + S - 1) as for GPipe, with at most
    min(N, 2 (S - 1 - s) + 2) activations in flight on stage s.

    *Unit* ticks hold one of forward, input gradient and weight gradient on a device:
    min(S - 1 - s, N) forwards to warm up, then F B W in turn. A gradient leaves before
    the weight gradient of its microbatch is computed, so the bubble is less,
    2 (S - 1) / (3 N + 2 (S - 1)), with min(N, S - s) activations in flight.

    Args:
      num_stages: S, at least 1.
      num_microbatches: N, at least 1. Fewer than S is allowed and mostly bubble.
      ticks: "paired" or "unit".

    Returns:
      A `Schedule` of T = N + 2 S - 1 paired or 3 N + 2 (S - 1) unit ticks; every
      version read is 0, and every stage updates in the last tick.

    Raises:
      ValueError: if either count is below 1, or `ticks` is neither of the two.

    Example:
      >>> one_f_one_b(4, 8).facts().makespan
      33
      >>> one_f_one_b(4, 8, ticks="unit").facts().makespan
      30

    References:
      Narayanan et al., ICML 2021, arXiv:2006.09503, section 2.2 (paired: textbook 1F1B
      with the forward of a later microbatch in the tick of each backward).
    """
    check_counts(num_stages=num_stages, num_microbatches=num_microbatches)
    s, m = np.arange(num_stages), np.arange(num_microbatches)[:, None]
    after = num_stages - 1 - s  # stages after this one
    if ticks == "paired":
        return Schedule.from_ticks(
            "one_f_one_b", forward=m + s, backward=m + num_stages + after
        )
    if ticks == "unit":
        # The last stage runs F B W without a gap, and every gradient travels one stage
        # a tick. A forward after the warm-up fills the tick before a backward.
        backward = num_stages + 3 * m + after
        return Schedule.from_ticks(
            "one_f_one_b",
            forward=np.where(m < after, m + s, backward - 3 * after - 1),
            backward=backward,
            weight_grad=backward + 1,
        )
    raise ValueError(
        f"`ticks` must be 'paired' or 'unit', got {ticks!r}: a tick holds either a "
        "forward and a whole backward, or one of forward, input gradient and weight "
        "gradient. 'paired' is the default."
    )
