"""The rules of a legal table: one function per rule, all called by `jpipe.Schedule.check`.

Letters: T ticks, t a tick; C columns, c a column; N microbatches, m a microbatch; k the
number of a round before the one that the table shows. Arrays `[N, C]` hold absolute ticks.
"""

from collections.abc import Callable

import numpy as np

from jpipe._table.cells import IDLE
from jpipe._table.table import Table
from jpipe._table.text import with_mark


def _require(
    table: Table,
    holds: np.ndarray,
    ticks: np.ndarray,
    message: str,
    other: np.ndarray | None = None,
    version: np.ndarray | None = None,
    previous: np.ndarray | None = None,
) -> None:
    """Raises for the first cell, in reading order, for which a rule does not hold.

    Args:
      table: the table.
      holds: bool `[N, C]`. Cells without a tick do not count.
      ticks: `[N, C]`, absolute tick of the cell.
      message: a format string. Its fields are numbers as the table shows them: `m`, the
        microbatch; `previous`, the microbatch before it; `other`, the tick that the rule
        compares with; `version`, the weight version read.
      other: `[N, C]`, absolute ticks.
      version: `[N, C]`, versions.
      previous: `[N, C]`, microbatches.
    """
    holds = holds | (ticks == IDLE)
    if holds.all():
        return
    num_ticks, num_microbatches = table.num_ticks, table.num_microbatches
    broken = np.argwhere(~holds).tolist()
    m, c = min(broken, key=lambda cell: (ticks[*cell] % num_ticks, cell[1]))
    k, t = divmod(int(ticks[m, c]), num_ticks)
    shift = k * table.updates_in_round[table.stage[c]]
    text = message.format(
        m=m - num_microbatches * k,
        previous=None if previous is None else int(previous[m, c]) - num_microbatches * k,
        other=None if other is None else int(other[m, c]) - num_ticks * k,
        version=None if version is None else int(version[m, c] + table.updates_before()[m, c] - shift),
    )
    raise ValueError(with_mark(table, text, t, c))


def _check_columns(table: Table) -> None:
    """Stages are 0 .. S-1, devices 0 .. D-1, none is missing."""
    for word, values in (("stage", table.stage), ("device", table.device)):
        if (values < 0).any():
            c = int(np.argmin(values))
            message = f"{word} {values[c]} is negative; {word}s are counted from 0"
            raise ValueError(with_mark(table, message, None, c))
        # A number may be as large as int32 allows, so nothing here takes time or memory for each below it.
        (gaps,) = np.nonzero(np.unique(values) != np.arange(np.unique(values).size))
        if gaps.size:
            c = int(np.argmax(values))
            message = f"there is a {word} {values[c]} but no {word} {gaps[0]}"
            raise ValueError(with_mark(table, message, None, c))


def _check_slices(table: Table) -> None:
    """Groups of rows are whole, and the slices of one are in one column, and in one minibatch."""
    k, N = table.num_slices, table.num_microbatches
    if k == 1:
        return
    if N % k:
        message = f"{N} microbatches are not a multiple of the {k} slices of a sequence"
    elif not table.synchronous:
        message = "slices of a sequence need a synchronous table, in which all of them read the same weights"
    elif table.has_copies:
        message = "slices of a sequence need one column for each stage, where one slice finds what another has left"
    else:
        return
    raise ValueError(with_mark(table, message, None, 0))


def _check_arrived(table: Table) -> None:
    """No microbatch belongs to a minibatch that has not arrived."""
    for field in ("forward", "backward", "weight_grad"):
        cells = getattr(table, field)
        for t, c in np.argwhere(cells >= table.num_microbatches)[:1].tolist():
            message = (
                f"{field} {cells[t, c]} belongs to a later minibatch; microbatches are "
                f"at most {table.num_microbatches - 1}"
            )
            raise ValueError(with_mark(table, message, t, c))


def _check_once(table: Table) -> None:
    """Checks that every stage runs each operation once per microbatch, and that every column updates once.

    All operations of a microbatch on a stage are in one column. A forward-only table has no
    backward and no update at all.
    """
    fields = ["forward"]
    if not table.forward_only:
        fields += ["backward"] + ["weight_grad"] * table.splits_backward
    column_of = np.full((table.num_stages, table.num_microbatches), -1)
    for field in fields:
        _check_field_once(table, field, column_of)
    without = ~np.isin(np.arange(table.num_columns), column_of)
    for c in np.flatnonzero(without)[:1].tolist():
        message = "a column without a microbatch; leave the column out"
        raise ValueError(with_mark(table, message, None, c))
    if not table.forward_only:
        _check_updates_once(table)


def _check_field_once(table: Table, field: str, column_of: np.ndarray) -> None:
    """`_check_once` for one kind of operation.

    Args:
      table: the table.
      field: the field of the operation.
      column_of: int `[S, N]`, the column that runs each microbatch of each stage; forwards fill it in.
    """
    cells, N = getattr(table, field), table.num_microbatches
    t, c = np.nonzero(cells != IDLE)
    m, s = cells[t, c] % N, table.stage[c]
    _, first, operation = np.unique(s.astype(np.int64) * N + m, return_index=True, return_inverse=True)
    first = first[operation]  # the first cell with the same operation
    if field == "forward":
        column_of[s, m] = c[first]
    for i in np.flatnonzero((first != np.arange(len(t))) | (column_of[s, m] != c))[:1]:
        tick, column, other = int(t[i]), int(c[i]), int(first[i])
        if other != i:
            where = "" if c[other] == column else f" in another column of stage {s[i]}"
            message = f"runs twice (also at tick {t[other]}{where})"
        else:
            message = "is not in the column of its forward, which has what it needs"
        message = f"{field} {cells[tick, column]} {message}"
        raise ValueError(with_mark(table, message, tick, column))
    runs = np.zeros(column_of.shape, bool)
    runs[s, m] = True
    for stage in () if runs.all() else dict.fromkeys(table.stage.tolist()):
        for microbatch in np.flatnonzero(~runs[stage])[:1].tolist():
            column = int(column_of[stage, microbatch])
            if column < 0:
                column = table.stage.tolist().index(stage)
            message = f"microbatch {microbatch} has no {field}"
            raise ValueError(with_mark(table, message, None, column))


def _check_updates_once(table: Table) -> None:
    """Checks that every column writes each version once, all columns of a stage in the same ticks.

    A stage may update several times in the table, each time with as many microbatches.
    """
    for c, updates in enumerate((table.update != IDLE).T):
        if not updates.any():
            raise ValueError(with_mark(table, "there is no update", None, c))
        _check_each_once(table, c, np.flatnonzero(updates))
    written = table.update_ticks_of_round()
    together = written[:, table.column_of_stage[table.stage]]
    for i, c in np.argwhere(written != together)[:1].tolist():
        text = "none"
        if together[i, c] != IDLE:
            other = int(together[i, c]) % table.num_ticks
            version = table.update[other, table.column_of_stage[table.stage[c]]]
            text = f"tick {other}, update {version}"
        tick = None if written[i, c] == IDLE else int(written[i, c]) % table.num_ticks
        version = i + 1 if tick is None else table.update[tick, c]
        message = f"update {version} is not in the tick of the other columns of stage {table.stage[c]} ({text})"
        raise ValueError(with_mark(table, message, tick, c))


def _check_each_once(table: Table, column: int, ticks: np.ndarray) -> None:
    """Checks that the updates of a column are equal parts of the minibatch, and each is there once.

    Args:
      table: the table.
      column: the column.
      ticks: the ticks in which it updates.
    """
    number, N = len(ticks), table.num_microbatches
    versions = table.update[ticks, column]
    _, first, which = np.unique(versions % number, return_index=True, return_inverse=True)
    again = np.flatnonzero(first[which] != np.arange(number))
    if N % number == 0 and not again.size:
        return
    i = int(again[0]) if again.size else 1
    before = ticks[first[which[i]]] if again.size else ticks[0]
    message = f"update {versions[i]} is a second one (the first is at tick {before})"
    if not again.size:
        message += f", and {number} updates cannot have equal parts of {N} microbatches"
    raise ValueError(with_mark(table, message, int(ticks[i]), column))


def _check_order(table: Table) -> None:
    """A column takes its microbatches in order, so every buffer can be a ring.

    Backwards take the slices of a sequence in reverse order: see `Table.order_of_backwards`.
    """
    for field in ("forward", "backward", "weight_grad"):
        if (getattr(table, field) == IDLE).all():
            continue
        ticks = getattr(table, f"{field}_ticks")()
        before, previous = np.full((2, *ticks.shape), IDLE, np.int64)
        order = np.arange(len(ticks)) if field == "forward" else table.order_of_backwards
        for c in range(table.num_columns):
            m = order[ticks[order, c] != IDLE]
            before[m, c], previous[m, c] = np.roll(ticks[m, c], 1), np.roll(m, 1)
            before[m[0], c] -= table.num_ticks
            previous[m[0], c] -= table.num_microbatches
        message = f"{field} {{m}} before {field} {{previous}} (tick {{other}})"
        _require(table, ticks > before, ticks, message, before, previous=previous)


def _arrival(table: Table, ticks: np.ndarray, offset: int) -> np.ndarray:
    """`[N, C]`, the first tick at which the message of another stage can be read.

    Args:
      table: the table.
      ticks: `[N, C]`, ticks of the operation that sends and of the one that reads.
      offset: the sending stage minus the reading stage: -1 or 1.
    """
    sent, sender = table.by_stage(ticks), table.device[table.column_of_microbatch]
    arrival = np.full_like(ticks, IDLE)
    for s in range(max(0, -offset), table.num_stages - max(0, offset)):
        here = table.stage == s
        way = table.ticks_between(sender[:, s + offset, None], table.device[here])
        arrival[:, here] = sent[:, s + offset, None] + way
    return arrival


def _check_forward(table: Table) -> None:
    """A forward starts after its input has arrived."""
    ticks = table.forward_ticks()
    arrival = _arrival(table, ticks, -1)
    message = "forward {m} before its input can be read (tick {other})"
    _require(table, ticks >= arrival, ticks, message, arrival)


def _check_backward(table: Table) -> None:
    """A backward starts after its forward, and after its output's gradient has arrived."""
    if table.forward_only:
        return
    forward, ticks = table.forward_ticks(), table.backward_ticks()
    message = "backward {m} before its forward (tick {other})"
    _require(table, ticks >= forward, ticks, message, forward)
    arrival = _arrival(table, ticks, 1)
    message = "backward {m} before its gradient can be read (tick {other})"
    _require(table, ticks >= arrival, ticks, message, arrival)


def _check_weight_grad(table: Table) -> None:
    """A weight gradient comes in the tick of its backward or later."""
    if table.splits_backward:
        backward, ticks = table.backward_ticks(), table.weight_grad_ticks()
        message = "weight_grad {m} before its backward (tick {other})"
        _require(table, ticks >= backward, ticks, message, backward)


def _check_update(table: Table) -> None:
    """An update follows all gradients that it applies and precedes all others."""
    if table.forward_only:
        return
    num_ticks, N = table.num_ticks, table.num_microbatches
    written, gradient = table.update_ticks_of_round(), table.weight_grad_ticks()
    updates_before = table.updates_before()
    field = "weight_grad" if table.splits_backward else "backward"
    for c in range(table.num_columns):
        number = int(table.updates_in_round[table.stage[c]])
        order = table.order_of_backwards
        order = order[gradient[order, c] != IDLE]
        # The end of each update's part of the column's microbatches, and those of the next minibatch.
        ends = np.searchsorted(updates_before[order, c], np.arange(number), side="right")
        microbatches = np.append(order, order[0] + N)
        ticks = np.append(gradient[order, c], gradient[order[0], c] + num_ticks)
        for i, end in enumerate(ends.tolist()):
            k, t = divmod(int(written[i, c]), num_ticks)
            version = 1 + i - number * k
            last, following = (
                f"{field} {microbatches[j] - N * k} (tick {ticks[j] - num_ticks * k})" for j in (end - 1, end)
            )
            if end > 0 and ticks[end - 1] > written[i, c]:
                message = f"before {last}, part of it"
            elif ticks[end] <= written[i, c]:
                message = f"not before {following}, part of update {version + 1}"
            else:
                continue
            raise ValueError(with_mark(table, f"update {version} {message}", t, c))


def _check_versions(table: Table) -> None:
    """No version is read before the tick after the one that writes it."""
    if table.forward_only:
        ticks, version = table.forward_ticks(), table.forward_versions()
        message = "forward {m} reads version {version}, but without updates all are 0"
        _require(table, version == 0, ticks, message, version=version)
        return
    for field in ("forward", "backward"):
        ticks = getattr(table, f"{field}_ticks")()
        version = getattr(table, f"{field}_versions")()
        written = table.written_ticks(version + table.updates_before())
        message = f"{field} {{m}} reads version {{version}}, written at tick {{other}}"
        _require(table, written < ticks, ticks, message, written, version)


RULES: tuple[Callable[[Table], None], ...] = (
    _check_columns,
    _check_slices,
    _check_arrived,
    _check_once,
    _check_order,
    _check_forward,
    _check_backward,
    _check_weight_grad,
    _check_update,
    _check_versions,
)
"""In the order in which they are checked: each may rely on those before it."""
