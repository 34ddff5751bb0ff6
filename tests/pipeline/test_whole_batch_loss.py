"""A loss across rows: it sees the whole minibatch, over microbatches and replicas, and is that of the plain model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import refused, use_target

import jpipe

SCHEDULES = jpipe.schedules
KEY = jax.random.key(0)
EXHAUSTIVE = pytest.mark.exhaustive


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


def contrastive(outputs, batch):
    """Each image against all texts of the minibatch, and the variance of all outputs."""
    images = outputs / jnp.linalg.norm(outputs, axis=-1, keepdims=True)
    logits, rows = 3 * images @ batch["texts"].T, jnp.arange(len(outputs))
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    loss = (cross_entropy(logits, rows).mean() + cross_entropy(logits.T, rows).mean()) / 2
    return loss + outputs.var(axis=0).sum(), {"found": (logits.argmax(-1) == rows).mean(), "rows": len(rows)}


def batch_of(size, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(size, 4)).astype(np.float32) for name in ("inputs", "texts")}


def make(schedule, loss=contrastive, has_aux=True, optimizer=None, **options):
    return jpipe.Pipeline(
        [Layer] * 4,
        loss=jpipe.WholeBatchLoss(loss),
        has_aux=has_aux,
        optimizer=optimizer or optax.sgd(0.3, momentum=0.9),
        schedule=schedule,
        **options,
    )


def plain_step(params, opt_state, optimizer, batch):
    def of(params):
        x = batch["inputs"]
        for p in params:
            x = jnp.tanh(x @ p["linear"]["kernel"] + p["linear"]["bias"][None])
        return contrastive(x, batch)

    value, grads = jax.value_and_grad(of, has_aux=True)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return value, optax.global_norm(grads), optax.apply_updates(params, updates), opt_state


def two_stages_on_a_device():
    """A table of one's own whose forwards all come first."""
    return dataclasses.replace(SCHEDULES.gpipe(4, 2), name="own", device=np.array([0, 1, 0, 1])).check()


CASES = {
    "2 stages": lambda: dict(schedule=SCHEDULES.gpipe(2, 4)),
    "4 stages": lambda: dict(schedule=SCHEDULES.gpipe(4, 3), loss_scale=8.0),
    "replicas": lambda: dict(
        schedule=SCHEDULES.gpipe(2, 2),
        mesh=jpipe.make_mesh(stage=2, data=2),
        shard_optimizer=True,
        optimizer=optax.adam(0.01),
    ),
    "replicas, one microbatch": lambda: dict(schedule=SCHEDULES.gpipe(2, 1), mesh=jpipe.make_mesh(stage=2, data=4)),
    "forward again": lambda: dict(schedule=SCHEDULES.gpipe(2, 4), recompute="full"),
    "copies of the first stage": lambda: dict(schedule=SCHEDULES.gpipe(2, 4, replicas=(2, 1))),
    "weights split": lambda: dict(
        schedule=SCHEDULES.gpipe(2, 2), mesh=jpipe.make_mesh(stage=2, data=2, fsdp=2), boundaries="memory"
    ),
    "host memory": lambda: dict(schedule=SCHEDULES.gpipe(2, 8), offload=jpipe.Offload(optimizer=1.0, activations=3)),
    "one stage": lambda: dict(schedule=SCHEDULES.gpipe(1, 4)),
    "two stages on a device": lambda: dict(schedule=two_stages_on_a_device()),
}
FEW = ("2 stages", "replicas")


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=EXHAUSTIVE) for n in CASES])
@pytest.mark.parametrize("platform", ["cpu", *(pytest.param(p, marks=EXHAUSTIVE) for p in ("gpu", "tpu"))])
def test_training_is_that_of_the_plain_model(name, platform, monkeypatch):
    use_target(monkeypatch, platform)
    pipe = make(**CASES[name]())
    size = 2 * pipe.schedule.num_microbatches * pipe.num_replicas
    if name == "weights split":
        size *= 2
    state = pipe.init(KEY, batch_of(size))
    params, optimizer = pipe.get_params(state), pipe.optimizer
    opt_state = optimizer.init(params)
    for seed, rows in enumerate((size, size, 2 * size)):
        batch = batch_of(rows, seed)
        evaluated = pipe.evaluate(state, batch)
        (loss, aux), norm, params, opt_state = plain_step(params, opt_state, optimizer, batch)
        state, metrics = pipe.step(state, batch)
        for got in (metrics, evaluated):
            np.testing.assert_allclose(got["loss"], loss, rtol=2e-6)
            np.testing.assert_allclose(got["aux"]["found"], aux["found"], rtol=2e-6)
            np.testing.assert_allclose(got["aux"]["rows"], rows)
        np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-5)
        assert metrics["num_microbatches"] == pipe.schedule.num_microbatches
        close = functools.partial(np.testing.assert_allclose, rtol=0, atol=3e-6)
        jax.tree.map(close, pipe.get_params(state), params)


def test_replicas_exchange_outputs_and_batch():
    mesh = jpipe.make_mesh(stage=2, data=2)
    *_, last = make(SCHEDULES.gpipe(2, 4), mesh=mesh).messages(batch_of(16))
    # Of the other replica's 8 rows the outputs, the inputs and the texts, of 4 numbers of 4 bytes.
    assert last == ("outputs", 1, 1, 8 * 3 * 16, 8 * 3 * 16)
    assert "outputs" not in {record.what for record in make(SCHEDULES.gpipe(2, 4)).messages(batch_of(16))}


def test_a_mean_over_rows_is_the_same_in_both_forms():
    trained = []
    for form in (jpipe.WholeBatchLoss, lambda loss: loss):
        pipe = jpipe.Pipeline(
            [Layer] * 2,
            loss=form(lambda y, batch: jnp.mean((y - batch["texts"]) ** 2)),
            optimizer=optax.sgd(0.1),
            schedule=SCHEDULES.gpipe(2, 4),
            compute_dtype=jnp.bfloat16,
            loss_scale=jpipe.LossScale(growth_interval=2),
        )
        state = pipe.init(KEY, batch_of(8))
        for seed in range(3):
            state, metrics = pipe.step(state, batch_of(8, seed))
        trained.append((pipe.get_params(state), metrics["loss"], metrics["loss_scale"]))
        value = pipe.plain_loss(state)(trained[-1][0], batch_of(8))
        np.testing.assert_allclose(value, pipe.evaluate(state, batch_of(8))["loss"], rtol=2e-2)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3), *trained)


# -- Refusals


@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.parametrize(
    "schedule",
    [
        SCHEDULES.one_f_one_b(2, 4),
        SCHEDULES.one_f_one_b(2, 1),
        SCHEDULES.zero_bubble_h1(2, 4),
        SCHEDULES.interleaved(4, 4),
        SCHEDULES.pipedream(2, 4),
        SCHEDULES.pipemare(2, 4),
    ],
    ids=lambda s: s.name,
)
def test_other_tables_name_the_two_ways(schedule):
    with refused("before the first backward.*`jpipe.schedules.gpipe`.*`num_microbatches=1`.*the function itself"):
        make(schedule)


def with_reports(outputs, batch, *, reported):
    return outputs.mean() + reported["a"]


REFUSED = {
    "copies of the last stage": (
        dict(schedule=SCHEDULES.gpipe(2, 4, replicas=(1, 2))),
        "the last stage .* has 2 copies",
    ),
    "reports": (dict(loss=with_reports), r"takes a function `\(outputs, batch\)`, and this one takes `reported` too"),
    "no function": (dict(loss=3), "`function` of `WholeBatchLoss` must be a function .*, got int"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    options, message = REFUSED[name]
    with refused(message):
        make(**({"schedule": SCHEDULES.gpipe(2, 4)} | options))


def test_outputs_without_rows_are_refused():
    pipe = jpipe.Pipeline(
        [Layer, jpipe.Function(lambda x: x.mean())],
        loss=jpipe.WholeBatchLoss(lambda y, batch: y),
        optimizer=optax.sgd(0.1),
        schedule=SCHEDULES.gpipe(2, 2),
    )
    with refused(
        "the last layer returns float32.*whose first dim is not that of a microbatch, 2. Return arrays with rows"
    ):
        pipe.init(KEY, batch_of(4))


def test_layers_are_not_measured_with_it():
    pipe = make(SCHEDULES.gpipe(2, 2))
    with refused("measured for one microbatch, and a `WholeBatchLoss` takes a whole minibatch"):
        pipe.profile(batch_of(8))
    assert pipe.profile(batch_of(8), programs=()).layers


def test_the_warning_about_losses_across_rows_names_it():
    pipe = jpipe.Pipeline(
        [Layer], loss=lambda *a: contrastive(*a)[0], optimizer=optax.sgd(0.1), schedule=SCHEDULES.gpipe(1, 2)
    )
    with pytest.warns(UserWarning, match="`jpipe.WholeBatchLoss` sees those of the whole minibatch"):
        pipe.init(KEY, batch_of(8))
