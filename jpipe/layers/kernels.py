"""Kernels that JAX splits over devices by functions of their own: `custom_partitioning`, as cuDNN's attention has it.

JAX does so where the compiler splits all axes of a mesh, or none. In a pipeline it splits some, and the pipeline the
others, and there JAX fails. So a kernel becomes a `mapped` over all axes that are left to the compiler: see
`jpipe.layers.mapped`. An attention is split by rows and heads. Of any other kernel each device computes the whole.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jpipe._attention.split import Split
from jpipe.layers import mapped
from jpipe.layers.mesh_free import params_without_mesh
from jpipe.mesh import DATA, STAGE
from jpipe.packing import axes

_ATTENTION = ("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper")
_KERNELS = ("custom_partitioning", *_ATTENTION)
_NUM_OFFSETS = slice(6, 10)
"""Of the operands of an attention, those of packed sequences and of pages of keys."""


def is_kernel(eqn: Any) -> bool:
    """Returns whether JAX splits an equation by a function of its own."""
    return eqn.primitive.name in _KERNELS


def without_mesh(eqn: Any, inner: Callable[[jex.ClosedJaxpr], jex.ClosedJaxpr]) -> Any:
    """The `mapped` of a kernel that was traced on a mesh with axes for the compiler; elsewhere the kernel itself.

    Args:
      eqn: the equation of the kernel.
      inner: gives a function as it is without a mesh.
    """
    mesh = eqn.ctx.cur_abstract_mesh
    eqn = eqn.replace(params=params_without_mesh(eqn.params, inner))
    names = [name for name in mesh.auto_axes if name not in (STAGE, DATA)]
    if not names:
        return eqn
    mapped.check_order(mesh.axis_names, names, f"the kernel {eqn.primitive.name}")
    in_specs, out_specs, summed_over = _specs(eqn, mesh)

    def run(*values: jax.Array) -> list:
        *results, last = eqn.primitive.bind(*values, **eqn.params)
        return [*results, jax.lax.psum(last, summed_over) if summed_over else last]

    operands, results = zip(eqn.invars, in_specs, strict=True), zip(eqn.outvars, out_specs, strict=True)
    return mapped.equation(eqn, run, [*operands], [*results], [(name, mesh.shape[name]) for name in names])


def _specs(eqn: Any, mesh: AbstractMesh) -> tuple[tuple[P, ...], tuple[P, ...], tuple[str, ...]]:
    """How the operands and the results of a kernel are split, and the axes that the last result is summed over."""
    whole = (P(),) * len(eqn.invars), (P(),) * len(eqn.outvars), ()
    if eqn.primitive.name not in _ATTENTION:
        return whole
    shapes = [v.aval.shape for v in eqn.invars]
    if any(0 not in shape for shape in shapes[_NUM_OFFSETS]):
        return whole
    heads_first = eqn.params["layout"] != 0  # [B, H, T, D], and not [B, T, H, D]
    split = Split.of(mesh, None, shapes[0][0], shapes[1][1 if heads_first else 2])
    rows, heads = split.rows or None, split.heads or None
    values = P(rows, heads, None, None) if heads_first else P(rows, None, heads, None)
    bias = P(*(names if size > 1 else None for size, names in zip(shapes[3], (rows, heads, None, None))))
    statistics = P(rows, heads, None)

    def spec(position: int, shape: Sequence[int]) -> P:
        if 0 in shape:
            return P()
        if position == 3:
            return bias
        return P(rows) if position in (4, 5) else statistics if position == 10 else values

    in_specs = tuple(spec(i, shape) for i, shape in enumerate(shapes))
    if eqn.primitive.name == _ATTENTION[0]:
        return in_specs, (values, statistics)[: len(eqn.outvars)], ()
    out_specs = (values, values, values, bias)[: len(eqn.outvars)]
    summed_over = {*split.rows, *split.heads} - {*axes(tuple(bias))} if len(out_specs) == 4 else ()
    return in_specs, out_specs, tuple(summed_over)
