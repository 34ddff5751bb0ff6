"""The changes of jpipe that a page shows apply, and what the page says of them is true."""

import pages
import pytest

PAGE = pages.ROOT / "docs" / "extending.md"
CHANGES = pages.changes(PAGE)


def test_the_page_has_changes():
    assert len(CHANGES) >= 3 and all(change for _, change in CHANGES)


@pytest.mark.parametrize("block, change", CHANGES, ids=range(len(CHANGES)))
def test_a_change_works(block, change, tmp_path):
    files = {line for line in change.splitlines() if line.startswith("+++ b/jpipe/")}
    assert 1 <= len(files) <= 3
    done = pages.run_changed(block, change, tmp_path)
    assert done.returncode == 0, f"{PAGE}, line {block.line}\n{done.stderr}"
