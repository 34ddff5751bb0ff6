"""A whole model, one module that the pipeline cuts by itself: of your own file, or of a package."""

import dataclasses
import importlib
from typing import Any

import jax
from flax import nnx

from models.losses import CrossEntropy


class Residual(nnx.Module):
    """A residual net of linear layers on flattened images, as somebody would write it: the default of `Whole`."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.stem = nnx.Linear(784, 64, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(6)])
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, inputs: jax.Array) -> jax.Array:  # [B, H, W, 1] -> [B, 10]
        x = self.stem(inputs.reshape(len(inputs), -1))
        for block in self.blocks:
            x = x + nnx.relu(block(x))
        return self.head(x)


def is_import_path(path: str) -> bool:
    """Whether a text has the form `package.module:name`."""
    package, colon, name = path.partition(":")
    return bool(package and colon and name)


def imported(path: str, option: str) -> Any:
    """What has a name in a module.

    Args:
      path: `package.module:name`.
      option: the option of the configuration that gives the path, for messages.

    Raises:
      ValueError: if there is no such module, or no such name in it.
    """
    package, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"`--config.{option}={path}` cannot be imported: {error}. Set PYTHONPATH to its directory."
        ) from error


@dataclasses.dataclass(frozen=True)
class Whole:
    """A model that is no list of layers: the pipeline cuts it where little crosses."""

    module: str = "models.whole:Residual"
    """`package.module:name` of a factory that is called as `name(rngs=...)`, such as a class of NNX modules, or of a
    module, of NNX or Linen. Its outputs are logits. Python must find the package: set `PYTHONPATH`."""

    def __post_init__(self) -> None:
        if not is_import_path(self.module):
            raise ValueError(
                f"`module` must be package.module:name, such as models.whole:Residual, got {self.module!r}."
            )

    def layers(self) -> Any:
        """What `jpipe.Pipeline` takes in the place of a list of layers."""
        return imported(self.module, "model.module")

    def loss(self) -> CrossEntropy:
        """Cross-entropy of the classes of the examples."""
        return CrossEntropy()
