"""A schedule for other programs: facts and table as JSON, a simulated step as a trace."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

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
    origin = min(np.nanmin(starts) for starts in timing.start.values())
    slices = [
        Slice(
            int(schedule.device[c]),
            f"{KINDS[field].letter}{m}",
            field,
            float(starts[m, c] - origin) * unit,
            float(timing.end[field][m, c] - starts[m, c]) * unit,
            {"microbatch": m, "stage": int(schedule.stage[c])},
        )
        for field, starts in timing.start.items()
        for m, c in np.argwhere(~np.isnan(starts)).tolist()
    ]
    return trace_events({d: f"device {d}" for d in range(schedule.num_devices)}, slices)


class Slice(NamedTuple):
    """A slice of a trace: row, name, category, start and length in microseconds, and what a click on it shows."""

    row: int
    name: str
    category: str
    start: float
    length: float
    args: Mapping[str, Any]


def trace_events(rows: Mapping[int, str], slices: Iterable[Slice]) -> dict[str, Any]:
    """A tree for JSON in the trace event format, which Perfetto and chrome://tracing open.

    Args:
      rows: number of a row -> its name.
      slices: the slices.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}} for row, name in rows.items()
    ]
    for row, name, category, start, length, args in slices:
        events.append(
            {
                "ph": "X",
                "name": name,
                "cat": category,
                "pid": 0,
                "tid": row,
                "ts": start,
                "dur": length,
                "args": dict(args),
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
