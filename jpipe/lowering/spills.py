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

Letters: T ticks, D devices, C columns, N microbatches, K slots on a device, H slots in host memory.
"""

import dataclasses
import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jpipe.schedule import Schedule

SHORTEST = 3
"""The fewest ticks from the forward to the backward of a stash that goes to host memory."""


@dataclasses.dataclass(frozen=True)
class Spill:
    """What a ring sends to host memory, and what it fetches, int `[T, D]` each; -1: nothing.

    Attributes:
      num_slots: H, slots in host memory.
      spilled: bool `[N, C]`, whose stashes go there.
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

    @property
    def num_stored(self) -> int:
        """Stashes that go to host memory in a step, on all devices."""
        return int((self.stores >= 0).sum())


class Stash(NamedTuple):
    """A stash of one microbatch.

    Attributes:
      first: the tick that writes it.
      back: the first tick that reads it.
      last: the last tick that reads it.
    """

    first: int
    back: int
    last: int

    def intervals(self, spilled: bool) -> list[tuple[int, int]]:
        """When it is in slots of the device, first and last half tick: 2 t computes, 2 t + 1 is the end of tick t."""
        if not spilled:
            return [(2 * self.first, 2 * self.last)]
        return [
            (2 * self.first, 2 * self.first + 1),
            (2 * self.back - 1, 2 * self.last),
        ]


def choose(stashes: Sequence[Stash], num_slots: int) -> set[int] | None:
    """The stashes that go to host memory, so that at most `num_slots` are on the device; None: not possible."""
    spilled: set[int] = set()
    if not stashes:
        return spilled
    end = 2 * max(stash.last for stash in stashes) + 2
    while True:
        change = np.zeros(end + 1, int)
        for i, stash in enumerate(stashes):
            for first, last in stash.intervals(i in spilled):
                change[first] += 1
                change[last + 1] -= 1
        over = np.flatnonzero(change.cumsum() > num_slots)
        if not over.size:
            return spilled
        candidates = [
            i
            for i, stash in enumerate(stashes)
            if i not in spilled
            and stash.back >= stash.first + SHORTEST
            and 2 * stash.first + 1 < over[0] < 2 * stash.back - 1
            and not any(
                stash.first == stashes[j].first or stash.back == stashes[j].back
                for j in spilled
            )
        ]
        if not candidates:
            return None
        spilled.add(max(candidates, key=lambda i: stashes[i].back))


def least_slots(stashes: Sequence[Sequence[Stash]]) -> int:
    """The fewest slots with which `choose` finds an answer for the stashes of every device."""
    num_slots = 1
    while any(choose(of_device, num_slots) is None for of_device in stashes):
        num_slots += 1
    return num_slots


def stashes_of(
    schedule: Schedule, first: np.ndarray, last: np.ndarray, used: np.ndarray
) -> list[dict[tuple[int, int], Stash]]:
    """For each device, cell `(m, c)` -> the stash of microbatch m of column c; all arrays are `[N, C]`."""
    ticks = first, schedule.backward_ticks(), last
    return [
        {
            (int(m), int(c)): Stash(*(int(a[m, c]) for a in ticks))
            for m, c in np.argwhere(used & (schedule.device == d))
        }
        for d in range(schedule.num_devices)
    ]


def _coloured(intervals: Iterable[tuple[int, int, tuple]]) -> dict[tuple, int]:
    """A slot for each interval, `(first, last, key)`, as few as are in use at once."""
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    slots: dict[tuple, int] = {}
    num_made = 0
    for first, last, key in sorted(intervals):
        while busy and busy[0][0] < first:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            slot = heapq.heappop(free)
        else:
            slot, num_made = num_made, num_made + 1
        heapq.heappush(busy, (last, slot))
        slots[key] = slot
    return slots


class SpilledSlots(NamedTuple):
    """The slots of a ring on the devices, and what is in host memory.

    Attributes:
      num_slots: on every device.
      written: int `[N, C]`, the slot that a microbatch's stash is written to.
      read: int `[N, C]`, the slot that it is read from.
      spill: what goes to host memory.
    """

    num_slots: int
    written: np.ndarray
    read: np.ndarray
    spill: Spill


def spill(
    num_slots: int,
    num_ticks: int,
    shape: tuple[int, int],
    of_devices: Sequence[Mapping[tuple[int, int], Stash]],
) -> SpilledSlots | None:
    """Slots of a ring of a synchronous table, at most `num_slots` on each device; None if a device needs more.

    Args:
      num_slots: K.
      num_ticks: T.
      shape: N, C.
      of_devices: for each device its stashes.
    """
    written, read = np.zeros((2, *shape), int)
    is_spilled = np.zeros(shape, bool)
    leaves, stores, loads, arrives = np.full((4, num_ticks, len(of_devices)), -1)
    num_on_device = num_on_host = 0
    for d, of_device in enumerate(of_devices):
        cells, stashes = list(of_device), list(of_device.values())
        spilled = choose(stashes, num_slots)
        if spilled is None:
            return None
        on_device, on_host = [], []
        for i, stash in enumerate(stashes):
            for n, (start, stop) in enumerate(stash.intervals(i in spilled)):
                on_device.append((start, stop, (i, n)))
            if i in spilled:
                on_host.append((stash.first + 1, stash.back - 1, (i,)))
        slots, host_slots = _coloured(on_device), _coloured(on_host)
        num_on_device = max([num_on_device, *(n + 1 for n in slots.values())])
        num_on_host = max([num_on_host, *(n + 1 for n in host_slots.values())])
        for i, (cell, stash) in enumerate(zip(cells, stashes)):
            written[cell] = read[cell] = slots[i, 0]
            if i in spilled:
                is_spilled[cell] = True
                read[cell] = slots[i, 1]
                leaves[stash.first, d] = slots[i, 0]
                stores[stash.first + 1, d] = host_slots[(i,)]
                loads[stash.back - 1, d] = host_slots[(i,)]
                arrives[stash.back - 1, d] = slots[i, 1]
    of_ring = Spill(num_on_host, is_spilled, leaves, stores, loads, arrives)
    return SpilledSlots(num_on_device, written, read, of_ring)
