"""The tables of the explorer page, as the builders of `jpipe.schedules` write them.

    python docs/explorer_tables.py OUT.js

`make docs` writes them beside the page's script, which draws and times them and knows no schedule.
"""

import inspect
import itertools
import json
import pathlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

import jpipe
from jpipe import Schedule, simulate
from jpipe.schedule import IDLE
from jpipe.schedules.arguments import TICKS

DEVICES, MICROBATCHES = (2, 4, 8), (2, 4, 8, 16)
FREE = simulate.Costs(forward=0, backward=0, weight_grad=0, transfer=1)
"""Only messages take time."""


def choices() -> Iterator[tuple[str, str, int, int]]:
    """Name, ticks, devices and microbatches of each table; "" for ticks that a builder has no choice of."""
    for name in jpipe.schedules.names():
        has_ticks = "ticks" in inspect.signature(jpipe.schedules.get(name)).parameters
        for ticks, devices, microbatches in itertools.product(TICKS if has_ticks else ("",), DEVICES, MICROBATCHES):
            stages = devices * jpipe.schedules.stages_per_device(name, 2)[0]
            options = {"ticks": ticks} if ticks else {}
            if jpipe.schedules.refusal(name, stages, microbatches, **options) is None:
                yield name, ticks, devices, microbatches


def table(name: str, ticks: str, devices: int, microbatches: int) -> Schedule:
    """The table of a choice; of schedules with several stages per device, the fewest."""
    stages = devices * jpipe.schedules.stages_per_device(name, 2)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # few microbatches: the page shows the bubble
        return jpipe.schedules.get(name)(stages, microbatches, **({"ticks": ticks} if ticks else {}))


def record(schedule: Schedule) -> dict[str, Any]:
    """A table for the page.

    Returns:
      "ticks": for each tick and device its operations in order, such as "F3@1", microbatch 3 on stage 1; D is a
        backward that computes both gradients, U an update.
      "waits": for each tick the messages for which the devices have waited before it, in a row; the last entry is
        that of the whole table.
      and the facts that do not depend on costs.
    """
    kinds = {"forward": "F", "backward": "B" if schedule.splits_backward else "D", "weight_grad": "W"}
    cells: list[list[list[str]]] = [[[] for _ in range(schedule.num_devices)] for _ in range(schedule.num_ticks)]
    for field, letter in [*kinds.items(), ("update", "U")]:
        for t, c in np.argwhere(getattr(schedule, field) != IDLE).tolist():
            m = int(getattr(schedule, field)[t, c]) % schedule.num_microbatches
            number = "" if letter == "U" else m
            cells[t][int(schedule.device[c])].append(f"{letter}{number}@{schedule.stage[c]}")
    facts = schedule.facts()
    return {
        "stages": schedule.num_stages,
        "synchronous": schedule.synchronous,
        "ticks": [[" ".join(each) for each in tick] for tick in cells],
        "waits": waits(schedule),
        "in_flight": facts.in_flight.tolist(),
        "forward_delay": facts.forward_delay.tolist(),
        "backward_delay": facts.backward_delay.tolist(),
        "weight_versions": facts.weight_versions.tolist(),
    }


def waits(schedule: Schedule) -> list[int]:
    """The messages before each tick, and of the table, for which devices wait one after the other."""
    timing = simulate.simulate(schedule, FREE)
    before = np.full(schedule.num_ticks + 1, np.nan)
    ticks = {"forward": schedule.forward_ticks, "backward": schedule.backward_ticks}
    ticks["weight_grad"] = schedule.weight_grad_ticks
    for kind, starts in timing.start.items():
        # In an asynchronous table an operation may be one of a later round.
        rounds, tick = np.divmod(ticks[kind](), schedule.num_ticks)
        runs = ~np.isnan(starts)
        before[tick[runs]] = (starts - rounds * timing.makespan)[runs]
    before[-1] = timing.makespan
    for t in reversed(range(schedule.num_ticks)):  # a tick with nothing to do
        if np.isnan(before[t]):
            before[t] = before[t + 1]
    return before.astype(int).tolist()


def script() -> str:
    """The script that hands the tables to the page: "name/ticks/devices/microbatches" -> table."""
    records = {"/".join(map(str, choice)): record(table(*choice)) for choice in choices()}
    return f"window.JPIPE_TABLES = {json.dumps(records, separators=(',', ':'))};\n"


if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).write_text(script())
