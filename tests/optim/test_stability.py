"""How large a learning rate late gradients stand, found by Optax itself.

The loss is a quadratic of curvature 1. Everything in a step is linear: the gradient, the
chain, and the weights for the backward. So a step is a matrix, read off by giving the step
every basis vector of (past weights, past weights of backwards, optimizer state), and
training is stable as long as no eigenvalue of it is larger than 1.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

from jpipe import optim


def plain(learning_rate, decay):
    del decay
    return optax.sgd(learning_rate)


def rescheduled(learning_rate, decay):
    """T1 that does not end."""
    return optax.chain(plain(learning_rate, decay), optim.scale_by_delay(math.inf))


def corrected(learning_rate, decay):
    """T2."""
    return optax.chain(plain(learning_rate, None), optim.correct_discrepancy(decay))


def corrected_by_theory(learning_rate, decay):
    del decay
    return corrected(learning_rate, None)


def start(optimizer, delay, backward_delay):
    """Weights of 1, at any time."""
    weights = jnp.ones(delay + 1)
    return weights, weights[:backward_delay], optimizer.init(weights[0])


def step(optimizer, delay, backward_delay, sensitivity, carry):
    """One update by the gradient `(1 + Delta) u_forward - Delta u_backward`.

    Delta is the discrepancy sensitivity of PipeMare's lemma 2. Both passes read old
    weights; those of the backward were corrected by the velocity of their own time.
    """
    read, read_backward, state = carry  # `read[i]`: the weight i updates ago
    now = read[0]
    if optax.tree_utils.tree_get(state, "CorrectDiscrepancyState"):
        now = optim.corrected_params(now, state, delay - backward_delay)
    read_backward = jnp.concatenate([now[None], read_backward])
    gradient = (1 + sensitivity) * read[delay]
    gradient -= sensitivity * read_backward[backward_delay]
    updates, state = optimizer.update(gradient, state, read[0], delay=delay, backward_delay=backward_delay)
    new = optax.apply_updates(read[0], updates)
    return jnp.concatenate([new[None], read[:-1]]), read_backward[:-1], state


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def matrices(make_optimizer, delay, backward_delay, learning_rates, decay, sensitivity):
    """`[R, n, n]`, one step for each of R learning rates."""

    def matrix(learning_rate):
        optimizer = make_optimizer(learning_rate, decay)
        flat, unflatten = ravel_pytree(start(optimizer, delay, backward_delay))

        def of_vector(vector):
            carry = unflatten(vector)
            carry = step(optimizer, delay, backward_delay, sensitivity, carry)
            return ravel_pytree(carry)[0]

        return jax.vmap(of_vector)(jnp.eye(flat.size))

    return jax.vmap(matrix)(learning_rates)


def stable(learning_rates, make_optimizer, delay, backward_delay=0, decay=0.0, sensitivity=0.0):
    """Whether training with each learning rate is stable."""
    with jax.enable_x64(True):
        steps = matrices(make_optimizer, delay, backward_delay, learning_rates, decay, sensitivity)
    return np.abs(np.linalg.eigvals(steps)).max(axis=1) <= 1


DELAYS = [0, 1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize("delay", DELAYS)
def test_lemma_1(delay):
    lower, upper = 0.0, 3.0
    while upper - lower > 1e-7:
        rates = np.linspace(lower, upper, 18)
        first = 1 + np.argmin(stable(rates[1:], plain, delay))
        lower, upper = rates[first - 1], rates[first]
    np.testing.assert_allclose(lower, 2 * math.sin(math.pi / (4 * delay + 2)), 1e-5)


# Largest stable learning rate on a grid of 1e-4, which ends at .6.
T2 = """
    tau  Delta   no T2   D=.01    D=.1  D=.135    D=.5    D=.9  theory
  10, 6      0   .1494   .1494   .1494   .1494   .1494   .1494   .1494
  10, 6      1   .0956   .1598   .1504   .1474   .1166   .0950   .1479
  10, 6      5   .0380   .0638   .1036   .1157   .0659   .0390   .1139
  10, 6     10   .0216   .0327   .0540   .0606   .0439   .0229   .0596
  10, 0      1   .0592   .1590   .1396   .1311   .0785   .0608   .1312
  10, 0      5   .0175   .0846   .1191   .0972   .0289   .0184   .0976
  10, 0     10   .0093   .0432   .0835   .0791   .0164   .0099   .0795
  10, 0     -1   .6000   .1206   .1629   .1821   .6000   .6000   .1818
"""
COLUMNS = [
    (plain, 0.0),
    *((corrected, decay) for decay in (0.01, 0.1, 0.135, 0.5, 0.9)),
    (corrected_by_theory, 0.0),
]
ROWS = [line.replace(",", " ").split() for line in T2.strip().splitlines()[1:]]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row[:3]))
def test_t2_table(row):
    """Stable up to the number, unstable from the next point of the grid on, and not stable again."""
    delay, backward_delay, sensitivity = map(int, row[:3])
    for (make_optimizer, decay), number in zip(COLUMNS, row[3:], strict=True):
        largest = round(float(number) * 1e4)
        grid = np.array([largest, largest + 1, *range(100, 6001, 100)])
        found = stable(
            grid * 1e-4,
            make_optimizer,
            delay,
            backward_delay,
            decay,
            float(sensitivity),
        )
        at_most = grid <= (largest if largest < 6000 else 6001)
        np.testing.assert_array_equal(found, at_most, err_msg=f"decay {decay}")


# -- The same as training -------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(0, 1))
def train(make_optimizer, delay, learning_rate):
    """The weight after each of 1000 updates from 1, all gradients `delay` late."""
    optimizer = make_optimizer(learning_rate, None)

    def body(carry, _):
        carry = step(optimizer, delay, delay, 0.0, carry)
        return carry, carry[0][0]

    return jax.lax.scan(body, start(optimizer, delay, delay), length=1000)[1]


def test_late_gradients_diverge_where_prompt_ones_converge():
    for learning_rate in (0.18, 0.25):
        assert abs(train(plain, 0, learning_rate)[-1]) < 1e-6
    assert abs(train(plain, 8, 0.18)[-1]) < 0.1
    assert abs(train(plain, 8, 0.25)[-1]) > 1e6


def test_t1_divides_the_learning_rate_by_the_delay():
    found, expected = train(rescheduled, 8, 0.25), train(plain, 8, 0.25 / 8)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert abs(found[-1]) < 1e-6


def test_t1_makes_a_learning_rate_stable_at_every_delay():
    """By lemma 1 the largest is 2 tau sin(pi / (4 tau + 2)): 1, 1.24, 1.39, ... pi / 2."""
    for delay in DELAYS:
        assert abs(train(rescheduled, delay, 0.9)[-1]) < 0.1
    for delay in DELAYS[2:]:
        assert not abs(train(plain, delay, 0.9)[-1]) < 1e6


# -- As functions ---------------------------------------------------------------------


@pytest.mark.parametrize("curvature", [0.5, 3.0])
@pytest.mark.parametrize("delay", [*DELAYS, 107])
def test_largest_stable_rate_is_where_a_root_leaves_the_circle(curvature, delay):
    """Roots of x^(tau + 1) - x^tau + alpha lambda, the characteristic polynomial of lemma 1."""
    rate = optim.largest_stable_rate(curvature, delay)
    for factor, is_stable in ((1 - 1e-4, True), (1 + 1e-4, False)):
        polynomial = np.zeros(delay + 2)
        polynomial[0] = 1
        polynomial[1] -= 1
        polynomial[-1] += rate * factor * curvature
        assert (np.abs(np.roots(polynomial)).max() <= 1) == is_stable


OPTIMIZERS = {
    "momentum": lambda rate: optax.sgd(rate, momentum=0.9),
    "nesterov": lambda rate: optax.sgd(rate, momentum=0.8, nesterov=True),
}
MOMENTUM = {"momentum": (0.9, False), "nesterov": (0.8, True)}


@pytest.mark.parametrize("delay", [0, 1, 2, 8])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_largest_stable_rate_with_momentum_is_that_of_optax(name, delay):
    """The step of Optax's own optimizer as a matrix, whose eigenvalues leave the circle there."""
    bound = optim.largest_stable_rate(1.0, delay, *MOMENTUM[name])
    rates = bound * np.array([0.5, 1 - 1e-4, 1 + 1e-4])
    found = stable(rates, lambda rate, _: OPTIMIZERS[name](rate), delay)
    assert found.tolist() == [True, True, False]
    if name == "momentum" and delay == 0:
        np.testing.assert_allclose(bound, 2 * 1.9, rtol=1e-6)


def test_largest_stable_rate_takes_arrays():
    found = optim.largest_stable_rate(2.0, [8, 1, 0])
    expected = [optim.largest_stable_rate(2.0, delay) for delay in (8, 1, 0)]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "curvature, delay, message",
    [
        (0.0, 1, "`curvature` must be above 0, got 0.0"),
        (-1.0, 1, "`curvature` must be above 0"),
        (math.nan, 1, "`curvature` must be above 0"),
        (math.inf, 1, "`curvature` must be above 0"),
        (1.0, -1, "`delay` must be a number of updates, at least 0"),
        (1.0, [1, math.inf], "`delay` must be a number of updates, at least 0"),
        (1.0, 1.5, "`delay` must be a whole number of updates, got 1.5"),
    ],
)
def test_largest_stable_rate_refuses(curvature, delay, message):
    with pytest.raises(ValueError, match=message):
        optim.largest_stable_rate(curvature, delay)


def test_largest_stable_rate_refuses_a_momentum_of_one():
    with pytest.raises(ValueError, match="`momentum` must be at least 0 and below 1"):
        optim.largest_stable_rate(1.0, 1, momentum=1.0)


@pytest.mark.parametrize("eigenvalues", [(5, 3, 1), (4, -1, 0), (2, -7, 1), (0, 0, 0)])
def test_largest_curvature_is_the_largest_eigenvalue(eigenvalues):
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    hessian = jnp.asarray(basis @ np.diag(eigenvalues) @ basis.T, jnp.float32)

    def loss(params):
        w = jnp.concatenate([params["a"], params["b"].ravel()])
        return w @ hessian @ w / 2 + jnp.sum(w)

    params = {"a": jnp.ones(2), "b": jnp.ones((1, 1)), "none": None}
    found, count = optim.largest_curvature(loss, params, jax.random.key(0), max_iterations=200, tolerance=1e-6)
    np.testing.assert_allclose(found, max(eigenvalues), rtol=1e-3, atol=1e-6)
    assert 1 <= count <= 400


def test_largest_curvature_with_a_scale():
    """Of the Hessian between two roots of the scale, as a matrix."""
    rng = np.random.default_rng(0)
    half = rng.normal(size=(3, 3))
    hessian, scale = half @ half.T, np.array([4.0, 0.25, 1.0])
    matrix = np.sqrt(scale)[:, None] * hessian * np.sqrt(scale)
    loss = lambda w: w @ jnp.asarray(hessian, jnp.float32) @ w / 2  # noqa: E731
    found, _ = optim.largest_curvature(
        loss,
        jnp.ones(3),
        jax.random.key(0),
        max_iterations=200,
        tolerance=1e-6,
        scale=jnp.asarray(scale),
    )
    np.testing.assert_allclose(found, np.linalg.eigvalsh(matrix).max(), rtol=1e-3)


def test_largest_curvature_refuses():
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="`max_iterations` must be at least 1, got 0"):
        optim.largest_curvature(jnp.sum, jnp.ones(2), key, max_iterations=0)
    with pytest.raises(ValueError, match="`params` has no weights"):
        optim.largest_curvature(lambda w: 0.0, {}, key)
    with pytest.raises(ValueError, match="the curvature is not finite"):
        optim.largest_curvature(lambda w: jnp.sum(w**1.5), jnp.zeros(2), key)
