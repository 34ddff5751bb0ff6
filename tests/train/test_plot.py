"""The picture of a run: what is in it, and what is said of folders without a log."""

import json
import subprocess
import sys

import pytest

from train import plot

LINES = [
    {"step": 0, "memory_bytes": {"weights": 8}, "seconds": 1.0},
    *(
        {
            "step": step,
            "loss": 2.0**-step,
            "gradient_norm": 1.0,
            "learning_rate": 0.1,
            "tokens_per_second": 1000.0,
            "peak_memory_bytes": 2**30,
        }
        for step in range(1, 9)
    ),
]
EACH_STEP = [
    {
        "step": 4,
        "loss": 2.5,
        "learning_rate": 0.4,
        "each_step": {
            "loss": [None, 3.0, 2.5, 2.0],
            "gradient_norm": [None, 1.0, None, 2.0],
            "learning_rate": [0.1, 0.2, 0.3, 0.4],
        },
    },
    {
        "step": 6,
        "loss": 1.0,
        "learning_rate": 0.2,
        "each_step": {
            "loss": [1.5, 0.5],
            "gradient_norm": [1.0, 1.0],
            "learning_rate": [0.3, 0.2],
        },
    },
]
MEAN = "training, mean of the steps of a log line"
HELD = "held-out data, after this step"
HELD_OUT = [
    {"step": 4, "test_loss": 0.5, "test_accuracy": 0.5},
    {"step": 8, "test_loss": 0.1, "test_accuracy": 0.75, "bits_per_byte": 0.144},
]


def panels(records):
    """{label of a panel: {label of a line: its points}}"""
    return {
        axes.get_title(loc="left"): {line.get_label(): list(zip(*line.get_data())) for line in axes.lines}
        for axes in plot.figure(records, "run").axes
    }


def write(run_dir, records):
    run_dir.mkdir(exist_ok=True)
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    (run_dir / "log.jsonl").write_text("".join(f"{line}\n" for line in lines))


def test_a_panel_for_each_quantity():
    found = panels([*LINES, *HELD_OUT])
    assert list(found) == [
        "loss (nats)",
        "gradient norm",
        "learning rate",
        "speed (tokens/s)",
    ]
    assert found["loss (nats)"] == {
        MEAN: [(step, 2.0**-step) for step in range(1, 9)],
        HELD: [(4, 0.5), (8, 0.1)],
    }
    assert found["speed (tokens/s)"][MEAN] == [(s, 1000.0) for s in range(1, 9)]


def test_every_step_is_drawn_and_means_lie_in_the_middle_of_their_steps():
    found = panels([*EACH_STEP, *HELD_OUT])
    assert found["loss (nats)"] == {
        "training, each step": [(2, 3.0), (3, 2.5), (4, 2.0), (5, 1.5), (6, 0.5)],
        MEAN: [(2.5, 2.5), (5.5, 1.0)],
        HELD: [(4, 0.5), (8, 0.1)],
    }
    (rates,) = found["learning rate"].values()  # with the rise at its begin
    assert rates == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 0.3), (6, 0.2)]
    assert list(found["gradient norm"].values())[0] == [(2, 1), (4, 2), (5, 1), (6, 1)]


def test_one_curve_is_enough_if_every_step_is_a_line():
    lines = [line | {"each_step": {"loss": [line["loss"]]}} for line in LINES if "loss" in line]
    points = [(step, 2.0**-step) for step in range(1, 9)]
    assert panels(lines)["loss (nats)"] == {"training, each step": points}


def test_many_steps_are_averaged_to_what_a_picture_can_show():
    record = {
        "step": 6000,
        "loss": 3.0,
        "learning_rate": 0.1,
        "each_step": {"loss": [float(k) for k in range(1, 6001)]},
    }
    found = panels([record])["loss (nats)"]
    points = found["training, mean of 3 steps"]
    assert len(points) == 2000
    assert points[0] == (2, 2) and points[-1] == (5999, 5999)


def test_what_a_log_has_not_has_no_panel():
    assert list(panels([{"step": 3, "learning_rate": 0.1}])) == ["learning rate"]
    found = panels([{"step": 3, "loss": None, "error": "e"}, *HELD_OUT])
    assert found == {"loss (nats)": {HELD: [(4, 0.5), (8, 0.1)]}}
    assert plot.figure(LINES[:1], "run") is None
    assert plot.figure([{"step": 1, "loss": None, "error": "e"}], "run") is None
    assert plot.figure([], "run") is None


def test_losses_that_fall_far_are_on_a_logarithmic_axis():
    loss, norm, rate, speed = plot.figure(LINES, "run").axes
    assert loss.get_yscale() == "log"  # 256 times less at the end
    assert {axes.get_yscale() for axes in (norm, rate, speed)} == {"linear"}
    assert all(axes.get_ylim()[0] == 0 for axes in (norm, rate, speed))
    assert plot.figure(LINES[:4], "run").axes[0].get_yscale() == "linear"
    zero = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.0}]
    assert plot.figure(zero, "run").axes[0].get_yscale() == "linear"


@pytest.mark.parametrize(
    "losses, expected",
    [
        # A run that diverged: powers of ten, on one axis all written alike.
        ([2.5, 1e4, 1e11, 1e15], {"$10^{3}$", "$10^{9}$"}),
        ([2e6, 4e6, 3e6], {r"$2\times10^{6}$", r"$3\times10^{6}$"}),
        ([2500.0, 1000.0, 2000.0], {"1,000", "2,500"}),
        ([2.0, 1.0, 1.5], {"1", "1.5", "2"}),
    ],
)
def test_numbers_of_an_axis_are_written_alike(losses, expected):
    records = [{"step": k, "loss": loss, "learning_rate": 0.1} for k, loss in enumerate(losses, 1)]
    fig = plot.figure(records, "run")
    fig.draw_without_rendering()
    axes = fig.axes[0]
    low, high = axes.get_ylim()
    texts = {label.get_text() for label, tick in zip(axes.get_yticklabels(), axes.get_yticks()) if low <= tick <= high}
    assert expected <= texts and len({text.startswith("$") for text in texts}) == 1


def test_the_title_says_how_it_ended():
    def title(records):
        return plot.figure(records, "run").get_suptitle()

    assert title(LINES) == "run"
    assert title([*LINES, *HELD_OUT]) == (
        "run\nafter step 8, held-out: accuracy 75.00%, loss 0.1000, 0.144 bits per byte"
    )
    error = {"step": 9, "loss": None, "error": "the loss is nan"}
    assert title([*LINES, *HELD_OUT[:1], error]) == "run\nstep 9: the loss is nan"


def test_no_text_lies_over_another():
    fig = plot.figure([*LINES, *HELD_OUT], "run")
    renderer = fig.canvas.get_renderer() if hasattr(fig.canvas, "get_renderer") else None
    fig.draw_without_rendering()
    boxes = [fig._suptitle.get_window_extent(renderer)]
    for axes in fig.axes:
        labels = [*axes.get_yticklabels(), axes.get_legend()]
        low, high = axes.get_ylim()
        boxes.append(axes._left_title.get_window_extent(renderer))
        boxes.extend(
            label.get_window_extent(renderer) for label, tick in zip(labels, axes.get_yticks()) if low <= tick <= high
        )
    boxes = [box for box in boxes if box.width]
    assert len(boxes) > 12
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])


def test_from_a_shell_and_alone(tmp_path):
    write(tmp_path / "run", LINES)
    (tmp_path / "run" / "run.png").write_text("an older one")
    command = [sys.executable, plot.__file__, "run"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "run/run.png\n", "")
    png = (tmp_path / "run" / "run.png").read_bytes()
    assert png.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "records, message",
    [
        (None, "there is no log `run/log.jsonl`. Name the folder of a run"),
        ([], "the log in `run` has nothing to draw yet."),
        (LINES[:1], "the log in `run` has nothing to draw yet."),
        ([*LINES, '{"step": 9, "lo'], "line 10 of `run/log.jsonl` is not a record"),
        (["[1, 2]"], "line 1 of `run/log.jsonl` is not a record with a step: '[1, 2]'"),
        ([{"loss": 1.0}], "line 1 of `run/log.jsonl` is not a record with a step"),
    ],
)
def test_messages(tmp_path, monkeypatch, capsys, records, message):
    monkeypatch.chdir(tmp_path)
    if records is not None:
        write(tmp_path / "run", records)
    assert plot.main(["run"]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1
    assert error.startswith("plot.py: ") and message in error
    assert not (tmp_path / "run" / "run.png").exists()


def test_help(capsys):
    assert plot.main(["--help"]) == 0
    assert "python train/plot.py runs/" in capsys.readouterr().out
    assert plot.main([]) == plot.main(["a", "b"]) == 2


def test_diagnostics_have_one_line_a_stage():
    lines = [
        {
            "step": step,
            "loss": 1.0,
            "diagnostics": {"update_cosine": {"0": -0.5, "2": 0.5}, "curvature": {"2": 10.0**step}},
        }
        for step in (1, 2)
    ]
    figure = plot.figure(lines, "title")
    axes = {axes.get_title(loc="left"): axes for axes in figure.axes}
    cosine, curvature = axes["cosine between an update and the last one"], axes["curvature (secant)"]
    drawn = [list(map(list, zip(*line.get_data()))) for line in cosine.lines if line.get_label() != "_child2"]
    assert drawn[:2] == [[[1, -0.5], [2, -0.5]], [[1, 0.5], [2, 0.5]]]
    assert [text.get_text() for text in cosine.get_legend().get_texts()] == ["stage 0", "stage 2"]
    assert cosine.get_ylim() == (-1.05, 1.05)
    assert [text.get_text() for text in curvature.get_legend().get_texts()] == ["stage 2"]
    assert "movement of the weights since the forward" not in axes
