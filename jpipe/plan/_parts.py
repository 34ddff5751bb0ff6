"""The costs of a layer that several devices share, on one of them."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax

from jpipe.packing import part_shape
from jpipe.plan._loops import Seconds
from jpipe.plan._profile import LayerProfile
from jpipe.plan._stashes import Avals


def part(aval: jax.ShapeDtypeStruct, spec: Sequence, sizes: Mapping[str, int]) -> jax.ShapeDtypeStruct:
    """The part of an array on one device.

    Args:
      aval: the array.
      spec: the axes of each dim.
      sizes: axis of the mesh -> number of devices.
    """
    return jax.ShapeDtypeStruct(part_shape(aval.shape, spec, sizes), aval.dtype)


def parts(avals: Sequence[jax.ShapeDtypeStruct], specs: Sequence[Sequence], sizes: Mapping[str, int]) -> Avals:
    """See `part`."""
    return tuple(part(aval, spec, sizes) for aval, spec in zip(avals, specs, strict=True))


def with_parts_of_weights(layer: LayerProfile, parameters: Avals) -> LayerProfile:
    """The layer with parts of its weights, and of what is split like them.

    Args:
      layer: the whole layer.
      parameters: the parts.
    """
    return dataclasses.replace(
        layer,
        parameters=parameters,
        gradients=_like_parts(layer, layer.gradients, parameters),
        optimizer_state=_like_parts(layer, layer.optimizer_state, parameters),
    )


def scaled(seconds: Seconds | None, share: float, more: float = 0.0) -> Seconds | None:
    """A share of measured seconds, and some more."""
    if seconds is None:
        return None
    quantiles = dataclasses.astuple(seconds)
    return Seconds(*(share * quantile + more for quantile in quantiles))


def _like_parts(layer: LayerProfile, arrays: Avals, parameters: Avals) -> Avals:
    """`arrays` on one device. Every run of arrays of the weights' shapes is split like the weights."""
    found = list(arrays)
    whole = [aval.shape for aval in layer.parameters]
    start = 0
    while whole and start + len(whole) <= len(found):
        run = found[start : start + len(whole)]
        if [aval.shape for aval in run] == whole:
            found[start : start + len(whole)] = [
                jax.ShapeDtypeStruct(new.shape, aval.dtype) for new, aval in zip(parameters, run)
            ]
            start += len(whole)
        else:
            start += 1
    return tuple(found)
