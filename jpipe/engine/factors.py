"""Gradients that are accumulated as factors of low rank, and never formed: see `jpipe.compress.StreamingPCA`.

The backward of a microbatch gives both matrices whose product is the gradient of a dense layer. They update
the factors in place of an addition. All replicas along "data" take part: the microbatches of all are one part of the
batch, and all have the same factors, bit for bit.

A gradient that is not finite leaves x and d as they were, and its sigma is not finite either, so the update is skipped.
The next minibatch begins with a sigma of 0.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jpipe import packing
from jpipe.compress import Factors, StreamingPCA
from jpipe.engine.arrays import Packed, TickArrays
from jpipe.engine.context import TrainingDevice, TrainingStage
from jpipe.layers.products import Product
from jpipe.packing import Lead
from jpipe.stages.accumulators import FACTORS, FactorPlaces

Record = TypeVar("Record", bound=TickArrays)


def factors_in(arrays: TickArrays) -> Packed:
    """The packed factors; `{}` if all gradients are accumulated as they are."""
    return arrays.gradient_compression.get(FACTORS, {})


def accumulators_of(written: TickArrays) -> Packed:
    """Packed gradients and factors together."""
    if "gradient_compression" not in written:
        return written.gradients
    return {**written.gradients, **factors_in(written)}


def with_accumulators(written: Record, packed: Packed) -> Record:
    """The record with new `accumulators_of`."""
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
    sigmas = {p.array for of in places for p in of if len(p.shape) == 1}
    found = {n: a for n, a in factors_in(arrays).items() if n in sigmas}
    scale = device.loss_scale(arrays)
    if scale is None:
        return found
    return {name: a * scale.astype(a.dtype) for name, a in found.items()}


class FactorSum(NamedTuple):
    """What the factors of a minibatch's gradient take up of a microbatch.

    Attributes:
      compressor: of the gradients.
      device: the device.
      part: int32 `[]`, number of the microbatch in its minibatch.
      scale: `[]`, the loss scale, or None.
    """

    compressor: StreamingPCA
    device: TrainingDevice
    part: jax.Array
    scale: jax.Array | None

    @classmethod
    def of(cls, stage: TrainingStage, arrays: TickArrays) -> "FactorSum | None":
        """Of the microbatch of a lane; None if all gradients are accumulated as they are."""
        compressor = stage.spec.accumulate_gradients
        if compressor is None:
            return None
        part = stage.scalars.microbatch % stage.spec.schedule.num_microbatches
        scale = stage.device.loss_scale(arrays)
        return cls(compressor, stage.device, part, scale)

    def add(
        self,
        arrays: Packed,
        places: FactorPlaces,
        lead: Lead,
        product: Product,
        i: jax.Array | int,
    ) -> Mapping[str, jax.Array]:
        """The packed factors after a microbatch.

        Args:
          arrays: packed factors.
          places: of the gradient's.
          lead: leading indices.
          product: what the microbatch contributes to the minibatch's gradient, with loss scale.
          i: row of the places.
        """
        x, d, sigma = packing.read_all(arrays, places, lead, i)
        # Of a minibatch that was not finite.
        lost = (self.part == 0) & ~jnp.isfinite(sigma)
        old = Factors(x.T, d.T, jnp.where(lost, jnp.zeros_like(sigma), sigma))
        rows, of_rows = (a.astype(sigma.dtype) for a in (product.x, product.d))
        # `update` takes a mean over parts of means over rows, and a minibatch's gradient is a sum of both.
        factor = self.device.spec.schedule.num_microbatches * rows.shape[0]
        of_rows = of_rows * jnp.asarray(factor, sigma.dtype)
        if self.scale is not None:
            of_rows = of_rows / self.scale.astype(sigma.dtype)
        mean = self.device.mean_over_replicas
        new = self.compressor.update(old, rows, of_rows, self.part, mean)
        finite = jnp.isfinite(new.sigma).all()
        values = [
            jnp.where(finite, new.x.T, x),
            jnp.where(finite, new.d.T, d),
            new.sigma,
        ]
        return packing.write_all(arrays, places, lead, values, i)
