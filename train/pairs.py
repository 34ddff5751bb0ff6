"""Sentence pairs for translation, as bytes, padded to one length.

Tokens: 0 is padding, 1 begins a target, 2 ends a sentence, and 3 + b is the byte b. So a
model needs a vocabulary of 259 tokens, in any two languages.
"""

import dataclasses
import pathlib

import numpy as np

from jpipe._util.foreign import shown
from train.data import Batch, Dataset, check_test_fraction, held_out
from train.files import read_bytes

PADDING, BEGIN, END, FIRST_BYTE = 0, 1, 2, 3
VOCAB_SIZE = FIRST_BYTE + 256


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Sentences and their translations."""

    path: str | None = None
    """A .tsv or .tsv.gz file in UTF-8 with one pair per line: the sentence, a tab, the
    translation. Required: no translations ship with the project."""
    test_path: str | None = None
    """The held-out pairs. None: the last `test_fraction` of `path`."""
    test_fraction: float = 0.05
    """Fraction of the pairs that is held out when `test_path` is None."""
    seq_len: int = 128
    """Number of positions of either sentence, its end included. Longer pairs are left
    out, shorter ones are padded."""

    def __post_init__(self) -> None:
        if self.seq_len < 2:
            raise ValueError(f"`seq_len` must be at least 2, got {self.seq_len}.")
        check_test_fraction(self.test_fraction)

    def load(self) -> Dataset:
        """Reads the pairs and splits off the held-out ones.

        Raises:
          FileNotFoundError: if a file does not exist.
          ValueError: if no file is named, a line is not a pair, or no pair is short
            enough.
        """
        if self.path is None:
            raise ValueError(
                "`data.path` must name a file of sentence pairs, got none. Write "
                "`--config.data.path=FILE.tsv`; each line holds a sentence, a tab and its "
                "translation."
            )
        train = _read(self.path)
        if self.test_path is not None:
            test = _read(self.test_path)
        else:
            train, test = held_out(train, self.test_fraction)
        parts, num_long = [], 0
        for name, pairs in (("training", train), ("held-out", test)):
            short = [p for p in pairs if max(map(len, p)) < self.seq_len]
            num_long += len(pairs) - len(short)
            if not short:
                raise ValueError(
                    f"the {name} data must have a pair of at most `seq_len` - 1 = "
                    f"{self.seq_len - 1} bytes per sentence, got {len(pairs)} pairs, all "
                    "longer. Use a larger `seq_len`, more pairs or another "
                    "`test_fraction`."
                )
            parts.append(short)
        train, test = parts
        files = " and ".join(f"`{p}`" for p in (self.path, self.test_path) if p)
        return Dataset(
            train=PaddedPairs(train, self.seq_len),
            test=PaddedPairs(test, self.seq_len),
            source=f"sentence pairs, {len(train):,} for training and {len(test):,} held "
            f"out; {num_long:,} longer than {self.seq_len - 1} bytes left out ({files})",
            unit="tokens",
        )


class PaddedPairs:
    """Pairs of byte strings, padded to T positions; batches hold int32 `[B, T]`.

    The decoder reads the target with a leading BEGIN; its labels are the target with a
    trailing END. Labels at padding have weight 0.
    """

    def __init__(self, pairs: list[tuple[bytes, bytes]], seq_len: int):
        shape = (len(pairs), seq_len)
        self.sources, self.targets = (np.zeros(shape, np.uint16) for _ in range(2))
        for i, pair in enumerate(pairs):
            for rows, sentence in zip((self.sources, self.targets), pair, strict=True):
                content = np.frombuffer(sentence, np.uint8).astype(np.uint16)
                rows[i, : len(content)] = content + FIRST_BYTE
                rows[i, len(content)] = END

    def __len__(self) -> int:
        return len(self.sources)

    def batch(self, indices: np.ndarray, rng: np.random.Generator | None) -> Batch:
        del rng  # sentences are not varied
        labels = self.targets[indices].astype(np.int32)
        # The end of a target is a label, but never an input.
        before = np.where(labels == END, PADDING, labels)[:, :-1]
        target = np.pad(before, ((0, 0), (1, 0)), constant_values=BEGIN)
        return {
            "inputs": {
                "source": self.sources[indices].astype(np.int32),
                "target": target,
            },
            "labels": labels,
            "weights": (labels != PADDING).astype(np.float32),
        }


def _read(path: str) -> list[tuple[bytes, bytes]]:
    """The pairs of a file, as UTF-8 bytes."""
    pairs = []
    for number, line in enumerate(read_bytes(pathlib.Path(path)).split(b"\n"), 1):
        line = line.removesuffix(b"\r")
        if not line:
            continue
        sentences = line.split(b"\t")
        if len(sentences) != 2 or not all(sentences):
            raise ValueError(
                f"line {number} of `{path}` must hold a sentence, a tab and its "
                f"translation, got {len(sentences)} columns: "
                f"{shown(line[:40].decode(errors='replace'))}. Correct or remove the line."
            )
        pairs.append((sentences[0], sentences[1]))
    return pairs
