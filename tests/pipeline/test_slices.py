"""Slices of sequences as microbatches, against plain JAX on whole sequences.

The oracle is written without `jpipe`: attention and a recurrence over all positions at once.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_close, refused, use_target, with_nan_buffers

import jpipe
from jpipe.layers.trace import forward_and_backward
from models import Transformer

DIM, HEADS, KEY_HEADS, HEAD, ROWS, POSITIONS = 8, 4, 2, 2, 4, 8


def _weights(key, shapes):
    keys = jax.random.split(key, len(shapes))
    return {n: 0.4 * jax.random.normal(k, shape, jnp.float64) for k, (n, shape) in zip(keys, shapes.items())}


ATTENTION = {"query": (DIM, DIM), "key": (DIM, DIM // 2), "value": (DIM, DIM // 2), "out": (DIM, DIM)}


def init_attention(key, x):
    return _weights(key, ATTENTION)


def heads(p, x):
    return [(x @ p[name]).reshape(*x.shape[:2], -1, HEAD) for name in ("query", "key", "value")]


def by_hand(p, x):
    """Causal attention that takes the whole keys and values, and masks by position."""
    query, key, value = heads(p, x)
    key, value = jpipe.whole_sequence(key), jpipe.whole_sequence(value)
    rows = jpipe.first_position() + jnp.arange(x.shape[1])
    scores = jnp.einsum("btkgd,bmkd->bkgtm", query.reshape(*x.shape[:2], KEY_HEADS, -1, HEAD), key)
    scores = jnp.where(rows[:, None] >= jnp.arange(key.shape[1])[None], scores, -1e30)
    y = jnp.einsum("bkgtm,bmkd->btkgd", jax.nn.softmax(scores), value)
    return x + jnp.sin(y.reshape(x.shape)) @ p["out"]


def with_jpipe(p, x, block_size=1024):
    y = jpipe.attention(*heads(p, x), scale=1.0, is_causal=True, block_size=block_size)
    return x + jnp.sin(y.reshape(x.shape)) @ p["out"]


def plain_attention(p, x):
    query, key, value = heads(p, x)
    key, value = (jnp.repeat(a, HEADS // KEY_HEADS, axis=2) for a in (key, value))
    scores = jnp.einsum("bthd,bmhd->bhtm", query, key)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -jnp.inf)
    y = jnp.einsum("bhtm,bmhd->bthd", jax.nn.softmax(scores), value)
    return x + jnp.sin(y.reshape(x.shape)) @ p["out"]


def init_recurrence(key, x):
    return _weights(key, {"cell": (DIM, DIM), "first": (DIM,)})


def cell(p, h, a):
    h = jnp.tanh(h["h"] @ p["cell"] + a + 0.1 * h["count"])
    return h


def recurrence(p, x):
    """A state with a number that has no gradient, and a first value that is trained."""

    def step(h, a):
        h = {"h": cell(p, h, a), "count": h["count"] + 1}
        return h, h["h"]

    first = {"h": jnp.broadcast_to(p["first"][None], (x.shape[0], DIM)), "count": jnp.zeros((), jnp.int32)}
    y = jpipe.carry(lambda h: jax.lax.scan(step, h, x.swapaxes(0, 1)), first)
    return x + y.swapaxes(0, 1)


def plain_recurrence(p, x):
    h, outputs = jnp.broadcast_to(p["first"][None], (x.shape[0], DIM)), []
    for t in range(x.shape[1]):
        h = cell(p, {"h": h, "count": t}, x[:, t])
        outputs.append(h)
    return x + jnp.stack(outputs, 1)


KINDS = {
    "hand": (jpipe.InitApply(init_attention, by_hand), plain_attention),
    "jpipe": (jpipe.InitApply(init_attention, with_jpipe), plain_attention),
    "tiles": (jpipe.InitApply(init_attention, functools.partial(with_jpipe, block_size=3)), plain_attention),
    "recurrence": (jpipe.InitApply(init_recurrence, recurrence), plain_recurrence),
    "position": (jpipe.Function(jnp.tanh), lambda p, x: jnp.tanh(x)),
}
MIXED = ("hand", "recurrence", "jpipe", "jpipe", "tiles", "position")


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def batch_of(rows=ROWS, positions=POSITIONS):
    rng = np.random.default_rng(0)
    inputs, targets = rng.normal(size=(2, rows, positions, DIM))
    mask = (rng.random((rows, positions)) < 0.7).astype(np.float64)
    return {"inputs": inputs, "targets": targets, "mask": mask}


def mean(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def masked(outputs, batch):
    losses = jnp.mean((outputs - batch["targets"]) ** 2, -1)
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


def pipeline(kinds, schedule, loss=mean, **options):
    return jpipe.Pipeline(
        [KINDS[k][0] for k in kinds], loss=loss, optimizer=optax.sgd(1.0), schedule=schedule, **options
    )


def oracle(kinds, loss, params, batch):
    def value(params):
        x = batch["inputs"]
        for kind, p in zip(kinds, params, strict=True):
            x = KINDS[kind][1](p, x)
        result = loss(x, batch)
        return result[0] / result[1] if isinstance(result, tuple) else result

    return jax.value_and_grad(value)(params)


def check(kinds, schedule, *, loss=mean, batch=None, steps=1, **options):
    """Losses and gradients of some steps are those of plain JAX."""
    batch = batch or batch_of()
    pipe = pipeline(kinds, schedule, loss, **options)
    state = with_nan_buffers(pipe.init(jax.random.key(0), batch))
    for _ in range(steps):
        params = pipe.get_params(state)
        want, gradients = oracle(kinds, loss, params, batch)
        state, metrics = pipe.step(state, batch)
        assert_close(metrics["loss"], want, "float64")
        assert_close(jax.tree.map(np.subtract, params, pipe.get_params(state)), gradients, "float64")
    return pipe, state


sliced = jpipe.schedules.seq_one_f_one_b


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("num_stages", "num_slices"),
    [(2, 1), (2, 2), (4, 4), *(pytest.param(*n, marks=pytest.mark.exhaustive) for n in ((2, 4), (4, 1), (4, 2)))],
)
def test_gradients_are_those_of_whole_sequences(num_stages, num_slices):
    check(MIXED, sliced(num_stages, 2 * num_slices, num_slices), steps=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("overlap", [False, True])
def test_messages_of_two_ticks(overlap):
    check(MIXED, sliced(3, 4, 2, message_ticks=(1, 2)), steps=2, overlap=overlap)


@pytest.mark.first_case
@pytest.mark.parametrize(
    "options",
    [
        {"recompute": jax.checkpoint_policies.nothing_saveable},
        {"loss": masked},
        {"mesh": {"stage": 2, "data": 2}, "batch": batch_of(rows=8)},
        {"mesh": {"stage": 2, "model": 2}},
        {"mesh": {"stage": 2, "fsdp": 2}, "batch": batch_of(rows=8)},
        {"overlap": True},
        {"offload": jpipe.Offload(activations=3)},
    ],
    ids=lambda o: "-".join(o),
)
def test_with_other_options(options):
    if "mesh" in options:
        options = {**options, "mesh": jpipe.make_mesh(**options["mesh"])}
    check(("jpipe", "recurrence"), sliced(2, 8, 4), **options)


@pytest.mark.exhaustive
def test_unit_ticks():
    check(("jpipe", "recurrence", "hand"), sliced(3, 8, 4, ticks="unit"))


def test_full_recomputation_of_attention():
    check(("jpipe", "hand"), sliced(2, 8, 4), recompute="full")


@pytest.mark.first_case
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_on_other_platforms(monkeypatch, platform):
    use_target(monkeypatch, platform)
    check(("jpipe", "recurrence", "jpipe"), sliced(2, 4, 2), boundaries=[1])


def test_one_device():
    check(("jpipe", "recurrence"), sliced(1, 4, 2))


@pytest.mark.exhaustive
def test_stages_that_share_a_device_and_an_order_of_ones_own():
    """All forwards, then all backwards, as in TeraPipe; two stages on a device."""
    N, k, S = 4, 2, 4
    s, m = np.arange(S), np.arange(N)[:, None]
    place = m // k * k + k - 1 - m % k
    schedule = jpipe.Schedule.from_ticks(
        "terapipe", forward=2 * m + s, backward=2 * (N + place) + 2 * S - s, device=s % 2, num_slices=k
    )
    check(("jpipe", "recurrence", "hand", "tiles"), schedule)


def test_packed_documents():
    rng = np.random.default_rng(1)
    documents = np.sort(rng.integers(0, 3, (ROWS, POSITIONS))).astype(np.int32)
    x = rng.normal(size=(ROWS, POSITIONS, HEADS, HEAD))

    def layer(p, inputs):
        x, ids = inputs
        y = x * p["scale"][None, None, None]
        return jpipe.attention(y, y, x, is_causal=True, segment_ids=ids), ids

    layers = [jpipe.InitApply(lambda key, x: {"scale": jnp.ones(HEAD)}, layer)] * 2
    batch = {"inputs": (x, documents), "targets": np.sin(x)}

    def loss(outputs, batch):
        return jnp.mean((outputs[0] - batch["targets"]) ** 2)

    pipe = jpipe.Pipeline(layers, loss=loss, optimizer=optax.sgd(1.0), schedule=sliced(2, 8, 4))
    state = with_nan_buffers(pipe.init(jax.random.key(0), batch))
    params = pipe.get_params(state)

    def plain(params):
        seen = np.tril(np.ones((POSITIONS, POSITIONS), bool)) & (documents[:, :, None] == documents[:, None])
        y = x
        for p in params:
            scores = jnp.einsum("bthd,bmhd->bhtm", *[y * p["scale"][None, None, None]] * 2) / np.sqrt(HEAD)
            y = jnp.einsum("bhtm,bmhd->bthd", jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf)), y)
        return loss((y,), batch)

    want, gradients = jax.value_and_grad(plain)(params)
    state, metrics = pipe.step(state, batch)
    assert_close(metrics["loss"], want, "float64")
    assert_close(jax.tree.map(np.subtract, params, pipe.get_params(state)), gradients, "float64")


# -- What is kept


def test_no_slice_stashes_keys_or_values():
    """They are kept once for all slices of a sequence, and the gradient by them once for all sequences."""
    pipe = pipeline(("jpipe", "jpipe"), sliced(2, 8, 4))
    program = pipe._program(batch_of())
    (kind,) = program.traced.layer_kinds
    keys = (2, POSITIONS, KEY_HEADS, HEAD)
    assert [a.shape for a in kind.carried] == [keys, keys]
    assert all(a.shape[1:2] != (POSITIONS,) and a.shape[2:] != keys[2:] for a in kind.stash)
    slots = program.engine.lowered.num_slots
    assert (slots["carry"], slots["carry_gradient"]) == (2, 1)
    shapes = jax.tree.map(lambda a: a.shape, program.abstract_state.buffers)
    num_numbers = sum(np.prod(shape) for shape in shapes["carry"].values())
    assert num_numbers == 2 * slots["carry"] * 2 * np.prod(keys)  # devices, slots, keys and values
    assert sum(np.prod(shape) for shape in shapes["carry_gradient"].values()) == num_numbers / 2


def test_stashes_of_a_pipeline_shrink():
    """In flight are min(N, 2 S + k - 2) slices of 1 / k of a sequence, instead of min(N / k, 2 S - 1) sequences."""
    by_slices = {}
    for k in (1, 2, 4):
        program = pipeline(("position",) * 4, sliced(2, 4 * k, k))._program(batch_of(rows=4))
        by_slices[k] = sum(
            np.prod(a.shape[1:]) * a.shape[0] / 2
            for a in jax.tree.leaves([program.abstract_state.buffers[ring] for ring in ("input_stash", "weight_stash")])
        )
    assert by_slices[2] < by_slices[1] and by_slices[4] < by_slices[2]


def test_a_layer_backward_in_plain_words():
    """`forward_and_backward`, which measures a layer, gives a backward the keys that its forward was given."""
    program = pipeline(("jpipe", "jpipe"), sliced(2, 4, 2))._program(batch_of())
    function, arguments = forward_and_backward(program.traced.layer_kinds[0])
    jax.eval_shape(function, *arguments)


# -- Evaluation, other tables


def test_prediction_and_evaluation_take_whole_sequences():
    batch = batch_of()
    kinds = ("jpipe", "recurrence")
    pipe, state = check(kinds, sliced(2, 4, 2))
    want, _ = oracle(kinds, mean, pipe.get_params(state), batch)
    assert_close(pipe.evaluate(state, batch)["loss"], want, "float64")
    assert pipe.predict(state, batch).shape == batch["inputs"].shape
    assert_close(pipe.plain_loss(state)(pipe.get_params(state), batch), want, "float64")


def test_a_training_goes_on_without_slices():
    kinds, batch = ("jpipe", "recurrence"), batch_of()
    _, state = check(kinds, sliced(2, 4, 2))
    other = pipeline(kinds, jpipe.schedules.one_f_one_b(2, 2))
    state = other.adopt(state)
    params = other.get_params(state)
    want, gradients = oracle(kinds, mean, params, batch)
    state, metrics = other.step(state, batch)
    assert_close(metrics["loss"], want, "float64")
    assert_close(jax.tree.map(np.subtract, params, other.get_params(state)), gradients, "float64")


def test_flax_modules_and_reports():
    class Mixed(nnx.Module):
        def __init__(self, *, rngs):
            self.linear = nnx.Linear(DIM, DIM, param_dtype=jnp.float64, rngs=rngs)

        def __call__(self, x):
            y = self.linear(x)
            jpipe.report("size", jnp.mean(y**2))
            y = y.reshape(*x.shape[:2], HEADS, HEAD)
            return x + jpipe.attention(y, y, y, is_causal=True).reshape(x.shape)

    def loss(outputs, batch, *, reported):
        return mean(outputs, batch) + 0.5 * reported["size"]

    batch = batch_of()
    pipe = jpipe.Pipeline([Mixed] * 4, loss=loss, optimizer=optax.sgd(1.0), schedule=sliced(2, 8, 4))
    state = pipe.init(jax.random.key(0), batch)
    params = pipe.get_params(state)

    def plain(params):
        x, size = batch["inputs"], 0
        for p in params:
            y = x @ p["linear"]["kernel"] + p["linear"]["bias"][None, None]
            size += jnp.mean(y**2)
            y = y.reshape(*x.shape[:2], HEADS, HEAD)
            scores = jnp.einsum("bthd,bmhd->bhtm", y, y) / np.sqrt(HEAD)
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -jnp.inf)
            x = x + jnp.einsum("bhtm,bmhd->bthd", jax.nn.softmax(scores), y).reshape(x.shape)
        return mean(x, batch) + 0.5 * size

    want, gradients = jax.value_and_grad(plain)(params)
    state, metrics = pipe.step(state, batch)
    assert_close(metrics["loss"], want, "float64")
    assert_close(jax.tree.map(np.subtract, params, pipe.get_params(state)), gradients, "float64")


# -- What is refused


def refuse(words, pipe, batch):
    key = jax.random.key(0)
    with refused(words):
        pipe.init(key, batch)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": nnx.Linear(DIM, DIM, rngs=nnx.Rngs(0))}, "the layers are a whole model"),
        ({"loss": jpipe.WholeBatchLoss(mean)}, "WholeBatchLoss"),
        ({"axis_rules": [("vocab", "stage")]}, '"stage" out of the rules'),
        ({"boundaries": "time"}, "for `boundaries='time'` layers are measured on whole sequences"),
        ({"accumulate_gradients": jpipe.compress.StreamingPCA(1)}, "`accumulate_gradients` begins"),
    ],
)
def test_what_needs_whole_sequences(changes, words):
    arguments = dict(layers=[KINDS["jpipe"][0]] * 2, loss=mean, optimizer=optax.sgd(1.0), schedule=sliced(2, 4, 2))
    with refused(words):
        jpipe.Pipeline(**arguments | changes)


def test_layers_are_measured_on_whole_sequences():
    with refused("`profile`: layers are measured on whole sequences"):
        pipeline(("jpipe", "jpipe"), sliced(2, 4, 2)).profile(batch_of())


def test_batches_that_cannot_be_cut():
    pipe = pipeline(("jpipe", "jpipe"), sliced(2, 8, 4))
    refuse(
        r"dim 1 of each entry of the batch, in 4 equal slices, and an entry .* \[2, 6, 8\]", pipe, batch_of(positions=6)
    )
    labels = {**batch_of(), "labels": np.zeros(ROWS)}
    refuse(r"shape \[2\]. Use sequences of", pipe, labels)
    refuse("a batch of 3 cannot be cut into 2 equal microbatches", pipe, batch_of(rows=3))


def test_a_table_of_positions_must_hold_the_whole_sequence():
    layers = Transformer(vocab_size=11, seq_len=6, dim=8, num_heads=2, num_blocks=2).layers()
    tokens = np.zeros((ROWS, 8), np.int32)  # each of 2 slices would fit
    pipe = jpipe.Pipeline(layers, loss=mean, optimizer=optax.sgd(1.0), schedule=sliced(2, 4, 2))
    refuse("the input has 8 positions, but `seq_len` of the model is 6", pipe, {"inputs": tokens})


def test_a_state_has_moved_on_when_a_forward_runs_again():
    pipe = pipeline(("recurrence", "jpipe"), sliced(2, 4, 2), recompute="full")
    refuse(r'layer 0 .*jpipe.carry.*recompute="full"', pipe, batch_of())


def test_a_state_of_another_shape():
    layer = jpipe.Function(lambda x: jpipe.carry(lambda h: (x, x), jnp.zeros(3)))
    pipe = jpipe.Pipeline([layer] * 2, loss=mean, optimizer=optax.sgd(1.0), schedule=sliced(2, 4, 2))
    refuse("must return a state like `initial`", pipe, batch_of())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs `is_causal=True`"),
        ({"is_causal": True, "mask": np.ones((1, 1, 1, 1), bool)}, "`mask` would need the keys"),
    ],
)
def test_attention_that_sees_later_slices(options, words):
    def layer(x):
        y = x.reshape(*x.shape[:2], HEADS, HEAD)
        return jpipe.attention(y, y, y, **options).reshape(x.shape)

    pipe = jpipe.Pipeline([jpipe.Function(layer)] * 2, loss=mean, optimizer=optax.sgd(1.0), schedule=sliced(2, 4, 2))
    refuse(words, pipe, batch_of())


def test_an_axis_of_positions_beside_slices():
    pipe = pipeline(("jpipe", "jpipe"), sliced(2, 4, 2), mesh=jpipe.make_mesh(stage=2, context=2))
    with pytest.raises(ValueError, match="Use slices or the axis, not both"):
        pipe.init(jax.random.key(0), batch_of())


def test_a_table_is_not_emulated_or_walked():
    with refused("has slices of sequences"):
        jpipe.schedules.emulated(sliced(2, 4, 2))
    with refused("`Reference` runs whole sequences"):
        jpipe.reference.Reference([KINDS["position"][0]] * 2, mean, optax.sgd(1.0), sliced(2, 4, 2), params=[{}, {}])


# -- Outside of a pipeline


def test_functions_outside_of_a_pipeline():
    assert jpipe.sequence_length(8) == 8
    x = jnp.arange(6.0).reshape(1, 6)
    assert jpipe.whole_sequence(x) is x
    assert jpipe.first_position() == 0
    assert jpipe.carry(lambda h: (h + 1, h * 2), 3) == 6
    with pytest.raises(ValueError, match="`axis` must be an axis of `values`, which have 2, got 2"):
        jpipe.whole_sequence(x, axis=2)
