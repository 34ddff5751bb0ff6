"""Weights in the dtype that layers compute in, cast once for all microbatches between two updates.

A layer casts its weights wherever it reads them: in the forward and in the backward of every microbatch. On GPUs the
casts are kernels of their own, which read four bytes of each weight and write two. So a pass casts all weights when it
begins, and those of a stage again after its update, if a later tick reads them. The copies are temporaries of the step.
"""

from collections.abc import Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jpipe import packing
from jpipe.engine.arrays import Packed, TickArrays, Written
from jpipe.engine.context import TrainingDevice
from jpipe.engine.lanes import run_lanes
from jpipe.engine.spec import PassSpec
from jpipe.lowering.scalars import LaneScalars, TickScalars
from jpipe.packing import Packing, Place

Record = TypeVar("Record", bound=TickArrays)


def with_cast_weights(spec: PassSpec, arrays: Record) -> Record:
    """The arrays at the start of a pass, with all weights cast, unless layers cast them wherever they read them."""
    if not spec.lowered.target.casts_once:
        return arrays
    sources = {"constants": arrays.constants, **_sources(arrays)}
    return arrays.replace(cast_weights={use: _cast(spec, source) for use, source in sources.items()})


def recasts(spec: PassSpec) -> bool:
    """Returns whether later ticks of a pass read weights that an update has changed, and read them cast."""
    return spec.lowered.target.casts_once and not spec.schedule.synchronous


def recast_weights(device: TrainingDevice, scalars: TickScalars, arrays: TickArrays) -> TickArrays:
    """Casts the weights that the updates of a tick have changed, if `recasts`."""
    spec = device.spec
    if not recasts(spec):
        return arrays
    sources = _sources(arrays)
    if spec.ties or spec.schedule.has_copies:  # weights of other lanes have changed too
        new = {use: _cast(spec, source) for use, source in sources.items()}
        return arrays.replace(cast_weights={**arrays.cast_weights, **new})

    def recast(lane: LaneScalars, _: object, num_updates: jax.Array | int, written: Written) -> Written:
        lead = device.lead("parameters", lane.row)

        def row(name: str, array: jax.Array, cast: jax.Array) -> jax.Array:
            (number,) = lead(name)
            new = lax.dynamic_index_in_dim(array, number, allow_negative_indices=False).astype(cast.dtype)
            old = lax.dynamic_index_in_dim(cast, number, allow_negative_indices=False)
            new = jnp.where(num_updates > 0, new, old)
            return lax.dynamic_update_slice_in_dim(cast, new, number, 0, allow_negative_indices=False)

        cast = written.cast_weights
        new = {use: {n: row(n, source[n], a) for n, a in cast[use].items()} for use, source in sources.items()}
        return written.replace(cast_weights={**cast, **new})

    return run_lanes(device, scalars, "cast", ["cast_weights"], recast, arrays)


def weights_for(read: TickArrays, weight_pass: str, cast: bool = True) -> Packed:
    """The weights that a pass, "forward" or "backward", reads; with `cast` those that are cast once."""
    newest = weight_pass if weight_pass in read.read_parameters else "parameters"
    arrays = {**read.constants, **_sources(read)[newest]}
    for use in ("constants", newest) if cast else ():
        arrays |= read.cast_weights.get(use, {})
    return arrays


def read_weight(stored: Packing, arrays: Packed, place: Place, lead: packing.Lead, i: jax.Array | int = 0) -> jax.Array:
    """The weight at a place, in the dtype that it is stored in. A layer casts it back, and XLA removes both casts."""
    value = packing.read(arrays, place, lead, i)
    return value.astype(stored.arrays[place.array].dtype) if place.array else value


def _sources(arrays: TickArrays) -> Mapping[str, Packed]:
    """The arrays with weights that change, by their use: the newest ones, and those of parameter hooks by pass."""
    return {"parameters": arrays.parameters, **arrays.read_parameters}


def _cast(spec: PassSpec, source: Packed) -> Packed:
    """Those arrays that layers cast to fewer bytes."""
    dtype = spec.numbers.compute_dtype
    return {
        name: a.astype(dtype)
        for name, a in source.items()
        if dtype is not None
        and jnp.issubdtype(a.dtype, jnp.floating)
        and a.dtype.itemsize > dtype.itemsize
        and not packing.is_on_host(a)
    }
