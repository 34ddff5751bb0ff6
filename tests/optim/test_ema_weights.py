import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe


def run(optimizer, num_steps, params=None):
    """Weights after each update, and the state."""
    rng = np.random.default_rng(0)
    params = jnp.ones(3) if params is None else params
    state, weights = optimizer.init(params), []
    for _ in range(num_steps):
        gradient = jnp.asarray(rng.normal(size=3), params.dtype)
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        weights.append(np.asarray(params))
    return weights, state


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99])
def test_is_the_weighted_mean(decay):
    with jax.enable_x64(True):
        chain = optax.chain(optax.sgd(0.1), jpipe.optim.ema_weights(decay))
        weights, state = run(chain, 7)
        found = jpipe.optim.averaged_params(jnp.asarray(weights[-1]), state)
    coefficients = decay ** np.arange(7)[::-1]
    expected = np.average(weights, axis=0, weights=coefficients)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_weights_are_themselves_before_the_first_update():
    ema, params = jpipe.optim.ema_weights(0.9), jnp.arange(3.0)
    found = jpipe.optim.averaged_params(params, ema.init(params))
    np.testing.assert_array_equal(found, params)


def test_averages_low_precision_in_float32():
    """1 / 512 is below the rounding of bfloat16 at 1."""
    ema = jpipe.optim.ema_weights(0.998)
    params = jnp.ones(3, jnp.bfloat16)
    state = ema.init(params)
    assert state.average.dtype == jnp.float32
    for value in (1.0, 2.0):
        _, state = ema.update(params * (value - 1), state, params)
    np.testing.assert_allclose(state.average / state.total, (0.998 + 2) / 1.998, 1e-5)
    assert jpipe.optim.averaged_params(params, state).dtype == jnp.bfloat16


def test_masked_weights_are_not_averaged():
    mask = {"a": True, "b": False}
    ema = optax.masked(jpipe.optim.ema_weights(0.5), mask)
    params = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    state = ema.init(params)
    for _ in range(2):
        updates, state = ema.update(jax.tree.map(jnp.ones_like, params), state, params)
        params = optax.apply_updates(params, updates)
    found = jpipe.optim.averaged_params(params, state)
    np.testing.assert_allclose(found["a"], (0.5 * 1 + 2) / 1.5)
    np.testing.assert_array_equal(found["b"], 2)


@pytest.mark.parametrize("decay", [-0.1, 1, 1.5, float("nan")])
def test_refuses_a_decay_that_is_none(decay):
    with pytest.raises(ValueError, match="`decay` must be at least 0 and below 1, got"):
        jpipe.optim.ema_weights(decay)


def test_refuses_what_does_not_fit():
    ema, params = jpipe.optim.ema_weights(0.5), {"w": jnp.ones(2)}
    with pytest.raises(ValueError, match="averages weights: call `update"):
        ema.update(params, ema.init(params))
    averaged = jpipe.optim.averaged_params
    with pytest.raises(ValueError, match="holds no state of `ema_weights`"):
        averaged(params, optax.sgd(0.1).init(params))
    with pytest.raises(ValueError, match=r"params\['w'\] in two `ema_weights`"):
        averaged(params, optax.chain(ema, ema).init(params))
    with pytest.raises(ValueError, match=r"not of these `params`, which have no \['w"):
        averaged({"v": jnp.ones(2)}, ema.init(params))
