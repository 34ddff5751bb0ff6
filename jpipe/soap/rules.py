"""A rule for each primitive of JAX: its loops, and the boxes that they read and write.

To teach the search a primitive, write its rule here: a function of an equation that returns a `Nest`, under its name in
`RULES`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from jpipe.soap.flatten import FlatEquation, stack_access
from jpipe.soap.regions import Access, DimMap, Step, identity, plain, reshape

ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp clz complex conj
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
    igammac imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or
    population_count pow real reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor""".split()
)

RANDOM = frozenset(
    """random_bits random_clone random_fold_in random_gamma random_seed random_split random_unwrap random_wrap
    rng_bit_generator rng_uniform threefry2x32""".split()
)
"""Random numbers are computed where they are used, from a key that all devices have: they cost nothing here."""


@dataclasses.dataclass(frozen=True)
class Nest:
    """An equation as loops.

    Attributes:
      sizes: turns of each loop.
      can_split: whether each loop may be split.
      reads: per input, the box of it that a box of loops needs.
      writes: per output and dim, the loop that it follows, or None.
      flops: FLOPs per turn of the innermost loop.
      num_differentiable: the number of inputs that cost FLOPs in the backward, if they have gradients.
    """

    sizes: tuple[int, ...]
    can_split: tuple[bool, ...]
    reads: tuple[Access, ...]
    writes: tuple[tuple[int | None, ...], ...]
    flops: float = 1.0


def _dot_general(equation: FlatEquation) -> Nest:
    left, right = equation.inputs
    (lc, rc), (lb, rb) = equation.params["dimension_numbers"]
    left_free = [i for i in range(len(left.shape)) if i not in (*lc, *lb)]
    right_free = [i for i in range(len(right.shape)) if i not in (*rc, *rb)]
    left_dims = [*lb, *left_free]
    num_out = len(left_dims) + len(right_free)
    left_loops = {d: i for i, d in enumerate(left_dims)}
    right_loops = {d: i for i, d in enumerate(rb)}
    right_loops |= {d: len(left_dims) + i for i, d in enumerate(right_free)}
    for i, (a, b) in enumerate(zip(lc, rc)):
        left_loops[a] = right_loops[b] = num_out + i
    sizes = [left.shape[d] for d in left_dims] + [right.shape[d] for d in right_free]
    sizes += [left.shape[d] for d in lc]
    reads = tuple(
        (plain(value.shape, [loops[d] for d in range(len(value.shape))]),)
        for value, loops in ((left, left_loops), (right, right_loops))
    )
    return Nest(tuple(sizes), (True,) * len(sizes), reads, (tuple(range(num_out)),), 2.0)


def _conv_general_dilated(equation: FlatEquation) -> Nest:
    image, kernel = equation.inputs
    (output,) = equation.outputs
    params = equation.params
    dims = params["dimension_numbers"]
    lhs, rhs, out = dims.lhs_spec, dims.rhs_spec, dims.out_spec
    groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    rank = len(out)
    sizes = list(output.shape)
    can_split = [True] * rank
    features = rank  # the loop over input features
    sizes.append(kernel.shape[rhs[1]])
    can_split.append(groups == 1)
    image_maps: dict[int, DimMap] = {
        lhs[0]: DimMap(image.shape[lhs[0]], out[0] if batch_groups == 1 else None),
        lhs[1]: DimMap(image.shape[lhs[1]], features),
    }
    taps = 1
    for i in range(rank - 2):
        size = kernel.shape[rhs[2 + i]]
        taps *= size
        image_maps[lhs[2 + i]] = DimMap(
            image.shape[lhs[2 + i]],
            out[2 + i],
            stride=params["window_strides"][i],
            offset=-params["padding"][i][0],
            width=(size - 1) * params["rhs_dilation"][i] + 1,
            dilation=params["lhs_dilation"][i],
        )
    step = tuple(image_maps[d] for d in range(rank))
    access: Access = (step,)
    if groups > 1:  # the features of the group to which an output feature belongs
        per_group = output.shape[out[1]] // groups
        group = DimMap(groups, out[1], divisor=per_group)
        first = tuple(group if d == lhs[1] else step[d] for d in range(rank))
        width = kernel.shape[rhs[1]]
        members = DimMap(image.shape[lhs[1]], lhs[1], stride=width, width=width)
        second = tuple(members if d == lhs[1] else DimMap(image.shape[d], d) for d in range(rank))
        access = (first, second)
    kernel_dims: list[int | None] = [None] * rank
    kernel_dims[rhs[0]] = out[1]
    kernel_dims[rhs[1]] = features
    if batch_groups > 1:
        can_split = [False] * len(sizes)
    return Nest(
        tuple(sizes),
        tuple(can_split),
        (access, (plain(kernel.shape, kernel_dims),)),
        (tuple(range(rank)),),
        2.0 * taps,
    )


def _reduction(equation: FlatEquation, can_split: bool = True) -> Nest:
    shape = equation.inputs[0].shape
    axes = equation.params.get("axes", equation.params.get("dimensions", ()))
    kept = tuple(i for i in range(len(shape)) if i not in axes)
    reads = tuple(
        (identity(shape),) if value.shape == shape else (plain(value.shape, ()),) for value in equation.inputs
    )
    splits = tuple(can_split or i in kept for i in range(len(shape)))
    return Nest(shape, splits, reads, (kept,) * len(equation.outputs))


_whole_reduction = functools.partial(_reduction, can_split=False)


def _reduce_window(equation: FlatEquation) -> Nest:
    value, (output,) = equation.inputs[0], equation.outputs
    params = equation.params
    rank = len(output.shape)
    ones = (1,) * rank
    base = params.get("base_dilation") or ones
    inside = params.get("window_dilation") or ones
    window = params["window_dimensions"]
    step = tuple(
        DimMap(
            value.shape[d],
            d,
            stride=params["window_strides"][d],
            offset=-params["padding"][d][0],
            width=(window[d] - 1) * inside[d] + 1,
            dilation=base[d],
        )
        for d in range(rank)
    )
    return Nest(
        output.shape,
        (True,) * rank,
        ((step,), *[((),)] * (len(equation.inputs) - 1)),
        (tuple(range(rank)),),
        float(math.prod(window)),
    )


def _along(axis_name: str) -> Callable[[FlatEquation], Nest]:
    """Primitives that mix the elements along one dim and keep the shape."""

    def rule(equation: FlatEquation) -> Nest:
        shape = equation.inputs[0].shape
        axis = equation.params[axis_name] % max(len(shape), 1)
        loops = tuple(range(len(shape)))
        return Nest(
            shape,
            tuple(i != axis for i in loops),
            ((identity(shape),),) * len(equation.inputs),
            (loops,) * len(equation.outputs),
            float(max(1, math.ceil(math.log2(max(shape[axis], 2))))),
        )

    return rule


def _top_k(equation: FlatEquation) -> Nest:
    shape = equation.inputs[0].shape
    last = len(shape) - 1
    loops = tuple(range(last))
    return Nest(
        shape,
        (*(True,) * last, False),
        ((identity(shape),),),
        ((*loops, None),) * len(equation.outputs),
        float(max(1, math.ceil(math.log2(max(shape[last], 2))))),
    )


def _gather(equation: FlatEquation) -> Nest:
    operand, indices = equation.inputs
    (output,) = equation.outputs
    dims = equation.params["dimension_numbers"]
    slices = equation.params["slice_sizes"]
    rank = len(output.shape)
    batch = [i for i in range(rank) if i not in dims.offset_dims]
    # The last dim of the indices holds the coordinates.
    index_step = (
        *[DimMap(n, loop) for n, loop in zip(indices.shape[:-1], batch)],
        DimMap(indices.shape[-1], None),
    )
    batching = dict(zip(dims.operand_batching_dims, dims.start_indices_batching_dims))
    offsets = iter(dims.offset_dims)
    maps = []
    for d, size in enumerate(operand.shape):
        if d in batching:
            maps.append(DimMap(size, batch[batching[d]]))
        elif d in dims.collapsed_slice_dims:
            maps.append(DimMap(size, None))
        else:
            loop = next(offsets)
            maps.append(DimMap(size, loop if slices[d] == size else None))
    return Nest(
        output.shape,
        (True,) * rank,
        ((tuple(maps),), (index_step,)),
        (tuple(range(rank)),),
    )


def _dynamic_slice(equation: FlatEquation) -> Nest:
    operand, (output,) = equation.inputs[0], equation.outputs
    dims = [d if a == b else None for d, (a, b) in enumerate(zip(operand.shape, output.shape))]
    loops = tuple(range(len(output.shape)))
    scalars = [((),)] * (len(equation.inputs) - 1)
    return Nest(
        output.shape,
        (True,) * len(loops),
        ((plain(operand.shape, dims),), *scalars),
        (loops,),
    )


def _dynamic_update_slice(equation: FlatEquation) -> Nest:
    operand, update = equation.inputs[:2]
    whole = [a == b for a, b in zip(operand.shape, update.shape)]
    loops = tuple(range(len(whole)))
    dims = [i if same else None for i, same in enumerate(whole)]
    scalars = [((),)] * (len(equation.inputs) - 2)
    return Nest(
        operand.shape,
        tuple(whole),
        ((identity(operand.shape),), (plain(update.shape, dims),), *scalars),
        (loops,),
    )


def _concatenate(equation: FlatEquation) -> Nest:
    (output,) = equation.outputs
    axis, start, reads = equation.params["dimension"], 0, []
    for value in equation.inputs:
        step = list(identity(value.shape))
        step[axis] = DimMap(value.shape[axis], axis, offset=-start)
        reads.append((tuple(step),))
        start += value.shape[axis]
    return _by_output(output.shape, tuple(reads))


def _stack(equation: FlatEquation) -> Nest:
    (output,), axis, reads = equation.outputs, equation.params["axis"], []
    for i, value in enumerate(equation.inputs):
        shape = (*value.shape[:axis], 1, *value.shape[axis:])
        step = list(identity(shape))
        step[axis] = DimMap(1, axis, offset=-i)
        drop = identity(shape)
        reads.append((tuple(step), (*drop[:axis], *drop[axis + 1 :])))
    return _by_output(output.shape, tuple(reads))


def _stack_turns(equation: FlatEquation) -> Nest:
    (output,), turn_length = equation.outputs, equation.params["turn_length"]
    reads = tuple(stack_access(value.shape, i * turn_length, turn_length) for i, value in enumerate(equation.inputs))
    return _by_output(output.shape, reads)


def _pad(equation: FlatEquation) -> Nest:
    value, (output,) = equation.inputs[0], equation.outputs
    step = tuple(
        DimMap(n, d, offset=-low, dilation=inside + 1)
        for d, (n, (low, _, inside)) in enumerate(zip(value.shape, equation.params["padding_config"]))
    )
    return _by_output(output.shape, ((step,), ((),)))


def _by_output(shape: tuple[int, ...], reads: tuple[Access, ...]) -> Nest:
    loops = tuple(range(len(shape)))
    return Nest(shape, (True,) * len(shape), reads, (loops,))


RULES: dict[str, Callable[[FlatEquation], Nest]] = {
    "argmax": _whole_reduction,
    "argmin": _whole_reduction,
    "concatenate": _concatenate,
    "conv_general_dilated": _conv_general_dilated,
    "cumlogsumexp": _along("axis"),
    "cummax": _along("axis"),
    "cummin": _along("axis"),
    "cumprod": _along("axis"),
    "cumsum": _along("axis"),
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "pad": _pad,
    "reduce": _whole_reduction,
    "reduce_and": _reduction,
    "reduce_max": _reduction,
    "reduce_min": _reduction,
    "reduce_or": _reduction,
    "reduce_prod": _reduction,
    "reduce_sum": _reduction,
    "reduce_window_max": _reduce_window,
    "reduce_window_min": _reduce_window,
    "reduce_window_sum": _reduce_window,
    "sort": _along("dimension"),
    "stack": _stack,
    "stack_turns": _stack_turns,
    "top_k": _top_k,
}
"""Primitive -> its rule."""


def unsplittable(equation: FlatEquation) -> Nest:
    """The nest of an unknown primitive: one shard reads and writes everything."""
    shape = equation.outputs[0].shape
    return Nest(
        shape,
        (False,) * len(shape),
        tuple((plain(v.shape, [None] * len(v.shape)),) for v in equation.inputs),
        tuple(tuple(range(len(shape))) if v.shape == shape else (None,) * len(v.shape) for v in equation.outputs),
    )


def views(equation: FlatEquation) -> Sequence[Access] | None:
    """Per output, the access to the input at its position (or to the only one); None if the equation computes."""
    params, name = equation.params, equation.primitive
    shape = equation.inputs[0].shape if equation.inputs else ()
    (new, *_) = (value.shape for value in equation.outputs)
    step: Step
    if name == "view":
        return [params["access"]]
    if name in ("name", "optimization_barrier", "sharding_constraint", "stop_gradient"):
        return [(identity(value.shape),) for value in equation.inputs]
    if name == "transpose":
        position = {d: i for i, d in enumerate(params["permutation"])}
        step = plain(shape, [position[d] for d in range(len(shape))])
    elif name == "broadcast_in_dim":
        dims = params["broadcast_dimensions"]
        same = [d if n == new[d] else None for n, d in zip(shape, dims)]
        step = plain(shape, same)
    elif name in ("reshape", "squeeze", "expand_dims"):
        if params.get("dimensions") is not None and name == "reshape":
            return None
        step = reshape(shape, new)
    elif name == "rev":
        step = tuple(
            DimMap(n, d, stride=-1, offset=n - 1) if d in params["dimensions"] else DimMap(n, d)
            for d, n in enumerate(shape)
        )
    elif name == "slice":
        strides = params["strides"] or (1,) * len(shape)
        step = tuple(
            DimMap(n, d, stride=stride, offset=start)
            for d, (n, start, stride) in enumerate(zip(shape, params["start_indices"], strides))
        )
    elif name == "split":
        axis, start, accesses = params["axis"], 0, []
        for size in params["sizes"]:
            part = list(identity(shape))
            part[axis] = DimMap(shape[axis], axis, offset=start)
            accesses.append((tuple(part),))
            start += size
        return accesses
    else:
        return None
    return [(step,)]
