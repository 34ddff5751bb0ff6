import itertools

import numpy as np
import pytest

from jpipe.schedule import IDLE
from jpipe.schedules import (
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)
from jpipe.simulate import simulate

pytestmark = pytest.mark.filterwarnings("ignore:.* with num_microbatches")


@pytest.mark.parametrize("S,N,golden", [(4, 8, 27), (4, 16, 51), (8, 16, 55), (8, 32, 103)])
def test_h1_golden_makespans(S, N, golden):
    schedule = zero_bubble_h1(S, N)
    for mode in ("lockstep", "dependencies"):
        assert simulate(schedule, mode=mode).makespan == golden
    np.testing.assert_array_equal(schedule.facts().in_flight, S)  # that of 1F1B's first


@pytest.mark.parametrize("S,N", list(itertools.product(range(1, 7), range(1, 13))))
def test_h1_keeps_the_order_of_1f1b(S, N):
    schedule = zero_bubble_h1(S, N)
    facts, before = schedule.facts(), one_f_one_b(S, N, ticks="unit").facts()
    assert facts.makespan <= before.makespan
    if N >= S:
        assert facts.makespan == 3 * N + S - 1  # (S - 1) (F + B - W) of bubble
    assert (facts.in_flight <= min(N, S)).all()
    for s in range(S):
        order = ""
        waiting = 0
        for t in range(schedule.num_ticks):
            waiting += int(schedule.backward[t, s] != IDLE)
            waiting -= int(schedule.weight_grad[t, s] != IDLE)
            assert waiting <= s + 1
            order += "F" * int(schedule.forward[t, s] != IDLE)
            order += "B" * int(schedule.backward[t, s] != IDLE)
        warm_up = min(S - 1 - s, N)
        assert order == "F" * warm_up + "FB" * (N - warm_up) + "B" * warm_up


@pytest.mark.parametrize("S,N,golden", [(4, 8, 27), (8, 24, 79)])
def test_h2_golden_makespans(S, N, golden):
    schedule = zero_bubble_h2(S, N)
    for mode in ("lockstep", "dependencies"):
        timing = simulate(schedule, mode=mode)
        assert timing.makespan == golden
        assert timing.inner_bubble == 0
    np.testing.assert_array_equal(schedule.facts().in_flight, 2 * S - 1)


@pytest.mark.parametrize("S", range(1, 9))
def test_h2_has_no_bubble_inside_a_full_pipeline(S):
    for N in (2 * S - 1, 2 * S, 3 * S + 1):
        schedule = zero_bubble_h2(S, N)
        assert schedule.num_ticks == 3 * N + S - 1
        assert simulate(schedule).inner_bubble == 0
        assert (schedule.facts().in_flight <= 2 * S - 1).all()


@pytest.mark.parametrize("D", [1, 2, 3, 4, 8])
def test_v_is_full_at_the_memory_of_1f1b(D):
    """6 N units of work a device and D - 1 to reach the last; 1F1B keeps D activations of twice the size."""
    for N in (2 * D, 3 * D + 1):
        schedule = zero_bubble_v(2 * D, N)
        assert schedule.num_ticks == 6 * N + D - 1
        assert schedule.device.tolist() == [*range(D), *reversed(range(D))]
        assert (in_flight_of_devices(schedule) <= 2 * D).all()


def in_flight_of_devices(schedule):
    """`[D]`, most microbatches between forward and weight gradient at once, over a device's stages."""
    ticks = np.arange(schedule.num_ticks)[:, None, None]
    first, last = schedule.forward_ticks(), schedule.weight_grad_ticks()
    by_column = ((first <= ticks) & (ticks <= last)).sum(axis=1)  # [T, C]
    return np.array([by_column[:, schedule.device == d].sum(axis=1).max() for d in range(schedule.num_devices)])


def test_v_needs_two_stages_a_device():
    with pytest.raises(ValueError, match="ZB-V must be even, got 5: .* Use 6"):
        zero_bubble_v(5, 8)
