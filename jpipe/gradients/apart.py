"""Sums of the gradients of large weights, each in an array of its own between updates.

A microbatch adds a product to each of these sums. cuBLAS adds a product to a matrix in place, if this is a whole array.
In a part of a vector a kernel of its own would read the product and the sum, and write the sum. So a state holds the
sums apart where the platform gains by it. An update changes whole vectors: it joins the arrays before, and cuts them
again afterwards.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jpipe.packing import Part, Place

SMALL = 2**14
"""The most numbers of a weight whose sum shares an array with others."""

Packed: TypeAlias = Mapping[str, jax.Array]


class SumArray(NamedTuple):
    """A packed array of sums that is cut.

    A part has the order of dims in which the layer reads its weight, and so XLA writes its gradient in that order.

    Attributes:
      num_rows: R.
      alone: the parts of which each row has an array of its own, in order.
      between: the ranges between them, in order, which share one array.
    """

    num_rows: int
    alone: Sequence[Part]
    between: Sequence[Part]


@dataclasses.dataclass(frozen=True)
class ApartSums:
    """The packed arrays of sums that are cut.

    Attributes:
      arrays: name -> how it is cut.
      orders_all: whether sums that share an array have the order of their weights too. Only who knows the stage can
        read them then.
    """

    arrays: Mapping[str, SumArray] = dataclasses.field(default_factory=dict)
    orders_all: bool = False

    @property
    def has_rows(self) -> bool:
        """True if an array has several rows, so that a sum lies apart for each stage of a device."""
        return any(array.num_rows > 1 for array in self.arrays.values())

    def shapes(self, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of the arrays in a state, from those of the packed arrays `[R, n, ...]`."""

        def shape(a: jax.ShapeDtypeStruct, number: int, parts: Sequence[Part]) -> jax.ShapeDtypeStruct:
            size = sum(part.size for part in parts)
            return jax.ShapeDtypeStruct((number, size, *a.shape[2:]), a.dtype, sharding=a.sharding)

        cut = {name: a for name, a in shapes.items() if name not in self.arrays}
        for name, (num_rows, alone, between) in self.arrays.items():
            for part, row in itertools.product(alone, range(num_rows)):
                cut[part.row_name(row)] = shape(shapes[name], 1, [part])
            if between:
                cut[self._rest(name)] = shape(shapes[name], num_rows, between)
        return cut

    def names(self, packed: Iterable[str]) -> set[str]:
        """The names of packed arrays, and of the arrays in a state that hold parts of them."""
        names = set(packed)
        for name in names & self.arrays.keys():
            array = self.arrays[name]
            names |= {part.row_name(row) for part in array.alone for row in range(array.num_rows)} | {self._rest(name)}
        return names

    def joined(self, arrays: Packed, of_stage: Iterable[tuple[Place, int]] = ()) -> Packed:
        """The packed arrays of sums, from those of a state.

        Args:
          arrays: the arrays of a state.
          of_stage: the places of the sums of the stage that reads them, with the number of the leaf. Other stages have
            other sums there.
        """
        left = dict(arrays)
        for name, (num_rows, alone, between) in self.arrays.items():
            pieces = {
                part: part.restored(jnp.concatenate([left.pop(part.row_name(row)) for row in range(num_rows)]))
                for part in alone
            }
            if between:
                rest, start = left.pop(self._rest(name)), 0
                for part in between:
                    pieces[part] = Part(name, start, start + part.size).of(rest)
                    start += part.size
            left[name] = jnp.concatenate([pieces[part] for part in sorted(pieces)], axis=1)
            if self.orders_all:
                parts = {Part.of_leaf(place, i) for place, i in of_stage if place.array == name}
                left[name] = _restored(left[name], sorted(part for part in parts.difference(alone) if part.order))
        return left

    def cut(self, arrays: Packed) -> Packed:
        """The arrays of a state, from the packed arrays of sums."""
        parts = {name: a for name, a in arrays.items() if name not in self.arrays}
        for name, (num_rows, alone, between) in self.arrays.items():
            for part, row in itertools.product(alone, range(num_rows)):
                parts[part.row_name(row)] = part.in_order(part.of(arrays[name][row : row + 1]))
            if between:
                parts[self._rest(name)] = jnp.concatenate([part.of(arrays[name]) for part in between], axis=1)
        return parts

    def added(
        self, arrays: Packed, places: Sequence[Place], values: Sequence[jax.Array], i: jax.Array | int, row: int
    ) -> tuple[Packed, list[Place], list[jax.Array]]:
        """Adds a value to leaf i of every place that has an array of its own.

        Args:
          arrays: the arrays of a state.
          places: places in the packed arrays.
          values: one per place.
          i: number of the leaf.
          row: the row of the stage in the packed arrays.

        Returns:
          The arrays, and what is left to add: places in them, and the values.
        """
        left_places, left_values = [], []
        for place, value in zip(places, values, strict=True):
            if place.array in self.arrays:
                assert isinstance(i, int)  # layers are unrolled where sums are apart
                part = Part.of_leaf(place, i)
                if part in self.arrays[place.array].alone:
                    name = part.row_name(row)
                    old = arrays[name]
                    # In the shape of the weight: XLA then sees the sum of two matrices.
                    value = part.ordered(value)
                    new = old.reshape(value.shape) + value.astype(old.dtype)
                    arrays = {**arrays, name: new.reshape(old.shape)}
                    continue
                value = part.ordered(value) if self.orders_all else value
                place = self._in_rest(place, i)
            left_places.append(place)
            left_values.append(value)
        return arrays, left_places, left_values

    def _rest(self, array: str) -> str:
        """The name of the array of all ranges between the parts of a packed array."""
        return f"{array} rest" + " in order" * self.orders_all

    def _in_rest(self, place: Place, i: int) -> Place:
        """The place in the array of the ranges of which leaf i is leaf i of a place."""
        start, base = 0, int(place.start(i))
        for part in self.arrays[place.array].between:
            if part.start <= base < part.stop:
                moved = base - part.start + start - i * place.stride
                return dataclasses.replace(place, array=self._rest(place.array), base=moved)
            start += part.size
        raise AssertionError(f"leaf {i} at {place} lies in no range")


def apart_sums(leaves: Iterable[tuple[Place, int]], shapes: Mapping[str, tuple[int, int]]) -> ApartSums:
    """The sums that lie apart: of large weights at indices where no stage has another one.

    Args:
      leaves: the place of each sum on each stage, and the number of the leaf there.
      shapes: name of a packed array that may be cut -> its numbers of rows and of indices in a row.
    """
    parts: dict[str, set[Part]] = {name: set() for name in shapes}
    large = set()
    for place, i in leaves:
        if place.array in parts:
            part = Part.of_leaf(place, i)
            parts[place.array].add(part)
            large |= {part} if math.prod(place.shape) > SMALL else set()
    arrays = {}
    for name, (num_rows, size) in shapes.items():
        if alone := [part for part in _without_overlap(parts[name]) if part in large]:
            arrays[name] = SumArray(num_rows, alone, _between(alone, name, size))
    return ApartSums(arrays)


def _restored(array: jax.Array, parts: Sequence[Part]) -> jax.Array:
    """A packed array with the leaves of some parts in the order of their own dims."""
    pieces = {part: part.restored(part.of(array)) for part in parts}
    if parts:
        pieces |= {part: part.of(array) for part in _between(parts, parts[0].array, array.shape[1])}
    return jnp.concatenate([pieces[part] for part in sorted(pieces)], axis=1) if parts else array


def _without_overlap(parts: Iterable[Part]) -> list[Part]:
    """The parts that overlap no other one, in order: stages may have other leaves at their indices."""
    overlapping: set[Part] = set()
    in_order = sorted(parts, key=lambda part: (part.start, part.stop))
    furthest: Part | None = None
    for part in in_order:
        if furthest is not None and part.overlaps(furthest):
            overlapping |= {part, furthest}
        if furthest is None or part.stop > furthest.stop:
            furthest = part
    return [part for part in in_order if part not in overlapping]


def _between(parts: Sequence[Part], name: str, size: int) -> list[Part]:
    """The ranges of a packed array that are in none of its parts."""
    starts = [0, *(part.stop for part in parts)]
    stops = [*(part.start for part in parts), size]
    return [Part(name, start, stop) for start, stop in zip(starts, stops) if start < stop]
