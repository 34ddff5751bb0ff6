"""Models with convolutions and skips, in the form of a step for GPUs, against the plain model: weights and sums of
gradients in the order that cuDNN reads, messages that are received in branches, and ReLUs without a mask.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import schedule_named
from flax import nnx
from helpers import assert_close

import jpipe
from jpipe.engine import cast_weights, stage_weights
from jpipe.gradients import apart
from jpipe.lowering.target import CPU, GPU, TARGETS
from models import UNet

exhaustive = functools.partial(pytest.param, marks=pytest.mark.exhaustive)
KEY = jax.random.key(0)
N = 4
MODEL = UNet(num_channels=1, width=2, num_levels=2, num_classes=2)
AS_ON_GPUS = dataclasses.replace(GPU, compiler_options={}, profiled_options={}, touches_idle=False, sums_apart=True)
SYNCHRONOUS = [
    # schedule, stages, options
    ("one_f_one_b", 3, {}),
    exhaustive("gpipe", 3, {}),
    exhaustive("one_f_one_b", 2, {}),
    exhaustive("one_f_one_b/unit", 3, {}),
    exhaustive("interleaved", 4, {}),
    exhaustive("zero_bubble_h1", 4, {}),
    exhaustive("zero_bubble_v", 4, {}),
    exhaustive("one_f_one_b", 2, {"mesh": {"data": 2}}),
    exhaustive("one_f_one_b", 2, {"mesh": {"data": 2}, "shard_optimizer": True}),
    exhaustive("gpipe", 2, {"mesh": {"fsdp": 2}}),
    exhaustive("one_f_one_b", 4, {"recompute": "full"}),
    exhaustive("gpipe", 4, {"trainable": lambda path, _: "bias" not in path}),
]
ASYNCHRONOUS = [
    ("pipedream/unit", 3, {}),
    exhaustive("pipedream_2bw/paired", 2, {}),
    exhaustive("pipedream_2bw/unit", 2, {"mesh": {"data": 2}}),
    exhaustive("pipemare/paired", 4, {}),
]


def named(value):
    """A part of the name of a case, the same in every process."""
    return " ".join(value) if isinstance(value, dict) else str(value)


@pytest.fixture(autouse=True)
def small_weights(monkeypatch):
    for module in (apart, cast_weights, stage_weights):
        monkeypatch.setattr(module, "SMALL", 16)


def in_float64(make, *, rngs):
    graph, state = nnx.split(make(rngs=rngs))
    return nnx.merge(graph, jax.tree.map(lambda a: a.astype("float64"), state))


PARTS = [(functools.partial(in_float64, make), names) for make, names in MODEL.parts()]


def loss_of(outputs, batch):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, batch["labels"]).mean()


def batches(count):
    rng = np.random.default_rng(0)
    shape = (2 * N, 8, 8)
    return [
        {"inputs": rng.normal(size=(*shape, 1)), "labels": rng.integers(0, 2, shape, dtype=np.int32)}
        for _ in range(count)
    ]


def pipeline(monkeypatch, target, schedule, num_stages, mesh=None, **options):
    monkeypatch.setitem(TARGETS, "cpu", target)
    table = schedule_named(schedule, num_stages, N)
    if mesh is not None:
        options["mesh"] = jpipe.make_mesh(stage=table.num_devices, **mesh)
    optimizer = optax.chain(jpipe.optim.clip_by_global_norm(0.5), optax.adam(0.02))
    layers = [jpipe.skip(make, **names) if names else make for make, names in PARTS]
    return jpipe.Pipeline(layers, loss=loss_of, optimizer=optimizer, schedule=table, **options)


def trained(pipe, num_steps=3):
    """Losses and norms of a few steps, the weights before and after them, and the state."""
    minibatches = batches(num_steps)
    state, values = pipe.init(KEY, minibatches[0]), []
    first = jax.tree.map(np.asarray, pipe.get_params(state))
    for batch in minibatches:
        state, metrics = pipe.step(state, batch)
        values += [metrics["loss"], metrics["gradient_norm"]]
    if not pipe.schedule.synchronous:
        state, metrics = pipe.flush(state)
        values.append(metrics["loss"])
    values.append(pipe.evaluate(state, minibatches[0])["loss"])
    return np.array(values), first, jax.tree.map(np.asarray, pipe.get_params(state)), state


def plain_training(params, trainable, num_steps=3):
    """What `trained` returns first and third, of the model without a pipeline."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.02))
    minibatches, values = batches(num_steps), []
    graphs = [nnx.split(make(rngs=nnx.Rngs(0))) for make, _ in PARTS]

    def loss(params, batch):
        x, kept = batch["inputs"], {}
        for (graph, like), (_, names), values in zip(graphs, PARTS, params, strict=True):
            state = jax.tree.map(lambda a: a, like)
            nnx.replace_by_pure_dict(state, values)
            module = nnx.merge(graph, state)
            x = module(x, *([kept.pop(names["pop"])] if "pop" in names else []))
            if "stash" in names:
                x, kept[names["stash"]] = x
        return loss_of(x, batch)

    def is_trained(path, _):
        return trainable is None or trainable(jax.tree_util.keystr(path), None)

    mask = jax.tree_util.tree_map_with_path(is_trained, params)
    state = optimizer.init(params)
    for batch in minibatches:
        value, grads = jax.jit(jax.value_and_grad(loss))(params, batch)
        grads = jax.tree.map(lambda g, is_on: g if is_on else jnp.zeros_like(g), grads, mask)
        values += [value, optax.global_norm(grads)]
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    values.append(jax.jit(loss)(params, minibatches[0]))
    return np.array(values), params


@pytest.mark.first_case
@pytest.mark.parametrize("schedule, num_stages, options", SYNCHRONOUS, ids=named)
@pytest.mark.filterwarnings("ignore:.*bubble", "ignore:.*stages hold")
def test_training_is_that_of_the_plain_model(schedule, num_stages, options, monkeypatch):
    with jax.enable_x64(True):
        pipe = pipeline(monkeypatch, AS_ON_GPUS, schedule, num_stages, **options)
        values, first, params, _ = trained(pipe)
        want_values, want = plain_training(first, options.get("trainable"))
    np.testing.assert_allclose(values, want_values, rtol=1e-9)
    assert_close(params, jax.tree.map(np.asarray, want), "float64")
    moved = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (first, params)), strict=True)]
    assert max(moved) > 1e-2  # a weight that was not brought into its order again would show


@pytest.mark.parametrize("schedule, num_stages, options", ASYNCHRONOUS, ids=named)
@pytest.mark.filterwarnings("ignore:.*bubble", "ignore:.*stages hold")
def test_late_training_is_that_of_the_form_for_cpus(schedule, num_stages, options, monkeypatch):
    with jax.enable_x64(True):
        want_values, _, want, _ = trained(pipeline(monkeypatch, CPU, schedule, num_stages, **options))
        values, _, params, _ = trained(pipeline(monkeypatch, AS_ON_GPUS, schedule, num_stages, **options))
    np.testing.assert_allclose(values, want_values, rtol=1e-9)
    assert_close(params, want, "float64")
