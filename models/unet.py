"""A U-Net: an image in, the classes of its pixels out.

Ronneberger et al., MICCAI 2015, arXiv:1505.04597: 3x3 convolutions with ReLU, in pairs;
2x2 max pooling down, 2x2 up-convolutions back; twice the channels at each level; He
initialisation. It departs from the paper in that convolutions are zero padded, so that
what is kept on the way down fits what comes up without cropping, in its smaller
default size, and in having no dropout. Images are [B, H, W, C].

    Down 0 ────────────── level0 ──────────────> Up 0, Head
      Down 1 ──────────── level1 ────────────> Up 1
        Down 2 ────────── level2 ──────────> Up 2
                          Bottom
"""

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx

from models import checks
from models.convolution import Conv, halve
from models.losses import Segmentation

_HE_NORMAL = nnx.initializers.he_normal()
# Each output of an up-convolution sees one pixel: the fan in is without the window.
_UP_KERNEL = nnx.initializers.he_normal(batch_axis=(0, 1))
_LOGITS = nnx.initializers.normal(0.01)


class Bottom(nnx.Module):
    """Two 3x3 convolutions with ReLU."""

    def __init__(self, num_inputs: int, num_outputs: int, *, rngs: nnx.Rngs):
        conv = functools.partial(
            Conv, size=3, use_bias=True, kernel_init=_HE_NORMAL, rngs=rngs
        )
        self.conv1 = conv(num_inputs, num_outputs)
        self.conv2 = conv(num_outputs, num_outputs)

    def __call__(self, x):
        return nnx.relu(self.conv2(nnx.relu(self.conv1(x))))


class Down(nnx.Module):
    """Two convolutions; their result is kept for the way up, and halved for the way down."""

    def __init__(self, num_inputs: int, num_outputs: int, *, rngs: nnx.Rngs):
        self.convs = Bottom(num_inputs, num_outputs, rngs=rngs)

    def __call__(self, x):  # [B, H, W, I] -> [B, H / 2, W / 2, O], [B, H, W, O]
        height, width = x.shape[1:3]
        if height % 2 or width % 2:
            raise ValueError(
                f"an image of {height}x{width} cannot be halved. Use images whose sides are "
                "multiples of 2 ** `num_levels`, or fewer levels."
            )
        kept = self.convs(x)
        return halve(kept), kept


class UpConvolution(nnx.Module):
    """2x2 convolution transposed, of stride 2: each pixel becomes four.

    The windows do not overlap, so it is one product, and the pixels put in their places.
    """

    def __init__(self, num_inputs: int, num_outputs: int, *, rngs: nnx.Rngs):
        shape = (2, 2, num_inputs, num_outputs)
        self.kernel = nnx.Param(_UP_KERNEL(rngs.params(), shape, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(num_outputs, jnp.float32))

    def __call__(self, x):  # [B, H, W, I] -> [B, 2 H, 2 W, O]
        batch, height, width, _ = x.shape
        y = jnp.einsum("bhwi,uvio->bhuwvo", x, self.kernel[...])
        y = y.reshape(batch, 2 * height, 2 * width, -1)
        return y + self.bias[None, None, None]


class Up(nnx.Module):
    """Up-convolution, beside it what was kept on the way down, then two convolutions."""

    def __init__(self, num_inputs: int, num_outputs: int, *, rngs: nnx.Rngs):
        self.up = UpConvolution(num_inputs, num_outputs, rngs=rngs)
        self.convs = Bottom(2 * num_outputs, num_outputs, rngs=rngs)

    def __call__(self, x, kept):  # [B, H, W, I], [B, 2 H, 2 W, O] -> [B, 2 H, 2 W, O]
        return self.convs(jnp.concatenate([kept, self.up(x)], axis=-1))


class Head(nnx.Module):
    """1x1 convolution to the logits of each pixel."""

    def __init__(self, width: int, num_classes: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(width, num_classes, kernel_init=_LOGITS, rngs=rngs)

    def __call__(self, x):  # [B, H, W, C] -> [B, H, W, K]
        return self.linear(x)


@dataclasses.dataclass(frozen=True)
class UNet:
    """A U-Net of `2 * num_levels + 2` layers; the paper's has width 64 and 4 levels."""

    num_channels: int = 1
    """Channels of the image."""
    width: int = 16
    """Channels of the first level, doubled at each one below."""
    num_levels: int = 3
    """How many times the image is halved: its sides must be multiples of 2 to this."""
    num_classes: int = 2
    """Number of classes K of a pixel."""

    def __post_init__(self):
        checks.at_least_one(self, "num_channels", "width", "num_levels", "num_classes")

    def parts(self) -> list[tuple[Callable[..., nnx.Module], dict[str, str]]]:
        """A factory for each layer, and the names of what it stashes or pops.

        With `{"stash": name}` the layer returns its output and what is kept under that
        name; with `{"pop": name}` it takes its input and what was kept.
        """
        widths = [self.width * 2**level for level in range(self.num_levels + 1)]
        levels = range(self.num_levels)
        inputs = [self.num_channels, *widths]
        down = [
            (functools.partial(Down, inputs[i], widths[i]), {"stash": f"level{i}"})
            for i in levels
        ]
        up = [
            (functools.partial(Up, widths[i + 1], widths[i]), {"pop": f"level{i}"})
            for i in reversed(levels)
        ]
        bottom = functools.partial(Bottom, *widths[-2:])
        head = functools.partial(Head, self.width, self.num_classes)
        return [*down, (bottom, {}), *up, (head, {})]

    def layers(self) -> list:
        """One entry per layer: a factory, or a `jpipe.skip` of one, as `parts` says."""
        import jpipe  # here alone: the other models do without

        return [
            jpipe.skip(factory, **names) if names else factory
            for factory, names in self.parts()
        ]

    def loss(self) -> Segmentation:
        """Cross-entropy of the classes of the pixels."""
        return Segmentation()
