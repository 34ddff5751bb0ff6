"""`benchmarks/mixture_overlap.py` counts the all-to-alls under compute, and compiles a step where a compiler is there."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest
from helpers import benchmark

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "mixture_overlap.py"

TEXT = """\
HloModule jit_step, is_scheduled=true

%product (p: f32[2]) -> f32[2] {
  ROOT %dot.1 = f32[2]{0} dot(%p, %p)
}

%both (p: f32[2]) -> f32[2] {
  %all-to-all-start.1 = (f32[2], f32[2]) all-to-all-start(%p), metadata={op_name="jit(f)/while/body/pair/cond/branch_1_fun/forward/stage0/all_to_all"}
  %fusion.1 = f32[2]{0} fusion(%p), kind=kOutput, calls=%product, metadata={op_name="jit(f)/while/body/pair/cond/branch_1_fun/backward/stage0/dot"}
  %all-to-all-done.1 = f32[2] all-to-all-done(%all-to-all-start.1)
  %all-to-all-start.2 = (f32[2], f32[2]) all-to-all-start(%p), metadata={op_name="jit(f)/while/body/pair/cond/branch_1_fun/backward/stage0/all_to_all"}
  %fusion.2 = f32[2]{0} fusion(%p), kind=kOutput, calls=%product, metadata={op_name="jit(f)/while/body/pair/cond/branch_1_fun/backward/stage0/dot"}
  %all-to-all-done.2 = f32[2] all-to-all-done(%all-to-all-start.2)
  %all-to-all-start.3 = (f32[2], f32[2]) all-to-all-start(%p), metadata={op_name="jit(f)/while/body/pair/cond/branch_1_fun/backward/stage0/all_to_all"}
  %all-to-all-done.3 = f32[2] all-to-all-done(%all-to-all-start.3)
  ROOT %all-to-all.4 = f32[2] all-to-all(%p), metadata={op_name="jit(f)/while/body/pair/cond/branch_1_fun/backward/stage0/all_to_all"}
}

ENTRY %main (p: f32[2]) -> f32[2] {
  ROOT %all-to-all.5 = f32[2] all-to-all(%p), metadata={op_name="jit(f)/while/body/forward/stage0/cond/branch_1_fun/all_to_all"}
}
"""


def test_counts():
    counts = benchmark("mixture_overlap").counts
    expected = {"all_to_alls": 4, "asynchronous": 3, "under_compute": 2, "of_the_other_pass": 1}
    assert counts(TEXT) == expected
    apart = counts(TEXT.replace("/pair/", "/"))
    assert apart == expected | {"all_to_alls": 5}


def compilers():
    """Chip -> the Python that has its compiler, or None."""
    has_tpu = importlib.util.find_spec("libtpu") is not None
    return {"v5e": sys.executable if has_tpu else None, "h100": benchmark("compile_gpu").interpreter()}


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e", "h100"])
def test_all_to_alls_are_under_compute(chip):
    python = compilers()[chip]
    if python is None:
        pytest.skip("needs a compiler: see benchmarks/mixture_overlap.py")
    # A separate process: only one process of a machine may load the compiler for TPUs at a time.
    command = [python, SCRIPT, "--chip", chip, "--schedules", "one_f_one_b", "--blocks", "2"]
    script = subprocess.run(command, capture_output=True, text=True)
    assert script.returncode == 0, script.stderr[-3000:]
    (line,) = [line for line in script.stdout.splitlines() if line.startswith("{")]
    row = json.loads(line)
    assert row["all_to_alls"] == row["asynchronous"] == 8  # two stages, two of each pass
    assert row["under_compute"] == 8 and row["of_the_other_pass"] >= (6 if chip == "v5e" else 3)
