"""Tied weights are one weight: equal to the plain tied model, wherever its layers lie."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import cross_entropy, schedule_named
from flax import nnx
from helpers import assert_close, with_nan_buffers

import jpipe

VOCAB, DIM = 7, 4


class Embedding(nnx.Module):
    def __init__(self, *, rngs):
        self.token = nnx.Embed(VOCAB, DIM, param_dtype=jnp.float64, dtype=jnp.float64, rngs=rngs)
        self.shift = nnx.Param(jnp.ones(DIM, jnp.float64))

    def __call__(self, tokens):
        return self.token(tokens) + self.shift[None]


class Head(nnx.Module):
    def __init__(self, *, rngs):
        init = nnx.initializers.normal(0.02)
        self.table = nnx.Param(init(rngs.params(), (VOCAB, DIM), jnp.float64))

    def __call__(self, x):
        return x @ self.table.T


def dense(*, rngs):
    return nnx.Linear(DIM, DIM, param_dtype=jnp.float64, rngs=rngs)


LAYERS = [Embedding, dense, Head, jpipe.Function(lambda x: x[:, :DIM]), dense, Head]
TIES = [
    [(0, "token.embedding"), (2, "table"), (-1, "table")],
    [(1, "bias"), (4, "bias")],
]
KEY = jax.random.key(2)


def plain(shared, x):
    """The tied model written out: every weight once."""
    h = shared["embedding"][x] + shared["shift"][None]
    h = h @ shared["kernel1"] + shared["bias"][None]
    h = (h @ shared["embedding"].T)[:, :DIM]
    h = h @ shared["kernel4"] + shared["bias"][None]
    return h @ shared["embedding"].T


def shared_of(params):
    return {
        "embedding": params[0]["token"]["embedding"],
        "shift": params[0]["shift"],
        "kernel1": params[1]["kernel"],
        "bias": params[1]["bias"],
        "kernel4": params[4]["kernel"],
    }


def copies_of(shared):
    table = {"table": shared["embedding"]}
    return [
        {"token": {"embedding": shared["embedding"]}, "shift": shared["shift"]},
        {"kernel": shared["kernel1"], "bias": shared["bias"]},
        table,
        {},
        {"kernel": shared["kernel4"], "bias": shared["bias"]},
        table,
    ]


def decays(tree):
    """Decides by the path, so a copy seen under another name would go astray."""
    return jax.tree.map_with_path(lambda path, _: "embedding" in str(path), tree)


OPTIMIZERS = {
    "adamw": lambda clip: optax.chain(clip(0.05), optax.adamw(0.01, weight_decay=0.1, mask=decays)),
    "momentum": lambda clip: optax.chain(clip(0.05), optax.sgd(0.1, momentum=0.5)),
}

CASES = [
    ("gpipe", 1, 2, "none", 1, "momentum"),
    ("gpipe", 3, 4, "none", 1, "adamw"),
    ("one_f_one_b/paired", 6, 3, "full", 1, "momentum"),
    ("one_f_one_b/unit", 2, 2, "none", 2, "adamw"),
    ("v", 4, 4, "none", 1, "adamw"),
]


@pytest.mark.first_case
@pytest.mark.parametrize("schedule,S,N,recompute,R,optimizer", CASES)
@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.sampled(3)
def test_ties_equal_the_plain_tied_model(schedule, S, N, recompute, R, optimizer):
    with jax.enable_x64(True):
        table = schedule_named(schedule, S, N)
        make = OPTIMIZERS[optimizer]
        pipe = jpipe.Pipeline(
            LAYERS,
            loss=cross_entropy,
            optimizer=make(jpipe.optim.clip_by_global_norm),
            schedule=table,
            recompute=recompute,
            mesh=jpipe.make_mesh(stage=table.num_devices, data=R),
            ties=TIES,
        )
        rng = np.random.default_rng(0)
        shape = (4 * N * R,)
        batch = {
            "inputs": rng.integers(0, VOCAB, shape, dtype=np.int32),
            "labels": rng.integers(0, VOCAB, shape, dtype=np.int32),
        }
        state = pipe.init(KEY, batch)
        shared = shared_of(pipe.get_params(state))
        assert_close(pipe.get_params(state), copies_of(shared), "float64")

        plain_optimizer = make(optax.clip_by_global_norm)
        inner = plain_optimizer.init(shared)

        @jax.jit
        def step(shared, inner):
            value, grads = jax.value_and_grad(lambda p: cross_entropy(plain(p, batch["inputs"]), batch))(shared)
            updates, inner = plain_optimizer.update(grads, inner, shared)
            norm = optax.tree.norm(grads)
            return optax.apply_updates(shared, updates), inner, value, norm

        for _ in range(3):
            shared, inner, value, norm = step(shared, inner)
            state, metrics = pipe.step(with_nan_buffers(state), batch)
            assert_close(metrics["loss"], np.asarray(value), "float64")
            # Each weight counts once; the engine takes norms in float32.
            np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-6)
        want = copies_of(jax.tree.map(np.asarray, shared))
        # Clipped by a norm in float32, weights agree to its precision times the step.
        for got, wanted in zip(jax.tree.leaves(pipe.get_params(state)), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-8)
        params = pipe.get_params(state)
        for copy in (params[2]["table"], params[5]["table"]):
            np.testing.assert_array_equal(copy, params[0]["token"]["embedding"])


def test_modules_that_hold_one_variable_are_tied():
    """Flax's own way to tie needs no `ties`."""
    one, other = (nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(2))
    last = nnx.Linear(4, 4, rngs=nnx.Rngs(2))
    last.kernel = one.kernel
    pipe = jpipe.Pipeline(
        [one, other, last, other],
        loss=lambda y, batch: jnp.mean(y**2),
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.gpipe(2, 1),
    )
    batch = {"inputs": np.ones((2, 4), np.float32)}
    params = pipe.get_params(pipe.step(pipe.init(KEY, batch), batch)[0])
    np.testing.assert_array_equal(params[0]["kernel"], params[2]["kernel"])
    assert not np.array_equal(params[0]["bias"], params[2]["bias"])
    jax.tree.map(np.testing.assert_array_equal, params[1], params[3])


def pipeline(ties, schedule=None, layers=LAYERS):
    pipe = jpipe.Pipeline(
        layers,
        loss=cross_entropy,
        optimizer=optax.sgd(0.1),
        schedule=schedule or jpipe.schedules.gpipe(2, 2),
        ties=ties,
    )
    tokens = np.zeros(4, np.int32)
    return pipe, {"inputs": tokens, "labels": tokens}


WRONG = {
    "shape": (
        [[(0, "token.embedding"), (1, "kernel")]],
        r"one shape and dtype, got layer 0: 'token.embedding' is float\d+\[7, 4\], layer 1",
    ),
    "path": (
        [[(0, "token.embeding"), (2, "table")]],
        "layer 0 .*has no parameter 'token.embeding'.*Did you mean 'token.embedding'",
    ),
    "no parameters": (
        [[(0, "shift"), (3, "x")]],
        "layer 3 .*has no parameter 'x', only none",
    ),
    "layer": ([[(0, "shift"), (9, "x")]], "layer 9, but there are 6 layers"),
    "one place": ([[(0, "shift")]], "must name at least two parameters"),
    "twice": (
        [[(0, "token.embedding"), (2, "table")], [(2, "table"), (5, "table")]],
        r"layer 2: 'table' is in `ties\[0\]` already",
    ),
    "form": ([{"a": 1}], "each of `ties` must be a sequence of"),
    "flat": ([(0, "shift")], "each of `ties` must be a sequence of"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_ties(name):
    ties, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        pipe, batch = pipeline(ties)
        pipe.init(KEY, batch)


def test_stages_that_update_apart_cannot_be_tied():
    pipe, batch = pipeline(TIES, jpipe.schedules.pipedream(2, 2))
    message = "layers 0, 2, 5 share weights but lie on stages 0, 1, which the asynchronous schedule 'pipedream'"
    with pytest.raises(ValueError, match=message):
        pipe.init(KEY, batch)


def test_given_weights_must_agree():
    pipe, batch = pipeline(TIES)
    params = pipe.get_params(pipe.init(KEY, batch))
    params[2]["table"] = params[2]["table"] + 1
    with pytest.raises(ValueError, match="different values in layers 0 and 2"):
        pipe.init(KEY, batch, params=params)


def test_shared_statistics_are_refused():
    norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="layers 0 and 1 share 'mean', a BatchStat"):
        pipeline([], layers=[norm, norm])
