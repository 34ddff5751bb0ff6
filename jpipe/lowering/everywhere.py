"""Operations that all devices run together, in the ticks in which one stage runs an operation of the table.

Letters: T ticks, D devices.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jpipe.lowering.operations import Operations
from jpipe.schedule import Schedule


class Follows(NamedTuple):
    """The time at which all devices run an operation.

    Attributes:
      operation: the operation of the table that it follows: "forward", "backward" or "update".
      home: the stage whose operation it is.
    """

    operation: str
    home: int


def ticks_before_update(schedule: Schedule, cells: np.ndarray, home: int) -> int:
    """Number of ticks from a stage's first microbatch of a minibatch to its update with the minibatch before; negative
    if the update comes first.

    Args:
      schedule: the table, which is always full.
      cells: int `[N, C]`, the ticks of forwards, or of backwards.
      home: the stage.
    """
    updated = int(schedule.update_ticks()[schedule.column_of_stage[home]])
    return updated - int(schedule.by_stage(cells)[0, home]) - schedule.num_ticks


def head_after_update(schedule: Schedule) -> bool:
    """Returns whether a head that all devices run comes after the update of a tick, and not before the backward.

    It takes its gradient in the tick of its forward. Where the last stage begins a minibatch in the tick in which it
    updates with the one before, this gradient belongs to the next update. The weights of the forward are still there,
    because a backward in a later tick reads them.
    """
    if schedule.drains or schedule.forward_only:
        return False
    return ticks_before_update(schedule, schedule.forward_ticks(), -1) == 0


def everywhere(operations: Mapping[str, Operations], together: Mapping[str, Follows]) -> dict[str, Operations]:
    """Operations on all devices, one lane each.

    On every device they have the scalars of the home's operation: its microbatch, version and slots.

    Args:
      operations: the operations of the table.
      together: name of each operation -> the operation that it follows. Those that the table never runs are left out.
    """
    return {
        name: _on_all_devices(operations[follows.operation], follows.home)
        for name, follows in together.items()
        if operations[follows.operation].num_lanes
    }


def _on_all_devices(operations: Operations, home: int) -> Operations:
    T, D, _ = operations.stage.shape
    fields = {f.name: np.zeros((T, D, 1), np.int32) for f in dataclasses.fields(operations)}
    fields["stage"] -= 1
    for t, d, lane in np.argwhere(operations.stage == home):
        for name, values in fields.items():
            values[t, :, 0] = getattr(operations, name)[t, d, lane]
    return dataclasses.replace(operations, **fields)
