"""The block partition against its guarantee, a transcription of the paper, and `min_max`."""

import itertools
import os
import pathlib
from fractions import Fraction

import numpy as np
import pytest

from jpipe.solvers import block_partition, min_max, read_graph


def dearest(costs, boundaries):
    starts = [0, *boundaries, len(costs)]
    return max(sum(costs[i:j]) for i, j in itertools.pairwise(starts))


def by_the_paper(costs, num_stages):
    """With lists of layers that are moved, in fractions of the dearest layer."""
    shifted = [Fraction(c) - min(map(Fraction, costs)) for c in costs]
    layers = [c / (max(shifted) or 1) for c in shifted]
    each = len(layers) // num_stages
    blocks = [layers[each * s : each * (s + 1)] for s in range(num_stages - 1)]
    blocks.append(layers[each * (num_stages - 1) :])
    while True:
        most = max(map(sum, blocks))
        p = max(s for s, block in enumerate(blocks) if sum(block) == most)
        while True:
            least = min(map(sum, blocks))
            if most <= least + 1:
                return list(itertools.accumulate(map(len, blocks)))[:-1]
            cheapest = [s for s, block in enumerate(blocks) if sum(block) == least]
            q = min(cheapest, key=lambda s: abs(s - p))
            if p < q:
                blocks[q].insert(0, blocks[q - 1].pop())
                if p == q - 1:
                    break
            else:
                blocks[q].append(blocks[q + 1].pop(0))
                if p == q + 1:
                    break


@pytest.mark.parametrize("num_stages", range(1, 8))
def test_random_chains(num_stages):
    rng = np.random.default_rng(num_stages)
    for n in range(60):
        num_layers = int(rng.integers(num_stages, 24))
        if n % 2:
            costs = rng.integers(0, 4, num_layers).tolist()  # zeros and ties are common
        else:
            costs = rng.exponential(size=num_layers).tolist()
        boundaries = block_partition(costs, num_stages)
        assert boundaries == by_the_paper(costs, num_stages)
        starts = [0, *boundaries, num_layers]
        assert all(i < j for i, j in itertools.pairwise(starts))
        exact = [Fraction(c) - min(map(Fraction, costs)) for c in costs]
        stages = [sum(exact[i:j]) for i, j in itertools.pairwise(starts)]
        assert max(stages) - min(stages) <= max(exact)
        least = dearest(costs, min_max(costs, num_stages))
        assert dearest(costs, boundaries) >= least * (1 - 1e-12)


@pytest.mark.parametrize(
    ("costs", "num_stages", "expected"),
    [
        ([1, 2, 3, 4, 5, 6], 2, [4]),
        ([0, 0], 2, [1]),
        ([10, 20, 30, 40, 50, 60], 2, [4]),
        ([7], 1, []),
        ([0, 0, 0, 0, 1, 1], 5, [1, 2, 3, 5]),  # torchgpipe doesn't return
        ([1e300, 1e-300, 1e300, 1e-300], 2, [2]),
    ],
)
def test_known_splits(costs, num_stages, expected):
    assert block_partition(costs, num_stages) == expected


def test_it_can_be_worse_than_min_max():
    costs = [6, 1, 1, 1, 1, 6]
    assert dearest(costs, block_partition(costs, 3)) == 7
    assert dearest(costs, min_max(costs, 3)) == 6


@pytest.mark.parametrize(
    ("num_stages", "block", "best"),
    [(2, "399.0", "377.0"), (4, "253.6", "221.9"), (8, "178.7", "159.5")],
)
def test_vgg16(num_stages, block, best):
    """PipeDream's profile in milliseconds, its input among the layers."""
    path = pathlib.Path(os.environ.get("JPIPE_DATA", "unset")) / "pipedream-profiles"
    if not path.is_dir():
        pytest.skip("set JPIPE_DATA to a directory with pipedream-profiles/ in it")
    graph = read_graph(path / "vgg16.txt", "pipedream")
    costs = [graph.nodes[v].seconds * 1000 for v in graph.topological_order]
    assert len(costs) == 41
    assert f"{dearest(costs, block_partition(costs, num_stages)):.1f}" == block
    assert f"{dearest(costs, min_max(costs, num_stages)):.1f}" == best


@pytest.mark.parametrize("num_stages", [0, -1, 4])
def test_impossible_numbers_of_stages(num_stages):
    with pytest.raises(ValueError, match=r"`num_stages` must be in 1\.\.3, .* got"):
        block_partition([1, 2, 3], num_stages)


@pytest.mark.parametrize("cost", [-1.0, np.nan, np.inf])
def test_impossible_costs(cost):
    with pytest.raises(ValueError, match="`costs` must be finite and not negative"):
        block_partition([1.0, cost, 2.0], 2)
