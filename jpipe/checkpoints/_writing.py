"""The folders of steps: written beside the steps before, named once they are whole, deleted when they are too old."""

import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
import threading
from collections.abc import Sequence

import jax

from jpipe._processes import restarts as _restarts
from jpipe._util.warn import warn
from jpipe.checkpoints import _arrays
from jpipe.checkpoints._manifest import Manifest, checksums, files_of, leave_checksums, take_checksums
from jpipe.checkpoints._quiet import reason, without_tracebacks_of_threads

_SAVING, _DELETING = ".saving", ".deleting"


def folder_of(directory: pathlib.Path, step: int) -> pathlib.Path:
    """The folder of a step."""
    return directory / f"{step:08d}"


def steps_in(directory: pathlib.Path) -> list[int]:
    """The steps that a directory has, damaged or not, in order."""
    names = os.listdir(directory) if directory.is_dir() else []
    return sorted(int(name) for name in names if re.fullmatch(r"\d{8,}", name))


class Writing:
    """A save that goes on in threads.

    Args:
      directory: the directory of the checkpoints.
      manifest: the manifest without the files.
      arrays: name -> array.
      keep: see `Checkpoints`.
      damaged: folders of damaged steps, which are deleted once this one is whole.
      memory: the folder that then gets a copy of the step; None: there is none.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        manifest: Manifest,
        arrays: dict[str, jax.Array],
        keep: int | None,
        damaged: Sequence[pathlib.Path],
        *,
        memory: pathlib.Path | None,
    ):
        self._directory, self._manifest, self._keep = directory, manifest, keep
        self._damaged, self._memory = damaged, memory
        self._folder = folder_of(directory, manifest.step)
        self._unfinished = self._folder.with_suffix(_SAVING)
        self._error: BaseException | None = None
        self._leads = jax.process_index() == 0
        if self._leads:
            directory.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(directory)
        with contextlib.ExitStack() as stack:
            stack.enter_context(without_tracebacks_of_threads())
            self._checkpointer = _arrays.save(self._unfinished, arrays)
            self._quiet = stack.pop_all()
        self._thread = threading.Thread(target=self._finish, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise OSError(
                f"cannot save step {self._manifest.step} to `{self._directory}`: {reason(self._error)}"
            ) from self._error

    def _finish(self) -> None:
        try:
            with self._quiet:
                try:
                    self._checkpointer.wait_until_finished()
                finally:
                    self._checkpointer.close()
            files = self._checksums()
            if self._leads:
                dataclasses.replace(self._manifest, files=files).write(self._unfinished)
                _sync(*self._unfinished.rglob("*"), self._unfinished)
                replaced = [self._folder] if self._folder.exists() else []
                unnamed = _unname([*replaced, *self._damaged])
                self._unfinished.rename(self._folder)
                # After a power cut the name is there, or the steps before still are.
                _sync(self._directory)
                _restarts.tell(_restarts.SAVED, str(self._manifest.step))
                unnamed += _unname(self._too_old())
                for folder in unnamed:
                    shutil.rmtree(folder)
                if self._memory is not None:
                    _copy_to_memory(self._folder, self._memory)
        except BaseException as error:
            self._error = error
            if self._leads:  # it takes space, and may be why the disk is full
                shutil.rmtree(self._unfinished, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    leave_checksums(self._unfinished, jax.process_index(), {})

    def _checksums(self) -> dict[str, list[int]]:
        """The checksums of all files, in process 0. The others leave theirs for it."""
        process, names = jax.process_index(), files_of(self._unfinished)
        names_by_process = _arrays.files_by_process(names)
        sums = checksums(self._unfinished, names_by_process.pop(process))
        if not self._leads:
            leave_checksums(self._unfinished, process, sums)
            return sums
        for other in names_by_process:
            wait = _arrays.TIMEOUT_SECONDS
            sums |= take_checksums(self._unfinished, other, wait)
        return sums

    def _too_old(self) -> list[pathlib.Path]:
        steps = steps_in(self._directory)
        old = steps[: -self._keep] if self._keep else []
        return [folder_of(self._directory, step) for step in old]


def _sync(*paths: pathlib.Path) -> None:
    """Waits until files are on the disk; of folders, the names in them."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _copy_to_memory(step: pathlib.Path, memory: pathlib.Path) -> None:
    """Copies the folder of a step that is whole, in place of the step before. A copy that fails is a warning."""
    unfinished = memory / f"{step.name}{_SAVING}"
    try:
        memory.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(memory)
        shutil.copytree(step, unfinished)
        copy, before = memory / step.name, [folder_of(memory, n) for n in steps_in(memory)]
        unnamed = _unname([copy] if copy in before else [])
        unfinished.rename(copy)  # from here on there is a newer one than those before
        unnamed += _unname([folder for folder in before if folder != copy])
        for folder in unnamed:
            shutil.rmtree(folder)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        warn(f"step {int(step.name)} is not kept in memory: {reason(error)}. It is whole in `{step}`.")


def _unname(steps: Sequence[pathlib.Path]) -> list[pathlib.Path]:
    """Removes the names of steps that are about to be deleted, so that no step is listed without its files."""
    unnamed = []
    for folder in steps:
        shutil.rmtree(folder.with_suffix(_DELETING), ignore_errors=True)
        unnamed.append(folder.rename(folder.with_suffix(_DELETING)))
    return unnamed


def _remove_leftovers(directory: pathlib.Path) -> None:
    """Removes the files of saves and deletions that were cut off."""
    for path in directory.iterdir():
        if path.suffix in (_SAVING, _DELETING) and path.stem.isdecimal():
            shutil.rmtree(path, ignore_errors=True)
