"""Whole models, as somebody would write them, in a pipeline, against the same models in plain JAX."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import schedule_named
from flax import linen as nn
from flax import nnx

import jpipe
from jpipe.segments.places import CutPlace, narrow

KEY = jax.random.key(3)
ROWS, N = 8, 4


class Block(nnx.Module):
    def __init__(self, dim, *, rngs):
        self.norm = nnx.LayerNorm(dim, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, dim, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(dim, 2 * dim, rngs=rngs), nnx.Linear(2 * dim, dim, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(x)))


class Language(nnx.Module):
    """A language model whose blocks all read one mask, with a tied head."""

    def __init__(self, *, num_blocks=3, rngs):
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.positions = nnx.Param(jax.random.normal(rngs.params(), (6, 8)))
        self.blocks = nnx.List([Block(8, rngs=rngs) for _ in range(num_blocks)])
        self.norm = nnx.LayerNorm(8, rngs=rngs)

    def __call__(self, tokens):
        mask = nnx.make_attention_mask(tokens > 0, tokens > 0)
        x = self.embed(tokens) + self.positions[...][None]
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(self.norm(x))


class Residual(nnx.Module):
    """A convolution net with batch norm, whose running statistics a pipeline moves once per minibatch."""

    def __init__(self, *, rngs):
        self.stem = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.convs = nnx.List([nnx.Conv(4, 4, (3, 3), rngs=rngs) for _ in range(3)])
        self.norms = nnx.List([nnx.BatchNorm(4, use_running_average=False, rngs=rngs) for _ in range(3)])
        self.head = nnx.Linear(4, 5, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms):
            x = x + nnx.relu(norm(conv(x)))
        return self.head(x.mean((1, 2)))


class UNet(nn.Module):
    """Skips from the way down to the way up, in one compact module."""

    @nn.compact
    def __call__(self, x):
        skips = []
        for dim in (4, 8):
            x = x + nn.Dense(x.shape[-1])(nn.silu(nn.Dense(2 * dim)(x)))
            skips.append(x)
            x = nn.Dense(dim)(x)
        for dim in (8, 4):
            x = nn.Dense(dim)(jnp.concatenate([x, skips.pop()], -1))
            x = x + nn.Dense(dim)(nn.silu(nn.Dense(2 * dim)(x)))
        return nn.Dense(5)(x)


class Values(nn.Module):
    """Blocks under `nn.remat` that all read what the first layer computed."""

    @nn.compact
    def __call__(self, x):
        first = x = nn.Dense(8)(x)
        for _ in range(3):
            x = jnp.tanh(nn.remat(nn.Dense)(8)(x)) + first
        return nn.Dense(5)(x)


def mlp(key_sizes=(6, 8, 12, 5)):
    class MLP(nnx.Module):
        def __init__(self, *, rngs):
            self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in zip(key_sizes, key_sizes[1:])])

        def __call__(self, x):
            for layer in self.layers:
                x = nnx.relu(layer(x))
            return x

    return MLP


TOKENS = np.random.default_rng(0).integers(0, 16, (ROWS, 6))
IMAGES = np.random.default_rng(1).normal(size=(ROWS, 6, 6, 3)).astype(np.float32)
VECTORS = np.random.default_rng(2).normal(size=(ROWS, 6)).astype(np.float32)

CASES = {
    "language": (lambda: Language(rngs=nnx.Rngs(0)), TOKENS),
    "residual": (lambda: Residual(rngs=nnx.Rngs(0)), IMAGES),
    "mlp": (lambda: mlp()(rngs=nnx.Rngs(0)), VECTORS),
    "U-Net": (UNet, VECTORS),
    "values": (Values, VECTORS),
}


def loss(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def plain_params(model, inputs, first):
    """The parameters of a model, and its outputs as a function of them."""
    if isinstance(model, nn.Module):
        return first, lambda p: model.apply({"params": p}, inputs)
    graph, _, rest = nnx.split(model, nnx.Param, ...)
    return first, lambda p: nnx.merge(graph, nnx.State(p), jax.tree.map(jnp.asarray, rest))(inputs)


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("name", "schedule"), [*((name, "one_f_one_b") for name in CASES), ("U-Net", "zero_bubble_h1")]
)
def test_losses_and_weights_are_those_of_the_plain_model(name, schedule):
    make, inputs = CASES[name]
    model = make()
    optimizer = optax.sgd(0.1, momentum=0.9)
    pipe = jpipe.Pipeline(model, loss=loss, optimizer=optimizer, schedule=schedule_named(schedule, 2, N))
    batch = {"inputs": inputs}
    batch["targets"] = np.ones((*inputs.shape, 16) if name == "language" else (ROWS, 5), np.float32)
    state = pipe.init(KEY, batch)
    params, outputs = plain_params(model, inputs, pipe.get_params(state))
    if name == "residual":  # a microbatch is normalised by its own statistics
        rows = ROWS // N
        parts = [plain_params(model, inputs[i : i + rows], params)[1] for i in range(0, ROWS, rows)]

        def outputs(p):
            return jnp.concatenate([part(p) for part in parts])

    moments = optimizer.init(params)
    for _ in range(2):
        want, gradients = jax.value_and_grad(lambda p: loss(outputs(p), batch))(params)
        updates, moments = optimizer.update(gradients, moments, params)
        params = optax.apply_updates(params, updates)
        state, metrics = pipe.step(state, batch)
        np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    got = pipe.get_params(state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), got, params)
    if name != "residual":
        predicted = pipe.predict(state, {"inputs": inputs[:3]})
        want = plain_params(model, inputs[:3], params)[1](got)
        np.testing.assert_allclose(predicted, want, atol=2e-5)


class Dropped(nnx.Module):
    def __init__(self, *, rngs):
        self.layers = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(3)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = self.dropout(layer(x))
        return x[:, :5]


@pytest.mark.exhaustive
def test_dropout_draws_anew_and_does_not_depend_on_the_stages():
    batch = {"inputs": VECTORS, "targets": np.ones((ROWS, 5), np.float32)}
    losses = {}
    for num_stages in (1, 2):
        schedule = schedule_named("gpipe", num_stages, N)
        pipe = jpipe.Pipeline(Dropped, loss=loss, optimizer=optax.sgd(0.0), schedule=schedule)
        state, of_steps = pipe.init(KEY, batch), []
        evaluated = pipe.evaluate(state, batch)["loss"]
        for _ in range(2):
            state, metrics = pipe.step(state, batch)
            of_steps.append(float(metrics["loss"]))
        np.testing.assert_array_equal(pipe.evaluate(state, batch)["loss"], evaluated)
        assert len({*of_steps, float(evaluated)}) == 3
        losses[num_stages] = of_steps
    np.testing.assert_allclose(losses[1], losses[2], rtol=1e-6)


class Counted(nnx.Module):
    """State that one part writes and others read, a weight that nothing reads, and a printed value."""

    def __init__(self, *, rngs):
        self.layers = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(4)])
        self.scale = nnx.BatchStat(jnp.ones(()))
        self.unread = nnx.Param(jnp.ones(3))

    def __call__(self, x):
        x = self.layers[0](x)
        x = self.layers[1](x) * self.scale[...]
        x = self.layers[2](x)
        self.scale[...] = self.scale[...] * 0.5
        return self.layers[3](x * self.scale[...])[:, :5]


def test_state_that_no_data_enters_is_in_each_segment_that_reads_it():
    batch = {"inputs": VECTORS, "targets": np.ones((ROWS, 5), np.float32)}
    optimizer = optax.sgd(0.1)
    optimizer = optax.chain(optax.add_decayed_weights(0.5), optimizer)
    pipe = jpipe.Pipeline(Counted, loss=loss, optimizer=optimizer, schedule=schedule_named("one_f_one_b", 2, N))
    state = pipe.init(KEY, batch)
    names = [name for record in pipe.partition(batch) for name in record.names]
    assert names == ["layers.0, unread", "layers.1", "layers.2", "layers.3"]
    params, model = pipe.get_params(state), Counted(rngs=nnx.Rngs(0))
    nnx.update(model, params)
    want = np.mean([loss(model(rows), {"targets": 1.0}) for rows in VECTORS.reshape(N, -1, 6)])
    state, metrics = pipe.step(state, batch)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    assert pipe.get_mutable_state(state)["scale"] == 0.5**N
    np.testing.assert_allclose(pipe.get_params(state)["unread"], 0.95)


class Centred(nnx.Module):
    """Each product reads a running mean of what it gets, beside the place after the product before it."""

    def __init__(self, *, rngs):
        self.layers = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(4)])
        self.means = nnx.List([nnx.BatchStat(jnp.zeros(6)) for _ in range(4)])

    def __call__(self, x):
        for layer, mean in zip(self.layers, self.means):
            centred = x - mean[...][None]
            x = layer(centred)
            mean[...] = 0.5 * mean[...] + 0.5 * jax.lax.stop_gradient(x).mean(0)
        return x[:, :5]


class CentredLinear(nnx.Module):
    def __init__(self, *, rngs):
        self.linear, self.mean = nnx.Linear(6, 6, rngs=rngs), nnx.BatchStat(jnp.zeros((1, 6)))

    def __call__(self, x):
        centred = x - self.mean[...]
        self.mean[...] = 0.5 * self.mean[...] + 0.5 * jax.lax.stop_gradient(x).mean(0, keepdims=True)
        return jnp.tanh(self.linear(centred))


class MeanOfAll(nnx.Module):
    """The mean of all rows so far: its count is read for another write alone, and by no data."""

    def __init__(self, *, rngs):
        self.linear, self.mean = nnx.Linear(6, 6, rngs=rngs), nnx.BatchStat(jnp.zeros((1, 6)))
        self.count, self.calls = nnx.BatchStat(jnp.zeros(())), nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        self.count[...] += jnp.where(self.calls[...] > 0, 1.0, 0.0)
        centred, change = x - self.mean[...], jax.lax.stop_gradient(x).mean(0, keepdims=True) - self.mean[...]
        self.mean[...] += change / self.count[...]
        return jnp.tanh(self.linear(centred))


class Modules(nnx.Module):
    def __init__(self, kind=CentredLinear, *, rngs):
        self.blocks = nnx.List([kind(rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x[:, :5]


def test_a_module_that_begins_with_a_read_of_its_state():
    batch = {"inputs": VECTORS, "targets": np.ones((ROWS, 5), np.float32)}
    model = Modules(rngs=nnx.Rngs(0))
    options = {"optimizer": optax.sgd(0.1), "schedule": schedule_named("one_f_one_b", 2, N), "boundaries": ["blocks.1"]}
    pipe = jpipe.Pipeline(model, loss=loss, **options)
    state = pipe.init(KEY, batch)
    first, _ = pipe.partition(batch)
    assert first.names == ("blocks.0.linear",)
    want = np.mean([loss(model(rows), {"targets": 1.0}) for rows in VECTORS.reshape(N, -1, 6)])
    state, metrics = pipe.step(state, batch)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)


class PreActivation(nnx.Module):
    """Blocks that begin with a norm, which reads its inputs before its weights."""

    def __init__(self, kind, *, rngs):
        self.blocks = nnx.List([nnx.List([kind(6, rngs=rngs), nnx.Linear(6, 6, rngs=rngs)]) for _ in range(4)])

    def __call__(self, x):
        for norm, linear in self.blocks:
            x = x + linear(nnx.relu(norm(x)))
        return x[:, :5]


@pytest.mark.parametrize("kind", [nnx.LayerNorm, nnx.BatchNorm])
def test_a_stage_that_begins_with_a_norm_gets_its_inputs_alone(kind):
    batch = {"inputs": VECTORS, "targets": np.ones((ROWS, 5), np.float32)}
    model = PreActivation(kind, rngs=nnx.Rngs(0))
    options = {"optimizer": optax.sgd(0.1), "schedule": schedule_named("one_f_one_b", 2, N), "boundaries": ["blocks.2"]}
    pipe = jpipe.Pipeline(model, loss=loss, **options)
    state = pipe.init(KEY, batch)
    assert {record.num_bytes for record in pipe.messages(batch)} == {ROWS // N * 6 * 4}
    want = np.mean([loss(nnx.clone(model)(rows), {"targets": 1.0}) for rows in VECTORS.reshape(N, -1, 6)])
    state, metrics = pipe.step(state, batch)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)


def test_a_count_is_beside_the_write_that_reads_it():
    batch = {"inputs": VECTORS, "targets": np.ones((ROWS, 5), np.float32)}
    model = Modules(MeanOfAll, rngs=nnx.Rngs(0))
    pipe = jpipe.Pipeline(model, loss=loss, optimizer=optax.sgd(0.1), schedule=schedule_named("one_f_one_b", 4, N))
    state = pipe.init(KEY, batch)
    want = np.mean([loss(model(rows), {"targets": 1.0}) for rows in VECTORS.reshape(N, -1, 6)])
    state, metrics = pipe.step(state, batch)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    blocks = pipe.get_mutable_state(state)["blocks"]
    for i, block in enumerate(model.blocks):
        assert blocks[i]["count"] == blocks[i]["calls"] == N
        np.testing.assert_allclose(blocks[i]["mean"], block.mean[...], rtol=1e-5, atol=1e-6)


def test_a_place_between_a_write_and_the_next_read():
    batch = {"inputs": VECTORS, "targets": np.ones((ROWS, 5), np.float32)}
    model = Centred(rngs=nnx.Rngs(0))
    pipe = jpipe.Pipeline(model, loss=loss, optimizer=optax.sgd(0.1), schedule=schedule_named("one_f_one_b", 4, N))
    state = pipe.init(KEY, batch)
    assert [record.names for record in pipe.partition(batch)] == [(f"layers.{i}",) for i in range(4)]
    predicted = pipe.predict(state, batch)
    np.testing.assert_allclose(predicted, nnx.clone(model)(VECTORS), rtol=1e-5, atol=1e-6)
    want = np.mean([loss(model(rows), {"targets": 1.0}) for rows in VECTORS.reshape(N, -1, 6)])
    state, metrics = pipe.step(state, batch)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    means = pipe.get_mutable_state(state)["means"]
    for i, mean in enumerate(model.means):
        np.testing.assert_allclose(means[i], mean[...], rtol=1e-5, atol=1e-6)


# -- Places


def row(counts):
    """Places at which so many values cross."""
    value = jex.Var(jax.core.ShapedArray((4, 8), np.float32))
    return [(CutPlace(i, (value,) * count, (), (i,)),) for i, count in enumerate(counts)]


@pytest.mark.parametrize(
    ("counts", "at_least", "want"),
    [
        ([1, 1, 1], 0, [0, 1, 2]),  # a chain
        ([1, 3, 4, 4, 3, 2, 1, 2, 1], 0, [0, 6, 8]),  # the halves of a block
        ([1, 2, 3, 2, 2, 3, 2, 3, 2, 1], 0, [0, 1, 3, 4, 6, 8, 9]),  # blocks between the ends of a skip
        ([1, 2, 2, 2], 0, [0, 1, 2, 3]),  # a value that all later layers read
        ([1, 1, 1, 2, 2], 3, [0, 1, 2]),
        ([1, 1, 1, 2, 2], 4, [0, 1, 2, 4]),  # the second of two towers
        ([1, 2, 3, 3, 2, 1], 5, [0, 1, 2, 3, 4, 5]),
        ([], 1, []),
    ],
)
def test_narrow_places(counts, at_least, want):
    assert [place.position for (place,) in narrow(row(counts), at_least)] == want


def test_values_much_smaller_than_others_do_not_count():
    large, small = (jex.Var(jax.core.ShapedArray(shape, np.float32)) for shape in ((4, 8, 16), (4, 1)))
    assert CutPlace(0, (large, large, small), (), ()).num_large == 2
    assert CutPlace(0, (small,), (), ()).num_large == 1
    assert CutPlace(0, (), (), ()).num_large == 0
