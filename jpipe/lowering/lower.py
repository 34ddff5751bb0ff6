"""A table, lowered to the static integers that the engine needs.

- *Operations*: for each tick, device and lane, the stage to run, its microbatch and the versions
  that it reads. A device that runs several columns in one tick has as many lanes.
- *Rings*: arrays that keep values for later ticks in slots. A microbatch's slot is its position in
  its column's order, modulo the depth of the ring: the smallest depth at which no live value is
  overwritten.
- *Channels*: the permutations of devices that the messages need, see `jpipe.lowering.channels`.

Letters: T ticks, D devices, S stages, C columns, N microbatches, V weight versions.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jpipe.lowering.channels import Channel, Route, assign_channels, neighbours
from jpipe.schedule import IDLE, Schedule, newest_version

__all__ = [
    "GUARDS",
    "STASHES",
    "Lowered",
    "Operations",
    "Route",
    "guard_of",
    "lower",
    "neighbours",
]

STASHES = ("input_stash", "weight_stash", "split_residuals")
"""Rings that keep a stage's values from one of its operations to another."""

GUARDS = ("cond", "switch")
"""Policies for operations that only some devices run in a tick: see `jpipe.engine.guard`."""


def guard_of(platform: str) -> str:
    """The policy for a platform, such as "cpu", "tpu" or "gpu"."""
    return "cond" if platform in ("cpu", "tpu") else "switch"


@dataclasses.dataclass(frozen=True)
class Operations:
    """One kind of operation, int32 `[T, D, lanes]` each. `stage` is -1 where nothing runs.

    Attributes:
      stage: the stage that runs.
      chunk: the position of the stage's column among its device's columns.
      microbatch: relative to the round, as in the table.
      position: rank of the microbatch in the column's order, relative to the round. It determines
        ring slots.
      version: the weight version that is read (`update`: written), relative to the round.
    """

    stage: np.ndarray
    chunk: np.ndarray
    microbatch: np.ndarray
    position: np.ndarray
    version: np.ndarray

    @property
    def num_lanes(self) -> int:
        """The most columns of a device that run this operation in one tick."""
        return self.stage.shape[2]


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A schedule as static integers.

    Attributes:
      schedule: the table.
      operations: "forward", "backward", "weight_grad", "update" -> `Operations`.
      channels: the channels.
      outgoing: (inbox, lane) of each output that a device may send.
      depth: ring -> int `[S]`, slots of the stage's own column.
      offset: ring -> int `[S]`, first slot of the stage's column on its device.
      num_slots: ring -> slots on every device.
      num_chunks: the most columns on any device.
      placement: for each stage its device, and the position of its column among the device's
        columns.
      num_versions: V, weight versions on every device; version v is stored in slot v modulo V.
      newest: int `[S]`, the newest version of a stage between rounds, relative to the next round.
      num_batches: how many of the latest minibatches are read, including the minibatch of this
        round.
      drain_rounds: rounds without new microbatches after which nothing is in flight.
      guard: one of `GUARDS`.
    """

    schedule: Schedule
    operations: Mapping[str, Operations]
    channels: tuple[Channel, ...]
    outgoing: tuple[tuple[str, int], ...]
    depth: Mapping[str, np.ndarray]
    offset: Mapping[str, np.ndarray]
    num_slots: Mapping[str, int]
    num_chunks: int
    placement: tuple[tuple[int, int], ...]
    num_versions: int
    newest: np.ndarray
    num_batches: int
    drain_rounds: int
    guard: str = "cond"


def lower(
    schedule: Schedule,
    recompute: bool = False,
    routes: Sequence[Route] | None = None,
    overlap: bool = False,
    guard: str = "cond",
) -> Lowered:
    """Lowers a legal table.

    Args:
      schedule: the table; `check` must have passed.
      recompute: keep only the inputs of a stage from its forward to its backward.
      routes: the messages; None: `neighbours`, all of one payload.
      overlap: whether messages of forwards and messages of backwards travel at different times, and
        therefore never share a channel.
      guard: one of `GUARDS`: how a device leaves out the operations that other devices run in the
        same tick.

    Returns:
      The `Lowered` table.

    Raises:
      ValueError: if `guard` is unknown.
    """
    if guard not in GUARDS:
        raise ValueError(
            f"`guard` must be one of {', '.join(map(repr, GUARDS))}, got {guard!r}."
        )
    if routes is None:
        routes = neighbours(schedule.num_stages)
    columns, chunk = schedule.column_of_stage, _chunks(schedule)
    position = _positions(schedule)
    operations = _all_operations(schedule, chunk, position)
    depth = _depths(schedule, columns, position, recompute, routes)
    offset, num_slots, num_chunks = {}, {}, int(chunk.max()) + 1
    for ring, depths in depth.items():
        per_chunk = [max(depths[schedule.stage[chunk == j]]) for j in range(num_chunks)]
        starts = np.concatenate([[0], np.cumsum(per_chunk)])
        offset[ring] = starts[chunk[columns]]
        num_slots[ring] = int(starts[-1])
    newest, last_tick = _newest_and_last_tick(schedule)
    outgoing = tuple(
        (route.inbox, lane)
        for route in routes
        if route.target
        for lane in range(operations[route.operation].num_lanes)
    )
    return Lowered(
        schedule=schedule,
        operations=operations,
        channels=assign_channels(
            schedule, columns, position, operations, routes, outgoing, overlap
        ),
        outgoing=outgoing,
        depth=depth,
        offset=offset,
        num_slots=num_slots,
        num_chunks=num_chunks,
        placement=tuple((int(schedule.device[c]), int(chunk[c])) for c in columns),
        num_versions=_num_versions(schedule),
        newest=newest[columns],
        num_batches=_num_batches(schedule, columns, recompute),
        drain_rounds=last_tick // schedule.num_ticks,
        guard=guard,
    )


# -- Versions and minibatches


def _newest_and_last_tick(schedule: Schedule) -> tuple[np.ndarray, int]:
    """`[C]` newest versions between rounds, and the last tick of any microbatch of a round."""
    if schedule.forward_only:
        return np.zeros(schedule.num_columns, int), schedule.num_ticks - 1
    updated = schedule.update_ticks()
    newest = newest_version(np.zeros_like(updated), updated, schedule.num_ticks)
    return newest, int(max(schedule.weight_grad_ticks().max(), updated.max()))


def _num_versions(schedule: Schedule) -> int:
    """The smallest V such that version v is last read before version v + V overwrites it."""
    if schedule.forward_only:
        return 1
    updated, T, V = schedule.update_ticks(), schedule.num_ticks, 1
    for ticks, versions in (
        (schedule.forward_ticks(), schedule.forward_versions()),
        (schedule.backward_ticks(), schedule.backward_versions()),
        (schedule.weight_grad_ticks(), schedule.backward_versions()),
    ):
        newest_written = -((updated - ticks) // T)  # by the end of the round of `ticks`
        V = max(V, int((newest_written - versions + 1).max()))
    return V


def _num_batches(schedule: Schedule, columns: np.ndarray, recompute: bool) -> int:
    """How many of the latest minibatches the first and the last stage read, with this round's."""
    ends, oldest = [columns[0], columns[-1]], 0
    readers = [schedule.forward, schedule.backward] if recompute else [schedule.forward]
    for cells in readers:
        read = cells[:, ends]
        oldest = min(oldest, int(read[read != IDLE].min(initial=0)))
    return 1 + -(oldest // schedule.num_microbatches)


# -- Operations


def _chunks(schedule: Schedule) -> np.ndarray:
    """`[C]`: position of each column among its device's columns, in order of stage."""
    chunk = np.zeros(schedule.num_columns, int)
    for d in range(schedule.num_devices):
        columns = np.flatnonzero(schedule.device == d)
        chunk[columns[np.argsort(schedule.stage[columns])]] = np.arange(len(columns))
    return chunk


def _positions(schedule: Schedule) -> np.ndarray:
    """`[N, C]`: rank of each microbatch in its column's order of forwards."""
    order = schedule.forward_ticks().argsort(axis=0, kind="stable")
    return order.argsort(axis=0)


def _weight_grad_version(schedule: Schedule) -> np.ndarray:
    """`[T, C]`: a weight gradient reads the version that its input gradient read."""
    version = np.full(schedule.weight_grad.shape, IDLE, np.int64)
    read = schedule.backward_versions()
    t, c = np.nonzero(schedule.weight_grad != IDLE)
    rounds, m = np.divmod(
        schedule.weight_grad[t, c].astype(np.int64), schedule.num_microbatches
    )
    version[t, c] = read[m, c] + rounds
    return version


def _all_operations(
    schedule: Schedule, chunk: np.ndarray, position: np.ndarray
) -> dict[str, Operations]:
    """The four kinds of operations."""
    cells_and_versions = {
        "forward": (schedule.forward, schedule.forward_version),
        "backward": (schedule.backward, schedule.backward_version),
        "weight_grad": (schedule.weight_grad, _weight_grad_version(schedule)),
        "update": (schedule.update, schedule.update),
    }
    return {
        name: _operations(
            schedule, cells, version, chunk, None if name == "update" else position
        )
        for name, (cells, version) in cells_and_versions.items()
    }


def _operations(
    schedule: Schedule,
    cells: np.ndarray,
    version: np.ndarray,
    chunk: np.ndarray,
    position: np.ndarray | None,
) -> Operations:
    """Gathers the cells `[T, C]` of one field of the table into lanes.

    Args:
      schedule: the table.
      cells: the field.
      version: int `[T, C]`.
      chunk: int `[C]`.
      position: int `[N, C]`; None: the cells are updates, which have no microbatch.
    """
    T, D, N = schedule.num_ticks, schedule.num_devices, schedule.num_microbatches
    busy = [
        [
            [c for c in np.flatnonzero(schedule.device == d) if cells[t, c] != IDLE]
            for d in range(D)
        ]
        for t in range(T)
    ]
    num_lanes = max(len(columns) for of_devices in busy for columns in of_devices)
    operations = Operations(
        stage=np.full((T, D, num_lanes), -1, np.int32),
        **{
            name: np.zeros((T, D, num_lanes), np.int32)
            for name in ("chunk", "microbatch", "position", "version")
        },
    )
    for t, d in np.ndindex(T, D):
        for lane, c in enumerate(busy[t][d]):
            cell = t, d, lane
            operations.stage[cell] = schedule.stage[c]
            operations.chunk[cell] = chunk[c]
            operations.version[cell] = version[t, c]
            if position is not None:
                rounds, m = divmod(int(cells[t, c]), N)
                operations.microbatch[cell] = cells[t, c]
                operations.position[cell] = position[m, c] + N * rounds
    return operations


# -- Rings


def _depths(
    schedule: Schedule,
    columns: np.ndarray,
    position: np.ndarray,
    recompute: bool,
    routes: Sequence[Route],
) -> dict[str, np.ndarray]:
    """Ring -> int `[S]`, the slots that a stage's column needs."""
    rings = [*(route.inbox for route in routes), *STASHES]
    depth = {ring: np.zeros(schedule.num_stages, int) for ring in rings}
    lifetimes = _lifetimes(schedule, columns, recompute, routes)
    for ring, (first, last) in lifetimes.items():
        for c in range(schedule.num_columns):
            used = (first[:, c] != IDLE) & (last[:, c] != IDLE)
            if used.any():
                depth[ring][schedule.stage[c]] = _least_modulus(
                    schedule, position[used, c], first[used, c], last[used, c]
                )
    return depth


def _lifetimes(
    schedule: Schedule,
    columns: np.ndarray,
    recompute: bool,
    routes: Sequence[Route],
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Ring -> first and last tick `[N, C]` of the use of a microbatch's slot; `IDLE`: no use."""
    forward, backward = schedule.forward_ticks(), schedule.backward_ticks()
    weight_grad = schedule.weight_grad_ticks()
    stashed = backward if recompute else forward
    lifetimes = {}
    for route in routes:
        sent = forward if route.operation == "forward" else backward
        arrival = np.full(sent.shape, IDLE, np.int64)
        for source, target in route.target.items():
            ticks = sent[:, columns[source]]
            # A message is readable from the tick after it was sent.
            arrival[:, columns[target]] = np.where(ticks == IDLE, IDLE, ticks + 1)
        read = forward
        if not schedule.forward_only:
            read = stashed if route.operation == "forward" else backward
        lifetimes[route.inbox] = arrival, read
    if not schedule.forward_only:
        lifetimes["input_stash"] = (stashed, backward)
        lifetimes["weight_stash"] = (stashed, weight_grad)
    if schedule.splits_backward:
        lifetimes["split_residuals"] = (backward, weight_grad)
    return lifetimes


def _least_modulus(
    schedule: Schedule, position: np.ndarray, first: np.ndarray, last: np.ndarray
) -> int:
    """The smallest K at which microbatches whose positions agree modulo K are never alive together.

    Args:
      schedule: the table.
      position: int `[microbatches]`, ranks in the column's order.
      first: int `[microbatches]`, the tick at which each becomes alive.
      last: int `[microbatches]`, the last tick at which each is alive.
    """
    N, T = schedule.num_microbatches, schedule.num_ticks
    rounds = 1
    if not schedule.synchronous:
        # An asynchronous round repeats every T ticks: unroll it until lifetimes can no longer meet.
        rounds += int((last - first).max()) // T + 1
    position = np.concatenate([position + N * r for r in range(rounds)])
    first = np.concatenate([first + T * r for r in range(rounds)])
    last = np.concatenate([last + T * r for r in range(rounds)])
    meet = (first[:, None] <= last[None, :]) & (first[None, :] <= last[:, None])
    apart = np.abs(position[:, None] - position[None, :])[meet]
    apart = apart[apart > 0]
    modulus = 1
    while (apart % modulus == 0).any():
        modulus += 1
    return modulus
