"""Ctrl-C that loses nothing: the first asks a run to end, a second ends it at once.

Standard library only, so that it can be in force before slow imports.
"""

import contextlib
import os
import signal
import sys
from typing import NoReturn


class Interrupt:
    """Takes Ctrl-C while it is entered.

    Python would raise `KeyboardInterrupt` wherever it is, amid a line of the log as well.
    Here the first is only noted, and the run asks for it where it can end; a second ends
    the process.

    Attributes:
      requested: whether there was one.
    """

    def __init__(self, program: str):
        self._program, self.requested = program, False

    def __enter__(self):
        self._before = signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(self, *exc):
        signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        """Raises `KeyboardInterrupt` if there was one."""
        if self.requested:
            raise KeyboardInterrupt

    def _take(self, *_) -> None:
        if self.requested:
            leave(f"{self._program}: stopped at once.")
        self.requested = True
        _say(f"{self._program}: stopping after this step; Ctrl-C again stops at once.")


def leave_on_interrupt(words: str) -> None:
    """From here on, Ctrl-C says `words` and ends the process."""
    signal.signal(signal.SIGINT, lambda *_: leave(words))


def leave(words: str) -> NoReturn:
    """Ends the process with exit code 130, without a traceback from any thread."""
    # Output may be closed, or this may have come amid a write to it.
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        sys.stdout.flush()
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), b"\x1b[?25h")  # a bar had hidden the cursor
    _say(words)
    os._exit(130)


def _say(words: str) -> None:
    # Not `print`, which must not be called again from within itself.
    with contextlib.suppress(OSError):
        os.write(2, f"\n{words}\n".encode())
