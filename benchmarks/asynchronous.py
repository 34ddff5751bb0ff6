"""What asynchrony costs and what its corrections give back: two tasks, every method, several seeds.

    python benchmarks/asynchronous.py --task mnist --out results/mnist
    python benchmarks/asynchronous.py --task gpt --out results/gpt
    python benchmarks/asynchronous.py --task mnist --tune --out results/mnist-rates     # the synchronous rate

Every run is `train/train.py` with a configuration of `configs/` and the overrides of METHODS, for the same number of
epochs at the same learning rate, which is the synchronous run's best. A run whose folder is complete is not run again,
so an interrupted command goes on where it was. At the end: a table, `results.json` and a picture of the curves in the
output folder.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

STAGES = 8
NONE = {
    "optimizer.annealing_steps": "none",
    "optimizer.discrepancy_decay": "none",
    "optimizer.predict_weights": "false",
    "pipeline.synchronous_steps": 0,
}


def corrected(**changes) -> dict:
    """The overrides of a PipeMare table with some of the configuration's corrections."""
    kept = {name: value for name, value in NONE.items() if name not in changes}
    return {**kept, **{k: v for k, v in changes.items() if v is not None}}


T1, T2 = "optimizer.annealing_steps", "optimizer.discrepancy_decay"
T3, AHEAD = "pipeline.synchronous_steps", "optimizer.predict_weights"
KEEP = None  # what the configuration says

# Synchronous training is the same at any number of stages: one is the fastest here.
SYNCHRONOUS = {"pipeline.schedule": "gpipe", "pipeline.num_stages": 1}


def methods(warm_up: int, microbatches_of_2bw: int) -> dict[str, dict]:
    """Name -> overrides of the configuration."""
    unit = {"pipeline.options.ticks": "unit"}
    return {
        "synchronous": SYNCHRONOUS | NONE,
        "asynchronous": corrected(),
        "+T1": corrected(**{T1: KEEP}),
        "+T1+T2": corrected(**{T1: KEEP, T2: KEEP}),
        "+T1+T2+T3": corrected(**{T1: KEEP, T2: KEEP}) | {T3: warm_up},
        "unit ticks": corrected() | unit,
        "unit ticks +T1+T2": corrected(**{T1: KEEP, T2: KEEP}) | unit,
        "prediction": corrected() | unit | {AHEAD: "true"},
        "PipeDream": NONE | {"pipeline.schedule": "pipedream"},
        "2BW": NONE
        | unit
        | {
            "pipeline.schedule": "pipedream_2bw",
            "pipeline.num_microbatches": microbatches_of_2bw,
        },
    }


TASKS = {
    "mnist": {
        "config": "mnist_pipemare",
        "metric": "test_accuracy",
        "better": max,
        "methods": methods(warm_up=134, microbatches_of_2bw=8),
        "rates": [0.025, 0.05, 0.1, 0.2, 0.4],
    },
    "gpt": {
        "config": "gpt_pipemare",
        "metric": "bits_per_byte",
        "better": min,
        "methods": methods(warm_up=100, microbatches_of_2bw=8),
        "rates": [1e-3, 2e-3, 4e-3, 8e-3],
    },
}


def run(config: str, overrides: dict, folder: pathlib.Path) -> list[dict]:
    """Trains once, unless it has been done; the records of the log."""
    done = folder / "done.json"
    if not done.exists():
        if folder.exists():
            raise SystemExit(f"{folder} holds a run that did not end: remove it.")
        command = [sys.executable, str(ROOT / "train" / "train.py")]
        command += ["--config", str(ROOT / "configs" / f"{config}.py")]
        command += [f"--config.{name}={value}" for name, value in overrides.items()]
        command += [f"--config.run_dir={folder}"]
        start = time.perf_counter()
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode not in (0, 1):  # 1: the loss was not finite, a result too
            raise SystemExit(f"{' '.join(command)} failed:\n{ended.stderr[-3000:]}")
        seconds = round(time.perf_counter() - start, 1)
        done.write_text(json.dumps({"code": ended.returncode, "seconds": seconds}))
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def held_out(log: list[dict], metric: str) -> list[tuple[int, float]]:
    """(step, metric) of every evaluation."""
    return [(r["step"], r[metric]) for r in log if metric in r]


def summary(task: dict, name: str, logs: list[list[dict]]) -> dict:
    """What the seeds of one method came to; a run that diverged has no last value."""
    metric = task["metric"]
    last = [c[-1][1] if (c := held_out(log, metric)) else None for log in logs]
    ended = [value for value in last if value is not None]
    return {
        "method": name,
        "last": last,
        "mean": statistics.mean(ended) if ended else None,
        "spread": statistics.stdev(ended) if len(ended) > 1 else None,
        "diverged": len(last) - len(ended),
        "curves": [held_out(log, metric) for log in logs],
    }


def facts(task: dict, overrides: dict) -> dict:
    """What the table says of a method at STAGES stages: utilisation, and weights in memory of the first stage.

    The synchronous run is priced as GPipe on as many stages; N microbatches keep its N / (N + S - 1) of the devices busy.
    """
    import jpipe

    name = overrides.get("pipeline.schedule", "pipemare")
    N = int(overrides.get("pipeline.num_microbatches", 1))
    ticks = overrides.get("pipeline.options.ticks", "paired")
    if name == "gpipe":
        return {"utilisation": N / (N + STAGES - 1), "versions": 1, "delay": 0}
    table = getattr(jpipe.schedules, name)(STAGES, N, ticks=ticks)
    found = table.facts()
    return {
        "utilisation": 1 - found.bubble,
        "versions": int(found.weight_versions.max()),
        "delay": int(found.forward_delay.max()),
    }


def steps_to(task: dict, curve: list, target: float) -> int | None:
    """The first evaluation that reaches the target."""
    better = task["better"]
    return next((step for step, v in curve if better(v, target) == v), None)


def table(task: dict, rows: list[dict], num_steps: int, margin: float) -> str:
    """The results as Markdown. The target is the synchronous mean, less a margin."""
    lines = [
        f"| method | {task['metric']} | diverged | largest delay | weight versions | utilisation | steps to target | "
        "time to target |",
        "|---|---|---|---|---|---|---|---|",
    ]
    reference = rows[0]["mean"]
    target = reference - margin if task["better"] is max else reference + margin
    for row in rows:
        value = "-"
        if row["mean"] is not None:
            value = f"{row['mean']:.4f}"
            value += f" ± {row['spread']:.4f}" if row["spread"] is not None else ""
        reached = [steps_to(task, curve, target) for curve in row["curves"]]
        steps = statistics.mean(reached) if None not in reached else None
        row["steps_to_target"] = steps
        time_ = "-" if steps is None else f"{steps / row['utilisation']:,.0f}"
        lines.append(
            f"| {row['method']} | {value} | {row['diverged']} of {len(row['last'])} | {row['delay']} | "
            f"{row['versions']} | {row['utilisation']:.2f} | {'-' if steps is None else f'{steps:,.0f}'} | {time_} |"
        )
    lines.append(
        f"\nTarget: {target:.4f}, the synchronous mean and a margin of {margin:g}. Time is in steps of a pipeline that is "
        f"never idle: steps / utilisation. {num_steps} steps in all."
    )
    return "\n".join(lines)


def draw(task: dict, rows: list[dict], path: pathlib.Path) -> None:
    """The mean curve of every method, and its seeds' range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for row, color in zip(rows, pyplot.get_cmap("tab10").colors):
        curves = [dict(curve) for curve in row["curves"] if curve]
        steps = sorted({step for curve in curves for step in curve})
        values = [[c[s] for c in curves if s in c] for s in steps]
        means = [statistics.mean(v) for v in values]
        axes.plot(steps, means, label=row["method"], color=color, marker=".")
        low, high = [min(v) for v in values], [max(v) for v in values]
        axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
    best = task["better"](r["mean"] for r in rows if r["mean"] is not None)
    first = rows[0]["curves"][0][0][1]
    margin = 0.1 * abs(first - best)
    axes.set_ylim(
        *sorted((best + (best - first) * 0.1, first - 2 * (best - first) - margin))
    )
    axes.set_xlabel("step")
    axes.set_ylabel(task["metric"].replace("_", " "))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", required=True, choices=list(TASKS))
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", help="some of them, by name")
    parser.add_argument("--tune", action="store_true", help="synchronous, by rate")
    parser.add_argument("--margin", type=float, default=None)
    parser.add_argument(
        "--set", nargs="*", default=[], help="overrides for every run, as name=value"
    )
    args = parser.parse_args()
    task = TASKS[args.task]
    always = dict(word.split("=", 1) for word in args.set)
    if args.tune:
        chosen = {
            f"rate {rate:g}": SYNCHRONOUS | NONE | {"optimizer.learning_rate": rate}
            for rate in task["rates"]
        }
    else:
        chosen = task["methods"]
    if args.methods:
        unknown = set(args.methods) - set(chosen)
        if unknown:
            raise SystemExit(f"no method {unknown}: there are {', '.join(chosen)}.")
        chosen = {name: chosen[name] for name in chosen if name in args.methods}
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    # Seed by seed, so that an interrupted command has all methods of the seeds that it ended.
    logs: dict = {name: [] for name in chosen}
    for seed in range(args.seeds):
        for name, overrides in chosen.items():
            folder = args.out / f"{name.replace(' ', '_')}-{seed}"
            log = run(task["config"], overrides | always | {"seed": seed}, folder)
            logs[name].append(log)
            curve = held_out(log, task["metric"])
            print(
                f"{name}, seed {seed}: {curve[-1] if curve else 'diverged'}", flush=True
            )
    for name, overrides in chosen.items():
        rows.append(summary(task, name, logs[name]) | facts(task, overrides))
    num_steps = max(r["step"] for log in logs[next(iter(logs))] for r in log)
    margin = args.margin if args.margin is not None else (rows[0]["spread"] or 0)
    text = table(task, rows, num_steps, margin)
    print(text)
    (args.out / "table.md").write_text(text + "\n")
    (args.out / "results.json").write_text(json.dumps(rows, indent=1))
    draw(task, rows, args.out / "curves.png")


if __name__ == "__main__":
    main()
