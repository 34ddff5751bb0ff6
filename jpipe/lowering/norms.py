"""The gradients of other stages that an update counts in norms over all stages.

Stages of an asynchronous table update at different ticks. An update of version v counts the gradient of every
stage that the stage has applied last by the end of that tick, but never one of a version after v. So the norm is
that of one minibatch, as far as it is known.

Letters: T ticks, S stages.
"""

import dataclasses

import numpy as np

from jpipe.lowering.joint_updates import joint_updates
from jpipe.schedule import IDLE, Schedule


@dataclasses.dataclass(frozen=True)
class NormTable:
    """The entries of a table for norms over all stages.

    Attributes:
      offset: int `[S, S]`, at most 0: an update of version v of stage i counts the gradient of version v + offset[i, j]
        of stage j.
      together: bool `[S, S]`, whether the updates of version v of stages i and j are in one tick. Then a gradient that
        is not finite on one makes both skip their updates.
      depth: number of versions whose squared norm is kept.
      reporter: int `[T]`, the stage whose norm is reported of each tick, -1 where nothing updates.
    """

    offset: np.ndarray
    together: np.ndarray
    depth: int
    reporter: np.ndarray


def norm_table(schedule: Schedule) -> NormTable:
    """The norms of a table that trains. A table that emulates another has the norms of the other."""
    model = joint_updates(schedule.emulates or schedule)
    newest = _newest(model)
    offset = np.minimum(newest - 1, 0)
    update_ticks = model.update_ticks()[model.column_of_stage]
    order = update_ticks % model.num_ticks
    reporter = np.full(schedule.num_ticks, -1)
    for t in np.flatnonzero((schedule.update != IDLE).any(axis=1)):
        stages = np.unique(schedule.stage[schedule.update[t] != IDLE])
        reporter[t] = max(stages.tolist(), key=lambda s: (order[s], s))
    return NormTable(
        offset=offset,
        together=update_ticks[:, None] == update_ticks[None],
        depth=int((_newest(schedule) - 1 - offset).max()) + 1,
        reporter=reporter,
    )


def _newest(schedule: Schedule) -> np.ndarray:
    """The newest version of stage j by the end of the tick in which stage i writes version 1, int `[S, S]`."""
    written = schedule.update_ticks()[schedule.column_of_stage]
    return (written[:, None] - written[None]) // schedule.num_ticks + 1
