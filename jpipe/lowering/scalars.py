"""The scalars of a tick: its programs, microbatches, versions and slots.

Every per-tick integer is computed on the host, before compilation. A device gets those of its ticks as an argument of
the compiled step, so that the program does not grow with the table (`ScalarTable.rows`). There a step only adds the
round's number, for all ticks at once (`ScalarTable.with_round`). In a tick the operations read their scalars through
the typed views of `jpipe.lowering.tick_scalars`.

Letters: T ticks, D devices, S stages, N microbatches, V weight versions, F scalars of a tick.
"""

import functools
import itertools
from collections.abc import Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.lowering.lower import Lowered, Operations
from jpipe.lowering.versions import VersionRows

UPDATE = "update"
"""The operation that updates a column. Those of vocabulary layers have names that begin with it."""

OF_COLUMNS = ("forward", "backward", "weight_grad", UPDATE, "commit")
"""The operations on columns of the table. Others are on layers that all devices run together."""

_LEAST = np.iinfo(np.int32).min

ScalarName: TypeAlias = tuple[str | int, ...]
"""(operation, lane, field, ...) or ("channel", number, field, ...)."""

StageConstants: TypeAlias = Mapping[ScalarName, np.ndarray]
"""Field of a lane -> `[S]` integers: scalars that depend only on the stage that runs."""


class ScalarTable:
    """The scalars of all ticks and devices, by name, while a table is filled in and afterwards.

    The value of a scalar in round r is `base + rounds * r + started * s`, but at least `least`; s
    microbatches came before round 0. A *cyclic* scalar is that value modulo `modulus`, plus
    `offset`. A *guarded* scalar is `base` if the microbatches `first` to `last`, relative to the
    round, are all in the pipe, else -1. In a synchronous table they are, so there it is a plain one.
    """

    def __init__(self, shape: tuple[int, int], synchronous: bool):
        self._shape = shape
        self._synchronous = synchronous
        self._plain: dict[ScalarName, tuple] = {}
        self._cyclic: dict[ScalarName, tuple] = {}
        self._guarded: dict[ScalarName, tuple] = {}

    def add_plain(
        self,
        name: ScalarName,
        base: np.ndarray,
        rounds: int | np.ndarray = 0,
        started: int = 0,
        least: int = _LEAST,
    ) -> None:
        """Adds `base + rounds * r + started * s`; `base` is int `[T, D]`, and so is `rounds` or a number."""
        constants = 0 if isinstance(rounds, np.ndarray) else rounds, started, least
        self._plain[name] = (*(np.asarray(a, np.int32) for a in (base, rounds)), constants)

    def add_cyclic(
        self,
        name: ScalarName,
        base: np.ndarray,
        rounds: int | np.ndarray,
        modulus: int | np.ndarray,
        offset: int | np.ndarray = 0,
        least: int = _LEAST,
    ) -> None:
        """Adds `(base + rounds * r) % modulus + offset`, of int `[T, D]` each."""
        constants = 0 if isinstance(rounds, np.ndarray) else rounds, 0, least
        entries = (np.asarray(a, np.int32) for a in (base, modulus, offset, rounds))
        self._cyclic[name] = (*entries, constants)

    def add_guarded(self, name: ScalarName, base: np.ndarray, first: np.ndarray, last: np.ndarray) -> None:
        """Adds `base`, or -1 unless microbatches `first` to `last` are in the pipe; all `[T, D]`."""
        if self._synchronous:
            self.add_plain(name, base)
        else:
            entries = (a.astype(np.int32) for a in (base, first, last))
            self._guarded[name] = tuple(entries)

    def constant(self, name: ScalarName, ticks: range) -> int | None:
        """The value of a scalar in some ticks; None if it differs between these ticks, between devices or between
        rounds.
        """
        if name not in self._plain:
            return None
        base, rounds, (_, started, _) = self._plain[name]
        values: list[int] = np.unique(base[ticks.start : ticks.stop]).tolist()
        return values[0] if len(values) == 1 and started == 0 and not rounds.any() else None

    def only_program(self, operation: str, lane: int, ticks: range) -> int | None:
        """The stage program of this lane if it is the same on every device in every tick of `ticks`, else None."""
        program = self.constant((operation, lane, "program"), ticks)
        return None if program == -1 else program

    @staticmethod
    def _rounds_differ(scalars: Mapping[ScalarName, tuple]) -> bool:
        """True if a round adds different numbers to a scalar on different devices or in different ticks."""
        return any(rounds.ndim for *_, rounds, _ in scalars.values())

    @functools.cached_property
    def index(self) -> dict[ScalarName, int]:
        """Position of each scalar in the vector `[F]` of a tick."""
        names = [*self._plain, *self._cyclic, *self._guarded]
        return {name: i for i, name in enumerate(names)}

    def index_of_lanes(self, operation: str, field: tuple) -> np.ndarray:
        """Position of a field of each lane of an operation in the vector of a tick, int32 `[lanes]`."""
        positions = [
            self.index[operation, lane, *field]
            for lane in itertools.takewhile(lambda lane: (operation, lane, *field) in self.index, itertools.count())
        ]
        return np.array(positions, np.int32)

    @property
    def _parts(self) -> dict[str, tuple[Mapping[ScalarName, tuple], int]]:
        """The parts of the rows, in order: a kind of scalars, and an entry of their descriptions."""
        parts: dict[str, tuple[Mapping[ScalarName, tuple], int]] = {
            "plain": (self._plain, 0),
            "cyclic": (self._cyclic, 0),
            "modulus": (self._cyclic, 1),
            "offset": (self._cyclic, 2),
            "guarded": (self._guarded, 0),
            "first": (self._guarded, 1),
            "last": (self._guarded, 2),
        }
        if self._rounds_differ(self._cyclic):  # columns with fewer microbatches than others
            parts["rounds"] = self._cyclic, 3
        if self._rounds_differ(self._plain):  # stages with more updates than others
            parts["plain_rounds"] = self._plain, 1
        return parts

    @property
    def rows_shape(self) -> tuple[int, int, int]:
        """D, T, and the number of integers that describe the scalars of a tick."""
        num_ticks, num_devices = self._shape
        width = sum(len(scalars) for scalars, _ in self._parts.values())
        return num_devices, num_ticks, width

    def rows(self, devices: slice = slice(None)) -> np.ndarray:
        """The descriptions of all scalars for `with_round`, int32 `[devices, T, integers]`."""
        num_devices, num_ticks, width = self.rows_shape
        chosen_devices = range(num_devices)[devices]
        rows = np.empty((len(chosen_devices), num_ticks, width), np.int32)
        entries = (c[j] for scalars, j in self._parts.values() for c in scalars.values())
        for i, entry in enumerate(entries):
            rows[..., i] = np.broadcast_to(entry, self._shape)[:, devices].T
        return rows

    def with_round(
        self,
        rows: jax.Array,
        round_: jax.Array | int,
        started: jax.Array | int,
        num_entered: jax.Array | int,
        num_microbatches: int,
    ) -> jax.Array:
        """Computes all scalars of all ticks on one device, int32 `[T, F]`.

        Args:
          rows: int32 `[T, integers]`, of the device: see `rows`.
          round_: r.
          started: s.
          num_entered: microbatches that have entered the pipe since round 0.
          num_microbatches: N.
        """
        parts, end = {}, 0
        for part, (scalars, _) in self._parts.items():
            parts[part] = rows[:, end : end + len(scalars)]
            end += len(scalars)

        def at_round(part: str, scalars: Mapping[ScalarName, tuple]) -> jax.Array:
            constants = np.array([c[-1] for c in scalars.values()], np.int32)
            rounds: jax.Array | np.ndarray
            rounds, starts, least = constants.reshape(-1, 3).T[:, None]
            rounds = parts.get({"cyclic": "rounds", "plain": "plain_rounds"}[part], rounds)
            value = parts[part] + rounds * round_ + starts * started
            return jnp.maximum(value, least)

        values = [at_round("plain", self._plain)]
        cyclic = at_round("cyclic", self._cyclic)
        values.append(jnp.mod(cyclic, parts["modulus"]) + parts["offset"])
        if self._guarded:
            first, last = (parts[part] + num_microbatches * round_ for part in ("first", "last"))
            inside = (first >= 0) & (last < num_entered)
            values.append(jnp.where(inside, parts["guarded"], -1))
        return jnp.concatenate(values, axis=1)


def scalar_table(
    lowered: Lowered,
    constants_of_operations: Mapping[str, StageConstants],
    rows: VersionRows,
    newest: bool,
) -> ScalarTable:
    """The scalars of a lowered table. `LaneScalars` and `ChannelScalars` describe each.

    Args:
      lowered: the table.
      constants_of_operations: operation -> its constants of stages; ("program",) is needed.
      rows: the rows of the versions of weights.
      newest: whether the newest versions are read instead of the table's.
    """
    schedule = lowered.schedule
    shape = schedule.num_ticks, schedule.num_devices
    table = ScalarTable(shape, schedule.synchronous)
    for name, operations in lowered.operations.items():
        for lane in range(operations.num_lanes):
            lane_name = (name, lane)
            _add_lane(table, lowered, lane_name, operations, constants_of_operations[name])
            _add_versions(table, lane_name, operations, rows, newest)
    for ring, spill in lowered.spills.items():
        for field in ("leaves", "stores", "loads", "arrives"):
            table.add_plain(("spill", ring, field), getattr(spill, field))

    def add_of_all_devices(name: ScalarName, values: np.ndarray) -> None:
        table.add_plain(name, np.broadcast_to(values[:, None], shape))

    if lowered.norms is not None:
        add_of_all_devices(("reporter",), lowered.norms.reporter)
        add_of_all_devices(("updates",), lowered.updates)
    for name in ("update", "commit"):
        _add_flags(table, lowered, name)
    for i, channel in enumerate(lowered.channels):
        add_of_all_devices(("channel", i, "sends"), np.roll(channel.sends, channel.crosses))
        outputs = np.roll(channel.lane, channel.late, axis=0)
        table.add_plain(("channel", i, "lane"), outputs)
        for inbox, arrives in channel.arrives.items():
            column, position = np.moveaxis(arrives, 2, 0)
            slot_name = ("channel", i, "slot", inbox)
            _add_slot(table, lowered, slot_name, inbox, column, position)
    for before, arrivals in lowered.arrivals.items():
        table.add_plain(("arrivals", before), arrivals.branch)
    return table


def _add_flags(table: ScalarTable, lowered: Lowered, operation: str) -> None:
    """Adds 0 where any copy of a stage updates or commits, else -1; the same on all devices."""
    if not lowered.schedule.has_copies:
        return
    operations = lowered.operations[operation]
    for s in range(len(lowered.copies)) if operations.num_lanes else ():
        here = operations.stage == s
        now = here.any(axis=(1, 2))[:, None]
        least = np.iinfo(np.int32).min
        version = np.where(here, operations.version, least).max(axis=(1, 2))[:, None]
        version = np.where(now, version, 1)
        first, last = _microbatches_of(lowered, operation, s, version)
        table.add_guarded(("copies", operation, s), np.where(now, 0, -1), first, last)


def _microbatches_of(
    lowered: Lowered, operation: str, stage: int | np.ndarray, version: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last microbatch, relative to the round, of an update of a stage or of a commit."""
    schedule = lowered.schedule
    number = schedule.num_microbatches if operation == "commit" else schedule.microbatches_per_update[stage]
    return number * (version - 1), number * version - 1


def _is_per_minibatch(operation: str) -> bool:
    """Returns whether an operation runs on a whole minibatch, not on a microbatch."""
    return operation == "commit" or operation.startswith("update")


def _add_lane(
    table: ScalarTable,
    lowered: Lowered,
    lane_name: tuple[str, int],
    operations: Operations,
    stage_constants: StageConstants,
) -> None:
    """Adds the scalars of one lane of an operation, except those of versions."""
    operation, lane = lane_name
    N = lowered.schedule.num_microbatches
    stage, chunk, column, microbatch, position, version = (
        getattr(operations, field)[..., lane]
        for field in ("stage", "chunk", "column", "microbatch", "position", "version")
    )
    for field, constants in stage_constants.items():
        values = np.asarray(constants).astype(np.int32)[stage]
        if field != ("program",):
            table.add_plain((*lane_name, *field), values)
            continue
        program = np.where(stage >= 0, values, -1)
        first, last = microbatch, microbatch
        if _is_per_minibatch(operation):
            first, last = _microbatches_of(lowered, operation, stage, version)
        table.add_guarded((*lane_name, "program"), program, first, last)
    table.add_plain((*lane_name, "chunk"), chunk)
    if _is_per_minibatch(operation):
        return
    table.add_plain((*lane_name, "number"), microbatch, rounds=N, started=1)
    if not lowered.schedule.has_copies:  # else a commit moves the mutable state
        table.add_plain((*lane_name, "completes"), position % N == N - 1)
    if lowered.num_weights > 1:
        table.add_cyclic((*lane_name, "minibatch"), microbatch // N, 1, lowered.num_weights)
    num_rows = lowered.num_batches * N
    if num_rows == N:
        table.add_plain((*lane_name, "microbatch"), microbatch)
    else:
        table.add_cyclic((*lane_name, "microbatch"), microbatch, N, num_rows)
    for ring, num_slots in lowered.num_slots.items():
        if num_slots:
            name = (*lane_name, "slot", ring)
            column = np.where(stage >= 0, column, -1)
            reads = operation != "forward"
            _add_slot(table, lowered, name, ring, column, position, reads)


def _add_versions(
    table: ScalarTable,
    lane_name: tuple[str, int],
    operations: Operations,
    rows: VersionRows,
    newest: bool,
) -> None:
    """Adds the weight version of one lane of an operation, and its row."""
    operation, lane = lane_name
    stage, chunk = (getattr(operations, f)[..., lane] for f in ("stage", "chunk"))
    version, least = operations.version[..., lane], _LEAST
    if newest:
        version, least = rows.newest[stage], 0
    modulus = rows.num_versions[stage]
    updates = rows.updates if isinstance(rows.updates, int) else rows.updates[stage]
    first = rows.first[np.arange(len(rows.first)), chunk]
    if operation not in OF_COLUMNS:
        # A part of a vocabulary layer has arrays of its own.
        first = np.zeros_like(first)
    table.add_plain((*lane_name, "absolute_version"), version, rounds=updates, least=least)
    table.add_cyclic((*lane_name, "row"), version, updates, modulus, first, least=least)
    if operation.startswith("update"):
        name = (*lane_name, "previous_row")
        table.add_cyclic(name, version - 1, updates, modulus, first)
        if rows.stale is not None:
            name = (*lane_name, "stale_row")
            table.add_cyclic(name, version - 1 - rows.stale[stage], updates, modulus, first)


def _add_slot(
    table: ScalarTable,
    lowered: Lowered,
    name: ScalarName,
    ring_name: str,
    column: np.ndarray,
    position: np.ndarray,
    reads: bool = False,
) -> None:
    """Adds the slot of a microbatch in a ring.

    Args:
      table: the table to fill in.
      lowered: the table.
      name: name of the scalar.
      ring_name: name of the ring.
      column: int `[T, D]`; -1: none, and the slot is the one after the last, which nobody reads.
      position: int `[T, D]`, of the microbatch in the column's order.
      reads: whether the slot is that of an operation that reads the values of a forward.
    """
    ring, nothing = lowered.rings[ring_name], column < 0
    if lowered.schedule.drains or ring.spill is not None:
        slot = ring.slot(column, position, reads)
        table.add_plain(name, np.where(nothing, ring.num_slots, slot))
        return
    depth = np.where(nothing, 1, ring.depth(column))
    offset = np.where(nothing, ring.num_slots, ring.offset(column))
    rounds: int | np.ndarray = lowered.schedule.num_microbatches
    if lowered.schedule.has_copies:
        rounds = np.where(nothing, 0, lowered.num_in_column[column])
    table.add_cyclic(name, position, rounds, depth, offset)
