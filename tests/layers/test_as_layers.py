"""Linen modules, `(init, apply)` pairs and NNX modules train alike, and each computes what its own library computes."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_close

import jpipe
from jpipe.layers.as_layers import as_layers

KEY = jax.random.key(1)


class Norm(nn.Module):
    """Dense, batch norm, dropout; knows whether it trains."""

    width: int

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dense(self.width, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.8)(x)
        return nn.Dropout(0.25, deterministic=not train)(jnp.tanh(x))


def init(key, x):
    return {"w": jax.random.normal(key, (x.shape[-1], 3))}


def pairs():
    return jpipe.InitApply(init, lambda p, x: x @ p["w"], name="pair")


LINEN = jpipe.Linen(Norm(5), train={"train": True}, evaluate={"train": False})
LAYERS = [
    nn.Dense(4, use_bias=False),
    LINEN,
    LINEN,
    pairs(),
    functools.partial(nnx.Linear, 3, 2),
]


def loss_fn(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def batch_of(size):
    rng = np.random.default_rng(0)
    return {
        "inputs": rng.normal(size=(size, 6)).astype(np.float32),
        "targets": rng.normal(size=(size, 2)).astype(np.float32),
    }


def pipeline(S, N, layers=LAYERS, **options):
    schedule = jpipe.schedules.one_f_one_b(S, N)
    options = {"optimizer": optax.sgd(0.1, momentum=0.9), **options}
    return jpipe.Pipeline(layers, loss=loss_fn, schedule=schedule, **options)


def plain(params, state, x, microbatch, train):
    """The same layers, called by their own libraries."""
    x, statistics = nn.Dense(4, use_bias=False).apply({"params": params[0]}, x), []
    for i in (1, 2):
        key = jax.random.fold_in(KEY, len(LAYERS))
        for number in (i, microbatch, 0, 0):
            key = jax.random.fold_in(key, number)
        variables = {"params": params[i], **state[i]}
        if not train:
            x = Norm(5).apply(variables, x, train=False)
            continue
        x, new = Norm(5).apply(
            variables, x, train=True, mutable=["batch_stats"], rngs={"dropout": key}
        )
        statistics.append(new)
    x = x @ params[3]["w"]
    return x @ params[4]["kernel"] + params[4]["bias"][None], statistics


@pytest.mark.parametrize("S,N", [(1, 1), (3, 1)])
def test_linen_and_pairs_equal_their_libraries(S, N):
    """One microbatch: then running statistics are Flax's own."""
    pipe, batch = pipeline(S, N), batch_of(8)
    state = pipe.init(KEY, batch)
    params, running = pipe.get_params(state), pipe.get_mutable_state(state)
    optimizer = optax.sgd(0.1, momentum=0.9)
    inner = optimizer.init(params)

    @jax.jit
    def gradient(params, running, microbatch):
        def of(params):
            y, statistics = plain(params, running, batch["inputs"], microbatch, True)
            return loss_fn(y, batch), statistics

        return jax.value_and_grad(of, has_aux=True)(params)

    for step in range(3):
        (value, statistics), grads = gradient(params, running, step)
        updates, inner = optimizer.update(grads, inner, params)
        params = optax.apply_updates(params, updates)
        running = [{}, *statistics, {}, {}]
        state, metrics = pipe.step(state, batch)
        assert_close(metrics["loss"], np.asarray(value), "float32")
    want = jax.tree.map(np.asarray, (params, running))
    assert_close(
        (pipe.get_params(state), pipe.get_mutable_state(state)), want, "float32"
    )
    y, _ = plain(params, running, batch["inputs"], 0, False)
    assert_close(pipe.predict(state, batch), np.asarray(y), "float32")


def test_the_same_numbers_at_any_number_of_stages():
    """Weights, masks and statistics depend on the key, the layer and the microbatch alone."""
    results, batch = [], batch_of(12)
    for S, options in ((1, {}), (2, {"recompute": "full"}), (5, {})):
        pipe = pipeline(S, 3, **options)
        state = pipe.init(KEY, batch)
        for _ in range(2):
            state, metrics = pipe.step(state, batch)
        results.append((pipe.get_params(state), pipe.get_mutable_state(state)))
    for other in results[1:]:
        assert_close(other, results[0], "float32")


def test_state_can_be_given_and_adopted():
    pipe, batch = pipeline(2, 3), batch_of(12)
    state, _ = pipe.step(pipe.init(KEY, batch), batch)
    params, running = pipe.get_params(state), pipe.get_mutable_state(state)
    again = pipe.init(KEY, batch, params=params, mutable_state=running)
    jax.tree.map(np.testing.assert_array_equal, pipe.get_params(again), params)
    jax.tree.map(np.testing.assert_array_equal, pipe.get_mutable_state(again), running)
    # An adopted state goes on as the old one would: the same keys, the same statistics.
    other = pipeline(5, 3)
    adopted, _ = other.step(other.adopt(state), batch)
    state, _ = pipe.step(state, batch)
    assert_close(other.get_params(adopted), pipe.get_params(state), "float32")
    assert_close(
        other.get_mutable_state(adopted), pipe.get_mutable_state(state), "float32"
    )


def test_statistics_that_are_not_finite_move_nothing():
    pipe, batch = pipeline(2, 2), batch_of(8)
    state = pipe.init(KEY, batch)
    before = pipe.get_params(state), pipe.get_mutable_state(state)
    bad = {**batch, "inputs": batch["inputs"].copy()}
    bad["inputs"][0, 0] = np.inf
    state, metrics = pipe.step(state, bad)
    assert metrics["skipped_updates"].tolist() == [1, 1]
    after = pipe.get_params(state), pipe.get_mutable_state(state)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    state, metrics = pipe.step(state, batch)  # and what was bad is forgotten
    assert metrics["skipped_updates"].tolist() == [0, 0]
    assert all(
        np.isfinite(a).all() for a in jax.tree.leaves(pipe.get_mutable_state(state))
    )


class Counter(nnx.Module):
    def __init__(self, *, rngs):
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        return x


class Power(nnx.Module):
    """State that training reads."""

    def __init__(self, *, rngs):
        self.kernel = nnx.Param(jnp.ones((2, 2)))
        self.last = nnx.BatchStat(jnp.ones(2))

    def __call__(self, x):
        self.last[...] = self.kernel @ self.last[...]
        return x * self.last[...][None]


def test_other_state_moves_to_the_mean_of_its_microbatches():
    pipe = pipeline(2, 2, [Power, Power])
    batch = {k: np.ones((4, 2), np.float32) for k in ("inputs", "targets")}
    state = pipe.init(KEY, batch)
    kernel = pipe.get_params(state)[0]["kernel"]
    state, _ = pipe.step(state, batch)
    np.testing.assert_allclose(
        pipe.get_mutable_state(state)[0]["last"], kernel @ np.ones(2)
    )


WRONG = {
    "integer state": (
        [Counter],
        {},
        r"layer 0 \(Counter\): mutable state \['count'\] has dtype int32, and only",
    ),
    "recomputed state": (
        [Power],
        {"recompute": "full"},
        r"layer 0 \(Power\) reads its mutable state in training",
    ),
    "Linen needs more": (
        [Norm(2)],
        {},
        r"layer 0 \(Norm\) cannot be initialised:.*(\n.*)*given as `jpipe.Linen",
    ),
    "pair fails": (
        [jpipe.InitApply(lambda key: {}, lambda p, x: x)],
        {},
        r"layer 0 \(InitApply\): `init\(key, inputs\)` failed",
    ),
    "integer parameters": (
        [jpipe.InitApply(lambda key, x: {"n": jnp.arange(2)}, lambda p, x: x)],
        {},
        r"layer 0 \(InitApply\): parameter \['n'\] has dtype int32, which has no gradient",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_layers(name):
    layers, options, message = WRONG[name]
    batch = {k: np.ones((4, 2), np.float32) for k in ("inputs", "targets")}
    with pytest.raises(ValueError, match=message):
        pipeline(1, 2, layers, **options).init(KEY, batch)


def test_wrong_adapters():
    with pytest.raises(
        ValueError, match="`apply` of `jpipe.InitApply` must be a function"
    ):
        jpipe.InitApply(init, 3)
    with pytest.raises(
        ValueError, match="`jpipe.Linen` takes a Flax Linen module, got"
    ):
        jpipe.Linen(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


def test_layers_that_differ_in_momentum_are_two_kinds():
    layers = [functools.partial(nnx.BatchNorm, 2, momentum=m) for m in (0.9, 0.5, 0.9)]
    assert len(as_layers(layers)) == 3
    pipe = pipeline(1, 1, layers)
    batch = {k: np.ones((4, 2), np.float32) for k in ("inputs", "targets")}
    program = pipe._program(batch)
    assert program.stages.kind_of_layer == [0, 1, 0]
