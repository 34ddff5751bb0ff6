"""Overlap of transfers with compute changes no number; without it, transfers come last."""

import functools
import re

import jax
import numpy as np
import pytest
from families import schedule_named, slow
from helpers import refused, with_nan_buffers
from skipping import batch
from skipping import pipeline as make

import jpipe

pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")


@pytest.mark.exhaustive
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name,S,recompute",
    [
        ("one_f_one_b/paired", 4, "full"),
        slow("zero_bubble_v", 4, "none"),
        ("two-columns", 4, "none"),
        slow("pipemare/unit", 4, "none"),
    ],
)
def test_overlap_changes_no_number(name, S, recompute):
    table = schedule_named(name, S, 8)
    found = []
    for overlap in (False, True):
        pipe = make(table, recompute=recompute, overlap=overlap)
        state = pipe.init(jax.random.key(0), batch())
        losses = []
        for step in range(4):
            if table.synchronous:
                state = with_nan_buffers(state)
            state, metrics = pipe.step(state, batch(step))
            losses.append(np.asarray(metrics["loss"]))
        state, _ = pipe.flush(state)
        outputs = pipe.predict(state, {"inputs": batch()["inputs"]})
        found.append((losses, pipe.get_params(state), outputs))
    assert np.isfinite(found[0][0]).all() and len(set(map(float, found[0][0]))) > 1
    # XLA fuses the two programs differently, and a fused multiply-add rounds once instead of twice.
    # Without fused multiply-adds (XLA_FLAGS=--xla_cpu_max_isa=AVX) all bits are equal.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, *found)


def test_overlap_must_be_a_bool():
    with refused("`overlap` must be True, False or None, got 'yes'"):
        make(jpipe.schedules.gpipe(2, 2), overlap="yes")
    assert make(jpipe.schedules.gpipe(2, 2)).overlap is False  # on CPU


@pytest.mark.parametrize("overlap", [False, True])
def test_a_message_that_stays_on_its_device_has_one_array(overlap):
    """Under overlap it is received from where it was sent; without, all messages of a tick are sent at its end."""
    pipe = make(schedule_named("zero_bubble_v", 4, 8), overlap=overlap)
    engine = pipe._program(batch()).engine
    local = {i for i, c in enumerate(engine.lowered.channels) if c.pairs is None}
    received = engine.layout["buffers"].shapes["received"]
    assert local and local & set(received) == (set() if overlap else local)


def scheduled_tick(text):
    """Lines of the scan's body in the compiler's order, and a function: whether a line sends."""
    # Each computation is a line that ends in a brace, its instructions, and a brace.
    bodies = dict(re.findall(r"^(?:ENTRY )?%(\S+) .*\{\n((?:  .*\n)+)\}", text, re.M))
    branches = [name for name, body in bodies.items() if "collective-permute(" in body]

    def sends(line):
        called = re.search(r"branch_computations=\{(.*?)\}", line)
        return called is not None and any(name.lstrip("%") in branches for name in called[1].split(", "))

    (tick,) = (b for b in bodies.values() if any(map(sends, b.splitlines())))
    return tick.splitlines(), sends


@pytest.mark.parametrize("name", ["one_f_one_b/paired", "zero_bubble_h1"])
@pytest.mark.sampled(2)
def test_without_overlap_messages_travel_when_all_have_computed(name):
    """Otherwise a device would wait for the others between its forward and its backward too."""
    pipe = make(schedule_named(name, 4, 8), overlap=False)
    tick, sends = scheduled_tick(pipe.compile(batch()).as_text())
    sent = [i for i, line in enumerate(tick) if sends(line)]
    computed = [
        i
        for i, line in enumerate(tick)
        if " conditional(" in line and re.search("/(forward|backward|weight_grad)/", line)
    ]
    assert len(sent) > 1 and len(computed) >= 8
    assert max(computed) < min(sent)
