"""The engine does not recompile, copy its rings, grow with N, or apply a gradient of NaN."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import FAMILIES, cross_entropy, schedule_named
from flax import nnx

import jpipe
from jpipe.lowering.rings import STASHES

WIDTH = 8
TRUNK = [functools.partial(nnx.Linear, WIDTH, WIDTH)] * 4


def squares(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def of_trunk(schedule):
    optimizer = optax.sgd(0.1, momentum=0.9)
    return jpipe.Pipeline(TRUNK, loss=squares, optimizer=optimizer, schedule=schedule)


def trunk_batch(size, seed=0):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=(size, WIDTH)).astype(np.float32) for k in ("inputs", "targets")}


def num_bytes(tree):
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))


@pytest.fixture(scope="module", params=["one stage", "two stages", "unlike stages"])
def trained(request):
    """A pipeline after two steps: the state before each, its bytes, and the state after."""
    if request.param == "unlike stages":
        layers, batch = FAMILIES["mlp"].layers, FAMILIES["mlp"].batches(1, 6)[0]
        options = dict(
            loss=cross_entropy,
            optimizer=optax.sgd(0.1, momentum=0.9),
            boundaries=[1, 5],
        )
        pipe = jpipe.Pipeline(layers, schedule=schedule_named("one_f_one_b/unit", 3, 3), **options)
    else:
        num_stages = 1 if request.param == "one stage" else 2
        pipe, batch = (
            of_trunk(schedule_named("one_f_one_b/paired", num_stages, 4)),
            trunk_batch(8),
        )
    state, states = pipe.init(jax.random.key(0), batch), []
    for _ in range(2):
        states.append(state)
        state, _ = pipe.step(state, batch)
    return pipe, batch, states, state


@pytest.mark.first_case
def test_the_second_step_compiles_nothing(trained):
    _, _, _, state = trained
    assert state.program._step._cache_size() == 1


def test_state_is_donated(trained):
    pipe, batch, states, state = trained
    assert all(a.is_deleted() for old in states for a in jax.tree.leaves(old))
    assert not any(a.is_deleted() for a in jax.tree.leaves(state))
    memory = pipe.compile(batch).memory_analysis()
    assert memory.alias_size_in_bytes >= 0.99 * num_bytes(state) / len(pipe.mesh.devices)


def test_the_kind_of_state_stays(trained):
    _, _, states, state = trained
    kinds = [jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), s) for s in (*states, state)]
    assert kinds[0] == kinds[1] == kinds[2]


# -- Buffers stay in place ------------------------------------------------------------


def copies(text, shapes):
    """Lines of a compiled program that copy an array of one of the shapes."""
    shapes = {",".join(map(str, shape)) for shape in shapes}
    assert all(f"[{shape}]" in text for shape in shapes)
    found = re.findall(r"= \w+\[([\d,]*)\]\S* copy(?:-start)?\(", text)
    return [shape for shape in found if shape in shapes]


def test_the_search_for_copies_finds_one():
    ring = jax.ShapeDtypeStruct((5, 3), np.float32)
    write = lambda ring: jax.lax.dynamic_update_index_in_dim(ring, jnp.ones(3), 2, 0)  # noqa: E731
    kept = jax.jit(write).lower(ring).compile().as_text()
    donated = jax.jit(write, donate_argnums=0).lower(ring).compile().as_text()
    assert copies(kept, [(5, 3)]) and not copies(donated, [(5, 3)])


@pytest.mark.first_case
@pytest.mark.parametrize("ticks", ["paired", "unit"])
@pytest.mark.parametrize("model", ["trunk", "transformer"])
@pytest.mark.sampled(2)
def test_no_ring_is_copied(model, ticks):
    if model == "trunk":
        pipe, batch = (
            of_trunk(schedule_named(f"one_f_one_b/{ticks}", 2, 4)),
            trunk_batch(12),
        )
    else:
        family = FAMILIES["transformer"]
        schedule = schedule_named(f"one_f_one_b/{ticks}", 3, 4)
        options = dict(
            loss=cross_entropy,
            optimizer=optax.sgd(0.1, momentum=0.9),
            boundaries=[1, 5],
        )
        pipe, batch = (
            jpipe.Pipeline(family.layers, schedule=schedule, **options),
            family.batches(1, 12)[0],
        )
    text = pipe.compile(batch).as_text()
    buffers = pipe._program(batch).engine.layout["buffers"].shapes
    stashes = jax.tree.leaves([buffers[name] for name in STASHES])
    assert stashes and not copies(text, {a.shape for a in stashes})


# -- Memory ---------------------------------------------------------------------------


def bytes_beside_the_batch(name, num_microbatches):
    """At 64 rows of 256 numbers a microbatch, so that arrays outweigh the table."""
    layers = [functools.partial(nnx.Linear, 256, 256)] * 4
    schedule, array = (
        schedule_named(name, 2, num_microbatches),
        (64 * num_microbatches, 256),
    )
    array = jax.ShapeDtypeStruct(array, np.float32)
    options = dict(loss=squares, optimizer=optax.sgd(0.1), boundaries=[2])
    pipe = jpipe.Pipeline(layers, schedule=schedule, **options)
    memory = pipe.memory({"inputs": array, "targets": array})
    return memory.weights + memory.optimizer + memory.gradients + memory.activations + memory.temporaries


@pytest.mark.first_case
@pytest.mark.parametrize("name", ["one_f_one_b/paired", "one_f_one_b/unit"])
def test_memory_of_1f1b_does_not_grow_with_the_number_of_microbatches(name):
    few, many = bytes_beside_the_batch(name, 8), bytes_beside_the_batch(name, 64)
    np.testing.assert_allclose(many, few, rtol=0.02)


def test_memory_of_gpipe_does():
    few, many = bytes_beside_the_batch("gpipe", 8), bytes_beside_the_batch("gpipe", 32)
    # Two layers keep their inputs, and the loss or the inbox keeps as much as one layer.
    assert many - few >= 24 * 3 * (64 * 256 * 4)


# -- Gradients that are not finite ----------------------------------------------------


def weights_and_optimizer(state):
    return jax.tree.map(np.asarray, (state.parameters, state.optimizer_state))


@pytest.fixture(scope="module")
def of_two():
    return of_trunk(schedule_named("one_f_one_b/unit", 2, 4))


def a_row_that_is_not_a_number(batch):
    batch["inputs"][3] = np.nan


def overflow_on_the_first_stage(batch):
    """The first layer's weights are zero, so nobody else sees the huge inputs."""
    batch["inputs"][:], batch["targets"][:] = 3e38, 1e4


@pytest.mark.parametrize("poison", [a_row_that_is_not_a_number, overflow_on_the_first_stage])
def test_a_gradient_that_is_not_finite_skips_the_update_of_all_stages(of_two, poison):
    good, bad = trunk_batch(8), trunk_batch(8)
    poison(bad)
    params = [{"kernel": np.eye(WIDTH, dtype=np.float32), "bias": np.ones(WIDTH, np.float32)} for _ in TRUNK]
    params[0]["kernel"] = np.zeros_like(params[0]["kernel"])

    state = of_two.init(jax.random.key(0), good, params=params)
    before = weights_and_optimizer(state)
    state, metrics = of_two.step(state, bad)
    np.testing.assert_array_equal(metrics["skipped_updates"], [1, 1])
    assert int(metrics["num_microbatches"]) == 4
    jax.tree.map(np.testing.assert_array_equal, weights_and_optimizer(state), before)

    state, metrics = of_two.step(state, good)  # as if nothing had been
    want, want_metrics = of_two.step(of_two.init(jax.random.key(0), good, params=params), good)
    np.testing.assert_array_equal(metrics["skipped_updates"], [0, 0])
    np.testing.assert_array_equal(metrics["loss"], want_metrics["loss"])
    jax.tree.map(
        np.testing.assert_array_equal,
        weights_and_optimizer(state),
        weights_and_optimizer(want),
    )
    with pytest.raises(AssertionError):  # and it does learn
        jax.tree.map(np.testing.assert_array_equal, weights_and_optimizer(state), before)


# -- The table is an argument ---------------------------------------------------------


@pytest.mark.first_case
@pytest.mark.parametrize("name", ["one_f_one_b", "pipedream"])
def test_no_program_grows_with_the_table(name):
    sizes = []
    for num_microbatches in (4, 400):
        pipe = jpipe.Pipeline(
            [functools.partial(nnx.Linear, 4, 4)] * 2,
            loss=lambda outputs, batch: jnp.mean(outputs**2),
            optimizer=optax.sgd(1e-3),
            schedule=getattr(jpipe.schedules, name)(2, num_microbatches),
        )
        batch = {"inputs": np.zeros((num_microbatches, 4), np.float32)}
        program = pipe._program(batch)
        state, rows = program.abstract_state.arrays(), program.engine.abstract_rows
        forward = program.prediction.rows_of(batch)
        lowered = [
            program.lower(),
            program._flush.lower(state, rows),
            program.prediction.compiled_predict.lower(state, batch, forward),
            program.prediction.compiled_evaluate.lower(state, batch["inputs"], batch, None, forward),
        ]
        sizes.append([len(one.as_text()) for one in lowered])
    small, large = np.array(sizes)
    assert (large < small + 2000).all()  # the digits of shapes
