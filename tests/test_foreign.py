"""Files that others wrote: every reader refuses what it cannot read in one way."""

import functools
import pathlib

import jax.numpy as jnp
import pytest
import soap_graphs

from jpipe import compress, schedules, soap
from jpipe._util.foreign import literal, shortened, shown
from jpipe._util.sizes import parse_size
from jpipe.plan import Profile
from jpipe.schedule import Schedule
from jpipe.solvers import read_graph
from train import flags, plot
from train.config import TrainConfig

QUICKSTART = [
    "--config",
    str(pathlib.Path(__file__).parents[1] / "configs/quickstart.py"),
]
READERS = {
    "table.txt": schedules.read,
    "graph.json": read_graph,
    "pipedream.txt": functools.partial(read_graph, format="pipedream"),
    "placement.json": functools.partial(read_graph, format="placement"),
    "machine.json": soap.read_machine,
    "machine.toml": soap.read_machine,
    "strategy.json": lambda path: soap.load_strategy(path, soap_graphs.lenet(), 4),
    "operators.json": lambda path: soap.Profile(soap.p100_cluster(), path),
    "profile.json": Profile.load,
    "config.json": lambda path: flags.load(str(path), TrainConfig),
    "log.jsonl": lambda path: plot.read(path.parent),
}
CONTENTS = {
    "other bytes": b"\xff\xfe\x00",
    "brackets": b"[" * 100_000,
    "braces": b'{"a":' * 100_000,
    "digits": b"9" * 6000,
    "a comma": b"[1, 2",
    "a megabyte": b"x" * 10**6,
    "a list": b"[1]",
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", READERS)
def test_what_cannot_be_read_is_one_kind_of_error(name, content, tmp_path):
    path = tmp_path / name
    path.write_bytes(CONTENTS[content])
    with pytest.raises(ValueError) as caught:
        READERS[name](path)
    assert name in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize("seconds", ["NaN", "Infinity", "-1", "true", '"1"', "9" * 4000])
def test_seconds_of_operators_are_finite(seconds, tmp_path):
    path = tmp_path / "operators.json"
    entry = f'{{"forward_seconds": {seconds}, "backward_seconds": 1}}'
    path.write_text(f'{{"a": {entry}}}')
    with pytest.raises(ValueError, match="seconds must be a number of at least 0"):
        soap.Profile(soap.p100_cluster(), path)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("operator", 3, "the graph has no operator 3"),
        ("operator", None, "the graph has no operator None"),
        ("operator", ["a"], "the graph has no operator"),
        ("operator", "x" * 10**6, "the graph has no operator 'xxx"),
        ("degrees", [4, 1], "degrees are by kind and number of the loop"),
        ("degrees", {"S0": 1e400}, "degrees must be whole numbers, got .inf"),
        ("degrees", {"S0": True}, "degrees must be whole numbers, got .True"),
        ("devices", [0.5], "devices must be whole numbers, got .0.5"),
        ("devices", [float("inf")], "devices must be whole numbers, got .inf"),
        ("devices", 3, "devices must be whole numbers, got 3"),
    ],
)
def test_strategies_of_wrong_values(field, value, message):
    graph = soap_graphs.lenet()
    records = soap.as_records(graph, soap.one_weird_trick(graph, 4))
    if field == "degrees" and isinstance(value, dict):
        value = records[0][field] | value
    records[0][field] = value
    with pytest.raises(ValueError, match=message) as caught:
        soap.from_records(graph, records, 4)
    assert len(str(caught.value)) < 1000
    for wrong in ({}, 3, [3], ["a"]):
        with pytest.raises(ValueError, match="a strategy is a list"):
            soap.from_records(graph, wrong, 4)


@pytest.mark.parametrize("name", [*schedules.names(), "forward_only"])
def test_counts_that_fit_no_memory(name):
    for counts in ((10**9, 4), (4, 10**9), (2**15, 2**15), (10**5000, 4)):
        with pytest.raises(ValueError, match="fit the memory of a machine") as caught:
            schedules.get(name)(*counts)
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("number", ["2000000000", "9" * 20, "9" * 6000])
def test_numbers_of_tables(number):
    """In the header, as a microbatch, a version and an update."""
    rows = ["0@0 1@1", "F0 .", ". F0,B0", "B0,U1 U1"]
    Schedule.from_text("\n".join(rows)).check()
    for old, new in (
        ("1@1", f"1@{number}"),
        ("F0", f"F{number}"),
        ("U1", f"U{number}"),
    ):
        text = "\n".join(rows).replace(old, new, 1)
        with pytest.raises(ValueError) as caught:
            Schedule.from_text(text).check()
        assert len(str(caught.value)) < 1000


def test_a_message_shows_a_part_of_a_large_table():
    text = schedules.gpipe(100, 100).to_text().replace("B57", "B58", 1)
    with pytest.raises(ValueError, match="<-- here") as caught:
        Schedule.from_text(text).check()
    message, head, *rows = str(caught.value).splitlines()
    assert len(rows) == 40 and max(map(len, rows)) < 400
    assert "[B58]" in next(row for row in rows if row.endswith("<-- here"))


LONG = "x" * 10**6


@pytest.mark.parametrize(
    "ask",
    [
        lambda: compress.parse(LONG),
        lambda: compress.parse(f"quantize:{LONG}=3"),
        lambda: compress.parse(f"quantize:bits={LONG}"),
        lambda: schedules.get(LONG),
        lambda: parse_size(LONG),
        lambda: flags.parse([LONG], TrainConfig),
        lambda: flags.parse([*QUICKSTART, f"--config.{LONG}=3"], TrainConfig),
        lambda: flags.parse([*QUICKSTART, f"--config.seed={LONG}"], TrainConfig),
        lambda: flags.parse([*QUICKSTART, f"--config.model={LONG}"], TrainConfig),
    ],
)
def test_options_of_a_megabyte_are_not_repeated(ask):
    with pytest.raises(ValueError) as caught:
        ask()
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize("text", ["-" * 100_000 + "1", "[" * 100_000, "{[]: 1}", "a b"])
def test_what_is_no_literal_is_text(text):
    assert literal(text) == text


def test_what_messages_show():
    assert shown([1, "a"]) == "[1, 'a']"
    assert shown(10**5000) == "int of thousands of digits"
    assert len(shown("x" * 10**6)) <= 200 and len(shown(jnp.ones(3))) <= 200
    assert shortened("short") == "short"
    message = shortened("a" * 10**6 + "b", most=100)
    assert message.startswith("aaa") and message.endswith("aab") and len(message) < 150
    assert "999,901 characters" in message
