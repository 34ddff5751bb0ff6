"""A model with skips that nest, cross and share their way, as pipeline layers and written out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jpipe

DIM = 4


class Stasher(nnx.Module):
    """Stashes a pytree: numbers of another width, and integers, which have no gradient."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)
        self.side = nnx.Linear(DIM, 3, rngs=rngs)

    def __call__(self, x):
        y = jnp.tanh(self.linear(x))
        return y, {"side": self.side(x), "sign": (x > 0).astype(jnp.int32)}


class Popper(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(3, DIM, rngs=rngs)

    def __call__(self, x, kept):
        return x + self.linear(kept["side"]) * (1 + kept["sign"]).astype(x.dtype)


class Both(nnx.Module):
    """Pops a skip, and stashes two of its own."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x, kept):
        y = self.linear(x) + kept["side"].sum(axis=-1, keepdims=True)
        return y, y * 2, y**2


def add(x, first, second):
    return x + first * second


def in_float64(make, *, rngs):
    graph, state = nnx.split(make(rngs=rngs))
    return nnx.merge(graph, jax.tree.map(lambda a: a.astype("float64"), state))


def factory(make):
    return functools.partial(in_float64, make)


dense = factory(functools.partial(nnx.Linear, DIM, DIM))
skip = jpipe.skip
# 0 -> 4 and 1 -> 3 nest, 2 -> 5 crosses them, 3 -> 6 and 3 -> 6 share their way.
LAYERS = [
    skip(factory(Stasher), stash="outer"),
    skip(factory(Stasher), stash="inner"),
    skip(factory(Stasher), stash="cross"),
    skip(factory(Both), pop="inner", stash=["twice", "square"]),
    skip(factory(Popper), pop="outer"),
    skip(factory(Popper), pop="cross"),
    skip(jpipe.Function(add), pop=("twice", "square")),
    dense,
]


def plain(params, x):
    """The outputs of `LAYERS`, written out."""

    def linear(p, x):
        return x @ p["kernel"] + p["bias"][None]

    def stasher(p, x):
        return jnp.tanh(linear(p["linear"], x)), (linear(p["side"], x), x > 0)

    def popper(p, x, kept):
        return x + linear(p["linear"], kept[0]) * jnp.where(kept[1], 2.0, 1.0)

    x, outer = stasher(params[0], x)
    x, inner = stasher(params[1], x)
    x, cross = stasher(params[2], x)
    x = linear(params[3]["linear"], x) + inner[0].sum(axis=-1, keepdims=True)
    product = 2 * x * x**2
    x = popper(params[4], x, outer)
    x = popper(params[5], x, cross)
    return linear(params[7], x + product)


def loss_fn(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def pipeline(schedule, **options):
    """A pipeline of `LAYERS`."""
    return jpipe.Pipeline(LAYERS, loss=loss_fn, optimizer=optax.sgd(0.01, momentum=0.9), schedule=schedule, **options)


def batch(seed=0):
    """Sixteen rows of inputs and targets in float32."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((16, DIM)).astype(np.float32) for name in ("inputs", "targets")}
