"""Models with published names, against the implementation of the package `transformers` and against plain numpy."""

import functools
import itertools
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
from models.gpt2 import GPT2, GPT2Decoder
from models.llama import Decoder, Llama, LongRotation

V, T = 50, 12
SMALL = dict(vocab_size=V, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4)
LONG = dict(
    rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8
)
PUBLISHED = {
    "llama": ("Llama", SMALL | dict(num_key_value_heads=2, tie_word_embeddings=False)),
    "llama 3.1": ("Llama", SMALL | dict(num_key_value_heads=2, rope_theta=500.0, rope_scaling=LONG, head_dim=8)),
    "mistral": ("Mistral", SMALL | dict(num_key_value_heads=2, sliding_window=5, head_dim=6)),
    "qwen2": ("Qwen2", SMALL | dict(num_key_value_heads=4, tie_word_embeddings=True)),
    "qwen3": ("Qwen3", SMALL | dict(num_key_value_heads=2, head_dim=8)),
    "gemma": ("Gemma", SMALL | dict(num_key_value_heads=1, head_dim=10)),
    "gpt2": ("GPT2", dict(vocab_size=V, n_positions=16, n_embd=24, n_layer=3, n_head=4)),
}


def make(config):
    """The options of the model, and a factory of it."""
    options = (GPT2 if config["model_type"] == "gpt2" else Llama).of(config)
    return options, functools.partial(GPT2Decoder if isinstance(options, GPT2) else Decoder, options)


@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_are_those_of_transformers(name, tmp_path):
    """Read from a checkpoint of random weights that `transformers` has written, and written back."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    numpy = pytest.importorskip("safetensors.numpy")
    family, sizes = PUBLISHED[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes)
    reference = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in reference.parameters():  # biases and norms too
            parameter.add_(torch.randn_like(parameter) / 5)
    reference.eval().save_pretrained(tmp_path / "in", safe_serialization=True)
    options, factory = make(json.loads((tmp_path / "in" / "config.json").read_text()))
    names = options.names()
    params = jpipe.load_params(tmp_path / "in", names=names, like=nnx.eval_shape(lambda: factory(rngs=nnx.Rngs(0))))
    model = factory(rngs=nnx.Rngs(0))
    nnx.update(model, jax.tree.map(jnp.asarray, params))
    tokens = np.random.default_rng(0).integers(0, V, (2, T))
    with torch.no_grad():
        want = reference(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(model(tokens), want, atol=2e-5 * np.abs(want).max())

    (tmp_path / "out").mkdir()
    jpipe.save_params(tmp_path / "out" / "model.safetensors", params, names=names)
    before, after = (numpy.load_file(tmp_path / folder / "model.safetensors") for folder in ("in", "out"))
    assert before.keys() == after.keys()
    for tensor, value in before.items():
        np.testing.assert_array_equal(after[tensor], value)

    shutil.copy(tmp_path / "in" / "config.json", tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    given = {"input_ids": torch.tensor(tokens), "attention_mask": torch.ones(tokens.shape, dtype=torch.int64)}
    written = again.generate(**given, max_new_tokens=3, do_sample=False, eos_token_id=None, use_cache=True)
    for _ in range(3):
        tokens = np.append(tokens, np.asarray(model(tokens)[:, -1].argmax(-1))[:, None], axis=1)
    np.testing.assert_array_equal(written.numpy(), tokens)


# -- Plain numpy


def plain_logits(weights, options, tokens):
    """A decoder of the family, from tensors with published names, one row and head at a time."""

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + options.epsilon) * (options.zero_centred + scale)

    def turn(x, position):
        pairs = x.reshape(2, -1)
        half = pairs.shape[1]
        waves = 2 * math.pi * options.rotary_base ** (np.arange(half) / half)
        number = (pairs[0] + 1j * pairs[1]) * np.exp(2j * math.pi * position / waves)
        return np.concatenate([number.real, number.imag])

    def softmax(x):
        e = np.exp(x - x.max())
        return e / e.sum()

    def project(x, name):
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    results = []
    for row in tokens:
        x = weights["model.embed_tokens.weight"][row]
        if options.zero_centred:
            x = x * math.sqrt(options.dim)
        for b in range(options.num_blocks):
            block = f"model.layers.{b}"
            read = norm(x, weights[f"{block}.input_layernorm.weight"])
            q, k, v = (
                project(read, f"{block}.self_attn.{n}_proj").reshape(len(row), -1, options.head_dim) for n in "qkv"
            )
            if options.head_norms:
                q, k = (norm(a, weights[f"{block}.self_attn.{n}_norm.weight"]) for n, a in (("q", q), ("k", k)))
            attended = np.zeros_like(q)
            for h in range(options.num_heads):
                shared = h // (options.num_heads // options.num_key_heads)
                for t in range(len(row)):
                    first = 0 if options.window is None else max(0, t + 1 - options.window)
                    turned = [turn(k[s, shared], s) for s in range(first, t + 1)]
                    scores = np.array(turned) @ turn(q[t, h], t) / math.sqrt(options.head_dim)
                    attended[t, h] = softmax(scores) @ v[first : t + 1, shared]
            x = x + project(attended.reshape(len(row), -1), f"{block}.self_attn.o_proj")
            read = norm(x, weights[f"{block}.post_attention_layernorm.weight"])
            gate = project(read, f"{block}.mlp.gate_proj")
            if options.activation == "silu":
                gate = gate / (1 + np.exp(-gate))
            else:
                gate = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
            x = x + project(gate * project(read, f"{block}.mlp.up_proj"), f"{block}.mlp.down_proj")
        x = norm(x, weights["model.norm.weight"])
        results.append(x @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T)
    return np.stack(results)


OPTIONS = {
    "tied": Llama(V, 24, 40, 2, 4, 2, 6),
    "head": Llama(V, 24, 40, 2, 4, 4, 6, tie_embeddings=False, window=5, qkv_bias=True, rotary_base=100.0),
    "gemma": Llama(V, 24, 40, 2, 4, 1, 8, zero_centred=True, activation="gelu_tanh", head_norms=True),
}


@pytest.mark.first_case
@pytest.mark.parametrize("name", OPTIONS)
def test_logits_are_those_of_numpy(name):
    options = OPTIONS[name]
    with jax.enable_x64(True):
        model = Decoder(options, rngs=nnx.Rngs(0))
        rng = np.random.default_rng(0)
        graph, params = nnx.split(model)
        params = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape) / 3, jnp.float64), params)
        names = options.names()
        weights = {}
        for rule, b in itertools.product(names.rules, range(options.num_blocks)):
            leaf = nnx.to_pure_dict(params)
            for key in rule.model.format(b).split("."):
                leaf = leaf.get(int(key) if key.isdecimal() else key, {})
            if not isinstance(leaf, dict):
                weights[rule.published.format(b)] = rule.to_published(np.asarray(leaf))
        tokens = rng.integers(0, V, (2, T))
        got = nnx.merge(graph, params)(tokens)
        np.testing.assert_allclose(got, plain_logits(weights, options, tokens), rtol=1e-9, atol=1e-9)


def test_long_rotation():
    """Long waves turn 4 times slower, short ones as before."""
    rotation = LongRotation(4.0, 1.0, 2.0, 100)
    waves = np.array([10.0, 50.0, 75.0, 100.0, 1000.0])
    got = 2 * math.pi / rotation(2 * math.pi / waves)
    np.testing.assert_allclose(got[[0, 1, 3, 4]], [10, 50, 400, 4000])
    assert 75 < got[2] < 300


# -- In a pipeline


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["gemma", pytest.param("tied", marks=pytest.mark.exhaustive)])
def test_packed_documents_train_as_alone(name):
    """Rows of several documents, with a masked loss in chunks of logits, equal one document a row."""
    options, rng = OPTIONS[name], np.random.default_rng(0)
    documents = [rng.integers(0, V, n) for n in (5, 7, 4, 8)]
    wanted = [rng.random(len(d)) < 0.7 for d in documents]

    def packed(parts):
        labels = [np.where(w, np.append(d[1:], -1), -1) for d, w in ((documents[i], wanted[i]) for i in parts)]
        return {
            "tokens": np.concatenate([documents[i] for i in parts]),
            "positions": np.concatenate([np.arange(len(documents[i])) for i in parts]),
            "segment_ids": np.concatenate([np.full(len(documents[i]), i) for i in parts]),
            "labels": np.concatenate(labels),
        }

    rows = [packed(parts) for parts in ([0, 1], [2, 3])]
    batch = {key: np.stack([row[key] for row in rows]) for key in rows[0]}

    def loss(losses, batch):
        return losses.sum(), (batch["labels"] >= 0).sum().astype(jnp.float32)

    factory = functools.partial(Decoder, options)
    schedule = jpipe.schedules.one_f_one_b(2, 2)
    pipe = jpipe.Pipeline(factory, loss=loss, optimizer=optax.sgd(1.0), schedule=schedule)
    state = pipe.init(jax.random.key(0), batch)
    before = pipe.get_params(state)
    state, metrics = pipe.step(state, batch)
    graph, params = nnx.split(factory(rngs=nnx.Rngs(0)))
    nnx.update(params, jax.tree.map(jnp.asarray, before))

    def plain(params):
        model, total, number = nnx.merge(graph, params), 0, 0
        for i, document in enumerate(documents):
            log_probabilities = jax.nn.log_softmax(model(document[None]))[0]
            chosen = np.flatnonzero(wanted[i][:-1])
            total -= log_probabilities[chosen, document[chosen + 1]].sum()
            number += len(chosen)
        return total / number

    value, gradient = jax.value_and_grad(plain)(params)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    changes = jax.tree.map(np.subtract, before, pipe.get_params(state))
    for a, b, w in zip(*map(jax.tree.leaves, (changes, gradient, before)), strict=True):
        # A change is the difference of two weights, each rounded to float32.
        rounding = np.finfo(np.float32).eps * np.abs(w).max()
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max() + rounding)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"model_type": "gemma2"}, "`model_type` must be one of llama, mistral, qwen2, qwen3, gemma, got 'gemma2'"),
        ({"hidden_act": "relu"}, "`hidden_act` must be one of silu, gelu_pytorch_tanh, got 'relu'"),
        ({"attention_bias": True}, "`attention_bias` is true"),
        ({"rope_scaling": {"type": "yarn"}}, "`rope_scaling` must be of the type 'default' or 'llama3', got 'yarn'"),
        ({"num_key_value_heads": 3}, "`num_key_heads` must divide `num_heads`, got 3 and 4"),
        ({"head_dim": 5}, "`head_dim` must be even"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4}, "`use_sliding_window` is true"),
    ],
)
def test_what_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        Llama.of({"model_type": "llama"} | SMALL | config)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"model_type": "llama"}, "`model_type` must be 'gpt2', got 'llama'"),
        ({"activation_function": "relu"}, "`activation_function` must be 'gelu_new', got 'relu'"),
        ({"n_inner": 7}, "`n_inner` must be 4 times `n_embd`, got 7 and 24"),
    ],
)
def test_what_is_refused_of_gpt2(config, message):
    with pytest.raises(ValueError, match=message):
        GPT2.of({"model_type": "gpt2"} | PUBLISHED["gpt2"][1] | config)
