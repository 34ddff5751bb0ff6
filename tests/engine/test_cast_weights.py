"""Weights that are cast once between two updates: see `jpipe.engine.cast_weights`.

Weights are float64 and layers compute in float32: XLA never leaves out this cast, as it may that to bfloat16.
"""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import FAMILIES, Family, cross_entropy, schedule_named
from flax import nnx
from helpers import assert_close

import jpipe
from jpipe.engine import cast_weights, stage_weights
from jpipe.gradients import apart
from jpipe.lowering.target import CPU, GPU, TARGETS
from jpipe.optim import correct_discrepancy, corrected_params
from jpipe.packing import Part
from models import MLP

exhaustive = functools.partial(pytest.param, marks=pytest.mark.exhaustive)
FAMILY = FAMILIES["mlp"].in_dtype("float64")
EQUAL = Family(MLP(num_inputs=8, widths=(8,) * 5, num_outputs=8).layers(), (8,)).in_dtype("float64")
KEY = jax.random.key(0)
N = 4
CASES = [
    # schedule, stages, options
    ("one_f_one_b", 3, {}),
    ("pipemare/paired", 3, {"backward_params": corrected_params}),
    ("pipedream/unit", 3, {}),
    ("gpipe", 2, {"ties": [[(1, "linear.kernel"), (3, "linear.kernel")]]}),
    exhaustive("zero_bubble_h1", 3, {}),
    exhaustive("gpipe", 2, {"trainable": lambda path, _: "bias" in path}),
    exhaustive("interleaved", 2, {}),
    exhaustive("pipedream_2bw/unit", 3, {}),
    exhaustive("pipemare/unit", 3, {}),
    exhaustive("pipedream/2-1", 2, {}),
    exhaustive("pipemare/paired", 2, {"ties": [[(1, "linear.kernel"), (2, "linear.kernel")]]}),
    exhaustive("one_f_one_b", 2, {"mesh": {"fsdp": 2}}),
    exhaustive("pipedream_2bw/paired", 2, {"mesh": {"data": 2}, "shard_optimizer": True}),
]


def named(value):
    """A part of the name of a case, the same in every process."""
    if isinstance(value, Family):
        return "equal" if value is EQUAL else "unlike"
    return " ".join(value) if isinstance(value, dict) else str(value)


def pipeline(schedule, num_stages, mesh=None, family=FAMILY, **options):
    table = schedule_named(schedule, num_stages, N)
    if mesh is not None:
        options["mesh"] = jpipe.make_mesh(stage=table.num_devices, **mesh)
    optimizer = optax.chain(optax.sgd(0.2, momentum=0.5))
    if "backward_params" in options:
        optimizer = optax.chain(optimizer, correct_discrepancy(0.5))
    return jpipe.Pipeline(
        family.layers,
        loss=cross_entropy,
        optimizer=optimizer,
        schedule=table,
        **{"compute_dtype": jnp.float32, **options},
    )


def num_rows(options):
    """Rows of a batch: two to a microbatch of each replica."""
    return 2 * N * options.get("mesh", {}).get("data", 1)


def trained(monkeypatch, casts_once, *case, target=CPU, family=FAMILY):
    """The losses of a few steps, and the weights after them."""
    schedule, num_stages, options = case
    monkeypatch.setitem(TARGETS, "cpu", dataclasses.replace(target, casts_once=casts_once))
    pipe = pipeline(schedule, num_stages, family=family, **options)
    batches = family.batches(5, num_rows(options))
    state, losses = pipe.init(KEY, batches[0]), []
    for batch in batches:
        state, metrics = pipe.step(state, batch)
        losses.append(np.asarray(metrics["loss"]))
    if not pipe.schedule.synchronous:
        state, _ = pipe.flush(state)
    losses.append(np.asarray(pipe.evaluate(state, batches[0])["loss"]))
    return np.array(losses), pipe.get_params(state), pipe


@pytest.mark.first_case
@pytest.mark.parametrize("schedule, num_stages, options", CASES, ids=named)
@pytest.mark.filterwarnings("ignore:.*bubble", "ignore:.*stages hold")
def test_training_is_that_of_casts_in_every_layer(schedule, num_stages, options, monkeypatch):
    with jax.enable_x64(True):
        case = schedule, num_stages, options
        want_losses, want, _ = trained(monkeypatch, False, *case)
        losses, params, pipe = trained(monkeypatch, True, *case)
        first = pipe.get_params(pipe.init(KEY, FAMILY.batches(1, 2 * N)[0]))
    np.testing.assert_allclose(losses, want_losses, rtol=1e-6)
    assert_close(params, jax.tree.map(np.asarray, want), "float32")
    moved = max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (first, params)), strict=True))
    assert moved > 1e-2  # a stale cast would show


UNROLLED = dataclasses.replace(GPU, compiler_options={}, profiled_options={})


def spec_of_equal_training(monkeypatch, *case, family, targets, small=8):
    """The pass of a pipeline that casts once, with the facts of the second target. It trains as one that casts in every
    layer, with the facts of the first. Weights of up to `small` numbers are small.
    """
    for module in (cast_weights, stage_weights):
        monkeypatch.setattr(module, "SMALL", small)
    with jax.enable_x64(True):
        want_losses, want, _ = trained(monkeypatch, False, *case, target=targets[0], family=family)
        losses, params, pipe = trained(monkeypatch, True, *case, target=targets[1], family=family)
        np.testing.assert_allclose(losses, want_losses, rtol=1e-6)
        assert_close(params, jax.tree.map(np.asarray, want), "float32")
        return pipe._program(family.batches(1, num_rows(case[2]))[0]).engine


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "schedule, num_stages, options, family",
    [
        ("one_f_one_b", 3, {}, EQUAL),
        ("pipedream/unit", 3, {}, FAMILY),
        exhaustive("pipedream/unit", 3, {}, EQUAL),
        exhaustive("interleaved", 2, {}, EQUAL),
        exhaustive("pipedream_2bw/paired", 2, {"mesh": {"data": 2}, "shard_optimizer": True}, EQUAL),
        exhaustive("pipemare/paired", 2, {"ties": [[(1, "linear.kernel"), (2, "linear.kernel")]]}, EQUAL),
        exhaustive("one_f_one_b", 2, {"mesh": {"fsdp": 2}}, EQUAL),
        exhaustive("zero_bubble_h1", 3, {}, FAMILY),
        exhaustive("gpipe", 2, {"trainable": lambda path, _: "bias" in path}, EQUAL),
    ],
    ids=named,
)
@pytest.mark.filterwarnings("ignore:.*bubble", "ignore:.*stages hold")
def test_copies_of_each_weight_are_those_of_all(schedule, num_stages, options, family, monkeypatch):
    """Where layers are unrolled, each weight may have a copy of its own."""
    spec = spec_of_equal_training(monkeypatch, schedule, num_stages, options, family=family, targets=[UNROLLED] * 2)
    assert any(len(parts) > 1 for parts in cast_weights.parts_with_copies(spec).values())


@pytest.mark.first_case
@pytest.mark.parametrize(
    "schedule, num_stages, options, family",
    [
        ("one_f_one_b", 2, {}, EQUAL),
        ("pipedream/unit", 2, {}, FAMILY),
        exhaustive("one_f_one_b", 2, {"compute_dtype": None}, EQUAL),
        exhaustive("interleaved", 2, {}, EQUAL),
        exhaustive("zero_bubble_h1", 2, {"recompute": "full"}, EQUAL),
        exhaustive("pipedream_2bw/paired", 2, {}, EQUAL),
        exhaustive("pipemare/unit", 2, {"backward_params": corrected_params}, FAMILY),
        exhaustive("one_f_one_b", 2, {"mesh": {"fsdp": 2, "data": 2}, "shard_optimizer": True}, EQUAL),
        exhaustive("gpipe", 2, {"ties": [[(1, "linear.kernel"), (3, "linear.kernel")]]}, FAMILY),
        exhaustive("one_f_one_b", 2, {"offload": jpipe.Offload(weights=1.0, required=False)}, EQUAL),
    ],
    ids=named,
)
@pytest.mark.filterwarnings("ignore:.*bubble", "ignore:.*stages hold")
def test_weights_that_a_pass_reads_first_are_gathered_once(schedule, num_stages, options, family, monkeypatch):
    options = {"mesh": {"fsdp": 2}, **options}
    trainings = []
    with jax.enable_x64(True):
        for gathers_first_once in (False, True):
            target = dataclasses.replace(UNROLLED, gathers_first_once=gathers_first_once)
            losses, params, pipe = trained(
                monkeypatch, True, schedule, num_stages, options, target=target, family=family
            )
            spec = pipe._program(family.batches(1, 4 * N)[0]).engine
            whole = [part for parts in cast_weights.parts_with_copies(spec).values() for part in parts if part.spec]
            trainings.append((losses, jax.tree.map(np.asarray, params), len(whole)))
    (want_losses, want, before), (losses, params, after) = trainings
    assert before == 0 and bool(after) == ("offload" not in options)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-6)
    assert_close(params, want, "float32")


def test_no_gather_comes_first_in_a_tick(monkeypatch):
    """Of three layers a forward and a backward gather the one in the middle."""
    monkeypatch.setattr(cast_weights, "SMALL", 8)

    def gathers_of(gathers_first_once, stages=2):
        target = dataclasses.replace(UNROLLED, gathers_first_once=gathers_first_once)
        monkeypatch.setitem(TARGETS, "cpu", target)
        layers = [lambda rngs: nnx.Linear(16, 16, use_bias=False, rngs=rngs)] * 3 * stages
        pipe = jpipe.Pipeline(
            layers,
            loss=lambda y, _: y.mean(),
            optimizer=optax.sgd(0.1),
            schedule=jpipe.schedules.one_f_one_b(stages, N),
            mesh=jpipe.make_mesh(stage=stages, fsdp=2),
        )
        text = pipe.compile({"inputs": np.ones((2 * N, 16), np.float32)}).as_text()
        gathers = [line for line in text.splitlines() if "all-gather(" in line and "16,16]" in line]
        return [sum(f"/{name}/stage" in line for line in gathers) for name in ("forward", "backward")]

    assert gathers_of(False) == [6, 5]  # of two stages; nobody needs the gradient by the inputs of the model
    assert gathers_of(True) == [2, 2]


@pytest.mark.first_case
@pytest.mark.parametrize(
    "schedule, num_stages, options, family",
    [
        ("interleaved", 2, {}, EQUAL),
        ("pipedream_2bw/unit", 3, {}, FAMILY),
        exhaustive("zero_bubble_v", 2, {}, EQUAL),
        exhaustive("zero_bubble_v", 2, {}, FAMILY),
        exhaustive("v", 2, {}, FAMILY),
        exhaustive("two-columns", 2, {}, FAMILY),
        exhaustive("interleaved", 2, {"recompute": "full"}, EQUAL),
        exhaustive("interleaved", 2, {"mesh": {"fsdp": 2}}, EQUAL),
        exhaustive("interleaved", 2, {"compute_dtype": None}, EQUAL),
        exhaustive("pipedream_2bw/paired", 2, {}, EQUAL),
        exhaustive("pipedream_2bw/unit", 3, {"compute_dtype": None}, EQUAL),
        exhaustive("pipedream_2bw/unit", 2, {"mesh": {"data": 2}, "shard_optimizer": True}, EQUAL),
        exhaustive("pipedream_2bw/unit", 2, {"mesh": {"fsdp": 2}}, EQUAL),
        exhaustive("pipedream_2bw/unit", 2, {"ties": [[(1, "linear.kernel"), (2, "linear.kernel")]]}, EQUAL),
        exhaustive("pipedream_2bw/unit", 2, {"trainable": lambda path, _: "bias" in path}, EQUAL),
        exhaustive("pipedream/unit", 2, {}, FAMILY),
        exhaustive("pipedream/2-1", 2, {}, FAMILY),
    ],
    ids=named,
)
@pytest.mark.filterwarnings("ignore:.*bubble", "ignore:.*stages hold")
def test_copies_of_rows(schedule, num_stages, options, family, monkeypatch):
    """Copies of the stages of a device, or of two versions of a stage, lie apart, and layers read them there."""
    monkeypatch.setattr(apart, "SMALL", 8)
    targets = CPU, dataclasses.replace(UNROLLED, sums_apart=True)
    spec = spec_of_equal_training(monkeypatch, schedule, num_stages, options, family=family, targets=targets)
    assert spec.rows_apart


@pytest.mark.parametrize(
    "schedule, num_stages, options, family",
    [
        ("pipedream_2bw/paired", 2, {}, FAMILY),
        exhaustive("one_f_one_b", 3, {}, FAMILY),
        exhaustive("interleaved", 2, {}, FAMILY),
        exhaustive("interleaved", 2, {}, EQUAL),
        exhaustive("zero_bubble_v", 2, {}, EQUAL),
        exhaustive("pipedream_2bw/unit", 3, {}, EQUAL),
        exhaustive("pipedream/2-1", 2, {}, FAMILY),
        exhaustive("pipedream/unit", 3, {}, FAMILY),
        exhaustive("pipemare/paired", 3, {"backward_params": corrected_params}, FAMILY),
        exhaustive("pipemare/paired", 2, {"ties": [[(1, "linear.kernel"), (2, "linear.kernel")]]}, EQUAL),
        exhaustive("pipedream_2bw/paired", 2, {"mesh": {"data": 2}, "shard_optimizer": True}, EQUAL),
    ],
    ids=named,
)
@pytest.mark.filterwarnings("ignore:.*bubble", "ignore:.*stages hold")
def test_copies_of_small_weights(schedule, num_stages, options, family, monkeypatch):
    """Each weight of any stage has a copy, which may overlap another, if its row is known; else a pass casts it."""
    targets = CPU, dataclasses.replace(UNROLLED, sums_apart=True)
    case = schedule, num_stages, options
    spec = spec_of_equal_training(monkeypatch, *case, family=family, targets=targets, small=2**14)
    parts = {part for parts in cast_weights.parts_with_copies(spec).values() for part in parts}
    leaves = {
        Part.of_leaf(place, i).as_stored
        for program in spec.stages.programs
        for run in program.runs
        for place in run.parameters
        for i in range(run.longest)
    }
    assert (leaves <= {part.as_stored for part in parts}) == (spec.rows.num_rows == 1 or spec.rows_apart)


def test_few_versions_have_branches(monkeypatch):
    """A stage with three versions of its weights would be compiled three times."""
    monkeypatch.setitem(TARGETS, "cpu", dataclasses.replace(UNROLLED, sums_apart=True))
    rows_of_branches = {}
    for num_microbatches in (1, 4):
        pipe = jpipe.Pipeline(
            FAMILY.layers,
            loss=cross_entropy,
            optimizer=optax.sgd(0.1),
            schedule=jpipe.schedules.pipedream(3, num_microbatches, ticks="unit"),
        )
        spec = pipe._program(FAMILY.batches(1, 2 * num_microbatches)[0]).engine
        rows_of_branches[spec.rows.num_rows] = [branch.row for branch in spec.branches.forward]
    assert rows_of_branches == {2: [0, 1, 0, 1, 0], 3: []}


def test_which_weights_have_copies(monkeypatch):
    """Those that most stages have at the same indices, one copy of all others, and each small one."""
    monkeypatch.setattr(cast_weights, "SMALL", 8)
    monkeypatch.setitem(TARGETS, "cpu", UNROLLED)

    def parts_of(widths, num_stages=2, **options):
        layers = [lambda rngs, n=n, m=m: nnx.Linear(n, m, rngs=rngs) for n, m in itertools.pairwise(widths)]
        table = jpipe.schedules.gpipe(num_stages, N)
        pipe = jpipe.Pipeline(
            layers,
            loss=lambda y, _: y.mean(),
            optimizer=optax.sgd(0.1),
            schedule=table,
            compute_dtype=jnp.bfloat16,
            **options,
        )
        spec = pipe._program({"inputs": np.ones((N, widths[0]), np.float32)}).engine
        ((name, members),) = cast_weights.parts_with_copies(spec).items()
        (size,) = spec.stages.parameters.arrays[name].shape
        return size, [(part.start, part.stop) for part in members]

    size, members = parts_of([4] * 5)
    assert size == 2 * (16 + 4)
    assert [stop - start for start, stop in members] == [4, 4, 16, 16]  # biases of 4 are small
    # Two stages have three layers of 4 x 4. The ends have two, beside one of 12 x 4, or of 4 x 12.
    size, members = parts_of([12, *[4] * 11, 12], 4, boundaries=[3, 6, 9])
    assert size == 2 * (4 + 16) + 12 + 48  # the last stage
    small = [(a, b) for a, b in members if b - a <= 8]
    assert small == sorted(set(small)) and {b - a for a, b in small} == {4}  # of any stage, wherever they lie
    *alone, (start, stop) = members[len(small) :]
    assert [start % 20 for start, _ in alone] == [alone[0][0]] * 3  # in all middle stages, and two in all
    assert {b - a for a, b in alone} == {16} and alone[2][1] <= 60
    assert 40 <= start <= 44 and stop == size  # 48 of either end


class Casting(nnx.Module):
    """A layer that casts its matrix by itself, and may read it as it is, too."""

    def __init__(self, reads_whole=False, *, rngs):
        self.linear = nnx.Linear(8, 8, dtype="float32", param_dtype="float64", rngs=rngs)
        self.scale = nnx.Param(jnp.ones(8, "float64"))
        self.reads_whole = reads_whole

    def __call__(self, x):
        y = jnp.tanh(self.linear(x)) * self.scale[...].astype("float32")[None]
        if self.reads_whole:
            kernel = self.linear.kernel[...]
            y = y + (1e6 * (kernel - kernel.astype("float32")).sum()).astype("float32")  # nothing, of a copy
        return x + y + self.scale[...].sum().astype("float32")


def casting(*whole):
    return Family([functools.partial(Casting, reads_whole) for reads_whole in whole], (8,))


@pytest.mark.first_case
@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.parametrize("target", [CPU, UNROLLED], ids=["rolled", "unrolled"])
@pytest.mark.parametrize(
    "schedule, num_stages, options, whole",
    [
        ("one_f_one_b", 2, {}, [False] * 4),
        ("pipedream/unit", 2, {}, [False, False, True, False]),
        exhaustive("gpipe", 2, {}, [True, False, False, True]),
        exhaustive("interleaved", 2, {}, [False] * 4),
        exhaustive("zero_bubble_h1", 2, {"mesh": {"fsdp": 2}}, [False, True, False, False]),
    ],
    ids=str,
)
def test_layers_that_cast_by_themselves(schedule, num_stages, options, whole, target, monkeypatch):
    """Their weights have copies where nothing reads them as they are."""
    for module in (cast_weights, stage_weights):
        monkeypatch.setattr(module, "SMALL", 8)
    with jax.enable_x64(True):
        case = schedule, num_stages, {**options, "compute_dtype": None}
        want_losses, want, _ = trained(monkeypatch, False, *case, target=target, family=casting(*whole))
        losses, params, pipe = trained(monkeypatch, True, *case, target=target, family=casting(*whole))
        spec = pipe._program(casting(*whole).batches(1, 2 * N)[0]).engine
    np.testing.assert_allclose(losses, want_losses, rtol=1e-6)
    assert_close(params, jax.tree.map(np.asarray, want), "float32")
    # Kernels and biases are cast alone; the scale is cast, and read as it is, in every layer.
    dtypes = {kind.read_dtypes for kind in spec.stages.layer_kinds}
    assert {tuple(map(str, d)) for d in dtypes} == {
        ("float32", "float64" if reads_whole else "float32", "float64") for reads_whole in whole
    }


@pytest.mark.first_case
@pytest.mark.parametrize("casts_once", [True, False])
def test_ticks_read_what_is_cast(casts_once, monkeypatch):
    with jax.enable_x64(True):
        monkeypatch.setitem(TARGETS, "cpu", dataclasses.replace(CPU, casts_once=casts_once))
        pipe = pipeline("one_f_one_b", 2)
        batch = FAMILY.batches(1, 2 * N)[0]
        text = pipe.compile(batch).as_text()
    casts = re.findall(r"= f32\S* convert\(.*", text)
    in_ticks = [line for line in casts if "while/body" in line and "/forward/" in line]
    assert bool(in_ticks) != casts_once, in_ticks
    assert any("while/body" not in line for line in casts) == casts_once
