"""What docs/schedules.md says of memory, counted from tables and from pipelines."""

import pathlib
import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
from jpipe import schedules

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "schedules.md"
ROW = r"^\| `(\w+\(.*?\))` \| (.*?) \| ([\d.]+) \|$"
ROWS = re.findall(ROW, PAGE.read_text().split("## How much memory")[1], flags=re.M)


def build(call: str) -> jpipe.Schedule:
    return eval(f"schedules.{call}", {"schedules": schedules})


def activations(schedule: jpipe.Schedule) -> int:
    """Bytes of activations of eight pairs of a linear layer and a tanh."""
    layers = [
        layer
        for _ in range(8)
        for layer in (
            lambda rngs: nnx.Linear(128, 128, rngs=rngs),
            jpipe.Function(jnp.tanh),
        )
    ]
    pipe = jpipe.Pipeline(
        layers,
        loss=lambda outputs, batch: ((outputs - batch["targets"]) ** 2).mean(),
        optimizer=optax.sgd(0.1),
        schedule=schedule,
    )
    rows = np.zeros((256, 128), np.float32)
    return pipe.memory({"inputs": rows, "targets": rows}).activations


def test_the_page_has_all_synchronous_schedules():
    synchronous = {call.split("(")[0] for call, _, _ in ROWS}
    every = set(schedules.names())
    # Slices are of positions, which the layers below do not have.
    assert every - synchronous == {"pipedream", "pipedream_2bw", "pipemare", "seq_one_f_one_b"}


@pytest.mark.parametrize(("call", "rings"), [row[:2] for row in ROWS])
def test_rings_of_a_device(call, rings):
    """One ring per device, as long as the most microbatches in flight at one time."""
    schedule = build(call)
    first, last = schedule.forward_ticks(), schedule.weight_grad_ticks()
    most = 0
    for t in range(schedule.num_ticks):
        in_flight = ((first <= t) & (t <= last)).sum(axis=0)
        most = max(most, np.bincount(schedule.device, weights=in_flight).max())
    share = schedule.num_stages // schedule.num_devices
    words = f"{most:g} / {share} = {most / share:g}"
    assert rings == (words if share > 1 else f"{most:g}")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("call", "measured"), [(row[0], row[2]) for row in ROWS])
@pytest.mark.sampled(4)
def test_bytes_of_activations(call, measured):
    unit = activations(schedules.one_f_one_b(4, 8, ticks="unit"))
    assert f"{activations(build(call)) / unit:.2f}" == measured


def test_what_gpipe_takes_more_with_many_microbatches():
    ratio = activations(schedules.gpipe(4, 16))
    ratio /= activations(schedules.one_f_one_b(4, 16))
    assert f"{ratio:.1f}" == "2.0"
    assert "With N = 16 GPipe takes 2.0 times as much" in PAGE.read_text()
