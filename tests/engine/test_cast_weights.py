"""Weights that are cast once between two updates: see `jpipe.engine.cast_weights`.

Weights are float64 and layers compute in float32: XLA never leaves out this cast, as it may that to bfloat16.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import FAMILIES, cross_entropy, schedule_named
from helpers import assert_close

import jpipe
from jpipe.lowering.target import CPU, TARGETS
from jpipe.optim import correct_discrepancy, corrected_params

exhaustive = functools.partial(pytest.param, marks=pytest.mark.exhaustive)
FAMILY = FAMILIES["mlp"].in_dtype("float64")
KEY = jax.random.key(0)
N = 4
CASES = [
    # schedule, stages, options
    ("one_f_one_b", 3, {}),
    ("pipemare/paired", 3, {"backward_params": corrected_params}),
    ("pipedream/unit", 3, {}),
    ("gpipe", 2, {"ties": [[(1, "linear.kernel"), (3, "linear.kernel")]]}),
    exhaustive("zero_bubble_h1", 3, {}),
    exhaustive("gpipe", 2, {"trainable": lambda path, _: "bias" in path}),
    exhaustive("interleaved", 2, {}),
    exhaustive("pipedream_2bw/unit", 3, {}),
    exhaustive("pipemare/unit", 3, {}),
    exhaustive("pipedream/2-1", 2, {}),
    exhaustive("pipemare/paired", 2, {"ties": [[(1, "linear.kernel"), (2, "linear.kernel")]]}),
    exhaustive("one_f_one_b", 2, {"mesh": {"fsdp": 2}}),
    exhaustive("pipedream_2bw/paired", 2, {"mesh": {"data": 2}, "shard_optimizer": True}),
]


def named(value):
    """A part of the name of a case, the same in every process."""
    return " ".join(value) if isinstance(value, dict) else str(value)


def pipeline(schedule, num_stages, mesh=None, **options):
    table = schedule_named(schedule, num_stages, N)
    if mesh is not None:
        options["mesh"] = jpipe.make_mesh(stage=table.num_devices, **mesh)
    optimizer = optax.chain(optax.sgd(0.2, momentum=0.5))
    if "backward_params" in options:
        optimizer = optax.chain(optimizer, correct_discrepancy(0.5))
    return jpipe.Pipeline(
        FAMILY.layers,
        loss=cross_entropy,
        optimizer=optimizer,
        schedule=table,
        compute_dtype=jnp.float32,
        **options,
    )


def trained(monkeypatch, casts_once, *case):
    """The losses of a few steps, and the weights after them."""
    schedule, num_stages, options = case
    monkeypatch.setitem(TARGETS, "cpu", dataclasses.replace(CPU, casts_once=casts_once))
    pipe = pipeline(schedule, num_stages, **options)
    batches = FAMILY.batches(5, 2 * N)
    state, losses = pipe.init(KEY, batches[0]), []
    for batch in batches:
        state, metrics = pipe.step(state, batch)
        losses.append(np.asarray(metrics["loss"]))
    if not pipe.schedule.synchronous:
        state, _ = pipe.flush(state)
    losses.append(np.asarray(pipe.evaluate(state, batches[0])["loss"]))
    return np.array(losses), pipe.get_params(state), pipe


@pytest.mark.parametrize("schedule, num_stages, options", CASES, ids=named)
@pytest.mark.filterwarnings("ignore:.*bubble", "ignore:.*stages hold")
def test_training_is_that_of_casts_in_every_layer(schedule, num_stages, options, monkeypatch):
    with jax.enable_x64(True):
        case = schedule, num_stages, options
        want_losses, want, _ = trained(monkeypatch, False, *case)
        losses, params, pipe = trained(monkeypatch, True, *case)
        first = pipe.get_params(pipe.init(KEY, FAMILY.batches(1, 2 * N)[0]))
    np.testing.assert_allclose(losses, want_losses, rtol=1e-6)
    assert_close(params, jax.tree.map(np.asarray, want), "float32")
    moved = max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (first, params)), strict=True))
    assert moved > 1e-2  # a stale cast would show


@pytest.mark.parametrize("casts_once", [True, False])
def test_ticks_read_what_is_cast(casts_once, monkeypatch):
    with jax.enable_x64(True):
        monkeypatch.setitem(TARGETS, "cpu", dataclasses.replace(CPU, casts_once=casts_once))
        pipe = pipeline("one_f_one_b", 2)
        batch = FAMILY.batches(1, 2 * N)[0]
        text = pipe.compile(batch).as_text()
    casts = re.findall(r"= f32\S* convert\(.*", text)
    in_ticks = [line for line in casts if "while/body" in line and "/forward/" in line]
    assert bool(in_ticks) != casts_once, in_ticks
    assert any("while/body" not in line for line in casts) == casts_once
