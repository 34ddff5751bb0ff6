"""The base of compressors that send some entries of an array."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jpipe._util.foreign import shown
from jpipe.compress import _sparse
from jpipe.compress._compressor import SparseCompressor, Wire, check_number, size_of


@dataclasses.dataclass(frozen=True)
class PackedCompressor(SparseCompressor):
    """Sends some entries of an array, packed.

    The wire holds `values`, and `indices` (int32) or a `bitmap` (uint32 words), whichever takes
    fewer bytes. Where a dense array takes no more bytes than both, it holds all entries as `values`, with zeros
    for those that are not sent.

    Attributes:
      density: part of the entries that are sent, in (0, 1].
    """

    density: float

    def __post_init__(self):
        check_number(self, "density", whole=False)
        if not (0 < self.density <= 1):
            raise ValueError(
                f"`density` of {type(self).__name__} must be above 0 and at most 1, got "
                f"{shown(self.density)}: it is the part of the entries that are sent. Take 0.01 for "
                "one in a hundred."
            )

    def check(self, like: Any, what: str = "the array") -> None:
        """See `Compressor`. Refuses arrays that indices of 32 bits cannot count as well."""
        super().check(like, what)
        if size_of(like) >= 2**31:
            raise ValueError(
                f"{type(self).__name__} sends indices of 32 bits, but {what} has "
                f"{size_of(like):,} entries. Split it, or quantise it."
            )

    def for_gradient(self, like: Any) -> "PackedCompressor":
        """Sends the gradients of biases and scales of norms whole: of a few per cent of them a model does not train."""
        return dataclasses.replace(self, density=1) if len(like.shape) < 2 else self

    def packed(self, x: jax.Array, mask: jax.Array) -> tuple[Wire, jax.Array]:
        """The wire of the entries in a mask `[n]`, and int32 `[]`, the number of entries without room."""
        room = _sparse.room_of(x, self._room(x))
        if room is not None:
            return _sparse.pack(x.reshape(-1), mask, room)
        values = jnp.where(mask.reshape(x.shape), x, jnp.zeros_like(x))
        return {"values": values}, jnp.zeros((), jnp.int32)

    def decode(self, wire: Mapping[str, jax.Array], like: Any) -> jax.Array:
        """The entries that were sent, and 0 elsewhere."""
        values = wire["values"]
        if len(wire) > 1:
            values = _sparse.unpack(wire, size_of(like))
        return values.reshape(like.shape).astype(like.dtype)

    def support(self, wire: Mapping[str, jax.Array]) -> Wire:
        """`indices`, a `bitmap`, a bool `mask` where the wire is dense; `{}`: all entries."""
        if self.density == 1:
            return {}
        return _sparse.support(wire) or {"mask": wire["values"] != 0}

    def encode_at(self, x: jax.Array, support: Mapping[str, jax.Array]) -> Wire:
        """The entries in the support."""
        if not support:
            return {"values": x}
        if "mask" in support:
            return {"values": jnp.where(support["mask"], x, jnp.zeros_like(x))}
        return _sparse.pack_at(x.reshape(-1), support, self._room(x))

    def _room(self, like: Any) -> int:
        """Entries that a packed wire has room for."""
        return num_kept(self.density, size_of(like))


def num_kept(density: float, n: int) -> int:
    """Entries of n at a density, at least 1."""
    return max(1, math.floor(density * n))
