"""The stash is the cheapest that is enough, by brute force and by hand."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.layers.avals import num_bytes
from jpipe.layers.backward import trace_layer
from jpipe.layers.equations import Equations, variables
from jpipe.layers.residuals import AT_HAND, STASHED, UNREAD, Rerun, cheapest_stash

CHEAP = {"add", "mul", "exp", "convert_element_type", "broadcast_in_dim", "reshape", "transpose"}
FLOPS_PER_BYTE = 4


SHAPES = ((), (4,), (4, 4), (4, 4))
"""Of the parameters and the input of random programs: a number, a row, a matrix as large as the input."""


def random_program(seed, products=False):
    """A forward of nine equations of parameters, an input and earlier values, and its residuals."""
    return Equations.trace(random_function(seed, products), *(jax.ShapeDtypeStruct(s, "f4") for s in SHAPES))


def random_function(seed, products=False):
    def function(p, q, w, x):
        rng = np.random.default_rng(seed)
        values = [x]
        for _ in range(9):
            a, b = (values[i] for i in rng.integers(len(values), size=2))
            narrow = [v for v in values if v.shape == (4, 1)]
            kinds = ["exp", "add", "mul", "sum", "sin", "half", "p", "q", "w", "of p"]
            kind = rng.choice([*kinds, "product", "product", "rows"] if products else kinds)
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
            elif kind == "product":
                a, b = (jnp.broadcast_to(v, (4, 4)).astype(jnp.float32) for v in (a, b))
                new = a @ b.T
            elif kind == "rows":
                new = jnp.concatenate([a, a])[2:6]
            elif kind == "p":
                new = a * p.astype(a.dtype)
            elif kind == "q":
                new = a * q.astype(a.dtype)[None]
            elif kind == "w":
                new = a * jnp.exp(w).astype(a.dtype)
            else:
                new = a * jnp.cumsum(p.reshape(1, 1), 0).astype(a.dtype)
            values.append(new)
        return [values[i] for i in rng.choice(10, size=3, replace=False)]

    return function


def time_of(eqn):
    """What an equation takes to run again, in bytes; None if it may not run again."""
    written = num_bytes(v.aval for v in eqn.outvars)
    if eqn.primitive.name in CHEAP:
        return 0
    if eqn.primitive.name in ("concatenate", "slice"):
        return written
    if eqn.primitive.name == "dot_general":
        rows, columns = eqn.outvars[0].aval.shape
        return written + -(-2 * rows * columns * 4 // FLOPS_PER_BYTE)
    return None


def time_with(program, kept, residuals, weight_accesses, products):
    """The time of a stash and of what runs again to compute the residuals of it; infinite if it is not enough."""
    parameters = program.inputs[:3]
    of_weights = program.depending_on(parameters) - varying_of(program)
    producers = {v: eqn for eqn in program.equations for v in eqn.outvars}
    waiting, reruns, seen = list(residuals), {}, set()
    if weight_accesses == UNREAD and not of_weights.isdisjoint(kept):
        return math.inf
    while waiting:
        v = waiting.pop()
        if v in kept or v in seen or v in program.constants:
            continue
        seen.add(v)
        if v in parameters and weight_accesses == AT_HAND:
            continue
        eqn = producers.get(v)
        time = None if eqn is None else time_of(eqn) if products or eqn.primitive.name in CHEAP else None
        if time is None or (time and not of_weights.isdisjoint(variables(eqn.invars))):
            return math.inf
        reruns[id(eqn)] = time
        waiting += variables(eqn.invars)
    return 2 * bytes_of(kept) + sum(reruns.values())


def needed_for(program, residuals):
    """The variables that the residuals depend on."""
    needed = set(residuals)
    for eqn in reversed(program.equations):
        if needed.intersection(eqn.outvars):
            needed.update(variables(eqn.invars))
    moving = program.depending_on(program.inputs)
    return [v for v in (*program.inputs, *(v for e in program.equations for v in e.outvars)) if v in needed & moving]


def varying_of(program):
    return program.depending_on(program.inputs[3:])


def bytes_of(stash):
    return num_bytes(v.aval for v in stash)


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("weight_accesses", [AT_HAND, STASHED, UNREAD])
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.sampled(3, others="exhaustive")
def test_no_stash_is_cheaper(seed, weight_accesses, products):
    program = random_program(seed, products)
    parameters = program.inputs[:3]
    residuals = [v for v in variables(program.outputs) if v in varying_of(program)]
    rerun = Rerun(weight_accesses, FLOPS_PER_BYTE if products else 0)
    accesses = dict.fromkeys(parameters, weight_accesses)
    stash = cheapest_stash(program, parameters, residuals, rerun, accesses)

    def time(kept):
        return time_with(program, kept, residuals, weight_accesses, products)

    nodes = needed_for(program, residuals)
    subsets = (kept for count in range(len(nodes) + 1) for kept in itertools.combinations(nodes, count))
    assert time(stash) == min(map(time, subsets)) < math.inf


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


def layer_norm_and_product(p, x, _):
    scale, kernel = p
    centred = x - x.mean(1, keepdims=True)
    rate = jax.lax.rsqrt((centred**2).mean(1, keepdims=True))
    return jnp.tanh(centred * rate * scale[None] @ kernel)


def test_a_backward_on_the_weights_of_its_forward_normalises_again():
    p = jax.ShapeDtypeStruct((8,), "f4"), jax.ShapeDtypeStruct((8, 3), "f4")
    x = jax.ShapeDtypeStruct((2, 8), "f4")
    kind = trace_layer(layer_norm_and_product, p, x, rerun=Rerun(AT_HAND))
    shapes = sorted(a.shape for a in kind.stash)
    assert shapes == [(2, 1), (2, 3), (2, 8)]
    on_others = kind.rereading(STASHED)
    assert sorted(a.shape for a in on_others.stash) == [(1, 8), (2, 1), (2, 3), (2, 8)]
    whole = kind.rereading(UNREAD)
    assert sum(a.shape == (2, 8) for a in whole.stash) == 2
    assert whole.rereading(AT_HAND).stash == kind.stash


def test_a_backward_on_the_weights_of_its_forward_equals_the_plain_gradient():
    rng = np.random.default_rng(0)
    scale, kernel, x, gy = (rng.normal(size=shape).astype("f4") for shape in [(8,), (8, 3), (2, 8), (2, 3)])
    p = scale, kernel
    kind = trace_layer(layer_norm_and_product, p, x, rerun=Rerun(AT_HAND))
    _, vjp = jax.vjp(lambda p, x: layer_norm_and_product(p, x, ()), p, x)
    want_p, want_x = vjp(gy)
    _, stash, _ = kind.forward_and_stash(p, [x])
    of_p, of_x = kind.backward(p, stash, [gy])
    also_x, left = kind.input_grad(p, stash, [gy])
    also_p = kind.weight_grad(p, stash, left)
    for got in ([*of_p, *of_x], [*also_p, *also_x]):
        for a, b in zip(got, [*want_p, want_x], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weight_accesses", [AT_HAND, STASHED])
def test_what_takes_time_to_compute_of_weights_is_not_computed_again(weight_accesses):
    """The product of two weights is not cheap, so its sum is stashed."""

    def layer(p, x, _):
        return jnp.tanh(x * (p @ p).sum())

    p, x = jax.ShapeDtypeStruct((4, 4), "f4"), jax.ShapeDtypeStruct((2, 8), "f4")
    kind = trace_layer(layer, p, x, rerun=Rerun(weight_accesses))
    assert [a.shape for a in kind.stash] == [(2, 8), ()]


def test_a_parameter_is_stashed_in_the_dtype_that_it_is_cast_to():
    def layer(p, x, _):
        return layer_norm_and_product([a.astype(jnp.bfloat16) for a in p], x, _)

    p = jax.ShapeDtypeStruct((8,), "f4"), jax.ShapeDtypeStruct((8, 3), "f4")
    x = jax.ShapeDtypeStruct((2, 8), "bfloat16")
    stash = trace_layer(layer, p, x, rerun=Rerun(STASHED)).stash
    assert [str(a.dtype) for a in stash if a.shape == (1, 8)] == ["bfloat16"]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_parameter_is_stashed_where_it_is_smaller_than_what_follows_from_it(rows):
    """A table of positions is, if a microbatch has more rows than one."""

    def layer(p, x, _):
        positions = jnp.cumsum(x, 1)
        return jnp.tanh(positions + p[None]) * positions

    p, x = jax.ShapeDtypeStruct((4, 8), "f4"), jax.ShapeDtypeStruct((rows, 4, 8), "f4")
    kind = trace_layer(layer, p, x, rerun=Rerun(STASHED))
    assert sorted(a.shape for a in kind.stash) == sorted([(rows, 4, 8), (1, 4, 8)])
    p, x = jnp.ones((4, 8)), jnp.ones((rows, 4, 8))
    _, stash, _ = kind.forward_and_stash([p], [x])
    assert any(bool((value[0] == p).all()) for value in stash) == (rows > 1)


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.sampled(3, others="exhaustive")
def test_a_backward_on_other_weights_is_the_same_whatever_is_stashed(seed, products):
    """What the forward has computed is that of its weights, and the rest of the backward reads its own."""
    function = random_function(seed, products)
    rng = np.random.default_rng(seed)
    *p, x = (rng.uniform(0.2, 0.6, shape).astype("f4") for shape in SHAPES)
    others = [rng.uniform(0.2, 0.6, shape).astype("f4") for shape in SHAPES[:-1]]
    whole = trace_layer(lambda p, x, _: function(*p, x), p, x)
    _, stash, _ = whole.forward_and_stash(p, [x])
    gradients = [rng.normal(size=y.shape).astype(y.dtype) for y in whole.outputs]
    want_p, want_x = whole.backward(others, stash, gradients)
    kind = trace_layer(lambda p, x, _: function(*p, x), p, x, rerun=Rerun(STASHED, FLOPS_PER_BYTE * products))
    _, stash, _ = kind.forward_and_stash(p, [x])
    of_p, of_x = kind.backward(others, stash, gradients)
    also_x, left = kind.input_grad(others, stash, gradients)
    only = [v if j in kind.weight_stash else None for j, v in enumerate(stash)]
    also_p = kind.weight_grad(others, only, left)
    for got in ([*of_p, *of_x], [*also_p, *also_x]):
        for a, b in zip(got, [*want_p, *want_x], strict=True):
            assert np.isfinite(b).all()
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


def test_random_programs_stash_parameters():
    """Else the tests above would not test them."""
    shapes = []
    for seed in range(20):
        function = random_function(seed)
        p, x = [jnp.zeros(s) for s in SHAPES[:-1]], jnp.zeros(SHAPES[-1])
        kind = trace_layer(lambda p, x, _, function=function: function(*p, x), p, x, rerun=Rerun(STASHED))
        shapes.append({a.shape for a in kind.stash})
    assert sum(shape in {(), (1, 1)} for kept in shapes for shape in kept) >= 5
    assert sum((1, 4) in kept for kept in shapes) >= 2


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
