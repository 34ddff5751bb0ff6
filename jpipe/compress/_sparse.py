"""Some entries of an array, packed: values with their indices, or with a bitmap.

Letters: n entries of the array, r entries that a wire has room for.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jpipe.compress._compressor import Wire, size_of

WORD = 32


def room_of(like: Any, room: int) -> int | None:
    """The number of entries on a wire; None: a dense array takes no more bytes than a packed one."""
    n, itemsize = size_of(like), jnp.dtype(like.dtype).itemsize
    packed = room * itemsize + min(room * 4, num_words(n) * 4)
    return room if packed < n * itemsize else None


def has_bitmap(n: int, room: int) -> bool:
    """Returns whether a bitmap of n bits takes fewer bytes than `room` indices of 32 bits."""
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
    n, words = x.size, _to_words(mask)
    counts, starts = _counts(words)
    indices = _indices(words, n, room)
    overflow = jnp.maximum(starts[-1] + counts[-1] - room, 0)
    values = _take(x, indices)
    if not has_bitmap(n, room):
        return {"values": values, "indices": indices}, overflow
    # Of the word in which the room ends, the first bits are sent.
    left = jnp.clip(room - starts, 0, WORD)
    first_bits = (jnp.uint32(1) << _bit_of(words, left).astype(jnp.uint32)) - 1
    sent = jnp.where(counts <= left, words, words & first_bits)
    return {"values": values, "bitmap": sent}, overflow


def support(wire: Mapping[str, jax.Array]) -> Wire:
    """The part of a packed wire that names its entries."""
    return {name: a for name, a in wire.items() if name != "values"}


def pack_at(x: jax.Array, support: Mapping[str, jax.Array], room: int) -> Wire:
    """The wire of the entries of x `[n]` in a support of r entries."""
    if "bitmap" in support:
        indices = _indices(support["bitmap"], x.size, room)
        return {"values": _take(x, indices), **support}
    return {"values": _take(x, support["indices"]), **support}


def unpack(wire: Mapping[str, jax.Array], n: int) -> jax.Array:
    """The entries of a packed wire in their places, `[n]`, and 0 elsewhere."""
    values = wire["values"]
    indices = wire.get("indices")
    if indices is None:
        indices = _indices(wire["bitmap"], n, values.size)
    return jnp.zeros(n, values.dtype).at[indices].set(values, mode="drop")


def _indices(words: jax.Array, n: int, room: int) -> jax.Array:
    """int32 `[room]`, the first places whose bits are set; n if there are fewer."""
    counts, starts = _counts(words)
    numbers = jnp.arange(room, dtype=jnp.int32)
    # The last word that starts at or before an entry's number.
    starting = jnp.zeros(room, jnp.int32).at[starts].add(1, mode="drop")
    word = jnp.cumsum(starting) - 1
    bit = _bit_of(words[word], numbers - starts[word])
    return jnp.where(numbers < starts[-1] + counts[-1], WORD * word + bit, n)


def _counts(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int32 `[words]`, the bits that are set in each word, and in all words before it.

    A sum over words takes a thirtieth of the time of a sum over entries.
    """
    counts = lax.population_count(words).astype(jnp.int32)
    return counts, jnp.cumsum(counts) - counts


def _bit_of(words: jax.Array, number: jax.Array) -> jax.Array:
    """int32, the place of a set bit in each word, by the bit's number from 0; anything if there are fewer."""
    place = jnp.zeros_like(number)
    for width in (16, 8, 4, 2, 1):
        low = (words >> place.astype(jnp.uint32)) & jnp.uint32((1 << width) - 1)
        count = lax.population_count(low).astype(jnp.int32)
        above = number >= count
        place = place + jnp.where(above, width, 0)
        number = number - jnp.where(above, count, 0)
    return place


def _take(x: jax.Array, indices: jax.Array) -> jax.Array:
    """Entries of x; 0 for indices out of range."""
    return jnp.asarray(x).at[indices].get(mode="fill", fill_value=0)


def _to_words(mask: jax.Array) -> jax.Array:
    """Packs bool `[n]` into uint32 `[words]`; the first entry is the lowest bit of the first word."""
    words = num_words(mask.size)
    bits = jnp.pad(mask, (0, words * WORD - mask.size)).reshape(words, WORD)
    shifts = jnp.arange(WORD, dtype=jnp.uint32)[None]
    return jnp.sum(bits.astype(jnp.uint32) << shifts, axis=1, dtype=jnp.uint32)
