"""Loss scaling: exact where scales are powers of two, and a float16 model trains where it would not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_close

import jpipe

KEY = jax.random.key(0)
LAYERS = [functools.partial(nnx.Linear, 4, 4)] * 3


def loss_fn(outputs, batch):
    error = jnp.mean((outputs - batch["targets"]) ** 2)
    return error * batch["weight"][0]


def batch_of(weight=1.0, size=8):
    rng = np.random.default_rng(0)
    batch = {k: rng.normal(size=(size, 4)).astype(np.float32) for k in ("inputs", "targets")}
    return {**batch, "weight": np.full(size, weight, np.float32)}


def pipeline(schedule=None, **options):
    schedule = schedule or jpipe.schedules.one_f_one_b(3, 4)
    options = {"optimizer": optax.adam(0.01), **options}
    return jpipe.Pipeline(LAYERS, loss=loss_fn, schedule=schedule, **options)


def trained(num_steps=3, weight=1.0, **options):
    pipe, batch = pipeline(**options), batch_of(weight)
    state, all_metrics = pipe.init(KEY, batch), []
    for _ in range(num_steps):
        state, metrics = pipe.step(state, batch)
        all_metrics.append(jax.tree.map(np.asarray, metrics))
    return pipe.get_params(state), all_metrics


@pytest.mark.exhaustive
@pytest.mark.parametrize("scale", [2.0**10, jpipe.LossScale(2.0**12, 2)])
def test_in_float32_a_power_of_two_changes_nothing(scale):
    clip = optax.chain(jpipe.optim.clip_by_global_norm(0.1), optax.sgd(0.1))
    params, metrics = trained(optimizer=clip, loss_scale=scale)
    want, plain = trained(optimizer=clip)
    assert_close(params, want, "float32")
    for got, wanted in zip(metrics, plain):
        np.testing.assert_allclose(got["loss"], wanted["loss"], rtol=1e-6)
        np.testing.assert_allclose(got["gradient_norm"], wanted["gradient_norm"], rtol=1e-6)


def test_the_scale_grows_and_falls():
    scale = jpipe.LossScale(4.0, growth_interval=2, largest=16.0)
    pipe, good, bad = pipeline(loss_scale=scale), batch_of(), batch_of(np.inf)
    state, seen = pipe.init(KEY, good), []
    for batch in (good, good, bad, good, good, good, good, bad, bad):
        state, metrics = pipe.step(state, batch)
        seen.append((float(metrics["loss_scale"]), int(metrics["skipped_updates"][0])))
    scales = [4, 8, 4, 4, 8, 8, 16, 8, 4]
    skips = [0, 0, 1, 0, 0, 0, 0, 1, 1]
    assert seen == list(zip(scales, skips))


def test_float16_gradients_survive_with_a_scale():
    """At a weight of 2^-24 they vanish in float16 without one."""
    options = dict(compute_dtype=jnp.float16, weight=2.0**-24)
    _, lost = trained(1, **options)
    _, kept = trained(1, loss_scale=2.0**14, **options)
    _, true = trained(1, weight=2.0**-24)
    assert lost[0]["gradient_norm"] < 0.5 * true[0]["gradient_norm"]
    np.testing.assert_allclose(kept[0]["gradient_norm"], true[0]["gradient_norm"], rtol=0.01)


def test_a_scale_too_large_falls_until_it_fits():
    scale = jpipe.LossScale(2.0**24, growth_interval=100)
    _, metrics = trained(12, loss_scale=scale, compute_dtype=jnp.float16)
    skipped = [int(m["skipped_updates"][0]) for m in metrics]
    assert skipped[0] == 1 and skipped[-1] == 0
    assert metrics[-1]["loss_scale"] == 2.0 ** (24 - sum(skipped))
    assert metrics[-1]["loss"] < metrics[0]["loss"]


@pytest.mark.exhaustive
def test_a_constant_scale_works_with_asynchronous_schedules():
    schedule = jpipe.schedules.pipedream(3, 2)
    params, _ = trained(5, schedule=schedule, loss_scale=2.0**10)
    want, _ = trained(5, schedule=schedule)
    assert_close(params, want, "float32")


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: jpipe.LossScale(0.0), "`initial` of a loss scale must be above 0"),
        (lambda: jpipe.LossScale(growth_interval=0), "`growth_interval` must be"),
        (lambda: jpipe.LossScale(factor=1.0), "`factor` must be above 1, got 1.0"),
        (lambda: jpipe.LossScale(8.0, largest=4.0), "`largest` must be at least"),
        (lambda: pipeline(loss_scale="big"), "`loss_scale` must be a number, .*'big'"),
        (lambda: pipeline(loss_scale=-1), "must be above 0 and finite, got -1"),
        (
            lambda: pipeline(jpipe.schedules.pipemare(2, 2), loss_scale=jpipe.LossScale()),
            "that moves needs a synchronous schedule: in 'pipemare'.*loss_scale=32768",
        ),
    ],
    ids=["zero", "interval", "factor", "largest", "text", "negative", "asynchronous"],
)
def test_wrong_scales(make, message):
    with pytest.raises(ValueError, match=message):
        make()
