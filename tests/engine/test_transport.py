"""Messages are encoded for their transfer and nowhere else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import schedule_named
from helpers import with_nan_buffers
from skipping import DIM, LAYERS, loss_fn

import jpipe
from jpipe.engine import spec
from jpipe.lowering.channels import neighbours
from jpipe.lowering.lower import lower
from jpipe.schedules import gpipe
from jpipe.stages.messages import Codec, find_routes

# Bytes in reverse order: another dtype, another shape, and nothing is lost.
BYTES = Codec(
    "bytes",
    lambda message: {
        name: jax.lax.bitcast_convert_type(a, jnp.uint8)[..., ::-1]
        for name, a in message.items()
    },
    lambda message: {
        name: jax.lax.bitcast_convert_type(
            a[..., ::-1], jnp.int32 if "int32" in name else jnp.float32
        )
        for name, a in message.items()
    },
)


def make(schedule, overlap):
    optimizer = optax.sgd(0.01, momentum=0.9)
    options = dict(loss=loss_fn, optimizer=optimizer, overlap=overlap)
    return jpipe.Pipeline(LAYERS, schedule=schedule, **options)


def batches(number):
    rng = np.random.default_rng(0)
    shape = (number, 16, DIM)
    inputs, targets = (rng.standard_normal(shape).astype("float32") for _ in range(2))
    return [{"inputs": x, "targets": y} for x, y in zip(inputs, targets)]


@pytest.mark.parametrize(
    "name,overlap",
    [("one_f_one_b/paired", False), ("zero_bubble_v", True), ("pipemare/unit", True)],
)
@pytest.mark.sampled(3)
def test_a_lossless_codec_changes_no_number(name, overlap, monkeypatch):
    table, results, texts = schedule_named(name, 4, 8), [], []
    for codec in (None, BYTES):
        if codec is not None:
            coded = functools.partial(find_routes, codec=codec)
            monkeypatch.setattr(spec, "find_routes", coded)
        pipe = make(table, overlap)
        state = pipe.init(jax.random.key(0), batches(1)[0])
        losses = []
        for batch in batches(3):
            if table.synchronous:
                state = with_nan_buffers(state)
            state, metrics = pipe.step(state, batch)
            losses.append(np.asarray(metrics["loss"]))
        state, _ = pipe.flush(state)
        outputs = pipe.predict(state, {"inputs": batches(1)[0]["inputs"]})
        results.append((losses, pipe.get_params(state), outputs))
        texts.append(pipe.lower(batches(1)[0]).as_text())
    assert np.isfinite(results[0][0]).all()
    # XLA fuses the two programs differently, so a multiply-add rounds once in one and twice in the
    # other. On a CPU without fused multiply-add (--xla_cpu_max_isa=AVX) all bits are equal.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, *results)
    sent = [
        {line.rpartition("tensor<")[2] for line in text.splitlines() if _permutes(line)}
        for text in texts
    ]
    assert all("xui8>" in shape for shape in sent[1])
    assert sent[0] and not any("ui8" in shape for shape in sent[0])


def _permutes(line):
    return "stablehlo.collective_permute" in line


def test_messages_of_different_codecs_share_no_channel():
    routes = neighbours(2)
    assert len(lower(gpipe(2, 4), routes=routes).channels) == 1
    other = [routes[0], type(routes[1])(**{**vars(routes[1]), "codec": BYTES})]
    channels = lower(gpipe(2, 4), routes=other).channels
    assert [channel.codec for channel in channels] == [None, BYTES]
