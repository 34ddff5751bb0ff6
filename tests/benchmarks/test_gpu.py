"""The benchmark of one GPU, in small: its FLOPs, its programs, its table and its errors."""

import dataclasses
import importlib
import json
import pathlib
import subprocess
import sys

import jax
import jax.extend
import numpy as np
import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))
try:
    gpu = importlib.import_module("gpu")
finally:
    sys.path.remove(str(FOLDER))

TINY = dataclasses.replace(gpu.REHEARSAL, rounds=1)


def product_flops(jaxpr):
    """FLOPs of all matrix products of a jaxpr, those of inner jaxprs included."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            inner = int(np.prod([shape[d] for d in contracted]))
            total += 2 * inner * equation.outvars[0].aval.size
        for inner_jaxpr in jax.extend.core.jaxprs_in_params(equation.params):
            total += product_flops(inner_jaxpr)
    return total


def test_flops_are_those_of_the_products():
    value, init = gpu.plain_loss(TINY)
    parameters = jax.eval_shape(init)
    microbatch = {
        name: jax.ShapeDtypeStruct((TINY.microbatch_size, TINY.positions), np.int32)
        for name in ("inputs", "labels")
    }
    jaxpr = jax.make_jaxpr(jax.value_and_grad(value))(parameters, microbatch)
    # The backward of attention computes its scores again, which no model needs.
    again = 2 * TINY.blocks * TINY.dim * TINY.positions * TINY.tokens
    assert TINY.microbatches * product_flops(jaxpr.jaxpr) == (
        gpu.model_flops(TINY) + again
    )


def test_the_model_has_about_350_million_parameters():
    sizes = gpu.Sizes()
    parameters = jax.eval_shape(gpu.plain_loss(sizes)[1])
    number = sum(a.size for a in jax.tree.leaves(parameters))
    assert 340e6 < number < 380e6


def test_every_schedule_that_fits_one_device():
    rows = gpu.schedules(8)
    assert {"gpipe", "one_f_one_b", "pipemare", "interleaved"} <= set(rows)
    assert rows["interleaved"] == ("interleaved", 2)
    assert list(gpu.rows(8))[:2] == ["plain", "one-stage"]


def test_one_stage_against_plain():
    result = gpu.run_row("one-stage", TINY)
    alternating = result["alternating"]
    assert result["overhead"] == pytest.approx(
        alternating["pipeline"] / alternating["plain"] - 1
    )
    assert result["seconds"] > 0 and result["first_step"] > result["seconds"]
    # Both begin at nearly equal probabilities of all tokens.
    assert result["first_loss"] == pytest.approx(np.log(TINY.vocab), rel=0.02)


def test_peaks_of_devices():
    assert gpu.peak_flops("NVIDIA H100 PCIe") == 756e12
    assert gpu.peak_flops("NVIDIA H200") == gpu.peak_flops("NVIDIA H100 80GB HBM3")
    assert gpu.peak_flops("NVIDIA RTX 9999") is None


def test_table():
    row = {"seconds": 0.5, "peak_gb": 20.0, "first_step": 60.0}
    results = {
        "device": "NVIDIA H100 80GB HBM3",
        "sizes": dataclasses.asdict(gpu.Sizes()),
        "rows": {
            "plain": row,
            "one-stage": row | {"seconds": 0.51, "overhead": 0.015},
            "gpipe": {"failed": "RESOURCE_EXHAUSTED: out of memory"},
        },
    }
    lines = gpu.table(results).splitlines()
    mfu = gpu.model_flops(gpu.Sizes()) / 0.5 / 989e12
    assert f"| plain | 0.5000 | 1.000 | 65,536 | {mfu:.1%} | 20.0 | 60.0 |" in lines
    assert any(line.startswith("| one-stage | 0.5100 | 1.020 |") for line in lines)
    assert "| gpipe | RESOURCE_EXHAUSTED: out of memory | | | | | |" in lines
    assert lines[-1] == "Overhead of one stage, alternating with plain: +1.5%"


def test_without_a_gpu_the_script_says_what_to_do(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    command = [sys.executable, FOLDER / "gpu.py"]
    script = subprocess.run(command, capture_output=True, text=True)
    assert script.returncode == 1 and script.stdout == ""
    assert "JAX finds no GPU, only 'cpu'" in script.stderr
    assert "--rehearse" in script.stderr


def test_a_row_that_fails_says_so(monkeypatch):
    result = gpu.run_apart("no-such-row", rehearse=True, seconds=60)
    assert result == {"failed": "KeyError: 'no-such-row'"}
    assert (
        "not done in" in gpu.run_apart("plain", rehearse=True, seconds=0.01)["failed"]
    )


def test_no_row_begins_when_the_time_is_over(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # and taken back: the script sets it
    out = tmp_path / "gpu.json"
    gpu.main(["--rehearse", "--seconds", "0", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert rows["plain"] == {"failed": "not begun: the time was over"}
    assert len(rows) > 8 and "| gpipe | not begun" in capsys.readouterr().out
