"""Layers at the boundaries of stages that make messages smaller, and are trained with the model."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.layers.as_layers import as_layers
from jpipe.layers.layer import InitApply
from jpipe.layers.trace import trace_evaluation

Arrays = tuple[jax.ShapeDtypeStruct, ...]


@suggests
def with_boundary_layers(
    layers: Sequence[Any],
    boundaries: Sequence[int],
    make_pair: Callable[[Arrays], tuple[Any, Any]],
    inputs: Any,
) -> tuple[list[Any], list[int]]:
    """Adds a pair of layers at each boundary: the last of a stage, and the first of the next stage.

    The message between the stages is what the first of the pair returns. Both are layers as all others: they are
    trained, counted, saved and split by the same rules. Skips between other layers pass them by.

    Args:
      layers: the model as `Pipeline` takes it, a list.
      boundaries: the number of the first layer of each stage but stage 0, ascending.
      make_pair: maps the abstract arrays that the layer before a boundary returns, leaf by leaf, to two layers, such as
        `Bottleneck(16)`. It is called once a boundary, so that two boundaries share no weights.
      inputs: the inputs of a microbatch or of a minibatch, or their shapes. No number is computed.

    Returns:
      The layers and the boundaries for `Pipeline(layers, boundaries=boundaries)`.

    Raises:
      ValueError: if `layers` is a whole model, a boundary is none, or `make_pair` returns something else.

    Example:
      >>> from flax import nnx
      >>> import functools
      >>> layers = [functools.partial(nnx.Linear, 8, 8) for _ in range(4)]
      >>> inputs = jax.ShapeDtypeStruct((2, 8), jnp.float32)
      >>> layers, boundaries = with_boundary_layers(layers, [2], Bottleneck(3), inputs)
      >>> len(layers), boundaries
      (6, [3])
    """
    bounds = [0, *boundaries, len(layers) if hasattr(layers, "__len__") else 0]
    read = as_layers(layers)
    if not all(isinstance(b, int | np.integer) for b in boundaries) or bounds != sorted(set(bounds)):
        raise ValueError(
            f"`boundaries` must be the first layer of each stage but stage 0, ascending, from 1 to {len(layers) - 1}, "
            f"got {shown(list(boundaries))}."
        )
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), inputs)
    outputs = trace_evaluation(read, {"inputs": shapes}).outputs
    result, starts = list(layers[: boundaries[0]] if len(boundaries) else layers), []
    for first, end in zip(bounds[1:], bounds[2:]):
        pair = make_pair(tuple(outputs[first - 1]))
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(f"`make_pair` must return a tuple of two layers, got {shown(pair)}.")
        result += pair[:1]
        starts.append(len(result))
        result += [pair[1], *layers[first:end]]
    return result, starts


@suggests
@dataclasses.dataclass(frozen=True)
class Bottleneck:
    """Sends `width` numbers in the place of the last dim of each array: a matrix before the message, and one after it.

    Both begin with one orthonormal basis of `width` vectors, so that the pair begins as a projection: the identity on
    the vectors of the basis. All boundaries begin with the same basis, and what one lets through the next one lets
    through too. Arrays of integers, vectors, and arrays that are not wider are sent as they are.

    Attributes:
      width: numbers that are sent of each row of an array, at least 1.
      seed: draws the basis.

    Raises:
      ValueError: if `width` is not at least 1, or, at a boundary, if no array is wider.

    References:
      Ramasinghe et al., "Protocol Models: Scaling Decentralized Training with Communication-Efficient Model
      Parallelism", 2025, arXiv:2506.01260, has a subspace that all stages share; "ResBM", 2026, arXiv:2604.11947, has
      trained layers that begin near the identity.
    """

    width: int
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.width, bool) or not isinstance(self.width, int) or self.width < 1:
            raise ValueError(f"`width` must be a whole number, at least 1, got {shown(self.width)}.")

    def __call__(self, outputs: Arrays) -> tuple[InitApply, InitApply]:
        """The layers before and after a message of arrays."""
        wide = {str(i): x.shape[-1] for i, x in enumerate(outputs) if self._is_narrowed(x)}
        if not wide:
            shapes = ", ".join(f"{x.dtype.name}{list(x.shape)}" for x in outputs)
            raise ValueError(
                f"`width={self.width}` makes nothing smaller: the message has {shapes}. Take a width below the last "
                "dim."
            )

        def encoder(key: jax.Array, inputs: Any) -> dict[str, jax.Array]:
            return {name: self._basis(features) for name, features in wide.items()}

        def decoder(key: jax.Array, inputs: Any) -> dict[str, jax.Array]:
            return {name: self._basis(features).T for name, features in wide.items()}

        before, after = "Bottleneck encoder", "Bottleneck decoder"
        return InitApply(encoder, _multiplied, before), InitApply(decoder, _multiplied, after)

    def _is_narrowed(self, x: jax.ShapeDtypeStruct) -> bool:
        return jnp.issubdtype(x.dtype, jnp.floating) and len(x.shape) > 1 and x.shape[-1] > self.width

    def _basis(self, features: int) -> jax.Array:
        return jax.nn.initializers.orthogonal()(jax.random.key(self.seed), (features, self.width))


def _multiplied(matrices: dict[str, jax.Array], inputs: Any) -> Any:
    """The arrays of a message, those with a matrix multiplied by it."""
    leaves, tree = jax.tree.flatten(inputs)
    return tree.unflatten([x @ matrices[str(i)] if str(i) in matrices else x for i, x in enumerate(leaves)])
