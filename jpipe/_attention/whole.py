"""Attention of few positions on one device, whose scores are computed at once."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jpipe._attention.split import Split
from jpipe.mesh import DATA, STAGE, platform

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
) -> jax.Array | None:
    """Attention in a kernel of cuDNN, which never writes the probabilities; None if there is none for these arrays.

    It needs a GPU, cuDNN, no mask, whole tiles of positions, and numbers of 16 bits, at most 256 of them per head
    (before H100s: 128). XLA cannot split a kernel over devices. On a mesh each device therefore has one for its rows
    and heads, and there is none if an axis splits something else.
    """
    if platform() != "gpu" or query.shape[1] % _TILE or key.shape[1] % _TILE:
        return None
    try:
        jax.eval_shape(_FUSED_ATTENTION, query, key, value)
    except (NotImplementedError, RuntimeError):
        return None
    kernel = functools.partial(_FUSED_ATTENTION, scale=scale, is_causal=is_causal)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return kernel(query, key, value)
    split = Split.of(mesh, None, query.shape[0], key.shape[2])
    names = {name for name in mesh.auto_axes if mesh.shape[name] > 1} - {STAGE, DATA}
    if not names or names != {*split.rows, *split.heads}:
        return None
    spec = split.positions()
    return split.run(kernel, (spec, spec, spec), spec)(query, key, value)


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
