"""Messages of several ticks: what a table must hold, by formulas and by walking it."""

import itertools
import math
import warnings

import numpy as np
import pytest

from jpipe import draw, schedules
from jpipe.schedule import IDLE, Schedule
from jpipe.simulate import Costs, simulate

TWO_A_DEVICE = ("interleaved", "zero_bubble_v", "dual_pipe_v")
SYNCHRONOUS = [
    *((name, {}) for name in ("gpipe", "zero_bubble_h1", "zero_bubble_h2", "zero_bubble_v", "dual_pipe_v")),
    *(("one_f_one_b", {"ticks": ticks}) for ticks in ("paired", "unit", "overlapped")),
    *(("interleaved", {"ticks": ticks}) for ticks in ("paired", "unit", "overlapped")),
    *(("seq_one_f_one_b", {"ticks": ticks}) for ticks in ("paired", "unit")),
]
ASYNCHRONOUS = [(name, {"ticks": t}) for name in ("pipemare", "pipedream", "pipedream_2bw") for t in ("unit", "paired")]
COPIES = [
    ("gpipe", {"replicas": (3, 1)}),
    ("one_f_one_b", {"replicas": (2, 1, 1)}),
    ("one_f_one_b", {"replicas": (1, 2), "ticks": "unit"}),
    ("pipemare", {"replicas": (2, 1, 1)}),
    ("pipedream", {"replicas": (3, 1), "ticks": "paired"}),
]
EVERY = [("forward_only", {}), *SYNCHRONOUS, *ASYNCHRONOUS]


def test_no_schedule_is_left_out():
    assert {name for name, _ in EVERY} == {*schedules.names(), "forward_only"}


def stages_a_device(name: str) -> int:
    return 2 if name in TWO_A_DEVICE else 1


def build(name: str, num_stages: int, num_microbatches: int, **options) -> Schedule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few microbatches
        return schedules.get(name)(num_stages, num_microbatches, **options)


def tables(name, options):
    """Tables with messages of 2 and 3 ticks, on all boundaries and on one, with the ticks of each boundary."""
    grid = [(len(options["replicas"]), 12)] if "replicas" in options else itertools.product((1, 2, 4, 6), (1, 4, 12))
    for S, N in grid:
        if schedules.refusal(name, S, N, **options) is not None:
            continue
        D = sum(options["replicas"]) if "replicas" in options else S // stages_a_device(name)
        one_slow = tuple(2 if d == D // 2 - 1 else 1 for d in range(D - 1))
        for ticks in (2, 3, one_slow):
            if schedules.refusal(name, S, N, **options, message_ticks=ticks) is None:
                boundaries = [ticks] * (D - 1) if isinstance(ticks, int) else ticks
                yield build(name, S, N, **options, message_ticks=ticks), boundaries


def waits(table: Schedule, boundaries) -> list[tuple[int, int]]:
    """Of every message: the ticks from the one that sends it to the one that reads it, and those that it takes."""
    S, N = table.num_stages, table.num_microbatches
    pairs = []
    for ticks, offset in ((table.forward_ticks(), 1), (table.backward_ticks(), -1)):
        place = {
            (m, int(table.stage[c])): (int(ticks[m, c]), int(table.device[c])) for m, c in np.argwhere(ticks != IDLE)
        }
        for m, s in itertools.product(range(N), range(S)):
            if (m, s) in place and (m, s + offset) in place:
                (sent, source), (read, target) = place[m, s], place[m, s + offset]
                between = boundaries[min(source, target) : max(source, target)]
                pairs.append((read - sent, max(between, default=1)))
    return pairs


@pytest.mark.parametrize(("name", "options"), [*EVERY, *COPIES], ids=str)
def test_every_message_has_its_ticks(name, options):
    count = 0
    for table, boundaries in tables(name, options):
        for waited, needed in waits(table, boundaries):
            assert waited >= needed
            count += needed > 1
        assert table.check() is table and table.facts().bubble < 1
        assert Schedule.from_text(table.to_text(), name=name) == table
    assert count > 0


@pytest.mark.parametrize(("name", "options"), [*EVERY, *COPIES], ids=str)
def test_a_device_runs_no_more_in_a_tick(name, options):
    """Ticks are as they were: of one operation, or of a forward and a backward."""
    for table, _ in tables(name, options):
        plain = build(name, table.num_stages, table.num_microbatches, **options)
        assert table.device_work().max() <= plain.device_work().max()
        assert table.device_work().sum() == plain.device_work().sum()


@pytest.mark.parametrize(("name", "options"), EVERY, ids=str)
def test_one_tick_is_the_table_without_the_argument(name, options):
    S, N = 4, 16
    table = build(name, S, N, **options)
    num_boundaries = S // stages_a_device(name) - 1
    assert table == build(name, S, N, **options, message_ticks=1)
    assert table == build(name, S, N, **options, message_ticks=(1,) * num_boundaries)
    slow = build(name, S, N, **options, message_ticks=2)
    assert slow != table and slow == build(name, S, N, **options, message_ticks=[2] * num_boundaries)
    assert slow.message_ticks == 2 and "message_ticks" not in table.to_text()


# -- Formulas. A message from stage 0 to stage s is under way for r[s] ticks, r[S - 1] = R.

BOUNDARIES = pytest.mark.parametrize("k", [(1, 1, 1), (2, 2, 2), (1, 2, 1), (3, 1, 2)], ids=str)
S, N = 4, 9


def ways(k):
    """Ticks from stage 0 to each stage, and from each stage to the last."""
    r = np.array([0, *np.cumsum(k)])
    return r, r[-1] - r


@BOUNDARIES
def test_gpipe(k):
    """N forwards, then N backwards; the pipeline fills and empties in R ticks each."""
    r, after = ways(k)
    table, m = schedules.gpipe(S, N, message_ticks=k), np.arange(N)[:, None]
    assert table.num_ticks == 2 * (N + r[-1])
    np.testing.assert_array_equal(table.forward_ticks(), m + r)
    np.testing.assert_array_equal(table.backward_ticks(), N + r[-1] + m + after)
    facts = table.facts()
    assert facts.in_flight.tolist() == [N] * S
    assert facts.makespan == 3 * (N + r[-1]) and facts.bubble == pytest.approx(r[-1] / (N + r[-1]))


@BOUNDARIES
@pytest.mark.parametrize("later", [0, 1])
def test_one_f_one_b(k, later):
    """A microbatch is on its way to the last stage and back for 2 (R - r[s]) ticks, and one enters in each."""
    r, after = ways(k)
    table = schedules.one_f_one_b(S, N, ticks=("paired", "overlapped")[later], message_ticks=k)
    m = np.arange(N)[:, None]
    assert table.num_ticks == N + 2 * r[-1] + later
    np.testing.assert_array_equal(table.forward_ticks(), m + r)
    np.testing.assert_array_equal(table.backward_ticks(), m + r[-1] + after + later)
    assert table.facts().in_flight.tolist() == np.minimum(N, 2 * after + 1 + later).tolist()


@BOUNDARIES
def test_unit_ticks(k):
    """A stage takes three ticks a microbatch, and those of two ways of k ticks at each boundary after it are in flight.

    A stage that is d ticks from the last one has the gradient 2 d + 1 ticks after its forward. So 2 d / 3 more
    microbatches have to be in flight, rounded up.
    """
    r, after = ways(k)
    table = schedules.one_f_one_b(S, 24, ticks="unit", message_ticks=k)
    assert table.num_ticks == 3 * 24 + 2 * r[-1]
    if max(k) == 1:
        return  # the builder's table keeps one for each stage, as in the paper
    most = table.facts().in_flight
    assert (most >= np.ceil(2 * after / 3) + 1).all()
    assert (most <= [1 + sum(math.ceil(2 * n / 3) for n in k[s:]) for s in range(S)]).all()


@BOUNDARIES
def test_delays(k):
    """Delays follow from the ticks, and no round has a bubble."""
    _, after = ways(k)
    for num in (1, 2, 5, 24):
        paired = schedules.pipemare(S, num, ticks="paired", message_ticks=k).facts()
        assert paired.forward_delay.tolist() == np.ceil((2 * after + 1) / num).tolist()
        # Of a device's three ticks one is for the forward, so both ways together take a multiple of three.
        unit = schedules.pipemare(S, num, message_ticks=k).facts()
        flight = np.array([sum(math.ceil(2 * n / 3) for n in k[s:]) for s in range(S)])
        assert unit.forward_delay.tolist() == np.ceil(flight / num).tolist()
        assert unit.bubble == paired.bubble == 0
        stashed = schedules.pipedream(S, num, message_ticks=k).facts()
        assert stashed.forward_delay.tolist() == stashed.backward_delay.tolist() == unit.forward_delay.tolist()


def test_two_weight_versions_need_more_microbatches():
    for ticks, least in (("paired", 2 * 6 + 1), ("unit", 6)):
        reason = schedules.refusal("pipedream_2bw", S, least - 1, ticks=ticks, message_ticks=2)
        assert f"must be at least {least} for 4 stages and `message_ticks` of 2" in reason
        facts = schedules.pipedream_2bw(S, least, ticks=ticks, message_ticks=2).facts()
        assert facts.weight_versions.tolist() == [2] * S and facts.forward_delay.tolist() == [1] * S
    reason = schedules.refusal("pipemare", S, 5, max_delay=1, message_ticks=2)
    assert "would cross 2 updates" in reason and "Use more microbatches" in reason
    assert schedules.refusal("pipemare", S, 6, max_delay=1, message_ticks=2) is None


@pytest.mark.parametrize("k", [1, 2, 3])
def test_forward_only(k):
    assert schedules.forward_only(S, N, message_ticks=k).num_ticks == N + k * (S - 1)
    on_one = schedules.forward_only(4, 3, stage=range(4), device=[0] * 4, message_ticks=k)
    assert on_one == schedules.forward_only(4, 3, stage=range(4), device=[0] * 4)


@pytest.mark.parametrize("name", ["zero_bubble_h1", "zero_bubble_h2", "zero_bubble_v", "interleaved", "dual_pipe_v"])
def test_the_bubble_grows_at_the_ends_alone(name):
    """A step is longer by the longer way of one microbatch at most, whatever the number of microbatches."""
    for num in (16, 64):
        one, two = (schedules.get(name)(4, num, message_ticks=k).facts() for k in (1, 2))
        ways = 6  # messages of a microbatch to the last stage and back
        assert one.makespan < two.makespan <= one.makespan + 3 * ways
        assert (two.in_flight <= one.in_flight + ways).all()


# -- The table itself


def test_a_message_that_is_read_too_early_is_refused():
    text = "message_ticks 1 2\n0@0 1@1 2@2\nF0 . .\n. F0 .\n. . .\n. . F0,B0\n. . .\n. B0 .\nB0,U1 U1 U1\n"
    table = Schedule.from_text(text).check()
    assert table.message_ticks == (1, 2) and table.to_dict()["message_ticks"] == [1, 2]
    for early in ((2, 1), 2, (1, 3)):
        fields = {**vars(table), "message_ticks": early}
        fields = {name: fields[name] for name in Schedule.__dataclass_fields__}
        with pytest.raises(ValueError, match="forward 0 before its input can be read|before its gradient can be read"):
            Schedule(**fields).check()
    with pytest.raises(ValueError, match="tick 4, stage 1: backward 0 before its gradient can be read \\(tick 5\\)"):
        Schedule.from_text(text.replace(". . .\n. B0 .", ". B0 .")).check()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("message_ticks", "line 1: write numbers of ticks, `message_ticks 2`, got `message_ticks`"),
        ("message_ticks two", "got `message_ticks two`"),
        ("message_ticks 0", "must be whole numbers of ticks from 1 to 1000, got 0"),
        ("message_ticks 1 2", "one number for each boundary of neighbouring devices, 1 for 2 devices, got \\[1, 2\\]"),
        ("slices 1 2", "write the number of slices, `slices 4`, got `slices 1 2`"),
    ],
)
def test_lines_that_cannot_be_read(words, message):
    with pytest.raises(ValueError, match=message):
        Schedule.from_text(f"{words}\n0@0 1@1\nF0 .\n. F0\n")


def test_lines_before_the_header_are_in_any_order():
    table = schedules.seq_one_f_one_b(2, 4, num_slices=2, message_ticks=2)
    first, second, rest = table.to_text().split("\n", 2)
    assert (first, second) == ("slices 2", "message_ticks 2")
    assert Schedule.from_text("\n".join([second, first, rest]), name=table.name) == table


def test_pictures_say_so():
    assert "messages of 1 2 ticks" in draw.text(schedules.gpipe(3, 4, message_ticks=(1, 2)))
    assert "messages" not in draw.text(schedules.gpipe(3, 4))
    assert "messages of 2 ticks" in draw.text(schedules.pipemare(3, 4, message_ticks=2))


def test_emulation_reads_the_versions_of_the_longer_way():
    table = schedules.emulated(schedules.pipemare(4, 2, message_ticks=2))
    assert table.facts().forward_delay.tolist() == [3, 2, 1, 0] and table.message_ticks == 1


# -- Its price


def test_a_message_passes_while_the_next_tick_computes():
    """GPipe on two devices: a forward takes 1, a backward 2, a message x, and all devices wait for a tick's end."""
    forwards, x = 6, 0.75
    costs = Costs(forward=1.0, backward=1.0, weight_grad=1.0, transfer=x)
    plain = simulate(schedules.gpipe(2, forwards), costs)
    # Of the N + 1 ticks with forwards, and as many with backwards, N each end with a message.
    assert plain.makespan == pytest.approx(3 * (forwards + 1) + 2 * forwards * x)
    slow = simulate(schedules.gpipe(2, forwards, message_ticks=2), costs)
    assert slow.makespan == pytest.approx(3 * (forwards + 2)) and slow.communicating == 0
    # A message that takes longer than a forward makes the ticks of forwards as long as itself.
    longer = simulate(schedules.gpipe(2, forwards, message_ticks=2), Costs(transfer=1.5))
    assert longer.makespan == pytest.approx(1 + forwards * 1.5 + 1 + 2 * (forwards + 2))
    # A tick with messages costs the devices time, and so does the update.
    waiting = simulate(schedules.gpipe(2, 2, message_ticks=2), Costs(transfer=0.5, tick=0.25))
    assert waiting.makespan == pytest.approx(3 * 4 + (4 + 1) * 0.25)


def test_the_round_of_a_steady_state_hides_messages():
    costs = Costs(transfer=0.5)
    one, two = (simulate(schedules.pipemare(4, 8, ticks="paired", message_ticks=k), costs) for k in (1, 2))
    assert one.makespan == pytest.approx(8 * 3.5) and two.makespan == pytest.approx(8 * 3)
