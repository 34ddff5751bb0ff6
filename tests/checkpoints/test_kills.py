"""A training is killed at random moments: in a step, in a save, in a deletion."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import killed
import numpy as np
import pytest

import jpipe

ROOT = pathlib.Path(__file__).parents[2]


def start(directory, *words, num_processes=1):
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(directory.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": "",
    }
    launch = ["-m", "jpipe.launch", "-n", str(num_processes), "--devices", "2"]
    launch = launch if num_processes > 1 else []
    command = [sys.executable, *launch, killed.__file__, str(directory)]
    return subprocess.Popen([*command, *map(str, words)], env=environment)


def kill(process, num_processes, random):
    """Kills the process, or one or all of those that it has launched."""
    if num_processes == 1:
        process.kill()
    else:
        children = f"/proc/{process.pid}/task/{process.pid}/children"
        numbers = list(map(int, pathlib.Path(children).read_text().split()))
        chosen = random.integers(len(numbers) + 1)
        for number in numbers if chosen == len(numbers) else [numbers[chosen]]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
    assert process.wait(timeout=30) != 0


def wait_for(path, process):
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("num_kills", "num_processes"),
    [
        pytest.param(2, 1, marks=pytest.mark.exhaustive),
        pytest.param(100, 1, marks=SLOW),
        pytest.param(30, 2, marks=SLOW),
    ],
)
def test_every_listed_step_is_right_and_the_training_ends_as_if_not_killed(num_kills, num_processes, tmp_path):
    folder, other = tmp_path / "killed", tmp_path / "uninterrupted"
    folder.mkdir(), other.mkdir()
    random, restored, newest = np.random.default_rng(num_kills), [], 0
    checkpoints = jpipe.Checkpoints(folder / "checkpoints")
    for _ in range(num_kills):
        process = start(folder, 10**6, num_processes=num_processes)
        wait_for(folder / "ready", process)
        time.sleep(random.uniform(0, 1.5))
        kill(process, num_processes, random)
        (folder / "ready").unlink()
        for step in checkpoints.steps():
            restored.append((step, killed.flat(checkpoints.params(step))))
        last = max(checkpoints.steps(), default=0)
        assert last >= newest  # nothing that was whole is lost
        newest = last
    assert newest > 0
    last = newest + 3
    ran = start(folder, last, num_processes=num_processes)
    assert ran.wait(timeout=120) == 0
    assert start(other, last, "uninterrupted").wait(timeout=600) == 0
    params = np.load(other / "params.npz")
    for step, values in restored:
        np.testing.assert_array_equal(values, params[str(step)])
    pipe, batch = killed.pipeline(), killed.batch(0)
    got, want = (jpipe.Checkpoints(each / "checkpoints").restore(pipe, batch, last).state for each in (folder, other))
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)),
        {**got.kept(), **got.in_flight(), **got.counters()},
        {**want.kept(), **want.in_flight(), **want.counters()},
    )
