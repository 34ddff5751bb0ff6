"""A training goes on from every layout in every other, in one process and in two."""

import re

import pytest
from processes import matrix
from processes.test_processes import launch


@pytest.mark.parametrize(
    "every",
    [
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(
            matrix.PAIRS.index((("zero_bubble_h1", 4, 1), ("one_f_one_b", 4, 2))),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_every_layout_restores_into_every_other_across_processes(every, tmp_path):
    """Every number on every device is that of one process which adopts the state."""
    assert matrix.main(tmp_path, every) == 0
    done = launch("matrix.py", 2, tmp_path, every, devices=8, timeout=3000)
    assert done.returncode == 0, done.stderr
    counts = [int(n) for n in re.findall(r"restored (\d+) in", done.stdout)]
    taken, layouts = matrix.PAIRS[::every], matrix.LAYOUTS
    by_two = matrix.saved_by(2, layouts)
    in_flight = matrix.ASYNCHRONOUS[::every]
    in_flight_by_two = matrix.saved_by(2, in_flight)
    of_two = sum(before in by_two for before, _ in taken) + len(in_flight_by_two)
    assert counts == [len(taken) + len(in_flight) + of_two] * 2
    assert matrix.main(tmp_path, every) == of_two
