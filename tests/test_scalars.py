"""The scalars of a tick, against loops over the lowered table."""

import numpy as np
import pytest
from families import schedule_named

from jpipe.lowering.lower import lower
from jpipe.lowering.scalars import columns_of

NEWEST = np.array([0, -1, -2, -1])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("newest", [None, NEWEST])
@pytest.mark.parametrize(
    "name,S,N",
    [("pipemare/unit", 4, 2), ("zero_bubble_v", 4, 4), ("two-columns", 4, 3)],
)
def test_scalars_are_what_the_table_says(name, S, N, newest, overlap):
    table = schedule_named(name, S, N)
    lowered = lower(table, overlap=overlap)
    of_stage = {"program": np.arange(S) % 3, "length0": 5 + np.arange(S)}
    of_update = {"program": np.arange(S) % 2, "delay.forward": np.arange(S)}
    fields = {**dict.fromkeys(lowered.operations, of_stage), "update": of_update}
    V, started = 3, 7
    columns = columns_of(lowered, fields, V, newest)
    rows = lowered.num_batches * N
    checked = set()
    for r, fed in [(0, 1), (0, N), (2, 3 * N), (3, 3 * N)]:
        for d in range(table.num_devices):
            got = np.asarray(columns.of_device(d, r, started, fed, N))

            def equals(t, name, want, got=got):
                assert got[t, columns.index[name]] == want, (name, t)
                checked.add(name)

            for kind, ops in lowered.operations.items():
                for t, lane in np.ndindex(table.num_ticks, ops.num_lanes):
                    at, s = f"{kind}{lane}", int(ops.stage[t, d, lane])
                    m, place, v = (
                        int(getattr(ops, f)[t, d, lane])
                        for f in ("microbatch", "position", "version")
                    )
                    if kind == "update":
                        now = s >= 0 and r + v >= 1 and (r + v) * N <= fed
                    else:
                        now = s >= 0 and 0 <= r * N + m < fed
                    program = fields[kind]["program"]
                    equals(t, f"{at}.program", program[s] if now else -1)
                    if s < 0:
                        continue
                    version = r + v if newest is None else max(r + newest[s], 0)
                    equals(t, f"{at}.absolute_version", version)
                    equals(t, f"{at}.version", version % V)
                    equals(t, f"{at}.chunk", ops.chunk[t, d, lane])
                    if kind == "update":
                        equals(t, f"{at}.delay.forward", s)
                        continue
                    equals(t, f"{at}.length0", 5 + s)
                    equals(t, f"{at}.number", started + r * N + m)
                    equals(t, f"{at}.completes", place % N == N - 1)
                    batch_row = (r * N + m) % rows if lowered.num_batches > 1 else m
                    equals(t, f"{at}.microbatch", batch_row)
                    for ring, slots in lowered.num_slots.items():
                        if slots and lowered.depth[ring][s]:
                            slot = (r * N + place) % lowered.depth[ring][s]
                            equals(t, f"{at}.{ring}", lowered.offset[ring][s] + slot)
            for i, channel in enumerate(lowered.channels):
                late = channel.operation == "backward"
                for t in range(table.num_ticks):
                    equals(t, f"channel{i}.lane", channel.lane[t - late, d])
                    for inbox, arrives in channel.arrives.items():
                        s, place = arrives[t, d].tolist()
                        slot = lowered.num_slots[inbox]  # the bin
                        if s >= 0:
                            depth = lowered.depth[inbox][s]
                            slot = lowered.offset[inbox][s] + (r * N + place) % depth
                        equals(t, f"channel{i}.{inbox}", slot)
    assert checked == set(columns.index)
