"""A training goes on from every layout in every other, in one process and in two."""

import re

import pytest
from processes import matrix
from processes.launching import launch


@pytest.mark.parametrize(
    ("family", "every"),
    [
        pytest.param("stages", 1, marks=pytest.mark.slow),
        # Of the layouts 0, 20 and 11.
        pytest.param("stages", 20 * 34 + 11, marks=pytest.mark.exhaustive),
        pytest.param("parts, adam", 1, marks=pytest.mark.slow),
        pytest.param("parts, sgd", 1, marks=pytest.mark.slow),
    ],
)
def test_every_layout_restores_into_every_other_across_processes(family, every, tmp_path):
    """Every number on every device is that of one process which adopts the state."""
    assert matrix.main(tmp_path, family, every) == 0
    done = launch("matrix.py", 2, tmp_path, family, every, devices=8, timeout=3000)
    assert done.returncode == 0, done.stderr
    counts = [int(n) for n in re.findall(r"restored (\d+) in", done.stdout)]
    cases = matrix.Matrix(tmp_path, family, every)
    by_two = cases.saved_by(2, cases.layouts)
    of_two = sum(before in by_two for before, _ in cases.pairs)
    of_two += len(cases.saved_by(2, cases.in_flight))
    assert counts == [len(cases.pairs) + len(cases.in_flight) + of_two] * 2
    assert matrix.main(tmp_path, family, every) == of_two
