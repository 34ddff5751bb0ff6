"""The number of intervals that cover each point of a circle."""

import numpy as np


def covering(first: np.ndarray, last: np.ndarray, num_points: int) -> np.ndarray:
    """Counts the intervals that cover each point. Every interval recurs every P points.

    It counts the ends of intervals, and takes no array of points by intervals.

    Args:
      first: int `[N, ...]`, the first point of each interval.
      last: int `[N, ...]`, the last point of each interval, included in it; `first - 1`: the interval is empty.
      num_points: P.

    Returns:
      int `[P, ...]`, counts.

    Example:
      >>> covering(np.array([1, 3]), np.array([2, 4]), 4).tolist()
      [1, 1, 1, 1]
    """
    shape = num_points, *first.shape[1:]
    columns = np.broadcast_to(np.arange(np.prod(shape[1:], dtype=int)).reshape(shape[1:]), first.shape)  # fmt: skip
    size = int(np.prod(shape))

    def ends(points: np.ndarray) -> np.ndarray:
        cells = points % num_points * (size // num_points) + columns
        return np.bincount(cells.ravel(), minlength=size).reshape(shape)

    at_start = ((last + 1) // num_points - first // num_points).sum(axis=0)
    return at_start + (ends(first) - ends(last + 1)).cumsum(axis=0)
