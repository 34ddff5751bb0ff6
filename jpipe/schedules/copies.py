"""Stages with several copies: PipeDream's 1F1B-RR, from the ticks of tables without copies.

A stage with r copies hands its microbatches out in turn: microbatch b of a minibatch runs on
copy b mod r, forward and backward (*round robin*).

Letters: S stages, s a stage; r_s copies of stage s; N microbatches, b a microbatch; L the
largest r_s; G = ceil(N / L) groups; w_s the warm-up of stage s; T ticks of a round.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jpipe.foreign import shown
from jpipe.schedule import IDLE, wrong_counts


def wrong_replicas(
    num_stages: int, num_microbatches: int, replicas: Sequence[int] | None
) -> str | None:
    """The refusal of `replicas`; None if the builder can use them.

    Example:
      >>> print(wrong_replicas(2, 8, (3, 1, 1))[:60])
      `replicas` must have one number for each of the 2 stages, go
    """
    if replicas is None:
        return None
    counts = (
        tuple(replicas) if isinstance(replicas, Sequence | np.ndarray) else replicas
    )
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


def has_copies(replicas: Sequence[int] | None) -> bool:
    """Whether any stage has more than one copy."""
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
            of_copy = np.arange(k, N, len(devices))
            rank = np.arange(len(of_copy)) - np.searchsorted(
                group[of_copy], group[of_copy]
            )
            lanes += [
                (s, device, of_copy[rank == lane]) for lane in range(rank.max() + 1)
            ]
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
    num_microbatches: int, replicas: Sequence[int], *, synchronous: bool
) -> dict[str, Any]:
    """1F1B-RR in unit ticks: one operation per device and tick, in the order of PipeDream.

    A copy of stage s runs w_s forwards (see `warm_up`), and then in turn a forward, and the
    input gradient and the weight gradient of its oldest microbatch. Every operation runs as
    early as this order and its inputs allow.

    In an asynchronous round

    - the copies of a stage update together, when the last of them has its gradients. The first
      forward of a copy after its last weight gradient waits for that;
    - no copy runs a forward of the next minibatch before all copies have run theirs of this one;
    - T is the smallest at which such a round exists, at least 3 ceil(N / r) for the least r.

    Args:
      num_microbatches: N, at least as many as any stage has copies.
      replicas: `[S]`, r_s.
      synchronous: whether the table is one minibatch. Else it is a round that repeats.

    Returns:
      The arguments of `Schedule.from_ticks`.
    """
    N, S = num_microbatches, len(replicas)
    order = _Order(N, S)
    for s, (r, w) in enumerate(zip(replicas, warm_up(replicas), strict=True)):
        of_copies = [range(k, N, r) for k in range(r)]
        for b in range(N):
            order.add(("backward", s, b), ("weight_grad", s, b))
            if s > 0:
                order.add(("forward", s - 1, b), ("forward", s, b))
                order.add(("backward", s, b), ("backward", s - 1, b))
        for mine in of_copies:
            n = len(mine)
            for i in range(n):
                ahead, j = divmod(i + w, n)
                if synchronous and ahead:
                    # No forward is left. Backwards follow each other.
                    if i > 0:
                        before = ("weight_grad", s, mine[i - 1])
                        order.add(before, ("backward", s, mine[i]))
                    order.add(("forward", s, mine[-1]), ("backward", s, mine[i]))
                    continue
                forward = ("forward", s, mine[j])
                order.add(forward, ("backward", s, mine[i]), -ahead)
                if not synchronous or i > 0:
                    before = ("weight_grad", s, mine[i - 1])
                    order.add(before, forward, ahead if i > 0 else ahead + 1)
            if synchronous:
                for first, second in itertools.pairwise(mine[: w + 1]):
                    order.add(("forward", s, first), ("forward", s, second))
        for mine, other in itertools.product(of_copies, repeat=2):
            if synchronous:
                continue
            order.add(("forward", s, other[-1]), ("forward", s, mine[0]), 1)
            order.add(("weight_grad", s, other[-1]), ("weight_grad", s, mine[0]), 1)
            ahead, j = divmod(len(mine) + w, len(mine))
            order.add(("weight_grad", s, other[-1]), ("forward", s, mine[j]), ahead)
    if synchronous:
        ticks = order.earliest(None)
        assert ticks is not None, "a synchronous order has no cycle"
    else:
        num_ticks, ticks = 3 * -(-N // min(replicas)) - 1, None
        while ticks is None:
            num_ticks += 1
            assert num_ticks <= 3 * N * (S + 1), "one microbatch at a time is a round"
            ticks = order.earliest(num_ticks, together=True)
            if ticks is None:
                ticks = order.earliest(num_ticks)
    chosen = _columns(N, replicas, ticks)
    return chosen if synchronous else chosen | {"num_ticks": num_ticks}


def _columns(
    num_microbatches: int, replicas: Sequence[int], ticks: np.ndarray
) -> dict[str, Any]:
    """One column per copy, with the ticks `[kinds, S, N]` of its microbatches."""
    pairs = [(s, k) for s, r in enumerate(replicas) for k in range(r)]
    result: dict[str, Any] = {
        "stage": np.array([s for s, _ in pairs]),
        "device": np.arange(len(pairs)),
    }
    for kind, of_kind in zip(_KINDS, ticks, strict=True):
        result[kind] = np.full((num_microbatches, len(pairs)), IDLE, np.int64)
        for c, (s, k) in enumerate(pairs):
            result[kind][k :: replicas[s], c] = of_kind[s, k :: replicas[s]]
    return result


class _Order:
    """Which operation comes before which, in a round that may repeat every T ticks."""

    def __init__(self, num_microbatches: int, num_stages: int):
        self._shape = len(_KINDS), num_stages, num_microbatches
        self._edges: list[tuple[int, int, int]] = []

    def add(
        self,
        first: tuple[str, int, int],
        second: tuple[str, int, int],
        rounds: int = 0,
    ) -> None:
        """`first` of a round comes before `second` of the round `rounds` later."""
        self._edges.append((self._number(*first), self._number(*second), rounds))

    def _number(self, kind: str, s: int, b: int) -> int:
        place = _KINDS.index(kind), s, b
        return int(np.ravel_multi_index(place, self._shape))

    def earliest(
        self, num_ticks: int | None, *, together: bool = False
    ) -> np.ndarray | None:
        """The earliest ticks `[kinds, S, N]` of a round that repeats every `num_ticks` ticks.

        These are longest paths from one forward, by relaxation, moved so that the first forward is
        at tick 0. None: a path never ends, and there is no such round.

        Args:
          num_ticks: T. None: nothing repeats, and every operation can be at tick 0.
          together: whether microbatch 0 is the first that runs, so that copies which can run at
            the same time do.
        """
        first, second, rounds = np.array(self._edges).T
        apart = 1 - (num_ticks or 0) * rounds
        if together:
            number = np.arange(1, self._shape[-1])
            first = np.append(first, 0 * number)
            second, apart = np.append(second, number), np.append(apart, 0 * number)
        never = np.iinfo(np.int64).min // 2
        ticks = np.full(np.prod(self._shape), 0 if num_ticks is None else never)
        ticks[0] = 0
        for _ in range(len(ticks) + 1):  # a path without a cycle is shorter
            after = ticks.copy()
            reached = ticks[first] > never // 2
            np.maximum.at(
                after, second[reached], ticks[first[reached]] + apart[reached]
            )
            if after[0] > 0:  # it comes before itself
                return None
            if np.array_equal(after, ticks):
                ticks = ticks.reshape(self._shape)
                return ticks - ticks[0].min()
            ticks = after
        return None
