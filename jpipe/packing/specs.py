"""Specs: the axes of the mesh that the dims of an array are split over."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec


def axes(spec: tuple) -> list[str]:
    """The axes of the mesh in a spec.

    Example:
      >>> axes((None, "model", ("a", "b")))
      ['model', 'a', 'b']
    """
    return [name for names in axes_by_dim(spec) for name in names]


def axes_by_dim(spec: Sequence) -> list[tuple]:
    """The axes of the mesh that each dim of a spec is split over.

    Example:
      >>> axes_by_dim((None, "model", ("a", "b")))
      [(), ('model',), ('a', 'b')]
    """
    return [(names,) if isinstance(names, str) else names or () for names in spec]


def part_shape(shape: Sequence[int], spec: Sequence, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a device's part of an array.

    Args:
      shape: the shape of the array, which the axes divide.
      spec: the axes that each of the first dims is split over.
      sizes: axis -> number of devices.

    Example:
      >>> part_shape((8, 6, 5), (("data", "fsdp"), "model"), {"data": 2, "fsdp": 2, "model": 3})
      (2, 2, 5)
    """
    dims = [*axes_by_dim(spec), *[()] * (len(shape) - len(spec))]
    return tuple(size // math.prod(sizes[name] for name in names) for size, names in zip(shape, dims, strict=True))


def split_as(spec: tuple, value: jax.Array) -> jax.Array:
    """Splits `value` by a spec; `()` leaves that to the compiler.

    A value with a spec needs a surrounding `shard_map` whose mesh has the axes.
    """
    if not spec:
        return value
    return lax.with_sharding_constraint(value, PartitionSpec(*spec))


def gathered(value: jax.Array, spec: tuple, axis: str) -> jax.Array:
    """Gathers `value`, which `spec` splits, along an axis of the mesh."""
    if axis not in axes(spec):
        return value
    return split_as(without(spec, axis), value)


def without(spec: tuple, axis: str) -> tuple:
    """Removes an axis of the mesh from a spec.

    Example:
      >>> without(("fsdp", ("model", "fsdp"), None), "fsdp")
      (None, ('model',), None)
    """
    return tuple(tuple(name for name in names if name != axis) or None for names in axes_by_dim(spec))


def divisible(spec: Sequence, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple:
    """Sets the entry of a spec to None for each dim that its axes do not divide.

    Args:
      spec: the axes that each dim, or each of the first dims, is split over, or None.
      shape: the shape of the array.
      sizes: axis -> number of devices.

    Example:
      >>> divisible(("fsdp", "model"), (4, 5, 6), {"fsdp": 2, "model": 2})
      ('fsdp', None, None)
    """
    dims = [*axes_by_dim(spec), *[()] * (len(shape) - len(spec))]
    divided: list[Any] = [
        () if n % math.prod(sizes[axis] for axis in dim) else dim for n, dim in zip(shape, dims, strict=True)
    ]
    return tuple(dim[0] if len(dim) == 1 else dim or None for dim in divided)
