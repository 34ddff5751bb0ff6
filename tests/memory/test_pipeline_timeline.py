"""`Pipeline.memory_timeline` against the compiler, the table and the simulator."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
from jpipe._util.hlo import program_of
from jpipe.memory import POLICIES, accesses_of, replay
from jpipe.mesh import HOST_MEMORY
from jpipe.simulate import Costs, simulate
from models import Transformer

S = jpipe.schedules
ROWS = jax.ShapeDtypeStruct((48, 16), jnp.float32)
BATCH = {"inputs": ROWS, "targets": ROWS}


def pipeline(schedule, **options):
    return jpipe.Pipeline(
        [functools.partial(nnx.Linear, 16, 16) for _ in range(8)],
        loss=lambda outputs, batch: jnp.mean((outputs - batch["targets"]) ** 2),
        schedule=schedule,
        **{"optimizer": optax.adamw(1e-3), **options},
    )


def reserved(compiled):
    """Bytes that the compiler reserves on a device."""
    analysis = compiled.memory_analysis()
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )


def check(pipe, batch, device, profile=None):
    """What holds for every timeline."""
    timeline = pipe.memory_timeline(batch, device=device, profile=profile)
    # The compiler for CPUs counts host memory with the rest.
    groups = pipe._program(batch).engine.layout.groups.values()
    on_host = sum(group.num_bytes("cpu", HOST_MEMORY) for group in groups)
    want = reserved(pipe.compile(batch)) - on_host
    assert abs(timeline.peak - want) <= 0.02 * want
    # The compiler allocates everything at once, and idle room fills what nothing takes.
    by_use = timeline.by_use()
    np.testing.assert_array_equal(sum(by_use.values()), timeline.total)
    assert set(timeline.total.tolist()) == {timeline.peak}
    assert all((a >= 0).all() for a in by_use.values())
    assert timeline.peak_used <= timeline.peak
    for block in timeline.blocks:
        for access in block.accesses:
            assert block.allocated <= access.time <= block.freed, block
    # From step to step: the bytes of two steps in a row are those of one, twice.
    for time in timeline.moments[:: max(len(timeline.moments) // 20, 1)]:
        now, later = (timeline.at(time + k * timeline.period) for k in (0, 1))
        assert now == later
        assert sum(b.num_bytes for b in now) == timeline.peak
    names = [block.name for block in timeline.blocks if block.use == "weights"]
    assert len(names) == len(set(names))
    return timeline


CASES = {
    "gpipe": lambda: pipeline(S.gpipe(4, 6)),
    "offload": lambda: pipeline(S.gpipe(4, 6), offload=jpipe.Offload(1.0, 2)),
    "offload, pipedream": lambda: pipeline(S.pipedream(4, 6), offload=jpipe.Offload(1.0, 2)),
    "recompute": lambda: pipeline(S.one_f_one_b(4, 6), recompute="full"),
    "uneven cut": lambda: pipeline(S.one_f_one_b(4, 6), boundaries=[1, 3, 6]),
    "overlap": lambda: pipeline(S.one_f_one_b(4, 6, ticks="unit"), overlap=True),
    "pipedream": lambda: pipeline(S.pipedream(4, 6)),
    "2bw": lambda: pipeline(S.pipedream_2bw(4, 6)),
    "pipemare": lambda: pipeline(S.pipemare(4, 6)),
    "predicted weights": lambda: pipeline(
        S.pipemare(4, 6),
        optimizer=optax.chain(optax.sgd(0.1), jpipe.optim.predict_weights()),
        forward_params=jpipe.optim.predicted_params,
    ),
    "kept messages": lambda: pipeline(S.gpipe(4, 6), compress_messages=jpipe.compress.TopK(0.1)),
    "zero bubble": lambda: pipeline(S.zero_bubble_h1(4, 6)),
    "zero bubble, recompute": lambda: pipeline(S.zero_bubble_h2(4, 6), recompute="full"),
    "zero bubble v": lambda: pipeline(S.zero_bubble_v(8, 6)),
    "interleaved": lambda: pipeline(S.interleaved(8, 8)),
    "copies": lambda: pipeline(S.gpipe(2, 6, replicas=(3, 1))),
    "copies that send in one tick": lambda: pipeline(S.pipedream(2, 6, replicas=(3, 1))),
    "rhythms": lambda: pipeline(S.pipedream(4, 6, update_every=(6, 3, 2, 1))),
    "copies with rhythms": lambda: pipeline(S.pipedream(2, 6, replicas=(3, 1), update_every=(3, 1))),
    "shared optimizer": lambda: pipeline(S.gpipe(4, 6), mesh=jpipe.make_mesh(stage=4, data=2), shard_optimizer=True),
    "fsdp": lambda: pipeline(S.gpipe(4, 6), mesh=jpipe.make_mesh(stage=4, fsdp=2)),
    "not donated": lambda: pipeline(S.gpipe(4, 6), donate=False),
    "factors": lambda: pipeline(S.gpipe(4, 6), accumulate_gradients=jpipe.compress.StreamingPCA(rank=2)),
    "compressed": lambda: pipeline(
        S.gpipe(4, 6),
        mesh=jpipe.make_mesh(stage=4, data=2),
        compress_gradients=jpipe.compress.PowerSGD(rank=2),
    ),
    "messages of two ticks": lambda: pipeline(S.one_f_one_b(4, 6, message_ticks=(1, 2, 1))),
    "messages of two ticks, overlap": lambda: pipeline(S.pipedream(4, 6, message_ticks=2), overlap=True),
    "messages of a device to itself": lambda: pipeline(S.zero_bubble_v(8, 6), overlap=True),
}


@pytest.mark.exhaustive
@pytest.mark.sampled(24)
@pytest.mark.parametrize("case", CASES)
def test_peak_is_the_compilers(case):
    pipe = CASES[case]()
    rows = 64 if case == "interleaved" else 48
    shape = jax.ShapeDtypeStruct((rows, 16), jnp.float32)
    batch = {"inputs": shape, "targets": shape}
    for device in (0, pipe.schedule.num_devices - 1):
        check(pipe, batch, device)


VOCABULARY = {
    "one_f_one_b": {},
    "pipedream": {},
    "zero_bubble_h1": {},
    "gpipe": {"recompute": "full"},
}


@pytest.mark.exhaustive
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", VOCABULARY)
def test_vocabulary_layers(name):
    model = Transformer(vocab_size=50, seq_len=8, dim=16, num_heads=2, num_blocks=2)
    pipe = jpipe.Pipeline(
        model.layers(),
        loss=model.loss(),
        has_aux=True,
        optimizer=optax.adamw(1e-3),
        schedule=S.get(name)(2, 4),
        axis_rules=(("vocab", "stage"), *jpipe.AXIS_RULES),
        **VOCABULARY[name],
    )
    tokens = jax.ShapeDtypeStruct((8, 8), jnp.int32)
    timeline = check(pipe, {"inputs": tokens, "labels": tokens}, 1)
    assert any(block.name == "embedding: weights" for block in timeline.blocks)


@functools.cache
def one_f_one_b():
    pipe = pipeline(S.one_f_one_b(4, 6))
    return pipe, check(pipe, BATCH, 0)


def test_stashes_are_those_in_flight():
    """The most stashes at once are the table's microbatches in flight, from a formula of the table's facts."""
    pipe, timeline = one_f_one_b()
    stashes = [b for b in timeline.blocks if b.use == "input stash" and b.stage == 0]
    assert {b.layers for b in stashes} == {(0, 1), (1, 2)}
    (size,) = {b.num_bytes for b in stashes}
    most = timeline.by_use()["input stash"].max() / size
    assert most == 2 * pipe.schedule.facts().in_flight[0]
    # From the tick of the forward to that of the backward.
    ticks = pipe.schedule.forward_ticks(), pipe.schedule.backward_ticks()
    for block in stashes:
        m = int(block.name.partition("microbatch ")[2].partition(":")[0])
        first, last = (int(t[m, 0]) for t in ticks)
        assert first <= block.allocated < first + 1
        assert last < block.freed < last + 1


def test_weights_are_read_by_every_operation():
    pipe, timeline = one_f_one_b()
    (weights,) = (b for b in timeline.blocks if b.name == "stage 0, layer 1 (Linear): weights")
    assert weights.num_bytes == 4 * (16 * 16 + 16)
    assert weights.freed - weights.allocated == timeline.period
    reads = [a for a in weights.accesses if a.kind == "read"]
    assert len(reads) == 2 * 6 + 1  # forwards, backwards, the update
    assert (weights.stage, weights.layers, weights.device) == (0, (1, 2), 0)


def test_temporaries_have_names_and_share_the_compilers_bytes():
    pipe, timeline = one_f_one_b()
    temp = pipe.compile(BATCH).memory_analysis().temp_size_in_bytes
    idle = [b for b in timeline.blocks if b.name == "temporaries: free"]
    found = [b for b in timeline.blocks if b.use == "temporary"]
    total = sum(b.num_bytes * (b.freed - b.allocated) for b in [*idle, *found])
    assert total == pytest.approx(temp * timeline.period)
    assert any("backward of stage 0" in b.name for b in found)
    # Only in ticks in which the device runs the operation.
    for block in found:
        if "forward of stage 0" in block.name:
            tick = int(block.name.split(",")[0].removeprefix("tick "))
            assert pipe.schedule.forward[tick, 0] != -1
            assert tick <= block.allocated <= block.freed <= tick + 1


def test_temporaries_do_not_meet():
    """Two values whose lives were read off the program never lie in one place at one time."""
    pipe, _ = one_f_one_b()
    program = program_of(pipe.compile(BATCH))
    for allocation in program.allocations:
        values = allocation.values if allocation.is_temporary else []
        for i, a in enumerate(values):
            assert 0 <= a.offset <= a.offset + a.num_bytes <= allocation.num_bytes
            for b in values[i + 1 :]:
                apart = a.end <= b.start or b.end <= a.start
                apart |= a.offset + a.num_bytes <= b.offset
                apart |= b.offset + b.num_bytes <= a.offset
                assert apart, (a, b)
    temporary = sum(a.num_bytes for a in program.allocations if a.is_temporary)
    assert temporary == pipe.compile(BATCH).memory_analysis().temp_size_in_bytes


@pytest.mark.exhaustive
def test_versions_live_until_they_are_read_last():
    """PipeDream's first stage keeps one version for each delay: as the table's facts say."""
    schedule = S.pipedream(4, 6)
    timeline = pipeline(schedule).memory_timeline(BATCH)
    weights = [b for b in timeline.blocks if b.use in ("weights", "version")]
    (size,) = {b.num_bytes for b in weights}
    by_use = timeline.by_use()
    assert set((by_use["weights"] / size).tolist()) == {2}  # layers
    assert by_use["version"].max() / size == 2 * (schedule.facts().weight_versions[0] - 1)


class Seconds:
    """A profile in which every layer takes the same."""

    layers = (None,) * 8

    def seconds(self, operation):
        of = {"forward": 1.0, "backward": 2.0, "update": 0.5}
        of |= {"input_grad": 1.25, "weight_grad": 0.75}
        return [of[operation] / 2] * 8


@pytest.mark.exhaustive
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["one_f_one_b", "zero_bubble_h1"])
def test_seconds_are_the_simulators(name):
    schedule = S.get(name)(4, 6)
    pipe = pipeline(schedule)
    timeline = check(pipe, BATCH, 1, Seconds())
    split = schedule.splits_backward
    costs = Costs(1.0, 1.25 if split else 0.0, 0.75 if split else 0.0, update=0.5)
    if not split:
        costs = Costs(1.0, 0.0, 0.0, fused_backward=2.0, update=0.5)
    timing = simulate(schedule, costs)
    assert timeline.unit == "seconds"
    assert timeline.period == pytest.approx(timing.makespan)
    column = int(schedule.column_of_stage[1])
    (weights,) = (b for b in timeline.blocks if b.name == "stage 1, layer 2 (Linear): weights")
    reads = {round(a.time % timeline.period, 6) for a in weights.accesses if a.kind == "read"}
    middles = timing.start["forward"][:, column] + 0.25  # of the first of two layers
    assert {round(t, 6) for t in middles.tolist()} <= reads
    # What a device could send away: its optimizer, between two updates.
    found = {i.name for i in timeline.swap_candidates(1e9)}
    assert "stage 1: optimizer" in found


@pytest.mark.exhaustive
def test_recorded_traces_move_least_under_belady():
    """Arrays of one size: weights and gradients of equal layers."""
    for name in ("one_f_one_b", "interleaved", "pipedream"):
        pipe = pipeline(S.get(name)(8 if name == "interleaved" else 4, 8))
        shape = jax.ShapeDtypeStruct((64, 16), jnp.float32)
        timeline = pipe.memory_timeline({"inputs": shape, "targets": shape})
        trace, sizes = accesses_of(timeline, ("weights", "version", "gradient"))
        assert len(trace) > 40
        (size,) = set(sizes.values())
        for slots in range(1, len(sizes) + 1):
            belady, lru, fifo = (replay(trace, sizes, slots * size, p) for p in POLICIES)
            assert belady.to_device <= min(lru.to_device, fifo.to_device)
        assert replay(trace, sizes, len(sizes) * size, rounds=2).num_bytes == 0


def test_wrong_inputs():
    pipe, _ = one_f_one_b()
    for device in (4, -1, "0"):
        with pytest.raises(
            ValueError,
            match='`device` must be a position along the axis "stage", 0 to 3',
        ):
            pipe.memory_timeline(BATCH, device=device)
    short = Seconds()
    short.layers = (None,) * 7
    with pytest.raises(ValueError, match="`profile` has 7 layers and the pipeline 8"):
        pipe.memory_timeline(BATCH, profile=short)


def test_devices_need_unlike_bytes_and_allocate_equal_ones():
    pipe = CASES["uneven cut"]()  # 1, 2, 3 and 2 layers
    records, memory = pipe.memory_by_device(BATCH), pipe.memory(BATCH)
    assert [(r.device, r.stages) for r in records] == [(d, (d,)) for d in range(4)]
    layer = 4 * (16 * 16 + 16)
    assert [r.weights for r in records] == [layer, 2 * layer, 3 * layer, 2 * layer]
    assert [r.gradients for r in records] == [r.weights for r in records]
    moments = [r.optimizer - 2 * r.weights for r in records]  # Adam's two, and a counter
    assert all(0 <= counter <= 16 for counter in moments)
    assert {r.allocated for r in records} == {pipe.memory_timeline(BATCH).peak}
    for record in records:
        assert record.activations <= memory.activations and record.needed < record.allocated
        parts = (record.weights, record.optimizer, record.gradients, record.activations)
        assert max(parts) < record.needed
    assert records[0].activations > records[3].activations  # more microbatches in flight
