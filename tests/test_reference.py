"""The reference, which walks a table, against plain training, which knows none, and against the engine."""

import dataclasses

import jax
import numpy as np
import optax
import oracles
import pytest
from families import FAMILIES, cross_entropy, schedule_named
from helpers import assert_close

import jpipe
from jpipe.reference import Reference

FAMILY, OPTIMIZER = FAMILIES["mlp"], optax.sgd(1.0, momentum=0.5)
CASES = [
    ("gpipe", 3, 4),
    ("one_f_one_b/paired", 4, 4),
    ("one_f_one_b/unit", 3, 4),
    ("hand-written", 2, 3),
    ("two-columns", 4, 3),
    ("v", 4, 4),
    ("gpipe/3-1", 2, 7),
    ("one_f_one_b/paired/1-2-3", 3, 6),
    ("one_f_one_b/unit/2-1", 2, 4),
]


def trained(schedule, num_steps):
    """What plain training says, and what the reference does."""
    N = schedule.num_microbatches
    plain = oracles.PlainModel(FAMILY.layers, jax.random.key(7))
    batches = FAMILY.batches(num_steps, 2 * N)
    reference = Reference(FAMILY.layers, cross_entropy, OPTIMIZER, schedule, params=plain.params)
    losses = [reference.step(batch) for batch in batches]
    return plain, batches, losses, reference.get_params()


@pytest.mark.first_case
@pytest.mark.parametrize(("name", "S", "N"), CASES)
@pytest.mark.sampled(3)
def test_equals_plain_training(name, S, N):
    plain, batches, losses, params = trained(schedule_named(name, S, N), 3)
    want, _, want_params = oracles.train(plain, plain.params, cross_entropy, OPTIMIZER, batches)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert_close(params, want_params, "float32")


@pytest.mark.first_case
@pytest.mark.parametrize(("name", "S", "N"), [CASES[2], CASES[3]])
def test_equals_the_engine(name, S, N):
    schedule = schedule_named(name, S, N)
    plain, batches, losses, params = trained(schedule, 2)
    pipe = jpipe.Pipeline(FAMILY.layers, loss=cross_entropy, optimizer=OPTIMIZER, schedule=schedule)
    state = pipe.init(jax.random.key(0), batches[0], params=plain.params)
    for batch, loss in zip(batches, losses):
        state, metrics = pipe.step(state, batch)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert_close(pipe.get_params(state), params, "float32")


def test_what_the_table_does_not_provide_is_missing():
    """A reference that went on without its inputs would prove nothing."""
    schedule = schedule_named("gpipe", 2, 2)
    forward = schedule.forward.copy()
    forward[:, 1] = forward[:, 0]  # the second stage does not wait for the first
    version = np.where(forward == jpipe.IDLE, forward, 0)
    early = dataclasses.replace(schedule, forward=forward, forward_version=version)
    plain = oracles.PlainModel(FAMILY.layers, jax.random.key(7))
    reference = Reference(FAMILY.layers, cross_entropy, OPTIMIZER, schedule, params=plain.params)
    reference.schedule = early  # which `check` would refuse
    with pytest.raises(KeyError, match="activation"):
        reference.step(FAMILY.batches(1, 4)[0])
