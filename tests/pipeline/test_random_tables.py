"""Legal tables drawn at random train the plain model: ties over stages, clipping and masked losses included."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import with_nan_buffers
from random_tables import random_table

import jpipe

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


def plain(weights, batch):
    """The loss of the tied model: the first and the last layer share their kernel."""
    x = batch["inputs"]
    for w in weights:
        kernel = w.get("kernel", weights[0]["kernel"])
        x = jnp.tanh(x @ kernel + w["bias"][None])
    total, weight = loss(x, batch)
    return total / weight


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.sampled(8)
def test_a_random_table_trains_the_plain_model(seed):
    table = random_table(seed)
    S, N = table.num_stages, table.num_microbatches
    rng = np.random.default_rng(seed)
    batches = [
        {
            "inputs": rng.normal(size=(2 * N, DIM)),
            "targets": rng.normal(size=(2 * N, DIM)),
            "mask": rng.integers(0, 3, 2 * N) + 0.5,
        }
        for _ in range(3)
    ]
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
