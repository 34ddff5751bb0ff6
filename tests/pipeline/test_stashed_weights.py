"""Norms run again in backwards on other weights than their forwards, and read those of the forward from the stash."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from corrections import CORRECTIONS, corrected, none, paired_delay, unit_delay
from families import cross_entropy
from flax import nnx
from helpers import assert_close, use_target, with_nan_buffers

import jpipe
from jpipe.layers.avals import num_bytes
from jpipe.layers.residuals import AT_HAND, STASHED, UNREAD
from models import Transformer

D, T, HEADS, CLASSES, ROWS, ROUNDS = 8, 4, 2, 6, 4, 13


# -- The oracle: operations whose derivative by their input reads other weights than they do


@jax.custom_vjp
def mixed_product(x, forward, backward):
    return x @ forward


def _product_gradients(kept, g):
    x, backward = kept
    rows, gradients = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    return g @ backward.T, rows.T @ gradients, None


mixed_product.defvjp(lambda x, forward, backward: (x @ forward, (x, backward)), _product_gradients)


@jax.custom_vjp
def mixed_scaling(x, forward, backward):
    return x * row(forward, x)


def _scaling_gradients(kept, g):
    x, backward = kept
    return g * row(backward, x), (x * g).reshape(-1, x.shape[-1]).sum(0), None


mixed_scaling.defvjp(lambda x, forward, backward: (x * row(forward, x), (x, backward)), _scaling_gradients)


def row(weight, x):
    return weight.reshape(*[1] * (x.ndim - 1), -1)


def product(x, weight):
    """With weights of the forward and others for the backward in a tuple: see above."""
    return mixed_product(x, *weight) if isinstance(weight, tuple) else x @ weight


def scaled(x, weight):
    return mixed_scaling(x, *weight) if isinstance(weight, tuple) else x * row(weight, x)


def shifted(x, weight):
    return x + row(weight[0] if isinstance(weight, tuple) else weight, x)


# -- The models


def normed(x, scale, shift, dim=-1):
    centred = x - x.mean(dim, keepdims=True)
    return shifted(scaled(centred / jnp.sqrt((centred**2).mean(dim, keepdims=True) + 1e-2), scale), shift)


def hidden(w, x):
    return jnp.tanh(shifted(product(normed(x, w["scale"], w["shift"]), w["up"]), w["bias"]))


def batch_normed(w, x):
    """A perceptron whose units are normed over the rows of a microbatch."""
    return jax.nn.relu(normed(product(x, w["up"]), w["scale"], w["shift"], dim=0))


def block(w, x):
    """A pre-norm block of a transformer."""
    y = normed(x, w["scale"], w["shift"])
    query, key, value = (product(y, w[name]).reshape(*x.shape[:2], HEADS, -1) for name in ("query", "key", "value"))
    scores = jax.nn.softmax(jnp.einsum("bthd,bmhd->bhtm", query, key), -1)
    x = x + product(jnp.einsum("bhtm,bmhd->bthd", scores, value).reshape(x.shape), w["out"])
    y = shifted(product(normed(x, w["scale2"], w["shift2"]), w["up"]), w["bias"])
    return x + product(jax.nn.gelu(y), w["down"])


def head(w, x):
    y = normed(x, w["scale"], w["shift"])
    return product(y.mean(1) if x.ndim == 3 else y, w["up"])


NORM = {"scale": (D,), "shift": (D,)}
SHAPES = {
    hidden: NORM | {"up": (D, D), "bias": (D,)},
    batch_normed: NORM | {"up": (D, D)},
    block: NORM
    | {name: (D, D) for name in ("query", "key", "value", "out")}
    | {"scale2": (D,), "shift2": (D,), "up": (D, 4 * D), "bias": (4 * D,), "down": (4 * D, D)},
    head: NORM | {"up": (D, CLASSES)},
}
MODELS = {
    "mlp": [hidden] * 4 + [head],
    "batch norm": [batch_normed] * 4 + [head],
    "transformer": [block] * 4 + [head],
}


class Layer(nnx.Module):
    """One of the functions above; `names` are the axes of the dims of some weights."""

    def __init__(self, function, rngs, names=None):
        self.function = function
        for name, shape in SHAPES[function].items():
            middle = 1.0 if name.startswith("scale") else 0.0
            value = middle + 0.3 * jax.random.normal(rngs.params(), shape)
            init = nnx.with_partitioning(lambda value=value: value, (names or {}).get(name, ()), eager_sharding=False)
            setattr(self, name, nnx.Param(init()))

    def __call__(self, x):
        return self.function({name: getattr(self, name)[...] for name in SHAPES[self.function]}, x)


def layers_of(model, dtype, names=None):
    def make(function, rngs):
        module = Layer(function, rngs, names)
        graph, state = nnx.split(module)
        return nnx.merge(graph, jax.tree.map(lambda a: a.astype(dtype), state))

    return [functools.partial(make, function) for function in MODELS[model]]


def mixed_gradient(functions, forward, backward, batch):
    def loss(weights):
        x = batch["inputs"]
        for function, of_forward, of_backward in zip(functions, weights, backward, strict=True):
            x = function({name: (w, of_backward[name]) for name, w in of_forward.items()}, x)
        return cross_entropy(x, batch)

    return jax.value_and_grad(loss)(forward)


def microbatches(model, count, dtype):
    rng = np.random.default_rng(0)
    shape = (ROWS, T, D) if model == "transformer" else (ROWS, D)
    return [
        {"inputs": rng.normal(size=shape).astype(dtype), "labels": rng.integers(0, CLASSES, ROWS, dtype=np.int32)}
        for _ in range(count)
    ]


# -- Training equals the definition

# model, schedule, S, N, ticks, optimizer, corrections, axes of the mesh
CASES = [
    ("mlp", "pipemare", 3, 1, "paired", "sgd", "none", {}),
    ("mlp", "pipemare", 3, 2, "unit", "momentum", "T1+T2", {}),
    ("mlp", "pipedream", 3, 1, "unit", "momentum", "prediction", {}),
    ("mlp", "with_delays", 3, 1, "", "sgd", "none", {}),
    ("batch norm", "pipemare", 2, 1, "unit", "sgd", "none", {}),
    ("batch norm", "pipemare", 3, 1, "paired", "sgd", "T2", {}),
    ("transformer", "pipemare", 2, 1, "paired", "sgd", "none", {}),
    ("transformer", "pipemare", 3, 1, "unit", "adamw", "T1+T2", {}),
    ("transformer", "pipemare", 2, 1, "paired", "sgd", "T2", {"fsdp": 2}),
    ("transformer", "pipemare", 2, 1, "unit", "sgd", "none", {"model": 2}),
    ("mlp", "pipemare", 2, 2, "unit", "sgd", "prediction", {"fsdp": 2, "model": 2}),
]
OPTIMIZERS = {"sgd": optax.sgd(0.2), "momentum": optax.sgd(0.05, momentum=0.9), "adamw": optax.adamw(1e-2)}
SPLIT = {
    "up": (None, "model"),
    "bias": ("model",),
    "scale": ("model",),
    "shift2": ("model",),
    "down": ("model", None),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.sampled(11)
def test_equals_the_definition(case):
    check(case)


def test_equals_the_definition_in_vectors(monkeypatch):
    """As GPUs keep stashes: those of unlike layers side by side."""
    use_target(monkeypatch, "gpu")
    check(("transformer", "pipemare", 3, 1, "unit", "sgd", "T1+T2", {}))


def check(case):
    model, name, S, N, ticks, optimizer, corrections, axes = case
    dtype = "float64"
    corrections, optimizer = CORRECTIONS[corrections], OPTIMIZERS[optimizer]
    with jax.enable_x64(True):
        layers = layers_of(model, dtype, SPLIT if "model" in axes else None)
        plain = oracles.PlainModel(layers, jax.random.key(1))
        rows = microbatches(model, ROUNDS * N, dtype)
        batches = oracles.minibatches(rows, N)
        if name == "with_delays":
            schedule = jpipe.schedules.with_delays([3, 2, 1], N, backward_delays=[1, 0, 1])
            delay, backward_delay = (lambda s, j: (3, 2, 1)[s]), (lambda s, j: (1, 0, 1)[s])
        else:
            schedule = getattr(jpipe.schedules, name)(S, N, ticks=ticks)
            delay = (paired_delay if ticks == "paired" else unit_delay)(S, N)
            backward_delay = none if name == "pipemare" else delay
        pipe = jpipe.Pipeline(
            layers,
            loss=cross_entropy,
            schedule=schedule,
            mesh=jpipe.make_mesh(stage=S, **axes) if axes else None,
            **corrected(optimizer, corrections),
        )
        stages = pipe._program(batches[0]).stages
        stashed = [a.shape for kind in stages.layer_kinds for a in kind.stash if ROWS not in a.shape[:1]]
        assert stashed, "no layer stashes parameters"
        losses, params = oracles.train_with_delays(
            plain,
            oracles.stages_of_layers(pipe.partition(batches[0])),
            plain.params,
            cross_entropy,
            optimizer,
            rows,
            N,
            delay,
            backward_delay,
            mixed=functools.partial(mixed_gradient, MODELS[model]),
            **corrections,
        )
        state = pipe.init(jax.random.key(0), batches[0], params=plain.params)
        if not axes:
            state = with_nan_buffers(state, all_but="squared_norm")
        found = []
        for batch in batches:
            state, metrics = pipe.step(state, batch)
            found.append((float(metrics["loss"]), int(metrics["num_microbatches"])))
        state, metrics = pipe.flush(state)
        found.append((float(metrics["loss"]), int(metrics["num_microbatches"])))
        total = sum(mean * n for mean, n in found if n)
        np.testing.assert_allclose(total / (ROUNDS * N), np.mean(losses), rtol=1e-9)
        assert_close(pipe.get_params(state), params, dtype)


# -- What is stashed


@pytest.mark.parametrize(("dtype", "before", "after"), [(None, 14, 10), (jnp.bfloat16, 16, 10)], ids=str)
def test_a_block_of_a_transformer_stashes_a_third_less(dtype, before, after):
    """In numbers of an activation, and four rows for the scales and biases of two norms."""
    size = dict(vocab_size=11, seq_len=32, dim=16)
    pipe = jpipe.Pipeline(
        Transformer(num_heads=2, num_blocks=4, **size).layers(),
        loss=cross_entropy,
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.pipemare(2, 2),
        compute_dtype=dtype,
    )
    tokens = np.zeros((2 * ROWS, size["seq_len"]), np.int32)
    stages = pipe._program({"inputs": tokens, "labels": tokens}).stages
    kind = stages.layer_kinds[stages.kind_of_layer[1]]
    assert kind.rerun.weight_accesses == STASHED
    itemsize = 4 if dtype is None else 2
    rows = ROWS * size["seq_len"]  # of an activation

    def num_rows(kept):
        """Rows as wide as an activation; the means of a norm are numbers."""
        return num_bytes(a for a in kept if a.ndim > 2 and a.shape[-1] > 1) / (itemsize * size["dim"])

    whole, at_hand = (kind.rereading(w).stash for w in (UNREAD, AT_HAND))
    assert num_rows(whole) == before * rows
    assert num_rows(at_hand) == after * rows
    assert num_rows(kind.stash) == after * rows + 4
