"""Attention, whose positions may be split over an axis of the mesh.

Letters: B batch, T positions of queries, M positions of keys and values, H heads of queries, K heads of keys and
values, D numbers of a head.
"""

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jpipe._attention.one_device import OneDevice
from jpipe._attention.over_heads import OverHeads
from jpipe._attention.ring import Ring
from jpipe._attention.seen import Seen
from jpipe._attention.split import Split
from jpipe._attention.whole import attention_in_kernel, whole_attention
from jpipe._slices import current_slice, first_of_slice, whole_sequence
from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.mesh import CONTEXT

Segments = jax.Array | tuple[jax.Array, jax.Array]
Method = Literal["ring", "all_to_all"]


@suggests
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    segment_ids: Segments | None = None,
    method: Method | None = None,
    axis: str = CONTEXT,
    block_size: int = 1024,
) -> jax.Array:
    """Attention as `jax.nn.dot_product_attention`, for long sequences too, and for an axis of the mesh over positions.

    No array has as many numbers as positions times positions, and a backward keeps none: beyond `block_size` positions
    scores are computed tile by tile.

    If the mesh of the surroundings, such as a pipeline's, has an axis "context" of several devices, each of them has
    an equal part of the positions, one after the other. Positions keep their order for the caller, so rotary
    embeddings and masks are those of one device. The arrays need T/n and M/n positions a device, whole numbers.

    In a schedule whose microbatches are slices of sequences (`jpipe.schedules.seq_one_f_one_b`) arrays are those of a
    slice, and queries see the keys of the slices before too; `is_causal` is needed, and there is no `mask`.

    - "ring": each device gets the keys and values of every other one in turn (Liu et al., 2023). Under a causal mask
      devices first exchange halves of their positions, so that all do equal work. T must be a multiple of 2 n then.
    - "all_to_all": each device gets all positions of some heads, and gives away its positions of the others
      (DeepSpeed-Ulysses, Jacobs et al., 2023). n must divide the heads of a device.

    Args:
      query: `[B, T, H, D]`.
      key: `[B, M, K, D]`. K divides H: heads of queries share heads of keys in groups.
      value: `[B, M, K, D]`.
      mask: bool `[B or 1, H or 1, T or 1, M or 1]`, True where a query sees a key.
      scale: factor of the scores. None: 1 / sqrt(D).
      is_causal: whether a query sees only keys at its own position and before it.
      segment_ids: integers `[B, T]`, the number of the document of each position, if rows hold several documents: a
        query sees the keys of its own document. If keys have other positions than queries, a pair of these for
        queries and keys.
      method: "ring" or "all_to_all", how devices share the work. None: of those that are possible the one of which a
        device sends fewer bytes in a forward and its backward. Of equal ones "all_to_all", whose devices need not
        wait for each other in between.
      axis: the axis of the mesh over positions.
      block_size: the most positions of a tile. A tile of scores takes `4 B H block_size ** 2` bytes on a device.

    Returns:
      `[B, T, H, D]`. A query that sees no key gets the mean of all values.

    Raises:
      ValueError: if shapes do not fit each other, the mesh or `method`.

    References:
      Liu et al., "Ring Attention with Blockwise Transformers", 2023, arXiv:2310.01889.
      Jacobs et al., "DeepSpeed Ulysses", 2023, arXiv:2309.14509.
      Dao et al., "FlashAttention", 2022, arXiv:2205.14135.
    """
    query_segments, key_segments = segments = _segments(segment_ids)
    _check_shapes(query, key, value, mask, segments)
    if not hasattr(block_size, "__index__") or block_size < 1:
        raise ValueError(f"`block_size` must be a whole number of positions, at least 1, got {shown(block_size)}.")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    # In the same positions every query sees itself.
    may_be_empty = mask is not None or query_segments is not key_segments
    first = None
    if current_slice() is not None:
        _check_slice(query, key, mask, is_causal=is_causal, axis=axis)
        first = first_of_slice(query.shape[1])
        key, value = whole_sequence(key), whole_sequence(value)
        key_segments = None if key_segments is None else whole_sequence(key_segments)
    alone = OneDevice(scale, is_causal, block_size)
    how = _over_devices(query, key, alone, method=method, axis=axis)
    if how is alone:
        if mask is None and query_segments is None and first is None:
            in_kernel = attention_in_kernel(query, key, value, scale=scale, is_causal=is_causal)
            if in_kernel is not None:
                return in_kernel
        if max(query.shape[1], key.shape[1]) <= block_size:
            mask = _with_segments(mask, query_segments, key_segments)
            if first is not None:
                mask, is_causal = _with_causal(mask, first, query.shape[1], key.shape[1]), False
            return whole_attention(query, key, value, mask, scale=scale, is_causal=is_causal)
    if mask is not None:
        rows, heads, *rest = mask.shape
        groups = (1, 1) if heads == 1 else (key.shape[2], heads // key.shape[2])
        mask = mask.reshape(rows, *groups, *rest)
    seen = Seen(mask, query_segments, key_segments, first, may_be_empty=may_be_empty)
    return _attend(how, query, key, value, seen)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: Any, query: jax.Array, key: jax.Array, value: jax.Array, seen: Seen) -> jax.Array:
    return how.forward(query, key, value, seen)[0]


def _attend_backward(how: Any, residuals: Any, by_output: jax.Array) -> tuple:
    return *how.backward(residuals, by_output), None


_attend.defvjp(lambda how, *args: how.forward(*args), _attend_backward)


# -- The method


def _over_devices(
    query: jax.Array, key: jax.Array, alone: OneDevice, *, method: Method | None, axis: str
) -> OneDevice | Ring | OverHeads:
    """How the devices of the axis share the work; `alone` without several of them."""
    if method not in (None, "ring", "all_to_all"):
        raise ValueError(f'`method` must be "ring", "all_to_all" or None, got {shown(method)}.')
    mesh = jax.sharding.get_abstract_mesh()
    n = mesh.shape.get(axis, 1)
    if n == 1:
        return alone
    if axis not in mesh.auto_axes:
        raise ValueError(
            f"`jpipe.attention` splits positions over the axis {axis!r} of the mesh by itself, and the axis is "
            f"{'mapped already' if axis in mesh.manual_axes else 'explicit'}. Call it outside of a `jax.shard_map` "
            "over this axis, on a mesh with automatic axes, such as that of `jpipe.make_mesh`."
        )
    rows, positions, num_heads, dim = query.shape
    num_keys, num_key_heads = key.shape[1:3]
    for name, length in (("queries", positions), ("keys", num_keys)):
        if length % n:
            raise ValueError(
                f"The {n} devices of the axis {axis!r} must have equal parts of the {name}, and there are {length}: "
                f"{n} does not divide {length}. Pad the sequence, and mask the padding, or make the axis smaller."
            )
    split = Split.of(mesh, axis, rows, num_key_heads)
    part = [mesh.shape[name] for name in split.rows], [mesh.shape[name] for name in split.heads]
    rows //= math.prod(part[0])
    num_heads, num_key_heads = (heads // math.prod(part[1]) for heads in (num_heads, num_key_heads))
    is_balanced = alone.is_causal and positions == num_keys
    ring = Ring(split, alone.scale, alone.is_causal, is_balanced, alone.block_size)
    over_heads = OverHeads.of(split, alone, num_key_heads)
    shapes = (rows, positions // n, num_heads, dim), num_keys // n, num_key_heads
    refusals = {
        "ring": f"a causal mask cuts it into {2 * n} equal spans, and {2 * n} does not divide the {positions} positions"
        if is_balanced and positions % (2 * n)
        else "",
        "all_to_all": f"each gets an equal part of the heads, and {n} does not divide the {num_heads} heads of a device"
        if num_heads % n
        else "",
    }
    methods: dict[str, Ring | OverHeads] = {"all_to_all": over_heads, "ring": ring}
    possible = {name: how for name, how in methods.items() if not refusals[name] and method in (None, name)}
    if not possible:
        names = [method] if method else [*methods]
        reasons = "; ".join(f'for "{name}" {refusals[name]}' for name in names)
        raise ValueError(
            f"The {n} devices of the axis {axis!r} cannot share this attention: {reasons}. Pad the sequence, use "
            f"{'another `method`' if method else 'another number of heads'}, or make the axis smaller."
        )
    return min(possible.values(), key=lambda how: how.sent(*shapes))


# -- Arguments


def _segments(segment_ids: Any) -> tuple[Any, Any]:
    if isinstance(segment_ids, tuple | list):
        if len(segment_ids) != 2:
            raise ValueError(
                f"`segment_ids` must be an array, or a pair for queries and keys, got {len(segment_ids)} arrays."
            )
        return segment_ids[0], segment_ids[1]
    return segment_ids, segment_ids


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array, mask: Any, segments: tuple[Any, Any]) -> None:
    shapes = ", ".join(str(list(a.shape)) for a in (query, key, value))
    if any(a.ndim != 4 for a in (query, key, value)):
        raise ValueError(f"`query`, `key`, `value` must be `[batch, positions, heads, dim]`, got {shapes}.")
    rows, positions, num_heads, dim = query.shape
    _, num_keys, num_key_heads, _ = key.shape
    if key.shape != value.shape or key.shape[0] != rows or key.shape[3] != dim or num_heads % num_key_heads:
        raise ValueError(
            "`key` and `value` must have one shape, with the batch and the dim of `query`, and a number of heads that "
            f"divides its own, got {shapes} for query, key and value."
        )
    if len({a.dtype for a in (query, key, value)}) > 1:
        dtypes = ", ".join(str(a.dtype) for a in (query, key, value))
        raise ValueError(f"`query`, `key` and `value` must have one dtype, got {dtypes}. Cast them.")
    if mask is not None:
        wanted = rows, num_heads, positions, num_keys
        fits = mask.ndim == 4 and all(n in (1, size) for n, size in zip(mask.shape, wanted))
        if mask.dtype != bool or not fits:
            raise ValueError(
                f"`mask` must be bool of shape {list(wanted)}, or with 1 for some of these, got {mask.dtype} of shape "
                f"{list(mask.shape)}. True means that a query sees a key."
            )
    for name, ids, length in zip(("queries", "keys"), segments, (positions, num_keys), strict=True):
        if ids is not None and (ids.shape != (rows, length) or not jnp.issubdtype(ids.dtype, jnp.integer)):
            raise ValueError(
                f"`segment_ids` of {name} must be integers of shape {[rows, length]}, got {ids.dtype} of shape "
                f"{list(ids.shape)}. Give a pair if queries and keys have other positions."
            )


def _with_segments(mask: Any, query_segments: Any, key_segments: Any) -> Any:
    if query_segments is None:
        return mask
    same = (query_segments[:, :, None] == key_segments[:, None, :])[:, None]
    return same if mask is None else mask & same


def _with_causal(mask: Any, first: jax.Array, num_queries: int, num_keys: int) -> jax.Array:
    """The mask, and that of queries from a position on that see themselves and earlier keys."""
    rows = first + jnp.arange(num_queries, dtype=jnp.int32)
    causal = (rows[:, None] >= jnp.arange(num_keys, dtype=jnp.int32)[None])[None, None]
    return causal if mask is None else mask & causal


def _check_slice(query: jax.Array, key: jax.Array, mask: Any, *, is_causal: bool, axis: str) -> None:
    start = "a schedule with slices runs `jpipe.attention` on one slice of a sequence after the other"
    if not is_causal or key.shape[1] != query.shape[1]:
        raise ValueError(
            f"{start}, so that no query can see a later slice: it needs `is_causal=True`, and keys at the positions of "
            f"the queries, got {key.shape[1]} keys for {query.shape[1]} queries, is_causal={is_causal}. Use a schedule "
            "without slices."
        )
    if mask is not None:
        raise ValueError(
            f"{start}, and `mask` would need the keys of the whole sequence. Give `segment_ids` of documents and "
            "padding instead."
        )
    num_devices = jax.sharding.get_abstract_mesh().shape.get(axis, 1)
    if num_devices > 1:
        raise ValueError(
            f"{start}, and the axis {axis!r} of the mesh splits positions over {num_devices} devices. Use slices or "
            "the axis, not both."
        )
