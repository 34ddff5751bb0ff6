"""The table: what it accepts, what it counts, how it reads and writes."""

import dataclasses
import itertools
import json
import tracemalloc
import warnings

import numpy as np
import pytest

import jpipe
from jpipe import schedules
from jpipe._table.counts import check_counts
from jpipe.lowering.lower import lower
from jpipe.schedule import IDLE, Schedule, newest_version
from jpipe.schedules._search import _memory as memory_of_activations

FLUSH = """
0@0    1@1
F0     .
F1     F0
.      F1,B0
B0     B1
B1,U1  U1
"""

SPLIT = """
0@0    1@1
F0     .
F1     F0
.      B0
B0     W0
W0     F1
.      B1
B1     W1,U1
W1,U1  .
"""

# Two stages, one microbatch a minibatch, a tick a round: delay 3 on stage 0 and 1 on
# stage 1. The backward reads the version its forward read, or the newest.
PIPEDREAM = """
0@0               1@1
F0@-3,B-3@-6,U-2  F-1@-2,B-2@-3,U-1
"""
PIPEMARE = """
0@0               1@1
F0@-3,B-3@-3,U-2  F-1@-2,B-2@-2,U-1
"""

FIELDS = [f.name for f in dataclasses.fields(Schedule) if f.name not in ("emulates", "num_slices", "message_ticks")]
CELLS = FIELDS[4:]


def paired(num_stages: int, num_microbatches: int, stash: bool, name: str = "paired") -> Schedule:
    """The asynchronous paired table; `stash`: backward reads what forward read."""
    s, m = np.arange(num_stages), np.arange(num_microbatches)[:, None]
    forward, backward = m + s, m + 2 * num_stages - 1 - s
    version = newest_version(forward, backward[-1], num_microbatches)
    return Schedule.from_ticks(
        name,
        forward,
        backward,
        num_ticks=num_microbatches,
        backward_version=version if stash else None,
    )


def unit(num_stages: int, num_microbatches: int) -> Schedule:
    """The asynchronous table of unit ticks: F B W in turn on every device."""
    s, m = np.arange(num_stages), np.arange(num_microbatches)[:, None]
    backward = 3 * m + 3 * num_stages - 2 - s
    return Schedule.from_ticks("unit", 3 * m + 2 * s, backward, backward + 1, num_ticks=3 * num_microbatches)


# -- The record -----------------------------------------------------------------------


def test_arrays_are_int32_and_read_only():
    schedule = Schedule.from_text(FLUSH)
    for field in FIELDS[2:]:
        array = getattr(schedule, field)
        assert array.dtype == np.int32
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.name = "other"


def test_the_record_copies_what_it_is_given():
    schedule = Schedule.from_text(FLUSH)
    stage = np.array([0, 1])
    copy = dataclasses.replace(schedule, stage=stage)
    stage[0] = 7
    assert copy == schedule


def test_sizes():
    schedule = Schedule.from_text("1@0 0@0 2@1\n" + ". F0 .\n" + "F0 . .\n" + ". . F0\n")
    assert schedule.num_ticks == 3
    assert schedule.num_columns == 3
    assert schedule.num_stages == 3
    assert schedule.num_devices == 2
    assert schedule.num_microbatches == 1
    assert repr(schedule) == ("Schedule('table', num_stages=3, num_devices=2, num_microbatches=1, num_ticks=3)")


@pytest.mark.parametrize(
    ("text", "synchronous", "splits_backward", "forward_only"),
    [
        (FLUSH, True, False, False),
        (SPLIT, True, True, False),
        (PIPEDREAM, False, False, False),
        (PIPEMARE, False, False, False),
        ("0@0\nF0\n", True, False, True),
        ("0@0\nF0\nB0,U1\n", True, False, False),
        ("0@0\nF0@-1\nB0,U1\n", False, False, False),
    ],
)
def test_kind(text, synchronous, splits_backward, forward_only):
    schedule = Schedule.from_text(text).check()
    assert schedule.synchronous == synchronous
    assert schedule.splits_backward == splits_backward
    assert schedule.forward_only == forward_only


def test_equality_and_hash():
    schedule = Schedule.from_text(FLUSH)
    assert schedule == Schedule.from_text(FLUSH)
    assert hash(schedule) == hash(Schedule.from_text(FLUSH))
    assert schedule != Schedule.from_text(FLUSH, name="other")
    assert schedule != Schedule.from_text(FLUSH.replace(",U1  U1", "     U1"))
    assert schedule != "0@0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_microbatches": 0},
            "`num_microbatches` must be an integer of at least 1",
        ),
        (
            {"stage": np.array([0, 1, 2])},
            r"`stage` must have shape \(2,\).* got \(3,\)",
        ),
        ({"update": np.full((4, 2), IDLE)}, r"`update` must have shape \(5, 2\)"),
        (
            {"forward": np.zeros(5, int)},
            r"`forward` must have shape \[ticks, columns\]",
        ),
        ({"forward": np.zeros((0, 2), int)}, "at least one of each"),
        ({"device": np.array([0.0, 1.0])}, "`device` must hold integers.*float64"),
        ({"device": np.array([0, 2**31])}, "`device` must fit int32"),
        (
            {"forward_version": np.zeros((5, 2), int)},
            "`forward_version` must be `IDLE` exactly .* tick 0, column 1",
        ),
        (
            {"backward": np.full((5, 2), IDLE)},
            "`backward_version` must be `IDLE` exactly .* tick 2, column 1",
        ),
    ],
)
def test_a_record_of_the_wrong_shape_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(Schedule.from_text(FLUSH), **change)


@pytest.mark.parametrize("count", [0, -1, 2.0, "4", None, True])
def test_counts(count):
    check_counts(num_stages=1, num_microbatches=np.int64(3))
    with pytest.raises(ValueError, match="`num_stages` must be .* Pass 1 or more") as info:
        check_counts(num_stages=count)
    assert f"got {count!r}" in str(info.value)


# -- Absolute time --------------------------------------------------------------------


def test_ticks_of_a_synchronous_table_are_its_rows():
    schedule = Schedule.from_text(SPLIT)
    assert schedule.forward_ticks().tolist() == [[0, 1], [1, 4]]
    assert schedule.backward_ticks().tolist() == [[3, 2], [6, 5]]
    assert schedule.weight_grad_ticks().tolist() == [[4, 3], [7, 6]]
    assert schedule.update_ticks().tolist() == [7, 6]
    assert schedule.forward_versions().tolist() == [[0, 0], [0, 0]]
    assert schedule.backward_versions().tolist() == [[0, 0], [0, 0]]


def test_ticks_of_an_asynchronous_table_go_on_past_the_round():
    schedule = Schedule.from_text(PIPEDREAM)
    assert schedule.forward_ticks().tolist() == [[0, 1]]
    assert schedule.backward_ticks().tolist() == [[3, 2]]
    assert schedule.weight_grad_ticks().tolist() == [[3, 2]]
    assert schedule.update_ticks().tolist() == [3, 2]
    assert schedule.forward_versions().tolist() == [[-3, -1]]
    assert schedule.backward_versions().tolist() == [[-3, -1]]
    assert Schedule.from_text(PIPEMARE).backward_versions().tolist() == [[0, 0]]


def test_what_a_column_does_not_run_is_idle():
    replicated = Schedule.from_text("0@0 0@1\nF0 F1\n")
    assert replicated.num_microbatches == 2
    assert replicated.has_copies and replicated.copies == ((0, 1),)
    assert replicated.column_of_microbatch.tolist() == [[0], [1]]
    assert replicated.forward_ticks().tolist() == [[0, IDLE], [IDLE, 0]]
    assert replicated.backward_ticks().tolist() == [[IDLE, IDLE]] * 2
    assert replicated.update_ticks().tolist() == [IDLE, IDLE]


# -- Legality -------------------------------------------------------------------------

BROKEN = {
    "a stage left out": (
        "0@0 2@1\nF0 .\n. F0\n",
        "stage 2: there is a stage 2 but no stage 1",
        "         0@0   [2@1]  <-- here",
    ),
    "a device left out": (
        "0@1 1@1\nF0 .\n. F0\n",
        "stage 0: there is a device 1 but no device 0",
        "        [0@1]   1@1  <-- here",
    ),
    "a column without work": (
        "0@0 1@1 0@2\nF0 . .\n. F0 .\n",
        "stage 0, device 2: a column without a microbatch; leave the column out",
        "         0@0    1@1   [0@2]  <-- here",
    ),
    "one microbatch on two copies": (
        "0@0 0@1\nF0 F0\nF1 .\n",
        "tick 0, stage 0, device 1: forward 0 runs twice (also at tick 0 in another column of stage 0)",
        "tick 0   F0    [F0]  <-- here",
    ),
    "a backward on another copy": (
        "0@0 0@1\nF0 F1\nB1 B0\nU1 U1\n",
        "tick 1, stage 0, device 0: backward 1 is not in the column of its forward, which has what it needs",
        "tick 1  [B1]    B0  <-- here",
    ),
    "a microbatch on no copy": (
        "0@0 0@1 1@2\nF0 F1 .\n. . F0\n. . F1\n. . F2\n",
        "stage 0, device 0: microbatch 2 has no forward",
        "        [0@0]   0@1    1@2  <-- here",
    ),
    "copies that update apart": (
        "0@0 0@1\nF0 F1\nB0 B1\nU1 .\n. U1\n",
        "tick 3, stage 0, device 1: update 1 is not in the tick of the other columns of stage 0 (tick 2, update 1)",
        "tick 3   .     [U1]  <-- here",
    ),
    "an update before another copy's gradient": (
        "0@0 0@1\nF0 F1\nB0 .\nU1 U1\n. B1\n",
        "tick 2, stage 0, device 1: update 1 before backward 1 (tick 3), part of it",
        "tick 2   U1    [U1]  <-- here",
    ),
    "an input of another copy": (
        "0@0 0@1 1@2\nF0 . .\n. F1 F0\n. . F1\n. F3 .\nF2 . F2\n. . F3\n",
        "tick 4, stage 1, device 2: forward 2 before its input can be read (tick 5)",
        "tick 4   F2     .     [F2]  <-- here",
    ),
    "a microbatch of the next minibatch": (
        "0@0 1@1\nF0 .\nF2 F0\n. F1\n",
        "tick 1, stage 0: forward 2 belongs to a later minibatch; " + "microbatches are at most 1",
        "tick 1  [F2]    F0  <-- here",
    ),
    "forward twice": (
        "0@0 1@1\nF0 .\nF0 F0\n. F1\n",
        "tick 1, stage 0: forward 0 runs twice (also at tick 0)",
        "tick 1  [F0]    F0  <-- here",
    ),
    "the same microbatch of two rounds": (
        "0@0\nF0,B0,U1\nF1,B-2\n",
        "tick 1, stage 0: backward -2 runs twice (also at tick 0)",
        "tick 1  [F1,B-2]  <-- here",
    ),
    "no backward": (
        "0@0 1@1\nF0 .\n. F0,B0\n. U1\n",
        "stage 0: microbatch 0 has no backward",
        "        [0@0]   1@1  <-- here",
    ),
    "no weight gradient": (
        SPLIT.replace("B1     W1,U1", "B1     U1"),
        "stage 1: microbatch 1 has no weight_grad",
        "         0@0     [1@1]  <-- here",
    ),
    "an update without gradients": (
        "0@0\nF0\nU1\n",
        "stage 0: microbatch 0 has no backward",
        "        [0@0]  <-- here",
    ),
    "no update": (
        "0@0 1@1\nF0 .\n. F0,B0\nB0,U1 .\n",
        "stage 1: there is no update",
        "         0@0     [1@1]  <-- here",
    ),
    "two updates": (
        "0@0 1@1\nF0 .\n. F0,B0,U1\nB0,U1 U2\n",
        "tick 2, stage 1: update 2 is a second one (the first is at tick 1), and 2 updates cannot have equal parts of 1 "
        "microbatches",
        "tick 2   B0,U1   [U2]  <-- here",
    ),
    "forward out of order": (
        "0@0 1@1\nF0 .\nF1 .\n. F1\n. F0\n",
        "tick 2, stage 1: forward 1 before forward 0 (tick 3)",
        "tick 2   .     [F1]  <-- here",
    ),
    "backward out of order": (
        "0@0\nF0\nF1\nB1\nB0,U1\n",
        "tick 2, stage 0: backward 1 before backward 0 (tick 3)",
        "tick 2  [B1]  <-- here",
    ),
    "weight gradient out of order": (
        "0@0\nF0,B0\nF1,B1,W1\nW0,U1\n",
        "tick 1, stage 0: weight_grad 1 before weight_grad 0 (tick 2)",
        "tick 1  [F1,B1,W1]  <-- here",
    ),
    "input not there yet": (
        "0@0 1@1\nF0 F0\nF1 .\n. F1\n",
        "tick 0, stage 1: forward 0 before its input can be read (tick 1)",
        "tick 0   F0    [F0]  <-- here",
    ),
    "backward before forward": (
        "0@0\nB0\nF0,U1\n",
        "tick 0, stage 0: backward 0 before its forward (tick 1)",
        "tick 0  [B0]  <-- here",
    ),
    "backward before forward, rounds apart": (
        "0@0\nF-2@-3,B0,U1\n",
        "tick 0, stage 0: backward 0 before its forward (tick 2)",
        "tick 0  [F-2@-3,B0,U1]  <-- here",
    ),
    "gradient not there yet": (
        "0@0 1@1\nF0 .\n. F0\nB0 B0\nU1 U1\n",
        "tick 2, stage 0: backward 0 before its gradient can be read (tick 3)",
        "tick 2  [B0]    B0  <-- here",
    ),
    "weight gradient before backward": (
        "0@0\nF0,W0\nB0,U1\n",
        "tick 0, stage 0: weight_grad 0 before its backward (tick 1)",
        "tick 0  [F0,W0]  <-- here",
    ),
    "update before its gradient": (
        "0@0\nF0\nF1,B0,U1\nB1\n",
        "tick 1, stage 0: update 1 before backward 1 (tick 2), part of it",
        "tick 1  [F1,B0,U1]  <-- here",
    ),
    "update before its split gradient": (
        "0@0\nF0\nB0,U1\nW0\n",
        "tick 1, stage 0: update 1 before weight_grad 0 (tick 2), part of it",
        "tick 1  [B0,U1]  <-- here",
    ),
    "update after the next gradient": (
        "0@0\nF0@-1,B0@-1,U0\n",
        "tick 0, stage 0: update 0 not before backward 0 (tick 0), part of update 1",
        "tick 0  [F0@-1,B0@-1,U0]  <-- here",
    ),
    "a version not yet written": (
        "0@0\nF0\nF1@1,B0\nB1,U1\n",
        "tick 1, stage 0: forward 1 reads version 1, written at tick 2",
        "tick 1  [F1@1,B0]  <-- here",
    ),
    "a version written in the same tick": (
        "0@0\nF0@-1,B-1@0,U0\n",
        "tick 0, stage 0: backward -1 reads version 0, written at tick 0",
        "tick 0  [F0@-1,B-1,U0]  <-- here",
    ),
    "a version without updates": (
        "0@0\nF0\nF1@-1\n",
        "tick 1, stage 0: forward 1 reads version -1, but without updates all are 0",
        "tick 1  [F1@-1]  <-- here",
    ),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_table_prints_itself_with_the_cell_marked(rule):
    text, message, marked = BROKEN[rule]
    schedule = Schedule.from_text(text, name="mine")
    with pytest.raises(ValueError) as info:
        schedule.check()
    first, *table = str(info.value).splitlines()
    assert first == f"schedule 'mine', {message}"
    assert len(table) == 1 + schedule.num_ticks
    assert [line for line in table if "<--" in line] == [marked]


@pytest.mark.parametrize("field", ["stage", "device"])
def test_negative_places(field):
    schedule = Schedule.from_text(FLUSH)
    broken = dataclasses.replace(schedule, **{field: np.array([0, -1])})
    with pytest.raises(ValueError, match=f"{field} -1 is negative.*counted from 0"):
        broken.check()


def test_facts_refuse_a_broken_table():
    with pytest.raises(ValueError, match="<-- here"):
        Schedule.from_text("0@0\nB0\nF0,U1\n").facts()


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # few microbatches
    TWO_COPIES = jpipe.schedules.gpipe(2, 2, replicas=(2, 1))


def rhythm(*arguments, **options) -> Schedule:
    """PipeDream with an update rhythm for each stage, under a name that says so."""
    table = jpipe.schedules.pipedream(*arguments, **options)
    return dataclasses.replace(table, name=f"updates every {options['update_every']}")


def walks(schedule: Schedule, num_rounds: int = 8) -> bool:
    """Whether rounds run one after another, from an empty pipeline, never go wrong.

    The rules again, as a plain simulation with counters: microbatches and versions
    below 0 belong to before the start.
    """
    num_microbatches, num_ticks = schedule.num_microbatches, schedule.num_ticks
    columns = range(schedule.num_columns)
    stage = schedule.stage.tolist()
    done = {}  # (field, stage, microbatch): absolute tick
    latest = {(field, c): -1 for field in CELLS for c in columns}
    runs_in = {}  # (stage, microbatch): column
    # How many times a stage updates in a round; a number that has no equal parts of the minibatch goes wrong.
    updates = {s: max(int((schedule.update[:, c] != IDLE).sum()) for c in columns if stage[c] == s) for s in stage}
    if any(u == 0 or num_microbatches % u for u in updates.values()):
        return False
    written = {s: [-1] for s in stage}  # absolute tick of each version

    def read(s: int, version: int, now: int) -> bool:
        return version < len(written[s]) and written[s][max(version, 0)] < now

    for now in range(num_rounds * num_ticks):
        k, t = divmod(now, num_ticks)
        for field, c in itertools.product(CELLS[:3], columns):
            if (number := int(getattr(schedule, field)[t, c])) == IDLE:
                continue
            if (m := number + num_microbatches * k) < 0:
                continue
            s = stage[c]
            if m <= latest[field, c] or m >= num_microbatches * (k + 1):
                return False
            if (field, s, m) in done or runs_in.setdefault((s, m), c) != c:
                return False
            latest[field, c] = m
            done[field, s, m] = now
            sender = {"forward": s - 1, "backward": s + 1}.get(field)
            if sender in stage and not (done.get((field, sender, m), now) < now):
                return False
            before = {"backward": "forward", "weight_grad": "backward"}.get(field)
            if before and (before, s, m) not in done:
                return False
            if field != "weight_grad":
                version = int(getattr(schedule, f"{field}_version")[t, c]) + k * updates[s]
                if not read(s, version, now):
                    return False
        for s in written:
            of_stage = {int(schedule.update[t, c]) for c in columns if stage[c] == s}
            if len(of_stage) > 1:  # copies update together
                return False
            (version,) = of_stage
            if version == IDLE or (v := version + k * updates[s]) <= 0:
                continue
            gradient = "weight_grad" if schedule.splits_backward else "backward"
            applied = {m for f, r, m in done if (f, r) == (gradient, s)}
            if v != len(written[s]) or applied != set(range(v * num_microbatches // updates[s])):
                return False
            written[s].append(now)
    needed = ["forward", "backward"] + ["weight_grad"] * schedule.splits_backward
    every = range(num_microbatches)
    return (
        all((f, s, m) in done for f in needed for s in stage for m in every)
        and all(latest["forward", c] >= 0 for c in columns)
        and all(len(w) > 1 for w in written.values())
    )


def mutations(schedule: Schedule):
    """Every table that differs by two cells swapped or by one number changed by 1."""
    for field in CELLS[:3] + ["update"]:
        together = [field, f"{field}_version"] if field in CELLS[:2] else [field]
        cells = list(np.ndindex(schedule.forward.shape))
        for a, b in itertools.combinations(cells, 2):
            change = {f: getattr(schedule, f).copy() for f in together}
            for array in change.values():
                array[a], array[b] = array[b], array[a]
            yield dataclasses.replace(schedule, **change)
    for field in CELLS:
        for cell in np.argwhere(getattr(schedule, field) != IDLE):
            for by in (-1, 1):
                array = getattr(schedule, field).copy()
                array[*cell] += by
                yield dataclasses.replace(schedule, **{field: array})


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule.from_text(FLUSH, name="flush"),
        Schedule.from_text(SPLIT, name="split"),
        paired(2, 1, stash=True, name="pipedream, N=1"),
        paired(2, 3, stash=False, name="pipemare, N=3"),
        paired(3, 2, stash=True, name="pipedream, N=2"),
        unit(2, 1),
        TWO_COPIES,
        jpipe.schedules.pipedream(2, 2, replicas=(2, 1)),
        rhythm(2, 2, replicas=(2, 1), update_every=(2, 1)),
        rhythm(2, 4, "paired", update_every=(4, 2)),
        rhythm(3, 2, "paired", update_every=(1, 2, 1)),
    ],
    ids=lambda schedule: schedule.name,
)
def test_check_agrees_with_a_plain_walk(schedule):
    assert walks(schedule.check())
    verdicts = set()
    for mutation in mutations(schedule):
        try:
            mutation.check()
            legal = True
        except ValueError:
            legal = False
        assert legal == walks(mutation), mutation.to_text()
        verdicts.add(legal)
    assert verdicts == {True, False}


# -- Facts ----------------------------------------------------------------------------


def test_facts_of_a_synchronous_table():
    facts = Schedule.from_text(SPLIT).facts()
    assert facts.num_ticks == 8
    assert facts.makespan == 8
    assert facts.bubble == (16 - 12) / 16
    assert facts.in_flight.tolist() == [2, 1]
    assert facts.forward_delay.tolist() == [0, 0]
    assert facts.backward_delay.tolist() == [0, 0]
    assert facts.weight_versions.tolist() == [1, 1]


def test_a_tick_costs_its_busiest_device():
    schedule = Schedule.from_text(FLUSH)
    assert schedule.device_work().tolist() == [[1, 0], [1, 1], [0, 3], [2, 2], [2, 0]]
    assert schedule.facts().makespan == 1 + 1 + 3 + 2 + 2
    one_device = dataclasses.replace(schedule, device=np.array([0, 0]))
    assert one_device.device_work().tolist() == [[1], [2], [3], [4], [2]]
    assert one_device.facts().bubble == 0


def test_facts_of_a_forward_only_table():
    facts = Schedule.from_text("0@0 1@1\nF0 .\nF1 F0\n. F1\n").facts()
    assert facts.makespan == 3
    assert facts.bubble == 2 / 6
    assert facts.in_flight.tolist() == [1, 1]
    assert facts.forward_delay.tolist() == facts.backward_delay.tolist() == [0, 0]
    assert facts.weight_versions.tolist() == [1, 1]


def test_facts_of_asynchronous_tables():
    pipedream = Schedule.from_text(PIPEDREAM).facts()
    pipemare = Schedule.from_text(PIPEMARE).facts()
    for facts in (pipedream, pipemare):
        assert facts.num_ticks == 1
        assert facts.makespan == 3
        assert facts.bubble == 0
        assert facts.in_flight.tolist() == [4, 2]
        assert facts.forward_delay.tolist() == [3, 1]
    assert pipedream.backward_delay.tolist() == [3, 1]
    assert pipedream.weight_versions.tolist() == [4, 2]
    assert pipemare.backward_delay.tolist() == [0, 0]
    assert pipemare.weight_versions.tolist() == [1, 1]


def test_facts_are_by_stage_whatever_the_columns():
    facts = Schedule.from_text(PIPEDREAM).facts()
    columns = [1, 0]
    schedule = Schedule.from_text(PIPEDREAM)
    change = {field: getattr(schedule, field)[..., columns] for field in FIELDS[2:]}
    assert dataclasses.replace(schedule, **change).facts().to_dict() == facts.to_dict()


GRID = list(itertools.product(range(1, 7), range(1, 9)))


@pytest.mark.parametrize(("num_stages", "num_microbatches"), GRID)
def test_delays_of_paired_ticks_are_pipemares_table_1(num_stages, num_microbatches):
    # ceil((2 (P - i) + 1) / N) in the paper, which counts stages i from 1 to P.
    apart = 2 * (num_stages - 1 - np.arange(num_stages)) + 1
    tau = -(-apart // num_microbatches)
    stash = paired(num_stages, num_microbatches, stash=True).facts()
    naive = paired(num_stages, num_microbatches, stash=False).facts()
    np.testing.assert_array_equal(stash.forward_delay, tau)
    np.testing.assert_array_equal(stash.backward_delay, tau)
    np.testing.assert_array_equal(naive.forward_delay, tau)
    np.testing.assert_array_equal(naive.backward_delay, 0)
    np.testing.assert_array_equal(naive.weight_versions, 1)
    np.testing.assert_array_equal(naive.in_flight, apart + 1)
    assert naive.bubble == stash.bubble == 0


@pytest.mark.parametrize("num_stages", range(1, 7))
def test_delays_of_unit_ticks_are_those_of_pipedreams_runtime(num_stages):
    facts = unit(num_stages, 1).facts()
    after = num_stages - 1 - np.arange(num_stages)
    np.testing.assert_array_equal(facts.forward_delay, after)
    np.testing.assert_array_equal(facts.in_flight, after + 1)
    assert facts.bubble == 0


def test_one_version_back_everywhere():
    s, m = np.arange(2), np.arange(4)[:, None]
    facts = Schedule.from_ticks("2bw", m + s, m + 3 - s, num_ticks=4, forward_version=-1, backward_version=-1).facts()
    assert facts.forward_delay.tolist() == facts.backward_delay.tolist() == [1, 1]
    assert facts.weight_versions.tolist() == [2, 2]


def with_copies(num_stages: int, num_microbatches: int):
    """Asynchronous tables in which the first and the last stage have two copies."""
    replicas = [1 + (s in (0, num_stages - 1)) for s in range(num_stages)]
    if num_microbatches > 1:
        for ticks in ("paired", "unit"):
            yield jpipe.schedules.pipedream(num_stages, num_microbatches, ticks, replicas=replicas)


def rhythms(num_stages: int, num_microbatches: int):
    """Tables in which the first stage updates after each microbatch, or the last one does."""
    every = [1] + [num_microbatches] * (num_stages - 1)
    for ticks, update_every in itertools.product(("paired", "unit"), (every, every[::-1])):
        yield jpipe.schedules.pipedream(num_stages, num_microbatches, ticks, update_every=update_every)


def counted(schedule: Schedule) -> tuple[list[int], list[int]]:
    """In flight and live versions by stage, counted tick by tick over many rounds."""
    num_microbatches, num_ticks = schedule.num_microbatches, schedule.num_ticks
    num_rounds, ends = 40, "weight_grad" if schedule.splits_backward else "backward"
    in_flight, live = [0] * schedule.num_stages, [0] * schedule.num_stages
    places = zip(schedule.stage.tolist(), schedule.device.tolist())
    for s, d in dict.fromkeys(places):  # every copy
        here = np.flatnonzero((schedule.stage == s) & (schedule.device == d))
        began, ended, written, last_read = {}, {}, {}, {}
        updates = int((schedule.update[:, here[0]] != IDLE).sum())
        for now in range(num_rounds * num_ticks):
            k, t = divmod(now, num_ticks)
            for field, c in itertools.product(CELLS[:3], here):
                m = getattr(schedule, field)[t, c]
                if m == IDLE:
                    continue
                if field == "forward":
                    began[m + num_microbatches * k] = now
                if field == ends:
                    ended[m + num_microbatches * k] = now
                if field != "weight_grad":
                    version = getattr(schedule, f"{field}_version")[t, c] + k * updates
                    last_read[version] = max(now, last_read.get(version, 0))
            if schedule.update[t, here[0]] != IDLE:
                written[schedule.update[t, here[0]] + k * updates] = now
        # Far from both ends of what was walked.
        for now in range(15 * num_ticks, 16 * num_ticks):
            flying = sum(began[m] <= now <= ended[m] for m in began if m in ended)
            in_flight[s] = max(in_flight[s], flying)
            versions = sum(
                written[v] < now <= max(last_read.get(v, 0), written[v + 1]) for v in written if v + 1 in written
            )
            live[s] = max(live[s], versions)
    return in_flight, live


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_counts_agree_with_counting(num_stages, num_microbatches):
    for schedule in (
        paired(num_stages, num_microbatches, stash=True),
        paired(num_stages, num_microbatches, stash=False),
        unit(num_stages, num_microbatches),
        *with_copies(num_stages, num_microbatches),
        *rhythms(num_stages, num_microbatches),
    ):
        facts = schedule.facts()
        in_flight, live = counted(schedule)
        assert facts.in_flight.tolist() == in_flight
        assert facts.weight_versions.tolist() == live


# -- Building -------------------------------------------------------------------------


def test_from_ticks_and_the_ticks_are_inverse():
    for schedule in (paired(3, 2, stash=True), unit(3, 2), Schedule.from_text(SPLIT)):
        again = Schedule.from_ticks(
            schedule.name,
            schedule.forward_ticks(),
            schedule.backward_ticks(),
            schedule.weight_grad_ticks() if schedule.splits_backward else None,
            num_ticks=schedule.num_ticks,
            update=schedule.update_ticks(),
            forward_version=schedule.forward_versions(),
            backward_version=schedule.backward_versions(),
        )
        assert again == schedule


def test_a_synchronous_table_updates_in_its_last_tick():
    assert Schedule.from_ticks("f", [[0, 1], [1, 2]], [[3, 2], [4, 3]]) == (Schedule.from_text(FLUSH, name="f"))


def test_from_ticks_refuses_two_microbatches_in_a_cell():
    with pytest.raises(ValueError, match="tick 0, stage 0: forward 0 and forward 1 in"):
        Schedule.from_ticks("x", [[0], [0]])
    with pytest.raises(ValueError, match="tick 1, stage 0: backward -2 and backward 1"):
        Schedule.from_ticks("x", [[0], [1]], [[3], [1]], num_ticks=2)


def test_from_ticks_refuses_an_update_without_gradients():
    with pytest.raises(ValueError, match="microbatch 0 has no backward"):
        Schedule.from_ticks("x", [[0, 1]], update=1)


def test_from_ticks_refuses_a_round_of_no_ticks():
    with pytest.raises(ValueError, match="`num_ticks` must be an integer of at least 1"):
        Schedule.from_ticks("x", [[0]], [[1]], num_ticks=0)


def test_from_ticks_refuses_a_flat_list():
    with pytest.raises(ValueError, match=r"shape \[microbatches, columns\], got \(2,\)"):
        Schedule.from_ticks("x", [0, 1])


def test_few_microbatches_give_one_warning_that_names_the_bubble():
    with pytest.warns(UserWarning, match="num_microbatches=1 on 2 devices is 50% bubble"):
        Schedule.from_ticks("x", [[0, 1]], [[3, 2]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Schedule.from_ticks("x", [[0, 1]])
        Schedule.from_ticks("x", [[0, 1]], [[3, 2]], num_ticks=1)
        Schedule.from_ticks("x", [[0, 1]], [[3, 2]], device=[0, 0])


# -- Text and JSON --------------------------------------------------------------------


@pytest.mark.parametrize("text", [FLUSH, SPLIT, PIPEDREAM, PIPEMARE])
def test_text_reads_back(text):
    schedule = Schedule.from_text(text)
    assert schedule.to_text() == text.lstrip("\n")
    assert Schedule.from_text(schedule.to_text()) == schedule


def test_spaces_blank_lines_and_comments_do_not_matter():
    text = """
    # a comment
    0@0 1@1   # columns

    F0 .
    F1   F0   # tick 1
    . B0,F1
    B0 B1
    U1,B1 U1
    """
    assert Schedule.from_text(text) == Schedule.from_text(FLUSH)


def test_the_number_of_microbatches_is_what_most_columns_run():
    assert Schedule.from_text(FLUSH).num_microbatches == 2
    assert Schedule.from_text(PIPEDREAM).num_microbatches == 1
    for schedule in (paired(4, 3, stash=True), unit(4, 3)):
        assert Schedule.from_text(schedule.to_text()).num_microbatches == 3
    hole = Schedule.from_text("0@0 1@1 2@2\nF0 . .\n. F0 .\nF1 . F0\n. F1 .\n")
    assert hole.num_microbatches == 2
    with pytest.raises(ValueError, match="stage 2: microbatch 1 has no forward"):
        hole.check()


@pytest.mark.parametrize("header", ["0@0 1@3000000", "0@0 3000000@1"])
def test_numbers_below_a_large_one_are_not_made(header):
    table = Schedule.from_text(f"{header}\nF0 .\n. F0\n. B0\nB0 .\nU1 U1\n")
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="a (device|stage) 3000000 but no .* 1"):
            table.check()
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a table needs a header such as `0@0 1@1`.* got 0 lines"),
        ("0@0\n# nothing\n", "got 1 lines"),
        ("F0 .\nF1 F0\n", "line 1: the header must name columns .* got `F0 .`"),
        ("\n0@0 1\nF0 .\n", "line 2: the header must name columns"),
        ("0@0 1@1\nF0 .\n# x\nF1\n", "line 4: 1 cells for 2 columns"),
        ("0@0 1@1\nF0 B0 .\n", "line 2: 3 cells for 2 columns.*`,` within a cell"),
        ("0@0\nG0\n", "line 2: cannot read `G0`; a cell is `.` or any of"),
        ("0@0\nF0,.\n", "line 2: cannot read `.`"),
        ("0@0\nF\n", "line 2: cannot read `F`"),
        ("0@0\nF0@\n", "line 2: cannot read `F0@`"),
        ("0@0\nU1@1\n", "line 2: cannot read `U1@1`"),
        ("0@0\nF0\nW0@1\n", "line 3: cannot read `W0@1`"),
        ("0@0\nF0,F1\n", "line 2: `F0,F1` has two of `F`"),
        ("0@0 1@3000000000\nF0 .\n", "line 1: `1@3000000000` has a number outside"),
        (f"{'9' * 5000}@0\nF0\n", "line 1: `9+ .* 9+@0` has a number outside"),
        ("0@0\nF0\nB99999999999999999999\n", "line 3: `B9+` has a number outside"),
        ("0@0\nF0@-9999999999\n", "line 2: `F0@-9+` has a number outside of -2147"),
        ("0@0\nF-2147483648\n", "line 2: .* which a table cannot hold. Number"),
        ("0@0\nB0\n", "`num_microbatches` must be an integer of at least 1, got 0"),
    ],
)
def test_text_that_cannot_be_read_names_the_line(text, message):
    with pytest.raises(ValueError, match=message):
        Schedule.from_text(text)


def test_json():
    schedule = Schedule.from_text(PIPEDREAM, name="pipedream")
    assert json.loads(json.dumps(schedule.to_dict())) == {
        "name": "pipedream",
        "num_microbatches": 1,
        "stage": [0, 1],
        "device": [0, 1],
        "forward": [[0, -1]],
        "backward": [[-3, -2]],
        "weight_grad": [[None, None]],
        "forward_version": [[-3, -2]],
        "backward_version": [[-6, -3]],
        "update": [[-2, -1]],
    }
    assert json.loads(json.dumps(schedule.facts().to_dict())) == {
        "num_ticks": 1,
        "makespan": 3,
        "bubble": 0.0,
        "inner_bubble": 0.0,
        "in_flight": [4, 2],
        "forward_delay": [3, 1],
        "backward_delay": [3, 1],
        "weight_versions": [4, 2],
    }


def test_newest_version_takes_effect_at_the_end_of_its_tick():
    ticks = np.arange(8)[:, None]
    versions = newest_version(ticks, np.array([1, 5]), 4)
    # Column 0 writes version 1 at tick 1 and version 2 at tick 5.
    assert versions[:, 0].tolist() == [0, 0, 1, 1, 1, 1, 2, 2]
    assert versions[:, 1].tolist() == [-1, -1, 0, 0, 0, 0, 1, 1]


# -- Columns --------------------------------------------------------------------------


def test_column_of_stage():
    schedule = Schedule.from_text("1@0 0@0 2@1\n. F0 .\nF0 . .\n. . F0\n")
    assert schedule.column_of_stage.tolist() == [1, 0, 2]
    stages = schedule.stage[schedule.column_of_stage]
    assert stages.tolist() == list(range(schedule.num_stages))
    with pytest.raises(ValueError, match="read-only"):
        schedule.column_of_stage[0] = 2


@pytest.mark.parametrize("count", ["facts", "lower", "search"])
def test_no_array_of_ticks_by_microbatches_is_made(count):
    # An array of ticks by microbatches by columns has 8 MB here, all pairs of the microbatches of a column 2 MB.
    table = schedules.pipedream(2, 512)
    tracemalloc.start()
    if count == "facts":
        table.facts()
    elif count == "lower":
        lower(table)
    else:
        memory_of_activations(table, np.ones(2))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 * table.forward.size * 8  # bytes of an array of ticks by columns
