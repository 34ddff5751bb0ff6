"""Copies of a stage on several devices: sums over them, of gradients and of statistics.

Every copy has run its own microbatches, so its accumulators hold a part of the minibatch's sum. All
copies get the whole sum, bit for bit the same, and then do the same: their weights stay equal. Only
the elements of the stage travel, and only between its copies.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpipe import packing
from jpipe.engine.arrays import Packed
from jpipe.engine.context import TrainingDevice
from jpipe.engine.guard import guarded
from jpipe.lowering.tick_scalars import TickScalars
from jpipe.mesh import STAGE
from jpipe.packing import Place


class _RowRange(NamedTuple):
    """Neighbouring rows of a pool, or elements of a vector."""

    array: str
    start: int
    size: int


def _rows(places: Iterable[tuple[Place, int]]) -> list[_RowRange]:
    """The rows of leaves, in as few blocks as possible.

    Example:
      >>> place = Place("float32", base=2, stride=3, count=2, shape=(3,), flat=True)
      >>> _rows([(place, 1), (place, 0)])
      [_RowRange(array='float32', start=2, size=6)]
    """
    blocks: list[_RowRange] = []
    for place, row in sorted(places, key=lambda p: (p[0].array, p[0].start(p[1]))):
        start, size = int(place.start(row)), place.block[0]
        last = blocks[-1] if blocks else None
        if last and (last.array, last.start + last.size) == (place.array, start):
            blocks[-1] = last._replace(size=last.size + size)
        else:
            blocks.append(_RowRange(place.array, start, size))
    return blocks


def sum_over_copies(device: TrainingDevice, scalars: TickScalars, operation: str, arrays: Packed) -> Packed:
    """Replaces the partial sums of the copies of a stage by the sum over all copies.

    Args:
      device: the device. All devices call this, because the copies of different stages are on
        different ones.
      scalars: the scalars of the tick.
      operation: "update" for gradients, or "commit" for statistics. Stages
        that do not run it in this tick exchange nothing.
      arrays: packed accumulators `[R, ...]`.
    """
    spec = device.spec
    for s, copies in enumerate(spec.lowered.copies):
        places: list[tuple[Place, int]] = [
            (place, row)
            for _, run, row in spec.stages.layer_runs(s)
            for place in (run.gradient_places if operation == "update" else run.statistics)
        ]
        if len(copies) > 1 and places:
            now = scalars.get("copies", operation, s) >= 0
            group = "gradients" if operation == "update" else "statistics"
            add = functools.partial(_sum, device, copies, group, _rows(places))
            arrays = guarded(spec.lowered.target, now, add, arrays, None)
    return arrays


def _sum(
    device: TrainingDevice,
    copies: Sequence[tuple[int, int]],
    group: str,
    blocks: Sequence[_RowRange],
    arrays: Packed,
    _: None,
) -> Packed:
    """The sum over the copies of one stage.

    Args:
      device: the device.
      copies: device of every copy, and position of the stage on it.
      group: the group that has the rows of the arrays.
      blocks: the rows of the stage's accumulators.
      arrays: packed accumulators `[R, ...]`.
    """
    ring = CopyRing.of(device, copies)
    lead = device.lead(group, ring.chunk)

    def start_of(block: _RowRange) -> list[jax.Array]:
        return packing.index(arrays[block.array], [*lead(block.array), block.start])

    values = [
        lax.dynamic_slice(
            arrays[block.array],
            start_of(block),
            (1, block.size, *arrays[block.array].shape[2:]),
            allow_negative_indices=False,
        )
        for block in blocks
    ]
    if device.spec.lowered.target.sums_by_permutes:
        sums = ring.on_members([ring.sum(value) for value in values], values)
    else:
        alone = [[d] for d in range(ring.num_devices) if d not in ring.group]
        sums = lax.psum(values, STAGE, axis_index_groups=[list(ring.group), *alone])
    for block, value in zip(blocks, sums, strict=True):
        array = lax.dynamic_update_slice(arrays[block.array], value, start_of(block), allow_negative_indices=False)
        arrays = {**arrays, block.array: array}
    return arrays


class CopyRing(NamedTuple):
    """The copies of one stage, which exchange by permutes (Patarasuk and Yuan, 2009).

    TPUs have no collectives over groups of unequal sizes. All devices of the axis "stage" call the methods. The
    results on other devices are of no use.

    Attributes:
      group: the device of each copy.
      num_devices: number of devices along the axis "stage".
      rank: int32 `[]`, number of this device among the copies; 0 on other devices.
      chunk: int32 `[]`, position of the stage among the stages of this device; 0 on other devices.
      is_member: bool `[]`, whether this device is one of the copies.
    """

    group: tuple[int, ...]
    num_devices: int
    rank: jax.Array
    chunk: jax.Array
    is_member: jax.Array

    @classmethod
    def of(cls, device: TrainingDevice, copies: Sequence[tuple[int, int]]) -> "CopyRing":
        """The ring of some copies, each `(device, position of the stage on it)`."""
        num_devices = device.spec.schedule.num_devices
        group = tuple(d for d, _ in copies)
        rank, chunk = np.zeros((2, num_devices), np.int32)
        rank[list(group)] = np.arange(len(group))
        chunk[list(group)] = [c for _, c in copies]
        return cls(
            group,
            num_devices,
            jnp.asarray(rank)[device.position],
            jnp.asarray(chunk)[device.position],
            jnp.isin(device.position, np.array(group)),
        )

    def scatter(self, part: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Returns the sum over the copies of part `rank`. Each copy sends r - 1 of r parts.

        Args:
          part: number below r -> that part of the device's value.
        """
        r = len(self.group)
        total = part((self.rank - 1) % r)
        for i in range(2, r + 1):
            total = self._to_next(total) + part((self.rank - i) % r)
        return total

    def gather(self, part: jax.Array) -> jax.Array:
        """Returns the parts of all copies, `[r, ...]`. Each copy sends r - 1 of r parts."""
        r = len(self.group)
        parts = jnp.zeros((r, *part.shape), part.dtype)
        for i in range(r):
            number = (self.rank - i) % r
            parts = lax.dynamic_update_index_in_dim(parts, part, number, 0)
            if i < r - 1:
                part = self._to_next(part)
        return parts

    def sum(self, value: jax.Array) -> jax.Array:
        """Returns the sum over the copies, bit for bit the same on all of them."""
        r, size = len(self.group), value.size
        parts = jnp.pad(value.ravel(), (0, -size % r)).reshape(r, -1)
        total = self.scatter(lambda number: lax.dynamic_index_in_dim(parts, number, keepdims=False))
        return self.gather(total).ravel()[:size].reshape(value.shape)

    def on_members(self, new: Sequence[jax.Array], old: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns new values on the copies, and old ones on other devices."""
        return [jnp.where(self.is_member, a, b) for a, b in zip(new, old, strict=True)]

    def _to_next(self, value: jax.Array) -> jax.Array:
        r = len(self.group)
        to_next = [(d, self.group[(i + 1) % r]) for i, d in enumerate(self.group)]
        return lax.ppermute(value, STAGE, to_next)
