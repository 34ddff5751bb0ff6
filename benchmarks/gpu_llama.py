"""A small Llama as a user of Flax writes it, who does not know jpipe: one module, without a call of the package.

Weights are in float32 and layers compute in bfloat16.

Letters: B batch, T positions, D width, H heads, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx


def rotated(x: jax.Array) -> jax.Array:  # [B, T, H, D / H]
    """The two halves of each head, turned by the angles of their position."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10_000 ** (jnp.arange(half) / half)
    cos, sin = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


_norm = functools.partial(nnx.RMSNorm, dtype=jnp.bfloat16)
_linear = functools.partial(nnx.Linear, use_bias=False, dtype=jnp.bfloat16)


class Block(nnx.Module):
    """Attention with four heads of queries for one of keys, and a gated MLP, both residual."""

    def __init__(self, dim: int, num_heads: int, *, rngs: nnx.Rngs):
        self.num_heads, self.num_keys = num_heads, max(num_heads // 4, 1)
        keys = dim // num_heads * self.num_keys
        self.norm, self.mlp_norm = _norm(dim, rngs=rngs), _norm(dim, rngs=rngs)
        shapes = {"query": (dim, dim), "key": (dim, keys), "value": (dim, keys), "out": (dim, dim)}
        hidden = dim * 7 // 2
        shapes |= {"gate": (dim, hidden), "up": (dim, hidden), "down": (hidden, dim)}
        for name, (inputs, outputs) in shapes.items():
            setattr(self, name, _linear(inputs, outputs, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
        y = self.norm(x)
        heads = self.num_heads, self.num_keys, self.num_keys
        parts = zip((self.query, self.key, self.value), heads, strict=True)
        query, key, value = (project(y).reshape(*y.shape[:2], n, -1) for project, n in parts)
        attended = jax.nn.dot_product_attention(rotated(query), rotated(key), value, is_causal=True)
        x = x + self.out(attended.reshape(x.shape))
        y = self.mlp_norm(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Llama(nnx.Module):
    """An embedding, blocks, and a head."""

    def __init__(self, vocab_size: int, dim: int, num_heads: int, num_blocks: int, *, rngs: nnx.Rngs):
        self.words = nnx.Embed(vocab_size, dim, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.List([Block(dim, num_heads, rngs=rngs) for _ in range(num_blocks)])
        self.norm = _norm(dim, rngs=rngs)
        self.head = _linear(dim, vocab_size, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:  # [B, T] integers -> [B, T, V]
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(logits: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """The mean cross-entropy of the labels."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
