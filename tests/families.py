"""Small models with data and loss, and schedules by name, as the tests of pipelines use them."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
from models import (
    BERT,
    MLP,
    VGG,
    AlexNet,
    Inception,
    MixtureTransformer,
    RecurrentClassifier,
    RecurrentLM,
    RecurrentTranslation,
    ResNet,
    Transformer,
    Translation,
    UNet,
)

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
"""Marks a case that only `make test-slow` runs."""


def cross_entropy(outputs, batch):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, batch["labels"]).mean()


@dataclasses.dataclass(frozen=True)
class Family:
    """A model's layers and the shape of its data."""

    layers: list
    example: tuple[int, ...]
    num_tokens: int | None = None
    num_classes: int = 5

    def in_dtype(self, dtype: str) -> "Family":
        """The same family with parameters of another dtype."""

        def cast(make, rngs):
            module = make(rngs=rngs)
            for _, part in nnx.iter_graph(module):
                if isinstance(part, nnx.Embed):  # looks its rows up in a dtype of its own
                    part.dtype = dtype
            graph, state = nnx.split(module)

            def of_dtype(a):
                is_float = jax.dtypes.issubdtype(a.dtype, np.floating)
                return a.astype(dtype) if is_float else a

            return nnx.merge(graph, jax.tree.map(of_dtype, state))

        return dataclasses.replace(self, layers=[functools.partial(cast, make) for make in self.layers])

    def batches(self, count: int, size: int, dtype=np.float32) -> list[dict[str, Any]]:
        rng = np.random.default_rng(0)
        out = []
        for _ in range(count):
            if self.num_tokens:
                x = rng.integers(0, self.num_tokens, (size, *self.example), dtype=np.int32)
                y = rng.integers(0, self.num_tokens, (size, *self.example), dtype=np.int32)
            else:
                x = rng.normal(size=(size, *self.example)).astype(dtype)
                y = rng.integers(0, self.num_classes, size, dtype=np.int32)
            out.append({"inputs": x, "labels": y})
        return out


FAMILIES = {
    "mlp": Family(MLP(num_inputs=6, widths=(8,) * 5, num_outputs=5).layers(), (6,)),
    "resnet": Family(
        ResNet(
            num_channels=1,
            widths=(8, 16),
            num_blocks=(1, 1),
            group_size=4,
            num_classes=5,
        ).layers(),
        (8, 8, 1),
    ),
    "transformer": Family(
        Transformer(vocab_size=11, seq_len=6, dim=8, num_heads=2, num_blocks=4).layers(),
        (6,),
        num_tokens=11,
    ),
}


def tokens(rng, *shape):
    return rng.integers(1, 7, shape, dtype=np.int32)


def images(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


# A batch has four rows, and a sequence five tokens.
B, T = 4, 5

MODELS = {
    "resnet50": (
        ResNet(num_channels=1, widths=(4, 8), num_blocks=(1, 1), block="bottleneck", norm="batch", num_classes=3),
        lambda rng: images(rng, B, 8, 8, 1),
    ),
    "vgg": (
        VGG(image_size=8, num_channels=1, widths=(4, 4), num_convolutions=(1, 2), hidden_width=8, num_classes=3, batch_norm=True),
        lambda rng: images(rng, B, 8, 8, 1),
    ),
    "alexnet": (
        AlexNet(image_size=16, num_channels=1, widths=(4,) * 5, stem_size=5, stem_stride=1, hidden_width=8, num_classes=3),
        lambda rng: images(rng, B, 16, 16, 1),
    ),
    "inception": (
        Inception(num_channels=1, width=2, num_blocks=(1, 1, 1), stem="small", num_classes=3),
        lambda rng: images(rng, B, 8, 8, 1),
    ),
    "recurrent lm": (
        RecurrentLM(vocab_size=7, embed_dim=4, dim=8, num_layers=3, dropout=0.1),
        lambda rng: tokens(rng, B, T),
    ),
    "recurrent classifier": (
        RecurrentClassifier(vocab_size=7, embed_dim=8, dim=8, num_layers=2, num_classes=3),
        lambda rng: tokens(rng, B, T),
    ),
    "recurrent translation": (
        RecurrentTranslation(vocab_size=7, dim=8, num_layers=2, dropout=0.0),
        lambda rng: {"source": tokens(rng, B, T), "target": tokens(rng, B, T - 1)},
    ),
    "unet": (
        UNet(num_channels=1, width=4, num_levels=2, num_classes=2),
        lambda rng: images(rng, B, 8, 8, 1),
    ),
    "tied transformer": (
        Transformer(vocab_size=7, seq_len=T, dim=8, num_heads=2, num_blocks=1, dropout=0.1, tie_embeddings=True),
        lambda rng: tokens(rng, B, T),
    ),
    "mixture": (
        MixtureTransformer(
            vocab_size=7, seq_len=T, dim=8, num_heads=2, num_blocks=2, num_experts=4, expert_dim=6, bias_rate=0.1
        ),
        lambda rng: tokens(rng, B, T),
    ),
    "bert": (
        BERT(vocab_size=7, seq_len=T, dim=8, num_heads=2, num_blocks=1),
        lambda rng: {
            "tokens": tokens(rng, B, T),
            "segments": np.zeros((B, T), np.int32),
            "mask": np.arange(T)[None] < np.array([5, 4, 3, 5])[:, None],
        },
    ),
    "translation": (
        Translation(vocab_size=7, dim=8, num_heads=2, mlp_dim=8, num_encoder_blocks=2, num_decoder_blocks=2),
        lambda rng: {"source": tokens(rng, B, T), "target": tokens(rng, B, T - 1)},
    ),
}  # fmt: skip
"""A small model of every class in `models/`, and a function from a generator to inputs."""

# Other tests cover these: `test_unet_equals_the_program_written_out` the U-Net, and `test_losses.py`
# dicts and masks between layers.
SLOW_MODELS = ("alexnet", "bert", "inception", "resnet50", "translation", "unet", "vgg")

ASYNCHRONOUS = ("pipemare", "pipedream", "pipedream_2bw")
"""The names of the asynchronous schedules."""

HAND_WRITTEN = """
# Three microbatches on two stages, the second stage in no hurry.
0@0    1@1
F0     .
F1     F0
F2     B0
B0     F1
.      F2,B1
B1     B2
B2     .
U1     U1
"""


COPIES_IN_TURN = """
# Two devices, each with a copy of both stages.
0@0    0@1    1@1    1@0
F0     F1     .      .
.      .      F0     F1
.      .      B0     B1
B0     B1     .      .
U1     U1     U1     U1
"""


def two_columns_a_device(num_microbatches: int, ticks_apart: int = 2) -> jpipe.Schedule:
    """Four stages on two devices, in turn: a device runs up to two columns in a tick."""
    s, m = np.arange(4), np.arange(num_microbatches)[:, None]
    forward = ticks_apart * m + s
    return jpipe.Schedule.from_ticks(
        "two-columns",
        forward,
        forward[-1:] + 1 + 2 * m + 2 * (3 - s),
        device=[0, 1, 0, 1],
    )


def v_placement(num_microbatches: int) -> jpipe.Schedule:
    """Four stages on two devices, down and up again: the turn stays on its device."""
    s, m = np.arange(4), np.arange(num_microbatches)[:, None]
    backward = m + 8 - s
    return jpipe.Schedule.from_ticks("v", m + s, backward, backward + 1, device=[0, 1, 1, 0])


def schedule_named(name: str, num_stages: int, num_microbatches: int) -> jpipe.Schedule:
    if name == "hand-written":
        return jpipe.Schedule.from_text(HAND_WRITTEN, name="hand-written").check()
    if name == "two-columns":
        return two_columns_a_device(num_microbatches)
    if name == "v":
        return v_placement(num_microbatches)
    name, *words = name.split("/")
    options: dict[str, Any] = {}
    for word in words:  # "unit", or copies as "3-1"
        if word[0].isdigit():
            options["replicas"] = tuple(map(int, word.split("-")))
        else:
            options["ticks"] = word
    return getattr(jpipe.schedules, name)(num_stages, num_microbatches, **options)
