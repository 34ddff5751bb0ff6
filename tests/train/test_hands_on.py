"""The hands-on's programs: the answer runs, and the exercise is the answer with gaps.

    python tests/train/test_hands_on.py

writes the exercise anew after a change of the answer.
"""

import pathlib
import re

import numpy as np
import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "train" / "hands_on"
_GAP = re.compile(
    r"^( *)# Gap (\d+): (?:.*\n(?: *# (?!End).*\n)*)(?P<code>(?:.*\n)+?)\1# End of gap \2\.\n", flags=re.M
)


def with_gaps(answer: str) -> str:
    """The answer without the code of its gaps, and with another title."""

    def emptied(match):
        begin, end = match.start("code") - match.start(), match.end("code") - match.start()
        return f'{match[0][:begin]}{match[1]}raise NotImplementedError("gap {match[2]}")\n{match[0][end:]}'

    text = _GAP.sub(emptied, answer)
    text = text.replace("in a pipeline: the answers.", "in a pipeline: the exercise.")
    text = text.replace("hands_on/answer.py", "hands_on/exercise.py")
    return text.replace(
        "`exercise.py` beside it is this file with gaps.",
        "Replace each `raise NotImplementedError` by code, gap after gap. `answer.py` beside it has one way to do it.",
    )


def test_the_exercise_is_the_answer_with_gaps():
    answer, exercise = ((FOLDER / name).read_text() for name in ("answer.py", "exercise.py"))
    assert exercise == with_gaps(answer), "run `python tests/train/test_hands_on.py`"
    gaps = re.findall(r'raise NotImplementedError\("gap (\d)"\)', exercise)
    assert gaps == [*map(str, range(1, 9))]
    assert "gpipe(" not in exercise and ".step(" not in exercise


@pytest.mark.exhaustive
def test_the_answer_runs(capsys):
    from train.hands_on import answer

    losses = answer.main("--small --stages 3 --microbatches 2 --batch-size 16 --steps 3".split())
    np.testing.assert_allclose(losses[1], losses[3], rtol=1e-4)
    out = capsys.readouterr().out
    assert "step 3/3  100%  epoch 0.01  loss " in out and "held-out images: accuracy " in out
    assert "3 stages: " in out and out.endswith("50% of their time is bubble\n")
    rows = re.findall(r"^ {5}\d .*$", out, flags=re.M)
    assert len(rows) == 1 + 3


def test_a_gap_says_which_it_is():
    from train.hands_on import exercise

    with pytest.raises(NotImplementedError, match="gap 1"):
        exercise.main("--small --stages 3".split())


if __name__ == "__main__":
    (FOLDER / "exercise.py").write_text(with_gaps((FOLDER / "answer.py").read_text()))
