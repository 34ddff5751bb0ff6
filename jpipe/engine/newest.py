"""The newest weights of the stages of a device, between two passes over a table."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpipe import packing
from jpipe.engine.arrays import Packed
from jpipe.engine.context import TrainingDevice
from jpipe.engine.vocabulary import part_of, whole_of
from jpipe.lowering.array_rows import used_arrays
from jpipe.stages.stage_update import StageUpdate
from jpipe.stages.vocabulary import PartedLeaf


class NewestRows:
    """The rows of the newest weights in arrays that have a row for every version.

    Arrays of the newest weights alone have a row for each stage, as "anchor" has.

    Args:
      device: the device.
    """

    def __init__(self, device: TrainingDevice) -> None:
        self.device = device
        self.slots = jnp.asarray(device.spec.lowered.rows.newest_rows(device.round))

    def take(self, weights: Packed) -> Packed:
        """The newest weights. Rows of no stage have numbers that nothing reads."""
        rows = {name: self._rows(name) for name in weights}
        return {name: a if (at := rows[name]) is None else a.at[at].get(mode="clip") for name, a in weights.items()}

    def put(self, weights: Packed, newest: Packed) -> Packed:
        """The weights of all versions with other newest ones."""

        def replaced(name: str) -> jax.Array:
            rows = self._rows(name)
            return newest[name] if rows is None else weights[name].at[rows].set(newest[name], mode="drop")

        return {name: replaced(name) for name in weights}

    def _rows(self, name: str) -> jax.Array | None:
        """The row of each stage's newest weights in an array; None: every row is one."""
        spec = self.device.spec
        if np.max(spec.lowered.rows.num_versions) == 1:
            return None
        first, homes = (jnp.asarray(table)[self.device.position] for table in self._tables[name])
        return first + self.slots[homes]

    @functools.cached_property
    def _tables(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """For each array int `[D, rows of "anchor"]`: the first row of the versions of a stage, and the stage whose
        versions they follow. The row of no stage is behind the end of the array.
        """
        spec = self.device.spec
        lowered, weights = spec.lowered, spec.stages.parameters
        anchor, versions = spec.array_rows["anchor"], spec.array_rows["parameters"]
        tables = {}
        for name in weights.arrays:
            first = np.full((spec.schedule.num_devices, anchor.number(name)), versions.number(name), np.int32)
            tables[name] = first, np.zeros_like(first)
        used = used_arrays(weights, spec.stages.program_of_stage)
        for home, copies, names in zip(lowered.owner_homes, lowered.owner_copies, used, strict=True):
            for name, (d, chunk) in itertools.product(names, copies):
                first, homes = tables[name]
                of_unit = name in versions.unit_rows  # its versions are all rows
                rows = slice(0, 1) if of_unit else versions.rows(name, d, lowered.rows.chunk_rows(home, d, chunk))
                row = anchor.row(name, d, chunk)
                first[d, row], homes[d, row] = rows.start, home
        return tables


class HookedWeights:
    """The weights that hooks compute for passes, from the newest weights.

    Args:
      device: the device.
    """

    def __init__(self, device: TrainingDevice) -> None:
        self.device = device
        spec = device.spec
        self.passes = list(spec.layout["read_parameters"].shapes)
        lowered, programs = spec.lowered, spec.updates.programs
        shape = spec.schedule.num_devices, lowered.num_chunks
        self.homes, self.numbers = np.zeros(shape, np.int32), np.full(shape, len(programs), np.int32)
        for s, copies in enumerate(lowered.copies):
            for place in copies:
                self.homes[place], self.numbers[place] = s, spec.updates.program_of_stage[s]

    def computed(self, newest: Packed, optimizer_state: Packed) -> dict[str, Packed]:
        """Pass -> the weights that it reads, packed like the newest ones."""
        if not self.passes:
            return {}
        spec, here = self.device.spec, self.device.position
        read = dict.fromkeys(self.passes, newest)
        arrays = newest, optimizer_state

        def stage(update: StageUpdate, chunk: int, home: jax.Array, read: dict[str, Packed]) -> dict[str, Packed]:
            return self._of_owner(update, chunk, home, arrays, read)

        for chunk in range(spec.lowered.num_chunks):
            branches = [functools.partial(stage, update, chunk) for update in spec.updates.programs]
            number, home = (jnp.asarray(a)[here, chunk] for a in (self.numbers, self.homes))
            read = lax.switch(number, [*branches, lambda home, read: read], home, read)
        for unit, home_of_unit in enumerate(spec.lowered.homes):
            update = spec.updates.owner_updates[spec.schedule.num_stages + unit]
            read = stage(update, 0, jnp.int32(home_of_unit), read)
        return read

    def _of_owner(
        self, update: StageUpdate, chunk: int, home: jax.Array, arrays: tuple[Packed, Packed], read: dict[str, Packed]
    ) -> dict[str, Packed]:
        """The weights that passes read, after the hooks of a stage or a unit."""
        newest, optimizer_state = arrays
        device, parted = self.device, self.device.spec.stages.vocabulary.parted
        lead, lead_of_state = device.lead("anchor", chunk), device.lead("optimizer_state", chunk)

        def whole(leaf: PartedLeaf | None, value: jax.Array) -> jax.Array:
            return value if leaf is None else whole_of(leaf, value)

        firsts = [copies[0] for copies in update.parameters]
        weights = [whole(parted.get(p), packing.read(newest, p, lead, i)) for p, i in firsts]
        state = [
            whole(piece.parted, packing.read(optimizer_state, piece.place, lead_of_state)) for (piece,) in update.state
        ]
        for name, packed in read.items():
            delay = jnp.asarray(device.spec.delays[name], jnp.float32)[home]
            hooked = update.param_hooks[name](weights, state, delay)
            values = [jnp.where(delay > 0, a, b) for a, b in zip(hooked, weights, strict=True)]
            for copies, value in zip(update.parameters, values, strict=True):
                for place, i in copies:
                    leaf = parted.get(place)
                    part = value if leaf is None else part_of(device, leaf, value)
                    packed = packing.write(packed, place, lead, part, i)
            read = {**read, name: packed}
        return read
