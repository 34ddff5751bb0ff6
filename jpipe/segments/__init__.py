"""Models as the layers of a pipeline: lists of layers, and whole models, which are cut.

    model ──traced──> equations ──narrow places──> segments ──> layers

`program.py` holds the equations, `places.py` finds where they can be cut, `layers.py` makes layers of the pieces.
"""

import abc
import contextlib
import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import linen, nnx

from jpipe.layers.as_layers import as_layer, as_layers, shared_weights
from jpipe.layers.avals import shapes_text
from jpipe.layers.layer import CallArguments, InitApply, Layer, Linen
from jpipe.segments.layers import CutError, layers_of_model, shared_parameters

Tie = Sequence[tuple[int, str]]
"""`(layer, "dotted.path")` pairs of one parameter."""


class Model(abc.ABC):
    """A model that a user gives."""

    number: int | None
    """Of layers; None if it follows from the shapes of a batch."""

    @abc.abstractmethod
    def layers(self, inputs: Any, *, like: Sequence[Layer] = (), **options: Any) -> Sequence[Layer]:
        """The layers.

        Args:
          inputs: abstract, of one microbatch.
          like: the layers for another shape, whose cut they have.
          **options: of `jpipe.segments.layers.layers_of_model`.
        """

    @abc.abstractmethod
    def ties(self, layers: Sequence[Layer]) -> Sequence[Tie]:
        """The parameters that several layers share."""

    def plain_layers(self, layers: Sequence[Layer]) -> Sequence[Layer] | None:
        """The model as one layer, which runs on batches of any size; None: `layers` do."""
        return None


class LayerList(Model):
    """A list of layers.

    Args:
      layers: each in one of the forms that `Pipeline` takes.
    """

    def __init__(self, layers: Sequence[Any]):
        self._layers, self._ties = as_layers(layers), shared_weights(layers)
        self.number = len(self._layers)

    def layers(self, inputs: Any, *, like: Sequence[Layer] = (), **options: Any) -> Sequence[Layer]:
        """See `Model`."""
        return self._layers

    def ties(self, layers: Sequence[Layer]) -> Sequence[Tie]:
        """See `Model`."""
        return self._ties

    def __str__(self) -> str:
        return f"{self.number} layers"


class WholeModel(Model):
    """A model as one module, factory or pair of functions.

    Args:
      model: an NNX module, a factory of one, a Linen module, `jpipe.Linen` or `jpipe.InitApply`.
    """

    number = None

    def __init__(self, model: Any):
        with _named_as_a_model():
            self._model = as_layer(model, 0)
        self._cut: dict[tuple, Sequence[Layer]] = {}

    def layers(self, inputs: Any, *, like: Sequence[Layer] = (), **options: Any) -> Sequence[Layer]:
        """See `Model`."""
        marks = tuple(layer.options.segment for layer in like) or None
        leaves, tree = jax.tree.flatten(inputs)
        key = tree, tuple((a.shape, a.dtype) for a in leaves), marks, tuple(map(str, options.values()))
        if key not in self._cut:
            layers = self._layers(inputs, marks, **options)
            num_stages = options.get("num_stages", 1)
            if len(layers) < num_stages:
                names = " | ".join(layer.name for layer in layers)
                where = f"only into {len(layers)} segments: {names}" if len(layers) > 1 else "at no place"
                raise ValueError(
                    f"the model ({self._model.name}) can be cut {where}, and the schedule has {num_stages} stages. "
                    "Places are between products, where no more values cross than before and after a block. Use fewer "
                    "stages, or give the model as a list of layers."
                )
            self._cut[key] = layers
        return self._cut[key]

    def _layers(self, inputs: Any, marks: Sequence | None, **options: Any) -> Sequence[Layer]:
        args = (CallArguments.of(self._model.call, inputs),)
        with _named_as_a_model():
            model = self._model.bound(args)
        try:
            return layers_of_model(model, args, marks=marks, **options)
        except CutError:
            raise
        except Exception as error:
            message = f"the model ({model.name}) cannot take {shapes_text(inputs)}: {str(error).rstrip('.')}."
            if isinstance(inputs, Mapping) and model.call is not None:
                message += f" Its arguments are {inspect.signature(model.call)}: a dict of inputs gives them by name."
            raise ValueError(message) from error

    def ties(self, layers: Sequence[Layer]) -> Sequence[Tie]:
        """See `Model`."""
        return shared_parameters(layers)

    def __str__(self) -> str:
        return f"the model {self._model.name}"

    def plain_layers(self, layers: Sequence[Layer]) -> Sequence[Layer]:
        """See `Model`."""
        model = self._model

        def train(parameters: Any, state: Any, key: jax.Array, args: tuple) -> tuple[Any, Any]:
            return model.train(parameters, state, key, (CallArguments.of(model.call, *args),))

        return [dataclasses.replace(model, train=train)]


@contextlib.contextmanager
def _named_as_a_model() -> Iterator[None]:
    """Messages about layer 0 are about the model."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace("layer 0", "the model", 1)) from error


def model_of(layers: Any) -> Model:
    """What a user gives as `layers` of `Pipeline`."""
    if isinstance(layers, nnx.Module | linen.Module | Linen | InitApply) or callable(layers):
        return WholeModel(layers)
    return LayerList(layers)
