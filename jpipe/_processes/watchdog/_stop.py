"""The agreement of all processes on the step to stop at.

Process 0 proposes a step that none should have reached yet. A process that has not accepts, and does not
pass it until it is decided. Once all have accepted, it is.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any


class Stop:
    """The step to stop at, as one process knows it.

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
        """Notes that the vote is decided."""
        with self._changed:
            self.at = step
            self._changed.notify_all()

    def reached(self, step: int) -> bool:
        """Returns whether to stop at a step. Waits while that is open."""
        with self._changed:
            while self.at is None and self._proposed is not None and step >= self._proposed:
                self._changed.wait(1.0)
            if self.at is not None and step >= self.at:
                return True
            self.asked = step
            return False


class Vote:
    """Proposes steps, in process 0, until all processes accept one.

    Args:
      stop: the `Stop` of process 0.
      send: sends a value to all other processes.
      num_processes: the number of processes that have to accept.
    """

    def __init__(self, stop: Stop, send: Callable[[dict[str, Any]], None], num_processes: int):
        self._stop, self._send, self._num_processes = stop, send, num_processes
        self._replies: dict[int, bool] = {}
        self._asked: dict[int, int] = {}  # process -> the last step that it asked for
        self._proposal: int | None = None
        self._margin = 1

    def consider(self, last: Mapping[int, Mapping[str, Any]]) -> None:
        """Proposes a step if the last line of a process says that it wants to stop."""
        if self._proposal is not None or self._stop.at is not None:
            return
        if any(line.get("wants stop") for line in last.values()):
            self._asked = {p: line["asked"] for p, line in last.items() if line.get("asked") is not None}
            self._propose(1)

    def reply(self, process: int, value: Mapping[str, Any]) -> None:
        """Notes the answer of a process to a proposal."""
        if value["step"] != self._proposal:
            return
        self._replies[process] = value["accepted"]
        if value["asked"] is not None:
            self._asked[process] = value["asked"]
        self._count()

    def _propose(self, margin: int) -> None:
        """Proposes a step, so far beyond the last one that any process has asked for."""
        if self._stop.asked is not None:
            self._asked[0] = self._stop.asked
        step = max(self._asked.values(), default=-margin) + margin
        self._margin, self._proposal = margin, step
        self._replies = {0: self._stop.propose(step)}
        self._send({"propose": step})
        self._count()

    def _count(self) -> None:
        """Decides for the proposed step, or proposes a later one, once all have answered."""
        if len(self._replies) < self._num_processes:
            return
        if not all(self._replies.values()):
            self._propose(2 * self._margin)
            return
        assert self._proposal is not None
        self._stop.decide(self._proposal)
        self._send({"stop at": self._proposal})
