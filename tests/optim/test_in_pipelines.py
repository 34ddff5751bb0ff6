"""Every method in an asynchronous pipeline, emulated at many stages on one device, and on two real stages."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import FAMILIES, cross_entropy
from flax import nnx
from helpers import assert_close

import jpipe
from jpipe import optim, schedules

RATE = 0.05


def falling(count):
    """A learning rate, in the precision of the weights."""
    return RATE * (1 - jnp.asarray(count, float) / 9)


def muon():
    return optax.chain(optax.contrib.muon(RATE, adam_learning_rate=RATE), optim.error_feedback())


# Name -> the optimizer and the hooks.
METHODS = {
    "basis rotation": lambda: dict(
        optimizer=optax.chain(
            optim.scale_by_basis_rotation(frequency=2),
            optax.scale_by_learning_rate(RATE),
        )
    ),
    "error feedback": lambda: dict(optimizer=optax.chain(optax.adam(RATE), optim.error_feedback())),
    "muon": lambda: dict(optimizer=muon()),
    "ema": lambda: dict(optimizer=optax.chain(optax.sgd(RATE), optim.ema_weights(0.9))),
    "prediction": lambda: dict(
        optimizer=optax.chain(optax.sgd(falling, momentum=0.9), optim.predict_weights(falling)),
        forward_params=optim.predicted_params,
    ),
}


def trained(schedule, num_steps, **options):
    """Weights and state after some minibatches, all of them complete."""
    family = FAMILIES["mlp"].in_dtype("float64")
    pipe = jpipe.Pipeline(family.layers, loss=cross_entropy, schedule=schedule, **options)
    batches = family.batches(num_steps, 4, np.float64)
    state = pipe.init(jax.random.key(0), batches[0])
    for batch in batches:
        state, _ = pipe.step(state, batch)
    state, _ = pipe.flush(state)
    return pipe, state


@pytest.mark.exhaustive
@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", METHODS)
def test_two_stages_compute_what_is_emulated(name):
    table = schedules.pipemare(2, 1, ticks="paired")
    with jax.enable_x64(True):
        results = []
        for schedule in (table, schedules.emulated(table)):
            pipe, state = trained(schedule, 5, **METHODS[name]())
            results.append(pipe.get_params(state))
            if name == "ema":
                averaged = pipe.with_params(state, optim.averaged_params)
                results[-1] = results[-1], pipe.get_params(averaged)
    assert_close(*results, "float64")
    chex.assert_tree_all_finite(results)


@pytest.mark.exhaustive
@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", METHODS)
def test_runs_at_a_stage_for_each_layer(name):
    """Delays of 11 to 1 on six stages: the weights move, and differ from those without delay."""
    late = schedules.emulated(schedules.pipemare(6, 1, ticks="paired"))
    assert late.facts().forward_delay.tolist() == [11, 9, 7, 5, 3, 1]
    results = []
    for schedule in (late, schedules.emulated(schedules.gpipe(6, 1))):
        with jax.enable_x64(True):
            pipe, state = trained(schedule, 6, **METHODS[name]())
        results.append(jax.tree.leaves(pipe.get_params(state)))
    chex.assert_tree_all_finite(results[0])
    assert any(np.abs(a - b).max() > 1e-4 for a, b in zip(*results, strict=True))


# -- Weights that the optimizer keeps ----------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("devices", ["emulated", "real"])
def test_the_average_of_a_pipeline_is_that_of_its_weights(devices):
    schedule = schedules.pipemare(2, 2)
    if devices == "emulated":
        schedule = schedules.emulated(schedule)
    family = FAMILIES["mlp"]
    pipe = jpipe.Pipeline(
        family.layers,
        loss=cross_entropy,
        optimizer=optax.chain(optax.sgd(0.1), optim.ema_weights(0.5)),
        schedule=schedule,
    )
    batches = family.batches(5, 4)
    state = pipe.init(jax.random.key(0), batches[0])
    history: list = [pipe.get_params(state)]
    for batch in batches:
        state, _ = pipe.step(state, batch)
        history.append(pipe.get_params(state))
    averaged = pipe.with_params(state, optim.averaged_params)
    found = pipe.get_params(averaged)
    for layer in range(len(found)):
        of_layer = [tree[layer] for tree in history]
        versions = [np.concatenate([a.ravel() for a in jax.tree.leaves(tree)]) for tree in of_layer]
        # A stage of a pipeline that fills has not updated in every step.
        moved = [b for a, b in zip(versions, versions[1:]) if (a != b).any()]
        coefficients = 0.5 ** np.arange(len(moved))[::-1]
        expected = np.average(moved, axis=0, weights=coefficients)
        got = np.concatenate([a.ravel() for a in jax.tree.leaves(found[layer])])
        if len(got):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
    # The state itself goes on as before.
    jax.tree.map(np.testing.assert_array_equal, pipe.get_params(state), history[-1])
    loss = pipe.evaluate(averaged, batches[0])["loss"]
    restarted = pipe.init(jax.random.key(1), batches[0], params=found)
    expected = pipe.evaluate(restarted, batches[0])["loss"]
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    pipe.step(state, batches[0])


def test_with_params_changes_a_tied_weight_everywhere():
    layers = [functools.partial(nnx.Linear, 4, 4) for _ in range(2)]
    pipe = jpipe.Pipeline(
        layers,
        loss=lambda y, batch: jnp.mean(y**2),
        optimizer=optax.sgd(0.1),
        schedule=schedules.gpipe(2, 1),
        ties=[[(0, "kernel"), (1, "kernel")]],
    )
    batch = {"inputs": np.ones((2, 4), np.float32)}
    state = pipe.init(jax.random.key(0), batch)
    before = pipe.get_params(state)
    doubled = pipe.with_params(state, lambda params, _: jax.tree.map(lambda a: 2 * a, params))
    after = pipe.get_params(doubled)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(b, 2 * a), before, after)


@pytest.mark.exhaustive
def test_with_params_refuses_other_shapes():
    pipe, state = trained(schedules.emulated(schedules.gpipe(2, 1)), 1, optimizer=optax.sgd(0.1))
    with pytest.raises(ValueError, match="`function` of `with_params` returns other"):
        pipe.with_params(state, lambda params, _: params[:1])
