"""The branches of an operation, where one for each program of stages is not enough.

In a branch of its own the compiler knows more of a stage than its program. XLA for GPUs reads weights in place where it
knows their row, and it writes products to a slot, and reads them there, where it knows the slot. Elsewhere it copies
them by kernels of their own. The sums of gradients of each stage of a device are arrays of their own, so a branch has
to know the stage. But all branches are compiled, so they are few.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jpipe.lowering.lower import Lowered
from jpipe.lowering.tick_scalars import LaneScalars

ANY = -1
"""What a branch does not know."""

MOST_VERSIONS = 2
"""The most versions of the weights of a stage for each of which there is a branch."""

MOST_SLOTS = 4
"""The most slots of a stage, of the ring of what waits between the halves of its backward, for each of which there is a
branch."""

SPLIT = "split_residuals"
"""This ring."""


class StageBranch(NamedTuple):
    """What a branch of an operation is for.

    Attributes:
      program: the number of the program.
      position: the position of the stage on its device.
      row: the row of its weights.
      slot: the slot of `SPLIT` that it writes or reads.
    """

    program: int
    position: int = 0
    row: int = ANY
    slot: int = ANY


class StageBranches(NamedTuple):
    """The branches of the operations of columns; `()`: one for each program, because nothing else matters.

    Attributes:
      forward: those of the forward.
      backward: those of the backward, and of the weight gradient.
    """

    forward: Sequence[StageBranch] = ()
    backward: Sequence[StageBranch] = ()

    @classmethod
    def of(
        cls, lowered: Lowered, program_of: Sequence[int], *, has_sums: bool, branches_forward: bool, knows_slots: bool
    ) -> "StageBranches":
        """The branches for a table.

        Args:
          lowered: the table.
          program_of: the program of each stage.
          has_sums: whether the sums of each stage of a device are apart.
          branches_forward: whether forwards have branches.
          knows_slots: whether a slot that is known saves copies.
        """
        positions = ((s, chunk) for s, of_stage in enumerate(lowered.copies) for _, chunk in of_stage)
        stages = sorted({StageBranch(program_of[s], chunk) for s, chunk in positions})
        # Where a program tells the position, a branch for each position is no further branch.
        few = has_sums or len(stages) == len({stage.program for stage in stages})
        rows = _rows(lowered, program_of, stages) if branches_forward and few else {}
        forward = [stage._replace(row=row) for stage in stages for row in rows.get(stage, ())]
        backward = forward or (stages if has_sums else [])
        if knows_slots and (slots := _slots(lowered, program_of)):
            known = backward or stages
            backward = [branch._replace(slot=slot) for branch in known for slot in slots[branch._replace(row=ANY)]]
        return cls(tuple(forward), tuple(backward))

    def of_operation(self, name: str) -> Sequence[StageBranch]:
        """The branches of an operation."""
        return {"forward": self.forward, "backward": self.backward, "weight_grad": self.backward}.get(name, ())


def number_of(lane: LaneScalars, branches: Sequence[StageBranch]) -> jax.Array:
    """int32 `[]`: the position of what a lane runs among the branches of its operation, -1 if it is not there."""
    known = [field for field in StageBranch._fields if getattr(branches[0], field) != ANY]
    read = {
        "program": lambda: lane.program,
        "position": lambda: lane.chunk,
        "row": lambda: lane.row,
        "slot": lambda: lane.slot(SPLIT),
    }
    values = [read[field]() for field in known]
    return position_of(values, [[getattr(branch, field) for field in known] for branch in branches])


def position_of(values: Sequence[jax.Array], choices: Sequence[Sequence[int]]) -> jax.Array:
    """int32 `[]`: the position of some numbers among tuples of as many, -1 if they are not there."""
    position = jnp.int32(-1)
    for k, choice in enumerate(choices):
        equal = [value == number for value, number in zip(values, choice, strict=True)]
        position = jnp.where(functools.reduce(jnp.logical_and, equal), k, position)
    return position


def _rows(
    lowered: Lowered, program_of: Sequence[int], stages: Sequence[StageBranch]
) -> Mapping[StageBranch, Sequence[int]]:
    """The rows of the weights of each stage, where they are few and equal on all devices; else nothing."""
    if lowered.num_chunks > 1:
        has_one_version = lowered.schedule.synchronous
        return {stage: [stage.position] for stage in stages} if has_one_version else {}
    versions: dict[StageBranch, int] = {}
    for program, number in zip(program_of, lowered.rows.num_versions.tolist(), strict=True):
        versions[StageBranch(program)] = max(versions.get(StageBranch(program), 0), number)
    return {stage: range(n) for stage, n in versions.items()} if 1 < lowered.rows.num_rows <= MOST_VERSIONS else {}


def _slots(lowered: Lowered, program_of: Sequence[int]) -> Mapping[StageBranch, Sequence[int]]:
    """The slots of `SPLIT` that each stage takes, where they are several and few; else nothing."""
    ring = lowered.rings.get(SPLIT)
    if ring is None or ring.spill is not None or ring.num_slots < 2:
        return {}
    slots: dict[StageBranch, set[int]] = {}
    columns = zip(lowered.schedule.stage.tolist(), lowered.schedule.device.tolist(), ring.slots, strict=True)
    for stage, device, of_column in columns:
        branch = StageBranch(program_of[stage], dict(lowered.copies[stage])[device])
        slots.setdefault(branch, set()).update(map(int, of_column))
    is_few = max(map(len, slots.values())) <= MOST_SLOTS
    return {branch: sorted(numbers) for branch, numbers in slots.items()} if is_few else {}
