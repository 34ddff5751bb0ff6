"""The parts of updates in groups, and the places of each replica's share of the state.

A group is one program that runs for many leaves, one *turn* after the other. If the replicas of a stage
share the update, a turn has a division (`jpipe.stages.shares`), the program works on a share, and the
optimizer's state has room for one share.
"""

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jpipe.layers.equations import Equations
from jpipe.packing import Leaf, Packing, Place
from jpipe.stages.shares import (
    AlongDim,
    AsVector,
    Division,
    ReplicaCounts,
    WholeLeaves,
    division_of_leaf,
)
from jpipe.stages.vector_blocks import PackedLeaf, PackedPart, is_elementwise, on_shape
from jpipe.stages.vocabulary import PartedLeaf

STATE = "optimizer_state"


class LeafSlots(NamedTuple):
    """The places of one of the inputs or outputs of a group's turns.

    Attributes:
      arrays: "parameters", "stale_params", "gradients", "optimizer_state", or a pass whose weights a hook gives.
      copies: for each copy of the leaf (several if tied) its place, and int32 `[turns, n]`, the first
        indices in that array. n is the number of leaves of a turn. State that is shared by whole leaves
        has one index for each share; it is 0 for a share without a leaf.
      parted: see `PackedLeaf`.
    """

    arrays: str
    copies: Sequence[tuple[Place, np.ndarray]]
    parted: PartedLeaf | None = None


class UpdateGroup(NamedTuple):
    """Turns of an update that are one program on different leaves.

    Attributes:
      run: `(*inputs, *shared, *extra) -> outputs`, on leaves or on shares.
      inputs: the places of the inputs.
      outputs: the places of the outputs.
      num_turns: the number of turns.
      kept: int32 `[turns, 2]`, see `PackedPart`.
      division: the division of each turn over the replicas of the stage; None: every replica updates all.
    """

    run: Equations
    inputs: Sequence[LeafSlots]
    outputs: Sequence[LeafSlots]
    num_turns: int
    kept: np.ndarray
    division: Division | None = None


@dataclasses.dataclass(frozen=True)
class Piece:
    """Numbers of one leaf of the optimizer's state that lie together.

    Attributes:
      share: the share that has them; None: all replicas have them.
      place: their place.
      view: the shape of the leaf from which they are taken.
      index: their index in it: the place has `leaf.reshape(view)[index]`.
      parted: the split of the leaf over devices, if the place has a device's part of it.
    """

    share: int | None
    place: Place
    view: tuple[int, ...]
    index: tuple = ()
    parted: PartedLeaf | None = None


class PackedDraft(NamedTuple):
    """An update of a stage whose state is placed as if nobody shared it.

    Attributes:
      parts: the parts, which each run alone.
      common: scalars and constants that every part may read.
      state: the place of each leaf of the optimizer's state.
      replicas: the replicas of the stage.
      devices: the device of each copy of each stage that has this update.
    """

    parts: Sequence[PackedPart]
    common: Sequence[PackedLeaf]
    state: Sequence[Place]
    replicas: ReplicaCounts
    devices: Sequence[int]


class Grouped(NamedTuple):
    """A draft in groups.

    Attributes:
      groups: the groups.
      common: the places of the scalars and constants that every part may read.
      pieces: the pieces of each leaf of the optimizer's state.
    """

    groups: Sequence[UpdateGroup]
    common: Sequence[LeafSlots]
    pieces: Sequence[Sequence[Piece]]


class _Turns(NamedTuple):
    """A group before its state is placed: the parts that each turn runs."""

    run: Equations
    division: AlongDim | AsVector | WholeLeaves | None
    turns: Sequence[Sequence[PackedPart]]


def group_updates(
    drafts: Sequence[PackedDraft],
    state: Packing,
    axis_sizes: Mapping[str, int],
    occupancy: float,
) -> tuple[list[Grouped], Packing]:
    """Groups the parts of each update, and divides them over the replicas of their stage.

    Args:
      drafts: the updates.
      state: the packing of the state of each draft if nobody shares it.
      axis_sizes: sizes of the axes of the mesh that leaves may be split over.
      occupancy: the occupancy of the shares of the state, see `Packing.of`.

    Returns:
      The groups of each draft, and how the shares of the state are packed: one owner for each draft
      and share.
    """
    if all(draft.replicas.number == 1 for draft in drafts):
        grouped = [
            Grouped(
                [_group(turns, None) for turns in _turns(draft, state, axis_sizes)],
                [_slots([[leaf]]) for leaf in draft.common],
                [[Piece(None, place, place.shape)] for place in draft.state],
            )
            for draft in drafts
        ]
        return grouped, state
    shared = [_SharedState(draft, state, axis_sizes) for draft in drafts]
    packing = Packing.of(
        [owner for s in shared for owner in s.owners()],
        occupancy,
        devices=[
            # Every share is on a replica of its own.
            [d * s.draft.replicas.number + k for d in s.draft.devices]
            for s in shared
            for k, _ in enumerate(s.owners())
        ],
        tight=True,
    )
    places, grouped = iter(packing.places), []
    for s in shared:
        s.place([next(places) for _ in s.owners()])
        common = [_slots([[leaf]], s) for leaf in s.draft.common]
        grouped.append(Grouped([_group(t, s) for t in s.groups], common, s.pieces()))
    return grouped, packing


# -- Turns


def _turns(draft: PackedDraft, state: Packing, axis_sizes: Mapping[str, int]) -> list[_Turns]:
    """Groups the parts: a group is one program on leaves of the same arrays."""
    alike: dict[tuple, list[PackedPart]] = {}
    for part in draft.parts:
        alike.setdefault((part.equations.text(), part.layout()), []).append(part)
    load = np.zeros(draft.replicas.number)  # bytes of whole leaves for each share
    result = []
    for members in alike.values():
        first = members[0]
        division = _division(first, draft.replicas, axis_sizes)
        if division is not None:
            shape = division.share(np.float32).aval.shape  # of any dtype
            turns = [[part] for part in members]
            result.append(_Turns(on_shape(first, shape), division, turns))
        elif draft.replicas.number == 1 or not first.inputs:
            turns = [[part] for part in members]
            result.append(_Turns(first.equations, None, turns))
        else:
            result += _whole_leaves(members, draft.replicas, state, load)
    return result


def _division(part: PackedPart, replicas: ReplicaCounts, axis_sizes: Mapping[str, int]) -> AlongDim | AsVector | None:
    """The division of each leaf of a part; None: leaves stay whole."""
    if replicas.number == 1 or not part.inputs or not is_elementwise(part):
        return None
    place = part.outputs[0].copies[0][0]
    weights = [leaf for leaf in part.leaves if leaf.arrays != STATE]
    if weights:
        place = weights[0].copies[0][0]
    return division_of_leaf(replicas, place.shape, place.spec, not place.flat, axis_sizes)


def _whole_leaves(
    members: Sequence[PackedPart],
    replicas: ReplicaCounts,
    state: Packing,
    load: np.ndarray,
) -> list[_Turns]:
    """Turns of as many parts as there are replicas, and one of the rest.

    Args:
      members: parts with one program.
      replicas: the replicas of the stage.
      state: the packing of the state if nobody shares it.
      load: `[P]`, bytes of state of each share. The rest is added where there is least.
    """
    P, result = replicas.number, []
    num_full = len(members) // P * P
    for first_member, size in ((0, P), (num_full, len(members) - num_full)):
        parts = members[first_member : num_full if size == P else None]
        if not size or not parts:
            continue
        first = int(np.argmin(load)) if size < P else 0
        division = WholeLeaves(replicas, size, first)
        num_bytes = sum(
            math.prod(leaf.copies[0][0].shape) * state.arrays[leaf.copies[0][0].array].dtype.itemsize
            for leaf in _state_of(parts[0])
        )
        for n in range(len(parts)):
            load[(first + n % size) % P] += num_bytes
        turns = [parts[i : i + size] for i in range(0, len(parts), size)]
        result.append(_Turns(parts[0].equations, division, turns))
    return result


def _state_of(part: PackedPart) -> list[PackedLeaf]:
    """The leaves of the optimizer's state that a part reads or writes, each once."""
    leaves = {_key(leaf): leaf for leaf in part.leaves if leaf.arrays == STATE}
    return list(leaves.values())


def _key(leaf: PackedLeaf) -> tuple[str, int]:
    """Names a leaf of the optimizer's state."""
    return leaf.copies[0][0].array, leaf.starts()[0]


# -- The shares of a state


class _Slot(NamedTuple):
    """A leaf of the state, or a block of leaves, as a turn of a group has it.

    Attributes:
      key: its array if nobody shares it, and its first index there.
      shape: its shape.
      division: the division of the turn; None: all shares have all of it.
      number: the number of the leaf in its turn.
      leaf: the part of it that a share has.
    """

    key: tuple[str, int]
    shape: tuple[int, ...]
    division: AlongDim | AsVector | WholeLeaves | None
    number: int
    leaf: Leaf

    def is_of(self, share: int) -> bool:
        """Returns whether a share has numbers of it."""
        if isinstance(self.division, WholeLeaves):
            return self.division.leaf_of(share) == self.number
        return True


class _SharedState:
    """The state of one draft in shares.

    Attributes:
      draft: the update.
      groups: its parts in groups.
    """

    def __init__(self, draft: PackedDraft, state: Packing, axis_sizes: Mapping[str, int]) -> None:
        self.draft = draft
        self.groups = _turns(draft, state, axis_sizes)
        self._slots = [
            _slot(leaf, turns.division, number, state)
            for turns in self.groups
            for turn in turns.turns
            for number, part in enumerate(turn)
            for leaf in _state_of(part)
        ]
        self._slots.sort(key=lambda slot: isinstance(slot.division, WholeLeaves))
        self._ordered = sorted(self._slots, key=lambda slot: slot.key)
        self._places: list[dict[tuple[str, int], Place]] = []

    def owners(self) -> list[list[Leaf]]:
        """The leaves of each share. Leaves that all shares have come first, so that all have them at one place."""
        return [[slot.leaf for slot in self._slots if slot.is_of(k)] for k in range(self.draft.replicas.number)]

    def place(self, places: Sequence[Sequence[Place]]) -> None:
        """Takes the places of the leaves of `owners`."""
        for k, share_places in enumerate(places):
            keys = [slot.key for slot in self._slots if slot.is_of(k)]
            self._places.append(dict(zip(keys, share_places, strict=True)))

    def slots(self, leaves: Sequence[Sequence[PackedLeaf]], division: Division | None) -> LeafSlots:
        """The places of one leaf of state of a group's turns; `leaves[t][n]` is leaf n of turn t."""
        shares = range(self.draft.replicas.number)
        if isinstance(division, WholeLeaves):
            numbers = [division.leaf_of(k) for k in shares]
        else:  # all shares have it at one place
            shares, numbers = range(1), [0]
        places: list[list[Place | None]] = [
            [None if n is None else self._places[k][_key(turn_leaves[n])] for k, n in zip(shares, numbers)]
            for turn_leaves in leaves
        ]
        starts = [[0 if p is None else int(p.start()) for p in row] for row in places]
        place = next(p for p in places[0] if p is not None)
        return LeafSlots(STATE, [(place, np.array(starts, np.int32))])

    def pieces(self) -> list[list[Piece]]:
        """The pieces of each leaf of the state."""
        return [self._pieces_of(place) for place in self.draft.state]

    def _slots_of(self, place: Place) -> list[_Slot]:
        """The slots that have numbers of a leaf."""
        start = int(place.start())
        first = bisect.bisect_right(self._ordered, (place.array, start), key=lambda slot: slot.key)
        slots = []
        for slot in self._ordered[max(first - 1, 0) :]:
            array, slot_start = slot.key
            if (array, slot_start) >= (place.array, start + place.block[0]):
                break
            size = math.prod(slot.shape) if place.flat else 1
            if array == place.array and slot_start + size > start:
                slots.append(slot)
        return slots

    def _pieces_of(self, leaf: Place) -> list[Piece]:
        return [
            piece
            for slot in self._slots_of(leaf)
            for share in self._shares_of(slot)
            if (piece := self._piece(slot, share, leaf)) is not None
        ]

    def _shares_of(self, slot: _Slot) -> list[int | None]:
        """The shares that have different parts of a slot; None: all shares have the same."""
        if slot.division is None:
            return [None]
        shares = range(self.draft.replicas.number)
        return [k for k in shares if slot.is_of(k)]

    def _piece(self, slot: _Slot, share: int | None, leaf: Place) -> Piece | None:
        """The piece of a leaf that a share has in a slot."""
        here, division = self._places[share or 0][slot.key], slot.division
        if isinstance(division, AlongDim):
            index = (*[slice(None)] * division.axis, share)
            return Piece(share, here, division.view(division.replicas.number), index)
        if slot.shape == leaf.shape and not isinstance(division, AsVector):
            return Piece(share, here, leaf.shape)
        # As numbers of the vector that the slot is.
        size, num_in_slot = math.prod(leaf.shape), math.prod(slot.shape)
        offset = int(leaf.start()) - slot.key[1] if leaf.flat else 0
        first_of_share, stop_of_share = 0, num_in_slot
        if isinstance(division, AsVector):
            assert share is not None
            first_of_share = share * division.size
            stop_of_share = first_of_share + division.size
        first = max(first_of_share, offset)
        stop = min(stop_of_share, num_in_slot, offset + size)
        if first >= stop:
            return None
        base = int(here.start()) + first - first_of_share
        part = Place(here.array, base, 0, 1, (stop - first,), flat=True)
        return Piece(share, part, (size,), (slice(first - offset, stop - offset),))


def _slot(
    leaf: PackedLeaf,
    division: AlongDim | AsVector | WholeLeaves | None,
    number: int,
    state: Packing,
) -> _Slot:
    place = leaf.copies[0][0]
    dtype = state.arrays[place.array].dtype
    if division is None or isinstance(division, WholeLeaves):
        aval = jax.ShapeDtypeStruct(place.shape, dtype)
        share = Leaf(aval, 1, place.spec, in_vector=place.flat)
    else:
        share = division.share(dtype)
    # A share that is a part of a vector stays on the device.
    share = share._replace(on_host=place.on_host and not share.in_vector)
    return _Slot(_key(leaf), place.shape, division, number, share)


# -- Groups


def _group(turns: _Turns, shared: _SharedState | None) -> UpdateGroup:
    """The group of some turns; `shared` has the places of the state, if it is shared."""

    def slots(parts_of_turns: Sequence[Sequence[Sequence[PackedLeaf]]]) -> list[LeafSlots]:
        """`parts_of_turns[t][n]` are the leaves of part n of turn t."""
        return [
            _slots(
                [[part[j] for part in turn] for turn in parts_of_turns],
                shared,
                turns.division,
            )
            for j in range(len(parts_of_turns[0][0]))
        ]

    inputs = slots([[part.inputs for part in turn] for turn in turns.turns])
    outputs = slots([[part.outputs for part in turn] for turn in turns.turns])
    kept = np.array([turn[0].kept for turn in turns.turns], np.int32)
    return UpdateGroup(turns.run, inputs, outputs, len(turns.turns), kept, turns.division)


def _slots(
    leaves: Sequence[Sequence[PackedLeaf]],
    shared: _SharedState | None = None,
    division: Division | None = None,
) -> LeafSlots:
    """The places of one input or output of a group; `leaves[t][n]` is leaf n of turn t."""
    first = leaves[0][0]
    if first.arrays == STATE and shared is not None:
        return shared.slots(leaves, division)
    copies = []
    for c, (place, _) in enumerate(first.copies):
        starts = [[leaf.starts()[c] for leaf in turn_leaves] for turn_leaves in leaves]
        copies.append((place, np.array(starts, np.int32)))
    return LeafSlots(first.arrays, copies, first.parted)
