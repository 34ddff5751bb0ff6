"""The update of a tick: replicas, tied weights, norms, the loss scale, and the optimizer.

In a tick in which any device updates, every device runs `update`: the norms need all devices. Then
each device updates its own columns. A column skips its update if its gradient is not finite, or if
the gradient is not finite on any other column that applies the same minibatch in the same tick.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpipe import packing
from jpipe.engine.arrays import Packed, ReadOnly, TickArrays, Written
from jpipe.engine.context import Device
from jpipe.engine.copies import sum_over_copies
from jpipe.engine.guard import Branch, guarded, run_one_of
from jpipe.engine.spec import TiedCopy
from jpipe.engine.transport import put_row
from jpipe.lowering.scalars import LaneScalars, TickScalars
from jpipe.mesh import STAGE
from jpipe.packing import Place
from jpipe.stages.extra_args import EXTRA_ARGS, PASSES, UpdateFacts
from jpipe.stages.optimizer import LeafSlots, StageUpdate, UpdateGroup

Record = TypeVar("Record", bound=TickArrays)

UPDATE_WRITES = (
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

_APPLY_WRITES = (
    "gradients",
    "optimizer_state",
    "parameters",
    "read_parameters",
    "skipped",
)


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
    lanes = [
        scalars.lane("update", j)
        for j in range(spec.lowered.operations["update"].num_lanes)
    ]
    if spec.num_replicas > 1:
        for lane in lanes:
            arrays = _mean_over_replicas(device, lane, arrays)
    if spec.schedule.has_copies:
        gradients = sum_over_copies(device, scalars, "update", arrays.gradients)
        arrays = arrays.replace(gradients=gradients)
    for copies in spec.ties:
        arrays = _sum_tied_gradients(device, copies, arrays)
    arrays, norms = _norms(device, lanes, updates, arrays)
    for lane in lanes:
        skip = jnp.any(norms.broken & (norms.versions == lane.absolute_version))
        programs = [
            _Apply(
                device=device,
                program=program,
                scalars=lane,
                now=lane.program == u,
                skip=skip,
                global_norm=norms.global_norm,
                scale=norms.scale,
            )
            for u, program in enumerate(spec.updates.programs)
        ]
        if spec.lowered.guard == "cond":
            for program in programs:
                arrays = program.run(arrays, program.now.astype(jnp.int32))
        else:
            branches = [Branch("apply", _APPLY_WRITES, p.run_once) for p in programs]
            arrays = run_one_of(spec.lowered.guard, lane.program, branches, arrays)
    for copies in spec.ties:
        arrays = _copy_tied_weights(device, copies, arrays)
    return arrays.replace(op_count=arrays.op_count + 1)


# -- Replicas


def _mean_over_replicas(
    device: Device, lane: LaneScalars, arrays: TickArrays
) -> TickArrays:
    """Replaces the gradients of the column that updates by their mean over replicas."""

    def mean(gradients: Packed, chunk: jax.Array) -> Packed:
        column = {
            name: lax.dynamic_index_in_dim(a, chunk) for name, a in gradients.items()
        }
        means = device.mean_over_replicas(column)
        return {name: put_row(gradients[name], a, chunk) for name, a in means.items()}

    gradients = guarded(
        device.spec.lowered.guard,
        lane.program >= 0,
        mean,
        arrays.gradients,
        lane.chunk,
    )
    return arrays.replace(gradients=gradients)


# -- Tied weights
#
# The first copy gets the sum of all copies' gradients and the others get zeros, so that a norm
# counts the gradient once and one stage updates the weight. The other copies take over the updated
# value. Where a stage itself has copies, on several devices, all of these have the same value, and
# the first of them stands for all.


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
    total: Any = 0
    for copy in copies:
        home, chunk = copy.stage_copies[0]
        value = packing.read(gradients, copy.place, [chunk], copy.row)
        total += jnp.where(device.position == home, value, 0)
    if len({d for copy in copies for d, _ in copy.stage_copies}) > 1:
        total = lax.psum(total, STAGE)
    for copy in copies:
        for chunk, devices in _by_chunk(copy):
            old = packing.read(gradients, copy.place, [chunk], copy.row)
            new = total if copy is copies[0] else jnp.zeros_like(total)
            new = jnp.where(_is_on(device, devices), new, old)
            gradients = packing.write(gradients, copy.place, [chunk], new, copy.row)
    return arrays.replace(gradients=gradients)


def _copy_tied_weights(
    device: Device, copies: Sequence[TiedCopy], arrays: TickArrays
) -> TickArrays:
    first = copies[0]
    # Copies on the stage of the first were updated with it.
    others = [copy for copy in copies if copy.stage_copies != first.stage_copies]
    if not others:
        return arrays
    parameters, version = arrays.parameters, 0  # schedules that tie stages have V = 1
    home, chunk = first.stage_copies[0]
    value = packing.read(parameters, first.place, [version, chunk], first.row)
    value = lax.psum(jnp.where(device.position == home, value, 0), STAGE)
    for copy in others:
        for chunk, devices in _by_chunk(copy):
            lead = [version, chunk]
            old = packing.read(parameters, copy.place, lead, copy.row)
            new = jnp.where(_is_on(device, devices), value, old)
            parameters = packing.write(parameters, copy.place, lead, new, copy.row)
    return arrays.replace(parameters=parameters)


# -- Norms


class _Norms(NamedTuple):
    """Norms of gradients over all devices.

    Attributes:
      global_norm: `[]`, norm over all stages, of the gradient without loss scale.
      scale: `[]`, the loss scale of the gradient, or None.
      broken: bool `[D, R]`, columns that update in this tick with a gradient that is not finite.
      versions: int32 `[D, R]`, the version that each column writes in this tick; -1: none.
    """

    global_norm: jax.Array
    scale: jax.Array | None
    broken: jax.Array
    versions: jax.Array


def _norms(
    device: Device,
    lanes: Sequence[LaneScalars],
    updates_any: jax.Array | bool,
    arrays: TickArrays,
) -> tuple[TickArrays, _Norms]:
    """The norms, and arrays with the squared norms and the loss scale after this update."""
    num_chunks = device.spec.lowered.num_chunks
    chunks = jnp.arange(num_chunks, dtype=jnp.int32)
    squares = _squares(device, lanes, arrays)
    version = jnp.full(num_chunks, -1, jnp.int32)
    for lane in lanes:
        updates = (chunks == lane.chunk) & (lane.program >= 0)
        version = jnp.where(updates, lane.absolute_version, version)
    latest = jnp.where(version >= 0, squares, arrays.squared_norm)
    all_latest, all_versions = lax.all_gather((latest, version), STAGE)
    broken = ~jnp.isfinite(all_latest) & (all_versions >= 0)
    counted = all_latest
    if device.spec.schedule.has_copies:  # each stage counts once
        counted = jnp.where(_first_copies(device), all_latest, 0)
    global_norm, scale = jnp.sqrt(jnp.sum(counted)), None
    if device.spec.loss_scale is not None:
        scale = arrays.loss_scale["scale"][0]
        global_norm /= scale.astype(global_norm.dtype)
        after = device.spec.loss_scale.after_update(arrays.loss_scale, ~broken.any())
        arrays = arrays.replace(
            loss_scale=_where(updates_any, after, arrays.loss_scale)
        )
    norm = jnp.where(updates_any, global_norm, arrays.gradient_norm[0])
    arrays = arrays.replace(squared_norm=latest, gradient_norm=norm[None])
    return arrays, _Norms(global_norm, scale, broken, all_versions)


def _first_copies(device: Device) -> np.ndarray:
    """bool `[D, R]`: False where a stage is that is also on an earlier copy's device."""
    lowered = device.spec.lowered
    shape = lowered.schedule.num_devices, lowered.num_chunks
    first = np.ones(shape, bool)
    for copies in lowered.copies:
        for place in copies[1:]:
            first[place] = False
    return first


def _squares(
    device: Device, lanes: Sequence[LaneScalars], arrays: TickArrays
) -> jax.Array:
    """`[R]`, the squared norm of each column's gradient; anything if no column updates."""
    dtype = device.spec.updates.norm_dtype

    def squares(_: jax.Array, gradients: Packed) -> jax.Array:
        total = jnp.zeros(device.spec.lowered.num_chunks, dtype)
        for a in gradients.values():
            square = jnp.square(a.astype(dtype))
            total += jnp.sum(square, axis=tuple(range(1, a.ndim)))
        return total

    latest, gradients = arrays.squared_norm, arrays.gradients
    if not device.spec.updates_in_every_tick:
        return squares(latest, gradients)
    now = jnp.stack([lane.program >= 0 for lane in lanes]).any()
    return guarded(device.spec.lowered.guard, now, squares, latest, gradients)


def _where(condition: jax.Array | bool, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


# -- The optimizer


@dataclasses.dataclass(frozen=True)
class _Apply:
    """The optimizer's update of one column by one program, part by part.

    Under the policy "cond", two tricks keep all arrays in place on CPUs and TPUs. A loop over the
    parts of a group has a dynamic number of turns, so that XLA does not unroll it (and copy). A
    part computes inside of a `cond`, so that XLA does not read its inputs again after they were
    overwritten. On GPUs both would wait for the host. Under the policy "switch" a column that does
    not update therefore leaves out all loops together, their lengths are static, and a barrier
    stands where the `cond` is.

    Attributes:
      device: the device.
      program: the update.
      scalars: of the lane.
      now: bool `[]`, whether the column updates by this program in this tick.
      skip: bool `[]`, whether the update is skipped.
      global_norm: `[]`, norm of the gradient over all stages.
      scale: `[]`, the loss scale of the gradients, or None.
    """

    device: Device
    program: StageUpdate
    scalars: LaneScalars
    now: jax.Array
    skip: jax.Array
    global_norm: jax.Array
    scale: jax.Array | None

    def run_once(self, written: Written, _: ReadOnly) -> Written:
        """`run` with one update."""
        return self.run(written, 1)

    def run(self, arrays: Record, num_updates: jax.Array | int) -> Record:
        """The arrays after 0 or 1 updates, which leave gradients of zero in the column."""
        forward_delay, backward_lead = (
            self.scalars.delay(name).astype(jnp.float32) for name in PASSES
        )
        facts = UpdateFacts(forward_delay, backward_lead, self.global_norm)
        extra = [arg.value(facts) for arg in EXTRA_ARGS]
        extra += [forward_delay, backward_lead] if self.program.param_hooks else []
        num_versions = self.device.spec.num_versions
        previous = jnp.mod(self.scalars.absolute_version - 1, num_versions)

        updated: dict[str, Packed] = {
            "parameters": arrays.parameters,
            "optimizer_state": arrays.optimizer_state,
            **arrays.read_parameters,
        }
        load = functools.partial(self._load, arrays.gradients, previous)
        num_done = jnp.int32(0)
        shared = self._unscaled(
            self.program.shared, load(self.program.shared, 0, updated)
        )
        for group in self.program.groups:
            part = functools.partial(self._part, group, load, [*shared, *extra])
            num_turns = num_updates * group.num_parts
            updated, num_done = lax.fori_loop(0, num_turns, part, (updated, num_done))
        chunk = self.scalars.chunk
        return arrays.replace(
            parameters=updated["parameters"],
            optimizer_state=updated["optimizer_state"],
            read_parameters={name: updated[name] for name in arrays.read_parameters},
            gradients=self._emptied(arrays.gradients, updated, num_done),
            skipped=arrays.skipped.at[chunk].add(
                (self.now & self.skip).astype(jnp.int32)
            ),
        )

    def _part(
        self,
        group: UpdateGroup,
        load: Callable,
        shared_and_extra: Sequence[jax.Array],
        i: jax.Array,
        state: tuple[dict[str, Packed], jax.Array],
    ) -> tuple[dict[str, Packed], jax.Array]:
        """Part i of a group; `state` has the updated arrays and the number of parts done."""
        updated, num_done = state
        kept = [j for j, slots in enumerate(group.outputs) if slots.arrays in updated]
        outputs = [group.outputs[j] for j in kept]
        inputs, before = (load(slots, i, updated) for slots in (group.inputs, outputs))

        def compute() -> list[jax.Array]:
            unscaled = self._unscaled(group.inputs, inputs)
            values = group.run(*unscaled, *shared_and_extra)
            return [values[j] for j in kept]

        if self.device.spec.lowered.guard == "cond":
            values = lax.cond(self.skip, lambda: before, compute)
        else:
            inputs, before = lax.optimization_barrier((inputs, before))
            values = [
                jnp.where(self.skip, a, b)
                for a, b in zip(before, compute(), strict=True)
            ]
        for slots, value in zip(outputs, values, strict=True):
            version = self.scalars.version
            for place, lead in self._places(slots, i, version):
                packed = packing.write(updated[slots.arrays], place, lead, value)
                updated = {**updated, slots.arrays: packed}
        return updated, num_done + 1

    def _places(
        self, slots: LeafSlots, i: jax.Array | int, version: jax.Array
    ) -> list[tuple[Place, list[jax.Array]]]:
        """Place and leading indices of every copy of part i's leaf."""
        versioned = slots.arrays not in ("gradients", "optimizer_state")
        lead = [version] if versioned else []
        lead += [self.scalars.chunk]
        copies: Any = slots.copies  # from here on the base of a place is traced
        return [
            (dataclasses.replace(place, base=jnp.asarray(starts)[i]), lead)
            for place, starts in copies
        ]

    def _load(
        self,
        gradients: Packed,
        version: jax.Array,
        all_slots: Sequence[LeafSlots],
        i: jax.Array | int,
        updated: dict[str, Packed],
    ) -> list[jax.Array]:
        """Part i's leaves, as they were before the update."""
        source = {"gradients": gradients, **updated}
        return [
            packing.read(source[slots.arrays], *self._places(slots, i, version)[0])
            for slots in all_slots
        ]

    def _unscaled(
        self, all_slots: Sequence[LeafSlots], values: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Values whose gradients are divided by the loss scale."""
        return [
            value / self.scale.astype(value.dtype)
            if slots.arrays == "gradients" and self.scale is not None
            else value
            for slots, value in zip(all_slots, values, strict=True)
        ]

    def _emptied(
        self, gradients: Packed, updated: dict[str, Packed], num_done: jax.Array
    ) -> Packed:
        """Gradients whose column is zero if any part is done.

        Reading `num_done`, or a barrier, delays this until all parts have read the gradients. Emptied
        earlier, the gradients would have to be copied.
        """
        chunk = self.scalars.chunk
        if self.device.spec.lowered.guard == "cond":
            return _emptied_by_rows(gradients, chunk, num_done > 0)
        gradients, _ = lax.optimization_barrier((gradients, updated))

        # XLA writes a selection in place, and would make a new array of zeros.
        def emptied(array: jax.Array) -> jax.Array:
            column = lax.dynamic_index_in_dim(
                array, chunk, allow_negative_indices=False
            )
            column = jnp.where(self.now, jnp.zeros_like(column), column)
            return lax.dynamic_update_index_in_dim(
                array, column, chunk, 0, allow_negative_indices=False
            )

        return {name: emptied(a) for name, a in gradients.items()}


def _emptied_by_rows(gradients: Packed, chunk: jax.Array, now: jax.Array) -> Packed:
    """Gradients whose column `chunk` is zero if `now`; row by row, so that they stay in place."""

    def emptied(array: jax.Array) -> jax.Array:
        num_rows = array.shape[1] if array.ndim > 2 else 1  # of a pool, or a vector
        row_shape = (1, array.shape[1] // num_rows, *array.shape[2:])
        zeros = jnp.zeros(row_shape, array.dtype)

        def row(i: jax.Array, array: jax.Array) -> jax.Array:
            start = [chunk, i, *[jnp.int32(0)] * (array.ndim - 2)]
            return lax.dynamic_update_slice(
                array, zeros, start, allow_negative_indices=False
            )

        return lax.fori_loop(0, now.astype(jnp.int32) * num_rows, row, array)

    return {name: emptied(array) for name, array in gradients.items()}
