"""Convolutions in the form that XLA computes fast.

A convolution that sums over a whole dim of its input, or does not move along it, is a matrix product: one with windows
of 1 by 1, and the gradient by its weights. Layers are traced with a product in its place. XLA:CPU computes a product
two to six times faster. On GPUs a product reads its operand out of a packed array without a copy, which a convolution
does not.

Both gradients of another convolution are convolutions, and JAX writes them with permuted dimension
numbers. XLA:CPU brings a convolution into its fast order only at the top level of a program. Inside
the body of a loop or the branch of a `cond`, where a pipeline computes, XLA:CPU runs a permuted
convolution as a scalar loop, which is 15 to 30 times slower. Layers are therefore traced with
transposes around every permuted convolution. On other platforms the compiler merges the transposes
with the convolution.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax

NAME = "conv_general_dilated"
"""The name of the primitive."""


def convolve(params: Mapping[str, Any], x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A convolution in the fast form, with the result of `conv_general_dilated`.

    Args:
      params: the parameters of the primitive.
      x: its first operand.
      kernel: its second operand.
    """
    summed = _summed_dims(params, x.shape, kernel.shape)
    if summed is not None:
        return _product(params, x, kernel, summed)
    numbers = params["dimension_numbers"]
    num_spatial = x.ndim - 2
    spatial = range(2, x.ndim)

    def order(spec: Sequence[int], positions: Sequence[int]) -> list[int]:
        return [spec[i] for i in positions]

    # A specification lists the dims of: (batch, feature, *spatial), for the kernel
    # (output feature, input feature, *spatial).
    x_dims = order(numbers.lhs_spec, [0, *spatial, 1])
    kernel_dims = order(numbers.rhs_spec, [*spatial, 1, 0])
    result_dims = order(numbers.out_spec, [0, *spatial, 1])
    last = num_spatial + 1
    result = lax.conv_general_dilated(
        x.transpose(x_dims),
        kernel.transpose(kernel_dims),
        window_strides=params["window_strides"],
        padding=params["padding"],
        lhs_dilation=params["lhs_dilation"],
        rhs_dilation=params["rhs_dilation"],
        dimension_numbers=lax.ConvDimensionNumbers(
            lhs_spec=(0, last, *range(1, last)),
            rhs_spec=(last, num_spatial, *range(num_spatial)),
            out_spec=(0, last, *range(1, last)),
        ),
        feature_group_count=params["feature_group_count"],
        batch_group_count=params["batch_group_count"],
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )
    back = [result_dims.index(dim) for dim in range(x.ndim)]
    return result.transpose(back)


def is_slow(params: Mapping[str, Any], x: Sequence[int], kernel: Sequence[int]) -> bool:
    """Returns whether a convolution of arrays of these shapes has a faster form."""
    if _summed_dims(params, x, kernel) is not None:
        return True
    numbers, last = params["dimension_numbers"], len(x) - 1
    image = (0, last, *range(1, last))
    window = (last, last - 1, *range(last - 1))
    fast = (image, window, image)
    return (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec) != fast


def _summed_dims(params: Mapping[str, Any], x: Sequence[int], kernel: Sequence[int]) -> list[int] | None:
    """The spatial dims, from 0, that a matrix product sums over in place of the convolution; None if there is no such
    product.

    In each spatial dim the window is the whole input, which is summed, or one position.
    """
    numbers = params["dimension_numbers"]
    if params["feature_group_count"] > 1 or params["batch_group_count"] > 1:
        return None
    summed = []
    for i, (x_dims, kernel_dims) in enumerate(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], strict=True)):
        window = kernel[kernel_dims]
        is_dense = params["lhs_dilation"][i] == 1 and not any(params["padding"][i])
        if is_dense and window == x[x_dims] and params["rhs_dilation"][i] == 1:
            summed.append(i)
        elif not (is_dense and window == 1 and params["window_strides"][i] == 1):
            return None
    return summed


def _product(params: Mapping[str, Any], x: jax.Array, kernel: jax.Array, summed: Sequence[int]) -> jax.Array:
    """The convolution as a matrix product that sums over the input features and some spatial dims."""
    numbers = params["dimension_numbers"]
    # Dims by their number in a specification: 0 batch or output feature, 1 feature, 2.. spatial.
    both = [1, *(2 + i for i in summed)]
    x_dims = [numbers.lhs_spec[k] for k in both]
    kernel_dims = [numbers.rhs_spec[k] for k in both]
    free = [k for k in range(2, x.ndim) if k not in both]
    # The kernel has one position along the free spatial dims.
    kernel = kernel.transpose(*kernel_dims, *(numbers.rhs_spec[k] for k in [*free, 0]))
    kernel = kernel.reshape(*kernel.shape[: len(both)], kernel.shape[-1])
    result = lax.dot_general(
        x,
        kernel,
        ((x_dims, list(range(len(both)))), ((), ())),
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )
    # The product has the free dims of x in their order, then the output feature. A summed spatial dim has one position.
    order = sorted([0, *free], key=lambda k: numbers.lhs_spec[k])
    order += [1, *both[1:]]
    result = lax.expand_dims(result, range(result.ndim, x.ndim))
    place = dict(zip(numbers.out_spec, range(x.ndim)))  # dim of the result -> number
    return result.transpose([order.index(place[dim]) for dim in range(x.ndim)])
