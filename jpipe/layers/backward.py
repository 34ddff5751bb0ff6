"""A layer's forward, input-gradient and weight-gradient programs, from `jax.vjp`.

A layer is traced once. Its forward, and the backward that `jax.vjp` returns, become two flat lists
of equations. All programs are slices of these lists:

    parameters, inputs ──> forward ──> outputs
                              │ residuals
        ┌─────────────────────┴──────────────────────┐
        stash: values of the forward,                rebuilt: depends on the parameters alone, or on
        kept once per microbatch                     the stash, in less time

    stash, rebuilt, output gradient ──> input_grad ──> input gradient
                                            │ split residuals
                                            └──> weight_grad ──> parameter gradients

`input_grad` has exactly the backward equations that the input gradient needs. `weight_grad` has the
remaining equations that the parameter gradients need. So no equation runs twice, and both together
are the whole backward. What is rebuilt is rebuilt by each half that reads it.
`jpipe/layers/residuals.py` chooses what is stashed.

Under a checkpoint policy the residuals are the layer's inputs and the values that the policy saves.
The backward then begins with the forward equations that run again; none of these runs in both halves.

Side effects (`jax.debug.print`, callbacks) run wherever the forward runs, also if no output needs
them. Side effects of the backward, which a policy or a custom derivative may have, run in
`input_grad`.

References:
  Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv:2401.10241, section 2 (the split).
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex

from jpipe.layers.avals import abstract, is_inexact, is_narrower, num_bytes
from jpipe.layers.equations import Equations, contains, variables
from jpipe.layers.flow import casts_of, inputs_read
from jpipe.layers.mapped_residuals import with_own_maps
from jpipe.layers.products import AS_TRACED, GradientForms, ProductForm, ProductRule, with_products
from jpipe.layers.rectified import with_compared_results
from jpipe.layers.residuals import COPIES, ELEMENTWISE_ONLY, FUSED, Rerun, Residuals
from jpipe.layers.vjp import (
    Arguments,
    Forward,
    aval_of,
    check_effects,
    check_offload,
    trace_backward,
    trace_forward,
)


@dataclasses.dataclass(frozen=True)
class StashedValue:
    """A value of the stash of a layer, which other layers may have as well.

    Attributes:
      input: the position of the input that it is; None: it is none.
      output: the position of the output that it is; None: it is none.
    """

    input: int | None = None
    output: int | None = None


@dataclasses.dataclass(frozen=True)
class LayerValues:
    """The values of a layer that other layers may have as well.

    Attributes:
      num_inputs: number of inputs.
      handed_on: for each output the position of the input that it is; None: it is computed.
      input_stash, weight_stash: the values in these parts of the stash.
    """

    num_inputs: int = 0
    handed_on: tuple[int | None, ...] = ()
    input_stash: tuple[StashedValue, ...] = ()
    weight_stash: tuple[StashedValue, ...] = ()


_LIGHT = {*FUSED, *COPIES, "reduce_sum"}
"""The primitives of gradients that take no time beside products of matrices."""


@dataclasses.dataclass(frozen=True)
class LayerProgram:
    """The programs of one layer kind, all from and to flat lists of arrays.

    Only inexact leaves of inputs and outputs have gradients: `output_grads` and `input_grads` list
    only these. Of the parameters those have gradients that are `trained`.

    Attributes:
      forward: `(parameters, inputs, extra) -> (outputs, aux)`.
      forward_and_stash: `(parameters, inputs, extra) -> (outputs, stash, aux)`.
      backward: `(parameters, stash, output_grads) -> (parameter_grads, input_grads)`, the whole
        backward.
      input_grad: `(parameters, stash, output_grads) -> (input_grads, split_residuals)`. Of the
        stash it reads `input_stash` and perhaps `weight_stash`.
      weight_grad: `(parameters, stash, split_residuals) -> parameter_grads`. Of the stash it reads
        only `weight_stash`. In all three backwards `parameters` is followed by the constants of `extra`, and by the
        inputs that are `kept`.
      parameters, inputs, extra, outputs, aux, stash, split_residuals: abstract values of those
        lists.
      trained: positions in `parameters` of those that have gradients, in the order of `parameter_grads`. The others
        never change.
      constants: positions in `extra` of values that never change: a backward gets them again and not from the stash.
      num_carried: number of the last inputs, and of the last outputs, that go from a slice of a sequence to the next
        one, see `jpipe._slices`.
      kept: positions of those of these inputs that a backward gets again, because later slices only add to them.
      input_stash, weight_stash: disjoint positions in the stash: the values that only `input_grad`
        reads, and the values that `weight_grad` reads.
      reads_extra: per leaf of `extra`, whether anything reads it.
      outputs_read_extra: per leaf of `extra`, whether the outputs or the gradients depend on it.
      output_tree, aux_tree: the tree structures of outputs and aux.
      recomputes: whether the backward computes values of the forward again, because of `jax.checkpoint` or a policy.
      products: per trained parameter, the way from a product to its gradient; None where the gradient itself is
        computed.
        Elsewhere `backward` and `weight_grad` give a `jpipe.layers.products.Product`.
      forward_equations: the equations from parameters, inputs and extra to outputs, aux and residuals.
      text: the computation as text; layers with equal texts are of one kind.
      rerun: what the backward computes again. If parameters are at hand for that, they must be those of its forward.
      made: the programs for a value of `rerun`, made once.
      values: the inputs that it hands on, and all values of the stash in `input_stash`.
    """

    forward: Callable[..., Any]
    forward_and_stash: Callable[..., Any]
    backward: Callable[..., Any]
    input_grad: Callable[..., Any]
    weight_grad: Callable[..., Any]
    parameters: tuple
    inputs: tuple
    extra: tuple
    outputs: tuple
    aux: tuple
    stash: tuple
    split_residuals: tuple
    trained: tuple[int, ...]
    constants: tuple[int, ...]
    num_carried: int
    kept: tuple[int, ...]
    input_stash: tuple[int, ...]
    weight_stash: tuple[int, ...]
    reads_extra: tuple[bool, ...]
    outputs_read_extra: tuple[bool, ...]
    output_tree: Any
    aux_tree: Any
    recomputes: bool
    products: tuple[ProductForm | None, ...]
    forward_equations: Equations
    text: str
    rerun: Rerun
    made: Callable[[Rerun], "LayerProgram"]
    values: LayerValues

    def rereading(self, weight_accesses: float) -> "LayerProgram":
        """The programs whose backward reads weights in what it computes again as `Rerun` says."""
        rerun = dataclasses.replace(self.rerun, weight_accesses=weight_accesses)
        return self if rerun == self.rerun else self.made(rerun)

    @property
    def calls(self) -> dict[str, tuple[Callable[..., Any], tuple]]:
        """ "forward", "backward", "input_grad" and "weight_grad", each with its abstract arguments."""
        at_hand = [*self.parameters, *self.at_hand(self.inputs, self.extra)]
        stash, output_grads = list(self.stash), [y for y in self.outputs if is_inexact(y)]
        return {
            "forward": (self.forward, (list(self.parameters), list(self.inputs), list(self.extra))),
            "backward": (self.backward, (at_hand, stash, output_grads)),
            "input_grad": (self.input_grad, (at_hand, stash, output_grads)),
            "weight_grad": (self.weight_grad, (at_hand, stash, list(self.split_residuals))),
        }

    def at_hand(self, inputs: Sequence, extra: Sequence) -> list:
        """What a backward gets again beside parameters."""
        return [*(extra[i] for i in self.constants), *(inputs[i] for i in self.kept)]

    @property
    def carried(self) -> tuple:
        """The abstract values that go from a slice of a sequence to the next one."""
        return self.inputs[len(self.inputs) - self.num_carried :]

    def outputs_on(self, differentiated: Collection[int]) -> list[bool]:
        """For each output whether it depends on parameters that are trained, or on inputs at some positions."""
        inputs = self.forward_equations.inputs
        positions = (*self.trained, *(len(self.parameters) + i for i in differentiated))
        depending = self.forward_equations.depending_on(inputs[j] for j in positions)
        return [not depending.isdisjoint(variables([y])) for y in self.forward_equations.outputs[: len(self.outputs)]]

    @functools.cached_property
    def read_dtypes(self) -> tuple:
        """For each parameter the dtype that every program reads it in: that of its casts, if it has fewer bytes.

        What a backward reads of parameters is computed by equations of the forward.
        """
        casts = casts_of(self.forward_equations, self.forward_equations.inputs[: len(self.parameters)])
        return tuple(
            cast if cast is not None and is_narrower(cast, a.dtype) else a.dtype
            for a, cast in zip(self.parameters, casts, strict=True)
        )

    @property
    def values_of_table(self) -> LayerValues:
        """Its `values`, in the parts of the stash."""
        parts = ([self.values.input_stash[i] for i in part] for part in (self.input_stash, self.weight_stash))
        return LayerValues(self.values.num_inputs, self.values.handed_on, *map(tuple, parts))

    @property
    def frozen(self) -> tuple[int, ...]:
        """Positions in `parameters` of those without gradients."""
        return tuple(j for j in range(len(self.parameters)) if j not in self.trained)

    @property
    def trained_parameters(self) -> tuple:
        """The abstract values of the parameters that have gradients."""
        return tuple(self.parameters[j] for j in self.trained)

    def stashed(self, name: str) -> tuple:
        """The abstract values of "input_stash" or "weight_stash"."""
        return tuple(self.stash[i] for i in getattr(self, name))

    def with_one_stash(self) -> "LayerProgram":
        """The programs for a table that does not split backwards: all of the stash is read at one time."""
        positions = tuple(sorted((*self.input_stash, *self.weight_stash)))
        return dataclasses.replace(self, input_stash=positions, weight_stash=(), split_residuals=())


def trace_layer(
    function: Callable[..., Any],
    parameters: Any,
    inputs: Any,
    extra: Any = (),
    *,
    frozen: Collection[int] = (),
    constants: Sequence[int] = (),
    num_carried: int = 0,
    kept: Sequence[int] = (),
    has_aux: bool = False,
    differentiated: Collection[int] | None = None,
    zero_input_grads: bool = True,
    policy: Callable[..., Any] | None = None,
    products: ProductRule = AS_TRACED,
    rerun: Rerun = ELEMENTWISE_ONLY,
) -> LayerProgram:
    """Traces `function(parameters, inputs, extra) -> outputs` into its programs.

    Args:
      function: the layer, from and to pytrees.
      parameters: pytree of abstract arrays, all inexact.
      inputs: pytree of abstract arrays.
      extra: pytree of abstract arrays that are not differentiated (the loss's batch, a layer's
        state and key).
      frozen: positions of leaves of `parameters` that never change, and have no gradients.
      constants: positions of leaves of `extra` that never change, such as state that no call writes.
      num_carried, kept: see `LayerProgram`.
      has_aux: whether the function returns `(outputs, aux)`; aux is a pytree of arrays that are not
        differentiated.
      differentiated: positions of leaves of `inputs` whose gradients something reads; others have none.
        None: all inexact leaves.
      zero_input_grads: whether zeros stand in the place of the gradients of the other inexact leaves.
      policy: one of `jax.checkpoint_policies`. The layer stashes its inputs and the values that the
        policy saves, and its backward computes all other values again. None stashes every residual.
      products: what is given in the place of gradients that are products.
      rerun: what the backward may compute again, so that the layer stashes less.

    Returns:
      The `LayerProgram`.

    Raises:
      OffloadError: if the policy offloads values to the memory of the host.
      OrderedEffectError: if the function has ordered side effects.
    """
    arguments = Arguments.flatten(parameters, inputs, extra)
    inexact = {i: x for i, x in enumerate(arguments.inputs) if is_inexact(x)}
    computed = [i for i in inexact if differentiated is None or i in differentiated]
    forward = trace_forward(function, arguments, has_aux, computed, policy, frozen)
    equations = with_own_maps(forward.equations, forward.residuals, lambda eqn: rerun.time(eqn) == 0)
    if rerun.compares_results:
        equations = with_compared_results(equations)
    forward = forward._replace(equations=equations)
    check_offload(forward.residuals)
    check_effects(forward.equations)
    zeros = {i: x for i, x in inexact.items() if zero_input_grads and i not in computed}
    traced = trace_backward(forward, computed, zeros)
    trained = tuple(j for j in range(len(arguments.parameters)) if j not in frozen)
    backward, gradients = with_products(traced, len(forward.residuals), len(trained), products)
    return _layer_program(
        arguments,
        trained,
        Given(tuple(constants), num_carried, tuple(kept)),
        forward,
        backward,
        gradients,
        recomputes=traced.has_checkpoint,
        rerun=rerun,
    )


# -- The two halves of the backward


def _split_backward(backward: Equations, residuals: Residuals, num_gradients: int) -> tuple[Equations, Equations, list]:
    """Splits the backward into the input-gradient half and the weight-gradient half.

    Args:
      backward: the whole.
      residuals: the residuals of the forward.
      num_gradients: number of its first outputs, which give the parameter gradients.

    Returns:
      Equations of the first half (its outputs are the input gradients and the split residuals),
      equations of the second half (its inputs are the residuals and the split residuals), and the
      split residuals.
    """
    parameter_grads = backward.outputs[:num_gradients]
    input_grads = backward.outputs[num_gradients:]
    output_grads = backward.inputs[len(residuals.inputs) :]

    def known_after(outputs: Sequence) -> set:
        return {v for eqn in backward.slice(backward.inputs, outputs, effects=True).equations for v in eqn.outvars}

    computed = known_after(input_grads)
    computed |= known_after(_summed_early(backward, {*backward.inputs, *computed}, parameter_grads))
    # Under a policy the backward may compute values from the parameters alone. The second half
    # computes these again rather than receive them.
    varying = backward.depending_on([*residuals.varying_inputs, *output_grads])
    known = computed.union(output_grads) & varying

    rest = backward.slice((*residuals.inputs, *known), parameter_grads)
    needed = (v for eqn in rest.equations for v in variables(eqn.invars))
    split_residuals = [v for v in dict.fromkeys((*needed, *variables(parameter_grads))) if v in known]
    for_inputs = backward.slice(backward.inputs, (*input_grads, *split_residuals), effects=True)
    for_weights = backward.slice((*residuals.inputs, *split_residuals), parameter_grads)
    return for_inputs, for_weights, split_residuals


def _summed_early(backward: Equations, at_hand: set, gradients: Sequence) -> list:
    """The parameter gradients that the input-gradient half should compute: sums that are smaller than what they sum.

    The gradient of a norm's scale is a sum of products of numbers that no product of matrices reads. The
    weight-gradient half would need all of these numbers.

    Args:
      backward: the whole.
      at_hand: the variables that the input-gradient half has anyway.
      gradients: the parameter gradients.
    """
    needed: dict[Any, set] = {v: {v} for v in at_hand}
    heavy: set = set()
    for eqn in backward.equations:
        if at_hand.isdisjoint(eqn.outvars):
            reads = variables(eqn.invars)
            needed |= dict.fromkeys(eqn.outvars, set().union(*(needed.get(v, ()) for v in reads)))
            if eqn.primitive.name not in _LIGHT or not heavy.isdisjoint(reads):
                heavy.update(eqn.outvars)
    left = [v for v in dict.fromkeys(variables(gradients)) if v not in at_hand]
    kept = {a for v in left if v in heavy for a in needed[v]}
    early = []
    for v in left:
        if v not in heavy and num_bytes(a.aval for a in needed[v] - kept) > num_bytes([v.aval]):
            early.append(v)
        else:
            kept |= needed[v]
    return early


# -- The programs


class Given(NamedTuple):
    """What a backward gets again beside parameters. `LayerProgram` describes the fields."""

    constants: tuple[int, ...]
    num_carried: int
    kept: tuple[int, ...]


def _layer_program(
    arguments: Arguments,
    trained: tuple[int, ...],
    given: Given,
    forward: Forward,
    backward: Equations,
    gradients: GradientForms,
    recomputes: bool,
    rerun: Rerun,
) -> LayerProgram:
    residuals = Residuals.of(forward, backward, arguments, trained, given.constants, given.kept, rerun)
    for_inputs, for_weights, split_residuals = _split_backward(backward, residuals, num_gradients=gradients.num_values)
    everything = backward.slice(backward.inputs, backward.outputs, effects=True)
    read_whole, read_inputs, read_weights = (residuals.reader(half) for half in (everything, for_inputs, for_weights))
    equations, stash = forward.equations, residuals.stash
    num_outputs, num_results = len(forward.outputs), forward.num_results
    num_gradients = gradients.num_values
    num_input_grads = len(backward.outputs) - num_gradients
    # Side effects run wherever the forward runs, although no output needs them.
    run_forward = equations.slice(equations.inputs, forward.results, effects=True)
    run_and_stash = equations.slice(equations.inputs, (*forward.results, *stash), effects=True)
    _, layer_inputs, extra_inputs = arguments.split(equations.inputs)
    # Aux alone, such as the new state, does not make outputs or gradients depend on `extra`.
    for_outputs = (*forward.results[:num_outputs], *stash)
    read = run_and_stash.read()
    read_by_outputs = inputs_read(equations, for_outputs)

    def only_forward(parameters: Sequence, inputs: Sequence, extra: Sequence = ()) -> tuple:
        out = run_forward(*parameters, *inputs, *extra)
        return out[:num_outputs], out[num_outputs:]

    def forward_and_stash(parameters: Sequence, inputs: Sequence, extra: Sequence = ()) -> tuple:
        out = run_and_stash(*parameters, *inputs, *extra)
        return out[:num_outputs], out[num_results:], out[num_outputs:num_results]

    def whole(parameters: Sequence, stash: Sequence, output_grads: Sequence) -> tuple:
        out = read_whole.run(parameters, stash, output_grads)
        return gradients.gradients(out[:num_gradients]), out[num_gradients:]

    def input_grad(parameters: Sequence, stash: Sequence, output_grads: Sequence) -> tuple:
        out = read_inputs.run(parameters, stash, output_grads)
        return out[:num_input_grads], out[num_input_grads:]

    def weight_grad(parameters: Sequence, stash: Sequence, split_residuals: Sequence) -> list:
        out = read_weights.run(parameters, stash, split_residuals)
        return gradients.gradients(out)

    return LayerProgram(
        forward=only_forward,
        forward_and_stash=forward_and_stash,
        backward=whole,
        input_grad=input_grad,
        weight_grad=weight_grad,
        parameters=abstract(tuple(arguments.parameters)),
        inputs=abstract(tuple(arguments.inputs)),
        extra=abstract(tuple(arguments.extra)),
        outputs=tuple(forward.outputs),
        aux=tuple(aval_of(v) for v in forward.aux),
        stash=tuple(aval_of(v) for v in stash),
        split_residuals=tuple(aval_of(v) for v in split_residuals),
        trained=trained,
        **given._asdict(),
        # What both halves read stays until the second one has run.
        input_stash=tuple(sorted(read_inputs.reads - read_weights.reads)),
        weight_stash=tuple(sorted(read_weights.reads)),
        reads_extra=tuple(v in read for v in extra_inputs),
        outputs_read_extra=tuple(v in read_by_outputs for v in extra_inputs),
        output_tree=forward.output_tree,
        aux_tree=forward.aux_tree,
        recomputes=recomputes,
        products=tuple(f and f[0] for f in gradients.forms),
        forward_equations=equations,
        text=_text(arguments, forward, backward, trained),
        rerun=rerun,
        made=functools.cache(
            functools.partial(_layer_program, arguments, trained, given, forward, backward, gradients, recomputes)
        ),
        values=_layer_values(layer_inputs, forward.results[:num_outputs], stash, given.num_carried),
    )


def _layer_values(inputs: Sequence, outputs: Sequence, stash: Sequence, num_carried: int) -> LayerValues:
    """The values of a layer, from its variables. What goes from slice to slice, at the end, no other layer has."""
    inputs, outputs = inputs[: len(inputs) - num_carried], outputs[: len(outputs) - num_carried]
    input_at = {v: i for i, v in enumerate(inputs)}
    output_at: dict[Any, int] = {}
    for i, v in enumerate(outputs):
        if not isinstance(v, jex.Literal):
            output_at.setdefault(v, i)
    handed_on = tuple(input_at[v] if contains(input_at, v) else None for v in outputs)
    return LayerValues(len(inputs), handed_on, tuple(StashedValue(input_at.get(v), output_at.get(v)) for v in stash))


def _text(arguments: Arguments, forward: Forward, backward: Equations, trained: tuple[int, ...]) -> str:
    trees = (
        arguments.input_tree,
        forward.output_tree,
        forward.aux_tree,
    )
    texts = [forward.equations.text(), backward.text(), *map(str, trees)]
    if len(trained) < len(arguments.parameters):
        texts.append(f"trained {trained}")
    return "\n".join(texts)
