"""`benchmarks/compile_tpu.py` reads a scheduled program, and compiles a step if libtpu is there."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest
from helpers import benchmark

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "compile_tpu.py"


TEXT = """\
HloModule jit_step, is_scheduled=true

%taken (p: f32[2]) -> f32[2] {
  ROOT %fusion.1 = f32[2]{0} fusion(%p), kind=kLoop, backend_config={"estimated_cycles":"700"}
}

%left (p: f32[2]) -> f32[2] {
  ROOT %p = f32[2]{0} parameter(0)
}

%tick (carry: (f32[2])) -> (f32[2]) {
  %collective-permute-start.3 = (bf16[4,1000]{1,0}, bf16[4,1000]{1,0}, u32[]) collective-permute-start(%a)
  %recv.8 = (bf16[4,1000]{1,0}, u32[], token[]) recv(%after-all)
  %recv.9 = (f32[1,1,128]{2,1,0}, u32[], token[]) recv(%after-all)
  %conditional.1 = f32[2]{0} conditional(%b, %x, %y), branch_computations={%left, %taken}, metadata={op_name="jit(f)/while/body/forward/stage1-3,5/cond"}
  %collective-permute-done.3 = bf16[4,1000]{1,0} collective-permute-done(%collective-permute-start.3)
  %recv-done.8 = (bf16[4,1000]{1,0}, token[]) recv-done(%recv.8)
  %fusion.2 = f32[2]{0} fusion(%x), backend_config={"estimated_cycles":"300"}
  %copy.1 = f32[50]{0} copy(%x)
  %collective-permute-start = (f32[10]{0}, f32[10]{0}) collective-permute-start(%c)
  %collective-permute-done = f32[10]{0} collective-permute-done(%collective-permute-start)
}

ENTRY %main (p: f32[2]) -> f32[2] {
  %copy.2 = f32[50]{0} copy(%p)
  ROOT %while.1 = (f32[2]{0}) while(%p), condition=%left, body=%tick
}
"""


def test_reads_a_scheduled_program():
    script = benchmark("compile_tpu")
    program = script.Program(TEXT)
    assert program.transfers() == [(0.008, 0.7, 700), (4e-5, 0.0, 0)]
    chip = script.Chip(link=8e6, clock=1000)  # 1 ms and 1 cycle for 8000 bytes
    assert [t.slack(chip) for t in program.transfers()] == [700, 0]
    assert program.of_computation("%main") == 1000
    assert program.between_slices() == [0.7]
    assert len(program.copies(200)) == 1 and not program.copies(201)
    operations = [program.operations(stage) for stage in range(7)]
    expected = {"forward": 700}
    assert operations == [expected if s in (1, 2, 3, 5) else {} for s in range(7)]


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs libtpu: pip install -r benchmarks/requirements-tpu.txt",
)
def test_small_step_for_eight_chips():
    # A separate process: only one process of a machine may load the compiler at a time.
    flags = "--dim 128 --seq 256 --blocks-per-chip 1 --microbatches 4 --microbatch-size 8"
    command = [sys.executable, SCRIPT, "--topologies", "v5e:2x4", "--schedules"]
    script = subprocess.run([*command, "one_f_one_b", *flags.split()], capture_output=True, text=True)
    assert script.returncode == 0, script.stderr[-3000:]
    (line,) = [line for line in script.stdout.splitlines() if line.startswith("{")]
    row = json.loads(line)
    arguments = row["compiled_mb"] - row["temporaries_mb"]
    assert 0.99 < arguments / row["predicted_mb"] < 1.01
    # The compiler takes 6 MB for itself, at this size and at others. Activations in flight have 40 MB, and are not
    # copied.
    assert row["temporaries_mb"] < 10
    assert row["permutes"] == 2 and min(row["hidden"]) > 0.2
    assert min(row["slack"]) > 1
    assert list(row["cycles"]) == ["forward", "backward"]
    assert min(row["cycles"].values()) > 0
