"""The scalars of a tick equal loops over the lowered table."""

import dataclasses

import numpy as np
import pytest
from families import schedule_named

from jpipe.lowering.lower import lower
from jpipe.lowering.scalars import scalar_table
from jpipe.lowering.tick_scalars import TickScalars
from jpipe.lowering.versions import VersionRows
from jpipe.schedules import emulated, pipedream

NEWEST = np.array([0, -1, -2, -1])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize(
    "name,S,N",
    [
        ("pipemare/unit", 4, 2),
        ("pipemare/unit", 2, 1),
        ("zero_bubble_v", 4, 4),
        ("two-columns", 4, 3),
        ("rhythms", 4, 4),
    ],
)
def test_scalars_are_what_the_table_says(name, S, N, newest, overlap):
    table = pipedream(S, N, update_every=(4, 1, 2, 2)) if name == "rhythms" else schedule_named(name, S, N)
    lowered = lower(table, overlap=overlap, weighted=True)
    stages = np.arange(S)
    of_stage = {("program",): stages % 3, ("length", 0): 5 + stages}
    of_update = {("program",): stages % 2, ("delay", "forward"): stages}
    fields = {**dict.fromkeys(lowered.operations, of_stage), "update": of_update}
    num_versions, started = [3, 1, 2, 4], 7
    # The stages of a device have their rows one after the other.
    first_row, of_device, free = {}, np.zeros((table.num_devices, S), int), {}
    for s, d in enumerate(table.device.tolist()):
        first_row[s] = free.get(d, 0)
        of_device[d, lowered.copies[s][0][1]] = first_row[s]
        free[d] = first_row[s] + num_versions[s]
    rows = VersionRows(np.array(num_versions), of_device, max(free.values()), NEWEST)
    if name == "rhythms":
        rows = dataclasses.replace(rows, updates=np.array([1, 4, 2, 2]))
    u = [1, 4, 2, 2] if name == "rhythms" else [1] * S
    scalars = scalar_table(lowered, fields, rows, newest)
    num_rows = lowered.num_batches * N
    checked = set()

    class Recorded(TickScalars):
        """Scalars of one tick, on the host, that note what is read."""

        def get(self, *name):
            checked.add(name)
            return int(self.values[self.table.index[name]])

    rounds = [(0, N), (2, 3 * N)]
    if not table.synchronous:  # others fill and drain
        rounds += [(0, 1), (3, 3 * N)]
    for r, entered in rounds:
        for d in range(table.num_devices):
            (of_device,) = scalars.rows(slice(d, d + 1))
            values = scalars.with_round(of_device, r, started, entered, N)
            values = np.asarray(values)
            for t in range(table.num_ticks):
                tick = Recorded(scalars, values[t])
                for kind, ops in lowered.operations.items():
                    for j in range(ops.num_lanes):
                        lane, s = tick.lane(kind, j), int(ops.stage[t, d, j])
                        m, position, v = (
                            int(getattr(ops, field)[t, d, j]) for field in ("microbatch", "position", "version")
                        )
                        if kind == "update":
                            now = s >= 0 and r * u[s] + v >= 1 and (r * u[s] + v) * N // u[s] <= entered
                        else:
                            now = s >= 0 and 0 <= r * N + m < entered
                        program = fields[kind][("program",)]
                        assert lane.program == (program[s] if now else -1)
                        if s < 0:
                            continue
                        version = max(r * u[s] + NEWEST[s], 0) if newest else r * u[s] + v
                        assert lane.absolute_version == version
                        V = num_versions[s]
                        assert lane.row == first_row[s] + version % V
                        assert lane.chunk == ops.chunk[t, d, j]
                        if kind == "update":
                            assert lane.delay("forward") == s
                            if not newest:
                                before = first_row[s] + (version - 1) % V
                                assert lane.previous_row == before
                            continue
                        assert lane.num_layers(0) == 5 + s
                        assert lane.microbatch_number == started + r * N + m
                        assert lane.completes_minibatch == (position % N == N - 1)
                        K = lowered.num_weights
                        assert lane.minibatch == (r + m // N) % K
                        batch_row = (r * N + m) % num_rows
                        assert lane.microbatch == (batch_row if lowered.num_batches > 1 else m)
                        for ring, slots in lowered.num_slots.items():
                            of_stage = lowered.rings[ring].slots[s]
                            if slots and len(of_stage):
                                slot = of_stage[(r * N + position) % len(of_stage)]
                                assert lane.slot(ring) == slot
                updated = np.flatnonzero((table.update[t] >= -N) | (table.update[t] == 1))
                assert tick.updates == (updated.size > 0)
                if updated.size:
                    order = table.update_ticks() % table.num_ticks
                    last = max(updated.tolist(), key=lambda c: (order[c], c))
                    assert tick.reporter == table.stage[last]
                else:
                    assert tick.reporter == -1
                for i, channel in enumerate(lowered.channels):
                    late = channel.late
                    assert tick.channel(i).sends == channel.sends[t]
                    assert tick.channel(i).lane == channel.lane[t - late, d]
                    for inbox, arrives in channel.arrives.items():
                        s, position = arrives[t, d].tolist()
                        slot = lowered.num_slots[inbox]  # the discard slot
                        if s >= 0:
                            of_stage = lowered.rings[inbox].slots[s]
                            slot = of_stage[(r * N + position) % len(of_stage)]
                        assert tick.channel(i).slot(inbox) == slot
    # A table that only runs forward reads the newest versions, and has no updates.
    unread = {name for name in scalars.index if newest and name[-1] == "previous_row"}
    assert checked == set(scalars.index) - unread


@pytest.mark.parametrize(
    "name,programs,expected",
    [
        ("gpipe", [2, 2, 2, 2], 2),
        ("gpipe", [0, 1, 1, 0], None),  # stages of two programs update
        ("pipemare/unit", [2, 2, 2, 2], None),  # an update waits for its minibatch
    ],
)
def test_a_program_that_all_devices_run_is_known(name, programs, expected):
    lowered = lower(schedule_named(name, 4, 4))
    of_stage = {("program",): np.array(programs)}
    fields = dict.fromkeys(lowered.operations, of_stage)
    rows = VersionRows(np.ones(4, int), np.zeros((4, 1), int), 1, np.zeros(4, int))
    scalars = scalar_table(lowered, fields, rows, newest=False)
    last = lowered.schedule.num_ticks - 1

    def known(ticks, operation="update"):
        return TickScalars(scalars, np.zeros(0), ticks).lane(operation, 0).only_program

    assert known(range(last, last + 1)) == expected
    assert known(None) is None
    assert known(range(1), "forward") is None  # the first stage alone runs
    assert known(range(1)) is None  # no device updates
    assert known(range(last + 1)) is None  # an update in one of the ticks


def test_an_asynchronous_table_that_drains_looks_at_what_has_entered():
    lowered = lower(emulated(pipedream(4, 4)))
    assert lowered.schedule.drains and not lowered.schedule.synchronous
    fields = dict.fromkeys(lowered.operations, {("program",): np.zeros(4, int)})
    rows = VersionRows(np.ones(4, int), np.zeros((1, 4), int), 1, np.zeros(4, int))
    scalars = scalar_table(lowered, fields, rows, newest=False)
    for t in range(lowered.schedule.num_ticks):
        lane = TickScalars(scalars, np.zeros(0), range(t, t + 1)).lane("update", 0)
        assert lane.only_program is None
