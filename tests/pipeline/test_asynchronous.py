"""Asynchronous pipelines compute what their definitions say, with delays from formulas and every version kept."""

import jax
import numpy as np
import optax
import oracles
import pytest
from corrections import CORRECTIONS, SPIKE, corrected, none, paired_delay, unit_delay
from families import FAMILIES, cross_entropy, slow
from helpers import assert_close, with_nan_buffers

import jpipe

STASHED = {"vertical_sync": True}
# schedule, family, S, N, ticks, options, optimizer, recompute, corrections[, dtype]
CASES = [
    ("pipedream", "mlp", 3, 1, "paired", {}, "momentum", "none", "none"),
    slow(("pipedream", "transformer", 2, 2, "paired", {}, "sgd", "full", "none")),
    slow(("pipedream", "transformer", 4, 1, "unit", {}, "sgd", "none", "none")),
    slow(("pipedream", "mlp", 3, 3, "unit", {}, "adamw", "full", "T1+T2")),
    ("pipedream", "mlp", 4, 1, "paired", STASHED, "sgd", "none", "T1"),
    ("pipedream", "mlp", 3, 5, "paired", {}, "sgd", "none", "clipping"),
    ("pipedream", "mlp", 4, 1, "unit", {}, "momentum", "none", "prediction"),
    slow(("pipedream_2bw", "mlp", 3, 5, "paired", {}, "momentum", "none", "prediction")),
    slow(("pipedream_2bw", "transformer", 4, 3, "unit", {}, "sgd", "none", "none")),
    ("pipedream_2bw", "mlp", 1, 1, "paired", {}, "sgd", "none", "T1"),
    ("pipedream_2bw", "mlp", 4, 7, "paired", {}, "adamw", "full", "clipping"),
    ("pipemare", "mlp", 3, 1, "paired", {}, "sgd", "none", "none"),
    ("pipemare", "mlp", 4, 2, "paired", {}, "momentum", "none", "T1"),
    ("pipemare", "mlp", 4, 1, "unit", {}, "adamw", "none", "T2"),
    ("pipemare", "mlp", 2, 4, "unit", {}, "sgd", "full", "none"),
    slow(("pipemare", "mlp", 4, 1, "paired", {}, "momentum", "none", "T1+T2")),
    ("pipemare", "mlp", 3, 2, "unit", {}, "sgd", "full", "T1+T2"),
    slow(("pipemare", "mlp", 3, 1, "paired", {}, "adamw", "full", "T2")),
    ("pipemare", "mlp", 4, 1, "unit", {}, "sgd", "none", "prediction"),
    slow(("pipemare", "mlp", 3, 2, "paired", {}, "adamw", "full", "prediction")),
    slow(("pipemare", "mlp", 4, 4, "unit", {}, "momentum", "none", "clipping")),
    slow(("pipemare", "mlp", 3, 4, "paired", {}, "adamw", "none", "all")),
    ("pipemare", "mlp", 3, 1, "paired", {}, "spike", "none", "none"),
    ("pipedream", "mlp", 3, 2, "paired", {}, "nadamw", "none", "none"),
    ("pipedream", "transformer", 2, 1, "paired", {}, "sgd", "none", "none", "float32"),
    slow(("pipedream", "mlp", 4, 1, "unit", {}, "spike", "full", "none", "float32")),
    slow(("pipedream_2bw", "mlp", 3, 5, "paired", {}, "adamw", "none", "T1", "float32")),
    ("pipemare", "mlp", 4, 1, "paired", {}, "momentum", "none", "T1+T2", "float32"),
    ("pipemare", "mlp", 3, 4, "unit", {}, "sgd", "full", "all", "float32"),
]
OPTIMIZERS = {
    "spike": optax.chain(jpipe.optim.spike_compensation(0.8), optax.scale_by_learning_rate(0.02)),
    "nadamw": jpipe.optim.nadamw(1e-2),
    "sgd": optax.sgd(0.2),
    "momentum": optax.sgd(0.05, momentum=0.9),
    "adamw": optax.adamw(1e-2),
}
ROUNDS = 21


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.sampled(32)
def test_equals_the_definition(case):
    name, family, S, N, ticks, options, optimizer, recompute, corrections, *dtype = case
    dtype = dtype[0] if dtype else "float64"
    tolerance = 1e-9 if dtype == "float64" else 1e-5
    corrections = CORRECTIONS[corrections] | (SPIKE if optimizer == "spike" else {})
    with jax.enable_x64(dtype == "float64"):
        family, optimizer = FAMILIES[family].in_dtype(dtype), OPTIMIZERS[optimizer]
        plain = oracles.PlainModel(family.layers, jax.random.key(1))
        microbatches = family.batches(ROUNDS * N, 2, np.dtype(dtype))
        batches = oracles.minibatches(microbatches, N)
        traced = []

        def loss(outputs, batch):
            traced.append(outputs)
            return cross_entropy(outputs, batch)

        pipe = jpipe.Pipeline(
            family.layers,
            loss=loss,
            schedule=getattr(jpipe.schedules, name)(S, N, ticks=ticks, **options),
            recompute=recompute,
            **corrected(optimizer, corrections),
        )
        stage_of_layer = oracles.stages_of_layers(pipe.partition(batches[0]))

        delay = (paired_delay if ticks == "paired" else unit_delay)(S, N)
        if name == "pipedream_2bw":
            delay = lambda s, j: 1  # noqa: E731
        elif options:
            delay = lambda s, j, entry=delay: entry(0, j)  # noqa: E731
        losses, params = oracles.train_with_delays(
            plain,
            stage_of_layer,
            plain.params,
            cross_entropy,
            optimizer,
            microbatches,
            N,
            delay,
            none if name == "pipemare" else delay,
            recompute=recompute == "full",
            **corrections,
        )

        state = pipe.init(jax.random.key(0), batches[0], params=plain.params)
        state = with_nan_buffers(state, all_but="squared_norm")
        steps, traces = [], set()
        for batch in batches:
            state, metrics = pipe.step(state, batch)
            traces.add(len(traced))
            assert len(traces) == 1, "traced again"
            steps.append((float(metrics["loss"]), int(metrics["num_microbatches"])))
        state, metrics = pipe.flush(state)
        steps.append((float(metrics["loss"]), int(metrics["num_microbatches"])))
        assert all(np.isnan(mean) == (n == 0) for mean, n in steps)
        total = sum(mean * n for mean, n in steps if n)
        count = sum(n for _, n in steps)
        assert count == ROUNDS * N
        np.testing.assert_allclose(total / count, np.mean(losses), rtol=tolerance)
        assert_close(pipe.get_params(state), params, dtype)

        # A flushed state goes on like a fresh one.
        state, _ = pipe.step(state, batches[0])
        fresh = pipe.init(jax.random.key(0), batches[0], params=params)
        assert jax.tree.structure(fresh) == jax.tree.structure(state)
        outputs = pipe.predict(fresh, batches[0])
        assert_close(outputs, np.asarray(plain(params, batches[0]["inputs"])), dtype)
