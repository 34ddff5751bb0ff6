"""Layers that compute across the rows of a batch are reported; no other layer is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jpipe
from jpipe.layers.as_layers import as_layers
from jpipe.layers.loss import Loss
from jpipe.layers.report import report
from jpipe.layers.rows import NO_ROWS, _analyse, row_mixing
from jpipe.layers.trace import trace_evaluation, trace_layers
from models import (
    BERT,
    MLP,
    VGG,
    AlexNet,
    Inception,
    RecurrentClassifier,
    RecurrentLM,
    RecurrentTranslation,
    ResNet,
    Transformer,
    Translation,
    UNet,
)

B, T, D = 4, 6, 8


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, np.int32)


def traced(layers, inputs, train=True, **options):
    def loss(outputs, batch):
        leaves = [a for a in jax.tree.leaves(outputs) if a.dtype == np.float32]
        return sum(a.mean() for a in leaves)

    layers, microbatch = as_layers(layers), {"inputs": inputs}
    if not train:
        return trace_evaluation(layers, microbatch, **options)
    return trace_layers(layers, Loss.of(loss, has_aux=False), microbatch, **options)


def contrastive(x):
    return jax.nn.log_softmax(x @ x.T)


def merged(x):
    """[B, T, D] -> [B * T, D], centred over all tokens of all rows."""
    flat = x.reshape(-1, x.shape[-1])
    return (flat - flat.mean(0, keepdims=True)).reshape(x.shape)


MIXING = {
    "mean": (lambda x: x - x.mean(0, keepdims=True), floats(B, D), "reduce_sum"),
    "mean of all": (lambda x: x - x.mean(), floats(B, D), "reduce_sum"),
    "variance": (lambda x: x / x.std(0, keepdims=True), floats(B, D), "reduce_sum"),
    "softmax": (lambda x: jax.nn.softmax(x, axis=0), floats(B, D), "reduce_max"),
    "cumsum": (lambda x: jnp.cumsum(x, axis=0), floats(B, D), "cumsum"),
    "flip": (lambda x: x[::-1], floats(B, D), "rev"),
    "sort": (lambda x: jnp.sort(x, axis=0), floats(B, D), "sort"),
    "argmax": (
        lambda x: x + jnp.argmax(x, axis=0).astype(np.float32)[None],
        floats(B, D),
        "argmax",
    ),
    "contrastive": (contrastive, floats(B, D), "reduce_max"),
    "pairs": (lambda x: x @ x.T, floats(B, D), "a row per pair"),
    "distances": (
        lambda x: (x[:, None] - x[None]).sum(-1).min(1, keepdims=True),
        floats(B, D),
        "reduce_min",
    ),
    "covariance": (lambda x: x @ (x.T @ x), floats(B, D), "dot_general"),
    "merged": (merged, floats(B, T, D), "reduce_sum"),
    "second axis": (
        lambda x: x - jnp.swapaxes(x, 0, 1).mean(1)[None],
        floats(B, T, D),
        "reduce_sum",
    ),
    "after a lookup": (
        lambda x: jnp.ones((7, D))[x] - jnp.ones((7, D))[x].sum(0, keepdims=True),
        ints(B, T),
        "reduce_sum",
    ),
}


@pytest.mark.parametrize("name", MIXING)
def test_mixing_is_reported(name):
    function, inputs, operation = MIXING[name]
    before = [] if inputs.dtype == np.int32 else [lambda x: 2 * x]
    (sentence,) = row_mixing(traced([*before, function], inputs))
    assert sentence.startswith(f"layer {len(before)} ({function.__name__}) ")
    assert operation in sentence


def by_heads(x):
    """Attention without parameters, heads merged with the batch."""
    h = x.reshape(B, T, 2, D // 2).transpose(0, 2, 1, 3).reshape(B * 2, T, D // 2)
    weights = jax.nn.softmax(h @ h.swapaxes(1, 2))
    return (weights @ h).reshape(B, 2, T, D // 2).transpose(0, 2, 1, 3).reshape(x.shape)


SEPARATE = {
    "features": (lambda x: jax.nn.softmax(x - x.mean(-1, keepdims=True)), floats(B, D)),
    "time": (lambda x: jnp.cumsum(jnp.sort(x[:, ::-1], axis=1), axis=1), floats(B, T)),
    "heads": (by_heads, floats(B, T, D)),
    "merged": (
        lambda x: jnp.tanh(x.reshape(-1, D) @ jnp.ones((D, 3))).reshape(B, T, 3),
        floats(B, T, D),
    ),
    # T rows and B positions: the row dim is known by its position, not by its size.
    "square": (lambda x: x - x.mean(1, keepdims=True), floats(B, B, B)),
    "constants": (
        lambda x: x * jnp.arange(B * D, dtype=np.float32).reshape(B, D).sum(),
        floats(B, D),
    ),
    "best": (lambda x: jnp.take_along_axis(x, x.argmax(1)[:, None], 1), floats(B, D)),
    # No claim: the diagonal of all pairs is a function of each row.
    "diagonal": (lambda x: jnp.diag(x @ x.T)[:, None], floats(B, D)),
    "one row": (lambda x: x - x.mean(0, keepdims=True), floats(1, D)),
    "dot": (linen.Dense(3), floats(B, D)),
    "linen attention": (linen.MultiHeadDotProductAttention(2), floats(B, T, D)),
    "linen lstm": (linen.RNN(linen.LSTMCell(D)), floats(B, T, D)),
    "conv": (functools.partial(nnx.Conv, D, 3, (3,)), floats(B, T, D)),
    "group norm": (functools.partial(nnx.GroupNorm, D, 2), floats(B, T, D)),
    "batch norm": (functools.partial(nnx.BatchNorm, D), floats(B, T, D)),
    "linen batch norm": (
        jpipe.Linen(
            linen.BatchNorm(),
            train={"use_running_average": False},
            evaluate={"use_running_average": True},
        ),
        floats(B, D),
    ),
}


@pytest.mark.parametrize("name", SEPARATE)
def test_no_layer_is_accused_wrongly(name):
    layer, inputs = SEPARATE[name]
    assert row_mixing(traced([layer, lambda x: x], inputs)) == []


MODELS = {
    "mlp": (MLP(num_inputs=D, widths=(8, 8), num_outputs=3), floats(B, D)),
    "resnet": (
        ResNet(num_channels=1, widths=(8, 16), num_blocks=(1, 1), group_size=4),
        floats(B, 8, 8, 1),
    ),
    "resnet bottleneck": (
        ResNet(
            num_channels=1,
            widths=(4, 8),
            num_blocks=(1, 1),
            block="bottleneck",
            stem="imagenet",
            norm="batch",
        ),
        floats(B, 32, 32, 1),
    ),
    "vgg": (
        VGG(
            image_size=8,
            num_channels=1,
            widths=(4, 4),
            num_convolutions=(1, 2),
            hidden_width=8,
            num_classes=3,
        ),
        floats(B, 8, 8, 1),
    ),
    "unet": (
        UNet(num_channels=1, width=4, num_levels=2, num_classes=2),
        floats(B, 8, 8, 1),
    ),
    "transformer": (
        Transformer(vocab_size=7, seq_len=T, dim=8, num_heads=2, dropout=0.1),
        ints(B, T),
    ),
    "tied transformer": (
        Transformer(vocab_size=7, seq_len=T, dim=8, num_heads=2, tie_embeddings=True),
        ints(B, T),
    ),
    "bert": (
        BERT(vocab_size=7, seq_len=T, dim=8, num_heads=2, num_blocks=2),
        {
            "tokens": ints(B, T),
            "segments": ints(B, T),
            "mask": jax.ShapeDtypeStruct((B, T), bool),
        },
    ),
    "translation": (
        Translation(
            vocab_size=7,
            dim=8,
            num_heads=2,
            mlp_dim=8,
            num_encoder_blocks=2,
            num_decoder_blocks=2,
            norm="pre",
        ),
        {"source": ints(B, T), "target": ints(B, T - 1)},
    ),
    "alexnet": (
        AlexNet(
            image_size=16,
            num_channels=1,
            widths=(4,) * 5,
            stem_size=5,
            stem_stride=1,
            hidden_width=8,
        ),
        floats(B, 16, 16, 1),
    ),
    "inception": (
        Inception(num_channels=1, width=2, num_blocks=(1, 1, 1), stem="small"),
        floats(B, 8, 8, 1),
    ),
}


@pytest.mark.first_case
@pytest.mark.parametrize("train", [True, False], ids=["train", "evaluate"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(3)
def test_no_model_is_accused(name, train):
    """The rows of every model are followed from the inputs to the outputs."""
    model, inputs = MODELS[name]
    layers = traced(model.layers(), inputs, train)
    assert row_mixing(layers) == []
    assert followed(layers), "the analysis lost the rows"


LOOPS = {
    "recurrent lm": (
        RecurrentLM(vocab_size=7, embed_dim=4, dim=8, dropout=0.1),
        ints(B, T),
    ),
    "recurrent classifier": (
        RecurrentClassifier(vocab_size=7, embed_dim=4, dim=8),
        ints(B, T),
    ),
    "recurrent translation": (
        RecurrentTranslation(vocab_size=7, dim=8),
        {"source": ints(B, T), "target": ints(B, T - 1)},
    ),
}


@pytest.mark.first_case
@pytest.mark.parametrize("name", LOOPS)
def test_no_loop_is_accused(name):
    """The rows are not followed through `lax.scan`, and nothing is said about it."""
    model, inputs = LOOPS[name]
    assert row_mixing(traced(model.layers(), inputs, True)) == []


@pytest.mark.first_case
@pytest.mark.parametrize("policy", ["compute_dtype", "policy"])
def test_casts_and_policies_change_nothing(policy):
    options = {
        "compute_dtype": {"compute_dtype": jnp.bfloat16},
        "policy": {"policy": jax.checkpoint_policies.dots_saveable},
    }[policy]
    model, inputs = MODELS["transformer"]
    layers = [*model.layers(), lambda x: x - x.mean(0, keepdims=True)]
    (sentence,) = row_mixing(traced(layers, inputs, **options))
    assert sentence.startswith(f"layer {len(layers) - 1} ") and "reduce_sum" in sentence


def test_skips_carry_their_rows():
    layers = [
        jpipe.skip(lambda x: (x.sum(1), x), stash="x"),
        lambda x: x,
        jpipe.skip(lambda y, x: (x - x.mean(0, keepdims=True)) * y[:, None], pop="x"),
    ]
    (sentence,) = row_mixing(traced(layers, floats(B, D)))
    assert sentence.startswith("layer 2 ") and "reduce_sum" in sentence


def test_a_reported_number_may_be_a_mean_over_rows():
    def penalised(x):
        report("mean", x.mean())
        return 2 * x

    def loss(outputs, batch, *, reported):
        return outputs.mean() + reported["mean"]

    layers = [penalised, lambda x: x, penalised]
    model = trace_layers(as_layers(layers), Loss.of(loss, has_aux=False), {"inputs": floats(B, D)})
    assert list(model.reported) == ["mean"] and row_mixing(model) == []
    layers[1] = lambda x: x - x.mean(0, keepdims=True)
    model = trace_layers(as_layers(layers), Loss.of(loss, has_aux=False), {"inputs": floats(B, D)})
    (sentence,) = row_mixing(model)
    assert sentence.startswith("layer 1 ")


def test_a_number_may_be_a_mean_over_rows_until_rows_depend_on_it():
    """A layer hands on a number for the loss, such as that of experts, beside the rows."""
    layers = [lambda x: (x, x.mean()), lambda pair: (2 * pair[0], pair[1] + 1)]
    assert row_mixing(traced(layers, floats(B, D))) == []
    # The same mean is no such number where the layer takes it from its rows.
    layers[0] = lambda x: (x - x.mean(), x.mean())
    (sentence,) = row_mixing(traced(layers, floats(B, D)))
    assert sentence.startswith("layer 0 ")
    # A number that knows nothing of rows leaves the rows of the next layer known.
    layers = [lambda x: (x, jnp.float32(3)), lambda pair: pair[0] * pair[1] - pair[0].mean(0, keepdims=True)]
    (sentence,) = row_mixing(traced(layers, floats(B, D)))
    assert sentence.startswith("layer 1 ")


def followed(layers):
    """Whether every output of every layer has known rows, on dim 0 or on none."""
    dims = tuple(frozenset([0]) for _ in layers.inputs)
    stashed = {}
    for i, layer in enumerate(layers.layers):
        for name in layer.pop:
            dims += stashed.pop(name)
        program = layers.layer_kinds[layers.kind_of_layer[i]]
        dims, _ = _analyse(program, dims, range(0), num_rows=B)
        if any(d not in (NO_ROWS, {0}) for d in dims):
            return False
        n = len(layers.outputs[i])
        for name in layer.stash:
            stashed[name] = dims[n : n + len(layers.skips[name][2])]
            n += len(stashed[name])
        dims = dims[: len(layers.outputs[i])]
    return True
