"""Messages of several ticks: one rule for the tables of all builders.

A builder gives the ticks of a table whose messages take one tick. Operations then move to later ticks, until every
message has the ticks that it takes. A column keeps the order of its microbatches, and a device runs no more operations
of each kind in one tick than it did in some tick before.

- A *synchronous* table is built anew, tick by tick. A device runs what its inputs allow, what came first in the
  builder's table before the rest. So it runs more forwards ahead, as many as the longer way takes, and the bubble
  grows at both ends alone. At last forwards move back to the latest tick that delays nothing, to keep few activations.
- A *steady* round keeps its length: each stage runs all its forwards later by some ticks, and all its gradients later
  by some more. Delays grow, and there is still no bubble.

Letters: S stages, s a stage; C columns, c a column; N microbatches, m a microbatch; T ticks of a round.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jpipe._table.messages import MessageTicks, as_message_ticks, takes_one_tick, ticks_between
from jpipe.schedule import IDLE

_KINDS = ("forward", "backward", "weight_grad")


def with_message_ticks(arguments: Mapping[str, Any], message_ticks: MessageTicks) -> dict[str, Any]:
    """Arguments of `Schedule.from_ticks` for a table whose messages take `message_ticks`.

    Args:
      arguments: those of a table whose messages take one tick; without versions and updates.
      message_ticks: see `jpipe.Schedule`.

    Raises:
      ValueError: if they do not fit the devices.

    Example:
      A forward travels for two ticks, and the device after it waits for one more.

      >>> chain = dict(forward=np.arange(2)[:, None] + np.arange(3))
      >>> with_message_ticks(chain, 2)["forward"].tolist()
      [[0, 2, 4], [1, 3, 5]]
      >>> with_message_ticks(chain, (1, 2))["forward"].tolist()
      [[0, 1, 3], [1, 2, 4]]
    """
    columns, device = np.shape(arguments["forward"])[1], arguments.get("device")
    placed = device is None or np.shape(device) == (columns,) and np.asarray(device).dtype.kind in "iu"
    if takes_one_tick(message_ticks) or not placed:  # which the table refuses
        return dict(arguments)
    table = _Ticks.of(arguments)
    ticks = as_message_ticks(message_ticks, int(table.device.max()) + 1)
    if ticks == 1:
        return dict(arguments)
    way = table.ways(ticks)
    moved = _steady(table, way, arguments["num_ticks"]) if "num_ticks" in arguments else _Line(table, way).moved()
    return {**arguments, **moved, "message_ticks": ticks}


class _Ticks(NamedTuple):
    """The ticks of a table.

    Attributes:
      ticks: kind -> int `[N, C]`; `IDLE` where another column runs the microbatch.
      stage: `[C]`.
      device: `[C]`.
      column: `[N, S]`, the column of each microbatch on each stage.
    """

    ticks: dict[str, np.ndarray]
    stage: np.ndarray
    device: np.ndarray
    column: np.ndarray

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "_Ticks":
        """The ticks among the arguments of `Schedule.from_ticks`."""
        forward = np.asarray(arguments["forward"], np.int64)
        given = {kind: arguments.get(kind) for kind in _KINDS}
        ticks = {k: np.broadcast_to(np.asarray(v, np.int64), forward.shape) for k, v in given.items() if v is not None}
        stage = arguments.get("stage")
        stage = np.arange(forward.shape[1]) if stage is None else np.asarray(stage)
        device = arguments.get("device")
        device = stage if device is None else np.asarray(device)
        column = np.zeros((len(forward), int(stage.max()) + 1), int)
        m, c = np.nonzero(forward != IDLE)
        column[m, stage[c]] = c
        return cls(ticks, stage, device, column)

    def ways(self, message_ticks: int | tuple[int, ...]) -> np.ndarray:
        """`[N, S - 1]`, the ticks of each microbatch's message from each stage to the next, and of its gradient."""
        device = self.device[self.column]
        return ticks_between(message_ticks, device[:, :-1], device[:, 1:])

    def by_stage(self, kind: str) -> np.ndarray:
        """`[N, S]`, the ticks of a kind."""
        return np.take_along_axis(self.ticks[kind], self.column, axis=1)

    def least_gap(self, kind: str, before: str) -> np.ndarray:
        """`[C]`: 1 if a column never runs `kind` of a microbatch in the tick of `before`, else 0."""
        runs = self.ticks[before] != IDLE
        gap = np.where(runs, self.ticks[kind] - self.ticks[before], 1).min(axis=0)
        return np.minimum(gap, 1)

    def cells(self, d: int, num_ticks: int | None = None, apart: int = 0) -> dict[int, list[int]]:
        """Tick -> the number of operations of each kind that a device runs in it.

        Args:
          d: the device.
          num_ticks: T, if the ticks are those of a round that repeats.
          apart: number of ticks by which gradients are later.
        """
        cells: dict[int, list[int]] = {}
        for kind, ticks in self.ticks.items():
            on_device = ticks[:, self.device == d]
            places = on_device[on_device != IDLE] + apart * (kind != "forward")
            for t in (places if num_ticks is None else places % num_ticks).tolist():
                cells.setdefault(t, [0, 0, 0])[_KINDS.index(kind)] += 1
        return cells


def _fits(cell: Sequence[int], cells: Collection[Sequence[int]]) -> bool:
    """Whether one of `cells` has as many operations of each kind as `cell`."""
    return any(all(n <= most for n, most in zip(cell, mosts)) for mosts in cells)


# -- Steady rounds


def _steady(table: _Ticks, way: np.ndarray, num_ticks: int) -> dict[str, np.ndarray]:
    """The ticks of a round that repeats; every device has columns of one stage alone."""
    S = table.column.shape[1]
    forward, backward = table.by_stage("forward"), table.by_stage("backward")
    later, back_later = np.zeros((2, S), np.int64)
    for s in range(1, S):
        later[s] = max(0, (forward[:, s - 1] + later[s - 1] + way[:, s - 1] - forward[:, s]).max())
    for s in reversed(range(S)):
        least = later[s]
        if s < S - 1:
            least = max(least, (backward[:, s + 1] + back_later[s + 1] + way[:, s] - backward[:, s]).max())
        # After a whole round the cells of the devices are again those of the builder's table.
        apart = least - later[s] + np.arange(num_ticks)
        back_later[s] = later[s] + next(a for a in apart.tolist() if _is_free(table, s, a, num_ticks))
    moved = {}
    for kind, ticks in table.ticks.items():
        by_stage = later if kind == "forward" else back_later
        moved[kind] = np.where(ticks == IDLE, IDLE, ticks + by_stage[table.stage])
    return moved


def _is_free(table: _Ticks, s: int, apart: int, num_ticks: int) -> bool:
    """Whether the devices of a stage can run its gradients `apart` ticks later, in a round of T ticks."""
    for d in np.unique(table.device[table.stage == s]).tolist():
        cells = table.cells(d, num_ticks).values()
        if not all(_fits(cell, cells) for cell in table.cells(d, num_ticks, apart).values()):
            return False
    return True


# -- Synchronous tables


class _Line:
    """A synchronous table while it is built anew.

    Args:
      table: the builder's ticks.
      way: see `_Ticks.ways`.
    """

    def __init__(self, table: _Ticks, way: np.ndarray):
        self._table, self._way = table, way.tolist()
        num_devices = int(table.device.max()) + 1
        self._cells = [{tuple(cell) for cell in table.cells(d).values()} for d in range(num_devices)]
        self._ticks = {kind: np.full_like(ticks, IDLE) for kind, ticks in table.ticks.items()}
        self._counts: dict[tuple[int, int], list[int]] = {}
        self._gaps = {
            kind: table.least_gap(kind, before).tolist()
            for before, kind in zip(_KINDS, _KINDS[1:])
            if kind in table.ticks
        }

    def moved(self) -> dict[str, np.ndarray]:
        """Kind -> `[N, C]`."""
        table = self._table
        queues: list[list[tuple[str, int, list[int]]]] = [[] for _ in self._cells]
        for c, d in enumerate(table.device.tolist()):
            for kind, ticks in table.ticks.items():
                (runs,) = np.nonzero(ticks[:, c] != IDLE)
                order = runs[np.argsort(ticks[runs, c], kind="stable")][::-1].tolist()  # the next is the last
                queues[d].append((kind, c, order))
        t = 0
        while any(order for queue in queues for *_, order in queue):
            for d, queue in enumerate(queues):
                self._run(t, d, queue)
            t += 1
        if "backward" in table.ticks:
            self._move_forwards_back()
        return self._ticks

    def _run(self, t: int, d: int, queue: list[tuple[str, int, list[int]]]) -> None:
        """Runs operations of a device in a tick, those that came first in the builder's table first."""
        ran: set[tuple[str, int]] = set()
        while True:
            ready = []
            for kind, c, order in queue:
                if order and (kind, c) not in ran:
                    m = order[-1]
                    earliest = self._earliest(kind, m, c)
                    if earliest is not None and earliest <= t and self._has_room(kind, t, d):
                        ready.append((int(self._table.ticks[kind][m, c]), _KINDS.index(kind), c, order))
            if not ready:
                return
            _, i, c, order = min(ready)
            self._ticks[_KINDS[i]][order.pop(), c] = t
            self._counts.setdefault((d, t), [0, 0, 0])[i] += 1
            ran.add((_KINDS[i], c))

    def _has_room(self, kind: str, t: int, d: int) -> bool:
        counts = list(self._counts.get((d, t), (0, 0, 0)))
        counts[_KINDS.index(kind)] += 1
        return _fits(counts, self._cells[d])

    def _earliest(self, kind: str, m: int, c: int) -> int | None:
        """The first tick in which the inputs of an operation can be read; None: one has not run."""
        table, s = self._table, int(self._table.stage[c])
        inputs = []
        if kind == "forward" and s > 0:
            inputs.append((kind, table.column[m, s - 1], self._way[m][s - 1]))
        elif kind != "forward":
            inputs.append((_KINDS[_KINDS.index(kind) - 1], c, self._gaps[kind][c]))
        if kind == "backward" and s < table.column.shape[1] - 1:
            inputs.append((kind, table.column[m, s + 1], self._way[m][s]))
        ends = [(int(self._ticks[k][m, column]), way) for k, column, way in inputs]
        if any(tick == IDLE for tick, _ in ends):
            return None
        return max((tick + way for tick, way in ends), default=0)

    def _move_forwards_back(self) -> None:
        """Moves forwards to the latest tick that delays no other operation."""
        table, forward, backward = self._table, self._ticks["forward"], self._ticks["backward"]
        next_in_column: dict[int, int] = {}
        m, c = np.nonzero(forward != IDLE)
        latest_first = np.lexsort((m, forward[m, c]))[::-1]
        for m_, c_ in zip(m[latest_first].tolist(), c[latest_first].tolist()):
            s, d, now = int(table.stage[c_]), int(table.device[c_]), int(forward[m_, c_])
            latest = int(backward[m_, c_]) - self._gaps["backward"][c_]
            latest = min(latest, next_in_column.get(c_, latest + 1) - 1)
            if s < table.column.shape[1] - 1:
                latest = min(latest, int(forward[m_, table.column[m_, s + 1]]) - self._way[m_][s])
            tick = next((t for t in range(latest, now, -1) if self._has_room("forward", t, d)), now)
            if tick != now:
                self._counts[d, now][0] -= 1
                self._counts.setdefault((d, tick), [0, 0, 0])[0] += 1
                forward[m_, c_] = tick
            next_in_column[c_] = tick
