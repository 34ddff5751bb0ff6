"""The arrays of a table, and the facts that follow from them whether the table is legal or not."""

import dataclasses
import functools
from typing import Any

import numpy as np

from jpipe._table.cells import CELL_FIELDS, IDLE
from jpipe._table.counts import check_counts
from jpipe._table.messages import MessageTicks, as_message_ticks, ticks_between

ARRAYS = ("stage", "device", *CELL_FIELDS)
"""The fields of a table that are arrays; `[C]`, then `[T, C]`."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Table:
    """T ticks by C columns. `jpipe.Schedule` names the fields."""

    name: str
    num_microbatches: int
    stage: np.ndarray
    device: np.ndarray
    forward: np.ndarray
    backward: np.ndarray
    weight_grad: np.ndarray
    forward_version: np.ndarray
    backward_version: np.ndarray
    update: np.ndarray
    num_slices: int = 1
    message_ticks: MessageTicks = 1

    def __post_init__(self) -> None:
        for count in ("num_microbatches", "num_slices"):
            check_counts(**{count: getattr(self, count)})
            object.__setattr__(self, count, int(getattr(self, count)))
        for field in ARRAYS:
            object.__setattr__(self, field, _narrow(field, getattr(self, field)))
        _check_shapes(self)
        object.__setattr__(self, "message_ticks", as_message_ticks(self.message_ticks, self.num_devices))

    # -- Size and kind

    @property
    def num_ticks(self) -> int:
        """T, rows of the table."""
        return self.forward.shape[0]

    @property
    def num_row_groups(self) -> int:
        """Equal groups of rows of a minibatch: a microbatch is one, or a slice of the positions of one."""
        return self.num_microbatches // self.num_slices

    @property
    def order_of_backwards(self) -> np.ndarray:
        """int `[N]`: the microbatches in the order in which a column runs their backwards.

        The slices of a group of rows are in reverse order, because each gives the next one a gradient.

        Example:
          >>> import jpipe.schedules
          >>> jpipe.schedules.seq_one_f_one_b(2, 6, num_slices=3).order_of_backwards.tolist()
          [2, 1, 0, 5, 4, 3]
        """
        groups = np.arange(self.num_microbatches).reshape(-1, self.num_slices)
        return groups[:, ::-1].ravel()

    @property
    def num_columns(self) -> int:
        """C, columns of the table."""
        return self.forward.shape[1]

    @property
    def num_stages(self) -> int:
        """S, one more than the largest stage."""
        return int(self.stage.max()) + 1

    @property
    def num_devices(self) -> int:
        """D, one more than the largest device."""
        return int(self.device.max()) + 1

    @functools.cached_property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """For each stage the devices of its copies, in the order of their first columns.

        Example:
          >>> import jpipe.schedules
          >>> jpipe.schedules.gpipe(2, 6, replicas=(3, 1)).copies
          ((0, 1, 2), (3,))
        """
        devices: list[list[int]] = [[] for _ in range(self.num_stages)]
        for s, d in zip(self.stage.tolist(), self.device.tolist(), strict=True):
            if d not in devices[s]:
                devices[s].append(d)
        return tuple(map(tuple, devices))

    @functools.cached_property
    def columns_of_copies(self) -> tuple[tuple[list[int], ...], ...]:
        """For each stage the columns of every copy, in the order of `copies`."""
        stage, device = self.stage, self.device
        return tuple(
            tuple(np.flatnonzero((stage == s) & (device == d)).tolist() for d in devices)
            for s, devices in enumerate(self.copies)
        )

    @property
    def replicas(self) -> tuple[int, ...]:
        """The number of copies of each stage."""
        return tuple(map(len, self.copies))

    @property
    def has_copies(self) -> bool:
        """True if a stage has several columns, on several devices or as lanes of one."""
        return self.num_columns > self.num_stages

    @functools.cached_property
    def column_of_stage(self) -> np.ndarray:
        """int `[S]`: the column that runs each stage; of several the first, of copy 0.

        Example:
          >>> forward = np.array([[1, 0]])  # stage 1 stands first
          >>> import jpipe
          >>> table = jpipe.Schedule.from_ticks("example", forward, stage=[1, 0])
          >>> table.column_of_stage.tolist()
          [1, 0]
        """
        _, columns = np.unique(self.stage, return_index=True)
        columns.setflags(write=False)
        return columns

    @functools.cached_property
    def column_of_microbatch(self) -> np.ndarray:
        """int `[N, S]`: the column that runs each microbatch of each stage."""
        columns = np.tile(self.column_of_stage, (self.num_microbatches, 1))
        m, c = np.nonzero(self.forward_ticks() != IDLE)
        columns[m, self.stage[c]] = c
        columns.setflags(write=False)
        return columns

    def by_stage(self, entries: np.ndarray) -> np.ndarray:
        """`[N, S]`: the entries of `[N, C]`, each from the column that runs the microbatch."""
        return np.take_along_axis(entries, self.column_of_microbatch, axis=1)

    @functools.cached_property
    def ring(self) -> bool:
        """True if the first and the last of more than two devices exchange messages."""
        device = self.device[self.column_of_microbatch]
        D = self.num_devices
        return D > 2 and bool((np.abs(np.diff(device)) == D - 1).any())

    def ticks_between(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """int: the ticks of messages from devices to devices, elementwise: see `jpipe._table.messages`."""
        assert isinstance(self.message_ticks, int | tuple)
        return ticks_between(self.message_ticks, source, target)

    @functools.cached_property
    def updates_in_round(self) -> np.ndarray:
        """int `[S]`: how many times each stage updates in the table; 1 in a table that only runs forward.

        Example:
          >>> import jpipe.schedules
          >>> table = jpipe.schedules.pipedream(2, 6, replicas=(3, 1), update_every=(3, 1))
          >>> table.updates_in_round.tolist(), table.microbatches_per_update.tolist()
          ([2, 6], [3, 1])
        """
        number = np.ones(self.num_stages, int)
        for s in np.unique(self.stage[self.stage >= 0]).tolist():
            number[s] = max(1, int((self.update[:, self.stage == s] != IDLE).sum(axis=0).max()))
        number.setflags(write=False)
        return number

    @property
    def microbatches_per_update(self) -> np.ndarray:
        """int `[S]`: the microbatches whose gradients each stage applies in one update, N for most tables."""
        return np.maximum(self.num_microbatches // self.updates_in_round, 1)

    @property
    def updates_by_stage(self) -> bool:
        """True if a stage updates more than once in the table, as where stages have rhythms of their own."""
        return bool((self.updates_in_round > 1).any())

    @functools.cached_property
    def splits_backward(self) -> bool:
        """True if weight gradients are operations of their own."""
        return bool((self.weight_grad != IDLE).any())

    @functools.cached_property
    def forward_only(self) -> bool:
        """True if the table has no backward, no weight gradient and no update."""
        trains = (self.backward, self.weight_grad, self.update)
        return all(bool((cells == IDLE).all()) for cells in trains)

    @functools.cached_property
    def drains(self) -> bool:
        """True if the table is one whole minibatch: between rounds nothing is in flight."""
        microbatches = (self.forward, self.backward, self.weight_grad)
        return all(bool(((m == IDLE) | (m >= 0)).all()) for m in microbatches)

    @functools.cached_property
    def synchronous(self) -> bool:
        """True if the table is one whole minibatch that reads only weight version 0."""
        versions = (self.forward_version, self.backward_version)
        return (
            self.drains
            and all(bool(((v == IDLE) | (v == 0)).all()) for v in versions)
            and bool(((self.update == IDLE) | (self.update == 1)).all())
        )

    # -- Absolute time

    def forward_ticks(self) -> np.ndarray:
        """int64 `[N, C]`: absolute tick of each forward, `IDLE` if there is none."""
        return self._by_microbatch(self.forward)[0]

    def backward_ticks(self) -> np.ndarray:
        """int64 `[N, C]`: absolute tick of each backward, `IDLE` if there is none."""
        return self._by_microbatch(self.backward)[0]

    def weight_grad_ticks(self) -> np.ndarray:
        """int64 `[N, C]`: absolute tick at which each weight gradient is complete.

        The backward tick, unless the table splits weight gradients from it.
        """
        cells = self.weight_grad if self.splits_backward else self.backward
        return self._by_microbatch(cells)[0]

    def update_ticks(self) -> np.ndarray:
        """int64 `[C]`: absolute tick that writes version 1, `IDLE` if there is none.

        A column that updates once in a round writes version v at T (v - 1) ticks after that. For others see
        `written_ticks`.
        """
        return self.update_ticks_of_round()[0]

    def update_ticks_of_round(self) -> np.ndarray:
        """int64 `[U, C]`: absolute ticks that write the versions 1 .. U, `IDLE` where a column updates less often.

        U is the largest number of updates of a stage in a round. Version v + u is written T ticks after version v,
        where u is the number of updates of the stage.
        """
        number = self.updates_in_round
        ticks = np.full((int(number.max()), self.num_columns), IDLE, np.int64)
        t, c = np.nonzero(self.update != IDLE)
        k, i = np.divmod(self.update[t, c].astype(np.int64) - 1, number[self.stage[c]])
        ticks[i, c] = t - self.num_ticks * k
        return ticks

    def written_ticks(self, versions: np.ndarray) -> np.ndarray:
        """int64 `[N, C]`: absolute ticks that write versions, each relative to the round."""
        columns = np.arange(self.num_columns)
        k, i = np.divmod(versions - 1, self.updates_in_round[self.stage])
        return self.update_ticks_of_round()[i, columns] + self.num_ticks * k

    def updates_before(self) -> np.ndarray:
        """int64 `[N, C]`: the updates of a round that come before the one which applies each microbatch."""
        period = self.microbatches_per_update[self.stage]
        return np.arange(self.num_microbatches)[:, None] // period

    def forward_versions(self) -> np.ndarray:
        """int64 `[N, C]`: the version each microbatch's forward reads.

        Versions are relative to the microbatch's own update, which writes
        version 1. The version read is therefore the negative of the delay.
        """
        return self._by_microbatch(self.forward, self.forward_version)[1]

    def backward_versions(self) -> np.ndarray:
        """int64 `[N, C]`: the version each backward reads, as `forward_versions`."""
        return self._by_microbatch(self.backward, self.backward_version)[1]

    def _by_microbatch(self, cells: np.ndarray, version: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Absolute ticks `[N, C]` of `cells`, and the versions that they read."""
        shape = (self.num_microbatches, self.num_columns)
        ticks = np.full(shape, IDLE, np.int64)
        versions = np.full(shape, IDLE, np.int64)
        t, c = np.nonzero(cells != IDLE)
        k, m = np.divmod(cells[t, c].astype(np.int64), self.num_microbatches)
        ticks[m, c] = t - self.num_ticks * k
        if version is not None:
            updates = self.updates_in_round[self.stage[c]]
            versions[m, c] = version[t, c] - updates * k - self.updates_before()[m, c]
        return ticks, versions

    def device_work(self) -> np.ndarray:
        """int `[T, D]`: units of work of each device in each tick, F = B = W = 1.

        A backward that is not split counts 2 and an update 0. The work of a device is the
        sum over its columns. A lockstep tick takes as long as its busiest device.

        An operation of a stage with r copies counts r times. Such a stage is cut r times as
        long as a stage with one, so that all devices have equal work; one unit is then a
        forward of the same part of the model everywhere.
        """
        whole_backward = 1 if self.splits_backward else 2
        work = (
            (self.forward != IDLE).astype(int) + whole_backward * (self.backward != IDLE) + (self.weight_grad != IDLE)
        )
        on_device = self.device[:, None] == np.arange(self.num_devices)
        length = np.array(self.replicas)[self.stage]
        return work @ (on_device * length[:, None])


def _narrow(field: str, given: Any) -> np.ndarray:
    """The array of a field as int32 that nothing can write.

    Raises:
      ValueError: if it holds other numbers than these.
    """
    array = np.asarray(given)
    if array.dtype.kind not in "iu":
        raise ValueError(
            f"`{field}` must hold integers (`IDLE` where there is nothing to do), got dtype {array.dtype}."
        )
    narrow = array.astype(np.int32)
    if not np.array_equal(narrow, array):
        raise ValueError(f"`{field}` must fit int32, got up to {array.max()}.")
    narrow.setflags(write=False)
    return narrow


def _check_shapes(table: Table) -> None:
    """Raises ValueError if the arrays of a table do not go together."""
    shape = table.forward.shape
    if table.forward.ndim != 2 or 0 in shape:
        raise ValueError(f"`forward` must have shape [ticks, columns] with at least one of each, got {shape}.")
    for field in ARRAYS:
        expected = shape[0 if field in CELL_FIELDS else 1 :]
        got = getattr(table, field).shape
        if got != expected:
            raise ValueError(f"`{field}` must have shape {expected} to go with `forward` of shape {shape}, got {got}.")
    for reader in ("forward", "backward"):
        reads = getattr(table, reader) != IDLE
        has_version = getattr(table, f"{reader}_version") != IDLE
        for t, c in np.argwhere(reads != has_version)[:1]:
            raise ValueError(
                f"`{reader}_version` must be `IDLE` exactly where `{reader}` is: "
                f"at tick {t}, column {c} only one of them is."
            )
