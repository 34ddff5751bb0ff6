"""A synchronous pipeline computes what the plain model computes: losses, every gradient, weights after updates."""

import jax
import numpy as np
import optax
import oracles
import pytest
from families import FAMILIES, cross_entropy, schedule_named, slow
from helpers import assert_close, with_nan_buffers

import jpipe

SCALE = 2.0**20

# family, schedule, S, N, recompute, boundaries, dtype: together they cover every pair of values.
CASES = [
    ("mlp", "gpipe", 1, 2, "none", None, "float64"),
    ("mlp", "gpipe", 2, 4, "full", [1], "float32"),
    ("mlp", "one_f_one_b/paired", 3, 1, "full", None, "float64"),
    ("mlp", "one_f_one_b/paired", 4, 8, "none", [1, 2, 5], "float64"),
    ("mlp", "one_f_one_b/unit", 4, 8, "none", None, "float32"),
    ("mlp", "one_f_one_b/unit", 2, 3, "full", [4], "float64"),
    ("mlp", "one_f_one_b/unit", 6, 2, "none", None, "float64"),
    ("mlp", "interleaved/paired", 4, 4, "none", None, "float64"),
    ("mlp", "interleaved/unit", 6, 3, "full", None, "float32"),
    ("mlp", "zero_bubble_h1", 4, 8, "none", [1, 2, 5], "float64"),
    ("mlp", "zero_bubble_h2", 3, 6, "full", None, "float64"),
    ("mlp", "zero_bubble_v", 6, 4, "none", None, "float64"),
    ("mlp", "hand-written", 2, 3, "none", None, "float64"),
    ("mlp", "hand-written", 2, 3, "full", [5], "float64"),
    ("mlp", "two-columns", 4, 3, "none", None, "float64"),
    ("mlp", "v", 4, 4, "none", None, "float64"),
    ("resnet", "gpipe", 3, 4, "none", None, "float64"),
    slow("resnet", "gpipe", 2, 1, "full", None, "float64"),
    slow("resnet", "one_f_one_b/paired", 2, 8, "full", [1], "float32"),
    ("resnet", "one_f_one_b/paired", 1, 3, "none", None, "float64"),
    slow("resnet", "one_f_one_b/unit", 4, 3, "full", None, "float64"),
    ("resnet", "two-columns", 4, 2, "full", None, "float64"),
    slow("resnet", "interleaved/paired", 4, 2, "none", None, "float64"),
    slow("resnet", "zero_bubble_v", 4, 4, "none", None, "float64"),
    slow("transformer", "gpipe", 4, 3, "full", None, "float64"),
    slow("transformer", "gpipe", 1, 1, "full", None, "float64"),
    slow("transformer", "one_f_one_b/paired", 2, 4, "none", None, "float32"),
    ("transformer", "one_f_one_b/paired", 4, 8, "full", [1, 2, 5], "float64"),
    slow("transformer", "one_f_one_b/unit", 3, 8, "none", [1, 4], "float64"),
    slow("transformer", "one_f_one_b/unit", 1, 2, "full", None, "float64"),
    slow("transformer", "v", 4, 4, "full", None, "float64"),
    ("transformer", "interleaved/unit", 4, 4, "none", None, "float64"),
    slow("transformer", "zero_bubble_h1", 2, 4, "full", None, "float64"),
    slow("transformer", "zero_bubble_h2", 3, 5, "none", None, "float32"),
]


@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.parametrize("family,schedule,S,N,recompute,boundaries,dtype", CASES)
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

        if (
            dtype == "float32"
        ):  # rounding of weight minus weight would hide the gradient's
            pipe = jpipe.Pipeline(
                family.layers, optimizer=optax.scale(SCALE), **arguments
            )
            state = pipe.init(jax.random.key(7), batches[0], params=plain.params)
            state, _ = pipe.step(with_nan_buffers(state), batches[0])
            moved = jax.tree.map(
                lambda a, b: (a - b) / SCALE, pipe.get_params(state), plain.params
            )
            _, gradients, _ = oracles.train(
                plain, plain.params, cross_entropy, optax.sgd(0.0), batches[:1]
            )
            assert_close(moved, gradients[0], dtype)

        optimizer = optax.sgd(1.0, momentum=0.5)
        pipe = jpipe.Pipeline(family.layers, optimizer=optimizer, **arguments)
        state = pipe.init(jax.random.key(7), batches[0], params=plain.params)
        losses, gradients, params = oracles.train(
            plain, plain.params, cross_entropy, optimizer, batches
        )
        for step, (batch, loss) in enumerate(zip(batches, losses)):
            state, metrics = pipe.step(with_nan_buffers(state), batch)
            assert_close(metrics["loss"], np.asarray(loss), dtype)
            assert int(metrics["num_microbatches"]) == N
            if step == 0 and dtype == "float64":
                moved = jax.tree.map(
                    lambda a, b: b - a, pipe.get_params(state), plain.params
                )
                assert_close(moved, gradients[0], dtype)
        assert_close(pipe.get_params(state), params, dtype)
        np.testing.assert_array_equal(
            metrics["skipped_updates"], np.zeros(table.num_stages)
        )

        inputs = batches[0]["inputs"][: 2 * N - 1]  # not a multiple of N
        outputs = pipe.predict(state, {"inputs": inputs})
        assert_close(outputs, np.asarray(plain(params, inputs)), dtype)


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
