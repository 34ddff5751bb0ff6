"""Examples in memory, and batches of them in an order that depends on the seed alone.

Only numpy. A data set is a frozen dataclass of options with a method `load()` that
returns a `Dataset`; see `train/mnist.py` and `train/text.py`. A batch is a dict of
arrays with a leading batch axis: "inputs" feeds the model's first layer, "labels" the
loss.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

Batch = dict[str, np.ndarray]


class Examples(Protocol):
    """Numbered examples that can be gathered into a batch."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray, rng: np.random.Generator | None) -> Batch:
        """The examples numbered `indices`, varied by `rng`; None: as they are."""
        ...


class Dataset(NamedTuple):
    """What `load()` returns.

    Attributes:
      train: the examples to learn from; test: those held out.
      source: where they come from, in words.
      unit: what one label stands for, in the plural: "images", "tokens".
      bytes_per_label: of a text, how many bytes of it a label stands for; None: no text.
    """

    train: Examples
    test: Examples
    source: str
    unit: str
    bytes_per_label: float | None = None


def shuffled(
    examples: Examples, batch_size: int, seed: int, first: int = 0
) -> Iterator[Batch]:
    """Batches without end, every example at most once an epoch.

    The order depends on the seed and the epoch, the variation on the seed, the epoch and
    the place in it, so batch number k is the same however one gets there. The
    `len(examples) % batch_size` examples that are left over differ from epoch to epoch.

    Args:
      examples: what to draw from.
      batch_size: examples to a batch.
      seed: at least 0.
      first: the number of the first batch, for a run that goes on.

    Yields:
      Batches of `batch_size` examples.

    Raises:
      ValueError: if there are fewer examples than one batch needs.
    """
    per_epoch = len(examples) // batch_size
    if per_epoch == 0:
        raise ValueError(
            f"a batch of {batch_size} needs as many examples, got {len(examples)} to "
            f"train on. Use a `batch_size` of at most {len(examples)}."
        )
    epoch, place = divmod(first, per_epoch)
    while True:
        order = np.random.default_rng((seed, epoch, 0)).permutation(len(examples))
        for k in range(place, per_epoch):
            indices = order[k * batch_size : (k + 1) * batch_size]
            yield examples.batch(indices, np.random.default_rng((seed, epoch, k + 1)))
        epoch, place = epoch + 1, 0


def in_order(examples: Examples, batch_size: int) -> Iterator[Batch]:
    """Every example once, as it is; the last batch may be smaller than the others."""
    for start in range(0, len(examples), batch_size):
        stop = min(start + batch_size, len(examples))
        yield examples.batch(np.arange(start, stop), None)
