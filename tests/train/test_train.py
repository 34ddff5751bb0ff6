"""The training script, as a user runs it and from within."""

import contextlib
import json
import os
import pathlib
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import events_of, file_size_limit, log_of

import jpipe
from models import MLP, CrossEntropy
from train import flags
from train import train as script
from train.config import TrainConfig
from train.data import in_order
from train.devices import check_devices
from train.mnist import MNIST
from train.train import evaluate, main

ROOT = pathlib.Path(__file__).parents[2]
QUICKSTART = ["--config", str(ROOT / "configs" / "quickstart.py")]
TINY = [
    *QUICKSTART,
    "--config.model=MLP",
    "--config.model.widths=16",
    "--config.pipeline.num_stages=2",
    "--config.pipeline.num_microbatches=2",
    "--config.batch_size=100",
    "--config.num_steps=5",
    "--config.log_every=2",
]
ONE_STAGE = [*TINY, "--config.pipeline.num_stages=1"]  # compiles fastest


@pytest.fixture(scope="module", autouse=True)
def _restore_flags():
    """Runs in this process add to the variable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
        yield


def options(*words):
    return [f"--config.{word}" for word in words]


def environment(**changes):
    """The environment of a fresh shell, in which no number of devices is chosen."""
    removed = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "PYTHONPATH")
    return {k: v for k, v in os.environ.items() if k not in removed} | {
        "JAX_PLATFORMS": "cpu",
        **changes,
    }


def shell(*words, cwd=ROOT, **changes):
    """Runs `python train/train.py WORDS` as a user would."""
    return subprocess.run(
        [sys.executable, str(ROOT / "train" / "train.py"), *words],
        cwd=cwd,
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=300,
    )


def training_losses(run_dir):
    """{step: loss} of every step of a run."""
    steps = {}
    for line in log_of(run_dir):
        losses = line.get("each_step", {}).get("loss", [])
        steps |= dict(enumerate(losses, line["step"] - len(losses) + 1))
    return steps


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a run in this process, which several tests compare with."""
    run_dir = tmp_path_factory.mktemp("base") / "run"
    assert main([*TINY, *options("num_steps=6", f"run_dir={run_dir}")]) == 0
    return run_dir


# -- A whole run ------------------------------------------------------------------------


def test_a_run_from_a_shell(tmp_path):
    # From elsewhere than the project, so that neither imports nor paths depend on it.
    run = shell(*TINY, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "\x1b" not in run.stdout and "\r" not in run.stdout

    # What it says before it starts, in order.
    parts = [
        "--config.model=MLP",
        "--config.model.widths=16",
        "versions: python ",
        f"jpipe {jpipe.__version__}",
        "seed: 0",
        "mesh: stage=2 (2 x cpu)",
        "data: MNIST, 8,572 training and 2,000 test images",
        "run folder: runs/quickstart-",
        "stage  device  layers",
        "12,560",  # parameters of the first stage: 784 * 16 + 16
        "each device holds ",
        "  gradients ",
        "gpipe: 2 stages, 2 devices, 2 microbatches, 6 ticks",
        "bubble 33.3%",
        "compiled in ",
        "activations in flight",
        "step 2/5   40%  epoch 0.02/0.06  loss ",
        "step 4/5   80%  epoch 0.05/0.06  loss ",
        "step 5/5  100%  epoch 0.06/0.06  loss ",
        "held-out images: accuracy ",
        " s in all; log and pictures in runs/quickstart-",
    ]
    places = [run.stdout.find(part) for part in parts]
    assert -1 not in places, parts[places.index(-1)]
    assert places == sorted(places)

    # What it leaves behind.
    (run_dir,) = (tmp_path / "runs").iterdir()
    names = {path.name for path in run_dir.iterdir()}
    (events,) = run_dir.glob("events.out.tfevents.*")
    assert names == {
        ".lock",
        "config.json",
        "log.jsonl",
        "schedule.svg",
        "run.png",
        events.name,
    }
    config = json.loads((run_dir / "config.json").read_text())
    assert config["name"] == "quickstart" and config["run_dir"] is None
    assert config["model"] == {
        "type": "MLP",
        "num_inputs": 784,
        "widths": [16],
        "num_outputs": 10,
    }
    assert (run_dir / "schedule.svg").read_text().startswith("<?xml")
    assert (run_dir / "run.png").read_bytes().startswith(b"\x89PNG")
    first, *steps, result = log_of(run_dir)
    assert first["step"] == 0
    assert first["memory_bytes"]["weights"] >= 4 * 12_560  # of the largest stage
    assert [line["step"] for line in steps] == [2, 4, 5]
    for line in steps:
        assert line["loss"] < 4 and line["images_per_second"] > 0
        assert 0 < line["gradient_norm"] < 100
        assert first["seconds"] < line["seconds"] < result["seconds"]
        assert 2**24 < line["peak_memory_bytes"] < 2**40
    # As in the config: a warmup of 40 steps to 2e-2.
    rates = [line["learning_rate"] for line in steps]
    np.testing.assert_allclose(rates, [2e-2 * k / 40 for k in (2, 4, 5)], rtol=1e-5)
    each = [rate for line in steps for rate in line["each_step"]["learning_rate"]]
    np.testing.assert_allclose(each, [2e-2 * k / 40 for k in range(1, 6)], rtol=1e-5)
    assert 0 < result["test_accuracy"] < 1 and result["test_loss"] < 4
    assert [step for step, _ in events_of(run_dir)] == [0, 2, 4, 5, 5]


@pytest.mark.exhaustive
def test_a_run_is_repeated_from_its_config_json(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["--config", str(base / "config.json")]) == 0
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith("quickstart-")
    for again, line in zip(log_of(run_dir), log_of(base), strict=True):
        for name in ("loss", "test_loss", "test_accuracy", "each_step"):
            assert again.get(name) == line.get(name)
    texts = [(path / "config.json").read_text() for path in (run_dir, base)]
    assert texts[0] == texts[1]


@pytest.mark.exhaustive
def test_numbers_depend_on_the_seed_and_not_on_the_devices(base, tmp_path):
    def losses(name, *words):
        words = options(f"run_dir={tmp_path / name}", "num_steps=6", *words)
        assert main([*TINY, *words]) == 0
        losses = training_losses(tmp_path / name)
        return [*losses.values(), log_of(tmp_path / name)[-1]["test_loss"]]

    two = [*training_losses(base).values(), log_of(base)[-1]["test_loss"]]
    assert len(two) == 7 and two[5] < two[0]
    replicated = losses("replicated", "mesh.data=2", "pipeline.num_stages=1")
    sharded = losses("sharded", "mesh.fsdp=2")
    np.testing.assert_allclose(replicated, two, rtol=1e-4)
    np.testing.assert_allclose(sharded, two, rtol=1e-4)
    other = losses("other", "seed=1", "pipeline.num_stages=1")
    assert np.abs(np.subtract(other, two)).min() > 1e-3


@pytest.mark.exhaustive
def test_evaluation_while_training(tmp_path, capsys):
    table = jpipe.schedules.one_f_one_b(2, 2, ticks="unit")
    (tmp_path / "mine.txt").write_text(table.to_text())

    def records(name, *words):
        words = options(
            f"pipeline.schedule_file={tmp_path / 'mine.txt'}",
            "optimizer.decay=constant",
            "optimizer.warmup_steps=0",
            f"run_dir={tmp_path / name}",
            *words,
        )
        assert main([*TINY, *words]) == 0
        return log_of(tmp_path / name)[1:]

    whole = records("whole", "num_steps=4", "log_every=3", "eval_every=2")
    assert [line["step"] for line in whole] == [2, 3, 4, 4]
    first, _, _, last = whole
    assert "test_loss" in first and "test_loss" in last
    out = capsys.readouterr().out
    assert "mine: 2 stages, 2 devices, 2 microbatches" in out
    assert f"step 2/4  held-out images: accuracy {first['test_accuracy']:.2%}" in out

    # It does not change training, and sees the weights as they are after its step.
    shorter = records("shorter", "num_steps=2")
    assert shorter[0]["each_step"]["loss"] == whole[1]["each_step"]["loss"][:2]
    assert shorter[-1]["test_loss"] == pytest.approx(first["test_loss"], rel=1e-5)
    assert shorter[-1]["test_accuracy"] == first["test_accuracy"]


@pytest.mark.exhaustive
def test_evaluation_of_an_asynchronous_run_on_a_part(tmp_path):
    words = options(
        "pipeline.schedule=pipedream",
        "num_steps=4",
        "log_every=3",
        "eval_every=3",
        "eval_batches=1",
        f"run_dir={tmp_path / 'run'}",
    )
    assert main([*TINY, *words]) == 0
    lines = log_of(tmp_path / "run")[1:]
    assert [line["step"] for line in lines] == [3, 3, 4, 4]
    # The first 100 images; after the last step all of them.
    for line, num_examples in ((lines[1], 100), (lines[3], 2000)):
        hits = line["test_accuracy"] * num_examples
        assert hits == pytest.approx(round(hits), abs=1e-3)
    assert lines[1]["test_accuracy"] * 2000 % 20 == pytest.approx(0, abs=1e-3)


@pytest.mark.exhaustive
def test_a_synchronous_warm_up_is_handed_over(base, tmp_path, capsys):
    """The first steps are GPipe's; then the asynchronous schedule trains on, with corrections."""
    words = options(
        "num_steps=6",
        "pipeline.schedule=pipemare",
        "pipeline.synchronous_steps=3",
        "optimizer.annealing_steps=10",
        "optimizer.discrepancy_decay=0.5",
        "optimizer.predict_weights=true",
        f"run_dir={tmp_path / 'warm'}",
    )
    assert main([*TINY, *words]) == 0
    plain, warm = training_losses(base), training_losses(tmp_path / "warm")
    np.testing.assert_allclose(
        [warm[step] for step in (1, 2, 3)],
        [plain[step] for step in (1, 2, 3)],
        rtol=1e-5,
    )
    assert np.isfinite(warm[6]) and warm[6] != plain[6]
    (handover,) = (line for line in log_of(tmp_path / "warm") if "schedule" in line)
    assert (handover["step"], handover["schedule"]) == (3, "pipemare")
    assert "step 3/6  pipemare takes over" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_text_is_counted_in_tokens_and_matrices_are_split(tmp_path, capsys):
    (tmp_path / "some.txt").write_text("To be, or not to be. " * 90)
    words = options(
        "pipeline.num_stages=2",
        "pipeline.num_microbatches=2",
        "num_steps=3",
        "data=Text",
        f"data.path={tmp_path / 'some.txt'}",
        "data.seq_len=8",
        "model=Transformer",
        "model.seq_len=8",
        "model.dim=8",
        "model.num_heads=2",
        "model.num_blocks=1",
        "model.tie_embeddings=true",
        "batch_size=4",
    )
    losses = []
    for model in (1, 2):
        run_dir = tmp_path / f"model{model}"
        more = options(f"mesh.model={model}", f"run_dir={run_dir}")
        assert main([*QUICKSTART, *words, *more]) == 0
        losses.append([*training_losses(run_dir).values()])
    out = capsys.readouterr().out
    assert " samples/s " in out and " tokens/s " in out and "held-out tokens: accuracy " in out
    *_, line, result = log_of(tmp_path / "model1")
    assert line["tokens_per_second"] > 0
    assert result["bits_per_byte"] == pytest.approx(result["test_loss"] / np.log(2))
    # Two devices share each stage, and the numbers stay.
    assert "mesh: stage=2 (2 x cpu)" in out and "mesh: stage=2, model=2 (4 x cpu)" in out
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    weights = [log_of(tmp_path / f"model{model}")[0]["memory_bytes"]["weights"] for model in (1, 2)]
    assert weights[1] < weights[0]


@pytest.mark.exhaustive
def test_a_compressed_run_says_what_it_sends_and_loses(tmp_path, capsys):
    words = options(
        "mesh.data=2",
        "mesh.compress_gradients=threshold:density=0.1",
        "pipeline.compress_messages=quantize:bits=8",
    )
    assert main([*TINY, *words, f"--config.run_dir={tmp_path / 'run'}"]) == 0
    printed = capsys.readouterr().out
    (ratio,) = re.findall(r"activation, a microbatch +0 to 1 .* (3\.\d)$", printed, re.M)
    assert re.search(r"gradients of weights, a step +0 .* \d\.\d$", printed, re.M)
    assert re.search(r"compression +[\d.]+ KiB", printed)
    assert "error norm" in printed
    lines = [r for r in log_of(tmp_path / "run") if "each_step" in r]
    for line in lines:
        numbers = line["compression"]
        assert numbers["error_norm"] > 0
        assert f"{numbers['message_ratio']:.1f}" == ratio
        assert 1 < numbers["gradient_ratio"] < 10
        assert 0.05 < numbers["gradient_density"] < 1
        assert numbers["gradient_overflow"] >= 0


def test_the_arguments_of_a_pipeline():
    config = TrainConfig(model=MLP(), data=MNIST())
    tied = flags.override(config, {"model": {"": "Transformer", "tie_embeddings": "true"}})
    mesh = jpipe.make_mesh(stage=1)
    assert not config.options_of_pipeline(mesh)["ties"]
    options = tied.options_of_pipeline(mesh)
    assert options["ties"] == [((0, "token.embedding"), (-1, "embedding"))]
    assert options["loss"] == CrossEntropy() and options["has_aux"]
    assert options["boundaries"] == "flops" and options["mesh"] is mesh


@pytest.mark.exhaustive
def test_a_terminal_gets_a_progress_bar(tmp_path):
    parent, child = pty.openpty()
    words = [*ONE_STAGE, *options("num_steps=40", f"run_dir={tmp_path / 'run'}")]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train" / "train.py"), *words],
        stdout=child,
        stderr=subprocess.PIPE,
        env=environment(TERM="xterm", COLUMNS="100"),
    )
    os.close(child)
    written = b""
    while process.poll() is None or select.select([parent], [], [], 0)[0]:
        if select.select([parent], [], [], 0.1)[0]:
            try:
                written += os.read(parent, 65536)
            except OSError:  # closed by the other side
                break
    os.close(parent)
    assert process.wait() == 0, process.stderr.read()
    process.stderr.close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.decode())
    assert "━" in text and "40/40" in text and " images/s " in text
    assert "step  2/40    5%  epoch 0.02/0.47  loss " in text
    assert "held-out images: accuracy" in text


# -- What goes wrong --------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, capsys):
    words = options(f"run_dir={tmp_path / 'run'}", "optimizer.warmup_steps=0")
    assert main([*ONE_STAGE, "--config.optimizer.learning_rate=1e30", *words]) == 1
    error = capsys.readouterr().err
    assert re.match(r"train.py: step 2: the loss is (nan|inf)\. Training stopped", error)
    assert "a smaller --config.optimizer.learning_rate (now 1e+30)" in error
    assert str(tmp_path / "run") in error
    _, line, last = log_of(tmp_path / "run")
    assert line["step"] == 1 and line["loss"] < 4
    assert last.keys() == {"step", "loss", "error"}
    assert (tmp_path / "run" / "run.png").exists()


def test_gradients_that_are_never_finite_stop_the_run(tmp_path, capsys, monkeypatch):
    step = jpipe.Pipeline.step

    def broken(*args):
        state, metrics = step(*args)
        return state, {**metrics, "skipped_updates": np.ones(1, np.int32)}

    monkeypatch.setattr(jpipe.Pipeline, "step", broken)
    words = options(
        "num_steps=100",
        f"run_dir={tmp_path / 'run'}",
        "pipeline.compute_dtype=float16",
    )
    assert main([*ONE_STAGE, *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith(
        "train.py: step 20: the gradients of the last 20 steps were not finite, so none "
        "of them updated the weights. Training stopped. Try a smaller --config."
    )
    assert "--config.pipeline.compute_dtype=bfloat16" in error
    assert log_of(tmp_path / "run")[-1]["step"] == 20
    assert (tmp_path / "run" / "run.png").exists()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", ["full disk", "removed folder", "full at the end"])
def test_a_run_that_cannot_write_trains_to_its_end_and_says_so(tmp_path, monkeypatch, capsys, fault):
    function, calls, run_dir = script.record, [], tmp_path / "run"

    def record(*args, **options):
        calls.append(args)
        if len(calls) == 3:
            if fault == "full disk":
                limits.enter_context(file_size_limit(1000))
            elif fault == "removed folder":
                shutil.rmtree(run_dir)
        function(*args, **options)

    def save(path):
        with file_size_limit(1000):
            return draw(path)

    draw = script.plot.save
    monkeypatch.setattr(script, "record", record)
    if fault == "full at the end":
        monkeypatch.setattr(script.plot, "save", save)
    words = options("num_steps=9", "log_every=1", f"run_dir={run_dir}")
    with contextlib.ExitStack() as limits:
        code = main([*ONE_STAGE, *words])
    output = capsys.readouterr()
    assert code == 3 and len(calls) == 9
    assert "held-out images: accuracy" in output.out
    *warnings, last = output.err.splitlines()
    assert last.startswith("train.py: ") and len(warnings) <= 1
    if fault == "full at the end":
        assert "cannot write the picture of the run: File too large" in last
        assert log_of(run_dir)[-1]["step"] == 9
        assert not (run_dir / "run.png").exists()
        return
    assert "step 3: cannot write the log" in warnings[0]
    # Steps 3 to 9, and the held-out data.
    assert "The last 8 records of the log could not be written." in last
    if fault == "full disk":
        assert last.endswith(f"The log up to here is in {run_dir}.")
        assert [line["step"] for line in log_of(run_dir)] == [0, 1, 2]  # whole records
    else:
        assert last.endswith("The log is lost.") and not run_dir.exists()


@pytest.mark.parametrize(
    "words, message",
    [
        (["--config.pipeline.num_stage=2"], "Did you mean 'num_stages'?"),
        (["--config.pipeline.schedule=gpip"], "Did you mean"),
        (["--config.pipeline.schedule_file=no.txt"], "no.txt"),
        (["--config.pipeline.num_stages=3"], "3 stages"),
        (
            ["--config.pipeline.num_stages=9", "--config.model.widths=" + "8," * 9],
            "9 dev",
        ),
        (["--config.pipeline.boundaries=5"], "`boundaries`"),
        (["--config.pipeline.model=2"], "Did you mean `--config.mesh.model`?"),
        (["--config.batch_size=101"], "101 cannot be cut into 2 equal microbatches"),
        (["--config.batch_size=100000"], "Use a `batch_size` of at most 8572"),
        (["--config.data.dir=nowhere"], "Put the four official files there"),
        (["--config.data=Pairs"], "`data.path` must name a file of sentence pairs"),
        (["--config.data=MNISTPixels"], "Train this model on a data set that labels"),
        (["--config.run_dir=."], "`run_dir` must be new or empty"),
        (
            ["--config.run_dir=/proc/nope"],
            "cannot write to the run folder `/proc/nope`",
        ),
        (["--config.pipeline.synchronous_steps=2"], "before 'gpipe', which is sync"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("")  # what `run_dir=.` must not mix with
    assert main([*TINY, *words]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("train.py: ") and message in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_profiled_steps_leave_a_trace(base, tmp_path, capsys):
    """Of the steps that are named, in three files; the run computes what it would without."""
    run_dir = tmp_path / "run"
    assert main([*TINY, *options("num_steps=6", "profile=2:4", f"run_dir={run_dir}")]) == 0
    assert training_losses(run_dir) == training_losses(base)
    trace = jpipe.trace.read(run_dir / "trace.json")
    assert trace.num_steps == 2
    assert (run_dir / "trace.svg").read_text().startswith("<?xml")
    assert json.loads((run_dir / "trace.perfetto.json").read_text())["traceEvents"]
    assert f"trace: bubble {trace.bubble:.1%} measured in 2 steps, 33.3% in the table" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_run_goes_on_without_a_trace_that_cannot_be_recorded(tmp_path, capsys):
    run_dir = tmp_path / "run"
    words = options("num_steps=3", "profile=2:4", f"run_dir={run_dir}")
    with jax.profiler.trace(str(tmp_path / "other")), pytest.warns(UserWarning, match="no trace .* End the other"):
        assert main([*ONE_STAGE, *words]) == 0
    assert not list(run_dir.glob("trace*"))


def test_a_run_folder_without_space_is_noticed_before_compilation(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jpipe, "Pipeline", None)  # nothing gets so far
    with file_size_limit(1000):
        assert main([*TINY, f"--config.run_dir={tmp_path / 'a' / 'b'}"]) == 2
    error = capsys.readouterr().err
    assert "cannot write to the run folder" in error and error.count("\n") == 1
    assert "Name another as `--config.run_dir=FOLDER`, or free space." in error
    assert not any(tmp_path.iterdir())


def test_mistakes_from_a_shell_show_no_traceback():
    run = shell(*QUICKSTART, JAX_PLATFORMS="cuda")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("train.py: JAX finds no devices of the kind that JAX_")
    assert "Set JAX_PLATFORMS=cpu" in run.stderr and run.stderr.count("\n") == 1


def test_a_number_of_devices_in_the_environment_is_respected():
    run = shell(*QUICKSTART, XLA_FLAGS="--xla_force_host_platform_device_count=3")
    assert run.returncode == 2
    assert "the schedule needs 4 devices, got 3 (cpu)." in run.stderr


def test_too_few_devices_of_another_kind(monkeypatch):
    class Device:
        platform = "gpu"

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    with pytest.raises(ValueError, match="got 1 .gpu.. Set JAX_PLATFORMS=cpu"):
        check_devices(4)
    with pytest.raises(ValueError, match="4 devices for each of 2 replicas, got 1"):
        check_devices(4, 2)
    with pytest.raises(ValueError, match="fewer replicas: --config.mesh.data=1."):
        check_devices(1, 2)
    with pytest.raises(ValueError, match="needs 8 devices .4 x model=2., got 1"):
        check_devices(4, 1, model=2)
    with pytest.raises(ValueError, match="8 devices .2 x model=2 x fsdp=2. for each"):
        check_devices(2, 2, model=2, fsdp=2)


@pytest.mark.exhaustive
def test_sigterm_ends_a_run_like_ctrl_c(tmp_path):
    words = options("num_steps=1000000", "log_every=7", f"run_dir={tmp_path / 'run'}")
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train" / "train.py"), *ONE_STAGE, *words],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for line in process.stdout:
            if line.startswith("step "):
                break
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143
    run_dir = tmp_path / "run"
    stopping, stopped = error.strip().splitlines()
    assert stopping.startswith("train.py: SIGTERM: stopping after this step; a second")
    (step,) = re.findall(
        r"^train.py: stopped after step (\d+) of 1000000\. The log up to here is in",
        stopped,
    )
    # Every step is in a line, the last one in a shorter one.
    steps = [line["step"] for line in log_of(run_dir)]
    assert steps == [*range(0, int(step), 7), int(step)]
    assert [k for k, _ in events_of(run_dir)] == steps
    assert (run_dir / "run.png").exists()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "place, num_calls, last, steps",
    [
        ("record", 3, 4, [0, 2, 3, 4]),  # step 3 is recorded while step 4 runs
        ("evaluate", 1, 2, [0, 2]),  # in the evaluation after step 2
        ("evaluate", 5, 9, [0, 2, 3, 4, 6, 6, 8, 9]),  # in the last one
    ],
)
def test_an_interrupt_loses_nothing(tmp_path, monkeypatch, capsys, place, num_calls, last, steps):
    function, calls = getattr(script, place), []

    def interrupting(*args, **kwargs):
        calls.append(place)
        if len(calls) == num_calls:
            os.kill(os.getpid(), signal.SIGINT)
        return function(*args, **kwargs)

    monkeypatch.setattr(script, place, interrupting)
    words = options(
        "num_steps=9",
        "log_every=3",
        "eval_every=2",
        "eval_batches=2",
        f"run_dir={tmp_path / 'run'}",
    )
    assert main([*ONE_STAGE, *words]) == 130
    assert f"stopped after step {last} of 9. The log up" in capsys.readouterr().err
    assert [line["step"] for line in log_of(tmp_path / "run")] == steps
    assert (tmp_path / "run" / "run.png").exists()
    assert len(calls) <= num_calls + 1  # it ends soon


# -- Help -------------------------------------------------------------------------------


def test_without_arguments_the_usual_commands_are_shown(capsys):
    assert main([]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert "`--help` lists all options" in first
    commands = [line.strip() for line in lines if line]
    assert len(commands) == 3
    assert all(each.startswith("python train/train.py --") for each in commands)


@pytest.mark.parametrize("words", [["--help"], ["-h"]])
def test_help_shows_commands_and_options(words, capsys):
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "python train/train.py --config configs/quickstart.py\n" in out
    assert "--config.pipeline.num_stages: int; default 4\n" in out
    assert "--config.model=Transformer has" in out


def test_help_of_a_config_shows_its_values(capsys):
    assert main([*TINY, "--help"]) == 0
    assert "--config.model.widths: int,int,...; now 16\n" in capsys.readouterr().out
    assert main(["--config", "no.py", "--help"]) == 2


def test_commands_in_the_help_work(capsys):
    main(["--help"])
    commands = re.findall(r"python train/train.py (--config .*)", capsys.readouterr().out)
    assert len(commands) == 5
    for command in commands:
        path = command.split()[1]
        assert (ROOT / path).is_file(), path


# -- Parts ------------------------------------------------------------------------------


def test_evaluation_counts_every_example_once():
    data, loss = MNIST().load(), CrossEntropy()
    pipe = jpipe.Pipeline(
        MLP(widths=(8,)).layers(),
        loss=loss,
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.gpipe(2, 2),
        has_aux=True,
    )
    batch = data.train.batch(np.arange(300), None)
    state = pipe.init(jax.random.key(0), batch)
    result = evaluate(pipe, state, data.test, 300)  # 2,000 = 6 * 300 + 200
    outputs = np.concatenate([pipe.predict(state, batch) for batch in in_order(data.test, 300)])
    labels = data.test.labels.astype(np.int32)
    assert len(outputs) == 2000
    expected, averages = loss(jnp.asarray(outputs), {"labels": labels})
    assert result["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert result["accuracy"] == pytest.approx(np.mean(outputs.argmax(-1) == labels))
    assert result["accuracy"] == pytest.approx(float(averages["accuracy"]))
    # A part, and what ends it.
    part = evaluate(pipe, state, data.test, 300, 2)
    expected, _ = loss(jnp.asarray(outputs[:600]), {"labels": labels[:600]})
    assert part["loss"] == pytest.approx(float(expected), rel=1e-5)
    with pytest.raises(ZeroDivisionError):
        evaluate(pipe, state, data.test, 300, None, lambda: 1 / 0)


# -- The quickstart, whole --------------------------------------------------------------


@pytest.mark.slow
def test_the_quickstart_learns(tmp_path):
    start = time.perf_counter()
    run = shell(*QUICKSTART, f"--config.run_dir={tmp_path / 'run'}")
    assert run.returncode == 0, run.stderr
    assert log_of(tmp_path / "run")[-1]["test_accuracy"] >= 0.97
    assert time.perf_counter() - start < 180
