"""Searches for a good table under measured costs and a memory limit."""

import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jpipe._table.counts import check_counts
from jpipe._table.intervals import covering
from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.schedule import Schedule
from jpipe.schedules.gpipe import gpipe
from jpipe.schedules.interleaved import interleaved
from jpipe.schedules.interleaved import refusal as refusal_of_interleaved
from jpipe.schedules.list_scheduling import Job, Progress, Rule, list_schedule
from jpipe.schedules.one_f_one_b import one_f_one_b
from jpipe.schedules.zero_bubble import (
    zb_v_refusal,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)
from jpipe.simulate import TRANSFERS, Costs, simulate


class SearchResult(NamedTuple):
    """The result of `search`.

    Attributes:
      schedule: the best table found.
      makespan: its makespan, in the unit of the costs.
      bound: a lower bound on the makespan of every synchronous table of these stages on
        these devices.
      memory: `[D]`, the largest sum of activations that each device keeps at one time.
      tried: the number of tables priced.
    """

    schedule: Schedule
    makespan: float
    bound: float
    memory: np.ndarray
    tried: int


@suggests
def search(
    costs: Costs,
    num_microbatches: int,
    memory_limit: float = math.inf,
    *,
    num_stages: int | None = None,
    num_devices: int | None = None,
    activations: ArrayLike = 1.0,
    mode: Literal["lockstep", "dependencies"] = "lockstep",
) -> SearchResult:
    """Searches for the synchronous table of least makespan under a memory limit.

    It prices every schedule of `jpipe.schedules` that takes these counts, and tables from
    list scheduling with several rules: which kind of operation goes first, and how many
    microbatches are in flight and how many weight gradients wait at most. The result is
    therefore never worse than a named schedule under the same limit. `bound` shows how
    much better any table could be.

    Args:
      costs: the measured costs of one microbatch.
      num_microbatches: N, at least 1.
      memory_limit: the most activations of a device, in the unit of `activations`.
      num_stages: S. None: as many as `costs` or `activations` has numbers.
      num_devices: D, a divisor of S. None: S. With several stages per device, stage s is
        on device s modulo D; with two, a V (down the devices and up again) is tried too.
      activations: size of the arrays that one microbatch keeps between its forward and its weight
        gradient: a number, or `[S]`, one per stage.
      mode: see `simulate`.

    Returns:
      A `SearchResult`.

    Raises:
      ValueError: if a count is wrong, arrays disagree on the number of stages, or the
        limit is less than the activations of one microbatch on all stages of a device.

    Example:
      Short weight gradients, and less memory than ZB-H2 needs.

      >>> costs = Costs(1.0, 1.2, 0.6)
      >>> result = search(costs, 8, memory_limit=4, num_stages=4)
      >>> result.makespan <= simulate(zero_bubble_h1(4, 8), costs).makespan
      True

    References:
      The rules follow Qi et al., ICLR 2024, arXiv:2401.10241, section 3.1, and their
      V-shaped schedules, NeurIPS 2024, arXiv:2405.15362.
    """
    S = _num_stages(costs, activations, num_stages)
    D = S if num_devices is None else num_devices
    check_counts(num_stages=S, num_microbatches=num_microbatches, num_devices=D)
    if S % D:
        raise ValueError(
            f"`num_devices` must divide the {S} stages, got {shown(D)}: every device has the same "
            "number of stages. Use a divisor."
        )
    activations = np.broadcast_to(np.asarray(activations, float), S)
    least = min(_least_memory(device, activations) for device in _placements(S, D))
    if not least <= memory_limit:
        raise ValueError(
            f"`memory_limit` must be at least {least:g}, got {memory_limit:g}: a device "
            "keeps at least the activations of one microbatch of each of its stages. "
            "Recompute activations, or use more stages."
        )
    best, tried = None, 0
    for schedule in _candidates(costs, S, num_microbatches, D, memory_limit, activations=activations):
        memory = _memory(schedule, activations)
        if memory.max() > memory_limit:
            continue
        tried += 1
        makespan = simulate(schedule, costs, mode).makespan
        if best is None or makespan < best.makespan:
            best = SearchResult(schedule, makespan, 0.0, memory, 0)
    assert best is not None, "one microbatch at a time fits every permitted limit"
    bound = min(_bound(costs, device, num_microbatches) for device in _placements(S, D))
    return best._replace(bound=bound, tried=tried)


def _num_stages(costs: Costs, activations: ArrayLike, num_stages: int | None) -> int:
    """The number of stages on which all arguments agree."""
    arrays = (costs.forward, costs.backward, costs.weight_grad, activations)
    lengths = {len(np.asarray(a)) for a in arrays if np.ndim(a)}
    lengths |= set() if num_stages is None else {num_stages}
    if len(lengths) != 1:
        raise ValueError(
            "`num_stages`, the costs and `activations` must agree on the number of stages, got "
            f"{sorted(lengths) or 'none'}. Pass `num_stages`, or one number per stage."
        )
    return lengths.pop()


def _placements(S: int, D: int) -> Iterator[list[int]]:
    """The device of each stage: s modulo D, and for two stages per device also a V."""
    yield [s % D for s in range(S)]
    if S == 2 * D:
        yield [*range(D), *reversed(range(D))]


def _least_memory(device: Sequence[int], activations: np.ndarray) -> float:
    return float(np.bincount(device, activations).max())


def _memory(schedule: Schedule, activations: np.ndarray) -> np.ndarray:
    """`[D]`, the largest sum of activations that a device keeps at one tick."""
    first, last = schedule.forward_ticks(), schedule.weight_grad_ticks()
    live = covering(first, last, schedule.num_ticks)  # [T, C]
    per_column = live * activations[schedule.stage]
    per_device = np.zeros((schedule.num_ticks, schedule.num_devices))
    columns: Any = (slice(None), schedule.device)
    np.add.at(per_device, columns, per_column)
    return per_device.max(axis=0)


def _candidates(costs: Costs, S: int, N: int, D: int, limit: float, activations: np.ndarray) -> Iterator[Schedule]:
    """Yields every table to price. Some do not fit the limit."""
    with warnings.catch_warnings():
        # Tables of few microbatches warn of their bubble. Here they are priced instead.
        warnings.simplefilter("ignore", UserWarning)
        if S == D:
            yield gpipe(S, N)
            yield from (one_f_one_b(S, N, ticks=t) for t in ("paired", "unit"))
            yield zero_bubble_h1(S, N)
            yield zero_bubble_h2(S, N)
        elif refusal_of_interleaved(S, N, S // D, "paired") is None:
            yield from (interleaved(S, N, S // D, ticks=t) for t in ("paired", "unit"))
        if S == 2 * D and zb_v_refusal(S, N) is None:
            yield zero_bubble_v(S, N)
        rules = itertools.product(
            ("backward", "forward", "turns"),
            (False, True),
            sorted({0, 1, S // 2, S - 1, N}),
            (None, costs.of_stages(S)),
        )
        placements = (device for device in _placements(S, D) if _least_memory(device, activations) <= limit)
        for device, (first, late_stages_first, wait, lengths) in itertools.product(placements, rules):
            rule = _rule(first, late_stages_first, wait, limit, activations)
            ticks = list_schedule(device, N, rule, lengths)
            yield Schedule.from_ticks("search", **ticks)


def _rule(
    first: str,
    late_stages_first: bool,
    wait: int,
    limit: float,
    activations: np.ndarray,
) -> Rule:
    """A rule for list scheduling.

    Args:
      first: the kind that goes first: "backward", "forward", or "turns" for forward during
        the warm-up and backward after it.
      late_stages_first: whether the forward of a device's latest stage goes first.
      wait: the number of weight gradients that may wait. If more wait, they go first.
      limit: the memory limit. A microbatch enters a device only if there is room for its
        activations on all stages of the device, so that it can always leave again.
      activations: `[S]`, of one microbatch.
    """

    def choose(d: int, ready: list[Job], progress: Progress) -> Job | None:
        stages = np.flatnonzero(progress.device == d)
        entered = progress.forward[stages[0]]
        reserved = ((entered - progress.weight_grad) * activations)[stages].sum()
        full = reserved + activations[stages].sum() > limit * (1 + 1e-9)
        balance = int((progress.forward - progress.backward)[stages].sum())
        warm_up = balance < len(activations) - stages[-1]
        preferred = first
        if first == "turns":
            preferred = "forward" if warm_up else "backward"

        def rank(operation: Job) -> tuple[int, int]:
            kind, s, _ = operation
            if kind == "weight_grad":
                return (0 if progress.pending(d) > wait else 3, s)
            near = -s if kind == "forward" and late_stages_first else s
            return (1 if kind == preferred else 2, near)

        allowed = (o for o in ready if not (full and o.kind == "forward" and o.stage == stages[0]))
        return min(allowed, key=rank, default=None)

    return choose


def _bound(costs: Costs, device: Sequence[int], N: int) -> float:
    """A lower bound on the makespan of every table with this placement.

    It is the larger of two: the time until the first input reaches a device plus all work
    of the device, for every device; and the time of one microbatch through all stages and
    back.
    """
    S = len(device)
    times = costs.of_stages(S)
    F, B, W = (times[name] for name in ("forward", "backward", "weight_grad"))
    sends_forward, sends_back = (
        [times[name][s] * (device[s] != device[s + 1]) for s in range(S - 1)] for name in TRANSFERS.values()
    )
    input_arrives = np.cumsum([0, *(F[:-1] + sends_forward)])  # [S]
    on_device = [np.equal(device, d) for d in range(max(device) + 1)]
    per_device = [input_arrives[here].min() + N * (F + B + W)[here].sum() for here in on_device]
    one_microbatch = F.sum() + B.sum() + sum(sends_forward) + sum(sends_back) + W[0]
    return float(max(*per_device, one_microbatch))
