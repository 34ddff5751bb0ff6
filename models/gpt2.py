"""GPT-2 with its published names, as a whole model (Radford et al., 2019).

`GPT2.of` reads the sizes from the `config.json` of a published model, and `GPT2.names` maps its tensors to the paths of
`GPT2Decoder`. `models/transformer.py` has a model of the same kind as a list of layers.

Letters: B batch, T positions, D `dim`, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jpipe
from jpipe import vocabulary
from models import checks
from models.losses import NextWords
from models.sharding import constrain, named
from models.sublayers import narrowing, next_words, widening

_KERNEL = nnx.initializers.normal(0.02)


@dataclasses.dataclass(frozen=True)
class GPT2:
    """The sizes of GPT-2."""

    vocab_size: int = 256
    """Number of tokens V."""
    num_positions: int = 128
    """The largest number of positions T."""
    dim: int = 64
    """Width D of the residual stream."""
    num_blocks: int = 4
    """Number of blocks."""
    num_heads: int = 4
    """Attention heads. Must divide `dim`."""
    epsilon: float = 1e-5
    """Added to the variance in a norm."""

    def __post_init__(self) -> None:
        checks.at_least_one(self, "vocab_size", "num_positions", "dim", "num_blocks", "num_heads")
        checks.heads_divide_dim(self)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "GPT2":
        """The sizes of a published model.

        Args:
          config: the content of its `config.json`.

        Raises:
          ValueError: if the model is another one, or has a part that `GPT2Decoder` lacks.
        """
        usual = {
            "model_type": ("gpt2", None),
            "activation_function": ("gelu_new", "gelu_new"),
            "scale_attn_weights": (True, True),
            "scale_attn_by_inverse_layer_idx": (False, False),
            "tie_word_embeddings": (True, True),
        }
        for name, (wanted, default) in usual.items():
            if config.get(name, default) != wanted:
                raise ValueError(f"`{name}` must be {wanted!r}, got {config.get(name, default)!r}.")
        if config.get("n_inner") not in (None, 4 * config["n_embd"]):
            raise ValueError(f"`n_inner` must be 4 times `n_embd`, got {config['n_inner']} and {config['n_embd']}.")
        return cls(
            config["vocab_size"],
            config["n_positions"],
            config["n_embd"],
            config["n_layer"],
            config["n_head"],
            config.get("layer_norm_epsilon", 1e-5),
        )

    def published(self) -> dict[str, Any]:
        """The content of a `config.json` from which `of` makes these sizes."""
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": self.vocab_size,
            "n_positions": self.num_positions,
            "n_embd": self.dim,
            "n_layer": self.num_blocks,
            "n_head": self.num_heads,
            "layer_norm_epsilon": self.epsilon,
        }

    def layers(self) -> Any:
        """What `jpipe.Pipeline` takes in the place of a list of layers."""
        return functools.partial(GPT2Decoder, self)

    def loss(self) -> NextWords:
        """The cross-entropy of the next words, which `GPT2Decoder` returns if it gets labels."""
        return NextWords()

    def names(self) -> jpipe.NameMap:
        """Where the tensors of a published model lie in `GPT2Decoder`. Both have matrices of `[inputs, outputs]`."""
        block = "transformer.h.{}."
        linear = {"attn.c_attn": "qkv", "attn.c_proj": "attention_out", "mlp.c_fc": "mlp_in", "mlp.c_proj": "mlp_out"}
        norms = {"ln_1": "attention_norm", "ln_2": "mlp_norm"}
        rules = [
            jpipe.NameRule("transformer.wte.weight", "words.embedding"),
            jpipe.NameRule("transformer.wpe.weight", "places.embedding"),
            jpipe.NameRule("transformer.ln_f.weight", "norm.scale"),
            jpipe.NameRule("transformer.ln_f.bias", "norm.bias"),
        ]
        for names, leaf in ((linear, "kernel"), (norms, "scale")):
            for published, name in names.items():
                rules.append(jpipe.NameRule(f"{block}{published}.weight", f"blocks.{{}}.{name}.{leaf}"))
                rules.append(jpipe.NameRule(f"{block}{published}.bias", f"blocks.{{}}.{name}.bias"))
        ignored = [f"{block}attn.bias", f"{block}attn.masked_bias", "lm_head.weight"]
        return jpipe.NameMap(rules, ignored=ignored, prefix="transformer.")


class Block(nnx.Module):
    """Causal self-attention, then an MLP of four times the width, both residual.

    The columns of `qkv` are all queries, all keys and all values.
    """

    def __init__(self, config: GPT2, *, rngs: nnx.Rngs):
        dim = config.dim
        self.num_heads = config.num_heads
        self.attention_norm, self.mlp_norm = (nnx.LayerNorm(dim, epsilon=config.epsilon, rngs=rngs) for _ in range(2))
        options: Any = dict(kernel_init=_KERNEL, rngs=rngs)
        self.qkv = widening(dim, 3 * dim, "heads", **options)
        self.attention_out = narrowing(dim, dim, "heads", **options)
        self.mlp_in = widening(dim, 4 * dim, "mlp", **options)
        self.mlp_out = narrowing(4 * dim, dim, "mlp", **options)

    def __call__(self, x: jax.Array, segment_ids: jax.Array | None) -> jax.Array:  # [B, T, D] -> [B, T, D]
        parts = jnp.split(self.qkv(constrain(self.attention_norm(x), "batch", "positions", None)), 3, axis=-1)
        query, key, value = (a.reshape(*x.shape[:2], self.num_heads, -1) for a in parts)
        attended = jpipe.attention(query, key, value, is_causal=True, segment_ids=segment_ids)
        x = constrain(x + self.attention_out(attended.reshape(x.shape)), "batch", "length", "embed")
        hidden = self.mlp_in(constrain(self.mlp_norm(x), "batch", "positions", None))
        hidden = constrain(nnx.gelu(hidden, approximate=True), "batch", "positions", "mlp")
        return constrain(x + self.mlp_out(hidden), "batch", "length", "embed")


class GPT2Decoder(nnx.Module):
    """The whole model. The head shares the matrix of the words.

    Args:
      config: its sizes.
      rngs: random streams, of which "params" draws the initial weights.
    """

    def __init__(self, config: GPT2, *, rngs: nnx.Rngs):
        words, places = named(_KERNEL, "vocab", "embed"), named(_KERNEL, None, "embed")
        self.words = nnx.Embed(config.vocab_size, config.dim, embedding_init=words, rngs=rngs)
        self.places = nnx.Embed(config.num_positions, config.dim, embedding_init=places, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_blocks)])
        self.norm = nnx.LayerNorm(config.dim, epsilon=config.epsilon, rngs=rngs)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        labels: jax.Array | None = None,
    ) -> jax.Array:
        """The logits of the next token, or its loss. Arguments and results are those of `models.llama.Decoder`."""
        checks.fits(tokens.shape[1], self.places.num_embeddings)
        if positions is None:
            positions = jnp.arange(tokens.shape[1])[None]
        x = constrain(
            vocabulary.lookup(self.words.embedding[...], tokens) + self.places.embedding[...][positions],
            "batch",
            "length",
            "embed",
        )
        for block in self.blocks:
            x = block(x, segment_ids)
        return next_words(self.norm(x), self.words.embedding[...], labels)
