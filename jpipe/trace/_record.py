"""Runs steps under JAX's profiler and makes a trace of them."""

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jpipe._util.foreign import shown
from jpipe.draw.gantt import headline
from jpipe.engine.calls import check_state
from jpipe.engine.state import PipelineState
from jpipe.mesh import STAGE
from jpipe.program import Program
from jpipe.trace._cells import (
    Cell,
    Clock,
    Execution,
    expected_cells,
    idle_cells,
    match,
    spans_of,
)
from jpipe.trace._places import Place, places_of
from jpipe.trace._read import Runs, runs_of
from jpipe.trace._trace import Trace

if TYPE_CHECKING:
    from jpipe.pipeline import Pipeline


class Recording:
    """What `record` yields: after its `with` block, `trace` is the trace of the steps in it."""

    def __init__(self) -> None:
        self._trace: Trace | None = None

    @property
    def trace(self) -> Trace:
        """The trace.

        Raises:
          ValueError: in the `with` block, or if it ended by an exception.
        """
        if self._trace is None:
            raise ValueError("a recording has its `trace` after the end of its `with` block.")
        return self._trace


@contextlib.contextmanager
def record(state: PipelineState) -> Iterator[Recording]:
    """Traces the steps that are run in a `with` block, from a state on.

    `Pipeline.step` waits for the end of each of these steps. On GPUs it runs a program without CUDA graphs, which is
    compiled first. `Pipeline.trace` does all this for steps of one minibatch.

    Args:
      state: the state of the first of the steps; not donated.

    Yields:
      A `Recording`, whose `trace` can be read after the block.

    Raises:
      ValueError: if another profile is being recorded, no step was run, or the profiler has lost events.

    Example:
      >>> import jax, jax.numpy as jnp, jpipe, optax
      >>> pipe = jpipe.Pipeline(
      ...     [jpipe.InitApply(lambda key, x: jnp.ones(()), lambda w, x: w * x)],
      ...     loss=lambda outputs, batch: jnp.mean(outputs),
      ...     optimizer=optax.sgd(0.1),
      ...     schedule=jpipe.schedules.gpipe(num_stages=1, num_microbatches=2),
      ... )
      >>> batch = {"inputs": jnp.ones((4, 4096))}
      >>> state = pipe.init(jax.random.key(0), batch)
      >>> with jpipe.trace.record(state) as recording:
      ...     for _ in range(2):
      ...         state, metrics = pipe.step(state, batch)
      >>> recording.trace.num_steps
      2
    """
    check_state(state)
    program = state.program
    compiled = program.lower(profiled=True).compile()
    (module,) = compiled.runtime_executable().hlo_modules()[:1]
    places = places_of(module.as_serialized_hlo_module_proto())
    jax.block_until_ready(state)
    round_, started = (int(_first(array)) for array in (state.round, state.started))
    recording, num_steps = Recording(), 0

    def after_step(outputs: Any) -> None:
        nonlocal num_steps
        jax.block_until_ready(outputs)
        num_steps += 1

    with tempfile.TemporaryDirectory() as folder, program.profiled(after_step):
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except RuntimeError as error:
            raise ValueError(f"no trace can be recorded: {error} End the other profile first.") from error
        try:
            yield recording
        finally:
            jax.profiler.stop_trace()
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
        runs = runs_of(profile, program.settings.platform, module.name)
    if not num_steps:
        raise ValueError("no step was run in the `with` block of `record`, so there is nothing to trace.")
    recording._trace = trace_of(program, runs, places, range(round_, round_ + num_steps), started)


def trace_pipeline(pipe: "Pipeline", state: PipelineState, batch: Any, num_steps: int) -> tuple[PipelineState, Trace]:
    """See `Pipeline.trace`."""
    if not hasattr(num_steps, "__index__") or num_steps < 1:
        raise ValueError(f"`num_steps` must be an integer of at least 1, got {shown(num_steps)}.")
    with record(state) as recording:
        for _ in range(num_steps):
            state, _ = pipe.step(state, batch)
    return state, recording.trace


def trace_of(
    program: Program, runs: dict[int, Runs], places: Mapping[str, Place], rounds: range, started: int
) -> Trace:
    """The trace of some steps.

    Args:
      program: the program of the steps.
      runs: number of a device in the profile -> what it has run.
      places: the places of instructions.
      rounds: the numbers of the steps.
      started: the microbatches before round 0.

    Raises:
      ValueError: if the profile does not hold the steps.
    """
    engine = program.engine
    lowered = engine.lowered
    num_ticks = lowered.schedule.num_ticks
    late = lowered.target.updates_between_ticks and not lowered.head_after_update
    spans, executions = {}, {}
    for where, ordinal in _devices(program).items():
        if ordinal not in runs or not runs[ordinal].instructions:
            raise ValueError(
                f"the profiler has recorded nothing of device {where[0]}, replica {where[1]}. "
                "On GPUs it needs CUPTI, and the right to read counters: see the page on traces."
            )
        clock = Clock(runs[ordinal], places, len(rounds), num_ticks)
        spans[where] = spans_of(clock, runs[ordinal], places, num_ticks, late)
        whole = [spans[where].whole[k] for k in range(len(rounds))]
        reported = runs[ordinal].executions
        executions[where] = reported if len(reported) == len(rounds) else whole
    origin = min(intervals[0][0] for intervals in executions.values())

    def seconds(interval: tuple[float, float]) -> tuple[float, float]:
        start, end = interval
        return (start - origin) * 1e-9, (end - origin) * 1e-9

    expected = [expected_cells(engine, round_, started) for round_ in rounds]
    cells: dict[tuple[int, int, int], list[Cell]] = {}
    for (device, replica), step, tick, name, entry, interval in match(spans, expected):
        operation = "message" if name.startswith("message") else name
        cell = Cell(device, tick, operation, *seconds(interval), entry.stage, entry.microbatch, step, replica)
        cells.setdefault((device, replica, step), []).append(cell)
    for (device, replica, step), here in cells.items():
        here += idle_cells(here, seconds(spans[device, replica].whole[step]))
    return Trace(
        cells=tuple(sorted((cell for each in cells.values() for cell in each), key=_order)),
        executions=tuple(
            Execution(device, replica, step, *seconds(interval))
            for (device, replica), intervals in executions.items()
            for step, interval in enumerate(intervals)
        ),
        table_bubble=program.settings.schedule.facts().bubble,
        title=headline(program.settings.schedule),
        platform=program.settings.platform,
    )


def _order(cell: Cell) -> tuple:
    return cell.step, cell.device, cell.replica, cell.start_seconds, cell.end_seconds


def _first(array: jax.Array) -> Any:
    """The first number of an array that is the same on all devices."""
    return np.asarray(array.addressable_shards[0].data).reshape(-1)[0]


def _devices(program: Program) -> dict[tuple[int, int], int]:
    """Device and replica of each device of this process -> its number in the profile."""
    on_cpu = program.settings.platform == "cpu"
    mesh = program.settings.mesh
    by_stage = np.moveaxis(mesh.devices, mesh.axis_names.index(STAGE), 0).reshape(mesh.shape[STAGE], -1).tolist()
    return {
        (d, r): device.id if on_cpu else device.local_hardware_id
        for d, devices in enumerate(by_stage)
        for r, device in enumerate(devices)
        if device.process_index == jax.process_index()
    }
