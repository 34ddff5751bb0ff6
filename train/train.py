"""Trains a model in a pipeline.

    python train/train.py --config configs/quickstart.py
    python train/train.py --config configs/quickstart.py --config.num_steps=20
    python train/train.py --config configs/gpt_1f1b.py --config.pipeline.num_stages=2
    python train/train.py --config configs/quickstart.py --help

Any option of the configuration can be changed as `--config.section.field=value`. On a
machine without accelerators the CPU is split into as many devices as the schedule needs.
What the run writes goes to a new directory `runs/NAME-TIME`: `config.json`, `log.jsonl`
and the same for TensorBoard, the pictures `schedule.svg` and `run.png`. The exit code is
0, 1 if the loss or all gradients stopped being finite, 2 if an option or a file is wrong,
130 after Ctrl-C, which ends the run after the step that it is at; a second one ends it at
once.
"""

import datetime
import itertools
import json
import math
import pathlib
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

if __name__ == "__main__":  # the imports below take seconds
    from train.interrupt import leave_on_interrupt

    leave_on_interrupt("train.py: stopped before training began.")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jpipe
from jpipe import draw
from train import flags, plot, report
from train.config import TrainConfig
from train.data import Dataset, Examples, in_order, shuffled
from train.devices import check_devices, prepare_cpu
from train.interrupt import Interrupt
from train.log import Log, NonFiniteGradientsError, NonFiniteLossError


def loss_fn(outputs, batch):
    """Mean cross-entropy in nats, and accuracy.

    Logits are `[B, ..., K]`, labels `[B, ...]`.
    """
    logits, labels = outputs.astype(jnp.float32), batch["labels"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), {"accuracy": (logits.argmax(axis=-1) == labels).mean()}


def options_of_pipeline(config: TrainConfig, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """What `jpipe.Pipeline` takes beside the layers and the schedule."""
    return {
        "loss": loss_fn,
        "optimizer": config.optimizer.transform(config.num_steps),
        "mesh": mesh,
        "has_aux": True,
        "ties": config.model.ties() if hasattr(config.model, "ties") else (),
        **config.pipeline.options_of_pipeline(),
        **config.optimizer.options_of_pipeline(),
    }


def evaluate(
    pipe: jpipe.Pipeline,
    state: jpipe.PipelineState,
    examples: Examples,
    batch_size: int,
    num_batches: int | None = None,
    check: Callable[[], None] = lambda: None,
) -> tuple[float, float]:
    """Mean loss in nats and accuracy over all labels of `examples`.

    Args:
      pipe, state: what to evaluate.
      examples: on what.
      batch_size: examples to a minibatch.
      num_batches: minibatches to read, from the first on. None: all.
      check: called before each of them, to raise what ends the evaluation.
    """
    loss = accuracy = count = 0
    for batch in itertools.islice(in_order(examples, batch_size), num_batches):
        check()
        result, num_labels = pipe.evaluate(state, batch), batch["labels"].size
        loss += num_labels * float(result["loss"])
        accuracy += num_labels * float(result["aux"]["accuracy"])
        count += num_labels
    return loss / count, accuracy / count


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
        warm_up = config.pipeline.warm_up_table(schedule)
        data = config.data.load()
        batches = shuffled(data.train, config.batch_size, config.seed)
        batch = next(batches)
        num_replicas = config.pipeline.data
        prepare_cpu(schedule.num_devices * num_replicas)
        check_devices(schedule.num_devices, num_replicas)
        mesh = jpipe.make_mesh(
            stage=schedule.num_devices, data=num_replicas, ring=schedule.ring
        )
        options = options_of_pipeline(config, mesh)
        last = jpipe.Pipeline(config.model.layers(), schedule=schedule, **options)
        partition = last.partition(batch)
        pipe = last
        if warm_up is not None:
            options["boundaries"] = [record.layers[0] for record in partition[1:]]
            pipe = jpipe.Pipeline(config.model.layers(), schedule=warm_up, **options)
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
    memory = last.memory(batch)
    print(f"compiled in {time.perf_counter() - compile_start:.1f} s\n")
    print(f"memory of each device:\n{report.memory(memory)}\n")

    # Training. A step is recorded while the next one runs.
    rates = jax.vmap(config.optimizer.learning_rate_schedule(config.num_steps))(
        jnp.arange(config.num_steps)
    )
    rates = np.asarray(rates, np.float64)
    log = Log(
        run_dir / "log.jsonl",
        num_steps=config.num_steps,
        log_every=config.log_every,
        unit=data.unit,
        units_per_step=batch["labels"].size,
        learning_rate=lambda step: float(rates[step - 1]),
        start=start,
    )
    with Interrupt("train.py") as interrupt, log:
        code, words = 0, ""
        try:
            seconds = log.seconds()
            log.write({"step": 0, "memory_bytes": memory._asdict(), "seconds": seconds})
            pending = None
            for step in range(1, config.num_steps + 1):
                if pipe is not last and step > config.pipeline.synchronous_steps:
                    if pending is not None:
                        record(log, step - 1, pending, pipe.schedule)
                    pending = None
                    with log.paused():
                        pipe, state = last, last.adopt(state)
                    log.takes_over(step - 1, schedule.name)
                state, metrics = pipe.step(state, batch)
                batch = next(batches)
                if pending is not None:
                    record(log, step - 1, pending, pipe.schedule)
                pending = metrics
                ends = interrupt.requested or step == config.num_steps
                pauses = config.eval_every and step % config.eval_every == 0
                # Waits for the step, so that the speed of a line is that of its steps; it
                # is timed from the end of the first on.
                timed = step == 1 or step % config.log_every == 0
                if ends or pauses or timed:
                    record(log, step, pending, pipe.schedule)
                    pending = None
                if ends:
                    break
                if pauses:
                    with log.paused():
                        found = evaluate(
                            pipe,
                            state,
                            data.test,
                            config.batch_size,
                            config.eval_batches,
                            interrupt.check,
                        )
                    log.held_out(step, held_out(*found, data))
            interrupt.check()
            state, _ = pipe.flush(state)
            found = evaluate(
                pipe, state, data.test, config.batch_size, check=interrupt.check
            )
            log.held_out(config.num_steps, held_out(*found, data))
        except (NonFiniteLossError, NonFiniteGradientsError) as error:
            code, words = 1, f"{error} Training stopped. {remedy(config)} "
        except KeyboardInterrupt:
            log.finish_line()
            code = 130
            words = f"stopped after step {log.last_step} of {config.num_steps}. "
        log.close()
        plot.save(run_dir)
        if code:
            print(
                f"train.py: {words}The log up to here is in {run_dir}.", file=sys.stderr
            )
        else:
            seconds = time.perf_counter() - start
            print(f"{seconds:.0f} s in all; log and pictures in {run_dir}")
    return code


def record(log: Log, step: int, metrics: dict, schedule: jpipe.Schedule) -> None:
    """Logs the metrics of a step; waits until it has run."""
    finished, skipped = int(metrics["num_microbatches"]), metrics["skipped_updates"]
    norm = float(metrics["gradient_norm"])
    log.step(
        step,
        float(metrics["loss"]) if finished else None,
        # A pipeline that fills has no update yet, and 0 in its place.
        gradient_norm=norm if norm or schedule.synchronous else None,
        num_skipped=int(np.sum(skipped)),
        updated=not (schedule.synchronous and np.all(skipped)),
    )


def held_out(loss: float, accuracy: float, data: Dataset) -> dict[str, float]:
    """What an evaluation found, as the log has it."""
    result = {"test_loss": loss, "test_accuracy": accuracy}
    if data.bytes_per_label is not None:
        result["bits_per_byte"] = loss / math.log(2) / data.bytes_per_label
    return result


def remedy(config: TrainConfig) -> str:
    """What to try when numbers stop being finite."""
    words = (
        "Try a smaller --config.optimizer.learning_rate (now "
        f"{config.optimizer.learning_rate:g}) or more "
        f"--config.optimizer.warmup_steps (now {config.optimizer.warmup_steps})"
    )
    if config.pipeline.compute_dtype == "float16":
        words += ", or --config.pipeline.compute_dtype=bfloat16, which reaches further"
    return f"{words}."


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
    code = main(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done but to leave
    sys.exit(code)
