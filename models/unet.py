"""A U-Net: it classifies every pixel of an image.

Ronneberger et al., MICCAI 2015, arXiv:1505.04597: pairs of 3x3 convolutions with ReLU;
2x2 max pooling on the way down, 2x2 up-convolutions on the way up; twice the channels at
each level; He initialisation. Differences from the paper: convolutions are zero padded,
so that skip connections need no cropping; the default size is smaller; there is no
dropout. Images are [B, H, W, C].

    Down 0 ────────────── level0 ──────────────> Up 0, Head
      Down 1 ──────────── level1 ────────────> Up 1
        Down 2 ────────── level2 ──────────> Up 2
                          Bottom
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from models import checks
from models.convolution import Conv, halve
from models.losses import Segmentation
from models.sharding import named

_HE_NORMAL = nnx.initializers.he_normal()
# Each output of an up-convolution sees one pixel: the fan in is without the window.
_UP_KERNEL = named(nnx.initializers.he_normal(batch_axis=(0, 1)), None, None, "embed", None)
_LOGITS = named(nnx.initializers.normal(0.01), "embed", None)


class Bottom(nnx.Module):
    """Two 3x3 convolutions with ReLU."""

    def __init__(self, num_inputs: int, num_outputs: int, *, rngs: nnx.Rngs):
        conv = functools.partial(Conv, size=3, use_bias=True, kernel_init=_HE_NORMAL, rngs=rngs)
        self.conv1 = conv(num_inputs, num_outputs, names=("embed", "mlp"))
        self.conv2 = conv(num_outputs, num_outputs, names=("mlp", "embed"))

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.relu(self.conv2(nnx.relu(self.conv1(x))))


class Down(nnx.Module):
    """Two convolutions; returns their result halved, and whole for the skip connection."""

    def __init__(self, num_inputs: int, num_outputs: int, *, rngs: nnx.Rngs):
        self.convs = Bottom(num_inputs, num_outputs, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        # [B, H, W, I] -> [B, H / 2, W / 2, O], [B, H, W, O]
        height, width = x.shape[1:3]
        if height % 2 or width % 2:
            raise ValueError(
                f"an image of {height}x{width} cannot be halved. Use images whose sides are "
                "multiples of 2 ** `num_levels`, or fewer levels."
            )
        kept = self.convs(x)
        return halve(kept), kept


class UpConvolution(nnx.Module):
    """Transposed 2x2 convolution of stride 2: each pixel becomes four.

    The windows do not overlap, so one matrix product computes all pixels.
    """

    def __init__(self, num_inputs: int, num_outputs: int, *, rngs: nnx.Rngs):
        shape = (2, 2, num_inputs, num_outputs)
        self.kernel = nnx.Param(_UP_KERNEL(rngs.params(), shape, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(num_outputs, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, H, W, I] -> [B, 2 H, 2 W, O]
        batch, height, width, _ = x.shape
        y = jnp.einsum("bhwi,uvio->bhuwvo", x, self.kernel[...])
        y = y.reshape(batch, 2 * height, 2 * width, -1)
        return y + self.bias[None, None, None]


class Up(nnx.Module):
    """Up-convolution, concatenation with the skip connection, two convolutions."""

    def __init__(self, num_inputs: int, num_outputs: int, *, rngs: nnx.Rngs):
        self.up = UpConvolution(num_inputs, num_outputs, rngs=rngs)
        self.convs = Bottom(2 * num_outputs, num_outputs, rngs=rngs)

    def __call__(self, x: jax.Array, kept: jax.Array) -> jax.Array:
        # [B, H, W, I], [B, 2 H, 2 W, O] -> [B, 2 H, 2 W, O]
        return self.convs(jnp.concatenate([kept, self.up(x)], axis=-1))


class Head(nnx.Module):
    """1x1 convolution to the logits of each pixel."""

    def __init__(self, width: int, num_classes: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(width, num_classes, kernel_init=_LOGITS, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, H, W, C] -> [B, H, W, K]
        return self.linear(x)


@dataclasses.dataclass(frozen=True)
class UNet:
    """A U-Net of `2 * num_levels + 2` layers; the paper's has width 64 and 4 levels."""

    num_channels: int = 1
    """Channels of the image."""
    width: int = 16
    """Channels of the first level, doubled at each one below."""
    num_levels: int = 3
    """Number of times that the image is halved. Its sides must be multiples of
    2 ** `num_levels`."""
    num_classes: int = 2
    """Number of classes K of a pixel."""

    def __post_init__(self) -> None:
        checks.at_least_one(self, "num_channels", "width", "num_levels", "num_classes")

    def parts(self) -> list[tuple[Callable[..., nnx.Module], dict[str, str]]]:
        """One factory per layer, with the names of its skip connections.

        A layer with `{"stash": name}` returns its output and an array that is kept under
        the name. A layer with `{"pop": name}` takes its input and the array of that name.
        """
        widths = [self.width * 2**level for level in range(self.num_levels + 1)]
        levels = range(self.num_levels)
        inputs = [self.num_channels, *widths]
        down = [(functools.partial(Down, inputs[i], widths[i]), {"stash": f"level{i}"}) for i in levels]
        up = [(functools.partial(Up, widths[i + 1], widths[i]), {"pop": f"level{i}"}) for i in reversed(levels)]
        bottom = functools.partial(Bottom, *widths[-2:])
        head = functools.partial(Head, self.width, self.num_classes)
        return [*down, (bottom, {}), *up, (head, {})]

    def layers(self) -> list:
        """One factory per layer, in a `jpipe.skip` where `parts` names a connection."""
        import jpipe  # only here: the other models do not need it

        return [jpipe.skip(factory, **names) if names else factory for factory, names in self.parts()]

    def loss(self) -> Segmentation:
        """Cross-entropy of the classes of the pixels."""
        return Segmentation()
