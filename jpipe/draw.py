"""Draws a schedule: text for a terminal, SVG, PNG or PDF for paper, JSON for programs, a trace for Perfetto.

    python -m jpipe.draw one_f_one_b --stages 4 --microbatches 8
    python -m jpipe.draw one_f_one_b --stages 4 --microbatches 8 --option ticks=unit
    python -m jpipe.draw gpipe --stages 4 --microbatches 8 --out pipe.svg
    python -m jpipe.draw gpipe --stages 4 --microbatches 8 --trace pipe.json
    python -m jpipe.draw --file table.txt --json

Stages run downward from 0, ticks rightward; a cell holds the microbatch. Forward and
backward differ in hue and in lightness. An asynchronous schedule is drawn from an empty
pipeline through its first full round, which is the one that repeats.
"""

import argparse
import ast
import difflib
import inspect
import itertools
import json
import os
import pathlib
import shutil
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from jpipe import schedules
from jpipe.schedule import IDLE, Facts, Schedule
from jpipe.simulate import Timing, simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class _Kind(NamedTuple):
    """How one kind of work looks."""

    letter: str
    fill: str  # of a figure's cell
    sgr: str  # the same colour, and one to write in, of a terminal


_KINDS = {
    "forward": _Kind("F", "#a6cee3", "38;5;16;48;5;153"),
    "backward": _Kind("B", "#8c2d04", "38;5;231;48;5;94"),
    "weight_grad": _Kind("W", "#5aae61", "38;5;16;48;5;71"),
}
_UPDATE = "black"
_LONGEST = 72  # units of time in one line of a figure
_SUFFIXES = (".pdf", ".png", ".svg")


def text(schedule: Schedule, *, color: bool = False, width: int | None = None) -> str:
    """The picture as text, and below it the facts.

    Args:
      schedule: a legal schedule.
      color: whether to colour cells by ANSI escape sequences.
      width: characters to a line, past which the picture goes on below. None: no limit.

    Returns:
      Lines, each ended by a newline.

    Raises:
      ValueError: if the schedule is not legal.

    Example:
      >>> print(text(schedules.gpipe(2, 3)), end="")
      gpipe: 2 stages, 2 devices, 3 microbatches, 8 ticks
      <BLANKLINE>
      tick  0                   5
      s0    F0  F1  F2  .   .   B0  B1  B2*
      s1    .   F0  F1  F2  B0  B1  B2  *
      <BLANKLINE>
      F forward   B backward   * update
      bubble 25.0%, makespan 12 (F = B = W = 1)
      bubble between first and last work 14.3%
      stage              0   1
      in flight          3   3
      forward tau        0   0
      backward tau       0   0
      weight versions    1   1
    """
    facts = schedule.facts()
    shown = _unrolled(schedule)
    rows = _text_rows(shown)
    margin = 2 + max(len(label) for label in ["tick", *(label for label, _ in rows)])
    cell = 1 + max(len(word) for _, words in rows for word in words)
    per_block = shown.num_ticks
    if width is not None:
        per_block = max(1, (width - margin) // cell)

    lines = [_headline(schedule), ""]
    for start in range(0, shown.num_ticks, per_block):
        ticks = range(start, min(start + per_block, shown.num_ticks))
        ruler = "tick".ljust(margin)
        for t in ticks:
            ruler += (str(t) if t % 5 == 0 else "").ljust(cell)
        lines.append(ruler.rstrip())
        for label, words in rows:
            line = label.ljust(margin)
            for t in ticks:
                line += _paint(words[t], color) + " " * (cell - len(words[t]))
            lines.append(line.rstrip())
        lines.append("")
    legend = [
        _paint(f"{_KINDS[field].letter} {name}", color)
        for field, name in _names(schedule).items()
    ]
    if not schedule.forward_only:
        legend.append("* update")
    lines.append("   ".join(legend))
    if not schedule.synchronous:
        first = shown.num_ticks - schedule.num_ticks
        lines.append(f"the round that starts at tick {first} repeats")
    lines += _captions(facts)
    per_stage = {"stage": range(schedule.num_stages), **_per_stage_facts(facts)}
    for name, values in per_stage.items():
        lines.append(f"{name:16}" + "".join(f"{value:4}" for value in values))
    return "".join(line + "\n" for line in lines)


def figure(schedule: Schedule) -> "Figure":
    """The picture as a Matplotlib figure, ticks as wide as they cost.

    A unit of width is the time of a forward; a backward that is not split takes two. A
    lockstep tick is as wide as its busiest device needs. There is a row for each stage, or
    for each device where devices have several stages, which take turns. What is too long
    for a page goes on below.

    Args:
      schedule: a legal schedule.

    Returns:
      A figure that belongs to no window; `save` writes one to a file.

    Raises:
      ValueError: if the schedule is not legal.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    facts = schedule.facts()
    shown = _unrolled(schedule)
    names = _names(schedule)
    ends = np.cumsum(shown.device_work().max(axis=1))
    starts = np.concatenate([[0], ends[:-1]])
    length = int(ends[-1])
    by_device = shown.num_columns > shown.num_devices
    num_rows = shown.num_devices if by_device else shown.num_stages

    # Inches. A unit of time holds three digits of the smaller print.
    num_panels = -(-length // _LONGEST)
    panel = -(-length // num_panels)
    left, right, top, bottom, between = 1.3, 2.9, 0.85, 0.85, 0.35
    width, height = max(0.17 * panel, 3.4), 0.36 * num_rows
    total_width = left + width + right
    total_height = top + num_panels * (height + between) - between + bottom
    fig = Figure(figsize=(total_width, total_height), facecolor="white")
    cells = list(_rectangles(shown, names, starts, ends, by_device))
    for i in range(num_panels):
        below = total_height - top - height - i * (height + between)
        axes = fig.add_axes(
            (
                left / total_width,
                below / total_height,
                width / total_width,
                height / total_height,
            )
        )
        first, last = i * panel, (i + 1) * panel if num_panels > 1 else length
        for x, row, units, fill, word, ink in cells:
            if x < last and x + units > first:
                _draw_cell(axes, x, row, units, fill, word, ink)
        axes.vlines(ends, -0.5, num_rows - 0.5, color="#dddddd", lw=0.5, zorder=0)
        if not schedule.synchronous:
            repeats = starts[shown.num_ticks - schedule.num_ticks]
            axes.axvline(repeats, color=_UPDATE, lw=1, ls="--")
        axes.set_xlim(first, last)
        axes.set_ylim(num_rows - 0.5, -0.5)
        labels = [f"device {d}" for d in range(num_rows)]
        if not by_device:
            labels = _stage_labels(shown, "stage {}", "stage {}, device {}")
        axes.set_yticks(range(num_rows), labels)
        axes.tick_params(labelsize=8, left=False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_facecolor("#f7f7f7")
        axes.spines[:].set_visible(False)
    time = "time (F = B = W = 1)"
    if not schedule.synchronous:
        time += "; what follows the dashed line repeats"
    axes.set_xlabel(time, fontsize=8, loc="left")

    for column, (name, values) in enumerate(_per_stage_facts(facts).items()):
        x = 1 + (0.45 + 0.6 * column) / width
        words = [str(value) for value in values]
        if by_device:
            order = np.argsort(shown.stage)
            words = [
                " ".join(words[s] for s in np.flatnonzero(shown.device[order] == d))
                for d in range(num_rows)
            ]
        for row, word in [(-0.62, name.replace(" ", "\n")), *enumerate(words)]:
            fig.axes[0].text(
                x,
                row,
                word,
                transform=fig.axes[0].get_yaxis_transform(),
                fontsize=8,
                ha="center",
                va="bottom" if row < 0 else "center_baseline",
            )
    fig.text(
        left / total_width,
        1 - 0.2 / total_height,
        f"{_headline(schedule)}\n{'; '.join(_captions(facts))}",
        fontsize=9,
        va="top",
    )
    patches = [
        Patch(fc=_KINDS[field].fill, label=name) for field, name in names.items()
    ]
    if not schedule.forward_only:
        patches.append(Patch(fc=_UPDATE, label="update"))
    if by_device:
        patches.append(Patch(fc="none", label="lighter: later stages of the device"))
    fig.legend(
        handles=patches,
        loc="lower left",
        bbox_to_anchor=(left / total_width, 0),
        ncols=len(patches),
        fontsize=8,
        frameon=False,
        borderaxespad=0.3,
        borderpad=0,
    )
    return fig


def _rectangles(shown: Schedule, names, starts, ends, by_device: bool):
    """What stands in the picture: x, row, width, fill, word and ink of every cell."""
    from matplotlib.colors import to_rgb

    order = np.argsort(shown.stage)
    row_of = shown.device if by_device else shown.stage
    later = np.zeros(shown.num_columns)  # of a device's stages, from 0 to 1
    for d in range(shown.num_devices):
        columns = order[shown.device[order] == d]
        later[columns] = np.linspace(0, 1, len(columns))
    for t in range(shown.num_ticks):
        busy_until = np.full(shown.num_devices, starts[t])
        # As the engine works: the operations one after the other, each on all columns.
        for field, c in itertools.product(names, order):
            m = getattr(shown, field)[t, c]
            if m == IDLE:
                continue
            device = shown.device[c]
            units = 2 if field == "backward" and not shown.splits_backward else 1
            kind = _KINDS[field]
            color = np.array(to_rgb(kind.fill))
            if by_device:
                color = color + (1 - color) * 0.55 * later[c]
            ink = "black" if color @ (0.299, 0.587, 0.114) > 0.5 else "white"
            yield busy_until[device], row_of[c], units, tuple(color), str(m), ink
            busy_until[device] += units
        for c in np.flatnonzero(shown.update[t] != IDLE):
            yield ends[t] - 0.15, row_of[c], 0.15, _UPDATE, "", ""


def _draw_cell(axes, x, row, units, fill, word: str, ink: str) -> None:
    from matplotlib.patches import Rectangle

    edge = "white" if word else "none"
    axes.add_patch(Rectangle((x, row - 0.42), units, 0.84, fc=fill, ec=edge))
    axes.text(
        x + units / 2,
        row,
        word,
        color=ink or None,
        fontsize=7 if len(word) < 3 else 5.5,
        ha="center",
        va="center_baseline",
        clip_on=True,
    )


def save(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Writes `figure(schedule)` to a file, the same bytes every time.

    Args:
      schedule: a legal schedule.
      path: a file whose suffix is .pdf, .png or .svg.

    Raises:
      ValueError: if the suffix is another, or the schedule is not legal.
      OSError: if the file cannot be written.
    """
    suffix = pathlib.Path(path).suffix.lower()
    if suffix not in _SUFFIXES:
        raise ValueError(
            f"cannot draw to `{path}`: its suffix {suffix!r} is none of "
            f"{', '.join(_SUFFIXES)}. Choose one of these."
        )
    import matplotlib

    undated = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}.get(suffix)
    with matplotlib.rc_context({"svg.hashsalt": "jpipe", "svg.fonttype": "none"}):
        figure(schedule).savefig(path, dpi=150, metadata=undated)


def trace(schedule: Schedule, timing: Timing, unit: float = 1e3) -> dict[str, Any]:
    """A simulated step as a trace that Perfetto and chrome://tracing open.

    Args:
      schedule: a legal schedule.
      timing: of it, from `jpipe.simulate.simulate`.
      unit: microseconds to one unit of its time.

    Returns:
      A tree that JSON can hold: a row for each device, a slice for each operation.
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
    origin = min(np.nanmin(at) for at in timing.start.values())
    for field, at in timing.start.items():
        for m, c in np.argwhere(~np.isnan(at)).tolist():
            slice_ = {
                "ph": "X",
                "name": f"{_KINDS[field].letter}{m}",
                "cat": field,
                "pid": 0,
                "tid": int(schedule.device[c]),
                "ts": float(at[m, c] - origin) * unit,
                "dur": float(timing.end[field][m, c] - at[m, c]) * unit,
                "args": {"microbatch": m, "stage": int(schedule.stage[c])},
            }
            events.append(slice_)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def summary(schedule: Schedule) -> dict[str, Any]:
    """The facts and the table, as numbers, lists and None that JSON can hold.

    Raises:
      ValueError: if the schedule is not legal.
    """
    return {**schedule.facts().to_dict(), "table": schedule.to_dict()}


def _unrolled(schedule: Schedule) -> Schedule:
    """What is drawn: all ticks up to the end of the first round without a gap.

    A synchronous table as it is. An asynchronous one once a round, microbatches counted
    from the start of training and those before it left out; not a table that `check`
    would pass, for it ends amid its work.
    """
    if schedule.synchronous:
        return schedule
    num_microbatches = schedule.num_microbatches
    work = [getattr(schedule, field) for field in _KINDS]
    oldest = min(
        int(cells[cells != IDLE].min()) for cells in work if (cells > IDLE).any()
    )
    num_rounds = 1 - oldest // num_microbatches

    def unroll(cells: np.ndarray, per_round: int, least: int) -> np.ndarray:
        cells = cells.astype(np.int64)
        rounds = [cells + per_round * r for r in range(num_rounds)]
        return np.concatenate(
            [
                np.where((cells == IDLE) | (later < least), IDLE, later)
                for later in rounds
            ]
        )

    forward, backward, weight_grad = (unroll(w, num_microbatches, 0) for w in work)
    return Schedule(
        name=schedule.name,
        num_microbatches=num_microbatches * num_rounds,
        stage=schedule.stage,
        device=schedule.device,
        forward=forward,
        backward=backward,
        weight_grad=weight_grad,
        forward_version=np.where(forward == IDLE, IDLE, 0),
        backward_version=np.where(backward == IDLE, IDLE, 0),
        update=unroll(schedule.update, 1, 1),
    )


def _text_rows(shown: Schedule) -> list[tuple[str, list[str]]]:
    """Label and words, one a tick, of each line of the picture.

    A stage has one line, or one for each kind of work if a cell holds several.
    """
    kinds = [field for field in _KINDS if (getattr(shown, field) != IDLE).any()]
    busy = sum((getattr(shown, field) != IDLE).astype(int) for field in kinds)
    lines = [[field] for field in kinds] if np.max(busy) > 1 else [kinds]
    rows = []
    labels = _stage_labels(shown, "s{}", "s{}@{}")
    for label, c in zip(labels, np.argsort(shown.stage), strict=True):
        for fields in lines:
            words = []
            for t in range(shown.num_ticks):
                word = ""
                for field in fields:
                    m = getattr(shown, field)[t, c]
                    word += "" if m == IDLE else f"{_KINDS[field].letter}{m}"
                if fields is lines[-1] and shown.update[t, c] != IDLE:
                    word += "*"
                words.append(word or ".")
            rows.append((label if fields is lines[0] else "", words))
    return rows


def _stage_labels(schedule: Schedule, plain: str, placed: str) -> list[str]:
    """A label a stage: `plain`, or `placed` where stage s is not on device s."""
    device = schedule.device[np.argsort(schedule.stage)]
    form = plain if (device == np.arange(len(device))).all() else placed
    return [form.format(s, d) for s, d in enumerate(device)]


def _paint(word: str, color: bool) -> str:
    kinds = {kind.letter: kind.sgr for kind in _KINDS.values()}
    if not color or word[0] not in kinds:
        return word
    return f"\x1b[{kinds[word[0]]}m{word}\x1b[0m"


def _names(schedule: Schedule) -> dict[str, str]:
    """What to call each kind of work a table holds, in the order of a tick."""
    if schedule.forward_only:
        return {"forward": "forward"}
    if not schedule.splits_backward:
        return {"forward": "forward", "backward": "backward"}
    return {
        "forward": "forward",
        "backward": "input gradient",
        "weight_grad": "weight gradient",
    }


def _headline(schedule: Schedule) -> str:
    counts = {
        "stage": schedule.num_stages,
        "device": schedule.num_devices,
        "microbatch": schedule.num_microbatches,
        "tick": schedule.num_ticks,
    }
    plural = {"microbatch": "microbatches"}
    words = [
        f"{count} {word if count == 1 else plural.get(word, word + 's')}"
        for word, count in counts.items()
    ]
    return f"{schedule.name}: {', '.join(words)}"


def _captions(facts: Facts) -> list[str]:
    return [
        f"bubble {facts.bubble:.1%}, makespan {facts.makespan} (F = B = W = 1)",
        f"bubble between first and last work {facts.inner_bubble:.1%}",
    ]


def _per_stage_facts(facts: Facts) -> dict[str, list[int]]:
    return {
        "in flight": facts.in_flight.tolist(),
        "forward tau": facts.forward_delay.tolist(),
        "backward tau": facts.backward_delay.tolist(),
        "weight versions": facts.weight_versions.tolist(),
    }


class _Parser(argparse.ArgumentParser):
    """Answers a wrong command line by one line on stderr and exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"jpipe.draw: {message}\n")


def _option(word: str) -> tuple[str, Any]:
    """`key=value`; the value a Python literal, or else a string."""
    key, equals, value = word.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"must be key=value, got {word!r}")
    try:
        return key, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return key, value


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m jpipe.draw",
        description="Draws a schedule and counts what it costs.",
        epilog="example: python -m jpipe.draw gpipe --stages 4 --microbatches 8",
    )
    known = ", ".join(schedules.names())
    parser.add_argument("name", nargs="?", help=f"the schedule: {known}")
    parser.add_argument("--stages", type=int, metavar="S")
    parser.add_argument("--microbatches", type=int, metavar="N", help="to a minibatch")
    parser.add_argument(
        "--option",
        type=_option,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="what else the schedule takes, such as ticks=unit; may be repeated",
    )
    parser.add_argument("--file", help="a table as text, instead of a name")
    parser.add_argument("--out", help=f"a file to draw to ({', '.join(_SUFFIXES)})")
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="a file for a trace of one step, a tick's work a millisecond (Perfetto, chrome://tracing)",
    )
    parser.add_argument("--json", action="store_true", help="facts and table, no text")
    return parser


def _schedule(args: argparse.Namespace) -> Schedule:
    """The schedule that the command line asks for."""
    if args.file is not None:
        if args.name or args.stages or args.microbatches or args.option:
            raise ValueError("--file is a whole table: leave out name, counts, options")
        return schedules.read(args.file)
    if args.name is None:
        raise ValueError(
            f"name a schedule ({', '.join(schedules.names())}) or a --file"
        )
    builder = schedules.get(args.name)
    if args.stages is None or args.microbatches is None:
        raise ValueError(f"{args.name} needs --stages and --microbatches")
    known = list(inspect.signature(builder).parameters)[2:]
    for key, _ in args.option:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
            guess = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"{args.name} has no option {key!r}.{guess} "
                f"It takes: {', '.join(known) or 'none'}."
            )
    return builder(args.stages, args.microbatches, **dict(args.option))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line `argv`; None: that of the process."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            schedule = _schedule(args)
        for warning in caught:
            print(f"jpipe.draw: warning: {warning.message}", file=sys.stderr)
        if args.out is not None:
            save(schedule, args.out)
        if args.trace is not None:
            found = trace(schedule, simulate(schedule))
            pathlib.Path(args.trace).write_text(json.dumps(found) + "\n")
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))
    if args.json:
        print(json.dumps(summary(schedule)))
    elif sys.stdout.isatty():
        color = "NO_COLOR" not in os.environ
        width = shutil.get_terminal_size().columns
        print(text(schedule, color=color, width=width), end="")
    else:
        print(text(schedule), end="")


if __name__ == "__main__":
    main()
