"""The table of prediction."""

from collections.abc import Sequence

import numpy as np

from jpipe.schedule import Schedule, check_counts


def forward_only(
    num_stages: int,
    num_microbatches: int,
    stage: Sequence[int] | None = None,
    device: Sequence[int] | None = None,
) -> Schedule:
    """Forward only: nothing is trained.

        s0 F0 F1 F2 .          S=2, N=3; time runs right
        s1 .  F0 F1 F2

    A microbatch moves on one stage a tick, wherever the stages are; stages that share a
    device share its ticks.

    Args:
      num_stages: S, at least 1.
      num_microbatches: N, at least 1.
      stage: `[S]`, the stage of each column, as in the table that trained. None: column
        c is stage c.
      device: `[S]`, the device of each column. None: one device a stage.

    Returns:
      A `Schedule` of T = N + S - 1 ticks; every version read is 0.

    Raises:
      ValueError: if either count is below 1, or `stage` and `device` do not place every
        stage once.

    Example: four stages on two devices, as interleaving places them.
      >>> forward_only(4, 8, stage=[0, 1, 2, 3], device=[0, 1, 0, 1]).facts().makespan
      18
    """
    check_counts(num_stages=num_stages, num_microbatches=num_microbatches)
    placed = np.arange(num_stages) if stage is None else np.atleast_1d(stage)
    if sorted(placed.tolist()) != list(range(num_stages)):
        raise ValueError(
            f"`stage` must name each of the {num_stages} stages once, got "
            f"{placed.tolist()}: prediction runs one copy of each."
        )
    return Schedule.from_ticks(
        "forward_only",
        forward=np.arange(num_microbatches)[:, None] + placed,
        stage=placed,
        device=device,
    )
