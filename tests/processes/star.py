"""Processes with a watchdog and without JAX, whose steps are no work; one of them does what the command line says.

    python -m jpipe.launch -n 3 tests/processes/star.py FOLDER FAULT PROCESS

`FAULT` is a function of `FAULTS`, "stop" for an agreement to stop, or "nothing".
"""

import itertools
import json
import os
import pathlib
import random
import re
import signal
import sys
import time

from jpipe import launch
from jpipe._processes import watchdog as _watchdog

SECONDS = 2.0
"""Of silence, and without progress."""


class Output:
    """What a step returns, ready some seconds later."""

    def __init__(self, seconds: float):
        self._ready_at = time.monotonic() + seconds

    def is_ready(self) -> bool:
        return time.monotonic() >= self._ready_at


def work():
    """Longer than a step may take."""
    with _watchdog.Phase("saving", 60.0):
        time.sleep(3 * SECONDS)


def kill_with_child():
    """The child has a copy of every open file, also of connections."""
    if os.fork() == 0:
        time.sleep(10)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def call_alone():
    """What the others never call, and so never ends."""
    with _watchdog.Phase("evaluate", _watchdog.LONG, together=True):
        time.sleep(1000)


FAULTS = {
    "call alone": call_alone,
    "leave out a step": lambda: next(batches),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill with a child": kill_with_child,
    "suspend": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(1000),
    "hold the GIL": lambda: re.match(r"(a*)*b", "a" * 60),
    "raise": lambda: 1 / 0,
    "return": lambda: sys.exit(0),
    "work": work,
    "nothing": lambda: None,
}


def start(folder: pathlib.Path) -> tuple[int, int]:
    """Connects the processes and starts their watchdogs; this process, and the number of processes."""
    process = int(os.environ[launch.PROCESS_ID])
    count = int(os.environ[launch.NUM_PROCESSES])
    path = folder / "address"
    if process == 0:
        server, address = _watchdog.listen()
        path.with_suffix(".draft").write_text(json.dumps(address))
        path.with_suffix(".draft").rename(path)
        connections = _watchdog.accept(server, address, count - 1, 30.0)
    else:
        while not path.exists():
            time.sleep(0.01)
        connection = _watchdog.connect(json.loads(path.read_text()), process)
        assert connection is not None
        connections = {0: connection}
    watchdog = _watchdog.Watchdog(process, connections, silence=SECONDS, progress=SECONDS)
    _watchdog.start(watchdog)
    return process, count


batches = itertools.count()
"""The same in every process, as long as every process makes every step."""


def step(seconds: float = 0.0):
    batch = _watchdog.Batch("all rows", next(batches))
    with _watchdog.Phase("step", None, together=True, batch=batch):
        _watchdog.dispatched(Output(seconds))


def agree_to_stop(process: int) -> None:
    rng = random.Random(process)
    for k in range(100_000):
        if _watchdog.running.stop_reached(k, requested=process == 1 and k >= 50):
            print(f"stops at {k}")
            return
        step()
        time.sleep(rng.random() * 0.01)


def main(folder: str, fault: str, at_fault: str) -> None:
    process, _ = start(pathlib.Path(folder))
    if fault == "stop":
        agree_to_stop(process)
        return
    for _ in range(4):
        step()
    time.sleep(1.0)
    print(f"fault at {time.time()}")
    if process == int(at_fault):
        FAULTS[fault]()
        step()
    if fault == "leave out a step":
        while True:
            step()
            time.sleep(0.01)
    if process != int(at_fault):  # waits for the other
        seconds = {"nothing": 0.5, "work": 3 * SECONDS + 0.5}.get(fault, 1000)
        step(seconds)
        time.sleep(seconds)
    step()
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
