"""An event file for TensorBoard: `tensorboard --logdir runs`."""

import contextlib
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any


class EventFile:
    """Writes records of the log as scalars of TensorBoard.

    Args:
      directory: the folder of the file. TensorBoard finds the file by its name.
      first_step: the first step that the file has. TensorBoard hides what other files of
        the folder have from this step on.

    Raises:
      OSError: if the file cannot be made.
    """

    def __init__(self, directory: pathlib.Path, first_step: int = 1):
        # Imported here: a log without TensorBoard does without the package.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        # Not `SummaryWriter`: it writes in a thread, and a run that dies would lose the
        # records that the thread has not written.
        goes_on = first_step > 1 or any(directory.glob("events.out.tfevents.*"))
        self._writer = EventsWriter(str(directory / "events"))
        if goes_on:
            start = SessionLog(status=SessionLog.START)
            event = Event(wall_time=time.time(), step=first_step, session_log=start)
            self._writer.write_event(event)
        self._writer.flush()

    def write(self, record: dict) -> None:
        """Appends a record that has its step under "step", and flushes the file.

        Raises:
          OSError: if the file cannot be written.
        """
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(record)]
        summary = Summary(value=values)
        self._writer.write_event(Event(wall_time=time.time(), step=record["step"], summary=summary))
        self._writer.flush()

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._writer is not None:
            # Every record is on disk, or its `write` has raised the error already.
            with contextlib.suppress(OSError):
                self._writer.close()
        self._writer = None


def scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields the name and value of each number in a record but its step, also of nested dicts.

    Lists, such as the values of every step, are left out.

    Example:
      >>> list(scalars({"step": 3, "loss": 0.5, "error": "none", "memory_bytes": {"weights": 8}}))
      [('loss', 0.5), ('memory_bytes/weights', 8)]
    """
    for name, value in record.items():
        if isinstance(value, dict):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            yield f"{prefix}{name}", value
