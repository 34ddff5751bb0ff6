"""VGG-16, the deep stack of 3x3 convolutions (configuration D of the paper).

Simonyan and Zisserman, ICLR 2015, arXiv:1409.1556. Images are [B, H, W, C]. Most
weights are in one layer, the first after the convolutions, and most of the computation is
in the first convolutions. So no cut into stages balances both.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
from flax import nnx

from models import checks
from models.convolution import Conv, halve
from models.losses import CrossEntropy
from models.sharding import named
from models.sublayers import dropout

# He initialisation. The paper starts from the weights of a shallower network instead.
_HE_NORMAL = nnx.initializers.he_normal()
_HIDDEN = named(_HE_NORMAL, "embed", "mlp")
_BIAS = named(nnx.initializers.zeros, "mlp")
_LOGITS = named(nnx.initializers.normal(0.01), "embed", None)


class Convolution(nnx.Module):
    """3x3 convolution, optional batch norm, ReLU, optional halving of the image."""

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        halves: bool,
        batch_norm: bool,
        *,
        rngs: nnx.Rngs,
    ):
        # Batch norm removes the mean and adds its own bias.
        self.conv = Conv(
            num_inputs,
            num_outputs,
            3,
            use_bias=not batch_norm,
            names=("embed", "mlp"),
            kernel_init=_HE_NORMAL,
            rngs=rngs,
        )
        self.normed = batch_norm
        if batch_norm:
            self.norm = nnx.BatchNorm(num_outputs, momentum=0.9, epsilon=1e-5, rngs=rngs)
        self.halves = halves

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.conv(x)
        x = nnx.relu(self.norm(x) if self.normed else x)
        return halve(x) if self.halves else x


class Hidden(nnx.Module):
    """Linear layer, ReLU and dropout; an image is flattened first."""

    def __init__(self, num_inputs: int, num_outputs: int, rate: float, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(num_inputs, num_outputs, kernel_init=_HIDDEN, bias_init=_BIAS, rngs=rngs)
        self.dropout = dropout(rate, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, ...] -> [B, num_outputs]
        x = x.reshape(x.shape[0], -1)
        if x.shape[1] != self.linear.in_features:
            raise ValueError(
                f"the convolutions leave {x.shape[1]} numbers per image, but "
                f"{self.linear.in_features} for `image_size` of the model. Set "
                "`image_size` to the side of the images, which must be square."
            )
        return self.dropout(nnx.relu(self.linear(x)))


class Output(nnx.Module):
    """Linear layer to the logits, which start near zero."""

    def __init__(self, num_inputs: int, num_classes: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(num_inputs, num_classes, kernel_init=_LOGITS, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, D] -> [B, K]
        return self.linear(x)


@dataclasses.dataclass(frozen=True)
class VGG:
    """Groups of 3x3 convolutions, then three linear layers; by default VGG-16."""

    image_size: int = 224
    """Height and width of the image. Each group halves it, rounding down."""
    num_channels: int = 3
    """Channels of the image."""
    widths: tuple[int, ...] = (64, 128, 256, 512, 512)
    """Channels of each group of convolutions."""
    num_convolutions: tuple[int, ...] = (2, 2, 3, 3, 3)
    """Convolutions in each group, one entry per width."""
    batch_norm: bool = False
    """True if batch norm follows each convolution, which the paper does not have."""
    hidden_width: int = 4096
    """Width of the two hidden linear layers."""
    dropout: float = 0.5
    """Fraction of the hidden units that is dropped in training."""
    num_classes: int = 1000
    """Number of classes K."""

    def __post_init__(self) -> None:
        checks.one_entry_each(self, "num_convolutions", of="widths")
        checks.all_at_least_one(self, "widths", "num_convolutions")
        checks.at_least_one(self, "num_channels", "hidden_width", "num_classes")
        checks.rate(self, "dropout")
        if self._size_after < 1:
            raise ValueError(
                f"`image_size` must be at least {2 ** len(self.widths)}, got {self.image_size}: "
                f"{len(self.widths)} groups halve it {len(self.widths)} times. Use larger images "
                "or fewer groups."
            )

    @property
    def _size_after(self) -> int:
        return self.image_size // 2 ** len(self.widths)

    def layers(self) -> list[Callable[..., nnx.Module]]:
        """One factory per layer: each convolution, with its pooling if there is one, and
        each of the three linear layers.
        """
        layers, num_inputs = [], self.num_channels
        for width, num_convolutions in zip(self.widths, self.num_convolutions):
            for i in range(num_convolutions):
                last = i == num_convolutions - 1
                layers.append(functools.partial(Convolution, num_inputs, width, last, self.batch_norm))
                num_inputs = width
        num_inputs *= self._size_after**2
        return [
            *layers,
            functools.partial(Hidden, num_inputs, self.hidden_width, self.dropout),
            functools.partial(Hidden, self.hidden_width, self.hidden_width, self.dropout),
            functools.partial(Output, self.hidden_width, self.num_classes),
        ]

    def loss(self) -> CrossEntropy:
        """Cross-entropy of the classes of the images."""
        return CrossEntropy()
