"""Changes of a strategy that are kept only if they make it faster: of one operator, and of several together.

A chain leaves a strategy in which several operators would have to change together only by chance. Together change two
operators at an edge; the readers of one weight, such as the turns of a recurrent layer, without and with those that
follow them; and
runs: an operator and those that follow it, or those that precede it. What follows gets the configuration with which the
least is sent.
"""

from collections.abc import Callable

import numpy as np

from jpipe.soap.delta import Simulator
from jpipe.soap.space import Space
from jpipe.soap.strategy import Config

_MOST_PAIRS = 2000
"""Two operators are changed together if they have at most so many pairs of configurations."""

_LONGEST_RUN = 8
_SLOWER = 1.5
"""A run is begun with a change that makes the step at most so many times as long."""


class Polish:
    """Improves the strategy of a simulator.

    Args:
      simulator: its strategy fits into the memory.
      space: the configurations to choose from.
      memory_limit: bytes per device.
      is_over: whether the budget is used up.
      tried: called after every change that was simulated, with whether it is kept as the best.

    Attributes:
      is_local_optimum: whether no change of one operator helps; False if that is not known.
    """

    def __init__(
        self,
        simulator: Simulator,
        space: Space,
        memory_limit: float,
        is_over: Callable[[], bool],
        tried: Callable[[bool], None],
    ):
        self._simulator, self._space = simulator, space
        self._memory_limit, self._is_over, self._tried = memory_limit, is_over, tried
        self._graph = simulator.tasks.graph
        self._best_seconds = simulator.seconds
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

    def run(self) -> None:
        """Changes the strategy until no change helps, or the budget is over."""
        while True:
            if not self._singles():
                return
            self.is_local_optimum = True
            if not (self._a_pair() or self._a_group() or self._a_run()):
                return
            self.is_local_optimum = False

    def _improves(self, operator: int, config: Config) -> bool:
        """Keeps a change that makes the best strategy faster."""
        simulator = self._simulator
        seconds = simulator.try_change(operator, config, self._best_seconds, self._memory_limit)
        better = seconds < self._best_seconds
        if better:
            simulator.keep()
            self._best_seconds = seconds
        else:
            simulator.undo()
        self._tried(better)
        return better

    def _change(self, operator: int, config: Config) -> float:
        """Changes an operator, better or not; the seconds of the step."""
        seconds = self._simulator.try_change(operator, config)
        self._simulator.keep()
        return seconds

    def _improve_together(self, changes: list[tuple[int, Config]]) -> bool:
        """Changes several operators, and keeps that if it makes the best strategy faster."""
        strategy = self._simulator.tasks.strategy
        old = [(operator, strategy[operator]) for operator, _ in changes[:-1]]
        for operator, config in changes[:-1]:
            self._change(operator, config)
        if self._improves(*changes[-1]):
            return True
        for operator, config in old:
            self._change(operator, config)
        return False

    def _a_group(self) -> bool:
        """Changes the readers of a weight together; says whether a change helped."""
        readers: dict[tuple, list[int]] = {}
        for i, operator in enumerate(self._graph.operators):
            weights = tuple(self._graph.weights_of(i))
            if weights:
                readers.setdefault((weights, operator.loops), []).append(i)
        first_edge = {
            source: (number, target) for number, (source, target, _) in reversed(list(enumerate(self._graph.edges)))
        }
        for group in readers.values():
            if len(group) < 2:
                continue
            for config in self._space.configs(group[0]):
                if self._is_over():
                    return False
                together = [(i, config) for i in group]
                if self._improve_together(together):
                    return True
                following = {}
                for i in group:
                    if i in first_edge:
                        number, target = first_edge[i]
                        following[target] = self._follower(number, target, config, True)
                if self._improve_together([*together, *following.items()]):
                    return True
        return False

    def _singles(self) -> bool:
        """Ends when no change of one operator helps, with True, or when the budget is over."""
        num_operators = self._space.num_operators
        unchanged, turn = 0, 0
        while unchanged < num_operators:
            unchanged += 1
            operator = self._order[turn % num_operators]
            turn += 1
            for config in self._space.configs(operator):
                if config == self._simulator.tasks.strategy[operator]:
                    continue
                if self._is_over():
                    return False
                if self._improves(operator, config):
                    unchanged = 0
        return True

    def _a_pair(self) -> bool:
        """Changes two operators at an edge together; says whether a change helped."""
        for first, second in sorted({edge[:2] for edge in self._graph.edges}):
            choices = self._space.configs(first), self._space.configs(second)
            if len(choices[0]) * len(choices[1]) > _MOST_PAIRS:
                continue
            old = self._simulator.tasks.strategy[first]
            for config in choices[0]:
                if self._is_over():
                    return False
                if config == old:
                    continue
                self._change(first, config)
                for other in choices[1]:
                    if self._improves(second, other):
                        return True
                self._change(first, old)
        return False

    def _a_run(self) -> bool:
        """Changes a run of operators together; says whether a change helped."""
        # The last operators first: what the step ends with is often faster on fewer devices.
        for operator in reversed(range(self._space.num_operators)):
            for config in self._space.configs(operator):
                if config == self._simulator.tasks.strategy[operator]:
                    continue
                for forward in (True, False):
                    if self._is_over():
                        return False
                    if self._run_improves(operator, config, forward):
                        return True
        return False

    def _run_improves(self, operator: int, config: Config, forward: bool) -> bool:
        simulator = self._simulator
        old = [(operator, simulator.tasks.strategy[operator])]
        limit = _SLOWER * self._best_seconds
        if simulator.try_change(operator, config, limit) > limit:
            simulator.undo()
            self._tried(False)
            return False
        simulator.keep()
        self._tried(False)
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
            better = fits and seconds < self._best_seconds
            if better:
                self._best_seconds = seconds
            self._tried(better)
            if better:
                return True
        for operator, config in reversed(old):
            self._change(operator, config)
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
            every = self._space.configs(other)
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
