"""A run that goes on from a checkpoint, and runs whose checkpoints cannot be written."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from helpers import file_size_limit, log_of

import jpipe
from jpipe._processes import restarts as _restarts
from train import train as script
from train.run_dir import _locked
from train.train import main

ROOT = pathlib.Path(__file__).parents[2]
TINY = [
    "--config",
    str(ROOT / "configs" / "quickstart.py"),
    "--config.model=MLP",
    "--config.model.widths=16",
    "--config.pipeline.num_stages=2",
    "--config.pipeline.num_microbatches=2",
    "--config.batch_size=100",
    "--config.num_steps=9",
    "--config.log_every=4",
    "--config.eval_every=5",
    "--config.eval_batches=1",
    "--config.checkpoint.every=3",
]
FLAGS = os.environ.get("XLA_FLAGS", "")  # other flags round otherwise
MEASURED = ("seconds", "images_per_second", "peak_memory_bytes", "goodput_seconds")


@pytest.fixture(scope="module", autouse=True)
def _restore_flags():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", FLAGS)
        yield


def options(*words):
    return [f"--config.{word}" for word in words]


def records(run_dir):
    """The log without what differs between two equal runs."""
    lines = log_of(run_dir)
    return [{k: v for k, v in line.items() if k not in MEASURED} for line in lines]


def params(run_dir):
    return jpipe.Checkpoints(run_dir / "checkpoints").params()


def run_of(folder, *words):
    assert main([*TINY, *options(f"run_dir={folder}", *words)]) == 0
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was not interrupted."""
    return run_of(tmp_path_factory.mktemp("runs") / "whole")


def stopped_after(run_dir, step, folder):
    """A copy of a run, as if it had died after a checkpoint, with later lines in its log."""
    shutil.copytree(run_dir, folder)
    for path in (folder / "checkpoints").iterdir():
        if int(path.name) > step:
            shutil.rmtree(path)
    return folder


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", [3, 6, 9])
@pytest.mark.sampled(4)
def test_the_log_and_the_weights_are_those_of_the_whole_run(whole, step, tmp_path, capsys):
    folder = stopped_after(whole, step, tmp_path / "run")
    assert main(["--resume", str(folder)]) == 0
    assert f"resumed after step {step} of 9" in capsys.readouterr().out
    assert records(folder) == records(whole)
    seconds = [line["seconds"] for line in log_of(folder)]
    assert seconds == sorted(seconds)
    np.testing.assert_equal(params(folder), params(whole))
    assert (folder / "run.png").exists() and not (folder / "config-1.json").exists()


IN_HOST_MEMORY = tuple(f"mesh.offload_{name}=1" for name in ("optimizer", "weights", "gradients"))
CHANGES = [
    ("pipeline.num_stages=1",),
    IN_HOST_MEMORY,
    ("pipeline.schedule=one_f_one_b",),
    ("mesh.data=2",),
    ("pipeline.schedule=pipedream", "pipeline.num_stages=2"),
]


@pytest.mark.exhaustive
@pytest.mark.sampled(6)
@pytest.mark.parametrize("words", CHANGES, ids=str)
def test_stages_replicas_and_schedule_may_change(whole, words, tmp_path):
    folder = stopped_after(whole, 6, tmp_path / "run")
    assert main(["--resume", str(folder), *options(*words)]) == 0
    got, want = records(folder), records(whole)
    assert [line["step"] for line in got] == [line["step"] for line in want]
    assert json.loads((folder / "config-1.json").read_text())["mesh"]["data"] == 1
    if "pipedream" in words[0]:
        return  # another training from here on
    for a, b in zip(got, want):
        if "each_step" in a:
            np.testing.assert_allclose(a["each_step"]["loss"], b["each_step"]["loss"], rtol=1e-4)


@pytest.mark.exhaustive
def test_an_asynchronous_run_goes_on_with_what_is_in_flight(tmp_path):
    words = ["pipeline.schedule=pipemare", "pipeline.synchronous_steps=4"]
    whole = run_of(tmp_path / "whole", *words)
    for step in (3, 6):  # in the warm-up, and after it
        folder = stopped_after(whole, step, tmp_path / f"after {step}")
        assert main(["--resume", str(folder)]) == 0
        assert records(folder) == records(whole)
        np.testing.assert_equal(params(folder), params(whole))


def test_one_command_starts_a_run_and_goes_on_with_it(whole, tmp_path, capsys):
    """As a cluster gives it again and again: nothing yet; killed before its first checkpoint; and after it."""
    folder = tmp_path / "run"
    command = ["--resume-or-start", str(folder), *TINY]
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("checkpoints"))
    (folder / "checkpoints" / "00000003.saving").mkdir(parents=True)
    assert main(command) == 0
    assert "resumed" not in capsys.readouterr().out
    assert records(folder) == records(whole)
    np.testing.assert_equal(params(folder), params(whole))
    folder = folder.rename(tmp_path / "ended")
    stopped_after(folder, 6, tmp_path / "run")
    (tmp_path / "run" / "config.json").unlink()
    assert main(command) == 2
    assert "it is not the folder of a run" in capsys.readouterr().err
    shutil.copy(folder / "config.json", tmp_path / "run")
    assert main([*command, "--config.seed=3"]) == 2
    assert "`seed` cannot change when a run is resumed" in capsys.readouterr().err
    assert main(command) == 0
    assert "resumed after step 6 of 9" in capsys.readouterr().out
    assert records(tmp_path / "run") == records(whole)


LOCKED = """
import sys
from train.run_dir import _locked
with _locked(__import__("pathlib").Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_two_runs_of_one_folder(whole, tmp_path, capsys):
    """The second is refused, and changes nothing, until the first is gone, even if it was killed."""
    folder = stopped_after(whole, 9, tmp_path / "run")
    before = (folder / "log.jsonl").read_bytes()
    first = subprocess.Popen(
        [sys.executable, "-c", LOCKED, str(folder)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert first.stdout.readline() == b"locked\n"
        for words in (
            ["--resume", str(folder)],
            ["--resume-or-start", str(folder), *TINY],
        ):
            assert main(words) == 2
            error = capsys.readouterr().err
            assert error.count("\n") == 1
            assert f"another run is at work in `{folder}`: process {first.pid} on" in error
    finally:
        first.kill()
        first.wait()
        first.stdin.close(), first.stdout.close()
    assert (folder / "log.jsonl").read_bytes() == before
    with _locked(folder):
        pass


@pytest.mark.exhaustive
def test_a_longer_run_goes_on_where_the_first_ended(whole, tmp_path):
    folder = stopped_after(whole, 9, tmp_path / "run")
    words = options("num_steps=11", "optimizer.decay=constant")
    assert main(["--resume", str(folder), *words]) == 0
    assert [line["step"] for line in records(folder)][-2:] == [11, 11]
    assert jpipe.Checkpoints(folder / "checkpoints").steps() == [6, 9, 11]


@pytest.mark.exhaustive
def test_another_learning_rate_counts_from_the_next_step_on(whole, tmp_path):
    folder = stopped_after(whole, 6, tmp_path / "run")
    before = params(folder)
    assert main(["--resume", str(folder), *options("optimizer.learning_rate=1e-20")]) == 0
    for a, b in zip(jax.tree.leaves(params(folder)), jax.tree.leaves(before), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    assert log_of(folder)[-1]["step"] == 9
    (old,) = folder.glob("config-*.json")
    rates = [json.loads(p.read_text())["optimizer"]["learning_rate"] for p in (old, folder / "config.json")]
    assert rates[0] > rates[1] == 1e-20


@pytest.mark.exhaustive
def test_a_damaged_checkpoint_costs_only_its_steps(whole, tmp_path, capsys):
    folder = stopped_after(whole, 9, tmp_path / "run")
    (folder / "checkpoints" / "00000009" / "manifest.json").write_text("")
    with pytest.warns(UserWarning, match="step 9 cannot be restored"):
        jpipe.Checkpoints(folder / "checkpoints").params()
    assert main(["--resume", str(folder)]) == 0
    assert "resumed after step 6 of 9" in capsys.readouterr().out
    assert records(folder) == records(whole)
    np.testing.assert_equal(params(folder), params(whole))


@pytest.mark.exhaustive
def test_a_damaged_checkpoint_is_no_obstacle_to_new_ones(whole, tmp_path):
    """Numbers that were flipped have the right sizes, so that the step looks whole."""
    folder = stopped_after(whole, 9, tmp_path / "run")
    arrays = folder / "checkpoints" / "00000009" / "arrays"
    path = max(arrays.rglob("*"), key=lambda p: p.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert main(["--resume", str(folder), *options("checkpoint.every=8")]) == 0
    assert jpipe.Checkpoints(folder / "checkpoints").steps() == [6, 8, 9]
    np.testing.assert_equal(params(folder), params(whole))


@pytest.mark.parametrize(
    "number, words",
    [
        pytest.param(signal.SIGTERM, (), marks=pytest.mark.exhaustive),
        (signal.SIGINT, ()),
        (signal.SIGKILL, ()),
        (signal.SIGKILL, IN_HOST_MEMORY),
    ],
)
@pytest.mark.sampled(4)
def test_a_run_that_was_ended_from_outside_goes_on(number, words, tmp_path):
    """After a signal that can be caught there is a checkpoint of the last step."""
    folder = tmp_path / "run"
    words = options(
        f"run_dir={folder}",
        "num_steps=100000",
        "eval_every=none",
        "eval_batches=none",
        *words,
    )
    command = [sys.executable, str(ROOT / "train" / "train.py")]
    process = subprocess.Popen([*command, *TINY, *words], stderr=subprocess.PIPE, text=True)
    checkpoints = jpipe.Checkpoints(folder / "checkpoints")
    deadline = time.monotonic() + 120
    while not checkpoints.steps() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    (*_, step) = checkpoints.steps()
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number
        assert f"stopped after step {step} of 100000" in error
        assert f"Go on after step {step}: python train/train.py --resume {folder}." in error
    words = options(f"num_steps={step + 2}", "log_every=1")
    assert main(["--resume", str(folder), *words]) == 0
    steps = [line["step"] for line in records(folder) if "loss" in line]
    assert steps[-2:] == [step + 1, step + 2] and steps == sorted(set(steps))


@pytest.mark.exhaustive
def test_checkpoints_that_cannot_be_written_do_not_end_the_run(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    save, failing = jpipe.Checkpoints.save, [3, 6]

    def limited(self, step, *args, **options):
        if step in failing:
            with file_size_limit(1000):
                save(self, step, *args, **options)
                self.wait()
        save(self, step, *args, **options)

    monkeypatch.setattr(jpipe.Checkpoints, "save", limited)
    run_of(folder)
    error = capsys.readouterr().err
    assert error.count("cannot save step") == 1 and "step 3" in error
    assert "Training goes on, and the next checkpoint is tried again." in error
    assert jpipe.Checkpoints(folder / "checkpoints").steps() == [9]
    failing.append(9)
    other = tmp_path / "other"
    assert main([*TINY, *options(f"run_dir={other}")]) == 3
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("train.py: cannot save step 9 to")
    assert jpipe.Checkpoints(other / "checkpoints").steps() == []


@pytest.mark.exhaustive
def test_a_signal_in_an_evaluation_loses_no_step(whole, tmp_path, monkeypatch, capsys):
    """The run that goes on evaluates the step again, so that its log is that of the whole run."""
    evaluate, folder = script.evaluate, tmp_path / "run"

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*args)

    with monkeypatch.context() as patch:
        patch.setattr(script, "evaluate", interrupted)
        assert main([*TINY, *options(f"run_dir={folder}")]) == 143
        error = capsys.readouterr().err
        assert "stopped after step 5 of 9. Go on after step 5: " in error
        # Again, before any step: the checkpoint is still there to go on from.
        assert main(["--resume", str(folder)]) == 143
        assert "Go on after step 5: " in capsys.readouterr().err
    assert jpipe.Checkpoints(folder / "checkpoints").steps() == [3, 5]
    assert main(["--resume", str(folder)]) == 0
    assert records(folder) == records(whole)
    np.testing.assert_equal(params(folder), params(whole))


@pytest.mark.exhaustive
@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_run_whose_folder_is_removed_leaves_what_it_can(at_the_end, tmp_path, monkeypatch, capsys):
    """With a later checkpoint all that resuming needs; else it says that there is none."""
    evaluate, folder = script.evaluate, tmp_path / "run"
    checkpoints = jpipe.Checkpoints(folder / "checkpoints")

    def removing(*args):
        newest = 9 if at_the_end else 3
        while checkpoints.steps()[-1:] != [newest]:
            time.sleep(0.01)
        shutil.rmtree(folder)
        return evaluate(*args)

    words = options(f"run_dir={folder}")
    if at_the_end:
        words += options("eval_every=none", "eval_batches=none")
    with monkeypatch.context() as patch:
        patch.setattr(script, "evaluate", removing if at_the_end else once(removing, evaluate))
        code = main([*TINY, *words])
    error = capsys.readouterr().err
    if at_the_end:
        assert code == 3
        assert "the checkpoint of step 9 was removed" in error
        assert not folder.exists()
    else:
        assert code == 0 and "the log" in error
        assert main(["--resume", str(folder)]) == 0


def once(first, then):
    """A function that is another one from the second call on."""
    functions = iter([first])
    return lambda *args: next(functions, then)(*args)


WRONG = [
    (["--resume"], "`--resume` needs the folder of a run"),
    (["--resume", "nowhere"], "there is no run `nowhere`"),
    (["--resume", "gs://bucket/run"], "`--resume` must be in a file system, got the address 'gs://bucket/run'. Mount"),
    (["--resume-or-start", "s3://bucket/run", *TINY], "`--resume-or-start` must be in a file system, got the address"),
    (["--resume", "RUN", "--config", "configs/quickstart.py"], "Leave it out"),
    (["--resume", "RUN", "--config.run_dir=other"], "goes on in its folder"),
    (["--resume", "RUN", "--config.seed=3"], "`seed` cannot change .* 3 instead of 0"),
    (["--resume", "RUN", "--config.model.widths=8"], "`model` cannot change"),
    (["--resume", "RUN", "--config.batch_size=50"], "`batch_size` cannot change"),
    (["--resume", "RUN", "--config.optimizer.name=sgd"], "another optimizer"),
    (["--resume", "RUN", "--config.num_step=50"], "unknown option .*num_steps"),
    (["--resumed", "RUN"], "Did you mean '--resume'"),
    (["--resume", "EMPTY"], "has no checkpoint to resume from. .*--resume-or-start"),
    (["LAUNCHED", *TINY], "each start would begin at step 0. Add `--resume-or-start FOLDER`"),
    (["LAUNCHED", "--resume-or-start", "RUN", *TINY, "--config.checkpoint.every=none"], "no.*Add"),
    (["LAUNCHED", "--resume", "RUN", "--config.checkpoint.every=none"], "go on from the same step. Add"),
    (["--resume-or-start", "RUN"], "no configuration. Name a file"),
    (["--resume-or-start", "RUN", "--resume", "RUN"], "Leave one of them out"),
    (["--resume-or-start", "RUN", *TINY, "--config.checkpoint.every=none"], "no.*Add"),
    (["--resume-or-start", "RUN", *TINY, "--config.run_dir=a"], "runs in its folder"),
    ([*TINY, "--config.checkpoint.every=0"], "`every` must be at least 1"),
    ([*TINY, "--config.checkpoint.keep=0"], "`keep` must be at least 1"),
]


@pytest.mark.parametrize("words,message", WRONG, ids=lambda value: str(value)[-40:])
def test_mistakes_are_one_line_and_change_nothing(words, message, whole, tmp_path, capsys, monkeypatch):
    if words[0] == "LAUNCHED":
        monkeypatch.setenv(_restarts.FOLDER, str(tmp_path))
        words = words[1:]
    run, empty = tmp_path / "run", tmp_path / "empty"
    shutil.copytree(whole, run)
    shutil.copytree(whole, empty, ignore=shutil.ignore_patterns("checkpoints"))
    before = (run / "log.jsonl").read_bytes()
    words = [str({"RUN": run, "EMPTY": empty}.get(word, word)) for word in words]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("train.py: ")
    import re

    assert re.search(message, error), error
    assert (run / "log.jsonl").read_bytes() == before


@pytest.mark.slow
def test_several_processes_write_the_log_of_one(whole, tmp_path):
    """And another number of processes goes on."""
    folder = tmp_path / "run"
    launch = [sys.executable, "-m", "jpipe.launch", "-n", "2", "--devices", "2"]
    command = [*launch, str(ROOT / "train" / "train.py")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": FLAGS}
    ran = subprocess.run([*command, *TINY, *options(f"run_dir={folder}")], env=environment)
    assert ran.returncode == 0
    memory, *steps = records(folder)  # temporaries differ
    assert steps == records(whole)[1:]
    np.testing.assert_equal(params(folder), params(whole))
    alone = stopped_after(folder, 3, tmp_path / "alone")
    assert main(["--resume", str(alone)]) == 0
    together = stopped_after(whole, 6, tmp_path / "together")
    ran = subprocess.run([*command, "--resume", str(together)], env=environment)
    assert ran.returncode == 0
    for each in (alone, together):
        assert records(each)[1:] == steps
        np.testing.assert_equal(params(each), params(whole))


@pytest.mark.slow
def test_sigterm_ends_all_processes_at_one_step_with_a_checkpoint(tmp_path):
    folder = tmp_path / "run"
    launch = [sys.executable, "-m", "jpipe.launch", "-n", "2", "--devices", "2"]
    words = options(f"run_dir={folder}", "num_steps=100000", "eval_every=none", "eval_batches=none")
    process = subprocess.Popen(
        [*launch, str(ROOT / "train" / "train.py"), *TINY, *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    checkpoints = jpipe.Checkpoints(folder / "checkpoints")
    deadline = time.monotonic() + 200
    while not checkpoints.steps() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    (*_, step) = checkpoints.steps()
    assert f"stopped after step {step} of 100000" in error
    assert main(["--resume", str(folder), *options(f"num_steps={step + 1}")]) == 0
