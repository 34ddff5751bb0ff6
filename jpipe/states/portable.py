"""Between a training state and one tree per layer.

A `PipelineState` holds packed arrays whose layout depends on the schedule, the cut and the mesh. Its
portable form, `Portable`, holds the same training without them: one tree per layer. `Pipeline.adopt`
goes through the portable form, and so do checkpoints that are restored into another layout.
"""

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jpipe._processes.sharing import processes_of
from jpipe._util.warn import warn
from jpipe.engine.state import STATE_ARRAYS, PipelineState, num_rounds
from jpipe.engine.state_arrays import Adopted
from jpipe.layers.layer import Layer
from jpipe.layers.model_tree import is_whole, num_keys, picked
from jpipe.layers.quick_jit import quick_options, shared_jit
from jpipe.mesh import STAGE
from jpipe.optim.identity import difference
from jpipe.options.checks import check_fit
from jpipe.program import Program
from jpipe.stages.optimizer_tree import leaves_seen, seen_by_optimizer
from jpipe.states.locations import (
    LAYER_ARRAYS,
    Leaves,
    locations,
    optimizer_paths,
    read,
)
from jpipe.states.new import LayerValues, devices_along, new_state


class Portable(NamedTuple):
    """A training state with nothing in flight, without schedule, cut and mesh.

    A leaf is a host array, or anything with a shape and a dtype that `np.asarray` reads. Only the leaves
    that this process needs are read.

    Attributes:
      leaves: the numbers.
      num_microbatches: microbatches of training so far, of each replica.
      key_data: uint32, the data of the random key of training.
      key_impl: its implementation.
      optimizer: the meaning of the optimizer's state, see `jpipe.optim.identity`; None: an old checkpoint does not say.
    """

    leaves: Leaves
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
    leaves_at = locations(state.program, num_rounds(state))
    leaves = read(state, leaves_at, None if layers is None else leaves_at.locations_in(layers))
    return _with_position(state, leaves)


def _with_position(state: PipelineState, leaves: Leaves) -> Portable:
    """The leaves of a state with its position in training."""
    return Portable(
        leaves=leaves,
        num_microbatches=num_started(state),
        key_data=np.asarray(state.key.addressable_data(0)[0]),
        key_impl=state.program.engine.key_impl,
        optimizer=state.program.optimizer_identity,
    )


def minibatch_of(state: PipelineState) -> Any:
    """Abstract arrays shaped like a minibatch of the training."""
    return state.program.minibatch


def _cut_again(leaves: Leaves, layers: Sequence[Layer]) -> Leaves:
    """The leaves of a whole model by the layers that it is cut into here; those of a list of layers as they are."""
    if not is_whole(layers):
        return leaves
    trees = {}
    for array in LAYER_ARRAYS:
        assert array.leaves is not None
        name, like = array.leaves.name, array.leaves.like
        by_path = {p: leaf for tree in leaves.layers[name] for p, leaf in jax.tree.leaves_with_path(tree)}
        trees[name] = [picked(like(layer), by_path) for layer in layers]
    state = {path: leaf for layer_state in leaves.optimizer_state for path, leaf in layer_state.items()}
    return leaves._replace(layers=trees, optimizer_state=[state] * len(layers))


def layers_here(program: Program) -> set[int] | None:
    """The layers that a device of this process has, of any copy of their stage; None: all, where cuts may differ."""
    if is_whole(program.stages.layers):
        return None
    mesh, here = program.settings.mesh, jax.process_index()
    return {
        i
        for layers, copies in zip(program.stages.owners, program.engine.lowered.owner_copies, strict=True)
        if any(device.process_index == here for d, _ in copies for device in devices_along(mesh, STAGE, d))
        for i in layers
    }


def num_started(state: PipelineState) -> int:
    """Microbatches of training so far, of each replica."""
    before = int(state.started.addressable_data(0)[0])
    return before + num_rounds(state) * state.program.settings.schedule.num_microbatches


def is_in_flight(state: PipelineState) -> bool:
    """Returns whether the state has microbatches in flight."""
    return not state.program.settings.schedule.synchronous and num_rounds(state) > 0


def check_nothing_in_flight(state: PipelineState) -> None:
    """Raises ValueError if the state has microbatches in flight."""
    if is_in_flight(state):
        raise ValueError(
            "`state` has microbatches in flight that only its own pipeline can complete. "
            "Flush it first: `state, metrics = other_pipe.flush(state)`."
        )


def from_portable(program: Program, source: Portable, *, matching: bool = False) -> PipelineState:
    """A state of `program` that continues the training of `source`.

    Args:
      program: the program of the state.
      source: the training.
      matching: whether leaves of the optimizer's state that `source` does not have, or has in another shape or dtype,
        begin anew, and those that only `source` has are dropped. If not, both are errors.

    Raises:
      ValueError: if the layers or the optimizer differ, or one stage would hold layers whose stages
        had different values of a leaf that they share now.
    """
    stages, optimizer = program.stages, program.settings.optimizer
    leaves = _cut_again(source.leaves, stages.layers)
    check_fit("params", leaves.params, stages.layers, "parameters")
    mutable = leaves.layers["mutable_state"]
    check_fit("mutable_state", mutable, stages.layers, "state")
    wanted = {layers: optimizer_paths(program, layers) for layers in stages.owners}
    if not matching:
        _check_same_paths(leaves, set().union(*wanted.values()))
        check_same_optimizer(program, source.optimizer)
    init_one = shared_jit(program.settings.platform)

    def values_of(layers: Sequence[int]) -> LayerValues:
        trees = {
            name: [jax.tree.map(np.asarray, tree) if i in layers else None for i, tree in enumerate(trees_of_layers)]
            for name, trees_of_layers in leaves.layers.items()
        }
        paths = wanted[tuple(layers)]
        anew = {p for p, a in paths.items() if matching and not _has(leaves, p, a)}
        first: Sequence = [None] * len(paths)
        if anew:
            seen = seen_by_optimizer(stages, layers, trees["params"])
            first = jax.tree.leaves(init_one(optimizer.init, seen))
        state = [
            value if path in anew else _leaf_of(leaves, program, layers, path, like)
            for (path, like), value in zip(paths.items(), first, strict=True)
        ]
        return LayerValues(trees, state)

    return new_state(
        program,
        values_of,
        source.key_data,
        source.num_microbatches,
        _whole(program, leaves),
    )


def _whole(program: Program, leaves: Leaves) -> dict[str, dict[str, np.ndarray]]:
    """The arrays that a program takes over as they are: those that move in both trainings."""
    scale = program.engine.numbers.loss_scale
    whole = {
        name: {key: np.asarray(a) for key, a in arrays.items()}
        for name, arrays in leaves.whole.items()
        if arrays and scale is not None and scale.growth_interval is not None
    }
    if scale is not None and "loss_scale" in whole:
        loss_scale, largest = whole["loss_scale"], np.float32(scale.largest)
        loss_scale["scale"] = np.minimum(loss_scale["scale"], largest)
    return whole


def _check_same_paths(leaves: Leaves, read: set[str]) -> None:
    """Raises ValueError if a pipeline reads other leaves of the optimizer's state than there are."""
    kept = set().union(*leaves.optimizer_state)
    for paths, text in (
        (read - kept, "this pipeline keeps {}, which the state has not"),
        (kept - read, "the state has {}, which this pipeline does not keep"),
    ):
        if paths:
            raise ValueError(
                "`state` comes from a pipeline with another optimizer: "
                f"{text.format(min(paths))}. Give both pipelines the same Optax chain and `trainable`; keep what fits, "
                'with `adopt(state, optimizer="matching")`; or start the optimizer anew with '
                "`init(key, batch, params=...)`."
            )


def _leaf_of(
    source: Leaves,
    program: Program,
    layers: Sequence[int],
    path: str,
    want: jax.ShapeDtypeStruct,
) -> np.ndarray:
    """The leaf at a path of the optimizer's state for the layers of a stage."""
    having = [i for i, leaves in enumerate(source.optimizer_state) if path in leaves]
    here = [i for i in having if i in layers]
    values = {i: np.asarray(source.optimizer_state[i][path]) for i in here or having}
    (first, leaf), *others = values.items()
    for i, other in others:
        if leaf.tobytes() != other.tobytes():
            s = program.stages.stage_of(layers[0])
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


def check_same_optimizer(program: Program, other: Mapping[str, Any] | None) -> None:
    """Raises ValueError if a state of the same names and shapes belongs to another optimizer than the program's.

    Args:
      program: the program that is to take over the state.
      other: the identity of the optimizer of the state; None: it is not known.
    """
    problem = other and difference(program.optimizer_identity, other)
    if problem:
        raise ValueError(
            f"`state` comes from a pipeline with another optimizer: {problem}. Both keep arrays of the same names, "
            "with other meanings. Give both pipelines the same Optax chain, or start the optimizer anew with "
            "`init(key, batch, params=...)`."
        )


def _has(source: Leaves, path: str, like: jax.ShapeDtypeStruct) -> bool:
    """Returns whether a training has a leaf of the optimizer's state like another one."""
    candidates = [leaves[path] for leaves in source.optimizer_state if path in leaves]
    return any((a.shape, a.dtype) == (like.shape, like.dtype) for a in candidates)


def with_params(state: PipelineState, function: Callable[[Any, Any], Any]) -> PipelineState:
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
    for layers in stages.owners:
        seen = seen_by_optimizer(stages, layers, leaves.params)
        state_leaves = [
            next(of[path] for i in layers if path in (of := leaves.optimizer_state[i]))
            for path in optimizer_paths(program, layers)
        ]
        tree = jax.tree.structure(jax.eval_shape(optimizer.init, seen))
        given = function(seen, tree.unflatten(state_leaves))
        described = [jax.tree.map(lambda a: (np.shape(a), np.dtype(a.dtype)), of) for of in (seen, given)]
        if described[0] != described[1]:
            raise ValueError(
                "`function` of `with_params` returns other shapes, dtypes or layers than it gets. It is called as "
                "`function(params, optimizer_state)` with what the optimizer sees of a stage: a list with one nested "
                "dict per layer, and None for layers of other stages."
            )
        for (i, j), value in zip(leaves_seen(stages, layers), jax.tree.leaves(given), strict=True):
            params[i][j] = np.asarray(value)
    for (i, j), *copies in stages.ties:
        for k, n in copies:
            params[k][n] = params[i][j]
    changed = [jax.tree.structure(tree).unflatten(values) for tree, values in zip(leaves.params, params, strict=True)]
    layers_changed = {**leaves.layers, "params": changed}
    source = _with_position(state, leaves._replace(layers=layers_changed))
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
    key_options = quick_options(next(iter(key.devices())).platform)
    fold_in = jax.jit(jax.random.fold_in, compiler_options=key_options)
    # Before `new_state` changes the default device: `fold_in` would compile on each.
    *keys, training_key = (fold_in(key, i) for i in range(num_keys(layers) + 1))

    def initial_layer(i: int) -> list:
        """Weights and mutable state of a layer."""
        from_caller = [tree and jax.tree.map(np.asarray, tree[i]) for tree in given]
        if all(tree is not None for tree in given):
            return from_caller
        layer = layers[i]
        fresh = layer.given
        if fresh is None:
            assert layer.init is not None
            # Segments of a model take their weights from those of the whole, so a factory makes what it makes alone.
            fresh = init_one(layer.init, keys[0 if is_whole(layers) else i])
        return [a if tree is not None else b for tree, a, b in zip(given, from_caller, fresh)]

    def values_of(numbers: Sequence[int]) -> LayerValues:
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
        trees = {"params": weights, "mutable_state": mutable}
        return LayerValues(trees, init_one(optimizer.init, seen))

    return new_state(program, values_of, jax.random.key_data(training_key), 0, {})


# -- Compression


_ALIKE = tuple(a.name for a in STATE_ARRAYS if a.adopted is Adopted.ALIKE)
"""The arrays of a state that compressors keep."""


def with_compression_of(state: PipelineState, source: PipelineState) -> PipelineState:
    """The adopted state, with the arrays of the other state's compressors.

    If the compressors, the stages or the replicas differ, what compressors keep starts anew, and a warning says so.
    """
    mine, theirs = ({name: getattr(s, name) for name in _ALIKE} for s in (state, source))
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
    """The facts that decide the layout and the meaning of the arrays that compressors keep."""
    settings, engine = program.settings, program.engine
    groups = [(group.name, [starts.tolist() for starts in group.starts]) for group in engine.gradient_groups]
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), engine.layout.local_shapes(_ALIKE))
    return (
        settings.communication.compressors,
        groups,
        shapes,
        program.stages.starts,
        engine.lowered.copies,
        dict(settings.mesh.shape),
    )


def warn_of_learners() -> None:
    """Warns that a state of learners has become one of another layout."""
    warn(
        "the state is of replicas that train apart (`local_steps`), and goes on with the weights of the last outer "
        "step: call `outer_step` before. All replicas begin with the first learner's optimizer state and mutable "
        "state, and the outer optimizer begins anew."
    )


def warn_of_new_compression() -> None:
    """Warns that a state continues without the arrays of its compressors."""
    warn(
        "compression starts anew: the state comes of other compressors, stages or replicas. Thresholds and factors are "
        "computed again, and what replicas had not sent of their gradients is lost."
    )


# -- From a state to layers


def parameters(state: PipelineState) -> list | None:
    """The newest weights: one nested dict per layer, of host arrays; None but on the first process."""
    return _on_first(state, locations(state.program, num_rounds(state)).params)


def mutable_state(state: PipelineState) -> list | None:
    """The layers' mutable state: one nested dict per layer, of host arrays; None but on the first process."""
    return _on_first(state, locations(state.program, num_rounds(state)).layers["mutable_state"])


def _on_first(state: PipelineState, wanted: list) -> list | None:
    """The leaves at locations on the first process of the mesh, and None on the others."""
    if jax.process_index() == processes_of(state.program.settings.mesh)[0]:
        return read(state, wanted)
    read(state, wanted, needed=())
    return None
