"""The layout of the training state: shape, sharding, kind of memory and bytes of each of its arrays.

The arrays of one field of `PipelineState` are a *group*. A group is either replicated over the mesh axis "data"
(weights, optimizer state) or private to a device (gradients, everything in flight, and the optimizer's state
if replicas share it), and it has a kind of memory.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe import packing
from jpipe.engine.shapes import local_bytes
from jpipe.engine.state import STATE_ARRAYS
from jpipe.engine.state_arrays import BUFFERS, OnReplicas, StateArray, StateFacts
from jpipe.mesh import DATA, DEVICE_MEMORY, HOST_MEMORY, STAGE

REPLICATED = PartitionSpec(STAGE)
"""How the first axis of a replicated array is split."""


def per_device_spec(mesh: Mesh) -> PartitionSpec:
    """The split of the first axis of a private array."""
    return PartitionSpec((DATA, STAGE) if DATA in mesh.shape else STAGE)


def batch_spec(mesh: Mesh) -> PartitionSpec:
    """The split of the first axis of a minibatch."""
    return PartitionSpec(DATA if DATA in mesh.shape else None)


@dataclasses.dataclass(frozen=True)
class ArrayGroup:
    """Arrays of the state that replicas hold in the same way.

    Attributes:
      name: name of the group.
      shapes: tree of the local shapes on one device. The first axis is split over devices; a shape
        with a sharding is split over automatic axes of the mesh too, as its sharding says.
      spec: the split of the first axis, `REPLICATED` or `per_device_spec(mesh)`.
      on_host: the names in `shapes`, which is then a dict, of the arrays in host memory.
      held: the relation between the arrays of the replicas.
    """

    name: str
    shapes: Any
    spec: PartitionSpec
    on_host: frozenset[str] = frozenset()
    held: OnReplicas = OnReplicas.EQUAL

    def num_bytes(self, platform: str, memory_kind: str = DEVICE_MEMORY) -> int:
        """Bytes on one device of a platform, such as "cpu" or "tpu", in its own memory or in the host's."""
        shapes = self.shapes
        if self.on_host or memory_kind == HOST_MEMORY:
            names = self.on_host
            if memory_kind == DEVICE_MEMORY:
                names = shapes.keys() - self.on_host
            shapes = [shapes[name] for name in names]
        return local_bytes(shapes, platform)


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """The arrays of a training state.

    Attributes:
      mesh: the devices; None: only shapes and bytes are asked for.
      groups: field of `PipelineState` -> its arrays. A forward-only table has "parameters", "mutable_state",
        "message_compression" and "buffers".
    """

    mesh: Mesh | None
    groups: Mapping[str, ArrayGroup]

    def __getitem__(self, name: str) -> ArrayGroup:
        return self.groups[name]

    @property
    def _mesh(self) -> Mesh:
        assert self.mesh is not None
        return self.mesh

    @property
    def num_devices(self) -> int:
        """Devices of a pipeline, along the axis "stage"."""
        return self._mesh.shape[STAGE]

    @property
    def num_replicas(self) -> int:
        """Replicas of each stage, along the axis "data"."""
        return self._mesh.shape.get(DATA, 1)

    def arrays(self) -> Iterator[tuple[StateArray, ArrayGroup]]:
        """The arrays of `STATE_ARRAYS` that the state has."""
        for array in STATE_ARRAYS:
            group = self.groups.get(array.field)
            if group is None or not array.in_buffers:
                if group is not None:
                    yield array, group
            elif array.name in group.shapes:
                shapes = group.shapes[array.name]
                on_host = array.name in group.on_host
                yield (
                    array,
                    dataclasses.replace(
                        group,
                        name=array.name,
                        shapes=shapes,
                        on_host=frozenset(shapes if on_host else ()),
                    ),
                )

    def bytes_by_field(self, platform: str) -> dict[str, int]:
        """Field of `jpipe.Memory` -> bytes of a device that its arrays take in the device's own memory."""
        num_bytes: dict[str, int] = collections.Counter()
        for array, group in self.arrays():
            if array.memory is not None:
                num_bytes[array.memory] += group.num_bytes(platform)
        return num_bytes

    def host_bytes(self, platform: str) -> dict[str, int]:
        """Name of an array -> bytes of a device that it takes in host memory."""
        return {array.name: group.num_bytes(platform, HOST_MEMORY) for array, group in self.arrays() if group.on_host}

    def local_shapes(self, names: Iterable[str]) -> dict[str, Any]:
        """Local shapes of groups, by name."""
        return {name: self.groups[name].shapes for name in names}

    def global_shapes(self, names: Iterable[str]) -> dict[str, Any]:
        """Global shapes of groups, with their shardings, by name."""
        shapes_of_groups = {}
        for name in names:
            group = self.groups[name]
            shapes_of_groups[name] = self.globally(group.shapes, group.spec)
            for key in group.on_host:
                shapes = group.shapes[key]
                shapes_of_groups[name][key] = self.globally(shapes, group.spec, HOST_MEMORY)
        return shapes_of_groups

    def globally(self, shapes: Any, spec: PartitionSpec, memory_kind: str = DEVICE_MEMORY) -> Any:
        """Global shapes, with shardings, of a tree of local shapes.

        Args:
          shapes: local shapes.
          spec: the split of their first axis.
          memory_kind: the memory that holds the arrays.
        """
        num_parts = self.num_devices
        if spec == per_device_spec(self._mesh):
            num_parts *= self.num_replicas
        # A sharding without a kind of memory is in the device's default memory.
        kind = None if memory_kind == DEVICE_MEMORY else memory_kind

        def whole(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            inner = () if a.sharding is None else a.sharding.spec[1:]
            split = PartitionSpec(*spec, *inner)
            sharding = NamedSharding(self._mesh, split, memory_kind=kind)
            shape = (num_parts * a.shape[0], *a.shape[1:])
            return jax.ShapeDtypeStruct(shape, a.dtype, sharding=sharding)

        return jax.tree.map(whole, shapes)

    def leaf_bytes(self, places: Sequence[packing.Place], dtype_of: Mapping) -> int:
        """Bytes of leaves on one device.

        Args:
          places: the place of each leaf, counted once however many equal leaves follow there.
          dtype_of: name of a packed array -> its shape and dtype.
        """
        return sum(
            math.prod(place.shape)
            * dtype_of[place.array].dtype.itemsize
            // math.prod(self._mesh.shape[axis] for axis in packing.axes(place.spec))
            for place in places
        )


def layout_of(facts: StateFacts, *, forward_only: bool = False) -> StateLayout:
    """The layout of a state.

    Args:
      facts: facts that decide the arrays.
      forward_only: whether the layout has only the arrays that a forward-only table reads and writes.
    """
    groups: dict[str, ArrayGroup] = {}
    for array in STATE_ARRAYS:
        if forward_only and not array.in_forward_only:
            continue
        shapes, on_host = array.shapes(facts), array.on_host(facts)
        if array.in_buffers:
            if shapes is None:
                continue
            shapes = {array.name: shapes}
            on_host = frozenset(shapes) if on_host else frozenset()
            if BUFFERS in groups:
                shapes |= groups[BUFFERS].shapes
                on_host |= groups[BUFFERS].on_host
        held = array.held(facts)
        spec = REPLICATED
        if facts.mesh is not None and held is not OnReplicas.EQUAL:
            spec = per_device_spec(facts.mesh)
        groups[array.field] = ArrayGroup(array.field, shapes, spec, on_host, held)
    return StateLayout(facts.mesh, groups)
