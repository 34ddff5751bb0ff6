"""The operator graph of the layers of a pipeline, and a strategy of it as splits of each layer."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jpipe.layers.avals import abstract, cast, zeros
from jpipe.layers.layer import Layer, run_in_order
from jpipe.layers.loss import Loss
from jpipe.layers.tracer import run_layer
from jpipe.mesh import on_platform
from jpipe.soap.execute import with_splits
from jpipe.soap.graph import OperatorGraph
from jpipe.soap.moves import as_entries
from jpipe.soap.splits import Plan, splits
from jpipe.soap.strategy import Config, load_strategy
from jpipe.soap.trace import trace


class StrategySplit(NamedTuple):
    """The split of a layer over the automatic axes of a mesh.

    Attributes:
      parameter_specs: for each parameter, the axis of each dim, several axes or None.
      plan: the splits of its equations.
    """

    parameter_specs: tuple[tuple, ...]
    plan: Plan

    def applied(self, run: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
        """The layer with constraints over the mesh of the automatic axes."""
        return with_splits(run, self.plan, mesh)


class LayersGraph(NamedTuple):
    """The operators of layers.

    Attributes:
      graph: the operators of all layers and the loss, one after the other.
      num_parameters: number of parameters of each layer.
    """

    graph: OperatorGraph
    num_parameters: Sequence[int]

    def splits(self, strategy: Sequence[Config], sizes: Mapping[str, int]) -> list[StrategySplit]:
        """The split of each layer over the axes of a mesh by a strategy; see `jpipe.soap.splits.splits`."""
        split = splits(self.graph, strategy, sizes, in_stages=True)
        result, start = [], 0
        for i, count in enumerate(self.num_parameters):
            specs = tuple(map(as_entries, split.arguments[start : start + count]))
            # Each layer is a call, and nothing stands between the calls.
            result.append(StrategySplit(specs, split.plan.get(i, {})))
            start += count
        return result


def layers_graph(
    layers: Sequence[Layer],
    loss: Loss,
    batch: Any,
    *,
    compute_dtype: Any = None,
    key_impl: Any = None,
    evaluated: bool = False,
    **options: Any,
) -> LayersGraph:
    """Traces a training step of layers and a loss into operators. Nothing is compiled.

    Layers are traced as for a CPU: a strategy splits products, and a kernel of another platform would hide them.

    Args:
      layers: the result of `jpipe.layers.as_layers`.
      loss: the loss.
      batch: abstract arrays: a whole batch, or a microbatch as each device of a pipeline gets it.
      compute_dtype: weights and activations are cast to it in every layer; None casts nothing.
      key_impl: implementation of the random keys; None is JAX's default.
      evaluated: whether the layers run as in evaluation: nothing is dropped, and batch norm uses its running
        statistics. Otherwise it uses those of the whole batch, which devices have to add up.
      options: the options of `jpipe.soap.trace`.
    """
    key = jax.eval_shape(lambda: jax.random.key(0, impl=key_impl))
    bound: list[Layer] = []

    def bind(batch: Any, key: jax.Array) -> Any:
        """Traces the layers in order: the parameters of some depend on their inputs."""

        def call(i: int, args: tuple) -> tuple:
            layer = layers[i].bound(abstract(args))
            bound.append(layer)
            run = run_layer(layer, compute_dtype)
            return run(*zeros((layer.parameters, layer.state)), key, args)[0]

        return run_in_order(layers, batch["inputs"], call)

    with on_platform("cpu"):
        jax.eval_shape(bind, batch, key)

    def function(weights: Any, batch: Any, states: Any, key: jax.Array) -> Any:
        def call(i: int, args: tuple) -> tuple:
            layer = bound[i]
            if evaluated:
                parameters, args = cast((weights[i], args), compute_dtype)
                return layer.outputs(layer.evaluate(parameters, states[i], args))
            run = jax.jit(run_layer(layer, compute_dtype))
            return run(weights[i], states[i], key, args)[0]

        outputs = run_in_order(bound, batch["inputs"], call)
        return loss.terms(outputs, batch, {}, key).mean()[0]

    weights = [layer.parameters for layer in bound]
    states = [layer.state for layer in bound]
    with on_platform("cpu"):
        graph = trace(function, weights, batch, states, key, **options)
    return LayersGraph(graph, [len(jax.tree.leaves(layer_weights)) for layer_weights in weights])


@dataclasses.dataclass(frozen=True)
class StoredStrategy:
    """A strategy in a file of `jpipe.soap.save_strategy`, which is read when the layers are traced.

    Attributes:
      path: the path of the file.
    """

    path: str

    def __repr__(self) -> str:
        return repr(self.path)

    def split_layers(
        self,
        layers: Sequence[Layer],
        loss: Loss,
        microbatch: Any,
        sizes: Mapping[str, int],
        *,
        compute_dtype: Any,
        key_impl: Any,
    ) -> list[StrategySplit]:
        """Reads how the strategy splits each layer over the axes of a mesh. See `jpipe.layers.layer_split.Strategy`.

        Raises:
          ValueError: if the file holds no strategy, it is one of another model, microbatch or number of devices, or it
            does not fit the mesh.
          OSError: if the file cannot be read.
        """
        traced = layers_graph(layers, loss, microbatch, compute_dtype=compute_dtype, key_impl=key_impl)
        num_devices = math.prod(sizes.values())
        try:
            strategy = load_strategy(self.path, traced.graph, num_devices)
            return traced.splits(strategy, sizes)
        except ValueError as error:
            raise ValueError(
                f"the strategy `{self.path}` cannot run on {num_devices} devices of the stages: {error}"
            ) from None
