"""Arguments of command lines: counts and sizes, one or several."""

import argparse
import re

from jpipe._util.foreign import shown
from jpipe._util.sizes import parse_size


def size(text: str) -> float:
    """Reads a number of bytes, with or without a unit.

    Example:
      >>> size("2GiB"), size("1.25e9"), size("500 MB")
      (2147483648.0, 1250000000.0, 500000000.0)
    """
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def sizes(text: str) -> tuple[float, ...]:
    """Reads sizes separated by commas."""
    return tuple(map(size, text.split(",")))


def count(text: str) -> int:
    """Reads a whole number of at least 1."""
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {shown(text)}.")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """Reads whole numbers separated by commas or an x."""
    return tuple(map(count, re.split("[x,]", text)))


def axes(text: str) -> tuple[str, ...]:
    """Reads axes of a mesh that a plan can have, separated by commas, in the order of the mesh.

    Example:
      >>> axes("context,expert")
      ('expert', 'context')
    """
    known, names = ("expert", "context"), text.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(
                f"must be expert, context or both separated by a comma, got {shown(name)}."
            )
    return tuple(name for name in known if name in names)
