"""Losses that models are trained with, and the metrics of an evaluation.

A model's method `loss()` returns one of the classes here. The object is called as
`loss(outputs, batch)`, in the form that `jpipe.Pipeline(..., has_aux=True)` takes. The
batch has these entries:

    labels   [B, ...] integers: the class of an image, a pixel or a token
    weights  [B, ...] optional: 1 for a label that counts, 0 for padding

Without `weights` all labels count alike and the loss is their plain mean. With them the
loss is a mean over the labels that count. Microbatches then hold different numbers of
such labels, so the loss returns the sum and the number, and the pipeline divides once
per minibatch: the mean of the microbatches' means would be another objective.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jpipe import vocabulary

# The loss as a mean, or as (sum, weight), the parts of a mean.
Mean = jax.Array | tuple[jax.Array, jax.Array]


class Loss(Protocol):
    """The loss that a model minimises, and the report of an evaluation."""

    def __call__(self, outputs: Any, batch: Mapping[str, Any]) -> tuple[Mean, dict[str, jax.Array]]:
        """The loss of a microbatch in nats, and values to average beside it.

        Args:
          outputs: the outputs of the last layer for the microbatch.
          batch: all entries of the microbatch.

        Returns:
          The loss as `mean_over_labels` returns it, and a dict of averages, which are
          divided like the loss.
        """
        ...

    def metrics(self, averages: Mapping[str, Any]) -> dict[str, float]:
        """The metrics of an evaluation, each a fraction from 0 to 1.

        Args:
          averages: the second result of `__call__`, averaged over the data set.
        """
        ...

    def statistics(self, averages: Mapping[str, Any]) -> dict[str, float]:
        """What layers report in a step of training, for its log.

        Args:
          averages: the second result of `__call__`, averaged over the minibatch.
        """
        ...


def mean_over_labels(
    losses: jax.Array,
    values: Mapping[str, jax.Array],
    weights: jax.Array | None,
) -> tuple[Mean, dict[str, jax.Array]]:
    """Averages over labels, in the form that `jpipe.Pipeline` takes with `has_aux`.

    This is the one place that knows the two forms of a mean.

    Args:
      losses: the loss of each label, `[B, ...]`.
      values: further values of each label, `[B, ...]` or `[B, ..., K]`.
      weights: the weight of each label, `[B, ...]`; None counts all alike.

    Returns:
      `(mean, means)` without weights, `((sum, weight), sums)` with them.
    """
    values = {name: value.astype(jnp.float32) for name, value in values.items()}
    num_axes = losses.ndim
    if weights is None:
        axes = tuple(range(num_axes))
        return losses.mean(), {n: value.mean(axis=axes) for n, value in values.items()}
    weights = weights.astype(losses.dtype)
    sums = {n: jnp.tensordot(weights, value, num_axes) for n, value in values.items()}
    return (jnp.sum(weights * losses), weights.sum()), sums


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """Softmax cross-entropy with integer labels; reports the accuracy.

    Logits are `[B, ..., K]`, labels `[B, ...]`, of whatever the model classifies.

    Raises:
      ValueError: if labels or weights do not have the shape of the logits without K.
    """

    def __call__(self, outputs: jax.Array, batch: Mapping[str, Any]) -> tuple[Mean, dict[str, jax.Array]]:
        logits, labels = outputs.astype(jnp.float32), batch["labels"]
        weights = batch.get("weights")
        for name, array in (("labels", labels), ("weights", weights)):
            if array is not None and array.shape != logits.shape[:-1]:
                raise ValueError(
                    f"the model returns logits of shape {logits.shape}, so `{name}` must "
                    f"have the shape {logits.shape[:-1]}, got {array.shape}. Train this "
                    "model on a data set that labels what the model classifies."
                )
        losses = vocabulary.cross_entropy(logits, labels)
        return mean_over_labels(losses, self._values(logits, labels), weights)

    def _values(self, logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        """Values of each label that `metrics` needs the averages of."""
        return {"accuracy": vocabulary.argmax(logits) == labels}

    def metrics(self, averages: Mapping[str, Any]) -> dict[str, float]:
        return {"accuracy": float(averages["accuracy"])}

    def statistics(self, averages: Mapping[str, Any]) -> dict[str, float]:
        return {}


@dataclasses.dataclass(frozen=True)
class Segmentation(CrossEntropy):
    """Cross-entropy of pixels; also reports the mean intersection over union.

    Most pixels are background, so a model that finds nothing else has a high accuracy.
    The intersection over union of a class divides the pixels where prediction and label
    agree on it by the pixels where either names it. The mean is over the classes that
    occur.
    """

    def _values(self, logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        num_classes = logits.shape[-1]
        predicted = jax.nn.one_hot(logits.argmax(axis=-1), num_classes)
        actual = jax.nn.one_hot(labels, num_classes)
        return super()._values(logits, labels) | {
            "intersection": predicted * actual,
            "union": jnp.maximum(predicted, actual),
        }

    def metrics(self, averages: Mapping[str, Any]) -> dict[str, float]:
        pairs = zip(averages["intersection"], averages["union"], strict=True)
        ratios = [float(both / either) for both, either in pairs if either > 0]
        mean = sum(ratios) / len(ratios)
        return super().metrics(averages) | {"intersection_over_union": mean}


@dataclasses.dataclass(frozen=True)
class NextWords:
    """The mean of the losses that a model returns itself: `[B, T]` in nats, of the labels that are not negative.

    The logits of all positions are then never there at once, so there is no accuracy.

    Raises:
      ValueError: if there is not one loss for each label.
    """

    def __call__(self, outputs: jax.Array, batch: Mapping[str, Any]) -> tuple[Mean, dict[str, jax.Array]]:
        labels = batch.get("labels")
        if labels is None or outputs.shape != labels.shape:
            raise ValueError(
                f"the model must return a loss for each label, got outputs of shape {outputs.shape} and "
                f"{'no labels' if labels is None else f'labels of shape {labels.shape}'}. It does so for rows of "
                "tokens with a label each: train it on Text or Instructions."
            )
        return mean_over_labels(outputs, {}, labels >= 0)

    def metrics(self, averages: Mapping[str, Any]) -> dict[str, float]:
        return {}

    def statistics(self, averages: Mapping[str, Any]) -> dict[str, float]:
        return {}
