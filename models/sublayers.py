"""The parts of transformers: attention, the MLP, and the residual around either.

Letters: B batch, T positions, D width, H heads.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jpipe
from jpipe import vocabulary
from models.sharding import constrain, named


def _identity(x: jax.Array) -> jax.Array:
    return x


def dropout(rate: float, rngs: nnx.Rngs) -> Callable:
    """Dropout; at rate 0 the identity, which needs no random numbers."""
    return nnx.Dropout(rate, rngs=rngs) if rate else _identity


def widening(dim: int, hidden: int, name: str, *, kernel_init: nnx.Initializer, **options: Any) -> nnx.Linear:
    """A linear layer from the stream to hidden units with this name, split by columns."""
    return nnx.Linear(
        dim,
        hidden,
        kernel_init=named(kernel_init, "embed", name),
        bias_init=named(nnx.initializers.zeros, name),
        **options,
    )


def narrowing(hidden: int, dim: int, name: str, *, kernel_init: nnx.Initializer, **options: Any) -> nnx.Linear:
    """A linear layer from hidden units with this name to the stream, split by rows."""
    kernel_init = named(kernel_init, name, "embed")
    return nnx.Linear(hidden, dim, kernel_init=kernel_init, **options)


def word_matrix(vocab_size: int, dim: int, init: nnx.Initializer, rngs: nnx.Rngs) -> nnx.Param:
    """A vector for each word, `[V, D]`, for logits."""
    matrix = named(init, "vocab", "embed")
    return nnx.Param(matrix(rngs.params(), (vocab_size, dim), jnp.float32))


def next_words(x: jax.Array, matrix: jax.Array, labels: jax.Array | None) -> jax.Array:
    """The logits of the next words, or the losses of given ones, whose logits are then never all there at once.

    Args:
      x: `[B, T, D]`, the inputs of the head.
      matrix: `[V, D]`, in any dtype.
      labels: integers `[B, T]`, negative where none counts; None: logits are wanted.

    Returns:
      Logits `[B, T, V]`, or losses `[B, T]` in nats.
    """
    x, matrix = constrain(x, "batch", "positions", None), matrix.astype(x.dtype)
    if labels is not None:
        return vocabulary.chunked_cross_entropy(x, matrix, labels)
    return constrain(x @ matrix.T, "batch", "positions", "vocab")


def attend_heads(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    num_heads: int,
    mask: jax.Array,
    *,
    is_causal: bool = False,
) -> jax.Array:
    """Attention by several heads, each on its part of the width.

    Args:
      query: `[B, T, D]`.
      key, value: `[B, M, D]`, of M positions of a memory.
      num_heads: H.
      mask: bool `[B, M]`, which positions of the memory are seen.
      is_causal: whether a position sees only itself and earlier positions.

    Returns:
      `[B, T, D]`, the results of all heads side by side.
    """

    def heads(x: jax.Array) -> jax.Array:  # [B, T, H, D / H]
        x = x.reshape(*x.shape[:2], num_heads, -1)
        return constrain(x, "batch", "positions", "heads", None)

    attended = jpipe.attention(
        heads(query),
        heads(key),
        heads(value),
        mask=mask[:, None, None, :],
        is_causal=is_causal,
    )
    attended = constrain(attended, "batch", "positions", "heads", None)
    return attended.reshape(query.shape)


class Attention(nnx.Module):
    """Multi-head attention (Vaswani et al., 2017, section 3.2).

    A position attends to the positions of the memory that `mask` marks; with `is_causal`
    only up to its own position. A position without any gets the mean of all.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        use_bias: bool,
        kernel_init: nnx.Initializer,
        rngs: nnx.Rngs,
    ):
        options: Any = dict(use_bias=use_bias, kernel_init=kernel_init, rngs=rngs)
        self.num_heads = num_heads
        self.query, self.key, self.value = (widening(dim, dim, "heads", **options) for _ in range(3))
        self.out = narrowing(dim, dim, "heads", **options)

    def __call__(
        self,
        x: jax.Array,
        memory: jax.Array,
        mask: jax.Array,
        *,
        is_causal: bool = False,
    ) -> jax.Array:
        # [B, T, D], [B, M, D], [B, M] booleans -> [B, T, D]
        x = constrain(x, "batch", "positions", None)
        memory = constrain(memory, "batch", "positions", None)
        projected = self.query(x), self.key(memory), self.value(memory)
        return self.out(attend_heads(*projected, self.num_heads, mask, is_causal=is_causal))


class FeedForward(nnx.Module):
    """Two linear layers with a nonlinearity between, the same at every position."""

    def __init__(
        self,
        dim: int,
        hidden: int,
        activation: Callable,
        *,
        kernel_init: nnx.Initializer,
        rngs: nnx.Rngs,
    ):
        options: Any = dict(kernel_init=kernel_init, rngs=rngs)
        self.linear_in = widening(dim, hidden, "mlp", **options)
        self.linear_out = narrowing(hidden, dim, "mlp", **options)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
        hidden = self.linear_in(constrain(x, "batch", "positions", None))
        hidden = constrain(hidden, "batch", "positions", "mlp")
        return self.linear_out(self.activation(hidden))


class Residual(nnx.Module):
    """`norm(x + dropout(f(x)))`; with `norm_first`, `x + dropout(f(norm(x)))`."""

    def __init__(
        self,
        dim: int,
        rate: float,
        *,
        norm_first: bool = False,
        epsilon: float,
        rngs: nnx.Rngs,
    ):
        self.norm = nnx.LayerNorm(dim, epsilon=epsilon, rngs=rngs)
        self.dropout = dropout(rate, rngs)
        self.norm_first = norm_first

    def __call__(self, x: jax.Array, f: Callable[[jax.Array], jax.Array]) -> jax.Array:
        if self.norm_first:
            x = x + self.dropout(f(self.norm(x)))
            return constrain(x, "batch", "length", "embed")
        x = constrain(x + self.dropout(f(x)), "batch", "length", "embed")
        return constrain(self.norm(x), "batch", "length", "embed")
