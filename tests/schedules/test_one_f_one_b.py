import itertools

import numpy as np
import pytest

from jpipe import draw
from jpipe.schedule import IDLE
from jpipe.schedules import one_f_one_b

GRID = list(itertools.product(range(1, 7), range(1, 9)))
few_microbatches = pytest.mark.filterwarnings("ignore:one_f_one_b with num_microbatches")


def picture(schedule) -> list[str]:
    return draw.text(schedule).split("\n\n")[1].splitlines()[1:]


def test_paired_picture():
    assert picture(one_f_one_b(3, 4)) == [
        "s0    F0  F1  F2  F3  .   .   .   .",
        "      .   .   .   .   B0  B1  B2  B3*",
        "s1    .   F0  F1  F2  F3  .   .   .",
        "      .   .   .   B0  B1  B2  B3  *",
        "s2    .   .   F0  F1  F2  F3  .   .",
        "      .   .   B0  B1  B2  B3  .   *",
    ]


def test_unit_picture():
    assert picture(one_f_one_b(3, 4, ticks="unit")) == [
        "s0    F0  F1  .   .   F2  B0  W0  F3  B1  W1  .   B2  W2  .   B3  W3*",
        "s1    .   F0  .   F1  B0  W0  F2  B1  W1  F3  B2  W2  .   B3  W3  *",
        "s2    .   .   F0  B0  W0  F1  B1  W1  F2  B2  W2  F3  B3  W3  .   *",
    ]


@few_microbatches
@pytest.mark.parametrize(("num_stages", "num_microbatches"), GRID)
def test_closed_forms_of_paired_ticks(num_stages, num_microbatches):
    facts = one_f_one_b(num_stages, num_microbatches).facts()
    after = num_stages - 1 - np.arange(num_stages)
    assert facts.num_ticks == num_microbatches + 2 * num_stages - 2
    assert facts.makespan == 3 * (num_microbatches + num_stages - 1)
    assert facts.bubble == (num_stages - 1) / (num_microbatches + num_stages - 1)
    np.testing.assert_array_equal(facts.in_flight, np.minimum(num_microbatches, 2 * after + 1))


@few_microbatches
@pytest.mark.parametrize(("num_stages", "num_microbatches"), GRID)
def test_closed_forms_of_unit_ticks(num_stages, num_microbatches):
    schedule = one_f_one_b(num_stages, num_microbatches, ticks="unit")
    facts = schedule.facts()
    assert (schedule.device_work() <= 1).all()
    assert facts.makespan == 3 * num_microbatches + 2 * (num_stages - 1)
    assert facts.bubble == 2 * (num_stages - 1) / facts.makespan
    assert facts.bubble <= (num_stages - 1) / (num_microbatches + num_stages - 1)
    np.testing.assert_array_equal(
        facts.in_flight,
        np.minimum(num_microbatches, num_stages - np.arange(num_stages)),
    )


@few_microbatches
@pytest.mark.parametrize(("num_stages", "num_microbatches"), GRID)
def test_unit_ticks_warm_up_then_take_turns(num_stages, num_microbatches):
    schedule = one_f_one_b(num_stages, num_microbatches, ticks="unit")
    for s in range(num_stages):
        order = ""
        for t in range(schedule.num_ticks):
            for letter, field in (("F", "forward"), ("B", "backward")):
                order += letter * int(getattr(schedule, field)[t, s] != IDLE)
        warm_up = min(num_stages - 1 - s, num_microbatches)
        steady = num_microbatches - warm_up
        assert order == "F" * warm_up + "FB" * steady + "B" * warm_up


def test_an_unknown_layout_of_ticks():
    with pytest.raises(ValueError, match="`ticks` must be 'paired', 'unit' or 'overlapped', got 'half'"):
        one_f_one_b(4, 8, ticks="half")
