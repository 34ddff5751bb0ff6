"""Models whose blocks are a loop over stacked weights: each segment has the weights of its own turns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe
from jpipe.layers.model_tree import Turn, Turns

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
BATCH = {"inputs": X}
LENGTH = 4


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class NnxScan(nnx.Module):
    def __init__(self, *, rngs):
        @nnx.split_rngs(splits=LENGTH)
        @nnx.vmap(in_axes=0, out_axes=0)
        def blocks(rngs):
            return Block(rngs)

        self.blocks, self.head = blocks(rngs), nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def forward(block, x):
            return block(x)

        return self.head(forward(self.blocks, x))


class LinenBlock(nn.Module):
    train: bool = True

    @nn.compact
    def __call__(self, x, _):
        y = nn.BatchNorm(use_running_average=not self.train, momentum=0.5)(nn.Dense(x.shape[-1])(x))
        return x + jnp.tanh(y), jnp.mean(y, -1)


class LinenScan(nn.Module):
    """Under `nn.remat`, with stacked statistics and results of each turn."""

    axis: int = 0

    @nn.compact
    def __call__(self, x, train=True):
        axes = {"params": self.axis, "batch_stats": 0}
        blocks = nn.scan(nn.remat(LinenBlock), variable_axes=axes, split_rngs={"params": True}, length=LENGTH)
        x, means = blocks(train)(nn.Dense(32)(x), None)
        return nn.Dense(2)(x) + means.sum(0)[:, None]


def init(key, x):
    return {"w": jax.random.normal(key, (LENGTH, 4, 4)), "b": jnp.zeros((LENGTH, 4))}


def scanned(reverse):
    def apply(p, x):
        def turn(x, p):
            return x + jnp.tanh(x @ p["w"] + p["b"][None]), None

        # What is done to all weights before the loop is done turn by turn.
        p = {"w": jnp.swapaxes(p["w"] * 0.5, 1, 2), "b": p["b"]}
        return jax.lax.scan(turn, x, p, reverse=reverse)[0]

    return jpipe.InitApply(init, apply)


def in_python():
    def apply(p, x):
        for i in range(LENGTH):
            x = x + jnp.tanh(x @ p["w"][i] + p["b"][i][None])
        return x

    return jpipe.InitApply(init, apply)


def loss(outputs, batch):
    return jnp.mean((outputs - 1) ** 2)


def decayed(mask):
    return optax.chain(optax.add_decayed_weights(0.1, mask), optax.sgd(0.1, momentum=0.9))


def is_matrix(params):
    return jax.tree_util.tree_map_with_path(lambda path, a: path[-1].key in ("kernel", "w") and a.ndim == 3, params)


def pipeline(model, num_stages=2, **options):
    options = {"optimizer": decayed(is_matrix), "schedule": jpipe.schedules.one_f_one_b(num_stages, 2)} | options
    return jpipe.Pipeline(model, loss=loss, **options)


def plain(model, given=None):
    """The outputs of a model as a function of its weights."""
    if isinstance(model, nnx.Module):
        graph, _, rest = nnx.split(model, nnx.Param, ...)
        return lambda p: nnx.merge(graph, nnx.State(p), rest)(X)
    if isinstance(model, nn.Module):  # a microbatch is normalised by its own statistics
        return lambda p: jnp.concatenate(
            [model.apply({"params": p, **given}, rows, mutable=["batch_stats"])[0] for rows in X.reshape(2, 4, 4)]
        )
    return lambda p: model.apply(p, X)


MODELS = {
    "nnx.scan": lambda: NnxScan(rngs=nnx.Rngs(0)),
    "nn.scan": LinenScan,
    "nn.scan, axis 1": lambda: LinenScan(1),
    "lax.scan": lambda: scanned(False),
    "reverse": lambda: scanned(True),
    "Python": in_python,
}


@pytest.mark.first_case
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive) if "axis" in name else name for name in MODELS]
)
def test_turns_train_as_in_the_plain_model(name):
    model = MODELS[name]()
    is_linen = isinstance(model, nn.Module)
    given = jpipe.Linen(model, train={"train": True}, evaluate={"train": False}) if is_linen else model
    pipe = pipeline(given)
    state = pipe.init(KEY, BATCH)
    params = pipe.get_params(state)
    optimizer = pipe.optimizer
    outputs = plain(model, pipe.get_mutable_state(state))
    step = jax.jit(jax.value_and_grad(lambda p: loss(outputs(p), None)))
    moments = optimizer.init(params)
    for _ in range(2):
        want, grads = step(params)
        updates, moments = optimizer.update(grads, moments, params)
        params = optax.apply_updates(params, updates)
        state, metrics = pipe.step(state, BATCH)
        np.testing.assert_allclose(metrics["loss"], want, rtol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), pipe.get_params(state), params)
    # Each stage has its turns, and not all weights.
    sizes = [record.num_parameters for record in pipe.partition(BATCH)]
    assert sum(sizes) == sum(a.size for a in jax.tree.leaves(params)) and max(sizes) < 0.7 * sum(sizes)
    if is_linen:
        statistics = pipe.get_mutable_state(state)["batch_stats"]
        assert all(a.shape == (LENGTH, 32) for a in jax.tree.leaves(statistics))
        np.testing.assert_allclose(  # in evaluation the same statistics
            pipe.predict(state, BATCH),
            model.apply({"params": pipe.get_params(state), "batch_stats": statistics}, X, False),
            rtol=1e-4,
            atol=1e-5,
        )


def test_segments_of_turns_are_alike_and_have_their_names():
    pipe = pipeline(MODELS["nnx.scan"](), num_stages=4)
    names = [record.names for record in pipe.partition(BATCH)]
    turns = [f"blocks.{i}.linear" for i in range(LENGTH)]
    assert names == [(turns[0],), (turns[1],), (turns[2],), (turns[3], "head")]
    assert pipe._program(BATCH).traced.kind_of_layer == [0, 1, 1, 1, 2]  # nobody reads the gradient of the inputs


def test_labels_are_a_tree_of_the_model():
    model = MODELS["nnx.scan"]()
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    labels = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key, params)
    optimizer = optax.multi_transform({"kernel": optax.sgd(0.1), "bias": optax.set_to_zero()}, labels)
    pipe = pipeline(model, optimizer=optimizer)
    state, _ = pipe.step(pipe.init(KEY, BATCH), BATCH)
    new = pipe.get_params(state)
    assert np.array_equal(new["blocks"]["linear"]["bias"], params["blocks"]["linear"]["bias"])
    moved = new["blocks"]["linear"]["kernel"] - params["blocks"]["linear"]["kernel"]
    assert (abs(moved).max((1, 2)) > 0).all()


def test_weights_of_all_turns_go_in_and_out(tmp_path):
    """`init(params=)`, checkpoints into another number of stages, files of weights, and low precision."""
    model = MODELS["nnx.scan"]()
    options = {"compute_dtype": jnp.bfloat16, "optimizer": optax.sgd(0.1, momentum=0.9)}
    pipe = pipeline(model, **options)
    params = jax.tree.map(lambda a: np.asarray(a) + 1, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    state = pipe.init(KEY, BATCH, params=params)
    jax.tree.map(np.testing.assert_array_equal, pipe.get_params(state), params)
    state, _ = pipe.step(state, BATCH)
    with jpipe.Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        other = pipeline(model, num_stages=4, **options)
        restored = checkpoints.restore(other, BATCH).state
    jax.tree.map(np.testing.assert_array_equal, other.get_params(restored), pipe.get_params(state))
    jpipe.save_params(tmp_path / "weights.safetensors", pipe.get_params(state))
    loaded = jpipe.load_params(tmp_path / "weights.safetensors")
    jax.tree.map(np.testing.assert_array_equal, loaded, pipe.get_params(state))


def test_a_loop_over_time_is_no_loop_over_turns():
    """Its weights are the same in all turns."""

    def apply(p, x):
        def turn(state, x):
            return jnp.tanh(x[:, None] * state @ p["w"]), None

        hidden, _ = jax.lax.scan(turn, jnp.ones_like(x), x.T)
        return hidden @ p["v"] @ p["w"]

    def init(key, x):
        return {"w": jnp.eye(4), "v": jnp.eye(4)}

    pipe = pipeline(jpipe.InitApply(init, apply), optimizer=optax.sgd(0.1))
    state, metrics = pipe.step(pipe.init(KEY, BATCH), BATCH)
    np.testing.assert_allclose(metrics["loss"], loss(apply(init(KEY, X), X), None), rtol=1e-5)


def test_turns_are_a_node_with_a_leaf_for_each():
    turns = Turns("kernel", [Turn(0, 3, 0), Turn(2, 3, 0)], [np.zeros((1, 2)), np.ones((1, 2))])
    paths = [path for path, _ in jax.tree.leaves_with_path({"kernel": turns})]
    assert [jax.tree_util.keystr(path) for path in paths] == ["['kernel'][0]", "['kernel'][2]"]
    assert all(path[-1].key == "kernel" for path in paths)
    assert turns.stacked().shape == (2, 2)
    doubled = jax.tree.map(lambda a: 2 * a, turns)
    assert jax.tree.structure(doubled) == jax.tree.structure(turns)
    assert Turn.at((jax.tree_util.DictKey("kernel"), Turn(2, 3, 1).key)) == Turn(2, 3, 1)
    assert Turn.at((jax.tree_util.DictKey("kernel"),)) is None
