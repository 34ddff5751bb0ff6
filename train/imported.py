"""A data set of your own file or of a package, by its import path."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from models.whole import imported, is_import_path
from train.data import Batch, Dataset, check_test_fraction, held_out


@dataclasses.dataclass(frozen=True)
class Imported:
    """A data set that a function of yours makes."""

    module: str | None = None
    """`package.module:name` of a function without arguments, or a class, that returns a `train.data.Dataset`, or
    numbered examples: what has a length and gives example `i` for `[i]`, a dict of arrays, such as a list or Grain's
    `MapDataset`. Required. Python must find the package: set `PYTHONPATH`."""
    test_fraction: float = 0.1
    """Fraction of numbered examples, at their end, that is held out."""

    def __post_init__(self) -> None:
        check_test_fraction(self.test_fraction)

    def load(self) -> Dataset:
        """Imports the function and calls it.

        Raises:
          ValueError: if there is no such function, or it returns something else.
        """
        if not is_import_path(self.module or ""):
            raise ValueError(f"`data.module` must be package.module:name, got {self.module!r}.")
        data = imported(str(self.module), "data.module")()
        if isinstance(data, Dataset):
            return data
        if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise ValueError(
                f"`{self.module}` must return a train.data.Dataset or numbered examples, got {type(data).__name__}."
            )
        numbers = held_out(range(len(data)), self.test_fraction)
        parts = [Numbered(data, part, str(self.module)) for part in numbers]
        if not all(map(len, parts)):
            raise ValueError(
                f"`{self.module}` must have training and held-out examples, got {len(data)} with `test_fraction` = "
                f"{self.test_fraction}. Give more examples, or another fraction."
            )
        source = f"{len(parts[0]):,} training and {len(parts[1]):,} held-out examples (`{self.module}`)"
        return Dataset(*parts, source=source, unit="examples")


class Numbered:
    """Some of numbered examples; a batch has their arrays one above the other."""

    def __init__(self, data: Any, numbers: Sequence[int], name: str):
        self.data, self.numbers, self.name = data, numbers, name

    def __len__(self) -> int:
        return len(self.numbers)

    def batch(self, indices: np.ndarray, rng: np.random.Generator | None) -> Batch:
        del rng  # what varies an example is in the data
        return self._stacked([self.data[self.numbers[int(i)]] for i in indices])

    def _stacked(self, examples: Sequence[Any]) -> Any:
        first = examples[0]
        if isinstance(first, Mapping):
            return {key: self._stacked([example[key] for example in examples]) for key in first}
        try:
            return np.stack(examples)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"examples of `{self.name}` must be dicts of arrays of one shape each, which they are not: {error}."
            ) from error
