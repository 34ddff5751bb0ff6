"""Arrays have rows for the stages that use them, and no stage shares a row with another."""

import numpy as np
import pytest
from families import schedule_named

from jpipe.lowering.array_rows import ArrayRows
from jpipe.lowering.lower import lower
from jpipe.schedules import emulated, interleaved, pipemare

TABLES = {
    "emulated": emulated(pipemare(5, 1, ticks="paired")),
    "interleaved": interleaved(6, 6, num_chunks=2),
    "zero-bubble-v": schedule_named("zero_bubble_v", 6, 6),
    "pipedream": schedule_named("pipedream", 4, 2),
    "copies": schedule_named("pipedream/2-1-1", 3, 4),
}


@pytest.mark.parametrize("versions", [False, True])
@pytest.mark.parametrize("name", TABLES)
def test_every_stage_has_rows_of_its_own(name, versions):
    lowered = lower(TABLES[name])
    rng = np.random.default_rng(0)
    S, names = len(lowered.copies), ["all", "first", "last", "some", "none"]
    used = [{"all"} | set(rng.choice(["some"], rng.integers(2))) for _ in range(S)]
    used[0] |= {"first"}
    used[-1] |= {"last"}
    of = ArrayRows.per_version if versions else ArrayRows.per_stage
    rows = of(lowered, names, used)
    for array in names:
        taken = [[] for _ in range(rows.num_devices)]
        for s, copies in enumerate(lowered.copies):
            for d, chunk in copies:
                own = slice(chunk, chunk + 1)
                if versions:
                    own = lowered.rows.chunk_rows(s, d, chunk)
                if array not in used[s]:
                    if array in rows.tables:
                        assert rows.row(array, d, own.start) == -1
                    continue
                of_stage = rows.rows(array, d, own)
                assert of_stage.stop - of_stage.start == own.stop - own.start
                each = [rows.row(array, d, r) for r in range(own.start, own.stop)]
                assert each == list(range(of_stage.start, of_stage.stop))
                taken[d] += each
        for of_device in taken:
            assert len(set(of_device)) == len(of_device)
            assert set(of_device) <= set(range(rows.number(array)))
        # A device has no row more than the stages of some device need.
        assert rows.number(array) == max(1, *map(len, taken))


def test_arrays_that_all_stages_use_have_all_rows():
    lowered = lower(interleaved(4, 4, num_chunks=2))
    rows = ArrayRows.per_stage(lowered, ["a", "b"], [{"a"}] * 3 + [{"a", "b"}])
    assert set(rows.tables) == {"b"}
    assert (rows.number("a"), rows.number("b")) == (2, 1)


@pytest.mark.parametrize("name", TABLES)
def test_slots_have_rows_of_their_own(name):
    lowered = lower(TABLES[name])
    schedule, ring = lowered.schedule, lowered.rings["input_stash"]
    used = [{"all", "even" if s % 2 == 0 else "odd"} for s in range(schedule.num_stages)]
    names = ["all", "even", "odd"]
    rows = ArrayRows.per_slot(lowered, "input_stash", names, used)
    for array in names:
        slots = [set() for _ in range(rows.num_devices)]
        for c, of_column in enumerate(ring.slots):
            if array in used[schedule.stage[c]]:
                slots[schedule.device[c]] |= set(of_column.tolist())
        for d, of_device in enumerate(slots):
            own = {rows.row(array, d, slot) for slot in of_device}
            assert len(own) == len(of_device)
            assert own <= set(range(rows.number(array)))
        assert rows.number(array) == max(map(len, slots))


def test_slots_that_come_from_host_memory_have_all_arrays():
    lowered = lower(schedule_named("gpipe", 2, 4), stash_slots=3)
    used = [{"first"}, {"second"}]
    rows = ArrayRows.per_slot(lowered, "input_stash", ["first", "second"], used)
    assert not rows.tables and rows.number("first") == 3
