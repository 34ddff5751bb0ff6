"""The registry: names, suggestions, and the reasons for which builders refuse arguments."""

import itertools
import subprocess
import sys
import warnings

import pytest

from jpipe import schedules

GRID = list(itertools.product((0, 1, 2, 3, 4, 5, 8, 2.5, True), range(0, 9)))
OPTIONS = {
    "dual_pipe_v": [{}],
    "forward_only": [{}, {"stage": [1, 0]}, {"stage": [0, 0]}],
    "gpipe": [{}],
    "interleaved": [
        {"num_chunks": chunks, "ticks": ticks}
        for chunks in (0, 1, 2, 3)
        for ticks in ("paired", "unit", "overlapped", "half")
    ],
    "one_f_one_b": [{}, {"ticks": "unit"}, {"ticks": "overlapped"}, {"ticks": "half"}, {"ticks": None}],
    "pipedream": [
        {},
        {"ticks": "paired"},
        {"vertical_sync": True},
        {"ticks": 3},
        {"update_every": (2, 1, 4)},
        {"update_every": (2, 1), "replicas": (2, 1)},
        {"update_every": (2, 1), "replicas": (2, 1), "ticks": "paired"},
        {"update_every": (2, 1), "replicas": (4, 1)},
        {"update_every": [2, 4], "vertical_sync": True},
        {"update_every": (2, 2.0)},
        {"update_every": 2},
    ],
    "pipedream_2bw": [{}, {"ticks": "paired"}, {"ticks": None}],
    "pipemare": [
        {},
        {"ticks": "paired"},
        {"ticks": "half"},
        {"max_delay": 1},
        {"max_delay": 2, "ticks": "paired"},
        {"max_delay": 0},
        {"max_delay": 1.5},
        {"max_delay": True},
    ],
    "seq_one_f_one_b": [
        *({"num_slices": slices} for slices in (0, 1, 2, 3, 1.5)),
        {"ticks": "unit"},
        {"ticks": "overlapped"},
    ],
    "zero_bubble_h1": [{}],
    "zero_bubble_h2": [{}],
    "zero_bubble_v": [{}],
}
for options in OPTIONS.values():
    options += [{"message_ticks": ticks} for ticks in (2, 0, [1, 2, 1])]
CASES = [(name, options) for name in OPTIONS for options in OPTIONS[name]]


def test_names_are_those_of_schedules_that_train():
    assert schedules.names() == sorted(set(OPTIONS) - {"forward_only"})
    for name in schedules.names():
        assert schedules.get(name) is getattr(schedules, name)
        assert not schedules.get(name)(2, 6).forward_only


def test_forward_only_stays_importable():
    assert schedules.get("forward_only") is schedules.forward_only
    assert schedules.forward_only(2, 3).forward_only


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_a_refusal_is_the_error_of_the_builder(name, options):
    """For every count: a reason exactly where the builder raises, and the same one."""
    refused = []
    for num_stages, num_microbatches in GRID:
        reason = schedules.refusal(name, num_stages, num_microbatches, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # few microbatches
            try:
                schedules.get(name)(num_stages, num_microbatches, **options)
            except ValueError as error:
                assert str(error) == reason
            else:
                assert reason is None
        refused.append(reason is not None)
    assert any(refused)  # counts below 1, at least


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("1f1b", "one_f_one_b"),
        ("1F1B", "one_f_one_b"),
        ("dapple", "one_f_one_b"),
        ("GPipe", "gpipe"),
        ("gpip", "gpipe"),
        ("interleaved-1f1b", "interleaved"),
        ("zb-h1", "zero_bubble_h1"),
        ("ZB-H2", "zero_bubble_h2"),
        ("zbv", "zero_bubble_v"),
        ("DualPipeV", "dual_pipe_v"),
        ("2bw", "pipedream_2bw"),
        ("PipeDream-2BW", "pipedream_2bw"),
        ("pipe_mare", "pipemare"),
    ],
)
def test_usual_names_are_suggested(word, name):
    with pytest.raises(ValueError, match=f"{word!r}. Did you mean {name!r}\\? Known: "):
        schedules.get(word)


def test_an_unknown_name_lists_all():
    known = ", ".join(schedules.names())
    with pytest.raises(ValueError) as info:
        schedules.get("x")
    assert str(info.value) == f"unknown schedule 'x'. Known: {known}."
    with pytest.raises(ValueError, match="unknown schedule 'x'"):
        schedules.refusal("x", 4, 8)


def test_an_unknown_option():
    with pytest.raises(ValueError, match="one_f_one_b has no option 'tick'. Did you mean 'ticks'?"):
        schedules.refusal("one_f_one_b", 4, 8, tick="unit")
    with pytest.raises(ValueError, match="h1 has no option 'ticks'. .*takes: message_ticks"):
        schedules.check_options("zero_bubble_h1", ["ticks"])


def test_search_result_has_an_old_name():
    with pytest.warns(DeprecationWarning, match="is now `jpipe.schedules.SearchResult`"):
        assert schedules.Found is schedules.SearchResult
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        schedules.nothing  # noqa: B018


def test_tables_load_no_jax():
    """Schedules and their prices are numpy. The package itself is bypassed: it has JAX."""
    program = """
import importlib.util, sys, types
package = types.ModuleType("jpipe")
package.__path__ = list(importlib.util.find_spec("jpipe").submodule_search_locations)
sys.modules["jpipe"] = package
import jpipe.draw, jpipe.schedule, jpipe.schedules, jpipe.simulate
jpipe.draw.text(jpipe.schedules.gpipe(2, 2))
print(*{"jax", "flax", "optax", "matplotlib"} & set(sys.modules))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""
