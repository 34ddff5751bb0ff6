"""Gradients that are accumulated as factors: equal to a plain loop of the recursion, and never formed before the
update.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import schedule_named
from flax import nnx
from helpers import refused, use_target

import jpipe
from jpipe.compress import PowerSGD, StreamingPCA

KEY, RANK, N = jax.random.key(0), 2, 4
WIDTHS = (12, 20, 20, 20, 8)
LAYERS = [functools.partial(nnx.Linear, a, b) for a, b in zip(WIDTHS, WIDTHS[1:], strict=False)]
close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-6)


def loss(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def batches(number, rows=16):
    rng = np.random.default_rng(1)
    inputs = rng.standard_normal((number, rows, WIDTHS[0])).astype("float32")
    targets = rng.standard_normal((number, rows, WIDTHS[-1])).astype("float32")
    return [{"inputs": x, "targets": y} for x, y in zip(inputs, targets)]


def make(schedule="one_f_one_b", data=1, layers=LAYERS, **options):
    table = schedule
    if isinstance(schedule, str):
        table = schedule_named(schedule, 2, N)
    options = {
        "loss": loss,
        "mesh": jpipe.make_mesh(stage=table.num_devices, data=data),
        "optimizer": optax.sgd(0.2, momentum=0.9),
        "accumulate_gradients": StreamingPCA(RANK),
    } | options
    return jpipe.Pipeline(layers, schedule=table, **options)


def trained(pipe, data=None, spoil=None):
    data = batches(3) if data is None else data
    state, metrics = pipe.init(KEY, data[0]), []
    for i, batch in enumerate(data):
        if i == spoil:
            batch = batch | {"inputs": np.full_like(batch["inputs"], np.nan)}
        state, of_step = pipe.step(state, batch)
        metrics.append(jax.tree.map(np.asarray, of_step))
    return state, metrics


# -- The recursion, in NumPy


def basis(columns):
    q, r = np.linalg.qr(columns)
    return q * np.where(np.diag(r) < 0, -1, 1)


def updated(factors, x, d, i):
    """Part i of a batch (Huang et al., 2020), in the form that allows sigma = 0."""
    X, D, sigma = factors
    keep, new, s = (i + 1) / (i + 2), 1 / (i + 2), len(x)
    signs = np.where(sigma < 0, -1, 1)
    X = basis((keep * X * sigma + new * x.T @ (d @ D) / s) * signs)
    D = basis((keep * D * sigma + new * d.T @ (x @ X) / s) * signs)
    return X, D, keep * sigma + new * ((d @ D) * (x @ X)).sum(0) / s


def by_hand(params, data, replicas=1, learning_rate=0.2, momentum=0.9):
    """Weights, sigmas and gradient norms of a linear model, all in float64."""
    weights = [np.asarray(p["kernel"], np.float64) for p in params]
    biases = [np.asarray(p["bias"], np.float64) for p in params]

    def first(n):
        like = jax.ShapeDtypeStruct((n, n), np.float32)
        return np.asarray(StreamingPCA(RANK).init(like).x, np.float64)

    factors = [(first(a), first(b), np.zeros(RANK)) for a, b in map(np.shape, weights)]
    moments = [np.zeros_like(w) for w in (*weights, *biases)]
    norms = []
    for batch in data:
        rows = [np.split(batch[n], replicas) for n in ("inputs", "targets")]
        of_biases = [np.zeros_like(b) for b in biases]
        for i in range(N):
            # A part has microbatch i of every replica.
            x, y = (np.concatenate([np.split(part, N)[i] for part in of_name]) for of_name in rows)
            values = [x.astype(np.float64)]
            for w, b in zip(weights, biases):
                values.append(values[-1] @ w + b)
            # Gradients of rows: the mean over them is the gradient of the microbatch.
            d = 2 * (values[-1] - y) / y.shape[1]
            for layer in reversed(range(len(weights))):
                factors[layer] = updated(factors[layer], values[layer], d, i)
                of_biases[layer] += d.mean(0) / N
                d = d @ weights[layer].T
        of_weights = [(X * sigma) @ D.T for X, D, sigma in factors]
        gradients = [*of_weights, *of_biases]
        norms.append(np.sqrt(sum((g**2).sum() for g in gradients)))
        moments = [momentum * m + g for m, g in zip(moments, gradients)]
        steps = [learning_rate * m for m in moments]
        weights = [w - s for w, s in zip(weights, steps)]
        biases = [b - s for b, s in zip(biases, steps[len(weights) :])]
    params = [{"kernel": w, "bias": b} for w, b in zip(weights, biases)]
    return params, [sigma for *_, sigma in factors], norms


def sigmas_in(state):
    arrays = state.gradient_compression["factors"]
    found = [np.ravel(a) for name, a in arrays.items() if name.endswith(f"[{RANK}]")]
    return np.sort(np.abs(np.concatenate(found)))


# -- Equal to it


SYNCHRONOUS = ["gpipe", "one_f_one_b", "one_f_one_b/unit", "zero_bubble_h1"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
@pytest.mark.sampled(9)
def test_equals_the_recursion_by_hand(schedule, data):
    pipe = make(schedule, data)
    state, metrics = trained(pipe)
    params, _, norms = by_hand(pipe.get_params(pipe.init(KEY, batches(1)[0])), batches(3), data)
    jax.tree.map(close, pipe.get_params(state), params)
    close([m["gradient_norm"] for m in metrics], norms)


@pytest.mark.exhaustive
def test_equals_the_recursion_on_interleaved_stages():
    pipe = make(jpipe.schedules.interleaved(4, N, num_chunks=2))
    state, _ = trained(pipe)
    params, *_ = by_hand(pipe.get_params(pipe.init(KEY, batches(1)[0])), batches(3))
    jax.tree.map(close, pipe.get_params(state), params)


@pytest.mark.exhaustive
@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["pipemare", "pipedream", "pipedream_2bw"])
def test_asynchronous_tables_update_in_order(schedule):
    """With weights that stay, nothing is late: the sigmas are those of the plain loop."""
    pipe = make(schedule, optimizer=optax.sgd(0.0))
    state, _ = trained(pipe)
    state, _ = pipe.flush(state)
    first = pipe.get_params(state)
    _, sigmas, _ = by_hand(first, batches(3), learning_rate=0.0)
    want = np.sort(np.abs(np.concatenate(sigmas)))
    got = sigmas_in(state)
    close(got[-len(want) :], want)
    np.testing.assert_array_equal(got[: -len(want)], 0)  # rows of no layer


@pytest.mark.exhaustive
def test_replicas_are_equal():
    state, _ = trained(make(data=2, optimizer=optax.adam(1e-2)))
    kept = state.parameters, state.optimizer_state, state.gradient_compression
    for a in jax.tree.leaves(kept):
        shards = {s.device.id: np.asarray(s.data) for s in a.addressable_shards}
        axis = state.program.settings.mesh.axis_names.index("data")
        devices = np.moveaxis(state.program.settings.mesh.devices, axis, 0)
        for own, other in zip(*[[d.id for d in row.flat] for row in devices]):
            np.testing.assert_array_equal(shards[own], shards[other])


@pytest.mark.exhaustive
def test_clipping_and_recompute():
    """The norm that clips is that of the whole gradient, and recomputing changes nothing."""
    clipped = optax.chain(jpipe.optim.clip_by_global_norm(0.3), optax.sgd(0.2))
    states = [trained(make(optimizer=clipped, recompute=recompute))[0] for recompute in ("none", "full")]
    jax.tree.map(close, *(s.parameters for s in states))
    pipe = make(optimizer=clipped)
    start = pipe.get_params(pipe.init(KEY, batches(1)[0]))
    batch = batches(1)[0]
    _, _, (norm,) = by_hand(start, [batch])
    params, *_ = by_hand(start, [batch], learning_rate=0.2 * min(1, 0.3 / norm))
    jax.tree.map(close, pipe.get_params(trained(pipe, [batch])[0]), params)
    assert norm > 0.3


@pytest.mark.exhaustive
def test_the_policy_of_gpus_trains_the_same(monkeypatch):
    """Run on CPU devices."""
    found = []
    for platform in ("cpu", "gpu"):
        use_target(monkeypatch, platform)
        pipe = make(overlap=platform == "gpu")
        found.append(pipe.get_params(trained(pipe)[0]))
    jax.tree.map(close, *found)


@pytest.mark.exhaustive
def test_the_loss_scale_may_move():
    scale = jpipe.LossScale(2.0**8, growth_interval=1)
    got, want = (trained(make(loss_scale=s)) for s in (scale, None))
    jax.tree.map(close, got[0].parameters, want[0].parameters)
    for a, b in zip(got[1], want[1]):
        close(a["gradient_norm"], b["gradient_norm"])


@pytest.mark.exhaustive
def test_a_gradient_that_is_not_finite_is_skipped():
    pipe = make()
    state, metrics = trained(pipe, spoil=1)
    assert [bool(m["skipped_updates"].any()) for m in metrics] == [False, True, False]
    assert np.isfinite(metrics[-1]["loss"])
    chex.assert_tree_all_finite((state.parameters, state.gradient_compression))


# -- What is a product, and what is not


class Mixed(nnx.Module):
    """Weights of several dims, in bfloat16, beside an embedding and a norm."""

    def __init__(self, rngs):
        self.tokens = nnx.Embed(32, 24, rngs=rngs)
        self.heads = nnx.LinearGeneral(24, (2, 12), rngs=rngs, dtype=jnp.bfloat16)
        self.out = nnx.LinearGeneral((2, 12), 24, axis=(-2, -1), rngs=rngs)
        self.norm = nnx.LayerNorm(24, rngs=rngs)

    def __call__(self, x):
        h = self.heads(self.tokens(x)).astype(jnp.float32)
        return self.norm(self.out(h))


@pytest.mark.exhaustive
def test_products_of_any_shape_are_the_gradients():
    """`Product.gradient` of each weight is the gradient that the plain backward computes."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 32, (4, 6))
    layers = [functools.partial(Mixed), functools.partial(nnx.Linear, 24, 24)]
    batch = {"inputs": x, "targets": rng.standard_normal((4, 6, 24)).astype("f")}
    kinds = []
    for accumulate in (StreamingPCA(1), None):
        pipe = make(jpipe.schedules.gpipe(2, 1), layers=layers, accumulate_gradients=accumulate)
        state = pipe.init(KEY, batch)
        kinds.append(state.program.stages.layer_kinds)
        params = pipe.get_params(state)
    names = set()
    for layer, (ours, plain) in enumerate(zip(*kinds, strict=True)):
        leaves, _ = jax.tree.flatten_with_path(params[layer])
        weights = [a for _, a in leaves]
        inputs = [x] if layer == 0 else [batch["targets"]]
        extra = [jnp.zeros(a.shape, a.dtype) for a in ours.extra]
        outputs, stash, _ = ours.forward_and_stash(weights, inputs, extra)
        _, plain_stash, _ = plain.forward_and_stash(weights, inputs, extra)
        gy = [jnp.asarray(rng.standard_normal(y.shape), y.dtype) for y in outputs]
        got, _ = ours.backward(weights, stash, gy)
        want, _ = plain.backward(weights, plain_stash, gy)
        for (path, _), a, b, form in zip(leaves, got, want, ours.products, strict=True):
            if form is not None:
                names.add((layer, jax.tree_util.keystr(path)))
                a = a.gradient()
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert names == {
        (0, "['heads']['kernel']"),
        (0, "['out']['kernel']"),
        (1, "['kernel']"),
    }
    make(jpipe.schedules.gpipe(2, 1), layers=layers).step(state_of(layers, batch), batch)


def state_of(layers, batch):
    return make(jpipe.schedules.gpipe(2, 1), layers=layers).init(KEY, batch)


@pytest.mark.exhaustive
def test_tied_weights_are_accumulated_as_they_are():
    shapes = ((12, 12), (12, 20), (20, 12), (12, 12))
    layers = [functools.partial(nnx.Linear, *shape) for shape in shapes]
    x, y = np.random.default_rng(0).standard_normal((2, 16, 12)).astype("f")
    batch = {"inputs": x, "targets": y}
    found = []
    for accumulate in (None, StreamingPCA(1)):
        ties = [[(0, "kernel"), (3, "kernel")]]
        pipe = make("gpipe", layers=layers, ties=ties, accumulate_gradients=accumulate)
        found.append(pipe.get_params(trained(pipe, [batch])[0]))
    plain, ours = found
    np.testing.assert_array_equal(ours[0]["kernel"], ours[3]["kernel"])
    close(ours[0]["kernel"], plain[0]["kernel"])
    assert np.abs(ours[1]["kernel"] - plain[1]["kernel"]).max() > 1e-3


# -- Memory


@pytest.mark.exhaustive
def test_gradients_take_the_memory_of_factors():
    """k (a + b + 1) numbers for a weight, and a number for each bias: 14 times fewer here."""
    dim, rank = 128, 4
    layers = [functools.partial(nnx.Linear, dim, dim) for _ in range(2)]
    rows = {name: np.ones((8, dim), "f") for name in ("inputs", "targets")}
    memory, arguments = [], []
    for accumulate in (None, StreamingPCA(rank)):
        pipe = make("gpipe", layers=layers, accumulate_gradients=accumulate)
        memory.append(pipe.memory(rows))
        compiled = pipe.compile(rows).memory_analysis()
        arguments.append(compiled.argument_size_in_bytes)
    plain, ours = memory
    assert plain.gradients == 4 * (dim * dim + dim)
    assert ours.gradients == 4 * (rank * (2 * dim + 1) + dim)
    assert (ours.compression, ours.padding) == (0, 0)
    assert ours.weights == plain.weights and ours.optimizer == plain.optimizer
    # The compiler reserves as much less, but for the counters of the step.
    saved = plain.gradients - ours.gradients
    assert abs(arguments[0] - arguments[1] - saved) < 200


def test_messages_count_what_replicas_exchange():
    """Means of products of every microbatch, and of the biases: 2 (n - 1) / n of the bytes."""
    (*_, last) = make(data=2).messages(batches(1)[0])
    pairs = (20, 20), (20, 8)
    factors = sum(RANK * (a + b + 1) for a, b in pairs)
    biases = sum(b for _, b in pairs)
    assert last.source == last.target == 1
    assert last.num_bytes == 4 * (N * factors + biases)
    assert last.plain_bytes == 4 * (sum(a * b for a, b in pairs) + biases)


# -- States that go on


@pytest.mark.exhaustive
def test_checkpoints_and_adopt_keep_factors(tmp_path):
    pipe = make()
    state, _ = trained(pipe)
    with jpipe.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state)
        checkpoints.wait()
        restored = checkpoints.restore(make(), batches(1)[0]).state
    adopted = make("gpipe").adopt(state)
    for other in (restored, adopted):
        jax.tree.map(
            np.testing.assert_array_equal,
            other.gradient_compression,
            state.gradient_compression,
        )
    with pytest.warns(UserWarning, match="compression starts anew"):
        make(accumulate_gradients=StreamingPCA(1)).adopt(state)
    with pytest.warns(UserWarning, match="compression starts anew"):
        make(accumulate_gradients=None).adopt(state)


# -- Bad input


@pytest.mark.parametrize(
    "options,message",
    [
        ({"accumulate_gradients": 4}, "must be a `jpipe.compress.StreamingPCA`"),
        ({"accumulate_gradients": PowerSGD(2)}, "they are for `compress_gradients`"),
        (
            {"compress_gradients": PowerSGD(2)},
            "`accumulate_gradients` and `compress_gradients` exclude each other",
        ),
        (
            {"shard_optimizer": True},
            "`accumulate_gradients` and `shard_optimizer` exclude each other",
        ),
        (
            {"schedule": "one_f_one_b/unit/1-2", "data": 1},
            "several copies of a stage",
        ),
        ({"accumulate_gradients": StreamingPCA(12)}, "no weight has a gradient that"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:20],
)
@pytest.mark.filterwarnings("ignore:.*bubble")
def test_refusals(options, message):
    with refused(message):
        make(**{"data": 2} | options).init(KEY, batches(1)[0])


def test_a_mesh_that_splits_weights_is_refused():
    with refused("whole on a device"):
        make(mesh=jpipe.make_mesh(stage=2, fsdp=2))
