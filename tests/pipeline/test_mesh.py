"""Every model on every mesh of stages, replicas, "fsdp" and "model": the plain model's numbers, and the collectives of
theory.
"""

import collections
import functools
import itertools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from collectives import collectives
from families import ASYNCHRONOUS, images, schedule_named, tokens
from flax import linen, nnx

import jpipe
from models import (
    BERT,
    MLP,
    VGG,
    RecurrentTranslation,
    ResNet,
    Transformer,
    Translation,
    UNet,
)

KEY = jax.random.key(7)
B, N, T = 8, 2, 6
SGD = optax.sgd(0.5, momentum=0.9)
DECODER = dict(vocab_size=12, seq_len=T, dim=8, num_heads=2, num_blocks=3)

MODELS = {
    "mlp": (
        MLP(num_inputs=6, widths=(8, 8, 8), num_outputs=4),
        lambda rng: rng.normal(size=(B, 6)).astype(np.float32),
    ),
    "transformer": (Transformer(**DECODER), lambda rng: tokens(rng, B, T)),
    "tied transformer": (
        Transformer(**DECODER, tie_embeddings=True),
        lambda rng: tokens(rng, B, T),
    ),
    "resnet": (
        ResNet(num_channels=1, widths=(4, 8), num_blocks=(1, 1), group_size=2, num_classes=4),
        lambda rng: images(rng, B, 4, 4, 1),
    ),
    "bottleneck": (
        ResNet(num_channels=1, widths=(4,), num_blocks=(2,), block="bottleneck", group_size=2, num_classes=4),
        lambda rng: images(rng, B, 4, 4, 1),
    ),
    "vgg": (
        VGG(image_size=4, num_channels=1, widths=(4,), num_convolutions=(2,), hidden_width=8, num_classes=4, dropout=0.0),
        lambda rng: images(rng, B, 4, 4, 1),
    ),
    "unet": (
        UNet(num_channels=1, width=4, num_levels=1, num_classes=2),
        lambda rng: images(rng, B, 4, 4, 1),
    ),
    "bert": (
        BERT(vocab_size=8, seq_len=T, dim=8, num_heads=2, num_blocks=1, dropout=0.0),
        lambda rng: {
            "tokens": tokens(rng, B, T),
            "segments": np.zeros((B, T), np.int32),
            "mask": np.arange(T)[None] < 1 + np.arange(B)[:, None],
        },
    ),
    "translation": (
        Translation(
            vocab_size=8, dim=8, num_heads=2, mlp_dim=8, num_encoder_blocks=1, num_decoder_blocks=1, norm="pre", dropout=0.0
        ),
        lambda rng: {"source": tokens(rng, B, T), "target": tokens(rng, B, T)},
    ),
    "recurrent": (
        RecurrentTranslation(vocab_size=8, dim=8, num_layers=1, dropout=0.0),
        lambda rng: {"source": tokens(rng, B, T), "target": tokens(rng, B, T)},
    ),
}  # fmt: skip
"""A small model of every family, and a function from a generator to inputs."""

AXES = ("data", "stage", "fsdp", "model")
MESHES = [dict(zip(AXES, sizes)) for sizes in itertools.product((1, 2), repeat=4)][1:]


def loss(outputs, batch):
    return jnp.mean(jnp.square(outputs - 0.5))


def batches_of(name, count=2):
    rng = np.random.default_rng(0)
    return [{"inputs": MODELS[name][1](rng)} for _ in range(count)]


def ties_of(model):
    return model.ties() if hasattr(model, "ties") else ()


class Plain(oracles.PlainModel):
    """A model with its skips and its ties, as one would write it without a pipeline."""

    def __init__(self, model):
        parts = [(factory, {}) for factory in model.layers()]
        parts = model.parts() if hasattr(model, "parts") else parts
        super().__init__([factory for factory, _ in parts], KEY)
        self.ways = [way for _, way in parts]
        self.ties = ties_of(model)
        self.params = self.tied(self.params)

    def tied(self, params):
        """The weights with the owner's values in each copy."""
        params = jax.tree.map(lambda a: a, params)
        for (owner, path), *copies in self.ties:
            value = functools.reduce(dict.get, path.split("."), params[owner])
            for layer, path in copies:
                params[layer][path] = value
        return params

    def __call__(self, params, x):
        kept = {}
        for i, way in enumerate(self.ways):
            values = self.tied(params)[i]
            nnx.replace_by_pure_dict(self.states[i], values)
            module = nnx.merge(self.graphs[i], self.states[i])
            if "pop" in way:
                x = module(x, kept.pop(way["pop"]))
            elif "stash" in way:
                x, kept[way["stash"]] = module(x)
            else:
                x = module(x)
        return x


@functools.cache
def plain(name):
    """Losses of the plain model, and its weights in the end."""
    model = Plain(MODELS[name][0])
    losses, _, params = oracles.train(model, model.params, loss, SGD, batches_of(name))
    return losses, model.tied(params)


def pipeline(name, sizes, schedule=None, **options):
    model = MODELS[name][0]
    table = schedule or schedule_named("one_f_one_b", sizes["stage"], N)
    return jpipe.Pipeline(
        model.layers(),
        loss=loss,
        optimizer=SGD,
        schedule=table,
        mesh=jpipe.make_mesh(**sizes),
        ties=ties_of(model),
        **options,
    )


def trained(pipe, batches):
    """Losses, and weights in the end."""
    state, losses = pipe.init(KEY, batches[0]), []
    for batch in batches:
        state, metrics = pipe.step(state, batch)
        losses.append(np.asarray(metrics["loss"]))
    state, _ = pipe.flush(state)
    return losses, pipe.get_params(state)


def assert_equal_training(got, want):
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for (path, b), a in zip(jax.tree.leaves_with_path(want[1]), jax.tree.leaves(got[1]), strict=True):
        # The gradient of the bias of an attention's keys is zero, and the bias is rounding errors of zero.
        floor = 1e-2 if "'key'" in jax.tree_util.keystr(path) else 1e-30
        atol = 1e-5 * max(np.abs(b).max(), floor)
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path))


def case(name, *sizes):
    """A case that runs always, with all tests of a minute at most, or with all."""
    marks = []
    if (name, sizes) not in SAMPLE:
        marks = [pytest.mark.exhaustive if sizes == ALL_SPLIT else pytest.mark.slow]
    if sizes == (2, 2, 2, 2):
        marks.append(SIXTEEN)
    label = "x".join(f"{axis}{n}" for axis, n in zip(AXES, sizes) if n > 1)
    return pytest.param(name, dict(zip(AXES, sizes)), marks=marks, id=f"{name}-{label}")


SIXTEEN = pytest.mark.skipif(
    os.environ.get("JPIPE_SIXTEEN_DEVICES") != "1",
    reason="needs 16 devices: test_meshes_of_sixteen_devices starts a process with them",
)
ALL_SPLIT = (1, 2, 2, 2)
SAMPLE = [
    ("resnet", (1, 2, 1, 2)),
    ("unet", (2, 1, 2, 1)),
    ("tied transformer", (1, 2, 2, 2)),
    ("mlp", (2, 1, 2, 2)),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name, sizes", [case(name, *m.values()) for name in MODELS for m in MESHES])
@pytest.mark.sampled(2)
def test_every_model_on_every_mesh_equals_the_plain_model(name, sizes):
    pipe = pipeline(name, sizes)
    assert_equal_training(trained(pipe, batches_of(name)), plain(name))


@pytest.mark.exhaustive
@pytest.mark.parametrize("axis", ["fsdp", "model"])
def test_replicas_that_share_the_update_of_split_weights(axis):
    sizes = {"data": 2, "stage": 2, "fsdp": 1, "model": 1} | {axis: 2}
    pipe = pipeline("transformer", sizes, shard_optimizer=True)
    batches = batches_of("transformer")
    assert_equal_training(trained(pipe, batches), plain("transformer"))
    optimizer = {r.use: r for r in pipe.shards(batches[0])}["optimizer"]
    assert {"data", axis} <= set(optimizer.split)


@pytest.mark.slow
def test_meshes_of_sixteen_devices():
    """The cases of the test above that need more devices than this process has."""
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=16"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    root = pathlib.Path(__file__).parents[2]
    result = subprocess.run(
        [*command, "-k", "data2xstage2xfsdp2xmodel2"],
        cwd=root,
        env=os.environ | {"XLA_FLAGS": flags, "JPIPE_SIXTEEN_DEVICES": "1"},
        capture_output=True,
        text=True,
    )
    assert f"{len(MODELS)} passed" in result.stdout, result.stdout + result.stderr


FOUR_STAGES = ("interleaved", "zero_bubble_v", "two-columns", "v")
"""Schedules with two stages on a device."""
SYNCHRONOUS = ("gpipe", "one_f_one_b/unit", "zero_bubble_h1", "zero_bubble_h2", *FOUR_STAGES)  # fmt: skip
SPLIT = {"data": 1, "stage": 2, "fsdp": 2, "model": 2}


@pytest.mark.exhaustive
@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_every_schedule_equals_the_plain_model(name):
    table = schedule_named(name, 4 if name in FOUR_STAGES else 2, N)
    pipe = pipeline("transformer", SPLIT, table)
    want = plain("transformer")
    assert_equal_training(trained(pipe, batches_of("transformer")), want)


@pytest.mark.exhaustive
@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_asynchronous_schedules_equal_themselves_without_the_axes(name):
    """Which the oracles of `test_asynchronous.py` prove."""
    batches = batches_of("transformer", 3)
    split, whole = (
        trained(pipeline("transformer", sizes, schedule_named(name, 2, N)), batches)
        for sizes in (SPLIT, SPLIT | {"fsdp": 1, "model": 1})
    )
    assert_equal_training(split, whole)


SEQUENCE = (("length", "model"), *jpipe.AXIS_RULES)


@pytest.mark.exhaustive
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name, schedule, options",
    [
        ("transformer", "one_f_one_b", {}),
        pytest.param("transformer", "zero_bubble_h1", {}, marks=pytest.mark.exhaustive),
        pytest.param("transformer", "gpipe", {"recompute": "full"}, marks=pytest.mark.exhaustive),
        pytest.param("bert", "one_f_one_b", {}, marks=pytest.mark.exhaustive),
        pytest.param("translation", "one_f_one_b", {}, marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_sequence_parallel_activations(name, schedule, options):
    """Between the parts that "model" splits, activations and messages are split by positions."""
    pipe = pipeline(name, SPLIT, schedule_named(schedule, 2, N), axis_rules=SEQUENCE, **options)
    batches = batches_of(name)
    assert_equal_training(trained(pipe, batches), plain(name))
    if name == "transformer":
        whole = pipeline(name, SPLIT, schedule_named(schedule, 2, N), **options)
        found = [{record.use: record for record in p.shards(batches[0])} for p in (pipe, whole)]
        messages, others = (records["messages"] for records in found)
        assert messages.num_bytes == others.num_bytes // 2
        assert messages.split["model"] == 1 and "model" not in others.split


# -- Collectives


def program(name, sizes, **options):
    """The collectives of the compiled step, without those of a few numbers, norms and counts, and those of the update,
    which adds up the gradients of tied weights."""
    pipe = pipeline(name, sizes, **options)
    text = pipe.compile(batches_of(name)[0]).as_text()
    mesh_shape = [n for n in sizes.values() if n > 1]
    stage = list(n for n in sizes if sizes[n] > 1).index("stage")
    stage_of = np.indices(mesh_shape)[stage].ravel()
    found = [c for c in collectives(text) if max(map(np.prod, c.shapes)) > 4 and "/update/" not in c.name]
    for c in found:
        if c.groups is not None:
            # Nothing in a tick waits for the work of another stage.
            assert all(len({stage_of[d] for d in group}) == 1 for group in c.groups), c
    return pipe, found


def uses_of_weights(pipe, batch):
    """Shape of a split weight, as a layer reads it -> the number of places of the program that need it whole.

    The loop over equal layers of a stage is one place forward, and one backward.
    """
    stages = pipe._program(batch).stages
    uses = collections.Counter()
    for stage_program in stages.programs:
        for run in stage_program.runs:
            for place in run.parameters:
                if "fsdp" in jpipe.packing.axes(place.spec):
                    parts = [2 if "model" in jpipe.packing.axes((names,)) else 1 for names in place.spec]
                    uses[tuple(n // p for n, p in zip(place.shape, parts))] += 2
    return uses


FAMILIES = [
    name if name == "transformer" else pytest.param(name, marks=pytest.mark.exhaustive)
    for name in MODELS
    if name != "tied transformer"  # the update adds up the gradients of the copies
]


@pytest.mark.exhaustive
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_collectives_over_fsdp(name):
    """Weights are gathered for their uses, gradients are summed. Activations stay, and messages travel as shards."""
    sizes = {"data": 1, "stage": 2, "fsdp": 2, "model": 1}
    batch = batches_of(name)[0]
    pipe, found = program(name, sizes)
    uses = uses_of_weights(pipe, batch)
    gathers = collections.Counter(
        tuple(n for n in shape if n > 1) for c in found if c.kind == "all-gather" for shape in c.shapes
    )
    allowed = collections.Counter()
    for shape, number in uses.items():
        allowed[tuple(n for n in shape if n > 1)] += number
    assert gathers and all(n <= allowed[s] for s, n in gathers.items()), (
        gathers,
        allowed,
    )
    assert "all-to-all" not in {c.kind for c in found}
    messages = [c.num_bytes for c in found if c.kind == "collective-permute"]
    whole = pipeline(name, sizes | {"fsdp": 1}).shards(batch)
    part = pipe.shards(batch)
    of_messages = [next(r.num_bytes for r in records if r.use == "messages") for records in (whole, part)]
    assert 2 * of_messages[1] == of_messages[0]
    assert messages and sum(set(messages)) <= of_messages[1]


@pytest.mark.exhaustive
def test_collectives_over_model():
    """One sum of an activation for each branch, forward and backward; nothing is gathered."""
    sizes = {"data": 1, "stage": 2, "fsdp": 1, "model": 2}
    _, found = program("transformer", sizes)
    assert {c.kind for c in found} == {"all-reduce", "collective-permute"}, found
    sums = [c for c in found if c.kind == "all-reduce"]
    of_activations = [c for c in sums if set(c.shapes) == {(B // N, T, 8)}]
    # Two programs of stages, with two branches each; the words of the embedding, and the gradient of the head's.
    assert len(of_activations) == 2 * 2 * 2 + 1 + 1


@pytest.mark.exhaustive
def test_collectives_of_sequence_parallelism():
    """Positions are gathered before a branch, and scattered after it; no matrix is gathered."""
    sizes = {"data": 1, "stage": 2, "fsdp": 1, "model": 2}
    _, found = program("transformer", sizes, axis_rules=SEQUENCE)
    gathers = [c for c in found if c.kind == "all-gather"]
    assert gathers and {s for c in gathers for s in c.shapes} == {(B // N, T, 8)}
    assert {c.kind for c in found} <= {"all-gather", "all-reduce", "reduce-scatter", "collective-permute"}  # fmt: skip
    messages = {c.shapes for c in found if c.kind == "collective-permute"}
    assert messages == {((1, B // N, T // 2, 8),)}


# -- Constraints in layers


class Loops(nnx.Module):
    """A layer whose loop and branch say how their values are split."""

    def __init__(self, *, rngs: nnx.Rngs):
        init = nnx.with_partitioning(nnx.initializers.normal(0.5), ("embed", "mlp"))
        self.up = nnx.Linear(4, 8, kernel_init=init, rngs=rngs)
        self.down = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):  # [B, T, 4] -> [B, T, 4]
        width = self.up.kernel[...].sum()

        def turn(x, _):
            x = linen.with_logical_constraint(x, ("batch", "length", None))
            x = jax.lax.cond(width > 0, jnp.tanh, lambda x: 0.9 * x, x)
            return jax.lax.fori_loop(0, 2, lambda i, x: 1.1 * x, x), None

        x, _ = jax.lax.scan(turn, x, None, length=2)
        x = x + self.down(jnp.tanh(self.up(x)))
        return linen.with_logical_constraint(x, ("batch", "length", "embed"))


@pytest.mark.exhaustive
def test_layers_with_loops_may_constrain_their_values():
    rng = np.random.default_rng(0)
    batch = {"inputs": rng.normal(size=(B, T, 4)).astype(np.float32)}
    with nnx.use_eager_sharding(False):
        model = oracles.PlainModel([Loops] * 4, KEY)
    losses, _, params = oracles.train(model, model.params, loss, SGD, [batch, batch])
    pipe = jpipe.Pipeline(
        [Loops] * 4,
        loss=loss,
        optimizer=SGD,
        schedule=jpipe.schedules.gpipe(2, N),
        mesh=jpipe.make_mesh(stage=2, fsdp=2, model=2),
        axis_rules=SEQUENCE,
    )
    assert_equal_training(trained(pipe, [batch, batch]), (losses, params))
    messages = {r.use: r for r in pipe.shards(batch)}["messages"]
    assert messages.split == {"stage": 1.0, "fsdp": 1.0, "model": 1.0}
