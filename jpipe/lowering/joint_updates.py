"""The ticks of updates in synchronous tables."""

import dataclasses

import numpy as np

from jpipe.schedule import IDLE, Schedule


def joint_updates(schedule: Schedule) -> Schedule:
    """Moves all updates of a synchronous table to the tick of the last one. Another table stays as it is.

    A norm over all stages, and a weight that stages share, need the gradients of all stages. A table may update a stage
    before another stage has its gradient. A synchronous table reads the new weights in the next round at the earliest,
    so no other number depends on the tick.
    """
    if not schedule.synchronous or schedule.forward_only:
        return schedule
    update = np.full_like(schedule.update, IDLE)
    update[schedule.update_ticks().max()] = 1
    return dataclasses.replace(schedule, update=update)
