"""The progress that each process reports, and the judgement of process 0 over all reports."""

import collections
import statistics
import time
from typing import Any, NamedTuple

from jpipe._processes.watchdog._calls import Batch, Calls

LONG = 600.0
"""The limit of a phase that may take long, such as a compilation."""


class Beats:
    """The work of this process, noted by the main thread and read by the watchdog's.

    Args:
      limit: seconds without progress, at the least, from the second step on.

    Attributes:
      left: whether the program has ended well.
      calls: the calls that all processes make together.
    """

    def __init__(self, limit: float):
        self._limit = limit
        self.calls = Calls()
        self._num_calls = 0  # that are open: what a call calls itself does not count
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

    def enter_call(self, name: str, batch: Batch | None = None) -> None:
        """Notes the begin of a call that all processes make together. Inside another call it is a part of that."""
        if not self._num_calls:
            self.calls.note(name, self._started, batch)
        self._num_calls += 1

    def leave_call(self) -> None:
        """The innermost call ends."""
        self._num_calls -= 1

    def dispatched(self, output: Any) -> None:
        """Notes that the innermost phase runs on the devices until `output` is ready."""
        name = self.innermost("work")
        self._pending.append(_Pending(name, output, time.monotonic()))

    def innermost(self, otherwise: str) -> str:
        """The name of the innermost phase, or another one if there is none."""
        return self._phases[-1][0] if self._phases else otherwise

    def end(self) -> None:
        """The program has ended well."""
        self.left, self._progress = True, time.monotonic()

    def pause(self, seconds: float) -> None:
        """The process was stopped for so long."""
        self._progress += seconds

    def look(self) -> dict[str, Any]:
        """The work of this process as a line for process 0.

        Returns:
          "text" for messages; "steps" that were called; "age", seconds since the last progress, and its
          "limit"; "long", whether the limit is that of a long phase; "waits", whether it may be
          waiting for other processes; "left"; "calls", see `Calls.look`.
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
            "calls": self.calls.look(),
        }

    def _complete(self, now: float) -> None:
        """Notes the steps that the devices have completed. The steps since the last look share its time."""
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
    """Returns whether the devices have completed an output. The answer is False for an output that was deleted."""
    try:
        return output.is_ready()
    except RuntimeError:
        return True


class _Pending(NamedTuple):
    """Work of the devices: the phase, an array that is ready at the end, and when it began."""

    name: str
    output: Any
    dispatched: float


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
    """The processes that the others wait for: processes that wait for none, or else those that are behind."""
    working = [p for p, line in last.items() if not line["waits"]]
    if working:
        return sorted(working)
    fewest = min(line["steps"] for line in last.values())
    return sorted(p for p, line in last.items() if line["steps"] == fewest)
