"""The stashes of a layer in tables whose backwards have the weights of their forwards, other ones, or keep nothing."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jpipe.layers.backward import LayerProgram, LayerValues
from jpipe.layers.residuals import AT_HAND, STASHED, UNREAD

Avals = tuple[jax.ShapeDtypeStruct, ...]


@dataclasses.dataclass(frozen=True)
class Stash:
    """What a layer keeps of its forward for its backward.

    Attributes:
      for_inputs: arrays that the input gradient alone reads.
      for_weights: arrays that the weight gradient reads, and perhaps the input gradient too.
      values: the values among them that other layers may have as well.
    """

    for_inputs: Avals
    for_weights: Avals
    values: LayerValues = LayerValues()

    @property
    def joined(self) -> "Stash":
        """The stash in a table that does not split backwards: all of it is read at one time."""
        values = dataclasses.replace(
            self.values, input_stash=(*self.values.input_stash, *self.values.weight_stash), weight_stash=()
        )
        return Stash((*self.for_inputs, *self.for_weights), (), values)


def stashes_of(program: LayerProgram, arrays: Callable[[LayerProgram], Sequence]) -> dict[str, Any]:
    """The fields of a `LayerProfile` about stashes.

    Args:
      program: the layer.
      arrays: gives the abstract stash of a program on a device.
    """

    def stash(weight_accesses: float) -> Stash:
        rerun = program.rereading(weight_accesses)
        kept = arrays(rerun)
        for_inputs, for_weights = (tuple(kept[i] for i in part) for part in (rerun.input_stash, rerun.weight_stash))
        return Stash(for_inputs, for_weights, rerun.values_of_table)

    at_hand = stash(AT_HAND)
    return {
        "input_stash": at_hand.for_inputs,
        "weight_stash": at_hand.for_weights,
        "values": at_hand.values,
        "stale_stash": stash(STASHED),
        "whole_stash": stash(UNREAD),
    }
