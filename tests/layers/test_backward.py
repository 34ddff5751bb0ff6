"""The programs of a layer against `jax.vjp` of the layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import checkpoint_policies as policies
from jax.ad_checkpoint import checkpoint_name

from jpipe.layers.avals import is_inexact, num_bytes
from jpipe.layers.backward import trace_layer
from jpipe.layers.equations import Equations
from jpipe.layers.vjp import OffloadError
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
    "transformer": lambda: of_module(functools.partial(Block, 8, 2, 4), normal(2, 5, 8)),
    "resnet": lambda: of_module(functools.partial(BasicBlock, 4, 8, 2, 4), normal(2, 6, 6, 4)),
    "embedding": lambda: of_module(functools.partial(Embedding, 7, 5, 4), np.array([[1, 2, 2, 0, 6]], np.int32)),
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


POLICIES = {
    "none": None,
    "everything_saveable": policies.everything_saveable,
    "dots_saveable": policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": policies.dots_with_no_batch_dims_saveable,
    "nothing_saveable": policies.nothing_saveable,
}
every_policy = pytest.mark.parametrize("policy", POLICIES)


@functools.cache
def traced(name, input_grads=True, policy="none"):
    function, parameters, inputs = LAYERS[name]()
    return trace_layer(
        function,
        abstract(parameters),
        abstract(inputs),
        differentiated=None if input_grads else (),
        zero_input_grads=False,
        policy=POLICIES[policy],
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
        all_ = [next(given) if is_inexact(y) else np.zeros(y.shape, jax.dtypes.float0) for y in outputs]
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
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * max(np.abs(b).max(), 1e-30))


def shapes(arrays):
    return [(a.shape, a.dtype) for a in arrays]


@every_layer
@pytest.mark.parametrize("policy", ["none", "dots_saveable"])
def test_forward(name, policy):
    parameters, inputs, outputs, *_ = answers(name)
    kind = traced(name, policy=policy)
    assert_equal(jax.jit(kind.forward)(parameters, inputs)[0], outputs)
    kept, stash, _ = jax.jit(kind.forward_and_stash)(parameters, inputs)
    assert_equal(kept, outputs)
    assert shapes(kind.outputs) == shapes(outputs) and shapes(kind.stash) == shapes(stash)


@every_layer
@pytest.mark.parametrize(
    ("input_grads", "policy"),
    [
        *((True, policy) for policy in POLICIES),
        (False, "none"),
        (False, "dots_saveable"),
    ],
)
@pytest.mark.sampled(3)
def test_backward(name, input_grads, policy):
    """The whole, and both halves, are what `jax.vjp` says."""
    parameters, inputs, _, given, of_parameters, of_inputs = answers(name)
    kind = traced(name, input_grads, policy)

    def gradients(parameters, inputs, given):
        _, stash, _ = kind.forward_and_stash(parameters, inputs)
        whole = kind.backward(parameters, stash, given)
        mine = [s if i in kind.weight_stash else None for i, s in enumerate(stash)]
        first, split_residuals = kind.input_grad(parameters, stash, given)
        assert shapes(kind.split_residuals) == shapes(split_residuals)
        return whole, (kind.weight_grad(parameters, mine, split_residuals), first)

    for got in jax.jit(gradients)(parameters, inputs, given):
        assert_equal(got[0], of_parameters)
        assert_equal(got[1], of_inputs if input_grads else [])
    assert sorted(kind.input_stash + kind.weight_stash) == list(range(len(kind.stash)))


def test_without_input_gradients_less_is_kept():
    # x, from which tanh(x) follows; the gradient of x also needs x @ a.
    assert len(traced("two dots", input_grads=False).stash) == 1
    assert len(traced("two dots").stash) == 2


# -- Work -----------------------------------------------------------------------------


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (functools.partial(Hidden, 64, 64), (64, 64)),
        (functools.partial(Block, 32, 2, 4), (2, 64, 32)),
        (functools.partial(BasicBlock, 16, 16, 1, 8), (2, 16, 16, 16)),
    ],
    ids=["mlp", "transformer", "resnet"],
)
@pytest.mark.parametrize("policy", ["none", "dots_saveable", "nothing_saveable"])
def test_no_work_is_done_twice(make, shape, policy):
    """Compiled input gradient and weight gradient cost what the compiled whole costs."""
    function, parameters, x = of_module(make, normal(*shape))
    kind = trace_layer(function, abstract(parameters), abstract(x), policy=POLICIES[policy])

    def flops(function, *avals):
        return jax.jit(function).lower(*avals).compile().cost_analysis()["flops"]

    avals = list(kind.parameters), list(kind.stash)
    gradients = [y for y in kind.outputs if is_inexact(y)]
    whole = flops(kind.backward, *avals, gradients)
    halves = flops(kind.input_grad, *avals, gradients) + flops(kind.weight_grad, *avals, list(kind.split_residuals))
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
        np.testing.assert_allclose(of_p, x.T @ gy / (1 + np.exp(-other)), rtol=1e-5, atol=1e-6)


def halves(kind, parameters, stash, output_grads):
    of_inputs, split_residuals = kind.input_grad(parameters, stash, output_grads)
    return kind.weight_grad(parameters, stash, split_residuals), of_inputs


def test_each_variable_is_stashed_once():
    def square_and_linear(p, x, _):
        return (x @ p["a"]) * (x @ p["b"])

    p = {"a": normal(4, 3), "b": normal(4, 3, seed=1)}
    kind = trace_layer(square_and_linear, abstract(p), abstract(normal(2, 4)))
    assert sorted(s.shape for s in kind.stash) == [(2, 3), (2, 3), (2, 4)]


def test_what_each_half_of_a_linear_layer_reads():
    kind = trace_layer(lambda p, x, _: jnp.tanh(x @ p), abstract(normal(4, 3)), abstract(normal(2, 4)))
    shape_of = lambda which: sorted(kind.stash[i].shape for i in which)  # noqa: E731
    assert shape_of(kind.weight_stash) == [(2, 4)]  # x
    assert set(shape_of(kind.input_stash)) == {(2, 3)}  # of tanh
    assert [c.shape for c in kind.split_residuals] == [(2, 3)]  # the gradient behind tanh


def test_an_embedding_has_an_empty_input_gradient():
    kind = traced("embedding")
    assert kind.input_stash == ()
    of_inputs, split_residuals = kind.input_grad([None] * 2, [None] * len(kind.stash), [normal(1, 5, 4)])
    assert of_inputs == [] and len(split_residuals) == 1


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
    np.testing.assert_allclose(value[0], np.mean(difference**2 * batch["weight"]), rtol=1e-6)
    ((), (of_y,)) = kind.backward([], stash, [np.float32(1)])
    np.testing.assert_allclose(of_y, 2 * difference * batch["weight"] / 6, rtol=1e-5)


# -- What a checkpoint policy stashes -------------------------------------------------


@pytest.mark.parametrize("name", sorted(LAYERS.keys() - {"transformer"}))
def test_everything_saveable_stashes_what_no_policy_stashes(name):
    assert sorted(shapes(traced(name, policy="everything_saveable").stash), key=str) == sorted(
        shapes(traced(name).stash), key=str
    )


@every_layer
def test_nothing_saveable_stashes_inputs_alone(name):
    inputs = shapes(traced(name).inputs)
    for aval in shapes(traced(name, policy="nothing_saveable").stash):
        inputs.remove(aval)


@pytest.mark.parametrize("name", ["transformer", "resnet"])
def test_dots_saveable_stashes_in_between(name):
    sizes = [num_bytes(traced(name, policy=policy).stash) for policy in POLICIES]
    assert sizes[1] > sizes[2] >= sizes[3] >= sizes[4]
    if name == "transformer":
        # Its attention has a checkpoint of its own, and this policy saves the inner values too.
        assert sizes[0] < sizes[1]
    else:
        assert sizes[0] == sizes[1]
    assert sizes[4] == num_bytes(traced(name).inputs)


def test_dots_are_stashed_by_hand():
    # x; the queries, keys and values; scores and their mixture, both of batched products;
    # the attention's output; the MLP's hidden layer. Its output is read by nobody.
    B, L, D, H = 2, 5, 8, 2
    x, qkv, out, up = (B, L, D), (B, L, 3 * D), (B, L, D), (B, L, 4 * D)
    batched = [(B, H, L, L), (B, H, D // H, L)]
    got = [a.shape for a in traced("transformer", policy="dots_saveable").stash]
    none_batched = traced("transformer", policy="dots_with_no_batch_dims_saveable")
    assert sorted(a.shape for a in none_batched.stash) == sorted([x, qkv, out, up])
    assert len(got) == 6 and sorted(map(np.prod, got)) == sorted(map(np.prod, [x, qkv, *batched, out, up]))


def named(p, x, _):
    hidden = checkpoint_name(jnp.exp(x @ p["a"]), "hidden")
    return jnp.sin(checkpoint_name(hidden @ p["b"], "product"))


@pytest.mark.parametrize(
    ("policy", "widths"),
    [
        (None, [3, 5, 6]),  # x and both products
        (policies.save_only_these_names("hidden"), [3, 5]),
        (policies.save_only_these_names("product"), [3, 6]),
        (policies.save_only_these_names("product", "hidden"), [3, 5, 6]),
        (policies.save_any_names_but_these("product"), [3, 5]),
        (
            policies.save_from_both_policies(policies.save_only_these_names("hidden"), policies.dots_saveable),
            [3, 5, 6],  # hidden is the exponential of a product
        ),
        (policies.nothing_saveable, [3]),
        (lambda primitive, *_, **__: primitive.name == "exp", [3, 5]),
    ],
    ids=[
        "none",
        "hidden",
        "product",
        "both",
        "all but product",
        "or dots",
        "nothing",
        "own",
    ],
)
def test_named_values_are_stashed(policy, widths):
    p, x, gy = {"a": normal(3, 5), "b": normal(5, 6)}, normal(2, 3), normal(2, 6)
    kind = trace_layer(named, abstract(p), abstract(x), policy=policy)
    assert sorted(a.shape[1] for a in kind.stash) == widths
    _, vjp = jax.vjp(lambda p, x: named(p, x, ()), p, x)
    _, stash, _ = kind.forward_and_stash(jax.tree.leaves(p), [x])
    for backward in (kind.backward, functools.partial(halves, kind)):
        got = backward(jax.tree.leaves(p), stash, [gy])
        assert_equal(jax.tree.leaves(got), jax.tree.leaves(vjp(gy)))


@every_policy
def test_complex_values_are_computed_again(policy):
    """`jax.checkpoint` alone fails if a policy saves a complex value."""

    def layer(p, x, _):
        z = jax.lax.complex(x, jnp.tanh(x)) @ p
        return jnp.real(z) + jnp.tanh(jnp.imag(z))

    p, x, gy = normal(4, 4) + 1j * normal(4, 4, seed=1), normal(3, 4), normal(3, 4)
    p = p.astype(np.complex64)
    kind = trace_layer(layer, abstract(p), abstract(x), policy=POLICIES[policy])
    _, stash, _ = kind.forward_and_stash([p], [x])
    _, vjp = jax.vjp(lambda p, x: layer(p, x, ()), p, x)
    assert_equal(jax.tree.leaves(kind.backward([p], stash, [gy])), vjp(gy))


@pytest.mark.first_case
@every_policy
def test_parameters_alone_are_rebuilt_under_every_policy(policy):
    """From the weights given to the backward, in each of its halves; nothing shaped like a weight is kept."""
    p, x, gy = normal(5, 5), normal(2, 5), normal(2, 5, seed=1)

    def layer(p, x, _):
        weight = jax.nn.softplus(p)
        return jnp.tanh(x @ weight) @ weight

    kind = trace_layer(layer, abstract(p), abstract(x), policy=POLICIES[policy])
    assert (5, 5) not in {a.shape for a in (*kind.stash, *kind.split_residuals)}
    _, stash, _ = kind.forward_and_stash([p], [x])
    whole = kind.backward([p + 1], stash, [gy])
    assert_equal(jax.tree.leaves(halves(kind, [p + 1], stash, [gy])), jax.tree.leaves(whole))
    if policy == "nothing_saveable":  # then nothing else of the old weights is left
        _, vjp = jax.vjp(lambda p, x: layer(p, x, ()), p + 1, x)
        assert_equal(jax.tree.leaves(whole), vjp(gy))


def test_a_checkpoint_inside_a_layer():
    """As `nnx.remat` makes it: its input gradient does not wait for its weight gradient."""
    function, p, x = LAYERS["two dots"]()
    inside = trace_layer(lambda p, x, _: jax.checkpoint(function)(p, x, ()), abstract(p), abstract(x))
    around = traced("two dots", policy="nothing_saveable")
    assert shapes(inside.stash) == shapes(around.stash) == [((3, 4), np.float32)]
    assert shapes(inside.split_residuals) == shapes(around.split_residuals)
    assert (4, 4) not in {a.shape for a in inside.split_residuals}


def test_extra_inputs_and_aux_under_a_policy():
    """A key is stashed, and dropout runs again from it; aux comes from the forward alone."""

    def layer(p, x, extra):
        key = jax.random.wrap_key_data(extra["key"])
        kept = jax.random.bernoulli(key, 0.5, (6, 3))
        hidden = jnp.where(kept, jnp.tanh(x @ p), 0)
        return hidden, {"mean": hidden.mean() + extra["mean"]}

    extra = {"key": jax.random.key_data(jax.random.key(0)), "mean": np.float32(3)}
    p, x, gy = normal(4, 3), normal(6, 4), normal(6, 3)
    kind = trace_layer(
        layer,
        abstract(p),
        abstract(x),
        abstract(extra),
        has_aux=True,
        policy=policies.nothing_saveable,
    )
    assert [a.shape for a in kind.stash] == [(6, 4), (2,)]
    assert kind.reads_extra == (True, True)
    outputs, stash, aux = kind.forward_and_stash([p], [x], jax.tree.leaves(extra))
    want, vjp, want_aux = jax.vjp(lambda p, x: layer(p, x, extra), p, x, has_aux=True)
    assert_equal([*outputs, *aux], [want, want_aux["mean"]])
    for backward in (kind.backward, functools.partial(halves, kind)):
        got = backward([p], stash, [gy])
        assert_equal(jax.tree.leaves(got), vjp(gy))


@pytest.mark.parametrize(
    "policy",
    [
        policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
        policies.save_and_offload_only_these_names(
            names_which_can_be_saved=["product"],
            names_which_can_be_offloaded=["hidden"],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    ],
    ids=["dots", "names"],
)
def test_offloading_is_refused(policy):
    p, x = {"a": normal(3, 5), "b": normal(5, 6)}, normal(2, 3)
    with pytest.raises(OffloadError, match=r"offloads float32\[2, 5\].*save_only_these"):
        trace_layer(named, abstract(p), abstract(x), policy=policy)


# -- Which layers are equal -----------------------------------------------------------


def text(function, p, x):
    return trace_layer(function, abstract(p), abstract(x)).text


def scaled_by(constant):
    return lambda p, x, _: x @ p * constant


def test_text_tells_what_differs_and_only_that():
    p, x, constant = normal(4, 4), normal(2, 4), np.arange(4, dtype=np.float32)[None]
    same = text(scaled_by(constant), p, x)
    assert same == text(scaled_by(constant.copy()), p, x)
    # The names of parameters do not count: blocks of a whole model have other paths.
    assert same == text(lambda p, x, _: x @ p["w"] * constant, {"w": p}, x)
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


def test_a_text_ignores_the_names_of_jitted_calls():
    x = abstract(normal(3))
    by_name = jax.jit(lambda x: jnp.sin(x) + 1)

    def text(function):
        return Equations.trace(lambda x: [function(x)], x).text()

    assert text(by_name) == text(lambda x: jnp.sin(x) + 1)
    assert text(lambda x: jnp.sin(x) + 2) != text(lambda x: jnp.sin(x) + 1)


# -- Which expressions are equal ------------------------------------------------------


def numbers_of(function, names, numbers, aval=None):
    aval = jax.ShapeDtypeStruct((3,), np.float32) if aval is None else aval
    traced = Equations.trace(function, *[aval for _ in names])
    return traced.expressions(names, numbers)


def loop(x, body):
    return jax.lax.scan(lambda c, _: (body(c), None), x, length=3)[0]


def choose(pred, *values):
    """A cond that passes its values through, or the doubles of them."""
    return jax.lax.cond(pred, lambda *v: v, lambda *v: tuple(jax.jit(jnp.add)(a, a) for a in v), *values)


LARGE = np.arange(2000, dtype=np.float32)
KEY = jax.random.key(0)
EXPRESSIONS = {
    "input": lambda x: x,
    "product": lambda x: 2 * x,
    "another literal": lambda x: 3 * x,
    "sine": jnp.sin,
    "sum": lambda x: x.sum()[None],
    "sum of two": lambda x: x[:2].sum()[None],
    "constant": lambda x: x + np.arange(3, dtype=np.float32),
    "another constant": lambda x: x + np.arange(1, 4, dtype=np.float32),
    "large": lambda x: x.sum() + LARGE,
    "almost": lambda x: x.sum() + np.where(LARGE == 1000, 0, LARGE),
    "key": lambda x: x + jax.random.normal(KEY, (3,)),
    "another key": lambda x: x + jax.random.normal(jax.random.key(1), (3,)),
    "loop": lambda x: loop(x, jnp.sin),
    "another loop": lambda x: loop(x, jnp.cos),
    "loop of a constant": lambda x: loop(x, lambda c: c + LARGE[:3]),
    "loop of another": lambda x: loop(x, lambda c: c + LARGE[1:4]),
    "choice": lambda x: choose(x[0] > 0, x)[0],
    "choice by another": lambda x: choose(x[1] > 0, x)[0],
}


def test_different_expressions_have_different_numbers():
    numbers: dict = {}
    found = [numbers_of(lambda x, f=f: [f(x)], "x", numbers) for f in EXPRESSIONS.values()]
    assert len({n for (n,) in found}) == len(EXPRESSIONS)
    other = jax.ShapeDtypeStruct((4,), np.float32)
    assert numbers_of(lambda x: [x], "x", numbers, other) != numbers_of(lambda x: [x], "x", numbers)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_equal_expressions_have_equal_numbers(name):
    """Among others, in any order, in a call, and of inputs at other positions."""
    f, numbers = EXPRESSIONS[name], {}
    (alone,) = numbers_of(lambda x: [f(x)], ["x"], numbers)

    def among(y, x):
        return [jnp.cos(y), f(y), jax.jit(f)(x), jnp.exp(f(x))]

    of_others = numbers_of(among, ["y", "x"], numbers)
    assert of_others[2] == alone and alone not in (of_others[:2] + of_others[3:])


def test_each_result_of_a_cond_is_an_expression_by_itself():
    numbers: dict = {}
    (alone,) = numbers_of(lambda p, x: choose(p[0] > 0, x), ["p", "x"], numbers)
    both = numbers_of(lambda y, p, x: choose(p[0] > 0, y, x), ["y", "p", "x"], numbers)
    assert both[1] == alone != both[0]
