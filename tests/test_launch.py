"""The launcher: what it gives the processes, what it prints, and how it ends them. No process here uses JAX."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from jpipe import launch

ROOT = pathlib.Path(__file__).parents[1]


def start(tmp_path, program, *options, arguments=()):
    script = tmp_path / "script.py"
    script.write_text(f"import os, signal, sys, time\ni = int(os.environ['JPIPE_PROCESS_ID'])\n{program}")
    return subprocess.Popen(
        [sys.executable, "-m", "jpipe.launch", *options, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*args, **kwargs):
    process = start(*args, **kwargs)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_lines_begin_with_the_number_of_their_process(tmp_path):
    program = """
print(i, sys.argv[1:], os.environ["JPIPE_NUM_PROCESSES"], os.environ["JAX_NUM_CPU_DEVICES"])
print("no end of line", end="", file=sys.stderr)
"""
    arguments = ["--config", "a", "-n", "7"]
    code, out, err = run(tmp_path, program, "-n", "3", "--devices", "6", arguments=arguments)
    assert code == 0
    assert sorted(out.splitlines()) == [f"[{i}] {i} {arguments} 3 2" for i in range(3)]
    assert sorted(err.splitlines()) == [f"[{i}] no end of line" for i in range(3)]


def test_a_module(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "jpipe.launch",
            "-n",
            "2",
            "-m",
            "timeit",
            "-n",
            "1",
            "pass",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert done.stdout.count("1 loop, best of 5") == 2


def test_the_rest_ends_when_one_fails(tmp_path):
    program = """
if i == 1:
    sys.exit(3)
signal.signal(signal.SIGTERM, lambda *_: (print("SIGTERM", flush=True), sys.exit(0)))
time.sleep(100)
"""
    code, out, err = run(tmp_path, program, "-n", "2")
    assert (code, out) == (3, "[0] SIGTERM\n")
    assert err == "jpipe.launch: process 1 ended first, with exit code 3.\n"


@pytest.mark.slow
def test_what_does_not_end_is_killed(tmp_path):
    program = """
if i == 1:
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(os.getpid(), signal.SIGSTOP)
"""
    began = time.monotonic()
    code, _, err = run(tmp_path, program, "-n", "2")
    assert code == 128 + signal.SIGKILL
    assert "process 1 ended first, by signal SIGKILL" in err
    assert time.monotonic() - began < 25


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_every_process_once(tmp_path, number):
    program = """
count = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: count.append(number))
print("ready", flush=True)
until = time.monotonic() + 30
while not count and time.monotonic() < until:
    time.sleep(0.01)
time.sleep(1.0)
print([int(n) for n in count], flush=True)
sys.exit(128 + count[0])
"""
    process = start(tmp_path, program, "-n", "2")
    lines = [process.stdout.readline() for _ in range(2)]
    assert sorted(lines) == ["[0] ready\n", "[1] ready\n"]
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert sorted(out.splitlines()) == [f"[{i}] [{int(number)}]" for i in range(2)]
    assert process.returncode == 128 + number


CPU = {"JAX_PLATFORMS": "cpu"}


@pytest.mark.parametrize(
    "n, devices, environment, want",
    [
        (2, None, CPU, [{"JAX_NUM_CPU_DEVICES": "1"}] * 2),
        (2, 8, CPU, [{"JAX_NUM_CPU_DEVICES": "4"}] * 2),
        (2, None, {**CPU, "JAX_NUM_CPU_DEVICES": "3"}, [{}] * 2),
        (2, 4, {"CUDA_VISIBLE_DEVICES": "0,1"}, [{"JAX_NUM_CPU_DEVICES": "2"}] * 2),
        (1, None, {"CUDA_VISIBLE_DEVICES": "5,3"}, [{"CUDA_VISIBLE_DEVICES": "5,3"}]),
        (2, None, {"CUDA_VISIBLE_DEVICES": "-1"}, [{"JAX_NUM_CPU_DEVICES": "1"}] * 2),
    ],
)
def test_devices_of_each_process(n, devices, environment, want):
    assert launch.device_variables(n, devices, environment) == want


@pytest.mark.parametrize(
    "n, devices, environment, message",
    [
        (2, 3, CPU, "--devices=3 cannot be shared by 2 processes"),
        (2, None, {"CUDA_VISIBLE_DEVICES": "0,1,2"}, "3 GPUs cannot be shared by 2"),
        (4, None, {"CUDA_VISIBLE_DEVICES": "0"}, "1 GPUs cannot be shared by 4"),
    ],
)
def test_devices_that_cannot_be_shared_out(n, devices, environment, message):
    with pytest.raises(ValueError, match=message):
        launch.device_variables(n, devices, environment)


def test_a_wrong_number_of_processes(capsys):
    with pytest.raises(SystemExit, match="2"):
        launch.main(["-n", "0", "script.py"])
    assert "-n must be at least 1, got 0" in capsys.readouterr().err
