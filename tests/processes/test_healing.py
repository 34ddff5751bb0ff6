"""Processes are killed at random moments, and the launcher starts all again: the end is that of a run left alone."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from processes.launching import FOLDER, ROOT

import jpipe

EVERY = 10


def start(directory, *options, num_processes, steps, layout=()):
    directory.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "jpipe.launch", "-n", num_processes, "--devices", num_processes, *options]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(directory.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": "",
    }
    return subprocess.Popen(
        [*map(str, command), str(FOLDER / "healing.py"), str(directory), str(steps), str(EVERY), *map(str, layout)],
        env=environment,
        stderr=open(directory / "messages", "w"),
    )


def children(process):
    path = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return list(map(int, path.read_text().split()))


def wait_until(condition, process):
    deadline = time.monotonic() + 600
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def started(process, before, count):
    """The processes of the start after one."""
    wait_until(lambda: len(set(children(process)) - before) == count, process)
    return set(children(process))


def starts(directory):
    """The log: for each start the step that it went on from, and its steps as (number, checksum of the batch, loss)."""
    result = []
    for line in (directory / "log").read_text().splitlines():
        first, *rest = line.split(" ")
        if first == "start":
            result.append((int(rest[0]), []))
        else:
            result[-1][1].append((int(first), *rest))
    return result


def check_steps(directory, alone, exact=True):
    """Every step has the batch and the loss of the run that was left alone; returns steps that were trained twice."""
    (_, want), *others = starts(alone)
    assert not others
    twice, reached = 0, 0
    for first, steps in starts(directory):
        assert [number for number, *_ in steps] == list(range(first + 1, first + 1 + len(steps)))
        # `save` waits for the one before, so that is whole: at most two intervals are lost.
        assert reached - 2 * EVERY <= first <= reached
        expected = want[first : first + len(steps)]
        assert [step[:2] for step in steps] == [step[:2] for step in expected]
        losses = [[float.fromhex(loss) for *_, loss in each] for each in (steps, expected)]
        np.testing.assert_allclose(*losses, rtol=0.0 if exact else 1e-5)
        twice += min(reached, first + len(steps)) - first
        reached = max(reached, first + len(steps))
    assert reached == len(want)
    return twice


def kill_at_random(process, folder, num_kills, num_processes, ends=lambda: False):
    """Kills one process of each start, half of them in the steps, half of them anywhere. Returns the number of kills.

    Before the last kill it writes after how many steps the training ends.
    """
    random, checkpoints, log = (
        np.random.default_rng(num_kills),
        jpipe.Checkpoints(folder / "checkpoints"),
        folder / "log",
    )
    begun, numbers, newest, kill, last = time.monotonic(), set(), 0, 0, False
    wait_until(checkpoints.steps, process)
    until_steps = time.monotonic() - begun  # from a start to its first step
    while not last:
        numbers = started(process, numbers, num_processes)
        start, size = time.monotonic(), log.stat().st_size
        if random.uniform() < 0.5:
            time.sleep(random.uniform(0, until_steps))
            place = "anywhere"
        else:
            wait_until(lambda size=size: log.stat().st_size > size + 20, process)
            until_steps = time.monotonic() - start
            time.sleep(random.uniform(0, 3))
            place = "in the steps"
        listed = checkpoints.steps()
        assert listed[-1] >= newest  # nothing that was whole is lost
        newest, kill = listed[-1], kill + 1
        last = kill == num_kills or ends()
        if last:
            (folder / "last").write_text(str(newest + 10 * EVERY + 3))
        os.kill(random.choice(sorted(numbers)), signal.SIGKILL)
        print(f"kill {kill} {place}: {time.monotonic() - begun:.0f} s, step {newest}", flush=True)
    return kill


def check(folder, num_kills, num_processes):
    """The end is that of a run that is left alone."""
    other = folder.with_name("alone")
    last = int((folder / "last").read_text())
    alone = start(other, num_processes=num_processes, steps=last, layout=(num_processes, 1))
    assert alone.wait(timeout=600) == 0
    twice = check_steps(folder, other)
    np.testing.assert_array_equal(*(np.load(each / "params.npy") for each in (folder, other)))
    assert (folder / "messages").read_text().count("by signal SIGKILL") == num_kills
    print(f"{num_kills} kills, {last} steps, {twice} trained twice, {len(starts(folder))} starts trained")


@pytest.mark.parametrize(
    ("num_kills", "num_processes"),
    [pytest.param(2, 2, marks=pytest.mark.exhaustive), pytest.param(100, 4, marks=pytest.mark.slow)],
)
def test_the_end_is_that_of_a_run_left_alone(num_kills, num_processes, tmp_path):
    folder = tmp_path / "killed"
    options = ["--restarts", num_kills, "--restarts-without-progress", num_kills + 1]
    process = start(folder, *options, num_processes=num_processes, steps=10**6, layout=(num_processes, 1))
    assert kill_at_random(process, folder, num_kills, num_processes) == num_kills
    assert process.wait(timeout=600) == 0
    check(folder, num_kills, num_processes)


@pytest.mark.slow
def test_the_processes_that_are_left_end_in_another_layout(tmp_path):
    """Four stages, then three, then two: the batches are the same, the losses equal but for rounding."""
    folder, other, last = tmp_path / "killed", tmp_path / "alone", 103
    layouts = ["--layout", "3: 3 1", "--layout", "2: 2 1"]
    options = ["--restarts", 20, "--min-processes", 2, *layouts]
    process = start(folder, *options, num_processes=4, steps=last)
    checkpoints, numbers = jpipe.Checkpoints(folder / "checkpoints"), set()
    for gone, until in ((1, 2 * EVERY), (2, 5 * EVERY)):
        numbers = started(process, numbers, 4 if gone == 1 else 3)
        wait_until(lambda until=until: max(checkpoints.steps(), default=0) >= until, process)
        (folder / "gone").write_text(str(gone))
        os.kill(max(numbers), signal.SIGKILL)
        wait_until(lambda: not (folder / "gone").exists(), process)
        numbers |= set(children(process))  # of the start in which they are gone
    assert process.wait(timeout=600) == 0
    assert start(other, num_processes=4, steps=last).wait(timeout=600) == 0
    check_steps(folder, other, exact=False)
    got, want = (np.load(each / "params.npy") for each in (folder, other))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    messages = (folder / "messages").read_text()
    assert ": 3 processes, after" in messages and ": 2 processes, after" in messages
