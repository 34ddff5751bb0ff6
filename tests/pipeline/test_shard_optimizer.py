"""Replicas that share the update of their stage (ZeRO, stage 1): the plain model's numbers, from a part of the state
each.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from collectives import collectives
from families import FAMILIES, MODELS, cross_entropy, schedule_named
from flax import nnx
from helpers import assert_close, refused
from layouts import batches as layout_batches
from layouts import loss, pipeline

import jpipe

KEY = jax.random.key(7)
LONG = pytest.mark.exhaustive

OPTIMIZERS = {
    "adamw": optax.adamw(0.1, eps=1e-2, weight_decay=0.1),
    "clip": optax.chain(jpipe.optim.clip_by_global_norm(0.2), optax.adam(0.1, eps=1e-2)),
    # Biases without decay: leaves that lie side by side have unlike programs.
    "masked": optax.chain(
        optax.add_decayed_weights(0.1, mask=lambda tree: jax.tree.map(lambda a: a.ndim > 1, tree)),
        optax.sgd(0.1, momentum=0.9),
    ),
    # Whole leaves.
    "lamb": optax.lamb(0.01, eps=1e-2),
    "muon": optax.contrib.muon(0.01),
    # The gradient of an attention's key biases is zero, and would be rounding errors over their size.
    "adafactor": optax.adafactor(0.01, min_dim_size_to_factor=4, eps=1e-8),
    # All leaves of a stage are one part.
    "accumulate": optax.MultiSteps(optax.adam(0.1, eps=1e-2), 2).gradient_transformation(),
}

# family, schedule, S, N, replicas along "data", optimizer
CASES = [
    ("mlp", "one_f_one_b", 2, 2, 2, "clip"),
    ("mlp", "gpipe/3-1", 2, 6, 1, "adamw"),
    ("mlp", "one_f_one_b/unit/1-2", 2, 4, 2, "muon"),
    ("transformer", "zero_bubble_h1", 2, 2, 3, "masked"),
    ("resnet", "one_f_one_b", 2, 2, 2, "lamb"),
    pytest.param("mlp", "two-columns", 2, 2, 4, "adamw", marks=LONG),
    pytest.param("mlp", "v", 2, 2, 2, "adafactor", marks=LONG),
    pytest.param("mlp", "one_f_one_b/paired/2-3", 2, 6, 1, "clip", marks=LONG),
    pytest.param("transformer", "one_f_one_b", 2, 2, 4, "adafactor", marks=LONG),
    pytest.param("transformer", "gpipe/1-2", 2, 2, 2, "muon", marks=LONG),
    pytest.param("transformer", "interleaved", 2, 2, 2, "accumulate", marks=LONG),
    pytest.param("resnet", "gpipe/2-1-2", 3, 4, 1, "masked", marks=LONG),
]


@functools.cache
def plain(family, optimizer, num_rows):
    """Losses and weights of plain training, in double precision."""
    layers = FAMILIES[family].in_dtype("float64").layers
    model = oracles.PlainModel(layers, KEY)
    batches = FAMILIES[family].batches(3, num_rows, "float64")
    trained = oracles.train(model, model.params, cross_entropy, OPTIMIZERS[optimizer], batches)
    return layers, batches, model.params, trained


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.parametrize("family, schedule, S, N, data, optimizer", CASES)
@pytest.mark.sampled(8)
def test_training_equals_the_plain_model(family, schedule, S, N, data, optimizer):
    with jax.enable_x64(True):
        layers, batches, start, want = plain(family, optimizer, 2 * N * data)
        losses, _, params = want
        table = schedule_named(schedule, S, N)
        pipe = jpipe.Pipeline(
            layers,
            loss=cross_entropy,
            optimizer=OPTIMIZERS[optimizer],
            schedule=table,
            mesh=jpipe.make_mesh(stage=table.num_devices, data=data, ring=table.ring),
            shard_optimizer=True,
        )
        state = pipe.init(KEY, batches[0], params=start)
        for batch, value in zip(batches, losses):
            state, metrics = pipe.step(state, batch)
            assert_close(metrics["loss"], np.asarray(value), "float64")
        assert_close(pipe.get_params(state), params, "float64")
        assert_replicas_equal(state)


def assert_replicas_equal(state):
    """All replicas of a stage hold the same weights, bit for bit."""
    lowered = state.program.engine.lowered
    for array in jax.tree.leaves((state.parameters, state.read_parameters)):
        by_rows = {}
        for shard in array.addressable_shards:
            by_rows.setdefault(shard.index[0].start or 0, []).append(shard)
        for shards in by_rows.values():
            first, *others = (np.asarray(shard.data).tobytes() for shard in shards)
            assert all(other == first for other in others)
        rows = np.asarray(array).reshape(lowered.schedule.num_devices, -1, *array.shape[1:])
        for s, copies in enumerate(lowered.copies):
            first, *others = (rows[d, lowered.rows.chunk_rows(s, d, chunk)].tobytes() for d, chunk in copies)
            assert all(other == first for other in others)


@pytest.mark.parametrize(
    "schedule, data",
    [
        ("pipemare", 2),
        pytest.param("pipemare/2-1", 2, marks=LONG),
        pytest.param("pipedream", 2, marks=LONG),
        pytest.param("pipedream_2bw", 3, marks=LONG),
    ],
)
@pytest.mark.exhaustive
@pytest.mark.sampled(4)
def test_asynchronous_training_equals_that_without_sharing(schedule, data):
    """Which the oracles of `test_asynchronous.py` prove; with the weights of a hook."""
    batches = FAMILIES["mlp"].batches(4, 4 * data)
    table = schedule_named(schedule, 2, 4)
    hooks = {}
    optimizer = optax.chain(optax.adam(0.1, eps=1e-2))
    if schedule.startswith("pipemare"):
        hooks["backward_params"] = jpipe.optim.corrected_params
        optimizer = optax.chain(optimizer, jpipe.optim.correct_discrepancy(decay=0.5))
    found = []
    for shard in (False, True):
        pipe = jpipe.Pipeline(
            FAMILIES["mlp"].layers,
            loss=cross_entropy,
            optimizer=optimizer,
            schedule=table,
            mesh=jpipe.make_mesh(stage=table.num_devices, data=data),
            shard_optimizer=shard,
            **hooks,
        )
        state = pipe.init(KEY, batches[0])
        losses = []
        for batch in batches:
            state, metrics = pipe.step(state, batch)
            losses.append(np.asarray(metrics["loss"]))
        assert_replicas_equal(state)
        state, _ = pipe.flush(state)
        found.append((losses, pipe.get_params(state)))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5)
    assert_close(found[1][1], found[0][1], "float32")


@LONG
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_equals_itself_without_sharing(name):
    model, inputs_of = MODELS[name]
    batch = {"inputs": inputs_of(np.random.default_rng(0))}

    def loss(outputs, batch):
        return sum(jnp.mean(jnp.square(a)) for a in jax.tree.leaves(outputs))

    found = []
    for shard in (False, True):
        pipe = jpipe.Pipeline(
            model.layers(),
            loss=loss,
            optimizer=optax.adam(1e-3, eps=1e-3),
            schedule=jpipe.schedules.one_f_one_b(2, 2),
            mesh=jpipe.make_mesh(stage=2, data=2),
            shard_optimizer=shard,
        )
        state = pipe.init(KEY, batch)
        state, metrics = pipe.step(state, batch)
        found.append((np.asarray(metrics["loss"]), pipe.get_params(state)))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, found[1], found[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("axis", ["fsdp", "model"])
def test_weights_that_the_compiler_splits_are_shared(axis):
    """Each block of a split weight is shared, so no weight and no state moves along the axis."""
    init = nnx.with_partitioning(nnx.initializers.normal(0.1), (axis, None))

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(8, 8, use_bias=False, kernel_init=init, rngs=rngs)

        def __call__(self, x):
            return x + jnp.tanh(self.linear(x))

    batch = {"inputs": np.random.default_rng(0).normal(size=(8, 8))}
    found = []
    for shard in (False, True):
        pipe = jpipe.Pipeline(
            [Layer] * 2,
            loss=lambda outputs, batch: jnp.mean(jnp.square(outputs)),
            optimizer=optax.adam(0.1, eps=1e-2),
            schedule=jpipe.schedules.gpipe(2, 2),
            mesh=jpipe.make_mesh(stage=2, data=2, **{axis: 2}),
            shard_optimizer=shard,
        )
        state = pipe.init(KEY, batch)
        where = jax.tree.map(lambda a: a.sharding, state)
        for _ in range(2):
            state, _ = pipe.step(state, batch)
        assert jax.tree.map(lambda a: a.sharding, state) == where
        found.append((pipe.get_params(state), bytes_of(state.optimizer_state)))
        if shard:
            updates = [
                (c.kind, c.num_bytes, c.groups[0])
                for c in collectives(pipe.compile(batch).as_text())
                if "/update/" in c.name and c.num_bytes > 32
            ]
            block, along_data = 8 * 8 * 4 // 2, [0, 4]  # of data x stage x axis
            assert sorted(updates) == [
                ("all-gather", block, along_data),
                ("reduce-scatter", block // 2, along_data),
            ]
    assert_close(found[1][0], found[0][0], "float32")
    moments, count = 2 * 8 * 8 * 4, 4
    assert found[0][1] == moments // 2 + count
    assert found[1][1] == moments // 4 + count


def bytes_of(arrays):
    """Bytes of a tree of arrays on one device."""
    return sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(arrays))


class Wide(nnx.Module):
    """A layer of two weights whose shapes no activation has."""

    def __init__(self, rngs):
        self.up = nnx.Linear(32, 48, rngs=rngs)
        self.down = nnx.Linear(48, 32, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


def wide(optimizer, table, **options):
    data = options.pop("data", 1)
    return jpipe.Pipeline(
        [Wide] * 4,
        loss=lambda outputs, batch: jnp.mean(jnp.square(outputs)),
        optimizer=optimizer,
        schedule=table,
        mesh=jpipe.make_mesh(stage=table.num_devices, data=data),
        **options,
    )


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.parametrize("data, replicas", [(2, None), (4, None), (1, (2, 2)), (2, (2, 2))])
@pytest.mark.parametrize("name", ["adamw", "masked"])
@pytest.mark.sampled(9)
def test_the_state_of_a_device_falls_with_the_replicas(name, data, replicas):
    """By the figure that the compiler takes: the arrays of the state on a device."""
    batch = {"inputs": np.zeros((16, 32), np.float32)}
    table = jpipe.schedules.gpipe(2, 2, replicas=replicas)
    whole, shared = (
        bytes_of(wide(OPTIMIZERS[name], table, data=data, **o).init(KEY, batch).optimizer_state)
        for o in ({}, {"shard_optimizer": True})
    )
    num_replicas = data * (replicas or (1,))[0]
    assert shared <= 1.05 * whole / num_replicas


def test_whole_leaves_are_dealt_out():
    """Muon orthogonalises whole matrices: two layers of two matrices on a stage, one of each for a replica."""
    batch = {"inputs": np.zeros((16, 32), np.float32)}
    table = jpipe.schedules.gpipe(2, 2)
    whole, shared = (
        bytes_of(wide(OPTIMIZERS["muon"], table, data=2, **o).init(KEY, batch).optimizer_state)
        for o in ({}, {"shard_optimizer": True})
    )
    assert shared <= 1.05 * whole / 2


def test_gradients_are_scattered_and_weights_gathered():
    """Each once, and nothing else of their size travels between replicas."""
    batch = {"inputs": np.zeros((16, 32), np.float32)}
    pipe = wide(optax.adam(0.1), jpipe.schedules.gpipe(2, 2), data=2, shard_optimizer=True)
    found = collectives(pipe.compile(batch).as_text())
    matrix, small = 32 * 48 * 4, 1024
    large = [(c.kind, c.num_bytes) for c in found if c.groups and c.num_bytes > small]
    # A loop over equal leaves has one body.
    assert {kind for kind, _ in large} == {"reduce-scatter", "all-gather"}
    for kind, n in large:
        assert n == (matrix // 2 if kind == "reduce-scatter" else matrix)


@pytest.mark.exhaustive
def test_memory_tells_the_share():
    batch = {"inputs": np.zeros((16, 32), np.float32)}
    pipe, sharing = (
        wide(optax.adam(0.1), jpipe.schedules.gpipe(2, 2), data=2, **o) for o in ({}, {"shard_optimizer": True})
    )
    whole, shared = pipe.memory(batch), sharing.memory(batch)
    assert shared.weights == whole.weights
    assert shared.optimizer <= 1.05 * whole.optimizer / 2
    assert shared.padding == whole.padding  # equal stages: none but that of the weights
    assert shared.optimizer == bytes_of(sharing.init(KEY, batch).optimizer_state)


# -- What happens to a training


def kept(state):
    """What a state keeps between minibatches, by path, on the host."""
    leaves = jax.tree.leaves_with_path(state.kept())
    return {jax.tree_util.keystr(path): np.asarray(a) for path, a in leaves}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*bubble")
def test_a_state_moves_between_pipelines_that_share_and_do_not():
    """Batch norm and dropout included; to other stages, replicas and copies, and back, bit for bit."""
    sources = layout_batches(4)
    tables = jpipe.schedules
    pipes = [
        pipeline(tables.gpipe(2, 4), data=2),
        pipeline(tables.one_f_one_b(2, 4), data=2, shard_optimizer=True),
        pipeline(tables.gpipe(2, 4, replicas=(2, 1)), data=2, shard_optimizer=True),
        pipeline(tables.gpipe(4, 4), data=2, shard_optimizer=True),
        pipeline(tables.gpipe(1, 4)),
    ]
    state = pipes[0].init(KEY, sources[0])
    state, _ = pipes[0].step(state, sources[0])
    portable = [kept(pipes[-1].adopt(state))]
    for pipe in pipes[1:]:
        state = pipe.adopt(state)
        portable.append(kept(pipes[-1].adopt(state)))
    for got in portable[1:]:
        jax.tree.map(np.testing.assert_array_equal, got, portable[0])


@pytest.mark.exhaustive
def test_a_checkpoint_is_restored_with_and_without_sharing(tmp_path):
    sources = layout_batches(3)
    shared = pipeline(jpipe.schedules.gpipe(2, 4), data=2, shard_optimizer=True)
    whole = pipeline(jpipe.schedules.gpipe(1, 4))
    state = shared.init(KEY, sources[0])
    state, _ = shared.step(state, sources[0])
    with jpipe.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        again = checkpoints.restore(shared, sources[0]).state
        np.testing.assert_equal(kept(again), kept(state))
        elsewhere = checkpoints.restore(whole, sources[0]).state
        want = kept(whole.adopt(state))
        np.testing.assert_equal(kept(elsewhere), want)
        checkpoints.save(2, elsewhere)
        checkpoints.wait()
        back = checkpoints.restore(shared, sources[0]).state
        np.testing.assert_equal(kept(back), kept(state))


class Scaled(nnx.Module):
    """A layer with a single number among its weights, which all replicas update."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(5, 5, param_dtype=jnp.float64, rngs=rngs)
        self.scale = nnx.Param(jnp.ones((), jnp.float64))

    def __call__(self, x):
        return x + self.scale[...] * jnp.tanh(self.linear(x))


@pytest.mark.exhaustive
@pytest.mark.sampled(2)
@pytest.mark.parametrize("replicas, data", [(None, 2), ((1, 2), 2)])
def test_norms_count_every_number_once(replicas, data):
    """Weights of one number, and a tied weight, with clipping, a loss scale and a gradient that is not finite."""
    with jax.enable_x64(True):
        layers = [Scaled] * 4
        model = oracles.PlainModel(layers, KEY)
        start = model.params
        rng = np.random.default_rng(0)
        batches = [{k: rng.normal(size=(4 * data, 5)) for k in ("inputs", "targets")} for _ in range(3)]
        optimizer = OPTIMIZERS["clip"]
        tied = {"ties": [[(0, "linear.bias"), (2, "linear.bias")]]}
        found = []
        for shard in (False, True):
            table = jpipe.schedules.gpipe(2, 2, replicas=replicas)
            pipe = jpipe.Pipeline(
                layers,
                loss=loss,
                optimizer=optimizer,
                schedule=table,
                mesh=jpipe.make_mesh(stage=table.num_devices, data=data),
                loss_scale=jpipe.LossScale(8.0),
                shard_optimizer=shard,
                **tied,
            )
            state = pipe.init(KEY, batches[0], params=tie(start))
            norms, skipped = [], []
            broken = {**batches[1], "inputs": batches[1]["inputs"] * np.nan}
            for batch in (batches[0], broken, batches[1], batches[2]):
                state, metrics = pipe.step(state, batch)
                norms.append(float(metrics["gradient_norm"]))
                skipped.append(np.asarray(metrics["skipped_updates"]).tolist())
            assert skipped == [[0, 0], [1, 1], [0, 0], [0, 0]]
            assert_replicas_equal(state)
            found.append((norms, pipe.get_params(state)))
        np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-9)
        assert_close(found[1][1], found[0][1], "float64")

        def plain_loss(params):
            params = tie(params)
            return loss(model(params, batches[0]["inputs"]), batches[0])

        gradients = jax.grad(plain_loss)(tie(start))
        np.testing.assert_allclose(found[1][0][0], optax.tree.norm(gradients), rtol=1e-9)


def tie(params):
    """Weights whose tied bias is that of layer 0."""
    params = [dict(p) for p in params]
    params[2]["linear"] = {**params[2]["linear"], "bias": params[0]["linear"]["bias"]}
    return params


# -- Refusals


def test_refusals():
    table = jpipe.schedules.gpipe(2, 2)
    with refused(r"there is one replica: .* Give the mesh an axis \"data\""):
        wide(optax.adam(0.1), table, shard_optimizer=True)
    with refused("`shard_optimizer` must be True or False, got 'zero1'"):
        wide(optax.adam(0.1), table, data=2, shard_optimizer="zero1")
