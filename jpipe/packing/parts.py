"""Parts of packed arrays, which get arrays of their own."""

from typing import NamedTuple

import jax
from jax import lax

from jpipe.packing.places import Place


class Part(NamedTuple):
    """A part of a packed array.

    Attributes:
      array: the name of the array.
      start, stop: its indices, after the leading axis.
    """

    array: str
    start: int
    stop: int

    @classmethod
    def of_leaf(cls, place: Place, i: int) -> "Part":
        """The part that is leaf i at a place."""
        start = int(place.start(i))
        return cls(place.array, start, start + place.block[0])

    @property
    def size(self) -> int:
        """The number of indices."""
        return self.stop - self.start

    @property
    def name(self) -> str:
        """The name of the part's own array."""
        return f"{self.array} from {self.start} to {self.stop}"

    def holds(self, place: Place, i: jax.Array | int) -> bool:
        """Whether leaf i at a place, or any leaf if i is not known, lies in it."""
        first, last = (self.of_leaf(place, n) for n in ((i, i) if isinstance(i, int) else (0, place.count - 1)))
        return self.start <= first.start and last.stop <= self.stop

    def overlaps(self, other: "Part") -> bool:
        """Whether an index is in both parts of one array."""
        return self.start < other.stop and other.start < self.stop

    def of(self, array: jax.Array) -> jax.Array:
        """The part of some rows of the array."""
        return lax.slice_in_dim(array, self.start, self.stop, axis=1)
