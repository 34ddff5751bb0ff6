"""Lowering, replayed slot by slot in plain Python."""

import dataclasses
import itertools
import warnings

import numpy as np
import pytest
from families import COPIES_IN_TURN, HAND_WRITTEN, two_columns_a_device, v_placement

from jpipe.lowering.lower import lower, neighbours
from jpipe.schedule import IDLE, Schedule, newest_version
from jpipe.schedules import dual_pipe_v, forward_only, gpipe, interleaved, one_f_one_b, pipedream, zero_bubble_v


def paired_round(S, N, device=None):
    """Asynchronous 1F1B of paired ticks."""
    s, m = np.arange(S), np.arange(N)[:, None]
    backward = m + 2 * S - 1 - s
    return Schedule.from_ticks("paired", m + s, backward, num_ticks=N, device=device)


def unit_round(S, N):
    """Asynchronous 1F1B of unit ticks, weights stashed from forward to backward."""
    s, m = np.arange(S), np.arange(N)[:, None]
    forward, backward = 3 * m + 2 * s, 3 * m + 3 * S - 2 - s
    version = newest_version(forward, backward[-1] + 1, 3 * N)
    ticks = dict(num_ticks=3 * N, backward_version=version)
    return Schedule.from_ticks("unit", forward, backward, backward + 1, **ticks)


def late_weight_grads(S, N):
    """GPipe with every weight gradient after all input gradients."""
    s, m = np.arange(S), np.arange(N)[:, None]
    backward = N + 2 * S - 2 - s + m
    return Schedule.from_ticks("late", m + s, backward, backward[-1:] + 1 + m)


def irregular(seed, synchronous):
    """A legal table without any pattern, its weight gradients split in every other one."""
    rng = np.random.default_rng(seed)
    S, N = rng.integers(1, 5), rng.integers(1, 7)

    def no_earlier_than(first):
        """`[N, S]` ticks in order of microbatch, each after its input from before."""
        for m, s in np.ndindex(N, S):
            after = [
                first[m, s],
                first[m - 1, s] + 1 if m else 0,
                first[m, s - 1] + 1 if s else 0,
            ]
            first[m, s] = max(after) + rng.integers(0, 3)
        return first

    forward = no_earlier_than(np.zeros((N, S), int))
    backward = no_earlier_than(forward[:, ::-1] + (np.arange(S) > 0))[:, ::-1]
    weight = no_earlier_than(backward * 1) if seed % 2 else None
    ticks = [at for at in (forward, backward, weight) if at is not None]
    period = None if synchronous else max(int((at[-1] - at[0]).max()) for at in ticks) + 1
    device = rng.permutation(S) % rng.integers(1, S + 1)
    return Schedule.from_ticks(f"irregular{seed}", *ticks, num_ticks=period, device=device)


def tables():
    for S, N in itertools.product(range(1, 5), range(1, 7)):
        yield gpipe(S, N)
        yield one_f_one_b(S, N)
        yield one_f_one_b(S, N, ticks="unit")
        yield forward_only(S, N)
        yield late_weight_grads(S, N)
        yield paired_round(S, N)
        yield unit_round(S, N)
    for N in range(1, 7):
        yield two_columns_a_device(N)
        yield two_columns_a_device(N, ticks_apart=1)
        yield v_placement(N)
        yield forward_only(4, N, stage=[1, 0, 3, 2], device=[0, 0, 1, 1])
        yield paired_round(4, N, device=[0, 1, 0, 1])
    for replicas in ((3, 1), (1, 2), (2, 3), (2, 1, 2)):
        for N in (3, 4, 6, 7):
            yield gpipe(len(replicas), N, replicas=replicas)
            for ticks in ("paired", "unit"):
                for make in (one_f_one_b, pipedream):
                    yield make(len(replicas), N, ticks, replicas=replicas)
            place = gpipe(len(replicas), N, replicas=replicas)
            yield forward_only(len(replicas), N, stage=place.stage, device=place.device)
    yield Schedule.from_text(COPIES_IN_TURN, name="in turn").check()
    for seed in range(40):
        yield irregular(seed, synchronous=True)
        yield irregular(seed, synchronous=False)
    yield Schedule.from_text(HAND_WRITTEN, name="hand-written").check()
    for N, ticks in itertools.product((2, 4, 8), (2, 3, (1, 2, 1))):
        for make in (gpipe, one_f_one_b, forward_only, pipedream):
            yield make(4, N, message_ticks=ticks)
        yield pipedream(4, N, "paired", message_ticks=ticks)
        yield one_f_one_b(4, N, ticks="unit", message_ticks=ticks)
        yield interleaved(8, N * 4, message_ticks=ticks)
        yield one_f_one_b(2, N + 1, replicas=(1, 3), message_ticks=ticks)
        yield pipedream(2, N + 1, replicas=(3, 1), message_ticks=ticks)
    yield zero_bubble_v(4, 4, message_ticks=2)


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", ".*bubble")
    TABLES = list(tables())
every_table = pytest.mark.parametrize("table", TABLES, ids=lambda t: f"{t.name}-{t.num_stages}-{t.num_microbatches}")


def operations_at(operations, t, r, N):
    """(device, lane, stage, microbatch, (column, position)) of what runs at tick t of round r."""
    for d, lane in np.argwhere(operations.stage[t] >= 0).tolist():
        cell = t, d, lane
        m, c = int(operations.microbatch[cell]) + N * r, int(operations.column[cell])
        if m >= 0:  # else of a minibatch before the first
            place = c, int(operations.position[cell]) + PER_ROUND.get(c, N) * r
            yield d, lane, int(operations.stage[cell]), m, place


PER_ROUND = {}
"""Column -> the microbatches of a minibatch that it runs; of the table that is replayed."""


class Slots:
    """Rings whose slots hold the name of what was written there."""

    def __init__(self, lowered):
        self.lowered, self.alive = lowered, {}

    def _slot(self, ring, stage, place):
        column, position = place
        assert self.lowered.schedule.stage[column] == stage
        device = self.lowered.schedule.device[column]
        slots = self.lowered.rings[ring].slots[column]
        slot = slots[position % len(slots)]
        assert slot < self.lowered.num_slots[ring]
        return ring, device, slot

    def write(self, ring, stage, microbatch, place):
        slot = self._slot(ring, stage, place)
        assert slot not in self.alive, f"{slot} still holds {self.alive[slot]}"
        self.alive[slot] = stage, microbatch

    def read(self, ring, stage, microbatch, place, last=True):
        slot = self._slot(ring, stage, place)
        assert self.alive.get(slot) == (stage, microbatch), f"{slot} holds {self.alive.get(slot)}"
        if last:
            del self.alive[slot]


def replay(lowered, recompute, num_rounds):
    """Runs a lowered table on names instead of arrays, in the engine's order."""
    table, ops, slots = lowered.schedule, lowered.operations, Slots(lowered)
    N, last = table.num_microbatches, table.num_stages - 1
    received, crossing = {}, {}  # what the next tick can read, and what the tick after it can
    PER_ROUND.clear()
    PER_ROUND.update(enumerate((table.forward != IDLE).sum(axis=0).tolist()))

    def stash(*what):
        slots.write("input_stash", *what)
        slots.write("weight_stash", *what)

    for r, t in itertools.product(range(num_rounds), range(table.num_ticks)):
        sent = {}
        for (i, d), (kind, stage, m) in received.items():
            to, position = lowered.channels[i].arrives[kind][t, d].tolist()
            here = to >= 0 and table.stage[to] == stage and table.device[to] == d
            assert here, f"{kind} {m} for stage {stage} has no inbox at tick {t}"
            slots.write(kind, stage, m, (to, position + PER_ROUND[to] * r))
        for d, lane, *what in operations_at(ops["forward"], t, r, N):
            if what[0] > 0:
                slots.read("activation", *what, last=not recompute)
            if not (recompute or table.forward_only):
                stash(*what)
            if what[0] < last:
                sent[d, lane] = "activation", what[0] + 1, what[1]
        for d, lane, *what in operations_at(ops["backward"], t, r, N):
            if recompute:
                if what[0] > 0:
                    slots.read("activation", *what)
                stash(*what)
            if what[0] < last:
                slots.read("gradient", *what)
            slots.read("input_stash", *what)
            slots.read("weight_stash", *what, last=not table.splits_backward)
            if table.splits_backward:
                slots.write("split_residuals", *what)
            if what[0] > 0:
                sent[d, ops["forward"].num_lanes + lane] = (
                    "gradient",
                    what[0] - 1,
                    what[1],
                )
        for _, _, *what in operations_at(ops["weight_grad"], t, r, N):
            slots.read("weight_stash", *what)
            slots.read("split_residuals", *what)
        received, crossing, arrived = crossing, {}, []
        for i, channel in enumerate(lowered.channels):
            pairs = channel.pairs or [(d, d) for d in range(table.num_devices)]
            after = (t + 1 + channel.crosses) % table.num_ticks
            for source, target in pairs if channel.sends[t] else ():
                message = sent.get((source, int(channel.lane[t, source])))
                if message and any(slots[after, target, 0] >= 0 for slots in channel.arrives.values()):
                    (crossing if channel.crosses else received)[i, target] = message
                    arrived.append(message)
        assert sorted(arrived) == sorted(sent.values())
    if table.synchronous:
        assert not slots.alive


@pytest.mark.parametrize("recompute", [False, True])
@every_table
def test_nothing_alive_is_overwritten_and_all_arrives(table, recompute):
    num_rounds = 1
    if not table.synchronous:  # unroll past the longest life, and four more
        num_rounds = 4 + int(table.weight_grad_ticks().max()) // table.num_ticks
    recompute = recompute and not table.forward_only
    for share in (True, False):
        replay(lower(table, recompute, routes(table, share)), recompute, num_rounds)


@every_table
def test_no_depth_is_more_than_needed(table):
    """One slot less, and something is overwritten."""
    lowered = lower(table)
    if table.synchronous:
        for name, num_slots in lowered.num_slots.items():
            if num_slots > 1:
                with pytest.raises(AssertionError, match="holds"):
                    replay(with_slots(lowered, name, num_slots - 1), False, 1)
        return
    for name, ring in lowered.rings.items():
        for c in range(table.num_columns):
            if len(ring.slots[c]) > 1:
                with pytest.raises(AssertionError, match="holds"):
                    replay(without_last_slot(lowered, name, c), False, 30)


def with_slots(lowered, name, num_slots):
    """The lowered table with a ring whose last slots are its first."""
    ring = lowered.rings[name]
    slots = [of_column % num_slots for of_column in ring.slots]
    fewer = dataclasses.replace(ring, num_slots=num_slots, slots=slots)
    return dataclasses.replace(lowered, rings={**lowered.rings, name: fewer})


def without_last_slot(lowered, name, column):
    """The lowered table with a ring in which a column has one slot less."""
    ring = lowered.rings[name]
    slots = [*ring.slots]
    slots[column] = slots[column][:-1]
    fewer = dataclasses.replace(ring, slots=slots)
    return dataclasses.replace(lowered, rings={**lowered.rings, name: fewer})


@pytest.mark.parametrize(
    "table",
    [table for table in TABLES if table.synchronous and not table.forward_only],
    ids=lambda t: f"{t.name}-{t.num_stages}-{t.num_microbatches}",
)
def test_a_device_has_as_many_slots_as_values_at_the_same_time(table):
    """Counted tick by tick, for stashes of the weight gradient."""
    forward, weight_grad = table.forward_ticks(), table.weight_grad_ticks()
    most = 0
    for d, t in itertools.product(range(table.num_devices), range(table.num_ticks)):
        alive = (forward <= t) & (t <= weight_grad) & (table.device == d)
        alive &= forward != IDLE
        most = max(most, alive.sum())
    assert lower(table).num_slots["weight_stash"] == most


@every_table
def test_operations_say_what_the_table_says(table):
    lowered = lower(table)
    chunk = [sorted(set(table.stage[table.device == d])).index(s) for s, d in zip(table.stage, table.device)]
    for name, operations in lowered.operations.items():
        if name == "commit":
            continue
        microbatch, version = (np.full(table.forward.shape, IDLE) for _ in range(2))
        for t, d, lane in np.argwhere(operations.stage >= 0):
            c = operations.column[t, d, lane]
            assert table.stage[c] == operations.stage[t, d, lane]
            assert table.device[c] == d
            assert operations.chunk[t, d, lane] == chunk[c]
            microbatch[t, c] = operations.microbatch[t, d, lane]
            version[t, c] = operations.version[t, d, lane]
        if name == "update":  # once for all columns of a copy
            want = table.update.copy()
            pairs = list(zip(table.stage, table.device))
            want[:, [pairs.index(p) < c for c, p in enumerate(pairs)]] = IDLE
            np.testing.assert_array_equal(version, want)
        else:
            np.testing.assert_array_equal(microbatch, getattr(table, name))
        if name in ("forward", "backward"):
            np.testing.assert_array_equal(version, getattr(table, f"{name}_version"))


def test_a_weight_gradient_reads_the_version_of_its_input_gradient():
    table = unit_round(3, 2)
    lowered, N, T = lower(table), 2, table.num_ticks
    read = {}
    for r, t in itertools.product(range(8), range(T)):
        for name in ("backward", "weight_grad"):
            version = lowered.operations[name].version[t] + r
            for d, lane, stage, m, _ in operations_at(lowered.operations[name], t, r, N):
                read[name, stage, m] = version[d, lane]
    both = [(v, read["backward", *rest]) for (name, *rest), v in read.items() if name == "weight_grad"]
    assert len(both) > 20 and all(w == b for w, b in both)
    assert len({v for v, _ in both}) > 3  # and those are different versions


# -- Channels -------------------------------------------------------------------------


@every_table
def test_channels_are_permutations(table):
    for share in (True, False):
        for channel in lower(table, routes=routes(table, share)).channels:
            assert share or len(channel.arrives) == 1
            if channel.pairs is not None:
                sources, targets = zip(*channel.pairs, strict=True)
                assert len(set(sources)) == len(sources) and len(set(targets)) == len(targets)
                assert all(s != d for s, d in channel.pairs)


def routes(table, share):
    return neighbours(table.num_stages, "activation", "activation" if share else "gradient")


def pairs(table, share=True):
    return [channel.pairs for channel in lower(table, routes=routes(table, share)).channels]


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, unit_round, late_weight_grads])
def test_a_straight_pipe_has_two_channels(make):
    down, up = ((0, 1), (1, 2), (2, 3)), ((1, 0), (2, 1), (3, 2))
    assert pairs(make(4, 6)) == [down, up]


def test_two_devices_share_a_channel_if_they_may():
    assert pairs(gpipe(2, 4)) == [((0, 1), (1, 0))]
    assert pairs(gpipe(2, 4), share=False) == [((0, 1),), ((1, 0),)]
    assert pairs(gpipe(1, 4)) == []


def test_channels_of_a_v():
    # Activations and gradients each go across and stay, at the turn.
    swap = ((0, 1), (1, 0))
    assert pairs(v_placement(8), share=False) == [swap, None, swap, None]
    assert sorted(pairs(v_placement(8)), key=str) == [swap, swap, None, None]
    assert pairs(v_placement(4)) == [swap, None]  # they never meet


def test_channels_rest_when_nobody_sends():
    down, up = lower(gpipe(3, 3)).channels
    assert down.sends.tolist() == [True] * 4 + [False] * 6
    assert up.sends.tolist() == [False] * 5 + [True] * 4 + [False]


# -- Depths by hand -------------------------------------------------------------------


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, paired_round, late_weight_grads])
@pytest.mark.parametrize(("S", "N"), [(1, 3), (2, 4), (4, 6), (3, 8)])
def test_stashes_are_as_deep_as_what_is_in_flight(make, S, N):
    table = make(S, N)
    np.testing.assert_array_equal(depth(table)["weight_stash"], table.facts().in_flight)


def depth(table, recompute=False):
    """Ring -> the number of slots that each stage uses."""
    return {
        name: [len(set(slots.tolist())) for slots in ring.slots] for name, ring in lower(table, recompute).rings.items()
    }


def test_depths_of_unit_ticks():
    # F to W takes S - s microbatches, F to B as many, B to W one.
    depths = depth(one_f_one_b(3, 6, ticks="unit"))
    assert depths["weight_stash"] == depths["input_stash"] == [3, 2, 1]
    assert depths["split_residuals"] == [1, 1, 1]
    assert depths["gradient"] == [1, 1, 0]


def test_depths_of_gpipe_with_and_without_recomputation():
    keep, again = (depth(gpipe(3, 5), recompute) for recompute in (False, True))
    assert keep["activation"] == [0, 1, 1]
    assert again["activation"] == [0, 5, 5]
    for ring in ("input_stash", "weight_stash"):
        assert keep[ring] == [5, 5, 5]
        assert again[ring] == [1, 1, 1]
    assert keep["gradient"] == again["gradient"] == [1, 1, 0]
    assert not any(keep["split_residuals"])


def test_columns_of_an_asynchronous_device_lie_one_after_the_other():
    lowered = lower(paired_round(4, 3, device=[0, 1, 0, 1]))
    slots = [of_stage.tolist() for of_stage in lowered.rings["weight_stash"].slots]
    assert slots[0] + slots[2] == list(range(len(slots[0]) + len(slots[2])))
    assert slots[1] + slots[3] == list(range(len(slots[1]) + len(slots[3])))
    most = max(len(slots[0]) + len(slots[2]), len(slots[1]) + len(slots[3]))
    assert lowered.num_slots["weight_stash"] == most
    assert lowered.num_chunks == 2


def test_zero_bubble_v_holds_what_unit_1f1b_holds():
    """Two stages of half the size per device: at most 2 S halves, which are S whole stages."""
    with_halves = lower(zero_bubble_v(8, 8)).num_slots
    with_wholes = lower(one_f_one_b(4, 8, ticks="unit")).num_slots
    assert with_halves["weight_stash"] <= 2 * with_wholes["weight_stash"]


# -- Copies ---------------------------------------------------------------------------


def test_copies_have_chunks_of_their_own_and_lanes_share_one():
    lowered = lower(gpipe(2, 6, replicas=(3, 1)))
    assert lowered.copies == (((0, 0), (1, 0), (2, 0)), ((3, 0),))
    assert lowered.placement == ((0, 0), (3, 0))
    assert lowered.num_chunks == 1
    assert lowered.operations["forward"].num_lanes == 3
    assert lowered.operations["update"].num_lanes == 1
    in_turn = lower(Schedule.from_text(COPIES_IN_TURN).check())
    assert in_turn.copies == (((0, 0), (1, 0)), ((1, 1), (0, 1)))
    assert in_turn.num_chunks == 2


def test_messages_of_copies_travel_between_the_copies_alone():
    """Three copies before one: one channel to and from each copy."""
    assert sorted(pairs(gpipe(2, 6, replicas=(3, 1)))) == [
        ((0, 3), (3, 0)),
        ((1, 3), (3, 1)),
        ((2, 3), (3, 2)),
    ]
    # Microbatch b goes from copy b mod 2 to copy b mod 3.
    reached = set().union(*pairs(gpipe(2, 6, replicas=(2, 3)), False))
    forward = {(b % 2, 2 + b % 3) for b in range(6)}
    assert reached == forward | {(t, s) for s, t in forward}


@pytest.mark.parametrize("ticks", ["paired", "unit"])
def test_a_minibatch_is_committed_when_all_copies_have_run_it_forward(ticks):
    table = pipedream(2, 7, ticks, replicas=(2, 3))
    commits = lower(table).operations["commit"]
    forward = table.by_stage(table.forward_ticks())
    for s in range(2):
        cells = np.argwhere(commits.stage == s).tolist()
        devices = {d for _, d, _ in cells}
        assert devices == set(table.copies[s])
        for t, d, lane in cells:
            version = commits.version[t, d, lane]
            assert t - table.num_ticks * (version - 1) == forward[:, s].max()


def test_forwards_before_all_backwards_are_a_phase():
    S, N = 3, 5
    forwards, rest = lower(gpipe(S, N)).phases
    assert (forwards.start, forwards.stop, rest.start) == (0, N + S - 1, N + S - 1)
    assert rest.stop == gpipe(S, N).num_ticks
    assert forwards.operations == {"forward"}
    assert rest.operations == {"backward", "weight_grad", "update"}


@pytest.mark.parametrize(
    "table",
    [
        one_f_one_b(3, 5),
        zero_bubble_v(4, 4),
        pipedream(3, 4),
        paired_round(2, 3),
        forward_only(3, 4),
    ],
    ids=lambda table: table.name,
)
def test_one_phase(table):
    (phase,) = lower(table).phases
    assert (phase.start, phase.stop) == (0, table.num_ticks)


def stages_of_pairs(table):
    """The stages of a forward and a backward in one tick of a device, read from the table."""
    found, columns = set(), range(table.num_columns)
    for t, c, d in itertools.product(range(table.num_ticks), columns, columns):
        m, n = table.forward[t, c], table.backward[t, d]
        if IDLE not in (m, n) and table.device[c] == table.device[d]:
            if (m, c) == (n, d):
                return set()
            found.add((int(table.stage[c]), int(table.stage[d])))
    return found


@pytest.mark.parametrize(
    "table, num_pairs",
    [
        (one_f_one_b(4, 8, ticks="overlapped"), 4),
        (interleaved(4, 8, ticks="overlapped"), None),
        (dual_pipe_v(4, 6), None),
        (one_f_one_b(4, 8), 0),  # the last stage has both passes of one microbatch
        (one_f_one_b(4, 8, ticks="unit"), 0),
        (interleaved(4, 8), 0),
        (gpipe(4, 8), 0),
        (pipedream(4, 8), 0),
        (one_f_one_b(2, 4, replicas=(3, 1)), 0),
    ],
    ids=repr,
)
def test_pairs_are_passes_that_do_not_wait_for_each_other(table, num_pairs):
    pairs = lower(table).pairs
    if num_pairs is None:
        assert len(pairs) > 2
    else:
        assert len(pairs) == num_pairs
    if not table.has_copies:
        assert pairs == stages_of_pairs(table)


def test_copies_commit_in_the_phase_of_forwards():
    forwards, rest = lower(gpipe(2, 4, replicas=[2, 1])).phases
    assert forwards.operations == {"forward", "commit"}
    assert "commit" not in rest.operations
