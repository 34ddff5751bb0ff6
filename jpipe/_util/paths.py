"""Paths that users name."""

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""The begin of an address, such as "gs://" or, once `pathlib` has read it, "gs:/"; not a drive such as "C:/"."""


@contextlib.contextmanager
def replaced(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the path of a file to write, which takes the place of another once it is whole, or is removed."""
    unfinished = path.with_name(f"{path.name}.saving")
    try:
        yield unfinished
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def local_path(path: str | os.PathLike, name: str) -> pathlib.Path:
    """A path in a file system.

    Args:
      path: the path that a user gave.
      name: the name of the argument, for the error.

    Raises:
      ValueError: if it is an address, such as of object storage.

    Example:
      >>> local_path("gs://bucket/run", "directory")
      Traceback (most recent call last):
      ValueError: `directory` must be in a file system, got the address 'gs://bucket/run'. Mount ...
    """
    text = os.fspath(path)
    if isinstance(text, str) and _ADDRESS.match(text):
        raise ValueError(
            f"`{name}` must be in a file system, got the address {text!r}. Mount the storage as a folder (such as with "
            "gcsfuse or s3fs) and name the folder, or write to a disk and copy the finished files."
        )
    return pathlib.Path(path)
