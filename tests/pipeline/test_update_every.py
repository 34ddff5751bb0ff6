"""Stages with update rhythms of their own: training is that of a plain loop which keeps every weight version."""

import functools
import math

import jax
import numpy as np
import optax
import oracles
import pytest
from families import FAMILIES, cross_entropy
from helpers import assert_close, use_target, with_nan_buffers

import jpipe
from jpipe.reference import Reference
from jpipe.schedules import emulated, pipedream

# update_every, replicas, N
CASES = [
    ((3, 1), (3, 1), 3),
    ((3, 1), (3, 1), 6),
    ((2, 1, 1), (2, 1, 1), 4),
    ((1, 2), (1, 2), 2),
    ((2, 3), (2, 3), 6),
    ((4, 2, 1), (1, 1, 1), 4),
    ((1, 3, 2), (1, 1, 1), 6),
    ((4, 2, 2), (2, 2, 1), 4),
    ((2, 2), (1, 1), 4),
]
ROUNDS = 7


def rated():
    """An optimizer with momentum, whose rate falls with the updates of its stage."""
    return optax.sgd(optax.exponential_decay(0.2, 4, 0.5, staircase=True), momentum=0.9)


def setup(every, replicas, N, rounds=ROUNDS):
    family = FAMILIES["mlp"].in_dtype("float64")
    plain = oracles.PlainModel(family.layers, jax.random.key(1))
    microbatches = family.batches(rounds * N, 2, "float64")
    table = pipedream(len(every), N, replicas=replicas, update_every=every)
    return family, plain, microbatches, oracles.minibatches(microbatches, N), table


def of_layers(pipe, batch):
    return oracles.stages_of_layers(pipe.partition(batch))


@pytest.mark.first_case
@pytest.mark.parametrize("every,replicas,N", CASES, ids=str)
@pytest.mark.sampled(3, others="exhaustive")
def test_equals_a_plain_loop(every, replicas, N):
    with jax.enable_x64(True):
        family, plain, microbatches, batches, table = setup(every, replicas, N)
        pipe = jpipe.Pipeline(family.layers, loss=cross_entropy, optimizer=rated(), schedule=table)
        state = pipe.init(jax.random.key(0), batches[0], params=plain.params)
        losses, params = oracles.train_by_rhythm(
            plain,
            of_layers(pipe, batches[0]),
            plain.params,
            cross_entropy,
            [rated() for _ in every],
            microbatches,
            every,
            replicas,
        )
        state = with_nan_buffers(state, all_but="squared_norm")
        sums = []
        for batch in batches:
            state, metrics = pipe.step(state, batch)
            sums.append(np.nan_to_num(metrics["loss"]) * metrics["num_microbatches"])
        state, metrics = pipe.flush(state)
        sums.append(np.nan_to_num(metrics["loss"]) * metrics["num_microbatches"])
        np.testing.assert_allclose(sum(sums), sum(losses), rtol=1e-9)
        assert_close(pipe.get_params(state), params, "float64")
        assert metrics["skipped_updates"].tolist() == [0] * len(every)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        dict(shard_optimizer=True),
        dict(mesh="data"),
        dict(offload=jpipe.Offload(optimizer=1.0)),
        dict(recompute="full", overlap=True),
        dict(loss_scale=8.0),
        dict(platform="gpu"),
        dict(platform="tpu", shard_optimizer=True),
    ],
    ids=lambda options: " ".join(options),
)
@pytest.mark.sampled(3, others="exhaustive")
def test_options_change_no_number(options, monkeypatch):
    """Shares of replicas, replicas along "data", host memory, recomputation, a loss scale, the form for GPUs."""
    every, N = (3, 1), 3
    with jax.enable_x64(True):
        family, plain, _, batches, table = setup(every, every, N, rounds=4)
        params = []
        for of_pipeline in ({}, options):
            of_pipeline = dict(of_pipeline)
            if platform := of_pipeline.pop("platform", None):
                use_target(monkeypatch, platform)
            given = batches
            if "mesh" in of_pipeline:
                of_pipeline["mesh"] = jpipe.make_mesh(stage=4, data=2)
                # Each replica has neighbouring rows of a minibatch: here one of the two of every microbatch.
                apart = functools.partial(jax.tree.map, lambda a: np.concatenate([a[::2], a[1::2]]))
                given = list(map(apart, batches))
            pipe = jpipe.Pipeline(family.layers, loss=cross_entropy, optimizer=rated(), schedule=table, **of_pipeline)
            state = pipe.init(jax.random.key(0), batches[0], params=plain.params)
            for batch in given:
                state, _ = pipe.step(state, batch)
            params.append(pipe.get_params(pipe.flush(state)[0]))
        assert_close(params[1], params[0], "float64")


@pytest.mark.first_case
@pytest.mark.parametrize("every,replicas,N", CASES[::3], ids=str)
def test_the_reference_and_the_emulation_equal_the_pipeline(every, replicas, N):
    with jax.enable_x64(True):
        family, plain, _, batches, table = setup(every, replicas, N, rounds=4)
        params = []
        for schedule in (table, emulated(table)):
            pipe = jpipe.Pipeline(family.layers, loss=cross_entropy, optimizer=rated(), schedule=schedule)
            state = pipe.init(jax.random.key(0), batches[0], params=plain.params)
            for batch in batches:
                state, _ = pipe.step(state, batch)
            params.append(pipe.get_params(pipe.flush(state)[0]))
        assert_close(params[1], params[0], "float64")
        # The reference has no flush: it is compared with a pipeline that has updates in flight.
        reference = Reference(family.layers, cross_entropy, rated(), table, params=plain.params)
        pipe = jpipe.Pipeline(family.layers, loss=cross_entropy, optimizer=rated(), schedule=table)
        state = pipe.init(jax.random.key(0), batches[0], params=plain.params)
        for batch in batches:
            state, _ = pipe.step(state, batch)
            reference.step(batch)
        assert_close(reference.get_params(), pipe.get_params(state), "float64")


@pytest.mark.exhaustive
def test_a_loss_with_weights_is_divided_by_the_weight_of_the_minibatch():
    """The sum over the p microbatches of an update counts N / p times."""
    every, N = (4, 1), 4

    def weighted(outputs, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, batch["labels"])
        return (losses * batch["weights"]).sum(), batch["weights"].sum()

    with jax.enable_x64(True):
        family, plain, microbatches, _, table = setup(every, (1, 1), N)
        rng = np.random.default_rng(0)
        for k, batch in enumerate(microbatches):
            batch["weights"] = rng.integers(1, 5, 2).astype(float)
            if k % N == N - 1:
                whole = microbatches[k + 1 - N : k + 1]
                for one in whole:
                    total = sum(other["weights"].sum() for other in whole)
                    one["scale"] = np.full(2, N / total)
        batches = oracles.minibatches(microbatches, N)
        pipe = jpipe.Pipeline(family.layers, loss=weighted, optimizer=rated(), schedule=table)
        state = pipe.init(jax.random.key(0), batches[0], params=plain.params)
        _, params = oracles.train_by_rhythm(
            plain,
            of_layers(pipe, batches[0]),
            plain.params,
            lambda outputs, batch: weighted(outputs, batch)[0] * batch["scale"][0],
            [rated() for _ in every],
            microbatches,
            every,
            (1, 1),
        )
        for batch in batches:
            state, _ = pipe.step(state, batch)
        assert_close(pipe.get_params(pipe.flush(state)[0]), params, "float64")


@pytest.mark.parametrize("every,N", [((4, 2, 1), 4), ((1, 3, 2), 6), ((2, 4), 4)], ids=str)
@pytest.mark.sampled(3, others="exhaustive")
def test_clipping_counts_the_latest_gradients_of_all_stages(every, N):
    """The norm over all stages, in the time order of their updates."""
    with jax.enable_x64(True):
        ones = (1,) * len(every)
        family, plain, microbatches, batches, table = setup(every, ones, N)
        optimizer = optax.sgd(0.3, momentum=0.5)
        chain = optax.chain(jpipe.optim.clip_by_global_norm(0.5), optimizer)
        pipe = jpipe.Pipeline(family.layers, loss=cross_entropy, optimizer=chain, schedule=table)
        arguments = (
            plain,
            of_layers(pipe, batches[0]),
            plain.params,
            cross_entropy,
            [optimizer] * len(every),
            microbatches,
            every,
            ones,
        )
        _, params = oracles.train_by_rhythm(*arguments, max_norm=0.5)
        _, unclipped = oracles.train_by_rhythm(*arguments)
        state = pipe.init(jax.random.key(0), batches[0], params=plain.params)
        for batch in batches:
            state, _ = pipe.step(state, batch)
        assert_close(pipe.get_params(pipe.flush(state)[0]), params, "float64")
        first = functools.partial(jax.tree.map, lambda a, b: float(np.abs(a - b).max()))
        assert max(jax.tree.leaves(first(params, unclipped))) > 1e-3  # it clips


@pytest.mark.exhaustive
def test_optimizers_count_the_updates_of_their_stage():
    every, N = (3, 1), 3
    family, table = FAMILIES["mlp"], pipedream(2, N, replicas=every, update_every=every)
    pipe = jpipe.Pipeline(family.layers, loss=cross_entropy, optimizer=optax.adam(1e-2), schedule=table)
    batches = family.batches(3, 2 * N)
    state = pipe.init(jax.random.key(0), batches[0])
    for batch in batches:
        state, _ = pipe.step(state, batch)
    state, _ = pipe.flush(state)
    counts = {int(c) for name, c in _counts(pipe, state)}
    assert counts == {3, 9}


def _counts(pipe, state):
    """Path and value of every count in the optimizer's states of all stages."""
    from jpipe.states import portable

    leaves = portable.to_portable(state).leaves
    return [
        (jax.tree_util.keystr(path), value)
        for path, value in jax.tree_util.tree_leaves_with_path(leaves)
        if "count" in jax.tree_util.keystr(path)
    ]


@pytest.mark.exhaustive
def test_a_gradient_that_is_not_finite_skips_one_update():
    """A stage that updates after each microbatch loses one update, a stage that updates later all of its sum."""
    N = 4
    family = FAMILIES["mlp"]
    table = pipedream(2, N, update_every=(4, 1))
    pipe = jpipe.Pipeline(family.layers, loss=cross_entropy, optimizer=optax.sgd(0.1), schedule=table)
    batches = family.batches(3, 2 * N)
    broken = np.array(batches[1]["inputs"])
    broken[2:4] = np.inf  # microbatch 1
    batches[1] = {**batches[1], "inputs": broken}
    state = pipe.init(jax.random.key(0), batches[0])
    total = 0
    for batch in batches:
        state, metrics = pipe.step(state, batch)
        total += metrics["skipped_updates"]
    state, metrics = pipe.flush(state)
    assert (total + metrics["skipped_updates"]).tolist() == [1, 1]
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(pipe.get_params(state)))


@pytest.mark.exhaustive
def test_checkpoints_and_adopt_take_the_newest_weights(tmp_path):
    """A training goes on in a pipeline of another rhythm, and from a file in its own, to the last bit."""
    every, N = (3, 1), 6
    family = FAMILIES["mlp"]
    table = pipedream(2, N, replicas=every, update_every=every)
    batches = family.batches(5, 2 * N)

    def pipeline(schedule):
        return jpipe.Pipeline(family.layers, loss=cross_entropy, optimizer=optax.adam(1e-2), schedule=schedule)

    pipe = pipeline(table)
    state = pipe.init(jax.random.key(0), batches[0])
    for batch in batches[:3]:
        state, _ = pipe.step(state, batch)
    with jpipe.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state)
        checkpoints.wait()
        again = checkpoints.restore(pipe, batches[0]).state
    for batch in batches[3:]:
        state, _ = pipe.step(state, batch)
        again, _ = pipe.step(again, batch)
    state, again = pipe.flush(state)[0], pipe.flush(again)[0]
    jax.tree.map(np.testing.assert_array_equal, pipe.get_params(state), pipe.get_params(again))
    # After a flush all versions are equal, so another table goes on from the same weights.
    other = pipeline(pipedream(2, N))
    adopted = other.adopt(state)
    jax.tree.map(np.testing.assert_array_equal, other.get_params(adopted), pipe.get_params(state))
    adopted, _ = other.step(adopted, batches[0])
    back = pipe.adopt(other.flush(adopted)[0])
    assert np.isfinite(pipe.step(back, batches[1])[1]["gradient_norm"])


def test_what_is_refused():
    """Before anything compiles, with what, why and the remedy."""
    for message, arguments, options in [
        ("must have one number for each of the 2 stages", (2, 6), dict(update_every=(3,))),
        (r"divisors of `num_microbatches` \(4\), got 3 for stage 0", (2, 4), dict(update_every=(3, 1))),
        ("divisors of .* got 0 for stage 1", (2, 4), dict(update_every=(4, 0))),
        ("`vertical_sync` needs stages", (2, 6), dict(update_every=(3, 1), vertical_sync=True)),
        ("needs unit ticks, got `ticks` 'paired'", (2, 6, "paired"), dict(update_every=(3, 1), replicas=(3, 1))),
        (
            "multiples of the copies of a stage, got 2 for stage 0 with 3",
            (2, 6),
            dict(update_every=(2, 1), replicas=(3, 1)),
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            pipedream(*arguments, **options)
        assert jpipe.schedules.refusal("pipedream", *arguments[:2], **dict(zip(["ticks"], arguments[2:])), **options)
    with pytest.raises(ValueError, match="stages of the schedule 'pipedream' update several times"):
        jpipe.Pipeline(
            FAMILIES["mlp"].layers,
            loss=cross_entropy,
            optimizer=optax.sgd(0.1),
            schedule=pipedream(2, 4, update_every=(4, 1)),
            accumulate_gradients=jpipe.compress.StreamingPCA(1),
        )


@pytest.mark.parametrize("every,replicas,N", CASES, ids=str)
def test_delays_and_versions_follow_from_the_table(every, replicas, N):
    """By PipeDream's order of operations, without a table."""
    table = pipedream(len(every), N, replicas=replicas, update_every=every)
    warm = oracles.warm_up(replicas)
    for s, (p, r) in enumerate(zip(every, replicas)):
        done = [(m // r - warm[s]) * r // p for m in range(N)]
        want = [m // p - v for m, v in zip(range(N), done)]
        assert (-table.by_stage(table.forward_versions()))[:, s].tolist() == want
        assert (-table.by_stage(table.backward_versions()))[:, s].tolist() == want
        assert table.facts().forward_delay[s] == max(want)
    assert table.updates_in_round.tolist() == [N // p for p in every]
    assert jpipe.Schedule.from_text(table.to_text(), name="pipedream") == table
    assert math.lcm(*every) <= N
