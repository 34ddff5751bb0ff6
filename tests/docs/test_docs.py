"""What the pages say is so: programs run, commands print what stands below them, links lead somewhere, facts hold."""

import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import jax
import jax.numpy as jnp
import optax
import pages
import pytest
from flax import nnx
from pages import PAGES, ROOT

import jpipe
from train import flags
from train.config import TrainConfig

DOCS = ROOT / "docs"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# Commands that set an environment up; `tests/test_wheel.py` runs the last three.
SET_UP = (
    "git clone",
    "cd",
    "source .venv/bin/activate",
    "pip install",
    "pip wheel",
    "pip index",
)
# Commands of hours, or of data or programs that the repository does not have.
TOO_LONG = (
    "benchmarks/asynchronous.py",
    "benchmarks/asynchronous_methods.py",
    "benchmarks/asynchronous_scale.py resnet",
    "benchmarks/asynchronous_scale.py stages",
    "benchmarks/asynchronous_scale.py translation",
    "benchmarks/compression_link.py",
    "benchmarks/compression_recommender.py",
    "benchmarks/race.py",
    "--graph",
)
# Pages whose programs `make test` runs, and those whose programs take longest.
# `make test-all` runs those of all other pages.
FIRST = ("README.md",)
LAST = (
    "docs/how_to/asynchronous.md",
    "docs/how_to/memory.md",
    "docs/planning.md",
    "docs/tutorial/first_model.md",
    "docs/tutorial/port.md",
)
# Commands of seconds.
QUICK = ("-m jpipe.draw", "--help")


def by_page(per_page, *, of=PAGES):
    """`(page, item)` as parameters for pytest, with readable names."""
    return [pytest.param(page, item, id=f"{pages.name(page)}: {text}") for page in of for item, text in per_page(page)]


def commands(wanted):
    return by_page(
        lambda page: [
            (command, command.text) for command in pages.commands(page) if not command.mark and wanted(command.text)
        ]
    )


def is_python(text):
    return re.match(r"([A-Z_]+=\S+ )*python3? ", text) is not None


def is_quick(text):
    return any(word in text for word in QUICK)


def marks_of_page(page):
    if pages.name(page) in FIRST:
        return ()
    return pytest.mark.slow if pages.name(page) in LAST else pytest.mark.exhaustive


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=marks_of_page(page), id=pages.name(page)) for page in PAGES if pages.has_program(page)],
)
def test_the_programs_of_a_page_run(page, tmp_path):
    result = pages.run_apart(page, tmp_path)
    assert result.returncode == 0, result.stderr
    skipped = re.findall(r"^.*: (skipped, .*)$", result.stdout, flags=re.M)
    if skipped:  # all other blocks have run
        pytest.skip("; ".join(skipped))


def workspace(page, folder):
    """A copy of the repository for commands to run in, with the files that the page shows."""
    for name in ("benchmarks", "configs", "models", "train"):
        ignore = shutil.ignore_patterns("env", "gpu_env", "__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ("conftest.py", "docs", "jpipe", "pyproject.toml", "tests"):
        (folder / name).symlink_to(ROOT / name)
    for command in pages.commands(page):
        if command.text.startswith("cat "):
            (folder / command.text.split()[1]).write_text(command.printed)


def run_command(page, command, folder):
    workspace(page, folder)
    variables = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    bin_folder = pathlib.Path(sys.executable).parent  # `python` is this one
    variables["PATH"] = f"{bin_folder}{os.pathsep}{variables['PATH']}"
    result = subprocess.run(
        ["bash", "-c", command.text],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    if command.printed:
        assert result.stdout == command.printed


@pytest.mark.first_case
@pytest.mark.parametrize("page, command", commands(lambda text: is_python(text) and is_quick(text)))
@pytest.mark.sampled(2)
def test_quick_commands_run(page, command, tmp_path):
    run_command(page, command, tmp_path)


@pytest.mark.slow  # minutes each
@pytest.mark.parametrize(
    "page, command",
    commands(lambda text: is_python(text) and not is_quick(text) and not any(word in text for word in TOO_LONG)),
)
def test_slow_commands_run(page, command, tmp_path):
    run_command(page, command, tmp_path)


@pytest.mark.parametrize("page, command", commands(lambda text: text.startswith("python train/train.py")))
def test_training_commands_are_understood(page, command, tmp_path, monkeypatch):
    workspace(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    words = [word for word in command.text.split()[2:] if word != "--help"]
    if "configs/planned.py" not in words:  # which another command writes
        flags.parse(words, TrainConfig)


@pytest.mark.parametrize("page, command", commands(lambda text: text.startswith("make ")))
def test_make_targets_exist(page, command):
    target = command.text.split()[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.M)


@pytest.mark.parametrize("page, command", commands(lambda text: "pip install" in text))
def test_extras_exist(page, command):
    for extras in re.findall(r"\"\.\[([\w,]+)\]\"", command.text):
        known = PYPROJECT["project"]["optional-dependencies"]
        assert {*extras.split(",")} <= {*known}
    assert not re.search(r"install (-U )?jpipe\b(?!-)", command.text)


@pytest.mark.parametrize("page, command", commands(lambda text: not is_python(text)), ids=str)
def test_no_other_command_is_printed(page, command):
    # A new kind of command needs a way to be tried.
    assert command.text.startswith(("make ", "cat ", "tensorboard ", *SET_UP))


def anchors(page):
    """The fragments that links to a page may have, as the pages and GitHub make them of headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.M)
    kept = (re.sub(r"[^\w\s-]", "", title.lower()) for title in titles)
    return {title.strip().replace(" ", "-") for title in kept}


def links(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    found = re.findall(r"\]\(([^)\s]+)\)", text)
    return [(link, link) for link in found if not re.match(r"https?:|mailto:", link)]


@pytest.mark.parametrize("page, link", by_page(links))
def test_links_lead_somewhere(page, link):
    path, _, fragment = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    assert target.exists()
    if fragment:
        assert fragment in anchors(target)


@pytest.mark.parametrize("page", PAGES, ids=pages.name)
def test_files_that_are_named_exist(page):
    names = re.findall(
        r"`((?:jpipe|models|train|configs|docs|tests|benchmarks)/[\w/.]*)`",
        page.read_text(),
    )
    missing = {name for name in names if not (ROOT / name).exists()}
    assert missing <= {"configs/planned.py", "docs/_build/html"}  # commands write them


def test_tests_that_are_named_exist():
    named = [pair for page in PAGES for pair in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / page).read_text())]
    assert named
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


def test_every_page_is_in_the_navigation():
    listed = {
        entry
        for page in DOCS.glob("**/*.md")
        for block in re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(), flags=re.M | re.S)
        for entry in block.split("\n")
        if entry and not entry.startswith(":")
    }
    for page in DOCS.glob("**/*.md"):
        path = page.relative_to(DOCS).with_suffix("").as_posix()
        assert path == "index" or {path, path.removeprefix("api/")} & listed, path


def layers(num_layers):
    return [functools.partial(nnx.Linear, 4, 4)] * num_layers


def small_pipeline(**options):
    defaults = dict(
        loss=lambda outputs, batch: jnp.mean((outputs - batch["targets"]) ** 2),
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.gpipe(2, 4),
    )
    given = options.pop("layers", layers(4))
    return jpipe.Pipeline(given, **defaults | options)


def small_batch(num_rows, dim=4):
    return {"inputs": jnp.ones((num_rows, dim)), "targets": jnp.zeros((num_rows, 4))}


def start(pipe, batch):
    return pipe.init(jax.random.key(0), batch)


def too_few_devices():
    devices = jax.devices()[:4]
    jpipe.make_mesh(stage=8, devices=devices)


def donated():
    pipe, batch = small_pipeline(), small_batch(8)
    state = start(pipe, batch)
    pipe.step(state, batch)
    pipe.step(state, batch)


def other_entries():
    pipe = small_pipeline()
    pipe.step(start(pipe, small_batch(8)), small_batch(8) | {"mask": jnp.ones(8)})


def in_flight():
    pipe = small_pipeline(schedule=jpipe.schedules.pipemare(2, 4))
    state, _ = pipe.step(start(pipe, small_batch(8)), small_batch(8))
    small_pipeline().adopt(state)


def tied():
    shared, other = (nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(2))
    pipe = small_pipeline(layers=[shared, other, shared], schedule=jpipe.schedules.pipemare(2, 4))
    start(pipe, small_batch(8))


CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
MESSAGES = {
    "needs 8 devices, got 4": too_few_devices,
    "cannot be cut into 4 equal microbatches": lambda: start(small_pipeline(), small_batch(10)),
    "layer 0 (Linear) cannot take": lambda: start(small_pipeline(), small_batch(8, dim=5)),
    "was donated to an earlier": donated,
    "was made for microbatches of": other_entries,
    "has microbatches in flight": in_flight,
    "lets the update of one layer depend on others": lambda: start(small_pipeline(optimizer=CLIPPED), small_batch(8)),
    "share weights but lie on stages": tied,
    "must return a floating-point scalar": lambda: start(
        small_pipeline(loss=lambda outputs, batch: outputs), small_batch(8)
    ),
}


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_are_what_the_library_says(message):
    assert f"### `{message}`" in (DOCS / "faq.md").read_text()
    with pytest.raises(ValueError, match=re.escape(message)):
        MESSAGES[message]()


def test_the_warning_is_what_the_library_says():
    assert "### `is 60% bubble`" in (DOCS / "faq.md").read_text()
    with pytest.warns(UserWarning, match="is 60% bubble"):
        jpipe.schedules.gpipe(4, 2)


def test_the_facts_of_every_schedule():
    text, _ = (DOCS / "schedules.md").read_text().split("## How much memory")
    rows = re.findall(r"^\| `(\w+\(.*?\))` \| (.*) \|$", text, flags=re.M)
    named = {call.split("(")[0] for call, _ in rows}
    assert named == {*jpipe.schedules.names()} - {"forward_only"}
    for call, cells in rows:
        schedule = eval(f"jpipe.schedules.{call}", {"jpipe": jpipe})
        facts = schedule.facts()
        share = schedule.num_stages // schedule.num_devices * schedule.num_slices
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
