"""The schedule: a table that says what every pipeline stage does at every tick.

Letters: S stages, s a stage; D devices; C columns, c a column; N microbatches to a
minibatch, m a microbatch; T ticks, t a tick; v a weight version.

A *column* is one copy of one stage, on one device; a row is a *tick*; a cell holds a
microbatch number, or `IDLE`. Within a tick a column works in the order forward,
backward, weight gradient, update. What one column sends another at tick t can be read
from tick t + 1 on. All else about a pipeline (bubble, activations in flight, delay,
weight versions) is counted off this table.

A *synchronous* table is one minibatch: it starts and ends empty, every version read is
0, and every column ends with one update, which writes version 1.

An *asynchronous* table is one round of a steady state that repeats every T ticks.
Microbatches and versions are numbered relative to the round: its own minibatch is
0 .. N-1, negative numbers are still in flight from earlier rounds, and version v is
what the update with the gradients of all microbatches below v N writes. Microbatch
m + N does T ticks later what microbatch m does. So a cell that holds m = j + N k, with
0 <= j < N, at tick t says that microbatch j of this round is due at tick t - T k,
counted from the start of this round; that is its *absolute* tick. A synchronous table
is the special case in which every k is 0.
"""

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

IDLE = int(np.iinfo(np.int32).min)
"""What a cell holds when its column has nothing to do."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """A pipeline schedule, as a table of T ticks by C columns.

    The arrays become read-only and int32. Only their shapes are checked here; `check`
    proves that the table is legal. `Schedule.from_ticks` is the short way to write one.

    Args:
      name: what messages and pictures call the schedule.
      num_microbatches: N, microbatches to a minibatch (asynchronous: to a round).
      stage: `[C]`, the stage each column runs.
      device: `[C]`, the device each column runs on.
      forward: `[T, C]`, the microbatch a column runs forward at a tick.
      backward: `[T, C]`, the microbatch whose input gradient it computes, and its
        weight gradient too unless the table uses `weight_grad`.
      weight_grad: `[T, C]`, the microbatch whose weight gradient it computes, where
        that is split from `backward`: in every backward of a table or in none.
      forward_version: `[T, C]`, the weight version that `forward` reads.
      backward_version: `[T, C]`, the weight version that `backward` reads.
      update: `[T, C]`, the weight version written; takes effect at the end of the tick.

    Raises:
      ValueError: if the shapes disagree, a count is below 1, or a version stands where
        nothing reads it (or none where something does).

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

    def __post_init__(self) -> None:
        check_counts(num_microbatches=self.num_microbatches)
        object.__setattr__(self, "num_microbatches", int(self.num_microbatches))
        for field in _ARRAYS:
            array = np.asarray(getattr(self, field))
            if array.dtype.kind not in "iu":
                raise ValueError(
                    f"`{field}` must hold integers (`IDLE` where there is nothing to "
                    f"do), got dtype {array.dtype}."
                )
            narrow = array.astype(np.int32)
            if not np.array_equal(narrow, array):
                raise ValueError(f"`{field}` must fit int32, got up to {array.max()}.")
            narrow.setflags(write=False)
            object.__setattr__(self, field, narrow)
        if self.forward.ndim != 2 or 0 in self.forward.shape:
            raise ValueError(
                "`forward` must have shape [ticks, columns] with at least one of each, "
                f"got {self.forward.shape}."
            )
        for field in _ARRAYS:
            expected = self.forward.shape[0 if field in _CELLS else 1 :]
            shape = getattr(self, field).shape
            if shape != expected:
                raise ValueError(
                    f"`{field}` must have shape {expected} to go with `forward` of "
                    f"shape {self.forward.shape}, got {shape}."
                )
        for reader in ("forward", "backward"):
            reads = getattr(self, reader) != IDLE
            has_version = getattr(self, f"{reader}_version") != IDLE
            for t, c in np.argwhere(reads != has_version)[:1]:
                raise ValueError(
                    f"`{reader}_version` must be `IDLE` exactly where `{reader}` is: "
                    f"at tick {t}, column {c} only one of them is."
                )

    # -- Size and kind --------------------------------------------------------------

    @property
    def num_ticks(self) -> int:
        """T, rows of the table."""
        return self.forward.shape[0]

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
    def ring(self) -> bool:
        """Whether the first device and the last send each other messages, though they are not next to each other."""
        device = self.device[np.argsort(self.stage, kind="stable")]
        D = self.num_devices
        return D > 2 and bool((np.abs(np.diff(device)) == D - 1).any())

    @functools.cached_property
    def splits_backward(self) -> bool:
        """Whether weight gradients have cells of their own."""
        return bool((self.weight_grad != IDLE).any())

    @functools.cached_property
    def forward_only(self) -> bool:
        """Whether nothing is trained: no backward, no weight gradient, no update."""
        trains = (self.backward, self.weight_grad, self.update)
        return all(bool((cells == IDLE).all()) for cells in trains)

    @functools.cached_property
    def synchronous(self) -> bool:
        """Whether nothing crosses the table's ends: one minibatch, weights all new."""
        microbatches = (self.forward, self.backward, self.weight_grad)
        versions = (self.forward_version, self.backward_version)
        return (
            all(bool(((m == IDLE) | (m >= 0)).all()) for m in microbatches)
            and all(bool(((v == IDLE) | (v == 0)).all()) for v in versions)
            and bool(((self.update == IDLE) | (self.update == 1)).all())
        )

    # -- Absolute time --------------------------------------------------------------

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

        Version v is written T (v - 1) ticks later.
        """
        ticks = np.full(self.num_columns, IDLE, np.int64)
        t, c = np.nonzero(self.update != IDLE)
        ticks[c] = t - self.num_ticks * (self.update[t, c].astype(np.int64) - 1)
        return ticks

    def forward_versions(self) -> np.ndarray:
        """int64 `[N, C]`: the version each microbatch's forward reads.

        Counted so that the microbatch's own minibatch is minibatch 0, hence the
        negative of its delay.
        """
        return self._by_microbatch(self.forward, self.forward_version)[1]

    def backward_versions(self) -> np.ndarray:
        """int64 `[N, C]`: the version each backward reads, as `forward_versions`."""
        return self._by_microbatch(self.backward, self.backward_version)[1]

    def _by_microbatch(
        self, cells: np.ndarray, version: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Absolute ticks `[N, C]` of `cells`, and the versions read there."""
        shape = (self.num_microbatches, self.num_columns)
        ticks = np.full(shape, IDLE, np.int64)
        versions = np.full(shape, IDLE, np.int64)
        t, c = np.nonzero(cells != IDLE)
        k, m = np.divmod(cells[t, c].astype(np.int64), self.num_microbatches)
        ticks[m, c] = t - self.num_ticks * k
        if version is not None:
            versions[m, c] = version[t, c] - k
        return ticks, versions

    # -- Legality -------------------------------------------------------------------

    def check(self) -> "Schedule":
        """Proves the table legal, or prints it with the guilty cell marked.

        The rules, each a function below:

        - stages are 0 .. S-1 and devices 0 .. D-1, none left out, one column a stage;
        - no microbatch belongs to a minibatch that has not arrived;
        - every column runs every microbatch once each way and updates once, or the
          whole table runs forward only;
        - a column takes its microbatches in order, which makes every buffer a ring;
        - a forward starts after its input has arrived;
        - a backward starts in or after the tick of its forward, and after the gradient
          of its output has arrived;
        - a weight gradient comes in or after the tick of its backward;
        - an update that writes version v comes in or after the tick of the last weight
          gradient of the microbatches below v N, and before the first of the others;
        - no version is read before the tick after the one that writes it.

        Returns:
          The schedule itself, so that a builder can end in `.check()`.

        Raises:
          ValueError: if a rule is broken.
        """
        for rule in _RULES:
            rule(self)
        return self

    def _marked(self, message: str, tick: int | None, column: int) -> str:
        """`message`, where it applies, and the table with that cell marked.

        With `tick` None the column as a whole is to blame.
        """
        where = f"stage {self.stage[column]}"
        if tick is not None:
            where = f"tick {tick}, {where}"
        guilty = 0 if tick is None else tick + 1
        rows = self._cell_rows()
        labels = [""] + [f"tick {t}" for t in range(self.num_ticks)]
        for r, row in enumerate(rows):
            marks = [(r == guilty and c == column) for c in range(self.num_columns)]
            row[:] = [
                f"[{cell}]" if mark else f" {cell} "
                for cell, mark in zip(row, marks, strict=True)
            ]
        lines = _align([[label, *row] for label, row in zip(labels, rows, strict=True)])
        lines[guilty] += "  <-- here"
        return "\n".join([f"schedule {self.name!r}, {where}: {message}", *lines])

    # -- Facts ----------------------------------------------------------------------

    def device_work(self) -> np.ndarray:
        """int `[T, D]`: units of work of each device in each tick, F = B = W = 1.

        A backward that is not split counts 2, an update 0; the columns of one device
        add up. A lockstep tick takes as long as its busiest device.
        """
        whole_backward = 1 if self.splits_backward else 2
        work = (
            (self.forward != IDLE).astype(int)
            + whole_backward * (self.backward != IDLE)
            + (self.weight_grad != IDLE)
        )
        on_device = self.device[:, None] == np.arange(self.num_devices)
        return work @ on_device.astype(int)

    def facts(self) -> "Facts":
        """Counts bubble, activations in flight, delays and weight versions.

        Raises:
          ValueError: if the table is not legal.
        """
        self.check()
        work = self.device_work()
        length = work.max(axis=1)
        makespan = int(length.sum())
        span = self.num_devices * makespan
        inner_span = span
        if self.synchronous:
            at_work = work > 0
            begun = np.logical_or.accumulate(at_work)
            unfinished = np.logical_or.accumulate(at_work[::-1])[::-1]
            inner_span = int(((begun & unfinished) * length[:, None]).sum())

        num_ticks = self.num_ticks
        forward, forward_versions = self.forward_ticks(), self.forward_versions()
        backward_delay = np.zeros(self.num_columns, np.int64)
        weight_versions = np.ones(self.num_columns, np.int64)
        last = forward
        if not self.forward_only:
            backward = self.backward_ticks()
            backward_versions = self.backward_versions()
            backward_delay = -backward_versions.min(axis=0)
            last = self.weight_grad_ticks()
            # Version 1 is read T (1 - v) ticks after version v is, and it is the newest
            # through the tick that writes version 2.
            written = self.update_ticks()
            read = [
                forward + num_ticks * (1 - forward_versions),
                backward + num_ticks * (1 - backward_versions),
            ]
            live_until = np.maximum(np.max(read, axis=(0, 1)), written + num_ticks)
            weight_versions = _most_at_once(written + 1, live_until, num_ticks)
        by_stage = np.argsort(self.stage)
        return Facts(
            num_ticks=num_ticks,
            makespan=makespan,
            bubble=(span - int(work.sum())) / span,
            inner_bubble=(inner_span - int(work.sum())) / inner_span,
            in_flight=_most_at_once(forward, last, num_ticks)[by_stage],
            forward_delay=-forward_versions.min(axis=0)[by_stage],
            backward_delay=backward_delay[by_stage],
            weight_versions=weight_versions[by_stage],
        )

    # -- Writing a table ------------------------------------------------------------

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
    ) -> "Schedule":
        """Builds and checks a table from the tick at which each thing happens.

        Args:
          name: what messages and pictures call the schedule.
          forward: `[N, C]`, absolute tick at which column c runs microbatch m forward.
          backward: `[N, C]`, the same for its backward. None: forward only.
          weight_grad: `[N, C]`, the same for its weight gradient. None: not split.
          stage: `[C]`, the stage of each column. None: column c is stage c.
          device: `[C]`, the device of each column. None: one device a stage.
          num_ticks: T, the length of an asynchronous round; what is due later than that
            wraps around. None: the table is synchronous and ends with its last tick.
          update: `[C]`, absolute tick at which version 1 is written. None: the last
            tick of a synchronous table (all gradients, and so their norm, are known by
            then), the tick of the column's last weight gradient in an asynchronous one.
          forward_version: `[N, C]`, the version each forward reads, counted as
            `Schedule.forward_versions` counts. None: the newest at that tick.
          backward_version: `[N, C]`, the same for each backward.

        Returns:
          The schedule, checked.

        Raises:
          ValueError: if two microbatches share a cell, or the table is not legal.

        Warns:
          UserWarning: if a synchronous minibatch has fewer microbatches than there are
            devices, which is feasible and mostly bubble.

        Example: the same placement with a flush, and without
          >>> s, m = np.arange(2), np.arange(2)[:, None]
          >>> flush = Schedule.from_ticks("1F1B", m + s, m + 3 - s)
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
                f"{forward.shape}: it says when each column runs each microbatch."
            )
        ticks = {"forward": forward}
        for field, value in (("backward", backward), ("weight_grad", weight_grad)):
            if value is not None:
                ticks[field] = np.broadcast_to(value, forward.shape)
        versions = {"forward": forward_version, "backward": backward_version}
        num_microbatches, num_columns = forward.shape
        stage = np.arange(num_columns) if stage is None else np.asarray(stage)
        device = stage if device is None else np.asarray(device)
        last_tick = max(int(at.max()) for at in ticks.values())
        synchronous = num_ticks is None
        num_ticks = last_tick + 1 if num_ticks is None else num_ticks
        check_counts(num_ticks=num_ticks)

        cells = _idle_cells(num_ticks, num_columns)
        if update is None and backward is not None:
            gradient = ticks.get("weight_grad", ticks["backward"])
            update = last_tick if synchronous else gradient.max(axis=0)
        if update is not None:
            update = np.broadcast_to(update, num_columns)
            rounds, rows = np.divmod(update, num_ticks)
            cells["update"][rows, np.arange(num_columns)] = 1 - rounds
        for field, at in ticks.items():
            version: ArrayLike | None = versions.get(field)
            if version is None:
                version = 0 if update is None else newest_version(at, update, num_ticks)
            read = np.broadcast_to(version, forward.shape)
            for m, c in np.argwhere(at != IDLE).tolist():
                k, t = divmod(int(at[m, c]), num_ticks)
                number = m - num_microbatches * k
                if cells[field][t, c] != IDLE:
                    raise ValueError(
                        f"schedule {name!r}, tick {t}, stage {stage[c]}: {field} "
                        f"{cells[field][t, c]} and {field} {number} in one cell; a "
                        "column runs one microbatch each way a tick."
                    )
                cells[field][t, c] = number
                if field in versions:
                    cells[f"{field}_version"][t, c] = read[m, c] - k
        schedule = cls(name, num_microbatches, stage, device, **cells).check()
        if synchronous and backward is not None:
            _warn_if_starved(schedule)
        return schedule

    # -- Text and JSON --------------------------------------------------------------

    def to_text(self) -> str:
        """The table as text, which `from_text` reads back.

        A header names the columns, `stage@device`; each row after it is a tick. A cell
        joins what its column does by commas: `F3`, `B1`, `W0` with the microbatch,
        `U1` with the version written, `.` for nothing. `F3@-1` reads version -1; `@0`
        is left out.

        Example:
          >>> import jpipe.schedules
          >>> print(jpipe.schedules.one_f_one_b(2, 2).to_text(), end="")
          0@0    1@1
          F0     .
          F1     F0
          .      F1,B0
          B0     B1
          B1,U1  U1
        """
        return "".join(line + "\n" for line in _align(self._cell_rows()))

    def _cell_rows(self) -> list[list[str]]:
        """The header, then a row of cell texts a tick."""

        def cell(t: int, c: int) -> str:
            parts = []
            for letter, field in _LETTERS.items():
                value = getattr(self, field)[t, c]
                if value == IDLE:
                    continue
                version = 0
                if field in ("forward", "backward"):
                    version = getattr(self, f"{field}_version")[t, c]
                parts.append(f"{letter}{value}" + (f"@{version}" if version else ""))
            return ",".join(parts) or "."

        header = [f"{s}@{d}" for s, d in zip(self.stage, self.device, strict=True)]
        columns = range(self.num_columns)
        return [header] + [[cell(t, c) for c in columns] for t in range(self.num_ticks)]

    @classmethod
    def from_text(cls, text: str, name: str = "table") -> "Schedule":
        """Reads the form that `to_text` writes; does not check the table.

        Blank lines and what follows a `#` are ignored. The number of microbatches is
        the number of forwards of a stage (the most frequent one, if they differ).

        Raises:
          ValueError: naming the line that cannot be read.
        """
        lines = [
            (number, words)
            for number, line in enumerate(text.splitlines(), start=1)
            if (words := line.split("#")[0].split())
        ]
        if len(lines) < 2:
            raise ValueError(
                "a table needs a header such as `0@0 1@1` and at least one row such as "
                f"`F0 .`, got {len(lines)} lines that are neither blank nor a comment."
            )
        (number, header), *rows = lines
        places = [re.fullmatch(r"(\d+)@(\d+)", word) for word in header]
        if not all(places):
            raise ValueError(
                f"line {number}: the header must name columns `stage@device`, such as "
                f"`0@0 1@1`, got `{' '.join(header)}`."
            )
        cells = _idle_cells(len(rows), len(header))
        for t, (number, row) in enumerate(rows):
            if len(row) != len(header):
                raise ValueError(
                    f"line {number}: {len(row)} cells for {len(header)} columns. Write "
                    "`.` in an idle cell and `,` within a cell, as in `F1,B0`."
                )
            for c, word in enumerate(row):
                for part in word.split(",") if word != "." else []:
                    match = _PART.fullmatch(part)
                    if match is None:
                        raise ValueError(
                            f"line {number}: cannot read `{part}`; a cell is `.` or "
                            "any of `F3`, `B1@-1`, `W0`, `U1` joined by commas."
                        )
                    field = _LETTERS[match[1] or match[4]]
                    if cells[field][t, c] != IDLE:
                        raise ValueError(
                            f"line {number}: `{word}` has two of `{part[0]}`; a column "
                            "does each thing once a tick."
                        )
                    cells[field][t, c] = int(match[2] or match[5])
                    if match[1]:
                        cells[f"{field}_version"][t, c] = int(match[3] or 0)
        stage = np.array([int(place[1]) for place in places if place])
        device = np.array([int(place[2]) for place in places if place])
        runs = cells["forward"] != IDLE
        counts = [int(runs[:, stage == s].sum()) for s in np.unique(stage)]
        num_microbatches = max(counts, key=lambda n: (counts.count(n), n))
        return cls(name, num_microbatches, stage, device, **cells)

    def to_dict(self) -> dict[str, Any]:
        """The table as lists that JSON can hold, None for `IDLE`."""

        def lists(array: np.ndarray) -> list:
            values = array.astype(object)
            values[array == IDLE] = None
            return values.tolist()

        return {
            "name": self.name,
            "num_microbatches": self.num_microbatches,
            **{field: lists(getattr(self, field)) for field in _ARRAYS},
        }

    # -- Identity -------------------------------------------------------------------

    def _identity(self) -> tuple:
        arrays = tuple(getattr(self, field).tobytes() for field in _ARRAYS)
        return (self.name, self.num_microbatches, self.forward.shape, *arrays)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        return (
            f"Schedule({self.name!r}, num_stages={self.num_stages}, "
            f"num_devices={self.num_devices}, "
            f"num_microbatches={self.num_microbatches}, num_ticks={self.num_ticks})"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Facts:
    """What a table costs, counted off it with F = B = W = 1.

    Attributes:
      num_ticks: T.
      makespan: units of time of the whole table, each tick as long as its busiest
        device (see `Schedule.device_work`). Asynchronous: of one round.
      bubble: 1 - busy time / (devices x makespan).
      inner_bubble: the same between each device's first and last operation, which is
        what stays if the next minibatch fills the ends. Asynchronous: the bubble.
      in_flight: `[S]`, most microbatches between forward and the end of their backward
        at once, the ticks of both included.
      forward_delay: `[S]`, most versions between the weights a forward reads and the
        weights its gradient is applied to.
      backward_delay: `[S]`, the same for a backward.
      weight_versions: `[S]`, most versions that are live at once: the newest, and older
        ones still to be read.
    """

    num_ticks: int
    makespan: int
    bubble: float
    inner_bubble: float
    in_flight: np.ndarray
    forward_delay: np.ndarray
    backward_delay: np.ndarray
    weight_versions: np.ndarray

    def to_dict(self) -> dict[str, Any]:
        """The facts as numbers and lists that JSON can hold."""
        return {
            field.name: value.tolist() if isinstance(value, np.ndarray) else value
            for field in dataclasses.fields(self)
            for value in [getattr(self, field.name)]
        }


_ARRAYS = tuple(
    field.name
    for field in dataclasses.fields(Schedule)
    if field.name not in ("name", "num_microbatches")
)
_CELLS = tuple(field for field in _ARRAYS if field not in ("stage", "device"))
_LETTERS = {"F": "forward", "B": "backward", "W": "weight_grad", "U": "update"}
_PART = re.compile(r"([FB])(-?\d+)(?:@(-?\d+))?|([WU])(-?\d+)")


def _idle_cells(num_ticks: int, num_columns: int) -> dict[str, np.ndarray]:
    """The `[T, C]` fields of a table in which nothing happens yet."""
    return {f: np.full((num_ticks, num_columns), IDLE, np.int64) for f in _CELLS}


def newest_version(
    ticks: ArrayLike, update_ticks: ArrayLike, num_ticks: int
) -> np.ndarray:
    """The newest version that can be read at `ticks`: written at an earlier tick.

    Args:
      ticks: `[N, C]`, absolute ticks.
      update_ticks: `[C]`, absolute tick at which version 1 is written.
      num_ticks: T, ticks from one version to the next.

    Example: version 1 is written at tick 3 and one more every 2 ticks.
      >>> newest_version(np.arange(7)[:, None], np.array([3]), 2)[:, 0].tolist()
      [-1, -1, 0, 0, 1, 1, 2]
    """
    since = np.asarray(ticks) - np.asarray(update_ticks)
    return (since - 1) // num_ticks + 1


def check_counts(**counts: int) -> None:
    """Raises ValueError unless every count is an integer of at least 1."""
    for name, count in counts.items():
        integer = isinstance(count, int | np.integer) and not isinstance(count, bool)
        if not integer or count < 1:
            raise ValueError(
                f"`{name}` must be an integer of at least 1, got {count!r}: with none "
                "there is nothing to run. Pass 1 or more."
            )


def _warn_if_starved(schedule: Schedule) -> None:
    if schedule.num_microbatches < schedule.num_devices:
        warnings.warn(
            f"{schedule.name} with num_microbatches={schedule.num_microbatches} on "
            f"{schedule.num_devices} devices is {schedule.facts().bubble:.0%} bubble. "
            f"Use at least {schedule.num_devices} microbatches, better 4 times that.",
            stacklevel=4,
        )


def _align(rows: list[list[str]]) -> list[str]:
    """Pads cells to columns two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _most_at_once(first: np.ndarray, last: np.ndarray, num_ticks: int) -> np.ndarray:
    """Most intervals over one tick, per column, each recurring every T ticks.

    Args:
      first: `[N, C]` or `[C]`, first tick of each interval.
      last: the same shape, last tick of each, itself included.
      num_ticks: T.

    Returns:
      `[C]`.
    """
    t = np.arange(num_ticks)[:, None, None]
    covering = (last - t) // num_ticks - (first - 1 - t) // num_ticks  # [T, N, C]
    return covering.sum(axis=1).max(axis=0)


# -- The rules ----------------------------------------------------------------------


def _require(
    schedule: Schedule,
    holds: np.ndarray,
    ticks: np.ndarray,
    message: str,
    other: np.ndarray | None = None,
    version: np.ndarray | None = None,
) -> None:
    """Raises for the first cell, in reading order, for which a rule does not hold.

    Args:
      schedule: the table.
      holds: bool `[N, C]`.
      ticks: `[N, C]`, absolute tick of the cell.
      message: formatted with the table's own numbers: `m`, the microbatch; `other`, the
        tick of what the rule compares with; `version`, the version read.
      other: `[N, C]`, absolute ticks.
      version: `[N, C]`, versions.
    """
    if holds.all():
        return
    num_ticks, num_microbatches = schedule.num_ticks, schedule.num_microbatches
    broken = np.argwhere(~holds).tolist()
    m, c = min(broken, key=lambda i: (ticks[*i] % num_ticks, i[1]))
    k, t = divmod(int(ticks[m, c]), num_ticks)
    text = message.format(
        m=m - num_microbatches * k,
        previous=m - num_microbatches * k - 1,
        other=None if other is None else int(other[m, c]) - num_ticks * k,
        version=None if version is None else int(version[m, c]) - k,
    )
    raise ValueError(schedule._marked(text, t, c))


def _check_columns(schedule: Schedule) -> None:
    """Stages are 0 .. S-1 and devices 0 .. D-1, none left out, one column a stage."""
    for word, values in (("stage", schedule.stage), ("device", schedule.device)):
        if (values < 0).any():
            c = int(np.argmin(values))
            message = f"{word} {values[c]} is negative; {word}s are counted from 0"
            raise ValueError(schedule._marked(message, None, c))
        missing = sorted(set(range(values.max() + 1)) - set(values.tolist()))
        if missing:
            c = int(np.argmax(values))
            message = f"there is a {word} {values[c]} but no {word} {missing[0]}"
            raise ValueError(schedule._marked(message, None, c))
    stages, first = np.unique(schedule.stage, return_index=True)
    if len(stages) < schedule.num_columns:
        c = min(set(range(schedule.num_columns)) - set(first.tolist()))
        message = "a second column of one stage; replicated stages are not supported"
        raise ValueError(schedule._marked(message, None, c))


def _check_arrived(schedule: Schedule) -> None:
    """No microbatch belongs to a minibatch that has not arrived."""
    for field in ("forward", "backward", "weight_grad"):
        cells = getattr(schedule, field)
        for t, c in np.argwhere(cells >= schedule.num_microbatches)[:1].tolist():
            message = (
                f"{field} {cells[t, c]} belongs to a later minibatch; microbatches are "
                f"at most {schedule.num_microbatches - 1}"
            )
            raise ValueError(schedule._marked(message, t, c))


def _check_once(schedule: Schedule) -> None:
    """Every column runs every microbatch once each way and updates once, or none."""
    fields = ["forward"]
    if not schedule.forward_only:
        fields += ["backward"] + ["weight_grad"] * schedule.splits_backward
    for field in fields:
        cells = getattr(schedule, field)
        seen: dict[tuple[int, int], int] = {}
        for t, c in np.argwhere(cells != IDLE).tolist():
            m = int(cells[t, c]) % schedule.num_microbatches
            if (m, c) in seen:
                message = (
                    f"{field} {cells[t, c]} runs twice (also at tick {seen[m, c]})"
                )
                raise ValueError(schedule._marked(message, t, c))
            seen[m, c] = t
        for c in range(schedule.num_columns):
            for m in range(schedule.num_microbatches):
                if (m, c) not in seen:
                    message = f"microbatch {m} has no {field}"
                    raise ValueError(schedule._marked(message, None, c))
    if not schedule.forward_only:
        for c, ticks in enumerate((schedule.update != IDLE).T):
            if not ticks.any():
                raise ValueError(schedule._marked("there is no update", None, c))
            if ticks.sum() > 1:
                t, again = np.flatnonzero(ticks)[:2].tolist()
                message = f"update {schedule.update[again, c]} is a second one"
                raise ValueError(
                    schedule._marked(f"{message} (the first is at tick {t})", again, c)
                )


def _check_order(schedule: Schedule) -> None:
    """A column takes its microbatches in order, which makes every buffer a ring."""
    for field in ("forward", "backward", "weight_grad"):
        if (getattr(schedule, field) == IDLE).all():
            continue
        ticks = getattr(schedule, f"{field}_ticks")()
        before = np.concatenate([ticks[-1:] - schedule.num_ticks, ticks[:-1]])
        message = f"{field} {{m}} before {field} {{previous}} (tick {{other}})"
        _require(schedule, ticks > before, ticks, message, before)


def _check_forward(schedule: Schedule) -> None:
    """A forward starts after its input has arrived."""
    by_stage = np.argsort(schedule.stage)
    ticks = schedule.forward_ticks()
    arrival = np.full_like(ticks, IDLE)
    arrival[:, by_stage[1:]] = ticks[:, by_stage[:-1]] + 1
    message = "forward {m} before its input can be read (tick {other})"
    _require(schedule, ticks >= arrival, ticks, message, arrival)


def _check_backward(schedule: Schedule) -> None:
    """A backward starts after its forward and after its output's gradient arrived."""
    if schedule.forward_only:
        return
    by_stage = np.argsort(schedule.stage)
    forward, ticks = schedule.forward_ticks(), schedule.backward_ticks()
    message = "backward {m} before its forward (tick {other})"
    _require(schedule, ticks >= forward, ticks, message, forward)
    arrival = np.full_like(ticks, IDLE)
    arrival[:, by_stage[:-1]] = ticks[:, by_stage[1:]] + 1
    message = "backward {m} before its gradient can be read (tick {other})"
    _require(schedule, ticks >= arrival, ticks, message, arrival)


def _check_weight_grad(schedule: Schedule) -> None:
    """A weight gradient comes in or after the tick of its backward."""
    if schedule.splits_backward:
        backward, ticks = schedule.backward_ticks(), schedule.weight_grad_ticks()
        message = "weight_grad {m} before its backward (tick {other})"
        _require(schedule, ticks >= backward, ticks, message, backward)


def _check_update(schedule: Schedule) -> None:
    """An update follows all gradients it is made of and precedes all others."""
    if schedule.forward_only:
        return
    num_ticks = schedule.num_ticks
    written, gradient = schedule.update_ticks(), schedule.weight_grad_ticks()
    field = "weight_grad" if schedule.splits_backward else "backward"
    for c in range(schedule.num_columns):
        k, t = divmod(int(written[c]), num_ticks)
        version = 1 - k
        m = schedule.num_microbatches * version  # the first that is not part of it
        last, following = gradient[-1, c], gradient[0, c] + num_ticks
        if last > written[c]:
            message = (
                f"before {field} {m - 1} (tick {last - num_ticks * k}), part of it"
            )
        elif following <= written[c]:
            message = (
                f"not before {field} {m} (tick {following - num_ticks * k}), part of "
                f"update {version + 1}"
            )
        else:
            continue
        raise ValueError(schedule._marked(f"update {version} {message}", t, c))


def _check_versions(schedule: Schedule) -> None:
    """No version is read before the tick after the one that writes it."""
    if schedule.forward_only:
        ticks, version = schedule.forward_ticks(), schedule.forward_versions()
        message = "forward {m} reads version {version}, but without updates all are 0"
        _require(schedule, version == 0, ticks, message, version=version)
        return
    for field in ("forward", "backward"):
        ticks = getattr(schedule, f"{field}_ticks")()
        version = getattr(schedule, f"{field}_versions")()
        written = schedule.update_ticks() + schedule.num_ticks * (version - 1)
        message = f"{field} {{m}} reads version {{version}}, written at tick {{other}}"
        _require(schedule, written < ticks, ticks, message, written, version)


_RULES: tuple[Callable[[Schedule], None], ...] = (
    _check_columns,
    _check_arrived,
    _check_once,
    _check_order,
    _check_forward,
    _check_backward,
    _check_weight_grad,
    _check_update,
    _check_versions,
)
