"""Skips go from the stage that stashes to the stage that pops, and change nothing but the way."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import schedule_named, slow
from helpers import assert_close, with_nan_buffers
from skipping import DIM, LAYERS, dense, loss_fn, plain, skip

import jpipe

CASES = [
    ("gpipe", 1, 2, "none", None),
    ("gpipe", 4, 3, "none", None),
    slow("gpipe", 8, 4, "full", None),
    ("one_f_one_b/paired", 4, 4, "full", [1, 2, 4]),
    ("one_f_one_b/paired", 3, 5, "none", [2, 6]),
    ("one_f_one_b/unit", 2, 3, "none", [3]),
    ("one_f_one_b/unit", 4, 6, "full", [2, 3, 5]),
    ("two-columns", 4, 3, "none", [1, 3, 5]),
    slow("v", 4, 4, "none", [2, 4, 6]),
]


@pytest.mark.parametrize("schedule,S,N,recompute,boundaries", CASES)
@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.sampled(12)
def test_skips_equal_the_plain_model(schedule, S, N, recompute, boundaries):
    with jax.enable_x64(True):
        optimizer = optax.sgd(0.003, momentum=0.5)
        pipe = jpipe.Pipeline(
            LAYERS,
            loss=loss_fn,
            optimizer=optimizer,
            schedule=schedule_named(schedule, S, N),
            recompute=recompute,
            boundaries=boundaries,
        )
        rng = np.random.default_rng(1)
        shape = (2 * N, DIM)
        batch = {k: rng.normal(size=shape) for k in ("inputs", "targets")}
        state = pipe.init(jax.random.key(0), batch)
        params = pipe.get_params(state)
        inner = optimizer.init(params)

        @jax.jit
        def gradient(params):
            return jax.value_and_grad(lambda p: loss_fn(plain(p, batch["inputs"]), batch))(params)

        for _ in range(3):
            value, grads = gradient(params)
            updates, inner = optimizer.update(grads, inner, params)
            params = optax.apply_updates(params, updates)
            state, metrics = pipe.step(with_nan_buffers(state), batch)
            assert_close(metrics["loss"], np.asarray(value), "float64")
        want = jax.tree.map(np.asarray, params)
        assert_close(pipe.get_params(state), want, "float64")
        rows = batch["inputs"][: 2 * N - 1]
        outputs = np.asarray(plain(params, rows))
        assert_close(pipe.predict(state, {"inputs": rows}), outputs, "float64")


def test_stages_between_never_see_a_skip():
    """No message between neighbours carries it: the bytes of activations are those of a model without."""
    stages = [
        skip(jpipe.Function(lambda x: (x, x)), stash="far"),
        dense,
        dense,
        skip(jpipe.Function(lambda x, far: x + far), pop="far"),
    ]
    pipe = jpipe.Pipeline(
        stages,
        loss=loss_fn,
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.one_f_one_b(4, 4),
    )
    batch = {k: np.zeros((8, DIM), np.float32) for k in ("inputs", "targets")}
    engine = pipe._program(batch).engine
    (portal,) = engine.stages.portals
    assert (portal.source, portal.target, portal.names) == (0, 3, ("far",))
    assert engine.stages.messages.activations.num_bytes == 2 * DIM * 4
    ways = [c for c in engine.lowered.channels if "skip0" in c.arrives]
    assert len(ways) == 1 and (0, 3) in ways[0].pairs


def wrapped(**names):
    return skip(jpipe.Function(lambda *args: args), **names)


WRONG = {
    "never stashed": (
        [dense, wrapped(pop="a")],
        r"layer 1 .*pops 'a', which no layer before it stashes: no layer does",
    ),
    "popped before": (
        [wrapped(pop="a"), wrapped(stash="a"), dense],
        r"layer 0 .*pops 'a', .*: only layer 1 does",
    ),
    "never popped": ([wrapped(stash="a"), dense], "layer 0 .*'a', which no layer pops"),
    "stashed twice": (
        [wrapped(stash="a"), wrapped(stash="a"), wrapped(pop="a")],
        "layer 1 .*stashes 'a', which layer 0 stashed already",
    ),
    "popped twice": (
        [wrapped(stash="a"), wrapped(pop=("a", "a"))],
        r"layer 1 .*pops 'a' twice\. Pop it once",
    ),
    "one value returned by a reader": (
        [
            skip(jpipe.Function(lambda x: (x, x)), stash="a"),
            skip(jpipe.Function(lambda x, a: x), stash="b", pop="a"),
            wrapped(pop=("a", "b")),
        ],
        "layer 1 .*it stashes b, so it must return a tuple of 2.* got one value",
    ),
    "one value returned": (
        [skip(jpipe.Function(jnp.tanh), stash="a"), wrapped(pop="a")],
        "layer 0 .*it stashes a, so it must return a tuple of 2.* got one value",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_skips(name):
    layers, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        pipe = jpipe.Pipeline(
            layers,
            loss=loss_fn,
            optimizer=optax.sgd(0.1),
            schedule=jpipe.schedules.gpipe(1, 2),
        )
        batch = {k: np.zeros((4, DIM), np.float32) for k in ("inputs", "targets")}
        pipe.init(jax.random.key(0), batch)


@pytest.mark.parametrize(
    "options,message",
    [
        ({}, "needs `stash=` or `pop=`"),
        ({"stash": 3}, "`stash` must be a name"),
        ({"pop": [1]}, "`pop` must be a name or several, got 1"),
    ],
)
def test_wrong_names(options, message):
    with pytest.raises(ValueError, match=message):
        skip(dense, **options)
