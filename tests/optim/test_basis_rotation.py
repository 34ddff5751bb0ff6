import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from jpipe.optim import scale_by_basis_rotation


def gradients(num_steps, *shape):
    return np.random.default_rng(0).normal(size=(num_steps, *shape))


def updates_of(transform, grads):
    state, found = transform.init(jnp.asarray(grads[0])), []
    for gradient in map(jnp.asarray, grads):
        updates, state = transform.update(gradient, state)
        found.append(np.asarray(updates))
    return np.array(found), state


def by_hand(grads, frequency, source, left, right, b1=0.9, b2=0.99, eps=1e-8):
    """Algorithm 1 for matrices; a side that is not rotated keeps the identity."""
    m, n = grads[0].shape
    U, V, L, R = np.eye(m), np.eye(n), np.zeros((m, m)), np.zeros((n, n))
    M, N, found = np.zeros((m, n)), np.zeros((m, n)), []
    for t, G in enumerate(grads, 1):
        M = b1 * M + (1 - b1) * G
        L, R = b2 * L + (1 - b2) * G @ G.T, b2 * R + (1 - b2) * G.T @ G
        if source == "momentum":
            L, R = M @ M.T, M.T @ M
        if t % frequency == 0:
            U = np.linalg.qr(L @ U)[0] if left else U
            V = np.linalg.qr(R @ V)[0] if right else V
        N = b2 * N + (1 - b2) * (U.T @ G @ V) ** 2
        step = (U.T @ M @ V / (1 - b1**t)) / (np.sqrt(N / (1 - b2**t)) + eps)
        found.append(U @ step @ V.T)
    return np.array(found)


@pytest.mark.parametrize(
    "shape, source, sides",
    [
        ((3, 3), "second_moment", "both"),
        ((2, 4), "second_moment", "both"),
        ((5, 3), "second_moment", "both"),
        ((2, 4), "second_moment", "smaller"),
        ((5, 3), "second_moment", "smaller"),
        # On the longer side `M M^T` is singular, and any completion of its basis is right.
        ((3, 3), "momentum", "both"),
        ((2, 4), "momentum", "smaller"),
        ((5, 3), "momentum", "smaller"),
    ],
)
def test_is_algorithm_1(shape, source, sides):
    grads = gradients(7, *shape)
    m, n = shape
    left, right = (True, True) if sides == "both" else (m <= n, n < m)
    expected = by_hand(grads, 3, source, left, right)
    with jax.enable_x64(True):
        transform = scale_by_basis_rotation(b2=0.99, frequency=3, source=source, sides=sides)
        found, _ = updates_of(transform, grads)
    np.testing.assert_allclose(found, expected, rtol=1e-7)


def test_vectors_get_adam():
    grads = gradients(5, 4)
    found, state = updates_of(scale_by_basis_rotation(), grads)
    expected, _ = updates_of(optax.scale_by_adam(), grads)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert jax.tree.leaves(state.basis) == []


def test_a_kernel_is_a_matrix_of_its_last_axis():
    grads = gradients(5, 2, 2, 1, 3)
    found, _ = updates_of(scale_by_basis_rotation(frequency=2), grads)
    flat, _ = updates_of(scale_by_basis_rotation(frequency=2), grads.reshape(5, 4, 3))
    np.testing.assert_array_equal(found.reshape(5, 4, 3), flat)


def test_long_sides_are_not_rotated():
    weight = jnp.ones((2, 5))
    state = scale_by_basis_rotation(max_size=4).init(weight)
    assert state.basis.left.shape == (2, 2) and state.basis.right is None
    found, _ = updates_of(scale_by_basis_rotation(max_size=1), gradients(4, 2, 5))
    expected, _ = updates_of(optax.scale_by_adam(), gradients(4, 2, 5))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_basis_becomes_that_of_the_covariance():
    """Gradients `A z B`: power iteration finds the eigenvectors of `A A^T`."""
    rng = np.random.default_rng(0)
    rotation = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    z = rng.normal(size=(400, 3, 3)) * np.array([10.0, 3.0, 1.0])[:, None]
    transform = scale_by_basis_rotation(b2=0.995, frequency=1)
    compiled = transform._replace(update=jax.jit(transform.update))
    _, state = updates_of(compiled, rotation @ z)
    overlap = np.abs(np.asarray(state.basis.left).T @ rotation)
    np.testing.assert_allclose(overlap, np.eye(3), atol=0.15)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(b1=1.0), "`b1` must be at least 0 and below 1"),
        (dict(b2=-0.1), "`b2` must be at least 0 and below 1"),
        (dict(frequency=0), "`frequency` must be a whole number of updates"),
        (dict(frequency=1.5), "`frequency` must be a whole number of updates"),
        (
            dict(source="1st"),
            "`source` must be one of 'second_moment', 'momentum', got",
        ),
        (dict(sides="left"), "`sides` must be one of 'both', 'smaller', got 'left'"),
        (dict(max_size=0), "`max_size` must be at least 1"),
    ],
)
def test_refuses_what_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        jpipe.optim.scale_by_basis_rotation(**arguments)
