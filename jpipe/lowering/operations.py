"""The operation that a device runs in each tick, with its stage and its microbatch.

Letters: T ticks, D devices, C columns, N microbatches.
"""

import dataclasses
import itertools

import numpy as np

from jpipe.schedule import IDLE, Schedule


@dataclasses.dataclass(frozen=True)
class Operations:
    """One kind of operation, int32 `[T, D, lanes]` each. `stage` is -1 where nothing runs.

    Attributes:
      stage: the stage that runs.
      chunk: the position of the stage among its device's stages.
      column: the column of the table; it determines the slots of rings.
      microbatch: relative to the round, as in the table.
      position: rank of the microbatch in the column's order, relative to the round. It determines
        ring slots.
      version: the weight version that is read (`update`: written), relative to the round.
    """

    stage: np.ndarray
    chunk: np.ndarray
    column: np.ndarray
    microbatch: np.ndarray
    position: np.ndarray
    version: np.ndarray

    @property
    def num_lanes(self) -> int:
        """The most columns of a device that run this operation in one tick."""
        return self.stage.shape[2]


def all_operations(
    schedule: Schedule,
    chunk: np.ndarray,
    position: np.ndarray,
    num_in_column: np.ndarray,
) -> dict[str, Operations]:
    """Returns all kinds of operations."""
    update = _in_every_copy(schedule, schedule.update)
    cells_and_versions = {
        "forward": (schedule.forward, schedule.forward_version),
        "backward": (schedule.backward, schedule.backward_version),
        "weight_grad": (schedule.weight_grad, _weight_grad_version(schedule)),
        "update": (update, update),
    }
    if schedule.has_copies:
        commit = np.full_like(update, IDLE)
        if not schedule.forward_only:
            commit = _in_every_copy(schedule, commit_cells(schedule))
        cells_and_versions["commit"] = commit, commit
    return {
        name: _operations(
            schedule,
            cells,
            version,
            chunk,
            None if name in ("update", "commit") else position,
            num_in_column,
        )
        for name, (cells, version) in cells_and_versions.items()
    }


def _operations(
    schedule: Schedule,
    cells: np.ndarray,
    version: np.ndarray,
    chunk: np.ndarray,
    position: np.ndarray | None,
    num_in_column: np.ndarray,
) -> Operations:
    """Gathers the cells `[T, C]` of one field of the table into lanes.

    Args:
      schedule: the table.
      cells: the field.
      version: int `[T, C]`.
      chunk: int `[C]`.
      position: int `[N, C]`; None: the cells are of minibatches, not of microbatches.
      num_in_column: int `[C]`.
    """
    T, D, N = schedule.num_ticks, schedule.num_devices, schedule.num_microbatches
    t, c = np.nonzero(cells != IDLE)
    device = t * D + schedule.device[c]  # in its tick
    in_order = np.argsort(device, kind="stable")
    lane = np.empty_like(c)
    begin = np.searchsorted(device[in_order], device[in_order])
    lane[in_order] = np.arange(len(c)) - begin
    num_lanes = int(lane.max(initial=-1)) + 1
    values = {
        "stage": schedule.stage[c],
        "chunk": chunk[c],
        "column": c,
        "version": version[t, c],
    }
    if position is not None:
        rounds, m = np.divmod(cells[t, c].astype(np.int64), N)
        values["microbatch"] = cells[t, c]
        values["position"] = position[m, c] + num_in_column[c] * rounds
    fields: dict[str, np.ndarray] = {}
    for field in dataclasses.fields(Operations):
        nothing = -1 if field.name == "stage" else 0
        fields[field.name] = np.full((T, D, num_lanes), nothing, np.int32)
        if field.name in values:
            fields[field.name][t, schedule.device[c], lane] = values[field.name]
    return Operations(**fields)


def commit_cells(schedule: Schedule) -> np.ndarray:
    """The minibatches whose forwards a stage has finished by the end of a tick, `[T, C]`.

    Then the copies of the stage add up their statistics and move the mutable state. A minibatch
    is named by the version that its update writes. Without copies the last forward moves the
    state, and nobody asks.
    """
    cells = np.full(schedule.forward.shape, IDLE, np.int64)
    last = schedule.by_stage(schedule.forward_ticks()).max(axis=0)
    for s, tick in enumerate(last.tolist()):
        rounds, t = divmod(tick, schedule.num_ticks)
        cells[t, schedule.stage == s] = 1 - rounds
    return cells


def _weight_grad_version(schedule: Schedule) -> np.ndarray:
    """The version that a weight gradient reads, `[T, C]`: that of its input gradient."""
    version = np.full(schedule.weight_grad.shape, IDLE, np.int64)
    read = schedule.backward_versions()
    t, c = np.nonzero(schedule.weight_grad != IDLE)
    rounds, m = np.divmod(schedule.weight_grad[t, c].astype(np.int64), schedule.num_microbatches)
    updates = schedule.updates_in_round[schedule.stage[c]]
    version[t, c] = read[m, c] + schedule.updates_before()[m, c] + updates * rounds
    return version


def _in_every_copy(schedule: Schedule, cells: np.ndarray) -> np.ndarray:
    """Puts `cells` in the first column of every copy, and `IDLE` in the others."""
    result = np.full_like(cells, IDLE)
    first = [c for c, *_ in itertools.chain(*schedule.columns_of_copies)]
    result[:, first] = cells[:, first]
    return result
