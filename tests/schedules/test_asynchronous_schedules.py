"""PipeMare, PipeDream and 2BW: delays, versions and bubble against the papers' formulas."""

import itertools
import math

import numpy as np
import pytest
from families import ASYNCHRONOUS

from jpipe import schedules
from jpipe.layers.residuals import AT_HAND, STASHED, UNREAD
from jpipe.schedule import IDLE
from jpipe.stages.extra_args import weight_accesses

GRID = list(itertools.product(range(1, 9), (1, 2, 3, 4, 8, 16)))


def paired_delay(S, N):
    return [math.ceil((2 * (S - 1 - s) + 1) / N) for s in range(S)]


@pytest.mark.parametrize(("S", "N"), GRID)
def test_paired_delays_are_table_1_of_the_paper(S, N):
    pipemare = schedules.pipemare(S, N, ticks="paired").facts()
    pipedream = schedules.pipedream(S, N, ticks="paired").facts()
    assert pipemare.forward_delay.tolist() == paired_delay(S, N)
    assert pipemare.backward_delay.tolist() == [0] * S
    assert pipemare.weight_versions.tolist() == [1] * S
    assert pipedream.forward_delay.tolist() == paired_delay(S, N)
    assert pipedream.backward_delay.tolist() == paired_delay(S, N)
    assert pipedream.weight_versions.tolist() == [d + 1 for d in paired_delay(S, N)]


# PipeMare, Table 1, evaluated.
@pytest.mark.parametrize(
    ("S", "N", "delays"),
    [
        (4, 1, [7, 5, 3, 1]),
        (4, 2, [4, 3, 2, 1]),
        (4, 4, [2, 2, 1, 1]),
        (4, 8, [1, 1, 1, 1]),
        (8, 1, [15, 13, 11, 9, 7, 5, 3, 1]),
        (8, 2, [8, 7, 6, 5, 4, 3, 2, 1]),
        (8, 4, [4, 4, 3, 3, 2, 2, 1, 1]),
        (8, 8, [2, 2, 2, 2, 1, 1, 1, 1]),
        (8, 16, [1] * 8),
    ],
)
def test_goldens(S, N, delays):
    assert schedules.pipemare(S, N, ticks="paired").facts().forward_delay.tolist() == delays


@pytest.mark.parametrize(("S", "N"), GRID)
def test_unit_ticks_halve_the_delay(S, N):
    facts = schedules.pipedream(S, N, ticks="unit").facts()
    expected = [math.ceil((S - 1 - s) / N) for s in range(S)]
    assert facts.forward_delay.tolist() == expected
    assert facts.weight_versions.tolist() == [d + 1 for d in expected]
    assert facts.in_flight.max() <= S


def test_one_f_one_b_trace_of_pipedream():
    """The versions read by microbatches 0..9 of a time-multiplexed pipe of four stages that starts full of zeros."""
    schedule = schedules.pipedream(4, 1, ticks="unit")
    delay = -schedule.forward_versions()[0]
    trace = [[max(k - int(d), 0) for k in range(10)] for d in delay]
    assert trace == [
        [0, 0, 0, 0, 1, 2, 3, 4, 5, 6],
        [0, 0, 0, 1, 2, 3, 4, 5, 6, 7],
        [0, 0, 1, 2, 3, 4, 5, 6, 7, 8],
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
    ]


@pytest.mark.parametrize("ticks", ["paired", "unit"])
@pytest.mark.parametrize("name", ASYNCHRONOUS)
@pytest.mark.parametrize(("S", "N"), GRID)
def test_there_is_no_bubble_and_every_table_is_legal(name, S, N, ticks):
    if name == "pipedream_2bw" and N < (2 * S - 1 if ticks == "paired" else S - 1):
        return
    schedule = schedules.get(name)(S, N, ticks=ticks).check()
    assert schedule.facts().bubble == 0
    assert schedule.num_ticks == (N if ticks == "paired" else 3 * N)
    for field in ("forward", "backward"):
        cells = getattr(schedule, field)
        assert ((cells != IDLE).sum(axis=0) == N).all()


def test_methods_differ_in_versions_alone():
    tables = [schedules.get(name)(3, 8).to_dict() for name in ASYNCHRONOUS]
    for field in ("forward", "backward", "weight_grad", "update", "stage", "device"):
        assert tables[0][field] == tables[1][field] == tables[2][field]


@pytest.mark.parametrize("max_delay", [1, 2])
@pytest.mark.parametrize("ticks", ["unit", "paired"])
@pytest.mark.parametrize("S", [2, 3, 4, 8])
def test_bounded_crossing_is_what_was_asked_or_says_what_it_needs(S, ticks, max_delay):
    """PACI: at most ceil((S - 1) / N) updates between a forward and its backward, in unit ticks."""
    in_flight = S - 1 if ticks == "unit" else 2 * S - 1
    least = math.ceil(in_flight / max_delay)
    table = schedules.pipemare(S, least, ticks=ticks, max_delay=max_delay).check()
    assert table.facts().forward_delay.max() <= max_delay
    assert table == schedules.pipemare(S, least, ticks=ticks)
    assert table.facts().bubble == 0
    # Counted in the table: updates of a stage between the forward and the backward of a microbatch.
    crossed = table.backward_versions() - table.forward_versions()
    assert crossed.max() <= max_delay
    if least > 1:
        message = f"more than `max_delay` {max_delay}: .* Use {least} microbatches or"
        with pytest.raises(ValueError, match=message):
            schedules.pipemare(S, least - 1, ticks=ticks, max_delay=max_delay)


def test_bounded_crossing_with_copies():
    with pytest.raises(ValueError, match="Use more microbatches, or allow a longer"):
        schedules.pipemare(3, 2, replicas=(2, 1, 1), ticks="paired", max_delay=1)
    table = schedules.pipemare(3, 12, replicas=(2, 1, 1), ticks="paired", max_delay=1)
    assert table.facts().forward_delay.max() == 1


def test_vertical_sync_reads_what_the_first_stage_read():
    for ticks, delay in (("paired", 4), ("unit", 2)):
        facts = schedules.pipedream(4, 2, ticks, vertical_sync=True).facts()
        assert facts.forward_delay.tolist() == facts.backward_delay.tolist()
        assert facts.forward_delay.tolist() == [delay] * 4


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_the_default_is_the_layout_with_less_delay(name):
    unit = schedules.get(name)(4, 8, ticks="unit")
    paired = schedules.get(name)(4, 8, ticks="paired")
    assert schedules.get(name)(4, 8) == unit
    assert unit.facts().bubble == paired.facts().bubble == 0
    assert (unit.facts().forward_delay <= paired.facts().forward_delay).all()


@pytest.mark.parametrize(("S", "N"), GRID)
@pytest.mark.parametrize(
    ("ticks", "least"),
    [("paired", lambda S: 2 * S - 1), ("unit", lambda S: max(S - 1, 1))],
)
def test_2bw_has_two_versions_and_a_delay_of_one_or_says_what_it_needs(S, N, ticks, least):
    if N < least(S):
        with pytest.raises(
            ValueError,
            match=f"must be at least {least(S)} for {S} stages in {ticks} ticks, got {N}",
        ):
            schedules.pipedream_2bw(S, N, ticks=ticks)
        return
    facts = schedules.pipedream_2bw(S, N, ticks=ticks).facts()
    assert facts.weight_versions.tolist() == [2] * S
    assert facts.forward_delay.tolist() == facts.backward_delay.tolist() == [1] * S


def test_2bw_versions_of_the_paper():
    """Microbatch k, from 1, reads version max((k - 1) // N - 1, 0): N = 4, section 3.1."""
    schedule = schedules.pipedream_2bw(2, 4)
    versions = schedule.forward_versions() + np.arange(5)[:, None, None]  # [minibatch, N, C]
    assert np.maximum(versions[..., 0], 0).ravel()[:16].tolist() == [0] * 8 + [1] * 4 + [2] * 4


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_wrong_arguments(name):
    with pytest.raises(ValueError, match="`num_stages` must be an integer of at least 1, got 0"):
        schedules.get(name)(0, 4)
    with pytest.raises(ValueError, match="`ticks` must be 'paired' or 'unit', got 'half'"):
        schedules.get(name)(2, 4, ticks="half")


@pytest.mark.parametrize("name", schedules.names())
def test_only_the_backward_of_pipemare_has_other_weights_than_its_forward(name):
    schedule = schedules.get(name)(4, 8)
    assert weight_accesses(schedule, []) == (STASHED if name == "pipemare" else AT_HAND)


def test_weights_of_a_hook_are_not_those_of_the_forward():
    assert weight_accesses(schedules.pipedream_2bw(4, 8), ["forward"]) == STASHED
    assert weight_accesses(schedules.gpipe(4, 8), ["forward", "backward"]) == AT_HAND


def test_nothing_is_computed_again_where_nothing_is_kept_from_tick_to_tick():
    assert weight_accesses(schedules.one_f_one_b(1, 8, ticks="paired"), []) == UNREAD
    assert weight_accesses(schedules.one_f_one_b(1, 8, ticks="unit"), []) == AT_HAND
    assert weight_accesses(schedules.zero_bubble_h1(1, 8), []) == AT_HAND
