"""An embedding and a head that all stages run together: the plain model's numbers, from equal parts."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from families import schedule_named
from flax import nnx
from helpers import assert_close, refused, use_target, with_nan_buffers

import jpipe
from jpipe import vocabulary
from jpipe.optim import (
    correct_discrepancy,
    corrected_params,
    predict_weights,
    predicted_params,
)
from models import Transformer

KEY = jax.random.key(7)
V, D, T, B, N = 11, 4, 3, 8, 4
SLOW = pytest.mark.slow
NORMAL = nnx.initializers.normal(0.5)
SGD = optax.sgd(0.1, momentum=0.5)
ADAM = optax.chain(jpipe.optim.clip_by_global_norm(0.3), optax.adamw(0.05, eps=1e-2))


def floats():
    """float32, and float64 where JAX computes in 64 bits."""
    return jnp.result_type(float)


def init_of(axis, *dims):
    if axis is None:
        return NORMAL
    return nnx.with_partitioning(NORMAL, dims, eager_sharding=False)


class Embedding(nnx.Module):
    """Tokens, positions (which are gathered), and dropout if asked for."""

    def __init__(self, axis=None, rate=0.0, *, rngs):
        table = init_of(axis, axis, None)
        self.token = nnx.Param(table(rngs.params(), (V, D), floats()))
        self.position = nnx.Param(NORMAL(rngs.params(), (T, D), floats()))
        self.dropout = nnx.Dropout(rate, rngs=rngs) if rate else lambda x: x

    def __call__(self, tokens):  # [M, T] -> [M, T, D]
        x = vocabulary.lookup(self.token[...], tokens)
        return self.dropout(x + self.position[...][None])


class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(D, D, kernel_init=NORMAL, param_dtype=floats(), rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Experts(Block):
    """A block that reports how uneven it is, as the router of a mixture of experts does."""

    def __call__(self, x):
        y = super().__call__(x)
        jpipe.report("uneven", jnp.square(y.mean(axis=(0, 1))).sum())
        jpipe.report("last", jnp.abs(y).mean())
        return y


class Head(nnx.Module):
    """A scale (which is gathered), and a matrix as in `nnx.Linear`."""

    def __init__(self, axis=None, *, rngs):
        self.norm = nnx.LayerNorm(D, param_dtype=floats(), rngs=rngs)
        kernel = init_of(axis, None, axis)
        self.linear = nnx.Linear(D, V, use_bias=False, kernel_init=kernel, param_dtype=floats(), rngs=rngs)

    def __call__(self, x):  # [M, T, D] -> [M, T, V]
        return vocabulary.logits(self.norm(x), self.linear.kernel[...].T)


class TiedHead(nnx.Module):
    def __init__(self, axis=None, *, rngs):
        table = init_of(axis, axis, None)
        self.token = nnx.Param(table(rngs.params(), (V, D), floats()))

    def __call__(self, x):
        return vocabulary.logits(x, self.token[...])


def layers_of(embedding="stage", head="stage", tied=False, num_blocks=4, rate=0.0, block=Block):
    last = TiedHead if tied else Head
    return [
        functools.partial(Embedding, embedding, rate),
        *[block] * num_blocks,
        functools.partial(last, head),
    ]


TIES = [[(0, "token"), (-1, "token")]]


def mean_loss(outputs, batch):
    return vocabulary.cross_entropy(outputs, batch["labels"]).mean()


def masked_loss(outputs, batch):
    """A sum and its weight; microbatches have unlike numbers of labels that count."""
    losses = vocabulary.cross_entropy(outputs, batch["labels"])
    right = vocabulary.argmax(outputs) == batch["labels"]
    weights = batch["weights"]
    aux = {"right": jnp.sum(weights * right)}
    return (jnp.sum(weights * losses), weights.sum()), aux


def batches(count):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, V, (2, count, B, T), dtype=np.int32)
    weights = rng.integers(0, 2, (count, B, T)).astype(np.float32)
    return [{"inputs": x, "labels": y, "weights": w} for x, y, w in zip(*tokens, weights)]


def pipeline(layers, schedule, optimizer=SGD, loss=mean_loss, **options):
    return jpipe.Pipeline(layers, loss=loss, optimizer=optimizer, schedule=schedule, **options)


def run(pipe, num_steps=3):
    """Metrics of the steps, the weights, outputs and evaluation in the end. Idle slots hold NaN."""
    state, metrics = pipe.init(KEY, batches(1)[0]), []
    if pipe.schedule.synchronous:
        state = with_nan_buffers(state)
    for batch in batches(num_steps):
        state, of_step = pipe.step(state, batch)
        metrics.append(of_step)
    state, _ = pipe.flush(state)
    batch = jax.tree.map(lambda a: a[:-1], batches(1)[0])  # not a multiple of N
    return (
        [jax.tree.map(np.asarray, m) for m in metrics],
        pipe.get_params(state),
        pipe.predict(state, batch),
        pipe.evaluate(state, batch),
    )


@functools.cache
def plain():
    model = oracles.PlainModel(layers_of(None, None), KEY)
    return model, oracles.train(model, model.params, mean_loss, SGD, batches(3))


@pytest.mark.parametrize(
    "name,stages,options",
    [
        ("one_f_one_b", 4, {}),
        ("interleaved", 4, {}),
        pytest.param("one_f_one_b", 2, {"data": 2}, marks=SLOW),
        pytest.param("gpipe", 4, {"recompute": "full"}, marks=SLOW),
        pytest.param("zero_bubble_h1", 4, {}, marks=SLOW),
        pytest.param("zero_bubble_v", 4, {}, marks=SLOW),
        pytest.param("one_f_one_b", 3, {}, marks=SLOW),
        pytest.param("one_f_one_b", 4, {"embedding": None}, marks=SLOW),
        pytest.param("one_f_one_b", 4, {"head": None}, marks=SLOW),
    ],
)
@pytest.mark.sampled(2)
def test_synchronous_tables_equal_the_plain_model(name, stages, options):
    model, (losses, _, params) = plain()
    options = dict(options)
    schedule = schedule_named(name, stages, N)
    if "data" in options:
        mesh = jpipe.make_mesh(stage=stages, data=options.pop("data"))
        options["mesh"] = mesh
    axes = {n: options.pop(n) for n in ("embedding", "head") if n in options}
    pipe = pipeline(layers_of(**axes), schedule, **options)
    metrics, got, outputs, evaluated = run(pipe)
    assert_close([m["loss"] for m in metrics], [np.asarray(a) for a in losses], "float32")
    assert_close(got, params, "float32")
    batch = jax.tree.map(lambda a: a[:-1], batches(1)[0])
    want = model(params, batch["inputs"])
    assert_close(outputs, np.asarray(want), "float32")
    assert_close(evaluated["loss"], np.asarray(mean_loss(want, batch)), "float32")


def assert_same(layers, whole, schedule, **options):
    """A pipeline whose layers are split does what the one does whose layers are whole."""
    metrics, params, outputs, evaluated = run(pipeline(layers, schedule, **options))
    want = run(pipeline(whole, schedule, **options))
    for got_step, want_step in zip(metrics, want[0], strict=True):
        np.testing.assert_array_equal(got_step.pop("skipped_updates"), want_step.pop("skipped_updates"))
        # What a cast loses of almost equal numbers is not almost equal.
        errors = [step.get("compression", {}).pop("error_norm", 0) for step in (got_step, want_step)]
        np.testing.assert_allclose(*errors, rtol=1e-3)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
            got_step,
            want_step,
        )
    assert_close((params, outputs), (want[1], want[2]), "float32")
    assert_close(evaluated, jax.tree.map(np.asarray, want[3]), "float32")


def reporting_loss(outputs, batch, *, reported):
    (total, weight), aux = masked_loss(outputs, batch)
    penalty = 0.3 * reported["uneven"] + 0.1 * reported["last"]
    return (total + penalty, weight), aux | {"penalty": penalty}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name,stages,num_microbatches,axes,options",
    [
        ("one_f_one_b", 4, 4, {}, {"optimizer": ADAM}),
        ("pipemare", 4, 2, {}, {}),
        ("zero_bubble_h1", 2, 4, {"head": None}, {"recompute": "full"}),
        ("gpipe", 2, 4, {"embedding": None}, {"data": 2, "loss_scale": 8.0}),
    ],
)
@pytest.mark.sampled(4)
def test_layers_between_report_to_the_loss(name, stages, num_microbatches, axes, options):
    schedule = schedule_named(name, stages, num_microbatches)
    mesh = jpipe.make_mesh(stage=stages, data=options.get("data", 1))
    options = {k: v for k, v in options.items() if k != "data"}
    whole = layers_of(None, None, block=Experts)
    options |= dict(loss=reporting_loss, has_aux=True, mesh=mesh)
    if stages == 4:
        options["boundaries"] = [2, 3, 4]
    assert_same(layers_of(**axes, block=Experts), whole, schedule, **options)


@pytest.mark.parametrize("layer", [0, -1])
def test_a_vocabulary_layer_does_not_report(layer):
    layers = layers_of(block=Experts)
    layers[layer] = jpipe.report_weights(layers[layer], "uneven", lambda p: sum(a.sum() for a in jax.tree.leaves(p)))
    pipe = pipeline(layers, schedule_named("gpipe", 4, N), loss=reporting_loss, has_aux=True)
    with refused(f"layer {layer % 6} .* reports 'uneven', .* between the first and the"):
        pipe.init(KEY, batches(1)[0])


# Hooks that leave the last stage alone: it has no delay.
PIPEMARE = dict(
    optimizer=optax.chain(optax.sgd(0.1), correct_discrepancy(0.5)),
    backward_params=corrected_params,
)


@pytest.mark.parametrize(
    "name,num_microbatches,options",
    [
        ("pipemare", 2, PIPEMARE),
        (
            "pipemare",
            2,
            {"optimizer": optax.chain(jpipe.optim.compensate_delay(5.0), optax.sgd(0.1))},
        ),
        pytest.param("pipedream_2bw", 4, {"optimizer": ADAM}, marks=pytest.mark.exhaustive),
        pytest.param("pipedream", 2, {}, marks=SLOW),
        pytest.param("pipedream", 4, {"recompute": "full"}, marks=SLOW),
    ],
)
@pytest.mark.exhaustive
@pytest.mark.sampled(3)
def test_asynchronous_tables_keep_versions_and_delays(name, num_microbatches, options):
    """The layers follow the first and the last stage: reads, updates, delays and clipping are theirs."""
    schedule = schedule_named(name, 4, num_microbatches)
    cut = {"boundaries": [2, 3, 4]}  # by FLOPs, whole layers are cut elsewhere
    assert_same(layers_of(), layers_of(None, None), schedule, **options, **cut)


@pytest.mark.parametrize(
    "schedule,options",
    [
        (
            jpipe.schedules.pipedream(2, 2, ticks="paired"),
            {"loss": masked_loss, "has_aux": True},
        ),
        (
            jpipe.schedules.pipedream_2bw(2, N, ticks="paired"),
            {"optimizer": ADAM, "mesh": {"data": 2}},
        ),
        pytest.param(
            jpipe.schedules.pipedream(4, 1, ticks="paired"),
            {"optimizer": ADAM, "recompute": "full", "boundaries": [2, 3, 4]},
            marks=SLOW,
        ),
    ],
)
@pytest.mark.exhaustive
def test_a_head_comes_after_the_update_where_paired_ticks_begin_a_minibatch(schedule, options):
    stages = schedule.num_stages
    mesh = jpipe.make_mesh(stage=stages, **options.get("mesh", {}))
    options = {"boundaries": [3], **options, "mesh": mesh}
    assert_same(layers_of(), layers_of(None, None), schedule, **options)


@pytest.mark.exhaustive
def test_the_policy_of_gpus_counts_parts_in_norms(monkeypatch):
    """The head is updated with the last stage, in ticks in which other devices update no stage."""
    use_target(monkeypatch, "gpu")
    assert_same(
        layers_of(),
        layers_of(None, None),
        jpipe.schedules.pipedream_2bw(2, N),
        optimizer=ADAM,
        boundaries=[3],
    )


@pytest.mark.parametrize(
    "options",
    [
        {"loss": masked_loss, "has_aux": True, "optimizer": ADAM},
        pytest.param({"loss_scale": jpipe.LossScale(initial=4.0)}, marks=SLOW),
        pytest.param({"rate": 0.5}, marks=SLOW),
    ],
)
@pytest.mark.exhaustive
def test_masks_clipping_loss_scale_and_dropout(options):
    options = dict(options)
    rate = options.pop("rate", 0.0)
    whole = layers_of(None, None, rate=rate)
    schedule = jpipe.schedules.gpipe(2, N)
    assert_same(layers_of(rate=rate), whole, schedule, boundaries=[3], **options)


@pytest.mark.exhaustive
def test_tied_matrices_are_kept_once():
    schedule, options = jpipe.schedules.one_f_one_b(4, N), {"ties": TIES}
    layers, whole = layers_of(tied=True), layers_of(None, None, tied=True)
    assert_same(layers, whole, schedule, boundaries=[2, 3, 4], **options)
    pipe = pipeline(layers, schedule, **options)
    state = pipe.init(KEY, batches(1)[0])
    rows = -(-V // 4)
    vocabularies = [n for n in state.parameters if n.startswith("embedding ")]
    sizes = sum(state.parameters[n].size for n in vocabularies) // 4
    assert sizes == rows * D + D  # a part of the matrix, and one row of the positions


@pytest.mark.parametrize("axes", [{}, {"fsdp": 2}, pytest.param({"model": 2}, marks=SLOW)])
@pytest.mark.exhaustive
def test_a_half_precision_head_is_close(axes):
    """Embedding and head compute in bfloat16, the loss in float32, and the kept weights are float32."""
    schedule = jpipe.schedules.one_f_one_b(2, 2)
    mesh = jpipe.make_mesh(stage=2, **axes)
    options = dict(compute_dtype=jnp.bfloat16, boundaries=[3], mesh=mesh)
    results = [run(pipeline(layers, schedule, **options), 1) for layers in (layers_of(), layers_of(None, None))]
    (metrics, params, outputs, _), (want, _, want_outputs, _) = results
    assert outputs.dtype == np.float32
    np.testing.assert_allclose(outputs, want_outputs, rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(metrics[0]["loss"], want[0]["loss"], rtol=1e-2)
    assert all(a.dtype == np.float32 for a in jax.tree.leaves(params))


@pytest.mark.exhaustive
def test_a_state_goes_to_other_layouts_and_back(tmp_path):
    """To whole layers, to another number of stages, and through a checkpoint; Adam's moments with it."""
    adam = optax.adam(0.05, eps=1e-2)
    split = pipeline(layers_of(), jpipe.schedules.one_f_one_b(4, N), adam)
    state = split.init(KEY, batches(1)[0])
    state, _ = split.step(state, batches(2)[0])
    whole = pipeline(layers_of(None, None), jpipe.schedules.gpipe(2, N), adam)
    thirds = pipeline(layers_of(), jpipe.schedules.gpipe(3, N), adam)
    by_way = thirds.adopt(whole.adopt(state))
    again = split.adopt(by_way)
    jax.tree.map(
        np.testing.assert_array_equal,
        (again.parameters, again.optimizer_state),
        (state.parameters, state.optimizer_state),
    )
    checkpoints = jpipe.Checkpoints(tmp_path)
    checkpoints.save(1, state)
    checkpoints.wait()
    restored = checkpoints.restore(thirds, batches(1)[0]).state
    jax.tree.map(
        np.testing.assert_array_equal,
        (restored.parameters, restored.optimizer_state),
        (by_way.parameters, by_way.optimizer_state),
    )


@pytest.mark.exhaustive
def test_no_stage_is_larger_or_slower_than_the_others():
    """4 equal stages of a transformer whose embedding and head are larger than its blocks."""
    sizes = dict(vocab_size=1000, seq_len=4, dim=8, num_heads=2, num_blocks=4)
    tokens = np.zeros((4, 4), np.int32)
    batch = {"inputs": tokens, "labels": tokens}
    shares = {}
    for axis in (None, "stage"):  # of the rule for "vocab"
        model = Transformer(**sizes)
        pipe = pipeline(
            model.layers(),
            jpipe.schedules.one_f_one_b(4, 2),
            optax.adam(1e-3),
            model.loss(),
            has_aux=True,
            axis_rules=(("vocab", axis),),
        )
        records = pipe.partition(batch)
        flops = [r.flops for r in records]
        memory = pipe.memory(batch)
        of_state = memory.weights + memory.optimizer + memory.gradients
        shares[axis] = memory.padding / of_state, max(flops) / np.mean(flops)
        total = sum(r.num_parameters for r in records)
        assert total == 8 * 1000 * 2 + 4 * 8 + 2 * 8 + 4 * (12 * 8 * 8 + 13 * 8)
    assert shares["stage"][0] < 0.01 and shares["stage"][1] < 1.01
    assert shares[None][0] > 0.5 and shares[None][1] > 2


# Their update of one number depends on others of the matrix, and on its shape.
OF_MATRICES = {
    "muon": optax.contrib.muon(0.05),
    "adafactor": optax.adafactor(
        0.1,
        min_dim_size_to_factor=D,
        multiply_by_parameter_scale=False,  # biases begin with zeros
        momentum=0.5,
        weight_decay_rate=1e-2,
    ),
    "by shape": optax.chain(optax.sgd(0.1), optax.stateless_with_tree_map(lambda u, p: u / p.shape[0])),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "optimizer,schedule,data",
    [
        ("muon", jpipe.schedules.one_f_one_b(4, N), 1),
        pytest.param("by shape", jpipe.schedules.gpipe(2, N), 1, marks=pytest.mark.exhaustive),
        pytest.param("adafactor", jpipe.schedules.gpipe(3, N), 2, marks=pytest.mark.exhaustive),
    ],
)
def test_updates_of_whole_matrices_equal_the_plain_model(optimizer, schedule, data):
    """The parts are gathered: 11 rows over 4 and 3 devices."""
    model, transform = oracles.PlainModel(layers_of(None, None), KEY), OF_MATRICES
    losses, _, params = oracles.train(model, model.params, mean_loss, transform[optimizer], batches(3))
    mesh = jpipe.make_mesh(stage=schedule.num_stages, data=data)
    metrics, got, *_ = run(pipeline(layers_of(), schedule, transform[optimizer], mesh=mesh))
    assert_close([m["loss"] for m in metrics], list(map(np.asarray, losses)), "float32")
    assert_close(got, params, "float32")


@pytest.mark.parametrize(
    "optimizer,schedule,options",
    [
        (
            "muon",
            jpipe.schedules.pipedream_2bw(2, N),
            {"mesh": {"data": 2}, "shard_optimizer": True},
        ),
        ("adafactor", jpipe.schedules.pipemare(2, N), {}),
        ("muon", jpipe.schedules.one_f_one_b(2, N), {"ties": TIES}),
    ],
)
@pytest.mark.exhaustive
def test_updates_of_whole_matrices_with_clipping_versions_and_ties(optimizer, schedule, options):
    tied = "ties" in options
    options = options | {"mesh": jpipe.make_mesh(stage=2, **options.get("mesh", {}))}
    clip = jpipe.optim.clip_by_global_norm(0.3)
    assert_same(
        layers_of(tied=tied),
        layers_of(None, None, tied=tied),
        schedule,
        optimizer=optax.chain(clip, OF_MATRICES[optimizer]),
        boundaries=[3],
        **options,
    )


@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
@pytest.mark.exhaustive
def test_a_state_of_whole_matrices_goes_to_other_numbers_of_stages(optimizer):
    """What has the shape of a parameter is split as it is; sums over rows and columns are on every device."""
    transform = OF_MATRICES[optimizer]
    split = pipeline(layers_of(), jpipe.schedules.one_f_one_b(4, N), transform)
    state = split.init(KEY, batches(1)[0])
    state, _ = split.step(state, batches(2)[0])
    whole = pipeline(layers_of(None, None), jpipe.schedules.gpipe(2, N), transform)
    thirds = pipeline(layers_of(), jpipe.schedules.gpipe(3, N), transform)
    by_way = thirds.adopt(whole.adopt(state))
    again = split.adopt(by_way)
    jax.tree.map(
        np.testing.assert_array_equal,
        (again.parameters, again.optimizer_state),
        (state.parameters, state.optimizer_state),
    )
    after, _ = split.step(state, batches(3)[2])
    other, _ = thirds.step(by_way, batches(3)[2])
    assert_close(thirds.get_params(other), split.get_params(after), "float32")


OVER_STAGES, OVER_BOTH = ((("vocab", axes), *jpipe.AXIS_RULES) for axes in ("stage", ("stage", "model")))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "schedule,optimizer,rules,axes",
    [
        (jpipe.schedules.one_f_one_b(2, 2), SGD, OVER_STAGES, {"fsdp": 2, "data": 2}),
        pytest.param(
            *(jpipe.schedules.gpipe(2, 2), SGD, OVER_BOTH, {"model": 2}),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            jpipe.schedules.one_f_one_b(2, 2),
            OF_MATRICES["adafactor"],
            *(OVER_BOTH, {"fsdp": 2, "model": 2}),
            marks=SLOW,
        ),
        pytest.param(
            jpipe.schedules.gpipe(2, 2),
            OF_MATRICES["muon"],
            *(OVER_STAGES, {"fsdp": 4}),
            marks=SLOW,
        ),
    ],
)
def test_axes_that_the_compiler_splits_equal_the_plain_model(schedule, optimizer, rules, axes):
    """Each part is split over them too, as the weights of stages are: [6, 4] of [11, 4] over 2 devices."""
    model = oracles.PlainModel(layers_of(None, None), KEY)
    losses, _, params = oracles.train(model, model.params, mean_loss, optimizer, batches(3))
    pipe = pipeline(
        layers_of("vocab", "vocab"),
        schedule,
        optimizer,
        mesh=jpipe.make_mesh(stage=2, **axes),
        axis_rules=rules,
    )
    metrics, got, outputs, _ = run(pipe)
    assert_close([m["loss"] for m in metrics], list(map(np.asarray, losses)), "float32")
    assert_close(got, params, "float32")
    batch = jax.tree.map(lambda a: a[:-1], batches(1)[0])
    assert_close(outputs, np.asarray(model(params, batch["inputs"])), "float32")
    state = pipe.init(KEY, batches(1)[0])
    for group in (state.parameters, state.gradients):
        names = {n for n in group if n.startswith(("embedding ", "head "))}
        split = {n for n in names if group[n].sharding.spec[1:]}
        assert {math.prod(group[n].shape[1:]) for n in split} >= {6 * D}


@pytest.mark.exhaustive
@pytest.mark.parametrize("axis", ["fsdp", pytest.param("model", marks=SLOW)])
def test_axes_that_the_compiler_splits_in_asynchronous_tables(axis):
    assert_same(
        layers_of("vocab", "vocab", block=Experts),
        layers_of(None, None, block=Experts),
        jpipe.schedules.pipedream_2bw(2, N),
        mesh=jpipe.make_mesh(stage=2, **{axis: 2}),
        axis_rules=OVER_STAGES,
        optimizer=ADAM,
        loss=reporting_loss,
        has_aux=True,
        boundaries=[3],
    )


@pytest.mark.exhaustive
def test_parts_that_the_compiler_splits_go_to_other_layouts_and_are_counted():
    adam = optax.adam(0.05, eps=1e-2)
    layers, options = layers_of("vocab", "vocab"), {"axis_rules": OVER_STAGES}
    of_thirds = {**options, "mesh": jpipe.make_mesh(stage=3)}
    of_fsdp = {**options, "mesh": jpipe.make_mesh(stage=2, fsdp=2)}
    split = pipeline(layers, jpipe.schedules.one_f_one_b(2, 2), adam, **of_fsdp)
    thirds = pipeline(layers, jpipe.schedules.one_f_one_b(3, 2), adam, **of_thirds)
    state = split.init(KEY, batches(1)[0])
    state, _ = split.step(state, batches(2)[0])
    again = split.adopt(thirds.adopt(state))
    jax.tree.map(
        np.testing.assert_array_equal,
        (again.parameters, again.optimizer_state),
        (state.parameters, state.optimizer_state),
    )
    # Of a device: the rows of the embedding, the positions and the head that are padding, in weights, gradients and
    # two moments, with 2 x 2 devices. All other parts are even.
    memory = split.memory(batches(1)[0])
    assert memory.padding == 4 * 4 * (D + D + D) // 4
    weights = split.shards(batches(1)[0])[0]
    assert (weights.use, weights.num_bytes) == ("weights", memory.weights)
    assert weights.split["fsdp"] > 0.8


@pytest.mark.parametrize(
    "schedule,optimizer",
    [
        (jpipe.schedules.one_f_one_b(2, 2), ADAM),
        pytest.param(jpipe.schedules.pipedream_2bw(2, 2), SGD, marks=SLOW),
    ],
)
@pytest.mark.exhaustive
def test_replicas_exchange_compressed_gradients_of_parts(schedule, optimizer):
    """A cast does the same to a part as to the whole, and what it loses comes later.

    In 64 bits: a gradient between two numbers of the cast goes to one or to the other by its last bit, and with 32 of
    them one of these thousand gradients is that near to the middle.
    """
    with jax.enable_x64(True):
        assert_same(
            layers_of(),
            layers_of(None, None),
            schedule,
            optimizer=optimizer,
            mesh=jpipe.make_mesh(stage=2, data=2),
            compress_gradients=jpipe.compress.Cast(),
            boundaries=[3],
        )


@pytest.mark.exhaustive
def test_compressed_gradients_without_loss_equal_the_plain_model():
    _, (losses, _, params) = plain()
    pipe = pipeline(
        layers_of(),
        jpipe.schedules.gpipe(2, 2),
        mesh=jpipe.make_mesh(stage=2, data=2),
        compress_gradients=jpipe.compress.TopK(1.0),
    )
    metrics, got, *_ = run(pipe)
    assert_close([m["loss"] for m in metrics], list(map(np.asarray, losses)), "float32")
    assert_close(got, params, "float32")
    state = pipe.init(KEY, batches(1)[0])
    errors = state.gradient_compression["error"]
    assert {n.split()[0] for n in errors} >= {"embedding", "head"}


@pytest.mark.parametrize("data", [1, pytest.param(2, marks=SLOW)])
@pytest.mark.exhaustive
def test_stages_accumulate_factors_beside_parts(data):
    """The parts are accumulated as they are, as a tied matrix of whole layers is."""
    assert_same(
        layers_of(tied=True),
        layers_of(None, None, tied=True),
        jpipe.schedules.one_f_one_b(2, 2),
        optimizer=ADAM,
        ties=TIES,
        mesh=jpipe.make_mesh(stage=2, data=data),
        accumulate_gradients=jpipe.compress.StreamingPCA(1),
        boundaries=[3],
    )


# -- Refusals


def test_the_rank_of_compressed_gradients_of_parts():
    with refused(r"the gradient of a device's part of a weight \(1x4\).* at most rank 1"):
        pipeline(
            layers_of(),
            jpipe.schedules.gpipe(4, N),
            mesh=jpipe.make_mesh(stage=4, data=2),
            compress_gradients=jpipe.compress.PowerSGD(2),
        ).init(KEY, batches(1)[0])


def test_layers_between_cannot_be_split():
    class Inner(nnx.Module):
        def __init__(self, *, rngs):
            kernel = init_of("stage", None, "stage")
            self.linear = nnx.Linear(D, D, kernel_init=kernel, rngs=rngs)

        def __call__(self, x):
            return self.linear(x)

    layers = [*layers_of(None, None)[:-1], Inner, functools.partial(Head, None)]
    with refused(r"layer 5 \(Inner\) names the axis .stage., and only the first"):
        pipeline(layers, jpipe.schedules.gpipe(2, N)).init(KEY, batches(1)[0])


def test_a_part_must_be_used():
    class Unaware(Embedding):
        def __call__(self, tokens):
            return jnp.take(self.token[...], tokens, axis=0)

    layers = [functools.partial(Unaware, "stage"), *layers_of(None)[1:]]
    with refused("gives no part of it to `jpipe.vocabulary.lookup`"):
        pipe = pipeline(layers, jpipe.schedules.gpipe(2, N))
        pipe.lower(batches(1)[0])


def test_an_unaware_loss_is_refused():
    def loss(outputs, batch):
        return optax.softmax_cross_entropy_with_integer_labels(outputs, batch["labels"]).mean()

    with pytest.raises(TypeError, match="jpipe.vocabulary.cross_entropy"):
        pipe = pipeline(layers_of(), jpipe.schedules.gpipe(2, N), loss=loss)
        pipe.lower(batches(1)[0])


def test_a_stage_needs_a_layer_of_its_own():
    schedule = jpipe.schedules.gpipe(2, N)
    with refused("stage 0 would hold layer 0 alone"):
        pipe = pipeline(layers_of(), schedule, boundaries=[1])
        pipe.init(KEY, batches(1)[0])
    with refused("need at least as many layers beside those"):
        pipe = pipeline(layers_of(num_blocks=2), jpipe.schedules.gpipe(3, N))
        pipe.init(KEY, batches(1)[0])


def test_tables_that_cannot_run_the_head():
    copies = jpipe.schedules.gpipe(2, N, replicas=(2, 1))
    with refused("without copies"):
        pipeline(layers_of(), copies).init(KEY, batches(1)[0])
    paired = jpipe.schedules.pipemare(2, 2, ticks="paired")
    with refused("reads newer weights in its backward"):
        pipeline(layers_of(), paired).init(KEY, batches(1)[0])
    with refused("`forward_params` changes the weights of the last stage"):
        pipeline(
            layers_of(),
            jpipe.schedules.pipedream_2bw(2, N),
            optax.chain(optax.sgd(0.1), predict_weights()),
            forward_params=predicted_params,
        ).init(KEY, batches(1)[0])


def test_tied_matrices_are_split_alike():
    with refused("must all be split over the axis"):
        layers = layers_of("stage", None, tied=True)
        pipeline(layers, jpipe.schedules.gpipe(2, N), ties=TIES).init(KEY, batches(1)[0])


@pytest.mark.exhaustive
def test_replicas_share_the_updates_of_the_stages():
    """Each replica updates all of its part of the vocabulary, and a share of the stages' weights."""
    assert_same(
        layers_of(),
        layers_of(None, None),
        jpipe.schedules.gpipe(2, 2),
        mesh=jpipe.make_mesh(stage=2, data=2),
        optimizer=optax.chain(jpipe.optim.clip_by_global_norm(0.1), optax.adam(0.1, eps=1e-2)),
        shard_optimizer=True,
    )
