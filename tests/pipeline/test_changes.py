"""What changes in the middle of a training: hyperparameters, masks, schedules, and the shape of batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import refused

import jpipe

KEY = jax.random.key(0)
BATCH = {"inputs": np.arange(1.0, 9, dtype=np.float32)}
SGD = optax.inject_hyperparams(optax.sgd)
SCHEDULES = jpipe.schedules


LAYER = jpipe.InitApply(lambda key, x: {"w": jnp.zeros(4)}, lambda params, x: x + params["w"].sum())


def pipeline(optimizer, schedule=None, data=1, num_layers=None, **options):
    """Weights that each move by the learning rate in an update: the gradient of each is 1."""
    schedule = schedule or SCHEDULES.gpipe(2, 2)
    return jpipe.Pipeline(
        [LAYER] * (num_layers or schedule.num_stages),
        loss=lambda outputs, batch: jnp.mean(outputs),
        optimizer=optimizer,
        schedule=schedule,
        mesh=jpipe.make_mesh(stage=schedule.num_devices, data=data),
        **options,
    )


def weights(pipe, state):
    return np.stack([layer["w"] for layer in pipe.get_params(state)])


CASES = {
    "gpipe": ({}, None),
    "replicas": ({"data": 2}, None),
    "shared update": ({"data": 2, "shard_optimizer": True}, None),
    "copies": ({}, lambda: SCHEDULES.gpipe(2, 2, replicas=(1, 2))),
    "host memory": ({"offload": jpipe.Offload(optimizer=1.0)}, None),
    "two stages of a device": ({}, lambda: SCHEDULES.interleaved(2, 2, num_chunks=2)),
}


@pytest.mark.first_case
@pytest.mark.parametrize("case", CASES)
def test_a_rate_is_set_on_every_device(case):
    options, schedule = CASES[case]
    pipe = pipeline(SGD(learning_rate=0.5, momentum=0.0), schedule and schedule(), **options)
    state = pipe.init(KEY, BATCH)
    state, _ = pipe.step(state, BATCH)
    np.testing.assert_array_equal(weights(pipe, state), -0.5)
    state = pipe.with_hyperparams(state, learning_rate=0.25)
    assert pipe.get_hyperparams(state) == {"learning_rate": 0.25, "momentum": 0.0}
    for expected in (-0.75, -1.0):
        state, _ = pipe.step(state, BATCH)
        np.testing.assert_array_equal(weights(pipe, state), expected)


def test_microbatches_in_flight_stay():
    pipe = pipeline(SGD(learning_rate=0.5), SCHEDULES.pipedream(2, 2), donate=False)
    state = pipe.init(KEY, BATCH)
    state, _ = pipe.step(state, BATCH)
    before = weights(pipe, state)
    later = weights(pipe, pipe.flush(state)[0])
    assert (later < before).any()
    still = pipe.flush(pipe.with_hyperparams(state, learning_rate=0.0))[0]
    np.testing.assert_array_equal(weights(pipe, still), before)


def by_layer(params):
    label = dict(enumerate("ab"))
    return [tree and jax.tree.map(lambda _, i=i: label[i], tree) for i, tree in enumerate(params)]


def test_several_of_one_name_go_by_their_paths():
    optimizer = optax.multi_transform({"a": SGD(learning_rate=0.5), "b": SGD(learning_rate=1.0)}, by_layer)
    pipe = pipeline(optimizer)
    state = pipe.init(KEY, BATCH)
    paths = [name for name in pipe.get_hyperparams(state) if "learning_rate" in name]
    assert len(paths) == 2
    with refused(r"2 hyperparameters are named `learning_rate`. Give the path"):
        pipe.with_hyperparams(state, learning_rate=0.0)
    state = pipe.with_hyperparams(state, **{next(p for p in paths if "'b'" in p): 0.25})
    state, _ = pipe.step(state, BATCH)
    np.testing.assert_array_equal(weights(pipe, state)[:, 0], [-0.5, -0.25])


def test_refusals():
    pipe = pipeline(SGD(learning_rate=lambda count: 0.5, momentum=0.5))
    state = pipe.init(KEY, BATCH)
    np.testing.assert_array_equal(pipe.get_hyperparams(state)["learning_rate"], 0.5)
    with refused("`learning_rate` is computed from the number of updates"):
        pipe.with_hyperparams(state, learning_rate=0.25)
    with refused("no hyperparameter `moment`, it has .* Did you mean 'momentum'"):
        pipe.with_hyperparams(state, moment=0.25)
    with refused(r"is a number float32\[\], and cannot be 'a'"):
        pipe.with_hyperparams(state, momentum="a")
    plain = pipeline(optax.sgd(0.5))
    state = plain.init(KEY, BATCH)
    assert plain.get_hyperparams(state) == {}
    with refused("holds no hyperparameters. .*`optax.inject_hyperparams"):
        plain.with_hyperparams(state, learning_rate=0.25)


@pytest.mark.first_case
@pytest.mark.parametrize(
    "schedule",
    [SCHEDULES.gpipe(2, 2), SCHEDULES.gpipe(1, 1)],
    ids=["same layout", "other layout"],
)
def test_another_pipeline_takes_over_values_or_begins_with_its_own(schedule, tmp_path):
    """What the second pipeline was given anew counts, and what was set in the first one stays."""
    first = pipeline(SGD(learning_rate=0.5, momentum=0.5))
    state = first.init(KEY, BATCH)
    state = first.with_hyperparams(state, learning_rate=0.25, momentum=0.75)
    with jpipe.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        for rate, expected in ((0.5, 0.25), (0.125, 0.125)):
            optimizer = SGD(learning_rate=rate, momentum=0.5)
            pipe = pipeline(optimizer, schedule, num_layers=2)
            for taken in (pipe.adopt(state), checkpoints.restore(pipe, BATCH).state):
                found = pipe.get_hyperparams(taken)
                assert found == {"learning_rate": expected, "momentum": 0.75}


def test_a_state_of_another_first_value_is_not_taken_for_ones_own():
    state = pipeline(SGD(learning_rate=0.5)).init(KEY, BATCH)
    with pytest.raises(ValueError, match="another pipeline, which differs in `optimizer`"):
        pipeline(SGD(learning_rate=0.25)).step(state, BATCH)


def trained_layers(*trained):
    """SGD with momentum on some layers; the others stay."""

    def labels(params):
        return [tree and jax.tree.map(lambda _, i=i: str(i in trained), tree) for i, tree in enumerate(params)]

    sgd = optax.sgd(1.0, momentum=0.5)
    return optax.multi_transform({"True": sgd, "False": optax.set_to_zero()}, labels)


def test_a_mask_changes():
    """Momentum 1.5 of the layer that goes on, and 1 of the layer that begins."""
    state = (pipe := pipeline(trained_layers(0))).init(KEY, BATCH)
    state, _ = pipe.step(state, BATCH)
    other = pipeline(trained_layers(0, 1))
    with pytest.raises(ValueError, match=r"keep what fits, .*optimizer=.matching."):
        other.adopt(state)
    state = other.adopt(state, optimizer="matching")
    state, _ = other.step(state, BATCH)
    np.testing.assert_array_equal(weights(other, state)[:, 0], [-2.5, -1.0])
    back = pipe.adopt(state, optimizer="matching")
    back, _ = pipe.step(back, BATCH)
    np.testing.assert_array_equal(weights(pipe, back)[:, 0], [-4.25, -1.0])
    with refused('must be "same" or "matching", got True'):
        pipe.adopt(back, optimizer=True)


def test_a_schedule_changes():
    """One schedule follows another at the same count; in the place of a number it begins at 0."""
    state = (pipe := pipeline(optax.sgd(lambda count: 1.0 + count))).init(KEY, BATCH)
    state, _ = pipe.step(state, BATCH)
    other = pipeline(optax.sgd(lambda count: 10.0 * count))
    state, _ = other.step(other.adopt(state), BATCH)
    np.testing.assert_array_equal(weights(other, state), -11.0)
    constant = pipeline(optax.sgd(0.5))
    state, _ = constant.step(constant.adopt(state, optimizer="matching"), BATCH)
    state, _ = other.step(other.adopt(state, optimizer="matching"), BATCH)
    np.testing.assert_array_equal(weights(other, state), -11.5)


def test_batches_of_another_shape_go_on_with_the_same_state():
    pipe = pipeline(optax.sgd(1.0, momentum=0.5))
    state = pipe.init(KEY, BATCH)
    state, _ = pipe.step(state, BATCH)
    longer = {"inputs": np.ones((4, 2), np.float32)}
    state, _ = pipe.step(state, longer)
    np.testing.assert_array_equal(weights(pipe, state), -2.5)
    state, _ = pipe.step(pipe.adopt(state, BATCH), BATCH)
    np.testing.assert_array_equal(weights(pipe, state), -4.25)
