"""Weights in safetensors files, against what the package itself writes and reads."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import refused

import jpipe
from jpipe import NameMap, NameRule

safetensors = pytest.importorskip("safetensors.numpy")
DIM, HIDDEN = 4, 6


class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.norm = nnx.RMSNorm(DIM, rngs=rngs)
        self.up = nnx.Linear(DIM, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, DIM, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.silu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, *, rngs, num_blocks=2):
        self.embed = nnx.Embed(8, DIM, rngs=rngs)
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(num_blocks)])

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


NAMES = NameMap(
    [
        NameRule("model.embed_tokens.weight", "embed.embedding"),
        NameRule("model.layers.{}.norm.weight", "blocks.{}.norm.scale"),
        NameRule("model.layers.{}.mlp.down_proj.bias", "blocks.{}.down.bias"),
        NameRule.transposed("model.layers.{}.mlp.{}_proj.weight", "blocks.{}.{}.kernel"),
    ],
    ignored=["model.layers.{}.rotary.inv_freq"],
    prefix="model.",
)


def published(num_blocks=2):
    """A model as PyTorch has it: matrices of `(outputs, inputs)`."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    tensors = {"model.embed_tokens.weight": draw(8, DIM)}
    for i in range(num_blocks):
        tensors |= {
            f"model.layers.{i}.norm.weight": draw(DIM),
            f"model.layers.{i}.mlp.up_proj.weight": draw(HIDDEN, DIM),
            f"model.layers.{i}.mlp.down_proj.weight": draw(DIM, HIDDEN),
            f"model.layers.{i}.mlp.down_proj.bias": draw(DIM),
        }
    return tensors


def outputs(tensors, tokens):
    """The model in numpy, with the published tensors."""
    x = tensors["model.embed_tokens.weight"][tokens]
    for i in range(2):
        part = {name.split(f"layers.{i}.")[1]: a for name, a in tensors.items() if f"layers.{i}." in name}
        y = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * part["norm.weight"]
        y = y @ part["mlp.up_proj.weight"].T
        y = y / (1 + np.exp(-y))
        x = x + y @ part["mlp.down_proj.weight"].T + part["mlp.down_proj.bias"]
    return x @ tensors["model.embed_tokens.weight"].T


ABSTRACT = nnx.eval_shape(lambda: Model(rngs=nnx.Rngs(0)))
TOKENS = np.random.default_rng(1).integers(0, 8, (8, 3))


def pipeline(num_stages):
    return jpipe.Pipeline(
        lambda rngs: Model(rngs=rngs),
        loss=lambda outputs, batch: jnp.mean(outputs**2),
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.one_f_one_b(num_stages, 2),
    )


@pytest.mark.first_case
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("has_prefix", [True, False])
def test_a_published_model_runs_in_a_pipeline_and_goes_back(num_stages, has_prefix, tmp_path):
    tensors = published()
    written = tensors if has_prefix else {n.removeprefix("model."): a for n, a in tensors.items()}
    rotary = {"model.layers.0.rotary.inv_freq": np.ones(2, np.float32)}
    safetensors.save_file({**written, **rotary}, tmp_path / "model.safetensors")
    pipe, batch = pipeline(num_stages), {"inputs": TOKENS}
    params = jpipe.load_params(tmp_path, names=NAMES, like=ABSTRACT)
    state = pipe.init(jax.random.key(0), batch, params=params)
    np.testing.assert_allclose(pipe.predict(state, batch), outputs(tensors, TOKENS), rtol=1e-5, atol=1e-5)
    back = tmp_path / "back.safetensors"
    jpipe.save_params(back, pipe.get_params(state), names=NAMES)
    np.testing.assert_equal(safetensors.load_file(back), tensors)


def test_lists_of_layers_come_back(tmp_path):
    path = tmp_path / "weights.safetensors"
    params = [{"kernel": np.arange(6.0).reshape(2, 3).T, "b": {0: np.float32(3), 11: np.zeros((0, 2))}}, {}]
    params += [{"x": np.arange(3).astype(ml_dtypes.bfloat16), "y": jnp.ones((2,), jnp.int8)}]
    jpipe.save_params(path, params)
    got = jpipe.load_params(path)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, params))
    assert [leaf.dtype for leaf in jax.tree.leaves(got)] == [np.asarray(a).dtype for a in jax.tree.leaves(params)]
    assert [p.name for p in tmp_path.iterdir()] == ["weights.safetensors"]


def test_no_number_is_read_before_it_is_asked_for(tmp_path, monkeypatch):
    tensors = published()
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    params = jpipe.load_params(tmp_path, names=NAMES, like=ABSTRACT)
    leaf, other = params["blocks"][0]["up"]["kernel"], params["blocks"][1]["up"]["kernel"]
    assert (leaf.shape, leaf.dtype, leaf.nbytes) == ((DIM, HIDDEN), np.float32, 4 * DIM * HIDDEN)
    asked = []
    monkeypatch.setattr(type(leaf), "__array__", lambda self, *_, **__: asked.append(self) or np.zeros(self.shape))
    np.asarray(leaf)
    assert asked == [leaf] and other not in asked


@pytest.mark.parametrize(("file_bytes", "num_files"), [(1, 9), (150, 5), (10**6, 1), (None, 1)])
def test_several_files_with_an_index(file_bytes, num_files, tmp_path):
    tensors = published()
    params = jax.tree.map(np.asarray, from_published(tensors))
    path = tmp_path / "model.safetensors"
    jpipe.save_params(path, params)  # an older one
    jpipe.save_params(path, params, names=NAMES, file_bytes=file_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == num_files
    np.testing.assert_equal({n: a for f in files for n, a in safetensors.load_file(f).items()}, tensors)
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (num_files > 1)
    for place in (tmp_path, path, *([index] if num_files > 1 else [])):
        got = jpipe.load_params(place, names=NAMES, like=params)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, got), params)


def from_published(tensors):
    """The tree of the model, by hand."""
    blocks = {
        i: {
            "norm": {"scale": tensors[f"model.layers.{i}.norm.weight"]},
            "up": {"kernel": tensors[f"model.layers.{i}.mlp.up_proj.weight"].T},
            "down": {
                "kernel": tensors[f"model.layers.{i}.mlp.down_proj.weight"].T,
                "bias": tensors[f"model.layers.{i}.mlp.down_proj.bias"],
            },
        }
        for i in range(2)
    }
    return {"blocks": blocks, "embed": {"embedding": tensors["model.embed_tokens.weight"]}}


def test_leaves_get_the_dtypes_of_the_model(tmp_path):
    tensors = {name: a.astype(ml_dtypes.bfloat16) for name, a in published().items()}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    got = jpipe.load_params(tmp_path, names=NAMES, like=Model(rngs=nnx.Rngs(0)))
    kernel = got["blocks"][1]["up"]["kernel"]
    assert kernel.dtype == np.float32
    np.testing.assert_array_equal(kernel, tensors["model.layers.1.mlp.up_proj.weight"].astype(np.float32).T)
    nnx.update(model := Model(rngs=nnx.Rngs(0)), jax.tree.map(np.asarray, got))
    np.testing.assert_array_equal(model.blocks[1].up.kernel[...], kernel)


WRONG = {
    "missing": (lambda t: t.pop("model.layers.1.norm.weight"), "nothing for blocks.1.norm.scale"),
    "unexpected": (lambda t: t.update(odd=np.ones(2)), "no rule: odd. Add rules, or name them in `ignored`"),
    "shape": (
        lambda t: t.update({"model.layers.0.mlp.up_proj.weight": np.ones((5, DIM), np.float32)}),
        r"other shapes have blocks.0.up.kernel \(the model \[4, 6\], the file \[4, 5\]\)",
    ),
    "more layers": (lambda t: t.update(published(3)), r"the model has no blocks.2.down.bias, .*"),
    "twice": (lambda t: t.update({"embed_tokens.weight": np.ones((8, DIM))}), "two tensors of the file are 'embed.emb"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_named(name, tmp_path):
    change, words = WRONG[name]
    tensors = published()
    change(tensors)
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    with refused(words):
        jpipe.load_params(tmp_path, names=NAMES, like=ABSTRACT)


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.save_file(published(), path)
    whole = path.read_bytes()
    for content in (b"", whole[:7], whole[:100], whole[:-1], b"x" * 200):
        path.write_bytes(content)
        with refused("is damaged or no safetensors file"):
            jpipe.load_params(path)
    index = tmp_path / "model.safetensors.index.json"
    for text in ("", "{}", json.dumps({"weight_map": {"a": "../model.safetensors"}})):
        index.write_text(text)
        with refused("is damaged or no safetensors file"):
            jpipe.load_params(index)
    with pytest.raises(FileNotFoundError):
        jpipe.load_params(tmp_path / "other.safetensors")
    with pytest.raises(OSError, match="cannot write .*folder/a.safetensors.*No such file"):
        jpipe.save_params(tmp_path / "folder/a.safetensors", [{"kernel": np.ones(2)}])


def test_wrong_arguments_are_refused_before_a_file_is_written(tmp_path):
    params = from_published(published())
    for options, words in (
        ({"file_bytes": 0}, "`file_bytes` must be a whole number of bytes, at least 1, got 0"),
        ({"file_bytes": "5GB"}, "got '5GB'"),
        ({"names": NameMap([])}, r"`names` has no rule for 'blocks.0.norm.scale'"),
    ):
        with refused(words):
            jpipe.save_params(tmp_path / "a.safetensors", params, **options)
    with refused(".*have 'a' of the dtype float8_e4m3fn, which safetensors cannot read"):
        jpipe.save_params(tmp_path / "a.safetensors", {"a": np.ones(2, ml_dtypes.float8_e4m3fn)})
    for call in (
        lambda: jpipe.save_params(tmp_path / "a.msgpack", params, names=NAMES),
        lambda: jpipe.load_params(tmp_path / "a.msgpack", names=NAMES),
    ):
        with refused("`names` is for safetensors files, got the file 'a.msgpack'"):
            call()
    with pytest.raises(TypeError, match=r"`rules` must be a list of jpipe.NameRule\(published, model\), got 'a' in it"):
        NameMap({"a": "b"})
    with pytest.raises(TypeError, match="`ignored` must be a list of published names, got 'a'"):
        NameMap([], ignored="a")
    with refused(r"the rule from 'a.\{\}' to 'b' must have as many \{\}"):
        NameRule("a.{}", "b"), NameMap([NameRule("a.{}", "b")])
    assert not list(tmp_path.iterdir())


def test_without_the_package_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        jpipe.save_params(tmp_path / "a.safetensors", {"a": np.ones(2)})
