"""What XLA makes of small training steps for H100s: limits of copies, memory, waits and messages.

`benchmarks/compile_gpu.py` compiles the steps in processes of their own, in the environment that its
`--setup` makes. No GPU is needed.
"""

import fcntl
import json
import os
import pathlib
import subprocess
import sys

import pytest
from helpers import benchmark

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"

NUM_STAGES = 4

# Name -> model, schedule, variant, and the plain step beside it, if there is one.
TRANSFORMERS = {"equal 1f1b": ("equal", "1f1b", "-", "plain"), "ends zb-h1": ("ends", "zb-h1", "-", "plain")}
FIRST, *OTHERS = TRANSFORMERS
# Programs whose branches hold collectives.
COMMUNICATING = {
    "model": ("ends", "1f1b", "model 2", ""),
    "fsdp": ("equal", "1f1b", "fsdp 2", ""),
    "shared updates": ("equal", "pipemare-paired", "data 2, shared update", ""),
    "vocabulary layers": ("words", "1f1b", "vocabulary layers", ""),
    "updates": ("equal", "pipemare-paired", "-", ""),
}
CONVOLUTIONS = "unet 1f1b"
PROGRAMS = TRANSFORMERS | COMMUNICATING | {CONVOLUTIONS: ("unet", "1f1b", "-", "plain-unrolled")}
# Weights of fewer channels are read together.
CHANNELS = ["--width", "64"]

# Limits of a tick of the small programs, whether the device is busy or idle. A buffer has up to
# 42 MB, and the weights of a layer have 1 MB.
COPIED_MB = 1.0
HOST_WAITS = 0
# Limits of a step.
TEMPORARIES_AGAINST_PLAIN = 1.25
WAITS_PER_STEP = 3
UNKNOWN_LOOPS = 0
KERNELS_AGAINST_PLAIN = 1.05
# Of convolutions: kernels, and traffic, against the plain step. Before JAX 0.12 sums of gradients share a vector, so
# XLA transposes gradients, and branches touch the arrays of others.
CONVOLUTIONS_AGAINST_PLAIN = {"0.10": (1.75, 1.45), "0.12": (1.15, 1.0)}


pytestmark = pytest.mark.skipif(
    benchmark("compile_gpu").interpreter() is None,
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
        model, schedule, variant, plain = PROGRAMS[name]
        path = folder / f"compile_gpu_{name.replace(' ', '_')}.json"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                command = [sys.executable, FOLDER / "compile_gpu.py", "--small"]
                command += ["--models", model, "--schedules", *[plain] * bool(plain), schedule, "--variants", variant]
                command += ["--stages", str(NUM_STAGES), "--out", path, *CHANNELS * (name == CONVOLUTIONS)]
                script = subprocess.run(command, capture_output=True, text=True)
                assert script.returncode == 0, script.stderr[-3000:]
        plain_row, pipeline = ([{}] if not plain else []) + json.loads(path.read_text())
        assert "failed" not in plain_row | pipeline, (plain_row, pipeline)
        return pipeline, plain_row

    return compiled


# -- Limits: the value, and the most that it may be


def _in_any_tick(row: dict, *quantities: str) -> float:
    return max(sum(tick[q] for q in quantities) for tick in row["ticks"].values())


def copies(row: dict, plain: dict) -> tuple[float, float]:
    """MB copied, from one buffer to another or onto itself."""
    return _in_any_tick(row, "copied", "self_copied"), COPIED_MB


def transposed(row: dict, plain: dict) -> tuple[float, float]:
    """MB of arrays that are brought into another layout: no more than a stage of the plain scan."""
    of_plain = plain["ticks"]["microbatch"]["transposed"]
    return _in_any_tick(row, "transposed"), of_plain / NUM_STAGES


def host_waits(row: dict, plain: dict) -> tuple[float, float]:
    """How often a tick waits for the host."""
    return _in_any_tick(row, "host_waits"), HOST_WAITS


def host_waits_per_step(row: dict, plain: dict) -> tuple[float, float]:
    """How often a step waits for the host."""
    return row["host_waits_step"], WAITS_PER_STEP


def unknown_loops(row: dict, plain: dict) -> tuple[float, float]:
    """Loops of unknown length."""
    return row["unknown_loops"], UNKNOWN_LOOPS


def temporaries(row: dict, plain: dict) -> tuple[float, float]:
    """GB beside the state, against a stage of the plain scan."""
    of_stage = plain["temporaries_gb"] / NUM_STAGES
    return row["temporaries_gb"], TEMPORARIES_AGAINST_PLAIN * of_stage


def kernels(row: dict, plain: dict) -> tuple[float, float]:
    """Kernels of all stages for one microbatch."""
    most = KERNELS_AGAINST_PLAIN * plain["microbatch"]["kernels"]
    return row["microbatch"]["kernels"], most


def kernels_of_convolutions(row: dict, plain: dict) -> tuple[float, float]:
    """Kernels of all stages for one microbatch, where images are small and stages have other layers."""
    most, _ = CONVOLUTIONS_AGAINST_PLAIN[row["jax"][:4]]
    return row["microbatch"]["kernels"], most * plain["microbatch"]["kernels"]


def traffic(row: dict, plain: dict) -> tuple[float, float]:
    """MB that the kernels without products of all stages read and write for one microbatch."""
    of_stages = sum(work["traffic"] for work in row["stages_of_microbatch"].values())
    _, most = CONVOLUTIONS_AGAINST_PLAIN[row["jax"][:4]]
    return of_stages, most * plain["ticks"]["microbatch"]["traffic"]


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
    host_waits_per_step,
    unknown_loops,
    temporaries,
    kernels,
    products,
    bare_permutes,
)


@pytest.mark.exhaustive
@pytest.mark.sampled(2)
@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.__name__)
@pytest.mark.parametrize(
    "name",
    [FIRST, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHERS)],
)
def test_limit(rows, name, limit):
    value, most = limit(*rows(name))
    assert value <= most


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "limit",
    [host_waits, host_waits_per_step, unknown_loops, products, kernels_of_convolutions, traffic],
    ids=lambda limit: limit.__name__,
)
def test_limit_of_convolutions(rows, limit):
    """Convolutions are part of CUDA graphs. Their weights are in cuDNN's order once for all microbatches."""
    value, most = limit(*rows(CONVOLUTIONS))
    assert value <= most


@pytest.mark.exhaustive
@pytest.mark.parametrize("limit", [host_waits, host_waits_per_step, unknown_loops], ids=lambda limit: limit.__name__)
@pytest.mark.parametrize("name", COMMUNICATING)
def test_no_host_where_branches_hold_collectives(rows, name, limit):
    """The collectives of branches are part of CUDA graphs, and so are the branches."""
    value, most = limit(*rows(name))
    assert value <= most


@pytest.mark.exhaustive
def test_messages_travel_beside_branches_with_collectives(rows):
    """XLA counts the collectives of a branch among those that are under way."""
    bare, most = bare_permutes(*rows("fsdp"))
    assert bare <= most


@pytest.mark.exhaustive
def test_few_collectives_of_fsdp_are_bare(rows):
    """The first gather of a forward and of a backward has been made, and gradients are summed one by one."""
    row, _ = rows("fsdp")
    assert _in_any_tick(row, "bare") <= 2


@pytest.mark.exhaustive
def test_norms_are_summed_in_ticks_with_an_update(rows):
    """Before JAX 0.12 a branch cannot hold a sum, so every tick has one."""
    row, _ = rows("updates")
    has_update_in_a_branch = row["jax"] >= "0.12"
    assert _in_any_tick(row, "collectives") == (0 if has_update_in_a_branch else 1)


@pytest.mark.exhaustive
def test_a_row_is_compiled_again_if_its_program_changed(rows, tmp_path):
    """A row with the fingerprint of its program keeps its numbers; one with another fingerprint gets new ones."""
    row, _ = rows(FIRST)
    unchanged = row | {"seconds": -1, "commit": "before"}
    changed = unchanged | {"program": "other"}
    for saved, expected in ((unchanged, -1), (changed, row["microbatch"]["kernels"])):
        path = tmp_path / "rows.json"
        path.write_text(json.dumps([saved | {"microbatch": {"kernels": -1}}]))
        command = [sys.executable, FOLDER / "compile_gpu.py", "--refresh", "--out", path]
        subprocess.run(command, capture_output=True, check=True)
        (refreshed,) = json.loads(path.read_text())
        assert refreshed["microbatch"]["kernels"] == expected
        assert refreshed["commit"] != "before"
        assert refreshed["program"] == row["program"]
