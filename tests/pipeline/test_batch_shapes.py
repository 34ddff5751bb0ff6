"""Batches of other shapes from step to step: a program for each, one training for all."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from flax import linen, nnx
from flax_zoo import plain
from helpers import refused

import jpipe
from jpipe.states import batch_shapes

SCHEDULES = jpipe.schedules
KEY = jax.random.key(0)


class Mix(nnx.Module):
    """A layer whose outputs at a position depend on all positions before it."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):  # [B, L, 4]
        x = x.astype(jnp.float32)
        before = jnp.cumsum(x, axis=1) / jnp.arange(1, x.shape[1] + 1, dtype=x.dtype)[None, :, None]
        return x + jnp.tanh(self.linear(before))


def squares(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def batch_of(size, length, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed + 31 * size + length)
    return {name: rng.normal(size=(size, length, 4)).astype(dtype) for name in ("inputs", "targets")}


def make(schedule=None, layers=(Mix,) * 4, loss=squares, optimizer=None, **options):
    schedule = schedule or SCHEDULES.one_f_one_b(2, 4)
    return jpipe.Pipeline(layers, loss=loss, optimizer=optimizer or optax.sgd(0.2), schedule=schedule, **options)


BUCKETS = [
    batch_of(8, 8),
    batch_of(8, 16),
    batch_of(8, 12, jnp.bfloat16),
    batch_of(4, 8),
    batch_of(8, 8, seed=1),
    batch_of(8, 16, seed=1),
]


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture
def compiled():
    """A list with one entry for each program that is compiled."""
    names: list = []

    def listen(event, duration, **_):
        names.extend([event] * event.endswith("backend_compile_duration"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


# -- The plain loop


def plain_training(pipe, batches, params, optimizer, delay=0):
    """The losses of steps, and the weights after them, of a loop over microbatches."""
    N = pipe.schedule.num_microbatches
    parts = [{name: np.split(a, N) for name, a in batch.items()} for batch in batches]
    microbatches = [{name: a[i] for name, a in minibatch.items()} for minibatch in parts for i in range(N)]
    stage_of_layer = oracles.stages_of_layers(pipe.partition(batches[0]))
    layers, state = [plain.from_nnx(Mix)] * 4, [{}] * 4
    trained = plain.train(
        layers, stage_of_layer, params, state, squares, optimizer, microbatches, N, lambda s, j: delay
    )
    return np.reshape(trained.losses, (-1, N)).mean(axis=1), trained.params[-1]


TABLES = {
    "1F1B": SCHEDULES.one_f_one_b(2, 4),
    "GPipe": SCHEDULES.gpipe(2, 4),
    "zero bubble": SCHEDULES.zero_bubble_h1(2, 4),
    "interleaved": SCHEDULES.interleaved(4, 4),
    "copies": SCHEDULES.one_f_one_b(2, 4, replicas=(2, 1)),
}


@pytest.mark.first_case
@pytest.mark.parametrize(
    "name", [n if n in ("1F1B", "interleaved") else pytest.param(n, marks=pytest.mark.exhaustive) for n in TABLES]
)
def test_a_loop_over_buckets_is_the_plain_loop_and_compiles_once_a_bucket(name, compiled):
    optimizer = optax.sgd(0.2, momentum=0.9)
    pipe = make(TABLES[name], optimizer=optimizer)
    state = pipe.init(KEY, BUCKETS[0])
    params, losses = pipe.get_params(state), []
    seen, evaluated = set(), pipe.evaluate(state, batch_of(3, 8))
    for batch in BUCKETS:
        old, shape = state, str(jax.tree.map(lambda a: (a.shape, a.dtype), batch))
        compiled.clear()
        state, metrics = pipe.step(state, batch)
        # The step, and zeros for what is in flight; of the first shape `init` has made those.
        assert len(compiled) == (0 if shape in seen else 1 if not seen else 2)
        assert state.program._step._cache_size() == 1
        assert all(a.is_deleted() for a in jax.tree.leaves(old))
        seen.add(shape)
        losses.append(metrics["loss"])
        compiled.clear()
        evaluated = pipe.evaluate(state, batch_of(3, 8))
        assert not compiled  # weights lie where they did
    want_losses, want = plain_training(pipe, BUCKETS, params, optimizer)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6), pipe.get_params(state), want)
    assert np.isfinite(evaluated["loss"])


@pytest.mark.exhaustive
def test_an_asynchronous_pipeline_is_flushed_before_another_shape():
    pipe = make(SCHEDULES.pipedream_2bw(2, 4))
    state = pipe.init(KEY, BUCKETS[0])
    params = pipe.get_params(state)
    for batch in (BUCKETS[0], BUCKETS[1], BUCKETS[0]):
        batches = [jax.tree.map(lambda a, i=i: a + i / 8, batch) for i in range(3)]
        for minibatch in batches:
            state, metrics = pipe.step(state, minibatch)
        with refused("was made for microbatches of.*asynchronous schedule 'pipedream_2bw'.*in flight.*pipe.flush"):
            pipe.step(state, batch_of(8, 12))
        state, _ = pipe.flush(state)
        _, params = plain_training(pipe, batches, params, optax.sgd(0.2), delay=1)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6), pipe.get_params(state), params)


def test_tokens_of_another_dtype():
    embed = jpipe.InitApply(lambda key, x: jax.random.normal(key, (5, 4)), lambda table, x: table[x])
    pipe = make(layers=[embed, Mix, Mix])
    tokens = np.arange(64).reshape(8, 8) % 5
    batches = [{"inputs": tokens.astype(t), "targets": batch_of(8, 8)["targets"]} for t in (np.int32, np.int16)]
    trained = []
    for order in ((0, 0), (0, 1), (1, 0)):
        state = pipe.init(KEY, batches[order[0]])
        for i in order:
            state, _ = pipe.step(state, batches[i])
        trained.append(pipe.get_params(state))
    assert_same(*trained[:2])
    assert_same(*trained[1:])


# -- The other way, through host memory, with options of all kinds


class Varied(nnx.Module):
    """A layer with running statistics, and random draws in training."""

    def __init__(self, *, rngs):
        self.linear, self.norm = nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.norm(self.linear(x)))


def weighted(outputs, batch):
    return jnp.sum((outputs - batch["targets"]) ** 2), jnp.sum(batch["targets"] > 0, dtype=jnp.float32)


TWO = SCHEDULES.one_f_one_b(2, 2)
OPTIONS = {
    "state, draws and a moving loss scale": lambda: dict(
        layers=[Varied] * 4, loss_scale=jpipe.LossScale(growth_interval=2), compute_dtype=jnp.bfloat16
    ),
    "replicas that share the optimizer": lambda: dict(
        schedule=TWO, mesh=jpipe.make_mesh(stage=2, data=2), shard_optimizer=True, optimizer=optax.adam(0.1)
    ),
    "compressed gradients": lambda: dict(
        schedule=TWO, mesh=jpipe.make_mesh(stage=2, data=2), compress_gradients=jpipe.compress.PowerSGD(rank=1)
    ),
    "thresholds of messages": lambda: dict(compress_messages=jpipe.compress.Threshold(0.5, every=3)),
    "gradients as factors": lambda: dict(
        accumulate_gradients=jpipe.compress.StreamingPCA(rank=1), layers=[functools.partial(nnx.Linear, 4, 4)] * 4
    ),
    "host memory": lambda: dict(
        schedule=SCHEDULES.gpipe(2, 8), offload=jpipe.Offload(optimizer=1.0, activations=2), optimizer=optax.adam(0.1)
    ),
    "sums, weights, aux": lambda: dict(loss=weighted, recompute="full", schedule=SCHEDULES.zero_bubble_v(4, 8)),
    "a whole model": lambda: dict(layers=lambda rngs: nnx.Sequential(*[Mix(rngs=rngs) for _ in range(4)])),
    "weights split": lambda: dict(
        mesh=jpipe.make_mesh(stage=2, fsdp=2), layers=[functools.partial(nnx.Linear, 4, 4)] * 4
    ),
    "versions of weights": lambda: dict(
        schedule=SCHEDULES.pipemare(2, 2),
        optimizer=optax.chain(optax.sgd(0.1), jpipe.optim.correct_discrepancy(decay=0.5)),
        backward_params=jpipe.optim.corrected_params,
    ),
}
FEW = ("state, draws and a moving loss scale", "compressed gradients", "thresholds of messages", "versions of weights")


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*is not a mean over rows", "ignore:.*bubble")
@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.exhaustive) for n in OPTIONS])
def test_a_step_goes_on_as_an_adopted_state(name):
    """`adopt` reads every leaf to host memory and packs it anew."""
    pipe = make(donate=False, **OPTIONS[name]())
    short, long = batch_of(8, 8), batch_of(16, 12)
    state = pipe.init(KEY, short)
    for batch in (short, short, long):
        state, _ = pipe.flush(state)
        adopted, got = pipe.step(pipe.adopt(state, batch), batch)
        state, want = pipe.step(state, batch)
        assert_same(got, want)
        assert_same(adopted.kept(), state.kept())
        assert_same(adopted.key, state.key)
    assert jax.tree.leaves(state.program.microbatch)[0].shape[1] == 12


def test_factors_of_messages_begin_anew_for_messages_of_another_length():
    scale = jpipe.InitApply(lambda key, x: jnp.full((), 0.9), lambda w, x: jnp.tanh(w * x))
    pipe = make(layers=[scale] * 2, compress_messages=jpipe.compress.PowerSGD(rank=1), donate=False)
    short, long = ({k: a[..., 0] for k, a in batch_of(8, n).items()} for n in (8, 12))
    state, _ = pipe.step(pipe.init(KEY, short), short)
    with pytest.warns(UserWarning, match="compression starts anew"):
        adopted = pipe.adopt(state, long)
    got, want = pipe.step(state, long), pipe.step(adopted, long)
    assert_same(got[1], want[1])
    assert_same(got[0].kept(), want[0].kept())
    assert got[0].message_compression.keys() != state.message_compression.keys()
    again, _ = pipe.step(got[0], long)  # and go on then
    assert_same(again.message_compression.keys(), got[0].message_compression.keys())


# -- Places


def pooled(x):  # [B, L, 4] -> [B, 4, 4]
    return x.reshape(x.shape[0], 4, -1, 4).mean(axis=2)


@pytest.mark.exhaustive
def test_weights_that_another_shape_packs_otherwise():
    """At length 4 all layers are of one kind, and their weights lie in other arrays than at length 8."""
    linear = functools.partial(nnx.Linear, 4, 4)
    layers = [*[linear] * 7, jpipe.Function(pooled), *[linear] * 3]
    pipe = make(SCHEDULES.gpipe(4, 4), layers, boundaries=[7, 9, 10], optimizer=optax.adam(0.1))
    batches = [{**batch_of(8, n), "targets": batch_of(8, 4)["targets"]} for n in (8, 4, 8)]
    state = pipe.init(KEY, batches[0])
    params, loss = pipe.get_params(state), pipe.plain_loss(state)
    opt_state = optax.adam(0.1).init(params)
    arrays = []
    for batch in batches:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optax.adam(0.1).update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        state, metrics = pipe.step(state, batch)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
        arrays.append(set(state.parameters))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5), pipe.get_params(state), params)
    assert arrays[0] == arrays[2] != arrays[1]


@pytest.mark.first_case
@pytest.mark.parametrize("balance", ["flops", "memory"])
def test_the_cut_and_programs_made_before_the_state_stay(balance, compiled):
    constant = jpipe.InitApply(
        lambda key, x: jax.random.normal(key, (4, 4)),
        lambda w, x: x @ jnp.linalg.matrix_power(w / 4, 64),
    )
    layers = [constant, *[functools.partial(nnx.Linear, 4, 4)] * 6]
    pipe = make(layers=layers, boundaries=balance)
    small, large = batch_of(4, 2), batch_of(4, 256)
    pipe.memory(small)
    state = pipe.init(KEY, large)
    cut = [record.layers for record in pipe.partition(large)]
    state, _ = pipe.step(state, large)
    pipe.memory(small)  # with the cut of the state
    compiled.clear()
    state, _ = pipe.step(state, small)
    assert len(compiled) == 1  # zeros
    assert [record.layers for record in pipe.partition(small)] == cut


# -- Refusals, after which the state goes on


class FlatLinen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(x.reshape(x.shape[0], -1))


REFUSED = {
    "rows": (batch_of(6, 8), "a batch of 6 cannot be cut into 4 equal microbatches"),
    "entries": (batch_of(8, 8) | {"mask": np.ones((8, 8))}, r"was made for microbatches of.*the entries differ.*adopt"),
    "dims": (
        {"inputs": np.ones((8, 8, 5), np.float32), "targets": np.ones((8, 8, 5), np.float32)},
        r"was made for microbatches of.*cannot take those of this batch.*layer 0 \(Mix\) cannot take",
    ),
}


@pytest.mark.first_case
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_batch_leaves_the_state_whole(name):
    pipe = make()
    state, _ = pipe.step(pipe.init(KEY, batch_of(8, 8)), batch_of(8, 8))
    other, message = REFUSED[name]
    with refused(message):
        pipe.step(state, other)
    state, metrics = pipe.step(state, batch_of(8, 8))
    assert np.isfinite(metrics["loss"])


def test_a_layer_whose_weights_depend_on_the_length_is_named():
    layers = [Mix, jpipe.Linen(FlatLinen())]
    pipe = make(layers=layers, loss=lambda outputs, batch: jnp.mean(outputs**2))
    state = pipe.init(KEY, batch_of(8, 8))
    with refused(r"layer 1 \(FlatLinen\) has the weight .*kernel.* as float32\[32, 3\].* and as float32\[48, 3\]"):
        pipe.step(state, batch_of(8, 12))
    pipe.step(state, batch_of(8, 8))


def test_a_program_that_does_not_compile_leaves_the_state_whole(monkeypatch):
    pipe = make()
    state = pipe.init(KEY, batch_of(8, 8))

    def fail(*_, **__):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(jax.stages.Lowered, "compile", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            pipe.step(state, batch_of(8, 12))
    assert not any(a.is_deleted() for a in jax.tree.leaves(state))
    _, metrics = pipe.step(state, batch_of(8, 12))
    assert np.isfinite(metrics["loss"])


@pytest.mark.exhaustive
def test_device_memory_holds_for_every_shape():
    def wide(**options):
        layers = [functools.partial(nnx.Linear, 128, 128)] * 4
        return make(SCHEDULES.gpipe(2, 8), layers, optimizer=optax.adamw(0.01), **options)

    batches = [{k: np.ones((n, 128), np.float32) for k in ("inputs", "targets")} for n in (64, 32, 256)]
    memory = wide(offload=jpipe.Offload(1.0, 2)).memory(batches[0])
    limit = sum(memory) - memory.padding - memory.host + 70_000
    pipe = wide(device_memory=limit)
    alone = pipe._program(batches[1]).settings.offload
    state = pipe.init(KEY, batches[0])
    chosen = state.program.settings.offload
    assert chosen != alone
    state, _ = pipe.step(state, batches[1])
    assert state.program.settings.offload == chosen
    with pytest.raises(ValueError, match="is too little for microbatches of.*a device needs.*the largest batch"):
        pipe.step(state, batches[2])
    state, metrics = pipe.step(state, batches[0])
    assert np.isfinite(metrics["loss"])


def test_a_checkpoint_of_another_bucket(tmp_path):
    pipe = make(optimizer=optax.adam(0.1))
    state, _ = pipe.step(pipe.init(KEY, BUCKETS[0]), BUCKETS[0])
    state, _ = pipe.step(state, BUCKETS[1])
    with jpipe.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state)
        checkpoints.wait()
        other = make(optimizer=optax.adam(0.1))
        restored = checkpoints.restore(other, BUCKETS[0]).state
    for batch in (BUCKETS[1], BUCKETS[0]):
        state, want = pipe.step(state, batch)
        restored, got = other.step(restored, batch)
        assert_same(got, want)
    assert_same(other.get_params(restored), pipe.get_params(state))


def test_a_checkpoint_in_flight_needs_its_shape(tmp_path):
    table = SCHEDULES.pipemare(2, 4)
    state, _ = make(table).step(make(table).init(KEY, BUCKETS[0]), BUCKETS[0])
    with jpipe.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        with pytest.raises(ValueError, match="in flight.*The batch has another shape than that of the last step"):
            checkpoints.restore(make(table), BUCKETS[1])


def test_equal_pipelines_and_copies_in_host_memory_go_on_with_another_shape():
    first, second = make(), make()
    state, _ = first.step(first.init(KEY, BUCKETS[0]), BUCKETS[1])
    on_host = jax.tree.map(np.asarray, state)
    got, want = second.step(on_host, BUCKETS[3]), first.step(state, BUCKETS[3])
    assert_same(got[1], want[1])
    assert_same(second.get_params(got[0]), first.get_params(want[0]))


def test_many_shapes_are_told(monkeypatch):
    monkeypatch.setattr(batch_shapes, "_MANY_SHAPES", 2)
    pipe = make(SCHEDULES.gpipe(1, 1), layers=[functools.partial(nnx.Linear, 4, 4)])
    state = pipe.init(KEY, batch_of(1, 1))
    for length, num_warnings in ((1, 0), (2, 0), (3, 1), (4, 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state, _ = pipe.step(state, batch_of(1, length))
        assert len(caught) == num_warnings and all("for 2 shapes of batches" in str(w.message) for w in caught)
