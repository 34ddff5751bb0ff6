"""Measures the seconds of an operator's shard on a device.

The traced equations of the operator are run with the sizes of the shard. Views (transposes, reshapes, slices) are no part of
it: XLA usually makes them a part of what reads them.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.soap.flatten import Equation, Value
from jpipe.soap.graph import OperatorGraph
from jpipe.soap.regions import read
from jpipe.soap.trace import Member

_LEAST_SECONDS = 2e-3  # of a timed loop of calls


def measure(
    graph: OperatorGraph,
    operator: int,
    shape: tuple[int, ...],
    *,
    device: Any = None,
    num_timings: int = 5,
) -> tuple[float, float]:
    """Measures the forward and the backward of the first shard of a shape.

    Args:
      graph: of `jpipe.soap.trace`.
      operator: its number.
      shape: turns of each loop in the shard.
      device: where to run; None is the first device.
      num_timings: the median of so many timings counts.

    Returns:
      Seconds of the forward and of the backward; the latter is 0 without a backward.

    Raises:
      ValueError: if the graph has no equations.
    """
    each = graph.operators[operator]
    if each.equations is None:
        raise ValueError(
            f"operator {each.name!r} has no equations to measure: the graph was read from a file. Trace the function."
        )
    function, values = local_program(graph, operator, shape)
    device = jax.devices()[0] if device is None else device
    rng = np.random.default_rng(0)
    inputs = [jax.device_put(_sample(v, rng), device) for v in values]
    forward = _seconds(jax.jit(function), inputs, num_timings)
    backward = 0.0
    if each.has_backward:
        places = [i for i, x in enumerate(inputs) if _is_float(x)]

        def gradients(cotangents: list, *inputs: jax.Array) -> Any:
            def of_floats(*floats: jax.Array) -> list:
                given = list(inputs)
                for i, x in zip(places, floats):
                    given[i] = x
                return [y for y in function(*given) if _is_float(y)]

            _, pull = jax.vjp(of_floats, *(inputs[i] for i in places))
            return pull(cotangents)

        outputs = [y for y in jax.jit(function)(*inputs) if _is_float(y)]
        both = _seconds(jax.jit(gradients), [outputs, *inputs], num_timings)
        # The backward computes what it needs of the forward again, unless XLA finds that it needs nothing.
        backward = max(both - forward, both / 3)
    return forward * each.repeats, backward * each.repeats


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _seconds(function: Callable, inputs: list, num_timings: int) -> float:
    """Median seconds of a call."""
    jax.block_until_ready(function(*inputs))  # compiles
    count = 1
    timings: list[float] = []
    while len(timings) < num_timings:
        start = time.perf_counter()
        for _ in range(count):
            result = function(*inputs)
        jax.block_until_ready(result)
        elapsed = time.perf_counter() - start
        if elapsed < _LEAST_SECONDS and not timings:
            count *= 2
            continue
        timings.append(elapsed / count)
    return statistics.median(timings)


def _sample(value: Value, rng: np.random.Generator) -> jax.Array:
    if jnp.issubdtype(value.dtype, jnp.inexact):
        return jnp.asarray(rng.uniform(0.1, 0.9, value.shape), value.dtype)
    return jnp.zeros(value.shape, value.dtype)


def local_program(
    graph: OperatorGraph, number: int, shape: tuple[int, ...]
) -> tuple[Callable[..., list], list[Value]]:
    """An operator's equations with the sizes of its first shard.

    Args:
      graph: of `jpipe.soap.trace`.
      number: of the operator.
      shape: turns of each loop in the shard.

    Returns:
      A function of arrays to the list of the results of all equations, and the shapes and dtypes of its inputs.
    """
    members: list[Member] = graph.operators[number].equations
    box = tuple((0, n) for n in shape)
    inputs: dict[Value, tuple[int, ...]] = {}
    for each in members:
        triples = zip(each.equation.inputs, each.reads, each.inner)
        for value, access, inner in triples:
            if inner is None and value.literal is None:
                sizes = tuple(high - low for low, high in read(access, box))
                inputs.setdefault(value, sizes)
    order = list(inputs)

    def run(*arrays: jax.Array) -> list:
        env: dict[Value, Any] = dict(zip(order, arrays))
        results = []
        for each in members:
            equation = each.equation
            given = []
            triples = zip(equation.inputs, each.reads, each.inner)
            for value, access, inner in triples:
                if inner is not None:
                    sizes = tuple(high - low for low, high in read(access, box))
                    given.append(_shown(env[inner[0]], inner[1], sizes))
                elif value in env:
                    given.append(env[value])
                else:
                    given.append(jnp.asarray(value.literal, value.dtype))
            sizes_of = [
                tuple(n if d is None else shape[d] for n, d in zip(value.shape, dims))
                for value, dims in zip(equation.outputs, each.writes)
            ]
            outputs = _bind(equation, given, sizes_of)
            env.update(zip(equation.outputs, outputs))
            results += outputs
        return results

    return run, [Value(sizes, value.dtype) for value, sizes in inputs.items()]


def _shown(
    array: jax.Array, dims: list[int | None], sizes: tuple[int, ...]
) -> jax.Array:
    """An array whose dims become `dims` of a larger one, repeated along the others."""
    kept = [(d, n) for d, n in zip(dims, array.shape) if d is not None]
    places = sorted(range(len(kept)), key=lambda i: kept[i][0])
    turned = array.reshape([n for _, n in kept]).transpose(places)
    spread = [1] * len(sizes)
    for d, n in kept:
        spread[d] = n
    return jnp.broadcast_to(turned.reshape(spread), sizes)


def _bind(
    equation: Equation, given: list, sizes_of: list[tuple[int, ...]]
) -> list[jax.Array]:
    """Runs a primitive with the parameters that fit the sizes."""
    name, params, sizes = equation.primitive, dict(equation.params), sizes_of[0]
    if name == "turns":
        return [jnp.broadcast_to(given[0][None], sizes) + 0]
    if name == "concatenate":  # a shard may read nothing of some arrays
        given = [array for array in given if array.size]
    elif name == "gather":
        params["slice_sizes"] = tuple(map(min, params["slice_sizes"], given[0].shape))
    elif name == "dynamic_slice":
        params["slice_sizes"] = sizes
    elif name == "conv_general_dilated":
        dims = params["dimension_numbers"]
        image, kernel = given
        params["feature_group_count"] = (
            image.shape[dims.lhs_spec[1]] // kernel.shape[dims.rhs_spec[1]]
        )
        params["padding"] = tuple(
            _padding(
                low,
                image.shape[dims.lhs_spec[2 + i]],
                params["lhs_dilation"][i],
                kernel.shape[dims.rhs_spec[2 + i]],
                params["rhs_dilation"][i],
                params["window_strides"][i],
                sizes[dims.out_spec[2 + i]],
            )
            for i, (low, _) in enumerate(params["padding"])
        )
    elif name.startswith("reduce_window"):
        rank = len(sizes)
        params["padding"] = tuple(
            _padding(
                params["padding"][d][0],
                given[0].shape[d],
                (params.get("base_dilation") or (1,) * rank)[d],
                params["window_dimensions"][d],
                (params.get("window_dilation") or (1,) * rank)[d],
                params["window_strides"][d],
                sizes[d],
            )
            for d in range(rank)
        )
    elif name == "pad":
        config = []
        for n, size, (low, _, inside) in zip(
            given[0].shape, sizes, params["padding_config"]
        ):
            spread = (n - 1) * (inside + 1) + 1 if n else 0
            config.append((low, size - low - spread, inside))
        params["padding_config"] = tuple(config)
    result = equation.bind.bind(*given, **equation.bind.get_bind_params(params))
    return list(result) if equation.bind.multiple_results else [result]


def _padding(
    low: int,
    size: int,
    dilation: int,
    window: int,
    inside: int,
    stride: int,
    results: int,
) -> tuple[int, int]:
    """The padding with which a window gives so many results."""
    length = (results - 1) * stride + (window - 1) * inside + 1
    return low, length - low - ((size - 1) * dilation + 1)
