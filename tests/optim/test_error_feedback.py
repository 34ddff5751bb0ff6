import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe


def gradients(num_steps=6):
    return np.random.default_rng(0).normal(size=(num_steps, 3))


def movements(optimizer, **extra):
    state, found = optimizer.init(jnp.ones(3)), []
    for gradient in map(jnp.asarray, gradients()):
        updates, state = optimizer.update(gradient, state, jnp.ones(3), **extra)
        found.append(np.asarray(updates))
    return np.array(found)


@pytest.mark.parametrize("delay", [0, 0.5, 1, 4])
@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("inner", [optax.sgd, optax.adam], ids=["sgd", "adam"])
def test_is_the_formula(inner, strength, delay):
    with jax.enable_x64(True):
        plain = movements(inner(0.1))
        feedback = jpipe.optim.error_feedback(strength)
        found = movements(optax.chain(inner(0.1), feedback), delay=delay)
    expected = [plain[0]]
    for before, now in zip(plain, plain[1:]):
        expected.append(now + strength * min(delay, 1) * (now - before))
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_errors_do_not_pile_up():
    with jax.enable_x64(True):
        plain = movements(optax.adam(0.1))
        chain = optax.chain(optax.adam(0.1), jpipe.optim.error_feedback())
        found = movements(chain, delay=1)
    total = plain.sum(axis=0) + plain[-1] - plain[0]
    np.testing.assert_allclose(found.sum(axis=0), total, rtol=1e-9)


def test_one_late_gradient_stands_a_larger_rate():
    """On a quadratic of curvature 1 with a delay of 1: roots of x^3 - x^2 + a (2 x - 1), stable up to 2 / 3."""

    def diverges(rate, feedback):
        chain = [optax.sgd(rate)]
        chain += [jpipe.optim.error_feedback(delay=1)] if feedback else []
        optimizer = optax.chain(*chain)
        w, before = jnp.ones(()), jnp.ones(())
        state = optimizer.init(w)
        for _ in range(400):
            updates, state = optimizer.update(before, state)
            w, before = w + updates, w
        return not abs(w) < 1

    for rate in (0.1, 0.5, 0.64, 0.7, 0.9):
        roots = np.abs(np.roots([1, -1, 2 * rate, -rate]))
        assert diverges(rate, True) == (roots.max() > 1), rate
    # It slows the slowest root down less than plain late gradients do.
    late = np.abs(np.roots([1, -1, 0.25])).max()
    assert np.abs(np.roots([1, -1, 0.5, -0.25])).max() < 1 and late < 1


def test_takes_a_delay_for_each_weight():
    params = {"a": jnp.zeros(2), "b": jnp.zeros(1)}
    feedback = jpipe.optim.error_feedback(delay={"a": 1, "b": 0})
    state = feedback.init(params)
    for scale in (1.0, 3.0):
        updates = jax.tree.map(lambda p, scale=scale: scale + p, params)
        found, state = feedback.update(updates, state)
    np.testing.assert_array_equal(found["a"], 5)
    np.testing.assert_array_equal(found["b"], 3)


@pytest.mark.parametrize("strength", [-1, float("nan"), float("inf")])
def test_refuses_a_strength_that_is_none(strength):
    with pytest.raises(ValueError, match="`strength` must be at least 0, got"):
        jpipe.optim.error_feedback(strength)


def test_refuses_to_guess_the_delay():
    feedback = jpipe.optim.error_feedback()
    with pytest.raises(ValueError, match="`error_feedback` needs a delay, got none"):
        feedback.update(jnp.ones(2), feedback.init(jnp.ones(2)))
    with pytest.raises(ValueError, match="`delay` must be a number of updates"):
        jpipe.optim.error_feedback(delay=-1)
