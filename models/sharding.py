"""Logical names of the dims of weights and activations.

A model names its dims, and rules map the names to axes of a mesh (`jpipe.AXIS_RULES` are the usual
ones). Without a mesh the names change nothing. The names are

    batch      rows
    length     positions of a sequence, in what layers pass on
    positions  positions of a sequence inside of a layer, where an axis may split hidden units instead
    embed      the width of what layers pass on: a residual stream, the channels of an image
    mlp        hidden units between two matrices, hidden channels between two convolutions
    heads      all heads of attention, side by side
    vocab      words
    expert     experts of a mixture

so that two matrices with `mlp` or `heads` between them, the first split by columns and the
second one by rows, need one sum over the devices (Shoeybi et al., 2019, arXiv:1909.08053,
section 3).
"""

import functools
import math
from typing import Any

import jax
from flax import linen, nnx

from jpipe import vocabulary


@functools.cache  # the same function again, so equal layers stay structurally equal
def named(init: nnx.Initializer, *names: str | None) -> nnx.Initializer:
    """`init` for an array whose dims have these names."""
    # Eager sharding would need a mesh at the time when the array is made.
    return nnx.with_partitioning(init, names, eager_sharding=False)


def axes_of(name: str) -> tuple[str, ...]:
    """The axes of the mesh that a dim of this name is split over, if the mesh has any for it."""
    (axes,) = linen.logical_to_mesh_axes((name,))
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def if_divides(axes: tuple[str, ...], size: int) -> tuple[str, ...]:
    """The axes of the mesh, or none if their devices do not divide a dim of this size."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return () if size % math.prod(sizes[name] for name in axes) else axes


def constrain(x: Any, *names: str | None) -> Any:
    """An activation whose dims have these names; a dim without a name is whole.

    Logits of which each stage has a part are as they are.
    """
    if isinstance(x, vocabulary.SplitLogits):
        return x
    return linen.with_logical_constraint(x, names)
