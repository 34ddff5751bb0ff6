"""Attention that other people wrote stashes no positions x positions, and its gradients are the plain model's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jpipe
from jpipe.layers.backward import trace_layer
from jpipe.layers.residuals import AT_HAND, STASHED, Rerun
from jpipe.lowering.target import TARGETS

ROWS, T, D, HEADS, N = 2, 48, 32, 2, 4


class Llama(nnx.Module):
    """Grouped queries, rotary positions and a causal mask, by hand."""

    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(D, rngs=rngs)
        self.query = nnx.Linear(D, 2 * D, use_bias=False, rngs=rngs)
        self.key = nnx.Linear(D, D, use_bias=False, rngs=rngs)
        self.value = nnx.Linear(D, D, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(2 * D, D, use_bias=False, rngs=rngs)

    def __call__(self, x):
        def turned(a):
            angle = jnp.outer(jnp.arange(T), 100 ** -jnp.linspace(0, 1, a.shape[-1] // 2))
            sin, cos = jnp.sin(angle)[None, :, None], jnp.cos(angle)[None, :, None]
            left, right = jnp.split(a, 2, -1)
            return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

        y = self.norm(x)
        query = turned(self.query(y).reshape(*x.shape[:2], 2 * HEADS, -1))
        key = jnp.repeat(turned(self.key(y).reshape(*x.shape[:2], HEADS, -1)), 2, 2)
        value = jnp.repeat(self.value(y).reshape(*x.shape[:2], HEADS, -1), 2, 2)
        scores = jnp.einsum("bthd,bmhd->bhtm", query, key) / (D // HEADS) ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((1, 1, T, T), bool)), scores, -1e9)
        mixed = jnp.einsum("bhtm,bmhd->bthd", jax.nn.softmax(scores, -1), value)
        return x + self.out(mixed.reshape(*x.shape[:2], -1))


class Functional(nnx.Module):
    """`jax.nn.dot_product_attention`."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(D, 3 * D, rngs=rngs)

    def __call__(self, x):
        query, key, value = (a.reshape(*x.shape[:2], HEADS, -1) for a in jnp.split(self.inner(x), 3, -1))
        return x + jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(x.shape)


class OfNnx(nnx.Module):
    """`nnx.MultiHeadAttention`."""

    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(HEADS, D, decode=False, rngs=rngs)

    def __call__(self, x):
        return x + self.attention(x, mask=nnx.make_causal_mask(x[..., 0]))


class OfLinen(linen.Module):
    """`linen.MultiHeadDotProductAttention`."""

    @linen.compact
    def __call__(self, x):
        return x + linen.MultiHeadDotProductAttention(HEADS)(x, mask=linen.make_causal_mask(x[..., 0]))


NNX = {"llama": Llama, "functional": Functional, "nnx": OfNnx}


def layer_of(name, seed):
    """A layer, and its call `(parameters, x)` with its parameters."""
    if name == "linen":
        module = OfLinen()
        return module, module.init(jax.random.key(seed), jnp.zeros((1, T, D)))["params"]
    module = NNX[name](nnx.Rngs(seed))
    return module, nnx.state(module, nnx.Param)


def call_of(module):
    if isinstance(module, linen.Module):
        return lambda parameters, x: module.apply({"params": parameters}, x)
    graph, _, rest = nnx.split(module, nnx.Param, ...)
    return lambda parameters, x: nnx.merge(graph, parameters, rest)(x)


@pytest.mark.parametrize("weight_accesses", [STASHED, AT_HAND])
@pytest.mark.parametrize("platform", TARGETS)
@pytest.mark.parametrize("name", [*NNX, "linen"])
def test_no_scores_are_stashed(name, platform, weight_accesses):
    module, parameters = layer_of(name, 0)
    call = call_of(module)
    shapes = jax.eval_shape(lambda p: jax.tree.map(jnp.asarray, p), parameters)
    x = jax.ShapeDtypeStruct((ROWS, T, D), "f4")
    rerun = Rerun(weight_accesses, TARGETS[platform].flops_per_byte)
    stashes = [
        trace_layer(lambda p, x, _: call(p, x), shapes, x, rerun=r).stash for r in (Rerun(weight_accesses), rerun)
    ]
    before, after = ([a for a in stash if a.shape.count(T) > 1] for stash in stashes)
    assert before and not after


def plain_step(calls, parameters, batch):
    """The loss and the parameters after a step of gradient descent, as plain JAX computes them."""

    def loss(parameters):
        x = batch["inputs"]
        for call, p in zip(calls, parameters, strict=True):
            x = call(p, x)
        return jnp.mean((x - batch["targets"]) ** 2)

    value, gradients = jax.jit(jax.value_and_grad(loss))(parameters)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients)


SCHEDULES = {
    "1f1b": functools.partial(jpipe.schedules.one_f_one_b, 2, N),
    "zero-bubble": functools.partial(jpipe.schedules.zero_bubble_h1, 2, N),
}


@pytest.mark.first_case
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", [*NNX, "linen"])
def test_the_step_is_that_of_the_plain_model(name, schedule):
    rng = np.random.default_rng(0)
    batch = {key: rng.normal(size=(ROWS * N, T, D)).astype("f4") for key in ("inputs", "targets")}
    layers = [layer_of(name, seed)[0] for seed in range(2)]
    pipe = jpipe.Pipeline(
        layers,
        loss=lambda outputs, batch: jnp.mean((outputs - batch["targets"]) ** 2),
        optimizer=optax.sgd(0.1),
        schedule=SCHEDULES[schedule](),
    )
    state = pipe.init(jax.random.key(0), batch)
    loss, expected = plain_step([call_of(layer) for layer in layers], pipe.get_params(state), batch)
    state, metrics = pipe.step(state, batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    for got, want in zip(jax.tree.leaves(pipe.get_params(state)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
