"""Checks of arguments: each raises a `ValueError` with a remedy before anything is compiled."""

import itertools
import numbers
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jpipe._processes.sharing import check_processes
from jpipe._util.entry_points import load
from jpipe._util.foreign import shown
from jpipe._util.sizes import parse_size
from jpipe._util.suggest import did_you_mean
from jpipe._util.warn import warn
from jpipe.compress import Compressor, SparseCompressor, StreamingPCA
from jpipe.engine.loss_scale import LossScale
from jpipe.engine.state import PipelineState
from jpipe.layers.avals import is_inexact, is_key
from jpipe.layers.layer import Layer
from jpipe.layers.layer_split import Strategy
from jpipe.layers.state_update import StateUpdate
from jpipe.lowering.lower import mixes_minibatches
from jpipe.mesh import DATA, FSDP, HOST_MEMORY, STAGE, automatic, memory_kinds
from jpipe.packing import axes
from jpipe.schedule import Schedule
from jpipe.stages.codecs import NO_COMPRESSION, MessageCompression
from jpipe.stages.cut import Stages
from jpipe.stages.offload import NO_OFFLOAD, Offload

# -- Arguments of `Pipeline`


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


def check_loss(loss: Any) -> Callable:
    """The loss, if it can be called."""
    if not callable(loss):
        raise ValueError(
            "`loss` must be a function `(outputs, batch) -> scalar`, got "
            f"{type(loss).__name__}."
        )
    return loss


def check_optimizer(optimizer: Any) -> Any:
    """The optimizer, if it is an Optax transformation."""
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ValueError(
            "`optimizer` must be an Optax transformation, such as `optax.sgd(0.1)`, got "
            f"{type(optimizer).__name__}."
        )
    return optimizer


def check_recompute(recompute: Any) -> Any:
    """`recompute`, if it is a known name or a checkpoint policy."""
    policies = vars(jax.checkpoint_policies)
    policy_makers = [
        name
        for name, policy in policies.items()
        if policy is recompute and name.startswith(("save_", "offload_"))
    ]
    if recompute in ("none", "full") or (callable(recompute) and not policy_makers):
        return recompute
    remedy = ""
    if policy_makers:
        remedy = f" Call it to get a policy: `jax.checkpoint_policies.{policy_makers[0]}(...)`."
    elif isinstance(recompute, str):
        name = recompute.rpartition(".")[2]
        remedy = did_you_mean(name, ["none", "full", *policies])
    raise ValueError(
        '`recompute` must be "none", "full" or a policy of `jax.checkpoint_policies`, got '
        f"{shown(recompute)}.{remedy}"
    )


def floating_dtype(dtype: Any) -> np.dtype | None:
    """`compute_dtype` as a dtype, if it is one of floating-point numbers, or None."""
    try:
        checked = None if dtype is None else jnp.dtype(dtype)
    except (TypeError, ValueError, RecursionError):  # it is written out, or not a dtype
        checked = np.dtype(object)
    if checked is not None and not jnp.issubdtype(checked, jnp.floating):
        raise ValueError(
            "`compute_dtype` must be a floating-point dtype, such as `jnp.bfloat16`, or "
            f"None, got {shown(dtype)}."
        )
    return checked


def check_loss_scale(scale: Any, schedule: Schedule) -> LossScale | None:
    """`loss_scale` as a `LossScale`, if the schedule can use it, or None."""
    if scale is None:
        return None
    if isinstance(scale, (int, float)) and not isinstance(scale, bool):
        scale = LossScale(scale, None, largest=np.inf)
    if not isinstance(scale, LossScale):
        raise ValueError(
            f"`loss_scale` must be a number, a `jpipe.LossScale` or None, got {shown(scale)}."
        )
    if scale.growth_interval is not None and not schedule.synchronous:
        raise ValueError(
            "a loss scale that moves needs a synchronous schedule: in "
            f"{schedule.name!r} one update would add gradients of different scales. Use a "
            f"constant scale, such as `loss_scale={scale.initial:g}`."
        )
    return scale


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
            isinstance(pair, Sequence)
            and len(pair) == 2
            and hasattr(pair[0], "__index__")
            and isinstance(pair[1], str)
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
        raise ValueError(
            f'`mesh` must have an axis "stage", got axes {sizes}. Make it with '
            "`jpipe.make_mesh`."
        )
    if sizes[STAGE] != schedule.num_devices:
        raise ValueError(
            f'the axis "stage" of `mesh` must have the {schedule.num_devices} devices of '
            f"schedule {shown(schedule.name)}, got {sizes[STAGE]}. Use "
            f"`jpipe.make_mesh(stage={schedule.num_devices})`, or a schedule for "
            f"{sizes[STAGE]} devices."
        )
    check_processes(mesh)
    return automatic(mesh)


def check_overlap(overlap: Any, mesh: Mesh) -> bool:
    """`overlap`, decided by the platform of the devices if it is None."""
    if overlap not in (None, True, False):
        raise ValueError(
            f"`overlap` must be True, False or None, got {shown(overlap)}. With None the "
            "platform of the devices decides."
        )
    if overlap is None:
        return mesh.devices.flat[0].platform != "cpu"
    return overlap


def check_shard_optimizer(shard: Any, mesh: Mesh, schedule: Schedule) -> bool:
    """`shard_optimizer`; there must be replicas that can share an update."""
    if shard not in (True, False):
        raise ValueError(
            f"`shard_optimizer` must be True or False, got {shown(shard)}."
        )
    if shard and mesh.shape.get(DATA, 1) == 1 and not schedule.has_copies:
        raise ValueError(
            "`shard_optimizer` shares the optimizer's state between the replicas of a stage, and there is one replica: "
            f'the mesh has the axes {dict(mesh.shape)}. Give the mesh an axis "data", for example by '
            f"`jpipe.make_mesh(stage={schedule.num_devices}, data=2)`, give the schedule `replicas`, or leave "
            "`shard_optimizer` out."
        )
    return bool(shard)


def check_compress_gradients(
    compressor: Any, mesh: Mesh, schedule: Schedule, shard_optimizer: bool
) -> Compressor | None:
    """`compress_gradients`; there must be replicas whose weights are whole."""
    if compressor is None:
        return None
    if not isinstance(compressor, Compressor):
        raise ValueError(
            f"`compress_gradients` must be a compressor of `jpipe.compress`, got {shown(compressor)}. For example "
            "`jpipe.compress.PowerSGD(rank=4)`."
        )
    if mesh.shape.get(DATA, 1) == 1 and not schedule.has_copies:
        raise ValueError(
            "`compress_gradients` compresses what the replicas of a stage exchange, and there is one replica: the mesh "
            f'has the axes {dict(mesh.shape)}. Give the mesh an axis "data", for example by '
            f"`jpipe.make_mesh(stage={schedule.num_devices}, data=2)`, give the schedule `replicas`, or leave "
            "`compress_gradients` out."
        )
    if shard_optimizer:
        raise ValueError(
            "`compress_gradients` and `shard_optimizer` exclude each other: every replica needs the whole gradient to "
            "know what it has not sent, and a shared update gives it a share. Leave one of them out."
        )
    _check_whole("compress_gradients", mesh)
    return compressor


def check_accumulate_gradients(
    compressor: Any, mesh: Mesh, schedule: Schedule, others: Mapping[str, Any]
) -> StreamingPCA | None:
    """`accumulate_gradients`; weights are whole, and one device has a stage.

    Args:
      compressor: the argument.
      mesh: the devices.
      schedule: the table.
      others: name -> value of the arguments that exclude it.
    """
    if compressor is None:
        return None
    if not isinstance(compressor, StreamingPCA):
        raise ValueError(
            "`accumulate_gradients` must be a `jpipe.compress.StreamingPCA`, which updates factors from the inputs of a "
            f"layer and the gradients by its outputs, got {shown(compressor)}. For example `jpipe.compress.StreamingPCA(rank=4)`. "
            "Other compressors need the gradient: they are for `compress_gradients`."
        )
    for name, value in others.items():
        if value:
            raise ValueError(
                f"`accumulate_gradients` and `{name}` exclude each other: replicas have equal factors already, and no "
                f"gradient to exchange. Leave `{name}` or `accumulate_gradients` out."
            )
    if schedule.has_copies:
        raise ValueError(
            "`accumulate_gradients` updates factors microbatch by microbatch, and the schedule has several copies of a stage, "
            'of which each sees some microbatches. Take a schedule without `replicas`, or replicas along "data".'
        )
    _check_whole("accumulate_gradients", mesh)
    return compressor


def message_compression(compress: Any) -> MessageCompression:
    """`compress_messages` as a compressor of activations and one of gradients."""
    if compress is None:
        return NO_COMPRESSION
    if isinstance(compress, Mapping):
        unknown = [name for name in compress if name not in MessageCompression._fields]
        if unknown or not compress:
            raise ValueError(
                '`compress_messages` must be a compressor or a dict with one for "activations", "gradients" or both, '
                f"got a dict with {shown(list(compress)) if compress else 'nothing'}. For example "
                '`{"activations": jpipe.compress.Quantize(8)}`.'
            )
        found = MessageCompression(**compress)
    elif isinstance(compress, SparseCompressor):
        found = MessageCompression(compress)
    else:
        found = MessageCompression(compress, compress)
    for compressor in found:
        if not isinstance(compressor, Compressor | None):
            raise ValueError(
                f"`compress_messages` must be a compressor of `jpipe.compress`, got {shown(compressor)}. For example "
                "`jpipe.compress.Quantize(bits=8)`."
            )
    return found


def check_compress_messages(
    compress: Any, mesh: Mesh, schedule: Schedule
) -> MessageCompression:
    """`compress_messages`; there must be several stages, whose messages are whole."""
    found = message_compression(compress)
    if found == NO_COMPRESSION:
        return found
    if schedule.num_stages == 1:
        raise ValueError(
            "`compress_messages` compresses what stages send to each other, and there is one stage. Choose a schedule with "
            "more stages, or leave it out."
        )
    _check_whole("compress_messages", mesh)
    return found


def _check_whole(argument: str, mesh: Mesh) -> None:
    """Refuses a mesh that splits arrays inside of a stage."""
    split = [n for n, size in mesh.shape.items() if size > 1 and n not in (STAGE, DATA)]
    if split:
        raise ValueError(
            f"`{argument}` compresses arrays that are whole on a device, and the mesh splits them over the axes {split}: "
            f"it has the axes {dict(mesh.shape)}. Leave these axes or `{argument}` out."
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
    if not isinstance(batch, Mapping) or "inputs" not in batch:
        got = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(
            '`batch` must be a dict of arrays with an entry "inputs", which feeds layer '
            f"0, got {got}."
        )
    if not jax.tree.leaves(batch["inputs"]):
        raise ValueError(
            f'`batch["inputs"]` must hold an array, which feeds layer 0, got {shown(batch["inputs"])}.'
        )
    sizes = {}
    for path, leaf in jax.tree.leaves_with_path(dict(batch)):
        name = f"batch{jax.tree_util.keystr(path)}"
        if not hasattr(leaf, "dtype") or len(getattr(leaf, "shape", ())) == 0:
            is_in_list = any(isinstance(k, jax.tree_util.SequenceKey) for k in path)
            remedy = " Convert lists with `np.asarray`." if is_in_list else ""
            raise ValueError(
                f"`{name}` must be an array with a leading minibatch axis, got "
                f"{shown(leaf)}.{remedy}"
            )
        if not (jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool):
            raise ValueError(
                f"`{name}` must hold numbers or truths, got dtype {leaf.dtype}. Leave out "
                "what neither the model nor the loss reads; give random keys as `jax.random.key_data(keys)`."
            )
        sizes[name] = leaf.shape[0]
    if len(set(sizes.values())) > 1:
        raise ValueError(
            "every entry of `batch` must have the same leading axis, the minibatch, got "
            f"{sizes}."
        )
    return next(iter(sizes.values()))


def check_not_traced(method: str, *trees: Any) -> None:
    """Refuses arrays of `jax.jit`, `jax.grad` and other transformations."""
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
            "`key` must be a key as `jax.random.key(seed)` makes it, got "
            f"{key if isinstance(key, int) else got}."
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
        raise ValueError(
            f"`{what}` must be a list with one entry per layer ({len(layers)}), got {size}."
        )

    def texts(tree: Any) -> dict[str, str]:
        return {
            jax.tree_util.keystr(path): (
                f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(np.shape(leaf))}"
            )
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


def check_state(state: Any) -> None:
    """Refuses what is not a training state, one whose arrays were changed, or were donated."""
    if not isinstance(state, PipelineState):
        raise ValueError(
            "`state` must be the state that `init` or `step` returned, got "
            f"{type(state).__name__}."
        )
    expected = getattr(state.program, "abstract_state", state)
    (arrays, tree), (like, its_tree) = map(jax.tree.flatten, (state, expected))
    if (
        expected is state
        or tree != its_tree
        or [*map(_form, arrays)] != [*map(_form, like)]
    ):
        raise ValueError(
            f"`state` must hold the arrays that `init` or `step` returned, and `{_changed(state, expected)}` holds others. "
            "Give the state as it was returned. To change weights use `pipe.with_params`, to change numbers of the "
            "optimizer `pipe.with_hyperparams`."
        )
    if any(isinstance(a, jax.Array) and a.is_deleted() for a in arrays):
        raise ValueError(
            "`state` was donated to an earlier `step` and its arrays are gone. Keep the "
            "state that step returned: `state, metrics = pipe.step(state, batch)`. To keep "
            "old states usable, make the pipeline with `donate=False`."
        )


def _form(array: Any) -> tuple:
    return getattr(array, "shape", None), getattr(array, "dtype", None)


def _changed(state: PipelineState, expected: PipelineState) -> str:
    """The first field of a state that holds other arrays than expected."""
    for name, like in expected.arrays().items():
        arrays = getattr(state, name)
        if jax.tree.structure(arrays) != jax.tree.structure(like):
            return name
        if any(
            map(
                lambda a, b: _form(a) != _form(b), *map(jax.tree.leaves, (arrays, like))
            )
        ):
            return name
    return "program"


def check_same_parts(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuses a state of a pipeline that differs, and names the part that does.

    Args:
      theirs: `Program.parts` or `Settings.parts` of the state's pipeline.
      ours: the same of this pipeline.
    """
    for name, part in ours.items():
        if theirs[name] != part:
            text = f" ({theirs[name]!r} there, {part!r} here)"
            shown = text if len(text) <= 100 else ""
            raise ValueError(
                f"`state` was made by another pipeline, which differs in `{name}`{shown}. Take "
                "the state over with `state = pipe.adopt(state)`."
            )


def why_weights_stay(hooks: Mapping) -> str:
    """Why weights cannot be in host memory; empty: they can."""
    if not hooks:
        return ""
    names = " and ".join(f"`{name}_params`" for name in hooks)
    return f"passes read the weights themselves, and {names} computes others for them"


def why_gradients_stay(
    schedule: Schedule, compress_gradients: Any, accumulate_gradients: Any
) -> str:
    """Why gradients cannot be in host memory; empty: they can."""
    if schedule.has_copies:
        return "a stage is on one device, and this schedule has copies of stages, which add up their gradients"
    for name, value in (
        ("compress_gradients", compress_gradients),
        ("accumulate_gradients", accumulate_gradients),
    ):
        if value is not None:
            return f"gradients are accumulated and exchanged as they are, and `{name}` changes that"
    return ""


def check_offload(
    offload: Any,
    mesh: Mesh,
    schedule: Schedule,
    recompute: Any,
    *,
    weights_stay: str = "",
    gradients_stay: str = "",
) -> Offload:
    """`offload` of a pipeline, an `Offload` or None.

    Args:
      offload: the argument.
      mesh, schedule, recompute: of the pipeline.
      weights_stay: of `why_weights_stay`.
      gradients_stay: of `why_gradients_stay`.

    Raises:
      ValueError: if it is something else, devices have no memory of the host, or a part of the state cannot go there.
    """
    if offload is None:
        return NO_OFFLOAD
    if not isinstance(offload, Offload):
        raise ValueError(
            "`offload` must be a `jpipe.Offload`, such as `jpipe.Offload(optimizer=1.0)`, or None, got "
            f"{shown(offload)}."
        )
    if not offload:
        return offload
    kinds = memory_kinds(mesh.devices.flat[0])
    if HOST_MEMORY not in kinds:
        problem = (
            f"`offload` keeps arrays in memory of the kind {HOST_MEMORY!r}, and {mesh.devices.flat[0].platform} devices have "
            f"only {', '.join(map(repr, kinds))}."
        )
        if offload.required:
            raise ValueError(
                f"{problem} Leave `offload` out, or say `jpipe.Offload(..., required=False)` to train without it here."
            )
        warn(f"{problem} The pipeline trains without offloading.")
        return NO_OFFLOAD
    if offload.activations is not None and recompute == "full":
        raise ValueError(
            '`activations` of `Offload` is about what a forward keeps for its backward, and with `recompute="full"` a stage '
            "keeps only its inputs. Leave one of them out."
        )
    for name, why in ("weights", weights_stay), ("gradients", gradients_stay):
        if getattr(offload, name) and why:
            raise ValueError(
                f"`{name}` of `Offload` go to host memory where {why}. Leave one of them out, or offload the optimizer's "
                "state alone."
            )
    return offload


def check_device_memory(device_memory: Any, offload: Any, mesh: Mesh) -> float | None:
    """`device_memory` of a pipeline in bytes, or None.

    Raises:
      ValueError: if it is no number of bytes, or `offload` is given too, or devices cannot use host memory.
    """
    if device_memory is None:
        return None
    if offload is not None:
        raise ValueError(
            "`device_memory` chooses what goes to host memory, and `offload` says it. Leave one of them out."
        )
    limit = device_memory
    if isinstance(limit, str):
        try:
            limit = parse_size(limit)
        except ValueError as error:
            raise ValueError(f"`device_memory` {error}") from None
    is_number = isinstance(limit, numbers.Real) and not isinstance(limit, bool)
    if not is_number or not 0 < limit < 2**64:
        raise ValueError(
            '`device_memory` must be a number of bytes above 0, such as 2e9 or "2GiB", or None, got '
            f"{shown(device_memory)}."
        )
    kinds = memory_kinds(mesh.devices.flat[0])
    if HOST_MEMORY not in kinds:
        raise ValueError(
            f"`device_memory` keeps what does not fit in memory of the kind {HOST_MEMORY!r}, and "
            f"{mesh.devices.flat[0].platform} devices have only {', '.join(map(repr, kinds))}. Leave it out, and use more "
            "stages or recompute."
        )
    return float(limit)


def check_strategy(strategy: Any, mesh: Mesh, axis_rules: Any) -> Strategy | None:
    """`strategy` of a pipeline: an object that splits layers, the one in a file, or None.

    Raises:
      ValueError: if it is neither, or the mesh or the rules split the layers in other ways.
    """
    if strategy is None:
        return None
    if not isinstance(strategy, Strategy | str | os.PathLike):
        raise ValueError(
            "`strategy` must be the path of a file of `jpipe.soap.save_strategy`, or None, got "
            f"{type(strategy).__name__}."
        )
    if mesh.shape.get(FSDP, 1) > 1:
        raise ValueError(
            f"`strategy` splits weights as its operators read them, and the mesh has fsdp={mesh.shape[FSDP]}, which splits "
            'them all. Use a mesh without the axis "fsdp".'
        )
    shared = [a for a, n in mesh.shape.items() if a not in (STAGE, DATA) and n > 1]
    if len(shared) > 1:
        raise ValueError(
            f"`strategy` splits each operator over one axis of the mesh, and {' and '.join(map(repr, shared))} are left to it. "
            "Use one axis with all their devices, `make_mesh(stage=, data=, model=)`."
        )
    if any(STAGE in axes((target,)) for _, target in axis_rules or ()):
        raise ValueError(
            '`axis_rules` split layers over "stage", and `strategy` says how every layer is split. Leave one of them out.'
        )
    if isinstance(strategy, Strategy):
        return strategy
    return load("strategy of a file")(strategy)


# -- What depends on how the layers are cut


def check_stages(
    stages: Stages, schedule: Schedule, recompute: Any, num_replicas: int
) -> None:
    """Refuses stages that the schedule, `recompute` or replicas cannot run."""
    for copies in stages.ties:
        on_stages = sorted({stages.stage_of(layer) for layer, _ in copies})
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
            kind = stages.layer_kinds[stages.kind_of_layer[i]]
            update = stages.mutable[stages.kind_of_layer[i]]
            moved = {*update.sequence, *update.deferred}
            if any(kind.outputs_read_extra[1 + j] for j in moved):
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
    """Refuses state that goes from microbatch to microbatch where these do not come one after the other."""
    num_copies = len(schedule.copies[stage])
    start = f"layer {i} ({layer.name}) moves its mutable state"
    if update.sequence and num_copies > 1:
        raise ValueError(
            f"{start} {_paths(layer, update.sequence)} in every microbatch, and its stage has {num_copies} copies, which run "
            "microbatches side by side. Give this stage one copy. (Running statistics of batch norms may have copies.)"
        )
    if num_replicas == 1 or not update.varying:
        return
    if not schedule.synchronous:
        raise ValueError(
            f"{start} {_paths(layer, update.varying)} in every microbatch by what it sees, and in the asynchronous schedule "
            f"{schedule.name!r} the states of {num_replicas} replicas would differ while a minibatch is in flight. Use a "
            "synchronous schedule, or one replica."
        )
    integer = [j for j in update.varying if not is_inexact(update.leaves[j])]
    if integer:
        raise ValueError(
            f'{start} {_paths(layer, integer)} by what it sees, and {num_replicas} replicas along "data" see other rows. A '
            "mean over replicas has no meaning for integers. Make it float32, change it by the state alone, such as "
            "`count + 1`, or use one replica."
        )


def _paths(layer: Layer, positions: Iterable[int]) -> str:
    """Leaves of a layer's state, for messages."""
    paths = [path for path, _ in jax.tree.leaves_with_path(layer.state)]
    return ", ".join(jax.tree_util.keystr(paths[j]) for j in positions)
