"""2BW's planner, against prices worked out by hand and a search written again."""

import dataclasses
import itertools

import numpy as np
import pytest

from jpipe.solvers import Blocks, Machine, two_bw

BLOCKS = Blocks(
    num_blocks=8,
    seconds={1: 0.010, 2: 0.018, 4: 0.035},
    parameter_bytes=10e6,
    activation_bytes=2e6,
    boundary_bytes=1e5,
)
MACHINE = Machine(num_devices=8, memory_limit=1e12, devices_per_server=4, bandwidth=(1e10, 1e9))


def of(configurations, **fields):
    (one,) = (c for c in configurations if all(getattr(c, name) == value for name, value in fields.items()))
    return one


@pytest.mark.parametrize(
    "schedule,recompute,memory",
    [
        # Width 2, depth 2, microbatches of 2, 16 of them in 64 samples; a stage has 4 blocks:
        # 40 MB of weights, 16 MB of activations a microbatch, 0.2 MB of input.
        ("2bw", False, 2 * 40e6 + 2 * 16e6 + 2 * 0.2e6),
        ("2bw", True, 2 * 40e6 + 16e6 + 2 * 0.2e6),
        ("flush", False, 40e6 + 2 * 16e6 + 2 * 0.2e6),
        ("flush", True, 40e6 + 16e6 + 2 * 0.2e6),
        ("gpipe", False, 40e6 + 16 * 16e6 + 16 * 0.2e6),
        ("gpipe", True, 40e6 + 16e6 + 16 * 0.2e6),
    ],
)
def test_memory_by_hand(schedule, recompute, memory):
    found = two_bw(BLOCKS, MACHINE, 64, schedule=schedule)
    one = of(found, width=2, depth=2, microbatch_size=2, recompute=recompute)
    assert one.num_microbatches == 16
    np.testing.assert_allclose(one.memory_bytes, memory)


def test_seconds_by_hand():
    found = two_bw(BLOCKS, MACHINE, 64)
    one = of(found, width=2, depth=2, microbatch_size=2, recompute=False)
    # Four blocks; a microbatch's input and output, both ways, inside a server.
    np.testing.assert_allclose(one.seconds, 4 * 0.018 + 4 * 0.2e6 / 1e10)
    np.testing.assert_allclose(one.samples_per_second, 4 / one.seconds)
    again = of(found, width=2, depth=2, microbatch_size=2, recompute=True)
    np.testing.assert_allclose(again.seconds, 4 / 3 * 4 * 0.018 + 4 * 0.2e6 / 1e10)
    deep = of(found, width=1, depth=8, microbatch_size=1, recompute=False)
    np.testing.assert_allclose(deep.seconds, 0.010 + 4 * 0.1e6 / 1e9)  # slow links
    slow = dataclasses.replace(MACHINE, bandwidth=(1e6, 1e5))
    wide = of(two_bw(BLOCKS, slow, 64), width=8, microbatch_size=1, recompute=False)
    # The reduction of 80 MB in a ring of 8, hidden under 8 microbatches.
    np.testing.assert_allclose(wide.seconds, 2 * 7 / 8 * 80e6 / 1e5 / 8)


def test_the_best_is_the_best_of_all():
    rng = np.random.default_rng(0)
    for _ in range(100):
        blocks = Blocks(
            num_blocks=int(rng.choice([4, 6, 12])),
            seconds={b: b * float(rng.uniform(0.01, 0.02)) for b in (1, 2, 3)},
            parameter_bytes=float(rng.uniform(1, 20)),
            activation_bytes=float(rng.uniform(1, 20)),
            boundary_bytes=float(rng.uniform(0.1, 1)),
        )
        machine = Machine(6, float(rng.uniform(50, 400)), (1e4, 1e2), devices_per_server=2)
        best = None
        for w, d, (b, t), again in itertools.product(range(1, 7), range(1, 7), blocks.seconds.items(), (1, 4 / 3)):
            m = 24 / (w * b)
            if w * d > 6 or blocks.num_blocks % d or m != int(m) or m < d:
                continue
            weights = blocks.num_blocks * blocks.parameter_bytes / d
            tot, a = blocks.activation_bytes * b, blocks.boundary_bytes * b
            tot *= blocks.num_blocks
            if 2 * weights + (d if again == 1 else 1) * tot / d + d * a > (machine.memory_limit):
                continue
            links = [1e4 if n < 2 else 1e2 for n in (d, w)]
            time = max(
                again * t * blocks.num_blocks / d + (4 * a / links[0]) * (d > 1),
                2 * (w - 1) / w * weights / links[1] / m,
            )
            best = max(best or 0.0, w * b / time)
        if best is None:
            with pytest.raises(ValueError, match="no configuration fits: the least"):
                two_bw(blocks, machine, 24)
            continue
        found = two_bw(blocks, machine, 24)
        np.testing.assert_allclose(found[0].samples_per_second, best)
        speeds = [c.samples_per_second for c in found]
        assert speeds == sorted(speeds, reverse=True)
        assert all(c.memory_bytes <= machine.memory_limit for c in found)


def test_less_memory_means_deeper_or_recomputed():
    """GPipe does not fit where 2BW does, and flushing needs less still (paper, figure 7)."""
    limit = dataclasses.replace(MACHINE, memory_limit=60e6)
    best = two_bw(BLOCKS, limit, 64)[0]
    assert best.depth > 1
    smallest = {
        schedule: min(
            c.memory_bytes for c in two_bw(BLOCKS, MACHINE, 64, schedule=schedule) if c.depth == 8 and not c.recompute
        )
        for schedule in ("2bw", "flush", "gpipe")
    }
    assert smallest["flush"] < smallest["2bw"] < smallest["gpipe"]


def test_wrong_input():
    with pytest.raises(ValueError, match="`schedule` must be one of 2bw, flush, gpipe"):
        two_bw(BLOCKS, MACHINE, 64, schedule="pipedream")
    with pytest.raises(ValueError, match=r"no microbatch size of \[2, 4\] divides the batch of 7"):
        two_bw(
            dataclasses.replace(BLOCKS, seconds={2: 1.0, 4: 1.0}),
            MACHINE,
            7,
        )
    with pytest.raises(ValueError, match=r"least memory.* is \d\S* bytes.*Use more"):
        two_bw(BLOCKS, dataclasses.replace(MACHINE, memory_limit=1.0), 64)
