"""Side effects of layers run as in plain JAX: once per forward of a microbatch."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import io_callback

import jpipe
from jpipe.layers.backward import trace_layer
from jpipe.layers.vjp import OrderedEffectError

KEY = jax.random.key(0)
N, B, D = 4, 8, 3
LINEAR = functools.partial(nnx.Linear, D, D)


def loss_fn(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def batch_of():
    rng = np.random.default_rng(0)
    names = ("inputs", "targets")
    return {k: rng.normal(size=(B, D)).astype(np.float32) for k in names}


class Calls:
    """Layers that report what they see to a list on the host."""

    def __init__(self):
        self.seen = collections.defaultdict(list)

    def layer(self, name):
        def report(x):
            jax.debug.callback(lambda v: self.seen[name].append(np.asarray(v)), x)
            return x

        return report

    def rows(self, name):
        """All rows seen, sorted, for they come in any order."""
        jax.effects_barrier()
        rows = np.concatenate(self.seen.pop(name))
        return rows[np.lexsort(rows.T)]


def ordered(rows):
    return rows[np.lexsort(np.asarray(rows).T)]


CASES = {
    "gpipe": (jpipe.schedules.gpipe(2, N), {}, 1),
    "1f1b paired": (jpipe.schedules.one_f_one_b(2, N), {}, 1),
    "1f1b unit": (jpipe.schedules.one_f_one_b(2, N, ticks="unit"), {}, 1),
    "split backward": (jpipe.schedules.zero_bubble_h1(2, N), {}, 1),
    "recompute": (jpipe.schedules.gpipe(2, N), {"recompute": "full"}, 2),
    "policy": (
        jpipe.schedules.one_f_one_b(2, N, ticks="unit"),
        {"recompute": jax.checkpoint_policies.dots_saveable},
        2,
    ),
    "one device": (jpipe.schedules.gpipe(1, N), {}, 1),
}


@pytest.mark.first_case
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(3)
def test_callbacks_run_once_per_forward(name):
    """Under recompute the forward runs again in the backward, as `jax.checkpoint` has it."""
    schedule, options, times = CASES[name]
    calls, batch = Calls(), batch_of()
    layers = [LINEAR, calls.layer("hidden"), LINEAR, calls.layer("outputs")]
    pipe = jpipe.Pipeline(layers, loss=loss_fn, optimizer=optax.sgd(0.1), schedule=schedule, **options)
    state = pipe.init(KEY, batch)
    first, _, second, _ = pipe.get_params(state)
    hidden = batch["inputs"] @ first["kernel"] + first["bias"]
    outputs = hidden @ second["kernel"] + second["bias"]
    pipe.predict(state, batch)
    for layer, want in (("hidden", hidden), ("outputs", outputs)):
        np.testing.assert_allclose(calls.rows(layer), ordered(want), rtol=1e-5)
    pipe.step(state, batch)
    for layer, want in (("hidden", hidden), ("outputs", outputs)):
        want = ordered(np.repeat(want, times, axis=0))
        np.testing.assert_allclose(calls.rows(layer), want, rtol=1e-5)


class Printing(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x):
        jax.debug.print("rows {}", x.shape[0])
        return self.linear(x)


def test_debug_print_in_a_module_prints(capsys):
    batch = batch_of()
    pipe = jpipe.Pipeline(
        [Printing] * 3,
        loss=loss_fn,
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.one_f_one_b(2, N),
    )
    state = pipe.init(KEY, batch)
    jax.effects_barrier()
    capsys.readouterr()
    state, _ = pipe.step(state, batch)
    jax.effects_barrier()
    lines = capsys.readouterr().out.split("\n")
    assert lines.count(f"rows {B // N}") == 3 * N
    pipe.predict(state, batch)
    jax.effects_barrier()
    assert capsys.readouterr().out.count("rows ") == 3 * N


# -- One layer


AVAL = jax.ShapeDtypeStruct((2, D), np.float32)
WEIGHTS = jax.ShapeDtypeStruct((D, D), np.float32)
ONES = [jnp.ones((D, D))], [jnp.ones((2, D))]


def gradient_print(seen):
    """The identity, whose backward reports the gradient."""

    @jax.custom_vjp
    def identity(x):
        return x

    def backward(_, g):
        jax.debug.callback(lambda v: seen.append(np.asarray(v)), g)
        return (g,)

    identity.defvjp(lambda x: (x, None), backward)
    return identity


@pytest.mark.parametrize("input_grads", [True, False])
def test_effects_of_the_backward_run_once_in_its_first_half(input_grads):
    seen: list = []
    identity = gradient_print(seen)
    program = trace_layer(
        lambda p, x, _: identity(x @ p),
        WEIGHTS,
        AVAL,
        differentiated=None if input_grads else (),
        zero_input_grads=False,
    )
    _, stash, _ = program.forward_and_stash(*ONES)
    gradient = [jnp.full((2, D), 3.0)]
    _, split_residuals = program.input_grad(ONES[0], stash, gradient)
    program.weight_grad(ONES[0], stash, split_residuals)
    jax.effects_barrier()
    np.testing.assert_array_equal(seen, [gradient[0]])
    program.backward(ONES[0], stash, gradient)
    jax.effects_barrier()
    assert len(seen) == 2


def test_io_callbacks_run_where_plain_jax_allows_them():
    seen: list = []

    def host(value):
        seen.append(float(value))
        return np.float32(2)

    def layer(p, x, _):
        y = x @ p
        value = jax.lax.stop_gradient(y.sum())
        return y * io_callback(host, jax.ShapeDtypeStruct((), np.float32), value)

    program = trace_layer(layer, WEIGHTS, AVAL)
    (y,), stash, _ = program.forward_and_stash(*ONES)
    jax.effects_barrier()
    np.testing.assert_array_equal(y, np.full((2, D), 2.0 * D))
    assert seen == [2 * D * D]
    (of_p,), (of_x,) = program.backward(ONES[0], stash, [jnp.ones((2, D))])
    jax.effects_barrier()
    assert seen == [2 * D * D]  # not again
    np.testing.assert_array_equal(of_x, np.full((2, D), 2.0 * D))
    np.testing.assert_array_equal(of_p, np.full((D, D), 4.0))


def test_a_ref_inside_a_layer():
    """Writes to a mutable array have no outputs, and are kept."""

    def layer(p, x, _):
        ref = jax.new_ref(x)
        ref[...] = jnp.tanh(ref[...] @ p)
        return jax.freeze(ref)

    try:
        plain = jax.vjp(lambda p, x: layer(p, x, ()), ONES[0][0], ONES[1][0])[0]
    except Exception:
        pytest.skip("this JAX has no differentiable references")
    program = trace_layer(layer, WEIGHTS, AVAL)
    np.testing.assert_allclose(program.forward(*ONES)[0][0], plain, rtol=1e-6)


@pytest.mark.parametrize("inside", ["directly", "scan"])
def test_ordered_effects_are_refused(inside):
    def say(x):
        jax.debug.print("{}", x.sum(), ordered=True)
        return x

    def layer(p, x, _):
        if inside == "scan":
            x, _ = jax.lax.scan(lambda c, _: (say(c), None), x, length=2)
            return x @ p
        return say(x) @ p

    with pytest.raises(OrderedEffectError, match="Leave out `ordered=True`"):
        trace_layer(layer, WEIGHTS, AVAL)


def test_the_layer_with_ordered_effects_is_named():
    def say(x):
        jax.debug.print("{}", x.sum(), ordered=True)
        return x

    pipe = jpipe.Pipeline(
        [LINEAR, say],
        loss=loss_fn,
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.gpipe(2, N),
    )
    with pytest.raises(ValueError, match=r"layer 1 \(say\): it has ordered side effects"):
        pipe.init(KEY, batch_of())
