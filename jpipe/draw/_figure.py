"""A schedule as a picture.

All pictures have the same width and the same scale: a forward of a device's whole share of
the model is `_UNIT` inches wide, also where a device runs several stages in turn. So the
makespans of different schedules can be compared by eye.
"""

import itertools
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jpipe._util.figures import new_figure
from jpipe.draw._shared import (
    KINDS,
    headline,
    operation_names,
    per_stage_facts,
    stage_labels,
    unrolled,
)
from jpipe.schedule import IDLE, Facts, Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".pdf", ".png", ".svg")
_UPDATE, BACKGROUND = "black", "#f3f3f3"

# Inches.
_UNIT = 0.2  # of time, on the device's scale
_LEAST_UNIT = 0.09  # of time, on the stage's scale: the width of a digit of small print
_PANEL, _ROW = 36 * _UNIT, 0.36
# Above the panels is room for the legend, and below it for headers of three lines.
_LEFT, _RIGHT, _TOP, _BOTTOM, _BETWEEN = 1.35, 1.75, 1.13, 0.5, 0.3
_COLUMN = 0.56  # of a fact at the right

DIGIT = 0.64  # width of a digit, in font sizes


def figure(schedule: Schedule) -> "Figure":
    """The picture as a Matplotlib figure, with ticks as wide as they cost.

    A forward, an input gradient and a weight gradient take one unit of time, a backward
    that is not split takes two. A lockstep tick is as wide as its busiest device works.
    There is one row per stage, with copies one per copy, or one row per device if devices have
    several stages. An operation of a stage with r copies takes r units, see
    `Schedule.device_work`. A
    schedule that is too long for one line continues below. Facts that differ between
    stages stand at the right, the others in the caption.

    Args:
      schedule: a legal schedule.

    Returns:
      A figure that belongs to no window. `save` writes one to a file.

    Raises:
      ValueError: if the schedule is not legal.
      ImportError: if Matplotlib is not installed.
    """
    facts = schedule.facts()
    shown = unrolled(schedule)
    layout = _Layout.of(shown, schedule.num_ticks, schedule.synchronous)
    height = len(layout.row_labels) * _ROW
    panels = list(itertools.pairwise(layout.panels))
    total_width = _LEFT + _PANEL + _RIGHT
    total_height = _TOP + len(panels) * (height + _BETWEEN) - _BETWEEN + _BOTTOM
    fig = new_figure(total_width, total_height, facecolor="white")
    cells = list(_cells(shown, layout))
    for i, (first, last) in enumerate(panels):
        below = total_height - _TOP - height - i * (height + _BETWEEN)
        axes = fig.add_axes(
            (
                _LEFT / total_width,
                below / total_height,
                _PANEL / total_width,
                height / total_height,
            )
        )
        _draw_panel(axes, first, last, cells, layout)
        _draw_facts(axes, facts, layout, has_header=i == 0)
    axes.set_xlabel(_axis_words(schedule), fontsize=8, loc="left")

    x = _LEFT / total_width
    fig.text(
        x,
        1 - 0.12 / total_height,
        headline(schedule),
        fontsize=10,
        weight="bold",
        va="top",
    )
    caption = _caption(schedule, facts)
    fig.text(x, 1 - 0.36 / total_height, caption, fontsize=8, va="top")
    _draw_legend(fig, schedule, layout, (x, 1 - 0.56 / total_height))
    return fig


class _Layout(NamedTuple):
    """Positions in a figure. Times are in units of one stage's forward.

    Attributes:
      unit: inches per unit of time.
      starts, ends: `[T]`, of every tick.
      panels: times at which panels begin, and the end of the last.
      repeats: the start of the round that repeats; None if the table is synchronous.
      by_device: whether rows are devices, because some have several stages.
      row_labels: one per row.
      stages_of_row: the stages of each row.
      row_of_column: `[C]`.
      shares: copies of stages per device: how many units a forward of a device's share takes.
    """

    unit: float
    starts: np.ndarray
    ends: np.ndarray
    panels: list[int]
    repeats: int | None
    by_device: bool
    row_labels: list[str]
    stages_of_row: list[list[int]]
    row_of_column: np.ndarray
    shares: float

    @classmethod
    def of(cls, shown: Schedule, round_ticks: int, synchronous: bool) -> "_Layout":
        ends = np.cumsum(shown.device_work().max(axis=1))
        starts = np.concatenate([[0], ends[:-1]])
        shares = sum(shown.replicas) / shown.num_devices
        unit = max(_UNIT / shares, _LEAST_UNIT)
        length, fits = int(ends[-1]), int(_PANEL / unit + 1e-9)
        repeats = None if synchronous else int(starts[shown.num_ticks - round_ticks])
        num_panels = -(-length // fits)
        panels = [min(i * -(-length // num_panels), length) for i in range(num_panels)]
        panels.append(length)
        if num_panels == 2 and repeats and max(repeats, length - repeats) <= fits:
            panels[1] = repeats
        if max(shown.replicas) > 1:  # long operations: no line ends in a tick
            panels[1:-1] = [int(ends[ends <= time].max(initial=0)) for time in panels[1:-1]]

        by_device = sum(shown.replicas) > shown.num_devices
        stages_of_row = [[s] for s, d in enumerate(shown.copies) for _ in d]
        labels = stage_labels(shown, "stage {}", "stage {}, device {}")
        row_of_column = np.zeros(shown.num_columns, int)
        for row, columns in enumerate(itertools.chain(*shown.columns_of_copies)):
            row_of_column[columns] = row
        if by_device:
            row_of_column = shown.device
            stages_of_row = [
                [s for s, devices in enumerate(shown.copies) if d in devices] for d in range(shown.num_devices)
            ]
            labels = [
                f"device {d}: stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
                for d, stages in enumerate(stages_of_row)
            ]
        return cls(
            unit=unit,
            starts=starts,
            ends=ends,
            panels=panels,
            repeats=repeats,
            by_device=by_device,
            row_labels=labels,
            stages_of_row=stages_of_row,
            row_of_column=row_of_column,
            shares=shares,
        )


class _Cell(NamedTuple):
    """One operation, or an update if it has no word. Times are in stages' forwards."""

    start: int
    row: int
    length: int
    fill: tuple[float, ...]
    word: str


def _cells(shown: Schedule, layout: _Layout) -> Iterator[_Cell]:
    """All operations and updates of a table."""
    names = operation_names(shown)
    row_of = layout.row_of_column
    length_of_column = np.array(shown.replicas)[shown.stage]
    lightness = _lightness(shown)
    for t in range(shown.num_ticks):
        free_from = np.full(shown.num_devices, layout.starts[t])
        # The engine runs a tick's operations in this order, each on all stages.
        for field, c in itertools.product(names, _in_order_of_stage(shown)):
            m = getattr(shown, field)[t, c]
            if m == IDLE:
                continue
            device = shown.device[c]
            length = int(length_of_column[c])
            length *= 2 if field == "backward" and not shown.splits_backward else 1
            fill = lighter(KINDS[field].fill, lightness[c])
            yield _Cell(int(free_from[device]), int(row_of[c]), length, fill, str(m))
            free_from[device] += length
        for c in np.flatnonzero(shown.update[t] != IDLE):
            yield _Cell(int(layout.ends[t]), int(row_of[c]), 0, (0.0, 0.0, 0.0), "")


def _in_order_of_stage(shown: Schedule) -> np.ndarray:
    """`[C]`, the columns."""
    return np.argsort(shown.stage, kind="stable")


def _lightness(shown: Schedule) -> np.ndarray:
    """`[C]`, from 0 for a device's first stage to 1 for its last."""
    order = _in_order_of_stage(shown)
    lightness = np.zeros(shown.num_columns)
    for d in range(shown.num_devices):
        columns = order[shown.device[order] == d]
        stages, rank = np.unique(shown.stage[columns], return_inverse=True)
        lightness[columns] = np.linspace(0, 1, len(stages))[rank]
    return lightness


def lighter(color: str, lightness: float) -> tuple[float, ...]:
    from matplotlib.colors import to_rgb

    rgb = np.array(to_rgb(color))
    return tuple(rgb + (1 - rgb) * 0.55 * lightness)


def draw_bar(
    axes: "Axes", row: int, span: tuple[float, float], fill: tuple[float, ...], word: str, fontsize: float, **edge: Any
) -> None:
    """A bar with a word in it.

    Args:
      axes: where it is drawn.
      row: its row.
      span: its start and its length.
      fill: its colour.
      word: the word; "": none.
      fontsize: of the word.
      **edge: options of its edge.
    """
    from matplotlib.patches import Rectangle

    start, length = span
    axes.add_patch(Rectangle((start, row - 0.42), length, 0.84, fc=fill, **edge))
    if not word:
        return
    dark = np.dot(fill, (0.299, 0.587, 0.114)) <= 0.5
    axes.text(
        start + length / 2,
        row,
        word,
        color="white" if dark else "black",
        fontsize=fontsize,
        ha="center",
        va="center_baseline",
        clip_on=True,
    )


def _draw_panel(axes: "Axes", first: int, last: int, cells: list[_Cell], layout: _Layout) -> None:
    """The part of the picture from one time to another."""
    from matplotlib.patches import Rectangle

    num_rows = len(layout.row_labels)
    for start, row, length, fill, word in cells:
        if not word and first < start <= last:
            axes.vlines(start, row - 0.5, row + 0.42, color=_UPDATE, lw=1.5)
            axes.plot(start, row - 0.5, "v", color=_UPDATE, ms=5, clip_on=False)
        if word and start < last and start + length > first:
            room = 0.85 * 72 * layout.unit * length  # points
            draw_bar(axes, row, (start, length), fill, word, min(7, room / (DIGIT * len(word))), ec="white")
    ends = layout.ends[(layout.ends > first) & (layout.ends <= last)]
    axes.vlines(ends, -0.5, num_rows - 0.5, color="#dddddd", lw=0.5, zorder=0)
    corner, width = (first, -0.5), last - first
    axes.add_patch(Rectangle(corner, width, num_rows, fc=BACKGROUND, ec="none", zorder=-1))
    times = [first, last]
    if layout.repeats is not None and first <= layout.repeats <= last:
        axes.axvline(layout.repeats, color=_UPDATE, lw=1, ls="--", clip_on=False)
        times = sorted({first, last, np.clip(layout.repeats, first, last)})
    axes.set_xticks(times, [f"{time / layout.shares:g}" for time in times])
    axes.set_xlim(first, first + _PANEL / layout.unit)
    axes.set_ylim(num_rows - 0.5, -0.5)
    axes.set_yticks(range(num_rows), layout.row_labels)
    axes.tick_params(labelsize=8, left=False)
    axes.set_facecolor("none")
    axes.spines[:].set_visible(False)


def _draw_facts(axes: "Axes", facts: Facts, layout: _Layout, has_header: bool) -> None:
    """The facts that differ between stages, as columns at the right of the longest panel."""
    right = axes.get_xlim()[0] + max(np.diff(layout.panels))
    for i, (name, values) in enumerate(_columns(facts).items()):
        x = right + (0.1 + _COLUMN * (i + 0.5)) / layout.unit
        words = [", ".join(str(values[s]) for s in row) for row in layout.stages_of_row]
        header = name.replace(" ", "\n")
        if layout.by_device and i == 0:
            header += "\nby stage"
        for row, word in [(-0.62, header)] * has_header + [*enumerate(words)]:
            axes.text(
                x,
                row,
                word,
                fontsize=8,
                ha="center",
                va="bottom" if row < 0 else "center_baseline",
            )


def _columns(facts: Facts) -> dict[str, list[int]]:
    """The facts that differ between stages; equal delays share a column."""
    columns = {name: values for name, values in per_stage_facts(facts).items() if len(set(values)) > 1}
    if columns.get("forward delay") == columns.get("backward delay"):
        columns = {
            name.replace("forward delay", "delay"): values
            for name, values in columns.items()
            if name != "backward delay"
        }
    return columns


def _caption(schedule: Schedule, facts: Facts) -> str:
    """The facts of the whole table, and those that are the same on all stages."""
    makespan = facts.makespan * schedule.num_devices / sum(schedule.replicas)
    words = [
        f"makespan {makespan:g}" + ("" if schedule.synchronous else " per round"),
        f"bubble {facts.bubble:.1%}",
    ]
    if schedule.synchronous:
        words.append(f"between first and last work {facts.inner_bubble:.1%}")
    varying = _columns(facts)
    for name, values in per_stage_facts(facts).items():
        trivial = schedule.synchronous and name != "in flight"
        if len(set(values)) == 1 and name not in varying and not trivial:
            words.append(f"{name} {values[0]} on all stages")
    return "; ".join(words)


def _axis_words(schedule: Schedule) -> str:
    shares = sum(schedule.replicas) / schedule.num_devices
    time = "time in forwards of a stage"
    if max(schedule.replicas) > 1:
        time = "time in forwards of a stage with one copy, of others times copies"
    elif shares != 1:
        time = "time in forwards of a device's whole share of the model"
    words = f"{time} (F = B = W = 1); numbers in cells are microbatches"
    if not schedule.synchronous:
        words += "; the round after the dashed line repeats"
    return words


def _draw_legend(fig: "Figure", schedule: Schedule, layout: _Layout, corner: tuple[float, float]) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = operation_names(schedule)
    handles: list[Any] = [Patch(fc=KINDS[field].fill) for field in names]
    labels = list(names.values())
    if layout.by_device:
        light = [Patch(fc=lighter(KINDS[field].fill, 1.0)) for field in names]
        handles.append(tuple(light))
        labels.append("lighter: later stages of the device")
    if not schedule.forward_only:
        handles.append(Line2D([], [], color=_UPDATE, marker="v", ms=5, ls="none"))
        labels.append("update of the weights")
    draw_legend(fig, handles, labels, corner, handler_map={tuple: HandlerTuple(ndivide=None, pad=0)})


def draw_legend(
    fig: "Figure", handles: Sequence[Any], labels: Sequence[str], corner: tuple[float, float], **options: Any
) -> None:
    """A legend in one row, from its upper left corner on."""
    fig.legend(
        handles=handles,
        labels=labels,
        loc="upper left",
        bbox_to_anchor=corner,
        ncols=len(handles) or 1,
        fontsize=8,
        frameon=False,
        borderaxespad=0,
        borderpad=0,
        columnspacing=1.2,
        handlelength=1.6,
        handletextpad=0.5,
        **options,
    )


def save(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Writes `figure(schedule)` to a file. The bytes are the same every time.

    The file carries the schedule's name and sizes as its title.

    Args:
      schedule: a legal schedule.
      path: a file whose suffix is .pdf, .png or .svg.

    Raises:
      ValueError: if the suffix is another, or the schedule is not legal.
      ImportError: if Matplotlib is not installed.
      OSError: if the file cannot be written.
    """
    check_suffix(path)
    write(figure(schedule), path, headline(schedule))


def check_suffix(path: str | os.PathLike[str]) -> None:
    """Raises a `ValueError` if figures cannot be written to a file of this name."""
    suffix = pathlib.Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(
            f"cannot draw to `{path}`: its suffix {suffix!r} is none of {', '.join(SUFFIXES)}. Choose one of these."
        )


def write(drawn: "Figure", path: str | os.PathLike[str], title: str) -> None:
    """Writes a figure to a file, which carries a title. The bytes are the same every time."""
    import matplotlib

    metadata: dict[str, str | None] = {"Title": title}
    # Without a date the file is the same every time.
    metadata |= {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}.get(pathlib.Path(path).suffix.lower(), {})
    with matplotlib.rc_context({"svg.hashsalt": "jpipe", "svg.fonttype": "none"}):
        drawn.savefig(path, dpi=150, metadata=metadata)
