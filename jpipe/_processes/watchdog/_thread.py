"""The thread that watches the other processes and sends them what this one does."""

import atexit
import contextlib
import faulthandler
import os
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from jpipe._processes.watchdog._calls import difference, next_to_ask
from jpipe._processes.watchdog._connections import Line, Lines
from jpipe._processes.watchdog._progress import Beats, culprits, stuck_processes
from jpipe._processes.watchdog._stop import Stop, Vote

SILENCE = 15.0
"""Seconds without a word from a process until it counts as stopped."""

MORE_SILENCE = 10.0
"""Seconds on top of these in long phases: a compiler may keep Python from running."""

PROGRESS = 20.0
"""Seconds without progress until a process counts as stuck, at the least."""

_GRACE = 1.5
"""Seconds that a process waits for its main thread to print its own exception, before it ends for another one's."""

_LAST_WORDS = _GRACE + 1.0
"""Seconds that process 0 waits for the others to read why it ends. JAX ends them at once, without a message, when it is
gone.
"""

_TIMER = 45.0
"""Seconds of the C timer, on top of the silence."""

_STDERR = 2  # the descriptor: `sys.stderr` may be replaced
LOST, SILENT, STUCK = 71, 72, 73
"""Exit codes of processes that end because of another one."""


class Watchdog:
    """The thread of one process; see `jpipe._processes.watchdog`.

    Args:
      process: the number of this process.
      connections: one to each other process in process 0, by number; in the others one to process 0.
      silence, progress: seconds, see `SILENCE` and `PROGRESS`.
      parent: the process that started this one, which ends with it; None: any.
    """

    def __init__(
        self,
        process: int,
        connections: dict[int, socket.socket],
        *,
        silence: float = SILENCE,
        progress: float = PROGRESS,
        parent: int | None = None,
    ):
        self.process = process
        self.beats, self.stop = Beats(progress), Stop()
        self._silence, self._parent, self._pid = silence, parent, os.getpid()
        self._lines = Lines({p: Line(c) for p, c in connections.items()})
        self._heard = dict.fromkeys(self._lines, time.monotonic())
        self._last: dict[int, dict] = {}
        self._vote = Vote(self.stop, self._lines.send, len(connections) + 1)
        self._failure: tuple[str, int] | None = None
        self._failed = threading.Event()
        self._waits_for_cause = False
        # Process 0 reads the lines of all: with many processes they come less often.
        self._interval = min(max(0.25, 0.01 * len(connections)), 1.0)
        self._timer_set = 0.0
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_out.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        for p, line in self._lines.items():
            self._selector.register(line.connection, selectors.EVENT_READ, p)
        self._thread = threading.Thread(target=self._guarded_run, name="jpipe watchdog", daemon=True)
        self._hook: Callable = sys.excepthook

    def start(self) -> None:
        """Starts to watch, until the program ends."""
        sys.excepthook = self._except
        atexit.register(self.finish)
        self._thread.start()

    # -- Of the main thread

    def enter(self, name: str, limit: float | None) -> None:
        """A phase begins."""
        self.beats.enter(name, limit)
        if limit is not None:
            self._wake()

    def leave(self, limit: float | None) -> None:
        """The innermost phase ends, which began with this limit."""
        self.beats.leave()
        if limit is not None:
            self._wake()

    def stop_reached(self, step: int, requested: bool) -> bool:
        """Returns whether all processes stop at a step, see `jpipe.distributed.stop_requested`."""
        if requested and not self.stop.wanted:
            self.stop.wanted = True
            self._wake()
        return self.stop.reached(step)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_in.send(b"!", socket.MSG_DONTWAIT)

    def _except(self, kind: type, error: BaseException, trace: Any) -> None:
        """`sys.excepthook`: ends this process at once, and so the others, rather than wait for them in JAX's
        shutdown.
        """
        self._hook(kind, error, trace)
        if os.getpid() != self._pid or threading.current_thread() is not threading.main_thread():
            return
        if kind.__name__ in ("JaxRuntimeError", "XlaRuntimeError"):
            # Another process may be the cause, and the watchdog about to say so.
            self._waits_for_cause = True
            self._thread.join(_GRACE)
            self._waits_for_cause = False
        text = str(error).strip().partition("\n")[0]
        code = 130 if issubclass(kind, KeyboardInterrupt) else 1
        self.fail(f"{kind.__name__}: {text}" if text else kind.__name__, code)

    def fail(self, reason: str, code: int) -> NoReturn:
        """Ends this process, which has printed why, and so the others."""
        self._failure = reason, code
        self._failed.set()
        self._wake()
        self._thread.join(2 * _GRACE)
        _exit(code)

    def finish(self) -> None:
        """Waits at the end of the program until all processes have come here."""
        if os.getpid() == self._pid:
            self.beats.end()
            self._wake()
            self._thread.join()
            sys.excepthook = self._hook
            faulthandler.cancel_dump_traceback_later()

    def close(self) -> None:
        """Closes the connections, in a child process whose copies would keep them open."""
        for line in self._lines.values():
            line.connection.close()

    # -- Of the watchdog's thread

    def _guarded_run(self) -> None:
        """`_run`, whose errors are ours: training goes on without a watchdog."""
        try:
            self._run()
        except Exception:
            faulthandler.cancel_dump_traceback_later()
            text = traceback.format_exc()
            _write(f"jpipe: the watchdog of process {self.process} failed:\n{text}")

    def _run(self) -> None:
        next_beat = looked = time.monotonic()
        while True:
            ready = []
            for key, _ in self._selector.select(max(next_beat - time.monotonic(), 0)):
                if key.fileobj is self._wake_out:
                    with contextlib.suppress(BlockingIOError):
                        while self._wake_out.recv(1024):
                            pass
                    next_beat = 0.0
                else:
                    ready.append(key.data)
            now = time.monotonic()
            if now - looked > self._silence / 3:
                # This process was stopped itself, perhaps with its machine. It goes on as if no time had passed.
                self._heard = dict.fromkeys(self._heard, now)
                self.beats.pause(now - looked)
            looked = now
            if any([self._receive(p, now) for p in ready]) or self._all_left():
                return
            if now >= next_beat:
                next_beat = now + self._interval
                self._beat(now)

    def _receive(self, p: int, now: float) -> bool:
        """Reads the messages of a process. Returns whether it says that all have ended well."""
        line = self._lines[p]
        for value in line.receive():
            self._heard[p] = now
            if "end" in value:
                self._end(value["end"], value["code"], value["grace"])
            if "line" in value:
                self._last[p] = value["line"]
            if "ask" in value:
                self.beats.calls.asked = value["ask"]
            if "failed" in value:
                self._failed_in(p, value["failed"])
            if "propose" in value:
                step = value["propose"]
                accepted, asked = self.stop.propose(step), self.stop.asked
                line.send({"accepted": accepted, "step": step, "asked": asked})
            if "accepted" in value:
                self._vote.reply(p, value)
            if "stop at" in value:
                self.stop.decide(value["stop at"])
            if "all left" in value:
                line.connection.close()
                return True
        if line.closed:
            why = "is gone without a word: it was killed, or it crashed"
            self._tell(f"process {p} {why}. {self._was(p, now)}", LOST)
        return False

    def _beat(self, now: float) -> None:
        """Tells the others what this process does, and looks whether they are well."""
        line = self.beats.look()
        line |= {"asked": self.stop.asked, "wants stop": self.stop.wanted}
        self._last[self.process] = line
        self._set_timer(now, self._silence_in(line["long"]))
        if self._parent is not None and os.getppid() != self._parent:
            self._end("the process that started it is gone.", LOST)
        value: dict[str, Any] = {"line": line}
        if self.process == 0 and len(self._last) > len(self._lines):
            asked = next_to_ask(self._last)
            if asked is not None:
                value["ask"] = self.beats.calls.asked = asked
        self._lines.send(value)
        if self._failure is not None:
            failure, _ = self._failure
            if self.process == 0:
                self._failed_in(0, failure)
            self._lines.send({"failed": failure})
        for p, heard in self._heard.items():
            last = self._last.get(p)
            limit = self._silence_in(last is None or last["long"])
            if now - heard > limit:
                self._tell(
                    f"process {p} has not been heard of for {now - heard:.0f} s: it is stopped, cut off, or stuck "
                    f"without the GIL. {self._was(p, now)}",
                    SILENT,
                )
        if self.process == 0:
            self._judge()
            self._vote.consider(self._last)

    def _silence_in(self, long: bool) -> float:
        """Seconds without a word from a process, in a long phase or not, until it counts as stopped."""
        return self._silence + MORE_SILENCE * long

    def _set_timer(self, now: float, silence: float) -> None:
        """Ends this process if this thread does not come by again, because another one holds the GIL.

        The timer is C code. Setting it starts a thread, so this is done once a second. It leaves time for a machine
        that was stopped as a whole, and goes on.
        """
        if now - self._timer_set >= 1.0:
            self._timer_set = now
            faulthandler.dump_traceback_later(silence + _TIMER, exit=True, file=_STDERR)

    def _was(self, p: int, now: float) -> str:
        """The last known work of a process, in a sentence."""
        last = self._last.get(p)
        if last is None:
            return "It had said nothing yet."
        return f"It was last seen {now - self._heard[p]:.1f} s ago in: {last['text']}."

    def _all_left(self) -> bool:
        """Returns whether all have ended well, as process 0 sees it. Tells them."""
        if self.process or len(self._last) <= len(self._lines):
            return False
        if not all(last["left"] for last in self._last.values()):
            return False
        self._lines.send_last({"all left": True}, _LAST_WORDS)
        return True

    def _judge(self) -> None:
        """Ends all if their calls differ, or if a process makes no progress, and no other one works for long."""
        last = self._last
        if len(last) <= len(self._lines):
            return
        lists = "; ".join(f"process {p}: {last[p]['text']} ({last[p]['age']:.0f} s)" for p in sorted(last))
        differ = difference(last)
        if differ is not None:
            self._tell(f"{differ} Now {lists}.", STUCK)
        stuck = stuck_processes(last)
        if stuck:
            age = max(last[p]["age"] for p in stuck)
            names = ", ".join(map(str, culprits(last)))
            self._tell(
                f"no progress for {age:.0f} s because of process {names}. {lists}.",
                STUCK,
            )

    def _failed_in(self, p: int, failure: str) -> None:
        """Ends all processes because one raised an exception."""
        where = self._last[p]["text"] if p in self._last else "starting"
        self._tell(f"process {p} failed in: {where}. {failure}", LOST, _GRACE)

    # -- The end

    def _tell(self, reason: str, code: int, grace: float = 0.0) -> None:
        """Ends all processes from process 0, or this one if process 0 is the cause."""
        if self.process == 0:
            last = {"end": reason, "code": code, "grace": grace}
            self._lines.send_last(last, _LAST_WORDS)
        self._end(reason, code, grace)

    def _end(self, reason: str, code: int, grace: float = 0.0) -> None:
        """Ends this process, with one message."""
        if self._waits_for_cause:
            grace = 0.0
        if grace and self._failed.wait(grace) or self._failed.is_set():
            assert self._failure is not None
            _, code = self._failure  # its message is printed
            _exit(code)
        _write(f"jpipe: process {self.process} ends: {reason}\n")
        if code == STUCK:
            faulthandler.dump_traceback(_STDERR)
        _exit(code)


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(_STDERR, text.encode())


def _exit(code: int) -> NoReturn:
    """Ends the process at once. Its prints stay."""

    def flush() -> None:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()

    # In another thread, because the main thread may hold a lock.
    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    thread.join(0.5)
    os._exit(code)
