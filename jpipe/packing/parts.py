"""Parts of packed arrays, which get arrays of their own."""

from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from jpipe.packing.access import with_last_dim_innermost
from jpipe.packing.places import Place
from jpipe.packing.specs import axes, split_as


class Part(NamedTuple):
    """A part of a packed array.

    Attributes:
      array: the name of the array.
      start, stop: its indices, after the leading axis.
      shape: the shape of the leaf that it is, if that has an order.
      order: the order of the leaf's dims in the part's own array, see `Leaf`; () for the order that they have.
      spec: how the part's own array splits the leaf; () for the split of the array. A leaf with an order has no axes
        here.
    """

    array: str
    start: int
    stop: int
    shape: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    spec: tuple = ()

    @classmethod
    def of_leaf(cls, place: Place, i: int) -> "Part":
        """The part that is leaf i at a place."""
        start = int(place.start(i))
        shape = place.shape if place.order else ()
        return cls(place.array, start, start + place.block[0], shape, place.order)

    @property
    def as_stored(self) -> "Part":
        """The part with the leaf as the array has it."""
        return self._replace(shape=(), order=(), spec=())

    @property
    def size(self) -> int:
        """The number of indices."""
        return self.stop - self.start

    @property
    def name(self) -> str:
        """The name of the part's own array."""
        order = f" in order {list(self.order)} of {list(self.shape)}" if self.order else ""
        split = f" split as {list(self.spec)}" if self.spec else ""
        return f"{self.array} from {self.start} to {self.stop}{order}{split}"

    def row_name(self, row: int) -> str:
        """The name of an array of a row of the part alone."""
        return f"{self.name} of row {row}" if row else self.name

    def covers(self, other: "Part") -> bool:
        """Whether those who read another part of the array find it here, in the order that they want."""
        inside = self.start <= other.start and other.stop <= self.stop
        return inside and (not self.order or (self.shape, self.order) == (other.shape, other.order))

    def holds(self, place: Place, i: jax.Array | int) -> bool:
        """Whether it covers leaf i at a place, or any leaf if i is not known."""
        ends = (i, i) if isinstance(i, int) else (0, place.count - 1)
        return all(self.covers(self.of_leaf(place, n)) for n in ends)

    def overlaps(self, other: "Part") -> bool:
        """Whether an index is in both parts of one array."""
        return self.start < other.stop and other.start < self.stop

    def of(self, array: jax.Array) -> jax.Array:
        """The part of some rows of the array."""
        return lax.slice_in_dim(array, self.start, self.stop, axis=1)

    def copy(self, array: jax.Array, dtype: np.dtype) -> jax.Array:
        """The part's own array for some rows of the array, in a dtype."""
        rows = self.of(array).astype(dtype)
        if self.spec:  # a cast comes before a gather, which then moves fewer bytes
            rows = split_as((None, None, *self.spec), rows)
        rows = self.in_order(rows)
        return with_last_dim_innermost(rows) if self.spec and not axes(self.spec) else rows

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
