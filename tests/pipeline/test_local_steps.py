"""`jpipe.LocalSteps`: a plain loop of learners, the bytes between them, evaluation, checkpoints, adoption, refusals."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from collectives import collectives
from helpers import assert_close, refused
from learners import (
    DILOCO,
    DIM,
    INNER,
    KEY,
    LAYERS,
    LEARNERS,
    NESTEROV,
    LateLearners,
    Learners,
    N,
    batches,
    check_resumed,
    loss,
    pipeline,
    plain,
    rows_of,
    subsets,
)

import jpipe
from jpipe import schedules
from jpipe.engine import outer


def check_equal(pipe, state, data, learners, every=2):
    for i, batch in enumerate(data):
        state, metrics = pipe.step(state, batch)
        losses, norms = learners.step(batch)
        np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-5)
        np.testing.assert_allclose(metrics["gradient_norm"], norms, rtol=1e-5)
        if (i + 1) % every == 0:
            state = pipe.outer_step(state)
            learners.outer_step()
            assert_close(pipe.get_params(state), learners.anchor, "float32")
    return state


@pytest.mark.parametrize(
    ("schedule", "S", "optimizer"),
    [
        (schedules.one_f_one_b, 2, NESTEROV),
        pytest.param(schedules.gpipe, 2, optax.adam(0.1), marks=pytest.mark.exhaustive),
        pytest.param(schedules.zero_bubble_h1, 2, optax.sgd(1.0), marks=pytest.mark.exhaustive),
        pytest.param(schedules.interleaved, 4, NESTEROV, marks=pytest.mark.exhaustive),
        pytest.param(schedules.zero_bubble_v, 4, NESTEROV, marks=pytest.mark.exhaustive),
    ],
)
def test_it_trains_as_a_plain_loop_of_learners(schedule, S, optimizer):
    pipe, data = pipeline(jpipe.LocalSteps(optimizer), schedule, S), batches(5)
    state = pipe.init(KEY, data[0])
    learners = Learners(jax.tree.map(jnp.asarray, pipe.get_params(state)), optimizer)
    state = check_equal(pipe, state, data, learners)
    # In between, the weights are those of the last outer step, also in a prediction.
    assert_close(pipe.get_params(state), learners.anchor, "float32")
    np.testing.assert_allclose(pipe.evaluate(state, data[0])["loss"], plain(learners.anchor, data[0]), rtol=1e-5)


@pytest.mark.parametrize(
    ("schedule", "S", "optimizer", "fragments", "sparse"),
    [
        (schedules.one_f_one_b, 2, optax.sgd(1.0), 3, (2, 0.5)),
        pytest.param(schedules.gpipe, 2, optax.adam(0.1), 2, (1, None), marks=pytest.mark.exhaustive),
        pytest.param(schedules.zero_bubble_h1, 2, optax.sgd(1.0), 3, (0, 0.9), marks=pytest.mark.exhaustive),
        pytest.param(schedules.interleaved, 4, NESTEROV, 4, (4, 0.0), marks=pytest.mark.exhaustive),
        pytest.param(schedules.one_f_one_b, 2, optax.adam(0.1), 1, (1, 0.5), marks=pytest.mark.exhaustive),
    ],
)
def test_late_averages_of_subsets_are_those_of_a_plain_loop(schedule, S, optimizer, fragments, sparse):
    local_steps = jpipe.LocalSteps(optimizer, fragments, jpipe.SparseAverage(*sparse, seed=3))
    options = dict(schedule=schedule, S=S)
    masks = subsets(local_steps, **options)
    pipe, data = pipeline(local_steps, **options), batches(20)
    state = pipe.init(KEY, data[0])
    learners = LateLearners(jax.tree.map(jnp.asarray, pipe.get_params(state)), local_steps, masks)
    for i, batch in enumerate(data):
        state, metrics = pipe.step(state, batch)
        np.testing.assert_allclose(metrics["loss"], learners.step(batch)[0], rtol=1e-5)
        # After Adam's first step, all of one length, means of learners would be zeros but for rounding.
        number, apart = divmod(i, 2)
        if not apart:
            continue
        if number in (0, 6):
            state = pipe.outer_step(state)
            learners.together()
        else:
            state = pipe.outer_step(state, number % fragments)
            learners.outer_step(number % fragments)
        assert_close(pipe.get_params(state), learners.anchor, "float32")


def test_a_whole_average_at_once_is_local_sgd():
    """Bit for bit: no delay, no correction, one fragment."""
    ends = []
    for sparse in (None, jpipe.SparseAverage(delay=0, correction=None)):
        pipe, data = pipeline(jpipe.LocalSteps(optax.sgd(1.0), sparse=sparse)), batches(3)
        state = pipe.init(KEY, data[0])
        for batch in data:
            state, _ = pipe.step(state, batch)
            state = pipe.outer_step(state, 0)
        ends.append(pipe.get_params(state))
    jax.tree.map(np.testing.assert_array_equal, *ends)


@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (3, 0), (3, 2), (16, 16)])
def test_a_subset_alone_is_sent(fragments, delay):
    """Read in the compiled program: all-reduces of a P-th of each array, rounded up, over "data" and nothing else."""
    pipe = pipeline(jpipe.LocalSteps(optax.sgd(1.0), fragments, jpipe.SparseAverage(delay)))
    state = pipe.init(KEY, batches(1)[0])
    arrays = {name: dict(getattr(state, name)) for name in outer.FIELDS}
    read = {"counters": state.counters(), "optimizer_state": state.optimizer_state}
    sent = collectives(state.program._outer_step.lower(0, arrays, read).compile().as_text())
    assert {c.kind for c in sent} == {"all-reduce"}
    assert all(sorted(map(len, c.groups)) == [LEARNERS] * 2 for c in sent)
    # A device has two kernels and two biases.
    numbers = [-(-2 * size // fragments) for size in (DIM * DIM, DIM)]
    assert sorted(math.prod(s) for c in sent for s in c.shapes) == sorted(numbers)


LATE = jpipe.LocalSteps(optax.sgd(0.9, momentum=0.5), 3, jpipe.SparseAverage(delay=2))


def test_memory_has_means_in_flight():
    pipe, plain_pipe = pipeline(LATE), pipeline(jpipe.LocalSteps(LATE.outer, 3))
    data = batches(1)[0]
    late, at_once = (p.memory(data).optimizer for p in (pipe, plain_pipe))
    number, in_flight = 2 * (DIM * DIM + DIM), 2 * (11 + 3)
    # Moving averages; two means and what was sent for them; arrivals; fragments in flight and the number.
    assert late - at_once == 4 * (number + 2 * in_flight + 3 + 2 + 1)
    state = pipe.init(jax.random.key(0), data)
    held = sum(a.nbytes for a in jax.tree.leaves(state.outer_state)) // 4
    assert held == 4 * (2 * number + 2 * in_flight + 3 + 2 + 1)


@pytest.mark.parametrize("local_steps", [DILOCO, LATE])
def test_nothing_is_sent_between_learners_in_a_step(local_steps):
    """Read in the compiled program: every collective and every permute is within one learner."""
    pipe, data = pipeline(local_steps), batches(1)
    mesh = pipe.mesh  # devices are numbered along "data" first
    learner_of = {position: r for r, row in enumerate(np.arange(mesh.size).reshape(LEARNERS, -1)) for position in row}
    text = pipe.lower(data[0]).compile().as_text()
    groups = [group for c in collectives(text) if c.groups for group in c.groups]
    assert groups and all(len({learner_of[d] for d in group}) == 1 for group in groups)
    pairs = [line for line in text.splitlines() if "source_target_pairs" in line]
    sent = [tuple(map(int, pair.split(","))) for line in pairs for pair in _pairs(line)]
    assert sent and all(learner_of[a] == learner_of[b] for a, b in sent)


def _pairs(line):
    inside = line.partition("source_target_pairs={{")[2].partition("}}")[0]
    return inside.split("},{")


def test_fragments_come_together_one_at_a_time():
    """Each with the outer optimizer's count and momentum of its own; all of them are the whole."""
    adam = optax.adam(0.1)
    whole, parted = pipeline(jpipe.LocalSteps(adam)), pipeline(jpipe.LocalSteps(adam, num_fragments=3))
    data = batches(2)
    one, three = (pipe.init(KEY, data[0]) for pipe in (whole, parted))
    for batch in data:
        one, _ = whole.step(one, batch)
        three, _ = parted.step(three, batch)
        one = whole.outer_step(one)
        before, moved = parted.get_params(three), 0
        for k in (2, 0, 1):
            three = parted.outer_step(three, fragment=k)
            after = parted.get_params(three)
            pairs = list(zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
            number = sum((a != b).sum() for a, b in pairs)
            assert 0.2 < (number - moved) / sum(a.size for a, _ in pairs) < 0.5
            moved = number
        assert_close(parted.get_params(three), whole.get_params(one), "float32")
    other = parted.outer_step(three)  # all fragments in one call
    again = whole.outer_step(one)
    assert_close(parted.get_params(other), whole.get_params(again), "float32")


@pytest.mark.parametrize("local_steps", [DILOCO, LATE])
def test_a_checkpoint_goes_on_bit_for_bit(local_steps, tmp_path):
    """Also where means are in flight."""
    pipe, data = pipeline(local_steps), batches(7)
    state, last = pipe.init(KEY, data[0]), local_steps.num_fragments - 1
    for batch in data[:2]:
        state, _ = pipe.step(state, batch)
        state = pipe.outer_step(state, last)
    state, _ = pipe.step(state, data[2])  # learners are apart
    check_resumed(pipe, pipeline(local_steps), state, data[3:], fragment=0, folder=tmp_path)


def test_a_loss_of_whole_batches_sees_the_rows_of_a_learner():
    def contrastive(outputs, batch):
        scores = outputs @ batch["targets"].T
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(scores)))

    def forward(params, batch):
        x = batch["inputs"]
        for layer in params:
            x = x @ layer["kernel"] + layer["bias"][None]
        return contrastive(x, batch)

    options = dict(loss=jpipe.WholeBatchLoss(contrastive), optimizer=optax.sgd(0.1))
    pipe, data = pipeline(jpipe.LocalSteps(optax.sgd(1.0)), schedules.gpipe, **options), batches(3)
    state = pipe.init(KEY, data[0])
    learners = [pipe.get_params(state)] * LEARNERS
    for batch in data:
        state, metrics = pipe.step(state, batch)
        halves = [rows_of(batch, r) for r in range(LEARNERS)]
        steps = [jax.value_and_grad(forward)(params, rows) for params, rows in zip(learners, halves, strict=True)]
        np.testing.assert_allclose(metrics["loss"], [value for value, _ in steps], rtol=1e-5)
        learners = [
            jax.tree.map(lambda w, g: w - 0.1 * g, params, gradient)
            for params, (_, gradient) in zip(learners, steps, strict=True)
        ]
    state = pipe.outer_step(state)
    mean = jax.tree.map(lambda *each: sum(each) / LEARNERS, *learners)
    assert_close(pipe.get_params(state), mean, "float32")
    np.testing.assert_allclose(pipe.evaluate(state, data[0])["loss"], forward(mean, data[0]), rtol=1e-5)


def test_compressors_of_messages_report_for_each_learner():
    pipe, data = pipeline(schedule=schedules.gpipe, compress_messages=jpipe.compress.Threshold(0.25)), batches(2)
    state, metrics = pipe.step(pipe.init(KEY, data[0]), data[0])
    counts = metrics["compression"]
    assert {a.shape for a in counts.values()} == {(LEARNERS,)} and "message_density" in counts
    # A learner alone, with its rows, reports the same.
    alone = jpipe.Pipeline(
        LAYERS, loss=loss, optimizer=INNER, schedule=schedules.gpipe(2, N),
        compress_messages=jpipe.compress.Threshold(0.25),
    )  # fmt: skip
    for r in range(LEARNERS):
        rows = rows_of(data[0], r)
        _, want = alone.step(alone.init(KEY, rows), rows)
        assert_close({n: a[r] for n, a in counts.items()}, want["compression"], "float32")
    _, flushed = pipe.flush(state)
    assert flushed["compression"].keys() == counts.keys() and flushed["loss"].shape == (LEARNERS,)


def test_a_state_is_not_of_a_pipeline_with_other_late_averages():
    state = pipeline(LATE).init(KEY, batches(1)[0])
    pipeline(LATE).get_params(state)
    for sparse in (None, dataclasses.replace(LATE.sparse, seed=1), dataclasses.replace(LATE.sparse, delay=3)):
        with pytest.raises(ValueError, match="local_steps"):
            pipeline(dataclasses.replace(LATE, sparse=sparse)).get_params(state)


@pytest.mark.exhaustive
@pytest.mark.parametrize("local_steps", [DILOCO, LATE])
def test_adopted_by_a_pipeline_whose_replicas_agree_and_back(local_steps):
    pipe, other, data = pipeline(local_steps), pipeline(None, schedules.gpipe), batches(2)
    state, _ = pipe.step(pipe.init(KEY, data[0]), data[0])
    state = pipe.outer_step(state)
    with pytest.warns(UserWarning, match="goes on with the weights of the last outer step.*the first learner's"):
        adopted = other.adopt(state)
    assert_close(other.get_params(adopted), pipe.get_params(state), "float32")
    back = pipe.adopt(other.step(adopted, data[1])[0])
    back, _ = pipe.step(back, data[1])
    assert np.isfinite(jax.tree.leaves(pipe.get_params(pipe.outer_step(back)))[0]).all()


@pytest.mark.first_case
@pytest.mark.parametrize(
    "optimizer", [jpipe.optim.master_weights(INNER), optax.contrib.schedule_free(optax.sgd(0.1), 0.1)]
)
def test_an_optimizer_that_would_undo_an_outer_step(optimizer):
    pipe, batch = pipeline(optimizer=optimizer), batches(1)[0]
    with refused("`local_steps` needs an optimizer without weights in its state, and .* is a copy of weights"):
        pipe.partition(batch)
    averaged = optax.chain(INNER, jpipe.optim.ema_weights(0.9))  # begins with zeros
    pipeline(optimizer=averaged).partition(batch)


PARTS = "must work element by element, and its update has"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jpipe.LocalSteps(3), "`outer` must be an Optax transform"),
        (lambda: jpipe.LocalSteps(optax.chain(optax.clip_by_global_norm(1.0), NESTEROV)), f"{PARTS} `reduce_sum`"),
        (lambda: jpipe.LocalSteps(optax.contrib.muon(0.1)), PARTS),
        (
            lambda: jpipe.LocalSteps(NESTEROV, num_fragments=0),
            "`num_fragments` must be a whole number, at least 1, got 0",
        ),
        (lambda: jpipe.SparseAverage(delay=-1), r"`delay` must be a whole number, from 0 to 2\*\*31 - 1, got -1"),
        (lambda: jpipe.SparseAverage(delay=1.0), "`delay` must be a whole number.*got 1.0"),
        (lambda: jpipe.SparseAverage(seed=True), "`seed` must be a whole number.*got True"),
        (lambda: jpipe.SparseAverage(correction=1), r"`correction` is the decay .* must lie in \[0, 1\).* Got 1"),
        (lambda: jpipe.SparseAverage(correction="ema"), "None leaves the correction out. Got 'ema'"),
        (lambda: jpipe.SparseAverage(correction=float("nan")), "Got nan"),
        (
            lambda: jpipe.LocalSteps(NESTEROV, 2, jpipe.SparseAverage(3)),
            "`delay` must be at most `num_fragments`, got 3 and 2",
        ),
        (lambda: jpipe.LocalSteps(NESTEROV, 2, 0.05), "`sparse` must be a `jpipe.SparseAverage`, got 0.05"),
        (lambda: pipeline(LATE).outer_step(None, fragment=3), "`fragment` must be from 0 to 2, of `num_fragments=3`"),
        (lambda: pipeline(NESTEROV), "`local_steps` must be a `jpipe.LocalSteps`, got"),
        (lambda: pipeline(data=1), '`local_steps` is for replicas along the axis "data"'),
        (lambda: pipeline(shard_optimizer=True), "`local_steps` and `shard_optimizer` exclude each other"),
        (
            lambda: pipeline(compress_gradients=jpipe.compress.PowerSGD(1)),
            "`local_steps` and `compress_gradients` exclude each other",
        ),
        (lambda: pipeline(loss_scale=jpipe.LossScale()), "`local_steps` and `loss_scale` exclude each other"),
        (lambda: pipeline(None).outer_step(None), r"needs `Pipeline\(local_steps=jpipe.LocalSteps"),
        (
            lambda: pipeline().outer_step(None, fragment=1),
            "`fragment` must be from 0 to 0, of `num_fragments=1`, got 1",
        ),
    ],
)
def test_refusals(call, message):
    with refused(message):
        call()


def test_frozen_weights_stay_as_they_are():
    """They are in no outer step, which could round them: of three learners the mean of equal numbers may differ."""
    layers = [LAYERS[0], jpipe.InitApply(lambda key, x: {"w": jnp.eye(DIM), "scale": jnp.float32(0.1)}, _scaled)]
    schedule = schedules.gpipe(2, N)
    pipe = jpipe.Pipeline(
        layers,
        loss=loss,
        optimizer=optax.sgd(0.1),
        schedule=schedule,
        mesh=jpipe.make_mesh(stage=2, data=3),
        trainable=lambda path, value: "scale" not in path,
        local_steps=DILOCO,
    )
    rows = {name: a[: 3 * N] for name, a in batches(1)[0].items()}
    state = pipe.init(KEY, rows)
    before = pipe.get_params(state)
    for _ in range(2):
        state, _ = pipe.step(state, rows)
        state = pipe.outer_step(state)
    after = pipe.get_params(state)
    assert after[1]["scale"] == before[1]["scale"] and (after[1]["w"] != before[1]["w"]).any()


def _scaled(parameters, x):
    return parameters["scale"] * x @ parameters["w"]
