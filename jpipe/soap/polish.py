"""Changes of a strategy that are kept only if they make it better: of one operator, and of several together.

A chain leaves a strategy in which several operators would have to change together only by chance. Together change two
operators at an edge; the readers of one weight, such as the turns of a recurrent layer, without and with those that
follow them; and
runs: an operator and those that follow it, or those that precede it. What follows gets the configuration with which the
least is sent. In a space with irregular sets of devices, such sets are tried where nothing else helps.

A goal says what is better: fewer seconds (`Fastest`), or fewer bytes in no more than so many seconds (`FewestBytes`).
"""

import math
from collections.abc import Generator, Iterator, Mapping, Sequence

import numpy as np

from jpipe.soap.delta import Simulator
from jpipe.soap.space import Space
from jpipe.soap.strategy import Config, Strategy

_MOST_PAIRS = 2000
"""Two operators are changed together if they have at most so many pairs of configurations."""

_LONGEST_RUN = 8
_SLOWER = 1.5
"""A run is begun with a change that makes the step at most so many times as long."""

Tries = Generator[bool, None, bool]
"""Yields after every change whether it is kept; returns whether any was."""


class Fastest:
    """Fewer seconds are better."""

    sent_limit = math.inf

    def __init__(self, simulator: Simulator):
        self.limit = simulator.seconds

    def accepts(self, seconds: float, sent_bytes: int) -> bool:
        """Whether a strategy is better than the best so far, which it replaces then."""
        better = seconds < self.limit
        if better:
            self.limit = seconds
        return better


class FewestBytes:
    """Fewer bytes are better, in at most `limit` seconds."""

    def __init__(self, simulator: Simulator, limit: float):
        self.limit = limit
        self.sent_limit: float = simulator.tasks.sent_bytes - 1

    def accepts(self, seconds: float, sent_bytes: int) -> bool:
        """As `Fastest.accepts`."""
        better = seconds <= self.limit and sent_bytes <= self.sent_limit
        if better:
            self.sent_limit = sent_bytes - 1
        return better


class Polish:
    """Improves the strategy of a simulator.

    `fastest` and `fewest_bytes` are generators, so that they can be ended anywhere, and be continued. After every
    change that was simulated they yield whether it is kept as the best.

    Args:
      simulator: its strategy fits into the memory.
      space: the configurations to choose from.
      memory_limit: bytes per device.
      goal: what is better.

    Attributes:
      is_local_optimum: whether no change of one operator helps; False if that is not known.
    """

    def __init__(self, simulator: Simulator, space: Space, memory_limit: float, goal: Fastest | FewestBytes):
        self.simulator = self._simulator = simulator
        self._space = space
        self._memory_limit, self._goal = memory_limit, goal
        self._graph = simulator.tasks.graph
        self._followers: dict[tuple, Config] = {}
        tensors = self._graph.tensors
        # Those with the largest weights first: a short budget is best spent on them.
        self._order = sorted(
            range(space.num_operators),
            key=lambda i: (
                -sum(
                    tensors[operand.tensor].num_bytes
                    for operand in self._graph.operators[i].inputs
                    if tensors[operand.tensor].weight is not None
                )
            ),
        )
        self.is_local_optimum = False

    @property
    def limit(self) -> float:
        """Seconds above which nothing is kept."""
        return self._goal.limit

    def fastest(self) -> Iterator[bool]:
        """Changes the strategy until no change helps."""
        while True:
            # What the turns of a loop have in common first: few changes, which help much.
            while (yield from self._groups()):
                pass
            yield from self._singles()
            self.is_local_optimum = True
            for level in (self._groups, self._a_pair, self._a_run, self._an_irregular):
                if (yield from level()):
                    break
            else:
                return
            self.is_local_optimum = False

    def fewest_bytes(self, known: Sequence[Strategy]) -> Iterator[bool]:
        """The same, without pairs and runs of any configurations. Runs of operators change to what they have in one of
        the `known` strategies.
        """
        for strategy in known:
            yield from self._relinked(strategy)
        while True:
            yield from self._singles()
            if not (yield from self._groups()):
                return

    def _improves(self, operator: int, config: Config) -> bool:
        """Keeps a change that makes the strategy better than the best."""
        goal = self._goal
        return self._keep_if_better(
            self._simulator.try_change(operator, config, goal.limit, self._memory_limit, goal.sent_limit)
        )

    def _improve_together(self, changes: Mapping[int, Config]) -> bool:
        """Changes several operators, and keeps that if it makes the strategy better than the best."""
        goal = self._goal
        return self._keep_if_better(
            self._simulator.try_changes(changes, goal.limit, self._memory_limit, goal.sent_limit)
        )

    def _keep_if_better(self, seconds: float) -> bool:
        simulator = self._simulator
        better = self._goal.accepts(seconds, simulator.tasks.sent_bytes)
        if better:
            simulator.keep()
        else:
            simulator.undo()
        return better

    def _change(self, operator: int, config: Config) -> float:
        """Changes an operator, better or not; the seconds of the step."""
        seconds = self._simulator.try_change(operator, config)
        self._simulator.keep()
        return seconds

    def _relinked(self, other: Strategy) -> Iterator[bool]:
        """Changes operators that follow each other, and are split in another way, to what they have in `other`: all of
        them, and where that is not better each half, and so on.
        """
        strategy, configs = self._simulator.tasks.strategy, self._space.configs
        different = [i for i, config in enumerate(other) if config != strategy[i] and config in configs(i)]
        parts = [different] if different else []
        while parts:
            part = parts.pop()
            better = self._improve_together({i: other[i] for i in part})
            yield better
            if not better and len(part) > 1:
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]

    def _groups(self) -> Tries:
        """Changes the readers of a weight together; says whether a change helped."""
        readers: dict[tuple, list[int]] = {}
        for i, operator in enumerate(self._graph.operators):
            weights = tuple(self._graph.weights_of(i))
            if weights:
                readers.setdefault((weights, operator.loops), []).append(i)
        first_edge = {
            source: (number, target) for number, (source, target, _) in reversed(list(enumerate(self._graph.edges)))
        }
        helped = False
        for group in readers.values():
            if len(group) < 2:
                continue
            for config in self._space.configs(group[0]):
                together = dict.fromkeys(group, config)
                following = {}
                for i in group:
                    if i in first_edge:
                        number, target = first_edge[i]
                        following[target] = self._follower(number, target, config, True)
                for changes in (together, following | together):
                    better = self._improve_together(changes)
                    yield better
                    helped = helped or better
        return helped

    def _singles(self) -> Iterator[bool]:
        """Ends when no change of one operator helps."""
        num_operators = self._space.num_operators
        unchanged, turn = 0, 0
        while unchanged < num_operators:
            unchanged += 1
            operator = self._order[turn % num_operators]
            turn += 1
            for config in self._space.configs(operator):
                if config == self._simulator.tasks.strategy[operator]:
                    continue
                better = self._improves(operator, config)
                yield better
                if better:
                    unchanged = 0

    def _a_pair(self, irregular: bool = False) -> Tries:
        """Changes two operators at an edge together; says whether a change helped."""
        strategy = self._simulator.tasks.strategy
        for first, second in sorted({edge[:2] for edge in self._graph.edges}):
            choices = [[*self._space.configs(i)] for i in (first, second)]
            if irregular:
                for i, configs in zip((first, second), choices):
                    configs += self._space.irregular_configs(i, strategy[i])
            if len(choices[0]) * len(choices[1]) > _MOST_PAIRS:
                continue
            old = self._simulator.tasks.strategy[first]
            for config in choices[0]:
                if config == old:
                    continue
                self._change(first, config)
                for other in choices[1]:
                    better = self._improves(second, other)
                    yield better
                    if better:
                        return True
                self._change(first, old)
        return False

    def _a_run(self) -> Tries:
        """Changes a run of operators together; says whether a change helped."""
        # The last operators first: what the step ends with is often faster on fewer devices.
        for operator in reversed(range(self._space.num_operators)):
            for config in self._space.configs(operator):
                if config == self._simulator.tasks.strategy[operator]:
                    continue
                for forward in (True, False):
                    if (yield from self._run_improves(operator, config, forward)):
                        return True
        return False

    def _an_irregular(self) -> Tries:
        """Changes an operator to an irregular set of devices: alone, with a run at it, with a neighbour. Says whether
        that helped.
        """
        for operator in self._order:
            for config in self._space.irregular_configs(operator, self._simulator.tasks.strategy[operator]):
                better = self._improves(operator, config)
                yield better
                if better:
                    return True
                for forward in (True, False):
                    if (yield from self._run_improves(operator, config, forward)):
                        return True
        return self._space.is_irregular and (yield from self._a_pair(irregular=True))

    def _run_improves(self, operator: int, config: Config, forward: bool) -> Tries:
        """Changes an operator and those after it, or before it, as far as that helps; says whether it did."""
        simulator, goal = self._simulator, self._goal
        old = [(operator, simulator.tasks.strategy[operator])]
        limit = _SLOWER * goal.limit
        if simulator.try_change(operator, config, limit) > limit:
            simulator.undo()
            yield False
            return False
        simulator.keep()
        yield False
        while len(old) < _LONGEST_RUN:
            following = self._next([number for number, _ in old], forward)
            if following is None:
                break
            operator, config = following
            present = simulator.tasks.strategy[operator]
            if config == present:
                break
            old.append((operator, present))
            seconds = self._change(operator, config)
            fits = max(simulator.memory_bytes) <= self._memory_limit
            better = fits and goal.accepts(seconds, simulator.tasks.sent_bytes)
            yield better
            if better:
                return True
        simulator.try_changes(dict(reversed(old)))
        simulator.keep()
        return False

    def _next(self, run: list[int], forward: bool) -> tuple[int, Config] | None:
        """The operator after a run, or before it, and the configuration for which they send each other the fewest
        bytes.
        """
        inside = set(run)
        nearest: tuple[int, int, int] | None = None
        for number, (source, target, _) in enumerate(self._graph.edges):
            member, other = (source, target) if forward else (target, source)
            if member in inside and other not in inside:
                distance = abs(other - run[0])
                if nearest is None or distance < nearest[0]:
                    nearest = distance, number, other
        if nearest is None:
            return None
        _, number, other = nearest
        source, target, _ = self._graph.edges[number]
        member = source if forward else target
        config = self._simulator.tasks.strategy[member]
        return other, self._follower(number, other, config, forward)

    def _follower(self, number: int, other: int, config: Config, forward: bool) -> Config:
        key = number, config, forward
        if key not in self._followers:
            devices = set(config.devices)
            every = (*self._space.configs(other), *self._space.on_devices(other, config.devices))
            here = [c for c in every if devices >= set(c.devices)]
            self._followers[key] = min(
                here or every,
                key=lambda c: (
                    self._sent_bytes(number, *((config, c) if forward else (c, config))),
                    -len(c.devices),
                    c.devices,
                ),
            )
        return self._followers[key]

    def _sent_bytes(self, number: int, above: Config, below: Config) -> int:
        a, b, num_bytes = self._simulator.tasks.shards.edge_arrays(number, above.degrees, below.degrees)
        elsewhere = np.array(above.devices)[a] != np.array(below.devices)[b]
        return int(num_bytes[elsewhere].sum())
