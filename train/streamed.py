"""A loader of the package Grain, by its import path. Its state goes into the checkpoints of a run."""

import dataclasses
import importlib.util
from typing import Any

from models.whole import imported, is_import_path
from train.data import Batch, Dataset
from train.imported import Numbered


@dataclasses.dataclass(frozen=True)
class Grain:
    """Examples that a data set of Grain streams."""

    module: str | None = None
    """`package.module:name` of a function without arguments that returns a `grain.MapDataset` or `grain.IterDataset` of
    training examples, each a dict of arrays: read, shuffled and repeated without end, not in batches. Required.
    Python must find the package: set `PYTHONPATH`."""
    test: str | None = None
    """`package.module:name` of a function that returns the held-out examples: a `grain.MapDataset` that ends, or a
    list. Required."""

    def load(self) -> Dataset:
        """Imports both functions and calls them.

        Raises:
          ValueError: if Grain is not installed, there is no such function, or it returns something else.
        """
        if importlib.util.find_spec("grain") is None:
            raise ValueError("`data=Grain` needs the package grain, which is not installed: pip install grain.")
        for name in ("module", "test"):
            if not is_import_path(getattr(self, name) or ""):
                raise ValueError(f"`data.{name}` must be package.module:name, got {getattr(self, name)!r}.")
        stream, test = (imported(str(getattr(self, n)), f"data.{n}")() for n in ("module", "test"))
        if not hasattr(stream, "batch"):
            raise ValueError(
                f"`{self.module}` must return a grain.MapDataset or a grain.IterDataset of single examples, got "
                f"{type(stream).__name__}."
            )
        if not (hasattr(test, "__len__") and hasattr(test, "__getitem__") and 0 < len(test) < _ENDLESS):
            raise ValueError(
                f"`{self.test}` must return held-out examples with a length: a grain.MapDataset without `repeat`, or "
                f"a list, got {type(test).__name__}."
            )
        return Dataset(
            train=Streamed(stream, str(self.module)),
            test=Numbered(test, range(len(test)), str(self.test)),
            source=f"a stream of Grain (`{self.module}`), {len(test):,} held-out examples",
            unit="examples",
        )


_ENDLESS = 2**62


class Streamed:
    """Training examples without numbers: `train.data.shuffled` asks it for its batches."""

    def __init__(self, stream: Any, name: str):
        self._stream, self._name = stream, name

    def batches(self, batch_size: int, position: Any = None) -> "Batches":
        """The batches from a position on, as `Batches.position` names it; None: from the first."""
        batches = self._stream.batch(batch_size, drop_remainder=True)
        if hasattr(batches, "to_iter_dataset"):
            batches = batches.to_iter_dataset()
        iterator = iter(batches)
        if position is not None:
            iterator.set_state(position)
        return Batches(iterator, self._name)


class Batches:
    """An iterator of batches that says where it is."""

    def __init__(self, iterator: Any, name: str):
        self._iterator, self._name = iterator, name
        self._before = iterator.get_state()

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Batch:
        self._before = self._iterator.get_state()
        try:
            return next(self._iterator)
        except StopIteration:
            raise ValueError(
                f"`{self._name}` has no more examples. Let it go on without end: `.repeat()` of a grain.MapDataset."
            ) from None

    def position(self) -> Any:
        """The position from which the batch that was drawn last comes again, in values for JSON."""
        return self._before
