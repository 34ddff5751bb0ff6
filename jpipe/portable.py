"""Between a training state and one tree per layer.

A `PipelineState` holds packed arrays whose layout depends on the schedule, the cut and the mesh. Its
portable form, `Portable`, holds the same training without them: one tree per layer, of host arrays.
`Pipeline.adopt` goes through the portable form, and so can anything that saves a state.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from jpipe.layers.trace import shared_jit
from jpipe.mesh import STAGE
from jpipe.packing import Place
from jpipe.program import Program
from jpipe.stages.optimizer import StageUpdate, stage_tree
from jpipe.state import PipelineState, num_rounds

OfStage = Callable[[int], tuple[Sequence, Sequence, Any]]
"""Weights and mutable state, one tree per layer of the model, and the optimizer's state of a stage."""


# -- From layers to a state


def initial(
    program: Program,
    key: jax.Array,
    params: Sequence | None = None,
    mutable_state: Sequence | None = None,
) -> PipelineState:
    """The state before training; see `Pipeline.init` for the arguments, which are checked."""
    stages, optimizer = program.stages, program.settings.optimizer
    layers = stages.layers
    init_layer = shared_jit(program.settings.mesh.devices.flat[0].platform)
    given: Any = (params, mutable_state)

    def initial_layer(i: int) -> list:
        """Weights and mutable state of a layer."""
        from_caller = [tree and jax.tree.map(np.asarray, tree[i]) for tree in given]
        if all(tree is not None for tree in given):
            return from_caller
        layer = layers[i]
        fresh = layer.given
        if fresh is None:
            fresh = init_layer(layer.init, jax.random.fold_in(key, i))
        return [
            a if tree is not None else b
            for tree, a, b in zip(given, from_caller, fresh)
        ]

    def of_stage(s: int) -> tuple:
        weights: list = [None] * len(layers)
        mutable: list = [None] * len(layers)
        for i in stages.layers_of(s):
            weights[i], mutable[i] = initial_layer(i)
        for copies in stages.ties:
            here = [(i, j) for i, j in copies[1:] if weights[i] is not None]
            if here:
                first, k = copies[0]
                values = weights[first] if weights[first] else initial_layer(first)[0]
                value = jax.tree.leaves(values)[k]
                for i, j in here:
                    leaves, tree = jax.tree.flatten(weights[i])
                    leaves[j] = value
                    weights[i] = tree.unflatten(leaves)
        seen = stage_tree(stages, s, weights)
        return weights, mutable, jax.jit(optimizer.init)(seen)

    return new_state(program, of_stage, jax.random.fold_in(key, len(layers)), 0)


def new_state(
    program: Program, of_stage: OfStage, key: jax.Array, started: int
) -> PipelineState:
    """A state with nothing in flight.

    Args:
      program: whose state it is.
      of_stage: called with a stage, under the default device that runs the stage.
      key: the random key of training.
      started: microbatches of training so far.
    """
    engine = program.engine
    num_devices = program.settings.schedule.num_devices
    zeros = {
        **engine.globally(engine.per_device_shapes(), engine.per_device_spec),
        "round": engine.globally(
            jax.ShapeDtypeStruct((1,), jnp.int32), engine.replicated_spec
        ),
    }
    empty = jax.jit(
        lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), zeros),
        out_shardings=jax.tree.map(lambda a: a.sharding, zeros),
    )
    everywhere = NamedSharding(program.settings.mesh, engine.replicated_spec)
    started = jnp.full(num_devices, started, jnp.int32)
    return PipelineState(
        **_pack(program, of_stage),
        **empty(),
        started=jax.device_put(started, everywhere),
        key=jax.device_put(jnp.broadcast_to(key, num_devices), everywhere),
        program=program,
    )


def _pack(program: Program, of_stage: OfStage) -> dict[str, Any]:
    """The replicated arrays of a state, each stage's on the stage's devices."""
    engine, stages = program.engine, program.stages
    shapes, mesh = engine.replicated_shapes(), program.settings.mesh
    local = [
        jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes)
        for _ in range(program.settings.schedule.num_devices)
    ]
    for s in range(stages.num_stages):
        d, chunk = program.placement[s]
        addressable = [
            device
            for device in _devices_along(mesh, STAGE, d)
            if device.process_index == jax.process_index()
        ]
        if not addressable:
            continue
        with jax.default_device(addressable[0]):
            weights, mutable, optimizer_state = of_stage(s)
        column, versions = (chunk,), (slice(None), chunk)
        for i, run, row in stages.layer_runs(s):
            for name, places, tree, lead in (
                ("parameters", run.parameters, weights[i], versions),
                ("mutable_state", run.state, mutable[i], column),
            ):
                for place, leaf in zip(places, jax.tree.leaves(tree), strict=True):
                    _write(local[d][name], lead, place, row, leaf)
        update, state_leaves = _update(program, s), jax.tree.leaves(optimizer_state)
        for reader, arrays in local[d]["read_parameters"].items():
            values = jax.tree.leaves(stage_tree(stages, s, weights))
            delay = float(engine.delays[reader][s])
            if delay:
                with jax.default_device(addressable[0]):
                    values = update.param_hooks[reader](values, state_leaves, delay)
            for copies, value in zip(update.parameters, values, strict=True):
                for place, row in copies:
                    _write(arrays, versions, place, row, value)
        for place, leaf in zip(update.state, state_leaves, strict=True):
            _write(local[d]["optimizer_state"], column, place, 0, leaf)
    if engine.loss_scale is not None:
        for arrays in local:
            arrays["loss_scale"] = engine.loss_scale.start()

    def global_array(want: jax.ShapeDtypeStruct, *parts: np.ndarray) -> jax.Array:
        def shard(index):
            return parts[(index[0].start or 0) // len(parts[0])][:, *index[1:]]

        return jax.make_array_from_callback(want.shape, want.sharding, shard)

    wanted = engine.globally(shapes, engine.replicated_spec)
    return jax.tree.map(global_array, wanted, *local)


# -- From a state to layers


def parameters(state: PipelineState) -> list:
    """The newest weights: one nested dict per layer, of host arrays."""
    program = state.program
    lowered = program.engine.lowered
    newest = np.maximum(num_rounds(state) + lowered.newest, 0) % lowered.num_versions
    local = _by_device(program, state.parameters)
    per_layer: list = [None] * len(program.stages.layers)
    for s in range(program.stages.num_stages):
        d, chunk = program.placement[s]
        for i, run, row in program.stages.layer_runs(s):
            lead = (newest[s], chunk)
            leaves = [_read(local, d, lead, p, row) for p in run.parameters]
            tree = jax.tree.structure(program.stages.layers[i].parameters)
            per_layer[i] = tree.unflatten(leaves)
    return per_layer


def mutable_state(state: PipelineState) -> list:
    """The layers' mutable state: one nested dict per layer, of host arrays."""
    program = state.program
    local = _by_device(program, state.mutable_state)
    per_layer: list = [None] * len(program.stages.layers)
    for s in range(program.stages.num_stages):
        d, chunk = program.placement[s]
        for i, run, row in program.stages.layer_runs(s):
            leaves = [_read(local, d, (chunk,), p, row) for p in run.state]
            tree = jax.tree.structure(program.stages.layers[i].state)
            per_layer[i] = tree.unflatten(leaves)
    return per_layer


def optimizer_state(state: PipelineState) -> dict[str, np.ndarray]:
    """Path -> leaf of the optimizer's state for the whole model.

    Stages hold the same tree with None for the layers of others, so paths agree and the union is the whole.
    """
    program = state.program
    local = _by_device(program, state.optimizer_state)
    leaves = {}
    for s in range(program.stages.num_stages):
        d, chunk = program.placement[s]
        for path, place in zip(
            optimizer_paths(program, s), _update(program, s).state, strict=True
        ):
            leaves[path] = _read(local, d, (chunk,), place)
    return leaves


def optimizer_paths(program: Program, stage: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Path -> shape of each leaf of a stage's optimizer state, in order."""
    stages = program.stages
    tree = stage_tree(stages, stage, [layer.parameters for layer in stages.layers])
    shapes = jax.eval_shape(program.settings.optimizer.init, tree)
    return {jax.tree_util.keystr(p): a for p, a in jax.tree.leaves_with_path(shapes)}


def _update(program: Program, stage: int) -> StageUpdate:
    updates = program.engine.updates
    return updates.programs[updates.program_of_stage[stage]]


# -- Leaves inside packed arrays


def _index(lead: tuple, place: Place, row: int) -> tuple:
    """Index of leaf `row` of a place in its array, behind leading axes."""
    start = place.start(row)
    return (*lead, slice(start, start + place.block[0]))


def _write(arrays: Mapping, lead: tuple, place: Place, row: int, leaf: Any) -> None:
    """Writes a leaf into one device's host arrays."""
    arrays[place.array][_index(lead, place, row)] = np.asarray(leaf).reshape(
        place.block
    )


def _read(
    local: Mapping, device: int, lead: tuple, place: Place, row: int = 0
) -> np.ndarray:
    """A copy of a leaf, out of the host arrays of all devices."""
    leaf = local[place.array][device][_index(lead, place, row)]
    return leaf.reshape(place.shape).copy()


def _devices_along(mesh: Mesh, axis: str, index: int) -> list:
    """The devices at one position of one axis of a mesh."""
    dim = mesh.axis_names.index(axis)
    return list(np.moveaxis(mesh.devices, dim, 0)[index : index + 1].flat)


def _by_device(program: Program, arrays: Mapping[str, jax.Array]) -> dict:
    """Host copies of arrays that are split over devices, with a leading axis for the device."""
    num_devices = program.settings.schedule.num_devices

    def host(array: jax.Array) -> np.ndarray:
        if array.is_fully_addressable:
            whole = np.asarray(array)
        else:
            whole = multihost_utils.process_allgather(array, tiled=True)
        return whole.reshape(num_devices, -1, *whole.shape[1:])

    return {name: host(array) for name, array in arrays.items()}
