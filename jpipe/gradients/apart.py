"""Sums of the gradients of large weights, each in an array of its own between updates.

A microbatch adds a product to each of these sums. cuBLAS adds a product to a matrix in place, if this is a whole array.
In a part of a vector a kernel of its own would read the product and the sum, and write the sum. So a state holds the
sums apart where the platform gains by it. An update changes whole vectors: it joins the arrays before, and cuts them
again afterwards.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jpipe.lowering.target import Target
from jpipe.packing import Part, Place
from jpipe.schedule import Schedule

SMALL = 2**14
"""The most numbers of a weight whose sum shares an array with others."""

Packed: TypeAlias = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class ApartSums:
    """The packed arrays of sums that are cut.

    Attributes:
      alone: name of a packed array -> the parts with an array of their own, in order.
      between: name of a packed array -> the ranges between them, in order, which share one array.
    """

    alone: Mapping[str, Sequence[Part]] = dataclasses.field(default_factory=dict)
    between: Mapping[str, Sequence[Part]] = dataclasses.field(default_factory=dict)

    def shapes(self, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of the arrays in a state, from those of the packed arrays `[R, n, ...]`."""

        def shape(a: jax.ShapeDtypeStruct, size: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((a.shape[0], size, *a.shape[2:]), a.dtype, sharding=a.sharding)

        cut = {name: a for name, a in shapes.items() if name not in self.alone}
        for name, parts in self.alone.items():
            cut |= {part.name: shape(shapes[name], part.stop - part.start) for part in parts}
            if ranges := self.between[name]:
                cut[_rest(name)] = shape(shapes[name], sum(part.stop - part.start for part in ranges))
        return cut

    def names(self, packed: Iterable[str]) -> set[str]:
        """The names of packed arrays, and of the arrays in a state that hold parts of them."""
        names = set(packed)
        for name in names & self.alone.keys():
            names |= {*(part.name for part in self.alone[name]), _rest(name)}
        return names

    def joined(self, arrays: Packed) -> Packed:
        """The packed arrays of sums, from those of a state."""
        cut = self.names(self.alone) - self.alone.keys()
        whole = {name: a for name, a in arrays.items() if name not in cut}
        for name, parts in self.alone.items():
            pieces = {part: arrays[part.name] for part in parts}
            start = 0
            for part in self.between[name]:
                size = part.stop - part.start
                pieces[part] = Part(_rest(name), start, start + size).of(arrays[_rest(name)])
                start += size
            whole[name] = jnp.concatenate([pieces[part] for part in sorted(pieces)], axis=1)
        return whole

    def cut(self, arrays: Packed) -> Packed:
        """The arrays of a state, from the packed arrays of sums."""
        parts = {name: a for name, a in arrays.items() if name not in self.alone}
        for name, alone in self.alone.items():
            parts |= {part.name: part.of(arrays[name]) for part in alone}
            if ranges := self.between[name]:
                parts[_rest(name)] = jnp.concatenate([part.of(arrays[name]) for part in ranges], axis=1)
        return parts

    def added(
        self, arrays: Packed, places: Sequence[Place], values: Sequence[jax.Array], i: jax.Array | int
    ) -> tuple[Packed, list[Place], list[jax.Array]]:
        """Adds a value to leaf i of every place that has an array of its own.

        Args:
          arrays: the arrays of a state.
          places: places in the packed arrays.
          values: one per place.
          i: number of the leaf.

        Returns:
          The arrays, and what is left to add: places in them, and the values.
        """
        left_places, left_values = [], []
        for place, value in zip(places, values, strict=True):
            if place.array in self.alone:
                assert isinstance(i, int)  # layers are unrolled where sums are apart
                part = Part.of_leaf(place, i)
                if part in self.alone[place.array]:
                    old = arrays[part.name]
                    # In the shape of the weight: XLA then sees the sum of two matrices.
                    new = old.reshape(value.shape) + value.astype(old.dtype)
                    arrays = {**arrays, part.name: new.reshape(old.shape)}
                    continue
                place = self._in_rest(place, i)
            left_places.append(place)
            left_values.append(value)
        return arrays, left_places, left_values

    def _in_rest(self, place: Place, i: int) -> Place:
        """The place in the array of the ranges of which leaf i is leaf i of a place."""
        start, base = 0, int(place.start(i))
        for part in self.between[place.array]:
            if part.start <= base < part.stop:
                moved = base - part.start + start - i * place.stride
                return dataclasses.replace(place, array=_rest(place.array), base=moved)
            start += part.stop - part.start
        raise AssertionError(f"leaf {i} at {place} lies in no range")


def _rest(array: str) -> str:
    """The name of the array of all ranges between the parts of a packed array."""
    return f"{array} rest"


def lie_apart(schedule: Schedule, target: Target) -> bool:
    """Returns whether a state holds sums of large weights apart.

    With several stages on a device the row of a sum is known at run time only, and cuBLAS would not add in place.
    """
    return target.sums_apart and schedule.num_columns == schedule.num_devices


def apart_sums(leaves: Iterable[tuple[Place, int]], sizes: Mapping[str, int]) -> ApartSums:
    """The sums that lie apart: of large weights at indices where no stage has another one.

    Args:
      leaves: the place of each sum on each stage, and the number of the leaf there.
      sizes: name of a packed array that may be cut -> the size of its axis after the leading one.
    """
    parts: dict[str, set[Part]] = {name: set() for name in sizes}
    large = set()
    for place, i in leaves:
        if place.array in parts:
            part = Part.of_leaf(place, i)
            parts[place.array].add(part)
            large |= {part} if math.prod(place.shape) > SMALL else set()
    alone = {
        name: [part for part in _without_overlap(array_parts) if part in large] for name, array_parts in parts.items()
    }
    alone = {name: array_parts for name, array_parts in alone.items() if array_parts}
    return ApartSums(alone, {name: _between(array_parts, name, sizes[name]) for name, array_parts in alone.items()})


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
