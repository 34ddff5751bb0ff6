"""The order of dims in which a layer's products read its weights.

A library of products reads a weight in an order of its own: cuDNN wants the output features of a convolution first,
then the window, then the input features; cuBLAS wants the dims that a product sums over beside each other. XLA brings
a weight that lies otherwise into this order wherever it is read.
"""

from collections.abc import Sequence
from typing import Any

from jpipe.layers.backward import LayerProgram
from jpipe.layers.convolution import NAME as CONVOLUTION
from jpipe.layers.equations import contains

_AS_OPERAND = ("convert_element_type", "copy", "constrain", "transpose")
"""Operations whose result has the numbers of the operand, perhaps in another order or dtype."""


def read_orders(program: LayerProgram) -> list[tuple[int, ...]]:
    """For each parameter the order of its dims in which products of the forward read it; () for that which it has.

    A parameter that is read in several orders, or by other operations too, has () as well.
    """
    equations = program.forward_equations
    # Variable -> number of the parameter, and for each dim of the variable the dim of the parameter.
    dims_of: dict[Any, tuple[int, tuple[int, ...]]] = {}
    for j, v in enumerate(equations.inputs[: len(program.parameters)]):
        dims_of[v] = j, tuple(range(len(v.aval.shape)))
    orders: list[set[tuple[int, ...]]] = [set() for _ in program.parameters]
    for eqn in equations.equations:
        for operand, v in enumerate(eqn.invars):
            if not contains(dims_of, v):
                continue
            j, dims = dims_of[v]
            if eqn.primitive.name in _AS_OPERAND and operand == 0:
                permutation = eqn.params.get("permutation", range(len(dims)))
                dims_of[eqn.outvars[0]] = j, tuple(dims[d] for d in permutation)
            else:
                orders[j].add(tuple(dims[d] for d in _read_order(eqn, operand, len(dims))))
    return [_only(read, v.aval.shape) for read, v in zip(orders, equations.inputs)]


def _only(orders: set[tuple[int, ...]], shape: Sequence[int]) -> tuple[int, ...]:
    """The one order of all reads, if it is not that of the parameter. Dims of 1 are the same wherever they stand."""
    order = next(iter(orders)) if len(orders) == 1 else ()
    long = [dim for dim in order if shape[dim] > 1]
    return () if long == sorted(long) else order


def _read_order(eqn: Any, operand: int, num_dims: int) -> Sequence[int]:
    """The order in which an equation reads the dims of an operand."""
    if eqn.primitive.name == CONVOLUTION and operand == 1:
        features_out, features_in, *window = eqn.params["dimension_numbers"].rhs_spec
        return [features_out, *window, features_in]
    if eqn.primitive.name == "dot_general":
        contracted, batch = (dims[operand] for dims in eqn.params["dimension_numbers"])
        free = [d for d in range(num_dims) if d not in (*contracted, *batch)]
        sum_last, sum_first = [*batch, *free, *contracted], [*batch, *contracted, *free]
        return sum_first if sum_first == sorted(sum_first) else sum_last
    return range(num_dims)
