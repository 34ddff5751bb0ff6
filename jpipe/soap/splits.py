"""How a strategy splits the operands and results of equations over the axes of a mesh."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jpipe._util.foreign import shown
from jpipe.soap.exchange import PRIMITIVES, Exchange, Fetch, window_of
from jpipe.soap.flatten import Equation, Value
from jpipe.soap.graph import (
    ATTRIBUTE,
    PARAMETER,
    REDUCTION,
    SAMPLE,
    Operator,
    OperatorGraph,
)
from jpipe.soap.moves import Spec, Step, boxes_of, is_direct, steps_between
from jpipe.soap.regions import (
    Access,
    DimMap,
    followed,
    identity,
    is_plain,
    read_all,
)
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
    """Whether XLA computes the right numbers of a split with whole groups of channels.

    Of convolutions it counts sums several times where axes of the mesh that split no samples and no positions are left for copies or
    for channels (jaxlib 0.10.2, found by trying all degrees on 4 and 8 CPU devices). Right are splits by samples and output channels,
    by samples and positions over all devices, and by samples and terms over all devices. With groups of channels, it counts them several
    times wherever axes are left for copies.
    """
    if operator.kind != "conv_general_dilated":
        return True
    split = {loop.kind for loop, d in zip(operator.loops, config.degrees) if d > 1}
    uses_all = math.prod(config.degrees) == num_devices
    if split <= {SAMPLE, PARAMETER}:
        return uses_all or not split or not _groups_of(operator)
    return uses_all and (split <= {SAMPLE, ATTRIBUTE} or split <= {SAMPLE, REDUCTION})


def _groups_of(operator: Operator) -> list[tuple[int, int]]:
    """Of each convolution of an operator with groups of channels: the loop over output channels, and how many channels a group has."""
    found = []
    for member in operator.equations or ():
        params = member.equation.params
        if (groups := params.get("feature_group_count", 1)) > 1:
            loop = params["dimension_numbers"].out_spec[1]
            found.append((loop, operator.loops[loop].size // groups))
    return found


def _has_whole_groups(operator: Operator, config: Config) -> bool:
    """Whether each shard of a convolution computes whole groups of channels, or a part of one.

    XLA computes wrong numbers where a shard has parts of two groups.
    """
    for loop, of_group in _groups_of(operator):
        own = operator.loops[loop].size // config.degrees[loop]
        if own % of_group and of_group % own:
            return False
    return True


def refusal(
    operator: Operator,
    config: Config,
    sizes: Mapping[str, int],
    *,
    in_stages: bool = False,
) -> str | None:
    """Why `jpipe.soap.apply`, or a pipeline in its stages, cannot run an operator as a configuration splits it; None: it can.

    Args:
      operator: the operator.
      config: its degrees and devices.
      sizes: axis of the mesh -> number of devices.
      in_stages: whether the mesh is that of the stages of a pipeline, which cannot fetch parts from each other: see `reads_tiles`.
    """
    axes = loop_axes(config, sizes)
    if axes is None:
        return _no_mesh(operator, config, sizes)
    if in_stages and not reads_tiles(operator, config):
        return (
            f"shards of operator {shown(operator.name)} with degrees {config.degrees} read parts of their neighbours, which XLA sends "
            "by collective permutes. A device of another stage would have to join them, and runs something else. "
            "Search with `Space(graph, num_devices, in_stages=True)` (`train/search.py --in-stages`)."
        )
    count = math.prod(sizes.values())
    wrong = f"XLA computes wrong numbers of the convolution {operator.name!r} split by degrees {config.degrees} over {count} devices"
    if not _has_whole_groups(operator, config):
        return (
            f"{wrong}, because shards have parts of several groups of channels. Split it so that each shard has whole groups or a part "
            "of one; `Space(graph, num_devices, executable=True)` leaves wrong splits out."
        )
    if is_partitioned_right(operator, config, count):
        return None
    known = _Known(sizes, {}, in_stages=in_stages)
    if any(_exchange(operator, m, axes, known) for m in operator.equations or ()):
        return None
    return (
        f"{wrong}. Split it by samples, or by samples and positions, over all devices; `Space(graph, num_devices, executable=True)` leaves "
        "wrong splits out."
    )


class Move(NamedTuple):
    """How an operand comes from its writer's split to the one in which it is read.

    Attributes:
      source: how the writer splits it.
      steps: see `steps_between`. With `shapes`, they are of the array that its writer wrote, before the reshapes and transposes of which the
        operand is the result. So it is where a reshape merges or cuts dims that are split.
      window: what devices fetch of the array that its writer wrote, where no split of that has it, as of a slice along a dim that is split.
      shapes: of the array that its writer wrote, and of what devices make of the window, view by view.
    """

    source: Spec = ()
    steps: tuple[Step, ...] = ()
    window: Fetch | None = None
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Split:
    """How one equation is split.

    Attributes:
      primitive: its name.
      shapes: of its outputs.
      moves: per operand.
      inputs: per operand; None leaves the operand to the compiler, or to the exchange.
      outputs: per result.
      exchange: how devices compute the result where shards read parts of other shards; None: the compiler finds it out.
    """

    primitive: str
    shapes: tuple[tuple[int, ...], ...]
    moves: tuple[Move, ...]
    inputs: tuple[Spec | None, ...]
    outputs: tuple[Spec, ...]
    exchange: Exchange | None = None


Plan = Mapping[Any, Any]
"""`Split`s by the numbers of their equations; below a call or a loop stands the plan of its body. See `jpipe.soap.flatten.Place`."""


class _Known(NamedTuple):
    """What is known of arrays before an equation.

    Attributes:
      sizes: axis of the mesh -> number of devices.
      written: how results of earlier equations are split.
      inputs: numbers of the tensors that are inputs of the function. All devices have them.
      in_stages: whether devices cannot fetch parts from each other.
    """

    sizes: Mapping[str, int]
    written: Mapping[Value, Spec]
    inputs: Collection[int] = ()
    in_stages: bool = False

    def split_of(self, member: Any, position: int) -> Spec | None:
        """How an operand is split before; None if that is not known."""
        value, view = member.sources[position]
        shape = member.equation.inputs[position].shape
        if value in self.written:
            spec = self.written[value]
            return _shown(spec, view, value.shape, shape, self.sizes)
        tensor = member.tensors[position]
        if tensor is None or tensor in self.inputs:
            return ((),) * len(shape)
        return None


def _shown(
    spec: Spec,
    view: Access,
    source: tuple[int, ...],
    shape: tuple[int, ...],
    sizes: Mapping[str, int],
) -> Spec | None:
    """How a view of an array is split, if each device makes its part of it of what it has of the array; None: it does not.

    Args:
      spec: how the array is split.
      view: which box of the array a box of the view needs.
      source, shape: of the array and of the view.
      sizes: axis -> number of devices.
    """
    shown: list[tuple[str, ...]] = [()] * len(shape)
    for names, dim in zip(spec, followed(view)):
        if not names:
            continue
        if dim is None or shown[dim] or shape[dim] % _parts(names, sizes):
            return None
        shown[dim] = names
    is_local = _reads_own(shown, view, shape, spec, source, sizes)
    return tuple(shown) if is_local else None


def _reads_own(
    above: Sequence[tuple[str, ...]],
    view: Access,
    shape: tuple[int, ...],
    below: Sequence[tuple[str, ...]],
    source: tuple[int, ...],
    sizes: Mapping[str, int],
) -> bool:
    """Whether each device makes its part of a view of its part of an array.

    Args:
      above, shape: how the view is split, and its shape.
      view: which box of the array a box of the view needs.
      below, source: how the array is split, and its shape.
      sizes: axis -> number of devices.
    """
    for size, names in (*zip(shape, above), *zip(source, below)):
        if size % _parts(names, sizes):
            return False
    if _axes_of(above) != _axes_of(below):
        return False
    read = read_all(view, boxes_of(shape, above, sizes))
    has = boxes_of(source, below, sizes)
    return bool(np.all((read[..., 0] >= has[..., 0]) & (read[..., 1] <= has[..., 1])))


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
    graph: OperatorGraph,
    strategy: Sequence[Config],
    sizes: Mapping[str, int],
    *,
    in_stages: bool = False,
) -> Splits:
    """A strategy as splits over the axes of a mesh.

    Args:
      graph: of `jpipe.soap.trace`.
      strategy: a configuration per operator.
      sizes: axis of the mesh -> number of devices.
      in_stages: whether the mesh is that of the stages of a pipeline, which cannot fetch parts from each other: see `reads_tiles`.

    Raises:
      ValueError: if a mesh cannot run a configuration: see `refusal`.
    """
    check_strategy(graph, strategy, math.prod(sizes.values()))
    of_loops = []
    for operator, config in zip(graph.operators, strategy):
        if message := refusal(operator, config, sizes, in_stages=in_stages):
            raise ValueError(message)
        axes = loop_axes(config, sizes)
        assert axes is not None, "`refusal` asks for them"
        of_loops.append(axes)
    plan: dict = {}
    written: dict[Value, Spec] = {}
    inputs = {
        number
        for number, tensor in enumerate(graph.tensors)
        if tensor.producer is None and tensor.weight is None
    }
    known = _Known(sizes, written, inputs, in_stages)
    first: dict[int, Spec | None] = {}
    for operator, axes in zip(graph.operators, of_loops):
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
        for each in operator.inputs:
            tensor = graph.tensors[each.tensor]
            if tensor.producer is not None or each.tensor in first:
                continue
            # Every device has an input of the function of which shards read parts of each other's.
            is_whole = each.tensor in fetched and each.tensor in inputs
            spec = _read(tensor.shape, each.access, axes, sizes)
            first[each.tensor] = None if is_whole else spec
    arguments = [
        first.get(number) or ((),) * len(tensor.shape)
        for number, tensor in enumerate(graph.tensors)
        if tensor.producer is None
    ]
    return Splits(arguments, plan)


def _no_mesh(operator: Operator, config: Config, sizes: Mapping[str, int]) -> str:
    axes = " x ".join(f"{name}={size}" for name, size in sizes.items())
    return (
        f"operator {shown(operator.name)} with degrees {config.degrees} on devices {config.devices} is no split over the mesh {axes}: an "
        "operator runs on the whole mesh, its loops split over axes of it. Search with `Space(graph, num_devices, "
        "executable=True)`, for a pipeline with `in_stages=True` (`train/search.py --in-stages`), and put operators that run on other "
        "devices into other stages."
    )


def _split(
    operator: Operator,
    member: Any,
    axes: Sequence[tuple[str, ...]],
    known: _Known,
) -> Split:
    """How an equation is split."""
    equation, sizes = member.equation, known.sizes
    exchange = _exchange(operator, member, axes, known)
    inputs: list[Spec | None]
    if exchange is None:
        inputs = [
            _read(value.shape, access, axes, sizes)
            for value, access in zip(equation.inputs, member.reads)
        ]
    else:
        inputs = [None if isinstance(e, Fetch) else e for e in exchange.operands]
    outputs = tuple(
        _written(operator, value, dims, axes, sizes)[0]
        for value, dims in zip(equation.outputs, member.writes)
    )
    moves = tuple(_move(member, i, after, known) for i, after in enumerate(inputs))
    shapes = tuple(value.shape for value in equation.outputs)
    return Split(equation.primitive, shapes, moves, tuple(inputs), outputs, exchange)


def _move(member: Any, position: int, after: Spec | None, known: _Known) -> Move:
    """How an operand comes to the split `after`; nothing where the compiler does it."""
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
    if not is_whole or not _reads_own(after, view, shape, below, value.shape, sizes):
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
    """Devices fetch the box of an array that their part of a view reads; nothing if that is more than the part, or they have copies.

    Args:
      view: which box of the array a box of the view needs.
      shape: of the view.
      before: how the array is split.
      after: how the view is read.
      sizes: axis -> number of devices.
    """
    used = _axes_of(before)
    if used != _axes_of(after):
        return Move()
    part = boxes_of(shape, after, {k: n for k, n in sizes.items() if k in used})
    shapes = [tuple((part[0, :, 1] - part[0, :, 0]).tolist())]
    for step in view:
        whole, shape = shape, tuple(each.size for each in step)
        if step == identity(whole):
            continue  # of no equation
        part = read_all((step,), part)
        lengths = part[:, :, 1] - part[:, :, 0]
        found = tuple(lengths[0].tolist())
        if np.any(lengths != lengths[0]) or not _is_all_read(step, found, shapes[-1]):
            return Move()
        shapes.append(found)
    starts = tuple(map(tuple, part[:, :, 0].tolist()))
    window = Fetch(before, starts, shapes.pop())
    return Move(before, window=window, shapes=(shape, *reversed(shapes)))


def _is_all_read(
    step: Sequence[DimMap], below: Sequence[int], above: Sequence[int]
) -> bool:
    """Whether a box of a view has all of a box of an array below it, but for the holes of strides."""
    if all(each.dim is not None and each.divisor == each.width == 1 for each in step):
        return all(
            -(-n // abs(each.stride)) == above[each.dim or 0]
            for each, n in zip(step, below)
        )
    return math.prod(below) == math.prod(above)


def _written(
    operator: Operator,
    value: Value,
    dims: Sequence[int | None],
    axes: Sequence[tuple[str, ...]],
    sizes: Mapping[str, int],
) -> tuple[Spec, tuple[str, ...], int | None]:
    """How a result is split, the axes along which devices have terms of it, and the dim along which they keep parts of the sum."""
    spec = [() if d is None else axes[d] for d in dims]
    terms = tuple(
        name
        for k, loop in enumerate(operator.loops)
        if loop.kind == REDUCTION and k not in dims
        for name in axes[k]
    )
    dim = _summed_dim(value.shape, spec, terms, sizes)
    if dim is not None:
        spec[dim] = (*spec[dim], *terms)
    return tuple(spec), terms, dim


def _exchange(
    operator: Operator,
    member: Any,
    axes: Sequence[tuple[str, ...]],
    known: _Known,
) -> Exchange | None:
    """How devices compute a result where shards read parts of others; None where the compiler does it, or it cannot be done so."""
    equation = member.equation
    if known.in_stages or equation.primitive not in PRIMITIVES:
        return None
    if equation.params.get("batch_group_count", 1) > 1:
        return None
    reads = list(zip(equation.inputs, member.reads))
    lies = [
        known.split_of(member, i)
        or _read(value.shape, access, axes, known.sizes)
        or ((),) * len(value.shape)
        for i, (value, access) in enumerate(reads)
    ]
    used = {name for spec in (axes, *lies) for names in spec for name in names}
    sizes = {name: size for name, size in known.sizes.items() if name in used}
    loops = boxes_of([loop.size for loop in operator.loops], axes, sizes)
    specs = [_tiles(value.shape, access, loops, axes, sizes) for value, access in reads]
    detours = [
        spec is not None
        and _is_gather(source, spec)
        and not is_direct(value.shape, source, spec, sizes)
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
    outputs = [
        _written(operator, value, dims, axes, sizes)
        for value, dims in zip(equation.outputs, member.writes)
    ]
    return Exchange(
        tuple(sizes),
        tuple(operands),
        tuple(spec for spec, *_ in outputs),
        tuple((terms, dim) for _, terms, dim in outputs),
    )


def _window(
    equation: Equation, access: Access, source: Spec, loops: np.ndarray
) -> Fetch | None:
    """The windows of an operand that devices fetch."""
    if equation.primitive == "stack":
        axis = equation.params["axis"]
        return window_of((*source[:axis], (), *source[axis:]), access[:1], loops)
    return window_of(source, access, loops)


def _is_gather(before: Spec, after: Spec) -> bool:
    """Whether devices have larger parts of an array after a move."""
    return not set(_axes_of(before)) <= set(_axes_of(after))


def _is_left_to_compiler(primitive: str, axes: Sequence[tuple[str, ...]]) -> bool:
    """Whether XLA sends no more than it has to, of an operator whose shards read equal parts.

    It adds up the gradient of an embedding over one axis after the other, and gathers the operand of a slice that several axes split. Of windows
    with padding, convolutions with groups and a top k it gathers what the gradient needs.
    """
    if primitive in ("gather", "dynamic_slice"):
        return sum(map(len, axes)) < 2
    return primitive in ("concatenate", "dot_general", "pad", "stack")


def _tiles(
    shape: tuple[int, ...],
    access: Access,
    loops: np.ndarray,
    axes: Sequence[tuple[str, ...]],
    sizes: Mapping[str, int],
) -> Spec | None:
    """The split in which each device has what its box of loops reads; None if there is none."""
    split = [each for each in access[0] if each.dim is not None and axes[each.dim]]
    if not all(_is_even(step) for step in (split, *access[1:])):
        return None
    spec = _followed_spec(shape, access, axes, sizes)
    has = boxes_of(shape, spec, sizes)
    return spec if np.array_equal(read_all(access, loops), has) else None


def _axes_of(spec: Sequence[Sequence[str]]) -> list[str]:
    """The axes over which an array is split, sorted."""
    return sorted(name for names in spec for name in names)


def _parts(names: Sequence[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[name] for name in names)


def _summed_dim(
    shape: tuple[int, ...],
    spec: Sequence[tuple[str, ...]],
    terms: Sequence[str],
    sizes: Mapping[str, int],
) -> int | None:
    """The longest dim of a device's part of a result, along which each device keeps its part of a sum; None if it has all of it."""
    local = [n // _parts(names, sizes) for n, names in zip(shape, spec)]
    if not terms or not local:
        return None
    longest = int(np.argmax(local))
    return longest if local[longest] % _parts(terms, sizes) == 0 else None


def _read(
    shape: tuple[int, ...],
    access: Access,
    axes: Sequence[tuple[str, ...]],
    sizes: Mapping[str, int],
) -> Spec | None:
    """How an operand is split that loops read; None if equal parts of the loops do not read about equal parts of it."""
    if not all(_is_even(step) for step in access):
        return None
    return _followed_spec(shape, access, axes, sizes)


def _followed_spec(
    shape: tuple[int, ...],
    access: Access,
    axes: Sequence[tuple[str, ...]],
    sizes: Mapping[str, int],
) -> Spec:
    """The axes of the loops that the dims of an operand follow."""
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
