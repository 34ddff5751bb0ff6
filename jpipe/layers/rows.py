"""Finds layers that compute across the rows of a batch.

A pipeline gives a layer one microbatch at a time, so a layer that averages over the batch axis
computes something else for each number of microbatches. The analysis follows, through the equations
of each layer, the dims of every value that hold rows of the batch (the *row dims*), and reports the
operations that certainly combine several rows. It makes no claim about operations that it does not
know, nor about values that depend on them: it may miss a layer, but it does not accuse a correct one.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex

from jpipe.layers.avals import is_inexact
from jpipe.layers.backward import LayerProgram
from jpipe.layers.elementwise import ELEMENTWISE
from jpipe.layers.equations import Equations
from jpipe.layers.trace import Traced

# The row dims of a value. Empty for a value that is the same for all rows; None if unknown.
RowDims = frozenset[int] | None
NO_ROWS: frozenset[int] = frozenset()


def row_mixing(traced: Traced) -> list[str]:
    """One sentence, without a full stop, per layer that certainly combines rows of a microbatch.

    Layers with batch norm are left out: they are documented to normalise each microbatch.

    Args:
      traced: the traced layers; dim 0 of every leaf of the inputs is the batch axis.

    Returns:
      Sentences such as "layer 3 (Mix) sums over the batch axis (reduce_sum)".
    """
    sizes = {leaf.shape[0] for leaf in traced.inputs if leaf.shape}
    if len(sizes) != 1 or sizes == {1}:  # one row cannot be mixed
        return []
    (num_rows,) = sizes

    @functools.cache
    def analyse(kind: int, dims: tuple[RowDims, ...], reported: range) -> tuple:
        return _analyse(traced.layer_kinds[kind], dims, reported, num_rows=num_rows)

    dims: tuple[RowDims, ...] = tuple(frozenset([0]) if leaf.shape else NO_ROWS for leaf in traced.inputs)
    stashed: dict[str, tuple[RowDims, ...]] = {}
    sentences = []
    for i, layer in enumerate(traced.layers):
        dims += tuple(itertools.chain(*(stashed.pop(name) for name in layer.pop)))
        # A number that a layer reports to the loss may be a mean over rows.
        num_outputs = len(traced.outputs[i])
        reported = range(num_outputs - len(traced.reported), num_outputs)
        kind = traced.kind_of_layer[i]
        output_dims, operations = analyse(kind, dims, reported)
        if operations and not layer.has_batch_norm:
            sentences.append(f"layer {i} ({layer.name}) {' and '.join(operations)}")
        leaves = iter(output_dims)
        dims = tuple(itertools.islice(leaves, num_outputs))
        for name in layer.stash:
            _, _, avals = traced.skips[name]
            stashed[name] = tuple(itertools.islice(leaves, len(avals)))
    return sentences


def _analyse(
    program: LayerProgram,
    input_dims: tuple[RowDims, ...],
    reported: range,
    *,
    num_rows: int,
) -> tuple[tuple[RowDims, ...], tuple[str, ...]]:
    """The row dims of a layer's outputs, and the operations that combine rows.

    Args:
      program: the program of the layer.
      input_dims: the row dims of its inputs.
      reported: positions of the outputs that are numbers for the loss. Numbers are not analysed.
      num_rows: the number of rows of a microbatch.
    """
    whole = program.forward_equations
    outputs = whole.outputs[: len(program.outputs)]

    def followed(values: Sequence[Any]) -> tuple[list[RowDims], list[str]]:
        """The row dims of values, and the operations before them that combine rows."""
        equations = whole.slice(whole.inputs, values)
        dims_of: dict[Any, RowDims] = {v: NO_ROWS for v in equations.constants}
        dims_of |= {v: NO_ROWS for v in equations.inputs}
        dims_of |= dict(zip(equations.inputs[len(program.parameters) :], input_dims))
        operations = _follow(equations, dims_of, num_rows)
        return [_dims(dims_of, v) for v in values], operations

    # A number is no activation of rows. It may be a loss, whose mean over microbatches counts: the check of losses sees
    # whether that is the loss of the minibatch.
    arrays = [i for i, v in enumerate(outputs) if i not in reported and v.aval.shape]
    dims, operations = followed([outputs[i] for i in arrays])
    if any(d is not None and len(d) > 1 for d in dims):
        operations.append("returns an array with a row per pair of rows")
    results: dict[int, RowDims] = {i: NO_ROWS for i in reported}
    results |= zip(arrays, dims)
    for i in range(len(outputs)):
        if i not in results:
            (number_dims,), combining = followed([outputs[i]])
            results[i] = None if combining else number_dims
    return tuple(results[i] for i in range(len(outputs))), tuple(dict.fromkeys(operations))


def _follow(equations: Equations, dims_of: dict[Any, RowDims], num_rows: int) -> list[str]:
    """Adds the row dims of all values to `dims_of`; returns the operations that combine rows."""
    operations: list[str] = []
    for eqn in equations.equations:
        operands = [_dims(dims_of, v) for v in eqn.invars]
        if all(dims == NO_ROWS for dims in operands):
            results: Sequence[RowDims] = [NO_ROWS] * len(eqn.outvars)
        elif any(dims is None for dims in operands) or eqn.primitive.name not in _RULES:
            results = [None] * len(eqn.outvars)
        else:
            shapes = [v.aval.shape for v in eqn.invars]
            known = _Equation(
                eqn.primitive.name,
                eqn.params,
                shapes,
                [d for d in operands if d is not None],
                [v.aval.shape for v in eqn.outvars],
                num_rows=num_rows,
            )
            results, mixes = _RULES[eqn.primitive.name](known)
            if mixes and not any(is_inexact(v.aval) for v in eqn.invars):
                # Indices, such as an order of the rows: whoever takes rows by them can put them back in their places.
                results = [None] * len(eqn.outvars)
            elif mixes:
                words = _WORDS.get(known.name, "combines rows of the batch")
                operations.append(f"{words} ({known.name})")
        dims_of.update(zip(eqn.outvars, results, strict=True))
    return operations


def _dims(dims_of: Mapping[Any, RowDims], atom: Any) -> RowDims:
    return NO_ROWS if isinstance(atom, jex.Literal) else dims_of[atom]


# -- Rules: one per primitive, from an equation to the row dims of its results and whether it
# combines rows


class _Equation(NamedTuple):
    """An equation whose operands have known row dims."""

    name: str
    params: Mapping[str, Any]
    shapes: Sequence[tuple[int, ...]]
    dims: Sequence[frozenset[int]]
    out_shapes: Sequence[tuple[int, ...]]
    num_rows: int

    def results(self, dims: RowDims, mixes: bool = False) -> tuple[list[RowDims], bool]:
        """Gives every result the same row dims."""
        return [dims] * len(self.out_shapes), mixes


_Rule = Callable[[_Equation], tuple[list[RowDims], bool]]


def _elementwise(eqn: _Equation) -> tuple[list[RowDims], bool]:
    """Row dims if all operands are scalars, or have the shape of the result except for dims of size 1."""
    (result,) = set(eqn.out_shapes)
    for shape in eqn.shapes:
        if shape != () and len(shape) != len(result):
            return eqn.results(None)
    return eqn.results(frozenset().union(*eqn.dims))


def _one_to_one(eqn: _Equation) -> tuple[list[RowDims], bool]:
    """Result i is operand i."""
    return list(eqn.dims), False


def _broadcast_in_dim(eqn: _Equation) -> tuple[list[RowDims], bool]:
    to = eqn.params["broadcast_dimensions"]
    return eqn.results(frozenset(to[d] for d in eqn.dims[0]))


def _transpose(eqn: _Equation) -> tuple[list[RowDims], bool]:
    order = list(eqn.params["permutation"])
    return eqn.results(frozenset(order.index(d) for d in eqn.dims[0]))


def _squeeze(eqn: _Equation) -> tuple[list[RowDims], bool]:
    return eqn.results(_without(eqn.dims[0], eqn.params["dimensions"]))


def _reshape(eqn: _Equation) -> tuple[list[RowDims], bool]:
    if eqn.params.get("dimensions") is not None:
        return eqn.results(None)
    old, new = eqn.shapes[0], eqn.out_shapes[0]
    dims = [_reshaped(old, new, d, eqn.num_rows) for d in eqn.dims[0]]
    if any(d is None for d in dims):
        return eqn.results(None)
    return eqn.results(frozenset(d for d in dims if d is not None))


def _reshaped(old: Sequence[int], new: Sequence[int], dim: int, num_rows: int) -> int | None:
    """The dim of the new shape whose outer factor is the rows, if they are the outer factor of `dim`."""
    before = math.prod(old[:dim])
    for d, size in enumerate(new):
        if math.prod(new[:d]) == before and size != 1:
            return d if size % num_rows == 0 else None
    return None


def _reduce(eqn: _Equation) -> tuple[list[RowDims], bool]:
    axes = eqn.params["axes"]
    mixes = any(not dims.isdisjoint(axes) for dims in eqn.dims)
    return eqn.results(_without(frozenset().union(*eqn.dims), axes), mixes)


def _along(name: str) -> _Rule:
    """Operations along one axis, or several, that keep the shape."""

    def rule(eqn: _Equation) -> tuple[list[RowDims], bool]:
        axes = eqn.params[name]
        axes = axes if isinstance(axes, tuple) else (axes,)
        dims = frozenset().union(*eqn.dims)
        return eqn.results(dims, not dims.isdisjoint(axes))

    return rule


def _top_k(eqn: _Equation) -> tuple[list[RowDims], bool]:
    last = len(eqn.shapes[0]) - 1
    axis = eqn.params.get("axis", last) % len(eqn.shapes[0])
    return eqn.results(eqn.dims[0], axis in eqn.dims[0])


def _dot_general(eqn: _Equation) -> tuple[list[RowDims], bool]:
    contracted, batch = eqn.params["dimension_numbers"]
    position = len(batch[0])
    dims: set[int] = set()
    for side in (0, 1):
        for d in range(len(eqn.shapes[side])):
            if d in batch[side]:
                if d in eqn.dims[side]:
                    dims.add(batch[side].index(d))
            elif d not in contracted[side]:
                if d in eqn.dims[side]:
                    dims.add(position)
                position += 1
    mixes = any(not eqn.dims[side].isdisjoint(contracted[side]) for side in (0, 1))
    return eqn.results(frozenset(dims), mixes)


def _conv(eqn: _Equation) -> tuple[list[RowDims], bool]:
    numbers = eqn.params["dimension_numbers"]
    rows_are_batch = eqn.dims[0] == {numbers.lhs_spec[0]} and not eqn.dims[1]
    if not rows_are_batch or eqn.params["batch_group_count"] != 1:
        return eqn.results(None)
    return eqn.results(frozenset([numbers.out_spec[0]]))


def _window(eqn: _Equation) -> tuple[list[RowDims], bool]:
    params, (dims, *_) = eqn.params, eqn.dims
    whole = all(
        params["window_dimensions"][d] == 1
        and params["window_strides"][d] == 1
        and tuple(params["padding"][d]) == (0, 0)
        for d in dims
    )
    return eqn.results(dims if whole and not any(eqn.dims[1:]) else None)


def _concatenate(eqn: _Equation) -> tuple[list[RowDims], bool]:
    dims = frozenset().union(*eqn.dims)
    return eqn.results(None if eqn.params["dimension"] in dims else dims)


def _split(eqn: _Equation) -> tuple[list[RowDims], bool]:
    return eqn.results(None if eqn.params["axis"] in eqn.dims[0] else eqn.dims[0])


def _unstack(eqn: _Equation) -> tuple[list[RowDims], bool]:
    axis, dims = eqn.params["axis"], eqn.dims[0]
    return eqn.results(None if axis in dims else _without(dims, [axis]))


def _same_rows(eqn: _Equation) -> tuple[list[RowDims], bool]:
    """Slices and pads, which keep the row dims if they keep all rows."""
    (shape,), dims = eqn.out_shapes, eqn.dims[0]
    kept = all(shape[d] == eqn.shapes[0][d] for d in dims)
    if eqn.name == "pad":
        kept = kept and all(eqn.params["padding_config"][d] == (0, 0, 0) for d in dims)
    return eqn.results(dims if kept and not any(eqn.dims[1:]) else None)


def _gather(eqn: _Equation) -> tuple[list[RowDims], bool]:
    """Embeddings (rows in the indices) and indexing of other dims (rows in the operand)."""
    numbers = eqn.params["dimension_numbers"]
    operand, indices = eqn.dims
    (shape,) = eqn.out_shapes
    index_dims = [d for d in range(len(shape)) if d not in numbers.offset_dims]
    last = len(eqn.shapes[1]) - 1
    if last in indices:
        return eqn.results(None)
    dims = {index_dims[d] for d in indices}
    removed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    offsets = [d for d in range(len(eqn.shapes[0])) if d not in removed]
    for d in operand:
        if d in numbers.operand_batching_dims:
            pair = numbers.operand_batching_dims.index(d)
            dims.add(index_dims[numbers.start_indices_batching_dims[pair]])
        elif d in offsets and eqn.params["slice_sizes"][d] == eqn.shapes[0][d]:
            dims.add(numbers.offset_dims[offsets.index(d)])
        else:
            return eqn.results(None)
    return eqn.results(frozenset(dims))


def _without(dims: frozenset[int], removed: Sequence[int]) -> frozenset[int]:
    """The row dims after other dims are removed from the shape."""
    return frozenset(d - sum(r < d for r in removed) for d in dims if d not in set(removed))


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(
        "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin".split(),
        _reduce,
    ),
    **dict.fromkeys("cumsum cumprod cummax cummin cumlogsumexp".split(), _along("axis")),
    **dict.fromkeys(["slice", "pad", "dynamic_slice"], _same_rows),
    **dict.fromkeys(["reduce_window_max", "reduce_window_min", "reduce_window_sum"], _window),
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "conv_general_dilated": _conv,
    "dot_general": _dot_general,
    "gather": _gather,
    "optimization_barrier": _one_to_one,
    "reshape": _reshape,
    "rev": _along("dimensions"),
    "sort": _along("dimension"),
    "split": _split,
    "squeeze": _squeeze,
    "top_k": _top_k,
    "transpose": _transpose,
    "unstack": _unstack,
}
_WORDS = {
    "argmax": "compares rows along the batch axis",
    "argmin": "compares rows along the batch axis",
    "cumlogsumexp": "sums along the batch axis",
    "cummax": "compares rows along the batch axis",
    "cummin": "compares rows along the batch axis",
    "cumprod": "multiplies along the batch axis",
    "cumsum": "sums along the batch axis",
    "dot_general": "sums products over the batch axis",
    "reduce_max": "takes the maximum over the batch axis",
    "reduce_min": "takes the minimum over the batch axis",
    "reduce_prod": "multiplies over the batch axis",
    "reduce_sum": "sums over the batch axis",
    "rev": "reverses the batch axis",
    "sort": "sorts along the batch axis",
    "top_k": "compares rows along the batch axis",
}
