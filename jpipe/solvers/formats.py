"""Reads graphs from files: our own form, and those of two other planners."""

import bisect
import dataclasses
import json
import os
import re
from typing import Any

from jpipe._util.foreign import read_text, shown
from jpipe.solvers.graph import FORMAT, LIMITS, FaultyItem, Graph, Id, Node


def read_graph(path: str | os.PathLike, format: str = "jpipe") -> Graph:
    """Reads a graph from a file.

    Args:
      path: the file.
      format: "jpipe" is the form that `Graph.save` writes. "pipedream" is the text of PipeDream's
        profiler; its milliseconds become seconds, and its stages are dropped. "placement" is the
        JSON of the optimal device-placement algorithms; its unit of time is kept.

    Returns:
      The graph. Nodes and edges have the file's order.

    Raises:
      ValueError: if the content is wrong or has another format; names file and line.
      OSError: if the file cannot be read.

    References:
      https://github.com/msr-fiddle/pipedream, graph/graph.py;
      https://github.com/msr-fiddle/dnn-partitioning, README.
    """
    if format not in READERS:
        raise ValueError(f"`format` must be one of {', '.join(READERS)}, got {shown(format)}.")
    return READERS[format](str(path), read_text(path, "utf-8-sig"))


def _graph(path, nodes, edges, **limits) -> Graph:
    """Makes a graph, and reports errors with the line of the file.

    Args:
      path: the file's name, for messages.
      nodes: pairs (line, node).
      edges: triples (line, id of the source, id of the destination).
      **limits: the graph's other fields.
    """
    if not nodes:
        raise ValueError(f"{path}: there is no node. Is `format` the format of this file?")
    try:
        graph = Graph(tuple(node for _, node in nodes), (), **limits)
        position = {node.id: v for v, node in enumerate(graph.nodes)}
        for e, (_, *ends) in enumerate(edges):
            for end in ends:
                if not isinstance(end, Id) or end not in position:
                    raise FaultyItem(
                        "edge",
                        e,
                        f"an edge must join ids of nodes, got {shown(end)}. Correct it, or add the node.",
                    )
        joined = tuple((position[u], position[v]) for _, u, v in edges)
        return dataclasses.replace(graph, edges=joined)
    except FaultyItem as error:
        line = (nodes if error.kind == "node" else edges)[error.item][0]
        raise ValueError(f"{path}:{line}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _node(path: str, line: int, **fields) -> Node:
    try:
        return Node(**fields)
    except ValueError as error:
        raise ValueError(f"{path}:{line}: {error}") from None


_NUMBER = r"[-+]?(?:[0-9.]+(?:[eE][-+]?[0-9]+)?|nan|inf)"
_PIPEDREAM = re.compile(
    rf"(?P<id>\S+) -- (?P<description>.*) -- forward_compute_time=(?P<forward>{_NUMBER}), "
    rf"backward_compute_time=(?P<backward>{_NUMBER}), activation_size=(?P<activation>{_NUMBER}|\[[^\]]*\]), "
    rf"parameter_size=(?P<parameter>{_NUMBER})(?: -- stage_id=(?P<stage>\d+))?$"
)


def _read_pipedream(path: str, text: str) -> Graph:
    nodes, edges = [], []
    for line, content in enumerate(text.split("\n"), 1):
        if not content.strip():
            continue
        if content[0].isspace():
            ends = content.strip().split(" -- ")
            if len(ends) != 2:
                raise ValueError(
                    f"{path}:{line}: an edge must be `source -- destination`, got {shown(content.strip())}."
                )
            edges.append((line, *ends))
            continue
        match = _PIPEDREAM.match(content.rstrip())
        if match is None:
            raise ValueError(
                f"{path}:{line}: a node must be `id -- description -- forward_compute_time=MS, "
                "backward_compute_time=MS, activation_size=BYTES, parameter_size=BYTES`, got "
                f"{content[:80]!r}."
            )
        try:
            forward, backward, parameter = (float(match[key]) for key in ("forward", "backward", "parameter"))
            activations = match["activation"].strip("[]").split(";")
            sizes = tuple(float(size) for size in activations if size.strip())
        except ValueError as error:
            raise ValueError(f"{path}:{line}: {error}.") from None
        node = _node(
            path,
            line,
            id=match["id"],
            description=match["description"],
            forward=forward / 1000,
            backward=backward / 1000,
            activation_bytes=sizes or (0.0,),
            parameter_bytes=parameter,
        )
        nodes.append((line, node))
    return _graph(path, nodes, edges)


class _Record(dict):
    """A JSON object with its line in the file."""

    line = 0


class _List(list):
    """A JSON array with its line in the file."""

    line = 0


class _Decoder(json.JSONDecoder):
    """Decodes objects as `_Record` and arrays as `_List`."""

    def __init__(self, text: str):
        super().__init__()
        ends = [match.start() for match in re.finditer("\n", text)]

        def with_lines(parse, kind):
            def parse_with_line(text_and_start, *args):
                value, after = parse(text_and_start, *args)
                value = kind(value)
                value.line = bisect.bisect(ends, text_and_start[1] - 1) + 1
                return value, after

            return parse_with_line

        self.parse_object = with_lines(json.decoder.JSONObject, _Record)  # type: ignore[attr-defined]
        self.parse_array = with_lines(json.decoder.JSONArray, _List)  # type: ignore[attr-defined]
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]


def _read_json(path: str, text: str) -> tuple[_Record, list[_Record], _List]:
    """The whole content, its nodes and its edges."""
    try:
        content = _Decoder(text).decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON: {error.msg}.") from None
    except ValueError as error:  # a number of thousands of digits
        raise ValueError(f"{path}: {error}.") from None
    except RecursionError:
        raise ValueError(f"{path}: not a graph: nested too deeply.") from None
    for key in ("nodes", "edges"):
        if not isinstance(content, _Record) or not isinstance(content.get(key), _List):
            raise ValueError(
                f"{path}:1: a graph must be an object with a list `{key}`. Is `format` the format of this file?"
            )
    nodes, edges = content["nodes"], content["edges"]
    for n, node in enumerate(nodes):
        if not isinstance(node, _Record):
            raise ValueError(f"{path}:{nodes.line}: node {n} in the list must be an object, got {shown(node)}.")
    return content, nodes, edges


def _get(path: str, record: _Record, key: str, kind: Any = int | float):
    """The value of a required field."""
    if not isinstance(record.get(key), kind):
        got = repr(record[key]) if key in record else "nothing"
        raise ValueError(f"{path}:{record.line}: `{key}` must be {_NAMES[kind]}, got {got}.")
    return record[key]


_NAMES = {
    int | float: "a number",
    int: "a whole number",
    Id: "a string or an integer",
    _List: "a list",
}


def _read_placement(path: str, text: str) -> Graph:
    content, records, edge_records = _read_json(path, text)
    moving: dict[Id, float] = {}  # node -> time to move its output
    size: dict[Id, float] = {}
    edges: dict[tuple[Id, Id], int] = {}
    for n, edge in enumerate(edge_records):
        if not isinstance(edge, _Record):
            raise ValueError(f"{path}:{edge_records.line}: edge {n} in the list must be an object, got {shown(edge)}.")
        source, destination = (_get(path, edge, key, Id) for key in _ENDS)
        cost = _get(path, edge, "cost")
        if moving.setdefault(source, cost) != cost:
            raise ValueError(
                f"{path}:{edge.line}: the edges out of {source!r} cost {moving[source]:g} and {cost:g}: they move one "
                "output, so they must cost the same. Split the node."
            )
        size[source] = edge.get("size", 0.0)
        edges.setdefault((source, destination), edge.line)  # one output, moved once
    nodes = []
    for record in records:
        name, is_backward = (
            _get(path, record, "id", Id),
            bool(record.get("isBackwardNode")),
        )
        seconds = _get(path, record, "fpgaLatency")
        node = _node(
            path,
            record.line,
            id=name,
            description=str(record.get("name", "")),
            **{"backward" if is_backward else "forward": seconds},
            activation_bytes=(size.get(name, 0.0),),
            memory_bytes=_get(path, record, "size"),
            transfer=moving.get(name, 0.0),
            host=_get(path, record, "cpuLatency"),
            colocation=record.get("colorClass"),
            is_backward=is_backward,
            on_device=bool(record.get("supportedOnFpga", True)),
        )
        nodes.append((record.line, node))
    return _graph(
        path,
        nodes,
        [(line, *ends) for ends, line in edges.items()],
        num_devices=_get(path, content, "maxFPGAs", int),
        num_hosts=_get(path, content, "maxCPUs", int),
        memory_limit=_get(path, content, "maxSizePerFPGA"),
    )


_ENDS = ("sourceId", "destId")


def _read_jpipe(path: str, text: str) -> Graph:
    content, records, edges = _read_json(path, text)
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{path}:1: `format` must be {FORMAT!r}, got {shown(content.get('format'))}. Is `format` the format of "
            "this file?"
        )
    for n, edge in enumerate(edges):
        if not isinstance(edge, _List) or len(edge) != 2:
            raise ValueError(
                f"{path}:{getattr(edge, 'line', edges.line)}: edge {n} in the list must be two ids, got {shown(edge)}."
            )
    nodes = []
    for record in records:
        _get(path, record, "id", Id)
        for key in record:
            if key not in _FIELDS:
                raise ValueError(
                    f"{path}:{record.line}: a node has no field {shown(key)}. There are {', '.join(_FIELDS)}."
                )
        fields: dict[str, Any] = dict(record)
        if "activation_bytes" in fields:
            sizes = _get(path, record, "activation_bytes", _List)
            fields["activation_bytes"] = tuple(sizes)
        nodes.append((record.line, _node(path, record.line, **fields)))
    return _graph(
        path,
        nodes,
        [(edge.line, *edge) for edge in edges],
        **{key: content[key] for key in LIMITS if key in content},
    )


_FIELDS = tuple(field.name for field in dataclasses.fields(Node))


READERS = {
    "jpipe": _read_jpipe,
    "pipedream": _read_pipedream,
    "placement": _read_placement,
}
