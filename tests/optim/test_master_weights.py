"""A copy of the weights in float32 is trained, and the weights are its rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jpipe.optim import master_weights


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_the_copy_is_trained_as_by_the_optimizer_alone(dtype):
    rng = np.random.default_rng(0)
    weights = {"a": jnp.asarray(rng.normal(size=(5, 7)), dtype)}
    gradients = [jnp.asarray(rng.normal(size=(5, 7)), dtype) for _ in range(30)]
    optimizer = optax.adamw(1e-3)
    wrapped = master_weights(optimizer)
    plain = jax.tree.map(lambda a: a.astype(jnp.float32), weights)
    plain_state, state = optimizer.init(plain), wrapped.init(weights)
    for gradient in gradients:
        g = {"a": gradient.astype(jnp.float32)}
        updates, plain_state = optimizer.update(g, plain_state, plain)
        plain = optax.apply_updates(plain, updates)
        updates, state = wrapped.update({"a": gradient}, state, weights)
        weights = optax.apply_updates(weights, updates)
        np.testing.assert_array_equal(state.weights["a"], plain["a"])
        np.testing.assert_array_equal(
            weights["a"].astype(jnp.float32),
            plain["a"].astype(dtype).astype(jnp.float32),
        )
        assert weights["a"].dtype == dtype


def test_small_updates_are_not_lost():
    optimizer = master_weights(optax.sgd(1e-4))
    weights = jnp.ones(3, jnp.bfloat16)
    state = optimizer.init(weights)
    for _ in range(1000):
        updates, state = optimizer.update(jnp.ones(3, jnp.bfloat16), state, weights)
        weights = optax.apply_updates(weights, updates)
    np.testing.assert_allclose(weights.astype(jnp.float32), 0.9, rtol=2**-8)


def test_fourteen_bytes_for_a_weight():
    """Adam's state and a weight in bfloat16: PatrickStar's account, from arrays."""
    weights = jnp.ones((128, 64), jnp.bfloat16)
    state = master_weights(optax.adam(1e-3)).init(weights)
    arrays = [weights, *(a for a in jax.tree.leaves(state) if a.ndim)]
    assert sum(a.nbytes for a in arrays) == 14 * weights.size


def test_weights_are_needed():
    optimizer = master_weights(optax.sgd(0.1))
    with pytest.raises(ValueError, match="needs the weights"):
        optimizer.update(jnp.ones(2), optimizer.init(jnp.ones(2)))
