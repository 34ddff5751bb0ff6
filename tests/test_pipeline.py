"""The face: what it accepts, what it refuses and how, what it says a model costs."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import HAND_WRITTEN
from flax import nnx
from helpers import assert_close, refused
from jax.sharding import AxisType, Mesh

import jpipe
from jpipe.program import Program
from jpipe.schedules import forward_only, gpipe, one_f_one_b, pipemare

LINEAR = functools.partial(nnx.Linear, 4, 4)
KEY = jax.random.key(0)


def squares(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def batch_of(size, seed=0):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=(size, 4)).astype(np.float32) for k in ("inputs", "targets")}


def make(layers=(LINEAR,) * 4, **options):
    defaults = dict(loss=squares, optimizer=optax.sgd(0.1, momentum=0.9), schedule=gpipe(2, 2))
    return jpipe.Pipeline(layers, **{**defaults, **options})


def linear(seed=0):
    return nnx.Linear(4, 4, rngs=nnx.Rngs(seed))


def test_compilations_are_seen():
    with pytest.raises(AssertionError), refused("late"):
        jax.jit(lambda x: x * 3 + 1)(np.float32(1)).block_until_ready()
        raise ValueError("late")


# -- Arguments ------------------------------------------------------------------------


def broken_table():
    return jpipe.Schedule.from_text(HAND_WRITTEN.replace("F2     B0", "F2     B1", 1))


def sharded(shape, axes):
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes))


def fails(rngs):
    raise RuntimeError("out of luck")


def returns_a_number(rngs):
    return 3


WRONG_ARGUMENTS = {
    "schedule named": (
        lambda: dict(schedule="gpipe"),
        r"`schedule` must be a `jpipe.Schedule`, got 'gpipe'.*Make one",
    ),
    "schedule not called": (
        lambda: dict(schedule=gpipe),
        "`schedule` must be a `jpipe.Schedule`, got",
    ),
    "schedule forward-only": (
        lambda: dict(schedule=forward_only(2, 2)),
        "'forward_only' is forward-only",
    ),
    "schedule broken": (
        lambda: dict(schedule=broken_table()),
        "backward 1 .*\n(.*\n)*.*<-- here",
    ),
    "loss": (
        lambda: dict(loss="mse"),
        r"`loss` must be a function `\(outputs, batch\) -> scalar`, got str",
    ),
    "optimizer not called": (
        lambda: dict(optimizer=optax.sgd),
        "`optimizer` must be an Optax transformation, .*got function.*call it with its learning rate",
    ),
    "optimizer of NNX": (
        lambda: dict(optimizer=nnx.Optimizer(linear(), optax.sgd(0.1), wrt=nnx.Param)),
        r"got Optimizer. Give .*optimizer\.tx",
    ),
    "optimizer a number": (
        lambda: dict(optimizer=0.1),
        "`optimizer` must be an Optax transformation, .*got float",
    ),
    "donate a text": (lambda: dict(donate="no"), "`donate` must be True or False, got 'no'"),
    "has_aux a text": (lambda: dict(has_aux="no"), "`has_aux` must be True or False, got 'no'"),
    "compute_dtype misspelt": (
        lambda: dict(compute_dtype="bf16"),
        "`compute_dtype` must be .*got 'bf16'",
    ),
    "compute_dtype of integers": (
        lambda: dict(compute_dtype=np.int32),
        "`compute_dtype` must be .*int32",
    ),
    "recompute misspelt": (
        lambda: dict(recompute="ful"),
        "`recompute` must be .*got 'ful'",
    ),
    "recompute a truth": (
        lambda: dict(recompute=True),
        "`recompute` must be .*got True",
    ),
    "more stages than layers": (
        lambda: dict(schedule=gpipe(5, 5)),
        "5 stages needs at least as many layers, got 4. Use `num_stages=4` or fewer",
    ),
    "boundaries too few": (
        lambda: dict(boundaries=[]),
        r"`boundaries` must hold 1 .*got \[\]",
    ),
    "boundaries from zero": (
        lambda: dict(boundaries=[0, 2]),
        r"`boundaries` must hold 1 .*got \[0, 2\]",
    ),
    "boundaries fall": (
        lambda: dict(schedule=gpipe(3, 3), boundaries=[3, 2]),
        r"`boundaries` must rise within 1..3 .*got \[3, 2\]: stage 1 would hold",
    ),
    "boundaries at the end": (
        lambda: dict(boundaries=[4]),
        r"`boundaries` must rise within 1..3 .*stage 1 would",
    ),
    "boundaries at the start": (
        lambda: dict(boundaries=[0]),
        r"`boundaries` must rise within 1..3 .*stage 0 would",
    ),
    "boundaries negative": (
        lambda: dict(boundaries=[-1]),
        r"`boundaries` must rise within 1..3",
    ),
    "boundaries a number": (lambda: dict(boundaries=2), "`boundaries` must .*got 2"),
    "boundaries a word": (
        lambda: dict(boundaries="auto"),
        "`boundaries` must .*got 'auto'",
    ),
    "boundaries a fraction": (
        lambda: dict(boundaries=[1.5]),
        r"`boundaries` must .*got \[1.5\]",
    ),
    "mesh without stages": (
        lambda: dict(mesh=sharded((2,), ("data",))),
        "`mesh` must have an axis \"stage\", got axes {'data': 2}. Make it with",
    ),
    "mesh too large": (
        lambda: dict(mesh=jpipe.make_mesh(stage=4)),
        r"must have the 2 devices .*got 4. Use",
    ),
    "mesh a number": (lambda: dict(mesh=2), "`mesh` must be .*got int"),
    "mesh of devices": (
        lambda: dict(mesh=jax.devices()[:2]),
        "`mesh` must be .*got list",
    ),
    "layers one number": (
        lambda: dict(layers=4),
        "`layers` must be a sequence of layers, got int",
    ),
    "layers a generator": (
        lambda: dict(layers=(x for x in [LINEAR] * 4)),
        "must be a sequence of layers, got generator",
    ),
    "layers by name": (lambda: dict(layers={"a": LINEAR}), "`layers` must be a sequence of layers, got dict"),
    "layers empty": (
        lambda: dict(layers=[]),
        "`layers` must hold at least one layer, got none",
    ),
    "layer nothing": (
        lambda: dict(layers=[LINEAR, None]),
        "layer 1 must be a Flax module, a factory .*got NoneType",
    ),
    "layer a class": (
        lambda: dict(layers=[LINEAR, nnx.Linear]),
        "layer 1: `nnx.Linear` needs `in_features`",
    ),
    "factory that fails": (
        lambda: dict(layers=[LINEAR, fails]),
        r"layer 1 could not be built by `factory.rngs=....`: out of luck",
    ),
    "factory of numbers": (
        lambda: dict(layers=[LINEAR, returns_a_number]),
        "layer 1: the factory must return a Flax NNX module, got int",
    ),
}


@pytest.mark.filterwarnings("ignore:.*bubble")
@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_wrong_arguments(name):
    options, message = WRONG_ARGUMENTS[name]
    options = options()
    with refused(message):
        make(**options)


def test_integer_parameters_have_no_gradient():
    class Counts(nnx.Module):
        def __init__(self, rngs):
            self.counts = nnx.Param(jnp.arange(3))

        def __call__(self, x):
            return x

    pipe = make([LINEAR, Counts])
    with refused(r"layer 1 \(Counts\): parameter 'counts' has dtype int32, which has no gradient"):
        pipe.init(KEY, batch_of(4))


def test_function_takes_a_callable():
    with refused("`jpipe.Function` takes a callable, got int"):
        jpipe.Function(3)


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (0, "`stage` must be .*at least 1, got 0"),
        (9, 'needs 9 devices, got 8 .*jax_num_cpu_devices", 9'),
        (2.5, "`stage` must be .*got 2.5"),
        ("2", "`stage` must be .*got '2'"),
    ],
)
def test_wrong_meshes(stage, message):
    with refused(message):
        jpipe.make_mesh(stage=stage)


def test_too_few_devices_are_noticed_when_the_pipeline_makes_the_mesh():
    with refused('needs 9 devices, got 8 .*jax_num_cpu_devices", 9'):
        make([LINEAR] * 9, schedule=gpipe(9, 9))
    with refused("needs 2 devices, got 1"):
        jpipe.make_mesh(stage=2, devices=jax.devices()[:1])
    with refused("needs 2 devices, got 0"):
        jpipe.make_mesh(stage=2, devices=[])


# -- Batches and losses ---------------------------------------------------------------

WRONG_BATCHES = {
    "not divisible": (
        batch_of(7),
        "batch of 7 cannot be cut into 2 equal microbatches. Use a batch of 6 or 8",
    ),
    "too small": (
        batch_of(1),
        "batch of 1 cannot be cut into 2 equal microbatches. Use a batch of 2",
    ),
    "empty": (batch_of(0), "the batch is empty: give at least one row"),
    "unequal": (
        {"inputs": batch_of(4)["inputs"], "targets": batch_of(2)["targets"]},
        "must have the same leading axis, the minibatch, got {.*inputs.*: 4.*targets.*: 2}",
    ),
    "a tuple": (
        tuple(batch_of(4).values()),
        '`batch` must be a dict .*"inputs".*got tuple',
    ),
    "an array": (
        batch_of(4)["inputs"],
        '`batch` must be a dict .*"inputs".*got ndarray',
    ),
    "no inputs": (
        {"x": batch_of(4)["inputs"]},
        r"""`batch` must be a dict .*"inputs".*got \['x'\]""",
    ),
    "a scalar": (
        {**batch_of(4), "epoch": 3},
        r"`batch\['epoch'\]` must be an array .*got 3. Repeat what is the same for all rows",
    ),
    "a scalar array": (
        {**batch_of(4), "epoch": np.float32(3)},
        r"`batch\['epoch'\]` must be an array",
    ),
    "a list": (
        {**batch_of(4), "ids": [1, 2, 3, 4]},
        r"`batch\['ids'\]\[0\]` must be an array .*got 1. Convert lists with `np.asarray`",
    ),
    "a number as name": (
        {**batch_of(4), 3: batch_of(4)["targets"]},
        r"entries of `batch` must have texts as names, got \['inputs', 'targets', 3\]",
    ),
    "text": (
        {**batch_of(4), "name": np.array(["a"] * 4)},
        r"`batch\['name'\]` .*dtype",
    ),
    "a view of memory": (
        {"inputs": memoryview(np.zeros((4, 4), np.float32))},
        r"`batch\['inputs'\]` must be an array .*got <memory",
    ),
    "nothing": (
        {"inputs": None, "targets": batch_of(4)["targets"]},
        r"""`batch\["inputs"\]` must hold an array, .*got None""",
    ),
    "too wide": (
        {
            "inputs": np.zeros((4, 3), np.float32),
            "targets": np.zeros((4, 4), np.float32),
        },
        r"layer 0 \(Linear\) cannot take float32\[2, 3\]",
    ),
}


@pytest.mark.parametrize("name", WRONG_BATCHES)
def test_wrong_batches(name):
    batch, message = WRONG_BATCHES[name]
    pipe = make()
    for ask in (lambda b: pipe.init(KEY, b), pipe.partition, pipe.memory, pipe.compile):
        with refused(message):
            ask(batch)


def test_a_layer_that_cannot_take_its_input_is_named():
    with refused(r"layer 2 \(Linear\) cannot take float32\[1, 4\]: "):
        make([LINEAR, LINEAR, functools.partial(nnx.Linear, 5, 4)]).init(KEY, batch_of(2))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda y, b: jnp.mean((y - b["targets"]) ** 2, axis=1),
            r"floating-point scalar.*got float32\[1\]",
        ),
        (lambda y, b: (jnp.mean(y), y), "floating-point scalar.*got "),
        (lambda y, b: (jnp.mean(y),), "floating-point scalar.*got "),
        (lambda y, b: jnp.sum(y > 0), "floating-point number, got dtype int32"),
        (lambda y, b: jnp.sum(y * 1j), "real number, got dtype complex64.*jnp.abs"),
        (lambda y, b: (jnp.sum(y), jnp.sum(b["targets"] * 1j)), "real number, got dtype complex64"),
        (lambda y, b: None, "floating-point scalar.*got None"),
        (lambda y, b: jnp.mean((y - b["labels"]) ** 2), "`loss.*microbatch.*labels"),
        (lambda y: jnp.mean(y), "`loss.*positional argument"),
        (jpipe.WholeBatchLoss, r"got the class WholeBatchLoss. Give an object of it, such as `WholeBatchLoss\(...\)`"),
    ],
    ids=[
        "a sample",
        "with extras",
        "in a tuple",
        "integer",
        "complex",
        "complex weight",
        "nothing",
        "wrong entry",
        "one argument",
        "class",
    ],
)
def test_wrong_losses(loss, message):
    with refused(message):
        make(loss=loss).init(KEY, batch_of(2))


@pytest.mark.parametrize("key", [0, None, nnx.Rngs(0)], ids=["seed", "none", "rngs"])
def test_wrong_keys(key):
    with refused("`key` must be .*jax.random.key"):
        make().init(key, batch_of(2))


# -- Parameters and states ------------------------------------------------------------


@pytest.fixture(scope="module")
def pipe():
    return make(boundaries=[2])


@pytest.fixture(scope="module")
def params(pipe):
    return pipe.get_params(pipe.init(KEY, batch_of(4)))


def changed(params, **entries):
    return [*params[:3], {**params[3], **entries}]


def test_wrong_params(pipe, params):
    for wrong, message in (
        (params[:3], r"one entry per layer \(4\), got 3"),
        (
            changed(params, kernel=np.zeros((4, 5), np.float32)),
            r"layer 3 \(Linear\) do not fit: \['kernel'\] should be float32\[4, 4\], got float32\[4, 5\]",
        ),
        (
            changed(params, kernel=np.zeros((4, 4), np.float16)),
            r"\['kernel'\] should be float32\[4, 4\], got float16",
        ),
        (
            changed(params, scale=np.zeros(4, np.float32)),
            r"\['scale'\] should be absent",
        ),
        (changed(params, bias=[0.0] * 4), r"layer 3 .*\['bias'\]\S* should be "),
        (pipe.init(KEY, batch_of(4)), "`params` must .*got PipelineState"),
        (
            [*params[:3], {"kernel": params[3]["kernel"]}],
            r"\['bias'\] should be float32\[4\], got nothing",
        ),
    ):
        with refused(message):
            pipe.init(KEY, batch_of(4), params=wrong)


def test_wrong_states(pipe, params):
    batch = batch_of(4)
    state = pipe.init(KEY, batch)
    with refused("`state` must be the state that `init` or `step` returned, got dict"):
        pipe.step(batch, state)
    with refused("`state` must be .*got list"):
        pipe.predict(params, batch)
    with refused("microbatches of .*float32.2, 4.*got .*mask.*the entries differ"):
        pipe.step(state, batch | {"mask": np.ones(4)})
    with refused(r"`state` was made by another pipeline.*\n?.*adopt"):
        make(boundaries=[1]).step(state, batch)
    after, _ = pipe.step(state, batch)
    for use in (
        pipe.get_params,
        lambda s: pipe.step(s, batch),
        lambda s: pipe.predict(s, batch),
    ):
        with refused("`state` was donated to an earlier `step`.*Keep the state that step returned"):
            use(state)
    for wrong in ({"targets": batch["targets"]}, batch["inputs"]):
        with refused('`batch` must be a dict .*"inputs"'):
            pipe.predict(after, wrong)
    for wrong in (np.float32(3), 3.0, [[1.0] * 4]):
        with refused(r"`batch\['inputs'\]\S* must be an array"):
            pipe.predict(after, {"inputs": wrong})


def test_params_have_the_modules_names_and_live_on_the_host(params):
    assert [sorted(layer) for layer in params] == [["bias", "kernel"]] * 4
    for leaf in jax.tree.leaves(params):
        assert isinstance(leaf, np.ndarray) and leaf.dtype == np.float32
        leaf += 1  # and are the caller's own


def test_nested_modules_have_nested_params():
    class Pair(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = LINEAR(rngs=rngs), LINEAR(rngs=rngs)

        def __call__(self, x):
            return self.second(self.first(x))

    pipe = make([Pair, jpipe.Function(jnp.tanh)])
    state = pipe.init(KEY, batch_of(2))
    shapes = jax.tree.map(lambda a: a.shape, pipe.get_params(state))
    one = {"kernel": (4, 4), "bias": (4,)}
    assert shapes == [{"first": one, "second": one}, {}]


def test_modules_keep_their_weights():
    modules = [linear(seed) for seed in range(3)]
    pipe = make([*modules, LINEAR])
    params = pipe.get_params(pipe.init(KEY, batch_of(2)))
    for module, layer in zip(modules, params):
        np.testing.assert_array_equal(layer["kernel"], module.kernel[...])
    other = pipe.get_params(pipe.init(jax.random.key(1), batch_of(2)))
    for i, same in enumerate([True, True, True, False]):  # a factory's depend on the key
        assert (other[i]["kernel"] == params[i]["kernel"]).all() == same


# -- Training -------------------------------------------------------------------------


def test_functions_and_uneven_predictions():
    """tanh(x W + b) by hand, for every size around the number of microbatches."""
    pipe = make([LINEAR, jpipe.Function(jnp.tanh)], schedule=gpipe(2, 3))
    state = pipe.init(KEY, batch_of(3))
    w = pipe.get_params(state)[0]
    for size in (1, 3, 5):
        x = batch_of(size)["inputs"]
        outputs = pipe.predict(state, {"inputs": x})
        np.testing.assert_allclose(outputs, np.tanh(x @ w["kernel"] + w["bias"]), rtol=1e-5, atol=1e-6)


def losses(pipe, state, seeds):
    found = []
    for seed in seeds:
        state, metrics = pipe.step(state, batch_of(6, seed))
        found.append(float(metrics["loss"]))
    return state, found


def test_training_goes_on_at_another_number_of_stages():
    options = dict(optimizer=optax.sgd(0.1))
    two = make(schedule=gpipe(2, 2), boundaries=[1], **options)
    three = make(schedule=one_f_one_b(3, 3, ticks="unit"), boundaries=[1, 2], **options)
    state, _ = losses(two, two.init(KEY, batch_of(6)), [0, 1])
    moved = three.init(jax.random.key(5), batch_of(6), params=two.get_params(state))
    _, want = losses(two, state, [2, 3, 4])
    _, got = losses(three, moved, [2, 3, 4])
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert want[0] != want[1]


def test_flush_of_a_synchronous_pipeline_changes_nothing(pipe):
    state = pipe.init(KEY, batch_of(4))
    before = pipe.get_params(state)
    state, metrics = pipe.flush(state)
    assert int(metrics["num_microbatches"]) == 0
    jax.tree.map(np.testing.assert_array_equal, pipe.get_params(state), before)


# -- What it costs --------------------------------------------------------------------


def test_partition_by_hand():
    widths = [4, 16, 16, 2]
    layers = [functools.partial(nnx.Linear, n, m) for n, m in itertools.pairwise(widths)]
    batch = {
        "inputs": np.zeros((4, 4), np.float32),
        "targets": np.zeros((4, 2), np.float32),
    }
    first, second = make([*layers[:1], jpipe.Function(nnx.relu), *layers[1:]], boundaries=[2]).partition(batch)
    assert (first.stage, first.device, first.layers) == (0, 0, (0, 2))
    assert (second.stage, second.device, second.layers) == (1, 1, (2, 4))
    assert first.names == ("Linear", "relu") and second.names == ("Linear", "Linear")
    assert (first.num_parameters, second.num_parameters) == (
        4 * 16 + 16,
        16 * 16 + 16 + 16 * 2 + 2,
    )
    assert (first.parameter_bytes, second.parameter_bytes) == (4 * 80, 4 * 306)
    # Forward, input gradient (not of the first layer) and weight gradient: 2 flops a
    # weight and sample each, and little beside.
    for record, dots in ((first, 2 * 64), (second, 3 * (256 + 32))):
        assert 1 <= record.flops / (2 * 2 * dots) < 1.5


def test_stages_are_balanced_by_flops():
    wide = [functools.partial(nnx.Linear, 4, 64), functools.partial(nnx.Linear, 64, 4)]
    records = make([LINEAR] * 6 + wide).partition(batch_of(16))
    assert [r.layers for r in records] == [(0, 7), (7, 8)]
    records = make([*wide, *[LINEAR] * 6]).partition(batch_of(16))
    assert records[0].layers == (0, 1)


def test_memory_by_hand():
    # Stages of 1 and 3 layers of 20 numbers; every device holds 3.
    memory = make(boundaries=[1]).memory(batch_of(6))
    assert memory.weights == memory.gradients == memory.optimizer == 4 * 60
    assert memory.batch == 2 * 4 * 6 * 4
    assert memory.padding == 3 * 4 * (60 - 40)  # the mean stage has 40
    assert memory.temporaries > 0
    # Rows of 3 x 4: two slots of inputs for 3 layers and of the loss's residual; an inbox
    # of activations and one of gradients, a slot and a bin each; sent, twice; received,
    # once, as both ways share a channel; and a squared norm.
    rows = 2 * 3 + 2 * 1 + 2 * 2 + 2 + 1
    assert memory.activations == 4 * (12 * rows) + 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "schedule,kernels",
    [
        # Each device has one of the two inner kernels, and one of the two outer ones.
        pytest.param("interleaved", 16 * 16 + 4 * 16, marks=pytest.mark.exhaustive),
        # One device has both inner kernels, and the other has both outer ones.
        ("zero_bubble_v", 2 * 16 * 16 + 2 * 4 * 16),
    ],
)
def test_the_stages_of_a_device_take_what_they_need(schedule, kernels):
    """Four stages on two devices: the first and the last have shapes of their own."""
    widths = [4, 16, 16, 16, 4]
    layers = [functools.partial(nnx.Linear, n, m) for n, m in itertools.pairwise(widths)]
    batch = batch_of(8)
    pipe = make(layers, schedule=jpipe.schedules.get(schedule)(4, 4), boundaries=[1, 2, 3])
    plain = make(layers, schedule=gpipe(1, 4))
    states = [p.init(jax.random.key(0), batch) for p in (pipe, plain)]
    for _ in range(3):
        results = [p.step(s, batch) for p, s in zip((pipe, plain), states)]
        states = [state for state, _ in results]
        assert_close(results[0][1]["loss"], results[1][1]["loss"], "float32")
    assert_close(*(p.get_params(s) for p, s in zip((pipe, plain), states)), "float32")
    memory = pipe.memory(batch)
    assert memory.weights == 4 * (kernels + 2 * 16 + 4)
    assert memory.optimizer == memory.gradients == memory.weights


def test_a_stage_is_placed_where_the_table_says():
    schedule = gpipe(2, 2)
    table = jpipe.Schedule.from_ticks("turned", schedule.forward_ticks(), schedule.backward_ticks(), device=[1, 0])
    records = make(schedule=table, boundaries=[1]).partition(batch_of(2))
    assert [(r.stage, r.device, r.layers) for r in records] == [
        (0, 1, (0, 1)),
        (1, 0, (1, 4)),
    ]


class Times(nnx.Module):
    """Equal to others but for its factor; counts its traces."""

    traced = []

    def __init__(self, factor, *, rngs):
        self.factor = factor

    def __call__(self, x):
        self.traced.append(self.factor)
        return x * self.factor


def test_equal_layers_are_traced_once():
    factors = [2, 3, 2, 2, 3, 2]  # the last is traced as the last
    times = [functools.partial(Times, factor) for factor in factors]
    Times.traced.clear()
    pipe = make([LINEAR, *times], boundaries=[2])
    pipe.partition(batch_of(4))
    assert Times.traced.count(3) < Times.traced.count(2) == 2 * Times.traced.count(3)
    state = pipe.init(jax.random.key(0), batch_of(4))
    kernel = pipe.get_params(state)[0]["kernel"]
    outputs = pipe.predict(state, {"inputs": np.eye(4, dtype=np.float32)[:4]})
    np.testing.assert_allclose(outputs, 144 * np.asarray(kernel), rtol=1e-6)


@pytest.mark.first_case
@pytest.mark.parametrize("schedule", [one_f_one_b, pipemare])
def test_a_step_is_traced_once(schedule, monkeypatch):
    chex.clear_trace_counter()
    run_step = chex.assert_max_traces(Program._run_step, n=1)
    monkeypatch.setattr(Program, "_run_step", run_step)
    pipe = make(schedule=schedule(2, 2))
    state = pipe.init(KEY, batch_of(4))
    for seed in range(3):
        state, _ = pipe.step(state, jax.tree.map(jnp.asarray, batch_of(4, seed)))
        state, _ = pipe.step(state, batch_of(4, seed))
    chex.assert_tree_all_finite(pipe.get_params(state))
