"""The pages that state what the zoo holds."""

import pathlib

import pytest
from flax_zoo.table import PARTS, counts, rows

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "how_to" / "model.md"


@pytest.mark.parametrize("part", PARTS)
def test_the_page_has_the_totals(part):
    equal, refused = counts(part)
    assert f"\n| `{part}` | {equal} | {refused} |" in PAGE.read_text()


def test_the_command_prints_every_refusal():
    text = "\n".join(rows())
    assert all(f"{part:16}{counts(part)[0]:5}" in text for part in PARTS)
    assert "linen.Fp8Einsum" in text and "optax.lbfgs" in text
