"""Norms over all stages count, for every stage, the gradient that it applied last, if it is not of a later version."""

import pytest
from families import schedule_named

from jpipe.lowering.norms import norm_table
from jpipe.schedule import IDLE
from jpipe.schedules import emulated, pipedream, pipemare

TABLES = {
    "gpipe": schedule_named("gpipe", 3, 4),
    "pipemare": pipemare(4, 2),
    "pipemare deep": pipemare(5, 1, ticks="paired"),
    "pipedream": pipedream(4, 8),
    "rhythms": pipedream(3, 12, update_every=(4, 3, 2)),
    "a slow last stage": pipedream(3, 6, "paired", update_every=(1, 2, 6)),
}


@pytest.mark.parametrize("name", TABLES)
def test_offsets_are_what_a_walk_over_the_table_finds(name):
    table = TABLES[name]
    S, rounds = table.num_stages, 14
    norms = norm_table(table)
    updates, period = norms.updates.tolist(), table.microbatches_per_update.tolist()
    latest, compared = [0] * S, 0
    for r in range(rounds):
        for t in range(table.num_ticks):
            written = {
                s: int(table.update[t, s]) + r * updates[s]
                for s in range(S)
                if table.update[t, s] != IDLE and table.update[t, s] + r * updates[s] >= 1
            }
            for s, version in written.items():
                latest[s] = version
            for s, version in written.items():
                k, n = divmod(version - 1, updates[s])
                for other in range(S):
                    # No gradient of a microbatch after those of the update.
                    counted = min(latest[other], version * period[s] // period[other])
                    if counted < 1:  # has no gradient yet
                        continue
                    assert 1 + n + norms.offset[n, s, other] + updates[other] * k == counted
                    # The row is not overwritten before it is read.
                    assert latest[other] - counted < norms.depth
                    same = written.get(other) == counted
                    assert norms.together[n, s, other] == same
                    compared += 1
            assert (norms.reporter[t] >= 0) == bool((table.update[t] != IDLE).any())
    assert compared > S * S


@pytest.mark.parametrize("name", TABLES)
def test_emulation_counts_what_the_pipeline_counts(name):
    table = TABLES[name]
    real, norms = norm_table(table), norm_table(emulated(table))
    assert norms.offset.tolist() == real.offset.tolist()
    assert norms.together.tolist() == real.together.tolist()
    if norms.updates.max() == 1:
        (reporter,) = set(norms.reporter.tolist()) - {-1}
        last_tick = max(t for t in range(table.num_ticks) if real.reporter[t] >= 0)
        assert reporter == real.reporter[last_tick]
    if norms.updates.max() == 1:
        assert norms.depth == 1 - norms.offset.min()
