"""Gathers and scatters that XLA cannot split.

`jnp.take_along_axis`, with which a cross-entropy reads the logits of labels, is a gather, and its derivative adds by a
scatter. XLA ends the process where an axis of the mesh splits the rows, another one splits what is picked from, and
stages are devices of a third: with rows over "fsdp" and a vocabulary over "model", say. There a pick is the sum of the
numbers whose index is the wanted one, all others taken as zero. This is the same number, and XLA splits it as any sum.

Since JAX 0.11 it ends at other gathers there too, such as that of an embedding whose words "model" splits. So an array
is whole along the dims that it is indexed by.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

NAMES = ("gather", "scatter-add")
"""The names of the equations that may be picks."""

SPLITS_INDEXED = jax.__version_info__ < (0, 11)
"""Whether XLA splits other gathers and scatters along a dim that they are indexed by, too, such as the words of an
embedding.
"""


def replaced(eqn: Any) -> Callable[..., jax.Array] | None:
    """What computes an equation where two axes are left to XLA and it cannot split that; None for all others."""
    if eqn.primitive.name not in NAMES or not _splits_by_two_axes():
        return None
    numbers = eqn.params["dimension_numbers"]
    operand, indices = (v.aval for v in eqn.invars[:2])
    rest = numbers.collapsed_slice_dims if eqn.primitive.name == "gather" else numbers.inserted_window_dims
    window = numbers.offset_dims if eqn.primitive.name == "gather" else numbers.update_window_dims
    others = tuple(dim for dim in range(operand.ndim) if dim not in rest)
    num_picks = np.prod(indices.shape[:-1]) / np.prod([operand.shape[dim] for dim in others])
    if len(rest) != 1 or window or others != tuple(numbers.operand_batching_dims) or num_picks != 1:
        return None if SPLITS_INDEXED else functools.partial(_whole, eqn)
    return functools.partial(_pick if eqn.primitive.name == "gather" else _add, eqn.params)


def _whole(eqn: Any, operand: jax.Array, *others: jax.Array) -> jax.Array:
    """The result of an equation, with an operand that no axis splits along the dims that it is indexed by."""
    numbers = eqn.params["dimension_numbers"]
    indexed = numbers.start_index_map if eqn.primitive.name == "gather" else numbers.scatter_dims_to_operand_dims
    spec = [None if dim in indexed else PartitionSpec.UNCONSTRAINED for dim in range(operand.ndim)]
    operand = lax.with_sharding_constraint(operand, PartitionSpec(*spec))
    return eqn.primitive.bind(operand, *others, **eqn.params)


def _splits_by_two_axes() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return sum(mesh.shape[name] > 1 for name in mesh.auto_axes) > 1


def _pick(params: Any, operand: jax.Array, indices: jax.Array) -> jax.Array:
    """One number of each row of the operand."""
    numbers = params["dimension_numbers"]
    (dim,), batching = numbers.collapsed_slice_dims, numbers.start_indices_batching_dims
    index = _index(params, operand, indices, dim, batching)
    zero = jnp.zeros((), operand.dtype)
    picked = jnp.where(_is_at(operand, index, dim), operand, zero).sum(dim, dtype=operand.dtype)
    if params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
        inside = ((index >= 0) & (index < operand.shape[dim])).squeeze(dim)
        picked = jnp.where(inside, picked, jnp.asarray(_fill_value(params, operand.dtype), operand.dtype))
    spread = picked.reshape(*picked.shape, *[1] * (indices.ndim - 1 - picked.ndim))
    return jnp.moveaxis(spread, range(picked.ndim), batching)


def _fill_value(params: Any, dtype: np.dtype) -> Any:
    """The result at an index that is no index of the row: see `jax.lax.gather`."""
    if params["fill_value"] is not None:
        return params["fill_value"]
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    if jnp.issubdtype(dtype, jnp.bool):
        return True
    limits = jnp.iinfo(dtype)
    return limits.max if jnp.issubdtype(dtype, jnp.unsignedinteger) else limits.min


def _add(params: Any, operand: jax.Array, indices: jax.Array, updates: jax.Array) -> jax.Array:
    """The operand, with an update added to one number of each row."""
    numbers = params["dimension_numbers"]
    (dim,), batching = numbers.inserted_window_dims, numbers.scatter_indices_batching_dims
    index = _index(params, operand, indices, dim, batching)
    update = jnp.expand_dims(_by_row(updates, operand, dim, batching), dim)
    return operand + jnp.where(_is_at(operand, index, dim), update, jnp.zeros((), operand.dtype))


def _index(params: Any, operand: jax.Array, indices: jax.Array, dim: int, batching: tuple[int, ...]) -> jax.Array:
    """The index of each row, of the operand's shape but for one in the dim that is picked from."""
    index = _by_row(indices[..., 0], operand, dim, batching)
    if params["mode"] == lax.GatherScatterMode.CLIP:
        index = jnp.clip(index, 0, operand.shape[dim] - 1)
    return jnp.expand_dims(index, dim)


def _by_row(values: jax.Array, operand: jax.Array, dim: int, batching: tuple[int, ...]) -> jax.Array:
    """A value of each row, in the order of the operand's dims."""
    shape = [size for n, size in enumerate(operand.shape) if n != dim]
    return jnp.moveaxis(values, batching, range(len(batching))).reshape(shape)


def _is_at(operand: jax.Array, index: jax.Array, dim: int) -> jax.Array:
    return lax.broadcasted_iota(index.dtype, operand.shape, dim) == index
