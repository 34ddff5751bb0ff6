"""`train/memory.py`, as it is typed."""

import json

import pytest

from jpipe.memory import Timeline, blocks_of_csv
from train import memory

SMALL = ["--config", "configs/quickstart.py", "--config.batch_size=16"]


def run(capsys, *words):
    """Exit code, what it printed, what it complained of."""
    try:
        code = memory.main(list(words))
    except SystemExit as error:  # argparse's
        code = error.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.exhaustive
def test_table_and_files(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    files = {name: str(tmp_path / f"memory.{name}") for name in ("json", "csv", "svg")}
    words = ["--json", files["json"], "--csv", files["csv"], "--save", files["svg"]]
    code, out, _ = run(capsys, *SMALL, "--device", "1", *words)
    assert code == 0
    assert "gpipe: 4 stages, 4 microbatches, device 1" in out
    assert "input stash" in out
    timeline = Timeline.from_json(json.loads((tmp_path / "memory.json").read_text()))
    assert timeline.blocks == tuple(blocks_of_csv((tmp_path / "memory.csv").read_text()))
    assert {b.stage for b in timeline.blocks if b.use == "weights"} == {1}
    assert "<svg" in (tmp_path / "memory.svg").read_text()


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["--device", "0"], "name a configuration"),
        ([*SMALL, "--device", "4"], "`--device` must be below 4"),
        ([*SMALL, "--device", "-1"], "whole number of at least 0"),
        ([*SMALL, "--to-host", "16GB/s"], "add `--profile`"),
        ([*SMALL, "--to-device", "16GB/s"], "add it"),
        ([*SMALL, "--profile", "--to-host", "16 parsecs"], "must be bytes such as"),
        ([*SMALL, "--save", "memory.txt"], "must end in .svg, .png or .pdf"),
    ],
)
def test_wrong_options(capsys, words, complaint):
    code, _, err = run(capsys, *words)
    assert code == 2
    assert complaint in err


def test_help_without_words(capsys):
    code, out, _ = run(capsys)
    assert code == 0
    assert "--to-host" in out
