"""The gradients of other stages that an update counts in norms over all stages.

Stages of an asynchronous table update at different ticks. An update counts the gradient of every stage that the stage
has applied last by the end of that tick, but never one with a microbatch after those of the update. So the norm is that
of one minibatch, as far as it is known.

Letters: T ticks, S stages, U the largest number of updates of a stage in a round.
"""

import dataclasses

import numpy as np

from jpipe.lowering.joint_updates import joint_updates
from jpipe.schedule import IDLE, Schedule, newest_version


@dataclasses.dataclass(frozen=True)
class NormTable:
    """The entries of a table for norms over all stages.

    Attributes:
      offset: int `[U, S, S]`, at most 0 where U is 1: with u_i and u_j updates of the stages i and j in a round, the
        update of version 1 + n + u_i k of stage i counts the gradient of version 1 + n + offset[n, i, j] + u_j k of
        stage j.
      together: bool `[U, S, S]`, whether that version of stage j is written in the same tick. Then a gradient that
        is not finite on one makes both skip their updates.
      depth: number of versions whose squared norm is kept.
      reporter: int `[T]`, the stage whose norm is reported of each tick, -1 where nothing updates.
      updates: int `[S]`, u of each stage.
    """

    offset: np.ndarray
    together: np.ndarray
    depth: int
    reporter: np.ndarray
    updates: np.ndarray


def norm_table(schedule: Schedule) -> NormTable:
    """The norms of a table that trains. A table that emulates another has the norms of the other."""
    model = joint_updates(schedule.emulates or schedule)
    written, period = _written(model), model.microbatches_per_update
    updates = model.updates_in_round
    number = np.arange(len(written))[:, None, None]
    # The newest version of stage j with no microbatch after those of version 1 + n of stage i.
    counted = np.minimum(_newest(model), (number + 1) * period[:, None] // period)
    k, i = np.divmod(counted - 1, updates)
    ticks = written[i, np.arange(model.num_stages)] + model.num_ticks * k
    order = written[0] % model.num_ticks
    reporter = np.full(schedule.num_ticks, -1)
    for t in np.flatnonzero((schedule.update != IDLE).any(axis=1)):
        stages = np.unique(schedule.stage[schedule.update[t] != IDLE])
        reporter[t] = max(stages.tolist(), key=lambda s: (order[s], s))
    exists = written[:, :, None] != IDLE
    return NormTable(
        offset=np.where(exists, counted - 1 - number, 0),
        together=exists & (ticks == written[:, :, None]),
        depth=int((_newest(schedule) - counted)[exists[..., 0]].max()) + 1,
        reporter=reporter,
        updates=updates,
    )


def _written(schedule: Schedule) -> np.ndarray:
    """The absolute ticks that write the versions 1 .. U of each stage, int `[U, S]`; `IDLE` where there are fewer."""
    return schedule.update_ticks_of_round()[:, schedule.column_of_stage]


def _newest(schedule: Schedule) -> np.ndarray:
    """The newest version of stage j by the end of the tick in which stage i writes version 1 + n, int `[U, S, S]`."""
    written = _written(schedule)
    return newest_version(written[:, :, None] + 1, written, schedule.num_ticks)
