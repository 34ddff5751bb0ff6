"""Graphs for the tests of `jpipe.soap`, and an oracle that simulates by the definition alone."""

import functools
import importlib.util
import itertools
import pathlib

import jax
import jax.numpy as jnp

from jpipe import soap
from jpipe.soap.tasks import Tasks

Array = jax.ShapeDtypeStruct


@functools.cache
def transformer(num_layers=2, batch=8, length=16, dim=32, heads=4, words=96):
    """Attention, layer norm, a dense block and a cross-entropy."""

    def norm(h, scale, bias):
        mean = h.mean(-1, keepdims=True)
        variance = ((h - mean) ** 2).mean(-1, keepdims=True)
        return (h - mean) * jax.lax.rsqrt(variance + 1e-6) * scale + bias

    def loss(w, tokens, targets):
        h = w["embedding"][tokens]
        B, S, D = h.shape
        for layer in w["layers"]:
            q, k, v = ((h @ layer[name]).reshape(B, S, heads, -1).transpose(0, 2, 1, 3) for name in "qkv")
            p = jax.nn.softmax(jnp.einsum("bhsd,bhtd->bhst", q, k), -1)
            o = jnp.einsum("bhst,bhtd->bhsd", p, v).transpose(0, 2, 1, 3)
            h = h + o.reshape(B, S, D) @ layer["o"]
            h = norm(h, layer["scale"][None, None], layer["bias"][None, None])
            h = h + jax.nn.gelu(h @ layer["in"]) @ layer["out"]
        logits = jax.nn.log_softmax(h @ w["words"], -1)
        return -jnp.take_along_axis(logits, targets[..., None], -1).mean()

    def layer():
        square = {name: weight(dim, dim) for name in "qkvo"}
        wide = {"in": weight(dim, 4 * dim), "out": weight(4 * dim, dim)}
        return {**square, **wide, "scale": weight(dim), "bias": weight(dim)}

    weights = {
        "embedding": weight(words, dim),
        "layers": [layer() for _ in range(num_layers)],
        "words": weight(dim, words),
    }
    tokens = Array((batch, length), jnp.int32)
    return soap.trace(loss, weights, tokens, tokens)


def weight(*shape):
    return Array(shape, jnp.float32)


def convolution(x, kernel, **options):
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        options.pop("strides", (1, 1)),
        options.pop("padding", "SAME"),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        **options,
    )


@functools.cache
def lenet(batch=64):
    """LeNet-5 on images of 32 x 32 (LeCun et al. 1998)."""

    def loss(w, x, y):
        for name in ("1", "2"):
            x = jax.nn.relu(convolution(x, w["c" + name], padding="VALID"))
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = x.reshape(x.shape[0], -1)
        x = jax.nn.relu(x @ w["f1"])
        x = jax.nn.relu(x @ w["f2"])
        return -(jax.nn.log_softmax(x @ w["f3"]) * y).sum(-1).mean()

    weights = {
        "c1": weight(5, 5, 1, 6),
        "c2": weight(5, 5, 6, 16),
        "f1": weight(400, 120),
        "f2": weight(120, 84),
        "f3": weight(84, 10),
    }
    return soap.trace(loss, weights, weight(batch, 32, 32, 1), weight(batch, 10))


@functools.cache
def branches(batch=8, width=8):
    """An inception block: branches of convolutions, concatenated, and batch statistics."""

    def loss(w, x):
        left = jax.nn.relu(convolution(x, w["a"]))
        right = convolution(jax.nn.relu(convolution(x, w["b"])), w["c"], strides=(1, 1))
        y = jnp.concatenate([left, right, x], -1)
        mean = y.mean((0, 1, 2))
        y = (y - mean[None, None, None]) * w["scale"][None, None, None]
        return (y.mean((1, 2)) @ w["d"]).sum()

    weights = {
        "a": weight(1, 1, 4, 8),
        "b": weight(1, 1, 4, 8),
        "c": weight(3, 3, 8, 4),
        "scale": weight(16),
        "d": weight(16, 8),
    }
    return soap.trace(loss, weights, weight(batch, width, width, 4))


@functools.cache
def recurrent(batch=8, length=4, dim=16, words=32):
    """A recurrent language model; its output layer is tied to the embedding, and read by every turn."""

    def loss(w, tokens):
        def turn(h, x):
            h = jnp.tanh(x @ w["in"] + h @ w["state"])
            return h, h @ w["embedding"].T

        xs = w["embedding"][tokens].swapaxes(0, 1)
        _, logits = jax.lax.scan(turn, jnp.zeros((tokens.shape[0], dim)), xs)
        return jax.nn.logsumexp(logits, -1).mean()

    weights = {
        "embedding": weight(words, dim),
        "in": weight(dim, dim),
        "state": weight(dim, dim),
    }
    return soap.trace(loss, weights, Array((batch, length), jnp.int32))


@functools.cache
def next_word(batch=64, length=2, dim=64, words=256):
    """A small recurrent language model that predicts the word after `length` words."""

    def loss(w, tokens, y):
        def turn(h, x):
            return jnp.tanh(x @ w["in"] + h @ w["state"]), None

        xs = w["embedding"][tokens].swapaxes(0, 1)
        h, _ = jax.lax.scan(turn, jnp.zeros((tokens.shape[0], dim)), xs)
        return -(jax.nn.log_softmax(h @ w["out"]) * y).sum(-1).mean()

    weights = {
        "embedding": weight(words, dim),
        "in": weight(dim, dim),
        "state": weight(dim, dim),
        "out": weight(dim, words),
    }
    return soap.trace(loss, weights, Array((batch, length), jnp.int32), weight(batch, words))


@functools.cache
def flexflow(name, batch=64):
    """One of FlexFlow's six models at its size, as `benchmarks/flexflow.py` traces it."""
    return _flexflow().graph_of(name, batch)


@functools.cache
def _flexflow():
    path = pathlib.Path(__file__).parents[1] / "benchmarks" / "flexflow.py"
    spec = importlib.util.spec_from_file_location("flexflow", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_graph(rng, num_operators):
    """A random graph of matrix products, sums, maps and row reductions, of at most `num_operators` operators."""
    rows, dim = 2 ** rng.integers(1, 4), 2 ** rng.integers(1, 4)
    steps = [(rng.random(), rng.integers(0, 99, 2)) for _ in range(num_operators - 1)]

    def loss(w, x):
        values = [x]
        for (kind, picks), kernel in zip(steps, w):
            a, b = (values[p % len(values)] for p in picks)
            if kind < 0.5:
                values.append(a @ kernel)
            elif kind < 0.7:
                values.append(jnp.cumsum(a, 1) + b)
            elif kind < 0.85:
                values.append(jnp.concatenate([a[:, ::2], b[:, 1::2]], 1))
            else:
                values.append(a @ b.T @ a)
        return values[-1].sum()

    while True:
        kernels = [weight(dim, dim) for _ in steps]
        graph = soap.trace(loss, kernels, weight(rows, dim))
        if len(graph.operators) <= num_operators:
            return graph
        steps = steps[:-1]


def machine(num_devices, *, inside=4, overhead=1e-6):
    """Servers of `inside` devices, slow enough that transfers count."""
    inside = inside if num_devices % inside == 0 else num_devices
    levels = (soap.Level(inside, 2e9, 1e-6),)
    if num_devices > inside:
        levels += (soap.Level(num_devices // inside, 5e8, 3e-6, shared=True),)
    return soap.Machine("test", levels, 1e10, 1e10, overhead)


def by_key(tasks, timeline):
    """Ready, start and end of every task, by its key."""
    return {tasks.key[t]: (timeline.ready[t], timeline.start[t], timeline.end[t]) for t in timeline.order}


def by_definition(tasks: Tasks):
    """Ready, start and end of every task, by its key; found by repeating the rules until nothing changes.

    A task is ready when all before it have ended. A device runs its tasks in the order of (ready, key).
    """
    every = list(tasks.all_tasks())
    end = dict.fromkeys(every, 0.0)
    queues = {}
    for t in every:
        queues.setdefault(tasks.device[t], []).append(t)
    while True:
        ready = {t: max((end[p] for p in tasks.before[t]), default=0.0) for t in every}
        start, new = {}, {}
        for device, queue in queues.items():
            free = 0.0
            for t in sorted(queue, key=lambda t: (ready[t], tasks.key[t])):
                start[t] = ready[t] if device < 0 else max(ready[t], free)
                new[t] = free = start[t] + tasks.seconds[t]
        if new == end:
            return {tasks.key[t]: (ready[t], start[t], end[t]) for t in every}
        end = new


def all_strategies(space):
    return itertools.product(*(space.configs(i) for i in range(space.num_operators)))
