"""A new training state, from the leaves of layers or from whole arrays."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jpipe.engine.layout import REPLICATED
from jpipe.engine.state import STATE_ARRAYS, PipelineState
from jpipe.engine.state_arrays import Adopted, Lives, OnReplicas
from jpipe.mesh import STAGE
from jpipe.program import Program
from jpipe.program.fresh import zeros
from jpipe.stages.optimizer_tree import seen_by_optimizer
from jpipe.states.locations import LAYER_ARRAYS, Owner, Stored, owners


class LayerValues(NamedTuple):
    """The leaves of some layers.

    Attributes:
      layers: name of `LayerLeaves` -> one tree per layer of the model, None for other layers.
      optimizer_state: the optimizer's state for these layers, or its leaves in order.
    """

    layers: Mapping[str, Sequence]
    optimizer_state: Any


ValuesOf = Callable[[Sequence[int]], LayerValues]
"""The layers of a stage, or of a unit of vocabulary layers -> their leaves."""

_PACKED = tuple(a for a in STATE_ARRAYS if a.adopted in (Adopted.LEAVES, Adopted.COMPUTED))
"""The arrays that leaves of layers fill."""


def new_state(
    program: Program,
    values_of: ValuesOf,
    key_data: Any,
    started: int,
    whole: Mapping[str, Mapping[str, np.ndarray]],
) -> PipelineState:
    """A state with nothing in flight.

    Args:
      program: the program that the state belongs to.
      values_of: called with the layers of a stage, under the default device that runs the stage.
      key_data: data of the random key of training.
      started: microbatches of training so far.
      whole: name of an array that is taken as it is -> its arrays on one device. Without an entry it is as before
        training.
    """
    arrays, fresh = _pack(program, values_of), []
    for array in STATE_ARRAYS:
        if array.lives is Lives.COUNTER or array.field in arrays:
            continue
        if array.name in whole:
            wanted = program.engine.layout.global_shapes([array.field])[array.field]
            arrays[array.name] = jax.tree.map(_everywhere, wanted, dict(whole[array.name]))
        else:
            fresh.append(array.field)
    return PipelineState(
        **arrays,
        **program.fresh(dict.fromkeys(fresh)),
        **_counters(program, key_data, 0, started),
        program=program,
    )


def _everywhere(want: jax.ShapeDtypeStruct, part: np.ndarray) -> jax.Array:
    """A global array of equal parts, one for each device."""
    whole = np.concatenate([part] * (want.shape[0] // len(part)))
    return jax.make_array_from_callback(whole.shape, want.sharding, whole.__getitem__)


def with_arrays(
    program: Program,
    arrays: Mapping[str, jax.Array],
    key_data: Any,
    rounds: int,
    started: int,
) -> PipelineState:
    """A state of given arrays, with the shardings that its program says.

    Args:
      program: the program that the state belongs to.
      arrays: the path of an array in the state, as `jax.tree_util.keystr` of a dict of the state's
        fields -> array. Others are zero.
      key_data: data of the random key of training.
      rounds: rounds since `init` or `flush`.
      started: microbatches of training before those rounds.
    """
    like = program.abstract_state
    shapes, tree = jax.tree.flatten_with_path({**like.kept(), **like.in_flight()})
    paths = [jax.tree_util.keystr(path) for path, _ in shapes]
    missing = {path: a for path, (_, a) in zip(paths, shapes) if path not in arrays}
    arrays_here = {**zeros(missing, program.settings.platform)(), **arrays}
    return PipelineState(
        **tree.unflatten([arrays_here[path] for path in paths]),
        **_counters(program, key_data, rounds, started),
        program=program,
    )


def _counters(program: Program, key_data: Any, rounds: int, started: int) -> dict[str, Any]:
    """The counters of a state, equal on all devices."""
    num_devices = program.settings.schedule.num_devices
    everywhere = NamedSharding(program.settings.mesh, REPLICATED)
    values: dict[str, np.ndarray] = {
        "round": np.array(rounds, np.int32),
        "started": np.array(started, np.int32),
        "key": np.asarray(key_data),
    }

    def on_all_devices(value: np.ndarray) -> jax.Array:
        whole = np.broadcast_to(value, (num_devices, *value.shape))
        return jax.make_array_from_callback(whole.shape, everywhere, whole.__getitem__)

    return {name: on_all_devices(value) for name, value in values.items()}


# -- Packing


class _Hosts:
    """The packed arrays of a state in host memory, while leaves are written into them.

    Attributes:
      positions: name of an array of the state -> for each position along its first axis its local arrays.
    """

    def __init__(self, program: Program):
        self.layout = program.engine.layout
        self.positions: dict[str, list[Any]] = {}
        for array in _PACKED:
            group = self.layout[array.field]
            number = self.layout.num_devices
            if group.held is not OnReplicas.EQUAL:
                number *= self.layout.num_replicas
            self.positions[array.name] = [
                jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), group.shapes) for _ in range(number)
            ]

    def write(self, stored: Stored, leaf: Any, name: str, reader: str = "") -> None:
        """Writes a leaf into all its blocks, of the array `name`, and there of the arrays of a pass."""
        values, positions = np.asarray(leaf), self.positions[name]
        for block in stored.blocks:
            packed = positions[0][reader] if reader else positions[0]
            num_rows = len(packed[stored.location.array])
            position = block.lead[0] // num_rows
            packed = positions[position]
            packed = packed[reader] if reader else packed
            block.write(packed[stored.location.array], position * num_rows, values)

    def placed(self) -> dict[str, Any]:
        """The global arrays, by name."""
        wanted = self.layout.global_shapes(self.positions)

        def whole(want: jax.ShapeDtypeStruct, *parts: np.ndarray) -> jax.Array:
            def shard(index: Any) -> np.ndarray:
                return parts[(index[0].start or 0) // len(parts[0])][:, *index[1:]]

            return jax.make_array_from_callback(want.shape, want.sharding, shard)

        return {name: jax.tree.map(whole, wanted[name], *parts) for name, parts in self.positions.items()}


def _pack(program: Program, values_of: ValuesOf) -> dict[str, Any]:
    """The arrays of a state that leaves of layers fill, each stage's on the stage's devices."""
    hosts, mesh = _Hosts(program), program.settings.mesh
    for owner in owners(program):
        addressable = [
            device
            for d in owner.devices
            for device in devices_along(mesh, STAGE, d)
            if device.process_index == jax.process_index()
        ]
        if not addressable:
            continue
        with jax.default_device(addressable[0]):
            values = values_of(owner.layers)
            state_leaves = jax.tree.leaves(values.optimizer_state)
            read = dict(_read_weights(program, owner, values, state_leaves))
        for array in LAYER_ARRAYS:
            assert array.leaves is not None
            trees = values.layers.get(array.leaves.name)
            if trees is None:  # it begins with zeros
                continue
            for i, leaves in owner.layer_leaves.get(array.name, {}).items():
                layer_values = jax.tree.leaves(trees[i])
                if not layer_values:  # the source has none of this layer
                    continue
                for stored, leaf in zip(leaves, layer_values, strict=True):
                    hosts.write(stored, leaf, array.name)
        state_places = owner.optimizer_state.values()
        for stored, leaf in zip(state_places, state_leaves, strict=True):
            hosts.write(stored, leaf, "optimizer_state")
        for reader, weights in read.items():
            for copies, leaf in zip(owner.weights, weights, strict=True):
                for stored in copies:
                    hosts.write(stored, leaf, "read_parameters", reader)
    return hosts.placed()


def _read_weights(
    program: Program, owner: Owner, values: LayerValues, state_leaves: Sequence
) -> Iterator[tuple[str, list]]:
    """Pass, and the leaves of an owner's weights that a parameter hook gives to the pass."""
    engine, params = program.engine, values.layers["params"]
    for reader in engine.layout["read_parameters"].shapes:
        weights = jax.tree.leaves(seen_by_optimizer(program.stages, owner.layers, params))
        delay = float(engine.delays[reader][owner.home])
        if delay:
            weights = owner.update.param_hooks[reader](weights, state_leaves, delay)
        yield reader, weights


def devices_along(mesh: Mesh, axis: str, index: int) -> list:
    """The devices at one position of one axis of a mesh."""
    dim = mesh.axis_names.index(axis)
    return list(np.moveaxis(mesh.devices, dim, 0)[index : index + 1].flat)
