"""What compression costs in quality: training on real data with each compressor, several seeds, at equal steps.

    python benchmarks/compression_quality.py
    python benchmarks/compression_quality.py --tasks digits --seeds 1 --steps 50

Every run is `train/train.py` on 2 stages with 2 replicas each, on 4 CPU devices. A table has the bytes that are left, and
the loss on held-out data, mean and standard deviation over the seeds. `--out FILE` also writes them as JSON, with the losses of
all steps, and `--plot FILE.svg` draws these.
"""

import argparse
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]

TASKS = {
    "digits": [
        "--config=configs/quickstart.py",
        "--config.batch_size=64",
        "--config.pipeline.schedule=one_f_one_b",
    ],
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
            "PowerSGD 1": "powersgd:rank=1",
            "PowerSGD 4": "powersgd:rank=4",
            "streaming PCA 1": "streaming_pca:rank=1",
            "streaming PCA 4": "streaming_pca:rank=4",
        }.items()
    },
    **{
        f"gradients accumulated PCA {rank}": [
            f"--config.pipeline.accumulate_gradients=streaming_pca:rank={rank}"
        ]
        for rank in (1, 4, 10)
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
}


def run(task: str, setting: str, seed: int, steps: int) -> dict:
    """One training: its held-out result, the losses of its steps, and the ratios of bytes that it printed."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = pathlib.Path(folder) / "run"
        command = [sys.executable, "train/train.py", *TASKS[task], *COMMON]
        command += [*SETTINGS[setting], f"--config.seed={seed}"]
        command += [f"--config.num_steps={steps}", f"--config.log_every={steps}"]
        command += [f"--config.run_dir={run_dir}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
        lines = (run_dir / "log.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    ratios = re.findall(r"^  (activation|gradients).*?([\d.]+)$", done.stdout, re.M)
    result = {k: v for k, v in records[-1].items() if k.startswith("test_")}
    losses = next(r["each_step"]["loss"] for r in records if "each_step" in r)
    found = {what: float(ratio) for what, ratio in ratios}
    return {"task": task, "setting": setting, "seed": seed, "losses": losses} | {
        "ratio": found.get(setting.split()[0].replace("messages", "activation"), 1.0),
        **result,
    }


def table(runs: list[dict]) -> str:
    """The table, one row per setting."""
    tasks = list(dict.fromkeys(r["task"] for r in runs))
    head = "| setting |" + "".join(
        f" {t}: bytes / | {t}: held-out loss |" for t in tasks
    )
    rows = [head, "|---|" + "---|---|" * len(tasks)]
    for setting in dict.fromkeys(r["setting"] for r in runs):
        row = f"| {setting} |"
        for task in tasks:
            of = [r for r in runs if (r["task"], r["setting"]) == (task, setting)]
            if not of:
                row += " | |"
                continue
            losses = [r["test_loss"] for r in of]
            spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
            ratio = statistics.mean(r["ratio"] for r in of)
            row += f" {ratio:.1f} | {statistics.mean(losses):.3f} ± {spread:.3f} |"
        rows.append(row)
    return "\n".join(rows)


def plot(runs: list[dict], path: pathlib.Path) -> None:
    """Losses of the steps, mean over seeds and over 10 steps."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    import numpy as np

    tasks = list(dict.fromkeys(r["task"] for r in runs))
    kinds = ("gradients", "messages")
    figure, axes = plt.subplots(
        len(tasks),
        2,
        figsize=(11, 3.6 * len(tasks)),
        squeeze=False,
        layout="constrained",
    )
    for row, task in zip(axes, tasks):
        for axis, kind in zip(row, kinds):
            for setting in dict.fromkeys(r["setting"] for r in runs):
                if setting != "plain" and not setting.startswith(kind):
                    continue
                of = [r for r in runs if (r["task"], r["setting"]) == (task, setting)]
                losses = np.mean([r["losses"] for r in of], axis=0)
                smooth = np.convolve(losses, np.ones(10) / 10, "valid")
                label = setting.removeprefix(f"{kind} ")
                style = {"color": "black", "linewidth": 2} if setting == "plain" else {}
                axis.plot(np.arange(len(smooth)) + 10, smooth, label=label, **style)
            axis.set(title=f"{task}, {kind} compressed", xlabel="step", ylabel="loss")
            axis.legend(fontsize=7)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument(
        "--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=pathlib.Path, help="write all numbers as JSON")
    parser.add_argument("--plot", type=pathlib.Path, help="draw the losses")
    args = parser.parse_args()
    runs: list[dict] = []
    for task in args.tasks:
        for setting in args.settings:
            for seed in range(args.seeds):
                runs.append(run(task, setting, seed, args.steps))
                one = {k: v for k, v in runs[-1].items() if k != "losses"}
                print(json.dumps(one), flush=True)
                if args.out is not None:
                    args.out.write_text(json.dumps(runs) + "\n")
    print(f"\n{table(runs)}")
    if args.plot is not None:
        plot(runs, args.plot)


if __name__ == "__main__":
    main()
