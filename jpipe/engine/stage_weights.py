"""The weights of a stage for its layers: fetched from host memory, gathered, and cast."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jpipe import packing
from jpipe.engine.arrays import Packed, TickArrays
from jpipe.engine.cast_weights import read_weights, weights_for
from jpipe.engine.context import StageContext
from jpipe.layers.avals import is_real
from jpipe.layers.backward import LayerProgram
from jpipe.mesh import FSDP
from jpipe.packing import Place
from jpipe.stages.cut import LayerRun

Fetched = Sequence[jax.Array]
"""The weights of a layer that came from host memory."""


class StageWeights(NamedTuple):
    """The weights of a stage in a forward or a backward.

    Attributes:
      stage: the stage.
      arrays: arrays with the weights.
      mutable_state: the mutable state of the layers.
    """

    stage: StageContext
    arrays: Packed
    mutable_state: Packed

    @classmethod
    def of(cls, stage: StageContext, read: TickArrays, weight_pass: str) -> "StageWeights":
        """The weights that a pass, "forward" or "backward", reads."""
        constants = read.mutable_state if "mutable_state" in read else {}
        return cls(stage, weights_for(read, weight_pass), constants)

    def fetch(self, run: LayerRun, i: jax.Array | int) -> list[jax.Array]:
        """Brings the weights of layer i of a run that are in host memory to the device."""
        far = [place for place in run.parameters if place.on_host]
        return packing.read_all(self.arrays, far, self.stage.version, i)

    def layer_weights(self, run: LayerRun, i: jax.Array | int, fetched: Fetched) -> list[jax.Array]:
        """The weights of layer i of a run, gathered from the axis "fsdp".

        Args:
          run: the run.
          i: number of the layer in its run.
          fetched: the result of `fetch`.
        """
        from_host, stored = iter(fetched), self.stage.stages.parameters
        near = [place for place in run.parameters if not place.on_host]
        on_device = iter(read_weights(stored, self.arrays, near, self.stage.version, i))
        values = [next(from_host if place.on_host else on_device) for place in run.parameters]
        dtype = self.stage.spec.numbers.compute_dtype
        return gathered_along_fsdp(run.parameters, values, dtype)

    def for_backward(self, run: LayerRun, kind: LayerProgram, i: jax.Array | int, fetched: Fetched) -> list[jax.Array]:
        """The weights of layer i of a run, then the constants of its state. See `LayerProgram.constants`."""
        column = self.stage.column("mutable_state")
        places = [run.state[j - 1] for j in kind.constants]  # the key comes before the state
        constants = packing.read_all(self.mutable_state, places, column, i)
        return [*self.layer_weights(run, i, fetched), *constants]


def gathered_along_fsdp(
    places: Sequence[Place], values: Sequence[jax.Array], compute_dtype: np.dtype | None = None
) -> list[jax.Array]:
    """Values of the shapes of a layer's parameters, whole along the axis "fsdp" unless the layer reads them in parts.

    Args:
      places: the places of the parameters.
      values: one per place.
      compute_dtype: the dtype that the layer will cast to. Values that are cast before they are gathered are fewer
        bytes to send.
    """

    def gathered(value: jax.Array, place: Place) -> jax.Array:
        if FSDP in place.read_in_parts:
            return packing.split_as(place.spec, value)
        cast_first = FSDP in packing.axes(place.spec) and is_real(value)
        dtype = compute_dtype if compute_dtype and cast_first else value.dtype
        return packing.gathered(value.astype(dtype), place.spec, FSDP).astype(value.dtype)

    return list(map(gathered, values, places))
