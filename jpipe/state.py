"""The training state, and the way of weights and optimizer state between layers and packed arrays."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jpipe.engine.engine import Engine
from jpipe.layers.trace import Traced
from jpipe.mesh import STAGE
from jpipe.packing import Place
from jpipe.stages.cut import Stages
from jpipe.stages.optimizer import stage_tree


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Everything derived from the shapes of a microbatch: how a state of that shape is laid out and run.

    Attributes:
      microbatch: the abstract microbatch.
      traced: the layers; stages: the same, cut; engine: runs them.
      optimizer: the Optax chain.
    """

    microbatch: Any
    traced: Traced
    stages: Stages
    engine: Engine
    optimizer: optax.GradientTransformation

    @property
    def placement(self) -> Sequence[tuple[int, int]]:
        """Device and column of each stage."""
        return self.engine.lowered.placement

    def pack(self, of_stage: Callable[[int], tuple]) -> dict[str, Any]:
        """What stages hold, packed, each stage's on its own devices.

        Args:
          of_stage: called with a stage, under the default device that runs it; gives the weights and the mutable
            state, lists with one entry a layer of the model, and the optimizer's state.
        """
        shapes = self.engine.replicated_shapes()
        mesh, num_devices = self.engine.mesh, self.engine.schedule.num_devices
        local = [
            jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes)
            for _ in range(num_devices)
        ]
        for s in range(self.stages.num_stages):
            d, chunk = self.placement[s]
            mine = [
                device
                for device in _devices_along(mesh, STAGE, d)
                if device.process_index == jax.process_index()
            ]
            if not mine:
                continue
            with jax.default_device(mine[0]):
                per_layer, mutable, inner = of_stage(s)
            column = (chunk,)
            versions = (slice(None), chunk)
            for i, run, row in self.stages.layer_runs(s):
                for name, places, tree, lead in (
                    ("parameters", run.parameters, per_layer[i], versions),
                    ("mutable_state", run.state, mutable[i], column),
                ):
                    for place, leaf in zip(places, jax.tree.leaves(tree), strict=True):
                        _write(local[d][name], lead, place, row, leaf)
            update, inner = self._update(s), jax.tree.leaves(inner)
            for reader, arrays in local[d]["read_parameters"].items():
                values = jax.tree.leaves(stage_tree(self.stages, s, per_layer))
                delay = float(self.engine.delays[reader][s])
                if delay:
                    with jax.default_device(mine[0]):
                        values = update.reads[reader](values, inner, delay)
                for copies, value in zip(update.parameters, values, strict=True):
                    for place, row in copies:
                        _write(arrays, versions, place, row, value)
            for place, leaf in zip(update.state, inner, strict=True):
                _write(local[d]["optimizer_state"], column, place, 0, leaf)
        if self.engine.loss_scale is not None:
            for arrays in local:
                arrays["loss_scale"] = self.engine.loss_scale.start()
        whole = self.engine.globally(shapes, self.engine.replicated_spec)

        def joined(want: jax.ShapeDtypeStruct, *parts: np.ndarray) -> jax.Array:
            def shard(at):
                return parts[(at[0].start or 0) // len(parts[0])][:, *at[1:]]

            return jax.make_array_from_callback(want.shape, want.sharding, shard)

        return jax.tree.map(joined, whole, *local)

    def parameters(self, state: "PipelineState") -> list:
        """The newest weights: one nested dict a layer, of host arrays."""
        lowered = self.engine.lowered
        newest = np.maximum(rounds(state) + lowered.newest, 0) % lowered.num_versions
        local = _by_device(state.parameters, self.engine.schedule.num_devices)
        per_layer: list = [None] * len(self.stages.layers)
        for s in range(self.stages.num_stages):
            d, chunk = self.placement[s]
            for i, run, row in self.stages.layer_runs(s):
                lead = (newest[s], chunk)
                leaves = [_read(local, d, lead, p, row) for p in run.parameters]
                tree = jax.tree.structure(self.stages.layers[i].parameters)
                per_layer[i] = tree.unflatten(leaves)
        return per_layer

    def mutable_state(self, state: "PipelineState") -> list:
        """The layers' mutable state: one nested dict a layer, of host arrays."""
        local = _by_device(state.mutable_state, self.engine.schedule.num_devices)
        per_layer: list = [None] * len(self.stages.layers)
        for s in range(self.stages.num_stages):
            d, chunk = self.placement[s]
            for i, run, row in self.stages.layer_runs(s):
                leaves = [_read(local, d, (chunk,), p, row) for p in run.state]
                tree = jax.tree.structure(self.stages.layers[i].state)
                per_layer[i] = tree.unflatten(leaves)
        return per_layer

    def optimizer_state(self, state: "PipelineState") -> dict[str, np.ndarray]:
        """Path -> leaf of the optimizer's state for the whole model.

        Stages hold the same tree with None for the layers of others, so paths agree and the union is the whole.
        """
        local = _by_device(state.optimizer_state, self.engine.schedule.num_devices)
        leaves = {}
        for s in range(self.stages.num_stages):
            d, chunk = self.placement[s]
            for path, place in zip(
                self.optimizer_paths(s), self._update(s).state, strict=True
            ):
                leaves[path] = _read(local, d, (chunk,), place)
        return leaves

    def optimizer_paths(self, stage: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Path -> shape of each leaf of a stage's optimizer state, in order."""
        parameters = [layer.parameters for layer in self.stages.layers]
        tree = stage_tree(self.stages, stage, parameters)
        abstract = jax.eval_shape(self.optimizer.init, tree)
        return {
            jax.tree_util.keystr(p): a for p, a in jax.tree.leaves_with_path(abstract)
        }

    def _update(self, stage: int):
        updates = self.engine.updates
        return updates.programs[updates.program_of_stage[stage]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PipelineState:
    """The training state. A pytree; every array is split over the devices along its first axis.

    Weights that a layer splits over an automatic axis of the mesh, their gradients and their optimizer state are split
    along their own dims too.

    Attributes:
      parameters: packed weights, `[D * V, R, ...]`; `Pipeline.get_params` unpacks them.
      read_parameters: the weights that the hooks give to a "forward" or a "backward", packed like `parameters`; empty
        without hooks or delays.
      optimizer_state: packed state of the Optax chain, `[D * R, ...]`.
      mutable_state: packed mutable state of the layers, `[D * R, ...]`; `Pipeline.get_mutable_state` unpacks it.
      loss_scale: the loss scale and its counter, `[D]` each; empty without one.
      gradients: packed gradient accumulators, `[devices * R, ...]`; zero between minibatches.
      buffers: activations and gradients in flight.
      round: int32 `[D]`, steps since `init` or `flush`.
      started: int32 `[D]`, microbatches of training before those.
      key: `[D]`, the random key of training.
      plan: how all this is laid out; static.
    """

    parameters: Mapping[str, jax.Array]
    read_parameters: Mapping[str, Mapping[str, jax.Array]]
    optimizer_state: Mapping[str, jax.Array]
    mutable_state: Mapping[str, jax.Array]
    loss_scale: Mapping[str, jax.Array]
    gradients: Mapping[str, jax.Array]
    buffers: Any
    round: jax.Array
    started: jax.Array
    key: jax.Array
    plan: Program = dataclasses.field(metadata=dict(static=True))

    def replicated(self) -> dict[str, Any]:
        """What stages hold, by the engine's names."""
        names = (
            "parameters",
            "read_parameters",
            "optimizer_state",
            "mutable_state",
            "loss_scale",
        )
        return {name: getattr(self, name) for name in names}

    def per_device(self) -> dict[str, Any]:
        """What is the devices' own, by the engine's names."""
        return {"gradients": self.gradients, "buffers": self.buffers}

    def counters(self) -> dict[str, jax.Array]:
        """When in training it is."""
        return {"round": self.round, "started": self.started, "key": self.key}


def rounds(state: PipelineState) -> int:
    """Rounds since `init` or `flush`."""
    return int(state.round.addressable_data(0)[0])


def _at(lead: tuple, place: Place, row: int) -> tuple:
    """Where an array, behind leading axes, holds leaf `row` of `place`."""
    start = place.start(row)
    return (*lead, slice(start, start + place.block[0]))


def _write(arrays: Mapping, lead: tuple, place: Place, row: int, leaf: Any) -> None:
    """Writes a leaf into one device's host arrays."""
    arrays[place.array][_at(lead, place, row)] = np.asarray(leaf).reshape(place.block)


def _read(local: Mapping, device: int, lead: tuple, place: Place, row: int = 0):
    """A copy of a leaf, out of the host arrays of all devices."""
    found = local[place.array][device][_at(lead, place, row)]
    return found.reshape(place.shape).copy()


def _devices_along(mesh: Mesh, axis: str, index: int) -> list:
    """The devices at a position of one axis of a mesh."""
    at = mesh.axis_names.index(axis)
    return list(np.moveaxis(mesh.devices, at, 0)[index : index + 1].flat)


def _by_device(arrays: Mapping[str, jax.Array], num_devices: int) -> dict:
    """Host copies of arrays that are split over devices, with a leading axis for the device."""

    def host(array: jax.Array) -> np.ndarray:
        if array.is_fully_addressable:
            whole = np.asarray(array)
        else:
            whole = multihost_utils.process_allgather(array, tiled=True)
        return whole.reshape(num_devices, -1, *whole.shape[1:])

    return {name: host(array) for name, array in arrays.items()}
