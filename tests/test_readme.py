"""The README does what it says: code runs, commands exist, numbers are right."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import jpipe
from jpipe import draw
from train import flags
from train.config import TrainConfig

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.M | re.S)


def commands(program):
    lines = "".join(blocks("console")).splitlines()
    return [line[2:] for line in lines if line.startswith(f"$ {program}")]


def test_the_code_runs():
    code = "\n".join(blocks("python"))
    assert "Pipeline(" in code and "from_text(" in code
    check = "\nassert outputs.shape == (32, 64) and len(params) == 8\n"
    # By itself: it chooses its devices, which must come before anything runs.
    run = subprocess.run(
        [sys.executable, "-c", code + check],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("command", commands("python train/train.py"))
def test_training_commands_are_understood(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [word for word in command.split()[2:] if word != "--help"]
    flags.parse(words, TrainConfig)


@pytest.mark.parametrize("command", commands("make"))
def test_make_targets_exist(command):
    target = command.split()[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.M)


def test_the_picture_is_what_the_command_prints(capsys):
    (command,) = commands("python -m jpipe.draw")
    (block,) = (block for block in blocks("console") if command in block)
    draw.main(command.split()[3:])
    assert capsys.readouterr().out == block.split("\n", 1)[1]


def test_the_table_of_schedules_is_right():
    row = r"^\| `((\w+)\(.*?\))` \|.*?\| (\d+) \| ([\d.%]+) \| ([\d ]+) \| (\d+) \|$"
    rows = re.findall(row, README, flags=re.M)
    assert {row[1] for row in rows} == {*jpipe.schedules.names()} - {"forward_only"}
    for call, _, num_ticks, bubble, in_flight, versions in rows:
        schedule = eval(f"jpipe.schedules.{call}", {"jpipe": jpipe})
        facts = schedule.facts()
        assert schedule.num_ticks == int(num_ticks), call
        assert f"{facts.bubble:.1%}" == bubble, call
        assert facts.in_flight.tolist() == [int(m) for m in in_flight.split()], call
        assert facts.weight_versions.max() == int(versions), call


def test_what_it_prints_is_what_the_quickstart_prints():
    # Numbers change from machine to machine; the schedule and the words do not.
    (text,) = (block for block in blocks("text") if "held-out" in block)
    config = flags.load(str(ROOT / "configs" / "quickstart.py"), TrainConfig)
    assert draw.text(config.pipeline.table()) in text
    assert f"step {config.num_steps}/{config.num_steps}  loss " in text


def test_files_that_it_names_exist():
    names = re.findall(r"`((?:jpipe|models|train|configs|tests)/[\w/.]*)`", README)
    assert len(names) > 5
    assert [name for name in names if not (ROOT / name).exists()] == []
