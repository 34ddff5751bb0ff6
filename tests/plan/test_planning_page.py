"""docs/planning.md: its program runs from the page alone."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
(PROGRAM,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "planning.md").read_text(), flags=re.S)
# Measures each program for a moment, and no machine.
QUICK = """
import functools, jpipe, jpipe.plan
jpipe.Pipeline.profile = functools.partialmethod(jpipe.Pipeline.profile, min_seconds=1e-3)
jpipe.plan.measure_machine = jpipe.plan.Machine
"""


@pytest.mark.parametrize(
    "before",
    [pytest.param(QUICK, id="quick"), pytest.param("", marks=pytest.mark.slow)],
)
@pytest.mark.exhaustive
def test_the_program_runs(tmp_path, before):
    (tmp_path / "program.py").write_text(before + PROGRAM)
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    run = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    best, second, skipped = run.stdout.splitlines()
    assert re.fullmatch(r"\w+.* \d+ \(.*\) [\d.]+ ms", best)
    assert " lost: " in second and re.fullmatch(r"\d+ plans were skipped", skipped)
    assert len(list(tmp_path.glob("profile-*.json"))) == 2
