"""A whole model in a pipeline: everything that a user sees has the paths of the model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jpipe
from jpipe import schedules

KEY = jax.random.key(3)
ROWS, N = 8, 4
BATCH = {
    "inputs": np.random.default_rng(2).normal(size=(ROWS, 6)).astype(np.float32),
    "targets": np.ones((ROWS, 5), np.float32),
}


class MLP(nnx.Module):
    def __init__(self, *, rngs):
        sizes = [6, 8, 8, 8, 5]
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in zip(sizes, sizes[1:])])

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


def loss(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def make(num_stages=2, model=MLP, **options):
    defaults = {"optimizer": optax.adam(0.1), "schedule": schedules.one_f_one_b(num_stages, N)}
    return jpipe.Pipeline(model, loss=loss, **(defaults | options))


@functools.cache
def trained():
    pipe = make()
    state = pipe.init(KEY, BATCH)
    state, _ = pipe.step(state, BATCH)
    return pipe, state


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_factory_makes_the_weights_of_the_model_alone():
    pipe = make()
    model = MLP(rngs=nnx.Rngs(jax.random.fold_in(KEY, 0)))
    want = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    got = pipe.get_params(pipe.init(KEY, BATCH))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), got, want)
    # And the module takes them.
    nnx.update(model, jax.tree.map(lambda a: 2 * a, got))
    np.testing.assert_array_equal(model.layers[1].kernel[...], 2 * got["layers"][1]["kernel"])


def test_weights_of_a_module_are_given():
    pipe, _ = trained()
    module = MLP(rngs=nnx.Rngs(5))
    state = pipe.init(KEY, BATCH, params=nnx.state(module, nnx.Param))
    equal(pipe.get_params(state), nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    with pytest.raises(ValueError, match=r"`params` of layer 0 \(layers.0\) do not fit"):
        pipe.init(KEY, BATCH, params={"layers": {1: {}}})


def test_segments_have_the_names_of_modules():
    names = [name for record in trained()[0].partition(BATCH) for name in record.names]
    assert names == ["layers.0", "layers.1", "layers.2", "layers.3"]


def test_labels_are_those_of_the_model():
    """A tree of labels with the structure of the model freezes the same weights as in plain Optax."""
    labels = {"layers": {i: {"kernel": "train" if i % 2 else "freeze", "bias": "train"} for i in range(4)}}
    optimizer = optax.multi_transform({"train": optax.sgd(0.1), "freeze": optax.set_to_zero()}, labels)
    pipe = make(optimizer=optimizer)
    state = pipe.init(KEY, BATCH)
    before = pipe.get_params(state)
    gradients = jax.grad(pipe.plain_loss(state))(before, BATCH)
    state, _ = pipe.step(state, BATCH)
    updates, _ = optimizer.update(gradients, optimizer.init(before), before)
    got, want = pipe.get_params(state), optax.apply_updates(before, updates)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), got, want)
    equal(got["layers"][2]["kernel"], before["layers"][2]["kernel"])
    assert np.abs(got["layers"][1]["kernel"] - before["layers"][1]["kernel"]).max() > 0


@pytest.mark.first_case
@pytest.mark.parametrize("way", ["adopt", "checkpoint"])
def test_training_goes_on_with_other_stages(tmp_path, way):
    pipe, state = trained()
    other = make(4)
    if way == "adopt":
        went_on = other.adopt(state)
    else:
        checkpoints = jpipe.Checkpoints(tmp_path)
        checkpoints.save(1, state)
        checkpoints.wait()
        went_on = checkpoints.restore(other, BATCH).state
        equal(checkpoints.params(), pipe.get_params(state))
    equal(other.get_params(went_on), pipe.get_params(state))
    _, there = other.step(went_on, BATCH)
    _, here = pipe.step(pipe.adopt(state), BATCH)
    np.testing.assert_allclose(there["loss"], here["loss"], rtol=1e-6)


def test_a_file_of_weights(tmp_path):
    pipe, state = trained()
    jpipe.save_params(tmp_path / "weights", pipe.get_params(state))
    equal(jpipe.load_params(tmp_path / "weights"), pipe.get_params(state))


def test_weights_are_changed_by_their_paths():
    pipe, state = trained()
    state = pipe.with_params(state, lambda params, _: jax.tree.map(lambda a: 0 * a, params))
    assert not any(np.any(a) for a in jax.tree.leaves(pipe.get_params(state)))


# -- Inputs


class Pair(nnx.Module):
    def __init__(self, *, rngs):
        self.x, self.y, self.head = (nnx.Linear(6, 6, rngs=rngs) for _ in range(3))

    def __call__(self, x, y, scale=2.0):
        return self.head(nnx.relu(self.x(x)) + scale * self.y(y))[:, :5]


@pytest.mark.parametrize("form", [dict, tuple])
def test_several_inputs(form):
    """By the names of the arguments, or in order; the second one is read in a later segment."""
    module = Pair(rngs=nnx.Rngs(0))
    x, y = BATCH["inputs"], BATCH["inputs"][::-1].copy()
    inputs = {"x": x, "y": y} if form is dict else (x, y)
    pipe = make(model=module)
    batch = BATCH | {"inputs": inputs}
    state = pipe.init(KEY, batch)
    np.testing.assert_allclose(pipe.predict(state, batch), module(x, y), atol=1e-5)
    gradients = jax.grad(pipe.plain_loss(state))(pipe.get_params(state), batch)

    def plain(params):
        return loss(nnx.merge(nnx.graphdef(module), nnx.State(params))(x, y), batch)

    want = jax.grad(plain)(pipe.get_params(state))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), gradients, want)


# -- Refusals


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (np.ones((ROWS, 5), np.float32), r"the model \(MLP\) cannot take float32\[2, 5\]: .* got \(5,\) and \(6,\)\.$"),
        ({"tokens": BATCH["inputs"]}, r"cannot take \['tokens'\] float32\[2, 6\]: .* Its arguments are x"),
    ],
)
def test_inputs_that_the_model_cannot_take(inputs, message):
    with pytest.raises(ValueError, match=message):
        make().init(KEY, BATCH | {"inputs": inputs})


def test_weights_in_a_list_are_refused():
    with pytest.raises(ValueError, match="parameters of a whole model are one nested dict .* got a list of 4"):
        trained()[0].init(KEY, BATCH, params=[{}] * 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_stages": 5}, r"the model \(MLP\) can be cut only into 4 segments: layers.0 \| layers.1 .* 5 stages"),
        ({"boundaries": [9]}, r"`boundaries` must rise within 1..3"),
        ({"axis_rules": (("vocab", "stage"),)}, r"the rule \('vocab', 'stage'\) of `axis_rules` .* whole model"),
        ({"strategy": "strategy.json"}, r"`strategy` splits a list of layers"),
        ({"model": functools.partial(nnx.Linear, 6, 5)}, r"the model \(Linear\) can be cut at no place"),
    ],
)
def test_models_that_cannot_be_cut(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options).init(KEY, BATCH)


# -- Meshes


class Annotated(nnx.Module):
    """Weights, and an activation, whose dims have logical names."""

    def __init__(self, *, rngs):
        def linear(a, b, names):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
            return nnx.Linear(a, b, rngs=rngs, kernel_init=init)

        self.up = nnx.List([linear(6, 8, ("embed", "mlp")) for _ in range(2)])
        self.down = nnx.List([linear(8, 6, ("mlp", "embed")) for _ in range(2)])

    def __call__(self, x):
        for up, down in zip(self.up, self.down):
            hidden = linen.with_logical_constraint(nnx.relu(up(x)), ("batch", "mlp"))
            x = x + down(hidden)
        return x[:, :5]


def test_names_of_dims_split_a_whole_model():
    pipe = make(model=Annotated, optimizer=optax.sgd(0.1), mesh=jpipe.make_mesh(stage=2, model=2))
    state = pipe.init(KEY, BATCH)
    params = pipe.get_params(state)
    want, gradients = jax.value_and_grad(pipe.plain_loss(state))(params, BATCH)
    weights = next(record for record in pipe.shards(BATCH) if record.use == "weights")
    assert weights.split["model"] > 0.5
    assert "= constrain " in pipe._program(BATCH).traced.layer_kinds[0].text  # the activation's names count
    state, metrics = pipe.step(state, BATCH)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-6)
    got = pipe.get_params(state)
    jax.tree.map(lambda a, b, c: np.testing.assert_allclose(a, b - 0.1 * c, atol=1e-6), got, params, gradients)
