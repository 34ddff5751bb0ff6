"""The bytes that a memory of a given capacity moves on a known order of accesses.

PatrickStar (arXiv:2108.05818) evicts the chunk whose next use is farthest, after an iteration that records the uses.
The table of a pipeline says them before the first step. Pure Python.
"""

import heapq
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jpipe._util.foreign import shown

if TYPE_CHECKING:
    from jpipe.memory._timeline import Timeline

POLICIES = ("belady", "lru", "fifo")
"""Rules for the block that leaves the memory: the last to be read again, the least recently used, or the oldest."""


class Moves(NamedTuple):
    """Bytes that a memory moves on a trace.

    Attributes:
      to_device: fetched because an access needs them.
      to_host: written back because they have changed.
      evictions: number of blocks that left.
      fetches: number of blocks that came.
    """

    to_device: int
    to_host: int
    evictions: int
    fetches: int

    @property
    def num_bytes(self) -> int:
        """Bytes in both directions."""
        return self.to_device + self.to_host


def replay(
    trace: Sequence[tuple[Hashable, str]],
    sizes: Mapping[Hashable, int],
    capacity: int,
    policy: str = "belady",
    *,
    rounds: int = 1,
) -> Moves:
    """The bytes that a memory moves to serve a trace of accesses.

    A block must be in the memory when it is accessed. If it is not, it is fetched, and others leave until it fits. A
    block that was written since it came is written back when it leaves; others are only dropped. The memory is empty
    before the first access.

    Args:
      trace: `(block, "read" or "write")` in order. A write changes a part of the block, so the block is fetched.
      sizes: bytes of each block.
      capacity: bytes of the memory.
      policy: one of `POLICIES`. Belady's rule fetches the fewest blocks if all are of one size; with unlike sizes it is
        a good rule and not the best one.
      rounds: the number of runs of the trace. From 2 on, only the last counts, and Belady's rule looks on into the next
        round: a periodic trace in its steady state.

    Raises:
      ValueError: if a block has no size, or does not fit into the capacity.

    Example:
      >>> trace = [(block, "read") for block in "abcabc"]
      >>> [replay(trace, dict.fromkeys("abc", 1), 2, policy).to_device for policy in POLICIES]
      [4, 6, 6]
    """
    _check(trace, sizes, capacity, policy, rounds)
    whole = list(trace) * rounds
    counted = len(trace) * (rounds - 1)
    next_use = _next_uses(whole, len(trace) if rounds > 1 else None)
    held: dict[Hashable, float] = {}  # block -> priority: the least one leaves
    changed: set[Hashable] = set()
    heap: list[tuple[float, int, Hashable]] = []
    used = to_device = to_host = evictions = fetches = 0
    order = itertools.count()
    for i, (block, kind) in enumerate(whole):
        counts = i >= counted
        if block not in held:
            while used + sizes[block] > capacity:
                priority, _, victim = heapq.heappop(heap)
                if held.get(victim) != priority:
                    continue  # an entry that a later access has replaced
                del held[victim]
                used -= sizes[victim]
                evictions += counts
                if victim in changed:
                    changed.remove(victim)
                    to_host += counts * sizes[victim]
            used += sizes[block]
            to_device += counts * sizes[block]
            fetches += counts
            priority = float(i)
        else:
            priority = held[block] if policy == "fifo" else float(i)
        if policy == "belady":
            priority = -next_use[i]
        if held.get(block) != priority:
            held[block] = priority
            heapq.heappush(heap, (priority, next(order), block))
        if kind == "write":
            changed.add(block)
    return Moves(to_device, to_host, evictions, fetches)


def _next_uses(whole: Sequence[tuple[Hashable, str]], period: int | None) -> list[float]:
    """For each access the position of the next one to its block; infinite if there is none.

    Args:
      whole: the trace.
      period: the number of accesses after which the trace goes on from its beginning; None: it ends.
    """
    following: dict[Hashable, float] = {}
    if period is not None:
        for j in range(period - 1, -1, -1):
            following[whole[j][0]] = float(len(whole) + j)
    positions = [0.0] * len(whole)
    for i in range(len(whole) - 1, -1, -1):
        block = whole[i][0]
        positions[i] = following.get(block, float("inf"))
        following[block] = float(i)
    return positions


def _check(trace: Sequence, sizes: Mapping, capacity: int, policy: str, rounds: int) -> None:
    if policy not in POLICIES:
        raise ValueError(f"`policy` must be one of {', '.join(map(repr, POLICIES))}, got {shown(policy)}.")
    if not hasattr(rounds, "__index__") or rounds < 1:
        raise ValueError(f"`rounds` must be at least 1, got {shown(rounds)}.")
    for block, kind in trace:
        if kind not in ("read", "write"):
            raise ValueError(f'an access is "read" or "write", got {shown(kind)} of {block}.')
        if block not in sizes:
            raise ValueError(f"`sizes` has no entry for {block!r}. Add its bytes.")
    needed = max((sizes[block] for block, _ in trace), default=0)
    if needed > capacity:
        raise ValueError(f"`capacity` must be at least {needed} bytes, the largest block, got {shown(capacity)}.")


def accesses_of(
    timeline: "Timeline", uses: Sequence[str] | None = None
) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """The accesses of a step, in order: the trace for `replay`, and the bytes of each array.

    Args:
      timeline: the timeline of a pipeline (`Pipeline.memory_timeline`), or of a function.
      uses: the uses of the blocks to take; None: weights, their versions, gradients, optimizer state and stashes.

    Returns:
      `(name, kind)` of each access, and name -> bytes.
    """
    if uses is None:
        uses = (
            "weights",
            "version",
            "gradient",
            "optimizer",
            "input stash",
            "weight stash",
            "split residual",
        )
    accesses: list[tuple[float, bool, str]] = []
    sizes: dict[str, int] = {}
    for block in timeline.blocks:
        if block.use in uses and block.num_bytes and block.accesses:
            sizes[block.name] = max(sizes.get(block.name, 0), block.num_bytes)
            accesses += [(a.time % timeline.period, a.kind == "write", block.name) for a in block.accesses]
    return [(name, "write" if write else "read") for _, write, name in sorted(set(accesses))], sizes
