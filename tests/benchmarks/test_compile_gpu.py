"""What XLA makes of small training steps for H100s: limits of copies, memory, waits and messages.

The programs are compiled in processes of their own, with the environment that
`benchmarks/compile_gpu.py --setup` makes. No GPU is needed.
"""

import functools
import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"

# Limits of a tick, busy or idle. An array of the small programs that is worth a limit has 1 MB or
# more.
COPIED_MB = 1.0
TRANSPOSED_MB = 0.0
HOST_WAITS = 0
# Limits of a step.
TEMPORARIES_PER_STATE = 0.1
KERNELS_AGAINST_PLAIN = 1.05

PROGRAMS = {
    "equal 1f1b": ("equal", "1f1b"),
    "ends zb-h1": ("ends", "zb-h1"),
}


@functools.cache
def load():
    sys.path.insert(0, str(FOLDER))
    path = FOLDER / "compile_gpu.py"
    spec = importlib.util.spec_from_file_location("compile_gpu", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


needs_compiler = pytest.mark.skipif(
    load().interpreter() is None,
    reason="needs the compiler for CUDA: python benchmarks/compile_gpu.py --setup",
)


@functools.cache
def rows(name: str) -> dict[str, dict]:
    """Schedule -> row of a small program, and of the plain scan of its model."""
    model, schedule = PROGRAMS[name]
    command = [sys.executable, FOLDER / "compile_gpu.py", "--small", "--stages", "4"]
    command += ["--models", model, "--schedules", "plain", schedule]
    script = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in script.stdout.splitlines() if line.startswith("{")]
    found = {row["schedule"]: row for row in map(json.loads, lines)}
    assert not any("failed" in row for row in found.values()), script.stderr[-3000:]
    return found


def row(name: str) -> dict:
    return rows(name)[PROGRAMS[name][1]]


def not_yet(reason: str):
    return pytest.mark.xfail(strict=True, reason=reason)


def all_ticks(name: str, quantity: str) -> float:
    return max(work[quantity] for work in row(name)["ticks"].values())


each_program = pytest.mark.parametrize("name", PROGRAMS)


@needs_compiler
@each_program
@not_yet("XLA copies the buffers of a conditional in both branches")
def test_copies(name):
    assert all_ticks(name, "copied") <= COPIED_MB


@needs_compiler
@each_program
def test_no_copies_of_a_buffer_onto_itself(name):
    assert all_ticks(name, "self_copied") <= COPIED_MB


@needs_compiler
@each_program
@not_yet("a backward transposes the rings of its forward")
def test_transposed(name):
    assert all_ticks(name, "transposed") <= TRANSPOSED_MB


@needs_compiler
@each_program
@not_yet("the copies of buffers are temporaries")
def test_temporaries(name):
    assert row(name)["temporaries_gb"] <= TEMPORARIES_PER_STATE * row(name)["state_gb"]


@needs_compiler
@each_program
@not_yet("a conditional outside of a command buffer waits for the host")
def test_host_waits(name):
    assert all_ticks(name, "host_waits") <= HOST_WAITS


@needs_compiler
@each_program
def test_products_are_those_of_the_plain_scan(name):
    microbatches = (row(name)["microbatch"], rows(name)["plain"]["microbatch"])
    pipeline, plain = (work["products"] for work in microbatches)
    assert pipeline == plain


@needs_compiler
@each_program
def test_kernels(name):
    microbatches = (row(name)["microbatch"], rows(name)["plain"]["microbatch"])
    pipeline, plain = (work["kernels"] for work in microbatches)
    assert pipeline <= KERNELS_AGAINST_PLAIN * plain


@needs_compiler
@each_program
@not_yet("the permute of activations starts after the backward")
def test_permutes(name):
    # In some tick of a middle stage, each permute has matrix products between its start and its done.
    for permutes in zip(*row(name)["permutes"].values(), strict=True):
        assert any(p["asynchronous"] and p["products"] for p in permutes)
