"""`jpipe.add_lora`: the same outputs, the weights at their paths, and LoRA where it was asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe

X = jnp.linspace(-1, 1, 12).reshape(4, 3)


class Shared(nnx.Module):
    """A layer that is called twice, one in a list, and one of another class."""

    def __init__(self, *, rngs):
        self.first = nnx.Linear(3, 3, rngs=rngs)
        self.second = self.first
        self.others = nnx.List([nnx.Linear(3, 3, use_bias=False, rngs=rngs)])
        self.general = nnx.LinearGeneral(3, 3, rngs=rngs)

    def __call__(self, x):
        return self.general(self.others[0](self.second(jnp.tanh(self.first(x)))))


def paths(module, kind):
    return {path for path, _ in nnx.to_flat_state(nnx.state(module, kind))}


def test_it_computes_the_same_and_keeps_weights_and_paths():
    module = Shared(rngs=nnx.Rngs(0))
    weights, outputs = nnx.state(module, nnx.Param), module(X)
    given = paths(module, nnx.Param)
    assert jpipe.add_lora(module, 2, rngs=nnx.Rngs(1)) is module
    np.testing.assert_array_equal(module(X), outputs)
    added = paths(module, nnx.LoRAParam)
    assert added == {(*layer, "lora", f"lora_{n}") for layer in (("first",), ("others", 0)) for n in "ab"}
    assert paths(module, nnx.Param) == given | added
    jax.tree.map(np.testing.assert_array_equal, nnx.state(module, lambda p, v: p in given), weights)
    module.first.lora.lora_b[...] = jnp.ones((2, 3))
    assert module.second.lora is module.first.lora
    assert (module(X) != outputs).any()


def test_where():
    module = jpipe.add_lora(Shared(rngs=nnx.Rngs(0)), 2, where=nnx.PathContains("others"), rngs=nnx.Rngs(1))
    assert type(module.first) is nnx.Linear and type(module.others[0]) is nnx.LoRALinear
    jpipe.add_lora(module, 1, where=lambda path, layer: layer.use_bias, rngs=nnx.Rngs(1))
    assert module.first.lora.lora_a.shape == (3, 1)


@pytest.mark.parametrize(
    ("module", "rank", "where", "message"),
    [
        (jnp.tanh, 2, ..., "must be an NNX module"),
        (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), 0, ..., "must be a whole number, at least 1, got 0"),
        (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), 2.0, ..., "must be a whole number"),
        (nnx.BatchNorm(2, rngs=nnx.Rngs(0)), 2, ..., "BatchNorm has no `nnx.Linear`"),
        (
            Shared(rngs=nnx.Rngs(0)),
            2,
            nnx.PathContains("firts"),
            r"selects no `nnx.Linear`.* are 'first', 'others.0'\.",
        ),
    ],
)
def test_wrong_arguments(module, rank, where, message):
    with pytest.raises(ValueError, match=message):
        jpipe.add_lora(module, rank, where=where, rngs=nnx.Rngs(0))


def with_b(params):
    """Other numbers than 0 in every B."""
    if not isinstance(params, dict):
        return params
    return {key: jnp.ones_like(v) / 3 if key == "lora_b" else with_b(v) for key, v in params.items()}


def test_into_weights_and_out_again():
    def adapted():
        return jpipe.add_lora(Shared(rngs=nnx.Rngs(1)), 2, rngs=nnx.Rngs(1))

    plain = Shared(rngs=nnx.Rngs(0))
    weights = nnx.to_pure_dict(nnx.state(plain, nnx.Param))
    params = jpipe.with_lora(weights, nnx.eval_shape(adapted), jax.random.key(0))
    assert "lora" not in weights["first"]
    model = adapted()
    nnx.update(model, params)
    np.testing.assert_array_equal(model(X), plain(X))
    a, b = (params["first"]["lora"]["lora_a"], params["others"][0]["lora"]["lora_a"])
    assert (a != b).all() and np.abs(a).max() <= np.sqrt(6 / 3)

    params = with_b(params)
    nnx.update(model, params)
    nnx.update(plain, jpipe.merge_lora(params))
    np.testing.assert_allclose(plain(X), model(X), rtol=1e-5)
    assert jax.tree.structure(jpipe.merge_lora([params])[0]) == jax.tree.structure(weights)


def test_bfloat16_is_rounded_once():
    values = np.random.default_rng(0).normal(size=(3, 8, 8)).astype(jnp.bfloat16)
    kernel, a, b = values
    wide = values.astype(np.float32)
    got = jpipe.merge_lora({"kernel": kernel, "lora": {"lora_a": a, "lora_b": b}})["kernel"]
    np.testing.assert_array_equal(got, (wide[0] + wide[1] @ wide[2]).astype(jnp.bfloat16))


def test_what_has_no_place():
    like = nnx.eval_shape(lambda: jpipe.add_lora(Shared(rngs=nnx.Rngs(0)), 2, rngs=nnx.Rngs(1)))
    for call, message in (
        (lambda: jpipe.merge_lora({"kernel": jnp.ones((2, 2))}), 'no layer with "kernel" and "lora"'),
        (lambda: jpipe.with_lora({"first": {}}, like, jax.random.key(0)), "no layer 'others.0', which has LoRA"),
        (lambda: jpipe.with_lora({}, nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jax.random.key(0)), "Linear has no LoRA"),
        (lambda: jpipe.with_lora({}, {}, jax.random.key(0)), "must be an NNX module with LoRA"),
        (
            lambda: jpipe.merge_lora({"x": {"kernel": X, "lora": {"lora_a": X, "lora_b": X}}}),
            r"must have the shape of the kernel, \[4, 3\], in x",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_factory_makes_it_on_its_stage():
    def block(rngs):
        return jpipe.add_lora(nnx.Linear(3, 3, rngs=rngs), 2, rngs=rngs)

    pipe = jpipe.Pipeline(
        [block] * 2,
        loss=lambda outputs, batch: jnp.mean(outputs**2),
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.gpipe(2, 2),
        trainable=nnx.LoRAParam,
    )
    batch = {"inputs": X}
    state = pipe.init(jax.random.key(0), batch)
    before = pipe.get_params(state)
    after = pipe.get_params(pipe.step(state, batch)[0])
    np.testing.assert_array_equal(before[1]["kernel"], after[1]["kernel"])
    assert (before[1]["lora"]["lora_b"] != after[1]["lora"]["lora_b"]).any()
