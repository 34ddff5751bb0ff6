"""Models that cannot be cut, or do not compute the same whenever they are called, are refused in clear words."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jpipe

D = 8
BATCH = {"inputs": np.ones((8, D), np.float32), "targets": np.zeros((8, D), np.float32)}


def partition(model, num_stages=2):
    pipe = jpipe.Pipeline(
        model,
        loss=lambda outputs, batch: jnp.mean((outputs - batch["targets"]) ** 2),
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.one_f_one_b(num_stages, 4),
    )
    return pipe.partition(BATCH)


class Chain(nnx.Module):
    """Four dense layers, with `between` after each."""

    def __init__(self, between):
        self.dense = nnx.List([nnx.Linear(D, D, rngs=nnx.Rngs(0)) for _ in range(4)])
        self.between = between

    def __call__(self, x):
        for dense in self.dense:
            x = self.between(jnp.tanh(dense(x)))
        return x


class LinenChain(linen.Module):
    """The same in Linen."""

    between: object

    @linen.compact
    def __call__(self, x):
        for _ in range(4):
            x = self.between(jnp.tanh(linen.Dense(D)(x)))
        return x


class Counter:
    """A value that changes with each call of a layer."""

    def __init__(self):
        self.calls = 0

    def scaled(self, x):
        self.calls += 1
        return x * self.calls

    def logged(self, x):
        self.calls += 1
        return x

    def sometimes(self, x):
        self.calls += 1
        return jnp.sin(x) if (self.calls - 1) // 4 % 2 else x  # in each second call of the model

    def inside_of_a_branch(self, x):
        self.calls += 1
        calls = self.calls
        return jax.lax.cond(x[0, 0] > 0, lambda y: y * calls, lambda y: y, x)

    def as_an_array(self, x):
        self.calls += 1
        return x * np.full((D,), self.calls, np.float32)[None]


def random_scale(x):
    return x * np.random.default_rng().random()


@pytest.mark.parametrize("kind", [Chain, LinenChain])
@pytest.mark.parametrize(
    ("between", "words"),
    [
        (lambda: Counter().scaled, "another `mul`, with"),
        (lambda: Counter().sometimes, "another `"),
        (lambda: Counter().inside_of_a_branch, "another `"),
        (lambda: Counter().as_an_array, "another `mul`"),
        (lambda: random_scale, "another `mul`, with"),
    ],
    ids=["number", "equation", "branch", "array", "random"],
)
def test_a_model_that_reads_global_state(kind, between, words):
    where = r"dense\.\d" if kind is Chain else r"Dense_\d"
    with pytest.raises(ValueError, match=rf"computes otherwise each time .* after {where} it has {words}.*argument"):
        partition(kind(between()))


def test_a_model_that_keeps_a_value_of_a_call():
    kept = []

    def add_last(x):
        kept.append(x)
        return x + kept[-5] if len(kept) > 5 else x

    with pytest.raises(ValueError, match="keeps a value of one call for the next one"):
        partition(Chain(add_last))


@pytest.mark.parametrize("kind", [Chain, LinenChain])
def test_what_does_not_change_a_call_may_be_global(kind):
    table = jnp.arange(D, dtype=jnp.float32)[None]
    drop = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)

    @jax.custom_jvp
    def square(x):
        return x**2

    square.defjvp(lambda primals, tangents: (square(*primals), 2 * primals[0] * tangents[0]))
    for between in (Counter().logged, lambda x: x + table, drop(jnp.tanh), lambda x: square(x)):
        assert len(partition(kind(between))) == 2


class While(nnx.Module):
    def __init__(self):
        self.a, self.b = (nnx.Linear(D, D, rngs=nnx.Rngs(0)) for _ in range(2))

    def __call__(self, x):
        def turn(carry):
            number, x = carry
            return number + 1, self.b(jnp.tanh(self.a(x)))

        return jax.lax.while_loop(lambda carry: carry[0] < 3, turn, (0, x))[1]


class SharedState(nnx.Module):
    def __init__(self):
        self.dense = nnx.List([nnx.Linear(D, D, rngs=nnx.Rngs(0)) for _ in range(3)])
        self.mean = nnx.Variable(jnp.zeros((1, D)))

    def __call__(self, x):
        mean = self.mean[...]
        for dense in self.dense:
            x = jnp.tanh(dense(x)) + mean
        self.mean[...] = mean + x.sum(0, keepdims=True)
        return x


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (While, r"at no place.*has 1: while \(a, b\)\. Use fewer"),
        (
            SharedState,
            r"into 2 segments: dense\.0 \| .*has 3: .*first after dense\.1, where .*\[2, 8\] crosses.*same mutable",
        ),
        (lambda: nnx.Linear(D, D, rngs=nnx.Rngs(0)), r"at no place.*has 1: dot_general"),
    ],
    ids=["while", "state", "one product"],
)
def test_a_model_without_places_says_where_its_products_are(model, words):
    with pytest.raises(ValueError, match=words):
        partition(model(), num_stages=3)
