"""Markov chain Monte Carlo over strategies (FlexFlow, section 6.2), and the steps that improve its result.

The chain visits strategy S with a probability proportional to exp(-beta * seconds(S)). A step draws an operator and a
configuration, both uniformly, and takes the change with probability min(1, exp(beta * (seconds before - seconds
after))).

A budget ends a search and decides nothing else: chains and polish take turns at marks that do not depend on it, and
every chain has random numbers of its own. So the search of a larger budget begins with that of a smaller one.
"""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jpipe._util.foreign import shown
from jpipe.soap.costs import Analytic, Costs
from jpipe.soap.delta import Simulator
from jpipe.soap.graph import OperatorGraph
from jpipe.soap.machine import Machine
from jpipe.soap.polish import Fastest, FewestBytes, Polish
from jpipe.soap.shards import Shards
from jpipe.soap.simulate import Simulated, describe
from jpipe.soap.space import Space, random_strategy
from jpipe.soap.strategy import (
    EXPERTS,
    Config,
    Strategy,
    check_strategy,
    data_parallel,
)

_SHARPNESS = 300.0
"""Default of beta times the seconds of the best start: what is 1% slower is taken with probability exp(-3)."""

_GROWTH = 1.25
"""From mark to mark the number of proposals grows so much."""

_BYTES_SHARE = 0.25
"""The pass that lowers the bytes may take this part of a budget in seconds, on top of it."""


def accepted_up_to(seconds: float, beta: float, uniform: float) -> float:
    """The slowest step that is taken from a strategy of `seconds`.

    `uniform < exp(beta * (seconds - new))` is the rule; solved for `new`, the simulation of a change can end as soon as
    it is slower.

    Args:
      seconds: the seconds of the present strategy.
      beta: the inverse temperature, per second.
      uniform: a number drawn from [0, 1).
    """
    return seconds - math.log(uniform) / beta if uniform > 0 else math.inf


def walk(
    simulator: Simulator,
    space: Space,
    beta: float,
    rng: np.random.Generator,
    memory_limit: float = math.inf,
) -> Iterator[bool]:
    """The Markov chain, without an end. Every turn makes one proposal, and says whether it was taken."""
    while True:
        operator = int(rng.integers(space.num_operators))
        config = space.draw(operator, rng)
        limit = accepted_up_to(simulator.seconds, beta, rng.random())
        seconds = simulator.try_change(operator, config, limit, memory_limit)
        taken = seconds <= limit and seconds < math.inf
        if taken:
            simulator.keep()
        else:
            simulator.undo()
        yield taken


@dataclasses.dataclass
class Found:
    """The result of a search.

    Attributes:
      strategy: of the strategies found that are at most the tolerance slower than the fastest, the one that sends the
        fewest bytes.
      simulated: its seconds, memory and traffic.
      fastest: the fastest strategy of the chains and the polish.
      fastest_seconds: its simulated seconds. With more proposals and the same seed never more.
      starts: name -> simulated seconds of the strategies that the search began with, those that need too much memory
        too.
      proposals: number of changes that were simulated.
      elapsed: seconds of the search.
      history: `(elapsed, seconds)` of each improvement.
      is_local_optimum: whether no other configuration of one operator makes `fastest` faster; False if it is not known.
      interrupted: whether Ctrl-C ended the search.
    """

    strategy: Strategy
    simulated: Simulated
    fastest: Strategy
    fastest_seconds: float
    starts: Mapping[str, float]
    proposals: int
    elapsed: float
    history: list[tuple[float, float]]
    is_local_optimum: bool
    interrupted: bool

    @property
    def seconds(self) -> float:
        """Simulated seconds of a step."""
        return self.simulated.seconds


def search(
    graph: OperatorGraph,
    machine: Machine,
    *,
    costs: Costs | None = None,
    budget_seconds: float | None = None,
    max_proposals: int | None = None,
    memory_limit: float | None = None,
    starts: Mapping[str, Sequence[Config]] | None = None,
    space: Space | None = None,
    beta: float | None = None,
    seed: int = 0,
    sync: str = "ring",
    optimizer_arrays: int = 2,
    polish: bool = True,
    max_polish_proposals: int | None = None,
    tolerance: float = 0.001,
    progress: Callable[[float, float, int], None] | None = None,
) -> Found:
    """Searches for the fastest strategy of a graph on a machine, and among equally fast ones for the one that sends the
    fewest bytes.

    A chain runs from every start, and one more from the best strategy so far. All make 1 proposal, then up to 2, 4, 8,
    16, 32, 40, 50, 62, ... a quarter more each time. At each of these marks the best strategy is polished, and the
    chain of the best begins anew from it (FlexFlow's program does so a hundred times in a search). The search ends at
    the last mark within its budget, or at one where half of the budget brought no improvement. At last the bytes are
    lowered where that costs no more than the `tolerance`. Ctrl-C ends the search, and the best so far is returned.

    With the same seed `Found.fastest_seconds` of a larger `max_proposals` is never more, because its search begins with
    that of the smaller one: with the same `max_polish_proposals`, or with one that is at least `max_proposals` in both.
    Of `budget_seconds` the same is true as far as the machine runs equally fast.

    Args:
      graph: the operators.
      machine: the devices and links.
      costs: seconds of operators; None computes them from FLOPs and bytes.
      budget_seconds: seconds of the chains and the polish. The pass that lowers the bytes may take a quarter more.
      max_proposals: the number of proposals of all chains. Without any budget it is 2000 times the chains.
      memory_limit: bytes per device; None is that of the machine.
      starts: name -> strategy; None: data parallelism, the experts and one random strategy.
      space: the configurations to choose from; None: all, and where links are irregular irregular sets of devices.
      beta: the inverse temperature, per second; None chooses it by the fastest start.
      seed: the seed of the random numbers. With a budget of proposals, the same seed finds the same strategy.
      sync, optimizer_arrays: see `jpipe.soap.tasks.Tasks`.
      polish: whether to change operators as long as that helps; see `jpipe.soap.polish`.
      max_polish_proposals: the number of proposals of the polish, and as many again of the pass that lowers the bytes;
        None: until nothing helps. With it or `budget_seconds` the polish makes at most as many as the chains.
      tolerance: the part of the seconds that the result may be slower than the fastest, for fewer bytes. 0: the fewest
        bytes of the fastest.
      progress: called with elapsed seconds, the best seconds and the number of proposals, now and then.

    Raises:
      ValueError: if a start does not fit, a budget is not above 0, the tolerance is below 0, or no strategy fits into
        the memory.
    """
    for name, value in {
        "budget_seconds": budget_seconds,
        "max_proposals": max_proposals,
        "beta": beta,
        "memory_limit": memory_limit,
    }.items():
        if value is not None and not value > 0:
            raise ValueError(f"`{name}` must be above 0, got {shown(value)}.")
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"`tolerance` must be a part of the seconds, at least 0, got {shown(tolerance)}.")
    space = Space(graph, machine.num_devices, irregular=bool(machine.links)) if space is None else space
    if space.num_devices != machine.num_devices:
        raise ValueError(f"`space` is for {space.num_devices} devices, and the machine has {machine.num_devices}.")
    rng = np.random.default_rng(seed)
    if starts is None:
        starts = default_starts(graph, machine.num_devices)
        starts["random"] = random_strategy(space, rng)
    elif not starts:
        raise ValueError("`starts` must have at least one strategy, got none.")
    for strategy in starts.values():
        check_strategy(graph, strategy, machine.num_devices)
    limit = machine.memory_bytes if memory_limit is None else memory_limit
    costs = Analytic(machine) if costs is None else costs
    simulator = functools.partial(
        Simulator,
        graph,
        machine,
        costs,
        sync=sync,
        optimizer_arrays=optimizer_arrays,
        shards=Shards(graph, costs),
    )
    run = _Search(simulator, space, limit, tolerance, progress)
    try:
        begun = run.begin(starts)
        if beta is None:
            beta = _SHARPNESS / min(start.seconds for start in begun)
        num_chains = len(begun) + 1
        if budget_seconds is None and max_proposals is None:
            max_proposals = 2000 * num_chains
        budget = _Budget(
            math.inf if budget_seconds is None else budget_seconds,
            math.inf if max_proposals is None else max(max_proposals // num_chains, 1),
            0 if not polish else math.inf if max_polish_proposals is None else max_polish_proposals,
        )
        run.chains_and_polish(begun, beta, seed, budget)
        if polish:
            run.lower_bytes(budget)
    except KeyboardInterrupt:
        if run.best is None:
            raise
        run.interrupted = True
    return run.result()


def default_starts(graph: OperatorGraph, num_devices: int) -> dict[str, Strategy]:
    """Data parallelism and the strategies of experts."""
    starts = {"data_parallel": data_parallel(graph, num_devices)}
    starts |= {name: expert(graph, num_devices) for name, expert in EXPERTS.items()}
    return starts


def starts_of(space: Space, seed: int = 0) -> dict[str, Strategy]:
    """The strategies of a space to begin with: those of `default_starts` that it allows, and a random one.

    Args:
      space: the configurations to choose from.
      seed: the seed of the random strategy.
    """
    starts = default_starts(space.graph, space.num_devices)
    starts["random"] = random_strategy(space, np.random.default_rng(seed))
    return {name: start for name, start in starts.items() if space.can_run(start)}


class _Budget(NamedTuple):
    """The most seconds, and the most proposals of each chain and of all polishes."""

    seconds: float
    proposals: float
    polish: float

    def polish_after(self, proposals: int) -> float:
        """The most proposals of all polishes after so many of all chains."""
        is_free = math.isinf(self.seconds) and math.isinf(self.polish)
        return self.polish if is_free else min(self.polish, proposals)


def _marks() -> Iterator[int]:
    """The numbers of proposals of a chain after which the best strategy is polished."""
    mark = 1
    while True:
        yield mark
        mark = int(mark * (_GROWTH if mark >= 32 else 2))


class _Near(NamedTuple):
    """A strategy that is at most the tolerance slower than the fastest."""

    seconds: float
    sent_bytes: int
    strategy: Strategy


class _Search:
    """A search: its chains, its polish, and the best strategies so far."""

    def __init__(
        self,
        simulator: Callable[[Sequence[Config]], Simulator],
        space: Space,
        memory_limit: float,
        tolerance: float,
        progress: Callable[[float, float, int], None] | None,
    ):
        self._simulator, self._space = simulator, space
        self._memory_limit, self._tolerance = memory_limit, tolerance
        self._progress = progress
        self._began = time.perf_counter()
        self._told = -math.inf
        self._starts: dict[str, float] = {}
        self._begun: list[Strategy] = []  # those that fit into the memory
        self._proposals = 0
        self._polished = 0
        self._history: list[tuple[float, float]] = []
        self._best_seconds = math.inf
        self.best: Strategy | None = None
        self._near: list[_Near] = []  # none of them is better than another in both seconds and bytes
        self._optimum: Strategy | None = None
        self._is_lowering = False  # what that pass finds is no part of `fastest`
        self.interrupted = False

    def begin(self, starts: Mapping[str, Sequence[Config]]) -> list[Simulator]:
        """A simulator per start that fits into the memory, after changes if need be."""
        simulators, least = [], math.inf
        for name, strategy in starts.items():
            simulator = self._simulator(strategy)
            self._starts[name] = simulator.seconds
            if max(simulator.memory_bytes) > self._memory_limit:
                self._shrink(simulator)
            least = min(least, max(simulator.memory_bytes))
            if max(simulator.memory_bytes) <= self._memory_limit:
                simulators.append(simulator)
                self._begun.append(simulator.strategy)
                self._note(simulator)
        if not simulators:
            raise ValueError(
                f"no strategy was found that fits into {self._memory_limit:.4g} bytes per device: the least that a "
                f"device needs is {least:.4g}. Use more devices, a smaller batch or more memory."
            )
        return simulators

    def _shrink(self, simulator: Simulator) -> None:
        """Changes operators until the strategy fits into the memory, or no change of one helps."""
        while True:
            before = _excess(simulator, self._memory_limit)
            for operator in range(self._space.num_operators):
                best: tuple[tuple[float, int], Config] | None = None
                old = _excess(simulator, self._memory_limit)
                for config in self._space.configs(operator):
                    simulator.try_change(operator, config, memory_limit=-1.0)
                    new = _excess(simulator, self._memory_limit)
                    simulator.undo()
                    if new < old and (best is None or new < best[0]):
                        best = new, config
                if best is not None:
                    simulator.try_change(operator, best[1])
                    simulator.keep()
                if not _excess(simulator, self._memory_limit)[0]:
                    return
            if _excess(simulator, self._memory_limit) >= before:
                return

    def _note(self, simulator: Simulator, fits: bool = True) -> bool:
        """Keeps the present strategy if it is the best, or nearly as fast with fewer bytes, and fits into the memory.
        Says whether it is the fastest.
        """
        elapsed = time.perf_counter() - self._began
        seconds, sent_bytes = simulator.seconds, simulator.tasks.sent_bytes
        better = fits and seconds < self._best_seconds and not self._is_lowering
        if better:
            self._best_seconds = seconds
            self.best = simulator.strategy
            self._history.append((elapsed, seconds))
            self._near = [each for each in self._near if each.seconds <= self._limit]
        if fits and seconds <= self._limit:
            if not any(each.seconds <= seconds and each.sent_bytes <= sent_bytes for each in self._near):
                self._near = [e for e in self._near if e.seconds < seconds or e.sent_bytes < sent_bytes]
                self._near.append(_Near(seconds, sent_bytes, simulator.strategy))
        return better

    def _tell(self) -> None:
        """Counts a proposal, and tells of the progress now and then."""
        self._proposals += 1
        elapsed = time.perf_counter() - self._began
        if self._progress is not None and elapsed > self._told + 0.1:
            self._told = elapsed
            self._progress(elapsed, self._best_seconds, self._proposals)

    @property
    def _limit(self) -> float:
        return self._best_seconds * (1 + self._tolerance)

    @property
    def _fewest(self) -> _Near:
        return min(self._near, key=lambda each: (each.sent_bytes, each.seconds))

    def chains_and_polish(self, begun: Sequence[Simulator], beta: float, seed: int, budget: _Budget) -> None:
        """The chains and the polish in turns, until the budget is over, or half of it has brought no improvement."""
        began = improved_at = time.perf_counter()
        done, improved, seconds = 0, 0, self._best_seconds
        polish: Polish | None = None
        steps: Iterator[bool] = iter(())

        def is_over() -> bool:
            return time.perf_counter() - began >= budget.seconds

        rngs = [np.random.default_rng([seed, number]) for number in range(len(begun) + 1)]
        assert self.best is not None
        restarted, polished = self._simulator(self.best), self._simulator(self.best)
        simulators = (*begun, restarted)
        chains = [walk(s, self._space, beta, rng, self._memory_limit) for s, rng in zip(simulators, rngs)]
        for mark in _marks():
            if mark > budget.proposals:
                break
            _move(restarted, self.best)
            for simulator, chain in zip(simulators, chains):
                self._advance(simulator, itertools.islice(chain, mark - done), is_over)
            done = mark
            if budget.polish and (polish is None or polish.limit > self._best_seconds):
                _move(polished, self.best)
                polish = Polish(polished, self._space, self._memory_limit, Fastest(polished))
                steps = polish.fastest()
            if polish is not None:
                self._advance_polish(polish, steps, budget.polish_after(done * len(rngs)), is_over)
            if self._best_seconds < seconds:
                seconds, improved, improved_at = self._best_seconds, done, time.perf_counter()
            now = time.perf_counter()
            if is_over() or done - improved >= budget.proposals / 2 or now - improved_at >= budget.seconds / 2:
                break
        if polish is not None and not math.isinf(budget.seconds):
            self._advance_polish(polish, steps, budget.polish, is_over)
        if polish is not None and polish.is_local_optimum:
            self._optimum = polished.strategy

    def _advance(self, simulator: Simulator, turns: Iterator[bool], is_over: Callable[[], bool]) -> None:
        """Some turns of a chain."""
        for taken in turns:
            if taken:
                self._note(simulator)
            self._tell()
            if is_over():
                break

    def _advance_polish(self, polish: Polish, steps: Iterator[bool], most: float, is_over: Callable[[], bool]) -> None:
        """Some steps of a polish, until all polishes have made `most`."""
        while self._polished < most and not is_over():
            better = next(steps, None)
            if better is None:
                break
            self._polished += 1
            self._note(polish.simulator, better)
            self._tell()

    def lower_bytes(self, budget: _Budget) -> None:
        """Lowers the bytes of the strategy near to the fastest that sends the fewest."""
        self._is_lowering = True
        began, first = time.perf_counter(), self._polished
        simulator = self._simulator(self._fewest.strategy)
        polish = Polish(simulator, self._space, self._memory_limit, FewestBytes(simulator, self._limit))

        def is_over() -> bool:
            return time.perf_counter() - began >= _BYTES_SHARE * budget.seconds

        self._advance_polish(polish, polish.fewest_bytes(self._begun), first + budget.polish, is_over)

    def result(self) -> Found:
        assert self.best is not None
        strategy = self._fewest.strategy
        simulator = self._simulator(strategy)
        return Found(
            strategy=strategy,
            simulated=describe(simulator.tasks, simulator.timeline),
            fastest=self.best,
            fastest_seconds=self._best_seconds,
            starts=self._starts,
            proposals=self._proposals,
            elapsed=time.perf_counter() - self._began,
            history=self._history,
            is_local_optimum=self._optimum == self.best,
            interrupted=self.interrupted,
        )


def _move(simulator: Simulator, strategy: Strategy) -> None:
    """Gives a simulator another strategy."""
    changes = {i: c for i, (old, c) in enumerate(zip(simulator.strategy, strategy)) if old != c}
    if changes:
        simulator.try_changes(changes)
        simulator.keep()


def _excess(simulator: Simulator, limit: float) -> tuple[float, int]:
    """Bytes above the limit, added up over the devices; and the bytes of the fullest device."""
    memory = simulator.memory_bytes
    return sum(max(used_bytes - limit, 0.0) for used_bytes in memory), max(memory)
