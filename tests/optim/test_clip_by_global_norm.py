import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from families import FAMILIES, cross_entropy

import jpipe


@pytest.mark.parametrize("max_norm", [0.1, 100.0])
def test_equals_optax_outside_a_pipeline(max_norm):
    grads = {"a": jnp.arange(4.0), "b": [jnp.full((2, 2), -3.0)]}
    ours, theirs = (
        jpipe.optim.clip_by_global_norm(max_norm),
        optax.clip_by_global_norm(max_norm),
    )
    got, _ = jax.jit(lambda g: ours.update(g, ours.init(g)))(grads)
    want, _ = theirs.update(grads, theirs.init(grads))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


def test_keeps_dtype_and_takes_the_norm_it_is_given():
    clip = jpipe.optim.clip_by_global_norm(1.0)
    grads = jnp.ones(3, jnp.bfloat16)
    got, _ = clip.update(grads, clip.init(grads), global_norm=jnp.float32(4.0))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got.astype(np.float32), np.full(3, 0.25))


def test_is_the_plain_models_clipping_on_every_stage():
    family = FAMILIES["mlp"]
    plain = oracles.PlainModel(family.layers, jax.random.key(0))
    batches = family.batches(3, 4)
    pipe = jpipe.Pipeline(
        family.layers,
        loss=cross_entropy,
        optimizer=optax.chain(jpipe.optim.clip_by_global_norm(0.1), optax.sgd(1.0)),
        schedule=jpipe.schedules.one_f_one_b(3, 4),
    )
    state = pipe.init(jax.random.key(0), batches[0], params=plain.params)
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))
    losses, gradients, params = oracles.train(plain, plain.params, cross_entropy, optimizer, batches)
    assert max(optax.tree.norm(g) for g in gradients) > 0.1  # there was something to clip
    for batch, loss in zip(batches, losses):
        state, metrics = pipe.step(state, batch)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()),
        pipe.get_params(state),
        params,
    )


def test_refuses_a_norm_that_is_not_positive():
    with pytest.raises(ValueError, match="`max_norm` must be above 0, got 0"):
        jpipe.optim.clip_by_global_norm(0)
