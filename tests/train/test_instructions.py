"""Instructions: which tokens a row has, which of them count, and what is said of lines that are wrong."""

import gzip
import json
import sys

import numpy as np
import pytest

from train.data import num_labels, shuffled
from train.instructions import SHIPPED, Instructions
from train.tokens import ByteTokens, PublishedTokens

BEGIN, END = ByteTokens.BEGIN, ByteTokens.END


def written(path, examples):
    path.write_text("".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in examples), encoding="utf-8")
    return str(path)


def unpacked(examples):
    """(prompt, answer) of every example of a data set, read off its rows one token at a time."""
    found = []
    for row in range(len(examples)):
        batch = examples.batch(np.array([row]), None)
        tokens, positions, segments, labels = (
            batch[name][0].tolist() for name in ("tokens", "positions", "segment_ids", "labels")
        )
        for t, (token, segment, label) in enumerate(zip(tokens, segments, labels)):
            if segment == 0:
                assert label == -1
                continue
            if positions[t] == 0:
                found.append(([], []))
            assert positions[t] == len(found[-1][0]) + len(found[-1][1])
            counted = t > 0 and positions[t] > 0 and labels[t - 1] >= 0
            if counted:
                assert labels[t - 1] == token
            found[-1][counted].append(token)
    return found


def test_every_example_is_in_a_row_once(tmp_path):
    rng = np.random.default_rng(0)
    examples = [("p" * int(rng.integers(1, 9)), f"{i} é" * int(rng.integers(1, 4))) for i in range(40)]
    data = Instructions(written(tmp_path / "a.jsonl", examples), seq_len=32, template="Q: {prompt}\nA: ").load()
    for part, wanted in ((data.train, examples[:36]), (data.test, examples[36:])):
        want = [([BEGIN, *f"Q: {p}\nA: ".encode()], [*r.encode(), END]) for p, r in wanted]
        assert sorted(unpacked(part)) == sorted(want)
        batch = part.batch(np.arange(len(part)), None)
        assert num_labels(batch) == sum(len(answer) for _, answer in want)
        assert {a.dtype for a in batch.values()} == {np.dtype("int32")}
        assert {a.shape for a in batch.values()} == {(len(part), 32)}
    assert "36 for training and 4 held out" in data.source and data.unit == "tokens"
    assert data.num_tokens == END + 1
    assert data.bytes_per_label == pytest.approx(sum(len(r.encode()) for _, r in examples[36:]) / num_labels(batch))
    longest = sum(len(f"Q: {p}\nA: ".encode()) + len(r.encode()) + 2 for p, r in examples[:36])
    assert f"fills {longest / (32 * len(data.train)):.0%}" in data.source


def test_rows_are_full_where_they_can_be(tmp_path):
    """11, 10, 9, 6 and 4 tokens fill two rows of 20: 11 + 9 and 10 + 6 + 4."""
    path = written(tmp_path / "a.jsonl", [("p", "r" * (length - 3)) for length in (6, 11, 4, 9, 10)])
    data = Instructions(path, path, seq_len=20, template="{prompt}").load()
    assert [np.bincount(row)[1:].tolist() for row in data.train.segment_ids] == [[11, 9], [6, 4, 10]]
    assert "training fills 100% of 2 rows" in data.source


def test_the_shipped_questions():
    data = Instructions().load()
    lines = [json.loads(line) for line in SHIPPED.read_text().splitlines()]
    assert len(lines) == 48 and len({line["prompt"] for line in lines}) == 48
    assert len(unpacked(data.train)) + len(unpacked(data.test)) == 48
    assert next(shuffled(data.train, 8, 0))["tokens"].shape == (8, 256)


def test_packed_file_empty_lines_and_dropped_examples(tmp_path):
    lines = [{"prompt": "a", "response": "b", "more": 1}, {"prompt": "a" * 50, "response": "b"}]
    lines += [{"prompt": "c", "response": "d"}]
    text = "\n\n".join(map(json.dumps, lines)) + "\r\n"
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    path = str(tmp_path / "a.jsonl.gz")
    data = Instructions(path, path, seq_len=20, too_long="drop").load()
    assert len(unpacked(data.train)) == 2


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 2` is not JSON"),
        ("[1]", 'line 2 of .* must be an object with the texts "prompt" and "response".* got \\[1\\]'),
        ('{"response": "b"}', "got the entries response. Correct"),
        ('{"prompt": "a", "response": ""}', "neither empty"),
        ('{"prompt": "a", "response": 3}', "neither empty"),
        ('{"messages": []}', 'Of an entry "messages", write the last turn as "response"'),
        (json.dumps({"prompt": "a" * 30, "response": "b"}), "line 2 .* has 34 tokens, more than `seq_len` = 20. .*=34"),
    ],
)
def test_wrong_lines(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text(f'{{"prompt": "a", "response": "b"}}\n{line}\n')
    with pytest.raises(ValueError, match=message):
        Instructions(str(tmp_path / "a.jsonl"), seq_len=20).load()


def test_wrong_options(tmp_path):
    for options, message in (
        ({"seq_len": 1}, "`seq_len` must be at least 2"),
        ({"test_fraction": 1.0}, "`test_fraction` must lie between 0 and 1"),
        ({"template": "Q"}, "`template` must have {prompt} once, got 'Q'"),
    ):
        with pytest.raises(ValueError, match=message):
            Instructions(**options)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        Instructions("missing.jsonl").load()
    one = written(tmp_path / "a.jsonl", [("a", "b")])
    with pytest.raises(ValueError, match="the held-out data must have at least one example"):
        Instructions(one).load()
    with pytest.raises(FileNotFoundError, match="has no `tokenizer.json`.*tokenizer=bytes"):
        Instructions(one, tokenizer=str(tmp_path)).load()
    (tmp_path / "b.jsonl").write_bytes(b'{"prompt": "\xff", "response": "b"}')
    with pytest.raises(ValueError, match="line 1 of .* is not in UTF-8"):
        Instructions(str(tmp_path / "b.jsonl")).load()


# -- The package `tokenizers`


def test_without_the_package(tmp_path, monkeypatch):
    ByteTokens().write(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match="needs the package `tokenizers`.*pip install tokenizers.*tokenizer=bytes"):
        PublishedTokens(tmp_path)


TEXTS = ["What is LoRA?\n", "é ü 漢字 🙂", "\tA  b\r\n\x00\x7f\xad", "".join(map(chr, range(1, 400)))]


def test_bytes_are_what_the_written_tokenizer_makes(tmp_path):
    pytest.importorskip("tokenizers")
    ByteTokens().write(tmp_path)
    tokens = PublishedTokens(tmp_path)
    assert tokens.end == END
    for text in TEXTS:
        assert tokens.prompt(text) == ByteTokens().prompt(text)
        assert tokens.answer(text) == ByteTokens().answer(text)
    (tmp_path / "copy").mkdir()
    tokens.write(tmp_path / "copy")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "copy" / file).read_bytes() == (tmp_path / file).read_bytes()


def test_a_tokenizer_of_a_package(tmp_path):
    """Trained on the shipped questions, with a limit that would cut texts, and the end in the model's file."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    texts = [entry for line in SHIPPED.read_text().splitlines() for entry in json.loads(line).values()]
    tokenizer.train_from_iterator(texts, vocab_size=300, special_tokens=["<end>"], show_progress=False)
    plain = tokenizer._tokenizer.to_str()
    tokenizer.enable_truncation(5)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="says which token ends a text"):
        PublishedTokens(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": [0, 7]}')
    data = Instructions(seq_len=128, tokenizer=str(tmp_path)).load()
    reference = tokenizers.Tokenizer.from_str(plain)
    want = sorted(
        (reference.encode(f"{e['prompt']}\n").ids, [*reference.encode(e["response"]).ids, 0])
        for e in map(json.loads, SHIPPED.read_text().splitlines())
    )
    assert sorted(unpacked(data.train) + unpacked(data.test)) == want
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    assert PublishedTokens(tmp_path).end == 0
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read by the package `tokenizers`"):
        PublishedTokens(tmp_path)
