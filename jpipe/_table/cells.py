"""The cells of a table: the value of an idle cell, and the fields that hold cells."""

import numpy as np

IDLE = int(np.iinfo(np.int32).min)
"""The value of a cell whose column has nothing to do. Negative numbers are microbatches
of earlier rounds, so it is the least int32."""

CELL_FIELDS = (
    "forward",
    "backward",
    "weight_grad",
    "forward_version",
    "backward_version",
    "update",
)
"""The fields of a `Schedule` of shape `[T, C]`."""


def idle_cells(num_ticks: int, num_columns: int) -> dict[str, np.ndarray]:
    """The cell fields of a table in which nothing happens, each int64 `[T, C]`."""
    shape = (num_ticks, num_columns)
    return {field: np.full(shape, IDLE, np.int64) for field in CELL_FIELDS}
