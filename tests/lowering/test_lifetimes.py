"""What a step keeps for later steps is there when it is read, in every asynchronous table, and is not kept longer."""

import functools
import itertools

import numpy as np
import pytest
from families import schedule_named
from random_tables import random_asynchronous_table

from jpipe.lowering.lower import kept_minibatches, kept_weights
from jpipe.lowering.norms import norm_table
from jpipe.lowering.versions import version_rows
from jpipe.schedule import IDLE
from jpipe.schedules import emulated, refusal

BUILDERS = [(name, ticks) for name in ("pipedream", "pipedream_2bw", "pipemare") for ticks in ("unit", "paired")]
EVERY_BUILDER = pytest.mark.parametrize("name,ticks", BUILDERS)


def tables(name, ticks):
    for S, N in itertools.product(range(1, 9), range(1, 17)):
        if refusal(name, S, N, ticks=ticks) is None:
            yield schedule_named(f"{name}/{ticks}", S, N)


def num_lost(table, cells, num_kept):
    """Reads of a minibatch that is not in its slot: minibatch b enters in round b, into slot b modulo `num_kept`."""
    slots, lost = [-1] * num_kept, 0
    minibatches = set((cells[cells != IDLE] // table.num_microbatches).tolist())
    for r in range(24):
        slots[r % num_kept] = r
        entered = [r + b for b in minibatches if r + b >= 0]
        lost += sum(slots[b % num_kept] != b for b in entered)
    return lost


def check_kept(table, cells, num_kept):
    assert num_lost(table, cells, num_kept) == 0
    assert num_kept == 1 or num_lost(table, cells, num_kept - 1) > 0


@pytest.mark.parametrize(
    "every",
    [functools.partial(tables, *builder) for builder in BUILDERS]
    + [lambda: map(random_asynchronous_table, range(200))],
    ids=[*map("/".join, BUILDERS), "random"],
)
def test_minibatches_and_their_weights(every):
    outlive = 0
    for table in every():
        last = table.stage == table.num_stages - 1
        ends = last | (table.stage == 0)
        both = np.concatenate([table.forward[:, ends], table.backward[:, ends]])
        check_kept(table, table.forward[:, ends], kept_minibatches(table, False))
        check_kept(table, both, kept_minibatches(table, True))
        check_kept(table, table.backward[:, last], kept_weights(table, False))
        # A head that all devices run takes the gradient of the loss in its forward.
        check_kept(table, table.forward[:, last], kept_weights(table, True))
        outlive += kept_weights(table, False) > kept_minibatches(table, False)
    assert outlive > 0  # weights that are read after their minibatch has gone


@EVERY_BUILDER
@pytest.mark.sampled(3)
def test_versions_of_weights(name, ticks):
    for built, emulate in itertools.product(tables(name, ticks), (False, True)):
        table = emulated(built) if emulate else built
        copies = [[(d, 0)] for d in range(table.num_stages)]
        if emulate:
            copies = [[(0, s)] for s in range(table.num_stages)]
        newest = np.zeros(table.num_stages, int)
        rows = version_rows(table, copies, max(c for ((_, c),) in copies) + 1, newest)
        overwritten = table.update_ticks() + table.num_ticks * (
            rows.num_versions[table.stage] - 1
        )  # in this tick, after its reads, version 0 is
        backward = table.backward_versions()
        for read, version in (
            (table.forward_ticks(), table.forward_versions()),
            (table.backward_ticks(), backward),
            (table.weight_grad_ticks(), backward),
        ):
            assert (read <= overwritten + table.num_ticks * version).all()


@EVERY_BUILDER
@pytest.mark.sampled(3)
def test_squared_norms(name, ticks):
    for built, emulate in itertools.product(tables(name, ticks), (False, True)):
        table = emulated(built) if emulate else built
        norms = norm_table(table)
        written = table.update_ticks()[table.column_of_stage]
        # In the tick in which stage i writes version 20, stage j has written this version last.
        latest = 20 + (written[:, None] - written[None]) // table.num_ticks
        counted = 20 + norms.offset[0]
        assert (counted <= latest).all() and (latest - counted < norms.depth).all()


def test_a_table_that_drains_keeps_one_minibatch():
    table = emulated(schedule_named("pipemare/unit", 2, 1))
    assert kept_minibatches(table, True) == kept_weights(table, False) == 1
