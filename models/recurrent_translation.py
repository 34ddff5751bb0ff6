"""A recurrent encoder and decoder with attention, for translation.

LSTM layers in both, and one attention between the last layer of the decoder and the logits
(Luong et al., EMNLP 2015, arXiv:1508.04025, section 3.1, "general", without input feeding). A
layer of the decoder starts with the state in which the same layer of the encoder ended. Inputs are
those of `models/translation.py`: a dict of `source` [B, S] and `target` [B, T] with 0 for
padding. Letters: B batch, S and T positions, D `dim`, L `num_layers`.

The layers pass on one dict:

    source       [B, S, D]     the outputs of the encoder, the memory of the attention
    source_mask  [B, S]        False at padding
    target       [B, T, D]     the target's embedding, then the outputs of the decoder
    states       [B, L, 2, D]  a queue of the last states of the encoder's layers
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
from models.recurrent import LSTM, WordHead, uniform
from models.sharding import constrain, named
from models.sublayers import dropout

_WORDS = named(nnx.initializers.normal(1.0), "vocab", "embed")

Activation = dict[str, jax.Array]


class Embedding(nnx.Module):
    """Vectors of the tokens of source and target, and an empty queue of states."""

    def __init__(
        self,
        vocab_size: int,
        target_vocab_size: int,
        dim: int,
        num_layers: int,
        rate: float,
        *,
        rngs: nnx.Rngs,
    ):
        embed = functools.partial(nnx.Embed, features=dim, embedding_init=_WORDS, rngs=rngs)
        self.token, self.target_token = embed(vocab_size), embed(target_vocab_size)
        self.num_layers = num_layers
        self.dropout = dropout(rate, rngs)

    def __call__(self, inputs: dict[str, jax.Array]) -> Activation:
        source, target = checks.entries_of(inputs, "source", "target")
        x = self._embedded(self.token, source)
        states = jnp.zeros((x.shape[0], self.num_layers, 2, x.shape[2]), x.dtype)
        return {
            "source": x,
            "source_mask": source != 0,
            "target": self._embedded(self.target_token, target),
            "states": states,
        }

    def _embedded(self, token: nnx.Embed, tokens: jax.Array) -> jax.Array:
        x = self.dropout(vocabulary.lookup(token.embedding[...], tokens))
        return constrain(x, "batch", None, "embed")


class EncoderLayer(nnx.Module):
    """LSTM units over the source. Their last state goes to the end of the queue."""

    def __init__(self, dim: int, rate: float, *, rngs: nnx.Rngs):
        self.lstm = LSTM(dim, dim, rngs=rngs)
        self.dropout = dropout(rate, rngs)

    def __call__(self, activation: Activation) -> Activation:
        x, state = self.lstm(activation["source"], activation["source_mask"])
        last = jnp.stack(state, axis=1)[:, None]
        states = jnp.concatenate([activation["states"][:, 1:], last], axis=1)
        return activation | {"source": self.dropout(x), "states": states}


class DecoderLayer(nnx.Module):
    """LSTM units over the target, from the first state of the queue, which goes last."""

    def __init__(self, dim: int, rate: float, *, rngs: nnx.Rngs):
        self.lstm = LSTM(dim, dim, rngs=rngs)
        self.dropout = dropout(rate, rngs)

    def __call__(self, activation: Activation) -> Activation:
        states = activation["states"]
        first = states[:, 0, 0], states[:, 0, 1]
        x, _ = self.lstm(activation["target"], state=first)
        states = jnp.concatenate([states[:, 1:], states[:, :1]], axis=1)
        return activation | {"target": self.dropout(x), "states": states}


class Attention(nnx.Module):
    """The mean of the source's outputs by their likeness to the target's, and a layer of both.

    Returns the target alone, `[B, T, D]`.
    """

    def __init__(self, dim: int, rate: float, *, rngs: nnx.Rngs):
        score = named(uniform(dim), "embed", None)
        self.score = nnx.Param(score(rngs.params(), (dim, dim)))
        both = named(uniform(2 * dim), None, "embed", None)
        self.combine = nnx.Param(both(rngs.params(), (2, dim, dim)))
        self.dropout = dropout(rate, rngs)

    def __call__(self, activation: Activation) -> jax.Array:
        memory, query = (constrain(activation[name], "batch", None, None) for name in ("source", "target"))
        scores = jnp.einsum("btd,bsd->bts", query @ self.score[...], memory)
        mask = activation["source_mask"][:, None, :]
        # A finite number, so that a source of padding alone gives the mean of all.
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
        context = jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), memory)
        context_weights, query_weights = self.combine[...]
        x = jnp.tanh(context @ context_weights + query @ query_weights)
        return constrain(self.dropout(x), "batch", None, "embed")


@dataclasses.dataclass(frozen=True)
class RecurrentTranslation:
    """An LSTM encoder and an LSTM decoder of equal depth, with attention."""

    vocab_size: int = 32000
    """Number of tokens of the source; token 0 is padding."""
    target_vocab_size: int | None = None
    """Number of tokens of the target. None: as many as the source has."""
    dim: int = 1024
    """Units of each layer, and the width D of the vectors of tokens."""
    num_layers: int = 2
    """Layers of the encoder, and as many of the decoder."""
    dropout: float = 0.2
    """Fraction of the activations that is dropped in training, after the embedding, after
    each layer and after the attention."""

    def __post_init__(self) -> None:
        checks.at_least_one(self, "vocab_size", "dim", "num_layers")
        if self.target_vocab_size is not None:
            checks.at_least_one(self, "target_vocab_size")
        checks.rate(self, "dropout")

    def layers(self) -> list[Callable[..., nnx.Module]]:
        """One factory per layer: embedding, encoder, decoder, attention, head."""
        target_vocab_size = self.target_vocab_size or self.vocab_size
        sizes = (self.dim, self.dropout)
        return [
            functools.partial(
                Embedding,
                self.vocab_size,
                target_vocab_size,
                self.dim,
                self.num_layers,
                self.dropout,
            ),
            *[functools.partial(EncoderLayer, *sizes)] * self.num_layers,
            *[functools.partial(DecoderLayer, *sizes)] * self.num_layers,
            functools.partial(Attention, *sizes),
            functools.partial(WordHead, self.dim, target_vocab_size),
        ]

    def loss(self) -> CrossEntropy:
        """Cross-entropy of the next tokens of the target; a batch marks padding by `weights`."""
        return CrossEntropy()
