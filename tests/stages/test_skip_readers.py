"""A tensor that several layers pop equals, in losses and weights, a value that plain code reads several times."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from helpers import assert_close, with_nan_buffers
from skipping import DIM, dense, factory, loss_fn

import jpipe

N, ROWS, LENGTH, SOURCE = 4, 2, 3, 5
MEMORY_BYTES, NEAR_BYTES = 8 * ROWS * SOURCE * DIM + 4 * ROWS * SOURCE, 8 * ROWS * LENGTH * DIM


def attend(queries, memory):
    scores = jnp.einsum("btd,bsd->bts", queries, memory["keys"])
    scores = jnp.where(memory["mask"][:, None] == 1, scores, -9.0)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), memory["keys"])


def linear(p, x):
    return x @ p["kernel"] + jnp.broadcast_to(p["bias"], x.shape)


class Cross(nnx.Module):
    def __init__(self, *, rngs):
        self.query = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x, memory):
        attended = attend(self.query(x), memory)
        memory.clear()  # The next reader must not see it.
        return x + attended


class LinenCross(linen.Module):
    @linen.compact
    def __call__(self, x, memory):
        x = x + attend(linen.Dense(DIM, name="query", param_dtype="float64")(x), memory)
        return x, x**2


def encode(p, inputs):
    keys = jnp.tanh(inputs["source"] @ p["kernel"])
    return inputs["target"], {"keys": keys, "mask": (keys.sum(-1) > 0).astype(jnp.int32)}


def weighted(p, x, near, memory):
    return x * (1 + near) + attend(x @ p["kernel"], memory)


def init(key, *_):
    return {"kernel": jax.random.normal(key, (DIM, DIM))}


class Entry(NamedTuple):
    """A layer of the pipeline, and the same as a plain function of its weights."""

    layer: Any
    plain: Callable
    stash: tuple[str, ...] = ()
    pop: tuple[str, ...] = ()


cross = Entry(factory(Cross), lambda p, x, m: x + attend(linear(p["query"], x), m), pop=("memory",))
# Layers 2, 3, 4, 6 and 7 read what layer 0 stashes; 6 and 7 what 4 stashes.
MODEL = [
    Entry(jpipe.InitApply(init, encode), encode, ("memory",)),
    Entry(dense, linear),
    cross,
    cross,
    Entry(LinenCross(), lambda p, x, m: ((y := x + attend(linear(p["query"], x), m)), y**2), ("near",), ("memory",)),
    Entry(dense, linear),
    Entry(jpipe.InitApply(init, weighted), weighted, pop=("near", "memory")),
    Entry(
        lambda x, memory, near: attend(x, memory) + near,
        lambda p, x, m, near: attend(x, m) + near,
        pop=("memory", "near"),
    ),
]


def plain(model, params, x):
    values = {}
    for entry, p in zip(model, params, strict=True):
        outputs = entry.plain(p, x, *(values[name] for name in entry.pop))
        x, *stashed = outputs if entry.stash else (outputs,)
        values |= dict(zip(entry.stash, stashed, strict=True))
    return x


def pipeline(model, **options):
    layers = [jpipe.skip(e.layer, stash=e.stash, pop=e.pop) if e.stash or e.pop else e.layer for e in model]
    return jpipe.Pipeline(layers, loss=loss_fn, optimizer=optax.sgd(0.05, momentum=0.5), **options)


def batches(number):
    rng = np.random.default_rng(1)
    for _ in range(number):
        source, target, wanted = (rng.normal(size=(ROWS * N, n, DIM)) for n in (SOURCE, LENGTH, LENGTH))
        yield {"inputs": {"source": source, "target": target}, "targets": wanted}


CASES = {
    # Each stage reads it, and one of them in two layers.
    "1F1B": (jpipe.schedules.one_f_one_b(4, N), [2, 4, 6], "none", 0),
    # Stage 1 does not read it.
    "zero bubble": (jpipe.schedules.zero_bubble_h1(4, N), [1, 2, 5], "full", 0),
    # Every gradient is that of the weights before the newest.
    "PipeDream-2BW": (jpipe.schedules.pipedream_2bw(4, N), [2, 4, 6], "none", 1),
}


@pytest.mark.first_case
@pytest.mark.parametrize("name", ["1F1B", "zero bubble", pytest.param("PipeDream-2BW", marks=pytest.mark.exhaustive)])
def test_several_readers_equal_the_plain_model(name):
    schedule, boundaries, recompute, delay = CASES[name]
    with jax.enable_x64(True):
        pipe = pipeline(MODEL, schedule=schedule, boundaries=boundaries, recompute=recompute)
        steps = list(batches(3))
        state = with_nan_buffers(pipe.init(jax.random.key(0), steps[0]))
        versions = [pipe.get_params(state)]
        inner = pipe.optimizer.init(versions[0])

        @jax.jit
        def gradient(params, batch):
            return jax.value_and_grad(lambda p: loss_fn(plain(MODEL, p, batch["inputs"]), batch))(params)

        got, want = [], []
        for i, batch in enumerate(steps):
            value, grads = gradient(versions[max(i - delay, 0)], batch)
            updates, inner = pipe.optimizer.update(grads, inner, versions[-1])
            versions.append(optax.apply_updates(versions[-1], updates))
            want.append(float(value))
            state, metrics = pipe.step(state, batch)
            got.append(metrics)
        if delay:
            state, metrics = pipe.flush(state)
            got.append(metrics)
        total = sum(float(m["loss"]) * int(m.get("num_microbatches", N)) for m in got if np.isfinite(m["loss"]))
        np.testing.assert_allclose(total / N, sum(want), rtol=1e-9)
        assert_close(pipe.get_params(state), jax.tree.map(np.asarray, versions[-1]), "float64")
        outputs = np.asarray(plain(MODEL, versions[-1], steps[0]["inputs"]))
        assert_close(pipe.predict(state, steps[0]), outputs, "float64")


@pytest.mark.parametrize(
    "boundaries,ways",
    [
        ([2, 4, 6], {(0, 1): MEMORY_BYTES, (1, 2): MEMORY_BYTES, (2, 3): MEMORY_BYTES + NEAR_BYTES}),
        ([1, 2, 5], {(0, 2): MEMORY_BYTES, (2, 3): MEMORY_BYTES + NEAR_BYTES}),
    ],
)
def test_each_stage_that_reads_a_tensor_receives_it_once(boundaries, ways):
    with jax.enable_x64(True):
        pipe = pipeline(MODEL, schedule=jpipe.schedules.one_f_one_b(4, N), boundaries=boundaries)
        records = [r for r in pipe.messages(next(batches(1))) if r.what.startswith("skip")]
    forward = [r for r in records if not r.what.endswith("gradient")]
    assert {(r.source, r.target): r.num_bytes for r in forward} == ways and len(forward) == len(ways)
    masks = 4 * ROWS * SOURCE  # integers have no gradient
    assert {(r.target, r.source): r.num_bytes + masks for r in records if r not in forward} == ways


class Pair(nnx.Module):
    def __init__(self, *, rngs):
        pass

    def __call__(self, x, a, b):
        return x + a - b


def test_equal_readers_are_one_program_and_others_are_not():
    """Of the two tensors that they pop, layers 1 and 2 pass on both, layer 3 the first, and layer 4 the second."""
    both = functools.partial(Entry, Pair, lambda p, x, a, b: x + a - b)
    model = [
        Entry(lambda x: (x, 2 * x, x**2, x**3), lambda p, x: (x, 2 * x, x**2, x**3), ("a", "b", "c")),
        both(pop=("a", "b")),
        both(pop=("a", "b")),
        both(pop=("a", "b")),
        both(pop=("a", "c")),
        Entry(lambda x, c: x * c, lambda p, x, c: x * c, pop=("c",)),
        Entry(dense, linear),
    ]
    with jax.enable_x64(True):
        pipe = pipeline(model, schedule=jpipe.schedules.gpipe(2, 2))
        batch = {k: np.random.default_rng(0).normal(size=(4, DIM)) for k in ("inputs", "targets")}
        kinds = pipe._program(batch).traced.kind_of_layer
        assert kinds[1] == kinds[2] and len({kinds[1], kinds[3], kinds[4]}) == 3
        state = pipe.init(jax.random.key(0), batch)
        want = np.asarray(plain(model, pipe.get_params(state), batch["inputs"]))
        assert_close(pipe.predict(state, batch), want, "float64")


def test_names_that_look_like_those_of_the_library_stay_apart():
    def stashes(p, x):
        return x, x, 3 * x

    def read(x, a):
        return x + a

    model = [
        Entry(functools.partial(stashes, None), stashes, ("a", "a (from layer 1)")),
        Entry(read, lambda p, x, a: x + a, pop=("a",)),
        Entry(read, lambda p, x, a: x + a, pop=("a",)),
        Entry(read, lambda p, x, a: x + a, pop=("a (from layer 1)",)),
        Entry(dense, linear),
    ]
    with jax.enable_x64(True):
        pipe = pipeline(model, schedule=jpipe.schedules.gpipe(1, 2))
        batch = {k: np.random.default_rng(0).normal(size=(4, DIM)) for k in ("inputs", "targets")}
        state = pipe.init(jax.random.key(0), batch)
        want = np.asarray(plain(model, pipe.get_params(state), batch["inputs"]))
        assert_close(pipe.predict(state, batch), want, "float64")
