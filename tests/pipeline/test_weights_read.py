"""The weights that forwards and backwards read: who keeps them, what is refused, and how much memory versions take."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from families import FAMILIES, cross_entropy
from flax import nnx
from helpers import assert_close, table_bytes

import jpipe
from jpipe.optim import correct_discrepancy, corrected_params

KEY = jax.random.key(0)
FAMILY = FAMILIES["mlp"]
SGD_T2 = optax.chain(optax.sgd(0.1), correct_discrepancy(0.5))


def pipeline(schedule, optimizer=SGD_T2, **hooks):
    return jpipe.Pipeline(
        FAMILY.layers,
        loss=cross_entropy,
        optimizer=optimizer,
        schedule=schedule,
        **hooks,
    )


@pytest.mark.exhaustive
def test_without_a_delay_hooks_are_not_asked():
    def nothing(params, optimizer_state, delay):
        return jax.tree.map(jnp.zeros_like, params)

    batches, results = FAMILY.batches(2, 8), []
    for hooks in ({}, dict(forward_params=nothing, backward_params=nothing)):
        pipe = pipeline(jpipe.schedules.gpipe(2, 4), **hooks)
        state = pipe.init(KEY, batches[0])
        assert state.read_parameters == {}
        for batch in batches:
            state, _ = pipe.step(state, batch)
        results.append(pipe.get_params(state))
    assert_close(*results, "float64")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name,readers", [("pipedream", []), ("pipemare", ["backward"])])
def test_a_backward_that_reads_what_the_forward_read_is_not_corrected(name, readers):
    schedule = getattr(jpipe.schedules, name)(2, 1, ticks="paired")
    pipe = pipeline(schedule, backward_params=corrected_params)
    state = pipe.init(KEY, FAMILY.batches(1, 4)[0])
    assert list(state.read_parameters) == readers


@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.exhaustive
def test_a_synchronous_warm_up_hands_over_weights_that_stand_still():
    """PipeMare's T3: what follows is a run of its own from those weights, its velocity 0."""
    batches = FAMILY.batches(6, 4)
    with jax.enable_x64(True):
        family = FAMILY.in_dtype("float64")
        plain = oracles.PlainModel(family.layers, KEY)
        options = dict(loss=cross_entropy, optimizer=SGD_T2, backward_params=corrected_params)
        first = jpipe.Pipeline(family.layers, schedule=jpipe.schedules.gpipe(3, 1), **options)
        second = jpipe.Pipeline(
            family.layers,
            schedule=jpipe.schedules.pipemare(3, 1, ticks="paired"),
            **options,
        )
        batches = family.batches(8, 2, np.float64)
        state = first.init(KEY, batches[0], params=plain.params)
        for batch in batches[:2]:
            state, _ = first.step(state, batch)
        params = first.get_params(state)
        stage_of_layer = oracles.stages_of_layers(second.partition(batches[0]))
        _, want = oracles.train_with_delays(
            plain,
            stage_of_layer,
            params,
            cross_entropy,
            optax.sgd(0.1),
            batches[2:],
            1,
            lambda s, j: 2 * (2 - s) + 1,
            lambda s, j: 0,
            decay=0.5,
        )
        state = second.adopt(state)
        for batch in batches[2:]:
            state, _ = second.step(state, batch)
        state, _ = second.flush(state)
        assert_close(second.get_params(state), want, "float64")


@pytest.mark.exhaustive
def test_a_flushed_state_reads_as_a_fresh_one_does():
    """Every version slot has the newest weights, and what the hook makes of them."""
    pipe = pipeline(jpipe.schedules.pipemare(3, 2, ticks="paired"), backward_params=corrected_params)
    batches = FAMILY.batches(5, 4)
    state = pipe.init(KEY, batches[0])
    for batch in batches:
        state, _ = pipe.step(state, batch)
    state, _ = pipe.flush(state)
    again = pipe.adopt(state)
    for name in ("parameters", "read_parameters", "optimizer_state"):
        got, want = getattr(state, name), getattr(again, name)
        assert_close(got, jax.tree.map(np.asarray, want), "float32")
    moved = jax.tree.map(
        lambda a, b: float(np.abs(np.asarray(a) - b).max()),
        dict(state.read_parameters["backward"]),
        dict(state.parameters),
    )
    assert max(moved.values()) > 0


WRONG = [
    (dict(backward_params=0.5), r"`backward_params` must be a function .* got float"),
    (dict(forward_params="predict"), r"`forward_params` must be a function .* got str"),
    (
        dict(optimizer=optax.sgd(0.1), backward_params=corrected_params),
        r"`backward_params=corrected_params` reads the state of `correct_discrepancy`.*Add",
    ),
    (
        dict(forward_params=lambda params, state, delay: params[:1]),
        r"`forward_params` cannot give the weights.*other shapes, dtypes or layers",
    ),
    (
        dict(forward_params=lambda params, state: params),
        r"`forward_params` cannot give the weights.*TypeError",
    ),
]


@pytest.mark.parametrize("arguments,message", WRONG)
def test_hooks_that_cannot_work_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        pipe = pipeline(jpipe.schedules.pipemare(2, 1, ticks="paired"), **arguments)
        pipe.init(KEY, FAMILY.batches(1, 4)[0])


def test_a_transform_whose_state_no_hook_reads_warns():
    pipe = pipeline(jpipe.schedules.pipemare(2, 1, ticks="paired"))
    batch = FAMILY.batches(1, 4)[0]
    with pytest.warns(UserWarning, match="`backward_params` reads its") as warnings:
        pipe.init(KEY, batch)
    assert {w.filename for w in warnings} == {__file__}


@pytest.mark.parametrize(
    "name,N,hooks,copies",
    [
        ("gpipe", 4, {}, 1),
        ("pipedream", 1, {}, 8),  # forward delay of the first stage, and the newest
        ("pipedream_2bw", 7, {}, 2),
        ("pipemare", 1, {}, 1),
        ("pipemare", 1, dict(backward_params=corrected_params), 2),
    ],
)
@pytest.mark.sampled(6)
def test_weights_in_memory_are_what_the_table_says(name, N, hooks, copies):
    """Of a trunk of equal layers, from the arguments and temporaries of the compiled step."""
    dim, num_layers = 64, 24  # of a stage
    schedule = getattr(jpipe.schedules, name)(4, N, **({} if name == "gpipe" else {"ticks": "paired"}))
    pipe = jpipe.Pipeline(
        [functools.partial(nnx.Linear, dim, dim, use_bias=False)] * 4 * num_layers,
        loss=lambda outputs, batch: jnp.mean(outputs**2),
        optimizer=SGD_T2,
        schedule=schedule,
        **hooks,
    )
    assert copies == schedule.facts().weight_versions[0] + len(hooks)
    batch = {"inputs": np.zeros((N, dim), np.float32)}
    memory, one = pipe.memory(batch), 4 * num_layers * dim * dim
    assert memory.weights == copies * one
    compiled = pipe.compile(batch).memory_analysis()
    arguments = compiled.argument_size_in_bytes - table_bytes(pipe, batch)
    known = sum(memory[:5])
    assert 0 <= arguments - known < 200  # counters and the random key
    # Donated, all of it but the minibatch, and no copy of the weights beside.
    assert compiled.alias_size_in_bytes >= known - memory.batch
    assert memory.temporaries < one / 2
