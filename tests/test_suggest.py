"""Suggestions for misspelt words."""

import pytest

from jpipe.suggest import did_you_mean

KNOWN = ["gpipe", "one_f_one_b", "zero_bubble_h1", "zero_bubble_v"]
ALIASES = {"1f1b": "one_f_one_b", "zb_h1": "zero_bubble_h1"}


@pytest.mark.parametrize(
    ("word", "suggestion"),
    [
        ("gpip", "gpipe"),
        ("GPipe", "gpipe"),
        ("one-f-one-b", "one_f_one_b"),
        ("1F1B", "one_f_one_b"),
        ("zb-h1", "zero_bubble_h1"),
        ("ZBH1", "zero_bubble_h1"),
        ("zero_bubble_w", "zero_bubble_v"),
    ],
)
def test_the_nearest_word(word, suggestion):
    assert did_you_mean(word, KNOWN, ALIASES) == f" Did you mean {suggestion!r}?"


@pytest.mark.parametrize(
    "word", ["x", "", "--", "learning_rate", 3, None, "gpipe" * 99]
)
def test_no_word_is_near(word):
    assert did_you_mean(word, KNOWN, ALIASES) == ""


def test_a_known_word_goes_before_an_alias():
    assert did_you_mean("Vb", ["v_b"], {"v-b": "other"}) == " Did you mean 'v_b'?"


def test_the_cutoff():
    assert did_you_mean("weight", ["kernel", "bias"]) == ""
    assert did_you_mean("weight", ["kernel", "bias"], cutoff=0) != ""
