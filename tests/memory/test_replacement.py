"""`jpipe.memory.replay` against an exhaustive search over all evictions."""

import functools
import itertools

import numpy as np
import pytest

from jpipe.memory import POLICIES, replay


def least_fetches(trace, capacity):
    """The fewest fetches of equal blocks, over every choice of what leaves."""
    blocks = [block for block, _ in trace]

    @functools.cache
    def fewest(i, held):
        if i == len(blocks):
            return 0
        if blocks[i] in held:
            return fewest(i + 1, held)
        if len(held) < capacity:
            return 1 + fewest(i + 1, held | {blocks[i]})
        return 1 + min(fewest(i + 1, (held - {victim}) | {blocks[i]}) for victim in held)

    return fewest(0, frozenset())


def random_trace(rng, length, num_blocks, writes=0.0):
    return [(int(rng.integers(num_blocks)), "write" if rng.random() < writes else "read") for _ in range(length)]


def test_belady_is_optimal_on_small_traces():
    rng = np.random.default_rng(0)
    for _ in range(400):
        num_blocks = int(rng.integers(2, 6))
        trace = random_trace(rng, int(rng.integers(1, 14)), num_blocks)
        sizes = dict.fromkeys(range(num_blocks), 3)
        capacity = int(rng.integers(1, num_blocks + 1))
        moves = replay(trace, sizes, 3 * capacity)
        assert moves.fetches == least_fetches(trace, capacity)
        assert moves.to_device == 3 * moves.fetches
        assert moves.to_host == 0


def test_belady_fetches_least_on_thousands_of_traces():
    rng = np.random.default_rng(1)
    for _ in range(3000):
        num_blocks = int(rng.integers(2, 12))
        trace = random_trace(rng, int(rng.integers(2, 60)), num_blocks)
        sizes = dict.fromkeys(range(num_blocks), 5)
        capacity = 5 * int(rng.integers(1, num_blocks + 1))
        belady, lru, fifo = (replay(trace, sizes, capacity, policy).num_bytes for policy in POLICIES)
        assert belady <= min(lru, fifo)


@pytest.mark.parametrize("writes", [0.3, 1.0])
def test_belady_with_blocks_that_change(writes):
    """It fetches the fewest bytes; it also writes back the fewest if every block changes, not if some do."""
    rng = np.random.default_rng(2)
    for _ in range(1000):
        num_blocks = int(rng.integers(2, 9))
        trace = random_trace(rng, int(rng.integers(2, 40)), num_blocks, writes)
        sizes = dict.fromkeys(range(num_blocks), 4)
        capacity = 4 * int(rng.integers(1, num_blocks + 1))
        belady, *others = (replay(trace, sizes, capacity, p) for p in POLICIES)
        assert belady.to_device <= min(m.to_device for m in others)
        if writes == 1.0:
            assert belady.num_bytes <= min(m.num_bytes for m in others)


def fewest_bytes(trace, sizes, capacity):
    """The fewest bytes over every choice of what leaves before every access, needed or not."""

    @functools.cache
    def fewest(i, held):
        if i == len(trace):
            return 0
        block, kind = trace[i]
        best = float("inf")
        names = [name for name, _ in held if name != block]
        for count in range(len(names) + 1):
            for gone in itertools.combinations(names, count):
                stays = {name: dirty for name, dirty in held if name not in gone}
                moved = sum(sizes[name] for name, dirty in held if name in gone and dirty)
                if block not in stays:
                    moved += sizes[block]
                    stays[block] = False
                stays[block] |= kind == "write"
                if sum(sizes[name] for name in stays) <= capacity:
                    best = min(best, moved + fewest(i + 1, frozenset(stays.items())))
        return best

    return fewest(0, frozenset())


def test_the_optimum_of_unlike_sizes_with_writes():
    """As exhaustive; no rule is better, and Belady's is not the best."""
    rng, above = np.random.default_rng(3), 0
    for _ in range(150):
        num_blocks = int(rng.integers(2, 6))
        trace = random_trace(rng, int(rng.integers(1, 13)), num_blocks, float(rng.choice([0.0, 0.4, 1.0])))
        sizes = {block: int(rng.integers(1, 8)) for block in range(num_blocks)}
        capacity = max(sizes.values()) + int(rng.integers(0, 12))
        optimum = replay(trace, sizes, capacity, "optimal")
        assert optimum.num_bytes == fewest_bytes(tuple(trace), sizes, capacity)
        others = [replay(trace, sizes, capacity, policy).num_bytes for policy in POLICIES]
        assert optimum.num_bytes <= min(others)
        above += others[0] > optimum.num_bytes
    assert above > 10


def test_the_optimum_of_equal_sizes_is_that_of_belady():
    rng = np.random.default_rng(4)
    for writes in (0.0, 1.0):
        for _ in range(60):
            num_blocks = int(rng.integers(2, 8))
            trace = random_trace(rng, int(rng.integers(1, 25)), num_blocks, writes)
            sizes = dict.fromkeys(range(num_blocks), 4)
            capacity = 4 * int(rng.integers(1, num_blocks + 1))
            optimum = replay(trace, sizes, capacity, "optimal")
            belady = replay(trace, sizes, capacity)
            assert optimum.num_bytes == belady.num_bytes
            assert optimum.fetches == belady.fetches


def test_moves_of_the_optimum():
    """The large block stays: Belady drops it for a small one, because it is read last."""
    trace = [("large", "write"), ("a", "read"), ("b", "read"), ("a", "read"), ("b", "read"), ("large", "read")]
    sizes = {"large": 10, "a": 1, "b": 1}
    assert replay(trace, sizes, 11) == (22, 10, 2, 4)
    assert replay(trace, sizes, 11, "optimal") == (14, 0, 3, 5)


def test_periodic_traces():
    """Of n blocks in turn, a memory of k keeps k - 1 by Belady's rule, and LRU none."""
    for n, k in itertools.product(range(2, 8), range(2, 8)):
        trace = [(b, "read") for b in range(n)]
        sizes = dict.fromkeys(range(n), 1)
        long = replay(trace * 60, sizes, k).fetches
        lru = replay(trace, sizes, k, "lru", rounds=3).fetches
        assert lru == (n if k < n else 0)
        if k >= n:
            assert long == n
        else:
            # Each n - 1 accesses cost n - k fetches.
            assert abs(long - 60 * n * (n - k) / (n - 1)) <= n


def test_clean_blocks_are_not_written_back():
    trace = [("a", "write"), ("b", "read"), ("c", "read"), ("a", "read")]
    sizes = {"a": 10, "b": 20, "c": 30}
    moves = replay(trace, sizes, 30, "lru")
    # a and b fit; c drives out both, a is written back; then a drives out c.
    assert moves == (70, 10, 3, 4)
    assert moves.num_bytes == 80


def test_a_memory_that_holds_all_moves_nothing_in_the_steady_state():
    trace = [("a", "write"), ("b", "read")]
    for policy in POLICIES:
        assert replay(trace, {"a": 1, "b": 2}, 3, policy, rounds=2).num_bytes == 0


def test_wrong_inputs():
    trace = [("a", "read")]
    with pytest.raises(ValueError, match="`capacity` must be at least 8 bytes"):
        replay(trace, {"a": 8}, 7)
    with pytest.raises(ValueError, match="`policy` must be one of 'belady'"):
        replay(trace, {"a": 8}, 8, "random")
    with pytest.raises(ValueError, match="`sizes` has no entry for 'a'"):
        replay(trace, {}, 8)
    with pytest.raises(ValueError, match='"read" or "write", got \'free\''):
        replay([("a", "free")], {"a": 8}, 8)
    for blocks, rounds in ((11, 1), (2, 2)):
        with pytest.raises(
            ValueError, match=f"at most 10 blocks in one round, got {blocks} blocks and {rounds} rounds"
        ):
            many = [(block, "read") for block in range(blocks)]
            replay(many, dict.fromkeys(range(blocks), 1), 8, "optimal", rounds=rounds)
    with pytest.raises(ValueError, match="`rounds` must be at least 1"):
        replay(trace, {"a": 8}, 8, rounds=0)
