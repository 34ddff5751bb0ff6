"""Where a whole model gets its arguments from, and models that return their loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe
from jpipe.layers.call_arguments import CallSignature, as_given

KEY = jax.random.key(0)
ROWS, N = 8, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 4)).astype(np.float32)
SCALE = RNG.normal(size=(ROWS, 1)).astype(np.float32)
TARGETS = RNG.normal(size=(ROWS, 4)).astype(np.float32)
WEIGHTS = (RNG.random(ROWS) > 0.4).astype(np.float32)


class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(3)])

    def outputs(self, x, scale):
        for layer in self.layers:
            x = jnp.tanh(layer(x)) * scale
        return x


class Named(Net):
    def __call__(self, x, scale=1.0):
        return self.outputs(x, scale)


class MeanLoss(Net):
    def __call__(self, x, scale, targets):
        errors = jnp.mean((self.outputs(x, scale) - targets) ** 2, axis=-1)
        return errors.mean(), {"large": jnp.mean(errors > 1)}


class MaskedLoss(Net):
    """Takes the whole batch, and returns a sum and its weight."""

    def __call__(self, batch):
        errors = jnp.mean((self.outputs(batch["x"], batch["scale"]) - batch["targets"]) ** 2, axis=-1)
        return jnp.sum(errors * batch["weights"]), jnp.sum(batch["weights"])


class Penalised(Net):
    """What is summed over layers has no rows."""

    def __call__(self, x, targets):
        penalty = 0.0
        for layer in self.layers:
            x = jnp.tanh(layer(x))
            penalty += jnp.mean(x**2)
        return jnp.mean((x - targets) ** 2) + 0.1 * penalty


class TwoModes(nn.Module):
    """Its loss is smoothed in training alone."""

    @nn.compact
    def __call__(self, x, targets, train):
        for _ in range(3):
            x = jnp.tanh(nn.Dense(4)(x))
        return jnp.mean((x - (0.5 if train else 1.0) * targets) ** 2)


def pipeline(model, *, loss=None, **options):
    options = {"schedule": jpipe.schedules.one_f_one_b(2, N), "optimizer": optax.sgd(0.1)} | options
    return jpipe.Pipeline(model, loss=loss, **options)


def trained(model, value, batch, steps=2):
    """The weights after plain training, and the losses before each step."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    step = jax.jit(jax.value_and_grad(lambda p: value(nnx.merge(graph, p, rest))))
    losses = []
    for _ in range(steps):
        loss, grads = step(params)
        losses.append(loss)
        params = jax.tree.map(lambda a, g: a - 0.1 * g, params, grads)
    return nnx.to_pure_dict(params), losses


def check(model, value, batch, steps=2, **options):
    """Trains in a pipeline and plainly; returns the pipeline and its state."""
    pipe = pipeline(model, **options)
    state = pipe.init(KEY, batch)
    params, want = trained(model, value, batch, steps)
    np.testing.assert_allclose(pipe.plain_loss(state)(pipe.get_params(state), batch), want[0], rtol=1e-5)
    losses = []
    for _ in range(steps):
        np.testing.assert_allclose(pipe.evaluate(state, batch)["loss"], want[len(losses)], rtol=1e-5)
        state, metrics = pipe.step(state, batch)
        losses.append(metrics["loss"])
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), pipe.get_params(state), params)
    return pipe, state


def square(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


@pytest.mark.first_case
@pytest.mark.parametrize("inputs", [None, "one", "dict", "tuple"])
def test_arguments_are_entries_of_the_batch(inputs):
    model = Named(rngs=nnx.Rngs(0))
    batch = {
        None: {"x": X, "scale": SCALE},
        "one": {"inputs": X, "scale": SCALE},
        "dict": {"inputs": {"x": X}, "scale": SCALE},
        "tuple": {"inputs": (X, SCALE)},
    }[inputs] | {"targets": TARGETS}

    def loss(outputs, given):  # it sees the batch as the user gave it
        assert jax.tree.structure(given) == jax.tree.structure(batch)
        return square(outputs, given)

    pipe, state = check(model, lambda m: square(m(X, SCALE), batch), batch, steps=1, loss=loss)
    entries = {name: a for name, a in batch.items() if name != "targets"}
    assert pipe.predict(state, jax.tree.map(lambda a: a[:3], entries)).shape == (3, 4)


@pytest.mark.parametrize("data", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_model_returns_its_loss_and_numbers_beside_it(data):
    model = MeanLoss(rngs=nnx.Rngs(0))
    batch = {"x": X, "scale": SCALE, "targets": TARGETS}
    pipe, state = check(
        model,
        lambda m: m(X, SCALE, TARGETS)[0],
        batch,
        has_aux=True,
        mesh=jpipe.make_mesh(stage=2, data=data),
        schedule=jpipe.schedules.one_f_one_b(2, N // data),
    )
    # The end of the model is computed on all rows together, of any number.
    few = jax.tree.map(lambda a: a[:3], batch)
    params = pipe.get_params(state)
    nnx.update(model, params)
    loss, aux = model(**few)
    found = pipe.evaluate(state, few)
    np.testing.assert_allclose(found["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(found["aux"]["large"], aux["large"])
    # What follows the last weights belongs to the loss.
    outputs = jnp.tanh(pipe.predict(state, few)) * few["scale"]
    np.testing.assert_allclose(outputs, model.outputs(few["x"], few["scale"]), rtol=1e-5)


def test_a_model_of_the_whole_batch_returns_a_sum_and_its_weight():
    batch = {"x": X, "scale": SCALE, "targets": TARGETS, "weights": WEIGHTS}

    def mean(model):
        total, weight = model(batch)
        return total / weight

    check(MaskedLoss(rngs=nnx.Rngs(0)), mean, batch)


def test_a_sum_over_the_rows_is_found_in_the_end_of_a_model():
    class Sum(Net):
        def __call__(self, x, targets):
            return jnp.sum((self.outputs(x, 1.0) - targets) ** 2)

    pipe = pipeline(Sum(rngs=nnx.Rngs(0)))
    with pytest.warns(UserWarning, match="is a sum over the rows"):
        pipe.init(KEY, {"x": X, "targets": TARGETS})


@pytest.mark.filterwarnings("error:.*over the batch axis")
def test_a_loss_that_values_without_rows_enter_is_that_of_microbatches():
    batch = {"x": X, "targets": TARGETS}
    pipe, state = check(Penalised(rngs=nnx.Rngs(0)), lambda m: m(X, TARGETS), batch)
    with pytest.raises(ValueError, match="7 rows are no multiple of 4"):
        pipe.evaluate(state, jax.tree.map(lambda a: a[:7], batch))


def test_the_end_in_evaluation_is_that_of_the_model_in_evaluation():
    layer = jpipe.Linen(TwoModes(), train={"train": True}, evaluate={"train": False})
    batch = {"x": X, "targets": TARGETS}
    pipe = pipeline(layer)
    state = pipe.init(KEY, batch)
    params = {"params": pipe.get_params(state)}
    want = [TwoModes().apply(params, X, TARGETS, train) for train in (False, True)]
    found = [pipe.evaluate(state, batch)["loss"], pipe.step(state, batch)[1]["loss"]]
    np.testing.assert_allclose(found, want, rtol=1e-5)


@pytest.mark.first_case
@pytest.mark.parametrize("given", ["module", "factory", "list"])
def test_arguments_of_nnx_modules_that_are_given_once(given):
    class Noisy(nnx.Module):
        def __init__(self, *, rngs):
            self.first, self.second = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x, train):
            return self.second(self.dropout(self.first(x), deterministic=not train))

    model = Noisy(rngs=nnx.Rngs(jax.random.fold_in(KEY, 0)))
    layer = jpipe.NNX(Noisy if given == "factory" else model, train={"train": True}, evaluate={"train": False})
    pipe = pipeline([layer, jnp.tanh] if given == "list" else layer, loss=lambda outputs, batch: jnp.mean(outputs))
    state = pipe.init(KEY, {"inputs": X})
    want = model(X, train=False)
    np.testing.assert_allclose(
        pipe.predict(state, {"inputs": X}), jnp.tanh(want) if given == "list" else want, rtol=1e-5
    )
    loss = pipe.step(state, {"inputs": X})[1]["loss"]
    assert abs(loss - jnp.mean(want)) > 1e-3


def call(x, mask, scale=1.0, *, positions=None):
    return x


@pytest.mark.parametrize(
    ("batch", "positional", "keywords"),
    [
        ({"inputs": X, "mask": SCALE}, 1, ["mask"]),
        ({"x": X, "mask": SCALE, "positions": X, "targets": X}, 0, ["mask", "positions", "x"]),
        ({"inputs": (X, SCALE), "scale": X}, 2, ["scale"]),
        ({"inputs": {"x": X, "mask": X}, "positions": X}, 0, ["mask", "positions", "x"]),
        ({"inputs": {"other": X}, "mask": X}, 1, ["mask"]),
    ],
)
def test_entries_become_arguments_and_entries_again(batch, positional, keywords):
    signature = CallSignature(call, "f", returns_loss=False)
    arguments = signature.with_arguments(batch)
    assert len(arguments["inputs"].positional) == positional
    assert sorted(arguments["inputs"].keywords) == keywords
    assert set(arguments) - {"inputs"} == set(batch) - {"inputs", *keywords}
    assert signature.with_arguments(arguments) is arguments
    back = as_given(arguments)
    assert jax.tree.structure(back) == jax.tree.structure(batch)
    assert all(a is b for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(batch)))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"inputs": X}, "\\(f\\) takes the arguments x, mask, scale, positions, and `batch` has no 'mask'"),
        ({"tokens": X}, "has no 'x' and no 'mask', got entries \\['tokens'\\]"),
    ],
)
def test_arguments_that_are_missing(batch, message):
    with pytest.raises(ValueError, match=message):
        CallSignature(call, "f", returns_loss=False).with_arguments(batch)


def test_a_list_of_layers_has_no_loss_of_its_own():
    with pytest.raises(ValueError, match="`loss` must be a function"):
        pipeline([jnp.tanh, jnp.tanh])


def test_what_is_no_nnx_module():
    with pytest.raises(ValueError, match="takes a Flax NNX module or a factory of one, got int"):
        jpipe.NNX(3)
