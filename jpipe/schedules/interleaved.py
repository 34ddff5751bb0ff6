"""Interleaved 1F1B: several stages per device, and a smaller bubble."""

import numpy as np

from jpipe._table.counts import wrong_counts
from jpipe._table.messages import MessageTicks
from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.schedule import Schedule
from jpipe.schedules.arguments import OVERLAPPED, TICKS, raise_refusal, wrong_ticks
from jpipe.schedules.list_scheduling import Job, Progress, list_schedule
from jpipe.schedules.message_ticks import with_message_ticks


def refusal(num_stages: int, num_microbatches: int, num_chunks: int, ticks: str) -> str | None:
    """The reason why `interleaved` refuses these arguments; None if it accepts them."""
    if wrong := wrong_counts(num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks):
        return wrong
    num_devices, rest = divmod(num_stages, num_chunks)
    if rest:
        fewer, more = num_devices * num_chunks, (num_devices + 1) * num_chunks
        nearest = f"{fewer} or {more}" if fewer else f"{more}"
        return (
            "`num_stages` of an interleaved schedule must be a multiple of `num_chunks`, "
            f"got {shown(num_stages)} stages and {num_chunks} chunks: `num_stages` counts the "
            "chunks of all devices (not devices, as Megatron-LM does), and every device "
            f"runs `num_chunks` of them. Use {nearest} stages, or another `num_chunks`."
        )
    if num_microbatches % num_devices:
        return (
            "`num_microbatches` of an interleaved schedule must be a multiple of its "
            f"{num_devices} devices, got {shown(num_microbatches)}: {num_stages} stages with "
            f"{num_chunks} chunks per device are {num_devices} devices, and microbatches "
            f"go through the chunks of a device in groups of {num_devices}. Use "
            f"{-(-num_microbatches // num_devices) * num_devices}."
        )
    return wrong_ticks(ticks, TICKS | OVERLAPPED)


@suggests
def interleaved(
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 2,
    ticks: str = "paired",
    *,
    message_ticks: MessageTicks = 1,
) -> Schedule:
    """Interleaved 1F1B: device d runs the stages d, D + d, 2 D + d, ... of S.

        s0@0  F0  F1  .   .   F2  F3  .   .   .   .   .   .      S=4, N=4, paired;
              .   .   .   .   .   .   B0  B1  .   .   B2  B3     time runs right
        s1@1  .   F0  F1  .   .   F2  F3  .   .   .   .   .
              .   .   .   .   .   B0  B1  .   .   B2  B3  .
        s2@0  .   .   F0  F1  .   .   F2  F3  .   .   .   .
              .   .   .   .   B0  B1  .   .   B2  B3  .   .
        s3@1  .   .   .   F0  F1  .   .   F2  F3  .   .   .
              .   .   .   B0  B1  .   .   B2  B3  .   .   .

        s0@0  F0  F1  .   .   F2  F3  .   .   .   .   .   .   .       S=4, N=4, overlapped
              .   .   .   .   .   .   .   B0  B1  .   .   B2  B3
        s1@1  .   F0  F1  .   .   F2  F3  .   .   .   .   .   .
              .   .   .   .   .   .   B0  B1  .   .   B2  B3  .
        s2@0  .   .   F0  F1  .   .   F2  F3  .   .   .   .   .
              .   .   .   .   .   B0  B1  .   .   B2  B3  .   .
        s3@1  .   .   .   F0  F1  .   .   F2  F3  .   .   .   .
              .   .   .   .   B0  B1  .   .   B2  B3  .   .   .

        s0@0  F0  F1  .   .   .   .   .   .   .   .   B0  W0  B1  W1  S=4, N=2, unit
        s1@1  .   F0  F1  .   .   .   .   .   .   B0  W0  B1  W1  .
        s2@0  .   .   F0  F1  .   B0  W0  .   B1  W1  .   .   .   .
        s3@1  .   .   .   F0  B0  W0  F1  B1  W1  .   .   .   .   .

    `num_stages` counts stages, and a device runs `num_chunks` = v of them, its *chunks*.
    Megatron-LM counts devices: its pipeline size 4 with two chunks per device is
    `interleaved(8, N)` here, which needs 4 devices.

    A device runs v D microbatches of one stage each in turn: D microbatches through its
    first stage, the same D through its second, and so on. Therefore D must divide N. A
    microbatch passes each device v times, and the bubble is that of v times smaller
    stages: in paired ticks (D - 1) / (v N + D - 1) of all time.

    *Paired* ticks hold a forward and then a whole backward of a device, mostly of different
    stages. The last stage runs both of a microbatch in one tick. *Overlapped* ticks are paired ones without that:
    every backward comes one tick later, as in `one_f_one_b`. *Unit* ticks hold one of
    forward, input gradient and weight gradient: first 2 (D - 1 - d) + (v - 1) D forwards of
    warm-up on device d, then F B W in turn. The bubble is smaller, 2 (D - 1) ticks of
    3 v N + 2 (D - 1), and no more activations are in flight than in paired ticks.

    Args:
      num_stages: S, a multiple of `num_chunks`. The schedule has D = S / num_chunks devices.
      num_microbatches: N, a multiple of D.
      num_chunks: v, stages per device, at least 1. With 1 it is `one_f_one_b` in time.
      ticks: "paired", "unit" or "overlapped".
      message_ticks: the ticks that messages take, see `jpipe.Schedule`: a number, or one for each boundary.

    Returns:
      A `Schedule` of T = v N + v D + D - 2 paired, one more overlapped, or 3 v N + 2 (D - 1) unit ticks. A tick
      is as long as an operation of one of S stages.

    Raises:
      ValueError: if a count is below 1, `num_chunks` does not divide `num_stages`, the
        number of devices does not divide `num_microbatches`, or `ticks` is none of the
        three, or `message_ticks` do not fit.

    Example:
      Four devices. The unit of time is an operation of one of 8 stages; 1F1B on 4 devices
      takes 66.

      >>> interleaved(8, 8).num_devices
      4
      >>> interleaved(8, 8).facts().makespan
      57
      >>> interleaved(8, 8, ticks="unit").facts().makespan
      54

    References:
      Narayanan et al., SC 2021, arXiv:2104.04473, section 2.2, and Megatron-LM's order.
    """
    raise_refusal(refusal(num_stages, num_microbatches, num_chunks, ticks))
    D = num_stages // num_chunks
    s, m = np.arange(num_stages), np.arange(num_microbatches)[:, None]
    d, chunk = s % D, s // D
    group = m // D * num_chunks * D + m % D
    # The position of every operation in its device's order of forwards, or of backwards.
    forward, backward = (group + D * c for c in (chunk, num_chunks - 1 - chunk))
    if ticks != "unit":
        later = int(ticks == "overlapped")
        arguments = dict(
            device=d,
            forward=forward + d,
            backward=num_chunks * D + backward + D - 2 - d + later,
        )
        return Schedule.from_ticks("interleaved", **with_message_ticks(arguments, message_ticks))

    count = num_chunks * num_microbatches  # forwards of a device

    def choose(d: int, ready: list[Job], progress: Progress) -> Job | None:
        num_forwards = progress.started("forward", d)
        num_backwards = progress.started("backward", d)
        warm_up = 2 * (D - 1 - d) + (num_chunks - 1) * D
        if progress.pending(d):
            kind, order, position = "weight_grad", backward, num_backwards - 1
        elif num_forwards < min(warm_up + 1 + num_backwards, count):
            kind, order, position = "forward", forward, num_forwards
        else:
            kind, order, position = "backward", backward, num_backwards
        due = (
            operation
            for operation in ready
            if operation.kind == kind and order[operation.microbatch, operation.stage] == position
        )
        return next(due, None)

    arguments = list_schedule(d.tolist(), num_microbatches, choose)
    return Schedule.from_ticks("interleaved", **with_message_ticks(arguments, message_ticks))
