"""Values that several layers of a stage read are stashed once, and the numbers are those of the plain model."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import schedule_named
from flax import nnx
from helpers import assert_close, timed, use_target, with_nan_buffers

import jpipe
from jpipe.plan import Machine, predict

KEY = jax.random.key(0)
ROWS, N, DIM, RAW, WIDTH, LENGTH, SOURCE = 2, 4, 8, 5, 6, 3, 7
MEMORY = (ROWS, SOURCE, WIDTH)
"""The shape of the memory of a microbatch, which no other value has."""


class Block(nnx.Module):
    """Attends to a memory, where a mask allows it."""

    def __init__(self, *, rngs):
        self.query, self.out = (nnx.Linear(DIM, DIM, rngs=rngs) for _ in range(2))
        self.key, self.value = (nnx.Linear(WIDTH, DIM, use_bias=False, rngs=rngs) for _ in range(2))

    def __call__(self, x, memory, mask):
        scores = jnp.where(mask[:, None], self.query(x) @ jnp.swapaxes(self.key(memory), 1, 2), -1e9)
        return x + self.out(jax.nn.softmax(scores) @ self.value(memory))


class Model(nnx.Module):
    """Blocks that read what an encoder has computed once."""

    def __init__(self, *, rngs):
        self.encoder = nnx.Linear(RAW, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(4)])

    def __call__(self, x, source, mask):
        memory = jnp.tanh(self.encoder(source))
        for block in self.blocks:
            x = block(x, memory, mask)
        return x


class Encoder(nnx.Module):
    def __init__(self, *, rngs):
        self.encoder = nnx.Linear(RAW, WIDTH, rngs=rngs)

    def __call__(self, inputs):
        return inputs["x"], jnp.tanh(self.encoder(inputs["source"])), inputs["mask"]


class Handing(nnx.Module):
    """A block as a layer that hands on memory and mask, so that equal blocks run in a loop."""

    def __init__(self, *, rngs):
        self.block = Block(rngs=rngs)

    def __call__(self, values):
        x, memory, mask = values
        return self.block(x, memory, mask), memory, mask


LAYERS = [Encoder, *[Handing] * 5, lambda values: values[0]]


@functools.cache
def batch():
    rng = np.random.default_rng(0)
    shapes = {"x": (LENGTH, DIM), "source": (SOURCE, RAW)}
    inputs = {name: rng.normal(size=(N * ROWS, *shape)).astype(np.float32) for name, shape in shapes.items()}
    inputs["mask"] = rng.random((N * ROWS, SOURCE)) > 0.3
    return {"inputs": inputs, "targets": rng.normal(size=(N * ROWS, LENGTH, DIM)).astype(np.float32)}


def loss(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def whole(schedule, **options):
    return jpipe.Pipeline(Model(rngs=nnx.Rngs(0)), loss=loss, optimizer=optax.sgd(1.0), schedule=schedule, **options)


def in_layers(schedule, boundaries=(3,), skips=False, **options):
    layers = [layer(rngs=nnx.Rngs(i)) if isinstance(layer, type) else layer for i, layer in enumerate(LAYERS)]
    if skips:
        names = "memory", "mask"
        blocks = [jpipe.skip(layer.block, pop=names) for layer in layers[1:-1]]
        layers = [jpipe.skip(layers[0], stash=names), *blocks]
    options = {"boundaries": list(boundaries), **options}
    return jpipe.Pipeline(layers, loss=loss, optimizer=optax.sgd(1.0), schedule=schedule, **options)


@functools.cache
def plain_gradient(is_whole):
    if is_whole:
        graph, params = nnx.split(Model(rngs=nnx.Rngs(0)))
        return jax.grad(lambda p: loss(nnx.merge(graph, p)(**batch()["inputs"]), batch()))(params)
    parts = [nnx.split(layer(rngs=nnx.Rngs(i))) for i, layer in enumerate(LAYERS[:-1])]

    def total(params):
        values = batch()["inputs"]
        for (graph, _), p in zip(parts, params, strict=True):
            values = nnx.merge(graph, p)(values)
        return loss(values[0], batch())

    return jax.grad(total)([p for _, p in parts])


def check(pipe, is_whole):
    """A step of plain descent at rate 1 changes the weights by the gradient."""
    state = with_nan_buffers(pipe.init(KEY, batch()))
    before = pipe.get_params(state)
    state, _ = pipe.step(state, batch())
    changes = jax.tree.map(np.subtract, *(jax.tree.leaves(p) for p in (before, pipe.get_params(state))))
    assert_close(changes, [*map(np.asarray, jax.tree.leaves(plain_gradient(is_whole)))], "float32")


def places(pipe, ring, shape):
    """For each stage the number of places of values of a shape in a slot of a ring."""
    stages = pipe._program(batch()).stages
    numbers = []
    for s in range(stages.num_stages):
        of_stage = {
            (place, row if place.stride else 0)
            for _, run, row in stages.layer_runs(s)
            for place in getattr(run, ring)
            if place.shape == shape
        }
        numbers.append(len(of_stage))
    return numbers


@pytest.mark.first_case
@pytest.mark.parametrize(
    "schedule", ["1f1b", "zero_bubble_h1", pytest.param("pipedream", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("make", [whole, in_layers])
def test_what_several_layers_read_is_stashed_once(schedule, make):
    pipe = make(schedule_named({"1f1b": "one_f_one_b"}.get(schedule, schedule), 2, N))
    if schedule != "pipedream":
        check(pipe, make is whole)
    # On the first stage the derivative of `tanh` reads the memory too, in another ring where backwards are split.
    rings = "input_stash", "weight_stash"
    first, second = (sum(places(pipe, ring, MEMORY)[s] for ring in rings) for s in range(2))
    assert first <= 2 and second == 1
    assert sum(places(pipe, ring, (ROWS, SOURCE))[1] for ring in rings) == 1


def test_readers_of_a_skip_share():
    pipe = in_layers(jpipe.schedules.one_f_one_b(2, N), skips=True)
    check(pipe, False)
    assert places(pipe, "input_stash", MEMORY) == [1, 1]


@pytest.mark.parametrize("platform", ["gpu", pytest.param("tpu", marks=pytest.mark.exhaustive)])
def test_the_forms_for_accelerators(monkeypatch, platform):
    use_target(monkeypatch, platform)
    check(in_layers(jpipe.schedules.one_f_one_b(2, N)), False)


@pytest.mark.parametrize(
    "recompute", ["full", pytest.param(jax.checkpoint_policies.dots_saveable, marks=pytest.mark.exhaustive)]
)
def test_recomputation(recompute):
    check(in_layers(jpipe.schedules.gpipe(2, N), recompute=recompute), False)


def test_stages_of_unlike_lengths_share_a_program():
    """Stages 1 and 2 run one and two blocks in a loop of one program."""
    check(in_layers(jpipe.schedules.one_f_one_b(4, N), boundaries=(2, 3, 5)), False)


@pytest.mark.exhaustive
def test_predictions_and_the_timeline_count_it_once():
    pipe = in_layers(schedule_named("zero_bubble_h1", 2, N))
    none = types.SimpleNamespace(temp_size_in_bytes=0)
    profile = pipe.profile(batch(), programs=("weight_grad",), min_seconds=0.001)
    profile = timed(profile, forward=1.0)
    pipe.compile = lambda batch: types.SimpleNamespace(memory_analysis=lambda: none)
    got = predict(pipe.schedule, profile, [3], Machine(num_devices=2)).memory
    assert got.activations == pipe.memory(batch()).activations
    blocks = [b for b in pipe.memory_timeline(batch(), device=1).blocks if b.name.endswith("0: weight stash")]
    stages, size = pipe._program(batch()).stages, 4 * ROWS * SOURCE * WIDTH
    assert [b.num_bytes for b in blocks if b.layers == (3, 6)].count(size) == 1
    assert size not in [b.num_bytes for b in blocks if b.layers != (3, 6)]
    assert sum(b.num_bytes for b in blocks) == stages.weight_stash.used_bytes[stages.program_of_stage[1]]


def test_a_result_and_its_reader_share():
    """`tanh` keeps its result, which the next layer multiplies."""
    width = 11

    def make(*, rngs):
        return nnx.Linear(width, width, rngs=rngs)

    layers = [make, jnp.tanh, make, jnp.tanh, make]
    pipe = jpipe.Pipeline(
        layers, loss=loss, optimizer=optax.sgd(1.0), schedule=jpipe.schedules.gpipe(1, 2), recompute="none"
    )
    data = {name: np.random.default_rng(1).normal(size=(4, width)).astype(np.float32) for name in ("inputs", "targets")}
    stages = pipe._program(data).stages
    arrays = {place for _, run, _ in stages.layer_runs(0) for place in run.input_stash if place.shape == (2, width)}
    assert len(arrays) == 3  # the input, and two results
    state = with_nan_buffers(pipe.init(KEY, data))
    params = pipe.get_params(state)

    def total(params):
        x = data["inputs"]
        for p in params:
            x = x @ p["kernel"] + p["bias"][None] if p else jnp.tanh(x)
        return loss(x, data)

    state, _ = pipe.step(state, data)
    changes = jax.tree.map(np.subtract, *(jax.tree.leaves(p) for p in (params, pipe.get_params(state))))
    assert_close(changes, [*map(np.asarray, jax.tree.leaves(jax.grad(total)(params)))], "float32")
