"""Attention of which each device has some queries, and gets the keys and values of all others in turn.

With n devices there are n - 1 rounds after the device's own keys. In each round devices form pairs, and a pair
exchanges its keys and values. Other rings pass them on to a neighbour. Pairs send as many bytes, keys do not wait for
the round before, and a permutation of pairs is one all-gather of pairs in a pipeline (`jpipe/layers/collectives.py`),
where a shift is two.

Under a causal mask the last device would have most of the work. So the sequence is cut into 2 n equal spans, and a
device takes an early and a late one:

    device      0     1     2     3
    its own    0 1   2 3   4 5   6 7      in the arrays outside
    has        0 7   2 5   3 4   1 6      after devices 0 and 3, and 1 and 2, have exchanged their second spans

In a round of two devices all queries of the late span see the early span of the other one. Besides, either the early
span sees it too, or the late one sees the late one. That is two pairs of spans on every device, without a mask.

References:
  Liu et al., Ring Attention, 2023, arXiv:2310.01889.
  Brandon et al., Striped Attention, 2023, arXiv:2311.09431 (equal work under a causal mask).
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jpipe._attention import blocks
from jpipe._attention.blocks import Blocks, Gradients, Group, Results, Sums
from jpipe._attention.one_device import groups_of_span
from jpipe._attention.seen import Seen
from jpipe._attention.split import Split
from jpipe._attention.tiles import Place, Spans, joined, padded, square, tiles_of


@dataclasses.dataclass(frozen=True)
class Ring:
    """Attention to the keys of one device after the other.

    Attributes:
      split: the axes of the mesh.
      scale: factor of scores.
      is_causal: whether a query sees only itself and earlier positions.
      is_balanced: whether a device takes an early and a late span of positions; only if there are as many keys as
        queries.
      block_size: the most positions of a tile.
    """

    split: Split
    scale: float
    is_causal: bool
    is_balanced: bool
    block_size: int

    def sent(self, shape: Sequence[int], num_keys: int, num_key_heads: int) -> int:
        """The numbers that a device sends in a forward and its backward.

        Args:
          shape: of the queries of a device, `[B, T, H, D]`.
          num_keys: the keys of a device.
          num_key_heads: their heads.
        """
        rows, positions, heads, dim = shape
        keys = 2 * rows * num_keys * num_key_heads * dim
        in_rounds = (self.split.size - 1) * 3 * keys  # keys and values twice, their gradients once
        if not self.is_balanced:
            return in_rounds
        # Half of the queries, keys and values, of the outputs, and of the gradients by them.
        return in_rounds + (rows * positions * heads * (4 * dim + 1) + 2 * keys) // 2

    def forward(self, query: jax.Array, key: jax.Array, value: jax.Array, seen: Seen) -> tuple[jax.Array, Any]:
        """See `OneDevice.forward`."""
        run = self.split.run(
            self._forward,
            (*[self.split.positions()] * 3, self.split.seen(seen, over_heads=False)),
            (self.split.positions(), *self._stashed_specs(seen)),
        )
        outputs, *stashed = run(query, key, value, seen)
        return outputs, (outputs, *stashed)

    def backward(self, residuals: Any, by_output: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `OneDevice.backward`."""
        outputs, q, kv, log_weight, seen = residuals
        run = self.split.run(
            self._backward,
            (self.split.positions(), *self._stashed_specs(seen), self.split.positions()),
            (self.split.positions(),) * 3,
        )
        return run(outputs, q, kv, log_weight, seen, by_output)

    def _stashed_specs(self, seen: Seen) -> tuple:
        """Of queries, keys and values with their heads first, of the weights, and of what is seen."""
        rows, _, heads, _ = self.split.positions()
        axis = self.split.axis
        queries, keys = P(rows, heads, None, axis, None), P(None, rows, heads, axis, None)
        return queries, keys, self.split.weights(over_heads=False), self.split.seen(seen, over_heads=False)

    def _forward(self, query: jax.Array, key: jax.Array, value: jax.Array, seen: Seen) -> Any:
        kv = jnp.stack([blocks.keys_first(key), blocks.keys_first(value)])
        mean = lax.pmean(blocks.mean_value(kv[1]), self.split.axis) if seen.may_be_empty else None
        q, kv = self._reordered(blocks.heads_first(query, key.shape[2]), 3), self._reordered(kv, 3)
        if seen.mask is not None and seen.mask.shape[3] > 1:
            seen = dataclasses.replace(seen, mask=self._reordered(seen.mask, 3))
        cut, stashed = self._cut(q.shape[3], kv.shape[3]), (q, kv)
        q = cut.queries.padded(q, 3)
        sums = cut.nothing(q)
        for key, value, groups in self._rounds(kv, cut, seen):
            sums = cut.forward(q, key, value, groups, sums)
        sums = Sums(*(cut.queries.without_padding(a, 3) for a in sums))
        outputs, log_weight = blocks.outputs_of(sums, mean, query.dtype)
        return blocks.heads_last(self._reordered_back(outputs, 3)), *stashed, log_weight, seen

    def _backward(
        self, outputs: jax.Array, q: jax.Array, kv: jax.Array, log_weight: jax.Array, seen: Seen, by_output: jax.Array
    ) -> Any:
        cut = self._cut(q.shape[3], kv.shape[3])
        mean = blocks.mean_of(outputs, by_output)
        by_output, mean = (self._reordered(blocks.heads_first(a, q.shape[1]), 3) for a in (by_output, mean))
        results = Results(by_output, log_weight, mean[..., 0])
        by_mean = None
        if seen.may_be_empty:
            num_keys = kv.shape[3] * self.split.size
            by_mean = lax.psum(blocks.gradient_by_mean(results), self.split.axis)[:, :, None] / num_keys
        q = cut.queries.padded(q, 3)
        results = Results(*(cut.queries.padded(a, 3) for a in results))
        by_query = Gradients.zeros(q, *kv).query
        by_kv = jnp.zeros(kv.shape, blocks.sum_dtype(kv))
        for turn, (key, value, groups) in enumerate(self._rounds(kv, cut, seen)):
            gradients = Gradients.zeros(q, key, value)._replace(query=by_query)
            by_query, *by_keys = cut.backward(q, key, value, groups, results=results, gradients=gradients)
            added = jnp.stack([cut.keys.without_padding(a, 2) for a in by_keys])
            if turn:
                owner = [(i, source) for i, source in enumerate(_sources(self.split.size)[turn])]
                added = lax.ppermute(added.astype(kv.dtype), self.split.axis, owner).astype(by_kv.dtype)
            by_kv = by_kv + added
        if by_mean is not None:
            by_kv = by_kv.at[1].add(by_mean)
        by_query = cut.queries.without_padding(by_query, 3).astype(q.dtype)
        by_key, by_value = map(blocks.keys_first, self._reordered_back(by_kv.astype(kv.dtype), 3))
        return blocks.heads_last(self._reordered_back(by_query, 3)), by_key, by_value

    def _cut(self, num_queries: int, num_keys: int) -> Blocks:
        spans = 2 if self.is_balanced else 1
        queries, keys = (Spans.of(n // spans, self.block_size, spans) for n in (num_queries, num_keys))
        return Blocks(queries, keys, self.scale)

    def _rounds(self, kv: jax.Array, cut: Blocks, seen: Seen) -> Iterator[tuple[jax.Array, jax.Array, list[Group]]]:
        """Keys, values and tiles of each round."""
        seen = padded(seen, cut.queries, cut.keys)
        device = lax.axis_index(self.split.axis)
        for turn, sources in enumerate(_sources(self.split.size)):
            arrived = kv
            if turn:
                pairs = [(source, i) for i, source in enumerate(sources)]
                arrived = lax.ppermute(kv, self.split.axis, pairs)
            key, value = cut.keys.padded(arrived, 3)
            source = jnp.asarray(sources, jnp.int32)[device]
            if self.is_balanced:
                groups = self._own_groups(cut, seen) if turn == 0 else self._groups(cut, seen, source)
            else:
                all_seen = dataclasses.replace(seen, is_causal=self.is_causal)
                tiles = tiles_of(square(*cut[:2]), *cut[:2], Place(0, device), Place(0, source))
                groups = [Group(tiles, all_seen)]
            yield key, value, groups

    def _own_groups(self, cut: Blocks, seen: Seen) -> list[Group]:
        """The tiles of a device's own keys, under a causal mask."""
        early, late = self._places(lax.axis_index(self.split.axis))
        spans = cut.queries, cut.keys
        groups = [groups_of_span(*spans, seen, is_causal=True, place=place) for place in (early, late)]
        below = tiles_of(square(*spans), *spans, late, early)
        return [
            Group(joined(below, *(g[0].tiles for g in groups)), seen),
            Group(joined(*(g[1].tiles for g in groups)), groups[0][1].seen),
        ]

    def _groups(self, cut: Blocks, seen: Seen, source: jax.Array) -> list[Group]:
        """The tiles of another device's keys, under a causal mask: none needs one."""
        early, late = self._places(lax.axis_index(self.split.axis))
        other_early, other_late = self._places(source)
        is_earlier = early.number < other_early.number
        query = Place(*(jnp.where(is_earlier, a, b) for a, b in zip(late, early, strict=True)))
        key = Place(*(jnp.where(is_earlier, a, b) for a, b in zip(other_late, other_early, strict=True)))
        tiles = functools.partial(tiles_of, square(*cut[:2]), *cut[:2])
        return [Group(joined(tiles(late, other_early), tiles(query, key)), seen)]

    def _places(self, device: jax.Array) -> tuple[Place, Place]:
        """The early and the late span of a device."""
        first, second = 2 * device, 2 * self.split.size - 1 - 2 * device
        zero = jnp.zeros_like(device)
        return Place(zero, jnp.minimum(first, second)), Place(zero + 1, jnp.maximum(first, second))

    def _reordered(self, x: jax.Array, dim: int) -> jax.Array:
        """The early and the late span of this device, out of two spans that follow one another."""
        if not self.is_balanced:
            return x
        first, second = jnp.split(x, 2, dim)
        return self._swapped(first, self._mirrored(second), dim)

    def _reordered_back(self, x: jax.Array, dim: int) -> jax.Array:
        if not self.is_balanced:
            return x
        early, late = jnp.split(x, 2, dim)
        first, second = jnp.split(self._swapped(early, late, dim), 2, dim)
        return jnp.concatenate([first, self._mirrored(second)], dim)

    def _swapped(self, first: jax.Array, second: jax.Array, dim: int) -> jax.Array:
        """Two spans one after the other; on the devices of the second half the second one first."""
        swaps = 2 * lax.axis_index(self.split.axis) >= self.split.size
        return jnp.concatenate([jnp.where(swaps, second, first), jnp.where(swaps, first, second)], dim)

    def _mirrored(self, x: jax.Array) -> jax.Array:
        """The value of the device that is as far from the last one as this one is from the first."""
        n = self.split.size
        return lax.ppermute(x, self.split.axis, [(i, n - 1 - i) for i in range(n)])


@functools.cache
def _sources(size: int) -> list[list[int]]:
    """For each round, the device whose keys each device has. The first round has its own.

    Each device has every other one once. Of an even number of devices two have each other's (the rounds of a
    tournament), of an odd number they are shifted.
    """
    own = list(range(size))
    if size % 2:
        return [[(i - turn) % size for i in own] for turn in range(size)]
    last, rounds = size - 1, [own]
    for turn in range(last):
        sources = [(2 * turn - i) % last for i in range(last)]
        sources[turn] = last
        rounds.append([*sources, turn])
    return rounds
