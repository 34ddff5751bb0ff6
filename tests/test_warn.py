"""Warnings that name the user's line."""

import inspect

import pytest

from jpipe import schedules
from jpipe._util.warn import warn


def test_a_warning_names_the_line_outside_the_package():
    """The builder warns from inside a dataclass, whose `__init__` has no file."""
    with pytest.warns(UserWarning, match="bubble") as warnings:
        line = inspect.currentframe().f_lineno + 1
        schedules.gpipe(4, 1)
    assert [(w.filename, w.lineno) for w in warnings] == [(__file__, line)]


def test_the_name_of_the_module_decides():
    caller = {"warn": warn, "__name__": "jpipe.somewhere"}
    with pytest.warns(DeprecationWarning, match="words") as warnings:
        exec("warn('words', DeprecationWarning)", caller)
    assert [w.filename for w in warnings] == [__file__]
