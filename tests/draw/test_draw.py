"""Pictures, facts as JSON, and the command line."""

import itertools
import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from jpipe import draw, schedules
from jpipe.schedule import Schedule
from jpipe.simulate import simulate

ROOT = pathlib.Path(__file__).parents[2]
PIPEMARE = Schedule.from_text("0@0 1@1\nF0@-3,B-3@-3,U-2 F-1@-2,B-2@-2,U-1\n", name="pipemare")


# -- Text -----------------------------------------------------------------------------


def test_facts_without_the_table_of_many_stages_are_ranges():
    table = schedules.emulated(schedules.pipemare(20, 2))
    lines = draw.text(table, table=False).splitlines()
    assert lines[0] == ("pipemare, emulated: 20 stages, 1 device, 2 microbatches, 78 ticks")
    assert "forward delay      0 to 10" in lines
    assert "stage              0 to 19" in lines
    assert len(lines) < 12


def test_a_picture_of_paired_ticks():
    assert draw.text(schedules.one_f_one_b(2, 3)) == (
        "one_f_one_b: 2 stages, 2 devices, 3 microbatches, 5 ticks\n"
        "\n"
        "tick  0\n"
        "s0    F0  F1  F2  .   .\n"
        "      .   .   B0  B1  B2*\n"
        "s1    .   F0  F1  F2  .\n"
        "      .   B0  B1  B2  *\n"
        "\n"
        "F forward   B backward   * update\n"
        "bubble 25.0%, makespan 12 (F = B = W = 1)\n"
        "bubble between first and last work 14.3%\n"
        "stage              0   1\n"
        "in flight          3   1\n"
        "forward delay      0   0\n"
        "backward delay     0   0\n"
        "weight versions    1   1\n"
    )


def test_a_picture_of_unit_ticks():
    picture = draw.text(schedules.one_f_one_b(2, 2, ticks="unit")).splitlines()
    assert picture[2:7] == [
        "tick  0                   5",
        "s0    F0  .   F1  B0  W0  .   B1  W1*",
        "s1    .   F0  B0  W0  F1  B1  W1  *",
        "",
        "F forward   B input gradient   W weight gradient   * update",
    ]


def test_a_picture_of_an_asynchronous_schedule_starts_with_an_empty_pipeline():
    picture = draw.text(PIPEMARE).splitlines()
    assert picture[2:] == [
        "tick  0",
        "s0    F0  F1  F2  F3",
        "      .   .   .   B0*",
        "s1    .   F0  F1  F2",
        "      .   .   B0* B1*",
        "",
        "F forward   B backward   * update",
        "the round that starts at tick 3 repeats",
        "bubble 0.0%, makespan 3 (F = B = W = 1)",
        "bubble between first and last work 0.0%",
        "stage              0   1",
        "in flight          4   2",
        "forward delay      3   1",
        "backward delay     0   0",
        "weight versions    1   1",
    ]


def test_stages_are_in_order_and_name_their_device():
    schedule = schedules.forward_only(3, 2, stage=[1, 0, 2], device=[1, 0, 0])
    picture = draw.text(schedule).splitlines()
    assert picture[3:6] == [
        "s0@0  F0 F1 .  .",
        "s1@1  .  F0 F1 .",
        "s2@0  .  .  F0 F1",
    ]


def test_counts_of_one():
    schedule = schedules.forward_only(1, 1)
    assert draw.text(schedule).startswith("forward_only: 1 stage, 1 device, 1 microbatch, 1 tick\n")


def test_a_narrow_picture_goes_on_below():
    schedule = schedules.gpipe(4, 8)
    narrow = draw.text(schedule, width=40)
    assert max(map(len, narrow.splitlines())) <= max(40, len(narrow.split("\n")[0]))
    assert narrow.count("\ns0 ") == 3
    cells = re.compile(r"^s2 +(.*)$", re.MULTILINE)
    assert " ".join(cells.findall(narrow)).split() == (cells.findall(draw.text(schedule))[0].split())
    assert draw.text(schedule, width=1).count("\ns0 ") == schedule.num_ticks


@pytest.mark.parametrize("ticks", ["paired", "unit"])
def test_colour_changes_nothing_else(ticks):
    schedule = schedules.one_f_one_b(3, 4, ticks=ticks)
    coloured = draw.text(schedule, color=True)
    assert "\x1b[38;5;16;48;5;153mF0\x1b[0m" in coloured
    assert "\x1b[38;5;231;48;5;94mB0\x1b[0m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == draw.text(schedule)


def test_every_update_of_a_stage_has_its_star():
    """The first stage updates after four microbatches, the last one after each."""
    table = schedules.pipedream(2, 4, "paired", update_every=(4, 1))
    assert draw.text(table).splitlines()[3:7] == [
        "s0    F0  F1  F2  F3  F4  F5  F6  F7",
        "      .   .   .   B0  B1  B2  B3* B4",
        "s1    .   F0  F1  F2  F3  F4  F5  F6",
        "      .   .   B0* B1* B2* B3* B4* B5*",
    ]


def test_a_broken_table_is_not_drawn():
    broken = Schedule.from_text("0@0\nB0\nF0,U1\n")
    for function in (draw.text, draw.figure, draw.summary):
        with pytest.raises(ValueError, match="<-- here"):
            function(broken)


# -- Figures --------------------------------------------------------------------------


def boxes(schedule) -> dict[str, list[tuple[float, float, float]]]:
    """Left edge, stage and width of the cells of each colour."""
    found = {}
    for patch in draw.figure(schedule).axes[0].patches:
        if patch.get_zorder() < 0:
            continue  # the background
        kind = tuple(np.round(np.array(patch.get_facecolor()) * 255).astype(int)[:3])
        row = patch.get_y() + patch.get_height() / 2
        found.setdefault(kind, []).append((patch.get_x(), round(row), round(patch.get_width(), 3)))
    return found


def times(axes) -> list[str]:
    """The labels of the time axis."""
    return [label.get_text() for label in axes.get_xticklabels()]


def words(schedule) -> list[str]:
    """All texts of a figure."""
    from matplotlib.text import Text

    return [text.get_text() for text in draw.figure(schedule).findobj(Text)]


def test_cells_are_as_wide_as_their_time():
    pytest.importorskip("matplotlib")
    schedule = schedules.gpipe(2, 2)
    forward, backward = boxes(schedule).values()
    assert sorted(forward) == [(0, 0, 1), (1, 0, 1), (1, 1, 1), (2, 1, 1)]
    assert sorted(backward) == [(3, 1, 2), (5, 0, 2), (5, 1, 2), (7, 0, 2)]
    (axes,) = draw.figure(schedule).axes
    assert times(axes) == ["0", "9"]  # the makespan
    updates = [line for line in axes.lines if line.get_marker() == "v"]
    assert sorted(tuple(line.get_data()) for line in updates) == [(9, -0.5), (9, 0.5)]


def test_columns_of_one_device_take_turns_in_a_figure():
    pytest.importorskip("matplotlib")
    both_at_tick_1 = Schedule.from_ticks("both", [[0, 1], [1, 2]], device=[0, 0])
    first, second = boxes(both_at_tick_1).values()
    assert sorted(first) == [(0, 0, 1), (1, 0, 1)]  # a row for the device
    assert sorted(second) == [(2, 0, 1), (3, 0, 1)]  # in another shade


def test_all_figures_have_one_width_and_one_scale():
    """A microbatch's whole work on a device is as wide, with one stage per device or two."""
    pytest.importorskip("matplotlib")
    inches = set()
    for schedule in (
        schedules.gpipe(2, 4),
        schedules.zero_bubble_h1(2, 4),
        schedules.interleaved(4, 4),
        schedules.zero_bubble_v(4, 4),
        schedules.pipemare(2, 4),
    ):
        figure = draw.figure(schedule)
        axes = figure.axes[0]
        low, high = axes.get_xlim()
        panel = axes.get_position().width * figure.get_size_inches()[0]
        share = schedule.num_stages / schedule.num_devices
        inches.add((round(panel / (high - low) * share, 9), figure.get_size_inches()[0]))
    assert len(inches) == 1


def test_a_long_figure_goes_on_below():
    pytest.importorskip("matplotlib")
    schedule = schedules.zero_bubble_h1(4, 40)  # 123 units
    figure = draw.figure(schedule)
    assert [times(axes) for axes in figure.axes] == [
        ["0", "31"],
        ["31", "62"],
        ["62", "93"],
        ["93", "123"],
    ]
    cells = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert cells.count("39") == 3 * 4
    assert figure.get_size_inches()[0] < 11


def test_an_asynchronous_figure_breaks_where_the_round_begins():
    pytest.importorskip("matplotlib")
    figure = draw.figure(schedules.pipemare(4, 8))
    assert [times(axes) for axes in figure.axes] == [["0", "23"], ["23", "47"]]
    (axes,) = draw.figure(schedules.pipemare(4, 1)).axes
    assert times(axes) == ["0", "8", "11"]


def test_a_figure_says_what_the_facts_say():
    pytest.importorskip("matplotlib")
    texts = words(schedules.one_f_one_b(4, 8))
    assert any("makespan 33; bubble 27.3%" in word for word in texts)
    assert {"forward", "backward", "update of the weights", "stage 3"} <= set(texts)
    assert any("numbers in cells are microbatches" in word for word in texts)
    assert any("the round after the dashed line repeats" in w for w in words(PIPEMARE))


def test_facts_that_differ_are_columns_and_others_are_in_the_caption():
    pytest.importorskip("matplotlib")
    texts = words(schedules.one_f_one_b(4, 8))
    assert "in\nflight" in texts
    assert not any("delay" in word or "versions" in word for word in texts)
    texts = words(schedules.gpipe(4, 8))
    assert "in\nflight" not in texts
    assert any("in flight 8 on all stages" in word for word in texts)
    texts = words(schedules.pipemare(4, 1))
    assert "forward\ndelay" in texts
    assert any("backward delay 0 on all stages; weight versions 1" in w for w in texts)
    texts = words(schedules.pipedream(4, 1))
    assert {"delay", "weight\nversions"} <= set(texts)


def test_a_figure_of_two_stages_per_device_names_them():
    pytest.importorskip("matplotlib")
    texts = words(schedules.interleaved(8, 8))
    assert {"device 0: stages 0, 4", "8, 4", "in\nflight\nby stage"} <= set(texts)
    assert "lighter: later stages of the device" in texts
    assert any("makespan 28.5" in word for word in texts)  # of the device's share
    assert any("a device's whole share" in word for word in texts)


def test_an_svg_has_a_title(tmp_path):
    pytest.importorskip("matplotlib")
    draw.save(schedules.gpipe(2, 2), tmp_path / "pipe.svg")
    title = "<title>gpipe: 2 stages, 2 devices, 2 microbatches, 6 ticks</title>"
    assert title in (tmp_path / "pipe.svg").read_text()


@pytest.mark.parametrize(("suffix", "magic"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_a_file_is_the_same_every_time(tmp_path, suffix, magic):
    pytest.importorskip("matplotlib")
    first, second = tmp_path / f"first.{suffix}", tmp_path / f"second.{suffix}"
    draw.save(schedules.gpipe(2, 2), first)
    draw.save(schedules.gpipe(2, 2), str(second))
    assert first.read_bytes().startswith(magic)
    assert first.read_bytes() == second.read_bytes()


def test_a_suffix_that_cannot_be_drawn(tmp_path):
    with pytest.raises(ValueError, match=r"suffix '\.gif' is none of \.pdf, \.png, \.svg"):
        draw.save(schedules.gpipe(2, 2), tmp_path / "pipe.gif")


# -- The command line -----------------------------------------------------------------


def test_text_is_the_default(capsys):
    draw.main(["one_f_one_b", "--stages", "2", "--microbatches", "4"])
    assert capsys.readouterr().out == draw.text(schedules.one_f_one_b(2, 4))


def test_options(capsys):
    counts = ["--stages", "2", "--microbatches", "4"]
    draw.main(["one_f_one_b", *counts, "--option", "ticks=unit"])
    assert capsys.readouterr().out == draw.text(schedules.one_f_one_b(2, 4, ticks="unit"))
    draw.main(["forward_only", *counts, "--option", "device=[0,0]"])
    assert capsys.readouterr().out == draw.text(schedules.forward_only(2, 4, device=[0, 0]))


def test_json_is_one_object(capsys):
    draw.main(["gpipe", "--stages", "4", "--microbatches", "8", "--json"])
    found = json.loads(capsys.readouterr().out)
    table = found.pop("table")
    assert found == {
        "num_ticks": 22,
        "makespan": 33,
        "bubble": 3 / 11,
        "inner_bubble": 3 / 19,
        "in_flight": [8, 8, 8, 8],
        "forward_delay": [0, 0, 0, 0],
        "backward_delay": [0, 0, 0, 0],
        "weight_versions": [1, 1, 1, 1],
    }
    assert table["stage"] == table["device"] == [0, 1, 2, 3]
    assert table["forward"][:2] == [[0, None, None, None], [1, 0, None, None]]
    assert table["update"][-1] == [1, 1, 1, 1]


def test_a_file_is_drawn(tmp_path, capsys):
    path = tmp_path / "mine.txt"
    path.write_text(PIPEMARE.to_text())
    draw.main(["--file", str(path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["forward_delay"] == [3, 1]
    assert found["table"]["name"] == "mine"
    assert found["table"]["forward"] == [[0, -1]]


def test_out(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "pipe.svg"
    draw.main(f"gpipe --stages 2 --microbatches 2 --out {path}".split())
    assert path.read_text().startswith("<?xml")
    assert capsys.readouterr().out == draw.text(schedules.gpipe(2, 2))


def test_a_warning_is_one_line_on_stderr(capsys):
    draw.main(["gpipe", "--stages", "4", "--microbatches", "1", "--json"])
    captured = capsys.readouterr()
    assert json.loads(captured.out)["bubble"] == 0.75
    assert re.fullmatch(r"jpipe.draw: warning: gpipe .* 75% bubble.*\n", captured.err)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "name a schedule (dual_pipe_v, gpipe, "),
        ("gpip --stages 4 --microbatches 8", "Did you mean 'gpipe'?"),
        ("gpipe", "gpipe needs --stages and --microbatches"),
        ("gpipe --stages 4", "gpipe needs --stages and --microbatches"),
        ("gpipe --stages 0 --microbatches 8", "`num_stages` must be an integer of at"),
        ("gpipe --stages 4 --microbatches 0", "`num_microbatches` must be an integer"),
        ("gpipe --stages x --microbatches 8", "invalid int value: 'x'"),
        ("gpipe --stages 4 --microbatches 8 --option a=1", "gpipe has no option 'a'"),
        ("gpipe --stages 4 --microbatches 8 --option a", "must be key=value, got 'a'"),
        (
            "one_f_one_b --stages 4 --microbatches 8 --option tick=unit",
            "one_f_one_b has no option 'tick'. Did you mean 'ticks'?",
        ),
        (
            "one_f_one_b --stages 4 --microbatches 8 --option ticks=half",
            "`ticks` must be 'paired', 'unit' or 'overlapped', got 'half'",
        ),
        (
            "forward_only --stages 4 --microbatches 8 --option device=x",
            "`device` must hold integers",
        ),
        (
            "gpipe --stages 4 --microbatches 8 --out pipe.gif",
            "suffix '.gif' is none of",
        ),
        ("gpipe --stages 4 --microbatches 8 --out pipe", "suffix '' is none of"),
        ("gpipe --stages 4 --microbatches 8 --out /no/such/x.svg", "No such file"),
        ("gpipe --stages 4 --microbatches 8 --nonsense", "unrecognized arguments"),
        (
            "gpipe -s 4 -n 8",
            "-n 8. Did you mean '--stages'? Did you mean '--microbatches'?",
        ),
        ("gpipe --stag 4 --microbatchez=8", "Did you mean '--microbatches'?"),
        ("--file /no/such/table.txt", "No such file"),
        ("gpipe --file table.txt", "--file is a whole table"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(line, message, capsys):
    with pytest.raises(SystemExit) as info:
        draw.main(line.split())
    captured = capsys.readouterr()
    assert info.value.code == 2
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("jpipe.draw: ")
    assert captured.err.count("\n") == 1


def test_a_broken_file_prints_its_table(tmp_path, capsys):
    path = tmp_path / "broken.txt"
    path.write_text("0@0\nB0\nF0,U1\n")
    with pytest.raises(SystemExit) as info:
        draw.main(["--file", str(path)])
    assert info.value.code == 2
    assert "tick 0  [B0]  <-- here" in capsys.readouterr().err


def test_the_module_runs():
    arguments = ["gpipe", "--stages", "4", "--microbatches", "8", "--json"]
    result = subprocess.run(
        [sys.executable, "-m", "jpipe.draw", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(result.stdout)["makespan"] == 33


@pytest.mark.parametrize("schedule", [schedules.interleaved(4, 4), PIPEMARE])
def test_a_trace_has_every_operation_of_a_device_one_after_the_other(schedule):
    found = draw.trace(schedule, simulate(schedule))
    assert json.loads(json.dumps(found)) == found
    slices = [event for event in found["traceEvents"] if event["ph"] == "X"]
    operations = schedule.num_microbatches * schedule.num_stages * 2
    assert len(slices) == operations
    assert {e["name"] for e in slices} == {f"{kind}{m}" for kind in "FB" for m in range(schedule.num_microbatches)}
    assert min(e["ts"] for e in slices) == 0
    for d in range(schedule.num_devices):
        mine = sorted((e["ts"], e["dur"]) for e in slices if e["tid"] == d)
        if schedule.synchronous:
            assert all(a + da <= b for (a, da), (b, _) in itertools.pairwise(mine))
        assert sum(dur for _, dur in mine) == 1e3 * simulate(schedule).busy[d]


def test_trace_writes_a_file(tmp_path, capsys):
    path = tmp_path / "trace.json"
    command = ["gpipe", "--stages", "2", "--microbatches", "2", "--trace", str(path)]
    draw.main(command)
    events = json.loads(path.read_text())["traceEvents"]
    (last,) = [e for e in events if e["name"] == "B1" and e["tid"] == 0]
    assert (last["ts"], last["dur"]) == (7e3, 2e3)
    assert last["args"] == {"microbatch": 1, "stage": 0}
    assert "gpipe: 2 stages" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        draw.main([*command[:-1], str(tmp_path / "no" / "such" / "trace.json")])
    assert "No such file" in capsys.readouterr().err
