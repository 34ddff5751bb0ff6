"""Models as the layers of a pipeline: lists of layers, and whole models, which are cut.

    model ──traced──> equations ──narrow places──> segments ──> layers

`program.py` holds the equations, `places.py` finds where they can be cut, `layers.py` makes layers of the pieces.
"""

import abc
import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import linen, nnx

from jpipe.layers.as_layers import as_layer, as_layers, shared_weights
from jpipe.layers.avals import shapes_key
from jpipe.layers.call_arguments import CallSignature, arguments_text
from jpipe.layers.layer import NNX, InitApply, Layer, Linen
from jpipe.layers.loss import Loss
from jpipe.layers.mesh_free import on_mesh
from jpipe.layers.model_tree import joined, whole
from jpipe.layers.plain_loss import plain_loss
from jpipe.segments.forced import ForcedPlaces
from jpipe.segments.layers import layers_of_model, shared_parameters, steps_of_model
from jpipe.segments.model_loss import ModelLoss
from jpipe.segments.placement import Placement, StepGraph
from jpipe.segments.places import CutError
from jpipe.segments.trace import Tracing

Tie = Sequence[tuple[int, str]]
"""`(layer, "dotted.path")` pairs of one parameter."""


class Model(abc.ABC):
    """A model that a user gives."""

    number: int | None
    """Of layers; None if it follows from the shapes of a batch."""
    placement: Placement | None = None
    """The stages of the steps of a whole model, where a solver has placed them."""

    @abc.abstractmethod
    def layers(self, batch: Any, tracing: Tracing, *, num_stages: int, like: Sequence[Layer] = ()) -> Sequence[Layer]:
        """The layers.

        Args:
          batch: an abstract microbatch, of `Model.batch`.
          tracing: how a whole model is traced.
          num_stages: S.
          like: the layers for another shape, whose cut they have.
        """

    @abc.abstractmethod
    def ties(self, layers: Sequence[Layer]) -> Sequence[Tie]:
        """The parameters that several layers share."""

    def boundaries(self, boundaries: Any, layers: Sequence[Layer], num_stages: int) -> Any:
        """The `boundaries` of a pipeline as numbers of layers, as far as they are named."""
        return boundaries

    def batch(self, batch: Any) -> Any:
        """A user's batch with what the first layer takes as its entry "inputs"."""
        return batch

    def loss(self, loss: Any, has_aux: bool) -> Loss:
        """The loss of the last layer's outputs."""
        return Loss.of(loss, has_aux)

    def plain_loss(
        self, layers: Sequence[Layer], loss: Loss, ties: Sequence, state: Sequence, key: jax.Array
    ) -> Callable[[Any, Any], jax.Array]:
        """`(params, batch) -> loss` on one device, see `jpipe.layers.plain_loss`."""
        return plain_loss(layers, loss, ties, state, key)


class LayerList(Model):
    """A list of layers.

    Args:
      layers: each in one of the forms that `Pipeline` takes.
    """

    def __init__(self, layers: Sequence[Any]):
        self._layers, self._ties = as_layers(layers), shared_weights(layers)
        self.number = len(self._layers)

    def layers(self, batch: Any, tracing: Tracing, *, num_stages: int, like: Sequence[Layer] = ()) -> Sequence[Layer]:
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
      model: an NNX module, a factory of one, a Linen module, `jpipe.NNX`, `jpipe.Linen` or `jpipe.InitApply`.
      returns_loss: whether it returns its loss.
      modules: paths of modules with which stages begin.
    """

    number = None

    def __init__(self, model: Any, *, returns_loss: bool, modules: Sequence[str]):
        with _named_as_a_model():
            self._model = as_layer(model, 0)
        self._signature = CallSignature(self._model.call, self._model.name, returns_loss)
        self._forced: ForcedPlaces | Placement = ForcedPlaces(modules)
        self._loss: ModelLoss | None = None
        self._cut: dict[tuple, Sequence[Layer]] = {}

    def placed(self, placement: Placement) -> "WholeModel":
        """The model, cut at the ends of the groups of a placement."""
        model = copy.copy(self)
        model._forced = model.placement = placement
        model._cut = {}
        return model

    def steps(self, batch: Any, tracing: Tracing) -> StepGraph:
        """The steps that a solver can place, for an abstract microbatch."""
        args = (batch["inputs"],)
        with self._explained(args):
            return steps_of_model(self._bound(args, tracing), args, tracing, self._loss)

    def boundaries(self, boundaries: Any, layers: Sequence[Layer], num_stages: int) -> Any:
        """See `Model`."""
        return self._forced.boundaries(boundaries, layers, num_stages)

    def batch(self, batch: Any) -> Any:
        """See `Model`."""
        return self._signature.with_arguments(batch)

    def layers(self, batch: Any, tracing: Tracing, *, num_stages: int, like: Sequence[Layer] = ()) -> Sequence[Layer]:
        """See `Model`."""
        marks = tuple(layer.options.segment for layer in like) or None
        args = (batch["inputs"],)
        key = *shapes_key(args), marks, str(tracing), num_stages
        if key not in self._cut:
            with self._explained(args):
                layers = layers_of_model(
                    self._bound(args, tracing),
                    args,
                    tracing,
                    num_stages=num_stages,
                    forced=self._forced,
                    marks=marks,
                    loss=self._loss,
                )
            self._cut[key] = layers
        return self._cut[key]

    def _bound(self, args: tuple, tracing: Tracing) -> Layer:
        with _named_as_a_model(), on_mesh(tracing.mesh):
            return self._model.bound(args)

    @contextlib.contextmanager
    def _explained(self, args: tuple) -> Iterator[None]:
        """Errors of the model name it, and what it was given."""
        try:
            yield
        except CutError:
            raise
        except Exception as error:
            taken = arguments_text(args[0])
            message = f"the model ({self._model.name}) cannot take {taken}: {str(error).rstrip('.')}."
            given = args[0].given()
            if isinstance(given.get("inputs"), Mapping) or len(given) > 1:
                message += f" Its arguments are {self._signature}."
            raise ValueError(message) from error

    def ties(self, layers: Sequence[Layer]) -> Sequence[Tie]:
        """See `Model`."""
        return shared_parameters(layers)

    def loss(self, loss: Callable[..., Any] | None, has_aux: bool) -> Loss:
        """See `Model`."""
        if loss is not None:
            return super().loss(loss, has_aux)
        self._loss = ModelLoss(self._bound, self.batch, has_aux)
        return self._loss.loss

    def plain_loss(
        self, layers: Sequence[Layer], loss: Loss, ties: Sequence, state: Sequence, key: jax.Array
    ) -> Callable[[Any, Any], jax.Array]:
        """See `Model`."""
        if self._loss is not None:
            loss = Loss.of(lambda outputs, batch: outputs, loss.has_aux)
        function = plain_loss([self._model], loss, (), [whole(joined(layers, state, "state"))], key)
        return lambda params, batch: function([params], self.batch(batch))

    def __str__(self) -> str:
        return f"the model {self._model.name}"


@contextlib.contextmanager
def _named_as_a_model() -> Iterator[None]:
    """Messages about layer 0 are about the model."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace("layer 0", "the model", 1)) from error


def model_of(layers: Any, *, loss: Any, boundaries: Any) -> Model:
    """What a user gives as `layers` of `Pipeline`, with `loss` and `boundaries`."""
    if isinstance(layers, nnx.Module | linen.Module | NNX | Linen | InitApply) or callable(layers):
        is_list = isinstance(boundaries, list | tuple)
        modules = boundaries if is_list and boundaries and all(isinstance(b, str) for b in boundaries) else ()
        return WholeModel(layers, returns_loss=loss is None, modules=modules)
    return LayerList(layers)
