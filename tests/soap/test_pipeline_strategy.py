"""Pipelines whose stages are split by a strategy compute the numbers of those without one."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from jpipe import soap
from jpipe.layers.as_layers import as_layers
from jpipe.layers.loss import Loss
from jpipe.soap.layers import layers_graph


def _init(key, x):
    first, second = jax.random.split(key)
    return {
        "up": jax.random.normal(first, (8, 16)) / 4,
        "down": jax.random.normal(second, (16, 8)) / 4,
    }


def _block(weights, x):
    return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"]


def _loss(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


LAYERS = [jpipe.InitApply(_init, _block)] * 2
BATCH = {
    "inputs": np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8),
    "targets": np.zeros((16, 8), np.float32),
}


def _images(key, x):
    return jax.random.normal(key, (3, 3, 8, 8)) / 9


def _convolved(kernel, x):
    x = x.reshape(-1, 4, 4, 8)
    names = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=names)
    return (x + jax.nn.relu(y)).reshape(-1, 128)


CONVOLUTIONS = [jpipe.InitApply(_images, _convolved)] * 2
IMAGES = {
    "inputs": np.sin(np.arange(16 * 128, dtype=np.float32)).reshape(16, 128),
    "targets": np.zeros((16, 128), np.float32),
}


def graph_of(num_rows: int, layers=LAYERS, batch=BATCH) -> soap.OperatorGraph:
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct((num_rows, *a.shape[1:]), a.dtype), batch)
    return layers_graph(as_layers(layers), Loss.of(_loss, False), batch).graph


def trained(schedule, mesh, layers=LAYERS, batch=BATCH, **options):
    pipe = jpipe.Pipeline(
        layers,
        loss=_loss,
        optimizer=optax.sgd(0.1),
        schedule=schedule,
        boundaries=[1],
        mesh=mesh,
        **options,
    )
    state = pipe.init(jax.random.key(0), batch)
    losses = []
    for _ in range(3):
        state, metrics = pipe.step(state, batch)
        losses.append(float(metrics["loss"]))
    losses.append(float(pipe.evaluate(state, batch)["loss"]))
    return losses, pipe.get_params(state), pipe, state


def check_equal(path, schedule, data: int, model: int, **options) -> None:
    plain = jpipe.make_mesh(stage=2, data=data)
    mesh = jpipe.make_mesh(stage=2, data=data, model=model)
    expected, weights, *_ = trained(schedule, plain, **options)
    losses, params, pipe, state = trained(schedule, mesh, strategy=path, **options)
    # A device of another stage would never join a permute inside of a stage, and all would wait.
    text = pipe.compile(options.get("batch", BATCH)).as_text()
    for pairs in re.findall(r"source_target_pairs=\{(\{.*?\})\}", text):
        ends = [tuple(map(int, p.split(","))) for p in re.findall(r"\{(.*?)\}", pairs)]
        assert all(a == b or a // model != b // model for a, b in ends), pairs
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6),
        params,
        weights,
    )


def saved(path, find, num_rows: int, num_devices: int, **options):
    graph = graph_of(num_rows, **options)
    strategy = find(graph, num_devices)
    soap.save_strategy(path, graph, strategy, num_devices)
    return path


SCHEDULE = jpipe.schedules.one_f_one_b(num_stages=2, num_microbatches=4)


def test_columns_and_rows_beside_replicas(tmp_path):
    """Against plain JAX: two steps on the whole batch."""
    path = saved(tmp_path / "strategy.json", soap.megatron, 2, 2)
    mesh = jpipe.make_mesh(stage=2, data=2, model=2)
    pipe = jpipe.Pipeline(
        LAYERS,
        loss=_loss,
        optimizer=optax.sgd(0.1),
        schedule=SCHEDULE,
        boundaries=[1],
        mesh=mesh,
        strategy=path,
    )
    state = pipe.init(jax.random.key(0), BATCH)
    weights = pipe.get_params(state)

    @jax.value_and_grad
    def loss(weights):
        x = BATCH["inputs"]
        for each in weights:
            x = _block(each, x)
        return _loss(x, BATCH)

    for _ in range(2):
        state, metrics = pipe.step(state, BATCH)
        expected, gradients = loss(weights)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
        weights = jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        pipe.get_params(state),
        weights,
    )


def _random(seed):
    def find(graph, num_devices):
        space = soap.Space(graph, num_devices, in_stages=True)
        return soap.random_strategy(space, np.random.default_rng(seed))

    return find


@pytest.mark.exhaustive
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "schedule, options",
    [
        (jpipe.schedules.gpipe(num_stages=2, num_microbatches=4), {}),
        (SCHEDULE, {"recompute": "full"}),
        (SCHEDULE, {"recompute": jax.checkpoint_policies.dots_saveable}),
        (jpipe.schedules.zero_bubble_h1(num_stages=2, num_microbatches=4), {}),
        (jpipe.schedules.pipedream_2bw(num_stages=2, num_microbatches=4), {}),
        (jpipe.schedules.pipedream(num_stages=2, num_microbatches=4), {}),
        (SCHEDULE, {"trainable": [{"up": False, "down": True}, True]}),
    ],
    ids=["gpipe", "recompute", "policy", "zero bubble", "2bw", "pipedream", "frozen"],
)
def test_random_splits(tmp_path, schedule, options):
    path = saved(tmp_path / "strategy.json", _random(2), 4, 4)
    check_equal(path, schedule, data=1, model=4, **options)


@pytest.mark.exhaustive
@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(3))
def test_random_splits_beside_replicas(tmp_path, seed):
    path = saved(tmp_path / "strategy.json", _random(seed), 2, 2)
    check_equal(path, SCHEDULE, data=2, model=2)


@pytest.mark.exhaustive
@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model", [2, 4])
def test_random_splits_of_convolutions(tmp_path, model, seed):
    given = {"layers": CONVOLUTIONS, "batch": IMAGES}
    path = saved(tmp_path / "strategy.json", _random(seed), 4, model, **given)
    check_equal(path, SCHEDULE, data=1, model=model, **given)


def pipeline(path, **sizes):
    mesh = jpipe.make_mesh(stage=2, **sizes)
    return jpipe.Pipeline(
        LAYERS,
        loss=_loss,
        optimizer=optax.sgd(0.1),
        schedule=SCHEDULE,
        mesh=mesh,
        strategy=path,
    )


class Megatron:
    """A strategy of its own, in no file."""

    def split_layers(self, layers, loss, microbatch, sizes, **options):
        traced = layers_graph(layers, loss, microbatch, **options)
        return traced.splits(soap.megatron(traced.graph, sizes["model"]), sizes)


def test_an_object_splits_as_a_file(tmp_path):
    path = saved(tmp_path / "strategy.json", soap.megatron, 4, 2)
    strategy = Megatron()
    split = pipeline(strategy, model=2)
    text = split.lower(BATCH).as_text()
    assert text == pipeline(path, model=2).lower(BATCH).as_text()
    assert text != pipeline(None, model=2).lower(BATCH).as_text()
    state = pipeline(strategy, model=2).init(jax.random.key(0), BATCH)
    state, _ = split.step(state, BATCH)  # equal strategies: the state fits
    with pytest.raises(ValueError, match="differs in `strategy`"):
        pipeline(Megatron(), model=2).evaluate(state, BATCH)


def test_refusals_name_the_reason(tmp_path):
    path = saved(tmp_path / "strategy.json", soap.megatron, 4, 2)
    with pytest.raises(ValueError, match="is for 2 devices, got 4. Search again for 4"):
        pipeline(path, model=4).init(jax.random.key(0), BATCH)
    with pytest.raises(ValueError, match='Use a mesh without the axis "fsdp"'):
        pipeline(path, model=2, fsdp=2)
    with pytest.raises(ValueError, match="must be the path of a file"):
        pipeline(3, model=2)
    with pytest.raises(OSError, match="no-such-file"):
        pipeline("no-such-file", model=2).init(jax.random.key(0), BATCH)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match="bad.json` is not JSON"):
        pipeline(tmp_path / "bad.json", model=2).init(jax.random.key(0), BATCH)
    path = saved(tmp_path / "stages.json", soap.model_parallel, 4, 2)
    with pytest.raises(ValueError, match=r"operator '.*' with .* is no split over"):
        pipeline(path, model=2).init(jax.random.key(0), BATCH)
    text = path.read_text().replace("dot_general_0", "dot_general_77")
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match="no operator 'dot_general_77'. Did you mean"):
        pipeline(tmp_path / "other.json", model=2).init(jax.random.key(0), BATCH)


def test_shards_that_read_of_their_neighbours():
    def convolved(weights, x):
        x = jax.lax.conv_general_dilated(x, weights, (1,), "SAME")
        return (x[:, :, ::2] + x[:, :, 1::2]).sum()

    arrays = jnp.ones((4, 4, 3)), jnp.ones((2, 4, 8))
    graph = soap.trace(convolved, *arrays)
    (number,) = [i for i, o in enumerate(graph.operators) if "conv" in o.kind]
    assert [loop.size for loop in graph.operators[number].loops] == [2, 4, 8, 4]
    space = soap.Space(graph, 2, in_stages=True)
    degrees = {config.degrees for config in space.configs(number)}
    # Of samples, channels and terms of the sum, not of positions: shards would read those of their neighbours.
    assert degrees == {(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 1, 2)}
