"""A learner of `jpipe.LocalSteps` computes what a pipeline without replicas computes of its rows, with every option."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_close
from learners import DIM, KEY, LAYERS, LEARNERS, N, loss, rows_of

import jpipe
from jpipe import schedules, vocabulary

ROWS, STEPS, TOKENS = 4, 3, 6
SPLIT_ROWS = nnx.with_partitioning(nnx.initializers.normal(0.5), ("stage", None), eager_sharding=False)


class Norm(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.norm = nnx.Linear(DIM, DIM, rngs=rngs), nnx.BatchNorm(DIM, rngs=rngs)

    def __call__(self, x):
        return x + nnx.gelu(self.norm(self.linear(x)))


class Embedding(nnx.Module):
    """All stages have some of its rows."""

    def __init__(self, rngs):
        self.token = nnx.Param(SPLIT_ROWS(rngs.params(), (TOKENS, DIM)))

    def __call__(self, tokens):
        return vocabulary.lookup(self.token[...], tokens)


class Head(Embedding):
    def __call__(self, x):
        return vocabulary.logits(x, self.token[...])


class Whole(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(DIM, DIM, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        kept = x
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return x + kept


def of_words(logits, batch):
    return vocabulary.cross_entropy(logits, batch["targets"]).mean()


def weighted(outputs, batch):
    """Sums and their weight, which microbatches have unlike much of."""
    errors = jnp.mean((outputs - batch["targets"]) ** 2, axis=-1)
    weights = jnp.abs(batch["targets"][:, 0])
    return (jnp.sum(weights * errors), jnp.sum(weights)), {"largest": jnp.max(errors)}


def contrastive(outputs, batch):
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(outputs @ batch["targets"].T)))


WORDS = dict(layers=[Embedding, *LAYERS[:2], Head], loss=of_words, ties=[[(0, "token"), (-1, "token")]])
ADAM = optax.adamw(0.01, eps=1e-3)
CASES = {
    "weighted sums and aux": dict(loss=weighted, has_aux=True),
    "a loss of the whole batch": dict(loss=jpipe.WholeBatchLoss(contrastive), schedule=schedules.gpipe(2, N)),
    "batch norms": dict(layers=[Norm] * 3),
    "recomputation": dict(layers=[Norm] * 3, recompute="full", schedule=schedules.zero_bubble_h1(2, N)),
    "low precision": dict(compute_dtype=jnp.bfloat16, accumulate_dtype=jnp.float32),
    "compressed messages": dict(compress_messages=jpipe.compress.Threshold(0.25)),
    "a quantized message": dict(compress_messages=jpipe.compress.Quantize(8), overlap=True),
    "layers of all stages": WORDS,
    "frozen": dict(trainable=lambda path, value: "bias" not in path),
    "a whole model": dict(layers=Whole(nnx.Rngs(0)), schedule=schedules.interleaved(4, 4)),
    "clipped": dict(optimizer=optax.chain(jpipe.optim.clip_by_global_norm(0.1), ADAM)),
    "Muon": dict(optimizer=optax.contrib.muon(0.01)),
    "2BW with predicted weights": dict(
        schedule=schedules.pipedream_2bw(2, 4),
        optimizer=optax.chain(optax.sgd(0.1), jpipe.optim.predict_weights()),
        forward_params=jpipe.optim.predicted_params,
    ),
    "PipeDream and recomputation": dict(schedule=schedules.pipedream(2, N), layers=[Norm] * 3, recompute="full"),
    "PipeMare on one device": dict(schedule=schedules.emulated(schedules.pipemare(4, N))),
}


def pipeline(case, **options):
    options = dict(layers=LAYERS, loss=loss, optimizer=ADAM, schedule=schedules.one_f_one_b(2, N)) | case | options
    mesh = {} if options.get("local_steps") is None else {"data": LEARNERS}
    devices = options["schedule"].num_devices
    return jpipe.Pipeline(**options, mesh=jpipe.make_mesh(stage=devices, **mesh))


def batches(case):
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        number = LEARNERS * 4 * ROWS
        if case is WORDS:
            tokens, targets = rng.integers(0, TOKENS, (2, number), dtype=np.int32)
            yield {"inputs": tokens, "targets": targets}
        else:
            inputs, targets = rng.standard_normal((2, number, DIM), dtype=np.float32)
            yield {"inputs": inputs, "targets": targets}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_learner_is_a_pipeline_of_its_own(case):
    learners = pipeline(case, local_steps=jpipe.LocalSteps(optax.sgd(1.0)))
    alone, data = pipeline(case), list(batches(case))
    dtype = "bfloat16" if "compute_dtype" in case else "float32"
    state = learners.init(KEY, data[0])
    states = [alone.init(KEY, rows_of(data[0], 0)) for _ in range(LEARNERS)]
    assert_close(learners.get_params(state), alone.get_params(states[0]), "float32")
    for batch in data:
        state, metrics = learners.step(state, batch)
        for r in range(LEARNERS):
            states[r], want = alone.step(states[r], rows_of(batch, r))
            assert_close(jax.tree.map(lambda a: a[r], metrics), want, dtype)  # noqa: B023
    state, flushed = learners.flush(state)
    ends = [alone.flush(s) for s in states]
    assert jax.tree.map(np.shape, flushed) == jax.tree.map(lambda a: (LEARNERS, *a.shape), ends[0][1])
    mean = jax.tree.map(lambda *each: sum(each) / LEARNERS, *(alone.get_params(s) for s, _ in ends))
    state = learners.outer_step(state)
    assert_close(learners.get_params(state), mean, dtype)
    assert_close(learners.get_mutable_state(state), alone.get_mutable_state(ends[0][0]), dtype)
