"""Stages with copies: training is that of the plain model, or of the papers' definitions, and copies stay equal."""

import math
import re

import chex
import jax
import numpy as np
import optax
import oracles
import pytest
from families import COPIES_IN_TURN, FAMILIES, MODELS, B, cross_entropy, schedule_named
from helpers import assert_close, use_target, with_nan_buffers

import jpipe
from jpipe.lowering.lower import mixes_minibatches


def assert_copies_equal(state, table):
    """All copies of a stage hold the same bits."""
    groups = state.kept()
    lowered = state.program.engine.lowered
    compared = 0
    for s, copies in enumerate(lowered.copies):
        for (d, chunk), (other, other_chunk) in zip(copies, copies[1:]):
            for group in (
                "parameters",
                "read_parameters",
                "optimizer_state",
                "mutable_state",
            ):
                for a in jax.tree.leaves(groups[group]):
                    versions = a.shape[0] // table.num_devices
                    rows = np.asarray(a).reshape(table.num_devices, versions, *a.shape[1:])
                    if group in ("parameters", "read_parameters"):
                        left = rows[d, lowered.rows.chunk_rows(s, d, chunk)]
                        of_other = lowered.rows.chunk_rows(s, other, other_chunk)
                        right = rows[other, of_other]
                    else:
                        left, right = rows[d, chunk], rows[other, other_chunk]
                    assert left.tobytes() == right.tobytes()
                    compared += left.size
    assert compared


# family, schedule, S, N, recompute
SYNCHRONOUS = [
    ("mlp", "gpipe/3-1", 2, 6, "none"),
    ("mlp", "one_f_one_b/paired/2-3", 2, 7, "full"),
    ("mlp", "one_f_one_b/unit/2-1-1", 3, 5, "none"),
    ("mlp", "one_f_one_b/unit/1-3", 2, 6, "full"),
    ("transformer", "gpipe/1-2", 2, 3, "none"),
    ("transformer", "one_f_one_b/unit/2-2", 2, 4, "none"),
    ("resnet", "one_f_one_b/paired/3-1", 2, 3, "none"),
    ("resnet", "gpipe/2-1-2", 3, 4, "full"),
]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.parametrize("family,schedule,S,N,recompute", SYNCHRONOUS)
@pytest.mark.sampled(12)
def test_synchronous_tables_equal_the_plain_model(family, schedule, S, N, recompute):
    with jax.enable_x64(True):
        family = FAMILIES[family].in_dtype("float64")
        table = schedule_named(schedule, S, N)
        plain = oracles.PlainModel(family.layers, jax.random.key(7))
        batches = family.batches(3, 2 * N, "float64")
        optimizer = optax.chain(jpipe.optim.clip_by_global_norm(0.5), optax.sgd(1.0, momentum=0.5))
        pipe = jpipe.Pipeline(
            family.layers,
            loss=cross_entropy,
            optimizer=optimizer,
            schedule=table,
            recompute=recompute,
        )
        state = pipe.init(jax.random.key(7), batches[0], params=plain.params)
        losses, gradients, params = oracles.train(
            plain,
            plain.params,
            cross_entropy,
            optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1.0, momentum=0.5)),
            batches,
        )
        for batch, loss, gradient in zip(batches, losses, gradients):
            state, metrics = pipe.step(with_nan_buffers(state), batch)
            assert_close(metrics["loss"], np.asarray(loss), "float64")
            norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(gradient)))
            np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-9)
            assert int(metrics["num_microbatches"]) == N
        assert_close(pipe.get_params(state), params, "float64")
        assert_copies_equal(state, table)
        assert metrics["skipped_updates"].tolist() == [0] * S

        inputs = batches[0]["inputs"][: 2 * N - 1]  # not a multiple of N
        outputs = pipe.predict(state, {"inputs": inputs})
        assert_close(outputs, np.asarray(plain(params, inputs)), "float64")


ASYNCHRONOUS = [
    ("pipedream", (3, 1), 3, "unit", "none"),
    ("pipemare", (2, 1), 2, "unit", "corrected"),
    ("pipedream", (2, 1, 1), 3, "unit", "none"),
    ("pipedream", (2, 1), 5, "paired", "full"),
    ("pipemare", (1, 2), 3, "unit", "none"),
    ("pipemare", (2, 3), 7, "paired", "full"),
    ("pipedream_2bw", (3, 1), 7, "paired", "none"),
    ("pipedream_2bw", (2, 1, 2), 6, "unit", "none"),
]
ROUNDS = 9


@pytest.mark.exhaustive
@pytest.mark.parametrize("name,replicas,N,ticks,recompute", ASYNCHRONOUS, ids=str)
@pytest.mark.sampled(8)
def test_asynchronous_tables_equal_the_definition(name, replicas, N, ticks, recompute):
    with jax.enable_x64(True):
        family, S = FAMILIES["mlp"].in_dtype("float64"), len(replicas)
        plain = oracles.PlainModel(family.layers, jax.random.key(1))
        microbatches = family.batches(ROUNDS * N, 2, "float64")
        batches = oracles.minibatches(microbatches, N)
        optimizer = optax.sgd(0.05, momentum=0.9)
        corrections, chain, hooks = {}, optimizer, {}
        if recompute == "corrected":  # PipeMare's T1 and T2, and a prediction
            corrections = dict(annealing_steps=15, decay=0.3, predicts=True)
            chain = optax.chain(
                optimizer,
                jpipe.optim.scale_by_delay(15),
                jpipe.optim.correct_discrepancy(0.3),
                jpipe.optim.predict_weights(),
            )
            hooks["backward_params"] = jpipe.optim.corrected_params
            hooks["forward_params"] = jpipe.optim.predicted_params
            recompute = "none"
        build = getattr(jpipe.schedules, name)
        table = build(S, N, ticks=ticks, replicas=replicas)
        pipe = jpipe.Pipeline(
            family.layers,
            loss=cross_entropy,
            optimizer=chain,
            schedule=table,
            recompute=recompute,
            **hooks,
        )
        stage_of_layer = oracles.stages_of_layers(pipe.partition(batches[0]))
        delay = oracles.delay_with_copies(replicas, N, ticks)
        if name == "pipedream_2bw":
            delay = lambda s, j: 1  # noqa: E731
        backward = (lambda s, j: 0) if name == "pipemare" else delay
        losses, params = oracles.train_with_delays(
            plain,
            stage_of_layer,
            plain.params,
            cross_entropy,
            optimizer,
            microbatches,
            N,
            delay,
            backward,
            recompute=recompute == "full",
            **corrections,
        )
        state = pipe.init(jax.random.key(0), batches[0], params=plain.params)
        state = with_nan_buffers(state, all_but="squared_norm")
        sums = []
        for batch in batches:
            state, metrics = pipe.step(state, batch)
            sums.append(np.nan_to_num(metrics["loss"]) * metrics["num_microbatches"])
            assert_copies_equal(state, table)
        state, metrics = pipe.flush(state)
        sums.append(np.nan_to_num(metrics["loss"]) * metrics["num_microbatches"])
        np.testing.assert_allclose(sum(sums), sum(losses), rtol=1e-9)
        assert_close(pipe.get_params(state), params, "float64")
        assert_copies_equal(state, table)


# -- What copies share -----------------------------------------------------------------


def trained(model, batches, table, loss, **options):
    """States and metrics of every step of a model with Adam."""
    defaults = dict(optimizer=optax.adam(1e-2), boundaries=None)
    pipe = jpipe.Pipeline(
        model.layers() if hasattr(model, "layers") else model,
        loss=loss,
        schedule=table,
        **defaults | options,
    )
    state = pipe.init(jax.random.key(0), batches[0])
    metrics = []
    for batch in batches:
        state, of_step = pipe.step(state, batch)
        metrics.append(of_step)
    return pipe, state, metrics


def image_batches(count, N):
    rng = np.random.default_rng(0)
    return [
        {
            "inputs": rng.normal(size=(2 * N, 8, 8, 1)).astype(np.float32),
            "labels": rng.integers(0, 3, 2 * N, dtype=np.int32),
        }
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    "schedule,asynchronous",
    [("gpipe", False), ("one_f_one_b/unit", False), ("pipedream/paired", True)],
)
@pytest.mark.sampled(3)
@pytest.mark.exhaustive
def test_batch_norm_moves_once_for_all_copies(schedule, asynchronous):
    """As without copies: from the statistics of all microbatches of a minibatch."""
    model, _ = MODELS["vgg"]
    N, batches = 4, image_batches(2, 4)
    loss = cross_entropy
    table = schedule_named(f"{schedule}/2-1", 2, N)
    pipe, state, metrics = trained(model, batches, table, loss)
    state, _ = pipe.flush(state)
    assert_copies_equal(state, table)
    # Without copies and delays; an asynchronous table is compared after its first minibatch, which none is late for.
    want_table = jpipe.schedules.gpipe(2, N)
    if asynchronous:
        pipe, state, metrics = trained(model, batches[:1], table, loss)
        state, _ = pipe.flush(state)
        batches = batches[:1]
    plain_pipe, plain_state, plain = trained(model, batches, want_table, loss)
    assert_close(
        pipe.get_mutable_state(state),
        plain_pipe.get_mutable_state(plain_state),
        "float32",
    )
    if not asynchronous:
        for a, b in zip(metrics, plain):
            np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.exhaustive
def test_dropout_and_tied_weights_are_those_without_copies():
    model, inputs = MODELS["tied transformer"]
    rng = np.random.default_rng(0)
    batches = [{"inputs": inputs(rng), "labels": inputs(rng)} for _ in range(3)]
    loss = cross_entropy
    tables = [
        jpipe.schedules.gpipe(3, B),
        jpipe.schedules.gpipe(3, B, replicas=(2, 1, 2)),
    ]
    runs = [trained(model, batches, table, loss) for table in tables]
    for a, b in zip(runs[0][2], runs[1][2]):
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-5)
        np.testing.assert_allclose(a["gradient_norm"], b["gradient_norm"], rtol=1e-5)
    assert_copies_equal(runs[1][1], tables[1])
    got, want = (pipe.get_params(state) for pipe, state, _ in runs)
    # Adam divides by the root of small second moments.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), got, want)


@pytest.mark.exhaustive
@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.parametrize("schedule", ["gpipe/3-1", "pipedream/unit/3-1"])
def test_a_gradient_that_is_not_finite_on_one_copy_is_skipped_on_all(schedule):
    table = schedule_named(schedule, 2, 3)
    family = FAMILIES["mlp"]
    batches = family.batches(4, 6)
    batches[1]["inputs"][2] = np.inf  # microbatch 1, on copy 1
    scale = 2.0**10 if not table.synchronous else jpipe.LossScale(2.0**10, 100)
    pipe = jpipe.Pipeline(
        family.layers,
        loss=cross_entropy,
        optimizer=optax.adam(1e-2),
        schedule=table,
        loss_scale=scale,
    )
    state = pipe.init(jax.random.key(0), batches[0])
    skipped = np.zeros(2, int)
    for batch in batches:
        state, metrics = pipe.step(state, batch)
        skipped += np.asarray(metrics["skipped_updates"])
    state, metrics = pipe.flush(state)
    skipped += np.asarray(metrics["skipped_updates"])
    assert skipped.tolist() == [1, 1]
    assert_copies_equal(state, table)
    chex.assert_tree_all_finite(pipe.get_params(state))
    if table.synchronous:
        assert float(metrics["loss_scale"]) == 2.0**9


@pytest.mark.exhaustive
def test_copies_and_replicas_of_the_pipeline():
    """A mesh of two replicas, each with stages of two copies and one."""
    family, N = FAMILIES["mlp"], 4
    plain = oracles.PlainModel(family.layers, jax.random.key(7))
    batches = family.batches(2, 4 * N)
    table = jpipe.schedules.one_f_one_b(2, N, replicas=(2, 1))
    for overlap in (False, True):
        pipe = jpipe.Pipeline(
            family.layers,
            loss=cross_entropy,
            optimizer=optax.sgd(0.5),
            schedule=table,
            mesh=jpipe.make_mesh(stage=3, data=2),
            overlap=overlap,
        )
        state = pipe.init(jax.random.key(7), batches[0], params=plain.params)
        losses, _, params = oracles.train(plain, plain.params, cross_entropy, optax.sgd(0.5), batches)
        for batch, loss in zip(batches, losses):
            state, metrics = pipe.step(state, batch)
            np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
        assert_close(pipe.get_params(state), params, "float32")
        assert_copies_equal(state, table)
        outputs = pipe.predict(state, batches[0])
        assert_close(outputs, np.asarray(plain(params, batches[0]["inputs"])), "float32")


def assert_trains_as(plain, pipe, batches):
    """The pipeline of `optax.sgd(0.5)` ends with the weights of the plain model, and equal copies."""
    state = pipe.init(jax.random.key(7), batches[0], params=plain.params)
    _, _, params = oracles.train(plain, plain.params, cross_entropy, optax.sgd(0.5), batches)
    for batch in batches:
        state, _ = pipe.step(with_nan_buffers(state), batch)
    assert_close(pipe.get_params(state), params, "float32")
    assert_copies_equal(state, pipe.schedule)


@pytest.mark.exhaustive
@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.parametrize("schedule", ["one_f_one_b/3-1", "pipemare/2-1-2"])
def test_copies_add_in_a_ring_as_on_tpus(schedule, monkeypatch):
    S = schedule.count("-") + 1
    table = schedule_named(schedule, S, 6)
    found, permutes = [], []
    for platform in ("cpu", "tpu"):
        use_target(monkeypatch, platform)
        family = FAMILIES["mlp"]
        pipe = jpipe.Pipeline(
            family.layers,
            loss=cross_entropy,
            optimizer=optax.adam(0.1, eps=1e-2),
            schedule=table,
        )
        batches = family.batches(3, 12)
        state = pipe.init(jax.random.key(7), batches[0])
        for batch in batches:
            state, metrics = pipe.step(state, batch)
        assert_copies_equal(state, table)
        found.append((np.asarray(metrics["loss"]), pipe.get_params(state)))
        permutes.append(pipe.compile(batches[0]).as_text().count(" collective-permute("))
    assert permutes[1] > permutes[0]
    assert_close(found[1][0], found[0][0], "float32")
    assert_close(found[1][1], found[0][1], "float32")


@pytest.mark.exhaustive
def test_copies_under_the_policy_of_gpus(monkeypatch):
    use_target(monkeypatch, "gpu")
    family, N = FAMILIES["mlp"], 4
    plain = oracles.PlainModel(family.layers, jax.random.key(7))
    batches = family.batches(2, 2 * N)
    table = jpipe.schedules.one_f_one_b(2, N, ticks="unit", replicas=(2, 1))
    pipe = jpipe.Pipeline(
        family.layers,
        loss=cross_entropy,
        optimizer=optax.sgd(0.5),
        schedule=table,
        overlap=True,
    )
    assert_trains_as(plain, pipe, batches)


@pytest.mark.exhaustive
def test_only_the_stages_own_gradients_travel_and_only_between_its_copies():
    """Read from the compiled program: one all-reduce for each stage with copies."""
    family, N = FAMILIES["mlp"], 6
    table = jpipe.schedules.gpipe(2, N, replicas=(3, 1))
    pipe = jpipe.Pipeline(
        family.layers,
        loss=cross_entropy,
        optimizer=optax.sgd(0.5),
        schedule=table,
        boundaries=[1],
    )
    batch = family.batches(1, 2 * N)[0]
    text = pipe.compile(batch).as_text()
    between_copies, elsewhere = 0, 0
    for shape, groups in re.findall(r"= (.*?) all-reduce\(.*replica_groups=(\S+)", text):
        dims = re.findall(r"\w+\[([\d,]*)\]", shape)
        size = sum(math.prod(int(n) for n in d.split(",") if n) for d in dims)
        if groups.startswith("{{0,1,2},{3}}"):
            between_copies += size
        else:
            elsewhere += size
    first, _ = pipe.partition(batch)
    assert between_copies == first.num_parameters
    assert elsewhere <= 8  # the loss and the like


@pytest.mark.exhaustive
def test_copies_at_different_positions_of_their_devices():
    family = FAMILIES["mlp"]
    table = jpipe.Schedule.from_text(COPIES_IN_TURN, name="in turn").check()
    plain = oracles.PlainModel(family.layers, jax.random.key(7))
    batches = family.batches(2, 4)
    pipe = jpipe.Pipeline(family.layers, loss=cross_entropy, optimizer=optax.sgd(0.5), schedule=table)
    assert_trains_as(plain, pipe, batches)


@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.exhaustive
def test_a_state_goes_from_copies_to_none_and_back(tmp_path):
    """By `adopt` and by checkpoints: the same training goes on."""
    family, N = FAMILIES["mlp"], 3
    batches = family.batches(4, 2 * N)

    def make(table):
        return jpipe.Pipeline(
            family.layers,
            loss=cross_entropy,
            optimizer=optax.adam(1e-2),
            schedule=table,
        )

    with_copies = make(jpipe.schedules.one_f_one_b(2, N, replicas=(3, 1)))
    without = make(jpipe.schedules.one_f_one_b(2, N))
    late = make(jpipe.schedules.pipedream(2, N, replicas=(1, 3)))
    state = with_copies.init(jax.random.key(0), batches[0])
    state, _ = with_copies.step(state, batches[0])
    params = with_copies.get_params(state)

    there = without.adopt(state)
    back = with_copies.adopt(there)
    assert_copies_equal(back, with_copies.schedule)
    jax.tree.map(np.testing.assert_array_equal, without.get_params(there), params)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)),
        back.kept(),
        state.kept(),
    )
    with jpipe.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        for pipe in (with_copies, without, late):
            restored = checkpoints.restore(pipe, batches[0]).state
            got = pipe.get_params(restored)
            jax.tree.map(np.testing.assert_array_equal, got, params)
            if pipe is not without:
                assert_copies_equal(restored, pipe.schedule)
            pipe.step(restored, batches[1])
    assert np.isfinite(with_copies.evaluate(with_copies.adopt(there), batches[0])["loss"])


@pytest.mark.exhaustive
def test_memory_counts_every_copy():
    family, N = FAMILIES["mlp"], 3
    batch = family.batches(1, 2 * N)[0]
    table = jpipe.schedules.gpipe(2, N, replicas=(2, 1))
    pipe = jpipe.Pipeline(family.layers, loss=cross_entropy, optimizer=optax.adam(1e-2), schedule=table)
    memory = pipe.memory(batch)
    stages = [record.parameter_bytes for record in pipe.partition(batch)]
    whole = memory.weights + memory.optimizer + memory.gradients
    used = (2 * stages[0] + stages[1]) / 3
    counts = 2 * 2 + 1  # Adam's counter of a stage, on each of its copies
    assert memory.padding == pytest.approx(whole - 4 * used - counts, abs=8)


def test_no_builder_mixes_minibatches_on_copies():
    """So mutable state can move once per minibatch."""
    for replicas in ((2, 3), (1, 2, 1), (3, 1)):
        for N in range(max(replicas), 9):
            for ticks in ("unit", "paired"):
                table = jpipe.schedules.pipemare(len(replicas), N, ticks, replicas)
                forward = table.by_stage(table.forward_ticks())
                assert (np.ptp(forward, axis=0) < table.num_ticks).all()
                assert not any(mixes_minibatches(table, s) for s in range(len(replicas)))


AHEAD = """
# Copy 0 runs the next minibatch forward before copy 1 runs this one.
0@0             0@1
F0@-1           .
B-2@-2          F-1@-1
.               B-1@-1
U0              U0
"""


def test_mutable_state_is_refused_where_a_copy_is_a_minibatch_ahead():
    model, _ = MODELS["vgg"]
    table = jpipe.Schedule.from_text(AHEAD, name="ahead").check()
    pipe = jpipe.Pipeline(model.layers(), loss=cross_entropy, optimizer=optax.sgd(0.1), schedule=table)
    message = "has mutable state, and schedule 'ahead' runs forwards of two minibatches"
    with pytest.raises(ValueError, match=message):
        pipe.init(jax.random.key(0), image_batches(1, 2)[0])
