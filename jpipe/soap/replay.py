"""The replay of a timeline after a change of its tasks: the rules are those of `jpipe.soap.delta`.

The old timeline is replayed from the first change on, in the order of time. Two streams are merged: tasks that are not
known to change, in their old order, and tasks that change, from a queue by their new ready times. A task of the first
stream costs one comparison: it stays as it is if its device is free when it was. A task whose start or predecessors
change moves to the second stream with what depends on it. When most tasks change, all that are left are moved at once.

A search replays millions of times, so the loops read lists by local names and call nothing that they can do themselves.
"""

import dataclasses
import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable

import numpy as np

from jpipe.soap.simulate import TaskTimes
from jpipe.soap.tasks import NOWHERE, Tasks

ROUNDING = 1e-9
"""How far sums of many seconds may be off."""

_SPACING = 512  # tasks of the order between two notes of when devices are free
_FEW = 200  # changed tasks, up to which it does not matter how many change

Entry = tuple[float, int, int]
"""A task in the queue: when it is ready, its key, its number."""


@dataclasses.dataclass
class _Run:
    """A replay that is not complete.

    Attributes:
      times: the new times. Those of tasks that are not replayed yet are the old ones.
      free: when each device is free.
      queue: tasks that change and wait for nothing but their devices.
      within: whether the step may still end within the limit.
    """

    times: TaskTimes
    free: list[float]
    queue: list[Entry]
    within: bool = True


class Replayer:
    """Replays the timeline of a task graph that changes.

    Args:
      tasks: the task graph.
    """

    def __init__(self, tasks: Tasks):
        self._tasks = tasks
        self._notes: list[list[float]] = [[0.0] * (tasks.routes.num_resources + 1)]
        self._cursor = 0  # the place in the old order at which the last replay began
        self._first = 0.0  # when the first of the tasks was ready that the change takes away
        self._round = 0
        self._mark: list[int] = []  # 2 * round: it changes; 2 * round + 1: it is done
        self._watched: list[int] = []
        self._missing: list[int] = []
        self._coming: list[float] = []  # ready times of tasks that change

    def begin(self, removed: Collection[int], timeline: TaskTimes) -> None:
        """Begins a change.

        Args:
          removed: the tasks that the change takes away.
          timeline: the timeline before it.
        """
        self._round += 1
        self._first = min((timeline.ready[task] for task in removed), default=0.0)
        self.grow(timeline)
        for task in removed:
            self._mark[task] = 2 * self._round + 1  # the stream passes over it

    def grow(self, timeline: TaskTimes) -> None:
        """Makes room for tasks that are new."""
        more = len(self._tasks.seconds) - len(self._mark)
        if more:
            for marks in (self._mark, self._watched, self._missing):
                marks += [0] * more
            for times in (timeline.ready, timeline.start, timeline.end, self._coming):
                times += [0.0] * (len(self._mark) - len(times))

    def keep(self) -> None:
        """Makes the timeline of the last replay the one that the next replay starts from."""
        del self._notes[self._cursor // _SPACING + 1 :]

    def run(self, timeline: TaskTimes, fresh: list[int], touched: dict[int, None], limit: float) -> TaskTimes | None:
        """Replays a timeline after the change that began.

        Args:
          timeline: the timeline before it; its times stay as they are.
          fresh: the tasks that are new.
          touched: tasks with other predecessors than before.
          limit: seconds.

        Returns:
          The new timeline; None if it is certain that it takes longer than the limit.
        """
        tasks, mark = self._tasks, self._mark
        if tasks.load.max() * (1 - ROUNDING) > limit:
            return None
        for task in fresh:
            mark[task] = 2 * self._round
        now = self._first_time(timeline, fresh, touched)
        position = self._cursor = bisect_left(timeline.order, now, key=timeline.ready.__getitem__)
        times = TaskTimes(list(timeline.ready), timeline.start[:], timeline.end[:], timeline.order[:position], 0.0)
        run = _Run(times, self._free_before(position, timeline), [])
        move = self._mover(run)
        for task in touched:
            mark[task] = 2 * self._round  # before `move` looks at any of them
        for task in (*touched, *fresh):
            move(task, now, -1)
        self._merge(run, timeline.order, position, move, limit)
        if run.queue and run.within:
            self._finish(run, limit)
        seconds = max(run.free)
        if not run.within or seconds > limit:  # the latest task may be one that stays
            return None
        times.seconds = seconds
        return times

    def _first_time(self, timeline: TaskTimes, fresh: list[int], touched: Iterable[int]) -> float:
        """The first time at which anything may differ. `fresh` is marked already."""
        before, mark = self._tasks.before, self._mark
        ready, end = timeline.ready, timeline.end
        moved = 2 * self._round
        first = min([self._first, *(ready[task] for task in touched)])
        for task in fresh:
            if all(mark[p] != moved for p in before[task]):
                latest = max((end[p] for p in before[task]), default=0.0)
                first = min(first, latest)
        return first

    def _free_before(self, cursor: int, timeline: TaskTimes) -> list[float]:
        """Returns the time at which each device is free before task number `cursor` of the order."""
        notes, order = self._notes, timeline.order
        device, end = self._tasks.device, timeline.end
        wanted = cursor // _SPACING
        while len(notes) <= wanted:
            first = (len(notes) - 1) * _SPACING
            notes.append(_advance(notes[-1], order[first : first + _SPACING], device, end))
        return _advance(notes[wanted], order[wanted * _SPACING : cursor], device, end)

    def _work_left(self, done: list[int]) -> list[float]:
        """Seconds of the tasks that are not done, per device and link; up to rounding."""
        tasks = self._tasks
        resources = [tasks.device[task] + 1 for task in done]
        seconds = [tasks.seconds[task] for task in done]
        left = tasks.load - np.bincount(resources, seconds, len(tasks.load))
        return [*left[1:].tolist(), -math.inf]  # the last is `NOWHERE`

    def _mover(self, run: _Run) -> Callable[[int, float, int], None]:
        """The function that takes a task out of its old place, at a time and a key of a replay."""
        before, key = self._tasks.before, self._tasks.key
        ready, end, queue = run.times.ready, run.times.end, run.queue
        mark, watched, missing, coming = self._mark, self._watched, self._missing, self._coming
        moved, done, this = 2 * self._round, 2 * self._round + 1, self._round
        push = heapq.heappush

        def move(task: int, now: float, now_key: int) -> None:
            """Lets a task wait for the predecessors that are not done."""
            mark[task] = moved
            count, latest = 0, 0.0
            for p in before[task]:
                state = mark[p]
                if state == moved:
                    count += 1
                elif state == done or ready[p] < now or (ready[p] == now and key[p] <= now_key):
                    if end[p] > latest:
                        latest = end[p]
                else:
                    count += 1
                    watched[p] = this
            missing[task] = count
            coming[task] = latest
            if not count:
                push(queue, (latest, key[task], task))

        return move

    def _merge(
        self, run: _Run, order: list[int], position: int, move: Callable[[int, float, int], None], limit: float
    ) -> None:
        """Merges both streams, until none is left of the old order or most tasks change."""
        tasks, times, queue, free = self._tasks, run.times, run.queue, run.free
        after, key, device, seconds = tasks.after, tasks.key, tasks.device, tasks.seconds
        ready, start, end = times.ready, times.start, times.end
        mark, watched, missing, coming = self._mark, self._watched, self._missing, self._coming
        moved, done, this = 2 * self._round, 2 * self._round + 1, self._round
        first, num_changed = position, 0
        append, push, pop = times.order.append, heapq.heappush, heapq.heappop
        ends: tuple[tuple[list, float], ...] = ((order, -1), (ready, math.inf), (mark, 0), (key, -1))
        for entries, last_entry in ends:  # they end the stream
            entries.append(last_entry)
        while True:
            task = order[position]
            state = mark[task]
            if state == done:  # moved forward in time, or removed
                position += 1
                continue
            now = ready[task]
            if queue and (queue[0][0] < now or (queue[0][0] == now and queue[0][1] < key[task])):
                now, now_key, task = pop(queue)
            elif task < 0:
                break
            else:
                position += 1
                now_key = key[task]
                if state == moved:  # it comes later than it did
                    for following in after[task]:
                        if mark[following] < moved:
                            move(following, now, now_key)
                    continue
                if watched[task] != this:
                    resource = device[task]
                    begin = free[resource]
                    if (now if now > begin else begin) == start[task]:
                        if resource >= 0:
                            free[resource] = end[task]
                        append(task)
                        continue
            resource = device[task]
            begin = free[resource]
            if now > begin:
                begin = now
            stop = begin + seconds[task]
            if stop > limit:
                run.within = False
                break
            append(task)
            last = end[task]
            mark[task] = done
            ready[task], start[task], end[task] = now, begin, stop
            if resource >= 0:
                free[resource] = stop
            changed = []
            for following in after[task]:
                if mark[following] == moved:
                    if stop > coming[following]:
                        coming[following] = stop
                    missing[following] -= 1
                    if not missing[following]:
                        push(queue, (coming[following], key[following], following))
                elif stop != last:
                    changed.append(following)
            for following in changed:
                if mark[following] < moved:
                    move(following, now, now_key)
            num_changed += 1
            if num_changed > _FEW and 2 * num_changed > len(times.order) - first:
                # Most tasks change: from here on all others are taken as changed too, which makes the rest simple.
                others = [t for t in order[position:-1] if mark[t] < moved]
                for other in others:
                    mark[other] = moved
                for other in others:
                    move(other, now, now_key)
                break
        for entries, _ in ends:
            entries.pop()

    def _finish(self, run: _Run, limit: float) -> None:
        """Replays the tasks of the queue, and what follows from them, where all tasks that are left change."""
        tasks, times, queue, free = self._tasks, run.times, run.queue, run.free
        after, key, device, seconds = tasks.after, tasks.key, tasks.device, tasks.seconds
        ready, start, end = times.ready, times.start, times.end
        missing, coming = self._missing, self._coming
        append, push, pop = times.order.append, heapq.heappush, heapq.heappop
        left = self._work_left(times.order)
        loose = limit * (1 + ROUNDING)
        while queue and run.within:
            now, _, task = pop(queue)
            resource = device[task]
            begin = free[resource]
            if now > begin:
                begin = now
            taken = seconds[task]
            stop = begin + taken
            rest = left[resource] - taken  # the device has so much to do after it
            left[resource] = rest
            if stop > limit or stop + rest > loose:
                run.within = False
            append(task)
            ready[task], start[task], end[task] = now, begin, stop
            if resource >= 0:
                free[resource] = stop
            for following in after[task]:
                if stop > coming[following]:
                    coming[following] = stop
                missing[following] -= 1
                if not missing[following]:
                    push(queue, (coming[following], key[following], following))


def _advance(free: list[float], order: list[int], device: list[int], end: list[float]) -> list[float]:
    """Returns the time at which each device is free after the tasks of `order`."""
    free = list(free)
    for task in order:
        free[device[task]] = end[task]
    free[NOWHERE] = 0.0
    return free
