"""The table of prediction."""

from collections.abc import Sequence

import numpy as np

from jpipe.schedule import Schedule, wrong_counts
from jpipe.schedules.arguments import raise_refusal


def refusal(
    num_stages: int,
    num_microbatches: int,
    stage: Sequence[int] | np.ndarray | None,
    device: Sequence[int] | np.ndarray | None,
) -> str | None:
    """Why `forward_only` refuses these counts and stages; `Schedule` checks the devices."""
    del device
    wrong = wrong_counts(num_stages=num_stages, num_microbatches=num_microbatches)
    if wrong or stage is None:
        return wrong
    stages = np.atleast_1d(stage).tolist()
    if sorted(stages) == list(range(num_stages)):
        return None
    return (
        f"`stage` must name each of the {num_stages} stages once, got {stages}: "
        "prediction runs one copy of each."
    )


def forward_only(
    num_stages: int,
    num_microbatches: int,
    stage: Sequence[int] | np.ndarray | None = None,
    device: Sequence[int] | np.ndarray | None = None,
) -> Schedule:
    """Forward only: prediction. `Pipeline` refuses it as a schedule of training.

        s0 F0 F1 F2 .          S=2, N=3; time runs right
        s1 .  F0 F1 F2

    A microbatch moves on by one stage per tick, on whichever device the stages are. Stages
    of one device share its ticks.

    Args:
      num_stages: S, at least 1.
      num_microbatches: N, at least 1.
      stage: `[S]`, the stage of each column, as in the table that trained. None: column
        c is stage c.
      device: `[S]`, the device of each column. None: one device per stage.

    Returns:
      A `Schedule` of T = N + S - 1 ticks. Every operation reads weight version 0.

    Raises:
      ValueError: if either count is below 1, or `stage` and `device` do not place every
        stage once.

    Example:
      Four stages on two devices, placed as by `interleaved`.

      >>> forward_only(4, 8, stage=[0, 1, 2, 3], device=[0, 1, 0, 1]).facts().makespan
      18
    """
    raise_refusal(refusal(num_stages, num_microbatches, stage, device))
    columns = np.arange(num_stages) if stage is None else np.atleast_1d(stage)
    return Schedule.from_ticks(
        "forward_only",
        forward=np.arange(num_microbatches)[:, None] + columns,
        stage=columns,
        device=device,
    )
