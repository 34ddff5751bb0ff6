"""The order of dims in which a layer reads its weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jpipe.layers.backward import trace_layer
from jpipe.layers.read_orders import read_orders
from jpipe.packing import Part, Place

IMAGES = jax.ShapeDtypeStruct((2, 8, 8, 3), jnp.float32)


def convolution(kernel, x, dims=("NHWC", "HWIO", "NHWC"), stride=1):
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=dims)


CASES = {
    "convolution": ((3, 3, 3, 4), convolution, (3, 0, 1, 2)),
    "strides": ((3, 3, 3, 4), lambda k, x: convolution(k, x, stride=2), (3, 0, 1, 2)),
    "output features first": ((4, 3, 3, 3), lambda k, x: convolution(k, x, ("NHWC", "OHWI", "NHWC")), ()),
    "cast": ((3, 3, 3, 4), lambda k, x: convolution(k.astype("bfloat16"), x.astype("bfloat16")), (3, 0, 1, 2)),
    "transposed first": ((4, 3, 3, 3), lambda k, x: convolution(k.transpose(1, 2, 3, 0), x), ()),
    "of one pixel": ((1, 1, 3, 4), convolution, ()),
    "product": ((3, 4), lambda k, x: x @ k, ()),
    "sum over a dim between": ((2, 3, 4), lambda k, x: jnp.einsum("bhwi,uio->bhwuo", x, k), (0, 2, 1)),
    "sum over the first dim": ((3, 2, 4), lambda k, x: jnp.einsum("bhwi,iuo->bhwuo", x, k), ()),
    "two orders": ((3, 3, 3, 3), lambda k, x: convolution(k, convolution(k, x), ("NHWC", "HWOI", "NHWC")), ()),
    "also squared": ((3, 3, 3, 4), lambda k, x: convolution(k, x) + jnp.sum(k**2), ()),
}


@pytest.mark.parametrize("shape, layer, want", CASES.values(), ids=CASES)
def test_order(shape, layer, want):
    kernel = jax.ShapeDtypeStruct(shape, jnp.float32)
    program = trace_layer(lambda ps, xs, _: layer(ps[0], xs[0]), [kernel], [IMAGES])
    assert read_orders(program) == [want]


def test_a_part_in_the_order_of_a_leaf():
    place = Place("a", 2, 0, 1, (2, 3, 4), flat=True, order=(2, 0, 1))
    part = Part.of_leaf(place, 0)
    array = np.arange(2 * 30.0).reshape(2, 30)
    leaves = array[:, 2:26].reshape(2, 2, 3, 4)
    in_order = part.in_order(part.of(jnp.asarray(array)))
    np.testing.assert_array_equal(in_order.reshape(2, 4, 2, 3), np.moveaxis(leaves, 3, 1))
    np.testing.assert_array_equal(part.restored(in_order), array[:, 2:26])
    np.testing.assert_array_equal(part.ordered(jnp.asarray(leaves[0])), np.moveaxis(leaves[0], 2, 0))
    assert part.holds(place, 0) and not part.holds(Place("a", 2, 0, 1, (4, 3, 2), flat=True, order=(1, 0, 2)), 0)
