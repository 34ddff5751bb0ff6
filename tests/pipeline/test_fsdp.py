"""Weights and microbatches split over an axis "fsdp" of the mesh: the plain model's numbers, from arrays that are
split.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from families import FAMILIES, MODELS, cross_entropy, schedule_named
from flax import nnx
from helpers import assert_close, refused
from jax.sharding import PartitionSpec

import jpipe

KEY = jax.random.key(7)
ADAM = optax.adam(0.1, eps=1e-2)
B, N = 8, 2
SLOW = pytest.mark.slow


def pipeline(family, mesh, schedule="one_f_one_b", **options):
    return jpipe.Pipeline(
        FAMILIES[family].layers,
        loss=cross_entropy,
        optimizer=ADAM,
        schedule=schedule_named(schedule, 2, N),
        mesh=mesh,
        **options,
    )


@functools.cache
def plain(family):
    model = oracles.PlainModel(FAMILIES[family].layers, KEY)
    batches = FAMILIES[family].batches(3, B)
    return model, oracles.train(model, model.params, cross_entropy, ADAM, batches)


CASES = [
    # family, schedule, other axes of the mesh, options
    ("mlp", "one_f_one_b", {}, {}),
    ("transformer", "one_f_one_b", {"model": 2}, {}),
    pytest.param("transformer", "one_f_one_b", {}, {}, marks=SLOW),
    pytest.param("transformer", "one_f_one_b", {"data": 2}, {}, marks=SLOW),
    pytest.param("transformer", "gpipe", {}, {"recompute": "full"}, marks=SLOW),
    pytest.param("transformer", "zero_bubble_h1", {"model": 2}, {}, marks=SLOW),
    pytest.param("transformer", "two-columns", {"data": 2}, {}, marks=SLOW),
    pytest.param("transformer", "v", {}, {}, marks=SLOW),
    pytest.param("mlp", "one_f_one_b", {"data": 2}, {}, marks=SLOW),
    pytest.param("mlp", "one_f_one_b/unit", {}, {"overlap": True}, marks=SLOW),
    pytest.param("resnet", "one_f_one_b", {}, {}, marks=SLOW),
    pytest.param("resnet", "zero_bubble_h2", {"data": 2}, {}, marks=SLOW),
]


@pytest.mark.parametrize("family, schedule, axes, options", CASES, ids=str)
@pytest.mark.sampled(2)
def test_training_equals_the_plain_model(family, schedule, axes, options):
    model, (losses, _, params) = plain(family)
    mesh = jpipe.make_mesh(stage=2, fsdp=2, **axes)
    pipe = pipeline(family, mesh, schedule, **options)
    batches = FAMILIES[family].batches(3, B)
    state = pipe.init(KEY, batches[0])
    where = jax.tree.map(lambda a: a.sharding, state)
    for batch, loss in zip(batches, losses):
        state, metrics = pipe.step(state, batch)
        assert_close(metrics["loss"], np.asarray(loss), "float32")
    assert jax.tree.map(lambda a: a.sharding, state) == where
    assert_close(pipe.get_params(state), params, "float32")
    for num_rows in (B, B - 1, 1):  # also fewer rows than can be split
        inputs = batches[0]["inputs"][:num_rows]
        outputs = pipe.predict(state, {"inputs": inputs})
        assert_close(outputs, np.asarray(model(params, inputs)), "float32")


@pytest.mark.parametrize(
    "schedule",
    [
        "pipemare",
        pytest.param("pipedream", marks=SLOW),
        pytest.param("pipedream_2bw", marks=SLOW),
    ],
)
@pytest.mark.exhaustive
def test_asynchronous_training_equals_that_without_the_axis(schedule):
    """Which the oracles of `test_asynchronous.py` prove."""
    batches = FAMILIES["mlp"].batches(4, B)
    found = []
    for fsdp in (1, 2):
        pipe = pipeline("mlp", jpipe.make_mesh(stage=2, fsdp=fsdp), schedule)
        state = pipe.init(KEY, batches[0])
        losses = []
        for batch in batches:
            state, metrics = pipe.step(state, batch)
            losses.append(np.asarray(metrics["loss"]))
        state, _ = pipe.flush(state)
        found.append((losses, pipe.get_params(state)))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5)
    assert_close(found[1][1], found[0][1], "float32")


@SLOW
def test_stages_with_copies_equal_the_plain_model():
    _, (losses, _, params) = plain("mlp")
    pipe = jpipe.Pipeline(
        FAMILIES["mlp"].layers,
        loss=cross_entropy,
        optimizer=ADAM,
        schedule=jpipe.schedules.one_f_one_b(2, 4, replicas=(3, 1)),
        mesh=jpipe.make_mesh(stage=4, fsdp=2),
    )
    batches = FAMILIES["mlp"].batches(3, B)
    state = pipe.init(KEY, batches[0])
    for batch, loss in zip(batches, losses):
        state, metrics = pipe.step(state, batch)
        assert_close(metrics["loss"], np.asarray(loss), "float32")
    assert_close(pipe.get_params(state), params, "float32")


@SLOW
@pytest.mark.parametrize("name", MODELS)
def test_every_model_equals_itself_without_the_axis(name):
    model, inputs_of = MODELS[name]
    batch = {"inputs": inputs_of(np.random.default_rng(0))}

    def loss(outputs, batch):
        return sum(jnp.mean(jnp.square(a)) for a in jax.tree.leaves(outputs))

    found = []
    for fsdp in (1, 2):
        pipe = jpipe.Pipeline(
            model.layers(),
            loss=loss,
            optimizer=optax.sgd(0.1),
            schedule=jpipe.schedules.one_f_one_b(2, 2),
            mesh=jpipe.make_mesh(stage=2, fsdp=fsdp),
        )
        state = pipe.init(KEY, batch)
        state, metrics = pipe.step(state, batch)
        found.append((np.asarray(metrics["loss"]), pipe.get_params(state)))
    # The gradient of the bias of an attention's keys is zero, and the bias is rounding errors of zero.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, found[1], found[0])


def bytes_of(arrays):
    """Bytes of a tree of arrays on one device."""
    return sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(arrays))


@pytest.mark.exhaustive
def test_each_device_holds_its_share():
    batch = FAMILIES["mlp"].batches(1, B)[0]
    states = [pipeline("mlp", jpipe.make_mesh(stage=2, fsdp=n)).init(KEY, batch) for n in (1, 2, 4)]
    # A matrix that is split takes room on every stage, also where only one stage has its shape.
    matrices = 4 * (6 * 8 + 2 * 8 * 8 + 8 * 5)
    for parts, state in zip((2, 4), states[1:]):
        split = {name: a for name, a in state.parameters.items() if "split" in name}
        assert bytes_of(split) == matrices // parts
    for group in ("gradients", "optimizer_state"):
        one, _, four = (bytes_of(getattr(state, group)) for state in states)
        assert four < one / 2  # biases stay whole
    inboxes = [bytes_of(state.buffers["inbox"]) for state in states]
    assert inboxes[1] == inboxes[0] // 2


class Wide(nnx.Module):
    """A layer whose weights, activations and hidden activations have shapes of their own."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(6, 10, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(10, 6, use_bias=False, rngs=rngs)

    def __call__(self, x):  # [M, 6] -> [M, 6]
        return x + self.down(jnp.tanh(self.up(x)))


@pytest.mark.first_case
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zero_bubble_h1"])
def test_what_waits_for_a_backward_is_split(schedule):
    """Stashes, and what is between the halves of a split backward: each device has those of its rows."""
    batch = {"inputs": np.ones((16, 6), np.float32)}
    one, two = (
        jpipe.Pipeline(
            [Wide] * 4,
            loss=lambda outputs, batch: jnp.mean(outputs**2),
            optimizer=ADAM,
            schedule=schedule_named(schedule, 2, N),
            mesh=jpipe.make_mesh(stage=2, fsdp=size),
        )
        .memory(batch)
        .activations
        for size in (1, 2)
    )
    assert 0 <= 2 * two - one <= 16  # single numbers are whole


def test_the_compiled_step_gathers_weights_and_no_activations():
    pipe = jpipe.Pipeline(
        [Wide] * 4,
        loss=lambda outputs, batch: jnp.mean(jnp.square(outputs)),
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.gpipe(2, N),
        mesh=jpipe.make_mesh(stage=2, fsdp=2),
    )
    batch = {"inputs": np.zeros((8, 6), np.float32)}  # microbatches of 4 rows
    text = pipe.compile(batch).as_text()
    found = re.findall(
        r"= \(?f32\[([\d,]+)\]\S* (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)"
        r"(?:-start)?\(.*",
        text,
    )
    gathers = sorted(shape for shape, kind in found if kind == "all-gather")
    weights = ["10,6", "6,10"]
    # The loop over the layers of a stage has one body: each weight forward, and each weight backward.
    of_weights = [shape for shape in gathers if shape in weights]
    assert of_weights == sorted(2 * weights)
    assert set(gathers) <= {
        *weights,
        "2,1",
        "2,1,1",
    }  # [D, versions, columns]: norms over the stages
    permutes = [shape for shape, kind in found if kind == "collective-permute"]
    assert permutes and set(permutes) == {"1,2,6"}  # half of the rows of a message
    assert not [shape for shape, kind in found if kind == "all-to-all"]
    # The gradients of a layer's two weights: sums over the rows of both halves.
    assert re.search(r"f32\[(10,6|6,10)\]\S*.* all-reduce\(", text)


class CastingWide(Wide):
    """A layer whose modules cast by themselves."""

    def __init__(self, *, rngs: nnx.Rngs):
        super().__init__(rngs=rngs)
        self.up.dtype = self.down.dtype = jnp.bfloat16


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layer,options", [(Wide, {"compute_dtype": jnp.bfloat16}), (CastingWide, {})], ids=["all", "own"]
)
def test_weights_are_cast_before_they_are_gathered(layer, options):
    """XLA for CPUs would gather them in float32 all the same, so this reads the program that it gets."""
    batch = {"inputs": np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)}
    found = []
    for fsdp in (1, 2):
        pipe = jpipe.Pipeline(
            [layer] * 4,
            loss=lambda outputs, batch: jnp.mean(jnp.square(outputs)),
            optimizer=optax.sgd(0.1),
            schedule=jpipe.schedules.gpipe(2, N),
            mesh=jpipe.make_mesh(stage=2, fsdp=fsdp),
            **options,
        )
        state = pipe.init(KEY, batch)
        state, _ = pipe.step(state, batch)
        found.append(pipe.get_params(state))
    text = pipe.lower(batch).as_text()
    for shape in ("6x10", "10x6"):
        assert re.search(rf"sharding_constraint .*\[{{}}, {{}}\].*tensor<{shape}xbf16>", text)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), *found)


@pytest.mark.exhaustive
def test_a_state_moves_between_meshes():
    batches = FAMILIES["mlp"].batches(3, B)
    meshes = [
        jpipe.make_mesh(stage=2),
        jpipe.make_mesh(stage=2, fsdp=2),
        jpipe.make_mesh(stage=2, data=2, fsdp=2),
    ]
    pipes = [pipeline("mlp", mesh) for mesh in meshes]
    state = pipes[0].init(KEY, batches[0])
    for pipe, batch in zip(pipes, batches):
        state = pipe.adopt(state)
        state, _ = pipe.step(state, batch)
    _, (_, _, params) = plain("mlp")
    assert_close(pipes[-1].get_params(state), params, "float32")


def test_a_layer_may_say_how_its_weights_are_split():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.normal(0.5), ("fsdp", None))  # and not the larger dim
            self.linear = nnx.Linear(4, 8, kernel_init=init, rngs=rngs)

        def __call__(self, x):
            return self.linear(x)[..., :4]

    pipe = jpipe.Pipeline(
        [Layer] * 2,
        loss=lambda outputs, batch: jnp.mean(jnp.square(outputs)),
        optimizer=ADAM,
        schedule=jpipe.schedules.gpipe(2, 2),
        mesh=jpipe.make_mesh(stage=2, fsdp=2),
    )
    state = pipe.init(KEY, {"inputs": np.zeros((8, 4), np.float32)})
    specs = {a.sharding.spec for a in state.parameters.values() if a.ndim > 3}
    assert specs == {PartitionSpec("stage", None, "fsdp")}


class Scaled(nnx.Module):
    """A layer with numbers that it computes while it is traced, and keeps, as equivariant networks do."""

    tables: dict = {}

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        with jax.ensure_compile_time_eval():
            table = self.tables.setdefault(x.dtype, jnp.linspace(0.5, 1.5, 8, dtype=x.dtype))
        return jnp.tanh(self.linear(x) * table[None])


def test_constants_that_were_computed_on_the_mesh():
    batch = {"inputs": np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)}
    losses = []
    for axes in ({}, {"fsdp": 2}):
        Scaled.tables.clear()
        pipe = jpipe.Pipeline(
            [Scaled] * 4,
            loss=lambda y, _: (y**2).mean(),
            optimizer=optax.sgd(0.5),
            schedule=jpipe.schedules.one_f_one_b(2, N),
            mesh=jpipe.make_mesh(stage=2, **axes),
        )
        state = pipe.init(KEY, batch)
        for _ in range(2):
            state, metrics = pipe.step(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


def test_refusals():
    pipe = pipeline("mlp", jpipe.make_mesh(stage=2, fsdp=4))
    with refused(r"a microbatch of 3 rows .* the 4 devices of the axis \"fsdp\"\. Use a batch .* multiple of 8"):
        pipe.init(KEY, FAMILIES["mlp"].batches(1, 6)[0])
    with refused("`fsdp` must be a whole number of devices, at least 1, got 0"):
        jpipe.make_mesh(stage=2, fsdp=0)
