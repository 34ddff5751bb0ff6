"""Which leaves get a pool, and which ones a vector."""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jpipe.packing.places import Leaf

MOST_PADDING = 1 / 8
"""The part of an array's bytes that `Packing.of(tight=True)` gives up pools for: what the average stage does not
use.
"""

_LONGEST = 2**31 - 1
"""The most numbers of a vector, which indices of int32 count."""


def pool_key(leaf: Leaf) -> tuple[tuple[int, ...], np.dtype, tuple, int]:
    """The key of a pool: the facts that its leaves share. The last is the chunk, 0 on the device."""
    chunk = leaf.chunk if leaf.on_host else 0
    return tuple(leaf.aval.shape), np.dtype(leaf.aval.dtype), leaf.spec, chunk


class StageCounts(NamedTuple):
    """Number of stages of each owner on each device.

    Attributes:
      number: int `[owners, devices]`.
    """

    number: np.ndarray

    @classmethod
    def of(cls, devices: Sequence[Sequence[int]]) -> "StageCounts":
        """Counts the stages, from the device of each stage of each owner."""
        number_of_devices = 1 + max(map(max, filter(None, devices)), default=0)
        number = [np.bincount(np.array(owner_devices, int), minlength=number_of_devices) for owner_devices in devices]
        return cls(np.array(number).reshape(len(devices), number_of_devices))

    def used(self, sizes: Sequence[int]) -> int:
        """Elements of an array that all stages use, from the size that each owner uses."""
        return int(np.sum(sizes @ self.number))

    def allocated(self, sizes: Sequence[int]) -> int:
        """Elements that all devices allocate for it: equal rows, for as many stages as use it on any one device."""
        rows = (np.greater(sizes, 0) @ self.number).max()
        return int(self.number.shape[1] * rows * max(sizes))


def tightened(pooled: set, counts: Mapping, stages: StageCounts) -> set:
    """The pools that remain if padding is to be at most `MOST_PADDING`; all, if that cannot be reached.

    Args:
      pooled: `pool_key` of the leaves that have pools.
      counts: `pool_key` of all leaves -> number of them that each owner has.
      stages: the stages of the owners.
    """
    num_bytes = {key: math.prod(key[0]) * key[1].itemsize * np.array(n) for key, n in counts.items()}
    used = sum(map(stages.used, num_bytes.values()))

    def padding(pools: set) -> float:
        vectors: dict = collections.defaultdict(int)
        allocated = 0
        for key, owner_bytes in num_bytes.items():
            if key in pools:
                allocated += stages.allocated(owner_bytes)
            else:
                vectors[key[1]] = vectors[key[1]] + owner_bytes
        allocated += sum(map(stages.allocated, vectors.values()))
        return 1 - used / max(allocated, 1)

    def waste(key: tuple) -> int:
        return stages.allocated(num_bytes[key]) - stages.used(num_bytes[key])

    # Leaves that are split or in host memory stay, and so do pools without padding.
    movable = {key for key in pooled if waste(key) > 0 and not any(key[2]) and not key[3]}
    left = set(pooled)
    for key in sorted(movable, key=waste, reverse=True):
        if padding(left) <= MOST_PADDING:
            break
        left.remove(key)
    return left if padding(left) <= MOST_PADDING else pooled


def with_short_vectors(pooled: set, counts: Mapping) -> set:
    """The pools, with those of the largest leaves that a vector has no index for.

    Args:
      pooled: `pool_key` of the leaves that have pools.
      counts: number of a vector, and `pool_key` of leaves -> number of them that each owner has.
    """
    pools = set(pooled)
    for vector, dtype in {(vector, key[1]) for vector, key in counts}:
        left = {
            key: math.prod(key[0]) * np.array(n)
            for (key_vector, key), n in counts.items()
            if (key_vector, key[1]) == (vector, dtype) and key not in pools
        }
        while left and sum(left.values()).max() > _LONGEST:
            largest = max(left, key=lambda key: left[key].max())
            del left[largest]
            pools.add(largest)
    return pools
