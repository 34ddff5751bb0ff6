import itertools

import pytest

from jpipe import draw
from jpipe.schedules import forward_only

GRID = list(itertools.product(range(1, 7), range(1, 9)))


def test_picture():
    picture = draw.text(forward_only(3, 4)).split("\n\n")[1]
    assert picture.splitlines()[1:] == [
        "s0    F0 F1 F2 F3 .  .",
        "s1    .  F0 F1 F2 F3 .",
        "s2    .  .  F0 F1 F2 F3",
    ]


@pytest.mark.parametrize(("num_stages", "num_microbatches"), GRID)
def test_closed_forms(num_stages, num_microbatches):
    schedule = forward_only(num_stages, num_microbatches)
    facts = schedule.facts()
    assert schedule.forward_only
    assert facts.num_ticks == facts.makespan == num_microbatches + num_stages - 1
    assert facts.bubble == (num_stages - 1) / (num_microbatches + num_stages - 1)
    assert facts.in_flight.tolist() == [1] * num_stages


def test_stages_that_share_a_device_share_its_ticks():
    schedule = forward_only(4, 2, stage=[0, 3, 1, 2], device=[0, 0, 1, 1])
    assert schedule.num_devices == 2
    assert schedule.stage.tolist() == [0, 3, 1, 2]
    assert schedule.forward_ticks().tolist() == [[0, 3, 1, 2], [1, 4, 2, 3]]
    assert schedule.device_work().tolist() == [[1, 0], [1, 1], [0, 2], [1, 1], [1, 0]]


@pytest.mark.parametrize("stage", [[0, 1], [0, 1, 1], [1, 2, 3], 0, "ab"])
def test_a_placement_of_other_stages(stage):
    with pytest.raises(ValueError, match="`stage` must name each of the 3 stages once"):
        forward_only(3, 4, stage=stage)
