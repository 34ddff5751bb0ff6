"""The update of a tick: replicas, tied weights, norms, the loss scale, and the optimizer.

In a tick in which any device updates, every device runs `update`: the norms need all devices. Then
each device updates its own columns. A column skips its update if its gradient is not finite, or if
the gradient is not finite on any other column that applies the same minibatch in the same tick.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.engine.apply import Apply, apply_writes
from jpipe.engine.arrays import TickArrays, Written
from jpipe.engine.cast_weights import recast_weights
from jpipe.engine.context import TrainingDevice
from jpipe.engine.lanes import for_each_lane, run_program
from jpipe.engine.norms import gradient_norms
from jpipe.engine.reductions import reduction_of
from jpipe.engine.ties import copy_tied_weights, sum_tied_gradients
from jpipe.gradients.apart import ApartSums
from jpipe.lowering.tick_scalars import LaneScalars, TickScalars
from jpipe.packing import Place
from jpipe.stages.stage_update import MergedUpdate, StageUpdate, merge_updates

Record = TypeVar("Record", bound=TickArrays)


UPDATE_WRITES = (
    "gradient_compression",
    "gradient_norm",
    "gradients",
    "loss_scale",
    "op_count",
    "optimizer_state",
    "parameters",
    "read_parameters",
    "skipped",
    "squared_norm",
)
"""The arrays of `TickArrays` that `update` reads and writes."""


def update(
    device: TrainingDevice,
    scalars: TickScalars,
    updates: jax.Array | bool,
    arrays: TickArrays,
) -> TickArrays:
    """Runs all updates of one tick.

    Args:
      device: the device.
      scalars: the scalars of the tick.
      updates: bool `[]`, whether any device updates in this tick. If not, no array changes.
      arrays: all arrays that an update reads or writes.
    """
    spec = device.spec
    arrays = _joined(spec.early_sums, arrays)
    for copies in spec.ties:
        arrays = sum_tied_gradients(device, copies, arrays)
    reduction = reduction_of(device, scalars)
    arrays = reduction.reduce(arrays)
    arrays, norms = gradient_norms(reduction, updates, arrays)

    def apply_lane(lane: LaneScalars, arrays: TickArrays) -> TickArrays:
        norm, skip = norms.norm_and_skip(lane.stage, lane.absolute_version)

        def apply(
            merged: MergedUpdate,
            position: jax.Array | int,
            now: jax.Array,
            arrays: Record,
        ) -> Record:
            column_update = Apply(
                device=device,
                merged=merged,
                position=position,
                scalars=lane,
                now=now,
                skip=skip,
                global_norm=norm,
                scale=norms.scale,
                updates=_updates_in_round(device, lane),
            )
            return column_update.run(arrays)

        if spec.lowered.target.loops_in_branches:
            for merged in spec.updates.merged[lane.operation]:
                now, position = _position_of(lane.program, merged.numbers)
                arrays = apply(merged, position, now, arrays)
            return arrays

        def apply_alone(program: StageUpdate, number: int, _: Any, arrays: Written) -> Written:
            (alone,) = merge_updates([program])
            of_stage = [(place, row) for placed, row in program.gradients for place in placed.places]
            joined = _joined(spec.late_sums, arrays, of_stage)
            # The sums are empty afterwards: zeros have any order.
            return _cut(spec.late_sums, apply(alone, 0, lane.program == number, joined))

        writes = apply_writes(device)
        return run_program(device, lane, "apply", writes, apply_alone, arrays)

    arrays = for_each_lane(device, scalars, apply_lane, arrays)
    arrays = reduction.spread(arrays)
    for copies in spec.ties:
        arrays = copy_tied_weights(device, copies, arrays)
    arrays = recast_weights(device, scalars, arrays)
    arrays = _cut(spec.early_sums, arrays)
    return arrays.replace(op_count=arrays.op_count + 1)


def _joined(sums: ApartSums, arrays: Record, of_stage: Sequence[tuple[Place, int]] = ()) -> Record:
    """The arrays with packed sums, which updates read; for `of_stage` see `ApartSums.joined`."""
    return arrays.replace(gradients=sums.joined(arrays.gradients, of_stage))


def _cut(sums: ApartSums, arrays: Record) -> Record:
    """The arrays with sums as a state holds them."""
    return arrays.replace(gradients=sums.cut(arrays.gradients))


def _updates_in_round(device: TrainingDevice, lane: LaneScalars) -> jax.Array | None:
    """How many times the stage of a lane updates in a round, int32 `[]`; None if all stages do so once."""
    schedule = device.spec.schedule
    return jnp.asarray(schedule.updates_in_round, jnp.int32)[lane.stage] if schedule.updates_by_stage else None


def _position_of(number: jax.Array, numbers: Sequence[int]) -> tuple[jax.Array, jax.Array | int]:
    """Returns whether a number, or -1, is among others, and its position there."""
    if len(numbers) == 1:
        return number == numbers[0], 0
    is_equal = number == np.array(numbers, np.int32)
    return is_equal.any(), jnp.argmax(is_equal).astype(jnp.int32)
