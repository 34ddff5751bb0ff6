"""Reported values beside a masked mean count as in a loss that is a mean, and sums of losses are float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import schedule_named
from flax import nnx
from helpers import assert_close

import jpipe
from jpipe.layers.loss import Loss, LossError
from jpipe.reference import Reference

KEY = jax.random.key(3)
OUTPUTS = np.array([0.5, -1.0, 2.0], np.float32)
BATCH = {"mask": np.array([1, 0, 4], np.float32)}
P, Q = np.float32(0.75), np.float32(-3)
SUM = float(np.sum(OUTPUTS**2 * BATCH["mask"]))  # 16.25
WEIGHT = 5.0


def masked_sum(outputs, batch):
    return (outputs**2 * batch["mask"]).sum()


@jax.jit
def inner(total, reported):
    return total + 2 * reported["p"]


CASES = {  # the sum of `loss`, what is divided by the weight, and what is not
    "added": (lambda s, b, r: s + 0.1 * r["p"], SUM, 0.1 * P),
    "subtracted": (lambda s, b, r: -(r["p"] - s), SUM, -P),
    "two": (lambda s, b, r: r["q"] + (0.1 * r["p"] + s), SUM, Q + 0.1 * P),
    "with a constant": (lambda s, b, r: s + (r["p"] - 2), SUM, P - 2),
    "not linear": (
        lambda s, b, r: s + jnp.exp(r["p"]) * r["q"] ** 2,
        SUM,
        jnp.exp(P) * 9,
    ),
    "all scaled": (lambda s, b, r: 3 * (s + r["p"]) / 2, 1.5 * SUM, 1.5 * P),
    "compiled": (lambda s, b, r: inner(s, r), SUM, 2 * P),
    "stacked": (lambda s, b, r: jnp.stack([s, r["p"]]).sum(), SUM, P),
    "weighed": (
        lambda s, b, r: jnp.dot(jnp.stack([r["p"], s]), jnp.array([2.0, 1.0])),
        SUM,
        2 * P,
    ),
    "of a list": (lambda s, b, r: sum([s, r["p"], r["q"]]), SUM, P + Q),
    "chosen": (lambda s, b, r: jnp.where(np.True_, s + r["p"], 0), SUM, P),
    "cast": (lambda s, b, r: (s + r["p"]).astype(jnp.bfloat16), 16.25, 0.75),
    "none": (lambda s, b, r: s, SUM, 0),
    "alone": (lambda s, b, r: 0.1 * r["p"], 0, 0.1 * P),
    # Products with what depends on rows belong to the rows.
    "times the weight": (lambda s, b, r: s + b["mask"].sum() * r["p"], SUM + 5 * P, 0),
    "factor": (lambda s, b, r: s * (1 + r["p"]), SUM * (1 + P), 0),
    "both": (lambda s, b, r: s * r["p"] + r["q"], SUM * P, Q),
    "mean times weight": (
        lambda s, b, r: (s / 5 + r["p"]) * b["mask"].sum(),
        SUM + 5 * P,
        0,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_weight_divides_what_does_not_come_from_reported_values_alone(name):
    function, rest, of_reported = CASES[name]

    def loss(outputs, batch, *, reported):
        total = function(masked_sum(outputs, batch), batch, reported)
        return (total, batch["mask"].sum()), {"total": total, "count": 3}

    terms = Loss.of(loss, has_aux=True).terms(OUTPUTS, BATCH, {"p": P, "q": Q})
    value, aux = terms.mean()
    np.testing.assert_allclose(value, rest / WEIGHT + of_reported, rtol=1e-6)
    np.testing.assert_allclose(aux["total"], value, rtol=1e-6)
    np.testing.assert_allclose(aux["count"], 3 / WEIGHT, rtol=1e-6)
    np.testing.assert_allclose(terms.values, [rest, of_reported], rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_the_terms_are_those_of_the_sum(name):
    """Also of custom derivatives, which a list of equations would lose."""
    function, *_ = CASES[name]

    @jax.custom_jvp
    def doubled(x):
        return x

    doubled.defjvp(lambda primals, tangents: (primals[0], 2 * tangents[0]))

    def loss(outputs, batch, *, reported):
        reported = {k: doubled(v) for k, v in reported.items()}
        total = function(doubled(masked_sum(outputs, batch)), batch, reported)
        return total, batch["mask"].sum()

    def whole(outputs, reported):
        return loss(outputs, BATCH, reported=reported)[0].astype(np.float32)

    def in_terms(outputs, reported):
        return sum(Loss.of(loss, False).terms(outputs, BATCH, reported).values)

    arguments = OUTPUTS, {"p": P, "q": Q}
    want = jax.grad(whole, argnums=(0, 1))(*arguments)
    got = jax.grad(in_terms, argnums=(0, 1))(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


def test_a_sum_whose_terms_cannot_be_told_apart_is_refused():
    def loss(outputs, batch, *, reported):
        total = masked_sum(outputs, batch) + reported["p"]
        return jnp.maximum(total, 0), batch["mask"].sum()

    with pytest.raises(LossError, match="'max' to a sum of reported .* at the end"):
        Loss.of(loss, False).terms(OUTPUTS, BATCH, {"p": P})

    def mean(outputs, batch, *, reported):  # no weight, so all is a mean
        return loss(outputs, batch, reported=reported)[0]

    terms = Loss.of(mean, False).terms(OUTPUTS, BATCH, {"p": P})
    np.testing.assert_allclose(terms.mean()[0], SUM + P)

    def only_aux(outputs, batch, *, reported):
        total = masked_sum(outputs, batch) + reported["p"]
        return (total, batch["mask"].sum()), jnp.exp(-total)

    _, aux = Loss.of(only_aux, True).terms(OUTPUTS, BATCH, {"p": P}).mean()
    np.testing.assert_allclose(aux, np.exp(-SUM - P) / WEIGHT, rtol=1e-6)


# -- In pipelines


class Balanced(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(6, 6, rngs=rngs)

    def __call__(self, x):
        y = self.linear(x)
        jpipe.report("uneven", jnp.square(y).mean())
        return jnp.tanh(y)


def squares(parameters):
    return sum(jnp.sum(a**2) for a in jax.tree.leaves(parameters))


LAYERS = [jpipe.report_weights(Balanced, "squares", squares)] * 4


def penalty(reported):
    return 0.1 * reported["uneven"] + 0.01 * reported["squares"]


def reporting_loss(outputs, batch, *, reported):
    total = (jnp.square(outputs).mean(-1) * batch["mask"]).sum()
    value = total + penalty(reported), batch["mask"].sum()
    return value, {"penalty": penalty(reported)}


def plain(params, batch):
    x, reported = batch["inputs"], {"uneven": 0.0, "squares": 0.0}
    for p in params:
        y = x @ p["linear"]["kernel"] + p["linear"]["bias"][None]
        reported["uneven"] += jnp.square(y).mean()
        reported["squares"] += squares(p)
        x = jnp.tanh(y)
    total = (jnp.square(x).mean(-1) * batch["mask"]).sum()
    return total / batch["mask"].sum() + penalty(reported), penalty(reported)


def batches(count, size):
    rng = np.random.default_rng(4)
    return [
        {
            "inputs": rng.normal(size=(size, 6)).astype(np.float32),
            "mask": rng.integers(0, 5, size).astype(np.float32),
        }
        for _ in range(count)
    ]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.parametrize(
    "schedule,S,N,options",
    [
        ("one_f_one_b/unit", 2, 4, {"data": 2, "loss_scale": 64.0}),
        ("gpipe", 4, 2, {"recompute": "full"}),
        ("zero_bubble_v", 4, 4, {}),
        ("gpipe/2-1", 2, 4, {}),
    ],
)
@pytest.mark.sampled(4)
def test_a_penalty_beside_a_masked_mean_is_the_plain_one(schedule, S, N, options):
    table, options = schedule_named(schedule, S, N), dict(options)
    replicas = options.pop("data", 1)
    (batch,) = batches(1, 2 * N * replicas)
    pipe = jpipe.Pipeline(
        LAYERS,
        loss=reporting_loss,
        has_aux=True,
        optimizer=optax.sgd(0.1),
        schedule=table,
        mesh=jpipe.make_mesh(stage=table.num_devices, data=replicas),
        **options,
    )
    state = pipe.init(KEY, batch)
    params = pipe.get_params(state)
    (loss, of_reported), gradient = jax.value_and_grad(plain, has_aux=True)(params, batch)
    plain_loss = pipe.plain_loss(state)
    np.testing.assert_allclose(plain_loss(params, batch), loss, rtol=1e-5)
    state, metrics = pipe.step(state, batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["aux"]["penalty"], of_reported, rtol=1e-5)
    moved = jax.tree.map(lambda a, b: (b - a) / 0.1, pipe.get_params(state), params)
    assert_close(moved, jax.tree.map(np.asarray, gradient), "float32")


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule,N", [("pipemare/unit", 2), ("pipedream/paired", 1)])
def test_penalties_in_asynchronous_schedules(schedule, N):
    """Equal to the table walked in Python, whose oracle for the loss is that of the definition."""
    table = schedule_named(schedule, 2, N)
    arguments = dict(
        loss=lambda y, b, *, reported: reporting_loss(y, b, reported=reported)[0],
        optimizer=optax.sgd(0.1),
        schedule=table,
    )
    every = batches(5, 8 * N)
    pipe = jpipe.Pipeline(LAYERS, **arguments)
    state = pipe.init(KEY, every[0])
    reference = Reference(LAYERS, **arguments, params=pipe.get_params(state))
    for batch in every:
        state, metrics = pipe.step(state, batch)
        loss = reference.step(batch)
        if loss is not None:
            np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert_close(pipe.get_params(state), reference.get_params(), "float32")


# -- Dtypes


@pytest.mark.first_case
@pytest.mark.parametrize("weighted", [True, False])
def test_losses_of_many_microbatches_are_summed_in_float32(weighted):
    """bfloat16 counts to 256 in steps of 1."""
    N = 300

    def loss(outputs, batch):
        losses = jnp.square(outputs).astype(jnp.bfloat16)
        if not weighted:
            return losses.mean(), losses.max()
        masked = jnp.where(batch["mask"][:, None], losses, 0)
        return (masked.sum(), batch["mask"].sum()), losses.max()

    pipe = jpipe.Pipeline(
        [lambda x: x],
        loss=loss,
        has_aux=True,
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.gpipe(1, N),
    )
    mask = np.arange(3 * N) % 3 != 0
    batch = {"inputs": np.ones((3 * N, 1), np.float32), "mask": mask}
    state = pipe.init(KEY, batch)
    evaluated = pipe.evaluate(state, batch)
    state, metrics = pipe.step(state, batch)
    for values in (metrics, evaluated):
        assert values["loss"].dtype == values["aux"].dtype == np.float32
    np.testing.assert_allclose(metrics["loss"], 1, rtol=1e-6)
    np.testing.assert_allclose(metrics["aux"], 0.5 if weighted else 1, rtol=1e-6)
    np.testing.assert_allclose(evaluated["loss"], 1, rtol=1e-6)
