"""The input and output of solvers: a graph of layers with their costs, and a solution."""

import dataclasses
import functools
import heapq
import itertools
import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from jpipe._util.foreign import shown

Id = str | int


@dataclasses.dataclass(frozen=True)
class Node:
    """A layer or an operator.

    Attributes:
      id: the node's name in the graph.
      description: a text for people.
      forward: seconds on a device, or the graph's own unit of time.
      backward: seconds of the backward. A node of the backward pass has all its time here.
      activation_bytes: one size per output.
      parameter_bytes: bytes of the weights.
      memory_bytes: bytes that the node takes on a device; None: parameters and activations.
      transfer: time to move the output between a device and the host's memory, in the graph's unit;
        None: the activations divided by a bandwidth.
      host: time on the host's processor; None: not measured, so the node cannot be placed there.
      colocation: nodes with equal values must share a device; None: no such constraint.
      is_backward: whether the node belongs to the backward pass.
      on_device: whether a device can run the node.

    Raises:
      ValueError: if a time or a size is negative or not finite, or a field has a wrong type.

    Example:
      >>> layer = Node("dense", forward=0.25, backward=0.5, activation_bytes=(8.0, 4.0))
      >>> layer.seconds, layer.output_bytes
      (0.75, 12.0)
    """

    id: Id
    description: str = ""
    forward: float = 0.0
    backward: float = 0.0
    activation_bytes: tuple[float, ...] = (0.0,)
    parameter_bytes: float = 0.0
    memory_bytes: float | None = None
    transfer: float | None = None
    host: float | None = None
    colocation: Id | None = None
    is_backward: bool = False
    on_device: bool = True

    def __post_init__(self):
        if not isinstance(self.id, Id):
            raise ValueError(f"`id` must be a string or an integer, got {shown(self.id)}.")
        if not isinstance(self.colocation, Id | None):
            raise ValueError(f"`colocation` must be a string or an integer, got {shown(self.colocation)}.")
        if not isinstance(self.description, str):
            raise ValueError(f"`description` must be a string, got {shown(self.description)}.")
        for name in ("is_backward", "on_device"):
            if getattr(self, name) not in (False, True):
                raise ValueError(f"`{name}` must be true or false, got {shown(getattr(self, name))}.")
        for name in ("forward", "backward", "parameter_bytes"):
            _check_size(name, getattr(self, name))
        for name in ("memory_bytes", "transfer", "host"):
            if getattr(self, name) is not None:
                _check_size(name, getattr(self, name))
        if not isinstance(self.activation_bytes, tuple):
            raise ValueError(
                f"`activation_bytes` must be a tuple with one size per output, got {shown(self.activation_bytes)}."
            )
        for size in self.activation_bytes:
            _check_size("activation_bytes", size)

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward + self.backward

    @property
    def output_bytes(self) -> float:
        """Bytes of all outputs together."""
        return sum(self.activation_bytes)

    @property
    def device_bytes(self) -> float:
        """Bytes that the node takes on a device."""
        if self.memory_bytes is not None:
            return self.memory_bytes
        return self.parameter_bytes + self.output_bytes


def _check_size(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"`{name}` must be a finite number, at least 0, got {shown(value)}: it is a time or a size.")


class FaultyItem(ValueError):
    """A node or an edge that does not fit the graph. `item` is its position."""

    def __init__(self, kind: str, item: int, message: str):
        super().__init__(message)
        self.kind, self.item = kind, item


@dataclasses.dataclass(frozen=True)
class Graph:
    """A directed graph without cycles.

    Attributes:
      nodes: the nodes, in any order.
      edges: pairs (source, destination) of positions in `nodes`, without repetition.
      num_devices: the number of devices that the graph was made for; None: unknown.
      num_hosts: the number of host processors beside them.
      memory_limit: bytes per device; None: unknown.

    Raises:
      ValueError: if two nodes have one id, an edge joins a node to itself or to no node or occurs
        twice, there is a cycle, or a count or the memory limit is impossible.

    Example:
      >>> fork = Graph((Node("a"), Node("b"), Node("c")), ((0, 2), (0, 1)))
      >>> fork.successors[0], fork.topological_order
      ((2, 1), (0, 1, 2))
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]
    num_devices: int | None = None
    num_hosts: int = 0
    memory_limit: float | None = None

    def __post_init__(self):
        positions: dict[Id, int] = {}
        for v, node in enumerate(self.nodes):
            if node.id in positions:
                raise FaultyItem("node", v, f"two nodes have the id {shown(node.id)}. Rename one.")
            positions[node.id] = v
        seen = set()
        for e, (u, v) in enumerate(self.edges):
            if not (0 <= u < len(self.nodes) and 0 <= v < len(self.nodes)):
                raise FaultyItem(
                    "edge",
                    e,
                    f"the edge {u} -- {v} must join positions in 0..{len(self.nodes) - 1}.",
                )
            if u == v or (u, v) in seen:
                name = f"{self.nodes[u].id} -- {self.nodes[v].id}"
                why = "leads to its own node" if u == v else "occurs twice"
                raise FaultyItem("edge", e, f"the edge {name} {why}. Remove it.")
            seen.add((u, v))
        assert len(self.topological_order) == len(self.nodes)
        for name in ("num_devices", "num_hosts"):
            count = getattr(self, name)
            if count is not None and (not isinstance(count, int) or count < 0):
                raise ValueError(f"`{name}` must be a whole number, at least 0, got {shown(count)}.")
        if self.memory_limit is not None:
            _check_size("memory_limit", self.memory_limit)

    @functools.cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the nodes with an edge to it."""
        return neighbours(len(self.nodes), ((v, u) for u, v in self.edges))

    @functools.cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the nodes that its edges lead to."""
        return neighbours(len(self.nodes), self.edges)

    @functools.cached_property
    def topological_order(self) -> tuple[int, ...]:
        """Every node after its predecessors.

        Of the nodes that may come next, the first in `nodes` does.
        """
        waits = [len(before) for before in self.predecessors]
        free = [v for v, count in enumerate(waits) if not count]
        order = []
        while free:
            u = heapq.heappop(free)
            order.append(u)
            for v in self.successors[u]:
                waits[v] -= 1
                if not waits[v]:
                    heapq.heappush(free, v)
        if len(order) < len(self.nodes):
            cycle = self._cycle(waits)
            ids = " -> ".join(str(self.nodes[v].id) for v in cycle)
            raise FaultyItem(
                "edge",
                max(self.edges.index(edge) for edge in itertools.pairwise(cycle)),
                f"a graph must have no cycle, got {ids}. Remove one of its edges.",
            )
        return tuple(order)

    def _cycle(self, waits: Sequence[int]) -> list[int]:
        """The nodes of a cycle. Every node that waits has a predecessor that waits."""
        v = next(v for v, count in enumerate(waits) if count)
        path: dict[int, None] = {}
        while v not in path:
            path[v] = None
            v = next(u for u in self.predecessors[v] if waits[u])
        around = list(path)
        return [v, *reversed(around[around.index(v) :])]

    def to_json(self) -> dict[str, Any]:
        """The graph in our own form, without the fields that have their default values."""
        content: dict[str, Any] = {
            "format": FORMAT,
            "nodes": [_without_defaults(node) for node in self.nodes],
            "edges": [[self.nodes[u].id, self.nodes[v].id] for u, v in self.edges],
        }
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in LIMITS and value != field.default:
                content[field.name] = value
        return content

    def save(self, path: str | os.PathLike) -> None:
        """Writes the graph in our own form, one node or edge per line. `read_graph` reads it."""
        content = self.to_json()
        with open(path, "w") as file:
            file.write("{")
            for n, (key, value) in enumerate(content.items()):
                file.write(f"{',' if n else ''}\n {json.dumps(key)}: ")
                if isinstance(value, list):
                    lines = ",\n".join(f"  {json.dumps(item)}" for item in value)
                    file.write(f"[\n{lines}\n ]" if value else "[]")
                else:
                    file.write(json.dumps(value))
            file.write("\n}\n")


FORMAT = "jpipe graph 1"
LIMITS = ("num_devices", "num_hosts", "memory_limit")


def neighbours(num_nodes: int, edges: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """For each node, the nodes that its edges lead to."""
    targets: list[list[int]] = [[] for _ in range(num_nodes)]
    for u, v in edges:
        targets[u].append(v)
    return tuple(map(tuple, targets))


def _without_defaults(node: Node) -> dict[str, Any]:
    return {
        field.name: getattr(node, field.name)
        for field in dataclasses.fields(node)
        if field.name == "id" or getattr(node, field.name) != field.default
    }


@dataclasses.dataclass(frozen=True)
class Stage:
    """A set of nodes with its own devices.

    Attributes:
      nodes: the ids of the nodes, in topological order.
      replicas: the number of devices. Each works on its share of the minibatches.
      on_host: whether a processor of the host runs the stage.
    """

    nodes: tuple[Id, ...]
    replicas: int = 1
    on_host: bool = False


@dataclasses.dataclass(frozen=True)
class Solution:
    """The result of a solver.

    Attributes:
      solver: the solver's name.
      objective: the time of the slowest stage per minibatch, in seconds or the graph's own unit.
      stages: the stages, first to last. Every node of the graph is in one of them.
      bound: a lower bound of the objective of all solutions of this kind.
      optimal: whether the solution is proved to be the best of its kind.
      data_parallel: the objective of pure data parallelism; None if the solver's cost model does
        not cover it.
    """

    solver: str
    objective: float
    stages: tuple[Stage, ...]
    bound: float
    optimal: bool
    data_parallel: float | None = None
