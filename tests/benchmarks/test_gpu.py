"""The benchmark of one GPU, in small: its FLOPs, its programs, its table and its errors."""

import copy
import dataclasses
import doctest
import json
import pathlib
import subprocess
import sys

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import benchmark

import jpipe

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"
gpu, sizes, timing = map(benchmark, ("gpu", "gpu_sizes", "gpu_timing"))

TINY = sizes.REHEARSAL


# -- FLOPs


def abstract_gradient(of: sizes.Sizes):
    """The function of loss and gradient for one microbatch, and its abstract arguments."""
    loss, init = timing.plain_loss(of)
    tokens = jax.ShapeDtypeStruct((of.microbatch_size, of.positions), np.int32)
    parameters = jax.eval_shape(init, jax.random.key(0))
    return jax.value_and_grad(loss), parameters, dict(inputs=tokens, labels=tokens)


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


def recomputed_flops(of: sizes.Sizes) -> int:
    """FLOPs of the scores of attention that the backward of `models/` computes again."""
    return 2 * of.blocks * of.dim * of.positions * of.tokens


def test_flops_are_those_of_the_products():
    gradient, *arguments = abstract_gradient(TINY)
    jaxpr = jax.make_jaxpr(gradient)(*arguments)
    assert TINY.microbatches * product_flops(jaxpr.jaxpr) == (sizes.model_flops(TINY) + recomputed_flops(TINY))


def test_flops_agree_with_xla():
    """XLA also counts elementwise operations: less than 5% of a model of this width."""
    of = dataclasses.replace(TINY, dim=512, heads=8, vocab=1024, positions=64)
    gradient, *arguments = abstract_gradient(of)
    counted = jax.jit(gradient).lower(*arguments).cost_analysis()["flops"]
    formula = sizes.model_flops(of) + recomputed_flops(of)
    assert 1 < of.microbatches * counted / formula < 1.05


def test_examples_of_the_formulas():
    results = doctest.testmod(sizes)
    assert results.attempted >= 2 and results.failed == 0


def test_unknown_devices_have_no_peak():
    assert sizes.peak_flops("NVIDIA H200") == 989.4e12
    for device in ("cpu", "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        assert sizes.peak_flops(device) is None


def test_the_model_has_370_million_parameters():
    _, parameters, _ = abstract_gradient(sizes.Sizes())
    assert sum(a.size for a in jax.tree.leaves(parameters)) == 370_468_864


# -- Programs


def test_every_schedule_fits_one_device():
    fitting, refused = timing.schedules(4)
    assert set(fitting) == set(jpipe.schedules.names()) and not refused
    two_stages = {name for name, num_stages in fitting.items() if num_stages == 2}
    assert two_stages == {"interleaved", "dual_pipe_v", "zero_bubble_v"}


def test_a_schedule_that_does_not_fit_has_a_reason(monkeypatch):
    def refusal(name, num_stages, num_microbatches):
        return "never one stage." if name == "gpipe" and num_stages == 1 else None

    monkeypatch.setattr(jpipe.schedules, "refusal", refusal)
    monkeypatch.setattr(jpipe.schedules, "names", lambda: ["gpipe", "pipemare"])
    fitting, refused = timing.schedules(4)
    assert fitting == {"pipemare": 1}
    assert refused == {"gpipe": "never one stage. 2 stages take 2 devices."}


@pytest.mark.exhaustive
def test_both_programs_train_the_same_model(monkeypatch):
    """In float32, so that rounding hides no difference."""
    monkeypatch.setattr(timing.jnp, "bfloat16", jnp.float32)
    compiled = []

    def listen(event, _, fun_name="", **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    plain = timing.Timed(timing.plain(TINY), TINY.steps)
    ours = timing.Timed(timing.pipeline(TINY, "one_f_one_b", 1), TINY.steps)
    timing.alternate(ours, plain, 1)
    # Running compiles nothing again.
    for step in ("plain_step", "_run_step"):
        assert sum(step in name for name in compiled) == 1
    assert plain.losses[1] < plain.losses[0] - 0.01
    np.testing.assert_allclose(ours.losses, plain.losses, rtol=1e-6)
    assert ours.memory.argument_size_in_bytes > plain.memory.argument_size_in_bytes > 0


def shrinking(*_):
    """A program that compiles fast: its loss is its state, which shrinks."""
    step = jax.jit(lambda state, batch: (0.5 * state, state))
    state = jnp.float32(1)
    return timing.Program(lambda: step.lower(state, {}).compile(), step, state, {})


def test_a_row(monkeypatch):
    monkeypatch.setattr(timing, "pipeline", shrinking)
    monkeypatch.setattr(timing, "plain", shrinking)
    result = timing.run_row("one-stage", TINY)
    assert 0 < result["fastest"] <= result["seconds"] <= result["slowest"]
    assert result["compile_seconds"] > 0 and result["arguments_gb"] == 4e-9
    num_steps = 1 + TINY.steps * (1 + TINY.rounds)
    assert result["losses"] == [1, 0.5 ** (num_steps - 1)]
    alternating = result["alternating"]
    ours, plain = alternating["pipeline_seconds"], alternating["plain_seconds"]
    assert alternating["overhead"] == pytest.approx(ours / plain - 1)


def test_a_row_stays_without_its_alternating_rounds(monkeypatch):
    def out_of_memory(of):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(timing, "pipeline", shrinking)
    monkeypatch.setattr(timing, "plain", out_of_memory)
    result = timing.run_row("one-stage", TINY)
    assert result["alternating"] == {"failed": "RuntimeError: RESOURCE_EXHAUSTED"}
    assert result["seconds"] > 0
    rows = {"one-stage": result}
    results = MACHINE | {"sizes": dataclasses.asdict(TINY), "rows": rows}
    assert gpu.table(results).endswith("failed: RuntimeError: RESOURCE_EXHAUSTED")


def test_kernels_are_of_kinds():
    kernels = [
        ("nvjet_sm90_tst_256x128", 3e6),
        ("gemm_fusion_dot_584", 2e6),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_kernel0_0", 4e6),
        ("loop_add_fusion", 1e6),
        ("loop_add_fusion_12", 2e6),
        ("loop_add_fusion.3", 4e6),
    ]
    assert timing.kernel_kinds(kernels, 2) == [
        ("loop_add_fusion", 1.5, 3.5),
        ("products", 1, 2.5),
        ("attention", 0.5, 2),
    ]


def test_kernels_of_a_device_that_is_no_gpu_are_none():
    assert timing.trace_kernels(lambda: jnp.ones(3).block_until_ready()) == []


def test_alternation_changes_who_begins():
    order = []

    class Timed:
        def __init__(self, name, seconds):
            self.name, self.next, self.seconds = name, seconds, [100.0]

        def round(self):
            order.append(self.name)
            self.seconds.append(self.next.pop(0))

    ours, plain = Timed("ours", [1.1, 3.0, 1.3]), Timed("plain", [1.0, 2.0, 1.0])
    result = timing.alternate(ours, plain, 3)
    assert order == ["plain", "ours", "ours", "plain", "plain", "ours"]
    assert result["pipeline_seconds"] == 1.3 and result["plain_seconds"] == 1.0
    assert result["overhead"] == pytest.approx(0.3)
    assert result["overhead_of_rounds"] == pytest.approx([0.1, 0.5])


def test_a_row_without_a_finite_loss_fails(monkeypatch):
    def nan(of):
        return shrinking()._replace(state=jnp.float32(jnp.nan))

    monkeypatch.setattr(timing, "plain", nan)
    with pytest.raises(ValueError, match="the loss is not finite"):
        timing.run_row("plain", TINY)


def test_a_failure_is_one_line_without_jax_notes(capsys):
    """A note that JAX adds to its errors stands after the message, in lines of its own."""

    @jax.jit
    def fails(x):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nof 80 GB")

    with pytest.raises(RuntimeError) as error:
        fails(1.0)
    assert timing.failure(error.value) == {"failed": "RuntimeError: RESOURCE_EXHAUSTED: out of memory"}
    assert "Traceback" in capsys.readouterr().err


# -- Processes


def test_without_a_gpu_the_script_says_what_to_do(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    command = [sys.executable, FOLDER / "gpu.py"]
    script = subprocess.run(command, capture_output=True, text=True)
    assert script.returncode == 1 and script.stdout == ""
    (line,) = script.stderr.splitlines()
    assert "JAX finds no NVIDIA GPU, only 'cpu'" in line
    assert "--rehearse" in line and "pip install" in line


def test_a_row_that_fails_says_so(tmp_path):
    result = gpu.run_apart("no-such-row", True, 60, str(tmp_path))
    assert result == {"failed": "KeyError: 'no-such-row'"}
    result = gpu.run_apart("plain", True, 0.01, str(tmp_path))
    assert result == {"failed": "not done after 0 s"}


def test_a_process_that_dies_says_so(tmp_path, monkeypatch):
    program = tmp_path / "dies.py"
    program.write_text("import os; os.abort()")
    monkeypatch.setattr(gpu, "__file__", str(program))
    result = gpu.run_apart("plain", True, 60, str(tmp_path))
    assert result["failed"].startswith("ended by SIGABRT: ")


# What `run_apart` returns, for each of the rows of a run.
MACHINE = {"platform": "gpu", "jax": "1", "flax": "2", "optax": "3"}
MACHINE |= {"device": "NVIDIA H100 80GB HBM3"}
ROW = {"seconds": 0.5, "compile_seconds": 60.0, "cached": False}
ROW |= {"arguments_gb": 4.4, "temporaries_gb": 9.17, "peak_gb": 20.0}
ALTERNATING = {"overhead": 0.015, "overhead_of_rounds": [0.01, 0.021]}


def test_a_run(tmp_path, capsys, monkeypatch):
    """A run whose processes are imitated: each row is saved before the next one begins."""
    out = tmp_path / "gpu.json"
    begun = []

    def run_apart(row, rehearse, seconds, cache):
        assert not rehearse and seconds > 0
        if begun:
            saved = json.loads(out.read_text())["rows"] if out.exists() else {}
            assert list(saved) == begun[1:]
        begun.append(row)
        if row == "one-stage":
            kernels = [["products", 96, 40.2], ["memcpy", 7, 1]]
            return ROW | {
                "seconds": 0.51,
                "alternating": ALTERNATING,
                "kernels": kernels,
            }
        if row == "plain":
            return ROW | {"kernels": [["products", 95, 40], ["loop_fusion", 1000, 2]]}
        if row == "gpipe":
            return {"failed": "XlaRuntimeError: RESOURCE_EXHAUSTED: out of memory"}
        if row == "zero_bubble_v":
            return ROW | {"cached": True, "peak_gb": None}
        return MACHINE if row == gpu.MACHINE else copy.deepcopy(ROW)

    monkeypatch.setattr(gpu, "run_apart", run_apart)
    gpu.main(["--out", str(out)])
    others = [name for name in jpipe.schedules.names() if name != "one_f_one_b"]
    assert begun == [gpu.MACHINE, "plain", "one-stage", *others]
    lines = capsys.readouterr().out.splitlines()
    of = sizes.Sizes()
    mfu = f"{sizes.model_flops(of) / 0.5 / 989.4e12:.1%}"
    tokens = f"{2 * of.tokens:,}"
    figures = f"| 0.5000 | 1.000 | {tokens} | {mfu} | 4.40 | 9.17 |"
    assert f"| `plain` {figures} 20.00 | 60.0 |" in lines
    assert f"| `zero_bubble_v` {figures}  | 60.0 (cache) |" in lines
    assert any(line.startswith("| `one-stage` | 0.5100 | 1.020 |") for line in lines)
    failed = next(line for line in lines if line.startswith("| `gpipe` |"))
    assert failed.startswith("| `gpipe` | failed: XlaRuntimeError: RESOURCE_EXHAUSTED")
    of_rows = [line for line in lines if line.startswith(("| program", "| `"))]
    assert len({line.count("|") for line in of_rows}) == 1
    assert any("+1.5% (rounds: +1.0% to +2.1%; goal: at most +2%)" in n for n in lines)
    kernels = lines[lines.index("| kernels per step | `plain` | `one-stage` |") :]
    assert kernels[2:6] == [
        "| all | 42.0 ms (1,095) | 41.2 ms (103) |",
        "| products | 40.0 ms (95) | 40.2 ms (96) |",
        "| loop_fusion | 2.0 ms (1,000) |  |",
        "| memcpy |  | 1.0 ms (7) |",
    ]
    # The saved rows print the same table.
    gpu.main(["--redraw", "--out", str(out)])
    assert set(capsys.readouterr().out.splitlines()) <= set(lines)


def test_no_row_begins_when_the_time_is_over(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "run_apart", lambda row, *_: MACHINE)
    out = tmp_path / "gpu.json"
    gpu.main(["--seconds", "0", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == len(jpipe.schedules.names()) + 1
    assert all(row == {"failed": "not begun: 0 s are over"} for row in rows.values())


def test_some_rows_join_the_saved_ones_of_the_same_program(tmp_path, monkeypatch):
    def run(machine, *arguments):
        rows = {gpu.MACHINE: machine}
        monkeypatch.setattr(gpu, "run_apart", lambda row, *_: rows.get(row, ROW))
        gpu.main(["--out", str(out), *arguments])
        return list(json.loads(out.read_text())["rows"])

    out = tmp_path / "gpu.json"
    assert run(MACHINE, "--only", "plain") == ["plain"]
    assert run(MACHINE, "--only", "gpipe", "plain") == ["plain", "gpipe"]
    assert run(MACHINE | {"jax": "2"}, "--only", "gpipe") == ["gpipe"]
    with pytest.raises(SystemExit, match="`--only` takes rows of .*'one-stage'.*'x'"):
        run(MACHINE, "--only", "x")


def test_a_rehearsal_does_not_replace_results(capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--rehearse", "--out", str(gpu.RESULTS)])
    assert "must not be" in capsys.readouterr().err
