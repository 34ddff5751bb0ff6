"""Where the log goes beside its file, and what the seconds of a run went to."""

import json
import os
import subprocess
import sys
import time
import types

import numpy as np
import pytest
from helpers import log_of

from train import log as log_module
from train import writers
from train.goodput import KINDS
from train.log import Log
from train.tensorboard import scalars
from train.train import main
from train.writers import MLflow, WandB


def make_log(tmp_path, **changes):
    options = dict(num_steps=5, log_every=2, unit="images", learning_rate=lambda step: 0.5, start=time.perf_counter())
    return Log(tmp_path / "log.jsonl", **(options | changes))


RECORD = {"step": 3, "loss": 0.5, "error": "none", "memory_bytes": {"weights": 8}, "each_step": {"loss": [1.0]}}
OPTIONS = {"batch_size": "8", "pipeline.schedule": "gpipe"}


class Kept:
    """A writer that keeps what it gets, and fails from a record on."""

    def __init__(self, fails_at=None):
        self.records, self.num_closed, self.fails_at = [], 0, fails_at

    def write(self, record):
        if record["step"] == self.fails_at:
            raise RuntimeError("the network is down")
        self.records.append(json.loads(json.dumps(record)))

    def close(self):
        self.num_closed += 1


def test_every_writer_gets_every_record(tmp_path, capsys):
    good, bad = Kept(), Kept(fails_at=4)
    with make_log(tmp_path, writers=[bad, good]) as log:
        for step in range(1, 6):
            log.step(step, 1.0, num_units=10)
        log.held_out(5, {"test_loss": 2.0})
    assert good.records == log_of(tmp_path) and good.num_closed == 1
    assert bad.records == good.records[:1] and bad.num_closed == 1
    assert capsys.readouterr().err == (
        "train.py: warning: step 4: Kept gets no more records: the network is down. Training goes on.\n"
    )


def test_other_processes_give_nothing_to_writers():
    kept = Kept()
    with Log(None, num_steps=1, log_every=1, unit="a", learning_rate=float, start=0.0, writers=[kept]) as log:
        log.step(1, 1.0, num_units=1)
    assert not kept.records


# -- Packages, by stand-ins


@pytest.fixture
def wandb(monkeypatch):
    module = types.ModuleType("wandb")
    module.begun, module.logged, module.finished = [], [], 0

    class Run:
        id = "abc123"

        def log(self, values, step):
            module.logged.append((step, values))

        def finish(self):
            module.finished += 1

    def init(**options):
        module.begun.append(options)
        return Run()

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.fixture
def mlflow(monkeypatch):
    module = types.ModuleType("mlflow")
    module.begun, module.params, module.logged, module.finished = [], [], [], 0
    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="def456"))

    def start_run(**options):
        module.begun.append(options)
        return run

    def end_run():
        module.finished += 1

    module.start_run, module.end_run, module.log_params = start_run, end_run, module.params.append
    module.log_metrics = lambda values, step: module.logged.append((step, values))
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return module


def test_wandb(wandb, tmp_path):
    for _ in range(2):  # the second is a run that is resumed
        writer = writers.make("wandb", tmp_path, 1, OPTIONS)
        assert isinstance(writer, WandB)
        writer.write(RECORD)
        writer.close()
    first, second = wandb.begun
    assert first["config"] == OPTIONS and first["name"] == tmp_path.name and first["dir"] == str(tmp_path)
    assert first["project"] == "jpipe" and (first["id"], first["resume"]) == (None, None)
    assert (second["id"], second["resume"]) == ("abc123", "allow")
    assert wandb.logged == 2 * [(3, {"loss": 0.5, "memory_bytes/weights": 8})] and wandb.finished == 2


def test_mlflow(mlflow, tmp_path):
    for _ in range(2):
        writer = writers.make("mlflow", tmp_path, 1, OPTIONS)
        assert isinstance(writer, MLflow)
        writer.write(RECORD)
        writer.close()
    assert mlflow.begun == [
        {"run_id": None, "run_name": tmp_path.name},
        {"run_id": "def456", "run_name": None},
    ]
    assert mlflow.params == [OPTIONS] and mlflow.finished == 2
    assert mlflow.logged == 2 * [(3, {"loss": 0.5, "memory_bytes/weights": 8})]


def test_the_package_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs more packages
    for step in (1, 2):
        writer = writers.make("mlflow", tmp_path, 1, OPTIONS)
        writer.write(RECORD | {"step": step, "loss": 0.5 / step})
        writer.close()
    client = mlflow.MlflowClient()
    number = (tmp_path / "mlflow_id.txt").read_text().strip()
    run = client.get_run(number)
    assert run.data.params == OPTIONS and run.info.status == "FINISHED"
    assert [(m.step, m.value) for m in client.get_metric_history(number, "loss")] == [(1, 0.5), (2, 0.25)]
    assert run.data.metrics["memory_bytes/weights"] == 8


def test_the_package_wandb(tmp_path):
    """In a process of its own: the package writes its file when that ends."""
    pytest.importorskip("wandb")
    program = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "import pathlib\n"
        "from train import writers\n"
        f"writer = writers.make('wandb', pathlib.Path({str(tmp_path)!r}), 1, {OPTIONS!r})\n"
        f"writer.write({RECORD!r})\n"
        "writer.close()\n"
    )
    variables = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    subprocess.run([sys.executable, "-c", program], check=True, env=variables)
    (content,) = (file.read_bytes() for file in tmp_path.glob("wandb/offline-run-*/*.wandb"))
    number = (tmp_path / "wandb_id.txt").read_text().strip()
    assert number.encode() in content and b"memory_bytes/weights" in content and b"pipeline.schedule" in content


@pytest.mark.parametrize(
    "names, message",
    [
        (["wandbb"], "`log` must name tensorboard, wandb, mlflow, got 'wandbb'. Did you mean 'wandb'?"),
        (["wandb", "wandb"], "`log` names wandb twice"),
        (["none"], "got 'none'"),
    ],
)
def test_names_that_are_none(names, message):
    with pytest.raises(ValueError, match=message):
        writers.check_names(names)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "mlflow" else object())
    with pytest.raises(ValueError, match="log=mlflow,tensorboard` needs the package `mlflow`.*config.log=tensorboard`"):
        writers.check_packages(["mlflow", "tensorboard"])
    writers.check_packages(["tensorboard", "wandb"])


def test_a_run_of_the_script(wandb, mlflow, tmp_path, monkeypatch, capsys):
    """Options in, records out; a writer that cannot begin is a warning."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())

    def fails(**options):
        raise RuntimeError("no server")

    mlflow.start_run = fails
    words = ["--config", "quickstart", "--config.model=MLP", "--config.model.widths=8", "--config.num_steps=2"]
    words += [f"--config.run_dir={tmp_path / 'run'}", "--config.pipeline.num_stages=2", "--config.log=wandb,mlflow"]
    words += ["--config.optimizer.warmup_steps=1", "--config.batch_size=16", "--config.pipeline.num_microbatches=2"]
    monkeypatch.setattr("train.train.in_order", lambda examples, size: [examples.batch(np.arange(size), None)])
    with pytest.warns(UserWarning, match="mlflow cannot begin: no server. Training goes on without it"):
        assert main(words) == 0
    assert wandb.begun[0]["config"]["model.widths"] == "8"
    assert wandb.logged == [(record["step"], dict(scalars(record))) for record in log_of(tmp_path / "run")]
    assert wandb.finished == 1 and not list((tmp_path / "run").glob("events.*"))
    assert "\ngoodput " in capsys.readouterr().out
    last = log_of(tmp_path / "run")[-2]
    assert sum(last["goodput_seconds"].values()) == pytest.approx(last["seconds"], abs=0.1)


# -- Seconds


def test_seconds_of_a_run_that_is_resumed(tmp_path, monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(log_module, "time", types.SimpleNamespace(perf_counter=lambda: now))
    with make_log(tmp_path, num_steps=9, log_every=1, start=-5.0, writers=[]) as log:
        log.step(1, 1.0, num_units=1)  # compiling 5
        now += 4
        log.waited(1.0)
        with log.paused("saving"):
            now += 2
            position = json.loads(json.dumps(log.position()))
        now += 7
        log.step(2, 1.0, num_units=1)
        now += 1  # not in the log
    now += 1000  # between the processes
    with make_log(tmp_path, num_steps=9, log_every=1, start=now, writers=[], resumed=position) as log:
        now += 3
        log.step(2, 1.0, num_units=1)
        now += 6
        log.step(3, 1.0, num_units=1)
        log.print_goodput()
    last = log_of(tmp_path)[-1]
    want = {"training": 9.0, "compiling": 8.0, "saving": 2.0, "waiting": 1.0, "lost": 7.0}
    assert last["goodput_seconds"] == dict.fromkeys(KINDS, 0.0) | want
    assert last["seconds"] == 20.0  # lost seconds are those of the log that was cut off
    assert "goodput 33%: training 9.0 s, compiling 8.0 s, saving 2.0 s, waiting 1.0 s, lost 7.0 s\n" in (
        capsys.readouterr().out
    )
