"""The exact min-max split of a chain."""

import itertools
from collections.abc import Sequence

import numpy as np

from jpipe._util.foreign import shown


def min_max(costs: Sequence[float], num_stages: int) -> list[int]:
    """Cuts a chain of layers into stages so that the most expensive stage costs least.

    Among the splits with that cost, the one with the least sum of squared stage costs is taken, so
    the other stages are even too. Every stage gets at least one layer.

    Args:
      costs: one non-negative cost per layer.
      num_stages: S, at most the number of layers.

    Returns:
      The S - 1 boundaries: the layer at which each stage after the first begins.

    Raises:
      ValueError: if S is below 1 or above the number of layers, or a cost is negative or not
        finite.

    Example:
      >>> min_max([1, 2, 3, 4, 5, 6], 2)
      [4]
      >>> min_max([1, 1, 1, 9, 1, 1], 3)
      [3, 4]
    """
    array = checked_costs(costs, num_stages)
    num_layers = len(array)
    before = np.concatenate([[0.0], np.cumsum(array)])
    stage_cost = before[None, :] - before[:, None]  # [i, j]: layers i..j-1
    stage_cost[np.tril_indices(num_layers + 1)] = np.inf  # no empty stage

    dearest = stage_cost[0]
    for _ in range(num_stages - 1):
        dearest = np.maximum(dearest[:, None], stage_cost).min(axis=0)
    # The tolerance keeps rounding in the prefix sums from excluding the best split itself.
    allowed = stage_cost <= dearest[num_layers] * (1 + 1e-12)

    squares = np.where(allowed, stage_cost**2, np.inf)
    best, choices = squares[0], []
    for _ in range(num_stages - 1):
        total = best[:, None] + squares
        choices.append(total.argmin(axis=0))
        best = total.min(axis=0)
    stops = itertools.accumulate(reversed(choices), lambda stop, choice: int(choice[stop]), initial=num_layers)
    return list(stops)[:0:-1]


def checked_costs(costs: Sequence[float], num_stages: int) -> np.ndarray:
    """The costs as an array; raises ValueError if they cannot be cut into `num_stages`."""
    array = np.asarray(costs, np.float64)
    if not 1 <= num_stages <= len(array):
        raise ValueError(f"`num_stages` must be in 1..{len(array)}, the number of layers, got {shown(num_stages)}.")
    if not (np.isfinite(array).all() and (array >= 0).all()):
        raise ValueError(f"`costs` must be finite and not negative, got {array.tolist()}.")
    return array
