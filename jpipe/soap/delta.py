"""Delta simulation (FlexFlow, section 5.3, algorithm 2): the timeline after a change, from the timeline before it.

The result is that of `full_simulation` to the last bit. On every device the order of the tasks is that of `(ready,
key)`, every task starts at the later of its ready time and the end of the one before, and takes some time. These rules
have one solution, and both simulations find it. `jpipe.soap.replay` finds it from the old timeline.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jpipe.soap.costs import Costs
from jpipe.soap.graph import OperatorGraph
from jpipe.soap.machine import Machine
from jpipe.soap.replay import ROUNDING, Replayer
from jpipe.soap.shards import Shards
from jpipe.soap.simulate import TaskTimes, full_simulation, without_collection
from jpipe.soap.strategy import Config
from jpipe.soap.tasks import TaskBlock, Tasks


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
        self._replayer = Replayer(self.tasks)
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
            if load.max() * (1 - ROUNDING) > limit:
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
        self._replayer.grow(self.timeline)
        is_new = set(fresh)
        for block in change.new_blocks:
            for _, b in block.links:
                if b not in is_new:
                    touched[b] = None
        times = self._replayer.run(self.timeline, fresh, touched, limit)
        if times is None:
            return math.inf
        change.finished = True
        self.timeline = times
        return times.seconds

    def keep(self) -> None:
        """Makes the change final."""
        change = self._old
        assert change is not None and change.finished, "there is no change to keep"
        for block in change.old_blocks:
            self.tasks.unused += block.tasks
        self._replayer.keep()
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
        self._replayer.begin(dead, self.timeline)
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


class _Change:
    """A change that can be undone. `configs` are those before it."""

    def __init__(self, configs: Mapping[int, Config], timeline: TaskTimes, numbers: list[int]):
        self.configs = configs
        self.timeline = timeline
        self.numbers = numbers
        self.old_blocks: list[TaskBlock] = []
        self.new_blocks: list[TaskBlock] = []
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
