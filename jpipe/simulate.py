"""What a table takes in time: in lockstep, tick by tick, or with every device as early as its inputs allow."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from jpipe.schedule import IDLE, Schedule

_KINDS = ("forward", "backward", "weight_grad")
TRANSFERS = {"forward": "transfer", "backward": "gradient_transfer"}
"""Kind of operation -> the cost of the message it sends."""

# What a cost that is None is the sum of.
_PARTS = {
    "fused_backward": ("backward", "weight_grad"),
    "gradient_transfer": ("transfer",),
}


@dataclasses.dataclass(frozen=True)
class Costs:
    """What the operations of one microbatch take, in any unit of time.

    Attributes:
      forward: of a stage's forward; a number, or `[S]`, one for each stage.
      backward: of its input gradient, the same.
      weight_grad: of its weight gradient, the same. A table that does not split it has
        both in one operation, whose input gradient leaves at the end.
      transfer: from the end of an operation until another device can read its output; a
        number, or `[S]`, of the messages from a stage to the next, and back.
      gradient_transfer: of those back, as `transfer`, of the same pairs of stages; None:
        as long as `transfer`.
      fused_backward: of both gradients in one operation, as `forward`; None: as long as the
        two apart.
      update: of a stage's optimizer, once a minibatch, as `forward`.
      tick: what devices that wait for each other lose by it, in every tick that sends and once more in one that
        updates; lockstep only.
      jitter: the part by which a tick takes longer in which several devices compute, as now one of them is slower
        than it is on average and now another, and all wait for it; lockstep only.
      num_cores: what all devices share, as devices faked on CPU do; None: each is its own.
        Lockstep only. The costs are then what an operation takes on one core.
      cores_per_device: how many of them one device can use at once.

    Raises:
      ValueError: if one of them is negative or not a number.
    """

    forward: ArrayLike = 1.0
    backward: ArrayLike = 1.0
    weight_grad: ArrayLike = 1.0
    transfer: ArrayLike = 0.0
    gradient_transfer: ArrayLike | None = None
    fused_backward: ArrayLike | None = None
    update: ArrayLike = 0.0
    tick: float = 0.0
    jitter: float = 0.0
    num_cores: float | None = None
    cores_per_device: float = 1.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            if given is None and field.default is None:
                continue
            value = np.asarray(given)
            is_part = field.name == "jitter"
            fits = value.dtype.kind in "iuf" and (value >= 0).all()
            if not fits or (is_part and np.isinf(value)):
                if is_part:
                    raise ValueError(
                        f"`jitter` must be a part of a tick, at least 0, got {given}: 0.05 is a tick 5% longer."
                    )
                raise ValueError(
                    f"`{field.name}` must be at least 0, got {given}: it is a time. Pass seconds, "
                    "or multiples of one forward."
                )
        for name in ("num_cores", "cores_per_device"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(
                    f"`{name}` must be above 0, got {getattr(self, name)}: nothing would run."
                )

    def of_stages(self, num_stages: int) -> dict[str, np.ndarray]:
        """Kind of operation, "transfer" and "gradient_transfer" -> `[S]`, the time it takes on each stage.

        Raises:
          ValueError: if there is a number for each stage of another count of stages.
        """
        costs: dict[str, np.ndarray] = {}
        for name in (*_KINDS, "fused_backward", "update", *TRANSFERS.values()):
            given = getattr(self, name)
            if given is None:
                costs[name] = sum(costs[part] for part in _PARTS[name])
                continue
            value = np.asarray(given, float)
            if value.ndim and value.shape != (num_stages,):
                raise ValueError(
                    f"`{name}` must be a number or one for each of the {num_stages} stages, got shape {value.shape}."
                )
            costs[name] = np.broadcast_to(value, num_stages)
        return costs


@dataclasses.dataclass(frozen=True, eq=False)
class Timing:
    """When everything runs. D devices; N microbatches, C columns.

    Attributes:
      makespan: of a minibatch; of a round that repeats, where the table is asynchronous.
      busy: `[D]`, the time that each device computes in it, on one core if cores are shared.
      transfer: `[D]`, the time of the messages that each device sends in it. In lockstep
        all devices wait for a tick's messages; else they travel while devices compute.
      span: `[D]`, from the start of a device's first operation to the end of its last; in
        an asynchronous table the makespan.
      start: kind of operation -> `[N, C]`, when each starts; NaN where there is none.
        Those of an asynchronous table are of a later round, counted from its start.
      end: the same for when each ends.
      num_processors: how many devices' work could be done at once: D, or fewer cores.
      communicating: the part of the makespan in which all devices wait for a tick's messages;
        0 unless in lockstep.
    """

    makespan: float
    busy: np.ndarray
    transfer: np.ndarray
    span: np.ndarray
    start: dict[str, np.ndarray]
    end: dict[str, np.ndarray]
    num_processors: float
    communicating: float = 0.0

    @property
    def idle(self) -> np.ndarray:
        """`[D]`, the time that each device does not compute."""
        return self.makespan - self.busy

    @property
    def bubble(self) -> float:
        """The idle part of all processors' time."""
        return float(1 - self.busy.sum() / (self.num_processors * self.makespan))

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
        busiest device, and its messages must have arrived before the next begins. Updates wait
        until all devices have computed, for the norm of all gradients. Cores that devices share
        serve all that still compute alike. Or
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
    if mode == "dependencies" and (costs.num_cores or costs.tick or costs.jitter):
        raise ValueError(
            '`num_cores`, `tick` and `jitter` are of devices in lockstep, got mode="dependencies". Use mode="lockstep".'
        )
    of_stages = costs.of_stages(schedule.num_stages)
    if not schedule.splits_backward:
        of_stages["backward"] = of_stages["fused_backward"]
    length = {
        name: cost if name in TRANSFERS.values() else cost[schedule.stage]
        for name, cost in of_stages.items()
    }
    run = _lockstep if mode == "lockstep" else _dependencies
    return run(schedule, length, costs)


def _ticks(schedule: Schedule) -> dict[str, np.ndarray]:
    """Kind -> `[N, C]`, absolute tick of each operation, of the kinds that the table has."""
    kinds = {"forward": schedule.forward_ticks()}
    if not schedule.forward_only:
        kinds["backward"] = schedule.backward_ticks()
    if schedule.splits_backward:
        kinds["weight_grad"] = schedule.weight_grad_ticks()
    return kinds


def _timing(schedule, length, costs, makespan, start, end) -> Timing:
    D, N = schedule.num_devices, schedule.num_microbatches
    span = np.full(D, makespan, float)
    if schedule.synchronous:
        for d in range(D):
            mine = schedule.device == d
            first = min(np.nanmin(at[:, mine]) for at in start.values())
            span[d] = max(np.nanmax(at[:, mine]) for at in end.values()) - first
    updates = (schedule.update != IDLE).any(axis=0)
    busy = N * sum(length[kind] for kind in start) + updates * length["update"]
    sent = N * sum(
        _message(schedule, kind, length) for kind in start if kind in TRANSFERS
    )
    cores = costs.num_cores
    return Timing(
        float(makespan),
        np.bincount(schedule.device, busy, D),
        np.bincount(schedule.device, sent, D),
        span,
        start,
        end,
        D if cores is None else min(D * costs.cores_per_device, cores),
    )


def _message(schedule: Schedule, kind: str, length: dict) -> np.ndarray:
    """`[C]`, the transfer of what a column's operation sends; 0 if it stays on the device."""
    between = length[TRANSFERS[kind]][schedule.stage - (kind == "backward")]
    return np.where(_leaves(schedule, kind), between, 0.0)


def _lockstep(schedule: Schedule, length: dict, costs: Costs) -> Timing:
    T, D = schedule.num_ticks, schedule.num_devices
    work, updates = np.zeros((2, T, D))
    transfer = np.zeros(T)
    sends = np.zeros(T, bool)
    begins = {}
    for kind in _ticks(schedule):
        runs = getattr(schedule, kind) != IDLE
        begins[kind] = work[:, schedule.device].copy()
        np.add.at(work, (slice(None), schedule.device), runs * length[kind])
        if kind in TRANSFERS:
            sends |= (runs & _leaves(schedule, kind)).any(axis=1)
            message = (runs * _message(schedule, kind, length)).max(axis=1)
            transfer = np.maximum(transfer, message)
    updating = schedule.update != IDLE
    np.add.at(updates, (slice(None), schedule.device), updating * length["update"])
    waits = sends + (updating.any(axis=1) & (D > 1)).astype(int)
    transfer += costs.tick * waits
    clock, clock_of_updates = _clock(work, costs), _clock(updates, costs)
    tick_length = np.zeros(T)
    for clock_of, amount in ((clock, work), (clock_of_updates, updates)):
        computing = clock_of(np.arange(T), amount.max(axis=1))
        tick_length += computing
        transfer += costs.jitter * computing * ((amount > 0).sum(axis=1) > 1)
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
    timing = _timing(schedule, length, costs, makespan, start, end)
    return dataclasses.replace(timing, communicating=float(transfer.sum()))


def _clock(work: np.ndarray, costs: Costs) -> Callable:
    """When devices that still compute have done an amount of a tick's work, `[T, D]`, from the tick's start.

    All that still compute go on alike, so the least busy is done first, and leaves its cores to the others.
    """
    T, D = work.shape
    if costs.num_cores is None:
        done, speed = work.max(axis=1, keepdims=True), np.ones(1)
    else:
        done, left = np.sort(work, axis=1), np.arange(D, 0, -1)
        speed = np.minimum(costs.cores_per_device, costs.num_cores / left)
    done = np.concatenate([np.zeros((T, 1)), done], axis=1)

    def clock(t: np.ndarray, amount: np.ndarray) -> np.ndarray:
        each = np.clip(amount[..., None] - done[t, :-1], 0, np.diff(done)[t])
        return (each / speed).sum(axis=-1)

    return clock


def _leaves(schedule: Schedule, kind: str) -> np.ndarray:
    """bool `[C]`: whether what an operation makes goes to another device."""
    device_of_stage = np.empty(schedule.num_stages, int)
    device_of_stage[schedule.stage] = schedule.device
    other = schedule.stage + (1 if kind == "forward" else -1)
    there = (0 <= other) & (other < schedule.num_stages)
    other = np.clip(other, 0, schedule.num_stages - 1)
    return there & (device_of_stage[other] != schedule.device)


def _dependencies(schedule: Schedule, length: dict, costs: Costs) -> Timing:
    S, N, T = schedule.num_stages, schedule.num_microbatches, schedule.num_ticks
    ticks = _ticks(schedule)
    message = {k: _message(schedule, k, length) for k in ticks if k in TRANSFERS}
    # An asynchronous table is run from an empty pipeline for much longer than a
    # microbatch is on its way. The later half of it is the steady state.
    num_rounds = half = 1
    if not schedule.synchronous:
        half = 4 * max(int(at.max()) // T + 1 for at in ticks.values())
        num_rounds = 2 * half
    columns = np.argsort(schedule.stage)  # of each stage
    kinds = list(ticks)
    order = sorted(
        (int(at[m, c]) + r * T, k, int(c), m + r * N)
        for k, (kind, at) in enumerate(ticks.items())
        for m, c in np.argwhere(at != IDLE).tolist()
        for r in range(num_rounds)
    )
    updates = sorted(
        (int(at) + r * T, int(c))
        for c, at in enumerate(schedule.update_ticks())
        if at != IDLE
        for r in range(num_rounds)
    )[::-1]
    start = {kind: np.full((num_rounds * N, len(columns)), np.nan) for kind in kinds}
    end = {kind: at.copy() for kind, at in start.items()}
    free = np.zeros(schedule.num_devices)

    def update(until: int) -> None:
        """Runs the updates of the ticks before `until`."""
        while updates and updates[-1][0] < until:
            _, c = updates.pop()
            free[schedule.device[c]] += length["update"][c]

    for t, k, c, m in order:  # whatever one waits for stands before it
        update(t)
        kind, s, device = kinds[k], int(schedule.stage[c]), schedule.device[c]
        inputs = [0.0]
        if kind == "forward" and s > 0:
            source = columns[s - 1]
            inputs.append(end[kind][m, source] + message[kind][source])
        elif kind == "backward":
            inputs.append(end["forward"][m, c])
            if s < S - 1:
                source = columns[s + 1]
                inputs.append(end[kind][m, source] + message[kind][source])
        elif kind == "weight_grad":
            inputs.append(end["backward"][m, c])
        start[kind][m, c] = max(free[device], *inputs)
        end[kind][m, c] = free[device] = start[kind][m, c] + length[kind][c]
    if schedule.synchronous:
        update(T)
        return _timing(schedule, length, costs, free.max(), start, end)
    later = max(at[-N:].max() for at in end.values())
    middle = max(at[half * N - N : half * N].max() for at in end.values())
    last = {kind: at[-N:] for kind, at in start.items()}
    offset = last["forward"][:, columns[0]].min()
    timing = _timing(
        schedule,
        length,
        costs,
        (later - middle) / half,
        {kind: at - offset for kind, at in last.items()},
        {kind: at[-N:] - offset for kind, at in end.items()},
    )
    # The last rounds may be drained faster than they were filled.
    makespan = max(timing.makespan, timing.busy.max())
    span = np.full(schedule.num_devices, makespan)
    return dataclasses.replace(timing, makespan=float(makespan), span=span)
