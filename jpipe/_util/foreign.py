"""Files that others wrote: whatever is wrong with their text is one kind of error.

Every reader of a text, JSON or TOML file goes through this module. So a file of other bytes, of brackets a hundred
thousand deep or with a number of five thousand digits is a `ValueError` that names the file, as a forgotten comma is.
"""

import ast
import json
import os
import pathlib
import reprlib
from collections.abc import Callable
from typing import Any

import numpy as np

_MOST_SHOWN = 200


def read_text(path: str | os.PathLike, encoding: str = "utf-8") -> str:
    """The text of a file.

    Raises:
      ValueError: if it has another encoding.
      OSError: if it cannot be read.
    """
    try:
        return pathlib.Path(path).read_text(encoding=encoding)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text file ({error}).") from None


def parse(
    text: str,
    path: str | os.PathLike,
    loads: Callable[[str], Any] = json.loads,
    language: str = "JSON",
) -> Any:
    """The values in a text.

    Args:
      text: the text.
      path: the file that it comes from, for messages.
      loads: reads the language; its errors are of `ValueError`.
      language: its name, for messages.

    Raises:
      ValueError: if the text is not of the language.

    Example:
      >>> parse("[1, 2", "a.json")
      Traceback (most recent call last):
      ValueError: `a.json` is not JSON: Expecting ',' delimiter: line 1 column 6 (char 5).
    """
    try:
        return loads(text)
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:
        reason = str(error).partition("; use sys.")[0]  # of a number that is too long
    raise ValueError(f"`{path}` is not {language}: {reason}.")


def read_json(path: str | os.PathLike) -> Any:
    """The values in a JSON file.

    Raises:
      ValueError: if it is not JSON, or not in UTF-8.
      OSError: if it cannot be read.
    """
    return parse(read_text(path), path)


def literal(text: str) -> Any:
    """The value of a Python literal, or the text itself if it is none.

    Example:
      >>> literal("(1, 2)"), literal("paired")
      ((1, 2), 'paired')
    """
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return text  # the last two are what brackets or signs without end cause


def shown(value: Any) -> str:
    """`repr` of a value that somebody gave, for a message: of a long one its two ends.

    Example:
      >>> shown("gpip"), len(shown("9" * 100_000)) <= 200
      ("'gpip'", True)
    """
    if isinstance(value, np.generic):
        value = value.item()  # 0.5, not np.float64(0.5)
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python does not write out a number of thousands of digits
        return f"{type(value).__name__} of thousands of digits"
    except RecursionError:
        return f"{type(value).__name__} that is nested too deeply"


def shortened(message: str, most: int = 4000) -> str:
    """The message without its middle if it repeats a long input."""
    if len(message) <= most:
        return message
    left_out = len(message) - most
    return f"{message[: most // 2]} ... ({left_out:,} characters) ... {message[-most // 2 :]}"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = _MOST_SHOWN
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 20
