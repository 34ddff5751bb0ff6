"""Fine-tuning from the shell: from a folder of a published model to one that other libraries read."""

import dataclasses
import functools
import json
import math
import pathlib
import sys
import types

import jax
import numpy as np
import pytest
from flax import nnx
from helpers import log_of

import jpipe
from models.gpt2 import GPT2
from models.llama import Decoder, Llama
from train import flags
from train.config import TrainConfig
from train.instructions import SHIPPED, Instructions
from train.resume import check_same_training
from train.tokens import ByteTokens
from train.train import held_out, main, write_model
from train.weights import LoRAConfig, Weights

CONFIG = str(pathlib.Path(__file__).parents[2] / "configs" / "finetune_llama.py")
LENGTH = 160
SIZES = Llama(258, 16, 24, 2, 4, 2, 4, tie_embeddings=False)


def folder_of(path, model=SIZES, dtype="float32"):
    """A folder of a published model with random weights."""
    factory = functools.partial(Weights(model, dtype=dtype).layers(), rngs=nnx.Rngs(1))
    state = nnx.state(factory(), nnx.Param)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda a: (a + rng.normal(size=a.shape) / 20).astype(a.dtype), nnx.to_pure_dict(state))
    Weights(model, dtype=dtype).write(path, params, ByteTokens().write)
    (path / "generation_config.json").write_text('{"max_new_tokens": 4}')
    return path


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("published") / "tiny")


def tensors(folder):
    numpy = pytest.importorskip("safetensors.numpy")
    return {name: np.asarray(a) for name, a in numpy.load_file(folder / "model.safetensors").items()}


def decoder_logits(folder):
    """A function to logits `[B, T, V]`: our model on one device."""
    options = Llama.of(json.loads((folder / "config.json").read_text()))
    like = nnx.eval_shape(lambda: Decoder(options, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(like)
    nnx.update(state, jax.tree.map(np.asarray, jpipe.load_params(folder, names=options.names(), like=like)))
    return jax.jit(lambda tokens: nnx.merge(graph, state)(tokens))


def transformers_logits(folder):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logits(tokens):
        with torch.no_grad():
            return model(torch.tensor(tokens)).logits.numpy()

    return logits


def held_out_loss(logits):
    """The mean loss of the tokens of the last four answers, each example in a row of its own."""
    examples = list(map(json.loads, SHIPPED.read_text().splitlines()))[-4:]
    prompts = [[256, *example["prompt"].encode(), 10] for example in examples]
    answers = [[*example["response"].encode(), 257] for example in examples]
    texts = [prompt + answer for prompt, answer in zip(prompts, answers)]
    computed = np.float64(logits(np.array([text + [0] * (LENGTH - len(text)) for text in texts])))
    total = number = 0
    for rows, prompt, answer in zip(computed, prompts, answers):
        rows = rows[len(prompt) - 1 :][: len(answer)]
        log_sums = np.log(np.exp(rows - rows.max(-1, keepdims=True)).sum(-1)) + rows.max(-1)
        total += (log_sums - rows[np.arange(len(answer)), answer]).sum()
        number += len(answer)
    return total / number


def run(tmp_path, folder, *words):
    options = {
        "run_dir": tmp_path / "run",
        "init": folder,
        "num_steps": 2,
        "optimizer.warmup_steps": 0,
        "optimizer.learning_rate": 1e-2,
        "data.tokenizer": "bytes",
        "data.seq_len": LENGTH,
        "pipeline.compute_dtype": "float32",
        "pipeline.weights_dtype": "float32",
    } | dict(word.split("=", 1) for word in words)
    assert main(["--config", CONFIG, *(f"--config.{name}={value}" for name, value in options.items())]) == 0
    return tmp_path / "run" / "model", log_of(tmp_path / "run")


LORA = ("optimizer.learning_rate=3e-2", "lora.rank=3", "lora.targets=q_proj,mlp.down")
RUNS = {
    "LoRA, 2 stages": LORA,
    "LoRA, 4 stages": (*LORA, "pipeline.num_stages=4", "pipeline.weights_dtype=bfloat16"),
    "all, 4 stages": ("pipeline.num_stages=4",),
    "all, bfloat16": ("pipeline.weights_dtype=bfloat16", "pipeline.compute_dtype=bfloat16"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", [n if n == "LoRA, 2 stages" else pytest.param(n, marks=pytest.mark.exhaustive) for n in RUNS]
)
def test_the_written_model_is_the_trained_one(name, published, tmp_path, capsys):
    folder, log = run(tmp_path, published, *RUNS[name])
    assert f"model in {folder}\n" in capsys.readouterr().out
    before, after = tensors(published), tensors(folder)
    assert before.keys() == after.keys()
    changed = {n.split(".", 3)[-1] for n in before if (before[n] != np.float32(after[n])).any()}
    if "LoRA, 2" in name:
        assert changed == {"self_attn.q_proj.weight", "mlp.down_proj.weight"}
    elif "LoRA" not in name:
        assert "embed_tokens.weight" in {n.removeprefix("model.") for n in changed} or len(changed) > 9
    bfloat16 = "bfloat16" in name or "weights_dtype=bfloat16" in "".join(RUNS[name])
    assert {a.dtype.name for a in after.values()} == {"bfloat16" if bfloat16 else "float32"}
    # What training has evaluated is what the folder computes: by other sums, and of one example at a time.
    tolerance = 2e-2 if name == "all, bfloat16" else 1e-2 if bfloat16 else 2e-5
    want = held_out_loss(decoder_logits(folder))
    assert abs(want - held_out_loss(decoder_logits(published))) > 1e-2
    assert log[-1]["test_loss"] == pytest.approx(want, rel=tolerance)
    want_config = json.loads((published / "config.json").read_text())
    want_config["torch_dtype"] = "bfloat16" if bfloat16 else "float32"
    assert json.loads((folder / "config.json").read_text()) == want_config
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (folder / file).read_bytes() == (published / file).read_bytes()


def test_transformers_reads_it(published, tmp_path):
    """The package `transformers` computes the held-out loss of the log, makes the same tokens, and decodes."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    folder, log = run(tmp_path, published, *LORA)
    logits = transformers_logits(folder)
    assert log[-1]["test_loss"] == pytest.approx(held_out_loss(logits), rel=2e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer("What is LoRA?\n")["input_ids"]
    assert tokens == ByteTokens().prompt("What is LoRA?\n") and tokenizer.eos_token_id == 257
    ours = decoder_logits(folder)
    padded = np.array([tokens + [0] * (LENGTH - len(tokens))])
    want = np.asarray(ours(padded))
    np.testing.assert_allclose(logits(padded), want, atol=2e-5 * np.abs(want).max())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    given = {"input_ids": torch.tensor([tokens]), "attention_mask": torch.ones(1, len(tokens), dtype=torch.int64)}
    out = model.generate(**given, max_new_tokens=4, do_sample=False, eos_token_id=None, use_cache=True)[0].tolist()
    for _ in range(4):
        padded[0, len(tokens)] = ours(padded)[0, len(tokens) - 1].argmax()
        tokens.append(padded[0, len(tokens)])
    assert out == tokens


@pytest.mark.exhaustive
def test_from_scratch_and_on(tmp_path):
    """A model of bytes that begins with drawn weights is written, and a run that is resumed writes it too."""
    small = [f"--config.model.{n}={v}" for n, v in {"dim": 8, "mlp_dim": 8, "num_blocks": 2, "head_dim": 4}.items()]
    words = [*small, f"--config.run_dir={tmp_path / 'run'}", "--config.num_steps=2", "--config.checkpoint.every=1"]
    words += ["--config.optimizer.warmup_steps=0", "--config.data.seq_len=160"]
    assert main(["--config", CONFIG, *words]) == 0
    folder = tmp_path / "run" / "model"
    first = tensors(folder)
    assert {a.dtype.name for a in first.values()} == {"bfloat16"}
    weights = Weights.of(Llama(), str(folder), LoRAConfig(), "bfloat16")
    weights.check()
    assert weights.model == Llama(258, 8, 8, 2, head_dim=4)
    for file in folder.iterdir():
        file.unlink()
    assert main(["--resume", str(tmp_path / "run"), "--config.num_steps=3"]) == 0
    assert first.keys() == tensors(folder).keys()
    assert log_of(tmp_path / "run")[-1]["bits_per_byte"] > 0


# -- What the weights begin as


def test_first_weights_are_those_of_the_folder(published):
    weights = Weights.of(Llama(), str(published), LoRAConfig(2), "bfloat16")
    assert weights.model == SIZES
    merged = jpipe.merge_lora(jax.tree.map(np.asarray, weights.first_params(0)))
    plain = Weights.of(Llama(), str(published), LoRAConfig(), "bfloat16").first_params(0)
    assert jax.tree.structure(merged) == jax.tree.structure(jax.tree.map(np.asarray, plain))
    for a, b in zip(map(np.asarray, jax.tree.leaves(merged)), map(np.asarray, jax.tree.leaves(plain)), strict=True):
        assert a.dtype == b.dtype == "bfloat16"
        np.testing.assert_array_equal(a, b)
    flat = nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: weights.layers()(rngs=nnx.Rngs(0))), nnx.LoRAParam))
    assert {v.dtype.name for _, v in flat} == {"float32"}
    assert len(flat) == 2 * 7 * 2 and not any(path[0] == "head" for path, _ in flat)


@pytest.mark.parametrize(
    "targets, layers",
    [
        (("q_proj", "v_proj"), {"attention.query", "attention.value"}),
        (("attention",), {"attention.query", "attention.key", "attention.value", "attention.out"}),
        (("blocks.1.mlp.up", "self_attn.o_proj"), {"mlp.up", "attention.out"}),
    ],
)
def test_targets(targets, layers):
    got = Weights(SIZES, lora=LoRAConfig(2, targets))._adapted()
    assert {path.split(".", 2)[2] for path in got} == layers
    assert len(got) == sum(1 if layer == "mlp.up" else 2 for layer in layers)


@pytest.mark.parametrize(
    "model",
    [
        Llama(),
        dataclasses.replace(SIZES, long_rotation=(4.0, 1.0, 2.0, 64)),
        Llama(window=7, num_key_heads=4),
        Llama(qkv_bias=True),
        Llama(head_norms=True, head_dim=8),
        Llama(zero_centred=True, activation="gelu_tanh"),
        GPT2(num_positions=9),
    ],
)
def test_published_configuration_is_read_again(model):
    config = json.loads(json.dumps(model.published()))
    assert type(model).of(config) == model
    assert flags._from_json(json.loads(json.dumps(flags.to_json(model))), type(model), "") == model


def test_no_family_has_these_options():
    with pytest.raises(ValueError, match="no family of published models has all of these options: .*qkv_bias=True"):
        Weights(Llama(qkv_bias=True, head_norms=True)).check()


# -- What is refused


def refused(words):
    given = words.split()
    if "--config.init" in words and "data.tokenizer" not in words:
        given.append("--config.data.tokenizer=bytes")
    _, config = flags.parse(["--config", CONFIG, *given], TrainConfig)
    config.load_data()
    config.weights.check()
    config.weights.layers()


@pytest.mark.parametrize(
    "words, message",
    [
        ("--config.init=FOLDER/no", "init=.*no`: there is no such folder. Name one with config.json"),
        ("--config.lora.rank=0", "--config.lora: `rank` must be at least 1, got 0"),
        ("--config.lora.targets=a,b", "`targets` are for `lora.rank`, got a,b without it"),
        ("--config.init=FOLDER --config.lora.rank=2 --config.lora.targets=q_proj,qproj", "'qproj' names none. Did you mean 'q_proj'"),
        ("--config.init=FOLDER --config.lora.rank=2 --config.lora.targets=head", "'head' names none.* attention, .*q_proj, .*up_proj."),
        ("--config.model=Transformer --config.lora.rank=2", "`lora.rank` is for the models Llama and GPT2, got Transformer"),
        ("--config.model=Transformer", "`pipeline.weights_dtype` is for the models Llama"),
        ("--config.model.vocab_size=200", "the data has the token 257, and the model has 200 tokens.*vocab_size=258"),
        ("--config.data.tokenizer=FOLDER/no", "has no `tokenizer.json`"),
        ("--config.model.long_rotation=1,2", "`long_rotation` must be factor"),
    ],
)  # fmt: skip
def test_wrong_options(words, message, published):
    with pytest.raises((ValueError, OSError), match=message):
        refused(words.replace("FOLDER", str(published)))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"config.json": None}, "it has no `config.json`"),
        ({"model.safetensors": None}, "it has neither `model.safetensors` nor `model.safetensors.index.json`"),
        ({"config.json": "[1]"}, "`model_type` of its `config.json` must be one of llama, .*gpt2, got None"),
        ({"config.json": {"model_type": "t5"}}, "must be one of llama, mistral, qwen2, qwen3, gemma, gpt2, got 't5'"),
        ({"config.json": {"model_type": "llama"}}, "its `config.json` has no entry 'num_attention_heads'"),
        ({"config.json": {**SIZES.published(), "hidden_size": "a"}}, "its `config.json`: "),
        ({"config.json": {**SIZES.published(), "hidden_act": "relu"}}, "`hidden_act` must be one of silu"),
        ({"config.json": {**SIZES.published(), "num_hidden_layers": 3}}, "the file has nothing for blocks.2."),
        ({"config.json": {**SIZES.published(), "num_hidden_layers": 1}}, "the model has no blocks.1."),
        ({"config.json": {**SIZES.published(), "intermediate_size": 25}}, "other shapes have .*the model \\[16, 25\\], the file \\[16, 24\\]"),
        ({"model.safetensors": "damaged"}, "is damaged or no safetensors file"),
        ({"tokenizer.json": None}, "has no `tokenizer.json`. .*tokenizer=bytes"),
    ],
)  # fmt: skip
def test_wrong_folders(change, message, published, tmp_path):
    folder = tmp_path / "f"
    folder.mkdir()
    for file in published.iterdir():
        text = change.get(file.name, file.read_bytes())
        if text is not None:
            text = json.dumps(text) if isinstance(text, dict) else text
            (folder / file.name).write_bytes(text if isinstance(text, bytes) else text.encode())
    words = f"--config.init={folder}"
    if "tokenizer.json" in change:
        words += f" --config.data.tokenizer={folder}"
    with pytest.raises((ValueError, OSError), match=message) as error:
        refused(words)
    assert f"init={folder}`" in str(error.value) or "tokenizer" in str(error.value)


def test_without_safetensors(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ValueError, match="Llama is written in its published layout.*pip install safetensors"):
        Weights(Llama()).check()


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    def fails(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Weights, "write", fails)
    pipe = types.SimpleNamespace(get_params=lambda state: {})
    run = types.SimpleNamespace(config=flags.load(CONFIG, TrainConfig), run_dir=tmp_path)
    want = f"The model could not be written to {tmp_path / 'model'}: No space left on device. "
    assert write_model(run, pipe, None) == want


@pytest.mark.exhaustive
def test_text_is_data_for_it_too(tmp_path):
    (tmp_path / "a.txt").write_text("To be, or not to be. " * 40)
    small = {"model.num_blocks": 2, "model.dim": 8, "num_steps": 1, "optimizer.warmup_steps": 0}
    data = {"data": "Text", "data.seq_len": 16, "data.path": tmp_path / "a.txt", "run_dir": tmp_path / "run"}
    assert main(["--config", CONFIG, *(f"--config.{name}={value}" for name, value in (small | data).items())]) == 0
    assert 7 < log_of(tmp_path / "run")[-1]["bits_per_byte"] < 9


def test_resumed_runs_keep_their_matrices(tmp_path):
    file = tmp_path / "config.json"
    name, config = flags.parse(["--config", CONFIG], TrainConfig)
    file.write_text(flags.to_text({"name": name, **flags.to_json(config)}))
    with pytest.raises(ValueError, match="`lora` cannot change when a run is resumed"):
        check_same_training(dataclasses.replace(config, lora=LoRAConfig(2)), file)


def test_bits_per_byte_are_those_of_answers():
    loss = math.log(2) * Instructions().load().bytes_per_label
    assert held_out({"loss": loss}, Instructions().load())["bits_per_byte"] == pytest.approx(1)


def test_weights_in_several_files(published, tmp_path):
    weights = Weights.of(Llama(), str(published), LoRAConfig(), "float32")
    params = jax.tree.map(np.asarray, weights.first_params(0))
    jpipe.save_params(tmp_path / "model.safetensors", params, names=SIZES.names(), file_bytes=4000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    (tmp_path / "config.json").write_bytes((published / "config.json").read_bytes())
    again = Weights.of(Llama(), str(tmp_path), LoRAConfig(), "float32").first_params(0)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, np.asarray(b))
