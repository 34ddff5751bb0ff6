"""A ResNet-18-style network for small images, with group normalisation.

The CIFAR stem (one 3x3 convolution, no pooling) in front of basic blocks (He et
al., CVPR 2016, arXiv:1512.03385). Batch norm would mix the examples of a
microbatch; group norm (Wu and He, ECCV 2018, arXiv:1803.08494) does not, so the
result is the same however a minibatch is cut. Images are [B, H, W, C].
"""

import dataclasses
import functools
from collections.abc import Callable

from flax import nnx

from models.convolution import Conv

# He initialisation over the fan out, and a last scale of zero in every residual
# branch so that each block starts as the identity and depth does not change the
# scale; logits near zero (Goyal et al., 2017, arXiv:1706.02677, section 5.1).
_KERNEL = nnx.initializers.variance_scaling(2.0, "fan_out", "truncated_normal")
_LOGITS = nnx.initializers.normal(0.01)
_ZEROS = nnx.initializers.zeros
_ONES = nnx.initializers.ones


def _norm(width, group_size, rngs, scale_init=_ONES):
    return nnx.GroupNorm(
        width, num_groups=None, group_size=group_size, scale_init=scale_init, rngs=rngs
    )


class Stem(nnx.Module):
    """3x3 convolution, norm and ReLU: channels to the first width."""

    def __init__(
        self,
        num_channels: int,
        width: int,
        stride: int,
        group_size: int,
        *,
        rngs: nnx.Rngs,
    ):
        self.conv = Conv(
            num_channels, width, 3, stride=stride, kernel_init=_KERNEL, rngs=rngs
        )
        self.norm = _norm(width, group_size, rngs)

    def __call__(self, x):
        return nnx.relu(self.norm(self.conv(x)))


class BasicBlock(nnx.Module):
    """Two 3x3 convolutions beside a shortcut, a projection where the shape changes."""

    def __init__(
        self,
        num_inputs: int,
        width: int,
        stride: int,
        group_size: int,
        *,
        rngs: nnx.Rngs,
    ):
        conv = functools.partial(Conv, kernel_init=_KERNEL, rngs=rngs)
        self.conv1 = conv(num_inputs, width, 3, stride=stride)
        self.norm1 = _norm(width, group_size, rngs)
        self.conv2 = conv(width, width, 3)
        self.norm2 = _norm(width, group_size, rngs, scale_init=_ZEROS)
        self.projects = stride != 1 or num_inputs != width
        if self.projects:
            self.projection = conv(num_inputs, width, 1, stride=stride)
            self.projection_norm = _norm(width, group_size, rngs)

    def __call__(self, x):
        shortcut = self.projection_norm(self.projection(x)) if self.projects else x
        x = nnx.relu(self.norm1(self.conv1(x)))
        return nnx.relu(self.norm2(self.conv2(x)) + shortcut)


class Head(nnx.Module):
    """Mean over the image, then the logits."""

    def __init__(self, width: int, num_classes: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(width, num_classes, kernel_init=_LOGITS, rngs=rngs)

    def __call__(self, x):  # [B, H, W, C] -> [B, K]
        return self.linear(x.mean(axis=(1, 2)))


@dataclasses.dataclass(frozen=True)
class ResNet:
    """A residual network of basic blocks; the defaults are ResNet-18 on CIFAR."""

    num_channels: int = 3
    """Channels of the image: 1 for MNIST, 3 for CIFAR."""
    widths: tuple[int, ...] = (64, 128, 256, 512)
    """Channels of each group of blocks. The image halves between groups."""
    num_blocks: tuple[int, ...] = (2, 2, 2, 2)
    """Blocks in each group, one entry per width."""
    stem_stride: int = 1
    """Stride of the first convolution: 2 makes everything after it 4 times cheaper."""
    group_size: int = 8
    """Channels normalised together. Must divide every width."""
    num_classes: int = 10
    """Number of classes K."""

    def __post_init__(self):
        if len(self.widths) != len(self.num_blocks) or not self.widths:
            raise ValueError(
                f"`num_blocks` needs one entry for each of `widths`, got {self.num_blocks} for "
                f"{self.widths}. Give both the same length, at least 1."
            )
        for width in self.widths:
            if width < 1 or width % self.group_size:
                raise ValueError(
                    f"`widths` must be multiples of `group_size` ({self.group_size}), got {width}. "
                    "Change either."
                )
        for name in ("num_channels", "stem_stride", "num_classes"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be at least 1, got {getattr(self, name)}."
                )

    def layers(self) -> list[Callable[..., nnx.Module]]:
        """One factory per layer: the stem, each block, the head."""
        layers = [
            functools.partial(
                Stem,
                self.num_channels,
                self.widths[0],
                self.stem_stride,
                self.group_size,
            )
        ]
        num_inputs = self.widths[0]
        for group, (width, num_blocks) in enumerate(zip(self.widths, self.num_blocks)):
            for block in range(num_blocks):
                stride = 2 if group > 0 and block == 0 else 1
                layers.append(
                    functools.partial(
                        BasicBlock, num_inputs, width, stride, self.group_size
                    )
                )
                num_inputs = width
        return [*layers, functools.partial(Head, num_inputs, self.num_classes)]
