"""Stages and replicas on servers with a slow network between them: where devices are, what that costs, and what wins."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from helpers import profile_of, timed

import jpipe
from jpipe.plan import Machine, choose, predict
from jpipe.plan._layouts import device_numbers, layouts, ticks_across
from jpipe.plan._machine import _links
from train import flags
from train.config import TrainConfig
from train.planned import planned_config, with_links
from train.report import plan_record, plans

PROFILE = timed(
    profile_of("mlp"),
    forward=1.0,
    forward_and_stash=1.0,
    backward=2.0,
    input_grad=1.0,
    weight_grad=1.0,
)
WEIGHTS = sum(layer.parameter_bytes for layer in PROFILE.layers)
MESSAGE = 2 * 8 * 4  # bytes of an activation between layers of width 8


@pytest.mark.parametrize(("stage", "data"), [(4, 2), (2, 4), (8, 1), (2, 2)])
def test_devices_are_those_of_the_mesh(stage, data):
    machine = Machine(8, devices_per_server=stage * data // 2)
    for dcn in layouts(machine, stage, data):
        numbers = device_numbers(machine, dcn, stage, data)
        mesh = jpipe.make_mesh(stage=stage, data=data, dcn=dcn, devices=jax.devices()[: stage * data])
        where = np.vectorize(jax.devices().index)(mesh.devices).reshape(data, stage)
        np.testing.assert_array_equal(numbers.T, where)
        assert sorted(numbers.ravel().tolist()) == list(range(stage * data))
        crossed = [len({n // machine.server_size for n in pair}) > 1 for pair in itertools.pairwise(where[0])]
        assert ticks_across(machine, dcn, stage, data) == tuple(1 + slow for slow in crossed)


def test_layouts():
    four = Machine(16, devices_per_server=4)
    assert layouts(four, 4, 1) == layouts(four, 2, 2) == [{}]  # one server is enough
    assert layouts(four, 8, 1) == [{"stage": 2}]
    assert layouts(four, 4, 4) == [{"data": 4}, {"stage": 2, "data": 2}, {"stage": 4}]
    assert layouts(four, 3, 3) == [{"data": 3}, {"stage": 3}]
    assert layouts(four, 5, 1) == [{}]  # two servers, and no equal parts
    assert device_numbers(four, {}, 5, 2).T.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_each_sum_and_message_takes_its_link():
    """Two stages, two replicas, two servers of two devices: by hand."""
    machine = Machine(4, bandwidth=(1e6, 1e3), latency=(0.25, 4.0), devices_per_server=2)
    table, N = jpipe.schedules.gpipe(2, 4), 4
    first = sum(layer.parameter_bytes for layer in PROFILE.layers[:3])
    rest = WEIGHTS - first
    seconds = [(0.25 + MESSAGE / 1e6), (4.0 + MESSAGE / 1e3)]  # of a message inside, across
    sums = [[2 * (latency + w / 2 / rate) for w in (first, rest)] for latency, rate in ((0.25, 1e6), (4.0, 1e3))]
    compute = (N + 1) * (3 * 1.0 + 3 * 2.0)
    across = {"data": (0, 1), "stage": (1, 0)}
    for axis, (message, sum_) in across.items():
        want = compute + 2 * N * seconds[message] + max(sums[sum_])
        got = predict(table, PROFILE, [3], machine, 2, dcn={axis: 2})
        np.testing.assert_allclose(got.seconds, want)
    # Without a word on it, replicas are apart.
    got = predict(table, PROFILE, [3], machine, 2)
    np.testing.assert_allclose(got.seconds, predict(table, PROFILE, [3], machine, 2, dcn={"data": 2}).seconds)


def test_a_link_of_the_network_has_a_latency():
    machine = Machine(4, bandwidth=(1e3, 1e3), latency=(1.0, 3.0), devices_per_server=2)
    assert machine.message_seconds(0, (0, 1)) == 1.0 and machine.message_seconds(0, (1, 2)) == 3.0
    assert machine.exchange_seconds(0, 2, (0, 1), to_all=True) == 2.0
    assert machine.exchange_seconds(0, 2, (0, 2), to_all=True) == 6.0
    assert Machine(2, latency=0.5).latencies == (0.5, 0.5)
    for wrong in ((0.0, -1.0), (float("inf"), 0.0)):
        with pytest.raises(ValueError, match="`latency` must be a number of seconds"):
            Machine(4, latency=wrong)


SLOW = Machine(4, bandwidth=(1e9, 400.0), devices_per_server=2)
"""A message takes 0.16 seconds across the network, and a sum of the gradients of all weights 7."""


def those(candidates, **fields):
    return [c for c in candidates if all(getattr(c, name) == value for name, value in fields.items())]


def test_what_sends_least_goes_across():
    """Messages of stages are few bytes here, and sums of gradients many: stages go across."""
    ranking = choose(PROFILE, SLOW, 16, schedule_names=["gpipe"], recompute="none")
    two = those(ranking, num_stages=2, num_replicas=2)
    assert {str(c.dcn) for c in two} == {"{'data': 2}", "{'stage': 2}"}
    (by_stage,) = (c for c in two if c.dcn == {"stage": 2} and not c.options)
    (by_data,) = (c for c in two if c.dcn == {"data": 2})
    assert by_stage.prediction.seconds < by_data.prediction.seconds
    assert "x the time" in by_data.why
    # With more microbatches there are more messages, and as many sums: replicas go across.
    ranking = choose(PROFILE, SLOW, 64, schedule_names=["gpipe"], recompute="none")
    two = [c for c in those(ranking, num_stages=2, num_replicas=2) if not c.options]
    assert min(two, key=lambda c: c.prediction.seconds).dcn == {"data": 2}


def test_slow_messages_get_a_tick_where_that_is_faster():
    best = {}
    for rate in (1e9, 30.0):  # a message takes no time, or as long as two layers
        machine = dataclasses.replace(SLOW, bandwidth=(1e9, rate))
        ranking = choose(PROFILE, machine, 16, schedule_names=["gpipe"], recompute="none")
        four = those(ranking, num_stages=4, num_replicas=1)
        assert [c.options.get("message_ticks", 1) for c in four if not c.options] == [1]
        (slow,) = (c for c in four if c.options)
        assert slow.options == {"message_ticks": (1, 2, 1)} and slow.table().message_ticks == (1, 2, 1)
        assert slow.dcn == {"stage": 2} and slow.label == "gpipe 1-2-1"
        best[rate] = min(four, key=lambda c: c.prediction.seconds)
    assert not best[1e9].options and best[30.0].options == {"message_ticks": (1, 2, 1)}


def test_one_server_has_no_layouts():
    ranking = choose(PROFILE, Machine(4), 16, schedule_names=["gpipe", "one_f_one_b"])
    assert all(not c.dcn and "message_ticks" not in c.options for c in ranking)


def test_links_are_measured():
    """Simulated devices have one kind of link, so this shows that both are timed, and no more."""
    devices = jax.devices()[:4]
    inside, between, later = _links([devices[:2], devices[2:]], 2**16)
    assert inside > 0 and between > 0 and later >= 0


def test_a_plan_is_saved_with_its_layout():
    machine = dataclasses.replace(SLOW, bandwidth=(1e9, 30.0))
    ranking = choose(PROFILE, machine, 16, schedule_names=["gpipe"], recompute="none")
    (slow,) = (c for c in ranking if c.num_stages == 4 and c.options)
    config = flags.load("configs/quickstart.py", TrainConfig)
    planned = planned_config(config, slow)
    assert planned.mesh.dcn == {"stage": 2} and planned.pipeline.options == {"message_ticks": (1, 2, 1)}
    assert planned.pipeline.table() == slow.table()
    assert plan_record(slow)["dcn"] == {"stage": 2}
    text = " ".join(plans(ranking, 16, len(ranking)).split())
    assert "stages across 2 servers, whose messages have a tick to travel" in text
    assert "replicas across 2 servers" in text


def test_links_of_a_file(tmp_path):
    path = tmp_path / "pod.toml"
    path.write_text(
        "flops = 1e13\nmemory_bandwidth = 1e12\n"
        "levels = [{size = 2, bandwidth = 1e9}, {size = 2, bandwidth = 1e8, latency = 1e-6}, "
        "{size = 2, bandwidth = 1e6, latency = 1e-3}]\n"
    )
    machine = with_links(Machine(8, tick=0.5), str(path))
    assert machine == Machine(8, bandwidth=(1e8, 1e6), latency=(1e-6, 1e-3), devices_per_server=4, tick=0.5)
    with pytest.raises(ValueError, match="`--machine` must have as many devices as `--devices`, 16, .* has 8"):
        with_links(Machine(16), str(path))
