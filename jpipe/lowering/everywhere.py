"""Operations that all devices run together, in the ticks in which one stage runs one of its own.

Letters: T ticks, D devices.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from jpipe.lowering.lower import Operations


class Follows(NamedTuple):
    """When all devices run an operation.

    Attributes:
      operation: the operation of the table that it follows: "forward", "backward" or "update".
      home: the stage whose operation it is.
    """

    operation: str
    home: int


def everywhere(
    operations: Mapping[str, "Operations"], together: Mapping[str, Follows]
) -> dict[str, "Operations"]:
    """Operations on all devices, one lane each.

    On every device they have the scalars of the home's operation: its microbatch, version and slots.

    Args:
      operations: of the table.
      together: name of each operation -> what it follows. Those that the table never runs are left out.
    """
    return {
        name: _on_all_devices(operations[follows.operation], follows.home)
        for name, follows in together.items()
        if operations[follows.operation].num_lanes
    }


def _on_all_devices(operations: "Operations", home: int) -> "Operations":
    T, D, _ = operations.stage.shape
    fields = {
        f.name: np.zeros((T, D, 1), np.int32) for f in dataclasses.fields(operations)
    }
    fields["stage"] -= 1
    for t, d, lane in np.argwhere(operations.stage == home):
        for name, values in fields.items():
            values[t, :, 0] = getattr(operations, name)[t, d, lane]
    return dataclasses.replace(operations, **fields)
