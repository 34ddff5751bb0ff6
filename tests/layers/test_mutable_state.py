"""Batch norm and dropout in a pipeline are a plain loop over the same microbatches, at any cut and on any replicas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import schedule_named, slow
from flax import nnx
from helpers import assert_close, with_nan_buffers

import jpipe

DIM, RATE, MOMENTUM, NUM_BLOCKS = 6, 0.25, 0.9, 4
KEY = jax.random.key(5)


class Block(nnx.Module):
    def __init__(self, momentum, *, rngs):
        # No bias: the norm takes it away, and rounding alone would move it.
        self.linear = nnx.Linear(DIM, DIM, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(DIM, momentum=momentum, rngs=rngs)
        self.dropout = nnx.Dropout(RATE, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.norm(self.linear(x))))


def block(dtype="float64", momentum=MOMENTUM, *, rngs):
    graph, state = nnx.split(Block(momentum, rngs=rngs))
    floats = lambda a: a.astype(dtype) if a.dtype == jnp.float32 else a  # noqa: E731
    return nnx.merge(graph, jax.tree.map(floats, state))


LAYERS = [block] * NUM_BLOCKS


def loss_fn(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def batches(count, size, dtype=np.float64):
    rng = np.random.default_rng(0)
    names = ("inputs", "targets")
    return [{k: rng.normal(size=(size, DIM)).astype(dtype) for k in names} for _ in range(count)]


# -- The oracle: formulas, no Flax, no pipeline


def plain_block(p, x, key):
    """The block's outputs and what its norm sees."""
    z = x @ p["linear"]["kernel"]
    mean, variance = z.mean(axis=0), z.var(axis=0)
    y = (z - mean[None]) / jnp.sqrt(variance + 1e-5)[None]
    y = jnp.tanh(y * p["norm"]["scale"][None] + p["norm"]["bias"][None])
    keep = jax.random.bernoulli(key, 1 - RATE, y.shape)
    return x + jnp.where(keep, y / (1 - RATE), 0), z


def plain_key(layer, microbatch, shard):
    """As the docstring of `Pipeline` has it; the block's stream is its first, and draws for the first time."""
    key = jax.random.fold_in(KEY, NUM_BLOCKS)
    for number in (layer, microbatch, shard, 0, 0):
        key = jax.random.fold_in(key, number)
    return key


@functools.partial(jax.jit, static_argnums=(2, 3))
def plain_gradient(params, batch, microbatch, shard):
    def of(params):
        x, seen = batch["inputs"], []
        for i, p in enumerate(params):
            x, z = plain_block(p, x, plain_key(i, microbatch, shard))
            seen.append(z)
        return loss_fn(x, batch), seen

    return jax.value_and_grad(of, has_aux=True)(params)


def plain_training(params, state, minibatches, N, R, optimizer):
    """A loop over microbatches and shards: losses, weights and running statistics."""
    params, inner, losses = list(params), optimizer.init(list(params)), []
    for k, batch in enumerate(minibatches):
        parts = jax.tree.map(lambda a: a.reshape(R, N, -1, *a.shape[1:]), batch)
        total, grads, seen = 0.0, None, []
        for m in range(N):
            for r in range(R):
                part = jax.tree.map(lambda a, m=m, r=r: a[r, m], parts)
                (value, zs), g = plain_gradient(params, part, k * N + m, r)
                total += float(value) / (N * R)
                g = jax.tree.map(lambda a: np.asarray(a) / (N * R), g)
                grads = g if grads is None else jax.tree.map(np.add, grads, g)
                seen.append([np.asarray(z) for z in zs])
        updates, inner = optimizer.update(grads, inner, params)
        params = optax.apply_updates(params, updates)
        for i, old in enumerate(state):
            z = np.concatenate([zs[i] for zs in seen])
            for name, value in (("mean", z.mean(axis=0)), ("var", z.var(axis=0))):
                moved = MOMENTUM * old["norm"][name] + (1 - MOMENTUM) * value
                old["norm"][name] = moved
        losses.append(total)
    return losses, jax.tree.map(np.asarray, params), state


CASES = [
    ("gpipe", 1, 2, "none", 1),
    ("gpipe", 2, 4, "full", 1),
    ("one_f_one_b/paired", 4, 3, "none", 1),
    slow("one_f_one_b/unit", 4, 4, "full", 2),
    ("one_f_one_b/unit", 2, 2, "none", 1),
    ("one_f_one_b/paired", 2, 3, "none", 2),
    ("two-columns", 4, 2, "none", 2),
    ("v", 4, 4, "full", 1),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule,S,N,recompute,R", CASES)
@pytest.mark.sampled(8)
def test_batch_norm_and_dropout(schedule, S, N, recompute, R):
    with jax.enable_x64(True):
        table = schedule_named(schedule, S, N)
        optimizer = optax.sgd(0.1, momentum=0.5)
        pipe = jpipe.Pipeline(
            LAYERS,
            loss=loss_fn,
            optimizer=optimizer,
            schedule=table,
            recompute=recompute,
            mesh=jpipe.make_mesh(stage=table.num_devices, data=R),
        )
        data = batches(3, 4 * N * R)
        state = pipe.init(KEY, data[0])
        params, running = pipe.get_params(state), pipe.get_mutable_state(state)
        losses, params, running = plain_training(params, running, data, N, R, optimizer)
        for batch, loss in zip(data, losses):
            state = with_nan_buffers(state, all_but="statistics")
            state, metrics = pipe.step(state, batch)
            assert_close(metrics["loss"], np.asarray(loss), "float64")
            assert int(metrics["num_microbatches"]) == N
        assert_close(pipe.get_params(state), params, "float64")
        assert_close(pipe.get_mutable_state(state), running, "float64")

        # Evaluation: no masks, running statistics, at any size.
        rows = {k: v[: 3 * N - 1] for k, v in data[0].items()}
        x = rows["inputs"]
        for p, s in zip(params, running):
            z = x @ p["linear"]["kernel"]
            y = (z - s["norm"]["mean"]) / np.sqrt(s["norm"]["var"] + 1e-5)
            x = x + np.tanh(y * p["norm"]["scale"] + p["norm"]["bias"])
        assert_close(pipe.predict(state, rows), x, "float64")
        want = np.mean((x - rows["targets"]) ** 2)
        assert_close(pipe.evaluate(state, rows)["loss"], want, "float64")


class Norms(nnx.Module):
    """A norm, and a running mean of its outputs in another dtype."""

    def __init__(self, *, rngs):
        self.norm = nnx.BatchNorm(DIM, momentum=MOMENTUM, rngs=rngs)
        self.outputs = nnx.BatchStat(jnp.zeros(DIM, jnp.float16))

    def __call__(self, x):
        y = jnp.nan_to_num(self.norm(x))
        seen = jnp.square(y).mean(axis=0).astype(jnp.float16)
        self.outputs[...] = MOMENTUM * self.outputs[...] + (1 - MOMENTUM) * seen
        return y


@pytest.mark.first_case
@pytest.mark.parametrize("schedule,S", [("gpipe", 1), ("one_f_one_b/unit", 2)])
def test_statistics_that_are_not_finite_stay_and_nothing_else_does(schedule, S):
    """Large values overflow the variance of the first norm, and no other state, not even beside it."""
    pipe = jpipe.Pipeline(
        [Norms, jnp.tanh, Norms, nnx.identity],
        loss=loss_fn,
        optimizer=optax.sgd(0.0),
        schedule=schedule_named(schedule, S, 2),
    )
    good, bad = batches(2, 8, np.float32)
    bad["inputs"][3] = 1e30
    state, _ = pipe.step(pipe.init(KEY, good), good)
    before = pipe.get_mutable_state(state)
    state, _ = pipe.step(state, bad)
    after = pipe.get_mutable_state(state)
    for name, old in before[0]["norm"].items():
        np.testing.assert_array_equal(after[0]["norm"][name], old)
    assert (after[0]["outputs"] != before[0]["outputs"]).any()
    moved = zip(jax.tree.leaves(before[2]), jax.tree.leaves(after[2]), strict=True)
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in moved)
    assert all(np.isfinite(np.asarray(a, np.float32)).all() for a in jax.tree.leaves(after))
