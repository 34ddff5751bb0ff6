"""The loss of a pipeline's model as one function of the weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from families import FAMILIES, cross_entropy
from flax import nnx

import jpipe


@pytest.mark.exhaustive
def test_is_the_loss_that_a_step_reports():
    family = FAMILIES["mlp"]
    pipe = jpipe.Pipeline(
        family.layers,
        loss=cross_entropy,
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.gpipe(2, 2),
    )
    (batch,) = family.batches(1, 4)
    state = pipe.init(jax.random.key(0), batch)
    params, loss = pipe.get_params(state), pipe.plain_loss(state)
    model = oracles.PlainModel(family.layers, jax.random.key(0))
    expected, gradient = jax.value_and_grad(lambda p: cross_entropy(model(p, batch["inputs"]), batch))(params)
    found, found_gradient = jax.value_and_grad(loss)(params, batch)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6),
        found_gradient,
        gradient,
    )
    _, metrics = pipe.step(state, batch)
    np.testing.assert_allclose(metrics["loss"], found, rtol=1e-6)


def reports(x):
    jpipe.report("size", jnp.mean(x**2))
    return x


def test_has_ties_skips_reports_and_weighted_losses():
    """Against the formula, in float64."""

    def loss(outputs, batch, *, reported):
        errors = jnp.sum((outputs - batch["targets"]) ** 2, axis=-1) * batch["mask"]
        return jnp.sum(errors), jnp.sum(batch["mask"])

    def penalised(outputs, batch, *, reported):
        total, weight = loss(outputs, batch, reported=reported)
        return total + weight * reported["size"], weight

    dense = functools.partial(nnx.Linear, 3, 3, use_bias=False, param_dtype=float)
    layers = [
        jpipe.skip(lambda x: (x, x), stash="first"),
        dense,
        jpipe.Function(reports),
        jpipe.skip(lambda x, first: x + first, pop="first"),
        dense,
    ]
    with jax.enable_x64(True):
        pipe = jpipe.Pipeline(
            layers,
            loss=penalised,
            optimizer=optax.sgd(0.1),
            schedule=jpipe.schedules.gpipe(2, 1),
            ties=[[(1, "kernel"), (4, "kernel")]],
            boundaries=[3],
        )
        rng = np.random.default_rng(0)
        x, targets = rng.normal(size=(2, 4, 3))
        batch = {"inputs": x, "targets": targets, "mask": np.array([1.0, 0, 1, 1])}
        state = pipe.init(jax.random.key(0), batch)
        params = pipe.get_params(state)
        W = params[1]["kernel"]
        params[4] = {"kernel": np.zeros_like(W)}  # the first counts
        found = pipe.plain_loss(state)(params, batch)
        _, metrics = pipe.step(state, batch)
    errors = (((x @ W + x) @ W - targets) ** 2).sum(axis=1) * batch["mask"]
    expected = errors.sum() / 3 + ((x @ W) ** 2).mean()
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-9)


def test_draws_by_the_key():
    layers = [functools.partial(nnx.Dropout, 0.5)]
    pipe = jpipe.Pipeline(
        layers,
        loss=lambda y, batch: jnp.mean(y),
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.gpipe(1, 1),
    )
    batch = {"inputs": np.ones((8, 4), np.float32)}
    state = pipe.init(jax.random.key(0), batch)
    params = pipe.get_params(state)
    first, again, other = (float(pipe.plain_loss(state, jax.random.key(k))(params, batch)) for k in (0, 0, 1))
    assert first == again != other
    assert first == float(pipe.plain_loss(state)(params, batch))
    with pytest.raises(ValueError, match="key"):
        pipe.plain_loss(state, 3)
