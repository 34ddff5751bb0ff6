"""What the pages in docs/ say is so: facts of schedules, programs that run, pictures that exist."""

import pathlib
import re

import pytest

import jpipe

DOCS = pathlib.Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pictures_and_pages_exist(page):
    text = page.read_text()
    for name in re.findall(r"\]\(([\w/.]+)\)", text):
        assert (DOCS / name).exists(), name
    for name in re.findall(
        r"`((?:jpipe|models|train|configs|docs)/[\w/]+\.\w+)`", text
    ):
        assert (DOCS.parent / name).exists(), name


def test_the_facts_of_every_schedule():
    text, _ = (DOCS / "schedules.md").read_text().split("## How much memory")
    rows = re.findall(r"^\| `(\w+\(.*?\))` \| (.*) \|$", text, flags=re.M)
    named = {call.split("(")[0] for call, _ in rows}
    assert named == {*jpipe.schedules.names()} - {"forward_only"}
    for call, cells in rows:
        schedule = eval(f"jpipe.schedules.{call}", {"jpipe": jpipe})
        facts = schedule.facts()
        share = schedule.num_stages // schedule.num_devices
        delay = facts.forward_delay.tolist() if facts.forward_delay.any() else [0]
        assert schedule.num_devices == 4
        assert cells.split(" | ") == [
            f"{facts.makespan / share:g}",
            f"{facts.bubble:.1%}",
            f"{facts.inner_bubble:.1%}",
            " ".join(map(str, facts.in_flight)),
            " ".join(map(str, delay)),
            str(facts.weight_versions.max()),
        ]


def test_the_program_runs(capsys):
    (program,) = re.findall(
        r"```python\n(.*?)```", (DOCS / "schedules.md").read_text(), flags=re.S
    )
    exec(program, {})
    assert "Schedule('search', num_stages=4" in capsys.readouterr().out
