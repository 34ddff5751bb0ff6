"""Warnings that name the user's line."""

import sys
import warnings


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line outside this package.

    A fixed `stacklevel` is wrong as soon as a second function leads to the warning. The module's name
    decides, not the file: the `__init__` of a dataclass has no file of its own.
    """
    package, level = __name__.partition(".")[0], 1
    frame = sys._getframe()
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] != package:
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
