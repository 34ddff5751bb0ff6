"""The data: what is read, in what order, and what is said of files that are wrong."""

import gzip
import itertools
import os
import pathlib
import sys
import warnings

import jax
import numpy as np
import pytest
from helpers import write_pairs

from train import mnist
from train.data import in_order, num_labels, shares, shuffled
from train.mnist import MNIST, MNISTPixels
from train.pairs import BEGIN, END, FIRST_BYTE, VOCAB_SIZE, Pairs
from train.text import LabeledText, MaskedText, MaskedWindows, Text, Windows


class Numbers:
    """Examples that are their own numbers, varied by a fraction."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def batch(self, indices, rng):
        noise = 0 if rng is None else rng.random(len(indices))
        return {"inputs": indices + noise}


def shared(name):
    """A directory of real data that is too large for the project, or a skip."""
    directory = pathlib.Path(os.environ.get("JPIPE_DATA", "unset")) / name
    if not directory.is_dir():
        pytest.skip(f"set JPIPE_DATA to a directory with {name}/ in it")
    return directory


# -- Order ------------------------------------------------------------------------------


def first(count, *args, **kwargs):
    return [b["inputs"] for b in itertools.islice(shuffled(*args, **kwargs), count)]


def test_an_epoch_has_every_example_at_most_once():
    batches = np.floor(first(6, Numbers(14), 4, seed=0)).astype(int)
    for epoch in (batches[:3].ravel(), batches[3:].ravel()):
        assert len(set(epoch)) == 12
    assert set(batches.ravel()) == set(range(14))  # each epoch leaves out others
    assert not np.array_equal(batches[:3], batches[3:])


def test_order_and_variation_depend_on_the_seed_alone():
    np.testing.assert_array_equal(first(9, Numbers(14), 4, seed=3), first(9, Numbers(14), 4, seed=3))
    a, b = first(1, Numbers(14), 4, seed=3), first(1, Numbers(14), 4, seed=4)
    assert not np.array_equal(a, b)
    noise = np.modf(first(9, Numbers(14), 4, seed=3))[0].ravel()
    assert len(set(noise)) == noise.size  # nothing is drawn twice


@pytest.mark.parametrize("start", [0, 1, 2, 3, 7])
def test_going_on_from_a_batch_gives_the_same_batches(start):
    np.testing.assert_array_equal(
        first(5, Numbers(14), 4, seed=0, first=start),
        first(5 + start, Numbers(14), 4, seed=0)[start:],
    )


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(ValueError, match="Use a `batch_size` of at most 3"):
        next(shuffled(Numbers(3), 4, seed=0))


@pytest.mark.parametrize("size", [1, 4, 9, 12])
def test_in_order_has_every_example_once(size):
    batches = [batch["inputs"] for batch in in_order(Numbers(size), 4)]
    np.testing.assert_array_equal(np.concatenate(batches), np.arange(size))
    assert all(len(batch) == 4 for batch in batches[:-1])


class TwoNumbers(Numbers):
    """Two inputs per example."""

    def batch(self, indices, rng):
        inputs = super().batch(indices, rng)["inputs"]
        return {"inputs": {"a": inputs, "b": -inputs}, "labels": indices}


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_the_shares_of_processes_make_up_the_batches_of_one(num_processes):
    def batches(rows_of):
        trained = itertools.islice(shuffled(TwoNumbers(14), 6, seed=3), 4)
        return list(shares(itertools.chain(trained, in_order(TwoNumbers(8), 6)), rows_of))

    def rows_of(process):
        return lambda n: np.array_split(np.arange(n), num_processes)[process]

    of_processes = [batches(rows_of(p)) for p in range(num_processes)]
    whole = batches(np.arange)
    assert [len(batch["labels"]) for batch in whole] == [6, 6, 6, 6, 6, 2]
    for parts, want in zip(zip(*of_processes), whole):
        got = jax.tree.map(lambda *a: np.concatenate(a), *parts)
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_labels_that_count():
    labels = np.ones((2, 3), int)
    assert num_labels({"labels": labels}) == 6
    weights = np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert num_labels({"labels": labels, "weights": weights}) == 3


# -- MNIST ------------------------------------------------------------------------------


def test_the_shipped_digits_are_real_and_normalised():
    data = MNIST().load()
    assert (len(data.train), len(data.test), data.unit) == (8572, 2000, "images")
    assert data.bytes_per_label is None
    batch = data.train.batch(np.arange(8572), None)
    assert batch["inputs"].shape == (8572, 28, 28, 1)
    assert batch["inputs"].dtype == np.float32 and batch["labels"].dtype == np.int32
    assert abs(batch["inputs"].mean()) < 0.01
    assert abs(batch["inputs"].std() - 1) < 0.01
    for examples, fewest in ((data.train, 771), (data.test, 158)):
        counts = np.bincount(examples.labels, minlength=10)
        assert counts.min() == fewest and len(counts) == 10


def test_images_move_by_whole_pixels_and_nothing_wraps():
    image = np.zeros((1, 28, 28), np.uint8)
    image[0, 0, 27] = 255
    examples = mnist.Images(image, np.zeros(1, np.uint8), max_shift=2)
    rng = np.random.default_rng(0)
    places, black = set(), examples.batch(np.zeros(1, int), None)["inputs"].min()
    for _ in range(300):
        moved = examples.batch(np.zeros(1, int), rng)["inputs"][0, :, :, 0]
        lit = np.argwhere(moved > black)
        assert len(lit) <= 1
        places.update(map(tuple, lit))
    assert places == {(row, column) for row in range(3) for column in (25, 26, 27)}


def test_without_variation_images_stay():
    data = MNIST(max_shift=3).load()
    batch = data.train.batch(np.arange(5), None)
    np.testing.assert_array_equal(batch["inputs"], MNIST().load().train.batch(np.arange(5), None)["inputs"])


def test_the_official_files(tmp_path):
    directory = shared("mnist")
    data = MNIST(dir=str(directory)).load()
    assert (len(data.train), len(data.test)) == (60000, 10000)
    # Not packed they read the same, and the shipped part is made of them.
    for path in directory.glob("*.gz"):
        (tmp_path / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    arrays = mnist.read_official(str(tmp_path))
    small = MNIST().load()
    for part, expected in zip(
        (arrays[0][::7], arrays[1][::7], arrays[2][::5], arrays[3][::5]),
        (small.train.images, small.train.labels, small.test.images, small.test.labels),
        strict=True,
    ):
        np.testing.assert_array_equal(part, expected)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        MNIST(dir=str(tmp_path)).load()
    assert "`train-images-idx3-ubyte` or `train-images-idx3-ubyte.gz`" in str(caught.value)
    assert "leave `data.dir` out" in str(caught.value)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("train-images-idx3-ubyte", b"short", "sha256 of its 5 bytes"),
        ("train-images-idx3-ubyte.gz", b"not packed", "cannot be unpacked"),
        ("train-images-idx3-ubyte.gz", gzip.compress(b"x" * 99)[:-9], "is damaged"),
    ],
    ids=["short", "not packed", "cut off"],
)
def test_a_damaged_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        MNIST(dir=str(tmp_path)).load()
    assert message in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)
    assert "Download it" in str(caught.value)


def test_shipped_digits_that_were_changed_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "digits.npz"
    monkeypatch.setattr(mnist, "_SMALL", path)
    with pytest.raises(FileNotFoundError, match="digits that ship"):
        MNIST().load()
    path.write_bytes(b"changed")
    with pytest.raises(ValueError, match="sha256 of its 7 bytes"):
        MNIST().load()


def test_a_shift_out_of_the_image_is_refused():
    with pytest.raises(ValueError, match="from 0 to 27 pixels, got 28"):
        MNIST(max_shift=28)


def test_pixels_are_labelled_as_digit_or_background():
    data = MNISTPixels(noise=0.0, max_shift=2).load()
    assert data.unit == "pixels" and "pixels of MNIST, 8,572" in data.source
    plain = MNIST().load()
    batch = data.test.batch(np.arange(50), None)
    assert batch["inputs"].shape == (50, 28, 28, 1)
    assert batch["labels"].shape == (50, 28, 28) and batch["labels"].dtype == np.int32
    np.testing.assert_array_equal(batch["inputs"], plain.test.batch(np.arange(50), None)["inputs"])
    np.testing.assert_array_equal(batch["labels"], plain.test.images[:50] >= 128)
    # Labels move with their images.
    batch = data.train.batch(np.arange(50), np.random.default_rng(0))
    np.testing.assert_array_equal(batch["labels"] == 1, batch["inputs"][..., 0] > 1.2)


def test_noise_of_pixels_is_drawn_anew_but_for_held_out_images():
    data, clean = MNISTPixels(noise=0.5).load(), MNISTPixels(noise=0.0).load()
    numbers = np.arange(40)

    def noise(examples, still, *args):
        a, b = (each.batch(*args)["inputs"] for each in (examples, still))
        return (a - b) * 0.3081

    held_out = noise(data.test, clean.test, numbers, None)
    assert abs(held_out.mean()) < 0.01 and abs(held_out.std() - 0.5) < 0.01
    np.testing.assert_allclose(noise(data.test, clean.test, numbers[7:9], None), held_out[7:9], atol=1e-6)
    drawn = [noise(data.train, clean.train, numbers, np.random.default_rng(k)) for k in (0, 1)]
    assert abs(drawn[0].std() - 0.5) < 0.01
    assert np.abs(np.corrcoef(drawn[0].ravel(), drawn[1].ravel())[0, 1]) < 0.05
    with pytest.raises(ValueError, match="`noise` must be at least 0, got -1"):
        MNISTPixels(noise=-1)
    with pytest.raises(ValueError, match="from 0 to 27 pixels, got 28"):
        MNISTPixels(max_shift=28)


# -- Text -------------------------------------------------------------------------------


def test_labels_are_the_bytes_after_the_inputs(tmp_path):
    text = bytes(range(256)) * 2
    (tmp_path / "a.txt").write_bytes(text)
    data = Text(path=str(tmp_path / "a.txt"), seq_len=10, test_fraction=0.25).load()
    assert (data.unit, data.bytes_per_label) == ("tokens", 1.0)
    assert len(data.train.text) + len(data.test.text) == len(text)
    assert bytes(data.train.text) + bytes(data.test.text) == text
    for examples in (data.train, data.test):
        for rng in (None, np.random.default_rng(0)):
            batch = examples.batch(np.arange(len(examples)), rng)
            assert batch["inputs"].shape == (len(examples), 10)
            assert batch["inputs"].dtype == batch["labels"].dtype == np.int32
            np.testing.assert_array_equal((batch["inputs"] + 1) % 256, batch["labels"])


def test_windows_cover_the_text_and_start_anywhere_while_training():
    text = bytes(np.arange(35, dtype=np.uint8))
    windows = Windows(text, 5)
    assert len(windows) == 6
    still = windows.batch(np.arange(6), None)
    np.testing.assert_array_equal(still["inputs"].ravel(), np.arange(30))
    rng = np.random.default_rng(0)
    drawn = [windows.batch(np.arange(6), rng) for _ in range(200)]
    starts = {int(start) for batch in drawn for start in batch["inputs"][:, 0]}
    assert starts == set(range(30))
    assert max(batch["labels"].max() for batch in drawn) == 34


def test_files_packed_and_not_and_directories(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"second " * 9)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"first " * 9))
    (tmp_path / "c.md").write_bytes(b"ignored")
    data = Text(path=str(tmp_path), seq_len=4).load()
    whole = bytes(data.train.text) + bytes(data.test.text)
    assert whole == b"first " * 9 + b"\n" + b"second " * 9
    separate = Text(path=str(tmp_path / "b.txt"), test_path=str(tmp_path / "a.txt.gz"), seq_len=4).load()
    assert bytes(separate.train.text) == b"second " * 9
    assert bytes(separate.test.text) == b"first " * 9


def test_the_text_that_ships_with_python():
    data = Text().load()
    assert len(data.train.text) > 300_000
    assert b'The "assert" statement' in bytes(data.train.text)


def test_a_large_text():
    directory = shared("text")
    data = Text(
        path=str(directory / "sotu_train.txt.gz"),
        test_path=str(directory / "sotu_valid.txt.gz"),
    ).load()
    assert len(data.train.text) == 10_039_636
    assert len(data.test.text) == 312_810


@pytest.mark.parametrize(
    "options, files, error, message",
    [
        ({"path": "no.txt"}, {}, FileNotFoundError, "no file or directory `no.txt`"),
        ({"path": "."}, {"a.md": b"x"}, FileNotFoundError, "no text in the directory"),
        ({"path": "a.txt.gz"}, {"a.txt.gz": b"x"}, ValueError, "cannot be unpacked"),
        ({"path": "a.txt"}, {"a.txt": b"short"}, ValueError, "`seq_len` = 128 bytes"),
        ({"path": "a.txt"}, {"a.txt": b"x" * 200}, ValueError, "the held-out text"),
    ],
)
def test_messages(tmp_path, monkeypatch, options, files, error, message):
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error) as caught:
        Text(**options).load()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a.txt", None),
        ("a.txt.gz", None),
        ("a.jsonl", "is not a .txt file"),
        ("a.jsonl.gz", "is not a .txt file"),
        ("utf16.txt", "has zero bytes"),
        ("a.parquet", "has zero bytes"),
    ],
)
def test_bytes_of_another_format_are_read_with_a_warning(tmp_path, name, told):
    text = '{"text": "some words"}\n' * 99
    content = text.encode("utf-16") if told == "has zero bytes" else text.encode()
    packed = gzip.compress(content) if name.endswith(".gz") else content
    (tmp_path / name).write_bytes(packed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = Text(path=str(tmp_path / name), seq_len=8).load()
    assert bytes(data.train.text) + bytes(data.test.text) == content
    assert len(caught) == (told is not None)
    assert told is None or told in str(caught[0].message)


@pytest.mark.parametrize("options", [{"seq_len": 0}, {"test_fraction": 1.0}])
def test_bad_options_are_refused(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"`{name}` must"):
        Text(**options)


def test_a_python_without_its_reference(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(FileNotFoundError, match="Name a text file as `data.path`"):
        Text().load()


def test_masked_bytes_are_replaced_and_counted(tmp_path):
    text = bytes(np.random.default_rng(0).integers(256, size=40_000, dtype=np.uint8))
    (tmp_path / "a.txt").write_bytes(text)
    data = MaskedText(path=str(tmp_path / "a.txt"), seq_len=50).load()
    plain = Text(path=str(tmp_path / "a.txt"), seq_len=50).load()
    assert "masked text, 36,000 training and 4,000 held-out" in data.source
    numbers = np.arange(len(data.train))
    for rng in (None, np.random.default_rng(3)):
        batch = data.train.batch(numbers, rng)
        tokens, labels = batch["inputs"]["tokens"], batch["labels"]
        chosen = batch["weights"] == 1
        assert chosen.mean() == pytest.approx(0.15, abs=0.01)
        assert num_labels(batch) == chosen.sum()
        np.testing.assert_array_equal(tokens[~chosen], labels[~chosen])
        masked = tokens[chosen] == MaskedWindows.MASK
        assert masked.mean() == pytest.approx(0.8, abs=0.02)
        same = tokens[chosen][~masked] == labels[chosen][~masked]
        assert same.mean() == pytest.approx(0.5, abs=0.05)
        others = tokens[chosen][~masked][~same]
        assert len(set(others)) > 150 and others.max() < 256
        assert batch["inputs"]["mask"].all() and not batch["inputs"]["segments"].any()
    # The labels are the bytes themselves; held-out masks stay, others are drawn anew.
    still = data.test.batch(np.arange(9), None)
    np.testing.assert_array_equal(still["labels"], plain.test.batch(np.arange(9), None)["inputs"])
    np.testing.assert_array_equal(data.test.batch(np.array([7]), None)["weights"][0], still["weights"][7])
    first, second = (data.train.batch(numbers, np.random.default_rng(k))["weights"] for k in (0, 1))
    assert not np.array_equal(first, second)
    with pytest.raises(ValueError, match=r"`mask_fraction` must lie in \(0, 1\], got 0"):
        MaskedText(mask_fraction=0)


def test_windows_have_the_class_of_their_text(tmp_path):
    (tmp_path / "b").mkdir()
    contents = {"a.txt": b"a" * 1000, "b/1.txt": b"b" * 250, "b/2.txt": b"B" * 249}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "notes.md").write_text("no text of a class")
    data = LabeledText(path=str(tmp_path), seq_len=10).load()
    assert (len(data.train), len(data.test)) == (89 + 44, 9 + 4)
    for rng in (None, np.random.default_rng(0)):
        order = np.random.default_rng(1).permutation(len(data.train))
        batch = data.train.batch(order, rng)
        assert batch["inputs"].shape == (133, 10) and batch["inputs"].dtype == np.int32
        assert (batch["labels"] == 0).sum() == 89 and batch["labels"].dtype == np.int32
        is_a = batch["inputs"] == ord("a")
        np.testing.assert_array_equal(is_a.all(1), batch["labels"] == 0)
        np.testing.assert_array_equal(is_a.any(1), batch["labels"] == 0)
    assert "2 kinds of text, 133 training and 13 held-out windows" in data.source
    assert data.source.endswith("a, b)")


def test_texts_that_have_no_classes(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no directory"):
        LabeledText(path=str(tmp_path / "none")).load()
    (tmp_path / "a.txt").write_text("a" * 500)
    with pytest.raises(ValueError, match="at least 2 classes, got 1"):
        LabeledText(path=str(tmp_path)).load()
    (tmp_path / "b.txt").write_text("b" * 500)
    with pytest.raises(ValueError, match="`seq_len` = 64 bytes, got 50 of 'a'"):
        LabeledText(path=str(tmp_path), seq_len=64).load()
    for options in ({"seq_len": 0}, {"test_fraction": 0.0}):
        (name,) = options
        with pytest.raises(ValueError, match=f"`{name}` must"):
            LabeledText(**options)


# -- Sentence pairs ---------------------------------------------------------------------


def sentence(tokens):
    """The bytes before the end of a row of tokens."""
    tokens = list(tokens)
    return bytes(t - FIRST_BYTE for t in tokens[: tokens.index(END)])


def test_pairs_are_padded_and_the_decoder_reads_the_target_shifted(tmp_path):
    path = write_pairs(tmp_path / "pairs.tsv", 20)
    data = Pairs(path=str(path), seq_len=12, test_fraction=0.25).load()
    assert (len(data.train), len(data.test), data.unit) == (15, 5, "tokens")
    assert data.bytes_per_label is None
    assert "15 for training and 5 held out; 0 longer than 11 bytes left" in data.source
    for rng in (None, np.random.default_rng(0)):
        batch = data.train.batch(np.array([3, 11]), rng)
        source, target = batch["inputs"]["source"], batch["inputs"]["target"]
        labels, weights = batch["labels"], batch["weights"]
        arrays = (source, target, labels, weights)
        assert [a.shape for a in arrays] == [(2, 12)] * 4
        assert source.dtype == target.dtype == labels.dtype == np.int32
        assert [sentence(row) for row in source] == [b"number 3", b"number 11"]
        assert [sentence(row) for row in labels] == [b"Zahl 3!", b"Zahl 11!"]
        np.testing.assert_array_equal(target[:, 0], BEGIN)
        for row in range(2):
            length = np.flatnonzero(labels[row] == END)[0] + 1
            np.testing.assert_array_equal(target[row, 1:length], labels[row, : length - 1])
            assert not target[row, length:].any() and not labels[row, length:].any()
            np.testing.assert_array_equal(weights[row], np.arange(12) < length)
        assert num_labels(batch) == len("Zahl 3!") + len("Zahl 11!") + 2
        assert max(a.max() for a in arrays) < VOCAB_SIZE


def test_long_pairs_are_left_out_and_held_out_ones_may_have_a_file(tmp_path):
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress("1234567\tsieben\r\n\n12345678\tacht\nfünf\tcinq\n".encode()))
    path = write_pairs(tmp_path / "b.tsv", 3)
    options = {"path": str(path), "test_path": str(tmp_path / "a.tsv.gz")}
    data = Pairs(**options, seq_len=9).load()
    assert (len(data.train), len(data.test)) == (3, 3)
    assert "0 longer than 8 bytes" in data.source
    batch = data.test.batch(np.arange(3), None)
    assert [sentence(row) for row in batch["inputs"]["source"]] == [
        b"1234567",
        b"12345678",
        "fünf".encode(),
    ]
    path.write_text("a\tb\nmuch longer\tc\n")
    data = Pairs(**options, seq_len=8).load()
    assert (len(data.train), len(data.test)) == (1, 2)
    assert "2 longer than 7 bytes left out" in data.source
    path.write_text("much longer\tc\n")
    with pytest.raises(ValueError, match="training data must have a pair of at most"):
        Pairs(**options, seq_len=8).load()


def test_real_pairs():
    directory = shared("translation")
    data = Pairs(
        path=str(directory / "en_de_train.tsv.gz"),
        test_path=str(directory / "en_de_valid.tsv.gz"),
        seq_len=1024,
    ).load()
    assert (len(data.train), len(data.test)) == (25_945, 673)
    batch = data.train.batch(np.zeros(1, int), None)
    assert sentence(batch["inputs"]["source"][0]) == b"What is Access2Base?"
    assert sentence(batch["labels"][0]) == b"Was ist Access2Base?"


@pytest.mark.parametrize(
    "content, message",
    [
        (
            "a\tb\nc\n",
            "line 2 of `a.tsv` must hold a sentence, a tab and its translation",
        ),
        ("a\tb\tc\n", "got 3 columns: 'a\\tb\\tc'. Correct or remove the line."),
        ("a\t\n", "got 2 columns: 'a\\t'"),
        ("a\tb\n", "the held-out data must have a pair of at most `seq_len` - 1 = 127"),
    ],
)
def test_files_that_are_no_pairs(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.tsv").write_text(content)
    with pytest.raises(ValueError) as caught:
        Pairs(path="a.tsv").load()
    assert message in str(caught.value)


def test_pairs_without_a_file():
    with pytest.raises(ValueError, match="Write `--config.data.path=FILE.tsv`"):
        Pairs().load()
    with pytest.raises(FileNotFoundError, match="no file or directory `no.tsv`"):
        Pairs(path="no.tsv").load()
    with pytest.raises(ValueError, match="`seq_len` must be at least 2, got 1"):
        Pairs(seq_len=1)
