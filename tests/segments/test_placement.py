"""Stages that a solver of device placement chooses for whole models, against plain JAX and brute force."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import schedule_named
from flax import linen as nn
from flax import nnx

import jpipe
from jpipe.plan import placement
from jpipe.segments.placement import Placement

KEY = jax.random.key(3)
ROWS, N = 8, 4
RATE = 1e9
"""Operations per second of the devices of the tests."""


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """Seconds follow from operations, so that stages are the same in each run."""

    def costs_of(settings, traced, microbatch):
        seconds = tuple(flops / RATE for flops in (*traced.flops, 0.0))
        memory = (1.0,) * len(traced.layers)
        return placement.Costs(tuple(s / 3 for s in seconds), tuple(2 * s / 3 for s in seconds), memory)

    monkeypatch.setattr(placement, "costs_of", costs_of)
    monkeypatch.setattr(placement, "bandwidth_of", lambda settings: 1e12)


class Towers(nnx.Module):
    """Two inputs, each with a tower of its own."""

    def __init__(self, *, rngs):
        self.left = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(3)])
        self.right = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(3)])
        self.head = nnx.Linear(12, 5, rngs=rngs)

    def __call__(self, inputs, other):
        x, y = inputs, other
        for layer in self.left:
            x = x + nnx.gelu(layer(x))
        for layer in self.right:
            y = nnx.tanh(layer(y))
        return self.head(jnp.concatenate([x, y], -1))


class Mixed(nnx.Module):
    """Blocks with branches, whose convolutions have batch norms, and dropout."""

    def __init__(self, rate=0.0, *, rngs):
        conv, self.norms = lambda size: nnx.Conv(4, 4, (size, size), use_bias=False, rngs=rngs), nnx.List([])
        self.blocks = nnx.List([nnx.List([nnx.List([conv(1)]), nnx.List([conv(1), conv(3)])]) for _ in range(2)])
        self.norms = nnx.List([nnx.BatchNorm(4, rngs=rngs) for _ in range(6)])
        self.last = nnx.List([nnx.Conv(8, 4, (1, 1), rngs=rngs) for _ in range(2)])
        self.dropout, self.head = nnx.Dropout(rate, rngs=rngs), nnx.Linear(4, 5, rngs=rngs)

    def __call__(self, x):
        norms = iter(self.norms)
        for paths, last in zip(self.blocks, self.last):
            results = []
            for path in paths:
                y = x
                for conv in path:
                    y = self.dropout(nnx.relu(next(norms)(conv(y))))
                results.append(y)
            x = last(jnp.concatenate(results, -1))
        return self.head(x.mean((1, 2)))


class Translation(nn.Module):
    """Every layer of the decoder reads the outputs of the encoder."""

    @nn.compact
    def __call__(self, inputs, targets):
        x, y = nn.Embed(16, 8)(inputs), nn.Embed(16, 8)(targets)
        for _ in range(2):
            x = x + nn.Dense(8)(nn.silu(nn.Dense(16)(nn.LayerNorm()(x))))
        for _ in range(2):
            y = y + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(y))
            y = y + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(y), x)
        return nn.Dense(5)(y)


class UNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        skips = []
        for _ in range(2):
            x = x + nn.Dense(8)(nn.silu(nn.Dense(16)(x)))
            skips.append(x)
            x = nn.Dense(8)(x)
        for _ in range(2):
            x = nn.Dense(8)(jnp.concatenate([x, skips.pop()], -1))
            x = x + nn.Dense(8)(nn.silu(nn.Dense(16)(x)))
        return nn.Dense(5)(x)


def numbers(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


TOKENS = np.random.default_rng(0).integers(0, 16, (ROWS, 6))
CASES = {
    "towers": (Towers, {"inputs": numbers(ROWS, 6), "other": numbers(ROWS, 6)[::-1]}),
    "branches": (Mixed, {"inputs": numbers(ROWS, 4, 4, 4)}),
    "translation": (Translation, {"inputs": TOKENS, "targets": TOKENS[::-1]}),
    "U-Net": (UNet, {"inputs": numbers(ROWS, 8)}),
}


def loss(outputs, batch):
    return jnp.mean((outputs - 1) ** 2)


def pipeline(model, num_stages, *, schedule="one_f_one_b", boundaries="placement", **options):
    options = {"loss": loss, "optimizer": optax.sgd(0.01, momentum=0.9), **options}
    schedule = schedule_named(schedule, num_stages, N)
    return jpipe.Pipeline(model, schedule=schedule, boundaries=boundaries, **options)


def plain(model, params, state):
    """`(params, batch) -> outputs` of a model in training."""
    if isinstance(model, nn.Module):
        return lambda p, batch: model.apply({"params": p}, *batch.values())
    graph, _, rest = nnx.split(model, nnx.Param, ...)

    def outputs(p, batch):
        return nnx.merge(graph, nnx.State(p), jax.tree.map(jnp.asarray, rest))(*batch.values())

    return outputs


def check_training(pipe, model, batch):
    """Two steps and an evaluation against plain JAX, where a microbatch is normalised by itself."""
    state = pipe.init(KEY, batch)
    params = pipe.get_params(state)
    outputs = plain(model, params, None)
    rows = ROWS // N

    @jax.jit
    @jax.value_and_grad
    def step(p):
        parts = [{name: a[i : i + rows] for name, a in batch.items()} for i in range(0, ROWS, rows)]
        return sum(loss(outputs(p, part), part) for part in parts) / N

    optimizer = optax.sgd(0.01, momentum=0.9)
    moments = optimizer.init(params)
    for _ in range(2):
        want, gradients = step(params)
        updates, moments = optimizer.update(gradients, moments, params)
        params = optax.apply_updates(params, updates)
        state, metrics = pipe.step(state, batch)
        np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), pipe.get_params(state), params)
    return state


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_the_plain_model(name, num_stages):
    make, batch = CASES[name]
    model = make() if issubclass(make, nn.Module) else make(rngs=nnx.Rngs(0))
    pipe = pipeline(model, num_stages)
    state = check_training(pipe, model, batch)
    assert len(pipe.partition(batch)) == num_stages
    few = jax.tree.map(lambda a: a[:3], batch)
    params = pipe.get_params(state)
    if name == "branches":
        nnx.update(model, params)
        nnx.update(model, pipe.get_mutable_state(state))
        model.eval()
        want = model(few["inputs"])
    else:
        want = plain(model, params, None)(params, few)
    np.testing.assert_allclose(pipe.predict(state, few), want, atol=2e-5)
    np.testing.assert_allclose(pipe.evaluate(state, few)["loss"], loss(want, few), rtol=1e-4)
    half = jax.tree.map(lambda a: a[: ROWS // 2], batch)  # another shape is cut at the same places
    names = [record.names for record in pipe.partition(batch)]
    assert [record.names for record in pipe.partition(half)] == names
    _, metrics = pipe.step(state, half)
    assert np.isfinite(metrics["loss"])


def orders(graph, rng, num_groups):
    """Random groups of the steps of a model, none before what it needs."""
    group = {}
    for item in graph.steps:
        lowest = max((group[m] for m in graph.needs[item]), default=0)
        group[item] = rng.randint(lowest, num_groups - 1)
    ranks = {g: n for n, g in enumerate(sorted(set(group.values())))}
    of_step = {n: ranks[group[item]] for item, ns in graph.steps.items() for n in ns}
    return tuple(of_step[n] for n in range(len(of_step)))


@pytest.mark.parametrize("name", CASES)
def test_every_order_of_the_products_trains_as_one_stage_does(name, monkeypatch):
    """Dropout, running statistics and printed values included."""
    make, batch = CASES[name]
    rng = random.Random(1)

    def model():
        if make is Mixed:
            return Mixed(0.5, rngs=nnx.Rngs(0))
        return make() if issubclass(make, nn.Module) else make(rngs=nnx.Rngs(0))

    def trained(pipe):
        state = pipe.init(KEY, batch)
        for _ in range(2):
            state, metrics = pipe.step(state, batch)
        found = metrics["loss"], pipe.get_params(state), pipe.get_mutable_state(state), pipe.evaluate(state, batch)
        return jax.tree.map(np.asarray, found)

    def place(settings, microbatch, key_impl, memory_limit):
        while True:
            groups = orders(settings.steps(microbatch, key_impl), rng, 3)
            if max(groups) == 2:
                return Placement(groups)

    want = trained(pipeline(model(), 1))
    monkeypatch.setattr(placement, "placement_of", place)
    for _ in range(2):
        got = trained(pipeline(model(), 3))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), got, want)
