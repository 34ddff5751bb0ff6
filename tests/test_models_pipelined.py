"""Every model of `models/` trains in a pipeline, and its numbers do not depend on the number of stages."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import slow
from flax import nnx
from helpers import assert_close

import jpipe
from models import BERT, VGG, ResNet, Transformer, Translation, UNet

KEY, B, T = jax.random.key(3), 4, 5


def tokens(rng, *shape):
    return rng.integers(1, 7, shape, dtype=np.int32)


def images(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


MODELS = {
    "resnet50": (
        ResNet(num_channels=1, widths=(4, 8), num_blocks=(1, 1), block="bottleneck", norm="batch", num_classes=3),
        lambda rng: images(rng, B, 8, 8, 1),
    ),
    "vgg": (
        VGG(image_size=8, num_channels=1, widths=(4, 4), num_convolutions=(1, 2), hidden_width=8, num_classes=3, batch_norm=True),
        lambda rng: images(rng, B, 8, 8, 1),
    ),
    "unet": (
        UNet(num_channels=1, width=4, num_levels=2, num_classes=2),
        lambda rng: images(rng, B, 8, 8, 1),
    ),
    "tied transformer": (
        Transformer(vocab_size=7, seq_len=T, dim=8, num_heads=2, num_blocks=1, dropout=0.1, tie_embeddings=True),
        lambda rng: tokens(rng, B, T),
    ),
    "bert": (
        BERT(vocab_size=7, seq_len=T, dim=8, num_heads=2, num_blocks=1),
        lambda rng: {
            "tokens": tokens(rng, B, T),
            "segments": np.zeros((B, T), np.int32),
            "mask": np.arange(T)[None] < np.array([5, 4, 3, 5])[:, None],
        },
    ),
    "translation": (
        Translation(vocab_size=7, dim=8, num_heads=2, mlp_dim=8, num_encoder_blocks=2, num_decoder_blocks=2),
        lambda rng: {"source": tokens(rng, B, T), "target": tokens(rng, B, T - 1)},
    ),
}  # fmt: skip


def loss_fn(outputs, batch):
    del batch
    log_p = jax.nn.log_softmax(outputs.astype(jnp.float32))
    return -log_p[..., 0].mean()


# The U-Net is covered by a test below, dicts and masks between layers by test_losses.py.
SLOW = ("bert", "resnet50", "translation", "unet", "vgg")


@pytest.mark.parametrize(
    "name",
    [slow(name) if name in SLOW else name for name in MODELS],
)
def test_stages_change_nothing(name):
    model, inputs = MODELS[name]
    batch = {"inputs": inputs(np.random.default_rng(0))}
    results = []
    for S in (1, 3):
        pipe = jpipe.Pipeline(
            model.layers(),
            loss=loss_fn,
            optimizer=optax.sgd(0.1),
            schedule=jpipe.schedules.one_f_one_b(S, 2),
            ties=model.ties() if hasattr(model, "ties") else (),
        )
        state = pipe.init(KEY, batch)
        start = pipe.get_params(state)
        state, metrics = pipe.step(state, batch)
        moved = jax.tree.map(np.subtract, pipe.get_params(state), start)
        largest = max(np.abs(a).max() for a in jax.tree.leaves(moved))
        results.append((metrics["loss"], moved, pipe.get_mutable_state(state)))
        assert np.isfinite(metrics["loss"]) and largest > 0
    (loss, moved, running), (other_loss, other_moved, other_running) = results
    np.testing.assert_allclose(other_loss, loss, rtol=1e-5)
    # Weights minus weights: to the precision of the largest movement, not of each leaf's.
    for a, b in zip(jax.tree.leaves(other_moved), jax.tree.leaves(moved), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * largest + 1e-7)
    assert_close(other_running, running, "float32")


def test_unet_equals_the_program_written_out():
    model = MODELS["unet"][0]
    batch = {"inputs": MODELS["unet"][1](np.random.default_rng(1))}
    pipe = jpipe.Pipeline(
        model.layers(),
        loss=loss_fn,
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.one_f_one_b(3, 2),
    )
    state = pipe.init(KEY, batch)
    params = pipe.get_params(state)

    def plain(params):
        x, kept = batch["inputs"], {}
        for i, (factory, way) in enumerate(model.parts()):
            module = factory(rngs=nnx.Rngs(0))
            graph, values = nnx.split(module)
            nnx.replace_by_pure_dict(values, params[i])
            module = nnx.merge(graph, values)
            if "pop" in way:
                x = module(x, kept.pop(way["pop"]))
            elif "stash" in way:
                x, kept[way["stash"]] = module(x)
            else:
                x = module(x)
        return loss_fn(x, batch)

    value, grads = jax.jit(jax.value_and_grad(plain))(params)
    state, metrics = pipe.step(state, batch)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    want = jax.tree.map(lambda p, g: np.asarray(p - 0.1 * g), params, grads)
    assert_close(pipe.get_params(state), want, "float32")
