"""The decoders that are published as Llama, Mistral, Qwen 2 and 3, and Gemma, as whole models.

Norms of the root mean square before attention and MLP, rotary positions, heads of keys that several heads of queries
share, and a gated MLP. The families differ in few options, see `Llama`, and `Llama.of` reads them from the
`config.json` of a published model. `Llama.names` maps its tensors to the paths of `Decoder`:

    folder = pathlib.Path("Llama-3.2-1B")
    config = Llama.of(json.loads((folder / "config.json").read_text()))
    make = functools.partial(Decoder, config)
    params = jpipe.load_params(folder, names=config.names(), like=nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))

References:
  Touvron et al., "LLaMA", arXiv:2302.13971; Jiang et al., "Mistral 7B", arXiv:2310.06825; Yang et al., "Qwen2",
  arXiv:2407.10671; Gemma Team, "Gemma", arXiv:2403.08295; Su et al., "RoFormer", arXiv:2104.09864 (rotary positions).

Letters: B batch, T positions, D `dim`, H heads, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jpipe
from jpipe import vocabulary
from models import checks
from models.losses import NextWords
from models.sharding import constrain, named
from models.sublayers import narrowing, next_words, widening

_KERNEL = nnx.initializers.normal(0.02)
_ACTIVATIONS = {"silu": nnx.silu, "gelu_tanh": functools.partial(nnx.gelu, approximate=True)}


@dataclasses.dataclass(frozen=True)
class LongRotation:
    """The slower rotation of Llama 3.1 and later, for sequences that are longer than those of the first training.

    Frequencies whose wave is longer than `original_length / low` are divided by `factor`, those whose wave is shorter
    than `original_length / high` stay, and those between are a mean of both.
    """

    factor: float
    low: float
    high: float
    original_length: float

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        """The frequencies, in radians for a position."""
        turns = self.original_length * frequencies / (2 * math.pi)
        share = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return (1 - share) * frequencies / self.factor + share * frequencies


@dataclasses.dataclass(frozen=True)
class Llama:
    """The sizes of a decoder, and the options in which the families differ."""

    vocab_size: int = 256
    """Number of tokens V."""
    dim: int = 64
    """Width D of the residual stream."""
    mlp_dim: int = 192
    """Hidden units of the MLP."""
    num_blocks: int = 4
    """Number of blocks."""
    num_heads: int = 4
    """Heads of queries, H."""
    num_key_heads: int = 2
    """Heads of keys and values. Must divide `num_heads`."""
    head_dim: int = 16
    """Width of a head, an even number."""
    rotary_base: float = 10_000.0
    """The wave length of the slowest rotation is about 2 pi times this."""
    long_rotation: tuple[float, ...] | None = None
    """The four numbers of `LongRotation`, for slower rotations in long sequences; None: as they are."""
    epsilon: float = 1e-6
    """Added to the mean of squares in a norm."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """The nonlinearity of the MLP."""
    tie_embeddings: bool = True
    """True if the head shares the matrix of the token embedding."""
    qkv_bias: bool = False
    """True if queries, keys and values have biases, as in Qwen 2."""
    head_norms: bool = False
    """True if each head of queries and keys is normalised, as in Qwen 3."""
    window: int | None = None
    """The positions that a query sees, itself and those before; None: all before it."""
    zero_centred: bool = False
    """True if norms multiply by 1 + scale and the embedding by the square root of D, as in Gemma."""

    def __post_init__(self) -> None:
        checks.at_least_one(
            self, "vocab_size", "dim", "mlp_dim", "num_blocks", "num_heads", "num_key_heads", "head_dim"
        )
        if self.num_heads % self.num_key_heads:
            raise ValueError(
                f"`num_key_heads` must divide `num_heads`, got {self.num_key_heads} and {self.num_heads}: heads of "
                "queries share heads of keys in groups."
            )
        if self.head_dim % 2:
            raise ValueError(f"`head_dim` must be even, got {self.head_dim}: a rotation turns pairs of numbers.")
        if self.long_rotation is not None and len(self.long_rotation) != 4:
            raise ValueError(
                f"`long_rotation` must be factor, low, high and original length, got {self.long_rotation}."
            )
        if self.activation not in _ACTIVATIONS:
            raise ValueError(f"`activation` must be one of {', '.join(_ACTIVATIONS)}, got {self.activation!r}.")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Llama":
        """The options of a published model.

        Args:
          config: the content of its `config.json`.

        Raises:
          ValueError: if the model is of another family, or has a part that `Decoder` lacks.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ValueError(f"`model_type` must be one of {', '.join(FAMILIES)}, got {family!r}.")
        activation = config.get("hidden_activation") or config.get("hidden_act", "silu")
        if family == "gemma":  # the first configurations name the exact GELU, and were trained with this one
            activation = "gelu_pytorch_tanh"
        known = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
        if activation not in known:
            raise ValueError(f"`hidden_act` must be one of {', '.join(known)}, got {activation!r}.")
        for name in ("mlp_bias", "attention_bias"):
            if config.get(name):
                raise ValueError(f"`{name}` is true, and the decoder has no such biases.")
        num_heads = config["num_attention_heads"]
        return cls(
            vocab_size=config["vocab_size"],
            dim=config["hidden_size"],
            mlp_dim=config["intermediate_size"],
            num_blocks=config["num_hidden_layers"],
            num_heads=num_heads,
            num_key_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
            rotary_base=float(_rotation(config).get("rope_theta") or config.get("rope_theta", 10_000.0)),
            long_rotation=_long_rotation(_rotation(config)),
            epsilon=config.get("rms_norm_eps", 1e-6),
            activation=known[activation],  # type: ignore[arg-type]
            tie_embeddings=config.get("tie_word_embeddings", family == "gemma"),
            window=_window(config, family),
            **FAMILIES[family],
        )

    def published(self) -> dict[str, Any]:
        """The content of a `config.json` from which `of` makes these options.

        Raises:
          ValueError: if no family has them.
        """
        rotation = {"rope_type": "llama3", **dict(zip(_LONG_ROTATION, self.long_rotation or ()))}
        common = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.dim,
            "intermediate_size": self.mlp_dim,
            "num_hidden_layers": self.num_blocks,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_key_heads,
            "head_dim": self.head_dim,
            "rope_theta": self.rotary_base,
            **({} if self.long_rotation is None else {"rope_scaling": rotation}),
            "rms_norm_eps": self.epsilon,
            "hidden_act": {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}[self.activation],
            "tie_word_embeddings": self.tie_embeddings,
            **({} if self.window is None else {"sliding_window": self.window}),
        }
        for family in FAMILIES:
            config = {"model_type": family, **common}
            # Libraries read a window of Mistral alone.
            if Llama.of(config) == self and (self.window is None or family == "mistral"):
                return {**config, "architectures": [f"{family.capitalize()}ForCausalLM"]}
        raise ValueError(
            f"no family of published models has all of these options: {self}. Take those of one of "
            f"{', '.join(FAMILIES)}."
        )

    def layers(self) -> Any:
        """What `jpipe.Pipeline` takes in the place of a list of layers."""
        return functools.partial(Decoder, self)

    def loss(self) -> NextWords:
        """The cross-entropy of the next words, which `Decoder` returns if it gets labels."""
        return NextWords()

    def names(self) -> jpipe.NameMap:
        """Where the tensors of a published model lie in `Decoder`."""
        block, rules = "model.layers.{}.", []
        linear = {
            "self_attn.q_proj": "attention.query",
            "self_attn.k_proj": "attention.key",
            "self_attn.v_proj": "attention.value",
            "self_attn.o_proj": "attention.out",
            "mlp.gate_proj": "mlp.gate",
            "mlp.up_proj": "mlp.up",
            "mlp.down_proj": "mlp.down",
        }
        norms = {
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "mlp_norm",
            "self_attn.q_norm": "attention.query_norm",
            "self_attn.k_norm": "attention.key_norm",
        }
        for published, name in linear.items():
            rules.append(jpipe.NameRule.transposed(f"{block}{published}.weight", f"blocks.{{}}.{name}.kernel"))
            rules.append(jpipe.NameRule(f"{block}{published}.bias", f"blocks.{{}}.{name}.bias"))
        rules += [jpipe.NameRule(f"{block}{a}.weight", f"blocks.{{}}.{b}.scale") for a, b in norms.items()]
        rules += [
            jpipe.NameRule("model.embed_tokens.weight", "embed.embedding"),
            jpipe.NameRule("model.norm.weight", "norm.scale"),
        ]
        ignored = ["model.layers.{}.self_attn.rotary_emb.inv_freq"]
        if self.tie_embeddings:
            ignored.append("lm_head.weight")
        else:
            rules.append(jpipe.NameRule.transposed("lm_head.weight", "head.kernel"))
        return jpipe.NameMap(rules, ignored=ignored, prefix="model.")


FAMILIES: Mapping[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"head_norms": True},
    "gemma": {"zero_centred": True},
}
"""The options that set a family apart, by its `model_type`."""


def _rotation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a configuration says of rotations, in either of two fields."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


_LONG_ROTATION = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _long_rotation(rotation: Mapping[str, Any]) -> tuple[float, ...] | None:
    kind = rotation.get("rope_type", rotation.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"`rope_scaling` must be of the type 'default' or 'llama3', got {kind!r}.")
    return tuple(rotation[name] for name in _LONG_ROTATION)


def _window(config: Mapping[str, Any], family: str) -> int | None:
    """The window of all blocks."""
    window = config.get("sliding_window")
    if window is None or (family.startswith("qwen") and not config.get("use_sliding_window")):
        return None
    if family.startswith("qwen"):
        raise ValueError("`use_sliding_window` is true, and all blocks of the decoder have one window.")
    return int(window)


# -- Layers


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x^2) + epsilon)`, times a scale of each number."""

    def __init__(self, dim: int, config: Llama, *, rngs: nnx.Rngs):
        init = nnx.initializers.zeros if config.zero_centred else nnx.initializers.ones
        self.scale = nnx.Param(init(rngs.params(), (dim,), jnp.float32))
        self.epsilon, self.zero_centred = config.epsilon, config.zero_centred

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., D] -> [..., D]
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        scale = jnp.broadcast_to(self.scale[...], wide.shape)
        if self.zero_centred:
            return (wide * (1 + scale.astype(wide.dtype))).astype(x.dtype)
        return wide.astype(x.dtype) * scale.astype(x.dtype)


def rotated(x: jax.Array, positions: jax.Array, config: Llama) -> jax.Array:
    """Turns pairs of numbers of each head, `i` and `i + head_dim / 2`, by angles that grow with the position.

    Args:
      x: `[B, T, H, head_dim]`.
      positions: integers `[B or 1, T]`.
      config: the decoder's.
    """
    half = config.head_dim // 2
    frequencies = config.rotary_base ** -(np.arange(half) / half)
    if config.long_rotation is not None:
        frequencies = LongRotation(*config.long_rotation)(frequencies)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    angles = positions[..., None].astype(dtype) * jnp.asarray(frequencies, dtype)[None, None]
    cos, sin = (f(angles)[:, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))  # [B, T, 1, half]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attention(nnx.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: Llama, *, rngs: nnx.Rngs):
        queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_key_heads))
        options: Any = dict(kernel_init=_KERNEL, rngs=rngs)
        self.query = widening(config.dim, queries, "heads", use_bias=config.qkv_bias, **options)
        self.key, self.value = (
            widening(config.dim, keys, "heads", use_bias=config.qkv_bias, **options) for _ in range(2)
        )
        self.out = narrowing(queries, config.dim, "heads", use_bias=False, **options)
        if config.head_norms:
            self.query_norm, self.key_norm = (RMSNorm(config.head_dim, config, rngs=rngs) for _ in range(2))
        self.config = config

    def __call__(self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        # [B, T, D], [B or 1, T], [B, T] -> [B, T, D]
        config = self.config

        def heads(layer: nnx.Linear) -> jax.Array:
            values = layer(x).reshape(*x.shape[:2], -1, config.head_dim)
            return constrain(values, "batch", "positions", "heads", None)

        query, key, value = heads(self.query), heads(self.key), heads(self.value)
        if config.head_norms:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = (rotated(a, positions, config) for a in (query, key))
        mask, length = None, x.shape[1]
        if config.window is not None and config.window < length:
            distance = np.arange(length)[:, None] - np.arange(length)[None]
            mask = jnp.asarray(distance < config.window)[None, None]
        attended = jpipe.attention(query, key, value, mask=mask, is_causal=True, segment_ids=segment_ids)
        attended = constrain(attended, "batch", "positions", "heads", None)
        return self.out(attended.reshape(*x.shape[:2], -1))


class GatedMLP(nnx.Module):
    """`down(activation(gate(x)) * up(x))`."""

    def __init__(self, config: Llama, *, rngs: nnx.Rngs):
        options: Any = dict(use_bias=False, kernel_init=_KERNEL, rngs=rngs)
        self.gate, self.up = (widening(config.dim, config.mlp_dim, "mlp", **options) for _ in range(2))
        self.down = narrowing(config.mlp_dim, config.dim, "mlp", **options)
        self.activation = _ACTIVATIONS[config.activation]

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
        hidden = self.activation(self.gate(x)) * self.up(x)
        return self.down(constrain(hidden, "batch", "positions", "mlp"))


class Block(nnx.Module):
    """Attention, then the MLP, each with a norm before it and both residual."""

    def __init__(self, config: Llama, *, rngs: nnx.Rngs):
        self.attention_norm, self.mlp_norm = (RMSNorm(config.dim, config, rngs=rngs) for _ in range(2))
        self.attention, self.mlp = Attention(config, rngs=rngs), GatedMLP(config, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        # [B, T, D], [B or 1, T], [B, T] -> [B, T, D]
        read = constrain(self.attention_norm(x), "batch", "positions", None)
        x = constrain(x + self.attention(read, positions, segment_ids), "batch", "length", "embed")
        read = constrain(self.mlp_norm(x), "batch", "positions", None)
        return constrain(x + self.mlp(read), "batch", "length", "embed")


class Decoder(nnx.Module):
    """The whole model.

    Args:
      config: its sizes and options.
      rngs: random streams, of which "params" draws the initial weights.
    """

    def __init__(self, config: Llama, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Embed(
            config.vocab_size, config.dim, embedding_init=named(_KERNEL, "vocab", "embed"), rngs=rngs
        )
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_blocks)])
        self.norm = RMSNorm(config.dim, config, rngs=rngs)
        if not config.tie_embeddings:
            self.head = widening(config.dim, config.vocab_size, "vocab", use_bias=False, kernel_init=_KERNEL, rngs=rngs)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        labels: jax.Array | None = None,
    ) -> jax.Array:
        """The logits of the next token, or its loss.

        Args:
          tokens: integers `[B, T]`.
          positions: integers `[B, T]`, the position of each token in its document; None: that in its row.
          segment_ids: integers `[B, T]`, the document of each token, if rows hold several; None: one.
          labels: integers `[B, T]`, the next token of each position; negative where none counts.

        Returns:
          Logits `[B, T, V]`; with labels the loss of each position `[B, T]`, in nats, 0 where no label counts. The
          logits of all positions are then never there at once.
        """
        x = vocabulary.lookup(self.embed.embedding[...], tokens)
        if self.config.zero_centred:
            x *= jnp.asarray(self.config.dim**0.5, x.dtype)
        x = constrain(x, "batch", "length", "embed")
        if positions is None:
            positions = jnp.arange(tokens.shape[1])[None]
        for block in self.blocks:
            x = block(x, positions, segment_ids)
        matrix = self.embed.embedding[...] if self.config.tie_embeddings else self.head.kernel[...].T
        return next_words(self.norm(x), matrix, labels)
