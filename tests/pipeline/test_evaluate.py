"""Evaluation and auxiliary outputs: the loss on exactly the rows given, metrics averaged over microbatches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe

KEY = jax.random.key(0)
LAYERS = [functools.partial(nnx.Linear, 3, 3)] * 2


def weighted(outputs, batch):
    """A ratio of sums: no mean of parts gives the whole's."""
    errors = jnp.square(outputs - batch["targets"]).mean(axis=-1)
    weight = batch["weight"]
    aux = {
        "positive": outputs > 0,
        "largest": errors.max(),
        "rows": jnp.int32(len(weight)),
    }
    aux["positive"] = aux["positive"].mean()
    return (errors * weight).sum() / weight.sum(), aux


def batch_of(size):
    rng = np.random.default_rng(size)
    batch = {k: rng.normal(size=(size, 3)).astype(np.float32) for k in ("inputs", "targets")}
    return {**batch, "weight": rng.uniform(0.1, 1, size).astype(np.float32)}


def pipeline(schedule, R=1, loss=weighted, has_aux=True):
    return jpipe.Pipeline(
        LAYERS,
        loss=loss,
        optimizer=optax.sgd(0.1),
        schedule=schedule,
        mesh=jpipe.make_mesh(stage=schedule.num_devices, data=R),
        has_aux=has_aux,
    )


def plain(params, x):
    for p in params:
        x = x @ p["kernel"] + p["bias"]
    return x


@pytest.mark.parametrize("R", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_evaluate_is_the_loss_of_the_whole_batch(R):
    pipe = pipeline(jpipe.schedules.one_f_one_b(2, 3), R)
    state = pipe.init(KEY, batch_of(6 * R))
    params = pipe.get_params(state)
    for size in (1, 5, 6 * R, 13):
        batch = batch_of(size)
        got = pipe.evaluate(state, batch)
        loss, aux = weighted(plain(params, batch["inputs"]), batch)
        np.testing.assert_allclose(got["loss"], loss, rtol=1e-5)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), got["aux"], aux)
        assert got["aux"]["rows"] == size
    state, _ = pipe.step(state, batch_of(6 * R))  # the state is still there


@pytest.mark.first_case
@pytest.mark.parametrize("R", [1, 2])
def test_aux_is_the_mean_over_microbatches_and_replicas(R):
    N = 3
    pipe, batch = pipeline(jpipe.schedules.one_f_one_b(2, N), R), batch_of(4 * N * R)
    state = pipe.init(KEY, batch)
    params = pipe.get_params(state)
    _, metrics = pipe.step(state, batch)
    parts = [{k: a[i : i + 4] for k, a in batch.items()} for i in range(0, 4 * N * R, 4)]
    found = [weighted(plain(params, part["inputs"]), part) for part in parts]
    want = jax.tree.map(lambda *a: np.mean(a), *found)
    got = metrics["loss"], metrics["aux"]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), got, want)


@pytest.mark.exhaustive
def test_aux_while_an_asynchronous_schedule_fills_and_drains():
    pipe = pipeline(jpipe.schedules.pipedream(2, 1, ticks="paired"))
    batch = batch_of(4)
    state = pipe.init(KEY, batch)
    state, metrics = pipe.step(state, batch)
    assert int(metrics["num_microbatches"]) == 0 and np.isnan(metrics["loss"])
    assert all(np.isnan(a) for a in jax.tree.leaves(metrics["aux"]))
    state, metrics = pipe.step(state, batch)
    assert int(metrics["num_microbatches"]) == 1 and metrics["aux"]["rows"] == 4
    evaluated = pipe.evaluate(state, batch)  # in flight or not
    assert evaluated["aux"]["rows"] == 4
    state, metrics = pipe.flush(state)
    assert int(metrics["num_microbatches"]) > 0 and metrics["aux"]["rows"] == 4


@pytest.mark.exhaustive
def test_flushing_a_synchronous_schedule_has_the_same_metrics():
    pipe, batch = pipeline(jpipe.schedules.gpipe(2, 2)), batch_of(4)
    state, stepped = pipe.step(pipe.init(KEY, batch), batch)
    _, flushed = pipe.flush(state)
    means = flushed["loss"], *jax.tree.leaves(flushed["aux"])
    assert all(np.isnan(a) for a in means)
    kinds = [jax.tree.map(lambda a: (a.shape, a.dtype), m) for m in (stepped, flushed)]
    assert kinds[0] == kinds[1]


WRONG = {
    "pair without has_aux": (weighted, False, "set `has_aux=True`"),
    "scalar with has_aux": (
        lambda y, batch: y.mean(),
        True,
        r"must return `\(loss, aux\)` with `has_aux=True`, got float32\[\]",
    ),
    "aux of keys": (
        lambda y, batch: (y.mean(), {"key": jax.random.key(0)}),
        True,
        r"returns aux\['key'\] of dtype key<fry>, and only numbers",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_losses(name):
    loss, has_aux, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        pipe = pipeline(jpipe.schedules.gpipe(2, 2), loss=loss, has_aux=has_aux)
        pipe.init(KEY, batch_of(4))


def test_a_loss_that_cannot_take_the_batch_of_evaluate():
    pipe = pipeline(jpipe.schedules.gpipe(2, 2))
    state = pipe.init(KEY, batch_of(4))
    with pytest.raises(ValueError, match="`loss` cannot take outputs .*'targets'"):
        pipe.evaluate(state, {"inputs": batch_of(4)["inputs"]})


def test_an_empty_batch_is_refused():
    pipe = pipeline(jpipe.schedules.gpipe(2, 2))
    state = pipe.init(KEY, batch_of(4))
    with pytest.raises(ValueError, match="the batch is empty"):
        pipe.evaluate(state, batch_of(0))


class Dropped(nnx.Module):
    """Linear, batch norm and dropout: layers of other rates compute the same in evaluation, not in training."""

    def __init__(self, rate, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.norm.mean[...] = jax.random.normal(rngs.params(), 4)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


def pooled(x):  # [B, L, 4] -> [B, 4, 4]
    return x.reshape(x.shape[0], 4, -1, 4).mean(axis=2)


def dropped(rates):
    return [Dropped(rate / 10, nnx.Rngs(i)) for i, rate in enumerate(rates)]


LINEAR = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(10)]
OTHER_KINDS = {
    # Of the two programs of training, one has two runs with rows for the longest of each stage.
    "rates, in stages of other lengths": (dropped([1, 1, 2, 1, 2, 2]), [3], (4,)),
    "rates, in one stage": (dropped([1, 2, 2, 3]), [3], (4,)),
    # The first stage has the only layers of its kind at length 8, and at length 4 all are alike.
    "lengths": ([*LINEAR[:7], pooled, *LINEAR[7:]], [7, 9, 10], (8, 4)),
}


@pytest.mark.first_case
@pytest.mark.parametrize("name", OTHER_KINDS)
def test_layers_that_are_alike_in_evaluation_only(name):
    """Evaluation may loop over layers that training runs one by one, or the other way round. Weights and state lie
    where training has them."""
    layers, boundaries, lengths = OTHER_KINDS[name]
    pipe = jpipe.Pipeline(
        [jpipe.Function(layer) if layer is pooled else layer for layer in layers],
        loss=lambda outputs, batch: outputs.mean(),
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.gpipe(1 + len(boundaries), 4),
        boundaries=boundaries,
    )
    batches = [{"inputs": np.random.default_rng(0).normal(size=(8, n, 4)).astype(np.float32)} for n in lengths]
    state = pipe.init(KEY, batches[0])
    for batch in batches:
        x = jnp.asarray(batch["inputs"])
        for layer in layers:
            if layer is not pooled:
                layer.eval()
            x = layer(x)
        np.testing.assert_allclose(pipe.predict(state, batch), x, rtol=1e-5, atol=1e-5)


@pytest.mark.first_case
@pytest.mark.parametrize("seed", range(8))
def test_evaluation_reads_every_leaf_where_training_has_it(seed):
    rng = np.random.default_rng(seed)
    rates, S = rng.integers(1, 4, size=rng.integers(6, 14)), 4
    table = jpipe.schedules.interleaved(4, 4) if seed % 2 else jpipe.schedules.gpipe(4, 4)
    pipe = jpipe.Pipeline(
        dropped(rates),
        loss=lambda outputs, batch: outputs.mean(),
        optimizer=optax.sgd(0.1),
        schedule=table,
        boundaries=sorted(rng.choice(np.arange(1, len(rates)), S - 1, replace=False)),
    )
    batch = {"inputs": np.zeros((8, 4), np.float32)}
    program = pipe._program(batch)
    evaluation = program.prediction._forward_engine(program.microbatch).stages
    for name in ("parameters", "state"):
        assert getattr(evaluation, name).arrays == getattr(program.stages, name).arrays
        for s in range(S):
            there, here = program.stages.layer_runs(s), evaluation.layer_runs(s)
            for (i, trained, trained_row), (j, run, row) in zip(there, here, strict=True):
                assert i == j
                for a, b in zip(getattr(trained, name), getattr(run, name), strict=True):
                    assert (a.array, a.start(trained_row), a.block) == (b.array, b.start(row), b.block)
