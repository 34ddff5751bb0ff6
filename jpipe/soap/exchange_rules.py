"""Chooses the equations for which devices fetch operands from each other, and the windows to fetch.

XLA computes the other equations from sharding constraints; see `jpipe.soap.exchange`.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jpipe.soap.exchange import PRIMITIVES, Exchange, Fetch, window_of
from jpipe.soap.flatten import FlatEquation, Value
from jpipe.soap.graph import Operator
from jpipe.soap.moves import Spec, boxes_of, is_direct
from jpipe.soap.regions import Access
from jpipe.soap.specs import axes_of, read_spec, tiles, view_spec, written_spec


class Known(NamedTuple):
    """The splits of arrays before an equation.

    Attributes:
      sizes: axis of the mesh -> number of devices.
      written: the splits of results of earlier equations.
      inputs: numbers of the tensors that are inputs of the function. All devices have them.
      in_stages: whether devices cannot fetch parts from each other.
    """

    sizes: Mapping[str, int]
    written: Mapping[Value, Spec]
    inputs: Collection[int] = ()
    in_stages: bool = False

    def split_of(self, member: Any, position: int) -> Spec | None:
        """The split of an operand before the equation; None if it is not known."""
        value, view = member.sources[position]
        shape = member.equation.inputs[position].shape
        if value in self.written:
            spec = self.written[value]
            return view_spec(spec, view, value.shape, shape, self.sizes)
        tensor = member.tensors[position]
        if tensor is None or tensor in self.inputs:
            return ((),) * len(shape)
        return None


def exchange_of(
    operator: Operator,
    member: Any,
    axes: Sequence[tuple[str, ...]],
    known: Known,
) -> Exchange | None:
    """The exchange of an equation whose shards read parts of others. None if XLA sends as little, or no exchange can do
    it.
    """
    equation = member.equation
    if known.in_stages or equation.primitive not in PRIMITIVES:
        return None
    if equation.params.get("batch_group_count", 1) > 1:
        return None
    reads = list(zip(equation.inputs, member.reads))
    lies = [
        known.split_of(member, i) or read_spec(value.shape, access, axes, known.sizes) or ((),) * len(value.shape)
        for i, (value, access) in enumerate(reads)
    ]
    used = {name for spec in (axes, *lies) for names in spec for name in names}
    sizes = {name: size for name, size in known.sizes.items() if name in used}
    loops = boxes_of([loop.size for loop in operator.loops], axes, sizes)
    specs = [tiles(value.shape, access, loops, axes, sizes) for value, access in reads]
    detours = [
        spec is not None and _is_gather(source, spec) and not is_direct(value.shape, source, spec, sizes)
        for value, source, spec in zip(equation.inputs, lies, specs)
    ]
    is_exact = None not in specs and not any(detours)
    if not any(axes) or (is_exact and _is_left_to_compiler(equation.primitive, axes)):
        return None
    # A device joins windows of all operands, or none.
    must_fetch = None in specs and equation.primitive in ("concatenate", "stack")
    operands: list[Fetch | Spec] = []
    for (_, access), spec, source, detour in zip(reads, specs, lies, detours):
        part: Fetch | Spec | None = spec
        if spec is None or detour or must_fetch:
            part = _window(equation, access, source, loops)
        if part is None:
            return None
        operands.append(part)
    outputs = [written_spec(operator, value, dims, axes, sizes) for value, dims in zip(equation.outputs, member.writes)]
    return Exchange(
        tuple(sizes),
        tuple(operands),
        tuple(spec for spec, *_ in outputs),
        tuple((terms, dim) for _, terms, dim in outputs),
    )


def _window(equation: FlatEquation, access: Access, source: Spec, loops: np.ndarray) -> Fetch | None:
    """The windows of an operand that devices fetch."""
    if equation.primitive == "stack":
        axis = equation.params["axis"]
        return window_of((*source[:axis], (), *source[axis:]), access[:1], loops)
    return window_of(source, access, loops)


def _is_gather(before: Spec, after: Spec) -> bool:
    """Returns whether devices have larger parts of an array after a move."""
    return not set(axes_of(before)) <= set(axes_of(after))


def _is_left_to_compiler(primitive: str, axes: Sequence[tuple[str, ...]]) -> bool:
    """Returns whether XLA sends no more than it has to. Shards of the operator read equal parts.

    It adds up the gradient of an embedding over one axis after the other, and gathers the operand of a slice that
    several axes split. Of windows with padding, convolutions with groups and a top k it gathers what the gradient
    needs.
    """
    if primitive in ("gather", "dynamic_slice"):
        return sum(map(len, axes)) < 2
    return primitive in ("concatenate", "dot_general", "pad", "stack")
