"""Optimizers as Optax has them: on stages they do what they do on the whole model, or are refused."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from flax import nnx
from helpers import assert_close

import jpipe
from jpipe.states import portable

STEPS = 4


class Dense(nnx.Module):
    """Weights and a bias, through a tanh."""

    def __init__(self, num_in, num_out, *, rngs):
        self.linear = nnx.Linear(num_in, num_out, param_dtype=float, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class Affine(nnx.Module):
    """Vectors alone."""

    def __init__(self, num_features, *, rngs):
        del rngs
        self.scale = nnx.Param(jnp.linspace(0.5, 1.5, num_features, dtype=float))
        self.shift = nnx.Param(jnp.linspace(-0.5, 0.5, num_features, dtype=float))

    def __call__(self, x):
        return x * self.scale[None] + self.shift[None]


class Tanh(nnx.Module):
    """No parameters."""

    def __init__(self, *, rngs):
        del rngs

    def __call__(self, x):
        return jnp.tanh(x)


LAYERS = [
    functools.partial(Dense, 5, 5),
    functools.partial(Affine, 5),
    Tanh,
    functools.partial(nnx.Linear, 5, 5, use_bias=False, param_dtype=float),
]
# A stage without vectors, one of vectors alone, one without parameters.
CUTS = {
    "one": lambda: (jpipe.schedules.gpipe(1, 2), []),
    "two": lambda: (jpipe.schedules.one_f_one_b(2, 2), [3]),
    "three": lambda: (jpipe.schedules.gpipe(3, 3), [1, 3]),
    "four": lambda: (jpipe.schedules.one_f_one_b(4, 4), [1, 2, 3]),
}


def squared_error(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def batches():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS, 2, 12, 5)).astype(jnp.result_type(float))
    return [{"inputs": inputs, "targets": targets} for inputs, targets in x]


@functools.cache
def plain_model(dtype):
    """The layers, their weights, and the gradient of a whole minibatch."""
    layers = [make(rngs=nnx.Rngs(5)) for make in LAYERS]
    model = oracles.PlainModel([lambda rngs, m=m: m for m in layers], jax.random.key(0))

    def loss(params, batch):
        return squared_error(model(params, batch["inputs"]), batch)

    return layers, model.params, jax.jit(jax.grad(loss))


def unpipelined(optimizer):
    """Weights before and after every step, and the optimizer's state."""
    _, params, gradient = plain_model(str(jnp.result_type(float)))
    state, trajectory, update = (
        optimizer.init(params),
        [params],
        jax.jit(optimizer.update),
    )
    for batch in batches():
        updates, state = update(gradient(params, batch), state, params)
        params = optax.apply_updates(params, updates)
        trajectory.append(jax.tree.map(np.asarray, params))
    return trajectory, state


def pipeline(optimizer, cut):
    layers, *_ = plain_model(str(jnp.result_type(float)))
    schedule, boundaries = CUTS[cut]()
    return jpipe.Pipeline(
        layers,
        loss=squared_error,
        optimizer=optimizer,
        schedule=schedule,
        boundaries=boundaries,
    )


def check(optimizer, cut="two", plain=None):
    """After every step the pipeline's weights are those of the plain model, and so is its optimizer's last state."""
    pipe, dtype = pipeline(optimizer, cut), str(jnp.result_type(float))
    state = pipe.init(jax.random.key(0), batches()[0])
    (start, *want), inner = unpipelined(plain or optimizer)
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (start, want[-1]))))
    for batch, params in zip(batches(), want, strict=True):
        state, _ = pipe.step(state, batch)
        assert_close(pipe.get_params(state), params, dtype)
    kept = {k: a for leaves in portable.to_portable(state).leaves.optimizer_state for k, a in leaves.items()}
    if plain is None:
        for path, leaf in jax.tree.leaves_with_path(inner):
            assert_close(kept.pop(jax.tree_util.keystr(path)), np.asarray(leaf), dtype)
        assert not kept


# -- Optimizers that treat each layer by itself ---------------------------------------


def matrices(params):
    return jax.tree.map(lambda a: a.ndim > 1, params)


def biases_and_vectors(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("bias", "shift", "scale"), params)


def by_layer(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: "first" if path[0].idx == 0 else "others", params)


def warm_up_cosine():
    return optax.warmup_cosine_decay_schedule(0.0, 0.2, 2, STEPS, 0.01)


def every_two(optimizer, **options):
    return optax.MultiSteps(optimizer, 2, accumulator_dtype=jnp.float64, **options)


# Made by the test: some make arrays, in the precision of the moment.
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.1),
    "adamw, decay of matrices": lambda: optax.adamw(0.1, weight_decay=0.5, mask=matrices),
    "adamw, decay by path": lambda: optax.adamw(0.1, weight_decay=0.5, mask=biases_and_vectors),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=5, weight_decay_rate=0.1, momentum=0.9),
    "lion": lambda: optax.lion(0.01),
    "lamb": lambda: optax.lamb(0.1, weight_decay=0.1),
    "muon": lambda: optax.contrib.muon(0.1, weight_decay=0.1),
    "partition": lambda: optax.partition({"first": optax.adam(0.1), "others": optax.sgd(0.1, momentum=0.9)}, by_layer),
    "every two steps": lambda: every_two(optax.adam(0.1)),
    # A schedule that ends at 0 would end at the rounding of 0.5 - 0.5, which is the compiler's.
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(
        warm_up_cosine(), weight_decay=optax.linear_schedule(0.5, 0.1, 3), eps=1e-3
    ),
    "warm-up and cosine": lambda: optax.sgd(warm_up_cosine(), momentum=0.9),
    "moving average": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "masked": lambda: optax.chain(optax.masked(optax.scale_by_adam(), matrices), optax.scale(-0.1)),
    "apply_every": lambda: optax.chain(optax.apply_every(2), optax.sgd(0.1)),
    "adaptive clipping": lambda: optax.chain(optax.adaptive_grad_clip(0.05), optax.sgd(0.1)),
    "schedule-free": lambda: optax.contrib.schedule_free_adamw(0.1, warmup_steps=2),
    "conditional": lambda: optax.chain(
        optax.sgd(0.1),
        optax.conditionally_mask(optax.scale(2.0), lambda step, **_: step > 1),
    ),
}


# Optax computes learning-rate schedules in float32, whatever the weights are.
FLOAT32 = ("injected", "warm-up and cosine")
# What goes by labels meets stages where a label is missing.
LABELLED = ("partition", "muon")


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("name", "cut"),
    [(name, "four" if name in LABELLED else ["two", "three"][i % 2]) for i, name in enumerate(OPTIMIZERS)],
)
@pytest.mark.sampled(10)
def test_equals_the_plain_model(name, cut):
    with jax.enable_x64(name not in FLOAT32):
        check(OPTIMIZERS[name](), cut)


def test_clipping_by_the_norm_over_all_stages():
    adamw = optax.adamw(0.1, eps=1e-3, weight_decay=0.1, mask=matrices)
    check(
        optax.chain(jpipe.optim.clip_by_global_norm(0.05), adamw),
        "three",
        plain=optax.chain(optax.clip_by_global_norm(0.05), adamw),
    )


class AverageState(NamedTuple):
    average: list


def average_of_weights(decay):
    """Keeps the moving average of the weights, for evaluation; stands last in a chain."""

    def update(updates, state, params):
        after = optax.apply_updates(params, updates)
        average = optax.incremental_update(after, state.average, 1 - decay)
        return updates, AverageState(average)

    return optax.GradientTransformation(AverageState, update)


def test_average_of_weights():
    with jax.enable_x64(True):
        check(optax.chain(optax.sgd(0.1), average_of_weights(0.9)), "three")


# -- Optimizers that do not -----------------------------------------------------------

APART = "`optimizer` lets the update of one layer depend on others"
MORE = r"(?s)`optimizer` cannot update .*It is called as"
FORM = r"changes the form of its state: {} after `init`, and {} after an update"


def counting(first, step):
    """Adds `step` to a number that begins with `first`."""
    return optax.GradientTransformation(
        lambda params: {"count": first()},
        lambda updates, state, params: (updates, {"count": state["count"] + step()}),
    )


REFUSED = {
    "clip_by_global_norm": (lambda: optax.clip_by_global_norm(1.0), APART),
    "apply_if_finite": (lambda: optax.apply_if_finite(optax.sgd(0.1), 3), APART),
    "skip_not_finite": (
        lambda: every_two(optax.sgd(0.1), should_skip_update_fn=optax.skip_not_finite),
        APART,
    ),
    "normalize_by_update_norm": (optax.normalize_by_update_norm, APART),
    "add_noise": (lambda: optax.add_noise(0.1, 0.5, key=0), APART),
    "noisy_sgd": (lambda: optax.noisy_sgd(0.1, key=0), APART),
    "prodigy": (optax.contrib.prodigy, APART),
    "dog": (optax.contrib.dog, APART),
    "mechanize": (lambda: optax.contrib.mechanize(optax.sgd(0.1)), APART),
    "clipping of sums of gradients": (
        lambda: every_two(jpipe.optim.clip_by_global_norm(1.0)),
        APART,
    ),
    "lookahead": (lambda: optax.lookahead(optax.sgd(0.1), 2, 0.5), MORE),
    "polyak_sgd": (optax.polyak_sgd, MORE),
    "lbfgs": (optax.lbfgs, MORE),
    "reduce_on_plateau": (optax.contrib.reduce_on_plateau, MORE),
    "momo": (optax.contrib.momo, MORE),
    "galore": (lambda: optax.contrib.galore(0.1, rank=2), MORE),
    "state of another dtype": (
        lambda: counting(lambda: 0, lambda: 0.5),
        FORM.format(r"\['count'\] is int64\[\]", r"float64\[\]"),
    ),
    "state of another shape": (
        lambda: counting(lambda: jnp.zeros(1), lambda: jnp.ones(2)),
        FORM.format(r"\['count'\] is float64\[1\]", r"float64\[2\]"),
    ),
    "monitor": (
        lambda: optax.monitor({"first": lambda updates: jax.tree.leaves(updates)[0]}),
        FORM.format(r".*\['first'\] is nothing", r"float64\[5\]"),
    ),
    "mask as a tree": (
        lambda: optax.adamw(0.1, mask=matrices(plain_model("float64")[1])),
        r"cannot update stage 0 by itself: .*has another structure than the parameters",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    with jax.enable_x64(True):
        make, message = REFUSED[name]
        pipe = pipeline(make(), "three")
        with pytest.raises(ValueError, match=message):
            pipe.init(jax.random.key(0), batches()[0])


def test_on_one_stage_layers_may_mix():
    with jax.enable_x64(True):
        mixing = optax.chain(optax.clip_by_global_norm(0.05), optax.adam(0.1))
        check(optax.apply_if_finite(mixing, 3), "one")
