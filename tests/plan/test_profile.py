"""Costs of layers: equal layers cost the same, larger ones more, and bytes are counted by hand."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
from jpipe.layers import as_layers
from jpipe.plan.profile import layer_bytes, layer_seconds
from jpipe.stages import trace_layers

WIDE, NARROW = 256, 4


def loss_fn(outputs, batch):
    return outputs.mean()


def layers():
    dense = functools.partial(nnx.Linear, use_bias=False)
    return [
        functools.partial(dense, NARROW, NARROW),
        functools.partial(dense, NARROW, WIDE),
        functools.partial(dense, WIDE, WIDE),
        functools.partial(dense, WIDE, WIDE),
        functools.partial(dense, WIDE, NARROW),
    ]


def traced(size=64):
    inputs = {"inputs": jax.ShapeDtypeStruct((size, NARROW), np.float32)}
    return trace_layers(as_layers(layers()), loss_fn, inputs)


def test_bytes_by_hand():
    # Weights, gradients, Adam's two moments and its count; and of 3 microbatches the inputs.
    got = layer_bytes(traced(), optax.adam(0.1), in_flight=3)
    shapes = [(NARROW, NARROW), (NARROW, WIDE), (WIDE, WIDE), (WIDE, WIDE)]
    want = [4 * (4 * m * n) + 4 + 3 * 64 * m * 4 for m, n in shapes]
    assert got[:4] == want


def test_seconds_are_of_kinds():
    seconds = layer_seconds(traced(2048), min_seconds=0.02)
    assert seconds[2] == seconds[3] and min(seconds) > 0
    assert seconds[2] > seconds[0]  # four thousand times the work


@pytest.mark.parametrize("by", ["flops", "time", "memory"])
def test_a_pipeline_balances_by_it(by):
    pipe = jpipe.Pipeline(
        layers(),
        loss=loss_fn,
        optimizer=optax.adam(0.1),
        schedule=jpipe.schedules.gpipe(2, 2),
        boundaries=by,
    )
    batch = {"inputs": jax.ShapeDtypeStruct((2048, NARROW), np.float32)}
    starts = [record.layers[0] for record in pipe.partition(batch)]
    assert starts == [0, 3]  # the two large layers apart


def test_an_unknown_balance_is_refused():
    with pytest.raises(ValueError, match="'flops', 'time', 'memory'.*got 'speed'"):
        jpipe.Pipeline(
            layers(),
            loss=loss_fn,
            optimizer=optax.adam(0.1),
            schedule=jpipe.schedules.gpipe(2, 2),
            boundaries="speed",
        )
