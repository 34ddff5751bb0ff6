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
import numpy as np
import optax
import pytest

import jpipe
from models import MLP
from train.data import in_order
from train.devices import check_devices
from train.log import Log, NonFiniteLossError
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


def log_of(run_dir):
    return [json.loads(line) for line in (run_dir / "log.jsonl").open()]


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
        " s in all",
    ]
    places = [run.stdout.find(part) for part in parts]
    assert -1 not in places, parts[places.index(-1)]
    assert places == sorted(places)

    # What it leaves behind.
    (run_dir,) = (tmp_path / "runs").iterdir()
    names = {path.name for path in run_dir.iterdir()}
    assert names == {"config.json", "log.jsonl", "schedule.svg"}
    config = json.loads((run_dir / "config.json").read_text())
    assert config["model"] == {
        "type": "MLP",
        "num_inputs": 784,
        "widths": [16],
        "num_outputs": 10,
    }
    assert (run_dir / "schedule.svg").read_text().startswith("<?xml")
    *steps, result = log_of(run_dir)
    assert [line["step"] for line in steps] == [2, 4, 5]
    assert all(line["loss"] < 4 and line["images_per_second"] > 0 for line in steps)
    assert 0 < result["test_accuracy"] < 1 and result["test_loss"] < 4


def test_numbers_depend_on_the_seed_and_not_on_the_stages(tmp_path):
    def losses(name, *words):
        words = [f"--config.run_dir={tmp_path / name}", *words]
        assert main([*TINY, "--config.log_every=1", *words]) == 0
        return [
            line.get("loss", line.get("test_loss")) for line in log_of(tmp_path / name)
        ]

    two = losses("two")
    assert len(two) == 6
    assert two[-2] < two[0]
    assert losses("again") == two
    one = losses("one", "--config.pipeline.num_stages=1")
    np.testing.assert_allclose(one, two, rtol=1e-4)
    other = losses("other", "--config.seed=1")
    assert np.abs(np.subtract(other, two)).min() > 1e-3


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
    assert log_of(tmp_path / "run")[-1].keys() == {"step", "loss", "error"}


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


def test_interrupting_keeps_the_log(tmp_path):
    words = ["--config.num_steps=1000000", f"--config.run_dir={tmp_path / 'run'}"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train" / "train.py"), *TINY, *words],
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
    assert re.search(r"train.py: stopped after step \d+ of 1000000\.", error)
    assert "Traceback" not in error
    assert log_of(tmp_path / "run")[0]["step"] == 2


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
    )
    batch = data.train.batch(np.arange(300), None)
    state = pipe.init(jax.random.key(0), batch)
    loss, accuracy = evaluate(pipe, state, data.test, 300)  # 2,000 = 6 * 300 + 200
    outputs = np.concatenate(
        [pipe.predict(state, b)[:n] for b, n in in_order(data.test, 300)]
    )
    labels = data.test.labels.astype(np.int32)
    assert len(outputs) == 2000
    assert loss == pytest.approx(float(loss_fn(outputs, {"labels": labels})), rel=1e-5)
    assert accuracy == np.mean(outputs.argmax(axis=-1) == labels)


def make_log(tmp_path, **changes):
    options = dict(num_steps=5, log_every=2, unit="images", units_per_step=10)
    return Log(tmp_path / "log.jsonl", **(options | changes))


def test_the_log_has_the_mean_since_the_line_before(tmp_path, capsys):
    with make_log(tmp_path) as log:
        for step, loss in enumerate([1.0, 2.0, 4.0, None, 5.0], start=1):
            log.step(step, loss, num_skipped=int(step == 3))
            lines = (tmp_path / "log.jsonl").read_text().splitlines()
            assert len(lines) == (0, 1, 1, 2, 3)[step - 1]  # written at once
    first, second, third = log_of(tmp_path)
    assert (first["loss"], second["loss"], third["loss"]) == (1.5, 4.0, 5.0)
    assert second["skipped_updates"] == 1 and "skipped_updates" not in third
    assert "updates skipped, gradients not finite: 1" in capsys.readouterr().out


def test_the_log_of_a_pipeline_that_fills_has_no_loss(tmp_path):
    with make_log(tmp_path) as log:
        log.step(1, None)
        log.step(2, None)
    (line,) = log_of(tmp_path)
    assert "loss" not in line and line["step"] == 2


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_the_log_names_the_step_of_a_loss_that_is_not_finite(tmp_path, loss):
    with make_log(tmp_path) as log:
        log.step(1, 1.0)
        with pytest.raises(NonFiniteLossError, match=f"step 2: the loss is {loss}"):
            log.step(2, loss)
    (line,) = log_of(tmp_path)
    assert line == {"step": 2, "loss": None, "error": f"the loss is {loss}"}


# -- The quickstart, whole --------------------------------------------------------------


@pytest.mark.slow
def test_the_quickstart_learns(tmp_path):
    start = time.perf_counter()
    run = shell(*QUICKSTART, f"--config.run_dir={tmp_path / 'run'}")
    assert run.returncode == 0, run.stderr
    assert log_of(tmp_path / "run")[-1]["test_accuracy"] >= 0.97
    assert time.perf_counter() - start < 180
