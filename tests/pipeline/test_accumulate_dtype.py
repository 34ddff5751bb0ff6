"""Sums of gradients in a wider dtype than the weights have, against sums that NumPy takes in that dtype.

The gradients of microbatches are whole numbers that bfloat16 holds, so the sums are exact: 256 and seven times 1 are
263 in float32, which the optimizer gets as 264. In bfloat16 the sum stays at 256.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import schedule_named
from flax import nnx
from helpers import timed, use_target

import jpipe
from jpipe import vocabulary
from jpipe.plan import Machine, predict

KEY = jax.random.key(7)
N, LAYERS = 8, 4
BF16 = jnp.bfloat16
OF_MICROBATCHES = np.array([256, *[1] * (N - 1)], np.float32)


def weight(shape=(3,), dtype=BF16):
    """A layer `(x, sum) -> (x, sum + x sum(w))`: the gradient of each weight is x, in each layer."""

    def init(key, inputs):
        return {"w": jnp.zeros(shape, dtype)}

    def apply(params, inputs):
        x, total = inputs[:, :1], inputs[:, 1:]
        return jnp.concatenate([x, total + params["w"].sum() * x], axis=1)

    return jpipe.InitApply(init, apply)


def loss(outputs, batch):
    return outputs[:, 1].sum() * N


def batch(replicas=1):
    """One row for each microbatch, of each replica in turn."""
    x = np.tile(OF_MICROBATCHES, replicas)
    return {"inputs": np.stack([x, np.zeros_like(x)], axis=1).astype(BF16)}


def make(schedule="gpipe", data=1, layers=None, **options):
    table = schedule_named(schedule, 2, N)
    options = {
        "optimizer": optax.sgd(1.0),
        "accumulate_dtype": jnp.float32,
        "mesh": jpipe.make_mesh(stage=table.num_devices, data=data),
    } | options
    return jpipe.Pipeline(layers or [weight()] * LAYERS, loss=loss, schedule=table, **options)


def weights(pipe, state):
    return [np.asarray(p["w"], np.float32) for p in pipe.get_params(state)]


def stepped(pipe, data=None):
    data = batch() if data is None else data
    state = pipe.init(KEY, data)
    return pipe.step(state, data)


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("gpipe", {}),
        ("zero_bubble_h1", {"loss_scale": 4.0}),
        ("one_f_one_b", {"offload": jpipe.Offload(gradients=1.0)}),
        ("gpipe/2-1", {}),
        ("pipemare", {}),
    ],
)
def test_sums_are_exact_and_rounded_once(schedule, options):
    pipe = make(schedule, **options)
    state, metrics = stepped(pipe)
    state, _ = pipe.flush(state)
    for w in weights(pipe, state):
        np.testing.assert_array_equal(w, -264)
    if schedule != "pipemare":
        norm = 263 * np.sqrt(3 * LAYERS)
        np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-6)


def test_without_it_sums_have_the_weights_dtype():
    pipe = make(accumulate_dtype=None)
    state, _ = stepped(pipe)
    for w in weights(pipe, state):
        np.testing.assert_array_equal(w, -256)


def test_the_form_for_gpus(monkeypatch):
    use_target(monkeypatch, "gpu")
    pipe = make("one_f_one_b", layers=[weight(), weight(dtype=jnp.float32)] * 2)
    state, _ = stepped(pipe)
    got = weights(pipe, state)
    for w, want in zip(got, [-264, -263] * 2, strict=True):
        np.testing.assert_array_equal(w, want)


@pytest.mark.first_case
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shard_optimizer": True},
        {"compress_gradients": jpipe.compress.Cast(jnp.float32)},
    ],
    ids=str,
)
def test_replicas_exchange_sums(options):
    """256 + 1 on one replica and 1 + 0 on the other: in bfloat16 the first sum is 256."""
    pipe = make(data=2, **options)
    data = batch(2)
    data["inputs"][N:, 0] = 1
    state, _ = stepped(pipe, data)
    want = np.float32(np.float32((263 + 8) / 2).astype(BF16))
    for w in weights(pipe, state):
        np.testing.assert_array_equal(w, -want)


@pytest.mark.first_case
@pytest.mark.parametrize(("dtype", "want"), [(jnp.float32, -136), (None, -132)])
def test_factors_of_a_sum_are_sent(dtype, want):
    """Gradients are matrices of equal numbers, which rank 1 gives up to rounding: 263 and 9, or 256 and 8."""
    layers = [weight(shape=(16, 3))] * LAYERS
    pipe = make(data=2, layers=layers, accumulate_dtype=dtype, compress_gradients=jpipe.compress.PowerSGD(1))
    data = batch(2)
    data["inputs"][N:, 0] = [2 if dtype else 1, *[1] * (N - 1)]
    state, metrics = stepped(pipe, data)
    # 48 numbers, as 19 of float32.
    ratio = 48 * jnp.dtype(dtype or BF16).itemsize / (19 * 4)
    np.testing.assert_allclose(metrics["compression"]["gradient_ratio"], ratio, rtol=1e-6)
    for w in weights(pipe, state):
        np.testing.assert_array_equal(w, want)


def test_memory_counts_the_sums():
    data = batch()
    narrow, wide = (make(accumulate_dtype=d) for d in (None, jnp.float32))
    assert wide.memory(data).gradients == 2 * narrow.memory(data).gradients
    assert wide.memory(data).weights == narrow.memory(data).weights


@pytest.mark.first_case
@pytest.mark.parametrize("options", [{}, {"num_replicas": 2}], ids=str)
def test_the_planner_counts_the_sums(tmp_path, options):
    schedule = schedule_named("one_f_one_b", 2, N)
    narrow, wide = (make("one_f_one_b", accumulate_dtype=d, boundaries=[2]) for d in (None, jnp.float32))
    machine = Machine(num_devices=4, bandwidth=(1.0,))

    def predicted(pipe):
        # Both read one file: nothing that was measured depends on the sums.
        profile = timed(pipe.profile(batch(), programs=(), cache=tmp_path / "profile.json"), forward=1.0)
        return predict(schedule, profile, [2], machine, **options)

    plain, got = predicted(narrow), predicted(wide)
    assert plain.memory.gradients == narrow.memory(batch()).gradients
    assert got.memory.gradients == wide.memory(batch()).gradients
    assert got.memory.padding == plain.memory.padding == 0
    # The replicas exchange the sums.
    assert (got.seconds > plain.seconds) == bool(options)


class Embedding(nnx.Module):
    def __init__(self, *, rngs):
        zeros = nnx.initializers.zeros
        table = nnx.with_partitioning(zeros, ("stage", None), eager_sharding=False)
        self.token = nnx.Param(table(rngs.params(), (5, 3), BF16))

    def __call__(self, tokens):
        return vocabulary.lookup(self.token[...], tokens)


@pytest.mark.first_case
@pytest.mark.parametrize("dtype,want", [(jnp.float32, -264), (None, -256)])
def test_layers_that_all_stages_run(dtype, want):
    def loss(outputs, batch):
        return (outputs.sum((1, 2)) * batch["scales"]).sum() * N

    pipe = jpipe.Pipeline(
        [Embedding, *[lambda x: x] * 2],
        loss=loss,
        schedule=schedule_named("one_f_one_b", 2, N),
        optimizer=optax.sgd(1.0),
        accumulate_dtype=dtype,
    )
    data = {
        "inputs": np.zeros((N, 1), np.int32),
        "scales": OF_MICROBATCHES.astype(BF16),
    }
    assert "embedding" in str(list(pipe.init(KEY, data).parameters))
    state, _ = stepped(pipe, data)
    (table,) = jax.tree.leaves(pipe.get_params(state)[0])
    np.testing.assert_array_equal(np.asarray(table[0], np.float32), want)
    assert not np.asarray(table[1:], np.float32).any()


def test_a_checkpoint_goes_on_in_another_dtype(tmp_path):
    narrow, wide = (make(accumulate_dtype=d) for d in (None, jnp.float32))
    state, _ = stepped(narrow)
    with jpipe.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        restored = checkpoints.restore(wide, batch())
    for restored_state in (restored.state, wide.adopt(state)):
        after, _ = wide.step(restored_state, batch())
        for w in weights(wide, after):
            np.testing.assert_array_equal(w, -256 - 264)


@pytest.mark.parametrize("dtype", ["text", jnp.int32, 32], ids=str)
def test_what_is_no_dtype(dtype):
    with pytest.raises(ValueError, match="`accumulate_dtype` must be a floating-point"):
        make(accumulate_dtype=dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
def test_sums_that_would_be_less_exact(dtype):
    pipe = make(accumulate_dtype=dtype, layers=[weight(dtype=jnp.float32)] * LAYERS)
    with pytest.raises(ValueError, match="`accumulate_dtype` must have more bits"):
        pipe.init(KEY, batch())
