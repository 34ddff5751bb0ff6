"""Attention of which each device has some heads of all positions.

Before it, devices exchange parts of queries, keys and values: a device gives away the heads of others, and gets all
positions of its own. After it they exchange outputs the other way.

References:
  Jacobs et al., DeepSpeed-Ulysses, 2023, arXiv:2309.14509.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jpipe._attention import blocks
from jpipe._attention.one_device import OneDevice
from jpipe._attention.seen import Seen
from jpipe._attention.split import Split


@dataclasses.dataclass(frozen=True)
class OverHeads:
    """Attention with two exchanges of heads for positions.

    Attributes:
      split: the axes of the mesh.
      inner: the attention of all positions.
      repeats: how often a head of keys is sent, so that each device gets a whole number of them.
    """

    split: Split
    inner: OneDevice
    repeats: int

    @classmethod
    def of(cls, split: Split, inner: OneDevice, num_key_heads: int) -> "OverHeads":
        """See `OverHeads`; `num_key_heads` are those of a device, before the exchange."""
        return cls(split, inner, split.size // math.gcd(num_key_heads, split.size))

    def sent(self, shape: Sequence[int], num_keys: int, num_key_heads: int) -> int:
        """The numbers that a device sends in a forward and its backward.

        Args:
          shape: of the queries of a device, `[B, T, H, D]`.
          num_keys: the keys of a device.
          num_key_heads: their heads.
        """
        rows, positions, heads, dim = shape
        whole = 2 * rows * dim * (positions * 2 * heads + num_keys * 2 * num_key_heads * self.repeats)
        return (whole + rows * positions * heads) * (self.split.size - 1) // self.split.size

    def forward(self, query: jax.Array, key: jax.Array, value: jax.Array, seen: Seen) -> tuple[jax.Array, Any]:
        """See `OneDevice.forward`."""
        positions, heads = self.split.positions(), self.split.all_positions()
        seen = self._seen(seen)

        def run(query: jax.Array, key: jax.Array, value: jax.Array, seen: Seen) -> Any:
            key, value = (jnp.repeat(a, self.repeats, 2) for a in (key, value))
            query, key, value = map(self._to_heads, (query, key, value))
            outputs, (*_, log_weight) = self.inner.forward(query, key, value, seen)
            return self._to_positions(outputs), query, key, value, log_weight

        mapped = self.split.run(
            run,
            (positions, positions, positions, self.split.seen(seen, over_heads=True)),
            (positions, heads, heads, heads, self.split.weights(over_heads=True)),
        )
        outputs, *parts, log_weight = mapped(query, key, value, seen)
        return outputs, (*parts, seen, outputs, log_weight)

    def backward(self, residuals: Any, by_output: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `OneDevice.backward`."""
        positions, heads = self.split.positions(), self.split.all_positions()
        query, key, value, seen, outputs, log_weight = residuals

        def run(
            query: jax.Array,
            key: jax.Array,
            value: jax.Array,
            seen: Seen,
            outputs: jax.Array,
            log_weight: jax.Array,
            by_output: jax.Array,
        ) -> Any:
            mean = self._to_heads(blocks.mean_of(outputs, by_output))
            by_output = self._to_heads(by_output)
            gradients = self.inner.gradients(
                query, key, value, seen, log_weight=log_weight, by_output=by_output, mean=mean
            )
            by_query, by_key, by_value = map(self._to_positions, gradients)
            return by_query, self._of_repeats(by_key), self._of_repeats(by_value)

        mapped = self.split.run(
            run,
            (
                *(heads, heads, heads, self.split.seen(seen, over_heads=True)),
                *(positions, self.split.weights(over_heads=True), positions),
            ),
            (positions, positions, positions),
        )
        return mapped(query, key, value, seen, outputs, log_weight, by_output)

    def _to_heads(self, a: jax.Array) -> jax.Array:
        """`[B, T / n, H, D]` -> `[B, T, H / n, D]`."""
        return lax.all_to_all(a, self.split.axis, split_axis=2, concat_axis=1, tiled=True)

    def _to_positions(self, a: jax.Array) -> jax.Array:
        return lax.all_to_all(a, self.split.axis, split_axis=1, concat_axis=2, tiled=True)

    def _of_repeats(self, by_key: jax.Array) -> jax.Array:
        """The sum of the gradients by the copies of a head."""
        if self.repeats == 1:
            return by_key
        rows, keys, heads, dim = by_key.shape
        return by_key.reshape(rows, keys, heads // self.repeats, self.repeats, dim).sum(3)

    def _seen(self, seen: Seen) -> Seen:
        """With the mask of each head of keys as often as the head."""
        mask = seen.mask
        if mask is None or mask.shape[1] * mask.shape[2] == 1:
            return seen
        rows, heads, group, *rest = mask.shape
        return dataclasses.replace(seen, mask=mask.reshape(rows, heads * self.repeats, group // self.repeats, *rest))
