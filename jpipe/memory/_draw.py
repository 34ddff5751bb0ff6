"""Pictures of a timeline."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jpipe._util.figures import new_figure
from jpipe._util.foreign import shown
from jpipe.memory._block import USES, Block, Interval, size_text, spans

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "weights": "#4477aa",
    "version": "#88bbdd",
    "optimizer": "#225588",
    "gradient": "#8c2d04",
    "input stash": "#5aae61",
    "weight stash": "#a6dba0",
    "split residual": "#d9a441",
    "carry": "#117733",
    "message": "#ee9944",
    "batch": "#aaaa44",
    "state": "#777777",
    "compression": "#996699",
    "argument": "#4477aa",
    "result": "#bb99bb",
    "temporary": "#cc6677",
    "idle": "#eeeeee",
}

PANELS = ("bytes", "blocks", "intervals")
"""Panels of a picture: bytes by use, a Gantt chart of the blocks, and the intervals between accesses."""

_MOST_ROWS = 60

_LEAST_SHARE = 0.6
"""The share of the allocated bytes below which the used ones get the whole axis."""

_LEAST_SEEN = 0.005
"""The share of the axis from which a use can be seen, and is in the legend."""


class Drawn(Protocol):
    """The part of a `Timeline` that pictures show. `Timeline` imports this module."""

    @property
    def blocks(self) -> tuple[Block, ...]: ...
    @property
    def period(self) -> float: ...
    @property
    def unit(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def marks(self) -> tuple[float, ...]: ...
    @property
    def moments(self) -> np.ndarray: ...
    @property
    def peak(self) -> int: ...
    def by_use(self) -> dict[str, np.ndarray]: ...
    def intervals(self) -> list[Interval]: ...


def draw(timeline: Drawn, path: str | os.PathLike[str], panels: Sequence[str] = ()) -> None:
    """Draws a timeline into a file.

    Args:
      timeline: the timeline.
      path: a file whose suffix Matplotlib knows, such as .svg or .png.
      panels: some of `PANELS`; `()`: all.

    Raises:
      ValueError: if a panel is unknown.
      ImportError: if Matplotlib is not installed.
    """
    unknown = [name for name in panels if name not in PANELS]
    if unknown:
        raise ValueError(f"`panels` must be some of {', '.join(map(repr, PANELS))}, got {shown(unknown[0])}.")
    panels = panels or PANELS
    rows = _rows(timeline)
    heights = {"bytes": 2.8, "blocks": 0.5 + 0.13 * len(rows), "intervals": 2.6}
    panel_heights = [heights[name] for name in panels]
    figure = new_figure(9, sum(panel_heights) + 0.5, layout="constrained")
    import matplotlib

    grid = figure.add_gridspec(len(panels), 2, height_ratios=panel_heights)
    for i, name in enumerate(panels):
        if name == "intervals":
            _histogram(timeline, figure.add_subplot(grid[i, 0]))
            # The colours of the uses stand in the panel of bytes.
            _scatter(timeline, figure.add_subplot(grid[i, 1]), "bytes" not in panels)
        else:
            axes = figure.add_subplot(grid[i, :])
            _stack(timeline, axes) if name == "bytes" else _gantt(timeline, rows, axes)
            axes.set_xlim(0, timeline.period)
            axes.set_xlabel(timeline.unit, fontsize=8)
    figure.axes[0].set_title(timeline.title, fontsize=10, loc="left")
    for axes in figure.axes:
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    options: Any = {"svg.hashsalt": "jpipe", "svg.fonttype": "none"}
    with matplotlib.rc_context(options):
        is_svg = str(path).endswith(".svg")
        figure.savefig(path, metadata={"Date": None} if is_svg else None, dpi=150)


def _unit(most: float) -> tuple[float, str]:
    """The unit of the axis of bytes."""
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if most >= 1024**power:
            return 1024**power, name
    return 1, "bytes"


def _stack(timeline: Drawn, axes: "Axes") -> None:
    """Bytes by use over time. Idle bytes are drawn above them if they leave them room, and are said otherwise."""
    by_use = dict(timeline.by_use())
    factor, unit = _unit(timeline.peak)
    used = sum(use_bytes for use, use_bytes in by_use.items() if use != "idle")
    most = timeline.peak
    if np.max(used) < _LEAST_SHARE * timeline.peak:
        by_use.pop("idle")
        most = np.max(used) * 1.15
        axes.text(
            0.99,
            0.97,
            f"allocated at all times: {size_text(timeline.peak)}; the rest is idle",
            transform=axes.transAxes,
            ha="right",
            va="top",
            fontsize=8,
        )
    moments = np.append(timeline.moments, timeline.period)
    bottom = np.zeros(len(moments))
    for use, use_bytes in by_use.items():
        top = bottom + np.append(use_bytes, use_bytes[-1]) / factor
        axes.fill_between(
            moments, bottom, top, step="post", color=COLORS[use], lw=0,
            label=use if np.max(use_bytes) > _LEAST_SEEN * most else None,
        )  # fmt: skip
        bottom = top
    for mark in timeline.marks[1:]:
        axes.axvline(mark, color="white", lw=0.3)
    axes.set_ylabel(unit, fontsize=8)
    axes.set_ylim(0, most / factor * 1.02)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1],
        labels[::-1],
        fontsize=7,
        frameon=False,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
    )


def _rows(timeline: Drawn) -> list[list[Block]]:
    """The blocks of each row of the chart: the arrays with the most bytes x time; slots share rows where they can."""
    order, least = list(USES), timeline.peak / 2000
    arrays: dict[str, list[Block]] = {}
    for block in timeline.blocks:
        if block.use != "idle" and block.num_bytes >= least:
            # Microbatches and ticks differ in time, so they share the row of their layer and use.
            name = block.name.partition(", microbatch")[0] + block.name.partition(": ")[2]
            if block.use == "temporary" and timeline.unit != "instructions":
                name = "temporaries"
            arrays.setdefault(name, []).append(block)

    def weight(blocks: list[Block]) -> float:
        return sum(b.num_bytes * (b.freed - b.allocated) for b in blocks)

    kept = sorted(arrays.values(), key=weight, reverse=True)[:_MOST_ROWS]
    return sorted(
        kept,
        key=lambda blocks: (
            order.index(blocks[0].use),
            blocks[0].stage or 0,
            blocks[0].layers or (0, 0),
            blocks[0].name,
        ),
    )


def _gantt(timeline: Drawn, rows: list[list[Block]], axes: "Axes") -> None:
    """Draws a row per array: a bar while it lives, a tick at each write, a dot at each read."""
    labels = []
    for row, blocks in enumerate(rows):
        alpha = 1.0 if len(blocks) < 3 else 0.45
        for block in blocks:
            bars = [(a, b - a) for a, b in spans(block, timeline.period).tolist()]
            axes.broken_barh(bars, (row - 0.4, 0.8), color=COLORS[block.use], alpha=alpha, lw=0)
        several = len({block.name for block in blocks}) > 1
        if blocks[0].use == "temporary" and several:
            labels.append("temporaries")
        else:
            first, _, rest = blocks[0].name.partition(", microbatch")
            _, _, what = rest.partition(":")
            labels.append(f"{first}:{what}" if rest else first)
        if blocks[0].use == "temporary":
            continue
        for kind, color in (("write", "black"), ("read", "white")):
            times = [a.time % timeline.period for b in blocks for a in b.accesses if a.kind == kind]
            axes.plot(
                times,
                [row] * len(times),
                "|" if kind == "write" else ".",
                color=color,
                ms=4 if kind == "write" else 2,
                mew=0.6,
            )
    axes.set_yticks(range(len(rows)), [label[:60] for label in labels])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_title("blocks: | written, . read", fontsize=8, loc="left")


def _histogram(timeline: Drawn, axes: "Axes") -> None:
    lengths = [interval.length for interval in timeline.intervals()]
    if lengths:
        bins = np.geomspace(max(min(lengths), timeline.period * 1e-6), max(lengths) * 1.001, 30)
        axes.hist(np.maximum(lengths, bins[0]), bins=bins.tolist(), color=COLORS["weights"])
        axes.set_xscale("log")
    axes.set_xlabel(f"interval between accesses, {timeline.unit}", fontsize=8)
    axes.set_ylabel("number", fontsize=8)
    axes.set_title("how long arrays wait between two accesses", fontsize=8, loc="left")


def _scatter(timeline: Drawn, axes: "Axes", legend: bool) -> None:
    by_use: dict[str, list] = {}
    for interval in timeline.intervals():
        by_use.setdefault(interval.use, []).append((interval.length, interval.num_bytes))
    for use in USES:
        if use in by_use:
            x, y = zip(*by_use[use])
            axes.scatter(x, y, s=8, color=COLORS[use], label=use, lw=0)
    if by_use:
        axes.set_xscale("log")
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda y, _: size_text(y))
    if by_use and legend:
        axes.legend(fontsize=6, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.set_xlabel(f"interval between accesses, {timeline.unit}", fontsize=8)
    axes.set_ylabel("bytes of the array", fontsize=8)
