"""Loops that read no metrics: without a bound on the calls in flight, CPU devices never meet."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
from jpipe._util import in_flight
from jpipe.schedules import gpipe, one_f_one_b, pipemare

STEPS = 2000
BATCH = {k: np.ones((8, 2, 2), np.float32) for k in ("inputs", "targets")}

SCHEDULES = {
    "gpipe": gpipe(2, 4),
    "one_f_one_b/paired": one_f_one_b(2, 4, ticks="paired"),
    "one_f_one_b/unit": one_f_one_b(2, 4, ticks="unit"),
    "one_f_one_b/messages of two ticks": one_f_one_b(2, 4, message_ticks=2),
    "seq_one_f_one_b": jpipe.schedules.seq_one_f_one_b(2, 4, num_slices=2),
    "interleaved": jpipe.schedules.interleaved(4, 4),
    "zero_bubble_h1": jpipe.schedules.zero_bubble_h1(2, 4),
    "zero_bubble_h2": jpipe.schedules.zero_bubble_h2(2, 4),
    "dual_pipe_v": jpipe.schedules.dual_pipe_v(4, 4),
    "zero_bubble_v": jpipe.schedules.zero_bubble_v(4, 4),
    "pipedream": jpipe.schedules.pipedream(2, 4),
    "pipedream_2bw": jpipe.schedules.pipedream_2bw(2, 4),
    "pipemare": pipemare(2, 4),
}


def pipeline(schedule):
    return jpipe.Pipeline(
        [functools.partial(nnx.Linear, 2, 2)] * schedule.num_stages,
        loss=lambda outputs, batch: jnp.mean((outputs - batch["targets"]) ** 2),
        optimizer=optax.sgd(1e-3),
        schedule=schedule,
    )


@pytest.mark.first_case
@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.sampled(10)
def test_unread_steps(name):
    pipe = pipeline(SCHEDULES[name])
    state = pipe.init(jax.random.key(0), BATCH)
    first = pipe.evaluate(state, BATCH)["loss"]
    for _ in range(STEPS):
        state, metrics = pipe.step(state, BATCH)
    assert float(metrics["loss"]) < float(first)
    assert int(state.round[0]) == STEPS


def test_every_kind_of_schedule_is_run():
    kinds = {name.partition("/")[0] for name in SCHEDULES}
    assert kinds == set(jpipe.schedules.names()) - {"forward_only"}


@pytest.mark.exhaustive
def test_two_pipelines_in_turn_with_predict_evaluate_and_flush():
    pipes = [pipeline(one_f_one_b(4, 4)), pipeline(pipemare(2, 4))]
    states = [pipe.init(jax.random.key(0), BATCH) for pipe in pipes]
    for i in range(STEPS // 4):
        for p, pipe in enumerate(pipes):
            states[p], _ = pipe.step(states[p], BATCH)
            outputs = pipe.predict(states[p], BATCH)
            result = pipe.evaluate(states[p], BATCH)
            if i % 10 == 0:
                states[p], _ = pipe.flush(states[p])
            assert len(in_flight._outputs) <= in_flight.CALLS_IN_FLIGHT
    assert np.isfinite(outputs).all() and np.isfinite(result["loss"])


def test_no_call_is_made_while_too_many_are_in_flight(monkeypatch):
    """The bound is kept by blocking on the oldest call, before the next call is made."""
    log = []

    class Output:
        def __init__(self, number):
            self.number = number

        def devices(self):
            return {jax.devices()[0]}

        def is_deleted(self):
            return self.number == 2

        def block_until_ready(self):
            log.append(self.number)

    monkeypatch.setattr(in_flight, "_outputs", type(in_flight._outputs)())
    devices = np.array(jax.devices()[:2])
    for number in range(in_flight.CALLS_IN_FLIGHT + 4):
        in_flight.wait(devices)
        assert len(in_flight._outputs) < in_flight.CALLS_IN_FLIGHT
        in_flight.add(Output(number))
    assert log == [0, 1, 3]


def test_nothing_waits_on_accelerators(monkeypatch):
    class Device:
        platform = "tpu"

    class Output:
        def devices(self):
            return {Device()}

    monkeypatch.setattr(in_flight, "_outputs", type(in_flight._outputs)())
    for _ in itertools.repeat(None, 20):
        in_flight.wait(np.array([Device()]))
        in_flight.add(Output())
    assert not in_flight._outputs
