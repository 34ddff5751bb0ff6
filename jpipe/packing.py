"""Leaves of many shapes in few arrays, the same arrays on every device.

In a single program for many devices every device holds arrays of the same shapes, though one stage has
an embedding and another a head. A `Packing` gives each *owner* (a stage's program, a message) a place for
each of its leaves in

- *pools*, one array `[n, *shape]` a (shape, dtype): leaf i of the pool is row i. Right for what most stages have;
- *flat* vectors, one `[size]` a dtype: right for leaves whose pool would be mostly padding.

A leaf that is split over an automatic axis of the mesh (tensor parallelism) has a *spec*, for each of its dims the
axis, or axes, it is split over, or None. Leaves of one spec share a pool, which is split as they are; never a vector.

Every device holds the largest owner's share of each array; `Packing.used_bytes` says what of it is used.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec


class Leaf(NamedTuple):
    """What an owner has: `count` equal leaves, and how each is split; `()` leaves it to the compiler."""

    aval: jax.ShapeDtypeStruct
    count: int = 1
    spec: tuple = ()


def _stored(shape: tuple[int, ...], spec: tuple) -> tuple[int, ...]:
    """The shape of a pool's row: without dims of 1, the last dims joined up to 128; as it is if it may be split.

    TPUs lay the last two dims of an array out in tiles of 8 by 128 numbers, so `[256, 4, 64]` would take four times the
    space of `[256, 256]`, and `[256, 1]` 128 times that of `[256]`.
    """
    if spec:
        return shape
    found = [n for n in shape if n > 1]
    while len(found) > 1 and found[-1] < 128:
        found[-2:] = [found[-2] * found[-1]]
    return tuple(found)


def array_bytes(shape: Sequence[int], dtype, platform: str) -> int:
    """What an array takes of a device's memory; TPUs fill up its last two dims to tiles of 8 by 128 numbers.

    Example:
      >>> array_bytes([12, 1000], np.float32, "cpu"), array_bytes([12, 1000], np.float32, "tpu")
      (48000, 65536)
    """
    dims, size = list(shape), np.dtype(dtype).itemsize
    if platform == "tpu" and len(dims) > 1:
        few = 1 << max(dims[-2] - 1, 0).bit_length()  # fewer rows get smaller tiles
        tile = (min(8, few), 128)
        dims[-2:] = [-(-n // t) * t for n, t in zip(dims[-2:], tile)]
    return math.prod(dims) * size


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a leaf, or a run of `count` equal leaves, lies: rows `base + i` of a pool, or `base + i * size` of a vector."""

    array: str
    base: int
    count: int
    shape: tuple[int, ...]
    flat: bool
    spec: tuple = ()

    def start(self, i=0):
        """The first index of leaf i."""
        return self.base + i * math.prod(self.shape) if self.flat else self.base + i

    @property
    def block(self) -> tuple[int, ...]:
        """The leaf's shape inside its array."""
        if self.flat:
            return (math.prod(self.shape),)
        return (1, *_stored(self.shape, self.spec))


@dataclasses.dataclass(frozen=True)
class Packing:
    """Arrays that hold the leaves of any one owner.

    Attributes:
      arrays: name -> shape and dtype: `[n, *shape]` for pools, `[size]` for vectors.
      places: for each owner, for each of its leaves, its `Place`.
      used_bytes: for each owner, the bytes of its leaves.
      specs: name -> how the leaves of a pool are split, for pools whose leaves are.
    """

    arrays: Mapping[str, jax.ShapeDtypeStruct]
    places: Sequence[Sequence[Place]]
    used_bytes: Sequence[int]
    specs: Mapping[str, tuple] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        owners: Sequence[Sequence[Leaf | tuple]],
        occupancy: float = 0.5,
        num_stages: Sequence[int] | None = None,
    ) -> "Packing":
        """Packs for each owner a list of `Leaf`, or `(aval, count)`.

        Args:
          owners: the leaves of each owner; `count` equal leaves are laid one after the other.
          occupancy: a (shape, dtype) is pooled if on average over the stages at least this share of the pool is used,
            and always if its leaves are split.
          num_stages: how many stages each owner stands for; None: one.
        """
        owners = [[Leaf(*leaf) for leaf in leaves] for leaves in owners]
        weights = np.ones(len(owners)) if num_stages is None else np.array(num_stages)
        counts: dict = collections.defaultdict(lambda: [0] * len(owners))
        for o, leaves in enumerate(owners):
            for aval, count, spec in leaves:
                counts[tuple(aval.shape), np.dtype(aval.dtype), spec][o] += count
        pooled = {
            key
            for key, n in counts.items()
            if any(key[2]) or weights @ n >= occupancy * weights.sum() * max(n)
        }
        sizes: dict = collections.defaultdict(int)
        dtypes, places, used, specs = {}, [], [], {}
        for leaves in owners:
            next_free: dict = collections.defaultdict(int)
            mine = []
            for aval, count, spec in leaves:
                shape, dtype = tuple(aval.shape), np.dtype(aval.dtype)
                flat = (shape, dtype, spec) not in pooled
                name = f"{dtype}" if flat else f"{dtype}{list(shape)}"
                if any(spec):
                    name += f" split {list(spec)}"
                    specs[name] = spec
                dtypes[name] = (() if flat else _stored(shape, spec), dtype)
                mine.append(Place(name, next_free[name], count, shape, flat, spec))
                next_free[name] += count * (math.prod(shape) if flat else 1)
            places.append(tuple(mine))
            used.append(
                sum(
                    count * math.prod(aval.shape) * np.dtype(aval.dtype).itemsize
                    for aval, count, _ in leaves
                )
            )
            for name, size in next_free.items():
                sizes[name] = max(sizes[name], size)
        arrays = {
            name: jax.ShapeDtypeStruct((sizes[name], *dtypes[name][0]), dtypes[name][1])
            for name in sorted(sizes)
        }
        return cls(arrays, tuple(places), tuple(used), specs)

    @property
    def num_bytes(self) -> int:
        """Bytes of one copy of the arrays: what every device holds."""
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in self.arrays.values())


def axes(spec: tuple) -> list[str]:
    """The axes of the mesh that a spec names."""
    dims = [(names,) if isinstance(names, str) else names or () for names in spec]
    return [name for names in dims for name in names]


def _row_major(block: jax.Array) -> jax.Array:
    """`block`, laid out with its last dim innermost on TPUs, and so the array it is read from or written to.

    Each branch of a `cond` would choose a layout of its own for the array, and copy the whole of it at every tick.
    """
    layout = Layout(tuple(range(block.ndim)))
    return lax.platform_dependent(
        block,
        tpu=lambda block: with_layout_constraint(block, layout),
        default=lambda block: block,
    )


def read(
    arrays: Mapping[str, jax.Array], place: Place, lead: Sequence, i=0
) -> jax.Array:
    """Leaf i at `place`, of arrays with leading axes indexed by `lead`."""
    array, start = arrays[place.array], _start(arrays, place, lead, i)
    sizes = [1] * len(lead) + list(place.block)
    block = lax.dynamic_slice(array, start, sizes, allow_negative_indices=False)
    block = _row_major(block)
    return _split_as(place, block.reshape(place.shape))


def write(
    arrays: Mapping[str, jax.Array], place: Place, lead: Sequence, value: jax.Array, i=0
) -> dict:
    """The arrays with leaf i at `place` replaced."""
    array, start = arrays[place.array], _start(arrays, place, lead, i)
    block = _split_as(place, value).reshape([1] * len(lead) + list(place.block))
    block = _row_major(block)
    array = lax.dynamic_update_slice(array, block, start, allow_negative_indices=False)
    return {**arrays, place.array: array}


def add(
    arrays: Mapping[str, jax.Array], place: Place, lead: Sequence, value: jax.Array, i=0
) -> dict:
    """The arrays with `value` added to leaf i at `place`."""
    return write(arrays, place, lead, read(arrays, place, lead, i) + value, i)


def read_all(arrays, places: Sequence[Place], lead: Sequence, i=0) -> list[jax.Array]:
    """`read` of every place."""
    return [read(arrays, p, lead, i) for p in places]


def write_all(
    arrays, places: Sequence[Place], lead: Sequence, values: Sequence[jax.Array], i=0
) -> dict:
    """`write` of every place."""
    for place, value in zip(places, values, strict=True):
        arrays = write(arrays, place, lead, value, i)
    return arrays


def _split_as(place: Place, value: jax.Array) -> jax.Array:
    """Tells the compiler how a leaf is split. Only inside a `shard_map`, whose mesh has the axes."""
    if not place.spec:
        return value
    return lax.with_sharding_constraint(value, PartitionSpec(*place.spec))


def _start(arrays, place: Place, lead: Sequence, i) -> list:
    """The first indices of leaf i at `place`; none is negative."""
    rest = arrays[place.array].ndim - len(lead) - 1
    return [jnp.asarray(j, jnp.int32) for j in (*lead, place.start(i), *[0] * rest)]
