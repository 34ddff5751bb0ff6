"""Operators whose shards read parts of other shards: each device gets exactly the elements that it reads, and computes
its own part.

XLA's partitioner sends more than a strategy implies where shards of a window, a `pad` or a concatenation read other
parts of an array than
those in which it lies: it sends halos again in the backward, and moves whole operands to another split and back. It
also counts sums twice for some splits of convolutions. So these operators run in `jax.shard_map`. A device fetches a
window of each operand from those that have it, by permutations of all devices. The transposed permutations return the
gradient. An array is split in another way by the same means, where the compiler would send more (`jpipe.soap.moves`).
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jpipe.soap.moves import Spec, as_entries, boxes_of
from jpipe.soap.products import product_of
from jpipe.soap.regions import Access, DimMap, read_all

PRIMITIVES = frozenset(
    """concatenate conv_general_dilated dot_general dynamic_slice gather pad reduce_window_max reduce_window_min
    reduce_window_sum stack top_k""".split()
)
"""Primitives that can run so."""


@dataclasses.dataclass(frozen=True)
class Fetch:
    """A window of an array for each device.

    Attributes:
      source: the split of the array.
      starts: per device and dim, the begin of its window. A window may reach beyond the array.
      shape: the shape of the windows.
      padding: per dim, the elements that an equation that pads adds before and after the window.
    """

    source: Spec
    starts: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    padding: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Exchange:
    """An equation in which each device computes its part of the result.

    Attributes:
      axes: the axes of the mesh that split the equation or an operand that is fetched.
      operands: per operand a window, or the split in which a device has the part that it reads.
      outputs: the split of each result.
      sums: per result, the axes along which devices have terms of it, and the dim along which a device keeps its part
        of the sum; None: devices have the whole sum.
    """

    axes: tuple[str, ...]
    operands: tuple[Fetch | Spec, ...]
    outputs: tuple[Spec, ...]
    sums: tuple[tuple[tuple[str, ...], int | None], ...]


def window_of(source: Spec, access: Access, loops: np.ndarray) -> Fetch | None:
    """The windows that boxes of loops read, without elements beyond the array along dims that no loop splits.

    Args:
      source: the split of the array.
      access: the boxes of the array that an equation reads. A second step is that of the channels of groups.
      loops: `[devices, loops, 2]`, boxes of equal shapes.

    Returns:
      None if windows differ in shape or padding, or are empty.
    """
    dims = []
    for dim_map, below in zip(access[0], access[-1], strict=True):
        if len(access) > 1 and (dim_map.divisor != 1 or not below.is_plain):
            along = _channels_along(dim_map, below, loops)
        else:
            along = _window_along(dim_map, loops)
        if along is None:
            return None
        dims.append(along)
    starts, shape, padding = zip(*dims) if dims else ((), (), ())
    return Fetch(source, tuple(zip(*starts)), shape, padding)


_Along = tuple[list[int], int, tuple[int, int]]
"""The begins of the devices' windows along one dim, their length, and the padding before and after them."""


def _channels_along(dim_map: DimMap, below: DimMap, loops: np.ndarray) -> _Along | None:
    """The channels of the groups that each device computes, wholly or in part."""
    steps = (dim_map,), (dataclasses.replace(below, dim=0),)
    low, high = read_all(steps, loops)[:, 0].T
    length = int(high[0] - low[0])
    return None if np.any(high - low != length) else (low.tolist(), length, (0, 0))


def _window_along(dim_map: DimMap, loops: np.ndarray) -> _Along | None:
    if dim_map.dim is None:
        return [0] * len(loops), dim_map.size, (0, 0)
    if dim_map.divisor != 1 or dim_map.stride < 1:
        return None
    low, high = loops[:, dim_map.dim, 0], loops[:, dim_map.dim, 1]
    # Among the elements with the holes of a dilation between them.
    begin = low * dim_map.stride + dim_map.offset
    length = int(high[0] - low[0] - 1) * dim_map.stride + dim_map.width
    first = -(-begin // dim_map.dilation)
    last = (begin + length - 1) // dim_map.dilation
    before = first * dim_map.dilation - begin
    if np.all(low == low[0]):
        inside = np.maximum(first, 0), np.minimum(last, dim_map.size - 1)
        before += (inside[0] - first) * dim_map.dilation
        first, last = inside
    size, rest = int(last[0] - first[0]) + 1, int(before[0])
    if size < 1 or np.any(last - first + 1 != size) or np.any(before != rest):
        return None
    return first.tolist(), size, (rest, length - rest - (size - 1) * dim_map.dilation - 1)


class _Round(NamedTuple):
    """A permutation: each device sends at most one message, and gets at most one.

    Attributes:
      shape: the shape of the messages.
      pairs: `(sender, receiver)`. A device may get its own part.
      read: `[devices, rank]`, where the message begins in the sender's part.
      write: `[devices, rank]`, where it begins in the receiver's window.
    """

    shape: tuple[int, ...]
    pairs: list[tuple[int, int]]
    read: np.ndarray
    write: np.ndarray


def _rounds(owned: np.ndarray, wanted: np.ndarray) -> list[_Round]:
    """The permutations by which every device gets its window. A device takes what several have from itself, or from the
    nearest before it.

    Args:
      owned: `[devices, rank, 2]`, the part of the array that each device has.
      wanted: `[devices, rank, 2]`, the window that each device reads.
    """
    count, rank = owned.shape[:2]
    rounds: list[_Round] = []
    busy: list[tuple[set[int], set[int]]] = []  # senders and receivers of each round
    had: list[set[bytes]] = [set() for _ in range(count)]
    for distance, receiver in itertools.product(range(count), repeat=2):
        sender = (receiver - distance) % count
        part = owned[sender].tobytes()
        low = np.maximum(owned[sender, :, 0], wanted[receiver, :, 0])
        lengths = np.minimum(owned[sender, :, 1], wanted[receiver, :, 1]) - low
        if part in had[receiver] or np.any(lengths <= 0):
            continue
        had[receiver].add(part)
        shape = tuple(lengths.tolist())
        for exchange_round, (senders, receivers) in zip(rounds, busy):
            is_free = sender not in senders and receiver not in receivers
            if is_free and exchange_round.shape == shape:
                break
        else:
            exchange_round = _Round(shape, [], *np.zeros((2, count, rank), np.int64))
            senders, receivers = set(), set()
            rounds.append(exchange_round)
            busy.append((senders, receivers))
        senders.add(sender)
        receivers.add(receiver)
        exchange_round.pairs.append((sender, receiver))
        exchange_round.read[sender] = low - owned[sender, :, 0]
        exchange_round.write[receiver] = low - wanted[receiver, :, 0]
    return rounds


def _fetched(part: jax.Array, fetch: Fetch, owned: np.ndarray, axes: tuple[str, ...], fill: Any) -> jax.Array:
    """The window of a device, with `fill` outside of the array. It runs on each device."""
    starts = np.array(fetch.starts)
    wanted = np.stack([starts, starts + np.array(fetch.shape)], axis=-1)
    there = _rounds(owned, wanted)
    back = [_Round(r.shape, [(b, a) for a, b in r.pairs], r.write, r.read) for r in there]
    sizes = owned[:, :, 1].max(axis=0)

    def window_of_part(part: jax.Array, window: jax.Array) -> jax.Array:
        return _sent(part, window, there, axes, is_sum=False)

    def gradients(_: None, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = jnp.zeros(part.shape, part.dtype)
        total = _sent(gradient, total, back, axes, is_sum=True)
        return total, jnp.where(_is_inside(fetch, sizes, axes), 0, gradient)

    window = jnp.full(fetch.shape, fill, part.dtype)
    if not jnp.issubdtype(part.dtype, jnp.inexact):
        return window_of_part(part, window)
    # The derivative rules of JAX make an array of zeros of the part's shape for each message, and add them up.
    differentiable = jax.custom_vjp(window_of_part)
    differentiable.defvjp(lambda *args: (window_of_part(*args), None), gradients)
    return differentiable(part, window)


def _sent(
    source: jax.Array,
    target: jax.Array,
    rounds: Sequence[_Round],
    axes: tuple[str, ...],
    *,
    is_sum: bool,
) -> jax.Array:
    """An array of a device with parts of other devices' arrays, which replace its elements or are added to them."""
    device = lax.axis_index(axes)
    for number, exchange_round in enumerate(rounds):
        if number:  # one message at a time, so that a device holds one at a time
            source, target = lax.optimization_barrier((source, target))
        message = lax.dynamic_slice(source, jnp.asarray(exchange_round.read)[device], exchange_round.shape)
        if any(sender != receiver for sender, receiver in exchange_round.pairs):
            message = lax.ppermute(message, axes, exchange_round.pairs)
        place = jnp.asarray(exchange_round.write)[device]
        present = lax.dynamic_slice(target, place, exchange_round.shape)
        if is_sum:
            message += present
        if len(exchange_round.pairs) < len(exchange_round.read):
            receives = np.zeros(len(exchange_round.read), bool)
            receives[[receiver for _, receiver in exchange_round.pairs]] = True
            message = jnp.where(jnp.asarray(receives)[device], message, present)
        target = lax.dynamic_update_slice(target, message, place)
    return target


def _is_inside(fetch: Fetch, sizes: Sequence[int], axes: tuple[str, ...]) -> jax.Array:
    """A mask of a device's window: true at elements of the array."""
    inside = jnp.ones(fetch.shape, bool)
    for dim, size in enumerate(sizes):
        inside &= _is_inside_along(dim, fetch, size, axes)
    return inside


def _is_inside_along(dim: int, fetch: Fetch, size: int, axes: tuple[str, ...]) -> jax.Array:
    """A mask of a device's window: true where index `dim` is inside of the array."""
    first = jnp.asarray([start[dim] for start in fetch.starts])[lax.axis_index(axes)]
    place = first + lax.broadcasted_iota(first.dtype, fetch.shape, dim)
    return (place >= 0) & (place < size)


def resplit(value: jax.Array, source: Spec, target: Spec, mesh: Mesh) -> jax.Array:
    """An array that lies split over some axes of a mesh, split over the same axes in another way.

    Args:
      value: the array.
      source, target: its split before and after.
      mesh: the devices.
    """
    if jnp.issubdtype(value.dtype, jnp.inexact):
        return _differentiable(value, source, target, mesh)
    return _resplit(value, source, target, mesh)


def _resplit(value: jax.Array, source: Spec, target: Spec, mesh: Mesh) -> jax.Array:
    sizes = _sizes({name for names in source for name in names}, mesh)
    has, wanted = (boxes_of(value.shape, spec, sizes) for spec in (source, target))
    shape = tuple((wanted[0, :, 1] - wanted[0, :, 0]).tolist())
    fetch = Fetch(source, tuple(map(tuple, wanted[:, :, 0].tolist())), shape)
    (moved,) = _on_devices(
        lambda part: [_fetched(part, fetch, has, tuple(sizes), 0)],
        mesh,
        sizes,
        [source],
        [target],
    )(value)
    return moved


_differentiable = jax.custom_vjp(_resplit, nondiff_argnums=(1, 2, 3))
"""Its gradient goes the way back, which needs no sum of what comes from several devices."""
_differentiable.defvjp(
    lambda value, source, target, mesh: (_resplit(value, source, target, mesh), None),
    lambda source, target, mesh, _, gradient: (_resplit(gradient, target, source, mesh),),
)


def fetch_view(
    value: jax.Array,
    fetch: Fetch,
    steps: Sequence[tuple[Any, tuple[int, ...]]],
    target: Spec,
    mesh: Mesh,
) -> jax.Array:
    """A view of an array. Each device makes its part of the view from a window of the array.

    Args:
      value: the array.
      fetch: the windows.
      steps: the equations of the view, and the shape that a device makes by each.
      target: the split of the view, over the same axes as the array.
      mesh: the devices.
    """
    sizes = _sizes({name for names in target for name in names}, mesh)
    has = boxes_of(value.shape, fetch.source, sizes)

    def on_device(part: jax.Array) -> list[jax.Array]:
        window = _fetched(part, fetch, has, tuple(sizes), 0)
        for eqn, shape in steps:
            window = _viewed(eqn, window, shape)
        return [window]

    (viewed,) = _on_devices(on_device, mesh, sizes, [fetch.source], [target])(value)
    return viewed


def _viewed(eqn: Any, window: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A view of a window that has no element but those that the view reads."""
    name, params = eqn.primitive.name, eqn.params
    if name == "transpose":
        return lax.transpose(window, params["permutation"])
    if name == "rev":
        return lax.rev(window, params["dimensions"])
    if name == "slice" and params["strides"] is not None:
        return lax.slice(window, [0] * window.ndim, window.shape, params["strides"])
    return window.reshape(shape)


def _sizes(axes: Collection[str], mesh: Mesh) -> dict[str, int]:
    """Axes in the order of the mesh, and their sizes."""
    return {name: size for name, size in mesh.shape.items() if name in axes}


def bind(eqn: Any, values: Sequence[Any], params: Mapping[str, Any]) -> list:
    """The results of an equation with the values and parameters given."""
    with eqn.ctx.manager:
        if eqn.primitive.name == "dot_general" and not params.get("out_sharding"):
            return [product_of(params, *values)]
        out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]


def _on_devices(
    function: Callable[..., list[jax.Array]],
    mesh: Mesh,
    axes: Iterable[str],
    operands: Sequence[Spec],
    outputs: Sequence[Spec],
) -> Callable[..., list[jax.Array]]:
    """A function of parts of arrays, run on each device. Along other axes of the mesh there are copies, which are left
    to the compiler.
    """
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=tuple(PartitionSpec(*as_entries(spec)) for spec in operands),
        out_specs=[PartitionSpec(*as_entries(spec)) for spec in outputs],
        axis_names=set(axes),
        check_vma=False,  # a result of windows is not known to be the same on several devices
    )


def run(eqn: Any, values: Sequence[jax.Array], exchange: Exchange, mesh: Mesh) -> list[jax.Array]:
    """The results of an equation of one of `PRIMITIVES`, computed device by device.

    Args:
      eqn: the equation.
      values: its operands.
      exchange: the way in which devices compute it.
      mesh: the devices.
    """
    name = eqn.primitive.name
    if name == "stack":
        values = [jnp.expand_dims(value, eqn.params["axis"]) for value in values]
    specs = [e.source if isinstance(e, Fetch) else e for e in exchange.operands]
    shapes = [np.shape(value) for value in values]
    sizes = _sizes(exchange.axes, mesh)
    axes = tuple(sizes)

    def on_device(*parts: jax.Array) -> list[jax.Array]:
        fill = _fill(name, parts)
        operands = [
            _fetched(part, fetch, boxes_of(shape, spec, sizes), axes, fill) if isinstance(fetch, Fetch) else part
            for part, fetch, shape, spec in zip(parts, exchange.operands, shapes, specs)
        ]
        if name in ("concatenate", "stack"):
            dim = eqn.params["dimension" if name == "concatenate" else "axis"]
            lengths = [shape[dim] for shape in shapes]
            return [_joined(operands, exchange, dim, lengths, axes)]
        if name == "dynamic_slice":
            shape = eqn.outvars[0].aval.shape
            part = boxes_of(shape, exchange.outputs[0], sizes)
            return [_sliced(operands, shape, part, lax.axis_index(axes))]
        params = dict(eqn.params)
        if isinstance(exchange.operands[0], Fetch):
            params |= _padding(eqn, exchange.operands[0])
        if params.get("feature_group_count", 1) > 1:
            params["feature_group_count"] = _num_groups(eqn, operands)
        if name == "gather":
            sizes_of_slice = map(min, params["slice_sizes"], parts[0].shape)
            params["slice_sizes"] = tuple(sizes_of_slice)
        results = bind(eqn, operands, params)
        return [_summed(result, *how) for result, how in zip(results, exchange.sums, strict=True)]

    return _on_devices(on_device, mesh, axes, specs, exchange.outputs)(*values)


def _padding(eqn: Any, fetch: Fetch) -> dict[str, Any]:
    """The padding of an equation whose operand is a window."""
    params, padding = eqn.params, fetch.padding
    if eqn.primitive.name == "pad":
        config = zip(padding, params["padding_config"])
        return {"padding_config": tuple((*ends, inside) for ends, (*_, inside) in config)}
    if eqn.primitive.name == "conv_general_dilated":
        dims = params["dimension_numbers"].lhs_spec[2:]
        return {"padding": tuple(padding[dim] for dim in dims)}
    return {"padding": padding} if "padding" in params else {}


def _num_groups(eqn: Any, operands: Sequence[jax.Array]) -> int:
    """Number of groups of channels in a device's part of an image."""
    image, kernel = operands
    dims = eqn.params["dimension_numbers"]
    return image.shape[dims.lhs_spec[1]] // kernel.shape[dims.rhs_spec[1]]


def _summed(result: jax.Array, terms: tuple[str, ...], dim: int | None) -> jax.Array:
    """The sum of the terms that devices have, or a device's part of it along a dim."""
    if dim is not None:
        return lax.psum_scatter(result, terms, scatter_dimension=dim, tiled=True)
    return lax.psum(result, terms) if terms else result


def _sliced(operands: Sequence[Any], whole: Sequence[int], part: np.ndarray, device: jax.Array) -> jax.Array:
    """A device's part of a slice. The device has all of the operand's dims that are sliced.

    Args:
      operands: the operands of a `dynamic_slice`: the device's part of the array, and where the slice begins.
      whole: the shape of the slice.
      part: `[devices, rank, 2]`, the parts of it.
      device: the number of the device.
    """
    operand, *starts = operands
    shape = part[0, :, 1] - part[0, :, 0]
    low = jnp.asarray(part[:, :, 0])[device]
    at = [
        jnp.clip(start, 0, max(have - size, 0)).astype(low.dtype) + first if have > n else jnp.zeros((), low.dtype)
        for start, have, size, n, first in zip(starts, operand.shape, whole, shape.tolist(), low)
    ]
    return lax.dynamic_slice(operand, at, shape.tolist())


def _fill(name: str, parts: Sequence[jax.Array]) -> Any:
    """The fill value of a window outside of the array."""
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
      windows: the windows of all operands, each of the shape of the part.
      exchange: the way in which they were fetched.
      dim: the dim along which operands are joined.
      sizes: the sizes of the operands along it.
      axes: the axes of the mesh.
    """
    joined = windows[0]
    for window, fetch, size in zip(windows[1:], exchange.operands[1:], sizes[1:]):
        assert isinstance(fetch, Fetch)
        joined = jnp.where(_is_inside_along(dim, fetch, size, axes), window, joined)
    return joined
