"""What both ways to simulate a table need of it.

Letters: S stages, s a stage; D devices, d a device; C columns, c a column; N microbatches,
m a microbatch; T ticks, t a tick.
"""

import itertools
from typing import Any

import numpy as np

from jpipe.schedule import IDLE, Schedule
from jpipe.simulate.costs import EXCHANGES, SUMS, TRANSFERS, Costs, Timing


def operation_ticks(schedule: Schedule) -> dict[str, np.ndarray]:
    """Kind -> `[N, C]`, absolute tick of each operation, for the kinds in the table."""
    kinds = {"forward": schedule.forward_ticks()}
    if not schedule.forward_only:
        kinds["backward"] = schedule.backward_ticks()
    if schedule.splits_backward:
        kinds["weight_grad"] = schedule.weight_grad_ticks()
    return kinds


def timing_of_times(
    schedule: Schedule,
    length: Any,
    costs: Costs,
    makespan: float,
    start: Any,
    end: Any,
) -> Timing:
    """A `Timing` from the makespan and the times of all operations."""
    D = schedule.num_devices
    span = np.full(D, makespan, float)
    if schedule.synchronous:
        for d in range(D):
            on_device = schedule.device == d
            first = min(np.nanmin(times[:, on_device]) for times in start.values())
            last = max(np.nanmax(times[:, on_device]) for times in end.values())
            span[d] = last - first
    updates = first_updates(schedule).sum(axis=0)
    in_column = (schedule.forward != IDLE).sum(axis=0)
    busy = in_column * sum(length[kind] for kind in start) + updates * length["update"]
    sent = sum(message_times(schedule, kind, length).sum(axis=0) for kind in start if kind in TRANSFERS)
    cores = costs.num_cores
    return Timing(
        float(makespan),
        np.bincount(schedule.device, busy, D),
        np.bincount(schedule.device, sent, D),
        span,
        start,
        end,
        D if cores is None else min(D * costs.cores_per_device, cores),
        exchange=np.bincount(
            schedule.device, in_column * sum(length[EXCHANGES[kind]] + length[SUMS[kind]] for kind in start), D
        ),
        exposed=np.zeros(D),
    )


def message_times(schedule: Schedule, kind: str, length: dict) -> np.ndarray:
    """`[N, C]`, the time of the message of a microbatch; 0 if the column sends none."""
    between = length[TRANSFERS[kind]][schedule.stage - (kind == "backward")]
    return np.where(leaves_device(schedule, kind), between, 0.0)


def first_updates(schedule: Schedule) -> np.ndarray:
    """bool `[T, C]`, the updates; of several columns of a copy, in the first."""
    updates = schedule.update != IDLE
    first = [c for c, *_ in itertools.chain(*schedule.columns_of_copies)]
    others = np.isin(np.arange(schedule.num_columns), first, invert=True)
    return updates & ~others


def leaves_device(schedule: Schedule, kind: str) -> np.ndarray:
    """bool `[N, C]`: whether the result of an operation goes to another device."""
    device_of_stage = schedule.device[schedule.column_of_microbatch]  # [N, S]
    reader = schedule.stage + (1 if kind == "forward" else -1)
    exists = (0 <= reader) & (reader < schedule.num_stages)
    reader = np.clip(reader, 0, schedule.num_stages - 1)
    runs = schedule.forward_ticks() != IDLE
    return runs & exists & (device_of_stage[:, reader] != schedule.device)
