"""Gathers and scatters that XLA cannot split.

`jnp.take_along_axis`, with which a cross-entropy reads the logits of labels, is a gather, and its derivative adds by a
scatter. XLA ends the process where an axis of the mesh splits the rows, another one splits what is picked from, and
stages are devices of a third: with rows over "fsdp" and a vocabulary over "model", say. There a pick is the sum of the
numbers whose index is the wanted one, all others taken as zero. This is the same number, and XLA splits it as any sum.

Since JAX 0.11 it ends at other gathers there too, such as that of an embedding whose words "model" splits. So an array
is whole along the dims that it is indexed by.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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


class _Indexing(NamedTuple):
    """What a gather and a scatter have in common.

    Attributes:
      dims: the dims of the operand that are indexed.
      single: those of which a result or an update has no dim.
      window: the dims of a result or an update that are no dims of the indices.
      batching: the dims of the operand, and those of the indices, whose rows belong together.
      mode: what becomes of an index that is none of the operand.
    """

    dims: tuple[int, ...]
    single: tuple[int, ...]
    window: tuple[int, ...]
    batching: tuple[tuple[int, ...], tuple[int, ...]]
    mode: lax.GatherScatterMode

    @classmethod
    def of(cls, eqn: Any) -> "_Indexing":
        numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
        if eqn.primitive.name == "gather":
            batching = numbers.operand_batching_dims, numbers.start_indices_batching_dims
            return cls(numbers.start_index_map, numbers.collapsed_slice_dims, numbers.offset_dims, batching, mode)
        batching = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
        window = numbers.update_window_dims
        return cls(numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims, window, batching, mode)

    def is_pick(self, operand: Any, indices: Any) -> bool:
        """Whether it is of one number of each row of the operand."""
        rows = tuple(dim for dim in range(operand.ndim) if dim not in self.single)
        num_rows = math.prod(operand.shape[dim] for dim in rows)
        is_of_rows = len(self.single) == 1 and not self.window and rows == tuple(self.batching[0])
        return is_of_rows and math.prod(indices.shape[:-1]) == num_rows

    def row_index(self, operand: jax.Array, indices: jax.Array) -> jax.Array:
        """The index of a pick in each row, of the operand's shape but for one in the dim that is picked from."""
        index = self.by_row(operand, indices[..., 0])
        return jnp.clip(index, 0, operand.shape[self.dim] - 1) if self.mode == lax.GatherScatterMode.CLIP else index

    def by_row(self, operand: jax.Array, values: jax.Array) -> jax.Array:
        """A value of each row of a pick, in the shape of `row_index`."""
        _, batching = self.batching
        shape = [1 if n == self.dim else size for n, size in enumerate(operand.shape)]
        return jnp.moveaxis(values, batching, range(len(batching))).reshape(shape)

    @property
    def dim(self) -> int:
        """The dim that is picked from."""
        return self.single[0]


def replaced(eqn: Any) -> Callable[..., jax.Array] | None:
    """What computes a pick where two axes are left to XLA; None for all other equations."""
    if eqn.primitive.name not in NAMES or not _splits_by_two_axes():
        return None
    indexing = _Indexing.of(eqn)
    if not indexing.is_pick(*(v.aval for v in eqn.invars[:2])):
        return None
    return functools.partial(_pick if eqn.primitive.name == "gather" else _add, eqn.params, indexing)


def whole(eqn: Any, values: Sequence) -> Sequence:
    """The operands of an equation. No axis splits the first along the dims that it is indexed by, if XLA cannot."""
    if SPLITS_INDEXED or eqn.primitive.name not in NAMES or not _splits_by_two_axes():
        return values
    operand, *others = values
    dims = _Indexing.of(eqn).dims
    spec = [None if dim in dims else PartitionSpec.UNCONSTRAINED for dim in range(operand.ndim)]
    return [lax.with_sharding_constraint(operand, PartitionSpec(*spec)), *others]


def _splits_by_two_axes() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return sum(mesh.shape[name] > 1 for name in mesh.auto_axes) > 1


def _pick(params: Any, indexing: _Indexing, operand: jax.Array, indices: jax.Array) -> jax.Array:
    """One number of each row of the operand."""
    dim, index = indexing.dim, indexing.row_index(operand, indices)
    picked = jnp.where(_is_at(operand, index, dim), operand, jnp.zeros((), operand.dtype))
    picked = picked.sum(dim, dtype=operand.dtype)
    if indexing.mode == lax.GatherScatterMode.FILL_OR_DROP:
        inside = ((index >= 0) & (index < operand.shape[dim])).squeeze(dim)
        picked = jnp.where(inside, picked, jnp.asarray(_fill_value(params, operand.dtype), operand.dtype))
    _, batching = indexing.batching
    spread = picked.reshape(*picked.shape, *[1] * (indices.ndim - 1 - picked.ndim))
    return jnp.moveaxis(spread, range(picked.ndim), batching)


def _add(params: Any, indexing: _Indexing, operand: jax.Array, indices: jax.Array, updates: jax.Array) -> jax.Array:
    """The operand, with an update added to one number of each row."""
    is_at = _is_at(operand, indexing.row_index(operand, indices), indexing.dim)
    return operand + jnp.where(is_at, indexing.by_row(operand, updates), jnp.zeros((), operand.dtype))


def _is_at(operand: jax.Array, index: jax.Array, dim: int) -> jax.Array:
    return lax.broadcasted_iota(index.dtype, operand.shape, dim) == index


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
