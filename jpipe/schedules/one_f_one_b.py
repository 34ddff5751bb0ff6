"""1F1B with a flush (PipeDream-Flush)."""

import functools
from collections.abc import Sequence

import numpy as np

from jpipe._table.messages import MessageTicks
from jpipe._util.suggest import suggests
from jpipe.schedule import Schedule
from jpipe.schedules.arguments import OVERLAPPED, TICKS, raise_refusal, wrong_counts_or_ticks
from jpipe.schedules.copies import has_copies, unit_ticks, with_copies
from jpipe.schedules.message_ticks import with_message_ticks

refusal = functools.partial(wrong_counts_or_ticks, known=TICKS | OVERLAPPED)
"""The reason why `one_f_one_b` refuses its arguments; None if it accepts them."""


@suggests
def one_f_one_b(
    num_stages: int,
    num_microbatches: int,
    ticks: str = "paired",
    replicas: Sequence[int] | None = None,
    *,
    message_ticks: MessageTicks = 1,
) -> Schedule:
    """1F1B: backwards run as early as possible, in turn with forwards; then one update.

        s0 F0 F1 F2 F3 .  .              S=2, N=4, paired; time runs right
           .  .  B0 B1 B2 B3
        s1 .  F0 F1 F2 F3 .
           .  B0 B1 B2 B3 .

        s0 F0 F1 F2 F3 .  .  .           S=2, N=4, overlapped
           .  .  .  B0 B1 B2 B3
        s1 .  F0 F1 F2 F3 .  .
           .  .  B0 B1 B2 B3 .

        s0 F0 .  F1 B0 W0 F2 B1 W1 F3 B2 W2 .  B3 W3           S=2, N=4, unit
        s1 .  F0 B0 W0 F1 B1 W1 F2 B2 W2 F3 B3 W3 .

    *Paired* ticks hold a forward and then a whole backward: few, large ticks. On the last
    stage both are of one microbatch, on the others of different ones. The bubble is
    GPipe's, (S - 1) / (N + S - 1). Stage s keeps at most min(N, 2 (S - s) - 1) activations
    in flight, nearly twice the S - s of the paper. So stage 0, which has the most, keeps
    as many as in GPipe unless N > 2 S - 1.

    *Overlapped* ticks are paired ticks in which the last stage too runs the passes of two microbatches: every backward
    comes one tick later. Then neither pass of a tick reads what the other writes, and the messages in the layers of
    one, such as the all-to-alls of experts, can travel while the other computes. It takes one tick and one activation
    in flight more.

    *Unit* ticks hold one of forward, input gradient and weight gradient: after
    min(S - 1 - s, N) forwards of warm-up a stage runs F B W in turn. A gradient leaves
    before the weight gradient of its microbatch is computed, so the bubble is smaller,
    2 (S - 1) / (3 N + 2 (S - 1)). Stage s keeps at most min(N, S - s) activations in
    flight, as in the paper.

    In a pipeline every device has buffers for the largest stage. Its activations
    therefore take min(N, 2 S - 1) microbatches in paired ticks and min(N, S) in unit ticks.

    Args:
      num_stages: S, at least 1.
      num_microbatches: N, at least 1. Fewer than S is allowed and mostly bubble.
      ticks: "paired", "unit" or "overlapped".
      replicas: the number of copies of each stage, such as (3, 1). A paired tick then moves as
        many microbatches as the largest number L, so N / L, rounded up, stands for N above. In
        unit ticks every copy runs one operation per tick, in the order of PipeDream's runtime,
        and keeps at most w_s + 1 activations, with w_s the number of devices after the copies
        of stage s and of its other copies, divided by its copies and rounded down. None: one
        each.
      message_ticks: the ticks that messages take, see `jpipe.Schedule`: a number, or one for each boundary.

    Returns:
      A `Schedule` of T = N + 2 S - 2 paired, N + 2 S - 1 overlapped or 3 N + 2 (S - 1) unit ticks. Every
      operation reads weight version 0, and every stage updates in the last tick.

    Raises:
      ValueError: if either count is below 1, `ticks` is none of the three, or `replicas` or
        `message_ticks` do not fit.

    Example:
      >>> paired, unit = (one_f_one_b(4, 8, ticks=t).facts() for t in ("paired", "unit"))
      >>> paired.makespan, paired.in_flight.tolist()  # GPipe: 33, [8, 8, 8, 8]
      (33, [7, 5, 3, 1])
      >>> unit.makespan, unit.in_flight.tolist()
      (30, [4, 3, 2, 1])

    References:
      Narayanan et al., ICML 2021, arXiv:2006.09503, section 2.2. The paired table departs
      from it: before the last stage, the tick of a backward also holds the forward of a
      later microbatch. Megatron-LM hides the all-to-alls of experts in a combined 1F1B like the
      overlapped one.
    """
    raise_refusal(refusal(num_stages, num_microbatches, ticks, replicas))
    later = int(ticks == "overlapped")

    def paired(N: int) -> dict:
        s, m = np.arange(num_stages), np.arange(N)[:, None]
        # A tick runs forward before backward, so the last stage can run both passes of a
        # microbatch in one tick.
        return dict(forward=m + s, backward=m + 2 * (num_stages - 1) - s + later)

    if ticks != "unit":
        arguments = with_copies(paired, num_microbatches, replicas)
    elif replicas is not None and has_copies(replicas):
        arguments = unit_ticks(num_microbatches, replicas, synchronous=True)
    else:
        arguments = _straight_unit_ticks(num_stages, num_microbatches)
    return Schedule.from_ticks("one_f_one_b", **with_message_ticks(arguments, message_ticks))


def _straight_unit_ticks(num_stages: int, num_microbatches: int) -> dict[str, np.ndarray]:
    """The arguments of `Schedule.from_ticks` for unit ticks and one copy of every stage."""
    s, m = np.arange(num_stages), np.arange(num_microbatches)[:, None]
    after = num_stages - 1 - s  # stages after this one
    # The last stage runs F B W without a gap, and every gradient travels one stage per
    # tick. A forward after the warm-up fills the tick before a backward.
    backward = num_stages + 3 * m + after
    return dict(
        forward=np.where(m < after, m + s, backward - 3 * after - 1),
        backward=backward,
        weight_grad=backward + 1,
    )
