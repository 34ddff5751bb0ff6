"""Stages with several copies: PipeDream's 1F1B-RR, from the ticks of tables without copies.

A stage with r copies hands its microbatches out in turn: microbatch b of a minibatch runs on
copy b mod r, forward and backward (*round robin*).

Letters: S stages, s a stage; r_s copies of stage s; N microbatches, b a microbatch; L the
largest r_s; G = ceil(N / L) groups; w_s the warm-up of stage s; T ticks of a round.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jpipe._table.counts import wrong_counts
from jpipe._util.foreign import shown
from jpipe.schedule import IDLE


def wrong_replicas(num_stages: int, num_microbatches: int, replicas: Sequence[int] | None) -> str | None:
    """The refusal of `replicas`; None if the builder can use them.

    Example:
      >>> print(wrong_replicas(2, 8, (3, 1, 1))[:60])
      `replicas` must have one number for each of the 2 stages, go
    """
    if replicas is None:
        return None
    counts = tuple(replicas) if isinstance(replicas, Sequence | np.ndarray) else replicas
    if not isinstance(counts, tuple) or isinstance(replicas, str):
        return (
            f"`replicas` must be a sequence of integers, one per stage, got {shown(replicas)}: it "
            f"says how many devices run each stage. Pass for example "
            f"{(3,) + (1,) * (num_stages - 1)}, or None for one device per stage."
        )
    if len(counts) != num_stages:
        return (
            f"`replicas` must have one number for each of the {num_stages} stages, got "
            f"{shown(counts)}, which has {len(counts)}: it says how many devices run each stage. "
            f"Pass {num_stages} numbers."
        )
    for s, count in enumerate(counts):
        if wrong_counts(count=count):
            return (
                f"`replicas` must hold integers of at least 1, got {shown(count)} for stage {s}: "
                "a stage runs on one device or more. Pass 1 or more."
            )
    if num_microbatches < max(counts):
        s = counts.index(max(counts))
        return (
            f"`num_microbatches` must be at least {max(counts)}, the copies of stage {s}, got "
            f"{num_microbatches}: copies take microbatches in turn, and a copy would have "
            "none. Use more microbatches or fewer `replicas`."
        )
    return None


def wrong_update_every(num_stages: int, num_microbatches: int, update_every: Sequence[int] | None) -> str | None:
    """The refusal of `update_every` without regard to copies; None if the builder can use it.

    Example:
      >>> print(wrong_update_every(2, 8, (3, 1))[:68])
      `update_every` must hold divisors of `num_microbatches` (8), got 3 f
    """
    if update_every is None:
        return None
    whole = isinstance(update_every, Sequence | np.ndarray) and not isinstance(update_every, str)
    if not whole or len(update_every) != num_stages:
        return (
            f"`update_every` must have one number for each of the {num_stages} stages, got {shown(update_every)}: it "
            "says after how many microbatches a stage updates. Pass for example "
            f"{(num_microbatches,) + (1,) * (num_stages - 1)}, or None: all update after {num_microbatches}."
        )
    for s, period in enumerate(update_every):
        if wrong_counts(update_every=period) or num_microbatches % period:
            return (
                f"`update_every` must hold divisors of `num_microbatches` ({num_microbatches}), got {shown(period)} "
                f"for stage {s}: all steps are alike, so in each of them a stage updates a whole number of times. Use "
                "a multiple of all numbers of `update_every` as `num_microbatches`."
            )
    return None


def has_copies(replicas: Sequence[int] | None) -> bool:
    """Returns whether any stage has more than one copy."""
    return replicas is not None and max(replicas) > 1


def with_copies(
    ticks_of: Callable[[int], Mapping[str, Any]],
    num_microbatches: int,
    replicas: Sequence[int] | None,
) -> Mapping[str, Any]:
    """The arguments of `Schedule.from_ticks`, `in_groups` if a stage has copies."""
    if replicas is None or not has_copies(replicas):
        return ticks_of(num_microbatches)
    return in_groups(ticks_of, num_microbatches, one_after_the_other(replicas))


def in_groups(
    ticks_of: Callable[[int], Mapping[str, Any]],
    num_microbatches: int,
    copies: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Gives the stages of a table copies, by running groups of microbatches as one.

    A tick of the result moves a whole group of L microbatches where a tick of the table moves
    one microbatch, L being the largest number of copies. Copy k of a stage runs those b of the
    group with b mod r = k: one after the other, in as many columns of its device as there are
    such microbatches at most. All copies of a stage are busy in the same tick. If N is no
    multiple of L, the last group is smaller.

    Args:
      ticks_of: the number of groups G -> arguments of `Schedule.from_ticks` for a table of G
        microbatches without copies: ticks `[G, S]`, `num_ticks`, and versions.
      num_microbatches: N.
      copies: for each stage the devices of its copies.

    Returns:
      The arguments of `Schedule.from_ticks` for the table with copies. Versions are left to
      the caller.

    Example:
      >>> s = np.arange(2)
      >>> chain = lambda G: dict(forward=np.arange(G)[:, None] + s)
      >>> arguments = in_groups(chain, 4, [(0, 1), (2,)])
      >>> arguments["stage"].tolist(), arguments["device"].tolist()
      ([0, 0, 1, 1], [0, 1, 2, 2])
      >>> np.where(arguments["forward"] == IDLE, -1, arguments["forward"]).tolist()
      [[0, -1, 1, -1], [-1, 0, -1, 1], [1, -1, 2, -1], [-1, 1, -1, 2]]
    """
    N, L = num_microbatches, max(map(len, copies))
    group = np.arange(N) // L
    base = dict(ticks_of(-(-N // L)))
    lanes: list[tuple[int, int, np.ndarray]] = []  # stage, device, microbatches
    for s, devices in enumerate(copies):
        for k, device in enumerate(devices):
            mine = np.arange(k, N, len(devices))  # the microbatches of the copy
            rank = np.arange(len(mine)) - np.searchsorted(group[mine], group[mine])
            lanes += [(s, device, mine[rank == lane]) for lane in range(rank.max() + 1)]
    result: dict[str, Any] = {
        "stage": np.array([s for s, _, _ in lanes]),
        "device": np.array([device for _, device, _ in lanes]),
    }
    for name in ("forward", "backward", "weight_grad"):
        if name not in base:
            continue
        ticks = np.full((N, len(lanes)), IDLE, np.int64)
        for c, (s, _, microbatches) in enumerate(lanes):
            ticks[microbatches, c] = base[name][group[microbatches], s]
        result[name] = ticks
    if "num_ticks" in base:
        result["num_ticks"] = base["num_ticks"]
    return result


def one_after_the_other(replicas: Sequence[int]) -> list[range]:
    """For each stage the devices of its copies, if stages follow each other.

    Example:
      >>> one_after_the_other((3, 1))
      [range(0, 3), range(3, 4)]
    """
    ends = [0, *itertools.accumulate(replicas)]
    return [range(*pair) for pair in itertools.pairwise(ends)]


def warm_up(replicas: Sequence[int]) -> list[int]:
    """w_s, the forwards of a copy before its first backward, as in PipeDream's runtime.

    w_s = floor((R - 1 - sum of r_i over earlier stages i) / r_s), with R devices in all.

    Example:
      >>> warm_up((15, 1)), warm_up((2, 1, 1)), warm_up((1, 1, 1))
      ([1, 0], [1, 1, 0], [2, 1, 0])
    """
    after = [sum(replicas[s:]) for s in range(len(replicas))]
    return [(n - 1) // r for n, r in zip(after, replicas, strict=True)]


_KINDS = ("forward", "backward", "weight_grad")


def unit_ticks(
    num_microbatches: int,
    replicas: Sequence[int],
    *,
    synchronous: bool,
    update_every: Sequence[int] | None = None,
) -> dict[str, Any]:
    """1F1B-RR in unit ticks: one operation per device and tick, in the order of PipeDream.

    A copy of stage s runs w_s forwards (see `warm_up`), and then in turn a forward, and the
    input gradient and the weight gradient of its oldest microbatch. Every operation runs as
    early as this order and its inputs allow.

    In an asynchronous round

    - the copies of a stage update together, when the last of them has its gradients. The first
      forward of a copy after its last weight gradient for an update waits for that;
    - no copy runs a forward of the next minibatch before all copies have run theirs of this one;
    - T is the smallest at which such a round exists, at least 3 ceil(N / r) for the least r.

    Args:
      num_microbatches: N, at least as many as any stage has copies.
      replicas: `[S]`, r_s.
      synchronous: whether the table is one minibatch. Else it is a round that repeats.
      update_every: `[S]`, the microbatches of an update of each stage; None: N.

    Returns:
      The arguments of `Schedule.from_ticks`.
    """
    N, S = num_microbatches, len(replicas)
    periods = update_every or [N] * S
    order = _Order(N, S)
    every = np.arange(N)
    for s, (r, w) in enumerate(zip(replicas, warm_up(replicas), strict=True)):
        turns_of_copy = [np.arange(k, N, r) for k in range(r)]
        order.add(("backward", s, every), ("weight_grad", s, every))
        if s > 0:
            order.add(("forward", s - 1, every), ("forward", s, every))
            order.add(("backward", s, every), ("backward", s - 1, every))
        for mine in turns_of_copy:
            i = np.arange(len(mine))
            ahead, j = divmod(i + w, len(mine))
            goes_on = np.full(len(mine), True)
            if synchronous:
                # No forward is left. Backwards follow each other.
                goes_on = ahead == 0
                last = i[~goes_on]
                order.add(("forward", s, mine[-1]), ("backward", s, mine[last]))
                last = last[last > 0]
                before = ("weight_grad", s, mine[last - 1])
                order.add(before, ("backward", s, mine[last]))
                first = mine[: w + 1]
                order.add(("forward", s, first[:-1]), ("forward", s, first[1:]))
            forward, backward = mine[j[goes_on]], mine[goes_on]
            order.add(("forward", s, forward), ("backward", s, backward), -ahead[goes_on])
            # The microbatch before the first is the last of the round before.
            goes_on &= (i > 0) | (not synchronous)
            before = ("weight_grad", s, mine[i[goes_on] - 1])
            rounds = (ahead + (i == 0))[goes_on]
            order.add(before, ("forward", s, mine[j[goes_on]]), rounds)
        for mine, other in itertools.product(turns_of_copy, repeat=2):
            if synchronous:
                continue
            order.add(("forward", s, other[-1]), ("forward", s, mine[0]), 1)
            for end in range(periods[s], N + 1, periods[s]):
                last = ("weight_grad", s, other[other < end][-1])
                begun = int((mine < end).sum())  # microbatches of the copy up to the update
                turns, number = divmod(begun, len(mine))
                order.add(last, ("weight_grad", s, mine[number]), turns)
                turns, number = divmod(begun + w, len(mine))
                order.add(last, ("forward", s, mine[number]), turns)
    if synchronous:
        return _columns(N, replicas, order.levels)
    least, most = 3 * -(-N // min(replicas)), 3 * N * (S + 1)
    for num_ticks, together in itertools.product(range(least, most + 1), (True, False)):
        ticks = order.earliest(num_ticks, together=together)
        if ticks is not None:
            return _columns(N, replicas, ticks) | {"num_ticks": num_ticks}
    raise AssertionError("one microbatch at a time is a round")


def _columns(num_microbatches: int, replicas: Sequence[int], ticks: np.ndarray) -> dict[str, Any]:
    """One column per copy, with the ticks `[kinds, S, N]` of its microbatches."""
    pairs = [(s, k) for s, r in enumerate(replicas) for k in range(r)]
    result: dict[str, Any] = {
        "stage": np.array([s for s, _ in pairs]),
        "device": np.arange(len(pairs)),
    }
    for kind, kind_ticks in zip(_KINDS, ticks, strict=True):
        result[kind] = np.full((num_microbatches, len(pairs)), IDLE, np.int64)
        for c, (s, k) in enumerate(pairs):
            result[kind][k :: replicas[s], c] = kind_ticks[s, k :: replicas[s]]
    return result


class _Order:
    """The order of operations in a round that may repeat every T ticks."""

    def __init__(self, num_microbatches: int, num_stages: int):
        self._shape = len(_KINDS), num_stages, num_microbatches
        self._parts: list[list[np.ndarray]] = []

    def add(self, first: tuple, second: tuple, rounds: int | np.ndarray = 0) -> None:
        """`first` of a round comes before `second` of the round `rounds` later.

        Args:
          first, second: kind, stage and microbatches, a number or `[n]`.
          rounds: a number or `[n]`.
        """
        numbers = self._numbers(*first), self._numbers(*second)
        self._parts.append([*map(np.ravel, np.broadcast_arrays(*numbers, rounds))])

    def _numbers(self, kind: str, s: int, b: int | np.ndarray) -> np.ndarray:
        place = _KINDS.index(kind), s, b
        return np.ravel_multi_index(np.broadcast_arrays(*place), self._shape)

    @functools.cached_property
    def _edges(self) -> "_Edges":
        edges = _Edges(*map(np.concatenate, zip(*self._parts, strict=True)))
        return edges.part(np.argsort(edges.first, kind="stable"))

    @functools.cached_property
    def levels(self) -> np.ndarray:
        """`[kinds, S, N]`, the most operations that come one after the other before each.

        Pairs that lead to a later round do not count. The others have no cycle, else no round would exist.
        """
        edges = self._edges.part(self._edges.rounds <= 0)
        levels = np.zeros(math.prod(self._shape), int)
        count = np.bincount(edges.first, minlength=len(levels))
        starts = np.cumsum(count) - count
        left = np.bincount(edges.second, minlength=len(levels))
        ready = np.flatnonzero(left == 0)
        while ready.size:
            n = count[ready]
            within = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
            at = np.repeat(starts[ready], n) + within
            second = edges.second[at]
            np.maximum.at(levels, second, levels[edges.first[at]] + 1)
            np.subtract.at(left, second, 1)
            ready = np.unique(second[left[second] == 0])
        assert not left.any(), "operations of a round have no cycle"
        return levels.reshape(self._shape)

    @functools.cached_property
    def _by_level(self) -> tuple[list["_Edges"], "_Edges"]:
        """The pairs by the level of their second operation, and those that lead to a later round."""
        edges, levels = self._edges, self.levels.ravel()
        within, later = edges.part(edges.rounds <= 0), edges.part(edges.rounds > 0)
        level = levels[within.second]
        within, level = within.part(np.argsort(level, kind="stable")), np.sort(level)
        ends = np.flatnonzero(np.diff(level)) + 1
        return [_Edges(*p) for p in zip(*(np.split(a, ends) for a in within))], later

    def earliest(self, num_ticks: int, *, together: bool = False) -> np.ndarray | None:
        """The earliest ticks `[kinds, S, N]` of a round that repeats every `num_ticks` ticks.

        These are longest paths from one forward, by relaxation, moved so that the first forward is
        at tick 0. A turn follows all paths inside of a round, level by level, and then goes on to later rounds.
        None: a path never ends, and there is no such round.

        Args:
          num_ticks: T.
          together: whether microbatch 0 is the first that runs, so that copies which can run at
            the same time do.
        """
        by_level, later = self._by_level
        never = np.iinfo(np.int64).min // 2
        ticks = np.full(math.prod(self._shape), never)
        # The first stage's forwards are the first numbers.
        ticks[: self._shape[-1] if together else 1] = 0
        for _ in range(len(ticks) + 1):  # a path without a cycle is shorter
            for edges in by_level:
                edges.follow(ticks, num_ticks)
            before = ticks.copy()
            later.follow(ticks, num_ticks)
            if ticks[0] > 0:  # it comes before itself
                return None
            if np.array_equal(before, ticks):
                ticks = ticks.reshape(self._shape)
                return ticks - ticks[0].min()
        return None


class _Edges(NamedTuple):
    """Pairs of operations in order, `[pairs]` each: see `_Order.add`."""

    first: np.ndarray
    second: np.ndarray
    rounds: np.ndarray

    def part(self, which: np.ndarray) -> "_Edges":
        """Some of the pairs, or all in another order."""
        return _Edges(*(a[which] for a in self))

    def follow(self, ticks: np.ndarray, num_ticks: int) -> None:
        """Moves the second operations behind the first, in place."""
        after = ticks[self.first] + 1 - num_ticks * self.rounds
        np.maximum.at(ticks, self.second, after)
