"""Delta simulation (FlexFlow, section 5.3, algorithm 2): the timeline after a change, from the timeline before it.

The result is that of `full_simulation` to the last bit. On every device the order of the tasks is that of `(ready,
key)`, every task starts at the later of its ready time and the end of the one before, and takes some time. These rules
have one solution, and both simulations find it.

The old timeline is replayed from the first change on, in the order of time. Two streams are merged: tasks that are not
known to change, in their old order, and tasks that change, from a queue by their new ready times. A task of the first
stream costs one
comparison: it stays as it is if its device is free when it was. A task whose start or predecessors change moves to the
second stream with what depends on it. When most tasks change, all that are left are moved at once.
"""

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jpipe.soap.costs import Costs
from jpipe.soap.graph import OperatorGraph
from jpipe.soap.machine import Machine
from jpipe.soap.shards import Shards
from jpipe.soap.simulate import TaskTimes, full_simulation, without_collection
from jpipe.soap.strategy import Config
from jpipe.soap.tasks import NOWHERE, TaskBlock, Tasks

_SPACING = 512  # tasks of the order between two notes of when devices are free
_FEW = 200  # changed tasks, up to which it does not matter how many change
_ROUNDING = 1e-9  # how far sums of many seconds may be off


class Simulator:
    """A strategy with its timeline, in which the configurations of operators can be changed.

    `try_change` and `try_changes` simulate a change; `keep` or `undo` must follow.

    Args:
      graph, machine, costs, strategy, sync, optimizer_arrays, shards: see `Tasks`.

    Attributes:
      tasks: the task graph, with the change that was tried.
      timeline: its timeline.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        machine: Machine,
        costs: Costs,
        strategy: Sequence[Config],
        *,
        sync: str = "ring",
        optimizer_arrays: int = 2,
        shards: Shards | None = None,
    ):
        self.tasks = Tasks(
            graph,
            machine,
            costs,
            strategy,
            sync=sync,
            optimizer_arrays=optimizer_arrays,
            shards=shards,
        )
        self.timeline = full_simulation(self.tasks)
        self._num_free = self.tasks.routes.num_resources + 1
        self._notes: list[list[float]] = [[0.0] * self._num_free]
        self._round = 0
        self._mark: list[int] = []  # 2 * round: it changes; 2 * round + 1: it is done
        self._watched: list[int] = []
        self._missing: list[int] = []
        self._coming: list[float] = []  # ready times of tasks that change
        self._old: _Change | None = None

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.timeline.seconds

    @property
    def memory_bytes(self) -> list[int]:
        """Bytes on each device."""
        return self.tasks.memory

    @property
    def strategy(self) -> tuple[Config, ...]:
        return tuple(self.tasks.strategy)

    def try_change(
        self,
        operator: int,
        config: Config,
        limit: float = math.inf,
        memory_limit: float = math.inf,
        sent_limit: float = math.inf,
    ) -> float:
        """Changes the configuration of one operator.

        Args:
          operator: its number.
          config: its split from now on.
          limit: seconds. When it is certain that the step takes longer, the simulation ends; only `undo` is allowed
            then.
          memory_limit: bytes. If a device needs more, nothing is simulated, and again only `undo` is allowed.
          sent_limit: bytes. The same if messages carry more, all together.

        Returns:
          Seconds of the step, or infinity if a limit is passed.
        """
        if limit < math.inf:  # what cannot be within the limit is not built at all
            load = _least_load(self.tasks, operator, config)
            if load.max() * (1 - _ROUNDING) > limit:
                assert self._old is None, "keep or undo the last change first"
                self._old = _Change({}, self.timeline, [])
                return math.inf
        return self.try_changes({operator: config}, limit, memory_limit, sent_limit)

    @without_collection
    def try_changes(
        self,
        configs: Mapping[int, Config],
        limit: float = math.inf,
        memory_limit: float = math.inf,
        sent_limit: float = math.inf,
    ) -> float:
        """Changes the configurations of several operators together: as `try_change`.

        Args:
          configs: operator -> its split from now on.
          limit, memory_limit, sent_limit: see `try_change`.
        """
        assert self._old is None, "keep or undo the last change first"
        tasks = self.tasks
        # Operators before the edges and weights at them, as in `Tasks`.
        numbers = sorted({number for operator in configs for number in tasks.blocks_of(operator)})
        old = {operator: tasks.strategy[operator] for operator in configs}
        change = self._old = _Change(old, self.timeline, numbers)
        self._round += 1
        touched = self._unlink(change)
        for operator, config in configs.items():
            tasks.strategy[operator] = config
        fresh: list[int] = []
        for number in numbers:
            block = tasks.build(number)
            change.new_blocks.append(block)
            fresh += block.tasks
        if tasks.sent_bytes > sent_limit or (memory_limit < math.inf and max(tasks.memory) > memory_limit):
            return math.inf
        self._grow()
        is_new = set(fresh)
        for block in change.new_blocks:
            for _, b in block.links:
                if b not in is_new:
                    touched[b] = None
        return self._replay(change, fresh, touched, limit)

    def keep(self) -> None:
        """Makes the change final."""
        change = self._old
        assert change is not None and change.finished, "there is no change to keep"
        for block in change.old_blocks:
            self.tasks.unused += block.tasks
        del self._notes[change.cursor // _SPACING + 1 :]
        self._old = None

    def undo(self) -> None:
        """Takes the change back."""
        change, tasks = self._old, self.tasks
        assert change is not None, "there is no change to undo"
        if not change.numbers:  # nothing was built
            self._old = None
            return
        dead = set()
        for block in change.new_blocks:
            dead.update(block.tasks)
            tasks.unused += block.tasks
            tasks.count(block, -1)
        self._drop_links(change.new_blocks, dead)
        gone = {task for block in change.old_blocks for task in block.tasks}
        for number, block in zip(change.numbers, change.old_blocks):
            tasks.blocks[number] = block
            tasks.count(block, 1)
            for a, b in block.links:
                # Lists of the old tasks themselves were left as they are.
                if a not in gone:
                    tasks.after[a].append(b)
                if b not in gone:
                    tasks.before[b].append(a)
        for operator, config in change.configs.items():
            tasks.strategy[operator] = config
        self.timeline = change.timeline
        self._old = None

    def _unlink(self, change: "_Change") -> dict[int, None]:
        """Takes the old blocks out of the graph. Returns what they led to and stays."""
        tasks = self.tasks
        dead: set[int] = set()
        for number in change.numbers:
            block = tasks.blocks[number]
            change.old_blocks.append(block)
            dead.update(block.tasks)
            tasks.count(block, -1)
        touched = self._drop_links(change.old_blocks, dead)
        ready = self.timeline.ready
        done = 2 * self._round + 1
        change.first = min((ready[task] for task in dead), default=0.0)
        self._grow()
        for task in dead:
            self._mark[task] = done  # the stream passes over it
        return touched

    def _drop_links(self, blocks: Iterable[TaskBlock], dead: set[int]) -> dict[int, None]:
        before, after = self.tasks.before, self.tasks.after
        touched: dict[int, None] = {}
        for block in blocks:
            for a, b in block.links:
                if a not in dead:
                    after[a].remove(b)
                if b not in dead:
                    before[b].remove(a)
                    touched[b] = None
        return touched

    def _grow(self) -> None:
        more = len(self.tasks.seconds) - len(self._mark)
        if more:
            timeline = self.timeline
            for marks in (self._mark, self._watched, self._missing):
                marks += [0] * more
            for times in (timeline.ready, timeline.start, timeline.end, self._coming):
                times += [0.0] * (len(self._mark) - len(times))

    def _free_before(self, cursor: int) -> list[float]:
        """Returns the time at which each device is free before task number `cursor` of the order."""
        notes, order = self._notes, self.timeline.order
        device, end = self.tasks.device, self.timeline.end
        wanted = cursor // _SPACING
        while len(notes) <= wanted:
            first = (len(notes) - 1) * _SPACING
            notes.append(_advance(notes[-1], order[first : first + _SPACING], device, end))
        return _advance(notes[wanted], order[wanted * _SPACING : cursor], device, end)

    def _work_left(self, done: list[int]) -> list[float]:
        """Seconds of the tasks that are not done, per device and link; up to rounding."""
        tasks = self.tasks
        resources = [tasks.device[task] + 1 for task in done]
        seconds = [tasks.seconds[task] for task in done]
        left = tasks.load - np.bincount(resources, seconds, len(tasks.load))
        return [*left[1:].tolist(), -math.inf]  # the last is `NOWHERE`

    def _first_time(self, change: "_Change", fresh: list[int], touched: Iterable[int]) -> float:
        """The first time at which anything may differ. `fresh` is marked already."""
        before, mark = self.tasks.before, self._mark
        ready, end = self.timeline.ready, self.timeline.end
        moved = 2 * self._round
        first = min([change.first, *(ready[task] for task in touched)])
        for task in fresh:
            if all(mark[p] != moved for p in before[task]):
                latest = max((end[p] for p in before[task]), default=0.0)
                first = min(first, latest)
        return first

    def _replay(
        self,
        change: "_Change",
        fresh: list[int],
        touched: dict[int, None],
        limit: float,
    ) -> float:
        tasks, timeline = self.tasks, self.timeline
        if tasks.load.max() * (1 - _ROUNDING) > limit:
            return math.inf
        before, after, key = tasks.before, tasks.after, tasks.key
        device, seconds = tasks.device, tasks.seconds
        # The old times stay as they are, for `undo`.
        ready, start, end = list(timeline.ready), timeline.start[:], timeline.end[:]
        mark, watched = self._mark, self._watched
        missing, coming = self._missing, self._coming
        moved, done, this = 2 * self._round, 2 * self._round + 1, self._round
        queue: list[tuple[float, int, int]] = []
        push, pop = heapq.heappush, heapq.heappop

        for task in fresh:
            mark[task] = moved
        now, now_key = self._first_time(change, fresh, touched), -1
        order = timeline.order
        position = change.cursor = bisect_left(order, now, key=ready.__getitem__)
        free = self._free_before(position)
        new_order = order[:position]
        append = new_order.append

        def move(task: int) -> None:
            """Takes a task out of its old place; it waits for the predecessors that are not done."""
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

        for task in touched:
            mark[task] = moved  # before `move` looks at any of them
        for task in (*touched, *fresh):
            move(task)

        within, num_changed = True, 0
        order.append(-1)  # ends the stream
        ready.append(math.inf)
        mark.append(0)
        key.append(-1)
        while True:
            task = order[position]
            state = mark[task]
            if state == done:  # moved forward in time, or removed
                position += 1
                continue
            now = ready[task]
            if queue and (queue[0][0] < now or (queue[0][0] == now and queue[0][1] < key[task])):
                now, now_key, task = pop(queue)
                state = moved
            elif task < 0:
                break
            else:
                position += 1
                now_key = key[task]
                if state == moved:  # it comes later than it did
                    for following in after[task]:
                        if mark[following] < moved:
                            move(following)
                    continue
                resource = device[task]
                if watched[task] != this:
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
                within = False
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
                        entry = coming[following], key[following], following
                        push(queue, entry)
                elif stop != last:
                    changed.append(following)
            for following in changed:
                if mark[following] < moved:
                    move(following)
            num_changed += 1
            if num_changed > _FEW and 2 * num_changed > len(new_order) - change.cursor:
                # Most tasks change: from here on all others are taken as changed too, which makes the rest simple.
                others = [t for t in order[position:-1] if mark[t] < moved]
                for other in others:
                    mark[other] = moved
                for other in others:
                    move(other)
                break
        for entries in (order, ready, mark, key):
            entries.pop()
        left = self._work_left(new_order) if queue and within else []
        loose = limit * (1 + _ROUNDING)
        while queue and within:
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
                within = False
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
        if not within or max(free) > limit:  # the latest task may be one that stays
            return math.inf
        change.finished = True
        self.timeline = TaskTimes(ready, start, end, new_order, max(free))
        return self.timeline.seconds


class _Change:
    """A change that can be undone. `configs` are those before it."""

    def __init__(self, configs: Mapping[int, Config], timeline: TaskTimes, numbers: list[int]):
        self.configs = configs
        self.timeline = timeline
        self.numbers = numbers
        self.old_blocks: list[TaskBlock] = []
        self.new_blocks: list[TaskBlock] = []
        self.first = 0.0
        self.cursor = 0
        self.finished = False


def _least_load(tasks: Tasks, operator: int, config: Config) -> np.ndarray:
    """Lower bound on `Tasks.load` if `operator` had `config`: ignores sums and weights."""
    load, shards = tasks.load.copy(), tasks.shards
    for number in tasks.blocks_of(operator):
        load -= tasks.blocks[number].load
    seconds = sum(shards.seconds(operator, config.degrees))
    np.add.at(load, np.array(config.devices) + 1, seconds)
    for number in tasks.edges_of[operator]:
        source, target, _ = shards.graph.edges[number]
        above = config if source == operator else tasks.strategy[source]
        below = config if target == operator else tasks.strategy[target]
        a, b, num_bytes = shards.edge_arrays(number, above.degrees, below.degrees)
        ends = np.array(above.devices)[a], np.array(below.devices)[b]
        returns = shards.gradient_returns(number)
        for x, y in (ends, ends[::-1])[: 1 + returns]:
            links, times = tasks.routes.messages(x, y, num_bytes)
            load += np.bincount(links + 1, times, len(load))
    return load


def _advance(free: list[float], order: list[int], device: list[int], end: list[float]) -> list[float]:
    """Returns the time at which each device is free after the tasks of `order`."""
    free = list(free)
    for task in order:
        free[device[task]] = end[task]
    free[NOWHERE] = 0.0
    return free
