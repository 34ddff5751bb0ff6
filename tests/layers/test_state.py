"""Mutable state of layers: batch norms equal plain Flax on the whole minibatch, all else a plain loop over
microbatches.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_close

import jpipe
from jpipe.layers.as_layers import as_layers

DIM, ROWS, N = 4, 16, 4
KEY = jax.random.key(3)


def loss_fn(outputs, batch):
    return jnp.mean(jax.tree.leaves(outputs)[0] ** 2)


def batch_of(seed=0, shift=0.0):
    """Rows that differ from microbatch to microbatch, in mean and in spread."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(ROWS, DIM)) * np.linspace(0.5, 2, ROWS)[:, None]
    rows += np.linspace(-1, 3, ROWS)[:, None] + shift
    lengths = rng.integers(0, 2, ROWS) * np.repeat([0, 1, 1, 1], ROWS // 4)
    return {"inputs": (rows.astype(np.float32), lengths.astype(bool))}


def trained(layer, *, schedule=None, steps=2, mesh=None, shift=0.0, **options):
    """A layer that takes `(x, mask)`, before a linear layer: its state after some steps, by path."""
    pipe = jpipe.Pipeline(
        [layer, lambda y: y[..., :1]],
        loss=loss_fn,
        optimizer=optax.sgd(0.0),
        schedule=schedule or jpipe.schedules.gpipe(2, N),
        mesh=mesh,
        **options,
    )
    state = pipe.init(KEY, batch_of(shift=shift))
    params = pipe.get_params(state)[0]
    before = pipe.get_mutable_state(state)[0]
    for k in range(steps):
        state, metrics = pipe.step(state, batch_of(k, shift))
    if not pipe.schedule.synchronous:
        state, _ = pipe.flush(state)
    return params, before, pipe.get_mutable_state(state)[0]


# -- Batch norms: plain Flax on the whole minibatch


class Views(nnx.Module):
    """A norm that is called twice with other rows."""

    def __init__(self, *, rngs):
        self.norm = nnx.BatchNorm(DIM, momentum=0.8, use_fast_variance=False, rngs=rngs)

    def __call__(self, inputs):
        x, _ = inputs
        return self.norm(x) + self.norm(3 * x + 5)


class Masked(Views):
    def __call__(self, inputs):
        x, mask = inputs
        return self.norm(x, mask=mask[:, None])


class MaskedTwice(Views):
    """One call with a mask, one without."""

    def __call__(self, inputs):
        x, mask = inputs
        return self.norm(x, mask=mask[:, None]) + self.norm(x - 4)


class Rematerialised(Views):
    def __call__(self, inputs):
        x, _ = inputs
        return nnx.remat(lambda self, x: self.norm(x))(self, x)


class Scanned(nnx.Module):
    """Stacked norms that a loop runs over; each sees what the one before passes on, and not what it returns."""

    def __init__(self, *, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stacked(rngs):
            return Views(rngs=rngs)

        self.views = stacked(rngs)

    def __call__(self, inputs):
        x, _ = inputs

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def loop(x, views):
            views.norm(x)
            return jnp.tanh(x) + 1

        return loop(x, self.views)


class CalledInALoop(Views):
    """One norm, which every turn calls."""

    def __call__(self, inputs):
        x, _ = inputs

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def loop(carry, _):
            norm, x = carry
            norm(x)
            return norm, jnp.tanh(x) + 1

        return loop((self.norm, x), jnp.arange(3))[1]


class Mapped(nnx.Module):
    """Two norms under `vmap`, along the second axis of their statistics."""

    def __init__(self, *, rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=0, out_axes=1)
        def stacked(rngs):
            return Views(rngs=rngs)

        self.views = stacked(rngs)

    def __call__(self, inputs):
        x, _ = inputs
        both = jnp.stack([x, 2 * x - 3], axis=1)
        call = nnx.vmap(lambda views, x: views.norm(x), in_axes=(1, 1), out_axes=1)
        return call(self.views, both).sum(axis=1)


class LinenViews(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        x, mask = inputs
        norm = nn.BatchNorm(use_running_average=False, momentum=0.8)
        return norm(x, mask=mask[:, None]) + norm(2 * x)


class LinenScanned(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        x, _ = inputs

        class Turn(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                nn.BatchNorm(use_running_average=False, momentum=0.8)(x)
                return jnp.tanh(x) + 1, None

        loop = nn.scan(
            nn.remat(Turn),
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True},
            length=3,
        )
        return loop()(x, None)[0]


class Bridged(nn.Module):
    """A norm of NNX inside of a module of Linen."""

    @nn.compact
    def __call__(self, inputs):
        x, _ = inputs
        return nnx.bridge.to_linen(nnx.BatchNorm, DIM, momentum=0.8)(x)


def plain_nnx(make, params, before, steps, shift):
    module = make(rngs=nnx.Rngs(0))
    graph, old = nnx.split(module)
    values = {**flat(params), **flat(before)}
    nnx.update(
        module,
        nnx.from_flat_state([(path, v.replace(values[path])) for path, v in nnx.to_flat_state(old) if path in values]),
    )
    for k in range(steps):
        module(batch_of(k, shift)["inputs"])
    return {path: v[...] for path, v in nnx.to_flat_state(nnx.state(module)) if path in flat(before)}


def plain_linen(module, params, before, steps, shift):
    for k in range(steps):
        _, after = module.apply(
            {"params": params, **before},
            batch_of(k, shift)["inputs"],
            mutable=list(before),
        )
        before = {**before, **after}
    return flat(before)


def flat(tree):
    leaves = jax.tree.leaves_with_path(tree)
    return {tuple(key.key for key in path): a for path, a in leaves}


NORMS = {
    "called twice": Views,
    "mask": Masked,
    "mask, called twice": MaskedTwice,
    "remat": Rematerialised,
    "scan": Scanned,
    "called in a loop": CalledInALoop,
    "vmap": Mapped,
    "linen": LinenViews(),
    "linen scan": LinenScanned(),
    "bridge": Bridged(),
}


@pytest.mark.first_case
@pytest.mark.parametrize("name", NORMS)
def test_running_statistics_are_those_of_the_whole_minibatch(name):
    layer = NORMS[name]
    params, before, after = trained(layer)
    plain = plain_linen if isinstance(layer, nn.Module) else plain_nnx
    want = plain(layer, params, before, 2, 0.0)
    assert want.keys() == flat(after).keys()
    for path, value in flat(after).items():
        np.testing.assert_allclose(value, want[path], rtol=2e-5, atol=1e-6, err_msg=str(path))


def test_a_stage_runs_again_if_only_its_running_statistics_have_moved():
    """The norm is carried by a loop, and the outputs of the loop do not depend on its running statistics."""

    class ReadInALoop(Views):
        def __call__(self, inputs):
            x, _ = inputs

            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def loop(carry, _):
                norm, x, total = carry
                return norm, jnp.tanh(x) + 1, total + norm(x)

            return loop((self.norm, x, jnp.zeros_like(x)), jnp.arange(3))[2]

    params, before, after = trained(ReadInALoop, recompute="full")
    want = plain_nnx(ReadInALoop, params, before, 2, 0.0)
    for path, value in flat(after).items():
        np.testing.assert_allclose(value, want[path], rtol=2e-5, atol=1e-6)


@pytest.mark.first_case
@pytest.mark.parametrize(
    "schedule,data",
    [
        (jpipe.schedules.one_f_one_b(2, N), 2),
        (jpipe.schedules.one_f_one_b(2, N, replicas=(2, 1)), 1),
        (jpipe.schedules.gpipe(2, 2, replicas=(2, 1)), 2),
        (jpipe.schedules.pipedream(2, N), 1),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_masks_weigh_over_replicas_copies_and_late_updates(schedule, data):
    mesh = jpipe.make_mesh(stage=schedule.num_devices, data=data)
    params, before, after = trained(MaskedTwice, schedule=schedule, mesh=mesh)
    want = plain_nnx(MaskedTwice, params, before, 2, 0.0)
    for path, value in flat(after).items():
        np.testing.assert_allclose(value, want[path], rtol=2e-5, atol=1e-6)


def test_large_means_keep_their_variance():
    """In float32, 3e4^2 has no digit left for a variance of 1."""
    shift = 3e4
    _, before, after = trained(Views, steps=1, shift=shift)
    x, _ = batch_of(0, shift)["inputs"]
    x = x.astype(np.float64)
    want = 0.8 * (0.8 + 0.2 * x.var(0)) + 0.2 * (3 * x + 5).var(0)
    np.testing.assert_allclose(after["norm"]["var"], want, rtol=2e-3)


# -- Everything else: one microbatch after the other


class Buffer(nnx.Variable):
    pass


class Tracker(nnx.Module):
    """State of many kinds: written and not, of numbers that are not finite, and read in the next call."""

    def __init__(self, *, rngs):
        self.count = Buffer(jnp.int32(0))
        self.seen = Buffer(jnp.int32(0))
        self.ema = Buffer(jnp.zeros(DIM))
        self.low = Buffer(jnp.full(DIM, jnp.inf))
        self.mask = Buffer(jnp.where(jnp.eye(DIM, dtype=bool), 0.0, -jnp.inf))
        self.table = Buffer(jnp.linspace(0.1, 0.7, DIM, dtype=jnp.bfloat16))
        self.turned = Buffer(jnp.exp(1j * jnp.arange(DIM)))

    def __call__(self, inputs):
        x, mask = inputs
        moved = self.table[...].astype(x.dtype) * self.turned[...].real - self.ema[...]
        y = x + moved[None]
        self.count[...] += 1
        self.seen[...] += mask.sum()
        self.ema[...] = 0.9 * self.ema[...] + 0.1 * x.mean(0)
        self.low[...] = jnp.minimum(self.low[...], x.min(0))
        self.turned[...] = self.turned[...] * jnp.exp(1j * x.mean())
        return y


CONSTANTS = ("mask", "table")


def plain_sequence(steps, num_parts):
    """Calls of plain Flax, one microbatch after the other."""
    module = Tracker(rngs=nnx.Rngs(0))
    for k in range(steps):
        x, mask = batch_of(k)["inputs"]
        for rows in np.split(np.arange(ROWS), num_parts):
            module((x[rows], mask[rows]))
    return {path[0]: v[...] for path, v in nnx.to_flat_state(nnx.state(module))}


@pytest.mark.first_case
@pytest.mark.parametrize(
    "schedule",
    [
        jpipe.schedules.gpipe(2, N),
        jpipe.schedules.zero_bubble_h1(2, N),
        jpipe.schedules.pipemare(2, N),
        jpipe.schedules.one_f_one_b(2, N, replicas=(1, 2)),
    ],
    ids=lambda schedule: f"{schedule.name} {schedule.num_devices}",
)
def test_state_goes_from_microbatch_to_microbatch(schedule):
    _, before, after = trained(Tracker, schedule=schedule)
    want = plain_sequence(2, N)
    for name, value in after.items():
        if name in CONSTANTS:
            assert value.tobytes() == np.asarray(before[name]).tobytes()
        np.testing.assert_allclose(
            value.astype(np.complex64),
            want[name].astype(np.complex64),
            rtol=1e-5,
            atol=1e-6,
        )


class Mean(nnx.Module):
    def __init__(self, *, rngs):
        self.ema = Buffer(jnp.zeros(DIM))
        self.count = Buffer(jnp.int32(0))

    def __call__(self, inputs):
        x, _ = inputs
        self.ema[...] = 0.9 * self.ema[...] + 0.1 * x.mean(0)
        self.count[...] += 1
        return x


def test_replicas_keep_the_mean_of_their_states():
    mesh = jpipe.make_mesh(stage=2, data=2)
    _, _, after = trained(Mean, mesh=mesh)
    replicas = []
    for rows in np.split(np.arange(ROWS), 2):
        replicas.append(np.zeros(DIM))
        for k in range(2):
            for part in np.split(rows, N):
                x, _ = batch_of(k)["inputs"]
                replicas[-1] = 0.9 * replicas[-1] + 0.1 * x[part].mean(0)
    np.testing.assert_allclose(after["ema"], np.mean(replicas, axis=0), rtol=1e-5)
    assert after["count"] == 2 * N


def test_a_value_that_is_not_finite_changes_nothing():
    class Nan(Mean):
        def __call__(self, inputs):
            x, mask = inputs
            self.ema[...] = jnp.where(mask.any(), jnp.nan, self.ema[...] + 1)
            return x

    _, _, after = trained(Nan, steps=1)
    _, mask = batch_of(0)["inputs"]
    np.testing.assert_array_equal(after["ema"], sum(not m.any() for m in np.split(mask, N)))


def test_constants_are_kept_once():
    """What no call writes is in no stash and in no statistics."""

    class Frozen(nnx.Module):
        def __init__(self, *, rngs):
            self.kernel = Buffer(jax.random.normal(rngs.params(), (DIM, DIM)))
            self.scale = nnx.Param(jnp.ones(DIM))

        def __call__(self, inputs):
            x, mask = inputs
            return jnp.tanh(x @ self.kernel[...]) * self.scale[...][None]

    pipe = jpipe.Pipeline(
        [Frozen, lambda y: y[..., :1]],
        loss=loss_fn,
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.gpipe(2, 2 * N),
    )
    state = pipe.init(KEY, batch_of())
    sizes = [a.size for a in jax.tree.leaves(state.buffers)]
    assert max(sizes) == 2 * ROWS * DIM  # activations, on two devices
    assert not jax.tree.leaves(state.buffers["statistics"])
    kernel, scale = pipe.get_mutable_state(state)[0]["kernel"], np.ones(DIM)
    gradient = jax.grad(lambda scale: loss_fn((jnp.tanh(batch_of()["inputs"][0] @ kernel) * scale[None])[:, :1], None))
    state, _ = pipe.step(state, batch_of())
    assert_close(pipe.get_params(state)[0]["scale"], scale - 0.1 * gradient(scale), "float32")


# -- What is refused


class Integers(Mean):
    def __call__(self, inputs):
        x, mask = inputs
        self.count[...] += mask.sum()
        return x


class Written(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, inputs):
        self.linear.kernel[...] = jnp.clip(self.linear.kernel[...], -0.1, 0.1)
        return self.linear(inputs[0])


class Sown(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        self.sow("penalties", "size", jnp.mean(inputs[0] ** 2))
        return inputs[0]


class WrittenAlways(nn.Module):
    @nn.compact
    def __call__(self, x):
        mean = self.variable("means", "mean", jnp.zeros, (1, 4))
        mean.value = 0.5 * mean.value + 0.5 * x.mean(0, keepdims=True)
        return nn.Dense(4)(x)


def test_a_linen_layer_that_writes_in_evaluation_is_told_how_not_to():
    (layer,) = as_layers([WrittenAlways()])
    args = (jax.ShapeDtypeStruct((2, 4), np.float32),)
    layer = layer.bound(args)
    with pytest.raises(ValueError, match="writes to its state in evaluation.*mean.*is_mutable_collection"):
        jax.eval_shape(layer.evaluate, layer.parameters, layer.state, args)


class InABranch(Views):
    def __call__(self, inputs):
        x, mask = inputs
        return nnx.cond(mask.any(), lambda norm, x: norm(x), lambda norm, x: x, self.norm, x)


@pytest.mark.parametrize(
    "layer,options,words",
    [
        (Written, {}, r"writes to its own parameter \['linear'\]\['kernel'\]"),
        (Sown(), {}, "changes the form of its mutable state.*jpipe.report"),
        (InABranch, {}, "a batch norm is inside of `cond`"),
        (Integers, {"mesh": (2, 2)}, "has no meaning for integers"),
        (
            Mean,
            {"schedule": jpipe.schedules.gpipe(2, 4, replicas=(2, 1))},
            "has 2 copies",
        ),
        (
            Mean,
            {"schedule": jpipe.schedules.pipedream(2, 4), "mesh": (2, 2)},
            "would differ while a minibatch is in flight",
        ),
        (Tracker, {"recompute": "full"}, "reads its mutable state in training"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_refused_before_a_compile(layer, options, words):
    if "mesh" in options:
        stage, data = options["mesh"]
        options = {**options, "mesh": jpipe.make_mesh(stage=stage, data=data)}
    with pytest.raises(ValueError, match=words):
        trained(layer, **options)


def test_lifted_transforms_hand_parameters_back():
    """`nnx.remat` returns all variables, parameters too, and this is no write."""

    class Block(nnx.Module):
        def __init__(self, *, rngs):
            self.linear = nnx.Linear(DIM, DIM, rngs=rngs)

        def __call__(self, inputs):
            return nnx.remat(lambda self, x: self.linear(x))(self, inputs[0])

    trained(Block, steps=1)


class Balanced(nnx.Module):
    """State that its outputs read: a bias that a minibatch moves against the mean of its rows."""

    def __init__(self, *, rngs):
        self.bias, self.mean = Buffer(jnp.zeros(DIM)), Buffer(jnp.zeros(DIM))

    def __call__(self, inputs):
        x, _ = inputs
        y = x + self.bias[...][None]
        mean = jpipe.minibatch_mean(y.mean(0))
        self.bias[...] -= 0.25 * jnp.sign(mean - 0.1)
        self.mean[...] = mean
        return y


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": (2, 2)},
        *(
            pytest.param(options, marks=pytest.mark.exhaustive)
            for options in (
                {"mesh": (2, 1)},
                {"schedule": jpipe.schedules.zero_bubble_h1(2, N)},
                {"schedule": jpipe.schedules.gpipe(2, 4, replicas=(2, 1))},
            )
        ),
    ],
    ids=str,
)
def test_means_of_a_minibatch_move_state_once(options):
    if "mesh" in options:
        stage, data = options["mesh"]
        options = {"mesh": jpipe.make_mesh(stage=stage, data=data)}
    _, _, after = trained(Balanced, steps=3, **options)
    bias = np.zeros(DIM)
    for k in range(3):
        x, _ = batch_of(k)["inputs"]
        mean = (x + bias).mean(0)
        bias = bias - 0.25 * np.sign(mean - 0.1)
    np.testing.assert_allclose(after["bias"], bias, rtol=1e-6)
    np.testing.assert_allclose(after["mean"], mean, rtol=1e-5)


def test_means_of_a_minibatch_are_values_elsewhere():
    value = jnp.array([1.0, 2.0])
    np.testing.assert_array_equal(jpipe.minibatch_mean(value), value)
    assert jax.grad(lambda v: jpipe.minibatch_mean(v).sum())(value).sum() == 0
    with pytest.raises(ValueError, match="floating-point numbers, got int32"):
        jpipe.minibatch_mean(jnp.array([1]))
