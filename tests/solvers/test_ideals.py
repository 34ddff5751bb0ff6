"""The best contiguous split against all splits, and against published answers."""

import importlib
import math
import os
import pathlib

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

from jpipe.solvers import Graph, Node, closed_sets, ideals, linearised, read_graph
from jpipe.solvers._placement import TooLarge

# The package's attribute of this name is the function.
module = importlib.import_module("jpipe.solvers._ideals")


@pytest.mark.parametrize("first", range(0, 600, 50))
def test_equals_brute_force(first):
    for seed in range(first, first + 50):
        graph = random_graph(np.random.default_rng(seed))
        best = best_by_brute_force(graph)
        if math.isinf(best):
            with pytest.raises(ValueError, match="placed nowhere|no contiguous split"):
                ideals(graph)
            continue
        solution = ideals(graph)
        assert solution.objective == pytest.approx(best, rel=1e-12), seed
        assert solution.optimal and solution.bound == solution.objective
        check(graph, solution)


def test_random_graphs_have_what_is_to_be_tested():
    graphs = [random_graph(np.random.default_rng(seed)) for seed in range(200)]
    solutions = []
    for graph in graphs:
        if math.isfinite(best_by_brute_force(graph)):
            solutions.append(ideals(graph))
    assert 20 < len(solutions) < 180
    assert sum(len(solution.stages) > 1 for solution in solutions) > 60
    assert sum(len(solution.stages) > 2 for solution in solutions) > 20
    for has in (
        lambda graph, node: node.is_backward,
        lambda graph, node: not node.on_device,
        lambda graph, node: node.host is None and graph.num_hosts,
        lambda graph, node: graph.memory_limit and node.memory_bytes,
    ):
        assert sum(any(has(graph, node) for node in graph.nodes) for graph in graphs) > 20
    assert sum(stage.on_host for s in solutions for stage in s.stages) > 20


@pytest.mark.first_case
@pytest.mark.parametrize("merged", [False, True])
def test_merging_changes_nothing(merged, monkeypatch):
    """Blocks of pairs, bounds and merging against none of them, on graphs too large for brute force."""
    for seed in range(20):
        graph = branches(3, (2, 3), seed, num_devices=3, transfer=2.0)
        expected = ideals(graph)
        assert expected.objective <= linearised(graph).objective
        with monkeypatch.context() as patch:
            patch.setattr(closed_sets, "_ENDS", 3)
            patch.setattr(closed_sets, "_STARTS", 5)
            patch.setattr(module, "best_along_order", lambda problem: None)
            if not merged:
                patch.setattr(module, "merge", lambda problem, **_: problem)
            plain = ideals(graph)
        np.testing.assert_allclose(plain.objective, expected.objective, rtol=1e-12)
        check(graph, plain)
        check(graph, expected)


# Of Tarnawski et al.'s program, of which the longer are recomputed.
@pytest.mark.parametrize(
    ("name", "best"),
    [
        ("layer/bert24_inference", 17.789906),
        ("layer/bert24_training", 41.745812),
        ("layer/gnmt_inference", 32.910658),
        ("layer/resnet50_inference", 33.774666),
        ("layer/resnet50_training", 78.631812),
        ("operator/bert_l-3_inference", 27.9186),
        ("operator/resnet50_inference", 124.349),
    ],
)
def test_published_optimum(name, best):
    graph = read(name)
    solution = ideals(graph)
    check(graph, solution)
    assert solution.optimal
    assert_same_digits(solution.objective, best)


@pytest.mark.parametrize(
    ("name", "one_device"),
    [
        ("layer/bert24_inference", 92.406),
        ("layer/bert24_training", 217.813),
        ("layer/gnmt_inference", 182.563),
        ("layer/resnet50_inference", 201.45),
        ("layer/resnet50_training", 462.381),
        ("operator/bert_l-3_inference", 49.3526),
        ("operator/resnet50_inference", 325.132),
    ],
)
def test_one_device_takes_it_all(name, one_device):
    solution = ideals(read(name), 1, num_hosts=0, memory_limit=math.inf)
    assert len(solution.stages) == 1 and solution.optimal
    assert_same_digits(solution.objective, one_device)


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("name", "best"),
    [
        (
            "layer/bert24_inference",
            [84.505953, 44.930953, 32.242906, 24.916906, 20.083953, 17.789906],
        ),
        (
            "layer/bert24_training",
            [200.269906, 107.902906, 74.451906, 57.776906, 49.404906, 41.745812],
        ),
        (
            "layer/resnet50_inference",
            [376.75, 96.315629, 65.404406, 49.965406, 40.36, 33.774666],
        ),
        (
            "layer/resnet50_training",
            [2037.71, 519.2, 151.090254, 113.956031, 92.882477, 78.631812],
        ),
    ],
)
def test_fewer_devices(name, best):
    graph = read(name)
    for num_devices, expected in enumerate(best, 1):
        solution = ideals(graph, num_devices)
        assert solution.optimal
        assert_same_digits(solution.objective, expected)


@pytest.mark.first_case
@pytest.mark.parametrize("transfer", [0.05, 1.0])
def test_tens_of_thousands_of_ideals(transfer):
    graph = branches(11, (3, 5, 7, 16), 1, num_devices=6, transfer=transfer)
    solution = ideals(graph)
    check(graph, solution)
    assert solution.optimal
    assert solution.objective < linearised(graph).objective


def wide(num_nodes):
    return Graph(
        tuple(Node(v, forward=1.0, host=1.0) for v in range(num_nodes)),
        tuple((v, v + 1) for v in range(0, num_nodes - 1, 2)),
    )


def test_too_many_ideals_are_not_tried():
    with pytest.raises(
        ValueError,
        match=r"more than 1000 ideals: .*`max_ideals` is 1000.*Use `linearised`",
    ):
        ideals(wide(100), 4, max_ideals=1000)
    assert linearised(wide(100), 4).objective == 25


def test_too_many_pairs_are_not_tried(monkeypatch):
    monkeypatch.setattr(module, "_MAX_PAIRS", 10)
    with pytest.raises(ValueError, match=r"closed sets have .* Use `linearised`"):
        ideals(wide(8), 2)


def test_memory_binds_where_nodes_would_be_merged():
    """Nodes that take no time but memory: with their only neighbour they don't fit."""
    nodes = [Node(v, forward=4.0, memory_bytes=4.0, transfer=0.0) for v in range(3)]
    nodes += [Node(3 + v, memory_bytes=1.0, transfer=0.0) for v in range(6)]
    edges = [(0, 1), (1, 2), *((1, 3 + v) for v in range(6))]
    graph = Graph(tuple(nodes), tuple(edges), num_devices=3, memory_limit=8.0)
    solution = ideals(graph)
    assert solution.optimal
    assert solution.objective == best_by_brute_force(graph) == 4
    check(graph, solution)


def test_memory_binds_and_there_are_too_many_ideals(monkeypatch):
    merge = module.merge

    def merge_unless_exact(problem, **memory):
        if not memory:
            raise TooLarge("too many")
        return merge(problem, **memory)

    monkeypatch.setattr(module, "merge", merge_unless_exact)
    not_proved = 0
    for seed in range(600):
        graph = random_graph(np.random.default_rng(seed), most_nodes=5)
        best = best_by_brute_force(graph)
        if graph.memory_limit is None or math.isinf(best):
            continue
        try:
            solution = ideals(graph)
        except TooLarge:
            continue
        check(graph, solution)
        assert solution.bound <= best * (1 + 1e-12)
        assert solution.objective >= best * (1 - 1e-12)
        assert solution.optimal == (solution.bound == solution.objective)
        not_proved += not solution.optimal
    assert not_proved > 3


def test_hosts_are_apart():
    nodes = tuple(Node(v, forward=8.0, host=3.0, on_device=False) for v in range(4))
    graph = Graph(nodes, ((0, 1), (1, 2), (2, 3)), num_devices=1, num_hosts=2)
    solution = ideals(graph)
    assert solution.objective == 6
    assert [stage.on_host for stage in solution.stages] == [True, True]


def test_graph_without_host_times_uses_no_host():
    nodes = tuple(Node(v, forward=3.0) for v in range(4))
    graph = Graph(nodes, ((0, 1), (1, 2), (2, 3)))
    solution = ideals(graph, 2, num_hosts=5)
    assert solution.objective == 6
    assert not any(stage.on_host for stage in solution.stages)


def both_passes(**fields):
    """A chain whose nodes have forward and backward in them."""
    nodes = tuple(Node(v, forward=1.0, backward=2.0, activation_bytes=(4.0, 6.0), **fields) for v in range(2))
    return Graph(nodes, ((0, 1),))


def test_activations_come_back_as_gradients():
    # 10 bytes there and back at 40 a second.
    assert ideals(both_passes(), 2, bandwidth=40).objective == 3.5
    assert ideals(both_passes(transfer=0.125), 2).objective == 3.25
    inference = Graph(
        tuple(Node(v, forward=3.0, activation_bytes=(10.0,)) for v in range(2)),
        ((0, 1),),
    )
    assert ideals(inference, 2, bandwidth=40).objective == 3.25


def test_transfers_are_never_left_out():
    with pytest.raises(ValueError, match="`bandwidth` must be given, got None: node 0"):
        ideals(both_passes(), 2)
    assert ideals(both_passes(), 2, bandwidth=math.inf).objective == 3


@pytest.mark.parametrize("name", ["alexnet", "vgg16", "resnet18", "resnet50", "gnmt", "antichain_test"])
def test_profiles_of_pipedream(name):
    directory = pathlib.Path(os.environ.get("JPIPE_DATA", "unset"))
    directory /= "pipedream-profiles"
    if not directory.is_dir():
        pytest.skip("set JPIPE_DATA to a directory with pipedream-profiles/ in it")
    graph = read_graph(directory / f"{name}.txt", "pipedream")
    one = ideals(graph, 1, bandwidth=1e9).objective
    np.testing.assert_allclose(one, sum(node.seconds for node in graph.nodes))
    slowest = one
    for num_devices in (2, 4, 8):
        solution = ideals(graph, num_devices, bandwidth=1e9)
        assert solution.optimal and len(solution.stages) <= num_devices
        load = max_load(graph, solution, lambda node: 2 * node.output_bytes / 1e9)
        np.testing.assert_allclose(solution.objective, load)
        assert one / num_devices * (1 - 1e-12) <= solution.objective <= slowest
        slowest = solution.objective


def test_memory_limit_splits():
    graph = both_passes(memory_bytes=5.0, transfer=9.0)
    assert len(ideals(graph, 2).stages) == 1
    assert len(ideals(graph, 2, memory_limit=9).stages) == 2
    with pytest.raises(ValueError, match="no contiguous split fits 1 devices of 9 by"):
        ideals(graph, 1, memory_limit=9)
    with pytest.raises(ValueError, match="node 0 can be placed nowhere: 5 bytes"):
        ideals(graph, 2, memory_limit=4)


def test_backward_must_not_lead_to_forward():
    nodes = (Node("b", backward=1.0, is_backward=True), Node("f", forward=1.0))
    with pytest.raises(ValueError, match="the edge b -- f leads from the backward"):
        ideals(Graph(nodes, ((0, 1),)), 2)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (dict(), "`num_devices` must be given"),
        (dict(num_devices=0), "must not both be 0"),
        (dict(num_devices=-1), "`num_devices` must be at least 0, got -1"),
        (dict(num_devices=1, num_hosts=-1), "`num_hosts` must be at least 0, got -1"),
        (dict(num_devices=1, bandwidth=0), "`bandwidth` must be above 0, got 0"),
        (dict(num_devices=1, memory_limit=-1), "`memory_limit` must be at least 0"),
    ],
)
def test_impossible_arguments(counts, message):
    with pytest.raises(ValueError, match=message):
        ideals(wide(3), **counts)
