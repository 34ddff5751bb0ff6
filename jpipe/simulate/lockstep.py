"""One program on all devices: tick after tick.

Letters: S stages, s a stage; D devices, d a device; C columns, c a column; N microbatches,
m a microbatch; T ticks, t a tick.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jpipe.schedule import IDLE, Schedule
from jpipe.simulate.costs import COLLECTIVES, EXCHANGES, SUMS, TRANSFERS, Costs, Timing
from jpipe.simulate.times import first_updates, leaves_device, message_times, operation_ticks, timing_of_times


def lockstep(schedule: Schedule, length: dict, costs: Costs) -> Timing:
    """Tick after tick: compute, then messages, then updates."""
    T, D = schedule.num_ticks, schedule.num_devices
    work, updates = np.zeros((2, T, D))
    transfer, crossing = np.zeros((2, T))
    sends = np.zeros(T, bool)
    begins = {}
    # NumPy's type of `add.at` does not know tuples.
    every_device: Any = (slice(None), schedule.device)
    for kind in operation_ticks(schedule):
        runs = getattr(schedule, kind) != IDLE
        begins[kind] = work[:, schedule.device].copy()
        np.add.at(work, every_device, runs * length[kind])
        if kind in TRANSFERS:
            sent, longest = _transfers(schedule, kind, length)
            sends |= sent.any(axis=0)
            transfer, crossing = np.maximum((transfer, crossing), longest)
    updating = first_updates(schedule)
    np.add.at(updates, every_device, updating * length["update"])
    waits = sends + (updating.any(axis=1) & (D > 1)).astype(int)
    transfer += costs.tick * waits
    clock, clock_of_updates = _clock(work, costs), _clock(updates, costs)
    tick_length = np.zeros(T)
    exposed = np.zeros((T, D))
    if any(length[name].any() for name in COLLECTIVES):
        exposed = _exposed(schedule, length, costs.overlaps)
        transfer += (work + exposed).max(axis=1) - work.max(axis=1)
    for clock_of, amount in ((clock, work), (clock_of_updates, updates)):
        computing = clock_of(np.arange(T), amount.max(axis=1))
        tick_length += computing
        transfer += costs.jitter * computing * ((amount > 0).sum(axis=1) > 1)
    transfer = np.maximum(transfer, crossing - tick_length)
    tick_length += transfer
    tick_start = np.concatenate([[0.0], np.cumsum(tick_length)])
    makespan = tick_start[-1]
    start, end = {}, {}
    for kind, ticks in operation_ticks(schedule).items():
        rounds, t = np.divmod(ticks, T)
        before = np.take_along_axis(begins[kind], t, axis=0)
        tick = rounds * makespan + tick_start[t]
        start[kind] = tick + clock(t, before)
        end[kind] = tick + clock(t, before + length[kind])
        if schedule.has_copies:  # another column of the stage runs the microbatch
            for times in (start[kind], end[kind]):
                times[ticks == IDLE] = np.nan
    timing = timing_of_times(schedule, length, costs, makespan, start, end)
    return dataclasses.replace(timing, communicating=float(transfer.sum()), exposed=exposed.sum(axis=0))


def _exposed(schedule: Schedule, length: dict, overlaps: bool) -> np.ndarray:
    """`[T, D]`, the time that a device waits for the collectives of its layers.

    Those of one pass lie under what the device computes in the other pass, if that is of another microbatch or stage,
    and if the devices overlap them at all.
    """
    shape = schedule.num_ticks, schedule.num_devices
    compute = {name: np.zeros(shape) for name in ("forward", "backward")}
    exchange = {name: np.zeros(shape) for name in compute}
    sums = np.zeros(shape)
    depends = np.full(shape, not overlaps)
    for kind in operation_ticks(schedule):
        runs = getattr(schedule, kind) != IDLE
        name = "forward" if kind == "forward" else "backward"
        for t, c in np.argwhere(runs).tolist():
            d = schedule.device[c]
            compute[name][t, d] += length[kind][c]
            exchange[name][t, d] += length[EXCHANGES[kind]][c]
            sums[t, d] += length[SUMS[kind]][c]
            depends[t, d] |= kind == "backward" and schedule.forward[t, c] == schedule.backward[t, c]
    covered = {name: np.where(depends, 0.0, compute[other]) for name, other in zip(compute, reversed(compute))}
    return np.maximum([exchange[name] - covered[name] for name in compute], 0.0).sum(axis=0) + sums


def _clock(work: np.ndarray, costs: Costs) -> Callable:
    """A function `(ticks, amounts of work) -> time from the tick's start until they are done`.

    Devices that share cores compute at the same speed, so the least busy device finishes
    first, and the others then share its cores. The speed of all is therefore a step
    function of the work done.

    Args:
      work: `[T, D]`, the work of every device in every tick, in time on one core.
      costs: the number of cores.
    """
    T, D = work.shape
    if costs.num_cores is None:
        steps, speed = work.max(axis=1, keepdims=True), np.ones(1)
    else:
        steps, still_busy = np.sort(work, axis=1), np.arange(D, 0, -1)
        speed = np.minimum(costs.cores_per_device, costs.num_cores / still_busy)
    steps = np.concatenate([np.zeros((T, 1)), steps], axis=1)

    def clock(t: np.ndarray, amount: np.ndarray) -> np.ndarray:
        at_each_speed = np.clip(amount[..., None] - steps[t, :-1], 0, np.diff(steps)[t])
        return (at_each_speed / speed).sum(axis=-1)

    return clock


def _transfers(schedule: Schedule, kind: str, length: dict) -> tuple[np.ndarray, np.ndarray]:
    """`[2, T]`: whether messages travel in a tick, and the time until all have arrived.

    First those that leave when all devices have computed, then those that left when the tick began. The messages that a
    copy of a stage sends or receives in one tick follow each other.
    """
    T, N = schedule.num_ticks, schedule.num_microbatches
    message, leaves = message_times(schedule, kind, length), leaves_device(schedule, kind)
    cells = getattr(schedule, kind)
    sends, seconds = np.zeros((2, T), bool), np.zeros((2, T))
    busy: dict[tuple, float] = {}
    for t, c in np.argwhere(cells != IDLE).tolist():
        m = int(cells[t, c]) % N
        if not leaves[m, c]:
            continue
        reader = int(schedule.stage[c]) + (1 if kind == "forward" else -1)
        target = schedule.column_of_microbatch[m, reader]
        crosses = bool(schedule.ticks_between(schedule.device[c], schedule.device[target]) > 1)
        at = int(crosses), (t + crosses) % T
        sends[at] = True
        for end, column in (("sends", c), ("receives", target)):
            key = *at, end, int(schedule.stage[column]), int(schedule.device[column])
            busy[key] = busy.get(key, 0.0) + message[m, c]
            seconds[at] = max(seconds[at], busy[key])
    return sends, seconds
