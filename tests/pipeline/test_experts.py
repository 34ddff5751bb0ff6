"""Mixtures of experts in pipelines: the plain model's numbers at any layout, and the exchanges that theory says."""

import dataclasses
import functools
import math
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from collectives import collectives
from flax import nnx
from helpers import assert_close, with_nan_buffers

import jpipe
from jpipe.layers.report import collect
from jpipe.lowering.target import TARGETS
from models import MixtureTransformer
from models.mixture import Mixture, RouterState

B, T, D, F, E, K, N = 8, 4, 8, 16, 4, 2, 2
RATE = 0.05
KEY = jax.random.key(3)
INIT = nnx.initializers.normal(0.3)
OVER_FSDP = (("expert", "fsdp"), *jpipe.AXIS_RULES)
OVER_BOTH = (("expert", ("fsdp", "expert")), *jpipe.AXIS_RULES)


class Block(nnx.Module):
    """A residual mixture."""

    def __init__(self, options=(), *, rngs):
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.mixture = Mixture(D, F, E, K, kernel_init=INIT, out_init=INIT, rngs=rngs, **dict(options))

    def __call__(self, x):
        return x + self.mixture(self.norm(x))


def loss(outputs, batch, *, reported):
    penalty = 0.1 * reported["router_balance"] + 0.01 * reported["router_z"]
    values = {name: value for name, value in reported.items() if name != "router_excess"}  # no mean over rows
    return jnp.mean((outputs - batch["targets"]) ** 2) + penalty, values


def batches(count=3):
    rng = np.random.default_rng(1)
    return [{n: rng.normal(size=(B, T, D)).astype(np.float32) for n in ("inputs", "targets")} for _ in range(count)]


# Kinds of mixtures
DROPLESS = ()
CAPACITY = (("capacity", 0.75),)
BIAS = (("bias_rate", 0.02), ("scores", "sigmoid"), ("num_shared", 1))
SCHEDULES = {
    "1f1b": jpipe.schedules.one_f_one_b,
    "gpipe": jpipe.schedules.gpipe,
    "zero bubble": jpipe.schedules.zero_bubble_h1,
    "interleaved": lambda S, N: jpipe.schedules.interleaved(2 * S, N, num_chunks=2),
    "2bw": jpipe.schedules.pipedream_2bw,
    "overlapped 1f1b": lambda S, N: jpipe.schedules.one_f_one_b(S, 2 * N, ticks="overlapped"),
    "overlapped interleaved": lambda S, N: jpipe.schedules.interleaved(2 * S, 2 * N, ticks="overlapped"),
    "dual pipe": lambda S, N: jpipe.schedules.dual_pipe_v(2 * S, 2 * N),
}


def pipeline(axes, kind=DROPLESS, schedule="1f1b", num_layers=4, **options):
    options = {"optimizer": optax.sgd(RATE)} | options
    return jpipe.Pipeline(
        [functools.partial(Block, kind)] * num_layers,
        loss=loss,
        has_aux=True,
        schedule=SCHEDULES[schedule](2, N),
        mesh=jpipe.make_mesh(stage=2, **axes),
        **options,
    )


class Plain(NamedTuple):
    """Plain training of the layers on whole minibatches: a loss, values and gradients for each, the weights and states
    after the last one.
    """

    losses: list
    values: list
    gradients: list
    params: list
    states: list


def plain_training(params, kind, optimizer=None, delay=0):
    """The gradients are those of the weights `delay` updates ago."""
    optimizer = optimizer or optax.sgd(RATE)
    graph, weights, state = nnx.split(Block(kind, rngs=nnx.Rngs(0)), nnx.Param, ...)

    @jax.jit
    def gradient(params, states, batch):
        def value(params):
            x, moved = batch["inputs"], []
            with collect() as reported:
                for p, s in zip(params, states):
                    nnx.replace_by_pure_dict(w := jax.tree.map(lambda a: a, weights), p)
                    module = nnx.merge(graph, w, s, copy=True)
                    x = module(x)
                    moved.append(nnx.state(module, RouterState))
            total, values = loss(x, batch, reported=reported)
            return total, (values, moved)

        return jax.value_and_grad(value, has_aux=True)(params)

    states, opt_state = [state] * len(params), optimizer.init(params)
    versions, results = [params], Plain([], [], [], [], [])
    for t, batch in enumerate(batches()):
        (total, (values, states)), grads = gradient(versions[max(t - delay, 0)], states, batch)
        updates, opt_state = optimizer.update(grads, opt_state, versions[-1])
        versions.append(optax.apply_updates(versions[-1], updates))
        results.losses.append(float(total))
        results.values.append(values)
        results.gradients.append(grads)
    return results._replace(params=versions[-1], states=[nnx.to_pure_dict(s) for s in states])


def exhaustive(*case):
    return pytest.param(*case, marks=pytest.mark.exhaustive)


CASES = [
    # axes of the mesh, kind, schedule, rules
    ({"expert": 2, "data": 2}, BIAS, "1f1b", None),
    ({"fsdp": 2, "expert": 2}, DROPLESS, "zero bubble", OVER_BOTH),
    exhaustive({"expert": 2, "model": 2}, CAPACITY, "gpipe", None),
    exhaustive({}, BIAS, "1f1b", None),
    exhaustive({"expert": 1}, DROPLESS, "gpipe", None),
    exhaustive({"expert": 4}, DROPLESS, "1f1b", None),
    exhaustive({"expert": 4}, CAPACITY, "zero bubble", None),
    exhaustive({"expert": 2}, BIAS, "interleaved", None),
    exhaustive({"expert": 2}, BIAS, "zero bubble", None),
    exhaustive({"expert": 2}, CAPACITY, "interleaved", None),
    exhaustive({"fsdp": 2}, BIAS, "1f1b", OVER_FSDP),
    exhaustive({"fsdp": 2}, DROPLESS, "1f1b", None),
    exhaustive({"fsdp": 2, "expert": 2}, BIAS, "1f1b", None),
    exhaustive({"fsdp": 2, "model": 2}, CAPACITY, "gpipe", OVER_FSDP),
    exhaustive({"data": 2, "fsdp": 2}, CAPACITY, "1f1b", OVER_FSDP),
    exhaustive({"data": 2, "model": 2}, BIAS, "zero bubble", None),
]


@pytest.mark.first_case
@pytest.mark.parametrize("axes, kind, schedule, rules", CASES, ids=str)
def test_training_equals_the_plain_model(axes, kind, schedule, rules):
    pipe = pipeline(axes, kind, schedule, axis_rules=rules)
    first, *_ = batches()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no layer looks across rows
        state = pipe.init(KEY, first)
    plain = plain_training(pipe.get_params(state), kind)
    for step, batch in enumerate(batches()):
        state, metrics = pipe.step(state, batch)
        np.testing.assert_allclose(metrics["loss"], plain.losses[step], rtol=1e-5)
        for name, value in plain.values[step].items():
            np.testing.assert_allclose(metrics["aux"][name], value, rtol=1e-5, atol=1e-7, err_msg=name)
        norm = optax.tree.norm(plain.gradients[step])
        np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-5)
    assert_close(pipe.get_params(state), plain.params, "float32")
    assert_close(pipe.get_mutable_state(state), plain.states, "float32")


PAIRED = [
    # platform, kind, schedule, layers, options
    ("cpu", CAPACITY, "overlapped 1f1b", 5, {}),
    ("gpu", BIAS, "dual pipe", 4, {}),
    exhaustive("gpu", BIAS, "overlapped 1f1b", 4, {}),
    exhaustive("cpu", CAPACITY, "overlapped interleaved", 6, {"recompute": "full"}),
    exhaustive("gpu", CAPACITY, "overlapped interleaved", 4, {"overlap": True}),
    exhaustive("cpu", BIAS, "dual pipe", 8, {}),
    exhaustive("cpu", DROPLESS, "dual pipe", 5, {"overlap": True}),
]


def pair_passes(monkeypatch, platform):
    """Pipelines get the form for platforms that hide collectives of one pass under the other one."""
    monkeypatch.setitem(TARGETS, "cpu", dataclasses.replace(TARGETS[platform], pairs_passes=True, pair_options={}))


@pytest.mark.exhaustive
@pytest.mark.parametrize("platform, kind, schedule, num_layers, options", PAIRED, ids=str)
def test_both_passes_in_one_branch(platform, kind, schedule, num_layers, options, monkeypatch):
    pair_passes(monkeypatch, platform)
    pipe = pipeline({"expert": 2}, kind, schedule, num_layers, **options)
    assert pipe._program(batches()[0]).engine.pairs
    state = pipe.init(KEY, batches()[0])
    plain = plain_training(pipe.get_params(state), kind)
    for step, batch in enumerate(batches()):
        state, metrics = pipe.step(with_nan_buffers(state, all_but="statistics"), batch)
        np.testing.assert_allclose(metrics["loss"], plain.losses[step], rtol=1e-5)
        norm = optax.tree.norm(plain.gradients[step])
        np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-5)
    assert_close(pipe.get_params(state), plain.params, "float32")
    assert_close(pipe.get_mutable_state(state), plain.states, "float32")


def test_layers_without_collectives_have_no_pairs(monkeypatch):
    def pairs(layer, **axes):
        table, mesh = SCHEDULES["overlapped 1f1b"](2, N), jpipe.make_mesh(stage=2, **axes)
        layers = [jpipe.Function(layer)] * 4
        pipe = jpipe.Pipeline(layers, loss=square, optimizer=optax.sgd(1.0), schedule=table, mesh=mesh)
        return pipe._program(batches()[0]).engine.pairs

    def exchanges(x):
        return across(x, "expert")

    assert not pairs(exchanges, expert=2)  # devices of a CPU wait for each collective
    pair_passes(monkeypatch, "cpu")
    assert pairs(exchanges, expert=2)
    assert not pairs(jnp.tanh, expert=2)


def square(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def across(x, axis):
    rows = jax.sharding.PartitionSpec(axis)
    return jax.shard_map(lambda x: jax.lax.all_gather(x, axis).mean(0), in_specs=rows, out_specs=rows)(x)


@pytest.mark.exhaustive
def test_delayed_training_equals_its_definition():
    pipe = pipeline({"expert": 2}, schedule="2bw")
    first, *_ = batches()
    state = pipe.init(KEY, first)
    plain = plain_training(pipe.get_params(state), DROPLESS, delay=1)
    total = 0.0
    for batch in batches():
        state, metrics = pipe.step(state, batch)
        total += float(np.nan_to_num(metrics["loss"])) * int(metrics["num_microbatches"])
    state, metrics = pipe.flush(state)
    total += float(np.nan_to_num(metrics["loss"])) * int(metrics["num_microbatches"])
    np.testing.assert_allclose(total / (3 * N), np.mean(plain.losses), rtol=1e-5)
    assert_close(pipe.get_params(state), plain.params, "float32")


@pytest.mark.exhaustive
def test_any_number_of_rows_is_evaluated():
    pipe = pipeline({"expert": 2})
    first, *_ = batches()
    state = pipe.init(KEY, first)
    alone = jpipe.Pipeline(
        [Block] * 4,
        loss=loss,
        has_aux=True,
        optimizer=optax.sgd(RATE),
        schedule=jpipe.schedules.gpipe(1, N),
        mesh=jpipe.make_mesh(stage=1),
    )
    other = alone.adopt(state)
    for num_rows in (B, B - 1, 1):
        inputs = {"inputs": first["inputs"][:num_rows]}
        assert_close(pipe.predict(state, inputs), alone.predict(other, inputs), "float32")
    np.testing.assert_allclose(pipe.evaluate(state, first)["loss"], alone.evaluate(other, first)["loss"], rtol=1e-5)


# -- The compiled program


def bytes_of_exchanges(num_devices, num_replicas, capacity=None):
    """Bytes that a device hands to the all-to-alls of a layer, for a microbatch: forward and backward."""
    b = B // N // num_replicas // num_devices
    if capacity is not None:  # slots
        rows = E * b * math.ceil(capacity * K * T / E)
        counts = 0
    else:
        rows = num_devices * b * T * min(K, E // num_devices)
        counts = E * 4
    return 2 * rows * D * 4 + counts, 2 * rows * D * 4


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "axes, kind, rules",
    [
        ({"expert": 2}, DROPLESS, None),
        exhaustive({"expert": 4}, CAPACITY, None),
        exhaustive({"expert": 2, "data": 2}, CAPACITY, None),
        ({"fsdp": 2}, DROPLESS, OVER_FSDP),
    ],
    ids=str,
)
def test_the_exchanges_are_those_of_theory(axes, kind, rules):
    pipe = pipeline(axes, kind, num_layers=2, axis_rules=rules)
    pipe.init(KEY, batches()[0])
    text = pipe.compile(batches()[0]).as_text()
    num_devices = axes.get("expert", axes.get("fsdp"))
    place = np.argwhere(np.ones(tuple(pipe.mesh.shape.values())))
    others = [i for i, name in enumerate(pipe.mesh.axis_names) if name not in ("expert", "fsdp")]
    found = collectives(text)
    expected = bytes_of_exchanges(num_devices, axes.get("data", 1), dict(kind).get("capacity"))
    exchanges = [c for c in found if c.kind == "all-to-all"]
    assert all("/cond/branch_1_fun/" in c.name for c in exchanges)
    for stage in range(2):
        for name, num_bytes in zip(("forward", "backward"), expected):
            there = [c for c in exchanges if f"/{name}/stage{stage}/cond" in c.name]
            assert sum(c.num_bytes for c in there) == num_bytes
            assert len(there) == 2 + (name == "forward" and kind == DROPLESS)
    assert sum(c.num_bytes for c in exchanges) == 2 * sum(expected)
    for group in (group for c in exchanges for group in c.groups):
        assert len(group) == num_devices and len(np.unique(place[group][:, others], axis=0)) == 1
    # Neither weights of experts nor their gradients are gathered, or summed over the devices that have other experts.
    of_experts = E // num_devices * D * F
    replicas = axes.get("data", 1) > 1  # which sum the gradients in their update
    for c in found:
        large = any(math.prod(shape) >= of_experts for shape in c.shapes)
        assert not large or c.kind == "all-to-all" or (replicas and "/update/" in c.name), c


@pytest.mark.exhaustive
def test_a_device_has_its_experts():
    pipe = pipeline({"expert": 4})
    state = pipe.init(KEY, batches()[0])
    weights = sum(math.prod(a.shape) for a in jax.tree.leaves(pipe.get_params(state)))
    of_experts = 4 * 2 * E * D * F
    held = sum(s.data.size for a in jax.tree.leaves(state.parameters) for s in a.addressable_shards)
    assert held == of_experts + 4 * (weights - of_experts)  # all others on each device of "expert"
    (record,) = (record for record in pipe.shards(batches()[0]) if record.use == "weights")
    assert record.num_bytes == 2 * (E * D * F * 2 // 4 + D * E + 2 * D) * 4
    assert record.split["expert"] == E * D * F * 2 / (E * D * F * 2 + D * E + 2 * D)


@pytest.mark.exhaustive
def test_layers_are_measured_alone():
    """On one device, where `jax.vmap` computes the exchanges: the FLOPs of all devices together."""
    first = batches()[0]
    records, others = (pipeline(axes, CAPACITY).partition(first) for axes in ({"expert": 2}, {}))
    for ours, wanted in zip(records, others, strict=True):
        np.testing.assert_allclose(ours.flops, wanted.flops, rtol=0.2)
    assert pipeline({"expert": 2}).profile(first).layers[0].backward.median > 0


# -- Optimizers


def decays(params: Any):
    return jax.tree.map_with_path(lambda path, _: "experts" in jax.tree_util.keystr(path), params)


CLIPPED = optax.chain(jpipe.optim.clip_by_global_norm(0.1), optax.sgd(RATE))
DECAYED = optax.adamw(0.01, eps=1e-3, weight_decay=0.5, mask=decays)
OPTIMIZERS = [
    exhaustive({"expert": 2}, CLIPPED, {}),
    ({"expert": 2, "data": 2}, optax.chain(jpipe.optim.clip_by_global_norm(0.1), DECAYED), {"shard_optimizer": True}),
    exhaustive({"fsdp": 2}, CLIPPED, {"axis_rules": OVER_FSDP}),
    exhaustive({"expert": 2, "model": 2}, CLIPPED, {}),
    exhaustive({"expert": 4}, DECAYED, {}),
    exhaustive({"fsdp": 2, "data": 2}, DECAYED, {"axis_rules": OVER_FSDP, "shard_optimizer": True}),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("axes, optimizer, options", OPTIMIZERS)
def test_updates_equal_those_of_the_plain_model(axes, optimizer, options):
    """A norm counts each expert once, and each other weight once too."""
    pipe = pipeline(axes, optimizer=optimizer, **options)
    state = pipe.init(KEY, batches()[0])
    plain_optimizer = optimizer
    if optimizer is not DECAYED:  # the transform of pipelines takes norms over stages
        rest = optax.sgd(RATE) if optimizer is CLIPPED else DECAYED
        plain_optimizer = optax.chain(optax.clip_by_global_norm(0.1), rest)
    plain = plain_training(pipe.get_params(state), DROPLESS, plain_optimizer)
    for step, batch in enumerate(batches()):
        state, metrics = pipe.step(state, batch)
        norm = optax.tree.norm(plain.gradients[step])
        assert norm > 0.2  # so it is clipped
        np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-5)
    assert_close(pipe.get_params(state), plain.params, "float32")


@pytest.mark.exhaustive
def test_frozen_experts_beside_low_rank_matrices():
    """LoRA trains the shared expert; the others are frozen, and stay split."""

    def layer(*, rngs):
        return jpipe.add_lora(Block((("num_shared", 1),), rngs=rngs), 2, rngs=rngs)

    results = []
    for axes in ({}, {"expert": 2}):
        pipe = jpipe.Pipeline(
            [layer] * 4,
            loss=loss,
            has_aux=True,
            optimizer=CLIPPED,
            schedule=jpipe.schedules.one_f_one_b(2, N),
            mesh=jpipe.make_mesh(stage=2, **axes),
            trainable=nnx.LoRAParam,
        )
        state = pipe.init(KEY, batches()[0])
        before = pipe.get_params(state)
        for batch in batches():
            state, metrics = pipe.step(state, batch)
        results.append((pipe.get_params(state), metrics["loss"], metrics["gradient_norm"]))
        after = pipe.get_params(state)
        np.testing.assert_array_equal(after[0]["mixture"]["experts_in"], before[0]["mixture"]["experts_in"])
        record = pipe.shards(batches()[0])[0]
        assert record.use == "weights"
        assert ("expert" in record.split) == bool(axes)
    assert_close(results[1], results[0], "float32")


@pytest.mark.exhaustive
def test_checkpoints_and_adoption_move_experts(tmp_path):
    """Between meshes with unlike numbers of devices for experts."""
    first, second, _ = batches()
    pipes = [pipeline(axes, BIAS, optimizer=DECAYED) for axes in ({"expert": 4}, {"expert": 2, "data": 2})]
    state, _ = pipes[0].step(pipes[0].init(KEY, first), first)
    checkpoints = jpipe.Checkpoints(tmp_path)
    checkpoints.save(1, state)
    checkpoints.wait()
    restored = checkpoints.restore(pipes[1], first).state
    checkpoints.close()
    adopted = pipes[1].adopt(state)
    state, _ = pipes[0].step(state, second)
    for other in (restored, adopted):
        other, _ = pipes[1].step(other, second)
        assert_close(pipes[1].get_params(other), pipes[0].get_params(state), "float32")
        assert_close(pipes[1].get_mutable_state(other), pipes[0].get_mutable_state(state), "float32")


@pytest.mark.exhaustive
@pytest.mark.parametrize("capacity", [None, 1.0])
def test_stages_that_share_a_vocabulary(capacity):
    model = MixtureTransformer(
        vocab_size=32, seq_len=8, dim=16, num_heads=2, num_blocks=2, num_experts=4, expert_dim=8, capacity=capacity
    )
    generator = np.random.default_rng(0)
    batch = {name: generator.integers(0, 32, (8, 8), dtype=np.int32) for name in ("inputs", "labels")}
    pipe = jpipe.Pipeline(
        model.layers(),
        loss=model.loss(),
        has_aux=True,
        optimizer=optax.sgd(0.5),
        schedule=jpipe.schedules.one_f_one_b(2, N),
        mesh=jpipe.make_mesh(stage=2, expert=2),
        axis_rules=(("vocab", "stage"), *jpipe.AXIS_RULES),
    )
    state = pipe.init(KEY, batch)
    plain = jax.jit(jax.value_and_grad(pipe.plain_loss(state)))
    params = pipe.get_params(state)
    for _ in range(2):
        state, metrics = pipe.step(state, batch)
        want, gradient = plain(params, batch)
        params = jax.tree.map(lambda a, g: a - 0.5 * g, params, gradient)
        np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    assert_close(pipe.get_params(state), params, "float32")
