"""The search for the largest batch that fits, against a scan of all sizes."""

import re

import numpy as np
import pytest

from train import memory
from train.largest_batch import search

LINES = {
    "a line": lambda b: 1000 + 7 * b,
    "steps": lambda b: 1000 + 64 * (7 * b // 64),
    "steep late": lambda b: 1000 + 3 * b + max(b - 100, 0) ** 2,
    "flat first": lambda b: 5000 + max(b - 300, 0) * 11,
    "flat": lambda b: 1500,
}


@pytest.mark.parametrize("unit", [1, 8])
@pytest.mark.parametrize("name", LINES)
def test_the_search_ends_where_a_scan_does(name, unit):
    num_bytes = LINES[name]
    sizes = np.arange(unit, 801, unit)
    for limit in (900, 1499, 1500, 1723.5, 5100, 1e9):
        for first in (1, 64, 5000):
            tried = []
            fits, too_large = search(num_bytes, limit, unit=unit, most=800, first=first, report=tried.append)
            fitting = [int(b) for b in sizes if num_bytes(b) <= limit]
            assert (fits and fits.batch_size) == (fitting[-1] if fitting else None)
            larger = (fitting[-1] if fitting else 0) + unit
            assert (too_large and too_large.batch_size) == (larger if larger <= 800 else None)
            assert all(t.num_bytes == num_bytes(t.batch_size) for t in tried)
            assert len({t.batch_size for t in tried}) == len(tried) < 22


def test_a_line_takes_few_compilations():
    tried = []
    search(lambda b: 3_000_000 + 1001 * b, 50e6, unit=4, most=10**6, first=32, report=tried.append)
    assert len(tried) <= 5


@pytest.mark.exhaustive
def test_the_command(capsys):
    small = ["model=MLP", "model.widths=16", "pipeline.num_stages=2", "pipeline.num_microbatches=2", "batch_size=100"]
    words = ["--config", "configs/quickstart.py", *(f"--config.{word}" for word in small)]

    def largest(limit, *more):
        assert memory.main([*words, *more, "--largest-batch", limit]) == 0
        return capsys.readouterr().out

    out = largest("2MiB")
    (size,) = map(int, re.findall(r"--config.batch_size=(\d+) is the largest", out))
    assert re.search(rf"batch +{size} .* fits\n", out) and re.search(rf"batch +{size + 2} .* too large\n", out)
    assert "no batch fits into 1.0 KiB: the smallest, 2, needs " in largest("1KiB")
    assert "there are 8,572 training examples." in largest("1TB")
