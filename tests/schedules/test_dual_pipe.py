"""DualPipe-V, and tables in which both passes of a tick are of different microbatches."""

import itertools

import numpy as np
import pytest

from jpipe.schedule import IDLE
from jpipe.schedules import dual_pipe_v, interleaved, one_f_one_b, zero_bubble_v
from jpipe.simulate import Costs, simulate


def makespan_of_cells(schedule, length, both):
    """Devices that run their ticks as wholes, each as soon as what it reads is there.

    Args:
      schedule: the table.
      length: kind -> the time of an operation.
      both: the time of a tick that has a forward and a backward.
    """
    kinds = ("forward", "backward", "weight_grad")
    end, free = {}, np.zeros(schedule.num_devices)
    for t, d in itertools.product(range(schedule.num_ticks), range(schedule.num_devices)):
        operations = [
            (kind, int(schedule.stage[c]), int(getattr(schedule, kind)[t, c]))
            for kind in kinds
            for c in np.flatnonzero(schedule.device == d)
            if getattr(schedule, kind)[t, c] != IDLE
        ]
        if not operations:
            continue
        here = {kind for kind, *_ in operations}
        start = free[d]
        for kind, s, m in operations:
            sources = {"forward": [("forward", s - 1)], "backward": [("forward", s), ("backward", s + 1)]}
            start = max(start, *(end.get((*source, m), 0.0) for source in sources.get(kind, [("backward", s)])))
        seconds = both if {"forward", "backward"} <= here else sum(length[kind] for kind, *_ in operations)
        free[d] = start + seconds
        end |= {operation: free[d] for operation in operations}
    return free.max()


@pytest.mark.parametrize("D", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("F", "B", "W", "both"), [(1, 1, 1, 2.5), (2, 2, 1, 4), (1, 1, 0.5, 2)])
def test_the_bubble_of_the_paper(D, F, B, W, both):
    """(D - 1) (P + B - 3 W) with B both gradients and P = F + B, besides N forwards and backwards of two stages.

    It is exact where an input gradient takes as long as a forward.
    """
    for N in (2 * D, 2 * D + 1, 5 * D):
        schedule = dual_pipe_v(2 * D, N)
        length = {"forward": F, "backward": B, "weight_grad": W}
        in_order = makespan_of_cells(schedule, length, F + B + W)
        assert in_order == 2 * N * (F + B + W) + (D - 1) * (F + 2 * (B + W) - 3 * W)
        assert makespan_of_cells(schedule, length, both) <= in_order


@pytest.mark.parametrize(("D", "N", "golden"), [(2, 4, 26), (4, 10, 66), (4, 16, 102)])
def test_golden_makespans(D, N, golden):
    """Of DualPipe on 2 D devices for 2 N microbatches, half of them in each direction."""
    length = {"forward": 1, "backward": 1, "weight_grad": 1}
    assert makespan_of_cells(dual_pipe_v(2 * D, N), length, 3) == golden


@pytest.mark.parametrize("D", [2, 3, 4, 8])
def test_ticks_and_memory(D):
    for N in (2 * D, 3 * D + 1):
        schedule = dual_pipe_v(2 * D, N)
        assert schedule.num_ticks == 2 * N + 5 * D - 2
        assert schedule.device.tolist() == [*range(D), *reversed(range(D))]
        assert schedule.facts().in_flight.tolist() == [*range(2 * D, 0, -1)]


@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_both_passes_are_of_different_operations(num_stages):
    """So the collectives of one can lie under the compute of the other."""
    schedule = dual_pipe_v(num_stages, 4 * num_stages)
    for t, d in np.ndindex(schedule.num_ticks, schedule.num_devices):
        on = schedule.device == d
        assert not ((schedule.forward[t, on] == schedule.backward[t, on]) & (schedule.forward[t, on] != IDLE)).any()
    tables = one_f_one_b(num_stages, 8, ticks="overlapped"), interleaved(num_stages, 8, ticks="overlapped")
    for table in tables:
        assert not ((table.forward == table.backward) & (table.forward != IDLE)).any()
        paired = one_f_one_b(num_stages, 8) if table.name == "one_f_one_b" else interleaved(num_stages, 8)
        assert ((paired.forward == paired.backward) & (paired.forward != IDLE)).any()
        assert table.num_ticks == paired.num_ticks + 1
        assert (table.facts().in_flight <= paired.facts().in_flight + 1).all()


def exposed_by_hand(schedule, compute, exchange, sums):
    """`[T, D]`: the longer of what computes and of what each pass needs by itself, less what computes; and all sums."""
    exposed = np.zeros((schedule.num_ticks, schedule.num_devices))
    for t, d in np.ndindex(exposed.shape):
        on = np.flatnonzero(schedule.device == d)
        forward = [c for c in on if schedule.forward[t, c] != IDLE]
        backward = [c for c in on if schedule.backward[t, c] != IDLE]
        weight = [c for c in on if schedule.splits_backward and schedule.weight_grad[t, c] != IDLE]
        f = compute[0] * len(forward)
        whole = compute[1] + (0 if schedule.splits_backward else compute[2])
        b = whole * len(backward) + compute[2] * len(weight)
        first, second = exchange * len(forward), exchange * len(backward)
        if any(schedule.forward[t, c] == schedule.backward[t, c] for c in forward):
            least = f + b + first + second  # one after the other
        else:
            least = max(f + b, f + first, b + second, first + second)
        exposed[t, d] = least - f - b + sums[0] * len(forward) + sums[1] * len(backward) + sums[2] * len(weight)
    return exposed


@pytest.mark.parametrize("exchange, sums", [(0.0, 0.0), (0.4, 0.0), (1.0, 0.3), (2.5, 0.0), (0.0, 0.3)])
@pytest.mark.parametrize(
    "schedule",
    [
        one_f_one_b(3, 6),
        one_f_one_b(3, 6, ticks="overlapped"),
        one_f_one_b(3, 6, ticks="unit"),
        interleaved(4, 6, ticks="overlapped"),
        zero_bubble_v(4, 6),
        dual_pipe_v(4, 6),
    ],
    ids=lambda schedule: f"{schedule.name} of {schedule.num_ticks} ticks",
)
def test_exchanges_lie_under_the_other_pass(schedule, exchange, sums):
    compute, sums = (1.0, 1.2, 0.7), (sums, 2 * sums, 3 * sums if schedule.splits_backward else 0.0)
    given = dict(zip(("sums", "gradient_sums", "weight_sums"), sums))
    timing = simulate(schedule, Costs(*compute, exchange=exchange, **given))
    work = np.zeros((schedule.num_ticks, schedule.num_devices))
    for kind, seconds in zip(("forward", "backward", "weight_grad"), compute):
        cells = schedule.backward if kind == "weight_grad" and not schedule.splits_backward else getattr(schedule, kind)
        for t, c in np.argwhere(cells != IDLE):
            work[t, schedule.device[c]] += seconds
    want = (work + exposed_by_hand(schedule, compute, exchange, sums)).max(axis=1).sum()
    np.testing.assert_allclose(timing.makespan, want)
    runs = schedule.num_microbatches * np.bincount(schedule.device)
    np.testing.assert_allclose(timing.exchange, runs * (2 * exchange + sum(sums)))
    np.testing.assert_allclose(timing.communicating, want - work.max(axis=1).sum(), atol=1e-9)


def test_who_is_fastest_depends_on_the_exchanges():
    """Four devices; a stage of 8 computes 1 in each pass, one of 4 twice as long."""

    def makespan(schedule, exchange):
        times = schedule.num_devices / schedule.num_stages * 2
        return simulate(schedule, Costs(times, times, times, exchange=times * exchange)).makespan

    tables = zero_bubble_v(8, 32), dual_pipe_v(8, 32), interleaved(8, 32, ticks="overlapped"), one_f_one_b(4, 32)
    without, with_exchanges = ([makespan(table, exchange) for table in tables] for exchange in (0.0, 0.5))
    assert without == [195, 204, 201, 210]
    assert with_exchanges == [292, 214.5, 209, 280]


def test_exchanges_are_of_lockstep():
    with pytest.raises(
        ValueError, match='`exchange` and `sums` are costs of devices in lockstep, got mode="dependencies"'
    ):
        simulate(one_f_one_b(2, 4), Costs(exchange=1.0), "dependencies")
    with pytest.raises(ValueError, match="`exchange` must be at least 0"):
        Costs(exchange=-1.0)


def test_counts_that_do_not_fit():
    with pytest.raises(ValueError, match="DualPipe-V must be even, got 5: .* Use 6"):
        dual_pipe_v(5, 8)
    with pytest.raises(ValueError, match="must be at least its 8 stages, got 4: .* Use 8, or zero_bubble_v"):
        dual_pipe_v(8, 4)
