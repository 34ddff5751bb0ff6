"""Legal tables drawn at random train the plain model, or what the table says: with ties, clipping and masked losses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import with_nan_buffers
from random_tables import random_asynchronous_table, random_table

import jpipe
from jpipe.reference import Reference

DIM = 3


class Layer(nnx.Module):
    def __init__(self, *, rngs):
        self.kernel = nnx.Param(rngs.params.normal((DIM, DIM), jnp.float64))
        self.bias = nnx.Param(jnp.zeros(DIM, jnp.float64))

    def __call__(self, x):
        return jnp.tanh(x @ self.kernel + self.bias[None])


def updates_apart(seed):
    table = random_table(seed)
    return table.num_stages > 1 and np.unique(table.update_ticks()).size > 1


SEEDS = list(filter(updates_apart, range(40)))[:16]


def loss(outputs, batch):
    losses = jnp.square(outputs - batch["targets"]).mean(axis=-1)
    return (losses * batch["mask"]).sum(), batch["mask"].sum()


def batches_of(rng, count, N):
    return [
        {
            "inputs": rng.normal(size=(2 * N, DIM)),
            "targets": rng.normal(size=(2 * N, DIM)),
            "mask": rng.integers(0, 3, 2 * N) + 0.5,
        }
        for _ in range(count)
    ]


def plain(weights, batch):
    """The loss of the tied model: the first and the last layer share their kernel."""
    x = batch["inputs"]
    for w in weights:
        kernel = w.get("kernel", weights[0]["kernel"])
        x = jnp.tanh(x @ kernel + w["bias"][None])
    total, weight = loss(x, batch)
    return total / weight


@pytest.mark.first_case
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.sampled(8)
def test_a_random_table_trains_the_plain_model(seed):
    table = random_table(seed)
    S, N = table.num_stages, table.num_microbatches
    batches = batches_of(np.random.default_rng(seed), 3, N)
    clip, rest = 0.05, optax.sgd(0.5, momentum=0.5)
    with jax.enable_x64(True):
        pipe = jpipe.Pipeline(
            [Layer] * S,
            loss=loss,
            optimizer=optax.chain(jpipe.optim.clip_by_global_norm(clip), rest),
            schedule=table,
            ties=[[(0, "kernel"), (S - 1, "kernel")]],
        )
        state = pipe.init(jax.random.key(seed), batches[0])
        weights = pipe.get_params(state)
        del weights[-1]["kernel"]
        state = with_nan_buffers(state, all_but="squared_norm")
        optimizer = optax.chain(optax.clip_by_global_norm(clip), rest)
        plain_state = optimizer.init(weights)
        for batch in batches:
            state, metrics = pipe.step(state, batch)
            value, gradient = jax.value_and_grad(plain)(weights, batch)
            updates, plain_state = optimizer.update(gradient, plain_state)
            weights = optax.apply_updates(weights, updates)
            np.testing.assert_allclose(metrics["loss"], value, rtol=1e-9)
            norm = optax.tree.norm(gradient)
            np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-9)
        got = pipe.get_params(state)
        for a, b in zip(got, weights, strict=True):
            kernel = b.get("kernel", weights[0]["kernel"])
            np.testing.assert_allclose(a["kernel"], kernel, rtol=1e-9)
            np.testing.assert_allclose(a["bias"], b["bias"], rtol=1e-9)


ASYNCHRONOUS = [s for s in range(40) if random_asynchronous_table(s).num_stages > 1]


@pytest.mark.first_case
@pytest.mark.parametrize("seed", ASYNCHRONOUS[:16])
@pytest.mark.sampled(8)
def test_a_random_asynchronous_table_does_what_it_says(seed):
    """Walked in Python, with everything kept for ever, it gives the same weights."""
    table = random_asynchronous_table(seed)
    S, N = table.num_stages, table.num_microbatches
    rng = np.random.default_rng(seed)
    rounds = 3 + int(table.weight_grad_ticks().max()) // table.num_ticks
    batches = batches_of(rng, rounds, N)
    with jax.enable_x64(True):
        arguments = dict(loss=loss, optimizer=optax.sgd(0.1, momentum=0.5))
        pipe = jpipe.Pipeline([Layer] * S, schedule=table, **arguments)
        state = pipe.init(jax.random.key(seed), batches[0])
        reference = Reference([Layer] * S, schedule=table, params=pipe.get_params(state), **arguments)
        state = with_nan_buffers(state, all_but="squared_norm")
        for batch in batches:
            state, metrics = pipe.step(state, batch)
            value = reference.step(batch)
            wanted = np.nan if value is None else value
            np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-9)
            assert not np.asarray(metrics["skipped_updates"]).any()
        assert max(version for _, version in reference.weights) > 0
        got, want = pipe.get_params(state), reference.get_params()
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), got, want)
