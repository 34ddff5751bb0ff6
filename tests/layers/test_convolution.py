"""Convolutions of layers are traced in a form that XLA computes fast in loops."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jpipe.layers import convolution
from jpipe.layers.equations import Equations

KERNEL = str.maketrans("NC", "OI")
FAST = lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))


def convolutions(jaxpr):
    """The dimension numbers of all convolutions, also of inner jaxprs."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name == convolution.NAME:
            yield eqn.params["dimension_numbers"]
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if hasattr(inner, "jaxpr"):
                    yield from convolutions(inner)


def arrays(groups=1, order="NHWC"):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 9, 10, 4)).astype("float32")
    kernel = rng.normal(size=(3, 2, 4 // groups, 6)).astype("float32")
    return (x.transpose(0, 3, 1, 2) if order == "NCHW" else x), kernel


def check_gradients(function, x, kernel):
    """Gradients through the equations equal JAX's.

    Returns:
      The convolutions of the gradients as JAX writes them, and those of the equations.
    """
    y, vjp = jax.vjp(function, x, kernel)
    dy = np.random.default_rng(1).normal(size=y.shape).astype("float32")

    def backward(x, kernel, dy):
        return [*jax.vjp(function, x, kernel)[1](dy)]

    equations = Equations.trace(backward, x, kernel, dy)
    for got, want in zip(equations(x, kernel, dy), vjp(dy), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    before = {*convolutions(jax.make_jaxpr(backward)(x, kernel, dy))}
    after = {*convolutions(jax.make_jaxpr(lambda *a: equations(*a))(x, kernel, dy))}
    return before, after


def check(function, x, kernel):
    """Gradients equal JAX's, and all convolutions are in the fast order."""
    before, after = check_gradients(function, x, kernel)
    assert before - {FAST} and after == {FAST}


@pytest.mark.parametrize("order", ["NHWC", "NCHW"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_gradients(groups, stride, order):
    def convolve(x, kernel):
        return lax.conv_general_dilated(
            x,
            kernel,
            (stride, stride),
            "SAME",
            rhs_dilation=(1, 2),
            dimension_numbers=(order, "HWIO", order),
            feature_group_count=groups,
        )

    check(convolve, *arrays(groups, order))


def test_in_a_loop_and_a_branch_of_a_layer():
    def convolve(x, kernel):
        y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.tanh(y)

    def function(x, kernel):
        def body(x, _):
            return lax.cond(x.sum() > 0, convolve, lambda x, _: x, x, kernel), None

        return lax.scan(body, x, length=3)[0]

    x, kernel = arrays()
    check(function, x, kernel[..., :4])


def primitives(function, *args):
    """The names of the primitives of a function's equations."""
    jaxpr = jax.make_jaxpr(lambda *a: Equations.trace(function, *args)(*a))(*args)
    return {eqn.primitive.name for eqn in jaxpr.eqns}


@pytest.mark.first_case
@pytest.mark.parametrize(
    "window",
    [
        (1, 1),
        (3, 5),
        pytest.param((3, 1), marks=pytest.mark.exhaustive),
        pytest.param((1, 5), marks=pytest.mark.exhaustive),
    ],
)
def test_products(window):
    """A convolution that sums over a whole dim, or does not move along it, is traced as a product."""
    rng = np.random.default_rng(0)
    sizes = {"N": 2, "C": 4, "H": 3, "W": 5}
    of_kernel = dict(zip("HWIO", [*window, 4, 6]))
    orders = list(itertools.permutations("NHWC"))
    for i, order in enumerate(orders):
        # Every order of the input, with other orders of the kernel and of the result.
        orders_of = order, orders[i * 7 % 24], orders[-i]
        names = tuple(map("".join, orders_of))
        names = names[0], names[1].translate(KERNEL), names[2]
        x = rng.normal(size=[sizes[d] for d in order]).astype("float32")
        kernel = rng.normal(size=[of_kernel[d] for d in names[1]]).astype("float32")

        def convolve(x, kernel, names=names):
            return lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=names)

        (got,) = Equations.trace(lambda *a: [convolve(*a)], x, kernel)(x, kernel)
        np.testing.assert_allclose(got, convolve(x, kernel), rtol=1e-4, atol=1e-4)
        found = primitives(lambda *a: [convolve(*a)], x, kernel)  # noqa: B023
        assert "dot_general" in found and convolution.NAME not in found


def test_gradients_of_a_product():
    def convolve(x, kernel):
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    x, kernel = arrays()
    before, after = check_gradients(convolve, x, kernel[:1, :1])
    assert before and not after


@pytest.mark.parametrize(
    "options",
    [
        {"window_strides": (2, 1)},
        {"padding": [(0, 0), (1, 0)]},
        {"lhs_dilation": (1, 2)},
        {"feature_group_count": 2},
        {"batch_group_count": 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_not_a_product(options):
    """Windows of 1 by 1 with a stride, padding, dilation or groups are convolutions."""
    x, kernel = arrays(options.get("feature_group_count", 1))
    options = {"window_strides": (1, 1), "padding": [(0, 0), (0, 0)], **options}

    def convolve(x, kernel):
        numbers = "NHWC", "HWIO", "NHWC"
        return [lax.conv_general_dilated(x, kernel, dimension_numbers=numbers, **options)]

    kernel = kernel[:1, :1]
    got = Equations.trace(convolve, x, kernel)(x, kernel)
    np.testing.assert_allclose(got[0], convolve(x, kernel)[0], rtol=1e-5)
    assert convolution.NAME in primitives(convolve, x, kernel)
