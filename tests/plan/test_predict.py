"""Predictions, against what pipelines say of themselves and sums worked out by hand."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import FAMILIES, cross_entropy, schedule_named
from helpers import profile_of, timed
from skipping import LAYERS as SKIPPING
from skipping import loss_fn as mean_squares

import jpipe
from jpipe.compress import PowerSGD, Quantize, Threshold, TopK
from jpipe.plan import Machine, predict

FREE = Machine(num_devices=16)
SCHEDULES = (
    "gpipe",
    "one_f_one_b/paired",
    "one_f_one_b/unit",
    "zero_bubble_h1",
    "pipedream/paired",
    "pipedream_2bw/unit",
    "pipemare/unit",
)
CUTS = {"mlp": [1, 3], "resnet": [1, 2], "transformer": [2, 4]}


def pipeline(family, schedule, **options):
    return jpipe.Pipeline(
        FAMILIES[family].layers,
        loss=cross_entropy,
        schedule=schedule,
        **({"optimizer": optax.adam(0.1)} | options),
    )


def without_compiling(pipe, batch):
    """`Pipeline.memory`, with no temporaries."""
    none = types.SimpleNamespace(temp_size_in_bytes=0)
    pipe.compile = lambda batch: types.SimpleNamespace(memory_analysis=lambda: none)
    return pipe.memory(batch)


@pytest.mark.first_case
@pytest.mark.parametrize("family", CUTS)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.sampled(28)
def test_bytes_are_those_of_the_pipeline(family, name, recompute):
    schedule = schedule_named(name, 3, 4)
    pipe = pipeline(family, schedule, boundaries=CUTS[family], recompute=recompute)
    want = without_compiling(pipe, FAMILIES[family].batches(1, 8)[0])
    profile = dataclasses.replace(timed(profile_of(family), forward=1.0), recompute=recompute)
    got = predict(schedule, profile, CUTS[family], FREE).memory
    for part in ("weights", "gradients", "batch"):
        assert getattr(got, part) == getattr(want, part), part
    # Adam counts its steps once a stage, not once a layer.
    assert 0 <= got.optimizer - want.optimizer <= 4 * len(FAMILIES[family].layers)
    assert got.activations == want.activations


@pytest.mark.parametrize("name", ["one_f_one_b/paired", "gpipe", "pipemare/paired"])
def test_bytes_of_one_stage(name):
    """It keeps no stash from tick to tick, or one of forwards on the weights of their backwards, or on others."""
    schedule, family = schedule_named(name, 1, 4), FAMILIES["transformer"]
    want = without_compiling(pipeline("transformer", schedule), family.batches(1, 8)[0])
    got = predict(schedule, timed(profile_of("transformer"), forward=1.0), [], FREE).memory
    assert got.activations == want.activations


@pytest.mark.exhaustive
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["pipemare/unit", "pipedream/paired", "gpipe"])
def test_bytes_of_versions_that_the_optimizer_reads(name):
    schedule, family = schedule_named(name, 3, 2), "mlp"
    optimizer = optax.chain(jpipe.optim.compensate_delay(1.0, None), optax.sgd(0.1))
    pipe = pipeline(family, schedule, boundaries=CUTS[family], optimizer=optimizer)
    batch = FAMILIES[family].batches(1, 4)[0]
    profile = pipe.profile(batch, programs=())
    assert profile.reads == ("stale_params",)
    want = without_compiling(pipe, batch)
    got = predict(schedule, timed(profile, forward=1.0), CUTS[family], FREE).memory
    assert got.weights == want.weights
    plain = pipeline(family, schedule, boundaries=CUTS[family], optimizer=optax.sgd(0.1))
    assert plain.profile(batch, programs=()).reads == ()
    more = want.weights > without_compiling(plain, batch).weights
    assert more == (name == "pipemare/unit")


@pytest.mark.exhaustive
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "messages,gradients",
    [(TopK(0.25), PowerSGD(2)), (Quantize(8), None), (None, Threshold(0.1))],
    ids=str,
)
def test_bytes_with_compression(messages, gradients):
    compressors = {"compress_messages": messages, "compress_gradients": gradients}
    schedule, family = schedule_named("one_f_one_b", 3, 4), "mlp"
    mesh = jpipe.make_mesh(stage=3, data=2)
    cut = CUTS[family]
    pipe = pipeline(family, schedule, boundaries=cut, mesh=mesh, **compressors)
    want = without_compiling(pipe, FAMILIES[family].batches(1, 16)[0])
    profile = timed(profile_of(family), forward=1.0)
    free = dataclasses.replace(FREE, num_devices=6)
    plain, got = (
        predict(schedule, profile, cut, free, num_replicas=2, **options).memory for options in ({}, compressors)
    )
    assert got.compression == want.compression
    assert (got.compression > 0) == (gradients is not None)
    assert got.activations == want.activations
    if messages is not None:
        assert got.activations < plain.activations


def test_compressed_messages_and_gradients_are_faster():
    schedule, family = schedule_named("one_f_one_b", 3, 4), "mlp"
    machine = dataclasses.replace(FREE, num_devices=6, bandwidth=(1e3,))
    profile = timed(profile_of(family), forward=1.0)

    def seconds(**options):
        prediction = predict(schedule, profile, CUTS[family], machine, num_replicas=2, **options)
        return prediction.seconds

    plain = seconds()
    assert seconds(compress_messages=Quantize(8)) < plain
    assert seconds(compress_gradients=Quantize(8)) < plain
    # A ring of 2 sends as many bytes as each gets of the other.
    np.testing.assert_allclose(seconds(compress_gradients=TopK(1.0)), plain, rtol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["gpipe", "pipedream/paired", "pipemare/unit"])
@pytest.mark.sampled(3)
def test_bytes_of_weights_that_only_hooks_give(name):
    """PipeDream's backwards read the weights of their forwards, so corrected ones are not kept; GPipe delays
    nothing.
    """
    optimizer = optax.chain(
        optax.sgd(0.1, momentum=0.9),
        jpipe.optim.correct_discrepancy(0.5),
        jpipe.optim.predict_weights(),
    )
    hooks = {
        "forward_params": jpipe.optim.predicted_params,
        "backward_params": jpipe.optim.corrected_params,
    }
    schedule, cut = schedule_named(name, 3, 4), CUTS["mlp"]
    batch = FAMILIES["mlp"].batches(1, 8)[0]
    options = {"boundaries": cut, "optimizer": optimizer, **hooks}
    pipe = pipeline("mlp", schedule, **options)
    profile = timed(pipe.profile(batch, programs=()))
    want, got = (
        without_compiling(pipe, batch),
        predict(schedule, profile, cut, FREE).memory,
    )
    assert got.weights == want.weights and abs(got.padding - want.padding) <= 4 * 7
    plain = predict(schedule, timed(profile_of("mlp")), cut, FREE).memory
    times = {"gpipe": 1, "pipedream/paired": 2, "pipemare/unit": 3}[name]
    assert got.weights == times * plain.weights


@pytest.mark.exhaustive
def test_bytes_with_two_stages_a_device():
    schedule = jpipe.schedules.interleaved(4, 4)
    cut = [1, 3, 5]
    pipe = pipeline("mlp", schedule, boundaries=cut)
    want = without_compiling(pipe, FAMILIES["mlp"].batches(1, 8)[0])
    got = predict(schedule, timed(profile_of("mlp")), cut, FREE).memory
    assert got.weights == want.weights and got.gradients == want.gradients
    assert got.activations == want.activations


SKIPS = (
    ("gpipe", [4]),
    ("one_f_one_b/paired", [1, 2, 4]),
    ("pipemare/unit", [2, 6]),
    ("v", [2, 4, 6]),
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name,cut", SKIPS)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.sampled(8)
def test_bytes_with_skips(name, cut, recompute):
    """Nested, crossing, several on one way, with integers, and between stages of one device."""
    with jax.enable_x64(True):
        schedule = schedule_named(name, len(cut) + 1, 4)
        pipe = jpipe.Pipeline(
            SKIPPING,
            loss=mean_squares,
            optimizer=optax.sgd(0.1),
            schedule=schedule,
            boundaries=cut,
            recompute=recompute,
        )
        batch = {k: np.ones((8, 4)) for k in ("inputs", "targets")}
        want = without_compiling(pipe, batch)
        profile = timed(pipe.profile(batch, programs=()))
    got = predict(schedule, profile, cut, FREE).memory
    assert got.weights == want.weights and got.gradients == want.gradients
    assert got.activations == want.activations


def test_seconds_with_a_skip_by_hand():
    """Three stages, of which the first sends to both others, and the last back to both."""
    layers = [
        jpipe.skip(jpipe.Function(lambda x: (x, x)), stash="far"),
        jpipe.Function(jnp.tanh),
        jpipe.skip(jpipe.Function(lambda x, far: x + far), pop="far"),
    ]
    pipe = jpipe.Pipeline(
        layers,
        loss=mean_squares,
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.gpipe(3, 4),
    )
    batch = {k: np.ones((8, 4), np.float32) for k in ("inputs", "targets")}
    profile = timed(pipe.profile(batch, programs=()), forward_and_stash=1, backward=2)
    machine = Machine(3, bandwidth=(1e3, 1e3), latency=0.25)
    found = predict(jpipe.schedules.gpipe(3, 4), profile, [1, 2], machine)
    message = 0.25 + 2 * 4 * 4 / 1e3
    # Each way four ticks with both messages, then one with the second stage's alone.
    np.testing.assert_allclose(found.seconds, 6 * (1 + 2) + 2 * (4 * 2 + 1) * message)
    np.testing.assert_allclose(found.timing.transfer, np.multiply([8, 8, 8], message))


def test_seconds_by_hand():
    """GPipe, two stages of 2 and 4 layers, 4 microbatches."""
    profile = timed(
        profile_of("mlp"),
        forward_and_stash=1.0,
        backward=3.0,
        update=0.5,
        input_grad=9.0,
    )
    machine = Machine(2, bandwidth=(1e3, 1e3), latency=0.25, tick=0.125, jitter=0.5, step=7.0)
    found = predict(jpipe.schedules.gpipe(2, 4), profile, [2], machine)
    # 2 samples of 8 floats between the stages; the second stage is the slower, but for
    # the first of the forwards and the last of the backwards. 4 ticks send each way, and
    # the updates wait until both have computed.
    sends = 0.25 + 2 * 8 * 4 / 1e3 + 0.125
    compute = (2 + 4 * 4) + (4 * 12 + 2 * 3) + 4 * 0.5
    jitter = 0.5 * (3 * 4 + 3 * 12 + 4 * 0.5)  # where both compute
    rest = 8 * sends + 0.125 + 7.0
    np.testing.assert_allclose(found.seconds, compute + jitter + rest)
    np.testing.assert_allclose(found.timing.busy, [4 * (2 + 6) + 1, 4 * (4 + 12) + 2])
    assert found.delay == 0


def test_split_backwards_are_priced_by_their_halves():
    profile = timed(
        profile_of("mlp"),
        forward_and_stash=1.0,
        backward=9.0,
        input_grad=1,
        weight_grad=1,
    )
    found = predict(jpipe.schedules.zero_bubble_h1(2, 4), profile, [3], FREE)
    table = jpipe.schedules.zero_bubble_h1(2, 4)
    np.testing.assert_allclose(found.seconds, 3 * table.facts().makespan)


def test_recomputing_runs_the_forward_again():
    once = timed(profile_of("mlp"), forward=1.0, forward_and_stash=1.5, backward=2.0)
    again = dataclasses.replace(once, recompute="full")
    schedule = jpipe.schedules.gpipe(2, 4)
    found = [predict(schedule, p, [3], FREE).seconds for p in (once, again)]
    np.testing.assert_allclose(found, [3 * 5 * (1.5 + 2.0), 3 * 5 * (1 + 1.5 + 2.0)])


def test_replicas_add_up_their_gradients():
    """Three replicas: four turns of a third of the weights, before the stage's update."""
    profile = timed(profile_of("mlp"), forward_and_stash=1.0, backward=2.0)
    machine = Machine(6, bandwidth=(1e3, 1e3), latency=0.25)
    schedule = jpipe.schedules.gpipe(1, 4)
    alone, three = (predict(schedule, profile, [], machine, r) for r in (1, 3))
    weights = sum(layer.parameter_bytes for layer in profile.layers)
    ring = 4 * (0.25 + weights / 3 / 1e3)
    np.testing.assert_allclose(three.seconds - alone.seconds, ring)


def test_links_between_servers_are_slower():
    profile = timed(profile_of("mlp"))
    machine = Machine(4, bandwidth=(1e6, 1e3), devices_per_server=2)
    with pytest.warns(UserWarning, match="75% bubble"):
        schedule = jpipe.schedules.gpipe(4, 1)
    found = predict(schedule, profile, [1, 3, 5], machine)
    message = 2 * 8 * 4
    want = 2 * (2 * message / 1e6 + message / 1e3)  # there and back
    np.testing.assert_allclose(found.seconds, want)


def test_devices_that_share_a_core_take_turns():
    profile = timed(profile_of("mlp"), forward_and_stash=1.0, backward=2.0)
    one_core = Machine(2, num_cores=1)
    found = predict(jpipe.schedules.gpipe(2, 4), profile, [3], one_core)
    np.testing.assert_allclose(found.seconds, 6 * 4 * 3)


@pytest.mark.exhaustive
def test_padding_is_what_the_mean_stage_does_not_use():
    profile = timed(profile_of("transformer"))
    schedule = jpipe.schedules.gpipe(3, 4)
    pipe = pipeline("transformer", schedule, boundaries=[2, 4])
    want = without_compiling(pipe, FAMILIES["transformer"].batches(1, 8)[0])
    got = predict(schedule, profile, [2, 4], FREE).memory
    np.testing.assert_allclose(got.padding, want.padding, rtol=0.01)


def test_wrong_input():
    profile = timed(profile_of("mlp"))
    schedule = jpipe.schedules.gpipe(4, 4)
    with pytest.raises(ValueError, match="at least 8 devices, 2 for each of 4, got 6"):
        predict(schedule, profile, [1, 2, 3], Machine(6), num_replicas=2)
    with pytest.raises(ValueError, match="`boundaries` must"):
        predict(schedule, profile, [1, 2], FREE)
    with pytest.raises(ValueError, match="was not measured"):
        predict(schedule, profile_of("mlp"), [1, 2, 3], FREE)
    for wrong in (
        {"num_devices": 0},
        {"memory_limit": 0},
        {"bandwidth": (1.0, 0.0)},
        {"latency": -1.0},
        {"jitter": float("inf")},
        {"num_cores": -2},
    ):
        with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` must be"):
            Machine(**({"num_devices": 2} | wrong))


@pytest.mark.exhaustive
def test_a_machine_is_measured():
    machine = jpipe.plan.measure_machine(2, num_cores=2, memory_limit=1e9)
    assert machine.num_devices == 2 and machine.memory_limit == 1e9
    assert 0 <= machine.jitter < 10
    assert 0 <= machine.tick < 1 and 0 <= machine.step < 10 and machine.bandwidth[0] > 0
    assert jax.devices()  # and JAX goes on
