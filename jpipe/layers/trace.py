"""Traces all layers of a model for one microbatch shape.

Layers that compute the same (equal jaxprs, equal shapes) are of one *layer kind*. A kind is traced
and compiled once.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
from jax.sharding import Mesh

from jpipe.layers.avals import is_inexact
from jpipe.layers.axis_rules import AxisRules, constraints_on
from jpipe.layers.backward import (
    LayerProgram,
    trace_layer,
)
from jpipe.layers.equations import Equations
from jpipe.layers.layer import Layer
from jpipe.layers.layer_split import LayerSplit
from jpipe.layers.loss import Loss, trace_loss
from jpipe.layers.products import AS_TRACED, ProductRule
from jpipe.layers.residuals import ELEMENTWISE_ONLY, Rerun
from jpipe.layers.sharding import KeptSpecs, ValueSplit
from jpipe.layers.sliced import Slices
from jpipe.layers.state_update import StateUpdate
from jpipe.layers.tracer import Tracer
from jpipe.layers.trainable import ALL, Trainable
from jpipe.mesh import compilers_part
from jpipe.packing import Leaf


@dataclasses.dataclass(frozen=True)
class Traced:
    """Layers traced for one microbatch shape, before they are cut into stages.

    Attributes:
      layers: the layers, bound to the shapes of their inputs.
      layer_kinds: the programs of each layer kind.
      kind_of_layer: per layer, the position of its kind in `layer_kinds`.
      mutable: the mutable state of each layer kind, and how it moves.
      reported: abstract values that layers report to the loss, by name.
      inputs: abstract leaves of the model's inputs.
      outputs: per layer, the abstract leaves of its outputs without the stashed skips.
      output_tree: tree structure of the last layer's outputs.
      skips: name -> (layer that stashes it, layer that pops it, abstract leaves).
      specs: the split of the parameters of each layer kind over automatic axes of the mesh, in the
        form of `packing.Leaf`.
      kept_specs: the splits of what the layers of each kind keep between their passes, which the compiler decides.
      values: the split of the values that layers pass on.
      splits: the split of each layer by a strategy; `()` without a strategy.
    """

    layers: Sequence[Layer]
    layer_kinds: Sequence[LayerProgram]
    kind_of_layer: Sequence[int]
    mutable: Sequence[StateUpdate]
    reported: Mapping[str, jax.ShapeDtypeStruct]
    inputs: Sequence[jax.ShapeDtypeStruct]
    outputs: Sequence[tuple]
    output_tree: Any
    skips: Mapping[str, tuple[int, int, tuple]]
    specs: Sequence[tuple[tuple, ...]]
    kept_specs: KeptSpecs
    values: ValueSplit
    splits: Sequence[LayerSplit] = ()

    def with_one_stash(self) -> Self:
        """The layers for a table that does not split backwards: see `LayerProgram.with_one_stash`."""
        kinds = [kind.with_one_stash() for kind in self.layer_kinds]
        return dataclasses.replace(self, layer_kinds=kinds)

    def of_microbatch(self, aval: jax.ShapeDtypeStruct) -> Leaf:
        """A leaf that is split like the values that layers pass on, such as a leaf of a message."""
        return Leaf(aval, 1, self.values.spec(aval.shape))

    @functools.cached_property
    def flops(self) -> list[float]:
        """FLOPs of each layer's forward and backward of one microbatch, as XLA counts them."""
        flops = [_flops(kind) for kind in self.layer_kinds]
        return [flops[k] for k in self.kind_of_layer]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingTrace(Traced):
    """Layers traced for training, and the loss.

    Attributes:
      loss: the program of the loss: see `TracedLoss`.
      has_whole_batch_loss: whether it takes the outputs of all microbatches of a minibatch at once.
      loss_weight: the weight of a microbatch, of the leaves of the batch; None if the loss is a mean.
    """

    loss: LayerProgram
    has_whole_batch_loss: bool
    loss_weight: Equations | None

    @property
    def loss_stash(self) -> tuple:
        """The abstract values that the loss of a microbatch keeps until its backward."""
        return () if self.has_whole_batch_loss else self.loss.stash


def trace_layers(
    layers: Sequence[Layer],
    loss: Loss,
    microbatch: Any,
    *,
    key_impl: Any = None,
    mesh: Mesh | None = None,
    axis_rules: AxisRules = (),
    **options: Any,
) -> TrainingTrace:
    """Traces every layer for training, and the loss.

    Args:
      layers: the result of `as_layers`.
      loss: the loss.
      microbatch: abstract arrays.
      key_impl, mesh, axis_rules, **options: see `_trace`.

    Raises:
      ValueError: if a layer or the loss cannot take its arguments.
    """
    traced, outputs = _trace(
        layers,
        loss,
        microbatch,
        key_impl=key_impl,
        mesh=mesh,
        axis_rules=axis_rules,
        **options,
    )
    with constraints_on(mesh, axis_rules):
        program, weight = trace_loss(loss, outputs, traced.reported, microbatch, key_impl)
    fields = {f.name: getattr(traced, f.name) for f in dataclasses.fields(traced)}
    whole = loss.num_parts is not None
    return TrainingTrace(**fields, loss=program, has_whole_batch_loss=whole, loss_weight=weight)


def trace_evaluation(layers: Sequence[Layer], microbatch: Any, **options: Any) -> Traced:
    """Traces the layers in evaluation, without a loss; for `**options` see `_trace`."""
    return _trace(layers, None, microbatch, **options)[0]


def _trace(
    layers: Sequence[Layer],
    loss: Loss | None,
    microbatch: Any,
    *,
    compute_dtype: Any = None,
    key_impl: Any = None,
    policy: Callable | None = None,
    products: ProductRule = AS_TRACED,
    mesh: Mesh | None = None,
    axis_rules: AxisRules = (),
    splits: Sequence[LayerSplit] = (),
    trainable: Trainable = ALL,
    rerun: Rerun = ELEMENTWISE_ONLY,
    num_slices: int = 1,
) -> tuple[Traced, Any]:
    """Traces every layer for the abstract `microbatch`.

    Args:
      layers: the result of `as_layers`.
      loss: the loss whose values the layers report; None traces the layers in evaluation.
      microbatch: abstract arrays.
      compute_dtype: weights and activations are cast to it in every layer; None casts nothing.
      key_impl: implementation of the random keys of the layers; None is JAX's default.
      policy: the checkpoint policy of the layers. The loss stashes all its residuals.
      products: see `trace_layer`.
      mesh: the mesh of the pipeline, if it has axes that are left to the compiler, over which parameters may be split.
      axis_rules: the axes of each logical name.
      splits: the split of each layer by a strategy, instead of annotations; `()` without a strategy.
      trainable: the parameters that are trained.
      rerun: see `trace_layer`.
      num_slices: the slices of a sequence, of which `microbatch` is one; in training alone.

    Returns:
      The layers, and the abstract outputs of the model.

    Raises:
      ValueError: if a layer cannot take its arguments.
    """
    inputs = microbatch["inputs"]
    trace_one = functools.partial(
        trace_layer,
        has_aux=True,
        policy=policy,
        products=products,
        rerun=rerun,
    )

    def traced(reports: Mapping[str, jax.ShapeDtypeStruct]) -> tuple[Tracer, Any]:
        tracer = Tracer(
            layers=list(layers),
            trace_one=trace_one,
            training=loss is not None,
            compute_dtype=compute_dtype,
            key_impl=key_impl,
            mesh=mesh,
            axis_rules=axis_rules,
            splits=splits,
            trainable=trainable,
            reports=reports,
            slices=Slices(num_slices, inputs) if num_slices > 1 and loss is not None else None,
        )
        outputs = inputs
        for i in range(len(layers)):
            outputs = tracer.add(i, outputs)
        trainable.check(tracer.layers)
        return tracer, outputs

    tracer, outputs = traced({})
    reported = tracer.reported if loss is not None and "reported" in loss.asks else {}
    if reported:
        # Only a trace of all layers tells the names, which every layer hands on.
        tracer, outputs = traced(reported)
    tracer.drop_input_grads()
    leaves = jax.tree.leaves(inputs)
    automatic = compilers_part(mesh)
    sizes = {} if automatic is None else automatic.shape
    values = ValueSplit.of(tracer.layer_kinds, leaves[0].shape[0], sizes)

    names = "layers layer_kinds kind_of_layer mutable outputs skips specs splits"
    traced_layers = Traced(
        **{name: getattr(tracer, name) for name in names.split()},
        reported=reported,
        inputs=leaves,
        output_tree=jax.tree.structure(outputs),
        kept_specs=KeptSpecs(tracer.layer_kinds, tracer.specs, values, mesh if loss is not None else None),
        values=values,
    )
    return traced_layers, outputs[0] if reported else outputs


def forward_and_backward(kind: LayerProgram) -> tuple[Callable, tuple]:
    """A layer's forward and backward as one function, and its abstract arguments."""

    def function(parameters: Sequence, inputs: Sequence, extra: Sequence, output_grads: Sequence) -> tuple:
        outputs, stash, _ = kind.forward_and_stash(parameters, inputs, extra)
        return outputs, kind.backward([*parameters, *kind.at_hand(inputs, extra)], stash, output_grads)

    output_grads = [y for y in kind.outputs if is_inexact(y)]
    lists = list(kind.parameters), list(kind.inputs), list(kind.extra), output_grads
    return function, lists


def _flops(kind: LayerProgram) -> float:
    function, arguments = forward_and_backward(kind)
    computation = jax.jit(function).trace(*arguments)
    try:
        lowered = computation.lower()
    except NotImplementedError:  # a kernel of GPUs that are only described
        lowered = computation.lower(lowering_platforms=("cuda",))
    # Before optimisation the count is within 1 % of the compiled program's and takes a tenth of
    # the time.
    return max(float((lowered.cost_analysis() or {}).get("flops", 0.0)), 0.0)
