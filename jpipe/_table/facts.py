"""The facts of a table: bubble, activations in flight, delays and weight versions.

Letters: S stages, D devices, C columns, N microbatches, T ticks.
"""

import dataclasses
from typing import Any

import numpy as np

from jpipe._table.cells import IDLE
from jpipe._table.intervals import covering
from jpipe._table.table import Table


@dataclasses.dataclass(frozen=True, eq=False)
class Facts:
    """The costs of a table, counted off it with F = B = W = 1.

    Attributes:
      num_ticks: T.
      makespan: units of time of the whole table; each tick is as long as its busiest
        device works (see `Schedule.device_work`). Asynchronous: of one round.
      bubble: 1 - busy time / (devices x makespan).
      inner_bubble: the bubble between each device's first and last operation. It remains
        if the next minibatch fills both ends. Asynchronous: the bubble.
      in_flight: `[S]`, the largest number of microbatches that are between their forward
        and the end of their backward at the same time, the ticks of both included, on one
        copy of the stage.
      forward_delay: `[S]`, the largest number of versions between the weights that a
        forward reads and the weights that its gradient is applied to.
      backward_delay: `[S]`, the same for a backward.
      weight_versions: `[S]`, the largest number of versions that are live at the same
        time: the newest, and older ones that will still be read.
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
        """The facts as numbers and lists for JSON."""
        return {
            field.name: value.tolist() if isinstance(value, np.ndarray) else value
            for field in dataclasses.fields(self)
            for value in [getattr(self, field.name)]
        }


def facts(table: Table) -> Facts:
    """Counts the facts of a legal table."""
    work = table.device_work()
    length = work.max(axis=1)
    makespan = int(length.sum())
    span = table.num_devices * makespan
    inner_span = span
    if table.synchronous:
        at_work = work > 0
        begun = np.logical_or.accumulate(at_work)
        unfinished = np.logical_or.accumulate(at_work[::-1])[::-1]
        inner_span = int(((begun & unfinished) * length[:, None]).sum())

    num_ticks = table.num_ticks
    forward, forward_versions = table.forward_ticks(), table.forward_versions()
    backward_delay = np.zeros(table.num_stages, np.int64)
    weight_versions = np.ones(table.num_stages, np.int64)
    last = forward
    if not table.forward_only:
        backward = table.backward_ticks()
        backward_versions = table.backward_versions()
        backward_delay = _delay(table, backward_versions)
        last = table.weight_grad_ticks()
        weight_versions = _weight_versions(table, [(forward, forward_versions), (backward, backward_versions)])
    return Facts(
        num_ticks=num_ticks,
        makespan=makespan,
        bubble=(span - int(work.sum())) / span,
        inner_bubble=(inner_span - int(work.sum())) / inner_span,
        in_flight=_in_flight(table, forward, last),
        forward_delay=_delay(table, forward_versions),
        backward_delay=backward_delay,
        weight_versions=weight_versions,
    )


def _weight_versions(table: Table, reads: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """`[S]`, the most versions of the weights of each stage that are live at the same time; see `Facts`.

    Args:
      table: the table.
      reads: ticks `[N, C]` of forwards and of backwards, each with the versions that they read.
    """
    num_ticks, live = table.num_ticks, np.ones(table.num_stages, np.int64)
    written_of_round, before = table.update_ticks_of_round(), table.updates_before()
    for s, c in enumerate(table.column_of_stage):  # all copies update together
        number = int(table.updates_in_round[s])
        written = written_of_round[:number, c]
        # A version lives until its last read, and at least until the next one is written.
        until = np.append(written[1:], written[0] + num_ticks)
        here = table.stage == s
        for ticks, versions in reads:
            # A read of version 1 + i + u k at tick t means a read of version 1 + i at tick t - T k.
            k, i = np.divmod((versions + before)[:, here] - 1, number)
            runs = ticks[:, here] != IDLE
            np.maximum.at(until, i[runs], (ticks[:, here] - num_ticks * k)[runs])
        live[s] = covering(written + 1, until, num_ticks).max()
    return live


def _delay(table: Table, versions: np.ndarray) -> np.ndarray:
    """`[S]`, the largest delay of each stage, from the versions `[N, C]` that are read."""
    return -table.by_stage(versions).min(axis=0)


def _in_flight(table: Table, forward: np.ndarray, last: np.ndarray) -> np.ndarray:
    """`[S]`, the most microbatches of a stage in flight on one device; see `Facts`."""
    # A microbatch that runs in another column covers no tick.
    runs = forward != IDLE
    first, last = np.where(runs, forward, 0), np.where(runs, last, -1)
    in_column = covering(first, last, table.num_ticks)
    most = np.zeros(table.num_stages, np.int64)
    for s, copies in enumerate(table.columns_of_copies):
        for columns in copies:
            most[s] = max(most[s], in_column[:, columns].sum(axis=1).max())
    return most
