"""Float32 weights with bfloat16 compute: what is cast, what is kept, and what is summed in which precision."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from families import FAMILIES, cross_entropy, schedule_named, slow

import jpipe
from jpipe.layers.as_layers import as_layers
from jpipe.layers.loss import Loss
from jpipe.layers.trace import trace_layers

KEY = jax.random.key(0)


class Scale(jpipe.InitApply):
    """Outputs are `w * x`, of any number of rows."""

    def __init__(self, value: float):
        super().__init__(
            init=lambda key, x: {"w": jnp.full((), value)},
            apply=lambda params, x: params["w"] * x,
        )


def rows(values):
    return {"inputs": np.asarray(values, np.float32)[:, None]}


def mean(outputs, batch):
    return outputs.mean()


def scales(values, schedule=None, loss=mean, learning_rate=1.0):
    return jpipe.Pipeline(
        [Scale(value) for value in values],
        loss=loss,
        optimizer=optax.sgd(learning_rate),
        schedule=schedule or jpipe.schedules.one_f_one_b(2, 4),
        compute_dtype=jnp.bfloat16,
    )


@pytest.mark.first_case
@pytest.mark.parametrize("name", ["one_f_one_b/paired", "one_f_one_b/unit", "gpipe"])
def test_gradients_are_summed_in_float32(name):
    """256 + 1 is 256 in bfloat16, in which each of these gradients is exact."""
    values = [256.0, 1.0, 1.0, 1.0]
    pipe, batch = scales([1.0, 1.0], schedule_named(name, 2, 4)), rows(values)
    state, _ = pipe.step(pipe.init(KEY, batch), batch)
    for layer in pipe.get_params(state):
        assert layer["w"] == 1 - sum(values) / 4


def test_weights_are_kept_in_float32():
    """Updates smaller than bfloat16 resolves add up."""
    pipe, batch = scales([1.0, 1.0], learning_rate=2.0**-12), rows([1.0] * 4)
    state = pipe.init(KEY, batch)
    assert {a.dtype for a in jax.tree.leaves(state.parameters)} == {np.dtype("float32")}
    for _ in range(4):
        state, _ = pipe.step(state, batch)
    assert [layer["w"] for layer in pipe.get_params(state)] == [1 - 4 * 2.0**-12] * 2


def test_layers_compute_in_bfloat16_and_the_loss_in_float32():
    batch = rows([1 + 2.0**-7] * 4)  # exact in bfloat16, its square is not
    seen = []

    def loss(outputs, batch):
        seen.append(outputs.dtype)
        return outputs.mean()

    pipe = scales([1 + 2.0**-7, 1.0], loss=loss)
    _, metrics = pipe.step(pipe.init(KEY, batch), batch)
    assert metrics["loss"] == np.float32(1 + 2.0**-6)
    assert set(seen) == {np.dtype("float32")}


@pytest.mark.first_case
@pytest.mark.parametrize("family", list(FAMILIES))
def test_casts_are_not_stashed(family):
    """What a layer keeps has the shapes that it has in float32, and fewer bytes; so have messages."""
    family = FAMILIES[family]
    microbatch = jax.eval_shape(lambda: family.batches(1, 2)[0])
    layers = as_layers(family.layers)
    plain, cast = (
        trace_layers(layers, Loss.of(cross_entropy, False), microbatch, compute_dtype=dtype)
        for dtype in (None, jnp.bfloat16)
    )
    assert plain.kind_of_layer == cast.kind_of_layer
    for a, b in zip(plain.layer_kinds, cast.layer_kinds, strict=True):
        shapes = [sorted(leaf.shape for leaf in kind.stash) for kind in (a, b)]
        assert shapes[0] == shapes[1]
        assert num_bytes(b.stash) <= num_bytes(a.stash)
    for a, b in zip(plain.outputs[:-1], cast.outputs[:-1], strict=True):
        assert num_bytes(b) == num_bytes(a) / 2


def num_bytes(avals):
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in avals)


@functools.cache
def in_bfloat16(family):
    """Losses and weights of a plain loop that casts, and sums microbatches in float32."""
    family = FAMILIES[family]
    plain = oracles.PlainModel(family.layers, KEY)
    half = lambda tree: jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), tree)  # noqa: E731

    def model(params, inputs):
        if inputs.dtype == np.float32:
            inputs = half(inputs)
        return plain(half(params), inputs).astype(jnp.float32)

    return plain, model


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["mlp", slow("transformer")])
def test_equals_a_plain_loop_that_casts(family):
    plain, model = in_bfloat16(family)
    batches = FAMILIES[family].batches(3, 8)
    pipe = jpipe.Pipeline(
        FAMILIES[family].layers,
        loss=cross_entropy,
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.one_f_one_b(2, 4),
        compute_dtype=jnp.bfloat16,
    )
    losses, _, params = oracles.train(model, plain.params, cross_entropy, optax.sgd(0.1), batches)
    state = pipe.init(KEY, batches[0], params=plain.params)
    for batch, loss in zip(batches, losses):
        state, metrics = pipe.step(state, batch)
        # The plain program sums a minibatch in bfloat16 where this one sums microbatches, so a few roundings apart.
        np.testing.assert_allclose(metrics["loss"], loss, rtol=2.0**-7)
    moved = jax.tree.map(lambda a, b: np.asarray(a) - b, params, plain.params)
    got = jax.tree.map(lambda a, b: a - b, pipe.get_params(state), plain.params)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(moved), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2.0**-5 * np.abs(b).max() + 1e-7)
