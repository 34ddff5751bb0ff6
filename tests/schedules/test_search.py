"""What `search` finds: never worse than a schedule with a name, never better than its bound, never over the limit."""

import functools
import itertools
import math

import numpy as np
import pytest

from jpipe import schedules
from jpipe._table.text import cell_rows
from jpipe.schedules import search
from jpipe.simulate import Costs, simulate

pytestmark = pytest.mark.filterwarnings("ignore:.*with num_microbatches")
RNG = np.random.default_rng(0)
IRREGULAR = [
    (Costs(*RNG.uniform(0.3, 2.0, (3, S)), transfer=float(RNG.uniform(0, 0.5))), S, N)
    for S, N in ((2, 3), (3, 7), (4, 8))
]


def memory_of(schedule, activations):
    """`[D]`, counted cell by cell from the table."""
    S = schedule.num_stages
    activations = np.broadcast_to(activations, S)
    held, most = np.zeros((2, schedule.num_devices))
    for row in cell_rows(schedule)[1:]:  # the text form, which has tests of its own
        for letter in "FW" if schedule.splits_backward else "FB":
            sign = 1 if letter == "F" else 0
            for c, cell in enumerate(row):
                held[schedule.device[c]] += (
                    sign * activations[schedule.stage[c]] * (sum(part.startswith(letter) for part in cell.split(",")))
                )
        most = np.maximum(most, held)
        last = "W" if schedule.splits_backward else "B"
        for c, cell in enumerate(row):
            held[schedule.device[c]] -= activations[schedule.stage[c]] * (
                sum(part.startswith(last) for part in cell.split(","))
            )
    return most


@pytest.mark.parametrize("mode", ["lockstep", "dependencies"])
@pytest.mark.parametrize("limit", [1, 3, 4, 7, math.inf])
@pytest.mark.parametrize("costs,S,N", IRREGULAR)
@pytest.mark.sampled(9)
def test_no_schedule_with_a_name_is_better(costs, S, N, limit, mode):
    found = search(costs, N, limit, mode=mode)
    assert found.schedule.synchronous
    np.testing.assert_array_equal(memory_of(found.schedule, 1.0), found.memory)
    assert (found.memory <= limit).all()
    price = simulate(found.schedule, costs, mode).makespan
    np.testing.assert_allclose(found.makespan, price)
    assert found.bound <= found.makespan * (1 + 1e-9)
    rivals = [
        schedules.gpipe(S, N),
        schedules.one_f_one_b(S, N),
        schedules.one_f_one_b(S, N, ticks="unit"),
        schedules.zero_bubble_h1(S, N),
        schedules.zero_bubble_h2(S, N),
    ]
    for rival in rivals:
        if memory_of(rival, 1.0).max() <= limit:
            assert found.makespan <= simulate(rival, costs, mode).makespan + 1e-9


@pytest.mark.exhaustive
@pytest.mark.parametrize("limit", [4, 6, 8, math.inf])
@pytest.mark.sampled(4)
def test_two_stages_a_device(limit):
    found = search(Costs(), 8, limit, num_stages=8, num_devices=4)
    assert (found.memory <= limit).all()
    for rival in (schedules.interleaved(8, 8), schedules.zero_bubble_v(8, 8)):
        if memory_of(rival, 1.0).max() <= limit:
            assert found.makespan <= simulate(rival).makespan
    if limit >= 8:
        assert found.makespan == found.bound == 51


def optimum(costs: Costs, S: int, N: int) -> float:
    """The least makespan of all orders on S devices, each operation as early as it can; split backwards, no limit."""
    length = costs.of_stages(S)
    kinds = list(length)

    @functools.cache
    def rest(done, free, ends):
        """The best end from here on; done[s] counts (F, B, W), ends holds what others still wait for."""
        ends_ = dict(ends)
        best = math.inf
        for s, k in itertools.product(range(S), range(3)):
            m = done[s][k]
            if m == N or (k and done[s][k - 1] <= m):
                continue
            needs = [("forward", s - 1)] if k == 0 and s else []
            if k == 1:
                needs = [("forward", s)] + [("backward", s + 1)] * (s < S - 1)
            if k == 2:
                needs = [("backward", s)]
            if any((kind, r, m) not in ends_ for kind, r in needs):
                continue
            way = costs.gradient_transfer if k else costs.transfer
            start = max(
                free[s],
                *(ends_[kind, r, m] + way * (r != s) for kind, r in needs),
                0.0,
            )
            end = start + length[kinds[k]][s]
            after = [list(counts) for counts in done]
            after[s][k] += 1
            found = rest(
                tuple(map(tuple, after)),
                tuple(end if r == s else f for r, f in enumerate(free)),
                tuple(sorted({**ends_, (kinds[k], s, m): end}.items())),
            )
            best = min(best, found)
        return max(free) if best == math.inf else best

    return rest(((0, 0, 0),) * S, (0.0,) * S, ())


@pytest.mark.parametrize("seed", range(4))
def test_against_every_order(seed):
    rng = np.random.default_rng(seed)
    there, back = map(float, rng.integers(0, 3, 2))
    costs = Costs(*rng.integers(1, 5, (3, 2)), there, back)
    best = optimum(costs, 2, 2)
    found = search(costs, 2, mode="dependencies")
    assert found.bound <= best + 1e-9
    assert best - 1e-9 <= found.makespan <= 1.1 * best


def test_activations_of_unlike_stages():
    sizes = np.array([4.0, 1.0, 1.0])
    found = search(Costs(), 6, 8.0, activations=sizes)
    np.testing.assert_array_equal(memory_of(found.schedule, sizes), found.memory)
    assert found.memory.max() <= 8
    assert found.makespan < search(Costs(), 6, 4.0, activations=sizes).makespan


def test_a_placement_over_the_limit_is_left_out():
    """Dealt in turn, device 0 would keep 8; as a V both devices keep 5."""
    found = search(Costs(), 4, 6, activations=[4, 1, 4, 1], num_devices=2)
    assert found.schedule.device.tolist() == [0, 1, 1, 0]
    assert found.memory.max() <= 6


def test_wrong_input():
    with pytest.raises(ValueError, match="agree on the number of stages, got none"):
        search(Costs(), 4)
    with pytest.raises(ValueError, match=r"agree on the number of stages, got \[2, 3\]"):
        search(Costs(forward=[1, 2]), 4, num_stages=3)
    with pytest.raises(ValueError, match="must divide the 4 stages, got 3"):
        search(Costs(), 4, num_stages=4, num_devices=3)
    with pytest.raises(ValueError, match="`memory_limit` must be at least 2, got 1"):
        search(Costs(), 4, 1, num_stages=4, num_devices=2)
    with pytest.raises(ValueError, match="`num_microbatches` must be an integer"):
        search(Costs(), 0, num_stages=2)
