"""Dynamic communication thresholding: entries above a threshold that is renewed now and then."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.compress._compressor import Wire, check_number, size_of
from jpipe.compress._packed import PackedCompressor, num_kept


class ThresholdState(NamedTuple):
    """Between two arrays.

    Attributes:
      threshold: smallest magnitude that is sent.
      age: int32, arrays encoded since the threshold was computed; 0: compute it now.
      density: float32, part of the entries that the last `encode` sent.
      overflow: int32, entries above the threshold that had no room, since `init`; at most 2^31 - 1.
    """

    threshold: jax.Array
    age: jax.Array
    density: jax.Array
    overflow: jax.Array


@suggests
@dataclasses.dataclass(frozen=True)
class Threshold(PackedCompressor):
    """Sends the entries whose magnitude is at least a threshold, exactly; the others become 0.

    The threshold is the `floor(density * n)`-th largest magnitude of an array of n entries. It is
    computed every `every` arrays and kept between, so most arrays need no selection. As many
    entries pass it as the array then has; the wire has room for `room * density * n` of them.
    Entries beyond the room are not sent. They are counted, and the next `encode` computes the
    threshold anew. Entries that are exactly 0 are not sent, they arrive as 0 anyway. NaNs are
    sent. A density of 1 sends every entry.

    The wire is that of `PackedCompressor`.

    Attributes:
      density: part of the entries that are sent, in (0, 1].
      every: arrays until the threshold is computed anew.
      room: entries that fit, relative to `density * n`; at least 1.

    Raises:
      ValueError: if an attribute is out of range.

    References:
      Gupta et al., "Training recommender systems at scale: communication-efficient model and data
      parallelism", KDD 2021, arXiv:2010.08899, sections 3.1 (gradients) and 3.2 (activations).
    """

    density: float
    every: int = 1000
    room: float = 1.5

    def __post_init__(self):
        super().__post_init__()
        check_number(self, "every")
        check_number(self, "room", whole=False)
        if self.every < 1:
            raise ValueError(
                f"`every` of Threshold must be at least 1, got {shown(self.every)}: 1 computes the "
                "threshold of each array; the paper takes 1000."
            )
        if not (1 <= self.room < math.inf):
            raise ValueError(
                f"`room` of Threshold must be at least 1, got {shown(self.room)}: a wire has room for "
                "`room * density` of the entries. 1.5 leaves room for a density that drifts."
            )

    def init(self, like: Any) -> ThresholdState:
        """The first `encode` computes the threshold."""
        return ThresholdState(
            jnp.zeros((), jnp.promote_types(like.dtype, jnp.float32)),
            jnp.zeros((), jnp.int32),
            jnp.zeros((), jnp.float32),
            jnp.zeros((), jnp.int32),
        )

    def encode(self, x: jax.Array, state: ThresholdState) -> tuple[Wire, Any]:
        """The entries at or above the threshold."""
        if self.density == 1:
            return {"values": x}, state._replace(density=jnp.ones((), jnp.float32))
        flat = x.reshape(-1)
        magnitude = jnp.abs(flat).astype(state.threshold.dtype)
        kept = num_kept(self.density, flat.size)
        # The selection is in a branch, so it costs nothing while the threshold is kept.
        threshold = lax.cond(
            state.age == 0,
            lambda magnitude, _: lax.top_k(magnitude, kept)[0][-1],
            lambda _, threshold: threshold,
            magnitude,
            state.threshold,
        )
        # `not below` instead of `at least`: NaNs are sent, so the receiver sees them.
        mask = ~(magnitude < threshold) & (flat != 0)
        wire, overflow = self.packed(x, mask)
        sent = jnp.sum(mask, dtype=jnp.int32) - overflow
        age = jnp.where(overflow > 0, 0, (state.age + 1) % self.every)
        # A counter that wrapped would be negative.
        left = jnp.int32(jnp.iinfo(jnp.int32).max) - state.overflow
        return wire, ThresholdState(
            threshold,
            age.astype(jnp.int32),
            sent.astype(jnp.float32) / flat.size,
            state.overflow + jnp.minimum(overflow, left),
        )

    def counts(self, state: ThresholdState) -> dict[str, jax.Array]:
        """`density` of the last array, and `overflow` since the start."""
        return {"density": state.density, "overflow": state.overflow}

    def _room(self, like: Any) -> int:
        kept = num_kept(self.density, size_of(like))
        return min(size_of(like), math.ceil(self.room * kept))
