"""The log of a run: its lines, its records, and the same for TensorBoard."""

import json
import pathlib
import shutil
import subprocess
import sys
import time
import types

import numpy as np
import pytest
from helpers import events_of, file_size_limit, log_of

from train import log as log_module
from train.goodput import KINDS
from train.log import (
    Log,
    NonFiniteGradientsError,
    NonFiniteLossError,
    peak_memory_bytes,
)
from train.tensorboard import EventFile, scalars


def make_log(tmp_path, **changes):
    options = dict(
        num_steps=5,
        log_every=2,
        unit="images",
        learning_rate=lambda step: step / 8,
        start=time.perf_counter(),
    )
    first_step = 1 + (changes.get("resumed") or {"last_step": 0})["last_step"]
    options["writers"] = [EventFile(tmp_path, first_step)]
    return Log(tmp_path / "log.jsonl", **(options | changes))


# -- Lines ------------------------------------------------------------------------------


def test_a_line_has_the_mean_since_the_line_before(tmp_path, capsys):
    with make_log(tmp_path) as log:
        for step, loss in enumerate([1.0, 2.0, 4.0, None, 5.0], start=1):
            log.step(
                step,
                loss,
                gradient_norm=10.0 * step,
                num_skipped=int(step == 3),
                num_units=10,
            )
            lines = (tmp_path / "log.jsonl").read_text().splitlines()
            assert len(lines) == (0, 1, 1, 2, 3)[step - 1]  # written at once
            assert len(events_of(tmp_path)) == len(lines)
    first, second, third = log_of(tmp_path)
    assert (first["loss"], second["loss"], third["loss"]) == (1.5, 4.0, 5.0)
    assert [line["gradient_norm"] for line in (first, second, third)] == [15, 35, 50]
    assert [line["learning_rate"] for line in (first, second, third)] == [
        0.25,
        0.5,
        0.625,
    ]
    assert second["skipped_updates"] == 1 and "skipped_updates" not in third
    out = capsys.readouterr().out
    assert "updates skipped, gradients not finite: 1" in out
    assert "step 2/5   40%  loss 1.5000  gradient 15  rate 0.25  " in out
    assert " images/s  0:00 left  peak " in out and out.count(" MiB\n") == 3


def test_a_record_holds_the_numbers_of_every_step(tmp_path):
    with make_log(tmp_path, log_every=3) as log:
        for step, loss in enumerate([1.0, None, 1 / 3, 4.0, 5.0], start=1):
            norm = float("inf") if step == 4 else 2.0
            log.step(step, loss, num_units=10, gradient_norm=norm)
    first, second = [line["each_step"] for line in log_of(tmp_path)]
    assert first == {
        "loss": [1.0, None, 0.333333],
        "gradient_norm": [2.0, 2.0, 2.0],
        "learning_rate": [0.125, 0.25, 0.375],
    }
    assert second["loss"] == [4.0, 5.0] and second["gradient_norm"] == [None, 2.0]


def test_a_pipeline_that_fills_has_no_loss(tmp_path):
    with make_log(tmp_path) as log:
        log.step(1, None, num_units=10)
        log.step(2, None, num_units=10)
    (line,) = log_of(tmp_path)
    assert "loss" not in line and "gradient_norm" not in line and line["step"] == 2


def test_a_gradient_that_is_not_finite_is_in_no_mean(tmp_path):
    with make_log(tmp_path) as log:
        log.step(
            1,
            1.0,
            gradient_norm=float("inf"),
            num_skipped=2,
            updated=False,
            num_units=10,
        )
        log.step(2, 1.0, gradient_norm=3.0, num_units=10)
    (line,) = log_of(tmp_path)
    assert (line["gradient_norm"], line["skipped_updates"]) == (3.0, 2)


def test_an_unfinished_line_is_written_when_a_run_ends(tmp_path):
    with make_log(tmp_path) as log:
        for step in (1, 2, 3):
            log.step(step, float(step), num_units=10)
        log.finish_line()
        log.finish_line()  # nothing is left
    assert [(line["step"], line["loss"]) for line in log_of(tmp_path)] == [
        (2, 1.5),
        (3, 3.0),
    ]


def test_speed_is_that_of_training_alone(tmp_path, monkeypatch):
    now = 0.0
    clock = types.SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr(log_module, "time", clock)
    with make_log(tmp_path, num_steps=6, start=-7.0) as log:
        for step in range(1, 7):
            now += 100 if step == 1 else 2  # the first may compile
            log.step(step, 1.0, num_units=10 * step)  # batches differ, as with padding
            if step in (2, 3):
                with log.paused("evaluating"):
                    now += 50
    lines = log_of(tmp_path)
    assert [line["images_per_second"] for line in lines] == [10.0, 17.5, 27.5]
    assert [line["seconds"] for line in lines] == [109.0, 213.0, 217.0]
    goodput = [line["goodput_seconds"] for line in lines]
    assert [sum(parts.values()) for parts in goodput] == [109.0, 213.0, 217.0]
    kinds = {"compiling": 107.0, "evaluating": 100.0, "training": 10.0}
    assert goodput[-1] == dict.fromkeys(KINDS, 0.0) | kinds


def test_the_unit_of_speed_is_that_of_the_data(tmp_path, capsys):
    with make_log(tmp_path, unit="tokens") as log:
        log.step(1, 1.0, num_units=10)
        log.step(2, 1.0, num_units=10)
    assert log_of(tmp_path)[0]["tokens_per_second"] > 0
    assert " tokens/s " in capsys.readouterr().out


def test_epochs_and_samples_are_counted(tmp_path, capsys, monkeypatch):
    now = 0.0
    clock = types.SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr(log_module, "time", clock)
    with make_log(tmp_path, num_steps=40, unit="tokens", batch_size=6, steps_per_epoch=16, start=0.0) as log:
        for step in (1, 2, 3, 4):
            now += 3
            log.step(step, 1.0, num_units=90)
    second, fourth = log_of(tmp_path)
    assert (second["epoch"], fourth["epoch"]) == (2 / 16, 4 / 16)
    assert (fourth["samples_per_second"], fourth["tokens_per_second"]) == (2.0, 30.0)
    out = capsys.readouterr().out
    assert "step  4/40   10%  epoch 0.25/2.50  loss 1.0000  rate 0.5  2.0 samples/s  30 tokens/s  1:48 left" in out


def test_an_image_is_a_sample(tmp_path, capsys):
    with make_log(tmp_path, batch_size=10) as log:
        log.step(1, 1.0, num_units=10)
        log.step(2, 1.0, num_units=10)
    assert "samples_per_second" not in log_of(tmp_path)[0] and "samples/s" not in capsys.readouterr().out


def test_peak_memory_is_that_of_the_process(monkeypatch):
    block = np.ones(2**22)  # 32 MiB, touched
    assert block.nbytes < peak_memory_bytes() < 2**40
    monkeypatch.setattr(log_module, "resource", None)  # as on Windows
    assert peak_memory_bytes() is None


# -- Held-out data ----------------------------------------------------------------------


def test_evaluations_are_records_and_lines(tmp_path, capsys):
    with make_log(tmp_path, unit="tokens", num_steps=10) as log:
        result = {"test_loss": 2.0, "test_accuracy": 0.25}
        log.held_out(4, result)
        log.held_out(5, result | {"test_intersection_over_union": 0.125})
        log.held_out(10, result | {"bits_per_byte": 2.5})
    first, second, last = log_of(tmp_path)
    assert first.pop("seconds") >= 0 and first == {"step": 4, **result}
    assert second["test_intersection_over_union"] == 0.125
    assert last["bits_per_byte"] == 2.5
    assert capsys.readouterr().out.splitlines() == [
        "step  4/10  held-out tokens: accuracy 25.00%, loss 2.0000",
        "step  5/10  held-out tokens: accuracy 25.00%, intersection over union 12.50%, loss 2.0000",
        "held-out tokens: accuracy 25.00%, loss 2.0000, 2.500 bits per byte",
    ]


# -- What is not finite -----------------------------------------------------------------


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_the_step_of_a_loss_that_is_not_finite_is_named(tmp_path, loss):
    with make_log(tmp_path) as log:
        log.step(1, 1.0, num_units=10)
        with pytest.raises(NonFiniteLossError, match=f"step 2: the loss is {loss}"):
            log.step(2, loss, num_units=10)
    before, line = log_of(tmp_path)
    assert (before["step"], before["loss"]) == (1, 1.0)
    assert line == {"step": 2, "loss": None, "error": f"the loss is {loss}"}


def test_a_held_out_loss_that_is_not_finite_is_an_error(tmp_path):
    with make_log(tmp_path) as log:
        with pytest.raises(NonFiniteLossError, match="step 4: the held-out loss is nan"):
            log.held_out(4, {"test_loss": float("nan"), "test_accuracy": 0.0})
    (line,) = log_of(tmp_path)
    assert line["test_loss"] is None


@pytest.mark.parametrize(
    "log_every, skipped, stops",
    [
        (50, range(1, 51), 50),
        (50, range(31, 101), 100),
        (50, [*range(1, 50), *range(51, 100)], None),  # one update a line
        (7, range(1, 101), 21),  # a line is too short to tell
        (7, range(3, 21), None),
        (1, range(11, 101), 30),
    ],
)
def test_a_line_without_any_update_is_an_error(tmp_path, log_every, skipped, stops):
    def run():
        with make_log(tmp_path, num_steps=100, log_every=log_every) as log:
            for step in range(1, 101):
                missing = step in skipped
                log.step(
                    step,
                    1.0,
                    num_skipped=4 * missing,
                    updated=not missing,
                    num_units=10,
                )

    if stops is None:
        return run()
    with pytest.raises(NonFiniteGradientsError) as caught:
        run()
    num_steps = stops - skipped[0] + 1
    assert str(caught.value) == (
        f"step {stops}: the gradients of the last {num_steps} steps were not finite, so "
        "none of them updated the weights."
    )
    *_, line, error = log_of(tmp_path)
    assert line["step"] == error["step"] == stops and line["skipped_updates"] > 0
    assert f"last {num_steps} steps were not finite" in error["error"]


# -- Files that cannot be written -------------------------------------------------------


def test_a_full_disk_costs_no_record(tmp_path, capsys):
    """One warning. The records are kept until there is space, and no line is cut."""
    with make_log(tmp_path) as log:
        log.write({"step": 0})
        with file_size_limit(100):
            log.write({"step": 1, "words": "x" * 200})
            log.write({"step": 2})
            assert log.num_unwritten == 2
            assert [record["step"] for record in log_of(tmp_path)] == [0]
        log.write({"step": 3})  # there is space again
        assert log.num_unwritten == 0
    assert [record["step"] for record in log_of(tmp_path)] == [0, 1, 2, 3]
    error = capsys.readouterr().err
    path = tmp_path / "log.jsonl"
    assert error.count("\n") == 1 and error.startswith(
        f"train.py: warning: step 1: cannot write the log `{path}`: File too large. Training goes on"
    )


def test_a_folder_that_was_removed_costs_only_what_was_in_it(tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    with make_log(folder) as log:
        log.step(1, 1.0, num_units=10)
        shutil.rmtree(folder)
        log.step(2, 1.0, num_units=10)
        assert log.num_unwritten == 1 and not folder.exists()
        folder.mkdir()
    assert [record["step"] for record in log_of(folder)] == [2]
    assert "No such file or directory. Training goes on" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_output_that_cannot_be_written_is_a_warning(tmp_path):
    program = (
        f"import sys; sys.path[:0] = {[str(pathlib.Path(__file__).parent), *sys.path]!r}\n"
        "import pathlib, test_log\n"
        f"log = test_log.make_log(pathlib.Path({str(tmp_path)!r}))\n"
        "log.print('a line'); log.print('another line')\n"
    )
    with open("/dev/full", "w") as full:
        run = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE)
    assert run.returncode == 0
    assert run.stderr.decode() == (
        "train.py: warning: step 0: cannot write to standard output: No space left on device. Training goes on.\n"
    )


def test_a_log_goes_on_from_a_position(tmp_path):
    """As if it had not stopped: the means of a line begin before the position."""
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    losses = [1.0, 2.0, 4.0, 8.0]

    def steps(log, numbers):
        for step in numbers:
            log.step(step, losses[step - 1], gradient_norm=1.0, num_units=10)

    for folder in (whole, parted):
        folder.mkdir()
    with make_log(whole, num_steps=4, log_every=4) as log:
        steps(log, [1, 2, 3, 4])
    with make_log(parted, num_steps=4, log_every=4) as log:
        log.write({"step": 0})
        steps(log, [1, 2])
        position = json.loads(json.dumps(log.position()))
        log.write({"step": 2, "lost": True})
    with make_log(parted, num_steps=4, log_every=4, resumed=position) as log:
        assert log.seconds() >= position["seconds"]
        steps(log, [3, 4])
    (want,), (first, got) = log_of(whole), log_of(parted)
    assert first == {"step": 0}
    for record in (want, got):
        for measured in ("seconds", "images_per_second", "peak_memory_bytes", "goodput_seconds"):
            record.pop(measured)
    assert got == want


# -- TensorBoard ------------------------------------------------------------------------


def test_every_number_of_a_record_is_a_scalar_of_tensorboard(tmp_path):
    with make_log(tmp_path) as log:
        log.write({"step": 0, "memory_bytes": {"weights": 8, "batch": 3}})
        for step in (1, 2, 3):
            log.step(step, 0.5, gradient_norm=2.0, num_units=10)
        log.held_out(3, {"test_loss": 2.0, "test_accuracy": 0.25})
        with pytest.raises(NonFiniteLossError):
            log.step(4, float("nan"), num_units=10)
    records, events = log_of(tmp_path), events_of(tmp_path)
    assert [step for step, _ in events] == [r["step"] for r in records] == [0, 2, 3, 3, 4]
    assert events[0] == (0, {"memory_bytes/weights": 8.0, "memory_bytes/batch": 3.0})
    assert events[-1] == (4, {})  # no number: `null` and a text
    for record, (step, values) in zip(records[1:-1], events[1:-1], strict=True):
        assert record.pop("step") == step
        record.pop("each_step", None)  # lists are no scalars
        assert values == pytest.approx(dict(scalars(record)), rel=1e-6)


def test_closing_twice_is_closing(tmp_path):
    log = make_log(tmp_path)
    log.step(1, 1.0, num_units=10)
    log.close()
    log.close()
    assert "tensorboard" not in sys.modules  # its files need only tensorboardX
