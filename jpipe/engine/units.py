"""What a lane of an update changes: a column, or a unit of vocabulary layers."""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax

from jpipe import packing
from jpipe.engine.arrays import Packed, ReadOnly, TickArrays, Written
from jpipe.engine.context import TrainingDevice
from jpipe.engine.guard import Branch, run_one_of
from jpipe.lowering.scalars import LaneScalars, TickScalars
from jpipe.mesh import STAGE
from jpipe.stages.optimizer import StageUpdate
from jpipe.stages.stage_update import MergedUpdate, merge_updates
from jpipe.stages.vocabulary import PartedLeaf

State = TypeVar("State")


def programs_of(device: TrainingDevice, lane: LaneScalars) -> Sequence[StageUpdate]:
    """The updates of which a lane runs one."""
    updates, unit = device.spec.updates, unit_of(device, lane)
    return updates.programs if unit is None else [updates.of_units[unit].update]


def merged_of(device: TrainingDevice, lane: LaneScalars) -> Sequence[MergedUpdate]:
    """The same updates, merged."""
    updates, unit = device.spec.updates, unit_of(device, lane)
    if unit is None:
        return updates.merged
    return merge_updates([updates.of_units[unit].update])


def unit_of(device: TrainingDevice, lane: LaneScalars) -> int | None:
    """The number of the unit that a lane updates; None: it updates a column."""
    names = [unit.update for unit in device.spec.stages.vocabulary.units]
    return names.index(lane.operation) if lane.operation in names else None


def row_of(device: TrainingDevice, lane: LaneScalars) -> jax.Array:
    """The row of the arrays `[R, ...]`, or `[1, ...]`, that a lane updates."""
    return lane.chunk if unit_of(device, lane) is None else jnp.int32(0)


def own_gradients(device: TrainingDevice, lane: LaneScalars, gradients: Packed) -> Packed:
    """Those of packed gradients that a lane updates with."""
    return gradients_of(device, unit_of(device, lane), gradients)


def gradients_of(device: TrainingDevice, unit: int | None, gradients: Packed) -> Packed:
    """Those of packed gradients that a unit has; None: those of columns."""
    stages = device.spec.stages
    packings = [u.packing for u in stages.vocabulary.units]
    names = (stages.accumulators if unit is None else packings[unit]).arrays
    return {name: a for name, a in gradients.items() if name in names}


# -- Lanes

MOST_UNROLLED = 4
"""Lanes of a tick that follow each other in the program. More run in a loop: the size of the program does not grow."""


def for_each_lane(
    device: TrainingDevice,
    scalars: TickScalars,
    run: Callable[[LaneScalars, State], State],
    state: State,
) -> State:
    """The state after `run(lane, state)` for every lane of the update."""
    num_lanes = device.spec.lowered.operations["update"].num_lanes
    if num_lanes <= MOST_UNROLLED:
        for j in range(num_lanes):
            state = run(scalars.lane("update", j), state)
        return state
    return lax.fori_loop(0, num_lanes, lambda j, state: run(scalars.lane("update", j), state), state)


def run_program(
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

    branches = [Branch(name, writes, functools.partial(once, program, u)) for u, program in programs]
    return run_one_of(device.spec.lowered.target, lane.branch, branches, arrays)


def run_lanes(
    device: TrainingDevice,
    scalars: TickScalars,
    name: str,
    writes: Sequence[str],
    run: Callable[[LaneScalars, StageUpdate, jax.Array | int, Written], Written],
    arrays: TickArrays,
    units: Sequence[LaneScalars] = (),
) -> TickArrays:
    """`run_program` for every lane, then for those of units; `run` gets the lane, and not the number of the program."""

    def run_lane(lane: LaneScalars, arrays: TickArrays) -> TickArrays:
        def of_lane(
            program: StageUpdate,
            _: int,
            num_updates: jax.Array | int,
            arrays: Written,
        ) -> Written:
            return run(lane, program, num_updates, arrays)

        return run_program(device, lane, name, writes, of_lane, arrays)

    arrays = for_each_lane(device, scalars, run_lane, arrays)
    for unit in units:
        arrays = run_lane(unit, arrays)
    return arrays


# -- Parts


def whole_of(leaf: PartedLeaf, part: jax.Array) -> jax.Array:
    """The whole of a leaf, from the parts of all devices. All devices call this."""
    part = packing.split_as((None,) * len(leaf.spec), part)
    whole = lax.all_gather(part, STAGE, axis=leaf.dim, tiled=True)
    return lax.slice_in_dim(whole, 0, leaf.aval.shape[leaf.dim], axis=leaf.dim)


def part_of(device: TrainingDevice, leaf: PartedLeaf, whole: jax.Array) -> jax.Array:
    """This device's part of a leaf."""
    padded = jnp.pad(whole, leaf.padding())
    start = device.position * leaf.num_rows
    return lax.dynamic_slice_in_dim(padded, start, leaf.num_rows, leaf.dim)
