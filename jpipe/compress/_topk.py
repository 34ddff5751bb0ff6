"""The largest entries of every array."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jpipe._util.suggest import suggests
from jpipe.compress._compressor import Wire
from jpipe.compress._packed import PackedCompressor, num_kept


@suggests
@dataclasses.dataclass(frozen=True)
class TopK(PackedCompressor):
    """Sends the `floor(density * n)` entries of largest magnitude of an array of n entries; the others become 0.

    Of entries of equal magnitude the first ones are sent. Every array is sorted in part, which `Threshold` does now
    and then only. The wire is that of `PackedCompressor`.

    Attributes:
      density: part of the entries that are sent, in (0, 1].

    Raises:
      ValueError: if `density` is out of range.

    References:
      Aji and Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017, arXiv:1704.05021.
    """

    def encode(self, x: jax.Array, state: Any) -> tuple[Wire, Any]:
        """The largest entries."""
        if self.density == 1:
            return {"values": x}, state
        magnitude = jnp.abs(x.reshape(-1))
        # NaNs are the largest: the receiver sees them.
        magnitude = jnp.where(jnp.isnan(magnitude), jnp.inf, magnitude)
        _, indices = lax.top_k(magnitude, num_kept(self.density, x.size))
        mask = jnp.zeros(x.size, bool).at[indices].set(True)
        return self.packed(x, mask)[0], state
