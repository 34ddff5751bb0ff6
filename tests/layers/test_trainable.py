"""Wrong choices of the parameters that are trained: refused before anything compiles, with what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from helpers import refused

import jpipe

KEY = jax.random.key(0)  # compiled here, before anything is refused
BATCH = {"inputs": np.zeros((4, 8), np.float32), "targets": np.zeros((4, 8), np.float32)}


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = x + nn.tanh(nn.Dense(8, name=f"block_{i}")(x))
        return nn.Dense(8, name="head")(x)


def lora(*, rngs):
    return nnx.Sequential(*(nnx.LoRALinear(8, 8, lora_rank=2, rngs=rngs) for _ in range(3)))


def dense():
    def init(key, inputs):
        return {"kernel": jnp.ones((8, 8)), "bias": jnp.ones(8)}

    return jpipe.InitApply(init, lambda p, x: x @ p["kernel"] + p["bias"][None])


LAYERS = [dense() for _ in range(3)]


def make(model, trainable, **options):
    pipe = jpipe.Pipeline(
        model,
        loss=lambda outputs, batch: jnp.mean((outputs - batch["targets"]) ** 2),
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.gpipe(2, 2),
        trainable=trainable,
        **options,
    )
    pipe._program(BATCH)
    return pipe


def trained(pipe):
    """The paths of the parameters that are trained."""
    return {
        tuple(key.key for key in path)
        for layer in pipe._program(BATCH).stages.layers
        for j, (path, _) in enumerate(jax.tree.leaves_with_path(layer.parameters))
        if j not in layer.frozen
    }


FROZEN = {"block_0": False, "block_1": False, "block_2": False}


@pytest.mark.parametrize(
    ("model", "trainable", "message"),
    [
        (Stack(), 5, r"must be a filter of NNX .*, got 5\.$"),
        (Stack(), {"head": np.ones(3), **FROZEN}, r"must be a filter .* got array\(.*\) for 'head'\.$"),
        (Stack(), "head", r"selects no parameter, got 'head'\. A text is a tag .* `nnx.PathContains\('head'\)`"),
        (
            Stack(),
            nnx.LoRAParam,
            r"selects no parameter, got 'LoRAParam'\. Only the variables of NNX modules have types",
        ),
        (
            lora,
            nnx.BatchStat,
            r"got 'BatchStat'\. The types of its variables are LoRAParam, Param\. The parameters are",
        ),
        (Stack(), False, r"selects no parameter, got False\. Give a filter"),
        (Stack(), {"head": False, **FROZEN}, r"selects no parameter"),
        (
            Stack(),
            nnx.PathContains("haed"),
            r"names 'haed', which is in the path of no parameter\. Did you mean 'head'",
        ),
        (Stack(), nnx.Not(nnx.PathContains("bloc_0")), r"names 'bloc_0'.* Did you mean 'block_0'"),
        (Stack(), nnx.Any(nnx.PathContains("head"), nnx.filterlib.PathIn(("head", "w"))), r"names \('head', 'w'\)"),
        (
            Stack(),
            {"head": True},
            r"nothing about the parameter 'block_0.bias': .* no entry 'block_0' in it, only 'head'",
        ),
        (Stack(), {"head": True, **FROZEN, "block_9": True}, r"names 'block_9', and there is no such parameter"),
        (Stack(), {"head": {"kernel": True}, **FROZEN}, r"no entry 'head.bias' in it, only 'kernel'"),
        (
            Stack(),
            {"head": {"bias": True, "kernel": {"a": True}}, **FROZEN},
            r"has entries under .* 'head.kernel', 'a'",
        ),
        (
            Stack(),
            lambda params: True,
            r"fails for the parameter 'block_0.bias': TypeError.* called as `trainable\(path",
        ),
        (Stack(), lambda path, leaf: leaf, r"must return a bool, got ShapeDtypeStruct"),
        (Stack(), lambda path, leaf: leaf.bytes, r"fails for the parameter 'block_0.bias': AttributeError"),
        (Stack(), [True, False], r"fails for .* 'block_0.bias': ValueError: a list of bools or dicts stands for"),
        (LAYERS, [True, False], r"has 2 entries for 3 layers\. .* of several `nnx.Any\(\.\.\.\)`"),
        (LAYERS, [True, False, {"kernal": True}], r"nothing about the parameter '2.bias': .*, only 'kernal'"),
        (LAYERS, [None, None, None], r"selects no parameter"),
    ],
)
def test_wrong_choices(model, trainable, message):
    with refused(message):
        make(model, trainable)


def test_a_list_has_one_filter_for_each_layer():
    pipe = make(LAYERS, [None, {"kernel": True, "bias": False}, lambda path, leaf: path == ("bias",)])
    assert [layer.frozen for layer in pipe._program(BATCH).stages.layers] == [(0, 1), (0,), (1,)]


def test_filters_see_variables():
    """With their types, metadata and shapes, as NNX hands them to its filters."""
    seen = {}

    def only_lora(path, leaf):
        seen[path] = (type(leaf), leaf.shape)
        return isinstance(leaf, nnx.LoRAParam)

    pipe = make(lora, only_lora)
    assert seen["layers", 0, "lora", "lora_a"] == (nnx.LoRAParam, (8, 2))
    assert seen["layers", 2, "kernel"] == (nnx.Param, (8, 8))
    assert trained(pipe) == {("layers", i, "lora", name) for i in range(3) for name in ("lora_a", "lora_b")}


def test_a_tree_may_have_lists_and_filters():
    pipe = make(lora, {"layers": [False, nnx.LoRAParam, True]})
    whole = {("layers", 2, "bias"), ("layers", 2, "kernel")}
    assert trained(pipe) == whole | {("layers", i, "lora", f"lora_{n}") for i in (1, 2) for n in "ab"}


def test_frozen_layers_are_not_split_over_all_stages():
    def embed(*, rngs):
        split = nnx.with_partitioning(nnx.initializers.ones, ("vocab", None))
        return nnx.Linear(8, 8, kernel_init=split, rngs=rngs)

    with pytest.raises(ValueError, match="has frozen parameters, which all stages cannot share"):
        make([embed, *LAYERS], [False, True, True, True], axis_rules=[("vocab", "stage")])
