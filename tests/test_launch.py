"""The launcher: what it gives the processes, what it prints, and how it ends them. No process here uses JAX."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from jpipe import launch
from jpipe._processes import restarts as _restarts

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


@pytest.mark.first_case
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


@pytest.mark.parametrize(
    "words, message",
    [
        (["-n", "0"], "-n must be at least 1, got 0"),
        (["-n", "2", "--restarts", "-1"], "--restarts must be at least 0, got -1"),
        (["-n", "2", "--restarts", "many"], "invalid int value: 'many'"),
        (["-n", "2", "--restarts", "2", "--min-processes", "3"], "--min-processes must be from 1 to -n, 2, got 3"),
        (["-n", "2", "--restarts", "2", "--min-processes", "0"], "--min-processes must be from 1 to -n, 2, got 0"),
        (["-n", "2", "--min-processes", "1"], "--min-processes is for a script that is started again: add --restarts"),
        (["-n", "2", "--restarts", "2", "--restarts-without-progress", "0"], "must be at least 1, got 0"),
        (["-n", "3", "--restarts", "2", "--min-processes", "2", "--layout", "stages=2"], 'must be "M: ARGUMENTS"'),
        (["-n", "3", "--restarts", "2", "--min-processes", "2", "--layout", "1: -s 1"], "at least --min-processes=2"),
        (["-n", "3", "--restarts", "2", "--min-processes", "1", *["--layout", "2: -s 1"] * 2], "must be given once"),
        (["-n", "3", "--restarts", "2", "--min-processes", "1", "--layout", '2: "a'], "No closing quotation"),
        (["-n", "2"], "there is no script `script.py`"),
    ],
)
def test_wrong_options(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        launch.main([*words, "script.py"])
    assert message in capsys.readouterr().err


# -- Starts again

TELLING = """
from jpipe._processes import restarts as _restarts
_restarts.tell(f"{_restarts.CONNECTED}.{i}")
def start():  # the number of this start, from 1
    with open(sys.argv[1], "a+") as file:
        file.write(".")
        file.flush()
        file.seek(0)
        return len(file.read())
"""


def test_a_script_that_dies_is_started_again(tmp_path):
    program = f"""{TELLING}
if i == 0:
    _restarts.tell(_restarts.SAVES)
    number = start()
    if number < 4:
        if number > 1:
            _restarts.tell(_restarts.SAVED, str(10 * number))
        os.kill(os.getpid(), signal.SIGKILL)
print("ends", flush=True)
"""
    code, out, err = run(tmp_path, program, "-n", "2", "--restarts", "5", arguments=[str(tmp_path / "starts")])
    assert code == 0
    assert out.splitlines()[-2:] in (["[0] ends", "[1] ends"], ["[1] ends", "[0] ends"])
    killed = "jpipe.launch: process 0 ended first, by signal SIGKILL."
    assert err.splitlines() == [
        killed,
        "jpipe.launch: start 2 of at most 6: 2 processes, and no checkpoint was saved yet.",
        killed,
        "jpipe.launch: start 3 of at most 6: 2 processes, after the checkpoint of step 20.",
        killed,
        "jpipe.launch: start 4 of at most 6: 2 processes, after the checkpoint of step 30.",
    ]
    assert (tmp_path / "starts").read_text() == "...."


@pytest.mark.first_case
@pytest.mark.parametrize(
    "program, options, code, num_starts, why",
    [
        ("sys.exit(3)", ["--restarts", "2"], 3, 3, "--restarts=2 are used up."),
        (
            "sys.exit(3)",
            ["--restarts", "9"],
            3,
            3,
            "--restarts-without-progress=3, and so many starts in a row have saved no checkpoint. ",
        ),
        (
            "_restarts.tell(_restarts.SAVED, '7'); sys.exit(3)",
            ["--restarts", "9", "--restarts-without-progress", "1"],
            *(
                3,
                2,
                "--restarts-without-progress=1, and so many starts in a row have saved no checkpoint after that of step 7.",
            ),
        ),
        ("sys.exit(2)", ["--restarts", "9"], 2, 1, "exit code 2 says that an option or a file is wrong."),
        ("sys.exit(74)", ["--restarts", "9"], 74, 1, "the devices of process 0 are gone, and --min-processes=1."),
    ],
)
def test_why_a_script_is_not_started_again(program, options, code, num_starts, why, tmp_path):
    starts = tmp_path / "starts"
    got, _, err = run(tmp_path, f"{TELLING}\nstart()\n{program}", "-n", "1", *options, arguments=[str(starts)])
    assert (got, len(starts.read_text())) == (code, num_starts)
    assert err.splitlines()[-1].startswith(f"jpipe.launch: not started again: {why}")


def test_a_signal_to_the_launcher_is_no_reason_to_start_again(tmp_path):
    program = f"""{TELLING}
start()
print("ready", flush=True)
time.sleep(60)
"""
    starts = tmp_path / "starts"
    process = start(tmp_path, program, "-n", "1", "--restarts", "9", arguments=[str(starts)])
    assert process.stdout.readline() == "[0] ready\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert (process.returncode, starts.read_text()) == (128 + signal.SIGTERM, ".")


def test_what_the_processes_tell_lasts_as_long_as_the_launcher(tmp_path):
    program = """
from jpipe._processes import restarts as _restarts
print(os.environ[_restarts.FOLDER])
sys.exit(2)
"""
    _, out, _ = run(tmp_path, program, "-n", "1", "--restarts", "1")
    folder = pathlib.Path(out.removeprefix("[0] ").strip())
    assert folder.is_absolute() and not folder.exists()
    left = folder.with_name(f"{folder.name}-of-a-killed-launcher")
    left.mkdir()
    (left / ".lock").touch()
    run(tmp_path, program, "-n", "1", "--restarts", "1")
    assert not left.exists()


# -- Fewer processes


def ends(restarts, *ended, told=(0, 1, 2, 3), saved=None):
    """Takes the ends of starts, as (exit code, process); returns why the last one is the last, or the next slots."""
    for code, process in ended:
        connected = frozenset(told[: len(restarts.slots)]) - ({process} if code < 0 else set())
        why = restarts.after(_restarts.End(abs(code), process, False), _restarts.Told(connected, True, saved))
    return why or restarts.slots


@pytest.mark.parametrize(
    "numbers, ended, want",
    [
        ([4, 3, 2], [(74, 1)], [0, 2, 3]),
        ([4, 3, 2], [(74, 1), (74, 2)], [0, 2]),
        ([4, 2], [(74, 0)], [1, 2]),
        ([4, 3, 2], [(137, 1), (-1, 1)], [0, 1, 2, 3]),
        ([4, 3, 2], [(137, 1), (-1, 1), (-1, 1)], [0, 2, 3]),
        ([4, 3, 2], [(137, 1), (-1, 1), (-1, 2)], [0, 1, 2, 3]),
        ([4, 3, 2], [(137, 1), (-71, 1), (-71, 1)], [0, 1, 2, 3]),  # it ended because of another one
        ([4], [(137, 1), (-1, 1)], [0, 1, 2, 3]),
        ([4], [(74, 1)], "the devices of process 1 are gone, and --min-processes=4."),
        ([4, 3, 2], [(74, 0), (74, 0), (74, 0)], "the devices of process 0 are gone, and --min-processes=2."),
        (
            [4, 3, 2],
            [(137, 1)] * 4,
            "--restarts-without-progress=4, and so many starts in a row have saved no checkpoint. ",
        ),
    ],
)
def test_the_processes_that_are_left(numbers, ended, want):
    got = ends(_restarts.Restarts(9, 4, numbers, [0, 1, 2, 3]), *ended)
    assert got[: len(want)] == want if isinstance(want, str) else got == want


def test_devices_of_a_script_that_never_connects_are_not_gone():
    restarts = _restarts.Restarts(9, 9, [4, 3], [0, 1, 2, 3])
    assert ends(restarts, *[(1, 0)] * 5, told=()) == [0, 1, 2, 3]


def test_the_arguments_of_a_layout(tmp_path):
    program = f"""{TELLING}
print(i, os.environ["JPIPE_NUM_PROCESSES"], os.environ["JAX_NUM_CPU_DEVICES"], sys.argv[2:], flush=True)
if i == 1 and sys.argv[2:] == ["a"]:
    sys.exit(74)
"""
    options = ["-n", "4", "--devices", "8", "--restarts", "3", "--min-processes", "2", "--layout", "2: b 'c d'"]
    code, out, err = run(tmp_path, program, *options, arguments=["starts", "a"])
    assert code == 0
    again = [line for line in out.splitlines() if "'b'" in line]
    assert sorted(again) == [f"[{i}] {i} 2 2 ['a', 'b', 'c d']" for i in range(2)]
    assert "jpipe.launch: start 2 of at most 4: 2 processes, " in err
