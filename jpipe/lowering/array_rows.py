"""The rows of the arrays of packed leaves on a device.

The weights of a device's stages lie in rows: one row for every version of every stage. Gradients, optimizer state and
mutable state have one row for every stage, and so have frozen weights; a ring of stashes has one for every slot. Not
every stage has leaves in every array: one stage has an embedding, another a norm. An array has rows for the stages that
use it, and for no other. So stages that differ take the memory that they need. A unit of vocabulary layers is on every
device, in arrays of its own, and has the rows of one stage there.

Letters: D devices, R rows if an array is used by all stages.
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from jpipe.lowering.lower import Lowered
from jpipe.packing import Packing


def used_arrays(pack: Packing, owner_of_stage: Sequence[int]) -> list[set[str]]:
    """Names of the arrays of a packing that hold leaves of each stage, then of each unit.

    Args:
      pack: the packing. Its owners after those of stages are units of vocabulary layers.
      owner_of_stage: the owner that stands for each stage.
    """
    arrays_of_owners = [{place.array for place in places} for places in pack.places]
    return [arrays_of_owners[o] for o in owner_of_stage] + arrays_of_owners[max(owner_of_stage) + 1 :]


@dataclasses.dataclass(frozen=True)
class ArrayRows:
    """The rows of each array of a packing, equally many on all devices.

    Attributes:
      num_devices: D.
      num_rows: R.
      tables: name of an array -> int32 `[D, R]`, its own row for each of the R rows; -1 where the stage does not use
        it. An array without an entry has R rows, because on some device all stages use it.
      unit_rows: name of an array of a unit -> number of its rows.
    """

    num_devices: int
    num_rows: int
    tables: Mapping[str, np.ndarray]
    unit_rows: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def per_stage(
        cls,
        lowered: Lowered,
        arrays: Collection[str],
        used: Sequence[Collection[str]],
    ) -> "ArrayRows":
        """The rows of arrays with one row for each stage of a device.

        Args:
          lowered: the table.
          arrays: their names.
          used: see `used_arrays`.
        """
        rows = [[(d, slice(chunk, chunk + 1)) for d, chunk in copies] for copies in lowered.copies]
        return cls._of(lowered, arrays, used, rows, lowered.num_chunks, [1 for _ in lowered.homes])

    @classmethod
    def per_version(
        cls,
        lowered: Lowered,
        arrays: Collection[str],
        used: Sequence[Collection[str]],
        constant: Collection[str] = (),
    ) -> "ArrayRows":
        """The rows of arrays with one row for each version of the weights of a stage; see `per_stage`.

        Of the arrays that are `constant`, all versions are in one row.
        """
        rows = [
            [(d, lowered.rows.chunk_rows(s, d, chunk)) for d, chunk in copies]
            for s, copies in enumerate(lowered.copies)
        ]
        rows_per_unit = lowered.rows.num_versions[[*lowered.homes]].tolist()
        return cls._of(lowered, arrays, used, rows, lowered.rows.num_rows, rows_per_unit, constant)

    @classmethod
    def per_slot(
        cls,
        lowered: Lowered,
        ring: str,
        arrays: Collection[str],
        used: Sequence[Collection[str]],
    ) -> "ArrayRows":
        """The rows of arrays with one row for each slot of a ring; see `per_stage`.

        Stages may share a slot, and the row of an array there. A slot that comes from host memory has all arrays.
        """
        slot_ring, schedule = lowered.rings[ring], lowered.schedule
        if slot_ring.spill is not None:
            return cls(schedule.num_devices, slot_ring.num_slots, {})
        used_by_column = [used[s] for s in schedule.stage]
        rows = [[(int(d), slots)] for d, slots in zip(schedule.device, slot_ring.slots)]
        return cls._of(lowered, arrays, used_by_column, rows, slot_ring.num_slots)

    @classmethod
    def _of(
        cls,
        lowered: Lowered,
        arrays: Collection[str],
        used: Sequence[Collection[str]],
        rows: Sequence[Sequence[tuple[int, slice | np.ndarray]]],
        num_rows: int,
        rows_per_unit: Sequence[int] = (),
        constant: Collection[str] = (),
    ) -> "ArrayRows":
        """The rows of arrays, from the rows of stages and units; see `per_stage`.

        Args:
          lowered: the table.
          arrays: their names.
          used: see `used_arrays`.
          rows: for each stage and each of its copies the device, and the rows of the stage there.
          num_rows: R.
          rows_per_unit: number of rows of each unit.
          constant: names of the arrays that have one row for all rows of a stage.
        """
        num_devices, tables = lowered.schedule.num_devices, {}
        unit_rows = {name: n for names, n in zip(used[len(rows) :], rows_per_unit) for name in names}
        for name in arrays:
            if name in unit_rows:
                continue
            is_used = np.zeros((num_devices, num_rows), bool)
            is_first = np.zeros_like(is_used)
            for stage_arrays, copy_rows in zip(used, rows):
                for device, device_rows in copy_rows:
                    is_used[device, device_rows] |= name in stage_arrays
                    is_first[device, np.arange(num_rows)[device_rows][:1]] |= name in stage_arrays
            number = (is_first if name in constant else is_used).cumsum(axis=1)
            if number[:, -1].max() < num_rows:
                tables[name] = np.where(is_used, number - 1, -1).astype(np.int32)
        return cls(num_devices, num_rows, tables, unit_rows)

    def number(self, name: str) -> int:
        """Number of rows of an array."""
        return self._numbers.get(name, self.num_rows)

    def has_all(self, name: str) -> bool:
        """Returns whether an array of stages has all R rows, so that these are its own."""
        return name not in self.unit_rows and self.number(name) == self.num_rows

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        # An array that no stage uses, because others share it, keeps a row: it has a shape.
        return {**self.unit_rows, **{name: max(int(table.max()) + 1, 1) for name, table in self.tables.items()}}

    def row(self, name: str, device: int, row: int) -> int:
        """The row of an array for one of the R rows of a device; -1 if the array has none for the stage there."""
        table = self.tables.get(name)
        return row if table is None else int(table[device, row])

    def rows(self, name: str, device: int, rows: slice) -> slice:
        """The rows of an array for the rows of a stage that uses it. They follow each other."""
        first = self.row(name, device, rows.start)
        return slice(first, first + rows.stop - rows.start)

    def num_bytes(self, pack: Packing) -> int:
        """Bytes of the arrays of a packing, on every device."""
        return sum(self.number(name) * num_bytes for name, num_bytes in pack.row_bytes.items())
