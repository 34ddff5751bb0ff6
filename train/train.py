"""Trains a model in a pipeline.

    python train/train.py --config configs/quickstart.py
    python train/train.py --config configs/quickstart.py --config.num_steps=20
    python train/train.py --config configs/gpt_1f1b.py --config.pipeline.num_stages=2
    python train/train.py --config configs/quickstart.py --help

Any option of the configuration can be changed as `--config.section.field=value`. On a
machine without accelerators the CPU is split into as many devices as the schedule needs.
What the run writes goes to a new directory `runs/NAME-TIME`: `config.json`, `log.jsonl`,
`schedule.svg`. The exit code is 0, 1 if the loss stopped being finite, 2 if an option or
a file is wrong, 130 after Ctrl-C.
"""

import datetime
import json
import math
import pathlib
import shutil
import sys
import time
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jpipe
from jpipe import draw
from train import flags, report
from train.config import TrainConfig
from train.data import Examples, in_order, shuffled
from train.devices import check_devices, prepare_cpu
from train.log import Log, NonFiniteLossError


def loss_fn(outputs, batch):
    """Mean cross-entropy in nats: logits `[B, ..., K]` against labels `[B, ...]`."""
    logits = outputs.astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return losses.mean()


def evaluate(
    pipe: jpipe.Pipeline,
    state: jpipe.PipelineState,
    examples: Examples,
    batch_size: int,
) -> tuple[float, float]:
    """Mean loss in nats and accuracy over all labels of `examples`."""
    loss = hits = count = 0
    for batch, num_valid in in_order(examples, batch_size):
        logits = np.asarray(pipe.predict(state, batch), np.float32)[:num_valid]
        labels = batch["labels"][:num_valid]
        highest = logits.max(axis=-1, keepdims=True)
        log_sum = np.log(np.exp(logits - highest).sum(axis=-1)) + highest[..., 0]
        chosen = np.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        loss += float((log_sum - chosen).sum(dtype=np.float64))
        hits += int((logits.argmax(axis=-1) == labels).sum())
        count += labels.size
    return loss / count, hits / count


def make_run_dir(given: str | None, name: str) -> pathlib.Path:
    """Makes the directory of the run, which must be new."""
    if given is None:
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        path = pathlib.Path("runs") / f"{name}-{now}"
        number = 1
        while path.exists():  # two runs in one second
            number += 1
            path = path.with_name(f"{name}-{now}-{number}")
    else:
        path = pathlib.Path(given)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ValueError(
                f"`run_dir` must be new or empty, got `{path}`, which has files of its "
                "own. Name another, or remove it."
            )
    path.mkdir(parents=True, exist_ok=True)
    return path


def main(argv: list[str]) -> int:
    if not argv or "--help" in argv or "-h" in argv:
        return print_help(argv)

    # Options, data, devices, pipeline: everything that a user can get wrong.
    start = time.perf_counter()
    try:
        name, config = flags.parse(argv, TrainConfig)
        schedule = config.pipeline.table()
        data = config.data.load()
        batches = shuffled(data.train, config.batch_size, config.seed)
        batch = next(batches)
        prepare_cpu(schedule.num_devices)
        check_devices(schedule.num_devices)
        mesh = jpipe.make_mesh(stage=schedule.num_devices)
        pipe = jpipe.Pipeline(
            config.model.layers(),
            loss=loss_fn,
            optimizer=config.optimizer.transform(config.num_steps),
            schedule=schedule,
            boundaries=config.pipeline.boundaries,
            mesh=mesh,
            recompute=config.pipeline.recompute,
            compute_dtype=config.pipeline.compute_dtype,
        )
        partition = pipe.partition(batch)
        run_dir = make_run_dir(config.run_dir, name)
    except (ValueError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2

    # What is about to run.
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else None
    print(*flags.to_flags(config), sep="\n", end="\n\n")
    print(f"versions: {report.versions()}")
    print(f"seed: {config.seed}")
    print(f"mesh: {report.mesh(mesh)}")
    print(f"data: {data.source}")
    print(f"run folder: {run_dir}\n")
    print(f"{report.partition(partition)}\n")
    print(draw.text(schedule, color=terminal, width=width))
    draw.save(schedule, run_dir / "schedule.svg")
    resolved = json.dumps(flags.to_json(config), indent=2)
    (run_dir / "config.json").write_text(resolved + "\n", encoding="utf-8")

    compile_start = time.perf_counter()
    state = pipe.init(jax.random.key(config.seed), batch)
    memory = pipe.memory(batch)
    print(f"compiled in {time.perf_counter() - compile_start:.1f} s\n")
    print(f"memory of each device:\n{report.memory(memory)}\n")

    # Training. A step is recorded while the next one runs.
    log = Log(
        run_dir / "log.jsonl",
        num_steps=config.num_steps,
        log_every=config.log_every,
        unit=data.unit,
        units_per_step=batch["labels"].size,
    )
    with log:
        try:
            last = None
            for step in range(1, config.num_steps + 1):
                state, metrics = pipe.step(state, batch)
                batch = next(batches)
                if last is not None:
                    record(log, step - 1, last)
                last = metrics
            record(log, config.num_steps, last)
            state, _ = pipe.flush(state)
            loss, accuracy = evaluate(pipe, state, data.test, config.batch_size)
        except NonFiniteLossError as error:
            print(
                f"train.py: {error} Training stopped. Try a smaller "
                "--config.optimizer.learning_rate (now "
                f"{config.optimizer.learning_rate:g}) or more "
                f"--config.optimizer.warmup_steps (now {config.optimizer.warmup_steps}). "
                f"The log up to here is in {run_dir}.",
                file=sys.stderr,
            )
            return 1
        except KeyboardInterrupt:
            print(
                f"\ntrain.py: stopped after step {log.last_step} of {config.num_steps}. "
                f"The log up to here is in {run_dir}.",
                file=sys.stderr,
            )
            return 130
        seconds = time.perf_counter() - start
        result = {"test_loss": loss, "test_accuracy": accuracy}
        words = f"accuracy {accuracy:.2%}, loss {loss:.4f}"
        if data.unit == "bytes":
            result["bits_per_byte"] = loss / math.log(2)
            words += f", {result['bits_per_byte']:.3f} bits per byte"
        log.write({"step": config.num_steps, **result, "seconds": round(seconds, 3)})

    print(f"held-out {data.unit}: {words}")
    print(f"{seconds:.0f} s in all; log and picture in {run_dir}")
    return 0


def record(log: Log, step: int, metrics: dict) -> None:
    """Logs the metrics of a step; waits until it has run."""
    finished = int(metrics["num_microbatches"])
    loss = float(metrics["loss"]) if finished else None
    log.step(step, loss, int(np.sum(metrics["skipped_updates"])))


def print_help(argv: list[str]) -> int:
    """Commands that work, and every option with its value in the config, if named."""
    config, rest = None, [word for word in argv if word not in ("--help", "-h")]
    if rest:
        try:
            _, config = flags.parse(rest, TrainConfig)
        except (ValueError, OSError) as error:
            print(f"train.py: {error}", file=sys.stderr)
            return 2
    print(f"{__doc__}\nOptions:\n{flags.usage(TrainConfig, config)}")
    return 0


if __name__ == "__main__":
    warnings.formatwarning = lambda message, *_: f"train.py: warning: {message}\n"
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("\ntrain.py: stopped before training began.", file=sys.stderr)
        sys.exit(130)
