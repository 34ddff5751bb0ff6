"""The bytes that layers send along axes of a mesh, counted in their programs.

A layer sends what its own maps exchange (`jpipe.layers.mapped`): rows to experts and back, keys and values of a split
sequence. And where devices have different rows or positions and the same weights, the compiler adds up their gradients.

References:
  Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004 (bytes and messages of each kind).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jpipe.layers.avals import num_bytes
from jpipe.layers.backward import LayerProgram
from jpipe.layers.equations import jaxprs_in
from jpipe.layers.mapped import NAME as SHARD_MAP
from jpipe.layers.sharding import ValueSplit, read_by_maps
from jpipe.packing import axes
from jpipe.solvers import Machine


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis of a mesh that devices share the layers of a stage along.

    Attributes:
      name: such as "expert".
      size: its number of devices.
    """

    name: str
    size: int


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What a device sends in an operation of a layer, for one microbatch.

    Attributes:
      operation: "forward", "backward", "input_grad" or "weight_grad".
      kind: "all_to_all", whose devices send each other parts, "ring", whose devices send to a neighbour, or "sum", a
        ring that adds up.
      axes: the axes of the mesh along which devices exchange.
      num_bytes: bytes that a device sends to others.
      num_messages: the messages that follow each other.
    """

    operation: str
    kind: str
    axes: tuple[str, ...]
    num_bytes: int
    num_messages: int

    def seconds(self, machine: Machine, group: Sequence[Axis]) -> float:
        """Seconds on the slowest group of devices.

        Args:
          machine: all devices. A group of them are neighbours, numbered along the axes in order.
          group: the axes of a group.
        """
        return _slowest(self, machine, tuple(group))


@functools.lru_cache(maxsize=4096)
def _slowest(exchange: Exchange, machine: Machine, group: tuple[Axis, ...]) -> float:
    """See `Exchange.seconds`. A plan asks it for every layer, and layers are alike."""
    to_all = exchange.kind == "all_to_all"
    return max(
        machine.exchange_seconds(exchange.num_bytes, exchange.num_messages, devices, to_all=to_all)
        for devices in lines(machine.num_devices, group, exchange.axes)
    )


def lines(num_devices: int, group: Sequence[Axis], along: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """The sets of devices that exchange along some axes, in all groups of a machine.

    Example:
      >>> list(lines(8, [Axis("expert", 2), Axis("context", 2)], ["expert"]))
      [(0, 2), (1, 3), (4, 6), (5, 7)]
    """
    offsets: dict[tuple[int, ...], list[int]] = {}
    number = math.prod(axis.size for axis in group)
    for member in range(number):
        rest, place = member, {}
        for axis in reversed(group):
            rest, place[axis.name] = divmod(rest, axis.size)
        others = tuple(place[axis.name] for axis in group if axis.name not in along)
        offsets.setdefault(others, []).append(member)
    for first in range(0, num_devices - number + 1, number):
        for members in offsets.values():
            yield tuple(first + member for member in members)


class _Sent(NamedTuple):
    """Bytes and messages of a collective of n devices, by the bytes of its operands on a device."""

    kind: str
    num_bytes: Callable[[int, int], float]
    num_messages: Callable[[int], int]


_SUM = _Sent("sum", lambda size, n: 2 * size * (n - 1) / n, lambda n: 2 * (n - 1))
_SENT = {
    "psum": _SUM,
    "pmax": _SUM,
    "pmin": _SUM,
    "all_gather": _Sent("ring", lambda size, n: size * (n - 1), lambda n: n - 1),
    "reduce_scatter": _Sent("sum", lambda size, n: size * (n - 1) / n, lambda n: n - 1),
    "all_to_all": _Sent("all_to_all", lambda size, n: size * (n - 1) / n, lambda n: n - 1),
    "ragged_all_to_all": _Sent("all_to_all", lambda size, n: size * (n - 1) / n, lambda n: n - 1),
}
"""The collectives of a mapped layer. A ragged exchange has as many rows as balanced experts get. A permute is
all-gathers here (`jpipe.layers.collectives`)."""


class _Count(dict[tuple[str, tuple[str, ...]], tuple[float, int]]):
    """(kind, axes) -> bytes and messages."""

    def add(self, kind: str, names: Sequence[str], size: float, messages: int) -> None:
        old = self.get((kind, tuple(names)), (0.0, 0))
        self[kind, tuple(names)] = old[0] + size, old[1] + messages

    def total(self) -> float:
        return sum(size for size, _ in self.values())

    def take(self, other: "_Count", times: int = 1) -> None:
        for (kind, names), (size, messages) in other.items():
            self.add(kind, names, times * size, times * messages)


def _count(jaxpr: Any, sizes: Mapping[str, int]) -> _Count:
    """What the equations of a jaxpr send.

    Raises:
      ValueError: if a loop of unknown length sends.
    """
    count = _Count()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inner = eqn.params["mesh"].shape if name == SHARD_MAP else sizes
        parts = [_count(part, inner) for part in jaxprs_in(eqn)]
        if name == "cond":
            count.take(max(parts, key=_Count.total))
        elif name == "while" and any(parts):
            raise ValueError(
                "a layer sends inside of a loop whose number of turns is not known before it runs, so its bytes cannot "
                "be counted. Use `jax.lax.scan`, or `jax.lax.fori_loop` with fixed bounds."
            )
        else:
            for part in parts:
                count.take(part, eqn.params["length"] if name == "scan" else 1)
        if (sent := _SENT.get(name.removesuffix("_invariant"))) is not None:
            count.add(*_sent_by(eqn, sent, sizes))
    return count


def _sent_by(eqn: Any, sent: _Sent, sizes: Mapping[str, int]) -> tuple[str, tuple[str, ...], float, int]:
    names = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    names = tuple(name for name in (names if isinstance(names, tuple) else (names,)) if isinstance(name, str))
    groups = eqn.params.get("axis_index_groups")
    n = math.prod(sizes[name] for name in names) if groups is None else len(groups[0])
    operands = eqn.invars[:1] if eqn.primitive.name.startswith("ragged") else eqn.invars
    size = num_bytes([v.aval for v in operands])
    return sent.kind, names, sent.num_bytes(size, n), sent.num_messages(n) if n > 1 else 0


def exchanges_of(program: LayerProgram, specs: Sequence[tuple], values: ValueSplit, mesh: Mesh) -> tuple[Exchange, ...]:
    """What a device sends in each operation of a layer, for one microbatch.

    Sums of single numbers, such as of losses that a router reports, are not counted.

    Args:
      program: the programs of the layer, traced on the mesh.
      specs: the splits of its parameters.
      values: the splits of what layers pass on.
      mesh: the axes that are left to the compiler.

    Raises:
      ValueError: if a loop of unknown length sends.
    """
    found: list[Exchange] = []
    for operation, (function, arguments) in program.calls.items():
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            closed = jax.make_jaxpr(function)(*arguments)
        count = _count(closed.jaxpr, mesh.shape)
        if operation in ("backward", "weight_grad"):
            count.take(_sums_of_gradients(program, specs, values, mesh))
        found += [
            Exchange(operation, kind, names, math.ceil(size), messages)
            for (kind, names), (size, messages) in count.items()
            if messages
        ]
    return tuple(found)


def _sums_of_gradients(program: LayerProgram, specs: Sequence[tuple], values: ValueSplit, mesh: Mesh) -> _Count:
    """What the compiler sends to add up gradients of weights over devices with different rows or positions.

    Weights that the layer's own maps read have gradients that the maps have added up.
    """
    count = _Count()
    split = {name for y in (*program.outputs, *program.inputs) for name in axes(values.spec(y.shape))}
    by_maps = read_by_maps(program)
    for j in program.trained:
        split_over = axes(specs[j])
        size = num_bytes([program.parameters[j]]) // math.prod(mesh.shape[name] for name in split_over)
        for name, n in mesh.shape.items():  # one sum for each axis
            if name in split and name not in split_over and not by_maps[j]:
                count.add(_SUM.kind, (name,), _SUM.num_bytes(size, n), _SUM.num_messages(n))
    return count
