"""Numbers of bytes as texts."""

import math
import re

from jpipe._util.foreign import shown

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{binary}B": (1024 if binary else 1000) ** power
    for power, prefix in enumerate("KMGT", 1)
    for binary in ("", "i")
}


def parse_size(text: str) -> float:
    """Reads a number of bytes, with or without a unit.

    Raises:
      ValueError: if the text is none, or the number is not above 0.

    Example:
      >>> parse_size("2GiB"), parse_size("1.25e9"), parse_size("500 MB")
      (2147483648.0, 1250000000.0, 500000000.0)
    """
    match = re.fullmatch(r"([0-9.]+(?:[eE][-+]?\d+)?)\s*([KMGT]?i?B?)", text.strip())
    try:
        number, unit = float(match[1]), match[2]  # type: ignore[index]
        factor = _UNITS[unit if unit.endswith("B") or not unit else f"{unit}B"]
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"must be bytes such as 2GiB, 500MB or 1.25e9, got {shown(text)}.") from None
    if not 0 < number * factor < math.inf:
        raise ValueError(f"must be above 0, got {shown(text)}.")
    return number * factor


def size_text(num_bytes: float) -> str:
    """Formats a number of bytes for people.

    Example:
      >>> size_text(3 * 2**20)
      '3.0 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
