"""The explorer page: its tables against the facts of schedules, and its script, in a browser, against the simulator."""

import importlib.util
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from pages import ROOT

from jpipe import simulate

DOCS = ROOT / "docs"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def explorer_tables():
    spec = importlib.util.spec_from_file_location("explorer_tables", DOCS / "explorer_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLES = explorer_tables()
CHOICES = list(TABLES.choices())
COSTS = {"forward": 1.0, "backward": 1.5, "weight_grad": 0.5, "message": 0.25}


def test_every_schedule_can_be_chosen():
    assert {name for name, *_ in CHOICES} == {*TABLES.jpipe.schedules.names()}


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: "-".join(map(str, choice)))
def test_a_table_holds_every_operation(choice):
    schedule = TABLES.table(*choice)
    record = TABLES.record(schedule)
    words = [word for tick in record["ticks"] for cell in tick for word in cell.split()]
    expected = schedule.num_stages * schedule.num_microbatches
    counts = {letter: sum(word.startswith(letter) for word in words) for letter in "FBDW"}
    split = schedule.splits_backward
    assert counts == {"F": expected, "B": expected * split, "D": expected * (not split), "W": expected * split}
    assert len({word for word in words if word[0] != "U"}) == sum(counts.values())
    assert len(record["waits"]) == schedule.num_ticks + 1
    assert (np.diff(record["waits"]) >= 0).all()


def simulated(choice):
    costs = {name: cost for name, cost in COSTS.items() if name != "message"}
    timing = simulate.simulate(TABLES.table(*choice), simulate.Costs(**costs, transfer=COSTS["message"]))
    return timing.makespan, timing.bubble


HARNESS = """
<script>
  const root = document.getElementById("explorer"), results = [];
  for (const choice of ASKED) {
    for (const [name, value] of Object.entries(choice)) {
      const input = root.querySelector(`[name=${name}]`);
      input.value = value;
      input.dispatchEvent(new Event("input", { bubbles: true }));
    }
    const facts = {};
    for (const each of root.querySelectorAll("[data-fact]")) facts[each.dataset.fact] = each.textContent;
    facts.boxes = root.querySelectorAll("svg rect:not(.idle):not(.U)").length;
    results.push(facts);
  }
  setTimeout(() => {  // the address follows the last choice, not at once
    const result = document.createElement("pre");
    result.id = "result";
    result.textContent = JSON.stringify([...results, location.hash]);
    document.body.append(result);
  }, 1000);
</script>
"""


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"there is no browser: none of {', '.join(BROWSERS)}")
    return path


@pytest.mark.exhaustive
def test_the_page_in_a_browser(browser, tmp_path):
    (block,) = re.findall(r"^```\{raw\} html\n(.*?)^```", (DOCS / "explorer.md").read_text(), flags=re.M | re.S)
    shutil.copytree(DOCS / "_static", tmp_path / "_static")
    (tmp_path / "_static" / "explorer_tables.js").write_text(TABLES.script())
    asked = CHOICES[:: max(len(CHOICES) // 40, 1)]
    questions = [dict(zip(("schedule", "ticks", "devices", "microbatches"), c)) | COSTS for c in asked]
    page = tmp_path / "explorer.html"
    page.write_text(f"<!doctype html><body>{block}{HARNESS.replace('ASKED', json.dumps(questions))}</body>")
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    result = subprocess.run(
        [*command, "--virtual-time-budget=10000", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=300,
    )
    (text,) = re.findall(r'<pre id="result">(.*?)</pre>', result.stdout, flags=re.S) or [result.stderr]
    *facts, address = json.loads(text.replace("&amp;", "&"))
    assert address.startswith(f"#schedule={asked[-1][0]}&")
    assert len(facts) == len(asked)
    for choice, shown in zip(asked, facts):
        makespan, bubble = simulated(choice)
        schedule = TABLES.table(*choice)
        assert float(shown["makespan"].split(",")[0]) == pytest.approx(makespan, abs=6e-4), choice
        assert shown["bubble"] == f"{100 * bubble:.1f}%", choice
        assert shown["in_flight"] == " ".join(map(str, schedule.facts().in_flight)), choice
        kinds = 3 if schedule.splits_backward else 2
        assert shown["boxes"] == kinds * schedule.num_stages * schedule.num_microbatches, choice
