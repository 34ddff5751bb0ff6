"""One battery for every schedule: what must hold whatever the method.

A new schedule joins by a line in `TRAINING`.
"""

import itertools
import re
import warnings

import pytest
from families import ASYNCHRONOUS

from jpipe import draw, schedules
from jpipe.schedule import IDLE, Schedule

TRAINING = [
    ("gpipe", {}),
    ("one_f_one_b", {}),
    ("one_f_one_b", {"ticks": "unit"}),
    ("one_f_one_b", {"ticks": "overlapped"}),
    ("interleaved", {}),
    ("interleaved", {"ticks": "unit"}),
    ("interleaved", {"ticks": "overlapped"}),
    ("seq_one_f_one_b", {}),
    ("seq_one_f_one_b", {"ticks": "unit"}),
    ("zero_bubble_h1", {}),
    ("zero_bubble_h2", {}),
    ("zero_bubble_v", {}),
    ("dual_pipe_v", {}),
]
EVERY = [("forward_only", {}), *TRAINING]
GRID = list(itertools.product(range(1, 7), range(1, 9)))


def stages_a_device(name: str) -> int:
    return 2 if name in ("interleaved", "zero_bubble_v", "dual_pipe_v") else 1


def fits(name: str, num_stages: int, num_microbatches: int) -> bool:
    """Whether the schedule exists for these counts."""
    num_devices, rest = divmod(num_stages, stages_a_device(name))
    grouped, filled = name == "interleaved", name == "dual_pipe_v"
    if name == "seq_one_f_one_b" and num_microbatches % 2:  # slices of a sequence
        return False
    return not (rest or (grouped and num_microbatches % num_devices) or (filled and num_microbatches < num_stages))


every_schedule = pytest.mark.parametrize(("name", "options"), EVERY, ids=str)
training_schedules = pytest.mark.parametrize(("name", "options"), TRAINING, ids=str)


def build(name: str, num_stages: int, num_microbatches: int, **options) -> Schedule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few microbatches
        return schedules.get(name)(num_stages, num_microbatches, **options)


def test_no_schedule_is_left_out():
    training = {name for name, _ in TRAINING} | set(ASYNCHRONOUS)
    assert training == set(schedules.names())


@every_schedule
@pytest.mark.parametrize(("num_stages", "num_microbatches"), GRID)
def test_only_counts_that_fit_are_accepted(name, options, num_stages, num_microbatches):
    refusal = schedules.refusal(name, num_stages, num_microbatches, **options)
    assert (refusal is None) == fits(name, num_stages, num_microbatches)


def fitting(pairs):
    return [
        pytest.param(name, options, *counts, id=f"{name}-{options}-{counts}")
        for name, options in pairs
        for counts in GRID
        if fits(name, *counts)
    ]


@pytest.mark.parametrize("name,options,num_stages,num_microbatches", fitting(EVERY))
def test_every_schedule(name, options, num_stages, num_microbatches):
    schedule = build(name, num_stages, num_microbatches, **options)
    assert schedule.check() is schedule
    assert schedule.name == name
    assert schedule.num_stages == num_stages
    assert schedule.num_devices == num_stages // stages_a_device(name)
    assert schedule.num_microbatches == num_microbatches
    assert Schedule.from_text(schedule.to_text(), name=name) == schedule

    facts = schedule.facts()
    units = 1 if schedule.forward_only else 3
    assert schedule.device_work().sum() == units * num_stages * num_microbatches
    work = units * num_microbatches * stages_a_device(name)
    assert facts.makespan >= work
    assert 0 <= facts.bubble < 1
    for per_stage in facts.to_dict().values():
        assert not isinstance(per_stage, list) or len(per_stage) == num_stages
    assert (facts.in_flight >= 1).all()
    assert (facts.weight_versions >= 1).all()
    if schedule.synchronous:
        assert (facts.in_flight <= num_microbatches).all()
        assert (facts.forward_delay == 0).all()
        assert (facts.backward_delay == 0).all()
        assert (facts.weight_versions == 1).all()


@every_schedule
def test_the_picture_in_the_docstring(name, options):
    """A block of rows `s0 F0 ...`, the first with S=, N= and a word of the options."""
    blocks = [
        block
        for block in re.split(r"\n\s*\n", schedules.get(name).__doc__)
        if re.match(r"\s*s0(@0)? ", block) and all(str(value) in block for value in options.values())
    ]
    counts = re.search(r"S=(\d+), N=(\d+)", blocks[0])
    schedule = build(name, int(counts[1]), int(counts[2]), **options)
    drawn = draw.text(schedule).split("\n\n")[1].splitlines()[1:]
    cell = re.compile(r"(?<=\s)(?:[FBW]\d+|\.)(?=\s|$)")
    assert [cell.findall(row) for row in blocks[0].splitlines()] == [
        cell.findall(row.replace(" *", " .").replace("*", "")) for row in drawn
    ]


@pytest.mark.parametrize("name,options,num_stages,num_microbatches", fitting(TRAINING))
def test_synchronous_schedules_update_in_the_last_tick(name, options, num_stages, num_microbatches):
    schedule = build(name, num_stages, num_microbatches, **options)
    if schedule.synchronous:
        assert (schedule.update[:-1] == IDLE).all()
        assert (schedule.update[-1] == 1).all()


@every_schedule
@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "guilty"),
    [(0, 4, "num_stages"), (4, 0, "num_microbatches"), (4, -1, "num_microbatches")],
)
def test_counts_below_one(name, options, num_stages, num_microbatches, guilty):
    with pytest.raises(ValueError, match=f"`{guilty}` must be an integer of at least 1"):
        schedules.get(name)(num_stages, num_microbatches, **options)


@training_schedules
def test_one_warning_for_few_microbatches(name, options):
    num_stages = 4 * stages_a_device(name)
    if not fits(name, num_stages, 2):
        pytest.skip("there is none with fewer microbatches than devices")
    with pytest.warns(UserWarning) as caught:
        schedule = schedules.get(name)(num_stages, 2, **options)
    assert len(caught) == 1
    assert f"{schedule.facts().bubble:.0%} bubble" in str(caught[0].message)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedules.get(name)(num_stages, 4, **options)


@every_schedule
def test_a_file_reads_back(name, options, tmp_path):
    schedule = schedules.get(name)(6, 6, **options)
    path = tmp_path / f"{name}.txt"
    path.write_text(schedule.to_text())
    assert schedules.read(path) == schedule
    assert schedules.read(str(path)) == schedule


def test_read_names_the_file(tmp_path):
    path = tmp_path / "broken.txt"
    path.write_text("0@0\nB0\nF0,U1\n")
    with pytest.raises(ValueError, match="broken.txt: schedule 'broken', tick 0, stage 0"):
        schedules.read(path)
    path.write_text("0@0\nX0\n")
    with pytest.raises(ValueError, match="broken.txt: line 2: cannot read `X0`"):
        schedules.read(path)
    with pytest.raises(FileNotFoundError):
        schedules.read(tmp_path / "absent.txt")
