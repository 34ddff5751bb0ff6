"""Min-max splits against every split there is."""

import itertools

import numpy as np
import pytest

from jpipe.solvers import min_max


def stage_costs(costs, boundaries):
    starts = [0, *boundaries, len(costs)]
    return [sum(costs[i:j]) for i, j in itertools.pairwise(starts)]


def best_by_brute_force(costs, num_stages):
    """The dearest stage at best, and the least sum of squares among such splits."""
    splits = itertools.combinations(range(1, len(costs)), num_stages - 1)
    stages = [stage_costs(costs, split) for split in splits]
    dearest = min(map(max, stages))
    return dearest, min(sum(c * c for c in s) for s in stages if max(s) == dearest)


@pytest.mark.parametrize("num_stages", range(1, 7))
def test_equals_brute_force(num_stages):
    rng = np.random.default_rng(num_stages)
    for _ in range(100):
        num_layers = int(rng.integers(num_stages, 9))
        costs = rng.integers(0, 6, num_layers).tolist()  # zeros and ties are common
        boundaries = min_max(costs, num_stages)
        assert len(boundaries) == num_stages - 1
        assert all(i < j for i, j in itertools.pairwise([0, *boundaries, num_layers]))
        got = stage_costs(costs, boundaries)
        best = best_by_brute_force(costs, num_stages)
        assert (max(got), sum(c * c for c in got)) == best, (costs, boundaries)


def test_rounding_does_not_rule_out_the_best_split():
    rng = np.random.default_rng(0)
    for _ in range(100):
        costs = (rng.integers(1, 9, 8) * 0.1).tolist()
        got = stage_costs(costs, min_max(costs, 3))
        dearest, _ = best_by_brute_force(costs, 3)
        np.testing.assert_allclose(max(got), dearest, rtol=1e-12)


@pytest.mark.parametrize(
    ("costs", "num_stages", "expected"),
    [
        ([3, 1, 2], 1, []),
        ([3, 1, 2], 3, [1, 2]),
        ([0, 0, 0, 0], 4, [1, 2, 3]),
        ([5], 1, []),
        ([1, 1, 1, 1], 2, [2]),  # even, not [1] or [3]
        ([1, 1, 1, 1, 8], 3, [2, 4]),  # the cheap stages are even too
        ([1e30, 1e29, 1e29, 1e30], 2, [2]),
    ],
)
def test_known_splits(costs, num_stages, expected):
    assert min_max(costs, num_stages) == expected


def test_all_free_layers_still_make_stages():
    boundaries = min_max([0.0] * 6, 3)
    assert len(boundaries) == 2 and 0 < boundaries[0] < boundaries[1] < 6


@pytest.mark.parametrize("num_stages", [0, -1, 4])
def test_impossible_numbers_of_stages(num_stages):
    with pytest.raises(ValueError, match=r"`num_stages` must be in 1\.\.3, .* got"):
        min_max([1, 2, 3], num_stages)


@pytest.mark.parametrize("cost", [-1.0, np.nan, np.inf])
def test_impossible_costs(cost):
    with pytest.raises(ValueError, match="`costs` must be finite and not negative"):
        min_max([1.0, cost, 2.0], 2)
