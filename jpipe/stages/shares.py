"""Shares of a stage's update between its replicas (ZeRO, stage 1: Rajbhandari et al., 2020, section 5.1).

Each of the P replicas of a stage updates 1 / P of the weights, and keeps the optimizer's state of these
alone. A *division* says how the leaves that one turn of an update reads are divided into P shares:

    evenly along one dim   the update works element by element, and P divides the dim
    as a padded vector     the update works element by element
    by whole leaves        any other update: P leaves of one shape, one for each replica

A division brings leaves into *stacked* form: one array that has the P shares along two neighbouring axes,
`[..., copies, data, ...]`. Replicas send slices of it. Share k belongs to copy
`k // data` of the stage, on replica `k % data` along the mesh axis "data".
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jpipe import packing
from jpipe.packing import Leaf


class ReplicaCounts(NamedTuple):
    """Number of replicas of a stage, as copies and along "data".

    Attributes:
      copies: devices along the axis "stage" that run the stage.
      data: size of the axis "data".
    """

    copies: int
    data: int

    @property
    def number(self) -> int:
        """P, the number of replicas."""
        return self.copies * self.data


class Division(Protocol):
    """A division of the leaves of one turn over the replicas of a stage.

    Attributes:
      replicas: the replicas of the stage.
      axis: the axis of the stacked form along which the parts of the copies are. The next axis is that of "data".
      num_leaves: leaves in a turn.
    """

    @property
    def replicas(self) -> ReplicaCounts: ...

    @property
    def axis(self) -> int: ...

    @property
    def num_leaves(self) -> int: ...

    def stacked(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """Brings leaves into stacked form."""
        ...

    def leaves(self, stacked: jax.Array) -> list[jax.Array]:
        """Takes the leaves out of a stacked form."""
        ...

    def to_share(self, part: jax.Array) -> jax.Array:
        """Removes the two axes of one part of a stacked form, for the update."""
        ...

    def from_share(self, share: jax.Array) -> jax.Array:
        """Converts a share to the part of a stacked form."""
        ...

    def part_spec(self, spec: tuple) -> tuple:
        """The split by the compiler of one part of a stacked form, without its two axes, of leaves with a spec."""
        ...


@dataclasses.dataclass(frozen=True)
class AlongDim:
    """One leaf, divided evenly along a dim.

    The compiler may have split the dim over other axes of the mesh, into `num_blocks` blocks. Each block is
    divided, so that no number moves along these axes.
    """

    replicas: ReplicaCounts
    shape: tuple[int, ...]
    spec: tuple
    dim: int
    num_blocks: int

    num_leaves: ClassVar[int] = 1

    @property
    def axis(self) -> int:
        return self.dim + 1

    def share(self, dtype: Any) -> Leaf:
        """A share of a leaf of this dtype."""
        shape = list(self.shape)
        shape[self.dim] //= self.replicas.number
        return Leaf(jax.ShapeDtypeStruct(tuple(shape), dtype), 1, self.spec)

    def view(self, *between: int) -> tuple[int, ...]:
        """The leaf's shape with its dim as blocks, `between`, and the numbers of a share in a block."""
        before, after = self.shape[: self.dim], self.shape[self.dim + 1 :]
        size = self.shape[self.dim] // self.num_blocks // self.replicas.number
        return (*before, self.num_blocks, *between, size, *after)

    def stacked(self, leaves: Sequence[jax.Array]) -> jax.Array:
        stacked = leaves[0].reshape(self.view(*self.replicas))
        before, after = self.spec[: self.axis], self.spec[self.axis :]
        spec = (*before, None, None, None, *after) if self.spec else ()
        return packing.split_as(spec, stacked)

    def leaves(self, stacked: jax.Array) -> list[jax.Array]:
        return [packing.split_as(self.spec, stacked.reshape(self.shape))]

    def to_share(self, part: jax.Array) -> jax.Array:
        leaf = self.share(part.dtype)
        return packing.split_as(self.spec, part.reshape(leaf.aval.shape))

    def from_share(self, share: jax.Array) -> jax.Array:
        return packing.split_as(self.part_spec(self.spec), share.reshape(self.view()))

    def part_spec(self, spec: tuple) -> tuple:
        return (*spec[: self.axis], None, *spec[self.axis :]) if spec else ()


@dataclasses.dataclass(frozen=True)
class AsVector:
    """One leaf as a vector, with zeros at its end that make the shares equal."""

    replicas: ReplicaCounts
    shape: tuple[int, ...]

    axis: ClassVar[int] = 0
    num_leaves: ClassVar[int] = 1

    @property
    def size(self) -> int:
        """Numbers of a share."""
        return -(-math.prod(self.shape) // self.replicas.number)

    def share(self, dtype: Any) -> Leaf:
        """A share of a leaf of this dtype."""
        aval = jax.ShapeDtypeStruct((self.size,), dtype)
        return Leaf(aval, in_vector=True)

    def stacked(self, leaves: Sequence[jax.Array]) -> jax.Array:
        vector = leaves[0].ravel()
        missing = self.size * self.replicas.number - vector.size
        if missing:
            vector = jnp.pad(vector, (0, missing))
        return vector.reshape(*self.replicas, self.size)

    def leaves(self, stacked: jax.Array) -> list[jax.Array]:
        return [stacked.ravel()[: math.prod(self.shape)].reshape(self.shape)]

    def to_share(self, part: jax.Array) -> jax.Array:
        return part

    def from_share(self, share: jax.Array) -> jax.Array:
        return share

    def part_spec(self, spec: tuple) -> tuple:
        return ()


@dataclasses.dataclass(frozen=True)
class WholeLeaves:
    """Up to P leaves of one shape. Leaf n belongs to share `(first + n) % P`; other shares have none."""

    replicas: ReplicaCounts
    num_leaves: int
    first: int = 0

    axis: ClassVar[int] = 0

    def leaf_of(self, share: int) -> int | None:
        """The leaf of a share; None: it has none."""
        number = (share - self.first) % self.replicas.number
        return number if number < self.num_leaves else None

    @property
    def leaf_of_share(self) -> list[int | None]:
        """`leaf_of` of every share."""
        return [self.leaf_of(k) for k in range(self.replicas.number)]

    def stacked(self, leaves: Sequence[jax.Array]) -> jax.Array:
        numbers = self.leaf_of_share
        nothing = jnp.zeros_like(leaves[0])
        by_share = [nothing if n is None else leaves[n] for n in numbers]
        return jnp.stack(by_share).reshape(*self.replicas, *nothing.shape)

    def leaves(self, stacked: jax.Array) -> list[jax.Array]:
        P = self.replicas.number
        by_share = stacked.reshape(P, *stacked.shape[2:])
        return [by_share[(self.first + n) % P] for n in range(self.num_leaves)]

    def to_share(self, part: jax.Array) -> jax.Array:
        return part

    def from_share(self, share: jax.Array) -> jax.Array:
        return share

    def part_spec(self, spec: tuple) -> tuple:
        return spec


def division_of_leaf(
    replicas: ReplicaCounts,
    shape: tuple[int, ...],
    spec: tuple,
    is_pooled: bool,
    axis_sizes: Mapping[str, int],
) -> AlongDim | AsVector | None:
    """The division of a leaf whose update works element by element; None if it stays whole.

    Args:
      replicas: the replicas of the stage.
      shape: the shape of the leaf.
      spec: the split of the leaf over automatic axes.
      is_pooled: whether the leaf is in a pool, whose rows keep their shape.
      axis_sizes: sizes of the automatic axes.
    """
    blocks = [
        math.prod(axis_sizes[axis] for axis in axes) for axes in packing.axes_by_dim(spec or (None,) * len(shape))
    ]
    for dim, n in enumerate(shape) if is_pooled else ():
        if n % (blocks[dim] * replicas.number) == 0:
            return AlongDim(replicas, shape, spec, dim, blocks[dim])
    return None if any(spec) else AsVector(replicas, shape)


# -- Parts of stacked forms, and back


def part_of(stacked: jax.Array, axis: int, number: jax.Array | int) -> jax.Array:
    """Takes one part of a stacked form along one of its two axes, without the axis."""
    return lax.dynamic_index_in_dim(stacked, number, axis, keepdims=False)


def alone(part: jax.Array, axis: int, number: jax.Array | int, size: int) -> jax.Array:
    """A stacked form of `size` parts along an axis that has one part, and zeros elsewhere."""
    shape = list(part.shape)
    shape.insert(axis, size)
    return lax.dynamic_update_index_in_dim(jnp.zeros(shape, part.dtype), part, number, axis)
