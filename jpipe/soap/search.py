"""Markov chain Monte Carlo over strategies (FlexFlow, section 6.2), and the steps that improve its result.

The chain visits strategy S with a probability proportional to exp(-beta * seconds(S)). A step draws an operator and a
configuration, both uniformly, and takes the change with probability min(1, exp(beta * (seconds before - seconds
after))).
"""

import dataclasses
import functools
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
from jpipe.soap.polish import Polish
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
      strategy: the best strategy that was found.
      simulated: its seconds, memory and traffic.
      starts: name -> simulated seconds of the strategies that the search began with, those that need too much memory
        too.
      proposals: number of changes that were simulated.
      elapsed: seconds of the search.
      history: `(elapsed, seconds)` of each improvement.
      is_local_optimum: whether no other configuration of one operator is faster; False if it is not known.
      interrupted: whether Ctrl-C ended the search.
    """

    strategy: Strategy
    simulated: Simulated
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
    progress: Callable[[float, float, int], None] | None = None,
) -> Found:
    """Searches for the fastest strategy of a graph on a machine.

    A chain runs from every start, each with the same share of the budget; it ends early when half of its share brought
    no improvement. At last single operators, pairs and runs of them are changed as long as that helps. Ctrl-C ends the
    search, and the best so far is returned.

    Args:
      graph: the operators.
      machine: the devices and links.
      costs: seconds of operators; None computes them from FLOPs and bytes.
      budget_seconds: seconds of all chains. The polish that follows may take as long again.
      max_proposals: the number of proposals of all chains. Without any budget it is 2000 times the starts.
      memory_limit: bytes per device; None is that of the machine.
      starts: name -> strategy; None: data parallelism, the experts and one random strategy.
      space: the configurations to choose from; None: all.
      beta: the inverse temperature, per second; None chooses it by the fastest start.
      seed: the seed of the random numbers. With a budget of proposals, the same seed finds the same strategy.
      sync, optimizer_arrays: see `jpipe.soap.tasks.Tasks`.
      polish: whether to change operators at last as long as that helps; see `jpipe.soap.polish`.
      max_polish_proposals: the number of proposals of the polish; None: until nothing helps, or `budget_seconds` are
        over.
      progress: called with elapsed seconds, the best seconds and the number of proposals, now and then.

    Raises:
      ValueError: if a start does not fit, a budget is not above 0, or no strategy fits into the memory.
    """
    for name, value in {
        "budget_seconds": budget_seconds,
        "max_proposals": max_proposals,
        "beta": beta,
        "memory_limit": memory_limit,
    }.items():
        if value is not None and not value > 0:
            raise ValueError(f"`{name}` must be above 0, got {shown(value)}.")
    space = Space(graph, machine.num_devices) if space is None else space
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
    if budget_seconds is None and max_proposals is None:
        max_proposals = 2000 * len(starts)
    limit = machine.memory_bytes if memory_limit is None else memory_limit
    costs = Analytic(machine) if costs is None else costs
    simulator = functools.partial(
        Simulator,
        graph,
        machine,
        costs,
        sync=sync,
        optimizer_arrays=optimizer_arrays,
    )
    run = _Search(simulator, space, limit, progress)
    try:
        begun = run.begin(starts)
        if beta is None:
            beta = _SHARPNESS / min(start.seconds for start in begun)
        seconds = math.inf if budget_seconds is None else budget_seconds
        share = _Budget(seconds / len(begun), math.inf)
        if max_proposals is not None:
            share = share._replace(proposals=max(max_proposals // len(begun), 1))
        for start in begun:
            run.chain(start, beta, rng, share)
        if polish:
            most = math.inf if max_polish_proposals is None else max_polish_proposals
            run.polish(_Budget(seconds, most))
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
    """The most seconds, and the most proposals."""

    seconds: float
    proposals: float

    def is_over(self, elapsed: float, count: int) -> bool:
        return elapsed >= self.seconds or count >= self.proposals


class _Search:
    """A search: its chains, its polish, and the best strategy so far."""

    def __init__(
        self,
        simulator: Callable[[Sequence[Config]], Simulator],
        space: Space,
        memory_limit: float,
        progress: Callable[[float, float, int], None] | None,
    ):
        self._simulator, self._space = simulator, space
        self._memory_limit, self._progress = memory_limit, progress
        self._began = time.perf_counter()
        self._told = -math.inf
        self._starts: dict[str, float] = {}
        self._proposals = 0
        self._history: list[tuple[float, float]] = []
        self._best_seconds = math.inf
        self.best: Strategy | None = None
        self._is_local_optimum = False
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
        """Keeps the present strategy if it is the best and fits into the memory; says whether it does."""
        elapsed = time.perf_counter() - self._began
        better = fits and simulator.seconds < self._best_seconds
        if better:
            self._best_seconds = simulator.seconds
            self.best = simulator.strategy
            self._history.append((elapsed, simulator.seconds))
        if self._progress is not None and elapsed > self._told + 0.1:
            self._told = elapsed
            self._progress(elapsed, self._best_seconds, self._proposals)
        return better

    def chain(
        self,
        simulator: Simulator,
        beta: float,
        rng: np.random.Generator,
        budget: _Budget,
    ) -> None:
        """One Markov chain, until the budget is over, or half of it has brought no improvement."""
        half = _Budget(budget.seconds / 2, budget.proposals / 2)
        began = improved_at = time.perf_counter()
        improved = count = 0
        fastest = simulator.seconds
        for taken in walk(simulator, self._space, beta, rng, self._memory_limit):
            count += 1
            self._proposals += 1
            if self._note(simulator) or (taken and simulator.seconds < fastest):
                fastest = min(fastest, simulator.seconds)
                improved, improved_at = count, time.perf_counter()
            now = time.perf_counter()
            is_late = half.is_over(now - improved_at, count - improved)
            if is_late or budget.is_over(now - began, count):
                break

    def polish(self, budget: _Budget) -> None:
        """Changes the best strategy as long as that helps: single operators, pairs and runs."""
        assert self.best is not None
        began, first = time.perf_counter(), self._proposals
        simulator = self._simulator(self.best)

        def is_over() -> bool:
            elapsed = time.perf_counter() - began
            return budget.is_over(elapsed, self._proposals - first)

        def tried(better: bool) -> None:
            self._proposals += 1
            self._note(simulator, better)

        polish = Polish(simulator, self._space, self._memory_limit, is_over, tried)
        polish.run()
        self._is_local_optimum = polish.is_local_optimum

    def result(self) -> Found:
        assert self.best is not None
        simulator = self._simulator(self.best)
        return Found(
            strategy=self.best,
            simulated=describe(simulator.tasks, simulator.timeline),
            starts=self._starts,
            proposals=self._proposals,
            elapsed=time.perf_counter() - self._began,
            history=self._history,
            is_local_optimum=self._is_local_optimum,
            interrupted=self.interrupted,
        )


def _excess(simulator: Simulator, limit: float) -> tuple[float, int]:
    """Bytes above the limit, added up over the devices; and the bytes of the fullest device."""
    memory = simulator.memory_bytes
    return sum(max(used_bytes - limit, 0.0) for used_bytes in memory), max(memory)
