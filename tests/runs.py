"""Reads back what a run of the training script has written."""

import json
import pathlib
import struct

from tensorboardX.proto.event_pb2 import Event


def log_of(run_dir: pathlib.Path) -> list[dict]:
    """The records of the JSON file."""
    return [json.loads(line) for line in (run_dir / "log.jsonl").open()]


def events_of(run_dir: pathlib.Path) -> list[tuple[int, dict[str, float]]]:
    """The event file for TensorBoard: (step, {tag: value}), in order."""
    (path,) = run_dir.glob("events.out.tfevents.*")
    content, found = path.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])  # then a checksum of 4 bytes
        found.append(Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]  # and another one
    assert found.pop(0).file_version == "brain.Event:2"
    return [(e.step, {v.tag: v.simple_value for v in e.summary.value}) for e in found]
