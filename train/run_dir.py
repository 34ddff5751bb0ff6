"""The folder of a run, made and tried out before anything is compiled."""

import contextlib
import datetime
import pathlib
import tempfile
from collections.abc import Iterator

import jax

import jpipe

# A full disk still takes an empty file. The log of a short run needs about this.
_TRIAL_BYTES = 2**16


@contextlib.contextmanager
def new_run_dir(
    asked: str | None, name: str, resumed: pathlib.Path | None = None
) -> Iterator[pathlib.Path]:
    """Makes the folder of a run; removes it again if the `with` block raises.

    Args:
      asked: the path of the folder; None: `runs/NAME-TIME`.
      name: the name of the configuration.
      resumed: the folder of a run that goes on, which is used as it is.

    Yields:
      The path of the folder, which is empty and can be written.

    Raises:
      ValueError: if the folder has files already.
      OSError: if the folder cannot be made or written.
    """
    path = _new_path(name) if asked is None else pathlib.Path(asked)
    if resumed is not None:
        path = resumed
    elif path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(
            f"`run_dir` must be new or empty, got `{path}`, which has files already. "
            "Name another folder, or remove this one."
        )
    made = [each for each in (path, *path.parents) if not each.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path, buffering=0) as trial:
            written = trial.write(bytes(_TRIAL_BYTES))
        if written < _TRIAL_BYTES:
            raise OSError(f"only {written} bytes are left on its disk")
        yield path
    except BaseException as error:
        for each in made:
            with contextlib.suppress(OSError):
                each.rmdir()
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            raise OSError(
                f"cannot write to the run folder `{path}`: {reason}. Name another as "
                "`--config.run_dir=FOLDER`, or free space."
            ) from error
        raise


@contextlib.contextmanager
def shared_run_dir(
    asked: str | None, name: str, resumed: pathlib.Path | None = None
) -> Iterator[pathlib.Path]:
    """The folder of a run of several processes: process 0 makes it, all get its path.

    See `new_run_dir`.
    """
    if jax.process_index() != 0:
        yield pathlib.Path(jpipe.distributed.broadcast(None))
        return
    with new_run_dir(asked, name, resumed) as path:
        jpipe.distributed.broadcast(str(path))
        yield path


def _new_path(name: str) -> pathlib.Path:
    """A path in `runs/` that does not exist."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    path = pathlib.Path("runs") / f"{name}-{now}"
    number = 1
    while path.exists():  # two runs started in the same second
        number += 1
        path = path.with_name(f"{name}-{now}-{number}")
    return path
