"""The watchdog: what it takes for a fault and what not, and real processes that end for each."""

import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time

import pytest

from jpipe._processes import watchdog as _watchdog
from jpipe._processes.watchdog._calls import difference, next_to_ask
from jpipe._processes.watchdog._progress import LONG, Beats, culprits, stuck_processes
from jpipe._processes.watchdog._stop import Stop

ROOT = pathlib.Path(__file__).parents[1]


class Clock:
    """Replaces `time.monotonic`."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


class Output:
    ready = False

    def is_ready(self):
        return self.ready


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def step(beats, clock, seconds):
    """A step that the devices take some seconds for."""
    output = Output()
    beats.enter("step", None)
    beats.dispatched(output)
    beats.leave()
    clock.now += seconds
    output.ready = True
    return beats.look()


def test_what_a_process_says_it_does(clock):
    beats, output = Beats(20.0), Output()
    seen = beats.look()
    assert (seen["text"], seen["limit"], seen["long"]) == (
        "outside of jpipe",
        LONG,
        True,
    )
    beats.enter("init", LONG)
    assert beats.look()["text"] == "init"
    beats.leave()
    step(beats, clock, 1.0)
    assert beats.look()["text"] == "outside of jpipe after step 1"
    beats.enter("step", None)
    assert beats.look()["text"] == "step 2"
    beats.dispatched(output)
    beats.leave()
    seen = beats.look()
    assert (seen["text"], seen["waits"]) == ("waiting for step 2", True)
    output.ready = True
    beats.enter("evaluate", LONG)
    seen = beats.look()
    assert (seen["text"], seen["limit"]) == ("evaluate after step 2", LONG)
    beats.leave()
    beats.end()
    assert beats.look()["text"] == "ended after step 2"


def test_the_limit_is_ten_median_steps(clock):
    beats = Beats(20.0)
    assert step(beats, clock, 30.0)["limit"] == 300.0  # the first one, compiled
    for _ in range(4):
        seen = step(beats, clock, 3.0)
    assert seen["limit"] == 30.0
    for _ in range(9):
        seen = step(beats, clock, 1.0)
    assert seen["limit"] == 20.0


def test_steps_in_flight_share_the_time_of_a_look(clock):
    beats, outputs = Beats(1.0), [Output() for _ in range(10)]
    for output in outputs:
        beats.enter("step", None)
        beats.dispatched(output)
        beats.leave()
    clock.now += 20.0
    assert beats.look()["waits"]
    for output in outputs:
        output.ready = True
    seen = beats.look()
    assert (seen["limit"], seen["age"], seen["waits"]) == (20.0, 0.0, False)


def test_devices_that_evaluate_may_take_long(clock):
    beats = Beats(20.0)
    step(beats, clock, 1.0)
    beats.enter("evaluate", LONG)
    beats.dispatched(Output())
    beats.leave()
    clock.now += 60.0
    seen = beats.look()
    assert (seen["limit"], seen["long"], seen["age"]) == (LONG, True, 60.0)


def test_time_in_which_a_process_was_stopped_does_not_count(clock):
    beats = Beats(20.0)
    step(beats, clock, 1.0)
    clock.now += 65.0
    beats.pause(60.0)
    assert beats.look()["age"] == 5.0


def line(age=0.0, limit=20.0, long=False, waits=True, left=False, steps=5):
    return dict(age=age, limit=limit, long=long, waits=waits, left=left, steps=steps)


def test_a_process_that_waits_is_not_stuck_while_another_works():
    works = line(age=100, limit=600, long=True, waits=False)
    assert stuck_processes({0: line(age=50), 1: works}) == []
    # Just after: what waited has not waited for long.
    assert stuck_processes({0: line(age=101), 1: line(age=1)}) == []
    assert stuck_processes({0: line(age=50), 1: {**works, "age": 601}}) == [0, 1]


def test_one_outside_of_the_library_is_stuck_whatever_the_others_do():
    outside = line(age=21, waits=False)
    evaluates = line(age=15, limit=600, long=True)
    assert stuck_processes({0: evaluates, 1: outside}) == [1]
    assert culprits({0: evaluates, 1: outside}) == [1]


def test_all_that_wait_without_progress_are_stuck():
    last = {0: line(age=21), 1: line(age=22, steps=4)}
    assert stuck_processes(last) == [0, 1]
    assert culprits(last) == [1]


def test_the_end_of_one_process():
    ended = line(age=100, waits=False, left=True)
    assert stuck_processes({0: ended, 1: line(age=21, waits=False)}) == []
    assert stuck_processes({0: ended, 1: line(age=21)}) == [1]
    assert stuck_processes({0: {**ended, "age": 1}, 1: line(age=21)}) == []
    assert stuck_processes({0: ended, 1: line(age=601, waits=False)}) == [1]


def lines_of(*calls, left=()):
    """The last lines of processes that have made some calls each, compared at those of the slowest one.

    Args:
      *calls: for each process a list of names, or of steps as the batch that it gives.
      left: the processes that have ended.
    """
    beats = [Beats(20.0) for _ in calls]
    for each, names in zip(beats, calls):
        for name in names:
            batch = None if isinstance(name, str) else _watchdog.Batch("rows", name)
            call = name if isinstance(name, str) else "step"
            each.enter(call, None)
            each.enter_call(call, batch)
            each.enter_call("a part of it")
            each.leave_call()
            each.leave_call()
            each.leave()
    asked = next_to_ask({p: each.look() for p, each in enumerate(beats)})
    last = {}
    for p, each in enumerate(beats):
        each.calls.asked = asked
        last[p] = {**each.look(), "left": p in left}
    return last


def test_equal_calls_do_not_differ():
    calls = ["init", 0, 1, 2, "evaluate", 3]
    assert difference(lines_of(calls, calls, calls)) is None
    assert difference(lines_of(calls, calls[:4])) is None  # one is behind
    assert difference(lines_of(calls, [])) is None
    assert difference(lines_of(calls, calls, left=[0, 1])) is None
    long = ["init", *range(3000)]
    assert difference(lines_of(long, long[:1500])) is None
    # A process that is too far ahead to be compared.
    assert difference(lines_of(long, ["evaluate"])) is None


@pytest.mark.parametrize("ahead", [0, 1, 500])
def test_a_call_of_one_process_alone_is_named(ahead):
    steps = ["init", 0, 1]
    others = [*steps, *range(2, 3 + ahead)]
    found = difference(lines_of([*steps, "evaluate"], others, others))
    start = "process 0 made other calls than the rest: call 4 is evaluate in process 0, step in process 1. "
    assert found.startswith(start)
    found = difference(lines_of([*steps, "evaluate"], others))  # which of them?
    assert found.startswith("processes 0, 1 made different calls: call 4 is ")


def test_a_step_that_was_left_out_is_named():
    steps, others = ["init", 0, 1, 3, 4, 5], ["init", 0, 1, 2, 3, 4, 5]
    for count in range(4, 7):
        found = difference(lines_of(others, steps[:count], others))
        start = f"process 1 gave other batches than the rest, in step {count - 1} or "
        assert found.startswith(start)


def test_shares_are_compared_with_their_like():
    def of_share(share, batch):
        beats = Beats(20.0)
        beats.enter_call("step", _watchdog.Batch(share, batch))
        beats.calls.asked = 1
        return {**beats.look(), "left": False}

    shares = {0: ("a", 1), 1: ("b", 2), 2: ("a", 1), 3: ("b", 2)}
    assert difference({p: of_share(*each) for p, each in shares.items()}) is None
    shares[3] = "b", 3
    found = difference({p: of_share(*each) for p, each in shares.items()})
    assert found.startswith("processes 1, 3 gave different batches")


def test_a_process_that_ended_keeps_no_other_waiting():
    found = difference(lines_of(["init", 0, "evaluate"], ["init", 0], left=[1]))
    start = "process 1 ended after 2 calls, and the next one, of process 0, waits for it"
    assert found.startswith(start)


def test_strangers_keep_no_process_out():
    """They connect first, and say nothing, or nonsense, or go."""
    server, address = _watchdog.listen("localhost")
    host, port = server.getsockname()[:2]
    assert host in ("127.0.0.1", "::1")  # not on every interface
    strangers = [socket.create_connection((host, port)) for _ in range(100)]
    words = [b"GET / HTTP/1.1\n", b"x" * 5000, b"[[[[[\n", b'{"token": 1}\n']
    for stranger, said in zip(strangers, words):
        stranger.sendall(said)
    strangers[-1].close()
    connected: dict = {}

    def connect(process):
        connected[process] = _watchdog.connect(address, process)

    threads = [threading.Thread(target=connect, args=(p,)) for p in (1, 2)]
    for thread in threads:
        thread.start()
    accepted = _watchdog.accept(server, address, 2, seconds=4.0)  # less than a hello may take
    for thread in threads:
        thread.join()
    assert sorted(accepted) == [1, 2] and None not in connected.values()
    for each in [*accepted.values(), *connected.values(), *strangers]:
        each.close()


def test_a_name_that_is_not_this_machine_is_no_obstacle():
    server, address = _watchdog.listen("host.invalid")
    with server:
        assert address["hosts"][0] == "host.invalid" and len(address["hosts"]) > 2


def test_a_process_that_has_passed_a_step_refuses_it():
    stop = Stop()
    assert not stop.reached(4)
    assert not stop.propose(4)
    assert stop.propose(6)
    assert not stop.reached(5)
    waiting = threading.Thread(target=lambda: answers.append(stop.reached(6)))
    answers: list[bool] = []
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()  # the step is open
    stop.decide(6)
    waiting.join(5.0)
    assert answers == [True]


def test_without_a_watchdog_a_phase_costs_nothing():
    assert _watchdog.running is None
    with _watchdog.Phase("step", None):
        pass
    assert _watchdog.watched("init")(lambda a, *, b: (a, b))(1, b=2) == (1, 2)


def test_a_step_costs_less_than_ten_microseconds(monkeypatch):
    watchdog = _watchdog.Watchdog(0, {})
    monkeypatch.setattr(_watchdog, "running", watchdog)
    output, seconds = Output(), []
    output.ready = True
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(100):
            with _watchdog.Phase("step", None):
                pass
            _watchdog.dispatched(output)
        seconds.append((time.perf_counter() - start) / 100)
        watchdog.beats.look()
    assert min(seconds) < 10e-6


# -- Real processes


def run(tmp_path, fault, process, count=3):
    """What is printed, by process; the exit code; the seconds from the fault to the end of all."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "jpipe.launch", "-n", str(count)),
            *(
                str(ROOT / "tests/processes/star.py"),
                str(tmp_path),
                fault,
                str(process),
            ),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
    )
    ended = time.time()
    text = done.stdout + done.stderr
    faults = [float(t) for t in re.findall(r"fault at ([\d.]+)", text)]
    of_process = ["\n".join(re.findall(rf"^\[{p}\] (.*)$", text, flags=re.M)) for p in range(count)]
    return of_process, done.returncode, ended - min(faults, default=ended)


FAULTS = {
    "kill with a child": "process {} is gone without a word: it was killed, or it crashed. It was last seen",
    "kill": "process {} is gone without a word: it was killed, or it crashed. It was last seen",
    "raise": "process {} failed in: outside of jpipe after step 4. ZeroDivisionError: division by zero",
    "suspend": "process {} has not been heard of for 2 s",
    "sleep": "no progress for 2 s because of process {}. ",
    "return": "process {} ended after 4 calls, and the next one, of process",
    "call alone": "process {} made other calls than the rest: call 5 is evaluate in process {}, step in process ",
    "leave out a step": "process {} gave other batches than the rest, in step ",
    "hold the GIL": "process {} has not been heard of for 2 s",
}


@pytest.mark.first_case
@pytest.mark.parametrize(
    "fault, process",
    [
        (fault, process)
        if (fault, process) in [("kill", 0), ("raise", 1), ("sleep", 1), ("call alone", 0)]
        else pytest.param(fault, process, marks=pytest.mark.slow)
        for fault in FAULTS
        for process in (0, 1)
    ],
)
def test_all_end_and_say_why(tmp_path, fault, process):
    printed, code, seconds = run(tmp_path, fault, process)
    assert code != 0
    assert seconds < 2.0 + 2.0 + 5.0 + 5.0  # noticed; told; killed; a slow machine
    for p, text in enumerate(printed):
        if p != process:
            messages = [t for t in text.splitlines() if t.startswith("jpipe: ")]
            (message,) = messages
            why = FAULTS[fault].format(process, process)
            assert message.startswith(f"jpipe: process {p} ends: {why}")
            assert fault == "leave out a step" or "after step 4" in message


@pytest.mark.parametrize("fault", ["nothing", "work"])
@pytest.mark.sampled(2)
def test_what_is_no_fault(tmp_path, fault):
    printed, code, _ = run(tmp_path, fault, 1)
    assert code == 0
    assert all(text.endswith("done") for text in printed)


def test_all_stop_at_one_step(tmp_path):
    printed, code, _ = run(tmp_path, "stop", 1)
    assert code == 0
    steps = {int(text.removeprefix("stops at ")) for text in printed}
    assert len(steps) == 1 and 50 <= steps.pop() < 1000
