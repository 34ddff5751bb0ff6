"""DC-ASGD against its formula, and the weights that a pipeline passes against a plain loop that keeps all of them."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import FAMILIES, cross_entropy
from flax import nnx
from helpers import assert_close

import jpipe
from jpipe import optim, schedules
from jpipe.stages.extra_args import STALE_PARAMS


@pytest.mark.parametrize("decay", [None, 0.0, 0.95])
def test_is_the_formula(decay):
    rng = np.random.default_rng(0)
    transform = optim.compensate_delay(0.7, decay, eps=1e-3)
    s = np.zeros(3)
    with jax.enable_x64(True):
        state = transform.init(jnp.zeros(3))
        for g, w, stale in rng.normal(size=(5, 3, 3)):
            found, state = transform.update(jnp.asarray(g), state, jnp.asarray(w), stale_params=jnp.asarray(stale))
            strength = 0.7
            if decay is not None:
                s = decay * s + (1 - decay) * g**2
                strength = 0.7 / np.sqrt(s + 1e-3)
            expected = g + strength * g**2 * (w - stale)
            np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_changes_nothing_without_delay():
    transform, w = optim.compensate_delay(2.0), jnp.arange(3.0)
    found, _ = transform.update(w + 1, transform.init(w), w, stale_params=w)
    np.testing.assert_array_equal(found, w + 1)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(strength=-1), "`strength` must be at least 0, got -1"),
        (
            dict(strength=1, decay=1.0),
            "`decay` must be at least 0 and below 1, got 1.0",
        ),
        (dict(strength=1, eps=0), "`eps` must be above 0, got 0"),
    ],
)
def test_refuses_what_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        optim.compensate_delay(**arguments)


def test_refuses_an_update_without_stale_weights():
    transform, w = optim.compensate_delay(1.0), jnp.ones(2)
    with pytest.raises(ValueError, match="needs the weights, and those that the grad"):
        transform.update(w, transform.init(w), w)
    with pytest.raises(ValueError, match="needs the weights, and those that the grad"):
        transform.update(w, transform.init(w), stale_params=w)


def test_keeps_dtypes_and_runs_masked_and_with_injected_hyperparameters():
    params = {"a": jnp.ones(2, jnp.bfloat16), "b": {"c": jnp.ones(3), "none": None}}
    stale = jax.tree.map(lambda w: w / 2, params)
    grads = jax.tree.map(lambda w: 4 * w, params)
    mask = {"a": False, "b": {"c": True, "none": None}}
    expected = 4 + 0.5 * 16 * 0.5
    arguments = dict(strength=0.5, decay=None)
    for wrapped, has_a in (
        (optim.compensate_delay(**arguments), True),
        (optax.masked(optim.compensate_delay(**arguments), mask), False),
        (optax.inject_hyperparams(optim.compensate_delay)(**arguments), True),
    ):
        state = wrapped.init(params)
        found, after = wrapped.update(grads, state, params, stale_params=stale)
        assert jax.tree.map(lambda a: (a.shape, a.dtype), found) == jax.tree.map(lambda a: (a.shape, a.dtype), grads)
        assert jax.tree.structure(after) == jax.tree.structure(state)
        np.testing.assert_allclose(found["b"]["c"], expected)
        np.testing.assert_allclose(np.asarray(found["a"], np.float32), expected if has_a else 4)


# -- In a pipeline -----------------------------------------------------------------------


def linear_stages(num_stages):
    dense = functools.partial(nnx.Linear, 3, 3, use_bias=False, param_dtype=float)
    return [dense] * num_stages


def squares(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def by_hand(weights, batches, delays, N, strength, rate):
    """Late gradients of linear layers, with every version kept: forward and backward read the same."""
    versions = [[w] for w in weights]
    S = len(weights)
    for t, batch in enumerate(batches):
        grads = [np.zeros((3, 3)) for _ in weights]
        for m in range(N):
            x = batch["inputs"].reshape(N, -1, 3)[m]
            y = batch["targets"].reshape(N, -1, 3)[m]
            read = [versions[s][max(t - delays[m][s], 0)] for s in range(S)]
            inputs = [x]
            for w in read:
                inputs.append(inputs[-1] @ w)
            gradient = 2 * (inputs[-1] - y) / y.size
            for s in reversed(range(S)):
                grads[s] += inputs[s].T @ gradient / N
                gradient = gradient @ read[s].T
        for s in range(S):
            oldest = max(delays[m][s] for m in range(N))
            w, stale = versions[s][t], versions[s][max(t - oldest, 0)]
            g = grads[s] + strength * grads[s] ** 2 * (w - stale)
            versions[s].append(w - rate * g)
    return [of_stage[-1] for of_stage in versions]


def trained(schedule, layers, loss, batches, optimizer, **options):
    pipe = jpipe.Pipeline(layers, loss=loss, optimizer=optimizer, schedule=schedule, **options)
    state = pipe.init(jax.random.key(0), batches[0])
    first = pipe.get_params(state)
    for batch in batches:
        state, _ = pipe.step(state, batch)
    state, _ = pipe.flush(state)
    return pipe, first, pipe.get_params(state)


CASES = {
    "constant": ([[3, 1, 0]], 1),
    "longer than what is stashed": ([[1, 5, 0]], 1),
    "differing by microbatch": ([[2, 1, 0], [1, 0, 0]], 2),
}


@pytest.mark.first_case
@pytest.mark.parametrize("case", CASES)
def test_a_pipeline_passes_the_weights_of_the_oldest_forward(case):
    delays, N = CASES[case]
    rng = np.random.default_rng(1)
    batches = [{"inputs": rng.normal(size=(4, 3)), "targets": rng.normal(size=(4, 3))} for _ in range(9)]
    optimizer = optax.chain(optim.compensate_delay(3.0, decay=None), optax.sgd(0.1))
    schedule = schedules.with_delays(delays, N)
    with jax.enable_x64(True):
        _, first, found = trained(schedule, linear_stages(3), squares, batches, optimizer)
    weights = [layer["kernel"] for layer in first]
    expected = by_hand(weights, batches, delays, N, 3.0, 0.1)
    plain = by_hand(weights, batches, delays, N, 0.0, 0.1)
    for layer, w in zip(found, expected, strict=True):
        np.testing.assert_allclose(layer["kernel"], w, rtol=1e-9)
    assert max(np.abs(a - b).max() for a, b in zip(expected, plain)) > 1e-3


SCHEDULES = {
    "pipemare paired": schedules.pipemare(2, 1, ticks="paired"),
    "pipemare unit": schedules.pipemare(2, 2),
    "pipedream": schedules.pipedream(2, 1, ticks="paired"),
    "2bw": schedules.pipedream_2bw(2, 3),
    "copies": schedules.pipemare(2, 2, replicas=(2, 1), ticks="paired"),
    "gpipe": schedules.gpipe(2, 2),
}


@pytest.mark.exhaustive
@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", SCHEDULES)
def test_two_stages_compute_what_is_emulated(name):
    table = SCHEDULES[name]
    family = FAMILIES["mlp"].in_dtype("float64")
    batches = family.batches(5, 2 * table.num_microbatches, np.float64)
    # A large strength, so that other weights would be seen.
    optimizer = optax.chain(optim.compensate_delay(5.0), optax.sgd(0.2, momentum=0.5))
    results = []
    for schedule in (table, schedules.emulated(table)):
        with jax.enable_x64(True):
            *_, params = trained(schedule, family.layers, cross_entropy, batches, optimizer)
        results.append(params)
    assert_close(*results, "float64")
    with jax.enable_x64(True):
        *_, plain = trained(table, family.layers, cross_entropy, batches, optax.sgd(0.2, momentum=0.5))
    moved = [np.abs(a - b).max() for a, b in zip(jax.tree.leaves(results[0]), jax.tree.leaves(plain))]
    assert (max(moved) > 1e-6) == (name != "gpipe")


@pytest.mark.exhaustive
def test_replicas_that_share_the_update_compute_the_same():
    table = schedules.pipemare(2, 1, ticks="paired")
    family = FAMILIES["mlp"].in_dtype("float64")
    batches = family.batches(4, 4, np.float64)
    optimizer = optax.chain(optim.compensate_delay(5.0), optax.sgd(0.2))
    results = []
    for shares in (False, True):
        with jax.enable_x64(True):
            *_, params = trained(
                table,
                family.layers,
                cross_entropy,
                batches,
                optimizer,
                mesh=jpipe.make_mesh(stage=2, data=2),
                shard_optimizer=shares,
            )
        results.append(params)
    assert_close(*results, "float64")


def rows_of(optimizer, schedule):
    family = FAMILIES["mlp"]
    pipe = jpipe.Pipeline(family.layers, loss=cross_entropy, optimizer=optimizer, schedule=schedule)
    state = pipe.init(jax.random.key(0), family.batches(1, 4)[0])
    return state.program.engine.lowered.rows, pipe, state


def reading(name):
    """An optimizer that takes the argument, and reads it or not."""

    def update(updates, state, params=None, **extra):
        stale = extra[STALE_PARAMS]
        assert jax.tree.structure(stale) == jax.tree.structure(params)
        if name == "reads":
            updates = jax.tree.map(lambda u, w: u - 0.0 * w, updates, stale)
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


@pytest.mark.exhaustive
def test_versions_are_kept_only_where_somebody_reads_them():
    table = schedules.pipemare(3, 1, ticks="paired")
    kept, pipe, state = rows_of(optax.chain(reading("reads"), optax.sgd(0.1)), table)
    assert kept.num_versions.tolist() == [6, 4, 2]  # delays 5, 3, 1, and one more
    assert kept.stale.tolist() == [5, 3, 1]
    pipe.step(state, FAMILIES["mlp"].batches(1, 4)[0])
    for optimizer in (optax.chain(reading("takes"), optax.sgd(0.1)), optax.sgd(0.1)):
        plain, *_ = rows_of(optimizer, table)
        assert plain.num_versions.tolist() == [1, 1, 1] and plain.stale is None
    synchronous, *_ = rows_of(optax.chain(optim.compensate_delay(1.0), optax.sgd(0.1)), schedules.gpipe(3, 2))
    assert synchronous.num_versions.tolist() == [1, 1, 1]


@pytest.mark.exhaustive
def test_memory_counts_the_versions():
    table = schedules.pipemare(3, 1, ticks="paired")
    _, pipe, _ = rows_of(optax.sgd(0.1), table)
    _, asking, _ = rows_of(optax.chain(optim.compensate_delay(1.0), optax.sgd(0.1)), table)
    batch = FAMILIES["mlp"].batches(1, 4)[0]
    assert asking.memory(batch).weights == 6 * pipe.memory(batch).weights


@pytest.mark.exhaustive
def test_a_state_is_adopted_and_goes_on():
    """Behind a synchronous warm-up the ring holds the newest weights in every slot."""
    family = FAMILIES["mlp"].in_dtype("float64")
    batches = family.batches(6, 4, np.float64)
    optimizer = optax.chain(optim.compensate_delay(5.0), optax.sgd(0.2))
    results = []
    table = schedules.pipemare(2, 1, ticks="paired")
    with jax.enable_x64(True):
        for schedule in (table, schedules.emulated(table)):
            warm_up, late = (
                jpipe.Pipeline(family.layers, loss=cross_entropy, optimizer=optimizer, schedule=s)
                for s in (schedules.gpipe(2, 2), schedule)
            )
            state = warm_up.init(jax.random.key(0), batches[0])
            for batch in batches[:2]:
                state, _ = warm_up.step(state, batch)
            state = late.adopt(state)
            for batch in batches[2:]:
                state, _ = late.step(state, batch)
            results.append(late.get_params(late.flush(state)[0]))
    assert_close(*results, "float64")
    assert all(math.isfinite(float(np.abs(a).max())) for a in jax.tree.leaves(results))
