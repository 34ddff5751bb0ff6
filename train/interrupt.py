"""Ends a run on Ctrl-C or SIGTERM and keeps its work.

The first signal asks the run to end after its current step. A second one ends the
process at once. The exit code is 128 plus the number of the signal: 130 after Ctrl-C
(SIGINT), 143 after SIGTERM, which `kill` and cluster schedulers send.

Standard library only, so that the handlers can be installed before slow imports.
"""

import contextlib
import os
import signal
import sys
from types import FrameType, TracebackType
from typing import NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Handles Ctrl-C and SIGTERM inside a `with` block.

    By default Python raises `KeyboardInterrupt` wherever the program is, for example
    halfway through a line of the log, and SIGTERM kills the process. Here the first
    signal is only recorded, and the run asks for it where it can end. A second signal
    ends the process.

    Args:
      program: the name that messages begin with.

    Attributes:
      signal: the signal that came first; None if there was none.
    """

    def __init__(self, program: str):
        self._program = program
        self.signal: signal.Signals | None = None

    def __enter__(self) -> "Interrupt":
        self._previous = {number: signal.signal(number, self._take) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def requested(self) -> bool:
        """True if a signal has asked the run to end."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """128 plus the number of the signal; 0 without one."""
        return 0 if self.signal is None else 128 + self.signal

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            leave(f"{self._program}: stopped at once.", 128 + number)
        self.signal = signal.Signals(number)
        again = "Ctrl-C again" if number == signal.SIGINT else "a second signal"
        cause = "" if number == signal.SIGINT else f"{self.signal.name}: "
        _say(f"{self._program}: {cause}stopping after this step; {again} stops at once.")


def leave_on_interrupt(message: str) -> None:
    """Makes Ctrl-C and SIGTERM print `message` and end the process from now on."""
    for number in _SIGNALS:
        signal.signal(number, lambda number, frame: leave(message, 128 + number))


def ignore_interrupts() -> None:
    """Makes Ctrl-C and SIGTERM do nothing from now on: the process is about to end."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def leave(message: str, code: int) -> NoReturn:
    """Ends the process with exit code `code`, without a traceback from any thread."""
    # Standard output may be closed, or the signal may have interrupted a write to it.
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        sys.stdout.flush()
        if sys.stdout.isatty():
            show_cursor = b"\x1b[?25h"  # a progress bar may have hidden the cursor
            os.write(sys.stdout.fileno(), show_cursor)
    _say(message)
    os._exit(code)


def _say(message: str) -> None:
    # Not `print`: a handler may run inside a call of `print`, which is not reentrant.
    with contextlib.suppress(OSError):
        os.write(2, f"\n{message}\n".encode())
