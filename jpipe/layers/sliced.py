"""Layers on the slices of a sequence: what each hands on to the next slice, as arguments and results."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jpipe._slices import Slice, in_slice
from jpipe.layers.avals import abstract


class Carried(NamedTuple):
    """What a layer hands on from slice to slice.

    Attributes:
      values: abstract values.
      kept: for each, whether it is of `jpipe.whole_sequence`.
    """

    values: list[jax.ShapeDtypeStruct]
    kept: list[bool]

    def options(self, num_inputs: int) -> dict[str, Any]:
        """The arguments of `trace_layer` for a layer with `num_inputs` other inputs, which come before these."""
        kept = tuple(num_inputs + i for i, is_kept in enumerate(self.kept) if is_kept)
        return {"num_carried": len(self.values), "kept": kept}


@dataclasses.dataclass(frozen=True)
class Slices:
    """The slices of the sequences of a minibatch.

    Attributes:
      count: k, slices of a sequence.
      inputs: the abstract inputs of the model for one of them; dim 1 is positions.
    """

    count: int
    inputs: Any

    number = jax.ShapeDtypeStruct((), np.int32)
    """The abstract number of a slice."""

    def _slice(self, number: Any, given: list | None = None) -> Slice:
        return Slice(self.count, jax.tree.leaves(self.inputs)[0].shape[1], number, given)

    def carried(self, run: Callable[..., tuple], *args: Any) -> Carried:
        """What a layer hands on.

        Args:
          run: a layer in training.
          *args: its abstract arguments.
        """
        kept: list[bool] = []

        def handed(number: jax.Array, *args: Any) -> list[jax.Array]:
            with in_slice(self._slice(number)) as current:
                run(*args)
            kept[:] = current.kept
            return current.handed

        values = jax.eval_shape(handed, self.number, *args)
        return Carried(list(abstract(values)), kept)

    def handing_on(self, run: Callable[..., tuple]) -> Callable[..., tuple]:
        """A layer whose last argument is `(args, given, number of the slice)`, and whose last result is what it hands
        on.
        """

        def run_slice(parameters: Any, state: Any, key: jax.Array, args: tuple[tuple, Sequence, jax.Array]) -> tuple:
            args, given, number = args
            with in_slice(self._slice(number, list(given))) as current:
                results = run(parameters, state, key, args)
            return *results, current.handed

        return run_slice
