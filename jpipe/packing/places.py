"""A leaf, and its place in packed arrays."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

CHUNK = 1 << 20
"""The most numbers of a weight that an update brings to the device at once, if they can be cut so."""


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
      order: the order of dims in which those who read the leaf want it in memory; () for the order that it has.
    """

    aval: jax.ShapeDtypeStruct
    count: int = 1
    spec: tuple = ()
    in_vector: bool = False
    on_host: bool = False
    chunk: int = CHUNK
    vector: int = 0
    read_in_parts: tuple[str, ...] = ()
    order: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True if the leaf has no elements."""
        return math.prod(self.aval.shape) == 0


def stored_shape(shape: tuple[int, ...], spec: tuple, on_host: bool) -> tuple[int, ...]:
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


def cut_shape(row: tuple[int, ...], number: int) -> tuple[int, ...]:
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
      order: see `Leaf`. The array holds the leaf in the order of the leaf's dims; a copy of it may have this one.
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
    order: tuple[int, ...] = ()

    def read_as(self, leaf: Leaf) -> "Place":
        """The place with what those who read a leaf want."""
        return dataclasses.replace(self, read_in_parts=leaf.read_in_parts, order=leaf.order)

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
        row = stored_shape(self.shape, self.spec, self.on_host)
        return (self.num_rows, *cut_shape(row, self.num_rows))

    def chunk(self, i: jax.Array | int, number: int, num_chunks: int) -> "Place":
        """The place of chunk `number` of leaf i, a matrix or an array of more dims."""
        shape = cut_shape(stored_shape(self.shape, self.spec, True), num_chunks)
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
        cut = cut_shape(row, self.split)
        return array.reshape(*lead[:-1], lead[-1] * self.split, *cut)
