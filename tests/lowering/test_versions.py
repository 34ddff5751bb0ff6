"""Versions of weights are in their rows when they are read, and no stage keeps more than it needs."""

import numpy as np
import pytest
from families import schedule_named

from jpipe.lowering.lower import lower
from jpipe.schedule import IDLE
from jpipe.schedules import emulated, pipedream, pipemare, with_delays

TABLES = {
    "gpipe": schedule_named("gpipe", 3, 4),
    "pipemare deep": pipemare(5, 1, ticks="paired"),
    "pipemare": pipemare(4, 2),
    "pipedream": schedule_named("pipedream", 4, 2),
    "2bw": schedule_named("pipedream_2bw", 3, 4),
    "copies": schedule_named("pipedream/2-1-1", 3, 4),
    "emulated deep": emulated(pipemare(5, 1, ticks="paired")),
    "emulated": emulated(schedule_named("pipedream", 4, 2)),
    "rhythms": pipedream(3, 12, update_every=(4, 3, 2)),
    "copies with rhythms": pipedream(2, 6, replicas=(3, 1), update_every=(3, 1)),
    "delays": with_delays([[3, 0, 7], [2, 1, 6]], 2, backward_delays=[0, 0, 5]),
}


def wrong_reads(table, num_versions, rounds=12):
    """Reads of a version that is not in its slot, by walking several rounds with `num_versions` slots a stage."""
    slots = [[0] * V for V in num_versions]  # all versions before the first update are 0
    wrong = 0
    for r in range(rounds):
        for t in range(table.num_ticks):
            for field in ("forward", "backward"):
                cells, version = (
                    getattr(table, field),
                    getattr(table, f"{field}_version"),
                )
                for c in np.flatnonzero(cells[t] != IDLE):
                    entered = cells[t, c] + r * table.num_microbatches >= 0
                    s = table.stage[c]
                    v = max(version[t, c] + r * table.updates_in_round[s], 0)
                    wrong += entered and slots[s][v % num_versions[s]] != v
            for c in np.flatnonzero(table.update[t] != IDLE):
                s = table.stage[c]
                v = table.update[t, c] + r * table.updates_in_round[s]
                if v >= 1:
                    slots[s][v % num_versions[s]] = v
    return wrong


@pytest.mark.parametrize("name", TABLES)
def test_every_version_is_in_its_slot_and_fewer_slots_do_not_do(name):
    table = TABLES[name]
    num_versions = lower(table).rows.num_versions
    assert not wrong_reads(table, num_versions)
    for s in range(table.num_stages):
        if num_versions[s] > 1:
            fewer = num_versions.copy()
            fewer[s] -= 1
            assert wrong_reads(table, fewer)


@pytest.mark.parametrize("name", [*TABLES, "two-columns"])
def test_rows_of_a_device_do_not_overlap(name):
    table = TABLES.get(name) or schedule_named(name, 4, 3)
    lowered = lower(table)
    rows, most = lowered.rows, 0
    for d in range(table.num_devices):
        taken = [
            i
            for s, copies in enumerate(lowered.copies)
            for device, chunk in copies
            if device == d
            for i in range(rows.num_rows)[rows.chunk_rows(s, d, chunk)]
        ]
        assert sorted(taken) == list(range(len(taken)))
        most = max(most, len(taken))
    assert most == rows.num_rows


def test_an_emulated_table_keeps_the_versions_that_its_delays_ask_for():
    assert lower(with_delays([4, 0, 2])).rows.num_versions.tolist() == [5, 1, 3]
