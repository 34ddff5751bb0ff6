"""Asynchronous methods on one GPU in half an hour: loss curves of a GPT of 120 million weights.

    pip install "jax[cuda13]" -e .                                  # once
    python benchmarks/asynchronous_gpu.py --out runs/gpu
    python benchmarks/asynchronous_gpu.py --out runs/gpu --rehearse  # a small model on any machine, in minutes
    python benchmarks/asynchronous_gpu.py --out runs/gpu --redraw

A byte-level GPT of dim 768 and 17 blocks trains in bfloat16 with the delays of 8 and of 32 stages, and with the delay
of one update that PipeDream-2BW has, in the settings of `asynchronous_methods.py`. One device emulates all stages.
The text is that of the sources of Python's standard library (PSF licence), of which every 20th file is held out.

All runs have equally many steps: as many as let all methods end within `--minutes`, by the seconds of the first steps
of synchronous Adam. There is one seed and no search. Rates of Muon are the best ones of dim 64
(`asynchronous_sizes.py`), and those of Adam these times 64 / dim, since its steps do not shrink with the width. A
finished run is in `runs.json` in the output folder and is not run again.
"""

import argparse
import math
import pathlib
import sys
import sysconfig
import time
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import jax
from asynchronous_methods import METHODS, Task, Trainer
from asynchronous_scale import Runs
from asynchronous_sizes import ONE_UPDATE, TITLES

from models import Transformer
from train.text import Windows

RATES = {
    (1, "Adam"): 0.003,
    (1, "Muon"): 0.027,
    (ONE_UPDATE, "Muon, error feedback"): 0.027,
    (8, "Adam"): 0.003,
    (8, "PipeMare T1+T2"): 0.003,
    (8, "Muon, error feedback"): 0.009,
    (32, "Adam"): 0.001,
    (32, "PipeMare T1+T2"): 0.000333,
    (32, "Muon +T1, momentum 0.8"): 0.027,
}
"""The best rates of dim 64, in the order of the runs."""
TUNED_DIM, TRIAL_STEPS = 64, 10
SLOWER = 1.3
"""The seconds of a step of other methods, at most, over those of synchronous Adam."""


class Size(NamedTuple):
    """The model, and the rows of a step."""

    dim: int
    num_heads: int
    num_blocks: int
    seq_len: int
    batch_size: int
    held_out: int
    most_steps: int


SIZE = Size(dim=768, num_heads=12, num_blocks=17, seq_len=256, batch_size=32, held_out=128, most_steps=5000)
REHEARSAL = Size(dim=16, num_heads=2, num_blocks=2, seq_len=16, batch_size=4, held_out=16, most_steps=20)


def sources(size: Size) -> dict[str, Windows]:
    """Windows of the sources of Python's standard library. The held-out ones are validation and test."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in sorted(folder.rglob("*.py")) if "site-packages" not in file.parts]
    held_out = set(files[::20])
    train, test = (
        b"\n".join(file.read_bytes() for file in files if (file in held_out) == is_test) for is_test in (False, True)
    )
    windows = Windows(test[: size.held_out * size.seq_len + 1], size.seq_len)
    return {"train": Windows(train, size.seq_len), "validation": windows, "test": windows}


def task_of(size: Size, num_steps: int) -> Task:
    """The GPT, trained for so many steps."""
    model = Transformer(seq_len=size.seq_len, dim=size.dim, num_heads=size.num_heads, num_blocks=size.num_blocks)
    options = {} if jax.default_backend() == "cpu" else {"compute_dtype": "bfloat16"}
    return Task(
        model,
        lambda folder: sources(size),
        batch_size=size.batch_size,
        num_steps=num_steps,
        metric="bits per byte",
        better=min,
        scale=1 / math.log(2),
        options=options,
    )


def trainer_of(cell: tuple[int, str], size: Size, data: dict, num_steps: int) -> Trainer:
    """A method at the delays of so many stages."""
    S, name = cell
    return Trainer(task_of(size, num_steps), data, METHODS[name], S, delay=1 if S == ONE_UPDATE else None)


def rate_of(cell: tuple[int, str], dim: int) -> float:
    """The rate of a method at a width.

    Example:
      >>> rate_of((1, "Adam"), 640), rate_of((1, "Muon"), 640)
      (0.0003, 0.027)
    """
    return RATES[cell] * (1.0 if "Muon" in cell[1] else TUNED_DIM / dim)


def steps_within(seconds: float, size: Size, data: dict) -> int:
    """The steps of a run, such that all runs end within some seconds."""
    cell = (1, "Adam")
    trainer = trainer_of(cell, size, data, 2 * TRIAL_STEPS)
    start = time.perf_counter()
    trainer.run(rate_of(cell, size.dim), 0)
    first = time.perf_counter() - start
    again = trainer.run(rate_of(cell, size.dim), 0)["seconds"]
    left = seconds - first - again - (first - again) * len(RATES)  # every method compiles
    number = int(left / len(RATES) / (SLOWER * again / (2 * TRIAL_STEPS)))
    return max(TRIAL_STEPS, min(number, size.most_steps))


def key_of(size: Size, cell: tuple[int, str], num_steps: int) -> str:
    """The name of a run in `runs.json`."""
    return "|".join(map(str, (size.dim, *cell, num_steps, f"{rate_of(cell, size.dim):.3g}")))


def runs_of(size: Size, runs: Runs) -> dict[str, Any]:
    """The finished runs of a size."""
    return {key: run for key, run in runs.found.items() if key.startswith(f"{size.dim}|")}


def lines_of(runs: dict[str, Any]) -> list[str]:
    """The table of the finished runs."""
    lines = ["| delays | method | rate | bits per byte at the end | seconds |", "|---|---|---|---|---|"]
    for key, run in runs.items():
        _, S, name, _, rate = key.split("|")
        end = run["curve"][-1][2] / math.log(2)
        lines.append(f"| {TITLES[int(S)]} | {name} | {float(rate):.2g} | {end:.3f} | {run['seconds']:.0f} |")
    return lines


def draw(runs: dict[str, Any], path: pathlib.Path) -> None:
    """Held-out bits per byte against the step, a panel for each kind of delays."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = list(dict.fromkeys(int(key.split("|")[1]) for key in runs))
    figure, panels = pyplot.subplots(
        1, len(kinds), figsize=(4 * len(kinds), 3.6), sharey=True, layout="constrained", squeeze=False
    )
    for ax, kind in zip(panels[0], kinds, strict=True):
        for key, run in runs.items():
            _, S, name, *_ = key.split("|")
            if int(S) == kind:
                steps, bits = zip(*[(entry[0], entry[2] / math.log(2)) for entry in run["curve"]], strict=True)
                ax.plot(steps, bits, label=name)
        ax.set_title(TITLES[kind])
        ax.set_xlabel("step")
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    panels[0][0].set_ylabel("bits per byte (lower is better)")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Trains every method, and writes the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--minutes", type=float, default=30.0, help="for all runs")
    parser.add_argument("--rehearse", action="store_true", help="a small model and few steps")
    parser.add_argument("--redraw", action="store_true", help="only draw")
    args = parser.parse_args()
    if args.minutes <= 0:
        raise SystemExit(f"`--minutes` must be above 0, got {args.minutes:g}.")
    if jax.default_backend() == "cpu" and not (args.rehearse or args.redraw):
        raise SystemExit("JAX finds no GPU, and a CPU would take days. Pass `--rehearse` for a small model.")
    args.out.mkdir(parents=True, exist_ok=True)
    runs, size = Runs(args.out / "runs.json"), REHEARSAL if args.rehearse else SIZE
    if not args.redraw:
        data = sources(size)
        known = list(runs_of(size, runs))
        num_steps = int(known[0].split("|")[3]) if known else steps_within(60 * args.minutes, size, data)
        print(f"{jax.devices()[0].device_kind}: {num_steps} steps, {len(data['train'])} windows", flush=True)
        for cell in RATES:
            rate, key = rate_of(cell, size.dim), key_of(size, cell, num_steps)
            runs.get(key, lambda: trainer_of(cell, size, data, num_steps).run(rate, 0))  # noqa: B023
            jax.clear_caches()
    finished = runs_of(size, runs)
    if not finished:
        raise SystemExit(f"`{args.out}` has no finished run of this size to draw. Leave `--redraw` out.")
    text = "\n".join(lines_of(finished))
    print(text)
    (args.out / "table.md").write_text(text + "\n")
    draw(finished, args.out / "curves.png")


if __name__ == "__main__":
    main()
