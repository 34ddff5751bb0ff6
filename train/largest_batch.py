"""The largest minibatch whose step fits into a memory. Every figure is the compiler's."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Tried(NamedTuple):
    """A batch size whose step was compiled.

    Attributes:
      batch_size: rows of the minibatch.
      num_bytes: bytes of a device.
    """

    batch_size: int
    num_bytes: int


class Largest(NamedTuple):
    """The result of `search`.

    Attributes:
      fits: the largest batch that fits; None: not even the smallest does.
      too_large: the smallest larger batch that does not fit; None: there is no larger one.
    """

    fits: Tried | None
    too_large: Tried | None


def search(
    num_bytes: Callable[[int], int],
    memory: float,
    *,
    unit: int,
    most: int,
    first: int,
    report: Callable[[Tried], None] = lambda tried: None,
) -> Largest:
    """Searches for the largest multiple of a unit whose bytes fit.

    Bytes grow nearly in a line with the batch. So each next size is where the line through the two sizes nearest to
    the limit meets it. After some of these the way between what fits and what does not is halved.

    Args:
      num_bytes: bytes of a device for a batch size; they do not fall as it grows.
      memory: bytes that a device has.
      unit: a batch must be a multiple of it.
      most: the largest batch that makes sense, at least `unit`.
      first: the size to begin with.
      report: gets every size that was tried.

    Returns:
      The two neighbours of the limit, both tried.
    """
    last = most // unit
    tried: dict[int, int] = {}
    low, high = 0, last + 1  # in units; `low` fits, `high` does not

    def attempt(k: int) -> None:
        nonlocal low, high
        tried[k] = num_bytes(k * unit)
        report(Tried(k * unit, tried[k]))
        if tried[k] <= memory:
            low = k
        else:
            high = k

    attempt(min(max(first // unit, 1), last))
    for k in _guesses(tried, memory):
        if high - low <= 1:
            break
        attempt(min(max(k, low + 1), high - 1))
    while high - low > 1:
        attempt((low + high) // 2)
    fits, too_large = (Tried(k * unit, tried[k]) if k in tried else None for k in (low, high))
    return Largest(fits, too_large)


_MOST_GUESSES = 8


def _guesses(tried: dict[int, int], memory: float) -> Iterator[int]:
    """The next sizes, in units; `tried` grows between them."""
    (first,) = tried
    yield max(first * 2, 1) if tried[first] <= memory else first // 2
    for _ in itertools.repeat(None, _MOST_GUESSES):
        a, b = sorted(tried, key=lambda k: abs(tried[k] - memory))[:2]
        slope = (tried[b] - tried[a]) / (b - a)
        yield math.floor(a + (memory - tried[a]) / slope) if slope > 0 else 2 * max(a, b)
