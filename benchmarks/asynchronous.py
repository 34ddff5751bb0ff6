"""What delayed gradients cost in accuracy, and what the remedies give back.

There are two tasks, and every method is trained with several seeds.

    python benchmarks/asynchronous.py mnist --out runs/asynchronous-mnist
    python benchmarks/asynchronous.py gpt --out runs/asynchronous-gpt
    python benchmarks/asynchronous.py mnist --tune --out runs/rates-mnist  # the learning rate

Every run is `train/train.py` with a configuration of `configs/` and the overrides of a method. All
runs have the same number of steps and the learning rate that is best for the synchronous run.
`--set` adds overrides to all runs, such as `--set data.dir=DIRECTORY`. Each core runs one process
at a time, pinned to it. A finished run is not repeated, so an interrupted command continues where
it stopped. The output folder has a table (`table.md`), the figures (`results.json`) and their
curves (`curves.png`). `--redraw` draws the curves again from `results.json`, without a run:

    python benchmarks/asynchronous.py gpt --out benchmarks/asynchronous/gpt --redraw
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import queue
import statistics
import subprocess
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# Learning-rate rescheduling, discrepancy correction, synchronous warm-up; weight prediction.
T1, T2 = "optimizer.annealing_steps", "optimizer.discrepancy_decay"
T3, AHEAD = "pipeline.synchronous_steps", "optimizer.predict_weights"
NONE = {T1: "none", T2: "none", T3: 0, AHEAD: "false"}
PAIRED, UNIT = ({"pipeline.options.ticks": ticks} for ticks in ("paired", "unit"))


def without(*names: str) -> dict:
    """Overrides that turn off all techniques of the configuration but those in `names`."""
    return {name: value for name, value in NONE.items() if name not in names}


# The configurations use PipeMare with T1, T2 and T3, so a method turns off what it does not use.
# Synchronous training has the same result at any number of stages. One stage is the fastest on
# one core.
METHODS = {
    "synchronous": NONE | {"pipeline.schedule": "gpipe", "pipeline.num_stages": 1},
    "asynchronous": NONE | PAIRED,
    "+T1": without(T1) | PAIRED,
    "+T1+T2": without(T1, T2) | PAIRED,
    "+T1+T2+T3": without(T1, T2, T3) | PAIRED,
    "+T1+T3": without(T1, T3) | PAIRED,
    "unit ticks": NONE | UNIT,
    "unit ticks +T1+T2+T3": without(T1, T2, T3) | UNIT,
    "unit ticks, prediction": NONE | UNIT | {AHEAD: "true"},
    "unit ticks, prediction +T1+T3": without(T1, T3) | UNIT | {AHEAD: "true"},
    "PipeDream": NONE | PAIRED | {"pipeline.schedule": "pipedream"},
    "2BW": NONE | UNIT | {"pipeline.schedule": "pipedream_2bw"},
}
TASKS = {
    "mnist": {
        "config": "mnist_pipemare",
        "title": "ResNet on MNIST, 5 stages, one microbatch per update (2BW: 4)",
        "metric": "test_accuracy",
        "better": max,
        "margin": 0.01,
        "methods": METHODS,
        "microbatches_of_2bw": 4,
        "rates": [0.15, 0.3, 0.6, 1.2],
    },
    "gpt": {
        "config": "gpt_pipemare",
        "title": "Byte-level GPT, 5 stages, 2 microbatches per update (2BW: 4)",
        "metric": "bits_per_byte",
        "better": min,
        "margin": 0.2,
        "methods": METHODS | {"NAdam": NONE | PAIRED | {"optimizer.name": "nadamw", "optimizer.momentum": 0.99}},
        "microbatches_of_2bw": 4,
        "rates": [4e-3, 8e-3, 1.6e-2],
    },
}


def overrides_of(task: dict, name: str, seed: int, always: dict) -> dict:
    """The overrides of `train.py` for one run."""
    chosen = task["methods"][name]
    if chosen.get("pipeline.schedule") == "pipedream_2bw":
        chosen = chosen | {"pipeline.num_microbatches": task["microbatches_of_2bw"]}
    return chosen | always | {"seed": seed}


def run(config: str, overrides: dict, folder: pathlib.Path, core: int) -> None:
    """Trains once, pinned to a core. Does nothing if the run has finished before."""
    done = folder / "done.json"
    if done.exists():
        return
    if folder.exists():
        raise SystemExit(f"{folder} holds a run that did not end: remove it.")
    script, file = ROOT / "train" / "train.py", ROOT / "configs" / f"{config}.py"
    command = ["taskset", "-c", str(core), sys.executable, str(script)]
    command += ["--config", str(file), f"--config.run_dir={folder}"]
    command += [f"--config.{name}={value}" for name, value in overrides.items()]
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    }
    start = time.perf_counter()
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | cache)
    if ended.returncode not in (0, 1):  # 1: the loss was not finite, a result too
        raise SystemExit(f"{' '.join(command)} failed:\n{ended.stderr[-3000:]}")
    seconds = round(time.perf_counter() - start, 1)
    done.write_text(json.dumps({"code": ended.returncode, "seconds": seconds}))
    print(f"{folder.name}: {seconds:.0f} s", flush=True)


def run_all(task: dict, names: list, seeds: int, always: dict, out: pathlib.Path):
    """Trains every method with every seed, one run per core at a time.

    Returns:
      Method -> the log of each seed, as a list of records.
    """
    cores: queue.Queue = queue.Queue()
    for core in os.sched_getaffinity(0):
        cores.put(core)

    def train(name: str, seed: int) -> list[dict]:
        folder, core = out / f"{name.replace(' ', '_')}-{seed}", cores.get()
        try:
            run(task["config"], overrides_of(task, name, seed, always), folder, core)
        finally:
            cores.put(core)
        lines = (folder / "log.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    with concurrent.futures.ThreadPoolExecutor(cores.qsize()) as pool:
        futures = {(name, seed): pool.submit(train, name, seed) for seed in range(seeds) for name in names}
    return {name: [futures[name, s].result() for s in range(seeds)] for name in names}


def curve(log: list[dict], key: str) -> dict[int, float]:
    """Step -> value of `key`, from the records of a log that have the key."""
    return {record["step"]: record[key] for record in log if key in record}


def last(logs: list[list[dict]], metric: str) -> list[float]:
    """The metric of every seed after the last step. Runs that ended early are left out."""
    num_steps = max(record["step"] for log in logs for record in log)
    curves = [curve(log, metric) for log in logs]
    return [c[num_steps] for c in curves if num_steps in c]


def table_facts(task: dict, name: str, always: dict) -> dict:
    """Utilisation, delay and weight memory of a method, from its table and the model.

    Weight memory is in multiples of the model's weights. It counts the weight versions of every
    stage, and the copies of the techniques: T2 keeps the velocity and the weights that the backward
    reads, and prediction keeps the last update and the weights that the forward reads. The
    synchronous run and the warm-up count as GPipe on the same stages and microbatches.
    """
    import jpipe
    from train import flags
    from train.config import TrainConfig
    from train.data import shuffled
    from train.devices import prepare_cpu

    words = overrides_of(task, name, 0, always)
    if name == "synchronous":  # count it on as many stages as the others
        del words["pipeline.num_stages"]
    file = ROOT / "configs" / f"{task['config']}.py"
    arguments = [f"--config.{key}={value}" for key, value in words.items()]
    _, config = flags.parse(["--config", str(file), *arguments], TrainConfig)
    prepare_cpu(config.pipeline.num_stages)
    pipe = jpipe.Pipeline(
        config.weights.layers(),
        loss=config.weights.model.loss(),
        has_aux=True,
        optimizer=config.optimizer.transform(config.num_steps),
        schedule=config.pipeline.table(),
    )
    batch = next(shuffled(config.load_data().train, config.batch_size, 0))
    sizes = [record.num_parameters for record in pipe.partition(batch)]
    facts = pipe.schedule.facts()
    kept = facts.weight_versions.astype(float)
    if config.optimizer.discrepancy_decay is not None:
        kept += 1 + (facts.forward_delay > facts.backward_delay)
    if config.optimizer.predict_weights:
        kept += 1 + (facts.forward_delay > 0)
    S, N = pipe.schedule.num_stages, pipe.schedule.num_microbatches
    synchronous = N / (N + S - 1)
    return {
        "utilisation": synchronous if name == "synchronous" else 1 - facts.bubble,
        "warm_up": config.pipeline.synchronous_steps,
        "utilisation_of_warm_up": synchronous,
        "memory": sum(n * k for n, k in zip(sizes, kept)) / sum(sizes),
        "delay": int(facts.forward_delay.max()),
    }


def time_of(steps: float, facts: dict) -> float:
    """The time of `steps` steps. The unit is one step of a pipeline that is never idle."""
    slow = min(steps, facts["warm_up"])
    return slow / facts["utilisation_of_warm_up"] + (steps - slow) / facts["utilisation"]


def crossing(points: dict[int, float], reaches) -> float | None:
    """The first step at which a curve, linear between its points, reaches a target, or None.

    `reaches` returns how far a value is past the target, negative before the target.

    Example:
      >>> crossing({0: 1.0, 10: 3.0}, lambda value: value - 2.0)
      5.0
    """
    before = None
    for step, value in sorted(points.items()):
        past = reaches(value)
        if past >= 0:
            if before is None:
                return step
            then, short = before
            return then + (step - then) * short / (short - past)
        before = step, past
    return None


def results(task: dict, logs: dict, always: dict) -> dict:
    """The figures of every method.

    The target is the final mean of the synchronous runs, made worse by the task's margin. The steps
    to the target are the mean over the seeds if all seeds reach it, and None otherwise.
    """
    metric = task["metric"]
    sign = 1 if task["better"] is max else -1
    target = statistics.mean(last(logs["synchronous"], metric)) - sign * task["margin"]
    num_steps = max(record["step"] for log in logs["synchronous"] for record in log)
    rows = {}
    for name, of_seeds in logs.items():
        reached = [crossing(curve(log, metric), lambda value: sign * (value - target)) for log in of_seeds]
        steps = None if None in reached else statistics.mean(reached)
        facts = table_facts(task, name, always)
        rows[name] = facts | {
            "last": (values := last(of_seeds, metric)),
            "diverged": len(of_seeds) - len(values),
            "steps_to_target": steps,
            "time_to_target": steps and time_of(steps, facts),
            "num_steps": num_steps,
            "time": time_of(num_steps, facts),
            "curves": {key: [list(curve(log, key).items()) for log in of_seeds] for key in ("loss", metric)},
        }
    return {"metric": metric, "target": target, "methods": rows}


def markdown(summary: dict) -> str:
    """The figures as a table."""
    lines = [
        f"| method | {summary['metric'].replace('_', ' ')} | diverged | largest delay | weight memory | utilisation "
        "| steps to target | time to target |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in summary["methods"].items():
        values = row["last"]
        mean = f"{statistics.mean(values):.4f}" if values else "-"
        if len(values) > 1:
            mean += f" ± {statistics.stdev(values):.4f}"
        steps, time_ = (
            "-" if row[key] is None else f"{row[key]:,.0f}" for key in ("steps_to_target", "time_to_target")
        )
        lines.append(
            f"| {name} | {mean} | {row['diverged'] or '-'} | {row['delay']} | {row['memory']:.1f} | "
            f"{row['num_steps'] / row['time']:.2f} | {steps} | {time_} |"
        )
    lines.append(f"\nTarget: {summary['target']:.4f}.")
    return "\n".join(lines)


# A method has one colour. The same remedies in unit ticks have the same colour.
_COLUMNS = 6


def draw(task: dict, summary: dict, path: pathlib.Path) -> None:
    """Training loss and metric: two panels for each method, with the synchronous run in each.

    Lines are the mean of the seeds, bands their range. An accuracy is drawn as the error, on a logarithmic axis, which
    shows differences near 100 %.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    metric = summary["metric"]
    is_accuracy = metric.endswith("accuracy")
    words = metric.replace("_", " ")
    if is_accuracy:
        words = f"{words.removesuffix(' accuracy')} error, %"
    names = [name for name in summary["methods"] if name != "synchronous"]
    blocks = -(-len(names) // _COLUMNS)
    figure, axes = pyplot.subplots(
        2 * blocks, _COLUMNS, figsize=(11, 4.2 * blocks + 0.6), sharex=True, sharey=False,
        layout="constrained", squeeze=False,
    )  # fmt: skip
    num_seeds = max(len(row["last"]) for row in summary["methods"].values())
    figure.suptitle(
        f"{task['title']}\nblack: synchronous; blue: the method of the panel; lines: mean of {num_seeds} seeds, bands: "
        f"their range; dotted: target. Lower is better",
        fontsize=11,
    )

    def plot(ax: Any, name: str, key: str, color: str) -> None:
        curves = [dict(c) for c in summary["methods"][name]["curves"][key]]
        steps = sorted({step for c in curves for step in c})
        values = [[shown(c[s], key) for c in curves if s in c] for s in steps]
        mean = [statistics.mean(v) for v in values]
        ax.plot(steps, mean, color=color, linewidth=1.3)
        low, high = [min(v) for v in values], [max(v) for v in values]
        ax.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)

    def shown(value: float, key: str) -> float:
        return 100 * (1 - value) if is_accuracy and key == metric else value

    for row in range(2):
        key = (("loss", metric))[row]
        of_row = axes[row::2].ravel()
        for ax in of_row[1:]:
            ax.sharey(of_row[0])
        for ax, name in zip(of_row, names):
            for each, color in ((name, "C0"), ("synchronous", "black")):
                plot(ax, each, key, color)
            if row:
                target = shown(summary["target"], key)
                ax.axhline(target, color="grey", linewidth=1, linestyle=":")
            else:
                ax.set_title(name.replace(" +", "\n+"), fontsize=9)
            if is_accuracy:
                ax.set_yscale("log")
                ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                ax.yaxis.set_major_formatter("{x:g}")
                ax.yaxis.set_minor_formatter(NullFormatter())
            ax.xaxis.set_major_locator(MaxNLocator(3, integer=True))
            ax.tick_params(labelsize=8)
            ax.grid(alpha=0.3, which="both")
        for ax in of_row[len(names) :]:
            ax.set_visible(False)
    for i in range(2 * blocks):
        axes[i, 0].set_ylabel(words if i % 2 else "training loss")
        for ax in axes[i, 1:]:
            ax.tick_params(labelleft=False)
    for ax in axes[-1]:
        ax.set_xlabel("step", fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", help="some of them, by name")
    parser.add_argument("--tune", action="store_true", help="synchronous, by rate")
    parser.add_argument("--set", nargs="*", default=[], help="overrides for every run, as name=value")
    parser.add_argument("--redraw", action="store_true", help="only draw, from OUT/results.json")
    args = parser.parse_args()
    task = TASKS[args.task]
    if args.redraw:
        summary = json.loads((args.out / "results.json").read_text())
        draw(task, summary, args.out / "curves.png")
        return
    always = dict(word.split("=", 1) for word in args.set)
    if args.tune:
        synchronous = task["methods"]["synchronous"]
        task["methods"] = {f"rate {rate:g}": synchronous | {"optimizer.learning_rate": rate} for rate in task["rates"]}
    names = args.methods or list(task["methods"])
    if unknown := set(names) - set(task["methods"]):
        known = "; ".join(task["methods"])
        raise SystemExit(f"no method {', '.join(unknown)}: there are {known}.")
    if not args.tune and "synchronous" not in names:
        names.insert(0, "synchronous")  # the others are held against it
    args.out.mkdir(parents=True, exist_ok=True)
    logs = run_all(task, names, args.seeds, always, args.out)
    if args.tune:
        for name in names:
            values = last(logs[name], task["metric"])
            mean = f"{statistics.mean(values):.4f}" if values else "diverged"
            print(f"{name}: {mean}  {[round(v, 4) for v in values]}")
        return
    summary = results(task, logs, always)
    print(markdown(summary))
    (args.out / "table.md").write_text(markdown(summary) + "\n")
    (args.out / "results.json").write_text(json.dumps(summary, indent=1))
    draw(task, summary, args.out / "curves.png")


if __name__ == "__main__":
    main()
