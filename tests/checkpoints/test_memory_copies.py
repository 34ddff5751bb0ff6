"""`Checkpoints(memory=True)`: the newest step in memory that outlives the processes, and its loss."""

import os
import pathlib
import shutil
import tempfile

import jax
import numpy as np
import pytest
from layouts import batches, pipeline, trained

import jpipe
from jpipe import schedules
from jpipe._processes import restarts as _restarts
from train.config import CheckpointConfig


@pytest.fixture(scope="module")
def small():
    pipe, data = pipeline(schedules.gpipe(2, 2)), batches(2)
    return pipe, data[0], trained(pipe, pipe.init(jax.random.key(0), data[0]), data[:1])[0]


@pytest.fixture
def launched(monkeypatch):
    """The folder of a launcher that starts this process again."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no folder in memory")
    folder = pathlib.Path(tempfile.mkdtemp(dir="/dev/shm"))
    monkeypatch.setenv(_restarts.FOLDER, str(folder))
    yield folder
    shutil.rmtree(folder)


def saved(small, directory, steps):
    pipe, _, state = small
    with jpipe.Checkpoints(directory, memory=True) as checkpoints:
        for step in steps:
            checkpoints.save(step, state, run=step)
    return pipe


def check(restored, small, step):
    """Between two steps of a synchronous schedule nothing is in flight, and rings are not saved."""
    assert (restored.step, restored.run) == (step, step)
    jax.tree.map(np.testing.assert_array_equal, restored.state.kept(), small[2].kept())


def copies(launched):
    (memory,) = (path for path in launched.iterdir() if path.is_dir())
    return sorted(memory.iterdir())


def test_a_restart_reads_nothing_in_the_directory(small, tmp_path, launched):
    saved(small, tmp_path / "a", [1, 2])
    assert [path.name for path in copies(launched)] == ["00000002"]  # the newest alone
    shutil.rmtree(tmp_path / "a")
    checkpoints = jpipe.Checkpoints(tmp_path / "a", memory=True)
    assert checkpoints.steps() == [2]
    check(checkpoints.restore(small[0], small[1]), small, 2)
    assert _restarts.Told.take(launched) == _restarts.Told(frozenset(), True, 2)
    # And no other object takes it.
    assert jpipe.Checkpoints(tmp_path / "b", memory=True).steps() == []
    assert jpipe.Checkpoints(tmp_path / "a").steps() == []


def test_without_the_memory_it_reads_the_directory(small, tmp_path, launched):
    saved(small, tmp_path, [1, 2])
    for path in copies(launched):
        shutil.rmtree(path)
    check(jpipe.Checkpoints(tmp_path, memory=True).restore(small[0], small[1]), small, 2)


def test_a_damaged_copy_is_not_taken(small, tmp_path, launched):
    saved(small, tmp_path, [1, 2])
    (copy,) = copies(launched)
    largest = max((path for path in copy.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    checkpoints = jpipe.Checkpoints(tmp_path, memory=True)
    with pytest.warns(UserWarning, match="step 2 cannot be restored: .* Trying the directory"):
        check(checkpoints.restore(small[0], small[1]), small, 2)
    assert checkpoints.steps() == [1, 2]


def test_memory_that_is_full_is_a_warning(small, tmp_path, launched, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.warns(UserWarning, match="step 1 is not kept in memory: .*No space left.* It is whole in"):
        saved(small, tmp_path, [1])
    assert copies(launched) == []
    check(jpipe.Checkpoints(tmp_path, memory=True).restore(small[0], small[1]), small, 1)


def test_without_a_launcher_nothing_is_kept(small, tmp_path, monkeypatch):
    monkeypatch.delenv(_restarts.FOLDER, raising=False)
    with pytest.warns(UserWarning, match="`memory=True` keeps nothing: .*python -m jpipe.launch --restarts"):
        saved(small, tmp_path, [1])
    monkeypatch.setenv(_restarts.FOLDER, str(tmp_path))  # on a disk
    with pytest.warns(UserWarning, match="`memory=True` keeps nothing"):
        assert jpipe.Checkpoints(tmp_path, memory=True).steps() == [1]


def test_wrong_words(tmp_path):
    with pytest.raises(ValueError, match="`memory` must be True or False, got 'yes'"):
        jpipe.Checkpoints(tmp_path, memory="yes")
    with pytest.raises(ValueError, match="`checkpoint.memory` keeps the newest checkpoint.*`--config.checkpoint.every"):
        CheckpointConfig(memory=True)
