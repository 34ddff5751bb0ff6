"""Arrays as integer codes with one scale per block."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.compress._compressor import Compressor, Wire, check_number, size_of


class QuantizeState(NamedTuple):
    """The state of stochastic rounding.

    Attributes:
      key: uint32 data of a random key.
    """

    key: jax.Array


@suggests
@dataclasses.dataclass(frozen=True)
class Quantize(Compressor):
    """Sends signed codes of 8 or 4 bits and one float32 scale per block.

    The scale of a block is its largest magnitude / 127, or / 7. The error is at most half a scale
    for rounding to nearest. With stochastic rounding it is less than a scale, and 0 on average.
    A block with an infinity or NaN decodes to values that are not finite.

    Attributes:
      bits: 8 (int8 codes) or 4 (two codes in a uint8).
      block: entries with one scale.
      stochastic: whether codes are rounded up with the probability of the fraction.
      seed: the seed of stochastic rounding.

    Raises:
      ValueError: if `bits` is neither 8 nor 4, or `block` is below 1.

    References:
      Alistarh et al., QSGD, NeurIPS 2017, arXiv:1610.02132, section 3.1 (stochastic rounding);
      Dettmers et al., arXiv:2110.02861, section 2.1 (blocks).
    """

    bits: int = 8
    block: int = 256
    stochastic: bool = False
    seed: int = 0

    def __post_init__(self):
        for name in ("bits", "block", "seed"):
            check_number(self, name)
        if self.bits not in (4, 8):
            raise ValueError(
                f"`bits` of Quantize must be 8 or 4, got {shown(self.bits)}: there is no code of other "
                "lengths. For 16 bits take Cast('bfloat16')."
            )
        if self.block < 1:
            raise ValueError(
                f"`block` of Quantize must be at least 1, got {shown(self.block)}: every scale needs an "
                "entry. 256 is usual."
            )
        if not isinstance(self.stochastic, bool):
            raise ValueError(f"`stochastic` of Quantize must be True or False, got {shown(self.stochastic)}.")

    def init(self, like: Any) -> Any:
        """The random key; `()` without stochastic rounding."""
        del like
        if not self.stochastic:
            return ()
        return QuantizeState(jax.random.key_data(jax.random.key(self.seed)))

    def encode(self, x: jax.Array, state: Any) -> tuple[Wire, Any]:
        """`codes` `[blocks, block]` (4 bits: `[blocks, block / 2]`), `scales` `[blocks]`."""
        blocks, block = self._blocks(x)
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32)).reshape(-1)
        x = jnp.pad(x, (0, blocks * block - x.size)).reshape(blocks, block)
        largest = 127 if self.bits == 8 else 7
        scales = (jnp.abs(x).max(axis=1) / largest).astype(jnp.float32)
        steps = jnp.where(scales == 0, jnp.ones_like(scales), scales).astype(x.dtype)
        codes = x / steps[:, None]
        if self.stochastic:
            key, now = jax.random.split(jax.random.wrap_key_data(state.key))
            codes = jnp.floor(codes + jax.random.uniform(now, codes.shape, codes.dtype))
            state = QuantizeState(jax.random.key_data(key))
        else:
            codes = jnp.round(codes)
        codes = jnp.clip(codes, -largest, largest).astype(jnp.int8)
        if self.bits == 4:
            nibbles = (codes + jnp.int8(8)).astype(jnp.uint8)
            codes = nibbles[:, ::2] | (nibbles[:, 1::2] << 4)
        return {"codes": codes, "scales": scales}, state

    def decode(self, wire: Mapping[str, jax.Array], like: Any) -> jax.Array:
        """Codes times scales."""
        blocks, block = self._blocks(like)
        codes = wire["codes"]
        if self.bits == 4:
            pairs = jnp.stack([codes & jnp.uint8(15), codes >> 4], axis=-1)
            codes = pairs.reshape(blocks, block).astype(jnp.int8) - jnp.int8(8)
        dtype = jnp.promote_types(like.dtype, jnp.float32)
        x = codes.astype(dtype) * wire["scales"].astype(dtype)[:, None]
        return x.reshape(-1)[: size_of(like)].reshape(like.shape).astype(like.dtype)

    def _blocks(self, like: Any) -> tuple[int, int]:
        """Number of blocks and their length, even for codes of 4 bits."""
        block = min(self.block, size_of(like))
        if self.bits == 4:
            block += block % 2
        return -(-size_of(like) // block), block
