"""A multilayer perceptron: the smallest model worth a pipeline."""

import dataclasses
import functools
from collections.abc import Callable

import jax
from flax import nnx

from models import checks
from models.losses import CrossEntropy
from models.sharding import named

# Equal layers must hold the same function, so each initializer is made once.
_HE_NORMAL = named(nnx.initializers.he_normal(), "embed", "mlp")
_BIAS = named(nnx.initializers.zeros, "mlp")
_LOGITS = named(nnx.initializers.normal(0.01), "embed", None)


class Hidden(nnx.Module):
    """Linear layer and ReLU; an image is flattened first.

    He initialisation keeps the variance through any number of ReLU layers
    (He et al., ICCV 2015, arXiv:1502.01852).
    """

    def __init__(self, num_inputs: int, num_outputs: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(num_inputs, num_outputs, kernel_init=_HE_NORMAL, bias_init=_BIAS, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, ...] -> [B, num_outputs]
        return nnx.relu(self.linear(x.reshape(x.shape[0], -1)))


class Output(nnx.Module):
    """Linear layer to the logits, which start near zero."""

    def __init__(self, num_inputs: int, num_outputs: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(num_inputs, num_outputs, kernel_init=_LOGITS, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, D] -> [B, K]
        return self.linear(x.reshape(x.shape[0], -1))


@dataclasses.dataclass(frozen=True)
class MLP:
    """A multilayer perceptron with ReLU, `len(widths) + 1` layers."""

    num_inputs: int = 784
    """Number of values in one example: 28 * 28 for MNIST."""
    widths: tuple[int, ...] = (256, 256, 256, 256, 256, 256, 256)
    """Width of each hidden layer. Neighbours of equal width are structurally equal."""
    num_outputs: int = 10
    """Number of classes K."""

    def __post_init__(self) -> None:
        checks.at_least_one(self, "num_inputs", "num_outputs")
        checks.all_at_least_one(self, "widths")

    def layers(self) -> list[Callable[..., nnx.Module]]:
        """One factory per layer, the logits last."""
        sizes = (self.num_inputs, *self.widths)
        hidden = [
            functools.partial(Hidden, num_inputs, num_outputs) for num_inputs, num_outputs in zip(sizes[:-1], sizes[1:])
        ]
        return [*hidden, functools.partial(Output, sizes[-1], self.num_outputs)]

    def loss(self) -> CrossEntropy:
        """Cross-entropy of the classes of the examples."""
        return CrossEntropy()
