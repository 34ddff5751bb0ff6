"""One file a method. A new one is a file here and a line below."""

import difflib
import inspect
import os
import pathlib
from collections.abc import Callable

from jpipe.schedule import Schedule
from jpipe.schedules.forward_only import forward_only as forward_only
from jpipe.schedules.gpipe import gpipe as gpipe
from jpipe.schedules.interleaved import interleaved as interleaved
from jpipe.schedules.one_f_one_b import one_f_one_b as one_f_one_b
from jpipe.schedules.pipedream import pipedream as pipedream
from jpipe.schedules.pipedream_2bw import pipedream_2bw as pipedream_2bw
from jpipe.schedules.pipemare import pipemare as pipemare
from jpipe.schedules.zero_bubble import zero_bubble_h1 as zero_bubble_h1
from jpipe.schedules.zero_bubble import zero_bubble_h2 as zero_bubble_h2
from jpipe.schedules.zero_bubble import zero_bubble_v as zero_bubble_v

_BUILDERS = {
    name: value
    for name, value in sorted(globals().items())
    if inspect.isfunction(value)
}

# Not a builder: it uses them.
from jpipe.schedules.search import Found as Found  # noqa: E402
from jpipe.schedules.search import search as search  # noqa: E402


def names() -> list[str]:
    """The names that `get` knows."""
    return list(_BUILDERS)


def get(name: str) -> Callable[..., Schedule]:
    """The builder called `name`.

    Args:
      name: one of `names()`.

    Returns:
      A function `(num_stages, num_microbatches, ...) -> Schedule`.

    Raises:
      ValueError: if there is none of that name; says which is nearest.

    Example:
      >>> get("gpipe")(4, 8).num_ticks
      22
    """
    if name in _BUILDERS:
        return _BUILDERS[name]
    near = difflib.get_close_matches(name, names(), n=1, cutoff=0.4)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown schedule {name!r}.{guess} Known: {', '.join(names())}.")


def read(path: str | os.PathLike[str]) -> Schedule:
    """Reads a table from a file in the form of `Schedule.to_text`, and checks it.

    Args:
      path: a text file; its name without suffix names the schedule.

    Returns:
      The schedule, checked.

    Raises:
      ValueError: if the text cannot be read or the table is not legal.
      OSError: if the file cannot be read.
    """
    path = pathlib.Path(path)
    try:
        return Schedule.from_text(path.read_text(), name=path.stem).check()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
