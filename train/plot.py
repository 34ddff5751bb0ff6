"""Draws the log of a run: loss, gradient norm, learning rate and speed, step by step.

    python train/plot.py runs/quickstart-20261121-122427

reads `log.jsonl` in the folder and writes `run.png` beside it. The training script does
so at its end. Each point is a line of the log, and so a mean over the steps before it.
"""

import json
import pathlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TRAINING, _HELD_OUT = "#1f78b4", "#8c2d04"
_SPEED = "_per_second"


def read(run_dir: pathlib.Path) -> list[dict]:
    """The records of a run's log.

    Raises:
      FileNotFoundError: if the folder has no log.
      ValueError: if a line of it is not a record.
    """
    path = pathlib.Path(run_dir) / "log.jsonl"
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no log `{path}`. Name the folder of a run, which training prints "
            "as `run folder`."
        )
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            record["step"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"line {number} of `{path}` is not a record with a step: {line[:40]!r}. "
                "Remove the line if the run died while it wrote."
            ) from None
        records.append(record)
    return records


def figure(records: list[dict], title: str) -> "Figure | None":
    """The picture as a Matplotlib figure, one panel to a quantity that the log has.

    Args:
      records: what `read` returns.
      title: a line above the picture.

    Returns:
      A figure that belongs to no window; None if there is nothing to draw.
    """
    names = dict.fromkeys(name for record in records for name in record)
    speeds = [name for name in names if name.endswith(_SPEED)]
    panels = {
        "loss (nats)": ["loss", "test_loss"],
        "gradient norm": ["gradient_norm"],
        "learning rate": ["learning_rate"],
        **{f"speed ({s.removesuffix(_SPEED)}/s)": [s] for s in speeds},
    }
    series = {name: _series(records, name) for name in sum(panels.values(), [])}
    panels = {
        label: drawn
        for label, names in panels.items()
        if (drawn := [name for name in names if series[name]])
    }
    if not panels:
        return None

    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    # Inches; the first panel is the one to look at.
    heights = [2.0] + [1.1] * (len(panels) - 1)
    size = (7, sum(heights) + 0.35 * len(panels) + 0.9)
    fig = Figure(figsize=size, facecolor="white", layout="constrained")
    fig.get_layout_engine().set(h_pad=0.06, w_pad=0.12)
    fig.suptitle(
        "\n".join([title, *_summary(records)]), fontsize=9, x=0.02, ha="left", wrap=True
    )
    rows = fig.subplots(len(panels), sharex=True, height_ratios=heights, squeeze=False)
    for axes, (label, names) in zip(rows[:, 0], panels.items(), strict=True):
        for name in names:
            steps, values = zip(*series[name])
            held_out = name == "test_loss"
            axes.plot(
                steps,
                values,
                color=_HELD_OUT if held_out else _TRAINING,
                lw=1.2,
                marker="o" if held_out else ".",
                ms=4 if held_out or len(steps) <= 50 else 0,
                label="held-out" if held_out else "training",
            )
        values = [value for name in names for _, value in series[name]]
        _scale(axes, names, min(values), max(values))
        axes.set_title(label, fontsize=8, loc="left", pad=4)
        axes.set_facecolor("#f7f7f7")
        axes.spines[:].set_visible(False)
        axes.grid(color="#dddddd", lw=0.5)
        axes.tick_params(which="both", labelsize=8, length=0)
        axes.set_axisbelow(True)
        if "test_loss" in names:
            axes.legend(fontsize=8, frameon=False)
    axes.set_xlim(0, max(record["step"] for record in records) * 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel("step", fontsize=8, loc="left")
    return fig


def save(run_dir: pathlib.Path) -> pathlib.Path | None:
    """Draws the log in the folder of a run to `run.png` there.

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
    fig.savefig(run_dir / "run.png", dpi=100)
    return run_dir / "run.png"


def _series(records: list[dict], name: str) -> list[tuple[int, float]]:
    """(step, value) of the records that have a number of that name."""
    return [(r["step"], r[name]) for r in records if r.get(name) is not None]


def _scale(axes, names: list[str], low: float, high: float) -> None:
    """Chooses the axis of values from `low` to `high`: from 0, if that shows them all."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    loss = "loss" in names or "test_loss" in names
    if (loss or "gradient_norm" in names) and 0 < 10 * low < high:
        axes.set_yscale("log")
        subs = (1, 2, 5) if high < 100 * low else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        if not loss and high > 0:
            axes.set_ylim(0, high * 1.1)
        axes.locator_params(axis="y", nbins=4)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.12g}"))


def _summary(records: list[dict]) -> list[str]:
    """How the run ended, in a line, if it did."""
    for record in reversed(records):
        if "error" in record:
            return [f"step {record['step']}: {record['error']}"]
        if "test_accuracy" in record:
            words = f"after step {record['step']}, held-out: "
            words += f"accuracy {record['test_accuracy']:.2%}"
            words += f", loss {record['test_loss']:.4f}"
            if "bits_per_byte" in record:
                words += f", {record['bits_per_byte']:.3f} bits per byte"
            return [words]
    return []


def main(argv: list[str]) -> int:
    """Runs the command line: 0, or 2 and a line on stderr if there is nothing to draw."""
    if len(argv) != 1 or argv[0] in ("--help", "-h"):
        print(__doc__.strip())
        return 0 if argv and argv[0] in ("--help", "-h") else 2
    try:
        path = save(pathlib.Path(argv[0]))
        if path is None:
            raise ValueError(f"the log in `{argv[0]}` has nothing to draw yet.")
    except (ValueError, OSError) as error:
        print(f"plot.py: {error}", file=sys.stderr)
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
