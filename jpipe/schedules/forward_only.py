"""The table of prediction."""

from collections.abc import Sequence

import numpy as np

from jpipe._table.counts import wrong_counts
from jpipe._table.messages import MessageTicks
from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.schedule import Schedule
from jpipe.schedules.arguments import raise_refusal
from jpipe.schedules.copies import in_groups
from jpipe.schedules.message_ticks import with_message_ticks


def refusal(
    num_stages: int,
    num_microbatches: int,
    stage: Sequence[int] | np.ndarray | None,
    device: Sequence[int] | np.ndarray | None,
) -> str | None:
    """The reason why `forward_only` refuses these counts and stages; `Schedule` checks the devices."""
    del device
    wrong = wrong_counts(num_stages=num_stages, num_microbatches=num_microbatches)
    if wrong or stage is None:
        return wrong
    stages = np.atleast_1d(stage).tolist()
    if sorted(set(stages)) == list(range(num_stages)):
        return None
    return (
        f"`stage` must name each of the {num_stages} stages once, or once for each of its "
        f"columns, got {shown(stages)}: prediction runs all stages."
    )


@suggests
def forward_only(
    num_stages: int,
    num_microbatches: int,
    stage: Sequence[int] | np.ndarray | None = None,
    device: Sequence[int] | np.ndarray | None = None,
    *,
    message_ticks: MessageTicks = 1,
) -> Schedule:
    """Forward only: prediction. `Pipeline` refuses it as a schedule of training.

        s0 F0 F1 F2 .          S=2, N=3; time runs right
        s1 .  F0 F1 F2

    A microbatch moves on by one stage per tick, on whichever device the stages are. Stages
    of one device share its ticks. If one device has all stages, one microbatch follows the
    other, and a tick has one stage.

    Args:
      num_stages: S, at least 1.
      num_microbatches: N, at least 1.
      stage: `[C]`, the stage of each column, as in the table that trained. None: column
        c is stage c.
      device: `[C]`, the device of each column. None: one device per stage. A stage on several
        devices has a copy on each of them, and its microbatches take turns.
      message_ticks: the ticks that messages take, see `jpipe.Schedule`: a number, or one for each boundary.

    Returns:
      A `Schedule` of T = N + S - 1 ticks, on one device N S; with copies, see `gpipe` for N.
      Every operation reads weight version 0.

    Raises:
      ValueError: if either count is below 1, `stage` and `device` do not place every
        stage, or `message_ticks` do not fit.

    Example:
      Four stages on two devices, placed as by `interleaved`.

      >>> forward_only(4, 8, stage=[0, 1, 2, 3], device=[0, 1, 0, 1]).facts().makespan
      18
    """
    raise_refusal(refusal(num_stages, num_microbatches, stage, device))
    columns = np.arange(num_stages) if stage is None else np.atleast_1d(stage)
    if len(columns) == num_stages:
        one_device = device is not None and len(set(np.atleast_1d(device).tolist())) == 1
        ticks_apart = num_stages if one_device else 1
        line: dict = dict(
            forward=ticks_apart * np.arange(num_microbatches)[:, None] + columns,
            stage=columns,
            device=device,
        )
        return Schedule.from_ticks("forward_only", **with_message_ticks(line, message_ticks))
    devices = columns if device is None else np.atleast_1d(device)
    pairs = dict.fromkeys(zip(columns.tolist(), devices.tolist(), strict=True))
    copies = [[d for s, d in pairs if s == t] for t in range(num_stages)]

    def ticks(N: int) -> dict:
        return dict(forward=np.arange(N)[:, None] + np.arange(num_stages))

    arguments = in_groups(ticks, num_microbatches, copies)
    return Schedule.from_ticks("forward_only", **with_message_ticks(arguments, message_ticks))
