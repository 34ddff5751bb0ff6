"""Rings: places where a device keeps the values that its stages need in later ticks.

A value lives from the tick that writes it to the tick that reads it last. Two values of a device
share a slot if they do not live at the same time. All columns of a device share its slots.

- In a table that drains the lifetimes are those of one minibatch. A greedy colouring of intervals
  gives each microbatch of each column its slot, and needs as many slots as values live at the same
  time at most.
- Another table repeats every T ticks, and lives go over its end. Each column therefore has
  slots of its own. A microbatch's slot is its position in its column's order, modulo the smallest
  number of slots at which no live value is overwritten.
- Slices of one sequence share a slot of what they hand on from one to the next: see `_shared_by_slices`.
- A stash may have fewer slots than values. The others are in host memory in the meantime, and come back into other
  slots: see `jpipe.lowering.spills`.

Letters: T ticks, S stages, C columns, N microbatches, K slots.
"""

import dataclasses
import heapq
from collections.abc import Mapping, Sequence

import numpy as np

from jpipe._util.foreign import shown
from jpipe.lowering.channels import Route, ticks_to_arrive
from jpipe.lowering.spills import Spill, least_slots, spill, stashes_of
from jpipe.schedule import IDLE, Schedule

STASHES = ("input_stash", "weight_stash", "split_residuals")
"""Rings that keep a stage's values from one of its operations to another."""

CARRY, CARRY_GRADIENT = CARRIES = ("carry", "carry_gradient")
"""Rings of what a stage hands on from slice to slice of a sequence, and of the gradient by it."""

RINGS = (*STASHES, *CARRIES)
"""Rings of values of layers, which stay on their stage."""

HEAD_GRADIENT = "head_gradient"
"""The ring of the gradient by the inputs of a head that all devices run together."""


@dataclasses.dataclass(frozen=True)
class Ring:
    """The slots of one ring.

    Attributes:
      num_slots: K, slots on every device.
      slots: the slots of each column, in the order in which its microbatches take them. The
        microbatch at position p of the column's order, which counts on over all rounds, takes
        `slots[column][p % len(slots[column])]`. Empty: the column does not use the ring.
      read_slots: the slots for operations that read. None: they find a microbatch where it was written.
      spill: the part in host memory in the meantime, or None.
      in_tick: whether every value is read last in the tick that writes it.
    """

    num_slots: int
    slots: Sequence[np.ndarray]
    read_slots: Sequence[np.ndarray] | None = None
    spill: Spill | None = None
    in_tick: bool = False

    def depth(self, column: np.ndarray) -> np.ndarray:
        """Number of positions after which a column's slots repeat, at least 1."""
        return np.array([max(len(slots), 1) for slots in self.slots])[column]

    def offset(self, column: np.ndarray) -> np.ndarray:
        """The first slot of a column."""
        return np.array([min(slots, default=0) for slots in self.slots])[column]

    def slot(self, column: np.ndarray, position: np.ndarray, reads: bool = False) -> np.ndarray:
        """The slot of the microbatch at a position of a column's order, for an operation that writes or `reads`.

        Example:
          >>> ring = Ring(3, [np.array([0, 1]), np.array([2])])
          >>> ring.slot(np.array([0, 0, 0, 1]), np.array([0, 1, 2, 7])).tolist()
          [0, 1, 0, 2]
        """
        slots_by_column = self.slots
        if reads and self.read_slots is not None:
            slots_by_column = self.read_slots
        width = max(map(len, slots_by_column), default=0)
        rows = [np.resize(slots if len(slots) else [0], max(width, 1)) for slots in slots_by_column]
        return np.array(rows)[column, position % self.depth(column)]


def make_rings(
    schedule: Schedule,
    position: np.ndarray,
    num_in_column: np.ndarray,
    recompute: bool,
    routes: Sequence[Route],
    head: bool = False,
    stash_slots: int | None = None,
) -> dict[str, Ring]:
    """The rings of a table, by name.

    Args:
      schedule: the table.
      position: int `[N, C]`, rank of each microbatch in its column's order.
      num_in_column: int `[C]`, microbatches of a minibatch that each column runs.
      recompute: keep only the inputs of a stage from its forward to its backward.
      routes: the messages; each has an inbox, which is a ring.
      head: whether all devices run the head together.
      stash_slots: the most slots of a stash that forwards write, on each device; None: enough for all.

    Raises:
      ValueError: if these are too few.
    """
    names = [*(route.inbox for route in routes), *RINGS]
    rings = {name: Ring(0, [np.zeros(0, int)] * schedule.num_columns) for name in names}
    lifetimes = _lifetimes(schedule, recompute, routes)
    if head and not schedule.forward_only:
        lifetimes[HEAD_GRADIENT] = _last_stage_lifetimes(schedule)
    share = _shared_slots if schedule.drains else _slots_of_columns
    for name, (first, last) in lifetimes.items():
        used = (first != IDLE) & (last != IDLE)
        ring = share(schedule, position, num_in_column, first, last, used)
        in_tick = bool((first == last)[used].all())
        rings[name] = dataclasses.replace(ring, in_tick=in_tick)
    if schedule.num_slices > 1:
        for name, lives in _lifetimes_of_carries(schedule).items():
            rings[name] = _shared_by_slices(schedule, position, num_in_column, *lives)
    if stash_slots is not None:
        rings |= _spilled(schedule, position, num_in_column, rings, lifetimes, stash_slots)
    return rings


def _spilled(
    schedule: Schedule,
    position: np.ndarray,
    num_in_column: np.ndarray,
    rings: Mapping[str, Ring],
    lifetimes: Mapping[str, tuple[np.ndarray, np.ndarray]],
    num_slots: int,
) -> dict[str, Ring]:
    """The stashes that forwards write, with at most `num_slots` slots.

    Args:
      schedule: the table.
      position: int `[N, C]`, rank of each microbatch in its column's order.
      num_in_column: int `[C]`, microbatches of a minibatch that each column runs.
      rings: the rings with slots for all microbatches.
      lifetimes: ring -> first and last tick.
      num_slots: number of slots on every device.

    Raises:
      ValueError: if the table needs more slots.
    """
    result: dict[str, Ring] = {}
    failed: list[tuple] = []
    for name in ("input_stash", "weight_stash"):
        ring, (first, last) = rings[name], lifetimes[name]
        if ring.num_slots <= num_slots:
            continue
        used = (first != IDLE) & (last != IDLE)
        longest = int((last - first)[used].max())
        if longest >= schedule.num_ticks:
            raise ValueError(
                "`activations` of `Offload` needs stashes that live shorter than a round of the table. In schedule "
                f"{schedule.name!r} one lives for {longest} ticks, and a round of {schedule.num_microbatches} "
                f"microbatches has {schedule.num_ticks}. Use more microbatches, or leave `activations` out."
            )
        stashes_by_device = stashes_of(schedule, first, last, used)
        spilled = spill(num_slots, schedule.num_ticks, first.shape, stashes_by_device)
        if spilled is None:
            failed += [tuple(stashes.values()) for stashes in stashes_by_device]
            continue
        written, read = (_slots_to_fill(num_in_column, used) for _ in range(2))
        for m, c in np.argwhere(used):
            written[c][position[m, c]] = spilled.written[m, c]
            read[c][position[m, c]] = spilled.read[m, c]
        result[name] = Ring(spilled.num_slots, written, read, spilled.spill)
    if failed:
        least = least_slots(failed, schedule.num_ticks)
        raise ValueError(
            f"`activations={num_slots}` of `Offload` is too few: schedule {shown(schedule.name)} needs {least} slots "
            "of a stash on a device at once, with all others in host memory. Keep that many, or choose a schedule with "
            "fewer stages on a device."
        )
    return result


def _slots_to_fill(num_in_column: np.ndarray, used: np.ndarray) -> list[np.ndarray]:
    """Slots of each column, all 0, one for each of its microbatches; none if the column does not use the ring."""
    return [np.zeros(n if used[:, c].any() else 0, int) for c, n in enumerate(num_in_column)]


def _shared_slots(
    schedule: Schedule,
    position: np.ndarray,
    num_in_column: np.ndarray,
    first: np.ndarray,
    last: np.ndarray,
    used: np.ndarray,
) -> Ring:
    """Assigns slots that all columns of a device share. All arrays but `num_in_column` are `[N, C]`."""
    num_slots = 0
    slots = _slots_to_fill(num_in_column, used)
    for d in range(schedule.num_devices):
        free: list[int] = []
        busy: list[tuple[int, int]] = []  # (last tick, slot)
        num_made = 0
        columns = np.flatnonzero(schedule.device == d)
        ms, cs = np.nonzero(used[:, columns])
        cs = columns[cs]
        arrays = first[ms, cs], cs, ms, last[ms, cs], position[ms, cs]
        for tick, c, _, last_tick, place in sorted(zip(*(a.tolist() for a in arrays))):
            while busy and busy[0][0] < tick:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if free:
                slot = heapq.heappop(free)
            else:
                slot, num_made = num_made, num_made + 1
            heapq.heappush(busy, (last_tick, slot))
            slots[c][place] = slot
        num_slots = max(num_slots, num_made)
    return Ring(num_slots, slots)


def _lifetimes_of_carries(schedule: Schedule) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Ring -> first and last tick `[N, C]` of the use of a slot by a slice."""
    backward = schedule.backward_ticks()
    return {
        CARRY: (schedule.forward_ticks(), schedule.weight_grad_ticks()),
        CARRY_GRADIENT: (backward, backward),
    }


def _shared_by_slices(
    schedule: Schedule, position: np.ndarray, num_in_column: np.ndarray, first: np.ndarray, last: np.ndarray
) -> Ring:
    """Assigns slots that the slices of a sequence share; the first of them stands for all. See `_shared_slots`."""
    k = schedule.num_slices
    by_slice = (schedule.num_row_groups, k, schedule.num_columns)
    ends = np.repeat(last.reshape(by_slice).max(axis=1), k, axis=0)
    begins = np.repeat(first.reshape(by_slice).min(axis=1), k, axis=0)
    is_first = np.arange(schedule.num_microbatches) % k == 0
    used = np.broadcast_to(is_first[:, None], first.shape)
    ring = _shared_slots(schedule, position, num_in_column, begins, ends, used)
    slots = [np.zeros_like(column) for column in ring.slots]
    for c, column in enumerate(ring.slots):
        slots[c][position[:, c]] = np.repeat(column[position[is_first, c]], k)
    return Ring(ring.num_slots, slots)


def _slots_of_columns(
    schedule: Schedule,
    position: np.ndarray,
    num_in_column: np.ndarray,
    first: np.ndarray,
    last: np.ndarray,
    used: np.ndarray,
) -> Ring:
    """Assigns slots of each column apart. All arrays but `num_in_column` are `[N, C]`."""
    next_slot = np.zeros(schedule.num_devices, int)
    slots = [np.zeros(0, int)] * schedule.num_columns
    for c in np.argsort(schedule.stage, kind="stable"):
        rows, d = used[:, c], schedule.device[c]
        depth = 0
        if rows.any():
            mine = position[rows, c], first[rows, c], last[rows, c]
            depth = _least_modulus(num_in_column[c], schedule.num_ticks, *mine)
        slots[c] = next_slot[d] + np.arange(depth)
        next_slot[d] += depth
    return Ring(int(next_slot.max()), slots)


def _lifetimes(
    schedule: Schedule,
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
        sent = schedule.by_stage(sent)
        arrival = np.full(forward.shape, IDLE, np.int64)
        for source, target in route.target.items():
            ticks, column = sent[:, source], schedule.column_of_microbatch[:, target]
            sender = schedule.device[schedule.column_of_microbatch[:, source]]
            way = ticks_to_arrive(schedule, sender, schedule.device[column])
            readable = np.where(ticks == IDLE, IDLE, ticks + way)
            arrival[np.arange(len(ticks)), column] = readable
        read = forward
        if not schedule.forward_only:
            read = stashed if route.operation == "forward" else backward
            read = backward if route.kept else read
        lifetimes[route.inbox] = arrival, read
    if not schedule.forward_only:
        lifetimes["input_stash"] = (stashed, backward)
        lifetimes["weight_stash"] = (stashed, weight_grad)
    if schedule.splits_backward:
        lifetimes["split_residuals"] = (backward, weight_grad)
    return lifetimes


def _last_stage_lifetimes(schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """First and last tick `[N, C]` of the values that the last stage keeps from its forward to its backward."""
    is_last = schedule.stage == schedule.num_stages - 1
    ticks = schedule.forward_ticks(), schedule.backward_ticks()
    first, last = (np.where(is_last, t, IDLE) for t in ticks)
    return first, last


def _least_modulus(
    num_microbatches: int,
    num_ticks: int,
    position: np.ndarray,
    first: np.ndarray,
    last: np.ndarray,
) -> int:
    """The smallest K at which microbatches whose positions agree modulo K never live together.

    Args:
      num_microbatches: N, microbatches of a minibatch that the column runs.
      num_ticks: T.
      position: int `[microbatches]`, ranks in the column's order, 0 to N - 1.
      first: int `[microbatches]`, the tick at which each becomes alive.
      last: int `[microbatches]`, the last tick at which each is alive.
    """
    n, T = num_microbatches, num_ticks
    # A round repeats every T ticks: unroll it until lifetimes can no longer meet.
    rounds = 2 + int(last.max() - first.min()) // T
    never = np.iinfo(np.int64).max // 2
    unrolled = np.full((2, rounds, n), [[[never]], [[-never]]])
    unrolled[0][:, position] = first + T * np.arange(rounds)[:, None]
    unrolled[1][:, position] = last + T * np.arange(rounds)[:, None]
    first, last = unrolled[:, 0]
    begins, ends = unrolled.reshape(2, -1)
    # The position after the last that may begin before a microbatch of the first round ends.
    soonest = np.minimum.accumulate(begins[::-1])[::-1]
    reach = np.searchsorted(soonest, last, side="right")
    meet = np.zeros(int((reach - np.arange(n)).max()), bool)  # by distance of positions
    for distance in range(1, len(meet)):
        later = slice(distance, distance + n)
        meet[distance] = np.any((begins[later] <= last) & (first <= ends[later]))
    modulus = 1
    while meet[modulus::modulus].any():
        modulus += 1
    return modulus
