"""What a table takes in time: in lockstep, tick by tick, or with every device as early as its inputs allow."""

import dataclasses
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from jpipe.schedule import IDLE, Schedule

_KINDS = ("forward", "backward", "weight_grad")


@dataclasses.dataclass(frozen=True)
class Costs:
    """What the operations of one microbatch take, in any unit of time.

    Attributes:
      forward: of a stage's forward; a number, or `[S]`, one for each stage.
      backward: of its input gradient, the same.
      weight_grad: of its weight gradient, the same. A table that does not split it has
        both in one operation, whose input gradient leaves at the end.
      transfer: from the end of an operation until another device can read its output.

    Raises:
      ValueError: if one of them is negative or not a number.
    """

    forward: ArrayLike = 1.0
    backward: ArrayLike = 1.0
    weight_grad: ArrayLike = 1.0
    transfer: float = 0.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = np.asarray(getattr(self, field.name))
            if value.dtype.kind not in "iuf" or not (value >= 0).all():
                raise ValueError(
                    f"`{field.name}` must be at least 0, got {getattr(self, field.name)}: it is a time. Pass seconds, "
                    "or multiples of one forward."
                )

    def of_stages(self, num_stages: int) -> dict[str, np.ndarray]:
        """Kind of operation -> `[S]`, the time it takes on each stage.

        Raises:
          ValueError: if there is a number for each stage of another count of stages.
        """
        costs = {}
        for kind in _KINDS:
            value = np.asarray(getattr(self, kind), float)
            if value.ndim and value.shape != (num_stages,):
                raise ValueError(
                    f"`{kind}` must be a number or one for each of the {num_stages} stages, got shape {value.shape}."
                )
            costs[kind] = np.broadcast_to(value, num_stages)
        return costs


@dataclasses.dataclass(frozen=True, eq=False)
class Timing:
    """When everything runs. D devices; N microbatches, C columns.

    Attributes:
      makespan: of a minibatch; of a round that repeats, where the table is asynchronous.
      busy: `[D]`, the time that each device computes in it.
      span: `[D]`, from the start of a device's first operation to the end of its last; in
        an asynchronous table the makespan.
      start: kind of operation -> `[N, C]`, when each starts; NaN where there is none.
        Those of an asynchronous table are of a later round, counted from its start.
      end: the same for when each ends.
    """

    makespan: float
    busy: np.ndarray
    span: np.ndarray
    start: dict[str, np.ndarray]
    end: dict[str, np.ndarray]

    @property
    def bubble(self) -> float:
        """The idle part of all devices' time."""
        return float(1 - self.busy.sum() / (len(self.busy) * self.makespan))

    @property
    def inner_bubble(self) -> float:
        """The idle part between each device's first and last operation.

        What is left where the next step's first operations fill the gaps at both ends.
        """
        return float(1 - self.busy.sum() / self.span.sum())


def simulate(
    schedule: Schedule,
    costs: Costs = Costs(),
    mode: Literal["lockstep", "dependencies"] = "lockstep",
) -> Timing:
    """Prices a table.

    Args:
      schedule: a legal table.
      costs: of its operations.
      mode: "lockstep", as one program for all devices runs it: a tick lasts as long as its
        busiest device, and a tick's messages must have arrived before the next begins. Or
        "dependencies": every device runs the operations of its columns in the table's
        order, each as soon as the one before has ended and its inputs have arrived, as
        programs of their own would.

    Returns:
      A `Timing`.

    Raises:
      ValueError: if the table is not legal, or `mode` or the costs do not fit.

    Example: GPipe, 4 stages, 8 microbatches
      >>> from jpipe.schedules import gpipe
      >>> timing = simulate(gpipe(4, 8))
      >>> timing.makespan, round(timing.bubble, 4)
      (33.0, 0.2727)
    """
    schedule.check()
    if mode not in ("lockstep", "dependencies"):
        raise ValueError(
            f'`mode` must be "lockstep" or "dependencies", got {mode!r}: see `simulate`.'
        )
    of_stages = costs.of_stages(schedule.num_stages)
    length = {kind: cost[schedule.stage] for kind, cost in of_stages.items()}
    if not schedule.splits_backward:
        length["backward"] = length["backward"] + length["weight_grad"]
    run = _lockstep if mode == "lockstep" else _dependencies
    return run(schedule, length, costs.transfer)


def _ticks(schedule: Schedule) -> dict[str, np.ndarray]:
    """Kind -> `[N, C]`, absolute tick of each operation, of the kinds that the table has."""
    kinds = {"forward": schedule.forward_ticks()}
    if not schedule.forward_only:
        kinds["backward"] = schedule.backward_ticks()
    if schedule.splits_backward:
        kinds["weight_grad"] = schedule.weight_grad_ticks()
    return kinds


def _busy(schedule: Schedule, length: dict[str, np.ndarray]) -> np.ndarray:
    """`[D]`, a device's work in one minibatch."""
    of_column = sum(length[kind] for kind in _ticks(schedule))
    return schedule.num_microbatches * np.bincount(
        schedule.device, of_column, schedule.num_devices
    )


def _timing(schedule, length, makespan, start) -> Timing:
    end = {kind: at + length[kind] for kind, at in start.items()}
    span = np.full(schedule.num_devices, makespan, float)
    if schedule.synchronous:
        for d in range(schedule.num_devices):
            mine = schedule.device == d
            first = min(np.nanmin(at[:, mine]) for at in start.values())
            span[d] = max(np.nanmax(at[:, mine]) for at in end.values()) - first
    return Timing(float(makespan), _busy(schedule, length), span, start, end)


def _lockstep(schedule: Schedule, length: dict, transfer: float) -> Timing:
    T, D = schedule.num_ticks, schedule.num_devices
    work = np.zeros((T, D))
    sends = np.zeros(T, bool)
    begins = {}
    for kind in _ticks(schedule):
        runs = getattr(schedule, kind) != IDLE
        begins[kind] = work[:, schedule.device].copy()
        np.add.at(work, (slice(None), schedule.device), runs * length[kind])
        if kind != "weight_grad":
            sends |= (runs & _leaves(schedule, kind)).any(axis=1)
    tick_length = work.max(axis=1) + transfer * sends
    tick_start = np.concatenate([[0.0], np.cumsum(tick_length)])
    makespan = tick_start[-1]
    start = {}
    for kind, ticks in _ticks(schedule).items():
        rounds, t = np.divmod(ticks, T)
        within = np.take_along_axis(begins[kind], t, axis=0)
        start[kind] = rounds * makespan + tick_start[t] + within
    return _timing(schedule, length, makespan, start)


def _leaves(schedule: Schedule, kind: str) -> np.ndarray:
    """bool `[C]`: whether what an operation makes goes to another device."""
    device_of_stage = np.empty(schedule.num_stages, int)
    device_of_stage[schedule.stage] = schedule.device
    other = schedule.stage + (1 if kind == "forward" else -1)
    there = (0 <= other) & (other < schedule.num_stages)
    other = np.clip(other, 0, schedule.num_stages - 1)
    return there & (device_of_stage[other] != schedule.device)


def _dependencies(schedule: Schedule, length: dict, transfer: float) -> Timing:
    S, N, T = schedule.num_stages, schedule.num_microbatches, schedule.num_ticks
    ticks = _ticks(schedule)
    # An asynchronous table is run from an empty pipeline for much longer than a
    # microbatch is on its way. The later half of it is the steady state.
    num_rounds = half = 1
    if not schedule.synchronous:
        half = 4 * max(int(at.max()) // T + 1 for at in ticks.values())
        num_rounds = 2 * half
    columns = np.argsort(schedule.stage)  # of each stage
    order = sorted(
        (int(at[m, c]) + r * T, k, int(c), m + r * N)
        for k, (kind, at) in enumerate(ticks.items())
        for m, c in np.argwhere(at != IDLE).tolist()
        for r in range(num_rounds)
    )
    kinds = list(ticks)
    start = {kind: np.full((num_rounds * N, len(columns)), np.nan) for kind in kinds}
    end = {kind: at.copy() for kind, at in start.items()}
    free = np.zeros(schedule.num_devices)
    for _, k, c, m in order:  # whatever one waits for stands before it
        kind, s, device = kinds[k], int(schedule.stage[c]), schedule.device[c]
        inputs = [0.0]
        if kind == "forward" and s > 0:
            inputs.append(_arrival(schedule, end[kind], m, columns[s - 1], c, transfer))
        elif kind == "backward":
            inputs.append(end["forward"][m, c])
            if s < S - 1:
                source = columns[s + 1]
                inputs.append(_arrival(schedule, end[kind], m, source, c, transfer))
        elif kind == "weight_grad":
            inputs.append(end["backward"][m, c])
        start[kind][m, c] = max(free[device], *inputs)
        end[kind][m, c] = free[device] = start[kind][m, c] + length[kind][c]
    if schedule.synchronous:
        return _timing(schedule, length, free.max(), start)
    later = max(at[-N:].max() for at in end.values())
    middle = max(at[half * N - N : half * N].max() for at in end.values())
    makespan = max((later - middle) / half, _busy(schedule, length).max())
    offset = start["forward"][-N:, columns[0]].min()
    return _timing(
        schedule, length, makespan, {k: at[-N:] - offset for k, at in start.items()}
    )


def _arrival(schedule, end, m, source, c, transfer) -> float:
    """When column c can read what column `source` made of microbatch m."""
    away = schedule.device[source] != schedule.device[c]
    return end[m, source] + transfer * away
