"""Plans whose devices keep a part in host memory, against pipelines and against arithmetic."""

import dataclasses
import math

import optax
import pytest
from families import FAMILIES, cross_entropy
from helpers import profile_of, timed

import jpipe
from jpipe import Offload
from jpipe.plan import Machine, choose, predict
from train import flags
from train.config import TrainConfig
from train.planned import planned_config

PROFILE = timed(
    profile_of("mlp"),
    forward=1.0,
    forward_and_stash=1.0,
    backward=2.0,
    input_grad=1.0,
    weight_grad=1.0,
)
TABLE = jpipe.schedules.gpipe(3, 8)


@pytest.mark.first_case
@pytest.mark.parametrize(
    "table, slots, others",
    [
        (TABLE, None, 0.0),
        (TABLE, 4, 1.0),
        (TABLE, 2, 1.0),
        (jpipe.schedules.pipemare(3, 8, ticks="paired"), 3, 0.0),
    ],
)
def test_bytes_are_those_of_the_pipeline(table, slots, others):
    offload = Offload(1.0, slots, weights=others, gradients=others)
    pipe = jpipe.Pipeline(
        FAMILIES["mlp"].layers,
        loss=cross_entropy,
        optimizer=optax.adam(0.1),
        schedule=table,
        boundaries=[1, 3],
        offload=offload,
    )
    batch = FAMILIES["mlp"].batches(1, 16)[0]
    groups = pipe._program(batch).engine.layout.groups
    got = predict(table, PROFILE, [1, 3], Machine(3), offload=offload)
    assert got.memory.optimizer == 0
    assert (got.memory.weights == 0) == (got.memory.gradients == 0) == (others == 1)
    # Counters stay on the device, and rows of pools in host memory are not joined in vectors.
    of_state = sum(
        groups[name].num_bytes("cpu", "pinned_host") for name in ("optimizer_state", "parameters", "gradients")
    )
    stashes = sum(
        a.size * a.dtype.itemsize for arrays in groups["buffers"].shapes["host_stash"].values() for a in arrays.values()
    )
    assert stashes <= got.memory.host <= 1.2 * (of_state + stashes)
    in_flight = groups["buffers"].num_bytes("cpu")
    assert 0 <= in_flight - got.memory.activations <= 4


def test_seconds_are_bytes_by_bandwidth():
    plain = predict(TABLE, PROFILE, [1, 3], Machine(3))
    half = predict(
        TABLE,
        PROFILE,
        [1, 3],
        Machine(3),
        offload=Offload(0.5),
        host_bandwidth=1000.0,
    )
    moved = 2 * 0.5 * plain.memory.optimizer
    assert half.host_seconds == pytest.approx(moved / 1000)
    assert half.seconds == pytest.approx(plain.seconds + moved / 1000)
    assert half.num_bytes == pytest.approx(plain.num_bytes - 0.5 * plain.memory.optimizer, abs=1)


def test_weights_and_gradients_move_with_every_microbatch():
    plain = predict(TABLE, PROFILE, [1, 3], Machine(3)).memory
    N = TABLE.num_microbatches
    for options, moved in (
        ({"weights": 0.5}, (2 * N + 2) * plain.weights),
        ({"gradients": 0.5}, (2 * N + 3) * plain.gradients),
    ):
        offload = dict(offload=Offload(**options), host_bandwidth=1000.0)
        got = predict(TABLE, PROFILE, [1, 3], Machine(3), **offload)
        assert got.host_seconds == pytest.approx(0.5 * moved / 1000)
        (name,) = options
        assert got.memory.host == getattr(plain, name) // 2


def tight(others=0.0):
    """A machine into which no plan fits without host memory; `others`: nor with the optimizer's state alone there."""
    smallest = min(
        (c.prediction for c in choose(PROFILE, Machine(3), 16)),
        key=lambda prediction: prediction.num_bytes,
    )
    limit = smallest.num_bytes - (1.0 if others else 0.3) * smallest.memory.optimizer
    limit -= others * (smallest.memory.weights + smallest.memory.gradients)
    return Machine(3, memory_limit=limit)


@pytest.mark.exhaustive
def test_plans_that_fit_only_with_host_memory():
    machine = tight()
    assert not choose(PROFILE, machine, 16)[0].fits
    for bandwidth in (1e3, 1e9):
        found = choose(PROFILE, machine, 16, host_bandwidth=bandwidth)
        best = found[0]
        assert best.fits and best.offload
        assert best.prediction.num_bytes <= machine.memory_limit
        again = predict(
            best.table(),
            dataclasses.replace(PROFILE, recompute=best.recompute),
            best.boundaries,
            machine,
            best.num_replicas,
            offload=best.offload,
            host_bandwidth=bandwidth,
        )
        assert again.seconds == best.prediction.seconds
        assert again.host_seconds > 0
        # Where transfers take time, weights and gradients stay.
        assert bandwidth > 1e3 or not best.offload.weights
    machine = tight(0.2)
    best = choose(PROFILE, machine, 16, host_bandwidth=1e9)[0]
    assert best.fits and best.prediction.num_bytes <= machine.memory_limit
    assert best.offload.optimizer == 1 and 0 < best.offload.weights < 1
    assert best.offload.gradients == best.offload.weights
    # Where all fits, nothing is in host memory.
    assert not any(c.offload for c in choose(PROFILE, Machine(3), 16, host_bandwidth=1.0))


def test_wrong_bandwidths_are_refused():
    for bandwidth in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match="above 0, or None, got"):
            choose(PROFILE, Machine(2), 16, host_bandwidth=bandwidth)


@pytest.mark.exhaustive
def test_a_saved_plan_says_what_is_in_host_memory():
    config = flags.load("configs/quickstart.py", TrainConfig)
    machine = tight()
    best = choose(PROFILE, machine, 16, host_bandwidth=1e9)[0]
    mesh = planned_config(config, best).mesh
    assert mesh.offload() == best.offload and mesh.device_memory is None
