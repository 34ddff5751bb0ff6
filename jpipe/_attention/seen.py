"""Which keys each query sees."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Tile(NamedTuple):
    """A tile of queries and a tile of keys, as scalars; or several, as `[tiles]` each.

    Attributes:
      query: the first query in the arrays of this device.
      key: the first key in the arrays of this device.
      query_position: the position of the first query in the sequence.
      key_position: the position of the first key in the sequence.
      num_keys: the keys of the tile; those after them are padding.
    """

    query: Any
    key: Any
    query_position: Any
    key_position: Any
    num_keys: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Seen:
    """Which keys each query sees.

    Attributes:
      mask: bool `[B or 1, K or 1, G or 1, T or 1, M or 1]`, of the queries of this device and of all keys; None: all.
      query_segments: `[B, T]`, the document of each position of the whole sequence; None: there is one document.
      key_segments: `[B, M]`, the document of each key.
      first: int32 `[]`, the position of the first query among those of the keys, where the queries are a slice of a
        sequence and the keys those of the whole; None: it is that of the tiles.
      is_padded: whether a tile may have keys that are padding.
      is_causal: whether a query sees only itself and earlier positions.
      may_be_empty: whether there may be queries that see no key.
    """

    mask: Any
    query_segments: Any
    key_segments: Any
    first: Any = None
    is_padded: bool = dataclasses.field(default=False, metadata={"static": True})
    is_causal: bool = dataclasses.field(default=False, metadata={"static": True})
    may_be_empty: bool = dataclasses.field(default=False, metadata={"static": True})

    def reaches(self, tile: Tile, num_queries: int) -> jax.Array | None:
        """Bool `[]`, whether any query of a slice may see the keys of a tile; None: the tiles are chosen already."""
        if self.first is None:
            return None
        return self.first + tile.query_position + num_queries > tile.key_position

    def of_tile(self, tile: Tile, num_queries: int, num_keys: int) -> jax.Array | None:
        """Bool, of shape `[B, K, G, num_queries, num_keys]` or with 1 for some; None if all are seen."""
        seen = None
        rows = tile.query_position + jnp.arange(num_queries, dtype=jnp.int32)
        rows = rows if self.first is None else self.first + rows
        columns = tile.key_position + jnp.arange(num_keys, dtype=jnp.int32)
        if self.is_causal:
            seen = (rows[:, None] >= columns[None])[None, None, None]
        if self.is_padded:
            seen = _both(seen, (jnp.arange(num_keys, dtype=jnp.int32) < tile.num_keys)[None, None, None, None])
        if self.query_segments is not None and self.key_segments is not None:
            left = lax.dynamic_slice_in_dim(self.query_segments, tile.query_position, num_queries, 1)
            right = lax.dynamic_slice_in_dim(self.key_segments, tile.key_position, num_keys, 1)
            seen = _both(seen, (left[:, :, None] == right[:, None, :])[:, None, None])
        if self.mask is not None:
            mask = self.mask
            if mask.shape[3] > 1:
                mask = lax.dynamic_slice_in_dim(mask, tile.query, num_queries, 3)
            if mask.shape[4] > 1:
                mask = lax.dynamic_slice_in_dim(mask, tile.key_position, num_keys, 4)
            seen = _both(seen, mask)
        return seen


def _both(a: jax.Array | None, b: jax.Array) -> jax.Array:
    return b if a is None else a & b
