"""A layer in a pipeline of two stages beside the same layer in plain Flax."""

import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax_zoo import optimizers, plain
from flax_zoo.layers import DIM, EXAMPLES, Example, dtypes

import jpipe

KEY = jax.random.key(3)
S, N, ROWS, STEPS = 2, 2, 4, 3
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2, "complex64": 1e-5}
"""For each dtype a part of the largest magnitude of an array: 84 roundings of float32, and 4 of bfloat16."""
ZERO = 1e-2
"""An array below this counts as rounding of 0 to the numbers around it, which are about 1.

The gradient of some weights is 0: of the bias of keys in attention, and of a bias before another norm. The sums that
cancel leave a rounding of their terms, and no part of themselves is a bound of it. `ZERO` times the tolerance is below
one rounding of 1 in every dtype. So an error that is no rounding is seen.
"""
LEAST_MOVEMENT = 3
"""Weights must move by more tolerances than this in three updates, so that an update less is more than the
tolerance.
"""


def no_delay(s, j):
    return 0


def one_unit_delay(s, j):
    """Of two stages in unit ticks: the first microbatch of a minibatch enters stage 0 before the last update."""
    return int(s == 0 and j == 0)


TABLES = {
    "1F1B": (jpipe.schedules.one_f_one_b(S, N), no_delay),
    "asynchronous": (jpipe.schedules.pipedream(S, N, ticks="unit"), one_unit_delay),
}


def cases(examples, slow: Callable[[str, str], bool]) -> list:
    """Name, table and dtype of every comparison, of examples that are not refused.

    Args:
      slow: of a table and a dtype: whether only `make test-slow` runs them.
    """
    return [
        pytest.param(name, table, dtype, marks=[pytest.mark.slow] * slow(table, dtype))
        for name, example in examples.items()
        if example.refused is None
        for dtype in ["float32"] + ["bfloat16"] * example.bfloat16 + ["complex64"] * example.complex
        for table in TABLES
    ]


def numbers(rng, shape, dtype):
    """Normal numbers of a shape or, for a tuple of shapes, a tuple of them."""
    if shape and isinstance(shape[0], tuple):
        return tuple(numbers(rng, s, dtype) for s in shape)
    values = rng.normal(size=(2, N * ROWS, *shape))
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        values = values[0]
    else:
        values = values[0] + 1j * values[1]
    return values.astype(dtype)


def batches(example: Example, dtype, count=STEPS):
    rng = np.random.default_rng(0)
    result = []
    for _ in range(count):
        targets = numbers(rng, example.shape if example.keeps_shape else (DIM,), dtype)
        inputs = numbers(rng, example.shape, dtype)
        if example.num_tokens is not None:
            inputs = rng.integers(0, example.num_tokens, N * ROWS, np.int32)
        result.append({"inputs": inputs, "targets": targets})
    return result


def squared_error(outputs, batch):
    """Computed in float32."""
    errors = jax.tree.map(
        lambda y, t: jnp.mean(jnp.abs(widened(y) - widened(t)) ** 2),
        outputs,
        batch["targets"],
    )
    return sum(jax.tree.leaves(errors))


def widened(a):
    return a.astype(jnp.promote_types(a.dtype, jnp.float32))


@functools.cache
def model(name: str, dtype):
    """The layers for the pipeline, those in plain Flax, and their evaluation."""
    example = EXAMPLES[name]
    layer = example.make(dtype)
    options = dict(is_batch_norm=example.is_batch_norm)
    last = functools.partial(nnx.Linear, DIM, DIM, **dtypes(dtype))
    if isinstance(layer, linen.Module):
        arguments = dict(example.train), dict(example.evaluate)
        flax = plain.from_linen(layer, *arguments, **options)
        if example.train:
            layer = jpipe.Linen(layer, train=arguments[0], evaluate=arguments[1])
    else:
        flax = plain.from_nnx(layer, **options)
    layers, flax = [layer, layer], [flax, flax]
    if not example.keeps_shape:
        layers[1], flax[1] = last, plain.from_nnx(last)
    return layers, flax, jax.jit(functools.partial(plain.evaluate, flax))


def assert_close(found, expected, tolerance, what: str):
    """`tolerance` is a part of the largest magnitude of each array."""
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(widened(jnp.asarray(v))) for v in (a, b))
        where = f"{what}{jax.tree_util.keystr(path)}"
        assert np.isfinite(b).all(), f"{where} is not finite without a pipeline"
        error = np.abs(a - b).max(initial=0)
        bound = tolerance * max(np.abs(b).max(initial=0), ZERO)
        assert error <= bound, f"{where} differs by {error:.2g}, above {bound:.2g}"


def in_microbatches(data):
    return [jax.tree.map(lambda a, m=m: a[m * ROWS : (m + 1) * ROWS], batch) for batch in data for m in range(N)]


def run(pipe, state, data, after_each_step=lambda i, state, metrics: None):
    """Steps over all minibatches. Returns the state, and the mean loss of all microbatches."""
    total = count = 0.0
    for i in range(len(data) + 1):
        if i < len(data):
            state, metrics = pipe.step(state, data[i])
            after_each_step(i, state, metrics)
        elif pipe.schedule.synchronous:
            break
        else:
            state, metrics = pipe.flush(state)
        if metrics["num_microbatches"]:
            total += float(metrics["loss"] * metrics["num_microbatches"])
            count += float(metrics["num_microbatches"])
    assert count == len(data) * N
    return state, np.float32(total / count)


def layer_pipeline(name: str, table: str, dtype: str) -> jpipe.Pipeline:
    layers, _, _ = model(name, jnp.dtype(dtype))
    return jpipe.Pipeline(
        layers,
        loss=squared_error,
        optimizer=optax.sgd(EXAMPLES[name].rate),
        schedule=TABLES[table][0],
    )


def check_layer(name: str, table: str, dtype: str):
    """Trains the layer in a pipeline and in plain Flax.

    Compares first weights, then what three steps leave: losses, norms of gradients, weights after every step, mutable
    state; and outputs and losses in evaluation, before and after. In an asynchronous pipeline it compares what is left
    after a flush.

    Raises:
      AssertionError: if they differ.
    """
    close = functools.partial(assert_close, tolerance=TOLERANCE[dtype])
    data = batches(EXAMPLES[name], jnp.dtype(dtype))
    layers, flax, evaluated = model(name, jnp.dtype(dtype))
    schedule, delay = TABLES[table]
    pipe = layer_pipeline(name, table, dtype)
    state = pipe.init(KEY, data[0])
    params, mutable = pipe.get_params(state), pipe.get_mutable_state(state)

    # The layer i that a factory makes has the weights of `fold_in(key, i)`.
    for i, layer in enumerate(flax):
        if not isinstance(layers[i], linen.Module | jpipe.Linen):
            first = layer.init(jax.random.fold_in(KEY, i), None)
            close((params[i], mutable[i]), first, what=f"layer {i} at first: ")

    microbatches = in_microbatches(data)
    trained = plain.train(
        flax,
        [0, 1],
        params,
        mutable,
        squared_error,
        pipe.optimizer,
        microbatches,
        N,
        delay,
    )
    for i, (before, after) in enumerate(zip(params, trained.params[-1], strict=True)):
        moved = [
            np.abs(a - b).max() / np.abs(a).max() for a, b in zip(*map(jax.tree.leaves, (after, before)), strict=True)
        ]
        assert not moved or max(moved) > LEAST_MOVEMENT * TOLERANCE[dtype], f"layer {i} stays"

    def compare_evaluation(state, params, mutable, when):
        outputs = evaluated(params, mutable, data[0]["inputs"])
        close(pipe.predict(state, data[0]), outputs, what=f"outputs {when}: ")
        if schedule.synchronous:  # the same program in both
            loss = pipe.evaluate(state, data[0])["loss"]
            expected = np.asarray(squared_error(outputs, data[0]))
            close(np.asarray(loss), expected, what=f"evaluation {when}: ")

    def compare_step(i, state, metrics):
        if schedule.synchronous:
            norm = np.linalg.norm(np.asarray(metrics["gradient_norm"]))
            close(np.float32(norm), np.float32(trained.norms[i]), what=f"gradient {i}")
            after = trained.params[i + 1]
            close(pipe.get_params(state), after, what=f"weights after step {i}: ")

    compare_evaluation(state, params, mutable, "at first")
    state, loss = run(pipe, state, data, compare_step)
    close(loss, np.float32(np.mean(trained.losses)), what="loss")
    close(pipe.get_params(state), trained.params[-1], what="weights: ")
    close(pipe.get_mutable_state(state), list(trained.state), what="mutable state: ")
    compare_evaluation(state, trained.params[-1], trained.state, "after training")


# -- Optimizers --------------------------------------------------------------------------


class Affine(nnx.Module):
    """Vectors alone."""

    def __init__(self, dtype, *, rngs):
        del rngs
        self.scale = nnx.Param(jnp.linspace(0.5, 1.5, DIM, dtype=dtype))
        self.shift = nnx.Param(jnp.linspace(-0.5, 0.5, DIM, dtype=dtype))

    def __call__(self, x):
        y = x * self.scale[None] + self.shift[None]
        # The tanh of complex numbers has poles, near which rounding grows.
        return y if jnp.iscomplexobj(y) else jnp.tanh(y)


def optimizer_model(dtype):
    """Matrices and vectors on the first stage, a matrix alone on the second."""
    linear = functools.partial(nnx.Linear, DIM, DIM, **dtypes(dtype))
    return [
        linear,
        functools.partial(Affine, dtype),
        functools.partial(linear, use_bias=False),
    ]


@functools.cache
def plain_model(dtype: str):
    layers = [plain.from_nnx(layer) for layer in optimizer_model(jnp.dtype(dtype))]
    first = [layer.init(jax.random.fold_in(KEY, i), None) for i, layer in enumerate(layers)]
    return layers, [params for params, _ in first]


def pipeline_with(optimizer, table: str, dtype: str):
    return jpipe.Pipeline(
        optimizer_model(jnp.dtype(dtype)),
        loss=squared_error,
        optimizer=optimizer,
        schedule=TABLES[table][0],
        boundaries=[2],
    )


@jax.numpy_rank_promotion("allow")  # some of Optax's need it
def check_optimizer(name: str, table: str, dtype: str):
    """Trains with the optimizer in a pipeline and in plain JAX.

    Compares weights after three steps; in the asynchronous table after a flush. The synchronous plain optimizer sees
    the whole model, and the asynchronous one sees a stage, whose weights have versions of their own.

    Raises:
      AssertionError: if they differ.
    """
    close = functools.partial(assert_close, tolerance=TOLERANCE[dtype])
    data = batches(WIDE, jnp.dtype(dtype))
    layers, params = plain_model(dtype)
    schedule, delay = TABLES[table]
    optimizer = optimizers.EXAMPLES[name].make()
    pipe = pipeline_with(optimizer, table, dtype)
    state = pipe.init(KEY, data[0])
    close(pipe.get_params(state), params, what="first weights: ")
    stages = [0, 0, 0] if schedule.synchronous else [0, 0, 1]
    trained = plain.train(
        layers,
        stages,
        params,
        [{}] * 3,
        squared_error,
        optimizer,
        in_microbatches(data),
        N,
        delay,
    )
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), trained.params[-1], params)
    assert max(jax.tree.leaves(moved)) > LEAST_MOVEMENT * TOLERANCE[dtype], "the weights stay"
    after = []
    state, loss = run(pipe, state, data, lambda i, state, _: after.append(pipe.get_params(state)))
    if schedule.synchronous:
        for i, found in enumerate(after):
            close(found, trained.params[i + 1], what=f"weights after step {i}: ")
    close(pipe.get_params(state), trained.params[-1], what="weights: ")
    close(loss, np.float32(np.mean(trained.losses)), what="loss")


WIDE = Example(None)
