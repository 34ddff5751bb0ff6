"""Optimizers and corrections for late gradients: three tasks, the delays of 8 and of 100 stages, on one device.

    python benchmarks/asynchronous_methods.py --data data --out runs/methods

trains a byte-level GPT, a ResNet on images and a translator. A layer reads the weights that it would read as one of S
stages: delays fall evenly from S - 1 at the first layer to 0 at the last, which is a pipeline in unit ticks with one
microbatch per update (N = 1). It keeps the weights of each forward for its backward (PipeDream), but for PipeMare's
methods, whose backwards read the newest weights.

`--data` is a folder with `text` (files that end in `train.txt.gz`, `valid.txt.gz` and `test.txt.gz`), `fashion-mnist`
(the four gzipped files of Fashion-MNIST or MNIST) and `translation` (`en_de_train.tsv.gz` and so on). `--quick` needs
no data and shows that everything runs; its figures mean nothing.

The rate of a method is searched with the first seed: a first rate, a third of it and three times it, and further while
the best one is at an edge, at most four rates. The loss of validation data chooses. The other seeds train at the best
rate. A method is compiled once, because the rate is a number in the optimizer's state. A finished run is in `runs.json`
in the output folder and is not run again. `--redraw` makes the tables and the picture again from that file.
"""

import argparse
import collections
import functools
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from asynchronous_scale import (
    Runs,
    best_rate,
    crossing,
    images,
    mean_of,
    pairs,
    search,
    with_rate,
)

import jpipe
from jpipe import optim
from models import ResNet, Transformer, Translation
from train.config import OptimizerConfig
from train.data import shuffled
from train.pairs import VOCAB_SIZE
from train.text import Text, Windows

# -- Tasks

SEQ_LEN = 64
HELD_OUT = 512  # windows of a text, or images


class Task(NamedTuple):
    """What is trained, on what, and the budget.

    Attributes:
      model: of `models/`.
      data: folder or None -> the parts "train", "validation" and "test".
      batch_size: of a minibatch, which is one microbatch.
      num_steps: of a run.
      metric: the name of the result; `better` is max or min.
      scale: what a loss in nats, or an accuracy, is multiplied by to be shown.
      rates: where the search of a rate begins, in multiples of the method's.
      options: further arguments of `jpipe.Pipeline`.
    """

    model: Any
    data: Callable
    batch_size: int
    num_steps: int
    metric: str
    better: Callable
    scale: float
    rates: float = 1.0
    options: Mapping[str, Any] = {}


def text(folder: pathlib.Path | None) -> dict:
    """Windows of texts. Without a folder those of Python's language reference."""

    def short(windows: Windows) -> Windows:
        return Windows(windows.text[: HELD_OUT * SEQ_LEN + 1].tobytes(), SEQ_LEN)

    if folder is None:
        data = Text(seq_len=SEQ_LEN).load()
        return {"train": data.train} | dict.fromkeys(("validation", "test"), short(data.test))

    def read(part: str) -> Windows:
        (path,) = (folder / "text").glob(f"*{part}.txt*")
        return Text(path=str(path), test_path=str(path), seq_len=SEQ_LEN).load().train

    return {
        "train": read("train"),
        "validation": short(read("valid")),
        "test": short(read("test")),
    }


def fashion(folder: pathlib.Path | None) -> dict:
    """The images of `asynchronous_scale.py`, with fewer held out."""
    return images(folder and folder / "fashion-mnist", 4 * HELD_OUT)


def sentences(folder: pathlib.Path | None) -> dict:
    return pairs(folder and folder / "translation")


TITLES = {"gpt": "GPT", "images": "ResNet", "translation": "Translation"}


def tasks(quick: bool) -> dict[str, Task]:
    """The three tasks. With `quick`, runs of a few steps."""
    few = 4 if quick else 0
    return {
        "gpt": Task(
            Transformer(seq_len=SEQ_LEN, dim=32, num_heads=4, num_blocks=4),
            text,
            batch_size=4,
            num_steps=few or 1000,
            metric="bits per byte",
            better=min,
            scale=1 / math.log(2),
        ),
        "images": Task(
            ResNet(num_channels=1, widths=(8, 16), num_blocks=(1, 1), fine_grained=True),
            fashion,
            batch_size=32,
            num_steps=few or 1000,
            metric="test accuracy, %",
            better=max,
            scale=100,
            rates=9.0,
        ),
        "translation": Task(
            Translation(
                vocab_size=VOCAB_SIZE,
                dim=32,
                num_heads=4,
                mlp_dim=64,
                num_encoder_blocks=1,
                num_decoder_blocks=1,
                norm="pre",
                dropout=0.0,
                # Copies of a tied matrix on stages with delays would be updated at different times.
                tie_embeddings=False,
                fine_grained=True,
            ),
            sentences,
            batch_size=16,
            num_steps=few or 1000,
            metric="nats per byte",
            better=min,
            scale=1.0,
        ),
    }


# -- Methods


class Method(NamedTuple):
    """A method.

    Attributes:
      options: of `train.config.OptimizerConfig`.
      rates: where the search begins without delay, at 8 stages and at 100.
      discrepancy: whether backwards read the newest weights instead of those of their forwards.
      warm_up: part of the steps that come first and have no delays (T3).
    """

    options: dict
    rates: tuple[float, float, float]
    discrepancy: bool = False
    warm_up: float = 0.0

    def synchronous_steps(self, num_steps: int) -> int:
        """Steps of a run that have no delays."""
        return int(self.warm_up * num_steps)


FACTOR, MOST_RATES = 3.0, 4
ADAM = dict(name="adamw")
ROTATED = dict(name="basis_rotation")
# At one rate Muon moves a matrix less than Adam does.
MUON = dict(name="muon", momentum=0.95, adam_rate=0.3)
# In multiples of the steps of a run. Slow T1 ends with the root of the delay, and lasting T1 divides by all of it.
T1 = dict(annealing_steps=1)
SLOW_T1 = dict(annealing_steps=2)
LASTING_T1 = dict(annealing_steps=1000)
AHEAD = dict(predict_weights=True)
AHEAD_FADING = dict(predict_weights=True, prediction_decay=0.9)
RATES = (9e-3, 3e-3, 1e-3)
ANNEALED = (9e-3, 9e-3, 3e-3)
MUON_RATES = (2.7e-2, 9e-3, 3e-3)
MUON_ANNEALED = (2.7e-2, 2.7e-2, 9e-3)

METHODS = {
    "Adam": Method(ADAM, RATES),
    "Muon": Method(MUON, MUON_RATES),
    "basis rotation": Method(ROTATED, RATES),
    "PipeMare T1+T2": Method({**ADAM, **T1, "discrepancy_decay": 0.1}, ANNEALED, discrepancy=True),
    "PipeMare T1+T2+T3": Method({**ADAM, **T1, "discrepancy_decay": 0.1}, ANNEALED, True, warm_up=1 / 8),
    "prediction": Method({**ADAM, **AHEAD}, RATES),
    "prediction +T1": Method({**ADAM, **T1, **AHEAD}, ANNEALED),
    "NAdam": Method(dict(name="nadamw", momentum=0.99), (3e-3, 1e-3, 3e-4)),
    "DC-ASGD": Method({**ADAM, "delay_compensation": 2.0}, RATES),
    "Muon, error feedback": Method({**MUON, "error_feedback": 1.0}, MUON_RATES),
    "Muon +T1": Method({**MUON, **T1}, MUON_ANNEALED),
    "Muon +T1, error feedback": Method({**MUON, **T1, "error_feedback": 1.0}, MUON_ANNEALED),
    "Muon, momentum 0.8": Method({**MUON, "momentum": 0.8}, MUON_RATES),
    "Muon +T1, momentum 0.8": Method({**MUON, **T1, "momentum": 0.8}, MUON_ANNEALED),
    "Muon +T1, momentum 0.5": Method({**MUON, **T1, "momentum": 0.5}, MUON_ANNEALED),
    "Muon +slow T1, momentum 0.8": Method({**MUON, **SLOW_T1, "momentum": 0.8}, MUON_ANNEALED),
    "Muon +lasting T1, momentum 0.8": Method({**MUON, **LASTING_T1, "momentum": 0.8}, (2.7e-2, 2.7e-2, 2.7e-2)),
    "Muon +T1, momentum 0.8, error feedback": Method(
        {**MUON, **T1, "momentum": 0.8, "error_feedback": 1.0}, MUON_ANNEALED
    ),
    "Muon, fading prediction": Method({**MUON, **AHEAD_FADING}, MUON_RATES),
    "Muon +T1, fading prediction": Method({**MUON, **T1, **AHEAD_FADING}, MUON_ANNEALED),
    "basis rotation +T1": Method({**ROTATED, **T1}, ANNEALED),
    "basis rotation +T1, fading prediction": Method({**ROTATED, **T1, **AHEAD_FADING}, ANNEALED),
}
SYNCHRONOUS = ("Adam", "Muon", "basis rotation", "Muon, momentum 0.8")


def optimizer_config(method: Method, num_steps: int) -> OptimizerConfig:
    """The options of a method as those of a training run. The rate is left open."""
    options = dict(method.options)
    if "annealing_steps" in options:
        options["annealing_steps"] *= num_steps
    shared = dict(warmup_steps=min(50, num_steps), b2=0.95, clip_norm=1.0)
    return OptimizerConfig(**shared, ema_decay=0.99, **options)


def delays_of(num_layers: int, S: int) -> np.ndarray:
    """Delays of the layers of S stages, in updates.

    Example:
      >>> delays_of(4, 7).tolist(), delays_of(4, 1).tolist()
      ([6, 4, 2, 0], [0, 0, 0, 0])
    """
    return np.linspace(S - 1, 0, num_layers).round().astype(int)


class Trainer:
    """A method at the delays of S stages, or at one delay of every layer, compiled once."""

    def __init__(self, task: Task, data: dict, method: Method, S: int, delay: int | None = None):
        self.task, self.data = task, data
        self.first_states: dict[int, jpipe.PipelineState] = {}
        layers = task.model.layers()
        late = delays_of(len(layers), S) if delay is None else np.full(len(layers), delay)
        config = optimizer_config(method, task.num_steps)

        def optimizer(learning_rate: Any) -> optax.GradientTransformation:
            return config.transform(task.num_steps, learning_rate)

        make = functools.partial(
            jpipe.Pipeline,
            layers,
            loss=task.model.loss(),
            has_aux=True,
            optimizer=optax.inject_hyperparams(optimizer)(learning_rate=1.0),
            boundaries=list(range(1, len(layers))),
            **config.options_of_pipeline(),
            **task.options,
        )
        table, none = jpipe.schedules.with_delays, 0 * late
        backward = none if method.discrepancy else None
        self.pipe = make(schedule=table(late, backward_delays=backward))
        self.warm_up = method.synchronous_steps(task.num_steps)
        self.first = make(schedule=table(none)) if self.warm_up else self.pipe

    def first_state(self, seed: int) -> jpipe.PipelineState:
        if seed not in self.first_states:
            batches = shuffled(self.data["train"], self.task.batch_size, seed)
            state = self.first.init(jax.random.key(seed), next(batches))
            self.first_states[seed] = state
        # A step overwrites its state.
        return jax.tree.map(jnp.copy, self.first_states[seed])

    def evaluate(self, pipe: jpipe.Pipeline, state: jpipe.PipelineState, part: str) -> tuple[float, float]:
        """The metric and the loss of the newest weights, on "validation" or "test"."""
        examples = self.data[part]
        batch = examples.batch(np.arange(len(examples)), None)
        found = pipe.evaluate(state, batch)
        loss, accuracy = float(found["loss"]), float(found["aux"]["accuracy"])
        return (loss if self.task.better is min else accuracy), loss

    def run(self, rate: float, seed: int) -> dict:
        """One run.

        Returns:
          "curve", a list of [step, training loss since the last entry, test metric, test loss];
          "validation", the loss of the last weights on the validation examples, infinite if a loss
          was not finite; "averaged", the test metric of the average of the weights; "seconds".
        """
        task, pipe, start = self.task, self.first, time.perf_counter()
        batches = shuffled(self.data["train"], task.batch_size, seed)
        state = with_rate(self.first_state(seed), rate)
        losses, curve = [], []
        for step in range(1, task.num_steps + 1):
            if pipe is not self.pipe and step > self.warm_up:
                pipe = self.pipe
                state = pipe.adopt(state)
            state, metrics = pipe.step(state, next(batches))
            losses.append(metrics["loss"])
            if step % (task.num_steps // min(10, task.num_steps)) == 0:
                mean, losses = float(np.mean(jax.device_get(losses))), []
                curve.append([step, mean, *self.evaluate(pipe, state, "test")])
                if not math.isfinite(mean + curve[-1][-1]):
                    break
        _, validation = self.evaluate(pipe, state, "validation")
        average = pipe.with_params(state, optim.averaged_params)
        averaged, _ = self.evaluate(pipe, average, "test")
        if not math.isfinite(curve[-1][1] + validation):
            validation = math.inf
        return {
            "curve": curve,
            "validation": validation,
            "averaged": averaged,
            "seconds": round(time.perf_counter() - start, 1),
        }


def train(
    name: str,
    task: Task,
    data: dict,
    runs: Runs,
    cells: list[tuple[int, str]],
    seeds: int,
    rates: int,
) -> None:
    """Trains the methods of a task, `cells` of stages and method; S = 1 is synchronous."""
    for S, of in cells:
        method = METHODS[of]

        @functools.cache
        def trainer(method: Method = method, S: int = S) -> Trainer:
            return Trainer(task, data, method, S)

        def result(rate: float, seed: int = 0, key: str = f"{name}|{S}|{of}") -> float:
            key = f"{key}|{rate:.3g}|{seed}"
            run = runs.get(key, lambda: trainer().run(rate, seed))
            return run["validation"]

        first = task.rates * method.rates[0 if S == 1 else 1 if S <= 16 else 2]
        best = search(first, result, FACTOR, rates)
        for seed in range(1, seeds):
            result(best, seed)


# -- Figures


class Row(NamedTuple):
    """What a method did at S stages, at its best rate.

    Attributes:
      rate: the best one; `tried` has the validation loss of each rate with the first seed.
      ends: the metric at the end, of each seed, as it is shown; `averaged` that of the average of the weights.
      curves: of each seed, of `Trainer.run`, with the metric as it is shown.
    """

    rate: float
    tried: dict[float, float]
    ends: list[float]
    averaged: list[float]
    curves: list[list[list[float]]]

    @property
    def mean(self) -> float:
        return statistics.mean(self.ends)

    def steps_to(self, task: Task, target: float) -> float | None:
        """Steps to a target, the mean of the seeds; None if one did not reach it."""
        sign = 1 if task.better is max else -1
        steps = [crossing(curve, lambda value: sign * (value - target)) for curve in self.curves]
        return None if None in steps else statistics.mean(steps)


def rows_of(name: str, task: Task, runs: dict) -> dict[tuple[int, str], Row]:
    """The rows of a task by (S, method), S = 1 for synchronous training."""
    tried: dict[tuple[int, str], dict[float, list]] = {}
    for key, run in runs.items():
        of_task, S, method, rate, _ = key.split("|")
        if of_task == name:
            cell = tried.setdefault((int(S), method), {})
            cell.setdefault(float(rate), []).append(run)

    def shown(run: dict, value: float) -> float:
        return task.scale * value if math.isfinite(run["validation"]) else math.nan

    chosen = {cell: rates[best_rate(rates)] for cell, rates in tried.items()}
    ends = {cell: [shown(run, run["curve"][-1][2]) for run in of] for cell, of in chosen.items()}
    return {
        cell: Row(
            best_rate(tried[cell]),
            {rate: of[0]["validation"] for rate, of in sorted(tried[cell].items())},
            ends[cell],
            [shown(run, run["averaged"]) for run in of],
            [
                [[step, loss, task.scale * metric, held_out] for step, loss, metric, held_out in run["curve"]]
                for run in of
            ],
        )
        for cell, of in chosen.items()
    }


def winner(task: Task, rows: dict, S: int) -> str:
    """The method with the best mean at S stages, of those with the most seeds."""
    of = {method: row for (stages, method), row in rows.items() if stages == S}
    most = max(len(row.ends) for row in of.values())
    finite = {m: row for m, row in of.items() if math.isfinite(row.mean)}
    complete = {m: row.mean for m, row in finite.items() if len(row.ends) == most}
    return task.better(complete, key=complete.__getitem__)


def target_of(task: Task, rows: dict, S: int) -> float:
    """The metric that a method has to reach: the end of the winner's worst seed."""
    ends = rows[S, winner(task, rows, S)].ends
    return min(ends) if task.better is max else max(ends)


def _spread(values: list[float]) -> str:
    return mean_of(values, 2 if values[0] > 20 else 3)


def time_to(task: Task, rows: dict, cell: tuple[int, str], S: int) -> float | None:
    """The time to the target of S stages, in steps of a pipeline that is never idle; None if it is not reached.

    A synchronous pipeline of S stages with one microbatch per update is idle for all but 1 / S of the time, and so is
    one in the synchronous steps of T3.

    Args:
      task: of the runs.
      rows: of `rows_of`.
      cell: the number of stages of a run, 1 for synchronous training, and its method.
      S: stages of the pipeline.
    """
    steps = rows[cell].steps_to(task, target_of(task, rows, S))
    if steps is None:
        return None
    stages, method = cell
    slow = METHODS[method].synchronous_steps(task.num_steps)
    return steps + (S - 1) * (steps if stages == 1 else min(steps, slow))


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def markdown(task: Task, rows: dict, S: int) -> str:
    """The table of a task at S stages: synchronous methods first, then the best of the others first.

    Time is that of `time_to`.
    """
    best, target = winner(task, rows, S), target_of(task, rows, S)
    sign = 1 if task.better is max else -1
    base = rows[1, winner(task, rows, 1)].mean

    def order(cell: tuple[int, str]) -> tuple:
        mean = rows[cell].mean
        return cell[0] > 1, -sign * mean if math.isfinite(mean) else math.inf

    lines = [
        f"| method | rate (tried) | {task.metric} | of the average | behind | steps to target | time to target |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in sorted((cell for cell in rows if cell[0] in (1, S)), key=order):
        stages, method = cell
        row = rows[cell]
        name = f"synchronous {method}" if stages == 1 else method
        words = [
            f"**{name}**" if stages > 1 and method == best else name,
            f"{row.rate:g} ({', '.join(f'{rate:g}' for rate in row.tried)})",
            _spread(row.ends),
            _spread(row.averaged),
            f"{sign * (base - row.mean) + 0:.3f}" if math.isfinite(row.mean) else "-",
            _count(row.steps_to(task, target)),
            _count(time_to(task, rows, cell, S)),
        ]
        lines.append("| " + " | ".join(words) + " |")
    lines.append(f"\nTarget: {target:.3f}, the end of the worst seed of the best method.")
    return "\n".join(lines)


def summary(found: dict[str, tuple[Task, dict]]) -> str:
    """The winner of every task and number of stages, beside the best synchronous method and plain Adam."""
    lines = [
        "| task | S | best method | its result | best synchronous | behind | Adam with delays | time to target | "
        "synchronous |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, (task, rows) in found.items():
        sign = 1 if task.better is max else -1
        base = winner(task, rows, 1)
        for S in sorted({S for S, _ in rows} - {1}):
            best = winner(task, rows, S)
            row, sync, naive = rows[S, best], rows[1, base], rows.get((S, "Adam"))
            words = [
                f"{TITLES[name]}, {task.metric}",
                str(S),
                best,
                _spread(row.ends),
                f"{_spread(sync.ends)} ({base})",
                f"{sign * (sync.mean - row.mean):.3f}",
                _spread(naive.ends) if naive else "-",
                *(_count(time_to(task, rows, of, S)) for of in ((S, best), (1, base))),
            ]
            lines.append("| " + " | ".join(words) + " |")
    return "\n".join(lines)


def draw(found: dict[str, tuple[Task, dict]], path: pathlib.Path) -> None:
    """The metric at the end of the methods, at every number of stages: a panel for each task.

    A method with one result has a row in the tables alone.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    used = collections.Counter(method for _, rows in found.values() for _, method in rows)
    names = [method for method in METHODS if used[method] > 1]
    figure, panels = pyplot.subplots(
        1, len(found), figsize=(4 * len(found) + 2, 0.34 * len(names) + 1.6), sharey=True,
        layout="constrained", squeeze=False,
    )  # fmt: skip
    for ax, (task, rows) in zip(panels[0], found.values(), strict=True):
        drawn = {cell: row for cell, row in rows.items() if cell[1] in names}
        stages = sorted({S for S, _ in drawn})
        best = rows[1, winner(task, rows, 1)].mean
        label = "best synchronous method"
        ax.axvline(best, color="black", linewidth=1, linestyle=":", label=label)
        for i, S in enumerate(stages):
            marker, color = ("D", "black") if S == 1 else ("o", f"C{i - 1}")
            label = "synchronous" if S == 1 else f"{S} stages"
            for method in names:
                row = rows.get((S, method))
                if row is None or not math.isfinite(row.mean):
                    continue
                y = [names.index(method)] * len(row.ends)
                ax.plot(row.ends, y, color=color, alpha=0.4)
                ax.plot(row.mean, y[0], marker, color=color, ms=5, label=label)
                label = None
        better = "lower is better" if task.better is min else "higher is better"
        ax.set_xlabel(f"{task.metric} ({better})")
        ax.grid(alpha=0.3)
    labels = [name.replace(" +", " with ") for name in names]
    panels[0][0].set_yticks(range(len(names)), labels)
    panels[0][0].invert_yaxis()
    for ax, name in zip(panels[0], found, strict=True):
        ax.set_title(TITLES[name], fontsize=11)
    figure.legend(
        *panels[0][0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def report(runs: dict, quick: bool, out: pathlib.Path) -> None:
    """Writes and prints the tables of the runs so far, and draws them."""
    found, parts = {}, []
    for name, task in tasks(quick).items():
        stages = {int(key.split("|")[1]) for key in runs if key.split("|")[0] == name}
        if 1 not in stages or len(stages) == 1:
            continue  # nothing to compare
        rows = rows_of(name, task, runs)
        stages = sorted(stages - {1})
        found[name] = task, rows
        parts += [f"### {TITLES[name]}, {S} stages\n\n{markdown(task, rows, S)}" for S in stages]
    if not found:
        return
    text = "\n\n".join([summary(found), *parts])
    print(text)
    (out / "table.md").write_text(text + "\n")
    draw(found, out / "methods.png")


def shared_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options of all runs."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, help="folder of the data")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=int, default=MOST_RATES, help="the most for a method")
    parser.add_argument("--quick", action="store_true", help="a few steps, no data")
    parser.add_argument("--redraw", action="store_true", help="only draw")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of the command line.

    Raises:
      SystemExit: if there must be data, and is none.
    """
    args = parser.parse_args()
    if args.data is None and not (args.quick or args.redraw):
        raise SystemExit("`--data` must name the folder of the data. Or pass `--quick`.")
    return args


def main() -> None:
    parser = shared_parser(__doc__)
    known = tasks(quick=False)
    parser.add_argument("--tasks", nargs="+", choices=known, default=list(known))
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 8, 100])
    parser.add_argument("--methods", nargs="+", help="some of them, by name")
    args = parsed(parser)
    names = args.methods or list(METHODS)
    if unknown := set(names) - set(METHODS):
        raise SystemExit(f"no method {', '.join(sorted(unknown))}: there are {'; '.join(METHODS)}.")
    args.out.mkdir(parents=True, exist_ok=True)
    runs = Runs(args.out / "runs.json")
    for name in () if args.redraw else args.tasks:
        task = tasks(args.quick)[name]
        data = task.data(None if args.quick else args.data)
        cells = [(S, of) for S in args.stages for of in names if S > 1 or of in SYNCHRONOUS]
        rates = 1 if args.quick else args.rates
        train(name, task, data, runs, cells, args.seeds, rates)
    report(runs.found, args.quick, args.out)


if __name__ == "__main__":
    main()
