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
    with pytest.raises(ValueError, match="`rounds` must be at least 1"):
        replay(trace, {"a": 8}, 8, rounds=0)
