"""AlexNet, five convolutions and three linear layers (Krizhevsky et al., NeurIPS 2012).

The variant of torchvision, on one device (Krizhevsky, 2014, arXiv:1404.5997): 64 channels in
the first convolution, no groups of channels and no local response normalisation. Images are
[B, H, W, C]. Zero padding of the first convolution makes its image 56 pixels wide instead of
torchvision's 55. The poolings end at the same 6 pixels, so the weights have the same
shapes.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
from flax import nnx

from models import checks
from models.convolution import Conv
from models.losses import CrossEntropy
from models.vgg import Hidden, Output

_HE_NORMAL = nnx.initializers.he_normal()


class Convolution(nnx.Module):
    """Convolution with bias, ReLU, optional max pooling of 3x3 windows with stride 2."""

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        size: int,
        stride: int,
        pools: bool,
        *,
        rngs: nnx.Rngs,
    ):
        self.conv = Conv(
            num_inputs,
            num_outputs,
            size,
            stride=stride,
            use_bias=True,
            names=("embed", "mlp"),
            kernel_init=_HE_NORMAL,
            rngs=rngs,
        )
        self.pools = pools

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.conv(x))
        return nnx.max_pool(x, (3, 3), strides=(2, 2)) if self.pools else x


@dataclasses.dataclass(frozen=True)
class AlexNet:
    """Five convolutions and three linear layers; the defaults are for ImageNet."""

    image_size: int = 224
    """Height and width of the image."""
    num_channels: int = 3
    """Channels of the image."""
    widths: tuple[int, int, int, int, int] = (64, 192, 384, 256, 256)
    """Channels of each convolution. Poolings follow the first, the second and the last."""
    stem_size: int = 11
    """Height and width of the windows of the first convolution."""
    stem_stride: int = 4
    """Stride of the first convolution; 1 for small images."""
    hidden_width: int = 4096
    """Width of the two hidden linear layers."""
    dropout: float = 0.5
    """Fraction of the hidden units that is dropped in training."""
    num_classes: int = 1000
    """Number of classes K."""

    def __post_init__(self) -> None:
        checks.all_at_least_one(self, "widths")
        checks.at_least_one(
            self,
            "num_channels",
            "stem_size",
            "stem_stride",
            "hidden_width",
            "num_classes",
        )
        checks.rate(self, "dropout")
        if self._size_after < 1:
            raise ValueError(
                f"`image_size` must be above {14 * self.stem_stride}, got "
                f"{self.image_size}: the first convolution divides it by {self.stem_stride}, "
                "and three poolings take 3 of 7 pixels each. Use larger images or a smaller "
                "`stem_stride`."
            )

    @property
    def _size_after(self) -> int:
        size = -(-self.image_size // self.stem_stride)
        for _ in range(3):
            size = (size - 1) // 2
        return size

    def layers(self) -> list[Callable[..., nnx.Module]]:
        """One factory per layer: each convolution with its pooling, each linear layer."""
        sizes = (self.stem_size, 5, 3, 3, 3)
        inputs = (self.num_channels, *self.widths)
        convolutions = [
            functools.partial(
                Convolution,
                inputs[i],
                width,
                sizes[i],
                self.stem_stride if i == 0 else 1,
                i in (0, 1, 4),
            )
            for i, width in enumerate(self.widths)
        ]
        num_inputs = self.widths[-1] * self._size_after**2
        return [
            *convolutions,
            functools.partial(Hidden, num_inputs, self.hidden_width, self.dropout),
            functools.partial(Hidden, self.hidden_width, self.hidden_width, self.dropout),
            functools.partial(Output, self.hidden_width, self.num_classes),
        ]

    def loss(self) -> CrossEntropy:
        """Cross-entropy of the classes of the images."""
        return CrossEntropy()
