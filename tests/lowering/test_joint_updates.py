"""Updates of a synchronous table run in one tick, whatever its ticks are; other tables stay as they are."""

import dataclasses

import numpy as np
import pytest
from families import schedule_named
from random_tables import random_table

from jpipe.lowering.joint_updates import joint_updates
from jpipe.lowering.lower import lower
from jpipe.lowering.norms import norm_table
from jpipe.schedule import IDLE
from jpipe.schedules import emulated


def test_all_stages_of_a_synchronous_table_update_together():
    unlike = 0
    for seed in range(100):
        table = random_table(seed)
        unlike += np.unique(table.update_ticks()).size > 1
        joint = joint_updates(table).check()
        assert joint.update_ticks().tolist() == [table.update_ticks().max()] * (table.num_columns)
        for field in dataclasses.fields(table):
            if field.name != "update":
                before, after = getattr(table, field.name), getattr(joint, field.name)
                np.testing.assert_array_equal(before, after)
        # A norm, and a gradient that is not finite, are of all stages and of one minibatch.
        for norms in (norm_table(joint), norm_table(emulated(table))):
            assert not norms.offset.any() and norms.together.all()
    assert unlike > 50


def test_a_lowered_table_updates_after_every_gradient():
    for seed in range(20):
        table = random_table(seed)
        operations = lower(table).operations
        gradient = "weight_grad" if table.splits_backward else "backward"
        last = np.flatnonzero((operations[gradient].stage >= 0).any(axis=(1, 2)))[-1]
        (tick,) = np.flatnonzero((operations["update"].stage >= 0).any(axis=(1, 2)))
        assert tick >= last


@pytest.mark.parametrize("name", ["pipemare/unit", "pipedream/paired"])
def test_an_asynchronous_table_keeps_its_ticks(name):
    table = schedule_named(name, 3, 4)
    assert joint_updates(table) is table
    np.testing.assert_array_equal(lower(table).schedule.update != IDLE, table.update != IDLE)
