"""Arrays of the user on meshes of the user: where they lie changes no number, and raises no error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import refused
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jpipe

SPEC = PartitionSpec
KEY = np.array([0, 7], np.uint32)
RNG = np.random.default_rng(0)
BATCH = {
    "inputs": RNG.normal(size=(8, 4)).astype(np.float32),
    "targets": RNG.normal(size=(8, 4)).astype(np.float32),
}
SOME = {name: a[:6] for name, a in BATCH.items()}
"""Rows that must be padded."""


def explicit(*sizes, names=("data", "x")):
    """A mesh as `jax.make_mesh` makes it."""
    return jax.make_mesh(sizes, names[: len(sizes)])


def loss(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def pipeline(mesh=None, loss=loss, optimizer=None, more=()):
    layers = [lambda rngs: nnx.Linear(4, 4, rngs=rngs) for _ in range(2)]
    return jpipe.Pipeline(
        [*layers, *more],
        loss=loss,
        optimizer=optimizer or optax.adam(0.1),
        schedule=jpipe.schedules.gpipe(2, 4),
        mesh=mesh,
    )


def results(pipe, batch, some=SOME, key=KEY, params=None):
    """Two losses of training, then a loss of evaluation, outputs, and weights."""
    key = jax.random.wrap_key_data(key) if isinstance(key, np.ndarray) else key
    state = pipe.init(key, batch, params=params)
    losses = []
    for _ in range(2):
        state, metrics = pipe.step(state, batch)
        losses.append(metrics["loss"] * 1)  # the user computes with it
    losses.append(pipe.evaluate(state, some)["loss"] * 1)
    outputs = pipe.predict(state, {"inputs": some["inputs"]}) * 1
    return jax.tree.map(np.asarray, (losses, outputs, pipe.get_params(state)))


@functools.cache
def pipe_of_two():
    return pipeline()


@functools.cache
def expected():
    return results(pipe_of_two(), BATCH)


def assert_expected(got):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        got,
        expected(),
    )


def sharding(case):
    devices = jax.devices()
    return {
        "rows": lambda: NamedSharding(explicit(2), SPEC("data")),
        "columns": lambda: NamedSharding(explicit(2), SPEC(None, "data")),
        "rows and columns": lambda: NamedSharding(explicit(2, 2), SPEC("data", "x")),
        "whole": lambda: NamedSharding(explicit(2), SPEC()),
        "name of the pipeline's axis": lambda: NamedSharding(explicit(2, names=("stage",)), SPEC("stage")),
        "reversed": lambda: NamedSharding(Mesh(devices[1::-1], ("x",)), SPEC("x")),
        "other devices": lambda: NamedSharding(Mesh(devices[4:6], ("x",)), SPEC("x")),
        "one device": lambda: devices[5],
        "host memory": lambda: NamedSharding(Mesh(devices[:2], ("x",)), SPEC("x"), memory_kind="pinned_host"),
    }[case]()


PLACES = [
    "rows", "columns", "rows and columns", "whole", "name of the pipeline's axis", "reversed", "other devices", "one device",
    "host memory",
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_batch_counts_by_its_values(place):
    batch, some = jax.device_put((BATCH, SOME), sharding(place))
    assert_expected(results(pipe_of_two(), batch, some))


def test_entries_of_a_batch_may_lie_in_different_places():
    batch = {n: jax.device_put(BATCH[n], sharding(p)) for n, p in zip(BATCH, PLACES)}
    assert_expected(results(pipe_of_two(), batch))


@pytest.mark.parametrize("place", ["whole", "one device"])
def test_a_key_counts_by_its_value(place):
    key = jax.device_put(jax.random.wrap_key_data(KEY), sharding(place))
    assert_expected(results(pipe_of_two(), BATCH, key=key))


def test_a_key_is_one_key():
    for keys in (jax.random.split(jax.random.key(0)), jnp.zeros(3, jnp.uint32)):
        with pytest.raises(ValueError, match=r"`key` must be a key .* got an array"):
            pipe_of_two().init(keys, BATCH)


@pytest.mark.parametrize("place", ["rows", "reversed"])
def test_weights_count_by_their_values(place):
    pipe = pipe_of_two()
    params = pipe.get_params(pipe.init(jax.random.wrap_key_data(KEY), BATCH))
    placed = jax.device_put(params, sharding(place))
    assert_expected(results(pipe, BATCH, params=placed))


@pytest.mark.first_case
@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
def test_a_pipeline_on_an_explicit_mesh(sizes):
    mesh = explicit(*sizes, names=("stage", "data"))
    batch, some = jax.device_put((BATCH, SOME), NamedSharding(mesh, SPEC("stage")))
    assert_expected(results(pipeline(mesh), batch, some))


@pytest.mark.first_case
@pytest.mark.parametrize("on_mesh", [False, True], ids=["host", "on the mesh"])
@pytest.mark.parametrize("sizes", [(2,), (2, 4)], ids=str)
def test_a_program_under_set_mesh(sizes, on_mesh):
    with jax.set_mesh(explicit(*sizes)):
        mesh = jax.sharding.get_mesh()
        batch, some = BATCH, SOME
        if on_mesh:
            batch, some = jax.device_put((BATCH, SOME), NamedSharding(mesh, SPEC("data")))
        assert_expected(results(pipeline(), batch, some))


def test_other_methods_under_set_mesh():
    with jax.set_mesh(explicit(4)):
        pipe = pipeline()
        state, metrics = pipe.flush(pipe.init(jax.random.wrap_key_data(KEY), BATCH))
        assert float(metrics["num_microbatches"] + 1) == 1
        adopted = pipe.with_params(pipe.adopt(state), lambda params, _: params)
        assert pipe.get_mutable_state(adopted) == [{}, {}]
        assert pipe.memory(BATCH) and pipe.partition(BATCH)
        with refused("called inside a transformation"):
            jax.jit(lambda batch: pipe.step(state, batch))(BATCH)


@functools.cache
def surrounded(mesh):
    """A loss, a layer and a learning rate that read arrays of their surroundings, which may lie on a mesh."""
    one, rate = np.float32(1), np.float32(0.1)
    if mesh is not None:
        one, rate = jax.device_put((one, rate), NamedSharding(mesh, SPEC()))
    pipe = pipeline(
        loss=lambda outputs, batch: jnp.mean(one * (outputs - batch["targets"]) ** 2),
        optimizer=optax.inject_hyperparams(optax.adam)(learning_rate=rate),
        more=[jpipe.Function(lambda x: x * one)],
    )
    return results(pipe, BATCH)


# fmt: skip
@pytest.mark.first_case
@pytest.mark.parametrize("mesh", [explicit(2), Mesh(jax.devices()[:2], ("x",))], ids=["explicit", "automatic"])
def test_arrays_of_the_surroundings_count_by_their_values(mesh):
    jax.tree.map(np.testing.assert_array_equal, surrounded(mesh), surrounded(None))
