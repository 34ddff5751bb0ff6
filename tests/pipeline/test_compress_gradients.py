"""Compressed gradients between replicas: equal weights everywhere, fewer bytes, and nothing lost but late."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from collectives import collectives
from families import schedule_named
from flax import nnx
from helpers import refused, use_target

import jpipe
from jpipe.compress import (
    Cast,
    PowerSGD,
    Quantize,
    StreamingPCA,
    Threshold,
    TopK,
)

DIM, KEY = 16, jax.random.key(0)
LAYERS = [functools.partial(nnx.Linear, DIM, DIM) for _ in range(4)]


def loss(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def batches(number, rows=16):
    rng = np.random.default_rng(1)
    arrays = rng.standard_normal((number, 2, rows, DIM)).astype("float32")
    return [{"inputs": x, "targets": y} for x, y in arrays]


def make(compressor, schedule="one_f_one_b", data=2, optimizer=None, **options):
    table = schedule
    if isinstance(schedule, str):
        table = schedule_named(schedule, 2, 4)
    mesh = jpipe.make_mesh(stage=table.num_devices, data=data)
    optimizer = optimizer or optax.sgd(0.5, momentum=0.9)
    options = {"loss": loss, "mesh": mesh} | options
    options["schedule"] = table
    return jpipe.Pipeline(LAYERS, optimizer=optimizer, compress_gradients=compressor, **options)


def trained(pipe, number=3, spoil=None):
    state, metrics = pipe.init(KEY, batches(1)[0]), []
    for i, batch in enumerate(batches(number)):
        if i == spoil:
            batch["inputs"][3] = np.nan
        state, of_step = pipe.step(state, batch)
        metrics.append(jax.tree.map(np.asarray, of_step))
    return state, metrics


def replicas_of(pipe, arrays):
    """`[replicas, ...]` of each array that every device of the mesh holds."""
    found = []
    for a in jax.tree.leaves(arrays):
        of_device = {s.device: np.asarray(s.data) for s in a.addressable_shards}
        axes = dict(zip(pipe.mesh.axis_names, range(2)))
        devices = np.moveaxis(pipe.mesh.devices, axes["data"], 0)
        found.append([[of_device[d] for d in row.flat] for row in devices])
    return found


EXACT = [TopK(1.0), Threshold(1.0), PowerSGD(DIM), StreamingPCA(DIM)]
LOSSY = [
    Cast(),
    Quantize(8),
    Quantize(4, stochastic=True),
    Threshold(0.1, every=2),
    TopK(0.1),
    PowerSGD(2),
    StreamingPCA(2),
]


@pytest.mark.parametrize("compressor", EXACT, ids=str)
@pytest.mark.parametrize("schedule", ["one_f_one_b", "pipedream"])
@pytest.mark.sampled(9)
def test_without_loss_it_is_the_plain_run(compressor, schedule):
    got, want = (make(c, schedule).get_params(trained(make(c, schedule))[0]) for c in (compressor, None))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def error_feedback(compressor, pipe, number):
    """Training by a loop that keeps the error of every replica: SGD without momentum, a stage at a time."""
    params, graphs = [], []
    for i, make_layer in enumerate(LAYERS):
        module = make_layer(rngs=nnx.Rngs(jax.random.fold_in(KEY, i)))
        graph, state = nnx.split(module)
        graphs.append(graph)
        params.append(nnx.to_pure_dict(state))

    def model(params, x):
        for p in params:
            x = x @ p["kernel"] + p["bias"][None]
        return x

    gradient = jax.jit(jax.grad(lambda p, x, y: jnp.mean((model(p, x) - y) ** 2)))
    leaves, tree = jax.tree.flatten(params)
    errors = [[np.zeros(a.shape, "f") for a in leaves] for _ in range(2)]
    states = [[compressor.init(a) for a in leaves] for _ in range(2)]
    for batch in batches(number):
        halves = [slice(0, 8), slice(8, 16)]
        grads = [
            jax.tree.leaves(gradient(tree.unflatten(leaves), batch["inputs"][h], batch["targets"][h])) for h in halves
        ]
        sent = [[], []]
        for r in range(2):
            for i, g in enumerate(grads[r]):
                own = np.asarray(g) + errors[r][i]
                if own.ndim == 1 and isinstance(compressor, TopK | Threshold):  # biases go whole
                    sent[r].append(own)
                else:
                    wire, states[r][i] = compressor.encode(own, states[r][i])
                    sent[r].append(np.asarray(compressor.decode(wire, own)))
                errors[r][i] = own - sent[r][i]
        leaves = [w - 0.1 * (a + b) / 2 for w, a, b in zip(leaves, *sent)]
    return tree.unflatten(leaves), errors


@pytest.mark.sampled(2)
@pytest.mark.parametrize("compressor", [Quantize(8), TopK(0.1)], ids=str)
def test_each_replica_keeps_its_error(compressor):
    pipe = make(compressor, optimizer=optax.sgd(0.1))
    state, _ = trained(pipe, 4)
    want, errors = error_feedback(compressor, pipe, 4)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
        pipe.get_params(state),
        want,
    )
    kept = replicas_of(pipe, state.gradient_compression["error"])
    for r in range(2):
        got = np.sqrt(sum(np.square(a).sum() for of in kept for a in of[r]))
        norm = np.sqrt(sum(np.square(a).sum() for a in errors[r]))
        np.testing.assert_allclose(got, norm, rtol=1e-3)


@pytest.mark.first_case
@pytest.mark.parametrize("compressor", LOSSY, ids=str)
@pytest.mark.sampled(4)
def test_replicas_stay_equal(compressor):
    pipe = make(compressor, optimizer=optax.adam(1e-2))
    state, metrics = trained(pipe, 4)
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    for replicas in replicas_of(pipe, (state.parameters, state.optimizer_state)):
        jax.tree.map(np.testing.assert_array_equal, *replicas)
    errors = replicas_of(pipe, state.gradient_compression["error"])
    assert any(np.abs(a).max() > 0 for of_replica in errors for a in of_replica[0])


@pytest.mark.first_case
@pytest.mark.parametrize(
    "compressor,dtype",
    [
        (Cast(), "u16"),
        (Cast("float8_e4m3fn"), "u8"),
        (Quantize(8), "s8"),
        (Quantize(4), "u8"),
    ],
    ids=str,
)
def test_what_travels_has_the_dtype_of_the_wire(compressor, dtype):
    """In the compiled program; floating-point numbers travel as bits, which no compiler widens."""
    text = make(compressor).lower(batches(1)[0]).compile().as_text()
    gathered = re.findall(r"= (\w+)\[([\d,]*)\]\S* all-gather\(", text)
    assert any(kind == dtype for kind, _ in gathered)
    # No gradient of a weight travels as it is.
    assert not any(f"{DIM},{DIM}" in shape for kind, shape in gathered if kind != dtype)


@pytest.mark.first_case
@pytest.mark.parametrize(
    "compressor,times",
    # The bias is whole: 4 * 128 bytes, and 65 entries of the kernel with their indices.
    [(None, 1), (Threshold(0.004, room=1), 64), (PowerSGD(1), 43)],
    ids=str,
)
def test_bytes_of_the_compiled_program(compressor, times):
    """What a device receives of its replica in a step, from the collectives."""
    dim = 128
    rows = {name: np.ones((8, dim), "f") for name in ("inputs", "targets")}
    pipe = jpipe.Pipeline(
        [functools.partial(nnx.Linear, dim, dim) for _ in range(2)],
        loss=loss,
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.gpipe(2, 2),
        mesh=jpipe.make_mesh(stage=2, data=2),
        compress_gradients=compressor,
    )
    text = pipe.lower(rows).compile().as_text()
    devices = np.arange(4).reshape(pipe.mesh.devices.shape)
    axis = pipe.mesh.axis_names.index("data")
    pairs = sorted(np.moveaxis(devices, axis, -1).reshape(-1, 2).tolist())
    received = 0.0
    for c in collectives(text):
        if c.groups is not None and sorted(map(sorted, c.groups)) == pairs:
            received += c.num_bytes / (2 if c.kind == "all-gather" else 1)
    plain = 4 * (dim * dim + dim)
    assert 0.97 * plain / times / 2 < received <= 1.03 * plain / times


@pytest.mark.sampled(2)
@pytest.mark.parametrize("compressor", [TopK(0.2), PowerSGD(2)], ids=str)
def test_a_gradient_that_is_not_finite_is_skipped_and_leaves_no_trace(compressor):
    pipe = make(compressor)
    before, _ = trained(pipe, 2)
    kept = jax.tree.map(np.asarray, before.gradient_compression)
    state, metrics = trained(pipe, 3, spoil=2)
    assert metrics[-1]["skipped_updates"].all()
    jax.tree.map(np.testing.assert_array_equal, state.gradient_compression, kept)
    jax.tree.map(np.testing.assert_array_equal, state.parameters, trained(pipe, 2)[0].parameters)
    state, of_step = pipe.step(state, batches(1)[0])
    assert np.isfinite(of_step["loss"]) and not np.any(of_step["skipped_updates"])


@pytest.mark.exhaustive
def test_the_policy_of_gpus_trains_the_same(monkeypatch):
    """Run on CPU devices."""
    messages, losses = Threshold(0.3), []
    for platform in ("cpu", "gpu"):
        use_target(monkeypatch, platform)
        pipe = make(PowerSGD(2), compress_messages=messages, overlap=platform == "gpu")
        losses.append([float(of_step["loss"]) for of_step in trained(pipe)[1]])
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.exhaustive
def test_the_loss_scale_may_move():
    """Errors have the unit of the gradient without scale: powers of two change no bit."""
    scale = jpipe.LossScale(2.0**8, growth_interval=1)
    got, want = (trained(make(TopK(0.2), loss_scale=s), 4)[0] for s in (scale, None))
    jax.tree.map(np.testing.assert_array_equal, got.parameters, want.parameters)
    jax.tree.map(
        np.testing.assert_array_equal,
        got.gradient_compression,
        want.gradient_compression,
    )


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.parametrize("data", [1, 2])
def test_copies_of_a_stage(data):
    """All replicas, along "data" and copies, have one weight; without loss it is the plain run."""
    table = schedule_named("one_f_one_b/unit/1-2", 2, 4)
    mesh = jpipe.make_mesh(stage=3, data=data)
    states = {}
    for compressor in (None, TopK(1.0), Quantize(8), PowerSGD(2)):
        pipe = make(compressor, table, mesh=mesh)
        state, _ = trained(pipe)
        states[compressor] = pipe.get_params(state)
        for replicas in replicas_of(pipe, state.parameters) if data > 1 else ():
            jax.tree.map(np.testing.assert_array_equal, *replicas)
        for a in jax.tree.leaves(state.parameters):
            shards = {s.device: np.asarray(s.data) for s in a.addressable_shards}
            places = state.program.engine.lowered.copies[1]
            row = pipe.mesh.devices.reshape(-1, 3)[0]
            copies = [shards[row[d]][:, chunk] for d, chunk in places]
            np.testing.assert_array_equal(*copies)
    close = functools.partial(np.testing.assert_allclose, atol=1e-6)
    jax.tree.map(close, states[TopK(1.0)], states[None])
    far = functools.partial(np.testing.assert_allclose, atol=0.05)
    jax.tree.map(far, states[Quantize(8)], states[None])


# -- States that go on


@pytest.mark.exhaustive
def test_a_checkpoint_keeps_what_compressors_keep(tmp_path):
    pipe = make(Threshold(0.1, every=3))
    state, _ = trained(pipe, 2)
    with jpipe.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state)
        checkpoints.wait()
        restored = checkpoints.restore(make(Threshold(0.1, every=3)), batches(1)[0])
    jax.tree.map(
        np.testing.assert_array_equal,
        restored.state.gradient_compression,
        state.gradient_compression,
    )


@pytest.mark.exhaustive
def test_an_equal_pipeline_adopts_what_compressors_keep(recwarn):
    pipe = make(PowerSGD(2))
    state, _ = trained(pipe, 2)
    other = make(PowerSGD(2), schedule="gpipe")
    adopted = other.adopt(state)
    jax.tree.map(
        np.testing.assert_array_equal,
        adopted.gradient_compression,
        state.gradient_compression,
    )
    assert not [w for w in recwarn if "starts anew" in str(w.message)]
    other.step(adopted, batches(1)[0])
    jax.tree.map(np.asarray, state.gradient_compression)  # not donated


@pytest.mark.exhaustive
@pytest.mark.parametrize("other", [PowerSGD(1), None], ids=str)
def test_another_pipeline_starts_anew_and_says_so(other, tmp_path):
    pipe = make(PowerSGD(2))
    state, _ = trained(pipe, 2)
    with pytest.warns(UserWarning, match="compression starts anew"):
        adopted = make(other).adopt(state)
    for a in jax.tree.leaves(adopted.gradient_compression.get("error", {})):
        np.testing.assert_array_equal(a, 0)
    with jpipe.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state)
        checkpoints.wait()
        with pytest.warns(UserWarning, match="compression starts anew"):
            restored = checkpoints.restore(make(other), batches(1)[0])
    jax.tree.map(np.testing.assert_array_equal, restored.state.parameters, adopted.parameters)


def test_a_state_of_other_compressors_is_refused():
    state, _ = trained(make(TopK(0.2)), 1)
    with pytest.raises(ValueError, match="compress_gradients"):
        make(TopK(0.3)).step(state, batches(1)[0])


# -- What is refused


@pytest.mark.parametrize(
    "options,message",
    [
        ({"data": 1}, "exchange, and there is one replica"),
        ({"shard_optimizer": True}, "`compress_gradients` and `shard_optimizer`"),
        (
            {"compressor": "topk"},
            "must be a compressor of `jpipe.compress`, got 'topk'",
        ),
        ({"mesh": dict(stage=2, data=2, model=2)}, r"the axes \['model'\]"),
        ({"mesh": dict(stage=2, data=2, fsdp=2)}, r"the axes \['fsdp'\]"),
    ],
)
def test_refused(options, message):
    options = {"compressor": TopK(0.1)} | options
    if "mesh" in options:
        options["mesh"] = jpipe.make_mesh(**options["mesh"])
    with refused(message):
        make(options.pop("compressor"), **options)


def test_a_rank_above_a_dim_is_refused_before_anything_is_compiled():
    pipe = make(PowerSGD(DIM + 1))
    with pytest.raises(ValueError, match=f"gradient of a weight .* at most rank {DIM}"):
        pipe.init(KEY, batches(1)[0])


@pytest.mark.exhaustive
def test_memory_counts_what_is_kept():
    plain, compressed = (make(c).memory(batches(1)[0]) for c in (None, TopK(0.1)))
    assert plain.compression == 0
    assert compressed.compression == plain.gradients
