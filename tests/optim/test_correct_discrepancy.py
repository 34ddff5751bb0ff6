import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe


def run(optimizer, movements, **extra_args):
    """Weights after the movements, and the optimizer's state."""
    params = jnp.zeros(movements.shape[1:])
    state = optimizer.init(params)
    for movement in map(jnp.asarray, movements):
        updates, state = optimizer.update(movement, state, params, **extra_args)
        np.testing.assert_array_equal(updates, movement)
        params = optax.apply_updates(params, updates)
    return params, state


def movements(num_steps=9):
    return np.random.default_rng(0).normal(size=(num_steps, 3))


@pytest.mark.parametrize("decay", [0.1, 0.9, None])
@pytest.mark.parametrize("forward, backward", [(1, 0), (7, 0), (10, 6), (3.5, 1)])
def test_is_the_formula(decay, forward, backward):
    gap = forward - backward
    gamma = 1 - 2 / (gap + 1) if decay is None else decay ** (1 / gap)
    weights, velocity = np.zeros(3), np.zeros(3)
    for movement in movements():
        weights = weights + movement
        velocity = gamma * velocity + (1 - gamma) * movement
    with jax.enable_x64(True):
        correct = jpipe.optim.correct_discrepancy(decay)
        params, state = run(correct, movements(), delay=forward, backward_delay=backward)
        found = jpipe.optim.corrected_params(params, state, gap)
    np.testing.assert_allclose(state.velocity, velocity, rtol=1e-12)
    np.testing.assert_allclose(found, weights - gap * velocity, rtol=1e-12)


def test_finds_the_old_weights_again_when_they_move_evenly():
    steady = np.tile([1.0, -2.0, 0.5], (200, 1))
    correct = jpipe.optim.correct_discrepancy(0.5, delay=4)
    params, state = run(correct, steady)
    found = jpipe.optim.corrected_params(params, state, 4)
    np.testing.assert_allclose(found, steady[:-4].sum(0), rtol=1e-5)


@pytest.mark.parametrize("decay", [0.1, None])
def test_corrects_nothing_where_both_passes_read_the_same(decay):
    correct = jpipe.optim.correct_discrepancy(decay)
    params, state = run(correct, movements(), delay=3, backward_delay=3)
    np.testing.assert_array_equal(state.velocity, np.zeros(3))
    found = jpipe.optim.corrected_params(params, state, 0)
    np.testing.assert_array_equal(found, params)


def test_theory_forgets_all_but_the_last_movement_at_a_gap_of_at_most_1():
    for gap in (0.5, 1):
        correct = jpipe.optim.correct_discrepancy(delay=gap)
        _, state = run(correct, movements())
        np.testing.assert_allclose(state.velocity, movements()[-1], rtol=1e-6)


def test_velocity_starts_again_after_a_time_without_delay():
    correct = jpipe.optim.correct_discrepancy(0.5)
    params, state = run(correct, movements(), delay=3, backward_delay=0)
    _, state = correct.update(jnp.ones(3), state, params, delay=0, backward_delay=0)
    np.testing.assert_array_equal(state.velocity, np.zeros(3))


def test_takes_a_delay_for_each_weight():
    gaps = [{"w": 2, "b": 0}, 4, None]
    params = [{"w": jnp.zeros(2), "b": jnp.zeros(3)}, {"w": jnp.zeros(2)}, None]
    correct = jpipe.optim.correct_discrepancy(0.5**4, gaps)
    updates = jax.tree.map(jnp.ones_like, params)
    _, state = correct.update(updates, correct.init(params), params)
    new = optax.apply_updates(params, updates)
    found = jpipe.optim.corrected_params(new, state, gaps)
    expected = [  # 1 - gap * (1 - decay ** (1 / gap))
        {"w": jnp.full(2, 1 - 2 * 0.75), "b": jnp.ones(3)},
        {"w": jnp.full(2, 1 - 4 * 0.5)},
        None,
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


@pytest.mark.parametrize("decay", [0, 1, -0.5, 1.5, np.nan])
def test_refuses_a_decay_that_is_none(decay):
    with pytest.raises(ValueError, match="`decay` must be between 0 and 1, both"):
        jpipe.optim.correct_discrepancy(decay)


@pytest.mark.parametrize("extra", [{}, {"delay": 4}, {"backward_delay": 4}])
def test_refuses_to_guess_the_delays(extra):
    correct = jpipe.optim.correct_discrepancy(0.5)
    with pytest.raises(ValueError, match="needs the number of updates .*, got delay="):
        correct.update(jnp.ones(2), correct.init(jnp.ones(2)), **extra)


def test_refuses_a_backward_on_older_weights_than_the_forward():
    correct = jpipe.optim.correct_discrepancy(0.5)
    with pytest.raises(ValueError, match="`delay - backward_delay` must be .* got -1"):
        correct.update(jnp.ones(2), correct.init(jnp.ones(2)), delay=3, backward_delay=4)
    with pytest.raises(ValueError, match="`delay` must be .* got -1"):
        jpipe.optim.correct_discrepancy(0.5, -1)
