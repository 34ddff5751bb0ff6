"""The optimizer of one column: its turns, each of one leaf, or of one replica's share."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpipe import packing
from jpipe.engine.arrays import Packed, TickArrays
from jpipe.engine.context import TrainingDevice
from jpipe.engine.shares import (
    Rank,
    places,
    rank_of,
    read_turn,
    share_of,
    with_share,
    write_turn,
)
from jpipe.engine.sums import factors_in
from jpipe.engine.vocabulary import part_of, whole_of
from jpipe.gradients.sums import FACTORS
from jpipe.lowering.tick_scalars import LaneScalars
from jpipe.packing import Place
from jpipe.stages.extra_args import EXTRA_ARGS, PASSES, STALE_PARAMS, UpdateFacts
from jpipe.stages.shares import Division, WholeLeaves
from jpipe.stages.stage_update import MergedUpdate
from jpipe.stages.update_groups import LeafSlots, UpdateGroup

Record = TypeVar("Record", bound=TickArrays)


def apply_writes(device: TrainingDevice) -> list[str]:
    """The arrays of `TickArrays` that `Apply` reads and writes."""
    names = ["gradients", "optimizer_state", "parameters", "read_parameters", "skipped"]
    if device.spec.stages.gradient_sums.compressor is None:
        return names
    return ["gradient_compression", *names]


@dataclasses.dataclass(frozen=True)
class Apply:
    """The optimizer's update of one column by one of some programs, turn by turn.

    Where branches may hold loops, two tricks keep all arrays in place on CPUs and TPUs. A loop over the
    turns of a group has a dynamic length, so that XLA does not unroll it (and copy). A turn
    computes inside of a `cond`, so that XLA does not read its inputs again after they were
    overwritten. On GPUs both would wait for the host. There a column that does
    not update therefore leaves out all loops together, their lengths are static, and a barrier
    stands where the `cond` is. A turn that changes all of its arrays needs none.

    Attributes:
      device: the device.
      merged: the programs.
      position: the position of the column's program, int32 `[]` if there are several.
      scalars: the scalars of the lane.
      now: bool `[]`, whether the column updates by this program in this tick.
      skip: bool `[]`, whether the update is skipped.
      global_norm: `[]`, norm of the gradient over all stages.
      scale: `[]`, the loss scale of the gradients, or None.
      updates: int32 `[]`, how many times the stage updates in a round; None: once. The loss is divided by all
        microbatches of a minibatch, and the gradient of an update is the mean over its own.
    """

    device: TrainingDevice
    merged: MergedUpdate
    position: jax.Array | int
    scalars: LaneScalars
    now: jax.Array
    skip: jax.Array
    global_norm: jax.Array
    scale: jax.Array | None
    updates: jax.Array | None

    def run(self, arrays: Record) -> Record:
        """Runs 0 or 1 updates, which leave gradients of zero in the column."""
        forward_delay, backward_lead = (self.scalars.delay(name).astype(jnp.float32) for name in PASSES)
        facts = UpdateFacts(forward_delay, backward_lead, self.global_norm)
        extra = [arg.value(facts) for arg in EXTRA_ARGS]
        extra += [forward_delay, backward_lead] if self.merged.has_hooks else []

        updated: dict[str, Packed] = {
            "parameters": arrays.parameters,
            "optimizer_state": arrays.optimizer_state,
            **arrays.read_parameters,
        }
        rank = None
        if self.merged.replicas.number > 1:
            rank = rank_of(self.device, self.scalars.chunk)
        read = {"gradients": arrays.gradients}
        if self.device.spec.stages.gradient_sums.compressor is not None:
            read[FACTORS] = factors_in(arrays)
        turn = _Turn(self, rank, read, self._changes_all({**read, **updated}))
        num_done = jnp.int32(0)
        shared = turn.unscaled(
            self.merged.shared,
            [turn.whole(slots, turn.load(slots, self.position, None, updated)) for slots in self.merged.shared],
        )
        for g, group in enumerate(self.merged.groups):
            run = functools.partial(turn.run, group, [*shared, *extra])
            first, end = self._turns_of(g)
            if isinstance(end, int) and end == first + 1:
                updated, num_done = run(first, (updated, num_done))
            else:
                updated, num_done = lax.fori_loop(first, end, run, (updated, num_done))
        skipped = arrays.skipped
        if self.scalars.is_of_column:  # a unit skips with its home
            skips = (self.now & self.skip).astype(jnp.int32)
            skipped = skipped.at[self.scalars.chunk].add(skips)
        return arrays.replace(
            parameters=updated["parameters"],
            optimizer_state=updated["optimizer_state"],
            read_parameters={name: updated[name] for name in arrays.read_parameters},
            gradients=self._emptied(arrays.gradients, None if turn.changes_all else updated, num_done),
            skipped=skipped,
        )

    def _changes_all(self, arrays: Mapping[str, Packed]) -> bool:
        """Returns whether each turn that reads a gradient reads and writes all of every array that it is in.

        Args:
          arrays: packed arrays by their names in `LeafSlots`.
        """
        return all(
            arrays[slots.arrays][place.array].size == math.prod(place.block)
            for group in self.merged.groups
            if any(slots.arrays in ("gradients", FACTORS) for slots in group.inputs)
            for slots in (*group.inputs, *group.outputs)
            if slots.arrays in arrays
            for place, _ in slots.copies
        )

    def _turns_of(self, group: int) -> tuple[jax.Array | int, jax.Array | int]:
        """The first turn of the column in a group, and the turn after its last."""
        turns = self.merged.first_turn[group], self.merged.num_turns[group]
        first: Any
        number: Any
        if isinstance(self.position, int):
            first, number = (int(per_program[self.position]) for per_program in turns)
        else:
            first, number = (jnp.asarray(a)[self.position] for a in turns)
        if self.device.spec.lowered.target.loops_in_branches:
            number *= self.now.astype(jnp.int32)
        return first, first + number

    def _emptied(self, gradients: Packed, updated: dict[str, Packed] | None, num_done: jax.Array) -> Packed:
        """Sets the gradients of the column to zero if any turn is done.

        Reading `num_done`, or a barrier, delays this until all turns have read the gradients. Emptied
        earlier, the gradients would have to be copied.

        Args:
          gradients: packed gradients.
          updated: the results of all turns; None: the turns need no barrier.
          num_done: int32 `[]`, turns that are done.
        """
        row = self.scalars.chunk
        lead = self.device.lead("gradients", row)
        emptied_arrays = {name: gradients[name] for name in self.merged.gradient_arrays}
        if self.device.spec.lowered.target.loops_in_branches:
            # The row of an array that the stage does not use is one of another stage.
            now = {name: (num_done > 0) & self.device.uses("gradients", name, row) for name in emptied_arrays}
            return {**gradients, **_emptied_by_rows(emptied_arrays, lead, now)}
        far = {name: a for name, a in emptied_arrays.items() if packing.is_on_host(a)}
        far = {name: packing.each_row(a, lead(name), jnp.zeros_like) for name, a in far.items()}
        near = {name: a for name, a in emptied_arrays.items() if name not in far}
        if updated is not None:
            near, _ = lax.optimization_barrier((near, updated))

        # XLA writes a selection in place, and would make a new array of zeros.
        def emptied(name: str, array: jax.Array) -> jax.Array:
            (row,) = lead(name)
            column = lax.dynamic_index_in_dim(array, row, allow_negative_indices=False)
            column = jnp.where(self.now, jnp.zeros_like(column), column)
            return lax.dynamic_update_index_in_dim(array, column, row, 0, allow_negative_indices=False)

        emptied_here = {name: emptied(name, a) for name, a in near.items()}
        return {**gradients, **far, **emptied_here}


class _Turn(NamedTuple):
    """The turns of an update.

    Attributes:
      update: the update.
      rank: the rank of this device among the replicas that share the update; None if none do.
      read: packed gradients, and factors of gradients, by their names in `LeafSlots`.
      changes_all: see `Apply`. XLA for GPUs then makes one kernel of the turn and of emptying the gradients, in place.
    """

    update: Apply
    rank: Rank | None
    read: dict[str, Packed]
    changes_all: bool

    def run(
        self,
        group: UpdateGroup,
        shared_and_extra: Sequence[jax.Array],
        i: jax.Array | int,
        state: tuple[dict[str, Packed], jax.Array],
    ) -> tuple[dict[str, Packed], jax.Array]:
        """Runs turn i of a group; `state` has the updated arrays and the number of turns done."""
        updated, num_done = state
        kept = [j for j, slots in enumerate(group.outputs) if slots.arrays in updated]
        outputs = [group.outputs[j] for j in kept]
        inputs, before = (
            [self.load(slots, i, group.division, updated) for slots in side] for side in (group.inputs, outputs)
        )
        inputs = list(map(self.whole, group.inputs, inputs))

        def compute() -> list[jax.Array]:
            unscaled = self.unscaled(group.inputs, inputs)
            values = group.run(*unscaled, *shared_and_extra)
            return [self.part(slots, values[j]) for slots, j in zip(outputs, kept)]

        keeps = self._keeps(group.division)
        if self.update.device.spec.lowered.target.loops_in_branches:
            values = lax.cond(keeps, lambda: before, compute)
        else:
            if not self.changes_all:
                inputs, before = lax.optimization_barrier((inputs, before))
            values = [jnp.where(keeps, a, b) for a, b in zip(before, compute(), strict=True)]
        for slots, value in zip(outputs, values, strict=True):
            if group.kept.any():
                value = self._with_kept(group.kept, slots, i, updated, value)
            packed = self._stored(slots, i, group.division, updated, value)
            updated = {**updated, slots.arrays: packed}
        return updated, num_done + 1

    def _with_kept(
        self,
        kept: np.ndarray,
        slots: LeafSlots,
        i: jax.Array | int,
        updated: dict[str, Packed],
        value: jax.Array,
    ) -> jax.Array:
        """An output of turn i, with the old numbers where it keeps them: see `UpdateGroup.kept`."""
        lead = self._lead(slots, self.update.scalars.row)
        (old,) = read_turn(updated[slots.arrays], slots, i, lead)
        at_start, at_end = jnp.asarray(kept)[i]
        number = jnp.arange(value.size)
        changes = (number >= at_start) & (number < value.size - at_end)
        return jnp.where(changes, value, old)

    def load(
        self,
        slots: LeafSlots,
        i: jax.Array | int,
        division: Division | None,
        updated: dict[str, Packed],
    ) -> jax.Array:
        """The value that turn i works on: a leaf, or this replica's share, as it was before the update."""
        scalars, name, row = self.update.scalars, slots.arrays, "previous_row"
        if name == STALE_PARAMS:
            name, row = "parameters", "stale_row"
        arrays = {**self.read, **updated}[name]
        lead = self._lead(slots, getattr(scalars, row))
        if slots.arrays == "optimizer_state":
            return packing.read(arrays, self._place_of_state(slots, i, division), lead)
        leaves = read_turn(arrays, slots, i, lead)
        if division is None:
            (leaf,) = leaves
            return leaf
        assert self.rank is not None
        return share_of(division, leaves, self.rank)

    def whole(self, slots: LeafSlots, value: jax.Array) -> jax.Array:
        """The value that the update takes for a loaded leaf: the whole leaf, if the leaf is a part."""
        return value if slots.parted is None else whole_of(slots.parted, value)

    def part(self, slots: LeafSlots, value: jax.Array) -> jax.Array:
        """The value to store for a leaf that the update gives: see `whole`."""
        if slots.parted is None:
            return value
        return part_of(self.update.device, slots.parted, value)

    def _stored(
        self,
        slots: LeafSlots,
        i: jax.Array | int,
        division: Division | None,
        updated: dict[str, Packed],
        value: jax.Array,
    ) -> Packed:
        """Writes the results of turn i into the packed arrays. Weights go to all replicas along "data"."""
        arrays, lead = (
            updated[slots.arrays],
            self._lead(slots, self.update.scalars.row),
        )
        if slots.arrays == "optimizer_state":
            place = self._place_of_state(slots, i, division)
            return packing.write(arrays, place, lead, value)
        leaves = [value]
        if division is not None:
            assert self.rank is not None
            before = read_turn(arrays, slots, i, lead)
            place, _ = slots.copies[0]
            leaves = with_share(division, value, self.rank, before, place.spec)
        return write_turn(arrays, slots, i, lead, leaves)

    def _keeps(self, division: Division | None) -> jax.Array:
        """Returns whether the turn changes nothing: it is skipped, or the replica has no leaf of it."""
        keeps = self.update.skip
        if isinstance(division, WholeLeaves) and None in division.leaf_of_share:
            assert self.rank is not None
            idle = np.array([leaf is None for leaf in division.leaf_of_share])
            keeps |= jnp.asarray(idle)[self.rank.share(division.replicas)]
        return keeps

    def _place_of_state(self, slots: LeafSlots, i: jax.Array | int, division: Division | None) -> Place:
        turn_places = places(slots, i)
        if len(turn_places) == 1:
            return turn_places[0]
        assert division is not None and self.rank is not None
        bases = jnp.stack([place.base for place in turn_places])
        base: Any = bases[self.rank.share(division.replicas)]
        return dataclasses.replace(turn_places[0], base=base)

    def _lead(self, slots: LeafSlots, row: jax.Array) -> packing.Lead:
        """Leading index of a leaf in its packed arrays; `row` is that of weights."""
        device, group = self.update.device, "parameters"
        if slots.arrays in ("gradients", FACTORS, "optimizer_state"):
            row = self.update.scalars.chunk
            group = "gradients" if slots.arrays == FACTORS else slots.arrays
        return device.lead(group, row)

    def unscaled(self, all_slots: Sequence[LeafSlots], values: Sequence[jax.Array]) -> list[jax.Array]:
        """Values whose gradients are means over the microbatches of the update, without loss scale."""
        scale, updates = self.update.scale, self.update.updates

        def mean(gradient: jax.Array) -> jax.Array:
            if scale is not None:
                gradient = gradient / scale.astype(gradient.dtype)
            return gradient if updates is None else gradient * updates.astype(gradient.dtype)

        return [
            mean(value) if slots.arrays == "gradients" else value
            for slots, value in zip(all_slots, values, strict=True)
        ]


def _emptied_by_rows(gradients: Packed, lead: Callable[[str], Sequence], now: Mapping[str, jax.Array]) -> Packed:
    """Sets the column at `lead` to zero where `now` says so. It works row by row, so that the arrays stay in place."""

    def emptied(name: str, array: jax.Array) -> jax.Array:
        (column,) = lead(name)
        num_rows = array.shape[1] if array.ndim > 2 else 1  # of a pool, or a vector
        row_shape = (1, array.shape[1] // num_rows, *array.shape[2:])
        zeros = jnp.zeros(row_shape, array.dtype)
        if packing.is_on_host(array):
            zeros = jax.device_put(zeros, jax.memory.Space.Host)

        def row(i: jax.Array, array: jax.Array) -> jax.Array:
            start = packing.index(array, [column, i])
            return lax.dynamic_update_slice(array, zeros, start, allow_negative_indices=False)

        return lax.fori_loop(0, now[name].astype(jnp.int32) * num_rows, row, array)

    return {name: emptied(name, array) for name, array in gradients.items()}
