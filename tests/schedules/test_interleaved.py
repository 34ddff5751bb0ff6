import dataclasses
import itertools

import numpy as np
import pytest

from jpipe.schedule import IDLE
from jpipe.schedules import interleaved, one_f_one_b
from jpipe.simulate import Costs, simulate

# devices, chunks, microbatches, makespan in times of a device's whole share (Megatron's order, run and counted)
GOLDEN = [
    (4, 2, 4, 16.5),
    (4, 2, 8, 28.5),
    (4, 2, 16, 52.5),
    (8, 2, 16, 58.5),
    (8, 2, 32, 106.5),
    (4, 4, 4, 14.25),
    (4, 4, 8, 26.25),
    (4, 4, 16, 50.25),
    (8, 4, 16, 53.25),
    (8, 4, 32, 101.25),
]
GRID = list(itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3)))


@pytest.mark.parametrize("D,v,N,golden", GOLDEN)
def test_golden_makespans(D, v, N, golden):
    part = Costs(1 / v, 1 / v, 1 / v)
    for mode in ("lockstep", "dependencies"):
        paired = simulate(interleaved(D * v, N, v), part, mode)
        np.testing.assert_allclose(paired.makespan, golden)
        bubble = (D - 1) / (v * N + D - 1)
        np.testing.assert_allclose(paired.bubble, bubble)
        unit = simulate(interleaved(D * v, N, v, ticks="unit"), part, mode)
        np.testing.assert_allclose(unit.makespan, golden - (D - 1) / v)


@pytest.mark.parametrize("D,v,groups", GRID)
def test_closed_forms(D, v, groups):
    S, N = D * v, D * groups
    paired, unit = interleaved(S, N, v), interleaved(S, N, v, ticks="unit")
    assert paired.num_ticks == v * N + v * D + D - 2
    assert unit.num_ticks == 3 * v * N + 2 * (D - 1)
    assert (unit.device_work() <= 1).all()
    assert (paired.facts().in_flight >= unit.facts().in_flight).all()
    for schedule in (paired, unit):
        np.testing.assert_array_equal(schedule.device, np.arange(S) % D)


@pytest.mark.parametrize("D,v,groups", GRID)
def test_in_flight_of_paired_ticks(D, v, groups):
    """A stage runs D forwards in S ticks and keeps each for as many ticks as in 1F1B."""
    S, N = D * v, D * groups
    for s, in_flight in enumerate(interleaved(S, N, v).facts().in_flight):
        turns, rest = divmod(2 * (S - s) - 1, S)
        assert in_flight == min(N, turns * D + min(rest, D))


@pytest.mark.parametrize("D,v,groups", GRID)
def test_unit_ticks_keep_the_order_of_megatron(D, v, groups):
    """Warm-up forwards, then forward and backward in turn; chunks in groups of D microbatches."""
    N = D * groups
    schedule = interleaved(D * v, N, v, ticks="unit")
    for d in range(D):
        found = {"forward": [], "backward": []}
        order = ""
        for t in range(schedule.num_ticks):
            for kind, seen in found.items():
                for c in np.flatnonzero(schedule.device == d).tolist():
                    if getattr(schedule, kind)[t, c] != IDLE:
                        seen.append((c // D, int(getattr(schedule, kind)[t, c])))
                        order += kind[0]
        count = v * N
        units = [((k % (D * v)) // D, k // (D * v) * D + k % D) for k in range(count)]
        assert found["forward"] == units
        assert found["backward"] == [(v - 1 - chunk, m) for chunk, m in units]
        warm = min(2 * (D - 1 - d) + (v - 1) * D, count)
        steady = count - warm
        assert order == "f" * warm + "fb" * steady + "b" * warm


@pytest.mark.parametrize("ticks", ["paired", "unit"])
def test_one_chunk_is_one_f_one_b_in_time(ticks):
    for D, N in ((2, 4), (4, 8)):
        one = interleaved(D, N, 1, ticks=ticks).facts()
        assert one.makespan == one_f_one_b(D, N, ticks=ticks).facts().makespan


def test_one_chunk_in_paired_ticks_is_one_f_one_b():
    for D, N in ((1, 1), (2, 4), (4, 8)):
        one, plain = interleaved(D, N, 1), one_f_one_b(D, N)
        assert one == dataclasses.replace(plain, name="interleaved")


def test_wrong_input():
    with pytest.raises(
        ValueError,
        match="got 5 stages and 2 chunks: .*not devices.* Use 4 or 6 stages",
    ):
        interleaved(5, 4)
    with pytest.raises(ValueError, match="got 1 stages and 2 chunks: .* Use 2 stages"):
        interleaved(1, 4)
    with pytest.raises(ValueError, match="multiple of its 4 devices, got 6: 8 stages .* Use 8"):
        interleaved(8, 6)
    with pytest.raises(ValueError, match="`num_chunks` must be an integer of at least"):
        interleaved(8, 8, num_chunks=0)
    with pytest.raises(ValueError, match="'unit' or 'overlapped', got 'half'"):
        interleaved(8, 8, ticks="half")
