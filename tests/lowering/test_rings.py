"""Slots of rings, against a search over all pairs of microbatches."""

import itertools

import numpy as np
import pytest

from jpipe.lowering.rings import _least_modulus


@pytest.mark.parametrize("seed", range(40))
def test_the_least_modulus_keeps_all_pairs_apart(seed):
    rng = np.random.default_rng(seed)
    num_microbatches, num_ticks = rng.integers(1, 8), rng.integers(4, 12)
    alive = rng.integers(1, num_microbatches + 1)
    position = rng.permutation(num_microbatches)[:alive]
    first = np.sort(rng.integers(-10, 10, alive))
    if seed % 2:  # messages of several columns may arrive in another order
        rng.shuffle(first)
    last = first + rng.integers(0, 3 * num_ticks, alive)
    lives = [
        (p + num_microbatches * r, a + num_ticks * r, b + num_ticks * r)
        for p, a, b in zip(position, first, last)
        for r in range(12)  # none lives for so many rounds
    ]

    def fits(modulus):
        return not any(
            p != q and (p - q) % modulus == 0 and a <= d and c <= b
            for (p, a, b), (q, c, d) in itertools.combinations(lives, 2)
        )

    modulus = next(k for k in itertools.count(1) if fits(k))
    assert _least_modulus(num_microbatches, num_ticks, position, first, last) == modulus
