"""What tests of the training script share: its files, its data, a full disk."""

import contextlib
import json
import pathlib
import resource
import struct
from collections.abc import Iterator

from tensorboardX.proto.event_pb2 import Event


def log_of(run_dir: pathlib.Path) -> list[dict]:
    """The records of the JSON file."""
    return [json.loads(line) for line in (run_dir / "log.jsonl").open()]


def events_of(run_dir: pathlib.Path) -> list[tuple[int, dict[str, float]]]:
    """The event file for TensorBoard: (step, {tag: value}), in order."""
    (path,) = run_dir.glob("events.out.tfevents.*")
    content, events = path.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])  # then a checksum of 4 bytes
        events.append(Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]  # and another one
    assert events.pop(0).file_version == "brain.Event:2"
    return [(e.step, {v.tag: v.simple_value for v in e.summary.value}) for e in events]


@contextlib.contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond this, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_pairs(path: pathlib.Path, count: int) -> pathlib.Path:
    """Writes short sentence pairs, the number of each pair in both sentences."""
    lines = [f"number {i}\tZahl {i}!" for i in range(count)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
