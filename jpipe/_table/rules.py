"""What makes a table legal: one function per rule, all called by `Schedule.check`.

Letters: T ticks, t a tick; C columns, c a column; N microbatches, m a microbatch; k the
number of a round before the one that the table shows. Arrays `[N, C]` hold absolute ticks.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from jpipe._table.cells import IDLE
from jpipe._table.text import with_mark

if TYPE_CHECKING:
    from jpipe.schedule import Schedule


def _require(
    schedule: "Schedule",
    holds: np.ndarray,
    ticks: np.ndarray,
    message: str,
    other: np.ndarray | None = None,
    version: np.ndarray | None = None,
    previous: np.ndarray | None = None,
) -> None:
    """Raises for the first cell, in reading order, for which a rule does not hold.

    Args:
      schedule: the table.
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
    num_ticks, num_microbatches = schedule.num_ticks, schedule.num_microbatches
    broken = np.argwhere(~holds).tolist()
    m, c = min(broken, key=lambda cell: (ticks[*cell] % num_ticks, cell[1]))
    k, t = divmod(int(ticks[m, c]), num_ticks)
    text = message.format(
        m=m - num_microbatches * k,
        previous=None
        if previous is None
        else int(previous[m, c]) - num_microbatches * k,
        other=None if other is None else int(other[m, c]) - num_ticks * k,
        version=None if version is None else int(version[m, c]) - k,
    )
    raise ValueError(with_mark(schedule, text, t, c))


def _check_columns(schedule: "Schedule") -> None:
    """Stages are 0 .. S-1, devices 0 .. D-1, none is missing."""
    for word, values in (("stage", schedule.stage), ("device", schedule.device)):
        if (values < 0).any():
            c = int(np.argmin(values))
            message = f"{word} {values[c]} is negative; {word}s are counted from 0"
            raise ValueError(with_mark(schedule, message, None, c))
        # A number may be as large as int32 allows, so nothing here takes time or memory for each below it.
        (gaps,) = np.nonzero(np.unique(values) != np.arange(np.unique(values).size))
        if gaps.size:
            c = int(np.argmax(values))
            message = f"there is a {word} {values[c]} but no {word} {gaps[0]}"
            raise ValueError(with_mark(schedule, message, None, c))


def _check_arrived(schedule: "Schedule") -> None:
    """No microbatch belongs to a minibatch that has not arrived."""
    for field in ("forward", "backward", "weight_grad"):
        cells = getattr(schedule, field)
        for t, c in np.argwhere(cells >= schedule.num_microbatches)[:1].tolist():
            message = (
                f"{field} {cells[t, c]} belongs to a later minibatch; microbatches are "
                f"at most {schedule.num_microbatches - 1}"
            )
            raise ValueError(with_mark(schedule, message, t, c))


def _check_once(schedule: "Schedule") -> None:
    """Every stage runs each operation once per microbatch, and every column updates once.

    All operations of a microbatch on a stage are in one column. A forward-only table has no
    backward and no update at all.
    """
    fields = ["forward"]
    if not schedule.forward_only:
        fields += ["backward"] + ["weight_grad"] * schedule.splits_backward
    column_of = np.full((schedule.num_stages, schedule.num_microbatches), -1)
    for field in fields:
        _check_field_once(schedule, field, column_of)
    without = ~np.isin(np.arange(schedule.num_columns), column_of)
    for c in np.flatnonzero(without)[:1].tolist():
        message = "a column without a microbatch; leave the column out"
        raise ValueError(with_mark(schedule, message, None, c))
    if not schedule.forward_only:
        _check_updates_once(schedule)


def _check_field_once(schedule: "Schedule", field: str, column_of: np.ndarray) -> None:
    """`_check_once` for one kind of operation.

    Args:
      schedule: the table.
      field: of the operation.
      column_of: int `[S, N]`, the column that runs each microbatch of each stage; forwards fill it in.
    """
    cells, N = getattr(schedule, field), schedule.num_microbatches
    t, c = np.nonzero(cells != IDLE)
    m, s = cells[t, c] % N, schedule.stage[c]
    _, first, operation = np.unique(
        s.astype(np.int64) * N + m, return_index=True, return_inverse=True
    )
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
        raise ValueError(with_mark(schedule, message, tick, column))
    runs = np.zeros(column_of.shape, bool)
    runs[s, m] = True
    for stage in () if runs.all() else dict.fromkeys(schedule.stage.tolist()):
        for microbatch in np.flatnonzero(~runs[stage])[:1].tolist():
            column = int(column_of[stage, microbatch])
            if column < 0:
                column = schedule.stage.tolist().index(stage)
            message = f"microbatch {microbatch} has no {field}"
            raise ValueError(with_mark(schedule, message, None, column))


def _check_updates_once(schedule: "Schedule") -> None:
    """Every column updates once, all columns of a stage in the same tick."""
    for c, updates in enumerate((schedule.update != IDLE).T):
        if not updates.any():
            raise ValueError(with_mark(schedule, "there is no update", None, c))
        if updates.sum() > 1:
            first, second = np.flatnonzero(updates)[:2].tolist()
            message = (
                f"update {schedule.update[second, c]} is a second one (the first is at "
                f"tick {first})"
            )
            raise ValueError(with_mark(schedule, message, second, c))
    written = schedule.update_ticks()
    together = written[schedule.column_of_stage][schedule.stage]
    for c in np.flatnonzero(written != together)[:1].tolist():
        t = int(written[c]) % schedule.num_ticks
        other = int(together[c]) % schedule.num_ticks
        message = (
            f"update {schedule.update[t, c]} is not in the tick of the other columns of "
            f"stage {schedule.stage[c]} (tick {other}, update "
            f"{schedule.update[other, schedule.column_of_stage[schedule.stage[c]]]})"
        )
        raise ValueError(with_mark(schedule, message, t, c))


def _check_order(schedule: "Schedule") -> None:
    """A column takes its microbatches in order, so every buffer can be a ring."""
    for field in ("forward", "backward", "weight_grad"):
        if (getattr(schedule, field) == IDLE).all():
            continue
        ticks = getattr(schedule, f"{field}_ticks")()
        before, previous = np.full((2, *ticks.shape), IDLE, np.int64)
        for c in range(schedule.num_columns):
            (m,) = np.nonzero(ticks[:, c] != IDLE)
            before[m, c], previous[m, c] = np.roll(ticks[m, c], 1), np.roll(m, 1)
            before[m[0], c] -= schedule.num_ticks
            previous[m[0], c] -= schedule.num_microbatches
        message = f"{field} {{m}} before {field} {{previous}} (tick {{other}})"
        _require(schedule, ticks > before, ticks, message, before, previous=previous)


def _arrival(schedule: "Schedule", ticks: np.ndarray, offset: int) -> np.ndarray:
    """`[N, C]`, the first tick at which the message of another stage can be read.

    Args:
      schedule: the table.
      ticks: `[N, C]`, ticks of the operation that sends and of the one that reads.
      offset: of the stage that sends, from the stage that reads: -1 or 1.
    """
    sent = schedule.by_stage(ticks) + 1
    arrival = np.full_like(ticks, IDLE)
    for s in range(max(0, -offset), schedule.num_stages - max(0, offset)):
        here = schedule.stage == s
        arrival[:, here] = sent[:, s + offset, None]
    return arrival


def _check_forward(schedule: "Schedule") -> None:
    """A forward starts after its input has arrived."""
    ticks = schedule.forward_ticks()
    arrival = _arrival(schedule, ticks, -1)
    message = "forward {m} before its input can be read (tick {other})"
    _require(schedule, ticks >= arrival, ticks, message, arrival)


def _check_backward(schedule: "Schedule") -> None:
    """A backward starts after its forward, and after its output's gradient has arrived."""
    if schedule.forward_only:
        return
    forward, ticks = schedule.forward_ticks(), schedule.backward_ticks()
    message = "backward {m} before its forward (tick {other})"
    _require(schedule, ticks >= forward, ticks, message, forward)
    arrival = _arrival(schedule, ticks, 1)
    message = "backward {m} before its gradient can be read (tick {other})"
    _require(schedule, ticks >= arrival, ticks, message, arrival)


def _check_weight_grad(schedule: "Schedule") -> None:
    """A weight gradient comes in the tick of its backward or later."""
    if schedule.splits_backward:
        backward, ticks = schedule.backward_ticks(), schedule.weight_grad_ticks()
        message = "weight_grad {m} before its backward (tick {other})"
        _require(schedule, ticks >= backward, ticks, message, backward)


def _check_update(schedule: "Schedule") -> None:
    """An update follows all gradients that it applies and precedes all others."""
    if schedule.forward_only:
        return
    num_ticks, N = schedule.num_ticks, schedule.num_microbatches
    written, gradient = schedule.update_ticks(), schedule.weight_grad_ticks()
    field = "weight_grad" if schedule.splits_backward else "backward"
    for c in range(schedule.num_columns):
        k, t = divmod(int(written[c]), num_ticks)
        version = 1 - k
        (microbatches,) = np.nonzero(gradient[:, c] != IDLE)
        first, last = microbatches[[0, -1]].tolist()
        last_tick = int(gradient[last, c])
        next_tick = int(gradient[first, c]) + num_ticks  # of the next minibatch
        if last_tick > written[c]:
            message = (
                f"before {field} {last + N * (version - 1)} (tick "
                f"{last_tick - num_ticks * k}), part of it"
            )
        elif next_tick <= written[c]:
            message = (
                f"not before {field} {first + N * version} (tick "
                f"{next_tick - num_ticks * k}), part of update {version + 1}"
            )
        else:
            continue
        raise ValueError(with_mark(schedule, f"update {version} {message}", t, c))


def _check_versions(schedule: "Schedule") -> None:
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


RULES: tuple[Callable[["Schedule"], None], ...] = (
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
"""In the order in which they are checked: each may rely on those before it."""
