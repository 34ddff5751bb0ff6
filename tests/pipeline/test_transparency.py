"""A synchronous pipeline computes what the plain model computes: losses, every gradient, weights after updates."""

import itertools

import jax
import numpy as np
import optax
import oracles
import pytest
from families import FAMILIES, cross_entropy, schedule_named, slow
from helpers import assert_close, with_nan_buffers

import jpipe

SCALE = 2.0**20

# family, schedule, S, N, recompute, boundaries, dtype. Rows that are not slow cover every pair of values that can
# occur, which `test_every_pair_is_covered` checks. Expensive families have few stages and microbatches.
CASES = [
    ("mlp", "gpipe", 1, 1, "none", None, "float32"),
    ("mlp", "gpipe", 2, 1, "full", [1], "float64"),
    ("mlp", "gpipe", 3, 4, "none", [2, 3], "float64"),
    ("mlp", "gpipe", 4, 1, "full", None, "float64"),
    ("mlp", "gpipe", 6, 2, "none", None, "float64"),
    ("mlp", "one_f_one_b/paired", 2, 1, "none", [1], "float64"),
    ("mlp", "one_f_one_b/paired", 3, 3, "none", None, "float64"),
    ("mlp", "one_f_one_b/paired", 4, 1, "none", None, "float64"),
    ("mlp", "one_f_one_b/paired", 6, 1, "full", None, "float32"),
    ("mlp", "one_f_one_b/unit", 2, 2, "full", None, "float64"),
    ("mlp", "one_f_one_b/unit", 3, 1, "none", [2, 3], "float32"),
    ("mlp", "one_f_one_b/unit", 4, 1, "full", [1, 2, 5], "float64"),
    ("mlp", "one_f_one_b/unit", 6, 8, "none", None, "float64"),
    ("mlp", "interleaved/paired", 4, 8, "none", [2, 3, 4], "float64"),
    ("mlp", "interleaved/paired", 6, 3, "none", None, "float32"),
    ("mlp", "interleaved/unit", 2, 3, "full", None, "float64"),
    ("mlp", "interleaved/unit", 4, 2, "none", [1, 2, 5], "float32"),
    ("mlp", "interleaved/unit", 6, 3, "full", None, "float64"),
    ("mlp", "zero_bubble_h1", 2, 2, "full", [4], "float64"),
    ("mlp", "zero_bubble_h1", 3, 2, "none", None, "float64"),
    ("mlp", "zero_bubble_h1", 4, 1, "none", None, "float64"),
    ("mlp", "zero_bubble_h1", 6, 2, "none", None, "float64"),
    ("mlp", "zero_bubble_h2", 1, 1, "none", None, "float64"),
    ("mlp", "zero_bubble_h2", 3, 4, "full", [1, 4], "float32"),
    ("mlp", "zero_bubble_h2", 6, 3, "full", None, "float64"),
    ("mlp", "dual_pipe_v", 2, 3, "none", [4], "float64"),
    ("mlp", "dual_pipe_v", 4, 5, "full", [1, 2, 5], "float64"),
    ("mlp", "one_f_one_b/overlapped", 3, 4, "none", [2, 3], "float64"),
    ("mlp", "one_f_one_b/overlapped", 4, 1, "none", None, "float32"),
    ("mlp", "one_f_one_b/overlapped", 6, 1, "none", None, "float32"),
    ("mlp", "interleaved/overlapped", 4, 4, "none", [2, 3, 4], "float64"),
    ("mlp", "interleaved/overlapped", 6, 3, "none", None, "float32"),
    ("mlp", "zero_bubble_v", 2, 3, "none", [4], "float32"),
    ("mlp", "zero_bubble_v", 4, 2, "none", [1, 2, 5], "float64"),
    ("mlp", "hand-written", 2, 3, "none", [4], "float32"),
    ("mlp", "two-columns", 4, 8, "full", [1, 2, 5], "float32"),
    ("mlp", "v", 4, 8, "full", [2, 3, 4], "float32"),
    ("resnet", "gpipe", 3, 1, "none", None, "float64"),
    ("resnet", "one_f_one_b/paired", 1, 2, "none", None, "float64"),
    ("resnet", "one_f_one_b/unit", 1, 2, "none", None, "float32"),
    ("resnet", "interleaved/paired", 2, 1, "full", None, "float64"),
    ("resnet", "interleaved/unit", 2, 2, "full", None, "float64"),
    ("resnet", "zero_bubble_h1", 1, 4, "none", None, "float64"),
    ("resnet", "zero_bubble_h2", 4, 1, "full", None, "float64"),
    ("resnet", "one_f_one_b/overlapped", 1, 1, "full", None, "float64"),
    ("resnet", "interleaved/overlapped", 2, 1, "full", None, "float64"),
    ("resnet", "dual_pipe_v", 2, 2, "none", None, "float32"),
    ("resnet", "zero_bubble_v", 2, 2, "full", [1], "float64"),
    ("resnet", "hand-written", 2, 3, "full", [3], "float64"),
    ("resnet", "two-columns", 4, 2, "full", None, "float64"),
    ("resnet", "v", 4, 2, "full", None, "float64"),
    ("transformer", "gpipe", 3, 1, "full", None, "float64"),
    ("transformer", "one_f_one_b/paired", 1, 2, "full", None, "float64"),
    ("transformer", "one_f_one_b/unit", 1, 1, "none", None, "float64"),
    ("transformer", "interleaved/paired", 2, 2, "full", None, "float64"),
    ("transformer", "interleaved/unit", 2, 1, "none", None, "float64"),
    ("transformer", "zero_bubble_h1", 1, 1, "full", None, "float32"),
    ("transformer", "zero_bubble_h2", 2, 1, "none", [1], "float64"),
    ("transformer", "one_f_one_b/overlapped", 2, 1, "none", None, "float64"),
    ("transformer", "interleaved/overlapped", 2, 3, "none", None, "float64"),
    ("transformer", "dual_pipe_v", 6, 8, "none", None, "float32"),
    ("transformer", "zero_bubble_v", 6, 1, "none", None, "float64"),
    ("transformer", "hand-written", 2, 3, "full", None, "float64"),
    ("transformer", "two-columns", 4, 4, "none", [2, 3, 4], "float64"),
    ("transformer", "v", 4, 4, "none", None, "float64"),
    # Larger ones.
    slow("resnet", "gpipe", 2, 1, "full", None, "float64"),
    slow("resnet", "one_f_one_b/paired", 2, 8, "full", [1], "float32"),
    slow("resnet", "one_f_one_b/unit", 4, 3, "full", None, "float64"),
    slow("resnet", "interleaved/paired", 4, 2, "none", None, "float64"),
    slow("resnet", "zero_bubble_v", 4, 4, "none", None, "float64"),
    slow("transformer", "gpipe", 4, 3, "full", None, "float64"),
    slow("transformer", "gpipe", 1, 1, "full", None, "float64"),
    slow("transformer", "one_f_one_b/paired", 2, 4, "none", None, "float32"),
    slow("transformer", "one_f_one_b/unit", 3, 8, "none", [1, 4], "float64"),
    slow("transformer", "one_f_one_b/unit", 1, 2, "full", None, "float64"),
    slow("transformer", "v", 4, 4, "full", None, "float64"),
    slow("transformer", "zero_bubble_h1", 2, 4, "full", None, "float64"),
    slow("transformer", "zero_bubble_h2", 3, 5, "none", None, "float32"),
]


def factors(family, schedule, S, N, recompute, boundaries, dtype):
    """The values of a row whose pairs are covered."""
    microbatches = "N < S" if N < S else "N = S" if N == S else "N > S"
    cut = "balanced" if boundaries is None else "given"
    return family, schedule, S, microbatches, recompute, cut, dtype


def pairs(row):
    return set(itertools.combinations(enumerate(factors(*row)), 2))


def rows_that_can_occur(values):
    """Every combination of the values in CASES that a schedule and a family can take."""
    families, schedules, stages, microbatches, recomputes, _, dtypes = values
    for schedule, S, N in itertools.product(schedules, stages, microbatches):
        try:
            table = schedule_named(schedule, S, N)
        except ValueError:  # a count that the schedule does not take
            continue
        if (table.num_stages, table.num_microbatches) != (S, N):
            continue  # a table of a fixed size
        for family in families:
            num_layers = len(FAMILIES[family].layers)
            if S > num_layers:
                continue
            # One stage has no boundaries, and a stage per layer only one choice of them.
            cuts = [None, "given"] if 1 < S < num_layers else [None]
            rest = itertools.product(recomputes, cuts, dtypes)
            yield from ((family, schedule, S, N, *others) for others in rest)


@pytest.mark.filterwarnings("ignore:.*bubble")
def test_every_pair_is_covered():
    """By rows without a mark of their own, all pairs of values of two factors that any row could have."""
    not_slow = [case for case in CASES if not hasattr(case, "values")]
    every = [getattr(case, "values", case) for case in CASES]
    # Boundaries are lists, so values are told apart by their text.
    values = [list({str(v): v for v in column}.values()) for column in zip(*every)]
    named = {schedule for _, schedule, *_ in not_slow}
    builders = {name: getattr(jpipe.schedules, name) for name in jpipe.schedules.names()}
    synchronous = {name for name, build in builders.items() if name != "forward_only" and build(2, 4).synchronous}
    synchronous -= {"seq_one_f_one_b"}  # its microbatches are slices of sequences: see test_slices.py
    assert {name.partition("/")[0] for name in named} >= synchronous
    possible = set().union(*map(pairs, rows_that_can_occur(values)))
    covered = set().union(*map(pairs, not_slow))
    assert not possible - covered, sorted(map(str, possible - covered))
    assert len(possible) > 250 and covered <= possible


@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.parametrize("family,schedule,S,N,recompute,boundaries,dtype", CASES)
@pytest.mark.sampled(88)
def test_equals_the_plain_model(family, schedule, S, N, recompute, boundaries, dtype):
    with jax.enable_x64(dtype == "float64"):
        family = FAMILIES[family].in_dtype(dtype)
        table = schedule_named(schedule, S, N)
        plain = oracles.PlainModel(family.layers, jax.random.key(7))
        batches = family.batches(3, 2 * N, dtype)
        arguments = dict(
            loss=cross_entropy,
            schedule=table,
            boundaries=boundaries,
            recompute=recompute,
        )

        if dtype == "float32":  # rounding of weight minus weight would hide the gradient's
            pipe = jpipe.Pipeline(family.layers, optimizer=optax.scale(SCALE), **arguments)
            state = pipe.init(jax.random.key(7), batches[0], params=plain.params)
            state, _ = pipe.step(with_nan_buffers(state), batches[0])
            moved = jax.tree.map(lambda a, b: (a - b) / SCALE, pipe.get_params(state), plain.params)
            _, gradients, _ = oracles.train(plain, plain.params, cross_entropy, optax.sgd(0.0), batches[:1])
            assert_close(moved, gradients[0], dtype)

        optimizer = optax.sgd(1.0, momentum=0.5)
        pipe = jpipe.Pipeline(family.layers, optimizer=optimizer, **arguments)
        state = pipe.init(jax.random.key(7), batches[0], params=plain.params)
        losses, gradients, params = oracles.train(plain, plain.params, cross_entropy, optimizer, batches)
        for step, (batch, loss) in enumerate(zip(batches, losses)):
            state, metrics = pipe.step(with_nan_buffers(state), batch)
            assert_close(metrics["loss"], np.asarray(loss), dtype)
            assert int(metrics["num_microbatches"]) == N
            if step == 0 and dtype == "float64":
                moved = jax.tree.map(lambda a, b: b - a, pipe.get_params(state), plain.params)
                assert_close(moved, gradients[0], dtype)
        assert_close(pipe.get_params(state), params, dtype)
        np.testing.assert_array_equal(metrics["skipped_updates"], np.zeros(table.num_stages))

        inputs = batches[0]["inputs"][: 2 * N - 1]  # not a multiple of N
        outputs = pipe.predict(state, {"inputs": inputs})
        assert_close(outputs, np.asarray(plain(params, inputs)), dtype)


@pytest.mark.exhaustive
def test_initial_weights_depend_on_the_seed_alone():
    family = FAMILIES["transformer"]
    plain = oracles.PlainModel(family.layers, jax.random.key(3))
    batch = family.batches(1, 5)[0]
    params = []
    for num_stages in (1, 2, 5):
        schedule = jpipe.schedules.gpipe(num_stages, 5)
        pipe = jpipe.Pipeline(
            family.layers,
            loss=cross_entropy,
            optimizer=optax.sgd(0.1),
            schedule=schedule,
        )
        params.append(pipe.get_params(pipe.init(jax.random.key(3), batch)))
    for other in params[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, params[0])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
        params[0],
        plain.params,
    )
