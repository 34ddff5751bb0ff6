"""Ends all processes of a training when one of them ends, fails, stops or gets stuck.

A process that waits for another one waits in compiled code, for ever, and cannot look around. So a thread in each
process does. It keeps a TCP connection to process 0 and sends it a line up to four times a second: what the process
does, and for how long. Process 0 judges, and tells all others when to end and why.

    what a process does       process 0 sees                            after
    ends, killed or crashed   a connection that closes                  at once
    raises an exception       its last line, sent by `sys.excepthook`   at once
    stopped, cut off          no line                                   `SILENCE` (15 s)
    stuck, or ends too early  lines, but no progress                    its limit (20 s, more in long phases)
    stuck without the GIL     no line; its own C timer ends it          `SILENCE`
    calls what others do not  checksums of its calls that differ        a second
    leaves out a step         checksums of its batches that differ      a second

If process 0 is the one, the others see the same of it. Progress is a call of the library, or a step that the devices
have completed. While one process is in a long phase, such as compiling or saving, the others may wait for it.

Standard library only.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from jpipe._processes.watchdog._calls import Batch
from jpipe._processes.watchdog._connections import accept, connect, listen
from jpipe._processes.watchdog._progress import LONG
from jpipe._processes.watchdog._thread import LOST, PROGRESS, SILENCE, Watchdog

__all__ = [
    "LONG",
    "LOST",
    "PROGRESS",
    "SILENCE",
    "Batch",
    "SharedCall",
    "Phase",
    "Watchdog",
    "accept",
    "connect",
    "dispatched",
    "fail",
    "listen",
    "running",
    "start",
    "stop",
    "watched",
]

P = ParamSpec("P")
R = TypeVar("R")

running: Watchdog | None = None
"""The watchdog of this process."""


def start(watchdog: Watchdog) -> None:
    """Makes a watchdog that of this process, and starts it."""
    global running
    running = watchdog
    os.register_at_fork(after_in_child=_forget)
    watchdog.start()


def stop() -> None:
    """Waits until all processes have come here, then ends the watchdog."""
    global running
    if running is not None:
        running.finish()
        running = None


def fail(reason: str, code: int) -> None:
    """Ends this process, which has printed why, and so the others; without a watchdog it does nothing."""
    if running is not None:
        running.fail(reason, code)


def _forget() -> None:
    """Drops the watchdog in a child process, which nobody watches."""
    global running
    if running is not None:
        running.close()
        running = None


class Phase:
    """A context that tells the watchdog what this process does. See `jpipe.distributed.phase`.

    Args:
      name: the name of the phase, for messages.
      limit: seconds that it may take; None: as long as a step.
      together: whether all processes do this, in the same order.
      batch: the share that this process gives to it; None: nothing that is compared.
    """

    __slots__ = ("_batch", "_limit", "_name", "_together", "_watchdog")

    def __init__(
        self,
        name: str,
        limit: float | None,
        together: bool = False,
        batch: Batch | None = None,
    ):
        self._name, self._limit = name, limit
        self._together, self._batch = together, batch

    def __enter__(self) -> None:
        self._watchdog = running
        if running is not None:
            running.enter(self._name, self._limit)
            if self._together:
                running.beats.enter_call(self._name, self._batch)

    def __exit__(self, *exception: Any) -> None:
        if self._watchdog is not None:
            if self._together:
                self._watchdog.beats.leave_call()
            self._watchdog.leave(self._limit)


class SharedCall:
    """A context in which all processes exchange values, in another call or as a call of its own."""

    def __enter__(self) -> None:
        self._watchdog = running
        if running is not None:
            running.beats.enter_call(running.beats.innermost("exchange of values"))

    def __exit__(self, *exception: Any) -> None:
        if self._watchdog is not None:
            self._watchdog.beats.leave_call()


def watched(
    name: str, together: Callable[..., bool] = lambda *_, **__: False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: a call of the function is a long phase.

    Args:
      name: the name of the phase.
      together: `(*args, **kwargs) -> ` whether all processes make this call, in the same order.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            is_shared = running is not None and together(*args, **kwargs)
            with Phase(name, LONG, is_shared):
                return function(*args, **kwargs)

        return call

    return decorate


def dispatched(output: Any) -> None:
    """Tells the watchdog that the devices work until `output` is ready."""
    if running is not None:
        running.beats.dispatched(output)
