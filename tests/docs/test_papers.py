"""The tests that `docs/papers.md` names are there."""

import ast
import re

import pages
import pytest

PAGE = pages.ROOT / "docs" / "papers.md"
NAMES = re.findall(r"`(tests/\S+\.py)::(\w+)`", PAGE.read_text())


@pytest.mark.parametrize("path,name", NAMES)
def test_a_test_of_the_page_is_there(path, name):
    tree = ast.parse((pages.ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_line_has_a_test():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "| line |" not in line]
    assert len(rows) == len(NAMES) > 30
