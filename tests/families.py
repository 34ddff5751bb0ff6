"""Small models of three families with data and loss, as the pipeline's tests use them."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
from models import MLP, ResNet, Transformer

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
"""Marks a case that only `make test-all` runs."""


def cross_entropy(outputs, batch):
    return optax.softmax_cross_entropy_with_integer_labels(
        outputs, batch["labels"]
    ).mean()


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
                if isinstance(
                    part, nnx.Embed
                ):  # looks its rows up in a dtype of its own
                    part.dtype = dtype
            graph, state = nnx.split(module)
            return nnx.merge(graph, jax.tree.map(lambda a: a.astype(dtype), state))

        return dataclasses.replace(
            self, layers=[functools.partial(cast, make) for make in self.layers]
        )

    def batches(self, count: int, size: int, dtype=np.float32) -> list[dict[str, Any]]:
        rng = np.random.default_rng(0)
        out = []
        for _ in range(count):
            if self.num_tokens:
                x = rng.integers(
                    0, self.num_tokens, (size, *self.example), dtype=np.int32
                )
                y = rng.integers(
                    0, self.num_tokens, (size, *self.example), dtype=np.int32
                )
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
        Transformer(
            vocab_size=11, seq_len=6, dim=8, num_heads=2, num_blocks=4
        ).layers(),
        (6,),
        num_tokens=11,
    ),
}

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
    return jpipe.Schedule.from_ticks(
        "v", m + s, backward, backward + 1, device=[0, 1, 1, 0]
    )


def schedule_named(name: str, num_stages: int, num_microbatches: int) -> jpipe.Schedule:
    if name == "hand-written":
        return jpipe.Schedule.from_text(HAND_WRITTEN, name="hand-written").check()
    if name == "two-columns":
        return two_columns_a_device(num_microbatches)
    if name == "v":
        return v_placement(num_microbatches)
    name, _, ticks = name.partition("/")
    return getattr(jpipe.schedules, name)(
        num_stages, num_microbatches, **({"ticks": ticks} if ticks else {})
    )
