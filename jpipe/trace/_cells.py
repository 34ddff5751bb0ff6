"""The cells of a trace: which run of which instruction is which cell of the table, and when it began and ended.

Letters: T ticks, D devices.
"""

import bisect
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jpipe.engine.scopes import message_text
from jpipe.engine.training import TrainingPass
from jpipe.lowering.scalars import OF_COLUMNS, UPDATE
from jpipe.trace._places import Key, Place
from jpipe.trace._read import Interval, Run, Runs

NOT_WORK = ("update", "message", "idle")
"""The operations of cells that are no work of the table."""


class Cell(NamedTuple):
    """What a device has done from one time to another.

    Attributes:
      device: the device, as a position along the axis "stage" of the mesh.
      tick: the row of the table; of a message that in which it travels, of "idle" that of the cell after it.
      operation: "forward", "backward" (with split weight gradients the gradient of the inputs), "weight_grad",
        "update", "message", "idle"; with copies of stages "commit"; with layers that all devices run together "embed",
        "head" and "embed_backward".
      start_seconds, end_seconds: times since the first traced step began.
      stage: the stage; None for messages, idle time, and an update of several stages.
      microbatch: as in the table: that of the minibatch of this step, negative of an earlier one; None if the cell is
        for no single one.
      step: the step, counted from the first that is traced.
      replica: the replica of the pipeline, and with other axes of the mesh the part of the stage: the position of the
        device among those of its stage.
    """

    device: int
    tick: int
    operation: str
    start_seconds: float
    end_seconds: float
    stage: int | None = None
    microbatch: int | None = None
    step: int = 0
    replica: int = 0

    @property
    def seconds(self) -> float:
        """The length of the cell."""
        return self.end_seconds - self.start_seconds


class Execution(NamedTuple):
    """One step on one device, as the runtime reports it: from the start of the compiled program to its end.

    Attributes:
      device, replica, step: as in `Cell`.
      start_seconds, end_seconds: times since the first traced step began.
    """

    device: int
    replica: int
    step: int
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        """The length of the step."""
        return self.end_seconds - self.start_seconds


class Entry(NamedTuple):
    """What the table says of an operation of a device in a tick; stage and microbatch are None if it is for several."""

    stage: int | None
    microbatch: int | None


Expected = Mapping[tuple[int, int, str, int], Entry]
"""(device, tick, operation, lane) -> what the table says."""


def expected_cells(engine: TrainingPass, round_: int, started: int) -> Expected:
    """The cells of one step: all operations, updates and messages of the table, but those of microbatches that have not
    entered the pipe.

    Args:
      engine: the pass.
      round_: the number of the step, of `PipelineState.round`.
      started: the microbatches before round 0, of `PipelineState.started`.
    """
    lowered, table = engine.lowered, engine.scalars
    N = lowered.schedule.num_microbatches
    rows = table.rows()
    expected: dict[tuple[int, int, str, int], Entry] = {}
    updated: dict[tuple[int, int], set[int]] = {}
    for d in range(lowered.schedule.num_devices):
        values = np.asarray(table.with_round(rows[d], round_, started, (round_ + 1) * N, N))
        for name, operations in lowered.operations.items():
            if name == "commit" and not engine.commits:
                continue
            for lane in range(operations.num_lanes):
                for t in np.flatnonzero(values[:, table.index[name, lane, "program"]] >= 0).tolist():
                    stage = int(operations.stage[t, d, lane]) if name in OF_COLUMNS else None
                    if name.startswith(UPDATE):
                        updated.setdefault((d, t), set()).update(() if stage is None else (stage,))
                        continue
                    microbatch = None if name == "commit" else int(operations.microbatch[t, d, lane])
                    expected[d, t, name, lane] = Entry(stage, microbatch)
    for (d, t), stages in updated.items():
        expected[d, t, UPDATE, 0] = Entry(min(stages) if len(stages) == 1 else None, None)
    for number, channel in enumerate(lowered.channels):
        taking_part = set(itertools.chain(*channel.pairs)) if channel.pairs else set()
        sends = np.roll(channel.sends, 1) if channel.late else channel.sends
        for t, d in itertools.product(np.flatnonzero(sends).tolist(), taking_part):
            expected[d, t, message_text(number), 0] = Entry(None, None)
    return expected


class Clock:
    """The step and the tick of every run of an instruction, on one device.

    Args:
      runs: what the device has run.
      places: the places of instructions.
      num_steps: the number of steps.
      num_ticks: T.

    Raises:
      ValueError: if the runs are not those of whole steps.
    """

    def __init__(self, runs: Runs, places: Mapping[str, Place], num_steps: int, num_ticks: int):
        self._places, self._num_ticks = places, num_ticks
        starts: dict[str, list[float]] = {}
        for run in runs.instructions:
            if run.name in places:
                starts.setdefault(run.name, []).append(run.start)
        self._starts: dict[str, list[float]] = {}
        self._anchors: dict[range | None, list[tuple[int, str]]] = {}
        self._missing: list[str] = []
        for name, times in starts.items():
            place = places[name]
            if place.statement != name:
                continue
            wanted = num_steps * (1 if place.loop is None else len(place.loop))
            if len(times) % wanted:
                self._missing.append(f"{name}: {len(times)} of {wanted}")
                continue
            self._starts[name] = times[:: len(times) // wanted]  # an instruction may start several kernels
            self._anchors.setdefault(place.loop, []).append((place.position, name))
        for anchors in self._anchors.values():
            anchors.sort()

    def at(self, run: Run) -> tuple[int, int | None]:
        """The step of a run, and its tick, or None if it is outside of the loops."""
        place = self._places[run.name]
        count = self._count(place, run)
        if place.loop is None:
            return count, None
        step, tick = divmod(count, len(place.loop))
        return step, place.loop.start + tick

    def _count(self, place: Place, run: Run) -> int:
        """How many runs of the statement of a run came before."""
        if place.statement in self._starts:
            return bisect.bisect_right(self._starts[place.statement], run.start) - 1
        # Conditionals and loops have no events on GPUs: the instructions around them tell.
        anchors = self._anchors.get(place.loop, [])
        at = bisect.bisect_left(anchors, (place.position, ""))
        if at:
            return bisect.bisect_right(self._starts[anchors[at - 1][1]], run.start) - 1
        if at < len(anchors):
            return bisect.bisect_left(self._starts[anchors[at][1]], run.start)
        raise ValueError(
            f"the profiler has recorded `{run.name}` and no instruction that runs once in every tick"
            + (f" ({'; '.join(self._missing[:3])})" if self._missing else "")
            + ". It drops events if its memory is full: trace fewer steps."
        )


class Spans(NamedTuple):
    """What a device has done in each step and tick.

    Attributes:
      ran: (step, tick, key) -> whether the branch of the operation has run, and when.
      whole: step -> first start and last end of all instructions.
    """

    ran: dict[tuple[int, int, Key], Interval]
    whole: dict[int, Interval]


def spans_of(clock: Clock, runs: Runs, places: Mapping[str, Place], num_ticks: int, late: bool) -> Spans:
    """When a device has run each operation of each tick.

    Args:
      clock: the clock of the device.
      runs: what it has run.
      places: the places of instructions.
      num_ticks: T.
      late: whether a tick begins with the update of the tick before.
    """
    spans: dict[tuple[int, int, Key], Interval] = {}
    ran: set[tuple[int, int, Key]] = set()
    whole: dict[int, Interval] = {}
    for run in runs.instructions:
        place = places.get(run.name)
        if place is None:
            continue
        step, tick = clock.at(run)
        whole[step] = _hull(whole.get(step), run)
        key = place.key
        if key is None or not place.counts:
            continue
        if key.operation == "update" and late:
            tick = num_ticks - 1 if tick is None else tick - 1
        if tick is None:
            continue
        spans[step, tick, key] = _hull(spans.get((step, tick, key)), run)
        if place.runs:
            ran.add((step, tick, key))
    return Spans({at: spans[at] for at in ran}, whole)


def _hull(interval: Interval | None, run: Run) -> Interval:
    if interval is None:
        return run.start, run.end
    return min(interval[0], run.start), max(interval[1], run.end)


def match(
    spans: Mapping[tuple[int, int], Spans],
    expected: Sequence[Expected],
) -> list[tuple[tuple[int, int], int, int, str, Entry, Interval]]:
    """Each cell of the table with the time at which it ran: (device, replica), step, tick, operation, entry, interval.

    All devices enter a message, an update, or a layer that they run together at once: it begins when the last of them
    has come.

    Args:
      spans: (device, replica) -> what it has done.
      expected: the table of each step.

    Raises:
      ValueError: if devices have run other operations than the table says, because the profiler has lost events.
    """
    matched = []
    entered: dict[tuple[int, int, int, str], float] = {}
    for (_, replica), done in spans.items():
        for (step, tick, key), (start, _) in done.ran.items():
            together = replica, step, tick, key.operation
            entered[together] = max(start, entered.get(together, start))
    for (device, replica), done in spans.items():
        times = {(step, tick, *key): interval for (step, tick, key), interval in done.ran.items()}
        for step, table in enumerate(expected):
            wanted = {at[1:]: entry for at, entry in table.items() if at[0] == device}
            _check(wanted, times, (device, step))
            for (tick, operation, lane), entry in wanted.items():
                start, end = times[step, tick, operation, lane]
                if _is_entered_together(operation):
                    start = min(end, entered[replica, step, tick, operation])
                matched.append(((device, replica), step, tick, operation, entry, (start, end)))
    return matched


def _is_entered_together(operation: str) -> bool:
    """Returns whether all devices run an operation in the same tick: updates, messages, and layers that they share."""
    return operation == UPDATE or operation not in OF_COLUMNS


def _check(
    wanted: Collection[tuple[int, str, int]],
    times: Collection[tuple[int, int, str, int]],
    where: tuple[int, int],
) -> None:
    """Compares the ticks, operations and lanes that have run in a step with those of the table.

    Raises:
      ValueError: if they differ.
    """
    device, step = where
    ran = {at[1:] for at in times if at[0] == step}
    missing = sorted(at for at in wanted if at not in ran)
    others = sorted(at for at in ran if at not in wanted and not _is_entered_together(at[1]))
    for words, cells in (("lacks", missing), ("has, beside the table,", others)):
        if cells:
            tick, operation, _ = cells[0]
            raise ValueError(
                f"the profile {words} {operation} in tick {tick} of device {device}, step {step}, and {len(cells) - 1} "
                "more cells. The profiler drops events if its memory is full: trace fewer steps, or a schedule with "
                "fewer microbatches. XLA for CPUs runs a loop over few bytes as one instruction: trace a larger model."
            )


def idle_cells(cells: Iterable[Cell], whole: Interval) -> list[Cell]:
    """The times between the cells of a device in a step, in which it waits or moves the loop on.

    Args:
      cells: the other cells of the device in the step, at least one.
      whole: from the first instruction to the last, in seconds.
    """
    idle, (at, last) = [], whole
    ordered = sorted(cells, key=lambda cell: cell.start_seconds)
    for cell in ordered:
        if cell.start_seconds > at:
            idle.append(cell._replace(operation="idle", start_seconds=at, end_seconds=cell.start_seconds))
        at = max(at, cell.end_seconds)
    if last > at:
        idle.append(ordered[-1]._replace(operation="idle", start_seconds=at, end_seconds=last))
    return [cell._replace(stage=None, microbatch=None) for cell in idle]
