"""Every file in configs/ loads, says what it is, and runs one shrunken step."""

import ast
import os
import pathlib
import re

import pytest
from families import slow
from helpers import log_of, write_pairs

from train import flags
from train.config import TrainConfig
from train.data import in_order
from train.train import main

CONFIGS = sorted((pathlib.Path(__file__).parents[2] / "configs").glob("*.py"))

# What makes one step of each kind of model light.
SHRUNKEN = {
    "MLP": ["model.widths=8,8"],
    "ResNet": ["model.widths=8,8", "model.num_blocks=1,1", "model.block=basic"],
    "UNet": ["model.width=4", "model.num_levels=1"],
    "AlexNet": ["model.widths=4,4,4,4,4", "model.hidden_width=8"],
    "Inception": ["model.width=2", "model.num_blocks=1,1,1"],
    "RecurrentLM": ["model.embed_dim=4", "model.dim=8", "data.seq_len=16"],
    "RecurrentClassifier": ["model.dim=8", "model.num_layers=1", "data.seq_len=16"],
    "RecurrentTranslation": ["model.dim=8", "data.seq_len=16"],
    "Transformer": [
        "model.dim=8",
        "model.num_heads=2",
        "model.num_blocks=2",
        "data.seq_len=16",
    ],
    "MixtureTransformer": [
        "model.dim=8",
        "model.num_heads=2",
        "model.num_blocks=2",
        "model.expert_dim=4",
        "data.seq_len=16",
    ],
    "BERT": [
        "model.dim=8",
        "model.num_heads=2",
        "model.num_blocks=2",
        "data.seq_len=16",
    ],
    "Llama": [
        "model.dim=8",
        "model.mlp_dim=8",
        "model.num_blocks=2",
    ],
    "Translation": [
        "model.dim=8",
        "model.num_heads=2",
        "model.mlp_dim=8",
        "model.num_encoder_blocks=1",
        "model.num_decoder_blocks=1",
        "data.seq_len=16",
    ],
}

# Like those that stay, but for the data, the size or the schedule.
SLOW = (
    "bert_1f1b",
    "gpt_2bw",
    "mnist_alexnet_1f1b",
    "mnist_inception_1f1b",
    "mnist_pipemare",
    "mnist_pipedream",
    "mnist_resnet101_1f1b",
    "mnist_resnet50_gpipe",
)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_one_loads(path):
    config = flags.load(str(path), TrainConfig)
    layers = config.weights.layers()
    assert callable(layers) or len(layers) >= config.pipeline.table().num_stages
    assert callable(config.model.loss())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_docstring_is_the_record_of_a_run(path):
    doc = ast.get_docstring(ast.parse(path.read_text()))
    assert f"python train/train.py --config configs/{path.name}" in doc
    assert "2-core x86-64 CPU" in doc and "2026" in doc


@pytest.mark.parametrize(
    "path",
    [slow(path) if path.stem in SLOW else path for path in CONFIGS],
    ids=lambda path: path.stem,
)
@pytest.mark.exhaustive
@pytest.mark.sampled(16)
def test_one_shrunken_step(path, tmp_path, capsys, monkeypatch):
    # Restored afterwards: the run adds to it.
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    config = flags.load(str(path), TrainConfig)
    # The first microbatch is through an asynchronous pipeline after some steps.
    num_steps = 1 if config.pipeline.table().synchronous else 6
    words = [
        *SHRUNKEN[type(config.model).__name__],
        f"num_steps={num_steps}",
        "pipeline.num_stages=2",
        "pipeline.synchronous_steps=0",
        "eval_batches=none",
        f"batch_size={2 * config.pipeline.num_microbatches}",
        f"run_dir={tmp_path / 'run'}",
    ]
    if config.pipeline.delays is not None:
        words.append("pipeline.delays=1,0")
    # Few held-out examples.
    if type(config.data).__name__ == "Pairs":
        words.append(f"data.path={write_pairs(tmp_path / 'pairs.tsv', 40)}")
    elif type(config.data).__name__ == "LabeledText":
        for name in ("comedy", "tragedy"):
            (tmp_path / "texts").mkdir(exist_ok=True)
            (tmp_path / "texts" / f"{name}.txt").write_text(f"A {name}. " * 80)
        words.append(f"data.path={tmp_path / 'texts'}")
    elif type(config.data).__name__ != "Instructions" and hasattr(config.data, "path"):
        text = tmp_path / "short.txt"
        text.write_text("To be, or not to be. " * 40)
        words.append(f"data.path={text}")
    else:
        first = lambda *args: [next(in_order(*args))]  # noqa: E731
        monkeypatch.setattr("train.train.in_order", first)
    assert main(["--config", str(path), *(f"--config.{word}" for word in words)]) == 0
    assert re.search(rf"step {num_steps}/{num_steps}  .*loss \d", capsys.readouterr().out)
    lines = log_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, num_steps, num_steps]
    if type(config.model).__name__ == "Llama":
        assert 7 < lines[-1]["bits_per_byte"] < 9  # of 258 tokens
        assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    else:
        assert 0 <= lines[-1]["test_accuracy"] <= 1
    if type(config.model).__name__ == "UNet":
        assert 0 < lines[-1]["test_intersection_over_union"] < 1
