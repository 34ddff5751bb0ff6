"""A decoder-only transformer over bytes.

GPT-2 (Radford et al., 2019): learned positions, norms before attention and MLP,
GELU, initialised as its section 2.3 says. All blocks are structurally equal, so
a stage can run its blocks as one loop. Letters: B batch, T positions, D `dim`,
H heads, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

_KERNEL = nnx.initializers.normal(0.02)


@functools.cache  # the same function each time: blocks stay structurally equal
def _residual_kernel(num_blocks: int):
    """0.02 / sqrt(2 L): two branches a block add up over L blocks to one scale."""
    return nnx.initializers.normal(0.02 / (2 * num_blocks) ** 0.5)


class Embedding(nnx.Module):
    """Sum of a vector for each byte and a vector for each position."""

    def __init__(self, vocab_size: int, seq_len: int, dim: int, *, rngs: nnx.Rngs):
        self.token = nnx.Embed(vocab_size, dim, embedding_init=_KERNEL, rngs=rngs)
        self.position = nnx.Embed(seq_len, dim, embedding_init=_KERNEL, rngs=rngs)

    def __call__(self, tokens):  # [B, T] integers -> [B, T, D]
        if tokens.shape[1] > self.position.num_embeddings:
            raise ValueError(
                f"{tokens.shape[1]} positions, but `seq_len` of the model is "
                f"{self.position.num_embeddings}. Shorten the input or build a longer model."
            )
        positions = self.position(jnp.arange(tokens.shape[1]))
        return self.token(tokens) + positions[None]


class Block(nnx.Module):
    """Causal self-attention, then an MLP of four times the width, both residual."""

    def __init__(self, dim: int, num_heads: int, num_blocks: int, *, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, rngs=rngs)
        norm = functools.partial(nnx.LayerNorm, dim, epsilon=1e-5, rngs=rngs)
        residual = _residual_kernel(num_blocks)
        self.num_heads = num_heads
        self.attention_norm = norm()
        self.qkv = linear(dim, 3 * dim, kernel_init=_KERNEL)
        self.attention_out = linear(dim, dim, kernel_init=residual)
        self.mlp_norm = norm()
        self.mlp_in = linear(dim, 4 * dim, kernel_init=_KERNEL)
        self.mlp_out = linear(4 * dim, dim, kernel_init=residual)

    def __call__(self, x):  # [B, T, D] -> [B, T, D]
        qkv = self.qkv(self.attention_norm(x))
        qkv = qkv.reshape(*x.shape[:2], 3, self.num_heads, -1)  # [B, T, 3, H, D / H]
        query, key, value = jnp.moveaxis(qkv, 2, 0)
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.reshape(x.shape))
        return x + self.mlp_out(nnx.gelu(self.mlp_in(self.mlp_norm(x))))


class Head(nnx.Module):
    """Final norm and the logits of the next byte; its weights are its own."""

    def __init__(self, dim: int, vocab_size: int, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(dim, epsilon=1e-5, rngs=rngs)
        self.linear = nnx.Linear(
            dim, vocab_size, use_bias=False, kernel_init=_KERNEL, rngs=rngs
        )

    def __call__(self, x):  # [B, T, D] -> [B, T, V]
        return self.linear(self.norm(x))


@dataclasses.dataclass(frozen=True)
class Transformer:
    """A decoder-only transformer of `num_blocks` equal blocks."""

    vocab_size: int = 256
    """Number of tokens V: 256 for bytes."""
    seq_len: int = 128
    """The most positions T that it can read; at least `data.seq_len`."""
    dim: int = 128
    """Width D of the residual stream."""
    num_heads: int = 4
    """Attention heads H. Must divide `dim`."""
    num_blocks: int = 8
    """Blocks between the embedding and the head."""

    def __post_init__(self):
        for name in ("vocab_size", "seq_len", "dim", "num_heads", "num_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be at least 1, got {getattr(self, name)}."
                )
        if self.dim % self.num_heads:
            raise ValueError(
                f"`num_heads` must divide `dim` ({self.dim}), got {self.num_heads}. "
                "Change either."
            )

    def layers(self) -> list[Callable[..., nnx.Module]]:
        """One factory per layer: the embedding, each block, the head."""
        return [
            functools.partial(Embedding, self.vocab_size, self.seq_len, self.dim),
            *(
                functools.partial(Block, self.dim, self.num_heads, self.num_blocks)
                for _ in range(self.num_blocks)
            ),
            functools.partial(Head, self.dim, self.vocab_size),
        ]
