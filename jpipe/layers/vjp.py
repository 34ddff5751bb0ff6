"""The forward and the backward of a layer as equations, traced by `jax.vjp`."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.layers.avals import is_inexact, is_real
from jpipe.layers.equations import Equations, variables
from jpipe.layers.numbers import as_numbers, from_numbers


class OffloadError(ValueError):
    """A checkpoint policy would keep values in the memory of the host."""


class OrderedEffectError(ValueError):
    """A layer has side effects that must run in one order."""


# -- Arguments


class Arguments(NamedTuple):
    """The arguments of a layer as flat lists of abstract arrays, with their tree structures."""

    parameters: list
    inputs: list
    extra: list
    parameter_tree: Any
    input_tree: Any
    extra_tree: Any

    @classmethod
    def flatten(cls, parameters: Any, inputs: Any, extra: Any) -> "Arguments":
        flat = [jax.tree.flatten(tree) for tree in (parameters, inputs, extra)]
        return cls(*(leaves for leaves, _ in flat), *(tree for _, tree in flat))

    def split(self, leaves: Sequence) -> tuple[list, list, list]:
        """The leaves of all three arguments in one list -> one list per argument."""
        p = len(self.parameters)
        x = p + len(self.inputs)
        return list(leaves[:p]), list(leaves[p:x]), list(leaves[x:])

    def unflatten(self, parameters: list, inputs: list, extra: list) -> tuple:
        return (
            self.parameter_tree.unflatten(parameters),
            self.input_tree.unflatten(inputs),
            self.extra_tree.unflatten(extra),
        )


# -- Tracing


class Forward(NamedTuple):
    """The traced forward: its results are outputs, aux and the residuals of the backward."""

    equations: Equations
    outputs: list  # abstract
    output_tree: Any
    aux_tree: Any
    vjp_tree: Any

    @property
    def num_results(self) -> int:
        """The number of outputs and aux together."""
        return len(self.outputs) + self.aux_tree.num_leaves

    @property
    def results(self) -> tuple:
        return self.equations.outputs[: self.num_results]

    @property
    def aux(self) -> tuple:
        return self.results[len(self.outputs) :]

    @property
    def residuals(self) -> tuple:
        return self.equations.outputs[self.num_results :]


def trace_forward(
    function: Callable[..., Any],
    arguments: Arguments,
    has_aux: bool,
    differentiated: Sequence[int],
    policy: Callable[..., Any] | None,
    frozen: Collection[int] = (),
) -> Forward:
    trees: dict[str, Any] = {}
    trained = [i for i in range(len(arguments.parameters)) if i not in frozen]

    def call(ps: list, xs: list, es: list) -> tuple[list, list]:
        out = function(*arguments.unflatten(ps, xs, es))
        out, aux = out if has_aux else (out, ())
        flat, trees["output"] = jax.tree.flatten(out)
        flat_aux, trees["aux"] = jax.tree.flatten(aux)
        return [jnp.asarray(y) for y in flat], [jnp.asarray(a) for a in flat_aux]

    if policy is not None:
        call = jax.checkpoint(call, policy=_without_complex(policy))

    def with_residuals(*args: jax.Array) -> list:
        ps, xs, es = arguments.split(args)

        def differentiated_call(weights: list, values: list) -> tuple[list, list]:
            return call(_filled(ps, trained, weights), _filled(xs, differentiated, values), es)

        given = [ps[i] for i in trained], [xs[i] for i in differentiated]
        ys, vjp, aux = jax.vjp(differentiated_call, *given, has_aux=True)
        # `jax.checkpoint` hands literals on as numbers.
        ys, aux = ([jnp.asarray(value) for value in values] for values in (ys, aux))
        residuals, trees["vjp"] = jax.tree.flatten(as_numbers(vjp))
        trees["outputs"] = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in ys]
        return [*ys, *aux, *residuals]

    equations = Equations.trace(with_residuals, *arguments.parameters, *arguments.inputs, *arguments.extra)
    return Forward(equations, trees["outputs"], trees["output"], trees["aux"], trees["vjp"])


def _filled(values: Sequence, positions: Sequence[int], others: Sequence) -> list:
    """The values, with others at some positions."""
    filled = list(values)
    for i, value in zip(positions, others, strict=True):
        filled[i] = value
    return filled


def _without_complex(policy: Callable[..., Any]) -> Callable[..., Any]:
    """A policy that computes complex values again, because `jax.checkpoint` cannot save any: it would round them."""

    def saves(primitive: Any, *avals: Any, **params: Any) -> Any:
        saved = policy(primitive, *avals, **params)
        if saved is False:
            return saved
        called = params.get("call_jaxpr")  # of a function with a derivative of its own
        if called is not None:
            results = called.out_avals
        else:
            results, _ = primitive.abstract_eval(*avals, **params)
            results = results if primitive.multiple_results else [results]
        complex_results = [is_inexact(a) and not is_real(a) for a in results]
        return False if any(complex_results) else saved

    return saves


def trace_backward(forward: Forward, differentiated: Sequence[int], zeros: Mapping[int, Any]) -> Equations:
    """The backward: residuals and output gradients to gradients of parameters, then of inputs.

    Args:
      forward: the forward.
      differentiated: positions of the inputs whose gradients it computes, as for `trace_forward`.
      zeros: position -> abstract input, of those whose gradients are zeros.
    """
    num_residuals = len(forward.residuals)

    def backward(*args: jax.Array) -> list:
        leaves, inexact = args[:num_residuals], iter(args[num_residuals:])
        output_grads = [
            next(inexact) if is_inexact(y) else np.zeros(y.shape, jax.dtypes.float0) for y in forward.outputs
        ]
        vjp = from_numbers(jax.tree.unflatten(forward.vjp_tree, leaves))
        parameter_grads, computed = vjp(output_grads)
        input_grads = dict(zip(differentiated, computed, strict=True))
        input_grads |= {i: jnp.zeros(x.shape, x.dtype) for i, x in zeros.items()}
        return [*parameter_grads, *(input_grads[i] for i in sorted(input_grads))]

    output_grads = [y for y in forward.outputs if is_inexact(y)]
    return Equations.trace(backward, *(aval_of(v) for v in forward.residuals), *output_grads)


def check_offload(residuals: Sequence) -> None:
    for v in variables(residuals):
        if v.aval.memory_space == jax.memory.Space.Host:
            raise OffloadError(
                f"the policy of `recompute` offloads {v.aval.dtype}{list(v.aval.shape)} to the "
                "memory of the host, and the pipeline keeps values in flight on their device. Use a "
                "policy that saves or recomputes the value, such as "
                "`jax.checkpoint_policies.save_only_these_names(...)`."
            )


def check_effects(forward: Equations) -> None:
    ordered = sorted(str(e) for e in forward.effects() if "Ordered" in str(e))
    if ordered:
        raise OrderedEffectError(
            f"it has ordered side effects ({', '.join(ordered)}), and the devices of a pipeline run at "
            "the same time, so there is no order. Leave out `ordered=True`."
        )


def aval_of(v: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
