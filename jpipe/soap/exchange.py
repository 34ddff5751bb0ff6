"""Operators whose shards read parts of other shards: each device gets exactly what it reads, and computes its own part.

XLA's partitioner sends more than a strategy implies where shards of a window, a `pad` or a concatenation read other parts of an array than
those in which it lies: it sends halos again in the backward, and moves whole operands to another split and back. It also counts sums twice
for some splits of convolutions. So these operators run in `jax.shard_map`. A device fetches a window of each operand from
those that have it, by one permutation per distance between devices. The transposed permutations return the gradient.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jpipe.soap.moves import Spec, as_entries
from jpipe.soap.regions import Step

PRIMITIVES = frozenset(
    """concatenate conv_general_dilated pad reduce_window_max reduce_window_min reduce_window_sum stack""".split()
)
"""What runs so, where shards read more than their parts."""


@dataclasses.dataclass(frozen=True)
class Fetch:
    """A window of an array for each device.

    Attributes:
      source: how the array lies.
      starts: per device and dim, where its window begins. A window may reach beyond the array.
      shape: of the windows.
    """

    source: Spec
    starts: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How devices compute their parts of an equation's result.

    Attributes:
      operands: per operand a window, or the split in which a device has what it reads.
      output: how the result is split.
      terms: the axes along which devices have terms of sums.
      sum_dim: the dim of the result along which a device keeps its part of the sum; None: devices have the whole sum.
    """

    operands: tuple[Fetch | Spec, ...]
    output: Spec
    terms: tuple[str, ...] = ()
    sum_dim: int | None = None


def boxes_of(
    shape: Sequence[int], spec: Sequence[Sequence[str]], sizes: Mapping[str, int]
) -> np.ndarray:
    """`[devices, rank, 2]`, the part of an array that each device has, in the order of the mesh."""
    count = math.prod(sizes.values())
    places = np.indices(tuple(sizes.values())).reshape(len(sizes), count)
    of_axis = dict(zip(sizes, places))
    boxes = np.zeros((count, len(shape), 2), np.int64)
    for dim, (size, names) in enumerate(zip(shape, spec)):
        part = np.zeros(count, np.int64)
        for name in names:
            part = part * sizes[name] + of_axis[name]
        length = size // math.prod(sizes[name] for name in names)
        boxes[:, dim, 0] = part * length
        boxes[:, dim, 1] = part * length + length
    return boxes


def window_of(
    step: Step, loops: np.ndarray
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]] | None:
    """Starts and shape of the windows that boxes of loops read.

    Args:
      step: what an equation reads of the array.
      loops: `[devices, loops, 2]`, boxes of equal shapes.

    Returns:
      None if some elements between the ends are not read, or the windows are of several shapes.
    """
    starts, shape = [], []
    for each in step:
        if each.dim is None:
            starts.append([0] * len(loops))
            shape.append(each.size)
            continue
        if each.divisor != 1 or each.dilation != 1 or each.stride < 1:
            return None
        low, high = loops[0, each.dim]
        starts.append((loops[:, each.dim, 0] * each.stride + each.offset).tolist())
        shape.append(int(high - low - 1) * each.stride + each.width)
    return tuple(zip(*starts)), tuple(shape)


class _Message(NamedTuple):
    """What devices get from those at one distance.

    Attributes:
      pairs: `(sender, receiver)`.
      shape: of what is sent, the largest of all pairs.
      read: per sender, where it begins in the sender's part.
      write: per receiver, where it belongs in the receiver's window.
      first, last: per receiver and dim, the range of it that counts.
    """

    pairs: list[tuple[int, int]]
    shape: tuple[int, ...]
    read: np.ndarray
    write: np.ndarray
    first: np.ndarray
    last: np.ndarray


def _messages(owned: np.ndarray, wanted: np.ndarray) -> Iterator[_Message]:
    """The messages by which every device gets its window. A device takes what several have from itself, or from the nearest before it.

    Args:
      owned: `[devices, rank, 2]`, the part of the array that each device has.
      wanted: the same, of windows.
    """
    count, tile = len(owned), owned[0, :, 1] - owned[0, :, 0]
    by_distance: dict[int, list[tuple[int, int]]] = {}
    for receiver in range(count):
        seen: set[bytes] = set()
        for distance in range(count):
            sender = (receiver - distance) % count
            part = owned[sender].tobytes()
            if part not in seen and _is_shared(owned[sender], wanted[receiver]):
                by_distance.setdefault(distance, []).append((sender, receiver))
            seen.add(part)
    for _, pairs in sorted(by_distance.items()):
        low = np.zeros((count, len(tile)), np.int64)
        high = np.zeros_like(low)
        for a, b in pairs:
            low[b] = np.maximum(owned[a, :, 0], wanted[b, :, 0])
            high[b] = np.minimum(owned[a, :, 1], wanted[b, :, 1])
        shape = (high - low).max(axis=0)
        read, write = np.zeros_like(low), np.zeros_like(low)
        first, last = np.zeros_like(low), np.zeros_like(low)
        for a, b in pairs:
            # Messages of one distance have one shape: a shorter one begins earlier, if it has to.
            begin = np.minimum(low[b] - owned[a, :, 0], tile - shape)
            read[a] = begin
            first[b] = low[b] - owned[a, :, 0] - begin
            last[b] = first[b] + high[b] - low[b]
            write[b] = owned[a, :, 0] + begin - wanted[b, :, 0]
        yield _Message(pairs, tuple(shape.tolist()), read, write, first, last)


def _is_shared(first: np.ndarray, second: np.ndarray) -> bool:
    low = np.maximum(first[:, 0], second[:, 0])
    return bool(np.all(low < np.minimum(first[:, 1], second[:, 1])))


def _fetched(
    part: jax.Array, fetch: Fetch, owned: np.ndarray, axes: tuple[str, ...], fill: Any
) -> jax.Array:
    """The window of a device, with `fill` outside of the array. It runs on each device."""
    shape = np.array(fetch.shape)
    starts = np.array(fetch.starts)
    messages = list(_messages(owned, np.stack([starts, starts + shape], axis=-1)))
    # A message may begin before the window or end behind it.
    ends = [each.write + np.array(each.shape) - shape for each in messages]
    margins = np.zeros((2, part.ndim), np.int64)
    if messages:
        margins[0] = np.maximum(0, -np.min([each.write for each in messages], (0, 1)))
        margins[1] = np.maximum(0, np.max(ends, (0, 1)))
    window = jnp.full(shape + margins.sum(axis=0), fill, part.dtype)
    device = lax.axis_index(axes)
    for each in messages:
        message = lax.dynamic_slice(part, jnp.asarray(each.read)[device], each.shape)
        if any(sender != receiver for sender, receiver in each.pairs):
            message = lax.ppermute(message, axes, each.pairs)
        place = jnp.asarray(each.write + margins[0])[device]
        if len(each.pairs) < len(owned) or _has_rest(each):
            present = lax.dynamic_slice(window, place, each.shape)
            first, last = (jnp.asarray(a)[device] for a in (each.first, each.last))
            message = jnp.where(_inside(first, last, each.shape), message, present)
        window = lax.dynamic_update_slice(window, message, place)
    return lax.slice(window, margins[0], margins[0] + shape)


def _has_rest(message: _Message) -> bool:
    """Whether some receivers do not need all of a message."""
    return bool(np.any(message.first) or np.any(message.last != message.shape))


def _inside(first: jax.Array, last: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A mask of the elements between `first` and `last` of every dim."""
    inside = jnp.ones(shape, bool)
    for dim in range(len(shape)):
        index = lax.broadcasted_iota(first.dtype, shape, dim)
        inside &= (index >= first[dim]) & (index < last[dim])
    return inside


def run(
    eqn: Any, values: Sequence[jax.Array], exchange: Exchange, mesh: Mesh
) -> jax.Array:
    """The result of an equation of one of `PRIMITIVES`, computed device by device.

    Args:
      eqn: the equation.
      values: its operands.
      exchange: how devices compute it.
      mesh: the devices.
    """
    name = eqn.primitive.name
    if name == "stack":
        values = [jnp.expand_dims(value, eqn.params["axis"]) for value in values]
    specs = [s.source if isinstance(s, Fetch) else s for s in exchange.operands]
    shapes = [np.shape(value) for value in values]

    def of_device(*parts: jax.Array) -> jax.Array:
        fill = _fill(name, parts)
        operands = [
            _fetched(
                part,
                each,
                boxes_of(shape, spec, mesh.shape),
                mesh.axis_names,
                fill,
            )
            if isinstance(each, Fetch)
            else part
            for part, each, shape, spec in zip(parts, exchange.operands, shapes, specs)
        ]
        if name == "pad":
            return operands[0]
        if name in ("concatenate", "stack"):
            dim = eqn.params["dimension" if name == "concatenate" else "axis"]
            sizes = [shape[dim] for shape in shapes]
            return _joined(operands, exchange, dim, sizes, mesh.axis_names)
        params = dict(eqn.params)
        if isinstance(exchange.operands[0], Fetch):  # a window has its padding
            params["padding"] = ((0, 0),) * len(params["padding"])
        result = eqn.primitive.bind(*operands, **params)
        if exchange.sum_dim is not None:
            return lax.psum_scatter(
                result,
                exchange.terms,
                scatter_dimension=exchange.sum_dim,
                tiled=True,
            )
        return lax.psum(result, exchange.terms) if exchange.terms else result

    return jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=tuple(PartitionSpec(*as_entries(spec)) for spec in specs),
        out_specs=PartitionSpec(*as_entries(exchange.output)),
        check_vma=False,  # copies of a result are not known to be equal
    )(*values)


def _fill(name: str, parts: Sequence[jax.Array]) -> Any:
    """What a window has outside of the array."""
    if name == "pad":
        return parts[1]
    if name in ("reduce_window_max", "reduce_window_min"):
        dtype, is_max = parts[0].dtype, name == "reduce_window_max"
        if jnp.issubdtype(dtype, jnp.floating):
            return -np.inf if is_max else np.inf
        return jnp.iinfo(dtype).min if is_max else jnp.iinfo(dtype).max
    return 0


def _joined(
    windows: Sequence[jax.Array],
    exchange: Exchange,
    dim: int,
    sizes: Sequence[int],
    axes: tuple[str, ...],
) -> jax.Array:
    """A device's part of a concatenation: from each operand what it has of it.

    Args:
      windows: of all operands, each of the shape of the part.
      exchange: how they were fetched.
      dim: along which operands are joined.
      sizes: of the operands along it.
      axes: of the mesh.
    """
    joined = windows[0]
    index = lax.broadcasted_iota(jnp.int32, joined.shape, dim)
    device = lax.axis_index(axes)
    for window, fetch, size in zip(windows[1:], exchange.operands[1:], sizes[1:]):
        assert isinstance(fetch, Fetch)
        place = index + jnp.asarray([start[dim] for start in fetch.starts])[device]
        joined = jnp.where((place >= 0) & (place < size), window, joined)
    return joined
