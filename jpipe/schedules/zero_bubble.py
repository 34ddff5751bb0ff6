"""Zero-bubble schedules: weight gradients wait, and run where a device would be idle."""

import functools

from jpipe._table.counts import check_counts
from jpipe._table.messages import MessageTicks
from jpipe._util.suggest import suggests
from jpipe.schedule import Schedule
from jpipe.schedules.arguments import down_and_up, raise_refusal, wrong_counts_or_halves
from jpipe.schedules.list_scheduling import Job, Progress, Rule, list_schedule
from jpipe.schedules.message_ticks import with_message_ticks


@suggests
def zero_bubble_h1(num_stages: int, num_microbatches: int, *, message_ticks: MessageTicks = 1) -> Schedule:
    """ZB-H1: 1F1B in which stage s keeps s weight gradients waiting.

        s0 F0 F1 .  B0 W0 F2 B1 W1 F3 B2 W2 B3 W3      S=2, N=4; time runs right
        s1 .  F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3

    A stage runs forwards and input gradients in the order of 1F1B. A weight gradient runs
    where neither is ready, or where more than s of them wait. The bubble is
    (S - 1) (F + B - W), a third of 1F1B's. Every stage keeps min(N, S) activations in
    flight, as many as the first stage of 1F1B in unit ticks.

    Args:
      num_stages: S, at least 1.
      num_microbatches: N, at least 1.
      message_ticks: the ticks that messages take, see `jpipe.Schedule`: a number, or one for each boundary.

    Returns:
      A `Schedule` in unit ticks. For N >= S it has T = 3 N + S - 1.

    Raises:
      ValueError: if either count is below 1, or `message_ticks` do not fit.

    Example:
      >>> facts = zero_bubble_h1(4, 8).facts()
      >>> facts.makespan, facts.in_flight.tolist()
      (27, [4, 4, 4, 4])

    References:
      Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv:2401.10241, section 2.
    """
    check_counts(num_stages=num_stages, num_microbatches=num_microbatches)

    def choose(s: int, ready: list[Job], progress: Progress) -> Job | None:
        ready_of_kind = {operation.kind: operation for operation in ready}
        num_forwards, num_backwards = progress.forward[s], progress.backward[s]
        warm_up = num_forwards - num_backwards < num_stages - s
        kind = "backward"
        if warm_up and num_forwards < num_microbatches:
            kind = "forward"
        if progress.pending(s) > s or kind not in ready_of_kind:
            kind = "weight_grad"
        return ready_of_kind.get(kind)

    ticks = list_schedule(range(num_stages), num_microbatches, choose)
    return Schedule.from_ticks("zero_bubble_h1", **with_message_ticks(ticks, message_ticks))


def _backward_first(limit: int) -> Rule:
    """The rule: input gradients first, then forwards, then weight gradients.

    A forward waits while `limit` microbatches are in flight on the device. Of a device's
    forwards the one of the latest stage goes first, of its input gradients the one of the
    earliest stage, because they are nearest to the end of their way.
    """

    def choose(device: int, ready: list[Job], progress: Progress) -> Job | None:
        def rank(operation: Job) -> tuple[int, int]:
            kind, s, _ = operation
            return {
                "backward": (0, s),
                "forward": (1, -s),
                "weight_grad": (2, s),
            }[kind]

        full = progress.in_flight(device) >= limit
        return min(
            (o for o in ready if not (full and o.kind == "forward")),
            key=rank,
            default=None,
        )

    return choose


@suggests
def zero_bubble_h2(num_stages: int, num_microbatches: int, *, message_ticks: MessageTicks = 1) -> Schedule:
    """ZB-H2: no bubble between a device's first and last operation; twice the activations.

        s0 F0 F1 F2 B0 W0 B1 F3 B2 W1 W2 B3 W3 .       S=2, N=4; time runs right
        s1 .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

    An input gradient runs as soon as it is ready; else a forward, while fewer than 2 S - 1
    microbatches are in flight; else a weight gradient. The rest of the bubble lies before
    a device's first forward and after its last weight gradient, so
    `simulate(...).inner_bubble` is 0.

    A step of this library ends with one common update on all devices. Its makespan is
    therefore that of ZB-H1, with nearly twice the activations: ZB-H2 is never faster here.
    It would be faster with an optimizer that updates every stage as soon as the stage is
    done, so that the next step fills both ends.

    Args:
      num_stages: S, at least 1.
      num_microbatches: N, at least 1. With 2 S - 1 or more the pipeline is full.
      message_ticks: the ticks that messages take, see `jpipe.Schedule`: a number, or one for each boundary.

    Returns:
      A `Schedule` in unit ticks. For N >= 2 S - 1 it has T = 3 N + S - 1.

    Raises:
      ValueError: if either count is below 1, or `message_ticks` do not fit.

    Example:
      >>> facts = zero_bubble_h2(4, 8).facts()
      >>> facts.makespan, facts.in_flight.tolist(), facts.inner_bubble
      (27, [7, 7, 7, 7], 0.0)

    References:
      Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv:2401.10241, section 2.
    """
    check_counts(num_stages=num_stages, num_microbatches=num_microbatches)
    rule = _backward_first(2 * num_stages - 1)
    ticks = list_schedule(range(num_stages), num_microbatches, rule)
    return Schedule.from_ticks("zero_bubble_h2", **with_message_ticks(ticks, message_ticks))


zb_v_refusal = functools.partial(wrong_counts_or_halves, "ZB-V")
"""The reason why `zero_bubble_v` refuses its counts; None if it accepts them."""


@suggests
def zero_bubble_v(num_stages: int, num_microbatches: int, *, message_ticks: MessageTicks = 1) -> Schedule:
    """ZB-V: two stages per device, placed down the devices and up again.

        s0@0  F0  F1  .   .   .   .   .   B0  W0  B1  W1  .   .   S=4, N=2; time runs right
        s1@1  .   F0  .   F1  .   .   B0  .   B1  W0  W1  .   .
        s2@1  .   .   F0  .   F1  B0  .   B1  .   .   .   W0  W1
        s3@0  .   .   .   F0  B0  F1  B1  .   .   .   .   W0  W1

    Device d runs the stages d and S - 1 - d, so the backward starts on the device that
    also has the first stage. The rule is that of `zero_bubble_h2`, with at most S
    activations of a stage in flight on a device. A stage is half of a device's share of
    the model, so at any time these are as many bytes as in 1F1B on S / 2 devices in unit
    ticks, where the paper's claim of 1F1B's memory comes from.

    The two stages of a device share the slots of its activations, so this library keeps as
    many: see the example. What waits for weight gradients comes on top of that.

    Args:
      num_stages: S, even: twice the number of devices.
      num_microbatches: N, at least 1.
      message_ticks: the ticks that messages take, see `jpipe.Schedule`: a number, or one for each boundary.

    Returns:
      A `Schedule` in unit ticks. A tick is as long as an operation of one of S stages.

    Raises:
      ValueError: if a count is below 1, `num_stages` is odd, or `message_ticks` do not fit.

    Example:
      Four devices, which work 48 of 51 ticks.

      >>> facts = zero_bubble_v(8, 8).facts()
      >>> facts.makespan
      51

      A device never holds more than 8 activations of its two stages at one time, which are
      4 of its whole share. 1F1B in unit ticks holds 4 too.

      >>> facts.in_flight.tolist()  # stages 0 .. 3 come first on devices 0 .. 3
      [7, 6, 5, 4, 6, 5, 4, 3]

    References:
      Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv:2401.10241, section 6.
      The same authors' Pipeline Parallelism with Controllable Memory, NeurIPS 2024,
      arXiv:2405.15362, has V-shaped schedules of less memory, and calls this one V-ZB.
    """
    raise_refusal(zb_v_refusal(num_stages, num_microbatches))
    ticks = list_schedule(down_and_up(num_stages), num_microbatches, _backward_first(num_stages))
    return Schedule.from_ticks("zero_bubble_v", **with_message_ticks(ticks, message_ticks))
