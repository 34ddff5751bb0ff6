"""Leaves of many shapes in few arrays of fixed shapes.

One program runs on all devices, so every device holds arrays of the same shapes, although one stage
has an embedding and another stage has a head. A `Packing` gives each *owner* (a stage's program, a
message) a place for each of its leaves in

- *pools*: one array `[n, *shape]` per shape and dtype. Row i is leaf i. Pools suit leaves that most
  stages have.
- *flat vectors*: one array `[size]` per dtype. Vectors suit leaves whose pool would be mostly
  padding. Pools add up the most leaves of each shape over the owners, and a vector the most of all
  together, so a vector has no padding if owners are equal in bytes but not in shapes.

A leaf that is split over automatic axes of the mesh (tensor parallelism) has a *spec*: for each of
its dims the axis or axes that it is split over, or None. Leaves of one spec share a pool, which is
split in the same way. Vectors hold no leaves with a spec.

A leaf without elements needs no room: it has a place in no array.

A leaf may lie in the memory of the host, always in a pool. A large one is cut into equal *chunks*, each one row of the
pool. `read` brings the leaf at a place to the device, and `write` takes it back.

Every device allocates each array for its largest owner. `Packing.used_bytes` says how many bytes an
owner uses.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

CHUNK = 1 << 20
"""The most numbers of a weight that an update brings to the device at once, if they can be cut so."""

MOST_PADDING = 1 / 8
"""The part of an array's bytes that `Packing.of(tight=True)` gives up pools for: what the average stage does not
use.
"""


_LONGEST = 2**31 - 1
"""The most numbers of a vector, which indices of int32 count."""

Lead = Sequence | Callable[[str], Sequence]
"""The indices of the leading axes of packed arrays: equal for all, or a function of the array's name."""


class Leaf(NamedTuple):
    """`count` equal leaves of an owner.

    Attributes:
      aval: shape and dtype of one leaf.
      count: number of leaves.
      spec: the split of each leaf over automatic axes; `()` leaves that to the compiler.
      in_vector: whether the leaf is in a vector. The leaves of other owners do not matter then.
      vector: the number of the vector that the leaf is in, if it is in one. An update writes a vector in place if it
        changes all of it at once, so the moments of one weight are in vectors of their own.
      on_host: whether the leaf is in host memory, and then in a pool.
      chunk: the most numbers of a chunk, if the leaf is in host memory.
      read_in_parts: the axes over which those who read the leaf take it in parts, so it is never gathered along them.
    """

    aval: jax.ShapeDtypeStruct
    count: int = 1
    spec: tuple = ()
    in_vector: bool = False
    on_host: bool = False
    chunk: int = CHUNK
    vector: int = 0
    read_in_parts: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True if the leaf has no elements."""
        return math.prod(self.aval.shape) == 0


def _stored(shape: tuple[int, ...], spec: tuple, on_host: bool) -> tuple[int, ...]:
    """Returns the shape of a pool's row, for a leaf of this shape.

    TPUs store the last two dims of an array in tiles of 8 by 128 numbers: `[256, 4, 64]` would take
    four times the space of `[256, 256]`, and `[256, 1]` 128 times the space of `[256]`. So a row
    has no dims of 1, and its last dims are joined until the last has at least 128 numbers. The
    shape of a leaf with a spec is kept, because its dims may be split. Between host and device TPUs move
    whole tiles, so a row in host memory has two dims or more.
    """
    if spec:
        return shape
    dims = [n for n in shape if n > 1]
    while len(dims) > 1 and dims[-1] < 128:
        dims[-2:] = [dims[-2] * dims[-1]]
    if on_host:
        dims = [*[1] * (2 - len(dims)), *dims]
    return tuple(dims)


def _cut(row: tuple[int, ...], number: int) -> tuple[int, ...]:
    """The shape of one of `number` equal parts of a row, see `num_chunks`."""
    axis = 0
    while number > 1 and number >= row[axis]:
        number //= row[axis]
        axis += 1
    return (row[axis] // number, *row[axis + 1 :]) if number > 1 else row[axis:]


def num_chunks(row: tuple[int, ...], chunk: int = CHUNK) -> int:
    """The number of chunks of a leaf in host memory that a pool would store as a row of this shape.

    A chunk has whole rows of tiles, so that it is also one block of the leaf on the device, and at most `chunk`
    numbers if the dims can be divided so.

    Example:
      >>> num_chunks((4096, 4096)), num_chunks((3, 3, 512, 512)), num_chunks((1, 4096))
      (16, 3, 1)
    """
    num_blocks = before = 1
    for axis, size in enumerate(row[:-1]):
        for divisor in range(1, size + 1):
            rows = size // divisor
            if size % divisor or (axis == len(row) - 2 and divisor > 1 and rows % 8):
                continue
            num_blocks = before * divisor
            if math.prod(row) <= num_blocks * chunk:
                return num_blocks
        before *= size
    return num_blocks


def array_bytes(shape: Sequence[int], dtype, platform: str) -> int:
    """Bytes of an array in a device's memory.

    TPUs pad the last two dims of an array to tiles of 8 by 128 numbers.

    Args:
      shape: shape of the array.
      dtype: dtype of the array.
      platform: the platform, such as "cpu" or "tpu".

    Example:
      >>> array_bytes([12, 1000], np.float32, "cpu"), array_bytes([12, 1000], np.float32, "tpu")
      (48000, 65536)
    """
    dims, size = list(shape), np.dtype(dtype).itemsize
    if platform == "tpu" and len(dims) > 1:
        # Arrays with fewer than 8 rows get smaller tiles.
        tile_rows = min(8, 1 << max(dims[-2] - 1, 0).bit_length())
        tile = (tile_rows, 128)
        dims[-2:] = [-(-n // t) * t for n, t in zip(dims[-2:], tile)]
    return math.prod(dims) * size


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a run of `count` equal leaves.

    Leaf i begins at index `base + i * stride`: it is one row of a pool, or `size` numbers of a vector.

    Attributes:
      array: name of the array.
      base: first index of leaf 0.
      stride: number of indices from one leaf to the next.
      count: number of leaves.
      shape: shape of a leaf.
      flat: whether the array is a vector.
      spec: see `Leaf`.
      on_host: see `Leaf`.
      num_rows: number of rows of a pool that a leaf takes: its chunks.
      split: number of rows into which each row of the pool is cut; indices count these. Above 1 for a place of a chunk.
      empty: the dtype of a leaf without elements, which is in no array; None for others.
      read_in_parts: see `Leaf`.
    """

    array: str
    base: int
    stride: int
    count: int
    shape: tuple[int, ...]
    flat: bool
    spec: tuple = ()
    on_host: bool = False
    num_rows: int = 1
    split: int = 1
    empty: np.dtype | None = None
    read_in_parts: tuple[str, ...] = ()

    def start(self, i: jax.Array | int = 0) -> jax.Array | int:
        """The first index of leaf i."""
        return self.base + i * self.stride

    @property
    def step(self) -> int:
        """The stride, 0 if there is one leaf."""
        return self.stride if self.count > 1 else 0

    def alone(self, i: int) -> "Place":
        """The place of leaf i as the first of a run, whose leaves follow one another at the next indices."""
        return dataclasses.replace(self, base=int(self.start(i)), stride=1, count=1)

    @property
    def block(self) -> tuple[int, ...]:
        """The leaf's shape inside its array."""
        if self.flat:
            return (math.prod(self.shape),)
        row = _stored(self.shape, self.spec, self.on_host)
        return (self.num_rows, *_cut(row, self.num_rows))

    def chunk(self, i: jax.Array | int, number: int, num_chunks: int) -> "Place":
        """The place of chunk `number` of leaf i, a matrix or an array of more dims."""
        shape = _cut(_stored(self.shape, self.spec, True), num_chunks)
        start: Any = self.start(i)
        if self.flat:
            start += number * math.prod(shape)
            return Place(self.array, start, 0, 1, shape, flat=True)
        if self.num_rows > 1:
            return Place(self.array, start + number, 0, 1, shape, False, (), self.on_host)
        start = start * num_chunks + number
        return Place(self.array, start, 0, 1, shape, flat=False, split=num_chunks)

    def rows_of(self, array: jax.Array, num_leading: int) -> jax.Array:
        """The array with the rows that the indices of the place count, after its leading axes."""
        if self.split == 1:
            return array
        lead, row = array.shape[: num_leading + 1], array.shape[num_leading + 1 :]
        cut = _cut(row, self.split)
        return array.reshape(*lead[:-1], lead[-1] * self.split, *cut)


@dataclasses.dataclass(frozen=True)
class Packing:
    """Arrays that can hold the leaves of any one owner.

    Attributes:
      arrays: name -> shape and dtype: `[n, *shape]` for pools, `[size]` for vectors.
      places: the `Place` of each leaf of each owner.
      used_bytes: bytes of the leaves of each owner.
      specs: name -> spec of the leaves, for pools whose leaves are split.
      on_host: the names of the arrays in host memory.
      constant: the names of the arrays that never change, of frozen weights.
    """

    arrays: Mapping[str, jax.ShapeDtypeStruct]
    places: Sequence[Sequence[Place]]
    used_bytes: Sequence[int]
    specs: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    on_host: frozenset[str] = frozenset()
    constant: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        owners: Sequence[Sequence[Leaf | tuple]],
        occupancy: float = 0.5,
        devices: Sequence[Sequence[int]] | None = None,
        tight: bool = False,
    ) -> "Packing":
        """Packs the leaves of each owner.

        Args:
          owners: a list of `Leaf` or `(aval, count)` for each owner. Leaves of one count that follow
            each other in the list belong together: leaf 0 of all of them is stored first, then leaf
            1. So the values that a layer writes lie side by side.
          occupancy: a shape and dtype gets a pool if, on average over the devices, at least this
            fraction of the pool's rows is used. Leaves that are split or in host memory always get a pool.
          devices: the device of each stage that an owner stands for, for each owner. An array has rows for the
            stages of a device that use it: see `jpipe.lowering.array_rows`. None: every owner is one stage,
            on a device of its own.
          tight: whether more leaves go into vectors if that brings padding within `MOST_PADDING`. For
            arrays that are large and live long, such as weights: a leaf of a vector is laid out anew
            on TPUs whenever it is read. The leaves that most stages have come first, so that they lie at the same
            indices in all of these.
        """
        leaves_of_owners = [[Leaf(*leaf) for leaf in leaves] for leaves in owners]
        stages = _StageCounts.of([[o] for o in range(len(owners))] if devices is None else devices)
        counts: dict = collections.defaultdict(lambda: [0] * len(owners))
        in_vectors: dict = collections.defaultdict(lambda: [0] * len(owners))
        for o, leaves in enumerate(leaves_of_owners):
            for leaf in leaves:
                if not leaf.in_vector and not leaf.is_empty:
                    counts[_key(leaf)][o] += leaf.count
                    in_vectors[leaf.vector, _key(leaf)][o] += leaf.count
        pooled = {
            key
            for key, n in counts.items()
            if any(key[2]) or key[3] or stages.used(n) >= occupancy * stages.allocated(n)
        }
        if tight:
            pooled = _tightened(pooled, counts, stages)
        pooled = _with_short_vectors(pooled, in_vectors)
        sizes: dict = collections.defaultdict(int)
        dtypes, places, used, specs, on_host = {}, [], [], {}, set()
        groups_of_owners = list(map(_groups, leaves_of_owners))
        if tight:
            groups_of_owners = _shared_first(leaves_of_owners, groups_of_owners, stages.number.sum(axis=1).tolist())
        for leaves, groups in zip(leaves_of_owners, groups_of_owners, strict=True):
            next_free: dict = collections.defaultdict(int)
            place_of_leaf: dict[int, Place] = {}
            for group in groups:
                count = leaves[group[0]].count
                used_together: dict = collections.Counter()
                for number in group:
                    leaf = leaves[number]
                    shape, dtype, spec, chunk = key = _key(leaf)
                    if leaf.is_empty:
                        place_of_leaf[number] = Place("", 0, 0, count, shape, True, empty=dtype)
                        continue
                    is_on_host = chunk > 0
                    assert not (leaf.in_vector and is_on_host)
                    flat = leaf.in_vector or key not in pooled
                    name = f"{dtype}" if flat else f"{dtype}{list(shape)}"
                    if flat and leaf.vector:
                        name += f" {leaf.vector}"
                    if any(spec):
                        name += f" split {list(spec)}"
                    if is_on_host:
                        name = f"host {name}"
                        on_host.add(name)
                    if any(spec):
                        specs[name] = spec
                    row = () if flat else _stored(shape, spec, is_on_host)
                    rows = 1
                    if is_on_host and not any(spec):
                        rows = num_chunks(row, chunk)
                        row = _cut(row, rows)
                    dtypes[name] = row, dtype
                    base = next_free[name] + used_together[name]
                    place = Place(name, base, 0, count, shape, flat, spec, is_on_host, rows)
                    place_of_leaf[number] = dataclasses.replace(place, read_in_parts=leaf.read_in_parts)
                    used_together[name] += math.prod(shape) if flat else rows
                for number in group:
                    place = place_of_leaf[number]
                    place_of_leaf[number] = dataclasses.replace(place, stride=used_together[place.array])
                for name, stride in used_together.items():
                    next_free[name] += count * stride
            places.append(tuple(place_of_leaf[number] for number in range(len(leaves))))
            used.append(
                sum(count * math.prod(aval.shape) * np.dtype(aval.dtype).itemsize for aval, count, *_ in leaves)
            )
            for name, size in next_free.items():
                sizes[name] = max(sizes[name], size)
        arrays = {
            name: jax.ShapeDtypeStruct((sizes[name], *dtypes[name][0]), dtypes[name][1]) for name in sorted(sizes)
        }
        return cls(arrays, tuple(places), tuple(used), specs, frozenset(on_host))

    def named(self, prefix: str) -> "Packing":
        """Prefixes the names of the arrays with `prefix`, so that they can lie beside those of other packings."""

        def renamed(place: Place) -> Place:
            return dataclasses.replace(place, array=f"{prefix} {place.array}")

        return dataclasses.replace(
            self,
            arrays={f"{prefix} {name}": a for name, a in self.arrays.items()},
            places=tuple(tuple(map(renamed, places)) for places in self.places),
            specs={f"{prefix} {name}": spec for name, spec in self.specs.items()},
            on_host=frozenset(f"{prefix} {name}" for name in self.on_host),
        )

    def with_constants(self, other: "Packing") -> "Packing":
        """Joins the leaves of another packing of the same owners, in arrays of other names that never change."""
        both = self.beside([other])
        pairs = zip(self.places, other.places, strict=True), zip(self.used_bytes, other.used_bytes, strict=True)
        return dataclasses.replace(
            both,
            places=tuple((*mine, *theirs) for mine, theirs in pairs[0]),
            used_bytes=tuple(mine + theirs for mine, theirs in pairs[1]),
            constant=both.constant | other.arrays.keys(),
        )

    def beside(self, others: Iterable["Packing"]) -> "Packing":
        """Joins the arrays and the owners of other packings, whose arrays have other names."""
        packings = [self, *others]
        return Packing(
            {name: a for pack in packings for name, a in pack.arrays.items()},
            tuple(places for pack in packings for places in pack.places),
            tuple(used for pack in packings for used in pack.used_bytes),
            {name: spec for pack in packings for name, spec in pack.specs.items()},
            frozenset().union(*(pack.on_host for pack in packings)),
            frozenset().union(*(pack.constant for pack in packings)),
        )

    @property
    def row_bytes(self) -> dict[str, int]:
        """Name -> bytes of the array, or of one of its rows if it has several."""
        return {name: math.prod(a.shape) * a.dtype.itemsize for name, a in self.arrays.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays, with one row each."""
        return sum(self.row_bytes.values())


def _key(leaf: Leaf) -> tuple[tuple[int, ...], np.dtype, tuple, int]:
    """The key of a pool: the facts that its leaves share. The last is the chunk, 0 on the device."""
    chunk = leaf.chunk if leaf.on_host else 0
    return tuple(leaf.aval.shape), np.dtype(leaf.aval.dtype), leaf.spec, chunk


def _groups(leaves: Sequence[Leaf]) -> list[list[int]]:
    """The numbers of the leaves of an owner that lie together: neighbours of one count."""
    groups = itertools.groupby(range(len(leaves)), lambda number: leaves[number].count)
    return [list(group) for _, group in groups]


def _shared_first(
    leaves_of_owners: Sequence[Sequence[Leaf]], groups_of_owners: Sequence[list[list[int]]], num_stages: Sequence[int]
) -> list[list[list[int]]]:
    """The groups of each owner, those that most stages have first. Leaves of count 1 are groups by themselves.

    Args:
      leaves_of_owners: the leaves.
      groups_of_owners: the numbers of the leaves of each group.
      num_stages: the number of stages that each owner stands for.
    """
    named: list[list[tuple]] = []
    holders: collections.Counter = collections.Counter()
    for leaves, groups, number in zip(leaves_of_owners, groups_of_owners, num_stages, strict=True):
        before: collections.Counter = collections.Counter()
        named.append([])
        for group in groups:
            for part in [group] if leaves[group[0]].count > 1 else [[n] for n in group]:
                keys = tuple(_key(leaves[n]) for n in part)
                name = keys, before[keys]
                before[keys] += 1
                holders[name] += number
                named[-1].append((name, part))
    return [[part for _, part in sorted(owner, key=lambda item: -holders[item[0]])] for owner in named]


class _StageCounts(NamedTuple):
    """Number of stages of each owner on each device.

    Attributes:
      number: int `[owners, devices]`.
    """

    number: np.ndarray

    @classmethod
    def of(cls, devices: Sequence[Sequence[int]]) -> "_StageCounts":
        """Counts the stages, from the device of each stage of each owner."""
        number_of_devices = 1 + max(map(max, filter(None, devices)), default=0)
        number = [np.bincount(np.array(owner_devices, int), minlength=number_of_devices) for owner_devices in devices]
        return cls(np.array(number).reshape(len(devices), number_of_devices))

    def used(self, sizes: Sequence[int]) -> int:
        """Elements of an array that all stages use, from the size that each owner uses."""
        return int(np.sum(sizes @ self.number))

    def allocated(self, sizes: Sequence[int]) -> int:
        """Elements that all devices allocate for it: equal rows, for as many stages as use it on any one device."""
        rows = (np.greater(sizes, 0) @ self.number).max()
        return int(self.number.shape[1] * rows * max(sizes))


def _tightened(pooled: set, counts: Mapping, stages: _StageCounts) -> set:
    """The pools that remain if padding is to be at most `MOST_PADDING`; all, if that cannot be reached.

    Args:
      pooled: `_key` of the leaves that have pools.
      counts: `_key` of all leaves -> number of them that each owner has.
      stages: the stages of the owners.
    """
    num_bytes = {key: math.prod(key[0]) * key[1].itemsize * np.array(n) for key, n in counts.items()}
    used = sum(map(stages.used, num_bytes.values()))

    def padding(pools: set) -> float:
        vectors: dict = collections.defaultdict(int)
        allocated = 0
        for key, owner_bytes in num_bytes.items():
            if key in pools:
                allocated += stages.allocated(owner_bytes)
            else:
                vectors[key[1]] = vectors[key[1]] + owner_bytes
        allocated += sum(map(stages.allocated, vectors.values()))
        return 1 - used / max(allocated, 1)

    def waste(key: tuple) -> int:
        return stages.allocated(num_bytes[key]) - stages.used(num_bytes[key])

    # Leaves that are split or in host memory stay, and so do pools without padding.
    movable = {key for key in pooled if waste(key) > 0 and not any(key[2]) and not key[3]}
    left = set(pooled)
    for key in sorted(movable, key=waste, reverse=True):
        if padding(left) <= MOST_PADDING:
            break
        left.remove(key)
    return left if padding(left) <= MOST_PADDING else pooled


def _with_short_vectors(pooled: set, counts: Mapping) -> set:
    """The pools, with those of the largest leaves that a vector has no index for.

    Args:
      pooled: `_key` of the leaves that have pools.
      counts: number of a vector, and `_key` of leaves -> number of them that each owner has.
    """
    pools = set(pooled)
    for vector, dtype in {(vector, key[1]) for vector, key in counts}:
        left = {
            key: math.prod(key[0]) * np.array(n)
            for (key_vector, key), n in counts.items()
            if (key_vector, key[1]) == (vector, dtype) and key not in pools
        }
        while left and sum(left.values()).max() > _LONGEST:
            largest = max(left, key=lambda key: left[key].max())
            del left[largest]
            pools.add(largest)
    return pools


def axes(spec: tuple) -> list[str]:
    """The axes of the mesh in a spec.

    Example:
      >>> axes((None, "model", ("a", "b")))
      ['model', 'a', 'b']
    """
    return [name for names in axes_by_dim(spec) for name in names]


def axes_by_dim(spec: Sequence) -> list[tuple]:
    """The axes of the mesh that each dim of a spec is split over.

    Example:
      >>> axes_by_dim((None, "model", ("a", "b")))
      [(), ('model',), ('a', 'b')]
    """
    return [(names,) if isinstance(names, str) else names or () for names in spec]


def part_shape(shape: Sequence[int], spec: Sequence, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a device's part of an array.

    Args:
      shape: the shape of the array, which the axes divide.
      spec: the axes that each of the first dims is split over.
      sizes: axis -> number of devices.

    Example:
      >>> part_shape((8, 6, 5), (("data", "fsdp"), "model"), {"data": 2, "fsdp": 2, "model": 3})
      (2, 2, 5)
    """
    dims = [*axes_by_dim(spec), *[()] * (len(shape) - len(spec))]
    return tuple(size // math.prod(sizes[name] for name in names) for size, names in zip(shape, dims, strict=True))


def row_of(array: jax.Array, lead: Sequence, spec: Sequence) -> jax.Array:
    """One row of a packed array, `[1, ...]`, in the layout that all reads have: see `_row_major`.

    Args:
      array: the packed array.
      lead: the index of the row.
      spec: see `Packing.specs`; () for leaves that are not split.
    """
    row = lax.dynamic_index_in_dim(array, *lead, allow_negative_indices=False)
    return row if any(spec) else _with_last_dim_innermost(row)


def _row_major(place: Place, block: jax.Array) -> jax.Array:
    """Gives `block` a fixed layout on TPUs and GPUs: the last dim is innermost.

    The array that the block is read from or written to gets the same layout. Without this, each
    branch of a `cond` would choose its own layout, and the whole array would be copied in every
    tick. A block that is split has none, because XLA would gather it first.
    """
    if any(place.spec):
        return block
    return _with_last_dim_innermost(block)


@functools.partial(jax.jit, inline=True)  # traced once per shape and dtype
def _with_last_dim_innermost(block: jax.Array) -> jax.Array:
    layout = Layout(tuple(range(block.ndim)))
    return lax.platform_dependent(
        block,
        tpu=lambda block: with_layout_constraint(block, layout),
        cuda=lambda block: with_layout_constraint(block, layout),
        default=lambda block: block,
    )


def read(
    arrays: Mapping[str, jax.Array],
    place: Place,
    lead: Lead,
    i: jax.Array | int = 0,
) -> jax.Array:
    """Reads leaf i at a place.

    Args:
      arrays: packed arrays `[*leading axes, n, *shape]`.
      place: the place.
      lead: indices of the leading axes.
      i: number of the leaf.
    """
    if place.empty is not None:
        return jnp.zeros(place.shape, place.empty)
    lead = _indices(lead, place.array)
    array = place.rows_of(arrays[place.array], len(lead))
    start = _start(array, place, lead, i)
    sizes = [1] * len(lead) + list(place.block)
    block = lax.dynamic_slice(array, start, sizes, allow_negative_indices=False)
    if place.on_host:
        block = jax.device_put(block, jax.memory.Space.Device)
    block = _row_major(place, block)
    return split_as(place.spec, block.reshape(place.shape))


def write(
    arrays: Mapping[str, jax.Array],
    place: Place,
    lead: Lead,
    value: jax.Array,
    i: jax.Array | int = 0,
) -> dict:
    """Replaces leaf i at `place` by `value`; see `read`."""
    return dict(write_all(arrays, [place], lead, [value], i))


def read_all(
    arrays: Mapping[str, jax.Array],
    places: Sequence[Place],
    lead: Lead,
    i: jax.Array | int = 0,
) -> list[jax.Array]:
    """Reads leaf i of every place; see `read`."""
    return [read(arrays, p, lead, i) for p in places]


def write_all(
    arrays: Mapping[str, jax.Array],
    places: Sequence[Place],
    lead: Lead,
    values: Sequence[jax.Array],
    i: jax.Array | int = 0,
    *,
    joined: bool = False,
) -> Mapping[str, jax.Array]:
    """Replaces leaf i of every place; see `read`.

    Args:
      arrays: packed arrays.
      places: the places.
      lead: indices of the leading axes.
      values: one per place.
      i: number of the leaf.
      joined: whether leaves that lie side by side are written at once, which takes fewer kernels.
    """
    for place, leading, block in _blocks(places, values, lead, joined):
        old = arrays[place.array]
        array = place.rows_of(old, len(leading))
        array = _updated(array, block, _start(array, place, leading, i))
        arrays = {**arrays, place.array: array.reshape(old.shape)}
    return arrays


def add_all(
    arrays: Mapping[str, jax.Array],
    places: Sequence[Place],
    lead: Lead,
    values: Sequence[jax.Array],
    i: jax.Array | int = 0,
    *,
    joined: bool = False,
) -> Mapping[str, jax.Array]:
    """Adds a value to leaf i of every place, in the dtype of its array; see `write_all`."""
    alone = [place for place in places if not joined or place.on_host]
    for place, value in zip(places, values, strict=True):
        if place in alone:
            # In the shape of the leaf: at a constant index XLA for CPUs would else read in the kernel
            # that writes, and that kernel would then go over the whole array.
            old = read(arrays, place, lead, i)
            arrays = write(arrays, place, lead, old + value.astype(old.dtype), i)
    left = [
        (p, v if p.empty is not None else v.astype(arrays[p.array].dtype))
        for p, v in zip(places, values)
        if p not in alone
    ]
    left_places, left_values = [p for p, _ in left], [v for _, v in left]
    for place, leading, block in _blocks(left_places, left_values, lead, joined=True):
        array = arrays[place.array]
        start = _start(array, place, leading, i)
        # XLA for GPUs reads, adds and writes in one kernel only if the block is not reshaped between.
        old = lax.dynamic_slice(array, start, block.shape, allow_negative_indices=False)
        array = _updated(array, _row_major(place, old) + block, start)
        arrays = {**arrays, place.array: array}
    return arrays


def _blocks(
    places: Sequence[Place],
    values: Sequence[jax.Array],
    lead: Lead,
    joined: bool,
) -> Iterator[tuple[Place, Sequence, jax.Array]]:
    """Blocks `[1, ..., 1, rows, ...]` of values that lie side by side, with the place and the leading indices of the
    first.
    """
    pairs = [pair for pair in zip(places, values, strict=True) if pair[0].empty is None]
    groups: list[list[tuple[Place, jax.Array]]] = []
    if joined:
        pairs.sort(key=lambda pair: (pair[0].array, pair[0].base))
    for place, value in pairs:
        last = groups[-1][-1][0] if joined and groups else None
        follows = last is not None and (
            (last.array, last.step, last.base + last.block[0], ()) == (place.array, place.step, place.base, place.spec)
        )
        if follows:
            groups[-1].append((place, value))
        else:
            groups.append([(place, value)])
    for group in groups:
        blocks = [split_as(p.spec, v).reshape(p.block) for p, v in group]
        block = blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks)
        first = group[0][0]
        leading = _indices(lead, first.array)
        block = _row_major(first, block.reshape(*[1] * len(leading), *block.shape))
        if first.on_host:
            block = jax.device_put(block, jax.memory.Space.Host)
        yield first, leading, block


def is_on_host(array: jax.Array) -> bool:
    """Returns whether an array of a traced function is in host memory."""
    return jax.typeof(array).memory_space == jax.memory.Space.Host


def each_row(
    array: jax.Array,
    lead: Sequence,
    change: Callable[[jax.Array], jax.Array],
    source: Sequence | None = None,
) -> jax.Array:
    """Changes every row of a pool in host memory on the device, one at a time.

    Args:
      array: the pool, `[*leading axes, n, *shape]`.
      lead: indices of the leading axes.
      change: `[1, ..., 1, *shape]` -> a new row.
      source: indices of the leading axes where a row is read; None: `lead`, where it is written.
    """
    row = [1] * (len(lead) + 1) + list(array.shape[len(lead) + 1 :])

    def turn(i: jax.Array, array: jax.Array) -> jax.Array:
        start = index(array, [*(lead if source is None else source), i])
        old = lax.dynamic_slice(array, start, row, allow_negative_indices=False)
        new = change(jax.device_put(old, jax.memory.Space.Device))
        new = jax.device_put(new, jax.memory.Space.Host)
        return _updated(array, new, index(array, [*lead, i]))

    return lax.fori_loop(0, array.shape[len(lead)], turn, array)


def sum_of_rows(array: jax.Array, sum_of_row: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Sums a function of the rows of a pool in host memory `[R, n, *shape]` over n. Returns `[R]`.

    Args:
      array: the pool.
      sum_of_row: `[*shape]` -> `[]`, called with one row at a time, on the device.
    """
    num_rows, number = array.shape[:2]

    def turn(i: jax.Array, sums: jax.Array) -> jax.Array:
        row = lax.dynamic_index_in_dim(array, i, 1, False, allow_negative_indices=False)
        row = jax.device_put(row, jax.memory.Space.Device)
        return sums + jax.vmap(sum_of_row)(row)

    like = jax.eval_shape(sum_of_row, jax.ShapeDtypeStruct(array.shape[2:], array.dtype))
    return lax.fori_loop(0, number, turn, jnp.zeros(num_rows, like.dtype))


def _updated(array: jax.Array, block: jax.Array, start: list[jax.Array]) -> jax.Array:
    return lax.dynamic_update_slice(array, block, start, allow_negative_indices=False)


def split_as(spec: tuple, value: jax.Array) -> jax.Array:
    """Splits `value` by a spec; `()` leaves that to the compiler.

    A value with a spec needs a surrounding `shard_map` whose mesh has the axes.
    """
    if not spec:
        return value
    return lax.with_sharding_constraint(value, PartitionSpec(*spec))


def gathered(value: jax.Array, spec: tuple, axis: str) -> jax.Array:
    """Gathers `value`, which `spec` splits, along an axis of the mesh."""
    if axis not in axes(spec):
        return value
    return split_as(without(spec, axis), value)


def without(spec: tuple, axis: str) -> tuple:
    """Removes an axis of the mesh from a spec.

    Example:
      >>> without(("fsdp", ("model", "fsdp"), None), "fsdp")
      (None, ('model',), None)
    """
    return tuple(tuple(name for name in names if name != axis) or None for names in axes_by_dim(spec))


def divisible(spec: Sequence, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple:
    """Sets the entry of a spec to None for each dim that its axes do not divide.

    Args:
      spec: the axes that each dim, or each of the first dims, is split over, or None.
      shape: the shape of the array.
      sizes: axis -> number of devices.

    Example:
      >>> divisible(("fsdp", "model"), (4, 5, 6), {"fsdp": 2, "model": 2})
      ('fsdp', None, None)
    """
    dims = [*axes_by_dim(spec), *[()] * (len(shape) - len(spec))]
    divided: list[Any] = [
        () if n % math.prod(sizes[axis] for axis in dim) else dim for n, dim in zip(shape, dims, strict=True)
    ]
    return tuple(dim[0] if len(dim) == 1 else dim or None for dim in divided)


def _indices(lead: Lead, array: str) -> Sequence:
    """The leading indices of an array, by its name."""
    return lead(array) if callable(lead) else lead


def _start(array: jax.Array, place: Place, lead: Sequence, i: jax.Array | int) -> list[jax.Array]:
    """The first index along every axis of leaf i at `place`. No index is negative."""
    return index(array, [*lead, place.start(i)])


def index(array: jax.Array, leading: Sequence) -> list[jax.Array]:
    """An index along every axis, 0 along the last ones.

    XLA takes indices of one dtype, and a loop counts in another one if JAX has 64-bit types.
    """
    rest = [0] * (array.ndim - len(leading))
    return [jnp.asarray(i, jnp.int32) for i in (*leading, *rest)]
