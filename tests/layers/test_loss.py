"""Losses that are ratios of sums, values that layers report, and warnings for losses that microbatches change."""

import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from families import FAMILIES, schedule_named, slow
from flax import nnx
from helpers import assert_close

import jpipe
from jpipe.reference import Reference

KEY = jax.random.key(5)
MLP = FAMILIES["mlp"]
SYNCHRONOUS = [
    ("gpipe", 3, 4, 2, "none"),
    ("one_f_one_b/paired", 2, 3, 1, "full"),
    ("one_f_one_b/unit", 3, 4, 1, "none"),
    ("interleaved/unit", 4, 4, 1, "none"),
    ("zero_bubble_h1", 2, 2, 2, "full"),
    slow("zero_bubble_h2", 3, 4, 1, "none"),
    ("zero_bubble_v", 4, 4, 1, "none"),
    ("hand-written", 2, 3, 1, "none"),
]


def batches_with_mask(count: int, size: int, dtype="float64") -> list[dict]:
    """Batches whose microbatches have very different numbers of unmasked rows, some none at all."""
    rng = np.random.default_rng(1)
    batches = MLP.batches(count, size, dtype)
    for batch in batches:
        batch["mask"] = (np.arange(size) % 5 < rng.integers(1, 4)) * 1.0
        batch["mask"][: size // 4] = 0
    return batches


def errors(outputs, batch):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, batch["labels"])


def sum_and_weight(outputs, batch):
    return (errors(outputs, batch) * batch["mask"]).sum(), batch["mask"].sum()


def masked_mean(outputs, batch):
    total, weight = sum_and_weight(outputs, batch)
    return total / weight


def with_accuracy(loss):
    def both(outputs, batch):
        hits = (outputs.argmax(-1) == batch["labels"]) * batch["mask"]
        return loss(outputs, batch), {"accuracy": hits.sum()}

    return both


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.parametrize("schedule,S,N,replicas,recompute", SYNCHRONOUS)
@pytest.mark.sampled(12)
def test_a_masked_mean_equals_the_plain_model(schedule, S, N, replicas, recompute):
    table = schedule_named(schedule, S, N)
    with jax.enable_x64(True):
        family = MLP.in_dtype("float64")
        batches = batches_with_mask(2, 4 * N * replicas)
        plain = oracles.PlainModel(family.layers, KEY)
        optimizer = optax.sgd(0.5, momentum=0.5)
        pipe = jpipe.Pipeline(
            family.layers,
            loss=with_accuracy(sum_and_weight),
            has_aux=True,
            optimizer=optimizer,
            schedule=table,
            mesh=jpipe.make_mesh(stage=table.num_devices, data=replicas),
            recompute=recompute,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            state = pipe.init(KEY, batches[0], params=plain.params)
        losses, gradients, params = oracles.train(plain, plain.params, masked_mean, optimizer, batches)
        for batch, loss, gradient in zip(batches, losses, gradients):
            weights = pipe.get_params(state)
            _, accuracy = with_accuracy(masked_mean)(plain(weights, batch["inputs"]), batch)
            evaluated = pipe.evaluate(state, batch)
            state, metrics = pipe.step(state, batch)
            assert_close(metrics["loss"], np.asarray(loss), "float64")
            assert_close(evaluated["loss"], np.asarray(loss), "float64")
            wanted = np.asarray(accuracy["accuracy"]) / batch["mask"].sum()
            assert_close(metrics["aux"]["accuracy"], wanted, "float64")
            assert_close(evaluated["aux"]["accuracy"], wanted, "float64")
            norm = optax.tree.norm(gradient)
            np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-9)
        assert_close(pipe.get_params(state), params, "float64")


def delays(name, ticks, S, N):
    """Updates between forward and gradient of a minibatch's microbatch j on stage s, and between backward and
    gradient.
    """

    def delay(s, j):  # PipeMare, Table 1
        ahead = 2 * (S - 1 - s) + 1 if ticks == "paired" else S - 1 - s
        return math.ceil(max(ahead - j, 0) / N)

    return {
        "pipedream": (delay, delay),
        "pipedream_2bw": (lambda s, j: 1, lambda s, j: 1),
        "pipemare": (delay, lambda s, j: 0),
    }[name]


@pytest.mark.first_case
@pytest.mark.parametrize(
    "name,ticks,S,N,options",
    [
        # The gradient of the loss is taken when the minibatch itself is not kept any more.
        ("pipemare", "unit", 2, 4, {}),
        ("pipedream", "paired", 3, 2, {"replicas": 2}),
        ("pipemare", "paired", 3, 2, {"recompute": "full"}),
        ("pipedream_2bw", "unit", 2, 4, {}),
        # ... and when it is.
        ("pipedream", "paired", 3, 5, {}),
        ("pipedream_2bw", "paired", 3, 5, {}),
    ],
)
@pytest.mark.sampled(3)
def test_a_masked_mean_under_asynchronous_schedules(name, ticks, S, N, options):
    """Equal to the loop of the definition, whose microbatches get the sum times N over the minibatch's weight."""
    table = schedule_named(f"{name}/{ticks}", S, N)
    replicas, recompute = options.get("replicas", 1), options.get("recompute", "none")
    size = 4 * N * replicas
    with jax.enable_x64(True):
        family = MLP.in_dtype("float64")
        batches = batches_with_mask(6, size)
        for i, batch in enumerate(batches):
            batch["mask"] *= 2.0 ** (i % 3)
        optimizer = optax.sgd(0.3)
        pipe = jpipe.Pipeline(
            family.layers,
            loss=sum_and_weight,
            optimizer=optimizer,
            schedule=table,
            boundaries=[6 // S * s for s in range(1, S)],
            mesh=jpipe.make_mesh(stage=S, data=replicas),
            recompute=recompute,
        )
        plain = oracles.PlainModel(family.layers, KEY)
        state = pipe.init(KEY, batches[0], params=plain.params)
        for batch in batches:
            state, _ = pipe.step(state, batch)
        state, metrics = pipe.flush(state)
        microbatches = []
        for batch in batches:
            for m in range(N):
                # Microbatch m of all replicas, of which each has rows that follow each other.
                rows = np.arange(size).reshape(replicas, N, 4)[:, m].reshape(-1)
                part = {k: v[rows] for k, v in batch.items()}
                part["row_weights"] = part["mask"] * N / batch["mask"].sum()
                microbatches.append(part)

        def loss(outputs, batch):
            return (errors(outputs, batch) * batch["row_weights"]).sum()

        _, want = oracles.train_with_delays(
            plain,
            [i * S // 6 for i in range(6)],
            plain.params,
            loss,
            optimizer,
            microbatches,
            N,
            *delays(name, ticks, S, N),
            recompute=recompute == "full",
        )
        assert_close(pipe.get_params(state), want, "float64")
        assert not np.asarray(metrics["skipped_updates"]).any()


@pytest.mark.exhaustive
@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["pipemare/unit", "zero_bubble_h1"])
def test_a_masked_mean_equals_the_table_walked_in_python(schedule):
    table = schedule_named(schedule, 3, 4)
    batches = batches_with_mask(3, 8, "float32")
    arguments = dict(loss=sum_and_weight, optimizer=optax.sgd(0.3), schedule=table)
    plain = oracles.PlainModel(MLP.layers, KEY)
    reference = Reference(MLP.layers, **arguments, boundaries=[2, 4], params=plain.params)
    pipe = jpipe.Pipeline(MLP.layers, **arguments, boundaries=[2, 4])
    state = pipe.init(KEY, batches[0], params=plain.params)
    for batch in batches:
        state, metrics = pipe.step(state, batch)
        loss = reference.step(batch)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert_close(pipe.get_params(state), reference.get_params(), "float32")


# -- Refused and warned about


def pipeline(loss, schedule=None, layers=None, **options):
    return jpipe.Pipeline(
        layers or [functools.partial(nnx.Linear, 6, 6)] * 2,
        loss=loss,
        optimizer=optax.sgd(0.1),
        schedule=schedule or jpipe.schedules.gpipe(2, 2),
        **options,
    )


def numbers(size=8):
    rng = np.random.default_rng(2)
    names = ("inputs", "targets")
    batch = {k: rng.normal(size=(size, 6)).astype(np.float32) for k in names}
    labels = rng.integers(0, 6, size, dtype=np.int32)
    scale = np.full(size, 0.7, np.float32)
    return batch | {"labels": labels, "mask": np.ones(size, np.float32), "scale": scale}


def square(outputs, batch):
    return jnp.square(outputs - batch["targets"]).mean(axis=-1)


def contrastive(outputs, batch):
    scores = outputs @ batch["targets"].T
    return -jnp.diagonal(jax.nn.log_softmax(scores)).mean()


def padded(outputs, batch):
    """Labels of 0 are padding."""
    weights = (batch["labels"] > 0).astype(np.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs, batch["labels"])
    return (losses * weights).sum() / weights.sum()


def negative(outputs, batch):
    """Labels of -100 are ignored, and the first batch has none."""
    weights = (batch["labels"] != -100).astype(np.float32)
    labels = jnp.maximum(batch["labels"], 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs, labels)
    return (losses * weights).sum() / weights.sum()


def guarded(guard):
    """A masked mean whose weight cannot be 0; a microbatch without weight counts as 1 in the minibatch."""

    def loss(outputs, batch):
        keeps = batch["labels"] >= 0
        return (square(outputs, batch) * keeps).sum(), guard(keeps.sum())

    return loss


def divided(pair):
    return pair[0] / pair[1]


@pytest.mark.first_case
@pytest.mark.parametrize(
    "loss,words",
    [
        (lambda y, b: square(y, b).sum(), "is a sum over the rows"),
        (
            lambda y, b: (square(y, b) * b["mask"]).sum() / b["mask"].sum(),
            "not a mean over rows",
        ),
        (padded, "not a mean over rows"),
        (negative, "not a mean over rows"),
        (contrastive, "not a mean over rows"),
        (lambda y, b: jnp.sqrt(square(y, b).mean()), "not a mean over rows"),
        (
            lambda y, b: ((square(y, b)).mean(), b["mask"].sum()),
            "are not the sums",
        ),
        (
            lambda y, b: ((square(y, b) * b["mask"]).sum(), b["mask"].mean()),
            "are not the sums",
        ),
        (guarded(lambda w: jnp.maximum(w, 1)), "a guard against 0, .* is not needed"),
        (guarded(lambda w: jnp.where(w == 0, 1, w)), "Return the weight as it is"),
        (guarded(lambda w: jnp.clip(w, 1)), "a guard against 0"),
        (
            lambda y, b: divided(guarded(lambda w: jnp.maximum(w, 1))(y, b)),
            r"A masked mean: return .* Return the weight as it is: a guard",
        ),
    ],
)
@pytest.mark.sampled(4)
def test_a_loss_that_microbatches_change_is_warned_about(loss, words):
    for batch in (
        numbers(),
        jax.eval_shape(lambda: jax.tree.map(jnp.asarray, numbers())),
    ):
        with pytest.warns(UserWarning, match=words):
            pipeline(loss).init(KEY, batch)


@pytest.mark.first_case
@pytest.mark.parametrize(
    "loss",
    [
        lambda y, b: square(y, b).mean(),
        lambda y, b: (square(y, b) * b["mask"]).mean(),
        lambda y, b: errors(y, b).mean(),
        lambda y, b: ((errors(y, b) * b["mask"]).sum(), b["mask"].sum()),
        lambda y, b: (errors(y, b).sum(), len(b["labels"]) * 1.0),
        lambda y, b: square(y, b).mean().astype(jnp.bfloat16),
        lambda y, b: square(y, b).mean() * b["scale"][0],  # one number for all rows
    ],
)
def test_a_loss_that_microbatches_do_not_change_is_not_warned_about(loss):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        pipeline(loss).init(KEY, numbers())


def test_one_microbatch_changes_nothing_and_is_not_warned_about():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        pipeline(contrastive, jpipe.schedules.gpipe(1, 1)).init(KEY, numbers())


@pytest.mark.parametrize(
    "loss,words",
    [
        (lambda y, b: (square(y, b).sum(), (y > 0).sum()), "weight depends on the out"),
        (lambda y, b: (square(y, b), b["mask"]), "two scalars, got"),
        (lambda y, b: (square(y, b).mean(), {"a": y.mean()}), "has_aux=True"),
        (lambda y, b: square(y, b), "Take the mean of the losses of the rows"),
        (lambda y, b: (y > 0).sum(), "got dtype int32, which has no gradient"),
    ],
)
def test_what_cannot_be_trained_is_refused(loss, words):
    with pytest.raises(ValueError, match=words):
        pipeline(loss).init(KEY, numbers())


def test_a_weight_of_more_bits_than_its_sum():
    def loss(outputs, batch):
        return square(outputs, batch).sum(), batch["mask"].sum(dtype="float64")

    with jax.enable_x64(True):
        batch = numbers()
        pipe = pipeline(loss)
        state = pipe.init(KEY, batch)
        want = pipe.plain_loss(state)(pipe.get_params(state), batch)
        state, metrics = pipe.step(state, batch)
        assert np.isfinite(metrics["gradient_norm"])
        np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)


def test_a_minibatch_without_weight_changes_nothing():
    pipe = pipeline(lambda y, b: ((square(y, b) * b["mask"]).sum(), b["mask"].sum()))
    state = pipe.init(KEY, numbers())
    before = pipe.get_params(state)
    empty = numbers() | {"mask": np.zeros(8, np.float32)}
    state, metrics = pipe.step(state, empty)
    jax.tree.map(np.testing.assert_array_equal, pipe.get_params(state), before)
    assert np.isnan(metrics["loss"])
    np.testing.assert_array_equal(metrics["skipped_updates"], [1, 1])


# -- What layers report


class Balanced(nnx.Module):
    """A layer that reports how uneven its outputs are, and a penalty of its weights."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(6, 6, rngs=rngs)

    def __call__(self, x):
        y = self.linear(x)
        jpipe.report("uneven", jnp.square(y).mean())
        jpipe.report("weights", jnp.square(self.linear.kernel[...]).sum())
        return jnp.tanh(y)


def reporting_loss(outputs, batch, *, reported):
    penalty = 0.1 * reported["uneven"] + 0.01 * reported["weights"]
    return square(outputs, batch).mean() + penalty, {"uneven": reported["uneven"]}


def plain_reporting(params, batch):
    x, uneven, weights = batch["inputs"], 0.0, 0.0
    for p in params:
        y = x @ p["linear"]["kernel"] + p["linear"]["bias"][None]
        uneven += jnp.square(y).mean()
        weights += jnp.square(p["linear"]["kernel"]).sum()
        x = jnp.tanh(y)
    penalty = 0.1 * uneven + 0.01 * weights
    return square(x, batch).mean() + penalty, uneven


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.parametrize(
    "schedule,S,N,options",
    [
        ("gpipe", 3, 2, {}),
        ("one_f_one_b/unit", 2, 4, {"recompute": "full"}),
        ("zero_bubble_v", 4, 4, {}),
        ("one_f_one_b/paired", 2, 2, {"data": 2}),
        ("gpipe", 1, 2, {"recompute": jax.checkpoint_policies.dots_saveable}),
    ],
)
@pytest.mark.sampled(6)
def test_the_loss_sees_what_layers_report(schedule, S, N, options):
    table, options = schedule_named(schedule, S, N), dict(options)
    mesh = jpipe.make_mesh(stage=table.num_devices, data=options.pop("data", 1))
    pipe = pipeline(reporting_loss, table, [Balanced] * 4, has_aux=True, mesh=mesh, **options)
    batch = numbers(8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        state = pipe.init(KEY, batch)
    params = pipe.get_params(state)
    (loss, uneven), gradient = jax.value_and_grad(plain_reporting, has_aux=True)(params, batch)
    state, metrics = pipe.step(state, batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["aux"]["uneven"], uneven, rtol=1e-5)
    moved = jax.tree.map(lambda a, b: (b - a) / 0.1, pipe.get_params(state), params)
    assert_close(moved, jax.tree.map(np.asarray, gradient), "float32")
    outputs = pipe.predict(state, batch)
    assert outputs.shape == (8, 6)
    evaluated = pipe.evaluate(state, batch)
    np.testing.assert_allclose(evaluated["loss"], square(outputs, batch).mean(), rtol=1e-5)


def test_weights_are_reported_by_any_layer():
    def squares(parameters):
        return sum(jnp.sum(a**2) for a in jax.tree.leaves(parameters))

    layers = [
        jpipe.report_weights(functools.partial(nnx.Linear, 6, 6), "squares", squares),
        jnp.tanh,
        jpipe.report_weights(functools.partial(nnx.Linear, 6, 6), "squares", squares),
    ]
    pipe = pipeline(
        lambda y, b, *, reported: square(y, b).mean() + 0.1 * reported["squares"],
        jpipe.schedules.one_f_one_b(3, 3),
        layers,
    )
    batch = numbers(6)
    state = pipe.init(KEY, batch)
    params = pipe.get_params(state)

    def plain(params):
        y = jnp.tanh(batch["inputs"] @ params[0]["kernel"] + params[0]["bias"][None])
        y = y @ params[2]["kernel"] + params[2]["bias"][None]
        return square(y, batch).mean() + 0.1 * squares(params)

    loss, gradient = jax.value_and_grad(plain)(params)
    state, metrics = pipe.step(state, batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    moved = jax.tree.map(lambda a, b: (b - a) / 0.1, pipe.get_params(state), params)
    assert_close(moved, jax.tree.map(np.asarray, gradient), "float32")


def test_a_report_that_the_loss_does_not_ask_for_is_dropped():
    pipe = pipeline(lambda y, b: square(y, b).mean(), layers=[Balanced] * 2)
    state, metrics = pipe.step(pipe.init(KEY, numbers()), numbers())
    assert np.isfinite(metrics["loss"])


@pytest.mark.parametrize("value", [jnp.ones(3), jnp.int32(1), None])
def test_a_report_is_a_floating_point_scalar(value):
    with pytest.raises((ValueError, TypeError), match="scalar|not a valid|Value None"):
        jpipe.report("name", value)


def test_the_loss_draws_by_a_key_of_its_own():
    """Every microbatch of every step has another key, the same at any number of stages."""

    def noisy(outputs, batch, *, key):
        noise = jax.random.normal(key, outputs.shape)
        return square(outputs + noise, batch).mean(), {"noise": noise.mean()}

    drawn = []
    for S in (1, 2):
        pipe = pipeline(noisy, jpipe.schedules.gpipe(S, 2), has_aux=True)
        state = pipe.init(KEY, numbers())
        noise = []
        for _ in range(2):
            state, metrics = pipe.step(state, numbers())
            noise.append(float(metrics["aux"]["noise"]))
        drawn.append(noise)
    np.testing.assert_allclose(drawn[0], drawn[1], rtol=1e-5)
    assert drawn[0][0] != drawn[0][1]
