"""Signals: the first is noted, a second ends the process, and neither leaves a traceback."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from train import interrupt
from train.interrupt import Interrupt

ROOT = pathlib.Path(__file__).parents[2]

# What would not let a KeyboardInterrupt go by in silence.
BUSY = """
import sys, threading, time
sys.path.insert(0, {root!r})
from train.interrupt import Interrupt, leave_on_interrupt
threading.Thread(target=time.sleep, args=(60,)).start()
print("a line that is in no file yet")

class Stubborn:
    def __del__(self):
        print("ready", file=sys.stderr, flush=True)
        time.sleep(60)

{setup}
Stubborn()
"""


def interrupted(setup, times, number=signal.SIGINT):
    """Exit code, output and errors of a program that gets a signal so many times."""
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY.format(root=str(ROOT), setup=setup)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr.readline() == "ready\n"
        for _ in range(times):
            process.send_signal(number)
            said = process.stderr.readline() + process.stderr.readline()
        out, error = process.communicate(timeout=30)
    finally:
        process.kill()
    return process.returncode, out, said + error


@pytest.mark.parametrize(
    "number, code, message",
    [
        (signal.SIGINT, 130, "stopping after this step; Ctrl-C again stops at once."),
        (
            signal.SIGTERM,
            143,
            "SIGTERM: stopping after this step; a second signal stop",
        ),
    ],
)
def test_the_first_is_noted(monkeypatch, capfd, number, code, message):
    before = signal.getsignal(number)
    with Interrupt("a.py") as taken:
        assert not taken.requested and taken.exit_code == 0
        os.kill(os.getpid(), number)
        assert taken.requested and taken.exit_code == code
        assert f"\na.py: {message}" in capfd.readouterr().err
        # A second is an order, whichever it is.
        left = []
        monkeypatch.setattr(interrupt, "leave", lambda *args: left.append(args))
        os.kill(os.getpid(), signal.SIGINT)
        assert left == [("a.py: stopped at once.", 130)]
    assert signal.getsignal(number) is before


def test_the_second_ends_the_process_wherever_it_is():
    code, out, error = interrupted("Interrupt('a.py').__enter__()", times=2)
    assert code == 130
    assert out == "a line that is in no file yet\n"
    assert error == "\na.py: stopped at once.\n"


@pytest.mark.parametrize("number, expected", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_before_there_is_anything_to_keep_one_is_enough(number, expected):
    setup = "leave_on_interrupt('a.py: stopped before it began.')"
    code, out, error = interrupted(setup, times=1, number=number)
    assert code == expected
    assert out == "a line that is in no file yet\n"
    assert error == "\na.py: stopped before it began.\n"
