"""The update of a tick: replicas, tied weights, norms, the loss scale, and the optimizer.

In a tick in which any device updates, every device runs `update`: the norms need all devices. Then
each device updates its own columns. A column skips its update if its gradient is not finite, or if
the gradient is not finite on any other column that applies the same minibatch in the same tick.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpipe import packing
from jpipe.engine.apply import Apply, apply_writes
from jpipe.engine.arrays import Packed, ReadOnly, TickArrays, Written
from jpipe.engine.context import Device
from jpipe.engine.copies import sum_over_copies
from jpipe.engine.factors import squares_of
from jpipe.engine.gradients import (
    EXCHANGE_WRITES,
    exchange_over_copies,
    exchange_over_data,
)
from jpipe.engine.guard import Branch, guarded, run_one_of
from jpipe.engine.shares import (
    gather_over_copies,
    rank_of,
    read_turn,
    scatter_over_copies,
    scatter_over_data,
)
from jpipe.engine.spec import TiedCopy
from jpipe.engine.transport import put_row
from jpipe.engine.units import (
    gradients_of,
    merged_of,
    own_gradients,
    programs_of,
    row_of,
)
from jpipe.layers.avals import squares as squared
from jpipe.lowering.norms import NormTable
from jpipe.lowering.scalars import LaneScalars, TickScalars
from jpipe.mesh import DATA, STAGE
from jpipe.stages.optimizer import StageUpdate
from jpipe.stages.stage_update import MergedUpdate, merge_updates

Record = TypeVar("Record", bound=TickArrays)
State = TypeVar("State")

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
    device: Device,
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
        arrays = _sum_tied_gradients(device, copies, arrays)
    arrays = _over_replicas(device, scalars, units, arrays)
    arrays, norms = _norms(device, scalars, units, updates, arrays)

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

    arrays = _for_each_lane(device, scalars, apply_lane, arrays)
    for unit in units:
        arrays = apply_lane(unit, arrays)
    if spec.shares_updates and spec.schedule.has_copies:
        arrays = _gather_weights(device, scalars, arrays)
    for copies in spec.ties:
        arrays = _copy_tied_weights(device, copies, arrays)
    return arrays.replace(op_count=arrays.op_count + 1)


def _position_of(
    number: jax.Array, numbers: Sequence[int]
) -> tuple[jax.Array, jax.Array | int]:
    """Whether a number, or -1, is among others, and its position there."""
    if len(numbers) == 1:
        return number == numbers[0], 0
    found = number == np.array(numbers, np.int32)
    return found.any(), jnp.argmax(found).astype(jnp.int32)


MOST_UNROLLED = 4
"""Lanes of a tick that follow each other in the program. More run in a loop: the size of the program does not grow."""


def _for_each_lane(
    device: Device,
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
    return lax.fori_loop(
        0, num_lanes, lambda j, state: run(scalars.lane("update", j), state), state
    )


def _run_program(
    device: Device,
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
    device: Device,
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

    arrays = _for_each_lane(device, scalars, run_lane, arrays)
    for unit in units:
        arrays = run_lane(unit, arrays)
    return arrays


# -- Replicas


def _over_replicas(
    device: Device,
    scalars: TickScalars,
    units: Sequence[LaneScalars],
    arrays: TickArrays,
) -> TickArrays:
    """Gradients of all replicas of each column that updates: summed over copies, averaged over "data".

    If replicas share the update, each gets the sum for its share of a column, and zeros elsewhere.
    """
    spec = device.spec
    if spec.compress_gradients is not None:
        return _over_compressed(device, scalars, units, arrays)
    shared = spec.shares_updates
    if spec.num_replicas > 1:
        mean = functools.partial(_mean_over_replicas, device)
        if not shared:
            arrays = _for_each_lane(device, scalars, mean, arrays)
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
    device: Device,
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
    device: Device, scalars: TickScalars, arrays: TickArrays
) -> TickArrays:
    """The weights that an update has written, and those of hooks, in all copies of each stage."""
    num_lanes = device.spec.lowered.operations["update"].num_lanes
    lanes = [scalars.lane("update", j) for j in range(num_lanes)]
    gather = functools.partial(gather_over_copies, device, scalars, lanes)
    hooked = {n: gather(n, a) for n, a in arrays.read_parameters.items()}
    return arrays.replace(
        parameters=gather("parameters", arrays.parameters), read_parameters=hooked
    )


def _mean_over_replicas(device: Device, lane: LaneScalars, arrays: Record) -> Record:
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


# -- Tied weights
#
# The first copy gets the sum of all copies' gradients and the others get zeros, so that a norm
# counts the gradient once and one stage updates the weight. The other copies take over the updated
# value. A stage that itself has copies, on several devices, has a part of the gradient on each. The
# sum goes to the first of them, and then all get it with the other gradients of the stage.


def _is_on(device: Device, devices: Sequence[int]) -> jax.Array:
    """Whether this is one of some devices."""
    return functools.reduce(operator.or_, [device.position == d for d in devices])


def _by_chunk(copy: TiedCopy) -> list[tuple[int, list[int]]]:
    """Position of the copy's stage on a device -> the devices on which it has that position."""
    chunks: dict[int, list[int]] = {}
    for d, chunk in copy.stage_copies:
        chunks.setdefault(chunk, []).append(d)
    return list(chunks.items())


def _sum_tied_gradients(
    device: Device, copies: Sequence[TiedCopy], arrays: TickArrays
) -> TickArrays:
    gradients = arrays.gradients
    lead = functools.partial(device.lead, "gradients")
    total: Any = 0
    for copy in copies:
        for chunk, devices in _by_chunk(copy):
            value = packing.read(gradients, copy.gradient, lead(chunk), copy.row)
            total += jnp.where(_is_on(device, devices), value, 0)
    if len({d for copy in copies for d, _ in copy.stage_copies}) > 1:
        total = lax.psum(total, STAGE)
    home = copies[0].stage_copies[0][0]
    for copy in copies:
        for chunk, devices in _by_chunk(copy):
            old = packing.read(gradients, copy.gradient, lead(chunk), copy.row)
            new = jnp.zeros_like(total)
            if copy is copies[0]:
                new = jnp.where(device.position == home, total, new)
            new = jnp.where(_is_on(device, devices), new, old)
            gradients = packing.write(
                gradients, copy.gradient, lead(chunk), new, copy.row
            )
    return arrays.replace(gradients=gradients)


def _copy_tied_weights(
    device: Device, copies: Sequence[TiedCopy], arrays: TickArrays
) -> TickArrays:
    first = copies[0]
    # Copies on the stage of the first were updated with it.
    others = [copy for copy in copies if copy.stage_copies != first.stage_copies]
    if not others:
        return arrays
    # Schedules that tie stages keep one version, so the row of a stage is its position.
    parameters = arrays.parameters
    lead = functools.partial(device.lead, "parameters")
    home, chunk = first.stage_copies[0]
    value = packing.read(parameters, first.place, lead(chunk), first.row)
    value = lax.psum(jnp.where(device.position == home, value, 0), STAGE)
    for copy in others:
        for chunk, devices in _by_chunk(copy):
            old = packing.read(parameters, copy.place, lead(chunk), copy.row)
            new = jnp.where(_is_on(device, devices), value, old)
            parameters = packing.write(
                parameters, copy.place, lead(chunk), new, copy.row
            )
    return arrays.replace(parameters=parameters)


# -- Norms


class _Places(NamedTuple):
    """Where the norms of stages are, `[D, R + units]` each.

    Attributes:
      stage: the stage of each column, and the home of each unit; 0 where there is none.
      used: whether there is one.
      counts: whether it counts in a norm: not every copy of a stage does.
    """

    stage: np.ndarray
    used: np.ndarray
    counts: np.ndarray


def _places(device: Device) -> _Places:
    spec, lowered = device.spec, device.spec.lowered
    units = spec.stages.vocabulary.units
    R, D = lowered.num_chunks, lowered.schedule.num_devices
    stage = np.zeros((D, R + len(units)), np.int32)
    used = np.zeros(stage.shape, bool)
    counts = np.zeros(stage.shape, bool)
    for s, copies in enumerate(lowered.copies):
        for place in copies:
            stage[place], used[place] = s, True
            # If copies share an update, each counts its share.
            counts[place] = spec.shares_updates or place == copies[0]
    for u, unit in enumerate(units):
        stage[:, R + u] = unit.home
    used[:, R:] = counts[:, R:] = True
    return _Places(stage, used, counts)


class _Norms(NamedTuple):
    """Norms of gradients over all devices.

    Attributes:
      table: which gradients each stage counts.
      places: where they are.
      squares: `[D, K, R + units]`, the squared norms of the gradients of columns, and of parts of units, with loss scale;
        that of version v in row v modulo K.
      scale: `[]`, the loss scale of the gradient, or None.
    """

    table: NormTable
    places: _Places
    squares: jax.Array
    scale: jax.Array | None

    def of_version(
        self, stage: jax.Array, version: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The norm over all stages, without loss scale, that the update of a stage sees which writes a version, and
        whether it is skipped."""
        table, places = self.table, self.places

        def of_places(of_stages: np.ndarray) -> jax.Array:
            """`[D, R + units]`, the entries `[stage, j]` for the stage j in each place."""
            by_place = of_stages[:, places.stage]
            return lax.dynamic_index_in_dim(
                by_place, stage, keepdims=False, allow_negative_indices=False
            )

        counted = version + of_places(table.offset.astype(np.int32))
        squares = self._at(counted)
        broken = ~jnp.isfinite(squares) & of_places(table.together) & places.used
        # Before its first update a stage has no gradient.
        squares = jnp.where(places.counts & (counted > 0), squares, 0)
        norm = jnp.sqrt(jnp.sum(squares))
        if self.scale is not None:
            norm /= self.scale.astype(norm.dtype)
        return norm, broken.any()

    def _at(self, versions: jax.Array) -> jax.Array:
        """`[D, R + units]`, the squared norms of versions `[D, R + units]`."""
        depth = self.squares.shape[1]
        if depth == 1:
            return self.squares[:, 0]
        rows = jnp.mod(versions, depth)[:, None]
        return jnp.take_along_axis(self.squares, rows, axis=1)[:, 0]

    def are_finite(self, versions: jax.Array) -> jax.Array:
        """bool `[]`, whether all gradients are finite of versions `[D, R + units]`; of -1 they are."""
        return (jnp.isfinite(self._at(versions)) | (versions < 0)).all()


def _norms(
    device: Device,
    scalars: TickScalars,
    units: Sequence[LaneScalars],
    updates_any: jax.Array | bool,
    arrays: TickArrays,
) -> tuple[TickArrays, _Norms]:
    """The norms, and arrays with the squared norms and the loss scale after this update."""
    spec = device.spec
    num_chunks = spec.lowered.num_chunks
    chunks = jnp.arange(num_chunks, dtype=jnp.int32)
    squares = _squares(device, scalars, units, arrays)
    if spec.shares_updates:
        squares = _of_shares(device, scalars, squares, arrays.gradients)

    def version_of(lane: LaneScalars, version: jax.Array) -> jax.Array:
        updates = (chunks == lane.chunk) & (lane.program >= 0)
        return jnp.where(updates, lane.absolute_version, version)

    version = jnp.full(num_chunks, -1, jnp.int32)
    version = _for_each_lane(device, scalars, version_of, version)
    if units:
        of_units = [jnp.where(u.program >= 0, u.absolute_version, -1) for u in units]
        version = jnp.concatenate([version, jnp.stack(of_units)])
    depth = arrays.squared_norm.shape[0]
    rows = np.arange(depth, dtype=np.int32)[:, None]
    now = (rows == jnp.mod(version, depth)[None]) & (version >= 0)[None]
    kept = jnp.where(now, squares[None], arrays.squared_norm)
    all_squares, versions = lax.all_gather((kept, version), STAGE)
    scale = None if spec.loss_scale is None else arrays.loss_scale["scale"][0]
    assert spec.lowered.norms is not None
    norms = _Norms(spec.lowered.norms, _places(device), all_squares, scale)
    if spec.loss_scale is not None:
        finite = norms.are_finite(versions)
        after = spec.loss_scale.after_update(arrays.loss_scale, finite)
        arrays = arrays.replace(
            loss_scale=_where(updates_any, after, arrays.loss_scale)
        )
    first = np.array(spec.lowered.placement, np.int32)  # [S, 2]
    reporter = jnp.maximum(scalars.reporter, 0)
    position, chunk = jnp.asarray(first)[reporter]
    reported = versions[position, chunk]
    norm, _ = norms.of_version(reporter, reported)
    norm = jnp.where(updates_any & (reported >= 0), norm, arrays.gradient_norm[0])
    arrays = arrays.replace(squared_norm=kept, gradient_norm=norm[None])
    return arrays, norms


def _squares(
    device: Device,
    scalars: TickScalars,
    units: Sequence[LaneScalars],
    arrays: TickArrays,
) -> jax.Array:
    """`[R + units]`, the squared norm of each column's and unit's gradient; anything if no column and no unit updates."""
    dtype, num_chunks = device.spec.updates.norm_dtype, device.spec.lowered.num_chunks
    rows, chunks = device.spec.array_rows["gradients"], jnp.arange(num_chunks)
    lead = device.lead("gradients", chunks)

    def squares(_: jax.Array, packed: tuple[Packed, Packed]) -> jax.Array:
        sigmas, gradients = packed
        total = jnp.zeros(num_chunks, dtype)
        for name, a in {**sigmas, **gradients_of(device, None, gradients)}.items():
            of_rows = of_each_row(a)
            if name in rows.tables:
                (row,) = lead(name)
                is_used = device.uses("gradients", name, chunks)
                of_rows = jnp.where(is_used, of_rows[row], 0)
            total += of_rows
        totals = [total]
        for number in range(len(units)):
            part = gradients_of(device, number, gradients)
            totals.append(sum(map(of_each_row, part.values()), jnp.zeros(1, dtype)))
        return totals[0] if len(totals) == 1 else jnp.concatenate(totals)

    def of_each_row(a: jax.Array) -> jax.Array:
        if packing.is_on_host(a):
            return packing.sum_of_rows(a, lambda b: jnp.sum(squared(b, dtype)))
        return jnp.sum(squared(a, dtype), axis=tuple(range(1, a.ndim)))

    before = arrays.squared_norm[0]
    read = squares_of(device, arrays), arrays.gradients
    if not device.spec.updates_in_every_tick:
        return squares(before, read)

    def updates(lane: LaneScalars, now: jax.Array) -> jax.Array:
        return now | (lane.program >= 0)

    now = _for_each_lane(device, scalars, updates, jnp.bool_(False))
    for unit in units:
        now = updates(unit, now)
    return guarded(device.spec.lowered.target, now, squares, before, read)


def _of_shares(
    device: Device,
    scalars: TickScalars,
    squares: jax.Array,
    gradients: Packed,
) -> jax.Array:
    """`[R + units]`, the squared norms over all replicas along "data", of which each has its share of a column.

    All replicas have the gradients of single numbers, and only the first counts them.
    """

    def of_lane(lane: LaneScalars, squares: jax.Array) -> jax.Array:
        rank = rank_of(device, lane.chunk)
        is_first = (rank.copy == 0) & (rank.data == 0)
        for u, program in enumerate(device.spec.updates.programs):
            for slots in program.shared:
                if slots.arrays != "gradients":
                    continue
                lead = device.lead("gradients", lane.chunk)
                (number,) = read_turn(gradients, slots, 0, lead)
                square = squared(number, squares.dtype).sum()
                again = (lane.program == u) & ~is_first
                squares = squares.at[lane.chunk].add(jnp.where(again, -square, 0))
        return squares

    squares = _for_each_lane(device, scalars, of_lane, squares)
    if device.spec.num_replicas == 1:
        return squares
    num_chunks = device.spec.lowered.num_chunks
    return squares.at[:num_chunks].set(lax.psum(squares[:num_chunks], DATA))


def _where(condition: jax.Array | bool, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
