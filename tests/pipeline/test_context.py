"""Positions that are split over an axis "context" of the mesh: the plain model's numbers, messages that are split, and
the exchanges of keys and values that theory says.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from collectives import collectives
from families import schedule_named, tokens
from flax import linen, nnx
from helpers import assert_close, refused

import jpipe
from jpipe.engine import guard
from jpipe.lowering.target import GPU, TARGETS
from models import BERT, Transformer, Translation

KEY = jax.random.key(7)
B, N, T = 4, 2, 32
D, HEADS, KEY_HEADS, HEAD = 8, 4, 2, 4
RATE = 0.3


class Decoder(nnx.Module):
    """Causal attention to the own document, with grouped queries and rotary positions, and an MLP."""

    def __init__(self, *, rngs: nnx.Rngs, method: str):
        init = nnx.initializers.normal(0.3)
        heads = nnx.with_partitioning(init, ("embed", "heads"), eager_sharding=False)
        linear = functools.partial(nnx.Linear, D, use_bias=False, kernel_init=init, rngs=rngs)
        self.query, self.key, self.value = (linear(n * HEAD) for n in (HEADS, KEY_HEADS, KEY_HEADS))
        self.out = nnx.Linear(HEADS * HEAD, D, use_bias=False, kernel_init=init, rngs=rngs)
        self.mlp = nnx.Linear(D, D, kernel_init=heads, rngs=rngs)
        self.method = method

    def __call__(self, activation):
        x, segments = activation["x"], activation["segments"]
        query, key, value = (in_heads(linear(x)) for linear in (self.query, self.key, self.value))
        y = jpipe.attention(
            turned(query),
            turned(key),
            value,
            is_causal=True,
            segment_ids=segments,
            method=self.method,
            block_size=4,
        )
        x = x + self.out(y.reshape(*x.shape[:2], -1))
        x = x + jnp.tanh(self.mlp(x))
        return {"x": linen.with_logical_constraint(x, ("batch", "length", "embed")), "segments": segments}


def in_heads(a):
    return a.reshape(*a.shape[:2], -1, HEAD)


def turned(a):
    """Rotary positions (Su et al., 2021, arXiv:2104.09864)."""
    angle = jnp.arange(a.shape[1])[:, None] * 100.0 ** -jnp.arange(HEAD // 2)[None]
    sin, cos = jnp.sin(angle)[None, :, None], jnp.cos(angle)[None, :, None]
    left, right = jnp.split(a, 2, -1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def plain_decoder(p, activation):
    """All scores at once."""
    x, segments = activation["x"], activation["segments"]
    query, key, value = (in_heads(x @ p[name]["kernel"]) for name in ("query", "key", "value"))
    query, key = turned(query), turned(key)
    key, value = (jnp.repeat(a, HEADS // KEY_HEADS, 2) for a in (key, value))
    scores = jnp.einsum("bthd,bmhd->bhtm", query, key) / HEAD**0.5
    seen = np.tril(np.ones((T, T), bool))[None] & (segments[:, :, None] == segments[:, None])
    probabilities = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), -1)
    x = x + jnp.einsum("bhtm,bmhd->bthd", probabilities, value).reshape(*x.shape[:2], -1) @ p["out"]["kernel"]
    bias = jnp.broadcast_to(p["mlp"]["bias"], x.shape)
    return {"x": x + jnp.tanh(x @ p["mlp"]["kernel"] + bias), "segments": segments}


def loss(outputs, batch):
    return jnp.mean((outputs["x"] - batch["targets"]) ** 2)


def batches(count=2, length=T):
    rng = np.random.default_rng(0)
    return [
        {
            "inputs": {
                "x": rng.normal(size=(B, length, D)).astype(np.float32),
                "segments": np.sort(rng.integers(0, 3, (B, length))).astype(np.int32),
            },
            "targets": rng.normal(size=(B, length, D)).astype(np.float32),
        }
        for _ in range(count)
    ]


def decoder(schedule, method, **axes):
    return jpipe.Pipeline(
        [functools.partial(Decoder, method=method)] * 2,
        loss=loss,
        optimizer=optax.sgd(RATE),
        schedule=schedule_named(schedule, 2, N),
        mesh=jpipe.make_mesh(stage=2, **axes),
    )


def plain_training(params):
    """The losses, and the parameters after the last step."""

    def whole(params, batch):
        return loss(functools.reduce(lambda x, p: plain_decoder(p, x), params, batch["inputs"]), batch)

    run, losses = jax.jit(jax.value_and_grad(whole)), []
    for batch in batches():
        value, gradients = run(params, batch)
        losses.append(value)
        params = jax.tree.map(lambda a, g: a - RATE * g, params, gradients)
    return losses, params


CASES = [
    ("zero_bubble_h1", "ring", {"context": 2, "model": 2}),
    ("one_f_one_b", "all_to_all", {"context": 4}),
    ("gpipe", "ring", {"context": 4}),
    ("one_f_one_b", "ring", {"context": 2, "fsdp": 2}),
    ("one_f_one_b", "ring", {"context": 2, "data": 2}),
    ("gpipe", "all_to_all", {"context": 2, "model": 2}),
    ("zero_bubble_h1", "ring", {"context": 4}),
    ("zero_bubble_h1", "all_to_all", {"context": 2, "model": 2}),
    ("one_f_one_b", "ring", {"context": 1}),
]


@pytest.mark.first_case
@pytest.mark.sampled(5, others="exhaustive")
@pytest.mark.parametrize("schedule, method, axes", CASES, ids=str)
def test_training_is_that_of_the_plain_model(schedule, method, axes):
    pipe = decoder(schedule, method, **axes)
    first, *_ = batches()
    state = pipe.init(KEY, first)
    losses, params = plain_training(pipe.get_params(state))
    for batch, wanted in zip(batches(), losses, strict=True):
        state, metrics = pipe.step(state, batch)
        np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    assert_close(pipe.get_params(state), params, "float32")
    outputs = functools.reduce(lambda x, p: plain_decoder(p, x), params, first["inputs"])
    assert_close(pipe.predict(state, {"inputs": first["inputs"]}), outputs, "float32")
    assert_exchanges(pipe.compile(first).as_text(), method, axes)


def assert_exchanges(text, method, axes):
    """Messages are split, keys and values go in the branch of their stage, and no array is positions x positions."""
    n, model, rows = axes["context"], axes.get("model", 1), B // N // axes.get("fsdp", 1) // axes.get("data", 1)
    found = collectives(text)
    if n > 1:
        messages = {c.shapes for c in found if c.kind == "collective-permute" and len(c.shapes[0]) == 4}
        assert messages == {((1, rows, T // n, D),)}
    in_forward = [c for c in found if "forward/stage0" in c.name and "/shard_map/" in c.name.partition("/cond/")[2]]
    queries, keys = rows * T * (HEADS // model) * HEAD // n, rows * T * (KEY_HEADS // model) * HEAD // n
    if n == 1:
        assert not in_forward
    elif method == "ring":  # a permute is an all-gather of pairs, and half of what arrives is the device's own
        assert {len(group) for c in in_forward for group in c.groups} == {2}
        sent = sum(c.num_bytes // 2 for c in in_forward)
        assert sent == 4 * ((n - 1) * 2 * keys + (2 * queries + 2 * keys) // 2)
    else:
        keys *= n // np.gcd(n, KEY_HEADS // model)
        sent = sum(c.num_bytes * (n - 1) // n for c in in_forward)
        assert sent == 4 * (2 * queries + 2 * keys) * (n - 1) // n
    shapes = [[*map(int, dims.split(","))] for dims in re.findall(r"\w\d+\[([\d,]+)\]", text)]
    assert not [s for s in shapes if sum(size >= T for size in s) > 1]


SIZES = dict(dim=8, num_heads=2, dropout=0.0)
MODELS = {
    "transformer": (Transformer(vocab_size=12, seq_len=12, num_blocks=3, **SIZES), lambda rng: tokens(rng, B, 12)),
    "bert": (
        BERT(vocab_size=8, seq_len=12, num_blocks=1, **SIZES),
        lambda rng: {
            "tokens": tokens(rng, B, 12),
            "segments": np.zeros((B, 12), np.int32),
            "mask": np.arange(12)[None] < 6 + np.arange(B)[:, None],
        },
    ),
    "translation": (
        Translation(vocab_size=8, mlp_dim=8, num_encoder_blocks=1, num_decoder_blocks=1, tie_embeddings=False, **SIZES),
        lambda rng: {"source": tokens(rng, B, 12), "target": tokens(rng, B, 8)},
    ),
}
"""A model, and a function from a generator to inputs."""


def square(outputs, batch):
    return jnp.mean(jnp.square(outputs - 0.5))


MODEL_CASES = [
    ("translation", "one_f_one_b", {"context": 2}),
    ("bert", "zero_bubble_h1", {"context": 2}),
    ("transformer", "gpipe", {"context": 2, "model": 2}),
    ("transformer", "one_f_one_b", {"context": 3}),
    ("translation", "zero_bubble_h1", {"context": 2, "model": 2}),
    ("transformer", "one_f_one_b", {"context": 2, "fsdp": 2}),
]


@pytest.mark.exhaustive
@pytest.mark.sampled(6, others="exhaustive")
@pytest.mark.parametrize("name, schedule, axes", MODEL_CASES, ids=str)
def test_models_share_their_positions(name, schedule, axes):
    """Self-attention, causal or with padding, and attention to an encoder."""
    model, inputs = MODELS[name]
    rng = np.random.default_rng(0)
    data, plain = [{"inputs": inputs(rng)} for _ in range(2)], oracles.PlainModel(model.layers(), KEY)
    losses, _, params = oracles.train(plain, plain.params, square, optax.sgd(RATE), data)
    pipe = jpipe.Pipeline(
        model.layers(),
        loss=square,
        optimizer=optax.sgd(RATE),
        schedule=schedule_named(schedule, 2, N),
        mesh=jpipe.make_mesh(stage=2, **axes),
    )
    state = pipe.init(KEY, data[0])
    for batch, wanted in zip(data, losses, strict=True):
        state, metrics = pipe.step(state, batch)
        np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    for (path, want), got in zip(
        jax.tree.leaves_with_path(params), jax.tree.leaves(pipe.get_params(state)), strict=True
    ):
        # The gradient of the bias of an attention's keys is zero, and the bias is rounding errors of zero.
        floor = 1e-2 if "'key'" in jax.tree_util.keystr(path) else 1e-30
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * max(np.abs(want).max(), floor))
    records = {record.use: record for record in pipe.shards(data[0])}
    assert records["messages"].split["context"] > 0.9  # all but the masks


def test_a_length_that_is_not_divided():
    pipe = decoder("one_f_one_b", "ring", context=4)
    with refused("8 does not divide the 12 positions"):
        pipe.init(KEY, batches(1, 12)[0])


@pytest.mark.exhaustive
def test_idle_devices_of_gpus_gather_nothing(monkeypatch):
    """Before JAX 0.12 a branch writes a part of each large array back to its place. The part is that of a device."""
    monkeypatch.setattr(guard, "_LARGE", 0)
    monkeypatch.setitem(TARGETS, "cpu", dataclasses.replace(GPU, touches_idle=True))
    pipe = decoder("one_f_one_b", "all_to_all", context=2)
    first, *_ = batches()
    state = pipe.init(KEY, first)
    losses, _ = plain_training(pipe.get_params(state))
    found = collectives(pipe.compile(first).as_text())
    assert any("/branch_1_fun/" in c.name for c in found)
    assert not [c for c in found if "/branch_0_fun/" in c.name or c.name.endswith("dynamic_slice")]
    _, metrics = pipe.step(state, first)
    np.testing.assert_allclose(metrics["loss"], losses[0], rtol=1e-5)
