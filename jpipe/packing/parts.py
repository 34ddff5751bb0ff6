"""Parts of packed arrays, which get arrays of their own."""

from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from jpipe.packing.places import Place


class Part(NamedTuple):
    """A part of a packed array.

    Attributes:
      array: the name of the array.
      start, stop: its indices, after the leading axis.
      shape: the shape of the leaf that it is, if that has an order.
      order: the order of the leaf's dims in the part's own array, see `Leaf`; () for the order that they have.
    """

    array: str
    start: int
    stop: int
    shape: tuple[int, ...] = ()
    order: tuple[int, ...] = ()

    @classmethod
    def of_leaf(cls, place: Place, i: int) -> "Part":
        """The part that is leaf i at a place."""
        start = int(place.start(i))
        shape = place.shape if place.order else ()
        return cls(place.array, start, start + place.block[0], shape, place.order)

    @property
    def unordered(self) -> "Part":
        """The part with the leaf in the order that its dims have."""
        return self._replace(shape=(), order=())

    @property
    def size(self) -> int:
        """The number of indices."""
        return self.stop - self.start

    @property
    def name(self) -> str:
        """The name of the part's own array."""
        order = f" in order {list(self.order)} of {list(self.shape)}" if self.order else ""
        return f"{self.array} from {self.start} to {self.stop}{order}"

    def is_leaf(self, place: Place, i: jax.Array | int) -> bool:
        """Whether it is leaf i at a place, in the order of the place."""
        return isinstance(i, int) and self == self.of_leaf(place, i)

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

    def ordered(self, leaf: jax.Array) -> jax.Array:
        """A value of the leaf with its dims in the order of the part's own array."""
        return leaf.transpose(self.order) if self.order else leaf

    def in_order(self, rows: jax.Array) -> jax.Array:
        """Rows of the part, brought to the order of its own array."""
        if not self.order:
            return rows
        leaves = rows.reshape(rows.shape[0], *self.shape).transpose(0, *(dim + 1 for dim in self.order))
        return leaves.reshape(rows.shape)

    def restored(self, rows: jax.Array) -> jax.Array:
        """The inverse of `in_order`."""
        if not self.order:
            return rows
        leaves = rows.reshape(rows.shape[0], *(self.shape[dim] for dim in self.order))
        return leaves.transpose(0, *(int(dim) + 1 for dim in np.argsort(self.order))).reshape(rows.shape)
