import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe

RATE = 0.1


def gradients(num_steps=6):
    return np.random.default_rng(0).normal(size=(num_steps, 3))


def run(*transforms, **extra_args):
    """The updates, the weights after them and the optimizer's state."""
    optimizer = optax.chain(*transforms)
    params, found = jnp.ones(3), []
    state = optimizer.init(params)
    for gradient in map(jnp.asarray, gradients()):
        updates, state = optimizer.update(gradient, state, params, **extra_args)
        params = optax.apply_updates(params, updates)
        found.append(np.asarray(updates))
    return found, params, state


@pytest.mark.parametrize("m", [0, 0.5, 0.99])
@pytest.mark.parametrize("delay", [0, 1, 2.5, 8])
def test_is_the_formula(m, delay):
    v, expected = np.zeros(3), []
    for g in gradients():
        v = m * v + g
        expected.append(m**delay * v + (1 - m**delay) / (1 - m) * g)
    with jax.enable_x64(True):
        found, *_ = run(jpipe.optim.spike_compensation(m), delay=delay)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_is_momentum_without_delay():
    found, *_ = run(jpipe.optim.spike_compensation(0.9), delay=0)
    np.testing.assert_array_equal(found, run(optax.trace(0.9))[0])


@pytest.mark.parametrize("delay", [0, 3, 20])
def test_a_late_gradient_counts_as_much_as_in_momentum(delay):
    """And after its spike it is where momentum would have brought it by then."""
    m, compensate = 0.8, jpipe.optim.spike_compensation(0.8, delay)
    state, found = compensate.init(jnp.zeros(1)), []
    for t in range(200):
        update, state = compensate.update(jnp.full(1, float(t == 0)), state)
        found.append(update[0])
    momentum = m ** np.arange(200)
    np.testing.assert_allclose(np.sum(found), 1 / (1 - m), rtol=1e-5)
    np.testing.assert_allclose(found[0], momentum[: delay + 1].sum(), rtol=1e-5)
    np.testing.assert_allclose(found[1:50], momentum[delay + 1 : delay + 50], rtol=1e-4)


def test_takes_a_delay_for_each_weight():
    grads = [{"w": jnp.ones(2), "b": jnp.ones(1)}, {"w": jnp.ones(2)}, None]
    compensate = jpipe.optim.spike_compensation(0.5, [{"w": 1, "b": 0}, 2, 3])
    found, _ = compensate.update(grads, compensate.init(grads))
    expected = [{"w": jnp.full(2, 1.5), "b": jnp.ones(1)}, {"w": jnp.full(2, 1.75)}]
    jax.tree.map(np.testing.assert_array_equal, found, [*expected, None])


def descent(delay=0):
    return (
        jpipe.optim.spike_compensation(0.9, delay),
        optax.scale_by_learning_rate(RATE),
        jpipe.optim.predict_weights(),
    )


@pytest.mark.parametrize("T", [0, 1, 6])
def test_predicts_by_velocity(T):
    v = functools.reduce(lambda v, g: 0.9 * v + g, gradients())
    with jax.enable_x64(True):
        _, params, state = run(*descent(delay=4))
        found = jpipe.optim.velocity_predicted_params(params, state, T, learning_rate=RATE)
    np.testing.assert_allclose(found, np.asarray(params) - T * RATE * v, rtol=1e-12)


def test_predicts_as_by_movement_if_nothing_is_compensated():
    _, params, state = run(*descent(delay=0))
    by_velocity = jpipe.optim.velocity_predicted_params(params, state, 5, learning_rate=RATE)
    by_movement = jpipe.optim.predicted_params(params, state, 5)
    np.testing.assert_allclose(by_velocity, by_movement, rtol=1e-5)
    _, params, state = run(*descent(delay=4))
    by_velocity = jpipe.optim.velocity_predicted_params(params, state, 5, learning_rate=RATE)
    by_movement = jpipe.optim.predicted_params(params, state, 5)
    assert not np.allclose(by_velocity, by_movement, rtol=1e-2)


def test_prediction_takes_schedule_and_horizon():
    _, params, state = run(*descent())
    predict = functools.partial(jpipe.optim.velocity_predicted_params, params, state)
    found = predict(
        3,
        learning_rate=lambda count: RATE / (1 + count),
        horizon=lambda tau: 2 * tau,
    )
    expected = predict(6, learning_rate=RATE / (1 + len(gradients())))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("momentum", [-0.1, 1, 2, np.nan])
def test_refuses_a_momentum_that_is_none(momentum):
    with pytest.raises(ValueError, match="`momentum` must be at least 0 and below 1"):
        jpipe.optim.spike_compensation(momentum)


def test_refuses_to_guess_the_delay():
    with pytest.raises(ValueError, match="`spike_compensation` needs a delay, got no"):
        run(jpipe.optim.spike_compensation(0.9))
