"""Prompts and answers, several to a row; only the tokens of answers are learnt."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Literal

import numpy as np

from jpipe._util.foreign import parse, shown
from train.data import Batch, Dataset, check_test_fraction, held_out
from train.files import read_bytes
from train.tokens import ByteTokens, PublishedTokens, Tokens

SHIPPED = pathlib.Path(__file__).with_name("facts.jsonl")
"""Questions about pipelines, and their answers."""

PROMPT = "{prompt}"


@dataclasses.dataclass(frozen=True)
class Instructions:
    """Prompts and their answers."""

    path: str | None = None
    """A .jsonl or .jsonl.gz file in UTF-8 with one object per line: {"prompt": TEXT, "response": TEXT}. None: the
    questions about pipelines that ship with the project."""
    test_path: str | None = None
    """The held-out file. None: the last `test_fraction` of `path`."""
    test_fraction: float = 0.1
    """Fraction of the examples that is held out when `test_path` is None."""
    seq_len: int = 256
    """Number of tokens T of a row. Several examples share a row, and none sees another."""
    tokenizer: str | None = None
    """The folder with the `tokenizer.json` that makes the tokens, or bytes. None: that of `init`; without it, bytes."""
    template: str = PROMPT + "\n"
    """The text in which a prompt stands for the model, with {prompt} in its place. Write the marks of turns here that
    the model was trained with. The answer follows it."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """What is done with an example of more than `seq_len` tokens: refuse it, or drop it."""

    def __post_init__(self) -> None:
        if self.seq_len < 2:
            raise ValueError(f"`seq_len` must be at least 2, got {self.seq_len}.")
        check_test_fraction(self.test_fraction)
        if self.template.count(PROMPT) != 1:
            raise ValueError(f"`template` must have {PROMPT} once, got {shown(self.template)}.")

    def tokens(self) -> Tokens:
        """What makes the tokens.

        Raises:
          FileNotFoundError: if the folder has no `tokenizer.json`.
          ValueError: if it cannot be read.
        """
        if self.tokenizer in (None, "bytes"):
            return ByteTokens()
        return PublishedTokens(pathlib.Path(self.tokenizer).expanduser())

    def load(self) -> Dataset:
        """Reads the examples and packs them into rows.

        Raises:
          FileNotFoundError: if a file does not exist.
          ValueError: if a line is no example, an example is too long, or a part has none.
        """
        tokens = self.tokens()
        path = SHIPPED if self.path is None else pathlib.Path(self.path)
        train = self._examples(path, tokens)
        if self.test_path is not None:
            test = self._examples(pathlib.Path(self.test_path), tokens)
        else:
            train, test = held_out(train, self.test_fraction)
        for name, part in (("training", train), ("held-out", test)):
            if not part:
                raise ValueError(
                    f"the {name} data must have at least one example of at most `seq_len` = {self.seq_len} tokens, got "
                    "none. Give more examples, another `test_fraction` or a larger `seq_len`."
                )
        rows = PackedRows(train, self.seq_len)
        files = "the shipped questions" if self.path is None else f"`{self.path}`"
        return Dataset(
            train=rows,
            test=PackedRows(test, self.seq_len),
            source=f"instructions, {len(train):,} for training and {len(test):,} held out ({files}); training fills "
            f"{rows.fill:.0%} of {len(rows):,} rows of {self.seq_len} tokens",
            unit="tokens",
            bytes_per_label=sum(e.num_bytes for e in test) / sum(len(e.answer) for e in test),
            num_tokens=1 + max(max(*e.prompt, *e.answer) for e in (*train, *test)),
        )

    def _examples(self, path: pathlib.Path, tokens: Tokens) -> list["Example"]:
        """The examples of a file in their order."""
        examples = []
        for number, (prompt, response) in _read(path):
            begin, end = self.template.split(PROMPT)
            example = Example(tokens.prompt(f"{begin}{prompt}{end}"), tokens.answer(response), len(response.encode()))
            length = len(example.prompt) + len(example.answer)
            if length <= self.seq_len:
                examples.append(example)
            elif self.too_long == "refuse":
                raise ValueError(
                    f"line {number} of `{path}` has {length} tokens, more than `seq_len` = {self.seq_len}. Write "
                    f"`--config.data.seq_len={length}` or more, or `--config.data.too_long=drop` to leave out such "
                    "examples."
                )
        return examples


@dataclasses.dataclass(frozen=True)
class Example:
    """The tokens of an example."""

    prompt: list[int]
    answer: list[int]
    """With the token that ends it."""
    num_bytes: int
    """Bytes of the text of the answer."""


class PackedRows:
    """Examples in rows of T tokens; batches hold int32 `[B, T]`, with the names of the arguments of a decoder.

    The label of a token is the next one if that is of an answer, else -1. Segment 0 is padding. An example goes into
    the first row that has space, the longest first: first fit decreasing.
    """

    def __init__(self, examples: Sequence[Example], seq_len: int):
        lengths = np.array([len(e.prompt) + len(e.answer) for e in examples])
        free = np.full(len(examples), seq_len)
        row_of = np.zeros(len(examples), int)
        for i in np.argsort(-lengths, kind="stable"):
            row_of[i] = np.argmax(free >= lengths[i])
            free[row_of[i]] -= lengths[i]
        shape = (row_of.max() + 1, seq_len)
        self.fill = lengths.sum() / (shape[0] * seq_len)
        self.tokens, self.positions, self.segment_ids = (np.zeros(shape, np.int32) for _ in range(3))
        self.labels = np.full(shape, -1, np.int32)
        ends, numbers = np.zeros(shape[0], int), np.zeros(shape[0], int)
        for example, row, length in zip(examples, row_of, lengths):
            start, first = ends[row], ends[row] + len(example.prompt)
            ends[row] += length
            numbers[row] += 1
            place = row, slice(start, ends[row])
            self.tokens[place] = example.prompt + example.answer
            self.positions[place] = np.arange(length)
            self.segment_ids[place] = numbers[row]
            self.labels[row, first - 1 : ends[row] - 1] = example.answer

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: np.ndarray, rng: np.random.Generator | None) -> Batch:
        del rng  # examples are not varied
        names = ("tokens", "positions", "segment_ids", "labels")
        return {name: getattr(self, name)[indices] for name in names}


def _read(path: pathlib.Path) -> list[tuple[int, tuple[str, str]]]:
    """Prompts and answers with the numbers of their lines."""
    examples = []
    for number, line in enumerate(read_bytes(path).split(b"\n"), 1):
        if not line.strip():
            continue
        place = f"line {number} of `{path}`"
        try:
            values = parse(line.decode(), f"{path}, line {number}")
        except UnicodeDecodeError as error:
            raise ValueError(f"{place} is not in UTF-8 ({error}).") from None
        got = [values.get(name) for name in ("prompt", "response")] if isinstance(values, dict) else []
        if not (got and all(isinstance(text, str) and text for text in got)):
            entries = f"the entries {', '.join(values)}" if isinstance(values, dict) else shown(values)
            raise ValueError(
                f'{place} must be an object with the texts "prompt" and "response", neither empty, got {entries}. '
                'Correct or remove the line. Of an entry "messages", write the last turn as "response" and those '
                'before it as "prompt"; of "instruction" and "output", rename them.'
            )
        examples.append((number, (got[0], got[1])))
    return examples
