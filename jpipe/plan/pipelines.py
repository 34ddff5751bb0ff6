"""Measuring the layers of a `Pipeline`, and cutting them by the result.

`jpipe._util.entry_points` names these functions; `Pipeline` calls them.
"""

import dataclasses
import itertools
import json
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jpipe._processes.sharing import from_first, is_global
from jpipe._util.foreign import shown
from jpipe.costs import inner_layers
from jpipe.layers.trace import Traced, TrainingTrace
from jpipe.options.settings import Settings
from jpipe.options.slices import MEASURED
from jpipe.plan._axes import split
from jpipe.plan._loops import PROGRAMS
from jpipe.plan._profile import (
    Profile,
    balance_by_memory,
    balance_by_time,
    operations_of,
    programs_of,
)
from jpipe.plan._profiling import profile


def profile_pipeline(
    settings: Settings,
    batch: Any,
    *,
    cache: str | os.PathLike | None,
    num_microbatches: int | None,
    programs: Sequence[str] | None,
    min_seconds: float,
    devices: Sequence[jax.Device] | None,
    whole: Profile | None,
) -> Profile:
    """Measures the layers of a pipeline. See `Pipeline.profile`.

    Of several processes the first one measures and keeps the file, and all return what it found.

    Args:
      settings: the settings of the pipeline.

    Raises:
      ValueError: if an argument cannot work.
    """
    if num_microbatches is not None and (not hasattr(num_microbatches, "__index__") or num_microbatches < 1):
        raise ValueError(f"`num_microbatches` must be a whole number, at least 1, got {shown(num_microbatches)}.")
    if settings.schedule.num_slices > 1:
        raise ValueError(f"`profile`: {MEASURED}, got schedule {shown(settings.schedule.name)} with slices.")
    microbatch = settings.row_group(batch, num_microbatches)
    key_impl = jax.config.jax_default_prng_impl
    traced = settings.trace(microbatch, key_impl)
    if whole is not None:
        return split(whole, traced, settings.mesh)

    def first_rows(a: Any, want: jax.ShapeDtypeStruct) -> Any:
        if isinstance(a, jax.ShapeDtypeStruct) or is_global(a):
            return want
        return np.asarray(a)[: want.shape[0]].astype(want.dtype)

    if settings.rows is not None and jax.process_index() > 0:
        return Profile.from_json(json.loads(from_first(None)), "process 0")
    rows = jax.tree.map(first_rows, dict(settings.model.batch(batch)), microbatch)
    options = _options(settings, traced)
    if devices is not None:
        options["devices"] = devices
    measured = profile(
        traced,
        settings.optimizer,
        rows,
        programs=PROGRAMS if programs is None else programs,
        min_seconds=min_seconds,
        cache=cache,
        **options,
    )
    if settings.rows is not None:
        from_first(measured.text())
    return measured


def measured_for_table(settings: Settings, traced: TrainingTrace, microbatch: Any, min_seconds: float = 0.5) -> Profile:
    """A profile with the operations of the table, measured on one device."""
    operations = operations_of(settings.schedule.splits_backward)
    programs = [programs_of(operation, settings.numbers.recompute_name) for operation in operations]
    return profile(
        traced,
        settings.optimizer,
        microbatch,
        programs=sorted({*itertools.chain(*programs)}),
        min_seconds=min_seconds,
        **_options(settings, traced),
    )


def boundaries_by_time(settings: Settings, traced: TrainingTrace, microbatch: Any) -> list[int]:
    """The boundaries that balance the measured seconds of the stages."""
    split = settings.schedule.splits_backward
    measured = measured_for_table(settings, traced, microbatch)
    inner = inner_layers(settings, traced, microbatch)
    measured, num_stages = _only(measured, inner), settings.schedule.num_stages
    return [inner.start + b for b in balance_by_time(measured, num_stages, split=split)]


def boundaries_by_memory(settings: Settings, traced: TrainingTrace, microbatch: Any) -> list[int]:
    """The boundaries that balance the bytes of weights, optimizer and activations in flight."""
    counted = profile(
        traced,
        settings.optimizer,
        microbatch,
        programs=(),
        **_options(settings, traced),
    )
    in_flight = int(settings.schedule.facts().in_flight.max())
    counted = counted.in_table(settings.schedule)
    inner = inner_layers(settings, traced, microbatch)
    cut = balance_by_memory(_only(counted, inner), settings.schedule.num_stages, in_flight=in_flight)
    return [inner.start + b for b in cut]


def _only(measured: Profile, layers: range) -> Profile:
    """The profile of some layers."""
    kept = measured.layers[layers.start : layers.stop]
    return dataclasses.replace(measured, layers=kept)


def _options(settings: Settings, traced: Traced) -> dict[str, Any]:
    """The arguments of `profile` that describe a pipeline, and its default device."""
    process = jax.process_index()
    local = [d for d in settings.mesh.devices.flat if d.process_index == process]
    return dict(
        recompute=settings.numbers.recompute_name,
        compute_dtype=settings.numbers.compute_dtype,
        reads=list(settings.hooks),
        ties=[[layer for layer, _ in copies] for copies in settings.resolved_ties(traced)],
        accumulate_dtype=settings.numbers.accumulate_dtype,
        devices=local[:1],
    )
