"""Copies of a stage on several devices: sums over them, of gradients and of statistics.

Every copy has run its own microbatches, so its accumulators hold a part of the minibatch's sum. All
copies get the whole sum, bit for bit the same, and then do the same: their weights stay equal. Only
the elements of the stage travel, and only between its copies.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpipe.engine.arrays import Packed
from jpipe.engine.context import Device
from jpipe.engine.guard import guarded
from jpipe.lowering.scalars import TickScalars
from jpipe.mesh import STAGE
from jpipe.packing import Place

IN_A_RING = ("tpu",)
"""The platforms that add by permutes: see `ring_sum`."""


class _Rows(NamedTuple):
    """Neighbouring rows of a pool, or elements of a vector."""

    array: str
    start: int
    size: int


def _rows(places: Iterable[tuple[Place, int]]) -> list[_Rows]:
    """The rows of leaves, as few blocks.

    Example:
      >>> place = Place("float32", base=2, stride=3, count=2, shape=(3,), flat=True)
      >>> _rows([(place, 1), (place, 0)])
      [_Rows(array='float32', start=2, size=6)]
    """
    blocks: list[_Rows] = []
    for place, row in sorted(places, key=lambda p: (p[0].array, p[0].start(p[1]))):
        start, size = int(place.start(row)), place.block[0]
        last = blocks[-1] if blocks else None
        if last and (last.array, last.start + last.size) == (place.array, start):
            blocks[-1] = last._replace(size=last.size + size)
        else:
            blocks.append(_Rows(place.array, start, size))
    return blocks


def sum_over_copies(
    device: Device, scalars: TickScalars, operation: str, arrays: Packed
) -> Packed:
    """Replaces what the copies of a stage have added up by the sum over all copies.

    Args:
      device: the device. All devices call this, because the copies of different stages are on
        different ones.
      scalars: of the tick.
      operation: "update", and `arrays` are gradients, or "commit", and they are statistics. Stages
        that do not run it in this tick exchange nothing.
      arrays: packed accumulators `[R, ...]`.
    """
    spec = device.spec
    for s, copies in enumerate(spec.lowered.copies):
        places = [
            (place, row)
            for _, run, row in spec.stages.layer_runs(s)
            for place in (run.parameters if operation == "update" else run.state)
        ]
        if len(copies) > 1 and places:
            now = scalars.get("copies", operation, s) >= 0
            add = functools.partial(_sum, device, copies, _rows(places))
            arrays = guarded(spec.lowered.guard, now, add, arrays, None)
    return arrays


def _sum(
    device: Device,
    copies: Sequence[tuple[int, int]],
    blocks: Sequence[_Rows],
    arrays: Packed,
    _: None,
) -> Packed:
    """The sum over the copies of one stage.

    Args:
      device: the device.
      copies: device and position of the stage on it, for every copy.
      blocks: where the stage's accumulators are.
      arrays: packed accumulators `[R, ...]`.
    """
    num_devices = device.spec.schedule.num_devices
    chunk_of_device = np.zeros(num_devices, np.int32)
    for d, chunk in copies:
        chunk_of_device[d] = chunk
    chunk_here = jnp.asarray(chunk_of_device)[device.position]
    group = [d for d, _ in copies]

    def start_of(block: _Rows) -> list[jax.Array]:
        zeros = [jnp.int32(0)] * (arrays[block.array].ndim - 2)
        return [chunk_here, jnp.int32(block.start), *zeros]

    values = [
        lax.dynamic_slice(
            arrays[block.array],
            start_of(block),
            (1, block.size, *arrays[block.array].shape[2:]),
            allow_negative_indices=False,
        )
        for block in blocks
    ]
    if device.spec.mesh.devices.flat[0].platform in IN_A_RING:
        sums = ring_sum(values, group, num_devices, device.position)
    else:
        alone = [[d] for d in range(num_devices) if d not in group]
        sums = lax.psum(values, STAGE, axis_index_groups=[group, *alone])
    for block, value in zip(blocks, sums, strict=True):
        array = lax.dynamic_update_slice(
            arrays[block.array], value, start_of(block), allow_negative_indices=False
        )
        arrays = {**arrays, block.array: array}
    return arrays


def ring_sum(
    values: Sequence[jax.Array],
    group: Sequence[int],
    num_devices: int,
    position: jax.Array,
) -> list[jax.Array]:
    """Sums over a group of devices, by permutes; bit for bit the same on all of them.

    TPUs have no sum over groups of unequal sizes. Each device sends 2 (r - 1) / r of the values to its
    neighbour in the ring of r devices (Patarasuk and Yuan, 2009): first each device gets the sum of one of
    r parts, and then all devices get all parts.

    Args:
      values: arrays of each device of the axis "stage".
      group: the devices whose values are added. Others keep their values.
      num_devices: along the axis "stage".
      position: this device.
    """
    r = len(group)
    to_next = [(d, group[(i + 1) % r]) for i, d in enumerate(group)]
    rank_of_device = np.zeros(num_devices, np.int32)
    rank_of_device[list(group)] = np.arange(r)
    rank = jnp.asarray(rank_of_device)[position]
    is_in_group = jnp.isin(position, np.array(group))

    def summed(value: jax.Array) -> jax.Array:
        size = value.size
        parts = jnp.pad(value.ravel(), (0, -size % r)).reshape(r, -1)

        def part(number: jax.Array) -> jax.Array:
            return lax.dynamic_index_in_dim(parts, number % r, keepdims=False)

        total = part(rank)
        for i in range(1, r):
            total = lax.ppermute(total, STAGE, to_next) + part(rank - i)
        sums = jnp.zeros_like(parts)
        for i in range(r):
            number = (rank + 1 - i) % r
            sums = lax.dynamic_update_index_in_dim(sums, total, number, 0)
            if i < r - 1:
                total = lax.ppermute(total, STAGE, to_next)
        sums = sums.ravel()[:size].reshape(value.shape)
        return jnp.where(is_in_group, sums, value)

    return [summed(value) for value in values]
