"""`jpipe.with_boundary_layers` and `Bottleneck`: a plain JAX model with the same matrices, the bytes that are sent, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from collectives import collectives
from flax import nnx
from helpers import assert_close, refused

import jpipe

DIM, WIDTH, ROWS, N = 8, 3, 2, 3
LAYERS = [functools.partial(nnx.Linear, DIM, DIM) for _ in range(3)]
MODULE = nnx.Linear(DIM, DIM, rngs=nnx.Rngs(0))
INPUTS = jax.ShapeDtypeStruct((N * ROWS, DIM), jnp.float32)


def loss(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def batches(number):
    arrays = np.random.default_rng(1).standard_normal((number, 2, N * ROWS, DIM)).astype("float32")
    return [{"inputs": x, "targets": y} for x, y in arrays]


def narrowed(layers=LAYERS, boundaries=(1, 2), schedule=jpipe.schedules.one_f_one_b, **options):
    layers, boundaries = jpipe.with_boundary_layers(layers, list(boundaries), jpipe.Bottleneck(WIDTH), INPUTS)
    return jpipe.Pipeline(
        layers,
        loss=loss,
        optimizer=optax.sgd(0.1),
        schedule=schedule(len(boundaries) + 1, N),
        boundaries=boundaries,
        **options,
    )


def plain(params, batch):
    x = batch["inputs"]
    for layer in params:
        x = x @ layer["kernel"] + layer["bias"][None] if "kernel" in layer else x @ layer["0"]
    return loss(x, batch)


def test_it_trains_as_a_plain_model_with_these_matrices():
    pipe, data = narrowed(), batches(3)
    state = pipe.init(jax.random.key(0), data[0])
    params = jax.tree.map(jnp.asarray, pipe.get_params(state))
    assert [next(iter(p.values())).shape for p in params[1:3]] == [(DIM, WIDTH), (WIDTH, DIM)]
    begun = params
    for batch in data:
        state, metrics = pipe.step(state, batch)
        value, gradients = jax.value_and_grad(plain)(params, batch)
        params = jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    assert_close(pipe.get_params(state), params, jnp.float32)
    assert abs(np.asarray(params[1]["0"] - begun[1]["0"])).max() > 1e-3  # both are trained
    assert abs(np.asarray(params[2]["0"] - begun[2]["0"])).max() > 1e-3


def test_it_begins_as_the_identity_on_its_basis():
    encoder, decoder = jpipe.Bottleneck(WIDTH)((INPUTS,))
    before = encoder.init(jax.random.key(1), INPUTS)
    after = decoder.init(jax.random.key(2), None)
    np.testing.assert_allclose(before["0"].T @ before["0"], np.eye(WIDTH), atol=1e-6)
    on_the_basis = np.random.default_rng(0).standard_normal((5, WIDTH)).astype("float32") @ before["0"].T
    passed = decoder.apply(after, encoder.apply(before, on_the_basis))
    np.testing.assert_allclose(passed, on_the_basis, atol=1e-5)


def test_the_bytes_that_are_sent():
    """Those of the facts and of the compiled program, and both with a compressor."""
    pipe, data = narrowed(), batches(1)
    assert {record.num_bytes for record in pipe.messages(data[0])} == {ROWS * WIDTH * 4}
    permutes = [c for c in collectives(pipe.lower(data[0]).compile().as_text()) if c.kind == "collective-permute"]
    assert permutes and all(c.num_bytes in (ROWS * WIDTH * 4, 2 * ROWS * WIDTH * 4) for c in permutes)
    pipe = narrowed(compress_messages=jpipe.compress.Cast(jnp.bfloat16))
    assert {record.num_bytes for record in pipe.messages(data[0])} == {ROWS * WIDTH * 2}


def test_leaves_that_are_not_wider_go_as_they_are():
    def outputs_of_three(x):
        return {"a": x, "mask": jnp.ones(x.shape[:1], jnp.int32), "narrow": x[:, :WIDTH]}

    layers = [jpipe.Function(outputs_of_three), jpipe.Function(lambda x: x["a"] + x["narrow"].sum() + x["mask"].sum())]
    layers, boundaries = jpipe.with_boundary_layers(layers, [1], jpipe.Bottleneck(WIDTH), INPUTS)
    assert len(layers) == 4 and boundaries == [2]
    outputs = layers[0].function(jnp.ones((2, DIM)))
    parameters = layers[1].init(jax.random.key(0), outputs)
    assert {name: leaf.shape for name, leaf in parameters.items()} == {"0": (DIM, WIDTH)}
    sent = layers[1].apply(parameters, outputs)
    assert jax.tree.map(jnp.shape, sent) == {"a": (2, WIDTH), "mask": (2,), "narrow": (2, WIDTH)}


def test_a_bottleneck_of_a_whole_model_is_where_it_is_cut():
    class Model(nnx.Module):
        def __init__(self, *, rngs):
            self.before = nnx.Linear(DIM, DIM, rngs=rngs)
            self.encoder, self.decoder = nnx.Linear(DIM, WIDTH, rngs=rngs), nnx.Linear(WIDTH, DIM, rngs=rngs)
            self.after = nnx.Linear(DIM, DIM, rngs=rngs)

        def __call__(self, x):
            return self.after(nnx.relu(self.decoder(self.encoder(nnx.relu(self.before(x))))))

    options = {"loss": loss, "optimizer": optax.sgd(0.1), "schedule": jpipe.schedules.one_f_one_b(2, N)}
    pipe = jpipe.Pipeline(lambda rngs: Model(rngs=rngs), **options)
    assert {record.num_bytes for record in pipe.messages(batches(1)[0])} == {ROWS * WIDTH * 4}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jpipe.Bottleneck(0), "`width` must be a whole number, at least 1, got 0"),
        (lambda: jpipe.Bottleneck(2.0), "`width` must be a whole number"),
        (lambda: narrowed(boundaries=[0]), r"`boundaries` must be the first layer of each stage.*1 to 2, got \[0\]"),
        (lambda: narrowed(boundaries=[2, 1]), r"ascending, from 1 to 2, got \[2, 1\]"),
        (lambda: narrowed(boundaries=[3]), r"got \[3\]"),
        (lambda: narrowed(boundaries=["1"]), r"got \['1'\]"),
        (
            lambda: narrowed([*LAYERS[:1], functools.partial(nnx.Linear, DIM, WIDTH), jpipe.Function(jnp.tanh)], [2]),
            r"`width=3` makes nothing smaller: the message has float32\[6, 3\]",
        ),
        (lambda: narrowed(MODULE), "`layers` must be a sequence of layers, got a whole"),
        (
            lambda: jpipe.with_boundary_layers(LAYERS, [1], lambda outputs: jnp.tanh, INPUTS),
            "`make_pair` must return a tuple of two layers, got",
        ),
        (
            lambda: jpipe.with_boundary_layers(LAYERS, [1], jpipe.Bottleneck(2), np.ones((2, 5), "f")),
            r"layer 0 \(Linear\) cannot take float32\[2, 5\]",
        ),
    ],
)
def test_wrong_words(call, message):
    with refused(message):
        call()
