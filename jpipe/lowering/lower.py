"""A table, lowered to the static integers that the engine needs.

- *Operations*: for each tick, device and lane, the stage to run, its microbatch and the versions
  that it reads. A device that runs several columns in one tick has as many lanes.
- *Rings*: arrays that keep values for later ticks in slots, see `jpipe.lowering.rings`.
- *Channels*: the permutations of devices that the messages need, see `jpipe.lowering.channels`.

Letters: T ticks, D devices, S stages, C columns, N microbatches.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jpipe.lowering.arrivals import RECEIVED_BEFORE, Arrivals, arrivals
from jpipe.lowering.channels import Channel, Route, assign_channels, neighbours
from jpipe.lowering.everywhere import Follows, everywhere, head_after_update
from jpipe.lowering.joint_updates import joint_updates
from jpipe.lowering.norms import NormTable, norm_table
from jpipe.lowering.operations import Operations, all_operations
from jpipe.lowering.rings import CARRIES, HEAD_GRADIENT, RINGS, STASHES, Ring, make_rings
from jpipe.lowering.spills import Spill
from jpipe.lowering.target import CPU, Target
from jpipe.lowering.versions import VersionRows, version_rows
from jpipe.schedule import IDLE, Schedule, newest_version

__all__ = [
    "CARRIES",
    "HEAD_GRADIENT",
    "RINGS",
    "STASHES",
    "Follows",
    "Lowered",
    "Operations",
    "Route",
    "lower",
    "neighbours",
]


class TickRange(NamedTuple):
    """Consecutive ticks of a table.

    Attributes:
      start, stop: the first tick, and the one after the last.
      operations: names of the operations that may run.
    """

    start: int
    stop: int
    operations: frozenset[str]

    @property
    def ticks(self) -> range:
        """The ticks."""
        return range(self.start, self.stop)


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A schedule as static integers.

    Attributes:
      schedule: the table; if it is synchronous, with all updates in one tick.
      operations: "forward", "backward", "weight_grad", "update" -> `Operations`. With several
        columns per stage also "commit", see `commit_cells`; and those that all devices run together.
      channels: the channels.
      outgoing: (inbox, lane) of each output that a device may send.
      rings: name -> ring.
      num_chunks: the largest number of stages on any device.
      homes: for each unit of layers that all devices update together: the stage whose updates it follows.
      copies: device of every copy of each stage, and position of the stage among the
        device's stages.
      num_in_column: int `[C]`, microbatches of a minibatch that each column runs.
      rows: the rows of the versions of weights.
      num_batches: number of the latest minibatches that are read, including the minibatch of this
        round.
      head_after_update: whether a head that all devices run comes after the update of a tick.
      num_weights: number of the latest minibatches whose weight is read, which divides the sums of the loss; 0 if
        the loss is a mean.
      norms: the gradients that norms over all stages count; None in forward-only tables.
      drain_rounds: rounds without new microbatches after which nothing is in flight.
      target: facts of the platform.
    """

    schedule: Schedule
    operations: Mapping[str, Operations]
    channels: tuple[Channel, ...]
    outgoing: tuple[tuple[str, int], ...]
    rings: Mapping[str, Ring]
    num_chunks: int
    homes: tuple[int, ...]
    copies: tuple[tuple[tuple[int, int], ...], ...]
    num_in_column: np.ndarray
    rows: VersionRows
    num_batches: int
    head_after_update: bool
    num_weights: int
    norms: NormTable | None
    drain_rounds: int
    target: Target

    @property
    def tick_order(self) -> tuple[str, ...]:
        """The operations of a tick, in the order in which a device runs them. A table may lack some."""
        backwards = "backward", "weight_grad", "embed_backward"
        if self.head_after_update:
            return "embed", "forward", "commit", *backwards, "update", "head"
        return "embed", "forward", "commit", "head", *backwards, "update"

    @property
    def placement(self) -> tuple[tuple[int, int], ...]:
        """Device and position of copy 0 of each stage."""
        return tuple(stage_copies[0] for stage_copies in self.copies)

    @property
    def owner_homes(self) -> tuple[int, ...]:
        """The stage that each of `Stages.owners` updates with."""
        return (*range(len(self.copies)), *self.homes)

    @property
    def owner_copies(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """`copies` of each of `Stages.owners`: a unit is on every device."""
        everywhere = tuple((d, 0) for d in range(self.schedule.num_devices))
        return (*self.copies, *[everywhere] * len(self.homes))

    @property
    def phases(self) -> list[TickRange]:
        """Cuts the table into ticks with forwards and ticks without, if no backward runs before the last forward.

        So a table like GPipe's is two loops, neither of which has branches or messages for operations of the other.
        """
        names = set(self.operations)
        T, first = self.schedule.num_ticks, {"forward", "commit"}
        busy = {n: np.any(o.stage >= 0, axis=(1, 2)) for n, o in self.operations.items()}
        end = 1 + int(np.flatnonzero(busy["forward"]).max())
        mixed = any(busy[name][:end].any() for name in names - first)
        all_run_together = names - first - {"backward", "weight_grad", "update"}
        if mixed or end == T or all_run_together or not self.schedule.drains:
            return [TickRange(0, T, frozenset(names))]
        return [
            TickRange(0, end, frozenset(names & first)),
            TickRange(end, T, frozenset(names - first)),
        ]

    @functools.cached_property
    def arrivals(self) -> dict[str, Arrivals]:
        """Operation -> the messages that a device receives before it in a branch; without an entry all devices receive
        all of them.
        """
        if not self.target.receives_in_branches:
            return {}
        before = {name: arrivals(self.channels, name) for name in RECEIVED_BEFORE}
        return {name: messages for name, messages in before.items() if messages is not None}

    @property
    def pairs(self) -> set[tuple[int, int]]:
        """The stages of a forward and a backward that a device runs in one tick; none if one reads what the other
        writes in some tick, or several columns of a device run in one.
        """
        forward, backward = self.operations["forward"], self.operations["backward"]
        if forward.num_lanes > 1 or backward.num_lanes > 1 or self.schedule.has_copies:
            return set()
        both = (forward.stage >= 0) & (backward.stage >= 0)
        of_one = both & (forward.column == backward.column) & (forward.microbatch == backward.microbatch)
        return set() if of_one.any() else set(zip(forward.stage[both].tolist(), backward.stage[both].tolist()))

    @property
    def updates(self) -> np.ndarray:
        """bool `[T]`, whether any device updates."""
        return np.any(self.operations["update"].stage >= 0, axis=(1, 2))

    @property
    def spills(self) -> dict[str, Spill]:
        """Ring -> its traffic with host memory."""
        return {n: ring.spill for n, ring in self.rings.items() if ring.spill}

    @property
    def num_slots(self) -> dict[str, int]:
        """Ring -> number of slots on every device."""
        return {name: ring.num_slots for name, ring in self.rings.items()}


def lower(
    schedule: Schedule,
    recompute: bool = False,
    routes: Sequence[Route] | None = None,
    overlap: bool = False,
    target: Target = CPU,
    together: Mapping[str, Follows] | None = None,
    stash_slots: int | None = None,
    reads_stale: bool = False,
    weighted: bool = False,
) -> Lowered:
    """Lowers a legal table.

    Args:
      schedule: the table; `check` must have passed.
      recompute: keep only the inputs of a stage from its forward to its backward.
      routes: the messages; None: `neighbours`, all of one payload.
      overlap: whether messages of forwards and messages of backwards travel at different times, and
        therefore never share a channel.
      target: facts of the platform.
      together: name of each operation that all devices run together -> the operation that it follows.
      stash_slots: the most microbatches of which a device keeps a stash, the others go to host memory; None: it
        keeps all.
      reads_stale: whether updates read the weights that their gradients were computed at.
      weighted: whether the loss is a sum that the weight of the minibatch divides.

    Returns:
      The `Lowered` table.

    Raises:
      ValueError: if `stash_slots` or the table's microbatches are too few.
    """
    schedule = joint_updates(schedule)
    if routes is None:
        routes = neighbours(schedule.num_stages)
    columns, chunk = schedule.column_of_stage, _chunks(schedule)
    position = _positions(schedule)
    num_in_column = (schedule.forward != IDLE).sum(axis=0)
    operations = all_operations(schedule, chunk, position, num_in_column)
    newest, last_tick = _newest_and_last_tick(schedule)
    outgoing = tuple(
        (route.inbox, lane) for route in routes if route.target for lane in range(operations[route.operation].num_lanes)
    )
    together = together or {}
    head = "head" in together
    copies = tuple(
        tuple((int(schedule.device[c]), int(chunk[c])) for c, *_ in stage_columns)
        for stage_columns in schedule.columns_of_copies
    )
    num_chunks = int(chunk.max()) + 1
    return Lowered(
        schedule=schedule,
        operations={**operations, **everywhere(operations, together)},
        channels=assign_channels(schedule, position, num_in_column, operations, routes, outgoing, overlap),
        outgoing=outgoing,
        rings=make_rings(schedule, position, num_in_column, recompute, routes, head, stash_slots),
        num_chunks=num_chunks,
        homes=tuple(follows.home for follows in together.values() if follows.operation == "update"),
        copies=copies,
        num_in_column=num_in_column,
        rows=version_rows(schedule, copies, num_chunks, newest[columns], reads_stale),
        num_batches=kept_minibatches(schedule, recompute or "embed_backward" in together),
        head_after_update=head and head_after_update(schedule),
        num_weights=kept_weights(schedule, head) if weighted else 0,
        norms=None if schedule.forward_only else norm_table(schedule),
        drain_rounds=last_tick // schedule.num_ticks,
        target=target,
    )


# -- Versions and minibatches


def _newest_and_last_tick(schedule: Schedule) -> tuple[np.ndarray, int]:
    """Newest versions between rounds, `[C]`, and the last tick of any microbatch of a round."""
    if schedule.forward_only:
        return np.zeros(schedule.num_columns, int), schedule.num_ticks - 1
    updated = schedule.update_ticks_of_round()
    newest = newest_version(np.zeros(schedule.num_columns, int), updated, schedule.num_ticks)
    return newest, int(max(schedule.weight_grad_ticks().max(), updated.max()))


def kept_minibatches(schedule: Schedule, backwards: bool) -> int:
    """Number of the latest minibatches that the first and the last stage read, with this round's.

    Args:
      schedule: the table.
      backwards: whether backwards read the minibatch too.
    """
    ends = np.isin(schedule.stage, (0, schedule.num_stages - 1))
    readers = [schedule.forward, schedule.backward] if backwards else [schedule.forward]
    return max(_num_minibatches(schedule, cells[:, ends]) for cells in readers)


def kept_weights(schedule: Schedule, head: bool) -> int:
    """Number of the latest minibatches whose loss still has a gradient to take, with this round's.

    Args:
      schedule: the table.
      head: whether a head that all devices run takes it, with the forward of the last stage, and not with the backward.
    """
    cells = schedule.forward if head else schedule.backward
    return _num_minibatches(schedule, cells[:, schedule.stage == schedule.num_stages - 1])


def _num_minibatches(schedule: Schedule, cells: np.ndarray) -> int:
    """Number of the latest minibatches that have a microbatch in some cells, with this round's."""
    oldest = int(cells[cells != IDLE].min(initial=0))
    return 1 - oldest // schedule.num_microbatches


# -- Operations


def _chunks(schedule: Schedule) -> np.ndarray:
    """Position of each column's stage among its device's stages, in order of stage, `[C]`."""
    chunk = np.zeros(schedule.num_columns, int)
    for d in range(schedule.num_devices):
        columns = np.flatnonzero(schedule.device == d)
        _, chunk[columns] = np.unique(schedule.stage[columns], return_inverse=True)
    return chunk


def _positions(schedule: Schedule) -> np.ndarray:
    """Rank of each microbatch in its column's order of forwards, `[N, C]`; any number without a forward."""
    ticks = schedule.forward_ticks()
    never = np.iinfo(ticks.dtype).max
    order = np.where(ticks == IDLE, never, ticks).argsort(axis=0, kind="stable")
    return order.argsort(axis=0)


def mixes_minibatches(schedule: Schedule, stage: int) -> bool:
    """Returns whether copies of a stage run forwards of two minibatches in turn.

    Their statistics would be added up, so no layer of the stage may have mutable state.
    """
    if not schedule.has_copies or schedule.synchronous:
        return False
    ticks = schedule.by_stage(schedule.forward_ticks())[:, stage]
    return bool(ticks.max() >= ticks.min() + schedule.num_ticks)
