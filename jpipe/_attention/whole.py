"""Attention of few positions on one device, whose scores are computed at once."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

_FUSED_ATTENTION = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
_TILE = 64
"""Positions in a tile of cuDNN's kernel. JAX does not check that a sequence is made of whole ones."""


def whole_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None, *, scale: float, is_causal: bool
) -> jax.Array:
    """`jax.nn.dot_product_attention`, whose backward does not keep the probabilities.

    The probabilities are as many as positions times positions, so a pipeline does not keep them for
    every microbatch in flight. The backward computes them again.
    """
    attention: Any = jax.nn.dot_product_attention
    if query.dtype == jnp.float64:  # JAX computes every softmax in float32
        attention = _attention_in_float64
    attention = functools.partial(attention, scale=scale, is_causal=is_causal)
    return jax.checkpoint(attention)(query, key, value, mask=mask)


def attention_in_kernel(
    query: jax.Array, key: jax.Array, value: jax.Array, *, scale: float, is_causal: bool
) -> jax.Array:
    """Attention in a kernel of cuDNN, which never writes the probabilities. See `has_kernel`."""
    return _FUSED_ATTENTION(query, key, value, scale=scale, is_causal=is_causal)


def has_kernel(query: jax.Array, key: jax.Array, value: jax.Array) -> bool:
    """Returns whether cuDNN has a kernel for the attention of these arrays, without a mask.

    It needs a GPU, cuDNN, whole tiles of positions, and numbers of 16 bits, at most 256 of them per
    head (before H100s: 128). On a mesh XLA may have to split the products of attention over devices,
    which it cannot do to a kernel.
    """
    if platform() != "gpu" or not jax.sharding.get_abstract_mesh().empty:
        return False
    if query.shape[1] % _TILE or key.shape[1] % _TILE:
        return False
    try:
        jax.eval_shape(_FUSED_ATTENTION, query, key, value)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def platform() -> str:
    """The platform of JAX's default device, for example "gpu"."""
    device = jax.config.jax_default_device
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def _attention_in_float64(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None,
    scale: float,
    is_causal: bool,
) -> jax.Array:
    repeats = query.shape[2] // key.shape[2]
    if repeats > 1:
        key, value = (jnp.repeat(a, repeats, 2) for a in (key, value))
    logits = jnp.einsum("bthd,bmhd->bhtm", query, key) * scale
    seen = jnp.ones((1, 1, *logits.shape[2:]), bool)
    if is_causal:
        seen = jnp.tril(seen)
    if mask is not None:
        seen &= mask
    # A finite number, so that a position that sees none gets the mean of all.
    logits = jnp.where(seen, logits, jnp.finfo(logits.dtype).min)
    return jnp.einsum("bhtm,bmhd->bthd", jax.nn.softmax(logits), value)
