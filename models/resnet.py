"""Residual networks (He et al., CVPR 2016, arXiv:1512.03385) for images [B, H, W, C].

Basic blocks (ResNet-18 and 34) or bottlenecks (50, 101 and 152), after the stem for CIFAR (one 3x3
convolution, no pooling) or the stem for ImageNet. The paper uses batch norm, which mixes
the examples of a microbatch, so the result depends on the number of microbatches. Group
norm (Wu and He, ECCV 2018, arXiv:1803.08494) does not mix examples.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
from flax import nnx

from models import checks
from models.convolution import Conv
from models.losses import CrossEntropy
from models.sharding import named

# He initialisation over the fan out. The last scale of every residual branch is zero, so
# that each block starts as the identity and depth does not change the scale. Logits start
# near zero (Goyal et al., 2017, arXiv:1706.02677, section 5.1).
_KERNEL = nnx.initializers.variance_scaling(2.0, "fan_out", "truncated_normal")
_LOGITS = named(nnx.initializers.normal(0.01), "embed", None)
_ZEROS = nnx.initializers.zeros
_ONES = nnx.initializers.ones


def _norm(
    width: int,
    group_size: int | None,
    rngs: nnx.Rngs,
    scale_init: nnx.Initializer = _ONES,
) -> nnx.Module:
    if group_size is None:
        return nnx.BatchNorm(width, momentum=0.9, epsilon=1e-5, scale_init=scale_init, rngs=rngs)
    return nnx.GroupNorm(width, num_groups=None, group_size=group_size, scale_init=scale_init, rngs=rngs)


class Stem(nnx.Module):
    """3x3 convolution, norm and ReLU: channels to the first width."""

    def __init__(
        self,
        num_channels: int,
        width: int,
        stride: int,
        group_size: int | None,  # here and below: None is batch norm
        *,
        rngs: nnx.Rngs,
    ):
        self.conv = Conv(num_channels, width, 3, stride=stride, kernel_init=_KERNEL, rngs=rngs)
        self.norm = _norm(width, group_size, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.relu(self.norm(self.conv(x)))


class ImageNetStem(nnx.Module):
    """7x7 convolution, norm, ReLU and 3x3 max pooling; divides the image's sides by 4."""

    def __init__(self, num_channels: int, width: int, group_size: int | None, *, rngs: nnx.Rngs):
        self.conv = Conv(num_channels, width, 7, stride=2, kernel_init=_KERNEL, rngs=rngs)
        self.norm = _norm(width, group_size, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.conv(x)))
        return nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")


class _Block(nnx.Module):
    """The shortcut of both kinds of blocks: a projection where the shape changes."""

    def _make_shortcut(
        self,
        num_inputs: int,
        num_outputs: int,
        stride: int,
        group_size: int | None,
        rngs: nnx.Rngs,
    ) -> None:
        self.projects = stride != 1 or num_inputs != num_outputs
        if self.projects:
            self.projection = Conv(
                num_inputs,
                num_outputs,
                1,
                stride=stride,
                kernel_init=_KERNEL,
                rngs=rngs,
            )
            self.projection_norm = _norm(num_outputs, group_size, rngs)

    def _shortcut(self, x: jax.Array) -> jax.Array:
        return self.projection_norm(self.projection(x)) if self.projects else x


class BasicBlock(_Block):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(
        self,
        num_inputs: int,
        width: int,
        stride: int,
        group_size: int | None,
        *,
        rngs: nnx.Rngs,
    ):
        conv = functools.partial(Conv, kernel_init=_KERNEL, rngs=rngs)
        self.conv1 = conv(num_inputs, width, 3, stride=stride, names=("embed", "mlp"))
        self.norm1 = _norm(width, group_size, rngs)
        self.conv2 = conv(width, width, 3, names=("mlp", "embed"))
        self.norm2 = _norm(width, group_size, rngs, scale_init=_ZEROS)
        self._make_shortcut(num_inputs, width, stride, group_size, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        shortcut = self._shortcut(x)
        x = nnx.relu(self.norm1(self.conv1(x)))
        return nnx.relu(self.norm2(self.conv2(x)) + shortcut)


class BottleneckBlock(_Block):
    """A 3x3 convolution between two 1x1 convolutions, and a shortcut.

    The last convolution has 4 times the channels. The 3x3 convolution has the stride, as in
    torchvision's v1.5. In the paper the first 1x1 convolution has it, which ignores three
    quarters of its input.
    """

    expansion = 4

    def __init__(
        self,
        num_inputs: int,
        width: int,
        stride: int,
        group_size: int | None,
        *,
        rngs: nnx.Rngs,
    ):
        conv = functools.partial(Conv, kernel_init=_KERNEL, rngs=rngs)
        num_outputs = self.expansion * width
        self.conv1 = conv(num_inputs, width, 1)
        self.norm1 = _norm(width, group_size, rngs)
        self.conv2 = conv(width, width, 3, stride=stride, names=("embed", "mlp"))
        self.norm2 = _norm(width, group_size, rngs)
        self.conv3 = conv(width, num_outputs, 1, names=("mlp", "embed"))
        self.norm3 = _norm(num_outputs, group_size, rngs, scale_init=_ZEROS)
        self._make_shortcut(num_inputs, num_outputs, stride, group_size, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        shortcut = self._shortcut(x)
        x = nnx.relu(self.norm1(self.conv1(x)))
        x = nnx.relu(self.norm2(self.conv2(x)))
        return nnx.relu(self.norm3(self.conv3(x)) + shortcut)


class ConvPart(nnx.Module):
    """One convolution as a layer of its own, for `fine_grained`.

    Between the parts of a block a dict passes on: `main` is the branch of the convolutions, and
    `shortcut` is what the last part adds to it. The first part of a block gets an array.
    """

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        size: int,
        stride: int,
        names: tuple[str | None, str | None],
        role: Literal["stem", "projection", "first", "inner"],
        *,
        rngs: nnx.Rngs,
    ):
        self.conv = Conv(
            num_inputs,
            num_outputs,
            size,
            stride=stride,
            names=names,
            kernel_init=_KERNEL,
            rngs=rngs,
        )
        self.role = role

    def __call__(self, x: Any) -> Any:
        if self.role == "stem":
            return self.conv(x)
        if self.role == "projection":
            return {"main": x, "shortcut": self.conv(x)}
        if self.role == "first":
            return {"main": self.conv(x), "shortcut": x}
        return x | {"main": self.conv(x["main"])}


class NormPart(nnx.Module):
    """One norm as a layer of its own, with the ReLU, pooling or sum behind it; see `ConvPart`."""

    def __init__(
        self,
        width: int,
        group_size: int | None,
        role: Literal["stem", "imagenet", "projection", "inner", "last"],
        *,
        rngs: nnx.Rngs,
    ):
        scale_init = _ZEROS if role == "last" else _ONES
        self.norm = _norm(width, group_size, rngs, scale_init)
        self.role = role

    def __call__(self, x: Any) -> Any:
        if self.role == "stem":
            return nnx.relu(self.norm(x))
        if self.role == "imagenet":
            x = nnx.relu(self.norm(x))
            return nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        if self.role == "projection":
            return x | {"shortcut": self.norm(x["shortcut"])}
        if self.role == "last":
            return nnx.relu(self.norm(x["main"]) + x["shortcut"])
        return x | {"main": nnx.relu(self.norm(x["main"]))}


class Head(nnx.Module):
    """Mean over the image, then the logits."""

    def __init__(self, width: int, num_classes: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(width, num_classes, kernel_init=_LOGITS, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, H, W, C] -> [B, K]
        return self.linear(x.mean(axis=(1, 2)))


@dataclasses.dataclass(frozen=True)
class ResNet:
    """A residual network; the defaults are ResNet-18 on CIFAR, with group norm.

    `ResNet.of_depth(50)` is the network of the paper, for ImageNet.
    """

    num_channels: int = 3
    """Channels of the image: 1 for MNIST, 3 for CIFAR."""
    widths: tuple[int, ...] = (64, 128, 256, 512)
    """Channels of each group of blocks; bottlenecks return 4 times as many. The image is
    halved between groups."""
    num_blocks: tuple[int, ...] = (2, 2, 2, 2)
    """Number of blocks in each group, one entry per width."""
    block: Literal["basic", "bottleneck"] = "basic"
    """"basic": two 3x3 convolutions; "bottleneck": a 3x3 between two 1x1."""
    stem: Literal["small", "imagenet"] = "small"
    """"small": one 3x3 convolution; "imagenet": a 7x7 convolution and a 3x3 max pooling,
    both of stride 2."""
    stem_stride: int = 1
    """Stride of the small stem: 2 makes all later layers 4 times cheaper."""
    norm: Literal["group", "batch"] = "group"
    """"group": over groups of channels of an example; "batch": over the examples of a
    microbatch."""
    group_size: int = 8
    """Channels per group of group norm. Must divide every width."""
    num_classes: int = 10
    """Number of classes K."""
    fine_grained: bool = False
    """True if every convolution, every norm and the head is a layer of its own, so that a
    pipeline can have a stage for each: ResNet-50 then has 107 layers. The results are the
    same."""

    def __post_init__(self) -> None:
        checks.one_entry_each(self, "num_blocks", of="widths")
        checks.one_of(self, "block", "stem", "norm")
        checks.at_least_one(self, "num_channels", "stem_stride", "group_size", "num_classes")
        checks.all_at_least_one(self, "num_blocks", "widths")
        for width in self.widths:
            if self.norm == "group" and width % self.group_size:
                raise ValueError(
                    f"`widths` must be multiples of `group_size` ({self.group_size}), got {width}. Change either."
                )
        if self.stem == "imagenet" and self.stem_stride != 1:
            raise ValueError(
                f"`stem_stride` is for the small stem, got {self.stem_stride} with "
                'stem="imagenet", whose strides are fixed. Leave it at 1.'
            )

    @classmethod
    def of_depth(cls, depth: int, **fields: Any) -> "ResNet":
        """ResNet-18, 34, 50, 101 or 152 as in the paper: batch norm, 1000 classes of ImageNet.

        Convolutions and pooling of stride 2 use XLA's "SAME" padding: for an image of even
        size, one pixel further right and down than in torchvision.

        Args:
          depth: 18, 34, 50, 101 or 152.
          **fields: values of other fields, such as `stem="small"`.

        Raises:
          ValueError: for any other depth.
        """
        known = {
            18: ("basic", (2, 2, 2, 2)),
            34: ("basic", (3, 4, 6, 3)),
            50: ("bottleneck", (3, 4, 6, 3)),
            101: ("bottleneck", (3, 4, 23, 3)),
            152: ("bottleneck", (3, 8, 36, 3)),
        }
        if depth not in known:
            raise ValueError(
                f"`depth` must be 18, 34, 50, 101 or 152, got {depth}. For another depth, set "
                "`block` and `num_blocks` of `ResNet`."
            )
        block, num_blocks = known[depth]
        paper = {"stem": "imagenet", "norm": "batch", "num_classes": 1000}
        return cls(**{"block": block, "num_blocks": num_blocks} | paper | fields)

    def layers(self) -> list[Callable[..., nnx.Module]]:
        """One factory per layer: the stem, each block, the head.

        With `fine_grained` one for each convolution, each norm and the head, in the order in which
        they run. The projection of a block comes before its other convolutions.
        """
        group_size = self.group_size if self.norm == "group" else None
        block = {"basic": BasicBlock, "bottleneck": BottleneckBlock}[self.block]
        head = functools.partial(Head, block.expansion * self.widths[-1], self.num_classes)
        if self.fine_grained:
            return [*self._stem_parts(group_size), *self._block_parts(group_size), head]
        if self.stem == "small":
            stem = functools.partial(Stem, self.num_channels, self.widths[0], self.stem_stride, group_size)
        else:
            stem = functools.partial(ImageNetStem, self.num_channels, self.widths[0], group_size)
        layers = [stem]
        for sizes in self._sizes_of_blocks(block.expansion):
            layers.append(functools.partial(block, *sizes, group_size))
        return [*layers, head]

    def _sizes_of_blocks(self, expansion: int) -> Iterator[tuple[int, int, int]]:
        """Input channels, width and stride of each block."""
        num_inputs = self.widths[0]
        for group, (width, num_blocks) in enumerate(zip(self.widths, self.num_blocks)):
            for i in range(num_blocks):
                yield num_inputs, width, 2 if group > 0 and i == 0 else 1
                num_inputs = expansion * width

    def _stem_parts(self, group_size: int | None) -> list[Callable[..., nnx.Module]]:
        """The stem's convolution and norm."""
        small = self.stem == "small"
        size, stride = (3, self.stem_stride) if small else (7, 2)
        sizes = (self.num_channels, self.widths[0], size, stride, ("embed", None))
        return [
            functools.partial(ConvPart, *sizes, "stem"),
            functools.partial(NormPart, self.widths[0], group_size, "stem" if small else "imagenet"),
        ]

    def _block_parts(self, group_size: int | None) -> list[Callable[..., nnx.Module]]:
        """The convolutions and norms of all blocks."""
        parts: list[Callable[..., nnx.Module]] = []

        def add(sizes: tuple, names: tuple, conv_role: str, norm_role: str) -> None:
            parts.append(functools.partial(ConvPart, *sizes, names, conv_role))
            parts.append(functools.partial(NormPart, sizes[1], group_size, norm_role))

        expansion = 1 if self.block == "basic" else 4
        outer, wide, narrow = ("embed", None), ("embed", "mlp"), ("mlp", "embed")
        for num_inputs, width, stride in self._sizes_of_blocks(expansion):
            num_outputs = expansion * width
            first = "first"
            if stride != 1 or num_inputs != num_outputs:
                sizes = (num_inputs, num_outputs, 1, stride)
                add(sizes, outer, "projection", "projection")
                first = "inner"
            if self.block == "basic":
                add((num_inputs, width, 3, stride), wide, first, "inner")
                add((width, width, 3, 1), narrow, "inner", "last")
            else:
                add((num_inputs, width, 1, 1), outer, first, "inner")
                add((width, width, 3, stride), wide, "inner", "inner")
                add((width, num_outputs, 1, 1), narrow, "inner", "last")
        return parts

    def loss(self) -> CrossEntropy:
        """Cross-entropy of the classes of the images."""
        return CrossEntropy()
