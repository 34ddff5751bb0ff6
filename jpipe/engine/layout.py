"""The layout of the training state: the one place that knows every array of it.

An array belongs to a *group*. A group is either replicated over the mesh axis "data" (weights,
optimizer state) or private to a device (gradients, everything in flight, and the optimizer's state
if replicas share it), and it has a kind of memory.

Letters: D devices of the pipeline, R columns per device, K slots of a ring, N
microbatches.
"""

import dataclasses
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe import packing
from jpipe.layers.avals import is_inexact
from jpipe.layers.sharding import microbatch_spec
from jpipe.lowering.array_rows import ArrayRows
from jpipe.lowering.channels import Route
from jpipe.lowering.lower import HEAD_GRADIENT, STASHES, Lowered
from jpipe.mesh import DATA, DEVICE_MEMORY, FSDP, HOST_MEMORY, STAGE
from jpipe.options.loss_scale import LossScale
from jpipe.packing import Leaf, Packing

NUM_DISCARD_SLOTS = 1
"""An inbox ends with a discard slot, for the messages of ticks in which nothing arrives for it."""

REPLICATED = PartitionSpec(STAGE)
"""How the first axis of a replicated array is split."""


def per_device_spec(mesh: Mesh) -> PartitionSpec:
    """How the first axis of a private array is split."""
    return PartitionSpec((DATA, STAGE) if DATA in mesh.shape else STAGE)


def batch_spec(mesh: Mesh) -> PartitionSpec:
    """How the first axis of a minibatch is split."""
    return PartitionSpec(DATA if DATA in mesh.shape else None)


@dataclasses.dataclass(frozen=True)
class ArrayGroup:
    """Arrays of the state with one use.

    Attributes:
      name: name of the group.
      shapes: tree of the local shapes on one device. The first axis is split over devices; a shape
        with a sharding is split over automatic axes of the mesh too, as its sharding says.
      spec: how the first axis is split, `REPLICATED` or `per_device_spec(mesh)`.
      on_host: the names in `shapes`, a dict then, of what is in host memory.
    """

    name: str
    shapes: Any
    spec: PartitionSpec
    on_host: frozenset[str] = frozenset()

    def num_bytes(self, platform: str, memory_kind: str = DEVICE_MEMORY) -> int:
        """Bytes of one device of a platform, such as "cpu" or "tpu", in its own memory or in the host's."""
        shapes = self.shapes
        if self.on_host or memory_kind == HOST_MEMORY:
            names = self.on_host
            if memory_kind == DEVICE_MEMORY:
                names = shapes.keys() - self.on_host
            shapes = [shapes[name] for name in names]
        return sum(
            packing.array_bytes(
                a.sharding.shard_shape(a.shape) if a.sharding else a.shape,
                a.dtype,
                platform,
            )
            for a in jax.tree.leaves(shapes)
        )


@dataclasses.dataclass(frozen=True)
class StatePackings:
    """How the leaves of each use are packed.

    Attributes:
      parameters: the weights.
      accumulators: the gradients.
      mutable_state: the layers' mutable state.
      statistics: what is kept of a minibatch until this moves.
      rings: each of `STASHES` -> its stashed values.
      messages: the routes, each with its message.
      optimizer_state: the optimizer's state; None in forward-only tables.
      units: the parts of vocabulary layers.
      unit_sums: the sums of the gradients of each of `units`.
      unit_states: the optimizer's state of each of `units`.
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
    units: Sequence[Packing] = ()
    unit_sums: Sequence[Packing] = ()
    unit_states: Sequence[Packing] = ()
    embedded: Sequence[Leaf] = ()
    head_input: Sequence[Leaf] = ()

    @property
    def state_on_host(self) -> frozenset[str]:
        """The names of the arrays of the optimizer's state in host memory."""
        assert self.optimizer_state is not None
        return self.optimizer_state.on_host.union(
            *(u.on_host for u in self.unit_states)
        )

    def of_weights(
        self, mesh: Mesh, rows: ArrayRows, rows_of_units: Sequence[int]
    ) -> dict[str, Any]:
        """Local shapes of the weights: of the stages on a device, and of its parts of vocabulary layers.

        Args:
          mesh: the devices.
          rows: of the stages.
          rows_of_units: rows of each of `units`.
        """
        return _with_units(mesh, self.parameters, self.units, rows, rows_of_units)

    def of_gradients(self, mesh: Mesh, rows: ArrayRows) -> dict[str, Any]:
        """The same of the gradients; a unit has one row."""
        return _with_units(mesh, self.accumulators, self.unit_sums, rows)

    def of_state(self, mesh: Mesh, rows: ArrayRows) -> dict[str, Any]:
        """The same of the optimizer's state."""
        assert self.optimizer_state is not None
        return _with_units(mesh, self.optimizer_state, self.unit_states, rows)


def _with_units(
    mesh: Mesh,
    of_stages: Packing,
    of_units: Sequence[Packing],
    rows: ArrayRows,
    rows_of_units: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Local shapes of packed arrays; a device has one part of a unit, not one for each of its R stages."""
    shapes = packed_shapes(mesh, of_stages, rows)
    for of_unit, number in zip(of_units, rows_of_units or [1] * len(of_units)):
        shapes |= packed_shapes(mesh, of_unit, number)
    return shapes


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """Every array of a training state, by group.

    Attributes:
      mesh: the devices.
      groups: name -> group: "parameters", "read_parameters", "optimizer_state", "mutable_state",
        "loss_scale", "gradient_compression", "message_compression", "round", "started", "key", "gradients" and
        "buffers". A forward-only table has "parameters", "mutable_state", "message_compression" and "buffers".
    """

    mesh: Mesh
    groups: Mapping[str, ArrayGroup]

    def __getitem__(self, name: str) -> ArrayGroup:
        return self.groups[name]

    @property
    def num_replicas(self) -> int:
        """Replicas of each stage, along the axis "data"."""
        return self.mesh.shape.get(DATA, 1)

    def local_shapes(self, names: Iterable[str]) -> dict[str, Any]:
        """Local shapes of groups, by name."""
        return {name: self.groups[name].shapes for name in names}

    def global_shapes(self, names: Iterable[str]) -> dict[str, Any]:
        """Global shapes of groups, with their shardings, by name."""
        found = {}
        for name in names:
            group = self.groups[name]
            found[name] = self.globally(group.shapes, group.spec)
            for key in group.on_host:
                shapes = group.shapes[key]
                found[name][key] = self.globally(shapes, group.spec, HOST_MEMORY)
        return found

    def globally(
        self, shapes: Any, spec: PartitionSpec, memory_kind: str = DEVICE_MEMORY
    ) -> Any:
        """Global shapes, with shardings, of a tree of local shapes.

        Args:
          shapes: local shapes.
          spec: how their first axis is split.
          memory_kind: the memory that holds the arrays.
        """
        num_parts = self.mesh.shape[STAGE]
        if spec == per_device_spec(self.mesh):
            num_parts *= self.num_replicas
        # A sharding without a kind of memory is in the device's default memory.
        kind = None if memory_kind == DEVICE_MEMORY else memory_kind

        def whole(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            inner = () if a.sharding is None else a.sharding.spec[1:]
            split = PartitionSpec(*spec, *inner)
            sharding = NamedSharding(self.mesh, split, memory_kind=kind)
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
            // math.prod(self.mesh.shape[axis] for axis in packing.axes(place.spec))
            for place in places
        )


def training_layout(
    mesh: Mesh,
    lowered: Lowered,
    packings: StatePackings,
    array_rows: Mapping[str, ArrayRows],
    *,
    microbatch: Any,
    norm_dtype: np.dtype,
    weight_dtype: np.dtype | None = None,
    rows_of_units: Sequence[int] = (),
    hooked_passes: Sequence[str] = (),
    loss_scale: LossScale | None = None,
    key_impl: Any = None,
    shares_updates: bool = False,
    tick_stashes: Container[str] = (),
    gradient_compression: Any = None,
    message_compression: Any = None,
) -> StateLayout:
    """The layout of a training state.

    Args:
      mesh: the devices.
      lowered: the lowered table.
      packings: how the leaves are packed.
      array_rows: group -> the rows of its arrays: see `PassSpec.array_rows`.
      microbatch: the abstract microbatch.
      norm_dtype: dtype of gradient norms.
      weight_dtype: dtype of the weights of minibatches; None: the loss is a mean.
      rows_of_units: versions of the parts of vocabulary layers.
      hooked_passes: the passes ("forward", "backward") that read weights of their own, from a
        parameter hook.
      loss_scale: the loss scale, or None.
      key_impl: implementation of the random keys.
      shares_updates: whether each replica of a stage keeps a share of the optimizer's state.
      tick_stashes: the stashes that are no part of the state.
      gradient_compression: local shapes of what compression of gradients keeps; None: nothing.
      message_compression: the same of messages.
    """
    assert packings.optimizer_state is not None
    R = lowered.num_chunks
    key = jax.eval_shape(
        lambda: jax.random.key_data(jax.random.key(0, impl=key_impl))[None]
    )
    counter = jax.ShapeDtypeStruct((1,), np.int32)
    rows = array_rows
    parameters = packings.of_weights(mesh, rows["parameters"], rows_of_units)
    buffers = buffer_shapes(mesh, lowered, packings, rows, microbatch)
    buffers |= {ring: {} for ring in STASHES if ring in tick_stashes}
    mutable_state = packed_shapes(None, packings.mutable_state, rows["mutable_state"])
    # Of the microbatches of a minibatch that have run forward.
    buffers["statistics"] = packed_shapes(None, packings.statistics, rows["statistics"])
    # Of the latest versions of each column, and of the device's part of each unit, for norms over all stages.
    assert lowered.norms is not None
    num_norms = lowered.norms.depth, R + len(packings.units)
    buffers["squared_norm"] = jax.ShapeDtypeStruct(num_norms, norm_dtype)
    if lowered.num_weights > 1:
        shape = (lowered.num_weights,)
        buffers["minibatch_weights"] = jax.ShapeDtypeStruct(shape, weight_dtype)
    groups = {
        "parameters": parameters,
        "read_parameters": dict.fromkeys(hooked_passes, parameters),
        "optimizer_state": packings.of_state(mesh, rows["optimizer_state"]),
        "mutable_state": mutable_state,
        "loss_scale": {} if loss_scale is None else loss_scale.shapes(),
        "gradient_compression": gradient_compression or {},
        "message_compression": message_compression or {},
        "round": counter,
        "started": counter,
        "key": key,
        "gradients": packings.of_gradients(mesh, rows["gradients"]),
        "buffers": buffers,
    }
    private = {"optimizer_state"} if shares_updates else set()
    private |= {"gradient_compression", "message_compression", "gradients", "buffers"}
    on_host = {
        # The parts of vocabulary layers are on the devices.
        "parameters": packings.parameters.on_host,
        "gradients": packings.accumulators.on_host,
        "optimizer_state": packings.state_on_host,
        "buffers": frozenset(["host_stash"] if buffers["host_stash"] else []),
    }
    return _layout(mesh, groups, private, on_host)


def forward_only_layout(
    mesh: Mesh,
    lowered: Lowered,
    packings: StatePackings,
    array_rows: Mapping[str, ArrayRows],
    *,
    rows_of_units: Sequence[int] = (),
    microbatch: Any,
    message_compression: Any = None,
) -> StateLayout:
    """The layout of the arrays that a forward-only table reads and writes.

    Args:
      mesh: the devices.
      lowered: the lowered table.
      packings: how the leaves are packed.
      array_rows: group -> the rows of its arrays, as in the state that holds the weights.
      rows_of_units: versions of the parts of vocabulary layers.
      microbatch: the abstract microbatch.
      message_compression: local shapes of what compression of messages keeps; None: nothing.
    """
    rows = array_rows
    groups = {
        "parameters": packings.of_weights(mesh, rows["parameters"], rows_of_units),
        "mutable_state": packed_shapes(
            None, packings.mutable_state, rows["mutable_state"]
        ),
        "message_compression": message_compression or {},
        "buffers": buffer_shapes(mesh, lowered, packings, rows, microbatch),
    }
    on_host = {"parameters": packings.parameters.on_host}
    return _layout(mesh, groups, {"message_compression", "buffers"}, on_host)


def _layout(
    mesh: Mesh,
    groups: Mapping,
    private: Container[str],
    on_host: Mapping[str, frozenset[str]] | None = None,
) -> StateLayout:
    """The layout of groups, of which some are private to a device; `on_host` names arrays of groups."""
    return StateLayout(
        mesh,
        {
            name: ArrayGroup(
                name,
                shapes,
                per_device_spec(mesh) if name in private else REPLICATED,
                (on_host or {}).get(name, frozenset()),
            )
            for name, shapes in groups.items()
        },
    )


def buffer_shapes(
    mesh: Mesh | None,
    lowered: Lowered,
    packings: StatePackings,
    array_rows: Mapping[str, ArrayRows],
    microbatch: Any,
) -> dict[str, Any]:
    """Local shapes of everything in flight, by the names of `TickArrays`.

    Args:
      mesh: for the shardings of stashes that are split over automatic axes; None: no stash is.
      lowered: the lowered table.
      packings: how the leaves are packed.
      array_rows: ring of stashes -> the slots of its arrays.
      microbatch: the abstract microbatch, or None.
    """
    slots, schedule = lowered.num_slots, lowered.schedule
    routes = {route.inbox: route for route, _ in packings.messages}
    message = {route.inbox: pack for route, pack in packings.messages}
    sent: dict[str, dict] = {"forward": {}, "backward": {}}
    for j, (inbox, _) in enumerate(lowered.outgoing):
        sent[routes[inbox].operation][j] = packed_shapes(mesh, message[inbox])
    shapes: dict[str, Any] = {
        "inbox": {
            inbox: packed_shapes(mesh, pack, slots[inbox] + NUM_DISCARD_SLOTS)
            for inbox, pack in message.items()
            if slots[inbox]
        },
        **{
            ring: packed_shapes(mesh, packings.rings[ring], array_rows[ring])
            if slots[ring] and not schedule.forward_only
            else {}
            for ring in STASHES
        },
        "sent_activations": sent["forward"],
        "sent_gradients": sent["backward"],
        # What leaves late arrives within a tick and needs no place here.
        "received": {
            i: packed_shapes(mesh, message[next(iter(channel.arrives))])
            for i, channel in enumerate(lowered.channels)
            if not channel.late
        },
    }
    shapes["host_stash"] = {
        ring: {
            name: jax.ShapeDtypeStruct(stored_on_host(a.shape), a.dtype)
            for name, a in packed_shapes(
                None, packings.rings[ring], spill.num_slots + NUM_DISCARD_SLOTS
            ).items()
        }
        for ring, spill in lowered.spills.items()
    }
    shapes["staged"] = {
        ring: packed_shapes(mesh, packings.rings[ring], 1) for ring in lowered.spills
    }
    shapes["embedded"] = stored_shapes(mesh, packings.embedded)
    shapes["head_input"] = stored_shapes(mesh, packings.head_input)
    if not schedule.forward_only:
        embedded, head_input = (
            [leaf for leaf in leaves if is_inexact(leaf.aval)]
            for leaves in (packings.embedded, packings.head_input)
        )
        shapes["embedded_gradient"] = stored_shapes(mesh, embedded)
        shapes[HEAD_GRADIENT] = [
            _stored_shape(mesh, leaf, slots[HEAD_GRADIENT]) for leaf in head_input
        ]
    if lowered.num_batches > 1:
        num_rows = lowered.num_batches * schedule.num_microbatches
        shapes["batches"] = microbatch_shapes(mesh, microbatch, num_rows)
    return shapes


def stored_shapes(
    mesh: Mesh | None, leaves: Iterable[Leaf]
) -> list[jax.ShapeDtypeStruct]:
    """The shapes of leaves of an activation in the state.

    All arrays there have a first axis, which is split over devices: of a leaf that the compiler splits one more than the
    leaf, of a single number one.
    """
    return [
        _stored_shape(mesh, leaf, 1)
        if leaf.spec or not leaf.aval.shape
        else jax.ShapeDtypeStruct(leaf.aval.shape, leaf.aval.dtype)
        for leaf in leaves
    ]


def _stored_shape(mesh: Mesh | None, leaf: Leaf, number: int) -> jax.ShapeDtypeStruct:
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
      mesh: gives arrays that are split over the axis "fsdp" the sharding that says how; None: all arrays
        are whole on their device.
      microbatch: the abstract microbatch.
      number: of microbatches.
    """

    def shape(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = None
        if mesh is not None and FSDP in mesh.shape:
            num_rows = jax.tree.leaves(microbatch["inputs"])[0].shape[0]
            spec = microbatch_spec(a.shape, num_rows, {FSDP: mesh.shape[FSDP]})
            sharding = NamedSharding(mesh, _spelled([None, *spec]))
        return jax.ShapeDtypeStruct((number, *a.shape), a.dtype, sharding=sharding)

    return jax.tree.map(shape, microbatch)


def _spelled(dims: Sequence) -> PartitionSpec:
    """A spec as XLA spells it, without None at the end. With another spelling a second program would be
    compiled for the same arrays."""
    dims = list(dims)
    while dims and dims[-1] is None:
        dims.pop()
    return PartitionSpec(*dims)


def packed_shapes(
    mesh: Mesh | None, pack: Packing, rows: ArrayRows | int | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Local shapes of packed arrays.

    Args:
      mesh: gives arrays that are split over automatic axes the sharding that says how; None: all
        arrays are whole on their device.
      pack: the packing.
      rows: of each array, or of all of them, along a leading axis; None: there is no such axis.
    """

    def lead(name: str) -> tuple[int, ...]:
        if rows is None:
            return ()
        return (rows if isinstance(rows, int) else rows.number(name),)

    shapes = {
        name: jax.ShapeDtypeStruct((*lead(name), *a.shape), a.dtype)
        for name, a in pack.arrays.items()
    }
    for name, spec in pack.specs.items() if mesh is not None else ():
        assert mesh is not None
        dims = [None] * (len(lead(name)) + 1) + list(spec)
        sharding = NamedSharding(mesh, _spelled(dims))
        a = shapes[name]
        shapes[name] = jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
    return shapes
