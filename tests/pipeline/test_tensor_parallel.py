"""Stages split over an axis "model" of the mesh: the plain model's numbers, from arrays that are really split."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from families import cross_entropy, schedule_named, slow
from flax import linen, nnx
from helpers import assert_close
from jax.sharding import PartitionSpec

import jpipe
from models import Transformer

KEY = jax.random.key(7)
SIZE = dict(vocab_size=11, seq_len=6, dim=8, num_heads=2, num_blocks=2)
LAYERS = Transformer(**SIZE).layers()
B, N, T = 8, 2, 6
SGD = optax.sgd(1.0, momentum=0.5)
ADAM = optax.adam(0.1, eps=1e-2)


def batches(count: int) -> list[dict]:
    rng = np.random.default_rng(0)
    shape = (2, count, B, T)
    tokens = rng.integers(0, SIZE["vocab_size"], shape, dtype=np.int32)
    return [{"inputs": x, "labels": y} for x, y in zip(*tokens)]


def split(init, *axes):
    return nnx.with_partitioning(init, axes)


class Branch(nnx.Module):
    """One residual branch, its hidden units split over "model"; M microbatch, D `dim`."""

    def __init__(self, dim: int = 4, hidden: int = 8, *, rngs: nnx.Rngs):
        normal, zeros = nnx.initializers.normal(0.5), nnx.initializers.zeros
        self.up = nnx.Linear(
            dim,
            hidden,
            kernel_init=split(normal, None, "model"),
            bias_init=split(zeros, "model"),
            rngs=rngs,
        )
        self.down = nnx.Linear(hidden, dim, kernel_init=split(normal, "model", None), rngs=rngs)

    def __call__(self, x):  # [M, D] -> [M, D]
        return x + self.down(jnp.tanh(self.up(x)))


def square(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def rows(count: int) -> list[dict]:
    rng = np.random.default_rng(1)
    pairs = rng.normal(size=(count, 2, B, 4)).astype(np.float32)
    return [{"inputs": x, "targets": y} for x, y in pairs]


def branches(mesh, schedule=None, optimizer=ADAM, num_layers=4):
    return jpipe.Pipeline(
        [Branch] * num_layers,
        loss=square,
        optimizer=optimizer,
        schedule=schedule or jpipe.schedules.gpipe(2, N),
        mesh=mesh,
    )


def plain_branches(count: int, optimizer=ADAM, num_layers=4):
    """Losses of the plain model, and its weights in the end."""
    with nnx.use_eager_sharding(False):
        plain = oracles.PlainModel([Branch] * num_layers, KEY)
    losses, _, params = oracles.train(plain, plain.params, square, optimizer, rows(count))
    return losses, params


@functools.cache
def plain_transformer():
    plain = oracles.PlainModel(LAYERS, KEY)
    return plain, oracles.train(plain, plain.params, cross_entropy, SGD, batches(3))


@pytest.mark.exhaustive
@pytest.mark.parametrize("data", [slow(1), 2])
def test_a_split_transformer_equals_the_plain_one(data):
    plain, (losses, _, params) = plain_transformer()
    pipe = jpipe.Pipeline(
        LAYERS,
        loss=cross_entropy,
        optimizer=SGD,
        schedule=jpipe.schedules.one_f_one_b(2, N),
        mesh=jpipe.make_mesh(stage=2, data=data, model=2),
    )
    state = pipe.init(KEY, batches(1)[0])
    where = jax.tree.map(lambda a: a.sharding, state)
    for batch, loss in zip(batches(3), losses):
        state, metrics = pipe.step(state, batch)
        assert_close(metrics["loss"], np.asarray(loss), "float32")
    assert jax.tree.map(lambda a: a.sharding, state) == where
    assert_close(pipe.get_params(state), params, "float32")
    inputs = batches(1)[0]["inputs"][:-1]  # not a multiple of N
    outputs = pipe.predict(state, {"inputs": inputs})
    assert_close(outputs, np.asarray(plain(params, inputs)), "float32")

    for arrays, rank in (
        (state.parameters, 4),  # [S * versions, rows, ...]
        (state.gradients, 4),
        (state.optimizer_state, 4),
    ):
        matrices = [a for a in arrays.values() if a.ndim == rank]
        parts = {a.shape[-2:]: {shard.data.shape[-2:] for shard in a.addressable_shards} for a in matrices}
        assert parts == {
            **{(8, 24): {(8, 12)}, (8, 32): {(8, 16)}},  # by columns
            **{(8, 8): {(4, 8)}, (32, 8): {(16, 8)}},  # by rows
            **{(6, 8): {(6, 8)}},
            # Eleven words cannot be halved.
            **{(11, 8): {(11, 8)}, (8, 11): {(8, 11)}},
        }


def test_the_compiled_step_computes_parts_and_sums_them():
    pipe = branches(jpipe.make_mesh(stage=2, model=2))
    text = pipe.compile(rows(1)[0]).as_text()
    M = B // N
    sums = re.findall(r"= f32\[([\d,]*)\]\S* all-reduce\(.*replica_groups=(\S+)", text)
    of_axis = "[2,2]<=[4],"  # devices (0, 1) and (2, 3): those of one stage
    # A branch forward, and its input gradient backward.
    assert sums.count((f"{M},4", of_axis)) == 2
    products = re.findall(r"= f32\[([\d,]*)\]\S* dot\(", text)
    assert f"{M},4" in products  # of 8 hidden units, and of 4 inputs
    assert "4,4" in products and f"{M},8" not in products and "4,8" not in products
    moved = re.findall(r"collective-permute\(.*source_target_pairs=(\S+)", text)
    assert set(moved) == {"{{0,2},{2,0},{1,3},{3,1}},"}
    gathered = re.findall(r"= f32\[([\d,]*)\]\S* all-gather\(", text)
    assert not {"4,8", "8,4", f"{M},8"} & set(gathered)


@pytest.mark.exhaustive
def test_a_device_holds_its_part():
    batch = rows(1)[0]
    whole = branches(jpipe.make_mesh(stage=2)).memory(batch)
    part = branches(jpipe.make_mesh(stage=2, model=2)).memory(batch)
    # Of a branch's 76 numbers 72 are split; two branches a stage.
    assert whole.weights == 2 * 4 * 76 and part.weights == 2 * 4 * (72 // 2 + 4)
    assert part.gradients == part.weights
    assert part.optimizer == 2 * part.weights + 4  # moments, and Adam's count
    assert part.activations < whole.activations
    assert whole.padding == part.padding == 0


@pytest.mark.exhaustive
def test_a_split_backward_and_two_columns_a_device():
    table = schedule_named("v", 4, 4)
    assert table.splits_backward and table.num_devices == 2
    losses, params = plain_branches(2)
    pipe = branches(jpipe.make_mesh(stage=2, model=2), table)
    state = pipe.init(KEY, rows(1)[0])
    for batch, loss in zip(rows(2), losses):
        state, metrics = pipe.step(state, batch)
        assert_close(metrics["loss"], np.asarray(loss), "float32")
    assert_close(pipe.get_params(state), params, "float32")


@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.exhaustive
def test_weight_versions_are_split_and_flushed():
    table, results = jpipe.schedules.pipedream(2, N), []
    for model in (1, 2):
        mesh = jpipe.make_mesh(stage=2, model=model)
        pipe = branches(mesh, table, num_layers=2)
        state = pipe.init(KEY, rows(1)[0])
        for batch in rows(2):
            state, _ = pipe.step(state, batch)
        where = jax.tree.map(lambda a: a.sharding, state)
        state, _ = pipe.flush(state)
        assert jax.tree.map(lambda a: a.sharding, state) == where
        results.append(pipe.get_params(state))
    assert_close(results[1], results[0], "float32")


@pytest.mark.exhaustive
def test_a_state_goes_from_mesh_to_mesh():
    losses, params = plain_branches(3, num_layers=2)
    meshes = [
        jpipe.make_mesh(stage=2),
        jpipe.make_mesh(stage=2, model=2),
        jpipe.make_mesh(stage=1, data=2, model=4),
    ]
    tables = [jpipe.schedules.gpipe(stages, N) for stages in (2, 2, 1)]
    state = None
    for mesh, table, batch, loss in zip(meshes, tables, rows(3), losses):
        pipe = branches(mesh, table, num_layers=2)
        if state is None:
            state = pipe.init(KEY, batch)
        else:
            state = pipe.adopt(state)
        state, metrics = pipe.step(state, batch)
        assert_close(metrics["loss"], np.asarray(loss), "float32")
    assert_close(pipe.get_params(state), params, "float32")


@pytest.mark.exhaustive
def test_optimizers_that_keep_other_shapes():
    """Leaves like parameters are split, by whatever wraps them; others are whole."""
    optimizer = optax.multi_transform(
        {
            "kernel": optax.adafactor(0.1, min_dim_size_to_factor=4),
            "bias": optax.sgd(0.1, momentum=0.9),
        },
        lambda params: jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key, params),
    )
    losses, params = plain_branches(2, optimizer, num_layers=2)
    mesh = jpipe.make_mesh(stage=2, model=2)
    pipe = branches(mesh, optimizer=optimizer, num_layers=2)
    state = pipe.init(KEY, rows(1)[0])
    for batch, loss in zip(rows(2), losses):
        state, metrics = pipe.step(state, batch)
        assert_close(metrics["loss"], np.asarray(loss), "float32")
    assert_close(pipe.get_params(state), params, "float32")
    specs = {a.shape[2:]: a.sharding.spec for a in state.optimizer_state.values()}
    assert specs[8,] == PartitionSpec("stage", None, "model")  # momentum of `up.bias`
    assert specs[4,] == PartitionSpec("stage")  # rows or columns of a kernel


@pytest.mark.exhaustive
def test_a_module_made_on_a_mesh_and_a_linen_module():
    """The metadata of either Flax, read alike."""

    class Up(linen.Module):
        @linen.compact
        def __call__(self, x):
            init = linen.with_partitioning(linen.initializers.normal(0.5), (None, "model"))
            return linen.Dense(8, kernel_init=init)(x)

    mesh = jpipe.make_mesh(stage=2, model=2)
    with jax.set_mesh(mesh):
        made = Branch(dim=8, rngs=nnx.Rngs(0))
    pipe = jpipe.Pipeline(
        [Up(), made],
        loss=lambda outputs, batch: jnp.mean(outputs**2),
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.gpipe(2, N),
        mesh=mesh,
    )
    state = pipe.init(KEY, rows(1)[0])
    specs = {a.shape[2:]: a.sharding.spec for a in state.parameters.values()}
    columns = PartitionSpec("stage", None, None, "model")
    assert specs[4, 8] == columns
    params = pipe.get_params(state)
    x = rows(1)[0]["inputs"]
    x = Up().apply({"params": params[0]}, x)
    hidden = np.tanh(x @ params[1]["up"]["kernel"] + params[1]["up"]["bias"][None])
    down = params[1]["down"]
    want = np.mean((x + hidden @ down["kernel"] + down["bias"][None]) ** 2)
    state, metrics = pipe.step(state, rows(1)[0])
    assert_close(metrics["loss"], want, "float32")


def test_a_mesh_without_the_axis_stores_the_leaves_whole():
    """The same arrays as without metadata."""
    bare = [lambda rngs: nnx.Linear(4, 4, rngs=rngs)] * 2
    kernel = split(nnx.initializers.lecun_normal(), "model", "data")
    marked = [lambda rngs: nnx.Linear(4, 4, kernel_init=kernel, rngs=rngs)] * 2
    states = []
    for layers in (bare, marked):
        pipe = jpipe.Pipeline(
            layers,
            loss=square,
            optimizer=optax.adam(0.1),
            schedule=jpipe.schedules.gpipe(2, N),
            mesh=jpipe.make_mesh(stage=2, data=2),
        )
        state = pipe.init(KEY, rows(1)[0])
        arrays = {**state.kept(), **state.in_flight()}
        states.append(jax.tree.map(lambda a: (a.shape, a.sharding), arrays))
    assert states[0] == states[1]


@pytest.mark.parametrize(
    "layer,message",
    [
        (
            lambda rngs: Branch(hidden=9, rngs=rngs),
            r"layer 0.*2 devices along 'model'.*dim 0, 9",
        ),
        (
            lambda rngs: nnx.Linear(
                4,
                4,
                bias_init=split(nnx.initializers.zeros, None, "model"),
                rngs=rngs,
            ),
            r"\['bias'\].* it has 1 dims, not 2",
        ),
    ],
)
def test_a_partition_that_does_not_fit_is_refused(layer, message):
    pipe = jpipe.Pipeline(
        [layer] * 2,
        loss=square,
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.gpipe(2, N),
        mesh=jpipe.make_mesh(stage=2, model=2),
    )
    with pytest.raises(ValueError, match=message):
        pipe.init(KEY, rows(1)[0])
