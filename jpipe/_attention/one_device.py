"""Attention without an axis of the mesh for positions."""

import dataclasses
from typing import Any

import jax

from jpipe._attention import blocks
from jpipe._attention.blocks import Blocks, Gradients, Group, Results
from jpipe._attention.seen import Seen
from jpipe._attention.tiles import FIRST, Place, Spans, padded, square, tiles_of


@dataclasses.dataclass(frozen=True)
class OneDevice:
    """Attention of all queries of a device to all keys, in their usual order.

    Attributes:
      scale: factor of scores.
      is_causal: whether a query sees only itself and earlier positions.
      block_size: the most positions of a tile.
    """

    scale: float
    is_causal: bool
    block_size: int

    def forward(self, query: jax.Array, key: jax.Array, value: jax.Array, seen: Seen) -> tuple[jax.Array, Any]:
        """The outputs `[B, T, H, D]`, and what `backward` reads.

        Args:
          query: `[B, T, H, D]`.
          key, value: `[B, M, K, D]`.
          seen: which keys each query sees.
        """
        q, k, v = _heads_first(query, key, value)
        mean = blocks.mean_value(v) if seen.may_be_empty else None
        cut, groups = self._cut(query, key, seen)
        rows, columns = cut.queries.padded, cut.keys.padded
        sums = cut.nothing(rows(q, 3))
        sums = cut.forward(rows(q, 3), columns(k, 2), columns(v, 2), groups, sums)
        sums = blocks.Sums(*(cut.queries.without_padding(a, 3) for a in sums))
        outputs, log_weight = blocks.outputs_of(sums, mean, query.dtype)
        outputs = blocks.heads_last(outputs)
        return outputs, (query, key, value, seen, outputs, log_weight)

    def backward(self, residuals: Any, by_output: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The gradients by query, key and value.

        Args:
          residuals: of `forward`.
          by_output: the gradient by the outputs.
        """
        query, key, value, seen, outputs, log_weight = residuals
        mean = blocks.mean_of(outputs, by_output)
        return self.gradients(query, key, value, seen, log_weight=log_weight, by_output=by_output, mean=mean)

    def gradients(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        seen: Seen,
        *,
        log_weight: jax.Array,
        by_output: jax.Array,
        mean: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `backward`; `mean` is `[B, T, H, 1]`, the sum over D of the outputs times the gradient by them."""
        q, k, v = _heads_first(query, key, value)
        by_output, mean = (blocks.heads_first(a, key.shape[2]) for a in (by_output, mean))
        results = Results(by_output, log_weight, mean[..., 0])
        by_mean = blocks.gradient_by_mean(results)[:, :, None] / v.shape[2] if seen.may_be_empty else None
        cut, groups = self._cut(query, key, seen)
        rows, columns = cut.queries.padded, cut.keys.padded
        q, k, v = rows(q, 3), columns(k, 2), columns(v, 2)
        results = Results(*(rows(a, 3) for a in results))
        gradients = cut.backward(q, k, v, groups, results=results, gradients=Gradients.zeros(q, k, v))
        by_query = cut.queries.without_padding(gradients.query, 3)
        by_key, by_value = (cut.keys.without_padding(a, 2) for a in gradients[1:])
        if by_mean is not None:
            by_value = by_value + by_mean
        by_key, by_value = map(blocks.keys_first, (by_key, by_value))
        return blocks.heads_last(by_query).astype(query.dtype), by_key.astype(key.dtype), by_value.astype(value.dtype)

    def _cut(self, query: jax.Array, key: jax.Array, seen: Seen) -> tuple[Blocks, list[Group]]:
        queries, keys = (Spans.of(a.shape[1], self.block_size) for a in (query, key))
        seen = padded(seen, queries, keys)
        return Blocks(queries, keys, self.scale), groups_of_span(queries, keys, seen, is_causal=self.is_causal)


def groups_of_span(queries: Spans, keys: Spans, seen: Seen, *, is_causal: bool, place: Place = FIRST) -> list[Group]:
    """The tiles of a span of which a query sees a key. Under a causal mask those on the diagonal alone need it.

    Args:
      queries, keys: the spans of positions.
      seen: which keys each query sees, but for the causal mask.
      is_causal: whether a query sees only itself and earlier positions.
      place: of the span.
    """
    if not is_causal:
        return [Group(tiles_of(square(queries, keys), queries, keys, place, place), seen)]
    masked = dataclasses.replace(seen, is_causal=True)
    if seen.first is not None:  # known in the program only
        return [Group(tiles_of(square(queries, keys), queries, keys, place, place), masked)]
    below, crossed = [], []
    for i, j in square(queries, keys):
        first, last = i * queries.tile, (i + 1) * queries.tile - 1
        if (j + 1) * keys.tile - 1 <= first:
            below.append((i, j))
        elif j * keys.tile <= last:
            crossed.append((i, j))
    tiles = (tiles_of(pairs, queries, keys, place, place) for pairs in (below, crossed))
    return [Group(group, which) for group, which in zip(tiles, (seen, masked), strict=True)]


def _heads_first(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return blocks.heads_first(query, key.shape[2]), blocks.keys_first(key), blocks.keys_first(value)
