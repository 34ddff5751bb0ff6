"""How a strategy splits the operands and results of equations over the axes of a mesh."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jpipe.soap.flatten import Value
from jpipe.soap.graph import (
    ATTRIBUTE,
    PARAMETER,
    REDUCTION,
    SAMPLE,
    Operator,
    OperatorGraph,
)
from jpipe.soap.moves import Spec, steps_between
from jpipe.soap.regions import Access, followed, read_all
from jpipe.soap.strategy import Config, check_strategy, shard_boxes


def factor_axes(name: str, size: int) -> dict[str, int]:
    """Axes of prime sizes that together have as many devices as one axis.

    Example:
      >>> factor_axes("model", 12), factor_axes("model", 3)
      ({'model_0': 2, 'model_1': 2, 'model_2': 3}, {'model': 3})
    """
    primes, rest = [], size
    for factor in range(2, size + 1):
        while rest % factor == 0:
            primes.append(factor)
            rest //= factor
    if len(primes) < 2:
        return {name: size}
    return {f"{name}_{i}": prime for i, prime in enumerate(primes)}


def loop_axes(config: Config, sizes: Mapping[str, int]) -> list[tuple[str, ...]] | None:
    """The axes of a mesh over which a configuration splits each loop; None if its devices are no part of the mesh.

    Devices are numbered along the mesh with the last axis running fastest. Axes that split no loop hold copies, so fewer shards than
    devices must begin at device 0.

    Args:
      config: degrees, and the device of each shard.
      sizes: axis -> number of devices.

    Example:
      >>> loop_axes(Config((2, 2), (0, 2, 1, 3)), {"a": 2, "b": 2})
      [('b',), ('a',)]
      >>> loop_axes(Config((1,), (2,)), {"a": 2, "b": 2}) is None
      True
    """
    devices = np.array(config.devices).reshape(config.degrees)
    strides: dict[int, str] = {}
    stride = math.prod(sizes.values())
    for name, size in sizes.items():
        stride //= size
        if size > 1:
            strides[stride] = name
    grid = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    result: list[tuple[str, ...]] = []
    for i, degree in enumerate(config.degrees):
        along = devices[
            tuple(slice(None) if k == i else 0 for k in range(devices.ndim))
        ].ravel()
        names: list[str] = []
        count = 1
        while count < degree:
            name = strides.pop(int(along[count]), "")
            if not name or degree % (count * sizes[name]):
                return None
            names.insert(0, name)
            count *= sizes[name]
        result.append(tuple(names))
    order = list(sizes)
    used = [order.index(name) for names in result for name in names]
    first = grid[tuple(slice(None) if k in used else 0 for k in range(grid.ndim))]
    kept = sorted(used)
    turned = first.transpose([kept.index(k) for k in used]).reshape(config.degrees)
    return result if np.array_equal(turned, devices) else None


def reads_tiles(operator: Operator, config: Config) -> bool:
    """Whether each shard reads an equal part of each operand, in order, or all shards the same part, along every dim.

    Shards of windows, slices, pads and concatenations read other parts, some of them of their neighbours. XLA sends those
    by collective permutes.
    """
    sizes = tuple(loop.size for loop in operator.loops)
    loops = shard_boxes(sizes, config.degrees)
    # Views between the operand and the operator too: XLA moves their results.
    reads = [
        each.access[:end]
        for each in operator.inputs
        for end in range(1, len(each.access) + 1)
    ]
    return all(_reads_tiles(access, loops) for access in reads)


def _reads_tiles(access: Access, loops: np.ndarray) -> bool:
    boxes = read_all(access, loops)
    for dim, last in enumerate(access[-1]):
        low, high = boxes[:, dim, 0], boxes[:, dim, 1]
        if np.all(low == low[0]) and np.all(high == high[0]):
            continue
        parts = len(np.unique(low))
        part = last.size // parts
        in_order = part * parts == last.size and not np.any(low % part)
        if not in_order or np.any(high - low != part):
            return False
    return True


def is_partitioned_right(operator: Operator, config: Config, num_devices: int) -> bool:
    """Whether XLA computes the right numbers of a split.

    Of convolutions it counts sums several times where axes of the mesh that split no samples and no positions are left for copies or
    for channels (jaxlib 0.10.2, found by trying all degrees on 4 and 8 CPU devices). Right are splits by samples and output channels,
    by samples and positions over all devices, and by samples and terms over all devices.
    """
    if operator.kind != "conv_general_dilated":
        return True
    split = {loop.kind for loop, d in zip(operator.loops, config.degrees) if d > 1}
    if split <= {SAMPLE, PARAMETER}:
        return True
    uses_all = math.prod(config.degrees) == num_devices
    return uses_all and (split <= {SAMPLE, ATTRIBUTE} or split <= {SAMPLE, REDUCTION})


@dataclasses.dataclass(frozen=True)
class Split:
    """How one equation is split.

    Attributes:
      primitive: its name.
      shapes: of its outputs.
      moves: per operand, how it is split on the way from its writer; see `steps_between`.
      inputs: per operand; None leaves the operand to the compiler.
      outputs: per result.
    """

    primitive: str
    shapes: tuple[tuple[int, ...], ...]
    moves: tuple[tuple[Spec, ...], ...]
    inputs: tuple[Spec | None, ...]
    outputs: tuple[Spec, ...]


Plan = Mapping[Any, Any]
"""`Split`s by the numbers of their equations; below a call or a loop stands the plan of its body. See `jpipe.soap.flatten.Place`."""


@dataclasses.dataclass(frozen=True)
class Splits:
    """A strategy as splits of equations and arguments.

    Attributes:
      arguments: per argument of the function, flat: how its first reader splits it.
      plan: of the equations.
    """

    arguments: Sequence[Spec]
    plan: Plan


def splits(
    graph: OperatorGraph, strategy: Sequence[Config], sizes: Mapping[str, int]
) -> Splits:
    """A strategy as splits over the axes of a mesh.

    Args:
      graph: of `jpipe.soap.trace`.
      strategy: a configuration per operator.
      sizes: axis of the mesh -> number of devices.

    Raises:
      ValueError: if an operator does not run on the whole mesh, in the order of its axes.
    """
    check_strategy(graph, strategy, math.prod(sizes.values()))
    of_loops = []
    for operator, config in zip(graph.operators, strategy):
        axes = loop_axes(config, sizes)
        if axes is None:
            raise ValueError(_no_mesh(operator, config, sizes))
        if not is_partitioned_right(operator, config, math.prod(sizes.values())):
            raise ValueError(
                f"XLA computes wrong numbers where degrees {config.degrees} split the convolution {operator.name!r} over "
                f"{math.prod(sizes.values())} devices. Split it by samples and channels, or by samples and positions over all devices; "
                "`Space(graph, num_devices, executable=True)` leaves wrong splits out."
            )
        of_loops.append(axes)
    plan: dict = {}
    written: dict[Value, Spec] = {}
    for operator, axes in zip(graph.operators, of_loops):
        for member in operator.equations:
            *above, last = member.equation.place
            inner = plan
            for step in above:
                inner = inner.setdefault(step, {})
            inner[last] = _split(operator, member, axes, sizes, written)
            written.update(zip(member.equation.outputs, inner[last].outputs))
    first: dict[int, Spec | None] = {}
    for operator, axes in zip(graph.operators, of_loops):
        for each in operator.inputs:
            tensor = graph.tensors[each.tensor]
            if tensor.producer is None and each.tensor not in first:
                first[each.tensor] = _read(tensor.shape, each.access, axes, sizes)
    arguments = [
        first.get(number) or ((),) * len(tensor.shape)
        for number, tensor in enumerate(graph.tensors)
        if tensor.producer is None
    ]
    return Splits(arguments, plan)


def _no_mesh(operator: Operator, config: Config, sizes: Mapping[str, int]) -> str:
    axes = " x ".join(f"{name}={size}" for name, size in sizes.items())
    return (
        f"operator {operator.name!r} with degrees {config.degrees} on devices {config.devices} is no split over the mesh {axes}: an "
        "operator runs on the whole mesh, its loops split over axes of it. Search with `Space(graph, num_devices, "
        "executable=True)`, for a pipeline with `in_stages=True` (`train/search.py --in-stages`), and put operators that run on other "
        "devices into other stages."
    )


def _split(
    operator: Operator,
    member: Any,
    axes: Sequence[tuple[str, ...]],
    sizes: Mapping[str, int],
    written: Mapping[Value, Spec],
) -> Split:
    """How an equation is split, where `written` says how its operands are before."""
    equation = member.equation
    inputs = tuple(
        _read(value.shape, access, axes, sizes)
        for value, access in zip(equation.inputs, member.reads)
    )
    outputs = []
    for value, dims in zip(equation.outputs, member.writes):
        spec = [() if d is None else axes[d] for d in dims]
        terms = [
            name
            for k, loop in enumerate(operator.loops)
            if loop.kind == REDUCTION and k not in dims
            for name in axes[k]
        ]
        outputs.append(_scattered(value.shape, spec, terms, sizes))
    moves = tuple(
        ()
        if spec is None or value not in written
        else steps_between(value.shape, written[value], spec, sizes)
        for value, spec in zip(equation.inputs, inputs)
    )
    shapes = tuple(value.shape for value in equation.outputs)
    return Split(equation.primitive, shapes, moves, inputs, tuple(outputs))


def _parts(names: Sequence[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[name] for name in names)


def _scattered(
    shape: tuple[int, ...],
    spec: Sequence[tuple[str, ...]],
    terms: Sequence[str],
    sizes: Mapping[str, int],
) -> Spec:
    """How a result is split whose terms are added up over axes: each device keeps a part of the sum, along the longest dim."""
    result = list(spec)
    local = [n // _parts(names, sizes) for n, names in zip(shape, spec)]
    if terms and local:
        longest = int(np.argmax(local))
        if local[longest] % _parts(terms, sizes) == 0:
            result[longest] = (*result[longest], *terms)
    return tuple(result)


def _read(
    shape: tuple[int, ...],
    access: Access,
    axes: Sequence[tuple[str, ...]],
    sizes: Mapping[str, int],
) -> Spec | None:
    """How an operand is split that loops read; None if equal parts of the loops do not read about equal parts of it."""
    if not all(_is_even(step) for step in access):
        return None
    spec: list[tuple[str, ...]] = []
    used: set[str] = set()
    for size, loop in zip(shape, followed(access)):
        names = () if loop is None else axes[loop]
        if used.intersection(names) or size % _parts(names, sizes):
            names = ()
        used.update(names)
        spec.append(names)
    return tuple(spec)


def _is_even(step: Sequence) -> bool:
    """Whether parts of the array above need about equal parts of the one below, in order, as windows of convolutions do."""
    return all(
        each.dim is None
        or each.is_plain
        or (each.stride > 0 and -each.width < each.offset <= 0 and each.divisor == 1)
        for each in step
    )
