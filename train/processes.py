"""The scripts in several processes: the first one prints, writes files and decides."""

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import jax

import jpipe


def is_first() -> bool:
    """Returns whether this process writes files and prints."""
    return jax.process_index() == 0


def from_first(function: Callable[[], Any], phase: str, limit_seconds: float) -> Any:
    """Returns on every process the result of a function in process 0. Every process must call it.

    The others do not run the function. If it fails, all processes fail with its message.

    Args:
      function: a function whose result JSON can hold.
      phase: the work of the function, for messages of the watchdog.
      limit_seconds: the most seconds that it takes.

    Raises:
      ValueError: on every process, if the function raises it.
      OSError: likewise; a `ValueError` on the others.
    """
    result, error = None, None
    with jpipe.distributed.phase(phase, limit_seconds):
        if is_first():
            try:
                result = function()
            except (ValueError, OSError) as caught:
                error = caught
        text = None if error is None else str(error)
        result, text = jpipe.distributed.broadcast([result, text])
    if error is not None:
        raise error
    if text is not None:
        raise ValueError(text)
    return result


def leave(code: int) -> NoReturn:
    """Ends the program.

    After a wrong option or file, which may be wrong in this process alone, it does not wait for the other processes,
    but ends them.
    """
    if code == 2 and jax.distributed.is_initialized():
        jpipe.distributed.fail("It was started with a wrong option or file.", code)
    sys.exit(code)
