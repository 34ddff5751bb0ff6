"""The tiles of queries and keys that a device goes through."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jpipe._attention.seen import Seen, Tile


@dataclasses.dataclass(frozen=True)
class Spans:
    """The positions of a device: spans of equal length that follow one another in its arrays, cut into equal tiles.

    Attributes:
      length: positions of a span.
      tile: positions of a tile.
      num_spans: spans of a device.
    """

    length: int
    tile: int
    num_spans: int = 1

    @classmethod
    def of(cls, length: int, block_size: int, num_spans: int = 1) -> "Spans":
        """Spans in tiles of at most `block_size` positions, which differ by less than a position before they are whole
        numbers.
        """
        return cls(length, math.ceil(length / math.ceil(length / block_size)), num_spans)

    @property
    def tiles(self) -> int:
        """The tiles of a span."""
        return math.ceil(self.length / self.tile)

    @property
    def padding(self) -> int:
        """The positions behind a span that make its last tile whole."""
        return self.tiles * self.tile - self.length

    def padded(self, x: jax.Array, dim: int) -> jax.Array:
        """An array with zeros behind each span of a dim."""
        if not self.padding:
            return x
        shape = x.shape
        x = x.reshape(*shape[:dim], self.num_spans, self.length, *shape[dim + 1 :])
        x = jnp.pad(x, [(0, self.padding if d == dim + 1 else 0) for d in range(x.ndim)])
        return x.reshape(*shape[:dim], -1, *shape[dim + 1 :])

    def without_padding(self, x: jax.Array, dim: int) -> jax.Array:
        """The inverse of `padded`."""
        if not self.padding:
            return x
        shape = x.shape
        x = x.reshape(*shape[:dim], self.num_spans, -1, *shape[dim + 1 :])
        x = jax.lax.slice_in_dim(x, 0, self.length, axis=dim + 1)
        return x.reshape(*shape[:dim], -1, *shape[dim + 1 :])


class Place(NamedTuple):
    """Where a span is.

    Attributes:
      span: its number in the arrays of the device.
      number: its number in the whole sequence.
    """

    span: Any
    number: Any


FIRST = Place(0, 0)


def padded(seen: Seen, queries: Spans, keys: Spans) -> Seen:
    """What is seen, with padding so that a tile never ends behind an array."""
    if not (queries.padding or keys.padding):
        return seen

    def behind(x: Any, dim: int, by: int) -> Any:
        if x is None or x.shape[dim] == 1:
            return x
        return jnp.pad(x, [(0, by if d == dim else 0) for d in range(x.ndim)])

    mask = seen.mask
    if mask is not None and mask.shape[3] > 1:
        mask = queries.padded(mask, 3)
    return dataclasses.replace(
        seen,
        mask=behind(mask, 4, keys.padding),
        query_segments=behind(seen.query_segments, 1, queries.padding),
        key_segments=behind(seen.key_segments, 1, keys.padding),
        is_padded=keys.padding > 0,
    )


def tiles_of(
    pairs: Sequence[tuple[int, int]],
    queries: Spans,
    keys: Spans,
    query_place: Place = FIRST,
    key_place: Place = FIRST,
) -> Tile:
    """`[tiles]` each: the tiles of a span of queries and of a span of keys.

    Args:
      pairs: the tile of the queries' span and the tile of the keys' span of each.
      queries, keys: the spans.
      query_place, key_place: of the span of queries, and of the span of keys.
    """
    query, key = np.array(pairs, np.int32).reshape(-1, 2).T
    query, key = query * queries.tile, key * keys.tile
    num_keys = np.minimum(keys.tile, keys.length - key)
    return Tile(
        query + query_place.span * queries.tiles * queries.tile,
        key + key_place.span * keys.tiles * keys.tile,
        query + query_place.number * queries.length,
        key + key_place.number * keys.length,
        num_keys,
    )


def square(queries: Spans, keys: Spans) -> list[tuple[int, int]]:
    """All tiles of two spans."""
    return [(i, j) for i in range(queries.tiles) for j in range(keys.tiles)]


def joined(*tiles: Tile) -> Tile:
    """One group of tiles after the other."""
    return Tile(*(jnp.concatenate([jnp.asarray(t) for t in field]) for field in zip(*tiles, strict=True)))
