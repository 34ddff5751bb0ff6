import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe


def gradients(num_steps=30):
    return np.random.default_rng(0).normal(size=(num_steps, 3))


def run(optimizer, gradients):
    """The weights after each gradient."""
    params, found = jnp.ones(3), []
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        found.append(np.asarray(params))
    return found


def pytorch(gradients, rate, b1, b2, eps, psi, weight_decay):
    """`torch.optim.NAdam` with decoupled weight decay, from its documentation."""
    w, m, v, product, found = np.ones(3), np.zeros(3), np.zeros(3), 1.0, []
    for t, g in enumerate(gradients, start=1):
        w = w * (1 - rate * weight_decay)
        mu, mu_next = (b1 * (1 - 0.5 * 0.96 ** (u * psi)) for u in (t, t + 1))
        product *= mu
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        m_hat = mu_next * m / (1 - product * mu_next) + (1 - mu) * g / (1 - product)
        w = w - rate * m_hat / (np.sqrt(v / (1 - b2**t)) + eps)
        found.append(w)
    return found


@pytest.mark.parametrize("b1, psi", [(0.99, 4e-3), (0.9, 0.5), (0.0, 4e-3), (0.9, 0)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_is_pytorchs(b1, psi, weight_decay):
    expected = pytorch(gradients(), 0.01, b1, 0.95, 1e-6, psi, weight_decay)
    with jax.enable_x64(True):
        found = run(jpipe.optim.nadamw(0.01, b1, 0.95, 1e-6, psi, weight_decay), gradients())
    np.testing.assert_allclose(found, expected, rtol=1e-11)


def test_defaults_are_those_of_asynchronous_nesterov():
    expected = pytorch(gradients(), 0.01, 0.99, 0.999, 1e-8, 4e-3, 1e-4)
    np.testing.assert_allclose(run(jpipe.optim.nadamw(0.01), gradients()), expected, rtol=1e-5)


def test_is_optax_nadamw_without_warm_up_of_the_momentum():
    with jax.enable_x64(True):
        ours = jpipe.optim.nadamw(0.01, b1=0.9, momentum_decay=1e9)
        found, expected = run(ours, gradients()), run(optax.nadamw(0.01), gradients())
        warming_up = run(jpipe.optim.nadamw(0.01, b1=0.9), gradients())
    np.testing.assert_allclose(found, expected, rtol=1e-11)
    assert not np.allclose(warming_up, expected, rtol=1e-3)


def test_steps_between_the_look_aheads_of_nesterovs_method():
    """The paper's equation, once the corrections of the first updates have died out."""
    signs, gamma, eta = np.sign(gradients(100)), 0.6, 0.01  # so the second moment is 1
    w, last, look_ahead = np.ones(3), np.ones(3), []
    for sign in signs:
        d = gamma * (w - last)
        w, last = w + d - eta * (1 - gamma) * sign, w
        look_ahead.append(w + gamma * (w - last))
    with jax.enable_x64(True):
        found = run(
            jpipe.optim.nadamw(eta, gamma, eps=0.0, momentum_decay=1e9, weight_decay=0.0),
            signs,
        )
    np.testing.assert_allclose(np.diff(found, axis=0)[80:], np.diff(look_ahead, axis=0)[80:], rtol=1e-9)


def test_decays_by_mask_and_schedule():
    optimizer = jpipe.optim.nadamw(
        optax.piecewise_constant_schedule(0.5, {1: 0.5}),
        weight_decay=0.1,
        mask={"a": True, "b": False},
    )
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    zeros, state = jax.tree.map(jnp.zeros_like, params), optimizer.init(params)
    updates, state = optimizer.update(zeros, state, params)
    np.testing.assert_allclose(updates["a"], -0.05, rtol=1e-6)
    updates, state = optimizer.update(zeros, state, params)
    np.testing.assert_allclose(updates["a"], -0.025, rtol=1e-6)
    np.testing.assert_array_equal(updates["b"], np.zeros(2))


@pytest.mark.parametrize(
    "name, value",
    [("b1", 1), ("b1", -0.1), ("b2", 1.5), ("b2", np.nan), ("momentum_decay", -1)],
)
def test_refuses_what_is_out_of_range(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be at least 0"):
        jpipe.optim.scale_by_nadam(**{name: value})
    with pytest.raises(ValueError, match=f"`{name}` must be at least 0"):
        jpipe.optim.nadamw(1e-3, **{name: value})
