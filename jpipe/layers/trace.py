"""Traces all layers of a model for one microbatch shape.

Layers that compute the same (equal jaxprs, equal shapes) are of one *layer kind*. A kind is traced
and compiled once.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jpipe.layers.avals import cast, is_inexact, real_dtype, shapes_text
from jpipe.layers.axis_rules import AxisRules, constraints_on, unannotated_on
from jpipe.layers.backward import (
    LayerProgram,
    trace_layer,
)
from jpipe.layers.equations import Equations
from jpipe.layers.layer import Layer
from jpipe.layers.layer_split import LayerSplit
from jpipe.layers.loss import Loss, trace_loss
from jpipe.layers.numbers import as_numbers, from_numbers
from jpipe.layers.report import collect
from jpipe.layers.sharding import ValueSplit, parameter_specs, stash_specs
from jpipe.layers.state_update import StateUpdate, trace_state
from jpipe.layers.vjp import OffloadError, OrderedEffectError
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
      specs: per layer kind, how its parameters are split over automatic axes of the mesh, in the
        form of `packing.Leaf`.
      find_stash_specs: compiles the layers on the first call, and returns `stash_specs`.
      values: how the values that layers pass on are split.
      splits: how a strategy splits each layer; `()` without a strategy.
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
    find_stash_specs: Callable[[], Sequence[Sequence[tuple]]]
    values: ValueSplit
    splits: Sequence[LayerSplit] = ()

    def with_one_stash(self) -> Self:
        """The layers for a table that does not split backwards: see `LayerProgram.with_one_stash`."""
        kinds = [kind.with_one_stash() for kind in self.layer_kinds]
        return dataclasses.replace(self, layer_kinds=kinds)

    @property
    def stash_specs(self) -> Sequence[Sequence[tuple]]:
        """Per layer kind, how its stash is split, which the compiler decides."""
        return self.find_stash_specs()

    def of_microbatch(self, aval: jax.ShapeDtypeStruct) -> Leaf:
        """A leaf that is split as what layers pass on, such as a leaf of a message."""
        return Leaf(aval, 1, self.values.spec(aval.shape))

    @functools.cached_property
    def flops(self) -> list[float]:
        """FLOPs of each layer's forward and backward of one microbatch, as XLA counts them."""
        of_kind = [_flops(kind) for kind in self.layer_kinds]
        return [of_kind[k] for k in self.kind_of_layer]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingTrace(Traced):
    """Layers traced for training, and the loss.

    Attributes:
      loss: the program of the loss: see `TracedLoss`.
      loss_weight: the weight of a microbatch, of the leaves of the batch; None if the loss is a mean.
    """

    loss: LayerProgram
    loss_weight: Equations | None


def trace_layers(
    layers: Sequence[Layer],
    loss: Loss,
    microbatch: Any,
    *,
    key_impl: Any = None,
    automatic: Mesh | None = None,
    axis_rules: AxisRules = (),
    **options: Any,
) -> TrainingTrace:
    """Traces every layer for training, and the loss.

    Args:
      layers: the result of `as_layers`.
      loss: the loss.
      microbatch: abstract arrays.
      key_impl, automatic, axis_rules, **options: as of `_trace`.

    Raises:
      ValueError: if a layer or the loss cannot take its arguments.
    """
    traced, outputs = _trace(
        layers,
        loss,
        microbatch,
        key_impl=key_impl,
        automatic=automatic,
        axis_rules=axis_rules,
        **options,
    )
    with constraints_on(automatic, axis_rules):
        program, weight = trace_loss(
            loss, outputs, traced.reported, microbatch, key_impl
        )
    fields = {f.name: getattr(traced, f.name) for f in dataclasses.fields(traced)}
    return TrainingTrace(**fields, loss=program, loss_weight=weight)


def trace_evaluation(
    layers: Sequence[Layer], microbatch: Any, **options: Any
) -> Traced:
    """The same in evaluation, without a loss; `**options` as of `_trace`."""
    return _trace(layers, None, microbatch, **options)[0]


def _trace(
    layers: Sequence[Layer],
    loss: Loss | None,
    microbatch: Any,
    *,
    compute_dtype: Any = None,
    key_impl: Any = None,
    policy: Callable | None = None,
    products: Callable[[int, int], bool] | None = None,
    automatic: Mesh | None = None,
    mesh: Mesh | None = None,
    axis_rules: AxisRules = (),
    splits: Sequence[LayerSplit] = (),
    rereads_weights: bool = False,
) -> tuple[Traced, Any]:
    """Traces every layer for the abstract `microbatch`.

    Args:
      layers: the result of `as_layers`.
      loss: whose values the layers report; None traces the layers in evaluation.
      microbatch: abstract arrays.
      compute_dtype: weights and activations are cast to it in every layer; None casts nothing.
      key_impl: implementation of the random keys of the layers; None is JAX's default.
      policy: the checkpoint policy of the layers. The loss stashes all its residuals.
      products: as of `trace_layer`.
      automatic: the mesh of the automatic axes alone, over which parameters may be split; None
        without such axes.
      mesh: the whole mesh, if there are automatic axes.
      axis_rules: from logical names to axes.
      splits: how a strategy splits each layer, instead of annotations; `()` without a strategy.
      rereads_weights: as of `trace_layer`.

    Returns:
      The layers, and the abstract outputs of the model.

    Raises:
      ValueError: if a layer cannot take its arguments.
    """
    inputs = microbatch["inputs"]

    def traced(reports: Mapping[str, jax.ShapeDtypeStruct]) -> tuple[_Tracer, Any]:
        tracer = _Tracer(
            layers,
            loss is not None,
            compute_dtype,
            key_impl,
            functools.partial(
                trace_layer,
                has_aux=True,
                policy=policy,
                products=products,
                rereads_weights=rereads_weights,
            ),
        )
        tracer.automatic, tracer.axis_rules = automatic, axis_rules
        tracer.splits = splits
        tracer.reports = reports
        outputs = inputs
        for i in range(len(layers)):
            outputs = tracer.add(i, outputs)
        return tracer, outputs

    tracer, outputs = traced({})
    reported = tracer.reported if loss is not None and "reported" in loss.asks else {}
    if reported:
        # Only a trace of all layers tells the names, which every layer hands on.
        tracer, outputs = traced(reported)
    tracer.drop_input_grads(inputs)
    num_rows = jax.tree.leaves(inputs)[0].shape[0]
    sizes = {} if automatic is None else automatic.shape
    values = ValueSplit.of(tracer.layer_kinds, num_rows, sizes)

    @functools.cache
    def find_stash_specs() -> list:
        return [
            [()] * len(kind.stash)
            if loss is None or automatic is None or mesh is None
            else stash_specs(kind, spec, values, mesh)
            for kind, spec in zip(tracer.layer_kinds, tracer.specs, strict=True)
        ]

    traced_layers = Traced(
        tracer.layers,
        tracer.layer_kinds,
        tracer.kind_of_layer,
        tracer.mutable,
        reported,
        jax.tree.leaves(inputs),
        tracer.outputs,
        jax.tree.structure(outputs),
        tracer.skips,
        tracer.specs,
        find_stash_specs,
        values,
        splits,
    )
    return traced_layers, outputs[0] if reported else outputs


class _Tracer:
    """Traces layers in order, each for the outputs of the layer before it.

    Attributes:
      layers, layer_kinds, kind_of_layer, mutable, outputs, skips, specs: as in `Traced`, of the layers so
        far.
      automatic: the mesh of the automatic axes; None if there are none.
      axis_rules: from logical names to its axes.
      splits: how a strategy splits each layer; `()` without a strategy.
      reports: the values that layers hand on to the loss beside their outputs, by name. Every layer
        but the first takes `(inputs, sums)`, and every layer returns `(outputs, sums)`; without
        names inputs and outputs alone.
      reported: what the layers so far have reported, by name.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        training: bool,
        compute_dtype: Any,
        key_impl: Any,
        trace_one: Callable[..., LayerProgram],
    ) -> None:
        self.layers = list(layers)
        self.layer_kinds: list[LayerProgram] = []
        self.kind_of_layer: list[int] = []
        self.mutable: list[StateUpdate] = []
        self.outputs: list[tuple] = []
        self.skips: dict[str, tuple[int, int, tuple]] = {}
        self.specs: list[tuple] = []
        self.automatic: Mesh | None = None
        self.axis_rules: AxisRules = ()
        self.splits: Sequence[LayerSplit] = ()
        self.reports: Mapping[str, jax.ShapeDtypeStruct] = {}
        self.reported: dict[str, jax.ShapeDtypeStruct] = {}
        self._training = training
        self._compute_dtype = compute_dtype
        self._key_impl = key_impl
        self._trace_one = trace_one
        self._key = jax.eval_shape(
            lambda: jax.random.key_data(jax.random.key(0, impl=key_impl))
        )
        self._stashed: dict[str, Any] = {}
        self._kind_of_text: dict[str, int] = {}
        self._program_of: dict[tuple, tuple[LayerProgram, StateUpdate]] = {}

    def add(self, i: int, inputs: Any) -> Any:
        """Traces layer `i` for abstract inputs; returns its abstract outputs."""
        popped = [self._stashed.pop(name) for name in self.layers[i].pop]
        plain = inputs[0] if self._takes_sums(i) else inputs
        args = from_numbers((plain, *popped))
        layer = self.layers[i] = self._bound(i, args)
        program, update = self._program(i, (inputs, *popped), args)
        self.kind_of_layer.append(self._kind(i, program, update))
        outputs, *stashed = program.output_tree.unflatten(program.outputs)
        self.outputs.append(tuple(jax.tree.leaves(outputs)))
        for name, value in zip(layer.stash, stashed, strict=True):
            self._stashed[name] = value
            popper = next(j for j, other in enumerate(self.layers) if name in other.pop)
            self.skips[name] = (i, popper, tuple(jax.tree.leaves(value)))
        return outputs

    def drop_input_grads(self, inputs: Any) -> None:
        """Traces the first layer without the gradient of the model's inputs, which nothing reads."""
        if self.kind_of_layer.count(0) == 1:
            self.layer_kinds[0] = self._trace(
                0, (inputs,), self.mutable[0], input_grads=False
            )

    def _bound(self, i: int, args: tuple) -> Layer:
        try:
            return self.layers[i].bound(args)
        except ValueError as error:
            if i == 0 or isinstance(args[0], jax.ShapeDtypeStruct):
                raise
            cause = error.__cause__ or error
            raise ValueError(self._refusal(i, args, cause)) from cause

    def _program(
        self, i: int, args: tuple, plain_args: tuple
    ) -> tuple[LayerProgram, StateUpdate]:
        """The programs of layer `i`, and how its state moves: those of an earlier layer if both are surely the same.

        Args:
          i: the layer.
          args: with the sums of what layers report.
          plain_args: as the layer takes them.
        """
        layer = self.layers[i]
        if layer.alike is None:
            update = self._update(i, plain_args)
            return self._trace(i, args, update), update
        seen = (
            layer.alike,
            self._is_last(i),
            len(layer.stash),
            _signature((args, layer.parameters, layer.state)),
            repr(self.splits[i]) if self.splits else None,
        )
        if seen not in self._program_of:
            update = self._update(i, plain_args)
            self._program_of[seen] = self._trace(i, args, update), update
        return self._program_of[seen]

    def _update(self, i: int, args: tuple) -> StateUpdate:
        """How the state of layer `i` moves."""
        layer = self.layers[i]
        if not self._training:
            return StateUpdate(tuple(jax.tree.leaves(layer.state)))
        key = jax.eval_shape(self._typed_key, self._key)
        run = run_layer(layer, self._compute_dtype)
        try:
            with self._annotations():
                return trace_state(run, layer.parameters, layer.state, key, args)
        except Exception as error:
            raise ValueError(self._refusal(i, args, error)) from error

    def _typed_key(self, data: jax.Array) -> jax.Array:
        return jax.random.wrap_key_data(data, impl=self._key_impl)

    def _kind(self, i: int, program: LayerProgram, update: StateUpdate) -> int:
        """The kind of layer `i`: an earlier layer's kind if their programs are equal."""
        layer = self.layers[i]
        sizes = {} if self.automatic is None else self.automatic.shape
        if self.splits:
            spec = self.splits[i].parameter_specs
        else:
            spec = parameter_specs(layer, i, sizes, self.axis_rules)
        text = f"{program.text}\n{update.text}\n{spec}"
        kind = self._kind_of_text.setdefault(text, len(self.layer_kinds))
        if kind == len(self.layer_kinds):
            self.layer_kinds.append(program)
            self.mutable.append(update)
            self.specs.append(spec)
        return kind

    def _trace(
        self, i: int, args: tuple, update: StateUpdate, input_grads: bool = True
    ) -> LayerProgram:
        layer = self.layers[i]
        extra = {"key": self._key, "state": layer.state}
        try:
            with self._annotations():
                return self._trace_one(
                    self._function(i, update),
                    layer.parameters,
                    args,
                    extra,
                    input_grads=input_grads,
                    constants=[1 + j for j in update.constants],  # after the key
                )
        except (OffloadError, OrderedEffectError) as error:
            raise ValueError(f"layer {i} ({layer.name}): {error}") from None
        except Exception as error:
            raise ValueError(self._refusal(i, args, error)) from error

    def _annotations(self) -> contextlib.AbstractContextManager[None]:
        """In which the annotations of a layer count, if no strategy says how it is split."""
        if self.splits and self.automatic is not None:
            return unannotated_on(self.automatic)
        return constraints_on(self.automatic, self.axis_rules)

    def _refusal(self, i: int, args: tuple, error: BaseException) -> str:
        """Why layer `i` cannot take its arguments."""
        layer = self.layers[i]
        taken = args[0] if len(args) == 1 else args
        message = f"layer {i} ({layer.name}) cannot take {shapes_text(taken)}: {error}"
        if i > 0 and type(args[0]) in (tuple, list, dict):
            reason = str(error).partition("\n")[0].rstrip(".")
            message = (
                f"layer {i - 1} ({self.layers[i - 1].name}) returned {_described(args[0])}; layer {i} "
                f"({layer.name}) takes one activation, was called with that {type(args[0]).__name__}, "
                f"and failed: {reason}. If layer {i} needs an array, return the array itself from "
                f"layer {i - 1}, or put a function such as `lambda x: x[0]` between the two layers."
            )
        if not layer.note:
            return message
        return f"{message.rstrip('.')}. {layer.note}"

    def _function(
        self, i: int, update: StateUpdate
    ) -> Callable[..., tuple[tuple, Any]]:
        """Layer `i` in the form of `trace_layer`; its aux is what moves its state, see `StateUpdate.results`."""
        layer = self.layers[i]
        dtype = self._output_dtype() if self._is_last(i) else self._compute_dtype

        def function(parameters: Any, args: tuple, extra: Any) -> tuple[tuple, Any]:
            args = from_numbers(args)
            if self._takes_sums(i):
                (inputs, sums), *popped = args
                args = (inputs, *popped)
            else:
                sums = {n: jnp.zeros((), a.dtype) for n, a in self.reports.items()}
            if not self._training:
                parameters, args = cast((parameters, args), self._compute_dtype)
                outputs = layer.evaluate(parameters, extra["state"], args)
                return as_numbers(cast(layer.outputs(outputs), dtype)), ()
            key = self._typed_key(extra["key"])
            run = run_layer(layer, self._compute_dtype)
            if self.splits and self.automatic is not None:
                run = self.splits[i].applied(run, self.automatic)
            (outputs, reported), moving = update.results(
                run, parameters, extra["state"], key, args
            )
            outputs = as_numbers(cast(outputs, dtype))
            return self._with_sums(outputs, sums, reported), moving

        return function

    def _takes_sums(self, i: int) -> bool:
        """Whether layer `i` takes the sums of what layers before it have reported."""
        return bool(self.reports) and i > 0

    def _with_sums(self, outputs: tuple, sums: dict, reported: dict) -> tuple:
        """`(outputs, *stashed)` with the sums, and what the layer adds to them, beside the outputs."""
        for name, value in reported.items():
            dtype = np.result_type(self.reported.get(name, value).dtype, value.dtype)
            self.reported[name] = jax.ShapeDtypeStruct((), dtype)
        if not self.reports:
            return outputs
        first, *stashed = outputs
        sums = {
            name: a + reported[name].astype(a.dtype) if name in reported else a
            for name, a in sums.items()
        }
        return (first, sums), *stashed

    def _is_last(self, i: int) -> bool:
        return i == len(self.layers) - 1

    def _output_dtype(self) -> Any:
        """The dtype of the model's outputs: of its weights, and at least float32."""
        if self._compute_dtype is None:
            return None
        return real_dtype([layer.parameters for layer in self.layers])


def run_layer(layer: Layer, compute_dtype: Any) -> Callable[..., tuple]:
    """A layer in training: `(parameters, state, key, args) -> ((outputs, *stashed), state, reported)`."""

    def run(parameters: Any, state: Any, key: jax.Array, args: tuple) -> tuple:
        parameters, args = cast((parameters, args), compute_dtype)
        with collect() as reported:
            outputs, state = layer.train(parameters, state, key, args)
        return layer.outputs(outputs), state, dict(reported)

    return run


def _signature(tree: Any) -> tuple:
    """Hashable; trees with equal signatures give equal traces."""
    leaves, structure = jax.tree.flatten(tree)
    avals = [(a.shape, a.dtype, getattr(a, "weak_type", False)) for a in leaves]
    return structure, tuple(avals)


def _described(tree: Any) -> str:
    """A pytree in words: "a tuple of 1 array (float32[2, 4])"."""
    leaves = jax.tree.leaves(tree)
    shapes = ", ".join(f"{a.dtype}{list(a.shape)}" for a in leaves)
    plural = "" if len(leaves) == 1 else "s"
    return f"a {type(tree).__name__} of {len(leaves)} array{plural} ({shapes})"


def forward_and_backward(kind: LayerProgram) -> tuple[Callable, tuple]:
    """A layer's forward and backward as one function, and its abstract arguments."""

    def function(
        parameters: Sequence, inputs: Sequence, extra: Sequence, output_grads: Sequence
    ) -> tuple:
        outputs, stash, _ = kind.forward_and_stash(parameters, inputs, extra)
        constants = [extra[i] for i in kind.constants]
        return outputs, kind.backward([*parameters, *constants], stash, output_grads)

    output_grads = [y for y in kind.outputs if is_inexact(y)]
    lists = list(kind.parameters), list(kind.inputs), list(kind.extra), output_grads
    return function, lists


def _flops(kind: LayerProgram) -> float:
    function, arguments = forward_and_backward(kind)
    lowered = jax.jit(function).lower(*arguments)
    # Before optimisation the count is within 1 % of the compiled program's and takes a tenth of
    # the time.
    return max(float((lowered.cost_analysis() or {}).get("flops", 0.0)), 0.0)
