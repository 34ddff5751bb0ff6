"""The manifest of a checkpoint: a file with the content of the other files, and their checksums.

A step is a folder. `manifest.json` is written last, and then the folder gets its name, so a step that has
its name is whole. Orbax does not notice most flipped bits in the numbers of an array. The manifest
therefore has the size and the CRC-32 of every file, and a CRC-32 of its own content.

Each process computes the checksums of the files that it has written, and leaves them in a file for process
0, which writes the manifest. The files of a step that is restored are shared among the processes.
"""

import concurrent.futures
import dataclasses
import json
import pathlib
import time
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

FORMAT = 1
"""Raised when an older version of the library could not read what a newer one writes."""

NAME = "manifest.json"
_BLOCK = 1 << 22


class DamagedCheckpointError(ValueError):
    """A file of a checkpoint is missing or differs from the file that was written."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint.

    Attributes:
      step: the number of the step.
      layout: the layout of the state in the arrays, see `jpipe.checkpoints._layout`.
      counters: "round" and "started" of the state, "key", the data of the random key of training, and
        "key_impl", its implementation.
      run: the value that the caller kept beside the state.
      versions: the versions of jpipe, JAX and Orbax.
      files: path inside the folder -> size in bytes and CRC-32.
    """

    step: int
    layout: dict[str, Any]
    counters: dict[str, Any]
    run: Any
    versions: dict[str, str]
    files: dict[str, list[int]]

    def write(self, folder: pathlib.Path) -> None:
        """Writes the manifest into a folder."""
        content = json.dumps({"format": FORMAT, **dataclasses.asdict(self)})
        text = json.dumps({"crc32": zlib.crc32(content.encode()), "content": content})
        with open(folder / NAME, "x", encoding="utf-8") as file:
            file.write(text)

    @classmethod
    def read(cls, folder: pathlib.Path) -> "Manifest":
        """Reads the manifest of a folder.

        Raises:
          DamagedCheckpointError: if it is missing or damaged.
          ValueError: if a newer version of the library wrote it.
        """
        path = folder / NAME
        try:
            outer = json.loads(path.read_bytes())
            content = outer["content"]
            if set(outer) != {"crc32", "content"} or (zlib.crc32(content.encode()) != outer["crc32"]):
                raise ValueError("its checksum is wrong")
            values = json.loads(content)
        except OSError as error:
            raise DamagedCheckpointError(f"`{path}`: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpointError(f"`{path}` is damaged: {error}") from error
        if values.pop("format") > FORMAT:
            version = values["versions"].get("jpipe")
            raise ValueError(
                f"`{path}` has a newer format than this version of jpipe reads. jpipe {version} wrote "
                "it: install that version or a later one."
            )
        return cls(**values)

    def check_sizes(self, folder: pathlib.Path) -> None:
        """Raises `DamagedCheckpointError` if a file is missing or has another size."""
        for name, (size, _) in self.files.items():
            path = folder / name
            try:
                got = path.stat().st_size
            except OSError as error:
                raise DamagedCheckpointError(f"`{path}`: {error.strerror}") from error
            if got != size:
                raise DamagedCheckpointError(f"`{path}` has {got:,} bytes, and {size:,} were written")

    def check_content(self, folder: pathlib.Path, share: tuple[int, int]) -> None:
        """Raises `DamagedCheckpointError` if a file differs from the file that was written.

        Args:
          folder: the folder of the step.
          share: (i, n): reads only every n-th file from the i-th on. The sizes of all are checked.
        """
        self.check_sizes(folder)
        i, n = share
        names = list(self.files)[i::n]
        for name, got in checksums(folder, names).items():
            if got != self.files[name]:
                raise DamagedCheckpointError(f"`{folder / name}` is damaged")


def files_of(folder: pathlib.Path) -> list[str]:
    """The files in the folders of a folder, by their path inside of it.

    The files in the folder itself are the manifest, and the checksums that processes leave.
    """
    paths = (path for path in sorted(folder.glob("*/**/*")) if path.is_file())
    return [path.relative_to(folder).as_posix() for path in paths]


def checksums(folder: pathlib.Path, names: Iterable[str]) -> dict[str, list[int]]:
    """Name -> size and CRC-32 of files in a folder.

    Raises:
      DamagedCheckpointError: if a file cannot be read.
    """

    def checksum(name: str) -> list[int]:
        size = crc = 0
        try:
            with open(folder / name, "rb") as file:
                while block := file.read(_BLOCK):
                    size, crc = size + len(block), zlib.crc32(block, crc)
        except OSError as error:
            path = folder / name
            raise DamagedCheckpointError(f"`{path}`: {error.strerror}") from error
        return [size, crc]

    names = list(names)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return dict(zip(names, pool.map(checksum, names)))


def leave_checksums(folder: pathlib.Path, process: int, sums: Mapping) -> None:
    """Leaves the checksums of the files of a process for process 0; an empty mapping says that it failed."""
    draft = folder / f"{_sums_name(process)}.draft"
    draft.write_text(json.dumps(sums))
    draft.rename(folder / _sums_name(process))


def take_checksums(folder: pathlib.Path, process: int, seconds: float) -> dict[str, list[int]]:
    """Waits for the checksums that a process leaves, and removes their file.

    Raises:
      OSError: if the process failed, or leaves nothing in time.
    """
    path = folder / _sums_name(process)
    until = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"process {process} has not written its part in {seconds:.0f} s")
        time.sleep(0.02)
    sums = json.loads(path.read_text())
    path.unlink()
    if not sums:
        raise OSError(f"process {process} could not write its part")
    return sums


def _sums_name(process: int) -> str:
    return f"checksums.{process}.json"
