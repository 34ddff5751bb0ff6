"""The weights of a stage for its layers: fetched from host memory, gathered, and cast."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jpipe import packing
from jpipe.engine.arrays import Packed, TickArrays
from jpipe.engine.cast_weights import SMALL, WeightReader, cast_together
from jpipe.engine.context import StageContext
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
      weights: the weights.
      mutable_state: the mutable state of the layers.
      small: `(place, number of the leaf)` -> the small weights in the dtype that layers compute in. Empty where each is
        read alone.
    """

    stage: StageContext
    weights: WeightReader
    mutable_state: Packed
    small: Mapping[tuple[Place, Any], jax.Array]

    @classmethod
    def of(cls, stage: StageContext, read: TickArrays, weight_pass: str) -> "StageWeights":
        """The weights that a pass, "forward" or "backward", reads."""
        constants = read.mutable_state if "mutable_state" in read else {}
        weights = WeightReader.of(stage.spec, read, weight_pass, stage.branch.row)
        return cls(stage, weights, constants, _small_at_once(stage, weights))

    def fetch(self, run: LayerRun, i: jax.Array | int) -> list[jax.Array]:
        """Brings the weights of layer i of a run that are in host memory to the device."""
        far = [place for place in run.parameters if place.on_host]
        return packing.read_all(self.weights.arrays, far, self.stage.version, i)

    def layer_weights(self, run: LayerRun, i: jax.Array | int, fetched: Fetched) -> list[jax.Array]:
        """The weights of layer i of a run, gathered from the axis "fsdp".

        Args:
          run: the run.
          i: number of the layer in its run.
          fetched: the result of `fetch`.
        """
        from_host = iter(fetched)

        def value(place: Place) -> jax.Array:
            if place.on_host:
                return next(from_host)
            if self.small and (place, i) in self.small:
                return self.small[place, i].astype(self.weights.arrays[place.array].dtype)
            return self.weights.read(place, self.stage.version, i)

        values = [value(place) for place in run.parameters]
        return gathered_along_fsdp(run.parameters, values, self.stage.stages.layer_kinds[run.kind].read_dtypes)

    def for_backward(self, run: LayerRun, kind: LayerProgram, i: jax.Array | int, fetched: Fetched) -> list[jax.Array]:
        """The weights of layer i of a run, then the constants of its state. See `LayerProgram.constants`."""
        column = self.stage.column("mutable_state")
        places = [run.state[j - 1] for j in kind.constants]  # the key comes before the state
        constants = packing.read_all(self.mutable_state, places, column, i)
        return [*self.layer_weights(run, i, fetched), *constants]


def _small_at_once(stage: StageContext, weights: WeightReader) -> dict[tuple[Place, Any], jax.Array]:
    """The small weights of all layers in the dtypes that they are cast to, but for those with copies of their own; none
    if this is no GPU.

    Layers have many biases and scales, and a GPU starts a kernel for each that is read.
    """
    if not stage.joins:
        return {}
    arrays, groups = weights.arrays, dict[np.dtype, dict[tuple[Place, int], tuple[jax.Array, np.dtype]]]()
    for run in stage.program.runs:
        for place, dtype in zip(run.parameters, stage.stages.layer_kinds[run.kind].read_dtypes, strict=True):
            stored_dtype = arrays[place.array].dtype
            alone = place.on_host or any(place.spec) or stored_dtype == dtype
            if not alone and math.prod(place.shape) <= SMALL:
                group = groups.setdefault(stored_dtype, {})
                for i in range(run.longest):
                    if weights.copied_alone(place, i) is None:
                        group[place, i] = packing.read(arrays, place, stage.version, i), dtype
    small: dict[tuple[Place, Any], jax.Array] = {}
    for group in groups.values():
        small |= zip(group, cast_together([*group.values()]), strict=True)
    return small


def gathered_along_fsdp(
    places: Sequence[Place], values: Sequence[jax.Array], read_dtypes: Sequence[np.dtype] | None = None
) -> list[jax.Array]:
    """Values of the shapes of a layer's parameters, whole along the axis "fsdp" unless the layer reads them in parts.

    Args:
      places: the places of the parameters.
      values: one per place.
      read_dtypes: one per place, the dtype that the layer will cast to. Values that are cast before they are gathered
        are fewer bytes to send. None: that of each value.
    """

    def gathered(value: jax.Array, place: Place, dtype: np.dtype) -> jax.Array:
        if FSDP in place.read_in_parts:
            return packing.split_as(place.spec, value)
        dtype = dtype if FSDP in packing.axes(place.spec) else value.dtype
        return packing.gathered(value.astype(dtype), place.spec, FSDP).astype(value.dtype)

    return list(map(gathered, values, places, read_dtypes or [value.dtype for value in values]))
