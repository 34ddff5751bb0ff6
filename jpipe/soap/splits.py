"""A strategy as splits of equations over the axes of a mesh."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jpipe.soap.exchange import Exchange, Fetch
from jpipe.soap.exchange_rules import Known, exchange_of
from jpipe.soap.flatten import Value
from jpipe.soap.graph import Operator, OperatorGraph
from jpipe.soap.moves import Spec, Step, boxes_of, steps_between
from jpipe.soap.refusals import refusal
from jpipe.soap.regions import (
    Access,
    DimMap,
    followed,
    identity,
    is_plain,
    read_all,
)
from jpipe.soap.specs import axes_of, loop_axes, read_spec, reads_own, written_spec
from jpipe.soap.strategy import Config, check_strategy


class Move(NamedTuple):
    """The way of an operand from its writer's split to its reader's.

    Attributes:
      source: the split by the writer.
      steps: see `steps_between`. With `shapes`, they are of the array that its writer wrote, before the reshapes and
        transposes of which the operand is the result. So it is where a reshape merges or cuts dims that are split.
      window: the window that devices fetch of the writer's array, where no split has it, as of a slice along
        a dim that is split.
      shapes: the shapes of the array of its writer, and of the parts that devices make of the window, view by view.
    """

    source: Spec = ()
    steps: tuple[Step, ...] = ()
    window: Fetch | None = None
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class EquationSplit:
    """The splits of an equation's operands and results.

    Attributes:
      primitive: its name.
      shapes: the shapes of its outputs.
      moves: the move of each operand.
      inputs: the split of each operand; None leaves the operand to the compiler, or to the exchange.
      outputs: the split of each result.
      exchange: the computation of the result where shards read parts of others; None: the compiler decides.
    """

    primitive: str
    shapes: tuple[tuple[int, ...], ...]
    moves: tuple[Move, ...]
    inputs: tuple[Spec | None, ...]
    outputs: tuple[Spec, ...]
    exchange: Exchange | None = None


Plan = Mapping[Any, Any]
"""`EquationSplit`s by the numbers of their equations; below a call or a loop stands the plan of its body. See
`jpipe.soap.flatten.Place`.
"""


@dataclasses.dataclass(frozen=True)
class EquationSplits:
    """A strategy as splits of equations and arguments.

    Attributes:
      arguments: the split of each argument of the function, flat, by its first reader.
      plan: the splits of the equations.
    """

    arguments: Sequence[Spec]
    plan: Plan


def splits(
    graph: OperatorGraph,
    strategy: Sequence[Config],
    sizes: Mapping[str, int],
    *,
    in_stages: bool = False,
) -> EquationSplits:
    """A strategy as splits over the axes of a mesh.

    Args:
      graph: the result of `jpipe.soap.trace`.
      strategy: a configuration per operator.
      sizes: axis of the mesh -> number of devices.
      in_stages: whether the mesh is that of the stages of a pipeline, which cannot fetch parts from each other: see
        `reads_tiles`.

    Raises:
      ValueError: if a mesh cannot run a configuration: see `refusal`.
    """
    check_strategy(graph, strategy, math.prod(sizes.values()))
    axes_of_loops = []
    for operator, config in zip(graph.operators, strategy):
        if message := refusal(operator, config, sizes, in_stages=in_stages):
            raise ValueError(message)
        axes = loop_axes(config, sizes)
        assert axes is not None, "`refusal` asks for them"
        axes_of_loops.append(axes)
    plan: dict = {}
    written: dict[Value, Spec] = {}
    inputs = {
        number for number, tensor in enumerate(graph.tensors) if tensor.producer is None and tensor.weight is None
    }
    known = Known(sizes, written, inputs, in_stages)
    first: dict[int, Spec | None] = {}
    for operator, axes in zip(graph.operators, axes_of_loops):
        fetched: set[int | None] = set()
        for member in operator.equations:
            *above, last = member.equation.place
            inner = plan
            for step in above:
                inner = inner.setdefault(step, {})
            inner[last] = _split(operator, member, axes, known)
            written.update(zip(member.equation.outputs, inner[last].outputs))
            if exchange := inner[last].exchange:
                parts = zip(exchange.operands, member.tensors)
                fetched |= {t for part, t in parts if isinstance(part, Fetch)}
        for operand in operator.inputs:
            tensor = graph.tensors[operand.tensor]
            if tensor.producer is not None or operand.tensor in first:
                continue
            # Every device has an input of the function of which shards read parts of each other's.
            is_whole = operand.tensor in fetched and operand.tensor in inputs
            spec = read_spec(tensor.shape, operand.access, axes, sizes)
            first[operand.tensor] = None if is_whole else spec
    arguments = [
        first.get(number) or ((),) * len(tensor.shape)
        for number, tensor in enumerate(graph.tensors)
        if tensor.producer is None
    ]
    return EquationSplits(arguments, plan)


def _split(
    operator: Operator,
    member: Any,
    axes: Sequence[tuple[str, ...]],
    known: Known,
) -> EquationSplit:
    """The splits of an equation, by the axes of its loops."""
    equation, sizes = member.equation, known.sizes
    exchange = exchange_of(operator, member, axes, known)
    inputs: list[Spec | None]
    if exchange is None:
        inputs = [read_spec(value.shape, access, axes, sizes) for value, access in zip(equation.inputs, member.reads)]
    else:
        inputs = [None if isinstance(e, Fetch) else e for e in exchange.operands]
    outputs = tuple(
        written_spec(operator, value, dims, axes, sizes)[0] for value, dims in zip(equation.outputs, member.writes)
    )
    moves = tuple(_move(member, i, after, known) for i, after in enumerate(inputs))
    shapes = tuple(value.shape for value in equation.outputs)
    return EquationSplit(
        equation.primitive,
        shapes,
        moves,
        inputs=tuple(inputs),
        outputs=outputs,
        exchange=exchange,
    )


def _move(member: Any, position: int, after: Spec | None, known: Known) -> Move:
    """The way of an operand to the split `after`; an empty one where XLA finds it."""
    before = known.split_of(member, position)
    if after is None or known.in_stages:
        return Move()
    shape, sizes = member.equation.inputs[position].shape, known.sizes
    value, view = member.sources[position]
    if before is not None:
        # The compiler would split an array as a slice of it is read, and move all of it.
        is_all = is_plain(view) and math.prod(shape) >= math.prod(value.shape)
        steps = steps_between(shape, before, after, sizes, by_compiler=is_all)
        # Without steps the same for all turns of a loop, whatever they begin with.
        return Move(before, steps) if steps else Move()
    if value not in known.written:
        return Move()
    before = known.written[value]
    below = [() if dim is None else after[dim] for dim in followed(view)]
    # All of the array is moved, so the view must have all of it.
    is_whole = math.prod(shape) == math.prod(value.shape)
    known_array = dict(below=below, source=value.shape, sizes=sizes)
    if not is_whole or not reads_own(after, view, shape, **known_array):
        return _window_of_view(view, shape, before, after, sizes)
    steps = steps_between(value.shape, before, tuple(below), sizes, by_compiler=False)
    steps = steps or (Step(tuple(below), False),)
    return Move(before, steps, shapes=(value.shape,))


def _window_of_view(
    view: Access,
    shape: tuple[int, ...],
    before: Spec,
    after: Spec,
    sizes: Mapping[str, int],
) -> Move:
    """The move for a part of a view: devices fetch the box of the array that the part reads. No move if the box is more
    than the part, or they have copies.

    Args:
      view: the box of the array that a box of the view needs.
      shape: the shape of the view.
      before: the split of the array.
      after: the split in which the view is read.
      sizes: axis -> number of devices.
    """
    used = axes_of(before)
    if used != axes_of(after):
        return Move()
    part = boxes_of(shape, after, {k: n for k, n in sizes.items() if k in used})
    shapes = [tuple((part[0, :, 1] - part[0, :, 0]).tolist())]
    for step in view:
        whole, shape = shape, tuple(dim_map.size for dim_map in step)
        if step == identity(whole):
            continue  # of no equation
        part = read_all((step,), part)
        lengths = part[:, :, 1] - part[:, :, 0]
        below = tuple(lengths[0].tolist())
        if np.any(lengths != lengths[0]) or not _is_all_read(step, below, shapes[-1]):
            return Move()
        shapes.append(below)
    starts = tuple(map(tuple, part[:, :, 0].tolist()))
    window = Fetch(before, starts, shapes.pop())
    return Move(before, window=window, shapes=(shape, *reversed(shapes)))


def _is_all_read(step: Sequence[DimMap], below: Sequence[int], above: Sequence[int]) -> bool:
    """Returns whether a box of a view has all of a box of an array below it, but for the holes of strides."""
    if all(dim_map.dim is not None and dim_map.divisor == dim_map.width == 1 for dim_map in step):
        return all(-(-n // abs(dim_map.stride)) == above[dim_map.dim or 0] for dim_map, n in zip(step, below))
    return math.prod(below) == math.prod(above)
