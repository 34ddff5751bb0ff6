"""The training state, and the way of weights and optimizer state between layers and packed arrays."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jpipe.engine import AXIS, Engine
from jpipe.packing import Place
from jpipe.stages import Stages, Traced
from jpipe.update import stage_tree


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
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

    def home(self, stage: int) -> tuple[int, int]:
        """The device of a stage, and which of the device's columns it is."""
        schedule = self.engine.schedule
        device = int(schedule.device[schedule.stage == stage][0])
        return device, int((schedule.stage[schedule.device == device] < stage).sum())

    def pack(self, of_stage: Callable[[int], tuple[Sequence, Any]]) -> dict[str, Any]:
        """Packed weights and optimizer state, each stage's on its own device.

        Args:
          of_stage: called with a stage, under the default device that runs it; gives the weights, a list with one
            entry a layer of the model, and the optimizer's state.
        """
        shapes = {
            "parameters": self.engine.parameter_shapes(),
            "optimizer_state": self.engine.optimizer_shapes(),
        }
        mesh, num_devices = self.engine.mesh, self.engine.schedule.num_devices
        local = [
            jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes)
            for _ in range(num_devices)
        ]
        for s in range(self.stages.num_stages):
            d, chunk = self.home(s)
            device = mesh.devices.flat[d]
            if device.process_index != jax.process_index():
                continue
            with jax.default_device(device):
                per_layer, inner = of_stage(s)
            for i, places, row in self.stages.layer_places(s):
                for place, leaf in zip(
                    places, jax.tree.leaves(per_layer[i]), strict=True
                ):
                    at = (slice(None), chunk, _rows(place, row))
                    local[d]["parameters"][place.array][at] = np.asarray(leaf).reshape(
                        place.block
                    )
            for place, leaf in zip(
                self._update(s).state, jax.tree.leaves(inner), strict=True
            ):
                at = (chunk, _rows(place))
                local[d]["optimizer_state"][place.array][at] = np.asarray(leaf).reshape(
                    place.block
                )
        sharding = NamedSharding(mesh, PartitionSpec(AXIS))

        def joined(*parts: np.ndarray) -> jax.Array:
            rows = len(parts[0])
            shape = (len(parts) * rows, *parts[0].shape[1:])
            return jax.make_array_from_callback(
                shape, sharding, lambda at: parts[(at[0].start or 0) // rows]
            )

        return jax.tree.map(joined, *local)

    def parameters(self, state: "PipelineState") -> list:
        """The newest weights: one nested dict a layer, of host arrays."""
        lowered = self.engine.lowered
        newest = np.maximum(rounds(state) + lowered.newest, 0) % lowered.num_versions
        local = {name: _local(array) for name, array in state.parameters.items()}
        per_layer: list = [None] * len(self.stages.layers)
        for s in range(self.stages.num_stages):
            d, chunk = self.home(s)
            for i, places, row in self.stages.layer_places(s):
                leaves = [
                    local[p.array][d][newest[s], chunk, _rows(p, row)]
                    .reshape(p.shape)
                    .copy()
                    for p in places
                ]
                per_layer[i] = jax.tree.structure(
                    self.stages.layers[i].parameters
                ).unflatten(leaves)
        return per_layer

    def optimizer_state(self, state: "PipelineState") -> dict[str, np.ndarray]:
        """Path -> leaf of the optimizer's state for the whole model.

        Stages hold the same tree with None for the layers of others, so paths agree and the union is the whole.
        """
        local = {name: _local(array) for name, array in state.optimizer_state.items()}
        leaves = {}
        for s in range(self.stages.num_stages):
            d, chunk = self.home(s)
            for path, place in zip(
                self.optimizer_paths(s), self._update(s).state, strict=True
            ):
                leaves[path] = (
                    local[place.array][d][chunk, _rows(place)]
                    .reshape(place.shape)
                    .copy()
                )
        return leaves

    def optimizer_paths(self, stage: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Path -> shape of each leaf of a stage's optimizer state, in order."""
        tree = stage_tree(
            self.stages, stage, [layer.parameters for layer in self.stages.layers]
        )
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

    Attributes:
      parameters: packed weights, `[D * V, R, ...]`; `Pipeline.get_params` unpacks them.
      optimizer_state: packed state of the Optax chain, `[D * R, ...]`.
      gradients: packed gradient accumulators, `[D * R, ...]`; zero between minibatches.
      buffers: activations and gradients in flight.
      round: int32 `[D]`, steps since `init` or `flush`.
      plan: how all this is laid out; static.
    """

    parameters: Mapping[str, jax.Array]
    optimizer_state: Mapping[str, jax.Array]
    gradients: Mapping[str, jax.Array]
    buffers: Any
    round: jax.Array
    plan: Plan = dataclasses.field(metadata=dict(static=True))


def rounds(state: PipelineState) -> int:
    """Rounds since `init` or `flush`."""
    return int(_local(state.round)[0][0])


def _rows(place: Place, row: int = 0) -> slice:
    """The rows of an array (behind its leading axes) that hold leaf `row` of `place`."""
    start = place.start(row)
    return slice(start, start + place.block[0])


def _local(array: jax.Array) -> list[np.ndarray]:
    shards = {
        s.index[0].start or 0: np.asarray(s.data) for s in array.addressable_shards
    }
    return [shards[start] for start in sorted(shards)]
