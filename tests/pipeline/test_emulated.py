"""An emulated table computes on one device what the table computes on many: step by step, and in all that a pipeline
does.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import FAMILIES, MODELS, cross_entropy, schedule_named, slow
from flax import nnx
from helpers import assert_close, refused, table_bytes

import jpipe
from jpipe.schedules import emulated, pipedream, pipemare, with_delays
from models import ResNet

ROUNDS = 20
KEY = jax.random.key(1)


class Mixed(nnx.Module):
    """A block with running statistics and random draws."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(6, 6, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.norm(self.linear(x))))


mixed = FAMILIES["mlp"].__class__([Mixed] * 5, (6,))
FAMILY = {**FAMILIES, "mixed": mixed}

T1_T2_CLIPPING = dict(
    optimizer=optax.chain(
        jpipe.optim.clip_by_global_norm(0.7),
        optax.sgd(0.05, momentum=0.9),
        jpipe.optim.scale_by_delay(15),
        jpipe.optim.correct_discrepancy(0.3),
    ),
    backward_params=jpipe.optim.corrected_params,
)
PREDICTION = dict(
    optimizer=optax.chain(optax.sgd(0.05, momentum=0.9), jpipe.optim.predict_weights()),
    forward_params=jpipe.optim.predicted_params,
)
CLIPPING = dict(optimizer=optax.chain(jpipe.optim.clip_by_global_norm(0.3), optax.sgd(0.2)))
# schedule, S, N, family, dtype, options of the pipeline
CASES = {
    "zb-v": ("zero_bubble_v", 4, 4, "mlp", "float32", CLIPPING),
    "gpipe": ("gpipe", 3, 4, "transformer", "float32", {}),
    "1f1b, recompute": ("one_f_one_b/paired", 4, 4, "mixed", "float32", dict(recompute="full")),
    # The bias before a norm has a gradient of zero but for rounding, and a stash has another layout on one device.
    "interleaved": ("interleaved", 4, 4, "resnet", "float64", {}),
    "loss scale": ("one_f_one_b/unit", 2, 3, "mlp", "float32", dict(loss_scale=jpipe.LossScale(initial=64.0, growth_interval=3))),
    "pipemare, deep": ("pipemare/paired", 5, 1, "mlp", "float32", T1_T2_CLIPPING),
    # A norm is a sum over devices there and over rows here, which rounds in another way.
    "pipemare": ("pipemare/unit", 4, 2, "mixed", "float64", T1_T2_CLIPPING),
    "pipedream": ("pipedream/unit", 3, 2, "mlp", "float32", PREDICTION),
    "pipedream, deep": ("pipedream/paired", 4, 1, "transformer", "float32", CLIPPING),
    "2bw": ("pipedream_2bw/paired", 4, 7, "mixed", "float32", {}),
    # Sums over copies have another order, and a large rate would make rounding grow from step to step.
    "copies": ("gpipe/3-1", 2, 6, "mixed", "float64", dict(optimizer=optax.sgd(0.02))),
    "copies, asynchronous": ("pipemare/unit/2-1-1", 3, 4, "mlp", "float64", T1_T2_CLIPPING),
    "lanes": ("two-columns", 4, 3, "mlp", "float32", {}),
}  # fmt: skip


def microbatch_losses(outputs, batch):
    """The loss, and the loss in the entry of its microbatch."""
    loss = cross_entropy(outputs, batch)
    return loss, batch["microbatch"][0] * loss


def trained(table, family, dtype, options, rounds=ROUNDS):
    """What every step of a run returns, and the weights after it."""
    N = table.num_microbatches
    pipe = jpipe.Pipeline(
        family.layers,
        loss=microbatch_losses,
        has_aux=True,
        schedule=table,
        **{"optimizer": optax.sgd(0.1, momentum=0.5), **options},
    )
    batches = family.batches(rounds, 3 * N, np.dtype(dtype))
    for batch in batches:
        batch["microbatch"] = np.repeat(np.eye(N, dtype=dtype), 3, axis=0)
    state = pipe.init(KEY, batches[0])
    weights, steps = [pipe.get_params(state)], []
    for batch in batches:
        state, metrics = pipe.step(state, batch)
        steps.append(jax.tree.map(np.asarray, metrics))
        weights.append(pipe.get_params(state))
    state, metrics = pipe.flush(state)
    steps.append(jax.tree.map(np.asarray, metrics))
    return pipe, state, weights, steps


def rounds_late(table):
    """For each microbatch the rounds from its arrival to its loss; for each stage the rounds to its update."""
    last = table.column_of_microbatch[:, -1]
    ticks = table.forward_ticks()[np.arange(table.num_microbatches), last]
    updates = table.update_ticks()[table.column_of_stage]
    return ticks // table.num_ticks, updates // table.num_ticks


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(15)
def test_every_step_is_that_of_the_pipeline(name):
    schedule, S, N, family, dtype, options = CASES[name]
    rtol = 1e-9 if dtype == "float64" else 1e-6
    with jax.enable_x64(dtype == "float64"):
        table = schedule_named(schedule, S, N)
        family = FAMILY[family].in_dtype(dtype)
        pipe, state, weights, steps = trained(table, family, dtype, options)
        one = trained(emulated(table), family, dtype, options)
        assert one[0].mesh.size == 1

        losses_late, updates_late = rounds_late(table)
        compared = 0
        for r, step in enumerate(steps[:ROUNDS]):
            for m, late in enumerate(losses_late.tolist()):
                if r < late:
                    continue
                of_pipeline = step["aux"][m] * step["num_microbatches"]
                expected = one[3][r - late]["aux"][m] * N
                np.testing.assert_allclose(of_pipeline, expected, rtol=rtol)
                compared += 1
        assert compared > ROUNDS * N // 2

        def close(got, want):
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                atol = rtol * max(np.abs(b).max(), 1e-30)
                np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)

        stage_of = [
            record.stage
            for record in pipe.partition(
                family.batches(1, 3 * N, np.dtype(dtype))[0] | {"microbatch": np.eye(N).repeat(3, 0)}
            )
            for _ in range(*record.layers)
        ]
        for r in range(ROUNDS + 1):
            for i, s in enumerate(stage_of):
                version = max(r - updates_late[s], 0)
                close(one[2][version][i], weights[r][i])
        close(one[0].get_params(one[1]), pipe.get_params(state))
        close(one[0].get_mutable_state(one[1]), pipe.get_mutable_state(state))
        norms, norms_of_one = (
            [step["gradient_norm"] for step in of if step["gradient_norm"] > 0]
            for of in (steps[:ROUNDS], one[3][:ROUNDS])
        )
        n = min(len(norms), len(norms_of_one))
        assert n > ROUNDS // 3
        np.testing.assert_allclose(norms_of_one[:n], norms[:n], rtol=10 * rtol)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["one_f_one_b/unit", slow("pipemare/unit")])
# fmt: skip
@pytest.mark.parametrize("model", ["tied transformer", slow("unet"), slow("resnet50"), slow("recurrent lm")])
def test_models_with_ties_skips_and_statistics(model, schedule):
    model, inputs = MODELS[model]
    if schedule.startswith("pipemare") and getattr(model, "tie_embeddings", False):
        pytest.skip("tied weights need a synchronous schedule")
    table, rng = schedule_named(schedule, 2, 2), np.random.default_rng(0)
    batches = [{"inputs": inputs(rng)} for _ in range(4)]
    found = []
    for schedule in (table, emulated(table)):
        pipe = jpipe.Pipeline(
            model.layers(),
            loss=lambda y, batch: jnp.mean(jax.tree.leaves(y)[0] ** 2),
            optimizer=optax.sgd(0.01, momentum=0.9),
            schedule=schedule,
            **(dict(ties=model.ties()) if hasattr(model, "ties") else {}),
        )
        state = pipe.init(KEY, batches[0])
        for batch in batches:
            state, _ = pipe.step(state, batch)
        state, _ = pipe.flush(state)
        found.append((pipe.get_params(state), pipe.get_mutable_state(state)))
    assert_close(found[1], found[0], "float32")


@pytest.mark.exhaustive
def test_skipped_updates_are_those_of_the_pipeline():
    """A gradient that is not finite makes every stage of the minibatch keep its weights."""
    table, family = pipemare(3, 2), FAMILIES["mlp"]

    def loss(outputs, batch):
        return cross_entropy(outputs, batch) * batch["factor"][0]

    found = []
    for schedule in (table, emulated(table)):
        pipe = jpipe.Pipeline(family.layers, loss=loss, optimizer=optax.sgd(0.1), schedule=schedule)
        skipped = np.zeros(3, int)
        for r, batch in enumerate(family.batches(8, 4)):
            batch["factor"] = np.full(4, np.inf if r == 2 else 1.0, np.float32)
            if r == 0:
                state = pipe.init(KEY, batch)
            state, metrics = pipe.step(state, batch)
            skipped += np.asarray(metrics["skipped_updates"])
        state, metrics = pipe.flush(state)
        found.append((skipped + np.asarray(metrics["skipped_updates"]), pipe.get_params(state)))
    assert found[0][0].tolist() == found[1][0].tolist() == [1, 1, 1]
    assert_close(found[1][1], found[0][1], "float32")


@pytest.mark.exhaustive
def test_replicas_along_data_stay():
    table, family = pipedream(2, 2), FAMILIES["mlp"]
    found = []
    for schedule, stages in ((table, 2), (emulated(table), 1)):
        pipe = jpipe.Pipeline(
            family.layers,
            loss=cross_entropy,
            optimizer=optax.adam(0.01),
            schedule=schedule,
            mesh=jpipe.make_mesh(stage=stages, data=2),
        )
        batches = family.batches(6, 8)
        state = pipe.init(KEY, batches[0])
        for batch in batches:
            state, _ = pipe.step(state, batch)
        found.append(pipe.get_params(pipe.flush(state)[0]))
    assert_close(found[1], found[0], "float32")


@pytest.mark.exhaustive
def test_states_go_from_one_to_the_other(tmp_path):
    """`adopt`, checkpoints, `predict` and `evaluate`; both go on alike."""
    table, family = pipemare(3, 2), FAMILIES["mlp"]
    make = functools.partial(jpipe.Pipeline, family.layers, loss=cross_entropy, **T1_T2_CLIPPING)
    real, one = make(schedule=table), make(schedule=emulated(table))
    batches = family.batches(12, 4)
    state = real.init(KEY, batches[0])
    for batch in batches[:4]:
        state, _ = real.step(state, batch)
    state, _ = real.flush(state)
    adopted = one.adopt(state)
    with jpipe.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, state)
    restored = jpipe.Checkpoints(tmp_path).restore(one, batches[0]).state
    assert_close(one.predict(adopted, batches[5]), real.predict(state, batches[5]), "float32")
    loss = float(real.evaluate(state, batches[6])["loss"])
    np.testing.assert_allclose(float(one.evaluate(restored, batches[6])["loss"]), loss, rtol=1e-6)
    for batch in batches[4:8]:
        state, _ = real.step(state, batch)
        adopted, _ = one.step(adopted, batch)
        restored, _ = one.step(restored, batch)
    state, _ = real.flush(state)
    assert_close(one.get_params(adopted), real.get_params(state), "float32")
    assert_close(one.get_params(restored), real.get_params(state), "float32")
    # Old versions would be lost.
    with refused("in flight|flush"):
        real.adopt(adopted)
    adopted, metrics = one.flush(adopted)
    assert np.isnan(float(metrics["loss"])) and int(metrics["num_microbatches"]) == 0
    back = real.adopt(adopted)
    for batch in batches[8:]:
        back, _ = real.step(back, batch)
        adopted, _ = one.step(adopted, batch)
    back, _ = real.flush(back)
    assert_close(one.get_params(adopted), real.get_params(back), "float32")


def test_given_delays_are_what_a_loop_that_keeps_every_version_computes():
    N, delays = 2, np.array([[3, 0, 1], [1, 2, 0]])
    weights = [np.random.default_rng(s).normal(size=(4, 4)).astype(np.float32) / 2 for s in range(3)]
    rng = np.random.default_rng(9)
    batches = [{name: rng.normal(size=(6, 4)).astype(np.float32) for name in ("inputs", "targets")} for _ in range(9)]

    def loss(y, batch):
        return jnp.mean((y - batch["targets"]) ** 2)

    def model(weights, batch):
        x = batch["inputs"]
        for w in weights:
            x = jnp.tanh(x @ w)
        return loss(x, batch)

    versions, rate = [weights], 0.2
    for k, batch in enumerate(batches):
        total = [np.zeros((4, 4), np.float32)] * 3
        for m in range(N):
            read = [versions[max(k - delays[m, s], 0)][s] for s in range(3)]
            rows = {name: a[3 * m : 3 * m + 3] for name, a in batch.items()}
            gradient = jax.grad(model)(read, rows)
            total = [a + np.asarray(g) / N for a, g in zip(total, gradient)]
        versions.append([w - rate * g for w, g in zip(versions[-1], total)])

    layer = jpipe.InitApply(lambda key, x: {"w": jnp.zeros((4, 4))}, lambda p, x: jnp.tanh(x @ p["w"]))
    pipe = jpipe.Pipeline(
        [layer] * 3,
        loss=loss,
        optimizer=optax.sgd(rate),
        schedule=with_delays(delays, N),
        boundaries=(1, 2),
    )
    state = pipe.init(KEY, batches[0], params=[{"w": w} for w in weights])
    for k, batch in enumerate(batches):
        state, _ = pipe.step(state, batch)
        assert_close(pipe.get_params(state), [{"w": w} for w in versions[k + 1]], "float32")


def lines(pipe, batch):
    return len(re.findall(r"stablehlo\.\w+|func\.call", pipe.lower(batch).as_text()))


@pytest.mark.exhaustive
def test_the_program_does_not_grow_with_the_stages():
    batch = {"inputs": np.ones((4, 8), np.float32)}

    def of(S):
        return jpipe.Pipeline(
            [functools.partial(nnx.Linear, 8, 8)] * S,
            loss=lambda y, batch: jnp.mean(y**2),
            optimizer=optax.adam(1e-3),
            schedule=emulated(pipemare(S, 2)),
        )

    assert lines(of(30), batch) == lines(of(10), batch)

    def prediction(pipe):
        program = pipe._program(batch)
        rows, arrays = program.prediction.rows_of(batch), program.abstract_state.arrays()
        lowered = program.prediction.compiled_predict.lower(arrays, batch, rows)
        return len(re.findall(r"stablehlo\.\w+|func\.call", lowered.as_text()))

    assert prediction(of(12)) == prediction(of(6))


def test_memory_is_that_of_the_versions_that_the_table_asks_for():
    S, N, numbers = 12, 2, 8 * 8 + 8
    batch = {"inputs": np.ones((4, 8), np.float32)}
    delays = np.arange(S)[::-1] // 3
    pipe = jpipe.Pipeline(
        [functools.partial(nnx.Linear, 8, 8)] * S,
        loss=lambda y, batch: jnp.mean(y**2),
        optimizer=optax.sgd(1e-3, momentum=0.9),
        schedule=with_delays(delays, N),
    )
    memory = pipe.memory(batch)
    assert memory.weights == 4 * numbers * (delays + 1).sum()
    assert memory.optimizer == memory.gradients == 4 * numbers * S
    assert memory.padding == 0
    of_state = memory.weights + memory.optimizer + memory.gradients + memory.activations
    compiled = pipe.compile(batch).memory_analysis()
    others = compiled.argument_size_in_bytes - of_state - memory.batch
    others -= table_bytes(pipe, batch)
    assert 0 <= others < 100  # the random key and the counters


@pytest.mark.exhaustive
@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer,copies", [(optax.sgd(1e-3, momentum=0.9), 1), (optax.adam(1e-3), 2)])
def test_stages_that_differ_take_what_they_need(optimizer, copies):
    """Convolutions, norms and a dense layer, one stage each: nothing is padded to the largest stage."""
    model = ResNet(
        num_channels=1,
        widths=(4, 8),
        num_blocks=(1, 1),
        block="bottleneck",
        norm="batch",
        fine_grained=True,
    )
    layers, rng = model.layers(), np.random.default_rng(0)
    batch = {
        "inputs": rng.normal(size=(4, 8, 8, 1)).astype(np.float32),
        "labels": rng.integers(0, 10, 4).astype(np.int32),
    }
    delays = np.arange(len(layers))[::-1] // 3
    pipe = jpipe.Pipeline(
        layers,
        loss=model.loss(),
        has_aux=True,
        optimizer=optimizer,
        schedule=with_delays(delays, 2),
    )
    state = pipe.init(KEY, batch)
    sizes = np.array([sum(a.size for a in jax.tree.leaves(p)) for p in pipe.get_params(state)])
    assert sizes.max() > 3 * sizes.mean()
    memory = pipe.memory(batch)
    assert memory.weights == 4 * (sizes * (delays + 1)).sum()
    assert memory.gradients == 4 * sizes.sum()
    counts = 4 * len(layers) * (copies == 2)  # of Adam, one for each stage
    assert memory.optimizer == 4 * copies * sizes.sum() + counts
    assert memory.padding == 0
    # A stash has the room of one microbatch of each stage.
    engine = state.program.engine
    stages, layout = engine.stages, engine.layout
    for ring in ("input_stash", "weight_stash"):
        places = [
            place
            for s in range(stages.num_stages)
            for _, run, _ in stages.layer_runs(s)
            for place in getattr(run, ring)
        ]
        if ring == "input_stash":
            places += stages.programs[stages.program_of_stage[-1]].loss_stash
        used = layout.leaf_bytes(places, getattr(stages, ring).arrays)
        held = layout["buffers"].shapes[ring].values()
        assert sum(a.size * a.dtype.itemsize for a in held) == used
        # The table does not split backwards, so it has one stash.
        assert (used > 0) == (ring == "input_stash")
    # Nothing else of the state is padded either.
    held = pipe.compile(batch).memory_analysis().argument_size_in_bytes
    of_state = memory.weights + memory.optimizer + memory.gradients + memory.activations
    moved = sum(a.nbytes for a in jax.tree.leaves(pipe.get_mutable_state(state)))
    held -= table_bytes(pipe, batch)
    assert 0 <= held - of_state - memory.batch - moved < 100


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: emulated(jpipe.schedules.forward_only(2, 2)), "only runs forward"),
        (lambda: emulated("pipemare"), "Call a builder"),
        (lambda: with_delays([1, -1]), "at least 0"),
        (lambda: with_delays([0.5]), "whole numbers"),
        (lambda: with_delays([[1, 2], [3, 4]], 3), r"\[3, stages\]"),
        (lambda: with_delays([1, 2], backward_delays=[2, 2]), "at most `delays`"),
        (lambda: with_delays([1, 2], backward_delays=[0]), "for each stage"),
        (lambda: jpipe.schedules.random_delays(2, 0, 3), "num_microbatches"),
        (lambda: jpipe.schedules.random_delays(2, 2, -1), "`most`"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with refused(message):
        call()


def test_random_delays_are_those_of_the_seed():
    draws = jpipe.schedules.random_delays(40, 5, most=3, seed=4)
    assert draws.shape == (5, 40) and set(draws.flat) == {0, 1, 2, 3}
    assert (draws == jpipe.schedules.random_delays(40, 5, most=3, seed=4)).all()
    assert (draws != jpipe.schedules.random_delays(40, 5, most=3, seed=5)).any()
    table = with_delays(draws, 5)
    assert (-table.forward_versions() == draws).all()
