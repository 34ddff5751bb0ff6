"""A schedule for other programs: facts and table as JSON, a simulated step as a trace."""

from typing import Any

import numpy as np

from jpipe.draw._shared import KINDS
from jpipe.schedule import Schedule
from jpipe.simulate import Timing


def summary(schedule: Schedule) -> dict[str, Any]:
    """The facts and the table of a schedule, as numbers, lists and None for JSON.

    Args:
      schedule: a legal schedule.

    Returns:
      The entries of `Facts.to_dict`, and "table", that of `Schedule.to_dict`.

    Raises:
      ValueError: if the schedule is not legal.

    Example:
      >>> from jpipe.schedules import gpipe
      >>> summary(gpipe(4, 8))["makespan"]
      33
    """
    return {**schedule.facts().to_dict(), "table": schedule.to_dict()}


def trace(schedule: Schedule, timing: Timing, unit: float = 1e3) -> dict[str, Any]:
    """A simulated step as a trace that Perfetto and chrome://tracing open.

    Args:
      schedule: a legal schedule.
      timing: its times, from `jpipe.simulate.simulate`.
      unit: microseconds per unit of the times.

    Returns:
      A tree for JSON, with one row per device and one slice per operation.
    """
    events: list[dict[str, Any]] = [
        {
            "ph": "M",
            "name": "thread_name",
            "pid": 0,
            "tid": d,
            "args": {"name": f"device {d}"},
        }
        for d in range(schedule.num_devices)
    ]
    origin = min(np.nanmin(starts) for starts in timing.start.values())
    for field, starts in timing.start.items():
        for m, c in np.argwhere(~np.isnan(starts)).tolist():
            slice_ = {
                "ph": "X",
                "name": f"{KINDS[field].letter}{m}",
                "cat": field,
                "pid": 0,
                "tid": int(schedule.device[c]),
                "ts": float(starts[m, c] - origin) * unit,
                "dur": float(timing.end[field][m, c] - starts[m, c]) * unit,
                "args": {"microbatch": m, "stage": int(schedule.stage[c])},
            }
            events.append(slice_)
    return {"traceEvents": events, "displayTimeUnit": "ms"}
