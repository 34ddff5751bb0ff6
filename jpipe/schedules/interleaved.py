"""Interleaved 1F1B: several stages a device, and a smaller bubble."""

import numpy as np

from jpipe.schedule import Schedule, check_counts
from jpipe.schedules.ready import Operation, Progress, place


def interleaved(
    num_stages: int, num_microbatches: int, num_chunks: int = 2, ticks: str = "paired"
) -> Schedule:
    """Interleaved 1F1B: device d runs the stages d, D + d, 2 D + d, ... of S.

        s0@0  F0  F1  .   .   F2  F3  .   .   .   .   .   .   .      S=4, N=4, paired;
              .   .   .   .   .   .   .   B0  B1  .   .   B2  B3     time runs right
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

    With v chunks a device, the devices take v D microbatches of a stage each in turn:
    D microbatches through their first stages, the same through their second, and so on,
    which needs D to divide N. A microbatch passes each device v times, and the bubble is
    that of v times smaller stages: (D - 1) / (v N + D - 1) of all time in paired ticks.

    *Paired* ticks hold a forward and a whole backward of a device, mostly of different
    stages. *Unit* ticks hold one of forward, input gradient and weight gradient: warm-up
    forwards first, 2 (D - 1 - d) + (v - 1) D on device d, then in turn F B W. The bubble
    is less, 2 (D - 1) ticks of 3 v N + 2 (D - 1), and so are the activations in flight.

    Args:
      num_stages: S, a multiple of `num_chunks`; there are D = S / num_chunks devices.
      num_microbatches: N, a multiple of D.
      num_chunks: v, stages a device, at least 1; with 1 it is `one_f_one_b`.
      ticks: "paired" or "unit".

    Returns:
      A `Schedule` of T = v N + v D + D - 1 paired or 3 v N + 2 (D - 1) unit ticks, each of
      which is the length of one of S stages.

    Raises:
      ValueError: if a count is below 1, `num_chunks` does not divide `num_stages`, or the
        devices do not divide `num_microbatches`, or `ticks` is neither of the two.

    Example: the makespans of 4 devices in times of one of 8 stages; 1F1B has 66
      >>> interleaved(8, 8).facts().makespan
      57
      >>> interleaved(8, 8, ticks="unit").facts().makespan
      54

    References:
      Narayanan et al., SC 2021, arXiv:2104.04473, section 2.2, and Megatron-LM's order.
    """
    check_counts(
        num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks
    )
    if num_stages % num_chunks:
        raise ValueError(
            f"`num_stages` of an interleaved schedule must be a multiple of `num_chunks`, got {num_stages} stages and "
            f"{num_chunks} chunks: every device has as many. Use {num_stages // num_chunks * num_chunks or num_chunks} "
            "stages, or other chunks."
        )
    D = num_stages // num_chunks
    if num_microbatches % D:
        raise ValueError(
            f"`num_microbatches` of an interleaved schedule must be a multiple of its {D} devices, got "
            f"{num_microbatches}: microbatches go through a device's stages in groups of {D}. Use "
            f"{-(-num_microbatches // D) * D}."
        )
    if ticks not in ("paired", "unit"):
        raise ValueError(f'`ticks` must be "paired" or "unit", got {ticks!r}.')

    s, m = np.arange(num_stages), np.arange(num_microbatches)[:, None]
    d, chunk = s % D, s // D
    group = m // D * num_chunks * D + m % D
    # Place in a device's order of forwards, and of backwards.
    forward, backward = (group + D * c for c in (chunk, num_chunks - 1 - chunk))
    if ticks == "paired":
        at = dict(
            device=d,
            forward=forward + d,
            backward=num_chunks * D + backward + D - 1 - d,
        )
        return Schedule.from_ticks("interleaved", **at)

    count = num_chunks * num_microbatches

    def choose(d: int, ready: list[Operation], progress: Progress):
        mine = progress.device == d
        begun, done = progress.forward[mine].sum(), progress.backward[mine].sum()
        if progress.pending(d):
            turn, order, position = "weight_grad", backward, done - 1
        elif begun < min(2 * (D - 1 - d) + (num_chunks - 1) * D + 1 + done, count):
            turn, order, position = "forward", forward, begun
        else:
            turn, order, position = "backward", backward, done
        due = (
            o
            for o in ready
            if o.kind == turn and order[o.microbatch, o.stage] == position
        )
        return next(due, None)

    at = place(d, num_microbatches, choose)
    return Schedule.from_ticks("interleaved", **at)
