"""Tokens in files that need not fit in memory: rows are read when they are trained on."""

import dataclasses
import pathlib

import numpy as np

from train.data import Batch, Dataset, check_test_fraction, held_out

_MOST_LOOKED_AT = 1_000_000


@dataclasses.dataclass(frozen=True)
class Tokenized:
    """Tokens of documents, one after the other in an array on disk, for the models Llama and GPT2."""

    path: str | None = None
    """A .npy file with a vector of whole numbers, such as uint16 or uint32. Required. It is mapped, not read."""
    test_path: str | None = None
    """The held-out file. None: the last `test_fraction` of `path`."""
    test_fraction: float = 0.01
    """Fraction of the tokens that is held out when `test_path` is None."""
    seq_len: int = 1024
    """Number of tokens T of a row."""
    end: int | None = None
    """The token that ends a document: the next one is not learnt from it, does not see it, and its positions begin
    anew. None: rows are not parted."""

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise ValueError(f"`seq_len` must be at least 1, got {self.seq_len}.")
        check_test_fraction(self.test_fraction)

    def load(self) -> Dataset:
        """Maps the files.

        Raises:
          FileNotFoundError: if a file does not exist.
          ValueError: if none is named, a file is no vector of whole numbers, or a part is shorter than a row.
        """
        if self.path is None:
            raise ValueError(
                "`data.path` must name a file of tokens, got none. Write `--config.data.path=FILE.npy`; "
                "`numpy.save` makes it of a vector of whole numbers."
            )
        train = _mapped(self.path)
        if self.test_path is None:
            train, test = held_out(train, self.test_fraction)
        else:
            test = _mapped(self.test_path)
        for name, part in (("training", train), ("held-out", test)):
            if len(part) <= self.seq_len:
                raise ValueError(
                    f"the {name} tokens must be more than `seq_len` = {self.seq_len}, got {len(part)}. Use a longer "
                    "file, another `test_fraction` or a smaller `seq_len`."
                )
        files = " and ".join(f"`{path}`" for path in (self.path, self.test_path) if path)
        return Dataset(
            train=Rows(train, self.seq_len, self.end),
            test=Rows(test, self.seq_len, self.end),
            source=f"{len(train):,} training and {len(test):,} held-out tokens ({files})",
            unit="tokens",
            num_tokens=1 + int(max(part[:_MOST_LOOKED_AT].max() for part in (train, test))),
        )


class Rows:
    """Consecutive rows of T tokens of a vector; batches hold int32 `[B, T]`, with the arguments of a decoder.

    The label of a token is the next one, or -1 if that begins a document.
    """

    def __init__(self, tokens: np.ndarray, seq_len: int, end: int | None):
        self.tokens, self.seq_len, self.end = tokens, seq_len, end

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def batch(self, indices: np.ndarray, rng: np.random.Generator | None) -> Batch:
        del rng  # rows are not varied
        rows = [self.tokens[i * self.seq_len : (i + 1) * self.seq_len + 1] for i in indices]
        tokens, labels = (np.stack([row[part] for row in rows]).astype(np.int32) for part in (np.s_[:-1], np.s_[1:]))
        ends = np.zeros(tokens.shape, bool) if self.end is None else tokens == self.end
        begins = np.pad(ends[:, :-1], ((0, 0), (1, 0)))
        places = np.broadcast_to(np.arange(self.seq_len), tokens.shape)
        first = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
        return {
            "tokens": tokens,
            "positions": (places - first).astype(np.int32),
            "segment_ids": begins.cumsum(axis=1, dtype=np.int32),
            "labels": np.where(ends, -1, labels),
        }


def _mapped(path: str) -> np.ndarray:
    """The vector in a file, as a map of it."""
    file = pathlib.Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"there is no file `{path}`. Relative paths start at `{pathlib.Path.cwd()}`.")
    try:
        tokens = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"`{path}` is damaged or no .npy file: {error}.") from error
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        kind = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, np.ndarray) else "several arrays"
        raise ValueError(f"`{path}` must hold a vector of whole numbers, got {kind}.")
    return tokens
