"""Makes a profile of a traced model, or reads the profile that was kept."""

import dataclasses
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from jpipe._util.foreign import shown
from jpipe._util.warn import warn
from jpipe.gradients.sums import GradientSums
from jpipe.layers.avals import abstract, num_bytes, real_dtype, shapes_text
from jpipe.layers.backward import LayerProgram
from jpipe.layers.trace import TrainingTrace
from jpipe.packing import Leaf
from jpipe.plan._loops import PROGRAMS, Measured, ProgressBar, count_cores
from jpipe.plan._measure_layers import measure_layers, outputs
from jpipe.plan._measure_updates import measure_updates, trace_updates
from jpipe.plan._profile import LayerProfile, Profile
from jpipe.plan._stashes import stashes_of
from jpipe.stages.extra_args import STALE_PARAMS
from jpipe.stages.flat_update import flat_update


def profile(
    traced: TrainingTrace,
    optimizer: optax.GradientTransformation,
    microbatch: Any,
    *,
    recompute: str = "none",
    compute_dtype: Any = None,
    reads: Sequence[str] = (),
    ties: Sequence[Sequence[int]] = (),
    accumulate_dtype: Any = None,
    programs: Sequence[str] = PROGRAMS,
    min_seconds: float = 0.5,
    devices: Sequence[jax.Device] | None = None,
    cache: str | os.PathLike | None = None,
) -> Profile:
    """Measures layers, the loss and the optimizer. `Pipeline.profile` calls it.

    Each program of each kind of layer is compiled, run to warm up, and called until `min_seconds`
    have passed, at least 3 times. A call runs as many microbatches as take a tenth of a second (or
    a third of `min_seconds`, if that is less). The layers get fresh weights, and as inputs the
    outputs of the layers before.

    Several devices all run the same at the same time, so that shared resources are measured as
    they are shared in training: memory, and the cores if the devices are CPU devices.
    `Profile.num_devices` and `Profile.num_cores` record the numbers.

    Weights that a mesh splits over automatic axes are measured whole.

    Args:
      traced: the layers and the loss, traced for training.
      optimizer: the Optax chain. The update of each layer is measured by itself.
      microbatch: arrays, or abstract arrays; these stand for random numbers, or zeros if they are
        integers.
      recompute: for the record: "none", "full" or the name of the policy that `traced` was made
        with.
      compute_dtype: for the record, see `traced`.
      reads: for the record, see `Profile`.
      ties: for the record, see `Profile`.
      accumulate_dtype: the dtype of the sums of gradients, see `Pipeline`; their bytes are counted.
      programs: the programs of `PROGRAMS` to measure. The seconds of the others are None. Bytes
        are always counted.
      min_seconds: seconds per program, at least.
      devices: the devices to measure on; None: JAX's first device.
      cache: a file that keeps the profile. It is read instead of measuring if it has the same
        layers, version of JAX, kind and number of devices, and number of cores. Otherwise it is
        written, with a warning if it existed.

    Returns:
      The `Profile`.

    Raises:
      ValueError: if `programs` has an unknown name, or the file is not a profile.
      OSError: if the file cannot be read or written.

    References:
      Narayanan et al., "PipeDream", SOSP 2019, section 3.1 (the profiler); Kim et al.,
      "torchgpipe", arXiv:2004.09910, section 2.2, `torchgpipe.balance` (layers measured one at a
      time).
    """
    for name in programs:
        if name not in PROGRAMS:
            raise ValueError(f"`programs` must be of {', '.join(map(repr, PROGRAMS))}, got {shown(name)}.")
    if traced.has_whole_batch_loss and programs:
        raise ValueError(
            "layers and the loss are measured for one microbatch, and a `WholeBatchLoss` takes a whole minibatch. "
            "Measure a pipeline with another loss, or balance `boundaries` by FLOPs or memory."
        )
    sums = GradientSums(dtype=None if accumulate_dtype is None else np.dtype(accumulate_dtype))
    devices = jax.local_devices()[:1] if devices is None else list(devices)
    updates, update_of_layer = trace_updates(traced, optimizer)
    made_with = dict(
        microbatch=shapes_text(microbatch),
        microbatch_size=jax.tree.leaves(microbatch)[0].shape[0],
        microbatch_bytes=num_bytes(jax.tree.leaves(microbatch)),
        recompute=recompute,
        compute_dtype=None if compute_dtype is None else np.dtype(compute_dtype).name,
        reads=(*reads, *[STALE_PARAMS] * _reads_stale(traced, optimizer)),
        ties=tuple(map(tuple, ties)),
        device_kind=devices[0].device_kind,
        num_devices=len(devices),
        num_cores=count_cores(),
        jax_version=jax.__version__,
        model=_hash(_model_texts(traced)),
        optimizer=_hash([updates[u].equations.text() for u in update_of_layer]),
    )
    kept = _kept(cache, made_with, programs)
    if kept is not None:
        # Nothing that was measured depends on the sums.
        layers = tuple(dataclasses.replace(a, gradients=_gradients(a.parameters, sums)) for a in kept.layers)
        return dataclasses.replace(kept, recompute=recompute, layers=layers)
    with jax.default_device(devices[0]), ProgressBar.of(programs) as progress:
        given = programs, min_seconds, devices, progress
        *kind_seconds, loss_seconds = measure_layers(traced, microbatch, *given)
        update_seconds = measure_updates(updates, update_of_layer, *given)
    layers = tuple(
        _record(
            traced.layer_kinds[k],
            {**kind_seconds[k], **update_seconds[u]},
            outputs(traced.layer_kinds[k]),
            name=layer.name,
            kind=k,
            parameters=traced.layer_kinds[k].trained_parameters,
            frozen=tuple(traced.layer_kinds[k].parameters[j] for j in traced.layer_kinds[k].frozen),
            gradients=_gradients(traced.layer_kinds[k].trained_parameters, sums),
            optimizer_state=abstract(tuple(updates[u].state)),
            state=abstract(tuple(traced.mutable[k].leaves)),
            reads_moved_state=traced.mutable[k].is_read_by(traced.layer_kinds[k]),
            statistics=abstract(tuple(traced.mutable[k].statistics)),
            stash=layer.stash,
            pop=layer.pop,
        )
        for layer, k, u in zip(traced.layers, traced.kind_of_layer, update_of_layer)
    )
    if "update" in programs:
        loss_seconds["update"] = Measured()
    empty: dict[str, tuple] = dict.fromkeys(("parameters", "gradients", "optimizer_state", "state", "statistics"), ())
    empty |= {"stash": (), "pop": ()}
    number = len(traced.layer_kinds)
    loss = _record(traced.loss, loss_seconds, [()], name="loss", kind=number, **empty)
    measured = Profile(layers, loss, **made_with)
    if cache is not None:
        measured.save(cache)
    return measured


def _kept(cache: str | os.PathLike | None, made_with: Mapping[str, Any], programs: Sequence[str]) -> Profile | None:
    """The profile that a file has; None if it has none that fits."""
    if cache is None or not os.path.exists(cache):
        return None
    kept = Profile.load(cache)
    why = _unfit(kept, made_with, programs)
    if not why:
        return kept
    warn(f"{os.fspath(cache)}: {why}. Profiling again.")
    return None


def _reads_stale(traced: TrainingTrace, optimizer: optax.GradientTransformation) -> bool:
    """Returns whether the optimizer reads the weights that a gradient was computed at."""
    optimizer = optax.with_extra_args_support(optimizer)
    tree = [layer.trained for layer in traced.layers]
    norm_dtype = real_dtype(tree)
    return flat_update(optimizer, tree, norm_dtype, "the model").reads_stale


def _gradients(parameters: Iterable[jax.ShapeDtypeStruct], sums: GradientSums) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(sums.plain(Leaf(aval)).leaf.aval for aval in parameters)


def _record(
    program: LayerProgram,
    measured: Mapping[str, Measured],
    outputs: Sequence,
    **fields,
) -> LayerProfile:
    seconds: dict[str, Any] = {p: measured[p].seconds if p in measured else None for p in PROGRAMS}
    activations, *skips = (abstract(tuple(jax.tree.leaves(y))) for y in outputs)
    return LayerProfile(
        **seconds,
        activations=activations,
        skips=tuple(skips),
        **stashes_of(program, lambda rerun: rerun.stash),
        split_residuals=program.split_residuals,
        temporary_bytes=max((m.temporary_bytes for m in measured.values()), default=0),
        **fields,
    )


# -- The cache


def _model_texts(traced: TrainingTrace) -> list[str]:
    layers = zip(traced.layers, traced.kind_of_layer)
    return [
        *(f"{layer.name} {k} {layer.stash} {layer.pop}" for layer, k in layers),
        *(kind.text for kind in traced.layer_kinds),
        traced.loss.text,
    ]


def _hash(texts: Iterable[str]) -> str:
    """A hash of texts of programs, without addresses of functions, which differ from run to run."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(re.sub(r" at 0x[0-9a-f]+", "", text).encode() + b"\0")
    return digest.hexdigest()[:16]


def _unfit(kept: Profile, made_with: Mapping[str, Any], programs: Sequence[str]) -> str:
    """The reason why a profile does not fit the request; empty if it fits."""

    def same(name: str, was: Any, now: Any) -> bool:
        if name == "recompute":  # "full" runs the same programs
            was, now = ("none" if recompute == "full" else recompute for recompute in (was, now))
        if name == "num_cores" and made_with["device_kind"] != "cpu":
            return True  # other devices compute without them
        return was == now

    for name, now in made_with.items():
        was = getattr(kept, name)
        if same(name, was, now):
            continue
        if name in ("model", "optimizer"):
            return f"it was made for another {name}"
        return f"its `{name}` is {was}, not {now}"
    for program in programs:
        if any(getattr(r, program) is None for r in (*kept.layers, kept.loss)):
            return f"`{program}` was not measured"
    return ""
