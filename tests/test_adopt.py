"""Another pipeline goes on where one stopped, and low-precision compute with full-precision weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from families import FAMILIES, cross_entropy

import jpipe

SCHEDULES = jpipe.schedules


def test_adopt_goes_on_as_if_nothing_had_happened():
    family = FAMILIES["mlp"]
    plain = oracles.PlainModel(family.layers, jax.random.key(0))
    batches = family.batches(4, 12)
    optimizer = optax.sgd(optax.linear_schedule(0.5, 0.0, 5), momentum=0.9)
    losses, _, params = oracles.train(
        plain, plain.params, cross_entropy, optimizer, batches
    )

    shared = dict(loss=cross_entropy, optimizer=optimizer)
    first = jpipe.Pipeline(
        family.layers, schedule=SCHEDULES.one_f_one_b(2, 4), **shared
    )
    second = jpipe.Pipeline(
        family.layers,
        schedule=SCHEDULES.gpipe(3, 6),
        boundaries=[1, 2],
        recompute="full",
        **shared,
    )
    state = first.init(jax.random.key(0), batches[0], params=plain.params)
    got = []
    for batch in batches[:2]:
        state, metrics = first.step(state, batch)
        got.append(metrics["loss"])
    state = second.adopt(state)
    for batch in batches[2:]:
        state, metrics = second.step(state, batch)
        got.append(metrics["loss"])
    np.testing.assert_allclose(got, losses, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()),
        second.get_params(state),
        params,
    )
    with pytest.raises(ValueError, match="made by another pipeline.*adopt"):
        first.step(state, batches[0])
    third = jpipe.Pipeline(
        family.layers,
        loss=cross_entropy,
        optimizer=optax.adam(0.1),
        schedule=SCHEDULES.gpipe(1, 3),
    )
    with pytest.raises(
        ValueError, match="another optimizer: this one keeps .*(count|mu)"
    ):
        third.adopt(state)


def test_compute_dtype_casts_every_layer_and_keeps_the_weights():
    family = FAMILIES["mlp"]
    plain = oracles.PlainModel(family.layers, jax.random.key(0))
    batches = family.batches(3, 8)

    def low(tree):
        return jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)

    class LowPrecision:
        def __call__(self, params, x):
            return plain(low(params), low(x)).astype(jnp.float32)

    losses, _, params = oracles.train(
        LowPrecision(), plain.params, cross_entropy, optax.sgd(0.5), batches
    )
    pipe = jpipe.Pipeline(
        family.layers,
        loss=cross_entropy,
        optimizer=optax.sgd(0.5),
        schedule=SCHEDULES.one_f_one_b(2, 1),
        compute_dtype=jnp.bfloat16,
    )
    state = pipe.init(jax.random.key(0), batches[0], params=plain.params)
    for batch, loss in zip(batches, losses):
        state, metrics = pipe.step(state, batch)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=2e-2)
    for got, want in zip(
        jax.tree.leaves(pipe.get_params(state)), jax.tree.leaves(params), strict=True
    ):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, atol=2e-2 * np.abs(want).max())
    assert state.program.stages.activations.arrays.keys() == {"bfloat16[8, 8]"}
    assert pipe.predict(state, batches[0]).dtype == np.float32


def test_compute_dtype_must_be_floating():
    with pytest.raises(
        ValueError, match="`compute_dtype` must be a floating-point dtype"
    ):
        jpipe.Pipeline(
            FAMILIES["mlp"].layers,
            loss=cross_entropy,
            optimizer=optax.sgd(0.1),
            schedule=SCHEDULES.gpipe(1, 1),
            compute_dtype=jnp.int8,
        )
