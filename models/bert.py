"""BERT, an encoder of tokens that attends in both directions.

Devlin et al., NAACL 2019, arXiv:1810.04805. As in the paper: token, segment and learned
position embeddings, the norm after each residual, GELU, an MLP of four times the width,
dropout after embedding, attention and MLP, and a head that predicts masked words with
the matrix of the token embedding. As in the authors' program, where the paper says
nothing: norm before the embedding's dropout, epsilon 1e-12, weights of standard deviation
0.02, and the linear layer, GELU and norm in the head. Left out: dropout of the attention
weights, and the head that predicts whether one sentence follows another.

Inputs are a dict of `tokens` [B, T], `segments` [B, T], both integers, and `mask`
[B, T], which is False at padding. Letters: B batch, T positions, D `dim`, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jpipe import vocabulary
from models import checks
from models.losses import CrossEntropy
from models.sharding import constrain, named
from models.sublayers import Attention, FeedForward, Residual, dropout, word_matrix

_KERNEL = nnx.initializers.truncated_normal(0.02)
_EPSILON = 1e-12

Activation = dict[str, jax.Array]  # x [B, T, D], mask [B, T]


def _gelu(x: jax.Array) -> jax.Array:
    return nnx.gelu(x, approximate=False)


class Embedding(nnx.Module):
    """Sum of a vector for each token, position and segment; norm, dropout."""

    def __init__(
        self,
        vocab_size: int,
        seq_len: int,
        num_segments: int,
        dim: int,
        rate: float,
        *,
        rngs: nnx.Rngs,
    ):
        words, others = named(_KERNEL, "vocab", "embed"), named(_KERNEL, None, "embed")
        self.token = nnx.Embed(vocab_size, dim, embedding_init=words, rngs=rngs)
        self.position = nnx.Embed(seq_len, dim, embedding_init=others, rngs=rngs)
        self.segment = nnx.Embed(num_segments, dim, embedding_init=others, rngs=rngs)
        self.norm = nnx.LayerNorm(dim, epsilon=_EPSILON, rngs=rngs)
        self.dropout = dropout(rate, rngs)

    def __call__(self, inputs: dict[str, jax.Array]) -> Activation:
        tokens, segments, mask = checks.entries_of(inputs, "tokens", "segments", "mask")
        if mask.dtype != bool:
            raise ValueError(f"`mask` must be boolean, False at padding, got {mask.dtype}. Write `tokens != padding`.")
        checks.fits(tokens.shape[1], self.position.num_embeddings)
        positions = self.position(jnp.arange(tokens.shape[1]))
        words = vocabulary.lookup(self.token.embedding[...], tokens)
        words = constrain(words, "batch", "positions", None)
        x = words + positions[None] + self.segment(segments)
        x = self.dropout(self.norm(x))
        return {"x": constrain(x, "batch", "length", "embed"), "mask": mask}


class Block(nnx.Module):
    """Self-attention to all positions but padding, then an MLP; a norm follows each."""

    def __init__(self, dim: int, num_heads: int, rate: float, *, rngs: nnx.Rngs):
        residual = functools.partial(Residual, dim, rate, epsilon=_EPSILON, rngs=rngs)
        self.attention = Attention(dim, num_heads, use_bias=True, kernel_init=_KERNEL, rngs=rngs)
        self.attention_residual = residual()
        self.mlp = FeedForward(dim, 4 * dim, _gelu, kernel_init=_KERNEL, rngs=rngs)
        self.mlp_residual = residual()

    def __call__(self, activation: Activation) -> Activation:
        x, mask = activation["x"], activation["mask"]
        x = self.attention_residual(x, lambda x: self.attention(x, x, mask))
        return {"x": self.mlp_residual(x, self.mlp), "mask": mask}


class Head(nnx.Module):
    """Logits of the word at each position; the loss counts the masked positions."""

    def __init__(self, dim: int, vocab_size: int, *, rngs: nnx.Rngs):
        kernel = named(_KERNEL, "embed", None)
        self.linear = nnx.Linear(dim, dim, kernel_init=kernel, rngs=rngs)
        self.norm = nnx.LayerNorm(dim, epsilon=_EPSILON, rngs=rngs)
        self.embedding = word_matrix(vocab_size, dim, _KERNEL, rngs)
        bias = named(nnx.initializers.zeros, "vocab")
        self.bias = nnx.Param(bias(rngs.params(), (vocab_size,), jnp.float32))

    def __call__(self, activation: Activation) -> jax.Array:  # [B, T, V]
        x = self.norm(_gelu(self.linear(activation["x"])))
        x = constrain(x, "batch", "positions", None)
        logits = vocabulary.logits(x, self.embedding[...], self.bias[...])
        return constrain(logits, "batch", "positions", "vocab")


@dataclasses.dataclass(frozen=True)
class BERT:
    """An encoder of `num_blocks` equal blocks; the defaults are BERT-base."""

    vocab_size: int = 30522
    """Number of tokens V."""
    seq_len: int = 512
    """The largest number of positions T."""
    num_segments: int = 2
    """Number of segments: 2 for pairs of sentences."""
    dim: int = 768
    """Width D of the residual stream."""
    num_heads: int = 12
    """Attention heads H. Must divide `dim`."""
    num_blocks: int = 12
    """Blocks after the embedding."""
    dropout: float = 0.1
    """Fraction of the activations that is dropped in training."""
    mlm_head: bool = True
    """True adds a last layer that predicts masked words. Without it the model
    returns the outputs of the last block: a dict of `x` [B, T, D] and `mask` [B, T]."""
    tie_embeddings: bool = True
    """True if the head shares the matrix of the token embedding."""

    def __post_init__(self) -> None:
        checks.at_least_one(
            self,
            "vocab_size",
            "seq_len",
            "num_segments",
            "dim",
            "num_heads",
            "num_blocks",
        )
        checks.heads_divide_dim(self)
        checks.rate(self, "dropout")

    def layers(self) -> list[Callable[..., nnx.Module]]:
        """One factory per layer: the embedding, each block, the head if there is one."""
        embedding = functools.partial(
            Embedding,
            self.vocab_size,
            self.seq_len,
            self.num_segments,
            self.dim,
            self.dropout,
        )
        block = functools.partial(Block, self.dim, self.num_heads, self.dropout)
        head = functools.partial(Head, self.dim, self.vocab_size)
        return [embedding, *[block] * self.num_blocks, *[head] * self.mlm_head]

    def loss(self) -> CrossEntropy:
        """Cross-entropy of the masked words; a batch marks them by `weights`.

        Raises:
          ValueError: if the model has no head that predicts words.
        """
        if not self.mlm_head:
            raise ValueError(
                "`mlm_head` must be true for training: without that head the model "
                "returns hidden states, which no loss here takes. Set `mlm_head=true`, or "
                "give `jpipe.Pipeline` these layers and a loss of your own."
            )
        return CrossEntropy()

    def ties(self) -> list[tuple[tuple[int, str], ...]]:
        """The shared parameters: `(layer, path)` of each copy, the owner first."""
        if not (self.mlm_head and self.tie_embeddings):
            return []
        return [((0, "token.embedding"), (-1, "embedding"))]
