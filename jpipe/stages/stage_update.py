"""The update of one stage, and the updates of several stages with loops in common."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jpipe.gradients.sums import SUMS, PlacedSum
from jpipe.packing import Place
from jpipe.stages.shares import ReplicaCounts
from jpipe.stages.update_groups import LeafSlots, Piece, UpdateGroup


@dataclasses.dataclass(frozen=True)
class StageUpdate:
    """One program that updates a stage.

    Parts run one after the other, and each reads and writes leaves of its own. For most optimizers
    a part is one weight or a block of a vector, so an update needs temporary memory for that only.

    Attributes:
      groups: the program, in groups of equal parts.
      shared: inputs of every part: scalars among parameters, gradients and state, and what the
        optimizer keeps in its state and does not change. They are followed
        by the values of `EXTRA_ARGS`, and with hooks by the delays of `PASSES`.
      param_hooks: pass -> the function `(parameters, optimizer_state, delay) -> parameters`, of
        flat lists.
      parameters: `(place, row)` of all copies of each parameter leaf on the stage; several if
        tied.
      gradients: `(sum, row)` of the gradient of each parameter leaf.
      state: the pieces in which each leaf of the optimizer's state is placed.
      replicas: the replicas of the stage, if they share the update; else one.
    """

    groups: Sequence[UpdateGroup]
    shared: Sequence[LeafSlots]
    param_hooks: Mapping[str, Callable]
    parameters: Sequence[Sequence[tuple[Place, int]]]
    gradients: Sequence[tuple[PlacedSum, int]]
    state: Sequence[Sequence[Piece]]
    replicas: ReplicaCounts

    @functools.cached_property
    def gradient_arrays(self) -> list[str]:
        """The names of the packed arrays of plain sums that the update reads."""
        plain = [placed for placed, _ in self.gradients if placed.sum.group == SUMS]
        return sorted({place.array for placed in plain for place in placed.places})


@dataclasses.dataclass(frozen=True)
class MergedUpdate:
    """Updates of several stages with their loops in common.

    A group has the turns of all of them, one update after the other.

    Attributes:
      numbers: the numbers of the updates among those of all stages.
      groups: the turns.
      num_turns: int32 `[groups, programs]`, number of turns of a group that each update has.
      shared: see `StageUpdate`; turn u is that of update u.
      gradient_arrays: see `StageUpdate`, of all updates.
      has_hooks: whether the weights of hooks are written.
      replicas: see `StageUpdate`.
    """

    numbers: Sequence[int]
    groups: Sequence[UpdateGroup]
    num_turns: np.ndarray
    shared: Sequence[LeafSlots]
    gradient_arrays: Sequence[str]
    has_hooks: bool
    replicas: ReplicaCounts

    @property
    def first_turn(self) -> np.ndarray:
        """The first turn of each update in a group, int32 `[groups, programs]`."""
        return np.cumsum(self.num_turns, axis=1, dtype=np.int32) - self.num_turns


def merge_updates(programs: Sequence[StageUpdate]) -> list[MergedUpdate]:
    """Joins the updates to as few as can share loops. The compiled program then grows with the kinds of layers, not
    with the stages.
    """
    alike: dict[tuple, list[int]] = {}
    for u, program in enumerate(programs):
        shared = tuple(map(_layout, program.shared))
        key = program.replicas, tuple(program.param_hooks), shared
        alike.setdefault(key, []).append(u)
    return [_merged(numbers, [programs[u] for u in numbers]) for numbers in alike.values()]


def _merged(numbers: Sequence[int], programs: Sequence[StageUpdate]) -> MergedUpdate:
    alike: dict[tuple, list[tuple[int, UpdateGroup]]] = {}
    for u, program in enumerate(programs):
        for group in program.groups:
            slots = (*group.inputs, *group.outputs)
            # A division is one of the replicas of one stage.
            division = None if group.division is None else id(group)
            key = group.run.text(), tuple(map(_layout, slots)), division
            alike.setdefault(key, []).append((u, group))
    num_turns = np.zeros((len(alike), len(programs)), np.int32)
    for turns, members in zip(num_turns, alike.values(), strict=True):
        for u, group in members:
            turns[u] += group.num_turns
    first = programs[0]
    return MergedUpdate(
        numbers,
        [_joined([group for _, group in members]) for members in alike.values()],
        num_turns,
        _joined_slots([program.shared for program in programs]),
        sorted({name for program in programs for name in program.gradient_arrays}),
        bool(first.param_hooks),
        first.replicas,
    )


def _layout(slots: LeafSlots) -> tuple:
    """The places of the slots, without the first indices."""
    copies = [
        (dataclasses.replace(place, base=0, stride=0, count=1), starts.shape[1]) for place, starts in slots.copies
    ]
    return slots.arrays, slots.parted, tuple(copies)


def _joined(groups: Sequence[UpdateGroup]) -> UpdateGroup:
    """Joins groups to one group with the turns of all."""
    return groups[0]._replace(
        inputs=_joined_slots([group.inputs for group in groups]),
        outputs=_joined_slots([group.outputs for group in groups]),
        num_turns=sum(group.num_turns for group in groups),
        kept=np.concatenate([group.kept for group in groups]),
    )


def _joined_slots(slots_of_members: Sequence[Sequence[LeafSlots]]) -> list[LeafSlots]:
    """Joins the turns of all members, for each input or output."""
    joined = []
    for slots in zip(*slots_of_members, strict=True):
        copies = [
            (copy[0][0], np.concatenate([starts for _, starts in copy]))
            for copy in zip(*(s.copies for s in slots), strict=True)
        ]
        joined.append(slots[0]._replace(copies=copies))
    return joined
