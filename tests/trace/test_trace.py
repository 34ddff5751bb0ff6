"""`Pipeline.trace` against the table, the runtime's own times and a hand-written timeline."""

import functools
import json
import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
from jpipe.trace import Cell, Execution, Trace

S = jpipe.schedules
FIELDS = ("forward", "backward", "weight_grad")


def pipeline(schedule, width=64, mesh=None, **options):
    mesh = jpipe.make_mesh(stage=schedule.num_devices, ring=schedule.ring) if mesh is None else mesh
    return jpipe.Pipeline(
        [functools.partial(nnx.Linear, width, width) for _ in range(8)],
        loss=lambda outputs, batch: jnp.mean((outputs - batch["targets"]) ** 2),
        schedule=schedule,
        mesh=mesh,
        **{"optimizer": optax.adam(1e-3), **options},
    )


def batch_of(schedule, rows=8, width=64):
    num_rows = schedule.num_microbatches * rows
    return {"inputs": jnp.ones((num_rows, width)), "targets": jnp.zeros((num_rows, width))}


def traced(schedule, num_steps=1, rows=8, **options):
    pipe, batch = pipeline(schedule, **options), batch_of(schedule, rows)
    state = pipe.init(jax.random.key(0), batch)
    for _ in range(4):  # until nothing of an asynchronous table is before the first microbatch
        state, _ = pipe.step(state, batch)
    _, trace = pipe.trace(state, batch, num_steps=num_steps)
    return trace


def cells_of_table(schedule):
    """(device, tick, operation, stage, microbatch) of every operation, read off the table."""
    return sorted(
        (int(schedule.device[c]), t, field, int(schedule.stage[c]), int(getattr(schedule, field)[t, c]))
        for field in FIELDS
        for t, c in np.argwhere(getattr(schedule, field) != jpipe.IDLE).tolist()
    )


def check(trace, schedule, num_replicas=1):
    """What holds for every trace."""
    where = {(cell.step, cell.replica) for cell in trace.cells}
    assert where == {(k, r) for k in range(trace.num_steps) for r in range(num_replicas)}
    for at in where:
        work = [c for c in trace.cells if c.operation in FIELDS and (c.step, c.replica) == at]
        listed = sorted((c.device, c.tick, c.operation, c.stage, c.microbatch) for c in work)
        assert listed == cells_of_table(schedule)
        check_dependencies(work, schedule)
    by_device = {}
    for cell in trace.cells:
        assert cell.seconds >= 0
        by_device.setdefault((cell.step, cell.device, cell.replica), []).append(cell)
    for cells in by_device.values():
        # Cells are sorted by start; those of a later tick begin later.
        work = [c for c in cells if c.operation in FIELDS]
        assert [c.tick for c in work] == sorted(c.tick for c in work)
        assert all(a.end_seconds <= b.start_seconds for a, b in zip(work, work[1:], strict=False))
        assert any(c.operation == "update" for c in cells)


def check_dependencies(work, schedule):
    """A stage begins after the one before it, forwards and backwards, by the clock of the machine."""
    at = {(c.operation, c.stage, c.microbatch): c for c in work}
    last = schedule.num_stages - 1
    for (operation, stage, microbatch), cell in at.items():
        before = {
            "forward": ("forward", stage - 1, microbatch),
            "backward": ("backward", stage + 1, microbatch) if stage < last else ("forward", last, microbatch),
            "weight_grad": ("backward", stage, microbatch),
        }[operation]
        if before in at and at[before].tick <= cell.tick:
            assert at[before].end_seconds <= cell.start_seconds


@pytest.fixture(scope="module")
def trace():
    """Of four steps, long enough that the start of a step is short beside it."""
    return traced(S.one_f_one_b(2, 4), num_steps=4, rows=512)


def test_each_cell_of_the_table_ran_once_and_in_its_order(trace):
    check(trace, S.one_f_one_b(2, 4))
    assert len(trace.executions) == 2 * 4


def test_the_cells_of_a_device_add_up_to_its_step(trace):
    """Within 5 % of the time that the runtime reports for the whole program.

    Cells reach from the first instruction to the last. The system may take a core away between the start of the program
    and its first instruction, so of the four steps the one counts in which it did so least.
    """
    for device in range(2):
        differences = []
        for execution in trace.executions:
            cells = [c.seconds for c in trace.cells if (c.device, c.step) == (device, execution.step)]
            if execution.device == device:
                assert sum(cells) <= execution.seconds * (1 + 1e-9)
                differences.append(1 - sum(cells) / execution.seconds)
        assert len(differences) == 4
        assert min(differences) < 0.05


def test_cells_do_not_overlap_and_leave_no_gap(trace):
    for execution in trace.executions:
        cells = [c for c in trace.cells if (c.device, c.step) == (execution.device, execution.step)]
        for a, b in zip(cells, cells[1:], strict=False):
            assert a.end_seconds == pytest.approx(b.start_seconds, abs=1e-9)


def test_a_message_begins_on_all_devices_at_once(trace):
    starts = {}
    for cell in trace.cells:
        if cell.operation == "message":
            starts.setdefault((cell.step, cell.tick), []).append(cell.start_seconds)
    assert starts
    for times in starts.values():
        np.testing.assert_allclose(times, times[0], rtol=0, atol=1e-9)


@pytest.mark.first_case
@pytest.mark.parametrize("make", [lambda: S.gpipe(1, 1), lambda: S.interleaved(4, 4)], ids=["one stage", "interleaved"])
def test_other_tables(make):
    check(traced(make()), make())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        (S.gpipe(4, 4), {"overlap": True}),
        (S.one_f_one_b(4, 4, ticks="unit"), {}),
        (S.one_f_one_b(2, 4), {"overlap": True, "recompute": "full"}),
        (S.one_f_one_b(2, 6, replicas=(3, 1)), {}),
        (S.zero_bubble_h1(3, 6), {}),
        (S.zero_bubble_v(4, 4), {}),
        (S.dual_pipe_v(4, 4), {}),
        (S.pipedream(4, 4), {}),
        (S.pipedream_2bw(4, 4), {}),
        (S.pipemare(4, 4), {}),
        (S.pipemare(4, 1), {}),
        (S.one_f_one_b(4, 4, message_ticks=(1, 2, 1)), {}),
        (S.pipemare(4, 2, message_ticks=2), {"overlap": True}),
    ],
    ids=lambda value: getattr(value, "name", "") or "-".join(value),
)
def test_every_kind_of_table(schedule, options):
    trace = traced(schedule, num_steps=2, **options)
    if schedule.has_copies:
        assert sum(c.operation == "forward" for c in trace.cells) == 2 * (schedule.forward != jpipe.IDLE).sum()
        return
    check(trace, schedule)


@pytest.mark.exhaustive
def test_replicas():
    schedule = S.one_f_one_b(2, 4)
    trace = traced(schedule, mesh=jpipe.make_mesh(stage=2, data=2), rows=16)
    check(trace, schedule, num_replicas=2)
    assert trace.devices == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_the_first_rounds_of_an_asynchronous_table():
    """Microbatches of rounds before the first are in the table, and nothing runs for them."""
    schedule = S.pipedream(2, 2)
    pipe, batch = pipeline(schedule), batch_of(schedule)
    state = pipe.init(jax.random.key(0), batch)
    _, trace = pipe.trace(state, batch, num_steps=3)
    ran = [
        sorted(
            (c.device, c.tick, c.operation, c.stage, c.microbatch)
            for c in trace.cells
            if c.step == k and c.stage is not None and c.microbatch is not None
        )
        for k in range(3)
    ]
    listed = cells_of_table(schedule)
    for k in range(3):
        assert ran[k] == [at for at in listed if at[-1] + k * schedule.num_microbatches >= 0]
    assert len(ran[0]) < len(ran[2]) == len(listed)


# -- A step written by hand


def by_hand():
    cells = [
        Cell(0, 0, "forward", 0.0, 2.0, 0, 0),
        Cell(0, 1, "backward", 4.0, 8.0, 0, 0),
        Cell(0, 0, "idle", 2.0, 4.0),
        Cell(0, 1, "update", 8.0, 10.0, 0),
        Cell(1, 0, "message", 2.0, 3.0),
        Cell(1, 1, "forward", 3.0, 5.0, 1, 0),
        Cell(1, 1, "update", 8.0, 9.0, 1),
    ]
    return Trace(tuple(cells), (Execution(0, 0, 0, 0.0, 10.0), Execution(1, 0, 0, 1.0, 9.0)), 0.25, "by hand", "cpu")


def test_the_bubble():
    """Work of 8 s in two devices' 10 s, of which 3 s are updates."""
    assert by_hand().bubble == pytest.approx(1 - 8 / (2 * 10 - 3))
    assert by_hand().seconds(1) == {"forward": 2.0, "update": 1.0, "message": 1.0}


def test_the_text():
    lines = by_hand().text(width=10).splitlines()
    assert lines[:5] == [
        "by hand",
        "step 1e+04 ms; bubble 52.9% measured, 25.0% in the table",
        "",
        "device 0 F0..B0bbUu",
        "device 1 ..mF1...U.".replace("F1", "F0"),
    ]
    assert "update" in lines[5]
    assert str(by_hand()).startswith("by hand\n")


def test_json(tmp_path):
    by_hand().save(tmp_path / "trace.json")
    assert jpipe.trace.read(tmp_path / "trace.json") == by_hand()


def test_perfetto(tmp_path, trace):
    trace.save(tmp_path / "trace.perfetto.json")
    tree = json.loads((tmp_path / "trace.perfetto.json").read_text())
    names = {e["tid"]: e["args"]["name"] for e in tree["traceEvents"] if e["ph"] == "M"}
    slices = [e for e in tree["traceEvents"] if e["ph"] == "X"]
    assert len(names) + len(slices) == len(tree["traceEvents"])
    busy = [c for c in trace.cells if c.operation != "idle"]
    assert len(slices) == len(busy)
    for event, cell in zip(slices, busy, strict=True):
        assert {"ph", "name", "cat", "pid", "tid", "ts", "dur"} <= event.keys()
        assert f"device {cell.device}" in names[event["tid"]]
        assert event["ts"] == pytest.approx(1e6 * cell.start_seconds)
        assert event["dur"] == pytest.approx(1e6 * cell.seconds)


def test_pictures(tmp_path, trace):
    trace.save(tmp_path / "trace.svg")
    jpipe.trace.draw([trace, by_hand()], tmp_path / "both.svg")
    for name, words in (("trace", "one_f_one_b: 2 stages"), ("both", "by hand")):
        root = ElementTree.parse(tmp_path / f"{name}.svg").getroot()
        assert root.tag.endswith("svg")
        assert any(words in (element.text or "") for element in root.iter())


# -- What is refused


def test_files_of_other_kinds(tmp_path):
    with pytest.raises(ValueError, match=r"must end in .*\.svg.*\.perfetto\.json"):
        by_hand().save(tmp_path / "trace.txt")
    with pytest.raises(ValueError, match=r"must end in \.pdf"):
        jpipe.trace.draw([by_hand()], tmp_path / "trace.json")
    with pytest.raises(ValueError, match="at least one trace"):
        jpipe.trace.draw([], tmp_path / "trace.svg")
    for text, words in (("[1]", "holds no trace"), ('{"cells": 3}', "no trace that"), ("{", "is not JSON")):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            jpipe.trace.read(tmp_path / "other.json")


def test_calls_that_cannot_work(tmp_path):
    schedule = S.gpipe(1, 1)
    pipe, batch = pipeline(schedule), batch_of(schedule)
    state = pipe.init(jax.random.key(0), batch)
    with pytest.raises(ValueError, match="`num_steps` must be an integer of at least 1, got 0"):
        pipe.trace(state, batch, num_steps=0)
    with pytest.raises(ValueError, match="no step was run"), jpipe.trace.record(state) as recording:
        with pytest.raises(ValueError, match="after the end"):
            recording.trace  # noqa: B018
    with pytest.raises(ValueError, match="must be the state"), jpipe.trace.record(3):
        pass
    with jax.profiler.trace(str(tmp_path)), pytest.raises(ValueError, match="End the other profile"):
        pipe.trace(state, batch)
    with pytest.raises(ZeroDivisionError), jpipe.trace.record(state):
        raise ZeroDivisionError
    state, _ = pipe.step(state, batch)  # neither donated nor still recorded
    _, trace = pipe.trace(state, batch)
    assert trace.num_steps == 1


def test_lost_events(monkeypatch):
    """A profile without some runs is refused, not shown as a trace."""
    from jpipe.trace import _record

    read = _record.runs_of

    def without_backwards(*args):
        return {
            d: runs._replace(instructions=[run for run in runs.instructions if not run.name.startswith(lost)])
            for d, runs in read(*args).items()
        }

    schedule = S.gpipe(1, 2)
    pipe, batch = pipeline(schedule), batch_of(schedule)
    state = pipe.init(jax.random.key(0), batch)
    program = pipe._program(batch)
    (module,) = program.lower(profiled=True).compile().runtime_executable().hlo_modules()
    places = _record.places_of(module.as_serialized_hlo_module_proto())
    lost = tuple(name for name, place in places.items() if place.key and place.key.operation == "backward")
    monkeypatch.setattr(_record, "runs_of", without_backwards)
    with pytest.raises(ValueError, match=r"lacks backward in tick 2 of device 0, step 0.*trace fewer steps"):
        pipe.trace(state, batch)
