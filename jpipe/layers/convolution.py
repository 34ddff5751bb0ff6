"""Convolutions in the order of dimensions that XLA computes fast on CPUs.

Both gradients of a convolution are convolutions, and JAX writes them with permuted dimension
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
    """A convolution in the fast order, with the result of `conv_general_dilated`.

    Args:
      params: the parameters of the primitive.
      x: its first operand.
      kernel: its second operand.
    """
    numbers = params["dimension_numbers"]
    num_spatial = x.ndim - 2
    spatial = range(2, x.ndim)

    def order(spec: Sequence[int], positions: Sequence[int]) -> list[int]:
        return [spec[i] for i in positions]

    # A specification lists the dims of: (batch, feature, *spatial), for the kernel
    # (output feature, input feature, *spatial).
    of_x = order(numbers.lhs_spec, [0, *spatial, 1])
    of_kernel = order(numbers.rhs_spec, [*spatial, 1, 0])
    of_result = order(numbers.out_spec, [0, *spatial, 1])
    last = num_spatial + 1
    result = lax.conv_general_dilated(
        x.transpose(of_x),
        kernel.transpose(of_kernel),
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
    back = [of_result.index(dim) for dim in range(x.ndim)]
    return result.transpose(back)


def is_permuted(params: Mapping[str, Any], num_dims: int) -> bool:
    """Whether a convolution is in another order than the fast one."""
    numbers, last = params["dimension_numbers"], num_dims - 1
    image = (0, last, *range(1, last))
    kernel = (last, last - 1, *range(last - 1))
    return (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec) != (
        image,
        kernel,
        image,
    )
