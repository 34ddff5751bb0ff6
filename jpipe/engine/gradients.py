"""Exchange of compressed gradients between replicas, instead of their mean over "data" and over copies.

Each gradient of a weight is exchanged by itself:

    gradient + error  ── encode ──>  wire  ── to all replicas ──>  decode, mean  ──>  gradient
           └──────────── minus what was sent ─────────────────────────────────────>  error

The mean is bit for bit the same on all replicas of a stage, and so their weights stay equal. The error
is the part that a replica has not sent. It is sent later (error feedback: Seide et al., 2014;
Karimireddy et al., 2019). It has the unit of the gradient without loss scale, so the scale may move.

A gradient that is not finite is sent too, so all replicas skip the update. The errors and the states of the
compressor then stay what they were.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jpipe import packing
from jpipe.engine.arrays import Packed, TickArrays
from jpipe.engine.context import TrainingDevice
from jpipe.engine.copies import CopyRing
from jpipe.engine.shares import each_stage
from jpipe.lowering.tick_scalars import LaneScalars, TickScalars
from jpipe.mesh import DATA
from jpipe.stages.gradient_groups import GradientGroup
from jpipe.stages.stage_update import StageUpdate

Record = TypeVar("Record", bound=TickArrays)

EXCHANGE_WRITES = ("gradients", "gradient_compression")
"""The arrays of `TickArrays` that an exchange writes."""


class StageReplicas(NamedTuple):
    """All replicas of a stage: those along "data", each with all copies of the stage.

    Attributes:
      data: number along the axis "data".
      ring: the copies; None: one.
    """

    data: int
    ring: CopyRing | None = None

    @property
    def number(self) -> int:
        """Number of all replicas."""
        return self.data * (1 if self.ring is None else len(self.ring.group))

    def gather(self, value: jax.Array) -> jax.Array:
        """Returns the values of all replicas, `[number, ...]`, in one order on all of them."""
        values = value[None] if self.ring is None else self.ring.gather(value)
        if self.data > 1:
            values = lax.all_gather(values, DATA).reshape(-1, *value.shape)
        return values

    def mean(self, value: jax.Array) -> jax.Array:
        """Returns the mean of the values of all replicas, bit for bit the same on all of them."""
        if self.ring is not None:
            value = self.ring.sum(value) / len(self.ring.group)
        return lax.pmean(value, DATA) if self.data > 1 else value


class GradientExchange(NamedTuple):
    """The exchange of the gradients of a column.

    Attributes:
      device: the device.
      chunk: int32 `[]`, see `LaneScalars.chunk`.
      replicas: the replicas of the column's stage.
      scale: `[]`, the loss scale of the gradients, or None.
    """

    device: TrainingDevice
    chunk: jax.Array
    replicas: StageReplicas
    scale: jax.Array | None

    def run(
        self,
        program: StageUpdate,
        gradients: Packed,
        compression: Mapping[str, Any],
        num_updates: jax.Array | int,
    ) -> tuple[Packed, Mapping[str, Any]]:
        """Returns the gradients of all replicas, and the new state of compression, after 0 or 1 updates.

        Args:
          program: the update of the column.
          gradients: the packed gradients.
          compression: "error", packed like gradients, and "states" of the compressor.
          num_updates: 0 or 1.
        """
        spec = self.device.spec
        number = next(u for u, p in enumerate(spec.updates.distinct) if p is program)
        for group in spec.gradient_groups:
            starts = group.starts[number]
            if not len(starts):
                continue

            def turn(i: jax.Array, carry: tuple, group=group, starts=starts) -> tuple[Packed, Packed, Any]:
                base: Any = jnp.asarray(starts)[i]
                place = dataclasses.replace(group.place, base=base)
                return self._turn(group, place, i, *carry)

            states = compression["states"]
            carry = gradients, compression["error"], states[group.name]
            gradients, error, state = lax.fori_loop(0, num_updates * len(starts), turn, carry)
            compression = {"error": error, "states": {**states, group.name: state}}
        return gradients, compression

    def _turn(
        self,
        group: GradientGroup,
        place: packing.Place,
        i: jax.Array,
        gradients: Packed,
        errors: Packed,
        states: Any,
    ) -> tuple[Packed, Packed, Any]:
        """Exchanges one gradient."""
        compressor: Any = self.device.spec.communication.compress_gradients
        lead = self.device.lead("gradients", self.chunk)
        scaled = packing.read(gradients, place, lead)
        error = packing.read(errors, place, lead)
        state = jax.tree.map(lambda a: a[self.chunk, i], states)
        scale = self._scale(scaled.dtype)
        to_send = scaled / scale + error
        mean, sent, new_state = compressor.for_gradient(to_send).mean_over(to_send, state, self.replicas)
        finite = jnp.isfinite(mean).all()
        new_error = jnp.where(finite, to_send - sent, error)
        new_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new_state, state)
        total = mean * scale
        if self.replicas.ring is not None:
            # Copies have parts of one sum, and replicas along "data" have sums of their own.
            total = total * len(self.replicas.ring.group)
            total, new_error, *leaves = self.replicas.ring.on_members(
                [total, new_error, *jax.tree.leaves(new_state)],
                [scaled, error, *jax.tree.leaves(state)],
            )
            new_state = jax.tree.unflatten(jax.tree.structure(state), leaves)
        states = jax.tree.map(lambda a, b: a.at[self.chunk, i].set(b), states, new_state)
        return (
            packing.write(gradients, place, lead, total.astype(scaled.dtype)),
            packing.write(errors, place, lead, new_error.astype(error.dtype)),
            states,
        )

    def _scale(self, dtype: Any) -> jax.Array | int:
        return 1 if self.scale is None else self.scale.astype(dtype)


def exchange_over_data(
    device: TrainingDevice,
    lane: LaneScalars,
    program: StageUpdate,
    num_updates: jax.Array | int,
    arrays: Record,
) -> Record:
    """Exchanges, between the replicas along "data", the gradients that a lane updates with.

    Args:
      device: the device.
      lane: the lane of the update.
      program: the update.
      num_updates: 0 or 1.
      arrays: arrays with `EXCHANGE_WRITES`.
    """
    replicas = StageReplicas(device.spec.num_replicas)
    exchange = GradientExchange(device, lane.chunk, replicas, device.loss_scale(arrays))
    gradients, compression = exchange.run(program, arrays.gradients, arrays.gradient_compression, num_updates)
    return arrays.replace(gradients=gradients, gradient_compression=compression)


def exchange_over_copies(device: TrainingDevice, scalars: TickScalars, arrays: Record) -> Record:
    """Exchanges compressed gradients between copies and along "data"; every device must call it."""
    scale = device.loss_scale(arrays)

    def exchange(ring: CopyRing, program: StageUpdate, carry: tuple, n: Any) -> tuple:
        copy_ring = ring if len(ring.group) > 1 else None
        replicas = StageReplicas(device.spec.num_replicas, copy_ring)
        gradients, compression = carry
        gradient_exchange = GradientExchange(device, ring.chunk, replicas, scale)
        return gradient_exchange.run(program, gradients, compression, n)

    carry = arrays.gradients, arrays.gradient_compression
    alone = device.spec.num_replicas > 1
    gradients, compression = each_stage(device, scalars, exchange, carry, alone=alone)
    return arrays.replace(gradients=gradients, gradient_compression=compression)
