"""Stashes that go to host memory between the forward and the backward of a microbatch.

A ring on a device has K slots. A microbatch whose stash does not stay takes this way:

    tick f      forward writes its slot; at the end of the tick the slot is copied to the staging slot
    tick f + 1  the staging slot goes to a slot in host memory
    ...
    tick b - 1  the slot in host memory comes to the device; at the end of the tick it is copied to a slot
    tick b      backward reads this slot

So transfers are under way while the device computes, and each takes one tick. A device sends at most one
microbatch in a tick, and fetches at most one.

The table says when each stash is read, so the choice is made before the first step. It is Belady's rule
(1966): where more than K stashes are on the device, the one that is read last goes. All stashes of a ring have
one size, and each comes back once, so no other choice moves fewer bytes. A weight gradient in a later tick than its
backward reads the slot again, which stays on the device until then.

An asynchronous table repeats, and lives go over its end. Its ticks are therefore a circle, and a microbatch has the
same slots in every round. A stash may not live longer than a round. On a circle the rule is tried from several ticks,
and may still
move a stash more than is needed: in random columns of up to seven microbatches it does so in one of 100.

Letters: T ticks, D devices, C columns, N microbatches, K slots on a device, H slots in host memory.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from jpipe._table.intervals import covering
from jpipe.schedule import Schedule

Key = TypeVar("Key")
"""Of an interval."""

SHORTEST = 3
"""The fewest ticks from the forward to the backward of a stash that goes to host memory."""


@dataclasses.dataclass(frozen=True)
class Spill:
    """The transfers of a ring to and from host memory, int `[T, D]` each; -1: nothing.

    Attributes:
      num_slots: H, slots in host memory.
      spilled: bool `[N, C]`, the microbatches whose stashes go there.
      leaves: the slot that is copied to the staging slot at the end of the tick.
      stores: the slot in host memory that takes the staging slot.
      loads: the slot in host memory that comes to the device.
      arrives: the slot of the device that takes it at the end of the tick.
    """

    num_slots: int
    spilled: np.ndarray
    leaves: np.ndarray
    stores: np.ndarray
    loads: np.ndarray
    arrives: np.ndarray


class Stash(NamedTuple):
    """A stash of one microbatch. Ticks count on over the end of a table that repeats.

    Attributes:
      first: the tick that writes it.
      back: the first tick that reads it.
      last: the last tick that reads it.
    """

    first: int
    back: int
    last: int

    def intervals(self, spilled: bool) -> list[tuple[int, int]]:
        """Intervals in slots of the device, first and last half tick: 2 t computes, 2 t + 1 is the end of tick t."""
        if not spilled:
            return [(2 * self.first, 2 * self.last)]
        return [
            (2 * self.first, 2 * self.first + 1),
            (2 * self.back - 1, 2 * self.last),
        ]

    @property
    def away(self) -> tuple[int, int]:
        """The half ticks between these two intervals, first and last: its time in host memory, if it goes there."""
        return 2 * self.first + 2, 2 * self.back - 2


def choose(stashes: Sequence[Stash], num_slots: int, num_ticks: int) -> set[int] | None:
    """Chooses the stashes that go to host memory, so that at most `num_slots` are on the device; None: not possible.

    Args:
      stashes: the stashes of one round of a table, each of at most T ticks.
      num_slots: K.
      num_ticks: T, after which the table repeats, and with it the stashes.
    """
    if not stashes:
        return set()
    wraps = any(stash.first // num_ticks != stash.last // num_ticks for stash in stashes)
    whole = [interval for stash in stashes for interval in stash.intervals(False)]
    in_use = _in_use(whole, 2 * num_ticks)
    begins = [0]
    if wraps:
        # A circle has no first tick, and which one the rule begins with makes a difference. What is in flight repeats:
        # after as many stashes as live at once, the rest is mostly the same.
        begins = sorted(stash.first % num_ticks for stash in stashes)
        begins = begins[: int(in_use.max()) + 1]
    choices = [_chosen_from(stashes, num_slots, in_use.copy(), begin) for begin in begins]
    return min((chosen for chosen in choices if chosen is not None), key=len, default=None)


def _chosen_from(stashes: Sequence[Stash], num_slots: int, in_use: np.ndarray, begin: int) -> set[int] | None:
    """Runs `choose` by Belady's rule, beginning with a tick of the round.

    Args:
      stashes: the stashes of one round.
      num_slots: K.
      in_use: int `[2 T]`, stashes on the device in each half tick, with none in host memory; is written to.
      begin: the tick.
    """
    spilled: set[int] = set()
    circle = len(in_use)
    T = circle // 2
    first, back, _ = np.array(stashes).T
    away_from, away_to = np.array([stash.away for stash in stashes]).T
    away_for = away_to - away_from + 1
    movable = back >= first + SHORTEST
    while True:
        over = np.flatnonzero(np.roll(in_use, -2 * begin) > num_slots)
        if not over.size:
            return spilled
        now = over[0] + 2 * begin
        candidates = movable & ((now - away_from) % circle < away_for)
        if not candidates.any():
            return None
        until_back = np.where(candidates, (2 * back - now) % circle, -1)
        latest = int(until_back.argmax())
        spilled.add(latest)
        in_use[(away_from[latest] + np.arange(away_for[latest])) % circle] -= 1
        # A device sends and fetches one stash in a tick.
        movable &= (first - first[latest]) % T != 0
        movable &= (back - back[latest]) % T != 0


def _in_use(intervals: Iterable[tuple[int, int]], circle: int) -> np.ndarray:
    """Counts the intervals, first and last, that contain each point of a circle."""
    first, last = np.array([*intervals], int).reshape(-1, 2).T
    return covering(first, last, circle)


class Assignment(NamedTuple):
    """The stashes of a device in slots.

    Attributes:
      spilled: the stashes that go to host memory.
      on_device: `(stash, part)` -> slot; the part is 0 from its forward on, and 1 from its way back on.
      on_host: stash -> slot in host memory.
    """

    spilled: set[int]
    on_device: dict[tuple[int, int], int]
    on_host: dict[int, int]


@functools.lru_cache(256)  # several rings of a device may have the same stashes
def assign(stashes: tuple[Stash, ...], num_slots: int, num_ticks: int) -> Assignment | None:
    """Assigns slots to stashes, at most `num_slots` on the device; None: not possible. Arguments as of `choose`."""
    circle = 2 * num_ticks
    # Where lives go over the end of a round, they may need more slots than are in use at once.
    for most_at_once in range(num_slots, 0, -1):
        spilled = choose(stashes, most_at_once, num_ticks)
        if spilled is None:
            return None
        on_device = _coloured(
            {
                (i, part): interval
                for i, stash in enumerate(stashes)
                for part, interval in enumerate(stash.intervals(i in spilled))
            },
            circle,
        )
        if max(on_device.values(), default=0) < num_slots:
            away = {i: stashes[i].away for i in spilled}
            return Assignment(spilled, on_device, _coloured(away, circle))
    return None


def least_slots(stashes: Sequence[tuple[Stash, ...]], num_ticks: int) -> int:
    """The fewest slots with which `assign` finds slots for the stashes of every device."""
    num_slots = 1
    while any(assign(device_stashes, num_slots, num_ticks) is None for device_stashes in stashes):
        num_slots += 1
    return num_slots


def stashes_of(
    schedule: Schedule, first: np.ndarray, last: np.ndarray, used: np.ndarray
) -> list[dict[tuple[int, int], Stash]]:
    """Cell `(m, c)` -> the stash of microbatch m of column c, for each device; all arrays are `[N, C]`."""
    ticks = first, schedule.backward_ticks(), last
    return [
        {(int(m), int(c)): Stash(*(int(a[m, c]) for a in ticks)) for m, c in np.argwhere(used & (schedule.device == d))}
        for d in range(schedule.num_devices)
    ]


def _coloured(intervals: Mapping[Key, tuple[int, int]], circle: int) -> dict[Key, int]:
    """A slot for each interval, first and last point, on a circle. Where none goes around, as few slots as are in use
    at once.
    """
    cut = int(np.argmin(_in_use(intervals.values(), circle)))
    arcs = sorted(((first - cut) % circle, last - first, n) for n, (first, last) in enumerate(intervals.values()))
    # Those that go over the cut are there at once, and each is in its slot before the others and after them.
    over = [arc for arc in arcs if arc[0] + arc[1] >= circle]
    busy_until = [start + length - circle for start, length, _ in over]
    busy_from = [start for start, *_ in over]
    numbers = {n: slot for slot, (*_, n) in enumerate(over)}
    for start, length, n in arcs:
        if n in numbers:
            continue
        fits = [
            (busy_from[slot], slot)
            for slot, until in enumerate(busy_until)
            if until < start and start + length < busy_from[slot]
        ]
        if not fits:
            busy_until.append(0)
            busy_from.append(circle)
            fits = [(circle, len(busy_until) - 1)]
        _, slot = min(fits)
        busy_until[slot] = start + length
        numbers[n] = slot
    return {key: numbers[n] for n, key in enumerate(intervals)}


class SpilledSlots(NamedTuple):
    """The slots of a ring on the devices and in host memory.

    Attributes:
      num_slots: number of slots on every device.
      written: int `[N, C]`, the slot that a microbatch's stash is written to.
      read: int `[N, C]`, the slot that it is read from.
      spill: the part in host memory.
    """

    num_slots: int
    written: np.ndarray
    read: np.ndarray
    spill: Spill


def spill(
    num_slots: int,
    num_ticks: int,
    shape: tuple[int, int],
    stashes_by_device: Sequence[Mapping[tuple[int, int], Stash]],
) -> SpilledSlots | None:
    """Chooses slots of a ring, the same in every round, at most `num_slots` on a device; None if a device needs more.

    Args:
      num_slots: K.
      num_ticks: T.
      shape: N, C.
      stashes_by_device: the stashes of each device.
    """
    written, read = np.zeros((2, *shape), int)
    is_spilled = np.zeros(shape, bool)
    leaves, stores, loads, arrives = np.full((4, num_ticks, len(stashes_by_device)), -1)
    num_on_device = num_on_host = 0
    for d, device_stashes in enumerate(stashes_by_device):
        assigned = assign(tuple(device_stashes.values()), num_slots, num_ticks)
        if assigned is None:
            return None
        on_device, on_host = assigned.on_device, assigned.on_host
        num_on_device = max([num_on_device, *(n + 1 for n in on_device.values())])
        num_on_host = max([num_on_host, *(n + 1 for n in on_host.values())])
        for i, (cell, stash) in enumerate(device_stashes.items()):
            written[cell] = read[cell] = on_device[i, 0]
            if i in assigned.spilled:
                is_spilled[cell] = True
                read[cell] = on_device[i, 1]
                leaves[stash.first % num_ticks, d] = on_device[i, 0]
                stores[(stash.first + 1) % num_ticks, d] = on_host[i]
                loads[(stash.back - 1) % num_ticks, d] = on_host[i]
                arrives[(stash.back - 1) % num_ticks, d] = on_device[i, 1]
    ring_spill = Spill(num_on_host, is_spilled, leaves, stores, loads, arrives)
    return SpilledSlots(num_on_device, written, read, ring_spill)
