"""Messages of several ticks change no number of a synchronous table, and delays alone of an asynchronous one."""

import functools
import math
import re

import jax
import numpy as np
import optax
import oracles
import pytest
import skipping
from families import FAMILIES, cross_entropy
from helpers import assert_close, use_target, with_nan_buffers

import jpipe
from jpipe import schedules
from jpipe.reference import Reference

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*bubble"),
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64"),
]
FAMILY = FAMILIES["mlp"]

# schedule, options, S, N, ticks of messages, overlap
SYNCHRONOUS = [
    ("gpipe", {}, 4, 5, 2, True),
    ("gpipe", {}, 3, 4, (1, 2), False),
    ("one_f_one_b", {}, 4, 5, (1, 2, 1), True),
    ("one_f_one_b", {}, 3, 4, 3, False),
    ("one_f_one_b", {"ticks": "unit"}, 4, 6, 2, False),
    ("one_f_one_b", {"ticks": "overlapped"}, 3, 4, (2, 1), True),
    ("interleaved", {}, 4, 4, 2, True),
    ("interleaved", {"ticks": "unit"}, 6, 3, (2, 1), False),
    ("interleaved", {"ticks": "overlapped"}, 4, 4, 2, False),
    ("zero_bubble_h1", {}, 3, 5, 2, True),
    ("zero_bubble_h2", {}, 3, 5, (1, 2), False),
    ("zero_bubble_v", {}, 4, 4, 2, True),
    ("dual_pipe_v", {}, 4, 5, 2, False),
    ("gpipe", {"replicas": (2, 1)}, 2, 5, (1, 2), True),
    ("one_f_one_b", {"replicas": (1, 2), "ticks": "unit"}, 2, 6, 2, False),
]
CORE = SYNCHRONOUS[:3]


def test_every_synchronous_schedule_is_here():
    names = {name for name in schedules.names() if schedules.get(name)(2, 4).synchronous}
    assert {name for name, *_ in SYNCHRONOUS} == names - {"seq_one_f_one_b"}  # see below


@pytest.mark.first_case
@pytest.mark.parametrize("name,options,S,N,ticks,overlap", SYNCHRONOUS, ids=str)
@pytest.mark.sampled(8)
def test_equals_the_plain_model(name, options, S, N, ticks, overlap):
    """With NaN wherever nothing has arrived: what is read too early is no number."""
    with jax.enable_x64(True):
        family = FAMILY.in_dtype("float64")
        plain = oracles.PlainModel(family.layers, jax.random.key(7))
        batches = family.batches(3, 2 * N, "float64")
        optimizer = optax.sgd(1.0, momentum=0.5)
        pipe = jpipe.Pipeline(
            family.layers,
            loss=cross_entropy,
            optimizer=optimizer,
            schedule=schedules.get(name)(S, N, **options, message_ticks=ticks),
            overlap=overlap,
        )
        channels = pipe._program(batches[0]).engine.lowered.channels
        assert any(channel.crosses for channel in channels)
        state = pipe.init(jax.random.key(7), batches[0], params=plain.params)
        losses, gradients, params = oracles.train(plain, plain.params, cross_entropy, optimizer, batches)
        for step, (batch, loss) in enumerate(zip(batches, losses)):
            state, metrics = pipe.step(with_nan_buffers(state), batch)
            assert_close(metrics["loss"], np.asarray(loss), "float64")
            if step == 0:
                moved = jax.tree.map(lambda a, b: b - a, pipe.get_params(state), plain.params)
                assert_close(moved, gradients[0], "float64")
        assert_close(pipe.get_params(state), params, "float64")
        inputs = batches[0]["inputs"][: 2 * N - 1]
        assert_close(pipe.predict(state, {"inputs": inputs}), np.asarray(plain(params, inputs)), "float64")


# -- Delays: those of the definition, with the longer way


def paired_delay(S, N, k, replicas):
    """A microbatch is S - 1 - s messages of k ticks from the last stage, and its gradient as many from there. In each
    tick a microbatch enters, or as many as the largest number of copies.
    """
    L = max(replicas or (1,))

    def delay(s, j):
        behind, groups = 2 * k * (S - 1 - s) + 1, math.ceil(N / L)
        return math.ceil((behind - j // L) / groups) if behind > j // L else 0

    return delay


def unit_delay(S, N, k, replicas):
    """Both ways over a boundary take a multiple of three ticks, and a microbatch enters every three."""

    def delay(s, j):
        behind = math.ceil(2 * k / 3) * (S - 1 - s)
        return math.ceil((behind - j) / N) if behind > j else 0

    return delay


ASYNCHRONOUS = [
    ("pipedream", 3, 2, "paired", True, None),
    ("pipedream", 4, 1, "unit", False, None),
    ("pipedream", 2, 5, "paired", False, (1, 2)),
    ("pipedream_2bw", 3, 9, "paired", True, None),
    ("pipedream_2bw", 3, 4, "unit", False, None),
    ("pipemare", 3, 2, "paired", False, None),
    ("pipemare", 4, 1, "unit", True, None),
    ("pipemare", 2, 4, "paired", True, (2, 1)),
]


def none(s, j):
    return 0


@pytest.mark.first_case
@pytest.mark.parametrize("name,S,N,ticks,overlap,replicas", ASYNCHRONOUS, ids=str)
@pytest.mark.sampled(4)
def test_equals_the_definition(name, S, N, ticks, overlap, replicas):
    rounds, k, optimizer = 12, 2, optax.sgd(0.1, momentum=0.5)
    with jax.enable_x64(True):
        family = FAMILY.in_dtype("float64")
        plain = oracles.PlainModel(family.layers, jax.random.key(1))
        microbatches = family.batches(rounds * N, 2, np.float64)
        batches = oracles.minibatches(microbatches, N)
        pipe = jpipe.Pipeline(
            family.layers,
            loss=cross_entropy,
            optimizer=optimizer,
            schedule=schedules.get(name)(S, N, ticks=ticks, replicas=replicas, message_ticks=k),
            overlap=overlap,
        )
        stage_of_layer = oracles.stages_of_layers(pipe.partition(batches[0]))
        delay = {"paired": paired_delay, "unit": unit_delay}[ticks](S, N, k, replicas)
        if name == "pipedream_2bw":
            delay = lambda s, j: 1  # noqa: E731
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
        )
        state = pipe.init(jax.random.key(0), batches[0], params=plain.params)
        state, steps = with_nan_buffers(state, all_but="squared_norm"), []
        for batch in batches:
            state, metrics = pipe.step(state, batch)
            steps.append((float(metrics["loss"]), int(metrics["num_microbatches"])))
        state, metrics = pipe.flush(state)
        steps.append((float(metrics["loss"]), int(metrics["num_microbatches"])))
        assert sum(n for _, n in steps) == rounds * N
        total = sum(mean * n for mean, n in steps if n)
        np.testing.assert_allclose(total / (rounds * N), np.mean(losses), rtol=1e-9)
        assert_close(pipe.get_params(state), params, "float64")


@pytest.mark.first_case
@pytest.mark.parametrize(
    "table",
    [schedules.one_f_one_b(3, 4, message_ticks=(1, 2)), schedules.gpipe(2, 4, (2, 1), message_ticks=2)],
    ids=lambda table: table.name,
)
@pytest.mark.sampled(1)
def test_the_walk_of_the_table_agrees(table):
    plain = oracles.PlainModel(FAMILY.layers, jax.random.key(7))
    optimizer, batches = optax.sgd(0.5), FAMILY.batches(2, 8)
    reference = Reference(FAMILY.layers, cross_entropy, optimizer, table, params=plain.params)
    losses = [reference.step(batch) for batch in batches]
    want, _, params = oracles.train(plain, plain.params, cross_entropy, optimizer, batches)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert_close(reference.get_params(), params, "float32")


def test_the_walk_finds_a_message_that_is_read_too_early():
    table = schedules.gpipe(2, 2)
    object.__setattr__(table, "message_ticks", 2)  # which `check` would refuse
    plain = oracles.PlainModel(FAMILY.layers, jax.random.key(7))
    reference = Reference(FAMILY.layers, cross_entropy, optax.sgd(0.5), schedules.gpipe(2, 2), params=plain.params)
    reference.schedule = table
    with pytest.raises(KeyError, match="activation"):
        reference.step(FAMILY.batches(1, 4)[0])


# -- What moves, and when


@pytest.mark.exhaustive
@pytest.mark.parametrize(("overlap", "platform"), [(False, "cpu"), (True, "cpu"), (True, "tpu"), (True, "gpu")])
@pytest.mark.sampled(2)
def test_skips_cross_too(overlap, platform, monkeypatch):
    """Skips go over several boundaries, of which one is slow; with the program of each platform."""
    results = []
    for ticks in (1, (1, 2, 1)):
        use_target(monkeypatch, "cpu" if ticks == 1 else platform)
        pipe = skipping.pipeline(schedules.one_f_one_b(4, 8, message_ticks=ticks), overlap=overlap)
        state = pipe.init(jax.random.key(0), skipping.batch())
        for step in range(3):
            state, metrics = pipe.step(with_nan_buffers(state), skipping.batch(step))
        results.append((metrics["loss"], pipe.get_params(state)))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, *results)


@pytest.mark.parametrize("overlap", [False, True])
def test_only_messages_of_slow_boundaries_have_channels_of_their_own(overlap):
    pipe = skipping.pipeline(schedules.one_f_one_b(4, 8, message_ticks=(1, 2, 1)), overlap=overlap)
    engine = pipe._program(skipping.batch()).engine
    for channel in engine.lowered.channels:
        slow = {min(pair) <= 1 < max(pair) for pair in channel.pairs}
        assert slow == {channel.crosses}
    crossing = {i for i, channel in enumerate(engine.lowered.channels) if channel.crosses}
    assert crossing and crossing <= set(engine.layout["buffers"].shapes["received"])


def tick_of(text):
    """The body of the scan over ticks: name of an instruction -> opcode and operands; and the root's operands."""
    bodies = dict(re.findall(r"^(?:ENTRY )?%(\S+) .*\{\n((?:  .*\n)+)\}", text, re.M))
    (body,) = (b for b in bodies.values() if " collective-permute(" in b and " conditional(" in b)
    instructions = {}
    for line in body.splitlines():
        name, _, rest = line.removeprefix("  ").removeprefix("ROOT ").partition(" = ")
        opcode = re.search(r"[\]\)\}] ([a-z][\w\-]*)\(", rest)
        instructions[name] = (opcode[1], re.findall(r"%[\w.\-]+", rest[opcode.end() :].partition("), ")[0]), line)
    return instructions


def reachable(start, edges):
    seen, open_ = set(), [start]
    while open_:
        for other in edges[open_.pop()]:
            if other not in seen:
                seen.add(other)
                open_.append(other)
    return seen


@pytest.mark.first_case
@pytest.mark.parametrize(("ticks", "num_crossing"), [(1, 0), ((1, 2, 1), 2), (2, 2)], ids=str)
@pytest.mark.sampled(2)
def test_a_whole_tick_of_compute_lies_between_send_and_receive(ticks, num_crossing):
    """In the compiled tick the messages that cross need nothing that the tick computes, and nothing there needs them.

    So a compiler may put all of the tick's operations between the start and the end of the transfer.
    """
    pipe = jpipe.Pipeline(
        FAMILY.layers,
        loss=cross_entropy,
        optimizer=optax.sgd(0.1),
        schedule=schedules.one_f_one_b(4, 8, message_ticks=ticks),
        overlap=True,
    )
    tick = tick_of(pipe.compile(FAMILY.batches(1, 16)[0]).as_text())
    operands = {name: [o for o in used if o in tick] for name, (_, used, _) in tick.items()}
    users: dict[str, list[str]] = {name: [] for name in tick}
    for name, used in operands.items():
        for operand in used:
            users[operand].append(name)
    operation = re.compile(r'op_name="[^"]*/(forward|backward)/')
    compute = {n for n, (opcode, _, line) in tick.items() if opcode == "conditional" and operation.search(line)}
    permutes = [n for n, (opcode, *_) in tick.items() if opcode == "collective-permute"]
    free = [n for n in permutes if not compute & (reachable(n, operands) | reachable(n, users))]
    assert len(compute) >= 2 and len(permutes) == (4 if isinstance(ticks, tuple) else 2)
    assert len(free) == num_crossing


def groups_of(line, num_devices):
    """The groups of devices of a collective, from each form in which XLA writes them."""
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", line)
    if named:
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", named[1])}
        together = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", named[2])]
        devices = np.arange(num_devices).reshape(list(sizes.values()))
        devices = np.moveaxis(devices, together, range(len(together)))
        return [
            set(group)
            for group in devices.reshape(-1, num_devices // math.prod(devices.shape[: len(together)])).T.tolist()
        ]
    listed = re.search(r"replica_groups=\{((?:\{[\d,]+\},?)+)\}", line)
    if listed:
        return [set(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    shape, dims, order = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line).groups()
    shape, dims = (list(map(int, numbers.split(","))) for numbers in (shape, dims))
    devices = np.arange(num_devices).reshape(dims)
    devices = devices.transpose(list(map(int, order.split(",")))) if order else devices
    return [set(group) for group in devices.reshape(shape).tolist()]


@pytest.mark.sampled(1)
def test_norms_cross_in_updates_alone_and_as_single_numbers():
    """Squares are summed in a slice; between slices go those of each stage, in the branch of the update."""
    slices = [{0, 1}, {2, 3}]
    pipe = jpipe.Pipeline(
        FAMILY.layers,
        loss=cross_entropy,
        optimizer=optax.chain(jpipe.optim.clip_by_global_norm(1.0), optax.sgd(0.1)),
        schedule=schedules.one_f_one_b(2, 8, message_ticks=2),
        mesh=jpipe.make_mesh(stage=2, fsdp=2, dcn={"stage": 2}, devices=jax.devices()[:4]),
        overlap=True,
    )
    text = pipe.compile(FAMILY.batches(1, 32)[0]).as_text()
    sums = [
        line for line in text.splitlines() if re.search(r" (all-reduce|all-gather|reduce-scatter)(-start)?\(", line)
    ]
    crossing = [line for line in sums if any(not any(g <= s for s in slices) for g in groups_of(line, 4))]
    sizes = [
        np.prod(list(map(int, dims.split(","))))
        for line in crossing
        for dims in re.findall(r"\w+\[([\d,]+)\]", line.split("(")[0])
    ]
    assert 0 < len(crossing) < len(sums) and max(sizes) <= 8
    assert not {opcode for opcode, *_ in tick_of(text).values()} & {"all-reduce", "all-gather", "reduce-scatter"}
