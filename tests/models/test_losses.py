"""The losses of the models, against plain computations in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest

import jpipe
from models import BERT, MLP, CrossEntropy, Segmentation, Translation, UNet
from models.losses import mean_over_labels
from train.train import evaluate

KEY = jax.random.key(0)


def example(shape, num_classes, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(*shape, num_classes)).astype(np.float32)
    return logits, rng.integers(num_classes, size=shape).astype(np.int32)


def plain_losses(logits, labels):
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return -np.take_along_axis(log_p, labels[..., None], -1)[..., 0]


@pytest.mark.parametrize("shape", [(6,), (3, 4), (2, 3, 5)])
def test_without_weights_it_is_the_mean(shape):
    logits, labels = example(shape, 7)
    loss, averages = CrossEntropy()(logits, {"labels": labels})
    np.testing.assert_allclose(loss, plain_losses(logits, labels).mean(), rtol=1e-5)
    hits = (logits.argmax(-1) == labels).mean()
    np.testing.assert_allclose(averages["accuracy"], hits, rtol=1e-6)
    assert CrossEntropy().metrics(averages) == {"accuracy": pytest.approx(hits)}


@pytest.mark.first_case
@pytest.mark.parametrize("loss", [CrossEntropy(), Segmentation()])
def test_with_weights_it_is_a_sum_and_the_number_of_labels_that_count(loss):
    logits, labels = example((3, 4), 7)
    weights = np.array([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]], np.float32)
    batch = {"labels": labels, "weights": weights}
    (total, weight), sums = loss(logits, batch)
    counted = weights == 1
    expected = plain_losses(logits, labels)[counted]
    np.testing.assert_allclose(weight, 8)
    np.testing.assert_allclose(total / weight, expected.mean(), rtol=1e-5)
    # The same as for the labels that count by themselves, and cut anywhere.
    _, alone = loss(logits[counted], {"labels": labels[counted]})
    parts = [loss(logits[k : k + 1], {name: a[k : k + 1] for name, a in batch.items()}) for k in range(3)]
    (part_total, part_weight), part_sums = jax.tree.map(lambda *a: sum(a), *parts)
    np.testing.assert_allclose(part_total / part_weight, expected.mean(), rtol=1e-5)
    for name, mean in alone.items():
        np.testing.assert_allclose(sums[name] / weight, mean, rtol=1e-5)
        np.testing.assert_allclose(part_sums[name] / part_weight, mean, rtol=1e-5)


def test_what_does_not_count_has_no_gradient():
    logits, labels = example((2, 3), 5)
    weights = np.array([[1, 0, 1], [0, 1, 0]], np.float32)

    def mean(logits):
        (total, weight), _ = CrossEntropy()(logits, {"labels": labels, "weights": weights})
        return total / weight

    gradient = np.abs(jax.grad(mean)(jnp.asarray(logits))).sum(axis=-1)
    np.testing.assert_array_equal(gradient > 0, weights == 1)


def test_low_precision_outputs_are_averaged_in_float32():
    logits, labels = example((64,), 5)
    loss, averages = CrossEntropy()(logits.astype(jnp.bfloat16), {"labels": labels})
    assert loss.dtype == averages["accuracy"].dtype == jnp.float32


def test_values_of_labels_may_have_axes_of_their_own():
    values = {"a": jnp.arange(24.0).reshape(2, 3, 4)}
    weights = jnp.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    _, means = mean_over_labels(jnp.ones((2, 3)), values, None)
    np.testing.assert_allclose(means["a"], [10, 11, 12, 13])
    (total, weight), sums = mean_over_labels(jnp.ones((2, 3)), values, weights)
    np.testing.assert_allclose([total, weight], [2, 2])
    np.testing.assert_allclose(sums["a"], [20, 22, 24, 26])


def test_intersection_over_union_is_the_mean_of_the_classes_that_occur():
    labels = np.array([[0, 0, 1, 1, 3, 3]])
    predicted = np.array([[0, 1, 1, 1, 3, 0]])
    logits = jax.nn.one_hot(predicted, 5)
    _, averages = Segmentation()(logits, {"labels": labels})
    metrics = Segmentation().metrics(jax.device_get(averages))
    # Class 0: 1 of 3 pixels; 1: 2 of 3; 3: 1 of 2; 2 and 4 do not occur.
    assert metrics == {
        "accuracy": pytest.approx(4 / 6),
        "intersection_over_union": pytest.approx((1 / 3 + 2 / 3 + 1 / 2) / 3),
    }


def test_every_model_chooses_its_loss():
    assert MLP().loss() == Translation().loss() == BERT().loss() == CrossEntropy()
    assert UNet().loss() == Segmentation()
    with pytest.raises(ValueError, match="`mlm_head` must be true for training"):
        BERT(mlm_head=False).loss()


@pytest.mark.parametrize(
    "batch, message",
    [
        (
            {"labels": np.zeros(2, int)},
            r"`labels` must have the shape \(2, 3\), got \(2",
        ),
        (
            {"labels": np.zeros((2, 3), int), "weights": np.ones((2, 1))},
            r"`weights` must have the shape \(2, 3\), got \(2, 1\). Train this model on",
        ),
    ],
)
def test_labels_of_another_shape_are_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        CrossEntropy()(np.zeros((2, 3, 4), np.float32), batch)


@pytest.mark.exhaustive
def test_a_padded_batch_trains_the_masked_mean_in_a_pipeline():
    """Microbatches hold 1 to 5 labels that count; their plain mean would be another loss."""
    model = Translation(
        vocab_size=9,
        dim=8,
        num_heads=2,
        mlp_dim=8,
        num_encoder_blocks=1,
        num_decoder_blocks=1,
        dropout=0.0,
        tie_embeddings=False,  # the plain model has no ties
    )
    rng = np.random.default_rng(0)
    B, T = 8, 5
    counted = np.arange(T)[None] < rng.integers(1, T + 1, (B, 1))
    labels = np.where(counted, rng.integers(1, 9, (B, T)), 0).astype(np.int32)
    batch = {
        "inputs": {
            "source": rng.integers(1, 9, (B, T)).astype(np.int32),
            "target": np.where(counted, rng.integers(1, 9, (B, T)), 0).astype(np.int32),
        },
        "labels": labels,
        "weights": counted.astype(np.float32),
    }
    pipe = jpipe.Pipeline(
        model.layers(),
        loss=model.loss(),
        optimizer=optax.sgd(1.0),
        schedule=jpipe.schedules.one_f_one_b(3, 4),
        has_aux=True,
    )
    state = pipe.init(KEY, batch)
    outputs = np.asarray(pipe.predict(state, batch))
    expected = plain_losses(outputs, labels)[counted].mean()
    hits = (outputs.argmax(-1) == labels)[counted].mean()

    class Whole:
        """The batch as a data set of its own, in parts of different weights."""

        def __len__(self):
            return B

        def batch(self, indices, rng):
            return jax.tree.map(lambda a: a[indices], batch)

    result = evaluate(pipe, state, Whole(), 3)
    assert result["loss"] == pytest.approx(expected, rel=1e-5)
    assert result["accuracy"] == pytest.approx(hits)
    state, metrics = pipe.step(state, batch)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["aux"]["accuracy"], hits, rtol=1e-5)
    # Its gradient too: the weights move as those of the plain model.
    plain = oracles.PlainModel(model.layers(), KEY)

    def masked_mean(outputs, batch):
        (total, weight), _ = model.loss()(outputs, batch)
        return total / weight

    (loss,), _, params = oracles.train(plain, plain.params, masked_mean, optax.sgd(1.0), [batch])
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, (pipe.get_params(state), params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
