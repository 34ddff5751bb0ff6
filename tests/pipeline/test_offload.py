"""What is in host memory changes no number: weights, states and losses are equal bit for bit."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import FAMILIES, cross_entropy, schedule_named
from flax import nnx
from helpers import assert_close, refused, with_nan_buffers
from layouts import DIM, batches, loss, pipeline

import jpipe
from jpipe import Offload
from jpipe.lowering.target import GPU, TARGETS
from jpipe.mesh import HOST_MEMORY
from models import Transformer

KEY = jax.random.key(3)
LONG = pytest.mark.exhaustive


def run(pipe, data, steps=2, read="loss"):
    state = with_nan_buffers(pipe.init(KEY, data[0]))
    if not pipe.schedule.synchronous:
        state = pipe.init(KEY, data[0])
    losses = []
    for step in range(steps):
        state, metrics = pipe.step(state, data[step])
        losses.append(np.asarray(metrics[read]))
    return state, losses


def on_host(tree):
    return {
        jax.tree_util.keystr(path): a
        for path, a in jax.tree.leaves_with_path(tree)
        if isinstance(a, jax.Array) and a.sharding.memory_kind == HOST_MEMORY
    }


def assert_equal(a, b):
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))


def linear(table, offload, data=1, **options):
    """Layers without mutable state: programs with and without offload compute the same, bit for bit."""
    options = {"optimizer": optax.adamw(0.01), "loss": loss} | options
    return jpipe.Pipeline(
        [lambda rngs: nnx.Linear(DIM, DIM, rngs=rngs)] * (table.num_stages + 1),
        schedule=table,
        mesh=jpipe.make_mesh(stage=table.num_devices, data=data),
        offload=offload,
        **options,
    )


TOP_K = {"compress_gradients": jpipe.compress.TopK(0.5)}
CASES = [
    ("one_f_one_b", 4, 8, Offload(1.0, 3), {}),
    ("gpipe", 2, 8, Offload(0.5, 2), {"data": 2}),
    pytest.param("pipedream", 4, 4, Offload(1.0, 2), {}, marks=LONG),
    ("interleaved", 4, 4, Offload(weights=1.0, gradients=1.0), {}),
    pytest.param("gpipe", 2, 8, Offload(weights=0.5), {"data": 2, **TOP_K}, marks=LONG),
    ("gpipe/1-2", 2, 8, Offload(weights=1.0), TOP_K),
    pytest.param("zero_bubble_v", 8, 8, Offload(1.0, 7), {}, marks=LONG),
    pytest.param("one_f_one_b/unit", 4, 8, Offload(0.7, 3), {}, marks=LONG),
    pytest.param("interleaved", 4, 4, Offload(0.3, 3), {}, marks=LONG),
    pytest.param("zero_bubble_h1", 2, 8, Offload(1.0), {}, marks=LONG),
    pytest.param("gpipe/1-2", 2, 8, Offload(1.0, 5), {}, marks=LONG),
    pytest.param("pipemare", 4, 8, Offload(0.5, 3), {}, marks=LONG),
    pytest.param("pipemare/paired", 4, 8, Offload(activations=3), {}, marks=LONG),
    pytest.param("pipedream_2bw", 4, 8, Offload(0.5, 2), {"data": 2}, marks=LONG),
    pytest.param("pipedream/2-1-1-1", 4, 8, Offload(1.0, 2), {}, marks=LONG),
    pytest.param("gpipe", 2, 8, Offload(1.0, 2), {"overlap": True}, marks=LONG),
    pytest.param("gpipe", 2, 8, Offload(1.0, 2), {"data": 2, "shard_optimizer": True}, marks=LONG),
    pytest.param("pipedream", 2, 4, Offload(1.0, weights=1.0, gradients=0.5), {}, marks=LONG),
    pytest.param("pipemare", 4, 4, Offload(0.5, weights=0.5), {}, marks=LONG),
    pytest.param(
        "zero_bubble_v",
        8,
        8,
        Offload(1.0, 7, weights=1.0, gradients=1.0),
        {},
        marks=LONG,
    ),
    pytest.param("gpipe/1-2", 2, 8, Offload(1.0, 5, weights=1.0), {}, marks=LONG),
    pytest.param(
        "gpipe",
        2,
        8,
        Offload(1.0, 2, weights=1.0, gradients=1.0),
        {"data": 2, "shard_optimizer": True},
        marks=LONG,
    ),
    pytest.param("gpipe", 2, 8, Offload(gradients=1.0), {"data": 2}, marks=LONG),
    pytest.param("gpipe", 2, 4, Offload(0.8, 3), {"loss_scale": 64.0}, marks=LONG),
    pytest.param("gpipe", 2, 8, Offload(1.0), {"optimizer": optax.contrib.muon(0.01)}, marks=LONG),
]


@pytest.mark.exhaustive
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name, stages, microbatches, offload, options", CASES)
def test_numbers_are_those_without_offload(name, stages, microbatches, offload, options):
    table, data = schedule_named(name, stages, microbatches), batches(2)
    plain, offloaded = (linear(table, o, **options) for o in (None, offload))
    want, want_losses = run(plain, data)
    got, got_losses = run(offloaded, data)
    np.testing.assert_array_equal(got_losses, want_losses)
    assert_equal(offloaded.get_params(got), plain.get_params(want))
    norms = [run(p, data, read="gradient_norm")[1] for p in (plain, offloaded)]
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-6)
    assert np.max(norms) > 0
    assert not on_host(want)
    found = on_host(got)
    assert any("optimizer_state" in path for path in found) == (offload.optimizer > 0)
    assert any("parameters" in path for path in found) == (offload.weights > 0)
    assert any("gradients" in path for path in found) == (offload.gradients > 0)
    spills = offload.activations is not None
    assert any("host_stash" in path for path in found) == spills
    assert_equal(offloaded.evaluate(got, data[0]), plain.evaluate(want, data[0]))
    memory, whole = offloaded.memory(data[0]), plain.memory(data[0])
    of_arrays = sum(a.addressable_data(0).nbytes for a in found.values())
    assert memory.host == of_arrays
    assert whole.host == 0
    assert (memory.optimizer < whole.optimizer) == (offload.optimizer > 0)
    assert (memory.weights < whole.weights) == (offload.weights > 0)
    assert (memory.gradients < whole.gradients) == (offload.gradients > 0)
    flushed, _ = plain.flush(want)
    assert_equal(offloaded.get_params(offloaded.flush(got)[0]), plain.get_params(flushed))
    # A state moves into a pipeline with offload, back, and in again.
    state = offloaded.adopt(plain.adopt(offloaded.adopt(flushed)))
    assert on_host(state).keys() == found.keys()


@pytest.mark.parametrize(
    "name, offload, options",
    [
        ("gpipe", Offload(1.0, weights=1.0, gradients=1.0), {"data": 2}),
        pytest.param("pipedream", Offload(1.0, weights=1.0), {}, marks=LONG),
        pytest.param("pipedream_2bw", Offload(1.0, weights=1.0), {}, marks=LONG),
    ],
)
def test_with_64_bit_types(name, offload, options):
    with jax.enable_x64(True):
        test_numbers_are_those_without_offload(name, 2, 4, offload, options)


class Block(nnx.Module):
    """A layer with mutable state and random draws, in float64."""

    def __init__(self, rngs):
        double = {"rngs": rngs, "param_dtype": jnp.float64}
        # No bias: the norm takes it away, and rounding alone would move it.
        self.linear = nnx.Linear(DIM, DIM, use_bias=False, **double)
        self.norm = nnx.BatchNorm(DIM, **double)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(nnx.relu(self.norm(self.linear(x))))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "recompute",
    [
        "none",
        pytest.param(jax.checkpoint_policies.dots_saveable, marks=LONG),
    ],
)
def test_running_statistics_and_dropout(recompute):
    """The compiler may fuse what reads a stash in other ways, so sums may differ in their last bits."""
    with jax.enable_x64(True):
        data = jax.tree.map(lambda a: a.astype(np.float64), batches(2))
        pipes = [
            jpipe.Pipeline(
                [Block] * 3,
                loss=loss,
                optimizer=optax.adam(1e-2, eps=1e-2),
                schedule=jpipe.schedules.gpipe(2, 8),
                recompute=recompute,
                offload=offload,
            )
            for offload in (None, Offload(1.0, 2))
        ]
        want, got = (run(pipe, data) for pipe in pipes)
        np.testing.assert_allclose(got[1], want[1], rtol=1e-12)
        for read in ("get_params", "get_mutable_state"):
            of_states = [getattr(p, read)(r[0]) for p, r in zip(pipes, (want, got))]
            assert_close(of_states[1], of_states[0], "float64")


@pytest.mark.exhaustive
@pytest.mark.sampled(3)
@pytest.mark.parametrize("weights", [0.0, 0.5, 1.0])
def test_large_weights_move_in_chunks(weights):
    """An update on chunks is the update on whole leaves, whether weights lie in pools, in a vector or in host
    memory.
    """
    data = [
        {"inputs": a, "targets": b} for a, b in np.random.default_rng(0).normal(size=(2, 2, 8, 128)).astype(np.float32)
    ]
    layers = [lambda rngs, n=n: nnx.Linear(128, n, rngs=rngs) for n in (128, 128, 128)]
    layers[1] = lambda rngs: nnx.Sequential(nnx.Linear(128, 256, rngs=rngs), nnx.Linear(256, 128, rngs=rngs))

    def make(offload):
        return jpipe.Pipeline(
            layers,
            loss=loss,
            optimizer=optax.adamw(0.01),
            schedule=jpipe.schedules.gpipe(3, 4),
            offload=offload,
        )

    plain = make(None)
    offloaded = make(Offload(1.0, chunk=2048, weights=weights, gradients=weights))
    (want, _), (got, _) = run(plain, data), run(offloaded, data)
    assert_equal(offloaded.get_params(got), plain.get_params(want))
    rows = {name: a.shape[2:] for name, a in got.optimizer_state.items() if "host" in name}
    # 128 x 128 numbers in eight chunks of 16 rows.
    assert rows["host float32[128, 128]"] == (16, 128)
    assert all(np.prod(row) <= 2048 for row in rows.values())
    # Half of the bytes are the two largest of the four matrices.
    for arrays in got.parameters, got.gradients:
        names = {name for name in arrays if "host" in name}
        sizes = {0.0: [], 0.5: [256], 1.0: [128, 256]}[weights]
        assert any("[128, 256]" in name for name in names) == (256 in sizes)
        assert any("[128, 128]" in name for name in names) == (128 in sizes)


@pytest.mark.exhaustive
def test_checkpoints_restore_with_and_without_offload(tmp_path):
    table, data = jpipe.schedules.gpipe(2, 4), batches(3)
    offload = Offload(1.0, 2, weights=1.0, gradients=1.0)
    pipe, plain = linear(table, offload), linear(table, None)
    state, _ = run(pipe, data, 1)
    with jpipe.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        again = checkpoints.restore(linear(table, offload), data[0]).state
        other = checkpoints.restore(plain, data[0]).state
    assert on_host(again).keys() == on_host(state).keys()
    want, metrics = pipe.step(state, data[1])
    for restored, by in ((again, pipe), (other, plain)):
        got, losses = by.step(restored, data[1])
        np.testing.assert_array_equal(losses["loss"], metrics["loss"])
        assert_equal(by.get_params(got), pipe.get_params(want))


@pytest.mark.exhaustive
def test_checkpoints_keep_what_is_in_flight(tmp_path):
    table, data = jpipe.schedules.pipedream(4, 4), batches(3)
    pipe = linear(table, Offload(1.0, 2))
    state, _ = run(pipe, data, 1)
    assert any("host_stash" in path for path in on_host(state))
    with jpipe.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        again = checkpoints.restore(linear(table, Offload(1.0, 2)), data[0]).state
        with pytest.raises(ValueError, match="has microbatches in flight"):
            checkpoints.restore(linear(table, None), data[0])
    for i in (1, 2):
        state, want = pipe.step(state, data[i])
        again, got = pipe.step(again, data[i])
        np.testing.assert_array_equal(got["loss"], want["loss"])
    assert_equal(pipe.get_params(again), pipe.get_params(state))


@pytest.mark.exhaustive
def test_axes_of_the_compiler_split_what_is_in_host_memory():
    family, data = FAMILIES["mlp"], FAMILIES["mlp"].batches(1, 16)[0]

    def make(offload):
        return jpipe.Pipeline(
            family.layers,
            loss=cross_entropy,
            optimizer=optax.adam(0.1),
            schedule=jpipe.schedules.gpipe(2, 4),
            mesh=jpipe.make_mesh(stage=2, fsdp=2),
            offload=offload,
        )

    plain, offloaded = make(None), make(Offload(1.0, 2, weights=1.0, gradients=1.0))
    states = []
    for pipe in (plain, offloaded):
        state, _ = pipe.step(pipe.init(KEY, data), data)
        states.append(pipe.get_params(state))
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


# -- A limit


def wide(**options):
    options = {"schedule": jpipe.schedules.gpipe(2, 8)} | options
    return jpipe.Pipeline(
        [lambda rngs: nnx.Linear(128, 128, rngs=rngs)] * 4,
        loss=loss,
        optimizer=optax.adamw(0.01),
        **options,
    )


ROWS = {name: np.zeros((64, 128), np.float32) for name in ("inputs", "targets")}


@pytest.mark.exhaustive
def test_nothing_in_host_memory_is_copied():
    """A tick needs room for one slot of each stash that comes from the host, and for no ring of slots."""
    table = jpipe.schedules.gpipe(2, 16)
    data = {name: np.zeros((512, 128), np.float32) for name in ("inputs", "targets")}
    plain, offloaded = (wide(schedule=table, offload=offload) for offload in (None, Offload(0.0, 2)))
    groups = offloaded._program(data).engine.layout.groups
    slot = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(groups["buffers"].shapes["staged"]))
    stashes = groups["buffers"].num_bytes("cpu", HOST_MEMORY)
    assert stashes > 10 * slot
    more = offloaded.memory(data).temporaries - plain.memory(data).temporaries
    assert more < 3 * slot


def on_device(memory):
    return sum(memory) - memory.padding - memory.host


@pytest.mark.exhaustive
def test_a_limit_is_kept_and_moves_no_more_than_needed():
    plain = wide().memory(ROWS)
    # `Memory` leaves out the scalars of the table, some hundred bytes for each tick, and a device holds them.
    scalars = 300 * wide().schedule.num_ticks
    assert scalars < 10_000
    assert wide(device_memory=on_device(plain) + scalars).memory(ROWS) == plain
    least = wide(offload=Offload(1.0, 2)).memory(ROWS)
    assert on_device(least) < on_device(plain) - 300_000
    pipe = wide(device_memory=on_device(least) + 70_000)
    found = pipe.memory(ROWS)
    assert on_device(found) <= on_device(least) + 70_000
    assert 0 < found.host < least.host
    # The first state fixes what is offloaded.
    pipe.init(KEY, ROWS)
    assert "Offload" in str(pipe._settings.offload)
    # Below that, weights go too.
    smallest = wide(offload=Offload(1.0, 2, weights=1.0, gradients=1.0)).memory(ROWS)
    assert on_device(smallest) < on_device(least) - 100_000
    limit = (on_device(smallest) + on_device(least)) / 2
    pipe = wide(device_memory=limit)
    found = pipe.memory(ROWS)
    assert on_device(found) <= limit and found.host > least.host
    pipe.init(KEY, ROWS)
    assert 0 < pipe._settings.offload.weights <= 1
    with pytest.raises(ValueError, match="is too little.*a device needs") as error:
        wide(device_memory=on_device(smallest) / 2).init(KEY, ROWS)
    said = int(re.search("([0-9]+) bytes;", str(error.value))[1])
    wide(device_memory=said).init(KEY, ROWS)
    with pytest.raises(ValueError, match=f"{said} bytes"):
        wide(device_memory=said - 1).init(KEY, ROWS)


# -- What is refused


@pytest.mark.parametrize(
    "share, kept, message",
    [
        (2, None, "from 0 to 1, got 2"),
        ("all", None, "from 0 to 1, got 'all'"),
        (True, None, "from 0 to 1, got True"),
        (0.0, None, "`weights` of .* from 0 to 1, got 1.5"),
        (1.0, 1, "at least 2 .*, got 1"),
        (1.0, 2.5, "a whole number .*, got 2.5"),
    ],
)
def test_wrong_offloads_are_refused(share, kept, message):
    with refused(message):
        Offload(share, kept, weights=1.5 if "weights" in message else 0.0)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"offload": "optimizer"}, "must be a `jpipe.Offload`"),
        ({"offload": Offload(), "device_memory": 1e9}, "Leave one of them out"),
        ({"device_memory": "2 bananas"}, "such as 2GiB, .* got '2 bananas'"),
        ({"device_memory": -1}, "above 0"),
        ({"device_memory": True}, "above 0"),
        ({"offload": Offload(0, 2), "recompute": "full"}, "keeps only its inputs"),
        (
            {"offload": Offload(weights=1), "backward_params": lambda p, s, d: p},
            "`backward_params` computes others .* offload the optimizer's state alone",
        ),
        (
            {
                "offload": Offload(gradients=1),
                "schedule": schedule_named("gpipe/1-2", 2, 8),
            },
            "this schedule has copies of stages",
        ),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with refused(message):
        wide(**options)


def test_too_few_slots_are_refused_before_anything_compiles():
    pipe = wide(schedule=jpipe.schedules.one_f_one_b(4, 8), offload=Offload(0.0, 2))
    with refused("`activations=2` of `Offload` is too few: .* needs 3 slots"):
        pipe.init(KEY, ROWS)


def test_stashes_that_outlive_a_round_are_refused_before_anything_compiles():
    schedule = jpipe.schedules.pipemare(4, 4, ticks="paired")
    pipe = wide(schedule=schedule, offload=Offload(0.0, 2))
    with refused("one lives for 7 ticks, and a round of 4 microbatches has 4. Use more"):
        pipe.init(KEY, ROWS)


def test_devices_without_host_memory(monkeypatch):
    monkeypatch.setattr("jpipe.options.host_memory.memory_kinds", lambda device: ["device"])
    with refused("'pinned_host', and cpu devices have only 'device'"):
        wide(offload=Offload(1.0))
    with refused("'pinned_host', and cpu devices have only 'device'"):
        wide(device_memory="2GiB")
    with pytest.warns(UserWarning, match="trains without offloading"):
        pipe = wide(offload=Offload(1.0, required=False))
    assert not pipe._settings.offload


def test_offload_is_part_of_what_makes_states_equal():
    table, data = jpipe.schedules.gpipe(2, 4), batches(1)[0]
    state = pipeline(table, 3, offload=Offload(1.0)).init(KEY, data)
    with pytest.raises(ValueError, match="differs in `offload`.*adopt"):
        pipeline(table, 3).step(state, data)


@pytest.mark.exhaustive
def test_both_guards_take_arrays_in_host_memory(monkeypatch):
    without_options = dataclasses.replace(GPU, compiler_options={})
    monkeypatch.setitem(TARGETS, "cpu", without_options)
    table, data = jpipe.schedules.gpipe(2, 4), batches(2)
    plain, offloaded = (
        linear(table, None),
        linear(table, Offload(1.0, 2, weights=1.0, gradients=1.0)),
    )
    (want, _), (got, _) = run(plain, data), run(offloaded, data)
    assert_close(offloaded.get_params(got), plain.get_params(want), "float32")


@pytest.mark.exhaustive
def test_old_states_stay_usable_without_donation():
    table, data = jpipe.schedules.gpipe(2, 4), batches(2)
    pipe = linear(table, Offload(1.0, 2), donate=False)
    state = pipe.init(KEY, data[0])
    first, _ = pipe.step(state, data[0])
    again, _ = pipe.step(state, data[0])
    assert_equal(pipe.get_params(first), pipe.get_params(again))
    assert jnp.isfinite(pipe.evaluate(again, data[1])["loss"])


@pytest.mark.slow
def test_a_gpt_trains_on_less_memory_than_its_optimizer_needs():
    """Twelve bytes of optimizer state for each weight of four, on devices that hold fewer."""
    model = Transformer(vocab_size=256, seq_len=64, dim=512, num_heads=8, num_blocks=32)
    tokens = np.random.default_rng(0).integers(0, 256, (16, 65), np.int32)
    data = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}

    def make(**options):
        return jpipe.Pipeline(
            model.layers(),
            loss=model.loss(),
            has_aux=True,
            optimizer=optax.amsgrad(1e-3),
            schedule=jpipe.schedules.one_f_one_b(4, 8),
            recompute="full",
            **options,
        )

    limit = 0.9 * make().memory(data).optimizer
    pipe = make(device_memory=limit)
    memory = pipe.memory(data)
    assert on_device(memory) <= limit < memory.optimizer + memory.host
    state, losses = pipe.init(KEY, data), []
    for _ in range(3):
        state, metrics = pipe.step(state, data)
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[0]
