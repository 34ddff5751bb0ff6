"""Convolutions of layers are traced in the order that XLA:CPU computes fast in loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jpipe.layers import convolution
from jpipe.layers.equations import Equations

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


def check(function, x, kernel):
    """Gradients through the equations equal JAX's, and all convolutions are in the fast order."""
    y, vjp = jax.vjp(function, x, kernel)
    dy = np.random.default_rng(1).normal(size=y.shape).astype("float32")

    def backward(x, kernel, dy):
        return [*jax.vjp(function, x, kernel)[1](dy)]

    equations = Equations.trace(backward, x, kernel, dy)
    for got, want in zip(equations(x, kernel, dy), vjp(dy), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    before = {*convolutions(jax.make_jaxpr(backward)(x, kernel, dy))}
    after = {*convolutions(jax.make_jaxpr(lambda *a: equations(*a))(x, kernel, dy))}
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
        y = lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.tanh(y)

    def function(x, kernel):
        def body(x, _):
            return lax.cond(x.sum() > 0, convolve, lambda x, _: x, x, kernel), None

        return lax.scan(body, x, length=3)[0]

    x, kernel = arrays()
    check(function, x, kernel[..., :4])
