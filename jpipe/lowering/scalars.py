"""The scalars of a tick: what a device runs, on which microbatch and version, in which slots.

All that the table says is worked out here, before anything is compiled; a step adds which round it is. Every scalar is a
*column*, `[T, D]` numbers and what becomes of them in round r, and a device computes its share of all columns at once.

Letters: T ticks, D devices, N microbatches, V weight versions.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpipe.lowering.lower import Lowered, Operations

_LEAST = np.iinfo(np.int32).min


class Columns:
    """Columns, by name, as they are filled in.

    A column is `base + rounds * r + started * s`, at least `least`, where s microbatches came before round 0. It may
    be cyclic: that modulo `modulus`, and `offset` more; or `guarded`: -1 where the microbatches `first` to `last`,
    relative to the round, are not all in the pipe.
    """

    def __init__(self, shape: tuple[int, int]):
        self._shape = shape
        self._plain: dict[str, tuple] = {}
        self._cyclic: dict[str, tuple] = {}
        self._guarded: dict[str, tuple] = {}

    def plain(self, name, base, rounds=0, started=0, least=_LEAST) -> None:
        self._plain[name] = (base, (rounds, started, least))

    def cyclic(self, name, base, rounds, modulus, offset=0, least=_LEAST) -> None:
        self._cyclic[name] = (base, modulus, offset, (rounds, 0, least))

    def guarded(self, name, base, first, last) -> None:
        self._guarded[name] = (base, first, last)

    @functools.cached_property
    def index(self) -> dict[str, int]:
        """Where in the vector of a tick each column is."""
        return {
            name: i
            for i, name in enumerate([*self._plain, *self._cyclic, *self._guarded])
        }

    def _stack(self, columns: Mapping[str, tuple], j: int) -> np.ndarray:
        """Field j of all columns, `[D, T, columns]`."""
        fields = [np.broadcast_to(c[j], self._shape).T for c in columns.values()]
        return np.stack(fields, axis=-1).astype(np.int32)

    def of_device(
        self, me, round_, started, num_entered, num_microbatches: int
    ) -> jax.Array:
        """All scalars of all ticks, int32 `[T, columns]`.

        Args:
          me: the device.
          round_: r; started: s.
          num_entered: microbatches that have entered the pipe since round 0.
          num_microbatches: N.
        """

        def mine(columns, j):
            return lax.dynamic_index_in_dim(
                self._stack(columns, j),
                me,
                keepdims=False,
                allow_negative_indices=False,
            )

        def grown(columns):
            constants = np.array([c[-1] for c in columns.values()], np.int32)
            rounds, starts, least = constants.T[:, None]
            value = mine(columns, 0) + rounds * round_ + starts * started
            return jnp.maximum(value, least)

        modulus, offset = mine(self._cyclic, 1), mine(self._cyclic, 2)
        first, last = (
            mine(self._guarded, j) + num_microbatches * round_ for j in (1, 2)
        )
        inside = (first >= 0) & (last < num_entered)
        return jnp.concatenate(
            [
                grown(self._plain),
                jnp.mod(grown(self._cyclic), modulus) + offset,
                jnp.where(inside, mine(self._guarded, 0), -1),
            ],
            axis=1,
        )


def columns_of(
    lowered: Lowered,
    of_stage: Mapping[str, Mapping[str, np.ndarray]],
    num_versions: int,
    newest: np.ndarray | None,
) -> Columns:
    """The columns of a lowered table.

    `OPERATION0.FIELD` is a field of what the operation's lane 0 runs: "program", -1 where it runs nothing now, and
    what else `of_stage` has; "chunk", "microbatch" (a row of the batch that is kept), "absolute_version" and "version"
    (its slot), and the slot in each ring. But for updates "number", the microbatch's since training began, and
    "completes", whether it is the last of its minibatch. `channelI.lane` is which output the channel sends,
    `channelI.INBOX` the slot where what arrives goes.

    Args:
      lowered: the table.
      of_stage: for each operation, for each field, `[S]` integers; among them "program".
      num_versions: V.
      newest: `[S]` versions that are read instead of the table's, relative to the round, or None.
    """
    schedule = lowered.schedule
    columns = Columns((schedule.num_ticks, schedule.num_devices))
    for name, operations in lowered.operations.items():
        for lane in range(operations.num_lanes):
            _operation(
                columns,
                lowered,
                (name, lane, operations),
                of_stage[name],
                num_versions,
                newest,
            )
    for i, channel in enumerate(lowered.channels):
        late = channel.operation == "backward"  # sent in the tick after
        columns.plain(f"channel{i}.lane", np.roll(channel.lane, late, axis=0))
        for inbox, arrives in channel.arrives.items():
            stage, position = np.moveaxis(arrives, 2, 0)
            depth, offset = _ring(lowered, inbox, stage)
            none = stage < 0  # to the last slot, that takes what nobody reads
            columns.cyclic(
                f"channel{i}.{inbox}",
                position,
                schedule.num_microbatches,
                np.where(none, 1, depth),
                np.where(none, lowered.num_slots[inbox], offset),
            )
    return columns


def _operation(
    columns: Columns,
    lowered: Lowered,
    lane_of: tuple[str, int, Operations],
    of_stage: Mapping[str, np.ndarray],
    num_versions: int,
    newest: np.ndarray | None,
) -> None:
    """Adds the columns of one lane of an operation."""
    name, lane, operations = lane_of
    N = lowered.schedule.num_microbatches
    stage, chunk, microbatch, position, version = (
        getattr(operations, field)[..., lane]
        for field in ("stage", "chunk", "microbatch", "position", "version")
    )
    at = f"{name}{lane}"
    for field, values in of_stage.items():
        values = np.asarray(values).astype(np.int32)[stage]
        if field != "program":
            columns.plain(f"{at}.{field}", values)
            continue
        program = np.where(stage >= 0, values, -1)
        if name == "update":  # of a whole minibatch
            columns.guarded(
                f"{at}.program", program, N * (version - 1), N * version - 1
            )
        else:
            columns.guarded(f"{at}.program", program, microbatch, microbatch)
    columns.plain(f"{at}.chunk", chunk)
    rows = lowered.num_batches * N
    if name != "update":
        columns.plain(f"{at}.number", microbatch, rounds=N, started=1)
        columns.plain(f"{at}.completes", position % N == N - 1)
        if rows == N:
            columns.plain(f"{at}.microbatch", microbatch)
        else:
            columns.cyclic(f"{at}.microbatch", microbatch, N, rows)
        for ring, slots in lowered.num_slots.items():
            if slots:
                depth, offset = _ring(lowered, ring, stage)
                columns.cyclic(f"{at}.{ring}", position, N, depth, offset)
    least = _LEAST
    if newest is not None:
        version, least = newest[stage], 0
    columns.plain(f"{at}.absolute_version", version, rounds=1, least=least)
    columns.cyclic(f"{at}.version", version, 1, num_versions, least=least)


def _ring(lowered: Lowered, ring: str, stage: np.ndarray) -> tuple:
    """Depth and first slot of the stages' columns in a ring."""
    return np.maximum(lowered.depth[ring], 1)[stage], lowered.offset[ring][stage]
