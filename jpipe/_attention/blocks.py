"""Attention of one device, tile by tile, forwards and backwards.

No array has as many numbers as queries times keys. A tile of queries and a tile of keys have their scores for a
moment, and what they add is summed up in float32 with the largest score so far (an online softmax). The backward
computes the scores of a tile again, from the logarithm of the sum of its exponentials.

Letters: B batch, K heads of keys, G heads of queries per head of keys, T queries, M keys, D numbers of a head.

References:
  Milakov and Gimelshein, 2018, arXiv:1805.02867 (the online softmax).
  Rabe and Staats, 2021, arXiv:2112.05682 (memory).
  Dao et al., FlashAttention, 2022, arXiv:2205.14135 (the backward).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jpipe._attention.seen import Seen, Tile
from jpipe._attention.tiles import Spans


class Sums(NamedTuple):
    """What the keys so far have added.

    Attributes:
      total: `[B, K, G, T, D]`, the sum of values, each times the exponential of its score less the largest one.
      weight: `[B, K, G, T]`, the sum of these exponentials.
      largest: `[B, K, G, T]`, the largest score; minus infinity if no key was seen.
    """

    total: jax.Array
    weight: jax.Array
    largest: jax.Array


class Group(NamedTuple):
    """Tiles that are treated alike.

    Attributes:
      tiles: the tiles, `[tiles]` each.
      seen: which keys their queries see.
    """

    tiles: Tile
    seen: Seen


class Blocks(NamedTuple):
    """How the arrays of a device are cut, and the scale of scores.

    Attributes:
      queries, keys: the spans of positions.
      scale: factor of scores.
    """

    queries: Spans
    keys: Spans
    scale: float

    def nothing(self, query: jax.Array) -> Sums:
        """The sums before the first key."""
        dtype = sum_dtype(query)
        zeros = jnp.zeros(query.shape[:-1], dtype)
        return Sums(jnp.zeros(query.shape, dtype), zeros, zeros - jnp.inf)

    def forward(self, query: jax.Array, key: jax.Array, value: jax.Array, groups: Sequence[Group], sums: Sums) -> Sums:
        """Adds what keys add to queries.

        Args:
          query: `[B, K, G, T, D]`.
          key, value: `[B, K, M, D]`.
          groups: the tiles.
          sums: the sums so far.
        """

        def add(seen: Seen, sums: Sums, tile: Tile) -> Sums:
            q, k, v = self._query(query, tile), self._key(key, tile), self._key(value, tile)
            before = Sums(*(self._query(a, tile) for a in sums))
            scores = self._scores(q, k, seen, tile)
            largest = jnp.maximum(before.largest, scores.max(-1))
            finite = jnp.where(jnp.isfinite(largest), largest, 0)
            exponentials = jnp.exp(scores - finite[..., None])
            factor = jnp.exp(before.largest - finite)
            added = _product("bkgtm,bkmd->bkgtd", exponentials.astype(v.dtype), v)
            after = Sums(
                before.total * factor[..., None] + added,
                before.weight * factor + exponentials.sum(-1),
                largest,
            )
            return Sums(*(_put(a, b, tile.query) for a, b in zip(sums, after, strict=True)))

        return _for_each(groups, add, sums, self.queries.tile)

    def backward(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        groups: Sequence[Group],
        *,
        results: "Results",
        gradients: "Gradients",
    ) -> "Gradients":
        """Adds the gradients by queries, keys and values of these tiles.

        Args:
          query, key, value, groups: see `forward`.
          results: of the whole attention, and the gradient by them.
          gradients: the gradients so far.
        """

        def add(seen: Seen, gradients: Gradients, tile: Tile) -> Gradients:
            q, k, v = self._query(query, tile), self._key(key, tile), self._key(value, tile)
            by_output, log_weight, mean = (self._query(a, tile) for a in results)
            probabilities = jnp.exp(self._scores(q, k, seen, tile) - log_weight[..., None])
            by_value = _product("bkgtm,bkgtd->bkmd", probabilities.astype(v.dtype), by_output)
            by_probability = _product("bkgtd,bkmd->bkgtm", by_output, v)
            by_score = (probabilities * (by_probability - mean[..., None]) * self.scale).astype(q.dtype)
            by_query = _product("bkgtm,bkmd->bkgtd", by_score, k)
            by_key = _product("bkgtm,bkgtd->bkmd", by_score, q)
            return Gradients(
                _put(gradients.query, self._query(gradients.query, tile) + by_query, tile.query),
                _put(gradients.key, self._key(gradients.key, tile) + by_key, tile.key, 2),
                _put(gradients.value, self._key(gradients.value, tile) + by_value, tile.key, 2),
            )

        return _for_each(groups, add, gradients, self.queries.tile)

    def _query(self, a: jax.Array, tile: Tile) -> jax.Array:
        return lax.dynamic_slice_in_dim(a, tile.query, self.queries.tile, 3)

    def _key(self, a: jax.Array, tile: Tile) -> jax.Array:
        return lax.dynamic_slice_in_dim(a, tile.key, self.keys.tile, 2)

    def _scores(self, query: jax.Array, key: jax.Array, seen: Seen, tile: Tile) -> jax.Array:
        scores = _product("bkgtd,bkmd->bkgtm", query, key) * self.scale
        mask = seen.of_tile(tile, query.shape[3], key.shape[2])
        return scores if mask is None else jnp.where(mask, scores, -jnp.inf)


class Results(NamedTuple):
    """What a backward reads of the results of a forward.

    Attributes:
      by_output: `[B, K, G, T, D]`, the gradient by the outputs.
      log_weight: `[B, K, G, T]`, the logarithm of the sum of the exponentials of scores; infinity if no key was seen.
      mean: `[B, K, G, T]`, the sum over D of the outputs times the gradient by them.
    """

    by_output: jax.Array
    log_weight: jax.Array
    mean: jax.Array


class Gradients(NamedTuple):
    """Sums of gradients, shaped as queries, keys and values."""

    query: jax.Array
    key: jax.Array
    value: jax.Array

    @classmethod
    def zeros(cls, query: jax.Array, key: jax.Array, value: jax.Array) -> "Gradients":
        """The gradients before the first tile."""
        return cls(*(jnp.zeros(a.shape, sum_dtype(a)) for a in (query, key, value)))


def outputs_of(sums: Sums, mean_value: jax.Array | None, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """The outputs `[B, K, G, T, D]`, and `Results.log_weight`.

    Args:
      sums: the sums over all keys.
      mean_value: `[B, K, D]`, the mean of all values, which queries get that see no key; None: there are none.
      dtype: of the outputs.
    """
    is_empty = sums.weight == 0
    weight = jnp.where(is_empty, 1, sums.weight)
    outputs = sums.total / weight[..., None]
    if mean_value is not None:
        outputs = jnp.where(is_empty[..., None], mean_value[:, :, None, None], outputs)
    return outputs.astype(dtype), jnp.where(is_empty, jnp.inf, sums.largest + jnp.log(weight))


def mean_value(value: jax.Array) -> jax.Array:
    """`[B, K, M, D]` -> `[B, K, D]`."""
    return value.mean(2, dtype=sum_dtype(value))


def gradient_by_mean(results: Results) -> jax.Array:
    """`[B, K, D]`: the gradient by the mean of all values, which queries get that see no key."""
    return jnp.where(jnp.isinf(results.log_weight)[..., None], results.by_output, 0).sum(
        (2, 3), dtype=sum_dtype(results.by_output)
    )


def mean_of(outputs: jax.Array, by_output: jax.Array) -> jax.Array:
    """The sum over D of the outputs times the gradient by them, with 1 in the place of D."""
    dtype = sum_dtype(outputs)
    return (outputs.astype(dtype) * by_output.astype(dtype)).sum(-1, keepdims=True)


def sum_dtype(a: jax.Array) -> Any:
    """The dtype in which numbers are summed up."""
    return a.dtype if a.dtype == jnp.float64 else jnp.float32


def heads_first(query: jax.Array, num_key_heads: int) -> jax.Array:
    """`[B, T, K G, D]` -> `[B, K, G, T, D]`."""
    rows, positions, _, dim = query.shape
    return query.reshape(rows, positions, num_key_heads, -1, dim).transpose(0, 2, 3, 1, 4)


def heads_last(query: jax.Array) -> jax.Array:
    """`[B, K, G, T, D]` -> `[B, T, K G, D]`."""
    rows, _, _, positions, dim = query.shape
    return query.transpose(0, 3, 1, 2, 4).reshape(rows, positions, -1, dim)


def keys_first(key: jax.Array) -> jax.Array:
    """`[B, M, K, D]` -> `[B, K, M, D]`, and its inverse."""
    return key.swapaxes(1, 2)


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=sum_dtype(a))


def _put(array: jax.Array, part: jax.Array, start: jax.Array, dim: int = 3) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(array, part, start, dim)


_Carry = TypeVar("_Carry")


def _for_each(
    groups: Sequence[Group], add: Callable[[Seen, _Carry, Tile], _Carry], carry: _Carry, num_queries: int
) -> _Carry:
    for tiles, seen in groups:

        def turn(carry: _Carry, tile: Tile, seen: Seen = seen) -> tuple[_Carry, None]:
            is_seen = seen.reaches(tile, num_queries)
            if is_seen is None:
                return add(seen, carry, tile), None
            return lax.cond(is_seen, add, lambda seen, carry, tile: carry, seen, carry, tile), None

        count = len(tiles.query)
        if count == 1:
            carry, _ = turn(carry, Tile(*(a[0] for a in tiles)))
        elif count:
            carry, _ = lax.scan(turn, carry, Tile(*map(jnp.asarray, tiles)))
    return carry
