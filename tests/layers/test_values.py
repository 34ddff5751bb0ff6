"""Layers on values that are not plain float32 arrays equal plain JAX: one rule for each class of dtype."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_close

import jpipe

DIM, ROWS, N = 4, 8, 2
KEY = jax.random.key(7)
X = np.random.default_rng(0).normal(size=(ROWS, 6, DIM)).astype(np.float32)


def loss_fn(outputs, batch):
    return jnp.mean(jnp.abs(outputs) ** 2)


def dense(key, x):
    return {"kernel": jax.random.normal(key, (DIM, DIM), x.dtype) / 2}


def first(p, x):
    return jnp.tanh(x @ p["kernel"])


FIRST = jpipe.InitApply(dense, first, "first")
LAST = jpipe.InitApply(dense, lambda p, x: x @ p["kernel"], "last")


def trained(layers, schedule=None, steps=2, **options):
    """Losses of some steps, and the weights before and after."""
    pipe = jpipe.Pipeline(
        layers,
        loss=loss_fn,
        optimizer=optax.sgd(0.5),
        schedule=schedule or jpipe.schedules.zero_bubble_h1(2, N),
        **options,
    )
    state = pipe.init(KEY, {"inputs": X})
    before, losses = pipe.get_params(state), []
    for _ in range(steps):
        state, metrics = pipe.step(state, {"inputs": X})
        losses.append(metrics["loss"])
    return np.asarray(losses), before, pipe.get_params(state)


def plain(apply, params, steps=2):
    """The same by gradient descent on `apply(params, x)`."""
    losses, step = [], jax.jit(jax.value_and_grad(lambda p: loss_fn(apply(p, X), None)))
    for _ in range(steps):
        value, gradient = step(params)
        params = jax.tree.map(lambda w, g: w - 0.5 * g, params, gradient)
        losses.append(value)
    return np.asarray(losses), params


# -- What travels beside an activation


def recurrence(x):
    """h[t] = a[t] h[t - 1] + x[t], whose derivative keeps arrays without elements."""

    def combine(one, two):
        (a, h), (b, g) = one, two
        return a * b, b * h + g

    return jax.lax.associative_scan(combine, (jax.nn.sigmoid(x), x), axis=1)[1]


def turned(pair):
    """Complex numbers in the activation."""
    x, rotation = pair
    z = (x[..., ::2] + 1j * x[..., 1::2]) * rotation
    return jnp.stack([z.real, z.imag], axis=-1).reshape(x.shape)


def with_rotation(x):
    angle = jnp.arange(x.shape[1])[:, None] / 2.0 ** jnp.arange(DIM // 2)[None]
    return x, jnp.broadcast_to(jnp.exp(1j * angle), (len(x), *angle.shape))


def drawn(pair):
    x, key = pair
    return x + 0.1 * jax.random.normal(key, x.shape[1:])[None]


def drawn_again(pair):
    """The key is what the backward needs."""
    x, key = pair
    call = jax.checkpoint(lambda x, key: jnp.tanh(x) * jax.random.normal(key, x.shape[1:])[None])
    return call(x, key)


PAIRS = {
    "a number of Python": (lambda x: (x, 2), lambda pair: pair[0] * pair[1]),
    "a truth": (
        lambda x: (x, jnp.asarray(True)),
        lambda pair: jnp.where(pair[1], pair[0], 0),
    ),
    "a literal": (lambda x: (x, jnp.int32(3)), lambda pair: pair[0] / pair[1]),
    "a key": (lambda x: (x, jax.random.key(3)), drawn),
    "a key of another kind": (lambda x: (x, jax.random.key(3, impl="rbg")), drawn),
    "a key in a checkpoint": (lambda x: (x, jax.random.key(3)), drawn_again),
    "no elements": (lambda x: (x, x[:, :0]), lambda pair: pair[0] + pair[1].sum()),
    "complex": (with_rotation, turned),
    "an associative scan": (jnp.tanh, recurrence),
    "a product of an even length": (
        lambda x: 1 + x / 9,
        lambda x: jnp.cumprod(x, axis=1),
    ),
}


@pytest.mark.first_case
@pytest.mark.parametrize("name", PAIRS)
def test_values_beside_an_activation_travel(name):
    make, use = PAIRS[name]
    losses, before, after = trained([FIRST, make, use, LAST])
    want, params = plain(lambda p, x: LAST.apply(p[3], use(make(first(p[0], x)))), before)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert_close(after, params, "float32")


def test_a_number_travels_out_of_a_checkpoint():
    make, use = PAIRS["a number of Python"]
    policy = jax.checkpoint_policies.nothing_saveable
    losses, before, _ = trained([FIRST, make, use, LAST], recompute=policy)
    want, _ = plain(lambda p, x: LAST.apply(p[3], 2 * first(p[0], x)), before)
    np.testing.assert_allclose(losses, want, rtol=1e-5)


def test_a_number_of_python_takes_the_compute_dtype():
    make, use = lambda x: (x, 0.5, 3), lambda values: values[0] * values[1] + values[2]
    halves = [FIRST, make, use, LAST]
    losses, before, _ = trained(halves, steps=1, compute_dtype=jnp.bfloat16)
    want, _ = plain(lambda p, x: LAST.apply(p[3], first(p[0], x) / 2 + 3), before, 1)
    np.testing.assert_allclose(losses, want, rtol=2e-2)


@pytest.mark.first_case
@pytest.mark.parametrize("name", ["a key", "no elements", "complex"])
def test_they_also_travel_past_stages(name):
    make, use = PAIRS[name]
    layers = [
        jpipe.skip(make, stash="value"),
        FIRST,
        LAST,
        jpipe.skip(lambda x, value: use((x, value)), pop="value"),
    ]
    losses, before, after = trained(layers)

    def apply(p, x):
        x, value = make(x)
        return use((LAST.apply(p[2], first(p[1], x)), value))

    want, params = plain(apply, before)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert_close(after, params, "float32")


def test_a_compute_dtype_leaves_complex_numbers_alone():
    layers = [
        with_rotation,
        jpipe.InitApply(lambda key, pair: {}, lambda p, pair: pair),
        turned,
    ]
    exact, _, _ = trained(layers, steps=1)
    rounded, _, _ = trained(layers, steps=1, compute_dtype=jnp.bfloat16)
    assert rounded.dtype == np.float32
    np.testing.assert_allclose(rounded, exact, rtol=1e-2)


@pytest.mark.first_case
@pytest.mark.parametrize("clip", [1e9, 0.1])
def test_complex_weights_and_their_norm(clip):
    """Norms are those of |z|^2; gradients are as JAX gives them."""

    def init(key, x):
        return {"turn": jnp.exp(1j * jnp.arange(DIM)).astype(jnp.complex64)}

    middle = jpipe.InitApply(init, lambda p, x: jnp.real(x * p["turn"][None, None]))
    pipe = jpipe.Pipeline(
        [FIRST, middle, LAST],
        loss=loss_fn,
        optimizer=optax.chain(jpipe.optim.clip_by_global_norm(clip), optax.sgd(0.5)),
        schedule=jpipe.schedules.one_f_one_b(2, N),
    )
    state = pipe.init(KEY, {"inputs": X})
    params = pipe.get_params(state)

    def value(p):
        x = jnp.real(first(p[0], X) * p[1]["turn"][None, None])
        return loss_fn(LAST.apply(p[2], x), None)

    want, gradient = jax.value_and_grad(value)(params)
    norm = np.sqrt(sum(np.sum(np.abs(g) ** 2) for g in jax.tree.leaves(gradient)))
    scale = min(1, clip / norm)
    state, metrics = pipe.step(state, {"inputs": X})
    assert metrics["gradient_norm"].dtype == np.float32
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-5)
    moved = jax.tree.map(lambda w, g: w - 0.5 * scale * g, params, gradient)
    assert_close(pipe.get_params(state), moved, "float32")


# -- Random keys of modules


class Remat(nn.Module):
    """Every language model of Linen that computes its blocks again."""

    @nn.compact
    def __call__(self, x):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dropout(0.5, deterministic=False)(nn.relu(nn.Dense(DIM)(x)))

        return nn.remat(Block)(name="block")(x)


class NnxBlock(nnx.Module):
    def __init__(self, again, *, rngs):
        self.linear, self.again = nnx.Linear(DIM, DIM, rngs=rngs), again
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        def block(self, x):
            return self.dropout(nnx.relu(self.linear(x)))

        return nnx.remat(block)(self, x) if self.again else block(self, x)


@pytest.mark.exhaustive
def test_dropout_does_not_change_by_rematerialisation():
    results = []
    for again in (False, True):
        layers = [NnxBlock(again, rngs=nnx.Rngs(i)) for i in range(2)]
        results.append(trained(layers))
    (losses, *weights), (losses_again, *weights_again) = results
    np.testing.assert_allclose(losses, losses_again, rtol=1e-6)
    assert_close(weights_again, weights, "float32")


def test_linen_rematerialises_dropout():
    losses, _, _ = trained([Remat(), Remat()])
    assert np.isfinite(losses).all()


class Noisy(nnx.Module):
    def __init__(self, *, rngs):
        self.linear, self.rngs = nnx.Linear(DIM, DIM, rngs=rngs), rngs

    def __call__(self, x):
        return self.linear(x) + jax.random.normal(self.rngs.noise(), x.shape)


def test_layers_may_share_random_streams():
    """Each draws from keys of its own."""
    rngs = nnx.Rngs(0, noise=1)
    shared, _, _ = trained([Noisy(rngs=rngs), Noisy(rngs=rngs)], steps=1)
    rngs = [nnx.Rngs(0, noise=1) for _ in range(2)]
    layers = [Noisy(rngs=one) for one in rngs]
    layers[1].linear = Noisy(rngs=nnx.Rngs(5)).linear
    apart, _, _ = trained(layers, steps=1)
    assert np.isfinite(shared).all() and np.isfinite(apart).all()


class Sampled(nn.Module):
    """Draws in every mode."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(DIM)(x) + jax.random.normal(self.make_rng("noise"), x.shape)


def test_linen_layers_that_draw_are_evaluated():
    pipe = jpipe.Pipeline(
        [jpipe.Linen(Sampled(), rngs=("noise",)), jpipe.Linen(Sampled(), rngs="noise")],
        loss=loss_fn,
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.gpipe(2, N),
    )
    state = pipe.init(KEY, {"inputs": X})
    outputs = pipe.predict(state, {"inputs": X})
    np.testing.assert_array_equal(outputs, pipe.predict(state, {"inputs": X}))
    with pytest.raises(ValueError, match=r'needs PRNG for "noise"(.|\n)*rngs=\(\.\.\.\)'):
        jpipe.Pipeline(
            [Sampled()],
            loss=loss_fn,
            optimizer=optax.sgd(0.1),
            schedule=jpipe.schedules.gpipe(1, N),
        ).init(KEY, {"inputs": X})


# -- Modes


@pytest.mark.first_case
@pytest.mark.parametrize("mode", ["eval", "open", "train"])
def test_modes_that_a_user_chose_stay(mode):
    """As in plain Flax; a mode that is left open is that of training."""

    class Block(nnx.Module):
        def __init__(self, *, rngs):
            flag = {"eval": True, "open": None, "train": False}[mode]
            self.norm = nnx.BatchNorm(DIM, use_running_average=flag, rngs=rngs)
            self.dropout = nnx.Dropout(0.9, deterministic=flag, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(x))

    block = Block(rngs=nnx.Rngs(0))
    block.norm.mean[...] = jnp.full(DIM, 3.0)
    pipe = jpipe.Pipeline(
        [block, lambda x: x],
        loss=loss_fn,
        optimizer=optax.sgd(0.0),
        schedule=jpipe.schedules.gpipe(2, N),
    )
    state = pipe.init(KEY, {"inputs": X})
    state, metrics = pipe.step(state, {"inputs": X})
    mean = pipe.get_mutable_state(state)[0]["norm"]["mean"]
    frozen = np.mean((X - 3) ** 2) / (1 + 1e-5)
    if mode == "eval":
        np.testing.assert_array_equal(mean, 3)
        np.testing.assert_allclose(metrics["loss"], frozen, rtol=1e-5)
    else:
        np.testing.assert_allclose(mean, 0.99 * 3 + 0.01 * X.mean((0, 1)), rtol=1e-5)
        assert metrics["loss"] > 2  # 1 without dropout


# -- Sameness


@dataclasses.dataclass(frozen=True)
class Config:
    name: str
    scale: float = dataclasses.field(compare=False, default=1.0)


class Named:
    """Equal by name, whatever it holds."""

    def __init__(self, scale):
        self.scale = scale

    def __eq__(self, other):
        return isinstance(other, Named)

    def __hash__(self):
        return 1


PAIRS_THAT_COMPARE_EQUAL = {
    "compare=False": (Config("a", 2.0), Config("a", 3.0)),
    "__eq__": (Named(2.0), Named(3.0)),
    "1 and True": (1, True),
    "in a tuple": ((1, 2.0), (True, 2.0)),
    "zeros": (0.0, -0.0),
}


@pytest.mark.first_case
@pytest.mark.parametrize("name", PAIRS_THAT_COMPARE_EQUAL)
def test_layers_that_compare_equal_run_their_own_programs(name):
    values = PAIRS_THAT_COMPARE_EQUAL[name]
    assert values[0] == values[1]

    def call(x, by):
        by = by[0] if isinstance(by, tuple) else by
        if isinstance(by, bool):
            return x + 10
        return jnp.copysign(1.0, getattr(by, "scale", by)) * x * getattr(by, "scale", by)

    class Layer(nnx.Module):
        def __init__(self, by, *, rngs):
            self.by, self.kernel = nnx.static(by), nnx.Param(jnp.eye(DIM))

        def __call__(self, x):
            return call(x @ self.kernel, self.by) + 1

    layers = [Layer(by, rngs=nnx.Rngs(0)) for by in values]
    losses, _, _ = trained(layers, steps=1)
    want = loss_fn(layers[1](layers[0](X)), None)
    np.testing.assert_allclose(losses, [want], rtol=1e-5)


def test_equal_layers_are_traced_once():
    traced = []

    class Layer(nnx.Module):
        def __init__(self, *, rngs):
            self.linear = nnx.Linear(DIM, DIM, rngs=rngs)
            self.sizes, self.scale = (1, 2), 0.5

        def __call__(self, x):
            traced.append(self)
            return self.linear(x) * self.scale

    counts = []
    for num_layers in (4, 8):
        traced.clear()
        pipe = jpipe.Pipeline(
            [Layer(rngs=nnx.Rngs(i)) for i in range(num_layers)],
            loss=loss_fn,
            optimizer=optax.sgd(0.1),
            schedule=jpipe.schedules.gpipe(2, N),
        )
        pipe.partition({"inputs": X})
        counts.append(len(traced))
    assert counts[0] == counts[1]


def test_constants_of_functions_tell_programs_apart():
    """A function with a derivative of its own keeps its constants where the text of a jaxpr leaves them out."""

    def scaled_by(constant):
        @jax.custom_jvp
        def function(x):
            return x * constant

        function.defjvp(lambda primals, tangents: (function(*primals), tangents[0] * constant))
        return function

    big = np.linspace(1, 2, 2000, dtype=np.float32)
    other = big.copy()
    other[1000] = 9.0  # NumPy prints neither

    def layer_of(constant):
        function = scaled_by(constant)
        return lambda x: x + function(jnp.ones(2000)).sum()

    layers = [layer_of(big), layer_of(other)]
    pipe = jpipe.Pipeline(
        [FIRST, *layers],
        loss=loss_fn,
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.gpipe(3, N),
    )
    state = pipe.init(KEY, {"inputs": X})
    (p, *_) = pipe.get_params(state)
    want = layers[1](layers[0](first(p, X)))
    np.testing.assert_allclose(pipe.predict(state, {"inputs": X}), want, rtol=1e-5)
