"""The figures of the comparison of sizes, from made-up runs."""

import math
import pathlib

import pytest
from helpers import benchmark

sizes = benchmark("asynchronous_sizes")
BUDGET = sizes.Budget(5000, 1000)


def runs_of(size, S, method, rate, tried, *ends):
    """Whole runs that end at some bits per byte, and the short runs of the rates that were tried."""

    def run(bits):
        curve = [[0, 0.0, bits * math.log(2), 0.0]]
        return {"curve": curve, "validation": bits if math.isfinite(bits) else math.inf}

    short = {sizes.key_of(size, S, method, 1000, each, 0): run(1.0) for each in tried}
    return short | {sizes.key_of(size, S, method, 5000, rate, seed): run(bits) for seed, bits in enumerate(ends)}


RUNS = {
    **runs_of("32", 1, "Adam", 0.009, [0.003, 0.009], 2.0, 2.2),
    **runs_of("32", 8, "Adam", 0.003, [0.003], 2.6, 2.8),
    **runs_of("32", 8, "PipeMare T1+T2", 0.009, [0.009], 2.5, 2.5),
    **runs_of("32", sizes.ONE_UPDATE, "Adam", 0.003, [0.003], math.nan, 2.1),
}


def test_rows_and_their_order():
    rows = sizes.rows_of("32", RUNS, BUDGET)
    assert rows[1, "Adam"].tried == [0.003, 0.009] and rows[1, "Adam"].mean == pytest.approx(2.1)
    assert sizes.ranking(rows) == ["8 stages PipeMare T1+T2", "8 stages Adam"]  # what diverged has no place
    lines = sizes.markdown({"32": rows}).splitlines()
    assert lines[2] == "| synchronous | Adam | 0.009 (0.003, 0.009) | 2.100 ± 0.141 | 0.000 |"
    assert lines[3].endswith("| diverged | - |") and lines[3].startswith("| 2BW |")
    assert lines[4] == "| 8 stages | PipeMare T1+T2 | 0.009 (0.009) | 2.500 ± 0.000 | 0.400 |"


def test_pictures(tmp_path: pathlib.Path, capsys):
    sizes.report(RUNS, BUDGET, tmp_path, ["32", "64"])
    assert (tmp_path / "sizes.png").stat().st_size > 1000
    assert "dim 32: 8 stages PipeMare T1+T2, 8 stages Adam" in capsys.readouterr().out


def test_no_data(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["asynchronous_sizes.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="`--data` must name the folder"):
        sizes.main()
