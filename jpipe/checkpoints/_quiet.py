"""A save that fails says so once, by its exception.

Orbax also logs the exception of each of its threads with a traceback, and TensorStore prints one for each write that
ends after
the first has failed: more than 200 lines for a disk that is full. What others log and print stays.
"""

import contextlib
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

_lock = threading.Lock()
_LATE_SECONDS = 10.0
"""Time in which threads of a failed save may still end."""

_num_saves = 0
_ended = -_LATE_SECONDS  # the last save, by `time.monotonic`
_hook: Callable[[Any], object] = sys.unraisablehook


@contextlib.contextmanager
def without_tracebacks_of_threads() -> Iterator[None]:
    """A context around a save whose exception is raised by the caller. Several threads may be in it."""
    global _num_saves, _ended, _hook
    with _lock:
        _num_saves += 1
        if sys.unraisablehook is not _unraisable:
            _hook, sys.unraisablehook = sys.unraisablehook, _unraisable
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_news)  # a second time does nothing
    try:
        yield
    finally:
        with _lock:
            _num_saves -= 1
            _ended = time.monotonic()


def reason(error: BaseException) -> str:
    """The reason why a save failed, in one line: the words of the operating system, if TensorStore passes them on."""
    text = " ".join(str(error).split()) or type(error).__name__
    number = re.search(r"os_error_code='(\d+)'", text)
    return os.strerror(int(number[1])) if number else text


def _is_news(record: logging.LogRecord) -> bool:
    """Returns whether a record is not the report of an exception of Orbax about a save."""
    if not _num_saves and time.monotonic() > _ended + _LATE_SECONDS:
        return True
    trace = record.exc_info[2] if record.exc_info else None
    frames = traceback.walk_tb(trace)
    return not any("orbax" in frame.f_code.co_filename for frame, _ in frames)


def _unraisable(args: Any) -> None:
    """`sys.unraisablehook`, also after a save: writes of TensorStore that end late find the event loop of Orbax closed.

    They call the loop from C++, so its function is the outermost one.
    """
    trace = args.exc_traceback
    caller = trace and trace.tb_frame.f_code.co_name
    if args.exc_type is not RuntimeError or caller != "call_soon_threadsafe":
        _hook(args)
