"""What the stages of each device need, and what it allocates: the result of `Pipeline.memory_by_device`."""

from typing import NamedTuple

import numpy as np

from jpipe.memory._pipeline import timeline_of
from jpipe.program import Program

_USES = {
    "weights": ("weights", "version"),
    "optimizer": ("optimizer",),
    "gradients": ("gradient",),
    "activations": ("input stash", "weight stash", "split residual", "carry", "message"),
    "temporaries": ("temporary",),
}
"""Field of `DeviceMemory` -> the uses of blocks that it counts."""


class DeviceMemory(NamedTuple):
    """One row of `Pipeline.memory_by_device`: bytes that the stages of a device need, and bytes that it allocates.

    All devices run one program, so each allocates what the one with the largest stages needs. The needs are
    those of `Timeline.by_use`, each at the moment when it is largest.

    Attributes:
      device: a position along the axis "stage".
      stages: the stages that run on it.
      weights: all live versions.
      optimizer: the optimizer's state.
      gradients: the accumulators.
      activations: stashes and messages in flight.
      temporaries: what operations use while they run.
      needed: the most bytes that hold something at one moment, of all uses together.
      allocated: the bytes that the compiled step reserves.
    """

    device: int
    stages: tuple[int, ...]
    weights: int
    optimizer: int
    gradients: int
    activations: int
    temporaries: int
    needed: int
    allocated: int


def device_memory(program: Program) -> list[DeviceMemory]:
    """One record per device. See `Pipeline.memory_by_device`."""
    compiled, schedule = program.lower().compile(), program.settings.schedule
    records = []
    for device in range(schedule.num_devices):
        timeline = timeline_of(program, compiled, device)
        by_use = timeline.by_use()
        none = np.zeros(1, int)
        needs = {field: int(sum((by_use.get(use, none) for use in uses), none).max()) for field, uses in _USES.items()}
        stages = tuple(sorted({int(s) for s in schedule.stage[schedule.device == device]}))
        records.append(DeviceMemory(device, stages, **needs, needed=timeline.peak_used, allocated=timeline.peak))
    return records
