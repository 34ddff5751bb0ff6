"""Draws the log of a run: loss, gradient norm, learning rate and speed by step.

    python train/plot.py runs/quickstart-20261121-122427

reads `log.jsonl` in the folder and writes `run.png` beside it. The training script does
so at its end. Light lines show every step. Dark points show the mean over the steps of a
line of the log, in the middle of those steps. Points of the held-out data show an
evaluation after the step at which they are drawn. They may lie below the training loss:
training examples are made harder by random shifts and dropout, held-out ones are not.
"""

import functools
import io
import math
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from jpipe._util.foreign import parse, read_text, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TRAINING, _EACH_STEP, _HELD_OUT = "#1f78b4", "#a6cee3", "#8c2d04"
_LOSS, _NORM, _SPEED = "loss (nats)", "gradient norm", "_per_second"
# The picture is 700 pixels wide: more points would lie on each other.
_MOST_POINTS = 2000


def read(run_dir: pathlib.Path) -> list[dict]:
    """Reads the log of a run.

    Args:
      run_dir: the folder of the run.

    Returns:
      One dict per record.

    Raises:
      FileNotFoundError: if the folder has no log.
      ValueError: if a line of the log is not a record.
    """
    path = pathlib.Path(run_dir) / "log.jsonl"
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no log `{path}`. Name the folder of a run; training prints it as `run folder`."
        )
    records = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        try:
            record = parse(line, path)
            record["step"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"line {number} of `{path}` is not a record with a step: {line[:40]!r}. "
                "Remove the line if the run died while it wrote the line."
            ) from None
        records.append(record)
    return records


class _Curve(NamedTuple):
    """One line of a panel: points (step, value) and how they are drawn."""

    label: str
    points: list[tuple[float, float]]
    style: dict[str, Any]


def figure(records: list[dict], title: str) -> "Figure | None":
    """Draws the records as a Matplotlib figure, with one panel per quantity.

    Args:
      records: the result of `read`.
      title: a line above the picture.

    Returns:
      A figure that belongs to no window; None if there is nothing to draw.
    """
    panels = {label: curves for label, curves in _panels(records).items() if any(curve.points for curve in curves)}
    if not panels:
        return None

    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    # Inches. The loss is the panel that readers look at first.
    heights = [2.4] + [1.1] * (len(panels) - 1)
    size = (7, sum(heights) + 0.35 * len(panels) + 0.9)
    layout = ConstrainedLayoutEngine(h_pad=0.06, w_pad=0.12)
    fig = Figure(figsize=size, facecolor="white", layout=layout)
    fig.suptitle("\n".join([title, *_summary(records)]), fontsize=9, x=0.02, ha="left", wrap=True)
    rows = fig.subplots(len(panels), sharex=True, height_ratios=heights, squeeze=False)
    for axes, (label, curves) in zip(rows[:, 0], panels.items(), strict=True):
        curves = [curve for curve in curves if curve.points]
        for curve in curves:
            axes.plot(*zip(*curve.points), label=curve.label, **curve.style)
        _scale(axes, label, curves)
        axes.set_title(label, fontsize=8, loc="left", pad=4)
        axes.set_facecolor("#f7f7f7")
        axes.spines[:].set_visible(False)
        axes.grid(color="#dddddd", lw=0.5)
        axes.tick_params(which="both", labelsize=8, length=0)
        axes.set_axisbelow(True)
        if label == _LOSS or label in _DIAGNOSTICS.values():
            axes.legend(fontsize=8, frameon=False)
    axes.set_xlim(0, max(record["step"] for record in records) * 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel("step", fontsize=8, loc="left")
    return fig


def _panels(records: list[dict]) -> dict[str, list[_Curve]]:
    """The curves of each panel, by the title of the panel; some may have no points."""
    names = dict.fromkeys(name for record in records for name in record)
    speeds = [name for name in names if name.endswith(_SPEED)]
    held_out = _Curve(
        "held-out data, after this step",
        _record_points(records, "test_loss"),
        dict(color=_HELD_OUT, lw=1.2, marker="o", ms=5, zorder=3),
    )
    return {
        _LOSS: [*_training(records, "loss"), held_out],
        _NORM: _training(records, "gradient_norm"),
        "learning rate": [_learning_rate(records)],
        **_diagnostics(records),
        **{f"speed ({name.removesuffix(_SPEED)}/s)": [_means(records, name)] for name in speeds},
    }


# Name in the log -> title of the panel.
_DIAGNOSTICS = {
    "update_cosine": "cosine between an update and the last one",
    "forward_discrepancy": "movement of the weights since the forward",
    "backward_discrepancy": "movement of the weights since the backward",
    "curvature": "curvature (secant)",
    "effective_delay": "effective delay (updates)",
}


def _diagnostics(records: list[dict]) -> dict[str, list[_Curve]]:
    """The panels of late gradients: one line a stage, from dark at stage 0 to light at the last."""
    lines = [(record["step"], record["diagnostics"]) for record in records if record.get("diagnostics")]
    panels: dict[str, list[_Curve]] = {}
    if all(values.get("forward_discrepancy") == values.get("backward_discrepancy") for _, values in lines):
        lines = [(step, {n: v for n, v in values.items() if n != "backward_discrepancy"}) for step, values in lines]
    for name, title in _DIAGNOSTICS.items():
        numbers = sorted({int(s) for _, values in lines for s in values.get(name, {})})
        for s in numbers:
            points = [(step, values[name][str(s)]) for step, values in lines if str(s) in values.get(name, {})]
            shade = s / max(numbers[-1], 1)
            color = (0.05 + 0.8 * shade, 0.2 + 0.5 * shade, 0.45 + 0.1 * shade)
            ends = s in (numbers[0], numbers[-1])
            label = f"stage {s}" if ends else "_"  # Matplotlib leaves out labels that begin so
            panels.setdefault(title, []).append(_Curve(label, points, dict(color=color, lw=1.0, marker=_dot(points))))
    return panels


def _training(records: list[dict], name: str) -> list[_Curve]:
    """The curve of every step, if the log has it, and the means over a log line."""
    points, means = _step_points(records, name), _means(records, name)
    size = -(-len(points) // _MOST_POINTS)
    label = "training, each step"
    if size > 1:
        label = f"training, mean of {size} steps"
        groups = [points[i : i + size] for i in range(0, len(points), size)]
        points = [tuple(sum(axis) / len(g) for axis in zip(*g)) for g in groups]
    if not points:
        return [means]
    if len(points) <= len(means.points):  # one line per step: the curves are the same
        return [_Curve(label, points, means.style | {"marker": _dot(points)})]
    return [_Curve(label, points, dict(color=_EACH_STEP, lw=0.8)), means]


def _learning_rate(records: list[dict]) -> _Curve:
    """The learning rate of every step, or of the log lines if the log has no more."""
    points = _step_points(records, "learning_rate")
    points = points or _record_points(records, "learning_rate")
    return _Curve("", points, dict(color=_TRAINING, lw=1.2, marker=_dot(points)))


def _dot(points: list) -> str:
    """A marker for a curve that is a single point."""
    return "." if len(points) == 1 else ""


def _means(records: list[dict], name: str) -> _Curve:
    """The means of the log lines, each in the middle of its steps."""
    points, before = [], 0
    for record in records:
        if not {"loss", "learning_rate"} & record.keys():  # not a line of training
            continue
        if record.get(name) is not None:
            points.append(((before + 1 + record["step"]) / 2, record[name]))
        before = record["step"]
    size = 4 if len(points) <= 50 else 0
    style = dict(color=_TRAINING, lw=1.2, marker=".", ms=size, zorder=2)
    return _Curve("training, mean of the steps of a log line", points, style)


def _step_points(records: list[dict], name: str) -> list[tuple[float, float]]:
    """(step, value) of every step that has a finite value."""
    points: list[tuple[float, float]] = []
    for record in records:
        values = record.get("each_step", {}).get(name, [])
        first = record["step"] - len(values) + 1
        steps = enumerate(values, first)
        points += [(step, value) for step, value in steps if value is not None]
    return points


def _record_points(records: list[dict], name: str) -> list[tuple[float, float]]:
    """(step, value) of the records that have a number of that name."""
    return [(r["step"], r[name]) for r in records if r.get(name) is not None]


def save(run_dir: pathlib.Path) -> pathlib.Path | None:
    """Draws the log in the folder of a run to `run.png` in the same folder.

    Args:
      run_dir: the folder of the run.

    Returns:
      The path of the picture; None if there is nothing to draw.

    Raises:
      OSError: if there is no log, or the picture cannot be written.
      ValueError: if a line of the log is not a record.
    """
    run_dir = pathlib.Path(run_dir)
    fig = figure(read(run_dir), run_dir.resolve().name)
    if fig is None:
        return None
    png, path = io.BytesIO(), run_dir / "run.png"
    fig.savefig(png, dpi=100, format="png")
    try:
        path.write_bytes(png.getvalue())
    except OSError:  # on a full disk: half of a picture is of no use
        path.unlink(missing_ok=True)
        raise
    return path


def _scale(axes: "Axes", label: str, curves: Sequence[_Curve]) -> None:
    """Chooses the vertical axis of a panel and how its numbers are written."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    drawn = [value for curve in curves for _, value in curve.points]
    # The noise of single steps does not decide.
    smooth = drawn if label in _DIAGNOSTICS.values() else [value for c in curves[-2:] for _, value in c.points]
    low, high = min(smooth), max(smooth)
    if label == _DIAGNOSTICS["update_cosine"]:
        axes.set_ylim(-1.05, 1.05)
        axes.axhline(0, color="#999999", lw=0.8)
    elif label in (_LOSS, _NORM, _DIAGNOSTICS["curvature"]) and min(drawn) > 0 and 10 * low < high:
        axes.set_yscale("log")
        decades = math.log10(max(drawn) / min(drawn))
        subs = (1, 2, 5) if decades < 2 else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=6))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        if label != _LOSS and max(drawn) > 0:
            axes.set_ylim(0, max(drawn) * 1.1)
        axes.locator_params(axis="y", nbins=4)
    limit = max(map(abs, axes.get_ylim()))
    axes.yaxis.set_major_formatter(FuncFormatter(functools.partial(_number, limit)))


def _number(limit: float, value: float, position: int | None = None) -> str:
    r"""A number of an axis that ends at `limit`; powers of ten where it is very large.

    Example:
      >>> _number(5000, 2500), _number(1.0, 0.002), _number(1e7, 2e6)
      ('2,500', '0.002', '$2\\times10^{6}$')
    """
    del position
    if value == 0 or (limit < 1e6 and abs(value) >= 1e-4):
        return f"{value:,.12g}"
    digits, _, exponent = f"{value:.6e}".partition("e")
    factor = float(digits)
    power = f"10^{{{int(exponent)}}}"
    return f"${power}$" if factor == 1 else f"${factor:g}\\times{power}$"


def _summary(records: list[dict]) -> list[str]:
    """The last evaluation or the error that ended the run, as at most one line."""
    for record in reversed(records):
        if "error" in record:
            return [f"step {record['step']}: {record['error']}"]
        if "test_loss" in record:
            return [f"after step {record['step']}, held-out: {evaluation_text(record)}"]
    return []


def evaluation_text(record: Mapping[str, Any]) -> str:
    """The result of an evaluation in words.

    Example:
      >>> evaluation_text({"step": 3, "test_loss": 0.25, "test_accuracy": 0.5})
      'accuracy 50.00%, loss 0.2500'
    """
    names = [n for n in record if n.startswith("test_") and n != "test_loss"]
    words = [f"{name.removeprefix('test_').replace('_', ' ')} {record[name]:.2%}" for name in names]
    words.append(f"loss {record['test_loss']:.4f}")
    if "bits_per_byte" in record:
        words.append(f"{record['bits_per_byte']:.3f} bits per byte")
    return ", ".join(words)


def main(argv: list[str]) -> int:
    """Runs the command line.

    Returns:
      The exit code: 0, or 2 with a line on stderr if there is nothing to draw.
    """
    if len(argv) != 1 or argv[0] in ("--help", "-h"):
        print(__doc__.strip())
        return 0 if argv and argv[0] in ("--help", "-h") else 2
    try:
        path = save(pathlib.Path(argv[0]))
        if path is None:
            raise ValueError(f"the log in `{argv[0]}` has nothing to draw yet.")
    except (ValueError, OSError) as error:
        print(f"plot.py: {shortened(str(error))}", file=sys.stderr)
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
