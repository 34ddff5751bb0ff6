"""Some entries of an array, packed: values with their indices, or with a bitmap.

Letters: n entries of the array, r entries that a wire has room for.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.compress._compressor import Wire, size_of

WORD = 32


def room_of(like: Any, room: int) -> int | None:
    """Entries that a wire carries; None: a dense array takes no more bytes than a packed one."""
    n, itemsize = size_of(like), jnp.dtype(like.dtype).itemsize
    packed = room * itemsize + min(room * 4, num_words(n) * 4)
    return room if packed < n * itemsize else None


def has_bitmap(n: int, room: int) -> bool:
    """Whether a bitmap of n bits takes fewer bytes than `room` indices of 32 bits."""
    return num_words(n) < room


def num_words(n: int) -> int:
    """Words of a bitmap."""
    return -(-n // WORD)


def pack(x: jax.Array, mask: jax.Array, room: int) -> tuple[Wire, jax.Array]:
    """Packs entries in their order, without a sort.

    Args:
      x: `[n]`.
      mask: bool `[n]`, the entries to send.
      room: r.

    Returns:
      The wire, and int32 `[]`, the number of entries that did not fit. These are the last ones.
    """
    n = x.size
    position = jnp.cumsum(mask, dtype=jnp.int32) - 1
    sent = mask & (position < room)
    indices = (
        jnp.full(room, n, jnp.int32)
        .at[jnp.where(sent, position, room)]
        .set(jnp.arange(n, dtype=jnp.int32), mode="drop")
    )
    overflow = jnp.maximum(position[-1] + 1 - room, 0)
    values = _take(x, indices)
    if has_bitmap(n, room):
        return {"values": values, "bitmap": _to_words(sent)}, overflow
    return {"values": values, "indices": indices}, overflow


def support(wire: Mapping[str, jax.Array]) -> Wire:
    """Which entries a packed wire carries."""
    return {name: a for name, a in wire.items() if name != "values"}


def pack_at(x: jax.Array, support: Mapping[str, jax.Array], room: int) -> Wire:
    """The wire of the entries of x `[n]` in a support of r entries."""
    if "bitmap" in support:
        return pack(x, _to_mask(support["bitmap"], x.size), room)[0]
    return {"values": _take(x, support["indices"]), **support}


def unpack(wire: Mapping[str, jax.Array], n: int) -> jax.Array:
    """The entries of a packed wire in their places, `[n]`, and 0 elsewhere."""
    values = wire["values"]
    if "bitmap" in wire:
        mask = _to_mask(wire["bitmap"], n)
        position = jnp.cumsum(mask, dtype=jnp.int32) - 1
        return jnp.where(mask, _take(values, position), jnp.zeros((), values.dtype))
    return jnp.zeros(n, values.dtype).at[wire["indices"]].set(values, mode="drop")


def _take(x: jax.Array, indices: jax.Array) -> jax.Array:
    """Entries of x; 0 for indices out of range."""
    return jnp.asarray(x).at[indices].get(mode="fill", fill_value=0)


def _to_words(mask: jax.Array) -> jax.Array:
    """uint32 `[words]` of bool `[n]`; the first entry is the lowest bit of the first word."""
    words = num_words(mask.size)
    bits = jnp.pad(mask, (0, words * WORD - mask.size)).reshape(words, WORD)
    shifts = jnp.arange(WORD, dtype=jnp.uint32)[None]
    return jnp.sum(bits.astype(jnp.uint32) << shifts, axis=1, dtype=jnp.uint32)


def _to_mask(words: jax.Array, n: int) -> jax.Array:
    """Bool `[n]` of uint32 `[words]`."""
    shifts = jnp.arange(WORD, dtype=jnp.uint32)[None]
    bits = (words[:, None] >> shifts) & jnp.uint32(1)
    return bits.reshape(-1)[:n] == 1
