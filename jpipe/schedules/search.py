"""Looks for a good table: from measured costs and a memory limit."""

import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jpipe.schedule import Schedule, check_counts
from jpipe.schedules.gpipe import gpipe
from jpipe.schedules.interleaved import interleaved
from jpipe.schedules.one_f_one_b import one_f_one_b
from jpipe.schedules.ready import Operation, Progress, Rule, place
from jpipe.schedules.zero_bubble import zero_bubble_h1, zero_bubble_h2, zero_bubble_v
from jpipe.simulate import TRANSFERS, Costs, simulate


class Found(NamedTuple):
    """What `search` comes back with.

    Attributes:
      schedule: the best table found.
      makespan: its price, in the unit of the costs.
      bound: no synchronous table of these stages on these devices takes less.
      memory: `[D]`, the activations of each device at their most.
      tried: how many tables were priced.
    """

    schedule: Schedule
    makespan: float
    bound: float
    memory: np.ndarray
    tried: int


def search(
    costs: Costs,
    num_microbatches: int,
    memory_limit: float = math.inf,
    *,
    num_stages: int | None = None,
    num_devices: int | None = None,
    activations: ArrayLike = 1.0,
    mode: Literal["lockstep", "dependencies"] = "lockstep",
) -> Found:
    """The synchronous table of least makespan that it finds under a memory limit.

    Prices every schedule of `jpipe.schedules` that fits the counts, and tables built
    greedily: each device runs what is ready in one of several orders of preference, with
    several limits on what is in flight and on the weight gradients that wait. So what
    comes back is never worse than a schedule with a name under the same limit; `bound` says
    how much better any could be.

    Args:
      costs: of one microbatch, as measured.
      num_microbatches: N, at least 1.
      memory_limit: the most activations of a device, in the unit of `activations`.
      num_stages: S; None: as many as `costs` or `activations` has numbers.
      num_devices: D, which divides S; None: S. With more than one stage a device, they are
        dealt in turn, or for two also down the devices and up again, whichever is better.
      activations: what one microbatch keeps between its forward and its weight gradient;
        a number, or `[S]`, one for each stage.
      mode: as for `simulate`.

    Returns:
      A `Found`.

    Raises:
      ValueError: if a count is wrong, numbers are for unlike counts of stages, or no table
        fits the limit, which is every stage's activations of one microbatch at the least.

    Example: weight gradients that are short, and memory for less than ZB-H2
      >>> found = search(Costs(1.0, 1.2, 0.6), 8, memory_limit=4, num_stages=4)
      >>> found.makespan <= simulate(zero_bubble_h1(4, 8), Costs(1.0, 1.2, 0.6)).makespan
      True

    References:
      The orders of preference are those of Qi et al., ICLR 2024, arXiv:2401.10241,
      section 3.1, and of their V-shape schedules, arXiv:2405.15362.
    """
    S = _num_stages(costs, activations, num_stages)
    D = S if num_devices is None else num_devices
    check_counts(num_stages=S, num_microbatches=num_microbatches, num_devices=D)
    if S % D:
        raise ValueError(
            f"`num_devices` must divide the {S} stages, got {D}: every device has as many. Use a divisor."
        )
    activations = np.broadcast_to(np.asarray(activations, float), S)
    least = min(_least_memory(d, activations) for d in _placements(S, D))
    if not least <= memory_limit:
        raise ValueError(
            f"`memory_limit` must be at least {least:g}, got {memory_limit:g}: a device keeps the activations of one "
            "microbatch of each of its stages at the least. Recompute activations, or use more stages."
        )
    best, tried = None, 0
    for schedule in _candidates(
        costs, S, num_microbatches, D, memory_limit, activations
    ):
        memory = _memory(schedule, activations)
        if memory.max() > memory_limit:
            continue
        tried += 1
        makespan = simulate(schedule, costs, mode).makespan
        if best is None or makespan < best.makespan:
            best = Found(schedule, makespan, 0.0, memory, 0)
    assert best is not None  # one microbatch at a time always fits
    bound = min(_bound(costs, device, num_microbatches) for device in _placements(S, D))
    return best._replace(bound=bound, tried=tried)


def _num_stages(costs: Costs, activations: ArrayLike, given: int | None) -> int:
    arrays = (costs.forward, costs.backward, costs.weight_grad, activations)
    lengths = {len(np.asarray(a)) for a in arrays if np.ndim(a)}
    lengths |= set() if given is None else {given}
    if len(lengths) != 1:
        raise ValueError(
            "`num_stages`, the costs and `activations` must agree on the number of stages, got "
            f"{sorted(lengths) or 'none'}. Pass `num_stages`, or one number for each stage."
        )
    return lengths.pop()


def _placements(S: int, D: int) -> Iterator[list[int]]:
    """The device of each stage: dealt in turn, and for two a device also as a V."""
    yield [s % D for s in range(S)]
    if S == 2 * D:
        yield [*range(D), *reversed(range(D))]


def _least_memory(device: Sequence[int], activations: np.ndarray) -> float:
    return float(np.bincount(device, activations).max())


def _memory(schedule: Schedule, activations: np.ndarray) -> np.ndarray:
    """`[D]`, the most activations at once, from forwards to the ends of weight gradients."""
    ticks = np.arange(schedule.num_ticks)[:, None, None]
    first, last = schedule.forward_ticks(), schedule.weight_grad_ticks()
    live = ((first <= ticks) & (ticks <= last)).sum(axis=1)  # [T, C]
    held = live * activations[schedule.stage]
    of_device = np.zeros((schedule.num_ticks, schedule.num_devices))
    np.add.at(of_device, (slice(None), schedule.device), held)
    return of_device.max(axis=0)


def _candidates(
    costs: Costs, S: int, N: int, D: int, limit: float, activations: np.ndarray
) -> Iterator[Schedule]:
    """Every table that is priced; some do not fit the limit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # few microbatches
        if S == D:
            yield gpipe(S, N)
            yield from (one_f_one_b(S, N, ticks=t) for t in ("paired", "unit"))
            yield zero_bubble_h1(S, N)
            yield zero_bubble_h2(S, N)
        elif N % D == 0:
            yield from (interleaved(S, N, S // D, ticks=t) for t in ("paired", "unit"))
        if S == 2 * D:
            yield zero_bubble_v(S, N)
        preferences = itertools.product(
            ("backward", "forward", "turns"),
            (False, True),
            sorted({0, 1, S // 2, S - 1, N}),
            (None, costs.of_stages(S)),
        )
        fitting = (
            d for d in _placements(S, D) if _least_memory(d, activations) <= limit
        )
        for device, (first, late_stages_first, wait, lengths) in itertools.product(
            fitting, preferences
        ):
            rule = _rule(first, late_stages_first, wait, limit, activations)
            at = place(device, N, rule, lengths)
            yield Schedule.from_ticks("search", **at)


def _rule(
    first: str,
    late_stages_first: bool,
    wait: int,
    limit: float,
    activations: np.ndarray,
) -> Rule:
    """A device's preference.

    Args:
      first: what goes first, "backward", "forward" or "turns", for one after the other.
      late_stages_first: whether of a device's forwards the one nearest to the end does.
      wait: how many weight gradients may wait before they go first.
      limit: a microbatch enters a device if there is room for the activations of all of
        the device's stages, so that it can always leave again.
      activations: `[S]`, of one microbatch.
    """

    def choose(d: int, ready: list[Operation], progress: Progress) -> Operation | None:
        mine = np.flatnonzero(progress.device == d)
        entered = progress.forward[mine[0]]
        reserved = ((entered - progress.weight_grad) * activations)[mine].sum()
        full = reserved + activations[mine].sum() > limit * (1 + 1e-9)
        balance = int((progress.forward - progress.backward)[mine].sum())
        warm = balance < len(activations) - mine[-1]
        preferred = first
        if first == "turns":
            preferred = "forward" if warm else "backward"

        def rank(operation: Operation) -> tuple[int, int]:
            kind, s, _ = operation
            if kind == "weight_grad":
                return (0 if progress.pending(d) > wait else 3, s)
            near = -s if kind == "forward" and late_stages_first else s
            return (1 if kind == preferred else 2, near)

        allowed = (
            o
            for o in ready
            if not (full and o.kind == "forward" and o.stage == mine[0])
        )
        return min(allowed, key=rank, default=None)

    return choose


def _bound(costs: Costs, device: Sequence[int], N: int) -> float:
    """No table with this placement takes less: a device's work behind the way to its first, and one microbatch's way."""
    S = len(device)
    found = costs.of_stages(S)
    F, B, W = (found[name] for name in ("forward", "backward", "weight_grad"))
    hops, back = (
        [found[name][s] * (device[s] != device[s + 1]) for s in range(S - 1)]
        for name in TRANSFERS.values()
    )
    reach = np.cumsum([0, *(F[:-1] + hops)])  # of a stage's input
    device = np.asarray(device)
    work = [
        reach[device == d].min() + N * (F + B + W)[device == d].sum()
        for d in range(device.max() + 1)
    ]
    one = F.sum() + B.sum() + sum(hops) + sum(back) + W[0]
    return float(max(*work, one))
