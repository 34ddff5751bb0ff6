"""The update of a tick: replicas, tied weights, norms, the loss scale, and the optimizer.

In a tick in which any device updates, every device runs `update`: the norms need all devices. Then
each device updates its own columns. A column skips its update if its gradient is not finite, or if
the gradient is not finite on any other column that applies the same minibatch in the same tick.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpipe import packing
from jpipe.engine.apply import Apply, apply_writes
from jpipe.engine.arrays import Packed, ReadOnly, TickArrays, Written
from jpipe.engine.context import TrainingDevice
from jpipe.engine.copies import sum_over_copies
from jpipe.engine.gradients import (
    EXCHANGE_WRITES,
    exchange_over_copies,
    exchange_over_data,
)
from jpipe.engine.guard import Branch, guarded, run_one_of
from jpipe.engine.norms import gradient_norms
from jpipe.engine.shares import (
    gather_over_copies,
    scatter_over_copies,
    scatter_over_data,
)
from jpipe.engine.ties import copy_tied_weights, sum_tied_gradients
from jpipe.engine.transport import put_row
from jpipe.engine.units import (
    for_each_lane,
    merged_of,
    own_gradients,
    programs_of,
    row_of,
)
from jpipe.lowering.scalars import LaneScalars, TickScalars
from jpipe.stages.optimizer import StageUpdate
from jpipe.stages.stage_update import MergedUpdate, merge_updates

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
    """All updates of one tick.

    Args:
      device: the device.
      scalars: of the tick.
      updates: bool `[]`, whether any device updates in this tick. If not, no array changes.
      arrays: all arrays that an update reads or writes.
    """
    spec = device.spec
    units = [scalars.lane(unit.update, 0) for unit in spec.stages.vocabulary.units]
    for copies in spec.ties:
        arrays = sum_tied_gradients(device, copies, arrays)
    arrays = _over_replicas(device, scalars, units, arrays)
    arrays, norms = gradient_norms(device, scalars, units, updates, arrays)

    def apply_lane(lane: LaneScalars, arrays: TickArrays) -> TickArrays:
        norm, skip = norms.of_version(lane.stage, lane.absolute_version)

        def apply(
            merged: MergedUpdate,
            position: jax.Array | int,
            now: jax.Array,
            arrays: Record,
        ) -> Record:
            of_column = Apply(
                device=device,
                merged=merged,
                position=position,
                scalars=lane,
                now=now,
                skip=skip,
                global_norm=norm,
                scale=norms.scale,
            )
            return of_column.run(arrays)

        if spec.lowered.target.loops_in_branches:
            for merged in merged_of(device, lane):
                now, position = _position_of(lane.program, merged.numbers)
                arrays = apply(merged, position, now, arrays)
            return arrays

        def apply_alone(
            program: StageUpdate, number: int, _: Any, arrays: Written
        ) -> Written:
            (alone,) = merge_updates([program])
            return apply(alone, 0, lane.program == number, arrays)

        writes = apply_writes(device)
        return _run_program(device, lane, "apply", writes, apply_alone, arrays)

    arrays = for_each_lane(device, scalars, apply_lane, arrays)
    for unit in units:
        arrays = apply_lane(unit, arrays)
    if spec.shares_updates and spec.schedule.has_copies:
        arrays = _gather_weights(device, scalars, arrays)
    for copies in spec.ties:
        arrays = copy_tied_weights(device, copies, arrays)
    return arrays.replace(op_count=arrays.op_count + 1)


def _position_of(
    number: jax.Array, numbers: Sequence[int]
) -> tuple[jax.Array, jax.Array | int]:
    """Whether a number, or -1, is among others, and its position there."""
    if len(numbers) == 1:
        return number == numbers[0], 0
    found = number == np.array(numbers, np.int32)
    return found.any(), jnp.argmax(found).astype(jnp.int32)


def _run_program(
    device: TrainingDevice,
    lane: LaneScalars,
    name: str,
    writes: Sequence[str],
    run: Callable[[StageUpdate, int, jax.Array | int, Written], Written],
    arrays: TickArrays,
) -> TickArrays:
    """Runs something for the update program of the column, or the unit, that updates in a lane, if there is one.

    Where branches may hold loops, all programs run, and a loop over the turns of a program that does not update
    has length 0. Elsewhere one program runs, and its loops have static lengths.

    Args:
      device: the device.
      lane: the lane.
      name: of the operation, in profiles.
      writes: names of the arrays that it writes.
      run: `(program, its number, 0 or 1 updates, arrays) -> arrays`.
      arrays: all arrays.
    """
    programs = list(enumerate(programs_of(device, lane)))
    if device.spec.lowered.target.loops_in_branches:
        for u, program in programs:
            number = (lane.program == u).astype(jnp.int32)
            arrays = run(program, u, number, cast(Written, arrays))
        return arrays

    def once(program: StageUpdate, u: int, written: Written, _: ReadOnly) -> Written:
        return run(program, u, 1, written)

    branches = [
        Branch(name, writes, functools.partial(once, program, u))
        for u, program in programs
    ]
    return run_one_of(device.spec.lowered.target, lane.branch, branches, arrays)


def _run_lanes(
    device: TrainingDevice,
    scalars: TickScalars,
    name: str,
    writes: Sequence[str],
    run: Callable[[LaneScalars, StageUpdate, jax.Array | int, Written], Written],
    arrays: TickArrays,
    units: Sequence[LaneScalars] = (),
) -> TickArrays:
    """`_run_program` for every lane, then for those of units; `run` gets the lane, and not the number of the program."""

    def run_lane(lane: LaneScalars, arrays: TickArrays) -> TickArrays:
        def of_lane(
            program: StageUpdate,
            _: int,
            num_updates: jax.Array | int,
            arrays: Written,
        ) -> Written:
            return run(lane, program, num_updates, arrays)

        return _run_program(device, lane, name, writes, of_lane, arrays)

    arrays = for_each_lane(device, scalars, run_lane, arrays)
    for unit in units:
        arrays = run_lane(unit, arrays)
    return arrays


# -- Replicas


def _over_replicas(
    device: TrainingDevice,
    scalars: TickScalars,
    units: Sequence[LaneScalars],
    arrays: TickArrays,
) -> TickArrays:
    """Gradients of all replicas of each column that updates: summed over copies, averaged over "data".

    If replicas share the update, each gets the sum for its share of a column, and zeros elsewhere.
    """
    spec = device.spec
    if spec.communication.compress_gradients is not None:
        return _over_compressed(device, scalars, units, arrays)
    shared = spec.shares_updates
    if spec.num_replicas > 1:
        mean = functools.partial(_mean_over_replicas, device)
        if not shared:
            arrays = for_each_lane(device, scalars, mean, arrays)
        for unit in units:
            arrays = mean(unit, arrays)
    if shared:
        if spec.schedule.has_copies:
            gradients = scatter_over_copies(device, scalars, arrays.gradients)
            arrays = arrays.replace(gradients=gradients)

        def scatter(
            lane: LaneScalars,
            program: StageUpdate,
            num_updates: jax.Array | int,
            arrays: Written,
        ) -> Written:
            gradients = scatter_over_data(
                device, program, lane, arrays.gradients, num_updates
            )
            return arrays.replace(gradients=gradients)

        arrays = _run_lanes(device, scalars, "scatter", ("gradients",), scatter, arrays)
    elif spec.schedule.has_copies:
        gradients = sum_over_copies(device, scalars, "update", arrays.gradients)
        arrays = arrays.replace(gradients=gradients)
    return arrays


def _over_compressed(
    device: TrainingDevice,
    scalars: TickScalars,
    units: Sequence[LaneScalars],
    arrays: TickArrays,
) -> TickArrays:
    """The same for replicas that exchange compressed gradients."""
    if device.spec.schedule.has_copies:
        return exchange_over_copies(device, scalars, arrays)
    exchange = functools.partial(exchange_over_data, device)
    return _run_lanes(
        device, scalars, "exchange", EXCHANGE_WRITES, exchange, arrays, units
    )


def _gather_weights(
    device: TrainingDevice, scalars: TickScalars, arrays: TickArrays
) -> TickArrays:
    """The weights that an update has written, and those of hooks, in all copies of each stage."""
    num_lanes = device.spec.lowered.operations["update"].num_lanes
    lanes = [scalars.lane("update", j) for j in range(num_lanes)]
    gather = functools.partial(gather_over_copies, device, scalars, lanes)
    hooked = {n: gather(n, a) for n, a in arrays.read_parameters.items()}
    return arrays.replace(
        parameters=gather("parameters", arrays.parameters), read_parameters=hooked
    )


def _mean_over_replicas(
    device: TrainingDevice, lane: LaneScalars, arrays: Record
) -> Record:
    """Replaces the gradients that the lane updates with by their mean over replicas."""

    def mean(gradients: Packed, row: jax.Array) -> Packed:
        lead = device.lead("gradients", row)
        rows = {name: lead(name)[0] for name in gradients}
        own = {
            name: lax.dynamic_index_in_dim(a, rows[name])
            for name, a in gradients.items()
            if not packing.is_on_host(a)
        }
        means = device.mean_over_replicas(own)

        def written(name: str, array: jax.Array) -> jax.Array:
            # The row of an array that the stage does not use is one of another stage.
            used = device.uses("gradients", name, row)

            def mean_of(own: jax.Array) -> jax.Array:
                return jnp.where(used, device.mean_over_replicas(own), own)

            if name not in own:
                return packing.each_row(array, [rows[name]], mean_of)
            new = jnp.where(used, means[name], own[name])
            return put_row(array, new, rows[name])

        return {name: written(name, a) for name, a in gradients.items()}

    gradients = guarded(
        device.spec.lowered.target,
        lane.program >= 0,
        mean,
        own_gradients(device, lane, arrays.gradients),
        row_of(device, lane),
    )
    return arrays.replace(gradients={**arrays.gradients, **gradients})
