"""Measures the seconds of an operator's shard on devices.

The traced equations of the operator are run with the sizes of the shard. Views (transposes, reshapes, slices) are no
part of
it: XLA usually makes them a part of what reads them.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jpipe._util.foreign import shown
from jpipe.layers.avals import is_inexact
from jpipe.soap.flatten import FlatEquation, Value
from jpipe.soap.graph import OperatorGraph
from jpipe.soap.products import product_of
from jpipe.soap.regions import read
from jpipe.soap.trace import Member

_LEAST_SECONDS = 5e-3  # of a timed loop of calls
_CACHE_BYTES = 2**26  # more than the caches of a device
_MOST_COPIES = 16


def measure(
    graph: OperatorGraph,
    operator: int,
    shape: tuple[int, ...],
    *,
    devices: Sequence[Any] | None = None,
    num_timings: int = 5,
) -> tuple[float, float]:
    """Measures the forward and the backward of the first shard of a shape.

    All devices run the shard at the same time, as in a training step, because devices may share a memory, and
    fake CPU devices share cores. The launch of the program is not counted. The shard is not repeated in a loop of one
    program: XLA moves what does not change out of a loop, and compiles gradients of convolutions in a loop to slower
    code on CPU. Calls take turns with several copies of the function's arguments, because a step reads a weight long
    after it read it last, and caches have other arrays then.

    Args:
      graph: the result of `jpipe.soap.trace`.
      operator: its number.
      shape: turns of each loop in the shard.
      devices: the devices that run it; None is all devices of this process.
      num_timings: the median of so many timings counts.

    Returns:
      Seconds of the forward and of the backward; the latter is 0 without a backward.

    Raises:
      ValueError: if the graph has no equations.
    """
    timed = graph.operators[operator]
    if timed.equations is None:
        raise ValueError(
            f"operator {shown(timed.name)} has no equations to measure: the graph was read from a file. Trace the "
            "function."
        )
    function, values, tensors = local_program(graph, operator, shape)
    rng = np.random.default_rng(0)
    inputs = [_sample(v, rng) for v in values]
    cold = [t is not None and graph.tensors[t].producer is None for t in tensors]
    devices = jax.local_devices() if devices is None else devices
    forward = _seconds(function, inputs, cold, devices, num_timings)
    backward = 0.0
    places = [i for i, t in enumerate(tensors) if t is not None and graph.tensors[t].has_gradient]
    if timed.has_backward and places:
        pull, given, is_cold = _backward(function, inputs, places, cold, rng)
        backward = _seconds(pull, given, is_cold, devices, num_timings)
    return forward * timed.repeats, backward * timed.repeats


def _backward(
    function: Callable,
    inputs: list[np.ndarray],
    places: list[int],
    cold: list[bool],
    rng: np.random.Generator,
) -> tuple[Callable, list[np.ndarray], list[bool]]:
    """The backward of a function, as a function of the values kept by the forward and the gradients of the results.

    Args:
      function: a function of `inputs`.
      inputs: numbers to run it with.
      places: the inputs whose gradients are wanted.
      cold: see `_seconds`.
      rng: gives the gradients of the results.

    Returns:
      The function, its arguments, and which of them are cold.
    """
    arrays = [jnp.asarray(x) for x in inputs]

    def float_results(*floats: jax.Array) -> list:
        given: list = list(arrays)
        for i, x in zip(places, floats):
            given[i] = x
        return [y for y in function(*given) if is_inexact(y)]

    outputs, pull = jax.vjp(float_results, *(arrays[i] for i in places))
    kept, tree = jax.tree.flatten(pull)
    cold_arrays = [x for x, is_cold in zip(arrays, cold) if is_cold]
    is_cold = [any(x is y for y in cold_arrays) for x in kept]

    def backward(*given: jax.Array) -> Any:
        pull = jax.tree.unflatten(tree, given[: len(kept)])
        return pull(list(given[len(kept) :]))

    cotangents = [_sample(y, rng) for y in outputs]
    return (
        backward,
        [*map(np.asarray, kept), *cotangents],
        is_cold + [False] * len(outputs),
    )


def _seconds(
    function: Callable,
    inputs: list[np.ndarray],
    cold: list[bool],
    devices: Sequence,
    num_timings: int,
) -> float:
    """Median seconds of a call, while all devices call it, without the launch of the program.

    Args:
      function: a function of the inputs.
      inputs: the inputs on each device.
      cold: for each input, whether no cache has it when a call begins.
      devices: the devices that run it.
      num_timings: the median of so many timings counts.
    """
    mesh = jax.make_mesh(
        (len(devices),),
        ("devices",),
        devices=devices,
        axis_types=(jax.sharding.AxisType.Auto,),
    )
    spec = PartitionSpec("devices")

    def place(x: np.ndarray) -> jax.Array:
        every = np.broadcast_to(x, (len(devices), *x.shape))
        return jax.device_put(every, NamedSharding(mesh, spec))

    cold_bytes = sum(x.nbytes for x, is_cold in zip(inputs, cold) if is_cold)
    num_sets = 1
    if cold_bytes:
        num_sets = min(_MOST_COPIES, math.ceil(_CACHE_BYTES / cold_bytes))
    warm = [None if is_cold else place(x) for x, is_cold in zip(inputs, cold)]
    sets = [[place(x) if w is None else w for x, w in zip(inputs, warm)] for _ in range(num_sets)]

    def compiled(function: Callable) -> Callable:
        def on_device(*stacked: jax.Array) -> Any:
            results = function(*(x[0] for x in stacked))
            return jax.tree.map(lambda y: y[None], results)

        return jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))

    def launch(*arrays: jax.Array) -> list[jax.Array]:
        return [x.ravel()[:1] for x in arrays]

    programs = [compiled(function), compiled(launch)]
    counts = []
    for program in programs:
        jax.block_until_ready(program(*sets[0]))  # compiles
        first = _elapsed(program, sets, 1)
        counts.append(max(1, math.ceil(_LEAST_SECONDS / first)))
    whole, launched = (
        statistics.median(samples)
        for samples in zip(*([_elapsed(p, sets, n) / n for p, n in zip(programs, counts)] for _ in range(num_timings)))
    )
    # The launch of an operator with little work differs from another launch by noise.
    return max(whole - launched, whole / 20)


def _elapsed(program: Callable, sets: Sequence[Sequence[jax.Array]], num_calls: int) -> float:
    """Seconds of calls, one after the other, with the sets of inputs in turns."""
    start = time.perf_counter()
    for i in range(num_calls):
        result = program(*sets[i % len(sets)])
    jax.block_until_ready(result)
    return time.perf_counter() - start


def _sample(value: Any, rng: np.random.Generator) -> np.ndarray:
    """Numbers of the shape and dtype of a value."""
    if is_inexact(value):
        return rng.uniform(0.1, 0.9, value.shape).astype(value.dtype)
    return np.zeros(value.shape, value.dtype)


def local_program(
    graph: OperatorGraph, number: int, shape: tuple[int, ...]
) -> tuple[Callable[..., list], list[Value], list[int | None]]:
    """An operator's equations with the sizes of its first shard.

    Args:
      graph: the result of `jpipe.soap.trace`.
      number: the number of the operator.
      shape: turns of each loop in the shard.

    Returns:
      A function of arrays to the list of the results of all equations; shapes and dtypes of its inputs; and of each
      input the number of the graph's tensor that it is or shows, or None.
    """
    members: list[Member] = graph.operators[number].equations
    box = tuple((0, n) for n in shape)
    inputs: dict[Value, tuple[int, ...]] = {}
    numbers: dict[Value, int | None] = {}
    for member in members:
        parts = zip(member.equation.inputs, member.reads, member.inner, member.tensors)
        for value, access, inner, tensor in parts:
            if inner is None and value.literal is None:
                numbers[value] = tensor
                sizes = tuple(high - low for low, high in read(access, box))
                inputs.setdefault(value, sizes)
    order = list(inputs)

    def run(*arrays: jax.Array) -> list:
        env: dict[Value, Any] = dict(zip(order, arrays))
        results = []
        for member in members:
            equation = member.equation
            given = []
            triples = zip(equation.inputs, member.reads, member.inner)
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
                for value, dims in zip(equation.outputs, member.writes)
            ]
            outputs = _bind(equation, given, sizes_of)
            env.update(zip(equation.outputs, outputs))
            results += outputs
        return results

    values = [Value(sizes, value.dtype) for value, sizes in inputs.items()]
    return run, values, [numbers[value] for value in inputs]


def _shown(array: jax.Array, dims: list[int | None], sizes: tuple[int, ...]) -> jax.Array:
    """An array whose dims become `dims` of a larger one, repeated along the others."""
    kept = [(d, n) for d, n in zip(dims, array.shape) if d is not None]
    places = sorted(range(len(kept)), key=lambda i: kept[i][0])
    turned = array.reshape([n for _, n in kept]).transpose(places)
    spread = [1] * len(sizes)
    for d, n in kept:
        spread[d] = n
    return jnp.broadcast_to(turned.reshape(spread), sizes)


def _bind(equation: FlatEquation, given: list, sizes_of: list[tuple[int, ...]]) -> list[jax.Array]:
    """Runs a primitive with the parameters that fit the sizes."""
    name, params, sizes = equation.primitive, dict(equation.params), sizes_of[0]
    if name == "dot_general":
        return [product_of(params, *given)]
    if name == "stack_turns":
        return [jnp.broadcast_to(given[0][None], sizes) + 0]
    if name in ("concatenate", "stack"):  # a shard may read nothing of some arrays
        given = [array for array in given if array.size]
    elif name == "gather":
        params["slice_sizes"] = tuple(map(min, params["slice_sizes"], given[0].shape))
    elif name == "dynamic_slice":
        params["slice_sizes"] = sizes
    elif name == "conv_general_dilated":
        dims = params["dimension_numbers"]
        image, kernel = given
        params["feature_group_count"] = image.shape[dims.lhs_spec[1]] // kernel.shape[dims.rhs_spec[1]]
        params["padding"] = tuple(
            _padding(
                low=low,
                size=image.shape[dims.lhs_spec[2 + i]],
                dilation=params["lhs_dilation"][i],
                window=kernel.shape[dims.rhs_spec[2 + i]],
                inside=params["rhs_dilation"][i],
                stride=params["window_strides"][i],
                results=sizes[dims.out_spec[2 + i]],
            )
            for i, (low, _) in enumerate(params["padding"])
        )
    elif name.startswith("reduce_window"):
        rank = len(sizes)
        params["padding"] = tuple(
            _padding(
                low=params["padding"][d][0],
                size=given[0].shape[d],
                dilation=(params.get("base_dilation") or (1,) * rank)[d],
                window=params["window_dimensions"][d],
                inside=(params.get("window_dilation") or (1,) * rank)[d],
                stride=params["window_strides"][d],
                results=sizes[d],
            )
            for d in range(rank)
        )
    elif name == "pad":
        config = []
        for n, size, (low, _, inside) in zip(given[0].shape, sizes, params["padding_config"]):
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
