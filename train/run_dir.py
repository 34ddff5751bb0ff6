"""The folder of a run, made and tried out before anything is compiled."""

import contextlib
import datetime
import itertools
import os
import pathlib
import socket
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

import jax

import jpipe
from jpipe._util.paths import local_path
from train.resume import CONFIG, Command, check_same_training

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# A full disk still takes an empty file. The log of a short run needs about this.
_TRIAL_BYTES = 2**16


_LOCK = ".lock"


class RunDir(NamedTuple):
    """The folder of a run.

    Attributes:
      path: the folder, which can be written.
      resumes: whether the run goes on from a checkpoint in it.
    """

    path: pathlib.Path
    resumes: bool


@contextlib.contextmanager
def new_run_dir(command: Command, until_end: contextlib.ExitStack) -> Iterator[RunDir]:
    """Makes the folder of a run, or takes that of one that goes on; removes it again if the `with` block raises.

    Args:
      command: names the folder. Without one it is `runs/NAME-TIME`.
      until_end: holds the folder for this run until it ends.

    Yields:
      The folder.

    Raises:
      ValueError: if the folder has other files, or another run is at work in it.
      OSError: if the folder cannot be made or written.
    """
    asked, resumed = command.config.run_dir, command.folder
    path = resumed or (_new_path(command.name) if asked is None else local_path(asked, "run_dir"))
    if not path.is_dir() and path.exists():
        raise ValueError(f"a run folder must be a folder, got the file `{path}`.")
    made = [parent for parent in (path, *path.parents) if not parent.exists()]
    is_unknown = not (path / _LOCK).exists()
    with contextlib.ExitStack() as stack:
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path, buffering=0) as trial:
                written = trial.write(bytes(_TRIAL_BYTES))
            if written < _TRIAL_BYTES:
                raise OSError(f"only {written} bytes are left on its disk")
            stack.enter_context(_locked(path))
            yield RunDir(path, _resumes(command, path))
        except BaseException as error:
            if is_unknown:
                (path / _LOCK).unlink(missing_ok=True)
            for parent in made:
                with contextlib.suppress(OSError):
                    parent.rmdir()
            if isinstance(error, OSError):
                reason = error.strerror or str(error)
                raise OSError(
                    f"cannot write to the run folder `{path}`: {reason}. Name another as "
                    "`--config.run_dir=FOLDER`, or free space."
                ) from error
            raise
        until_end.push(stack.pop_all())


def _resumes(command: Command, path: pathlib.Path) -> bool:
    """Returns whether a run goes on in a folder.

    Raises:
      ValueError: if it can neither go on nor start there.
    """
    names = {entry.name for entry in path.iterdir()} - {_LOCK}
    if command.folder is None:
        if names:
            raise ValueError(
                f"`run_dir` must be new or empty, got `{path}`, which has files already. "
                "Name another folder, or remove this one."
            )
        return False
    if not command.may_start:
        return True
    if not names:
        return False
    if CONFIG not in names:
        raise ValueError(
            f"`{path}` has files and no `{CONFIG}`, so it is not the folder of a run. Name another folder."
        )
    steps = path / "checkpoints"
    if not steps.is_dir() or not any(entry.name.isdecimal() for entry in steps.iterdir()):
        return False  # it ended before its first checkpoint
    check_same_training(command.config, path / CONFIG)
    return True


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    """Holds a folder for this process. The lock of a process that is killed is gone with it.

    Raises:
      ValueError: if another process holds it.
    """
    with open(path / _LOCK, "a+", encoding="utf-8") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"another run is at work in `{path}`: {file.read(200) or 'it does not say which'}. Wait until it has "
                "ended, or end it; two runs in one folder would damage its log and its checkpoints."
            ) from None
        except OSError:
            pass  # a file system without locks
        with contextlib.suppress(OSError):  # a full disk
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        yield


@contextlib.contextmanager
def shared_run_dir(command: Command, until_end: contextlib.ExitStack) -> Iterator[RunDir]:
    """The folder of a run of several processes: process 0 makes it, all learn of it.

    See `new_run_dir`.
    """
    if jax.process_index() != 0:
        path, resumes = jpipe.distributed.broadcast(None)
        yield RunDir(pathlib.Path(path), resumes)
        return
    with new_run_dir(command, until_end) as run_dir:
        jpipe.distributed.broadcast([str(run_dir.path), run_dir.resumes])
        yield run_dir


def write_config(run_dir: pathlib.Path, text: str) -> None:
    """Writes `config.json`. Other options that a resumed run had before stay in `config-1.json` and so on."""
    path = run_dir / CONFIG
    if path.exists() and path.read_text(encoding="utf-8") != text:
        numbers = itertools.count(1)
        names = (run_dir / f"config-{number}.json" for number in numbers)
        path.rename(next(name for name in names if not name.exists()))
    path.write_text(text, encoding="utf-8")


def _new_path(name: str) -> pathlib.Path:
    """A path in `runs/` that does not exist."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    path = pathlib.Path("runs") / f"{name}-{now}"
    number = 1
    while path.exists():  # two runs started in the same second
        number += 1
        path = path.with_name(f"{name}-{now}-{number}")
    return path
