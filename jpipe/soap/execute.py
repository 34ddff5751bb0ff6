"""Runs a function as a strategy splits it: sharding constraints on the operands and results of its equations."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jpipe.soap.flatten import CALLS, called
from jpipe.soap.graph import REDUCTION, Operator, OperatorGraph
from jpipe.soap.regions import Access, followed
from jpipe.soap.strategy import Config, Strategy, check_strategy

_OWN_DERIVATIVES = {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}

Spec = tuple[tuple[str, ...], ...]
"""The axes of the mesh over which each dim is split."""


def factor_axes(name: str, size: int) -> dict[str, int]:
    """Axes of prime sizes that together have as many devices as one axis.

    Example:
      >>> factor_axes("model", 12), factor_axes("model", 3)
      ({'model_0': 2, 'model_1': 2, 'model_2': 3}, {'model': 3})
    """
    primes, rest = [], size
    for factor in range(2, size + 1):
        while rest % factor == 0:
            primes.append(factor)
            rest //= factor
    if len(primes) < 2:
        return {name: size}
    return {f"{name}_{i}": prime for i, prime in enumerate(primes)}


def factored(mesh: Mesh, name: str) -> Mesh:
    """A mesh in which an axis is replaced by axes of prime sizes, so that several loops of an operator can be split over it."""
    sizes: dict[str, int] = {}
    for axis, size in mesh.shape.items():
        sizes |= factor_axes(axis, size) if axis == name else {axis: size}
    kinds = (AxisType.Auto,) * len(sizes)
    return Mesh(
        mesh.devices.reshape(tuple(sizes.values())), tuple(sizes), axis_types=kinds
    )


def device_mesh(devices: Sequence | int) -> Mesh:
    """A mesh of prime factors for `apply`.

    Args:
      devices: the devices, or how many of `jax.devices()`.

    Raises:
      ValueError: if there are too few devices.
    """
    if isinstance(devices, int):
        if not 1 <= devices <= len(jax.devices()):
            raise ValueError(
                f"a mesh of {devices} devices was asked for, and there are {len(jax.devices())}."
            )
        devices = jax.devices()[:devices]
    whole = Mesh(np.array(devices), ("device",), axis_types=(AxisType.Auto,))
    return factored(whole, "device")


def loop_axes(config: Config, sizes: Mapping[str, int]) -> list[tuple[str, ...]] | None:
    """The axes of a mesh over which a configuration splits each loop; None if its devices are no part of the mesh.

    Devices are numbered along the mesh with the last axis running fastest. Axes that split no loop hold copies, so fewer shards than
    devices must begin at device 0.

    Args:
      config: degrees, and the device of each shard.
      sizes: axis -> number of devices.

    Example:
      >>> loop_axes(Config((2, 2), (0, 2, 1, 3)), {"a": 2, "b": 2})
      [('b',), ('a',)]
      >>> loop_axes(Config((1,), (2,)), {"a": 2, "b": 2}) is None
      True
    """
    devices = np.array(config.devices).reshape(config.degrees)
    strides: dict[int, str] = {}
    stride = math.prod(sizes.values())
    for name, size in sizes.items():
        stride //= size
        if size > 1:
            strides[stride] = name
    grid = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    result: list[tuple[str, ...]] = []
    for i, degree in enumerate(config.degrees):
        along = devices[tuple(slice(None) if k == i else 0 for k in range(devices.ndim))].ravel()
        names: list[str] = []
        count = 1
        while count < degree:
            name = strides.pop(int(along[count]), None)
            if name is None or degree % (count * sizes[name]):
                return None
            names.insert(0, name)
            count *= sizes[name]
        result.append(tuple(names))
    order = list(sizes)
    used = [order.index(name) for names in result for name in names]
    first = grid[tuple(slice(None) if k in used else 0 for k in range(grid.ndim))]
    kept = sorted(used)
    turned = first.transpose([kept.index(k) for k in used]).reshape(config.degrees)
    return result if np.array_equal(turned, devices) else None


@dataclasses.dataclass(frozen=True)
class Split:
    """How one equation is split.

    Attributes:
      primitive: its name.
      shapes: of its outputs.
      inputs: per operand; None leaves the operand to the compiler.
      outputs: per result.
    """

    primitive: str
    shapes: tuple[tuple[int, ...], ...]
    inputs: tuple[Spec | None, ...]
    outputs: tuple[Spec, ...]


Plan = Mapping[Any, Any]
"""`Split`s by the numbers of their equations; below a call or a loop stands the plan of its body. See `jpipe.soap.flatten.Place`."""


@dataclasses.dataclass(frozen=True)
class Splits:
    """A strategy as splits of equations and arguments.

    Attributes:
      arguments: per argument of the function, flat: how its first reader splits it.
      plan: of the equations.
    """

    arguments: Sequence[Spec]
    plan: Plan


def splits(
    graph: OperatorGraph, strategy: Sequence[Config], sizes: Mapping[str, int]
) -> Splits:
    """A strategy as splits over the axes of a mesh.

    Args:
      graph: of `jpipe.soap.trace`.
      strategy: a configuration per operator.
      sizes: axis of the mesh -> number of devices.

    Raises:
      ValueError: if an operator does not run on the whole mesh, in the order of its axes.
    """
    check_strategy(graph, strategy, math.prod(sizes.values()))
    of_loops = []
    for operator, config in zip(graph.operators, strategy):
        axes = loop_axes(config, sizes)
        if axes is None:
            raise ValueError(_no_mesh(operator, config, sizes))
        of_loops.append(axes)
    plan: dict = {}
    for operator, config, axes in zip(graph.operators, strategy, of_loops):
        for member in operator.equations:
            *above, last = member.equation.place
            inner = plan
            for step in above:
                inner = inner.setdefault(step, {})
            inner[last] = _split(operator, config, member, axes, sizes)
    readers = graph.readers_of_weight
    arguments: list[Spec] = []
    for number, tensor in enumerate(graph.tensors):
        if tensor.producer is not None:
            continue
        spec: Spec = ((),) * len(tensor.shape)
        if number in readers:
            i, position = readers[number][0]
            access = graph.operators[i].inputs[position].access
            spec = _read(tensor.shape, access, of_loops[i], sizes) or spec
        arguments.append(spec)
    return Splits(arguments, plan)


def _no_mesh(operator: Operator, config: Config, sizes: Mapping[str, int]) -> str:
    axes = " x ".join(f"{name}={size}" for name, size in sizes.items())
    return (
        f"operator {operator.name!r} with degrees {config.degrees} on devices {config.devices} is no split over the mesh {axes}: an "
        "operator runs on the whole mesh, its loops split over axes of it. Search with `Space(graph, num_devices, "
        "executable=True)` (`train/search.py --executable`), and put operators that run on other devices into other stages of a "
        "pipeline."
    )


def _split(
    operator: Operator,
    config: Config,
    member: Any,
    axes: Sequence[tuple[str, ...]],
    sizes: Mapping[str, int],
) -> Split:
    equation = member.equation
    inputs = tuple(
        _read(value.shape, access, axes, sizes)
        for value, access in zip(equation.inputs, member.reads)
    )
    outputs = []
    for value, dims in zip(equation.outputs, member.writes):
        spec = [() if d is None else axes[d] for d in dims]
        terms = [
            name
            for k, loop in enumerate(operator.loops)
            if loop.kind == REDUCTION and k not in dims
            for name in axes[k]
        ]
        outputs.append(_scattered(value.shape, spec, terms, sizes))
    shapes = tuple(value.shape for value in equation.outputs)
    return Split(equation.primitive, shapes, inputs, tuple(outputs))


def _parts(names: Sequence[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[name] for name in names)


def _scattered(
    shape: tuple[int, ...],
    spec: Sequence[tuple[str, ...]],
    terms: Sequence[str],
    sizes: Mapping[str, int],
) -> Spec:
    """How a result is split whose terms are added up over axes: each device keeps a part of the sum, along the longest dim."""
    result = list(spec)
    local = [n // _parts(names, sizes) for n, names in zip(shape, spec)]
    if terms and local:
        longest = int(np.argmax(local))
        if local[longest] % _parts(terms, sizes) == 0:
            result[longest] = (*result[longest], *terms)
    return tuple(result)


def _read(
    shape: tuple[int, ...],
    access: Access,
    axes: Sequence[tuple[str, ...]],
    sizes: Mapping[str, int],
) -> Spec | None:
    """How an operand is split that loops read; None if equal parts of the loops do not read about equal parts of it."""
    if not all(_is_even(step) for step in access):
        return None
    spec: list[tuple[str, ...]] = []
    used: set[str] = set()
    for size, loop in zip(shape, followed(access)):
        names = () if loop is None else axes[loop]
        if used.intersection(names) or size % _parts(names, sizes):
            names = ()
        used.update(names)
        spec.append(names)
    return tuple(spec)


def _is_even(step: Sequence) -> bool:
    """Whether parts of the array above need about equal parts of the one below, in order, as windows of convolutions do."""
    return all(
        each.dim is None
        or each.is_plain
        or (each.stride > 0 and -each.width < each.offset <= 0 and each.divisor == 1)
        for each in step
    )


def apply(
    function: Callable[..., Any],
    graph: OperatorGraph,
    strategy: Strategy,
    mesh: Mesh,
) -> Callable[..., Any]:
    """A function as a strategy splits it.

    The result is differentiated and compiled as any function. Its numbers are those of `function`, but for the order of sums. Weights are
    split as their first readers want them; `argument_shardings` places them so before the call.

    A loop is unrolled where turns are split differently. A function with derivative rules of its own (`jax.custom_jvp`,
    `jax.custom_vjp`) keeps them, and only its results are constrained.

    Args:
      function: that `graph` was traced from.
      graph: of `jpipe.soap.trace`, for arguments of the same shapes.
      strategy: a configuration per operator. Each uses the whole mesh.
      mesh: its axes are left to the compiler. Devices of the strategy are numbered along it, the last axis fastest. `device_mesh` makes
        one whose axes can split several loops.

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
    found = splits(graph, strategy, mesh.shape)

    def constrain(value: jax.Array, spec: Spec) -> jax.Array:
        return lax.with_sharding_constraint(
            value, NamedSharding(mesh, PartitionSpec(*(names or None for names in spec)))
        )

    split = with_splits(function, found.plan, constrain)

    def run(weights: Any, *inputs: Any) -> Any:
        leaves, tree = jax.tree.flatten(weights)
        leaves = [constrain(a, s) for a, s in zip(leaves, found.arguments)]
        return split(tree.unflatten(leaves), *inputs)

    return run


def argument_shardings(
    graph: OperatorGraph, strategy: Strategy, mesh: Mesh
) -> list[NamedSharding]:
    """How a strategy splits the arguments of its function, flat: weights as their first readers want them, other arguments not at all."""
    return [
        NamedSharding(mesh, PartitionSpec(*(names or None for names in spec)))
        for spec in splits(graph, strategy, mesh.shape).arguments
    ]


def with_splits(
    function: Callable[..., Any],
    plan: Plan,
    constrain: Callable[[jax.Array, Spec], jax.Array],
) -> Callable[..., Any]:
    """A function whose equations are split.

    Args:
      function: of pytrees of arrays.
      plan: how its equations are split.
      constrain: `(value, spec) -> value`.
    """
    run = _Run(constrain)

    def split(*args: Any) -> Any:
        closed, results = jax.make_jaxpr(function, return_shape=True)(*args)
        leaves = run(closed.jaxpr, closed.consts, jax.tree.leaves(args), plan)
        return jax.tree.unflatten(jax.tree.structure(results), leaves)

    return split


class _Run:
    """Evaluates jaxprs with constraints."""

    def __init__(self, constrain: Callable[[jax.Array, Spec], jax.Array]):
        self._constrain = constrain

    def __call__(self, jaxpr: Any, consts: Sequence, args: Sequence, plan: Plan) -> list:
        env = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, args))

        def value(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else env[atom]

        for number, eqn in enumerate(jaxpr.eqns):
            values = [value(v) for v in eqn.invars]
            env.update(zip(eqn.outvars, self._equation(eqn, values, plan.get(number))))
        return [value(v) for v in jaxpr.outvars]

    def _constrained(self, values: Sequence, specs: Sequence[Spec | None]) -> list:
        return [
            v
            if s is None or np.ndim(v) == 0 or not jnp.issubdtype(v.dtype, np.number)
            else self._constrain(v, s)
            for v, s in zip(values, specs)
        ]

    def _equation(self, eqn: Any, values: Sequence, plan: Any) -> list:
        name = eqn.primitive.name
        if isinstance(plan, Split):
            _check_same(eqn, plan)
            outputs = _bind(eqn, self._constrained(values, plan.inputs))
            return self._constrained(outputs, plan.outputs)
        if not plan:
            return _bind(eqn, values)
        if name == "scan":
            return self._scan(eqn, values, plan)
        if name not in CALLS:
            raise ValueError(_other_function(f"`{name}` where it had a call"))
        jaxpr, consts = called(eqn)
        if name in _OWN_DERIVATIVES:
            return self._constrained(_bind(eqn, values), _result_specs(jaxpr, plan))
        if name == "remat2":
            again = jax.checkpoint(
                lambda *args: self(jaxpr, consts, args, plan),
                prevent_cse=eqn.params["prevent_cse"],
                policy=eqn.params["policy"],
            )
            return again(*values)
        return self(jaxpr, consts, values, plan)

    def _scan(self, eqn: Any, values: Sequence, plan: Plan) -> list:
        """A loop, as one loop per run of turns that are split alike."""
        params, body = eqn.params, eqn.params["jaxpr"]
        num_consts, num_carry = params["num_consts"], params["num_carry"]
        consts, carry = values[:num_consts], values[num_consts:][:num_carry]
        xs = values[num_consts + num_carry :]
        of_turn = {k[0]: inner for k, inner in plan.items() if k[0] != "stack"}
        turns = max((k[1] for k in plan if k[0] != "stack"), default=1)
        each = params["length"] // turns
        order = range(turns)[::-1] if params["reverse"] else range(turns)
        pieces = []
        runs: list[list[int]] = []
        for turn in order:
            if runs and of_turn.get(turn) == of_turn.get(runs[-1][-1]):
                runs[-1].append(turn)
            else:
                runs.append([turn])
        for run in runs:
            inner = of_turn.get(run[0], {})

            def turn_of(carry: Sequence, x: Sequence, inner: Plan = inner) -> tuple:
                out = self(body.jaxpr, body.consts, [*consts, *carry, *x], inner)
                return out[:num_carry], out[num_carry:]

            low, high = min(run) * each, (max(run) + 1) * each
            rows = [x if len(runs) == 1 else x[low:high] for x in xs]
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


def _bind(eqn: Any, values: Sequence) -> list:
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def _result_specs(jaxpr: Any, plan: Plan) -> list[Spec | None]:
    """How the results of a called jaxpr are split, where an equation of the plan makes them."""
    found: dict[Any, Spec | None] = {}
    for number, eqn in enumerate(jaxpr.eqns):
        below = plan.get(number)
        if isinstance(below, Split):
            found.update(zip(eqn.outvars, below.outputs))
        elif below and eqn.primitive.name in CALLS:
            found.update(zip(eqn.outvars, _result_specs(called(eqn)[0], below)))
    return [
        None if isinstance(v, core.Literal) else found.get(v) for v in jaxpr.outvars
    ]


def _check_same(eqn: Any, split: Split) -> None:
    shapes = tuple(tuple(v.aval.shape) for v in eqn.outvars)
    if (eqn.primitive.name, shapes) != (split.primitive, split.shapes):
        raise ValueError(
            _other_function(
                f"`{eqn.primitive.name}` of shape {shapes} where it had `{split.primitive}` of shape {split.shapes}"
            )
        )


def _other_function(what: str) -> str:
    return (
        f"the function has {what} when the graph was traced: function and arguments must be those of the graph. Trace it again for "
        "these shapes and dtypes."
    )
