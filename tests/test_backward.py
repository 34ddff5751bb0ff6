"""The programs of a layer against `jax.vjp` of the layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jpipe.backward import is_inexact, jaxpr_text, mixes, trace_layer
from models.mlp import Hidden
from models.resnet import BasicBlock
from models.transformer import Block, Embedding


def abstract(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def of_module(make, x):
    """`(layer of pytrees, parameters, inputs)` of a Flax module."""
    graph, state = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
    # Not as initialised: a residual branch may begin at zero.
    state = jax.tree.map(lambda a: 0.3 * normal(*a.shape, seed=1), state)
    return lambda p, x, _: nnx.merge(graph, p)(x), state, x


def two_dots(p, x, _):
    """One input read by two products and one elementwise function."""
    return jnp.tanh(x) * (x @ p["a"]) + x @ p["b"]


def with_passengers(p, x, _):
    """A tuple and a dict ride along, an integer among them, and one input comes out as it went in."""
    (h, step), info = x
    return (jnp.tanh(h @ p) * info["scale"][:, None], step + 1), {
        "scale": info["scale"],
        "mask": h > 0,
    }


def unused_parameter(p, x, _):
    return x * p["scale"]


def constant_of_parameters(p, x, _):
    return x, jax.nn.softplus(p)


LAYERS = {
    "mlp": lambda: of_module(functools.partial(Hidden, 6, 4), normal(3, 6)),
    "transformer": lambda: of_module(
        functools.partial(Block, 8, 2, 4), normal(2, 5, 8)
    ),
    "resnet": lambda: of_module(
        functools.partial(BasicBlock, 4, 8, 2, 4), normal(2, 6, 6, 4)
    ),
    "embedding": lambda: of_module(
        functools.partial(Embedding, 7, 5, 4), np.array([[1, 2, 2, 0, 6]], np.int32)
    ),
    "two dots": lambda: (
        two_dots,
        {"a": normal(4, 4), "b": normal(4, 4, seed=1)},
        normal(3, 4, seed=2),
    ),
    "passengers": lambda: (
        with_passengers,
        normal(4, 4),
        ((normal(3, 4), np.arange(3, dtype=np.int32)), {"scale": normal(3, seed=3)}),
    ),
    "unused": lambda: (
        unused_parameter,
        {"scale": np.float32(2), "idle": normal(3)},
        normal(3, 4),
    ),
    "constant": lambda: (constant_of_parameters, normal(3), normal(2, 4)),
    "no parameters": lambda: (lambda p, x, _: jnp.sin(x), {}, normal(2, 4)),
    "identity": lambda: (lambda p, x, _: x, {}, normal(2, 4)),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


@functools.cache
def traced(name, input_grads=True):
    function, parameters, inputs = LAYERS[name]()
    return trace_layer(
        function, abstract(parameters), abstract(inputs), input_grads=input_grads
    )


@functools.cache
def answers(name):
    """By `jax.vjp` alone: flat outputs, and gradients of parameters and of inexact inputs."""
    function, parameters, inputs = LAYERS[name]()
    leaves, tree = jax.tree.flatten(inputs)
    inexact = [i for i, x in enumerate(leaves) if is_inexact(x)]

    def of_inexact(parameters, values):
        filled = list(leaves)
        for i, value in zip(inexact, values):
            filled[i] = value
        return jax.tree.leaves(function(parameters, tree.unflatten(filled), ()))

    values = [leaves[i] for i in inexact]
    outputs = jax.jit(of_inexact)(parameters, values)
    given = [normal(*y.shape, seed=9) for y in outputs if is_inexact(y)]

    @jax.jit
    def gradients(parameters, values, given):
        given = iter(given)
        all_ = [
            next(given) if is_inexact(y) else np.zeros(y.shape, jax.dtypes.float0)
            for y in outputs
        ]
        return jax.vjp(of_inexact, parameters, values)[1](all_)

    of_parameters, of_inputs = gradients(parameters, values, given)
    return (
        jax.tree.leaves(parameters),
        leaves,
        outputs,
        given,
        jax.tree.leaves(of_parameters),
        of_inputs,
    )


def assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(
            a, b, rtol=0, atol=1e-6 * max(np.abs(b).max(), 1e-30)
        )


def shapes(arrays):
    return [(a.shape, a.dtype) for a in arrays]


@every_layer
def test_forward(name):
    parameters, inputs, outputs, *_ = answers(name)
    kind = traced(name)
    assert_equal(jax.jit(kind.forward)(parameters, inputs)[0], outputs)
    kept, stash, _ = jax.jit(kind.forward_and_stash)(parameters, inputs)
    assert_equal(kept, outputs)
    assert shapes(kind.outputs) == shapes(outputs) and shapes(kind.stash) == shapes(
        stash
    )


@every_layer
@pytest.mark.parametrize("input_grads", [True, False])
def test_backward(name, input_grads):
    """The whole, and both halves, are what `jax.vjp` says."""
    parameters, inputs, _, given, of_parameters, of_inputs = answers(name)
    kind = traced(name, input_grads)

    def gradients(parameters, inputs, given):
        _, stash, _ = kind.forward_and_stash(parameters, inputs)
        whole = kind.backward(parameters, stash, given)
        mine = [s if i in kind.weight_stash else None for i, s in enumerate(stash)]
        first, crossing = kind.input_grad(parameters, stash, given)
        assert shapes(kind.crossing) == shapes(crossing)
        return whole, (kind.weight_grad(parameters, mine, crossing), first)

    for got in jax.jit(gradients)(parameters, inputs, given):
        assert_equal(got[0], of_parameters)
        assert_equal(got[1], of_inputs if input_grads else [])
    assert sorted(kind.input_stash + kind.weight_stash) == list(range(len(kind.stash)))


def test_without_input_gradients_less_is_kept():
    # x and tanh(x) for the weights; not x @ a, nor the derivative of tanh.
    assert len(traced("two dots", input_grads=False).stash) == 2
    assert len(traced("two dots").stash) > 2


# -- Work -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (functools.partial(Hidden, 64, 64), (64, 64)),
        (functools.partial(Block, 32, 2, 4), (2, 64, 32)),
        (functools.partial(BasicBlock, 16, 16, 1, 8), (2, 16, 16, 16)),
    ],
    ids=["mlp", "transformer", "resnet"],
)
def test_no_work_is_done_twice(make, shape):
    """Compiled input gradient and weight gradient cost what the compiled whole costs."""
    function, parameters, x = of_module(make, normal(*shape))
    kind = trace_layer(function, abstract(parameters), abstract(x))

    def flops(function, *avals):
        return jax.jit(function).lower(*avals).compile().cost_analysis()["flops"]

    avals = list(kind.parameters), list(kind.stash)
    gradients = [y for y in kind.outputs if is_inexact(y)]
    whole = flops(kind.backward, *avals, gradients)
    halves = flops(kind.input_grad, *avals, gradients) + flops(
        kind.weight_grad, *avals, list(kind.crossing)
    )
    np.testing.assert_allclose(halves, whole, rtol=0.01)


# -- What is stashed ------------------------------------------------------------------


def linear(p, x, _):
    return x @ jax.nn.softplus(p)


def test_residuals_of_parameters_alone_are_rebuilt_from_the_weights_given():
    p, x, gy = normal(5, 3), normal(2, 5), normal(2, 3, seed=1)
    kind = trace_layer(linear, abstract(p), abstract(x))
    assert [s.shape for s in kind.stash] == [x.shape]
    _, stash, _ = kind.forward_and_stash([p], [x])
    other = p + 1
    for backward in (kind.backward, lambda *args: halves(kind, *args)):
        (of_p,), (of_x,) = backward([other], stash, [gy])
        np.testing.assert_allclose(of_x, gy @ np.log1p(np.exp(other)).T, rtol=1e-5)
        np.testing.assert_allclose(
            of_p, x.T @ gy / (1 + np.exp(-other)), rtol=1e-5, atol=1e-6
        )


def halves(kind, parameters, stash, output_grads):
    of_inputs, crossing = kind.input_grad(parameters, stash, output_grads)
    return kind.weight_grad(parameters, stash, crossing), of_inputs


def test_each_variable_is_stashed_once():
    def square_and_linear(p, x, _):
        return (x @ p["a"]) * (x @ p["b"])

    p = {"a": normal(4, 3), "b": normal(4, 3, seed=1)}
    kind = trace_layer(square_and_linear, abstract(p), abstract(normal(2, 4)))
    assert sorted(s.shape for s in kind.stash) == [(2, 3), (2, 3), (2, 4)]


def test_what_each_half_of_a_linear_layer_reads():
    kind = trace_layer(
        lambda p, x, _: jnp.tanh(x @ p), abstract(normal(4, 3)), abstract(normal(2, 4))
    )
    shape_of = lambda which: sorted(kind.stash[i].shape for i in which)  # noqa: E731
    assert shape_of(kind.weight_stash) == [(2, 4)]  # x
    assert set(shape_of(kind.input_stash)) == {(2, 3)}  # of tanh
    assert [c.shape for c in kind.crossing] == [(2, 3)]  # the gradient behind tanh


def test_an_embedding_has_an_empty_input_gradient():
    kind = traced("embedding")
    assert kind.input_stash == ()
    of_inputs, crossing = kind.input_grad(
        [None] * 2, [None] * len(kind.stash), [normal(1, 5, 4)]
    )
    assert of_inputs == [] and len(crossing) == 1


def test_extra_inputs_are_not_differentiated():
    def loss(_, outputs, batch):
        return jnp.mean((outputs - batch["targets"]) ** 2 * batch["weight"])

    y, batch = (
        normal(3, 2),
        {"targets": normal(3, 2, seed=1), "weight": normal(3, 2, seed=2)},
    )
    kind = trace_layer(loss, (), abstract(y), abstract(batch))
    value, stash, _ = kind.forward_and_stash([], [y], jax.tree.leaves(batch))
    difference = y - batch["targets"]
    np.testing.assert_allclose(
        value[0], np.mean(difference**2 * batch["weight"]), rtol=1e-6
    )
    ((), (of_y,)) = kind.backward([], stash, [np.float32(1)])
    np.testing.assert_allclose(of_y, 2 * difference * batch["weight"] / 6, rtol=1e-5)


# -- Which layers are equal -----------------------------------------------------------


def text(function, p, x):
    return trace_layer(function, abstract(p), abstract(x)).text


def scaled_by(constant):
    return lambda p, x, _: x @ p * constant


def test_text_tells_what_differs_and_only_that():
    p, x, constant = normal(4, 4), normal(2, 4), np.arange(4, dtype=np.float32)[None]
    same = text(scaled_by(constant), p, x)
    assert same == text(scaled_by(constant.copy()), p, x)
    large = np.arange(2000, dtype=np.float32)[None]  # printed arrays are abridged
    almost = large.copy()
    almost[0, 1000] += 1e-3
    others = [
        text(scaled_by(constant + 1), p, x),
        text(scaled_by(2.0), p, x),
        text(scaled_by(3.0), p, x),
        text(scaled_by(constant), p, normal(3, 4)),
        text(scaled_by(constant), p[:, :1], x),
        text(scaled_by(large), normal(4, 2000), x),
        text(scaled_by(almost), normal(4, 2000), x),
        text(lambda p, x, _: {"y": x @ p * constant}, p, x),
        text(lambda p, x, _: x @ p["w"] * constant, {"w": p}, x),
        text(lambda p, x, _: x[0] @ p * constant, p, (x,)),
    ]
    assert len({same, *others}) == 1 + len(others)


def test_equal_modules_have_equal_text():
    for make, x in (
        (functools.partial(Block, 8, 2, 4), normal(2, 5, 8)),
        (functools.partial(BasicBlock, 4, 4, 1, 4), normal(2, 6, 6, 4)),
    ):
        first, second = (text(*of_module(make, x)[:2], x) for _ in range(2))
        assert first == second


def test_jaxpr_text_ignores_the_names_of_jitted_calls():
    x = abstract(normal(3))
    by_name = jax.jit(lambda x: jnp.sin(x) + 1)
    assert jaxpr_text(lambda x: [by_name(x)], x) == jaxpr_text(
        lambda x: [jnp.sin(x) + 1], x
    )
    assert jaxpr_text(lambda x: [jnp.sin(x) + 2], x) != jaxpr_text(
        lambda x: [jnp.sin(x) + 1], x
    )


# -- Which optimizers mix -------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (optax.sgd(0.1, momentum=0.9), False),
        (optax.adamw(1e-3), False),
        (optax.chain(optax.clip(1.0), optax.adam(1e-3)), False),
        (optax.clip_by_block_rms(1.0), False),
        (optax.lamb(1e-3), False),
        (optax.clip_by_global_norm(1.0), True),
        (optax.chain(optax.adam(1e-3), optax.clip_by_global_norm(1.0)), True),
        (optax.apply_if_finite(optax.sgd(0.1), 3), True),
    ],
    ids=lambda v: None if isinstance(v, bool) else "",
)
def test_mixes(optimizer, expected):
    p = [jnp.ones((2, 3)), jnp.ones(3), jnp.ones(2)]
    state = optimizer.init(p)
    leaves, tree = jax.tree.flatten(state)

    def update(*args):
        updates, after = optimizer.update(list(args[:3]), tree.unflatten(args[3:]), p)
        return [*jax.tree.leaves(updates), *jax.tree.leaves(after)]

    groups = [0, 0, 1, *[-1] * len(leaves)]
    with jax.numpy_dtype_promotion("standard"):  # as Optax is written
        assert mixes(update, abstract([*p, *leaves]), groups, groups) is expected


def test_mixing_within_a_group_is_allowed():
    x = abstract([normal(2), normal(2), normal(2)])
    assert not mixes(lambda a, b, c: [a + b, b * a, c], x, [0, 0, 1], [0, 0, 1])
    assert mixes(lambda a, b, c: [a + b, b * c, c], x, [0, 0, 1], [0, 0, 1])
    assert not mixes(lambda a, b, c: [a, b, c * a], x, [-1, 0, 1], [0, 0, 1])
