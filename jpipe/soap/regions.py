"""Boxes of array elements, and which box of an input an operator reads for a box of its loops.

A box is a tuple of ranges `(low, high)`, one per dim, without `high`. An `Access` is a chain of steps. Each step says,
for every dim of the array below, which range belongs to a box above: transposes, broadcasts, reshapes, slices, windows
and their compositions are all written so.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

Box = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class DimMap:
    """The range of one dim that a range of another dim needs.

    Element `i` of dim `dim` needs the elements `(i * stride + offset + k) // divisor` for `0 <= k < width` that exist;
    with `dilation`, those of the elements `i * stride + offset + k` that are multiples of it, divided by it.

    Attributes:
      size: number of elements of the dim that is read.
      dim: the dim that it follows; None if all elements are always needed.
      stride, offset, width, divisor, dilation: see above. `stride` may be negative, `width` counts from the lowest
        element.
    """

    size: int
    dim: int | None
    stride: int = 1
    offset: int = 0
    width: int = 1
    divisor: int = 1
    dilation: int = 1

    def range(self, low: int, high: int) -> tuple[int, int]:
        """The smallest range that holds all elements that `[low, high)` needs; `(0, 0)` if none."""
        ends = low * self.stride + self.offset, (high - 1) * self.stride + self.offset
        first, last = min(ends), max(ends) + self.width - 1
        first, last = first // self.divisor, last // self.divisor
        first, last = -(-first // self.dilation), last // self.dilation
        first, last = max(first, 0), min(last, self.size - 1)
        return (first, last + 1) if last >= first else (0, 0)

    @property
    def is_plain(self) -> bool:
        """True if element i needs element i alone."""
        rest = (self.stride, self.offset, self.width, self.divisor, self.dilation)
        return self.dim is not None and rest == (1, 0, 1, 1, 1)


Step = tuple[DimMap, ...]
Access = tuple[Step, ...]


def plain(shape: Sequence[int], dims: Sequence[int | None]) -> Step:
    """A step in which dim `i` follows dim `dims[i]` element by element."""
    return tuple(DimMap(size, dim) for size, dim in zip(shape, dims))


def identity(shape: Sequence[int]) -> Step:
    return plain(shape, range(len(shape)))


def read(access: Access, box: Box) -> Box:
    """The box of the array at the end of `access` that `box` needs.

    Example:
      >>> window = (DimMap(8, 0, stride=2, offset=-1, width=3),)
      >>> read((window,), ((1, 3),)), read((window,), ((0, 1),))
      (((1, 6),), ((0, 2),))
    """
    empty = False
    for step in access:
        box = tuple((0, dim_map.size) if dim_map.dim is None else dim_map.range(*box[dim_map.dim]) for dim_map in step)
        empty = empty or any(low == high for low, high in box)
    return ((0, 0),) * len(box) if empty else box


def read_all(access: Access, boxes: np.ndarray) -> np.ndarray:
    """`read` of many boxes at once: int64 `[count, rank above, 2]` to `[count, rank below, 2]`."""
    empty = np.zeros(len(boxes), bool)
    for step in access:
        below = np.zeros((len(boxes), len(step), 2), np.int64)
        for d, dim_map in enumerate(step):
            if dim_map.dim is None:
                below[:, d, 1] = dim_map.size
                continue
            low = boxes[:, dim_map.dim, 0] * dim_map.stride + dim_map.offset
            high = (boxes[:, dim_map.dim, 1] - 1) * dim_map.stride + dim_map.offset
            first = np.minimum(low, high) // dim_map.divisor
            last = (np.maximum(low, high) + dim_map.width - 1) // dim_map.divisor
            first = np.maximum(-(-first // dim_map.dilation), 0)
            last = np.minimum(last // dim_map.dilation, dim_map.size - 1)
            full = last >= first
            below[:, d, 0] = np.where(full, first, 0)
            below[:, d, 1] = np.where(full, last + 1, 0)
            empty |= ~full
        boxes = below
    boxes[empty] = 0
    return boxes


def followed(access: Access) -> list[int | None]:
    """For each dim at the end of `access`, the dim at its beginning that it follows, or None."""
    dims: list[int | None] | None = None
    for step in access:
        below = [dim_map.dim for dim_map in step]
        dims = below if dims is None else [None if i is None else dims[i] for i in below]
    assert dims is not None, "an access has at least one step"
    return dims


def is_plain(access: Access) -> bool:
    """Returns whether dims are only permuted, repeated or dropped: a dim of size 1 may be whole."""
    return all(dim_map.is_plain or (dim_map.dim is None and dim_map.size == 1) for step in access for dim_map in step)


def volume(box: Box) -> int:
    """Number of elements."""
    return math.prod(high - low for low, high in box)


@functools.lru_cache(1024)
def reshape(old: tuple[int, ...], new: tuple[int, ...]) -> Step:
    """The access of a reshape from `old` to `new`. Ranges are the smallest that hold all elements.

    Dims fall into groups of equal products. In a group the first dim of the old shape follows the first dim of the new
    one; the other old dims are whole, unless a dim stays as it is.
    """
    maps = [DimMap(size, None) for size in old]
    for inner, outer in _groups(old, new):
        inner = [i for i in inner if old[i] > 1]
        outer = [i for i in outer if new[i] > 1]
        if not inner or not outer:
            continue
        below = math.prod(old[i] for i in inner[1:])
        above = math.prod(new[i] for i in outer[1:])
        common = math.gcd(below, above)
        above, below = above // common, below // common
        maps[inner[0]] = DimMap(old[inner[0]], outer[0], stride=above, width=above, divisor=below)
    return tuple(maps)


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list, list]]:
    groups = []
    i = j = 0
    while i < len(old) or j < len(new):
        inner, outer, below, above = [], [], 1, 1
        while True:
            if i < len(old) and (below <= above or j == len(new)):
                inner.append(i)
                below *= old[i]
                i += 1
            else:
                outer.append(j)
                above *= new[j]
                j += 1
            if below == above and inner and outer:
                break
            if i == len(old) and j == len(new):
                break
        groups.append((inner, outer))
    return groups


def overlaps(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Number of elements that boxes share.

    Args:
      first: `[A, rank, 2]`, A boxes.
      second: `[B, rank, 2]`, B boxes.

    Returns:
      int64 `[A, B]`.
    """
    shared = np.ones((len(first), len(second)), np.int64)
    for dim in range(first.shape[1]):
        low = np.maximum(first[:, None, dim, 0], second[None, :, dim, 0])
        high = np.minimum(first[:, None, dim, 1], second[None, :, dim, 1])
        shared *= np.maximum(high - low, 0)
    return shared
