"""The models: shapes, sizes against published ones, initial scales, and each part
against a plain computation of it."""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jpipe
import models
from jpipe._attention import whole as whole_module
from jpipe.layers.as_layers import as_layers
from jpipe.layers.axis_rules import constraints_on, unannotated_on
from jpipe.layers.loss import Loss
from jpipe.layers.trace import trace_layers
from jpipe.soap.layers import layers_graph
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
from models.convolution import Conv, halve
from models.sublayers import Attention
from models.translation import positions
from models.unet import UpConvolution
from train import flags
from train.config import TrainConfig
from train.mnist import MNIST

IMAGES = (2, 28, 28, 1)
DIGITS = ResNet(num_channels=1, widths=(8, 16), num_blocks=(1, 2), stem_stride=2)
BOTTLENECKS = ResNet.of_depth(50, num_channels=1, widths=(4, 8), num_blocks=(2, 3), num_classes=10)
CONVOLUTIONS = VGG(
    image_size=28,
    num_channels=1,
    widths=(4, 8),
    num_convolutions=(1, 3),
    hidden_width=16,
    num_classes=10,
)
BYTES = Transformer(seq_len=12, dim=16, num_heads=2, num_blocks=3)
WORDS = BERT(vocab_size=50, seq_len=12, dim=16, num_heads=2, num_blocks=3)
LANGUAGES = Translation(
    vocab_size=50,
    dim=16,
    num_heads=2,
    mlp_dim=24,
    num_encoder_blocks=2,
    num_decoder_blocks=3,
)
DIGITS_BY_ALEXNET = AlexNet(
    image_size=28,
    num_channels=1,
    widths=(4, 4, 8, 8, 4),
    stem_size=5,
    stem_stride=1,
    hidden_width=16,
    num_classes=10,
)
BRANCHES = Inception(num_channels=1, width=2, num_blocks=(1, 1, 1), stem="small", num_classes=10)
TURNS = RecurrentLM(embed_dim=6, dim=8, num_layers=3)
KINDS = RecurrentClassifier(embed_dim=6, dim=8, num_layers=2, num_classes=5)
SENTENCES = RecurrentTranslation(vocab_size=50, dim=8, dropout=0.0)
PIXELS = UNet(num_channels=3, width=4, num_levels=2, num_classes=5)
# Each with the shape of what `example` makes for it: of the tokens, for a dict.
MODELS = [
    (MLP(widths=(32, 32)), IMAGES),
    (DIGITS, IMAGES),
    (BOTTLENECKS, IMAGES),
    (CONVOLUTIONS, IMAGES),
    (BYTES, (2, 12)),
    (WORDS, (2, 12)),
    (LANGUAGES, (2, 12)),
    (DIGITS_BY_ALEXNET, IMAGES),
    (BRANCHES, (2, 12, 12, 1)),
    (TURNS, (2, 12)),
    (KINDS, (2, 12)),
    (SENTENCES, (2, 12)),
]
IDS = ["MLP", "ResNet", "Bottlenecks", "VGG", "Transformer", "BERT", "Translation"]
IDS += ["AlexNet", "Inception", "RecurrentLM", "RecurrentClassifier"]
IDS += ["RecurrentTranslation"]
UNIT = nnx.initializers.normal(1.0)
# Programs that run once: most of their time would be compilation.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@functools.cache
def build(model):
    """The layers, with numbers."""
    keys = jax.random.split(jax.random.key(0), len(factories(model)))
    return list(map(made, factories(model), keys))


def made(factory, key):
    """One layer, with numbers."""
    graph = nnx.graphdef(_abstract(factory.func, factory.args))
    return nnx.merge(graph, _state(factory.func, factory.args, key))


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def _state(make, arguments, key):
    return nnx.state(make(*arguments, rngs=nnx.Rngs(key)))


def factories(model):
    if isinstance(model, UNet):
        return [factory for factory, _ in model.parts()]
    return model.layers()


def abstract(model):
    """The layers without numbers."""
    return [_abstract(f.func, f.args) for f in factories(model)]


@functools.cache
def _abstract(make, arguments):
    return nnx.eval_shape(lambda: make(*arguments, rngs=nnx.Rngs(0)))


def run(layers, x, mode="eval"):
    """Outputs of a copy of the layers; with "train" what the layers are then, too."""
    after = []
    for layer in layers:
        x, state = apply(layer, x, mode=mode)
        after.append(nnx.merge(nnx.graphdef(layer), state))
    return x if mode == "eval" else (x, after)


def run_with_skips(layers, parts, x):
    """A plain walk over a model in which some layers keep something for later ones."""
    kept = {}
    for layer, (_, names) in zip(layers, parts, strict=True):
        inputs = (x, kept.pop(names["pop"])) if "pop" in names else (x,)
        x, _ = apply(layer, *inputs)
        if "stash" in names:
            x, kept[names["stash"]] = x
    assert not kept
    return x


def shapes(model, x):
    """What each layer hands on, without numbers."""
    outputs = []
    for layer in abstract(model):
        x, _ = apply(layer, x, program=_apply.eval_shape)
        outputs.append(x)
    return outputs


# Compiled once for all equal layers, of any model.
@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def _apply(graph, mode, state, *inputs):
    layer = nnx.merge(graph, state)
    getattr(layer, mode)()
    return layer(*inputs), nnx.state(layer)


def apply(layer, *inputs, mode="eval", program=_apply):
    """Outputs of a copy of the layer, and its state after."""
    graph, state = nnx.split(layer)
    return program(graph, mode, state, *inputs)


def example(model, shape, seed=0):
    rng = np.random.default_rng(seed)
    if len(shape) > 2:
        return rng.normal(size=shape).astype(np.float32)
    tokens = lambda high: rng.integers(1, high, shape).astype(np.int32)  # noqa: E731
    if isinstance(model, BERT):
        mask = np.ones(shape, bool)
        return {"tokens": tokens(50), "segments": tokens(3) - 1, "mask": mask}
    if isinstance(model, Translation | RecurrentTranslation):
        target_vocab_size = model.target_vocab_size or model.vocab_size
        target = tokens(target_vocab_size)[:, :-3]
        return {"source": tokens(model.vocab_size), "target": target}
    return tokens(256)


def num_parameters(model):
    """Numbers in the parameters of the layers; what is tied counts once."""
    layers = abstract(model)
    sizes = [a.size for a in jax.tree.leaves([nnx.state(i, nnx.Param) for i in layers])]
    shared = [at(layers, *p).size for t in ties(model) for p in t[1:]]
    return sum(sizes) - sum(shared)


def ties(model):
    return model.ties() if hasattr(model, "ties") else []


def at(layers, layer, path):
    return functools.reduce(getattr, path.split("."), layers[layer])


@pytest.mark.parametrize(
    "model, shape, num_layers, size, outputs",
    [
        (MLP(), IMAGES, 8, 598_282, (2, 10)),
        (MLP(num_inputs=6, widths=(), num_outputs=3), (2, 2, 3), 1, 21, (2, 3)),
        # As counted for ResNet-18 with the CIFAR stem elsewhere.
        (ResNet(), (1, 32, 32, 3), 10, 11_173_962, (1, 10)),
        (DIGITS, IMAGES, 5, 9_794, (2, 10)),
        # As torchvision counts them.
        (ResNet.of_depth(18), (1, 224, 224, 3), 10, 11_689_512, (1, 1000)),
        (ResNet.of_depth(34), (1, 224, 224, 3), 18, 21_797_672, (1, 1000)),
        (ResNet.of_depth(50), (1, 224, 224, 3), 18, 25_557_032, (1, 1000)),
        (ResNet.of_depth(101), (1, 224, 224, 3), 35, 44_549_160, (1, 1000)),
        (ResNet.of_depth(152), (1, 224, 224, 3), 52, 60_192_808, (1, 1000)),
        (VGG(), (1, 224, 224, 3), 16, 138_357_544, (1, 1000)),
        # 4,224 channels, each with a scale more; the biases are the norms'.
        (VGG(batch_norm=True), (1, 224, 224, 3), 16, 138_361_768, (1, 1000)),
        (AlexNet(), (1, 224, 224, 3), 8, 61_100_840, (1, 1000)),
        # torchvision has 27,161,264 with the auxiliary head, which has the rest.
        (Inception(), (1, 299, 299, 3), 17, 23_834_568, (1, 1000)),
        # 4 (D + H + 1) H a layer, as Keras counts them; V E embedding, V H + V head.
        (
            RecurrentLM(vocab_size=10000, embed_dim=650, dim=650),
            (1, 35),
            4,
            2 * 10000 * 650 + 10000 + 2 * 4 * (650 + 650 + 1) * 650,
            (1, 35, 10000),
        ),
        (KINDS, (2, 12), 4, 256 * 6 + 4 * (15 + 17) * 8 + 9 * 5, (2, 5)),
        # 2 D^2 + D^2 the attention.
        (
            RecurrentTranslation(),
            (1, 40),
            7,
            3 * 32000 * 1024 + 32000 + 4 * 4 * 2049 * 1024 + 3 * 1024**2,
            (1, 37, 32000),
        ),
        # 12 D^2 + 13 D a block, (V + T) D embedding, V D + 2 D head.
        (Transformer(), (1, 128), 10, 1_668_352, (1, 128, 256)),
        (BYTES, (2, 12), 5, 3 * (12 * 16**2 + 13 * 16) + 524 * 16 + 32, (2, 12, 256)),
        # GPT-2 small.
        (
            Transformer(
                vocab_size=50257,
                seq_len=1024,
                dim=768,
                num_heads=12,
                num_blocks=12,
                dropout=0.1,
                tie_embeddings=True,
            ),
            (1, 1024),
            14,
            124_439_808,
            (1, 1024, 50257),
        ),
        # BERT-base with its head: D^2 + 3 D and a bias a token beside the encoder below.
        (
            BERT(),
            (1, 512),
            14,
            108_891_648 + 768**2 + 3 * 768 + 30522,
            (1, 512, 30522),
        ),
        # The base of the paper: 4 D^2 an attention, 2 D F + F + D an MLP, 2 D a norm.
        (
            Translation(),
            (1, 64),
            14,
            37000 * 512
            + 6 * (4 * 512**2 + (2 * 512 * 2048 + 2048 + 512) + 2 * 1024)
            + 6 * (8 * 512**2 + (2 * 512 * 2048 + 2048 + 512) + 3 * 1024),
            (1, 61, 37000),
        ),
        # Two vocabularies; a norm after each half where blocks begin with theirs.
        (
            dataclasses.replace(LANGUAGES, target_vocab_size=30, norm="pre"),
            (2, 12),
            8,
            (50 + 30) * 16
            + 2 * (4 * 16**2 + (2 * 16 * 24 + 24 + 16) + 2 * 32)
            + 3 * (8 * 16**2 + (2 * 16 * 24 + 24 + 16) + 3 * 32)
            + 2 * 32,
            (2, 9, 30),
        ),
    ],
)
def test_sizes_and_shapes(model, shape, num_layers, size, outputs):
    assert len(model.layers()) == num_layers
    assert num_parameters(model) == size
    assert shapes(model, example(model, shape))[-1].shape == outputs


def test_encoder_of_bert_base():
    model = BERT(mlm_head=False)
    # 12 D^2 + 13 D a block, (V + T + 2 + 2) D embedding.
    formula = 12 * (12 * 768**2 + 13 * 768) + (30522 + 512 + 2 + 2) * 768
    assert num_parameters(model) == formula == 108_891_648
    outputs = shapes(model, example(model, (1, 8)))[-1]
    assert outputs["x"].shape == (1, 8, 768)
    assert outputs["mask"].shape == (1, 8)


def test_shapes_of_bottlenecks():
    # One block halves the image of each group but the first, and widens it.
    outputs = shapes(ResNet.of_depth(50), jnp.zeros((1, 224, 224, 3)))
    assert [x.shape[1:] for x in outputs] == [
        (56, 56, 64),
        *[(56, 56, 256)] * 3,
        *[(28, 28, 512)] * 4,
        *[(14, 14, 1024)] * 6,
        *[(7, 7, 2048)] * 3,
        (1000,),
    ]
    # The image is halved between conv1 and conv3, by the 3x3 convolution.
    first = abstract(BOTTLENECKS)[3]
    assert (first.conv1.stride, first.conv2.stride, first.conv3.stride) == (1, 2, 1)
    assert first.conv2.kernel.shape == (3, 3, 8, 8)
    assert first.projection.stride == 2


def test_shapes_of_inception():
    outputs = shapes(Inception(), jnp.zeros((1, 299, 299, 3)))
    assert [x.shape[1:] for x in outputs] == [
        (149, 149, 32),
        (147, 147, 32),
        (73, 73, 64),
        (73, 73, 80),
        (35, 35, 192),
        (35, 35, 256),
        *[(35, 35, 288)] * 2,
        *[(17, 17, 768)] * 5,
        (8, 8, 1280),
        *[(8, 8, 2048)] * 2,
        (1000,),
    ]
    # The mean of windows counts the zeros around the image.
    ones = models.inception._mean(jnp.ones((1, 3, 3, 1)))[0, ..., 0]
    np.testing.assert_allclose(9 * ones, [[4, 6, 4], [6, 9, 6], [4, 6, 4]], rtol=1e-6)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_lstm_equals_its_formulas():
    """Hochreiter's units with a forget gate, position by position, a row at a time."""
    lstm = models.recurrent.LSTM(3, 4, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(lstm.bias[...], [[0, 1, 0, 0]] * 4)
    rng = np.random.default_rng(0)
    lstm.bias[...] = jnp.asarray(rng.normal(size=(4, 4)), jnp.float32)
    x = rng.normal(size=(2, 5, 3)).astype(np.float32)
    mask = np.array([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0]], bool)
    start = rng.normal(size=(2, 2, 4)).astype(np.float32)
    got, state = lstm(x, mask, (start[0], start[1]))
    w, u, b = (np.asarray(p[...]) for p in (lstm.input_kernel, lstm.state_kernel, lstm.bias))  # fmt: skip
    for row in range(2):
        h, c = start[:, row]
        for t in range(5):
            if mask[row, t]:
                i, f, g, o = (x[row, t] @ w[:, :, k] + h @ u[:, :, k] + b[:, k] for k in range(4))
                c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
                h = sigmoid(o) * np.tanh(c)
            np.testing.assert_allclose(got[row, t], h, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state[0][row], h, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state[1][row], c, rtol=1e-5, atol=1e-6)


def test_recurrent_decoder_starts_where_the_encoder_ends():
    """Layer by layer: the states in the queue, the attention in plain NumPy, the logits."""
    model = dataclasses.replace(SENTENCES, num_layers=3)
    layers, inputs = build(model), example(model, (2, 6))
    inputs["source"][1, 4:] = 0
    embedding, encoder, decoder = layers[0], layers[1:4], layers[4:7]
    x = embedding.token.embedding[...][inputs["source"]]
    y = embedding.target_token.embedding[...][inputs["target"]]
    states = []
    for layer in encoder:
        x, state = layer.lstm(x, inputs["source"] != 0)
        states.append(state)
    for layer, state in zip(decoder, states, strict=True):
        y, _ = layer.lstm(y, state=state)
    attention, head = layers[7:]
    x, y = np.asarray(x), np.asarray(y)
    mixed = np.zeros_like(y)
    for row, length in enumerate((6, 4)):
        memory = x[row, :length]
        for t in range(y.shape[1]):
            score = memory @ (y[row, t] @ np.asarray(attention.score[...]))
            weights = np.exp(score - score.max())
            context = weights / weights.sum() @ memory
            of_context, of_query = np.asarray(attention.combine[...])
            mixed[row, t] = np.tanh(context @ of_context + y[row, t] @ of_query)
    wanted = mixed @ np.asarray(head.embedding[...]).T
    np.testing.assert_allclose(run(layers, inputs), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.first_case
@pytest.mark.parametrize("model", [TURNS, SENTENCES], ids=lambda m: type(m).__name__)
def test_recurrent_models_are_causal(model):
    layers, x = build(model), example(model, (1, 12))
    target = x["target"] if isinstance(x, dict) else x
    changed = target.copy()
    changed[0, 5] = changed[0, 5] % 49 + 1
    before = run(layers, x)
    after = run(layers, x | {"target": changed} if isinstance(x, dict) else changed)
    np.testing.assert_allclose(before[:, :5], after[:, :5], rtol=1e-6, atol=1e-6)
    assert np.abs(before - after)[0, 5:].max(-1).min() > 1e-5


def pieces(layer):
    """The modules with weights of a layer, in the order in which the parts of the layer run."""
    get = functools.partial(getattr, layer)
    if hasattr(layer, "mlp_residual"):
        kinds = ["attention", "memory", "mlp"]
        kinds = [kind for kind in kinds if hasattr(layer, f"{kind}_residual")]
        found = []
        for kind in kinds:
            inner = get("memory_attention" if kind == "memory" else kind)
            names = [["query", "key", "value"], ["out"]]
            if kind == "mlp":
                names = [["linear_in"], ["linear_out"]]
            parts = [[getattr(inner, name) for name in part] for part in names]
            residual = get(f"{kind}_residual")
            parts.insert(0 if residual.norm_first else 2, [residual.norm])
            found += parts
        return found
    names = ["projection", "projection_norm", "conv", "norm"]
    names += [f"{kind}{i}" for i in (1, 2, 3) for kind in ("conv", "norm")]
    convolutions = hasattr(layer, "conv") or hasattr(layer, "conv1")
    return [[get(n)] for n in names if hasattr(layer, n)] if convolutions else [[layer]]


def modules_of_part(part):
    """The modules with weights of a part, in the order of `pieces`."""
    names = ("conv", "norm", "query", "key", "value", "out", "linear_in", "linear_out")
    own = [getattr(part, name) for name in names if hasattr(part, name)]
    return own if type(part).__name__.endswith("Part") else [part]


@pytest.mark.exhaustive
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "model, shape, num_layers",
    [
        (DIGITS, IMAGES, 3 + 3 * 4 + 2),
        (dataclasses.replace(BOTTLENECKS, stem="small"), IMAGES, 3 + 5 * 6 + 2 * 2),
        (BOTTLENECKS, IMAGES, 3 + 5 * 6 + 2 * 2),
        pytest.param(LANGUAGES, (2, 12), 2 + 2 * 6 + 3 * 9, marks=pytest.mark.exhaustive),
        (dataclasses.replace(LANGUAGES, norm="pre"), (2, 12), 3 + 2 * 6 + 3 * 9),
    ],
    ids=["basic", "bottleneck", "ImageNet", "post", "pre"],
)
def test_fine_grained_layers_compute_the_same(model, shape, num_layers):
    """Both get the same weights, far from the initial ones, of which some are zero."""
    fine = dataclasses.replace(model, fine_grained=True)
    # Layers of their own, because their weights change.
    layers, parts = build.__wrapped__(model), build.__wrapped__(fine)
    rng = np.random.default_rng(1)
    wholes = [modules for layer in layers for modules in pieces(layer)]
    assert len(parts) == len(wholes) == num_layers
    for part, modules in zip(parts, wholes, strict=True):
        for own, module in zip(modules_of_part(part), modules, strict=True):
            numbers = jax.tree.map(
                lambda a: a + rng.normal(size=a.shape).astype(np.float32) / 4,
                nnx.state(module, nnx.Param),
            )
            nnx.update(module, numbers)
            nnx.update(own, numbers)
    x = example(model, shape)
    if isinstance(x, dict):
        x["source"][1, 7:] = 0  # padding
    wanted = run(layers, x)
    assert np.ptp(wanted) > 1
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(run(parts, x), wanted, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("model, num_layers", [(ResNet.of_depth(50), 107), (Translation(), 92)])
def test_fine_grained_models_have_the_same_size(model, num_layers):
    fine = dataclasses.replace(model, fine_grained=True)
    assert len(fine.layers()) == num_layers
    assert num_parameters(fine) == num_parameters(model)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model, shape", MODELS, ids=IDS)
@pytest.mark.sampled(8)
def test_first_loss_is_that_of_a_guess(model, shape):
    logits = run(build(model), example(model, shape))
    labels = jnp.zeros(logits.shape[:-1], jnp.int32)
    log_probs = jax.nn.log_softmax(logits)
    loss = -jnp.take_along_axis(log_probs, labels[..., None], -1).mean()
    assert abs(float(loss) - np.log(logits.shape[-1])) < 0.5


@pytest.mark.first_case
@pytest.mark.parametrize("model, shape", MODELS, ids=IDS)
@pytest.mark.sampled(3)
def test_examples_do_not_touch_each_other(model, shape):
    # What lets a minibatch be cut into microbatches anywhere. Batch norm does but in eval.
    layers, x = build(model), example(model, shape)
    whole = run(layers, x)
    parts = [run(layers, jax.tree.map(lambda a, i=i: a[i][None], x)) for i in (0, 1)]
    np.testing.assert_allclose(whole, jnp.concatenate(parts), rtol=1e-5, atol=1e-5 * np.abs(whole).max())


@pytest.mark.parametrize(
    "model, extra",
    [
        (MLP(widths=(32, 32)), set()),
        (DIGITS, set()),
        (PIXELS, set()),
        (BYTES, set()),
        (dataclasses.replace(BYTES, tie_embeddings=True), set()),
        (BOTTLENECKS, {nnx.BatchStat}),
        (dataclasses.replace(CONVOLUTIONS, dropout=0.0), set()),
        (
            dataclasses.replace(CONVOLUTIONS, dropout=0.0, batch_norm=True),
            {nnx.BatchStat},
        ),
        (dataclasses.replace(WORDS, dropout=0.0), set()),
        (dataclasses.replace(LANGUAGES, dropout=0.0), set()),
        (dataclasses.replace(DIGITS_BY_ALEXNET, dropout=0.0), set()),
        (dataclasses.replace(BRANCHES, dropout=0.0), {nnx.BatchStat}),
        (TURNS, set()),
        (KINDS, set()),
        (SENTENCES, set()),
        (dataclasses.replace(SENTENCES, dropout=0.2), {nnx.RngKey, nnx.RngCount}),
        (CONVOLUTIONS, {nnx.RngKey, nnx.RngCount}),
        (dataclasses.replace(BYTES, dropout=0.1), {nnx.RngKey, nnx.RngCount}),
        (WORDS, {nnx.RngKey, nnx.RngCount}),
        (LANGUAGES, {nnx.RngKey, nnx.RngCount}),
    ],
)
def test_state_is_float32_parameters_and_what_was_asked_for(model, extra):
    types = set()
    for layer in abstract(model):
        for _, variable in nnx.to_flat_state(nnx.state(layer)):
            types.add(type(variable))
            if isinstance(variable, nnx.Param | nnx.BatchStat):
                assert [a.dtype for a in jax.tree.leaves(variable)] == [jnp.float32]
    assert types == {nnx.Param} | extra


@pytest.mark.parametrize(
    "model, shape, equal",
    [
        (MLP(widths=(32, 32, 32, 32)), IMAGES, slice(1, 4)),
        (ResNet(widths=(8,), num_blocks=(4,)), (2, 8, 8, 3), slice(1, 5)),
        (BOTTLENECKS, (2, 28, 28, 1), slice(4, 6)),
        (CONVOLUTIONS, (2, 28, 28, 1), slice(2, 3)),
        (BYTES, (2, 12), slice(1, 4)),
        (dataclasses.replace(BYTES, dropout=0.1), (2, 12), slice(1, 4)),
        (WORDS, (2, 12), slice(1, 4)),
        (LANGUAGES, (2, 12), slice(1, 3)),
        (dataclasses.replace(LANGUAGES, norm="pre"), (2, 12), slice(4, 7)),
        (TURNS, (2, 12), slice(2, 4)),
        (dataclasses.replace(SENTENCES, dropout=0.2), (2, 12), slice(1, 3)),
        (SENTENCES, (2, 12), slice(3, 5)),
    ],
)
def test_equal_layers_are_structurally_equal(model, shape, equal):
    # Each made anew: what is equal must not depend on which objects were shared.
    made = factories(model)[equal] + factories(model)[equal]
    layers = [_abstract.__wrapped__(f.func, f.args) for f in made]
    first, *others = (nnx.graphdef(layer) for layer in layers)
    assert others and all(other == first for other in others)
    # What a pipeline goes by: the same program of the same shapes.
    x, texts = example(model, shape), []
    for i, layer in enumerate(abstract(model)[: equal.stop]):
        graph, state = nnx.split(layer)

        def program(state, x, graph=graph):
            layer = nnx.merge(graph, state)
            return layer(x), nnx.state(layer)

        if i >= equal.start:
            texts.append(str(jax.make_jaxpr(program)(state, x)))
        x = jax.eval_shape(program, state, x)[0]
    assert len(texts) == len(layers) / 2 and len(set(texts)) == 1


@pytest.mark.exhaustive
def test_residual_branches_start_small():
    # ResNet: an identity, up to the ReLU. Transformer: 0.02 / sqrt(2 L).
    x = np.abs(np.random.default_rng(0).normal(size=(2, 14, 14, 8))).astype(np.float32)
    np.testing.assert_array_equal(build(DIGITS)[1](x), x)
    # Bottlenecks: the second block of the first group.
    x = np.concatenate([x, x], axis=-1)
    (y, _) = run(build(BOTTLENECKS)[2:3], x, "train")
    np.testing.assert_array_equal(y, x)
    block = made(Transformer(dim=128, num_blocks=8).layers()[1], jax.random.key(0))
    for name in ("attention_out", "mlp_out"):
        kernel = getattr(block, name).kernel[...]
        assert np.std(kernel) == pytest.approx(0.02 / 4, rel=0.02)


def test_transformer_is_causal():
    layers, x = build(BYTES), example(BYTES, (1, 12))
    changed = x.copy()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    before, after = run(layers, x), run(layers, changed)
    np.testing.assert_allclose(before[:, :7], after[:, :7], rtol=1e-6, atol=1e-6)
    assert not np.allclose(before[:, 7], after[:, 7], rtol=1e-3, atol=1e-6)


def test_decoder_is_causal_and_reads_all_of_the_source():
    layers, x = build(LANGUAGES), example(LANGUAGES, (1, 12))
    before = run(layers, x)
    changed = {name: tokens.copy() for name, tokens in x.items()}
    changed["target"][0, 5] = changed["target"][0, 5] % 49 + 1
    after = run(layers, changed)
    np.testing.assert_allclose(before[:, :5], after[:, :5], rtol=1e-5, atol=1e-5)
    assert np.abs(before - after)[0, 5:].max(-1).min() > 1e-3
    changed = {name: tokens.copy() for name, tokens in x.items()}
    changed["source"][0, 11] = changed["source"][0, 11] % 49 + 1
    after = run(layers, changed)
    assert np.abs(before - after)[0].max(-1).min() > 1e-3


@pytest.mark.exhaustive
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_padding_of_either_language_changes_nothing(norm):
    model = dataclasses.replace(LANGUAGES, norm=norm)
    layers, x = build(model), example(model, (2, 12))
    padded = {name: np.pad(tokens, ((0, 0), (0, 3))) for name, tokens in x.items()}
    np.testing.assert_allclose(run(layers, padded)[:, :9], run(layers, x), rtol=1e-5, atol=1e-5)
    # Wherever it stands, nothing but its own position sees its vector.
    x["source"][0, 4], x["source"][1, 0], x["target"][0, 3] = 0, 0, 0
    changed = [nnx.clone(layers[0]), *layers[1:]]
    vectors = changed[0].token.embedding
    vectors[...] = vectors[...].at[0].add(jnp.arange(16.0))
    before, after = run(layers, x), run(changed, x)
    seen = x["target"] != 0
    np.testing.assert_allclose(before[seen], after[seen], rtol=1e-5, atol=1e-5)
    assert np.abs(before - after)[~seen].max() > 1e-2
    # A row that may look at nothing is still a number: before the target's first word.
    starts_empty = padded | {"target": np.pad(x["target"], ((0, 0), (2, 1)))}
    assert np.isfinite(run(layers, starts_empty)).all()


def test_bert_reads_both_ways_but_no_padding():
    layers, x = build(WORDS), example(WORDS, (2, 12))
    x["mask"][1, 8:] = False
    changed = x | {"tokens": x["tokens"].copy(), "segments": x["segments"].copy()}
    changed["tokens"][1, 8:] = changed["tokens"][1, 8:] % 49 + 1
    changed["segments"][1, 8:] = 1 - changed["segments"][1, 8:]
    before, after = run(layers, x), run(layers, changed)
    np.testing.assert_allclose(before[0], after[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(before[1, :8], after[1, :8], rtol=1e-5, atol=1e-6)
    # The last word that is no padding is seen by all, and its segment.
    for name in ("tokens", "segments"):
        changed = x | {name: x[name].copy()}
        changed[name][1, 7] = 1 - x[name][1, 7] if name == "segments" else x[name][1, 7] % 49 + 1
        difference = np.abs(run(layers, changed) - before).max(-1)
        assert difference[1, :8].min() > 1e-5 and difference[0].max() == 0


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-12)])
def test_attention_equals_a_plain_computation(dtype, tolerance, is_causal):
    with jax.enable_x64(dtype == "float64"):
        check_attention(dtype, tolerance, is_causal)


def check_attention(dtype, tolerance, is_causal):
    dim, num_heads, rng = 6, 3, np.random.default_rng(0)
    attention = Attention(dim, num_heads, use_bias=True, kernel_init=UNIT, rngs=nnx.Rngs(0))
    for linear in (attention.query, attention.key, attention.value, attention.out):
        linear.kernel.set_value(linear.kernel[...].astype(dtype))
        linear.bias.set_value(jnp.asarray(rng.normal(size=dim), dtype))
    x = rng.normal(size=(2, 4, dim)).astype(dtype)
    memory = rng.normal(size=(2, 4 if is_causal else 5, dim)).astype(dtype)
    mask = np.ones(memory.shape[:2], bool)
    mask[0, 2:4] = False
    attend = functools.partial(attention, is_causal=is_causal)
    got = jax.jit(attend, compiler_options=QUICK)(x, memory, mask)

    def projected(linear, x):
        return x @ np.float64(linear.kernel[...]) + np.float64(linear.bias[...])

    attended = np.zeros(x.shape)
    q, k, v = attention.query, attention.key, attention.value
    q, k, v = projected(q, x), projected(k, memory), projected(v, memory)
    for b in range(2):
        for t in range(4):
            for h in range(num_heads):
                of_head = slice(2 * h, 2 * h + 2)
                seen = [m for m in range(memory.shape[1]) if mask[b, m] and (m <= t or not is_causal)]
                scores = k[b, seen, of_head] @ q[b, t, of_head] / np.sqrt(2)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                attended[b, t, of_head] = weights @ v[b, seen, of_head]
    expected = projected(attention.out, attended)
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.fixture
def kernel(monkeypatch):
    """As on a GPU with cuDNN: a kernel that returns the values, and takes what cuDNN takes."""

    def run(query, key, value, scale=None, is_causal=False):
        if query.dtype != jnp.bfloat16:
            raise NotImplementedError(f"Q must be fp16/bf16, got {query.dtype}")
        return value

    monkeypatch.setattr(whole_module, "platform", lambda: "gpu")
    monkeypatch.setattr(whole_module, "_FUSED_ATTENTION", run)


def qkv(dtype=jnp.bfloat16, num_positions=64):
    shape = 3, 1, num_positions, 2, 8
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


def uses_kernel(arrays, **options):
    """Whether `jpipe.attention` returns the values, as the kernel of the fixture does."""
    got = jpipe.attention(*arrays, is_causal=True, **options)
    return np.array_equal(np.float32(got), np.float32(arrays[2]))


def test_gpu_attends_in_a_kernel(kernel):
    assert uses_kernel(qkv())


@pytest.mark.parametrize(
    "arrays",
    [qkv(np.float32), qkv(num_positions=63)],
    ids=["float32", "no whole tile"],
)
def test_kernel_is_left_where_cudnn_has_none(kernel, arrays):
    assert not uses_kernel(arrays)


def test_kernel_is_left_for_a_mask(kernel):
    assert not uses_kernel(qkv(), mask=jnp.ones((1, 1, 64, 64), bool))


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({"model": 2}, (2, 64, 1, 8)),
        ({"fsdp": 2}, (1, 64, 2, 8)),
        ({"stage": 2, "fsdp": 2, "model": 2}, (1, 64, 1, 8)),
        ({"model": 4}, None),  # it splits no two heads
        ({"other": 2}, None),
        ({"context": 2}, None),  # see `jpipe._attention.ring`
    ],
    ids=str,
)
def test_each_device_attends_in_a_kernel(kernel, monkeypatch, sizes, shape):
    """To its rows and heads, on a mesh whose axes split them."""
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), (jax.sharding.AxisType.Auto,) * len(sizes))
    shapes, fused = set(), whole_module._FUSED_ATTENTION

    def noted(query, *args, **options):
        shapes.add(query.shape)
        return fused(query, *args, **options)

    monkeypatch.setattr(whole_module, "_FUSED_ATTENTION", noted)
    arrays = [jax.ShapeDtypeStruct((2, 64, 2, 8), jnp.bfloat16)] * 3
    with constraints_on(mesh, jpipe.AXIS_RULES):
        jax.eval_shape(functools.partial(jpipe.attention, is_causal=True), *arrays)
    shapes.discard((2, 64, 2, 8))  # of the question whether cuDNN has one
    assert shapes == ({shape} if shape else set())


def test_kernel_is_left_where_a_strategy_splits_equations(kernel):
    mesh = jax.make_mesh((1,), ("model",), (jax.sharding.AxisType.Auto,))
    with unannotated_on(mesh):
        assert not uses_kernel(qkv())


def test_graph_of_a_strategy_has_no_kernel(monkeypatch):
    """Also on a machine with GPUs its operators are the equations of `jpipe.attention`."""

    def run(*_, **__):
        raise AssertionError("the kernel is traced")

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(whole_module, "_FUSED_ATTENTION", run)
    model = Transformer(seq_len=64, dim=16, num_heads=2, num_blocks=1)
    loss = Loss.of(lambda outputs, batch: model.loss()(outputs, batch)[0], False)
    tokens = jax.ShapeDtypeStruct((1, 64), np.int32)
    batch = {"inputs": tokens, "labels": tokens}
    layers = as_layers(model.layers())
    with pytest.raises(ValueError, match="the kernel is traced"):
        trace_layers(layers, loss, batch, compute_dtype=jnp.bfloat16)
    assert layers_graph(layers, loss, batch, compute_dtype=jnp.bfloat16).graph


def test_kernel_is_left_without_cudnn(monkeypatch):
    monkeypatch.setattr(whole_module, "platform", lambda: "gpu")
    assert not uses_kernel(qkv())


def test_platform_is_that_of_the_default_device():
    assert whole_module.platform() == "cpu"
    with jax.default_device("gpu"):  # JAX does not look for it before it computes
        assert whole_module.platform() == "gpu"
    with jax.default_device(jax.devices()[1]):
        assert whole_module.platform() == "cpu"


def test_positions_are_the_papers_sines():
    num_positions, dim = 40, 10
    expected = np.zeros((num_positions, dim))
    for pos in range(num_positions):
        for i in range(dim // 2):
            expected[pos, 2 * i] = np.sin(pos / 10000 ** (2 * i / dim))
            expected[pos, 2 * i + 1] = np.cos(pos / 10000 ** (2 * i / dim))
    np.testing.assert_allclose(positions(num_positions, dim), expected, atol=1e-5)


def test_translation_embeds_tokens_and_positions_alike_in_size():
    model = dataclasses.replace(LANGUAGES, dim=256)
    x = example(model, (2, 12))
    layer = model.layers()[0](rngs=nnx.Rngs(0))
    got = run([layer], x)
    vectors = np.asarray(layer.token.embedding[...])
    for name in ("source", "target"):
        waves = positions(x[name].shape[1], 256)[None]
        expected = 16 * vectors[x[name]] + waves
        np.testing.assert_allclose(got[name], expected, rtol=1e-5, atol=1e-5)
        assert got[f"{name}_mask"].all()
    assert np.std(16 * vectors) == pytest.approx(1, rel=0.05)


def test_blocks_norm_after_or_before():
    # After: what leaves a block has mean 0 and deviation 1. Before: it is the stream,
    # and what leaves the encoder is normed by a layer of its own.
    for model, stream, normed in [
        (WORDS, "x", {0, 1, 2, 3}),
        (LANGUAGES, "source", {1, 2, 3, 4, 5}),
        (LANGUAGES, "target", {3, 4, 5}),
        (dataclasses.replace(LANGUAGES, norm="pre"), "source", {3, 4, 5, 6}),
        (dataclasses.replace(LANGUAGES, norm="pre"), "target", set()),
    ]:
        layers, x = build(model), example(model, (2, 12))
        got = set()
        for i, layer in enumerate(layers[:-1]):
            x = run([layer], x)
            if np.allclose(np.std(x[stream], axis=-1), 1, rtol=1e-3, atol=1e-3):
                got.add(i)
        assert got == normed, (model, stream)


@pytest.mark.first_case
@pytest.mark.parametrize(
    "model, shape, draws",
    [
        (CONVOLUTIONS, IMAGES, [0, 0, 0, 0, 1, 1, 0]),
        # The embedding, of each language; every sublayer of a block.
        (dataclasses.replace(BYTES, dropout=0.1), (2, 12), [1, 2, 2, 2, 0]),
        (WORDS, (2, 12), [1, 2, 2, 2, 0]),
        (LANGUAGES, (2, 12), [2, 2, 2, 3, 3, 3, 0]),
    ],
    ids=["VGG", "Transformer", "BERT", "Translation"],
)
def test_dropout_is_of_training_alone(model, shape, draws):
    layers, x = build(model), example(model, shape)
    first, after = run(layers, x, "train")
    again, _ = run(layers, x, "train")
    second, _ = run(after, x, "train")
    np.testing.assert_array_equal(first, again)
    counts = [jax.tree.leaves(nnx.state(layer, nnx.RngCount)) for layer in after]
    assert [sum(map(int, count)) for count in counts] == draws
    assert np.abs(first - second).max() > 1e-4
    # Without it: the same model with the same weights, whose layers hold no dropout.
    without = [
        nnx.merge(nnx.graphdef(layer), nnx.state(weights, nnx.Param))
        for layer, weights in zip(abstract(dataclasses.replace(model, dropout=0.0)), layers, strict=True)
    ]
    np.testing.assert_array_equal(run(layers, x), run(without, x))
    np.testing.assert_array_equal(run(after, x), run(without, x))
    assert np.abs(first - run(layers, x)).max() > 1e-4


def test_rate_of_dropout():
    model = dataclasses.replace(CONVOLUTIONS, hidden_width=400, dropout=0.25)
    hidden = model.layers()[-2](rngs=nnx.Rngs(0))
    hidden.linear.kernel[...] = jnp.eye(400)
    y, _ = run([hidden], jnp.ones((4, 400)), "train")
    np.testing.assert_allclose(np.unique(y), [0, 1 / 0.75], rtol=1e-6)
    assert np.mean(y == 0) == pytest.approx(0.25, abs=0.05)


@pytest.mark.first_case
@pytest.mark.parametrize(
    "model",
    [
        ResNet(num_channels=1, widths=(4,), num_blocks=(1,), norm="batch"),
        pytest.param(BOTTLENECKS, marks=pytest.mark.exhaustive),
        dataclasses.replace(CONVOLUTIONS, batch_norm=True),
    ],
    ids=["ResNet", "Bottlenecks", "VGG"],
)
def test_batch_norm_learns_its_statistics_in_training(model):
    layers, x = build(model), example(model, (4, 12, 12, 1), seed=1)
    layers = layers[:3]  # before an image of VGG is flattened
    y, after = run(layers, x, "train")
    # The first norm: a tenth of the way to what its convolution put out.
    convolved = np.asarray(run([layers[0].conv], x), np.float64)
    mean, var = convolved.mean((0, 1, 2)), convolved.var((0, 1, 2))
    np.testing.assert_allclose(after[0].norm.mean[...], 0.1 * mean, atol=1e-5)
    np.testing.assert_allclose(after[0].norm.var[...], 0.9 + 0.1 * var, rtol=1e-4)
    normed = (convolved - mean) / np.sqrt(var + 1e-5)
    first, _ = run(layers[:1], x, "train")
    if first.shape == normed.shape:
        np.testing.assert_allclose(first, np.maximum(normed, 0), atol=1e-4)
    # All of them move, and what is normed by them is another image.
    pairs = [jax.tree.leaves(nnx.state(i, nnx.BatchStat)) for i in (layers, after)]
    assert all(np.abs(a - b).max() > 0 for a, b in zip(*pairs, strict=True))
    assert not np.allclose(run(after, x), y, rtol=1e-3, atol=1e-3)
    # In eval they stay.
    _, state = apply(after[0], x)
    jax.tree.map(np.testing.assert_array_equal, state, nnx.state(after[0]))


TIED = [
    dataclasses.replace(BYTES, tie_embeddings=True),
    WORDS,
    LANGUAGES,
    dataclasses.replace(LANGUAGES, target_vocab_size=30),
]


@pytest.mark.parametrize("model", TIED)
def test_ties_are_of_the_embedding_and_the_head(model):
    ((owner, head),) = model.ties()
    assert owner[0] == 0 and head == (-1, "embedding")
    first, last = (model.layers()[i](rngs=nnx.Rngs(i + 1)) for i in (0, -1))
    vectors = at([first], *owner)
    assert at([last], *head).shape == vectors.shape
    # Tied, the head scores against the vectors that tokens are read as.
    last.embedding = vectors
    x = np.random.default_rng(0).normal(size=(2, 9, 16)).astype(np.float32)
    x = x if isinstance(model, Transformer) else {"x": x, "target": x}
    logits = run([last], x)
    vectors[...] = vectors[...].at[3].set(0)
    changed = run([last], x)
    np.testing.assert_array_equal(changed[..., 3], 0)
    np.testing.assert_array_equal(changed[..., 4:], logits[..., 4:])
    assert np.abs(logits[..., 3]).min() > 0


def test_what_is_not_tied():
    assert BYTES.ties() == []
    for model in TIED:
        untied = dataclasses.replace(model, tie_embeddings=False)
        assert untied.ties() == []
        (((_, path), _),) = model.ties()
        embedding = at(abstract(model), 0, path)
        assert num_parameters(untied) == num_parameters(model) + embedding.size
    assert BERT(mlm_head=False).ties() == []


def test_one_vocabulary_has_one_embedding():
    # Both languages read it; with two, each has its own.
    shared, separate = LANGUAGES, dataclasses.replace(LANGUAGES, target_vocab_size=50)
    tokens = example(shared, (1, 9))["target"]
    for model, equal in [(shared, True), (separate, False)]:
        layer = model.layers()[0](rngs=nnx.Rngs(0))
        y = run([layer], {"source": tokens, "target": tokens})
        assert np.array_equal(y["source"], y["target"]) == equal


@pytest.mark.exhaustive
def test_unet_gives_every_pixel_its_classes():
    layers, parts = build(PIXELS), PIXELS.parts()
    x = example(PIXELS, (2, 8, 12, 3))
    y = run_with_skips(layers, parts, x)
    assert y.shape == (2, 8, 12, 5)
    # An image alone gives the same.
    np.testing.assert_allclose(run_with_skips(layers, parts, x[1:]), y[1:], rtol=1e-5, atol=1e-6)


def test_unet_is_the_papers():
    # With 64 channels at first and 4 levels below: counted level by level. A pair of
    # convolutions has 9 I O + O + 9 O^2 + O weights, an up-convolution 4 I O + O.
    pair = lambda i, o: 9 * i * o + 9 * o * o + 2 * o  # noqa: E731
    widths = [64, 128, 256, 512, 1024]
    down = pair(1, 64) + sum(pair(w, 2 * w) for w in widths[:-1])
    up = sum(pair(2 * w, w) + 8 * w * w + w for w in widths[:-1])
    model = UNet(width=64, num_levels=4)
    assert num_parameters(model) == down + up + 2 * 64 + 2 == 31_030_658


def test_unet_keeps_the_image_before_it_is_halved():
    down, *_, up, _ = build(PIXELS)
    halved, kept = run([down], example(PIXELS, (1, 8, 8, 3)))
    assert kept.shape == (1, 8, 8, 4)
    np.testing.assert_array_equal(halved, halve(kept))
    # What comes up again is worth as much as what was kept.
    below = example(PIXELS, (1, 4, 4, 8), seed=1)
    both, without_kept, without_below = (
        apply(up, *inputs)[0] for inputs in [(below, kept), (below, 0 * kept), (0 * below, kept)]
    )
    assert both.shape == (1, 8, 8, 4)
    assert np.abs(both - without_kept).max() > 1e-2
    assert np.abs(both - without_below).max() > 1e-2


def test_unet_names_its_skips():
    names = [names for _, names in PIXELS.parts()]
    stashes = [{"stash": "level0"}, {"stash": "level1"}]
    pops = [{"pop": "level1"}, {"pop": "level0"}]
    assert names == [*stashes, {}, *pops, {}]


@pytest.mark.skipif(not hasattr(jpipe, "skip"), reason="needs `jpipe.skip`")
def test_unet_has_its_layers_wrapped():
    assert len(PIXELS.layers()) == len(PIXELS.parts()) == 6


def test_up_convolution_equals_that_of_flax():
    ours = UpConvolution(3, 4, rngs=nnx.Rngs(0))
    ours.bias[...] = jnp.arange(4.0)
    theirs = nnx.ConvTranspose(3, 4, (2, 2), strides=(2, 2), rngs=nnx.Rngs(0))
    # Flax puts the window's first pixel last.
    theirs.kernel[...] = ours.kernel[...][::-1, ::-1]
    theirs.bias[...] = ours.bias[...]
    x = example(PIXELS, (2, 3, 5, 3))
    np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("image", [(4, 6), (5, 7)])
def test_halving_equals_max_pooling_of_flax(image):
    x = example(PIXELS, (2, *image, 3))
    pool = functools.partial(nnx.max_pool, window_shape=(2, 2), strides=(2, 2))
    for f in (lambda pool: pool, lambda pool: jax.grad(lambda x: (pool(x) ** 2).sum())):
        np.testing.assert_allclose(f(halve)(x), f(pool)(x), rtol=1e-6)


@pytest.mark.parametrize(
    "size, stride, use_bias, padding",
    [(n, s, False, "SAME") for n in (1, 2, 3, 5) for s in (1, 2, 3)]
    + [(3, 2, True, "SAME"), (3, 2, False, "VALID"), ((1, 3), 1, False, "SAME")],
)
@pytest.mark.parametrize("image", [(7, 10), (4, 4)])
def test_convolution_equals_that_of_flax(size, stride, use_bias, padding, image):
    ours = Conv(
        3,
        4,
        size,
        stride=stride,
        padding=padding,
        use_bias=use_bias,
        kernel_init=UNIT,
        rngs=nnx.Rngs(0),
    )
    theirs = nnx.Conv(
        3,
        4,
        size if isinstance(size, tuple) else (size, size),
        strides=stride,
        padding=padding,
        use_bias=use_bias,
        rngs=nnx.Rngs(0),
    )
    theirs.kernel[...] = ours.kernel[...]

    def value_and_gradients(layer, x):
        graph, state = nnx.split(layer)

        @functools.partial(jax.jit, compiler_options=QUICK)
        def program(state, x):
            y, vjp = jax.vjp(lambda s, x: nnx.merge(graph, s)(x), state, x)
            gradient = jnp.cos(jnp.arange(y.size, dtype=y.dtype).reshape(y.shape))
            return y, vjp(gradient)

        return jax.tree.leaves(program(state, x))

    x = example(PIXELS, (2, *image, 3))
    got, expected = value_and_gradients(ours, x), value_and_gradients(theirs, x)
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max(), rtol=0)


def test_every_model_can_be_chosen_on_the_command_line():
    classes = typing.get_args(models.Model)
    losses = {"Loss", "CrossEntropy", "Segmentation"}
    assert {c.__name__ for c in classes} == {*models.__all__} - losses - {"Model"}
    config = TrainConfig(model=MLP(), data=MNIST())
    for model in classes:
        fields = {"": model.__name__}
        assert flags.override(config, {"model": fields}).model == model()
    # Text in, values of every kind of field out, and back.
    for words, model in [
        (
            {"": "ResNet", "block": "bottleneck", "norm": "batch", "stem": "imagenet"},
            ResNet(block="bottleneck", norm="batch", stem="imagenet"),
        ),
        (
            {"": "VGG", "batch_norm": "true", "dropout": "0.1"},
            VGG(batch_norm=True, dropout=0.1),
        ),
        (
            {"": "Translation", "target_vocab_size": "9"},
            Translation(target_vocab_size=9),
        ),
        ({"": "BERT", "mlm_head": "false"}, BERT(mlm_head=False)),
    ]:
        changed = flags.override(config, {"model": words})
        assert changed.model == model
        again = dict(word.split("=") for word in flags.to_flags(model, "m"))
        again = {name.removeprefix("m."): text for name, text in again.items()}
        assert flags.override(type(model)(), again) == model
    usage = flags.usage(TrainConfig)
    for model in classes:
        for field in dataclasses.fields(model):
            assert f"--config.model.{field.name}: " in usage


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: MLP(widths=(8, 0)), "`widths` must all be at least 1, got (8, 0)."),
        (lambda: MLP(num_outputs=0), "`num_outputs` must be at least 1, got 0."),
        (lambda: ResNet(widths=(8,)), "one entry for each of `widths`"),
        (lambda: ResNet(widths=(), num_blocks=()), "got () for (). Give both"),
        (lambda: ResNet(widths=(8, 12), num_blocks=(1, 1)), "got 12. Change either."),
        (lambda: ResNet(stem_stride=0), "`stem_stride` must be at least 1, got 0."),
        (lambda: ResNet(norm="layer"), "must be 'group' or 'batch', got 'layer'."),
        (lambda: ResNet(block="wide"), "must be 'basic' or 'bottleneck', got 'wide'."),
        (
            lambda: ResNet(stem="imagenet", stem_stride=2),
            'got 2 with stem="imagenet", whose strides are fixed. Leave it at 1.',
        ),
        (
            lambda: ResNet.of_depth(20),
            "must be 18, 34, 50, 101 or 152, got 20. For another depth,",
        ),
        (lambda: VGG(image_size=28), "must be at least 32, got 28: 5 groups halve it"),
        (lambda: VGG(num_convolutions=(1,)), "one entry for each of `widths`"),
        (lambda: VGG(dropout=1.0), "`dropout` must lie in [0, 1), got 1.0."),
        (lambda: VGG(hidden_width=0), "`hidden_width` must be at least 1, got 0."),
        (
            lambda: shapes(CONVOLUTIONS, example(CONVOLUTIONS, (1, 32, 32, 1))),
            "leave 512 numbers per image, but 392 for `image_size` of the model. Set `image",
        ),
        (lambda: UNet(num_levels=0), "`num_levels` must be at least 1, got 0."),
        (
            lambda: apply(abstract(PIXELS)[0], jnp.zeros((1, 5, 4, 3)), program=_apply.eval_shape),
            "an image of 5x4 cannot be halved. Use images whose sides are multiples of",
        ),
        (lambda: Transformer(dim=10, num_heads=4), "must divide `dim` (10), got 4."),
        (lambda: Transformer(num_blocks=0), "`num_blocks` must be at least 1, got 0."),
        (lambda: Transformer(dropout=-0.1), "`dropout` must lie in [0, 1), got -0.1."),
        (lambda: shapes(BYTES, example(BYTES, (1, 13))), "has 13 positions, but `seq"),
        (lambda: BERT(num_segments=0), "`num_segments` must be at least 1, got 0."),
        (lambda: BERT(num_heads=5), "must divide `dim` (768), got 5."),
        (lambda: shapes(WORDS, example(WORDS, (1, 13))), "13 positions, but `seq"),
        (
            lambda: shapes(WORDS, {"tokens": jnp.ones((1, 4), int)}),
            "must be a dict of tokens, segments, mask, got ['tokens']. Give exactly",
        ),
        (
            lambda: shapes(WORDS, example(WORDS, (1, 4)) | {"mask": np.ones((1, 4), int)}),
            "`mask` must be boolean, False at padding, got int32. Write `tokens !=",
        ),
        (lambda: AlexNet(image_size=56), "must be above 56, got 56: the first convol"),
        (lambda: AlexNet(widths=(1, 2, 3, 4, 0)), "`widths` must all be at least 1"),
        (lambda: Inception(width=5), "`width` must be even, got 5"),
        (lambda: Inception(stem="tiny"), "must be 'imagenet' or 'small', got 'tiny'"),
        (lambda: Inception(num_blocks=(1, 0, 1)), "`num_blocks` must all be at least"),
        (
            lambda: shapes(BRANCHES, jnp.zeros((1, 6, 6, 1))),
            "3x3 does not fit into 2x2 pixels: the images are too small. Use at least 75",
        ),
        (lambda: RecurrentLM(num_layers=0), "`num_layers` must be at least 1, got 0"),
        (lambda: RecurrentClassifier(num_classes=0), "`num_classes` must be at least"),
        (lambda: RecurrentTranslation(dropout=1.0), "`dropout` must lie in [0, 1)"),
        (
            lambda: RecurrentTranslation(target_vocab_size=0),
            "`target_vocab_size` must be at least 1, got 0.",
        ),
        (lambda: Translation(norm="none"), "must be 'post' or 'pre', got 'none'."),
        (lambda: Translation(dim=9, num_heads=3), "`dim` must be even, got 9"),
        (lambda: Translation(dim=9, num_heads=2), "must divide `dim` (9), got 2."),
        (lambda: Translation(target_vocab_size=0), "size` must be at least 1, got 0."),
        (
            lambda: shapes(LANGUAGES, jnp.ones((1, 4), int)),
            "must be a dict of source, target, got an array. Give exactly",
        ),
    ],
)
def test_messages(make, message):
    with pytest.raises(ValueError) as caught:
        make()
    assert message in str(caught.value)
