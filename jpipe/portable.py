"""Between a training state and one tree per layer.

A `PipelineState` holds packed arrays whose layout depends on the schedule, the cut and the mesh. Its
portable form, `Portable`, holds the same training without them: one tree per layer, of host arrays.
`Pipeline.adopt` goes through the portable form, and so can anything that saves a state.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from jpipe.checks import check_fit
from jpipe.engine.layout import REPLICATED
from jpipe.layers.trace import shared_jit
from jpipe.mesh import STAGE
from jpipe.packing import Place
from jpipe.program import Program
from jpipe.stages.optimizer import StageUpdate, stage_tree
from jpipe.state import PipelineState, num_rounds

OfStage = Callable[[int], tuple[Sequence, Sequence, Any]]
"""Weights and mutable state, one tree per layer of the model, and the optimizer's state of a stage."""


class Portable(NamedTuple):
    """A training state with nothing in flight, without schedule, cut and mesh.

    Attributes:
      params: one nested dict per layer: the newest weights.
      mutable_state: one nested dict per layer.
      optimizer_state: one dict per layer, path -> leaf; see `optimizer_state`.
      loss_scale: the arrays of a loss scale that moves, `[1]` each; empty without one.
      num_microbatches: microbatches of training so far, of each replica.
      key_data: uint32, the data of the random key of training.
      key_impl: its implementation.
      minibatch: abstract arrays shaped like a minibatch.
    """

    params: list
    mutable_state: list
    optimizer_state: list[dict[str, np.ndarray]]
    loss_scale: dict[str, np.ndarray]
    num_microbatches: int
    key_data: np.ndarray
    key_impl: Any
    minibatch: Any


def to_portable(state: PipelineState) -> Portable:
    """The portable form of a state.

    Raises:
      ValueError: if the state has microbatches in flight.
    """
    program = state.program
    settings, engine = program.settings, program.engine
    if not settings.schedule.synchronous and num_rounds(state):
        raise ValueError(
            "`state` has microbatches in flight that only its own pipeline can complete. "
            "Flush it first: `state, metrics = other_pipe.flush(state)`."
        )
    N, loss_scale = settings.schedule.num_microbatches, {}
    if engine.loss_scale is not None and engine.loss_scale.growth_interval is not None:
        loss_scale = {
            name: np.asarray(a.addressable_data(0))
            for name, a in state.loss_scale.items()
        }
    started = int(state.started.addressable_data(0)[0])
    return Portable(
        params=parameters(state),
        mutable_state=mutable_state(state),
        optimizer_state=optimizer_state(state),
        loss_scale=loss_scale,
        num_microbatches=started + num_rounds(state) * N,
        key_data=np.asarray(state.key.addressable_data(0)[0]),
        key_impl=engine.key_impl,
        minibatch=jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(
                (N * settings.num_replicas * a.shape[0], *a.shape[1:]), a.dtype
            ),
            program.microbatch,
        ),
    )


def from_portable(program: Program, source: Portable) -> PipelineState:
    """A state of `program` that continues the training of `source`.

    Raises:
      ValueError: if the layers or the optimizer differ, or one stage would hold layers whose stages
        had different values of a leaf that they share now.
    """
    stages, scale = program.stages, program.engine.loss_scale
    check_fit("params", source.params, stages.layers, "parameters")
    check_fit("mutable_state", source.mutable_state, stages.layers, "state")
    wanted = [optimizer_paths(program, s) for s in range(stages.num_stages)]
    kept, read = set().union(*source.optimizer_state), set().union(*wanted)
    for paths, text in (
        (read - kept, "this pipeline keeps {}, which the state has not"),
        (kept - read, "the state has {}, which this pipeline does not keep"),
    ):
        if paths:
            raise ValueError(
                "`state` comes from a pipeline with another optimizer: "
                f"{text.format(min(paths))}. Give both pipelines the same Optax chain, or "
                "start the optimizer anew with `init(key, batch, params=...)`."
            )

    def leaf_of(s: int, path: str, want: jax.ShapeDtypeStruct) -> np.ndarray:
        """The leaf at a path of the optimizer's state of a stage."""
        having = [
            i for i, leaves in enumerate(source.optimizer_state) if path in leaves
        ]
        here = [i for i in having if i in stages.layers_of(s)]
        values = {i: source.optimizer_state[i][path] for i in here or having}
        (first, leaf), *others = values.items()
        for i, other in others:
            if leaf.tobytes() != other.tobytes():
                raise ValueError(
                    f"stage {s} would hold layers {first} and {i}, whose stages had different "
                    f"values of {path} in the optimizer's state ({leaf.ravel()[0]} and "
                    f"{other.ravel()[0]}): a stage skips its update "
                    "if its gradient is not finite. Choose `boundaries` that keep these "
                    "layers on different stages, or start the optimizer anew with "
                    "`init(key, batch, params=...)`."
                )
        if leaf.shape != want.shape:
            raise ValueError(
                "`state` comes from a pipeline with another optimizer: this one keeps "
                f"{path} of shape {want.shape}, the state has shape {leaf.shape}. Give both "
                "pipelines the same Optax chain."
            )
        return leaf

    def of_stage(s: int) -> tuple:
        layers = stages.layers_of(s)
        weights, mutable = (
            [tree if i in layers else None for i, tree in enumerate(trees)]
            for trees in (source.params, source.mutable_state)
        )
        return weights, mutable, [leaf_of(s, *item) for item in wanted[s].items()]

    loss_scale = None
    if source.loss_scale and scale is not None and scale.growth_interval is not None:
        largest = np.float32(scale.largest)
        loss_scale = dict(source.loss_scale)
        loss_scale["scale"] = np.minimum(loss_scale["scale"], largest)
    return new_state(
        program, of_stage, source.key_data, source.num_microbatches, loss_scale
    )


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
            assert layer.init is not None
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

    training_key = jax.random.fold_in(key, len(layers))
    return new_state(program, of_stage, jax.random.key_data(training_key), 0)


def new_state(
    program: Program,
    of_stage: OfStage,
    key_data: Any,
    started: int,
    loss_scale: Mapping[str, np.ndarray] | None = None,
) -> PipelineState:
    """A state with nothing in flight.

    Args:
      program: whose state it is.
      of_stage: called with a stage, under the default device that runs the stage.
      key_data: data of the random key of training.
      started: microbatches of training so far.
      loss_scale: arrays of the loss scale on one device; None: as before training.
    """
    engine = program.engine
    num_devices = program.settings.schedule.num_devices
    zeros = engine.layout.global_shapes(["gradients", "buffers", "round"])
    empty = jax.jit(
        lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), zeros),
        out_shardings=jax.tree.map(lambda a: a.sharding, zeros),
    )
    everywhere = NamedSharding(program.settings.mesh, REPLICATED)

    def on_all_devices(value: Any) -> jax.Array:
        value = np.asarray(value)
        shape = (num_devices, *value.shape)
        whole = np.broadcast_to(value, shape)
        return jax.make_array_from_callback(shape, everywhere, whole.__getitem__)

    return PipelineState(
        **_pack(program, of_stage, loss_scale),
        **empty(),
        started=on_all_devices(np.int32(started)),
        key=on_all_devices(key_data),
        program=program,
    )


_PACKED = (
    "parameters",
    "read_parameters",
    "optimizer_state",
    "mutable_state",
    "loss_scale",
)
"""The groups of a state that `_pack` fills."""


def _pack(
    program: Program, of_stage: OfStage, loss_scale: Mapping | None
) -> dict[str, Any]:
    """The replicated arrays of a state, each stage's on the stage's devices."""
    engine, stages = program.engine, program.stages
    layout, mesh = engine.layout, program.settings.mesh
    shapes = layout.local_shapes(_PACKED)
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
            arrays["loss_scale"] = loss_scale or engine.loss_scale.start()

    def global_array(want: jax.ShapeDtypeStruct, *parts: np.ndarray) -> jax.Array:
        def shard(index):
            return parts[(index[0].start or 0) // len(parts[0])][:, *index[1:]]

        return jax.make_array_from_callback(want.shape, want.sharding, shard)

    return jax.tree.map(global_array, layout.global_shapes(_PACKED), *local)


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


def optimizer_state(state: PipelineState) -> list[dict[str, np.ndarray]]:
    """Path -> leaf of the optimizer's state, one dict per layer, of host arrays.

    Stages hold the same tree with None for the layers of other stages, so a path is the same at any
    cut. A leaf whose path ends with that of a weight belongs to the weight's layer, and only the
    dict of that layer has it. Other leaves, such as a count of updates, are in the dict of every
    layer of the stage.
    """
    program = state.program
    stages = program.stages
    weight_paths = {
        jax.tree_util.keystr((jax.tree_util.SequenceKey(i), *path)): i
        for i, layer in enumerate(stages.layers)
        for path, _ in jax.tree.leaves_with_path(layer.parameters)
    }
    local = _by_device(program, state.optimizer_state)
    per_layer: list = [{} for _ in stages.layers]
    for s in range(stages.num_stages):
        d, chunk = program.placement[s]
        paths, places = optimizer_paths(program, s), _update(program, s).state
        for path, place in zip(paths, places, strict=True):
            leaf = _read(local, d, (chunk,), place)
            owner = next((i for p, i in weight_paths.items() if path.endswith(p)), None)
            for i in stages.layers_of(s) if owner is None else [owner]:
                per_layer[i][path] = leaf
    return per_layer


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
