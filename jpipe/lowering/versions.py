"""The rows of weight versions on a device.

A stage keeps V versions, as many as its table needs: version v is in its slot v modulo V. The arrays of weights have a
row for every slot of every stage of the device.

Letters: T ticks, D devices, S stages, R stages of a device at most, V weight versions of a stage.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jpipe.schedule import IDLE, Schedule, newest_version


@dataclasses.dataclass(frozen=True)
class VersionRows:
    """Rows of weights.

    Attributes:
      num_versions: int `[S]`, V of each stage.
      first: int `[D, R]`, the first row of each stage of each device.
      num_rows: rows on every device.
      newest: int `[S]`, the newest version of a stage between rounds, relative to the next round.
      stale: int `[S]`, number of updates from the weights that an update's gradient was computed at to the newest;
        None if no update reads them.
      updates: int `[S]`, how many times each stage updates in a round; 1 if all do so once.
    """

    num_versions: np.ndarray
    first: np.ndarray
    num_rows: int
    newest: np.ndarray
    stale: np.ndarray | None = None
    updates: int | np.ndarray = 1

    def newest_rows(self, rounds: Any) -> Any:
        """The slot of each stage's newest version after some rounds, int `[S]`. `rounds` may be traced."""
        return (rounds * self.updates + self.newest).clip(0) % self.num_versions

    def chunk_rows(self, stage: int, device: int, chunk: int) -> slice:
        """The rows of a stage on a device."""
        first = int(self.first[device, chunk])
        return slice(first, first + int(self.num_versions[stage]))


def version_rows(
    schedule: Schedule,
    copies: Sequence[Sequence[tuple[int, int]]],
    num_chunks: int,
    newest: np.ndarray,
    reads_stale: bool = False,
) -> VersionRows:
    """The rows of a table.

    Args:
      schedule: the table.
      copies: device of every copy of each stage, and position of the stage among the device's stages.
      num_chunks: R.
      newest: see `VersionRows`.
      reads_stale: whether updates read the weights that their gradients were computed at.
    """
    num_versions, stale = num_versions_of(schedule), None
    if reads_stale and not schedule.forward_only:
        stale = schedule.facts().forward_delay.astype(int)
        # An update reads a version before it overwrites that version's slot.
        num_versions = np.maximum(num_versions, stale + 1)
    num_rows = np.zeros((schedule.num_devices, num_chunks), int)
    for s, stage_copies in enumerate(copies):
        for place in stage_copies:
            num_rows[place] = num_versions[s]
    ends = num_rows.cumsum(axis=1)
    # A device with fewer stages than others has no rows for them, and nobody asks.
    first = np.minimum(ends - num_rows, ends.max() - 1)
    updates = schedule.updates_in_round if schedule.updates_by_stage else 1
    return VersionRows(num_versions, first, int(ends.max()), newest, stale, updates)


def has_one_row(schedule: Schedule) -> bool:
    """Returns whether every device has one stage, and one version of its weights."""
    stages = {*zip(schedule.device.tolist(), schedule.stage.tolist())}
    one_stage = len(stages) == len({device for device, _ in stages})
    return one_stage and int(num_versions_of(schedule).max()) == 1


def num_versions_of(schedule: Schedule) -> np.ndarray:
    """The smallest V such that version v is last read before version v + V overwrites it, int `[S]`."""
    num_versions = np.ones(schedule.num_stages, int)
    if schedule.forward_only:
        return num_versions
    updated, before = schedule.update_ticks_of_round(), schedule.updates_before()
    for ticks, versions in (
        (schedule.forward_ticks(), schedule.forward_versions()),
        (schedule.backward_ticks(), schedule.backward_versions()),
        (schedule.weight_grad_ticks(), schedule.backward_versions()),
    ):
        newest_written = newest_version(ticks, updated, schedule.num_ticks) - before
        back = np.where(ticks == IDLE, 0, newest_written - versions + 1).max(axis=0)
        np.maximum.at(num_versions, schedule.stage, back)
    return num_versions
