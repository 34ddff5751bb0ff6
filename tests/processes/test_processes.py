"""Several processes: the numbers of one process, the same errors on all, and no process that waits for ever."""

import functools
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from processes import everything, faulty
from processes.disagree import CASES
from processes.launching import ROOT, SECONDS, launch, launch_command


def assert_equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_two_processes_train_as_one(tmp_path):
    done = launch("faulty.py", "nothing", 0, tmp_path / "{}")
    assert done.returncode == 0, done.stderr
    want = faulty.train(lambda *_: None)
    for process in range(2):
        got = pickle.loads((tmp_path / str(process)).read_bytes())
        if process:  # the weights go to process 0
            assert got.pop("params") is None and want.pop("params")
        assert_equal(got, want)


@pytest.mark.exhaustive
def test_all_processes_place_a_model_as_the_first_one_measured():
    done = launch("placed.py", devices=2)
    assert done.returncode == 0, done.stderr
    for found in ("Placement(groups=", "the model InitApply can be placed on at most 0 stages"):
        lines = [line.partition("process ")[2] for line in done.stdout.splitlines() if found in line]
        (first, second) = sorted(lines)
        assert (first[0], second[0]) == ("0", "1") and first[1:] == second[1:]


@pytest.mark.first_case
@pytest.mark.parametrize("process", [0, 1])
def test_a_process_does_not_wait_for_ever_for_others_to_start(process):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    call = f"initialize({address!r}, 2, {process}, connect_seconds=1.5)"
    program = f"import jpipe; jpipe.distributed.{call}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 71
    assert "not all processes have connected within 1.5 s" in done.stderr


SLOW = pytest.mark.slow

FAULTS = {
    "kill": (71, "process {} is gone without a word"),
    "SIGTERM": (71, "process {} is gone without a word"),
    "raise": (71, "process {} failed in: "),
    "suspend": (72, "process {} has not been heard of for 15 s"),
    "hold the GIL": (72, "process {} has not been heard of for 15 s"),
    "sleep": (73, "no progress for 20 s because of process {}. "),
    "return": (73, "process {} ended after 5 calls, and the next one, of process"),
    "evaluate": (73, "processes 0, 1 made different calls: call 6 is "),
    "predict": (73, "processes 0, 1 made different calls: call 6 is "),
    "get_params": (73, "processes 0, 1 made different calls: call 6 is "),
    "save": (73, "processes 0, 1 made different calls: call 6 is "),
    "another shape": (73, "processes 0, 1 made different calls: call 6 is "),
    "leave out a step": (73, "processes 0, 1 gave different batches, in "),
}
"""Fault -> exit code of the others, and what they say."""


@pytest.mark.parametrize(
    "fault, process",
    [
        pytest.param(
            fault,
            process,
            marks=pytest.mark.exhaustive if (fault, process) == ("raise", 1) else SLOW,
        )
        for fault in FAULTS
        for process in (0, 1)
    ],
)
def test_no_process_waits_for_ever(fault, process):
    done = launch("faulty.py", fault, process)
    ended = time.time()
    text, other = done.stdout + done.stderr, 1 - process
    faults = [float(t) for t in re.findall(r"fault at ([\d.]+)", text)]
    assert ended - min(faults) < SECONDS
    assert done.returncode != 0
    messages = re.findall(rf"^\[{other}\] (jpipe: .*)$", text, flags=re.M)
    (message,) = messages
    code, reason = FAULTS[fault]
    assert message.startswith(f"jpipe: process {other} ends: {reason.format(process)}")
    assert fault == "leave out a step" or re.search(r"after step 4|step 5", message)


@SLOW
@pytest.mark.parametrize("to_all", [True, False])
def test_all_stop_at_one_step_and_end_well(to_all):
    command, options = launch_command("stopping.py")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, **options)
    pids: list[int] = []
    while len(pids) < 2:
        found = re.search(r"trains in (\d+)", process.stdout.readline())
        pids += [int(found[1])] if found else []
    os.kill(process.pid if to_all else pids[1], signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    stopped = re.findall(r"^\[\d\] stopped at (\d+)$", out, flags=re.M)
    assert len(stopped) == 2 and len(set(stopped)) == 1
    assert process.returncode == 0


@SLOW
def test_a_long_phase_is_no_fault():
    done = launch("faulty.py", "work", 1)
    assert done.returncode == 0, done.stderr


@SLOW
def test_processes_that_disagree_learn_it():
    done = launch("disagree.py", devices=2)
    assert done.returncode == 0, done.stderr
    for process in range(2):
        for name in CASES:
            pattern = rf"^\[{process}\] {name}: (.*)$"
            (message,) = re.findall(pattern, done.stdout, flags=re.M)
            if name == "rows":
                assert "must give the same rows, got 3 and 4" in message
            else:
                pattern = r"the processes disagree in .*: process 0 has (.*), process 1 has (.*)\. [RBS]"
                found = re.match(pattern, message)
                assert found and found[1] != found[2]


@functools.cache
def in_one_process(layout, schedule, folder):
    everything.main(layout, schedule, folder)
    return pickle.loads((folder / "0 of 1").read_bytes())


LAYOUTS = [
    ("stages", "one_f_one_b", 2),
    ("stages", "pipemare", 2),
    ("replicas", "one_f_one_b", 2),
    ("replicas", "pipemare", 2),
    ("replicas", "one_f_one_b", 4),
    ("stages of replicas", "one_f_one_b", 2),
    (everything.SHARED, "one_f_one_b", 2),
    ("parts of layers", "one_f_one_b", 2),
    ("stages of parts", "one_f_one_b", 2),
    ("shards of layers", "one_f_one_b", 2),
    ("stages of shards", "pipemare", 2),
]


@SLOW
@pytest.mark.parametrize("layout, schedule, num_processes", LAYOUTS)
def test_every_method_equals_one_process(layout, schedule, num_processes, tmp_path):
    done = launch("everything.py", layout, schedule, tmp_path, num_processes=num_processes)
    assert done.returncode == 0, done.stderr
    want = in_one_process(layout, schedule, tmp_path)
    every = [pickle.loads((tmp_path / f"{p} of {num_processes}").read_bytes()) for p in range(num_processes)]
    assert all(found["measured"] == every[0]["measured"] for found in every)
    only_first = {"initial", "params", "mutable state", "params of adopt"}
    for process, found in enumerate(every):
        assert found.keys() == want.keys()
        for name in want.keys() - {"measured"}:
            if name.startswith("own rows"):
                continue
            if process and name in only_first:
                assert found[name] is None
                continue
            numbers = want[name]
            if name.startswith("predict"):
                numbers = numbers[found[name.replace("predict", "own rows")]]
            assert_equal(found[name], numbers)
    rows = sorted({i for found in every for i in found["own rows 7"]})
    assert rows == list(range(7))


CHECKPOINTS = [
    # Saved by so many processes in a layout, restored by so many processes in a layout.
    ("one_f_one_b", (2, "stages"), (1, "stages")),
    ("one_f_one_b", (1, "stages"), (2, "stages")),
    ("pipedream", (2, "stages"), (1, "stages")),  # with microbatches in flight
    ("pipedream", (1, "stages"), (2, "stages")),
    ("pipedream", (2, "replicas"), (2, "replicas")),
    ("one_f_one_b", (2, "stages of parts"), (2, "parts of layers")),
]


@SLOW
@pytest.mark.parametrize("schedule, saves, restores", CHECKPOINTS, ids=str)
def test_a_checkpoint_goes_on_in_other_processes(schedule, saves, restores, tmp_path):
    """Bit for bit: the layout does not depend on the processes."""
    for action, (count, layout) in (("save", saves), ("restore", restores)):
        words = (action, layout, schedule, tmp_path)
        done = launch("checkpointed.py", *words, num_processes=count)
        assert done.returncode == 0, done.stderr
    want = pickle.loads((tmp_path / f"save {saves[0]}").read_bytes())
    assert_equal(pickle.loads((tmp_path / f"restore {restores[0]}").read_bytes()), want)


@SLOW
def test_a_checkpoint_goes_on_in_another_layout(tmp_path):
    """Each process reads its own layers; one process gets the same numbers."""
    words = ("stages", "one_f_one_b", tmp_path)
    assert launch("checkpointed.py", "save", *words).returncode == 0
    for count in (1, 2):
        words = ("restore", "stages of replicas", "one_f_one_b", tmp_path)
        done = launch("checkpointed.py", *words, num_processes=count)
        assert done.returncode == 0, done.stderr
    one, two = (pickle.loads((tmp_path / f"restore {count}").read_bytes()) for count in (1, 2))
    assert_equal(two, one)


@SLOW
def test_each_process_may_have_a_pipeline_of_its_own(tmp_path):
    """All but its checkpoints, which all processes would have to write."""
    done = launch("alone.py", tmp_path)
    assert done.returncode == 0, done.stderr
    for process in range(2):
        start = rf"^\[{process}\] "
        assert re.search(rf"{start}process_rows: \[0, 1, 2, 3\]$", done.stdout, re.M)
        assert re.search(rf"{start}get_params: 2$", done.stdout, re.M)
        assert re.search(rf"{start}trace: \[\(0, 0\), \(1, 0\)\]$", done.stdout, re.M)
        refused = r"save: ValueError: .*must have devices of all processes"
        assert re.search(start + refused, done.stdout, re.M), done.stdout
