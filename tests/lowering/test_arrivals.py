"""The messages that a device receives in a branch: those for it, and no others."""

import dataclasses

import numpy as np
import pytest

import jpipe
from jpipe.lowering.channels import Route, neighbours
from jpipe.lowering.lower import lower
from jpipe.lowering.target import CPU

IN_BRANCHES = dataclasses.replace(CPU, receives_in_branches=True)
TABLES = {
    "gpipe": jpipe.schedules.gpipe(4, 4),
    "1f1b": jpipe.schedules.one_f_one_b(4, 6, ticks="paired"),
    "1f1b unit": jpipe.schedules.one_f_one_b(4, 6, ticks="unit"),
    "pipedream": jpipe.schedules.pipedream(4, 6),
}
SKIPS = [(0, 3), (0, 2), (1, 3), (1, 2)]


def routes(skips):
    to_next, to_previous = neighbours(4)
    for i, (source, target) in enumerate(skips):
        yield Route(f"skip{i}", "forward", {source: target}, ("skip", i))
        yield Route(f"skip{i}.gradient", "backward", {target: source}, ("skip", i))
    yield from (to_next, to_previous)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("schedule", TABLES.values(), ids=TABLES)
def test_all_messages_for_a_device_and_no_others(schedule, overlap):
    lowered = lower(schedule, routes=list(routes(SKIPS)), overlap=overlap, target=IN_BRANCHES)
    here = {before: np.zeros((schedule.num_ticks, 4), bool) for before in ("forward", "backward")}
    for number, channel in enumerate(lowered.channels):
        arrivals = lowered.arrivals[channel.received_before]
        for inbox, cells in channel.arrives.items():
            is_here = cells[..., 0] >= 0
            here[channel.received_before] |= is_here
            for d in range(4):
                takes = [m for m, devices in zip(arrivals.messages, arrivals.devices, strict=True) if d in devices]
                assert any((number, inbox) in messages for messages in takes) == is_here[:, d].any()
                for t in np.flatnonzero(is_here[:, d]):
                    assert (number, inbox) in arrivals.messages[arrivals.branch[t, d]]
    for before, arrivals in lowered.arrivals.items():
        np.testing.assert_array_equal(arrivals.branch >= 0, here[before])


@pytest.mark.parametrize("schedule", TABLES.values(), ids=TABLES)
def test_no_branch_where_most_messages_are_for_most_devices(schedule):
    assert lower(schedule, routes=list(routes([])), overlap=True, target=IN_BRANCHES).arrivals == {}
    assert lower(schedule, routes=list(routes(SKIPS)), overlap=True).arrivals == {}
