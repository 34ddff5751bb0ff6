import itertools

import numpy as np
import pytest

from jpipe import draw
from jpipe.schedules import gpipe

GRID = list(itertools.product(range(1, 7), range(1, 9)))


def test_picture():
    picture = draw.text(gpipe(3, 4)).split("\n\n")[1]
    assert picture.splitlines()[1:] == [
        "s0    F0  F1  F2  F3  .   .   .   .   B0  B1  B2  B3*",
        "s1    .   F0  F1  F2  F3  .   .   B0  B1  B2  B3  *",
        "s2    .   .   F0  F1  F2  F3  B0  B1  B2  B3  .   *",
    ]


@pytest.mark.filterwarnings("ignore:gpipe with num_microbatches")
@pytest.mark.parametrize(("num_stages", "num_microbatches"), GRID)
def test_closed_forms(num_stages, num_microbatches):
    facts = gpipe(num_stages, num_microbatches).facts()
    assert facts.num_ticks == 2 * (num_microbatches + num_stages - 1)
    assert facts.makespan == 3 * (num_microbatches + num_stages - 1)
    assert facts.bubble == (num_stages - 1) / (num_microbatches + num_stages - 1)
    np.testing.assert_array_equal(facts.in_flight, num_microbatches)


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "makespan"),
    [(4, 4, 21), (4, 8, 33), (4, 16, 57), (8, 16, 69), (8, 32, 117)],
)
def test_known_makespans(num_stages, num_microbatches, makespan):
    assert gpipe(num_stages, num_microbatches).facts().makespan == makespan


def test_forward_runs_as_torchgpipes_clock_does():
    # Clock k runs the pairs (microbatch k - s, stage s) that exist; 3 of each.
    forward = gpipe(3, 3).forward[:5]
    pairs = [{(int(m), s) for s, m in enumerate(row) if m >= 0} for row in forward]
    assert pairs == [
        {(0, 0)},
        {(1, 0), (0, 1)},
        {(2, 0), (1, 1), (0, 2)},
        {(2, 1), (1, 2)},
        {(2, 2)},
    ]
