"""Counts of stages, devices, microbatches and ticks, checked."""

import math

import numpy as np

from jpipe._util.foreign import shown


def wrong_counts(**counts: int) -> str | None:
    """Says which of `counts` is not an integer of at least 1; None if all are.

    Example:
      >>> wrong_counts(num_stages=4, num_microbatches=8) is None
      True
      >>> print(wrong_counts(num_stages=0)[:52])
      `num_stages` must be an integer of at least 1, got 0
    """
    for name, count in counts.items():
        integer = isinstance(count, int | np.integer) and not isinstance(count, bool)
        if not integer or count < 1:
            return (
                f"`{name}` must be an integer of at least 1, got {shown(count)}: with none "
                "there is nothing to run. Pass 1 or more."
            )
    num_cells = math.prod(map(int, counts.values()))
    if num_cells > MOST_CELLS:
        given = ", ".join(f"`{name}`={shown(n)}" for name, n in counts.items())
        return (
            f"{given} make a table of {shown(num_cells)} operations of each kind, and at most {MOST_CELLS:,} fit the "
            "memory of a machine. Pass smaller numbers."
        )
    return None


MOST_CELLS = 2**26
"""Operations of one kind in a table. Its arrays take at least 100 times as many bytes."""


def check_counts(**counts: int) -> None:
    """Raises ValueError unless every count is an integer of at least 1."""
    if reason := wrong_counts(**counts):
        raise ValueError(reason)
