"""The split of the layers of a pipeline inside of a stage: the form that a strategy has for the core."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jax.sharding import Mesh

from jpipe.layers.layer import Layer
from jpipe.layers.loss import Loss


class LayerSplit(Protocol):
    """The split of a layer over the automatic axes of a mesh. Its `repr` tells it from other splits."""

    @property
    def parameter_specs(self) -> tuple[tuple, ...]:
        """For each parameter, the axis of each dim: a name, several names or None."""

    def applied(self, run: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
        """The function of the layer with constraints over the mesh of the automatic axes."""


@runtime_checkable
class Strategy(Protocol):
    """The type of `Pipeline(strategy=)`. Two equal strategies split every model alike."""

    def split_layers(
        self,
        layers: Sequence[Layer],
        loss: Loss,
        microbatch: Any,
        sizes: Mapping[str, int],
        *,
        compute_dtype: Any,
        key_impl: Any,
    ) -> Sequence[LayerSplit]:
        """Splits layers over the automatic axes of a mesh.

        Args:
          layers: the layers of the pipeline, not yet bound to shapes.
          loss: the loss of the pipeline.
          microbatch: abstract arrays, as each replica gets them.
          sizes: axis -> number of devices.
          compute_dtype: weights and activations are cast to it; None: they are not.
          key_impl: implementation of the random keys.

        Raises:
          ValueError: if the strategy cannot split these layers over these axes.
        """
