"""The schedule: a table of the operations of every pipeline stage at every tick.

Letters: S stages, s a stage; D devices; C columns, c a column; N microbatches per
minibatch, m a microbatch; T ticks, t a tick; v a weight version.

A *column* runs microbatches of one stage on one device. A row is a *tick*. A cell holds a
microbatch number, or `IDLE`. Within a tick a column runs forward, backward, weight
gradient and update, in this order. A message that is sent at tick t can be read from
tick t + 1 on, or from t + k where it takes k ticks (`message_ticks`). All other properties
of a pipeline (bubble, activations in flight, delay, weight versions) are counted off this
table.

A *synchronous* table is one minibatch. It starts and ends with an empty pipeline, every
operation reads weight version 0, and every column ends with one update, which writes
version 1.

An *asynchronous* table is one round of a steady state that repeats every T ticks.
Microbatches and versions are numbered relative to the round. The round's own minibatch
is 0 .. N-1; negative numbers are microbatches of earlier rounds that are still in
flight. Version v is written by the update that applies the gradients of all microbatches
below v N. Microbatch m + N does the same as microbatch m, T ticks later. A cell at tick t
that holds m = j + N k, with 0 <= j < N, therefore states that microbatch j of this round
is due at tick t - T k after the start of this round. This is its *absolute* tick. In a
synchronous table every k is 0.

A stage may have a rhythm of its own: u updates in a round, each with the gradients of p = N / u
microbatches. Its version v is written by the update that applies those of all microbatches below v p, and
version v + u is written T ticks after version v. For most tables u is 1 on all stages. A gradient is the mean
over its p microbatches.

Most tables have one column per stage. A stage may have several. Each microbatch then runs
in one of them, forward and backward. Columns of one stage on different devices are
*copies*: every copy has weights of its own, which are equal after every update, and all
copies update in the same tick. Columns of one stage on one device share one copy; they are
the *lanes* in which the device runs several microbatches of the stage in one tick.

A microbatch is a group of rows of the minibatch, or a *slice* of the positions of such a
group. With k slices microbatch k g + j is slice j of group g. On each stage a slice reads
what the slices before it have left there, such as the keys and values of attention. So the
slices of a group go forward in order, and backward in reverse order.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jpipe._table import facts as table_facts
from jpipe._table import text as text_form
from jpipe._table.cells import IDLE as IDLE
from jpipe._table.cells import idle_cells
from jpipe._table.counts import check_counts
from jpipe._table.facts import Facts as Facts
from jpipe._table.messages import MessageTicks
from jpipe._table.rules import RULES
from jpipe._table.table import ARRAYS, Table
from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe._util.warn import warn


@suggests
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Schedule(Table):
    """A pipeline schedule: a table of T ticks by C columns.

    The constructor makes the arrays int32 and read-only and checks their shapes. `check`
    checks that the table is legal. `Schedule.from_ticks` is the short way to write one.

    Args:
      name: the schedule's name in messages and pictures.
      num_microbatches: N, microbatches per minibatch (asynchronous: per round).
      stage: `[C]`, the stage that each column runs.
      device: `[C]`, the device that each column runs on.
      forward: `[T, C]`, the microbatch that a column runs forward at a tick.
      backward: `[T, C]`, the microbatch whose input gradient the column computes. In a
        table without `weight_grad` the same operation computes the weight gradient.
      weight_grad: `[T, C]`, the microbatch whose weight gradient the column computes. A
        table splits weight gradients from all its backwards or from none.
      forward_version: `[T, C]`, the weight version that `forward` reads.
      backward_version: `[T, C]`, the weight version that `backward` reads.
      update: `[T, C]`, the weight version written. It takes effect at the end of the tick.
      num_slices: k, the slices of a sequence, each a microbatch; k divides N.
      message_ticks: the ticks from the one that sends a message to the first one that can read it, at least 1:
        a number, or `[D - 1]`, one for each boundary between the devices d and d + 1. A message takes the largest
        number of the boundaries between its two devices; on its device it takes 1. It is a tuple only if
        boundaries differ.
      emulates: the schedule that this one stands for, see `jpipe.schedules.emulated`; None: it stands
        for itself. It says which gradients of other stages are known when a stage updates, for
        norms over all stages.

    Raises:
      ValueError: if the shapes disagree, a count is below 1, or a cell has a version
        without an operation that reads it, or an operation without a version.

    Example:
      >>> schedule = Schedule.from_text('''
      ... 0@0    1@1
      ... F0     .
      ... F1     F0
      ... .      F1,B0
      ... B0     B1
      ... B1,U1  U1
      ... ''')
      >>> schedule.check().facts().in_flight.tolist()
      [2, 2]
    """

    emulates: "Schedule | None" = None

    # -- Legality

    def check(self) -> "Schedule":
        """Checks that the table is legal.

        The rules, each a function of `jpipe/_table/rules.py`:

        - stages are 0 .. S-1 and devices 0 .. D-1, none is missing;
        - no microbatch belongs to a minibatch that has not arrived;
        - every stage runs every microbatch forward once and backward once, both in one
          column; every column runs a microbatch and updates, once or with equal parts of the
          minibatch, all columns of a stage in the same ticks; or the whole table is forward-only;
        - a column takes its microbatches in order, so every buffer can be a ring; backwards
          take the slices of a sequence in reverse order;
        - slices are of a synchronous table with one column for each stage;
        - a forward starts after its input has arrived;
        - a backward starts in the tick of its forward or later, and after the gradient
          of its output has arrived;
        - a weight gradient comes in the tick of its backward or later;
        - the update that writes version v comes in the tick of the last weight gradient
          of the microbatches below v p or later, and before the first weight gradient of
          the other microbatches, on all copies;
        - a version is read in a later tick than the one that writes it.

        Returns:
          The schedule itself, so that a builder can end in `.check()`.

        Raises:
          ValueError: if a rule is broken. The message prints the table and marks the
            cell.
        """
        _ = self._is_legal  # an error where it is not
        return self

    @functools.cached_property
    def _is_legal(self) -> bool:
        """True, or an error. The arrays are read-only, so a table is checked once."""
        for rule in RULES:
            rule(self)
        return True

    def facts(self) -> "Facts":
        """Counts bubble, activations in flight, delays and weight versions.

        Raises:
          ValueError: if the table is not legal.
        """
        return table_facts.facts(self.check())

    # -- Writing a table

    @classmethod
    def from_ticks(
        cls,
        name: str,
        forward: ArrayLike,
        backward: ArrayLike | None = None,
        weight_grad: ArrayLike | None = None,
        *,
        stage: ArrayLike | None = None,
        device: ArrayLike | None = None,
        num_ticks: int | None = None,
        update: ArrayLike | None = None,
        forward_version: ArrayLike | None = None,
        backward_version: ArrayLike | None = None,
        emulates: "Schedule | None" = None,
        num_slices: int = 1,
        message_ticks: MessageTicks = 1,
    ) -> "Schedule":
        """Builds and checks a table from the tick of each operation.

        Args:
          name: the schedule's name in messages and pictures.
          forward: `[N, C]`, absolute tick at which column c runs microbatch m forward;
            `IDLE` where another column of the stage does.
          backward: `[N, C]`, the same for its backward. None: forward only.
          weight_grad: `[N, C]`, the same for its weight gradient. None: not split.
          stage: `[C]`, the stage of each column. None: column c is stage c.
          device: `[C]`, the device of each column. None: one device per stage.
          num_ticks: T, the length of an asynchronous round; later ticks wrap around to
            its start. None: the table is synchronous and ends with its last tick.
          update: `[C]`, absolute tick at which version 1 is written; or `[U, C]`, those of
            versions 1 .. U, `IDLE` for a stage that updates less often. None: in a
            synchronous table the last tick, when all gradients and their norm are known;
            in an asynchronous table the tick of the stage's last weight gradient.
          forward_version: `[N, C]`, the version that each forward reads, numbered as in
            `Schedule.forward_versions`. None: the newest at that tick.
          backward_version: `[N, C]`, the same for each backward.
          emulates: the schedule that the table stands for, or None.
          num_slices: k, see `Schedule`.
          message_ticks: see `Schedule`.

        Returns:
          The schedule, checked.

        Raises:
          ValueError: if two microbatches share a cell, or the table is not legal.

        Warns:
          UserWarning: if a synchronous table has fewer microbatches than devices. Such a
            table works and is mostly bubble.

        Example:
          The same ticks as a synchronous table, then as an asynchronous round.

          >>> s, m = np.arange(2), np.arange(2)[:, None]
          >>> flush = Schedule.from_ticks("flush", m + s, m + 3 - s)
          >>> print(flush.to_text(), end="")
          0@0    1@1
          F0     .
          F1     F0
          .      F1,B0
          B0     B1
          B1,U1  U1
          >>> steady = Schedule.from_ticks("PipeMare", m + s, m + 3 - s, num_ticks=2)
          >>> print(steady.to_text(), end="")
          0@0               1@1
          F0@-2,B-3@-2,U-1  F-1@-1,B-2@-1
          F1@-1,B-2@-1      F0@-1,B-1@-1,U0
        """
        forward = np.asarray(forward, np.int64)
        if forward.ndim != 2:
            raise ValueError(
                "`forward` must have shape [microbatches, columns], got "
                f"{forward.shape}: it holds the tick of each microbatch in each column."
            )
        ticks = {"forward": forward}
        for field, value in (("backward", backward), ("weight_grad", weight_grad)):
            if value is not None:
                ticks[field] = np.broadcast_to(value, forward.shape)
        versions = {"forward": forward_version, "backward": backward_version}
        num_microbatches, num_columns = forward.shape
        stage = np.arange(num_columns) if stage is None else np.asarray(stage)
        device = stage if device is None else np.asarray(device)
        last_tick = max(int(field_ticks.max()) for field_ticks in ticks.values())
        synchronous = num_ticks is None
        num_ticks = last_tick + 1 if num_ticks is None else num_ticks
        check_counts(num_ticks=num_ticks)

        cells = idle_cells(num_ticks, num_columns)
        if update is None and backward is not None:
            gradient = ticks.get("weight_grad", ticks["backward"])
            update = last_tick
            if not synchronous:
                last = gradient.max(axis=0)
                update = np.array([last[stage == s].max() for s in stage])
        number = np.ones(num_columns, int)
        if update is not None:
            update = np.broadcast_to(update, (*np.shape(update)[:-1], num_columns)).reshape(-1, num_columns)
            number = np.maximum((update != IDLE).sum(axis=0), 1)
            i, c = np.nonzero(update != IDLE)
            rounds, rows = np.divmod(update[i, c].astype(np.int64), num_ticks)
            _check_own_cell(name, "update", rows, c, stage, 1 + i - number[c] * rounds)
            cells["update"][rows, c] = 1 + i - number[c] * rounds
        part = np.arange(num_microbatches)[:, None] // np.maximum(num_microbatches // number, 1)
        for field, field_ticks in ticks.items():
            version: ArrayLike | None = versions.get(field)
            if version is None:
                version = 0 if update is None else newest_version(field_ticks, update, num_ticks) - part
            version_read = np.broadcast_to(version, forward.shape)
            m, c = np.nonzero(field_ticks != IDLE)
            k, t = np.divmod(field_ticks[m, c].astype(np.int64), num_ticks)
            microbatch = m - num_microbatches * k
            _check_own_cell(name, field, t, c, stage, microbatch)
            cells[field][t, c] = microbatch
            if field in versions:
                cells[f"{field}_version"][t, c] = version_read[m, c] + part[m, c] - number[c] * k
        fields: dict[str, Any] = {**cells, "num_slices": num_slices, "message_ticks": message_ticks}
        schedule = cls(name, num_microbatches, stage, device, **fields, emulates=emulates).check()
        if synchronous and backward is not None:
            _warn_if_starved(schedule)
        return schedule

    # -- Text and JSON

    def to_text(self) -> str:
        """The table as text. `from_text` reads it back.

        A header names the columns, `stage@device`. Each row after it is a tick. A cell
        holds its column's operations, joined by commas: `F3`, `B1`, `W0` with the
        microbatch, `U1` with the version written; `.` is an idle cell. `F3@-1` reads
        version -1; `@0` is left out.

        Example:
          >>> import jpipe.schedules
          >>> print(jpipe.schedules.one_f_one_b(2, 2).to_text(), end="")
          0@0    1@1
          F0     .
          F1     F0,B0
          B0     F1,B1
          B1,U1  U1
        """
        return text_form.to_text(self)

    @classmethod
    def from_text(cls, text: str, name: str = "table") -> "Schedule":
        """Reads the form that `to_text` writes. It does not check the table.

        Blank lines and text after a `#` are ignored. The number of microbatches is the
        number of forwards of a stage; if stages differ, the most frequent number.

        Raises:
          ValueError: if a line cannot be read. The message names the line.
        """
        return cls(name=name, **text_form.parse(text))

    def to_dict(self) -> dict[str, Any]:
        """The table as lists for JSON, with None in place of `IDLE`."""

        def lists(array: np.ndarray) -> list:
            values = array.astype(object)
            values[array == IDLE] = None
            return values.tolist()

        return {
            "name": self.name,
            "num_microbatches": self.num_microbatches,
            **({"num_slices": self.num_slices} if self.num_slices > 1 else {}),
            **({} if self.message_ticks == 1 else {"message_ticks": np.asarray(self.message_ticks).tolist()}),
            **{field: lists(getattr(self, field)) for field in ARRAYS},
        }

    # -- Identity

    @property
    def identity(self) -> tuple:
        """The facts that make two schedules equal; the first entry is the name."""
        arrays = tuple(getattr(self, field).tobytes() for field in ARRAYS)
        shape = self.forward.shape
        slices = (self.num_slices,) if self.num_slices > 1 else ()
        ticks = () if self.message_ticks == 1 else (("message_ticks", self.message_ticks),)
        return (self.name, self.num_microbatches, shape, *arrays, self.emulates, *slices, *ticks)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def __repr__(self) -> str:
        return (
            f"Schedule({self.name!r}, num_stages={self.num_stages}, "
            f"num_devices={self.num_devices}, "
            f"num_microbatches={self.num_microbatches}, num_ticks={self.num_ticks})"
        )


def _check_own_cell(
    name: str, field: str, ticks: np.ndarray, columns: np.ndarray, stage: np.ndarray, number: np.ndarray
) -> None:
    """Refuses two operations of one kind in a cell.

    Args:
      name: the table's.
      field: the kind.
      ticks, columns: the cell of each operation, `[n]`.
      stage: `[C]`.
      number: `[n]`, the microbatch or the version.
    """
    _, first, cell = np.unique(ticks * len(stage) + columns, return_index=True, return_inverse=True)
    for i in np.flatnonzero(first[cell] != np.arange(len(ticks)))[:1]:
        raise ValueError(
            f"schedule {shown(name)}, tick {ticks[i]}, stage {stage[columns[i]]}: {field} "
            f"{number[first[cell[i]]]} and {field} {number[i]} in one cell; a "
            f"column runs one {field} per tick."
        )


def newest_version(ticks: ArrayLike, update_ticks: ArrayLike, num_ticks: int) -> np.ndarray:
    """The newest version that can be read at `ticks`: the last one written before them.

    Args:
      ticks: `[N, C]`, absolute ticks.
      update_ticks: `[C]`, absolute tick at which version 1 is written; or `[U, C]`, those of versions 1 .. U, `IDLE`
        where a column updates less often.
      num_ticks: T, ticks until a column has written as many versions again.

    Returns:
      `[N, C]`, versions, relative to the round.

    Example:
      Version 1 is written at tick 3, and one more version every 2 ticks.

      >>> newest_version(np.arange(7)[:, None], np.array([3]), 2)[:, 0].tolist()
      [-1, -1, 0, 0, 1, 1, 2]
    """
    written = np.asarray(update_ticks)
    number = [(np.asarray(ticks) - each - 1) // num_ticks + 1 for each in written.reshape(-1, written.shape[-1])]
    counts = written.reshape(-1, written.shape[-1]) != IDLE
    return np.sum([np.where(here, n, 0) for here, n in zip(counts, number, strict=True)], axis=0)


def _warn_if_starved(schedule: Schedule) -> None:
    if schedule.num_microbatches < schedule.num_devices:
        warn(
            f"{schedule.name} with num_microbatches={schedule.num_microbatches} on "
            f"{schedule.num_devices} devices is {schedule.facts().bubble:.0%} bubble. "
            f"Use at least {schedule.num_devices} microbatches, better 4 times that.",
        )
