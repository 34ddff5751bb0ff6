"""Text as bytes: each byte is a token.

A model predicts each byte from the bytes before it (`Text`), bytes that are masked from the
bytes on both sides (`MaskedText`), or the kind of a text (`LabeledText`).
"""

import dataclasses
import pathlib
import sysconfig
import warnings

import numpy as np

from train.data import Batch, Dataset, check_test_fraction, held_out
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
        check_test_fraction(self.test_fraction)

    def _parts(self) -> tuple[bytes, bytes, str]:
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
            train, test = held_out(text, self.test_fraction)
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
        source = f"{len(train):,} training and {len(test):,} held-out bytes ({source})"
        return train, test, source

    def load(self) -> Dataset:
        """Reads the text. The label of a byte is the next byte.

        Raises:
          FileNotFoundError: if the file does not exist, or a directory has no text.
          ValueError: if a file is damaged, or the text is shorter than one window.
        """
        train, test, source = self._parts()
        return Dataset(
            train=Windows(train, self.seq_len),
            test=Windows(test, self.seq_len),
            source=f"text, {source}",
            unit="tokens",
            bytes_per_label=1.0,
        )


@dataclasses.dataclass(frozen=True)
class MaskedText(Text):
    """Bytes of a text, some of them masked, for models that read in both directions.

    Devlin et al., NAACL 2019, arXiv:1810.04805, section 3.1: of the chosen bytes 80 % are
    replaced by token 256, 10 % by a random byte, and 10 % stay. The model predicts the
    chosen bytes only. Its vocabulary has 257 tokens.
    """

    mask_fraction: float = 0.15
    """Fraction of the bytes that the model has to predict."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.mask_fraction <= 1:
            raise ValueError(f"`mask_fraction` must lie in (0, 1], got {self.mask_fraction}.")

    def load(self) -> Dataset:
        """Reads the text as `Text.load`; labels have weight 1 at the chosen bytes."""
        train, test, source = self._parts()
        return Dataset(
            train=MaskedWindows(train, self.seq_len, self.mask_fraction),
            test=MaskedWindows(test, self.seq_len, self.mask_fraction),
            source=f"masked text, {source}",
            unit="tokens",
        )


@dataclasses.dataclass(frozen=True)
class LabeledText:
    """Windows of texts of several classes; the label of a window is the class of its text."""

    path: str | None = None
    """A directory with a .txt or .txt.gz file for each class, or a directory of such files; the
    classes are in the order of their names. None: the source code of eight packages of
    Python's standard library."""
    test_fraction: float = 0.1
    """Fraction at the end of each text that is held out."""
    seq_len: int = 128
    """Number of bytes T of a window."""

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise ValueError(f"`seq_len` must be at least 1, got {self.seq_len}.")
        check_test_fraction(self.test_fraction)

    def load(self) -> Dataset:
        """Reads the texts. Labels are int32 `[B]`.

        Raises:
          FileNotFoundError: if the directory or a file does not exist.
          ValueError: if a file is damaged, there are fewer than two classes, or a text is too
            short.
        """
        texts = _packages() if self.path is None else _classes(pathlib.Path(self.path))
        place = "Python's standard library" if self.path is None else f"`{self.path}`"
        if len(texts) < 2:
            raise ValueError(
                f"`data.path` must hold a text for each of at least 2 classes, got "
                f"{len(texts)} in {place}. Add a .txt file for each class."
            )
        train, test = [], []
        for name, text in texts.items():
            for windows, part in zip((train, test), held_out(text, self.test_fraction)):
                if len(part) <= self.seq_len:
                    raise ValueError(
                        f"both parts of each text must have more than `seq_len` = "
                        f"{self.seq_len} bytes, got {len(part)} of {name!r} in {place}. Use "
                        "longer texts, another `test_fraction` or a smaller `seq_len`."
                    )
                windows.append(Windows(part, self.seq_len))
        return Dataset(
            train=LabeledWindows(train),
            test=LabeledWindows(test),
            source=f"{len(texts)} kinds of text, {sum(map(len, train)):,} training and "
            f"{sum(map(len, test)):,} held-out windows ({place}: {', '.join(texts)})",
            unit="texts",
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


class MaskedWindows(Windows):
    """Windows of a text for `MaskedText`.

    Training windows are masked anew each time. A held-out window always has the same
    mask, drawn from its number.
    """

    MASK = 256

    def __init__(self, text: bytes, seq_len: int, mask_fraction: float):
        super().__init__(text, seq_len)
        self.mask_fraction = mask_fraction

    def batch(self, indices: np.ndarray, rng: np.random.Generator | None) -> Batch:
        labels = super().batch(indices, rng)["inputs"]
        if rng is None:
            rows = [np.random.default_rng(index).random((2, self.seq_len)) for index in indices]
            draws = np.stack(rows, axis=1)
        else:
            draws = rng.random((2, *labels.shape))
        chosen = draws[0] < self.mask_fraction
        # The second draw says what becomes of a chosen byte, and which byte replaces it.
        random_byte = (draws[1] * 2560).astype(np.int32) % 256
        tokens = np.where(chosen & (draws[1] < 0.8), self.MASK, labels)
        tokens = np.where(chosen & (draws[1] >= 0.9), random_byte, tokens)
        return {
            "inputs": {
                "tokens": tokens.astype(np.int32),
                "segments": np.zeros_like(labels),
                "mask": np.ones(labels.shape, bool),
            },
            "labels": labels,
            "weights": chosen.astype(np.float32),
        }


class LabeledWindows:
    """Windows of several texts; batches hold int32 `[B, T]`, and their texts' numbers `[B]`."""

    def __init__(self, texts: list[Windows]):
        self.texts = texts
        self.ends = np.cumsum([len(text) for text in texts])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def batch(self, indices: np.ndarray, rng: np.random.Generator | None) -> Batch:
        labels = np.searchsorted(self.ends, indices, side="right")
        inputs = np.zeros((len(indices), self.texts[0].seq_len), np.int32)
        for label, text in enumerate(self.texts):
            chosen = labels == label
            first = self.ends[label] - len(text)
            inputs[chosen] = text.batch(indices[chosen] - first, rng)["inputs"]
        return {"inputs": inputs, "labels": labels.astype(np.int32)}


def _read(path: pathlib.Path) -> bytes:
    if path.is_dir():
        paths = sorted([*path.glob("*.txt"), *path.glob("*.txt.gz")])
        if not paths:
            raise FileNotFoundError(
                f"no text in the directory `{path}`: it has no .txt or .txt.gz file. Name another directory, or a file."
            )
        return b"\n".join(_read(path) for path in paths)
    text = read_bytes(path)
    format = None
    if b"\0" in text:
        format = "has zero bytes, so it is a packed file, a table such as Parquet, or text in UTF-16"
    elif not path.name.endswith((".txt", ".txt.gz")):
        format = "is not a .txt file"
    if format is not None:
        warnings.warn(
            f"`{path}` {format}. Every byte of it becomes a token, also those of its format, such as brackets and "
            "names of fields. If it is not plain text, write its text to a .txt file in UTF-8.",
            stacklevel=2,
        )
    return text


def _python_reference() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise FileNotFoundError(
            "this Python comes without its language reference (`pydoc_data.topics`). Name a text file as `data.path`."
        ) from error
    return "\n".join(topics[name] for name in sorted(topics)).encode()


_PACKAGES = (
    "asyncio",
    "ctypes",
    "email",
    "http",
    "importlib",
    "multiprocessing",
    "unittest",
    "xml",
)


def _packages() -> dict[str, bytes]:
    """The source code of packages of Python's standard library, without tests."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    texts = {}
    for name in _PACKAGES:
        paths = [path for path in sorted((library / name).rglob("*.py")) if "test" not in path.parts]
        if not paths:
            raise FileNotFoundError(
                f"this Python comes without the source code of `{name}`. Name a directory of texts as `data.path`."
            )
        texts[name] = b"\n".join(path.read_bytes() for path in paths)
    return texts


def _classes(path: pathlib.Path) -> dict[str, bytes]:
    """The text of each class in a directory, by its name."""
    if not path.is_dir():
        raise FileNotFoundError(f"there is no directory `{path}`. Name another one.")
    entries = [entry for entry in sorted(path.iterdir()) if entry.is_dir() or entry.name.endswith((".txt", ".txt.gz"))]
    return {entry.name.partition(".")[0]: _read(entry) for entry in entries}
