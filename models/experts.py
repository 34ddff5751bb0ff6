"""Experts on several devices: how positions get to their experts, and results back.

Everything here runs on one device with its part of the positions, in a `jax.shard_map` if devices exchange. Without
axes to exchange over, the device has all experts.

    rows, sorted by expert ──> exchange ──> sorted by expert ──> experts ──> back ──> exchange ──> back ──> gates

Letters: b sequences and t positions of a device, n = b t, D width, F hidden units of an expert, E experts, K experts of
a position, P devices that exchange, L = E / P experts of a device.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jpipe.mesh import platform

Axes = tuple[str, ...]


def dropless(
    x: jax.Array,
    chosen: jax.Array,
    gates: jax.Array,
    experts_in: jax.Array,
    experts_out: jax.Array,
    *,
    exchange: Axes,
) -> tuple[jax.Array, jax.Array]:
    """Every position goes to all its experts. Products of groups of rows compute the experts (`jax.lax.ragged_dot`).

    Args:
      x: `[b, t, D]`.
      chosen: `[b, t, K]`, the experts of each position.
      gates: `[b, t, K]`, the weights of their results.
      experts_in: `[L, D, F]`.
      experts_out: `[L, F, D]`.
      exchange: the axes of the mesh over which the experts are split.

    Returns:
      `[b, t, D]`, and the share of the choices of each sequence that was dropped, `[b]`: 0.
    """
    num_experts = experts_in.shape[0] * _size(exchange)
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    rows = x.reshape(-1, x.shape[-1])[order // chosen.shape[-1]]
    sizes = _counts(chosen.reshape(-1), num_experts)
    received, experts, send_back = _exchanged(rows, sizes.reshape(_size(exchange), -1), chosen.shape[-1], exchange)
    results = send_back(_grouped(received, experts, experts_in, experts_out))
    results = results[jnp.argsort(order)].reshape(*chosen.shape, -1)
    return jnp.einsum("btkd,btk->btd", results, gates), jnp.zeros_like(x[:, 0, 0])


def with_capacity(
    x: jax.Array,
    chosen: jax.Array,
    gates: jax.Array,
    experts_in: jax.Array,
    experts_out: jax.Array,
    *,
    exchange: Axes,
    most: int,
) -> tuple[jax.Array, jax.Array]:
    """An expert takes at most `most` choices of each sequence, the first ones. See `dropless`."""
    (b, t, K), (L, D, _) = chosen.shape, experts_in.shape
    num_experts = L * _size(exchange)
    one_hot = jax.nn.one_hot(chosen.reshape(b, t * K), num_experts, dtype=jnp.int32)
    rank = ((jnp.cumsum(one_hot, axis=1) - 1) * one_hot).sum(-1)  # [b, t K] among the choices of its expert
    sequence = jnp.arange(b)[:, None]
    kept = rank < most
    nowhere = num_experts * b * most
    slot = jnp.where(kept, (chosen.reshape(b, t * K) * b + sequence) * most + rank, nowhere)
    position = sequence * t + jnp.arange(t * K)[None] // K
    source = jnp.full(nowhere, b * t).at[slot.reshape(-1)].set(position.reshape(-1), mode="drop")
    slots = x.reshape(b * t, D).at[source].get(mode="fill", fill_value=0).reshape(num_experts, b * most, D)
    if exchange:
        slots = lax.all_to_all(slots, exchange, split_axis=0, concat_axis=1, tiled=True)  # [L, P b most, D]
    results = nnx.gelu(jnp.einsum("ecd,edf->ecf", slots, experts_in))
    results = jnp.einsum("ecf,efd->ecd", results, experts_out)
    if exchange:
        results = lax.all_to_all(results, exchange, split_axis=1, concat_axis=0, tiled=True)
    results = results.reshape(nowhere, D).at[slot].get(mode="fill", fill_value=0).reshape(b, t, K, D)
    dropped = 1 - kept.astype(x.dtype).mean(1)
    return jnp.einsum("btkd,btk->btd", results, gates), dropped


def _size(axes: Axes) -> int:
    """The number of devices along axes of the mesh."""
    return math.prod(map(lax.axis_size, axes))


def _counts(values: jax.Array, number: int) -> jax.Array:
    """How often each of the first integers is among the values."""
    return (values[:, None] == jnp.arange(number)[None]).sum(0, dtype=jnp.int32)


def _grouped(rows: jax.Array, experts: jax.Array, experts_in: jax.Array, experts_out: jax.Array) -> jax.Array:
    """Each row through its expert.

    Args:
      rows: `[R, D]`.
      experts: `[R]`, the expert of each row among those of the device; L for a row that is padding, whose result is 0.
      experts_in: `[L, D, F]`.
      experts_out: `[L, F, D]`.
    """
    L = experts_in.shape[0]
    order = jnp.argsort(experts, stable=True)
    sizes = _counts(experts, L)
    is_row = (experts[order] < L)[:, None]
    # What is behind the last group is not defined.
    sorted_rows = jnp.where(is_row, rows[order], 0)
    hidden = jnp.where(is_row, lax.ragged_dot(sorted_rows, experts_in, sizes), 0)
    results = jnp.where(is_row, lax.ragged_dot(nnx.gelu(hidden), experts_out, sizes), 0)
    return results[jnp.argsort(order)]


class _Exchanged(NamedTuple):
    """Rows on the devices of their experts.

    Attributes:
      rows: `[R, D]`.
      experts: `[R]`, see `_grouped`.
      send_back: results `[R, D]` of the rows -> results `[n K, D]` on the devices that the rows came from.
    """

    rows: jax.Array
    experts: jax.Array
    send_back: Callable[[jax.Array], jax.Array]


def _exchanged(rows: jax.Array, sizes: jax.Array, num_chosen: int, axes: Axes) -> _Exchanged:
    """Sends rows to the devices of their experts.

    Args:
      rows: `[n K, D]`, sorted by expert.
      sizes: `[P, L]`, the number of rows of each expert.
      num_chosen: K.
      axes: the axes of the mesh; without any nothing is sent.
    """
    if not axes:
        return _Exchanged(rows, _group_numbers(sizes.reshape(-1), rows.shape[0]), lambda results: results)
    arriving = lax.all_to_all(sizes, axes, 0, 0, tiled=True)  # [P, L], from each device
    # A position has different experts, so this is the most rows that one device sends to another.
    most = rows.shape[0] // num_chosen * min(num_chosen, sizes.shape[1])
    send = _send_ragged if platform() in ("gpu", "tpu") else _send_padded
    return send(rows, sizes, arriving, most, axes)


def _group_numbers(sizes: jax.Array, number: int) -> jax.Array:
    """The group of each of the first integers, for groups of these sizes one after the other; behind them L."""
    ends = jnp.cumsum(sizes)
    return (jnp.arange(number)[:, None] >= ends[None]).sum(1, dtype=jnp.int32)


def _send_padded(rows: jax.Array, sizes: jax.Array, arriving: jax.Array, most: int, axes: Axes) -> _Exchanged:
    """By an all-to-all of as many slots for each device as it can ever get: `P * most` rows."""
    P, D = sizes.shape[0], rows.shape[1]
    totals = sizes.sum(1)
    starts = jnp.cumsum(totals) - totals
    index = starts[:, None] + jnp.arange(most)[None]
    is_row = jnp.arange(most)[None] < totals[:, None]
    slots = jnp.where(is_row[..., None], rows[jnp.minimum(index, rows.shape[0] - 1)], 0)  # [P, most, D]
    received = lax.all_to_all(slots, axes, 0, 0, tiled=True).reshape(P * most, D)
    experts = jax.vmap(lambda sizes: _group_numbers(sizes, most))(arriving).reshape(-1)
    device = _group_numbers(totals, rows.shape[0])  # of each row
    slot = device * most + jnp.arange(rows.shape[0]) - starts[device]

    def send_back(results: jax.Array) -> jax.Array:
        back = lax.all_to_all(results.reshape(P, most, D), axes, 0, 0, tiled=True)
        return back.reshape(P * most, D)[slot]

    return _Exchanged(received, experts, send_back)


def _send_ragged(rows: jax.Array, sizes: jax.Array, arriving: jax.Array, most: int, axes: Axes) -> _Exchanged:
    """By an all-to-all of as many rows as there are. The receiver has room for `P * most`."""
    P, D = sizes.shape[0], rows.shape[1]
    sent, got = sizes.sum(1), arriving.sum(1)
    starts, places = jnp.cumsum(sent) - sent, jnp.cumsum(got) - got
    there = lax.all_to_all(places, axes, 0, 0, tiled=True)  # where each device puts the rows of this one
    back = lax.all_to_all(starts, axes, 0, 0, tiled=True)
    room = jnp.zeros((P * most, D), rows.dtype)
    received = lax.ragged_all_to_all(rows, room, starts, sent, there, got, axis_name=axes)
    groups = _group_numbers(arriving.reshape(-1), P * most)
    experts = jnp.where(groups < arriving.size, groups % arriving.shape[1], arriving.shape[1])

    def send_back(results: jax.Array) -> jax.Array:
        return lax.ragged_all_to_all(results, jnp.zeros_like(rows), places, got, back, sent, axis_name=axes)

    return _Exchanged(received, experts, send_back)
