"""Traces layers one after another, each for the outputs of the layer before it."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jpipe.layers.avals import cast, is_inexact, real_dtype
from jpipe.layers.axis_rules import AxisRules, constraints_on, unannotated_on
from jpipe.layers.backward import LayerProgram
from jpipe.layers.call_arguments import arguments_text
from jpipe.layers.layer import Layer
from jpipe.layers.layer_split import LayerSplit
from jpipe.layers.mesh_free import on_mesh
from jpipe.layers.numbers import as_numbers, from_numbers
from jpipe.layers.report import collect
from jpipe.layers.sharding import parameter_specs
from jpipe.layers.sliced import Carried, Slices
from jpipe.layers.state_update import StateUpdate, trace_state
from jpipe.layers.trainable import Trainable
from jpipe.layers.vjp import OffloadError, OrderedEffectError
from jpipe.mesh import compilers_part


@dataclasses.dataclass
class Tracer:
    """Traces layers in order, each for the outputs of the layer before it.

    Attributes:
      layers, layer_kinds, kind_of_layer, mutable, outputs, skips, specs: see `Traced`; of the layers so
        far.
      mesh: the mesh that layers are traced on; None without axes that are left to the compiler.
      axis_rules: the axes of the mesh of each logical name.
      splits: the split of each layer by a strategy; `()` without a strategy.
      trainable: the parameters that are trained.
      reports: the values that layers hand on to the loss beside their outputs, by name. Every layer
        but the first takes `(inputs, sums)`, and every layer returns `(outputs, sums)`; without
        names inputs and outputs alone.
      slices: what layers hand on from slice to slice; None: they run on whole sequences.
      reported: the values that the layers so far have reported, by name.
    """

    layers: list[Layer]
    trace_one: Callable[..., LayerProgram]
    training: bool
    compute_dtype: Any
    key_impl: Any
    mesh: Mesh | None
    axis_rules: AxisRules
    splits: Sequence[LayerSplit]
    trainable: Trainable
    reports: Mapping[str, jax.ShapeDtypeStruct]
    slices: Slices | None = None
    layer_kinds: list[LayerProgram] = dataclasses.field(default_factory=list)
    kind_of_layer: list[int] = dataclasses.field(default_factory=list)
    mutable: list[StateUpdate] = dataclasses.field(default_factory=list)
    outputs: list[tuple] = dataclasses.field(default_factory=list)
    skips: dict[str, tuple] = dataclasses.field(default_factory=dict)
    specs: list[tuple] = dataclasses.field(default_factory=list)
    reported: dict[str, jax.ShapeDtypeStruct] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._automatic = compilers_part(self.mesh)
        self._key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=self.key_impl)))
        self._stashed: dict[str, Any] = {}
        self._args: list[tuple] = []
        self._kind_of_text: dict[str, int] = {}
        self._program_of: dict[tuple, tuple[LayerProgram, StateUpdate]] = {}

    def add(self, i: int, inputs: Any) -> Any:
        """Traces layer `i` for abstract inputs; returns its abstract outputs."""
        popped = [self._stashed.pop(name) for name in self.layers[i].pop]
        plain = inputs[0] if self._takes_sums(i) else inputs
        self._args.append((inputs, *popped))
        args = from_numbers((plain, *popped))
        layer = self.layers[i] = self._bound(i, args)
        program, update = self._program(i, (inputs, *popped), args)
        self.kind_of_layer.append(self._kind(i, program, update))
        outputs, *stashed = self._results(program, program.outputs)
        self.outputs.append(tuple(jax.tree.leaves(outputs)))
        for name, value in zip(layer.stash, stashed, strict=True):
            self._stashed[name] = value
            popper = next(j for j, other in enumerate(self.layers) if name in other.pop)
            self.skips[name] = (i, popper, tuple(jax.tree.leaves(value)))
        return outputs

    def drop_input_grads(self) -> None:
        """Traces layers without the gradients of inputs that nothing reads: inputs that depend on no trained parameter.

        Such are those of the first layer, a mask that every layer hands on, and the results of layers that are frozen.
        If layers of one kind differ, the kind has the gradients of all.
        """
        layers_of: dict[int, list[int]] = {}
        wanted: dict[int, set[int]] = {}
        for i, differentiated in enumerate(self._differentiated()):
            layers_of.setdefault(self.kind_of_layer[i], []).append(i)
            wanted.setdefault(self.kind_of_layer[i], set()).update(differentiated)
        for k, layers in layers_of.items():
            if all(i in wanted[k] for i, x in enumerate(self.layer_kinds[k].inputs) if is_inexact(x)):
                continue
            # Layers before take zeros, as messages hold them.
            self.layer_kinds[k] = self._trace(
                layers[0],
                self._args[layers[0]],
                self.mutable[k],
                differentiated=wanted[k],
                zero_input_grads=layers != [0],
            )

    def _differentiated(self) -> Iterator[Sequence[int]]:
        """For each layer the positions of inexact inputs that depend on a trained parameter."""
        outputs: Any = jax.tree.map(lambda _: False, self._args[0][0])
        stashed: dict[str, Any] = {}
        for i, k in enumerate(self.kind_of_layer):
            program, layer = self.layer_kinds[k], self.layers[i]
            flags = jax.tree.leaves((outputs, *(stashed[name] for name in layer.pop)))
            flags += [True] * program.num_carried  # they depend on weights of the layer itself
            differentiated = [
                j for j, (x, flag) in enumerate(zip(program.inputs, flags, strict=True)) if flag and is_inexact(x)
            ]
            yield differentiated
            outputs, *values = self._results(program, program.outputs_on(differentiated))
            stashed |= zip(layer.stash, values, strict=True)

    def _results(self, program: LayerProgram, leaves: Sequence) -> list:
        """`[outputs, *stashed]` of a layer from the leaves of its results."""
        results = list(program.output_tree.unflatten(leaves))
        return results if self.slices is None else results[:-1]

    def _bound(self, i: int, args: tuple) -> Layer:
        try:
            with on_mesh(self.mesh):
                layer = self.layers[i].bound(args)
        except ValueError as error:
            if i == 0 or isinstance(args[0], jax.ShapeDtypeStruct):
                raise
            cause = error.__cause__ or error
            raise ValueError(self._refusal(i, args, cause)) from cause
        return self.trainable.applied(layer, i)

    def _program(self, i: int, args: tuple, plain_args: tuple) -> tuple[LayerProgram, StateUpdate]:
        """The programs of layer `i`, and how its state moves: those of an earlier layer if both are surely the same.

        Args:
          i: the layer.
          args: the arguments, with the sums of the values that layers report.
          plain_args: the arguments that the layer takes.
        """
        layer = self.layers[i]
        if layer.alike is None:
            update = self._update(i, plain_args)
            return self._trace(i, args, update), update
        seen = (
            layer.alike,
            self._is_last(i),
            layer.options.without_names,
            _signature((args, jax.tree.leaves(layer.parameters), layer.state)),
            layer.frozen,
            repr(self.splits[i]) if self.splits else None,
        )
        if seen not in self._program_of:
            update = self._update(i, plain_args)
            self._program_of[seen] = self._trace(i, args, update), update
        return self._program_of[seen]

    def _update(self, i: int, args: tuple) -> StateUpdate:
        """The change of the state of layer `i`."""
        layer = self.layers[i]
        if not self.training:
            return StateUpdate(tuple(jax.tree.leaves(layer.state)))
        key = jax.eval_shape(self._typed_key, self._key)
        run = run_layer(layer, self.compute_dtype)
        try:
            with self._annotations():
                return trace_state(run, layer.parameters, layer.state, key, args)
        except Exception as error:
            raise ValueError(self._refusal(i, args, error)) from error

    def _typed_key(self, data: jax.Array) -> jax.Array:
        return jax.random.wrap_key_data(data, impl=self.key_impl)

    def _kind(self, i: int, program: LayerProgram, update: StateUpdate) -> int:
        """The kind of layer `i`: an earlier layer's kind if their programs are equal."""
        layer = self.layers[i]
        sizes = {} if self._automatic is None else self._automatic.shape
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

    def _trace(self, i: int, args: tuple, update: StateUpdate, **options: Any) -> LayerProgram:
        layer = self.layers[i]
        extra = {"key": self._key, "state": layer.state}
        try:
            with self._annotations():
                function = self._function(i, update)
                if self.slices is not None:
                    carried = self._carried(i, args)
                    options |= carried.options(len(jax.tree.leaves(args)))
                    args, extra = (*args, carried.values), {**extra, "turn": self.slices.number}
                return self.trace_one(
                    function,
                    layer.parameters,
                    args,
                    extra,
                    frozen=layer.frozen,
                    **options,
                    constants=[1 + j for j in update.constants],  # after the key
                )
        except (OffloadError, OrderedEffectError) as error:
            raise ValueError(f"layer {i} ({layer.name}): {error}") from None
        except Exception as error:
            raise ValueError(self._refusal(i, args, error)) from error

    def _carried(self, i: int, args: tuple) -> Carried:
        """What layer `i` hands on from slice to slice."""
        assert self.slices is not None
        layer, inputs = self.layers[i], args[0][0] if self._takes_sums(i) else args[0]
        run = run_layer(layer, self.compute_dtype)
        key = jax.eval_shape(self._typed_key, self._key)
        return self.slices.carried(run, layer.parameters, layer.state, key, from_numbers((inputs, *args[1:])))

    def _annotations(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: honours sharding annotations unless a strategy is given."""
        if self.splits and self._automatic is not None:
            return unannotated_on(self._automatic)
        return constraints_on(self.mesh, self.axis_rules)

    def _refusal(self, i: int, args: tuple, error: BaseException) -> str:
        """The message for a layer that cannot take its arguments."""
        layer = self.layers[i]
        taken = args[0] if len(args) == 1 else args
        message = f"layer {i} ({layer.name}) cannot take {arguments_text(taken)}: {error}"
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

    def _function(self, i: int, update: StateUpdate) -> Callable[..., tuple[tuple, Any]]:
        """Returns layer `i` in the form of `trace_layer`; its aux moves its state, see `StateUpdate.results`."""
        layer = self.layers[i]
        dtype = self._output_dtype() if self._is_last(i) else self.compute_dtype

        def function(parameters: Any, args: tuple, extra: Any) -> tuple[tuple, Any]:
            given: list[jax.Array] = []
            if self.slices is not None:
                args, given = args[:-1], args[-1]
            args = from_numbers(args)
            if self._takes_sums(i):
                (inputs, sums), *popped = args
                args = (inputs, *popped)
            else:
                sums = {n: jnp.zeros((), a.dtype) for n, a in self.reports.items()}
            if not self.training:
                parameters, args = cast((parameters, args), self.compute_dtype)
                outputs = layer.evaluate(parameters, extra["state"], args)
                return as_numbers(cast(layer.outputs(outputs), dtype)), ()
            key = self._typed_key(extra["key"])
            run = run_layer(layer, self.compute_dtype)
            if self.splits and self._automatic is not None:
                run = self.splits[i].applied(run, self._automatic)
            if self.slices is None:
                (outputs, reported), moving = update.results(run, parameters, extra["state"], key, args)
                return self._with_sums(as_numbers(cast(outputs, dtype)), sums, reported), moving
            run = self.slices.handing_on(run)
            args = (args, given, extra["turn"])
            (outputs, reported, handed), moving = update.results(run, parameters, extra["state"], key, args)
            return (*self._with_sums(as_numbers(cast(outputs, dtype)), sums, reported), handed), moving

        return function

    def _takes_sums(self, i: int) -> bool:
        """Returns whether layer `i` takes the sums of values that layers before it have reported."""
        return bool(self.reports) and i > 0

    def _with_sums(self, outputs: tuple, sums: dict, reported: dict) -> tuple:
        """Adds the layer's reports to the sums. Returns `(outputs, *stashed)` with the sums beside the outputs."""
        for name, value in reported.items():
            dtype = np.result_type(self.reported.get(name, value).dtype, value.dtype)
            self.reported[name] = jax.ShapeDtypeStruct((), dtype)
        if not self.reports:
            return outputs
        first, *stashed = outputs
        sums = {name: a + reported[name].astype(a.dtype) if name in reported else a for name, a in sums.items()}
        return (first, sums), *stashed

    def _is_last(self, i: int) -> bool:
        return i == len(self.layers) - 1

    def _output_dtype(self) -> Any:
        """The dtype of the model's outputs: of its weights, and at least float32."""
        if self.compute_dtype is None:
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
