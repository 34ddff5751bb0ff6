"""A data set of your own file or of a package, by its import path."""

import dataclasses
import importlib

from train.data import Dataset


@dataclasses.dataclass(frozen=True)
class Imported:
    """A data set that a function of yours makes."""

    module: str | None = None
    """`package.module:name` of a function without arguments, or a class, that returns a `train.data.Dataset`. Required.
    Python must find the package: set `PYTHONPATH`."""

    def load(self) -> Dataset:
        """Imports the function and calls it.

        Raises:
          ValueError: if there is no such function, or it returns something else.
        """
        package, colon, name = (self.module or "").partition(":")
        if not (package and colon and name):
            raise ValueError(f"`data.module` must be package.module:name, got {self.module!r}.")
        try:
            make = getattr(importlib.import_module(package), name)
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"`--config.data.module={self.module}` cannot be imported: {error}. Set PYTHONPATH to its directory."
            ) from error
        data = make()
        if not isinstance(data, Dataset):
            raise ValueError(f"`{self.module}` must return a train.data.Dataset, got {type(data).__name__}.")
        return data
