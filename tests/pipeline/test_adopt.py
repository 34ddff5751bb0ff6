"""Another pipeline goes on where one stopped, and low-precision compute with full-precision weights."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from families import FAMILIES, cross_entropy
from flax import nnx
from helpers import assert_close

import jpipe
from jpipe.states import portable

SCHEDULES = jpipe.schedules


def test_adopt_goes_on_as_if_nothing_had_happened():
    family = FAMILIES["mlp"]
    plain = oracles.PlainModel(family.layers, jax.random.key(0))
    batches = family.batches(4, 12)
    optimizer = optax.sgd(optax.linear_schedule(0.5, 0.0, 5), momentum=0.9)
    losses, _, params = oracles.train(plain, plain.params, cross_entropy, optimizer, batches)

    shared = dict(loss=cross_entropy, optimizer=optimizer)
    first = jpipe.Pipeline(family.layers, schedule=SCHEDULES.one_f_one_b(2, 4), **shared)
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
    with pytest.raises(ValueError, match="another optimizer: this pipeline keeps .*(count|mu)"):
        third.adopt(state)


@pytest.mark.exhaustive
def test_compute_dtype_casts_every_layer_and_keeps_the_weights():
    family = FAMILIES["mlp"]
    plain = oracles.PlainModel(family.layers, jax.random.key(0))
    batches = family.batches(3, 8)

    def low(tree):
        return jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)

    class LowPrecision:
        def __call__(self, params, x):
            return plain(low(params), low(x)).astype(jnp.float32)

    losses, _, params = oracles.train(LowPrecision(), plain.params, cross_entropy, optax.sgd(0.5), batches)
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
    for got, want in zip(jax.tree.leaves(pipe.get_params(state)), jax.tree.leaves(params), strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, atol=2e-2 * np.abs(want).max())
    assert state.program.stages.messages.activations.arrays.keys() == {"bfloat16[8, 8]"}
    assert pipe.predict(state, batches[0]).dtype == np.float32


def test_compute_dtype_must_be_floating():
    with pytest.raises(ValueError, match="`compute_dtype` must be a floating-point dtype"):
        jpipe.Pipeline(
            FAMILIES["mlp"].layers,
            loss=cross_entropy,
            optimizer=optax.sgd(0.1),
            schedule=SCHEDULES.gpipe(1, 1),
            compute_dtype=jnp.int8,
        )


# -- What is kept


def squares(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def batch_of(size, seed=0):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=(size, 4)).astype(np.float32) for k in ("inputs", "targets")}


def make(schedule, **options):
    defaults = dict(loss=squares, optimizer=optax.adam(0.1))
    layers = [functools.partial(nnx.Linear, 4, 4)] * 4
    return jpipe.Pipeline(layers, schedule=schedule, **{**defaults, **options})


def goes_on_alike(pipe, state, other, adopted, batches):
    """Whether both train to the same weights from here on; returns the states."""
    for batch in batches:
        state, metrics = pipe.step(state, batch)
        adopted, others = other.step(adopted, batch)
        np.testing.assert_allclose(metrics["loss"], others["loss"], rtol=1e-5)
    assert_close(other.get_params(adopted), pipe.get_params(state), "float32")
    return state, adopted, metrics, others


def test_a_process_needs_the_layers_of_every_copy_that_it_has(monkeypatch):
    """Three devices have a copy of the first stage, and two processes have two devices each."""
    program = make(SCHEDULES.one_f_one_b(2, 4, replicas=(3, 1)))._program(batch_of(12))

    def devices_of(mesh, axis, d):
        return [types.SimpleNamespace(process_index=d // 2)]

    monkeypatch.setattr(portable, "devices_along", devices_of)
    for process, stages in ((0, [0]), (1, [0, 1])):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        assert portable.layers_here(program) == {i for s in stages for i in program.stages.layers_of(s)}


@pytest.mark.exhaustive
def test_adopt_from_replicas_keeps_the_whole_minibatch():
    """A minibatch of 8 rows on two replicas is one of 8 rows on one, and the other way round."""
    meshes = [jpipe.make_mesh(stage=2, data=n) for n in (2, 1, 2)]
    pipes = [make(SCHEDULES.gpipe(2, 2), mesh=mesh) for mesh in meshes]
    alone = make(SCHEDULES.gpipe(2, 2))
    start = alone.init(jax.random.key(0), batch_of(8))
    state = pipes[0].init(jax.random.key(0), batch_of(8), params=alone.get_params(start))
    for i, pipe in enumerate(pipes):
        if i:
            state = pipe.adopt(state)
        for seed in (2 * i, 2 * i + 1):
            state, _ = pipe.step(state, batch_of(8, seed))
            start, _ = alone.step(start, batch_of(8, seed))
    assert_close(pipes[-1].get_params(state), alone.get_params(start), "float32")


@pytest.mark.exhaustive
def test_adopt_keeps_a_loss_scale_that_moves():
    scale = jpipe.LossScale(initial=4.0, growth_interval=2, largest=64.0)
    one, two = (make(SCHEDULES.gpipe(n, 2), optimizer=optax.sgd(0.1), loss_scale=scale) for n in (2, 4))
    state = one.init(jax.random.key(0), batch_of(4))
    for seed in range(3):  # grows after 2 updates, and is half way to the next growth
        state, metrics = one.step(state, batch_of(4, seed))
    assert metrics["loss_scale"] == 8
    adopted = two.adopt(state)
    batches = [batch_of(4, seed) for seed in (3, 4)]
    _, _, metrics, others = goes_on_alike(one, state, two, adopted, batches[:1])
    assert float(metrics["loss_scale"]) == float(others["loss_scale"]) == 16
    small = jpipe.LossScale(initial=2.0, growth_interval=2, largest=4.0)
    three = make(SCHEDULES.gpipe(2, 2), optimizer=optax.sgd(0.1), loss_scale=small)
    assert three.adopt(adopted := two.init(jax.random.key(0), batch_of(4)))
    assert float(three.adopt(adopted).loss_scale["scale"][0]) == 4
    constant = make(SCHEDULES.gpipe(2, 2), optimizer=optax.sgd(0.1), loss_scale=2.0)
    assert float(constant.adopt(adopted).loss_scale["scale"][0]) == 2
    without = make(SCHEDULES.gpipe(2, 2), optimizer=optax.sgd(0.1))
    assert not without.adopt(adopted).loss_scale
    moving = two.adopt(constant.init(jax.random.key(0), batch_of(4)))
    assert float(moving.loss_scale["scale"][0]) == 4  # as before training


def stage_counts(state):
    """The count of updates that each layer's stage has."""
    leaves = portable.to_portable(state).leaves.optimizer_state
    return [int(layer["[0].count"]) for layer in leaves]


def with_counts(pipe, state, counts):
    """The state with these counts of updates in its two stages, as if some had been skipped."""
    source = portable.to_portable(state)
    for layer, leaves in enumerate(source.leaves.optimizer_state):
        leaves["[0].count"] = np.int32(counts[layer // 2])
    return portable.from_portable(state.program, source)


@pytest.mark.exhaustive
def test_adopt_keeps_each_stages_count_of_updates():
    """Adam's bias correction depends on the count, and a stage that skipped an update has a smaller one."""
    one = make(SCHEDULES.gpipe(2, 2))
    state, _ = one.step(one.init(jax.random.key(0), batch_of(4)), batch_of(4))
    state = with_counts(one, state, [1, 3])
    assert stage_counts(state) == [1, 1, 3, 3]
    for schedule, boundaries in (
        (SCHEDULES.one_f_one_b(2, 2, ticks="unit"), [2]),
        (SCHEDULES.gpipe(4, 4), [1, 2, 3]),
    ):
        two = make(schedule, boundaries=boundaries, recompute="full")
        adopted = two.adopt(state)
        assert stage_counts(adopted) == [1, 1, 3, 3]
    again = one.adopt(adopted)
    goes_on_alike(one, state, two, adopted, [batch_of(4, 1), batch_of(4, 2)])
    assert stage_counts(again) == [1, 1, 3, 3]
    with pytest.raises(
        ValueError,
        match=r"stage 1 would hold layers 1 and 2, whose stages had different values of "
        r"\[0\].count .*\(1 and 3\).*Choose `boundaries`",
    ):
        make(SCHEDULES.gpipe(2, 2), boundaries=[1]).adopt(again)


@pytest.mark.exhaustive
def test_a_real_skip_on_one_stage_is_kept():
    """A gradient that is not finite on one stage alone, in an asynchronous schedule."""

    def loss(outputs, batch):
        return squares(outputs, batch)

    class Breaks(nnx.Module):
        """Multiplies its gradient, not its output, by the largest input."""

        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            @jax.custom_vjp
            def same(x):
                return x

            same.defvjp(
                lambda x: (x, x.max()),
                lambda top, g: (jnp.where(top > 1e3, jnp.nan, g),),
            )
            return self.linear(same(x))

    layers = [functools.partial(nnx.Linear, 4, 4)] * 2 + [Breaks]
    layers += [functools.partial(nnx.Linear, 4, 4)]
    options = dict(loss=loss, optimizer=optax.adam(0.1), schedule=SCHEDULES.pipedream(2, 2))
    pipe = jpipe.Pipeline(layers, boundaries=[2], **options)
    state = pipe.init(jax.random.key(0), batch_of(4))
    huge = jax.tree.map(lambda a: a + 1e5, batch_of(4))
    for batch in (batch_of(4), huge, batch_of(4)):
        state, _ = pipe.step(state, batch)
    state, _ = pipe.flush(state)
    counts = stage_counts(state)
    assert counts[0] < counts[-1] == 3
    other = jpipe.Pipeline(
        layers,
        boundaries=[2],
        recompute=jax.checkpoint_policies.dots_saveable,
        **options,
    )
    assert stage_counts(other.adopt(state)) == counts


def test_adopt_refuses_to_drop_the_optimizers_state():
    adam, plain = (make(SCHEDULES.gpipe(2, 2), optimizer=o) for o in (optax.adamw(0.1), optax.sgd(0.1)))
    state = adam.init(jax.random.key(0), batch_of(4))
    with pytest.raises(
        ValueError,
        match=r"another optimizer: the state has \[0\].count, which this pipeline does not keep",
    ):
        plain.adopt(state)
    with pytest.raises(ValueError, match="which the state has not"):
        adam.adopt(plain.init(jax.random.key(0), batch_of(4)))
