"""Reductions: ways in which the replicas of a stage sum their gradients in an update.

    MeanReduction        the mean, or the sum over copies, of all     all update all weights
    SharedReduction      the same of its share, and zeros elsewhere   each updates its share, then all get all
    CompressedReduction  the mean of what compressors have sent       all update all weights

Replicas are those along "data", and the copies of a stage. Parts of vocabulary layers are updated by each replica.
"""

import abc
import dataclasses
import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jpipe import packing
from jpipe.engine.arrays import Packed, TickArrays, Written
from jpipe.engine.context import TrainingDevice
from jpipe.engine.copies import sum_over_copies
from jpipe.engine.gradients import (
    EXCHANGE_WRITES,
    exchange_over_copies,
    exchange_over_data,
)
from jpipe.engine.guard import guarded
from jpipe.engine.lanes import for_each_lane, gradients_of, run_lanes
from jpipe.engine.shares import (
    gather_over_copies,
    rank_of,
    read_turn,
    scatter_over_copies,
    scatter_over_data,
)
from jpipe.engine.transport import put_row
from jpipe.layers.avals import squares as squared
from jpipe.lowering.scalars import UPDATE
from jpipe.lowering.tick_scalars import LaneScalars, TickScalars
from jpipe.mesh import DATA
from jpipe.stages.stage_update import StageUpdate

Record = TypeVar("Record", bound=TickArrays)


@dataclasses.dataclass(frozen=True)
class Reduction(abc.ABC):
    """The replicas of all stages that update in a tick. All devices call its methods.

    Attributes:
      device: the device.
      scalars: the scalars of the tick.
    """

    device: TrainingDevice
    scalars: TickScalars

    @abc.abstractmethod
    def reduce(self, arrays: TickArrays) -> TickArrays:
        """Replaces the gradients of each updating column by those of all replicas: summed over copies, averaged over
        "data".
        """

    @property
    def every_copy_counts(self) -> bool:
        """True if a norm counts the gradients of every copy of a stage, and not those of its first alone."""
        return False

    def squares_of_all(self, squares: jax.Array, gradients: Packed) -> jax.Array:
        """Squared norms of the reduced gradients on this device, over all replicas along "data", `[R + units]`."""
        return squares

    def spread(self, arrays: TickArrays) -> TickArrays:
        """Copies the updated weights to all replicas."""
        return arrays


def reduction_of(device: TrainingDevice, scalars: TickScalars) -> Reduction:
    """The reduction of a pass. For the arguments see `Reduction`."""
    kind: type[Reduction] = MeanReduction
    if device.spec.communication.compress_gradients is not None:
        kind = CompressedReduction
    elif device.spec.shares_updates:
        kind = SharedReduction
    return kind(device, scalars)


class MeanReduction(Reduction):
    """The reduction that gives the whole gradient to all replicas."""

    def reduce(self, arrays: TickArrays) -> TickArrays:
        """See `Reduction`."""
        device, spec = self.device, self.device.spec
        if spec.num_replicas > 1:
            mean = functools.partial(_mean_over_replicas, device)
            arrays = for_each_lane(device, self.scalars, mean, arrays)
        if spec.schedule.has_copies:
            gradients = sum_over_copies(device, self.scalars, "update", arrays.gradients)
            arrays = arrays.replace(gradients=gradients)
        return arrays


class SharedReduction(Reduction):
    """The reduction that gives each replica its share: see `jpipe.engine.shares`."""

    def reduce(self, arrays: TickArrays) -> TickArrays:
        """See `Reduction`. A replica has zeros outside of its share."""
        device, spec = self.device, self.device.spec
        if spec.num_replicas > 1:
            mean = functools.partial(_mean_over_replicas, device)
            arrays = for_each_lane(device, self.scalars, mean, arrays, spec.updates.together)
        if spec.schedule.has_copies:
            gradients = scatter_over_copies(device, self.scalars, arrays.gradients)
            arrays = arrays.replace(gradients=gradients)

        def scatter(
            lane: LaneScalars,
            program: StageUpdate,
            num_updates: jax.Array | int,
            arrays: Written,
        ) -> Written:
            gradients = scatter_over_data(device, program, lane, arrays.gradients, num_updates)
            return arrays.replace(gradients=gradients)

        return run_lanes(device, self.scalars, "scatter", ("gradients",), scatter, arrays, [UPDATE])

    @property
    def every_copy_counts(self) -> bool:
        """True: each copy counts its share."""
        return True

    def squares_of_all(self, squares: jax.Array, gradients: Packed) -> jax.Array:
        """See `Reduction`. All replicas have the gradients of single numbers, and only the first counts them."""

        def without_repeats(lane: LaneScalars, squares: jax.Array) -> jax.Array:
            rank = rank_of(self.device, lane.chunk)
            is_first = (rank.copy == 0) & (rank.data == 0)
            for u, program in enumerate(self.device.spec.updates.programs):
                for slots in program.shared:
                    if slots.arrays != "gradients":
                        continue
                    lead = self.device.lead("gradients", lane.chunk)
                    (number,) = read_turn(gradients, slots, 0, lead)
                    square = squared(number, squares.dtype).sum()
                    again = (lane.program == u) & ~is_first
                    squares = squares.at[lane.chunk].add(jnp.where(again, -square, 0))
            return squares

        squares = for_each_lane(self.device, self.scalars, without_repeats, squares, [UPDATE])
        if self.device.spec.num_replicas == 1:
            return squares
        num_chunks = self.device.spec.lowered.num_chunks
        return squares.at[:num_chunks].set(lax.psum(squares[:num_chunks], DATA))

    def spread(self, arrays: TickArrays) -> TickArrays:
        """Copies the weights that an update has written, and those of hooks, to all copies; `Apply` has gathered along
        "data".
        """
        if not self.device.spec.schedule.has_copies:
            return arrays
        num_lanes = self.device.spec.lowered.operations["update"].num_lanes
        lanes = [self.scalars.lane("update", j) for j in range(num_lanes)]
        gather = functools.partial(gather_over_copies, self.device, self.scalars, lanes)
        hooked = {n: gather(n, a) for n, a in arrays.read_parameters.items()}
        return arrays.replace(parameters=gather("parameters", arrays.parameters), read_parameters=hooked)


class CompressedReduction(Reduction):
    """The reduction that gives the mean of the compressed gradients to all replicas: see `jpipe.engine.gradients`."""

    def reduce(self, arrays: TickArrays) -> TickArrays:
        """See `Reduction`."""
        if self.device.spec.schedule.has_copies:
            return exchange_over_copies(self.device, self.scalars, arrays)
        exchange = functools.partial(exchange_over_data, self.device)
        return run_lanes(self.device, self.scalars, "exchange", EXCHANGE_WRITES, exchange, arrays)


def _mean_over_replicas(device: TrainingDevice, lane: LaneScalars, arrays: Record) -> Record:
    """Replaces the gradients that the lane updates with by their mean over replicas."""

    def mean(gradients: Packed, row: jax.Array) -> Packed:
        lead = device.lead("gradients", row)
        rows = {name: lead(name)[0] for name in gradients}
        on_device = {
            name: lax.dynamic_index_in_dim(a, rows[name]) for name, a in gradients.items() if not packing.is_on_host(a)
        }
        means = device.mean_over_replicas(on_device)

        def written(name: str, array: jax.Array) -> jax.Array:
            # The row of an array that the stage does not use is one of another stage.
            used = device.uses("gradients", name, row)

            def mean_of(old: jax.Array) -> jax.Array:
                return jnp.where(used, device.mean_over_replicas(old), old)

            if name not in on_device:
                return packing.each_row(array, [rows[name]], mean_of)
            new = jnp.where(used, means[name], on_device[name])
            return put_row(array, new, rows[name])

        return {name: written(name, a) for name, a in gradients.items()}

    gradients = guarded(
        device.spec.lowered.target,
        lane.program >= 0,
        mean,
        gradients_of(device, lane.operation, arrays.gradients),
        lane.chunk,
    )
    return arrays.replace(gradients={**arrays.gradients, **gradients})
