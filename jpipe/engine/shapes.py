"""Local shapes of arrays on one device, and the packings of a state.

Letters: R columns per device, K slots of a ring.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe import packing
from jpipe.layers.sharding import microbatch_spec
from jpipe.lowering.array_rows import ArrayRows
from jpipe.lowering.channels import Route
from jpipe.mesh import row_axes
from jpipe.packing import Leaf, Packing


@dataclasses.dataclass(frozen=True)
class StatePackings:
    """The packing of the leaves of each use.

    Attributes:
      parameters: the weights.
      accumulators: the gradients.
      mutable_state: the layers' mutable state.
      statistics: statistics of a minibatch, kept until the state moves.
      rings: name of a ring of stashes -> its stashed values.
      messages: the routes, each with its message.
      optimizer_state: the optimizer's state; None in forward-only tables.
      embedded: leaves of the outputs of an embedding that all devices run together.
      head_input: leaves of the inputs of a head that all devices run together.
    """

    parameters: Packing
    accumulators: Packing
    mutable_state: Packing
    statistics: Packing
    rings: Mapping[str, Packing]
    messages: Sequence[tuple[Route, Packing]]
    optimizer_state: Packing | None = None
    embedded: Sequence[Leaf] = ()
    head_input: Sequence[Leaf] = ()


def stored_shapes(mesh: Mesh | None, leaves: Iterable[Leaf]) -> list[jax.ShapeDtypeStruct]:
    """The shapes of leaves of an activation in the state.

    All arrays there have a first axis, which is split over devices: of a leaf that the compiler splits one more than
    the leaf, of a single number one.
    """
    return [
        stored_shape(mesh, leaf, 1)
        if leaf.spec or not leaf.aval.shape
        else jax.ShapeDtypeStruct(leaf.aval.shape, leaf.aval.dtype)
        for leaf in leaves
    ]


def stored_shape(mesh: Mesh | None, leaf: Leaf, number: int) -> jax.ShapeDtypeStruct:
    """The shape of a number of leaves in the state."""
    shape, sharding = (number, *leaf.aval.shape), None
    if mesh is not None and any(leaf.spec):
        sharding = NamedSharding(mesh, _spelled([None, *leaf.spec]))
    return jax.ShapeDtypeStruct(shape, leaf.aval.dtype, sharding=sharding)


def stored_on_host(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an array of slots in host memory. TPUs move whole tiles of the last two dims."""
    return (shape[0], *[1] * (3 - len(shape)), *shape[1:])


def microbatch_shapes(mesh: Mesh | None, microbatch: Any, number: int) -> Any:
    """Shapes `[number, microbatch, ...]` of several microbatches.

    Args:
      mesh: gives arrays that are split by rows the sharding that says how; None: all arrays
        are whole on their device.
      microbatch: the abstract microbatch.
      number: the number of microbatches.
    """

    def shape(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = None
        if mesh is not None and (names := row_axes(mesh.shape)):
            num_rows = jax.tree.leaves(microbatch["inputs"])[0].shape[0]
            spec = microbatch_spec(a.shape, num_rows, {name: mesh.shape[name] for name in names})
            sharding = NamedSharding(mesh, _spelled([None, *spec]))
        return jax.ShapeDtypeStruct((number, *a.shape), a.dtype, sharding=sharding)

    return jax.tree.map(shape, microbatch)


def _spelled(dims: Sequence) -> PartitionSpec:
    """A spec as XLA spells it, without None at the end.

    With another spelling JAX would compile a second program for the same arrays.
    """
    dims = list(dims)
    while dims and dims[-1] is None:
        dims.pop()
    return PartitionSpec(*dims)


def local_bytes(shapes: Any, platform: str) -> int:
    """Bytes of a tree of local shapes on one device of a platform, such as "cpu" or "tpu"."""
    return sum(
        packing.array_bytes(
            a.sharding.shard_shape(a.shape) if a.sharding else a.shape,
            a.dtype,
            platform,
        )
        for a in jax.tree.leaves(shapes)
    )


def packed_shapes(
    mesh: Mesh | None, pack: Packing, rows: ArrayRows | int | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Local shapes of packed arrays.

    Args:
      mesh: gives arrays that are split over automatic axes the sharding that says how; None: all
        arrays are whole on their device.
      pack: the packing.
      rows: number of rows of each array, or of all of them, along a leading axis; None: there is no such axis.
    """

    def lead(name: str) -> tuple[int, ...]:
        if rows is None:
            return ()
        return (rows if isinstance(rows, int) else rows.number(name),)

    shapes = {name: jax.ShapeDtypeStruct((*lead(name), *a.shape), a.dtype) for name, a in pack.arrays.items()}
    for name, spec in pack.specs.items() if mesh is not None else ():
        assert mesh is not None
        dims = [None] * (len(lead(name)) + 1) + list(spec)
        sharding = NamedSharding(mesh, _spelled(dims))
        a = shapes[name]
        shapes[name] = jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
    return shapes
