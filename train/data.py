"""Examples in memory, and batches of them in an order that depends only on the seed.

Only numpy. A data set is a frozen dataclass of options with a method `load()` that
returns a `Dataset`; see `train/mnist.py`, `train/text.py` and `train/pairs.py`. A batch
is a dict of arrays with a leading batch axis:

    inputs   the input of the model's first layer: an array, or a dict of arrays
    labels   integers that the loss compares the outputs with; a negative one does not count
    weights  optional, of the labels' shape: 1 for a label that counts, 0 for padding

Of a whole model each argument may have its entry instead of `inputs`, see `train/instructions.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

Batch = dict[str, Any]


class Examples(Protocol):
    """Numbered examples that can be gathered into a batch."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray, rng: np.random.Generator | None) -> Batch:
        """A batch of some examples.

        Args:
          indices: the numbers of the examples.
          rng: draws the variation of training examples; None: no variation.
        """
        ...


class Dataset(NamedTuple):
    """The result of `load()`.

    Attributes:
      train: the examples to train on.
      test: the held-out examples.
      source: a description of the data for the head of a run.
      unit: the thing that one label stands for, in the plural: "images", "tokens".
      bytes_per_label: number of bytes of a text that one label stands for; None if the
        data are no text.
      num_tokens: one more than the largest token; None if a data set cannot have others than its model.
    """

    train: Examples
    test: Examples
    source: str
    unit: str
    bytes_per_label: float | None = None
    num_tokens: int | None = None


Part = TypeVar("Part", bound=Sequence | np.ndarray)


def check_test_fraction(fraction: float) -> None:
    """Refuses a fraction that leaves nothing to train on, or nothing to hold out."""
    if not 0 < fraction < 1:
        raise ValueError(f"`test_fraction` must lie between 0 and 1, got {fraction}.")


def held_out(examples: Part, fraction: float) -> tuple[Part, Part]:
    """The examples without the last ones, and these: a fraction of all, rounded down.

    Example:
      >>> held_out(b"abcdefgh", 0.3)
      (b'abcdef', b'gh')
    """
    start = len(examples) - int(len(examples) * fraction)
    return examples[:start], examples[start:]


def shuffled(
    examples: Examples | Any, batch_size: int, seed: int, first: int = 0, position: Any = None
) -> Iterator[Batch]:
    """Yields batches without end, with every example at most once per epoch.

    Examples without numbers, such as `train.streamed.Streamed`, have an order of their own, and go on from the position
    that `position_of` returns. The order of numbered ones depends on the seed and the epoch. The variation of the
    examples depends on the seed, the epoch and the place of the batch in the epoch. So batch number k is always the
    same. An epoch leaves out `len(examples) % batch_size` examples, other ones each time.

    Args:
      examples: the examples to draw from.
      batch_size: number of examples per batch.
      seed: at least 0.
      first: the number of the first batch, for a run that is continued.
      position: the position of a run that is continued, of examples without numbers.

    Yields:
      Batches of `batch_size` examples.

    Raises:
      ValueError: if there are fewer examples than one batch needs, or the position is missing.
    """
    if not hasattr(examples, "batches"):
        return _numbered(examples, batch_size, seed, first)
    if first and position is None:
        raise ValueError(
            "the checkpoint does not say how far its run had read the data, which are a stream without numbers. Start "
            "a new run, or go on with the data set of the run."
        )
    return examples.batches(batch_size, position)


def position_of(batches: Iterator[Batch]) -> Any:
    """The position from which the batch that was drawn last comes again; None: its number says it."""
    return batches.position() if hasattr(batches, "position") else None


def steps_per_epoch(examples: Examples | Any, batch_size: int) -> int | None:
    """The batches in which every example is read once; None: of a stream nobody knows."""
    return None if hasattr(examples, "batches") else len(examples) // batch_size


def _numbered(examples: Examples, batch_size: int, seed: int, first: int) -> Iterator[Batch]:
    """The batches of numbered examples."""
    per_epoch = len(examples) // batch_size
    if per_epoch == 0:
        raise ValueError(
            f"`batch_size` must be at most the number of training examples, got "
            f"{batch_size} for {len(examples)} examples. Use a `batch_size` of at most "
            f"{len(examples)}."
        )
    epoch, place = divmod(first, per_epoch)
    while True:
        order = np.random.default_rng((seed, epoch, 0)).permutation(len(examples))
        for k in range(place, per_epoch):
            indices = order[k * batch_size : (k + 1) * batch_size]
            yield examples.batch(indices, np.random.default_rng((seed, epoch, k + 1)))
        epoch, place = epoch + 1, 0


def in_order(examples: Examples, batch_size: int) -> Iterator[Batch]:
    """Yields every example once, without variation; the last batch may be smaller."""
    for start in range(0, len(examples), batch_size):
        stop = min(start + batch_size, len(examples))
        yield examples.batch(np.arange(start, stop), None)


def shares(batches: Iterable[Batch], rows_of: Callable[[int], np.ndarray]) -> Iterator[Batch]:
    """Yields the rows of each batch that one of several processes gives.

    Every process draws the same batches, so the rows of all processes together are the batch
    of a run in one process, with the same variation.

    Args:
      batches: the batches of all processes, as `shuffled` and `in_order` yield them.
      rows_of: the numbers of this process's rows for a number of rows, such as
        `functools.partial(jpipe.distributed.process_rows, mesh)`.
    """

    def take(part: Any, rows: np.ndarray) -> Any:
        if isinstance(part, dict):
            return {name: take(inner, rows) for name, inner in part.items()}
        return part[rows]

    def size(part: Any) -> int:
        return size(next(iter(part.values()))) if isinstance(part, dict) else len(part)

    for batch in batches:
        yield take(batch, rows_of(size(batch)))


def num_labels(batch: Batch) -> int:
    """The number of labels that count: those with weight 1, or without weights those that are not negative."""
    weights = batch.get("weights")
    return int(np.sum(batch["labels"] >= 0 if weights is None else weights))
