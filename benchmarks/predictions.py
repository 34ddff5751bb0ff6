"""Predicted against measured: seconds and bytes of steps, as `train/plan.py` says and as training takes.

    python benchmarks/predictions.py                       # everything: about half an hour on two cores
    python benchmarks/predictions.py --models MLP --stages 2

For each model and number of stages, runs `train/plan.py`, which profiles the layers and prices the schedules, then
trains with each schedule in one process, a few steps of one after a few steps of the other, round after round; and all
of that again in the next sitting, as a shared machine is faster or slower for minutes. Seconds are medians of the
sittings' predictions, and of all timed steps. Writes `predictions.json`, `.md` and `.png` to `--out`, after every model.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

MODELS = {
    "MLP": "--config=configs/quickstart.py --config.model=MLP --config.model.widths=512,512,512,512,512,512,512 "
    "--config.batch_size=512",
    "ResNet": "--config=configs/quickstart.py",
    "GPT": "--config=configs/gpt_1f1b.py",
}
SCHEDULES = {
    "gpipe": {},
    "one_f_one_b": {"ticks": "paired"},
    "pipemare": {"ticks": "paired"},
}
MICROBATCHES = 8


def predicted(model: str, stages: int, profiles: pathlib.Path) -> list[dict]:
    """What `train/plan.py` says of each schedule, with no replicas and no recomputation."""
    command = [sys.executable, ROOT / "train" / "plan.py", *MODELS[model].split()]
    command += ["--devices", str(stages), "--microbatches", str(MICROBATCHES)]
    command += ["--asynchronous", "--json", "--profiles", profiles]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT)
    plans = json.loads(output.stdout)
    return [
        plan
        for name, options in SCHEDULES.items()
        for plan in plans
        if plan["schedule"] == name
        and plan["num_stages"] == stages
        and (not options or plan["options"] == options)
        and plan["num_replicas"] == 1
        and plan["recompute"] == "none"
    ]


def measure(model: str, plans: list[dict], rounds: int, steps: int) -> list[dict]:
    """Trains with each plan in turn; in a process of its own."""
    import jax

    import jpipe
    from train import flags
    from train.config import TrainConfig
    from train.data import shuffled
    from train.devices import prepare_cpu
    from train.train import options_of_pipeline

    stages = plans[0]["num_stages"]
    prepare_cpu(stages)
    _, config = flags.parse(MODELS[model].split(), TrainConfig)
    batch = next(shuffled(config.data.load().train, config.batch_size, config.seed))
    mesh = jpipe.make_mesh(stage=stages)
    runs = []
    for plan in plans:
        build = jpipe.schedules.get(plan["schedule"])
        options = options_of_pipeline(config, mesh)
        pipe = jpipe.Pipeline(
            config.model.layers(),
            schedule=build(stages, plan["num_microbatches"], **plan["options"]),
            **options | {"boundaries": plan["boundaries"]},
        )
        state, metrics = pipe.step(pipe.init(jax.random.key(0), batch), batch)
        jax.block_until_ready(metrics)
        runs.append([pipe, state, []])
    for _ in range(rounds):
        for run in runs:
            pipe, state, seconds = run
            for _ in range(steps):
                start = time.perf_counter()
                state, metrics = pipe.step(state, batch)
                jax.block_until_ready((state.parameters, metrics))
                seconds.append(time.perf_counter() - start)
            run[1] = state
    return [
        {"seconds": seconds, "memory_bytes": pipe.memory(batch)._asdict()}
        for pipe, _, seconds in runs
    ]


def sitting(model: str, stages: int, args: argparse.Namespace) -> list[tuple]:
    """For each schedule, what is predicted and what is measured now."""
    with tempfile.TemporaryDirectory() as profiles:
        plans = predicted(model, stages, pathlib.Path(profiles))
    command = [sys.executable, __file__, "--measure", model]
    command += ["--rounds", str(args.rounds), "--steps", str(args.steps)]
    output = subprocess.run(
        command,
        check=True,
        input=json.dumps(plans),
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    return list(zip(plans, json.loads(output.stdout), strict=True))


def result(model: str, stages: int, found: list[tuple]) -> dict:
    """Of one schedule, over its sittings."""
    plans, measured = zip(*found)
    steps = [seconds for one in measured for seconds in one["seconds"]]
    of_plans = [plan["seconds"] for plan in plans]
    return {
        "model": model,
        "stages": stages,
        "schedule": plans[0]["schedule"],
        "sittings": [
            [plan["seconds"], statistics.median(one["seconds"])] for plan, one in found
        ],
        "predicted": plans[-1] | {"seconds": statistics.median(of_plans)},
        "measured": measured[-1]
        | {
            "seconds": statistics.median(steps),
            "quartiles": statistics.quantiles(steps, n=4)[::2],
        },
    }


def total(memory: dict) -> int:
    return sum(value for name, value in memory.items() if name != "padding")


def table(results: list[dict]) -> str:
    lines = [
        "| model | stages | schedule | predicted, ms | measured, ms | ratio | predicted, MB | compiled, MB | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        ms = r["predicted"]["seconds"] * 1e3, r["measured"]["seconds"] * 1e3
        mb = [total(r[k]["memory_bytes"]) / 1e6 for k in ("predicted", "measured")]
        lines.append(
            f"| {r['model']} | {r['stages']} | `{r['schedule']}` | {ms[0]:.1f} | {ms[1]:.1f} | {ms[0] / ms[1]:.2f} | "
            f"{mb[0]:.2f} | {mb[1]:.2f} | {mb[0] / mb[1]:.2f} |"
        )
    return "\n".join(lines) + "\n"


def plot(results: list[dict], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.8))
    colours = dict(zip(MODELS, ("#1f6fb4", "#c0743a", "#2a9d6f")))
    markers = dict(zip(SCHEDULES, "os^"))
    panels = (
        ("milliseconds a step", lambda r: r["seconds"] * 1e3, 0.15),
        ("megabytes a device", lambda r: total(r["memory_bytes"]) / 1e6, 0.10),
    )
    for axis, (what, value, band) in zip(axes, panels):
        points = [(value(r["predicted"]), value(r["measured"]), r) for r in results]
        ends = [
            min(min(p[:2]) for p in points) / 1.3,
            1.3 * max(max(p[:2]) for p in points),
        ]
        axis.fill_between(
            ends,
            [e * (1 - band) for e in ends],
            [e * (1 + band) for e in ends],
            color="#dddddd",
            label=f"within {band:.0%} of the prediction",
        )
        axis.plot(ends, ends, color="#888888", lw=0.8)
        for x, y, r in points:
            axis.scatter(
                x,
                y,
                s=36 if r["stages"] == 2 else 80,
                marker=markers[r["schedule"]],
                facecolor="none" if r["stages"] == 4 else colours[r["model"]],
                edgecolor=colours[r["model"]],
            )
        axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_locator(LogLocator(subs=(1, 2, 5)))
            side.set_major_formatter("{x:g}")
            side.set_minor_formatter(NullFormatter())
        axis.set_xlabel(f"predicted {what}")
        axis.set_ylabel(f"measured {what}")
        axis.spines[["top", "right"]].set_visible(False)
    keys = [
        plt.Line2D([], [], ls="", marker="o", color=c, label=m)
        for m, c in colours.items()
    ]
    keys += [
        plt.Line2D([], [], ls="", marker=m, color="#444444", label=s)
        for s, m in markers.items()
    ]
    keys.append(
        plt.Line2D(
            [], [], ls="", marker="o", mfc="none", color="#444444", label="4 stages"
        )
    )
    keys += axes[0].get_legend_handles_labels()[0]
    axes[0].legend(handles=keys, frameon=False, fontsize=8)
    axes[1].legend(frameon=False, fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=list(MODELS), default=list(MODELS)
    )
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--sittings", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6, help="of a sitting")
    parser.add_argument("--steps", type=int, default=4, help="timed steps a round")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "predictions")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        plans = json.load(sys.stdin)
        print(json.dumps(measure(args.measure, plans, args.rounds, args.steps)))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    saved = args.out / "predictions.json"
    results = json.loads(saved.read_text()) if saved.exists() else []
    for model in args.models:
        for stages in args.stages:
            sittings = [sitting(model, stages, args) for _ in range(args.sittings)]
            results = [
                r for r in results if (r["model"], r["stages"]) != (model, stages)
            ]
            results += [result(model, stages, found) for found in zip(*sittings)]
            results.sort(key=lambda r: (list(MODELS).index(r["model"]), r["stages"]))
            saved.write_text(json.dumps(results, indent=1))
            (args.out / "predictions.md").write_text(table(results))
            plot(results, args.out / "predictions.png")
            mine = [r for r in results if (r["model"], r["stages"]) == (model, stages)]
            print(table(mine), flush=True)


if __name__ == "__main__":
    main()
