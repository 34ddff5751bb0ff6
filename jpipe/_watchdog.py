"""Ends all processes of a training when one of them ends, fails, stops or gets stuck.

A process that waits for another one waits in compiled code, for ever, and cannot look around. So a thread in each process
does. It keeps a TCP connection to process 0 and sends it a line up to four times a second: what the process does, and
for how long.
Process 0 judges, and tells all others when to end and why.

    what a process does       process 0 sees                            after
    ends, killed or crashed   a connection that closes                  at once
    raises an exception       its last line, sent by `sys.excepthook`   at once
    stopped, cut off          no line                                   `SILENCE` (15 s)
    stuck, or ends too early  lines, but no progress                    its limit (20 s, more in long phases)
    stuck without the GIL     no line; its own C timer ends it          `SILENCE`

If process 0 is the one, the others see the same of it. Progress is a call of the library, or a step that the devices
have completed. While one process is in a long phase, such as compiling or saving, the others may wait for it.

Standard library only.
"""

import atexit
import collections
import contextlib
import faulthandler
import functools
import json
import os
import secrets
import selectors
import socket
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

SILENCE = 15.0
"""Seconds without a word from a process until it counts as stopped."""

MORE_SILENCE = 10.0
"""Seconds on top of these in long phases: a compiler may keep Python from running."""

PROGRESS = 20.0
"""Seconds without progress until a process counts as stuck, at the least."""

LONG = 600.0
"""The limit of a phase that may take long, such as a compilation."""

_GRACE = 1.5
"""Seconds that a process waits for its main thread to print its own exception, before it ends for another one's."""

_TIMER = 45.0
"""Seconds of the C timer, on top of the silence."""

_STDERR = 2  # the descriptor: `sys.stderr` may be replaced
LOST, SILENT, STUCK = 71, 72, 73
"""Exit codes of processes that end because of another one."""

running: "Watchdog | None" = None
"""The watchdog of this process."""


class Phase:
    """A context that tells the watchdog what this process does. See `jpipe.distributed.phase`.

    Args:
      name: for messages.
      limit: seconds that it may take; None: as long as a step.
    """

    __slots__ = ("_limit", "_name", "_watchdog")

    def __init__(self, name: str, limit: float | None):
        self._name, self._limit = name, limit

    def __enter__(self) -> None:
        self._watchdog = running
        if running is not None:
            running.enter(self._name, self._limit)

    def __exit__(self, *exception: Any) -> None:
        if self._watchdog is not None:
            self._watchdog.leave(self._limit)


def watched(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: a call of the function is a long phase."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with Phase(name, LONG):
                return function(*args, **kwargs)

        return call

    return decorate


def dispatched(output: Any) -> None:
    """Tells the watchdog that the devices work until `output` is ready."""
    if running is not None:
        running.beats.dispatched(output)


class _Line:
    """A connection that carries one JSON value a line, without blocking."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self._unread, self._unsent = b"", b""
        self.closed = False

    def send(self, value: Any) -> None:
        """Sends a value, as far as the connection takes it now. The rest goes with the next one."""
        self._unsent += json.dumps(value).encode() + b"\n"
        try:
            while self._unsent:
                sent = self.connection.send(self._unsent)
                self._unsent = self._unsent[sent:]
        except BlockingIOError:
            self.closed |= len(self._unsent) > 2**20
        except OSError:
            self.closed = True

    def receive(self) -> list:
        """The values that have arrived."""
        try:
            while data := self.connection.recv(2**16):
                self._unread += data
            self.closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        *lines, self._unread = self._unread.split(b"\n")
        return [json.loads(line) for line in lines]


class Beats:
    """What this process does, noted by the main thread and read by the watchdog's.

    Args:
      limit: seconds without progress, at the least, from the second step on.

    Attributes:
      left: whether the program has ended well.
    """

    def __init__(self, limit: float):
        self._limit = limit
        self._phases: list[tuple[str, float | None]] = []
        self._progress = time.monotonic()
        self._started = self._completed = 0
        self._pending: collections.deque[_Pending] = collections.deque()
        self._seconds: collections.deque[float] = collections.deque(maxlen=20)
        self._last_completion = 0.0
        self.left = False

    def enter(self, name: str, limit: float | None) -> None:
        """A phase begins; a phase "step" is the next step."""
        if name == "step":
            self._started += 1
        self._phases.append((name, limit))
        self._progress = time.monotonic()

    def leave(self) -> None:
        """The innermost phase ends."""
        self._phases.pop()
        self._progress = time.monotonic()

    def dispatched(self, output: Any) -> None:
        """What the innermost phase does runs on the devices until `output` is ready."""
        name = self._phases[-1][0] if self._phases else "work"
        self._pending.append(_Pending(name, output, time.monotonic()))

    def end(self) -> None:
        """The program has ended well."""
        self.left, self._progress = True, time.monotonic()

    def pause(self, seconds: float) -> None:
        """The process was stopped for so long."""
        self._progress += seconds

    def look(self) -> dict[str, Any]:
        """What this process does, as its line says it.

        Returns:
          "text" for messages; "steps" that were called; "age", seconds since the last progress, and its
          "limit"; "long", whether the limit is that of a long phase; "waits", whether it may be
          waiting for other processes; "left".
        """
        now = time.monotonic()
        self._complete(now)
        phases, pending = list(self._phases), list(self._pending)
        limits = [limit for _, limit in phases if limit is not None]
        if pending and pending[0].name != "step":
            limits.append(LONG)
        if not self._completed:
            limits.append(LONG)
        limit = self._limit
        if limits:
            limit = max(limits)
        elif self._seconds:
            limit = max(limit, 10 * statistics.median(self._seconds))
        return {
            "text": self._text(phases, pending),
            "steps": self._started,
            "age": round(now - self._progress, 1),
            "limit": limit,
            "long": bool(limits),
            "waits": bool(phases or pending),
            "left": self.left,
        }

    def _complete(self, now: float) -> None:
        """Notes what the devices have completed. The steps since the last look share its time."""
        since, steps = self._last_completion, 0
        while self._pending and _is_ready(self._pending[0].output):
            done = self._pending.popleft()
            since = max(since, done.dispatched) if not steps else since
            steps += done.name == "step"
            self._last_completion = self._progress = now
        if steps:
            self._completed += steps
            self._seconds.append((now - since) / steps)

    def _text(self, phases: list, pending: list) -> str:
        if self.left:
            return f"ended after step {self._started}"
        if phases and phases[-1][0] == "step":
            return f"step {self._started}"
        if phases:
            what = phases[-1][0]
        elif pending and pending[0].name == "step":
            return f"waiting for step {self._completed + 1}"
        elif pending:
            what = f"waiting for {pending[0].name}"
        else:
            what = "outside of jpipe"
        return f"{what} after step {self._started}" if self._started else what


def _is_ready(output: Any) -> bool:
    """Whether the devices have completed an output; one that was deleted does not tell."""
    try:
        return output.is_ready()
    except RuntimeError:
        return True


class _Pending(NamedTuple):
    """What the devices work at: the phase, an array that is ready at the end, and when it began."""

    name: str
    output: Any
    dispatched: float


class Stop:
    """How all processes agree on the step to stop at.

    Process 0 proposes a step that none should have reached yet. A process that has not accepts, and does not
    pass it until it is decided. Once all have accepted, it is.

    Attributes:
      at: the step that was agreed on.
      wanted: whether this process wants to stop.
      asked: the last step that this process asked for and went on.
    """

    def __init__(self) -> None:
        self.at: int | None = None
        self.wanted = False
        self.asked: int | None = None
        self._proposed: int | None = None
        self._changed = threading.Condition()

    def propose(self, step: int) -> bool:
        """Accepts a step, unless this process has passed it."""
        with self._changed:
            accepted = self.asked is None or self.asked < step
            self._proposed = step if accepted else None
            self._changed.notify_all()
            return accepted

    def decide(self, step: int) -> None:
        """It is decided."""
        with self._changed:
            self.at = step
            self._changed.notify_all()

    def reached(self, step: int) -> bool:
        """Whether to stop at a step. Waits while that is open."""
        with self._changed:
            while (
                self.at is None
                and self._proposed is not None
                and step >= self._proposed
            ):
                self._changed.wait(1.0)
            if self.at is not None and step >= self.at:
                return True
            self.asked = step
            return False


class Watchdog:
    """The thread of one process. See the module.

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
        self._lines = {p: _Line(c) for p, c in connections.items()}
        self._heard = dict.fromkeys(self._lines, time.monotonic())
        self._last: dict[int, dict] = {}
        self._replies: dict[int, bool] = {}
        self._proposal: int | None = None
        self._failure: tuple[str, int] | None = None
        self._failed = threading.Event()
        self._waits_for_cause = False
        self._margin = 1
        # Process 0 reads the lines of all: with many processes they come less often.
        self._interval = min(max(0.25, 0.01 * len(connections)), 1.0)
        self._timer_set = 0.0
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_out.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        for p, line in self._lines.items():
            self._selector.register(line.connection, selectors.EVENT_READ, p)
        self._thread = threading.Thread(
            target=self._guarded_run, name="jpipe watchdog", daemon=True
        )
        self._hook: Callable = sys.excepthook

    def start(self) -> None:
        """Starts to watch, until the program ends."""
        sys.excepthook = self._except
        atexit.register(self.finish)
        os.register_at_fork(after_in_child=self._forget)
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
        """Whether all processes stop at a step, see `jpipe.distributed.stop_requested`."""
        if requested and not self.stop.wanted:
            self.stop.wanted = True
            self._wake()
        return self.stop.reached(step)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_in.send(b"!", socket.MSG_DONTWAIT)

    def _except(self, kind: type, error: BaseException, trace: Any) -> None:
        """`sys.excepthook`: ends this process at once, and so the others, rather than wait for them in JAX's shutdown."""
        self._hook(kind, error, trace)
        if (
            os.getpid() != self._pid
            or threading.current_thread() is not threading.main_thread()
        ):
            return
        if kind.__name__ in ("JaxRuntimeError", "XlaRuntimeError"):
            # Another process may be the cause, and the watchdog about to say so.
            self._waits_for_cause = True
            self._thread.join(_GRACE)
            self._waits_for_cause = False
        text = str(error).strip().partition("\n")[0]
        code = 130 if issubclass(kind, KeyboardInterrupt) else 1
        self._failure = f"{kind.__name__}: {text}" if text else kind.__name__, code
        self._failed.set()
        self._wake()
        self._thread.join(2 * _GRACE)
        _exit(code)

    def finish(self) -> None:
        """At the end of the program: waits until all have come here."""
        if os.getpid() == self._pid:
            self.beats.end()
            self._wake()
            self._thread.join()
            sys.excepthook = self._hook
            faulthandler.cancel_dump_traceback_later()

    def _forget(self) -> None:
        """In a child process: its copies of the connections must not keep them open."""
        global running
        if running is self:
            running = None
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
        """Reads what a process has sent. Whether it says that all have ended well."""
        line = self._lines[p]
        for value in line.receive():
            self._heard[p] = now
            if "end" in value:
                self._end(value["end"], value["code"], value["grace"])
            if "line" in value:
                self._last[p] = value["line"]
            if "failed" in value:
                self._failed_in(p, value["failed"])
            if "propose" in value:
                step = value["propose"]
                accepted, asked = self.stop.propose(step), self.stop.asked
                line.send({"accepted": accepted, "step": step, "asked": asked})
            if "accepted" in value and value["step"] == self._proposal:
                self._replies[p] = value["accepted"]
                self._last[p]["asked"] = value["asked"]
                self._count_replies()
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
        """Says what this process does, and looks whether the others are well."""
        own = self.beats.look()
        own["asked"], own["wants stop"] = self.stop.asked, self.stop.wanted
        self._last[self.process] = own
        self._set_timer(now, self._silence_in(own["long"]))
        if self._parent is not None and os.getppid() != self._parent:
            self._end("the process that started it is gone.", LOST)
        for line in self._lines.values():
            line.send({"line": own})
        if self._failure is not None:
            failure, _ = self._failure
            if self.process == 0:
                self._failed_in(0, failure)
            for line in self._lines.values():
                line.send({"failed": failure})
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
            self._agree_to_stop()

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
        """What a process did when it was last heard of."""
        last = self._last.get(p)
        if last is None:
            return "It had said nothing yet."
        return f"It was last seen {now - self._heard[p]:.1f} s ago in: {last['text']}."

    def _all_left(self) -> bool:
        """In process 0, whether all have ended well. They are told."""
        if self.process or len(self._last) <= len(self._lines):
            return False
        if not all(last["left"] for last in self._last.values()):
            return False
        self._send_all({"all left": True})
        return True

    def _judge(self) -> None:
        """Ends all processes if one makes no progress, and no other one works for long."""
        last = self._last
        if len(last) <= len(self._lines):
            return
        stuck = stuck_processes(last)
        if not stuck:
            return
        age = max(last[p]["age"] for p in stuck)
        lists = "; ".join(
            f"process {p}: {last[p]['text']} ({last[p]['age']:.0f} s)"
            for p in sorted(last)
        )
        names = ", ".join(map(str, culprits(last)))
        self._tell(
            f"no progress for {age:.0f} s because of process {names}. {lists}.", STUCK
        )

    def _failed_in(self, p: int, failure: str) -> None:
        """Ends all processes because one raised an exception."""
        where = self._last[p]["text"] if p in self._last else "starting"
        self._tell(f"process {p} failed in: {where}. {failure}", LOST, _GRACE)

    # -- Agreement to stop, in process 0

    def _agree_to_stop(self) -> None:
        """Proposes a step if a process wants to stop."""
        wanted = any(last.get("wants stop") for last in self._last.values())
        if wanted and self.stop.at is None and self._proposal is None:
            self._propose(1)

    def _propose(self, margin: int) -> None:
        """Proposes a step, so far beyond the last one that any process has asked for."""
        asked = [
            a for last in self._last.values() if (a := last.get("asked")) is not None
        ]
        self._margin, self._proposal = margin, max(asked, default=-margin) + margin
        self._replies = {0: self.stop.propose(self._proposal)}
        for line in self._lines.values():
            line.send({"propose": self._proposal})
        self._last[0]["asked"] = self.stop.asked
        self._count_replies()

    def _count_replies(self) -> None:
        """Decides for the proposed step, or proposes a later one, once all have answered."""
        if len(self._replies) <= len(self._lines):
            return
        if not all(self._replies.values()):
            self._propose(2 * self._margin)
            return
        step = self._proposal
        assert step is not None
        self.stop.decide(step)
        for line in self._lines.values():
            line.send({"stop at": step})

    # -- The end

    def _tell(self, reason: str, code: int, grace: float = 0.0) -> None:
        """Ends all processes from process 0, or this one if process 0 is the cause."""
        if self.process == 0:
            self._send_all({"end": reason, "code": code, "grace": grace})
        self._end(reason, code, grace)

    def _send_all(self, value: dict) -> None:
        """Sends a last word to all, and waits a little until they have read it and close.

        JAX in the others ends them at once, without a message, when process 0 is gone.
        """
        for line in self._lines.values():
            line.send(value)
        until = time.monotonic() + _GRACE + 1.0
        while time.monotonic() < until:
            for line in self._lines.values():
                line.receive()
            if all(line.closed for line in self._lines.values()):
                break
            time.sleep(0.01)

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


def stuck_processes(last: dict[int, dict]) -> list[int]:
    """The processes that have made no progress within their limits.

    A process that may be waiting for others makes progress when one of them does, or is in a long phase. Once
    one has ended well, the others may take their time outside of the library.

    Args:
      last: process -> its last line.
    """
    at_work = [line for line in last.values() if not line["left"]]
    ages = [line["age"] for line in last.values()]
    if any(line["long"] and line["age"] <= line["limit"] for line in at_work):
        ages.append(0.0)
    stuck = []
    for p, line in last.items():
        age, limit = line["age"], line["limit"]
        if line["waits"] and not line["long"]:
            age = min(ages)
        if len(at_work) < len(last) and not line["waits"]:
            limit = max(limit, LONG)
        if age > limit and not line["left"]:
            stuck.append(p)
    return stuck


def culprits(last: dict[int, dict]) -> list[int]:
    """The processes that the others wait for: those that wait for none, or else those that are behind."""
    working = [p for p, line in last.items() if not line["waits"]]
    if working:
        return sorted(working)
    fewest = min(line["steps"] for line in last.values())
    return sorted(p for p, line in last.items() if line["steps"] == fewest)


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(_STDERR, text.encode())


def _exit(code: int) -> None:
    """Ends the process at once, with what it has printed."""

    def flush() -> None:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()

    thread = threading.Thread(
        target=flush, daemon=True
    )  # the main thread may hold a lock
    thread.start()
    thread.join(0.5)
    os._exit(code)


# -- Connections


def listen() -> tuple[socket.socket, dict]:
    """A socket of process 0, and what the others need to connect to it."""
    if socket.has_dualstack_ipv6():
        server = socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True
        )
    else:
        server = socket.create_server(("", 0))
    hosts = [socket.gethostname(), socket.getfqdn()]
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        probe.connect(("192.0.2.1", 9))  # sends nothing, but chooses the interface
        hosts.append(probe.getsockname()[0])
    hosts.append("127.0.0.1")
    address = {
        "hosts": list(dict.fromkeys(hosts)),
        "port": server.getsockname()[1],
        "token": secrets.token_hex(16),
    }
    return server, address


def accept(
    server: socket.socket, address: dict, count: int, seconds: float
) -> dict[int, socket.socket]:
    """The connections of the other processes, by number: `count` of them, or those that came in time."""
    connections: dict[int, socket.socket] = {}
    until = time.monotonic() + seconds
    with server:
        while len(connections) < count and (left := until - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                connection, _ = server.accept()
                connection.settimeout(5.0)
                hello = json.loads(connection.makefile().readline(1000))
                if hello["token"] == address["token"]:
                    connections[int(hello["process"])] = connection
                    connection.sendall(b"{}\n")
            except (OSError, ValueError, KeyError, TypeError):
                continue
    return connections


def connect(address: dict, process: int) -> socket.socket | None:
    """A connection to process 0, or None if there is no way to it."""
    hello = json.dumps({"token": address["token"], "process": process}).encode() + b"\n"
    for host in address["hosts"]:
        try:
            connection = socket.create_connection((host, address["port"]), timeout=5.0)
            connection.sendall(hello)
            if connection.recv(3) == b"{}\n":
                return connection
        except OSError:
            continue
    return None
