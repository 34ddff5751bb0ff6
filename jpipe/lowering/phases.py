"""Phases of a table: runs of ticks that share one compiled loop.

Letters: T ticks.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from jpipe.lowering.lower import Operations


class Phase(NamedTuple):
    """Consecutive ticks that share one compiled loop.

    Attributes:
      start: the first tick.
      stop: the tick after the last.
      operations: names of the operations that any device runs in these ticks.
      always_updates: whether some device updates in every tick, so that the host need not decide.
    """

    start: int
    stop: int
    operations: tuple[str, ...]
    always_updates: bool


def find_phases(
    operations: Mapping[str, "Operations"], guard: str
) -> tuple[Phase, ...]:
    """The phases of a table.

    Under the policy "cond" the table is one phase. An update is a collective operation, and on GPUs
    the host decides in every tick whether it runs. Under the policy "switch" the ticks before the
    first update and those after the last update are therefore phases without updates.

    Args:
      operations: name -> operations, `[T, D, lanes]`.
      guard: one of `GUARDS`.
    """
    runs: dict[str, np.ndarray] = {
        name: np.any(o.stage >= 0, axis=(1, 2)) for name, o in operations.items()
    }
    num_ticks = len(runs["forward"])
    bounds = {0, num_ticks}
    updates = np.flatnonzero(runs["update"])
    if guard == "switch" and len(updates):
        bounds |= {int(updates[0]), int(updates[-1]) + 1}
    ordered = sorted(bounds)
    return tuple(
        Phase(
            start,
            stop,
            tuple(name for name, ticks in runs.items() if ticks[start:stop].any()),
            guard == "switch" and bool(runs["update"][start:stop].all()),
        )
        for start, stop in zip(ordered, ordered[1:])
    )
