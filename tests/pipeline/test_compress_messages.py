"""Compressed messages between stages: the numbers of the model that rounds or masks there, with fewer bytes."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import skipping
from collectives import collectives
from families import schedule_named
from flax import nnx
from helpers import assert_close, refused, with_nan_buffers

import jpipe
from jpipe.compress import Cast, PowerSGD, Quantize, Threshold, TopK

DIM, ROWS, KEY = 16, 2, jax.random.key(0)
LAYERS = [functools.partial(nnx.Linear, DIM, DIM) for _ in range(4)]


def loss(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def batches(number, N=4):
    rng = np.random.default_rng(1)
    arrays = rng.standard_normal((number, 2, ROWS * N, DIM)).astype("float32")
    return [{"inputs": x, "targets": y} for x, y in arrays]


def make(compress, schedule="one_f_one_b", S=2, N=4, layers=LAYERS, **options):
    table = schedule_named(schedule, S, N) if isinstance(schedule, str) else schedule
    options = {"loss": loss, "optimizer": optax.sgd(0.1)} | options
    return jpipe.Pipeline(layers, schedule=table, compress_messages=compress, **options)


def trained(pipe, number=3, poison=False):
    state, losses = pipe.init(KEY, batches(1)[0]), []
    for batch in batches(number):
        if poison:
            state = with_nan_buffers(state)
        state, metrics = pipe.step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


# -- Identities


@pytest.mark.first_case
@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.parametrize(
    "schedule,options",
    [
        ("one_f_one_b", {}),
        ("zero_bubble_h1", {"overlap": True}),
        ("interleaved", {"recompute": "full"}),
        ("pipemare/unit", {}),
        ("pipedream", {"recompute": "full"}),
        ("one_f_one_b/unit/1-2", {}),
    ],
)
@pytest.mark.parametrize("compress", [Threshold(1.0), TopK(1.0), Cast("float32")], ids=str)
@pytest.mark.sampled(9)
def test_without_loss_it_is_the_plain_run(schedule, options, compress):
    got, want = (trained(make(c, schedule, **options)) for c in (compress, None))
    assert got[1] == want[1]
    jax.tree.map(np.testing.assert_array_equal, got[0].parameters, want[0].parameters)


def masked_training(compressor, S, N, number, straight_through=None):
    """A plain loop: autodiff through `where(mask, x, 0)` between stages, a compressor each, microbatch by
    microbatch.
    """
    params = []
    for i, make_layer in enumerate(LAYERS):
        module = make_layer(rngs=nnx.Rngs(jax.random.fold_in(KEY, i)))
        params.append(nnx.to_pure_dict(nnx.split(module)[1]))
    per_stage = len(LAYERS) // S
    states = [compressor.init(np.zeros((ROWS, DIM), "f")) for _ in range(S - 1)]

    def forward(params, x, y, change):
        for s in range(S):
            for p in params[s * per_stage : (s + 1) * per_stage]:
                x = x @ p["kernel"] + p["bias"][None]
            if s < S - 1:
                x = change[s](x)
        return jnp.mean((x - y) ** 2)

    losses = []
    for batch in batches(number, N):
        total, values = None, []
        for m in range(N):
            x, y = (batch[n][m * ROWS : (m + 1) * ROWS] for n in ("inputs", "targets"))
            change, h = [], x
            for s in range(S - 1):
                for p in params[s * per_stage : (s + 1) * per_stage]:
                    h = h @ p["kernel"] + p["bias"][None]
                wire, states[s] = compressor.encode(h, states[s])
                arrived = compressor.decode(wire, h)
                if straight_through:
                    change.append(lambda x, a=arrived: x + jax.lax.stop_gradient(a - x))
                else:
                    mask = np.asarray(arrived) != 0
                    change.append(lambda x, mask=mask: jnp.where(mask, x, 0))
                h = arrived
            value, gradient = jax.value_and_grad(forward)(params, x, y, change)
            values.append(float(value))
            total = gradient if total is None else jax.tree.map(jnp.add, total, gradient)
        params = jax.tree.map(lambda w, g: w - 0.1 * g / N, params, total)
        losses.append(np.mean(values))
    return losses, params


@pytest.mark.first_case
@pytest.mark.parametrize(
    "schedule,S,recompute",
    [
        ("gpipe", 2, "none"),
        ("one_f_one_b", 4, "none"),
        ("one_f_one_b", 2, "full"),
        ("zero_bubble_h1", 4, "none"),
    ],
)
@pytest.mark.parametrize(
    "compressor",
    [Threshold(0.3, every=3, room=1), TopK(0.25), Threshold(0.02)],
    ids=str,
)
@pytest.mark.sampled(6)
def test_a_sparse_message_is_a_mask(schedule, S, recompute, compressor):
    """Also the gradient, and also when thresholds are kept, renewed and overflow."""
    pipe = make(compressor, schedule, S, recompute=recompute)
    state, losses = trained(pipe, 3, poison=True)
    want, params = masked_training(compressor, S, 4, 3)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert_close(pipe.get_params(state), params, "float32")


@pytest.mark.first_case
@pytest.mark.parametrize("compressor", [Quantize(8, block=8), Cast()], ids=str)
def test_a_rounded_message_passes_its_gradient(compressor):
    pipe = make({"activations": compressor}, "one_f_one_b", 4)
    state, losses = trained(pipe, 2)
    want, params = masked_training(compressor, 4, 4, 2, straight_through=True)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    # A number at the border between two codes may round both ways.
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=2e-3),
        pipe.get_params(state),
        params,
    )


@pytest.mark.parametrize(
    "compress",
    [
        {"activations": Threshold(0.3), "gradients": Quantize(8)},
        {"gradients": Quantize(4, stochastic=True)},
        PowerSGD(1),
    ],
    ids=str,
)
@pytest.mark.parametrize("schedule", ["one_f_one_b", "pipedream"])
@pytest.mark.sampled(6)
def test_training_with_any_pair_goes_on(compress, schedule):
    pipe = make(compress, schedule, S=4)
    state, losses = trained(pipe, 8)
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    outputs = pipe.predict(state, {"inputs": batches(1)[0]["inputs"]})
    assert np.isfinite(outputs).all()


@pytest.mark.exhaustive
def test_skips_are_compressed_and_integers_are_not():
    """Skips that nest and cross, with integers among them."""
    rng = np.random.default_rng(0)
    shape = (8, skipping.DIM)
    batch = {n: rng.standard_normal(shape) for n in ("inputs", "targets")}
    results = {}
    with jax.enable_x64(True):
        for compress in (None, TopK(1.0), Cast("float32"), TopK(0.5)):
            pipe = make(
                compress,
                "one_f_one_b",
                4,
                layers=skipping.LAYERS,
                loss=skipping.loss_fn,
            )
            state = pipe.init(KEY, batch)
            for _ in range(2):
                state, metrics = pipe.step(state, batch)
            results[compress] = float(metrics["loss"])
            text = pipe.lower(batch).as_text()
            sent = [t for t in text.splitlines() if "collective_permute" in t]
            assert any("xi32>" in line for line in sent)
            if compress == Cast("float32"):
                assert not any("xf64>" in line for line in sent)
    plain = results.pop(None)
    assert results[TopK(1.0)] == plain
    np.testing.assert_allclose(results[Cast("float32")], plain, rtol=1e-5)
    assert np.isfinite(results[TopK(0.5)]) and results[TopK(0.5)] != plain


class Keeping(nnx.Linear):
    def __call__(self, x):
        y = super().__call__(x)
        return jnp.tanh(y), y


class Using(nnx.Linear):
    def __call__(self, x, kept):
        return super().__call__(x) + jnp.sin(kept)


@pytest.mark.first_case
@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.parametrize(
    "schedule,boundaries,options",
    [
        ("one_f_one_b", [1, 2, 3], {}),
        ("gpipe", [1, 3], {"recompute": "full"}),
        ("zero_bubble_h1", [2], {"overlap": True}),
        ("interleaved", [1, 2, 3], {}),
        ("one_f_one_b/unit/1-2", [2], {}),
    ],
)
@pytest.mark.sampled(5)
def test_a_sparse_skip_is_a_mask(schedule, boundaries, options):
    """Of the outputs of stages, and of a skip from the first one to the last, the largest entries pass, and the
    gradients by them.
    """
    compressor = TopK(0.3)
    layers = [functools.partial(kind, DIM, DIM) for kind in (Keeping, nnx.Linear, nnx.Linear, Using)]
    layers[0], layers[-1] = jpipe.skip(layers[0], stash="kept"), jpipe.skip(layers[-1], pop="kept")
    pipe = make(compressor, schedule, len(boundaries) + 1, layers=layers, boundaries=boundaries, **options)
    state, losses = trained(pipe, 3, poison=True)

    def largest(x):
        """`x` through the compressor, with the gradient of a mask."""
        wire, _ = compressor.encode(jax.lax.stop_gradient(x), ())
        return jnp.where(compressor.decode(wire, x) != 0, x, 0)

    def forward(params, batch):
        x, kept = batch["inputs"], None
        for i, p in enumerate(params):
            x = largest(x) if i in boundaries else x
            y = x @ p["kernel"] + p["bias"][None]
            kept = largest(y) if i == 0 else kept
            x = jnp.tanh(y) if i == 0 else y
        return loss(x + jnp.sin(kept), batch)

    params, want = pipe.get_params(pipe.init(KEY, batches(1)[0])), []
    for batch in batches(3):
        microbatches = [jax.tree.map(lambda a, m=m: a[m * ROWS :][:ROWS], batch) for m in range(4)]
        values, gradients = zip(*(jax.value_and_grad(forward)(params, microbatch) for microbatch in microbatches))
        params = jax.tree.map(lambda w, *g: w - 0.1 * sum(g) / 4, params, *gradients)
        want.append(np.mean(values))
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert_close(pipe.get_params(state), params, "float32")


# -- Bytes


@pytest.mark.first_case
@pytest.mark.parametrize(
    "compress,types",
    [
        (None, ["f32"]),
        (Cast(), ["u16"]),
        (Cast("float8_e4m3fn"), ["u8"]),
        (Quantize(8), ["f32", "s8"]),
        (Quantize(4), ["f32", "u8"]),
    ],
    ids=str,
)
def test_what_travels_has_the_dtype_of_the_wire(compress, types):
    """In the compiled program; floating-point numbers travel as bits, which no compiler widens."""
    text = make(compress).lower(batches(1)[0]).compile().as_text()
    found = re.findall(r"= (\w+)\[[\d,]*\]\S* collective-permute(?:-start)?\(", text)
    assert sorted(set(found)) == types


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["one_f_one_b", "pipedream", "zero_bubble_h1"])
@pytest.mark.parametrize("density,there,back", [(0.1, 7.64, 10.04), (0.025, 20.08, 40.16), (0.005, 102.4, 204.8)])
@pytest.mark.sampled(3)
def test_bytes_of_the_compiled_program(schedule, density, there, back):
    """An activation and the places of its entries, and the gradient by them without: read from the collectives."""
    rows = {name: np.ones((64, 64), "f") for name in ("inputs", "targets")}
    layers = [functools.partial(nnx.Linear, 64, 64) for _ in range(2)]
    pipe = make(Threshold(density, room=1), schedule, 2, 2, layers=layers, overlap=True)
    permutes = [c for c in collectives(pipe.lower(rows).compile().as_text()) if c.kind == "collective-permute"]
    activation, gradient = pipe.messages(rows)
    assert sum(c.num_bytes for c in permutes) == activation.num_bytes + gradient.num_bytes
    np.testing.assert_allclose([activation.ratio, gradient.ratio], [there, back], atol=0.005)


def test_only_a_renewed_threshold_sorts():
    """No sort and no top-k outside of a branch of the compiled program."""
    text = make(Threshold(0.1)).lower(batches(1)[0]).compile().as_text()
    computations = text.split("\n\n")
    sorting = [c for c in computations if " sort(" in c or "TopK" in c or "topk" in c]
    assert sorting
    conditionals = [t for t in text.splitlines() if " conditional(" in t]
    names = {c.lstrip("%").split(" ")[0] for c in sorting}
    reached = set(names)
    for _ in range(6):  # the computations that call them
        callers = {
            c.lstrip("%").split(" ")[0]
            for c in computations
            for name in reached
            if f"to_apply=%{name}" in c or f"calls=%{name}" in c
        }
        reached |= callers
    assert any(name in t for t in conditionals for name in reached)


# -- States


@pytest.mark.exhaustive
def test_evaluation_sends_what_training_sends():
    """Also of another number of rows, and without a change of the state."""
    pipe = make(TopK(0.2), S=4)
    state, _ = trained(pipe, 1)
    x = np.random.default_rng(5).standard_normal((8, DIM)).astype("f")
    got, params = np.asarray(pipe.predict(state, {"inputs": x})), pipe.get_params(state)
    want = []
    for rows in np.split(x, 4):
        for i, p in enumerate(params):
            rows = rows @ p["kernel"] + p["bias"][None]
            if i < 3:
                wire, _ = TopK(0.2).encode(rows, ())
                rows = np.asarray(TopK(0.2).decode(wire, rows))
        want.append(rows)
    np.testing.assert_allclose(got, np.concatenate(want), rtol=1e-5, atol=1e-6)
    threshold = make(Threshold(0.3), S=4)
    state, _ = trained(threshold, 2)
    kept = jax.tree.map(np.asarray, state.message_compression)
    for rows in (8, 13):
        outputs = threshold.predict(state, {"inputs": x[:1].repeat(rows, axis=0)})
        chex.assert_shape(outputs, (rows, DIM))
    jax.tree.map(np.testing.assert_array_equal, state.message_compression, kept)


@pytest.mark.exhaustive
def test_a_resumed_run_is_the_whole_run(tmp_path):
    def pipe():
        return make(Threshold(0.3, every=5), "pipedream")

    first, data = pipe(), batches(6)
    state = first.init(KEY, data[0])
    for batch in data[:3]:
        state, _ = first.step(state, batch)
    with jpipe.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state)
        checkpoints.wait()
        second = pipe()
        restored = checkpoints.restore(second, data[0]).state
    for batch in data[3:]:
        state, want = first.step(state, batch)
        restored, got = second.step(restored, batch)
        assert float(got["loss"]) == float(want["loss"])
    jax.tree.map(np.testing.assert_array_equal, restored.parameters, state.parameters)


@pytest.mark.exhaustive
def test_other_stages_start_anew_and_say_so():
    state, _ = trained(make(Threshold(0.3)), 2)
    assert jax.tree.leaves(state.message_compression)
    with pytest.warns(UserWarning, match="compression starts anew"):
        adopted = make(Threshold(0.3), S=4).adopt(state)
    ages = [np.asarray(s.age) for s in adopted.message_compression.values()]
    assert not np.any(ages)


# -- What is refused


@pytest.mark.parametrize(
    "compress,options,message",
    [
        ("quantize", {}, "must be a compressor of `jpipe.compress`, got 'quantize'"),
        ({"forward": Cast()}, {}, r"a dict with \['forward'\]"),
        ({}, {}, "a dict with nothing"),
        ({"activations": 8}, {}, "must be a compressor of `jpipe.compress`, got 8"),
        (Cast(), {"S": 1}, "there is one stage"),
        (Cast(), {"mesh": dict(stage=2, model=2)}, r"the axes \['model'\]"),
    ],
    ids=str,
)
def test_refused(compress, options, message):
    if "mesh" in options:
        options = {"mesh": jpipe.make_mesh(**options["mesh"])}
    with refused(message):
        make(compress, **options)


def test_integers_alone_are_refused():
    layers = [
        jpipe.Function(lambda x: (x > 0).astype("int32")),
        jpipe.Function(lambda x: x * 1.0),
    ]
    pipe = make(Cast(), layers=layers)
    with pytest.raises(ValueError, match="from stage 0 to stage 1 has none: its arrays are of int32"):
        pipe.init(KEY, batches(1)[0])


def test_a_message_that_a_compressor_cannot_take_is_named():
    with pytest.raises(ValueError, match="the message from stage 0 to stage 1: as a matrix of 2 x 16"):
        make(PowerSGD(3)).init(KEY, batches(1)[0])
