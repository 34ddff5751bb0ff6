"""Checksums of a step: which process computes them, and who learns of what went wrong."""

import threading

import pytest

from jpipe.checkpoints import _arrays
from jpipe.checkpoints._manifest import (
    DamagedCheckpointError,
    Manifest,
    checksums,
    leave_checksums,
    take_checksums,
)

NAMES = [f"arrays/d/{i}" for i in range(5)]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "arrays/d").mkdir(parents=True)
    for i, name in enumerate(NAMES):
        (tmp_path / name).write_bytes(bytes([i] * (i + 1)))
    return tmp_path


@pytest.fixture
def manifest(folder):
    files = checksums(folder, NAMES)
    return Manifest(step=1, layout={}, counters={}, run=None, versions={}, files=files)


def test_each_file_belongs_to_the_process_that_wrote_it():
    names = [
        "arrays/_METADATA",
        "arrays/d/ab",
        "arrays/ocdbt.process_0/d/cd",
        "arrays/ocdbt.process_1/d/ef",
        "arrays/ocdbt.process_12/manifest.ocdbt",
    ]
    found = _arrays.files_by_process(names)
    assert found == {0: names[:3], 1: names[3:4], 12: names[4:]}


def test_processes_leave_their_checksums_for_process_0(folder, manifest):
    later = threading.Timer(0.2, leave_checksums, (folder, 3, manifest.files))
    later.start()
    assert take_checksums(folder, 3, seconds=10) == manifest.files
    assert not list(folder.glob("checksums*"))


def test_process_0_learns_that_another_one_failed(folder):
    leave_checksums(folder, 1, {})
    with pytest.raises(OSError, match="process 1 could not write its part"):
        take_checksums(folder, 1, seconds=10)
    with pytest.raises(TimeoutError, match="process 2 has not written its part"):
        take_checksums(folder, 2, seconds=0.1)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_each_damaged_file_is_seen_by_one_process(folder, manifest, count):
    for name in NAMES:
        path = folder / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + b"\xff")
        seen = []
        for process in range(count):
            try:
                manifest.check_content(folder, (process, count))
            except DamagedCheckpointError as error:
                seen.append(str(error))
        assert seen == [f"`{path}` is damaged"]
        path.write_bytes(whole)
