"""What backwards read, against the derivatives of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import soap_graphs

from jpipe import soap
from jpipe.soap.flatten import flatten
from jpipe.soap.residuals import derivative_reads

ONE = {
    "add": lambda x, y: x + y,
    "clamp": lambda x, y: jax.lax.clamp(0.2, x, 0.8),
    "cumsum": lambda x, y: jnp.cumsum(x, 0),
    "div": lambda x, y: x / y,
    "dot_general": lambda x, y: x @ y,
    "erf": lambda x, y: jax.lax.erf(x),
    "exp": lambda x, y: jnp.exp(x),
    "integer_pow": lambda x, y: x**3,
    "log": lambda x, y: jnp.log(x),
    "logistic": lambda x, y: jax.lax.logistic(x),
    "max": lambda x, y: jax.lax.max(x, y),
    "mul": lambda x, y: x * y,
    "neg": lambda x, y: -x,
    "pad": lambda x, y: jax.lax.pad(x, 0.0, ((1, 1, 0), (0, 0, 0))),
    "reduce_max": lambda x, y: x.max(1),
    "reduce_sum": lambda x, y: x.sum(1),
    "rsqrt": lambda x, y: jax.lax.rsqrt(x),
    "sin": lambda x, y: jnp.sin(x),
    "sqrt": lambda x, y: jax.lax.sqrt(x),
    "sub": lambda x, y: x - y,
    "tanh": lambda x, y: jnp.tanh(x),
}


@pytest.mark.parametrize("name", sorted(ONE))
def test_the_derivative_depends_on_what_it_is_said_to_read(name):
    """The gradient at other operands changes exactly if the derivative reads something."""
    rng = np.random.default_rng(0)
    x, y, other_x, other_y = rng.uniform(0.3, 0.7, (4, 3, 3)).astype(np.float32)
    (equation,) = [e for e in flatten(jax.make_jaxpr(ONE[name])(x, y), 100).equations if e.primitive == name]
    is_array = [v.literal is None for v in equation.inputs]
    values, masked = derivative_reads(equation, is_array)
    out, vjp = jax.vjp(ONE[name], x, y)
    _, other_vjp = jax.vjp(ONE[name], other_x, other_y)
    cotangent = jnp.ones_like(out)
    is_same = all(np.array_equal(a, b) for a, b in zip(vjp(cotangent), other_vjp(cotangent)))
    if not masked:  # a mask may be the same for other operands
        assert is_same == (not values)
    leaves = [np.shape(leaf) for leaf in jax.tree.leaves(vjp) if np.ndim(leaf)]
    assert bool(leaves) == bool(values or masked)


def kept(graph):
    """Shape and bytes per element of what is kept, without what has one number per row."""
    return sorted((t.shape, t.item_bytes) for t in graph.tensors if t.kept_for is not None and len(t.shape) > 1)


def test_a_softmax_is_kept_once():
    def loss(w, x):
        return (jax.nn.softmax((x @ w) @ x.T) @ x).sum()

    graph = soap.trace(loss, soap_graphs.weight(16, 16), soap_graphs.weight(32, 16))
    assert [each for each in kept(graph) if each[0] == (32, 32)] == [((32, 32), 4)]


def test_a_maximum_between_products_is_kept_once():
    def loss(w, x):
        return (jnp.maximum(x @ w[0], 0) @ w[1]).sum()

    weights = [soap_graphs.weight(16, 64), soap_graphs.weight(64, 8)]
    graph = soap.trace(loss, weights, soap_graphs.weight(32, 16))
    assert kept(graph) == [((32, 64), 4)]


def test_a_relu_keeps_its_mask_beside_its_result():
    def loss(w, x):
        return (jax.nn.relu(x @ w[0]) @ w[1]).sum()

    weights = [soap_graphs.weight(16, 64), soap_graphs.weight(64, 8)]
    graph = soap.trace(loss, weights, soap_graphs.weight(32, 16))
    assert kept(graph) == [((32, 64), 1), ((32, 64), 4)]


def test_a_relu_before_a_pooling_is_kept_with_a_mask():
    """A pooling reads an array: it computes none again."""

    def loss(w, x):
        y = jax.nn.relu(x @ w)
        window = dict(window_dimensions=(2, 1), window_strides=(2, 1), padding="VALID")
        return jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, **window).sum()

    graph = soap.trace(loss, soap_graphs.weight(16, 8), soap_graphs.weight(32, 16))
    assert kept(graph) == [((32, 8), 1), ((32, 8), 4)]


def test_linear_functions_keep_nothing_but_their_input():
    def loss(w, x):
        return (x @ w["a"] + x @ w["b"] - 3.0).sum()

    weights = {"a": soap_graphs.weight(16, 8), "b": soap_graphs.weight(16, 8)}
    graph = soap.trace(loss, weights, soap_graphs.weight(32, 16))
    assert kept(graph) == []


def test_a_forward_alone_keeps_nothing():
    def loss(w, x):
        return jnp.tanh(x @ w).sum()

    arrays = soap_graphs.weight(16, 8), soap_graphs.weight(32, 16)
    assert kept(soap.trace(loss, *arrays, backward=False)) == []
