"""The lanes of the updates of a tick: those of columns, and one of each unit of vocabulary layers."""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax

from jpipe.engine.arrays import Packed, ReadOnly, TickArrays, Written
from jpipe.engine.context import TrainingDevice
from jpipe.engine.guard import Branch, run_one_of
from jpipe.lowering.tick_scalars import LaneScalars, TickScalars
from jpipe.stages.stage_update import StageUpdate

State = TypeVar("State")

MOST_UNROLLED = 4
"""Lanes of a tick that follow each other in the program. More run in a loop: the size of the program does not grow."""


def for_each_lane(
    device: TrainingDevice,
    scalars: TickScalars,
    run: Callable[[LaneScalars, State], State],
    state: State,
    operations: Sequence[str] | None = None,
) -> State:
    """Returns the state after `run(lane, state)` for every lane of the operations; None: of all that update."""
    for operation in device.spec.updates.by_operation if operations is None else operations:

        def run_lane(j: jax.Array | int, state: State, operation: str = operation) -> State:
            return run(scalars.lane(operation, j), state)

        num_lanes = device.spec.lowered.operations[operation].num_lanes
        if num_lanes > MOST_UNROLLED:
            state = lax.fori_loop(0, num_lanes, run_lane, state)
        else:
            for j in range(num_lanes):
                state = run_lane(j, state)
    return state


def gradients_of(device: TrainingDevice, operation: str, gradients: Packed) -> Packed:
    """The gradients that an operation updates with, packed or apart."""
    names = device.spec.sums.names(device.spec.updates.gradient_arrays(operation))
    return {name: a for name, a in gradients.items() if name in names}


def run_program(
    device: TrainingDevice,
    lane: LaneScalars,
    name: str,
    writes: Sequence[str],
    run: Callable[[StageUpdate, int, jax.Array | int, Written], Written],
    arrays: TickArrays,
) -> TickArrays:
    """Calls `run` for the update program of a lane, if the lane updates.

    Where branches may hold loops, all programs run, and a loop over the turns of a program that does not update
    has length 0. Elsewhere one program runs, and its loops have static lengths.

    Args:
      device: the device.
      lane: the lane.
      name: the name of the operation, in profiles.
      writes: names of the arrays that it writes.
      run: `(program, its number, 0 or 1 updates, arrays) -> arrays`.
      arrays: all arrays.
    """
    programs = list(enumerate(device.spec.updates.by_operation[lane.operation]))
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
    operations: Sequence[str] | None = None,
) -> TickArrays:
    """`run_program` for every lane of `operations`, see `for_each_lane`; `run` gets the lane, and not the number of the
    program.
    """

    def run_lane(lane: LaneScalars, arrays: TickArrays) -> TickArrays:
        def run_in_lane(
            program: StageUpdate,
            _: int,
            num_updates: jax.Array | int,
            arrays: Written,
        ) -> Written:
            return run(lane, program, num_updates, arrays)

        return run_program(device, lane, name, writes, run_in_lane, arrays)

    return for_each_lane(device, scalars, run_lane, arrays, operations)
