"""The trace of some steps: the result of `Pipeline.trace`."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jpipe._util.foreign import read_json, shown
from jpipe.draw.gantt import (
    BAR_KINDS,
    SUFFIXES,
    Bar,
    Chart,
    Slice,
    chart_legend,
    chart_text,
    charts_figure,
    trace_events,
    write,
)
from jpipe.trace._cells import NOT_WORK, Cell, Execution

PERFETTO = ".perfetto.json"
"""The end of the name of a file for Perfetto."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """What every device has done in some steps, and when.

    All times are in seconds since the first step began. The devices of one machine have one clock, those of several
    have none in common, so each process has a trace of its own devices.

    Attributes:
      cells: the cells of every step and device, by start: each operation of the table once, the messages and the
        updates, and between them "idle" cells. What all devices enter together, such as a message or an update, begins
        when the last device that takes part has entered it; the wait before is idle time.
      executions: each step on each device, as the runtime reports it.
      table_bubble: the bubble of the table, with equally long operations: `jpipe.Schedule.facts`.
      title: the schedule, in words.
      platform: the platform of the devices.
    """

    cells: tuple[Cell, ...]
    executions: tuple[Execution, ...]
    table_bubble: float
    title: str
    platform: str

    # -- Numbers

    @property
    def num_steps(self) -> int:
        """The number of steps."""
        return 1 + max(execution.step for execution in self.executions)

    @property
    def step_seconds(self) -> list[float]:
        """The length of each step: from its start on the first device to its end on the last one."""
        return [last - first for first, last in map(self._bounds, range(self.num_steps))]

    @property
    def median_step(self) -> int:
        """The step of median length."""
        return int(np.argsort(self.step_seconds)[(self.num_steps - 1) // 2])

    @property
    def devices(self) -> list[tuple[int, int]]:
        """Device and replica of every row."""
        return sorted({(e.device, e.replica) for e in self.executions})

    @property
    def bubble(self) -> float:
        """The measured bubble: the share of the devices' time that is no work.

        1 - work / (devices x step - updates), with the seconds of all operations but messages and updates, the length
        of the steps, and the seconds of updates. It includes messages, and what a tick costs beside its operations.
        The table's bubble has neither.
        """
        by_operation = self.seconds()
        work = sum(seconds for name, seconds in by_operation.items() if name not in NOT_WORK)
        return 1 - work / (len(self.devices) * sum(self.step_seconds) - by_operation.get("update", 0.0))

    def seconds(self, device: int | None = None) -> dict[str, float]:
        """Operation -> the sum of its cells over all steps, "idle" last.

        Args:
          device: the device; None: the sum over all.
        """
        sums = dict.fromkeys([*BAR_KINDS, "idle"], 0.0)
        for cell in self.cells:
            if device is None or cell.device == device:
                sums[cell.operation] += cell.seconds
        return {name: total for name, total in sums.items() if total}

    def _bounds(self, step: int) -> tuple[float, float]:
        """Start and end of a step."""
        here = [e for e in self.executions if e.step == step]
        return min(e.start_seconds for e in here), max(e.end_seconds for e in here)

    # -- Output

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = 100) -> str:
        """The Gantt chart of the step of median length, and the seconds of each operation on each device.

        Args:
          width: characters per row of the chart.
        """
        chart = _chart(self, self.median_step)
        legend = [f"{BAR_KINDS[name].letter} {word}" for name, word in chart_legend([chart]).items()]
        lines = [chart.title, chart.caption, "", *chart_text(chart, width), "   ".join([*legend, ". idle"]), ""]
        names = list(self.seconds())
        wide = 2 + max(11, *map(len, names))
        lines.append("ms per step".ljust(14) + "".join(f"{name:>{wide}}" for name in names))
        for device in sorted({device for device, _ in self.devices}):
            rows = sum(d == device for d, _ in self.devices) * self.num_steps
            seconds = self.seconds(device)
            values = "".join(f"{1e3 * seconds.get(name, 0.0) / rows:{wide}.3f}" for name in names)
            lines.append(f"device {device}".ljust(14) + values)
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file: a picture of all steps, the cells as JSON, or a trace for Perfetto.

        Args:
          path: a file that ends in .svg, .png or .pdf, in .json (which `read` reads), or in .perfetto.json, which
            https://ui.perfetto.dev and chrome://tracing open.

        Raises:
          ValueError: if it ends otherwise.
          ImportError: if Matplotlib, which draws pictures, is not installed.
          OSError: if the file cannot be written.
        """
        check_ending(path)
        name = pathlib.Path(path).name.lower()
        if not name.endswith(".json"):
            write(charts_figure([_chart(self, step) for step in range(self.num_steps)]), path, self.title)
            return
        tree = self.to_perfetto() if name.endswith(PERFETTO) else self.to_json()
        pathlib.Path(path).write_text(json.dumps(tree) + "\n", encoding="utf-8")

    def to_json(self) -> dict[str, Any]:
        """All fields and the bubble, as numbers, lists and text for JSON; `from_json` reads it."""
        return {
            "title": self.title,
            "platform": self.platform,
            "bubble": self.bubble,
            "table_bubble": self.table_bubble,
            "step_seconds": self.step_seconds,
            "executions": [execution._asdict() for execution in self.executions],
            "cells": [cell._asdict() for cell in self.cells],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Trace":
        """The trace of `to_json`.

        Raises:
          ValueError: if something is missing or of another type.
        """
        try:
            return cls(
                tuple(Cell(**cell) for cell in content["cells"]),
                tuple(Execution(**execution) for execution in content["executions"]),
                float(content["table_bubble"]),
                str(content["title"]),
                str(content["platform"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"this is no trace that `Trace.to_json` has written: {type(error).__name__}: {shown(str(error))}."
            ) from None

    def to_perfetto(self) -> dict[str, Any]:
        """A tree for JSON in the trace event format: a row for each device, below it one for its messages."""
        rows = {where: 2 * i for i, where in enumerate(self.devices)}
        names = {}
        for (device, replica), row in rows.items():
            names[row] = f"device {device}, replica {replica}"
            names[row + 1] = f"{names[row]}: messages"
        slices = []
        for cell in self.cells:
            if cell.operation == "idle":
                continue
            word = "" if cell.microbatch is None else str(cell.microbatch)
            slices.append(
                Slice(
                    rows[cell.device, cell.replica] + (cell.operation == "message"),
                    BAR_KINDS[cell.operation].letter + word,
                    cell.operation,
                    1e6 * cell.start_seconds,
                    1e6 * cell.seconds,
                    {"tick": cell.tick, "stage": cell.stage, "microbatch": cell.microbatch, "step": cell.step},
                )
            )
        return trace_events(names, slices)


def _chart(trace: Trace, step: int) -> Chart:
    """A step, counted from 0, as a chart that `jpipe.draw` draws."""
    first, last = trace._bounds(step)
    rows = {where: i for i, where in enumerate(trace.devices)}
    replicas = len({replica for _, replica in rows}) > 1
    labels = [f"device {d}" + (f".{r}" if replicas else "") for d, r in rows]
    stages = {d: sorted({c.stage for c in trace.cells if c.device == d and c.stage is not None}) for d, _ in rows}
    bars = []
    for cell in trace.cells:
        if cell.step != step or cell.operation == "idle":
            continue
        known = stages[cell.device]
        lightness = known.index(cell.stage) / (len(known) - 1) if cell.stage is not None and len(known) > 1 else 0.0
        word = "" if cell.microbatch is None else str(cell.microbatch)
        row = rows[cell.device, cell.replica]
        bars.append(Bar(row, cell.start_seconds - first, cell.end_seconds - first, cell.operation, word, lightness))
    measured = "measured" if trace.num_steps == 1 else f"measured in {trace.num_steps} steps"
    bubbles = f"bubble {trace.bubble:.1%} {measured}, {trace.table_bubble:.1%} in the table"
    caption = f"step {1e3 * (last - first):.4g} ms; {bubbles}"
    return Chart(trace.title, caption, labels, bars)


def check_ending(path: str | os.PathLike[str]) -> None:
    """Raises a `ValueError` if a trace cannot be written to a file of this name."""
    endings = (*SUFFIXES, ".json", PERFETTO)
    if not pathlib.Path(path).name.lower().endswith(endings):
        raise ValueError(
            f"cannot save a trace as {shown(os.fspath(path))}: the name of the file must end in "
            f"{', '.join(endings[:-1])} or {endings[-1]}."
        )


def read(path: str | os.PathLike[str]) -> Trace:
    """The trace in a file that `Trace.save` has written as JSON.

    Raises:
      ValueError: if the file is no such trace.
      OSError: if it cannot be read.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"`{path}` holds no trace, but {type(content).__name__}.")
    return Trace.from_json(content)


def draw(traces: Trace | Sequence[Trace], path: str | os.PathLike[str]) -> None:
    """Draws a step of each of several traces, those of median length, on one axis of time: schedules of one model.

    Args:
      traces: the traces, or one.
      path: a file that ends in .svg, .png or .pdf.

    Raises:
      ValueError: if there is no trace, or the file ends otherwise.
      ImportError: if Matplotlib is not installed.
    """
    traces = [traces] if isinstance(traces, Trace) else list(traces)
    if not traces:
        raise ValueError("`traces` must hold at least one trace, got none.")
    if not pathlib.Path(path).name.lower().endswith(SUFFIXES):
        raise ValueError(f"cannot draw to {shown(os.fspath(path))}: its name must end in {', '.join(SUFFIXES)}.")
    charts = [_chart(trace, trace.median_step) for trace in traces]
    write(charts_figure(charts), path, "; ".join(trace.title for trace in traces))
