"""One program for each device, which waits for its inputs alone.

Letters: S stages, s a stage; D devices, d a device; C columns, c a column; N microbatches,
m a microbatch; T ticks, t a tick.
"""

import dataclasses

import numpy as np

from jpipe.schedule import IDLE, Schedule
from jpipe.simulate.costs import TRANSFERS, Costs, Timing
from jpipe.simulate.times import message_times, operation_ticks, timing_of_times


def dependencies(schedule: Schedule, length: dict, costs: Costs) -> Timing:
    """Simulates one operation after the other in the table's order, each as early as it can start."""
    S, N, T = schedule.num_stages, schedule.num_microbatches, schedule.num_ticks
    ticks = operation_ticks(schedule)
    message = {k: message_times(schedule, k, length) for k in ticks if k in TRANSFERS}
    # An asynchronous table starts here with an empty pipeline, so it runs for many times
    # as long as a microbatch is on its way. The later half is the steady state.
    num_rounds = half = 1
    if not schedule.synchronous:
        half = 4 * max(int(kind_ticks.max()) // T + 1 for kind_ticks in ticks.values())
        num_rounds = 2 * half
    columns, C = schedule.column_of_microbatch, schedule.num_columns
    kinds = list(ticks)
    order = sorted(
        (int(kind_ticks[m, c]) + r * T, k, int(c), m + r * N)
        for k, kind_ticks in enumerate(ticks.values())
        for m, c in np.argwhere(kind_ticks != IDLE).tolist()
        for r in range(num_rounds)
    )
    updates = sorted(
        (int(tick) + r * T, s)
        for ticks_of_stages in schedule.update_ticks_of_round()[:, schedule.column_of_stage]
        for s, tick in enumerate(ticks_of_stages)
        if tick != IDLE
        for r in range(num_rounds)
    )[::-1]
    start = {kind: np.full((num_rounds * N, C), np.nan) for kind in kinds}
    end = {kind: times.copy() for kind, times in start.items()}
    free = np.zeros(schedule.num_devices)  # from when on each device can start

    def update(until: int) -> None:
        """Runs the updates of the ticks before `until`."""
        while updates and updates[-1][0] < until:
            _, s = updates.pop()
            devices = list(schedule.copies[s])  # they wait for each other's gradients
            column = schedule.column_of_stage[s]
            free[devices] = free[devices].max() + length["update"][column]

    for t, k, c, m in order:  # every operation comes after its inputs
        update(t)
        kind, s, device = kinds[k], int(schedule.stage[c]), schedule.device[c]
        inputs = [0.0]
        if kind == "forward" and s > 0:
            source = columns[m % N, s - 1]
            inputs.append(end[kind][m, source] + message[kind][m % N, source])
        elif kind == "backward":
            inputs.append(end["forward"][m, c])
            if s < S - 1:
                source = columns[m % N, s + 1]
                inputs.append(end[kind][m, source] + message[kind][m % N, source])
        elif kind == "weight_grad":
            inputs.append(end["backward"][m, c])
        start[kind][m, c] = max(free[device], *inputs)
        end[kind][m, c] = free[device] = start[kind][m, c] + length[kind][c]
    if schedule.synchronous:
        update(T)
        return timing_of_times(schedule, length, costs, free.max(), start, end)
    last_end = max(np.nanmax(times[-N:]) for times in end.values())
    middle_end = max(np.nanmax(times[half * N - N : half * N]) for times in end.values())
    last_start = {kind: times[-N:] for kind, times in start.items()}
    offset = np.nanmin(last_start["forward"][:, columns[0, 0]])
    timing = timing_of_times(
        schedule,
        length,
        costs,
        (last_end - middle_end) / half,
        {kind: times - offset for kind, times in last_start.items()},
        {kind: times[-N:] - offset for kind, times in end.items()},
    )
    # The pipeline may drain faster than it fills, but no round is shorter than its work.
    makespan = max(timing.makespan, timing.busy.max())
    span = np.full(schedule.num_devices, makespan)
    return dataclasses.replace(timing, makespan=float(makespan), span=span)
