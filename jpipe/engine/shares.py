"""Exchanges between replicas that share the update of their stage. See `jpipe.stages.shares`.

    gradients   each replica gets the sum of its share, and has zeros elsewhere    scatter
    weights     each replica gets the shares of all                                gather

Copies of a stage on different devices exchange in a ring, and first. The replicas along the axis "data" then
exchange what one copy has. So the gradients of a stage travel once, and so do its weights.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jpipe import packing
from jpipe.engine.arrays import Packed
from jpipe.engine.context import TrainingDevice
from jpipe.engine.copies import CopyRing
from jpipe.engine.guard import guarded
from jpipe.lowering.tick_scalars import LaneScalars, TickScalars
from jpipe.mesh import DATA
from jpipe.packing import Lead, Place
from jpipe.stages.shares import Division, ReplicaCounts
from jpipe.stages.stage_update import StageUpdate
from jpipe.stages.update_groups import LeafSlots

Arrays = TypeVar("Arrays")


class Rank(NamedTuple):
    """The number of a device among the replicas of a stage.

    Attributes:
      copy: int32 `[]`, number of the copy.
      data: int32 `[]`, position along the axis "data".
    """

    copy: jax.Array
    data: jax.Array | int

    def share(self, replicas: ReplicaCounts) -> jax.Array:
        """int32 `[]`, number of the share of this replica."""
        return self.copy * replicas.data + self.data


def rank_of(device: TrainingDevice, chunk: jax.Array) -> Rank:
    """Returns the rank of a device among the replicas of the stage at position `chunk` of the device."""
    lowered = device.spec.lowered
    numbers = np.zeros((lowered.schedule.num_devices, lowered.num_chunks), np.int32)
    for copies in lowered.copies:
        for c, place in enumerate(copies):
            numbers[place] = c
    return Rank(jnp.asarray(numbers)[device.position, chunk], device.replica)


# -- Leaves of a turn


def places(slots: LeafSlots, i: jax.Array | int, copy: int = 0) -> list[Place]:
    """The places of the leaves of turn i, each of a copy of the leaf."""
    place, starts = slots.copies[copy]
    turn_starts: Any = [jnp.asarray(leaf_starts)[i] for leaf_starts in starts.T]
    return [dataclasses.replace(place, base=start) for start in turn_starts]


def read_turn(arrays: Packed, slots: LeafSlots, i: jax.Array | int, lead: Lead) -> list[jax.Array]:
    """Reads the leaves of turn i."""
    return [packing.read(arrays, place, lead) for place in places(slots, i)]


def write_turn(
    arrays: Packed,
    slots: LeafSlots,
    i: jax.Array | int,
    lead: Lead,
    leaves: Sequence[jax.Array],
) -> Packed:
    """Writes the leaves of turn i, in all copies of tied leaves."""
    for c in range(len(slots.copies)):
        for place, leaf in zip(places(slots, i, c), leaves, strict=True):
            arrays = packing.write(arrays, place, lead, leaf)
    return arrays


# -- Shares


def share_of(division: Division, leaves: Sequence[jax.Array], rank: Rank) -> jax.Array:
    """A replica's share of the leaves of a turn."""
    stacked = division.stacked(leaves)
    part = _part(_part(stacked, division.axis, rank.copy), division.axis, rank.data)
    return division.to_share(part)


def with_share(
    division: Division,
    share: jax.Array,
    rank: Rank,
    leaves: Sequence[jax.Array],
    spec: tuple,
) -> list[jax.Array]:
    """All-gathers the shares along "data" and writes them into the leaves.

    Args:
      division: the division of the turn.
      share: the share of this replica.
      rank: the rank of this replica.
      leaves: the leaves before. Where the stage has several copies, the shares of others stay.
      spec: the split of each leaf by the compiler.
    """
    axis, replicas = division.axis, division.replicas
    part = division.from_share(share)
    if replicas.data > 1:
        alone = division.part_spec(spec)
        gather = functools.partial(lax.all_gather, axis_name=DATA, axis=axis)
        part = _on_blocks(gather, part, alone, _inserted(alone, axis))
    else:
        part = jnp.expand_dims(part, axis)
    if replicas.copies == 1:
        return division.leaves(jnp.expand_dims(part, axis))
    stacked = division.stacked(leaves)
    stacked = lax.dynamic_update_index_in_dim(stacked, part, rank.copy, axis)
    return division.leaves(stacked)


def _on_blocks(
    exchange: Callable[[jax.Array], jax.Array],
    value: jax.Array,
    before: tuple,
    after: tuple,
) -> jax.Array:
    """Runs an exchange along "data": each device of the automatic axes exchanges its own block of a value.

    XLA would gather a value that these axes split, and exchange all of it.

    Args:
      exchange: value -> value.
      value: the value.
      before, after: the split of the value by the compiler, before and after the exchange.
    """
    automatic = set(packing.axes(before))
    if not automatic:
        return exchange(value)
    on_block = jax.shard_map(
        exchange,
        in_specs=PartitionSpec(*before),
        out_specs=PartitionSpec(*after),
        axis_names=automatic,
        check_vma=False,
    )
    return on_block(value)


def _inserted(spec: tuple, axis: int) -> tuple:
    """A spec with one dim more, which is not split."""
    return (*spec[:axis], None, *spec[axis:]) if spec else ()


def _part(stacked: jax.Array, axis: int, number: jax.Array | int) -> jax.Array:
    return lax.dynamic_index_in_dim(stacked, number, axis, keepdims=False)


def _alone(part: jax.Array, axis: int, number: jax.Array | int, size: int) -> jax.Array:
    """`size` parts along a new axis: one is given. The others are zero."""
    shape = (*part.shape[:axis], size, *part.shape[axis:])
    zeros = jnp.zeros(shape, part.dtype)
    return lax.dynamic_update_index_in_dim(zeros, part, number, axis)


# -- Gradients


def scatter_over_data(
    device: TrainingDevice,
    program: StageUpdate,
    lane: LaneScalars,
    gradients: Packed,
    num_updates: jax.Array | int,
) -> Packed:
    """Replaces the gradients of a column by the means over "data" in the share of each replica, and zeros elsewhere.

    Single numbers have their means on all replicas.

    Args:
      device: the device.
      program: the update of the column.
      lane: the lane of the update.
      gradients: packed gradients; copies of the stage have exchanged theirs.
      num_updates: 0 or 1.
    """
    rank, lead, size = (
        rank_of(device, lane.chunk),
        device.lead("gradients", lane.chunk),
        device.spec.num_replicas,
    )

    def scattered(division: Division, leaves: Sequence[jax.Array], spec: tuple) -> list[jax.Array]:
        axis = division.axis
        part = _part(division.stacked(leaves), axis, rank.copy)
        if size > 1:
            alone = division.part_spec(spec)
            scatter = functools.partial(lax.psum_scatter, axis_name=DATA, scatter_dimension=axis)
            part = _on_blocks(scatter, part, _inserted(alone, axis), alone) / size
        else:
            part = _part(part, axis, 0)
        stacked = _alone(part.astype(leaves[0].dtype), axis, rank.data, size)
        stacked = _alone(stacked, axis, rank.copy, division.replicas.copies)
        return division.leaves(stacked)

    for slots in program.shared:
        if slots.arrays == "gradients" and size > 1:
            (number,) = read_turn(gradients, slots, 0, lead)
            mean = jnp.where(num_updates > 0, device.mean_over_replicas(number), number)
            gradients = write_turn(gradients, slots, 0, lead, [mean])
    return _each_turn(program, "inputs", ("gradients",), num_updates, gradients, lead, scattered)


def scatter_over_copies(device: TrainingDevice, scalars: TickScalars, gradients: Packed) -> Packed:
    """Replaces the gradients of stages with copies: each copy gets the sum of its part, and zeros elsewhere.

    Single numbers have their sums on all copies. All devices call this.
    """

    def scatter(ring: CopyRing, program: StageUpdate, gradients: Packed, n: Any) -> Packed:
        lead = device.lead("gradients", ring.chunk)

        def scattered(division: Division, leaves: Sequence, _: tuple) -> list:
            axis, size = division.axis, division.replicas.copies
            stacked = division.stacked(leaves)
            part = ring.scatter(lambda number: _part(stacked, axis, number))
            sums = division.leaves(_alone(part, axis, ring.rank, size))
            return ring.on_members(sums, leaves)

        for slots in program.shared:
            if slots.arrays == "gradients":
                numbers = read_turn(gradients, slots, 0, lead)
                sums = [jnp.where(n > 0, ring.sum(a), a) for a in numbers]
                gradients = write_turn(gradients, slots, 0, lead, sums)
        return _each_turn(program, "inputs", ("gradients",), n, gradients, lead, scattered)

    return each_stage(device, scalars, scatter, gradients)


def _each_turn(
    program: StageUpdate,
    side: str,
    names: Sequence[str],
    num_updates: jax.Array | int,
    arrays: Packed,
    lead: Lead,
    change: Callable[[Division, list[jax.Array], tuple], list[jax.Array]],
) -> Packed:
    """Changes the leaves of every turn in packed arrays.

    Args:
      program: the update.
      side: "inputs" or "outputs" of its groups.
      names: the names of the packed arrays, in the words of `LeafSlots`.
      num_updates: 0 or 1.
      arrays: the packed arrays.
      lead: indices of their leading axes.
      change: `(division, leaves, how the compiler splits each) -> leaves`.
    """
    for group in program.groups:
        division = group.division
        changed_slots = [s for s in getattr(group, side) if s.arrays in names]
        if division is None or not changed_slots:
            continue

        def turn(i: Any, arrays: Packed, changed_slots=changed_slots, division=division) -> Packed:
            for slots in changed_slots:
                place, _ = slots.copies[0]
                leaves = read_turn(arrays, slots, i, lead)
                leaves = change(division, leaves, place.spec)
                arrays = write_turn(arrays, slots, i, lead, leaves)
            return arrays

        arrays = lax.fori_loop(0, num_updates * group.num_turns, turn, arrays)
    return arrays


# -- Weights


def gather_over_copies(
    device: TrainingDevice,
    scalars: TickScalars,
    lanes: Sequence[LaneScalars],
    name: str,
    weights: Packed,
) -> Packed:
    """Gathers the weights of stages with copies, in all copies. All devices call this.

    Args:
      device: the device.
      scalars: the scalars of the tick.
      lanes: the lanes of the tick's updates.
      name: "parameters", or a pass whose weights a hook gives.
      weights: the packed weights; each copy has its part of those that are updated in this tick.
    """

    def gather(ring: CopyRing, program: StageUpdate, weights: Packed, n: Any) -> Packed:
        row = sum(jnp.where((lane.chunk == ring.chunk) & (lane.program >= 0), lane.row, 0) for lane in lanes)

        def gathered(division: Division, leaves: Sequence, _: tuple) -> list:
            stacked = division.stacked(leaves)
            parts = ring.gather(_part(stacked, division.axis, ring.rank))
            whole = division.leaves(jnp.moveaxis(parts, 0, division.axis))
            return ring.on_members(whole, leaves)

        lead = device.lead("parameters", row)
        return _each_turn(program, "outputs", (name,), n, weights, lead, gathered)

    return each_stage(device, scalars, gather, weights)


def each_stage(
    device: TrainingDevice,
    scalars: TickScalars,
    exchange: Callable[[CopyRing, StageUpdate, Arrays, Any], Arrays],
    arrays: Arrays,
    *,
    alone: bool = False,
) -> Arrays:
    """Runs the exchange between the copies of every stage that updates in this tick.

    Args:
      device: the device.
      scalars: the scalars of the tick.
      exchange: `(ring, program, arrays, number of updates) -> arrays`.
      arrays: a tree of packed arrays.
      alone: whether stages with one copy take part.
    """
    spec = device.spec
    for s, copies in enumerate(spec.lowered.copies):
        if len(copies) == 1 and not alone:
            continue
        now = scalars.get("copies", "update", s) >= 0
        ring = CopyRing.of(device, copies)
        program = spec.updates.programs[spec.updates.program_of_stage[s]]
        if spec.lowered.target.loops_in_branches:
            arrays = exchange(ring, program, arrays, now.astype(jnp.int32))
        else:
            run = functools.partial(_once, exchange, ring, program)
            arrays = guarded(spec.lowered.target, now, run, arrays, None)
    return arrays


def _once(exchange: Callable, ring: CopyRing, program: StageUpdate, arrays: Arrays, _: None) -> Arrays:
    return exchange(ring, program, arrays, 1)
