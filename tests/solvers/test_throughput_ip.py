"""Integer programs against all splits, the ideals and published answers."""

import math

import numpy as np
import pytest
from solvers.splits import (
    assert_same_digits,
    best_by_brute_force,
    branches,
    check,
    max_load,
    random_graph,
    read,
)

from jpipe.solvers import Graph, Node, ideals, linearised, throughput_ip


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("first", range(0, 100, 25))
def test_equals_brute_force(first, contiguous):
    for seed in range(first, first + 25):
        graph = random_graph(np.random.default_rng(seed))
        best = best_by_brute_force(graph, contiguous)
        if math.isinf(best):
            with pytest.raises(ValueError, match="placed nowhere|no split fits"):
                throughput_ip(graph, contiguous=contiguous)
            continue
        solution = throughput_ip(graph, contiguous=contiguous, gap=0)
        assert solution.objective == pytest.approx(best, rel=1e-12), seed
        assert solution.optimal and best * (1 - 1e-6) <= solution.bound <= best
        check(graph, solution, contiguous)


def test_stages_that_come_back_can_be_faster():
    less = 0
    for seed in range(100):
        graph = random_graph(np.random.default_rng(seed))
        best = best_by_brute_force(graph, contiguous=False)
        less += best < best_by_brute_force(graph)
    assert less > 3


@pytest.mark.parametrize("seed", range(3))
def test_equals_ideals(seed):
    graph = branches(3, (2, 3), seed, num_devices=3, transfer=2.0)
    solution = throughput_ip(graph)
    check(graph, solution)
    assert solution.optimal
    np.testing.assert_allclose(solution.objective, ideals(graph).objective, rtol=1e-4)


@pytest.mark.parametrize("unit", [1e-6, 1e6])
def test_unit_of_time_does_not_matter(unit):
    def scaled(factor):
        graph = branches(2, (2, 2), 0, num_devices=3, transfer=2.0)
        nodes = tuple(
            Node(
                node.id,
                forward=node.forward * factor,
                host=node.host * factor,
                transfer=node.transfer * factor,
            )
            for node in graph.nodes
        )
        return Graph(nodes, graph.edges, num_devices=3, num_hosts=1)

    expected = throughput_ip(scaled(1.0)).objective
    got = throughput_ip(scaled(unit)).objective
    np.testing.assert_allclose(got / unit, expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "best"),
    [
        ("layer/bert24_inference", 17.789906),
        ("layer/bert24_training", 41.745812),
        ("layer/gnmt_inference", 32.910658),
    ],
)
def test_published_contiguous(name, best):
    graph = read(name)
    solution = throughput_ip(graph, time_limit=300)
    check(graph, solution)
    assert solution.optimal
    assert_same_digits(solution.objective, best)


# Of HiGHS on the published program.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("layer/bert24_inference", 17.714719 * (1 - 1e-4), 17.714719),
        ("layer/bert24_training", 39.789539 * (1 - 1e-4), 39.789539),
        ("layer/gnmt_inference", 31.684620, 31.687311),
    ],
)
def test_published_in_any_order(name, least, most):
    graph = read(name)
    solution = throughput_ip(graph, contiguous=False, time_limit=300)
    check(graph, solution, contiguous=False)
    assert solution.optimal
    assert least < solution.objective < most + 1e-6
    assert solution.bound <= most + 1e-6


def test_out_of_time_is_linearised():
    graph = branches(11, (3, 5, 7, 16), 1, num_devices=6, transfer=0.05)
    solution = throughput_ip(graph, time_limit=0.01)
    check(graph, solution)
    first = linearised(graph)
    assert first.bound <= solution.bound <= solution.objective <= first.objective
    assert not solution.optimal


def test_both_passes_in_a_node():
    nodes = tuple(Node(v, forward=1.0, backward=2.0, activation_bytes=(4.0, 6.0)) for v in range(2))
    solution = throughput_ip(Graph(nodes, ((0, 1),)), 2, bandwidth=40)
    assert solution.objective == 3.5
    with pytest.raises(ValueError, match="`bandwidth` must be given"):
        throughput_ip(Graph(nodes, ((0, 1),)), 2)


def test_memory_that_fits_exactly():
    nodes = tuple(Node(v, forward=1.0, memory_bytes=1 / 3) for v in range(6))
    graph = Graph(nodes, tuple((v, v + 1) for v in range(5)))
    solution = throughput_ip(graph, 2, memory_limit=1.0)
    assert solution.objective == max_load(graph, solution, lambda node: 0.0) == 3
    with pytest.raises(ValueError, match="no split fits 2 devices of 0.99 bytes"):
        throughput_ip(graph, 2, memory_limit=0.99)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (dict(time_limit=0), "`time_limit` must be above 0 seconds, got 0"),
        (dict(gap=-1), "`gap` must be at least 0, got -1"),
        (dict(num_devices=0), "must not both be 0"),
    ],
)
def test_impossible_arguments(argument, message):
    graph = Graph((Node(0, forward=1.0),), ())
    with pytest.raises(ValueError, match=message):
        throughput_ip(graph, **{"num_devices": 1, **argument})
