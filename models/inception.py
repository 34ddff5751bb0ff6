"""Inception-v3: blocks of parallel convolutions whose channels are concatenated.

Szegedy et al., CVPR 2016, arXiv:1512.00567, with the channels of torchvision and without the
auxiliary head, which only adds a loss. Images are [B, H, W, C]. Batch norm mixes the examples
of a microbatch, so the result depends on the number of microbatches.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from models import checks
from models.convolution import Conv
from models.losses import CrossEntropy
from models.sharding import named
from models.sublayers import dropout

_KERNEL = nnx.initializers.variance_scaling(2.0, "fan_in", "truncated_normal")
_LOGITS = named(nnx.initializers.normal(0.01), "embed", None)

Size = int | tuple[int, int]
_DOWN = {"stride": 2, "padding": "VALID"}


class Convolution(nnx.Module):
    """Convolution, batch norm and ReLU, optional max pooling of 3x3 windows with stride 2."""

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        size: Size,
        stride: int = 1,
        padding: Literal["SAME", "VALID"] = "SAME",
        pools: bool = False,
        *,
        rngs: nnx.Rngs,
    ):
        self.conv = Conv(
            num_inputs,
            num_outputs,
            size,
            stride=stride,
            padding=padding,
            kernel_init=_KERNEL,
            rngs=rngs,
        )
        self.norm = nnx.BatchNorm(num_outputs, momentum=0.9, epsilon=1e-3, rngs=rngs)
        self.pools = pools

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.conv.padding == "VALID":
            _check_size(x)
        x = nnx.relu(self.norm(self.conv(x)))
        return _pool(x) if self.pools else x


def _check_size(x: jax.Array) -> None:
    """Checks that a window of 3x3 fits."""
    height, width = x.shape[1:3]
    if min(height, width) < 3:
        raise ValueError(
            f"a window of 3x3 does not fit into {height}x{width} pixels: the images are too "
            'small. Use at least 75 pixels, or 7 pixels with stem="small".'
        )


def _pool(x: jax.Array) -> jax.Array:
    _check_size(x)
    return nnx.max_pool(x, (3, 3), strides=(2, 2))


def _mean(x: jax.Array) -> jax.Array:
    """Mean of 3x3 windows; the zeros around the image count."""
    return nnx.avg_pool(x, (3, 3), strides=(1, 1), padding="SAME")


def _path(num_inputs: int, *steps: tuple[int, Size], rngs: nnx.Rngs, **last: int | str) -> nnx.List:
    """Convolutions one after the other.

    Args:
      num_inputs: channels of the image.
      steps: channels and size of each convolution.
      rngs: the random streams of the weights.
      last: stride and padding of the last one.
    """
    path = []
    for i, (width, size) in enumerate(steps):
        options = last if i == len(steps) - 1 else {}
        path.append(Convolution(num_inputs, width, size, rngs=rngs, **options))
        num_inputs = width
    return nnx.List(path)


def _walk(path: nnx.List, x: jax.Array) -> jax.Array:
    for convolution in path:
        x = convolution(x)
    return x


class Block(nnx.Module):
    """Paths side by side, and a pooling; all channels are concatenated.

    Args:
      num_inputs: channels of the image.
      paths: the convolutions of each path, as channels and sizes.
      pooled: channels of the 1x1 convolution behind the mean of 3x3 windows. None: the block
        halves the image, and its pooling takes the maximum.
    """

    def __init__(
        self,
        num_inputs: int,
        paths: tuple[tuple[tuple[int, Size], ...], ...],
        pooled: int | None,
        *,
        rngs: nnx.Rngs,
    ):
        options = {} if pooled else _DOWN
        self.paths = nnx.List([_path(num_inputs, *steps, rngs=rngs, **options) for steps in paths])
        self.halves = pooled is None
        if pooled is not None:
            self.pooled = Convolution(num_inputs, pooled, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        pooled = _pool(x) if self.halves else self.pooled(_mean(x))
        outputs = [_walk(path, x) for path in self.paths]
        return jnp.concatenate([*outputs, pooled], axis=-1)


class ForkedBlock(nnx.Module):
    """A block two of whose paths end in a 1x3 and a 3x1 convolution side by side.

    Args:
      num_inputs: channels of the image.
      width: channels of the convolutions at the end of these paths.
      paths: the convolutions before the ends of each of the two.
      plain: channels of the path of one 1x1 convolution.
      pooled: see `Block`.
    """

    def __init__(
        self,
        num_inputs: int,
        width: int,
        paths: tuple[tuple[tuple[int, Size], ...], ...],
        plain: int,
        pooled: int,
        *,
        rngs: nnx.Rngs,
    ):
        convolution = functools.partial(Convolution, rngs=rngs)
        self.plain = convolution(num_inputs, plain, 1)
        self.paths = nnx.List([_path(num_inputs, *blocks, rngs=rngs) for blocks in paths])
        self.ends = nnx.List(
            [nnx.List([convolution(steps[-1][0], width, size) for size in ((1, 3), (3, 1))]) for steps in paths]
        )
        self.pooled = convolution(num_inputs, pooled, 1)

    def __call__(self, x: jax.Array) -> jax.Array:
        outputs = [self.plain(x)]
        for path, ends in zip(self.paths, self.ends):
            y = _walk(path, x)
            outputs += [end(y) for end in ends]
        return jnp.concatenate([*outputs, self.pooled(_mean(x))], axis=-1)


class Head(nnx.Module):
    """Mean over the image, dropout, then the logits."""

    def __init__(self, width: int, num_classes: int, rate: float, *, rngs: nnx.Rngs):
        self.dropout = dropout(rate, rngs)
        self.linear = nnx.Linear(width, num_classes, kernel_init=_LOGITS, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, H, W, C] -> [B, K]
        return self.linear(self.dropout(x.mean(axis=(1, 2))))


@dataclasses.dataclass(frozen=True)
class Inception:
    """Three groups of blocks, the image halved between them; by default Inception-v3."""

    num_channels: int = 3
    """Channels of the image."""
    width: int = 32
    """Channels of the first convolution. Those of all others are in proportion, so it must be
    even."""
    num_blocks: tuple[int, int, int] = (3, 4, 2)
    """Blocks in each group, beside the two that halve the image."""
    stem: Literal["imagenet", "small"] = "imagenet"
    """"imagenet": five convolutions and two poolings, from 299 pixels to 35; "small": one 3x3
    convolution, which keeps the size."""
    dropout: float = 0.5
    """Fraction of the inputs of the last layer that is dropped in training."""
    num_classes: int = 1000
    """Number of classes K."""

    def __post_init__(self) -> None:
        checks.at_least_one(self, "num_channels", "width", "num_classes")
        checks.all_at_least_one(self, "num_blocks")
        checks.one_of(self, "stem")
        checks.rate(self, "dropout")
        if self.width % 2:
            raise ValueError(
                f"`width` must be even, got {self.width}: some convolutions have 3 / 2 times as many channels. Add 1."
            )

    def layers(self) -> list[Callable[..., nnx.Module]]:
        """One factory per layer: each convolution of the stem, each block, the head."""
        layers, num_inputs = self._stem()
        for group, num_blocks in enumerate(self.num_blocks):
            if group:
                layer, num_inputs = self._halving(group, num_inputs)
                layers.append(layer)
            for i in range(num_blocks):
                block = (self._wide, self._factored, self._forked)[group]
                layer, num_inputs = block(i, num_inputs)
                layers.append(layer)
        return [
            *layers,
            functools.partial(Head, num_inputs, self.num_classes, self.dropout),
        ]

    def loss(self) -> CrossEntropy:
        """Cross-entropy of the classes of the images."""
        return CrossEntropy()

    def _of(self, num: int) -> int:
        """Channels, from those of the paper."""
        return num * self.width // 32

    def _steps(self, *steps: tuple[int, Size]) -> tuple[tuple[int, Size], ...]:
        return tuple((self._of(num), size) for num, size in steps)

    def _stem(self) -> tuple[list[Callable[..., nnx.Module]], int]:
        w = self._of
        if self.stem == "small":
            return [functools.partial(Convolution, self.num_channels, w(192), 3)], w(192)
        # Channels in and out, size, stride, padding, whether it pools.
        convolutions = [
            (self.num_channels, w(32), 3, 2, "VALID"),
            (w(32), w(32), 3, 1, "VALID"),
            (w(32), w(64), 3, 1, "SAME", True),
            (w(64), w(80), 1),
            (w(80), w(192), 3, 1, "VALID", True),
        ]
        return [functools.partial(Convolution, *sizes) for sizes in convolutions], w(192)

    def _wide(self, i: int, num_inputs: int) -> tuple[Callable[..., nnx.Module], int]:
        """Windows of up to 5x5, the second as two of 3x3 (figure 5)."""
        pooled = 64 if i else 32
        paths = (
            self._steps((64, 1)),
            self._steps((48, 1), (64, 5)),
            self._steps((64, 1), (96, 3), (96, 3)),
        )
        return functools.partial(Block, num_inputs, paths, self._of(pooled)), self._of(224 + pooled)

    def _factored(self, i: int, num_inputs: int) -> tuple[Callable[..., nnx.Module], int]:
        """Windows of 7x7 as 1x7 and 7x1 (figure 6)."""
        last = i == self.num_blocks[1] - 1
        c = 192 if last else 160 if i else 128
        row, column = (1, 7), (7, 1)
        paths = (
            self._steps((192, 1)),
            self._steps((c, 1), (c, row), (192, column)),
            self._steps((c, 1), (c, column), (c, row), (c, column), (192, row)),
        )
        return functools.partial(Block, num_inputs, paths, self._of(192)), self._of(768)

    def _forked(self, i: int, num_inputs: int) -> tuple[Callable[..., nnx.Module], int]:
        """Windows of 3x3 as 1x3 and 3x1 side by side (figure 7)."""
        del i
        paths = self._steps((384, 1)), self._steps((448, 1), (384, 3))
        layer = functools.partial(
            ForkedBlock,
            num_inputs,
            self._of(384),
            paths,
            self._of(320),
            self._of(192),
        )
        return layer, self._of(2048)

    def _halving(self, group: int, num_inputs: int) -> tuple[Callable[..., nnx.Module], int]:
        """A block that halves the image before the given group (figure 10)."""
        if group == 1:
            paths = (
                self._steps((384, 3)),
                self._steps((64, 1), (96, 3), (96, 3)),
            )
            added = 480
        else:
            paths = (
                self._steps((192, 1), (320, 3)),
                self._steps((192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3)),
            )
            added = 512
        layer = functools.partial(Block, num_inputs, paths, None)
        return layer, num_inputs + self._of(added)
