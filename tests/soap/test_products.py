"""Products whose gradients need no transpose, against the gradients that JAX derives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jpipe.soap.products import product

CASES = {
    "dense": ((5, 3), (3, 4), (((1,), (0,)), ((), ()))),
    "weights first": ((3, 4), (3, 5), (((0,), (0,)), ((), ()))),
    "rows of weights": ((5, 3), (4, 3), (((1,), (1,)), ((), ()))),
    "heads": ((2, 5, 3), (3, 4, 6), (((2,), (0,)), ((), ()))),
    "batch": ((2, 5, 3), (2, 3, 4), (((2,), (1,)), ((0,), (0,)))),
    "batch last": ((5, 3, 2), (4, 2, 3), (((1,), (2,)), ((2,), (1,)))),
    "two sums": ((5, 3, 4), (4, 6, 3), (((1, 2), (2, 0)), ((), ()))),
    "vector": ((5, 3), (3,), (((1,), (0,)), ((), ()))),
    "all sums": ((5, 3), (3, 5), (((0, 1), (1, 0)), ((), ()))),
}


def params_of(dims, dtype=None):
    names = "dimension_numbers", "precision", "preferred_element_type"
    return tuple(zip(names, (dims, None, dtype)))


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_jax(name):
    left, right, dims = CASES[name]
    rng = np.random.default_rng(0)
    operands = [jnp.asarray(rng.normal(size=s), "f4") for s in (left, right)]
    value, pull = jax.vjp(lambda x, y: lax.dot_general(x, y, dims), *operands)
    ours, our_pull = jax.vjp(lambda x, y: product(x, y, params_of(dims)), *operands)
    np.testing.assert_array_equal(ours, value)
    cotangent = jnp.asarray(rng.normal(size=value.shape), "f4")
    for mine, wanted in zip(our_pull(cotangent), pull(cotangent)):
        np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-6)


def test_gradients_keep_the_dtypes_of_the_operands():
    dims = CASES["dense"][2]
    x, w = jnp.ones((5, 3), jnp.bfloat16), jnp.ones((3, 4), jnp.bfloat16)
    run = lambda x, w: product(x, w, params_of(dims, jnp.float32))  # noqa: E731
    value, pull = jax.vjp(run, x, w)
    assert value.dtype == jnp.float32
    assert [g.dtype for g in pull(value)] == [jnp.bfloat16] * 2


def test_the_gradient_of_a_weight_has_no_transpose():
    """JAX alone transposes the gradient of a `[K, N]` weight."""

    def primitives(run):
        def loss(x, w):
            return run(x, w).sum()

        jaxpr = jax.make_jaxpr(jax.grad(loss, 1))(jnp.ones((5, 3)), jnp.ones((3, 4)))
        return str(jaxpr)

    dims = CASES["dense"][2]
    assert "transpose[" in primitives(lambda x, w: lax.dot_general(x, w, dims))
    assert "transpose[" not in primitives(lambda x, w: product(x, w, params_of(dims)))
