"""The benchmark of thresholds on a recommender: its loop is what the pipeline computes."""

import argparse
import gzip

import numpy as np
import pytest
from helpers import benchmark

recommender = benchmark("compression_recommender")


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "text").mkdir()
    rng = np.random.default_rng(0)
    for part, count in (("train", 3000), ("valid", 300), ("test", 300)):
        text = " ".join(np.array(["one", "two", "three", "four", "five"])[rng.integers(0, 5, count)])
        with gzip.open(folder / "text" / f"sotu_{part}.txt.gz", "wt") as file:
            file.write(text)
    return recommender.Words(folder, 20)


@pytest.mark.first_case
@pytest.mark.parametrize("setting", recommender.SETTINGS)
@pytest.mark.sampled(3, others="exhaustive")
def test_the_loop_is_the_pipeline(words, setting):
    args = argparse.Namespace(words=20, dim=8, width=32, steps=6)
    run = recommender.Run(words, setting, args)
    assert run.difference(steps=6) < 1e-5
    _, texts = recommender.SETTINGS[setting]
    kinds = {"compress_gradients": "weights", "compress_messages": "activation"}
    for name, kind in kinds.items():
        assert (run.ratios()[kind] > 2) == (name in texts)


def test_rows_are_half_true(words):
    rows = words.rows("train", 2000, np.random.default_rng(0))
    assert rows["inputs"].shape == (2000, recommender.HISTORY + 1) and 0.4 < rows["labels"].mean() < 0.6
    text = words.texts["train"]
    windows = {tuple(w) for w in np.lib.stride_tricks.sliding_window_view(text, recommender.HISTORY + 1).tolist()}
    assert all(tuple(row) in windows for row in rows["inputs"][rows["labels"] == 1].tolist())


def test_the_area_is_the_share_of_pairs():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=40), rng.integers(0, 2, 40)
    pairs = [a > b for a in logits[labels == 1] for b in logits[labels == 0]]
    np.testing.assert_allclose(recommender.area_under_curve(logits, labels), np.mean(pairs))
