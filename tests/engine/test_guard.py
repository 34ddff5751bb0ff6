"""Guards: an operation that is left out changes nothing, and policies compute the same."""

import dataclasses
import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import schedule_named
from flax import nnx
from helpers import use_target, with_nan_buffers
from skipping import DIM, LAYERS, loss_fn

import jpipe
from jpipe.engine import training
from jpipe.engine.arrays import TickArrays
from jpipe.engine.guard import Branch, guarded, run_one_of
from jpipe.lowering.lower import STASHES, lower
from jpipe.lowering.target import CPU, GPU, TARGETS, target_of
from jpipe.options import checks
from jpipe.reference import Reference
from jpipe.schedules import gpipe, pipedream, pipemare

PLATFORMS = ("cpu", "gpu")
each_platform = pytest.mark.parametrize("platform", PLATFORMS)
LARGE = 2**18  # numbers of 4 bytes: an idle branch may touch the array


@pytest.fixture(params=[False, True], ids=["passes", "touches"])
def copies(request, monkeypatch):
    """XLA of either kind: one that copies what passes through a branch, and one that does not."""
    target = dataclasses.replace(GPU, touches_idle=request.param)
    monkeypatch.setitem(TARGETS, "gpu", target)
    return request.param


@pytest.mark.usefixtures("copies")
@each_platform
@pytest.mark.parametrize("size", [3, LARGE])
def test_guarded(platform, size):
    def operation(written, read):
        return {"a": written["a"] + read}

    @jax.jit
    def run(now, a, b):
        return guarded(TARGETS[platform], now, operation, {"a": a}, b)

    a, b = jnp.arange(float(size)) + 1, jnp.full(size, jnp.nan)
    np.testing.assert_array_equal(run(False, a, b)["a"], a)
    np.testing.assert_array_equal(run(True, a, jnp.ones(size))["a"], a + 1)


@pytest.mark.usefixtures("copies")
@each_platform
@pytest.mark.parametrize("number", [-1, 0, 1])
def test_one_of_two_branches_runs(platform, number):
    """The branches write other arrays, and each reads what the other writes."""

    def first(written, read):
        return written.replace(loss=written.loss + read.count)

    def second(written, read):
        return written.replace(count=written.count + 2 * read.loss)

    @jax.jit
    def run(number, loss, count):
        arrays = TickArrays(loss=loss, count=count, skipped=jnp.ones(2))
        branches = [
            Branch("first", ["loss"], first),
            Branch("second", ["count"], second),
        ]
        return run_one_of(TARGETS[platform], number, branches, arrays)

    loss, count = jnp.arange(float(LARGE)), jnp.full(LARGE, 3.0)
    arrays = run(number, loss, count)
    np.testing.assert_array_equal(arrays.loss, loss + 3 * (number == 0))
    np.testing.assert_array_equal(arrays.count, count + 2 * loss * (number == 1))
    np.testing.assert_array_equal(arrays.skipped, np.ones(2))


def test_only_some_versions_of_xla_need_touched_arrays(copies):
    def run(now, a):
        return guarded(TARGETS["gpu"], now, lambda a, _: a + 1, a, None)

    text = str(jax.make_jaxpr(run)(True, jnp.ones(LARGE)))
    assert ("dynamic_update_slice" in text) == copies


def random_batches(num_rows):
    """Three minibatches for the layers of `skipping`."""
    rng = np.random.default_rng(0)
    shape = (3, num_rows, DIM)
    inputs, targets = (rng.standard_normal(shape).astype("float32") for _ in range(2))
    return [{"inputs": x, "targets": y} for x, y in zip(inputs, targets)]


def assert_same_results(results):
    """The losses and weights of the policies are finite and close."""
    assert np.isfinite(results[0][0]).all()
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, *results)


def trained(monkeypatch, platform, layers, table, batches, **options):
    """A pipeline as on a platform, run on CPU devices, its state after a step with each batch and a flush, and the
    losses.
    """
    use_target(monkeypatch, platform)
    options = {"mesh": jpipe.make_mesh(stage=table.num_devices), **options}
    overlap = platform == "gpu"
    pipe = jpipe.Pipeline(layers, schedule=table, overlap=overlap, **options)
    state, losses = pipe.init(jax.random.key(0), batches[0]), []
    for batch in batches:
        if table.synchronous:
            state = with_nan_buffers(state)
        state, metrics = pipe.step(state, batch)
        losses.append(np.asarray(metrics["loss"]))
    state, _ = pipe.flush(state)
    return pipe, state, losses


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name,replicas",
    [
        ("one_f_one_b/paired", 1),
        ("zero_bubble_v", 1),
        ("pipemare/unit", 1),
        ("gpipe", 2),
    ],
)
@pytest.mark.sampled(4)
def test_policies_train_the_same(name, replicas, monkeypatch):
    """The policy of GPUs, run on CPU devices."""
    table, results = schedule_named(name, 4, 8), []
    batches = random_batches(16 * replicas)
    for platform in PLATFORMS:
        pipe, state, losses = trained(
            monkeypatch,
            platform,
            LAYERS,
            table,
            batches,
            loss=loss_fn,
            optimizer=optax.adam(0.01),
            mesh=jpipe.make_mesh(stage=table.num_devices, data=replicas),
        )
        results.append((losses, pipe.get_params(state)))
    assert_same_results(results)


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.exhaustive)])
def test_one_stage_keeps_what_a_tick_makes_and_reads_out_of_the_state(recompute, monkeypatch):
    """A forward and its backward in one tick have no branch. With recomputation they have."""
    table, results = schedule_named("one_f_one_b/paired", 1, 4), []
    batches = random_batches(16)
    for platform in PLATFORMS:
        pipe, state, losses = trained(
            monkeypatch,
            platform,
            LAYERS,
            table,
            batches,
            loss=loss_fn,
            optimizer=optax.adam(0.01),
            recompute=recompute,
        )
        is_kept = platform == "cpu" or recompute == "full"
        assert any(state.buffers[name] for name in STASHES) == is_kept
        results.append((losses, pipe.get_params(state)))
    assert_same_results(results)


@pytest.mark.parametrize("kind", ["none", "policy", "checkpoint"])
def test_without_a_branch_a_backward_still_computes_again(kind, monkeypatch):
    """A barrier keeps XLA from computing once what a policy, or a checkpoint inside of a layer, computes again."""
    use_target(monkeypatch, "gpu")

    def layer(x):
        return jnp.sin(jnp.cos(x @ x.T) @ x)

    policy = jax.checkpoint_policies.nothing_saveable
    pipe = jpipe.Pipeline(
        [
            functools.partial(nnx.Linear, 3, 3),
            jax.checkpoint(layer) if kind == "checkpoint" else layer,
        ],
        loss=lambda y, batch: jnp.mean(y**2),
        optimizer=optax.sgd(0.1),
        schedule=schedule_named("one_f_one_b/paired", 1, 2),
        recompute=policy if kind == "policy" else "none",
    )
    text = pipe.lower({"inputs": np.ones((16, 3), np.float32)}).as_text()
    assert ("optimization_barrier" in text) == (kind != "none")


class Normed(nnx.Module):
    """A dense layer with batch norm."""

    def __init__(self, num_inputs, num_outputs, *, rngs):
        self.linear = nnx.Linear(num_inputs, num_outputs, rngs=rngs)
        self.norm = nnx.BatchNorm(num_outputs, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.norm(self.linear(x)))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    ["gpipe", pytest.param("pipemare/unit", marks=pytest.mark.exhaustive)],
)
def test_statistics_of_unlike_stages(name, monkeypatch):
    """Layers of all stages, and a layer that one of two stages of a program has, add to their statistics."""
    layers = [functools.partial(Normed, *sizes) for sizes in ((3, 5), (5, 5), (5, 5), (5, 5), (5, 3))]
    table, results = schedule_named(name, 4, 4), []
    rng = np.random.default_rng(0)
    batch = {name: rng.standard_normal((64, 3)).astype("float32") for name in ("inputs", "targets")}
    for platform in PLATFORMS:
        pipe, state, _ = trained(
            monkeypatch,
            platform,
            layers,
            table,
            [batch] * 3,
            loss=lambda y, batch: jnp.mean((y - batch["targets"]) ** 2),
            optimizer=optax.sgd(0.1),
            boundaries=[1, 3, 4],
        )
        results.append((pipe.get_params(state), pipe.get_mutable_state(state)))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, *results)


class Scaled(nnx.Module):
    """A dense layer with random vectors, each used in a way of its own, and a matrix too large to be cast with them."""

    def __init__(self, num_inputs, num_outputs, *, rngs):
        def vector(size):
            return nnx.Param(jax.random.normal(rngs.params(), (1, size)))

        self.linear = nnx.Linear(num_inputs, num_outputs, use_bias=False, rngs=rngs)
        self.scale, self.shift = vector(num_inputs), vector(num_outputs)
        self.gain = nnx.Param(jnp.float32(1.5))

    def __call__(self, x):
        return jnp.tanh(self.linear(x * self.scale[...]) + self.shift[...]) * self.gain


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gpipe", marks=pytest.mark.exhaustive),
        "zero_bubble_v",
        "pipemare/unit",
    ],
)
@pytest.mark.sampled(3)
def test_small_weights_are_cast_together(name, monkeypatch):
    """Layers read the same weights if each casts its own and if those of all layers are cast at once."""
    table = schedule_named(name, 4, 8)
    sizes = [7, *[130] * table.num_stages, 3]
    layers = [functools.partial(Scaled, *pair) for pair in itertools.pairwise(sizes)]
    rng = np.random.default_rng(0)
    batch = {"inputs": rng.standard_normal((32, 7)).astype("float32")}
    batch["targets"] = rng.standard_normal((32, 3)).astype("float32")
    results, barriers = [], []
    for platform in PLATFORMS:
        pipe, state, losses = trained(
            monkeypatch,
            platform,
            layers,
            table,
            [batch] * 3,
            loss=lambda y, batch: jnp.mean((y - batch["targets"]) ** 2),
            optimizer=optax.sgd(0.01),
            compute_dtype=jnp.bfloat16,
        )
        barriers.append("optimization_barrier" in pipe.lower(batch).as_text())
        results.append((losses, pipe.get_params(state)))
    assert barriers == [False, True]
    close = functools.partial(np.testing.assert_allclose, rtol=0.02, atol=0.005)
    jax.tree.map(close, *results)


def test_the_facts_of_a_platform():
    found = [target_of(platform) for platform in ("cpu", "tpu", "gpu", "cuda", "rocm")]
    assert [target.switches for target in found] == [False, False, True, True, True]
    assert lower(gpipe(2, 2)).target is CPU and not CPU.compiler_options


def pipeline(**options):
    return jpipe.Pipeline(LAYERS, loss=loss_fn, optimizer=optax.sgd(0.1), schedule=gpipe(2, 2), **options)


@pytest.fixture
def passed(monkeypatch):
    """The compiler options of each call of `jax.jit`."""
    passed, jit = [], jax.jit

    def recorded(function=None, **options):
        passed.append(options.get("compiler_options"))
        return jit(function, **options)

    monkeypatch.setattr(jax, "jit", recorded)
    return passed


@pytest.mark.first_case
def test_options_of_xla_come_on_top_of_those_of_the_platform(monkeypatch, passed):
    options = {"xla_gpu_graph_min_graph_size": 1, "xla_cpu_enable_fast_math": True}
    target = dataclasses.replace(CPU, compiler_options=options)
    monkeypatch.setitem(TARGETS, "cpu", target)
    batch = {name: np.ones((4, DIM), np.float32) for name in ("inputs", "targets")}
    pipe = pipeline(compiler_options={"xla_cpu_enable_fast_math": False})
    pipe.compile(batch)
    expected = {"xla_gpu_graph_min_graph_size": 1, "xla_cpu_enable_fast_math": False}
    assert passed.count(expected) == 4  # step, flush, predict, evaluate
    unknown = pipeline(compiler_options={"xla_no_such_option": 1})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        unknown.compile(batch)


@pytest.mark.parametrize(
    ("mesh", "options", "crosses", "wanted"),
    [
        ({}, {}, False, False),
        ({"data": 2}, {}, False, True),
        ({"model": 2}, {}, False, True),
        ({"fsdp": 2}, {}, False, True),
        ({"fsdp": 2}, {}, True, False),  # NCCL calls the host between nodes, and no branch of a graph can
        ({}, {"ties": [[(0, "kernel"), (3, "kernel")]]}, False, False),  # the update follows the last tick
        ({}, {"schedule": pipedream(2, 4, replicas=(2, 1))}, False, True),  # copies of a stage add up in a tick
        ({}, {"schedule": pipedream(2, 4)}, False, True),  # stages add up their norms in a tick
        ({}, {"schedule": pipedream(2, 4)}, True, False),  # between nodes they do so in every tick, in no branch
    ],
)
def test_collectives_in_branches_are_recorded(monkeypatch, passed, mesh, options, crosses, wanted):
    """Only where there are any, and where CUDA can."""
    if crosses:
        monkeypatch.setattr(training, "stays_in_slices", lambda mesh, axes: False)
    target = dataclasses.replace(
        CPU,
        collective_options={"xla_cpu_enable_fast_math": False},
        updates_in_every_tick=True,
        holds_small_sums=True,
    )
    monkeypatch.setitem(TARGETS, "cpu", target)
    layers = [functools.partial(nnx.Linear, DIM, DIM)] * 4
    batch = {name: np.ones((4, DIM), np.float32) for name in ("inputs", "targets")}
    options = dict(options)
    table = options.pop("schedule", gpipe(2, 2))
    mesh = jpipe.make_mesh(stage=table.num_devices, **mesh)
    jpipe.Pipeline(layers, loss=loss_fn, optimizer=optax.sgd(0.1), schedule=table, mesh=mesh, **options).lower(batch)
    assert passed.count({"xla_cpu_enable_fast_math": False}) == (4 if wanted else 0)


@pytest.mark.parametrize("ticks", ["unit", "paired"])
def test_an_update_runs_in_every_tick_or_in_a_branch(monkeypatch, ticks):
    """With the same weights, that of the plain loop over all versions, and the same norms."""
    rng = np.random.default_rng(0)
    batches = [{n: rng.normal(size=(8, DIM)).astype("float32") for n in ("inputs", "targets")} for _ in range(4)]
    layers = [functools.partial(nnx.Linear, DIM, DIM)] * 4
    table, optimizer = pipemare(4, 4, ticks=ticks), optax.adamw(0.01)
    params = [
        {"bias": np.zeros(DIM, np.float32), "kernel": rng.normal(size=(DIM, DIM)).astype("float32")} for _ in layers
    ]
    reference = Reference(layers, loss_fn, optimizer, table, params=params)
    losses = [reference.step(batch) for batch in batches]
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    norms = []
    for holds_small_sums in (False, True):
        target = dataclasses.replace(GPU, compiler_options={}, collective_options={}, pair_options={})
        target = dataclasses.replace(target, holds_small_sums=holds_small_sums)
        monkeypatch.setitem(TARGETS, "cpu", target)
        pipe = jpipe.Pipeline(layers, loss=loss_fn, optimizer=optimizer, schedule=table)
        state = pipe.init(jax.random.key(0), batches[0], params)
        engine = pipe._program(batches[0]).engine
        assert engine.updates_in_every_tick != holds_small_sums
        for batch in batches:
            state, metrics = pipe.step(state, batch)
        jax.tree.map(close, pipe.get_params(state), reference.get_params())
        close(metrics["loss"], losses[-1])
        norms.append(metrics["gradient_norm"])
    close(*norms)


@pytest.mark.parametrize("options", ["--xla", {"a": None}, {1: True}])
def test_options_of_xla_must_be_a_dict(options):
    with pytest.raises(ValueError, match="`compiler_options` must be a dict of options"):
        pipeline(compiler_options=options)


def test_users_of_gpus_are_told_once_what_to_install(monkeypatch):
    monkeypatch.setitem(TARGETS, "gpu", dataclasses.replace(GPU, touches_idle=True))
    checks.advise.cache_clear()
    with pytest.warns(UserWarning, match="slower on GPUs with JAX .* Install Python 3.12"):
        checks.advise("gpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for platform in ("gpu", "cpu", "tpu"):
            checks.advise(platform)
    checks.advise.cache_clear()
