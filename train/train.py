"""Trains a model in a pipeline.

    python train/train.py --config configs/quickstart.py
    python train/train.py --config configs/quickstart.py --config.num_steps=20
    python train/train.py --config configs/gpt_1f1b.py --config.pipeline.num_stages=2
    python train/train.py --config configs/quickstart.py --help

`--config.section.field=value` changes an option of the configuration. On a machine
without accelerators the CPU is split into as many devices as the run needs.

A run writes its files to a new folder `runs/NAME-TIME`: `config.json` with all options,
`log.jsonl` and the same log for TensorBoard, and the pictures `schedule.svg` and
`run.png`; of a model that others publish also the folder `model`, as they publish it.
`--config runs/NAME-TIME/config.json` repeats a run. With
`--config.profile=10:13` there is a trace of the steps 10, 11 and 12, too: `trace.svg`.

    python train/train.py --config configs/gpt_1f1b.py --config.checkpoint.every=500
    python train/train.py --resume runs/NAME-TIME
    python train/train.py --resume runs/NAME-TIME --config.pipeline.num_stages=2
    python train/train.py --resume-or-start runs/mine --config configs/gpt_1f1b.py --config.checkpoint.every=500
    python -m jpipe.launch -n 2 --devices 4 train/train.py --config configs/quickstart.py

With checkpoints, a run that ended can go on from its newest one, in the same folder. Its
stages, replicas, schedule and number of processes may change. `--resume-or-start` is for
jobs that are started again and again: it goes on, or starts if there is no checkpoint yet.

With several processes, the first one writes the folder of the run and prints the log.

Ctrl-C or SIGTERM ends a run after its current step; a second signal ends it at once. The
exit code is 0 after the last step; 1 if the loss or all gradients stopped being finite; 2
if an option or a file is wrong; 3 if the run folder could not be written at the end; 130
after Ctrl-C; 143 after SIGTERM.
"""

import contextlib
import functools
import itertools
import math
import pathlib
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping
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
from jpipe._util.foreign import shortened
from models import Loss
from train import flags, plot, report, stability, writers
from train.asynchronous import late_gradients
from train.config import TrainConfig
from train.data import (
    Batch,
    Dataset,
    Examples,
    in_order,
    num_labels,
    position_of,
    shares,
    shuffled,
    steps_per_epoch,
)
from train.devices import cache_compilations, check_devices, prepare_cpu
from train.fewer import fitted
from train.interrupt import Interrupt
from train.learners import after_step, mean_of_learners
from train.log import Log, NonFiniteGradientsError, NonFiniteLossError
from train.processes import is_first, leave
from train.resume import Resumed, Saver, read_command
from train.run_dir import shared_run_dir, write_config
from train.tracing import Tracer


class Run(NamedTuple):
    """Everything that a run needs, checked before anything is compiled.

    Attributes:
      name: the name of the configuration.
      config: the configuration.
      data: the data set.
      batch: a minibatch, its rows of this process.
      pipe: the pipeline of the configured schedule.
      warm_up: the pipeline of the first `synchronous_steps`; None if there are none.
      partition: the stages.
      shards: the arrays that each device holds.
      messages: the messages of devices; empty if nothing of it is compressed.
      run_dir: the folder of the run.
      config_text: the content of its `config.json`.
      checkpoints: the checkpoints of the run.
      resumes: whether the run goes on from one of them.
    """

    name: str
    config: TrainConfig
    data: Dataset
    batch: Batch
    pipe: jpipe.Pipeline
    warm_up: jpipe.Pipeline | None
    partition: list[jpipe.StageRecord]
    shards: list[jpipe.ShardRecord]
    messages: list[jpipe.MessageRecord]
    run_dir: pathlib.Path
    config_text: str
    checkpoints: jpipe.Checkpoints
    resumes: bool


_FIRST_HELP = """Trains a model in a pipeline, as a configuration says. `--help` lists all options; the usual commands:

    python train/train.py --config configs/quickstart.py
    python train/train.py --config configs/gpt_1f1b.py --config.num_steps=100
    python train/train.py --resume runs/NAME-TIME"""


def main(argv: list[str]) -> int:
    """Runs the command line and returns the exit code."""
    if not argv:
        print(_FIRST_HELP)
        return 0
    if "--help" in argv or "-h" in argv:
        return print_help(argv)
    start = time.perf_counter()
    with contextlib.ExitStack() as until_end:
        try:
            run = prepare(argv, until_end)
            if is_first():
                print_head(run)
            start_of, memory = compile_pipeline(run)
        except (ValueError, OSError) as error:
            print(f"train.py: {shortened(str(error))}", file=sys.stderr)
            return 2
        with Interrupt("train.py") as interrupt:
            try:
                message = train(run, start_of, memory, interrupt, start)
                code = 3 if message else 0
            except (NonFiniteLossError, NonFiniteGradientsError) as error:
                code, message = 1, f"{error} Training stopped. {remedy(run.config)} "
            except KeyboardInterrupt as error:
                # The signal may have come to another process.
                code = interrupt.exit_code or 128 + signal.SIGTERM
                message = f"{error} "
            return finish(run, code, message, start) if is_first() else code


def warn_of_short_run(config: TrainConfig) -> None:
    """Warns if the run ends before its learning rate has risen."""
    optimizer, num_steps = config.optimizer, config.num_steps
    for name, rise in (
        ("warmup_steps", optimizer.warmup_steps),
        ("annealing_steps", optimizer.steps_of_rise),
    ):
        if num_steps < rise < math.inf:
            warnings.warn(
                f"`optimizer.{name}={rise}` is more than `num_steps={num_steps}`, so the learning rate reaches "
                f"{num_steps / rise:.0%} of its rise to {optimizer.learning_rate:g} and then the run ends. For a short "
                f"run set `--config.optimizer.{name}={max(num_steps // 10, 1)}` too.",
                stacklevel=2,
            )


def own_rows(mesh: jax.sharding.Mesh, batch: Batch) -> Batch:
    """The rows of a batch that this process gives: all, if there is one process."""
    if jax.process_count() == 1:
        return batch
    rows_of = functools.partial(jpipe.distributed.process_rows, mesh)
    return next(shares([batch], rows_of))


def prepare(argv: list[str], until_end: contextlib.ExitStack) -> Run:
    """Reads the options, loads the data and builds the pipelines.

    Args:
      argv: the words of the command line.
      until_end: holds the folder for this run until it ends.

    Raises:
      ValueError: if an option or a file is wrong, or devices are missing.
      OSError: if a file cannot be read or the run folder cannot be written.
    """
    command = read_command(argv)
    name, config = command.name, fitted(command.config)
    warn_of_short_run(config)
    schedule = config.pipeline.table()
    config.optimizer.check_rhythm(schedule)
    warm_up_schedule = config.pipeline.warm_up_table(schedule)
    data = config.load_data()
    batch = next(shuffled(data.train, config.batch_size, config.seed))
    sizes = config.mesh.sizes
    prepare_cpu(schedule.num_devices * math.prod(sizes.values()))
    jpipe.distributed.initialize()
    check_devices(schedule.num_devices, **sizes)
    cache_compilations(config.compilation_cache)
    config.weights.check()
    writers.check_packages(config.log)
    resolved = {"name": name, **flags.to_json(config), "run_dir": None}
    text = flags.to_text(resolved)
    jpipe.distributed.check_same({"the configuration": text})
    with shared_run_dir(command, until_end) as (run_dir, resumes):
        mesh = config.mesh.make(schedule)
        options = config.options_of_pipeline(mesh)
        batch = own_rows(mesh, batch)
        with config.mesh.names_rules():
            pipe = jpipe.Pipeline(config.weights.layers(), schedule=schedule, **options)
            partition = pipe.partition(batch)
        warm_up = None
        if warm_up_schedule is not None:
            if options["boundaries"] != "placement":  # which also orders the layers; `adopt` takes any cut over
                options["boundaries"] = [record.layers[0] for record in partition[1:]]
            warm_up = jpipe.Pipeline(config.weights.layers(), schedule=warm_up_schedule, **options)
        if is_first():
            write_config(run_dir, text)
            if draws(schedule):
                draw.save(schedule, run_dir / "schedule.svg")
    compressed = (
        config.pipeline.message_compressors(),
        config.mesh.gradient_compressor(),
        config.pipeline.accumulate_gradients,
    )
    compresses = any(c is not None for c in compressed)
    return Run(
        name,
        config,
        data,
        batch,
        pipe,
        warm_up,
        partition,
        pipe.shards(batch),
        pipe.messages(batch) if compresses else [],
        run_dir,
        text,
        config.checkpoint.open(run_dir),
        resumes,
    )


MOST_STAGES_DRAWN = 32


def draws(schedule: jpipe.Schedule) -> bool:
    """Returns whether the table is drawn. Of one device, or of more stages than lines, there is nothing to see."""
    one_device = schedule.num_devices == 1 < schedule.num_stages
    return not one_device and schedule.num_stages <= MOST_STAGES_DRAWN


def print_head(run: Run) -> None:
    """Prints the options, versions, devices, data, stages and schedule of a run."""
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else None
    print(*flags.to_flags(run.config), sep="\n", end="\n\n")
    print(f"versions: {report.versions()}")
    print(f"seed: {run.config.seed}")
    print(f"mesh: {report.mesh(run.pipe.mesh)}")
    print(f"data: {run.data.source}")
    if run.config.init is not None:
        print(f"weights: {run.config.init}, {run.config.weights.model}")
    print(f"run folder: {run.run_dir}\n")
    print(f"{report.partition(run.partition)}\n")
    print(f"{report.shards(run.shards)}\n")
    if run.messages:
        print(f"{report.messages(run.messages)}\n")
    schedule = run.pipe.schedule
    print(draw.text(schedule, color=terminal, width=width, table=draws(schedule)))


def compile_pipeline(run: Run) -> tuple[Resumed, jpipe.Memory]:
    """Makes or restores the training state and compiles the configured schedule.

    Returns:
      Where training starts, and the memory of the configured pipeline.

    Raises:
      ValueError: if the weights cannot be made or split, or the checkpoint does not fit.
      OSError: if there is no checkpoint to resume from.
    """
    start = time.perf_counter()
    if run.resumes:
        start_of = Resumed.restored(
            run.checkpoints,
            run.batch,
            run.pipe,
            run.warm_up,
            run.config.pipeline.synchronous_steps,
        )
    else:
        pipe = run.pipe if run.warm_up is None else run.warm_up
        seed = run.config.seed
        state = pipe.init(jax.random.key(seed), run.batch, params=run.config.weights.first_params(seed))
        start_of = Resumed(pipe, state, 0, None, None)
    memory = run.pipe.memory(run.batch)
    if run.config.stability:
        check_stability(run, start_of)
    if is_first():
        print(f"compiled in {time.perf_counter() - start:.1f} s\n")
        print(f"memory of each device:\n{report.memory(memory)}\n")
        if run.resumes:
            print(f"resumed after step {start_of.step} of {run.config.num_steps}\n")
    return start_of, memory


def check_stability(run: Run, start_of: Resumed) -> None:
    """Prints the largest stable learning rate of each stage, and warns if the configured one exceeds it.

    Raises:
      ValueError: if the mesh has several processes, or the curvature is not finite.
    """
    config, (pipe, state, *_) = run.config, start_of
    loss = pipe.plain_loss(state)
    curvature, stable_bounds = stability.bounds(
        config.optimizer,
        run.pipe,
        loss,
        pipe.get_params(state),
        shuffled(run.data.train, config.batch_size, config.seed),
        config.num_steps,
        config.pipeline.synchronous_steps,
    )
    print(f"{stability.text(curvature, stable_bounds)}\n")
    message = stability.warning(stable_bounds)
    if message is not None:
        warnings.warn(message, stacklevel=2)


def evaluated(config: TrainConfig, pipe: jpipe.Pipeline, state: jpipe.PipelineState) -> jpipe.PipelineState:
    """The state whose weights are evaluated: their average if the optimizer keeps one."""
    if config.optimizer.ema_decay is None:
        return state
    return pipe.with_params(state, jpipe.optim.averaged_params)


def train(
    run: Run,
    start_of: Resumed,
    memory: jpipe.Memory,
    interrupt: Interrupt,
    start: float,
) -> str:
    """Trains the pipeline and evaluates it on the held-out data.

    Args:
      run: the run.
      start_of: the start of training; its state is donated.
      memory: the bytes of each device, for the log.
      interrupt: tells when the run has to end early.
      start: the `time.perf_counter()` of the start of the run.

    Returns:
      What could not be written to the run folder, in words; empty if all was.

    Raises:
      NonFiniteLossError: if a loss is not finite.
      NonFiniteGradientsError: if the gradients stay not finite.
      KeyboardInterrupt: if a signal ended the run.
    """
    config = run.config
    pipe, state, first, resumed_log, position = start_of
    batches = shuffled(run.data.train, config.batch_size, config.seed, first, position)
    with (
        Log(
            run.run_dir / "log.jsonl" if is_first() else None,
            num_steps=config.num_steps,
            log_every=config.log_every,
            unit=run.data.unit,
            batch_size=config.batch_size,
            steps_per_epoch=steps_per_epoch(run.data.train, config.batch_size),
            learning_rate=learning_rates(config),
            start=start,
            resumed=resumed_log,
            writers=begun_writers(run, first) if is_first() else (),
        ) as log,
        Saver(
            run.run_dir,
            run.config_text,
            run.checkpoints,
            config.checkpoint.every,
            first,
        ) as saver,
        Tracer(config.profiled_steps, run.run_dir if is_first() else None, log) as tracer,
    ):
        if not run.resumes:
            memory_record = {"step": 0, "memory_bytes": memory._asdict()}
            log.write(memory_record | {"seconds": log.seconds()})
        # The metrics of a step are read while the next step runs.
        pending: tuple | None = None

        def record_pending() -> None:
            nonlocal pending
            if pending is not None:
                record(log, *pending, statistics=config.weights.model.loss().statistics)
            pending = None

        moments = itertools.count()

        def stops() -> bool:
            """Returns whether the run stops now, in all processes at the same moment."""
            return jpipe.distributed.stop_requested(next(moments), interrupt.requested)

        def check() -> None:
            if stops():
                raise KeyboardInterrupt

        def evaluate_held_out(step: int, num_batches: int | None = None) -> None:
            """Evaluates the weights after a step, and records the result."""
            with log.paused("evaluating"):
                weights = evaluated(config, pipe, state)
                examples, rows = run.data.test, config.batch_size
                result = evaluate(pipe, weights, examples, rows, num_batches, check)
            log.held_out(step, held_out(result, run.data))

        def is_due(step: int) -> bool:
            """Returns whether there is an evaluation after a step, beside the one at the end."""
            every = config.eval_every
            return bool(every) and step % every == 0 and 0 < step < config.num_steps

        stopped = False
        try:
            if is_due(first) and log.last_held_out != first:
                evaluate_held_out(first, config.eval_batches)
            batch = next(batches)
            for step in range(first + 1, config.num_steps + 1):
                if pipe is not run.pipe and step > config.pipeline.synchronous_steps:
                    record_pending()
                    with log.paused("compiling"):
                        pipe, state = run.pipe, run.pipe.adopt(state)
                    log.takes_over(step - 1, pipe.schedule.name)
                tracer.before(step, state)
                state, metrics = pipe.step(state, own_rows(pipe.mesh, batch))
                tracer.after(step)
                state = after_step(config, pipe, state, step)
                num_units, asked = num_labels(batch), time.perf_counter()
                batch = next(batches)
                if metrics["loss"].is_ready():  # the devices have nothing to do until they get it
                    log.waited(time.perf_counter() - asked)
                record_pending()
                stopped = stops()
                ends = stopped or step == config.num_steps
                # A line of the log waits for its last step, so that its speed is the
                # speed of its steps. Timing begins at the end of step 1.
                lines_up = step == first + 1 or step % config.log_every == 0
                has_numbers = config.diagnostics and (ends or lines_up)
                late = late_gradients(config.optimizer, pipe, state) if has_numbers else {}
                pending = step, metrics, num_units, pipe.schedule, late
                if ends or is_due(step) or saver.saves(step, ends) or lines_up:
                    record_pending()
                if is_due(step) and not ends:
                    try:
                        evaluate_held_out(step, config.eval_batches)
                    except KeyboardInterrupt:  # the run that goes on evaluates again
                        stopped = ends = True
                if saver.saves(step, ends):
                    with log.paused("saving"):
                        saver.save(step, state, log, position_of(batches))
                if ends:
                    break
            if stopped:
                raise KeyboardInterrupt
            check()
            state, _ = pipe.flush(state)
            evaluate_held_out(config.num_steps)
            with log.paused("saving"):
                unwritten = write_model(run, pipe, state)
            log.print_goodput()
        except KeyboardInterrupt:
            log.finish_line()
            raise KeyboardInterrupt(
                f"stopped after step {log.last_step} of {config.num_steps}.{saver.how_to_resume()}"
            ) from None
    lost = unwritten + (f"{saver.problem} " if saver.problem else "")
    if log.num_unwritten:
        lost += f"The last {log.num_unwritten} records of the log could not be written. "
    return lost


def begun_writers(run: Run, first: int) -> list[writers.Writer]:
    """The writers that `log` names. One that cannot begin is a warning."""
    options = dict(word.removeprefix("--config.").split("=", 1) for word in flags.to_flags(run.config))
    made = []
    for name in run.config.log:
        try:
            made.append(writers.make(name, run.run_dir, first + 1, options))
        except Exception as error:  # of any package
            warnings.warn(f"{name} cannot begin: {error}. Training goes on without it.", stacklevel=2)
    return made


MODEL = "model"
"""The folder of the trained model in that of its run."""


def write_model(run: Run, pipe: jpipe.Pipeline, state: jpipe.PipelineState) -> str:
    """Writes the trained model as it is published, if it has such a layout.

    Returns:
      What could not be written, in words; empty if all was.
    """
    config = run.config
    if not config.weights.are_published:
        return ""
    params = pipe.get_params(evaluated(config, pipe, state))
    if not is_first():
        return ""
    folder, data = run.run_dir / MODEL, config.tokenized_data
    write_tokens = data.tokens().write if hasattr(data, "tokens") else None
    try:
        with jpipe.distributed.phase("write the model", limit_seconds=3600):
            config.weights.write(folder, params, write_tokens)
    except OSError as error:
        return f"The model could not be written to {folder}: {error.strerror or error}. "
    print(f"model in {folder}")
    return ""


def learning_rates(config: TrainConfig) -> Callable[[int], float]:
    """A function from a step, counted from 1, to its learning rate."""
    schedule = config.optimizer.learning_rate_schedule(config.num_steps)
    rates = np.asarray(jax.vmap(schedule)(jnp.arange(config.num_steps)), np.float64)
    return lambda step: float(rates[step - 1])


def record(
    log: Log,
    step: int,
    metrics: dict,
    num_units: int,
    schedule: jpipe.Schedule,
    late: Mapping[str, Mapping[str, float]],
    *,
    statistics: Callable[[Mapping[str, Any]], dict[str, float]],
) -> None:
    """Logs the metrics of a step; waits until the step has run.

    `late` are the numbers of `late_gradients`, and `statistics` is that of the loss.
    """
    metrics = mean_of_learners(metrics)
    finished, skipped = int(metrics["num_microbatches"]), metrics["skipped_updates"]
    norm = float(metrics["gradient_norm"])
    log.step(
        step,
        float(metrics["loss"]) if finished else None,
        num_units=num_units,
        # While an asynchronous pipeline fills, nothing is updated and the norm is 0.
        gradient_norm=norm if norm or schedule.synchronous else None,
        num_skipped=int(np.sum(skipped)),
        reports={
            "compression": {n: float(a) for n, a in metrics.get("compression", {}).items()},
            "layers": statistics(metrics["aux"]) if finished else {},
            "diagnostics": late,
        },
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
        means = jax.device_get(pipe.evaluate(state, own_rows(pipe.mesh, batch)))
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
    try:
        with jpipe.distributed.phase("draw the run", limit_seconds=300):
            plot.save(run.run_dir)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        message += f"cannot write the picture of the run: {reason}. "
        code = code or 3
    place = f"The log up to here is in {run.run_dir}."
    if not (run.run_dir / "log.jsonl").exists():
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
        words += ", or --config.pipeline.compute_dtype=bfloat16, which has a wider range"
    return f"{words}."


def print_help(argv: list[str]) -> int:
    """Prints commands and all options, with the values of a configuration if named."""
    config, rest = None, [word for word in argv if word not in ("--help", "-h")]
    if rest:
        try:
            config = read_command(rest).config
        except (ValueError, OSError) as error:
            print(f"train.py: {shortened(str(error))}", file=sys.stderr)
            return 2
    print(f"{__doc__}\nOptions:\n{flags.usage(TrainConfig, config)}")
    return 0


if __name__ == "__main__":
    warnings.formatwarning = lambda message, *_: f"train.py: warning: {message}\n"
    code = main(sys.argv[1:])
    ignore_interrupts()
    leave(code)
