"""Pictures of a simulated step, and of a search."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jpipe.soap.machine import Machine
from jpipe.soap.simulate import TaskTimes
from jpipe.soap.tasks import Tasks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "forward": "#4477aa",
    "backward": "#ee9944",
    "sum": "#aaaa44",
    "update": "#228855",
    "message": "#bbbbbb",
}
"""Kinds of tasks. Forward and backward differ in lightness too."""


def kinds_of_tasks(tasks: Tasks) -> dict[int, str]:
    """The kind of every task, by its number."""
    kinds: dict[int, str] = {}
    num_operators = len(tasks.graph.operators)
    num_edges = len(tasks.graph.edges)
    for number, block in enumerate(tasks.blocks):
        is_weight = number >= num_operators + num_edges
        kinds |= dict.fromkeys(block.tasks, "update" if is_weight else "sum")
        kinds |= dict.fromkeys(block.messages, "message")
        kinds |= dict.fromkeys(block.forward, "forward")
        kinds |= dict.fromkeys(block.backward, "backward")
    return kinds


def save_timeline(
    path: str | os.PathLike[str],
    tasks: Tasks,
    timeline: TaskTimes,
    title: str = "",
) -> None:
    """Draws when every device computes, and every link that is used carries messages.

    Args:
      path: a file whose suffix Matplotlib knows, such as .svg.
      tasks, timeline: the tasks and the timeline of a simulation.
      title: the title above the picture.

    Raises:
      ImportError: if Matplotlib is not installed.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    kinds = kinds_of_tasks(tasks)
    num_devices = tasks.machine.num_devices
    links = sorted({d for d in map(tasks.device.__getitem__, kinds) if d >= num_devices})
    rows = {d: row for row, d in enumerate([*range(num_devices), *links])}
    height = 1.2 + 0.22 * len(rows)
    figure = Figure(figsize=(10, height), layout="constrained")
    axes = figure.subplots()
    bars: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for task, kind in kinds.items():
        if tasks.device[task] in rows:
            row = rows[tasks.device[task]]
            start = timeline.start[task] * 1e3
            width = timeline.end[task] * 1e3 - start
            bars.setdefault(kind, {}).setdefault(row, []).append((start, width))
    for kind, by_row in bars.items():
        for row, spans in by_row.items():
            axes.broken_barh(spans, (row - 0.4, 0.8), color=COLORS[kind], lw=0)
    labels = [f"device {d}" for d in range(num_devices)]
    ends = _ends_of_links(tasks.machine)
    labels += [f"link {ends[link]}" for link in links]
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, timeline.seconds * 1e3)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel("milliseconds", fontsize=8)
    axes.set_title(title, fontsize=9, loc="left")
    handles = [Patch(fc=COLORS[kind], label=kind) for kind in COLORS if kind in bars]
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=len(handles),
        fontsize=8,
        frameon=False,
    )
    _save(figure, axes, path)


def _ends_of_links(machine: Machine) -> dict[int, str]:
    """Number of a link -> the device or the devices that send over it, and those that receive."""
    sources: dict[int, set[int]] = {}
    targets: dict[int, set[int]] = {}
    for source, row in enumerate(machine.routes()):
        for target, (link, *_) in enumerate(row):
            if link >= machine.num_devices:
                sources.setdefault(link, set()).add(source)
                targets.setdefault(link, set()).add(target)

    def text(devices: set[int]) -> str:
        first, last = min(devices), max(devices)
        return f"{first}" if first == last else f"{first}..{last}"

    return {link: f"{text(sources[link])} to {text(targets[link])}" for link in sources}


def save_history(
    path: str | os.PathLike[str],
    history: Sequence[tuple[float, float]],
    elapsed: float,
    starts: dict[str, float],
) -> None:
    """Draws the best seconds of a search by the time that it took.

    Args:
      path: a file whose suffix Matplotlib knows, such as .svg.
      history, elapsed, starts: the fields of `jpipe.soap.Found`.

    Raises:
      ImportError: if Matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    times = [time for time, _ in history] + [elapsed]
    best = [1e3 * seconds for _, seconds in history]
    axes.step(times, [*best, best[-1]], where="post", color=COLORS["forward"])
    for name, seconds in starts.items():
        if 1e3 * seconds <= 3 * best[0]:
            axes.axhline(1e3 * seconds, color="#999999", lw=0.8, ls="--")
            word = name.replace("_", " ")
            axes.text(elapsed, 1e3 * seconds, word, fontsize=7, ha="right", va="bottom")
    axes.set_xlabel("seconds of the search")
    axes.set_ylabel("best simulated step, milliseconds")
    axes.set_xlim(0, elapsed)
    _save(figure, axes, path)


def _save(figure: Any, axes: "Axes", path: str | os.PathLike[str]) -> None:
    import matplotlib

    axes.spines[["top", "right"]].set_visible(False)
    options: Any = {"svg.hashsalt": "jpipe", "svg.fonttype": "none"}
    with matplotlib.rc_context(options):
        is_svg = str(path).endswith(".svg")
        figure.savefig(path, metadata={"Date": None} if is_svg else None)
