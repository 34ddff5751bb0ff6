"""A transformer with encoder and decoder, for translation.

Vaswani et al., NeurIPS 2017, arXiv:1706.03762. As in the paper: sinusoidal positions,
embeddings scaled by sqrt(D), the norm after each residual (or before, which is common
today), ReLU, dropout of every sublayer's output and of the embedding, and one matrix for
both embeddings and the head (section 3.4). As in the paper's formulas, attention has no
biases and the MLP has. The paper does not give initial weights: here they are Glorot's,
and have standard deviation 1 / sqrt(D) in the embedding, so that the input of the first
block has standard deviation 1.

Inputs are a dict of `source` [B, S] and `target` [B, T], integers; 0 is padding. `target`
is the input of the decoder: the translation shifted right by a token that marks its
begin. The logits at a position are for the next token. Letters: B batch, S and T
positions, D `dim`, V vocabulary of the target.

The layers pass on one dict:

    source       [B, S, D]  the encoder's stream, then its result, the decoder's memory
    source_mask  [B, S]     False at padding
    target       [B, T, D]  the target's embedding, then the decoder's stream
    target_mask  [B, T]     False at padding

With `fine_grained`, parts of a block pass on `branch` as well: what the parts of the current
residual have computed so far, from the input of the residual, which stays in `source` or `target`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jpipe import vocabulary
from models import checks
from models.losses import CrossEntropy
from models.sharding import constrain, named
from models.sublayers import (
    Attention,
    FeedForward,
    Residual,
    attend_heads,
    dropout,
    narrowing,
    widening,
    word_matrix,
)

_KERNEL = nnx.initializers.glorot_uniform()
_EPSILON = 1e-6

Activation = dict[str, jax.Array]


def positions(num_positions: int, dim: int) -> jax.Array:
    """The vectors of positions (section 3.5).

    Returns:
      `[T, D]`: sin(t r^i) at 2 i and cos(t r^i) at 2 i + 1, where r is 10000^(-2 / D).
      Wavelengths go from 2 pi to 10000 * 2 pi.
    """
    rates = 10000.0 ** (-jnp.arange(0, dim, 2) / dim)
    times = jnp.arange(num_positions, dtype=rates.dtype)
    angles = times[:, None] * rates[None]  # [T, D / 2]
    waves = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return waves.reshape(num_positions, dim)


@functools.cache  # the same function each time
def _embedding_init(dim: int) -> nnx.Initializer:
    return nnx.initializers.normal(dim**-0.5)


class Embedding(nnx.Module):
    """Sum of the vectors of tokens and positions, for source and target."""

    def __init__(
        self,
        vocab_size: int,
        target_vocab_size: int | None,
        dim: int,
        rate: float,
        *,
        rngs: nnx.Rngs,
    ):
        init = named(_embedding_init(dim), "vocab", "embed")
        embed = functools.partial(nnx.Embed, features=dim, embedding_init=init, rngs=rngs)
        self.token = embed(vocab_size)
        self.shares = target_vocab_size is None
        if not self.shares:
            self.target_token = embed(target_vocab_size)
        self.dropout = dropout(rate, rngs)

    def __call__(self, inputs: dict[str, jax.Array]) -> Activation:
        source, target = checks.entries_of(inputs, "source", "target")
        target_token = self.token if self.shares else self.target_token
        return {
            "source": self._embedded(self.token, source),
            "source_mask": source != 0,
            "target": self._embedded(target_token, target),
            "target_mask": target != 0,
        }

    def _embedded(self, token: nnx.Embed, tokens: jax.Array) -> jax.Array:  # [B, T] -> [B, T, D]
        x = vocabulary.lookup(token.embedding[...], tokens)
        x = constrain(x, "batch", "positions", None) * token.features**0.5
        waves = positions(tokens.shape[1], token.features)
        x = self.dropout(x + waves[None].astype(x.dtype))
        return constrain(x, "batch", "length", "embed")


class EncoderBlock(nnx.Module):
    """Self-attention of the source, then an MLP."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_dim: int,
        rate: float,
        norm_first: bool,
        *,
        rngs: nnx.Rngs,
    ):
        residual = functools.partial(Residual, dim, rate, norm_first=norm_first, epsilon=_EPSILON, rngs=rngs)
        self.attention = Attention(dim, num_heads, use_bias=False, kernel_init=_KERNEL, rngs=rngs)
        self.attention_residual = residual()
        self.mlp = FeedForward(dim, mlp_dim, nnx.relu, kernel_init=_KERNEL, rngs=rngs)
        self.mlp_residual = residual()

    def __call__(self, activation: Activation) -> Activation:
        x, mask = activation["source"], activation["source_mask"]
        x = self.attention_residual(x, lambda x: self.attention(x, x, mask))
        return activation | {"source": self.mlp_residual(x, self.mlp)}


class EncoderNorm(nnx.Module):
    """The norm of the encoder's result, for `norm="pre"`."""

    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(dim, epsilon=_EPSILON, rngs=rngs)

    def __call__(self, activation: Activation) -> Activation:
        x = self.norm(activation["source"])
        return activation | {"source": constrain(x, "batch", "length", "embed")}


class DecoderBlock(nnx.Module):
    """Causal self-attention of the target, attention to the source, then an MLP."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_dim: int,
        rate: float,
        norm_first: bool,
        *,
        rngs: nnx.Rngs,
    ):
        attention = functools.partial(Attention, dim, num_heads, use_bias=False, kernel_init=_KERNEL, rngs=rngs)
        residual = functools.partial(Residual, dim, rate, norm_first=norm_first, epsilon=_EPSILON, rngs=rngs)
        self.attention = attention()
        self.attention_residual = residual()
        self.memory_attention = attention()
        self.memory_residual = residual()
        self.mlp = FeedForward(dim, mlp_dim, nnx.relu, kernel_init=_KERNEL, rngs=rngs)
        self.mlp_residual = residual()

    def __call__(self, activation: Activation) -> Activation:
        memory, memory_mask = activation["source"], activation["source_mask"]
        x, mask = activation["target"], activation["target_mask"]
        x = self.attention_residual(x, lambda x: self.attention(x, x, mask, is_causal=True))
        x = self.memory_residual(x, lambda x: self.memory_attention(x, memory, memory_mask))
        return activation | {"target": self.mlp_residual(x, self.mlp)}


class Part(nnx.Module):
    """A part of a block as a layer of its own, for `fine_grained`.

    Args:
      stream: "source" or "target", the stream that the part's residual belongs to.
    """

    def __init__(self, stream: str):
        self.stream = stream

    def _input(self, activation: Activation) -> jax.Array:
        """The input of a residual: of its norm if there is one before it, else the stream."""
        return activation.get("branch", activation[self.stream])

    def _added(self, activation: Activation, branch: jax.Array) -> Activation:
        """The stream with the sum of a residual, and no branch."""
        x = constrain(activation[self.stream] + branch, "batch", "length", "embed")
        rest = {name: a for name, a in activation.items() if name != "branch"}
        return rest | {self.stream: x}


class NormPart(Part):
    """The norm of a residual: of the sum, or of the input for `norm="pre"`."""

    def __init__(self, stream: str, dim: int, norm_first: bool, *, rngs: nnx.Rngs):
        super().__init__(stream)
        self.norm = nnx.LayerNorm(dim, epsilon=_EPSILON, rngs=rngs)
        self.norm_first = norm_first

    def __call__(self, activation: Activation) -> Activation:
        x = self.norm(activation[self.stream])
        if self.norm_first:
            return activation | {"branch": x}
        return activation | {self.stream: constrain(x, "batch", "length", "embed")}


class ProjectionsPart(Part):
    """Query, key and value of an attention, of the stream or of the encoder's result."""

    def __init__(
        self,
        stream: str,
        memory: str,
        dim: int,
        num_heads: int,
        *,
        rngs: nnx.Rngs,
    ):
        super().__init__(stream)
        self.memory = memory
        self.num_heads = num_heads
        self.query, self.key, self.value = (
            widening(dim, dim, "heads", use_bias=False, kernel_init=_KERNEL, rngs=rngs) for _ in range(3)
        )

    def __call__(self, activation: Activation) -> Activation:
        x = constrain(self._input(activation), "batch", "positions", None)
        memory = x
        if self.memory != self.stream:
            memory = constrain(activation[self.memory], "batch", "positions", None)
        attended = attend_heads(
            self.query(x),
            self.key(memory),
            self.value(memory),
            self.num_heads,
            activation[f"{self.memory}_mask"],
            is_causal=self.stream == self.memory == "target",
        )
        return activation | {"branch": attended}


class OutPart(Part):
    """The matrix that mixes the heads, and the sum of the residual."""

    def __init__(self, stream: str, dim: int, rate: float, *, rngs: nnx.Rngs):
        super().__init__(stream)
        self.out = narrowing(dim, dim, "heads", use_bias=False, kernel_init=_KERNEL, rngs=rngs)
        self.dropout = dropout(rate, rngs)

    def __call__(self, activation: Activation) -> Activation:
        return self._added(activation, self.dropout(self.out(activation["branch"])))


class WidePart(Part):
    """The first half of the MLP."""

    def __init__(self, stream: str, dim: int, mlp_dim: int, *, rngs: nnx.Rngs):
        super().__init__(stream)
        self.linear_in = widening(dim, mlp_dim, "mlp", kernel_init=_KERNEL, rngs=rngs)

    def __call__(self, activation: Activation) -> Activation:
        x = constrain(self._input(activation), "batch", "positions", None)
        hidden = constrain(self.linear_in(x), "batch", "positions", "mlp")
        return activation | {"branch": nnx.relu(hidden)}


class NarrowPart(Part):
    """The second half of the MLP, and the sum of the residual."""

    def __init__(self, stream: str, dim: int, mlp_dim: int, rate: float, *, rngs: nnx.Rngs):
        super().__init__(stream)
        self.linear_out = narrowing(mlp_dim, dim, "mlp", kernel_init=_KERNEL, rngs=rngs)
        self.dropout = dropout(rate, rngs)

    def __call__(self, activation: Activation) -> Activation:
        return self._added(activation, self.dropout(self.linear_out(activation["branch"])))


class Head(nnx.Module):
    """Logits of the next token of the target; with a norm first for `norm="pre"`."""

    def __init__(self, dim: int, vocab_size: int, normed: bool, *, rngs: nnx.Rngs):
        self.normed = normed
        if normed:
            self.norm = nnx.LayerNorm(dim, epsilon=_EPSILON, rngs=rngs)
        self.embedding = word_matrix(vocab_size, dim, _embedding_init(dim), rngs)

    def __call__(self, activation: Activation) -> jax.Array:  # [B, T, V]
        x = activation["target"]
        x = constrain(self.norm(x) if self.normed else x, "batch", "positions", None)
        logits = vocabulary.logits(x, self.embedding[...])
        return constrain(logits, "batch", "positions", "vocab")


@dataclasses.dataclass(frozen=True)
class Translation:
    """An encoder and a decoder of equal blocks; the defaults are the paper's base."""

    vocab_size: int = 37000
    """Number of tokens of the source; token 0 is padding."""
    target_vocab_size: int | None = None
    """Number of tokens V of the target. None: source and target share one vocabulary and
    one embedding."""
    dim: int = 512
    """Width D of both residual streams. Must be even."""
    num_heads: int = 8
    """Attention heads H. Must divide `dim`."""
    mlp_dim: int = 2048
    """Width of the hidden layer of each MLP."""
    num_encoder_blocks: int = 6
    """Blocks of the encoder."""
    num_decoder_blocks: int = 6
    """Blocks of the decoder."""
    norm: Literal["post", "pre"] = "post"
    """"post": the norm follows each residual; "pre": it begins each branch."""
    dropout: float = 0.1
    """Fraction of the activations that is dropped in training."""
    tie_embeddings: bool = True
    """True if the head shares the matrix of the target's embedding."""
    fine_grained: bool = False
    """True if every norm, both matrices of an MLP, and the matrices before and after the heads of
    an attention are layers of their own, so that a pipeline can have a stage for each: the base
    then has 92 layers. The results are the same."""

    def __post_init__(self) -> None:
        checks.at_least_one(
            self,
            "vocab_size",
            "dim",
            "num_heads",
            "mlp_dim",
            "num_encoder_blocks",
            "num_decoder_blocks",
        )
        if self.target_vocab_size is not None:
            checks.at_least_one(self, "target_vocab_size")
        checks.heads_divide_dim(self)
        if self.dim % 2:
            raise ValueError(f"`dim` must be even, got {self.dim}: positions are pairs of a sine and a cosine. Add 1.")
        checks.one_of(self, "norm")
        checks.rate(self, "dropout")

    def layers(self) -> list[Callable[..., nnx.Module]]:
        """One factory per layer: embedding, encoder blocks, decoder blocks, head.

        For `norm="pre"` a layer with the encoder's last norm follows its blocks. With
        `fine_grained`, an encoder block is 6 layers and a decoder block 9.
        """
        sizes = (self.dim, self.num_heads, self.mlp_dim, self.dropout)
        norm_first = self.norm == "pre"
        vocab_size = self.target_vocab_size or self.vocab_size
        embedding = functools.partial(Embedding, self.vocab_size, self.target_vocab_size, self.dim, self.dropout)
        if self.fine_grained:
            encoder_block = self._parts("source", ["source"])
            decoder_block = self._parts("target", ["target", "source"])
        else:
            encoder_block = [functools.partial(EncoderBlock, *sizes, norm_first)]
            decoder_block = [functools.partial(DecoderBlock, *sizes, norm_first)]
        return [
            embedding,
            *encoder_block * self.num_encoder_blocks,
            *[functools.partial(EncoderNorm, self.dim)] * norm_first,
            *decoder_block * self.num_decoder_blocks,
            functools.partial(Head, self.dim, vocab_size, norm_first),
        ]

    def _parts(self, stream: str, memories: Sequence[str]) -> list[Callable[..., nnx.Module]]:
        """The parts of a block: an attention to each memory, then the MLP."""
        dim, mlp_dim, rate = self.dim, self.mlp_dim, self.dropout
        norm_first = self.norm == "pre"
        part = functools.partial
        norm = part(NormPart, stream, dim, norm_first)
        sublayers = [
            [
                part(ProjectionsPart, stream, memory, dim, self.num_heads),
                part(OutPart, stream, dim, rate),
            ]
            for memory in memories
        ]
        sublayers.append(
            [
                part(WidePart, stream, dim, mlp_dim),
                part(NarrowPart, stream, dim, mlp_dim, rate),
            ]
        )
        return [layer for parts in sublayers for layer in ([norm, *parts] if norm_first else [*parts, norm])]

    def loss(self) -> CrossEntropy:
        """Cross-entropy of the next tokens of the target; a batch marks padding by `weights`."""
        return CrossEntropy()

    def ties(self) -> list[tuple[tuple[int, str], ...]]:
        """The shared parameters: `(layer, path)` of each copy, the owner first."""
        if not self.tie_embeddings:
            return []
        owner = "token" if self.target_vocab_size is None else "target_token"
        return [((0, f"{owner}.embedding"), (-1, "embedding"))]
