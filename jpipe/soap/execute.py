"""Runs a function as a strategy splits it: sharding constraints on the operands and results of its equations.

Where XLA's partitioner sends more than the strategy implies, devices fetch what they read instead: see
`jpipe.soap.exchange`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jpipe.layers.equations import loop_counts
from jpipe.soap import exchange
from jpipe.soap.flatten import CALLS, called
from jpipe.soap.graph import OperatorGraph
from jpipe.soap.moves import Spec, Step, as_entries
from jpipe.soap.specs import factor_axes
from jpipe.soap.splits import EquationSplit, Plan, splits
from jpipe.soap.strategy import Strategy

_VIEWS = {"expand_dims", "reshape", "rev", "slice", "split", "squeeze", "transpose"}
_OWN_DERIVATIVES = {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}


def device_mesh(devices: Sequence | int) -> Mesh:
    """A mesh of prime factors for `apply`.

    Args:
      devices: the devices, or how many of `jax.devices()`.

    Raises:
      ValueError: if there are too few devices.
    """
    if isinstance(devices, int):
        if not 1 <= devices <= len(jax.devices()):
            raise ValueError(f"a mesh of {devices} devices was asked for, and there are {len(jax.devices())}.")
        devices = jax.devices()[:devices]
    sizes = factor_axes("device", len(devices))
    grid = np.array(devices).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def apply(
    function: Callable[..., Any],
    graph: OperatorGraph,
    strategy: Strategy,
    mesh: Mesh,
) -> Callable[..., Any]:
    """A function as a strategy splits it.

    The result is differentiated and compiled as any function. Its numbers are those of `function`, but for the order of
    sums. Weights are split as their first readers want them; `argument_shardings` places them so before the call.

    A loop is unrolled where turns are split differently. A function with derivative rules of its own (`jax.custom_jvp`,
    `jax.custom_vjp`) keeps them, and only its arguments and results are constrained.

    Args:
      function: the function that `graph` was traced from.
      graph: the result of `jpipe.soap.trace`, for arguments of the same shapes.
      strategy: a configuration per operator. Each uses the whole mesh.
      mesh: its axes are left to the compiler. Devices of the strategy are numbered along it, the last axis fastest.
        `device_mesh` makes one whose axes can split several loops.

    Returns:
      A function of the arguments of `function`.

    Raises:
      ValueError: if a configuration does not use the whole mesh, which the message names; and at the call if the
        arguments have other shapes than those of the graph.

    Example:
      >>> import jax.numpy as jnp
      >>> from jpipe import soap
      >>> def function(weights, x):
      ...     return jnp.tanh(x @ weights)
      >>> arrays = jnp.ones((4, 4)), jnp.ones((8, 4))
      >>> graph = soap.trace(function, *arrays)
      >>> split = soap.apply(
      ...     function, graph, soap.megatron(graph, 1), soap.device_mesh(1)
      ... )
      >>> bool(jnp.allclose(jax.jit(split)(*arrays), function(*arrays)))
      True
    """
    graph_split = splits(graph, strategy, mesh.shape)
    split = with_splits(function, graph_split.plan, mesh)

    def run(weights: Any, *inputs: Any) -> Any:
        leaves, tree = jax.tree.flatten(weights)
        leaves = [_constrained(a, s, mesh) for a, s in zip(leaves, graph_split.arguments)]
        return split(tree.unflatten(leaves), *inputs)

    return run


def _constrained(value: jax.Array, spec: Spec, mesh: Mesh) -> jax.Array:
    return lax.with_sharding_constraint(value, _sharding(mesh, spec))


def _sharding(mesh: Mesh, spec: Spec) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*as_entries(spec)))


def argument_shardings(graph: OperatorGraph, strategy: Strategy, mesh: Mesh) -> list[NamedSharding]:
    """The shardings of the arguments of the function, flat: each as its first reader splits it."""
    return [_sharding(mesh, spec) for spec in splits(graph, strategy, mesh.shape).arguments]


def with_splits(function: Callable[..., Any], plan: Plan, mesh: Mesh) -> Callable[..., Any]:
    """A function whose equations are split.

    Args:
      function: a function of pytrees of arrays.
      plan: the splits of its equations.
      mesh: its axes are left to the compiler.
    """
    run = _Run(mesh)

    def split(*args: Any) -> Any:
        closed, results = jax.make_jaxpr(function, return_shape=True)(*args)
        leaves = run(closed.jaxpr, closed.consts, jax.tree.leaves(args), plan)
        return jax.tree.unflatten(jax.tree.structure(results), leaves)

    return split


class _View(NamedTuple):
    """An array seen through reshapes, transposes, slices and reversals.

    Attributes:
      source: the array.
      equations: the equations in their order.
    """

    source: Any
    equations: tuple[Any, ...]


class _Run:
    """Evaluates jaxprs with constraints."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh

    def __call__(
        self,
        jaxpr: Any,
        consts: Sequence,
        args: Sequence,
        plan: Plan,
        views: Sequence[_View | None] = (),
    ) -> list:
        """The results of a jaxpr. `views` are of the arguments, as far as they are known."""
        env = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, args))
        seen: dict[Any, _View | None] = dict(zip(jaxpr.invars, views))

        def value(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else env[atom]

        for number, eqn in enumerate(jaxpr.eqns):
            below = plan.get(number)
            values = [value(v) for v in eqn.invars]
            seen_views = [None if isinstance(v, core.Literal) else seen.get(v) for v in eqn.invars]
            outputs = self._equation(eqn, values, below, seen_views)
            env.update(zip(eqn.outvars, outputs))
            if not below and eqn.primitive.name in _VIEWS:
                source, steps = seen_views[0] or _View(values[0], ())
                seen |= {v: _View(source, (*steps, eqn)) for v in eqn.outvars}
        return [value(v) for v in jaxpr.outvars]

    def _constrained(self, values: Sequence, specs: Sequence[Spec | None]) -> list:
        return [
            v
            if s is None or np.ndim(v) == 0 or not jnp.issubdtype(v.dtype, np.number)
            else _constrained(v, s, self._mesh)
            for v, s in zip(values, specs)
        ]

    def _moved(self, value: Any, spec: Spec, steps: Sequence[Step]) -> Any:
        """A value that is split in one way, in steps split in another way."""
        for step in steps:
            if step.is_fetched:
                value = exchange.resplit(value, spec, step.spec, self._mesh)
            (value,) = self._constrained([value], [step.spec])
            spec = step.spec
        return value

    def _operand(self, value: Any, split: EquationSplit, position: int, view: _View | None = None) -> Any:
        """An operand of an equation, as it reads it."""
        move, after = split.moves[position], split.inputs[position]
        if not move.shapes:
            value = self._moved(value, move.source, move.steps)
        elif view is not None and np.shape(view.source) == move.shapes[0]:
            shapes = move.shapes[1:]
            if move.window is None:
                value = self._moved(view.source, move.source, move.steps)
                for eqn in view.equations:
                    (value,) = exchange.bind(eqn, [value], eqn.params)
            elif len(view.equations) == len(shapes):
                assert after is not None, "a window is fetched for a split"
                steps = tuple(zip(view.equations, shapes))
                args = view.source, move.window, steps, after
                return exchange.fetch_view(*args, self._mesh)
        return self._constrained([value], [after])[0]

    def _arguments(
        self,
        jaxpr: Any,
        known: Mapping[Any, Any],
        plan: Plan,
        views: Mapping[Any, _View | None],
    ) -> dict:
        """The arguments of a called jaxpr, by variable, each in the split of the first equation that reads it; `views`
        are of them.
        """
        moved: dict[Any, Any] = {}
        for number, eqn in enumerate(jaxpr.eqns):
            below = plan.get(number)
            for position, v in enumerate(eqn.invars):
                if isinstance(v, core.Literal) or v not in known or v in moved:
                    continue
                moved[v] = known[v]
                if isinstance(below, EquationSplit):
                    moved[v] = self._operand(known[v], below, position, views.get(v))
                elif below and eqn.primitive.name in CALLS:
                    inner = called(eqn)[0]
                    name = inner.invars[position]
                    args = {name: known[v]}, below, {name: views.get(v)}
                    moved[v] = self._arguments(inner, *args)[name]
        return {**known, **moved}

    def _equation(self, eqn: Any, values: Sequence, plan: Any, views: Sequence[_View | None]) -> list:
        name = eqn.primitive.name
        if isinstance(plan, EquationSplit):
            _check_same(eqn, plan)
            values = [self._operand(value, plan, i, view) for i, (value, view) in enumerate(zip(values, views))]
            if plan.exchange is not None:
                return exchange.run(eqn, values, plan.exchange, self._mesh)
            outputs = exchange.bind(eqn, values, eqn.params)
            return self._constrained(outputs, plan.outputs)
        if not plan:
            return exchange.bind(eqn, values, eqn.params)
        if name == "scan":
            return self._scan(eqn, values, plan)
        if name not in CALLS:
            raise ValueError(_other_function(f"`{name}` where it had a call"))
        jaxpr, consts = called(eqn)
        if name in _OWN_DERIVATIVES:
            known = dict(zip(jaxpr.invars, values))
            known_views = dict(zip(jaxpr.invars, views))
            arguments = self._arguments(jaxpr, known, plan, known_views)
            values = [arguments[v] for v in jaxpr.invars]
            if name == "custom_jvp_call":
                results = _with_early_residuals(eqn)(*values)
            else:
                results = exchange.bind(eqn, values, eqn.params)
            return self._constrained(results, _result_specs(jaxpr, plan))
        if name == "remat2":
            again = jax.checkpoint(
                lambda *args: self(jaxpr, consts, args, plan),
                prevent_cse=eqn.params["prevent_cse"],
                policy=eqn.params["policy"],
            )
            return again(*values)
        return self(jaxpr, consts, values, plan, views)

    def _scan(self, eqn: Any, values: Sequence, plan: Plan) -> list:
        """Runs a loop as one loop per run of turns that have the same split."""
        params, body = eqn.params, eqn.params["jaxpr"]
        num_consts, num_carry = loop_counts(params)
        consts, carry = values[:num_consts], values[num_consts:][:num_carry]
        xs = values[num_consts + num_carry :]
        turn_plans = {k[0]: inner for k, inner in plan.items() if k[0] != "stack"}
        turns = max((k[1] for k in plan if k[0] != "stack"), default=1)
        turn_length = params["length"] // turns
        order = range(turns)[::-1] if params["reverse"] else range(turns)
        pieces = []
        runs: list[list[int]] = []
        for turn in order:
            if runs and turn_plans.get(turn) == turn_plans.get(runs[-1][-1]):
                runs[-1].append(turn)
            else:
                runs.append([turn])
        for run in runs:
            inner = turn_plans.get(run[0], {})

            def turn_of(carry: Sequence, x: Sequence, inner: Plan = inner) -> tuple:
                out = self(body.jaxpr, body.consts, [*consts, *carry, *x], inner)
                return out[:num_carry], out[num_carry:]

            low, high = min(run) * turn_length, (max(run) + 1) * turn_length
            rows = [x if len(runs) == 1 else x[low:high] for x in xs]
            ys: Sequence[jax.Array]
            carry, ys = lax.scan(
                turn_of,
                carry,
                rows,
                length=high - low,
                reverse=params["reverse"],
                unroll=params["unroll"] if len(runs) == 1 else 1,
            )
            pieces.append(ys)
        if params["reverse"]:
            pieces.reverse()
        stacks = [a[0] if len(a) == 1 else jnp.concatenate(a) for a in zip(*pieces)]
        stacked = [plan.get(("stack", i)) for i in range(len(stacks))]
        specs = [None if split is None else split.outputs[0] for split in stacked]
        return [*carry, *self._constrained(stacks, specs)]


def _with_early_residuals(eqn: Any) -> Callable[..., list]:
    """An equation whose residuals are computed together with its results.

    XLA's scheduler for TPUs may compute the mask of a ReLU in the backward, and hold the float32 array below it until
    then, which takes four times as many bytes. A barrier over results and residuals keeps it from that.
    """

    @jax.custom_jvp
    def function(*values: Any) -> list:
        return exchange.bind(eqn, values, eqn.params)

    @function.defjvp
    def derivative(values: Sequence, tangents: Sequence) -> tuple:
        results, linear = jax.linearize(lambda *args: exchange.bind(eqn, args, eqn.params), *values)
        residuals, tree = jax.tree.flatten(linear)
        results, residuals = lax.optimization_barrier((results, residuals))
        return results, tree.unflatten(residuals)(*tangents)

    return function


def _result_specs(jaxpr: Any, plan: Plan) -> list[Spec | None]:
    """The splits of the results of a called jaxpr; None for a result that no equation of the plan makes."""
    specs: dict[Any, Spec | None] = {}
    for number, eqn in enumerate(jaxpr.eqns):
        below = plan.get(number)
        if isinstance(below, EquationSplit):
            specs.update(zip(eqn.outvars, below.outputs))
        elif below and eqn.primitive.name in CALLS:
            specs.update(zip(eqn.outvars, _result_specs(called(eqn)[0], below)))
    return [None if isinstance(v, core.Literal) else specs.get(v) for v in jaxpr.outvars]


def _check_same(eqn: Any, split: EquationSplit) -> None:
    shapes = tuple(tuple(v.aval.shape) for v in eqn.outvars)
    if (eqn.primitive.name, shapes) != (split.primitive, split.shapes):
        raise ValueError(
            _other_function(
                f"`{eqn.primitive.name}` of shape {shapes} where it had `{split.primitive}` of shape {split.shapes}"
            )
        )


def _other_function(what: str) -> str:
    return (
        f"the function has {what} when the graph was traced: function and arguments must be those of the graph. Trace "
        "it again for these shapes and dtypes."
    )
