"""ReLUs whose derivative reads their result, which the stash then holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpipe.layers.backward import trace_layer
from jpipe.layers.residuals import Rerun

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
W = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def two_layers(ps, xs, _):
    return nnx.relu(xs[0] @ ps[0]) @ ps[1]


def kept_operand(ps, xs, _):
    y = xs[0] @ ps[0]
    return nnx.relu(y) @ ps[1] + jnp.sin(y) * jnp.where(y > 0, y, 1)


def other_threshold(ps, xs, _):
    y = xs[0] @ ps[0]
    return jnp.where(y > 1, nnx.relu(y), 0) @ ps[1]


def complex_factor(ps, xs, _):
    return jnp.abs(nnx.relu(xs[0] @ ps[0]) * (1 + 2j)) @ ps[1]


@pytest.mark.parametrize(
    "layer, holds_result",
    [(two_layers, True), (kept_operand, False), (other_threshold, False), (complex_factor, True)],
)
def test_stash_and_gradients(layer, holds_result):
    programs = [
        trace_layer(layer, [W, W], [X], rerun=Rerun(compares_results=compares_results))
        for compares_results in (False, True)
    ]
    rng = np.random.default_rng(0)
    ps = [jnp.asarray(rng.normal(size=W.shape), jnp.float32) for _ in range(2)]
    x = rng.normal(size=X.shape).astype(np.float32)
    x[0] = 0  # the operand of some is 0
    x[1, 0] = np.nan
    gy = jnp.asarray(rng.normal(size=X.shape), jnp.float32)
    want, vjp = jax.vjp(lambda ps, xs: layer(ps, xs, ()), ps, [jnp.asarray(x)])
    result = nnx.relu(x @ ps[0])
    for program in programs:
        (y,), stash, _ = program.forward_and_stash(ps, [jnp.asarray(x)], [])
        has_result = any(np.array_equal(a, result, equal_nan=True) for a in stash)
        assert has_result == (holds_result and program is programs[1])
        np.testing.assert_array_equal(y, want)
        gp, gx = program.backward(ps, stash, [gy])
        for got, gradient in zip([*gp, *gx], jax.tree.leaves(vjp(gy)), strict=True):
            np.testing.assert_allclose(got, gradient, rtol=1e-6)
