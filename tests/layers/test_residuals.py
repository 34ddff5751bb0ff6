"""The stash has the least bytes that are enough, by brute force and by hand."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.layers.avals import num_bytes
from jpipe.layers.backward import trace_layer
from jpipe.layers.equations import Equations, variables
from jpipe.layers.residuals import smallest_stash

CHEAP = {"add", "mul", "exp", "convert_element_type", "broadcast_in_dim"}


def random_program(seed):
    """A forward of nine equations of x [4, 4], a parameter and earlier values, and its residuals."""
    rng = np.random.default_rng(seed)

    def function(p, x):
        values = [x]
        for _ in range(9):
            a, b = (values[i] for i in rng.integers(len(values), size=2))
            narrow = [v for v in values if v.shape == (4, 1)]
            kind = rng.choice(["exp", "add", "mul", "sum", "sin", "half", "p"])
            if kind == "exp":
                new = jnp.exp(a)
            elif kind == "add":
                new = a.astype(jnp.float32) + b.astype(jnp.float32)
            elif kind == "mul":
                wide = narrow[0] if narrow else b
                new = a.astype(jnp.float32) * wide.astype(jnp.float32)
            elif kind == "sum":
                new = a.sum(1, keepdims=True)
            elif kind == "sin":
                new = jnp.cumsum(a, 0)
            elif kind == "half":
                new = a.astype(jnp.bfloat16)
            else:
                new = a * p.astype(a.dtype)
            values.append(new)
        return [values[i] for i in rng.choice(10, size=3, replace=False)]

    shapes = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((4, 4), "f4")
    return Equations.trace(function, *shapes)


def computable(program, kept):
    """What cheap equations compute from `kept`, without the parameter."""
    known = set(kept) | set(program.constants)
    for eqn in program.equations:
        if eqn.primitive.name in CHEAP and known.issuperset(variables(eqn.invars)):
            known.update(eqn.outvars)
    return known


def bytes_of(stash):
    return num_bytes(v.aval for v in stash)


@pytest.mark.parametrize("seed", range(40))
def test_no_set_of_fewer_bytes_is_enough(seed):
    program = random_program(seed)
    varying = program.depending_on(program.inputs[1:])
    residuals = [v for v in variables(program.outputs) if v in varying]
    stash = smallest_stash(program, 1, varying, residuals)
    assert computable(program, stash).issuperset(residuals)
    values = list(varying)
    enough = (
        bytes_of(kept)
        for count in range(len(values) + 1)
        for kept in itertools.combinations(values, count)
        if computable(program, kept).issuperset(residuals)
    )
    assert bytes_of(stash) == min(enough)


def stash_of(function, dtype=jnp.float32):
    """Shapes and dtypes that a layer stashes for inputs `[2, 8]`."""
    x = jax.ShapeDtypeStruct((2, 8), dtype)
    kind = trace_layer(lambda _, x, __: function(x), (), x)
    return sorted((a.shape, str(a.dtype)) for a in kind.stash)


def test_activations_are_followed_to_their_input():
    for function in (jax.nn.gelu, jax.nn.silu, jnp.tanh, jax.nn.softplus):
        assert stash_of(function) == [((2, 8), "float32")]


def test_a_cast_is_not_stashed():
    def layer(x):
        return (x.astype(jnp.float32) ** 2).astype(jnp.bfloat16)

    assert stash_of(layer, dtype=jnp.bfloat16) == [((2, 8), "bfloat16")]


def test_means_are_stashed_and_what_follows_is_not():
    def layer(x):
        x = x.astype(jnp.float32)
        centred = x - x.mean(1, keepdims=True)
        return centred * jax.lax.rsqrt((centred**2).mean(1, keepdims=True))

    shapes = stash_of(layer, dtype=jnp.bfloat16)
    assert shapes.count(((2, 8), "bfloat16")) == 1
    assert all(shape in [(2, 8), (2, 1), (2,)] for shape, _ in shapes)
    assert ((2, 8), "float32") not in shapes


def test_what_depends_on_weights_is_not_computed_from_other_weights():
    """The backward of PipeMare reads other weights than its forward, which computed the derivative."""
    x, gy = np.float32([[0.5, -1.0]]), np.float32([[1.0, 2.0]])
    p, other = np.float32([[2.0, 3.0]]), np.float32([[-4.0, 5.0]])

    def layer(p, x, _):
        return jnp.tanh(x * p)

    kind = trace_layer(layer, p, x)
    _, stash, _ = kind.forward_and_stash([p], [x])
    _, (of_x,) = kind.backward([other], stash, [gy])
    np.testing.assert_allclose(of_x, gy / np.cosh(x * p) ** 2 * other, rtol=1e-5)
