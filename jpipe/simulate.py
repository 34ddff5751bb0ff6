"""Simulates a table: in lockstep, tick by tick, or with each device as early as its inputs allow.

Letters: S stages, s a stage; D devices, d a device; C columns, c a column; N microbatches,
m a microbatch; T ticks, t a tick.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from jpipe._util.foreign import shown
from jpipe.schedule import IDLE, Schedule

__all__ = ["Costs", "Timing", "simulate"]

_KINDS = ("forward", "backward", "weight_grad")
TRANSFERS = {"forward": "transfer", "backward": "gradient_transfer"}
"""Kind of operation -> the name of the cost of its message."""

# A cost that is None is the sum of these costs.
_SUM_OF = {
    "fused_backward": ("backward", "weight_grad"),
    "gradient_transfer": ("transfer",),
    "gradient_exchange": ("exchange",),
}

_EXCHANGES = {"forward": "exchange", "backward": "gradient_exchange", "weight_grad": "weight_exchange"}
"""Kind of operation -> the name of the cost of the collectives in its layers."""

_SUMS = {"forward": "sums", "backward": "gradient_sums", "weight_grad": "weight_sums"}
"""The same for the collectives that compute never hides."""

_COLLECTIVES = (*_EXCHANGES.values(), *_SUMS.values())


@dataclasses.dataclass(frozen=True)
class Costs:
    """Times of the operations of one microbatch, in any one unit.

    A time is a number, or `[S]`, one per stage.

    Attributes:
      forward: time of a stage's forward.
      backward: time of a stage's input gradient.
      weight_grad: time of a stage's weight gradient. In a table that does not split backwards,
        one operation computes both gradients and sends the input gradient at its end.
      transfer: time from the end of a forward until the device of the next stage can read the
        output. `[S]`: entry s is the message from stage s to stage s + 1.
      gradient_transfer: time from the end of a backward until the device of the stage before
        can read the gradient. `[S]`: entry s is the message from stage s + 1 to stage s.
        None: the same as `transfer`.
      fused_backward: time of both gradients in one operation. None: the sum of `backward` and
        `weight_grad`.
      exchange: time of the collectives in the layers of a stage, such as the all-to-alls of
        experts, in a forward, beside its compute. They pass while the device computes for another
        microbatch in the same tick; for the rest of them it waits. Lockstep only.
      gradient_exchange: the same in an input gradient, or in a backward that is not split. None: the same as
        `exchange`.
      weight_exchange: the same in a weight gradient of a split backward.
      sums, gradient_sums, weight_sums: the same for collectives that the device always waits for, such as sums of
        gradients on a TPU.
      overlaps: whether exchanges pass while the device computes, as above. If not, it waits for all of them.
      update: time of a stage's optimizer, once per minibatch, with the sum over its copies.
      tick: time that devices lose by waiting for each other, per tick that sends messages,
        and once more per tick that updates. Lockstep only.
      jitter: fraction by which a tick is longer if several devices compute in it: their
        times vary from run to run, and all wait for the slowest. Lockstep only.
      num_cores: number of cores that all devices share, as simulated devices of a CPU do.
        All times are then of one core. None: every device has its own. Lockstep only.
      cores_per_device: the most cores that one device can use at a time.

    Raises:
      ValueError: if a cost is negative or not a number.
    """

    forward: ArrayLike = 1.0
    backward: ArrayLike = 1.0
    weight_grad: ArrayLike = 1.0
    transfer: ArrayLike = 0.0
    gradient_transfer: ArrayLike | None = None
    fused_backward: ArrayLike | None = None
    exchange: ArrayLike = 0.0
    gradient_exchange: ArrayLike | None = None
    weight_exchange: ArrayLike = 0.0
    sums: ArrayLike = 0.0
    gradient_sums: ArrayLike = 0.0
    weight_sums: ArrayLike = 0.0
    overlaps: bool = True
    update: ArrayLike = 0.0
    tick: float = 0.0
    jitter: float = 0.0
    num_cores: float | None = None
    cores_per_device: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            cost = getattr(self, field.name)
            if field.name == "overlaps" or (cost is None and field.default is None):
                continue
            value = np.asarray(cost)
            is_fraction = field.name == "jitter"
            fits = value.dtype.kind in "iuf" and (value >= 0).all()
            if not fits or (is_fraction and np.isinf(value)):
                if is_fraction:
                    raise ValueError(
                        f"`jitter` must be a fraction of a tick, at least 0, got {shown(cost)}: "
                        "0.05 makes a tick 5% longer."
                    )
                raise ValueError(
                    f"`{field.name}` must be at least 0, got {shown(cost)}: it is a time. Pass "
                    "seconds, or multiples of one forward."
                )
        for name in ("num_cores", "cores_per_device"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"`{name}` must be above 0, got {getattr(self, name)}: nothing would run.")

    def of_stages(self, num_stages: int) -> dict[str, np.ndarray]:
        """Name of a cost -> `[S]`, the time on each stage, with no cost left None.

        Raises:
          ValueError: if a cost is an array for another number of stages.
        """
        costs: dict[str, np.ndarray] = {}
        for name in (*_KINDS, "fused_backward", *_COLLECTIVES, "update", *TRANSFERS.values()):
            cost = getattr(self, name)
            if cost is None:
                costs[name] = np.sum([costs[part] for part in _SUM_OF[name]], axis=0)
                continue
            value = np.asarray(cost, float)
            if value.ndim and value.shape != (num_stages,):
                raise ValueError(
                    f"`{name}` must be a number or one for each of the {num_stages} stages, got shape {value.shape}."
                )
            costs[name] = np.broadcast_to(value, num_stages)
        return costs


@dataclasses.dataclass(frozen=True, eq=False)
class Timing:
    """The time of every operation of a table.

    Attributes:
      makespan: the time of a minibatch. In an asynchronous table, of a round of the steady state.
      busy: `[D]`, the time that each device computes. With shared cores, the time that its
        work takes on one core.
      transfer: `[D]`, the time of the messages that each device sends. In lockstep all
        devices wait for the messages of a tick; otherwise messages travel while devices
        compute.
      span: `[D]`, the time from the start of a device's first operation to the end of its last. In
        an asynchronous table, the makespan.
      start: kind of operation -> `[N, C]`, when each operation starts; NaN if the table
        has no such operation. For an asynchronous table these are times of a later round,
        counted from its start.
      end: kind of operation -> `[N, C]`, when each operation ends.
      num_processors: the number of devices that can compute at full speed at a time: D, or fewer if
        they share cores.
      exchange: `[D]`, the time of the collectives in the layers of each device.
      exposed: `[D]`, the part of it in which the device waits, because it computes nothing else. Nonzero only in
        lockstep.
      communicating: the part of the makespan in which all devices wait for messages.
        Nonzero only in lockstep.
    """

    makespan: float
    busy: np.ndarray
    transfer: np.ndarray
    span: np.ndarray
    start: dict[str, np.ndarray]
    end: dict[str, np.ndarray]
    num_processors: float
    exchange: np.ndarray
    exposed: np.ndarray
    communicating: float = 0.0

    @property
    def idle(self) -> np.ndarray:
        """`[D]`, the makespan without the time that each device computes."""
        return self.makespan - self.busy

    @property
    def bubble(self) -> float:
        """The idle fraction of all processors' time."""
        return float(1 - self.busy.sum() / (self.num_processors * self.makespan))

    @property
    def inner_bubble(self) -> float:
        """The idle fraction between each device's first and last operation.

        It remains if the next step fills the gaps at both ends.
        """
        return float(1 - self.busy.sum() / self.span.sum())


def simulate(
    schedule: Schedule,
    costs: Costs = Costs(),
    mode: Literal["lockstep", "dependencies"] = "lockstep",
) -> Timing:
    """Simulates a table under given costs.

    Args:
      schedule: a legal table.
      costs: the costs of its operations.
      mode: "lockstep" or "dependencies".

        - "lockstep" is one program on all devices, as this library runs it. A tick lasts
          as long as its busiest device, and the next tick starts when all messages have
          arrived. Those that take several ticks (`Schedule.message_ticks`) travel in the next
          tick, beside its compute, and have arrived when it ends. A stage's device sends and
          receives messages of one tick one after the other. Updates wait until all devices
          have computed, because they use the norm of all gradients. Devices that share cores
          share them equally while they compute.
        - "dependencies" is one program per device. A device runs the operations of its
          columns in the table's order. Each starts when the one before has ended and its
          inputs have arrived.

    Returns:
      A `Timing`.

    Raises:
      ValueError: if the table is not legal, or `mode` or the costs do not fit.

    Example:
      GPipe with 4 stages and 8 microbatches.

      >>> from jpipe.schedules import gpipe
      >>> timing = simulate(gpipe(4, 8))
      >>> timing.makespan, round(timing.bubble, 4)
      (33.0, 0.2727)
    """
    schedule.check()
    if mode not in ("lockstep", "dependencies"):
        raise ValueError(
            f'`mode` must be "lockstep" or "dependencies", got {shown(mode)}: the first is one '
            "program on all devices, the second one program per device."
        )
    stage_costs = costs.of_stages(schedule.num_stages)
    exchanges = any(stage_costs[name].any() for name in _COLLECTIVES)
    if mode == "dependencies" and any((costs.num_cores, costs.tick, costs.jitter, exchanges)):
        raise ValueError(
            "`num_cores`, `tick`, `jitter`, `exchange` and `sums` are costs of devices in lockstep, got "
            'mode="dependencies". Use mode="lockstep".'
        )
    if not schedule.splits_backward:
        stage_costs["backward"] = stage_costs["fused_backward"]
    length = {name: cost if name in TRANSFERS.values() else cost[schedule.stage] for name, cost in stage_costs.items()}
    run = _lockstep if mode == "lockstep" else _dependencies
    return run(schedule, length, costs)


def _ticks(schedule: Schedule) -> dict[str, np.ndarray]:
    """Kind -> `[N, C]`, absolute tick of each operation, for the kinds in the table."""
    kinds = {"forward": schedule.forward_ticks()}
    if not schedule.forward_only:
        kinds["backward"] = schedule.backward_ticks()
    if schedule.splits_backward:
        kinds["weight_grad"] = schedule.weight_grad_ticks()
    return kinds


def _timing(
    schedule: Schedule,
    length: Any,
    costs: Costs,
    makespan: float,
    start: Any,
    end: Any,
) -> Timing:
    """A `Timing` from the makespan and the times of all operations."""
    D = schedule.num_devices
    span = np.full(D, makespan, float)
    if schedule.synchronous:
        for d in range(D):
            on_device = schedule.device == d
            first = min(np.nanmin(times[:, on_device]) for times in start.values())
            last = max(np.nanmax(times[:, on_device]) for times in end.values())
            span[d] = last - first
    updates = _updates(schedule).sum(axis=0)
    in_column = (schedule.forward != IDLE).sum(axis=0)
    busy = in_column * sum(length[kind] for kind in start) + updates * length["update"]
    sent = sum(_message(schedule, kind, length).sum(axis=0) for kind in start if kind in TRANSFERS)
    cores = costs.num_cores
    return Timing(
        float(makespan),
        np.bincount(schedule.device, busy, D),
        np.bincount(schedule.device, sent, D),
        span,
        start,
        end,
        D if cores is None else min(D * costs.cores_per_device, cores),
        exchange=np.bincount(
            schedule.device, in_column * sum(length[_EXCHANGES[kind]] + length[_SUMS[kind]] for kind in start), D
        ),
        exposed=np.zeros(D),
    )


def _message(schedule: Schedule, kind: str, length: dict) -> np.ndarray:
    """`[N, C]`, the time of the message of a microbatch; 0 if the column sends none."""
    between = length[TRANSFERS[kind]][schedule.stage - (kind == "backward")]
    return np.where(_leaves(schedule, kind), between, 0.0)


def _updates(schedule: Schedule) -> np.ndarray:
    """bool `[T, C]`, the updates; of several columns of a copy, in the first."""
    updates = schedule.update != IDLE
    first = [c for c, *_ in itertools.chain(*schedule.columns_of_copies)]
    others = np.isin(np.arange(schedule.num_columns), first, invert=True)
    return updates & ~others


def _lockstep(schedule: Schedule, length: dict, costs: Costs) -> Timing:
    """Tick after tick: compute, then messages, then updates."""
    T, D = schedule.num_ticks, schedule.num_devices
    work, updates = np.zeros((2, T, D))
    transfer, crossing = np.zeros((2, T))
    sends = np.zeros(T, bool)
    begins = {}
    # NumPy's type of `add.at` does not know tuples.
    every_device: Any = (slice(None), schedule.device)
    for kind in _ticks(schedule):
        runs = getattr(schedule, kind) != IDLE
        begins[kind] = work[:, schedule.device].copy()
        np.add.at(work, every_device, runs * length[kind])
        if kind in TRANSFERS:
            sent, longest = _transfers(schedule, kind, length)
            sends |= sent.any(axis=0)
            transfer, crossing = np.maximum((transfer, crossing), longest)
    updating = _updates(schedule)
    np.add.at(updates, every_device, updating * length["update"])
    waits = sends + (updating.any(axis=1) & (D > 1)).astype(int)
    transfer += costs.tick * waits
    clock, clock_of_updates = _clock(work, costs), _clock(updates, costs)
    tick_length = np.zeros(T)
    exposed = np.zeros((T, D))
    if any(length[name].any() for name in _COLLECTIVES):
        exposed = _exposed(schedule, length, costs.overlaps)
        transfer += (work + exposed).max(axis=1) - work.max(axis=1)
    for clock_of, amount in ((clock, work), (clock_of_updates, updates)):
        computing = clock_of(np.arange(T), amount.max(axis=1))
        tick_length += computing
        transfer += costs.jitter * computing * ((amount > 0).sum(axis=1) > 1)
    transfer = np.maximum(transfer, crossing - tick_length)
    tick_length += transfer
    tick_start = np.concatenate([[0.0], np.cumsum(tick_length)])
    makespan = tick_start[-1]
    start, end = {}, {}
    for kind, ticks in _ticks(schedule).items():
        rounds, t = np.divmod(ticks, T)
        before = np.take_along_axis(begins[kind], t, axis=0)
        tick = rounds * makespan + tick_start[t]
        start[kind] = tick + clock(t, before)
        end[kind] = tick + clock(t, before + length[kind])
        if schedule.has_copies:  # another column of the stage runs the microbatch
            for times in (start[kind], end[kind]):
                times[ticks == IDLE] = np.nan
    timing = _timing(schedule, length, costs, makespan, start, end)
    return dataclasses.replace(timing, communicating=float(transfer.sum()), exposed=exposed.sum(axis=0))


def _exposed(schedule: Schedule, length: dict, overlaps: bool) -> np.ndarray:
    """`[T, D]`, the time that a device waits for the collectives of its layers.

    Those of one pass lie under what the device computes in the other pass, if that is of another microbatch or stage,
    and if the devices overlap them at all.
    """
    shape = schedule.num_ticks, schedule.num_devices
    compute = {name: np.zeros(shape) for name in ("forward", "backward")}
    exchange = {name: np.zeros(shape) for name in compute}
    sums = np.zeros(shape)
    depends = np.full(shape, not overlaps)
    for kind in _ticks(schedule):
        runs = getattr(schedule, kind) != IDLE
        name = "forward" if kind == "forward" else "backward"
        for t, c in np.argwhere(runs).tolist():
            d = schedule.device[c]
            compute[name][t, d] += length[kind][c]
            exchange[name][t, d] += length[_EXCHANGES[kind]][c]
            sums[t, d] += length[_SUMS[kind]][c]
            depends[t, d] |= kind == "backward" and schedule.forward[t, c] == schedule.backward[t, c]
    covered = {name: np.where(depends, 0.0, compute[other]) for name, other in zip(compute, reversed(compute))}
    return np.maximum([exchange[name] - covered[name] for name in compute], 0.0).sum(axis=0) + sums


def _clock(work: np.ndarray, costs: Costs) -> Callable:
    """A function `(ticks, amounts of work) -> time from the tick's start until they are done`.

    Devices that share cores compute at the same speed, so the least busy device finishes
    first, and the others then share its cores. The speed of all is therefore a step
    function of the work done.

    Args:
      work: `[T, D]`, the work of every device in every tick, in time on one core.
      costs: the number of cores.
    """
    T, D = work.shape
    if costs.num_cores is None:
        steps, speed = work.max(axis=1, keepdims=True), np.ones(1)
    else:
        steps, still_busy = np.sort(work, axis=1), np.arange(D, 0, -1)
        speed = np.minimum(costs.cores_per_device, costs.num_cores / still_busy)
    steps = np.concatenate([np.zeros((T, 1)), steps], axis=1)

    def clock(t: np.ndarray, amount: np.ndarray) -> np.ndarray:
        at_each_speed = np.clip(amount[..., None] - steps[t, :-1], 0, np.diff(steps)[t])
        return (at_each_speed / speed).sum(axis=-1)

    return clock


def _transfers(schedule: Schedule, kind: str, length: dict) -> tuple[np.ndarray, np.ndarray]:
    """`[2, T]`: whether messages travel in a tick, and the time until all have arrived.

    First those that leave when all devices have computed, then those that left when the tick began. The messages that a
    copy of a stage sends or receives in one tick follow each other.
    """
    T, N = schedule.num_ticks, schedule.num_microbatches
    message, leaves = _message(schedule, kind, length), _leaves(schedule, kind)
    cells = getattr(schedule, kind)
    sends, seconds = np.zeros((2, T), bool), np.zeros((2, T))
    busy: dict[tuple, float] = {}
    for t, c in np.argwhere(cells != IDLE).tolist():
        m = int(cells[t, c]) % N
        if not leaves[m, c]:
            continue
        reader = int(schedule.stage[c]) + (1 if kind == "forward" else -1)
        target = schedule.column_of_microbatch[m, reader]
        crosses = bool(schedule.ticks_between(schedule.device[c], schedule.device[target]) > 1)
        at = int(crosses), (t + crosses) % T
        sends[at] = True
        for end, column in (("sends", c), ("receives", target)):
            key = *at, end, int(schedule.stage[column]), int(schedule.device[column])
            busy[key] = busy.get(key, 0.0) + message[m, c]
            seconds[at] = max(seconds[at], busy[key])
    return sends, seconds


def _leaves(schedule: Schedule, kind: str) -> np.ndarray:
    """bool `[N, C]`: whether the result of an operation goes to another device."""
    device_of_stage = schedule.device[schedule.column_of_microbatch]  # [N, S]
    reader = schedule.stage + (1 if kind == "forward" else -1)
    exists = (0 <= reader) & (reader < schedule.num_stages)
    reader = np.clip(reader, 0, schedule.num_stages - 1)
    runs = schedule.forward_ticks() != IDLE
    return runs & exists & (device_of_stage[:, reader] != schedule.device)


def _dependencies(schedule: Schedule, length: dict, costs: Costs) -> Timing:
    """Simulates one operation after the other in the table's order, each as early as it can start."""
    S, N, T = schedule.num_stages, schedule.num_microbatches, schedule.num_ticks
    ticks = _ticks(schedule)
    message = {k: _message(schedule, k, length) for k in ticks if k in TRANSFERS}
    # An asynchronous table starts here with an empty pipeline, so it runs for many times
    # as long as a microbatch is on its way. The later half is the steady state.
    num_rounds = half = 1
    if not schedule.synchronous:
        half = 4 * max(int(kind_ticks.max()) // T + 1 for kind_ticks in ticks.values())
        num_rounds = 2 * half
    columns, C = schedule.column_of_microbatch, schedule.num_columns
    kinds = list(ticks)
    order = sorted(
        (int(kind_ticks[m, c]) + r * T, k, int(c), m + r * N)
        for k, kind_ticks in enumerate(ticks.values())
        for m, c in np.argwhere(kind_ticks != IDLE).tolist()
        for r in range(num_rounds)
    )
    updates = sorted(
        (int(tick) + r * T, s)
        for ticks_of_stages in schedule.update_ticks_of_round()[:, schedule.column_of_stage]
        for s, tick in enumerate(ticks_of_stages)
        if tick != IDLE
        for r in range(num_rounds)
    )[::-1]
    start = {kind: np.full((num_rounds * N, C), np.nan) for kind in kinds}
    end = {kind: times.copy() for kind, times in start.items()}
    free = np.zeros(schedule.num_devices)  # from when on each device can start

    def update(until: int) -> None:
        """Runs the updates of the ticks before `until`."""
        while updates and updates[-1][0] < until:
            _, s = updates.pop()
            devices = list(schedule.copies[s])  # they wait for each other's gradients
            column = schedule.column_of_stage[s]
            free[devices] = free[devices].max() + length["update"][column]

    for t, k, c, m in order:  # every operation comes after its inputs
        update(t)
        kind, s, device = kinds[k], int(schedule.stage[c]), schedule.device[c]
        inputs = [0.0]
        if kind == "forward" and s > 0:
            source = columns[m % N, s - 1]
            inputs.append(end[kind][m, source] + message[kind][m % N, source])
        elif kind == "backward":
            inputs.append(end["forward"][m, c])
            if s < S - 1:
                source = columns[m % N, s + 1]
                inputs.append(end[kind][m, source] + message[kind][m % N, source])
        elif kind == "weight_grad":
            inputs.append(end["backward"][m, c])
        start[kind][m, c] = max(free[device], *inputs)
        end[kind][m, c] = free[device] = start[kind][m, c] + length[kind][c]
    if schedule.synchronous:
        update(T)
        return _timing(schedule, length, costs, free.max(), start, end)
    last_end = max(np.nanmax(times[-N:]) for times in end.values())
    middle_end = max(np.nanmax(times[half * N - N : half * N]) for times in end.values())
    last_start = {kind: times[-N:] for kind, times in start.items()}
    offset = np.nanmin(last_start["forward"][:, columns[0, 0]])
    timing = _timing(
        schedule,
        length,
        costs,
        (last_end - middle_end) / half,
        {kind: times - offset for kind, times in last_start.items()},
        {kind: times[-N:] - offset for kind, times in end.items()},
    )
    # The pipeline may drain faster than it fills, but no round is shorter than its work.
    makespan = max(timing.makespan, timing.busy.max())
    span = np.full(schedule.num_devices, makespan)
    return dataclasses.replace(timing, makespan=float(makespan), span=span)
