"""The models: shapes, sizes, initial scales, and a convolution equal to Flax's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import MLP, ResNet, Transformer
from models.convolution import Conv

IMAGES = (2, 28, 28, 1)
DIGITS = ResNet(num_channels=1, widths=(8, 16), num_blocks=(1, 2), stem_stride=2)
BYTES = Transformer(seq_len=12, dim=16, num_heads=2, num_blocks=3)
MODELS = [(MLP(widths=(32, 32)), IMAGES), (DIGITS, IMAGES), (BYTES, (2, 12))]
IDS = ["MLP", "ResNet", "Transformer"]


@functools.cache
def build(model, seed=0):
    """The layers, made as one program: faster than one operation after the other."""

    def states(key):
        keys = jax.random.split(key, len(model.layers()))
        pairs = zip(model.layers(), keys, strict=True)
        return [nnx.state(factory(rngs=nnx.Rngs(key))) for factory, key in pairs]

    graphs = map(nnx.graphdef, abstract(model))
    return list(map(nnx.merge, graphs, jax.jit(states)(jax.random.key(seed))))


def abstract(model):
    """The layers without numbers."""
    return [
        nnx.eval_shape(lambda factory=factory: factory(rngs=nnx.Rngs(0)))
        for factory in model.layers()
    ]


def run(layers, x):
    graphs, states = zip(*map(nnx.split, layers), strict=True)
    return _run(graphs, states, x)


@functools.partial(jax.jit, static_argnums=0)
def _run(graphs, states, x):
    for graph, state in zip(graphs, states, strict=True):
        x = nnx.merge(graph, state)(x)
    return x


def example(shape, seed=0):
    rng = np.random.default_rng(seed)
    if len(shape) == 2:
        return rng.integers(0, 256, shape).astype(np.int32)
    return rng.normal(size=shape).astype(np.float32)


def num_parameters(layers):
    return sum(a.size for layer in layers for a in jax.tree.leaves(nnx.state(layer)))


@pytest.mark.parametrize(
    "model, shape, num_layers, size, outputs",
    [
        (MLP(), IMAGES, 8, 598_282, (2, 10)),
        (MLP(num_inputs=6, widths=(), num_outputs=3), (2, 2, 3), 1, 21, (2, 3)),
        # As counted for ResNet-18 with the CIFAR stem elsewhere.
        (ResNet(), (1, 32, 32, 3), 10, 11_173_962, (1, 10)),
        (DIGITS, IMAGES, 5, 9_794, (2, 10)),
        # 12 D^2 + 13 D a block, (V + T) D embedding, V D + 2 D head.
        (Transformer(), (1, 128), 10, 1_668_352, (1, 128, 256)),
        (BYTES, (2, 12), 5, 3 * (12 * 16**2 + 13 * 16) + 524 * 16 + 32, (2, 12, 256)),
    ],
)
def test_sizes_and_shapes(model, shape, num_layers, size, outputs):
    layers = abstract(model)
    assert len(layers) == num_layers
    assert num_parameters(layers) == size
    graphs, states = zip(*map(nnx.split, layers), strict=True)
    result = jax.eval_shape(functools.partial(_run, graphs), states, example(shape))
    assert result.shape == outputs


@pytest.mark.parametrize("model, shape", MODELS, ids=IDS)
def test_first_loss_is_that_of_a_guess(model, shape):
    logits = run(build(model), example((64, *shape[1:])))
    labels = jnp.zeros(logits.shape[:-1], jnp.int32)
    log_probs = jax.nn.log_softmax(logits)
    loss = -jnp.take_along_axis(log_probs, labels[..., None], -1).mean()
    assert abs(float(loss) - np.log(logits.shape[-1])) < 0.5


@pytest.mark.parametrize("model, shape", MODELS, ids=IDS)
def test_examples_do_not_touch_each_other(model, shape):
    # What lets a minibatch be cut into microbatches anywhere.
    layers, x = build(model), example((4, *shape[1:]))
    whole = run(layers, x)
    parts = jnp.concatenate([run(layers, x[:1]), run(layers, x[1:])])
    np.testing.assert_allclose(whole, parts, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model, shape", MODELS, ids=IDS)
def test_state_is_float32_parameters_alone(model, shape):
    for layer in abstract(model):
        for _, variable in nnx.to_flat_state(nnx.state(layer)):
            assert type(variable) is nnx.Param
            assert [a.dtype for a in jax.tree.leaves(variable)] == [jnp.float32]


@pytest.mark.parametrize(
    "model, equal",
    [
        (MLP(widths=(32, 32, 32, 32)), slice(1, 4)),
        (ResNet(widths=(8,), num_blocks=(4,)), slice(1, 5)),
        (BYTES, slice(1, 4)),
    ],
    ids=IDS,
)
def test_equal_layers_are_structurally_equal(model, equal):
    # Made by two calls: what is equal must not depend on which objects were shared.
    layers = abstract(model)[equal] + abstract(model)[equal]
    first, *others = (nnx.graphdef(layer) for layer in layers)
    assert all(other == first for other in others)
    assert len(layers) >= 6


def test_residual_branches_start_small():
    # ResNet: an identity, up to the ReLU. Transformer: 0.02 / sqrt(2 L).
    x = np.abs(example((2, 14, 14, 8)))
    np.testing.assert_array_equal(build(DIGITS)[1](x), x)
    blocks = build(Transformer(dim=64, num_blocks=8))[1:-1]
    for name in ("attention_out", "mlp_out"):
        kernels = [getattr(block, name).kernel[...] for block in blocks]
        assert np.std(kernels) == pytest.approx(0.02 / 4, rel=0.02)


def test_transformer_is_causal():
    layers, x = build(BYTES), example((1, 12))
    changed = x.copy()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    before, after = run(layers, x), run(layers, changed)
    np.testing.assert_allclose(before[:, :7], after[:, :7], rtol=1e-6, atol=1e-6)
    assert not np.allclose(before[:, 7], after[:, 7], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("image", [(7, 10), (4, 4)])
def test_convolution_equals_that_of_flax(size, stride, image):
    init = nnx.initializers.normal(1.0)
    ours = Conv(3, 4, size, stride=stride, kernel_init=init, rngs=nnx.Rngs(0))
    theirs = nnx.Conv(
        3, 4, (size, size), strides=stride, use_bias=False, rngs=nnx.Rngs(0)
    )
    theirs.kernel[...] = ours.kernel[...]

    def value_and_gradients(layer, x):
        graph, state = nnx.split(layer)
        y, vjp = jax.vjp(lambda s, x: nnx.merge(graph, s)(x), state, x)
        gradients = vjp(jnp.cos(jnp.arange(y.size, dtype=y.dtype).reshape(y.shape)))
        return jax.tree.leaves((y, gradients))

    x = example((2, *image, 3))
    got, expected = value_and_gradients(ours, x), value_and_gradients(theirs, x)
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max(), rtol=0)


def test_convolution_gradients_need_no_permuted_dimensions():
    # XLA:CPU runs those on a slow path inside `scan` and `cond`.
    init = nnx.initializers.normal(1.0)
    graph, state = nnx.split(
        Conv(3, 4, 3, stride=2, kernel_init=init, rngs=nnx.Rngs(0))
    )
    gradient = jax.jit(
        jax.grad(lambda s, x: nnx.merge(graph, s)(x).sum(), argnums=(0, 1))
    )
    text = gradient.lower(state, example((2, 8, 8, 3))).as_text()
    convolutions = [line for line in text.splitlines() if ".convolution(" in line]
    assert len(convolutions) >= 2
    assert all("[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]" in c for c in convolutions)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: MLP(widths=(8, 0)), "`widths` must all be at least 1, got (8, 0)."),
        (lambda: MLP(num_outputs=0), "`num_outputs` must be at least 1, got 0."),
        (lambda: ResNet(widths=(8,)), "one entry for each of `widths`"),
        (lambda: ResNet(widths=(8, 12), num_blocks=(1, 1)), "got 12. Change either."),
        (lambda: ResNet(stem_stride=0), "`stem_stride` must be at least 1, got 0."),
        (lambda: Transformer(dim=10, num_heads=4), "must divide `dim` (10), got 4."),
        (lambda: Transformer(num_blocks=0), "`num_blocks` must be at least 1, got 0."),
        (lambda: run(build(BYTES), example((1, 13))), "13 positions, but `seq_len`"),
    ],
)
def test_messages(make, message):
    with pytest.raises(ValueError) as caught:
        make()
    assert message in str(caught.value)
