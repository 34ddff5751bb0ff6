"""Whose a state is: kept, shared between equal pipelines, copied, saved, refused."""

import copy
import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import refused

import jpipe
from jpipe.schedules import gpipe, one_f_one_b, pipemare

KEY = jax.random.key(0)
LINEAR = functools.partial(nnx.Linear, 4, 4)


def squares(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def batch_of(size=4, seed=0):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=(size, 4)).astype(np.float32) for k in ("inputs", "targets")}


def make(layers=None, **options):
    defaults = dict(
        loss=lambda outputs, batch: squares(outputs, batch),
        optimizer=optax.adam(0.1),
        schedule=gpipe(2, 2),
        boundaries=[2],
    )
    layers = layers or [lambda rngs: nnx.Linear(4, 4, rngs=rngs) for _ in range(4)]
    return jpipe.Pipeline(layers, **{**defaults, **options})


def trained(pipe, steps=2, state=None):
    state = pipe.init(KEY, batch_of()) if state is None else state
    for seed in range(steps):
        state, _ = pipe.step(state, batch_of(seed=seed))
    return state


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


# -- Donation


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", [gpipe(2, 2), pipemare(2, 2)])
def test_without_donation_the_old_state_can_be_used_again(schedule):
    pipe = make(schedule=schedule, donate=False)
    state = trained(pipe)
    before = pipe.get_params(state)
    once, _ = pipe.step(state, batch_of())
    flushed, _ = pipe.flush(state)
    twice, _ = pipe.step(state, batch_of())
    assert_same(pipe.get_params(state), before)
    assert_same(pipe.get_params(once), pipe.get_params(twice))
    with pytest.raises(AssertionError):
        assert_same(pipe.get_params(once), before)
    with_donation = make(schedule=schedule)
    assert_same(with_donation.get_params(trained(with_donation)), pipe.get_params(state))


# -- Equal pipelines


@pytest.mark.parametrize("schedule", [gpipe(2, 2), pipemare(2, 2)])
@pytest.mark.sampled(2)
def test_equal_pipelines_share_states(schedule):
    """One goes on where the other stopped, also with microbatches in flight."""
    first, second = make(schedule=schedule), make(schedule=schedule)
    state, other = trained(first), trained(second)
    assert state.program is not other.program
    summed = jax.tree.map(lambda a, b: a if a.dtype == jnp.uint32 else a + b, state, other)
    assert_same(jax.tree.leaves(summed.round), [np.full(2, 4)])
    assert_same(make(schedule=schedule).get_params(state), first.get_params(state))
    other, _ = second.step(other, batch_of(seed=9))
    moved, _ = make(schedule=schedule).step(state, batch_of(seed=9))
    assert_same(second.get_params(moved), second.get_params(other))
    assert_same(second.predict(moved, batch_of(3)), second.predict(other, batch_of(3)))


def test_a_pipeline_without_a_cut_takes_that_of_an_equal_state():
    cut, balanced = make(boundaries=[1]), make(boundaries=None)
    assert [r.layers for r in balanced.partition(batch_of())] == [(0, 2), (2, 4)]
    balanced.step(cut.init(KEY, batch_of()), batch_of())
    assert [r.layers for r in balanced.partition(batch_of())] == [(0, 1), (1, 4)]


def squares_twice(outputs, batch):
    return 2 * squares(outputs, batch)


OTHERS = {
    "schedule": dict(schedule=one_f_one_b(2, 2, ticks="unit")),
    "mesh": lambda: dict(mesh=jpipe.make_mesh(stage=2, devices=jax.devices()[2:])),
    "boundaries": dict(boundaries=[1]),
    "compute_dtype": dict(compute_dtype=jnp.bfloat16),
    "recompute": dict(recompute="full"),
    "loss_scale": dict(loss_scale=8.0),
    "overlap": dict(overlap=True),
    "ties": dict(ties=[[(0, "kernel"), (1, "kernel")]]),
    "number of layers": dict(layers=[LINEAR] * 5),
    "layers": dict(layers=[LINEAR] * 3 + [lambda rngs: nnx.Linear(4, 4, use_bias=False, rngs=rngs)]),
    "loss": dict(loss=squares_twice),
    "optimizer": dict(optimizer=optax.adam(0.2)),
}


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.parametrize("part", OTHERS)
def test_other_pipelines_are_refused_with_the_part_that_differs(part):
    state = make().init(KEY, batch_of())
    options = OTHERS[part]
    other = make(**(options() if callable(options) else options))
    message = f"made by another pipeline, which differs in `{part}`.*adopt"
    with refused(message):
        other.step(state, batch_of())
    with refused(message):
        other.get_params(state)
    assert not len(other._programs) or part in ("layers", "loss", "optimizer", "boundaries")


def test_a_batch_of_other_entries_is_refused_before_tracing():
    calls = []

    class Counts(nnx.Module):
        def __init__(self, rngs):
            self.linear = LINEAR(rngs=rngs)

        def __call__(self, x):
            calls.append(x.shape)
            return self.linear(x)

    pipe = make([Counts, LINEAR], boundaries=[1])
    state = pipe.init(KEY, batch_of())
    calls.clear()
    with refused("`state` was made for microbatches of .*float32.2, 4"):
        pipe.step(state, batch_of(8) | {"mask": np.ones(8)})
    assert not calls


# -- Copies


@pytest.mark.exhaustive
def test_copies_of_a_state():
    pipe = make()
    state = trained(pipe)
    want, _ = make().step(trained(make()), batch_of(seed=5))
    on_host = jax.tree.map(np.asarray, state)
    leaves = pickle.loads(pickle.dumps(jax.tree.leaves(on_host)))
    structure = jax.tree.structure(make().init(KEY, batch_of()))
    for copied in (
        copy.deepcopy(state),
        on_host,
        jax.tree.unflatten(structure, leaves),
        jax.tree.map(jnp.array, state),
    ):
        got, _ = pipe.step(copied, batch_of(seed=5))
        assert_same(pipe.get_params(got), pipe.get_params(want))
        assert pipe.get_params(state)  # and the original is still there
    with pytest.raises(TypeError, match="cannot be pickled.*Orbax"):
        pickle.dumps(state)


def test_a_second_step_of_a_copy_compiles_nothing():
    pipe = make()
    state = trained(pipe, state=jax.tree.map(np.asarray, trained(pipe)))
    assert state.program._step._cache_size() == 1


@pytest.mark.parametrize("schedule", [gpipe(2, 2), pipemare(2, 2)])
@pytest.mark.sampled(2)
def test_orbax_restores_a_state_into_an_equal_pipeline(schedule, tmp_path):
    checkpoint = pytest.importorskip(
        "orbax.checkpoint",
        reason="Orbax is not installed: pip install orbax-checkpoint",
    )
    first, second = make(schedule=schedule), make(schedule=schedule)
    state = trained(first, 3)
    with checkpoint.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
        saver.wait_until_finished()
        target = second.init(jax.random.key(1), batch_of())
        restored = saver.restore(tmp_path / "state", target)
    want, got = trained(first, 3, state), trained(second, 3, restored)
    assert_same(second.get_params(got), first.get_params(want))
    assert_same(got.key, want.key)


# -- Words


def test_pictures_of_a_pipeline_and_a_state():
    pipe = make(boundaries=None)
    assert repr(pipe) == (
        "Pipeline(gpipe: 2 stages of 4 layers, balanced by flops, 2 microbatches, on 2 cpu devices, stage=2)"
    )
    state = pipe.init(KEY, batch_of())
    assert "boundaries [2]" in repr(pipe)
    # Two devices, two layers each, of 4 x 4 and 4 numbers of 4 bytes.
    assert "  parameters: 320 bytes: " in repr(state)
    assert "float32[2, 2, 16]" in repr(state) and len(repr(state)) < 2000
    assert repr(jax.tree.map(lambda a: None, state))


def test_transformations_are_refused():
    pipe = make()
    state = pipe.init(KEY, batch_of())
    for method in ("step", "predict", "evaluate"):
        message = f"`Pipeline.{method}` is called inside a transformation"
        with refused(message):
            jax.jit(getattr(pipe, method))(state, batch_of())
    with refused("`Pipeline.step` is called inside a transformation"):
        jax.grad(lambda x: pipe.step(state, {**batch_of(), "inputs": x})[1]["loss"])(batch_of()["inputs"])


@pytest.mark.exhaustive
def test_a_batch_on_another_device_is_moved():
    pipe = make()
    on_device = jax.device_put(batch_of(), jax.devices()[5])
    want, _ = pipe.step(pipe.init(KEY, batch_of()), batch_of())
    got, _ = pipe.step(pipe.init(KEY, on_device), on_device)
    assert_same(pipe.get_params(got), pipe.get_params(want))
    for method in (pipe.predict, pipe.evaluate):
        assert_same(method(got, on_device), method(got, batch_of()))


def test_params_may_be_an_nnx_state():
    modules = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(4)]
    pipe = make()
    state = pipe.init(KEY, batch_of(), params=[nnx.state(m) for m in modules])
    for module, params in zip(modules, pipe.get_params(state)):
        np.testing.assert_array_equal(params["kernel"], module.kernel[...])


# -- The cut


def test_only_init_fixes_the_cut():
    """FLOPs of the layers depend on the size of the batch in a model of embeddings and linear layers."""

    def make_uneven():
        # The first layer costs the same at any batch; the others grow with it.
        constant = jpipe.InitApply(
            lambda key, x: {"w": jax.random.normal(key, (4, 4))},
            lambda params, x: x @ jnp.linalg.matrix_power(params["w"], 64),
        )
        return make([constant, *[LINEAR] * 6], boundaries=None)

    small, large = batch_of(2), batch_of(512)
    fresh = [r.layers for r in make_uneven().partition(small)]
    assert fresh != [r.layers for r in make_uneven().partition(large)]
    pipe = make_uneven()
    pipe.partition(small)
    pipe.memory(small)
    pipe.compile(small)
    pipe.profile(small, programs=())
    pipe.init(KEY, large)
    want = [r.layers for r in make_uneven().partition(large)]
    assert [r.layers for r in pipe.partition(large)] == want
    assert [r.layers for r in pipe.partition(small)] == want


# -- Arrays that a user has changed


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(jpipe.PipelineState)])
def test_a_state_whose_arrays_were_changed_is_refused(field):
    pipe = make(schedule=pipemare(2, 2))
    state = pipe.init(KEY, batch_of())
    arrays = getattr(state, field)
    others: list = [None]
    if field != "program" and jax.tree.leaves(arrays):
        others.append(jax.tree.map(lambda a: np.zeros((*a.shape, 2), a.dtype), arrays))
    if isinstance(arrays, dict):
        others.append({**arrays, "another": np.zeros(3)})
        others += [{}] * bool(arrays)
    for other in others:
        changed = dataclasses.replace(state, **{field: other})
        for call in (pipe.get_params, lambda s: pipe.step(s, batch_of()), pipe.adopt):
            with refused(f"and `{field}` holds others"):
                call(changed)
