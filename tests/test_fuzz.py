"""A fixed sample of what `fuzz.py` runs, and the cases that have failed."""

import fuzz
import pytest


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.sampled(6)
def test_sample(seed):
    result, reason = fuzz.outcome(fuzz.draw(seed))
    assert result in ("equal", "refused"), reason


def test_cases_are_text():
    for seed in range(200):
        case = fuzz.draw(seed)
        assert fuzz.Case.from_text(case.text()) == case
        assert fuzz.valid(case)


def test_a_difference_is_seen_and_shrunken(monkeypatch):
    """A wrong oracle is a difference, and the rest of the case does not matter."""
    right = fuzz.oracle.loss_parts

    def wrong(case, outputs, batch, total):
        value, weight, aux = right(case, outputs, batch, total)
        return 2 * value, weight, aux

    monkeypatch.setattr(
        fuzz, "loss_function", lambda case: lambda y, b: right(case, y, b, 0.0)[0]
    )
    monkeypatch.setattr(fuzz.oracle, "loss_parts", wrong)
    case = fuzz.Case(layers=("dense", "tanh"), N=2, steps=1)
    result, reason = fuzz.outcome(case)
    assert (result, reason[:17]) == ("failed", "differs: loss of ")
    case, _ = fuzz.shrunken(case, reason)
    assert (case.layers, case.N) == (("tanh",), 1) or case.layers == ("dense",)
