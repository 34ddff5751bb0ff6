"""Every model of `models/` trains in a pipeline, and its numbers do not depend on the number of stages."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import MODELS, SLOW_MODELS, slow
from flax import nnx
from helpers import assert_close

import jpipe

KEY = jax.random.key(3)


def loss_fn(outputs, batch):
    del batch
    log_p = jax.nn.log_softmax(outputs.astype(jnp.float32))
    return -log_p[..., 0].mean()


@pytest.mark.parametrize(
    "name",
    [slow(name) if name in SLOW_MODELS else name for name in MODELS],
)
@pytest.mark.exhaustive
@pytest.mark.sampled(2)
def test_stages_change_nothing(name):
    model, inputs = MODELS[name]
    batch = {"inputs": inputs(np.random.default_rng(0))}
    results = []
    for S in (1, 3):
        pipe = jpipe.Pipeline(
            model.layers(),
            loss=loss_fn,
            optimizer=optax.sgd(0.1),
            schedule=jpipe.schedules.one_f_one_b(S, 2),
            ties=model.ties() if hasattr(model, "ties") else (),
        )
        state = pipe.init(KEY, batch)
        start = pipe.get_params(state)
        state, metrics = pipe.step(state, batch)
        moved = jax.tree.map(np.subtract, pipe.get_params(state), start)
        largest = max(np.abs(a).max() for a in jax.tree.leaves(moved))
        results.append((metrics["loss"], moved, pipe.get_mutable_state(state)))
        assert np.isfinite(metrics["loss"]) and largest > 0
    (loss, moved, running), (other_loss, other_moved, other_running) = results
    np.testing.assert_allclose(other_loss, loss, rtol=1e-5)
    # Weights minus weights: to the precision of the largest movement, not of each leaf's.
    for a, b in zip(jax.tree.leaves(other_moved), jax.tree.leaves(moved), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * largest + 1e-7)
    assert_close(other_running, running, "float32")


@pytest.mark.exhaustive
def test_unet_equals_the_program_written_out():
    model = MODELS["unet"][0]
    batch = {"inputs": MODELS["unet"][1](np.random.default_rng(1))}
    pipe = jpipe.Pipeline(
        model.layers(),
        loss=loss_fn,
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.one_f_one_b(3, 2),
    )
    state = pipe.init(KEY, batch)
    params = pipe.get_params(state)

    def plain(params):
        x, kept = batch["inputs"], {}
        for i, (factory, way) in enumerate(model.parts()):
            module = factory(rngs=nnx.Rngs(0))
            graph, values = nnx.split(module)
            nnx.replace_by_pure_dict(values, params[i])
            module = nnx.merge(graph, values)
            if "pop" in way:
                x = module(x, kept.pop(way["pop"]))
            elif "stash" in way:
                x, kept[way["stash"]] = module(x)
            else:
                x = module(x)
        return loss_fn(x, batch)

    value, grads = jax.jit(jax.value_and_grad(plain))(params)
    state, metrics = pipe.step(state, batch)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    want = jax.tree.map(lambda p, g: np.asarray(p - 0.1 * g), params, grads)
    assert_close(pipe.get_params(state), want, "float32")
