"""1F1B of slices of sequences (Seq1F1B)."""

import numpy as np

from jpipe._table.counts import wrong_counts
from jpipe._table.messages import MessageTicks
from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.schedule import Schedule
from jpipe.schedules.arguments import TICKS, raise_refusal, wrong_ticks
from jpipe.schedules.message_ticks import with_message_ticks


def refusal(num_stages: int, num_microbatches: int, num_slices: int, ticks: str) -> str | None:
    """The reason why `seq_one_f_one_b` refuses these arguments; None if it accepts them."""
    if wrong := wrong_counts(num_stages=num_stages, num_microbatches=num_microbatches, num_slices=num_slices):
        return wrong
    if num_microbatches % num_slices:
        more = -(-num_microbatches // num_slices) * num_slices
        return (
            f"`num_microbatches` of a schedule with slices must be a multiple of `num_slices`, {num_slices}, got "
            f"{shown(num_microbatches)}: every slice of a sequence is a microbatch. Use {more}."
        )
    return wrong_ticks(ticks, TICKS)


@suggests
def seq_one_f_one_b(
    num_stages: int,
    num_microbatches: int,
    num_slices: int = 2,
    ticks: str = "paired",
    *,
    message_ticks: MessageTicks = 1,
) -> Schedule:
    """Seq1F1B: 1F1B whose microbatches are slices of sequences.

        s0 F0 F1 F2 F3 .  .  .           S=2, N=4, k=2, paired; time runs right
           .  .  .  B1 B0 B3 B2
        s1 .  F0 F1 F2 F3 .  .
           .  .  B1 B0 B3 B2 .

        s0 F0 F1 .  F2 B1 W1 F3 B0 W0 .  B3 W3 B2 W2           S=2, N=4, k=2, unit
        s1 .  F0 F1 B1 W1 F2 B0 W0 F3 B3 W3 B2 W2 .

    The minibatch is cut in N / k groups of rows, and the positions of each group in k slices. A slice is a
    microbatch: microbatch k g + j is slice j of group g. So N grows without more rows, and an activation in flight is
    one of L / k positions. A layer that mixes positions hands on to the next slice what that needs:
    `jpipe.whole_sequence` and `jpipe.carry`.

    The last stage runs the k forwards of a group before the first of its backwards, which come in reverse order. All
    backwards are therefore k - 1 positions later than in `one_f_one_b`. The bubble is that of `one_f_one_b` with N
    microbatches, (S - 1) / (N + S - 1) in paired ticks. Stage s keeps at most min(N, 2 (S - s) + k - 2) slices in
    flight in paired ticks and min(N, S - s + k - 1) in unit ticks, each of 1 / k of a sequence.

    Args:
      num_stages: S, at least 1.
      num_microbatches: N, the slices of all groups, a multiple of k.
      num_slices: k, slices of a sequence, at least 1. With 1 the table is that of `one_f_one_b`.
      ticks: "paired" or "unit", as of `one_f_one_b`.
      message_ticks: the ticks that messages take, see `jpipe.Schedule`: a number, or one for each boundary.

    Returns:
      A `Schedule` of T = N + 2 S + k - 3 paired or 3 N + 2 (S - 1) unit ticks. Every operation reads weight version 0,
      and every stage updates in the last tick.

    Raises:
      ValueError: if a count is below 1, `num_slices` does not divide `num_microbatches`, `ticks` is neither of the
        two, or `message_ticks` do not fit.

    Example:
      Four stages, and two sequences on each: with four slices the bubble is that of eight microbatches.

      >>> whole, sliced = (seq_one_f_one_b(4, 4 * k, k).facts() for k in (1, 4))
      >>> f"{whole.bubble:.0%} {sliced.bubble:.0%}"
      '43% 16%'
      >>> whole.in_flight.tolist(), (sliced.in_flight / 4).tolist()  # in sequences
      ([4, 4, 3, 1], [2.5, 2.0, 1.5, 1.0])

    References:
      Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism", 2024, arXiv:2406.03488.
      Li et al., "SlimPipe", 2025, arXiv:2504.14519 (slices of equal length, keys and values kept in one place).
      Li et al., "TeraPipe", ICML 2021, arXiv:2102.07988 (slices as microbatches, in the order of GPipe).
    """
    raise_refusal(refusal(num_stages, num_microbatches, num_slices, ticks))
    N, k = num_microbatches, num_slices
    s, m = np.arange(num_stages), np.arange(N)[:, None]
    after = num_stages - 1 - s  # stages after this one
    place = m // k * k + k - 1 - m % k  # in the order of backwards

    def table(**arguments: np.ndarray) -> Schedule:
        spaced = with_message_ticks(arguments, message_ticks)
        return Schedule.from_ticks("seq_one_f_one_b", **spaced, num_slices=k)

    if ticks == "paired":
        return table(forward=m + s, backward=place + k - 1 + num_stages - 1 + after)
    warm_up = after + k - 1  # forwards before the first one that follows a backward

    def backward(place: np.ndarray) -> np.ndarray:
        # Without forwards in between a stage runs B W in turn.
        return num_stages + k - 1 + after + 3 * place - np.maximum(place - (N - k), 0)

    tick = backward(place)
    return table(
        forward=np.where(m < warm_up, m + s, backward(m - warm_up) - 1),
        backward=tick,
        weight_grad=tick + 1,
    )
