"""PipeDream's plans against every configuration there is, and against the released planner's."""

import functools
import itertools
import math
import os
import pathlib

import numpy as np
import pytest

from jpipe.solvers import Graph, Node, min_max, pipedream, pipedream_search, read_graph
from jpipe.solvers._states import states

MODELS = ["pipedream-repo", "sosp19"]


# Every configuration, from the definitions, by sets of nodes. Nothing here is taken from the
# planner: neither states nor tables nor how memory is counted on the way.


class Plans:
    """All plans of a small graph on a machine with `levels` of (size, bandwidth)."""

    def __init__(self, graph, levels, *, cost_model, straight, transfers, all_states):
        self.graph, self.levels, self.cost_model = graph, levels, cost_model
        self.straight, self.transfers = straight, transfers
        nodes = range(len(graph.nodes))
        inputs = {v for v in nodes if not graph.predecessors[v] and graph.nodes[v].description.startswith("Input")}
        unread = {
            v
            for v in set(nodes) - inputs
            if graph.nodes[v].description.startswith("__getitem__") and not graph.successors[v]
        }
        self.kept = frozenset(nodes) - inputs - unread
        self.readers = {v: self.kept.intersection(graph.successors[v]) for v in nodes}
        self.reads = {v: self.kept.intersection(graph.predecessors[v]) for v in nodes}
        self.states = self.closed() if all_states else self.grown()

    def before(self, v):
        found = set()
        for u in self.reads[v]:
            found |= {u} | self.before(u)
        return found

    def closed(self):
        subsets = itertools.chain.from_iterable(
            itertools.combinations(sorted(self.kept), n) for n in range(len(self.kept) + 1)
        )
        return {frozenset(s) for s in subsets if all(self.before(v) <= set(s) for v in s)}

    def grown(self):
        """From the first source, by readers and what they need; then the next source."""
        order = [v for v in self.graph.topological_order if v in self.kept]
        sources = [v for v in order if not self.reads[v]]
        found, todo = {frozenset()}, [frozenset()]
        while todo:
            state = todo.pop()
            more = set().union(*(self.readers[v] for v in state)) - state
            more = more or set([v for v in sources if v not in state][:1])
            for v in more:
                new = state | {v} | self.before(v)
                if new not in found:
                    found.add(new)
                    todo.append(new)
        return found

    def cut(self, state):
        def size(nodes):
            return sum(self.graph.nodes[v].output_bytes for v in nodes)

        if self.cost_model == "sosp19":
            return size(v for v in state if self.readers[v] - state)
        antichain = {v for v in state if not self.readers[v] & state}
        beside = {
            u
            for v in antichain
            for u in self.before(v)
            if any(w not in self.before(v) and w != v for w in self.readers[u])
        }
        return size(antichain | beside)

    def stage_seconds(self, seconds, i, j, m, depth, is_first):
        bandwidth = self.levels[depth][1]
        below = self.levels[depth - 1][0] if depth else 1
        weights = sum(self.graph.nodes[v].parameter_bytes for v in j - i)
        if self.cost_model == "sosp19":
            taken = max(seconds, 2 * (m - 1) * weights / bandwidth) / m
            moved = 2 * self.cut(i) / bandwidth
        else:
            reduced = 4 * (m - 1) * weights / (bandwidth * m)
            taken = (seconds + reduced / (below if is_first else 1)) / m
            moved = 2 * self.cut(i) / (bandwidth * m)
            if j != self.kept:
                moved = max(moved, 2 * self.cut(j) / (bandwidth * m))
        return max(taken, moved) if self.transfers and not is_first else taken

    def chains(self, i, j):
        """All ways from state i to state j."""
        if i == j:
            yield [i]
        for k in self.states:
            if i < k <= j:
                for rest in self.chains(k, j):
                    yield [i, *rest]

    def plans(self, i, j, depth):
        """(seconds, ((nodes, replicas), ...)) of a component; depth -1 is a device."""
        if depth < 0:
            yield sum(self.graph.nodes[v].seconds for v in j - i), ((j - i, 1),)
            return
        size = self.levels[depth][0]
        for chain in self.chains(i, j):
            for counts in compositions(size, len(chain) - 1):
                if self.straight and max(counts) > 1:
                    continue
                steps = list(itertools.pairwise(chain))
                inner = [list(self.plans(a, b, depth - 1)) for a, b in steps]
                for parts in itertools.product(*inner):
                    seconds = max(
                        self.stage_seconds(part[0], a, b, m, depth, a == i)
                        for part, (a, b), m in zip(parts, steps, counts, strict=True)
                    )
                    flat = tuple(
                        (nodes, replicas * m)
                        for (_, stages), m in zip(parts, counts, strict=True)
                        for nodes, replicas in stages
                    )
                    yield seconds, flat

    @functools.cached_property
    def all(self):
        """(seconds, bytes of the fullest device) of every plan."""
        every = self.plans(frozenset(), self.kept, len(self.levels) - 1)
        return [(seconds, self.memory(stages)) for seconds, stages in every]

    def memory(self, stages):
        fullest = 0.0
        for s, (nodes, replicas) in enumerate(stages):
            later = sum(r for _, r in stages[s + 1 :])
            size = sum(self.graph.nodes[v].device_bytes for v in nodes)
            for v in set(range(len(self.graph.nodes))) - self.kept:
                near = self.readers[v] or self.reads[v]
                where = [n for n, (there, _) in enumerate(stages) if there & near] or [0]
                if s == (where[0] if self.readers[v] else where[-1]):
                    size += self.graph.nodes[v].device_bytes
            fullest = max(fullest, (1 + math.ceil(later / replicas)) * size)
        return fullest

    def best(self, limit=math.inf):
        return min((seconds for seconds, size in self.all if size <= limit), default=None)


def compositions(total, parts):
    for ends in itertools.combinations(range(1, total), parts - 1):
        yield [b - a for a, b in itertools.pairwise([0, *ends, total])]


def random_graph(rng, num_nodes):
    """Small whole numbers, so that zeros and ties are common; some inputs and unread outputs."""
    edges = tuple((u, v) for u, v in itertools.combinations(range(num_nodes), 2) if rng.random() < 0.5)
    descriptions = rng.choice(["Input0", "Conv", "__getitem__(0)"], num_nodes, p=[0.25, 0.5, 0.25])
    nodes = tuple(
        Node(
            f"n{v}",
            description=str(descriptions[v]),
            forward=float(rng.integers(4)),
            backward=float(rng.integers(4)),
            activation_bytes=tuple(map(float, rng.integers(0, 6, rng.integers(1, 3)))),
            parameter_bytes=float(rng.integers(0, 6)),
        )
        for v in range(num_nodes)
    )
    if not any(node.description == "Conv" for node in nodes):
        nodes = (Node("more", forward=1.0), *nodes[1:])
    order = rng.permutation(num_nodes)
    place = {int(v): p for p, v in enumerate(order)}
    return Graph(tuple(nodes[v] for v in order), tuple((place[u], place[v]) for u, v in edges))


def check_stages(graph, solution, num_devices):
    """Every node once, no edge back, all devices used."""
    stage_of = {v: s for s, stage in enumerate(solution.stages) for v in stage.nodes}
    assert sorted(map(str, stage_of)) == sorted(str(n.id) for n in graph.nodes)
    assert sum(len(stage.nodes) for stage in solution.stages) == len(graph.nodes)
    for u, v in graph.edges:
        assert stage_of[graph.nodes[u].id] <= stage_of[graph.nodes[v].id]
    assert sum(stage.replicas for stage in solution.stages) == num_devices


@pytest.mark.parametrize("cost_model", MODELS)
@pytest.mark.parametrize(
    ("levels", "num_nodes", "num_graphs"),
    [
        ([(1, 1.0)], 5, 20),
        ([(2, 2.0)], 6, 60),
        ([(3, 1.0)], 5, 60),
        ([(5, 3.0)], 5, 30),
        ([(2, 4.0), (2, 1.0)], 4, 60),
        ([(3, 4.0), (2, 1.0)], 4, 40),
        ([(2, 1.0), (3, 2.0)], 4, 40),
        ([(2, 4.0), (2, 2.0), (2, 1.0)], 3, 20),
    ],
)
def test_equals_brute_force(monkeypatch, cost_model, levels, num_nodes, num_graphs):
    monkeypatch.setattr(pipedream_search, "_COARSE", 2)  # so that small graphs are bounded too
    sizes, bandwidths = zip(*levels, strict=True)
    rng = np.random.default_rng(num_nodes + sum(sizes))
    refused = 0
    for _ in range(num_graphs):
        graph = random_graph(rng, int(rng.integers(1, num_nodes + 1)))
        options = dict(
            cost_model=cost_model,
            straight=bool(rng.random() < 0.2),
            transfers=bool(rng.random() < 0.8),
            all_states=bool(rng.integers(2)),
        )
        plans = Plans(graph, levels, **options)
        needs = [size for _, size in plans.all]
        limits = [math.inf, *rng.choice(needs or [1.0], 2), min(needs or [1.0]) - 0.5]
        for limit in filter(lambda limit: limit > 0, limits):
            plan = functools.partial(pipedream, graph, sizes, bandwidths, memory_limit=limit, **options)
            best = plans.best(limit)
            if best is None:
                if needs:
                    message = f"no plan fits .* suffices is {min(needs):,.0f}"
                else:
                    message = "`straight` puts one stage on each"
                with pytest.raises(ValueError, match=message):
                    plan()
                refused += 1
                continue
            solution = plan()
            np.testing.assert_allclose(solution.objective, best, rtol=1e-12)
            assert solution.optimal and solution.bound == solution.objective
            check_stages(graph, solution, math.prod(sizes))
            rows = {node.id: v for v, node in enumerate(graph.nodes)}
            flat = [(plans.kept & {rows[v] for v in stage.nodes}, stage.replicas) for stage in solution.stages]
            assert plans.memory(flat) <= limit
            if len(levels) == 1:  # deeper, stages don't say where a component ends
                every = plans.plans(frozenset(), plans.kept, 0)
                got = next(t for t, stages in every if list(stages) == flat)
                np.testing.assert_allclose(got, best, rtol=1e-12)
    assert refused


@pytest.mark.parametrize("cost_model", MODELS)
def test_data_parallel_is_one_stage_on_all_devices(cost_model):
    nodes = (Node("a", forward=3.0, parameter_bytes=8.0), Node("b", backward=5.0))
    graph = Graph(nodes, ((0, 1),))
    flat = pipedream(graph, 4, 2.0, cost_model=cost_model)
    deep = pipedream(graph, (2, 4), (2.0, 1.0), cost_model=cost_model)
    if cost_model == "sosp19":
        assert flat.data_parallel == max(8.0, 2 * 3 * 8 / 2) / 4
        assert deep.data_parallel == max(max(8.0, 2 * 8 / 2) / 2, 2 * 3 * 8 / 1) / 4
    else:
        assert flat.data_parallel == (8.0 + 4 * 3 * 8 / (2 * 4)) / 4
        inner = (8.0 + 4 * 8 / (2 * 2)) / 2
        assert deep.data_parallel == (inner + 4 * 3 * 8 / (1 * 4) / 2) / 4


# Graphs as large as models.


def chain(num_nodes):
    return num_nodes, [(v, v + 1) for v in range(num_nodes - 1)]


def ladder(length):
    """Two chains from one node to one other: (length + 1)^2 ways to cut it, and two more."""
    left, right = range(1, length + 1), range(length + 1, 2 * length + 1)
    edges = [*itertools.pairwise([0, *left, 2 * length + 1])]
    return 2 * length + 2, edges + [*itertools.pairwise([0, *right, 2 * length + 1])]


def dense(num_nodes):
    """As in DenseNet: everything reads everything before."""
    return num_nodes, list(itertools.combinations(range(num_nodes), 2))


def fan(width):
    return width + 2, [(0, v) for v in range(1, width + 1)] + [(v, width + 1) for v in range(1, width + 1)]


def series_parallel(rng, depth):
    """Random, from node 0 to node 1."""
    edges, num_nodes = [(0, 1)], 2
    for _ in range(depth):
        u, v = edges.pop(int(rng.integers(len(edges))))
        w, num_nodes = num_nodes, num_nodes + 1
        edges += [(u, w), (w, v)] + ([(u, v)] if rng.random() < 0.3 else [])
    return num_nodes, edges


def costed(shape, seed=0):
    rng = np.random.default_rng(seed)
    num_nodes, edges = shape
    nodes = tuple(
        Node(
            v,
            forward=float(rng.uniform(0.001, 0.05)),
            activation_bytes=(float(rng.integers(1, 9)) * 1e6,),
            parameter_bytes=float(rng.integers(0, 9)) * 1e6,
        )
        for v in range(num_nodes)
    )
    return Graph(nodes, tuple(edges))


SHAPES = {
    "chain": chain(260),
    "ladder": ladder(16),
    "dense": dense(80),
    "fan": fan(7),
    "series_parallel": series_parallel(np.random.default_rng(3), 30),
}


@pytest.mark.first_case
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cost_model", MODELS)
@pytest.mark.sampled(2)
def test_families(monkeypatch, shape, cost_model):
    graph = costed(SHAPES[shape])
    plan = functools.partial(pipedream, graph, cost_model=cost_model)
    flat = plan(8, 1e9)
    deep = plan((4, 2), (1e10, 1e9))
    straight = plan(8, 1e9, straight=True)
    for solution in (flat, deep, straight):
        check_stages(graph, solution, 8)
    even = sum(node.seconds for node in graph.nodes) / 8
    assert even * (1 - 1e-12) <= plan(8, 1e9, transfers=False).objective
    assert plan(8, 1e9, transfers=False).objective <= flat.objective
    assert flat.objective <= min(straight.objective, flat.data_parallel)
    assert plan((8, 1), (1e9, 1.0)).objective == flat.objective
    monkeypatch.setattr(pipedream_search, "_COARSE", 10**9)  # without a bound
    assert plan((4, 2), (1e10, 1e9)).objective == deep.objective


def test_pipelines_inside_of_servers_and_replicas_of_those(monkeypatch):
    """Each of two servers takes a minibatch that lasts twice as long as the objective."""
    nodes = tuple(Node(v, forward=1.0 + v % 7, activation_bytes=(1e11,), parameter_bytes=5e8) for v in range(300))
    graph = Graph(nodes, tuple(itertools.pairwise(range(300))))
    machine = (4, 2), (1e9, 1e9)
    solution = pipedream(graph, *machine)
    assert [stage.replicas for stage in solution.stages] == [2, 2, 2, 2]
    costs = [node.seconds for node in nodes]
    starts = [0, *min_max(costs, 4), 300]
    slowest = max(sum(costs[i:j]) for i, j in itertools.pairwise(starts))
    reduced = 4 * 1 * (300 * 5e8) / (1e9 * 2) / 4
    assert solution.objective == (slowest + reduced) / 2
    monkeypatch.setattr(pipedream_search, "_COARSE", 10**9)
    assert pipedream(graph, *machine) == solution


@pytest.mark.parametrize(
    ("shape", "count"),
    [(chain(50), 51), (ladder(9), 102), (dense(60), 61), (fan(6), 3 + 2**6 - 1)],
)
def test_numbers_of_states(shape, count):
    graph = costed(shape)
    for from_first_source in (True, False):
        found = states(
            graph.predecessors,
            graph.successors,
            count,
            from_first_source=from_first_source,
        )
        assert found.num_states == count
        sets = [frozenset(np.flatnonzero(c)) for c in found.members.T]
        np.testing.assert_array_equal(found.contains, [[a < b for b in sets] for a in sets])
        with pytest.raises(ValueError, match=f"more than {count - 1} states"):
            states(graph.predecessors, graph.successors, count - 1)


def test_two_sources():
    """Two towers: by the program's states the second comes whole; each may be cut."""
    nodes = tuple(Node(v, forward=1.0) for v in range(8))
    towers = Graph(nodes, ((0, 1), (1, 2), (2, 7), (3, 4), (4, 5), (5, 6), (6, 7)))
    assert pipedream(towers, 4, 1.0, straight=True).objective == 5.0
    with pytest.raises(ValueError, match="into at most 4"):
        pipedream(towers, 5, 1.0, straight=True)
    assert pipedream(towers, 4, 1.0, straight=True, all_states=True).objective == 2.0


def test_a_wide_graph_is_refused_with_what_to_do():
    with pytest.raises(
        ValueError,
        match=r"more than [\d,]+ states .* Make each branch one node, plan one level",
    ):
        pipedream(costed(fan(60)), (4, 4), (1e10, 1e9))
    with pytest.raises(ValueError, match=r"more than 70 states .* raise `max_states`"):
        pipedream(costed(fan(7)), 4, 1e9, max_states=70)


def test_nodes_left_out_go_with_their_neighbours():
    nodes = [
        Node("x", "Input0", forward=100.0),
        Node("a", forward=1.0),
        Node("b", "__getitem__(0)", forward=1.0),
        Node("unread", "__getitem__(1)", forward=100.0),
        Node("late", "Input1"),
        Node("c", forward=2.0),
    ]
    edges = ((0, 1), (1, 2), (1, 3), (2, 5), (4, 5), (0, 5))
    solution = pipedream(Graph(tuple(nodes), edges), 2, 1.0, straight=True)
    assert solution.objective == 2.0
    assert [stage.nodes for stage in solution.stages] == [
        ("x", "a", "b", "unread"),
        ("late", "c"),
    ]


def test_memory_is_that_of_every_minibatch_in_flight():
    """Two stages of a straight pipeline hold two and one."""
    nodes = tuple(Node(v, forward=1.0, parameter_bytes=10.0) for v in range(3))
    graph = Graph(nodes, ((0, 1), (1, 2)))
    plan = functools.partial(pipedream, graph, 2, 1e9, straight=True)
    assert [s.nodes for s in plan(memory_limit=20).stages] == [(0,), (1, 2)]
    with pytest.raises(ValueError, match=r"the least that suffices is 20\. "):
        plan(memory_limit=19)
    with pytest.raises(ValueError, match=r"is 20, and the node 0 alone takes 10\."):
        plan(memory_limit=9)
    limited = Graph(nodes, graph.edges, memory_limit=20.0)
    assert pipedream(limited, 1, 1.0, memory_limit=math.inf).objective == 3.0
    with pytest.raises(ValueError, match="no plan fits"):
        pipedream(limited, 1, 1.0)


@pytest.mark.parametrize(
    ("num_devices", "bandwidth", "options", "message"),
    [
        (0, 1.0, {}, "`num_devices` must be whole numbers, at least 1, got 0"),
        ((4, 1.5), (1.0, 1.0), {}, "`num_devices` must be whole numbers"),
        ((), (), {}, "`num_devices` and `bandwidth` must have one number"),
        ((2, 2), 1.0, {}, "one number for each level, innermost first"),
        (2, None, {}, "`bandwidth` must be finite .* transfers would be free"),
        (2, 0.0, {}, "`bandwidth` must be finite and above 0, got 0"),
        ((2, 2), (1.0, math.inf), {}, "`bandwidth` must be finite"),
        (2, 1.0, {"cost_model": "sosp"}, "`cost_model` must be one of pipedream-repo"),
        (2, 1.0, {"memory_limit": 0}, "`memory_limit` must be above 0 bytes, got 0"),
        (2, 1.0, {"memory_limit": math.nan}, "`memory_limit` must be above 0"),
        (
            4,
            1.0,
            {"straight": True},
            "one stage on each of 4 devices, .* into at most 3",
        ),
    ],
)
def test_wrong_arguments(num_devices, bandwidth, options, message):
    with pytest.raises(ValueError, match=message):
        pipedream(costed(chain(3)), num_devices, bandwidth, **options)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (Node("b", is_backward=True), "'b': it belongs to the backward pass alone"),
        (Node("b", on_device=False), "'b': it cannot run on a device"),
        (Node("b", colocation="here"), "'b': it must be where 'a' is"),
        (Node("b", transfer=1.0), "'b': it has a time to move its output but no bytes"),
    ],
)
def test_what_the_model_has_not_is_refused(node, message):
    graph = Graph((Node("a", colocation="here"), node), ((0, 1),))
    with pytest.raises(ValueError, match=message):
        pipedream(graph, 2, 1.0)
    if node.transfer:
        assert pipedream(graph, 2, 1.0, transfers=False).objective == 0.0


def test_nothing_to_plan():
    with pytest.raises(ValueError, match="`graph` must have a node to plan, got 1"):
        pipedream(Graph((Node("x", "Input0"),), ()), 2, 1.0)


# What the released planner says of the profiles that come with it; `None` where it wasn't kept.

MACHINE = ((4, 4), (1e10, 1.25e9))
STRAIGHT, NO_FLAG = {"straight": True}, {"transfers": False}
RELEASED = [
    ("alexnet", 2, 1e9, {}, "0.066453504", "4.31977", [1, 1]),
    ("alexnet", 4, 1e9, {}, "0.0342171413", "5.98042", [3, 1]),
    ("alexnet", 8, 1e9, {}, "0.018874368", "6.23023", [6, 1, 1]),
    ("alexnet", 16, 1e9, {}, "0.018874368", "3.31744", [14, 1, 1]),
    ("alexnet", 4, 1e9, STRAIGHT, "0.066453504", "3.07934", [1, 1, 1, 1]),
    ("alexnet", *MACHINE, {}, "0.0150994944", "3.08458", None),
    ("alexnet", 4, 1e9, NO_FLAG, "0.023165752", "8.83342", [2, 1, 1]),
    ("vgg16", 2, 1e9, {}, "0.411041792", "2.16449", [1, 1]),
    ("vgg16", 4, 1e9, {}, "0.205520896", "2.83770", [3, 1]),
    ("vgg16", 8, 1e9, {}, "0.103833170", "3.14151", [7, 1]),
    ("vgg16", 8, 3.125e9, {}, "0.0936611288", "1.72480", [7, 1]),
    ("vgg16", 16, 1e9, {}, "0.0565297674", "3.03811", [13, 2, 1]),
    ("vgg16", 16, 3e9, {}, "0.0456574832", "1.86761", [15, 1]),
    ("vgg16", 4, 1e9, STRAIGHT, "0.411041792", "1.41885", [1] * 4),
    ("vgg16", 8, 1e9, STRAIGHT, "0.411041792", "0.793575", [1] * 8),
    ("vgg16", *MACHINE, {}, "0.0671339969", "2.01723", [12, 1, 1, 1, 1]),
    ("vgg16", 4, 1e9, NO_FLAG, "0.175732624", "3.31871", [3, 1]),
    ("resnet18", 2, 1e9, {}, "0.176629048", "1", [2]),
    ("resnet18", 4, 1e9, {}, "0.100004036", "1", [4]),
    ("resnet18", 8, 1e9, {}, "0.050783327", "1.04216", [5, 3]),
    ("resnet18", 16, 1e9, {}, "0.025690112", "1.05849", [9, 4, 3]),
    ("resnet50", 2, 1e9, {}, "0.285058", "1.13639", [1, 1]),
    ("resnet50", 4, 1e9, {}, "0.162880924", "1.15131", [2, 2]),
    ("resnet50", 4, 1e9, NO_FLAG, "0.111497", "1.68189", [1, 1, 1, 1]),
    ("resnet50", 4, 1e9, STRAIGHT, "0.258149", "0.726425", [1] * 4),
    ("resnet50", 8, 1e9, STRAIGHT, "0.258149", "0.387963", [1] * 8),
    ("resnet50", *MACHINE, {}, "0.0432084692", "1.04065", [4, 4, 4, 4]),
    ("gnmt", 2, 1e9, {}, "0.045936", "17.846", [1, 1]),
    ("gnmt", 4, 1e9, {}, "0.025868", "23.336", [1] * 4),
    ("gnmt", 8, 1e9, {}, "0.019285", "18.163", [1] * 8),
    ("gnmt", 16, 1e9, {}, "0.019285", "9.7093", [1, 1, 7] + [1] * 7),
    ("gnmt", *MACHINE, {}, "0.011081", "12.3076", None),
]
# Plans that are as fast as those, by their own replicas.
TIES = {
    ("alexnet", 8): [7, 1],
    ("alexnet", 16): [15, 1],
    ("vgg16", (4, 4)): [12, 2, 1, 1],
    ("gnmt", 16): [1, 1, 8] + [1] * 6,
}


def profile(name):
    path = pathlib.Path(os.environ.get("JPIPE_DATA", "unset")) / "pipedream-profiles"
    if not path.is_dir():
        pytest.skip("set JPIPE_DATA to a directory with pipedream-profiles/ in it")
    return read_graph(path / f"{name}.txt", "pipedream")


@pytest.mark.parametrize(
    ("model", "num_devices", "bandwidth", "options", "seconds", "gain", "replicas"),
    RELEASED,
)
def test_equals_the_released_planner(model, num_devices, bandwidth, options, seconds, gain, replicas):
    solution = pipedream(profile(model), num_devices, bandwidth, **options)
    assert_to_the_digits(solution.objective, seconds)
    assert_to_the_digits(solution.data_parallel / solution.objective, gain)
    if replicas is not None:
        ours = TIES.get((model, num_devices), replicas)
        assert [stage.replicas for stage in solution.stages] == ours


def assert_to_the_digits(got, expected):
    digits = len(expected.replace(".", "").lstrip("0"))
    assert float(f"{got:.{digits}g}") == float(expected), got


@pytest.mark.parametrize("cost_model", MODELS)
def test_published_configurations(cost_model):
    """VGG-16 on 4, 8 and 16 devices: 3-1, 7-1 and 15-1."""
    for num_devices, bandwidth in [(4, 1e9), (8, 3.125e9), (16, 3e9)]:
        solution = pipedream(profile("vgg16"), num_devices, bandwidth, cost_model=cost_model)
        replicas = [stage.replicas for stage in solution.stages]
        assert replicas == [num_devices - 1, 1]
