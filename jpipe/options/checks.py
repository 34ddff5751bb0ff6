"""Checks of arguments: each raises a `ValueError` with a remedy before anything is compiled."""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jpipe._processes.sharing import check_processes
from jpipe._util.foreign import shown
from jpipe._util.warn import warn
from jpipe.layers.avals import is_inexact, is_key
from jpipe.layers.call_arguments import as_given
from jpipe.layers.layer import Layer
from jpipe.layers.loss import WholeBatchLoss
from jpipe.layers.state_update import StateUpdate
from jpipe.lowering.lower import mixes_minibatches
from jpipe.lowering.target import target_of
from jpipe.mesh import STAGE, automatic
from jpipe.schedule import IDLE, Schedule
from jpipe.stages.cut import Stages

# -- Arguments of `Pipeline`


def check_truth(argument: str, value: Any) -> bool:
    """An argument that is a truth: a text such as "no" would count as True."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"`{argument}` must be True or False, got {shown(value)}.")
    return bool(value)


def check_schedule(schedule: Any) -> Schedule:
    """The schedule, if it is a legal table that trains."""
    if not isinstance(schedule, Schedule):
        raise ValueError(
            f"`schedule` must be a `jpipe.Schedule`, got {shown(schedule)}. Make one with "
            "`jpipe.schedules`, for example "
            "`jpipe.schedules.one_f_one_b(num_stages=4, num_microbatches=8)`."
        )
    schedule.check()
    if schedule.forward_only:
        raise ValueError(
            f"`schedule` {shown(schedule.name)} is forward-only, and a pipeline trains. "
            "`Pipeline.predict` makes its own forward-only table."
        )
    return schedule


def check_loss(loss: Any, schedule: Schedule) -> Callable:
    """The loss, if it can be called, and the schedule has all outputs when it needs them."""
    if not callable(loss):
        raise ValueError(f"`loss` must be a function `(outputs, batch) -> scalar`, got {type(loss).__name__}.")
    if isinstance(loss, type):
        raise ValueError(
            f"`loss` must be a function `(outputs, batch) -> scalar`, got the class {loss.__name__}. Give an object of "
            f"it, such as `{loss.__name__}(...)`."
        )
    if isinstance(loss, WholeBatchLoss):
        forwards, backwards = (
            np.flatnonzero((ticks != IDLE).any(axis=1)) for ticks in (schedule.forward, schedule.backward)
        )
        if backwards[0] <= forwards[-1] or not schedule.drains:
            raise ValueError(
                "`WholeBatchLoss` needs the outputs of all microbatches before the first backward, and in schedule "
                f"{shown(schedule.name)} backwards begin in tick {backwards[0]} and forwards end in tick "
                f"{forwards[-1]}. Choose `jpipe.schedules.gpipe`, whose forwards all come first; or one microbatch per "
                "minibatch, `num_microbatches=1`, and give the function itself as `loss`: then it sees all rows of a "
                "replica."
            )
        if len(schedule.copies[-1]) > 1:
            raise ValueError(
                "`WholeBatchLoss` needs the outputs of all microbatches on one device, and the last stage of schedule "
                f"{shown(schedule.name)} has {len(schedule.copies[-1])} copies. Give it one, or use replicas along the "
                'axis "data".'
            )
    return loss


def check_optimizer(optimizer: Any) -> Any:
    """The optimizer, if it is an Optax transformation."""
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        hint = ""
        if callable(optimizer):
            hint = " If it makes one, as `optax.sgd` does, call it with its learning rate."
        elif isinstance(optimizer, nnx.Optimizer):
            hint = " Give the transformation that it holds, `optimizer.tx`."
        elif isinstance(optimizer, tuple | list):
            hint = " Make one of several by `optax.chain(...)`."
        raise ValueError(
            f"`optimizer` must be an Optax transformation, such as `optax.sgd(0.1)`, got {type(optimizer).__name__}."
            f"{hint}"
        )
    return optimizer


def check_hooks(**hooks: Any) -> dict[str, Callable]:
    """The hooks that are given, by the pass that reads their weights: "forward", "backward"."""
    for name, hook in hooks.items():
        if hook is not None and not callable(hook):
            example = "predicted" if name == "forward" else "corrected"
            raise ValueError(
                f"`{name}_params` must be a function `(params, optimizer_state, delay) -> "
                f"params`, such as `jpipe.optim.{example}_params`, got "
                f"{type(hook).__name__}."
            )
    return {name: hook for name, hook in hooks.items() if hook is not None}


def check_ties(ties: Any) -> list:
    """`ties` as a list, if its form is right. `resolve_ties` checks the names in it."""

    def is_parameter(pair: Any) -> bool:
        return (
            isinstance(pair, Sequence) and len(pair) == 2 and hasattr(pair[0], "__index__") and isinstance(pair[1], str)
        )

    for tie in ties:
        if not (isinstance(tie, Sequence) and all(map(is_parameter, tie))):
            raise ValueError(
                'each of `ties` must be a sequence of `(layer, "dotted.path")` pairs, such '
                'as `[(0, "token.embedding"), (-1, "embedding")]`, got '
                f"{shown(tie)}."
            )
    return list(ties)


def check_mesh(mesh: Any, schedule: Schedule) -> Mesh:
    """The mesh, its axes automatic, if it has an axis "stage" of the schedule's number of devices."""
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"`mesh` must be a `jax.sharding.Mesh`, got {type(mesh).__name__}. Make it "
            f"with `jpipe.make_mesh(stage={schedule.num_devices})`."
        )
    sizes = dict(mesh.shape)
    if STAGE not in sizes:
        raise ValueError(f'`mesh` must have an axis "stage", got axes {sizes}. Make it with `jpipe.make_mesh`.')
    if sizes[STAGE] != schedule.num_devices:
        raise ValueError(
            f'the axis "stage" of `mesh` must have the {schedule.num_devices} devices of '
            f"schedule {shown(schedule.name)}, got {sizes[STAGE]}. Use "
            f"`jpipe.make_mesh(stage={schedule.num_devices})`, or a schedule for "
            f"{sizes[STAGE]} devices."
        )
    check_processes(mesh)
    return automatic(mesh)


@functools.cache
def advise(platform: str) -> None:
    """Says once what a user of a platform should install. Stand-in devices need nothing."""
    if platform not in ("cpu", "tpu") and target_of(platform).touches_idle:
        warn(
            f"jpipe is slower on GPUs with JAX {jax.__version__} than with JAX 0.12: a device that is idle in a tick "
            "touches every array, and products get copies of their weights. Install Python 3.12 or newer and JAX 0.12."
        )


def check_compiler_options(options: Any) -> dict[str, bool | int | float | str]:
    """`compiler_options` as a dict. XLA itself checks the names, when it compiles."""
    if options is None:
        return {}
    pairs = options.items() if isinstance(options, Mapping) else [(None, None)]
    for name, value in pairs:
        if not (isinstance(name, str) and isinstance(value, bool | int | float | str)):
            raise ValueError(
                "`compiler_options` must be a dict of options of XLA, name -> bool, number or text, "
                f"got {shown(options)}. For example: {{'xla_gpu_enable_triton_gemm': False}}."
            )
    return dict(options)


# -- Batches and keys


def batch_size(batch: Any) -> int:
    """The number of rows of a minibatch, if it is a dict of arrays with one leading axis."""
    _check_names(batch)
    if not isinstance(batch, Mapping) or "inputs" not in batch:
        got = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(f'`batch` must be a dict of arrays with an entry "inputs", which feeds layer 0, got {got}.')
    if not jax.tree.leaves(batch["inputs"]):
        raise ValueError(f'`batch["inputs"]` must hold an array, which feeds layer 0, got {shown(batch["inputs"])}.')
    sizes = {}
    for path, leaf in jax.tree.leaves_with_path(dict(as_given(batch))):
        name = f"batch{jax.tree_util.keystr(path)}"
        if not hasattr(leaf, "dtype") or len(getattr(leaf, "shape", ())) == 0:
            is_in_list = any(isinstance(k, jax.tree_util.SequenceKey) for k in path)
            remedy = "Convert lists with `np.asarray`." if is_in_list else "Repeat what is the same for all rows."
            raise ValueError(f"`{name}` must be an array with a leading minibatch axis, got {shown(leaf)}. {remedy}")
        if not (jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool):
            raise ValueError(
                f"`{name}` must hold numbers or truths, got dtype {leaf.dtype}. Leave out "
                "what neither the model nor the loss reads; give random keys as `jax.random.key_data(keys)`."
            )
        sizes[name] = leaf.shape[0]
    if len(set(sizes.values())) > 1:
        raise ValueError(f"every entry of `batch` must have the same leading axis, the minibatch, got {sizes}.")
    return next(iter(sizes.values()))


def _check_names(batch: Any) -> None:
    """Refuses names of entries that JAX cannot sort."""
    if isinstance(batch, Mapping) and not all(isinstance(name, str) for name in batch):
        raise ValueError(f"the entries of `batch` must have texts as names, got {shown(list(batch))}.")


def check_not_traced(method: str, *trees: Any) -> None:
    """Refuses arrays of `jax.jit`, `jax.grad` and other transformations, and dicts of names that JAX cannot sort."""
    for tree in trees:
        _check_names(tree)
    if any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves(trees)):
        raise ValueError(
            f"`Pipeline.{method}` is called inside a transformation such as `jax.jit` or "
            "`jax.grad`, and cannot be traced. It runs compiled programs and takes the "
            "gradient itself: call it from plain Python."
        )


def check_key(key: Any) -> None:
    """Raises ValueError if `key` is not one random key."""
    is_array = isinstance(key, jax.Array)
    if not (is_array and key.shape == (() if is_key(key) else (2,))):
        got = type(key).__name__
        if isinstance(key, jax.Array | np.ndarray):
            got = f"an array {key.dtype}{list(key.shape)}"
        raise ValueError(
            f"`key` must be a key as `jax.random.key(seed)` makes it, got {key if isinstance(key, int) else got}."
        )


def placed_key(key: jax.Array) -> jax.Array:
    """A random key, typed, on the default device: its value counts, not the devices that it is on."""
    impl = jax.random.key_impl(key) if is_key(key) else None
    data = np.asarray(jax.random.key_data(key) if is_key(key) else key)
    return jax.random.wrap_key_data(jnp.asarray(data), impl=impl)


# -- Weights and states


def check_fit(what: str, values: Any, layers: Sequence, attribute: str) -> None:
    """Refuses values that do not fit the layers.

    Args:
      what: the name of the argument, "params" or "mutable_state".
      values: one nested dict per layer.
      layers: bound layers.
      attribute: the attribute of a layer that holds the abstract values.
    """
    if not isinstance(values, Sequence) or len(values) != len(layers):
        size = len(values) if isinstance(values, Sequence) else type(values).__name__
        raise ValueError(f"`{what}` must be a list with one entry per layer ({len(layers)}), got {size}.")

    def texts(tree: Any) -> dict[str, str]:
        return {
            jax.tree_util.keystr(path): (f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(np.shape(leaf))}")
            for path, leaf in jax.tree.leaves_with_path(tree)
        }

    for i, (value, layer) in enumerate(zip(values, layers)):
        want, got = texts(getattr(layer, attribute)), texts(value)
        if want != got:
            paths = itertools.chain(want, got)
            path = next(p for p in paths if want.get(p) != got.get(p))
            raise ValueError(
                f"`{what}` of layer {i} ({layer.name}) do not fit: {path} should be "
                f"{want.get(path, 'absent')}, got {got.get(path, 'nothing')}. Pass what "
                f"`get_{what}` of the same layers returned."
            )


def check_ties_agree(params: Sequence, stages: Stages) -> None:
    """Refuses weights that differ between the layers that share them."""
    for copies in stages.ties:
        values = [np.asarray(jax.tree.leaves(params[i])[j]) for i, j in copies]
        for (i, _), value in zip(copies[1:], values[1:]):
            if not np.array_equal(values[0], value):
                raise ValueError(
                    f"`params` hold different values in layers {copies[0][0]} and {i} for "
                    "a weight that they share. Give both the same values."
                )


def check_same_parts(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuses a state of a pipeline that differs, and names the part that does.

    Args:
      theirs: `Program.parts` or `Settings.parts` of the state's pipeline.
      ours: the same record of this pipeline.
    """
    for name, part in ours.items():
        if theirs[name] != part:
            text = f" ({theirs[name]!r} there, {part!r} here)"
            shown = text if len(text) <= 100 else ""
            raise ValueError(
                f"`state` was made by another pipeline, which differs in `{name}`{shown}. Take "
                "the state over with `state = pipe.adopt(state)`."
            )


# -- What depends on how the layers are cut


def check_stages(stages: Stages, schedule: Schedule, recompute: Any, num_replicas: int) -> None:
    """Refuses stages that the schedule, `recompute` or replicas cannot run."""
    for copies in stages.ties:
        on_stages = sorted({stages.stage_of(layer) for layer, j in copies if j not in stages.layers[layer].frozen})
        if len(on_stages) > 1 and not schedule.synchronous:
            raise ValueError(
                f"layers {', '.join(str(i) for i, _ in copies)} share weights but lie on "
                f"stages {', '.join(map(str, on_stages))}, which the asynchronous schedule "
                f"{schedule.name!r} updates at different times. Choose `boundaries` that "
                "keep them on one stage, or a synchronous schedule."
            )
    for i, layer in enumerate(stages.layers):
        s = stages.stage_of(i)
        update = stages.mutable[stages.kind_of_layer[i]]
        _check_sequence(layer, i, update, schedule, s, num_replicas)
        if update.moves and mixes_minibatches(schedule, s):
            raise ValueError(
                f"layer {i} ({layer.name}) has mutable state, and schedule {shown(schedule.name)} runs "
                f"forwards of two minibatches at the same time on copies of its stage, {s}. The "
                "state moves once per minibatch. Use paired ticks, or a stage without copies."
            )
    if recompute == "full":
        for i, layer in enumerate(stages.layers):
            k = stages.kind_of_layer[i]
            if stages.mutable[k].is_read_by(stages.layer_kinds[k]):
                raise ValueError(
                    f"layer {i} ({layer.name}) reads its mutable state in training, which "
                    'has moved on when `recompute="full"` runs it again. Use '
                    '`recompute="none"`, or a policy of `jax.checkpoint_policies`.'
                )


def _check_sequence(
    layer: Layer,
    i: int,
    update: StateUpdate,
    schedule: Schedule,
    stage: int,
    num_replicas: int,
) -> None:
    """Refuses state that goes from microbatch to microbatch if microbatches do not come one after the other."""
    num_copies = len(schedule.copies[stage])
    start = f"layer {i} ({layer.name}) moves its mutable state"
    if update.sequence and num_copies > 1:
        raise ValueError(
            f"{start} {_paths(layer, update.sequence)} in every microbatch, and its stage has {num_copies} copies, "
            "which run microbatches side by side. Give this stage one copy. (Running statistics of batch norms may "
            "have copies.)"
        )
    if num_replicas == 1 or not update.varying:
        return
    if not schedule.synchronous:
        raise ValueError(
            f"{start} {_paths(layer, update.varying)} in every microbatch by what it sees, and in the asynchronous "
            f"schedule {schedule.name!r} the states of {num_replicas} replicas would differ while a minibatch is in "
            "flight. Use a synchronous schedule, or one replica."
        )
    integer = [j for j in update.varying if not is_inexact(update.leaves[j])]
    if integer:
        raise ValueError(
            f'{start} {_paths(layer, integer)} by what it sees, and {num_replicas} replicas along "data" see other '
            "rows. A mean over replicas has no meaning for integers. Make it float32, change it by the state alone, "
            "such as `count + 1`, or use one replica."
        )


def _paths(layer: Layer, positions: Iterable[int]) -> str:
    """Leaves of a layer's state, for messages."""
    paths = [path for path, _ in jax.tree.leaves_with_path(layer.state)]
    return ", ".join(jax.tree_util.keystr(paths[j]) for j in positions)
