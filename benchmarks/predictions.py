"""Predicted against measured steps: the seconds and bytes of `train/plan.py` and of training.

    python benchmarks/predictions.py              # all models: about half an hour on two cores
    python benchmarks/predictions.py --models MLP --stages 2
    python benchmarks/predictions.py --redraw     # table and plot of the saved results

For each model and number of stages, one sitting runs `train/plan.py`, which profiles the layers and
predicts every schedule. The sitting then trains with each schedule in one process: a few steps of
one schedule, a few steps of the next, round after round. A shared machine is faster or slower for
minutes, so there are several sittings. The predicted seconds are the median of the sittings'
predictions. The measured seconds are the median of all timed steps. The script writes
`predictions.json`, `.md` and `.png` to `--out` after every model.
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

# The bands of the plot, as fractions of the prediction. `docs/planning.md` states the same numbers.
SECONDS_BAND, BYTES_BAND = 0.11, 0.04


def predicted(model: str, stages: int, profiles: pathlib.Path) -> list[dict]:
    """The prediction of `train/plan.py` for each schedule, without replicas and recomputation."""
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
    """Trains with each plan in turn. Returns the seconds of every timed step, and the bytes.

    It runs in a separate process, because the number of CPU devices is fixed when JAX starts.
    """
    import jax

    import jpipe
    from train import flags
    from train.config import TrainConfig
    from train.data import shuffled
    from train.devices import prepare_cpu

    stages = plans[0]["num_stages"]
    prepare_cpu(stages)
    _, config = flags.parse(MODELS[model].split(), TrainConfig)
    batch = next(shuffled(config.load_data().train, config.batch_size, config.seed))
    mesh = jpipe.make_mesh(stage=stages)
    runs = []
    for plan in plans:
        build = jpipe.schedules.get(plan["schedule"])
        options = config.options_of_pipeline(mesh)
        pipe = jpipe.Pipeline(
            config.weights.layers(),
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
    return [{"seconds": seconds, "memory_bytes": pipe.memory(batch)._asdict()} for pipe, _, seconds in runs]


def sitting(model: str, stages: int, args: argparse.Namespace) -> list[tuple]:
    """Predicts and measures once. Returns one pair (plan, measurement) per schedule."""
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


def result(model: str, stages: int, pairs: list[tuple]) -> dict:
    """Combines the pairs (plan, measurement) of one schedule, one pair per sitting."""
    plans, measurements = zip(*pairs)
    steps = [seconds for each in measurements for seconds in each["seconds"]]
    return {
        "model": model,
        "stages": stages,
        "schedule": plans[0]["schedule"],
        "sittings": [[plan["seconds"], statistics.median(measurement["seconds"])] for plan, measurement in pairs],
        "predicted": plans[-1] | {"seconds": statistics.median(plan["seconds"] for plan in plans)},
        "measured": measurements[-1]
        | {
            "seconds": statistics.median(steps),
            "quartiles": statistics.quantiles(steps, n=4)[::2],
        },
    }


def num_bytes(memory: dict) -> int:
    """All bytes of one device. `padding` is left out, because the other entries contain it.

    Example:
      >>> num_bytes({"weights": 100, "batch": 20, "padding": 8})
      120
    """
    return sum(value for name, value in memory.items() if name != "padding")


def table(results: list[dict]) -> str:
    """The results as Markdown. A ratio is the prediction divided by the measurement."""
    lines = [
        "| model | stages | schedule | predicted, ms | measured, ms | ratio | predicted, MB | compiled, MB | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        ms = r["predicted"]["seconds"] * 1e3, r["measured"]["seconds"] * 1e3
        mb = [num_bytes(r[k]["memory_bytes"]) / 1e6 for k in ("predicted", "measured")]
        lines.append(
            f"| {r['model']} | {r['stages']} | `{r['schedule']}` | {ms[0]:.1f} | {ms[1]:.1f} | {ms[0] / ms[1]:.2f} | "
            f"{mb[0]:.2f} | {mb[1]:.2f} | {mb[0] / mb[1]:.2f} |"
        )
    return "\n".join(lines) + "\n"


def plot(results: list[dict], path: pathlib.Path) -> None:
    """Measured / predicted, one row per result: seconds on the left, bytes on the right.

    A marker is the ratio of the medians over all sittings, and a line is the range of the ratios of
    single sittings. So a marker can lie outside its line.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = dict(zip(MODELS, ("#1f6fb4", "#c0743a", "#2a9d6f")))
    fewest_stages = min(r["stages"] for r in results)
    # The first result is the top row. A gap separates the models and the numbers of stages.
    groups = [(r["model"], r["stages"]) for r in results]
    num_gaps = [len(dict.fromkeys(groups[: i + 1])) - 1 for i in range(len(groups))]
    heights = [-(i + 0.6 * gaps) for i, gaps in enumerate(num_gaps)]

    figure, (left, right) = plt.subplots(
        1,
        2,
        figsize=(10, 0.8 + 0.24 * (1 - heights[-1])),
        sharey=True,
        width_ratios=(3, 2),
    )
    panels = (
        (left, "seconds per step", SECONDS_BAND, lambda part: part["seconds"]),
        (
            right,
            "bytes per device",
            BYTES_BAND,
            lambda part: num_bytes(part["memory_bytes"]),
        ),
    )
    for axis, title, band, value in panels:
        axis.axvspan(1 - band, 1 + band, color="#e4e4e4", lw=0, zorder=0)
        axis.axvline(1, color="#888888", lw=0.8, zorder=1)
        for r, y in zip(results, heights):
            colour = colours[r["model"]]
            if axis is left:
                ratios = [measured / predicted for predicted, measured in r["sittings"]]
                axis.plot([min(ratios), max(ratios)], [y, y], color=colour, lw=1.2, alpha=0.5)
            axis.scatter(
                value(r["measured"]) / value(r["predicted"]),
                y,
                s=34,
                facecolor=colour if r["stages"] == fewest_stages else "white",
                edgecolor=colour,
                zorder=3,
            )
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("measured / predicted" if axis is left else "compiled / predicted")
        axis.spines[["top", "right"]].set_visible(False)
        axis.plot([], [], color="#e4e4e4", lw=8, label=f"within {band:.0%} of the prediction")
    names = [f"{r['model']}, {r['stages']} stages, {r['schedule']}" for r in results]
    left.set_yticks(heights, names, fontsize=8)
    left.set_ylim(heights[-1] - 0.8, 0.8)
    right.tick_params(axis="y", length=0)
    # The axis of the bytes is wider than its band, also where all points lie inside the band.
    low, high = right.get_xlim()
    right.set_xlim(min(low, 1 - 2.5 * BYTES_BAND), max(high, 1 + 2.5 * BYTES_BAND))
    for stages in sorted({r["stages"] for r in results}):
        left.scatter(
            [],
            [],
            s=34,
            facecolor="#444444" if stages == fewest_stages else "white",
            edgecolor="#444444",
            label=f"{stages} stages",
        )
    num_sittings = max(len(r["sittings"]) for r in results)
    left.plot(
        [],
        [],
        color="#444444",
        lw=1.2,
        alpha=0.5,
        label=f"range of {num_sittings} sittings",
    )
    for axis in (left, right):
        axis.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, -0.13),
            ncols=2 if axis is left else 1,
            frameon=False,
            fontsize=8,
        )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def save(results: list[dict], folder: pathlib.Path) -> None:
    """Writes the table and the plot."""
    (folder / "predictions.md").write_text(table(results))
    plot(results, folder / "predictions.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--sittings", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6, help="rounds per sitting")
    parser.add_argument("--steps", type=int, default=4, help="timed steps per round")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "predictions")
    parser.add_argument(
        "--redraw",
        action="store_true",
        help="write the table and the plot of the saved results, without measuring",
    )
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        plans = json.load(sys.stdin)
        print(json.dumps(measure(args.measure, plans, args.rounds, args.steps)))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    saved = args.out / "predictions.json"
    results = json.loads(saved.read_text()) if saved.exists() else []
    if args.redraw:
        if not results:
            parser.error(f"--redraw needs the results of an earlier run in {saved}")
        save(results, args.out)
        return
    for model in args.models:
        for stages in args.stages:
            sittings = [sitting(model, stages, args) for _ in range(args.sittings)]
            results = [r for r in results if (r["model"], r["stages"]) != (model, stages)]
            new = [result(model, stages, pairs) for pairs in zip(*sittings)]
            results += new
            results.sort(key=lambda r: (list(MODELS).index(r["model"]), r["stages"]))
            saved.write_text(json.dumps(results, indent=1))
            save(results, args.out)
            print(table(new), flush=True)


if __name__ == "__main__":
    main()
