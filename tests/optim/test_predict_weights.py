import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe

RATE = 0.1


def gradients(num_steps=6):
    return np.random.default_rng(0).normal(size=(num_steps, 3))


def run(optimizer):
    """Weights and state after the gradients."""
    optimizer = optax.chain(optimizer, jpipe.optim.predict_weights())
    params = jnp.ones(3)
    state = optimizer.init(params)
    for gradient in map(jnp.asarray, gradients()):
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("s", [0, 1, 5])
def test_is_spectrain_behind_momentum(s):
    w, v = np.ones(3), np.zeros(3)
    for gradient in gradients():
        v = 0.9 * v + gradient
        w = w - RATE * v
    with jax.enable_x64(True):
        found = jpipe.optim.predicted_params(*run(optax.sgd(RATE, momentum=0.9)), s)
    np.testing.assert_allclose(found, w - s * RATE * v, rtol=1e-12)


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
@pytest.mark.parametrize("rank", range(4))
def test_is_xpipe_and_pipeoptim_behind_adam(weight_decay, rank):
    w, m, v = np.ones(3), np.zeros(3), np.zeros(3)
    for t, gradient in enumerate(gradients(), 1):
        m = 0.9 * m + 0.1 * gradient
        v = 0.999 * v + 0.001 * gradient**2
        m_hat, v_hat = m / (1 - 0.9**t), v / (1 - 0.999**t)
        direction = m_hat / (np.sqrt(v_hat) + 1e-8) + weight_decay * w
        w = w - RATE * direction
    s = 4 - rank - 1
    with jax.enable_x64(True):
        params, state = run(optax.adamw(RATE, weight_decay=weight_decay))
        found = jpipe.optim.predicted_params(params, state, s)
    np.testing.assert_allclose(found, w - RATE * s * direction, rtol=1e-9)


def test_s_is_the_delay_in_unit_ticks():
    schedule = jpipe.schedules.pipedream(4, num_microbatches=1, ticks="unit")
    s = [4 - rank - 1 for rank in range(4)]
    np.testing.assert_array_equal(schedule.facts().forward_delay, s)


@pytest.mark.parametrize(
    "delay, horizon, s",
    [
        (3, None, 3),
        (3, lambda tau: tau / 2 + 1, 2.5),
        (3, 7, 7),
        (0, 7, 7),
        (jnp.float32(3), lambda tau: 2 * tau, 6),
    ],
)
def test_looks_as_far_ahead_as_it_is_told(delay, horizon, s):
    params, state = run(optax.sgd(RATE))
    found = jpipe.optim.predicted_params(params, state, delay, horizon)
    np.testing.assert_allclose(found, params - s * RATE * gradients()[-1], rtol=1e-5)


def test_takes_a_delay_for_each_weight():
    params = [{"w": jnp.zeros(2), "b": jnp.zeros(1)}, {"w": jnp.zeros(2)}, None]
    predict = jpipe.optim.predict_weights()
    ones = jax.tree.map(jnp.ones_like, params)
    _, state = predict.update(ones, predict.init(params), params)
    found = jpipe.optim.predicted_params(params, state, [{"w": 2, "b": 0}, 4, 1])
    expected = [{"w": jnp.full(2, 2), "b": jnp.zeros(1)}, {"w": jnp.full(2, 4)}, None]
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    found = jpipe.optim.predicted_params(params, state, [{"w": 2, "b": 0}, 4, 1], lambda tau: tau + 1)
    np.testing.assert_array_equal(found[0]["w"], np.full(2, 3))


def test_predicts_nothing_before_the_first_update():
    predict = jpipe.optim.predict_weights()
    params = jnp.arange(3.0)
    found = jpipe.optim.predicted_params(params, predict.init(params), 5)
    np.testing.assert_array_equal(found, params)


@pytest.mark.parametrize("horizon", [-1, lambda tau: -tau])
def test_refuses_to_look_back(horizon):
    with pytest.raises(ValueError, match="`horizon` must be a number of updates"):
        jpipe.optim.predicted_params(*run(optax.sgd(RATE)), 3, horizon)


@pytest.mark.parametrize("s", [1, 4])
def test_with_the_schedule_it_has_the_current_rate(s):
    """Momentum and Adam of the papers: the weights less s times the next rate times the last direction."""
    rate = optax.linear_schedule(0.3, 0.0, 8)
    w, v = np.ones(3), np.zeros(3)
    for t, gradient in enumerate(gradients()):
        v = 0.9 * v + gradient
        w = w - 0.3 * (1 - t / 8) * v
    optimizer = optax.chain(optax.sgd(rate, momentum=0.9), jpipe.optim.predict_weights(rate))
    with jax.enable_x64(True):
        params = jnp.ones(3)
        state = optimizer.init(params)
        for gradient in map(jnp.asarray, gradients()):
            updates, state = optimizer.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
        found = jpipe.optim.predicted_params(params, state, s)
    np.testing.assert_allclose(found, w - s * 0.3 * (1 - 6 / 8) * v, rtol=1e-6)


def test_a_rate_of_0_moves_nothing():
    predict = jpipe.optim.predict_weights(lambda t: 0.0 * t)
    state = predict.init(jnp.ones(2))
    _, state = predict.update(jnp.zeros(2), state)
    np.testing.assert_array_equal(state.movement, 0)


def test_refuses_a_rate_that_is_no_schedule():
    with pytest.raises(ValueError, match="`learning_rate` must be a schedule, .* 0.1"):
        jpipe.optim.predict_weights(0.1)
