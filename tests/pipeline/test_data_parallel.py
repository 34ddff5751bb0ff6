"""Replicas of a pipeline: the plain model on the whole batch, each device with its share of it."""

import jax
import numpy as np
import optax
import oracles
import pytest
from families import FAMILIES, cross_entropy, schedule_named, slow
from helpers import assert_close, with_nan_buffers
from jax.sharding import AxisType, Mesh

import jpipe

KEY = jax.random.key(7)

CASES = [
    ("mlp", "gpipe", 2, 3, "none", 2),
    ("mlp", "one_f_one_b/unit", 1, 2, "none", 3),
    slow("transformer", "one_f_one_b/paired", 4, 2, "full", 2),
    ("mlp", "two-columns", 4, 2, "none", 4),
]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.parametrize("family,schedule,S,N,recompute,R", CASES)
@pytest.mark.sampled(3)
def test_equals_the_plain_model_on_the_whole_batch(family, schedule, S, N, recompute, R):
    with jax.enable_x64(True):
        family, table = (
            FAMILIES[family].in_dtype("float64"),
            schedule_named(schedule, S, N),
        )
        plain = oracles.PlainModel(family.layers, KEY)
        batches = family.batches(3, 2 * N * R, "float64")
        clip = jpipe.optim.clip_by_global_norm(1e9)
        pipe = jpipe.Pipeline(
            family.layers,
            loss=cross_entropy,
            optimizer=optax.chain(clip, optax.sgd(1.0, momentum=0.5)),
            schedule=table,
            recompute=recompute,
            mesh=jpipe.make_mesh(stage=table.num_devices, data=R),
        )
        state = pipe.init(KEY, batches[0], params=plain.params)
        losses, gradients, params = oracles.train(
            plain,
            plain.params,
            cross_entropy,
            optax.sgd(1.0, momentum=0.5),
            batches,
        )
        for batch, loss, gradient in zip(batches, losses, gradients):
            state, metrics = pipe.step(with_nan_buffers(state), batch)
            assert_close(metrics["loss"], np.asarray(loss), "float64")
            assert int(metrics["num_microbatches"]) == N
            norm = optax.tree.norm(gradient)
            np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-6)
        assert_close(pipe.get_params(state), params, "float64")
        inputs = batches[0]["inputs"][: 2 * N - 1]
        outputs = np.asarray(plain(params, inputs))
        assert_close(pipe.predict(state, {"inputs": inputs}), outputs, "float64")


def in_shares(a):
    """Rows of microbatch 0 and 1, 4 each, in the order in which two replicas of two microbatches read them."""
    return a.reshape(2, 2, 2, *a.shape[1:]).swapaxes(0, 1).reshape(a.shape)


@pytest.mark.exhaustive
def test_an_asynchronous_schedule_on_replicas_is_the_one_on_one_of_them():
    family = FAMILIES["mlp"]
    batches = family.batches(6, 8)
    results = []
    for R in (1, 2):
        schedule = jpipe.schedules.pipedream(2, 2)
        pipe = jpipe.Pipeline(
            family.layers,
            loss=cross_entropy,
            optimizer=optax.sgd(0.1, momentum=0.5),
            schedule=schedule,
            mesh=jpipe.make_mesh(stage=2, data=R),
        )
        state = pipe.init(KEY, batches[0])
        for batch in batches:
            if R == 2:  # so that microbatch m has the same rows, half on each replica
                batch = jax.tree.map(in_shares, batch)
            state, _ = pipe.step(state, batch)
        state, _ = pipe.flush(state)
        results.append(pipe.get_params(state))
    assert_close(results[1], results[0], "float32")


def of_mesh(mesh, size=16):
    family = FAMILIES["mlp"]
    pipe = jpipe.Pipeline(
        family.layers,
        loss=cross_entropy,
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.one_f_one_b(2, 4),
        mesh=mesh,
    )
    return pipe, family.batches(1, size)[0]


@pytest.mark.exhaustive
def test_each_device_only_receives_its_share():
    pipe, batch = of_mesh(jpipe.make_mesh(stage=2, data=2))
    alone, _ = of_mesh(jpipe.make_mesh(stage=2))
    whole = sum(a.nbytes for a in batch.values())
    assert alone.memory(batch).batch == whole == 2 * pipe.memory(batch).batch
    placed = pipe._program(batch).batches.place(batch)
    shapes = {s.data.shape for s in placed["inputs"].addressable_shards}
    assert shapes == {(8, 6)}
    compiled = pipe.compile(batch)
    (_, batch_shardings, _), _ = compiled.input_shardings  # state, batch, rows of the table
    assert batch_shardings["inputs"].shard_shape((16, 6)) == (8, 6)


@pytest.mark.exhaustive
def test_gradients_are_reduced_once_a_minibatch():
    """All-reduces over the replicas: one for each array of gradients, whatever the number of microbatches."""
    counts = []
    for N in (2, 8):
        family = FAMILIES["mlp"]
        pipe = jpipe.Pipeline(
            family.layers,
            loss=cross_entropy,
            optimizer=optax.sgd(0.1),
            schedule=jpipe.schedules.one_f_one_b(2, N),
            mesh=jpipe.make_mesh(stage=2, data=2),
        )
        text = pipe.compile(family.batches(1, 4 * N)[0]).as_text()
        lines = [line for line in text.splitlines() if " all-reduce(" in line]
        counts.append(len(lines))
        program = pipe._program(family.batches(1, 4 * N)[0])
        arrays = program.stages.parameters.arrays
    assert counts[0] == counts[1] and 1 <= counts[0] <= len(arrays) + 4


@pytest.mark.exhaustive
@pytest.mark.sampled(2)
@pytest.mark.parametrize("axes", [("stage", "data"), ("data", "stage")])
def test_the_order_of_the_axes_does_not_matter(axes):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = Mesh(devices, axes, axis_types=(AxisType.Auto,) * 2)
    pipe, batch = of_mesh(mesh)
    state, metrics = pipe.step(pipe.init(KEY, batch), batch)
    alone, _ = of_mesh(jpipe.make_mesh(stage=2))
    want, plain = alone.step(alone.init(KEY, batch), batch)
    np.testing.assert_allclose(metrics["loss"], plain["loss"], rtol=1e-5)
    assert_close(pipe.get_params(state), alone.get_params(want), "float32")


@pytest.mark.exhaustive
def test_adopting_from_one_pipeline_to_replicas():
    pipe, batch = of_mesh(jpipe.make_mesh(stage=2, data=2))
    alone, _ = of_mesh(jpipe.make_mesh(stage=2))
    state, _ = alone.step(alone.init(KEY, batch), batch)
    adopted, _ = pipe.step(pipe.adopt(state), batch)
    state, _ = alone.step(state, batch)
    assert_close(pipe.get_params(adopted), alone.get_params(state), "float32")


def test_a_batch_that_cannot_be_shared_out_is_refused():
    pipe, _ = of_mesh(jpipe.make_mesh(stage=2, data=2))
    message = (
        'a batch of 12 cannot be cut into 4 equal microbatches on each of the 2 replicas of axis "data". '
        "Use a batch of 8 or 16"
    )
    with pytest.raises(ValueError, match=message):
        pipe.init(KEY, FAMILIES["mlp"].batches(1, 12)[0])


@pytest.mark.parametrize(
    "sizes,message",
    [
        (dict(stage=4, data=4), "`data=4, stage=4` needs 16 devices, got 8 .cpu."),
        (dict(stage=2, data=0), "`data` must be a whole number of devices, .*got 0"),
        (dict(stage=2, model=1.5), "`model` must be a whole number of devices, .*1.5"),
    ],
    ids=["too few", "none", "half"],
)
def test_wrong_meshes(sizes, message):
    with pytest.raises(ValueError, match=message):
        jpipe.make_mesh(**sizes)
