"""Norms of gradients over all stages, and which updates are skipped."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpipe import packing
from jpipe.engine.arrays import Packed, TickArrays
from jpipe.engine.context import TrainingDevice
from jpipe.engine.guard import guarded
from jpipe.engine.lanes import for_each_lane, gradients_of
from jpipe.engine.reductions import Reduction
from jpipe.engine.sums import squares_of
from jpipe.layers.avals import squares as squared
from jpipe.lowering.norms import NormTable
from jpipe.lowering.scalars import UPDATE
from jpipe.lowering.tick_scalars import LaneScalars, TickScalars
from jpipe.mesh import STAGE


class _Places(NamedTuple):
    """The places of the norms of stages, `[D, R + units]` each.

    Attributes:
      stage: the stage of each column, and the home of each unit; 0 where there is none.
      used: whether the place has a norm.
      counts: whether the norm counts in a sum: not every copy of a stage does.
    """

    stage: np.ndarray
    used: np.ndarray
    counts: np.ndarray


def _places(device: TrainingDevice, every_copy_counts: bool) -> _Places:
    lowered = device.spec.lowered
    R, D = lowered.num_chunks, lowered.schedule.num_devices
    stage = np.zeros((D, R + len(lowered.homes)), np.int32)
    used = np.zeros(stage.shape, bool)
    counts = np.zeros(stage.shape, bool)
    for s, copies in enumerate(lowered.copies):
        for place in copies:
            stage[place], used[place] = s, True
            counts[place] = every_copy_counts or place == copies[0]
    stage[:, R:] = lowered.homes
    used[:, R:] = counts[:, R:] = True
    return _Places(stage, used, counts)


class Norms(NamedTuple):
    """Norms of gradients over all devices.

    Attributes:
      table: the gradients that each stage counts.
      places: the places of their norms.
      squares: `[D, K, R + units]`, the squared norms of the gradients of columns, and of parts of units, with loss
        scale; that of version v in row v modulo K.
      scale: `[]`, the loss scale of the gradient, or None.
    """

    table: NormTable
    places: _Places
    squares: jax.Array
    scale: jax.Array | None

    def norm_and_skip(self, stage: jax.Array, version: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (unscaled global norm, skip) for the update of `stage` that writes `version`."""
        table, places = self.table, self.places

        updates = table.updates.astype(np.int32)
        by_rhythm = len(table.offset) > 1
        if by_rhythm:
            rounds, number = jnp.divmod(version - 1, jnp.asarray(updates)[stage])

        def at_places(by_stage: np.ndarray) -> jax.Array:
            """`[D, R + units]`, the entries `[n, stage, j]` for update n of a round and the stage j in each place."""
            by_place = by_stage[..., places.stage]
            if by_rhythm:
                return jnp.asarray(by_place)[number, stage]
            return lax.dynamic_index_in_dim(by_place[0], stage, keepdims=False, allow_negative_indices=False)

        counted = version + at_places(table.offset.astype(np.int32))
        if by_rhythm:
            counted += (updates[places.stage] - jnp.asarray(updates)[stage]) * rounds
        squares = self._at(counted)
        broken = ~jnp.isfinite(squares) & at_places(table.together) & places.used
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
        """Returns bool `[]`, whether all gradients of versions `[D, R + units]` are finite; those of -1 are."""
        return (jnp.isfinite(self._at(versions)) | (versions < 0)).all()


def gradient_norms(
    reduction: Reduction,
    updates_any: jax.Array | bool,
    arrays: TickArrays,
) -> tuple[TickArrays, Norms]:
    """Returns the norms, and arrays with the squared norms and the loss scale after this update."""
    device, scalars = reduction.device, reduction.scalars
    spec = device.spec
    num_chunks = spec.lowered.num_chunks
    chunks = jnp.arange(num_chunks, dtype=jnp.int32)
    squares = _squares(device, scalars, arrays)
    squares = reduction.squares_of_all(squares, arrays.gradients)
    assert spec.lowered.norms is not None
    if spec.schedule.updates_by_stage:
        times = spec.lowered.norms.updates[_places(device, True).stage]
        squares *= jnp.asarray(times)[device.position].astype(squares.dtype) ** 2

    def version_of(lane: LaneScalars, version: jax.Array) -> jax.Array:
        updates = (chunks == lane.chunk) & (lane.program >= 0)
        return jnp.where(updates, lane.absolute_version, version)

    version = jnp.full(num_chunks, -1, jnp.int32)
    version = for_each_lane(device, scalars, version_of, version, [UPDATE])
    units = [scalars.lane(name, 0) for name in spec.updates.together]
    if units:
        unit_versions = [jnp.where(u.program >= 0, u.absolute_version, -1) for u in units]
        version = jnp.concatenate([version, jnp.stack(unit_versions)])
    depth = arrays.squared_norm.shape[0]
    rows = np.arange(depth, dtype=np.int32)[:, None]
    now = (rows == jnp.mod(version, depth)[None]) & (version >= 0)[None]
    kept = jnp.where(now, squares[None], arrays.squared_norm)
    all_squares, versions = lax.all_gather((kept, version), STAGE)
    scale = device.loss_scale(arrays)
    norms = Norms(
        spec.lowered.norms,
        _places(device, reduction.every_copy_counts),
        all_squares,
        scale,
    )
    if spec.numbers.loss_scale is not None:
        finite = norms.are_finite(versions)
        after = spec.numbers.loss_scale.after_update(arrays.loss_scale, finite)
        arrays = arrays.replace(loss_scale=_where(updates_any, after, arrays.loss_scale))
    first = np.array(spec.lowered.placement, np.int32)  # [S, 2]
    reporter = jnp.maximum(scalars.reporter, 0)
    position, chunk = jnp.asarray(first)[reporter]
    reported = versions[position, chunk]
    norm, _ = norms.norm_and_skip(reporter, reported)
    norm = jnp.where(updates_any & (reported >= 0), norm, arrays.gradient_norm[0])
    arrays = arrays.replace(squared_norm=kept, gradient_norm=norm[None])
    return arrays, norms


def _squares(
    device: TrainingDevice,
    scalars: TickScalars,
    arrays: TickArrays,
) -> jax.Array:
    """`[R + units]`, the squared norm of each column's and unit's gradient; anything if nothing updates."""
    dtype, num_chunks = device.spec.updates.norm_dtype, device.spec.lowered.num_chunks
    rows, chunks = device.spec.array_rows["gradients"], jnp.arange(num_chunks)
    lead = device.lead("gradients", chunks)

    def squares(_: jax.Array, packed: tuple[Packed, Packed]) -> jax.Array:
        sigmas, gradients = packed
        gradients = device.spec.late_sums.joined(gradients)
        totals = []
        for operation in device.spec.updates.by_operation:
            operation_gradients = gradients_of(device, operation, gradients)
            if operation == UPDATE:
                operation_gradients = {**sigmas, **operation_gradients}
            total = jnp.zeros(num_chunks if operation == UPDATE else 1, dtype)
            for name, a in operation_gradients.items():
                squares_by_row = row_squares(a)
                if name in rows.tables:
                    (row,) = lead(name)
                    is_used = device.uses("gradients", name, chunks)
                    squares_by_row = jnp.where(is_used, squares_by_row[row], 0)
                total += squares_by_row
            totals.append(total)
        return totals[0] if len(totals) == 1 else jnp.concatenate(totals)

    def row_squares(a: jax.Array) -> jax.Array:
        if packing.is_on_host(a):
            return packing.sum_of_rows(a, lambda b: jnp.sum(squared(b, dtype)))
        return jnp.sum(squared(a, dtype), axis=tuple(range(1, a.ndim)))

    before = arrays.squared_norm[0]
    read = squares_of(device, arrays), arrays.gradients
    if not device.spec.updates_in_every_tick:
        return squares(before, read)

    def updates(lane: LaneScalars, now: jax.Array) -> jax.Array:
        return now | (lane.program >= 0)

    now = for_each_lane(device, scalars, updates, jnp.bool_(False))
    return guarded(device.spec.lowered.target, now, squares, before, read)


def _where(condition: jax.Array | bool, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
