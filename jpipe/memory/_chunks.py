"""Tensors in chunks of one size, as PatrickStar lays them out (arXiv:2108.05818, section 6).

For comparisons: `jpipe.Offload` moves each array in pieces, which are fewer bytes and take less room on the device.
`benchmarks/host_chunks.py` has both.
"""

import dataclasses
from collections.abc import Sequence

from jpipe._util.foreign import shown

PARTS = {"parameters": 2, "master": 4, "momentum": 4, "variance": 4}
"""Parts of the state of mixed-precision Adam -> bytes for each parameter. A gradient takes the place of its
parameter.
"""


@dataclasses.dataclass(frozen=True)
class ChunkLayout:
    """The places of all tensors: the same chunk and offset for the parameters, momentum and variance of each.

    Attributes:
      chunk_size: numbers in a chunk.
      chunk: the chunk of each tensor.
      offset: the offset of each tensor in its chunk.
      sizes: numbers of each tensor.
    """

    chunk_size: int
    chunk: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_chunks(self) -> int:
        """Chunks of each part."""
        return max(self.chunk, default=-1) + 1

    @property
    def utilisation(self) -> float:
        """The share of the chunks that tensors fill."""
        return sum(self.sizes) / (self.num_chunks * self.chunk_size)

    def num_bytes(self, bytes_per_number: Sequence[int] = tuple(PARTS.values())) -> int:
        """Bytes of the chunks of all parts.

        Args:
          bytes_per_number: bytes per number of each part; by default of mixed-precision Adam, 14 in all.
        """
        return self.num_chunks * self.chunk_size * sum(bytes_per_number)

    def tensors(self, chunk: int) -> list[int]:
        """The tensors in a chunk, in order."""
        return [i for i, c in enumerate(self.chunk) if c == chunk]


def pack_chunks(sizes: Sequence[int], chunk_size: int) -> ChunkLayout:
    """Tensors, in their order, in chunks. A tensor that does not fit into the rest of a chunk begins the next one.

    Args:
      sizes: numbers of each tensor, in order of creation.
      chunk_size: numbers in a chunk.

    Raises:
      ValueError: if a tensor is larger than a chunk.

    Example:
      >>> layout = pack_chunks([3, 3, 2, 4], 6)
      >>> layout.chunk, layout.offset, layout.utilisation
      ((0, 0, 1, 1), (0, 3, 0, 2), 1.0)
    """
    _check(sizes)
    largest = max(sizes)
    if chunk_size < largest:
        raise ValueError(
            f"`chunk_size` must be at least {largest}, the numbers of the largest tensor, because a tensor lies in one "
            f"chunk, got {shown(chunk_size)}."
        )
    chunks, offsets = [], []
    chunk, free = -1, 0
    for size in sizes:
        if size > free:
            chunk, free = chunk + 1, chunk_size
        chunks.append(chunk)
        offsets.append(chunk_size - free)
        free -= size
    return ChunkLayout(int(chunk_size), tuple(chunks), tuple(offsets), tuple(sizes))


def best_chunk_size(sizes: Sequence[int], most: int | None = None, least: int | None = None) -> int:
    """The size of chunks that tensors fill best. Of equally good sizes it is the smallest, which moves in the smallest
    parts.

    Only sizes matter at which some chunk is full: sums of tensors that follow each other. All of them are tried.

    Args:
      sizes: numbers of each tensor, in order of creation.
      most: the largest size to try; None: eight times the largest tensor.
      least: the smallest one; None: the largest tensor.

    Raises:
      ValueError: if `most` is smaller than the largest tensor.

    Example:
      >>> best_chunk_size([3, 3, 2, 4])
      6
    """
    _check(sizes)
    largest = max(sizes)
    least = largest if least is None else max(least, largest)
    most = 8 * largest if most is None else most
    if most < least:
        raise ValueError(f"`most` must be at least {least}, which the largest tensor needs, got {shown(most)}.")
    candidates = {least}
    for i in range(len(sizes)):
        total = 0
        for size in sizes[i:]:
            total += size
            if total > most:
                break
            if total >= least:
                candidates.add(total)
    layouts = (pack_chunks(sizes, size) for size in sorted(candidates))
    return max(layouts, key=lambda layout: (layout.utilisation, -layout.chunk_size)).chunk_size


def _check(sizes: Sequence[int]) -> None:
    if not sizes or min(sizes) < 1:
        raise ValueError(f"`sizes` must hold at least one tensor, and each at least one number, got {list(sizes)[:8]}.")
