"""Reads files that a configuration names, packed or not."""

import gzip
import pathlib
import zlib


def read_bytes(path: pathlib.Path) -> bytes:
    """The content of a file; of a .gz file the unpacked content.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if a .gz file cannot be unpacked.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no file or directory `{path}`. Check the path; relative paths start at `{pathlib.Path.cwd()}`."
        )
    content = path.read_bytes()
    if path.suffix != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(
            f"`{path}` cannot be unpacked ({error}): it is damaged or not a .gz file. "
            "Download it again, or pack it with gzip."
        ) from error
