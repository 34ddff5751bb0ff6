"""What XLA makes of small training steps for H100s: limits of copies, memory, waits and messages.

`benchmarks/compile_gpu.py` compiles the steps in processes of their own, in the environment that its
`--setup` makes. No GPU is needed.
"""

import fcntl
import importlib
import json
import os
import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"

# Name -> model and schedule, both of 4 devices.
PROGRAMS = {"equal 1f1b": ("equal", "1f1b"), "ends zb-h1": ("ends", "zb-h1")}

# Limits of a tick of the small programs, whether the device is busy or idle. A buffer has up to
# 42 MB, and the weights of a layer have 1 MB.
COPIED_MB = 1.0
TRANSPOSED_MB = 0.0
HOST_WAITS = 0
# Limits of a step.
TEMPORARIES_PER_STATE = 0.1
KERNELS_AGAINST_PLAIN = 1.05


def load():
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module("compile_gpu")
    finally:
        sys.path.remove(str(FOLDER))


pytestmark = pytest.mark.skipif(
    load().interpreter() is None,
    reason="needs the compiler for CUDA: python benchmarks/compile_gpu.py --setup",
)


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    """Function from the name of a program to its row and the row of the plain scan of its model.

    Each program is compiled once, also if several processes run the tests.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    def compiled(name: str) -> tuple[dict, dict]:
        model, schedule = PROGRAMS[name]
        path = folder / f"compile_gpu_{model}_{schedule}.json"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                command = [sys.executable, FOLDER / "compile_gpu.py", "--small"]
                command += ["--models", model, "--schedules", "plain", schedule]
                command += ["--stages", "4", "--out", path]
                script = subprocess.run(command, capture_output=True, text=True)
                assert script.returncode == 0, script.stderr[-3000:]
        plain, pipeline = json.loads(path.read_text())
        assert "failed" not in plain | pipeline, (plain, pipeline)
        return pipeline, plain

    return compiled


# -- Limits: the value, and the most that it may be


def _in_any_tick(row: dict, *quantities: str) -> float:
    return max(sum(tick[q] for q in quantities) for tick in row["ticks"].values())


def copies(row: dict, plain: dict) -> tuple[float, float]:
    """MB copied, from one buffer to another or onto itself."""
    return _in_any_tick(row, "copied", "self_copied"), COPIED_MB


def transposed(row: dict, plain: dict) -> tuple[float, float]:
    """MB of arrays that are brought into another layout."""
    return _in_any_tick(row, "transposed"), TRANSPOSED_MB


def host_waits(row: dict, plain: dict) -> tuple[float, float]:
    """How often a tick waits for the host."""
    return _in_any_tick(row, "host_waits"), HOST_WAITS


def temporaries(row: dict, plain: dict) -> tuple[float, float]:
    """GB beside the state."""
    return row["temporaries_gb"], TEMPORARIES_PER_STATE * row["state_gb"]


def kernels(row: dict, plain: dict) -> tuple[float, float]:
    """Kernels of all stages for one microbatch."""
    most = KERNELS_AGAINST_PLAIN * plain["microbatch"]["kernels"]
    return row["microbatch"]["kernels"], most


def products(row: dict, plain: dict) -> tuple[float, float]:
    """Matrix products of all stages for one microbatch."""
    return row["microbatch"]["products"], plain["microbatch"]["products"]


def bare_permutes(row: dict, plain: dict) -> tuple[float, float]:
    """Permutes that have no matrix product under them in any tick of a middle stage."""
    by_permute = zip(*row["permutes"].values(), strict=True)
    return sum(not any(p["products"] for p in ps) for ps in by_permute), 0


LIMITS = (
    copies,
    transposed,
    host_waits,
    temporaries,
    kernels,
    products,
    bare_permutes,
)

# Limits that the programs do not keep yet.
_COND = "XLA copies the buffers of a conditional in both of its branches"
NOT_YET = {
    "equal 1f1b": {
        copies: _COND,
        temporaries: _COND,
        transposed: "a backward transposes the rings that its forward wrote",
        host_waits: "conditionals with loops inside are in no command buffer",
        bare_permutes: "the permute of activations starts after the backward",
    },
    "ends zb-h1": {
        copies: _COND,
        temporaries: _COND,
        transposed: "a backward transposes the rings that its forward wrote",
        host_waits: "conditionals with loops inside are in no command buffer",
        kernels: "each of the three ticks of a microbatch has kernels of its own",
        bare_permutes: "the permute of activations starts after the weight gradient",
    },
}


def _cases():
    for name in PROGRAMS:
        for limit in LIMITS:
            reason = NOT_YET[name].get(limit)
            marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
            yield pytest.param(name, limit, marks=marks, id=f"{name} {limit.__name__}")


@pytest.mark.parametrize("name, limit", _cases())
def test_limit(rows, name, limit):
    value, most = limit(*rows(name))
    assert value <= most
