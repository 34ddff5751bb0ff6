"""The README: short, with a table that is right. `tests/docs/test_docs.py` runs its programs and commands."""

import re

from pages import ROOT, blocks

import jpipe
from jpipe import draw
from train import flags
from train.config import TrainConfig

README = ROOT / "README.md"


def test_it_is_short():
    assert len(README.read_text().splitlines()) <= 160
    (program,) = (b.text for b in blocks(README) if b.language == "python")
    assert len(program.splitlines()) <= 16
    assert program.endswith('print(metrics["loss"])\n')


def test_the_table_of_schedules_is_right():
    row = r"^\| `((\w+)\(.*?\))` \|.*?\| (\d+) \| ([\d.%]+) \| ([\d ]+) \| (\d+) \|$"
    rows = re.findall(row, README.read_text(), flags=re.M)
    assert {row[1] for row in rows} == {*jpipe.schedules.names()} - {"forward_only"}
    for call, _, num_ticks, bubble, in_flight, versions in rows:
        schedule = eval(f"jpipe.schedules.{call}", {"jpipe": jpipe})
        facts = schedule.facts()
        assert schedule.num_ticks == int(num_ticks), call
        assert f"{facts.bubble:.1%}" == bubble, call
        assert facts.in_flight.tolist() == [int(m) for m in in_flight.split()], call
        assert facts.weight_versions.max() == int(versions), call


def test_what_the_quickstart_is_said_to_print_is_what_it_prints():
    # Numbers change from machine to machine; the schedule and the words do not.
    page = ROOT / "docs" / "how_to" / "script.md"
    (text,) = (b.text for b in blocks(page) if "held-out" in b.text)
    config = flags.load(str(ROOT / "configs" / "quickstart.py"), TrainConfig)
    assert draw.text(config.pipeline.table()) in text
    epochs = f"{config.num_steps / 66:.1f}"  # of 8,572 images in batches of 128
    assert f"step {config.num_steps}/{config.num_steps}  100%  epoch {epochs}/{epochs}  loss " in text
