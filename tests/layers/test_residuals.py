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
from jpipe.layers.residuals import Rerun, cheapest_stash

CHEAP = {"add", "mul", "exp", "convert_element_type", "broadcast_in_dim", "reshape", "transpose"}
FLOPS_PER_BYTE = 4


def random_program(seed, products=False):
    """A forward of nine equations of x [4, 4], a parameter and earlier values, and its residuals."""
    rng = np.random.default_rng(seed)

    def function(p, x):
        values = [x]
        for _ in range(9):
            a, b = (values[i] for i in rng.integers(len(values), size=2))
            narrow = [v for v in values if v.shape == (4, 1)]
            kinds = ["exp", "add", "mul", "sum", "sin", "half", "p", "of p"]
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
            else:
                new = a * jnp.cumsum(p.reshape(1, 1), 0).astype(a.dtype)
            values.append(new)
        return [values[i] for i in rng.choice(10, size=3, replace=False)]

    shapes = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((4, 4), "f4")
    return Equations.trace(function, *shapes)


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


def time_with(program, kept, residuals, rereads_weights, products):
    """The time of a stash and of what runs again to compute the residuals of it; infinite if it is not enough."""
    parameter = program.inputs[0]
    of_weights = program.depending_on([parameter])
    producers = {v: eqn for eqn in program.equations for v in eqn.outvars}
    waiting, reruns, seen = list(residuals), {}, set()
    while waiting:
        v = waiting.pop()
        if v in kept or v in seen or v in program.constants:
            continue
        seen.add(v)
        if v is parameter and rereads_weights:
            continue
        eqn = producers.get(v)
        time = None if eqn is None else time_of(eqn) if products or eqn.primitive.name in CHEAP else None
        if time is None or (
            time and any(u in of_weights and u not in varying_of(program) for u in variables(eqn.invars))
        ):
            return math.inf
        reruns[id(eqn)] = time
        waiting += variables(eqn.invars)
    return 2 * bytes_of(kept) + sum(reruns.values())


def varying_of(program):
    return program.depending_on(program.inputs[1:])


def bytes_of(stash):
    return num_bytes(v.aval for v in stash)


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("rereads_weights", [False, True])
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.sampled(3, others="exhaustive")
def test_no_stash_is_cheaper(seed, rereads_weights, products):
    program = random_program(seed, products)
    varying = varying_of(program)
    residuals = [v for v in variables(program.outputs) if v in varying]
    rerun = Rerun(rereads_weights, FLOPS_PER_BYTE if products else 0)
    stash = cheapest_stash(program, program.inputs[:1], (), varying, residuals, rerun, {})

    def time(kept):
        return time_with(program, kept, residuals, rereads_weights, products)

    subsets = (kept for count in range(len(varying) + 1) for kept in itertools.combinations(list(varying), count))
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
    kind = trace_layer(layer_norm_and_product, p, x, rerun=Rerun(reads_weights=True))
    shapes = sorted(a.shape for a in kind.stash)
    assert shapes == [(2, 1), (2, 3), (2, 8)]
    on_any = kind.rereading(False)
    assert sum(a.shape == (2, 8) for a in on_any.stash) == 2
    assert on_any.rereading(True).stash == kind.stash


def test_a_backward_on_the_weights_of_its_forward_equals_the_plain_gradient():
    rng = np.random.default_rng(0)
    scale, kernel, x, gy = (rng.normal(size=shape).astype("f4") for shape in [(8,), (8, 3), (2, 8), (2, 3)])
    p = scale, kernel
    kind = trace_layer(layer_norm_and_product, p, x, rerun=Rerun(reads_weights=True))
    _, vjp = jax.vjp(lambda p, x: layer_norm_and_product(p, x, ()), p, x)
    want_p, want_x = vjp(gy)
    _, stash, _ = kind.forward_and_stash(p, [x])
    of_p, of_x = kind.backward(p, stash, [gy])
    also_x, left = kind.input_grad(p, stash, [gy])
    also_p = kind.weight_grad(p, stash, left)
    for got in ([*of_p, *of_x], [*also_p, *also_x]):
        for a, b in zip(got, [*want_p, want_x], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_what_takes_time_to_compute_of_weights_is_not_computed_again():
    """The product of two weights is not cheap, so `x` does not replace what it is multiplied with."""

    def layer(p, x, _):
        return jnp.tanh(x * (p @ p).sum())

    p, x = jax.ShapeDtypeStruct((4, 4), "f4"), jax.ShapeDtypeStruct((2, 8), "f4")
    kind = trace_layer(layer, p, x, rerun=Rerun(reads_weights=True))
    assert [a.shape for a in kind.stash] == [(2, 8), (2, 8)]


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
