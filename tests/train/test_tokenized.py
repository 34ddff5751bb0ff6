"""Tokens on disk, and data sets by import path."""

import importlib.util

import numpy as np
import pytest

from train import flags
from train.config import TrainConfig
from train.data import Dataset, num_labels, shuffled
from train.imported import Imported
from train.mnist import MNIST
from train.tokenized import Tokenized

END = 0


def written(path, documents, dtype=np.uint16):
    np.save(path, np.concatenate([np.append(d, END) for d in documents]).astype(dtype))
    return str(path)


def plain_rows(tokens, seq_len):
    """Each row by a loop over its tokens."""
    for start in range(0, len(tokens) - seq_len, seq_len):
        row = {name: [] for name in ("tokens", "positions", "segment_ids", "labels")}
        position = segment = 0
        for t in range(start, start + seq_len):
            row["tokens"].append(tokens[t])
            row["positions"].append(position)
            row["segment_ids"].append(segment)
            row["labels"].append(-1 if tokens[t] == END else tokens[t + 1])
            position, segment = (0, segment + 1) if tokens[t] == END else (position + 1, segment)
        yield row


@pytest.mark.parametrize("dtype", [np.uint16, np.int64])
def test_rows_are_those_of_a_loop(tmp_path, dtype):
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 50, rng.integers(1, 9)) for _ in range(60)]
    path = written(tmp_path / "a.npy", documents, dtype)
    data = Tokenized(path, seq_len=8, end=END, test_fraction=0.25).load()
    tokens = np.load(path).tolist()
    cut = len(tokens) - len(tokens) // 4
    for part, content in ((data.train, tokens[:cut]), (data.test, tokens[cut:])):
        rows = list(plain_rows(content, 8))
        batch = part.batch(np.arange(len(part)), None)
        assert len(part) == len(rows)
        for name, values in batch.items():
            assert values.dtype == np.int32 and values.tolist() == [row[name] for row in rows]
        assert num_labels(batch) == sum(label >= 0 for row in rows for label in row["labels"])
    assert isinstance(data.train.tokens, np.memmap)
    assert data.num_tokens == max(tokens) + 1 and f"{cut:,} training" in data.source


def test_an_epoch_has_every_token_once(tmp_path):
    path = written(tmp_path / "a.npy", [np.arange(1, 200)])
    data = Tokenized(path, path, seq_len=9).load()
    batches = shuffled(data.train, 11, seed=0)
    seen = np.concatenate([next(batches)["tokens"].ravel() for _ in range(2)])
    assert sorted(seen) == list(range(1, 199))
    assert not data.train.batch(np.array([0]), None)["segment_ids"].any()


def test_wrong_files(tmp_path):
    np.save(tmp_path / "matrix.npy", np.zeros((3, 3), int))
    np.save(tmp_path / "floats.npy", np.zeros(9))
    np.save(tmp_path / "short.npy", np.zeros(9, int))
    np.savez(tmp_path / "several.npz", a=np.zeros(9, int))
    (tmp_path / "text.npy").write_text("To be")
    for name, message in (
        ("matrix.npy", r"must hold a vector of whole numbers, got int64 \[3, 3\]"),
        ("floats.npy", r"got float64 \[9\]"),
        ("several.npz", "got several arrays"),
        ("text.npy", "is damaged or no .npy file"),
        ("short.npy", "the training tokens must be more than `seq_len` = 1024, got 9"),
    ):
        with pytest.raises(ValueError, match=message):
            Tokenized(str(tmp_path / name)).load()
    with pytest.raises(ValueError, match="`data.path` must name a file of tokens"):
        Tokenized().load()
    with pytest.raises(FileNotFoundError, match="there is no file"):
        Tokenized("missing.npy").load()
    for options, message in (({"seq_len": 0}, "`seq_len` must be"), ({"test_fraction": 0.0}, "`test_fraction` must")):
        with pytest.raises(ValueError, match=message):
            Tokenized(**options)


# -- By import path


def test_a_data_set_of_another_file(tmp_path, monkeypatch):
    (tmp_path / "their_data.py").write_text(
        "from train.mnist import MNIST\n\n\ndef digits():\n    return MNIST().load()\n\n\nnumber = lambda: 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ["--config", "quickstart", "--config.data=Imported", "--config.data.module=their_data:digits"]
    _, config = flags.parse(words, TrainConfig)
    data = config.load_data()
    assert isinstance(data, Dataset) and len(data.train) == len(MNIST().load().train)
    for module, message in (
        (None, "`data.module` must be package.module:name, got None"),
        ("their_data", "must be package.module:name, got 'their_data'"),
        ("their_data:nothing", "cannot be imported: .*nothing.* Set PYTHONPATH"),
        ("no_such_file:x", "cannot be imported: No module named"),
        ("their_data:number", "must return a train.data.Dataset or numbered examples, got int"),
    ):
        with pytest.raises(ValueError, match=message):
            Imported(module).load()


def test_numbered_examples_of_another_file(tmp_path, monkeypatch):
    """A list, and Grain's data sets, which have the same methods."""
    (tmp_path / "numbered.py").write_text(
        "import numpy as np\n\n\n"
        "def examples():\n"
        "    return [{'inputs': {'a': np.full(3, i), 'b': np.float32(i)}, 'labels': np.int32(i)} for i in range(20)]\n\n\n"
        "def grains():\n"
        "    import grain\n\n"
        "    return grain.MapDataset.source(examples()).map(lambda example: example)\n\n\n"
        "def ragged():\n"
        "    return [{'inputs': np.zeros(i)} for i in range(20)]\n\n\n"
        "def few():\n"
        "    return examples()[:3]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = ["examples"] + ["grains"] * (importlib.util.find_spec("grain") is not None)
    for name in names:
        data = Imported(f"numbered:{name}", test_fraction=0.25).load()
        assert "15 training and 5 held-out examples (`numbered:" in data.source
        batches = shuffled(data.train, 5, seed=0)
        drawn = [next(batches) for _ in range(3)]
        assert sorted(np.concatenate([batch["labels"] for batch in drawn])) == list(range(15))
        for batch in drawn:
            np.testing.assert_array_equal(batch["inputs"]["a"], np.repeat(batch["labels"][:, None], 3, axis=1))
            np.testing.assert_array_equal(batch["inputs"]["b"], batch["labels"])
        assert data.test.batch(np.arange(5), None)["labels"].tolist() == list(range(15, 20))
    with pytest.raises(ValueError, match="examples of `numbered:ragged` must be dicts of arrays of one shape each"):
        next(shuffled(Imported("numbered:ragged").load().train, 5, seed=0))
    with pytest.raises(ValueError, match="must have training and held-out examples, got 3 with `test_fraction` = 0.1"):
        Imported("numbered:few").load()
    with pytest.raises(ValueError, match="`test_fraction` must lie between"):
        Imported("numbered:few", test_fraction=1.0)
