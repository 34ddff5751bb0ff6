"""Trains a model in a pipeline.

    python train/train.py --config configs/quickstart.py
    python train/train.py --config configs/quickstart.py --config.num_steps=20
    python train/train.py --config configs/gpt_1f1b.py --config.pipeline.num_stages=2
    python train/train.py --config configs/quickstart.py --help

`--config.section.field=value` changes an option of the configuration. On a machine
without accelerators the CPU is split into as many devices as the run needs.

A run writes its files to a new folder `runs/NAME-TIME`: `config.json` with all options,
`log.jsonl` and the same log for TensorBoard, and the pictures `schedule.svg` and
`run.png`. `--config runs/NAME-TIME/config.json` repeats a run.

Ctrl-C or SIGTERM ends a run after its current step; a second signal ends it at once. The
exit code is 0 after the last step; 1 if the loss or all gradients stopped being finite; 2
if an option or a file is wrong; 3 if the run folder could not be written any more; 130
after Ctrl-C; 143 after SIGTERM.
"""

import itertools
import json
import math
import pathlib
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

if __name__ == "__main__":  # the imports below take seconds
    from train.interrupt import ignore_interrupts, leave_on_interrupt

    leave_on_interrupt("train.py: stopped before training began.")

import jax
import jax.numpy as jnp
import numpy as np

import jpipe
from jpipe import draw
from models import Loss
from train import flags, plot, report
from train.config import TrainConfig
from train.data import Batch, Dataset, Examples, in_order, num_labels, shuffled
from train.devices import cache_compilations, check_devices, prepare_cpu
from train.interrupt import Interrupt
from train.log import Log, LogError, NonFiniteGradientsError, NonFiniteLossError
from train.run_dir import new_run_dir


class Run(NamedTuple):
    """Everything that a run needs, checked before anything is compiled.

    Attributes:
      name: the name of the configuration.
      config: the configuration.
      data: the data set.
      batches: the minibatches to train on, after the first one.
      batch: the first minibatch.
      pipe: the pipeline of the configured schedule.
      warm_up: the pipeline of the first `synchronous_steps`; None if there are none.
      partition: the stages.
      run_dir: the folder of the run.
    """

    name: str
    config: TrainConfig
    data: Dataset
    batches: Iterator[Batch]
    batch: Batch
    pipe: jpipe.Pipeline
    warm_up: jpipe.Pipeline | None
    partition: list[jpipe.StageRecord]
    run_dir: pathlib.Path


def main(argv: list[str]) -> int:
    """Runs the command line and returns the exit code."""
    if not argv or "--help" in argv or "-h" in argv:
        return print_help(argv)
    start = time.perf_counter()
    try:
        run = prepare(argv)
        print_head(run)
        state, memory = compile_pipeline(run)
    except (ValueError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    with Interrupt("train.py") as interrupt:
        code, message = 0, ""
        try:
            train(run, state, memory, interrupt, start)
        except (NonFiniteLossError, NonFiniteGradientsError) as error:
            code, message = 1, f"{error} Training stopped. {remedy(run.config)} "
        except LogError as error:
            # Weights are not saved, so the log is the only result of a run. Without it
            # every further step would be lost work.
            code, message = (
                3,
                (
                    f"{error} Training stopped, because the log is all that a run saves. Make "
                    "sure that the run folder stays and has space, and start again. "
                ),
            )
        except KeyboardInterrupt as error:
            code, message = interrupt.exit_code, f"{error} "
        return finish(run, code, message, start)


def prepare(argv: list[str]) -> Run:
    """Reads the options, loads the data and builds the pipelines.

    Raises:
      ValueError: if an option or a file is wrong, or devices are missing.
      OSError: if a file cannot be read or the run folder cannot be written.
    """
    name, config = flags.parse(argv, TrainConfig)
    schedule = config.pipeline.table()
    warm_up_schedule = config.pipeline.warm_up_table(schedule)
    data = config.data.load()
    batches = shuffled(data.train, config.batch_size, config.seed)
    batch = next(batches)
    sizes = {"data": config.pipeline.data, "model": config.pipeline.model}
    prepare_cpu(schedule.num_devices * math.prod(sizes.values()))
    check_devices(schedule.num_devices, *sizes.values())
    cache_compilations(config.compilation_cache)
    with new_run_dir(config.run_dir, name) as run_dir:
        mesh = jpipe.make_mesh(stage=schedule.num_devices, ring=schedule.ring, **sizes)
        options = options_of_pipeline(config, mesh)
        pipe = jpipe.Pipeline(config.model.layers(), schedule=schedule, **options)
        partition = pipe.partition(batch)
        warm_up = None
        if warm_up_schedule is not None:
            options["boundaries"] = [record.layers[0] for record in partition[1:]]
            warm_up = jpipe.Pipeline(
                config.model.layers(), schedule=warm_up_schedule, **options
            )
        resolved = {"name": name, **flags.to_json(config), "run_dir": None}
        text = json.dumps(resolved, indent=2) + "\n"
        (run_dir / "config.json").write_text(text, encoding="utf-8")
        draw.save(schedule, run_dir / "schedule.svg")
    return Run(name, config, data, batches, batch, pipe, warm_up, partition, run_dir)


def options_of_pipeline(config: TrainConfig, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """The arguments of `jpipe.Pipeline` beside the layers and the schedule."""
    return {
        "loss": config.model.loss(),
        "has_aux": True,
        "optimizer": config.optimizer.transform(config.num_steps),
        "mesh": mesh,
        "ties": config.model.ties() if hasattr(config.model, "ties") else (),
        **config.pipeline.options_of_pipeline(),
        **config.optimizer.options_of_pipeline(),
    }


def print_head(run: Run) -> None:
    """Prints the options, versions, devices, data, stages and schedule of a run."""
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else None
    print(*flags.to_flags(run.config), sep="\n", end="\n\n")
    print(f"versions: {report.versions()}")
    print(f"seed: {run.config.seed}")
    print(f"mesh: {report.mesh(run.pipe.mesh)}")
    print(f"data: {run.data.source}")
    print(f"run folder: {run.run_dir}\n")
    print(f"{report.partition(run.partition)}\n")
    print(draw.text(run.pipe.schedule, color=terminal, width=width))


def compile_pipeline(run: Run) -> tuple[jpipe.PipelineState, jpipe.Memory]:
    """Makes the training state and compiles the configured schedule.

    Returns:
      The state of the pipeline that trains first, and the memory of the configured one.

    Raises:
      ValueError: if the weights cannot be made or split.
    """
    start = time.perf_counter()
    first = run.pipe if run.warm_up is None else run.warm_up
    state = first.init(jax.random.key(run.config.seed), run.batch)
    memory = run.pipe.memory(run.batch)
    print(f"compiled in {time.perf_counter() - start:.1f} s\n")
    print(f"memory of each device:\n{report.memory(memory)}\n")
    return state, memory


def train(
    run: Run,
    state: jpipe.PipelineState,
    memory: jpipe.Memory,
    interrupt: Interrupt,
    start: float,
) -> None:
    """Trains the pipeline and evaluates it on the held-out data.

    Args:
      run: the run.
      state: the training state before the first step; donated.
      memory: the bytes of each device, for the log.
      interrupt: tells when the run has to end early.
      start: the `time.perf_counter()` of the start of the run.

    Raises:
      NonFiniteLossError: if a loss is not finite.
      NonFiniteGradientsError: if the gradients stay not finite.
      LogError: if the log cannot be written.
      KeyboardInterrupt: if a signal ended the run.
    """
    config, batch = run.config, run.batch
    pipe = run.pipe if run.warm_up is None else run.warm_up
    with Log(
        run.run_dir / "log.jsonl",
        num_steps=config.num_steps,
        log_every=config.log_every,
        unit=run.data.unit,
        learning_rate=learning_rates(config),
        start=start,
    ) as log:
        memory_record = {"step": 0, "memory_bytes": memory._asdict()}
        log.write(memory_record | {"seconds": log.seconds()})
        # The metrics of a step are read while the next step runs.
        pending: tuple | None = None

        def record_pending() -> None:
            nonlocal pending
            if pending is not None:
                record(log, *pending)
            pending = None

        try:
            for step in range(1, config.num_steps + 1):
                if pipe is not run.pipe and step > config.pipeline.synchronous_steps:
                    record_pending()
                    with log.paused():
                        pipe, state = run.pipe, run.pipe.adopt(state)
                    log.takes_over(step - 1, pipe.schedule.name)
                state, metrics = pipe.step(state, batch)
                num_units = num_labels(batch)
                batch = next(run.batches)
                record_pending()
                pending = step, metrics, num_units, pipe.schedule
                ends = interrupt.requested or step == config.num_steps
                evaluates = config.eval_every and step % config.eval_every == 0
                # A line of the log waits for its last step, so that its speed is the
                # speed of its steps. Timing begins at the end of step 1.
                if ends or evaluates or step == 1 or step % config.log_every == 0:
                    record_pending()
                if ends:
                    break
                if evaluates:
                    with log.paused():
                        result = evaluate(
                            pipe,
                            state,
                            run.data.test,
                            config.batch_size,
                            config.eval_batches,
                            interrupt.check,
                        )
                    log.held_out(step, held_out(result, run.data))
            interrupt.check()
            state, _ = pipe.flush(state)
            result = evaluate(
                pipe, state, run.data.test, config.batch_size, check=interrupt.check
            )
            log.held_out(config.num_steps, held_out(result, run.data))
        except KeyboardInterrupt:
            log.finish_line()
            raise KeyboardInterrupt(
                f"stopped after step {log.last_step} of {config.num_steps}."
            ) from None


def learning_rates(config: TrainConfig) -> Callable[[int], float]:
    """A function from a step, counted from 1, to its learning rate."""
    schedule = config.optimizer.learning_rate_schedule(config.num_steps)
    rates = np.asarray(jax.vmap(schedule)(jnp.arange(config.num_steps)), np.float64)
    return lambda step: float(rates[step - 1])


def record(
    log: Log, step: int, metrics: dict, num_units: int, schedule: jpipe.Schedule
) -> None:
    """Logs the metrics of a step; waits until the step has run."""
    finished, skipped = int(metrics["num_microbatches"]), metrics["skipped_updates"]
    norm = float(metrics["gradient_norm"])
    log.step(
        step,
        float(metrics["loss"]) if finished else None,
        num_units=num_units,
        # While an asynchronous pipeline fills, nothing is updated and the norm is 0.
        gradient_norm=norm if norm or schedule.synchronous else None,
        num_skipped=int(np.sum(skipped)),
        updated=not (schedule.synchronous and np.all(skipped)),
    )


def evaluate(
    pipe: jpipe.Pipeline,
    state: jpipe.PipelineState,
    examples: Examples,
    batch_size: int,
    num_batches: int | None = None,
    check: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Averages the loss and its metrics over all labels of a data set.

    Args:
      pipe: a pipeline whose loss is one of `models/losses.py`.
      state: the training state of `pipe`.
      examples: the data set.
      batch_size: number of examples per minibatch.
      num_batches: number of minibatches to read, from the first on. None: all.
      check: called before each minibatch; it may raise to end the evaluation.

    Returns:
      "loss" in nats, and the metrics of the loss, such as "accuracy".
    """
    totals, count = None, np.float64(0)
    for batch in itertools.islice(in_order(examples, batch_size), num_batches):
        check()
        means = jax.device_get(pipe.evaluate(state, batch))
        weight = np.float64(num_labels(batch))
        sums = jax.tree.map(weight.__mul__, means)
        totals = sums if totals is None else jax.tree.map(np.add, totals, sums)
        count += weight
    averages = jax.tree.map(lambda total: total / count, totals)
    loss = cast(Loss, pipe.loss)
    return {"loss": float(averages["loss"]), **loss.metrics(averages["aux"])}


def held_out(result: dict[str, float], data: Dataset) -> dict[str, float]:
    """The result of `evaluate` with the names that it has in the log."""
    values = {f"test_{name}": value for name, value in result.items()}
    if data.bytes_per_label is not None:
        values["bits_per_byte"] = result["loss"] / math.log(2) / data.bytes_per_label
    return values


def finish(run: Run, code: int, message: str, start: float) -> int:
    """Draws the log, prints how the run ended, and returns the exit code."""
    place = f"The log up to here is in {run.run_dir}."
    if code != 3:
        try:
            plot.save(run.run_dir)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            message += f"cannot write the picture of the run: {reason}. "
            code = code or 3
    elif not (run.run_dir / "log.jsonl").exists():
        place = "The log is lost."
    if code:
        print(f"train.py: {message}{place}", file=sys.stderr)
    else:
        seconds = time.perf_counter() - start
        print(f"{seconds:.0f} s in all; log and pictures in {run.run_dir}")
    return code


def remedy(config: TrainConfig) -> str:
    """Advice for a run whose numbers stopped being finite."""
    words = (
        "Try a smaller --config.optimizer.learning_rate (now "
        f"{config.optimizer.learning_rate:g}) or more "
        f"--config.optimizer.warmup_steps (now {config.optimizer.warmup_steps})"
    )
    if config.pipeline.compute_dtype == "float16":
        words += (
            ", or --config.pipeline.compute_dtype=bfloat16, which has a wider range"
        )
    return f"{words}."


def print_help(argv: list[str]) -> int:
    """Prints commands and all options, with the values of a configuration if named."""
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
    ignore_interrupts()
    sys.exit(code)
