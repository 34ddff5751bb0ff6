"""An event file for TensorBoard: `tensorboard --logdir runs`."""

import pathlib
import time
from collections.abc import Iterator

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary


class EventFile:
    """Takes records of the log; each of their numbers becomes a scalar.

    Args:
      directory: where the file is made, under a name that TensorBoard looks for.
    """

    def __init__(self, directory: pathlib.Path):
        # Not `SummaryWriter`: what its thread has yet to write is lost if a run dies.
        self._writer = EventsWriter(str(directory / "events"))
        self._writer.flush()

    def write(self, record: dict) -> None:
        """Appends a record that has its step under "step"; it is on disk at once."""
        values = [
            Summary.Value(tag=tag, simple_value=value)
            for tag, value in scalars(record)
            if tag != "step"
        ]
        summary = Summary(value=values)
        self._writer.write_event(
            Event(wall_time=time.time(), step=record["step"], summary=summary)
        )
        self._writer.flush()

    def close(self) -> None:
        """Ends the file; a second time it does nothing."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None


def scalars(record: dict, prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a record and of the dicts in it, by name.

    Example:
      >>> list(scalars({"loss": 0.5, "error": "none", "memory_bytes": {"weights": 8}}))
      [('loss', 0.5), ('memory_bytes/weights', 8)]
    """
    for name, value in record.items():
        if isinstance(value, dict):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", value
