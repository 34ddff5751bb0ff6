"""A decoder-only transformer over bytes, or any tokens.

GPT-2 (Radford et al., 2019): learned positions, norms before attention and MLP, GELU,
initial weights as in its section 2.3. Differences from GPT-2: no dropout of the attention
weights, by default no dropout at all, and by default a head with a matrix that is not
shared. All blocks are structurally equal, so a stage can run its blocks as one loop.
Letters: B batch, T positions, D `dim`, H heads, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from models import checks
from models.losses import CrossEntropy
from models.sublayers import attend, dropout

_KERNEL = nnx.initializers.normal(0.02)


@functools.cache  # returns the same function again, so blocks stay structurally equal
def _residual_kernel(num_blocks: int) -> nnx.Initializer:
    """0.02 / sqrt(2 L): the sum of the 2 L branches has the scale of one."""
    return nnx.initializers.normal(0.02 / (2 * num_blocks) ** 0.5)


@functools.cache
def _split(init: Callable, *axes: str | None) -> Callable:
    """`init` for an array whose dims are split over these axes of the mesh, if any."""
    if not any(axes):
        return init
    return nnx.with_partitioning(init, axes, eager_sharding=False)


class Embedding(nnx.Module):
    """Sum of a vector for each token and a vector for each position."""

    def __init__(
        self,
        vocab_size: int,
        seq_len: int,
        dim: int,
        rate: float = 0.0,
        *,
        rngs: nnx.Rngs,
    ):
        self.token = nnx.Embed(vocab_size, dim, embedding_init=_KERNEL, rngs=rngs)
        self.position = nnx.Embed(seq_len, dim, embedding_init=_KERNEL, rngs=rngs)
        self.dropout = dropout(rate, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:  # [B, T] integers -> [B, T, D]
        checks.fits(tokens.shape[1], self.position.num_embeddings)
        positions = self.position(jnp.arange(tokens.shape[1]))
        return self.dropout(self.token(tokens) + positions[None])


class Block(nnx.Module):
    """Causal self-attention, then an MLP of four times the width, both residual.

    With a `model_axis`, the first matrix of each branch is split by columns and the second
    one by rows (Shoeybi et al., 2019), so that a branch needs one sum over the axis. In the
    MLP each device computes its own hidden units. Attention is different: query, key and
    value stand one after the other in the columns of `qkv`, so an equal part of the columns
    is not a whole head. The columns are therefore gathered, and every device computes the
    whole attention.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_blocks: int,
        rate: float = 0.0,
        model_axis: str | None = None,
        *,
        rngs: nnx.Rngs,
    ):
        linear = functools.partial(nnx.Linear, rngs=rngs)
        columns = dict(
            kernel_init=_split(_KERNEL, None, model_axis),
            bias_init=_split(nnx.initializers.zeros, model_axis),
        )
        norm = functools.partial(nnx.LayerNorm, dim, epsilon=1e-5, rngs=rngs)
        residual = _split(_residual_kernel(num_blocks), model_axis, None)
        self.num_heads = num_heads
        self.attention_norm = norm()
        self.qkv = linear(dim, 3 * dim, **columns)
        self.attention_out = linear(dim, dim, kernel_init=residual)
        self.mlp_norm = norm()
        self.mlp_in = linear(dim, 4 * dim, **columns)
        self.mlp_out = linear(4 * dim, dim, kernel_init=residual)
        self.dropout = dropout(rate, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
        qkv = self.qkv(self.attention_norm(x))
        qkv = qkv.reshape(*x.shape[:2], 3, self.num_heads, -1)  # [B, T, 3, H, D / H]
        query, key, value = jnp.moveaxis(qkv, 2, 0)
        attended = attend(query, key, value, is_causal=True)
        x = x + self.dropout(self.attention_out(attended.reshape(x.shape)))
        hidden = nnx.gelu(self.mlp_in(self.mlp_norm(x)))
        return x + self.dropout(self.mlp_out(hidden))


class Head(nnx.Module):
    """Final norm and the logits of the next token, with a matrix that is not shared."""

    def __init__(self, dim: int, vocab_size: int, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(dim, epsilon=1e-5, rngs=rngs)
        self.linear = nnx.Linear(
            dim, vocab_size, use_bias=False, kernel_init=_KERNEL, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, V]
        return self.linear(self.norm(x))


class TiedHead(nnx.Module):
    """Final norm and the logits of the next token, with the token embedding's matrix."""

    def __init__(self, dim: int, vocab_size: int, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(dim, epsilon=1e-5, rngs=rngs)
        self.embedding = nnx.Param(
            _KERNEL(rngs.params(), (vocab_size, dim), jnp.float32)
        )

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, V]
        return self.norm(x) @ self.embedding.T


@dataclasses.dataclass(frozen=True)
class Transformer:
    """A decoder-only transformer of `num_blocks` equal blocks."""

    vocab_size: int = 256
    """Number of tokens V: 256 for bytes."""
    seq_len: int = 128
    """The largest number of positions T; at least `data.seq_len`."""
    dim: int = 128
    """Width D of the residual stream."""
    num_heads: int = 4
    """Attention heads H. Must divide `dim`."""
    num_blocks: int = 8
    """Blocks between the embedding and the head."""
    dropout: float = 0.0
    """Fraction of the activations that is dropped in training, after the embedding and
    after each attention and MLP."""
    tie_embeddings: bool = False
    """Whether the head shares the matrix of the token embedding."""
    model_axis: str | None = None
    """The mesh axis over which the matrices of blocks are split. None: no split, unless
    `pipeline.model` sets it."""

    def __post_init__(self) -> None:
        checks.at_least_one(
            self, "vocab_size", "seq_len", "dim", "num_heads", "num_blocks"
        )
        checks.heads_divide_dim(self)
        checks.rate(self, "dropout")

    def layers(self) -> list[Callable[..., nnx.Module]]:
        """One factory per layer: the embedding, each block, the head."""
        embedding = functools.partial(
            Embedding, self.vocab_size, self.seq_len, self.dim, self.dropout
        )
        block = functools.partial(
            Block,
            self.dim,
            self.num_heads,
            self.num_blocks,
            self.dropout,
            self.model_axis,
        )
        head = TiedHead if self.tie_embeddings else Head
        return [
            embedding,
            *[block] * self.num_blocks,
            functools.partial(head, self.dim, self.vocab_size),
        ]

    def loss(self) -> CrossEntropy:
        """Cross-entropy of the next tokens."""
        return CrossEntropy()

    def ties(self) -> list[tuple[tuple[int, str], ...]]:
        """The shared parameters: `(layer, path)` of each copy, the owner first."""
        if not self.tie_embeddings:
            return []
        return [((0, "token.embedding"), (-1, "embedding"))]
