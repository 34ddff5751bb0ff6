"""`jpipe.LocalSteps` beside asynchronous schedules: an outer step while microbatches are in flight."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from collectives import collectives
from families import FAMILIES, cross_entropy
from flax import nnx
from helpers import assert_close
from learners import DIM, KEY, LAYERS, LEARNERS, NESTEROV, LateLearners, Learners, check_resumed, loss, rows_of, subsets

import jpipe
from jpipe import schedules, vocabulary
from jpipe.reference import Reference
from jpipe.states import portable
from jpipe.states.locations import locations, owners, read

ROWS, ADAM = 2, optax.adam(0.05)
LOCAL_SGD = jpipe.LocalSteps(optax.sgd(1.0))


def batches(number, N, rows=ROWS):
    arrays = np.random.default_rng(0).standard_normal((number, 2, LEARNERS * N * rows, DIM)).astype("float32")
    return [{"inputs": x, "targets": y} for x, y in arrays]


def pipeline(schedule, local_steps=LOCAL_SGD, layers=LAYERS, optimizer=ADAM, **options):
    mesh = jpipe.make_mesh(stage=schedule.num_devices, data=LEARNERS)
    options = {"loss": loss, "optimizer": optimizer} | options
    return jpipe.Pipeline(layers, schedule=schedule, mesh=mesh, local_steps=local_steps, **options)


def walked(schedule, params):
    """For each learner the table, walked in plain Python with every weight version kept."""
    return [Reference(LAYERS, loss, ADAM, schedule, params=params) for _ in range(LEARNERS)]


def walk(references, weights, batch):
    """A step of all learners, whose newest weights are `weights`. Returns the losses and the newest weights."""
    losses, after = [], []
    for r, (reference, newest) in enumerate(zip(references, weights, strict=True)):
        for s, devices in enumerate(reference.schedule.copies):
            copy = s, devices[0]
            if reference.stages is None:
                reference.params = newest
                break
            number = max(version for other, version in reference.weights if other == copy)
            old = reference.weights[copy, number]
            reference.weights[copy, number] = [None if layer is None else newest[i] for i, layer in enumerate(old)]
        losses.append(reference.step(rows_of(batch, r)))
        after.append(reference.get_params())
    return losses, after


class Walked(Learners):
    def step(self, batch):
        losses, self.weights = walk(self.references, self.weights, batch)
        return losses


class WalkedLate(Walked, LateLearners):
    pass


def paired(builder, S, N, **options):
    return builder(S, N, ticks="paired", **options)


TABLES = [
    paired(schedules.pipemare, 4, 2),
    paired(schedules.pipedream, 4, 1),
    schedules.pipedream(2, 4, ticks="unit", update_every=(2, 1)),
    paired(schedules.pipedream, 4, 1, vertical_sync=True),
    schedules.pipedream_2bw(2, 4, ticks="unit"),
    schedules.pipemare(4, 1, ticks="unit"),
    schedules.emulated(paired(schedules.pipedream, 4, 2)),
]
CASES = [pytest.param(table, marks=pytest.mark.exhaustive if i > 1 else ()) for i, table in enumerate(TABLES)]


@pytest.mark.parametrize("schedule", CASES, ids=lambda table: f"{table.name}-{table.num_stages}")
def test_an_outer_step_changes_the_newest_weights_of_a_walked_table(schedule):
    """Older versions, which microbatches in flight read, stay as they are."""
    pipe = pipeline(schedule, jpipe.LocalSteps(NESTEROV, num_fragments=2))
    data = batches(9, schedule.num_microbatches)
    state = pipe.init(KEY, data[0])
    learners = Walked(jax.tree.map(jnp.asarray, pipe.get_params(state)), NESTEROV)
    learners.references = walked(schedule, pipe.get_params(state))
    for i, batch in enumerate(data):
        state, metrics = pipe.step(state, batch)
        losses = [np.nan if a is None else a for a in learners.step(batch)]
        np.testing.assert_allclose(metrics["loss"], losses, rtol=2e-5)
        if i % 3 == 2:
            state = pipe.outer_step(state)
            learners.outer_step()
            assert_close(pipe.get_params(state), learners.anchor, "float32")
    state, metrics = pipe.flush(state)
    assert metrics["loss"].shape == metrics["num_microbatches"].shape == (LEARNERS,)
    state, _ = pipe.step(state, data[0])
    assert np.isfinite(jax.tree.leaves(pipe.get_params(pipe.outer_step(state)))[0]).all()


@pytest.mark.parametrize(
    "schedule",
    [paired(schedules.pipemare, 4, 1), pytest.param(paired(schedules.pipedream, 2, 2), marks=pytest.mark.exhaustive)],
    ids=lambda table: table.name,
)
def test_late_averages_while_microbatches_are_in_flight(schedule):
    """Both meshes of AsyncMesh: stages with late weights, and learners with late means."""
    local_steps = jpipe.LocalSteps(optax.sgd(1.0), 3, jpipe.SparseAverage(2, 0.5, seed=3))
    masks = subsets(local_steps, schedule=lambda S, N: schedules.gpipe(S, N), S=schedule.num_stages)
    pipe, data = pipeline(schedule, local_steps), batches(14, schedule.num_microbatches)
    state = pipe.init(KEY, data[0])
    learners = WalkedLate(jax.tree.map(jnp.asarray, pipe.get_params(state)), local_steps, masks)
    learners.references = walked(schedule, pipe.get_params(state))
    for i, batch in enumerate(data):
        state, metrics = pipe.step(state, batch)
        losses = [np.nan if a is None else a for a in learners.step(batch)]
        np.testing.assert_allclose(metrics["loss"], losses, rtol=2e-5)
        # After Adam's first steps, all of one length, means of learners would be zeros but for rounding.
        if i >= 6:
            state = pipe.outer_step(state, i % 3)
            learners.outer_step(i % 3)
            assert_close(pipe.get_params(state), learners.anchor, "float32")


DELAYS, AHEAD, DECAY, ANNEALING = (3, 2, 0), (1, 2, 0), 0.3, 15
CORRECTED = optax.chain(
    optax.sgd(0.05, momentum=0.9),
    jpipe.optim.scale_by_delay(ANNEALING),
    jpipe.optim.correct_discrepancy(DECAY),
    jpipe.optim.predict_weights(),
)
HOOKS = {"forward_params": jpipe.optim.predicted_params, "backward_params": jpipe.optim.corrected_params}


def test_corrected_and_predicted_weights_follow_an_outer_step():
    """The definition of T1, T2 and weight prediction, with every version kept; learners side by side."""
    with jax.enable_x64(True):
        family = FAMILIES["mlp"].in_dtype("float64")
        plain = oracles.PlainModel(family.layers, jax.random.key(1))
        steps, starts = 15, (1, 2)
        microbatches = family.batches(steps * LEARNERS, 2, np.dtype("float64"))
        number = len(family.layers)
        stage_of_layer = [sum(i >= start for start in starts) for i in range(number)]
        generators = [
            oracles.steps_with_delays(
                plain, stage_of_layer, plain.params, cross_entropy, optax.sgd(0.05, momentum=0.9),
                microbatches[r::LEARNERS], 1, lambda s, j: DELAYS[s], lambda s, j: AHEAD[s],
                annealing_steps=ANNEALING, decay=DECAY, predicts=True,
            )
            for r in range(LEARNERS)
        ]  # fmt: skip
        outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
        pipe = pipeline(
            schedules.with_delays(DELAYS, backward_delays=AHEAD),
            jpipe.LocalSteps(outer),
            layers=family.layers,
            optimizer=CORRECTED,
            loss=cross_entropy,
            boundaries=starts,
            **HOOKS,
        )
        data = oracles.minibatches(microbatches, LEARNERS)
        state = pipe.init(KEY, data[0], params=plain.params)
        anchor, outer_state = plain.params, outer.init(plain.params)
        for i, batch in enumerate(data):
            state, metrics = pipe.step(state, batch)
            outputs = [next(generator) for generator in generators]
            np.testing.assert_allclose(metrics["loss"], [losses[-1] for losses, _ in outputs], rtol=1e-9)
            if i % 4 == 3:
                state = pipe.outer_step(state)
                newest = [[versions[s][-1][j] for j, s in enumerate(stage_of_layer)] for _, versions in outputs]
                moved = jax.tree.map(lambda a, *each: a - sum(each) / LEARNERS, anchor, *newest)
                updates, outer_state = outer.update(moved, outer_state, anchor)
                anchor = optax.apply_updates(anchor, updates)
                for _, versions in outputs:
                    for s in versions:
                        versions[s][-1] = [a if s == t else None for t, a in zip(stage_of_layer, anchor, strict=True)]
                assert_close(pipe.get_params(state), anchor, "float64")


def newest_rows(state, arrays):
    """The newest weights of each stage and unit in arrays that are packed like the weights."""
    return [
        arrays[block.array][part.in_array]
        for owner in owners(state.program, portable.num_rounds(state))
        for copies in owner.weights
        for block in (stored.location for stored in copies)
        for part in block.blocks
    ]


def check_hooks(pipe, data):
    """The weights that passes read are those that a fresh state computes of the newest weights and optimizer state."""
    state = pipe.init(KEY, data[0])
    for batch in data:
        state, _ = pipe.step(state, batch)
    before = newest_rows(state, state.parameters)
    state = pipe.outer_step(state)
    assert all((a != b).any() for a, b in zip(before, newest_rows(state, state.parameters), strict=True))
    leaves = read(state, locations(state.program, portable.num_rounds(state)))
    rebuilt = portable.from_portable(state.program, portable._with_position(state, leaves))
    differ = 0
    for name, arrays in state.read_parameters.items():
        here, there = newest_rows(state, arrays), newest_rows(rebuilt, rebuilt.read_parameters[name])
        assert_close(here, there, "float32")
        differ += sum((a != b).any() for a, b in zip(here, newest_rows(state, state.parameters), strict=True))
    assert differ


@pytest.mark.parametrize(
    ("schedule", "hooks"),
    [
        (paired(schedules.pipedream, 4, 1), {"forward_params": jpipe.optim.predicted_params}),
        pytest.param(paired(schedules.pipemare, 4, 1), HOOKS, marks=pytest.mark.exhaustive),
    ],
    ids=lambda case: "-".join(case) if isinstance(case, dict) else case.name,
)
def test_hooks_follow_while_microbatches_are_in_flight(schedule, hooks):
    """With several versions of the weights, and with the newest alone."""
    optimizer = CORRECTED if len(hooks) > 1 else optax.chain(optax.sgd(0.1), jpipe.optim.predict_weights())
    check_hooks(pipeline(schedule, optimizer=optimizer, **hooks), batches(12, 1))


WORDS = 6
ROWS_SPLIT = nnx.with_partitioning(nnx.initializers.normal(0.5), ("stage", None), eager_sharding=False)


class Embedding(nnx.Module):
    def __init__(self, rngs):
        self.token = nnx.Param(ROWS_SPLIT(rngs.params(), (WORDS, DIM)))

    def __call__(self, tokens):
        return vocabulary.lookup(self.token[...], tokens)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "schedule", [schedules.pipedream_2bw(2, 4), schedules.pipemare(2, 2, ticks="unit")], ids=lambda table: table.name
)
def test_hooks_follow_in_layers_that_all_stages_run(schedule):
    """A device has a part of an embedding."""
    optimizer = optax.chain(optax.sgd(0.1), jpipe.optim.predict_weights())
    pipe = pipeline(
        schedule,
        layers=[Embedding, *LAYERS],
        optimizer=optimizer,
        forward_params=jpipe.optim.predicted_params,
    )
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, WORDS, (5, 16), dtype=np.int32), rng.normal(size=(5, 16, DIM)).astype("float32")
    check_hooks(pipe, [{"inputs": x, "targets": y} for x, y in zip(tokens, targets, strict=True)])


@pytest.mark.parametrize("schedule", [paired(schedules.pipedream, 2, 2)], ids=lambda table: table.name)
def test_a_step_sends_nothing_between_learners(schedule):
    pipe, data = pipeline(schedule), batches(1, 2)
    text = pipe.lower(data[0]).compile().as_text()
    learner_of = {position: position // schedule.num_devices for position in range(pipe.mesh.size)}
    groups = [group for c in collectives(text) if c.groups for group in c.groups]
    assert all(len({learner_of[d] for d in group}) == 1 for group in groups)
    assert "source_target_pairs={{" in text


def test_a_checkpoint_has_microbatches_in_flight(tmp_path):
    """It goes on bit for bit, also with means in flight."""
    local_steps = jpipe.LocalSteps(optax.sgd(0.9, momentum=0.5), 3, jpipe.SparseAverage(delay=2))
    make = functools.partial(pipeline, paired(schedules.pipemare, 4, 1), local_steps, optimizer=CORRECTED, **HOOKS)
    pipe, data = make(), batches(9, 1)
    state = pipe.init(KEY, data[0])
    for batch in data[:5]:
        state = pipe.outer_step(pipe.step(state, batch)[0], 1)
    check_resumed(pipe, make(), state, data[5:], fragment=2, folder=tmp_path)


@pytest.mark.exhaustive
def test_synchronous_steps_before_asynchronous_ones():
    """T3: learners of GPipe, then those of PipeMare, and another layout at the end."""
    first, then = pipeline(schedules.gpipe(2, 2)), pipeline(paired(schedules.pipemare, 2, 2))
    data = batches(4, 2)
    state = first.outer_step(first.step(first.init(KEY, data[0]), data[0])[0])
    with pytest.warns(UserWarning, match="goes on with the weights of the last outer step"):
        state = then.adopt(state)
    for batch in data:
        state, _ = then.step(state, batch)
    state = then.outer_step(then.flush(state)[0])
    with pytest.warns(UserWarning, match="goes on with the weights of the last outer step"):
        back = first.adopt(state)
    assert_close(first.get_params(back), then.get_params(state), "float32")
