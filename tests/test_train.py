"""The training script, as a user runs it and from within."""

import json
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import events_of, log_of

import jpipe
from models import MLP
from train import train as script
from train.data import in_order
from train.devices import check_devices
from train.mnist import MNIST
from train.train import evaluate, loss_fn, main

ROOT = pathlib.Path(__file__).parents[1]
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


@pytest.fixture(autouse=True)
def _restore_flags(monkeypatch):
    # Runs in this process add to the variable.
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))


def environment(**changes):
    """That of a fresh shell, in which nobody has chosen devices."""
    own = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "PYTHONPATH")
    return {k: v for k, v in os.environ.items() if k not in own} | {
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
        "gpipe: 2 stages, 2 devices, 2 microbatches, 6 ticks",
        "bubble 33.3%",
        "compiled in ",
        "activations in flight",
        "step 2/5  loss ",
        "step 4/5  loss ",
        "step 5/5  loss ",
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
        "config.json",
        "log.jsonl",
        "schedule.svg",
        "run.png",
        events.name,
    }
    config = json.loads((run_dir / "config.json").read_text())
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
    assert 0 < result["test_accuracy"] < 1 and result["test_loss"] < 4
    assert [step for step, _ in events_of(run_dir)] == [0, 2, 4, 5, 5]


def test_numbers_depend_on_the_seed_and_not_on_the_devices(tmp_path):
    def losses(name, *words):
        words = [f"--config.run_dir={tmp_path / name}", *words]
        assert main([*TINY, "--config.log_every=1", *words]) == 0
        return [
            line.get("loss", line.get("test_loss"))
            for line in log_of(tmp_path / name)[1:]
        ]

    two = losses("two")
    assert len(two) == 6
    assert two[-2] < two[0]
    assert losses("again") == two
    one = losses("one", "--config.pipeline.num_stages=1")
    np.testing.assert_allclose(one, two, rtol=1e-4)
    replicated = losses("replicated", "--config.pipeline.data=2")
    np.testing.assert_allclose(replicated, two, rtol=1e-4)
    other = losses("other", "--config.seed=1")
    assert np.abs(np.subtract(other, two)).min() > 1e-3


@pytest.mark.parametrize("schedule", ["one_f_one_b", "pipedream"])
def test_evaluation_while_training(tmp_path, schedule, capsys):
    def records(name, *words):
        words = [
            f"--config.{word}"
            for word in (*common, f"run_dir={tmp_path / name}", *words)
        ]
        assert main([*TINY, *words]) == 0
        return log_of(tmp_path / name)[1:]

    common = [
        f"pipeline.schedule={schedule}",
        "optimizer.decay=constant",
        "optimizer.warmup_steps=0",
    ]
    whole = records("whole", "num_steps=4", "log_every=3", "eval_every=2")
    assert [line["step"] for line in whole] == [2, 3, 4, 4]
    first, _, _, last = whole
    assert "test_loss" in first and "test_loss" in last
    out = capsys.readouterr().out
    assert f"step 2/4  held-out images: accuracy {first['test_accuracy']:.2%}" in out

    # The first 100 of them; before the last step alone.
    part = records(
        "part", "num_steps=4", "log_every=3", "eval_every=3", "eval_batches=1"
    )
    assert [line["step"] for line in part] == [3, 3, 4, 4]
    for line, num_examples in ((part[1], 100), (part[3], 2000)):
        hits = line["test_accuracy"] * num_examples
        assert hits == pytest.approx(round(hits), abs=1e-3)

    # It does not change training, and sees the weights as they are after its step.
    assert part[0]["loss"] == whole[1]["loss"]
    assert part[3]["test_loss"] == whole[3]["test_loss"]
    if schedule == "one_f_one_b":
        shorter = records("shorter", "num_steps=2")
        assert shorter[-1]["test_loss"] == pytest.approx(first["test_loss"], rel=1e-5)
        assert shorter[-1]["test_accuracy"] == first["test_accuracy"]


def test_a_synchronous_warm_up_is_handed_over(tmp_path, capsys):
    """The first steps are GPipe's; the asynchronous schedule goes on, with corrections, and ends with everything done."""

    def losses(name, *words):
        words = [*words, "num_steps=6", "log_every=1", f"run_dir={tmp_path / name}"]
        assert main([*TINY, *(f"--config.{word}" for word in words)]) == 0
        lines = log_of(tmp_path / name)
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    corrected = [
        "pipeline.schedule=pipemare",
        "pipeline.num_microbatches=1",
        "optimizer.annealing_steps=10",
        "optimizer.discrepancy_decay=0.5",
        "optimizer.predict_weights=true",
    ]
    plain = losses("plain", "pipeline.num_microbatches=1")
    warm = losses("warm", *corrected, "pipeline.synchronous_steps=3")
    assert [warm[step] for step in (1, 2, 3)] == [plain[step] for step in (1, 2, 3)]
    assert np.isfinite(warm[6]) and warm[6] != plain[6]
    (handover,) = (line for line in log_of(tmp_path / "warm") if "schedule" in line)
    assert (handover["step"], handover["schedule"]) == (3, "pipemare")
    assert "step 3/6  pipemare takes over" in capsys.readouterr().out


def test_text_is_counted_in_tokens(tmp_path, capsys, monkeypatch):
    pipes, make = [], jpipe.Pipeline
    monkeypatch.setattr(
        jpipe, "Pipeline", lambda *a, **k: pipes.append(make(*a, **k)) or pipes[-1]
    )
    (tmp_path / "some.txt").write_text("To be, or not to be. " * 90)
    words = [
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
        f"run_dir={tmp_path / 'run'}",
    ]
    assert main([*QUICKSTART, *(f"--config.{word}" for word in words)]) == 0
    out = capsys.readouterr().out
    assert " tokens/s " in out and "held-out tokens: accuracy " in out
    *_, line, result = log_of(tmp_path / "run")
    assert line["tokens_per_second"] > 0
    assert pipes[0].ties == [((0, "token.embedding"), (-1, "embedding"))]
    assert result["bits_per_byte"] == pytest.approx(result["test_loss"] / np.log(2))


def test_a_schedule_from_a_file(tmp_path, capsys):
    table = jpipe.schedules.one_f_one_b(2, 4, ticks="unit")
    (tmp_path / "mine.txt").write_text(table.to_text())
    words = [
        f"--config.pipeline.schedule_file={tmp_path / 'mine.txt'}",
        f"--config.run_dir={tmp_path / 'run'}",
    ]
    assert main([*TINY, *words]) == 0
    assert "mine: 2 stages, 2 devices, 4 microbatches" in capsys.readouterr().out


def test_a_terminal_gets_a_progress_bar(tmp_path):
    parent, child = pty.openpty()
    words = [*TINY, "--config.num_steps=40", f"--config.run_dir={tmp_path / 'run'}"]
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
    assert "step  2/40  loss " in text
    assert "held-out images: accuracy" in text


# -- What goes wrong --------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, capsys):
    words = [
        f"--config.run_dir={tmp_path / 'run'}",
        "--config.optimizer.warmup_steps=0",
    ]
    assert main([*TINY, "--config.optimizer.learning_rate=1e30", *words]) == 1
    error = capsys.readouterr().err
    assert re.match(
        r"train.py: step 2: the loss is (nan|inf)\. Training stopped", error
    )
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
        return state, {**metrics, "skipped_updates": np.ones(2, np.int32)}

    monkeypatch.setattr(jpipe.Pipeline, "step", broken)
    words = [
        "num_steps=100",
        f"run_dir={tmp_path / 'run'}",
        "pipeline.compute_dtype=float16",
    ]
    assert main([*TINY, *(f"--config.{word}" for word in words)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(
        "train.py: step 20: the gradients of the last 20 steps were not finite, so none "
        "of them updated the weights. Training stopped. Try a smaller --config."
    )
    assert "--config.pipeline.compute_dtype=bfloat16" in error
    assert log_of(tmp_path / "run")[-1]["step"] == 20
    assert (tmp_path / "run" / "run.png").exists()


@pytest.mark.parametrize(
    "words, message",
    [
        (["--config.pipeline.num_stage=2"], "Did you mean `num_stages`?"),
        (["--config.pipeline.schedule=gpip"], "Did you mean 'gpipe'?"),
        (["--config.pipeline.schedule_file=no.txt"], "no.txt"),
        (["--config.pipeline.num_stages=3"], "3 stages"),
        (
            ["--config.pipeline.num_stages=9", "--config.model.widths=" + "8," * 9],
            "9 dev",
        ),
        (["--config.pipeline.boundaries=5"], "`boundaries`"),
        (["--config.batch_size=101"], "101 cannot be cut into 2 equal microbatches"),
        (["--config.batch_size=100000"], "Use a `batch_size` of at most 8572"),
        (["--config.data.dir=nowhere"], "Put the four official files there"),
        (["--config.run_dir=."], "`run_dir` must be new or empty"),
        (["--config.pipeline.synchronous_steps=2"], "before 'gpipe', which is sync"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    words, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("")  # what `run_dir=.` must not mix with
    assert main([*TINY, *words]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("train.py: ") and message in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_mistakes_from_a_shell_show_no_traceback():
    run = shell(*QUICKSTART, "--config.num_step=3")
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.startswith(
        "train.py: unknown option `--config.num_step`. Did you"
    )
    assert run.stderr.count("\n") == 1


def test_a_number_of_devices_in_the_environment_is_respected():
    for name, value in (
        ("XLA_FLAGS", "--xla_force_host_platform_device_count=3"),
        ("JAX_NUM_CPU_DEVICES", "3"),
    ):
        run = shell(*QUICKSTART, **{name: value})
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
    with pytest.raises(ValueError, match="fewer replicas: --config.pipeline.data=1."):
        check_devices(1, 2)


def test_interrupting_keeps_the_log(tmp_path):
    words = [
        "num_steps=1000000",
        "log_every=7",
        f"run_dir={tmp_path / 'run'}",
    ]
    process = subprocess.Popen(
        [
            sys.executable,
            str(ROOT / "train" / "train.py"),
            *TINY,
            *(f"--config.{word}" for word in words),
        ],
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
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    run_dir = tmp_path / "run"
    stopping, stopped = error.strip().splitlines()
    assert stopping.startswith("train.py: stopping after this step; Ctrl-C again")
    (step,) = re.findall(
        r"^train.py: stopped after step (\d+) of 1000000\. The log up to here is in",
        stopped,
    )
    # Every step is in a line, the last one in a shorter one.
    steps = [line["step"] for line in log_of(run_dir)]
    assert steps == [*range(0, int(step), 7), int(step)]
    assert [k for k, _ in events_of(run_dir)] == steps
    assert (run_dir / "run.png").exists()


@pytest.mark.parametrize(
    "place, num_calls, last, steps",
    [
        ("record", 3, 4, [0, 2, 3, 4]),  # step 3 is recorded while step 4 runs
        ("evaluate", 1, 2, [0, 2]),  # in the evaluation after step 2
        ("evaluate", 5, 9, [0, 2, 3, 4, 6, 6, 8, 9]),  # in the last one
    ],
)
def test_an_interrupt_loses_nothing(
    tmp_path, monkeypatch, capsys, place, num_calls, last, steps
):
    function, calls = getattr(script, place), []

    def interrupting(*args, **kwargs):
        calls.append(place)
        if len(calls) == num_calls:
            os.kill(os.getpid(), signal.SIGINT)
        return function(*args, **kwargs)

    monkeypatch.setattr(script, place, interrupting)
    words = [
        "pipeline.num_stages=1",
        "num_steps=9",
        "log_every=3",
        "eval_every=2",
        "eval_batches=2",
        f"run_dir={tmp_path / 'run'}",
    ]
    assert main([*TINY, *(f"--config.{word}" for word in words)]) == 130
    assert f"stopped after step {last} of 9" in capsys.readouterr().err
    assert [line["step"] for line in log_of(tmp_path / "run")] == steps
    assert (tmp_path / "run" / "run.png").exists()
    assert len(calls) <= num_calls + 1  # it ends soon


# -- Help -------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--help"], ["-h"], []])
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
    commands = re.findall(
        r"python train/train.py (--config .*)", capsys.readouterr().out
    )
    assert len(commands) == 4
    for command in commands:
        path = command.split()[1]
        assert (ROOT / path).is_file(), path


# -- Parts ------------------------------------------------------------------------------


def test_evaluation_counts_every_example_once():
    data = MNIST().load()
    pipe = jpipe.Pipeline(
        MLP(widths=(8,)).layers(),
        loss=loss_fn,
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.gpipe(2, 2),
        has_aux=True,
    )
    batch = data.train.batch(np.arange(300), None)
    state = pipe.init(jax.random.key(0), batch)
    loss, accuracy = evaluate(pipe, state, data.test, 300)  # 2,000 = 6 * 300 + 200
    outputs = np.concatenate(
        [pipe.predict(state, batch) for batch in in_order(data.test, 300)]
    )
    labels = data.test.labels.astype(np.int32)
    assert len(outputs) == 2000
    expected, aux = loss_fn(jnp.asarray(outputs), {"labels": labels})
    assert loss == pytest.approx(float(expected), rel=1e-5)
    assert accuracy == pytest.approx(np.mean(outputs.argmax(axis=-1) == labels))
    assert accuracy == pytest.approx(float(aux["accuracy"]))
    # A part, and what ends it.
    part, _ = evaluate(pipe, state, data.test, 300, 2)
    expected, _ = loss_fn(jnp.asarray(outputs[:600]), {"labels": labels[:600]})
    assert part == pytest.approx(float(expected), rel=1e-5)
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
