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

import jpipe
from jpipe import vocabulary
from models import checks
from models.losses import CrossEntropy
from models.sharding import constrain, named
from models.sublayers import dropout, narrowing, widening, word_matrix

_KERNEL = nnx.initializers.normal(0.02)


@functools.cache  # returns the same function again, so blocks stay structurally equal
def _residual_kernel(num_blocks: int) -> nnx.Initializer:
    """0.02 / sqrt(2 L): the sum of the 2 L branches has the scale of one."""
    return nnx.initializers.normal(0.02 / (2 * num_blocks) ** 0.5)


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
        words, places = named(_KERNEL, "vocab", "embed"), named(_KERNEL, None, "embed")
        self.token = nnx.Embed(vocab_size, dim, embedding_init=words, rngs=rngs)
        self.position = nnx.Embed(seq_len, dim, embedding_init=places, rngs=rngs)
        self.dropout = dropout(rate, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:  # [B, T] integers -> [B, T, D]
        checks.fits(jpipe.sequence_length(tokens.shape[1]), self.position.num_embeddings)
        positions = self.position(jpipe.first_position() + jnp.arange(tokens.shape[1]))
        words = vocabulary.lookup(self.token.embedding[...], tokens)
        words = constrain(words, "batch", "positions", None)
        x = self.dropout(words + positions[None])
        return constrain(x, "batch", "length", "embed")


class Block(nnx.Module):
    """Causal self-attention, then an MLP of four times the width, both residual.

    The columns of `qkv` are query, key and value of the first head, then of the second, and so
    on, so that an equal part of them is whole heads.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_blocks: int,
        rate: float = 0.0,
        *,
        rngs: nnx.Rngs,
    ):
        norm = functools.partial(nnx.LayerNorm, dim, epsilon=1e-5, rngs=rngs)
        residual = _residual_kernel(num_blocks)
        self.num_heads = num_heads
        self.attention_norm = norm()
        self.qkv = widening(dim, 3 * dim, "heads", kernel_init=_KERNEL, rngs=rngs)
        self.attention_out = narrowing(dim, dim, "heads", kernel_init=residual, rngs=rngs)
        self.mlp_norm = norm()
        self._make_mlp(dim, residual, rngs)
        self.dropout = dropout(rate, rngs)

    def _make_mlp(self, dim: int, residual: nnx.Initializer, rngs: nnx.Rngs) -> None:
        self.mlp_in = widening(dim, 4 * dim, "mlp", kernel_init=_KERNEL, rngs=rngs)
        self.mlp_out = narrowing(4 * dim, dim, "mlp", kernel_init=residual, rngs=rngs)

    def _mlp(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
        hidden = constrain(self.mlp_in(x), "batch", "positions", "mlp")
        return self.mlp_out(nnx.gelu(hidden))

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
        qkv = self.qkv(constrain(self.attention_norm(x), "batch", "positions", None))
        qkv = qkv.reshape(*x.shape[:2], self.num_heads, 3, -1)  # [B, T, H, 3, D / H]
        qkv = constrain(qkv, "batch", "positions", "heads", None, None)
        query, key, value = jnp.moveaxis(qkv, 3, 0)
        attended = jpipe.attention(query, key, value, is_causal=True)
        attended = constrain(attended, "batch", "positions", "heads", None)
        x = x + self.dropout(self.attention_out(attended.reshape(x.shape)))
        x = constrain(x, "batch", "length", "embed")
        x = x + self.dropout(self._mlp(constrain(self.mlp_norm(x), "batch", "positions", None)))
        return constrain(x, "batch", "length", "embed")


class Head(nnx.Module):
    """Final norm and the logits of the next token, with a matrix that is not shared."""

    def __init__(self, dim: int, vocab_size: int, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(dim, epsilon=1e-5, rngs=rngs)
        self.linear = widening(dim, vocab_size, "vocab", use_bias=False, kernel_init=_KERNEL, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, V]
        x = constrain(self.norm(x), "batch", "positions", None)
        logits = vocabulary.logits(x, self.linear.kernel[...].T)
        return constrain(logits, "batch", "positions", "vocab")


class TiedHead(nnx.Module):
    """Final norm and the logits of the next token, with the token embedding's matrix."""

    def __init__(self, dim: int, vocab_size: int, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(dim, epsilon=1e-5, rngs=rngs)
        self.embedding = word_matrix(vocab_size, dim, _KERNEL, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, V]
        x = constrain(self.norm(x), "batch", "positions", None)
        logits = vocabulary.logits(x, self.embedding[...])
        return constrain(logits, "batch", "positions", "vocab")


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
    """True if the head shares the matrix of the token embedding."""

    def __post_init__(self) -> None:
        checks.at_least_one(self, "vocab_size", "seq_len", "dim", "num_heads", "num_blocks")
        checks.heads_divide_dim(self)
        checks.rate(self, "dropout")

    def layers(self) -> list[Callable[..., nnx.Module]]:
        """One factory per layer: the embedding, each block, the head."""
        embedding = functools.partial(Embedding, self.vocab_size, self.seq_len, self.dim, self.dropout)
        block = functools.partial(
            Block,
            self.dim,
            self.num_heads,
            self.num_blocks,
            self.dropout,
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
