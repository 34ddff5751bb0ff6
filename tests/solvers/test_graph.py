"""Graphs read from three formats, written in one, and every way to write them wrong."""

import json
import os
import pathlib

import numpy as np
import pytest

from jpipe.solvers import Graph, Node, read_graph

PIPEDREAM = """\
node1 -- Input0 -- forward_compute_time=0.0, backward_compute_time=0.0, activation_size=0.0, parameter_size=0.0
node2 -- LSTM(8, 8, layers=[1, 2]) -- forward_compute_time=1.5, backward_compute_time=2.500, \
activation_size=[6291456.0; 131072.0; 1e3], parameter_size=4096.000 -- stage_id=3
node3 -- a -- b -- forward_compute_time=1e-3, backward_compute_time=0, activation_size=[], parameter_size=7

\tnode1 -- node2
\tnode2 -- node3
"""


def placement():
    def node(id, **more):
        return {"id": id, "fpgaLatency": 2, "cpuLatency": 9.5, "size": 64, **more}

    def edge(source, destination, cost, **more):
        return {"sourceId": source, "destId": destination, "cost": cost, **more}

    return {
        "maxSizePerFPGA": 1000.0,
        "maxFPGAs": 2,
        "maxCPUs": 1,
        "nodes": [
            node("a", name="first", supportedOnFpga=1, isBackwardNode=0, colorClass=5),
            node("b", supportedOnFpga=0),
            node("c", isBackwardNode=True, colorClass=5),
        ],
        "edges": [edge("a", "b", 0.5, size=16), edge("b", "c", 1), edge("b", "c", 1)],
    }


def written(tmp_path, text):
    path = tmp_path / "graph"
    path.write_text(text)
    return path


def test_pipedream(tmp_path):
    graph = read_graph(written(tmp_path, PIPEDREAM), "pipedream")
    assert graph.edges == ((0, 1), (1, 2))
    source, lstm, last = graph.nodes
    assert source == Node("node1", "Input0")
    assert lstm.description == "LSTM(8, 8, layers=[1, 2])"
    assert lstm.activation_bytes == (6291456.0, 131072.0, 1000.0)
    assert (lstm.forward, lstm.backward, lstm.parameter_bytes) == (0.0015, 0.0025, 4096)
    assert lstm.seconds == 0.004
    assert lstm.output_bytes == 6423528.0
    assert lstm.device_bytes == 4096 + 6423528.0
    assert (last.description, last.forward, last.activation_bytes) == (
        "a -- b",
        1e-6,
        (0.0,),
    )


def test_placement(tmp_path):
    graph = read_graph(written(tmp_path, json.dumps(placement())), "placement")
    assert (graph.num_devices, graph.num_hosts, graph.memory_limit) == (2, 1, 1000.0)
    assert graph.edges == ((0, 1), (1, 2))  # one output, moved once
    a, b, c = graph.nodes
    assert a == Node(
        "a",
        "first",
        forward=2,
        activation_bytes=(16,),
        memory_bytes=64,
        transfer=0.5,
        host=9.5,
        colocation=5,
    )
    assert (b.on_device, b.transfer, b.is_backward) == (False, 1, False)
    assert (c.backward, c.forward, c.is_backward, c.transfer) == (2, 0, True, 0)
    assert c.device_bytes == 64


@pytest.mark.parametrize("seed", range(30))
def test_own_format_round_trip(tmp_path, seed):
    rng = np.random.default_rng(seed)

    def number():
        return float(rng.choice([0.0, rng.exponential() * 10.0 ** rng.integers(-9, 12)]))

    def maybe(value):
        return value if rng.integers(2) else None

    count = int(rng.integers(1, 12))
    ids = [f'n "{v}"\n\u03c4' if rng.integers(2) else v for v in range(count)]
    nodes = tuple(
        Node(
            name,
            description=str(rng.choice(["", "Conv2d(3, 64)", "\u2028 -- [1, 2]"])),
            forward=number(),
            backward=number(),
            activation_bytes=tuple(number() for _ in range(rng.integers(0, 4))),
            parameter_bytes=number(),
            memory_bytes=maybe(number()),
            transfer=maybe(number()),
            host=maybe(number()),
            colocation=maybe(int(rng.integers(3))) if rng.integers(2) else "x",
            is_backward=bool(rng.integers(2)),
            on_device=bool(rng.integers(2)),
        )
        for name in ids
    )
    order = rng.permutation(count).tolist()
    edges = [(u, v) for n, u in enumerate(order) for v in order[n + 1 :]]
    graph = Graph(
        nodes,
        tuple(edge for edge in edges if rng.random() < 0.4),
        num_devices=maybe(int(rng.integers(0, 9))),
        num_hosts=int(rng.integers(0, 2)),
        memory_limit=maybe(number()),
    )
    graph.save(tmp_path / "graph.json")
    assert read_graph(tmp_path / "graph.json") == graph
    one_line = written(tmp_path, json.dumps(graph.to_json()))
    assert read_graph(one_line) == graph


def test_saved_files_have_one_line_for_each_node_and_edge(tmp_path):
    graph = Graph((Node("a", forward=0.5), Node("b")), ((0, 1),), memory_limit=8.0)
    graph.save(tmp_path / "graph.json")
    assert (
        (tmp_path / "graph.json").read_text()
        == """\
{
 "format": "jpipe graph 1",
 "nodes": [
  {"id": "a", "forward": 0.5},
  {"id": "b"}
 ],
 "edges": [
  ["a", "b"]
 ],
 "memory_limit": 8.0
}
"""
    )


def test_neighbours_and_order():
    nodes = tuple(Node(v) for v in range(5))
    graph = Graph(nodes, ((3, 1), (3, 0), (0, 4), (1, 4)))
    assert graph.predecessors == ((3,), (3,), (), (), (0, 1))
    assert graph.successors == ((4,), (4,), (), (1, 0), ())
    assert graph.topological_order == (2, 3, 0, 1, 4)


def test_long_chains_need_no_recursion():
    count = 5_000
    edges = tuple((v + 1, v) for v in range(count - 1))
    graph = Graph(tuple(Node(v) for v in range(count)), edges)
    assert graph.topological_order == tuple(range(count - 1, -1, -1))
    with pytest.raises(ValueError, match=r"must have no cycle, got \d+ -> \d+ -> .*"):
        Graph(graph.nodes, (*edges, (0, count - 1)))


OURS = """\
{
 "format": "jpipe graph 1",
 "nodes": [
  {"id": 1, "activation_bytes": [1, 2]},
  {"id": 2},
  {"id": 3}
 ],
 "edges": [
  [1, 2],
  [2, 3]
 ]
}
"""
PLACED = json.dumps(placement(), indent=1)


def line_of(text, part):
    return text[: text.index(part)].count("\n") + 1


# format, what to replace in a good file, with what, the part whose line is named in the new
# file (None: no line), the message.
WRONG = [
    ("pipedream", "forward_compute_time=1.5", "forward_time=1.5", "node2 -- LSTM", "a node must be `id -- description "
                                                                                   "-- "),
    ("pipedream", "=1.5", "=fast", "node2 -- LSTM", "a node must be `id -- description"),
    ("pipedream", "=1.5", "=1.5.2", "node2 -- LSTM", "could not convert string to float"),
    ("pipedream", "=1.5", "=-1.5", "node2 -- LSTM", "`forward` must be a finite number, at least 0, got -0.0015"),
    ("pipedream", "=1.5", "=nan", "node2 -- LSTM", "`forward` must be a finite number"),
    ("pipedream", "parameter_size=7", "parameter_size=inf", "node3 -- a", "`parameter_bytes` must be a finite"),
    ("pipedream", "131072.0;", "many;", "node2 -- LSTM", "could not convert string to float: ' many'"),
    ("pipedream", "\tnode1 -- node2", "\tnode1 node2", "\tnode1 node2", "an edge must be `source -- destination`"),
    ("pipedream", "\tnode1 -- node2", "\tnode1 -- node9", "\tnode1 -- node9", "an edge must join ids of nodes, got "
                                                                              "'node9'"),
    ("pipedream", "\tnode1 -- node2", "\tnode2 -- node2", "\tnode2 -- node2", "the edge node2 -- node2 leads to its "
                                                                              "own node"),
    ("pipedream", "\tnode2 -- node3", "\tnode1 -- node2 ", "\tnode1 -- node2 ", "the edge node1 -- node2 occurs twice"),
    ("pipedream", "\tnode2 -- node3", "\tnode2 -- node1", "\tnode2 -- node1", "must have no cycle, got node1 -> node2 "
                                                                              "-> node1. Remove"),
    ("pipedream", "node3 -- a", "node1 -- a", "node1 -- a", "two nodes have the id 'node1'. Rename one"),
    ("jpipe", '{"id": 2}', '{"id": 2', '{"id": 3}', "not JSON: "),
    ("jpipe", '{"id": 2}', '{"id": [2]}', '{"id": [2]}', r"`id` must be a string or an integer, got \[2\]"),
    ("jpipe", '{"id": 2}', '{"name": 2}', '{"name": 2}', "`id` must be a string or an integer, got nothing"),
    ("jpipe", '{"id": 2}', '{"id": 2, "forwards": 1}', '{"id": 2,', "a node has no field 'forwards'. There are id, "),
    ("jpipe", '{"id": 2}', '{"id": 2, "forward": "1"}', '{"id": 2,', "`forward` must be a finite number, at least 0, "
                                                                     "got '1'"),
    ("jpipe", '{"id": 2}', '{"id": 2, "forward": Infinity}', '{"id": 2,', "`forward` must be a finite number"),
    ("jpipe", '{"id": 2}', '{"id": 2, "forward": 1%s}' % ("0" * 400), '{"id": 2,', "`forward` must be a finite"),
    ("jpipe", '{"id": 2}', '{"id": 2, "colocation": [1]}', '{"id": 2,', "`colocation` must be a string or an integer"),
    ("jpipe", '{"id": 2}', '{"id": 2, "on_device": "no"}', '{"id": 2,', "`on_device` must be true or false, got 'no'"),
    ("jpipe", '{"id": 2}', '{"id": 2, "description": 4}', '{"id": 2,', "`description` must be a string, got 4"),
    ("jpipe", "[1, 2]},", "3},", '{"id": 1', "`activation_bytes` must be a list, got 3"),
    ("jpipe", "[1, 2]},", "[[1]]},", '{"id": 1', "`activation_bytes` must be a finite number"),
    ("jpipe", '{"id": 2}', "2", '"nodes"', "node 1 in the list must be an object, got 2"),
    ("jpipe", "  [1, 2]", "  5", '"edges"', "edge 0 in the list must be two ids, got 5"),
    ("jpipe", "  [1, 2]", "  [1]", "  [1]", r"edge 0 in the list must be two ids, got \[1\]"),
    ("jpipe", "  [1, 2]", "  [1, {}]", "  [1, {}]", "an edge must join ids of nodes, got {}"),
    ("jpipe", "  [2, 3]", "  [1,  2]", "  [1,  2]", "the edge 1 -- 2 occurs twice"),
    ("jpipe", "  [2, 3]", "  [2, 1]", "  [2, 1]", "must have no cycle, got 1 -> 2 -> 1"),
    ("jpipe", "jpipe graph 1", "jpipe graph 2", "{", "`format` must be 'jpipe graph 1', got 'jpipe graph 2'"),
    ("jpipe", '"edges"', '"edge"', "{", "a graph must be an object with a list `edges`"),
    ("jpipe", ' "nodes"', ' "num_devices": 1.5, "nodes"', None, "`num_devices` must be a whole number, at least 0, got "
                                                                "1.5"),
    ("jpipe", ' "nodes"', ' "memory_limit": -1, "nodes"', None, "`memory_limit` must be a finite number"),
    ("jpipe", '{"id": 2}', '{"id": 1%s}' % ("0" * 5000), None, "Exceeds the limit"),
    ("jpipe", OURS, "[" * 100_000, None, "nested too deeply"),
    ("jpipe", OURS, "[]", "[]", "a graph must be an object with a list `nodes`"),
    ("placement", '"cpuLatency": 9.5', '"latency": 9.5', '{\n   "id": "a"', "`cpuLatency` must be a number, got nothing"),
    ("placement", '"fpgaLatency": 2', '"fpgaLatency": "2"', '{\n   "id": "a"', "`fpgaLatency` must be a number, got '2'"),
    ("placement", '"size": 64', '"size": -64', '{\n   "id": "a"', "`memory_bytes` must be a finite number"),
    ("placement", '"maxFPGAs": 2', '"maxFPGAs": 2.5', "{", "`maxFPGAs` must be a whole number, got 2.5"),
    ("placement", '"cost": 0.5', '"price": 0.5', '{\n   "sourceId": "a"', "`cost` must be a number, got nothing"),
    ("placement", '"destId": "b"', '"destId": "z"', '{\n   "sourceId": "a"', "an edge must join ids of nodes, got 'z'"),
    ("placement", '"sourceId": "a"', '"sourceId": "b"', '{\n   "sourceId": "b",\n   "destId": "c"', "the edges out of 'b' cost 0.5 and 1: "),
    ("placement", PLACED, OURS, '"edges"', "edge 0 in the list must be an object, got"),
]  # fmt: skip


@pytest.mark.parametrize(("format", "good", "bad", "at", "message"), WRONG)
def test_wrong_files_are_told_by_their_line(tmp_path, format, good, bad, at, message):
    text = {"pipedream": PIPEDREAM, "jpipe": OURS, "placement": PLACED}[format]
    assert good in text
    text = text.replace(good, bad, 1)
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=message) as error:
        read_graph(path, format)
    where = f"{path}: " if at is None else f"{path}:{line_of(text, at)}: "
    assert str(error.value).startswith(where)


def test_files_that_are_no_graphs(tmp_path):
    path = written(tmp_path, "\n\n")
    with pytest.raises(ValueError, match=": there is no node. Is `format` the format"):
        read_graph(path, "pipedream")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="graph: not a text file"):
        read_graph(path, "pipedream")
    with pytest.raises(ValueError, match="`format` must be one of jpipe, pipedream, "):
        read_graph(path, "onnx")
    with pytest.raises(FileNotFoundError):
        read_graph(tmp_path / "absent")
    path.write_bytes(b"\xef\xbb\xbf" + OURS.encode().replace(b"\n", b"\r\n"))
    assert len(read_graph(path).nodes) == 3  # as some editors on Windows write it


@pytest.mark.first_case
@pytest.mark.parametrize("format", ["pipedream", "jpipe", "placement"])
def test_damaged_files_raise_nothing_but_value_errors(tmp_path, format):
    text = {"pipedream": PIPEDREAM, "jpipe": OURS, "placement": PLACED}[format]
    rng = np.random.default_rng(len(format))
    values = ["null", "[]", "{}", '""', "-1", "true", "1e999", "NaN", '"\\ud800"', "0"]
    refused = 0
    for _ in range(600):
        damaged = text
        for _ in range(int(rng.integers(1, 4))):
            at = int(rng.integers(len(damaged)))
            to = at + int(rng.integers(0, 12))
            pieces = [
                chr(rng.integers(32, 127)),
                "",
                damaged[:at][-9:],
                *values,
                "\n",
                "\0",
            ]
            damaged = damaged[:at] + str(rng.choice(pieces)) + damaged[to:]
        path = written(tmp_path, damaged)
        try:
            read_graph(path, format)
        except ValueError as error:
            assert str(error).startswith(str(path))
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    "key",
    [
        "id",
        "colorClass",
        "cost",
        "size",
        "fpgaLatency",
        "edges",
        "nodes",
        "isBackwardNode",
        "maxCPUs",
        "name",
    ],
)
@pytest.mark.parametrize("value", [None, [], {}, "x", -1, True, [[]], 1.5, float("nan")])
def test_values_of_the_wrong_kind(tmp_path, key, value):
    content = placement()

    def put(where):
        if isinstance(where, dict):
            for name in where:
                if name == key:
                    where[name] = value
                else:
                    put(where[name])
        elif isinstance(where, list):
            for item in where:
                put(item)

    put(content)
    path = written(tmp_path, json.dumps(content))
    try:
        read_graph(path, "placement")
    except ValueError as error:
        assert str(error).startswith(str(path))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id": None}, "`id` must be a string or an integer, got None"),
        ({"activation_bytes": 3.0}, "`activation_bytes` must be a tuple"),
        ({"activation_bytes": (1.0, -1.0)}, "`activation_bytes` must be a finite"),
        (
            {"forward": float("inf")},
            "`forward` must be a finite number, at least 0, got inf",
        ),
        ({"host": -1.0}, "`host` must be a finite number"),
    ],
)
def test_wrong_nodes(fields, message):
    with pytest.raises(ValueError, match=message):
        Node(**{"id": "a", **fields})


@pytest.mark.parametrize(
    ("nodes", "edges", "limits", "message"),
    [
        ("aa", (), {}, "two nodes have the id 'a'"),
        ("ab", ((0, 2),), {}, r"the edge 0 -- 2 must join positions in 0\.\.1"),
        ("ab", ((0, 0),), {}, "the edge a -- a leads to its own node"),
        ("ab", ((0, 1), (0, 1)), {}, "the edge a -- b occurs twice"),
        (
            "abc",
            ((0, 1), (1, 2), (2, 1)),
            {},
            "got b -> c -> b. Remove one|c -> b -> c",
        ),
        ("a", (), {"num_devices": -1}, "`num_devices` must be a whole number"),
        ("a", (), {"memory_limit": float("nan")}, "`memory_limit` must be a finite"),
    ],
)
def test_wrong_graphs(nodes, edges, limits, message):
    with pytest.raises(ValueError, match=message):
        Graph(tuple(map(Node, nodes)), edges, **limits)


@pytest.mark.parametrize(
    ("name", "num_nodes", "num_edges", "seconds"),
    [
        ("alexnet", 23, 23, 0.085321),
        ("vgg16", 41, 41, 0.672535),
        ("resnet18", 71, 79, 0.259742),
        ("resnet50", 177, 193, 0.443419),
        ("gnmt", 48, 58, 0.089416),
    ],
)
def test_pipedreams_profiles(name, num_nodes, num_edges, seconds):
    graph = read_graph(data("pipedream-profiles") / f"{name}.txt", "pipedream")
    assert (len(graph.nodes), len(graph.edges)) == (num_nodes, num_edges)
    kept = [n.seconds for n in graph.nodes if not n.description.startswith("Input")]
    assert f"{sum(kept):.6f}" == f"{seconds:.6f}"


@pytest.mark.parametrize(
    ("name", "num_nodes", "num_edges", "num_devices"),
    [
        ("layer/bert24_training", 64, 110, 6),
        ("layer/resnet50_training", 354, 386, 6),
        ("operator/bert_l-3_inference", 235, 250, 3),
    ],
)
def test_placement_inputs(name, num_nodes, num_edges, num_devices):
    graph = read_graph(data("placement") / f"{name}.json", "placement")
    assert (len(graph.nodes), len(graph.edges)) == (num_nodes, num_edges)
    assert (graph.num_devices, graph.num_hosts) == (num_devices, 1)
    assert graph.memory_limit == 17185374208


def data(name):
    path = pathlib.Path(os.environ.get("JPIPE_DATA", "unset")) / name
    if not path.is_dir():
        pytest.skip(f"set JPIPE_DATA to a directory with {name}/ in it")
    return path
