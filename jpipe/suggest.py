"""Suggestions for misspelt words in error messages."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


def did_you_mean(
    word: Any,
    known: Iterable[str],
    aliases: Mapping[str, str] | None = None,
    *,
    cutoff: float = 0.6,
) -> str:
    """The end of an error message: the known word nearest to a misspelt one.

    Case and punctuation do not count: "1F1B" and "1f1b" are one word.

    Args:
      word: the word that is not known; what is no text, or a long one, is near to nothing.
      known: the words that are.
      aliases: other usual names, each with the known word that it stands for.
      cutoff: the least similarity of a suggestion, from 0 (anything) to 1 (the same word).

    Returns:
      " Did you mean 'x'?" with a space in front, or "" if no known word is near.

    Example:
      >>> "unknown option 'tick'." + did_you_mean("tick", ["ticks", "num_chunks"])
      "unknown option 'tick'. Did you mean 'ticks'?"
      >>> did_you_mean("1F1B", ["gpipe", "one_f_one_b"], {"1f1b": "one_f_one_b"})
      " Did you mean 'one_f_one_b'?"
      >>> did_you_mean("x", ["ticks"])
      ''
    """
    if not isinstance(word, str) or len(word) > _LONGEST:
        return ""
    candidates = {_letters(alias): name for alias, name in (aliases or {}).items()}
    candidates |= {_letters(name): name for name in known}
    nearest = difflib.get_close_matches(_letters(word), candidates, n=1, cutoff=cutoff)
    return f" Did you mean {candidates[nearest[0]]!r}?" if nearest else ""


_LONGEST = 200
"""Letters of a word that may be a misspelt one."""


def _letters(word: str) -> str:
    """`word` in lower case, without punctuation; unchanged if nothing would be left."""
    return "".join(filter(str.isalnum, word.lower())) or word
