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

MOST_BLOCKS = 10
"""Of a trace for `policy="optimal"`: a state is a set of blocks in the memory, each changed or not."""


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
      policy: one of `POLICIES`, or "optimal". Belady's rule fetches the fewest blocks if all are of one size, and moves
        the fewest bytes if they are only read, or all written. With unlike sizes, or if some are written, it is a good
        rule and not the best one: of random traces of six blocks it moved 4 % more than needed on average, and up to
        1.9 times as much. "optimal" moves the fewest bytes of all, by dynamic programming over what may be in the
        memory; it is for traces of at most `MOST_BLOCKS` blocks, in one round.
      rounds: the number of runs of the trace. From 2 on, only the last counts, and Belady's rule looks on into the next
        round: a periodic trace in its steady state.

    Raises:
      ValueError: if a block has no size, or does not fit into the capacity, or "optimal" is asked of more blocks or
        rounds.

    Example:
      >>> trace = [(block, "read") for block in "abcabc"]
      >>> [replay(trace, dict.fromkeys("abc", 1), 2, policy).to_device for policy in POLICIES]
      [4, 6, 6]
    """
    _check(trace, sizes, capacity, policy, rounds)
    if policy == "optimal":
        return _optimal(trace, sizes, capacity)
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


def _optimal(trace: Sequence[tuple[Hashable, str]], sizes: Mapping[Hashable, int], capacity: int) -> Moves:
    """The moves of the fewest bytes; of equal ones those of the fewest fetches.

    A state is two sets of blocks: those in the memory, and those of them that have changed. Blocks leave only when
    another one needs their room, and no more than it needs: who stays can leave later at the same price.
    """
    names = list(dict.fromkeys(block for block, _ in trace))
    numbers = {block: number for number, block in enumerate(names)}
    volume = [0]  # of each set of blocks
    for block in names:
        volume += [volume_before + sizes[block] for volume_before in volume]
    victims: dict[tuple[int, int], list[int]] = {}
    states = {(0, 0): Moves(0, 0, 0, 0)}
    for block, kind in trace:
        number = numbers[block]
        bit, size = 1 << number, sizes[block]
        following: dict[tuple[int, int], Moves] = {}
        for (held, changed), moves in states.items():
            out = [0]
            if not held & bit:
                key = held, volume[held] + size - capacity
                if key not in victims:
                    victims[key] = _least_sets(*key, volume)
                out = victims[key]
                moves = moves._replace(to_device=moves.to_device + size, fetches=moves.fetches + 1)
            for gone in out:
                after = held & ~gone | bit, (changed & ~gone) | (bit if kind == "write" else 0)
                to_host = moves.to_host + volume[changed & gone]
                new = moves._replace(to_host=to_host, evictions=moves.evictions + gone.bit_count())
                if after not in following or _order(new) < _order(following[after]):
                    following[after] = new
        states = following
    return min(states.values(), key=_order)


def _order(moves: Moves) -> tuple[int, int, int]:
    return moves.num_bytes, moves.fetches, moves.evictions


def _least_sets(held: int, room: int, volume: Sequence[int]) -> list[int]:
    """The sets of blocks of `held` that make so much room, and of which none can stay."""
    result, gone = [], held
    while gone:
        parts = [1 << i for i in range(gone.bit_length()) if gone >> i & 1]
        if volume[gone] >= room and all(volume[gone & ~part] < room for part in parts):
            result.append(gone)
        gone = (gone - 1) & held
    return result if room > 0 else [0]


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
    if policy not in (*POLICIES, "optimal"):
        names = ", ".join(map(repr, (*POLICIES, "optimal")))
        raise ValueError(f"`policy` must be one of {names}, got {shown(policy)}.")
    if not hasattr(rounds, "__index__") or rounds < 1:
        raise ValueError(f"`rounds` must be at least 1, got {shown(rounds)}.")
    for block, kind in trace:
        if kind not in ("read", "write"):
            raise ValueError(f'an access is "read" or "write", got {shown(kind)} of {block}.')
        if block not in sizes:
            raise ValueError(f"`sizes` has no entry for {block!r}. Add its bytes.")
    if policy == "optimal":
        count = len({block for block, _ in trace})
        if count > MOST_BLOCKS or rounds > 1:
            raise ValueError(
                f'`policy="optimal"` looks at every set of blocks that may be in the memory: at most {MOST_BLOCKS} '
                f"blocks in one round, got {count} blocks and {rounds} rounds. Take a part of the trace, or "
                '`policy="belady"`.'
            )
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
