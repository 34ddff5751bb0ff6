"""Between a training state and one tree per layer.

A `PipelineState` holds packed arrays whose layout depends on the schedule, the cut and the mesh. Its
portable form, `Portable`, holds the same training without them: one tree per layer. `Pipeline.adopt`
goes through the portable form, and so do checkpoints that are restored into another layout.
"""

import dataclasses
import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jpipe._processes.sharing import processes_of
from jpipe._util.warn import warn
from jpipe.engine.layout import REPLICATED
from jpipe.engine.state import PipelineState, num_rounds
from jpipe.layers.quick_jit import quick_options, shared_jit
from jpipe.mesh import STAGE
from jpipe.optim.identity import difference
from jpipe.options.checks import check_fit
from jpipe.packing import Place
from jpipe.program import Program
from jpipe.stages.optimizer import seen_by_optimizer
from jpipe.stages.vocabulary import PartedLeaf, Unit
from jpipe.states.locations import (
    Locations,
    locations,
    optimizer_paths,
    owners,
    read,
    update_of,
)

OfLayers = Callable[[Sequence[int]], tuple[Sequence, Sequence, Any]]
"""The layers of a stage, or of a unit of vocabulary layers -> their weights and mutable state, one tree per layer of the
model, and the state of the optimizer for them."""


class Portable(NamedTuple):
    """A training state with nothing in flight, without schedule, cut and mesh.

    A leaf is a host array, or anything with a shape and a dtype that `np.asarray` reads. Only the leaves
    that this process needs are read.

    Attributes:
      params: one nested dict per layer: the newest weights.
      mutable_state: one nested dict per layer.
      optimizer_state: one dict per layer, path -> leaf; see `Locations`.
      loss_scale: the arrays of a loss scale that moves, `[1]` each; empty without one.
      num_microbatches: microbatches of training so far, of each replica.
      key_data: uint32, the data of the random key of training.
      key_impl: its implementation.
      optimizer: what the optimizer's state means, see `jpipe.optim.identity`; None: an old checkpoint does not say.
    """

    params: list
    mutable_state: list
    optimizer_state: list[dict[str, np.ndarray]]
    loss_scale: dict[str, np.ndarray]
    num_microbatches: int
    key_data: np.ndarray
    key_impl: Any
    optimizer: Mapping[str, Any] | None


def to_portable(state: PipelineState, layers: Container[int] | None = None) -> Portable:
    """The portable form of a state. Every process must call it.

    Args:
      state: the state.
      layers: the layers whose leaves this process needs; the leaves of others are abstract. None: all.

    Raises:
      ValueError: if the state has microbatches in flight.
    """
    check_nothing_in_flight(state)
    found = locations(state.program, num_rounds(state))
    leaves = read(state, found, None if layers is None else found.of_layers(layers))
    return _with_position(state, leaves)


def _with_position(state: PipelineState, leaves: Locations) -> Portable:
    """The leaves of a state with its position in training."""
    return Portable(
        **leaves._asdict(),
        num_microbatches=num_started(state),
        key_data=np.asarray(state.key.addressable_data(0)[0]),
        key_impl=state.program.engine.key_impl,
        optimizer=state.program.optimizer_identity,
    )


def minibatch_of(state: PipelineState) -> Any:
    """Abstract arrays shaped like a minibatch of the training."""
    settings = state.program.settings
    num_parts = settings.schedule.num_microbatches * settings.num_replicas
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((num_parts * a.shape[0], *a.shape[1:]), a.dtype),
        state.program.microbatch,
    )


def layers_here(program: Program) -> set[int]:
    """The layers that have a stage on a device of this process."""
    mesh, here = program.settings.mesh, jax.process_index()
    of_stages = {
        i
        for s, (d, _) in enumerate(program.placement)
        if any(a.process_index == here for a in _devices_along(mesh, STAGE, d))
        for i in program.stages.layers_of(s)
    }
    return of_stages | {layer.index for layer in program.stages.vocabulary.layers}


def num_started(state: PipelineState) -> int:
    """Microbatches of training so far, of each replica."""
    before = int(state.started.addressable_data(0)[0])
    return before + num_rounds(state) * state.program.settings.schedule.num_microbatches


def is_in_flight(state: PipelineState) -> bool:
    """Whether the state has microbatches in flight."""
    return not state.program.settings.schedule.synchronous and num_rounds(state) > 0


def check_nothing_in_flight(state: PipelineState) -> None:
    """Raises ValueError if the state has microbatches in flight."""
    if is_in_flight(state):
        raise ValueError(
            "`state` has microbatches in flight that only its own pipeline can complete. "
            "Flush it first: `state, metrics = other_pipe.flush(state)`."
        )


def from_portable(
    program: Program, source: Portable, *, matching: bool = False
) -> PipelineState:
    """A state of `program` that continues the training of `source`.

    Args:
      program: of the state.
      source: the training.
      matching: whether leaves of the optimizer's state that `source` does not have, or has in another shape or dtype, begin
        anew, and those that only `source` has are dropped. If not, both are errors.

    Raises:
      ValueError: if the layers or the optimizer differ, or one stage would hold layers whose stages
        had different values of a leaf that they share now.
    """
    stages, scale = program.stages, program.engine.numbers.loss_scale
    check_fit("params", source.params, stages.layers, "parameters")
    check_fit("mutable_state", source.mutable_state, stages.layers, "state")
    wanted = {layers: optimizer_paths(program, layers) for layers in owners(stages)}
    kept, read = set().union(*source.optimizer_state), set().union(*wanted.values())
    for paths, text in (
        (read - kept, "this pipeline keeps {}, which the state has not"),
        (kept - read, "the state has {}, which this pipeline does not keep"),
    ):
        if paths and not matching:
            raise ValueError(
                "`state` comes from a pipeline with another optimizer: "
                f"{text.format(min(paths))}. Give both pipelines the same Optax chain; keep what fits, with "
                '`adopt(state, optimizer="matching")`; or start the optimizer anew with `init(key, batch, params=...)`.'
            )
    if not matching:
        check_same_optimizer(program, source.optimizer)

    def leaf_of(
        layers: Sequence[int], path: str, want: jax.ShapeDtypeStruct
    ) -> np.ndarray:
        """The leaf at a path of the optimizer's state for the layers of a stage."""
        having = [
            i for i, leaves in enumerate(source.optimizer_state) if path in leaves
        ]
        here = [i for i in having if i in layers]
        values = {
            i: np.asarray(source.optimizer_state[i][path]) for i in here or having
        }
        (first, leaf), *others = values.items()
        for i, other in others:
            if leaf.tobytes() != other.tobytes():
                s = stages.stage_of(layers[0])
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

    init_one = shared_jit(program.settings.platform)

    def of_layers(layers: Sequence[int]) -> tuple:
        weights, mutable = (
            [
                jax.tree.map(np.asarray, tree) if i in layers else None
                for i, tree in enumerate(trees)
            ]
            for trees in (source.params, source.mutable_state)
        )
        paths = wanted[tuple(layers)]
        anew = {p for p, a in paths.items() if matching and not _has(source, p, a)}
        first: Sequence = [None] * len(paths)
        if anew:
            seen = seen_by_optimizer(stages, layers, weights)
            first = jax.tree.leaves(init_one(program.settings.optimizer.init, seen))
        return (
            weights,
            mutable,
            [
                value if path in anew else leaf_of(layers, path, like)
                for (path, like), value in zip(paths.items(), first, strict=True)
            ],
        )

    loss_scale = None
    if source.loss_scale and scale is not None and scale.growth_interval is not None:
        largest = np.float32(scale.largest)
        loss_scale = {n: np.asarray(a) for n, a in source.loss_scale.items()}
        loss_scale["scale"] = np.minimum(loss_scale["scale"], largest)
    return new_state(
        program, of_layers, source.key_data, source.num_microbatches, loss_scale
    )


def check_same_optimizer(program: Program, other: Mapping[str, Any] | None) -> None:
    """Raises ValueError if a state of the same names and shapes belongs to another optimizer than the program's.

    Args:
      program: that is to take over the state.
      other: the identity of the optimizer of the state; None: it is not known.
    """
    found = other and difference(program.optimizer_identity, other)
    if found:
        raise ValueError(
            f"`state` comes from a pipeline with another optimizer: {found}. Both keep arrays of the same names, with "
            "other meanings. Give both pipelines the same Optax chain, or start the optimizer anew with "
            "`init(key, batch, params=...)`."
        )


def _has(source: Portable, path: str, like: jax.ShapeDtypeStruct) -> bool:
    """Whether a training has a leaf of the optimizer's state like another one."""
    found = [leaves[path] for leaves in source.optimizer_state if path in leaves]
    return any((a.shape, a.dtype) == (like.shape, like.dtype) for a in found)


def with_params(
    state: PipelineState, function: Callable[[Any, Any], Any]
) -> PipelineState:
    """A state with nothing in flight whose newest weights are `function(params, optimizer_state)`.

    Every process must call it. The function is called once for each stage, and for each unit of vocabulary
    layers, with what the optimizer sees there.

    Raises:
      ValueError: if the function returns other shapes, dtypes or layers than it gets.
    """
    program = state.program
    stages, optimizer = program.stages, program.settings.optimizer
    leaves = read(state, locations(program, num_rounds(state)))
    params = [jax.tree.leaves(tree) for tree in leaves.params]
    for layers in owners(stages):
        seen = seen_by_optimizer(stages, layers, leaves.params)
        own = [
            next(of[path] for i in layers if path in (of := leaves.optimizer_state[i]))
            for path in optimizer_paths(program, layers)
        ]
        tree = jax.tree.structure(jax.eval_shape(optimizer.init, seen))
        given = function(seen, tree.unflatten(own))
        described = [
            jax.tree.map(lambda a: (np.shape(a), np.dtype(a.dtype)), of)
            for of in (seen, given)
        ]
        if described[0] != described[1]:
            raise ValueError(
                "`function` of `with_params` returns other shapes, dtypes or layers than it gets. It is called as "
                "`function(params, optimizer_state)` with what the optimizer sees of a stage: a list with one nested "
                "dict per layer, and None for layers of other stages."
            )
        tied = {copy for copies in stages.ties for copy in copies[1:]}
        values = iter(jax.tree.leaves(given))
        for i in sorted(layers):
            for j in range(len(params[i])):
                if (i, j) not in tied:
                    params[i][j] = np.asarray(next(values))
    for (i, j), *copies in stages.ties:
        for k, n in copies:
            params[k][n] = params[i][j]
    changed = [
        jax.tree.structure(tree).unflatten(values)
        for tree, values in zip(leaves.params, params, strict=True)
    ]
    source = _with_position(state, leaves._replace(params=changed))
    return from_portable(program, source)


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
    init_one = shared_jit(program.settings.platform)
    given: Any = (params, mutable_state)
    of_key = quick_options(next(iter(key.devices())).platform)
    fold_in = jax.jit(jax.random.fold_in, compiler_options=of_key)
    # Before `new_state` changes the default device: `fold_in` would compile on each.
    *keys, training_key = (fold_in(key, i) for i in range(len(layers) + 1))

    def initial_layer(i: int) -> list:
        """Weights and mutable state of a layer."""
        from_caller = [tree and jax.tree.map(np.asarray, tree[i]) for tree in given]
        if all(tree is not None for tree in given):
            return from_caller
        layer = layers[i]
        fresh = layer.given
        if fresh is None:
            assert layer.init is not None
            fresh = init_one(layer.init, keys[i])
        return [
            a if tree is not None else b
            for tree, a, b in zip(given, from_caller, fresh)
        ]

    def of_layers(numbers: Sequence[int]) -> tuple:
        weights: list = [None] * len(layers)
        mutable: list = [None] * len(layers)
        for i in numbers:
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
        seen = seen_by_optimizer(stages, numbers, weights)
        return weights, mutable, init_one(optimizer.init, seen)

    return new_state(program, of_layers, jax.random.key_data(training_key), 0)


def new_state(
    program: Program,
    of_layers: OfLayers,
    key_data: Any,
    started: int,
    loss_scale: Mapping[str, np.ndarray] | None = None,
) -> PipelineState:
    """A state with nothing in flight.

    Args:
      program: whose state it is.
      of_layers: called with the layers of a stage, under the default device that runs the stage.
      key_data: data of the random key of training.
      started: microbatches of training so far.
      loss_scale: arrays of the loss scale on one device; None: as before training.
    """
    return PipelineState(
        **_pack(program, of_layers, loss_scale),
        **_first_compression(program),
        **_zeros(
            program.engine.layout.global_shapes(["gradients", "buffers"]),
            program.settings.platform,
        ),
        **_counters(program, key_data, 0, started),
        program=program,
    )


def with_arrays(
    program: Program,
    arrays: Mapping[str, jax.Array],
    key_data: Any,
    rounds: int,
    started: int,
) -> PipelineState:
    """A state of given arrays, with the shardings that its program says.

    Args:
      program: whose state it is.
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
    found = {**_zeros(missing, program.settings.platform), **arrays}
    return PipelineState(
        **tree.unflatten([found[path] for path in paths]),
        **_counters(program, key_data, rounds, started),
        program=program,
    )


_COMPRESSION = ("gradient_compression", "message_compression")
"""The groups of a state that compressors keep."""


def _first_compression(program: Program) -> dict[str, Any]:
    """What compressors keep, before training: equal on all devices."""
    engine, num_devices = program.engine, program.settings.mesh.size
    wanted = engine.layout.global_shapes(_COMPRESSION)

    def first() -> dict[str, Any]:
        of_device = {
            "gradient_compression": engine.first_gradient_compression(),
            "message_compression": engine.first_message_compression(),
        }
        return jax.tree.map(lambda a: jnp.concatenate([a] * num_devices), of_device)

    return jax.jit(first, out_shardings=jax.tree.map(lambda a: a.sharding, wanted))()


def with_compression_of(state: PipelineState, source: PipelineState) -> PipelineState:
    """A state that has adopted another one, with what the other's compressors keep.

    If the compressors, the stages or the replicas differ, what compressors keep starts anew, and a warning says so.
    """
    mine, theirs = (
        {name: getattr(s, name) for name in _COMPRESSION} for s in (state, source)
    )
    if not jax.tree.leaves((mine, theirs)):
        return state
    if _meaning(state.program) != _meaning(source.program):
        warn_of_new_compression()
        return state
    shardings = jax.tree.map(lambda a: a.sharding, mine)
    # A copy, because a step of either pipeline donates its state.
    copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(theirs)
    return dataclasses.replace(state, **jax.device_put(copied, shardings))


def _meaning(program: Program) -> tuple:
    """What decides the layout and the meaning of the arrays that compressors keep."""
    settings, engine = program.settings, program.engine
    groups = [
        (group.name, [starts.tolist() for starts in group.starts])
        for group in engine.gradient_groups
    ]
    shapes = jax.tree.map(
        lambda a: (a.shape, a.dtype), engine.layout.local_shapes(_COMPRESSION)
    )
    return (
        settings.communication.compressors,
        groups,
        shapes,
        program.stages.starts,
        engine.lowered.copies,
        dict(settings.mesh.shape),
    )


def warn_of_new_compression() -> None:
    """Says that a state continues without what compressors had kept."""
    warn(
        "compression starts anew: the state comes of other compressors, stages or replicas. Thresholds and factors are "
        "computed again, and what replicas had not sent of their gradients is lost."
    )


def _zeros(shapes: Any, platform: str) -> Any:
    """Arrays of zeros, made where they lie: on devices of a platform."""
    size = sum(math.prod(a.shape) for a in jax.tree.leaves(shapes))
    return jax.jit(
        lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes),
        out_shardings=jax.tree.map(lambda a: a.sharding, shapes),
        compiler_options=quick_options(platform, size),
    )()


def _counters(
    program: Program, key_data: Any, rounds: int, started: int
) -> dict[str, Any]:
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


_PACKED = (
    "parameters",
    "read_parameters",
    "optimizer_state",
    "mutable_state",
    "loss_scale",
)
"""The groups of a state that `_pack` fills."""


def _pack(
    program: Program, of_layers: OfLayers, loss_scale: Mapping | None
) -> dict[str, Any]:
    """The arrays of a state that are kept between minibatches, each stage's on the stage's devices."""
    engine, stages = program.engine, program.stages
    layout, mesh = engine.layout, program.settings.mesh
    shapes = layout.local_shapes(_PACKED)
    local = [
        jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes)
        for _ in range(program.settings.schedule.num_devices)
    ]
    # By replica along the axis "data". Those that share an update have states of their own.
    num_states = layout.num_replicas if engine.shares_updates else 1
    states = [
        [jax.tree.map(np.copy, arrays["optimizer_state"]) for arrays in local]
        for _ in range(num_states)
    ]
    for s in range(stages.num_stages):
        copies = program.engine.lowered.copies[s]
        addressable = [
            device
            for d, _ in copies
            for device in _devices_along(mesh, STAGE, d)
            if device.process_index == jax.process_index()
        ]
        if not addressable:
            continue
        with jax.default_device(addressable[0]):
            weights, mutable, optimizer_state = of_layers(tuple(stages.layers_of(s)))
        state_leaves = jax.tree.leaves(optimizer_state)
        with jax.default_device(addressable[0]):
            read_weights = _read_weights(program, s, weights, state_leaves)
        for c, (d, chunk) in enumerate(copies):
            trees = weights, mutable, read_weights
            _pack_copy(program, s, local[d], (d, chunk), *trees)
            for r, arrays in enumerate(states):
                share = c * num_states + r
                _pack_share(program, s, arrays[d], (d, chunk), share, state_leaves)
    here = [a for a in mesh.devices.flat if a.process_index == jax.process_index()]
    for number, unit in enumerate(stages.vocabulary.units if here else ()):
        with jax.default_device(here[0]):
            _pack_unit(program, number, unit, of_layers, local, states)
    if engine.numbers.loss_scale is not None:
        for arrays in local:
            arrays["loss_scale"] = loss_scale or engine.numbers.loss_scale.start()

    def global_array(want: jax.ShapeDtypeStruct, *parts: np.ndarray) -> jax.Array:
        def shard(index):
            return parts[(index[0].start or 0) // len(parts[0])][:, *index[1:]]

        return jax.make_array_from_callback(want.shape, want.sharding, shard)

    wanted = layout.global_shapes(_PACKED)
    for arrays in local:
        del arrays["optimizer_state"]
    of_state = wanted.pop("optimizer_state")
    in_order = [arrays for of_replica in states for arrays in of_replica]
    return {
        **jax.tree.map(global_array, wanted, *local),
        "optimizer_state": jax.tree.map(global_array, of_state, *in_order),
    }


def _read_weights(
    program: Program, s: int, weights: Sequence, state_leaves: Sequence
) -> dict[str, list]:
    """Pass -> the leaves of a stage's weights that a parameter hook gives to the pass."""
    engine, result = program.engine, {}
    layers = program.stages.layers_of(s)
    for reader in engine.layout["read_parameters"].shapes:
        values = jax.tree.leaves(seen_by_optimizer(program.stages, layers, weights))
        delay = float(engine.delays[reader][s])
        if delay:
            hook = update_of(program, s).param_hooks[reader]
            values = hook(values, state_leaves, delay)
        result[reader] = values
    return result


def _pack_copy(
    program: Program,
    s: int,
    local: Mapping[str, Any],
    place_of_copy: tuple[int, int],
    weights: Sequence,
    mutable: Sequence,
    read_weights: Mapping[str, Sequence],
) -> None:
    """Writes one copy of a stage into the host arrays of its device.

    Args:
      program: of the state.
      s: the stage.
      local: the packed arrays of the device, by group.
      place_of_copy: the device, and the position of the stage among the device's stages.
      weights, mutable: one tree per layer of the model.
      read_weights: as `_read_weights` returns them.
    """
    d, chunk = place_of_copy
    of_groups = program.engine.array_rows
    versions = program.engine.lowered.rows.of_chunk(s, d, chunk)

    def lead(group: str, place: Place) -> tuple:
        own = versions if group == "parameters" else slice(chunk, chunk + 1)
        return (of_groups[group].rows(place.array, d, own),)

    for i, run, row in program.stages.layer_runs(s):
        for name, places, tree in (
            ("parameters", run.parameters, weights[i]),
            ("mutable_state", run.state, mutable[i]),
        ):
            for place, leaf in zip(places, jax.tree.leaves(tree), strict=True):
                _write(local[name], lead(name, place), place, row, leaf)
    update = update_of(program, s)
    for reader, values in read_weights.items():
        for copies, value in zip(update.parameters, values, strict=True):
            for place, row in copies:
                own = lead("parameters", place)
                _write(local["read_parameters"][reader], own, place, row, value)


def _pack_share(
    program: Program,
    s: int,
    local: Mapping[str, np.ndarray],
    place_of_copy: tuple[int, int],
    share: int,
    leaves: Sequence,
) -> None:
    """Writes what one replica of a stage keeps of the optimizer's state.

    Args:
      program: of the state.
      s: the stage.
      local: the packed state of the device.
      place_of_copy: the device, and the position of the stage among the device's stages.
      share: number of the share; the replicas of a stage that do not share have all of the state.
      leaves: of the optimizer's state.
    """
    rows = program.engine.array_rows["optimizer_state"]
    for pieces, leaf in zip(update_of(program, s).state, leaves, strict=True):
        for piece in pieces:
            if piece.share in (None, share):
                numbers = np.asarray(leaf).reshape(piece.view)[piece.index]
                lead = (rows.row(piece.place.array, *place_of_copy),)
                _write(local, lead, piece.place, 0, numbers)


def _pack_unit(
    program: Program,
    number: int,
    unit: Unit,
    of_layers: OfLayers,
    local: Sequence[Mapping[str, Any]],
    states: Sequence[Sequence[Mapping[str, Any]]],
) -> None:
    """Writes the parts of a unit of vocabulary layers into the host arrays of all devices.

    Args:
      program: of the state.
      number: of the unit.
      unit: the unit.
      of_layers: as in `new_state`.
      local: for each device its packed arrays, by group.
      states: for each replica that has a state of its own, each device's packed optimizer state. All replicas
        have the same of a unit.
    """
    engine, stages = program.engine, program.stages
    update, _, parted_state = engine.updates.of_units[number]
    layers = tuple(unit.places)
    weights, _, optimizer_state = of_layers(layers)
    state_leaves = jax.tree.leaves(optimizer_state)
    values = jax.tree.leaves(seen_by_optimizer(stages, layers, weights))
    read_weights = {"parameters": values}
    for reader in engine.layout["read_parameters"].shapes:
        delay = float(engine.delays[reader][unit.home])
        hook = update.param_hooks[reader]
        read_weights[reader] = hook(values, state_leaves, delay) if delay else values

    def parts(leaf: PartedLeaf | None, value: Any) -> Sequence:
        return [value] * len(local) if leaf is None else leaf.parts_of(value)

    every_version = (slice(None),)
    for reader, of_reader in read_weights.items():
        for (place, leaf), value in zip(unit.stored().items(), of_reader, strict=True):
            for arrays, part in zip(local, parts(leaf, value), strict=True):
                packed = arrays["read_parameters"].get(reader, arrays["parameters"])
                _write(packed, every_version, place, 0, part)
    pieces = (piece for (piece,) in update.state)
    for piece, parted, value in zip(pieces, parted_state, state_leaves, strict=True):
        for d, part in enumerate(parts(parted, value)):
            for of_replica in states:
                _write(of_replica[d], (0,), piece.place, 0, part)


# -- From a state to layers


def parameters(state: PipelineState) -> list | None:
    """The newest weights: one nested dict per layer, of host arrays; None but on the first process."""
    return _on_first(state, locations(state.program, num_rounds(state)).params)


def mutable_state(state: PipelineState) -> list | None:
    """The layers' mutable state: one nested dict per layer, of host arrays; None but on the first process."""
    return _on_first(state, locations(state.program, num_rounds(state)).mutable_state)


def _on_first(state: PipelineState, wanted: list) -> list | None:
    """The leaves at locations on the first process of the mesh, and None on the others."""
    if jax.process_index() == processes_of(state.program.settings.mesh)[0]:
        return read(state, wanted)
    read(state, wanted, needed=())
    return None


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


def _devices_along(mesh: Mesh, axis: str, index: int) -> list:
    """The devices at one position of one axis of a mesh."""
    dim = mesh.axis_names.index(axis)
    return list(np.moveaxis(mesh.devices, dim, 0)[index : index + 1].flat)
