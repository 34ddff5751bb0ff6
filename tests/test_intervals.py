"""Intervals on a circle, counted one by one."""

import numpy as np
import pytest

from jpipe._table.intervals import covering


@pytest.mark.parametrize("seed", range(20))
def test_covering_counts_every_interval(seed):
    rng = np.random.default_rng(seed)
    num_points, shape = rng.integers(1, 8), (rng.integers(1, 6), rng.integers(1, 4))
    first = rng.integers(-20, 20, shape)
    last = first + rng.integers(-1, 15, shape)  # some are empty, some go around twice
    counts = np.zeros((num_points, shape[1]), int)
    for i, c in np.ndindex(shape):
        for point in range(first[i, c], last[i, c] + 1):
            counts[point % num_points, c] += 1
    assert covering(first, last, num_points).tolist() == counts.tolist()
    assert covering(first[:, 0], last[:, 0], num_points).tolist() == counts[:, 0].tolist()  # fmt: skip
