"""The ways of the values that cross the places of a cut model.

A value goes from the segment that computes it to the next one that reads it, and from there to the next. A hop to the
neighbour is part of the activation. A longer one is a skip connection, so that the stages between do not get the value.
"""

import itertools
from collections.abc import Sequence, Set
from typing import NamedTuple


class Passage(NamedTuple):
    """The values that enter and leave a segment, by number.

    Attributes:
      activation: those that it passes to the next segment.
      stash: the name of a skip connection -> the value that it sends by it.
      pop: the name of a skip connection -> the value that it gets by it.
    """

    activation: tuple[int, ...]
    stash: dict[str, int]
    pop: dict[str, int]


def passages(crossing: Sequence[Sequence[int]], reads: Sequence[Set[int]]) -> list[Passage]:
    """The passage of each segment.

    Args:
      crossing: for each place the values that cross it, by number.
      reads: for each segment the values that it reads, one segment more than places.
    """
    places: dict[int, list[int]] = {}
    for k, values in enumerate(crossing):
        for value in values:
            places.setdefault(value, []).append(k)
    # Value -> the segments at which it stops: that which computes it, and those that read it.
    stops = {
        value: {at[0], at[-1] + 1, *(k for k in range(at[0] + 1, at[-1] + 2) if value in reads[k])}
        for value, at in places.items()
    }

    def hops(value: int) -> list[tuple[int, int]]:
        return list(itertools.pairwise(sorted(stops[value])))

    def activation(k: int) -> tuple[int, ...]:
        return tuple(value for value in crossing[k] if (k, k + 1) in hops(value))

    for k, values in enumerate(crossing):
        if values and not activation(k):
            # Every segment gets an activation: one of the values stops at each segment of this hop.
            start, stop = next(hop for hop in hops(values[0]) if hop[0] <= k < hop[1])
            stops[values[0]].update(range(start, stop))
    result = [Passage(activation(k) if k < len(crossing) else (), {}, {}) for k in range(len(crossing) + 1)]
    # In this order the names do not depend on that of the values, which may differ for batches of another shape.
    skips = sorted((start, stop, value) for value in places for start, stop in hops(value) if stop > start + 1)
    for start, stop, value in skips:
        name = f"value {len(result[start].stash)} of segment {start}"
        result[start].stash[name] = value
        result[stop].pop[name] = value
    return result
