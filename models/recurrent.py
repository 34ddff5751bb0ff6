"""Long short-term memory for text: a language model, a classifier, and a translator.

Layers of LSTM units (Hochreiter and Schmidhuber, 1997) with a forget gate. The input's part of
the gates of all positions is one matrix product; the rest runs position by position. Letters:
B batch, T positions, D input width, H `dim`, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jpipe import vocabulary
from models import checks
from models.losses import CrossEntropy
from models.sharding import constrain, named
from models.sublayers import dropout, word_matrix

_LOGITS = nnx.initializers.normal(0.02)
_WORDS = named(nnx.initializers.normal(1.0), "vocab", "embed")

State = tuple[jax.Array, jax.Array]  # output and cell, [B, H] each


@functools.cache  # the same function again, so equal layers stay structurally equal
def uniform(width: int) -> nnx.Initializer:
    """Uniform between -1 / sqrt(width) and 1 / sqrt(width), as PyTorch initialises LSTMs."""
    bound = width**-0.5

    def init(key: jax.Array, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


class Embedding(nnx.Module):
    """A vector for each token."""

    def __init__(self, vocab_size: int, dim: int, rate: float, *, rngs: nnx.Rngs):
        self.token = nnx.Embed(vocab_size, dim, embedding_init=_WORDS, rngs=rngs)
        self.dropout = dropout(rate, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:  # [B, T] integers -> [B, T, D]
        x = self.dropout(vocabulary.lookup(self.token.embedding[...], tokens))
        return constrain(x, "batch", None, "embed")


class LSTM(nnx.Module):
    """A layer of LSTM units.

    The last dim of the weights is the gates of a unit: input, forget, cell and output. So an
    equal part of the units is whole units. The bias of the forget gate starts at 1
    (Jozefowicz et al., 2015).
    """

    def __init__(self, num_inputs: int, dim: int, *, rngs: nnx.Rngs):
        init = uniform(dim)
        inputs = named(init, "embed", "mlp", None)
        self.input_kernel = nnx.Param(inputs(rngs.params(), (num_inputs, dim, 4)))
        state = named(init, None, "mlp", None)
        self.state_kernel = nnx.Param(state(rngs.params(), (dim, dim, 4)))
        self.bias = nnx.Param(named(_forget, "mlp", None)(rngs.params(), (dim, 4)))

    def __call__(
        self, x: jax.Array, mask: jax.Array | None = None, state: State | None = None
    ) -> tuple[jax.Array, State]:
        """Runs over the positions.

        Args:
          x: `[B, T, D]`.
          mask: bool `[B, T]`; a position that it does not mark leaves the state as it is.
          state: the state before the first position; None is zeros.

        Returns:
          The outputs `[B, T, H]`, and the state after the last position.
        """
        kernel = self.state_kernel[...]
        x = constrain(x, "batch", None, None)
        gates = jnp.einsum("btd,dhg->tbhg", x, self.input_kernel[...])
        gates = gates + self.bias[...][None, None]
        if state is None:
            zeros = jnp.zeros_like(gates[0, :, :, 0])
            state = zeros, zeros

        def turn(before: State, at: tuple[jax.Array, jax.Array | None]) -> tuple[State, jax.Array]:
            (output, cell), (gate, here) = before, at
            gate = gate + jnp.einsum("bd,dhg->bhg", output, kernel)
            write, keep, read = (nnx.sigmoid(gate[..., k]) for k in (0, 1, 3))
            after = keep * cell + write * jnp.tanh(gate[..., 2])
            result = read * jnp.tanh(after)
            if here is not None:
                result = jnp.where(here[:, None], result, output)
                after = jnp.where(here[:, None], after, cell)
            return (result, after), result

        state, outputs = lax.scan(turn, state, (gates, None if mask is None else mask.T))
        return constrain(outputs.swapaxes(0, 1), "batch", None, "embed"), state


def _forget(key: jax.Array, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
    del key
    return jnp.broadcast_to(jnp.array([0.0, 1.0, 0.0, 0.0], dtype), shape)


class Recurrent(nnx.Module):
    """LSTM units, then dropout."""

    def __init__(self, num_inputs: int, dim: int, rate: float, *, rngs: nnx.Rngs):
        self.lstm = LSTM(num_inputs, dim, rngs=rngs)
        self.dropout = dropout(rate, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, H]
        return self.dropout(self.lstm(x)[0])


class WordHead(nnx.Module):
    """Logits of the next token."""

    def __init__(self, dim: int, vocab_size: int, *, rngs: nnx.Rngs):
        self.embedding = word_matrix(vocab_size, dim, _LOGITS, rngs)
        bias = named(nnx.initializers.zeros, "vocab")
        self.bias = nnx.Param(bias(rngs.params(), (vocab_size,)))

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, H] -> [B, T, V]
        x = constrain(x, "batch", None, None)
        logits = vocabulary.logits(x, self.embedding[...], self.bias[...])
        return constrain(logits, "batch", None, "vocab")


class ClassHead(nnx.Module):
    """Mean over the positions, then the logits of the classes."""

    def __init__(self, dim: int, num_classes: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(dim, num_classes, kernel_init=named(_LOGITS, "embed", None), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, H] -> [B, K]
        return self.linear(x.mean(axis=1))


@dataclasses.dataclass(frozen=True)
class _Stack:
    """Options of a stack of LSTM layers over tokens."""

    vocab_size: int = 256
    """Number of tokens V: 256 for bytes."""
    embed_dim: int = 64
    """Width of the vectors of tokens."""
    dim: int = 128
    """Units H of each recurrent layer."""
    num_layers: int = 2
    """Recurrent layers."""
    dropout: float = 0.0
    """Fraction of the activations that is dropped in training, after the embedding and after
    each recurrent layer (Zaremba et al., 2014, arXiv:1409.2329)."""

    def __post_init__(self) -> None:
        checks.at_least_one(self, "vocab_size", "embed_dim", "dim", "num_layers")
        checks.rate(self, "dropout")

    def _layers(self) -> list[Callable[..., nnx.Module]]:
        """The embedding and the recurrent layers."""
        inputs = (self.embed_dim, *[self.dim] * (self.num_layers - 1))
        return [
            functools.partial(Embedding, self.vocab_size, self.embed_dim, self.dropout),
            *(functools.partial(Recurrent, num_inputs, self.dim, self.dropout) for num_inputs in inputs),
        ]


@dataclasses.dataclass(frozen=True)
class RecurrentLM(_Stack):
    """A language model: an embedding, LSTM layers, and the logits of the next token."""

    def layers(self) -> list[Callable[..., nnx.Module]]:
        """One factory per layer: the embedding, each recurrent layer, the head."""
        head = functools.partial(WordHead, self.dim, self.vocab_size)
        return [*self._layers(), head]

    def loss(self) -> CrossEntropy:
        """Cross-entropy of the next tokens."""
        return CrossEntropy()


@dataclasses.dataclass(frozen=True)
class RecurrentClassifier(_Stack):
    """A classifier of texts: an embedding, LSTM layers, and the logits of their mean."""

    num_classes: int = 2
    """Number of classes K."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.at_least_one(self, "num_classes")

    def layers(self) -> list[Callable[..., nnx.Module]]:
        """One factory per layer: the embedding, each recurrent layer, the head."""
        head = functools.partial(ClassHead, self.dim, self.num_classes)
        return [*self._layers(), head]

    def loss(self) -> CrossEntropy:
        """Cross-entropy of the classes of the texts."""
        return CrossEntropy()
