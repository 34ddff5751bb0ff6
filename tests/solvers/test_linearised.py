"""Splits along one order, against published answers and the best of all splits."""

import itertools
import math

import numpy as np
import pytest
from solvers.splits import (
    assert_same_digits,
    best_by_brute_force,
    check,
    device_load,
    max_load,
    random_graph,
    read,
)

from jpipe.solvers import Graph, Node, linearised, min_max


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layer/bert24_inference", 17.7899),
        ("layer/bert24_training", 41.7458),
        ("layer/gnmt_inference", 33.0326),
        ("layer/resnet50_inference", 33.7747),
        ("layer/resnet50_training", 78.6498),
        ("operator/bert_l-3_inference", 27.9186),
        ("operator/resnet50_inference", 124.349),
    ],
)
def test_published_splits(name, expected):
    graph = read(name)
    solution = linearised(graph)
    check(graph, solution)
    assert_same_digits(solution.objective, expected)
    assert solution.bound < solution.objective and not solution.optimal


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_bounds_hold(first):
    for seed in range(first, first + 50):
        graph = random_graph(np.random.default_rng(seed))
        best = best_by_brute_force(graph)
        try:
            solution = linearised(graph)
        except ValueError as error:
            # Another order may do.
            assert math.isinf(best) or "Try `ideals`" in str(error)
            continue
        check(graph, solution)
        assert solution.bound <= best * (1 + 1e-12)
        assert solution.objective >= best * (1 - 1e-12)
        if solution.optimal:
            np.testing.assert_allclose(solution.objective, best, rtol=1e-9)


@pytest.mark.parametrize("num_devices", range(1, 5))
def test_chains_are_split_in_the_best_way(num_devices):
    rng = np.random.default_rng(num_devices)
    for _ in range(50):
        count = int(rng.integers(num_devices, 9))
        nodes = tuple(Node(v, forward=float(rng.integers(9)), transfer=float(rng.integers(3))) for v in range(count))
        graph = Graph(nodes, tuple(itertools.pairwise(range(count))))
        best = min(
            max(device_load(graph, set(range(i, j))) for i, j in itertools.pairwise((0, *cuts, count)))
            for size in range(num_devices)
            for cuts in itertools.combinations(range(1, count), size)
        )
        solution = linearised(graph, num_devices)
        assert solution.objective == best == max_load(graph, solution)


def test_free_transfers_are_min_max():
    costs = np.random.default_rng(0).uniform(0.1, 1, 200)
    nodes = tuple(Node(v, forward=float(c)) for v, c in enumerate(costs))
    graph = Graph(nodes, tuple(itertools.pairwise(range(200))))
    bounds = [0, *min_max(costs, 8), 200]
    slowest = max(costs[i:j].sum() for i, j in itertools.pairwise(bounds))
    np.testing.assert_allclose(linearised(graph, 8).objective, slowest, rtol=1e-12)


def test_thousands_of_nodes():
    rng = np.random.default_rng(0)
    nodes = tuple(Node(v, forward=float(rng.random()), transfer=float(rng.random() / 10)) for v in range(2000))
    edges = {(u, int(rng.integers(u + 1, min(u + 9, 2000)))) for u in range(1999)}
    graph = Graph(nodes, tuple(sorted(edges)))
    solution = linearised(graph, 16)
    np.testing.assert_allclose(solution.objective, max_load(graph, solution))
    assert solution.objective < 2 * solution.bound
