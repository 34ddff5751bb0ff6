"""Linen modules, `(init, apply)` pairs and NNX modules train alike, and each computes what its own library computes."""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from helpers import assert_close

import jpipe
from jpipe.layers.as_layers import as_layers
from jpipe.layers.flax_nnx import as_mutable_state, as_parameters
from jpipe.layers.quick_jit import quick_options

KEY = jax.random.key(1)


class Norm(nn.Module):
    """Dense, batch norm, dropout; knows whether it trains."""

    width: int

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dense(self.width, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.8)(x)
        return nn.Dropout(0.25, deterministic=not train)(jnp.tanh(x))


def init(key, x):
    return {"w": jax.random.normal(key, (x.shape[-1], 3))}


def pairs():
    return jpipe.InitApply(init, lambda p, x: x @ p["w"], name="pair")


LINEN = jpipe.Linen(Norm(5), train={"train": True}, evaluate={"train": False})
LAYERS = [
    nn.Dense(4, use_bias=False),
    LINEN,
    LINEN,
    pairs(),
    functools.partial(nnx.Linear, 3, 2),
]


def loss_fn(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def batch_of(size):
    rng = np.random.default_rng(0)
    return {
        "inputs": rng.normal(size=(size, 6)).astype(np.float32),
        "targets": rng.normal(size=(size, 2)).astype(np.float32),
    }


def pipeline(S, N, layers=LAYERS, **options):
    schedule = jpipe.schedules.one_f_one_b(S, N)
    options = {"optimizer": optax.sgd(0.1, momentum=0.9), **options}
    return jpipe.Pipeline(layers, loss=loss_fn, schedule=schedule, **options)


def plain(params, state, x, microbatch, train):
    """The same layers, called by their own libraries."""
    x, statistics = nn.Dense(4, use_bias=False).apply({"params": params[0]}, x), []
    for i in (1, 2):
        key = jax.random.fold_in(KEY, len(LAYERS))
        for number in (i, microbatch, 0, 0):
            key = jax.random.fold_in(key, number)
        variables = {"params": params[i], **state[i]}
        if not train:
            x = Norm(5).apply(variables, x, train=False)
            continue
        x, new = Norm(5).apply(variables, x, train=True, mutable=["batch_stats"], rngs={"dropout": key})
        statistics.append(new)
    x = x @ params[3]["w"]
    return x @ params[4]["kernel"] + params[4]["bias"][None], statistics


@pytest.mark.exhaustive
@pytest.mark.sampled(2)
@pytest.mark.parametrize("S,N", [(1, 1), (3, 1)])
def test_linen_and_pairs_equal_their_libraries(S, N):
    """One microbatch: then running statistics are Flax's own."""
    pipe, batch = pipeline(S, N), batch_of(8)
    state = pipe.init(KEY, batch)
    params, running = pipe.get_params(state), pipe.get_mutable_state(state)
    optimizer = optax.sgd(0.1, momentum=0.9)
    inner = optimizer.init(params)

    @jax.jit
    def gradient(params, running, microbatch):
        def of(params):
            y, statistics = plain(params, running, batch["inputs"], microbatch, True)
            return loss_fn(y, batch), statistics

        return jax.value_and_grad(of, has_aux=True)(params)

    for step in range(3):
        (value, statistics), grads = gradient(params, running, step)
        updates, inner = optimizer.update(grads, inner, params)
        params = optax.apply_updates(params, updates)
        running = [{}, *statistics, {}, {}]
        state, metrics = pipe.step(state, batch)
        assert_close(metrics["loss"], np.asarray(value), "float32")
    want = jax.tree.map(np.asarray, (params, running))
    assert_close((pipe.get_params(state), pipe.get_mutable_state(state)), want, "float32")
    y, _ = plain(params, running, batch["inputs"], 0, False)
    assert_close(pipe.predict(state, batch), np.asarray(y), "float32")


@pytest.mark.exhaustive
def test_the_same_numbers_at_any_number_of_stages():
    """Weights, masks and statistics depend on the key, the layer and the microbatch alone."""
    results, batch = [], batch_of(12)
    for S, options in ((1, {}), (2, {"recompute": "full"}), (5, {})):
        pipe = pipeline(S, 3, **options)
        state = pipe.init(KEY, batch)
        for _ in range(2):
            state, metrics = pipe.step(state, batch)
        results.append((pipe.get_params(state), pipe.get_mutable_state(state)))
    for other in results[1:]:
        assert_close(other, results[0], "float32")


@pytest.mark.exhaustive
def test_state_can_be_given_and_adopted():
    pipe, batch = pipeline(2, 3), batch_of(12)
    state, _ = pipe.step(pipe.init(KEY, batch), batch)
    params, running = pipe.get_params(state), pipe.get_mutable_state(state)
    again = pipe.init(KEY, batch, params=params, mutable_state=running)
    jax.tree.map(np.testing.assert_array_equal, pipe.get_params(again), params)
    jax.tree.map(np.testing.assert_array_equal, pipe.get_mutable_state(again), running)
    # An adopted state goes on as the old one would: the same keys, the same statistics.
    other = pipeline(5, 3)
    adopted, _ = other.step(other.adopt(state), batch)
    state, _ = pipe.step(state, batch)
    assert_close(other.get_params(adopted), pipe.get_params(state), "float32")
    assert_close(other.get_mutable_state(adopted), pipe.get_mutable_state(state), "float32")


@pytest.mark.exhaustive
def test_statistics_that_are_not_finite_move_nothing():
    pipe, batch = pipeline(2, 2), batch_of(8)
    state = pipe.init(KEY, batch)
    before = pipe.get_params(state), pipe.get_mutable_state(state)
    bad = {**batch, "inputs": batch["inputs"].copy()}
    bad["inputs"][0, 0] = np.inf
    state, metrics = pipe.step(state, bad)
    assert metrics["skipped_updates"].tolist() == [1, 1]
    after = pipe.get_params(state), pipe.get_mutable_state(state)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    state, metrics = pipe.step(state, batch)  # and what was bad is forgotten
    assert metrics["skipped_updates"].tolist() == [0, 0]
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(pipe.get_mutable_state(state)))


class Counter(nnx.Module):
    """Counts its calls in training, and the positive numbers that it saw if `data` is set."""

    def __init__(self, data=False, *, rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)
        self.count = nnx.Variable(jnp.full((), 5, jnp.int32))
        self.even = nnx.Variable(jnp.zeros((), bool))
        self.mean = nnx.Variable(jnp.zeros(()))
        self.data, self.training = data, True

    def train(self, **attributes):
        self.training = True

    def eval(self, **attributes):
        self.training = False

    def __call__(self, x):
        if self.training:
            self.count[...] += (x > 0).sum() if self.data else 1
            self.even[...] = self.count[...] % 2 == 0
            self.mean[...] = x.mean()
        return self.linear(x) + self.count[...].astype(x.dtype)


class Power(nnx.Module):
    """State that training reads."""

    def __init__(self, *, rngs):
        self.kernel = nnx.Param(jnp.ones((2, 2)))
        self.last = nnx.BatchStat(jnp.ones(2))

    def __call__(self, x):
        self.last[...] = self.kernel @ self.last[...]
        return x * self.last[...][None]


class Scales(nnx.Module):
    """Keeps arrays in a dict, as `nnx.WeightNorm` does, and not in variables."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.scales = nnx.data({"kernel": jnp.ones(4)})

    def __call__(self, x):
        return self.linear(x) * self.scales["kernel"].reshape(1, 4)


def test_arrays_in_a_dict_are_state():
    layers = as_layers([Scales, Scales(rngs=nnx.Rngs(0))])
    for layer in layers:
        assert layer.state == {"scales": {"kernel": jax.ShapeDtypeStruct((4,), jnp.float32)}}


def test_other_state_moves_in_every_microbatch():
    pipe = pipeline(2, 2, [Power, Power])
    batch = {k: np.ones((4, 2), np.float32) for k in ("inputs", "targets")}
    state = pipe.init(KEY, batch)
    kernel = pipe.get_params(state)[0]["kernel"]
    state, _ = pipe.step(state, batch)
    np.testing.assert_allclose(pipe.get_mutable_state(state)[0]["last"], kernel @ kernel @ np.ones(2))


@pytest.mark.first_case
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize("data", [False, True])
def test_integer_state_counts_microbatches(schedule, data):
    """As a plain loop over the microbatches does, also if it counts what it sees."""
    table = getattr(jpipe.schedules, schedule)(2, 4)
    layer = functools.partial(Counter, data)
    pipe = jpipe.Pipeline([layer, layer], loss=loss_fn, optimizer=optax.sgd(0.1), schedule=table)
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    batch = {"inputs": x, "targets": x}
    state = pipe.init(KEY, batch)
    weights, counts, losses = pipe.get_params(state), [5, 5], []
    for _ in range(3):
        losses = []
        for rows in np.split(x, 4):
            y = rows
            for i, layer in enumerate(weights):  # with the count after its change
                counts[i] += int((y > 0).sum()) if data else 1
                y = y @ layer["linear"]["kernel"] + layer["linear"]["bias"] + counts[i]
            losses.append(np.mean((y - rows) ** 2))
        state, metrics = pipe.step(state, batch)
        np.testing.assert_allclose(metrics["loss"], np.mean(losses), rtol=1e-5)
        weights = pipe.get_params(state)
        for count, layer in zip(counts, pipe.get_mutable_state(state)):
            assert layer["count"].dtype == np.int32 and layer["count"] == count
            assert layer["even"].dtype == bool and layer["even"] == (count % 2 == 0)
        first = pipe.get_mutable_state(state)[0]
        np.testing.assert_allclose(first["mean"], x[-2:].mean(), rtol=1e-6)


WRONG = {
    "recomputed state": (
        [Power],
        {"recompute": "full"},
        r"layer 0 \(Power\) reads its mutable state in training",
    ),
    "Linen needs more": (
        [Norm(2)],
        {},
        r"layer 0 \(Norm\) cannot be initialised:.*(\n.*)*given as `jpipe.Linen",
    ),
    "pair fails": (
        [jpipe.InitApply(lambda key: {}, lambda p, x: x)],
        {},
        r"layer 0 \(InitApply\): `init\(key, inputs\)` failed",
    ),
    "integer parameters": (
        [jpipe.InitApply(lambda key, x: {"n": jnp.arange(2)}, lambda p, x: x)],
        {},
        r"layer 0 \(InitApply\): parameter 'n' has dtype int32, which has no gradient",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_layers(name):
    layers, options, message = WRONG[name]
    batch = {k: np.ones((4, 2), np.float32) for k in ("inputs", "targets")}
    with pytest.raises(ValueError, match=message):
        pipeline(1, 2, layers, **options).init(KEY, batch)


def test_a_variable_of_two_arrays():
    class Pair(nnx.Module):
        def __init__(self):
            self.pair = nnx.Param({"a": jnp.ones(2), "b": jnp.ones(2)})

        def __call__(self, x):
            return x

    with pytest.raises(ValueError, match=r"one array, and 'pair' holds 2\. Give each array a variable of its own"):
        as_layers([Pair()])


def test_wrong_adapters():
    with pytest.raises(ValueError, match="`apply` of `jpipe.InitApply` must be a function"):
        jpipe.InitApply(init, 3)
    with pytest.raises(ValueError, match="`jpipe.Linen` takes a Flax Linen module, got"):
        jpipe.Linen(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="`train` of `jpipe.NNX` must be a dict of keyword .*got True"):
        jpipe.NNX(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), train=True)
    with pytest.raises(ValueError, match=r"`evaluate` of `jpipe.Linen` must be a dict of keyword .*got \['train'\]"):
        jpipe.Linen(Norm(5), evaluate=["train"])


def test_layers_that_differ_in_momentum_are_two_kinds():
    layers = [functools.partial(nnx.BatchNorm, 2, momentum=m) for m in (0.9, 0.5, 0.9)]
    assert len(as_layers(layers)) == 3
    pipe = pipeline(1, 1, layers)
    batch = {k: np.ones((4, 2), np.float32) for k in ("inputs", "targets")}
    program = pipe._program(batch)
    assert program.stages.kind_of_layer == [0, 1, 0]


# -- What may be given as a layer


def scaled(x, *, by=2.0):
    return by * x


MODULE = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
FUNCTIONS = {
    "ufunc": (jnp.tanh, "tanh"),
    "jitted": (jax.nn.relu, "relu"),
    "nnx": (nnx.relu, "relu"),
    "lambda": (lambda x: 2 * x, "<lambda>"),
    "keyword": (scaled, "scaled"),
    "partial": (functools.partial(scaled, by=3.0), "scaled"),
    "star": (lambda *args: args[0], "<lambda>"),
}
FACTORIES = {
    "class": Power,
    "partial": functools.partial(nnx.Linear, 2, 2),
    "keywords": functools.partial(nnx.Linear, in_features=2, out_features=2),
    "lambda": lambda rngs: nnx.Linear(2, 2, rngs=rngs),
    "keyword only": lambda *, rngs: nnx.Linear(2, 2, rngs=rngs),
    "any keywords": lambda **keywords: nnx.Linear(2, 2, **keywords),
    "optional": lambda width=2, rngs=None: nnx.Linear(width, width, rngs=rngs),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_the_activation_is_a_layer(name):
    function, known_as = FUNCTIONS[name]
    (layer,) = as_layers([function])
    assert layer.name == known_as and layer.parameters == {}
    x = jnp.linspace(-1, 1, 6).reshape(3, 2)
    np.testing.assert_array_equal(layer.evaluate({}, {}, (x,)), function(x))


@pytest.mark.parametrize("name", FACTORIES)
def test_a_callable_that_takes_rngs_is_a_factory(name):
    (layer,) = as_layers([FACTORIES[name]])
    assert "kernel" in layer.parameters and layer.init is not None


def test_functions_in_a_pipeline():
    batch = {k: np.ones((4, 2), np.float32) for k in ("inputs", "targets")}
    layers = [MODULE, jnp.tanh, lambda x: x * 2, functools.partial(nnx.Linear, 2, 2)]
    pipe = pipeline(2, 2, layers)
    state = pipe.init(KEY, batch)
    first, _, _, last = pipe.get_params(state)
    x = 2 * np.tanh(batch["inputs"] @ first["kernel"] + first["bias"])
    want = x @ last["kernel"] + last["bias"]
    np.testing.assert_allclose(pipe.predict(state, batch), want, rtol=1e-5)


def test_a_skip_may_be_around_a_function():
    layers = [
        jpipe.skip(lambda x: (x, x), stash="x"),
        jpipe.skip(lambda y, x: x + y, pop="x"),
    ]
    assert [layer.pop for layer in as_layers(layers)] == [(), ("x",)]


class Callable:
    """A callable pytree with arrays, as Equinox has them."""

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, x):
        return x @ self.weight


jax.tree_util.register_pytree_node(Callable, lambda c: ((c.weight,), None), lambda _, leaves: Callable(*leaves))


class Transformed(NamedTuple):
    init: object
    apply: object


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nnx.Linear, r"`functools.partial\(nnx.Linear, 64, 64\)`"),
        (functools.partial(nnx.Linear, 64), r"partial\(nnx.Linear, 64, 64\)`"),
        (functools.partial(nnx.Linear, out_features=8), "needs `in_features`, and"),
        (nnx.Conv, "needs `in_features`, `out_features`, `kernel_size`, and the"),
        (nn.Dense, r"the Linen class `Dense`. Give a module, such as `Dense\(...\)`"),
        (Callable(np.ones((2, 2))), "a callable pytree .* Equinox .*InitApply"),
        (Transformed(init, init), "has `init` and `apply`, as a Haiku .*InitApply"),
        ((init, init), r"a pair of functions .*`jpipe.InitApply\(init, apply\)`"),
        (lambda x: MODULE(x), "uses the NNX module `Linear`, whose weights would be"),
        (MODULE.__call__, "uses the NNX module `Linear`, whose weights would be"),
        (lambda: MODULE.bias, "cannot be called with|uses the NNX module"),
        (lambda x, y: x, "has no parameter named `rngs`, so .* cannot be called with"),
        (dict, "it is the class `dict`, not a layer"),
        (3, "must be a Flax module, .* got int"),
        (lambda rngs: 3, "the factory must return a Flax NNX module, got int"),
    ],
)
def test_what_is_no_layer_says_what_to_write(layer, message):
    with pytest.raises(ValueError, match=f"layer 1.*{message}"):
        as_layers([MODULE, layer])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (MODULE, r"a whole model \(Linear\).*Give its layers as a list"),
        (nnx.Sequential(MODULE, nnx.relu), r"Give `layers=list\(model.layers\)`"),
        (nn.Dense(2), r"a whole model \(Dense\)"),
        (jnp.tanh, "must be a sequence of layers"),
    ],
)
def test_a_whole_model_is_not_a_list_of_layers(model, message):
    with pytest.raises(ValueError, match=message):
        as_layers(model)


class Tuple(nnx.Module):
    def __init__(self, *, rngs):
        pass

    def __call__(self, x):
        return (x,)


@pytest.mark.parametrize("after", [nn.Dense(2), lambda x: jnp.tanh(x)])
def test_a_tuple_where_an_array_is_expected(after):
    batch = {k: np.ones((4, 2), np.float32) for k in ("inputs", "targets")}
    message = r"layer 0 \(Tuple\) returned a tuple of 1 array \(float32\[2, 2\]\); layer 1 "
    with pytest.raises(ValueError, match=message) as error:
        pipeline(1, 2, [Tuple, after]).init(KEY, batch)
    assert "jpipe.Linen" not in str(error.value)


def test_a_factory_with_another_name_for_rngs():
    batch = {k: np.ones((4, 2), np.float32) for k in ("inputs", "targets")}
    with pytest.raises(ValueError, match="It has no parameter named `rngs`"):
        pipeline(1, 2, [lambda r: nnx.Linear(2, 2, rngs=r)]).init(KEY, batch)


def test_a_factory_runs_once_for_each_kind_of_key():
    calls = []

    def make(*, rngs):
        calls.append(rngs)
        return nnx.Linear(3, 2, rngs=rngs)

    (layer,) = as_layers([make])
    key = jax.random.key(1)
    parameters, _ = layer.init(key)
    assert len(calls) == 1
    expected = nnx.Linear(3, 2, rngs=nnx.Rngs(key))
    assert_close(parameters, as_parameters(expected), "float64")
    other = jax.random.key(1, impl="rbg")
    parameters, _ = layer.init(other)
    expected = nnx.Linear(3, 2, rngs=nnx.Rngs(other))
    assert_close(parameters, as_parameters(expected), "float64")


@pytest.mark.parametrize(("num_numbers", "level"), [(1000, 0), (4_000_000, 1)])
def test_a_program_with_many_numbers_is_optimised(num_numbers, level):
    options = quick_options("cpu", num_numbers)
    assert options["xla_backend_optimization_level"] == level
    assert quick_options("gpu", num_numbers) is None


def test_parameters_in_the_forms_of_flax():
    """`nnx.state(module)`, a module and a frozen dict become the nested dicts of a layer."""

    class Both(nnx.Module):
        def __init__(self, *, rngs):
            self.linear = nnx.Linear(2, 3, rngs=rngs)
            self.norm = nnx.BatchNorm(3, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

    module = Both(rngs=nnx.Rngs(0))
    (layer,) = as_layers([Both])
    for values in (module, nnx.state(module), nnx.state(module, nnx.Param)):
        got = as_parameters(values)
        assert shapes(got) == shapes(layer.parameters)
        np.testing.assert_array_equal(got["linear"]["kernel"], module.linear.kernel)
    pure = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    assert shapes(as_parameters(pure)) == shapes(layer.parameters)
    assert as_parameters(FrozenDict({"a": {"b": 1}})) == {"a": {"b": 1}}
    assert type(as_parameters(FrozenDict(a=1))) is dict
    assert shapes(as_mutable_state(nnx.state(module))) == shapes(layer.state)


def shapes(tree):
    return jax.tree.map(lambda a: (a.shape, str(a.dtype)), tree)
