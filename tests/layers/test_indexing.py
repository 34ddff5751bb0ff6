"""Gathers and scatters where two axes are left to XLA: see `jpipe.layers.indexing`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from jpipe.layers import indexing
from jpipe.layers.equations import Equations
from models import Transformer

ROWS = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 5)), jnp.float32)


@pytest.fixture
def two_axes(monkeypatch):
    monkeypatch.setattr(indexing, "_splits_by_two_axes", lambda: True)
    monkeypatch.setattr(indexing, "SPLITS_INDEXED", True)


def labels(axis, *values):
    shape = tuple(size for dim, size in enumerate(ROWS.shape) if dim != axis % ROWS.ndim)
    return jnp.expand_dims(jnp.resize(jnp.asarray(values), shape), axis)


def assert_same(function, *arguments):
    """The equations compute what JAX does, without a gather and a scatter."""
    program = Equations.of(jax.make_jaxpr(function)(*arguments))
    text = str(jax.make_jaxpr(program)(*arguments))
    assert not any(f"{name}[" in text for name in indexing.NAMES)
    jax.tree.map(np.testing.assert_array_equal, program(*arguments)[0], function(*arguments))


@pytest.mark.parametrize("mode", [None, "clip", "fill", "promise_in_bounds"])
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8", "bool"])
def test_a_pick_is_that_of_a_gather(mode, axis, dtype, two_axes):
    rows = (ROWS * 10).astype(dtype)
    others = [] if mode == "promise_in_bounds" else [-1, 7, -9]
    assert_same(lambda a, i: jnp.take_along_axis(a, i, axis, mode=mode), rows, labels(axis, 0, 1, *others))


@pytest.mark.parametrize("mode", [None, "clip", "fill"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_its_derivative_is_that_of_a_gather(mode, axis, two_axes):
    def total(rows, index):
        picked = jnp.take_along_axis(rows, index, axis, mode=mode)
        return jnp.sum(jnp.where(jnp.isnan(picked), 0.0, picked) ** 3)

    assert_same(jax.grad(total), ROWS, labels(axis, 1, 0, 9, -1))


@pytest.mark.parametrize(
    "function", [lambda a: a[:, 1], lambda a: a[jnp.array([1, 0, 1])], lambda a: jnp.take(a, 2, 2)]
)
def test_other_gathers_stay(function, two_axes):
    program = Equations.of(jax.make_jaxpr(function)(ROWS))
    np.testing.assert_array_equal(program(ROWS)[0], function(ROWS))


def test_two_numbers_of_a_row_stay_a_gather(two_axes):
    index = jnp.zeros((2, 3, 2), int)
    program = Equations.of(jax.make_jaxpr(lambda a, i: jnp.take_along_axis(a, i, 2))(ROWS, index))
    assert "gather[" in str(jax.make_jaxpr(program)(ROWS, index))


def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


@pytest.mark.parametrize(
    "axes", [{"fsdp": 2, "model": 2}, pytest.param({"model": 2, "fsdp": 2, "data": 1}, marks=pytest.mark.exhaustive)]
)
def test_a_loss_of_labels_where_two_axes_split_the_logits(axes):
    """XLA ends the process if the logits of labels are gathered from a vocabulary over "model", of rows over "fsdp"."""
    rng, results = np.random.default_rng(0), []
    batches = [{name: rng.integers(0, 8, (8, 4)) for name in ("inputs", "targets")} for _ in range(2)]
    for sizes in ({}, axes):
        pipe = jpipe.Pipeline(
            Transformer(vocab_size=8, seq_len=4, dim=8, num_heads=2, num_blocks=1).layers(),
            loss=cross_entropy,
            optimizer=optax.sgd(0.5),
            schedule=jpipe.schedules.one_f_one_b(2, 2),
            mesh=jpipe.make_mesh(stage=2, **sizes),
        )
        state, losses = pipe.init(jax.random.key(0), batches[0]), []
        for batch in batches:
            state, metrics = pipe.step(state, batch)
            losses.append(float(metrics["loss"]))
        results.append((losses, pipe.get_params(state), float(pipe.evaluate(state, batches[0])["loss"])))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *results)
