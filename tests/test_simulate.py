"""Prices of tables, against published makespans, closed forms and a plain longest path."""

import dataclasses
import itertools

import numpy as np
import pytest

from jpipe.schedule import IDLE, Schedule
from jpipe.schedules import (
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    pipemare,
    zero_bubble_h1,
    zero_bubble_v,
)
from jpipe.simulate import Costs, simulate

pytestmark = pytest.mark.filterwarnings("ignore:.*with num_microbatches")
MODES = ("lockstep", "dependencies")


@pytest.mark.parametrize("S,N,golden", [(4, 4, 21), (4, 8, 33), (4, 16, 57), (8, 16, 69), (8, 32, 117)])
def test_golden_makespans(S, N, golden):
    for schedule, mode in itertools.product((gpipe(S, N), one_f_one_b(S, N)), MODES):
        timing = simulate(schedule, mode=mode)
        assert timing.makespan == golden
        np.testing.assert_allclose(timing.bubble, (S - 1) / (N + S - 1))
        np.testing.assert_array_equal(timing.busy, 3 * N)


@pytest.mark.parametrize(
    "schedule",
    [
        gpipe(3, 4),
        one_f_one_b(3, 5),
        one_f_one_b(4, 4, ticks="unit"),
        interleaved(4, 4),
        zero_bubble_h1(3, 4),
        zero_bubble_v(4, 4),
        forward_only(3, 4),
    ],
    ids=lambda schedule: schedule.name,
)
def test_dependencies_are_a_longest_path(schedule):
    """Solved again by relaxing every rule until nothing moves, on costs of no regularity."""
    rng = np.random.default_rng(0)
    S = schedule.num_stages
    F, B, W = rng.uniform(0.5, 2.0, (3, S))
    transfer, back = rng.uniform(0.1, 0.5, (2, S))
    costs = Costs(F, B, W, transfer, back)
    timing = simulate(schedule, costs, "dependencies")

    kinds = ["forward"]
    kinds += ["backward"] * (not schedule.forward_only)
    kinds += ["weight_grad"] * schedule.splits_backward
    length = {"forward": F, "backward": B, "weight_grad": W}
    if not schedule.splits_backward:
        length["backward"] = B + W
    on = {int(s): int(d) for s, d in zip(schedule.stage, schedule.device)}
    column = {int(s): c for c, s in enumerate(schedule.stage)}
    table = {
        (kind, s, int(getattr(schedule, kind)[t, column[s]])): t
        for kind in kinds
        for s in range(S)
        for t in range(schedule.num_ticks)
        if getattr(schedule, kind)[t, column[s]] != IDLE
    }
    before = []  # (operation, one that it waits for, and how long after its end)
    for d in set(on.values()):
        mine = sorted(
            (o for o in table if on[o[1]] == d),
            key=lambda o: (table[o], kinds.index(o[0]), column[o[1]]),
        )
        before += [(b, a, 0.0) for a, b in itertools.pairwise(mine)]
    for kind, s, m in table:
        for other, stage in (
            [("forward", s - 1)]
            if kind == "forward"
            else [("forward", s), ("backward", s + 1)]
            if kind == "backward"
            else [("backward", s)]
        ):
            if (other, stage, m) in table:
                way = transfer if kind == "forward" else back
                late = way[min(stage, s)] if on[stage] != on[s] else 0.0
                before.append(((kind, s, m), (other, stage, m), late))
    start = dict.fromkeys(table, 0.0)
    for _ in range(len(table)):
        for b, a, late in before:
            start[b] = max(start[b], start[a] + length[a[0]][a[1]] + late)
    for (kind, s, m), at in start.items():
        np.testing.assert_allclose(timing.start[kind][m, column[s]], at)
    ends = [at + length[o[0]][o[1]] for o, at in start.items()]
    np.testing.assert_allclose(timing.makespan, max(ends))
    assert timing.makespan <= simulate(schedule, costs, "lockstep").makespan + 1e-9


def test_lockstep_by_hand():
    """Two stages, two microbatches; stage 1 takes twice as long, and a message half a unit."""
    schedule = one_f_one_b(2, 2)
    costs = Costs(forward=[1, 2], backward=[1, 2], weight_grad=[1, 2], transfer=0.5)
    timing = simulate(schedule, costs, "lockstep")
    # F0 | F1, F0 B0 | B0, F1 B1 | B1: the last sends nothing, the third a gradient.
    assert timing.makespan == 1.5 + 6.5 + 6.5 + 2
    np.testing.assert_array_equal(timing.start["forward"], [[0, 1.5], [1.5, 8]])
    np.testing.assert_array_equal(timing.start["backward"], [[8, 3.5], [14.5, 10]])
    np.testing.assert_array_equal(timing.busy, [6, 12])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ticks", ["paired", "unit"])
@pytest.mark.parametrize("build", [pipemare, pipedream, pipedream_2bw])
def test_asynchronous_rounds_have_no_bubble(build, ticks, mode):
    for S, N in ((1, 1), (2, 4), (4, 8)):
        timing = simulate(build(S, N, ticks=ticks), mode=mode)
        np.testing.assert_allclose(timing.makespan, 3 * N)
        np.testing.assert_allclose(timing.bubble, 0, atol=1e-12)


def test_an_asynchronous_round_lasts_as_long_as_its_slowest_stage():
    costs = Costs(forward=[1, 3, 1], backward=1, weight_grad=1)
    for mode in MODES:
        assert simulate(pipemare(3, 4), costs, mode).makespan == 4 * 5


@pytest.mark.parametrize("mode", MODES)
def test_a_transfer_costs_nothing_on_a_device(mode):
    one = Schedule.from_ticks("one device", [[0, 1]], [[3, 2]], device=[0, 0])
    assert simulate(one, Costs(transfer=7.0), mode).makespan == 6
    apart = Schedule.from_ticks("two devices", [[0, 1]], [[3, 2]])
    assert simulate(apart, Costs(transfer=7.0), mode).makespan == 6 + 2 * 7


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("build", [gpipe, one_f_one_b, pipemare, pipedream_2bw])
def test_an_update_keeps_its_device(build, mode):
    """At the end of the longest device's work, once a minibatch."""
    without = simulate(build(3, 6), mode=mode)
    timing = simulate(build(3, 6), Costs(update=[5.0, 0.0, 0.0]), mode)
    np.testing.assert_allclose(timing.makespan, without.makespan + 5)
    np.testing.assert_allclose(timing.busy, without.busy + [5, 0, 0])


def test_updates_wait_in_lockstep_until_all_have_computed():
    """The last stage is done by one backward earlier than the first."""
    costs = Costs(update=[0.0, 5.0])
    assert simulate(gpipe(2, 3), costs, "lockstep").makespan == 3 * (3 + 1) + 5
    assert simulate(gpipe(2, 3), costs, "dependencies").makespan == 3 * (3 + 1) + 5 - 2


def test_a_fused_backward_may_be_shorter_than_its_parts():
    costs = Costs(fused_backward=1.5)
    assert simulate(gpipe(3, 5), costs).makespan == (1 + 1.5) * (5 + 2)
    split = zero_bubble_h1(3, 6)
    assert simulate(split, costs).makespan == simulate(split).makespan


def test_messages_of_unlike_size():
    """Three stages, one microbatch: every message is on the way alone."""
    costs = Costs(transfer=[0.5, 2.0, 9.0])
    for mode in MODES:
        timing = simulate(gpipe(3, 1), costs, mode)
        assert timing.makespan == 9 + 2 * (0.5 + 2.0)
        assert timing.communicating == (5.0 if mode == "lockstep" else 0.0)
        np.testing.assert_array_equal(timing.transfer, [0.5, 2.0 + 0.5, 2.0])
        unlike = dataclasses.replace(costs, gradient_transfer=[0.25, 1.0, 9.0])
        timing = simulate(gpipe(3, 1), unlike, mode)
        assert timing.makespan == 9 + (0.5 + 2.0) + (0.25 + 1.0)
        np.testing.assert_array_equal(timing.transfer, [0.5, 2.0 + 0.25, 1.0])


class TestSharedCores:
    def test_one_core_does_all_the_work(self):
        for schedule in (gpipe(3, 5), one_f_one_b(3, 5), pipemare(3, 5)):
            timing = simulate(schedule, Costs(num_cores=1))
            np.testing.assert_allclose(timing.makespan, 3 * 3 * 5)
            np.testing.assert_allclose(timing.bubble, 0, atol=1e-12)

    def test_a_core_each_changes_nothing(self):
        schedule = one_f_one_b(4, 8)
        alone, shared = simulate(schedule), simulate(schedule, Costs(num_cores=4))
        assert shared.makespan == alone.makespan and shared.bubble == alone.bubble

    def test_by_hand(self):
        """GPipe, 2 stages, 2 microbatches on 3 cores, of which a device can use 2."""
        costs = Costs(num_cores=3, cores_per_device=2, tick=0.25)
        timing = simulate(gpipe(2, 2), costs)
        # F0 | F1 F0 | F1 | B0 | B0 B1 | B1; the third and the last send nothing, but the last updates.
        lengths = np.array([1 / 2, 2 / 3, 1 / 2, 2 / 2, 4 / 3, 2 / 2])
        waits = np.array([1, 1, 0, 1, 1, 1])
        np.testing.assert_allclose(timing.makespan, sum(lengths + 0.25 * waits))
        np.testing.assert_allclose(timing.end["forward"][0], [1 / 2, 3 / 4 + 2 / 3])
        np.testing.assert_allclose(timing.bubble, 1 - 12 / (3 * timing.makespan))

    def test_jitter_by_hand(self):
        """Two stages, two microbatches: only ticks in which both compute are longer, and what both update."""
        costs = Costs(1, 2, 0, jitter=0.5, update=[3, 1])
        timing = simulate(gpipe(2, 2), costs)
        # F0 | F1 F0 | F1 | B0 | B0 B1 | B1, updates
        np.testing.assert_allclose(timing.makespan, 1 + 1.5 + 1 + 2 + 3 + 2 + 3 * 1.5)
        np.testing.assert_allclose(timing.communicating, 0.5 + 1 + 1.5)
        np.testing.assert_allclose(timing.end["forward"], [[1, 2], [2, 3.5]])
        one_stage = simulate(gpipe(1, 2), Costs(jitter=0.5))
        assert one_stage.makespan == 6

    def test_who_is_done_leaves_its_core(self):
        """GPipe of unlike stages on two cores, which one device alone can use both."""
        costs = Costs([1, 3], 0, 0, num_cores=2, cores_per_device=2, update=[4, 0])
        timing = simulate(gpipe(2, 2), costs)
        # F0 | F1 F0: one unit together, then two at double speed | F1 | update
        np.testing.assert_allclose(timing.makespan, 1 / 2 + (1 + 2 / 2) + 3 / 2 + 4 / 2)
        forward = [timing.start["forward"], timing.end["forward"]]
        np.testing.assert_allclose(forward[0], [[0, 0.5], [0.5, 2.5]])
        np.testing.assert_allclose(forward[1], [[0.5, 2.5], [1.5, 4]])
        # Paired ticks: F of 1 and B of 1 there, F of 3 and B of 1 here; B begins when 3 is done.
        costs = dataclasses.replace(costs, fused_backward=[1, 1], update=0)
        timing = simulate(pipemare(2, 1, ticks="paired"), costs)
        np.testing.assert_allclose(timing.makespan, 2 + 2 / 2)
        np.testing.assert_allclose(timing.end["forward"] % 3, [[1, 2.5]])
        np.testing.assert_allclose(timing.end["backward"] % 3, [[2, 0]])

    @pytest.mark.parametrize(
        "costs",
        [Costs(num_cores=2), Costs(tick=1.0), Costs(jitter=0.1)],
        ids=["num_cores", "tick", "jitter"],
    )
    def test_only_in_lockstep(self, costs):
        with pytest.raises(ValueError, match="devices in lockstep.*Use mode"):
            simulate(gpipe(2, 2), costs, "dependencies")

    def test_none_is_no_number(self):
        with pytest.raises(ValueError, match="`num_cores` must be above 0, got 0"):
            Costs(num_cores=0)


def test_inner_bubble_is_between_first_and_last():
    timing = simulate(gpipe(2, 2))
    np.testing.assert_array_equal(timing.span, [9, 6])
    np.testing.assert_allclose(timing.inner_bubble, 1 - 12 / 15)


def test_wrong_input():
    schedule = gpipe(2, 4)
    with pytest.raises(ValueError, match="`backward` must be at least 0, got -1"):
        Costs(backward=-1)
    with pytest.raises(ValueError, match="`jitter` must be a fraction of a tick.*got -0.1"):
        Costs(jitter=-0.1)
    with pytest.raises(ValueError, match="`forward` must be at least 0, got .*nan"):
        Costs(forward=[1.0, float("nan")])
    with pytest.raises(ValueError, match=r"one for each of the 2 stages, got shape \(3,\)"):
        simulate(schedule, Costs(forward=[1, 2, 3]))
    with pytest.raises(ValueError, match="`mode` must be .* got 'event'"):
        simulate(schedule, mode="event")


# -- Copies ---------------------------------------------------------------------------

UNEVEN = Costs([3.0, 1.0], fused_backward=[6.0, 2.0], transfer=[0.5, 0.0], update=[2.0, 1.0])


def test_copies_in_lockstep():
    """Three copies of a stage three times as long: every tick is full, but for the ends."""
    table = gpipe(2, 6, replicas=(3, 1))
    timing = simulate(table, UNEVEN)
    # Two groups on two stages. The device of stage 1 gets three messages per tick, and sends three.
    messages = 4 * 3 * 0.5
    assert timing.makespan == (2 + 1) * (3 + 6) + messages + 2
    np.testing.assert_allclose(timing.busy, [20, 20, 20, 19])
    np.testing.assert_allclose(timing.transfer, [1, 1, 1, 3])
    for kind in ("forward", "backward"):
        runs = table.forward_ticks() != IDLE
        np.testing.assert_array_equal(np.isfinite(timing.start[kind]), runs)


def test_copies_as_early_as_their_inputs_allow():
    """By hand: three microbatches, one for each copy, then one after the other on stage 1."""
    table = gpipe(2, 3, replicas=(3, 1))
    timing = simulate(table, UNEVEN, "dependencies")
    first = 3 + 0.5  # all copies at the same time
    back = first + 3 * 1 + np.arange(1, 4) * 2 + 0.5
    forward = table.by_stage(timing.start["forward"])
    assert forward[:, 1].tolist() == [first, first + 1, first + 2]
    backward = np.nanmax(timing.end["backward"][:, :3], axis=0)
    np.testing.assert_allclose(backward, back + 6)
    # The copies wait for each other, and then update.
    assert timing.makespan == back[-1] + 6 + 2


@pytest.mark.parametrize("ticks", ["paired", "unit"])
@pytest.mark.parametrize("replicas", [(3, 1), (2, 3), (1, 2, 1)])
def test_no_order_of_copies_is_slower_than_lockstep(replicas, ticks):
    rng = np.random.default_rng(0)
    S = len(replicas)
    F, B, W = rng.uniform(0.5, 2.0, (3, S))
    for build in (one_f_one_b, pipedream):
        table = build(S, 6, ticks, replicas=replicas)
        lockstep, free = (simulate(table, Costs(F, B, W), mode) for mode in MODES)
        assert free.makespan <= lockstep.makespan + 1e-9
        np.testing.assert_allclose(free.busy, lockstep.busy)
        work = np.repeat(6 * (F + B + W) / replicas, replicas)
        if all(6 % r == 0 for r in replicas):
            np.testing.assert_allclose(free.busy, work)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "replicas,every,N", [((1, 1), (4, 1), 4), ((3, 1), (3, 1), 6), ((2, 1, 1), (2, 1, 1), 4)], ids=str
)
def test_every_update_of_a_round_takes_its_time(replicas, every, N, mode):
    """A stage that updates after p of N microbatches does so N / p times."""
    work, update = np.array([3.0, 2.0, 1.0])[: len(every)], np.array([0.5, 0.25, 2.0])[: len(every)]
    table = pipedream(len(every), N, replicas=replicas, update_every=every)
    timing = simulate(table, Costs(work, work, work, update=update), mode)
    of_stage = N * 3 * work / replicas + N / np.array(every) * update
    np.testing.assert_allclose(timing.busy, np.repeat(of_stage, replicas))
    if mode == "dependencies" and max(replicas) == 1:  # stage 0 is the slowest, and never waits
        np.testing.assert_allclose(timing.makespan, of_stage[0])
