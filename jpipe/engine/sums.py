"""The sums of gradients in the arrays of a tick: see `jpipe.gradients.sums`."""

from typing import TypeVar

import jax

from jpipe.engine.arrays import Packed, TickArrays
from jpipe.engine.context import TrainingDevice, TrainingStage
from jpipe.gradients.sums import FACTORS, Microbatch

Record = TypeVar("Record", bound=TickArrays)


def factors_in(arrays: TickArrays) -> Packed:
    """The packed factors; `{}` if all gradients are accumulated as they are."""
    return arrays.gradient_compression.get(FACTORS, {})


def sums_in(written: TickArrays) -> Packed:
    """The packed leaves of sums: gradients and factors together."""
    if "gradient_compression" not in written:
        return written.gradients
    return {**written.gradients, **factors_in(written)}


def with_sums(written: Record, packed: Packed) -> Record:
    """The record with new `sums_in`."""
    gradients = {name: packed[name] for name in written.gradients}
    written = written.replace(gradients=gradients)
    if "gradient_compression" not in written:
        return written
    factors = {name: packed[name] for name in factors_in(written)}
    kept = {**written.gradient_compression, FACTORS: factors}
    return written.replace(gradient_compression=kept)


def squares_of(device: TrainingDevice, arrays: TickArrays) -> dict[str, jax.Array]:
    """Packed sigmas with the loss scale: x and d are orthonormal, so their squares are those of the gradients."""
    places = device.spec.stages.factors.places
    sigmas = {p.array for placed in places for p in placed if len(p.shape) == 1}
    packed_sigmas = {n: a for n, a in factors_in(arrays).items() if n in sigmas}
    scale = device.loss_scale(arrays)
    if scale is None:
        return packed_sigmas
    return {name: a * scale.astype(a.dtype) for name, a in packed_sigmas.items()}


def microbatch_of(stage: TrainingStage, arrays: TickArrays) -> Microbatch | None:
    """The microbatch of a lane, for the sums; None if all gradients are summed as they are."""
    spec = stage.spec
    if spec.stages.gradient_sums.compressor is None:
        return None
    N = spec.schedule.num_microbatches
    number = stage.scalars.microbatch % N
    scale = stage.device.loss_scale(arrays)
    return Microbatch(number, N, scale, stage.device.mean_over_replicas)
