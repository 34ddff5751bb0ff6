"""A fixed sample of what `fuzz.py` runs, and the cases that have failed."""

import fuzz
import fuzz_model
import fuzz_oracle
import pytest


@pytest.mark.first_case
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


def test_pairs_of_a_log(tmp_path):
    log = tmp_path / "log"
    case = fuzz.Case(nan=True, skip=True)
    text = f"seed 1 equal 2 s \n  case {case.text()}\n"
    case = fuzz.Case(nan=True, data=2)
    log.write_text(f"{text}seed 2 refused 2 s words\n  case {case.text()}\n")
    lines = fuzz.pairs([log]).splitlines()
    assert "{'equal': 1, 'refused': 1} cases" in lines[0]
    assert "axis data: gpipe*, loss mean*, nan*, optimizer sgd*, recompute none*, skip, x64*" in lines


def test_a_difference_is_seen_and_shrunken(monkeypatch):
    """A wrong oracle is a difference, and the rest of the case does not matter."""
    right = fuzz_model.loss_parts

    def wrong(case, outputs, batch, total):
        value, weight, aux = right(case, outputs, batch, total)
        return 2 * value, weight, aux

    monkeypatch.setattr(fuzz_oracle, "loss_parts", wrong)
    case = fuzz.Case(layers=("dense", "tanh"), N=2, steps=1)
    result, reason = fuzz.outcome(case)
    assert (result, reason[:17]) == ("failed", "differs: loss of ")
    case, _ = fuzz.shrunken(case, reason)
    assert (case.layers, case.N) == (("tanh",), 1) or case.layers == ("dense",)
