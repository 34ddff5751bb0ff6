"""Text as bytes: each byte is a token, predicted from the bytes before it."""

import dataclasses
import pathlib

import numpy as np

from train.data import Batch, Dataset
from train.files import read_bytes


@dataclasses.dataclass(frozen=True)
class Text:
    """Bytes of a text, cut into windows."""

    path: str | None = None
    """A .txt or .txt.gz file, or a directory of such files, read in the order of their
    names. None: the language reference that ships with Python (`pydoc_data.topics`)."""
    test_path: str | None = None
    """The held-out text. None: the last `test_fraction` of `path`."""
    test_fraction: float = 0.1
    """Fraction of the text that is held out when `test_path` is None."""
    seq_len: int = 128
    """Number of bytes T that the model reads at once."""

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise ValueError(f"`seq_len` must be at least 1, got {self.seq_len}.")
        if not 0 < self.test_fraction < 1:
            raise ValueError(
                f"`test_fraction` must lie between 0 and 1, got {self.test_fraction}."
            )

    def load(self) -> Dataset:
        """Reads the text and splits off the held-out part.

        Raises:
          FileNotFoundError: if the file does not exist, or a directory has no text.
          ValueError: if a file is damaged, or the text is shorter than one window.
        """
        if self.path is None:
            text, source = _python_reference(), "the Python language reference"
        else:
            text, source = _read(pathlib.Path(self.path)), f"`{self.path}`"
        if self.test_path is None:
            start = len(text) - int(len(text) * self.test_fraction)
            train, test = text[:start], text[start:]
        else:
            train, test = text, _read(pathlib.Path(self.test_path))
            source += f" and `{self.test_path}`"
        for name, part in (("training", train), ("held-out", test)):
            if len(part) <= self.seq_len:
                raise ValueError(
                    f"the {name} text must have more than `seq_len` = {self.seq_len} "
                    f"bytes, got {len(part)} from {source}. Use a longer text, another "
                    "`test_fraction` or a smaller `seq_len`."
                )
        return Dataset(
            train=Windows(train, self.seq_len),
            test=Windows(test, self.seq_len),
            source=f"text, {len(train):,} training and {len(test):,} held-out bytes "
            f"({source})",
            unit="tokens",
            bytes_per_label=1.0,
        )


class Windows:
    """A text in consecutive windows of T bytes; batches hold int32 `[B, T]`.

    The label of a byte is the byte after it. In training, a window starts at a random
    byte of its T bytes, so that the model sees every byte at all positions.
    """

    def __init__(self, text: bytes, seq_len: int):
        self.text, self.seq_len = np.frombuffer(text, np.uint8), seq_len

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.seq_len

    def batch(self, indices: np.ndarray, rng: np.random.Generator | None) -> Batch:
        starts = indices * self.seq_len
        if rng is not None:
            last = len(self.text) - 1 - self.seq_len
            moves = rng.integers(self.seq_len, size=len(starts))
            starts = np.minimum(starts + moves, last)
        windows = self.text[starts[:, None] + np.arange(self.seq_len + 1)[None]]
        windows = windows.astype(np.int32)
        return {"inputs": windows[:, :-1], "labels": windows[:, 1:]}


def _read(path: pathlib.Path) -> bytes:
    if path.is_dir():
        paths = sorted([*path.glob("*.txt"), *path.glob("*.txt.gz")])
        if not paths:
            raise FileNotFoundError(
                f"no text in the directory `{path}`: it has no .txt or .txt.gz file. "
                "Name another directory, or a file."
            )
        return b"\n".join(_read(path) for path in paths)
    return read_bytes(path)


def _python_reference() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise FileNotFoundError(
            "this Python comes without its language reference (`pydoc_data.topics`). "
            "Name a text file as `data.path`."
        ) from error
    return "\n".join(topics[name] for name in sorted(topics)).encode()
