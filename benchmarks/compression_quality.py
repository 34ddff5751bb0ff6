"""What compression costs in quality: training on real data with each compressor, several seeds, at equal steps.

    python benchmarks/compression_quality.py
    python benchmarks/compression_quality.py --tasks digits --seeds 1 --steps 50
    python benchmarks/compression_quality.py --tasks sgd --steps 3000 --settings plain "gradients DCT 2.5 %"

Every run trains as `train/train.py` does, on 2 stages with 2 replicas each, on 4 CPU devices; the seeds of a setting
share its compiled program. A table has how many times fewer bytes are sent, the loss on held-out data, mean and
standard deviation over the seeds, and what the compressors report after the last step. `--out FILE` also writes them as
JSON, with the losses of all steps, and `--plot FILE.svg` draws these. `--redraw FILE` makes table and picture of such
files, and runs nothing.
"""

import argparse
import contextlib
import json
import pathlib
import statistics
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]

DIGITS = [
    "--config=configs/quickstart.py",
    "--config.batch_size=64",
    "--config.pipeline.schedule=one_f_one_b",
]
TASKS = {
    "digits": DIGITS,
    "gpt": [
        "--config=configs/gpt_1f1b.py",
        "--config.mesh.rules.vocab=none",
        "--config.model.dim=64",
        "--config.model.num_heads=2",
        "--config.model.num_blocks=2",
        "--config.model.seq_len=64",
        "--config.data.seq_len=64",
        "--config.batch_size=32",
        "--config.optimizer.warmup_steps=20",
    ],
    # SGD with momentum, as in the papers.
    "sgd": [
        *DIGITS,
        "--config.optimizer.name=sgd",
        "--config.optimizer.weight_decay=5e-4",
    ],
}
COMMON = [
    "--config.pipeline.num_stages=2",
    "--config.pipeline.num_microbatches=4",
    "--config.mesh.data=2",
    "--config.eval_every=none",
]
GRADIENTS, MESSAGES = (
    "--config.mesh.compress_gradients",
    "--config.pipeline.compress_messages",
)
RANKS = 1, 2, 4, 9, 10
"""The smallest matrix of the ResNet, its stem, has a full rank of 9, that of the GPT one above 10."""
WIDTHS = 2, 4, 8, 16
"""Numbers that trained layers at the boundary leave of 32 channels of the ResNet, or of 64 of the GPT."""
SETTINGS = {
    "plain": [],
    **{
        f"gradients {name}": [f"{GRADIENTS}={text}"]
        for name, text in {
            "bfloat16": "cast",
            "8 bits": "quantize:bits=8",
            "4 bits": "quantize:bits=4",
            "DCT 2.5 %": "threshold:density=0.025,room=1,every=100",
            "DCT 0.5 %": "threshold:density=0.005,room=1,every=100",
            **{f"PowerSGD {rank}": f"powersgd:rank={rank}" for rank in RANKS},
            **{f"streaming PCA {rank}": f"streaming_pca:rank={rank}" for rank in RANKS},
        }.items()
    },
    **{
        f"gradients accumulated PCA {rank}": [f"--config.pipeline.accumulate_gradients=streaming_pca:rank={rank}"]
        for rank in RANKS
    },
    **{
        f"messages {name}": [f"{MESSAGES}={text}"]
        for name, text in {
            "8 bits": "quantize:bits=8",
            "4 bits": "quantize:bits=4,block=64",
            "DCT 10 %": "threshold:density=0.1,every=100",
            "DCT 2 %": "threshold:density=0.02,room=1.2,every=100",
        }.items()
    },
    **{f"messages bottleneck {width}": [] for width in WIDTHS},
}


def settings_of(task: str) -> list[str]:
    """The settings that a task takes by default."""
    left_out = ("10", "bottleneck 16") if task != "gpt" else ("9", "bottleneck 2")
    names = [name for name in SETTINGS if not name.endswith(tuple(f" {end}" for end in left_out))]
    if task == "gpt":
        return names
    # The digits' ResNet has one dense layer, its last one.
    return [name for name in names if "accumulated" not in name]


def train(task: str, setting: str, seeds: list[int], steps: int, extra: list[str]) -> list[dict]:
    """One training for each seed: the held-out result, the losses of all steps and what compressors report."""
    import jax

    from train import train as script
    from train.data import shuffled

    argv = [*TASKS[task], *COMMON, *SETTINGS[setting], f"--config.num_steps={steps}"]
    results = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as until_end:
        argv += [f"--config.run_dir={folder}/run", *extra]
        run = script.prepare(argv, until_end)
        pipe, rows = run.pipe, run.config.batch_size
        if "bottleneck" in setting:
            pipe = narrowed(run, int(setting.rsplit(" ", 1)[-1]))
        what = "activation" if setting.startswith("messages") else "weights"
        records = [r for r in pipe.messages(run.batch) if r.what == what]
        sent = next(r.plain_bytes for r in reversed(run.pipe.messages(run.batch)) if r.what == what)
        memory = pipe.memory(run.batch)
        for seed in seeds:
            state = pipe.init(jax.random.key(seed), run.batch)
            batches, losses = shuffled(run.data.train, rows, seed), []
            pending = []  # a loss is read while the next step runs
            for _ in range(steps):
                state, metrics = pipe.step(state, next(batches))
                losses += [float(loss) for loss in pending]
                pending = [metrics["loss"]]
            losses += [float(loss) for loss in pending]
            held_out = script.evaluate(pipe, state, run.data.test, rows)
            counts = metrics.get("compression", {})
            results.append(
                {
                    "task": task,
                    "setting": setting,
                    "seed": seed,
                    "steps": steps,
                    "extra": extra,
                    "ratio": sent / records[-1].num_bytes,
                    "gradient_bytes": memory.gradients + memory.compression,
                    "losses": losses,
                    "compression": {name: float(a) for name, a in counts.items()},
                    **{f"test_{name}": value for name, value in held_out.items()},
                }
            )
        run.checkpoints.close()
    jax.clear_caches()
    return results


def narrowed(run, width: int):
    """The pipeline of a run with trained layers at its boundaries, which stay between the same layers."""
    import jpipe

    mesh = run.config.mesh.make(run.pipe.schedule)
    starts = [record.layers[0] for record in run.partition[1:]]
    layers, boundaries = jpipe.with_boundary_layers(
        run.config.weights.layers(), starts, jpipe.Bottleneck(width), run.batch["inputs"]
    )
    options = run.config.options_of_pipeline(mesh) | {"boundaries": boundaries}
    return jpipe.Pipeline(layers, schedule=run.pipe.schedule, **options)


def table(runs: list[dict]) -> str:
    """The table, one row per setting and group of further options."""
    tasks = list(dict.fromkeys(r["task"] for r in runs))
    blocks = []
    for task in tasks:
        of_task = [r for r in runs if r["task"] == task]
        rows = [
            f"| {task}, {of_task[0]['steps']} steps | bytes / | gradients, kB | held-out loss | accuracy, % | reported "
            "|",
            "|---|---|---|---|---|---|",
        ]
        key = lambda r: (r["setting"], *r["extra"])  # noqa: E731
        for group in dict.fromkeys(map(key, of_task)):
            of = [r for r in of_task if key(r) == group]
            ratio, size = of[0]["ratio"], of[0]["gradient_bytes"] / 1e3
            accuracies = [100 * r["test_accuracy"] for r in of]
            reported = ", ".join(
                f"{name} {statistics.mean(r['compression'][name] for r in of):.3g}" for name in of[0]["compression"]
            )
            rows.append(
                f"| {' '.join(group)} | {ratio:.1f} | {size:.0f} | {_spread([r['test_loss'] for r in of], 3)} "
                f"| {_spread(accuracies, 1)} | {reported} |"
            )
        blocks.append("\n".join(rows))
    return "\n\n".join(blocks)


def _spread(values: list[float], digits: int) -> str:
    """Mean and standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} ± {deviation:.{digits}f}"


PANELS = {
    "gradients, rounded or thresholded": (
        "gradients bfloat16",
        "gradients 8 bits",
        "gradients 4 bits",
        "gradients DCT",
    ),
    "gradients, PowerSGD": ("gradients PowerSGD",),
    "gradients, streaming PCA": (
        "gradients streaming PCA",
        "gradients accumulated PCA",
    ),
    "messages": ("messages",),
}
"""Title of a panel of a picture -> how the names of its settings begin."""


def plot(runs: list[dict], path: pathlib.Path) -> None:
    """Losses of the steps of one task, mean and range over the seeds, each a mean over some steps."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    import numpy as np

    tasks = {r["task"] for r in runs}
    if len(tasks) != 1:
        raise ValueError(f"one picture has one task, got {', '.join(sorted(tasks))}.")
    steps = runs[0]["steps"]
    window = max(steps // 30, 1)
    names = list(dict.fromkeys(r["setting"] for r in runs))
    panels = {
        title: ["plain", *(name for name in names if name.startswith(starts))] for title, starts in PANELS.items()
    }
    panels = {title: of for title, of in panels.items() if len(of) > 1}
    columns = min(len(panels), 2)
    figure, axes = plt.subplots(
        -(-len(panels) // columns),
        columns,
        figsize=(5.5 * columns, 3.8 * -(-len(panels) // columns)),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (title, settings) in zip(axes.flat, panels.items()):
        for setting in settings:
            losses = np.array([r["losses"] for r in runs if r["setting"] == setting])
            # Means of `window` steps each.
            count = losses.shape[1] // window
            means = losses[:, : count * window].reshape(len(losses), count, window)
            means, at = means.mean(2), window * (np.arange(count) + 0.5)
            style = {"color": "black", "linewidth": 2} if setting == "plain" else {}
            if "accumulated" in setting:
                style["linestyle"] = "--"
            label = setting.removeprefix("gradients ").removeprefix("messages ")
            (line,) = axis.plot(at, means.mean(0), label=label, **style)
            axis.fill_between(at, means.min(0), means.max(0), color=line.get_color(), alpha=0.15, lw=0)
        axis.set(title=title, xlabel="step", ylabel="loss")
        axis.legend(fontsize=7, ncols=2)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="Options such as --config.optimizer.learning_rate=0.1 go to train/train.py.",
    )
    parser.add_argument("--tasks", nargs="+", default=["digits", "gpt"], choices=list(TASKS))
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=pathlib.Path, help="write all numbers as JSON")
    parser.add_argument("--plot", type=pathlib.Path, help="draw the losses of a task")
    parser.add_argument("--redraw", nargs="+", type=pathlib.Path, help="files of --out; runs nothing")
    args, extra = parser.parse_known_args()
    wrong = [word for word in extra if not word.startswith("--config.")]
    if wrong:
        parser.error(f"there are no options {' '.join(wrong)}.")
    runs: list[dict] = []
    for path in args.redraw or ():
        runs += json.loads(path.read_text())
    for task in args.tasks if not args.redraw else ():
        for setting in args.settings or settings_of(task):
            runs += train(task, setting, list(range(args.seeds)), args.steps, extra)
            for one in runs[-args.seeds :]:
                print(json.dumps(one | {"losses": one["losses"][-1:]}), flush=True)
            if args.out is not None:
                args.out.write_text(json.dumps(runs) + "\n")
    print(f"\n{table(runs)}")
    if args.plot is not None:
        plot(runs, args.plot)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
