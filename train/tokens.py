"""Tokens of prompts and answers: the bytes of a text, or what the `tokenizer.json` of a published model makes of it."""

import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any, Protocol

from jpipe._util.foreign import read_json

TOKENIZER = "tokenizer.json"
_SETTINGS, _GENERATION = "tokenizer_config.json", "generation_config.json"
_OTHERS = ("special_tokens_map.json", "added_tokens.json", "chat_template.json", "chat_template.jinja", "merges.txt")
_OTHER_PATTERNS = ("vocab.*", "*.model", "*.tiktoken")


class Tokens(Protocol):
    """Makes tokens of texts."""

    def prompt(self, text: str) -> list[int]:
        """The tokens of a prompt, with what begins a text."""
        ...

    def answer(self, text: str) -> list[int]:
        """The tokens of the answer to it, and the one that ends a text."""
        ...

    def write(self, folder: pathlib.Path) -> None:
        """Writes the files from which other libraries make the same tokens."""
        ...


class ByteTokens:
    """Each byte of UTF-8 is a token; 256 begins a text, and 257 ends it.

    Example:
      >>> tokens = ByteTokens()
      >>> tokens.prompt("Hi"), tokens.answer("é")
      ([256, 72, 105], [195, 169, 257])
    """

    BEGIN, END = 256, 257

    def prompt(self, text: str) -> list[int]:
        return [self.BEGIN, *text.encode()]

    def answer(self, text: str) -> list[int]:
        return [*text.encode(), self.END]

    def write(self, folder: pathlib.Path) -> None:
        names = {"<s>": self.BEGIN, "</s>": self.END}
        begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
        first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": i, "content": name, **flags, "special": True} for name, i in names.items()],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [begin, first],
                "pair": [begin, first, second],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [self.BEGIN], "tokens": ["<s>"]}},
            },
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": {character: byte for byte, character in enumerate(_characters())} | names,
                "merges": [],
            },
        }
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "clean_up_tokenization_spaces": False,
        }
        # Without it `transformers` decodes with tokens 1 and 2 as beginning and end.
        generation = {"bos_token_id": self.BEGIN, "eos_token_id": self.END}
        for name, values in ((TOKENIZER, tokenizer), (_SETTINGS, settings), (_GENERATION, generation)):
            if name != _GENERATION or not (folder / name).exists():
                (folder / name).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: itself if it can be seen (GPT-2)."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]


class PublishedTokens:
    """The tokens of a published model.

    Args:
      folder: the folder with its `tokenizer.json`.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if it cannot be read, the package `tokenizers` is missing, or no file says which token ends a text.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder, file = folder, folder / TOKENIZER
        remedy = "or write `--config.data.tokenizer=bytes` for a model of bytes"
        if not file.is_file():
            raise FileNotFoundError(
                f"`{folder}` has no `{TOKENIZER}`. Name a folder with one, `--config.data.tokenizer=FOLDER`, {remedy}."
            )
        try:
            import tokenizers
        except ImportError as error:
            raise ValueError(
                f"`{file}` needs the package `tokenizers`, which cannot be imported ({error}). Install it: "
                f"`pip install tokenizers`, {remedy}."
            ) from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # of no class of its own
            raise ValueError(f"`{file}` cannot be read by the package `tokenizers`: {error}.") from error
        # A published limit would cut texts without a word.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.end = self._end()

    def _end(self) -> int:
        """The token that ends a text: that of the tokenizer's settings, else that of the model's."""
        settings, model = (_entries(self._folder / name) for name in (_SETTINGS, "config.json"))
        name = settings.get("eos_token")
        name = name.get("content") if isinstance(name, Mapping) else name
        number = model.get("eos_token_id") if name is None else self._tokenizer.token_to_id(name)
        number = number[0] if isinstance(number, list) and number else number
        if not isinstance(number, int):
            raise ValueError(
                f"no file of `{self._folder}` says which token ends a text. Add `eos_token` to its `{_SETTINGS}`, or "
                "`eos_token_id` to its `config.json`."
            )
        return number

    def prompt(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def answer(self, text: str) -> list[int]:
        return [*self._tokenizer.encode(text, add_special_tokens=False).ids, self.end]

    def write(self, folder: pathlib.Path) -> None:
        files = [self._folder / name for name in (TOKENIZER, _SETTINGS, *_OTHERS)]
        files += [file for pattern in _OTHER_PATTERNS for file in sorted(self._folder.glob(pattern))]
        for file in files:
            if file.is_file():
                shutil.copy(file, folder)


def _entries(file: pathlib.Path) -> Mapping[str, Any]:
    """The entries of a JSON file; none if there is no such file."""
    values = read_json(file) if file.is_file() else {}
    return values if isinstance(values, Mapping) else {}
