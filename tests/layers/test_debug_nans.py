"""With `jax_debug_nans`, a NaN is a `FloatingPointError` wherever it comes from, as in plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe

LINEAR = functools.partial(nnx.Linear, 3, 3)


def loss_fn(outputs, batch):
    return jnp.mean(outputs**2)


@pytest.fixture
def debug_nans():
    with jax.debug_nans(True):
        yield


def pipeline(layers, loss=loss_fn):
    return jpipe.Pipeline(
        layers,
        loss=loss,
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.one_f_one_b(2, 2),
    )


@pytest.mark.parametrize("source", ["batch", "weights", "layer", "loss"])
@pytest.mark.sampled(4)
def test_a_nan_is_a_floating_point_error(debug_nans, source):
    batch = {"inputs": np.ones((4, 3), np.float32)}
    layers, loss, message = [LINEAR, LINEAR], loss_fn, "nan"
    if source == "layer":
        layers = [LINEAR, lambda x: jnp.log(x - 1e6), LINEAR]
    if source == "loss":
        loss = lambda outputs, batch: jnp.sqrt(outputs - 1e6).mean()  # noqa: E731
    pipe = pipeline(layers, loss)
    state = pipe.init(jax.random.key(0), batch)
    if source == "batch":
        batch["inputs"][1, 2] = np.nan
        message = r"batch\['inputs'\] has NaN, and `jax_debug_nans` is set"
    if source == "weights":
        params = pipe.get_params(state)
        params[1]["kernel"] = np.full((3, 3), np.nan, np.float32)
        with jax.debug_nans(False):
            state = pipe.init(jax.random.key(0), batch, params=params)
        message = "the state's parameters.* has NaN"
    with pytest.raises(FloatingPointError, match=message):
        pipe.step(state, batch)


def test_a_nan_in_prediction(debug_nans):
    batch = {"inputs": np.ones((4, 3), np.float32)}
    pipe = pipeline([LINEAR, LINEAR])
    state = pipe.init(jax.random.key(0), batch)
    assert np.isfinite(pipe.predict(state, batch)).all()
    batch["inputs"][1, 2] = np.nan
    with pytest.raises(FloatingPointError, match="has NaN"):
        pipe.predict(state, batch)
