"""A table, lowered to what the engine needs: all static integers.

- *Operations*: for each tick, device and lane, the stage to run, the microbatch and the versions it reads. A
  device that runs several columns in one tick has as many lanes.
- *Rings*: what is kept for later lies in rings of slots. A microbatch's slot is its position in its column's
  order, modulo the ring's depth: the least depth at which nothing alive is overwritten.
- *Channels*: the permutations of devices that messages need, few as possible: collectives are what costs.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jpipe.schedule import IDLE, Schedule, newest_version

STASHES = ("input_stash", "weight_stash", "split_residuals")


@dataclasses.dataclass(frozen=True)
class Route:
    """The way of one kind of message.

    Attributes:
      inbox: the ring that it arrives in.
      operation: what sends it, and what reads it: "forward" or "backward".
      target: stage that sends -> stage that receives.
      payload: routes of equal payloads may share a channel.
    """

    inbox: str
    operation: str
    target: Mapping[int, int]
    payload: Any


def neighbours(num_stages: int, activation: Any = 0, gradient: Any = 0) -> list[Route]:
    """The routes of every pipeline: activations to the next stage, gradients to the one before.

    Args:
      num_stages: S.
      activation, gradient: their payloads.
    """
    down = {s: s + 1 for s in range(num_stages - 1)}
    up = {t: s for s, t in down.items()}
    return [
        Route("activation", "forward", down, activation),
        Route("gradient", "backward", up, gradient),
    ]


@dataclasses.dataclass(frozen=True)
class Operations:
    """One kind of operation, int32 `[T, D, lanes]` each; `stage` is -1 where there is none.

    Attributes:
      stage: the stage that runs; chunk: which of the device's columns it is.
      microbatch: relative to the round, as in the table.
      position: the microbatch's place in the column's order, also relative to the round: ring slots follow it.
      version: the weight version read (`update`: written), relative to the round.
    """

    stage: np.ndarray
    chunk: np.ndarray
    microbatch: np.ndarray
    position: np.ndarray
    version: np.ndarray

    @property
    def num_lanes(self) -> int:
        return self.stage.shape[2]


@dataclasses.dataclass(frozen=True)
class Channel:
    """One permutation of devices, used in the ticks where somebody sends.

    Attributes:
      operation: what its messages come from, "forward" or "backward"; None: from both.
      pairs: (source, target) devices; None: a device hands a message to itself.
      sends: bool `[T]`: whether anybody sends.
      lane: int32 `[T, D]`: which output a device sends, a position in `Lowered.outgoing`.
      lanes: the outputs it ever sends.
      arrives: inbox -> int32 `[T, D, 2]`: the stage and position whose slot the message that tick t may read goes to;
        stage -1: none. Only the inboxes that it ever fills.
    """

    operation: str | None
    pairs: tuple[tuple[int, int], ...] | None
    sends: np.ndarray
    lane: np.ndarray
    lanes: tuple[int, ...]
    arrives: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A schedule as static integers.

    Attributes:
      schedule: the table.
      operations: "forward", "backward", "weight_grad", "update" -> `Operations`.
      channels: the channels.
      outgoing: (inbox, lane) of each output that a device may send.
      depth: ring -> int `[S]`: slots of the stage's own column.
      offset: ring -> int `[S]`: its first slot among its device's.
      num_slots: ring -> slots that every device holds.
      num_chunks: columns a device, at most.
      placement: for each stage its device, and which of the device's columns it is.
      num_versions: V, weight versions that every device holds; version v lies in slot v modulo V.
      newest: int `[S]`: the newest version of a stage between rounds, relative to the next round.
      num_batches: how many of the latest minibatches are read, the one of this round included.
      drain_rounds: rounds without new microbatches after which nothing is in flight.
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


def lower(
    schedule: Schedule,
    recompute: bool = False,
    routes: Sequence[Route] | None = None,
    overlap: bool = False,
) -> Lowered:
    """Lowers a legal table.

    Args:
      schedule: the table; `check` must have passed.
      recompute: keep only the inputs of a stage from its forward to its backward.
      routes: the messages; None: `neighbours`, of one payload.
      overlap: whether messages of forwards and of backwards travel at different times, and so never in one channel.
    """
    if routes is None:
        routes = neighbours(schedule.num_stages)
    column_of = np.argsort(schedule.stage)  # one column a stage
    chunk = _chunks(schedule)
    position = _positions(schedule)
    operations = {
        "forward": _operations(
            schedule, schedule.forward, schedule.forward_version, chunk, position
        ),
        "backward": _operations(
            schedule, schedule.backward, schedule.backward_version, chunk, position
        ),
        "weight_grad": _operations(
            schedule,
            schedule.weight_grad,
            _weight_grad_version(schedule),
            chunk,
            position,
        ),
        "update": _operations(schedule, schedule.update, schedule.update, chunk, None),
    }
    rings = [*(route.inbox for route in routes), *STASHES]
    depth = {ring: np.zeros(schedule.num_stages, int) for ring in rings}
    lifetimes = _lifetimes(schedule, column_of, recompute, routes)
    for ring, (first, last) in lifetimes.items():
        for c in range(schedule.num_columns):
            alive = (first[:, c] != IDLE) & (last[:, c] != IDLE)
            if alive.any():
                depth[ring][schedule.stage[c]] = _least_modulus(
                    schedule, position[alive, c], first[alive, c], last[alive, c]
                )
    num_chunks = int(chunk.max()) + 1
    offset, num_slots = {}, {}
    for ring in rings:
        per_chunk = [
            max(depth[ring][schedule.stage[chunk == j]]) for j in range(num_chunks)
        ]
        starts = np.concatenate([[0], np.cumsum(per_chunk)])
        offset[ring] = starts[chunk[column_of]]
        num_slots[ring] = int(starts[-1])
    if schedule.forward_only:
        newest, latest = np.zeros(schedule.num_columns, int), schedule.num_ticks - 1
    else:
        updated = schedule.update_ticks()
        newest = newest_version(np.zeros_like(updated), updated, schedule.num_ticks)
        latest = max(schedule.weight_grad_ticks().max(), updated.max())
    outgoing = tuple(
        (route.inbox, lane)
        for route in routes
        if route.target
        for lane in range(operations[route.operation].num_lanes)
    )
    return Lowered(
        schedule=schedule,
        operations=operations,
        channels=_channels(
            schedule, column_of, position, operations, routes, outgoing, overlap
        ),
        outgoing=outgoing,
        depth=depth,
        offset=offset,
        num_slots=num_slots,
        num_chunks=num_chunks,
        placement=tuple((int(schedule.device[c]), int(chunk[c])) for c in column_of),
        num_versions=_num_versions(schedule),
        newest=newest[column_of],
        num_batches=_num_batches(schedule, column_of, recompute),
        drain_rounds=int(latest) // schedule.num_ticks,
    )


def _num_versions(schedule: Schedule) -> int:
    """The least V at which no version is overwritten, by the one V later, before it is last read."""
    if schedule.forward_only:
        return 1
    updated, T, V = schedule.update_ticks(), schedule.num_ticks, 1
    for ticks, versions in (
        (schedule.forward_ticks(), schedule.forward_versions()),
        (schedule.backward_ticks(), schedule.backward_versions()),
        (schedule.weight_grad_ticks(), schedule.backward_versions()),
    ):
        written = -(
            (updated - ticks) // T
        )  # the newest version written before or in that tick's round
        V = max(V, int((written - versions + 1).max()))
    return V


def _num_batches(schedule: Schedule, column_of: np.ndarray, recompute: bool) -> int:
    """How many minibatches back the first and the last stage read, this round's included."""
    ends, oldest = [column_of[0], column_of[-1]], 0
    for cells in (
        (schedule.forward, schedule.backward) if recompute else (schedule.forward,)
    ):
        read = cells[:, ends]
        oldest = min(oldest, int(read[read != IDLE].min(initial=0)))
    return 1 + -(oldest // schedule.num_microbatches)


def _chunks(schedule: Schedule) -> np.ndarray:
    """`[C]`: the number of each column among its device's, in order of stage."""
    chunk = np.zeros(schedule.num_columns, int)
    for d in range(schedule.num_devices):
        columns = np.flatnonzero(schedule.device == d)
        chunk[columns[np.argsort(schedule.stage[columns])]] = np.arange(len(columns))
    return chunk


def _positions(schedule: Schedule) -> np.ndarray:
    """`[N, C]`: the rank of each microbatch in its column's order of forwards."""
    order = schedule.forward_ticks().argsort(axis=0, kind="stable")
    return order.argsort(axis=0)


def _weight_grad_version(schedule: Schedule) -> np.ndarray:
    """`[T, C]`: a weight gradient reads the version its input gradient read."""
    version = np.full(schedule.weight_grad.shape, IDLE, np.int64)
    read = schedule.backward_versions()
    t, c = np.nonzero(schedule.weight_grad != IDLE)
    k, m = np.divmod(
        schedule.weight_grad[t, c].astype(np.int64), schedule.num_microbatches
    )
    version[t, c] = read[m, c] + k
    return version


def _operations(schedule, cells, version, chunk, position) -> Operations:
    """Gathers a table's cells into lanes. `position` None: an update, which has no microbatch."""
    T, D, N = schedule.num_ticks, schedule.num_devices, schedule.num_microbatches
    found = [
        [
            [c for c in np.flatnonzero(schedule.device == d) if cells[t, c] != IDLE]
            for d in range(D)
        ]
        for t in range(T)
    ]
    lanes = max(len(columns) for row in found for columns in row)
    fields = {
        name: np.full((T, D, lanes), -1 if name == "stage" else 0, np.int32)
        for name in Operations.__annotations__
    }
    for t, d in np.ndindex(T, D):
        for lane, c in enumerate(found[t][d]):
            at = t, d, lane
            fields["stage"][at], fields["chunk"][at], fields["version"][at] = (
                schedule.stage[c],
                chunk[c],
                version[t, c],
            )
            if position is not None:
                k, m = divmod(int(cells[t, c]), N)
                fields["microbatch"][at], fields["position"][at] = (
                    cells[t, c],
                    position[m, c] + N * k,
                )
    return Operations(**fields)


def _lifetimes(
    schedule: Schedule,
    column_of: np.ndarray,
    recompute: bool,
    routes: Sequence[Route],
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Ring -> first and last tick `[N, C]` that a microbatch's slot is in use, `IDLE` where it never is."""
    forward, backward, weight = (
        schedule.forward_ticks(),
        schedule.backward_ticks(),
        schedule.weight_grad_ticks(),
    )
    kept_from = backward if recompute else forward
    lifetimes = {}
    for route in routes:
        sent = forward if route.operation == "forward" else backward
        # A message is readable from the tick after it was sent.
        arrival = np.full(sent.shape, IDLE, np.int64)
        for source, target in route.target.items():
            ticks = sent[:, column_of[source]]
            arrival[:, column_of[target]] = np.where(ticks == IDLE, IDLE, ticks + 1)
        read = forward
        if not schedule.forward_only:
            read = kept_from if route.operation == "forward" else backward
        lifetimes[route.inbox] = arrival, read
    if not schedule.forward_only:
        lifetimes["input_stash"] = (kept_from, backward)
        lifetimes["weight_stash"] = (kept_from, weight)
    if schedule.splits_backward:
        lifetimes["split_residuals"] = (backward, weight)
    return lifetimes


def _least_modulus(schedule: Schedule, position, first, last) -> int:
    """The least K at which microbatches whose positions agree modulo K are never alive together."""
    N, T = schedule.num_microbatches, schedule.num_ticks
    rounds = 1
    if (
        not schedule.synchronous
    ):  # the round repeats every T ticks: unroll until lifetimes cannot meet
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


def _channels(
    schedule: Schedule, column_of, position, operations, routes, outgoing, overlap
) -> tuple[Channel, ...]:
    """Assigns every message to a channel, first fit."""
    T, D, N = schedule.num_ticks, schedule.num_devices, schedule.num_microbatches
    drafts: list[
        dict
    ] = []  # pairs, messages: (tick, source) -> lane, (tick, target) -> inbox
    for route in routes:
        ops = operations[route.operation]
        alike = (route.payload, route.operation if overlap else None)
        for t, d, lane in np.argwhere(ops.stage >= 0).tolist():
            target_stage = route.target.get(int(ops.stage[t, d, lane]))
            if target_stage is None:
                continue
            c = column_of[target_stage]
            target = int(schedule.device[c])
            k, m = divmod(int(ops.microbatch[t, d, lane]), N)
            to = (target_stage, int(position[m, c]) + N * k)
            for draft in drafts:
                free = (t, d) not in draft["lanes"] and (t, target) not in draft[
                    "inboxes"
                ]
                if free and draft["local"] == (target == d) and draft["alike"] == alike:
                    fits = draft["pairs"].get(d, target) == target
                    fits &= all(
                        s == d for s, e in draft["pairs"].items() if e == target
                    )
                    if fits:
                        break
            else:
                draft = {
                    "local": target == d,
                    "alike": alike,
                    "pairs": {},
                    "lanes": {},
                    "inboxes": {},
                }
                drafts.append(draft)
            draft["pairs"][d] = target
            draft["lanes"][t, d] = outgoing.index((route.inbox, lane))
            draft["inboxes"][t, target] = (route.inbox, to)
    channels = []
    for draft in drafts:
        sends, lane = np.zeros(T, bool), np.zeros((T, D), np.int32)
        arrives: dict[str, np.ndarray] = {}
        for (t, d), value in draft["lanes"].items():
            sends[t], lane[t, d] = True, value
        for (t, d), (inbox, to) in draft["inboxes"].items():
            # Read at the start of the next tick: of the next round's first, after the last.
            after, stage_position = (t + 1) % T, np.array(to)
            stage_position[1] -= N * ((t + 1) // T)
            slots = arrives.setdefault(inbox, np.full((T, D, 2), -1, np.int32))
            slots[after, d] = stage_position
        pairs = None if draft["local"] else tuple(sorted(draft["pairs"].items()))
        lanes = tuple(sorted(set(draft["lanes"].values())))
        operation = draft["alike"][1]
        channels.append(Channel(operation, pairs, sends, lane, lanes, arrives))
    return tuple(channels)
