"""Random graphs to split, and the best split by trying all."""

import functools
import itertools
import math
import os
import pathlib
import random

import numpy as np
import pytest

from jpipe.solvers import Graph, Node, read_graph


def random_graph(rng: np.random.Generator, *, most_nodes: int = 6) -> Graph:
    """Small, with small whole numbers, so that zeros and ties are common.

    Half of them have a backward pass; some have nodes that only a host or only a device can run, colocations,
    backward nodes without a forward one, and a limit of memory.
    """
    has_backward = bool(rng.integers(2))
    count = int(rng.integers(1, most_nodes + 1 - has_backward))
    most_transfer = int(rng.choice([0, 1, 2, 6]))
    with_hosts = bool(rng.integers(2))

    def node(v, **more):
        has_host = with_hosts and rng.random() < 0.8
        return dict(
            id=v,
            transfer=float(rng.integers(most_transfer + 1)),
            memory_bytes=float(rng.integers(3)),
            host=float(rng.integers(12)) if has_host else None,
            on_device=not has_host or rng.random() < 0.85,
            **more,
        )

    def seconds():
        return float(rng.integers(1, 7)) if rng.random() < 0.7 else 0.0

    nodes = [node(v, forward=seconds()) for v in range(count)]
    edges = [(u, v) for u, v in itertools.combinations(range(count), 2) if rng.random() < 0.4]
    classes = rng.integers(count, size=count)
    for v in range(count):
        if rng.random() < 0.3:
            nodes[v]["colocation"] = f"c{classes[v]}"
    if has_backward:
        loss = rng.random() < 0.5  # belongs to no forward node
        for v in range(count):
            if "colocation" not in nodes[v]:
                nodes[v]["colocation"] = f"n{v}"
        for v in range(count):
            nodes.append(node(count + v, backward=seconds(), is_backward=True))
            if rng.random() < 0.9:
                nodes[-1]["colocation"] = nodes[v]["colocation"]
        edges += [(count + v, count + u) for u, v in itertools.combinations(range(count), 2) if (u, v) in edges]
        edges += [(v, count + v) for v in range(count) if rng.random() < 0.7]
        if loss:
            nodes.append(node(2 * count, backward=seconds(), is_backward=True))
            edges += [(count - 1, 2 * count), (2 * count, 2 * count - 1)]
    limit = float(rng.integers(2, 9)) if rng.integers(2) else None
    return Graph(
        tuple(Node(**of) for of in nodes),
        tuple(edges),
        num_devices=int(rng.integers(1, 4)),
        num_hosts=int(rng.integers(3)) if with_hosts else 0,
        memory_limit=limit,
    )


def branches(blocks, lengths, seed, num_devices, transfer):
    """A graph of blocks of parallel chains, as in an Inception."""
    rng = random.Random(seed)
    nodes: list[Node] = []
    edges: list[tuple[int, int]] = []

    def add(*before):
        edges.extend((u, len(nodes)) for u in before)
        seconds = rng.uniform(0.2, 3)
        nodes.append(
            Node(
                len(nodes),
                forward=seconds,
                host=10 * seconds,
                transfer=transfer * rng.random(),
            )
        )
        return len(nodes) - 1

    last = add()
    for _ in range(blocks):
        heads = []
        for length in lengths:
            head = last
            for _ in range(length):
                head = add(head)
            heads.append(head)
        last = add(*heads)
    return Graph(tuple(nodes), tuple(edges), num_devices=num_devices, num_hosts=1)


def device_load(graph: Graph, inside, transfer=lambda node: node.transfer) -> float:
    """Time of a device with the nodes at positions `inside`."""
    nodes = graph.nodes
    crossing = {u for u, v in graph.edges if (u in inside) ^ (v in inside)}
    return sum(nodes[v].seconds for v in inside) + sum(transfer(nodes[u]) for u in crossing)


def max_load(graph: Graph, solution, transfer=lambda node: node.transfer) -> float:
    """Of a solution, from its stages alone; checks that each node is in one."""
    position = {node.id: v for v, node in enumerate(graph.nodes)}
    placed = [i for stage in solution.stages for i in stage.nodes]
    assert sorted(map(str, placed)) == sorted(map(str, position)), solution
    loads = []
    for stage in solution.stages:
        inside = {position[i] for i in stage.nodes}
        assert inside
        if stage.on_host:
            loads.append(sum(graph.nodes[v].host for v in inside))
        else:
            assert all(graph.nodes[v].on_device for v in inside)
            loads.append(device_load(graph, inside, transfer))
    return max(loads)


def goes_round(graph: Graph, sets) -> bool:
    """Whether some way along the forward pass leaves a set and comes back to it."""
    of = {v: n for n, inside in enumerate(sets) for v in inside}
    with_forward = {
        node.colocation if node.colocation is not None else ("alone", node.id)
        for node in graph.nodes
        if not node.is_backward
    }

    def is_orphan(node):
        key = node.colocation if node.colocation is not None else ("alone", node.id)
        return key not in with_forward

    steps = set()
    for u, v in graph.edges:
        if not graph.nodes[u].is_backward and not graph.nodes[v].is_backward:
            steps.add((of[u], of[v]))
        elif graph.nodes[u].is_backward and (is_orphan(graph.nodes[u]) or is_orphan(graph.nodes[v])):
            steps.add((of[v], of[u]))
    ways = {(a, b) for a, b in steps if a != b}
    for _ in sets:
        ways |= {(a, d) for a, b in ways for c, d in ways if b == c}
    return any(a == b for a, b in ways)


def best_by_brute_force(graph: Graph, contiguous: bool = True, transfer=lambda node: node.transfer) -> float:
    """The least slowest stage of all ways to place the graph; infinite if there's none."""
    classes: dict = {}
    for v, node in enumerate(graph.nodes):
        key = ("alone", v) if node.colocation is None else node.colocation
        classes.setdefault(key, []).append(v)
    limit = math.inf if graph.memory_limit is None else graph.memory_limit

    @functools.cache
    def loads(inside):
        """On a device and on a host."""
        nodes = [graph.nodes[v] for v in inside]
        on_device = on_host = math.inf
        if all(node.on_device for node in nodes):
            if sum(node.device_bytes for node in nodes) <= limit:
                on_device = device_load(graph, inside, transfer)
        if all(node.host is not None for node in nodes):
            on_host = sum(node.host for node in nodes)
        return on_device, on_host

    best = math.inf
    for sets in _partitions(list(classes.values())):
        sets = [frozenset(itertools.chain(*of)) for of in sets]
        if len(sets) > graph.num_devices + graph.num_hosts:
            continue
        slowest = min(
            (
                max(loads(inside)[n in hosts] for n, inside in enumerate(sets))
                for size in range(min(graph.num_hosts, len(sets)) + 1)
                for hosts in itertools.combinations(range(len(sets)), size)
                if len(sets) - size <= graph.num_devices
            ),
            default=math.inf,
        )
        if slowest < best and not (contiguous and goes_round(graph, sets)):
            best = slowest
    return best


def _partitions(items):
    if not items:
        yield []
        return
    for rest in _partitions(items[1:]):
        yield [[items[0]], *rest]
        for n in range(len(rest)):
            yield [*rest[:n], [items[0], *rest[n]], *rest[n + 1 :]]


def read(name):
    """A published graph, or a skip."""
    directory = pathlib.Path(os.environ.get("JPIPE_DATA", "unset")) / "placement"
    if not directory.is_dir():
        pytest.skip("set JPIPE_DATA to a directory with placement/ in it")
    return read_graph(directory / f"{name}.json", "placement")


def check(graph, solution, contiguous=True):
    """That a solution is a split, keeps to the limits, and says its own slowest stage."""
    np.testing.assert_allclose(solution.objective, max_load(graph, solution))
    on_host = [stage.on_host for stage in solution.stages]
    assert sum(on_host) <= graph.num_hosts
    assert len(on_host) - sum(on_host) <= graph.num_devices
    position = {node.id: v for v, node in enumerate(graph.nodes)}
    sets = [{position[i] for i in stage.nodes} for stage in solution.stages]
    assert not (contiguous and goes_round(graph, sets))
    stage_of = {v: n for n, inside in enumerate(sets) for v in inside}
    for u, v in graph.edges:
        if contiguous and not graph.nodes[v].is_backward:
            assert stage_of[u] <= stage_of[v]
    for stage, inside in zip(solution.stages, sets):
        places = [graph.topological_order.index(position[i]) for i in stage.nodes]
        assert places == sorted(places)
        taken = sum(graph.nodes[v].device_bytes for v in inside)
        assert stage.on_host or taken <= (graph.memory_limit or math.inf)


def assert_same_digits(value, published):
    """As many as were published; the last may be cut off or rounded."""
    digits = len(str(published).split(".")[1])
    assert abs(value - published) < 10.0**-digits, (value, published)
